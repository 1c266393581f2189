"""Quantisation to e4m3, by rows, of the operands of products.

A row has one scale, or one for each tile of 128 neighbours (DeepSeek-V3, arXiv 2412.19437, section
3.3)::

    scale = 2^k, the smallest with |x| <= 448 scale in the row or tile
    values = round(x / scale)

With powers of two the division is exact, a value times its scale is exact in bf16, and dequantised
values do not change when they are quantised again: every rank that quantises a row gets the same
bits. The restriction to powers of two costs at most one of e4m3's 15 binades. A product reads both
operands along the inner width. So a weight [N, M] is quantised by its rows for the forward, and by
its columns, transposed, for the input's gradient.

Worked example: the row [3, -1, 0.3] has the scale 2^-7 (448 / 128 = 3.5 holds 3, half of it does
not). Divided by it, [384, -128, 38.4] rounds to [384, -128, 40]; times the scale, that is [3, -1,
0.3125].

Legend: T tokens, K rows that a token is copied to, R rows, X any dims, E experts, N outer width, M
inner width, G tiles of a row.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
from torch.nn import functional as F

from moetrain.runtime.backend import (
    INTERPRETED,
    Backend,
    refusal,
    require_contiguous,
    tl,
    triton,
    use_fast,
)

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = 448.0
"""The largest value in e4m3."""
MULTIPLE = 16
"""Widths of products in e4m3 are multiples of this."""
TILE = 128
"""Neighbours in a row that share a scale where a row has several."""
SCALED = 32
"""Neighbours that share a scale in OCP's formats (:mod:`moetrain.kernels.quant.groups`)."""
_TRANSPOSE = {"BN": 512, "BM": 32, "num_warps": 16}
"""Launch settings of the transposition; a program takes [BN, BM] at a time."""


