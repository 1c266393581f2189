"""Measure the bandwidth of collectives between machines: alone, concurrent, and beside products.

On each machine, with ``FIRST`` the address of one of them:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST:29500 \\
        scripts/bench_links.py [--seconds 60] [--mib 64 512 1024]

Two GPUs of one machine can simulate two machines, connected by sockets:

    for node in 0 1; do
        NCCL_HOSTID=machine$node NCCL_P2P_DISABLE=1 CUDA_VISIBLE_DEVICES=$node torchrun \\
            --nnodes 2 --node-rank $node --nproc-per-node 1 --master-addr 127.0.0.1 \\
            --master-port 29500 scripts/bench_links.py &
    done; wait

The last line has the options for scripts/simulate.py, from the last size of messages. Rates are
GB/s that arrive at a GPU from other machines. Collectives "at once" have a communicator each;
those "in turns" share one. Both are compared with the same collectives one after another. The
products are of square matrices in bf16. They run in groups until the collectives beside them are
done.

Left out on purpose: copies within a machine (scripts/bench_fsdp.py), and anything that trains.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from simulated_ranks import INSIDE

PAIRS = (
    ("all_gather", "all_to_all"),
    ("all_gather", "all_gather"),
    ("all_to_all", "all_to_all"),
    ("all_gather", "reduce_scatter"),
)
"""Pairs of collectives that run at once, each on its own communicator. The first pair gives
simulate.py's ``--together``."""
NAMES = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter")
REPEATED = 3
AT_A_TIME = 4
"""Products between two checks of the collectives' completion."""


