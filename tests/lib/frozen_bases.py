"""Helpers of tests/kernels/quant/test_float8.py that other tests use too."""

from tests.lib.adapters import (
    BASE,
    MICRO,
)
from tests.lib.engines import weights_of

# Every rank's part of a row consists of whole groups.
ROUND = ["model.hidden_size=64", "model.head_dim=32", "model.moe_intermediate_size=32"]


def merged_of(folder, words):
    """Write an export with adapters that are still zero; return the weights merged with them."""
    from tests.lib.engines import make_engine

    kept = [word for word in BASE if not word.startswith(("model.", "data.path"))]
    words = [
        f"model.path={folder / 'base'}",
        "data.source=synthetic",
        "checkpoint.hf_dtype=float32",
        *words,
    ]
    engine = make_engine(*words, base=kept, micro=MICRO)
    engine.save_hf(folder / "saved", dtype="float32")
    return weights_of(engine, merged=True)
