"""Random models on random meshes, with everything that can be combined: one process's numbers.

A configuration is drawn by its number: sizes, family, mesh, schedule, what is recomputed,
resharded, frozen, adapted, offloaded, how rows are packed and which ranks have targets. Two
processes (or as many as are asked for) train it for two steps, and every loss, gradient norm and
weight is compared with one process's, in fp32. ``EVERYTHING`` says which; else there are a few:

    EVERYTHING=200:1000 python -m pytest tests/test_everything.py        200 from number 1000 on
    EVERYTHING=100:5000:4 python -m pytest tests/test_everything.py      on four processes

Some gradients are 0 but for rounding: keys' biases, a window of one token, a router that takes
every expert, an adapter whose other half is 0. AdamW would move these parameters by the learning
rate, up or down as rounding has it. So its epsilon is far above any gradient here: what it divides
by is all but constant, and such parameters stay where they are. No parameter begins as 0, so that
each has a size that its error can be compared with. Every third configuration without adapters has
Muon, to whose matrices' norms the epsilon is added. The optimizers themselves are tested in
tests/test_optim.py and tests/test_muon.py.
"""

import os
import random
import zlib
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from architectures import make_architecture
from distributed import spawn

from moetrain.config import Config, ConfigError
from moetrain.data.loader import Batch
from moetrain.data.packing import IGNORE_INDEX
from moetrain.models.families import PRESETS
from moetrain.parallel import mesh
from moetrain.parallel.pipeline.schedules import SCHEDULES
from moetrain.parallel.world import join_world, plan_world
from moetrain.train.engine import Engine
from moetrain.train.objectives import Pretraining
from moetrain.train.session import resolve_run

STEPS, TOLERANCE = 2, 1e-5
FEW = "8:0:2"
"""Two of each kind of mesh of two processes."""


class Drawn(NamedTuple):
    """One configuration."""

    number: int
    world: int
    sizes: dict
    """Of :func:`make_architecture`."""
    words: list[str]
    """Settings of every run."""
    mesh: list[str]
    """Those that are about ranks, and the micro-batch of one of them."""
    alone: list[str]
    """The micro-batch of one process."""
    rows: int
    """Of a step."""
    without_targets: tuple[int, ...]
    """Of these rows no token is a target."""
    is_packed: bool
    has_pads: bool
    steps: int = STEPS


def draw(number, world):
    """The configuration of this number, which may be one that cannot be."""
    d = random.Random(number)
    moe = d.random() < 0.7
    family = d.choice(["qwen3_moe", "mixtral"] if moe else ["llama", "qwen2", "qwen3"])
    degrees = draw_mesh(d, number, world, moe)
    sizes = draw_sizes(d, family, moe, degrees)
    own = degrees["dp_replicate"] * degrees["dp_shard"]
    micro = d.choice([1, 2, 3])
    count = d.choice([1, 2, 3]) if degrees["pp"] == 1 else d.choice([2, 4, 6])
    rows = own * micro * count
    seq_len = d.choice([6, 7, 9, 12, 13])
    words = {
        "data.seq_len": seq_len,
        "train.global_batch_size": rows,
        "activation.policy": d.choice(["none", "none", "selective", "full"]),
        "optim.max_grad_norm": d.choice([1.0, 100.0]),
        "optim.weight_decay": d.choice([0.0, 0.1]),
        "train.seed": number,
    }
    if moe:
        words |= {
            "moe.aux_loss_coef": d.choice([0.0, 0.1]),
            "moe.aux_loss_scope": d.choice(["micro_batch", "global_batch"]),
            "moe.aux_loss_layers": d.choice(["each", "pooled"]),
            "moe.z_loss_coef": d.choice([0.0, 0.01]),
            "moe.bias_update_rate": d.choice([0.0, 0.01]),
        }
    if d.random() < 0.3:
        words |= {"lora.rank": 8, "lora.rs": d.choice(["yes", "no"])}
        words |= {"moe.bias_update_rate": 0.0} if moe else {}
        whole = "layers.0.*,*.wv"  # also shared experts, whose names this family does not have
        whole = "layers.0.attn.*,*.wv" if sizes.get("shared_intermediate_size") else whole
        words["lora.targets"] = d.choice(["auto", "*.attn.*", "*.wq,*.wo", whole])
    elif d.random() < 0.4:
        patterns = [
            "embed.*",
            "layers.0.*",
            "lm_head.*",
            "*norm*",
            "*.attn.*",
            "*.w*",
            "*.router.*",
        ]
        words["train.freeze"] = ",".join(d.sample(patterns, d.choice([1, 2])))
    if number % 3 == 1 and "lora.rank" not in words:
        words["optim.name"] = "muon"
    # By micro-batches another loss is balanced: then they are alike, else one has all rows.
    is_split = words.get("moe.aux_loss_coef") and words["moe.aux_loss_scope"] == "micro_batch"
    idle = d.randrange(own)
    last = {row for row in range(rows) if row // micro % own == idle}
    targetless = last if own > 1 and d.random() < 0.3 else {0} if rows > 1 else set()
    return Drawn(
        number,
        world,
        sizes,
        [f"{key}={value}" for key, value in words.items()],
        [
            f"train.micro_batch_size={micro}",
            *draw_settings(d, degrees, sizes["num_layers"], words.get("optim.name")),
        ],
        [f"train.micro_batch_size={micro * own if is_split else rows}"],
        rows,
        tuple(sorted(targetless)),
        d.random() < 0.5,
        d.random() < 0.4,
    )


def draw_mesh(d, number, world, moe):
    """Degrees that multiply to ``world``; of numbers in a row one of each kind comes first."""
    degrees = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 1)
    kinds = list(degrees)
    for turn in range(world.bit_length() - 1):
        kind = kinds[number % len(kinds)] if turn == 0 else d.choice(kinds)
        degrees[kind] *= 2
    ranks = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return degrees | {"ep": d.choice(fitting) if moe else 1}


