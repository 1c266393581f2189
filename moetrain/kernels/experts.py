"""The expert MLP: two grouped GEMMs around SwiGLU.

``y = (silu(x @ gate^T) * (x @ up^T) * w) @ down^T`` with each row using its own expert's matrices.
The routing weight is applied inside, before the down projection, so combining is a plain sum.

With ``a = x @ [gate; up]^T`` and ``h = swiglu(a, w)``, the backward for an upstream ``dy`` is::

    dh = dy @ down            d_down    = dy^T @ h
    da, dw = swiglu'(dh)      d_gate_up = da^T @ x        dx = da @ [gate; up]

It saves ``x`` and ``a`` alone: ``h`` comes again out of the pass over ``a`` and ``dh`` that makes
``da``, and so does ``dw = <dh, h / w>``, which therefore needs no ``y`` (arXiv 2512.14080). A row
with D = 2048 and F = 768 keeps 7 KB in bf16.

Worked example, one row, D = F = 1, x 1, gate 0, up 3, down 1, w 2: ``a = [0, 3]``, ``h = y = 0``;
for ``dy = 1``, ``dh = 1``, ``da = [dh * w * 3 * 1/2, 0] = [3, 0]``, ``dw = 0`` and ``dx = 0``.

Legend: R rows sorted by expert, E experts, D model width, F expert width.
"""

import torch

from moetrain.kernels import few_rows
from moetrain.kernels.backend import Backend, use_fast
from moetrain.kernels.grouped_mm import grouped_mm, grouped_weight_grad
from moetrain.kernels.saving import worth_saving
from moetrain.kernels.spec import Bench, Case, Cost, Inputs, KernelSpec, normal, uniform
from moetrain.kernels.swiglu import swiglu, swiglu_backward_with_output, swiglu_reference


def expert_mlp(
    x_RD: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    weights_R: torch.Tensor | None = None,
    backend: Backend = "auto",
    *,
    typical_rows: int | None = None,
) -> torch.Tensor:
    """``y_RD`` in ``x``'s dtype.

    Rows past ``offsets[-1]`` are read by nothing but themselves and may hold anything; so may what
    comes out for them, here and in the gradients of ``x`` and of the weights.

    Args:
        x_RD: bf16 on CUDA; the reference path takes any floating dtype.
        offsets_E: int32, the cumulative end row of each expert.
        w_gate_up_E2FD: gate's F rows, then up's; in ``x``'s dtype, contiguous.
        w_down_EDF: in ``x``'s dtype, contiguous.
        weights_R: routing weights, any floating dtype, differentiable too; None: ones.
        typical_rows: how many rows there usually are, where R is only what there is room for. The
            kernels are chosen by it; results are not.

    Raises:
        ValueError: shapes, dtypes or strides other than these, or widths whose rows are not a
            multiple of 16 bytes.
    """
    _check(x_RD, offsets_E, w_gate_up_E2FD, w_down_EDF, weights_R)
    if not use_fast(backend, x_RD):
        return expert_mlp_reference(x_RD, offsets_E, w_gate_up_E2FD, w_down_EDF, weights_R)
    if weights_R is None:
        weights_R = x_RD.new_ones(x_RD.shape[0], dtype=torch.float32)
    experts, dim, width = w_down_EDF.shape
    if dim % 32 == 0 and width % 32 == 0 and few_rows.serves(x_RD):
        typical = x_RD.shape[0] if typical_rows is None else typical_rows
        if typical <= few_rows.MAX_ROWS_PER_EXPERT * experts:
            weights = (w_gate_up_E2FD, w_down_EDF)
            return few_rows.expert_mlp_few(x_RD, offsets_E, *weights, weights_R, typical)
    inputs = (x_RD, offsets_E, w_gate_up_E2FD, w_down_EDF, weights_R)
    return _expert_mlp(*(x.contiguous() for x in inputs))[0]


