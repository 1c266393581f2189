"""Names in traces: which part of a step what is seen there belongs to.

While a profiler is on (:mod:`moetrain.train.profiling`, or anybody's), stretches of the host's time
have names; whatever it launches meanwhile is shown under them. While none is, asking is all there
is to
pay: a microsecond. Inside a compiled block there are none, as its graph would break; the ops
there (``moetrain::expert_mlp``, ``moetrain::deepep_dispatch``, ...) have names of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import Variable
from torch.profiler import record_function

P = ParamSpec("P")
R = TypeVar("R")


def is_traced() -> bool:
    """Whether a profiler is on in this thread."""
    return not torch.compiler.is_compiling() and torch.autograd._profiler_enabled()


def annotate(name: str, *moved: torch.Tensor) -> AbstractContextManager[Any]:
    """Label everything inside with ``name`` in profiler traces, and with the MiB of ``moved``."""
    if not is_traced():
        return nullcontext()
    size = f", {sum(x.nbytes for x in moved) / 2**20:.1f} MiB" if moved else ""
    return record_function(name + size)


def annotated(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Every call of the function that this decorates is ``name``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with annotate(name):
                return function(*args, **kwargs)

        return call

    return decorate


def annotate_backward(x: torch.Tensor, name: str) -> torch.Tensor:
    """``x``, from whose gradient on a backward is ``name`` in a trace: until it comes to the next
    that has a name, or is over."""
    return _Named.apply(x, name) if is_traced() and x.requires_grad else x


class _Named(torch.autograd.Function):
    """An identity whose backward ends one range and begins another, in the thread of a backward."""

    _open: record_function | None = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if _Named._open is None:
            Variable._execution_engine.queue_callback(_Named._end)
        _Named._end()
        if is_traced():
            _Named._open = record_function(ctx.name)
            _Named._open.__enter__()
        return gradients[0], None

    @staticmethod
    def _end() -> None:
        opened, _Named._open = _Named._open, None
        if opened is not None:
            opened.__exit__(None, None, None)
