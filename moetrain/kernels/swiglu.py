"""SwiGLU with a routing weight: ``y = silu(gate) * up * w`` (arXiv 2002.05202).

Legend: R rows, F expert width. ``gate_up`` holds gate in its first F columns and up in the rest;
``w`` is one scalar a row, so that combining a token's experts is a plain sum afterwards.
"""

import torch
from torch.nn import functional as F

from moetrain.kernels.backend import Backend


def swiglu(
    gate_up_R2F: torch.Tensor, weights_R: torch.Tensor | None = None, backend: Backend = "auto"
) -> torch.Tensor:
    """``y_RF`` in ``gate_up``'s dtype, computed in fp32; ``weights_R`` None: ones."""
    return swiglu_reference(gate_up_R2F, weights_R)


def swiglu_reference(
    gate_up_R2F: torch.Tensor, weights_R: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`swiglu` in plain torch."""
    wide = torch.promote_types(gate_up_R2F.dtype, torch.float32)
    gate_RF, up_RF = gate_up_R2F.to(wide).chunk(2, dim=-1)
    y_RF = F.silu(gate_RF) * up_RF
    if weights_R is not None:
        y_RF = y_RF * weights_R.to(wide)[:, None]
    return y_RF.to(gate_up_R2F.dtype)
