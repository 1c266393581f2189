"""Specs of RMS norms and rotary positions."""

from collections.abc import Callable
from typing import Any

import torch

from moetrain.kernels.norm import elementwise
from moetrain.kernels.norm.rms_norm import (
    add_rms_norm,
    add_rms_norm_op,
    fusible_rms_norm,
    norm_gradients_op,
    rms_norm,
    rms_norm_op,
)
from moetrain.kernels.norm.rotary import rotary, rotary_gradients_op, rotary_op
from tests.lib.specs.spec import Bench, Case, Cost, Inputs, KernelSpec, normal


def _rms_norm_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    x = normal(generator, case["N"], case["D"]).to(dtype)
    weight_D = 1 + normal(generator, case["D"]) / 10
    late = case.get("late", False)
    weight_D = weight_D if late else weight_D.to(dtype).to(torch.float32)
    return {"x": x, "weight_D": weight_D, "eps": 1e-6, "late": late}


def _make_sum_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    y = normal(generator, case["N"], case["D"]).to(dtype)
    return {"y": y} | _rms_norm_inputs(case, dtype, generator)


def _rms_norm_cost(tensors: int) -> Any:
    def cost(case: Case) -> tuple[Cost, Cost]:
        numbers = 2 * case["N"] * case["D"]
        return Cost(bytes=tensors * numbers), Cost(bytes=(tensors + 1) * numbers)

    return cost


_CASES = (
    {"N": 7, "D": 40},
    {"N": 1, "D": 5},
    {"N": 33, "D": 128},
    {"N": 0, "D": 8},
    {"N": 9, "D": 24, "late": True},
)
_BENCHES = (Bench({"N": 16384, "D": 2048}, {"forward_fraction": 0.8}),)
# The backward rounds once; autograd through the formula would round three times.
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
_BAD_WEIGHTS: dict[str, Callable[[Inputs], Inputs]] = {
    r"weight torch.float32 \(39,\)": lambda i: i | {"weight_D": i["weight_D"][1:]},
    r"weight .* strides \(0,\)": lambda i: i | {"weight_D": i["weight_D"][:1].expand(40)},
}


def _elementwise(name: str, op: Any) -> KernelSpec:
    function = getattr(elementwise, name)
    return KernelSpec(
        name=name,
        fast=lambda x: function(x, fusible=False),
        reference=lambda x: function(x, fusible=True),
        make_inputs=lambda case, dtype, generator: {"x": normal(generator, case["N"]).to(dtype)},
        cases=({"N": 999}, {"N": 1}, {"N": 0}),
        benches=(Bench({"N": 2**24}),),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 1e-2},
        cost=lambda case: (Cost(bytes=4 * case["N"]), Cost(bytes=6 * case["N"])),
        differentiable=("x",),
        ops=(op,),
        bad_inputs={"a floating dtype": lambda i: {"x": i["x"].detach().long()}},
    )


_ELEMENTWISE_SPECS = tuple(
    _elementwise(name, getattr(elementwise, f"{name}_op"))
    for name in ("sigmoid", "softplus", "exp")
)
_RMS_NORM_SPECS = (
    KernelSpec(
        name="rms_norm",
        fast=lambda **inputs: rms_norm(**inputs, backend="triton"),
        reference=lambda **inputs: rms_norm(**inputs, backend="reference"),
        make_inputs=_rms_norm_inputs,
        cases=_CASES,
        benches=_BENCHES,
        tolerance=_TOLERANCE,
        cost=_rms_norm_cost(2),
        differentiable=("x", "weight_D"),
        ops=(rms_norm_op, norm_gradients_op),
        bad_inputs=_BAD_WEIGHTS,
    ),
    KernelSpec(
        name="fusible_rms_norm",
        fast=lambda **inputs: fusible_rms_norm(**inputs, backend="triton"),
        reference=lambda x, **others: fusible_rms_norm(x.view_as(x), **others, backend="reference"),
        make_inputs=_rms_norm_inputs,
        cases=_CASES,
        benches=tuple(Bench(bench.case) for bench in _BENCHES),  # the compiler makes the forward
        tolerance=_TOLERANCE,
        cost=_rms_norm_cost(2),
        differentiable=("x", "weight_D"),
        ops=(norm_gradients_op,),
        bad_inputs=_BAD_WEIGHTS,
    ),
    KernelSpec(
        name="add_rms_norm",
        fast=lambda **inputs: add_rms_norm(**inputs, backend="triton"),
        reference=lambda **inputs: add_rms_norm(**inputs, backend="reference"),
        make_inputs=_make_sum_inputs,
        cases=_CASES,
        benches=_BENCHES,
        tolerance=_TOLERANCE,
        cost=_rms_norm_cost(4),
        differentiable=("x", "y", "weight_D"),
        ops=(add_rms_norm_op, norm_gradients_op),
        bad_inputs=_BAD_WEIGHTS
        | {
            "of one shape": lambda i: i | {"y": i["y"][1:]},
            "float64": lambda i: i | {"y": i["y"].double()},
        },
    ),
)


