"""RMS norm, alone or of a sum (arXiv 1910.07467), with its gradients in one pass.

    r = 1 / rms(x)    n = x * r    y = round(n) * w
    dn = dy * w       dx = r * (dn - n * mean(dn * n))      dw = sum over rows of dy * round(n)

:func:`rms_norm` is one op, because the compiler rounds at different places in different graphs. An
op rounds where the formula says, so a row has the same bits in training and in generation.
:func:`add_rms_norm` is ``s = round(x + y)`` and the norm of ``s`` in one pass.
:func:`fusible_rms_norm` leaves the forward to the compiler, where bits may differ.

With ``late`` the weight is applied in fp32, and only the result is rounded: the ``round`` of n
above is left out.

One op makes the gradients of all three. ``dw`` is a sum over rows, while ``dx`` needs sums over
columns. So each of P programs takes every P-th row, and adds up its share of ``dw`` in registers.

Legend: N rows, D width, P programs of the backward.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from typing import Any

import torch

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


def rms_norm(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    backend: Backend = "auto",
    *,
    late: bool = False,
) -> torch.Tensor:
    """Normalise ``x`` [..., D] in fp32, round to ``x``'s dtype, and multiply by ``weight`` in it.

    With ``late`` the product with the weight is in fp32, and only that product is rounded.

    Raises ValueError: shapes or dtypes do not fit, or ``weight`` is not contiguous.
    """
    _check("rms_norm", x, x, weight_D)
    if use_fast(backend, x):
        return rms_norm_op(x.contiguous(), weight_D, eps, late)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if late:
        y = weight_D.to(wide.dtype) * wide
        # A cast to the same dtype would be an alias: see rotary's _FusibleRotary.
        return y if y.dtype == x.dtype else y.to(x.dtype)
    return weight_D.to(x.dtype) * wide.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,
    y: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    backend: Backend = "auto",
    *,
    late: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``s = x + y``, of one shape and dtype, and :func:`rms_norm` of ``s``."""
    _check("add_rms_norm", x, y, weight_D)
    if use_fast(backend, x):
        return add_rms_norm_op(x.contiguous(), y.contiguous(), weight_D, eps, late)
    s = x + y
    return s, rms_norm(s, weight_D, eps, "reference", late=late)


