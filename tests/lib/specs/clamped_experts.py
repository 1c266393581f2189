"""Specs of experts with biases and a clamped SwiGLU."""

from dataclasses import replace
from functools import partial

import torch

from moetrain.kernels.experts.clamped_mlp import (
    clamped_expert_mlp,
    clamped_expert_mlp_backward_op,
    clamped_expert_mlp_op,
)
from moetrain.kernels.experts.clamped_swiglu import (
    clamped_swiglu,
    clamped_swiglu_backward_op,
    clamped_swiglu_op,
)
from tests.lib.specs.experts import BAD_INPUTS, CASES, chosen, cost_of, make_inputs
from tests.lib.specs.spec import Bench, Case, Cost, Inputs, KernelSpec, normal, uniform


def _swiglu_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    rows, width, experts = case["R"], case["F"], case["E"]
    gate_up = 2 * normal(generator, rows, 2 * width)
    gate_up[rows - case.get("unused", 0) :] = float("nan")  # rows past the last expert's group
    used = rows - case.get("unused", 0)
    ends = (uniform(generator, experts) * (used + 1)).int().sort().values
    ends[-1] = used
    return {
        "gate_up_R2F": gate_up.to(dtype),
        "weights_R": uniform(generator, rows),
        "bias_E2F": normal(generator, experts, 2 * width).to(dtype),
        "offsets_E": ends.int(),
        "limit": case.get("limit", 7.0),
        "alpha": 1.702,
    }


def _used(inputs: Inputs, x: torch.Tensor) -> torch.Tensor:
    return x[~inputs["gate_up_R2F"].isnan().any(1)]


def _swiglu_cost(case: Case) -> tuple[Cost, Cost]:
    rows, width = case["R"], case["F"]
    return Cost(bytes=rows * (2 * 3 * width + 4)), Cost(bytes=rows * (2 * 7 * width + 2 * 4))


def _mlp_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    experts, dim, width = case["E"], case["D"], case["F"]
    return make_inputs(case, dtype, generator) | {
        "b_gate_up_E2F": normal(generator, experts, 2 * width).to(dtype),
        "b_down_ED": normal(generator, experts, dim).to(dtype),
        "limit": case.get("limit", 7.0),
        "alpha": 1.702,
    }


def _adapted_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    experts, dim, width, rank = case["E"], case["D"], case["F"], case["r"]
    inputs = _mlp_inputs(case, dtype, generator) | {"scale": 0.75}
    pairs = (rank, dim), (2 * width, rank), (rank, width), (dim, rank)
    for i, (out, into) in enumerate(pairs):
        matrices = normal(generator, experts, out, into) * into**-0.5
        inputs[f"adapter_{i}"] = matrices.to(dtype)
    return inputs


def _mlp(backend: str, **inputs) -> torch.Tensor:
    adapters = [inputs.pop(f"adapter_{i}") for i in range(4) if f"adapter_{i}" in inputs]
    return clamped_expert_mlp(**inputs, adapters=adapters, backend=backend)


_BAD_INPUTS = BAD_INPUTS | {
    r"biases \[E, 2F\]": lambda x: x | {"b_gate_up_E2F": x["b_gate_up_E2F"][:, 1:]},
    "in x's dtype": lambda x: x | {"b_down_ED": x["b_down_ED"].half()},
}
_BIASED = KernelSpec(
    name="clamped_expert_mlp",
    fast=partial(_mlp, "triton"),
    reference=partial(_mlp, "reference"),
    make_inputs=_mlp_inputs,
    cases=(
        *CASES,
        {"T": 40, "K": 4, "E": 33, "D": 16, "F": 8, "limit": 1.0},
        {"T": 9, "K": 1, "E": 2, "D": 8, "F": 24, "limit": 2.0},
    ),
    benches=tuple(
        Bench({"T": 16384, "K": 4, "E": e, "D": 2880, "F": 2880, "limit": 7.0}) for e in (8, 32)
    ),
    # In bf16 some values fall on the other side of a clamp, where the gradient is zero.
    tolerance={torch.float32: 2e-6, torch.bfloat16: 2e-2},
    cpu_dtypes=(torch.float32,),
    cost=lambda case: cost_of(case, 2.0),
    differentiable=(
        "x_TD",
        "weights_TK",
        "w_gate_up_E2FD",
        "b_gate_up_E2F",
        "w_down_EDF",
        "b_down_ED",
    ),
    select_grads={"weights_TK": chosen},
    ops=(clamped_expert_mlp_op, clamped_expert_mlp_backward_op),
    bad_inputs=_BAD_INPUTS,
)