def draw_sizes(d, family, moe, degrees):
    """Sizes that are odd where they may be."""
    tp, layers = degrees["tp"], d.choice([1, 2, 3, 5] if degrees["pp"] == 1 else [2, 3, 5])
    cp = degrees["cp"]
    groups = tp * d.choice([1, 2, 3] if cp == 1 else [1, cp, 2 * cp, 3])
    whole = cp if groups % (tp * cp) else 1  # fewer key heads than ranks, which each has a copy of
    sizes = {
        "family": family,
        "vocab_size": d.choice([37, 41, 50, 131]),
        "hidden_size": d.choice([8, 24, 40] if moe else [10, 23, 36]),
        "num_layers": layers,
        "num_heads": groups * whole * d.choice([1, 2, 3]),
        "num_kv_heads": groups,
        "head_dim": d.choice([2, 4, 6, 10]),
        "intermediate_size": tp * d.choice([5, 11, 14]),
        "tie_embeddings": d.random() < 0.4,
        "qk_norm": family.startswith("qwen3"),
        "qkv_bias": family == "qwen2" or d.random() < 0.2,
        "out_bias": family == "llama" and d.random() < 0.3,
        "mlp_bias": family == "llama" and d.random() < 0.3,
    }
    if sizes["qk_norm"]:  # of two numbers: near 0 it makes any rounding large
        sizes["head_dim"] = max(4, sizes["head_dim"])
    windows = [d.choice([None, None, 1, 3]) for _ in range(layers)]
    if family == "mixtral":
        windows = windows[:1] * layers
    sizes["sliding_windows"] = () if family == "llama" else tuple(windows)
    if moe:
        experts = degrees["ep"] * d.choice([1, 2, 3, 5])
        sizes |= {
            "num_experts": experts,
            "num_experts_per_token": d.randint(1, min(experts, 4)),
            "moe_intermediate_size": d.choice([8, 24]),
        }
    if family == "qwen3_moe":
        sizes["norm_topk_prob"] = d.random() < 0.5
        routed = [d.random() < 0.7 for _ in range(layers)]
        sizes["moe_layers"] = tuple(routed) if any(routed) else ()
        sizes |= draw_variant(d, sizes)
    return sizes