def fusible_rms_norm(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    backend: Backend = "auto",
    *,
    late: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` and its :func:`rms_norm` in plain torch, which the compiler fuses.

    Use the returned ``x`` from here on: gradients of its other uses are then added in one kernel.
    """
    _check("fusible_rms_norm", x, x, weight_D)
    if use_fast(backend, x):
        return _FusibleNorm.apply(x, weight_D, eps, late)
    return x, rms_norm(x, weight_D, eps, "reference", late=late)


def _check(kernel: str, x: torch.Tensor, y: torch.Tensor, weight_D: torch.Tensor) -> None:
    if weight_D.shape != x.shape[-1:] or x.shape != y.shape or x.dtype != y.dtype:
        takes = "[..., D] of one shape and dtype, and a weight [D]"
        raise refusal(kernel, takes, x=x, y=y, weight=weight_D)
    require_contiguous(kernel, weight=weight_D)


@torch.library.custom_op("moetrain::rms_norm", mutates_args=())
def rms_norm_op(x: torch.Tensor, weight_D: torch.Tensor, eps: float, late: bool) -> torch.Tensor:
    out = torch.empty_like(x)
    _launch(x, None, weight_D, None, out, eps, late)
    return out


@torch.library.custom_op("moetrain::add_rms_norm", mutates_args=())
def add_rms_norm_op(
    x: torch.Tensor, y: torch.Tensor, weight_D: torch.Tensor, eps: float, late: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    s = torch.empty_like(x)
    out = torch.empty_like(x)
    _launch(x, y, weight_D, s, out, eps, late)
    return s, out


@rms_norm_op.register_fake
def _(x: torch.Tensor, weight_D: torch.Tensor, eps: float, late: bool) -> torch.Tensor:
    return torch.empty_like(x)


@add_rms_norm_op.register_fake
def _(
    x: torch.Tensor, y: torch.Tensor, weight_D: torch.Tensor, eps: float, late: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _launch(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight_D: torch.Tensor,
    s: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    late: bool,
) -> None:
    """Write the norm of ``x``, or of ``s = x + y``, to ``out``."""
    width = x.shape[-1]
    rows = x.numel() // width
    block = triton.next_power_of_2(width)
    if rows:
        _norm_kernel[(rows,)](
            x,
            y,
            weight_D,
            s,
            out,
            eps,
            D=width,
            LATE=late,
            BLOCK=block,
            num_warps=min(8, max(1, block // 512)),
        )


@triton.jit
def _norm_kernel(
    x_ptr, y_ptr, w_ptr, s_ptr, out_ptr, eps,
    D: tl.constexpr, LATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    mask = column < D
    at = tl.program_id(0).to(tl.int64) * D + column
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if y_ptr is not None:
        rounded = (x + tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(s_ptr + at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    n = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    w = tl.load(w_ptr + column, mask=mask, other=0.0)
    if LATE:
        tl.store(out_ptr + at, w.to(tl.float32) * n, mask=mask)
    else:
        w = w.to(dtype).to(tl.float32)
        tl.store(out_ptr + at, w * n.to(dtype).to(tl.float32), mask=mask)


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    late: bool,
    ds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``x``, with ``ds`` from its other uses, and of ``weight``."""
    ds = None if ds is None else ds.contiguous()
    return norm_gradients_op(dy.contiguous(), x.contiguous(), weight_D, eps, late, ds)


_PROGRAMS = 528
"""Most programs of a backward: four for each of an H200's multiprocessors."""


@torch.library.custom_op("moetrain::norm_gradients", mutates_args=())
def norm_gradients_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    late: bool,
    ds: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    block = triton.next_power_of_2(width)
    programs = min(-(-rows // 4), _PROGRAMS)
    dw_PD = x.new_empty(programs, width, dtype=torch.float32)
    if rows:
        _norm_gradients_kernel[(programs,)](
            dy,
            x,
            weight_D,
            ds,
            dx,
            dw_PD,
            rows,
            eps,
            D=width,
            LATE=late,
            BLOCK=block,
            num_warps=min(8, max(1, block // 256)),
        )
    return dx, dw_PD.sum(0).to(weight_D.dtype)


@norm_gradients_op.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    late: bool,
    ds: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight_D)


@triton.jit(do_not_specialize=["rows"])
def _norm_gradients_kernel(
    dy_ptr, x_ptr, w_ptr, ds_ptr, dx_ptr, dw_ptr, rows, eps,
    D: tl.constexpr, LATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    mask = column < D
    dtype = dx_ptr.dtype.element_ty
    w = tl.load(w_ptr + column, mask=mask, other=0.0)
    w = w.to(tl.float32) if LATE else w.to(dtype).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * D + column
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        n, dn = x * r, dy * w
        dx = r * (dn - n * (tl.sum(dn * n, 0) / D))
        if ds_ptr is not None:
            dx += tl.load(ds_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx, mask=mask)
        dw += dy * (n if LATE else n.to(dtype).to(tl.float32))
    tl.store(dw_ptr + tl.program_id(0) * D + column, dw, mask=mask)


class _FusibleNorm(torch.autograd.Function):
    """Returns ``x`` unchanged and its norm in plain torch; one kernel makes the gradients."""

    @staticmethod
    def forward(
        ctx: OpContext, x: torch.Tensor, weight_D: torch.Tensor, eps: float, late: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, weight_D)
        ctx.set_materialize_grads(False)  # x may have no other use
        ctx.eps, ctx.late = eps, late
        return x.view_as(x), rms_norm(x, weight_D, eps, "reference", late=late)

    @staticmethod
    def backward(ctx: OpContext, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ds, dy = grads
        x, weight_D = ctx.saved_tensors
        if dy is None:
            return ds, None, None, None
        dx, dw_D = _gradients(dy, x, weight_D, ctx.eps, ctx.late, ds)
        return dx, dw_D, None, None


def _save(ctx: OpContext, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight_D, ctx.eps, ctx.late = inputs
    ctx.save_for_backward(x, weight_D)


def _differentiate(ctx: OpContext, dy: torch.Tensor) -> tuple[object, ...]:
    x, weight_D = ctx.saved_tensors
    dx, dw_D = _gradients(dy, x, weight_D, ctx.eps, ctx.late)
    return gradients(rms_norm_op, x=dx, weight_D=dw_D)


def _save_sum(
    ctx: OpContext, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    _, _, weight_D, ctx.eps, ctx.late = inputs
    s, _ = output
    ctx.save_for_backward(s, weight_D)


def _differentiate_sum(ctx: OpContext, ds: torch.Tensor, dy: torch.Tensor) -> tuple[object, ...]:
    s, weight_D = ctx.saved_tensors
    d_sum, dw_D = _gradients(dy, s, weight_D, ctx.eps, ctx.late, ds)
    return gradients(add_rms_norm_op, x=d_sum, y=d_sum, weight_D=dw_D)


rms_norm_op.register_autograd(_differentiate, setup_context=_save)
add_rms_norm_op.register_autograd(_differentiate_sum, setup_context=_save_sum)
