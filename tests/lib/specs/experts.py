"""Specs of the expert MLPs and of SwiGLU."""

from dataclasses import replace
from functools import partial

import torch

from moetrain.config.compute import Precision
from moetrain.kernels.experts.mlp import (
    adapted_expert_mlp,
    adapted_expert_mlp_backward_op,
    adapted_expert_mlp_op,
    expert_mlp,
    expert_mlp_backward_op,
    expert_mlp_op,
    tenant_offsets,
)
from moetrain.kernels.experts.permutation import expert_indices
from moetrain.kernels.experts.projections import ACTIVATIONS, activation_of
from moetrain.kernels.experts.relu2 import relu2, relu2_backward_op, relu2_op
from moetrain.kernels.experts.swiglu import (
    GATES,
    limited,
    oai,
    swiglu,
    swiglu_backward_op,
    swiglu_op,
)
from moetrain.kernels.experts.swiglu_fp8 import swiglu_backward_quantised, swiglu_quantised
from moetrain.kernels.quant.e4m3 import quantise_rows
from moetrain.runtime.backend import Backend
from tests.lib.specs.spec import Bench, Case, Cost, Inputs, KernelSpec, normal, uniform


def make_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Draw tokens and random experts; ``empty`` tokens get no expert."""
    tokens, slots, experts = case["T"], case["K"], case["E"]
    dim, width, outer = case["D"], case["F"], _outer(case)
    ids_TK = uniform(generator, tokens, experts).argsort(1)[:, :slots].int()
    ids_TK[uniform(generator, tokens, slots) < case.get("empty", 0.0)] = -1
    return {
        "x_TD": normal(generator, tokens, dim).to(dtype),
        "weights_TK": uniform(generator, tokens, slots),
        "indices": expert_indices(ids_TK, experts, "reference", num_rows=case.get("rows")),
        "w_gate_up_E2FD": (normal(generator, experts, outer, dim) * dim**-0.5).to(dtype),
        "w_down_EDF": (normal(generator, experts, dim, width) * width**-0.5).to(dtype),
        **{name: case[name] for name in ("activation",) if name in case},
    }


def _outer(case: Case) -> int:
    """Return the number of rows of an expert's first matrix."""
    return (1 + activation_of(case.get("activation", "silu")).has_gate) * case["F"]


def chosen(inputs: Inputs, x: torch.Tensor) -> torch.Tensor:
    """Keep the slots with an expert."""
    return x[inputs["indices"].slot_row_TK >= 0]


def cost_of(case: Case, flops: float) -> tuple[Cost, Cost]:
    """Return the cost at bf16's rate; a multiply-add is ``flops``, or 2 in weights' gradients."""
    tokens, dim, width = case["T"], case["D"], case["F"]
    rows, outer = tokens * case["K"], _outer(case)
    forward = flops * rows * dim * (outer + width)
    backward = forward + 2.0 * rows * dim * (outer + width)
    weight_bytes = 2.0 * case["E"] * dim * (outer + width)
    token_bytes, saved_bytes = 2.0 * tokens * dim, 2.0 * rows * outer
    return (
        Cost(2 * token_bytes + weight_bytes + saved_bytes, forward),
        Cost(3 * token_bytes + 2 * weight_bytes + saved_bytes, backward),
    )


