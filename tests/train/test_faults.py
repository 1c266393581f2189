"""Silent faults: the first non-finite tensor is named, and a rank with different bits."""

import logging
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moetrain.config import Config
from moetrain.config.sources import RunFailed
from moetrain.parallel.world import join_world
from moetrain.train import faults
from moetrain.train.callbacks import Callback
from moetrain.train.engine import Engine
from moetrain.train.faults import compare_replicas, first_not_finite
from moetrain.train.loop import Trainer
from tests.lib.clipped_queries import engine_of
from tests.lib.distributed import spawn
from tests.lib.engines import (
    DENSE,
    WORDS,
    make_batches,
    make_engine,
    objective_of,
    train,
    weights_of,
)
from tests.lib.family_cases import FAMILY_CASES, architecture_of

FIND = "log.find_nan=yes"


class _Spoilt(torch.autograd.Function):
    """An identity with another gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0


def spoil(engine, name, how):
    """Make the output of the module ``name`` infinite, or the gradient that it gets."""
    module = engine.model.get_submodule(name)
    forward = module.forward

    def spoilt(*args, **kwargs):
        given = forward(*args, **kwargs)
        first, *others = given if isinstance(given, tuple) else (given,)
        first = _Spoilt.apply(first) if how == "gradient" else first * torch.inf
        return (first, *others) if isinstance(given, tuple) else first

    module.forward = spoilt


def step(engine, number=0):
    batches = make_batches(number, rank=0, ranks=1)
    engine.forward_backward(batches, objective_of(engine))
    return engine.step(1e-2)


def said_of(log):
    return [r.getMessage() for r in log.records if "log.find_nan" in r.getMessage()]


@pytest.mark.tier("long")
@pytest.mark.parametrize("activation", ["none", "full"])
@pytest.mark.parametrize(
    ("name", "how", "says"),
    [
        (
            "layers.1.attn",
            "forward",
            "the output of layers.1.attn, after the output of layers.1.attn.wo",
        ),
        (
            "layers.0.moe",
            "forward",
            "the output of layers.0.moe, after the output of layers.0.moe.experts",
        ),
        (
            "layers.1.attn.wo",
            "gradient",
            "the gradient of the output of layers.0, after the gradient of the output of "
            "layers.1.attn",
        ),
        (None, "weight", "the weight layers.1.moe.experts.w_down"),
    ],
)
def test_find_nan_names_the_first_tensor(name, how, says, activation, caplog):
    engine = make_engine(FIND, f"activation.policy={activation}")
    before = weights_of(engine)
    if how == "weight":
        engine.fsdp.members[says.split()[-1]].local.view(-1)[3] = torch.nan
    else:
        spoil(engine, name, how)
    with caplog.at_level(logging.WARNING, "moetrain"):
        assert step(engine).skipped
    (said,) = said_of(caplog)
    assert re.search(rf"not finite: the first is {says}$", said), said
    if how != "weight":
        assert all(torch.equal(before[n], w) for n, w in weights_of(engine).items())


def test_a_gradient_of_a_weight_is_named(monkeypatch, caplog):
    engine = make_engine(FIND)
    (member,) = (m for n, m in engine.fsdp.members.items() if n == "layers.1.attn.wq.weight")
    whole = engine.fsdp.gradient_norm

    def spoilt():
        whole()
        member.local.grad[0, 0] = torch.inf
        return torch.tensor(torch.inf)

    monkeypatch.setattr(engine.fsdp, "gradient_norm", spoilt)
    with caplog.at_level(logging.WARNING, "moetrain"):
        assert step(engine).skipped
    (said,) = said_of(caplog)
    assert said.endswith("the first is the gradient of layers.1.attn.wq.weight")


def test_find_nan_reports_a_repeated_step_that_is_finite(monkeypatch, caplog):
    engine = make_engine(FIND)
    whole, seen = engine.fsdp.gradient_norm, []

    def once():
        seen.append(whole())
        return torch.tensor(torch.inf) if len(seen) == 1 else seen[-1]

    monkeypatch.setattr(engine.fsdp, "gradient_norm", once)
    with caplog.at_level(logging.WARNING, "moetrain"):
        assert step(engine).skipped
    (said,) = said_of(caplog)
    assert said.endswith("when computed again, all are finite")


@pytest.mark.tier("long")
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_of_a_healthy_step_nothing_is_named(case):
    arch = architecture_of(case)
    config = make_engine(FIND, base=WORDS if arch.num_experts else DENSE).config
    engine = Engine(config, arch, join_world(config, arch))
    engine.forward_backward(make_batches(0), objective_of(engine))
    learn = partial(engine.nan_finder.learn_again, engine.learn_now)
    assert first_not_finite(engine.model, engine.fsdp, engine.world, learn) is None


LORA = ["moe.bias_update_rate=0", "lora.rank=4", "lora.dropout=0.3", "lora.targets=*.attn.*"]


@pytest.mark.tier("quick", long=["clip", "more1"])
@pytest.mark.parametrize("more", [[], LORA, ["optim.offload_fraction=0.5"], "clip"])
def test_a_run_goes_on_with_the_same_bits(more, caplog):
    """Dropout draws random numbers, and Muon's clip has recorded the largest scores."""
    found = []
    for words in ([], [FIND]):
        engine = engine_of("gpt_oss", *words) if more == "clip" else make_engine(*words, *more)
        torch.manual_seed(0)
        train(engine, range(2))
        member = engine.fsdp.members["layers.0.moe.experts.w_down"].local
        kept = member.clone()
        member.view(-1)[0] = torch.nan
        assert step(engine).skipped
        member.copy_(kept)
        found.append((train(engine, range(2, 4)), weights_of(engine)))
        assert len(said_of(caplog)) == len(words)
        assert engine.nan_finder is None or engine.nan_finder.passes == []
    (numbers, weights), (same, others) = found
    assert numbers == same
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def spoilt_on_one_rank(words):
    engine, messages = make_engine(*words, FIND), []
    logger = logging.getLogger("moetrain")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    if dist.get_rank() == 1:
        spoil(engine, "layers.1.attn", "forward")
    world = engine.world
    batches = make_batches(0, 4, world.data_rank, world.dims.data_ranks)
    engine.forward_backward(batches, objective_of(engine))
    skipped = bool(engine.step(1e-2).skipped)
    return skipped, [said for said in messages if "log.find_nan" in said]


