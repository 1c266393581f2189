"""Kernels compiled ahead of their first launch, several at once.

A process that launches thirty kernels for the first time compiles them one after the other: some
half a second each, most of it in compilers that other threads could run meanwhile. Which ones, with
which constants, is known before: a rehearsal of the step on tensors that have no memory launches
all of them, and what it would launch is compiled in threads, while the model is being built. Part
of that is Python, which one thread at a time runs: processes of one machine share the work.

A kernel that is launched before it is there, or that no rehearsal launched, is compiled then, as
ever.

Kernels that torch's compiler writes are compiled by processes of its own. Those have to start, and
it has to be imported, seconds each: :func:`compiler_started` does both while something else waits.

Left out on purpose: kernels of libraries.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moetrain.kernels.backend import INTERPRETED, KNOBS, TensorDescriptor, triton

logger = logging.getLogger("moetrain")

THREADS = 16
"""For each process; they wait for compilers most of the time."""

COMPILER = (  # with what it imports when it is first used
    "torch._dynamo.backends.inductor",
    "torch._functorch.partitioners",
    "networkx",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.triton",
)

LIBRARY_OPS = (
    "moetrain::attention_packed_backward",
    "moetrain::grouped_mm",
    "moetrain::grouped_outer",
)
"""Ops that call a library, which would write to tensors that have no memory. The forward of packed
attention stays: rehearsals ask for it as ``exact`` alone, which is a kernel of ours."""

Launch = tuple[tuple[Any, ...], dict[str, Any]]
"""A kernel's arguments, of which tensors are what Triton takes for one (its MockTensor)."""
Launches = dict[Any, list[Launch]]
"""By kernel."""


def launches_of(rehearsal: Callable[[], object]) -> Launches:
    """What ``rehearsal`` launches, which runs on tensors without memory (of a FakeTensorMode): the
    device has none of it."""
    found: Launches = {}
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _caught(found),
        _Opened(),
        torch.autograd.set_multithreading_enabled(False),  # modes are one thread's
    ):
        rehearsal()
    return found


def compile_ahead(
    launches: Launches, device: torch.device, rank: int = 0, size: int = 1
) -> list[Future[None]]:
    """Begin to compile ``launches`` for ``device``; one that fails is logged.

    Of ``size`` processes of a machine that do so, this is the one of ``rank``: its share comes
    first. What is left has others compiled meanwhile and put into Triton's cache; if they have not,
    it is compiled here.
    """
    # Where it is not set, the compiler would, later, to a folder of this process's own.
    os.environ.setdefault("TRITON_CACHE_DIR", KNOBS.cache.dir)
    pool = ThreadPoolExecutor(THREADS, "compile", torch.cuda.set_device, (device,))
    items = list(launches.items())
    own = [pool.submit(_compile, *item) for item in items[rank::size]]
    of_others = [item for i, item in enumerate(items) if i % size != rank]
    rest = [pool.submit(_compile, *item, after=own) for item in of_others]
    pool.shutdown(wait=False)
    return own + rest


def _compile(kernel: Any, launches: list[Launch], after: Sequence[Future[None]] = ()) -> None:
    wait(after)
    try:
        for args, settings in launches:
            # Asked for how to run it, Triton compiles a host function that launches it as well.
            _ = kernel.warmup(*args, grid=(1,), **settings).run
    except Exception as error:
        logger.warning("a kernel could not be compiled ahead of its launch: %s", error)
        raise


@contextmanager
def _caught(found: Launches) -> Iterator[None]:
    """Meanwhile launches that are given tensors without memory are put to ``found`` instead."""
    kinds: Any = triton.runtime.jit.KernelInterface
    original = kinds.__getitem__

    def at(kernel: Any, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **settings: Any) -> Any:
            if not any(map(_is_fake, args)):
                return original(kernel, grid)(*args, **settings)
            found.setdefault(kernel, []).append((tuple(map(_without_tensor, args)), settings))

        return launch

    kinds.__getitem__ = at
    try:
        yield
    finally:
        kinds.__getitem__ = original


def _is_fake(value: Any) -> bool:
    return isinstance(value.base if isinstance(value, TensorDescriptor) else value, FakeTensor)


def _without_tensor(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        base = _without_tensor(value.base)
        return TensorDescriptor(base, value.shape, value.strides, value.block_shape)
    if isinstance(value, torch.Tensor):
        return triton.runtime.jit.MockTensor(value.dtype, list(value.shape))
    return value


class _Opened(TorchDispatchMode):
    """Runs the bodies of the kernels' ops, where torch would only compute their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.implementations = {
            op._opoverload: op._init_fn
            for name, op in OPDEFS.items()
            if op._init_fn.__module__.startswith("moetrain.kernels.") and name not in LIBRARY_OPS
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments, implementation = kwargs or {}, self.implementations.get(func)
        if implementation is None:
            return func(*args, **arguments)
        with self:
            return implementation(*args, **arguments)


@contextmanager
def compiler_started(device: torch.device) -> Iterator[None]:
    """Meanwhile, in a thread, torch's compiler is imported and starts its processes; it is there
    at the end."""
    thread = threading.Thread(target=_start_compiler, args=(device,), daemon=True)
    thread.start()
    yield  # what fails here need not wait for it
    thread.join()


def _start_compiler(device: torch.device) -> None:
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread, should anything there ask
        for name in COMPILER:
            import_module(name)
        import_module("torch._inductor.async_compile").maybe_warm_pool()
    except Exception as error:  # noqa: BLE001 - nothing is lost but seconds
        logger.warning("the compiler will start at its first use: %s", error)


def can_compile_ahead(device: torch.device) -> bool:
    """Whether ``device`` runs compiled kernels."""
    return device.type == "cuda" and not INTERPRETED
