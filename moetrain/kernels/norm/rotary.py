"""Rotary positions of queries and keys, with their norm where a model has one, as one op.

    n = rms_norm(x), or x     y[i] = n[i] c - n[i + d/2] s     y[i + d/2] = n[i + d/2] c + n[i] s

A head is rotated by its token's cosines ``c`` and sines ``s`` (arXiv 2104.09864), in fp32, rounded
once. Fewer angles than pairs rotate the first elements of a head, and the others stay: d above is
then the rotating width. With ``interleaved``, n[2i] and n[2i + 1] are a pair, and stay in place.

It is one op so that its bits do not depend on what the compiler would fuse it with. With
``fusible`` they may, and the compiler fuses the forward. One op makes all gradients, as in
:mod:`moetrain.kernels.norm.rms_norm`; ``dy`` rotated back is the upstream gradient of the norm.

Legend: T tokens, H heads, d head width, p pairs that rotate, at most d/2, S rows of angles: token t
has those of row t % S; N is T/S; P programs of the backward.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from typing import Any, Protocol

import torch

from moetrain.kernels.norm.rms_norm import rms_norm
from moetrain.runtime.backend import (
    Backend,
    gradients,
    refusal,
    require_contiguous,
    tl,
    triton,
    use_fast,
)
from moetrain.runtime.typed import OpContext

_HEADS = 8  # heads of one token that a program rotates


def rotary(
    x_THd: torch.Tensor,
    cos_Sp: torch.Tensor,
    sin_Sp: torch.Tensor,
    weight_d: torch.Tensor | None = None,
    eps: float = 0.0,
    backend: Backend = "auto",
    *,
    interleaved: bool = False,
    fusible: bool = False,
) -> torch.Tensor:
    """Normalise and rotate heads: [T, H, d], contiguous, in ``x``'s dtype.

    Args:
        x_THd: fastest where each token's elements are contiguous; tokens may lie apart.
        cos_Sp, sin_Sp: fp32, contiguous; T is a multiple of S.
        weight_d: the norm's weight, contiguous; None: no norm.
        interleaved: rotate neighbours together, instead of elements p apart.
        fusible: run the forward in plain torch, which the compiler fuses with its neighbours.

    Raises ValueError: shapes do not fit, or angles or weight are not contiguous.
    """
    _check(x_THd, cos_Sp, sin_Sp, weight_d)
    if not use_fast(backend, x_THd):
        return _rotated(x_THd, cos_Sp, sin_Sp, weight_d, eps, interleaved).flatten(0, 1)
    if fusible:
        y_NSHd = _FusibleRotary.apply(x_THd, cos_Sp, sin_Sp, weight_d, eps, interleaved)
        return y_NSHd.flatten(0, 1)
    return rotary_op(x_THd, cos_Sp, sin_Sp, weight_d, eps, interleaved)


def _check(
    x_THd: torch.Tensor, cos_Sp: torch.Tensor, sin_Sp: torch.Tensor, weight_d: torch.Tensor | None
) -> None:
    (T, _, d), (S, pairs) = x_THd.shape, cos_Sp.shape
    if d % 2 or T % max(1, S) or pairs > d // 2 or sin_Sp.shape != cos_Sp.shape:
        takes = "[T, H, d] and [S, d/2 or fewer], S divides T"
        raise refusal("rotary", takes, x=x_THd, cos=cos_Sp, sin=sin_Sp)
    require_contiguous("rotary", cos=cos_Sp, sin=sin_Sp)
    if weight_d is not None:
        if weight_d.shape != (d,):
            raise refusal("rotary", "a weight [d]", x=x_THd, weight=weight_d)
        require_contiguous("rotary", weight=weight_d)


def _rotated(
    x_THd: torch.Tensor,
    cos_Sp: torch.Tensor,
    sin_Sp: torch.Tensor,
    weight_d: torch.Tensor | None,
    eps: float,
    interleaved: bool,
) -> torch.Tensor:
    """Return [N, S, H, d], a tensor without an alias (see :class:`_FusibleRotary`)."""
    # Normalise, and go on in fp32.
    n_THd = x_THd if weight_d is None else rms_norm(x_THd, weight_d, eps, "reference")
    x = n_THd.to(torch.promote_types(x_THd.dtype, torch.float32))
    T = x_THd.shape[0]
    S, pairs = cos_Sp.shape
    x = x.unflatten(0, (T // max(1, S), S))
    # Rotate the pairs; other elements stay.
    rotating, staying = x[..., : 2 * pairs], x[..., 2 * pairs :]
    x1, x2 = (rotating[..., ::2], rotating[..., 1::2]) if interleaved else rotating.chunk(2, -1)
    cos = cos_Sp[:, None]
    sin = sin_Sp[:, None]
    halves = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    rotated = [torch.stack(halves, -1).flatten(-2)] if interleaved else halves
    return torch.cat([part.to(x_THd.dtype) for part in (*rotated, staying)], dim=-1)


@torch.library.custom_op("moetrain::rotary", mutates_args=())
def rotary_op(
    x_THd: torch.Tensor,
    cos_Sp: torch.Tensor,
    sin_Sp: torch.Tensor,
    weight_d: torch.Tensor | None,
    eps: float,
    interleaved: bool,
) -> torch.Tensor:
    T, H, d = x_THd.shape
    heads = min(_HEADS, triton.next_power_of_2(H))
    x_THd = _with_whole_tokens(x_THd)
    out_THd = x_THd.new_empty(T, H, d)
    if T:
        _rotary_kernel[(T, triton.cdiv(H, heads))](
            x_THd,
            cos_Sp,
            sin_Sp,
            weight_d,
            out_THd,
            x_THd.stride(0),
            cos_Sp.shape[0],
            eps,
            H=H,
            HALF=d // 2,
            PAIRS=cos_Sp.shape[1],
            INTERLEAVED=interleaved,
            BLOCK=triton.next_power_of_2(d // 2),
            HEADS=heads,
            num_warps=1,
        )
    return out_THd


@rotary_op.register_fake
def _(
    x_THd: torch.Tensor,
    cos_Sp: torch.Tensor,
    sin_Sp: torch.Tensor,
    weight_d: torch.Tensor | None,
    eps: float,
    interleaved: bool,
) -> torch.Tensor:
    return x_THd.new_empty(x_THd.shape)


@triton.jit
def _places(column, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the indices in a head of each column's two elements, a pair if it rotates."""
    first = 2 * column if INTERLEAVED else column
    second = first + (1 if INTERLEAVED else PAIRS)
    turns = column < PAIRS
    return tl.where(turns, first, column + PAIRS), tl.where(turns, second, column + HALF)


