"""What ``--dry_run`` says of memory: the machine it plans for, the estimate, whether it fits.

Where it does not fit, settings are tried in the order of what they cost, each by the same estimate,
until one does. Only those are tried that change no result but by rounding. Left out on purpose:
speed, and host memory of the tried settings (:mod:`moetrain.train.host_memory` says the run's own).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from moetrain.config import Config, ConfigError
from moetrain.config.hardware import GIB
from moetrain.config.rl import SleepName
from moetrain.models.architecture import Architecture
from moetrain.models.planned import compute_dtype
from moetrain.parallel.pipeline.stages import describe_pipeline
from moetrain.parallel.processes import Machine, planned_machine
from moetrain.parallel.world import plan_world
from moetrain.train.memory import MARGIN, MemoryEstimate, check_memory, estimate_ranks, least_sleep
from moetrain.train.preflight import check_effects

MOST_GPUS = 4096
"""That are tried."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of ``optim.offload_fraction``, that are tried."""

Change = Mapping[str, Any]
"""Settings with other values, by dotted name."""


class MemoryPlan(NamedTuple):
    """A run on a machine."""

    config: Config
    arch: Architecture
    machine: Machine
    generates: bool
    """Whether it is one of reinforcement learning."""

    @classmethod
    def of(cls, config: Config, arch: Architecture, *, generates: bool) -> MemoryPlan:
        """The plan of ``config`` as it is.

        Raises:
            ConfigError: a setting has no effect on such a machine.
        """
        machine = planned_machine(config)
        check_effects(config, machine.device)
        # The estimate counts what ranks on GPUs need of one another.
        config = config.filled({"train.device": machine.device.type}, "the plan")
        return cls(config, arch, machine, generates)

    def ranks(self) -> list[MemoryEstimate]:
        """The estimate of each pipeline rank; raises ConfigError where the layout does not fit."""
        machine, sleep = self.machine, None
        dims = plan_world(self.config, self.arch, machine.processes)
        sizes = self.config, self.arch, dims, compute_dtype(self.config, machine.device)
        if self.generates:
            sleep: SleepName | None = least_sleep(*sizes, machine.capacity)
        return estimate_ranks(*sizes, sleep)

    def peak(self) -> float:
        """Bytes of the device that takes most."""
        return max(estimate.total for estimate in self.ranks())

    def changed(self, change: Change) -> MemoryPlan | None:
        """The plan with ``change``; None: such settings cannot be."""
        try:
            config = self.config.filled(change, "the plan")
            config.check()
            plan = self.of(config.fitting(), self.arch, generates=self.generates)
            plan_world(plan.config, plan.arch, plan.machine.processes)
        except ConfigError:
            return None
        return plan

    def first_that_fits(self, changes: Iterable[Change]) -> str | None:
        """The first of ``changes`` with which all fits for sure, in words; None: with none."""
        for change in changes:
            plan = self.changed(change)
            if plan and (peak := plan.peak()) * (1 + MARGIN) <= plan.machine.capacity:
                words = " ".join(f"--{name} {_shown(value)}" for name, value in change.items())
                return f"{words} ({peak / GIB:.1f} GiB)"
        return None


def plan_memory(config: Config, arch: Architecture, *, generates: bool = False) -> str:
    """The machine, the estimate and the verdict in words; needs no device.

    Raises:
        ConfigError: the degrees do not fit the model or the number of processes, or a setting has
            no effect on such a machine; what generates does not fit into it.
    """
    plan = MemoryPlan.of(config, arch, generates=generates)
    ranks, machine = plan.ranks(), plan.machine
    found = max(ranks, key=lambda estimate: estimate.total)
    if generates:  # whose cache is as large as settings say: no other setting makes it fit
        check_memory(found, config, machine.capacity)
    lines = [f"memory on {machine.describe()}, estimated: {found.describe()}"]
    dims = plan_world(plan.config, arch, machine.processes)
    if dims.pp > 1:
        by_rank = " ".join(f"{estimate.total / GIB:.1f}" for estimate in ranks)
        lines.append(f"{describe_pipeline(plan.config, arch, dims)}, GiB {by_rank}")
    return "\n".join([*lines, _verdict(plan, found.total)])


def _verdict(plan: MemoryPlan, peak: float) -> str:
    """Whether ``peak`` bytes fit, as the estimate is right to a tenth; if not, what would."""
    machine = plan.machine
    sizes = f"{peak / GIB:.1f} of {machine.capacity / GIB:.1f} GiB"
    if peak * (1 + MARGIN) <= machine.capacity:
        return f"fits: {sizes}"
    may = peak * (1 - MARGIN) <= machine.capacity
    verdict = f"{'may not fit' if may else 'does not fit'}: {sizes}, give or take {MARGIN:.0%}"
    ways = [plan.first_that_fits(_changes(plan))]
    if machine.device.type == "cuda":
        ways.append(plan.first_that_fits(_more_gpus(plan)))
    nearest = ", or ".join(filter(None, ways))
    return f"{verdict}; {f'nearest that fits: {nearest}' if nearest else 'nothing tried would'}"


def _changes(plan: MemoryPlan) -> Iterator[Change]:
    """On the same devices, from what costs least: a setting by itself, then several together."""
    config, on_gpus = plan.config, plan.machine.device.type == "cuda"
    offload: list[Change] = [{"activation.offload": "auto"}]
    if not on_gpus or config.activation.offload:
        offload = []
    reshard: list[Change] = [{"parallel.reshard_after_forward": True}]
    if plan.machine.processes == 1 or config.parallel.reshard_after_forward is True:
        reshard = []
    batches, recompute = _smaller_batches(config), _more_recomputation(config)
    yield from (*offload, *reshard, *batches, *recompute)
    yield from ({**first, **then} for first in reshard for then in (*batches, *recompute))
    least = _least(reshard, batches, recompute)
    yield least
    for share in SHARES if on_gpus else ():
        if share > config.optim.offload_fraction:
            yield {**least, "optim.offload_fraction": share}


def _smaller_batches(config: Config) -> list[Change]:
    rows = config.train.micro_batch_size
    return [{"train.micro_batch_size": n} for n in range(rows - 1, 0, -1) if rows % n == 0]


def _more_recomputation(config: Config) -> list[Change]:
    policies = ("none", "selective", "full")
    more = policies[policies.index(config.activation.policy) + 1 :]
    return [{"activation.policy": policy} for policy in more]


def _least(*ways: list[Change]) -> Change:
    """The last of each of ``ways``, all together."""
    return {name: value for way in ways for name, value in (way[-1] if way else {}).items()}


def _more_gpus(plan: MemoryPlan) -> Iterator[Change]:
    """Twice as many, and so on: with the settings as they are, then with the least memory."""
    config, p = plan.config, plan.config.parallel
    for base in ({}, _least(_smaller_batches(config), _more_recomputation(config))):
        size = 2 * plan.machine.processes
        while size <= MOST_GPUS:
            change = {**base, "launch.gpus": size}
            if config.launch.nproc not in ("auto", 1):
                change["launch.nproc"] = "auto"
            if p.dp_shard > 0:
                change["parallel.dp_shard"] = p.dp_shard * size // plan.machine.processes
            rows = change.get("train.micro_batch_size", config.train.micro_batch_size)
            rows *= size // (p.tp * p.pp * p.cp)
            if rows and config.train.global_batch_size % rows:
                whole = rows * math.ceil(config.train.global_batch_size / rows)
                change["train.global_batch_size"] = whole
            yield change
            size *= 2


def _shown(value: Any) -> str:
    return "yes" if value is True else str(value)