CASES = (
    {"T": 13, "K": 2, "E": 3, "D": 32, "F": 16},
    {"T": 20, "K": 1, "E": 1, "D": 16, "F": 16},
    {"T": 20, "K": 3, "E": 4, "D": 16, "F": 16, "empty": 0.3},
    {"T": 9, "K": 2, "E": 3, "D": 16, "F": 16, "empty": 0.5, "rows": 15},
    {"T": 5, "K": 2, "E": 3, "D": 16, "F": 16, "empty": 1.0},
    {"T": 5, "K": 2, "E": 3, "D": 16, "F": 16, "empty": 1.0, "rows": 0},
)
# Rounding moves elements over a limit, where gradients jump, so few elements of experts reach it.
LIMITED = limited("silu", 3.0)
OTHERS = [*(name for name in ACTIVATIONS if name != "silu"), LIMITED, oai(3.0, 1.702)]
"""Every activation that may take SwiGLU's place. The specs below take all of them."""
GATELESS = {"T": 13, "K": 2, "E": 3, "D": 16, "F": 24, "activation": "relu2"}
SIZES = tuple({"T": t, "K": 8, "E": e, "D": 2048, "F": 768} for t, e in ((16384, 16), (16384, 128)))
BAD_INPUTS = {
    r"\[E, 2F, D\]": lambda x: x | {"w_gate_up_E2FD": x["w_gate_up_E2FD"][:, 1:]},
    "in one dtype": lambda x: x | {"w_down_EDF": x["w_down_EDF"].half()},
    r"\[T, K\] and \[T, K\]": lambda x: x | {"weights_TK": x["weights_TK"][1:]},
}

_MLP_SPECS = (
    KernelSpec(
        name="expert_mlp",
        fast=lambda **inputs: expert_mlp(**inputs, backend="triton"),
        reference=lambda **inputs: expert_mlp(**inputs, backend="reference"),
        make_inputs=make_inputs,
        cases=(
            *CASES,
            {"T": 33, "K": 4, "E": 128, "D": 16, "F": 8},
            {"T": 9, "K": 1, "E": 2, "D": 8, "F": 24},
            GATELESS,
            {**GATELESS, "K": 3, "empty": 0.5, "rows": 17},
            *({**case, "activation": name} for name in OTHERS for case in (CASES[0], CASES[3])),
        ),
        # The targets are those of the products, 560 and 450, and of five permutation passes.
        benches=(
            *(
                Bench(size, {"total_tflops": target})
                for size, target in zip(SIZES, (490, 400), strict=True)
            ),
            Bench({"T": 16384, "K": 6, "E": 128, "D": 2688, "F": 1856, "activation": "relu2"}),
        ),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 1e-2},
        cpu_dtypes=(torch.float32,),
        cost=lambda case: cost_of(case, 2.0),
        differentiable=("x_TD", "weights_TK", "w_gate_up_E2FD", "w_down_EDF"),
        select_grads={"weights_TK": chosen},
        ops=(expert_mlp_op, expert_mlp_backward_op),
        bad_inputs=BAD_INPUTS,
    ),
)


def _in_fp8(backend: Backend, precision: Precision, **inputs) -> torch.Tensor:
    return expert_mlp(**inputs, backend=backend, precision=precision)


def _adapted_in_fp8(backend: Backend, **inputs) -> torch.Tensor:
    return adapted_expert_mlp(**inputs, backend=backend, precision="fp8")


def _block_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    precision = case.get("precision", "fp8_blocks")
    return make_inputs(case, dtype, generator) | {"precision": precision}


def _narrow_cost(case: Case) -> tuple[Cost, Cost]:
    """Return the cost of all products at twice bf16's rate."""
    forward, backward = cost_of(case, 1.0)
    return forward, replace(backward, flops=2 * forward.flops)


_FOUR_RANKS = {"T": 20480, "K": 8, "E": 32, "D": 2048, "F": 768}

_MLP_FP8_SPECS = (
    KernelSpec(
        name="expert_mlp_fp8",
        fast=partial(_in_fp8, "triton", "fp8"),
        reference=partial(_in_fp8, "reference", "fp8"),
        make_inputs=make_inputs,
        cases=(
            *CASES,
            {**GATELESS, "F": 48},
            {**GATELESS, "F": 32, "K": 3, "empty": 0.5, "rows": 17},
            *({**CASES[3], "activation": name} for name in OTHERS),
        ),
        benches=tuple(Bench(size) for size in (*SIZES, _FOUR_RANKS)),
        # An earlier rounding may choose the other of two neighbours in e4m3, which is 6% away.
        tolerance={torch.float32: 5e-3, torch.bfloat16: 4e-2},
        cpu_dtypes=(torch.float32,),
        # The cost is at twice bf16's rate.
        cost=lambda case: cost_of(case, 1.0),
        differentiable=("x_TD", "weights_TK", "w_gate_up_E2FD", "w_down_EDF"),
        select_grads={"weights_TK": chosen},
        ops=(expert_mlp_op, expert_mlp_backward_op),
        bad_inputs=BAD_INPUTS
        | {
            "takes multiples of 16 and 16": lambda x: (
                x
                | {
                    "x_TD": x["x_TD"][:, 1:],
                    "w_gate_up_E2FD": x["w_gate_up_E2FD"][..., 1:],
                    "w_down_EDF": x["w_down_EDF"][:, 1:],
                }
            ),
        },
    ),
)


