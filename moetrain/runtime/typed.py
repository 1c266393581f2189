"""Functions of torch that torch does not annotate, with type annotations.

Each constant is torch's own function or method, cast to its type. So a call costs nothing more, the
compiler traces the same function, and a type checker can check callers strictly. The collectives
are in :mod:`moetrain.parallel.collectives`.

Left out on purpose: functions that have an annotated equivalent in torch, such as
``torch.unflatten`` for ``Tensor.unflatten``.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import nn
from torch.library import CustomOpDef

_F = TypeVar("_F", bound=Callable[..., object])

CustomOp: TypeAlias = CustomOpDef
"""What ``torch.library.custom_op`` makes of a function."""


class OpContext(Protocol):
    """The context in which an op, or an autograd function, keeps what its backward needs.

    The forward may set attributes of any name, which the backward reads.
    """

    @property
    def saved_tensors(self) -> tuple[torch.Tensor, ...]: ...

    @property
    def needs_input_grad(self) -> tuple[Any, ...]:
        """A bool for each input, or bools for each list of tensors."""
        ...

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: object, /) -> None: ...


class _Split(Protocol):
    def __call__(
        self, x: torch.Tensor, sizes: int | list[int], dim: int = 0, /
    ) -> tuple[torch.Tensor, ...]: ...


class _VectorNorm(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        /,
        *,
        dim: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor: ...


class _CompileModule(Protocol):
    def __call__(
        self,
        module: nn.Module,
        /,
        *,
        fullgraph: bool,
        backend: "str | Callable[..., Callable[..., object]]",
        options: dict[str, bool] | None,
    ) -> None: ...


ints = cast("Callable[[torch.Tensor], list[int]]", torch.Tensor.tolist)
"""Returns the integers of a tensor with one dim."""
rows_of_ints = cast("Callable[[torch.Tensor], list[list[int]]]", torch.Tensor.tolist)
"""Returns the integers of a tensor with two dims, as a list for each row."""
split = cast("_Split", torch.Tensor.split)
vector_norm = cast("_VectorNorm", torch.linalg.vector_norm)
from_array = cast("Callable[[np.ndarray], torch.Tensor]", torch.from_numpy)
"""Returns a tensor that shares the memory of an array."""
named_modules = cast(
    "Callable[[nn.Module], Iterator[tuple[str, nn.Module]]]", nn.Module.named_modules
)
compile_module = cast("_CompileModule", nn.Module.compile)


def fake_of(op: CustomOp) -> Callable[[_F], _F]:
    """Decorate the function that returns fake results of ``op``: their shapes and dtypes, without
    values (``register_fake``)."""
    return cast("Callable[[_F], _F]", op.register_fake)


def register_gradient(
    op: CustomOp,
    backward: Callable[..., tuple[object, ...]],
    save: Callable[[OpContext, tuple[Any, ...], Any], None],
) -> None:
    """Register the gradient of ``op``; ``save`` keeps in a context what ``backward`` needs."""
    op.register_autograd(backward, setup_context=save)


def unknown_size() -> torch.SymInt:
    """Return a size that depends on the values of an op's inputs, for :func:`fake_of`."""
    return torch.library.get_ctx().new_dynamic_size()
