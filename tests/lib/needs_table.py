"""Helpers of tests/config/test_needs.py that other tests use too."""

from moetrain.config import Config, needs
from moetrain.config.sources import leaves

DEFAULTS = dict(leaves(Config().model_dump()))
PROBES = (None, 0, 1, 3, 0.5, True, False, (), ("x",), "x", "constant", "cosine", "wsd", "text")
PROBES += (
    "jsonl",
    "sort",
    "synthetic",
    "auto",
    "none",
    "selective",
    "alltoall",
    "deepep",
    "static",
)
PROBES += (
    "exact",
    "flex",
    "adamw",
    "muon",
    "rollout",
    "current",
    "clip",
    "gspo",
    "reinforce",
    "mask",
    "reinforce_pp",
    "grpo",
    "local",
    "cpu",
    "float32",
    "dpo",
    "kto",
    "simpo",
    "next_token",
    "token",
    "k1",
    "reward",
    "bfloat16",
    "float8",
    "apart",
    "together",
)


def names_of(need):
    return [name for name in DEFAULTS if need.covers(name)]


NEEDS_OF_ONE = [(need, name) for need in needs.NEEDS for name in names_of(need)]
