"""The base of all kernels: Triton where it exists, the choice of an implementation, saved ops.

Every kernel takes ``backend``: ``reference`` (plain torch, any device and floating dtype, float64
too), ``triton`` (an error where it cannot run), or ``auto`` (the fast path on CUDA, plain torch
elsewhere). :func:`use_fast` makes the choice for all of them, so that no kernel falls back in
silence.

Triton has wheels only for Linux. Elsewhere ``triton``, ``tl``, ``TensorDescriptor`` and Gluon's
names (``gluon``, ``gl``, ``hopper``, ``HopperDescriptor``) are placeholders with which the kernel
files can be imported, and every kernel runs as its reference. Import them from here and never from
triton itself. Kernel files switch off the type checks that fail on Triton's launch settings,
unrolled ranges and constant conditions.

``activation.save`` names groups of ops whose results selective recomputation keeps. An op joins a
group where it is defined (:func:`worth_saving`), so that recomputation
(:mod:`moetrain.runtime.recompute`) knows the ops of kernels and of ``parallel`` without naming
them.
"""

import itertools
import threading
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from moetrain.config.compute import SavedName
from moetrain.runtime.typed import OpContext

if TYPE_CHECKING:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor
    from triton.tools.tensor_descriptor import TensorDescriptor

    INTERPRETED: bool
    KNOBS: Any
else:
    try:
        import triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise

        class _Absent:
            """A placeholder whose attributes are placeholders; as a decorator it does nothing."""

            def __getattr__(self, name: str) -> "_Absent":
                return self

            def __call__(self, *args: Any, **settings: Any) -> Any:
                return args[0] if args else self

        triton = tl = TensorDescriptor = KNOBS = _Absent()
        gluon = gl = hopper = HopperDescriptor = triton
        INTERPRETED = False
    else:
        import triton.language as tl
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia import hopper
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor
        from triton.tools.tensor_descriptor import TensorDescriptor

        KNOBS = triton.knobs
        INTERPRETED = KNOBS.runtime.interpret

__all__ = [
    "INTERPRETED",
    "KNOBS",
    "Backend",
    "HopperDescriptor",
    "TensorDescriptor",
    "gl",
    "gluon",
    "gradients",
    "hopper",
    "launch",
    "refusal",
    "require_contiguous",
    "save_inputs",
    "saved_ops",
    "tl",
    "triton",
    "use_fast",
    "worth_saving",
]

Backend = Literal["auto", "triton", "reference"]

_LAUNCHERS = threading.RLock()
"""Held while a module that launches kernels is loaded."""


def _give_kernels_their_own_launchers(build: Any) -> None:
    """Change Triton's ``build`` so that threads may load functions that launch kernels.

    Up to Triton 3.6 each signature has a compiled module with such a function, and all these
    modules have one name. When Python loads one of them again, it writes the function into the
    module that it loaded last, whatever that was. Another thread that has not yet read its own
    function from that module then launches its kernel with the wrong one: ``function takes exactly
    50 arguments (31 given)``, or silently with other types. Here each load returns a module of its
    own, which is copied before the next load can begin. Later versions have one function for all
    signatures.
    """
    load = build._load_module_from_path

    def load_alone(name: str, path: str) -> ModuleType:
        with _LAUNCHERS:
            found = ModuleType(name)
            found.__dict__.update(vars(load(name, path)))
            return found

    build._load_module_from_path = load_alone


if isinstance(triton, ModuleType):
    _build = import_module("triton.runtime.build")
    if hasattr(_build, "_load_module_from_path"):  # it is not a public function
        _give_kernels_their_own_launchers(_build)

_OPS: dict[str, set[str]] = {name: set() for name in (*get_args(SavedName), "routing")}


def use_fast(backend: Backend, tensor: torch.Tensor) -> bool:
    """Return True if a kernel called with ``tensor`` takes its fast path under ``backend``.

    CPU tensors take it only in Triton's interpreter (TRITON_INTERPRET=1 before the first import).

    Raises:
        ValueError: ``backend="triton"`` with a CPU tensor outside Triton's interpreter.
    """
    if backend == "triton" and not (tensor.is_cuda or INTERPRETED):
        raise ValueError(
            f'backend="triton" was given a tensor on {tensor.device}; it takes CUDA tensors. Use '
            'backend="auto" or "reference" here, or set TRITON_INTERPRET=1 before importing triton'
        )
    return backend == "triton" or (backend == "auto" and tensor.is_cuda)


def refusal(kernel: str, takes: str, **arguments: object) -> ValueError:
    """Return the error that ``kernel`` was given ``arguments``, although it ``takes`` others.

    The error says a tensor's dtype and shape, and also its strides if it is not contiguous.
    """
    words = ", ".join(f"{name} {_described(value)}" for name, value in arguments.items())
    return ValueError(f"{kernel}: was given {words}; it takes {takes}")


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    strides = "" if value.is_contiguous() else f" with strides {value.stride()}"
    return f"{value.dtype} {tuple(value.shape)}{strides}"


def require_contiguous(kernel: str, **tensors: torch.Tensor) -> None:
    """Raise ValueError, naming ``kernel`` and the tensor, unless all ``tensors`` are contiguous."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise refusal(kernel, "a contiguous tensor", **{name: tensor})


def launch(op: Any, written: Sequence[torch.Tensor], *arguments: Any) -> None:
    """Run ``op``, a custom op without a gradient that returns nothing and writes to ``written``.

    Unless a compiler or a dispatch mode is active, its body is called without torch's dispatcher,
    in which the host spends 40 us and more.
    """
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        op(*arguments)
    else:
        op._init_fn(*arguments)
        torch.autograd.graph.increment_version(written)


def save_inputs(ctx: OpContext, inputs: tuple[Any, ...], output: object) -> None:
    """Save an op's inputs, tensors and lists of tensors, one after the other for its backward."""
    lists = [x if isinstance(x, Sequence) else (x,) for x in inputs]
    ctx.save_for_backward(*itertools.chain.from_iterable(lists))


def gradients(op: Any, **by_name: object) -> tuple[object, ...]:
    """Return the gradients of a custom op's inputs in their order, as its autograd formula must.

    An input that is not named gets None. One that is a list of tensors takes a list of gradients.

    Raises:
        TypeError: ``op`` has no input of such a name.
    """
    names = _input_names(op)
    unknown = by_name.keys() - set(names)
    if unknown:
        raise TypeError(f"{op._qualname} has no inputs {sorted(unknown)}; it has {names}")
    return tuple(by_name.get(name) for name in names)


@cache
def _input_names(op: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._opoverload._schema.arguments)


def worth_saving(name: SavedName | Literal["routing"], *ops: Any) -> None:
    """Add ``ops`` to the group ``name``, whose results selective recomputation keeps if asked to.

    The group ``routing`` is always kept. Each op is ``torch.ops.namespace.name.overload`` or a
    higher-order op; all its results are kept.
    """
    _OPS[name].update(op.name() for op in ops)


def saved_ops(names: Iterable[SavedName]) -> frozenset[str]:
    """Return the names (``op.name()``) of the ops in the groups ``names`` and in ``routing``."""
    return frozenset(_OPS["routing"]).union(*(_OPS[name] for name in names))


# Torch's own dense products, which no module here wraps.
worth_saving("linear", torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
