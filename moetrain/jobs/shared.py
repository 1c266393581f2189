"""One engine that many jobs share. To make a job active, it points its tensors at the job's state.

That copies nothing if the state is on the device. States for which the device has no room are moved
to host memory, and back.

Between two steps a job's state is what a checkpoint holds. In the middle of a step it also has
gradients. These have the layout of this process, and another process cannot use them.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moetrain.checkpoint.read import Checkpoint
from moetrain.config import Config, ConfigError
from moetrain.jobs.api import OptimStep, Refused
from moetrain.models.architecture import Architecture
from moetrain.models.layers import Linear
from moetrain.models.moe import Experts
from moetrain.models.parts.lora import adaptable
from moetrain.models.rules import ADAPTER
from moetrain.parallel.apply import draw_values
from moetrain.parallel.fsdp.bucket import Bucket
from moetrain.parallel.fsdp.storage.plain import Plain
from moetrain.parallel.world import World
from moetrain.runtime.memory import LateValues
from moetrain.train.engine import Engine
from moetrain.train.passes import Totals


@dataclass
class JobState:
    """The state of a job in this process, and the progress that it stands for."""

    id: str | None = None
    """None: the state belongs to no job."""
    seed: int = 0
    folder: Path = field(default_factory=Path)
    seen: int = 0
    """Requests that the state has seen."""
    steps: int = 0
    """Optimizer steps."""
    tokens: int = 0
    """Tokens that were learned from."""
    saved: int = 0
    """Requests that the newest checkpoint has seen; 0: there is none."""
    saved_time: float = field(default_factory=time.monotonic)
    """When the state was last saved or restored, in seconds of :func:`time.monotonic`."""
    has_loaded: bool = False
    """True: a save was loaded since the last checkpoint. After a crash the request would be served
    again, and the save may be gone by then. So the state is saved soon."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    place: Literal["device", "host", "file"] = "host"
    """The place of the tensors. The engine uses those on the device as they are. Those in a file
    are mapped into memory and read when they are used."""
    views: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Pairs of a tensor of the engine and this job's tensor for it, on the device."""
    since_step: list[Totals] = field(default_factory=list)
    """Sums of the forward_backwards of an unfinished step. The engine has them while the job is
    active."""
    kinds: Sequence[str] = Engine.GROUPS
    """Groups of the engine's state that belong to the job; a sampler has no moments."""

    def note_saved(self) -> None:
        """Note that a checkpoint has this state."""
        self.saved, self.saved_time, self.has_loaded = self.seen, time.monotonic(), False

    def is_due(self, config: Config) -> bool:
        """Return whether to save the state.

        It has seen new requests, and they are many enough, or the last checkpoint is old enough, or
        a save was loaded.
        """
        new, minutes = self.seen - self.saved, config.checkpoint.minutes
        by_time = 0 < 60 * minutes <= time.monotonic() - self.saved_time
        by_number = new >= config.jobs.save_interval
        return new > 0 and (self.has_loaded or by_time or by_number)

    def move_to_file(self, file: Path) -> str:
        """Move the tensors to ``file``, and map it. Return an error, or "".

        The name is removed at once, so that the disk is free again when the tensors are dropped.
        """
        try:
            save_file({name: x.contiguous() for name, x in self.tensors.items()}, file)
            self.tensors, self.place = load_file(file), "file"
            file.unlink()
        except (OSError, SafetensorError) as error:
            return f"{file}: {error}"
        return ""


def check_settings(config: Config) -> None:
    """Raise ConfigError for settings that a service of jobs cannot have."""
    if not config.lora.rank:
        raise ConfigError(
            "lora.rank", "0, but jobs train adapters of one model; set it, for example to 8"
        )
    if config.lora.use_dora:
        raise ConfigError("lora.use_dora", "yes, but jobs train plain adapters; set no")
    for name in ("modules_to_save", "trainable_tokens"):
        if values := getattr(config.lora, name):
            problem = f"{','.join(values)!r}, but jobs train adapters alone; unset it"
            problem += " and data.new_tokens" * bool(config.data.new_tokens)  # which needs it
            raise ConfigError(f"lora.{name}", problem)
    if share := config.optim.offload_fraction:
        problem = f"{share}, but jobs take turns with one optimizer's state on the device"
        raise ConfigError("optim.offload_fraction", f"{problem}; leave it 0")


