"""Helpers of tests/system/test_everything.py that other tests use too."""

import zlib
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

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
from tests.lib.architectures import make_architecture

STEPS, TOLERANCE = 2, 1e-5


class Drawn(NamedTuple):
    """One random configuration."""

    number: int
    world: int
    sizes: dict
    """Arguments of :func:`make_architecture`."""
    words: list[str]
    """Settings of every run."""
    mesh: list[str]
    """Settings of the mesh, and the micro-batch of one of its ranks."""
    alone: list[str]
    """The micro-batch of one process."""
    rows: int
    """Rows of a step."""
    without_targets: tuple[int, ...]
    """Indices of rows in which no token is a target."""
    is_packed: bool
    has_pads: bool
    steps: int = STEPS


def draw_mesh(d, number, world, moe):
    """Draw degrees that multiply to ``world``; ``number`` decides the first axis to double."""
    degrees = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 1)
    kinds = list(degrees)
    for turn in range(world.bit_length() - 1):
        kind = kinds[number % len(kinds)] if turn == 0 else d.choice(kinds)
        degrees[kind] *= 2
    ranks = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return degrees | {"ep": d.choice(fitting) if moe else 1}


def draw_settings(d, degrees, layers, optimizer):
    """Draw settings of how ranks share the work."""
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
    "optim.eps=0.1",  # far above the gradients: see the docstring of test_everything.py
    "output_dir=no/such/folder",
]


def resolved(drawn, words):
    """Return settings and architecture; raise ConfigError for an impossible combination."""
    with patch.dict(PRESETS, drawn=make_architecture(**drawn.sizes)):
        return resolve_run(Config.load(None, [*WORDS, *drawn.words, *words], environ={}))


def is_refused(drawn):
    """Return True if a setting contradicts another, the model or the mesh."""
    try:
        plan_world(*resolved(drawn, drawn.mesh), drawn.world)
        plan_world(*resolved(drawn, drawn.alone), 1)
    except ConfigError:
        return True
    return False


def make_rows(drawn, seq_len, step):
    """Return the rows of a step, as the fields of a batch over all ranks."""
    g = torch.Generator().manual_seed(1000 * drawn.number + step)
    shape = (drawn.rows, seq_len)
    tokens_BS = torch.randint(drawn.sizes["vocab_size"], shape, generator=g)
    targets_BS = tokens_BS.roll(-1, 1).masked_fill(torch.rand(shape, generator=g) < 0.1, -1)
    targets_BS[:, -1] = IGNORE_INDEX
    targets_BS[targets_BS < 0] = IGNORE_INDEX
    targets_BS[list(drawn.without_targets)] = IGNORE_INDEX
    positions_BS = is_pad_BS = None
    if drawn.is_packed:  # a document begins at each row, and possibly at any token
        column_S = torch.arange(seq_len).expand(shape)
        starts_BS = (torch.rand(shape, generator=g) < 0.3) | (column_S == 0)
        positions_BS = column_S - (column_S * starts_BS).cummax(1).values
    if drawn.has_pads:
        real_B1 = torch.randint(1, seq_len + 1, (drawn.rows, 1), generator=g)
        is_pad_BS = torch.arange(seq_len) >= real_B1
        targets_BS = targets_BS.masked_fill(is_pad_BS, IGNORE_INDEX)
    return tokens_BS, targets_BS, positions_BS, is_pad_BS


def make_batches(drawn, config, step, rank, ranks):
    """Return a rank's micro-batches: every ``ranks``-th one is its own."""
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
    """Return losses, terms and norms of all steps, and all weights at the end."""
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
    """Call :func:`run` for each on this rank; None: a stage or a part of the model is refused."""
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
    """Return a factory that shares process groups between all meshes."""
    made = {}
    kept = mesh._Groups
    return lambda device_type: made.setdefault(device_type, kept(device_type))


def describe(drawn):
    again = f"EVERYTHING=1:{drawn.number}:{drawn.world} pytest tests/system/test_everything.py"
    parts = (again, drawn.sizes, *drawn.words, *drawn.mesh, drawn[6:])
    return "\n    ".join(map(str, parts))


def assert_agree(configurations, answers):
    """Assert that ranks agree with one process, which runs once per distinct model and data."""
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
    """Describe the differences of losses and weights between the ranks and one process."""
    error = ((found[0] - numbers).abs() / numbers.abs().clamp(min=1e-30)).max()
    if not error <= TOLERANCE:
        yield f"losses and norms are off by {error:.1e}: {found[0].tolist()}, {numbers.tolist()}"
    assert found[1].keys() == weights.keys()
    for name, weight in weights.items():
        error, size = (found[1][name] - weight).norm(), weight.norm()
        if not error <= TOLERANCE * size:
            yield f"{name}, of norm {size:.1e}, is off by {error:.1e}"
