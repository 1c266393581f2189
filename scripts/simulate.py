"""Simulate training steps on 8 to 1,024 GPUs: streams of operations that share links.

    python scripts/simulate.py qwen3-30b-a3b --gpus 64 --parallel.dp_shard 8
    python scripts/simulate.py qwen3-30b-a3b --gpus 8 16 32 64 128 256 512 1024 [--machine 8]
        [--gpu h200] [--rows 4] [--micro-batches 1] [--across 50] [--hop 10]
        [--slow MACHINE=1.2] [--trace FILE.json] [--section.key value ...]

Kernel times come from moetrain/train/estimates/speed.py, which has measured rates. Where that file
adds times up, this program queues operations: the computation of each block, the gathers and
reductions of FSDP with one unit of prefetch, dispatch and combine, and the transfers of the
pipeline's own schedule, each after the operations that the code waits for. Ranks of a machine with
the same stages are alike, so one of them is simulated. Machines with the same stages are alike too,
unless ``--slow`` makes one differ.

Within a machine, copy engines carry the traffic of FSDP, or NCCL where the settings say so. Between
machines NCCL carries it. A ring of NCCL brings all data to a machine once, over the network
adapters of all its GPUs that take part. The all-to-all that reduces gradients sends each GPU its
own part, and so carries more bytes between machines: as many times more as a machine has GPUs.

Assumed, since nothing was measured between real machines: bytes a second and GPU (``--across``,
GB/s in each direction; ``--across-direct`` for all-to-alls, ``--across-sums`` for all-reduces),
which share of that is carried while several communicators send (``--together``) and while the GPU
computes (``--beside``), and microseconds for each machine that a message of a collective passes
(``--hop``). scripts/bench_links.py measures them all, and ``--products``, the share of their rate
that products keep while NCCL runs. The default of the latter was measured on an H200 with NVLink.

Without ``train.global_batch_size`` a step is one micro-batch per rank, or four for each pipeline
rank. With ``parallel.dp_shard`` alone, ``dp_replicate`` takes the remaining GPUs.

Left out on purpose: the host, which must launch what the device runs, and what speed.py leaves out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from simulated_ranks import SLOWED, Links, Mesh, PartWork, Step, Work
from streams import Simulation

from moetrain.cli.main import command
from moetrain.cli.plan import ROUNDS, source_of
from moetrain.config import Config, ConfigError
from moetrain.config.environment import GIB, GPUS, GPUS_OF_MACHINE, NETWORK_RATE, GpuName
from moetrain.models.architecture import FP32
from moetrain.models.transformer import compute_dtype
from moetrain.parallel.fsdp.transport.peers import wants_copies
from moetrain.parallel.mesh import ParallelDims
from moetrain.parallel.pipeline.schedules import Schedule
from moetrain.parallel.pipeline.stages import StagePlan
from moetrain.parallel.processes import planned_machine
from moetrain.parallel.world import plan_world
from moetrain.train.estimates.memory import RankSizes
from moetrain.train.estimates.speed import IDLE, LINK, WAITING, StepClock
from moetrain.train.session import resolve_run


def work_of(rank: RankSizes, plan: StagePlan, number: int, gpu: GpuName) -> Work:
    """Return the times of pipeline rank ``number`` from ``speed.py``."""
    clock, share, layers = StepClock(rank, GPUS[gpu]), rank.share, rank.arch.layers()
    whole, dims = clock.experts + clock.others, rank.dims
    moved = [seconds / whole for seconds in clock.weights_moved()]
    blocks, gathered = {}, {}
    for place, i in enumerate(plan.blocks_of(number)):
        policy = rank.config.activation.of_block(place)
        parts, sizes = [], defaultdict(float)
        for part in layers[i]:
            axis = "efsdp" if part.style == "routed" else "fsdp"
            sizes[axis] += share.width * part.matrix_elements(share)
            passes = zip(clock.part(part, policy), moved, strict=True)
            forward, backward = (x + each * part.matrix_elements(share) for x, each in passes)
            share_once = 1.0
            if part.style == "routed":
                machines, chosen = dims.machines(dims.ep), getattr(part, "num_experts_per_token", 1)
                reached, ranks = (n * (1 - (1 - 1 / n) ** chosen) for n in (machines, dims.ep))
                share_once = reached / ranks
            exchanges = clock.exchanges(part, policy)
            parts.append(PartWork(forward, backward, exchanges, share_once))
        blocks[i], gathered[i] = parts, sizes
    vocabulary, config = rank.vocabulary_numbers, rank.config
    per_matrix = sum(moved) * vocabulary
    copies = 2 * FP32 * rank.trained / dims.sharding_ranks
    return Work(
        blocks,
        gathered,
        {"fsdp": share.width * vocabulary},
        rank.turns,
        rank.share_trained,
        config.parallel.reduce_at == "last",
        wants_copies(config.parallel, "cuda"),
        embedding=per_matrix * (rank.matrices > rank.is_last),
        head=(clock.head() + per_matrix) * rank.is_last,
        border=rank.residual_bytes,
        copies=copies,
        update=clock.update() - clock.travel(copies, dims.dp_replicate, dims.world_size),
    )


class Result(NamedTuple):
    """Figures of one layout."""

    dims: ParallelDims
    config: Config
    seconds: float
    rate: float
    """Tokens per second and GPU."""
    mfu: float
    memory: float
    """Bytes of the fullest GPU, as the dry run estimates them."""
    fits: bool
    simulation: Simulation

    HEADS = (
        *("gpus", "dp_replicate", "dp_shard", "cp", "tp", "ep", "pp", "rows", "step ms"),
        *("tokens/s/GPU", "MFU", "GiB", "gathers", "reductions", "exchanges", "pipeline"),
    )
    CAUSES = (("gather",), ("reduce", "replicas", "norm"), ("dispatch", "tp", "cp"), ("pipeline",))

    def cells(self) -> list[str]:
        """Return its row of the table; the last cells are shares of the step spent waiting."""
        names = ("world_size", *(name for name in self.HEADS if hasattr(self.dims, name)))
        waits = self.waits()
        shares = [sum(waits.get(kind, 0.0) for kind in kinds) for kinds in self.CAUSES]
        return [
            *(str(getattr(self.dims, name)) for name in names),
            str(self.config.train.micro_batch_size),
            f"{1e3 * self.seconds:,.0f}",
            f"{self.rate:,.0f}",
            f"{self.mfu:.1%}",
            f"{self.memory / GIB:.1f}{'' if self.fits else '!'}",
            *(f"{share / self.seconds:.1%}" for share in shares),
        ]

    def waits(self) -> dict[str, float]:
        """Return the seconds in which computing waits, by cause: a mean over simulated ranks."""
        found: dict[str, float] = defaultdict(float)
        computing = [x for (_, name), x in self.simulation.waits().items() if name == "compute"]
        ranks = {rank for rank, name in self.simulation.busy() if name == "compute"}
        for waits in computing:
            for kind, seconds in waits.items():
                found[kind] += seconds / len(ranks)
        return found

    def streams(self) -> list[str]:
        """Return a line for each simulated stream, or for several that are alike."""
        alike, waits = defaultdict[str, list[str]](list), self.simulation.waits()
        for (rank, name), busy in self.simulation.busy().items():
            blocked = ", ".join(
                f"{x / self.seconds:.1%} for {kind}"
                for kind, x in sorted(waits[rank, name].items(), key=lambda item: -item[1])
                if x > 5e-4 * self.seconds
            )
            share = f"waits {1 - busy / self.seconds:.1%}{f' ({blocked})' * bool(blocked)}"
            alike[f"{name}: {share}"].append(str(rank))
        return [f"rank {','.join(ranks)} {line}" for line, ranks in alike.items()]


def simulate(
    config: Config,
    gpu: GpuName,
    links: Links | None = None,
    slow: Mapping[int, float] | None = None,
) -> Result:
    """Simulate a step on ``launch.gpus`` GPUs; raise ConfigError for an impossible run."""
    config, arch = resolve_run(config, needs_weights=False)
    machine = planned_machine(config)
    dims = plan_world(config, arch, machine.processes)
    ranks = RankSizes.of_ranks(config, arch, dims, compute_dtype(config, machine.device))
    plan, number = StagePlan(config, arch), config.train.micro_batches(dims.data_ranks)
    clock = StepClock(ranks[0], GPUS[gpu])
    links = links or Links(clock.link, NETWORK_RATE)
    works = [work_of(rank, plan, p, gpu) for p, rank in enumerate(ranks)]
    schedule = plan.schedule(number) if dims.pp > 1 else Schedule.make("1f1b", 1, 1, number)
    step = Step(works, schedule, plan.ranges, Mesh(dims), links, slow or {})
    # Two losses are not simulated, but added as shares of the step: a GPU computes nothing, or it
    # waits for the slowest GPU.
    seconds = step.run() / (1 - IDLE - WAITING * (dims.world_size > 1))
    rate = config.train.global_batch_size * config.data.seq_len / seconds / dims.world_size
    flops = arch.flops_per_token(config.data.seq_len, is_frozen=config.lora.rank > 0)
    peaks = [rank.peak(None) for rank in ranks]
    return Result(
        dims,
        config,
        seconds,
        rate,
        rate * flops / GPUS[gpu].peak_flops,
        max(peak.total for peak in peaks),
        all(peak.surely_fits(machine.capacity) for peak in peaks),
        step.simulation,
    )


def configured(given: argparse.Namespace, words: Sequence[str], gpus: int) -> Config:
    """Return settings for this number of GPUs, with a fitting mesh and batch by default."""
    source, own = source_of(given.recipe, words)
    planned = [f"launch.gpus={gpus}", f"launch.gpu={given.gpu}"]
    planned.append(f"launch.gpus_per_machine={given.machine}")
    config = Config.load(source, [*own, *words, *planned])
    p, change = config.parallel, {}
    replicas = gpus // (max(1, p.dp_shard) * p.cp * p.tp * p.pp)
    if p.dp_shard > 0 and not config.is_users("parallel.dp_replicate") and replicas:
        change["parallel.dp_replicate"] = replicas
    if not config.is_users("train.global_batch_size"):
        number = given.micro_batches or (ROUNDS * p.pp if p.pp > 1 else 1)
        ranks = max(1, gpus // (p.pp * p.cp * p.tp))
        change["train.micro_batch_size"] = given.rows
        change["train.global_batch_size"] = given.rows * number * ranks
    return config.filled(change, "the number of GPUs")


def slowed(words: Sequence[str]) -> dict[int, float]:
    """Read ``3=1.2``: machine 3 computes for 1.2 times as long."""
    try:
        return {int(a): float(b) for a, b in (word.split("=") for word in words)}
    except ValueError:
        raise ConfigError("slow", f"{' '.join(words)}: give MACHINE=FACTOR, as 3=1.2") from None


@command
def main(argv: Sequence[str] | None) -> None:
    """Print a line for each number of GPUs, and with one number a line for each stream."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("recipe", help="preset, recipe, folder or hub id on disk")
    parser.add_argument("--gpus", type=int, nargs="+", required=True)
    parser.add_argument("--gpu", choices=get_args(GpuName), default="h200", help="kind of GPU")
    parser.add_argument("--machine", type=int, default=GPUS_OF_MACHINE, help="GPUs of each machine")
    parser.add_argument("--rows", type=int, default=2, help="rows of a micro-batch")
    parser.add_argument("--micro-batches", type=int, help="number in a step of each rank")
    parser.add_argument("--across", type=float, default=NETWORK_RATE / 1e9, help="GB/s of a GPU")
    parser.add_argument("--across-direct", type=float, help="the same for all-to-alls, if another")
    parser.add_argument("--across-sums", type=float, help="the same for all-reduces, if another")
    several = "share of it while several collectives send"
    parser.add_argument("--together", type=float, default=1.0, help=several)
    parser.add_argument("--beside", type=float, default=1.0, help="share of it beside products")
    kept = "share of their rate that products keep beside NCCL"
    parser.add_argument("--products", type=float, default=SLOWED, help=kept)
    parser.add_argument("--hop", type=float, default=10.0, help="microseconds to a next machine")
    parser.add_argument("--slow", nargs="+", default=[], metavar="MACHINE=FACTOR")
    parser.add_argument("--trace", type=Path, help="Chrome trace of the last number of GPUs")
    given, words = parser.parse_known_args(argv)
    rows, result = [list(Result.HEADS)], None
    for gpus in given.gpus:
        if gpus > given.machine and gpus % given.machine:
            raise ConfigError("gpus", f"{gpus} are not whole machines of {given.machine}")
        config = configured(given, words, gpus)
        kind = GPUS[given.gpu]
        inside = kind.link_rate * LINK
        links = Links(
            inside,
            1e9 * given.across,
            1e-6 * given.hop,
            direct=1e9 * given.across_direct if given.across_direct else None,
            sums=1e9 * given.across_sums if given.across_sums else None,
            together=given.together,
            beside=given.beside,
            products=given.products,
        )
        result = simulate(config, given.gpu, links, slowed(given.slow))
        rows.append(result.cells())
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(
        f"{given.recipe}, simulated: {given.gpu.upper()}s in machines of {given.machine}; assumed "
        f"between them: {given.across:g} GB/s a GPU, {given.hop:g} us a machine"
    )
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    assert result is not None  # --gpus has at least one
    if any(row[-5].endswith("!") for row in rows):
        print("!: may not fit into the GPU's memory")
    if len(given.gpus) == 1:
        print("\n".join(result.streams()))
    if given.trace is not None:
        given.trace.write_text(json.dumps(result.simulation.trace()))
        print(given.trace)


if __name__ == "__main__":
    sys.exit(main())