def _mlp_lora_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    experts, dim, width, rank = case["E"], case["D"], case["F"], case["r"]

    tenants = (case["S"],) if "S" in case else ()

    def matrices(out: int, into: int) -> torch.Tensor:
        return (normal(generator, *tenants, experts, out, into) * into**-0.5).to(dtype)

    return make_inputs(case, dtype, generator) | {
        "a_gate_up_ErD": matrices(rank, dim),
        "b_gate_up_E2Fr": matrices(_outer(case), rank),
        "a_down_ErF": matrices(rank, width),
        "b_down_EDr": matrices(dim, rank),
        "scale": 0.75,
    }


def _mlp_lora_cost(case: Case) -> tuple[Cost, Cost]:
    tokens, dim, width, rank = case["T"], case["D"], case["F"], case["r"]
    rows, frozen = tokens * case["K"], 3 * dim * width
    adapters = 2 * rank * (dim + width) + rank * width
    weight_bytes, adapter_bytes = 2.0 * case["E"] * (frozen + adapters), 2.0 * case["E"] * adapters
    token_bytes, saved_bytes = 2.0 * tokens * dim, 4.0 * rows * (width + rank)
    flops = 2.0 * rows * (frozen + adapters)
    return (
        Cost(2 * token_bytes + weight_bytes + saved_bytes, flops),
        Cost(
            3 * token_bytes + weight_bytes + adapter_bytes + saved_bytes,
            flops + 2.0 * rows * adapters,
        ),
    )


_ADAPTERS = ("a_gate_up_ErD", "b_gate_up_E2Fr", "a_down_ErF", "b_down_EDr")

_MLP_LORA_SPECS = (
    KernelSpec(
        name="adapted_expert_mlp",
        fast=lambda **inputs: adapted_expert_mlp(**inputs, backend="triton"),
        reference=lambda **inputs: adapted_expert_mlp(**inputs, backend="reference"),
        make_inputs=_mlp_lora_inputs,
        cases=(
            {"T": 7, "K": 2, "E": 3, "D": 16, "F": 24, "r": 8},
            {"T": 5, "K": 1, "E": 1, "D": 8, "F": 8, "r": 8},
            {"T": 9, "K": 3, "E": 6, "D": 32, "F": 16, "r": 16, "empty": 0.3},
            {"T": 5, "K": 2, "E": 2, "D": 16, "F": 8, "r": 8, "empty": 1.0, "rows": 5},
            {"T": 15, "K": 2, "E": 3, "D": 16, "F": 24, "r": 8, "S": 3},
            {"T": 14, "K": 3, "E": 4, "D": 16, "F": 8, "r": 8, "S": 7, "empty": 0.5},
            {"T": 6, "K": 1, "E": 2, "D": 8, "F": 8, "r": 8, "S": 1, "empty": 1.0},
            {**GATELESS, "r": 8},
            *({**CASES[2], "r": 8, "activation": name} for name in OTHERS),
        ),
        benches=(Bench({"T": 16384, "K": 8, "E": 128, "D": 2048, "F": 768, "r": 16}),),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 1e-2},
        cpu_dtypes=(torch.float32,),
        cost=_mlp_lora_cost,
        differentiable=("x_TD", "weights_TK", *_ADAPTERS),
        select_grads={"weights_TK": chosen},
        ops=(adapted_expert_mlp_op, adapted_expert_mlp_backward_op, tenant_offsets),
        bad_inputs=BAD_INPUTS
        | {
            "in S equal parts": lambda x: (
                x | {name: torch.stack([x[name]] * 2) for name in _ADAPTERS}
            ),
            r"\[E, r, D\]": lambda x: x | {"a_gate_up_ErD": x["a_gate_up_ErD"][:, 1:]},
            r"\[E, D, r\] in x's dtype": lambda x: x | {"b_down_EDr": x["b_down_EDr"].half()},
        },
    ),
)


