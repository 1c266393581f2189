"""Helpers of tests/train/test_recovery.py that other tests use too."""

import re
from contextlib import suppress

from moetrain.train.callbacks import Callback
from moetrain.train.loop import Trainer


class PowerCut(Exception):
    """Ends a run in the middle, and leaves the files of a killed run."""


class Cut(Callback):
    """Callback that raises PowerCut once step ``until`` is done and saved."""

    def __init__(self, until):
        self.until = until

    def on_step(self, run):
        run.checkpointer.wait()
        if run.step == self.until:
            raise PowerCut


def train(config, until=None):
    """Train until step ``until`` is done, then cut the run off; return the trainer."""
    trainer = Trainer(config, callbacks=[Cut(until)])
    with suppress(PowerCut):
        trainer.fit()
    return trainer


def rank_of(file):
    found = re.search(r"-(\d{5})-", file)
    return found and int(found[1])
