"""Specs of products in which a row's bits do not depend on the number of rows."""

import torch
from torch.nn import functional as F

from moetrain.kernels.small_m import (
    invariant_linear,
    invariant_linear_op,
    low_rank_products,
    low_rank_products_op,
)
from tests.lib.specs.spec import Bench, Case, Cost, Inputs, KernelSpec, normal

_MATRICES = ("a0_rD", "a1_rD", "a2_rD")


def _make_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    rows, dim = case["T"], case["D"]
    matrices = [(normal(generator, r, dim) * dim**-0.5).to(dtype) for r in case["r"]]
    return {"x_TD": normal(generator, rows, dim).to(dtype), **dict.fromkeys(_MATRICES)} | dict(
        zip(_MATRICES, matrices, strict=False)
    )


def _given(matrices: Inputs) -> list[torch.Tensor]:
    return [a for a in matrices.values() if a is not None]


def _cost(case: Case) -> tuple[Cost, Cost]:
    rows, dim, width = case["T"], case["D"], sum(case["r"])
    flops = 2.0 * rows * dim * width
    moved = 2.0 * (rows * dim + width * dim + rows * width)
    return Cost(moved, flops), Cost(moved + 2.0 * rows * dim, 2 * flops)


def _linear_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    rows, dim, width = case["T"], case["D"], case["N"]
    bias_N = normal(generator, width).to(dtype) if case["bias"] else None
    w_ND = (normal(generator, width, dim) * dim**-0.5).to(dtype)
    return {"x_TD": normal(generator, rows, dim).to(dtype), "w_ND": w_ND, "bias_N": bias_N}


def _linear_cost(case: Case) -> tuple[Cost, Cost]:
    rows, dim, width = case["T"], case["D"], case["N"]
    moved = 2.0 * (rows * dim + width * dim + rows * width)
    flops = 2.0 * rows * dim * width
    return Cost(moved, flops), Cost(2 * moved, 2 * flops)


SPECS = (
    KernelSpec(
        name="invariant_linear",
        fast=lambda **inputs: invariant_linear(**inputs, backend="triton"),
        reference=lambda x_TD, w_ND, bias_N: F.linear(x_TD, w_ND, bias_N),
        make_inputs=_linear_inputs,
        cases=(
            {"T": 5, "D": 2056, "N": 32, "bias": True},
            {"T": 1, "D": 2064, "N": 80, "bias": False},
            {"T": 9, "D": 24, "N": 1, "bias": True},
            {"T": 0, "D": 2056, "N": 16, "bias": True},
        ),
        benches=(Bench({"T": 256, "D": 4096, "N": 2048, "bias": True}),),
        tolerance={torch.bfloat16: 1e-2},
        cost=_linear_cost,
        differentiable=("x_TD", "w_ND", "bias_N"),
        ops=(invariant_linear_op,),
        bad_inputs={
            r"\[T, D\] and \[N, D\]": lambda x: x | {"w_ND": x["w_ND"][:, 1:]},
            "of one dtype": lambda x: x | {"w_ND": x["w_ND"].half()},
        },
    ),
    KernelSpec(
        name="low_rank_products",
        fast=lambda x_TD, **matrices: low_rank_products(x_TD, _given(matrices), "triton"),
        reference=lambda x_TD, **matrices: low_rank_products(x_TD, _given(matrices), "reference"),
        make_inputs=_make_inputs,
        cases=(
            {"T": 37, "D": 24, "r": (16, 16, 32)},
            {"T": 1, "D": 8, "r": (8,)},
            {"T": 130, "D": 40, "r": (4, 16, 33)},
            {"T": 0, "D": 16, "r": (16,)},
        ),
        benches=(Bench({"T": 16_384, "D": 2048, "r": (16, 16, 16)}),),
        tolerance={torch.bfloat16: 1e-2},
        cost=_cost,
        differentiable=("x_TD", *_MATRICES),
        ops=(low_rank_products_op,),
        bad_inputs={
            "up to three": lambda x: x | {"a0_rD": x["a0_rD"][:, 1:]},
            "in x's dtype": lambda x: x | {"a0_rD": x["a0_rD"].half()},
        },
    ),
)
