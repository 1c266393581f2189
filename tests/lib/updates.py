"""Helpers of tests/optim/test_optim.py that other tests use too."""


# ---- the copy ----------------------------------------------------------------------------------

BF16 = "train.dtype=bfloat16"


# ---- the norm ----------------------------------------------------------------------------------

NARROW = "optim.gradient_dtype=bfloat16"


def copied(engine):
    return {
        group: {name: engine_part.tensor.clone() for name, engine_part in parts.items()}
        for group, parts in engine.state().items()
    }
