"""Every family of mixtures of experts on several ranks: meshes, compilation, runs, generation."""

import itertools
import os
import zlib

import pytest
import torch
from safetensors.torch import load_file

from moetrain.cli.checkpoint import main
from moetrain.models.hf.load import load_hf
from moetrain.parallel.world import join_world
from moetrain.train.engine import Engine
from tests.lib.checkpoints import tensors_of
from tests.lib.distributed import spawn
from tests.lib.engines import DENSE, WORDS, make_engine
from tests.lib.family_cases import (
    EXTRA,
    FAMILY_CASES,
    LINEAR_CASES,
    ROUTED_CASES,
    architecture_of,
    save_reference,
)
from tests.lib.family_ranks import MESHES, check, drawn, run_compiled, run_on_two_ranks
from tests.lib.weight_moves import UGLY, follow, rows_of

LIKE = {
    "dots1": "glm4_moe",
    "olmoe": "minimax_m2",
    "qwen3_5_moe_text": "qwen3_next",
    "qwen3_5_text": "qwen3_next",
    "deepseek_v2": "deepseek_v3",
    "glm4_moe_lite": "deepseek_v3",
    "solar_open": "glm4_moe",
    "hy_v3": "glm4_moe",
    "sarvam_moe": "glm4_moe",
    "sarvam_mla": "deepseek_v3",
    "seed_oss": "glm4_moe",
}
"""Families whose blocks run only the code of another family: the compiler sees the same."""
ONLY = os.environ.get("ONLY_FAMILY")
"""The one family to test on meshes, for who writes it; None: all."""


def is_tested(case):
    return ONLY in (None, case)


def meshes_of(world, number, case):
    """Return names and degrees of the meshes for a family, the ``number``-th.

    Two axes without tensor parallelism concern no family in particular, so every other family tests
    one of two such meshes. Without experts some meshes coincide. A family without its own code
    tests one mesh: its rules are those of its blocks' parts.
    """
    meshes, is_routed = dict(MESHES[world]), case in ROUTED_CASES
    if world == 4:
        del meshes[("hsdp+ep", "pp+tp")[number % 2]]
    if case in LIKE:
        meshes = {name: d for name, d in meshes.items() if name == ("tp+ep" if is_routed else "tp")}
    return [(name, d) for name, d in meshes.items() if is_routed or name not in ("ep", "tp+ep")]


@pytest.mark.tier("long")
@pytest.mark.parametrize("world", MESHES)
def test_every_mesh_gives_the_single_process_answer(world, tmp_path):
    policies = itertools.cycle(["none", "full", "selective"])
    runs = [
        # Weights do not depend on the other families and meshes in the run.
        drawn(zlib.crc32(case.encode()), world, case, degrees, next(policies))
        for number, case in enumerate(FAMILY_CASES)
        for name, degrees in meshes_of(world, number, case)
        if is_tested(case)
    ]
    check(world, runs, tmp_path)


@pytest.mark.tier("long")
def test_context_parallel_ranks_share_rows_of_every_family_that_can(tmp_path):
    cases = [case for case in FAMILY_CASES if case not in {*LINEAR_CASES, *LIKE}]
    runs = [drawn(i, 2, case, {"cp": 2}, "none") for i, case in enumerate(cases) if is_tested(case)]
    check(2, runs, tmp_path)


@pytest.mark.tier("long")
def test_adapters_of_biased_experts_on_every_mesh(tmp_path):
    runs = [drawn(1, 2, "gpt_oss", degrees, "none") for degrees in MESHES[2].values()]
    words = ["lora.rank=8", "moe.bias_update_rate=0"]
    check(2, [one._replace(words=[*one.words, *words]) for one in runs], tmp_path)


def follow_families(archs):
    for arch in archs:
        experts = ["parallel.ep=2"] * bool(arch.num_experts)
        base = WORDS if arch.num_experts else DENSE
        for words in (["parallel.tp=2", *experts], ["parallel.pp=2"]):
            config = make_engine(*UGLY, *words, micro=rows_of(words, world=2), base=base).config
            # Once suffices: the detection of a second update is not specific to a family.
            follow(Engine(config, arch, join_world(config, arch)), versions=1)


@pytest.mark.tier("long")
def test_a_generator_follows_a_trainer_of_every_family():
    cases = [case for case in FAMILY_CASES if case not in LIKE and is_tested(case)]
    archs = [architecture_of(case, num_experts=8) for case in cases]
    spawn(2, follow_families, archs, timeout=200)


