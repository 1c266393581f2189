"""Quantisation to e4m3: rows for products, and MXFP8 groups for storage.

Rows have a scale each and lie in the order a product reads them::

    scale = 2^k, the least with |x| <= 448 scale in all of the row      values = round(x / scale)

With powers of two dividing is exact, a value times its scale is exact in bf16, and quantising what
was quantised changes nothing: every rank that quantises a row gets the same bits. It costs at most
one of 15 binades. A product reads both its operands along the inner width, so a weight [N, M] is
quantised by its rows for the forward and by its columns, transposed, for the input's gradient.

Worked example: the row [3, -1, 0.3] has the scale 2^-7 (448 / 128 = 3.5 holds 3, half of it does
not). Divided by it, [384, -128, 38.4] rounds to [384, -128, 40], which stands for [3, -1, 0.3125].

OCP's MXFP8 (Microscaling Formats v1.0) has a scale for each group of 32 neighbours, by the same
rule, stored as the byte of its exponent in fp32: 127 + k, k >= -126. Groups are widened without
rounding (in bf16 but for numbers below 2^-133).

Legend: T tokens, K rows that a token is copied to, R rows, E experts, N outer width, M inner width;
of MXFP8: W ranks, N numbers of whole groups, G groups.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch

from moetrain.kernels.backend import (
    INTERPRETED,
    Backend,
    refusal,
    require_contiguous,
    tl,
    triton,
    use_fast,
)

E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0  # the largest number in e4m3
MULTIPLE = 16
"""Widths of products in e4m3 are multiples of this."""
_TILE = {"BN": 512, "BM": 32, "num_warps": 16}  # a tile that is transposed at once


class Quantised(NamedTuple):
    """Rows in e4m3 with their scales; they stand for ``values * scales[..., None]``."""

    values: torch.Tensor
    """[..., M] e4m3."""
    scales: torch.Tensor
    """[...] fp32, powers of two."""

    def to(self, dtype: torch.dtype, backend: Backend = "reference") -> torch.Tensor:
        """Dequantise to ``dtype``; exact in bf16 and wider. The fast path takes rows [R, M]."""
        if self.scales.shape != self.values.shape[:-1]:
            raise refusal("dequantise", "a scale a row", **self._asdict())
        if not use_fast(backend, self.values):
            # A product, as a cast to the dtype that is there gives the same tensor, and torch 2.11
            # compiled gives no gradient to an alias in an autograd function's forward.
            return self.values.to(dtype) * self.scales[..., None].to(dtype)
        # As bytes: opcheck computes with an op's inputs, and torch computes nothing in e4m3.
        values = self.values.contiguous().view(torch.uint8)
        return _dequantise(values, self.scales.contiguous(), dtype)


def quantise_rows(x_XM: torch.Tensor, backend: Backend = "auto") -> Quantised:
    """Quantise ``x`` [..., M] (contiguous) by rows."""
    if use_fast(backend, x_XM):
        require_contiguous("quantise_rows", x=x_XM)
        values, scales = _quantise_rows(x_XM.flatten(0, -2))
        return Quantised(values.view_as(x_XM), scales.view(x_XM.shape[:-1]))
    amax_X = x_XM.detach().abs().amax(-1).float()
    # The exponent's field of the power of two from which on a row is too large for scale 1 / 256.
    field_X = ((amax_X.view(torch.int32) + 0x1FFFFF) >> 23).clamp(min=9)
    scales_X, inverse_X = ((x << 23).view(torch.float32) for x in (field_X - 8, 262 - field_X))
    values_XM = x_XM.detach().float() * inverse_X[..., None]
    return Quantised(values_XM.clamp(-_LARGEST, _LARGEST).to(E4M3), scales_X)


def quantise_columns(w_ENM: torch.Tensor, backend: Backend = "auto") -> Quantised:
    """Quantise the columns of a contiguous ``w`` [E, N, M], within an op: [E, M, N] and [E, M]."""
    if not use_fast(backend, w_ENM):
        return quantise_rows(w_ENM.transpose(1, 2).contiguous(), "reference")
    require_contiguous("quantise_columns", w=w_ENM)
    experts, n, m = w_ENM.shape
    values_EMN = w_ENM.new_empty(experts, m, n, dtype=E4M3)
    scales_EM = w_ENM.new_empty(experts, m, dtype=torch.float32)
    grid = (triton.cdiv(m, _TILE["BM"]), experts)
    is_whole = n <= _TILE["BN"]
    _columns_kernel[grid](
        w_ENM, values_EMN, scales_EM, n, m, IS_WHOLE=is_whole, BY_HAND=INTERPRETED, **_TILE
    )
    return Quantised(values_EMN, scales_EM)


def quantise_to_rows(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    num_rows: int,
    *,
    narrow: bool = True,
    wide: bool = False,
) -> tuple[Quantised, torch.Tensor, torch.Tensor]:
    """Permute tokens to rows in e4m3 (:mod:`moetrain.kernels.experts.permutation`).

    Returns the rows (with ``narrow``), their weights, and (with ``wide``) the dequantised rows in
    ``x``'s dtype; the others are empty. It is for the inside of an op, with contiguous inputs.
    """
    width = x_TD.shape[1]
    values_RD = x_TD.new_empty(num_rows if narrow else 0, width, dtype=E4M3)
    scales_R = x_TD.new_empty(num_rows, dtype=torch.float32)
    weights_R = weights_TK.new_empty(num_rows)
    x_RD = x_TD.new_empty(num_rows if wide else 0, width)
    _launch_rows(
        x_TD, slot_row_TK, values_RD if narrow else None, scales_R, x_RD if wide else None,
        weights_TK, weights_R,
    )  # fmt: skip
    return Quantised(values_RD, scales_R), weights_R, x_RD


def quantise_tokens_and_rows(
    x_TD: torch.Tensor, weights_TK: torch.Tensor, slot_row_TK: torch.Tensor, num_rows: int
) -> tuple[Quantised, Quantised, torch.Tensor, torch.Tensor]:
    """Quantise tokens, and permute them to rows as :func:`quantise_to_rows`.

    Returns the tokens, the rows, the rows' weights, and int32 [R] the token that each row is of.
    """
    (tokens, width), scale_like = x_TD.shape, {"dtype": torch.float32}
    own = Quantised(x_TD.new_empty(tokens, width, dtype=E4M3), x_TD.new_empty(tokens, **scale_like))
    rows = Quantised(
        x_TD.new_empty(num_rows, width, dtype=E4M3), x_TD.new_empty(num_rows, **scale_like)
    )
    weights_R, token_R = weights_TK.new_empty(num_rows), slot_row_TK.new_empty(num_rows)
    _launch_rows(x_TD, slot_row_TK, *rows, None, weights_TK, weights_R, own=own, token_R=token_R)
    return own, rows, weights_R, token_R


@torch.library.custom_op("moetrain::quantise_rows", mutates_args=())
def _quantise_rows(x_RM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values_RM, scales_R = _quantise_rows_fake(x_RM)
    _launch_rows(x_RM, None, values_RM, scales_R)
    return values_RM, scales_R


@_quantise_rows.register_fake
def _quantise_rows_fake(x_RM):
    return torch.empty_like(x_RM, dtype=E4M3), x_RM.new_empty(x_RM.shape[0], dtype=torch.float32)


@torch.library.custom_op("moetrain::dequantise", mutates_args=())
def _dequantise(bytes_RM: torch.Tensor, scales_R: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    (rows, width), x_RM = bytes_RM.shape, torch.empty_like(bytes_RM, dtype=dtype)
    if rows:
        values_RM = bytes_RM.view(E4M3)
        _wide_kernel[(rows,)](values_RM, scales_R, x_RM, width, **row_launch(width))
    return x_RM


@_dequantise.register_fake
def _(bytes_RM, scales_R, dtype):
    return torch.empty_like(bytes_RM, dtype=dtype)


def row_launch(width: int) -> dict[str, int]:
    """Return the launch settings of a kernel whose programs take a whole row each."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(2, block // 512))}


