"""Helpers of tests/train/test_sample.py that other tests use too."""

from moetrain import Trainer
from moetrain.config import Config
from moetrain.generate import weights


def sample_of(words):
    """Return the sample that a run prints."""
    trainer = Trainer(Config.load(None, words, environ={}), callbacks=[weights.Sampled()])
    trainer.fit()
    return trainer, (trainer.folder / "sample.txt").read_text()


def samples_on_ranks(runs):
    return {name: sample_of(words)[1] for name, words in runs.items()}
