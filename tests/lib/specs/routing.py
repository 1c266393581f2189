"""Specs of routing: router, expert indices and permutation."""

from dataclasses import replace
from functools import partial

import torch

from moetrain.kernels.experts.permutation import (
    ExpertIndices,
    expert_indices,
    expert_indices_op,
    permute,
    permute_op,
    unpermute,
    unpermute_op,
)
from moetrain.kernels.experts.products import (
    router_logits,
    router_logits_backward_op,
    router_logits_op,
)
from moetrain.kernels.experts.router import (
    router_topk,
    router_topk_backward_op,
    router_topk_op,
)
from moetrain.runtime.backend import Backend
from tests.lib.specs.spec import Bench, Case, Cost, Inputs, KernelSpec, normal, uniform


def make_indices(case: Case, ids_TK: torch.Tensor) -> ExpertIndices:
    """Return the reference's maps of ``ids_TK``, padded to ``case["rows"]`` if the case has it."""
    return expert_indices(ids_TK, case["E"], "reference", num_rows=case.get("rows"))


def make_ids(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Draw distinct experts per token by ``case["routing"]``: random (one in eight slots empty),
    even (random, none empty), one (all to the last expert), none (all -1)."""
    T, K, E = case["T"], case["K"], case["E"]
    routing = case.get("routing", "random")
    ids_TK = uniform(generator, T, E).argsort(1)[:, :K].int()
    if routing == "random":
        ids_TK[uniform(generator, T, K) < 1 / 8] = -1
    elif routing == "one":
        ids_TK.fill_(E - 1)
    elif routing == "none":
        ids_TK.fill_(-1)
    return ids_TK


def _indices_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    ids_TK = make_ids(case, generator)
    return {"topk_ids_TK": ids_TK, "num_experts": case["E"], "num_rows": case.get("rows")}


INDEX_CASES = (
    {"T": 7, "K": 2, "E": 5, "routing": "even"},
    {"T": 1, "K": 1, "E": 1},
    {"T": 7, "K": 2, "E": 5},
    {"T": 100, "K": 8, "E": 128},
    {"T": 257, "K": 3, "E": 5, "routing": "even"},
    {"T": 100, "K": 1, "E": 5, "routing": "one"},
    {"T": 7, "K": 4, "E": 128, "routing": "none"},
    {"T": 0, "K": 2, "E": 5},
    {"T": 7, "K": 4, "E": 5, "rows": 26},
    {"T": 300, "K": 3, "E": 5, "rows": 700},
    {"T": 7, "K": 4, "E": 128, "routing": "none", "rows": 0},
)
# Kernels with one program per token need few tokens: more show nothing new.
ROW_CASES = (
    *INDEX_CASES[:3],
    {"T": 11, "K": 8, "E": 128},
    {"T": 33, "K": 3, "E": 5, "routing": "even"},
    {"T": 17, "K": 1, "E": 5, "routing": "one"},
    *INDEX_CASES[6:9],
    {"T": 30, "K": 3, "E": 5, "rows": 70},
    INDEX_CASES[10],
)
INDEX_BENCH = {"T": 16384, "K": 8, "E": 128, "routing": "even"}

_INDICES_SPECS = (
    KernelSpec(
        name="expert_indices",
        fast=partial(expert_indices, backend="triton"),
        reference=partial(expert_indices, backend="reference"),
        make_inputs=_indices_inputs,
        cases=(*INDEX_CASES, {"T": 100, "K": 7, "E": 500}),
        benches=(Bench(INDEX_BENCH, {"forward_ms": 0.040}),),
        tolerance={torch.float32: 0.0},
        cost=lambda case: (Cost(bytes=case["T"] * case["K"] * 3 * 4), Cost()),
        ops=(expert_indices_op,),
        bad_inputs={
            "float32.*takes int32 or int64": lambda i: (
                i | {"topk_ids_TK": i["topk_ids_TK"].float()}
            ),
            "num_rows 15.*at most 14": lambda i: i | {"num_rows": 15},
        },
    ),
)


def token_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Draw tokens, weights and indices of a case of :data:`CASES`."""
    ids_TK = make_ids(case, generator)
    return {
        "x_TD": normal(generator, case["T"], case["D"]).to(dtype),
        "weights_TK": uniform(generator, *ids_TK.shape),
        "indices": make_indices(case, ids_TK),
    }


def _permute_tokens_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    inputs = token_inputs(case, dtype, generator)
    return {"x_TD": inputs["x_TD"], "indices": inputs["indices"]}


def _permute_tokens(backend: Backend, x_TD, indices) -> torch.Tensor:
    return permute(x_TD, None, indices, backend)[0]


def _unpermute_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    indices = make_indices(case, make_ids(case, generator))
    rows = indices.row_slot_R.shape[0]
    y_RD = normal(generator, rows, case["D"]).to(dtype)
    y_RD[indices.row_slot_R < 0] = float("nan")
    return {"y_RD": y_RD, "indices": indices}


def used_rows(inputs: Inputs, x: torch.Tensor) -> torch.Tensor:
    """Keep the rows that hold a token."""
    return x[inputs["indices"].row_slot_R >= 0]


def _rows_cost(case: Case) -> tuple[Cost, Cost]:
    T, K, D = case["T"], case["K"], case["D"]
    # Tokens and rows are read in bf16, each once; also a slot's row and, in permute, its weight
    # twice.
    cost = Cost(bytes=2 * (T + T * K) * D + T * K * 4)
    return cost, cost


CASES = tuple(
    dict(case) | {"D": width}
    for case, width in zip(ROW_CASES, (24, 1, 24, 16, 33, 8, 8, 8, 40, 5, 7), strict=True)
)
_BENCHES = (
    Bench(INDEX_BENCH | {"D": 2048}, {"forward_fraction": 0.8, "backward_fraction": 0.8}),
    Bench(INDEX_BENCH | {"T": 132096, "D": 2048}),  # past 2^31 elements
)

_PERMUTE = KernelSpec(
    name="permute",
    fast=partial(permute, backend="triton"),
    reference=partial(permute, backend="reference"),
    make_inputs=token_inputs,
    cases=CASES,
    benches=_BENCHES,
    tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3},
    cost=_rows_cost,
    differentiable=("x_TD", "weights_TK"),
    select=used_rows,
    ops=(permute_op, unpermute_op),
    bad_inputs={
        r"x torch.float32 \(6, 24\)": lambda i: i | {"x_TD": i["x_TD"][1:]},
        "takes a contiguous": lambda i: i | {"x_TD": i["x_TD"].T.contiguous().T},
    },
)

