"""Adds rows for new tokens to a checkpoint's embedding and head.

Each new row is the mean of the matrix's own rows. So a new token is at first as likely as the
average token, and changes the probabilities of others little (Hewitt 2021, "Initializing new word
embeddings for pretrained language models"). ``resize_token_embeddings(mean_resizing=True)`` of
``transformers`` draws new rows around the same mean, with 3e-5 times the standard deviation of the
old rows. Here they are the mean itself, so that every mesh starts from the same bits.

Left out on purpose: removing rows.

Legend: V tokens of the vocabulary, D model width, R rows.
"""

import re
from functools import cached_property
from typing import Any

import torch

from moetrain.models.hf.lazy import LazyTensor

_VOCABULARY = re.compile(r"(.*\.)?(embed_tokens|embeddings|lm_head|shared_head\.head)\.weight")
"""Names of matrices with a row for each token: the model's, and their copies in MTP blocks."""
_ROWS_AT_ONCE = 1 << 12


def is_of_vocabulary(name: str, shape: tuple[int, ...], rows: int) -> bool:
    """Return True if the file tensor ``name`` has ``rows`` rows, one for each token."""
    return shape[:1] == (rows,) and len(shape) == 2 and _VOCABULARY.fullmatch(name) is not None


class WithNewRows:
    """A file's matrix [V, D] with new rows appended, read where it is indexed."""

    def __init__(self, matrix: LazyTensor, rows: int) -> None:
        """Append rows to ``matrix``, a slice of a safetensors file, so that it has ``rows``."""
        self.matrix, self.rows = matrix, rows

    def get_shape(self) -> list[int]:
        return [self.rows, *self.matrix.get_shape()[1:]]

    def __getitem__(self, index: Any, /) -> torch.Tensor:
        """Read ``matrix[index]``, in fp32 where it has new rows; slices have steps of 1."""
        index = index if isinstance(index, tuple) else (index,)
        first, *others = (slice(None),) if index in ((...,), ()) else index
        own, (start, stop, _) = self.matrix.get_shape()[0], first.indices(self.rows)
        parts = []
        if start < min(own, stop):
            parts.append(self.matrix[(slice(start, min(own, stop)), *others)])
        if (new := stop - max(own, start)) > 0:
            parts.append(self._mean_D[tuple(others)].expand(new, -1))
        return torch.cat(parts) if parts else self.matrix[(slice(0, 0), *others)]

    @cached_property
    def _mean_D(self) -> torch.Tensor:
        """The mean of the file's rows, fp32 [D]. It is summed in fp64, row by row, so that its bits
        do not depend on the number of threads or ranks."""
        rows, width = self.matrix.get_shape()
        total_D = torch.zeros(width, dtype=torch.float64).numpy()
        for start in range(0, rows, _ROWS_AT_ONCE):
            part_RD = self.matrix[start : start + _ROWS_AT_ONCE].double().numpy()
            total_D += part_RD.sum(axis=0)
        return torch.from_numpy(total_D / rows).float()