def _rotary_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    d = case["d"]
    angles_Sp = 10 * normal(generator, case["S"], case.get("pairs", d // 2))
    weight_d = 1 + normal(generator, d) / 10 if case["norm"] else None
    return {
        "x_THd": normal(generator, case["T"], case["H"], d).to(dtype),
        "cos_Sp": angles_Sp.cos(),
        "sin_Sp": angles_Sp.sin(),
        "weight_d": None if weight_d is None else weight_d.to(dtype).float(),
        "eps": case.get("eps", 1e-6),
        "interleaved": case.get("interleaved", False),
    }


def _rotary_cost(case: Case) -> tuple[Cost, Cost]:
    numbers = 2 * case["T"] * case["H"] * case["d"]
    return Cost(bytes=2 * numbers), Cost(bytes=3 * numbers)


def _spec(name: str, fusible: bool, targets: dict[str, float], *ops: Any) -> KernelSpec:
    return KernelSpec(
        name=name,
        fast=lambda **inputs: rotary(**inputs, backend="triton", fusible=fusible),
        reference=lambda **inputs: rotary(**inputs, backend="reference"),
        make_inputs=_rotary_inputs,
        cases=(
            {"T": 14, "H": 3, "d": 24, "S": 7, "norm": True},
            {"T": 5, "H": 9, "d": 16, "S": 5, "norm": False},
            {"T": 1, "H": 1, "d": 2, "S": 1, "norm": True},
            {"T": 0, "H": 2, "d": 8, "S": 1, "norm": True},
            {"T": 0, "H": 2, "d": 8, "S": 0, "norm": False},
            {"T": 6, "H": 9, "d": 6, "S": 2, "norm": True, "eps": 0.0},
            {"T": 14, "H": 3, "d": 24, "S": 7, "norm": True, "pairs": 5},
            {"T": 5, "H": 9, "d": 16, "S": 5, "norm": False, "pairs": 4},
            {"T": 5, "H": 9, "d": 14, "S": 5, "norm": False, "interleaved": True},
            {"T": 6, "H": 2, "d": 10, "S": 2, "norm": True, "pairs": 3, "interleaved": True},
        ),
        benches=(
            Bench({"T": 16384, "H": 32, "d": 128, "S": 16384, "norm": True}, targets),
            Bench({"T": 16384, "H": 4, "d": 128, "S": 16384, "norm": True}),
        ),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 1e-2},
        cost=_rotary_cost,
        differentiable=("x_THd", "weight_d"),
        ops=ops,
        bad_inputs={
            "S divides T": lambda i: i | {"x_THd": i["x_THd"][1:]},
            "or fewer": lambda i: i | {"x_THd": i["x_THd"][..., :22]},
            r"sin torch.float32 \(7, 11\)": lambda i: i | {"sin_Sp": i["sin_Sp"][:, 1:]},
            r"weight torch.float32 \(23,\)": lambda i: i | {"weight_d": i["weight_d"][1:]},
            r"strides \(1, 7\)": lambda i: i | {"cos_Sp": i["cos_Sp"].T.contiguous().T},
            r"strides \(0, 1\)": lambda i: i | {"sin_Sp": i["sin_Sp"][:1].expand(7, -1)},
            r"weight .* strides \(0,\)": lambda i: i | {"weight_d": i["weight_d"][:1].expand(24)},
        },
    )


_ROTARY_SPECS = (
    _spec("rotary", False, {"forward_fraction": 0.7}, rotary_op, rotary_gradients_op),
    _spec("fusible_rotary", True, {}, rotary_gradients_op),  # the compiler makes the forward
)

SPECS = (*_ELEMENTWISE_SPECS, *_RMS_NORM_SPECS, *_ROTARY_SPECS)
