"""One engine that many jobs share: what belongs to a job is copied in and out of it.

Between two steps a job's state is what a checkpoint holds. In the middle of one it has gradients
besides, which fit this layout alone and are of no use to another process; each rank keeps its part
in a file of its own. A process that is killed leaves such files for the next to remove, which then
computes the beginning of that step again, once.

Several ranks share the work: only the main one has jobs, their files and the HTTP server. Before it
runs a method of the session that is decorated :func:`together`, it broadcasts the name and the
arguments, as JSON, to the others, which wait in :func:`follow`. Then all report how it went: what
has failed on one rank has failed. Anything large lies in files, which all ranks see.

Left out on purpose: a rank that fails in the middle of a collective, for which the others wait
until that gives up, as in any run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moetrain.config import Config
from moetrain.models.architecture import Architecture
from moetrain.parallel.layout import TensorSlice
from moetrain.parallel.world import World
from moetrain.train.engine import Engine, Totals


class _Pending(NamedTuple):
    """Gradients that forward_backward has left for the next step."""

    gradients: dict[str, torch.Tensor]
    """In host memory: gradients and their squares, by bucket, where there are any."""
    since_step: list[Totals]


class SharedEngine(Engine):
    """An engine whose trained values are one job's at a time, always in the same tensors."""

    def __init__(self, config: Config, arch: Architecture, world: World) -> None:
        super().__init__(config, arch, world)
        self.optimizer.begin()  # moments must exist before a job's are copied into them

    @property
    def is_between_steps(self) -> bool:
        """Whether no gradients wait for a step."""
        return not self._since_step

    @torch.no_grad()
    def set_aside(self) -> _Pending | None:
        """Take the gradients of the step so far out of the engine; None: there are none."""
        if self.is_between_steps:
            return None
        kept = {}
        for i, bucket in enumerate(self.fsdp.buckets):
            if bucket.has_gradient:
                assert bucket.gradient_N is not None
                assert bucket.squares_B is not None
                kept |= {f"{i}.gradient": to_host(bucket.gradient_N)}
                kept |= {f"{i}.squares": to_host(bucket.squares_B)}
        pending = _Pending(kept, self._since_step)
        self._forget()
        return pending

    @torch.no_grad()
    def take_back(self, pending: _Pending | None) -> None:
        """Put gradients back that :meth:`set_aside` has taken out."""
        self._forget()
        if pending is None:
            return
        for i, bucket in enumerate(self.fsdp.buckets):
            if (gradient_N := pending.gradients.get(f"{i}.gradient")) is None:
                continue
            squares_B = pending.gradients[f"{i}.squares"]
            if bucket.gradient_N is None:
                bucket.gradient_N = bucket.gradients.empty(gradient_N.numel(), gradient_N.dtype)
            if bucket.squares_B is None:
                bucket.squares_B = torch.empty_like(squares_B, device=bucket.shard_N.device)
            bucket.gradient_N.copy_(gradient_N, non_blocking=True)
            bucket.squares_B.copy_(squares_B, non_blocking=True)
            bucket.has_gradient = True
        self._since_step = list(pending.since_step)

    def forget(self) -> None:
        """Forget the gradients of the step so far."""
        self._forget()


def copies_of(parts: Mapping[str, TensorSlice]) -> dict[str, TensorSlice]:
    """Copy ``parts`` to the host."""
    return {name: part._replace(tensor=to_host(part.tensor)) for name, part in parts.items()}


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy ``tensor`` to the host without waiting; into pinned memory if it is on CUDA."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    return host.copy_(tensor.detach(), non_blocking=True)


# ---- a job's state between its turns -------------------------------------------------------------


class Progress(NamedTuple):
    """How far a job's state has come."""

    seen: int = 0
    """Requests that it has seen."""
    steps: int = 0
    """Optimizer steps."""
    tokens: int = 0
    """Tokens that were learned from."""


@dataclass
class Held:
    """A job's state between its turns."""

    state: dict[str, torch.Tensor]
    """Tensors by name; empty while they are in :attr:`file`, as are gradients."""
    pending: _Pending | None
    progress: Progress
    saved: int
    """Requests that the newest checkpoint has seen; 0: there is none."""
    folder: Path
    file: Path | None = None
    """The file that holds the tensors; None: they are in memory."""

    def put_down(self, file: Path) -> str:
        """Move the tensors to ``file``; return what is wrong, or an empty string."""
        gradients = self.pending.gradients if self.pending else {}
        tensors = {f"state {name}": x.contiguous() for name, x in self.state.items()}
        tensors |= {f"gradient {name}": x for name, x in gradients.items()}
        try:
            save_file(tensors, file)
        except (OSError, SafetensorError) as error:
            return f"{file}: {error}"
        self.state.clear()
        gradients.clear()
        self.file = file
        return ""

    def pick_up(self) -> None:
        """Load the tensors back into memory."""
        if self.file is None:
            return
        for name, tensor in load_file(self.file).items():
            kind, _, key = name.partition(" ")
            if kind == "state":
                self.state[key] = tensor
            elif self.pending is not None:
                self.pending.gradients[key] = tensor
        self.drop()

    def drop(self) -> None:
        """Remove the file, if there is one."""
        if self.file is not None:
            self.file.unlink()
            self.file = None


# ---- several ranks -------------------------------------------------------------------------------


class _Spread(Protocol):
    """A class some of whose methods all ranks run together."""

    world: World
    is_told: bool
    """Whether every rank runs the method that is running now."""


D = TypeVar("D", bound=_Spread)
P = ParamSpec("P")
R = TypeVar("R")


class FailedElsewhere(RuntimeError):
    """A method that succeeded here has failed on another rank."""


def together(method: Callable[Concatenate[D, P], R]) -> Callable[Concatenate[D, P], R]:
    """Decorate a method that the main rank calls, with JSON arguments, and every rank runs."""

    @wraps(method)
    def call(session: D, *args: P.args, **kwargs: P.kwargs) -> R:
        if session.is_told or session.world.size == 1:
            return method(session, *args, **kwargs)
        assert not kwargs
        session.world.broadcast(json.dumps([method.__name__, *args]))
        return _run(session, method, *args)

    return call


def _run(session: Any, method: Callable[..., R], *args: Any) -> R:
    session.is_told, result, error = True, None, None
    try:
        result = method(session, *args)
    except Exception as failure:  # noqa: BLE001 - raised below, when all ranks know of it
        error = failure
    finally:
        session.is_told = False
    others = session.world.any("" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if others:
        raise FailedElsewhere(others)
    return result  # pyright: ignore[reportReturnType]


def follow(session: Any) -> None:
    """Run the methods that the main rank calls, until it calls :func:`dismiss`."""
    while command := json.loads(session.world.broadcast("")):
        name, *args = command
        try:
            _run(session, getattr(type(session), name).__wrapped__, *args)
        except Exception as error:  # noqa: BLE001 - the main rank was told, and decides
            del error


def dismiss(session: _Spread) -> None:
    """Let the other ranks return from :func:`follow`. Called on the main rank, at the end."""
    if session.world.size > 1:
        session.world.broadcast("null")
