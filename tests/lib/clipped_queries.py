"""Helpers of tests/optim/test_qk_clip.py that other tests use too."""

from moetrain.parallel.world import join_world
from moetrain.train.engine import Engine
from tests.lib.engines import (
    ROWS,
    make_engine,
)
from tests.lib.family_cases import architecture_of

MUON = ["optim.name=muon", "moe.aux_loss_scope=global_batch"]
TAU = 0.02
"""A bound that some heads of small models exceed and others do not."""


def engine_of(case, *words, micro=ROWS, tau=TAU, **changes):
    config = make_engine(*MUON, *words, micro=micro).config
    optim = config.optim.model_copy(update={"muon_qk_clip": tau})
    config = config.model_copy(update={"optim": optim})
    arch = architecture_of(case, **changes)
    return Engine(config, arch, join_world(config, arch))