@triton.jit(do_not_specialize=["S"])
def _rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, w_ptr, out_ptr, stride, S, eps,
    H: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    _rotate_heads(
        x_ptr + token * stride, cos_ptr, sin_ptr, w_ptr, out_ptr + token * H * 2 * HALF,
        tl.program_id(1), token % S, eps, H, H, HALF, PAIRS, INTERLEAVED, BLOCK, HEADS,
    )  # fmt: skip


@triton.jit
def _rotate_heads(
    x_ptr, cos_ptr, sin_ptr, w_ptr, out_ptr, tile, angles, eps, H, kept,
    HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate a tile of one token's ``H`` heads, by the row ``angles`` of the angles.

    Only the first ``kept`` heads are stored.
    """
    head = tile * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    mask = (head < H)[:, None] & (column < HALF)[None, :]
    dtype = out_ptr.dtype.element_ty
    first, second = _places(column, HALF, PAIRS, INTERLEAVED)
    at1 = head[:, None] * (2 * HALF) + first[None, :]
    at2 = head[:, None] * (2 * HALF) + second[None, :]
    x1 = tl.load(x_ptr + at1, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + at2, mask=mask, other=0.0).to(tl.float32)
    if w_ptr is not None:
        r = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
        w1 = tl.load(w_ptr + first, mask=column < HALF, other=0.0).to(dtype).to(tl.float32)
        w2 = tl.load(w_ptr + second, mask=column < HALF, other=0.0).to(dtype).to(tl.float32)
        x1 = ((x1 * r).to(dtype).to(tl.float32) * w1[None, :]).to(dtype).to(tl.float32)
        x2 = ((x2 * r).to(dtype).to(tl.float32) * w2[None, :]).to(dtype).to(tl.float32)
    turn = angles * PAIRS + column
    cos = tl.load(cos_ptr + turn, mask=column < PAIRS, other=1.0)[None, :]
    sin = tl.load(sin_ptr + turn, mask=column < PAIRS, other=0.0)[None, :]
    mask &= (head < kept)[:, None]
    tl.store(out_ptr + at1, x1 * cos - x2 * sin, mask=mask)
    tl.store(out_ptr + at2, x2 * cos + x1 * sin, mask=mask)


class Norm(Protocol):
    """An RMS norm of heads."""

    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def eps(self) -> float: ...


def rotate_into_pages(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    slots_T: torch.Tensor,
    cos_Tp: torch.Tensor,
    sin_Tp: torch.Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys, and store keys and values in pages, in one launch.

    It does what :func:`rotary` and
    :func:`moetrain.kernels.attention.batch_invariant.store_in_pages` do, without autograd and
    unchecked.

    Args:
        cache: keys and values of all pages.
        slots_T: int32, the slot of each token over all pages; -1: not stored.
        q_norm, k_norm: the norms, with the same ``eps``; None: there are none.

    Returns:
        The rotated queries, and T * G zeros, int32, as ``store_in_pages`` returns them.
    """
    eps = 0.0 if q_norm is None else q_norm.eps
    T, H, d = q_THd.shape
    G, v_width = v_TGv.shape[1:]
    for x in (q_THd, k_TGd, v_TGv):
        assert x.stride()[1:] == (x.shape[2], 1)  # a token's elements must be contiguous
    out_THd = q_THd.new_empty(T, H, d)
    zeros = slots_T.new_empty(T * G)
    # The same tiles as :func:`rotary`: a tile's layout decides the order of a norm's sum.
    q_heads, k_heads = (min(_HEADS, triton.next_power_of_2(n)) for n in (H, G))
    tiles = triton.cdiv(H, q_heads), triton.cdiv(G, k_heads)
    if T:
        _rotate_into_pages_kernel[(T, sum(tiles) + 1)](
            q_THd,
            k_TGd,
            v_TGv,
            *cache,
            slots_T,
            cos_Tp,
            sin_Tp,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            out_THd,
            zeros,
            q_THd.stride(0),
            k_TGd.stride(0),
            v_TGv.stride(0),
            eps,
            H=H,
            G=G,
            HALF=d // 2,
            PAIRS=cos_Tp.shape[1],
            INTERLEAVED=interleaved,
            BLOCK=triton.next_power_of_2(d // 2),
            Q_HEADS=q_heads,
            K_HEADS=k_heads,
            Q_TILES=tiles[0],
            ELEMENTS=G * v_width,
            VALUES=triton.next_power_of_2(G * v_width),
            GP=triton.next_power_of_2(G),
            num_warps=1,
        )
    return out_THd, zeros


@triton.jit
def _rotate_into_pages_kernel(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, cos_ptr, sin_ptr, q_w_ptr, k_w_ptr,
    out_ptr, zeros_ptr, q_stride, k_stride, v_stride, eps,
    H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    Q_TILES: tl.constexpr, ELEMENTS: tl.constexpr, VALUES: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if tile < Q_TILES:
        _rotate_heads(
            q_ptr + token * q_stride, cos_ptr, sin_ptr, q_w_ptr, out_ptr + token * H * 2 * HALF,
            tile, token, eps, H, H, HALF, PAIRS, INTERLEAVED, BLOCK, Q_HEADS,
        )  # fmt: skip
    elif tile < tl.num_programs(1) - 1:
        _rotate_heads(
            k_ptr + token * k_stride, cos_ptr, sin_ptr, k_w_ptr, keys_ptr + slot * G * 2 * HALF,
            tile - Q_TILES, token, eps, G, tl.where(slot >= 0, G, 0), HALF, PAIRS, INTERLEAVED,
            BLOCK, K_HEADS,
        )  # fmt: skip
    else:
        i, group = tl.arange(0, VALUES), tl.arange(0, GP)
        mask = i < tl.where(slot >= 0, ELEMENTS, 0)
        v = tl.load(v_ptr + token * v_stride + i, mask=mask)
        tl.store(values_ptr + slot * ELEMENTS + i, v, mask=mask)
        tl.store(zeros_ptr + token * G + group, tl.zeros((GP,), tl.int32), mask=group < G)


def _with_whole_tokens(x_THd: torch.Tensor) -> torch.Tensor:
    """Return ``x``, copied unless each token's elements are contiguous."""
    return x_THd if x_THd.stride()[1:] == (x_THd.shape[2], 1) else x_THd.contiguous()


_PROGRAMS = 1056
"""Most programs of a backward: eight for each of an H200's multiprocessors."""


@torch.library.custom_op("moetrain::rotary_gradients", mutates_args=())
def rotary_gradients_op(
    dy_THd: torch.Tensor,
    cos_Sp: torch.Tensor,
    sin_Sp: torch.Tensor,
    x_THd: torch.Tensor | None,
    weight_d: torch.Tensor | None,
    eps: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``x`` and of the weight.

    Without a weight its gradient is empty, and ``x`` may be None.
    """
    T, H, d = dy_THd.shape
    heads = min(_HEADS, triton.next_power_of_2(H))
    dy_THd, dx_THd = _with_whole_tokens(dy_THd), dy_THd.new_empty(T, H, d)
    x_THd = dy_THd if x_THd is None else _with_whole_tokens(x_THd)
    programs = min(-(-T // 4), _PROGRAMS)
    dw_Pd = dy_THd.new_empty(programs, 0 if weight_d is None else d, dtype=torch.float32)
    if T:
        _rotary_gradients_kernel[(programs,)](
            dy_THd,
            x_THd,
            cos_Sp,
            sin_Sp,
            weight_d,
            dx_THd,
            dw_Pd,
            T,
            dy_THd.stride(0),
            x_THd.stride(0),
            cos_Sp.shape[0],
            eps,
            H=H,
            HALF=d // 2,
            PAIRS=cos_Sp.shape[1],
            INTERLEAVED=interleaved,
            BLOCK=triton.next_power_of_2(d // 2),
            HEADS=heads,
            num_warps=2,
        )
    return dx_THd, dw_Pd.sum(0)


@rotary_gradients_op.register_fake
def _(
    dy_THd: torch.Tensor,
    cos_Sp: torch.Tensor,
    sin_Sp: torch.Tensor,
    x_THd: torch.Tensor | None,
    weight_d: torch.Tensor | None,
    eps: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    width = 0 if weight_d is None else dy_THd.shape[2]
    return dy_THd.new_empty(dy_THd.shape), dy_THd.new_empty(width, dtype=torch.float32)


@triton.jit(do_not_specialize=["S", "T"])
def _rotary_gradients_kernel(
    dy_ptr, x_ptr, cos_ptr, sin_ptr, w_ptr, dx_ptr, dw_ptr, T, dy_stride, x_stride, S, eps,
    H: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    is_in = column < HALF
    first, second = _places(column, HALF, PAIRS, INTERLEAVED)
    dtype = dx_ptr.dtype.element_ty
    dw1, dw2 = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if w_ptr is not None:
        w1 = tl.load(w_ptr + first, mask=is_in, other=0.0).to(dtype).to(tl.float32)[None, :]
        w2 = tl.load(w_ptr + second, mask=is_in, other=0.0).to(dtype).to(tl.float32)[None, :]
    for token in range(tl.program_id(0), T, tl.num_programs(0)):
        turn = token % S * PAIRS + column
        cos = tl.load(cos_ptr + turn, mask=column < PAIRS, other=1.0)[None, :]
        sin = tl.load(sin_ptr + turn, mask=column < PAIRS, other=0.0)[None, :]
        wide = tl.cast(token, tl.int64)
        for start in tl.static_range(0, H, HEADS):
            head = start + tl.arange(0, HEADS)
            mask = (head < H)[:, None] & is_in[None, :]
            at1 = head[:, None] * (2 * HALF) + first[None, :]
            at2 = head[:, None] * (2 * HALF) + second[None, :]
            dy = dy_ptr + wide * dy_stride
            dy1 = tl.load(dy + at1, mask=mask, other=0.0).to(tl.float32)
            dy2 = tl.load(dy + at2, mask=mask, other=0.0).to(tl.float32)
            dx1, dx2 = dy1 * cos + dy2 * sin, dy2 * cos - dy1 * sin  # back by the same angles
            if w_ptr is not None:
                x = x_ptr + wide * x_stride
                x1 = tl.load(x + at1, mask=mask, other=0.0).to(tl.float32)
                x2 = tl.load(x + at2, mask=mask, other=0.0).to(tl.float32)
                squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
                r = tl.rsqrt(squares / (2 * HALF) + eps)
                r = tl.where(head < H, r, 0.0)[:, None]  # infinite past the last head without eps
                n1, n2 = x1 * r, x2 * r
                dw1 += tl.sum(dx1 * n1.to(dtype).to(tl.float32), 0)
                dw2 += tl.sum(dx2 * n2.to(dtype).to(tl.float32), 0)
                dx1, dx2 = dx1 * w1, dx2 * w2
                products = tl.sum(dx1 * n1, 1) + tl.sum(dx2 * n2, 1)
                mean = products[:, None] / (2 * HALF)
                dx1, dx2 = r * (dx1 - n1 * mean), r * (dx2 - n2 * mean)
            dx = dx_ptr + wide * (H * 2 * HALF)
            tl.store(dx + at1, dx1, mask=mask)
            tl.store(dx + at2, dx2, mask=mask)
    if w_ptr is not None:
        dw = dw_ptr + tl.program_id(0) * (2 * HALF)
        tl.store(dw + first, dw1, mask=is_in)
        tl.store(dw + second, dw2, mask=is_in)


def _save(ctx: OpContext, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x_THd, cos_Sp, sin_Sp, weight_d, ctx.eps, ctx.interleaved = inputs
    ctx.has_weight = weight_d is not None
    # A norm's backward needs its input and weight; without one the angles suffice.
    ctx.save_for_backward(cos_Sp, sin_Sp, *((x_THd, weight_d) if ctx.has_weight else ()))


def _input_gradients(
    ctx: OpContext, dy_THd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of ``x`` and of the weight."""
    cos_Sp, sin_Sp, *normed = ctx.saved_tensors
    x_THd, weight_d = normed if ctx.has_weight else (None, None)
    dx_THd, dw_d = rotary_gradients_op(
        dy_THd, cos_Sp, sin_Sp, x_THd, weight_d, ctx.eps, ctx.interleaved
    )
    return dx_THd, None if weight_d is None else dw_d.to(weight_d.dtype)


def _differentiate(ctx: OpContext, dy_THd: torch.Tensor) -> tuple[object, ...]:
    dx_THd, dw_d = _input_gradients(ctx, dy_THd)
    return gradients(rotary_op, x_THd=dx_THd, weight_d=dw_d)


rotary_op.register_autograd(_differentiate, setup_context=_save)


class _FusibleRotary(torch.autograd.Function):
    """The reference, with the gradients of the op.

    The result must have no alias in the forward, such as a view or a cast to its own dtype:
    compiled by torch 2.11, the alias gets the gradient, and the result gets zeros.
    """

    @staticmethod
    def forward(
        ctx: OpContext,
        x_THd: torch.Tensor,
        cos_Sp: torch.Tensor,
        sin_Sp: torch.Tensor,
        weight_d: torch.Tensor | None,
        eps: float,
        interleaved: bool,
    ) -> torch.Tensor:
        y_NSHd = _rotated(x_THd, cos_Sp, sin_Sp, weight_d, eps, interleaved)
        _save(ctx, (x_THd, cos_Sp, sin_Sp, weight_d, eps, interleaved), y_NSHd)
        return y_NSHd

    @staticmethod
    def backward(ctx: OpContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy_NSHd,) = grads
        dx_THd, dw_d = _input_gradients(ctx, dy_NSHd.flatten(0, 1))
        return dx_THd, None, None, dw_d, None, None