def draw_variant(d, sizes):
    """What other families of mixtures of experts have, one by one or together."""
    groups = d.choice([n for n in (1, 1, 2, 3) if sizes["num_experts"] % n == 0])
    size, chosen = sizes["num_experts"] // groups, sizes["num_experts_per_token"]
    return {
        "router_score": d.choice(["softmax", "sigmoid"]),
        "router_min_sum": d.choice([0.0, 0.0, 1e-20, 0.7]),
        "router_fp32": d.random() < 0.5,
        "selection_bias": d.random() < 0.5,
        "num_expert_groups": groups,
        "topk_expert_groups": d.randint(-(-chosen // size), groups),
        "routed_scaling_factor": d.choice([1.0, 2.5]),
        "shared_intermediate_size": d.choice([0, 0, 3, 24]),
        "shared_gate": d.random() < 0.5,
        "qk_norm": d.random() < 0.7,
        "qk_norm_of": d.choice(["head", "width", "rotated"]),
        "partial_rotary_factor": d.choice([1.0, 2 / sizes["head_dim"]]),
        "rope_interleaved": d.random() < 0.3,
    }


def draw_settings(d, degrees, layers, optimizer):
    """Words of how ranks share the work."""
    p = {f"parallel.{axis}": degree for axis, degree in degrees.items()}
    if degrees["pp"] > 1:
        name = d.choice(list(SCHEDULES))
        p["parallel.pp_schedule"] = name
        stages = degrees["pp"]
        if name == "interleaved_1f1b":
            p["parallel.pp_stages"] = d.choice([2, 3])
            stages *= p["parallel.pp_stages"]
        if stages <= layers and d.random() < 0.5:
            ends = sorted(d.sample(range(1, layers), stages - 1))
            sizes = (b - a for a, b in zip([0, *ends], [*ends, layers], strict=True))
            p["parallel.pp_split"] = ",".join(map(str, sizes))
    p["parallel.reduce_at"] = d.choice(["each", "last"])
    p["parallel.reshard_after_forward"] = d.choice(["no", "no", "yes", "2"])
    p["parallel.fsdp_transport"] = d.choice(["nccl", "copy"])
    if degrees["cp"] > 1:
        p["parallel.cp_method"] = d.choice(["auto", "all_gather"])
    offloaded = d.choice([0.0, 0.0, 0.4, 0.7, 1.0])
    p["optim.offload_fraction"] = 0.0 if optimizer == "muon" else offloaded
    return [f"{key}={value}" for key, value in p.items()]


WORDS = [
    "model.preset=drawn",
    "data.source=synthetic",
    "train.device=cpu",
    "train.dtype=float32",
    "optim.eps=0.1",  # far above the gradients: see the head of this file
    "output_dir=no/such/folder",
]


def resolved(drawn, words):
    """The settings, and the model; ConfigError: there is no such combination."""
    with patch.dict(PRESETS, drawn=make_architecture(**drawn.sizes)):
        return resolve_run(Config.load(None, [*WORDS, *drawn.words, *words], environ={}))


def is_refused(drawn):
    """Whether some setting contradicts another, the model or the mesh."""
    try:
        plan_world(*resolved(drawn, drawn.mesh), drawn.world)
        plan_world(*resolved(drawn, drawn.alone), 1)
    except ConfigError:
        return True
    return False


def make_rows(drawn, seq_len, step):
    """The rows of a step: a batch's fields, of all ranks."""
    g = torch.Generator().manual_seed(1000 * drawn.number + step)
    shape = (drawn.rows, seq_len)
    tokens_BS = torch.randint(drawn.sizes["vocab_size"], shape, generator=g)
    targets_BS = tokens_BS.roll(-1, 1).masked_fill(torch.rand(shape, generator=g) < 0.1, -1)
    targets_BS[:, -1] = IGNORE_INDEX
    targets_BS[targets_BS < 0] = IGNORE_INDEX
    targets_BS[list(drawn.without_targets)] = IGNORE_INDEX
    positions_BS = is_pad_BS = None
    if drawn.is_packed:  # each row begins a document, and so may any token
        column_S = torch.arange(seq_len).expand(shape)
        starts_BS = (torch.rand(shape, generator=g) < 0.3) | (column_S == 0)
        positions_BS = column_S - (column_S * starts_BS).cummax(1).values
    if drawn.has_pads:
        real_B1 = torch.randint(1, seq_len + 1, (drawn.rows, 1), generator=g)
        is_pad_BS = torch.arange(seq_len) >= real_B1
        targets_BS = targets_BS.masked_fill(is_pad_BS, IGNORE_INDEX)
    return tokens_BS, targets_BS, positions_BS, is_pad_BS


def make_batches(drawn, config, step, rank, ranks):
    """A rank's micro-batches: every so many rows are one rank's."""
    micro, batches = config.train.micro_batch_size, []
    rows = make_rows(drawn, config.data.seq_len, step)
    for start in range(rank * micro, drawn.rows, ranks * micro):
        fields = (None if x is None else x[start : start + micro] for x in rows)
        tokens, targets, positions, is_pad = fields
        column_BS = torch.arange(tokens.shape[1]).expand_as(tokens)
        starts = ((column_BS if positions is None else positions) == 0).flatten().nonzero()[:, 0]
        ends = torch.cat([starts, torch.tensor([tokens.numel()])]).int()
        batches.append(Batch(tokens, targets, positions, ends, is_pad))
    return batches


def run(drawn, words):
    """Losses, their terms and norms of all steps, and all weights in the end."""
    config, arch = resolved(drawn, words)
    world = join_world(config, arch)
    engine, objective = Engine(config, arch, world), Pretraining.of(config, arch)
    for name, member in engine.fsdp.members.items():
        shape, std = member.layout.shape, 0.3 if "router" in name else 0.1
        g = torch.Generator().manual_seed(zlib.crc32(f"{name} {drawn.number}".encode()))
        value = std * torch.randn(shape, generator=g) + (len(shape) == 1)
        engine.fsdp.write(name, (), value)
    for name, bias_E in engine.model.named_buffers():
        g = torch.Generator().manual_seed(zlib.crc32(f"{name} {drawn.number}".encode()))
        bias_E.copy_(0.2 * torch.randn(bias_E.shape, generator=g))
    numbers = []
    for step in range(drawn.steps):
        batches = make_batches(drawn, config, step, world.data_rank, world.dims.data_ranks)
        totals = engine.forward_backward(batches, objective)
        outcome = engine.step(0.01)
        assert not outcome.skipped
        values = [totals.total, *totals.terms.values(), outcome.grad_norm]
        numbers.append([value.item() for value in values])
    return torch.tensor(numbers), {name: x.clone() for name, x in engine.weights()}


def run_all(configurations, note):
    """:func:`run` of each on this rank; None: stages, or parts of the model, are refused."""
    note, answers = Path(note), []
    with patch.object(mesh, "_Groups", cached_groups()):
        for drawn in configurations:
            if dist.get_rank() == 0:
                note.write_text(describe(drawn))
            try:
                answers.append(run(drawn, drawn.mesh))
            except ConfigError:
                answers.append(None)
    return answers if dist.get_rank() == 0 else None


def cached_groups():
    """Groups of a cut of the world are every mesh's."""
    made = {}
    kept = mesh._Groups
    return lambda device_type: made.setdefault(device_type, kept(device_type))


def describe(drawn):
    again = f"EVERYTHING=1:{drawn.number}:{drawn.world} python -m pytest tests/test_everything.py"
    parts = (again, drawn.sizes, *drawn.words, *drawn.mesh, drawn[6:])
    return "\n    ".join(map(str, parts))


def test_everything_together_gives_the_single_process_answer(tmp_path):
    count, first, world = map(int, f"{os.environ.get('EVERYTHING', FEW)}:2".split(":")[:3])
    drawn, number = [], first
    while len(drawn) < count:
        one = draw(number, world)
        number += 1
        drawn += [] if is_refused(one) else [one]
        assert number - first < 10 * count + 10, "nearly all are refused"
    note, answers = tmp_path / "running", []
    try:
        answers = spawn(world, run_all, drawn, str(note), timeout=40 + 5 * count)[0]
    finally:
        if not answers:
            print("failed at", note.read_text() if note.exists() else "the start")
    assert_agree(drawn, answers)
    agree = sum(found is not None for found in answers)
    print(f"{agree} configurations agree; {number - first - agree} were refused")
    assert agree >= count / 2


def assert_agree(configurations, answers):
    """What ranks found is one process's, which runs once for those that differ in ranks alone."""
    wrong, alone = [], {}
    for one, found in zip(configurations, answers, strict=True):
        if found is None:
            continue
        words = [word for word in one.words if not word.startswith("activation.policy")]
        key = repr(one._replace(mesh=[], words=words))
        alone[key] = alone.get(key) or run(one, one.alone)
        wrong += [f"{what}\n    {describe(one)}" for what in differences(found, *alone[key])]
    assert not wrong, "\n".join(wrong)


def differences(found, numbers, weights):
    """How what the ranks found differs from one process's numbers and weights."""
    error = ((found[0] - numbers).abs() / numbers.abs().clamp(min=1e-30)).max()
    if not error <= TOLERANCE:
        yield f"losses and norms are off by {error:.1e}: {found[0].tolist()}, {numbers.tolist()}"
    assert found[1].keys() == weights.keys()
    for name, weight in weights.items():
        error, size = (found[1][name] - weight).norm(), weight.norm()
        if not error <= TOLERANCE * size:
            yield f"{name}, of norm {size:.1e}, is off by {error:.1e}"