@pytest.mark.tier("wide")
def test_find_nan_names_the_rank():
    for words in ([], ["parallel.ep=2", "moe.dispatcher=alltoall"]):
        for skipped, said in spawn(2, spoilt_on_one_rank, [*words, "train.micro_batch_size=4"]):
            assert skipped
            assert re.search("the first is the output of layers.1.attn, .*, on rank 1$", said[0])


def spoilt_on_a_stage(words, name, how):
    engine, messages = make_engine(*words, FIND), []
    logging.getLogger("moetrain").addHandler(handler := logging.Handler())
    handler.emit = lambda record: messages.append(record.getMessage())
    if name in dict(engine.model.named_modules()):
        spoil(engine, name, how)
    engine.forward_backward(make_batches(0, 2), objective_of(engine))
    engine.step(1e-2)
    return [said for said in messages if "log.find_nan" in said]


@pytest.mark.tier(
    "wide",
    long=[
        "embed-forward-the output of embed, .*, on rank 0-interleaved_1f1b",
        "layers.0.attn-forward-the output of layers.0.attn, .*, on rank 0-1f1b",
        "layers.0.attn-forward-the output of layers.0.attn, .*, on rank 0-i...",
        "norm-gradient-the gradient of the output of layers.3, .*, on rank 1-i...",
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize(
    ("name", "how", "says"),
    [
        ("layers.0.attn", "forward", "the output of layers.0.attn, .*, on rank 0"),
        ("layers.1.attn", "forward", "the output of layers.1.attn, .*, on rank [01]"),
        ("embed", "forward", "the output of embed, .*, on rank 0"),
        ("norm", "gradient", "the gradient of the output of layers.3, .*, on rank 1"),
        ("layers.1.attn", "gradient", "the gradient of the output of layers.1.attn.wo, .*"),
    ],
)
def test_of_a_pipeline_the_stage_is_named(name, how, says, schedule):
    words = ["train.micro_batch_size=2", "model.num_layers=4", "parallel.pp=2"]
    words.append(f"parallel.pp_schedule={schedule}")
    for said in spawn(2, spoilt_on_a_stage, words, name, how):
        assert re.search(f"the first is {says}$", said[0]), said


# ---- replicas -----------------------------------------------------------------------------------


def spoilt_replica(words, name, victim):
    """Return the messages after steps before and after a bit of a weight changes on one rank."""
    engine = make_engine(*words)
    world, said = engine.world, []
    for is_spoilt in (False, True):
        batch = make_batches(0, 2)[world.data_rank]
        engine.forward_backward([batch], objective_of(engine))
        engine.step(1e-3)
        if is_spoilt and dist.get_rank() == victim:
            engine.fsdp.members[name].local.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        try:
            compare_replicas(engine.fsdp, world)
            said.append("")
        except RunFailed as failed:
            said.append(str(failed))
    return said


@pytest.mark.parametrize(
    ("sums", "named"),
    [
        ([5, 5], []),
        ([5, 7], [0, 1]),
        ([5, 7, 5], [1]),
        ([7, 5, 5], [0]),
        ([5, 6, 7], [0, 1, 2]),
        ([5, 5, 7, 7], [0, 1, 2, 3]),
        ([7, 5, 5, 6, 5], [0, 3]),
    ],
)
def test_ranks_unlike_the_majority_are_named_and_without_one_all(sums, named, monkeypatch):
    """The first rank compares; the others' sums are given."""
    ranks = tuple(range(len(sums)))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group)
    monkeypatch.setattr(faults, "checksum", lambda member: torch.tensor(sums[0]))
    member = SimpleNamespace(layout=SimpleNamespace(replicas=ranks))
    fsdp: Any = SimpleNamespace(members={"x": member}, settle=lambda: None)
    world: Any = SimpleNamespace(gather=lambda mine: [mine, *({"x": (ranks, n)} for n in sums[1:])])
    said = ""
    try:
        compare_replicas(fsdp, world)
    except RunFailed as failed:
        said = str(failed)
    found = re.findall(r"rank (\d+) in 1 weights, such as x", said)
    assert [int(rank) for rank in found] == named


REPLICAS = [
    (
        3,
        "parallel.dp_replicate=3",
        "layers.1.attn.wq.weight",
        "rank 1 in 1 weights, such as layers.1.attn.wq.weight$",
    ),
    (
        2,
        "parallel.dp_replicate=2",
        "norm.weight",
        "rank 0 in 1 weights, such as norm.weight; rank 1 in 1 .*",
    ),
]


@pytest.mark.tier("wide", long=["2-parallel.d..."])
@pytest.mark.parametrize(("world", "layout", "name", "says"), REPLICAS)
def test_a_replica_with_other_bits_is_named(world, layout, name, says):
    words = [layout, "train.micro_batch_size=2", "train.global_batch_size=12"]
    for same, other in spawn(world, spoilt_replica, words, name, 1):
        assert same == ""
        found = re.search("weights of other ranks: (.*). Resume", other)
        assert found is not None
        assert re.search(f"^{says}", found[1]), other


def run_spoilt(words):
    class Spoil(Callback):
        def on_update(self, run):
            if run.step == 3 and dist.get_rank() == 1:
                run.engine.fsdp.members["norm.weight"].local[0] += 1e-3

    trainer = Trainer(Config.load(None, words, environ={}), callbacks=[Spoil()])
    with pytest.raises(RunFailed, match=r"train.compare_replicas: .* rank 1 in .* as norm.weight"):
        trainer.fit()
    return trainer.step


@pytest.mark.tier("long")
def test_a_run_ends_at_the_next_comparison(tmp_path):
    words = ["train.steps=9", "train.compare_replicas=2", "parallel.dp_replicate=2"]
    words += [word for word in WORDS if not word.startswith(("output_dir", "data"))]
    words += [f"output_dir={tmp_path}", "data.source=synthetic", "data.seq_len=12"]
    words += ["train.micro_batch_size=4", "train.eval_interval=0", "model.vocab_size=257"]
    assert spawn(2, run_spoilt, words) == [4, 4]
