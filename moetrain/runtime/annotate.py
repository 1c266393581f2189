"""Labels for the parts of a step in profiler traces.

While a profiler runs, a label marks a range of the host's time, and the trace shows everything that
is launched in this range under the label. Without a profiler a label costs one check, about a
microsecond. There are no labels inside compiled blocks, since they would break the graphs. The ops
in a compiled block appear under their own names (``moetrain::expert_mlp``).
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
    """Label everything inside with ``name`` in profiler traces.

    The label also gives the size of the tensors ``moved`` in MiB, if there are any.
    """
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
    """Return ``x``, and label a part of the backward with ``name`` in profiler traces.

    The label begins when the backward has the gradient of ``x``. It lasts until the backward
    reaches the next label, or ends.
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
