"""Helpers of tests/models/families/test_ranks.py that other tests use too."""

import torch

from moetrain.config import (
    Config,
)
from moetrain.train.loop import Trainer
from tests.lib.distributed import compile_by_turns, spawn
from tests.lib.family_cases import (
    ROUTED_CASES,
    architecture_of,
)
from tests.lib.random_models import Drawn, assert_agree, is_refused, run_all

MESHES = {
    2: {
        "dp": {"dp_shard": 2},
        "tp": {"tp": 2},
        "ep": {"dp_shard": 2, "ep": 2},
        "tp+ep": {"tp": 2, "ep": 2},
        "pp": {"pp": 2},
    },
    4: {
        "hsdp+ep": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        "dp+tp+ep": {"dp_shard": 2, "tp": 2, "ep": 4},
        "pp+tp": {"pp": 2, "tp": 2},
    },
}


def drawn(number, world, case, degrees, policy):
    """Return a configuration of a family's model on a mesh, for the machinery of random models."""
    sizes = architecture_of(case, num_experts=8).model_dump()
    is_routed, rows = case in ROUTED_CASES, 4
    own = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    words = {
        "data.seq_len": 11,
        "train.global_batch_size": rows,
        "activation.policy": policy,
    }
    if is_routed:
        words |= {"moe.aux_loss_coef": 0.1, "moe.aux_loss_scope": "global_batch"}
        words |= {"moe.bias_update_rate": 0.01}
    axes = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "tp", "ep"), 1) | degrees
    axes["ep"] = axes["ep"] if is_routed else 1
    micro = 2 if "pp" in degrees else rows // own
    return Drawn(
        number=number,
        world=world,
        sizes=sizes,
        words=[f"{key}={value}" for key, value in words.items()],
        mesh=[f"train.micro_batch_size={micro}", *(f"parallel.{k}={n}" for k, n in axes.items())],
        alone=[f"train.micro_batch_size={rows}"],
        rows=rows,
        without_targets=(0,),
        is_packed=True,
        has_pads=bool(number % 2),
        steps=1,  # only gradients and update depend on the family
    )


def check(world, runs, folder, run=run_all):
    """Check that ``world`` ranks answer all ``runs`` as one process does."""
    assert not any(map(is_refused, runs))
    answers = spawn(world, run, runs, str(folder / "running"), timeout=600)[0]
    assert_agree(runs, answers)
    return answers


def fit(words):
    Trainer(Config.load(None, words, environ={})).fit()


def run_on_two_ranks(tmp_path, **more):
    """Train ``tmp_path / "in"`` for two steps into ``tmp_path / "run"``."""
    words = {
        "model.path": tmp_path / "in",
        "data.source": "synthetic",
        "data.seq_len": 16,
        "train.steps": 2,
        "train.micro_batch_size": 1,
        "train.global_batch_size": 2,
        "train.device": "cpu",
        "train.sample_tokens": 0,
        "compile.enabled": "no",
        "checkpoint.save_hf": "yes",
        "output_dir": tmp_path / "run",
    }
    spawn(2, fit, [f"{key}={value}" for key, value in (words | more).items()])


def run_compiled(runs, note):
    """Run each with a fresh compiler: after other sizes it would compile dynamic graphs, slowly."""
    answers = []
    for number, one in enumerate(runs):
        torch.compiler.reset()
        compile_by_turns(one.words, number)
        answers += run_all([one], note) or []
    return answers