def expert_mlp_reference(
    x_RD: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    weights_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`expert_mlp` in plain torch."""
    a_R2F = grouped_mm(x_RD, w_gate_up_E2FD.transpose(1, 2), offsets_E)
    h_RF = swiglu_reference(a_R2F, weights_R)
    return grouped_mm(h_RF, w_down_EDF.transpose(1, 2), offsets_E)


def _check(
    x_RD: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    weights_R: torch.Tensor | None,
) -> None:
    experts, dim, width = w_down_EDF.shape
    if w_gate_up_E2FD.shape != (experts, 2 * width, dim) or x_RD.shape[1:] != (dim,):
        raise ValueError(
            f"expert_mlp: x, w_gate_up and w_down were given as {tuple(x_RD.shape)}, "
            f"{tuple(w_gate_up_E2FD.shape)} and {tuple(w_down_EDF.shape)}; it takes [R, D], "
            "[E, 2F, D] and [E, D, F]"
        )
    if not x_RD.dtype == w_gate_up_E2FD.dtype == w_down_EDF.dtype:
        raise ValueError(
            f"expert_mlp: x, w_gate_up and w_down were given in {x_RD.dtype}, "
            f"{w_gate_up_E2FD.dtype} and {w_down_EDF.dtype}; it takes one dtype"
        )
    if offsets_E.shape != (experts,) or offsets_E.dtype != torch.int32:
        raise ValueError(
            f"expert_mlp: offsets were given as {tuple(offsets_E.shape)} in {offsets_E.dtype}; for "
            f"{experts} experts it takes ({experts},) in int32"
        )
    if weights_R is not None and weights_R.shape != x_RD.shape[:1]:
        raise ValueError(
            f"expert_mlp: weights were given as {tuple(weights_R.shape)}; with x of "
            f"{tuple(x_RD.shape)} it takes one weight a row"
        )


@torch.library.custom_op("moetrain::expert_mlp", mutates_args=())
def _expert_mlp(
    x_RD: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    weights_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y_RD``, and ``a_R2F`` for the backward."""
    a_R2F = grouped_mm(x_RD, w_gate_up_E2FD.transpose(1, 2), offsets_E)
    h_RF = swiglu(a_R2F, weights_R, "triton")
    return grouped_mm(h_RF, w_down_EDF.transpose(1, 2), offsets_E), a_R2F


@_expert_mlp.register_fake
def _(x_RD, offsets_E, w_gate_up_E2FD, w_down_EDF, weights_R):
    return torch.empty_like(x_RD), x_RD.new_empty(x_RD.shape[0], w_gate_up_E2FD.shape[1])


@torch.library.custom_op("moetrain::expert_mlp_backward", mutates_args=())
def _expert_mlp_backward(
    dy_RD: torch.Tensor,
    x_RD: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    weights_R: torch.Tensor,
    a_R2F: torch.Tensor,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, w_gate_up, w_down (of both [0], unless ``is_trained``) and weights."""
    dh_RF = grouped_mm(dy_RD, w_down_EDF, offsets_E)
    da_R2F, d_weights_R, h_RF = swiglu_backward_with_output(dh_RF, a_R2F, weights_R)
    del dh_RF  # before the products below: the largest rows of the backward are here together
    dx_RD = grouped_mm(da_R2F, w_gate_up_E2FD, offsets_E)
    if not is_trained:
        return dx_RD, dx_RD.new_empty(0), dx_RD.new_empty(0), d_weights_R
    d_down = grouped_weight_grad(dy_RD, h_RF, offsets_E)
    d_gate_up = grouped_weight_grad(da_R2F, x_RD, offsets_E)
    return dx_RD, d_gate_up, d_down, d_weights_R


@_expert_mlp_backward.register_fake
def _(dy_RD, x_RD, offsets_E, w_gate_up_E2FD, w_down_EDF, weights_R, a_R2F, is_trained):
    weights = (w_gate_up_E2FD, w_down_EDF)
    matrices = (torch.empty_like(w) if is_trained else w.new_empty(0) for w in weights)
    return torch.empty_like(x_RD), *matrices, torch.empty_like(weights_R)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)  # no zeros of a's size, which nobody differentiates


def _differentiate(ctx, dy_RD: torch.Tensor | None, _):
    if dy_RD is None:
        return (None,) * 5
    # An expanded gradient (stride 0, as a sum's) is no operand of a grouped GEMM.
    is_trained = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
    dx_RD, d_gate_up, d_down, d_weights_R = _expert_mlp_backward(
        dy_RD.contiguous(), *ctx.saved_tensors, is_trained
    )
    matrices = (d_gate_up, d_down) if is_trained else (None, None)
    return dx_RD, None, *matrices, d_weights_R


_expert_mlp.register_autograd(_differentiate, setup_context=_save)
# One op for both products: it hands out its pre-activations beside its result.
worth_saving("experts", torch.ops.moetrain.expert_mlp.default)


def _make_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    counts, dim, width = case["counts"], case["D"], case["F"]
    experts, used = len(counts), sum(counts)
    rows = used + case.get("unused", 0)
    x_RD = normal(generator, rows, dim)
    x_RD[used:] = float("nan")
    weights_R = uniform(generator, rows)
    return {
        "x_RD": x_RD.to(dtype),
        "offsets_E": torch.tensor(counts, device=generator.device).cumsum(0).int(),
        "w_gate_up_E2FD": (normal(generator, experts, 2 * width, dim) * dim**-0.5).to(dtype),
        "w_down_EDF": (normal(generator, experts, dim, width) * width**-0.5).to(dtype),
        "weights_R": weights_R if case.get("weights", True) else None,
    }


def _cost(case: Case) -> tuple[Cost, Cost]:
    rows, dim, width = sum(case["counts"]), case["D"], case["F"]
    flops = 6.0 * rows * dim * width
    weight_bytes = 6.0 * len(case["counts"]) * dim * width
    row_bytes = 2.0 * rows * dim
    saved_bytes = 4.0 * rows * width
    return (
        Cost(2 * row_bytes + weight_bytes + saved_bytes, flops),
        Cost(3 * row_bytes + 2 * weight_bytes + saved_bytes, 2 * flops),
    )


def _used(inputs: Inputs, x: torch.Tensor) -> torch.Tensor:
    return x[: inputs["offsets_E"][-1]]


EXPERT_MLP = KernelSpec(
    name="expert_mlp",
    fast=lambda **inputs: expert_mlp(**inputs, backend="triton"),
    reference=expert_mlp_reference,
    make_inputs=_make_inputs,
    cases=(
        {"counts": (7, 0, 20, 1, 3), "D": 16, "F": 24},
        {"counts": (1,), "D": 8, "F": 8},
        {"counts": (0, 100, 0, 0, 0), "D": 32, "F": 16, "weights": False, "unused": 6},
        {"counts": (2,) * 127 + (3,), "D": 16, "F": 8, "unused": 1},
        {"counts": (0, 0), "D": 16, "F": 8, "unused": 5},
    ),
    benches=(
        Bench({"counts": (8192,) * 16, "D": 2048, "F": 768}, {"total_tflops": 560}),
        Bench({"counts": (1024,) * 128, "D": 2048, "F": 768}, {"total_tflops": 450}),
    ),
    tolerance={torch.float32: 2e-6, torch.bfloat16: 1e-2},
    cpu_dtypes=(torch.float32,),
    cost=_cost,
    differentiable=("x_RD", "w_gate_up_E2FD", "w_down_EDF", "weights_R"),
    select=_used,
    select_grads={"x_RD": _used, "weights_R": _used},
    ops=(_expert_mlp, _expert_mlp_backward),
    bad_inputs={
        r"\[E, 2F, D\]": lambda x: x | {"w_gate_up_E2FD": x["w_gate_up_E2FD"][:, 1:]},
        "it takes one dtype": lambda x: x | {"w_down_EDF": x["w_down_EDF"].half()},
        r"for 5 experts it takes \(5,\)": lambda x: x | {"offsets_E": x["offsets_E"][1:]},
        "one weight a row": lambda x: x | {"weights_R": x["weights_R"][1:]},
    },
)

SPECS = (EXPERT_MLP,)
