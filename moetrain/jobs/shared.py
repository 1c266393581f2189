"""One engine that many jobs share: what belongs to a job is copied in and out of it.

Between two steps a job's state is what a checkpoint holds. In the middle of one it has gradients
besides, which fit this layout alone and are of no use to another process.
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
    """In host memory; empty while they are in :attr:`file`, or in the engine."""
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
    """An engine whose trained values are one job's at a time, always in the same tensors."""

    def __init__(self, config: Config, arch: Architecture, world: World) -> None:
        super().__init__(config, arch, world)
        self.optimizer.begin()  # moments must exist before a job's are copied into them
        # All jobs begin with the adapter of lora.path, if any; else each job draws its own.
        self._is_drawn = config.lora.path is None
        self._first = {
            name: _to_host(part.tensor)
            for name, part in self.state()["model"].items()
            if not (self._is_drawn and name.endswith(ADAPTER))
        }
        """The values that every job begins with, without what is drawn."""

    @property
    def is_between_steps(self) -> bool:
        return not self._since_step

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

    @torch.no_grad()
    def copy_out(self, job: JobState) -> None:
        """Copy the job's state to host memory, and forget its step; RuntimeError: no room."""
        copies = {}
        for i, bucket in enumerate(self.fsdp.buckets):
            if self._since_step and bucket.has_gradient:
                assert bucket.gradient_N is not None
                assert bucket.squares_B is not None
                copies[f"{i}.gradient"] = _to_host(bucket.gradient_N)
                copies[f"{i}.squares"] = _to_host(bucket.squares_B)
        copies |= {name: _to_host(tensor) for name, tensor in self._tensors(job).items()}
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        job.tensors, job.since_step = copies, self._since_step
        self.forget()

    @torch.no_grad()
    def copy_in(self, job: JobState) -> None:
        """Put back what :meth:`copy_out` has copied, which ``job`` then holds no longer."""
        for name, tensor in self._tensors(job).items():
            tensor.copy_(job.tensors[name], non_blocking=True)
        self.forget()
        for i, bucket in enumerate(self.fsdp.buckets):
            if (gradient_N := job.tensors.get(f"{i}.gradient")) is None:
                continue
            squares_B = job.tensors[f"{i}.squares"]
            if bucket.gradient_N is None:
                bucket.gradient_N = bucket.gradients.empty(gradient_N.numel(), gradient_N.dtype)
            if bucket.squares_B is None:
                bucket.squares_B = torch.empty_like(squares_B, device=bucket.shard_N.device)
            bucket.gradient_N.copy_(gradient_N, non_blocking=True)
            bucket.squares_B.copy_(squares_B, non_blocking=True)
            bucket.has_gradient = True
        self._since_step = job.since_step
        job.tensors, job.since_step = {}, []

    def _tensors(self, job: JobState) -> dict[str, torch.Tensor]:
        groups = ((group, parts) for group, parts in self.state().items() if group in job.kinds)
        return {f"{group}/{name}": x.tensor for group, parts in groups for name, x in parts.items()}


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy ``tensor`` to the host without waiting; into pinned memory if it is on CUDA."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    return host.copy_(tensor.detach(), non_blocking=True)
