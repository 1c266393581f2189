"""Helpers of tests/optim/test_muon.py that other tests use too."""

import torch

from moetrain.train.objectives import CrossEntropy, Term
from tests.lib.engines import (
    copy_of,
    make_batches,
    train,
)


class Endless(CrossEntropy):
    def terms(self, model, outputs, batch, sizes):
        nan = outputs.hidden_BSD.sum() * torch.nan
        return {**super().terms(model, outputs, batch, sizes), "endless": Term(nan)}


def check_a_skipped_step_changes_nothing(engine):
    train(engine, range(1))
    before = copy_of(engine.state())
    engine.forward_backward(make_batches(1), Endless())
    assert engine.step(0.1).skipped
    for group, parts in copy_of(engine.state()).items():
        for name, x in parts.items():
            assert torch.equal(x, before[group][name]), name
