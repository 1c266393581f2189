"""Specs of quantisation and of dense products in e4m3."""

from functools import partial

import torch

from moetrain.kernels.quant.blocks import QuantisedBlocks, blocks_mm, quantise_blocks
from moetrain.kernels.quant.e4m3 import (
    E4M3,
    Quantised,
    dequantise_op,
    quantise_columns,
    quantise_rows,
    quantise_rows_op,
    quantise_to_rows,
)
from moetrain.kernels.quant.groups import (
    QUANT_FORMATS,
    Groups,
    QuantFormat,
    dequantise_groups,
    dequantise_groups_op,
    quantise_groups,
)
from moetrain.kernels.quant.products import (
    linears_fp8,
    linears_fp8_backward_op,
    linears_fp8_op,
)
from moetrain.kernels.quant.transposed import (
    Transposed,
    place_columns,
    scaled_weight_grad,
    transpose_rows,
)
from moetrain.runtime.backend import Backend
from tests.lib.specs.routing import CASES, INDEX_BENCH, token_inputs, used_rows
from tests.lib.specs.spec import Bench, Case, Cost, Inputs, KernelSpec, normal


def _rows_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    x_RM = normal(generator, case["R"], case["M"])
    x_RM[0] = 0.0
    x_RM *= torch.logspace(-9, 9, case["R"], device=x_RM.device)[:, None]
    return {"x_XM": x_RM.to(dtype), "tiled": case.get("tiled", False)}


def _dequantise_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    given = _rows_inputs(case, dtype, generator)
    return {"self": quantise_rows(**given, backend="reference"), "dtype": dtype}


def _columns_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    return {"w_ENM": normal(generator, case["E"], case["N"], case["M"]).to(dtype)}


def _to_rows(x_TD, weights_TK, indices, tiled: bool) -> tuple[torch.Tensor, ...]:
    rows = indices.row_slot_R.shape[0]
    made = quantise_to_rows(
        x_TD,
        weights_TK,
        indices.slot_row_TK,
        rows,
        tiled=tiled,
        with_dequantised=True,
        with_tokens=True,
    )
    own = torch.cat((made.tokens.values.float(), made.tokens.scales_by_row()), 1)
    scales_RG = made.rows.scales_by_row()
    return (
        made.rows.values,
        scales_RG,
        made.weights_R,
        made.dequantised_RD,
        own[made.token_R.long().clamp(0, len(x_TD) - 1)],
    )


def _to_rows_reference(x_TD, weights_TK, indices, tiled: bool) -> tuple[torch.Tensor, ...]:
    slot_R = indices.row_slot_R.clamp(min=0)
    token_R = slot_R // indices.slot_row_TK.shape[1]
    made = quantise_rows(x_TD, "reference", tiled=tiled)
    weights_R, x_RD = weights_TK.reshape(-1)[slot_R], made.to(x_TD.dtype)[token_R]
    values_RD, scales_RG = made.values[token_R], made.scales_by_row()[token_R]
    own = torch.cat((values_RD.float(), scales_RG), 1)
    return values_RD, scales_RG, weights_R, x_RD, own


def _to_rows_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    return token_inputs(case, dtype, generator) | {"tiled": case.get("tiled", False)}


_EXACT = {torch.bfloat16: 0.0, torch.float32: 0.0}

