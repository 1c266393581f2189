"""Helpers of tests/generate/test_weights.py that other tests use too."""

import torch
import torch.distributed as dist

from moetrain.generate.engine import Generator
from moetrain.generate.request import Request, SamplingParams
from moetrain.generate.weights import WeightUpdate, _frozen_here, _replica_bytes, replica
from moetrain.models.transformer import Transformer
from tests.lib.architectures import own_part
from tests.lib.dispatched_ops import Ops
from tests.lib.engines import ROWS, train

UGLY = ["model.hidden_size=24", "model.num_heads=4", "model.vocab_size=50"]


def rows_of(words, world=4):
    """Return the micro-batch rows of a rank, with the global batch in one micro-batch."""
    degrees = dict(word.removeprefix("parallel.").split("=") for word in words)
    return ROWS * int(degrees.get("tp", 1)) // world


def whole_model(engine):
    """Return the model of one process with the engine's weights, as the tested reference."""
    model = Transformer(engine.arch, moe=engine.config.moe)
    model.load_state_dict(dict(engine.weights()))
    return model


def requests(rank=0, tokens=12):
    greedy = SamplingParams(max_tokens=tokens, temperature=0)
    drawn = SamplingParams(max_tokens=5, seed=rank, top_k=20)
    return [Request("a", (1, 2, 3 + rank), greedy), Request("b", (7,), drawn)]


def tokens_of(generator, rank=0):
    """Return tokens of sequences that end in the third and in the second page of four tokens."""
    return [c.tokens for (c,) in generator.generate(requests(rank, 6))]


def check_values(engine, model, experts):
    """Check that parameters and buffers of ``model`` equal the engine's, in their own dtypes."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, whole in engine.weights():
        value = found.pop(name)
        rule = engine.stages.rules.get(name)
        used = torch.float32 if rule is None else rule.gather or engine.model.compute_dtype
        assert value.dtype == used
        mine = own_part(experts, whole, value)
        assert torch.equal(value, mine.to(used)), name
    assert not found


def follow(engine, *, tokens=True, versions=2):
    """Update a generator beside ``engine`` while it learns, and check it."""
    rank = dist.get_rank() if dist.get_world_size() > 1 else 0
    model, experts = replica(engine)
    lent = {name for name, _ in model.named_parameters() if _frozen_here(engine, name) is not None}
    own = {name: p for name, p in model.named_parameters() if name not in lent}
    assert sum(p.nbytes for p in own.values()) == _replica_bytes(engine)
    assert (experts is None) == (engine.world.dims.ep == 1)
    page_size = 64 if model.embed.weight.is_cuda else 4
    generator = Generator(model, experts=experts, num_pages=20, page_size=page_size)
    update = WeightUpdate(engine, generator)
    addresses = [p.data_ptr() for p in model.parameters()]
    before = None
    for version in range(1, versions + 1):
        train(engine, [version], rows_of_engine(engine))
        with Ops() as ops:
            update()
        calls = [name for name in ops.names.elements() if name.startswith("c10d.")]
        shared = len(list(engine.weights())) if engine.world.dims.pp > 1 else 0
        assert len(calls) <= 3 * len(engine.fsdp.units) + shared
        check_values(engine, model, experts)
        assert generator.version == version
        if tokens:
            now = tokens_of(generator, rank)
            assert now == tokens_of(Generator(whole_model(engine)), rank)
            assert now != before
            before = now
    update()  # nothing has changed since
    check_values(engine, model, experts)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert generator.pages.num_available == 20
    return len(calls)


def rows_of_engine(engine):
    return ROWS // engine.world.dims.data_ranks
