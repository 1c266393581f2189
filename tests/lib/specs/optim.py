"""Specs of the AdamW step and of the reduction of gradients."""

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from moetrain.kernels.optim.adamw import (
    Settings,
    adamw,
    adamw_op,
)
from moetrain.kernels.optim.adamw_float8 import adamw_float8, adamw_float8_op
from moetrain.kernels.optim.muon import (
    muon_momentum,
    muon_momentum_op,
    muon_update,
    muon_update_op,
)
from moetrain.kernels.optim.reduction import (
    num_blocks,
    sum_chunks,
    sum_chunks_op,
)
from moetrain.kernels.optim.rounding import BLOCK
from moetrain.kernels.optim.symmetric import symmetric_product, symmetric_product_op
from tests.lib.specs.spec import Bench, Case, Cost, Inputs, KernelSpec, normal, uniform


def _adamw_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    size, device = case["N"], generator.device
    blocks = -(-size // BLOCK)
    settings = Settings(0.9, 0.95, 1e-8, seed=case.get("seed", 1))
    scalars = (torch.full((), x, device=device) for x in (3, 0.7, case.get("skipped", 0)))
    origins_B = (case.get("first", 0) + BLOCK * torch.arange(blocks, device=device)).long()
    return {
        "param_N": normal(generator, size),
        "grad_N": normal(generator, size).to(case.get("gradients", torch.float32)),
        "avg_N": normal(generator, size).to(dtype),
        "avg_sq_N": uniform(generator, size).to(dtype),
        "rates_S": settings.rates(*scalars, 1e-2, 0.1),
        "decays_B": (torch.arange(blocks, device=device) % 2).to(torch.uint8),
        "settings": settings,
        "origins_B": None if dtype == torch.float32 else origins_B,
        "out_dtype": dtype,
    }


def _adamw_fast(*, out_dtype: torch.dtype, **inputs: Any) -> tuple[torch.Tensor, ...]:
    """Leave the inputs unchanged, so that it can run twice on them."""
    inputs |= {name: inputs[name].clone() for name in ("param_N", "avg_N", "avg_sq_N")}
    out_N = torch.empty_like(inputs["param_N"], dtype=out_dtype)
    adamw(**inputs, out_N=out_N, backend="triton")
    return inputs["param_N"], inputs["avg_N"], inputs["avg_sq_N"], out_N


def _adamw_reference(*, out_dtype: torch.dtype, **inputs: Any) -> tuple[torch.Tensor, ...]:
    """Compute :func:`_adamw_fast` in the dtype of its inputs, without rounding."""
    inputs |= {name: inputs[name].clone() for name in ("param_N", "avg_N", "avg_sq_N")}
    adamw(**inputs | {"origins_B": None}, backend="reference")
    return inputs["param_N"], inputs["avg_N"], inputs["avg_sq_N"], inputs["param_N"]


def _adamw_cost(case: Case) -> tuple[Cost, Cost]:
    gradient = case.get("gradients", torch.float32).itemsize
    return Cost(bytes=case["N"] * (4 * 2 + gradient + 2 * 4 + 2)), Cost()


_ADAMW_SPECS = (
    KernelSpec(
        name="adamw",
        fast=_adamw_fast,
        reference=_adamw_reference,
        make_inputs=_adamw_inputs,
        cases=(
            {"N": 3000},
            {"N": 1},
            {"N": 2 * BLOCK, "skipped": 1},
            {"N": BLOCK + 7, "seed": 2**40 + 5, "first": 2**36 + 4},
            {"N": 2 * BLOCK + 9, "gradients": torch.bfloat16},
            {"N": 0},
        ),
        benches=(),  # timed in place, by scripts/bench_optimizer.py
        # Moments and the copy are rounded to bf16 there.
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3},
        cost=_adamw_cost,
        ops=(adamw_op,),
        bad_inputs={
            "given grad torch.float64": lambda i: i | {"grad_N": i["grad_N"].double()},
            "given avg_sq torch.bfloat16": lambda i: i | {"avg_sq_N": i["avg_sq_N"].bfloat16()},
            r"takes uint8 \[3\] with 3000 elements": lambda i: i | {"decays_B": i["decays_B"][:2]},
            "given moments torch.float32, origins": lambda i: (
                i | {"origins_B": torch.zeros(3, dtype=torch.int64)}
            ),
        },
    ),
)


