"""How each precision of ``kernels.precision`` quantises the operands of products in e4m3.

    precision           scales of rows       scales of weights         experts' weights' gradients
    fp8                 one                  one a row or column       bf16
    fp8_gradients       one                  one a row or column       e4m3
    fp8_blocks          one a tile of 128    fp32, blocks of 128^2     e4m3
    fp8_blocks_ue8m0    one a tile of 128    2^k, blocks of 128^2      e4m3

Rows are activations and gradients. Gradients of dense weights are in bf16, since quantising takes
as long as e4m3 saves (docs/log/quantisation.md). The head's are a matter of its loss.
"""

from typing import NamedTuple

import torch

from moetrain.kernels.quant.blocks import (
    QuantisedBlocks,
    Scales,
    quantise_blocks,
)
from moetrain.kernels.quant.e4m3 import (
    MULTIPLE,
    TILE,
    Quantised,
    quantise_columns,
    quantise_rows,
)
from moetrain.runtime.backend import Backend


class Recipe(NamedTuple):
    """How operands are quantised, and which products are narrow."""

    blocks: Scales | None = None
    """The kind of scales of blocks of weights; rows then have a scale a tile. None: rows."""
    narrow_grads: bool = False
    """Whether gradients of experts' weights are products in e4m3, too."""

    @property
    def tiled(self) -> bool:
        return self.blocks is not None

    @property
    def multiple(self) -> int:
        """What the experts' width is a multiple of: of whole blocks, lest one hold rows of both
        gate and up."""
        return TILE if self.tiled else MULTIPLE

    def rows(self, x_XM: torch.Tensor, backend: Backend = "auto") -> Quantised:
        """Quantise activations or gradients [..., M]."""
        return quantise_rows(x_XM, backend, tiled=self.tiled)

    def weights(
        self,
        w_ENM: torch.Tensor,
        backend: Backend = "auto",
        *,
        turned: bool = False,
    ) -> Quantised | QuantisedBlocks:
        """Quantise matrices for ``x @ w^T``, or ``turned`` [E, M, N] for ``dy @ w``."""
        if self.blocks is not None:
            return quantise_blocks(w_ENM, self.blocks, turned=turned, backend=backend)
        return quantise_columns(w_ENM, backend) if turned else quantise_rows(w_ENM, backend)


RECIPES: dict[str, Recipe] = {
    "fp8": Recipe(),
    "fp8_gradients": Recipe(narrow_grads=True),
    "fp8_blocks": Recipe("fp32", narrow_grads=True),
    "fp8_blocks_ue8m0": Recipe("ue8m0", narrow_grads=True),
}
"""By the values of ``kernels.precision``; bf16 has none."""