SPLIT = {
    "qwen3_next": ".linear_attn.",
    "gpt_oss": ".experts.",
    "nemotron_h": ".mamba.",
    "granitemoehybrid": ".mamba.",
    "sarvam_moe": ".attn.w",
    "step3p5": ".moe.",
    "kimi_linear": ".a_log",
    "minimax_m3_vl_text": "layers.0.mlp.",
}
"""Families in which a parameter is part of a file's tensor, or a file's tensor part of it, and its
name."""
KEPT = {  # nemotron_h's files call every part a mixer
    "nemotron_h": ["layers.0.mixer.", "layers.4.mixer.", "correction_bias", "mtp."],
    "sarvam_moe": [".query_key_value.", ".attention.dense.", ".expert_bias"],
    "step3p5": [".moe.", ".share_expert.", ".eh_proj."],
    "kimi_linear": [".A_log", "correction_bias"],
    "minimax_m3_vl_text": ["layers.0.mlp.", ".indexer.", "correction_bias"],
}
"""What the files call the frozen tensors and those that are not trained, if it is another name."""
UNTRAINED = {"minimax_m3_vl_text"}
"""Families with weights that are never trained, which no checkpoint holds; ``merge`` adds them."""


@pytest.mark.tier(
    "long",
    wide=[
        "dp_shard-granitemoehybrid",
        "ep-granitemoehybrid",
        "pp-granitemoehybrid",
        "ep-nemotron_h",
        "ep-qwen3_next",
        "pp-qwen3_next",
        "tp-nemotron_h",
        "tp-qwen3_next",
    ],
)
@pytest.mark.parametrize("case", SPLIT)
@pytest.mark.parametrize("axis", ["dp_shard", "tp", "pp", "ep"])
def test_parts_of_a_files_tensor_are_read_and_written_by_two_ranks(axis, case, tmp_path):
    """Parameters have rows or columns of one tensor; frozen ones are written back unchanged."""
    save_reference(case, tmp_path / "in")
    words = {"parallel.dp_shard" if axis == "ep" else f"parallel.{axis}": 2}
    words |= {"parallel.ep": 2 if axis == "ep" else 1, "train.freeze": f"*{SPLIT[case]}*"}
    run_on_two_ranks(tmp_path, **words)
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("in", "run/hf"))
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    kept = KEPT.get(case, [SPLIT[case]])
    assert same == {name for name in before if any(part in name for part in kept)}


@pytest.mark.tier("wide")
@pytest.mark.parametrize("case", SPLIT)
def test_parts_of_a_files_tensor_come_out_of_a_checkpoint(case, tmp_path):
    save_reference(case, tmp_path / "in")
    run_on_two_ranks(tmp_path, **{"parallel.dp_shard": 2})
    before, ran, out = (str(tmp_path / folder) for folder in ("in", "run", "again"))
    if case in UNTRAINED:
        assert main(["merge", f"{ran}/checkpoints/step-00000002", before, out]) == 0
    else:
        assert main(["export-hf", ran, out]) == 0
    after, again = (load_file(tmp_path / f / "model.safetensors") for f in ("run/hf", "again"))
    assert after.keys() == again.keys()
    assert all(torch.equal(after[name], again[name]) for name in after)
    assert main(["import-hf", str(tmp_path / "in"), str(tmp_path / "began")]) == 0
    began = tensors_of(tmp_path / "began" / "step-00000000")["model"]
    model = load_hf(tmp_path / "in")
    for name, parameter in model.named_parameters():
        assert torch.equal(began[name], parameter), name


def test_a_run_moves_the_selection_bias_and_keeps_mtp_heads(tmp_path):
    save_reference("glm4_moe", tmp_path / "in")
    run_on_two_ranks(tmp_path, **{"parallel.pp": 2, "moe.bias_update_rate": 0.25})
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    assert main(["import-hf", str(tmp_path / "in"), str(tmp_path / "began")]) == 0
    began = tensors_of(tmp_path / "began" / "step-00000000")["model"]
    folders = [tmp_path / "in", tmp_path / "run" / "hf", tmp_path / "again"]
    before, after, again = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() == after.keys() == again.keys()
    assert all(torch.equal(after[name], again[name]) for name in after)
    name = EXTRA["glm4_moe"].format(3)
    assert torch.equal(before[name], after[name])
    for layer in (1, 2):
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        steps_E = (after[name] - before[name]) / 0.25
        assert steps_E.abs().max() > 0.5
        torch.testing.assert_close(steps_E, steps_E.round(), rtol=0, atol=1e-5)
        assert torch.equal(began[f"layers.{layer}.moe.router.bias"], before[name])


@pytest.mark.tier("wide")
def test_compiled_blocks_on_two_ranks(tmp_path):
    """The norm over all heads has a collective inside the block.

    A block with states is compiled for a number of documents, chunk by chunk, and so for few
    tokens. One family has an MTP block too.
    """
    cases = [case for case in FAMILY_CASES if case not in LIKE]
    assert {*LIKE.values()} <= {*cases}
    runs = []
    for i, case in enumerate(cases):
        one = drawn(i, 2, case, {"tp": 2, "ep": 2}, "none")
        words = [*one.words, "train.mtp_weight=0.3"] if case == "glm4_moe" else one.words
        if case in LINEAR_CASES:
            words = ["data.seq_len=4", *(w for w in words if not w.startswith("data.seq_len"))]
        runs.append(one._replace(words=words, mesh=[*one.mesh, "compile.enabled=yes"]))
    check(2, runs, tmp_path, run_compiled)