class SharedEngine(Engine):
    """An engine whose trained tensors are the active job's: they point at its memory.

    Attributes:
        part_rows: rows that each job has in a pass that several share.
        part_seq_len: tokens of such a row.
    """

    def __init__(self, config: Config, arch: Architecture, world: World) -> None:
        """Build the engine.

        Raises ConfigError as :class:`Engine` and :func:`check_settings` do, or if jobs cannot share
        a pass although ``jobs.max_tenants`` is above 1.
        """
        check_settings(config)
        super().__init__(config, arch, world)
        self._check_tenants()
        tenants, size = config.jobs.max_tenants, config.train.micro_batch_size
        self.part_rows = max(1, size // tenants)
        self.part_seq_len = size * config.data.seq_len // (tenants * self.part_rows)
        self.fsdp.shows_gradients = config.log.find_nan
        for arena in (self.fsdp.gradients, self.optimizer.arena):
            arena.fixed = False  # each job brings memory of its own
        self.optimizer.begin()
        # All jobs begin with the adapter of lora.path if it is set; else each job draws its own.
        self._is_drawn = config.lora.path is None
        self._first = {
            name: _to_host(part.tensor)
            for name, part in self.state()["model"].items()
            if not (self._is_drawn and name.endswith(ADAPTER))
        }
        """The values that every job begins with, except those that are drawn."""
        model = [*(bucket.shard_N for bucket in self.fsdp.trained), *self.model.buffers()]
        views: list[torch.Tensor] = []
        for member in (member for bucket in self.fsdp.trained for member in bucket.members):
            views += [member.local, member.parameter._local_tensor]  # pyright: ignore
            views += self.optimizer.state[member.local].values()
        self._views: dict[str, list[tuple[torch.Tensor, int]]] = {}
        """For each piece of memory of a job, the engine's tensors in it and their offsets, in
        elements; the tensor of the whole piece is first."""
        for group, wholes in zip(self.GROUPS, (model, self.optimizer.memory), strict=True):
            for i, whole in enumerate(wholes):
                first, size = whole.data_ptr(), whole.element_size()
                starts = [(x, (x.data_ptr() - first) // size) for x in views if x is not whole]
                within = [(x, start) for x, start in starts if 0 <= start < whole.numel()]
                self._views[f"{group}.{i}"] = [(whole, 0), *within]
        # Other ranks read this memory: the active job's values are copied there.
        read = {f"model.{i}" for i, b in enumerate(self.fsdp.trained) if b.is_read_in_place}
        self.free = [
            {name: views[0][0].detach() for name, views in self._views.items() if name not in read}
        ]
        """Memory on the device for the tensors of further jobs."""

    @property
    def is_between_steps(self) -> bool:
        """True: the active job has no gradients."""
        return not self.since_step

    @torch.no_grad()
    def activate(self, job: JobState) -> None:
        """Make ``job`` active: point the engine's tensors at its state.

        A state that is not on the device is copied there.
        """
        # 1. Take memory on the device, and copy the job's values there.
        if job.place != "device":
            mine = self.free.pop() if self.free else {}
            missing = {name: views[0][0] for name, views in self._views.items()} | job.tensors
            for name in missing.keys() - mine:
                mine[name] = torch.empty_like(missing[name], device=self.world.device)
            for name, tensor in job.tensors.items():
                mine[name].copy_(tensor, non_blocking=True)
            job.tensors, job.place = mine, "device"
            job.views = [
                (view, mine[name].as_strided(view.shape, view.stride(), start))
                for name, views in self._views.items()
                for view, start in views
            ]
        # 2. Point the engine's tensors there.
        for view, there in job.views:
            view.data = there
        for i, bucket in enumerate(self.fsdp.trained):
            bucket.moved()
            _take_gradient(bucket, job, i)
        self.since_step, job.since_step = job.since_step, []

    def deactivate(self, job: JobState) -> None:
        """Give ``job`` the gradients and sums of its step back; its state stays where it is."""
        job.since_step, self.since_step = self.since_step, []
        for i, bucket in enumerate(self.fsdp.trained):
            _keep_gradient(bucket, job, i)

    def update(
        self, jobs: Sequence[JobState], requests: Sequence[OptimStep]
    ) -> Callable[[], list[dict[str, Any]]]:
        """Queue an update of each of ``jobs``: the active one, or several that are not active.

        Returns a function, to be called once, that waits for the device, counts the steps and
        returns the results. Raises Refused: a job has no gradient.
        """
        outcomes, optimizer = [], self.optimizer
        for job, asked in zip(jobs, (request.adam_params for request in requests), strict=True):
            if len(jobs) > 1:
                self.activate(job)
            if self.is_between_steps:
                raise Refused("there was no forward_backward since the last step")
            numbers = asked.model_dump(include={"beta1", "beta2", "eps"})
            optimizer.settings = optimizer.settings._replace(**numbers)
            limit = asked.grad_clip_norm or math.inf
            change = {"weight_decay": asked.weight_decay, "max_grad_norm": limit}
            optimizer.config = optimizer.config.model_copy(update=change)
            outcomes += self.step(asked.learning_rate)
            if len(jobs) > 1:
                self.deactivate(job)
        late = LateValues(torch.stack([x.double() for x in outcomes]))

        def results() -> list[dict[str, Any]]:
            metrics, found = [], iter(late.read().tolist())
            for job, norm, skipped in zip(jobs, found, found, strict=True):
                job.steps += not skipped
                metrics.append({"grad_norm": norm, "skipped": skipped, "steps": float(job.steps)})
            return [{"metrics": {k: x for k, x in m.items() if math.isfinite(x)}} for m in metrics]

        return results

    @contextmanager
    def batched(self, jobs: Sequence[JobState]) -> Iterator[None]:
        """Let ``jobs`` share the pass that runs while the context is open.

        They are on the device and not active. Each has one term of the loss and an equal part of
        the rows, in order.
        """
        overlays = list[TenantOverlay]()
        for i, bucket in enumerate(self.fsdp.trained):
            overlay = TenantOverlay(bucket, [job.tensors[f"model.{i}"] for job in jobs])
            for job, tenant in zip(jobs, overlay.tenants, strict=True):
                _take_gradient(tenant, job, i)
            bucket.overlay = overlay
            overlays.append(overlay)
        try:
            yield
            for i, overlay in enumerate(overlays):
                for job, tenant in zip(jobs, overlay.tenants, strict=True):
                    _keep_gradient(tenant, job, i)
            for totals in self.since_step:
                for job, total in zip(jobs, totals.terms.values(), strict=True):
                    job.since_step.append(Totals(total, {}, None))
        finally:
            self.since_step = []
            for bucket in self.fsdp.trained:
                bucket.overlay = None

    def max_resident(self, room: float) -> int:
        """Return how many jobs may be on the device at once. Collective.

        ``room``: bytes of the device that the run leaves free.

        Raises ConfigError: ``jobs.max_resident`` is below ``jobs.max_tenants``.
        """
        jobs = self.config.jobs
        if jobs.max_resident != "auto":
            if jobs.max_resident < jobs.max_tenants:
                problem = f"{jobs.max_resident} is below jobs.max_tenants {jobs.max_tenants}"
                problem += ", and all jobs of a pass must be on the device"
                raise ConfigError("jobs.max_resident", f"{problem}; raise it")
            return jobs.max_resident
        each = self.state_bytes() * 4 / 3  # with gradients
        fit = 1 + int(room // each) if self.world.device.type == "cuda" else 1
        return min(self.world.gather(max(fit, jobs.max_tenants)))

    def _check_tenants(self) -> None:
        kinds = {type(module) for _, module in adaptable(self.model.layers) if module.lora_scale}
        odd = self.config.lora.dropout or [*self.model.buffers()] or kinds - {Linear, Experts}
        if self.config.jobs.max_tenants > 1 and (odd or self.world.size > 1):
            needs = "one process, no lora.dropout, no selection bias, and no adapters of routers"
            problem = f"but a shared pass needs {needs} or of experts other than SwiGLU"
            problem = f"{self.config.jobs.max_tenants}, {problem}; use 1"
            raise ConfigError("jobs.max_tenants", problem)

    def drop(self, job: JobState) -> None:
        """Drop the tensors of ``job``. Other jobs may then use its memory on the device."""
        if job.place == "device":
            self.free.append({name: job.tensors[name] for name in self._views})
        job.tensors, job.place, job.views = {}, "host", []

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Give the active job the state of a new one."""
        for name, part in self.state()["model"].items():
            if name in self._first:
                part.tensor.copy_(self._first[name])
        if self._is_drawn:
            draw_values(self.fsdp, self.config.model.init_std, seed, all=False)
        self.optimizer.begin()

    def restore(self, job: JobState, found: Checkpoint, groups: Sequence[str]) -> None:
        """Load ``groups`` of the checkpoint ``found`` into ``job``, which is active."""
        for group in groups:  # one at a time: each takes host memory
            self.load_state({group: found.group(group)})
        state = found.state
        job.seen, job.steps, job.tokens = state["step"], state["steps"], state["tokens"]

    def move_to_host(self, job: JobState) -> None:
        """Move the tensors of ``job`` to host memory; RuntimeError: there is no room."""
        kinds = (*job.kinds, "step")
        mine = {name: x for name, x in job.tensors.items() if name.partition(".")[0] in kinds}
        copies = {name: _to_host(x) for name, x in mine.items()}
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        self.drop(job)
        job.tensors = copies


class TenantOverlay:
    """Stacks the adapters of several jobs, S tenants, in place of a bucket's own values.

    It is the bucket's :class:`~moetrain.parallel.fsdp.bucket.Overlay`. There is one process, so a
    tenant's shard is its whole adapter.

    Attributes:
        tenants: for each tenant a bucket over that job's shard; it receives the job's gradient.
    """

    def __init__(self, bucket: Bucket, shards: Sequence[torch.Tensor]) -> None:
        self.bucket = bucket
        self.tenants = [replace(bucket, storage=Plain(shard_N)) for shard_N in shards]

    def values(self) -> list[torch.Tensor]:
        shards = [tenant.shard_N for tenant in self.tenants]
        stacked_SN = torch.stack(shards, out=shards[0].new_empty(0, dtype=self.bucket.dtype))
        return [member.piece_of(stacked_SN) for member in self.bucket.members]

    def reduce(self, gradients: Sequence[torch.Tensor | None]) -> None:
        chunks_SN = self.bucket.chunks(gradients, len(self.tenants))
        for tenant, chunk_1N in zip(self.tenants, chunks_SN.split(1), strict=True):
            tenant.unreduced_WN = chunk_1N
            tenant.flush()


def _take_gradient(bucket: Bucket, job: JobState, i: int) -> None:
    """Give ``bucket``, the i-th that is trained, the job's gradient, if there is one."""
    for name in ("gradient_N", "squares_B"):
        setattr(bucket, name, job.tensors.pop(f"step.{i}.{name}", None))
    bucket.has_gradient = bucket.gradient_N is not None


def _keep_gradient(bucket: Bucket, job: JobState, i: int) -> None:
    """Keep the gradient of ``bucket`` among the job's tensors."""
    for name in ("gradient_N", "squares_B") if bucket.has_gradient else ():
        job.tensors[f"step.{i}.{name}"] = getattr(bucket, name)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy ``tensor`` to the host without waiting; into pinned memory if it is on CUDA."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    return host.copy_(tensor.detach(), non_blocking=True)
