"""Products in e4m3: the one place that names torch's scaled GEMMs.

Both operands lie along the inner width, with a scale for each row of the first and each column of
the product (:mod:`moetrain.kernels.quant.rows`). On CUDA the tensor cores multiply e4m3; on a CPU,
what the operands stand for is multiplied in fp32: the same sum, but for the order it is made in.

Tensor cores add in registers that keep fewer bits than fp32 (``use_fast_accum``). Without, torch
adds every 128 products up in fp32, which on one H200 costs a quarter of the rate.

Legend: T tokens, R rows sorted by expert, E experts, N outer width, M inner width.
"""

import torch

from moetrain.kernels.experts.grouped_mm import grouped_mm
from moetrain.kernels.quant.rows import Quantised


def fp8_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """What of a CUDA device or a compute dtype these products do not take; None: they run."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return f"takes a Hopper GPU or later, and this is a {torch.cuda.get_device_name(device)}"
    if dtype != torch.bfloat16:
        return f"takes train.dtype bfloat16, and this run computes in {dtype}"
    return None


def scaled_mm(a_TM: Quantised, b_NM: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b^T`` [T, N]; on CUDA ``dtype`` is bf16 and widths are multiples of 16."""
    if not a_TM.values.is_cuda:
        return (a_TM.to(torch.float32) @ b_NM.to(torch.float32).t()).to(dtype)
    return torch._scaled_mm(
        a_TM.values,
        b_NM.values.t(),
        a_TM.scales[:, None],
        b_NM.scales[None, :],
        out_dtype=dtype,
        use_fast_accum=True,
    )


def scaled_grouped_mm(
    a_RM: Quantised, b_ENM: Quantised, offsets_E: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``out[r] = a[r] @ b[group of r]^T`` [R, N]; groups and the rest as in ``grouped_mm``."""
    if not a_RM.values.is_cuda:
        a, b = a_RM.to(torch.float32), b_ENM.to(torch.float32)
        return grouped_mm(a, b.transpose(1, 2), offsets_E).to(dtype)
    if not a_RM.values.shape[0]:
        return torch.empty(0, b_ENM.values.shape[1], device=a_RM.values.device, dtype=dtype)
    return torch._scaled_grouped_mm(
        a_RM.values,
        b_ENM.values.transpose(1, 2),
        a_RM.scales,
        b_ENM.scales,
        offs=offsets_E,
        out_dtype=dtype,
        use_fast_accum=True,
    )
