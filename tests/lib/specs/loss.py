"""Specs of the linear cross-entropy."""

from dataclasses import replace
from functools import partial

import torch

from moetrain.kernels.vocabulary.linear_cross_entropy import (
    SummedLoss,
    linear_cross_entropy,
    linear_cross_entropy_sum,
    scaled,
    summed_loss_op,
    token_losses_backward_op,
    token_losses_op,
)
from moetrain.runtime.backend import Backend
from tests.lib.specs.spec import Bench, Case, Cost, Inputs, KernelSpec, normal, uniform


def _make_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    T, D, V = case["T"], case["D"], case["V"]
    options = {k: v for k, v in case.items() if k not in ("T", "D", "V", "ignored")}
    h_TD = normal(generator, T, D)
    w_VD = 2 * normal(generator, V, D) / D**0.5
    targets_T = torch.randint(V, (T,), generator=generator, device=generator.device)
    targets_T[: case.get("ignored", 0)] = options.get("ignore_index", -100)
    return {"h_TD": h_TD.to(dtype), "w_VD": w_VD.to(dtype), "targets_T": targets_T, **options}


def _make_sum_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    inputs = _make_inputs(case, dtype, generator)
    weights_T = uniform(generator, case["T"])
    return inputs | {"weights_T": weights_T}


def _cost(case: Case) -> tuple[Cost, Cost]:
    product = 2.0 * case["T"] * case["D"] * case["V"]
    return Cost(flops=product), Cost(flops=2 * product)


_BENCH_CASE = {"T": 16384, "D": 2048, "V": 151_936}

LINEAR_CROSS_ENTROPY = KernelSpec(
    name="linear_cross_entropy",
    fast=lambda **inputs: linear_cross_entropy(**inputs, backend="triton"),
    reference=lambda **inputs: linear_cross_entropy(**inputs, backend="reference"),
    make_inputs=_make_inputs,
    cases=(
        {"T": 70, "D": 32, "V": 264, "ignored": 3, "temperature": 0.7},
        {"T": 70, "D": 32, "V": 264, "ignored": 3, "temperature": 0.7, "softcap": 3.0},
        {"T": 257, "D": 64, "V": 1000, "chunk_elements": 128 * 1000, "softcap": 0.5},
        {"T": 7, "D": 16, "V": 5, "softcap": 30.0},
        {"T": 1, "D": 16, "V": 1},
        {"T": 7, "D": 16, "V": 5, "ignored": 2, "ignore_index": 0},
        {"T": 257, "D": 64, "V": 1000, "chunk_elements": 128 * 1000},
        {"T": 3, "D": 16, "V": 5000},
        {"T": 7, "D": 16, "V": 30, "ignored": 7},
        {"T": 0, "D": 16, "V": 30},
    ),
    benches=(Bench(_BENCH_CASE),),
    # bf16: 3.7e-3 on a GPU; on a CPU the interpreter truncates where a GPU rounds.
    tolerance={torch.float32: 5e-6, torch.bfloat16: 1e-2},
    cost=_cost,
    differentiable=("h_TD", "w_VD"),
    ops=(token_losses_op, token_losses_backward_op),
    bad_inputs={
        r"takes \[T, D\], \[V, D\]": lambda i: i | {"w_VD": i["w_VD"].T},
        r"targets torch.int32 .* int64 \[T\]": lambda i: i | {"targets_T": i["targets_T"].int()},
        "softcap -1": lambda i: i | {"softcap": -1.0},
        "temperature 0": lambda i: i | {"temperature": 0.0},
        "both in bf16": lambda i: i | {"h_TD": i["h_TD"].bfloat16()},
        "contiguous rows": lambda i: i | {"h_TD": i["h_TD"][:, 1:], "w_VD": i["w_VD"][:, 1:]},
    },
)


LINEAR_CROSS_ENTROPY_SUM = replace(
    LINEAR_CROSS_ENTROPY,
    name="linear_cross_entropy_sum",
    fast=lambda **inputs: linear_cross_entropy_sum(**inputs, backend="triton"),
    reference=lambda **inputs: linear_cross_entropy_sum(**inputs, backend="reference"),
    make_inputs=_make_sum_inputs,
    benches=(Bench(_BENCH_CASE, {"total_ms": 50.0, "extra_gib": 1.86}),),
    ops=(summed_loss_op, scaled),
    bad_inputs=LINEAR_CROSS_ENTROPY.bad_inputs
    | {"one weight a token": lambda i: i | {"weights_T": i["weights_T"][1:]}},
)


def _narrow_sum(backend: Backend, **inputs) -> SummedLoss:
    return linear_cross_entropy_sum(**inputs, backend=backend, fp8_grads=True)


SPECS = (
    LINEAR_CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY_SUM,
    replace(
        LINEAR_CROSS_ENTROPY_SUM,
        name="linear_cross_entropy_sum_narrow",
        fast=partial(_narrow_sum, "triton"),
        reference=partial(_narrow_sum, "reference"),
        cases=(
            {"T": 70, "D": 32, "V": 272, "ignored": 3, "temperature": 0.7},
            # Five chunks, each with two products of codes; the last chunk is no multiple of 16
            # tokens.
            {"T": 270, "D": 32, "V": 1008, "chunk_elements": 128 * 1008},
            {"T": 70, "D": 16, "V": 50, "temperature": 2.0, "softcap": 3.0},
            {"T": 1, "D": 16, "V": 1},
            {"T": 7, "D": 16, "V": 32, "ignored": 2, "ignore_index": 0},
            {"T": 3, "D": 16, "V": 5000},
            {"T": 7, "D": 16, "V": 32, "ignored": 7},
            {"T": 0, "D": 16, "V": 32},
        ),
        # In bf16 the stored 2^x decide between codes that are 12% to 25% apart.
        tolerance={torch.float32: 5e-3, torch.bfloat16: 2e-2},
        cpu_dtypes=(torch.float32,),
        # The gradients' cost is at twice bf16's rate.
        cost=lambda case: (_cost(case)[0], Cost(flops=_cost(case)[0].flops)),
        bad_inputs=LINEAR_CROSS_ENTROPY_SUM.bad_inputs
        | {
            "multiple of 16 as the width": lambda i: (
                i | {x: i[x][:, 8:].contiguous() for x in ("h_TD", "w_VD")}
            ),
            "contiguous rows": lambda i: i | {"h_TD": i["h_TD"].T.contiguous().T},
        },
    ),
)
