"""Helpers of tests/train/test_checkpoints.py that other tests use too."""

from moetrain.train.metrics import read_metrics


def names(root):
    return sorted(path.name for path in root.iterdir())


def losses(folder):
    rows = read_metrics(folder / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row}