def _launch_rows(
    x_TD: torch.Tensor,
    slot_row_TK: torch.Tensor | None,
    values_RD: torch.Tensor | None,
    scales_R: torch.Tensor,
    x_RD: torch.Tensor | None = None,
    weights_TK: torch.Tensor | None = None,
    weights_R: torch.Tensor | None = None,
    own: Quantised | tuple[None, None] = (None, None),
    token_R: torch.Tensor | None = None,
) -> None:
    """Quantise each token to its rows; without ``slot_row_TK`` token t is row t.

    ``own`` and ``token_R`` are filled where they are given.
    """
    tokens, width = x_TD.shape
    slots = 1 if slot_row_TK is None else slot_row_TK.shape[1]
    if tokens:
        _rows_kernel[(tokens,)](
            x_TD, slot_row_TK, values_RD, scales_R, x_RD, weights_TK, weights_R, *own, token_R,
            width, SLOTS=slots, BY_HAND=INTERPRETED, **row_launch(width),
        )  # fmt: skip


@triton.jit
def scale_of(amax):
    """The scale of rows whose largest numbers are ``amax``, and its inverse.

    Both powers of two are made of the bits of their exponents. 0x1FFFFF is what 1.75, the mantissa
    of 448, lacks of the next power; from field 9 on neither is subnormal.
    """
    field = tl.maximum((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23, 9)
    scale = ((field - 8) << 23).to(tl.float32, bitcast=True)
    return scale, ((262 - field) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x, BY_HAND: tl.constexpr):
    """Rounded to nearest even. ``BY_HAND``, as Triton's interpreter loses a carry there."""
    if BY_HAND:
        # Adding 3/2 of 2^23 steps rounds to a step: 1/8 of the power of two, or of 2^-6 below it.
        field = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 121)
        large = (((field + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
        x = (x + large) - large
    return x.to(tl.float8e4nv)


@triton.jit
def _rows_kernel(
    x, slot_row, values, scales, rows, weights, row_weights, own_values, own_scales, row_token,
    width,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    given = tl.load(x + token * width + column, column < width, other=0.0).to(tl.float32)
    scale, inverse = scale_of(tl.max(tl.abs(given), axis=0))
    narrow = to_e4m3(given * inverse, BY_HAND)
    if slot_row is None:
        tl.store(values + token * width + column, narrow, column < width)
        tl.store(scales + token, scale)
    else:
        if own_values is not None:
            tl.store(own_values + token * width + column, narrow, column < width)
            tl.store(own_scales + token, scale)
        for k in tl.static_range(SLOTS):
            row = tl.load(slot_row + token * SLOTS + k).to(tl.int64)
            # An absent row has no columns.
            mask = column < tl.where(row >= 0, width, 0)
            if values is not None:
                tl.store(values + row * width + column, narrow, mask)
            if rows is not None:
                tl.store(rows + row * width + column, narrow.to(tl.float32) * scale, mask)
            if row >= 0:
                tl.store(scales + row, scale)
                tl.store(row_weights + row, tl.load(weights + token * SLOTS + k))
                if row_token is not None:
                    tl.store(row_token + row, token.to(tl.int32))


@triton.jit
def _wide_kernel(values, scales, x, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    narrow = tl.load(values + row * width + column, column < width)
    wide = narrow.to(tl.float32) * tl.load(scales + row)
    tl.store(x + row * width + column, wide, column < width)


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
        # Again, from the cache: few enough programs run at once for their columns to be there.
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


SCALED = 32
"""Numbers in an MXFP8 group."""
_BAD = 255
"""The scale of a group with a number that is not finite; the whole group is NaN then."""
_GROUP_LAUNCH = {"GROUPS": 64, "num_warps": 2}


def quantise_groups(x_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x_N`` (floating, whole groups) to codes [N] (e4m3) and scales [G] (uint8)."""
    x_GS = x_N.float().view(-1, SCALED)
    is_bad_G = ~x_GS.isfinite().all(1)
    x_GS = x_GS.masked_fill(is_bad_G[:, None], 0.0)
    codes_GS, scales_G = quantise_rows(x_GS, "reference")
    bytes_G = (scales_G.view(torch.int32) >> 23).masked_fill(is_bad_G, _BAD)
    return codes_GS.view(-1), bytes_G.to(torch.uint8)


def widen_groups(
    codes_WN: torch.Tensor,
    scales_WG: torch.Tensor,
    out_N: torch.Tensor,
    start: int,
    numel: int,
    backend: Backend = "auto",
) -> None:
    """Dequantise ``numel`` numbers from ``start`` on of each rank into ``out_N``, rank by rank.

    Args:
        codes_WN, scales_WG: e4m3 and uint8; rows may lie apart.
        out_N: floating, contiguous, at most W * ``numel``: the last ranks may have less.
    """
    ranks, numbers = codes_WN.shape
    is_there = 0 <= start <= start + numel <= numbers and out_N.numel() <= ranks * numel
    are_groups = numbers % SCALED == 0 and scales_WG.shape == (ranks, numbers // SCALED)
    are_dtypes = (codes_WN.dtype, scales_WG.dtype) == (E4M3, torch.uint8)
    are_near = codes_WN.stride(1) == scales_WG.stride(1) == out_N.stride(0) == 1
    if not (is_there and are_groups and are_dtypes and are_near and out_N.dim() == 1):
        takes = f"{E4M3} [W, N], uint8 [W, N / {SCALED}] and [N], of near neighbours, numbers of N"
        given = {"codes": codes_WN, "scales": scales_WG, "room for": out_N}
        raise refusal("widen_groups", takes, numbers=f"{start} to {start + numel}", **given)
    if use_fast(backend, out_N):
        if out_N.numel():
            _widen_groups(codes_WN.view(torch.uint8), scales_WG, out_N, start, numel)
        return
    first = start // SCALED
    last = -(-(start + numel) // SCALED)
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
    _groups_kernel[(triton.cdiv(groups, _GROUP_LAUNCH["GROUPS"]), len(bytes_WN))](
        bytes_WN, scales_WG, out_N, bytes_WN.stride(0), scales_WG.stride(0),
        start, numel, out_N.numel(), SIZE=SCALED, **_GROUP_LAUNCH,
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
