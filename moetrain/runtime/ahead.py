"""Triton kernels compiled before their first launch, several at once.

A process that launches thirty kernels for the first time compiles them one after the other, which
takes about half a second each. Here a fake step, on tensors without memory, finds the launches, and
threads compile the kernels while the model is being built. The processes of a machine share the
work. A kernel that the fake step does not launch is compiled at its first launch. Left out on
purpose: kernels of libraries.

torch's compiler compiles its own kernels in processes that take seconds to start.
:func:`compiler_started` starts them beside other work. :func:`cache_compiled_blocks` lets the
compiler find on disk what it compiled in an earlier start of the run.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moetrain.runtime.backend import INTERPRETED, KNOBS, TensorDescriptor, triton

_logger = logging.getLogger("moetrain")

_THREADS = 16
"""Number of threads of each process; they mostly wait."""

_COMPILER = (  # modules that torch's compiler imports at its first use
    "torch._dynamo.backends.inductor",
    "torch._functorch.partitioners",
    "networkx",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.triton",
)

_LIBRARY_OPS = (
    "moetrain::attention_packed_backward",
    "moetrain::grouped_mm",
    "moetrain::grouped_outer",
)
"""Ops that call libraries, which would write to tensors without memory. The forward of packed
attention is not listed: fake steps run it only as ``exact``, which is a Triton kernel."""

_IN_GRAPHS = ("torch.nn.attention._backend_from_string", "torch.nn.attention._sdpa_kernel")
"""Functions of torch's attention that blocks call to choose among kernels. The compiler's cache has
to be told that their results depend only on their arguments."""

_Launch = tuple[tuple[object, ...], dict[str, object]]
"""A kernel's arguments and launch settings; tensors are Triton's MockTensor."""
_Launches = dict[Any, list[_Launch]]
"""All launches, by kernel."""


def launches_of(fake_step: Callable[[], object]) -> _Launches:
    """Run ``fake_step`` on tensors without memory (a FakeTensorMode) and return its launches."""
    threading.Thread(target=_hash_triton, daemon=True).start()
    found: _Launches = {}
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _caught(found),
        _Opened(),
        torch.autograd.set_multithreading_enabled(False),  # modes apply to this thread alone
    ):
        fake_step()
    return found


def compile_ahead(
    launches: _Launches, device: torch.device, rank: int = 0, size: int = 1
) -> list[Future[None]]:
    """Start to compile ``launches`` for ``device`` in threads; failures are logged.

    This is process ``rank`` of ``size`` on the machine. It compiles its share first, then what the
    others have not yet put into Triton's cache.
    """
    # If this is unset, torch's compiler later sets it to a folder for this process alone.
    os.environ.setdefault("TRITON_CACHE_DIR", KNOBS.cache.dir)
    pool = ThreadPoolExecutor(_THREADS, "compile", torch.cuda.set_device, (device,))
    items = list(launches.items())
    own = [pool.submit(_compile, *item) for item in items[rank::size]]
    of_others = [item for i, item in enumerate(items) if i % size != rank]
    rest = [pool.submit(_compile, *item, after=own) for item in of_others]
    pool.shutdown(wait=False)
    return own + rest


def _hash_triton() -> None:
    """Compute the hash of all of Triton's files, the first part of every kernel's key.

    Triton keeps the hash once it is computed. Until then, every thread that needs it, and the first
    launch, would read all the files, which takes 0.7 s.
    """
    with suppress(AttributeError):  # it is not a public function
        triton.runtime.cache.triton_key()


def _compile(kernel: Any, launches: list[_Launch], after: Sequence[Future[None]] = ()) -> None:
    wait(after)
    try:
        for args, settings in launches:
            compiled = kernel.warmup(*args, grid=(1,), **settings)
            # Triton also compiles a host function that launches the kernel; the launch later finds
            # it on disk. ``compiled.run`` would compile it too. But it would set the function
            # before it loads the kernel, and a launch by another thread in between would fail.
            driver: Any = triton.runtime.driver.active
            driver.launcher_cls(compiled.src, compiled.metadata)
    except Exception as error:
        _logger.warning("a kernel could not be compiled ahead of its launch: %s", error)
        raise


@contextmanager
def _caught(found: _Launches) -> Iterator[None]:
    """Add launches on tensors without memory to ``found`` instead of running them."""
    kinds: Any = triton.runtime.jit.KernelInterface
    original = kinds.__getitem__

    def at(kernel: Any, grid: Any) -> Callable[..., Any]:
        def launch(*args: object, **settings: object) -> object:
            if not any(map(_is_fake, args)):
                return original(kernel, grid)(*args, **settings)
            found.setdefault(kernel, []).append((tuple(map(_without_tensor, args)), settings))

        return launch

    kinds.__getitem__ = at
    try:
        yield
    finally:
        kinds.__getitem__ = original


def _is_fake(value: object) -> bool:
    return isinstance(value.base if isinstance(value, TensorDescriptor) else value, FakeTensor)


def _without_tensor(value: object) -> object:
    if isinstance(value, TensorDescriptor):
        base = _without_tensor(value.base)
        return TensorDescriptor(base, value.shape, value.strides, value.block_shape)
    if isinstance(value, torch.Tensor):
        return triton.runtime.jit.MockTensor(value.dtype, list(value.shape))
    return value


class _Opened(TorchDispatchMode):
    """Runs the bodies of the kernels' ops, where torch would only run their fakes."""

    def __init__(self) -> None:
        super().__init__()
        self.implementations = {
            op._opoverload: op._init_fn
            for name, op in OPDEFS.items()
            if op._init_fn.__module__.startswith("moetrain.kernels.") and name not in _LIBRARY_OPS
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = kwargs or {}
        implementation = self.implementations.get(func)
        if implementation is None:
            return func(*args, **arguments)
        with self:
            return implementation(*args, **arguments)


@contextmanager
def compiler_started(device: torch.device) -> Iterator[None]:
    """Import torch's compiler and start its processes in a thread; they are ready at the end."""
    thread = threading.Thread(target=_start_compiler, args=(device,), daemon=True)
    thread.start()
    yield  # an error here does not wait for the thread
    thread.join()


def _start_compiler(device: torch.device) -> None:
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own current device
        for name in _COMPILER:
            import_module(name)
        import_module("torch._inductor.async_compile").maybe_warm_pool()
    except Exception as error:  # noqa: BLE001 - it only costs seconds later
        _logger.warning("the compiler could not be started ahead of its first use: %s", error)


def can_compile_ahead(device: torch.device) -> bool:
    """Return True if ``device`` runs compiled kernels."""
    return device.type == "cuda" and not INTERPRETED


def cache_compiled_blocks() -> None:
    """Let torch's compiler find the forwards and backwards of blocks in its cache on disk.

    A hit saves all of the compilation after Dynamo's trace, about a second for a model. By default
    the compiler does not look up blocks that contain custom autograd functions. The cache's key
    holds the traced graph, in which our ops are only names. So the key also gets a hash of this
    package's source, which defines the ops and their backwards.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    inductor_config.unsafe_marked_cacheable_functions |= dict.fromkeys(_IN_GRAPHS, "torch")
    tag = torch.compiler.config.cache_key_tag
    own = f"moetrain {_source_hash()}"
    if own not in tag:
        torch.compiler.config.cache_key_tag = f"{tag} {own}".strip()


def prepare_compiler() -> None:
    """Set the compiler of this process up for blocks whose sizes it does not know."""
    from torch._dynamo import config as dynamo_config  # a second to import

    # Our ops return tensors whose sizes the compiler does not know. It would assert in the graph
    # that these are not negative, which is useless. With selective recomputation torch 2.11 fails
    # on the assertions: "Unsupported inductor graph input type".
    dynamo_config.do_not_emit_runtime_asserts = True
    # The limit counts the compilations of a block for all models of a process, such as those of a
    # sweep in a notebook. With torch's own limit of 8, training would fail at the ninth shape.
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, 64)


@cache
def _source_hash() -> str:
    """Return the SHA-256 of all Python files of this package and their paths."""
    found = sha256()
    folder = Path(__file__).parents[1]
    for file in sorted(folder.rglob("*.py")):
        found.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
        found.update(file.read_bytes())
    return found.hexdigest()
