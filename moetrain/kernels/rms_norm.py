"""RMS norm, alone or of a sum, as one op: ``n = round(x / rms(x)) * w`` (arXiv 1910.07467).

The compiler would fuse a norm into its neighbours, and round elsewhere in every graph. An op takes
its inputs as they lie in memory and rounds where the formula says, in training as in generation:
its rows have the same bits anywhere. :func:`add_rms_norm` is ``s = round(x + y)`` and the norm of
``s`` in one pass. The backwards are plain torch, for the compiler to fuse with what is around::

    r = 1 / rms(x)    n = x * r    dn = dy * w    dx = r * (dn - n * mean(dn * n))    dw = dy * n

Legend: N rows, D width.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from typing import Any

import torch

from moetrain.kernels.backend import Backend, use_fast
from moetrain.kernels.portable_triton import tl, triton
from moetrain.kernels.spec import Bench, Case, Cost, Inputs, KernelSpec, normal


def rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, backend: Backend = "auto"
) -> torch.Tensor:
    """``x`` [..., D] normalised in fp32, rounded to its dtype, times ``weight`` in its dtype.

    Raises:
        ValueError: a weight of another width.
    """
    _check("rms_norm", x, x, weight_D)
    if not use_fast(backend, x):
        return rms_norm_reference(x, weight_D, eps)
    return _rms_norm(x.contiguous(), weight_D, eps)


def rms_norm_reference(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """:func:`rms_norm` in plain torch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight_D.to(x.dtype) * wide.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, weight_D: torch.Tensor, eps: float, backend: Backend = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """``s = x + y`` and :func:`rms_norm` of ``s``; ``x`` and ``y`` have one shape and dtype.

    Raises:
        ValueError: they have not, or a weight of another width.
    """
    _check("add_rms_norm", x, y, weight_D)
    if not use_fast(backend, x):
        return add_rms_norm_reference(x, y, weight_D, eps)
    return _add_rms_norm(x.contiguous(), y.contiguous(), weight_D, eps)


def add_rms_norm_reference(
    x: torch.Tensor, y: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`add_rms_norm` in plain torch."""
    s = x + y
    return s, rms_norm_reference(s, weight_D, eps)


def _check(kernel: str, x: torch.Tensor, y: torch.Tensor, weight_D: torch.Tensor) -> None:
    if weight_D.shape != x.shape[-1:] or x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(
            f"{kernel}: was given {x.dtype} {tuple(x.shape)}, {y.dtype} {tuple(y.shape)} and a "
            f"weight {tuple(weight_D.shape)}; it takes [..., D] of one shape and dtype, and [D]"
        )


@torch.library.custom_op("moetrain::rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    _launch(x, None, weight_D, None, out, eps)
    return out


@torch.library.custom_op("moetrain::add_rms_norm", mutates_args=())
def _add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    s, out = torch.empty_like(x), torch.empty_like(x)
    _launch(x, y, weight_D, s, out, eps)
    return s, out


@_rms_norm.register_fake
def _(x, weight_D, eps):
    return torch.empty_like(x)


@_add_rms_norm.register_fake
def _(x, y, weight_D, eps):
    return torch.empty_like(x), torch.empty_like(x)


def _launch(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight_D: torch.Tensor,
    s: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
) -> None:
    width = x.shape[-1]
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    if rows:
        warps = min(8, max(1, block // 512))
        _norm_kernel[(rows,)](x, y, weight_D, s, out, eps, D=width, BLOCK=block, num_warps=warps)


@triton.jit
def _norm_kernel(x_ptr, y_ptr, w_ptr, s_ptr, out_ptr, eps, D: tl.constexpr, BLOCK: tl.constexpr):
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
    w = tl.load(w_ptr + column, mask=mask, other=0.0).to(dtype).to(tl.float32)
    tl.store(out_ptr + at, w * n.to(dtype).to(tl.float32), mask=mask)


def norm_gradients(
    dy: torch.Tensor, x: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of ``x`` (fp32) and ``weight`` (its dtype) for ``dy`` of any float dtype."""
    wide, dy = x.float(), dy.float()
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    n = wide * r
    dn = dy * weight_D.to(x.dtype).float()
    dx = r * (dn - n * (dn * n).mean(-1, keepdim=True))
    dw = (dy * n.to(x.dtype)).flatten(0, -2).sum(0)
    return dx, dw.to(weight_D.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight_D, ctx.eps = inputs
    ctx.save_for_backward(x, weight_D)


def _differentiate(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight_D = ctx.saved_tensors
    dx, dw = norm_gradients(dy, x, weight_D, ctx.eps)
    return dx.to(x.dtype), dw, None


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *_, weight_D, ctx.eps = inputs
    ctx.save_for_backward(output[0], weight_D)


def _differentiate_sum(
    ctx: Any, ds: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    s, weight_D = ctx.saved_tensors
    dx, dw = norm_gradients(dy, s, weight_D, ctx.eps)
    d_sum = (dx + ds.float()).to(s.dtype)
    return d_sum, d_sum, dw, None


_rms_norm.register_autograd(_differentiate, setup_context=_save)
_add_rms_norm.register_autograd(_differentiate_sum, setup_context=_save_sum)


def _make_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    x = normal(generator, case["N"], case["D"]).to(dtype)
    weight_D = 1 + normal(generator, case["D"]) / 10
    return {"x": x, "weight_D": weight_D.to(dtype).to(torch.float32), "eps": 1e-6}


def _make_sum_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    y = normal(generator, case["N"], case["D"]).to(dtype)
    return {"y": y} | _make_inputs(case, dtype, generator)


def _cost(tensors: int) -> Any:
    def cost(case: Case) -> tuple[Cost, Cost]:
        numbers = 2 * case["N"] * case["D"]
        return Cost(bytes=tensors * numbers), Cost(bytes=(tensors + 1) * numbers)

    return cost


_CASES = ({"N": 7, "D": 40}, {"N": 1, "D": 5}, {"N": 33, "D": 128}, {"N": 0, "D": 8})
_BENCHES = (Bench({"N": 16384, "D": 2048}, {"forward_fraction": 0.8}),)
# The backward rounds once where autograd through the formula would three times.
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}

SPECS = (
    KernelSpec(
        name="rms_norm",
        fast=lambda **inputs: rms_norm(**inputs, backend="triton"),
        reference=rms_norm_reference,
        make_inputs=_make_inputs,
        cases=_CASES,
        benches=_BENCHES,
        tolerance=_TOLERANCE,
        cost=_cost(2),
        differentiable=("x", "weight_D"),
        ops=(_rms_norm,),
        bad_inputs={r"a weight \(39,\)": lambda i: i | {"weight_D": i["weight_D"][1:]}},
    ),
    KernelSpec(
        name="add_rms_norm",
        fast=lambda **inputs: add_rms_norm(**inputs, backend="triton"),
        reference=add_rms_norm_reference,
        make_inputs=_make_sum_inputs,
        cases=_CASES,
        benches=_BENCHES,
        tolerance=_TOLERANCE,
        cost=_cost(4),
        differentiable=("x", "y", "weight_D"),
        ops=(_add_rms_norm,),
        bad_inputs={
            r"a weight \(39,\)": lambda i: i | {"weight_D": i["weight_D"][1:]},
            "of one shape": lambda i: i | {"y": i["y"][1:]},
            "float64": lambda i: i | {"y": i["y"].double()},
        },
    ),
)