_ROWS_SPECS = (
    KernelSpec(
        name="quantise_rows",
        fast=partial(quantise_rows, backend="triton"),
        reference=partial(quantise_rows, backend="reference"),
        make_inputs=_rows_inputs,
        cases=(
            *({"R": r, "M": m} for r, m in ((37, 48), (2, 1), (5, 1000))),
            *({"R": r, "M": m, "tiled": True} for r, m in ((7, 256), (3, 48), (5, 1000))),
        ),
        benches=(
            Bench({"R": 20480, "M": 2048}, {"forward_fraction": 0.7}),
            Bench({"R": 128 * 1536, "M": 2048}, {"forward_fraction": 0.7}),
            Bench({"R": 128 * 2048, "M": 768}, {"forward_fraction": 0.7}),
        ),
        tolerance=_EXACT,
        cost=lambda case: (Cost(bytes=3 * case["R"] * case["M"]), Cost()),
        ops=(quantise_rows_op,),
        bad_inputs={"takes a contiguous": lambda i: {"x_XM": i["x_XM"].T}},
    ),
    KernelSpec(
        name="quantise_columns",
        fast=partial(quantise_columns, backend="triton"),
        reference=partial(quantise_columns, backend="reference"),
        make_inputs=_columns_inputs,
        cases=(
            {"E": 2, "N": 48, "M": 80},
            {"E": 1, "N": 1, "M": 3},
            {"E": 3, "N": 600, "M": 17},
        ),
        benches=(
            Bench({"E": 128, "N": 1536, "M": 2048}, {"forward_fraction": 0.6}),
            Bench({"E": 128, "N": 2048, "M": 768}, {"forward_fraction": 0.6}),
        ),
        tolerance=_EXACT,
        cost=lambda case: (Cost(bytes=3 * case["E"] * case["N"] * case["M"]), Cost()),
        bad_inputs={"takes a contiguous": lambda i: {"w_ENM": i["w_ENM"].transpose(1, 2)}},
    ),
    KernelSpec(
        name="dequantise",
        fast=partial(Quantised.to, backend="triton"),
        reference=partial(Quantised.to, backend="reference"),
        make_inputs=_dequantise_inputs,
        cases=(
            *({"R": r, "M": m} for r, m in ((37, 48), (2, 1), (5, 1000))),
            *({"R": r, "M": m, "tiled": True} for r, m in ((7, 256), (3, 48), (5, 1000))),
        ),
        benches=(Bench({"R": 4 * 16384, "M": 2048}, {"forward_fraction": 0.7}),),
        tolerance=_EXACT,
        cost=lambda case: (Cost(bytes=3 * case["R"] * case["M"]), Cost()),
        ops=(dequantise_op,),
        bad_inputs={
            r"scales torch.float32 \(36,\)": lambda i: (
                i | {"self": Quantised(i["self"][0], i["self"][1][1:])}
            )
        },
    ),
    KernelSpec(
        name="quantise_to_rows",
        fast=_to_rows,
        reference=_to_rows_reference,
        make_inputs=_to_rows_inputs,
        cases=(*CASES, CASES[0] | {"tiled": True, "D": 272}, CASES[2] | {"tiled": True}),
        benches=(Bench(INDEX_BENCH | {"D": 2048}, {"forward_fraction": 0.7}),),
        tolerance=_EXACT,
        cost=lambda case: (
            Cost(bytes=case["T"] * case["D"] * (2 + 3 * case["K"]) + 12 * case["T"] * case["K"]),
            Cost(),
        ),
        select=used_rows,
    ),
)


