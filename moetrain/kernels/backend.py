"""The base of all kernels: Triton where it exists, the choice of an implementation, saved ops.

Every kernel takes ``backend``: ``reference`` (plain torch, any device), ``triton`` (or fails), or
``auto`` (the fast path on CUDA, plain torch elsewhere). The choice is made here once, by the rule
the user reads, so that no kernel falls back in silence.

Triton has wheels for Linux alone. Elsewhere ``triton``, ``tl`` and ``TensorDescriptor`` are
placeholders that let the kernel files be imported, and every kernel runs as its reference. Import
them from here and never from triton itself.

``activation.save`` names groups of ops whose results selective recomputation keeps. An op joins a
group where it is defined (:func:`worth_saving`), so that recomputation
(:mod:`moetrain.models.transformer`) knows the ops of kernels and of ``parallel`` without naming
them.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from moetrain.config.compute import SavedName

if TYPE_CHECKING:
    import triton
    import triton.language as tl
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
        INTERPRETED = False
    else:
        import triton.language as tl
        from triton.tools.tensor_descriptor import TensorDescriptor

        KNOBS = triton.knobs
        INTERPRETED = KNOBS.runtime.interpret

__all__ = [
    "INTERPRETED",
    "KNOBS",
    "Backend",
    "TensorDescriptor",
    "require_contiguous",
    "saved_ops",
    "tl",
    "triton",
    "use_fast",
    "worth_saving",
]

Backend = Literal["auto", "triton", "reference"]
_OPS: dict[str, set[str]] = {name: set() for name in (*get_args(SavedName), "routing")}


def use_fast(backend: Backend, tensor: torch.Tensor) -> bool:
    """Return True if a kernel called with ``tensor`` takes its fast path under ``backend``.

    CPU tensors take it in Triton's interpreter alone (TRITON_INTERPRET=1 before the first import).

    Raises:
        ValueError: ``backend="triton"`` with a CPU tensor outside Triton's interpreter.
    """
    if backend == "triton" and not (tensor.is_cuda or INTERPRETED):
        raise ValueError(
            f'backend="triton" was given a tensor on {tensor.device}; it takes CUDA tensors. Use '
            'backend="auto" or "reference" here, or set TRITON_INTERPRET=1 before importing triton'
        )
    return backend == "triton" or (backend == "auto" and tensor.is_cuda)


def require_contiguous(kernel: str, tensor: torch.Tensor) -> None:
    """Raise ValueError, naming ``kernel``, unless ``tensor`` is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{kernel}: was given strides {tensor.stride()}; it takes a contiguous tensor"
        )


def worth_saving(name: SavedName | Literal["routing"], *ops: Any) -> None:
    """Add ``ops`` to the group ``name``, whose results selective recomputation keeps if asked to.

    The results of ``routing`` are always kept. Each op is ``torch.ops.namespace.name.overload`` or
    a higher-order op; all results of an op are kept. A group may be empty: ``dispatch`` is, in a
    process that has imported nothing to exchange tokens by.
    """
    _OPS[name].update(op.name() for op in ops)


def saved_ops(names: Iterable[SavedName]) -> frozenset[str]:
    """Return the names (``op.name()``) of the ops in the groups ``names`` and in ``routing``."""
    return frozenset(_OPS["routing"]).union(*(_OPS[name] for name in names))


# Torch's own dense products, which no file here wraps.
worth_saving("linear", torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