class Links:
    """The ranks of this run; all of them call every method in the same order."""

    def __init__(
        self, device: torch.device, seconds: float, groups: Sequence[Any] | None = None
    ) -> None:
        """Make the groups and the matrix.

        Args:
            seconds: the time for repeating each measurement, which is made at least three times.
            groups: groups of all ranks whose communicators are measured; None: two new ones.
        """
        self.device, self.seconds = device, seconds
        self.ranks, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
        self.local, self.machines = local, self.ranks // local
        self.groups = groups or [dist.new_group() for _ in range(2)]
        side = 8192 if device.type == "cuda" else 256
        self.square = torch.randn(side, side, dtype=torch.bfloat16, device=device)

    def work(self, name: str, size: int, which: int = 0) -> Callable[[], Any]:
        """Return a function that starts a collective, with ``size`` bytes in all.

        The elements are bf16, those of an all-reduce fp32. ``which`` chooses the group.
        """
        numbers = max(1, size // 2 // self.ranks)
        whole = torch.ones(self.ranks * numbers, dtype=torch.bfloat16, device=self.device)
        part, other = whole[:numbers].clone(), torch.empty_like(whole)
        sums = torch.ones(max(1, size // 4), device=self.device)
        how: dict[str, Any] = {"group": self.groups[which], "async_op": True}
        return {
            "all_gather": lambda: dist.all_gather_into_tensor(other, part, **how),
            "all_to_all": lambda: dist.all_to_all_single(other, whole, **how),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, **how),
            "all_reduce": lambda: dist.all_reduce(sums, **how),
        }[name]

    def rate(self, name: str, size: int, seconds: float) -> float:
        """Return the GB/s that arrive at a GPU from other machines, as simulate.py counts them."""
        across = size * (1 - 1 / self.machines) * (1 + (name == "all_reduce"))
        return across / (1 if name == "all_to_all" else self.local) / seconds / 1e9

    def wait(self) -> None:
        """Wait until this rank's device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def begin(self) -> float:
        """Wait until every rank's device is idle; return the time."""
        self.wait()
        dist.barrier()
        return time.perf_counter()

    def agreed(self, numbers: Sequence[float]) -> list[int]:
        """Return the first rank's ``numbers``, rounded, on all ranks."""
        found = torch.tensor(numbers, device=self.device)
        dist.broadcast(found, 0)
        return [int(x) for x in found.round()]

    def repeated(self, measure: Callable[[], float]) -> list[float]:
        """Measure once, then for :attr:`seconds`, at least twice; return all but the first."""
        (number,) = self.agreed([self.seconds / measure()])
        return [measure() for _ in range(max(2, min(100, number)))]

    def together(self, works: Sequence[Callable[[], Any]]) -> float:
        """Start all ``works`` in order, without waiting; return the seconds until all are done."""
        begin = self.begin()
        for started in [work() for work in works]:
            started.wait()
        self.wait()
        return time.perf_counter() - begin

    def alone(self, name: str, size: int, which: int = 0) -> list[float]:
        """Return times of a collective: half the seconds of two, one behind the other."""
        works = [self.work(name, size, which)] * 2
        return [seconds / 2 for seconds in self.repeated(lambda: self.together(works))]

    def at_once(self, names: Sequence[str], size: int, alone: Mapping[str, float]) -> float:
        """Return the time of collectives in sequence divided by their time at once.

        Short collectives are repeated, so that all take equally long.
        """
        longest = max(alone[name] for name in names)
        counts = self.agreed([2 * longest / alone[name] for name in names])
        works = [self.work(name, size, i) for i, name in enumerate(names)]
        queued = [work for work, n in zip(works, counts, strict=True) for _ in range(n)]
        found = statistics.median(self.repeated(lambda: self.together(queued)))
        return sum(n * alone[name] for n, name in zip(counts, names, strict=True)) / found

    def in_turns(self, names: Sequence[str], size: int, alone: Mapping[str, float]) -> float:
        """Return the ratio of :meth:`at_once` for collectives that share one communicator."""
        works = [self.work(name, size) for name in names] * 2
        found = statistics.median(self.repeated(lambda: self.together(works)))
        return 2 * sum(alone[name] for name in names) / found

    def products(self) -> float:
        """Compute some products and wait for them; return the seconds of one."""
        begin = time.perf_counter()
        for _ in range(AT_A_TIME):
            torch.mm(self.square, self.square)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return (time.perf_counter() - begin) / AT_A_TIME

    def beside(self, name: str, size: int, alone: float, product: float) -> tuple[float, float]:
        """Return the rates of a collective and of products side by side, relative to each alone."""
        work, seconds, made = self.work(name, size), 0.0, 0
        for _ in range(REPEATED):
            begin = self.begin()
            works = [work(), work()]
            while not works[-1].is_completed():
                self.products()
                made += AT_A_TIME
            seconds += time.perf_counter() - begin
        return 2 * REPEATED * alone / seconds, made * product / seconds


def measure(links: Links, sizes: Sequence[int]) -> str:
    """Print measurements as they finish; return the options for simulate.py."""
    is_main = dist.get_rank() == 0
    say = print if is_main else lambda *_, **__: None
    where = f"{links.machines} machines of {links.local}"
    say(f"{where}, {links.device.type}, torch {torch.__version__}")
    latency = {}
    for name in NAMES:
        for which in range(2):
            latency[name] = statistics.median(links.alone(name, 1, which))
    say("a message of 1 number: " + ", ".join(f"{n} {1e6 * s:.0f} us" for n, s in latency.items()))
    alone: dict[str, float] = {}
    for size in sizes:
        for name in NAMES:
            each = links.alone(name, size)
            alone[name] = statistics.median(each)
            slow, middle, fast = (
                links.rate(name, size, f(each)) for f in (max, statistics.median, min)
            )
            say(
                f"{size / 2**20:6.0f} MiB {name:15} {middle:7.2f} GB/s ({slow:.2f} to {fast:.2f})",
                flush=True,
            )
    size, shares = sizes[-1], []
    for names in PAIRS:
        shares.append(links.at_once(names, size, alone))
        both = " + ".join(names)
        say(f"at once, {both:27} carry {shares[-1]:.2f} of what either does", flush=True)
    turns = links.in_turns(PAIRS[0], size, alone)
    say(f"in turns, {' + '.join(PAIRS[0])} carry {turns:.2f} of what either does", flush=True)
    product = statistics.median(links.repeated(links.products))
    found = [links.beside(name, size, alone[name], product) for name in NAMES[:2]]
    for name, (link, kept) in zip(NAMES, found, strict=False):
        say(f"{name} beside products: {link:.2f} of its rate, {kept:.2f} of theirs", flush=True)
    rates = [links.rate(name, size, alone[name]) for name in NAMES]
    hop = max(0.0, latency["all_gather"] - INSIDE) / max(1, links.machines - 1)
    beside, products = (min(1.0, statistics.mean(x)) for x in zip(*found, strict=True))
    return (
        f"--across {rates[0]:.3g} --across-direct {rates[1]:.3g} --across-sums {rates[2]:.3g} "
        f"--hop {1e6 * hop:.0f} --together {min(1.0, shares[0]):.2f} "
        f"--beside {beside:.2f} --products {products:.2f}"
    )


def main() -> int:
    """Join the other ranks, measure, and leave."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all measurements, about")
    parser.add_argument(
        "--mib", type=float, nargs="+", default=[64, 512, 1024], help="sizes of messages, MiB"
    )
    given = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo", device_id=device if is_cuda else None)
    number = len(NAMES) * (2 + len(given.mib)) + len(PAIRS) + 4
    # Half of the time is for first measurements, and for waiting until all ranks are idle.
    links = Links(device, given.seconds / number / 2)
    options = measure(links, [int(mib * 2**20) for mib in given.mib])
    if dist.get_rank() == 0:
        print(options, flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
