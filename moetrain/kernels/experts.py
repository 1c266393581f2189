"""The expert MLP: two grouped GEMMs around SwiGLU.

``y = (silu(x @ gate^T) * (x @ up^T) * w) @ down^T`` with each row using its own expert's matrices.
The routing weight is applied inside, before the down projection, so combining is a plain sum.

Legend: R rows sorted by expert, E experts, D model width, F expert width.
"""

import torch

from moetrain.kernels.backend import Backend
from moetrain.kernels.grouped_mm import grouped_mm
from moetrain.kernels.swiglu import swiglu


def expert_mlp(
    x_RD: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    weights_R: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """``y_RD`` in ``x``'s dtype; rows past ``offsets_E[-1]`` (int32, cumulative) are unspecified.

    ``w_gate_up_E2FD`` holds gate's F rows, then up's. ``weights_R``: routing weights, None: ones.
    """
    gate_up_R2F = grouped_mm(x_RD, w_gate_up_E2FD.transpose(1, 2), offsets_E)
    y_RF = swiglu(gate_up_R2F, weights_R, backend)
    return grouped_mm(y_RF, w_down_EDF.transpose(1, 2), offsets_E)
