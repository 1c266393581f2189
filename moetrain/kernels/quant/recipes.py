"""Scales and products of each precision of ``kernels.precision`` that multiplies in e4m3.

    precision           scales of rows       scales of weights         experts' weights' gradients
    fp8                 one                  one a row or column       bf16
    fp8_gradients       one                  one a row or column       e4m3
    fp8_blocks          one a tile of 128    fp32, blocks of 128^2     e4m3
    fp8_blocks_ue8m0    one a tile of 128    2^k, blocks of 128^2      e4m3

Rows are activations and gradients. Gradients of dense weights are products in bf16, since
quantising takes as long as e4m3 saves (docs/log/quantisation.md). The loss makes the gradients of
the head (:mod:`moetrain.kernels.vocabulary.fp8_gradients`).
"""

from typing import NamedTuple

import torch

from moetrain.kernels.quant.blocks import QuantisedBlocks, Scales, quantise_blocks
from moetrain.kernels.quant.e4m3 import (
    MULTIPLE,
    TILE,
    Quantised,
    quantise_columns,
    quantise_rows,
)
from moetrain.runtime.backend import Backend


class Recipe(NamedTuple):
    """The quantisation of products' operands."""

    blocks: Scales | None = None
    """The kind of scales of weights' blocks; rows then have a scale for each tile. None: weights
    have a scale for each row or column, and each row has one."""
    quantises_weight_grads: bool = False
    """True: gradients of experts' weights are products in e4m3, too."""

    @property
    def tiled(self) -> bool:
        """True: rows have a scale a tile of 128."""
        return self.blocks is not None

    @property
    def multiple(self) -> int:
        """Experts' widths F are multiples of this. With blocks it is a block's width, so that no
        block has rows of both gate and up."""
        return TILE if self.tiled else MULTIPLE

    def rows(self, x_XM: torch.Tensor, backend: Backend = "auto") -> Quantised:
        """Quantise activations or gradients [..., M]."""
        return quantise_rows(x_XM, backend, tiled=self.tiled)

    def weights(
        self, w_ENM: torch.Tensor, backend: Backend = "auto", *, transposed: bool = False
    ) -> Quantised | QuantisedBlocks:
        """Quantise matrices for ``x @ w^T``, or ``transposed`` to [E, M, N] for ``dy @ w``."""
        if self.blocks is not None:
            return quantise_blocks(w_ENM, self.blocks, transposed=transposed, backend=backend)
        return quantise_columns(w_ENM, backend) if transposed else quantise_rows(w_ENM, backend)


RECIPES: dict[str, Recipe] = {
    "fp8": Recipe(),
    "fp8_gradients": Recipe(quantises_weight_grads=True),
    "fp8_blocks": Recipe("fp32", quantises_weight_grads=True),
    "fp8_blocks_ue8m0": Recipe("ue8m0", quantises_weight_grads=True),
}
"""By the value of ``kernels.precision``; bf16 has no recipe."""
