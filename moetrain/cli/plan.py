"""``moetrain plan MODEL --gpus N``: list the parallel layouts that fit in memory.

The command estimates memory and time for many combinations of parallel degrees, micro-batch sizes,
recomputation, precisions and dtypes of optimizer states. It prints the layouts from the fastest on,
and the training command of the fastest. It needs no GPU. Settings that you give are kept; settings
of a recipe may change. Settings that move memory from the GPUs to the host are not tried; train
--dry_run proposes them. The estimates are those of moetrain.train.estimates.
"""

import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from moetrain.cli.main import Parser, command
from moetrain.cli.train import recipe_of
from moetrain.config import Config, ConfigError
from moetrain.config.environment import GIB, GPUS, GPUS_OF_MACHINE, NETWORK_RATE, GpuName
from moetrain.config.sources import Recipes, recipe_names

if TYPE_CHECKING:  # imported later: torch would delay --help
    from moetrain.train.estimates.plan import MemoryPlan

_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 10, 12, 16)
_MOST_STAGES = 16
"""Most pipeline ranks that are tried."""
_LONG_ROW = 16_384
"""Shortest rows, in tokens, for which context parallel ranks are tried."""
ROUNDS = 4
"""Micro-batches of a step for each of several pipeline ranks, if no batch size is given. Without
a pipeline a step then has one micro-batch."""

_COLUMNS = {
    **{name: f"parallel.{name}" for name in ("dp_replicate", "cp", "tp", "ep", "pp")},
    **{"rows": "train.micro_batch_size", "recompute": "activation.policy"},
    **{"reshard": "parallel.reshard_after_forward", "states": "optim.state_dtype"},
    "precision": "kernels.precision",
}
"""The settings of a layout that the table shows, by the title of their column."""

_Change = dict[str, Any]


class _Layout(NamedTuple):
    rate: float
    """Tokens per second per GPU."""
    seconds: float
    memory: float
    """Bytes of memory on the GPU that needs most."""
    fits: bool
    config: Config
    change: _Change

    def cells(self, gpus: int) -> list[str]:
        p = self.config.parallel
        shard = gpus // (p.dp_replicate * p.cp * p.tp * p.pp)
        figures = f"{self.rate:,.0f}", f"{self.seconds:.2f}", f"{self.memory / GIB:.1f}"
        settings = (_shown(attrgetter(x)(self.config)) for x in _COLUMNS.values())
        return [*figures, str(shard), *settings]


@command
def main(argv: Sequence[str] | None) -> None:
    parser = Parser("plan", __doc__)
    parser.prog = "moetrain plan"
    parser.usage = (
        "%(prog)s MODEL --gpus N [N ...] [--gpu KIND] [--top N] [--section.key value ...]"
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="preset, recipe, Hugging Face folder, or hub id of a model that is in the hub's cache",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        required=True,
        help="number of GPUs; several numbers give one plan each",
    )
    meaning = "kind of GPU; default h200"
    parser.add_argument("--gpu", choices=get_args(GpuName), default="h200", help=meaning)
    meaning = "number of layouts to list; default 10"
    parser.add_argument("--top", type=int, default=10, help=meaning)
    options, words = parser.parse_known_args(argv)
    for gpus in options.gpus:
        _show(options.model, gpus, options.gpu, options.top, words)


