"""The type of file tensors that are read where they are indexed."""

from types import EllipsisType
from typing import Protocol

import torch

Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType | None, ...]
"""An index of a tensor; slices have steps of 1."""


class LazyTensor(Protocol):
    """A tensor of a file, or made of several of them; indexing reads that part and nothing else.

    A slice of safetensors is one, and what adds rows, dequantises or takes a part of one.
    """

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        ...

    def __getitem__(self, index: Index, /) -> torch.Tensor:
        """Read the part ``index``; ``...`` is all of it."""
        ...
