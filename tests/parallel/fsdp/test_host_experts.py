"""Frozen quantised experts in host memory, loaded to the device block by block."""

import pytest
import torch

from moetrain.cli.train import main
from moetrain.config import Config
from moetrain.kernels.quant.groups import QUANT_FORMATS
from moetrain.models.hf.load import resolve_architecture
from moetrain.parallel.mesh import ParallelDims
from moetrain.train.estimates.memory import RankSizes
from tests.lib.adapters import EVERYTHING, MICRO, adapted
from tests.lib.dispatched_ops import Touches
from tests.lib.distributed import spawn
from tests.lib.engines import make_batches, objective_of, train, weights_of
from tests.lib.estimates import estimate_memory

ROUND = ["model.hidden_size=64", "model.head_dim=32", "model.moe_intermediate_size=32"]
HOSTED = "lora.offload_experts=yes"


def learned(words):
    """Return losses, weights and a fingerprint after two steps, and names of codes on the host."""
    engine = adapted(EVERYTHING, *ROUND, *words)
    hosted = {n for n, m in engine.fsdp.members.items() if m.storage.loads_packed}
    return train(engine, range(2), MICRO), weights_of(engine), engine.fingerprint, hosted


def check_same(mine, theirs):
    (numbers, weights, fingerprint, hosted), (expected, values, other, _) = mine, theirs
    assert numbers == expected
    assert fingerprint == other
    assert all(torch.equal(weights[name], value) for name, value in values.items())
    assert hosted == {name for name in values if ".experts.w_" in name and "lora" not in name}


@pytest.mark.tier("long")
@pytest.mark.parametrize(
    ("name", "policy"), [("float8", "none"), ("mxfp4", "selective"), ("nf4", "full")]
)
def test_offloaded_experts_change_no_bit(name, policy):
    words = [f"lora.base_dtype={name}", f"activation.policy={policy}", "model.num_layers=3"]
    check_same(learned([*words, HOSTED]), learned(words))


def learned_twice(runs):
    return [(learned([*words, HOSTED]), learned(words)) for words in runs]


@pytest.mark.tier("long")
def test_offloaded_experts_on_two_ranks_change_no_bit():
    runs = [["parallel.ep=2"], ["parallel.pp=2"], ["parallel.dp_replicate=2"]]
    for answers in spawn(2, learned_twice, [["lora.base_dtype=nf4", *w] for w in runs]):
        for mine, theirs in answers:
            assert mine[0] == theirs[0]
            assert mine[2] == theirs[2]
            assert all(torch.equal(mine[1][n], x) for n, x in theirs[1].items())
            assert mine[3]


def test_the_next_blocks_codes_come_before_it_runs():
    words = ["lora.base_dtype=nf4", HOSTED, "model.num_layers=4", "activation.policy=full"]
    engine = adapted(EVERYTHING, *ROUND, *words)
    members = engine.fsdp.members.items()
    hosted = [(int(n.split(".")[1]), m.storage) for n, m in members if m.storage.loads_packed]
    call = engine.model.call_block

    def called(block, *inputs):
        touches.ops.append(([*engine.model.layers].index(block), "block"))
        return call(block, *inputs)

    engine.model.call_block = called
    with Touches(storage.bytes for _, storage in hosted) as touches:
        engine.forward_backward(make_batches(0, MICRO)[:1], objective_of(engine))
    seen = [f"block {i}" if op == "block" else hosted[i][0] for i, op in touches.ops]
    # A block has two matrices of experts. When the backward begins, the last two are still loaded.
    assert seen[:12] == [0, 0, 1, 1, "block 0", 2, 2, "block 1", 3, 3, "block 2", "block 3"]
    assert seen[12:] == [1, 1, 0, 0]


def test_memory_estimate_counts_offloaded_experts():
    how = "lora.rank=8 lora.base_dtype=nf4 train.micro_batch_size=1 train.global_batch_size=1"
    sizes = {}
    for hosted in (False, True):
        words = [
            *how.split(),
            "compile.enabled=yes",
            "activation.policy=full",
            f"lora.offload_experts={hosted}",
        ]
        config = Config.load("bench-qwen3-30b-a3b", words, environ={})
        arch = resolve_architecture(config.model)
        dims = ParallelDims.resolve(config.parallel, 1, arch)
        given = config, arch, dims, torch.bfloat16
        sizes[hosted] = estimate_memory(*given), RankSizes.of_ranks(*given)[0].on_host()
    (before, none), (after, host) = sizes[False], sizes[True]
    codes = 48 * 128 * 3 * 768 * 2048 * QUANT_FORMATS["nf4"].bytes_per_element
    assert not none
    assert host["lora.offload_experts"] == pytest.approx(codes)
    assert before.weights - after.weights == pytest.approx(codes)
    block = 128 * 3 * 768 * 2048
    staged = 2 * block * QUANT_FORMATS["nf4"].bytes_per_element
    assert after.gathered - before.gathered == pytest.approx(staged + 2 * block, rel=0.05)
    assert after.total < before.total - 0.8 * codes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lora.rank=8", "lora.offload_experts: True contradicts lora.base_dtype 'auto'; unset it"),
        (
            "lora.rank=8 lora.base_dtype=nf4 model.preset=qwen3-0.6b",
            "lora.offload_experts: True, but qwen3 has no experts; unset it",
        ),
        (
            "lora.rank=8 lora.base_dtype=nf4 launch.nproc=2 train.micro_batch_size=8",
            "lora.offload_experts: yes, but 2 ranks shard the same experts; use parallel.ep 2, or",
        ),
    ],
)
def test_offload_experts_is_refused_in_one_line(words, message, capsys):
    given = [f"--{word}" for word in words.split()]
    given = [part for word in given for part in word.split("=")]
    assert main(["debug", *given, "--lora.offload_experts", "yes", "--dry_run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
