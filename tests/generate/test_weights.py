"""Weights go from a sharded trainer into a generator: exact on every mesh, in place, few calls."""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from moetrain.generate.engine import Generator
from moetrain.generate.request import Request, SamplingParams
from moetrain.generate.weights import WeightUpdate, replica
from moetrain.kernels.experts.deepep import disconnect
from moetrain.models.transformer import Transformer
from moetrain.parallel import apply
from moetrain.parallel.apply import dispatcher_of
from moetrain.parallel.world import join_world
from moetrain.train.engine import Engine
from tests.lib import fake_deep_ep
from tests.lib.architectures import make_architecture
from tests.lib.deepep_layers import use_fake
from tests.lib.distributed import spawn
from tests.lib.engines import DENSE, make_engine, train
from tests.lib.weight_moves import (
    UGLY,
    check_values,
    follow,
    requests,
    rows_of,
    rows_of_engine,
    tokens_of,
    whole_model,
)

SCRIPTS = Path(__file__).parents[2] / "scripts"
LAYOUTS = {
    "dp": ["parallel.dp_shard=4"],
    "hsdp": ["parallel.dp_replicate=2"],
    "ep": ["parallel.ep=4"],
    "ep+efsdp": ["parallel.ep=2"],
    "dp+tp": ["parallel.tp=2"],
    "tp": ["parallel.tp=4", "model.num_kv_heads=4"],
    "dp+tp+ep": ["parallel.tp=2", "parallel.ep=2"],
    "hsdp+tp+ep": ["parallel.dp_replicate=2", "parallel.tp=2", "parallel.ep=2"],
    "pp": ["parallel.pp=2"],
    "pp+ep": ["parallel.pp=2", "parallel.ep=2"],
}
BIASED = make_architecture(
    family="llama",
    vocab_size=50,
    hidden_size=20,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=14,
    max_positions=64,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tie_embeddings=True,
)


def engine_of(words, *more):
    return make_engine(*UGLY, "model.init_std=0.2", *words, *more, micro=rows_of(words))


def biased_engine(words):
    dense = [word for word in words if "model" not in word]
    micro = rows_of(words)
    engine = make_engine(*UGLY, "model.init_std=0.2", *dense, base=DENSE, micro=micro)
    return Engine(engine.config, BIASED, join_world(engine.config, BIASED))


def follow_layouts(layouts):
    counts = {name: follow(engine_of(words)) for name, words in layouts.items()}
    counts["bf16"] = follow(engine_of(layouts["ep+efsdp"], "train.dtype=bfloat16"), tokens=False)
    for words in (layouts["dp"], layouts["dp+tp"], layouts["hsdp"], layouts["pp"]):
        follow(biased_engine(words))
    return counts


@pytest.mark.tier("long")
def test_a_generator_follows_a_trainer_on_every_mesh():
    for counts in spawn(4, follow_layouts, LAYOUTS, timeout=200):
        # Two blocks, embedding and head each gather once; with sharded experts each block also
        # gathers both of its experts' matrices.
        assert counts == {
            "dp": 4 + 4,
            "hsdp": 4 + 4,
            "ep": 4,
            "ep+efsdp": 4 + 4,
            "dp+tp": 4 + 4,
            "tp": 4 + 4,
            "dp+tp+ep": 4 + 4,
            "hsdp+tp+ep": 4,
            "bf16": 4 + 4,
            # One call per block, and an end; then all 27 tensors go from their owner to the other
            # rank.
            "pp": 2 + 2 + 27,
            "pp+ep": 2 + 27,
        }


def follow_on_gpus(layouts, words):
    """In bf16, check that a generator's weights equal the trainer's gathered ones to the bit."""
    return {
        name: follow(engine_of(layout, *words, "train.dtype=bfloat16"), tokens=False)
        for name, layout in layouts.items()
    }


@pytest.mark.gpu("world")
@pytest.mark.parametrize("world", [2, 4])
def test_a_generator_follows_a_trainer_on_gpus(world):
    on_two = {name: [f"parallel.{name}=2"] for name in ("dp_shard", "tp", "ep", "pp")}
    layouts = {2: on_two, 4: LAYOUTS}[world]
    words = ["train.device=cuda", "kernels.attention=reference", "compile.enabled=no"]
    for counts in spawn(world, follow_on_gpus, layouts, words, device_type="cuda", timeout=300):
        assert counts.keys() == layouts.keys()
        assert all(counts.values())


def test_one_process_has_all_there_is():
    for engine in (engine_of(["parallel.tp=1"]), biased_engine([])):
        assert follow(engine) == 0