def _transposed_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Draw rows, or ``T`` tokens. Rows outside every group, and tokens without a row, are NaN."""
    ends_E = torch.tensor(case["rows"], dtype=torch.int32, device=generator.device).cumsum(0).int()
    used, tokens = int(ends_E[-1]), case.get("T")
    rows = used + case.get("unused", 0)
    given = rows if tokens is None else tokens
    x_RM = normal(generator, given, case["M"])
    x_RM *= torch.logspace(1, -7, given, device=x_RM.device)[:, None]
    token_R = None
    if tokens is None:
        x_RM[used:] = float("nan")
    else:
        x_RM[-1] = float("nan")
        token_R = torch.randint(tokens - 1, (rows,), generator=generator, device=x_RM.device).int()
        token_R[used:] = 1 << 30
    narrow = quantise_rows(x_RM.to(dtype), "reference", tiled=case.get("tiled", False))
    # The codes are viewed as bytes: torch's tests cannot compare or copy e4m3.
    return {
        "bytes_RM": narrow.values.view(torch.uint8),
        "scales": narrow.scales,
        "ends_E": ends_E,
        "token_R": token_R,
        "num_rows": rows,
    }


def _transposed(backend: Backend, bytes_RM, scales, ends_E, token_R, num_rows):
    columns = place_columns(ends_E, num_rows, backend)
    rows = Quantised(bytes_RM.view(E4M3), scales.float())
    values_MP, scales = transpose_rows(rows, columns, token_R, backend)
    return values_MP.float(), scales, *columns[1:]


def _weight_grad_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Draw two operands with the same rows, as bytes and scales of groups."""
    of = {"rows": case["rows"], "tiled": case.get("tiled", False)}
    a, g = (_transposed_inputs(of | {"M": case[x]}, dtype, generator) for x in "MN")
    columns = place_columns(a["ends_E"], a["num_rows"], "reference")
    made = [
        transpose_rows(Quantised(x["bytes_RM"].view(E4M3), x["scales"]), columns, None, "reference")
        for x in (a, g)
    ]
    return {
        "bytes": tuple(x.values.view(torch.uint8) for x in made),
        "scales": tuple(x.scales for x in made),
        "columns": columns,
        "dtype": dtype,
    }


def _weight_grad(backend: Backend, bytes, scales, columns, dtype: torch.dtype) -> torch.Tensor:
    a, g = (Transposed(b.view(E4M3), s) for b, s in zip(bytes, scales, strict=True))
    dtype = torch.float64 if backend == "reference" else dtype
    return scaled_weight_grad(a, g, columns, dtype, backend)


_OF_EXPERTS = ((2048, 768), (1536, 2048))

_TRANSPOSED_SPECS = (
    KernelSpec(
        name="transpose_rows",
        fast=partial(_transposed, "triton"),
        reference=partial(_transposed, "reference"),
        make_inputs=_transposed_inputs,
        cases=(
            {"rows": (5, 0, 37, 16, 1), "M": 48},
            {"rows": (300,), "M": 144, "unused": 3},
            {"rows": (0, 0), "M": 16, "unused": 2},
            {"rows": (3, 31, 0), "M": 16, "T": 9, "unused": 4},
            {"rows": (16, 130, 7, 0, 0, 200, 1), "M": 272, "T": 33},
            {"rows": (4200, 5), "M": 16},  # more rows than a program reads at once
            {"rows": (5, 0, 37, 16, 1), "M": 48, "tiled": True},
            {"rows": (3, 31, 0), "M": 144, "T": 9, "unused": 4, "tiled": True},
            {"rows": (16, 130, 0, 200, 1), "M": 272, "T": 33, "tiled": True},
        ),
        benches=tuple(
            Bench({"rows": (5120,) * 32, "M": 2048, "tiled": tiled}, {"forward_fraction": 0.5})
            for tiled in (False, True)
        ),
        tolerance=_EXACT,
        cost=lambda case: (Cost(bytes=2 * sum(case["rows"]) * case["M"]), Cost()),
    ),
    KernelSpec(
        name="scaled_weight_grad",
        fast=partial(_weight_grad, "triton"),
        reference=partial(_weight_grad, "reference"),
        make_inputs=_weight_grad_inputs,
        cases=(
            {"rows": (5, 0, 37, 16, 1), "M": 48, "N": 16},
            {"rows": (300,), "M": 272, "N": 144},
            {"rows": (0, 0), "M": 16, "N": 32},
            {"rows": (129, 0, 260), "M": 528, "N": 400},
            {"rows": (129, 0, 260), "M": 144, "N": 272, "tiled": True},
            {"rows": (0, 0), "M": 16, "N": 32, "tiled": True},
        ),
        benches=(
            *(Bench({"rows": (5120,) * 32, "M": m, "N": n}) for m, n in _OF_EXPERTS),
            *(Bench({"rows": (1280,) * 128, "M": m, "N": n}) for m, n in _OF_EXPERTS),
        ),
        tolerance={torch.bfloat16: 4e-3, torch.float32: 1e-5},
        cpu_dtypes=(torch.float32,),
        # The cost is at twice bf16's rate.
        cost=lambda case: (Cost(flops=sum(case["rows"]) * case["M"] * case["N"]), Cost()),
    ),
)