_PERMUTATION_SPECS = (
    _PERMUTE,
    replace(
        _PERMUTE,
        name="permute_tokens",
        fast=partial(_permute_tokens, "triton"),
        reference=partial(_permute_tokens, "reference"),
        make_inputs=_permute_tokens_inputs,
        # The width of a token's row; the backward of unpermute reads that of a token.
        benches=(Bench(INDEX_BENCH | {"D": 16}),),
        differentiable=("x_TD",),
        ops=(permute_op, unpermute_op),
    ),
    KernelSpec(
        name="unpermute",
        fast=partial(unpermute, backend="triton"),
        reference=partial(unpermute, backend="reference"),
        make_inputs=_unpermute_inputs,
        cases=CASES,
        benches=_BENCHES,
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3},
        cost=_rows_cost,
        differentiable=("y_RD",),
        select_grads={"y_RD": used_rows},
        ops=(unpermute_op, permute_op),
        bad_inputs={
            r"y torch.float32 \(13, 24\)": lambda i: i | {"y_RD": i["y_RD"][1:]},
            "takes a contiguous": lambda i: i | {"y_RD": i["y_RD"].T.contiguous().T},
        },
    ),
)


def _router_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    T, E = case["T"], case["E"]
    logits_TE = normal(generator, T, E)
    # Multiples of 1/32 are often tied but never nearly tied: ids are then the same in every
    # precision.
    logits_TE = (logits_TE * 32).round() / 32
    options = {k: v for k, v in case.items() if k not in ("T", "E", "bias", "pads")}
    if case.get("bias"):
        options["bias_E"] = 0.1 * normal(generator, E)
    if case.get("pads"):
        options["is_pad_T"] = uniform(generator, T) < case["pads"]
    return {"logits_TE": logits_TE, **options}


def _router_cost(case: Case) -> tuple[Cost, Cost]:
    T, E, k = case["T"], case["E"], case["k"]
    logits, slots = 4 * T * E, 4 * T * k
    return Cost(bytes=logits + 2 * slots), Cost(bytes=2 * logits + 2 * slots)


_GROUPS = {"score": "sigmoid", "bias": True, "num_groups": 8, "topk_groups": 4, "scale": 2.5}

