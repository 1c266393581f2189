"""log.find_nan: which tensor was the first that is not finite, and that nothing else changes."""

import logging
import re

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
from test_engine import make_batches, make_engine, objective_of, train, weights_of

FIND = "log.find_nan=yes"


class _Spoilt(torch.autograd.Function):
    """The same numbers, with another gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0


def spoil(engine, name, how):
    """Let what the module ``name`` computes be infinite, or the gradient that it is given."""
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


@pytest.mark.parametrize("activation", ["none", "full"])
@pytest.mark.parametrize(
    ("name", "how", "says"),
    [
        (
            "layers.1.attn",
            "forward",
            "what layers.1.attn gives, behind what layers.1.attn.wo gives",
        ),
        (
            "layers.0.moe",
            "forward",
            "what layers.0.moe gives, behind what layers.0.moe.experts gives",
        ),
        (
            "layers.1.attn.wo",
            "gradient",
            "the gradient of what layers.0 gives, behind the gradient of what layers.1.attn gives",
        ),
        (None, "weight", "the weight layers.1.moe.experts.w_down"),
    ],
)
def test_the_first_tensor_is_named(name, how, says, activation, caplog):
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


def test_what_is_finite_the_second_time_is_said_to_be(monkeypatch, caplog):
    engine = make_engine(FIND)
    whole, seen = engine.fsdp.gradient_norm, []

    def once():
        seen.append(whole())
        return torch.tensor(torch.inf) if len(seen) == 1 else seen[-1]

    monkeypatch.setattr(engine.fsdp, "gradient_norm", once)
    with caplog.at_level(logging.WARNING, "moetrain"):
        assert step(engine).skipped
    (said,) = said_of(caplog)
    assert said.endswith("computed again, all of them are finite")


def test_a_run_goes_on_with_the_same_bits(caplog):
    found = []
    for words in ([], [FIND]):
        engine = make_engine(*words)
        train(engine, range(2))
        member = engine.fsdp.members["layers.0.moe.experts.w_down"].local
        kept = member.clone()
        member.view(-1)[0] = torch.nan
        assert step(engine).skipped
        member.copy_(kept)
        found.append((train(engine, range(2, 4)), weights_of(engine)))
        assert len(said_of(caplog)) == len(words)
        assert engine._given == []
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


def test_the_rank_is_named():
    for words in ([], ["parallel.ep=2", "moe.dispatcher=alltoall"]):
        for skipped, said in spawn(2, spoilt_on_one_rank, [*words, "train.micro_batch_size=4"]):
            assert skipped
            assert re.search("the first is what layers.1.attn gives, .*, on rank 1$", said[0])