def _show(model: str, gpus: int, gpu: GpuName, top: int, words: Sequence[str]) -> None:
    """Print the ``top`` layouts on ``gpus`` GPUs, and the command of the best one."""
    source, own = source_of(model, words)
    config = Config.load(source, [*own, *words, f"launch.gpus={max(gpus, 1)}", f"launch.gpu={gpu}"])
    per_machine = _per_machine(config)
    if gpus < 1 or (gpus > per_machine and gpus % per_machine):
        whole = f"1 to {per_machine}, or whole machines of {per_machine}"
        raise ConfigError("gpus", f"{gpus}: give {whole}")
    found = sorted(_layouts(config, gpus, gpu), key=lambda layout: -layout.rate)
    kinds = f"{gpus} x {gpu.upper()} of {GPUS[gpu].memory_gib:.1f} GiB"
    if not found:
        problem = f"{gpus}: {model} fits in no layout tried on {kinds}; use more GPUs"
        raise ConfigError("gpus", f"{problem}, or see what train --dry_run proposes")
    heads = ["tokens/s/GPU", "step s", "GiB", "dp_shard", *_COLUMNS]
    rows = [heads, *(layout.cells(gpus) for layout in found[:top])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"{model}, rows of {config.data.seq_len} tokens, on {kinds}: estimates, best first")
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    if gpu != "h200":
        print(
            "Rates were measured on H200s; other GPUs are assumed to reach the same share of the "
            "rates in their datasheets."
        )
    machines = math.ceil(gpus / per_machine)
    if machines > 1:
        rate = f"{8 * NETWORK_RATE / 1e9:.0f} Gbit/s a GPU"
        print(f"The network between {machines} machines is assumed to have {rate}; not measured.")
    named = [model] if source is not None else own  # a recipe or a preset
    print("best:", _command(config, [*named, *words], found[0].change, gpus))


def _per_machine(config: Config) -> int:
    number = config.launch.gpus_per_machine
    return GPUS_OF_MACHINE if number == "auto" else number