_ROUTER_SPECS = (
    KernelSpec(
        name="router_topk",
        fast=lambda **inputs: router_topk(**inputs, backend="triton"),
        reference=lambda **inputs: router_topk(**inputs, backend="reference"),
        make_inputs=_router_inputs,
        cases=(
            {"T": 100, "E": 20, "k": 4},
            {"T": 1, "E": 1, "k": 1},
            {"T": 7, "E": 5, "k": 5, "score": "sigmoid", "scale": 0.5},
            {"T": 257, "E": 128, "k": 8},
            {"T": 100, "E": 128, "k": 8, "normalize": False, "bias": True},
            {"T": 7, "E": 512, "k": 32, "score": "sigmoid", "normalize": False},
            {"T": 100, "E": 24, "k": 3, **_GROUPS},
            {"T": 7, "E": 8, "k": 2, **_GROUPS},
            {"T": 100, "E": 15, "k": 4, "num_groups": 3, "topk_groups": 2},
            {"T": 100, "E": 24, "k": 3, **_GROUPS, "best_of_group": True},
            {
                "T": 33,
                "E": 15,
                "k": 4,
                "num_groups": 5,
                "topk_groups": 2,
                "best_of_group": True,
                "normalize": False,
                "scale": 16.0,
            },
            {"T": 0, "E": 5, "k": 2},
            # About half of the tokens' sums are below it.
            {"T": 100, "E": 20, "k": 2, "score": "sigmoid", "min_sum": 1.7, "scale": 2.5},
            {"T": 33, "E": 6, "k": 2, "min_sum": 0.6},
            {"T": 33, "E": 6, "k": 2, "score": "sigmoid", "min_sum": 0.9, "sum_eps": 0.4},
            {"T": 100, "E": 20, "k": 4, "pads": 0.3},
            {"T": 257, "E": 128, "k": 8, "bias": True, "score": "sigmoid", "pads": 0.9},
            {"T": 7, "E": 5, "k": 2, "pads": 1.0},
        ),
        benches=(
            Bench({"T": 16384, "E": 128, "k": 8}, {"forward_ms": 0.060}),
            # Few tokens are checked: among many, some scores nearly tie and differ in fp32.
            Bench(
                {"T": 16384, "E": 256, "k": 8, **_GROUPS},
                check_case={"T": 257, "E": 256, "k": 8, **_GROUPS},
            ),
        ),
        tolerance={torch.float32: 2e-6},
        cost=_router_cost,
        differentiable=("logits_TE",),
        ops=(router_topk_op, router_topk_backward_op),
        bad_inputs={
            "float32 with contiguous rows": lambda i: i | {"logits_TE": i["logits_TE"].bfloat16()},
            "strides": lambda i: i | {"logits_TE": i["logits_TE"].T.contiguous().T},
            "1 to 20": lambda i: i | {"k": 21},
            "'top'": lambda i: i | {"score": "top"},
            "groups that divide": lambda i: i | {"num_groups": 3},
            "bool, one a token": lambda i: i | {"is_pad_T": torch.zeros(3, dtype=torch.bool)},
            "one number an expert": lambda i: i | {"bias_E": torch.zeros(3)},
        },
    ),
)


def _router_logits_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    x_TD, weight_ED = (normal(generator, rows, case["D"]) for rows in (case["T"], case["E"]))
    # Values are in fp32, as on one device, and rounding leaves them unchanged.
    return {"x_TD": x_TD.to(dtype), "weight_ED": weight_ED.to(dtype).float()}


def _router_logits_cost(case: Case) -> tuple[Cost, Cost]:
    T, D, E = case["T"], case["D"], case["E"]
    x, logits, weight = 2 * T * D, 4 * T * E, 4 * E * D
    return (
        Cost(bytes=x + weight + logits, flops=2 * T * D * E),
        Cost(bytes=2 * x + 2 * weight + logits, flops=4 * T * D * E),
    )


_ROUTER_LOGITS_SPECS = (
    KernelSpec(
        name="router_logits",
        fast=lambda **inputs: router_logits(**inputs, backend="triton"),
        reference=lambda **inputs: router_logits(**inputs, backend="reference"),
        make_inputs=_router_logits_inputs,
        cases=(
            {"T": 100, "D": 40, "E": 20},
            {"T": 1, "D": 1, "E": 1},
            {"T": 257, "D": 16, "E": 128},
            {"T": 0, "D": 8, "E": 5},
        ),
        benches=(Bench({"T": 16384, "D": 2048, "E": 128}, {"total_ms": 0.25}),),
        tolerance={torch.bfloat16: 3e-3},  # x's gradient is rounded to bf16
        cost=_router_logits_cost,
        differentiable=("x_TD", "weight_ED"),
        ops=(router_logits_op, router_logits_backward_op),
        bad_inputs={r"\[T, D\] and \[E, D\]": lambda i: i | {"weight_ED": i["weight_ED"][:, 1:]}},
    ),
)
_WIDE_ROUTER_LOGITS = replace(
    _ROUTER_LOGITS_SPECS[0],
    name="router_logits_wide",
    fast=lambda **inputs: router_logits(**inputs, backend="triton", wide=True),
    reference=lambda **inputs: router_logits(**inputs, backend="reference", wide=True),
    make_inputs=lambda case, dtype, generator: {
        "x_TD": normal(generator, case["T"], case["D"]).to(dtype),
        "weight_ED": normal(generator, case["E"], case["D"]).float(),
    },
    benches=(Bench({"T": 16384, "D": 4096, "E": 128}),),
    ops=(),
)

SPECS = (
    *_INDICES_SPECS,
    *_PERMUTATION_SPECS,
    *_ROUTER_SPECS,
    *_ROUTER_LOGITS_SPECS,
    _WIDE_ROUTER_LOGITS,
)