def _groups_inputs(form: QuantFormat, case: Case, dtype: torch.dtype, generator) -> Inputs:
    """Draw a weight; ``apart``: shared values and scales follow the codes, as after a gather."""
    ranks, numbers = case["W"], case["U"] * form.unit
    x_WGS = normal(generator, ranks, numbers // form.group_size, form.group_size)
    groups = x_WGS.shape[1]
    x_WGS[:, ::3] *= torch.logspace(-6, 6, form.group_size, device=x_WGS.device)  # subnormal codes
    if form.groups_per_set == 1:
        x_WGS *= torch.logspace(-30, 30, groups, device=x_WGS.device)[:, None]
    x_WGS[0, groups // 2] = 0.0
    given = quantise_groups(form, x_WGS.flatten())
    parts = [None if x is None else x.view(ranks, -1) for x in given]
    if case.get("apart", False):
        rows_WB = torch.cat([x.view(torch.uint8) for x in parts if x is not None], 1)
        parts = [*form.split(rows_WB)]
    start, numel = case.get("start", 0), case.get("numel", numbers)
    room = case.get("room", ranks * numel)
    # The codes are viewed as bytes, because the tests convert floating inputs to fp64.
    parts = [None if x is None else x.view(torch.uint8) for x in parts]
    return {
        **dict(zip(Groups._fields, parts, strict=True)),
        "out_N": torch.zeros(room, dtype=dtype, device=x_WGS.device),
        "start": start,
        "numel": numel,
    }


def _dequantised(
    form: QuantFormat, backend: Backend, quantised, scales, shared, out_N, start, numel
) -> torch.Tensor:
    """Leave the inputs unchanged, so that it can run twice on them."""
    out_N = torch.empty_like(out_N)
    table = form.table(out_N.device)
    shared = None if shared is None else shared.view(torch.float32)
    dequantise_groups(form, Groups(quantised, scales, shared), table, out_N, start, numel, backend)
    return out_N


def _groups_spec(form: QuantFormat) -> KernelSpec:
    n, is_nested = form.unit, form.groups_per_set > 1
    bad_inputs = {
        "elements 0 to": lambda i: i | {"numel": 2 * n * 7},
        r"room for torch.float32": lambda i: i | {"out_N": torch.zeros(14 * n + 1)},
        "scales torch.uint8": lambda i: i | {"scales": i["scales"][:, 1:]},
        "quantised torch.int8": lambda i: i | {"quantised": i["quantised"].view(torch.int8)},
        "scales torch.int32": lambda i: i | {"scales": i["scales"].int()},
        "of last stride 1": lambda i: i | {"scales": i["scales"].T.contiguous().T},
        "whole units": lambda i: i | {"shared": None if is_nested else torch.zeros(2, 14)},
    }
    return KernelSpec(
        name="dequantise_groups" if form.bits == 8 else f"dequantise_groups_{form.name}",
        fast=partial(_dequantised, form, "triton"),
        reference=partial(_dequantised, form, "reference"),
        make_inputs=partial(_groups_inputs, form),
        cases=(
            {"W": 2, "U": 7},
            {"W": 1, "U": 1, "numel": 1},
            {"W": 3, "U": 9, "start": n, "numel": 7 * n + 5, "room": 16 * n + 1, "apart": True},
            {"W": 2, "U": 150 if n < 99 else 4, "start": 37, "numel": 4603, "room": 9000},
            {"W": 2, "U": 9, "start": 37, "numel": 90, "room": 91, "apart": True},
            {"W": 2, "U": 3, "start": n, "numel": 0},
        ),
        benches=(
            # The rate of nvfp4 has not been measured.
            Bench(
                {"W": 1, "U": 128 * 1536 * 2048 // n},
                {} if form.name == "nvfp4" else {"forward_fraction": 0.85},
            ),
            Bench({"W": 2, "U": 2048 * 2048 // n}),
        ),
        # Values of nf4 are rounded to bf16; Triton's interpreter truncates them.
        tolerance={torch.bfloat16: 4e-3 * is_nested, torch.float32: 0.0},
        cost=lambda case: (
            Cost(bytes=case["W"] * case["U"] * n * (2 + form.bytes_per_element)),
            Cost(),
        ),
        ops=(dequantise_groups_op,),
        bad_inputs=bad_inputs,
    )


_GROUP_SPECS = tuple(map(_groups_spec, QUANT_FORMATS.values()))


_NAMES = ("w0_ND", "w1_ND", "w2_ND")


def _linear_fp8_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    rows, dim = case["T"], case["D"]
    weights = [(normal(generator, n, dim) * dim**-0.5).to(dtype) for n in case["N"]]
    given = {"x_TD": normal(generator, rows, dim).to(dtype), **dict.fromkeys(_NAMES)}
    return given | dict(zip(_NAMES, weights, strict=False)) | {"how": case.get("how", "fp8")}


def _given(weights: Inputs) -> list[torch.Tensor]:
    return [w for w in weights.values() if w is not None]


def _linears(backend: Backend, x_TD, how, **weights) -> tuple[torch.Tensor, ...]:
    return linears_fp8(x_TD, _given(weights), backend, how)


def _cost(case: Case) -> tuple[Cost, Cost]:
    rows, dim, width = case["T"], case["D"], sum(case["N"])
    # The cost is at bf16's rate, which holds for weights' gradients; the other products have twice
    # that.
    flops = 1.0 * rows * dim * width
    moved = 2.0 * (rows * (dim + width) + width * dim)
    return Cost(moved, flops), Cost(moved + 2.0 * (rows + width) * dim, 3 * flops)


def _blocks_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    w_ENM = normal(generator, case["E"], case["N"], case["M"])
    w_ENM *= torch.logspace(-9, 9, case["N"], device=w_ENM.device)[:, None]
    w_ENM[-1, -1] = 0.0
    return {
        "w_ENM": w_ENM.to(dtype),
        "kind": case["kind"],
        "transposed": case.get("transposed", False),
    }


def _product_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Draw operands as bytes and scales; rows past the last group are NaN."""
    ends_E = torch.tensor(case["rows"], dtype=torch.int32, device=generator.device).cumsum(0).int()
    x_RM = normal(generator, int(ends_E[-1]) + case.get("unused", 0), case["M"])
    x_RM[ends_E[-1] :] = float("nan")
    w_ENM = normal(generator, len(case["rows"]), case["N"], case["M"])
    a, b = quantise_rows(x_RM, "reference", tiled=True), quantise_blocks(w_ENM, case["kind"])
    return {
        "bytes": tuple(x.values.view(torch.uint8) for x in (a, b)),
        "scales": (a.scales, b.scales),
        "ends_E": ends_E,
        "dtype": dtype,
        "used": int(ends_E[-1]),
    }


def _product(backend: Backend, bytes, scales, ends_E, dtype, used: int) -> torch.Tensor:
    a, b = (kind(x.view(E4M3), s) for kind, x, s in zip(_OPERANDS, bytes, scales, strict=True))
    if backend != "reference":
        return blocks_mm(a, b, ends_E, dtype)[:used]
    a, b = a.to(torch.float64), b.to(torch.float64)
    ends = ends_E.tolist()
    return torch.cat([a[i:j] @ w.t() for i, j, w in zip([0, *ends], ends, b, strict=False)])


_OPERANDS = (Quantised, QuantisedBlocks)
_BLOCKS_SPECS = (
    KernelSpec(
        name="quantise_blocks",
        fast=partial(quantise_blocks, backend="triton"),
        reference=partial(quantise_blocks, backend="reference"),
        make_inputs=_blocks_inputs,
        cases=tuple(
            {"E": e, "N": n, "M": m, "kind": kind, "transposed": turned}
            for kind in ("fp32", "ue8m0")
            for (e, n, m), turned in (((2, 144, 272), False), ((3, 272, 48), True))
        ),
        benches=tuple(
            Bench({"E": 128, "N": 1536, "M": 2048, "kind": "fp32", "transposed": turned})
            for turned in (False, True)
        ),
        tolerance=_EXACT,
        cost=lambda case: (Cost(bytes=3 * case["E"] * case["N"] * case["M"]), Cost()),
        bad_inputs={"takes a contiguous": lambda i: i | {"w_ENM": i["w_ENM"].transpose(1, 2)}},
    ),
    KernelSpec(
        name="blocks_mm",
        fast=partial(_product, "triton"),
        reference=partial(_product, "reference"),
        make_inputs=_product_inputs,
        cases=(
            {"rows": (5, 0, 137, 16, 1), "M": 144, "N": 48, "kind": "fp32"},
            {"rows": (300,), "M": 272, "N": 144, "kind": "ue8m0"},
            {"rows": (0, 130, 0), "M": 48, "N": 272, "kind": "ue8m0", "unused": 3},
        ),
        benches=(
            *(
                Bench({"rows": rows, "N": n, "M": m, "kind": "fp32"})
                for rows in ((5120,) * 32, (1280,) * 128)
                for n, m in ((1536, 2048), (2048, 768), (768, 2048), (2048, 1536))
            ),
            Bench({"rows": (20480,), "N": 5120, "M": 2048, "kind": "fp32"}),
        ),
        tolerance={torch.bfloat16: 4e-3, torch.float32: 1e-5},
        cpu_dtypes=(torch.float32,),
        cost=lambda case: (Cost(flops=sum(case["rows"]) * case["M"] * case["N"]), Cost()),
    ),
)

_LINEAR_FP8_SPECS = (
    KernelSpec(
        name="linears_fp8",
        fast=partial(_linears, "triton"),
        reference=partial(_linears, "reference"),
        make_inputs=_linear_fp8_inputs,
        cases=(
            {"T": 13, "D": 32, "N": (32, 16, 16)},
            {"T": 1, "D": 16, "N": (16,)},
            {"T": 37, "D": 48, "N": (16, 32)},
            {"T": 37, "D": 144, "N": (128, 48, 16), "how": "fp8_blocks"},
            {"T": 130, "D": 48, "N": (272,), "how": "fp8_blocks_ue8m0"},
            {"T": 128, "D": 512, "N": (128, 384), "how": "fp8_blocks"},
        ),
        benches=(
            Bench({"T": 20480, "D": 2048, "N": (4096, 512, 512)}),
            Bench({"T": 20480, "D": 4096, "N": (2048,)}),
        ),
        # An earlier rounding may choose the other of two neighbours in e4m3, which is 6% away.
        tolerance={torch.float32: 5e-3, torch.bfloat16: 1e-2},
        cpu_dtypes=(torch.float32,),
        cost=_cost,
        differentiable=("x_TD", *_NAMES),
        ops=(linears_fp8_op, linears_fp8_backward_op),
        bad_inputs={
            "in x's dtype": lambda x: x | {"w0_ND": x["w0_ND"].half()},
            "multiples of 16": lambda x: x | {"w0_ND": x["w0_ND"][1:]},
        },
    ),
)

SPECS = (
    *_ROWS_SPECS,
    *_TRANSPOSED_SPECS,
    *_GROUP_SPECS,
    *_BLOCKS_SPECS,
    *_LINEAR_FP8_SPECS,
)