def _swiglu_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    rows, width = case["R"], case["F"]
    gate_up = normal(generator, rows, 2 * width).to(dtype)
    weights = uniform(generator, rows)
    # Rows past the last expert's group are uninitialised.
    gate_up[rows - case.get("unused", 0) :] = float("nan")
    return {"gate_up_R2F": gate_up, "weights_R": weights if case.get("weights", True) else None}


def _swiglu_cost(case: Case) -> tuple[Cost, Cost]:
    rows, width = case["R"], case["F"]
    return (
        Cost(bytes=rows * (2 * 3 * width + 4)),
        Cost(bytes=rows * (2 * 5 * width + 2 * 4)),
    )


def _swiglu_used(inputs: Inputs, x: torch.Tensor) -> torch.Tensor:
    return x[~inputs["gate_up_R2F"].isnan().any(1)]


_SWIGLU_SPECS = (
    KernelSpec(
        name="swiglu",
        fast=partial(swiglu, backend="triton"),
        reference=partial(swiglu, backend="reference"),
        make_inputs=_swiglu_inputs,
        cases=(
            {"R": 7, "F": 24},
            {"R": 1, "F": 1},
            {"R": 13, "F": 257, "unused": 3},
            {"R": 9, "F": 64, "weights": False},
            {"R": 0, "F": 16},
        ),
        benches=(
            Bench({"R": 131072, "F": 768}, {"forward_fraction": 0.85, "backward_fraction": 0.85}),
        ),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 5e-3},
        cost=_swiglu_cost,
        differentiable=("gate_up_R2F", "weights_R"),
        select=_swiglu_used,
        select_grads={"gate_up_R2F": _swiglu_used, "weights_R": _swiglu_used},
        ops=(swiglu_op, swiglu_backward_op),
        bad_inputs={
            r"\(7, 47\).*it takes \[R, 2F\]": lambda i: (
                i | {"gate_up_R2F": i["gate_up_R2F"][:, 1:]}
            ),
            "one weight a row": lambda i: i | {"weights_R": i["weights_R"][1:]},
            "float64.*it takes bf16": lambda i: i | {"gate_up_R2F": i["gate_up_R2F"].double()},
            "takes a contiguous": lambda i: i | {"gate_up_R2F": i["gate_up_R2F"].T.contiguous().T},
            "activation 'tanh'.*it takes 'silu' or ": lambda i: i | {"activation": "tanh"},
        },
    ),
)


_GATE_SPECS = tuple(
    replace(
        _SWIGLU_SPECS[0],
        name=f"swiglu_{name}",
        fast=partial(swiglu, activation=name, backend="triton"),
        reference=partial(swiglu, activation=name, backend="reference"),
        benches=(Bench({"R": 131072, "F": 704}),),
        # Triton's interpreter truncates single values where a GPU rounds them.
        tolerance={torch.float32: 1e-6, torch.bfloat16: 8e-3 if "oai" in name else 5e-3},
    )
    for name in (*GATES, limited("silu", 0.5), limited("gelu", 1.0), oai(0.5, 1.702))
    if name != "silu"
)


def _relu2_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    rows, weights = case["R"], uniform(generator, case["R"])
    a_RF = normal(generator, rows, case["F"]).to(dtype)
    a_RF[rows - case.get("unused", 0) :] = float("nan")  # rows past the last expert's group
    return {"a_RF": a_RF, "weights_R": weights if case.get("weights", True) else None}