class Quantised(NamedTuple):
    """Quantised rows: each element is its value times its scale."""

    values: torch.Tensor
    """[..., M] e4m3."""
    scales: torch.Tensor
    """fp32 powers of two: [...], a scale a row, or [G, ...], one for each 128 elements of it."""

    @classmethod
    def empty(cls, like: torch.Tensor, rows: int, width: int, tiled: bool) -> "Quantised":
        """Return rows without values, on the device of ``like``."""
        shape = (-(-width // TILE), rows) if tiled else (rows,)
        values = like.new_empty(rows, width, dtype=E4M3)
        return cls(values, like.new_empty(shape, dtype=torch.float32))

    @property
    def is_tiled(self) -> bool:
        """True: a row has a scale for each tile."""
        return self.scales.dim() == self.values.dim()

    @classmethod
    def received(cls, values_RM: torch.Tensor, scales_RG: torch.Tensor, tiled: bool) -> "Quantised":
        """Invert :meth:`scales_by_row`: return rows from their values and sent scales."""
        return cls(values_RM, scales_RG.t().contiguous() if tiled else scales_RG[:, 0])

    def scales_by_row(self) -> torch.Tensor:
        """Return the scales of rows [R, M] in the order in which they are sent: [R, G]."""
        scales_GR = self.scales if self.is_tiled else self.scales[None]
        return scales_GR.t().clone(memory_format=torch.contiguous_format)

    def to(self, dtype: torch.dtype, backend: Backend = "reference") -> torch.Tensor:
        """Dequantise to ``dtype``; exact in bf16 and wider. The fast path takes rows [R, M]."""
        *rows, width = self.values.shape
        tiles = [-(-width // TILE)] * self.is_tiled
        if [*self.scales.shape] != [*tiles, *rows]:
            raise refusal("dequantise", "a scale a row, or a tile of it", **self._asdict())
        if not use_fast(backend, self.values):
            if self.is_tiled:
                scales = self.scales.movedim(0, -1).repeat_interleave(TILE, -1)[..., :width]
                return self.values.to(dtype) * scales.to(dtype)
            # Always a product: a cast alone may return the same tensor, and torch 2.11 compiled
            # gives no gradient to an alias in an autograd function's forward.
            return self.values.to(dtype) * self.scales[..., None].to(dtype)
        # The op takes bytes: opcheck computes with inputs, and torch cannot compute in e4m3.
        values = self.values.contiguous().view(torch.uint8)
        return dequantise_op(values, self.scales.contiguous(), dtype)


def quantise_rows(
    x_XM: torch.Tensor, backend: Backend = "auto", *, tiled: bool = False
) -> Quantised:
    """Quantise ``x`` [..., M] (contiguous) with a scale for each row or (``tiled``) each tile."""
    if use_fast(backend, x_XM):
        require_contiguous("quantise_rows", x=x_XM)
        values, scales = quantise_rows_op(x_XM.flatten(0, -2), tiled)
        return Quantised(values.view_as(x_XM), scales.view(*scales.shape[:-1], *x_XM.shape[:-1]))
    if tiled:
        width = x_XM.shape[-1]
        parts = F.pad(x_XM.detach(), (0, -width % TILE)).unflatten(-1, (-1, TILE))
        values, scales = quantise_rows(parts, "reference")
        values = values.flatten(-2)[..., :width].contiguous()
        return Quantised(values, scales.movedim(-1, 0).contiguous())
    amax_X = x_XM.detach().abs().amax(-1).float()
    # Round the exponent up where the mantissa is above 1.75, that of 448; see :func:`scale_of`.
    field_X = ((amax_X.view(torch.int32) + 0x1FFFFF) >> 23).clamp(min=9)
    scales_X, inverse_X = ((x << 23).view(torch.float32) for x in (field_X - 8, 262 - field_X))
    values_XM = x_XM.detach().float() * inverse_X[..., None]
    return Quantised(values_XM.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3), scales_X)


def quantise_columns(w_ENM: torch.Tensor, backend: Backend = "auto") -> Quantised:
    """Quantise the columns of a contiguous ``w`` [E, N, M]: values [E, M, N], scales [E, M].

    For use inside an op.
    """
    if not use_fast(backend, w_ENM):
        return quantise_rows(w_ENM.transpose(1, 2).contiguous(), "reference")
    require_contiguous("quantise_columns", w=w_ENM)
    experts, n, m = w_ENM.shape
    values_EMN = w_ENM.new_empty(experts, m, n, dtype=E4M3)
    scales_EM = w_ENM.new_empty(experts, m, dtype=torch.float32)
    grid = (triton.cdiv(m, _TRANSPOSE["BM"]), experts)
    is_whole = n <= _TRANSPOSE["BN"]
    _columns_kernel[grid](
        w_ENM, values_EMN, scales_EM, n, m, IS_WHOLE=is_whole, BY_HAND=INTERPRETED, **_TRANSPOSE
    )
    return Quantised(values_EMN, scales_EM)


class PermutedRows(NamedTuple):
    """Tokens permuted to quantised rows; what was not asked for is empty."""

    rows: Quantised
    """[R, D]."""
    weights_R: torch.Tensor
    """The routing weight of each row."""
    dequantised_RD: torch.Tensor
    """The rows' values, in the tokens' dtype."""
    tokens: Quantised
    """The tokens themselves [T, D]."""
    token_R: torch.Tensor
    """int32: the token of each row."""


def quantise_to_rows(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    num_rows: int,
    *,
    tiled: bool = False,
    with_rows: bool = True,
    with_dequantised: bool = False,
    with_tokens: bool = False,
) -> PermutedRows:
    """Quantise tokens and permute them to rows (:mod:`moetrain.kernels.experts.permutation`).

    For use inside an op, with contiguous inputs.

    Args:
        x_TD: the tokens.
        weights_TK: routing weights.
        slot_row_TK: the row of each slot; -1: none.
        num_rows: R.
        tiled: a scale a tile of a row.
        with_rows: make ``rows``.
        with_dequantised: make ``dequantised_RD``.
        with_tokens: make ``tokens`` and ``token_R``.
    """
    tokens, width = x_TD.shape
    made = PermutedRows(
        rows=Quantised.empty(x_TD, num_rows if with_rows else 0, width, tiled),
        weights_R=weights_TK.new_empty(num_rows),
        dequantised_RD=x_TD.new_empty(num_rows if with_dequantised else 0, width),
        tokens=Quantised.empty(x_TD, tokens if with_tokens else 0, width, tiled),
        token_R=slot_row_TK.new_empty(num_rows if with_tokens else 0),
    )
    if tokens:
        _rows_kernel[(tokens,)](
            x_TD,
            slot_row_TK,
            *(made.rows if with_rows else (None, None)),
            made.dequantised_RD if with_dequantised else None,
            weights_TK,
            made.weights_R,
            *(made.tokens if with_tokens else (None, None)),
            made.token_R if with_tokens else None,
            width,
            num_rows,
            tokens,
            SLOTS=slot_row_TK.shape[1],
            BY_HAND=INTERPRETED,
            **row_launch(width, tiled),
        )
    return made


@torch.library.custom_op("moetrain::quantise_rows", mutates_args=())
def quantise_rows_op(x_RM: torch.Tensor, tiled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x_RM.shape
    made = Quantised.empty(x_RM, rows, width, tiled)
    if rows:
        _rows_kernel[(rows,)](
            x_RM,
            None,  # slot_row: rows stay where they are
            made.values,
            made.scales,
            None,  # rows
            None,  # weights
            None,  # row_weights
            None,  # own_values
            None,  # own_scales
            None,  # row_token
            width,
            rows,
            rows,
            SLOTS=1,
            BY_HAND=INTERPRETED,
            **row_launch(width, tiled),
        )
    return made.values, made.scales


@quantise_rows_op.register_fake
def _(x_RM: torch.Tensor, tiled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x_RM.shape
    made = Quantised.empty(x_RM, rows, width, tiled)
    return made.values, made.scales


@torch.library.custom_op("moetrain::dequantise", mutates_args=())
def dequantise_op(bytes_RM: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows, width = bytes_RM.shape
    x_RM = torch.empty_like(bytes_RM, dtype=dtype)
    if rows:
        values_RM = bytes_RM.view(E4M3)
        launch = row_launch(width, scales.dim() == 2)
        _dequantise_kernel[(rows,)](values_RM, scales, x_RM, width, rows, **launch)
    return x_RM


@dequantise_op.register_fake
def _(bytes_RM: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(bytes_RM, dtype=dtype)


def row_launch(width: int, tiled: bool) -> dict[str, int]:
    """Return the launch settings of a kernel whose programs take a whole row each.

    A program takes it as [BLOCK // PART, PART] elements. PART is a tile, or the whole row.
    """
    block = triton.next_power_of_2(width)
    block = max(block, TILE) if tiled else block
    part = TILE if tiled else block
    return {"BLOCK": block, "PART": part, "num_warps": min(16, max(2, block // 512))}


@triton.jit
def scale_of(amax):
    """Return the scale of rows whose largest absolute values are ``amax``, and its inverse.

    Both powers of two are made from the bits of their exponents. Adding 0x1FFFFF carries into the
    exponent if the mantissa is above 1.75, that of 448. From field 9 on, neither is subnormal.
    """
    field = tl.maximum((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23, 9)
    scale = ((field - 8) << 23).to(tl.float32, bitcast=True)
    return scale, ((262 - field) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x, BY_HAND: tl.constexpr):
    """Round to e4m3, to nearest even. ``BY_HAND``: Triton's interpreter loses a carry."""
    if BY_HAND:
        # Adding 1.5 * 2^23 steps rounds to a whole number of them. A step is 1/8 of the power of
        # two in x, or of 2^-6 where x is smaller.
        field = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 121)
        large = (((field + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
        x = (x + large) - large
    return x.to(tl.float8e4nv)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])  # they change with every call
def _rows_kernel(
    x,
    slot_row,
    values,
    scales,
    rows,
    weights,
    row_weights,
    own_values,
    own_scales,
    row_token,
    width,
    num_rows,
    num_tokens,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK // PART)
    column = part[:, None] * PART + tl.arange(0, PART)[None, :]
    has_scale = part * PART < width
    loaded = tl.load(x + token * width + column, column < width, other=0.0).to(tl.float32)
    scale, inverse = scale_of(tl.max(tl.abs(loaded), axis=1))
    quantised = to_e4m3(loaded * inverse[:, None], BY_HAND)
    if slot_row is None:
        tl.store(values + token * width + column, quantised, column < width)
        tl.store(scales + part * num_rows + token, scale, has_scale)
    else:
        if own_values is not None:
            tl.store(own_values + token * width + column, quantised, column < width)
            tl.store(own_scales + part * num_tokens + token, scale, has_scale)
        for k in tl.static_range(SLOTS):
            row = tl.load(slot_row + token * SLOTS + k).to(tl.int64)
            # An absent row has no columns.
            mask = column < tl.where(row >= 0, width, 0)
            if values is not None:
                tl.store(values + row * width + column, quantised, mask)
                is_there = part * PART < tl.where(row >= 0, width, 0)
                tl.store(scales + part * num_rows + row, scale, is_there)
            if rows is not None:
                dequantised = quantised.to(tl.float32) * scale[:, None]
                tl.store(rows + row * width + column, dequantised, mask)
            if row >= 0:
                tl.store(row_weights + row, tl.load(weights + token * SLOTS + k))
                if row_token is not None:
                    tl.store(row_token + row, token.to(tl.int32))


@triton.jit(do_not_specialize=["num_rows"])
def _dequantise_kernel(values, scales, x, width, num_rows, BLOCK: tl.constexpr, PART: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK // PART)
    column = part[:, None] * PART + tl.arange(0, PART)[None, :]
    quantised = tl.load(values + row * width + column, column < width)
    scale = tl.load(scales + part * num_rows + row, part * PART < width, other=0.0)
    dequantised = quantised.to(tl.float32) * scale[:, None]
    tl.store(x + row * width + column, dequantised, column < width)


@triton.jit
def _columns_kernel(
    w, values, scales, N, M,
    BN: tl.constexpr, BM: tl.constexpr, IS_WHOLE: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    w += expert * N * M
    values += expert * M * N
    if IS_WHOLE:
        x = _load_tile(w, 0, m, N, M, BN)
        scale, inverse = scale_of(tl.max(tl.abs(x), axis=0))
        _store_tile(values, x * inverse[None, :], 0, m, N, M, BN, BY_HAND)
    else:
        amax = tl.zeros([BM], tl.float32)
        for start in range(0, N, BN):
            amax = tl.maximum(amax, tl.max(tl.abs(_load_tile(w, start, m, N, M, BN)), axis=0))
        scale, inverse = scale_of(amax)
        # Loaded again, from the cache: few enough programs run at once for their columns to fit.
        for start in range(0, N, BN):
            x = _load_tile(w, start, m, N, M, BN)
            _store_tile(values, x * inverse[None, :], start, m, N, M, BN, BY_HAND)
    tl.store(scales + expert * M + m, scale, m < M)


@triton.jit
def _load_tile(w, start, m, N, M, BN: tl.constexpr):
    n = start + tl.arange(0, BN)
    mask = (n < N)[:, None] & (m < M)[None, :]
    return tl.load(w + n[:, None] * M + m[None, :], mask, other=0.0).to(tl.float32)


@triton.jit
def _store_tile(values, x, start, m, N, M, BN: tl.constexpr, BY_HAND: tl.constexpr):
    n = start + tl.arange(0, BN)
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(values + m[:, None] * N + n[None, :], tl.trans(to_e4m3(x, BY_HAND)), mask)
