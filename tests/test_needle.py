"""scripts/demo_needle.py at a small size: what ranks that share rows learn, one process recalls."""

import sys
from pathlib import Path

from distributed import spawn

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import demo_needle as demo  # scripts are no package

NEAR = demo.SHORT[0]
FAR = demo.Stage(seq_len=2048, needles=32, rows=1, steps=40, lr=2e-3)


def before_and_after(folder):
    """The shares of needles found at each depth of rows of 2,048 tokens."""
    model = demo.GEOMETRY | {"max_positions": NEAR.seq_len}
    demo.train(NEAR, folder / "near", model)
    near = folder / "near" / "hf"
    return near, demo.accuracy(demo.reaching(near, folder / "before", FAR.seq_len), FAR.seq_len, 2)


def tune(folder, near):
    model = {"path": near, "max_positions": FAR.seq_len, "rope": "yarn"}
    demo.train(FAR, folder, model, cp=2, cp_method="all_gather")
    return demo.accuracy(folder / "hf", FAR.seq_len, 2)


def test_needles_of_rows_that_ranks_shared_are_found(tmp_path):
    ((near, before),) = spawn(1, before_and_after, tmp_path, timeout=300)
    after = spawn(2, tune, tmp_path / "far", near, timeout=300)
    assert sum(before) / len(before) < 0.5
    assert after[0] == after[1]
    assert min(after[0]) == 1.0