def _relu2_used(inputs: Inputs, x: torch.Tensor) -> torch.Tensor:
    return x[~inputs["a_RF"].isnan().any(1)]


def _relu2_cost(case: Case) -> tuple[Cost, Cost]:
    rows, width = case["R"], case["F"]
    return Cost(bytes=rows * (2 * 2 * width + 4)), Cost(bytes=rows * (2 * 3 * width + 2 * 4))


_RELU2_SPECS = (
    KernelSpec(
        name="relu2",
        fast=partial(relu2, backend="triton"),
        reference=partial(relu2, backend="reference"),
        make_inputs=_relu2_inputs,
        cases=(
            {"R": 7, "F": 24},
            {"R": 1, "F": 1},
            {"R": 13, "F": 1100, "unused": 3},
            {"R": 9, "F": 64, "weights": False},
            {"R": 0, "F": 16},
        ),
        benches=(Bench({"R": 98304, "F": 1856}),),
        # Triton's interpreter truncates single values where a GPU rounds them.
        tolerance={torch.float32: 1e-6, torch.bfloat16: 8e-3},
        cost=_relu2_cost,
        differentiable=("a_RF", "weights_R"),
        select=_relu2_used,
        select_grads={"a_RF": _relu2_used, "weights_R": _relu2_used},
        ops=(relu2_op, relu2_backward_op),
        bad_inputs={
            "one weight a row": lambda i: i | {"weights_R": i["weights_R"][1:]},
            "float64.*it takes bf16": lambda i: i | {"a_RF": i["a_RF"].double()},
            "takes a contiguous": lambda i: i | {"a_RF": i["a_RF"].T.contiguous().T},
        },
    ),
)


def _swiglu_fp8_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    rows, width = case["R"], case["F"]
    gate_up = normal(generator, rows, 2 * width).to(dtype)
    gate_up[rows - case.get("unused", 0) :] = float("nan")  # rows past the last expert's group
    tiled = case.get("tiled", False)
    return {"gate_up_R2F": gate_up, "weights_R": uniform(generator, rows), "tiled": tiled}


def _make_backward_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    inputs = _swiglu_fp8_inputs(case, dtype, generator)
    return {"dy_RF": normal(generator, case["R"], case["F"]).to(dtype)} | inputs


def _fast(gate_up_R2F: torch.Tensor, weights_R: torch.Tensor, tiled: bool):
    return (swiglu_quantised(gate_up_R2F, weights_R, tiled).to(torch.float32),)


def _reference(gate_up_R2F: torch.Tensor, weights_R: torch.Tensor, tiled: bool):
    y_RF = swiglu(gate_up_R2F, weights_R, "reference")
    return (quantise_rows(y_RF, "reference", tiled=tiled).to(torch.float32),)


def _fast_backward_dequantised(**inputs) -> tuple[torch.Tensor, ...]:
    made = swiglu_backward_quantised(**inputs, with_dequantised=True)
    return made.d_gate_up.to(torch.float32), made.d_gate_up_R2F, made.d_weights_R, made.y


def _fast_backward_quantised(**inputs) -> tuple[torch.Tensor, ...]:
    made = swiglu_backward_quantised(**inputs, with_quantised=True)
    return made.d_gate_up.to(torch.float32), made.d_weights_R, made.y.to(torch.float32)


def _reference_backward(
    dy_RF: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    tiled: bool,
    *,
    quantised: bool,
) -> tuple[torch.Tensor, ...]:
    inputs = gate_up_R2F.detach().requires_grad_(), weights_R.detach().requires_grad_()
    with torch.enable_grad():
        y_RF = swiglu(*inputs, backend="reference")
        d_gate_up, d_weights = torch.autograd.grad(y_RF, inputs, dy_RF)
    rounded, y = (
        quantise_rows(x, "reference", tiled=tiled).to(torch.float32) for x in (d_gate_up, y_RF)
    )
    if quantised:
        return rounded, d_weights, y
    return rounded, d_gate_up, d_weights, y_RF.detach()


