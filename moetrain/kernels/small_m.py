"""Small-M and low-rank matrix products whose rows have the same bits among any number of rows.

In a step of generation each sequence has one row, and a product takes the time of reading its
weights. These kernels sum over the inner width in ascending order for any number of rows M. cuBLAS
and the grouped product do so for many rows on Hopper, so a row has the same bits in generation as
in training. cuBLAS splits the sum if M is small and the inner width large: on an H100 from an inner
width of 2,880 on (not at 2,048) if the result has at most some 80 tiles of 128 x 128, and for
results in fp32 below 4,096 rows.

:func:`linears` and :func:`expert_mlp`, with SwiGLU in the first product's epilogue, have no
autograd: training takes the library's products. :func:`invariant_linear` has autograd, and takes
cuBLAS only where that does not split. :func:`low_rank_products` has autograd too. It is for the A
matrices of LoRA adapters: cuBLAS splits their sums below some 5,000 rows (measured on one H200)::

    u_i = x @ a_i^T        dx = sum_i du_i @ a_i        da_i = du_i^T @ x

Matrices of S tenants are stacked, each for one of S equal parts of the rows. Their product is the
library's batched one.

Legend: R or T rows, D inner width, N outer width, r outer width of a low-rank matrix, E experts,
F expert width.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from moetrain.kernels.quant.groups import QuantisedMatrices, load_elements, load_scales
from moetrain.runtime.backend import (
    INTERPRETED,
    Backend,
    TensorDescriptor,
    refusal,
    save_inputs,
    tl,
    triton,
    use_fast,
    worth_saving,
)
from moetrain.runtime.typed import OpContext

_MAX_ROWS = 128
"""The most rows of :func:`linears`. With more cuBLAS is as fast, and if the inner width is small it
does not split the sum either."""
_WHOLE_WIDTH = 2048
"""The largest inner width whose sum cuBLAS never splits, unless the outer width is narrow."""
_NARROW = 64
"""The largest outer width that is narrow in this sense."""
_WHOLE_ROWS = 4096
"""The fewest rows for which cuBLAS does not split sums whose results are fp32."""
_TILE = 128
"""Rows and columns of cuBLAS's tiles. It splits if there are fewer tiles than multiprocessors."""
_MAX_ROWS_PER_EXPERT = 64
"""The most rows of an expert, on average, for :func:`expert_mlp`."""
_MOST_WEIGHTS = 3
"""The most matrices that one launch multiplies."""
_DEPTH = 128
"""The inner width that the experts' kernels read at a time."""
_FEW = 16
"""Rows of the smallest tile. Up to this many rows the library's products take more time."""
_FEW_COLUMNS = 256
"""The most columns for which few programs run. On an H100 these take 3.7 us with tiles of 64 rows,
and 5.3 us with tiles of 16."""
_MULTIPLE = 16
"""The kernel's outer widths are multiples of this."""


def _runs(x: torch.Tensor) -> bool:
    """Return True if ``x`` is bf16 on CUDA and nothing is differentiated or compiled."""
    is_fast = x.is_cuda and x.dtype == torch.bfloat16
    return is_fast and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def is_few(x_TD: torch.Tensor) -> bool:
    """Return True for one to 16 contiguous rows that fast paths for few rows may take."""
    # In this order: a compiler must not be asked to tell row counts apart.
    return _runs(x_TD) and 1 <= x_TD.shape[0] <= _FEW and x_TD.is_contiguous()


def runs_experts(
    x_TD: torch.Tensor,
    w_down_EDF: torch.Tensor | QuantisedMatrices,
    typical_rows: int,
) -> bool:
    """Return True if :func:`expert_mlp` is faster for batches of about ``typical_rows`` rows."""
    experts, dim, width = w_down_EDF.shape
    # Tiles of quantised matrices must be whole.
    multiple = 32 if isinstance(w_down_EDF, torch.Tensor) else _DEPTH
    fits = dim % multiple == width % multiple == 0 and _runs(x_TD)
    return fits and typical_rows <= _MAX_ROWS_PER_EXPERT * experts