def other_generators():
    """Update a generator with all experts on every rank; refuse other architectures."""
    engine = engine_of(LAYOUTS["dp+tp+ep"])
    train(engine, [1], rows_of_engine(engine))
    generator = Generator(Transformer(engine.arch, moe=engine.config.moe))
    WeightUpdate(engine, generator)()
    check_values(engine, generator.model, None)
    assert tokens_of(generator) == tokens_of(Generator(whole_model(engine)))
    with pytest.raises(ValueError, match=r"differ in parameters: .*bias"):
        WeightUpdate(engine, Generator(Transformer(BIASED)))
    sizes = {"vocab_size": engine.arch.vocab_size + 1}
    larger = Transformer(engine.arch.model_copy(update=sizes), moe=engine.config.moe)
    with pytest.raises(ValueError, match=r"weight is \[51, 24\], and the engine's \[50, 24\]"):
        WeightUpdate(engine, Generator(larger))


def test_weight_update_takes_all_experts_and_refuses_other_models():
    spawn(4, other_generators, timeout=180)


def continue_over_an_update():
    """Run a completion across an update, with the old and then the new weights."""
    engine = engine_of(LAYOUTS["ep"])
    model, experts = replica(engine)
    assert dispatcher_of(model) is dispatcher_of(engine.model)
    generator = Generator(model, experts=experts)
    update = WeightUpdate(engine, generator)
    update()
    request = requests(dist.get_rank())[0]
    generator.submit(request)
    completions = [generator.step()[0] for _ in range(5)]
    train(engine, [1], rows_of_engine(engine))
    update()
    while generator.goes_on(generator.is_busy):
        generator.step()
    fresh = Generator(whole_model(engine))
    completion = completions[0]
    rest = SamplingParams(max_tokens=7, temperature=0)
    prompt = (*request.tokens, *completion.tokens[:5])
    ((expected,),) = fresh.generate([Request("rest", prompt, rest)])
    assert completion.tokens[5:] == expected.tokens
    assert completion.versions == [1] * 5 + [2] * 7


def test_completions_under_way_go_on_with_the_new_weights():
    spawn(4, continue_over_an_update, timeout=180)


def generate_beside_static_buffers():
    """Generate more tokens at once than training has buffers for, with uneven routing."""
    use_fake()
    apply.why_not = lambda *_, **__: None
    words = ["parallel.ep=2", "moe.dispatch_mode=static", "moe.static_capacity=1.0"]
    engine = make_engine(*UGLY, "model.init_std=0.2", *words, micro=1)
    model, experts = replica(engine)
    generator = Generator(model, experts=experts)
    WeightUpdate(engine, generator)()
    long = Request("long", tuple(range(40)) * 2, SamplingParams(max_tokens=3, temperature=0))
    ((found,),) = generator.generate([long])
    ((expected,),) = Generator(whole_model(engine)).generate([long])
    assert found.tokens == expected.tokens
    assert fake_deep_ep.calls["dispatch"] > 0
    assert engine.runner.static is not None
    assert engine.runner.static.static == (12, 24)  # unchanged, for the continuing training
    disconnect()


def test_generation_by_deepep_drops_nothing():
    spawn(2, generate_beside_static_buffers, timeout=180)


def benchmark(results):
    """Run the benchmark's command on this rank without torchrun; return exit code and text."""
    sys.path.insert(0, str(SCRIPTS))
    import bench_update  # scripts/ is no package

    bench_update.launched_place = lambda: SimpleNamespace(world_size=dist.get_world_size())
    sys.argv = ["bench_update.py", "--preset", "debug", "--layers", "2", "--device", "cpu"]
    sys.argv += ["--results", results]
    with redirect_stdout(StringIO()) as text:
        code = bench_update.main()
    return code, text.getvalue()


@pytest.mark.tier("long")
def test_the_benchmark_runs_on_a_cpu(tmp_path):
    results = tmp_path / "results.jsonl"
    (code, text), (other, nothing) = spawn(2, benchmark, str(results), timeout=100)
    assert (code, other, nothing) == (0, 0, "")
    (row,) = map(json.loads, results.read_text().splitlines())
    assert row["addresses"]
    assert row["values"]
    assert row["tokens"]
    assert row["trainer_agrees"] == 1.0
    assert row["collectives"] == 2 + 2  # experts stay in place
    assert 0 < row["bytes_received"] < row["bytes_written"]
    assert "tokens of the new weights: True" in text
