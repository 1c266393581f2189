"""One engine that many jobs share: it goes to where a job's state lies, which copies nothing.

Between two steps a job's state is what a checkpoint holds. In the middle of one it has gradients
besides, which fit this layout alone and are of no use to another process. States that have no room
on the device are copied to host memory, and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moetrain.checkpoint.read import Checkpoint
from moetrain.config import Config
from moetrain.models.architecture import Architecture
from moetrain.models.rules import ADAPTER
from moetrain.parallel.apply import draw_values
from moetrain.parallel.world import World
from moetrain.train.engine import Engine, Totals


@dataclass
class JobState:
    """How far a job has come and, between its turns, its tensors."""

    id: str | None = None
    """None: nobody's."""
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
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Empty while they are in :attr:`file`."""
    is_resident: bool = False
    """Whether the tensors are on the device, where the engine takes them as they are."""
    since_step: list[Totals] = field(default_factory=list)
    """Sums of the forward_backwards of an unfinished step."""
    file: Path | None = None
    """The file that holds the tensors; None: they are in memory."""
    kinds: Sequence[str] = Engine.GROUPS
    """Groups of the engine's state that are its own; a sampler has no moments."""

    def put_down(self, file: Path) -> str:
        """Move the tensors to ``file``; return what is wrong, or an empty string."""
        try:
            save_file({name: x.contiguous() for name, x in self.tensors.items()}, file)
        except (OSError, SafetensorError) as error:
            return f"{file}: {error}"
        self.tensors.clear()
        self.file = file
        return ""

    def pick_up(self) -> None:
        if self.file is not None:
            self.tensors = load_file(self.file)
            self.drop()

    def drop(self) -> None:
        if self.file is not None:
            self.file.unlink()
            self.file = None


class SharedEngine(Engine):
    """An engine whose trained values are one job's at a time, in the same tensors, whose memory is
    the job's."""

    def __init__(self, config: Config, arch: Architecture, world: World) -> None:
        super().__init__(config, arch, world)
        for arena in (self.fsdp.gradients, self.optimizer.arena):
            arena.fixed = False  # their memory comes and goes with jobs
        self.optimizer.begin()
        # All jobs begin with the adapter of lora.path, if any; else each job draws its own.
        self._is_drawn = config.lora.path is None
        self._first = {
            name: _to_host(part.tensor)
            for name, part in self.state()["model"].items()
            if not (self._is_drawn and name.endswith(ADAPTER))
        }
        """The values that every job begins with, without what is drawn."""
        self._trained = [bucket for bucket in self.fsdp.buckets if bucket.is_trained]
        model = [*(bucket.shard_N for bucket in self._trained), *self.model.buffers()]
        views = [*model, *self.optimizer.memory]
        for member in (member for bucket in self._trained for member in bucket.members):
            views += [member.local, member.parameter._local_tensor]  # pyright: ignore
            views += self.optimizer.state[member.local].values()
        self._views: dict[str, list[tuple[torch.Tensor, int]]] = {}
        """By name, tensors that lie in one piece of memory, the whole first, and where there."""
        for group, wholes in zip(self.GROUPS, (model, self.optimizer.memory), strict=True):
            for i, whole in enumerate(wholes):
                self._views[f"{group}.{i}"] = _views_of(whole, views)
        self._free = [{name: views[0][0].detach() for name, views in self._views.items()}]
        """Memory on the device for the tensors of a job."""

    @property
    def is_between_steps(self) -> bool:
        return not self._since_step

    @torch.no_grad()
    def enter(self, job: JobState) -> None:
        """Take the state of ``job``, where it lies on the device, or copied there."""
        job.pick_up()
        if not job.is_resident:
            mine = self._free.pop() if self._free else self._new_memory()
            for name, tensor in job.tensors.items():
                if name not in mine:
                    mine[name] = torch.empty_like(tensor, device=self.world.device)
                mine[name].copy_(tensor, non_blocking=True)
            job.tensors, job.is_resident = mine, True
        for name, views in self._views.items():
            for view, start in views:
                view.data = job.tensors[name].as_strided(view.shape, view.stride(), start)
        for i, bucket in enumerate(self._trained):
            bucket.moved()
            gradient = [job.tensors.pop(f"step.{i}.{name}", None) for name in ("sum", "squares")]
            bucket.gradient_N, bucket.squares_B = gradient
            bucket.has_gradient = bucket.gradient_N is not None
        self._since_step, job.since_step = job.since_step, []

    def _new_memory(self) -> dict[str, torch.Tensor]:
        return {name: torch.empty_like(views[0][0]) for name, views in self._views.items()}

    def leave(self, job: JobState) -> None:
        """Leave the state of ``job``, in whatever step it is, where it lies."""
        job.since_step, self._since_step = self._since_step, []
        for i, bucket in enumerate(self._trained):
            if bucket.has_gradient:
                assert bucket.gradient_N is not None
                assert bucket.squares_B is not None
                job.tensors[f"step.{i}.sum"] = bucket.gradient_N
                job.tensors[f"step.{i}.squares"] = bucket.squares_B

    def drop(self, job: JobState) -> None:
        """Forget the tensors of ``job``."""
        if job.is_resident:
            self._free.append({name: job.tensors[name] for name in self._views})
        job.drop()
        job.tensors, job.is_resident = {}, False

    @torch.no_grad()
    def begin(self, seed: int) -> None:
        """Take the state of a job that has not begun."""
        for name, part in self.state()["model"].items():
            if name in self._first:
                part.tensor.copy_(self._first[name])
        if self._is_drawn:
            draw_values(self.fsdp, self.config.model.init_std, seed, all=False)
        self.optimizer.begin()

    def restore(self, job: JobState, found: Checkpoint, groups: Sequence[str]) -> None:
        for group in groups:  # one at a time: each takes host memory
            self.load_state({group: found.group(group)})
        state = found.state
        job.seen, job.steps, job.tokens = state["step"], state["steps"], state["tokens"]

    def copy_out(self, job: JobState) -> None:
        """Copy the tensors of ``job`` to host memory; RuntimeError: there is no room."""
        kinds = (*job.kinds, "step")
        mine = {name: x for name, x in job.tensors.items() if name.partition(".")[0] in kinds}
        copies = {name: _to_host(x) for name, x in mine.items()}
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        self.drop(job)
        job.tensors = copies


def _views_of(
    whole: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, int]]:
    """Return ``whole`` and those of ``tensors`` that lie in its memory, and at which number."""
    starts = [(x, (x.data_ptr() - whole.data_ptr()) // whole.element_size()) for x in tensors]
    return [(whole, 0), *(pair for pair in starts if 0 <= pair[1] < whole.numel())]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy ``tensor`` to the host without waiting; into pinned memory if it is on CUDA."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    return host.copy_(tensor.detach(), non_blocking=True)