# An earlier rounding may choose the other of two neighbours in e4m3, which is 6% away. In bf16 a
# number may also end up on the other side of a clamp, where its gradient is zero.
_FP8_TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 6e-2}

SPECS = (
    KernelSpec(
        name="clamped_swiglu",
        fast=partial(clamped_swiglu, backend="triton"),
        reference=partial(clamped_swiglu, backend="reference"),
        make_inputs=_swiglu_inputs,
        cases=(
            {"R": 7, "F": 24, "E": 3, "limit": 1.5},
            {"R": 1, "F": 4, "E": 1},
            {"R": 13, "F": 1028, "E": 5, "unused": 3, "limit": 1.0},
            {"R": 9, "F": 64, "E": 33},
            {"R": 0, "F": 16, "E": 2},
        ),
        benches=(Bench({"R": 65536, "F": 2880, "E": 32}),),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 5e-3},
        cost=_swiglu_cost,
        differentiable=("gate_up_R2F", "weights_R", "bias_E2F"),
        select=_used,
        select_grads={"gate_up_R2F": _used, "weights_R": _used},
        ops=(clamped_swiglu_op, clamped_swiglu_backward_op),
        bad_inputs={
            r"\(7, 47\).*it takes \[R, 2F\]": lambda i: (
                i | {"gate_up_R2F": i["gate_up_R2F"][:, 1:]}
            ),
            "for E offsets": lambda i: i | {"offsets_E": i["offsets_E"][1:]},
            "float64.*both alike": lambda i: i | {"gate_up_R2F": i["gate_up_R2F"].double()},
            "takes a contiguous": lambda i: i | {"gate_up_R2F": i["gate_up_R2F"].T.contiguous().T},
        },
    ),
    _BIASED,
    replace(
        _BIASED,
        name="clamped_expert_mlp_fp8",
        fast=partial(_mlp, "triton", precision="fp8"),
        reference=partial(_mlp, "reference", precision="fp8"),
        cases=(*CASES, {**CASES[0], "E": 33, "limit": 1.0}),
        tolerance=_FP8_TOLERANCE,
        cost=lambda case: cost_of(case, 1.0),
    ),
    replace(
        _BIASED,
        name="clamped_expert_mlp_fp8_gradients",
        fast=partial(_mlp, "triton", precision="fp8_gradients"),
        reference=partial(_mlp, "reference", precision="fp8_gradients"),
        cases=(CASES[0], CASES[3]),
        tolerance=_FP8_TOLERANCE,
        cost=lambda case: cost_of(case, 1.0),
    ),
    KernelSpec(
        name="adapted_clamped_expert_mlp",
        fast=_BIASED.fast,
        reference=_BIASED.reference,
        make_inputs=_adapted_inputs,
        cases=(
            {"T": 7, "K": 2, "E": 3, "D": 16, "F": 24, "r": 8},
            {"T": 5, "K": 1, "E": 1, "D": 8, "F": 8, "r": 8},
            {"T": 9, "K": 3, "E": 6, "D": 32, "F": 16, "r": 16, "empty": 0.3, "limit": 2.0},
            {"T": 5, "K": 2, "E": 2, "D": 16, "F": 8, "r": 8, "empty": 1.0, "rows": 5},
        ),
        benches=(Bench({"T": 16384, "K": 4, "E": 32, "D": 2880, "F": 2880, "r": 16}),),
        tolerance=_BIASED.tolerance,
        cpu_dtypes=(torch.float32,),
        cost=lambda case: cost_of(case, 2.0),
        differentiable=("x_TD", "weights_TK", *(f"adapter_{i}" for i in range(4))),
        select_grads={"weights_TK": chosen},
        ops=(clamped_expert_mlp_op, clamped_expert_mlp_backward_op),
        bad_inputs=_BAD_INPUTS
        | {r"adapters \[E, r, D\]": lambda x: x | {"adapter_0": x["adapter_0"][:, 1:]}},
    ),
)
