"""Context parallelism: both methods of attention give one process's results, for every kind of
layer.

Documents are packed at random, so many end at a cut, have one token, or span all ranks.
"""

import itertools
import zlib

import pytest

from tests.lib.family_ranks import check, drawn, run_compiled

GATHER = {"cp_method": "all_gather"}
MESHES = {
    2: {
        "heads": {"cp": 2, "cp_method": "ulysses"},
        "keys": {"cp": 2, **GATHER},
        "keys+ep": {"cp": 2, "ep": 2, **GATHER},
    },
    4: {
        "keys of four": {"cp": 4, **GATHER},
        "keys+tp+ep": {"cp": 2, "tp": 2, "ep": 4, **GATHER},
        "dp+keys": {"dp_shard": 2, "cp": 2, "ep": 2, **GATHER},
        "pp+keys": {"pp": 2, "cp": 2, **GATHER},
        "heads+tp": {"cp": 2, "tp": 2, "cp_method": "ulysses"},
    },
}
KINDS = ("gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_next", "nemotron_h")
KINDS += ("lfm2_moe", "granitemoehybrid", "kimi_linear")
"""Sinks and windows, latents, MTP (below), gated delta nets, Mamba-2, short convolutions, Mamba-2
with one group, Kimi Delta Attention."""
STATES = {"qwen3_next": "linear_num_key_heads", "nemotron_h": "mamba_num_groups"}
POLICIES = ("none", "full", "selective")


def case_of(name, world, kind, degrees, policy, *words, rows=4):
    """Return a configuration of a family's model on a mesh, with rows that its pieces divide."""
    number = zlib.crc32(f"{kind} {name}".encode())
    one = drawn(zlib.crc32(kind.encode()), world, kind, degrees, policy)
    sizes = dict(one.sizes)
    if kind in STATES:  # layers with heads that all ranks can share
        sizes[STATES[kind]] = 4
    own = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    micro = 2 if "pp" in degrees else rows // own
    mesh = [word for word in one.mesh if not word.startswith("train.micro_batch_size")]
    given = ["data.seq_len=12", f"train.global_batch_size={rows}", *words]
    return one._replace(
        sizes=sizes,
        words=[*(w for w in one.words if not w.startswith(("data.", "train.global"))), *given],
        mesh=[*mesh, f"train.micro_batch_size={micro}"],
        alone=[f"train.micro_batch_size={rows}"],
        rows=rows,
        is_packed=number % 3 > 0,
        has_pads=number % 2 > 0,
        without_targets=(0,) * (rows > 1),
    )


@pytest.mark.tier("wide", long=["4"])
@pytest.mark.parametrize("world", MESHES)
def test_every_kind_of_layer_gives_the_single_process_answer(world, tmp_path):
    policies = itertools.cycle(POLICIES)
    runs = [
        case_of(name, world, kind, degrees, next(policies))
        for number, kind in enumerate(KINDS)
        for name, degrees in MESHES[world].items()
        if name != ("dp+keys", "pp+keys")[number % 2]  # neither axis affects a block
    ]
    check(world, runs, tmp_path)


@pytest.mark.tier("long")
def test_one_row_that_all_ranks_share(tmp_path):
    """A document spans both ranks, and two ranks cannot share the heads."""
    runs = []
    for kind in ("gpt_oss", "glm4_moe", "deepseek_v3"):
        one = case_of(f"row {kind}", 2, kind, {"cp": 2}, "none", rows=1)
        odd = {"num_heads": 3, "num_kv_heads": 3 if kind == "deepseek_v3" else 1}
        runs += [one._replace(sizes=one.sizes | odd, number=n, is_packed=n % 2) for n in (2, 3)]
    runs = [one._replace(number=10 * i + one.number) for i, one in enumerate(runs)]
    check(2, runs, tmp_path)


@pytest.mark.tier("long")
def test_multi_token_targets_cross_cuts(tmp_path):
    word, meshes = "train.mtp_weight=0.3", [*MESHES[2].values()]
    each = [*zip(["glm4_moe"] * 3, meshes, POLICIES, strict=True)]
    each += [("qwen3_next", meshes[1], "none")]
    runs = [
        case_of(f"mtp {i}", 2, kind, degrees, policy, word)
        for i, (kind, degrees, policy) in enumerate(each)
    ]
    check(2, runs, tmp_path)


@pytest.mark.tier("long")
def test_adapters_of_gathered_keys(tmp_path):
    mesh = MESHES[2]["keys"]
    kinds = ("gpt_oss", "deepseek_v3", "qwen3_next")
    words = "lora.rank=8", "moe.bias_update_rate=0"
    # Rows drawn for another name give a gradient of norm 23 whose rounding alone is 5e-6 of it.
    check(2, [case_of("lora", 2, k, mesh, "none", *words) for k in kinds], tmp_path)


@pytest.mark.tier("long")
def test_compiled_blocks(tmp_path):
    both = [("gpt_oss", "keys", "full"), ("deepseek_v3", "keys", "selective")]
    both += [("qwen3_next", "heads", "none")]
    runs = [case_of("compiled", 2, kind, MESHES[2][mesh], how, rows=2) for kind, mesh, how in both]
    runs = [one._replace(mesh=[*one.mesh, "compile.enabled=yes"]) for one in runs]
    check(2, runs, tmp_path, run_compiled)
