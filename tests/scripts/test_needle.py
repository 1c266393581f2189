"""scripts/demo_needle.py at a small size: ranks train on shared rows, and one process recalls."""

import sys
from pathlib import Path
from statistics import mean

import pytest
import torch.distributed as dist

from moetrain.train.metrics import read_metrics
from tests.lib.distributed import spawn

SCRIPTS = Path(__file__).parents[2] / "scripts"
METHODS = ("ulysses", "all_gather")
FAR = 512
"""Tokens of a row that ranks share."""


def demo():
    sys.path.insert(0, str(SCRIPTS))
    import demo_needle  # scripts/ is no package

    return demo_needle


def tuned(folder, near, name, **mesh):
    """Return the losses of a fine-tuning on longer rows, and the share of needles found then."""
    far = demo().Stage(seq_len=FAR, needles=24, rows=1, steps=24, lr=1e-3)
    model = {"path": near, "max_positions": far.seq_len, "rope": "yarn"}
    demo().train(far, folder / name, model, **mesh)
    if dist.get_rank():
        return None
    losses = [row["loss"] for row in read_metrics(folder / name / "metrics.jsonl") if "loss" in row]
    return losses, mean(demo().accuracy(folder / name / "hf", far.seq_len, haystacks=2))


def alone(folder, near):
    """Train a model on rows of 64 tokens; return its share in longer ones, and after tuning."""
    first = demo().SHORT[0]._replace(steps=200)
    demo().train(first, near.parent, demo().GEOMETRY | {"max_positions": first.seq_len})
    before = demo().accuracy(demo().reaching(near, folder / "before", FAR), FAR, haystacks=2)
    return mean(before), tuned(folder, near, "alone", cp=1)


def together(folder, near):
    return [tuned(folder, near, name, cp=2, cp_method=name) for name in METHODS]


@pytest.mark.tier("wide")
def test_needles_of_rows_that_ranks_shared_are_found(tmp_path):
    near = tmp_path / "near" / "hf"
    ((before, (losses, found)),) = spawn(1, alone, tmp_path, near, timeout=200)
    assert before < 0.5
    assert found > 0.9
    both, _ = spawn(2, together, tmp_path, near, timeout=200)
    for name, (shared, found) in zip(METHODS, both, strict=True):
        assert found > 0.9, name
        # A model also learns with wrong attention, but its losses show that.
        assert shared == pytest.approx(losses, rel=1e-3), name