def _float8_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    (rows, columns), device = case["shape"], generator.device
    groups = -(-columns // 32)
    settings = Settings(0.9, 0.95, 1e-8, seed=case.get("seed", 1))
    scalars = (torch.full((), x, device=device) for x in (3, 0.7, case.get("skipped", 0)))

    def codes(low: int, high: int, *shape: int) -> torch.Tensor:
        drawn = low + (high - low) * uniform(generator, *shape)
        return drawn.to(torch.uint8)

    return {
        "param": normal(generator, rows, columns).to(dtype),
        "grad": normal(generator, rows, columns).to(case.get("gradients", torch.float32)),
        "avg": codes(0, 256, rows, columns),
        "avg_scales_RG": codes(120, 130, rows, groups),
        "avg_sq": codes(200, 256, rows, columns),
        "avg_sq_scales_RG": codes(120, 130, rows, groups),
        "rates_S": settings.rates(*scalars, 1e-2, 0.1),
        "places_2": torch.tensor([case.get("first", 0), 32 * groups], device=device),
        "settings": settings,
        "decays": case.get("decays", True),
        "out_dtype": dtype,
    }


_FLOAT8_STATE = ("avg", "avg_scales_RG", "avg_sq", "avg_sq_scales_RG")


def _float8_fast(*, out_dtype: torch.dtype, **inputs: Any) -> tuple[torch.Tensor, ...]:
    """Leave the inputs unchanged, so that it can run twice on them; return moments as values."""
    inputs |= {name: inputs[name].clone() for name in ("param", *_FLOAT8_STATE)}
    out = torch.empty_like(inputs["param"], dtype=out_dtype)
    adamw_float8(**inputs, out=out, backend="triton")
    first, second = widened(*(inputs[name] for name in _FLOAT8_STATE))
    return inputs["param"], first, second, out


def _float8_reference(*, out_dtype: torch.dtype, **inputs: Any) -> tuple[torch.Tensor, ...]:
    """Compute :func:`_float8_fast` by its formulas, in the dtype of its inputs, unrounded."""
    param_RC, settings = inputs["param"], inputs["settings"]
    m_RC, v_RC = (x.to(param_RC.dtype) for x in widened(*(inputs[name] for name in _FLOAT8_STATE)))
    clip, decay, size, root, skipped, *_ = inputs["rates_S"].to(param_RC.dtype).unbind()
    if skipped:
        return param_RC, m_RC, v_RC, param_RC
    g_RC = inputs["grad"].to(param_RC.dtype) * clip
    m_RC = m_RC + (1 - settings.beta1) * (g_RC - m_RC)
    v_RC = v_RC + (1 - settings.beta2) * (g_RC.square() - v_RC)
    p_RC = param_RC * (1 - decay * inputs["decays"])
    p_RC = p_RC - size * m_RC / (v_RC.sqrt() * root + settings.eps)
    return p_RC, m_RC, v_RC, p_RC


def widened(
    avg: torch.Tensor,
    avg_scales_RG: torch.Tensor,
    avg_sq: torch.Tensor,
    avg_sq_scales_RG: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantise float8 moments to fp64 by a table of the codes' values."""
    fields, mantissas = torch.arange(256) // 8, torch.arange(256) % 8 / 8
    second_256 = (1 + mantissas).double() * 2.0 ** (fields - 31)
    signs, fields = 1 - 2 * (fields // 16), fields % 16
    first_256 = torch.where(fields > 0, 1 + mantissas, 2 * mantissas).double() * 2.0 ** (
        fields - 15
    )
    found = []
    for table_256, codes, scales_RG in (
        (signs * first_256, avg, avg_scales_RG),
        (second_256, avg_sq, avg_sq_scales_RG),
    ):
        powers_RG = torch.where(scales_RG > 0, 2.0 ** (scales_RG.double() - 127), 0.0)
        powers_RC = powers_RG.repeat_interleave(32, 1)[:, : codes.shape[1]]
        found.append(table_256.to(codes.device)[codes.long()] * powers_RC)
    return found[0], found[1]


def _float8_cost(case: Case) -> tuple[Cost, Cost]:
    rows, columns = case["shape"]
    gradient = case.get("gradients", torch.float32).itemsize
    return Cost(bytes=rows * columns * (2 * 2 + gradient + 4 * (1 + 1 / 32) + 2)), Cost()


_FLOAT8_SPECS = (
    KernelSpec(
        name="adamw_float8",
        fast=_float8_fast,
        reference=_float8_reference,
        make_inputs=_float8_inputs,
        cases=(
            {"shape": (3, 1056)},
            {"shape": (301, 1)},
            {"shape": (2, 100), "decays": False},
            {"shape": (5, 64), "skipped": 1},
            {"shape": (33, 96), "seed": 2**40 + 5, "first": 2**36 + 64},
            {"shape": (4, 33), "gradients": torch.bfloat16},
            {"shape": (0, 32)},
        ),
        benches=(),  # timed in place, by scripts/bench_optimizer.py
        # Neighbouring codes differ by a sixteenth to an eighth.
        tolerance={torch.float32: 0.05, torch.bfloat16: 0.05},
        cost=_float8_cost,
        ops=(adamw_float8_op,),
        bad_inputs={
            "given grad torch.float64": lambda i: i | {"grad": i["grad"].double()},
            "given avg torch.float32": lambda i: i | {"avg": i["avg"].float()},
            r"given avg_sq_scales torch.uint8 \(3, 32\)": lambda i: (
                i | {"avg_sq_scales_RG": i["avg_sq_scales_RG"][:, :32]}
            ),
            "takes int64": lambda i: i | {"places_2": i["places_2"].int()},
        },
    ),
)


def _momentum_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    inputs = _adamw_inputs(case, dtype, generator)
    kept = {name: inputs[name] for name in ("grad_N", "rates_S", "origins_B")}
    return kept | {
        "momentum_N": inputs["avg_N"],
        "momentum": 0.95,
        "seed": inputs["settings"].seed,
    }


def _momentum_fast(**inputs: Any) -> tuple[torch.Tensor, ...]:
    """Leave the inputs unchanged, so that it can run twice on them."""
    inputs |= {name: inputs[name].clone() for name in ("grad_N", "momentum_N")}
    muon_momentum(**inputs, backend="triton")
    return inputs["grad_N"], inputs["momentum_N"]


def _momentum_reference(**inputs: Any) -> tuple[torch.Tensor, ...]:
    """Compute :func:`_momentum_fast` in the dtype of its inputs, without rounding."""
    inputs |= {name: inputs[name].clone() for name in ("grad_N", "momentum_N")}
    muon_momentum(**inputs | {"origins_B": None}, backend="reference")
    return inputs["grad_N"], inputs["momentum_N"]


def _momentum_cost(case: Case) -> tuple[Cost, Cost]:
    gradient = case.get("gradients", torch.float32).itemsize
    return Cost(bytes=case["N"] * 2 * (gradient + 2)), Cost()


def _update_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    inputs = _adamw_inputs(case, dtype, generator)
    kept = {name: inputs[name] for name in ("param_N", "rates_S", "decays_B", "out_dtype")}
    return kept | {"update_N": inputs["grad_N"]}


def _update_fast(*, out_dtype: torch.dtype, **inputs: Any) -> tuple[torch.Tensor, ...]:
    """Leave the inputs unchanged, so that it can run twice on them."""
    inputs |= {"param_N": inputs["param_N"].clone()}
    out_N = torch.empty_like(inputs["param_N"], dtype=out_dtype)
    muon_update(**inputs, out_N=out_N, backend="triton")
    return inputs["param_N"], out_N


def _update_reference(*, out_dtype: torch.dtype, **inputs: Any) -> tuple[torch.Tensor, ...]:
    """Compute :func:`_update_fast` in the dtype of its inputs."""
    inputs |= {"param_N": inputs["param_N"].clone()}
    muon_update(**inputs, backend="reference")
    return inputs["param_N"], inputs["param_N"]


def _update_cost(case: Case) -> tuple[Cost, Cost]:
    gradient = case.get("gradients", torch.float32).itemsize
    return Cost(bytes=case["N"] * (4 * 2 + gradient + 2)), Cost()


_MUON_SPECS = (
    KernelSpec(
        name="muon_momentum",
        fast=_momentum_fast,
        reference=_momentum_reference,
        make_inputs=_momentum_inputs,
        cases=(
            {"N": 3000},
            {"N": 1},
            {"N": 2 * BLOCK, "skipped": 1},
            {"N": BLOCK + 7, "seed": 2**40 + 5, "first": 2**36 + 4},
            {"N": 0},
        ),
        benches=(),  # timed in place, by scripts/bench_optimizer.py
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3},  # momenta are rounded
        cost=_momentum_cost,
        ops=(muon_momentum_op,),
        bad_inputs={
            "given grad torch.float64": lambda i: i | {"grad_N": i["grad_N"].double()},
            "given momentum torch.float16": lambda i: i | {"momentum_N": i["momentum_N"].half()},
            "given momentum torch.float32, origins": lambda i: (
                i | {"origins_B": torch.zeros(3, dtype=torch.int64)}
            ),
        },
    ),
    KernelSpec(
        name="muon_momentum_of_bf16",
        fast=_momentum_fast,
        reference=_momentum_reference,
        make_inputs=_momentum_inputs,
        cases=({"N": 2 * BLOCK + 9, "gradients": torch.bfloat16},),
        benches=(),
        # The tolerance is one rounding; Triton's interpreter even truncates.
        tolerance={torch.float32: 8e-3, torch.bfloat16: 8e-3},
        cost=_momentum_cost,
        ops=(muon_momentum_op,),
        bad_inputs={"given grad torch.float16": lambda i: i | {"grad_N": i["grad_N"].half()}},
    ),
    KernelSpec(
        name="muon_update",
        fast=_update_fast,
        reference=_update_reference,
        make_inputs=_update_inputs,
        cases=(
            {"N": 3000},
            {"N": 1},
            {"N": 2 * BLOCK, "skipped": 1},
            {"N": 2 * BLOCK + 9, "gradients": torch.bfloat16},
            {"N": 0},
        ),
        benches=(),  # timed in place, by scripts/bench_optimizer.py
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3},  # the copy is rounded
        cost=_update_cost,
        ops=(muon_update_op,),
        bad_inputs={
            "given update torch.float64": lambda i: i | {"update_N": i["update_N"].double()},
            r"takes uint8 \[3\] with 3000 elements": lambda i: i | {"decays_B": i["decays_B"][:2]},
        },
    ),
)


def _reduction_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    chunks, size, accumulate = case["R"], case["N"], case.get("accumulate", False)
    out_dtype = case.get("out", torch.float32)
    return {
        "chunks_RN": normal(generator, chunks, size).to(dtype),
        "out_N": normal(generator, size).to(out_dtype) if accumulate or "out" in case else None,
        "accumulate": accumulate,
        "squares_B": normal(generator, num_blocks(size)) if case.get("squares") else None,
        "own_N": normal(generator, size).to(dtype) if "own" in case else None,
        "own": case.get("own", -1),
    }


def _reduction_fast(
    chunks_RN: torch.Tensor,
    out_N: torch.Tensor | None,
    accumulate: bool,
    squares_B: torch.Tensor | None,
    own_N: torch.Tensor | None,
    own: int,
) -> tuple[torch.Tensor, ...]:
    """Leave the inputs unchanged, so that it can run twice on them."""
    out_N, squares_B = (None if x is None else x.clone() for x in (out_N, squares_B))
    out_N = sum_chunks(chunks_RN, out_N, accumulate, "triton", squares_B, own_N, own)
    return (out_N,) if squares_B is None else (out_N, squares_B)


def _reduction_reference(
    chunks_RN: torch.Tensor,
    out_N: torch.Tensor | None,
    accumulate: bool,
    squares_B: torch.Tensor | None,
    own_N: torch.Tensor | None,
    own: int,
) -> tuple[torch.Tensor, ...]:
    """Compute :func:`_reduction_fast` in the dtype of its inputs."""
    chunks = list(chunks_RN)
    if own_N is not None:
        chunks[own] = own_N
    sum_N = sum(chunks, out_N if accumulate else torch.zeros_like(chunks[0]))
    return (sum_N,) if squares_B is None else (sum_N, block_squares(sum_N))


def block_squares(x_N: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each block of 1024 elements."""
    wide_N = x_N.to(torch.promote_types(x_N.dtype, torch.float32))
    padded_N = F.pad(wide_N, (0, num_blocks(x_N.numel()) * 1024 - x_N.numel()))
    return padded_N.view(-1, 1024).square().sum(1)


def _reduction_cost(case: Case) -> tuple[Cost, Cost]:
    out = case.get("out", torch.float32).itemsize
    return Cost(
        bytes=case["N"] * (2 * case["R"] + out * (1 + case.get("accumulate", False)))
    ), Cost()


def _symmetric_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    batch, rows, columns = (case[name] for name in "BRC")
    x_BRC = normal(generator, batch, rows, columns).to(dtype)
    if case.get("tall"):  # a tall matrix is passed as a transposed view, as in training
        x_BRC = x_BRC.mT.contiguous().mT
    added_BRR = normal(generator, batch, rows, rows)
    return {
        "x_BRC": x_BRC,
        "added_BRR": (added_BRR + added_BRR.mT).to(dtype) if case.get("added") else None,
        "alpha": case.get("alpha", 1.0),
        "beta": -1.5,
    }


def _symmetric_cost(case: Case) -> tuple[Cost, Cost]:
    batch, rows, columns = (case[name] for name in "BRC")
    numbers = batch * rows * (columns + rows * (2 if case.get("added") else 1))
    return Cost(bytes=2 * numbers, flops=batch * rows * (rows + 1) * columns), Cost()


_SYMMETRIC_SPEC = KernelSpec(
    name="symmetric_product",
    fast=partial(symmetric_product, backend="triton"),
    reference=partial(symmetric_product, backend="reference"),
    make_inputs=_symmetric_inputs,
    cases=(
        {"B": 2, "R": 40, "C": 100, "added": True},
        {"B": 1, "R": 1, "C": 1},
        {"B": 3, "R": 7, "C": 65, "alpha": 0.5},
        {"B": 1, "R": 128, "C": 64},
        {"B": 2, "R": 256, "C": 128, "added": True, "alpha": 2.0},
        {"B": 1, "R": 300, "C": 70, "tall": True},
        {"B": 2, "R": 129, "C": 33, "added": True, "tall": True},
        {"B": 1, "R": 513, "C": 1},
    ),
    benches=(
        Bench({"B": 42, "R": 768, "C": 2048}),
        Bench({"B": 42, "R": 768, "C": 768, "added": True}),
        Bench({"B": 4, "R": 4096, "C": 4096}),
    ),
    # The tolerance is one rounding; Triton's interpreter even truncates.
    tolerance={torch.float32: 1e-6, torch.bfloat16: 8e-3},
    cost=_symmetric_cost,
    ops=(symmetric_product_op,),
    bad_inputs={
        r"takes \[B, R, C\]": lambda i: i | {"x_BRC": i["x_BRC"][0]},
        "added torch.float64": lambda i: i | {"added_BRR": i["added_BRR"].double()},
        r"added torch.float32 \(2, 39, 40\)": lambda i: i | {"added_BRR": i["added_BRR"][:, 1:]},
        "with strides": lambda i: i | {"added_BRR": i["added_BRR"].mT},
        "that is not empty": lambda i: i | {"x_BRC": i["x_BRC"][..., :0]},
        "given x torch.float64": lambda i: (
            i | {name: i[name].double() for name in ("x_BRC", "added_BRR")}
        ),
    },
)

_TARGET = {"forward_fraction": 0.85}
_BENCH_SIZE = 32 << 20  # elements: 64 MiB of bf16 a chunk
_NARROW = {"out": torch.bfloat16}

_REDUCTION_SPECS = (
    KernelSpec(
        name="sum_chunks",
        fast=_reduction_fast,
        reference=_reduction_reference,
        make_inputs=_reduction_inputs,
        cases=(
            {"R": 4, "N": 100, "squares": True},
            {"R": 1, "N": 1},
            {"R": 3, "N": 1100, "own": 2, "squares": True},
            {"R": 4, "N": 17, "own": 0, "accumulate": True},
            {"R": 8, "N": 2049, "accumulate": True, "squares": True},
            {"R": 64, "N": 7},
            {"R": 2, "N": 0},
        ),
        benches=tuple(Bench({"R": r, "N": _BENCH_SIZE}, _TARGET) for r in (2, 4, 8)),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-6},
        cost=_reduction_cost,
        ops=(sum_chunks_op,),
        bad_inputs={
            r"takes a contiguous \[R, N\]": lambda i: i | {"chunks_RN": i["chunks_RN"][:, ::2]},
            "accumulate only with an out_N": lambda i: i | {"accumulate": True},
            r"out torch.float32 \(99,\)": lambda i: i | {"out_N": torch.zeros(99)},
            "given chunk 4": lambda i: i | {"own_N": i["chunks_RN"][0], "own": 4},
            "given chunk 0": lambda i: i | {"own_N": torch.zeros(99), "own": 0},
            r"float32 \[1\] for 100 elements": lambda i: i | {"squares_B": torch.zeros(2)},
        },
    ),
    KernelSpec(
        name="sum_chunks_to_bf16",
        fast=_reduction_fast,
        reference=_reduction_reference,
        make_inputs=_reduction_inputs,
        cases=(
            {"R": 4, "N": 100, "accumulate": True, "squares": True, **_NARROW},
            {"R": 3, "N": 1100, "own": 2, "squares": True, **_NARROW},
            {"R": 1, "N": 2049, "accumulate": True, **_NARROW},
            {"R": 2, "N": 0, **_NARROW},
        ),
        benches=tuple(Bench({"R": r, "N": _BENCH_SIZE, **_NARROW}) for r in (1, 4)),
        # The tolerance is one rounding, doubled for squares; Triton's interpreter even truncates.
        tolerance={torch.float32: 8e-3, torch.bfloat16: 8e-3},
        cost=_reduction_cost,
        ops=(sum_chunks_op,),
        bad_inputs={
            "of float32 or bfloat16": lambda i: i | {"out_N": i["out_N"].half()},
        },
    ),
)

SPECS = (*_ADAMW_SPECS, *_FLOAT8_SPECS, *_MUON_SPECS, _SYMMETRIC_SPEC, *_REDUCTION_SPECS)
