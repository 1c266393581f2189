"""Names of a step's parts in profiler traces.

While a profiler is on, parts of the host's time have names, and everything launched meanwhile is
shown under them. Otherwise a name costs one check, a microsecond. Compiled blocks have no names
inside, since these would break their graphs; the ops there (``moetrain::expert_mlp``) have their
own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import Variable
from torch.profiler import record_function

from moetrain.runtime.typed import OpContext

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Values = TypeVar("_Values")


def _is_traced() -> bool:
    return not torch.compiler.is_compiling() and torch.autograd._profiler_enabled()


def annotate(name: str, *moved: torch.Tensor) -> AbstractContextManager[object]:
    """Label everything inside by ``name``, and by the MiB of ``moved``, in profiler traces."""
    if not _is_traced():
        return nullcontext()
    size = f", {sum(x.nbytes for x in moved) / 2**20:.1f} MiB" if moved else ""
    return record_function(name + size)


def annotated(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function so that each call is labelled ``name`` in profiler traces."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with annotate(name):
                return function(*args, **kwargs)

        return call

    return decorate


def annotate_backward(x: _Values, name: str) -> _Values:
    """Return ``x``, and label the backward from its gradient on ``name`` in profiler traces.

    The label lasts until the backward reaches the next name, or ends.
    """
    # In generation ``x`` may be a pair of summands.
    if not (isinstance(x, torch.Tensor) and x.requires_grad and _is_traced()):
        return x
    named: Any = _Named.apply(x, name)
    return named


class _Named(torch.autograd.Function):
    """The identity; its backward ends one range and begins another, in the backward's thread."""

    _open: record_function | None = None
    """The range that is under way."""

    @staticmethod
    def forward(ctx: OpContext, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: OpContext, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if _Named._open is None:
            Variable._execution_engine.queue_callback(_Named._end)
        _Named._end()
        if _is_traced():
            _Named._open = record_function(ctx.name)
            _Named._open.__enter__()
        return gradients[0], None

    @staticmethod
    def _end() -> None:
        opened = _Named._open
        _Named._open = None
        if opened is not None:
            opened.__exit__(None, None, None)
