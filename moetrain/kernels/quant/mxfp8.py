"""Numbers in OCP's MXFP8 (Microscaling Formats v1.0): e4m3, and a scale for each 32 neighbours.

    scale = 2^k, the least with |x| <= 448 scale in all of the group    code = round(x / scale)

A scale is stored as the byte of its exponent in fp32, 127 + k, k >= -126. What is stored is widened
without rounding (in bf16 but for numbers below 2^-133). It is a pass over memory: 1 1/32 bytes are
read and those of the wider number written.

Worked example, groups of 2: of (3, 1000) the scale is 4, since 1000 > 2 x 448, and codes are 0.75
and 256 (250 is between 240 and 256, and nearer to this): what is stored is (3, 1024).

Legend: W ranks, N numbers of whole groups, G groups.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (Triton's launch settings are not typed.)

import torch

from moetrain.kernels.backend import Backend, tl, triton, use_fast
from moetrain.kernels.quant.rows import E4M3, quantise_rows_reference

SCALED = 32
"""Numbers of a group."""
BAD = 255
"""Scale of a group with a number that is not finite, of which all are NaN then."""
LAUNCH = {"GROUPS": 64, "num_warps": 2}


def quantise_groups(x_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N] (e4m3) and scales [G] (uint8) of ``x_N`` (floating, whole groups)."""
    x_GS = x_N.float().view(-1, SCALED)
    is_bad_G = ~x_GS.isfinite().all(1)
    codes_GS, scales_G = quantise_rows_reference(x_GS.masked_fill(is_bad_G[:, None], 0.0))
    bytes_G = (scales_G.view(torch.int32) >> 23).masked_fill(is_bad_G, BAD)
    return codes_GS.view(-1), bytes_G.to(torch.uint8)


def widen_groups(
    codes_WN: torch.Tensor,
    scales_WG: torch.Tensor,
    out_N: torch.Tensor,
    start: int,
    numel: int,
    backend: Backend = "auto",
) -> None:
    """Write ``numel`` numbers from ``start`` on of each rank, one rank's behind the other's.

    Args:
        codes_WN: e4m3; rows may lie apart.
        scales_WG: uint8; likewise.
        out_N: floating, contiguous, at most W * ``numel``: the last ranks may have less.

    Raises:
        ValueError: other dtypes, numbers that are not there, or more room than numbers.
    """
    ranks, numbers = codes_WN.shape
    is_there = 0 <= start <= start + numel <= numbers and out_N.numel() <= ranks * numel
    are_groups = numbers % SCALED == 0 and scales_WG.shape == (ranks, numbers // SCALED)
    if not (is_there and are_groups and out_N.dim() == 1):
        raise ValueError(
            f"widen_groups: was given codes {tuple(codes_WN.shape)}, scales "
            f"{tuple(scales_WG.shape)}, numbers {start} to {start + numel} and room for "
            f"{tuple(out_N.shape)}; it takes [W, N], [W, N / {SCALED}], numbers of N and [N]"
        )
    if (codes_WN.dtype, scales_WG.dtype) != (E4M3, torch.uint8):
        given = f"codes {codes_WN.dtype} and scales {scales_WG.dtype}"
        raise ValueError(f"widen_groups: was given {given}; it takes {E4M3} and uint8")
    if not (codes_WN.stride(1) == scales_WG.stride(1) == out_N.stride(0) == 1):
        given = f"{codes_WN.stride()}, {scales_WG.stride()} and {out_N.stride()}"
        raise ValueError(f"widen_groups: was given strides {given}; neighbours must be neighbours")
    if not use_fast(backend, out_N):
        widen_groups_reference(codes_WN, scales_WG, out_N, start, numel)
    elif out_N.numel():
        _widen_groups(codes_WN.view(torch.uint8), scales_WG, out_N, start, numel)


def widen_groups_reference(
    codes_WN: torch.Tensor, scales_WG: torch.Tensor, out_N: torch.Tensor, start: int, numel: int
) -> None:
    """:func:`widen_groups` in plain torch."""
    first, last = start // SCALED, -(-(start + numel) // SCALED)
    whole_WN = codes_WN[:, first * SCALED : last * SCALED].to(out_N.dtype)
    powers_WG = (scales_WG[:, first:last].int() << 23).view(torch.float32)
    whole_WN.view(*powers_WG.shape, SCALED).mul_(powers_WG[..., None])
    wide_WN = whole_WN[:, start - first * SCALED :][:, :numel]
    out_N.copy_(wide_WN.reshape(-1)[: out_N.numel()])


@torch.library.custom_op("moetrain::widen_groups", mutates_args=("out_N",))
def _widen_groups(
    bytes_WN: torch.Tensor, scales_WG: torch.Tensor, out_N: torch.Tensor, start: int, numel: int
) -> None:
    groups = -(-(start + numel) // SCALED) - start // SCALED
    _groups_kernel[(triton.cdiv(groups, LAUNCH["GROUPS"]), len(bytes_WN))](
        bytes_WN, scales_WG, out_N, bytes_WN.stride(0), scales_WG.stride(0),
        start, numel, out_N.numel(), SIZE=SCALED, **LAUNCH,
    )  # fmt: skip


@_widen_groups.register_fake
def _(*arguments) -> None:
    return None


@triton.jit
def _groups_kernel(
    codes, scales, out, code_stride, scale_stride, start, numel, total,
    SIZE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    rank = tl.program_id(1).to(tl.int64)
    first = start // SIZE + tl.program_id(0).to(tl.int64) * GROUPS
    skipped = first * SIZE - start  # of those that are wanted; below zero: some here are not
    left = tl.minimum(numel, total - rank * numel) - skipped
    group = tl.arange(0, GROUPS)
    number = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask = (number < left) & (number + skipped >= 0)
    scale = tl.load(scales + (rank * scale_stride + first) + group, group * SIZE < left, other=0)
    power = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    # By hand, as not every GPU can. The bits of e4m3 lie in fp32's as those of a number that is
    # 2^120 times smaller, subnormal ones too.
    code = tl.load(codes + (rank * code_stride + first * SIZE) + number, mask, other=0)
    code = code.to(tl.int32)
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    wide = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    tl.store(out + (rank * numel + skipped) + number, wide * power[:, None], mask)