def runs_linears(x_RD: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Return True if :func:`linears` should multiply ``x`` by ``weights``."""
    # In this order: a compiler must not be asked to tell row counts apart.
    if not _runs(x_RD) or x_RD.shape[0] > _MAX_ROWS:
        return False
    aligned = all(w.is_contiguous() and w.shape[0] % 16 == w.shape[1] % 8 == 0 for w in weights)
    return aligned and len(weights) <= _MOST_WEIGHTS


def invariant_linear(
    x_TD: torch.Tensor,
    w_ND: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return ``x @ w^T + bias`` [T, N], whose rows have the same bits among any number of rows.

    That holds for bf16 on a Hopper GPU if ``D`` is a multiple of 8. Everything else takes
    ``torch.nn.functional.linear``. Differentiable.
    """
    if x_TD.dim() != 2 or w_ND.shape[1:] != x_TD.shape[1:] or w_ND.dtype != x_TD.dtype:
        takes = "[T, D] and [N, D] of one dtype"
        raise refusal("invariant_linear", takes, x=x_TD, w=w_ND)
    can_split = w_ND.shape[1] > _WHOLE_WIDTH or w_ND.shape[0] <= _NARROW
    is_for_it = x_TD.dtype == torch.bfloat16 and w_ND.shape[1] % 8 == 0
    if not (can_split and is_for_it and use_fast(backend, x_TD)):
        return F.linear(x_TD, w_ND, bias_N)
    return invariant_linear_op(x_TD.contiguous(), w_ND.contiguous(), bias_N)


@torch.library.custom_op("moetrain::invariant_linear", mutates_args=())
def invariant_linear_op(
    x_TD: torch.Tensor,
    w_ND: torch.Tensor,
    bias_N: torch.Tensor | None,
) -> torch.Tensor:
    width = w_ND.shape[0]
    tiles = triton.cdiv(x_TD.shape[0], _TILE) * triton.cdiv(width, _TILE)
    if width > _NARROW and tiles >= multiprocessors(x_TD.device):
        return F.linear(x_TD, w_ND, bias_N)
    if width % _MULTIPLE and bias_N is not None:
        bias_N = F.pad(bias_N, (0, -width % _MULTIPLE))
    return _first_columns(_product(x_TD, [_padded(w_ND)], [bias_N]), width)


def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors, an H100's for Triton's interpreter."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@invariant_linear_op.register_fake
def _(x_TD, w_ND, bias_N):
    return x_TD.new_empty(x_TD.shape[0], w_ND.shape[0])


def _save_linear(
    ctx: OpContext,
    inputs: tuple[Any, ...],
    output: torch.Tensor,
) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate_linear(ctx: OpContext, dy_TN: torch.Tensor) -> tuple[object, ...]:
    x_TD, w_ND = ctx.saved_tensors
    for_x, for_w, for_bias = ctx.needs_input_grad
    return (
        dy_TN @ w_ND if for_x else None,
        dy_TN.t() @ x_TD if for_w else None,
        dy_TN.sum(0) if for_bias else None,
    )


invariant_linear_op.register_autograd(_differentiate_linear, setup_context=_save_linear)
worth_saving("linear", torch.ops.moetrain.invariant_linear.default)


def linears(
    x_RD: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (),
) -> tuple[torch.Tensor, ...]:
    """Multiply ``x`` by up to three ``w`` [N, D] in one launch: views [R, N] of one tensor.

    Weights are contiguous in ``x``'s dtype; ``D`` is a multiple of 8 and every N of 16. ``biases``
    [N], None where there is none, are added before rounding, as cuBLAS does.
    """
    return _product(x_RD, weights, biases).split([w.shape[0] for w in weights], dim=1)


def _product(
    x_RD: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (),
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the result of :func:`linears` as one tensor [R, sum of N], in ``dtype`` or ``x``'s."""
    R, D = x_RD.shape
    sizes = [w.shape[0] for w in weights]
    out_RN = x_RD.new_empty(R, sum(sizes), dtype=dtype)
    # Measured on one H200: tiles as wide as leaves enough programs for its multiprocessors.
    wide = sum(sizes) >= 4096 or R > 4096
    rows = min(64 if wide else 32, max(16, triton.next_power_of_2(R)))
    columns = next(n for n in (64 if wide else 32, 32, 16) if all(size % n == 0 for size in sizes))
    depth, stages = 128 if rows == 64 else 256, 3
    if R <= _FEW and not wide:  # a single weight has memory for twice as many stages
        columns, stages = 16, 6 if len(weights) == 1 else 3
        if len(weights) == 1 and sizes[0] <= _FEW_COLUMNS:
            rows, stages = 64, 4
    ends = [sum(sizes[: i + 1]) // columns for i in range(len(sizes))]
    ends += [ends[-1]] * (_MOST_WEIGHTS - len(ends))
    # The kernel has three arguments of each kind, and reads the first NUMBER.
    padded_weights = [*weights, *[weights[0]] * (_MOST_WEIGHTS - len(weights))]
    padded_biases = [*biases, *[None] * _MOST_WEIGHTS][:_MOST_WEIGHTS]
    if R:
        _linears_kernel[(ends[-1], triton.cdiv(R, rows))](
            TensorDescriptor.from_tensor(x_RD, [rows, depth]),
            *(TensorDescriptor.from_tensor(w, [columns, depth]) for w in padded_weights),
            *padded_biases,
            out_RN, R, out_RN.shape[1], D, ends[0], ends[1],
            NUMBER=len(weights), BR=rows, BN=columns, BD=depth, WIDEN=INTERPRETED, num_warps=4,
            num_stages=stages,
        )  # fmt: skip
    return out_RN


@triton.jit(do_not_specialize=["R"])
def _linears_kernel(
    x_desc, w0_desc, w1_desc, w2_desc, b0_ptr, b1_ptr, b2_ptr, out_ptr, R, N, D, end0, end1,
    NUMBER: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    tile, first = tl.program_id(0), tl.program_id(1) * BR
    total = tl.zeros((BR, BN), tl.float32)
    if NUMBER == 1 or tile < end0:
        for d in range(0, D, BD):
            total = _dot(x_desc.load([first, d]), w0_desc.load([tile * BN, d]), total, WIDEN)
        if b0_ptr is not None:
            total += tl.load(b0_ptr + tile * BN + tl.arange(0, BN)).to(tl.float32)[None, :]
    elif tile < end1:
        for d in range(0, D, BD):
            w = w1_desc.load([(tile - end0) * BN, d])
            total = _dot(x_desc.load([first, d]), w, total, WIDEN)
        if b1_ptr is not None:
            total += tl.load(b1_ptr + (tile - end0) * BN + tl.arange(0, BN)).to(tl.float32)[None, :]
    else:
        for d in range(0, D, BD):
            w = w2_desc.load([(tile - end1) * BN, d])
            total = _dot(x_desc.load([first, d]), w, total, WIDEN)
        if b2_ptr is not None:
            total += tl.load(b2_ptr + (tile - end1) * BN + tl.arange(0, BN)).to(tl.float32)[None, :]
    row = first + tl.arange(0, BR)
    at = row.to(tl.int64)[:, None] * N + (tile * BN + tl.arange(0, BN))[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(row < R)[:, None])


@triton.jit
def _dot(x, w, total, WIDEN: tl.constexpr):
    if WIDEN:  # Triton's interpreter would multiply bf16 as integers
        x, w = x.to(tl.float32), w.to(tl.float32)
    return tl.dot(x, w.T, total, input_precision="ieee")


def expert_mlp(
    x_RD: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor | QuantisedMatrices,
    w_down_EDF: torch.Tensor | QuantisedMatrices,
    weights_R: torch.Tensor,
    typical_rows: int,
) -> torch.Tensor:
    """Return ``y_RD``, the results of rows sorted by expert, not summed by token.

    ``offsets_E`` (int32) has each expert's end row, and ``typical_rows`` decides the tile sizes.

    Quantised matrices are dequantised as they are multiplied, so that only their quantised values
    are read. Multiplications and additions may not be fused: scales of nf4 are rounded twice.
    """
    R, D = x_RD.shape
    E, _, F = w_down_EDF.shape
    h_RF = x_RD.new_empty(R, F)
    y_RD = torch.empty_like(x_RD)
    rows = min(64, max(16, triton.next_power_of_2(triton.cdiv(3 * typical_rows, 2 * E))))
    columns = 128 if D % 128 == 0 else 32
    if R:
        _gate_up_kernel[(F // 32, E)](
            TensorDescriptor.from_tensor(x_RD, [rows, _DEPTH]),
            *_read_by(w_gate_up_E2FD, [32, _DEPTH]),
            offsets_E, weights_R, h_RF, D,
            F=F, BR=rows, BF=32, BD=_DEPTH, **_stored_as(w_gate_up_E2FD), WIDEN=INTERPRETED,
            num_warps=4, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
        _down_kernel[(D // columns, E)](
            TensorDescriptor.from_tensor(h_RF, [rows, _DEPTH]),
            *_read_by(w_down_EDF, [columns, _DEPTH]),
            offsets_E, y_RD, D,
            F=F, BR=rows, BN=columns, BF=_DEPTH, **_stored_as(w_down_EDF), WIDEN=INTERPRETED,
            num_warps=4, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
    return y_RD


def _read_by(w: torch.Tensor | QuantisedMatrices, tile: list[int]) -> tuple[Any, ...]:
    """Return the first five arguments of :func:`_tile`.

    These are a descriptor, or the quantised values, scales, shared scales and table, and the stride
    from an expert's values to the next one's.
    """
    if isinstance(w, torch.Tensor):
        return TensorDescriptor.from_tensor(w.flatten(0, 1), tile), None, None, None, 0
    codes, scales, shared = w.format.split(w.bytes_EB)
    return codes, scales, shared, w.format.table(codes.device), codes.stride(0)


def _stored_as(w: torch.Tensor | QuantisedMatrices) -> dict[str, Any]:
    if isinstance(w, torch.Tensor):
        return {"BITS": 16, "SIZE": 1, "SHARING": 1}
    return {"BITS": w.format.bits, "SIZE": w.format.group_size, "SHARING": w.format.groups_per_set}


@triton.jit
def _rows_of(offsets_ptr):
    e = tl.program_id(1)
    start = tl.load(offsets_ptr + e - 1, mask=e > 0, other=0)
    return e, start, tl.load(offsets_ptr + e)


@triton.jit
def _tile(
    w, scales, shared, table, stride, e, row, d, N, D, BN: tl.constexpr, BD: tl.constexpr,
    BITS: tl.constexpr, SIZE: tl.constexpr, SHARING: tl.constexpr,
):  # fmt: skip
    """Return a tile [BN, BD] of an expert's matrix [N, D], from row ``row`` and column ``d`` on.

    An expert has ``stride`` bytes if it is quantised; its tile is then fp32.
    """
    if BITS == 16:
        tile = w.load([e * N + row, d])
    else:
        BYTES: tl.constexpr = SIZE * BITS // 8
        first = e.to(tl.int64) * stride
        line = row + tl.arange(0, BN)
        group = ((line * D + d) // SIZE)[:, None] + tl.arange(0, BD // SIZE)[None, :]
        place = group[:, :, None] * BYTES + tl.arange(0, BYTES)[None, None, :]
        if SHARING > 1:
            shared += e.to(tl.int64) * (stride // 4)
        wide = load_scales(scales + first, shared, table, group, True, SHARING)
        x = load_elements(w + first + place, True, table, BITS, SHARING) * wide[:, :, None]
        tile = tl.reshape(x, (BN, BD))
    return tile


@triton.jit
def _gate_up_kernel(
    x_desc, w, scales, shared, table, stride, offsets_ptr, weights_ptr, h_ptr, D,
    F: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr,
    BITS: tl.constexpr, SIZE: tl.constexpr, SHARING: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    e, start, end = _rows_of(offsets_ptr)
    f = tl.program_id(0) * BF
    dtype = h_ptr.dtype.element_ty
    for first in range(start, end, BR):
        gate, up = tl.zeros((BR, BF), tl.float32), tl.zeros((BR, BF), tl.float32)
        for d in range(0, D, BD):
            x = x_desc.load([first, d])
            own = _tile(w, scales, shared, table, stride, e, f, d, 2 * F, D, BF, BD,
                        BITS, SIZE, SHARING)  # fmt: skip
            gate = _dot(x, own.to(x.dtype), gate, WIDEN)
            own = _tile(w, scales, shared, table, stride, e, f + F, d, 2 * F, D, BF, BD,
                        BITS, SIZE, SHARING)  # fmt: skip
            up = _dot(x, own.to(x.dtype), up, WIDEN)
        row = first + tl.arange(0, BR)
        mask = row < end
        weight = tl.load(weights_ptr + row, mask=mask, other=0.0).to(tl.float32)[:, None]
        # Round as if the product were stored and then read by SwiGLU.
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        h = gate * tl.sigmoid(gate) * up * weight
        h_at = row.to(tl.int64)[:, None] * F + (f + tl.arange(0, BF))[None, :]
        tl.store(h_ptr + h_at, h.to(dtype), mask=mask[:, None])


@triton.jit
def _down_kernel(
    h_desc, w, scales, shared, table, stride, offsets_ptr, y_ptr, D,
    F: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr,
    BITS: tl.constexpr, SIZE: tl.constexpr, SHARING: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    e, start, end = _rows_of(offsets_ptr)
    n = tl.program_id(0) * BN
    for first in range(start, end, BR):
        total = tl.zeros((BR, BN), tl.float32)
        for f in range(0, F, BF):
            h = h_desc.load([first, f])
            own = _tile(w, scales, shared, table, stride, e, n, f, D, F, BN, BF,
                        BITS, SIZE, SHARING)  # fmt: skip
            total = _dot(h, own.to(h.dtype), total, WIDEN)
        row = first + tl.arange(0, BR)
        at = row.to(tl.int64)[:, None] * D + (n + tl.arange(0, BN))[None, :]
        tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=(row < end)[:, None])


def wide_product(x_TD: torch.Tensor, w_ND: torch.Tensor) -> torch.Tensor:
    """Return ``x @ w^T`` [T, N] in fp32, of bf16 on CUDA, within an op: it has no autograd.

    Rows have the same bits among any number of rows. ``w`` is contiguous, ``D`` a multiple of 8.
    """
    rows, width = x_TD.shape
    is_few = rows <= _FEW and width % 8 == 0
    if not is_few and (width <= _WHOLE_WIDTH or width % 8 or rows >= _WHOLE_ROWS):
        return torch.mm(x_TD, w_ND.t(), out_dtype=torch.float32)
    y_TN = _product(x_TD.contiguous(), [_padded(w_ND)], dtype=torch.float32)
    return _first_columns(y_TN, w_ND.shape[0])


def _first_columns(y_TN: torch.Tensor, number: int) -> torch.Tensor:
    """Return the first columns of ``y`` as a dense tensor.

    A row's stride is then the number of columns for a single row, too. A view of one row counts as
    contiguous whatever its stride, and kernels are compiled by the alignment of strides.
    """
    if number == y_TN.shape[1]:
        return y_TN
    return y_TN[:, :number].clone(memory_format=torch.contiguous_format)


def low_rank_products(
    x_TD: torch.Tensor,
    weights: Sequence[torch.Tensor],
    backend: Backend = "auto",
) -> tuple[torch.Tensor, ...]:
    """Multiply ``x`` by the transposes of up to three ``a`` [r, D] in its dtype: [T, r] each.

    With ``a`` [S, r, D] each of S equal parts of ``x``'s rows has a matrix of its own.

    Raises:
        ValueError: shapes or dtypes do not fit, or there are more than three.
    """
    if len(weights) > 3 or any(
        a.shape[-1:] != x_TD.shape[1:] or a.dtype != x_TD.dtype for a in weights
    ):
        named = {f"a{i}": a for i, a in enumerate(weights)}
        takes = "up to three [r, D] in x's dtype"
        raise refusal("low_rank_products", takes, x=x_TD, **named)
    if weights and weights[0].dim() == 3:
        parts = [x_TD.unflatten(0, (a.shape[0], -1)) for a in weights]
        products = [_OfTenants.apply(None, x, a, 1.0) for x, a in zip(parts, weights, strict=True)]
        return tuple(u.flatten(0, 1) for u in products)
    # Generation only multiplies bf16, and a descriptor only takes rows of multiples of 16 bytes.
    is_for_it = x_TD.dtype == torch.bfloat16 and x_TD.shape[1] % 8 == 0
    if not is_for_it or not use_fast(backend, x_TD):
        return tuple(F.linear(x_TD, a) for a in weights)
    sizes = [a.shape[0] for a in weights]
    return low_rank_products_op(x_TD.contiguous(), [a.contiguous() for a in weights]).split(
        sizes, 1
    )


def add_low_rank(
    y_TN: torch.Tensor,
    u_TR: torch.Tensor,
    b_NR: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return ``y + scale * u @ b^T`` [T, N], rounded once.

    With ``b`` [S, N, r] each of S equal parts of the rows has a matrix of its own.
    """
    if b_NR.dim() == 2:
        return torch.addmm(y_TN, u_TR, b_NR.t(), alpha=scale)
    parts = (x.unflatten(0, (b_NR.shape[0], -1)) for x in (y_TN, u_TR))
    return _OfTenants.apply(*parts, b_NR, scale).flatten(0, 1)


class _OfTenants(torch.autograd.Function):
    """Computes ``y + scale * x @ w^T`` [S, T, N] for S tenants.

    The gradients' products have the order of a single tenant's, and its bits if the library's
    batched product has the bits of its single one.
    """

    @staticmethod
    def forward(
        ctx: OpContext,
        y_STN: torch.Tensor | None,
        x_STD: torch.Tensor,
        w_SND: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_STD, w_SND)
        ctx.scale = scale
        if y_STN is None:
            return x_STD @ w_SND.mT
        return torch.baddbmm(y_STN, x_STD, w_SND.mT, alpha=scale)

    @staticmethod
    def backward(ctx: OpContext, *gradients: torch.Tensor) -> tuple[object, ...]:
        (g_STN,), (x_STD, w_SND) = gradients, ctx.saved_tensors
        needs_y, needs_x, needs_w, _ = ctx.needs_input_grad
        dx_STD = g_STN @ w_SND if needs_x else None
        dw_SND = g_STN.mT @ x_STD if needs_w else None
        for made in (dx_STD, dw_SND) if ctx.scale != 1 else ():
            if made is not None:
                made.mul_(ctx.scale)
        return g_STN if needs_y else None, dx_STD, dw_SND, None


@torch.library.custom_op("moetrain::low_rank_products", mutates_args=())
def low_rank_products_op(x_TD: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    padded = [_padded(a) for a in weights]
    u_TR = _product(x_TD, padded)
    if all(a is b for a, b in zip(padded, weights, strict=True)):
        return u_TR
    parts = u_TR.split([a.shape[0] for a in padded], 1)
    return torch.cat([u[:, : a.shape[0]] for u, a in zip(parts, weights, strict=True)], 1)


def _padded(w_ND: torch.Tensor) -> torch.Tensor:
    """Return ``w`` with rows of zeros behind it, to a multiple of :data:`_MULTIPLE`."""
    missing = -w_ND.shape[0] % _MULTIPLE
    return F.pad(w_ND, (0, 0, 0, missing)) if missing else w_ND


@low_rank_products_op.register_fake
def _(x_TD, weights):
    return x_TD.new_empty(x_TD.shape[0], sum(a.shape[0] for a in weights))


def _differentiate(ctx: OpContext, du_TR: torch.Tensor) -> tuple[object, ...]:
    x_TD, *weights = ctx.saved_tensors
    da_RD = du_TR.t() @ x_TD if any(ctx.needs_input_grad[1]) else None
    dx_TD = du_TR @ torch.cat(weights) if ctx.needs_input_grad[0] else None
    sizes = [a.shape[0] for a in weights]
    return dx_TD, list(da_RD.split(sizes)) if da_RD is not None else [None] * len(weights)


low_rank_products_op.register_autograd(_differentiate, setup_context=save_inputs)