def _swiglu_fp8_used(inputs: Inputs, x: torch.Tensor) -> torch.Tensor:
    return x[~inputs["gate_up_R2F"].isnan().any(1)]


_CASES = (
    {"R": 7, "F": 24},
    {"R": 1, "F": 1},
    {"R": 13, "F": 257, "unused": 3},
    {"R": 0, "F": 16},
    {"R": 9, "F": 384, "unused": 2, "tiled": True},
)
# An earlier rounding may choose the other of two neighbours in e4m3, which is 6% away.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2.5e-2}

_SWIGLU_FP8_SPECS = (
    KernelSpec(
        name="swiglu_quantised",
        fast=_fast,
        reference=_reference,
        make_inputs=_swiglu_fp8_inputs,
        cases=_CASES,
        benches=(),  # timed as parts of expert_mlp_fp8
        tolerance=_TOLERANCE,
        cost=lambda case: (Cost(bytes=case["R"] * (5 * case["F"] + 8)), Cost()),
        select=_swiglu_fp8_used,
    ),
    KernelSpec(
        name="swiglu_backward_quantised",
        fast=_fast_backward_dequantised,
        reference=partial(_reference_backward, quantised=False),
        make_inputs=_make_backward_inputs,
        cases=_CASES,
        benches=(),  # timed as parts of expert_mlp_fp8
        tolerance=_TOLERANCE,
        cost=lambda case: (Cost(bytes=case["R"] * (14 * case["F"] + 12)), Cost()),
        select=_swiglu_fp8_used,
    ),
    KernelSpec(
        name="swiglu_backward_narrow",
        fast=_fast_backward_quantised,
        reference=partial(_reference_backward, quantised=True),
        make_inputs=_make_backward_inputs,
        cases=_CASES,
        benches=(),  # timed as parts of expert_mlp_fp8_gradients
        tolerance=_TOLERANCE,
        cost=lambda case: (Cost(bytes=case["R"] * (9 * case["F"] + 16)), Cost()),
        select=_swiglu_fp8_used,
    ),
)

SPECS = (
    *_MLP_SPECS,
    *_MLP_FP8_SPECS,
    replace(
        _MLP_FP8_SPECS[0],
        name="expert_mlp_fp8_gradients",
        fast=partial(_in_fp8, "triton", "fp8_gradients"),
        reference=partial(_in_fp8, "reference", "fp8_gradients"),
        cost=_narrow_cost,
    ),
    replace(
        _MLP_FP8_SPECS[0],
        name="expert_mlp_fp8_blocks",
        fast=partial(_in_fp8, "triton"),
        reference=partial(_in_fp8, "reference"),
        make_inputs=_block_inputs,
        cases=(
            CASES[0] | {"D": 144, "F": 128},
            CASES[3] | {"D": 48, "F": 256, "precision": "fp8_blocks_ue8m0"},
        ),
        cost=_narrow_cost,
        bad_inputs={
            r"multiples of 16 and 128": lambda x: (
                x
                | {
                    "w_gate_up_E2FD": x["w_gate_up_E2FD"][:, :32],
                    "w_down_EDF": x["w_down_EDF"][..., :16],
                }
            ),
        },
    ),
    *_MLP_LORA_SPECS,
    replace(
        _MLP_LORA_SPECS[0],
        name="adapted_expert_mlp_fp8",
        fast=partial(_adapted_in_fp8, "triton"),
        reference=partial(_adapted_in_fp8, "reference"),
        cases=(
            {**CASES[0], "r": 8},
            {**CASES[3], "r": 16},
            *({**CASES[2], "r": 8, "activation": name} for name in OTHERS),
            {**GATELESS, "F": 32, "r": 8},
            {"T": 15, "K": 2, "E": 3, "D": 16, "F": 32, "r": 8, "S": 3},
        ),
        tolerance=_MLP_FP8_SPECS[0].tolerance,
    ),
    *_SWIGLU_SPECS,
    *_GATE_SPECS,
    *_RELU2_SPECS,
    *_SWIGLU_FP8_SPECS,
)