def _command(config: Config, words: Sequence[str], change: _Change, gpus: int) -> str:
    """Return the command of a layout. ``words`` name the model, followed by the user's settings."""
    start, per_machine = ["moetrain", "train"], _per_machine(config)
    if gpus > per_machine:
        start = [
            *("torchrun", "--nnodes", str(gpus // per_machine), "--nproc-per-node"),
            *(str(per_machine), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"),
            *("-m", "moetrain.train"),
        ]
    elif gpus > 1:
        change = {"launch.nproc": gpus, **change}
    chosen = [
        word
        for name, value in change.items()
        if value != attrgetter(name)(config)
        for word in (f"--{name}", _shown(value))
    ]
    return shlex.join([*start, *words, *chosen])


def source_of(model: str, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the recipe to start from, and the settings that name the model."""
    from moetrain.models.families import PRESETS
    from moetrain.models.family import presets_near

    if model in recipe_names() or model in PRESETS:
        return recipe_of(model, Recipes.TRAIN)
    if not Path(model).expanduser().is_dir() and model.count("/") != 1:
        near = ", ".join(presets_near(model)[:3])
        problem = f"{model!r} is neither a folder, a hub id nor a preset, such as {near}"
        raise ConfigError("model", problem)
    has_data = any(word.lstrip("-").startswith(("data.source", "data.path")) for word in words)
    return None, ["--model.path", model, *["--data.source", "synthetic"] * (not has_data)]


def _layouts(config: Config, gpus: int, gpu: GpuName) -> Iterator[_Layout]:
    """Yield, for each mesh, dtype of states and precision, the fastest layout that fits."""
    from moetrain.train.checks import check_widths
    from moetrain.train.estimates.plan import MemoryPlan
    from moetrain.train.session import resolve_run

    config, arch = resolve_run(config, needs_weights=False)
    plan = MemoryPlan.of(config, arch, generates=False)
    precisions = [config.kernels.precision]
    if GPUS[gpu].has_fp8 and not config.is_users("kernels.precision"):
        with suppress(ConfigError):  # fp8 does not support the model's widths
            check_widths(config.filled({"kernels.precision": "fp8"}, "the plan"), arch)
            precisions.append("fp8")
    for change in _meshes(config, gpus):
        best = None
        for more in _recomputations(config, gpus):
            found, is_largest = _fastest(plan, {**change, **more}, gpu)
            best = max(filter(None, (best, found)), key=lambda layout: layout.rate, default=None)
            if is_largest:  # keeping fewer activations would gain nothing
                break
        if best is None:
            continue
        for precision in precisions:  # the layout fits in each: products take the same memory
            whole = {**best.change, "kernels.precision": precision}
            if (tried := plan.changed(whole)) is not None:
                yield _estimated(tried, whole, gpu)


def _fastest(plan: "MemoryPlan", change: _Change, gpu: GpuName) -> tuple[_Layout | None, bool]:
    """Return the layout with the fastest micro-batch size that fits, and whether the largest fits.

    The layout is None if no size fits.
    """
    best, fits = None, False
    rows: Sequence[int] = _MICRO_BATCHES
    if plan.config.is_users("train.micro_batch_size"):
        rows = (plan.config.train.micro_batch_size,)
    for micro_batch in rows:
        whole = {**change, "train.micro_batch_size": micro_batch}
        if not plan.config.is_users("train.global_batch_size"):
            pp, *shared = (change[f"parallel.{x}"] for x in ("pp", "cp", "tp"))
            batch = micro_batch * (plan.machine.processes // (pp * math.prod(shared)))
            whole["train.global_batch_size"] = batch * (ROUNDS * pp if pp > 1 else 1)
        if (tried := plan.changed(whole)) is None:
            continue
        found = _estimated(tried, whole, gpu)
        if not (fits := found.fits):
            break
        if best is None or found.rate > best.rate:
            best = found
    return best, fits


def _estimated(plan: "MemoryPlan", change: _Change, gpu: GpuName) -> _Layout:
    from moetrain.train.estimates.speed import step_seconds

    ranks, config = plan.sizes(), plan.config
    peak = max((rank.peak(None) for rank in ranks), key=lambda estimate: estimate.total)
    seconds = step_seconds(ranks, gpu)
    tokens = config.train.global_batch_size * config.data.seq_len
    rate = tokens / seconds / plan.machine.processes
    return _Layout(rate, seconds, peak.total, plan.surely_fits(peak), config, change)


def _meshes(config: Config, gpus: int) -> Iterator[_Change]:
    """Yield degrees of parallelism that multiply to ``gpus``, and dtypes of states.

    Tensor and expert parallel ranks together lie on one machine, and so do tensor and context
    parallel ranks together, unless the settings give one of these degrees.
    """
    degrees = [n for n in range(1, gpus + 1) if gpus % n == 0]
    per_machine = _per_machine(config)
    inside = [n for n in degrees if n <= per_machine]
    machines = math.ceil(gpus / per_machine)
    replicas = [machines // n for n in (1, 2, 4)]
    has_given = config.is_users("parallel.tp") or config.is_users("parallel.ep")
    largest = gpus if has_given else max(inside)
    options = {
        "parallel.cp": inside if config.data.seq_len >= _LONG_ROW else [1],
        "parallel.tp": inside,
        "parallel.pp": [n for n in degrees if n <= _MOST_STAGES],
        "parallel.ep": inside,
        # Each replica of the weights lies on 1, 2, 4 or all machines.
        "parallel.dp_replicate": [n for n in degrees if n in (1, *replicas)],
        "optim.state_dtype": ["float32", "bfloat16"],
    }
    for name in options:
        if config.is_users(name) and attrgetter(name)(config) != -1:
            options[name] = [attrgetter(name)(config)]
    for values in product(*options.values()):
        cp, tp, pp, ep, copies, states = values
        if gpus % (cp * tp * pp * copies) or gpus // (pp * copies) % ep or tp * ep > largest:
            continue
        if cp * tp > max(inside) and not config.is_users("parallel.cp"):
            continue
        change = dict(zip(options, values, strict=True))
        if not config.is_users("optim.gradient_dtype"):
            change["optim.gradient_dtype"] = "float32" if states == "float32" else "bfloat16"
        yield change


def _recomputations(config: Config, gpus: int) -> Iterator[_Change]:
    """Yield the choices of what the backward recomputes and gathers again, the fastest first."""
    asked = config.activation.policy
    policies = ("auto",) if asked == "auto" else ("none", "selective", "full")
    for policy, reshard in product(policies, (False, True)[: min(gpus, 2)]):
        change = {"activation.policy": policy, "parallel.reshard_after_forward": reshard}
        if all(attrgetter(n)(config) == x for n, x in change.items() if config.is_users(n)):
            yield change


def _shown(value: Any) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
