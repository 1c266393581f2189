"""Specs of the gated delta rule, Kimi Delta Attention, Mamba-2's recurrence, and their steps."""

import itertools
from typing import Any

import torch

from moetrain.kernels.linear_attention.convolution import (
    Convolution,
    convolution_op,
    convolution_step,
    convolved,
)
from moetrain.kernels.linear_attention.gated_delta import (
    CHUNK,
    Documents,
    gated_delta,
    gated_delta_gradients_op,
    gated_delta_op,
)
from moetrain.kernels.linear_attention.kda import kda, kda_gradients_op, kda_op
from moetrain.kernels.linear_attention.reads import Reads
from moetrain.kernels.linear_attention.ssd import ssd, ssd_gradients_op, ssd_op
from moetrain.kernels.linear_attention.step import (
    StateCache,
    gated_delta_step,
    kda_step,
    ssd_step,
)
from tests.lib.specs.spec import Bench, Case, Cost, Inputs, KernelSpec, normal, uniform

_FIELDS = Documents._fields


def _make_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    T, H, Q, K, V = sum(case["lengths"]), case["H"], case["Q"], case["K"], case.get("V", case["K"])
    bounds = list(itertools.accumulate(case["lengths"], initial=0))
    bounds_N = torch.tensor(bounds, dtype=torch.int32, device=generator.device)
    q_TQK, k_TQK = (torch.nn.functional.normalize(normal(generator, T, Q, K), dim=-1) for _ in "qk")
    if case.get("alike"):  # all keys are alike: T is far from the identity
        k_TQK = k_TQK[:1].expand(T, -1, -1).contiguous()
    return {
        "q_TQK": q_TQK.to(dtype),
        "k_TQK": k_TQK.to(dtype),
        "v_THV": normal(generator, T, H, V).to(dtype),
        "g_TH": -uniform(generator, T, H) / 2,
        "beta_TH": uniform(generator, T, H),
        **Documents.of(bounds_N, T)._asdict(),
    }


def _fast(q_TQK, k_TQK, v_THV, g_TH, beta_TH, backend="triton", **fields):
    documents = Documents(*(fields[name] for name in _FIELDS))
    scale = k_TQK.shape[2] ** -0.5
    return gated_delta(q_TQK, k_TQK, v_THV, g_TH, beta_TH, documents, scale, backend)


def _cost(case: Case) -> tuple[Cost, Cost]:
    T, H, Q, K = sum(case["lengths"]), case["H"], case["Q"], case["K"]
    V = case.get("V", K)
    read = 2 * T * (2 * Q * K + H * V) + 8 * T * H
    # Products of a chunk: K K^T, Q K^T and their T's; W, U; three with the state; (D * Q K^T) U.
    products = T * H * (2 * CHUNK * K + CHUNK * (K + V) + 3 * K * V + CHUNK * V)
    forward = Cost(read + 2 * T * H * V, 2.0 * products)
    return forward, Cost(2 * read + 2 * T * H * V, 5.0 * products)


def _make_step_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Draw tokens to read, and slots with valid states and open chunks; slot 0 has no owner."""
    sequences, number = case["sequences"], len(case["sequences"])
    planned = [(slot + 1, *one) for slot, one in enumerate(sequences)]
    sizes = {name: case[name] for name in "HQKV" if name in case}
    tokens = {"lengths": [sum(number for _, number in sequences)], **sizes}
    make = {"ssd": _ssd_inputs, "kda": _kda_inputs}.get(case.get("rule"), _make_inputs)
    inputs = make(tokens, dtype, generator)
    inputs = {name: x for name, x in inputs.items() if name not in _FIELDS}
    kept = make({"lengths": [(number + 1) * CHUNK], **sizes}, dtype, generator)
    inputs |= {f"kept_{x}": kept[x].unflatten(0, (number + 1, CHUNK)) for x in list(inputs)}
    states = (number + 1, case["H"], case["K"], case.get("V", case["K"]))
    inputs["states_PHKV"] = normal(generator, *states) / 9
    reads = Reads.of(planned, generator.device)
    if all(number == 1 for _, number in sequences):
        slots, places, _ = torch.tensor(planned, device=generator.device).long().view(-1, 3).T
        reads = Reads.of_singles(slots, places)
    return {**inputs, "reads": reads, "in_place": case.get("in_place", False)}


def _step(*, reads, in_place, backend="triton", **inputs):
    """Return the outputs and the final states; ``in_place``: update ``inputs``, for timing."""
    states = inputs.pop("states_PHKV")
    kept = [inputs.pop(name) for name in list(inputs) if name.startswith("kept_")]
    if not in_place:
        states, kept = states.clone(), [x.clone() for x in kept]
    how = {"cache": StateCache(states, tuple(kept)), "reads": reads, "backend": backend}
    if "beta_TH" not in inputs:
        out_THV = ssd_step(**inputs, **how)
    elif "g_THK" in inputs:
        out_THV = kda_step(**inputs, **how, scale=inputs["k_THK"].shape[2] ** -0.5)
    else:
        out_THV = gated_delta_step(**inputs, **how, scale=inputs["k_TQK"].shape[2] ** -0.5)
    return out_THV, states


def _step_cost(case: Case) -> tuple[Cost, Cost]:
    """Return the cost: states and open chunks are read once, each product is computed once."""
    H, Q, K = case["H"], case.get("Q", case["H"]), case["K"]
    V = case.get("V", K)
    rows = sum(seen % CHUNK + number for seen, number in case["sequences"])
    states = 4 * len(case["sequences"]) * H * K * V
    gates = 4 * H * (K + 1 if case.get("rule") == "kda" else 2)
    read = states + rows * (2 * (2 * Q * K + H * V) + gates)
    products = CHUNK * (K + V) + 2 * K * V + (0 if case.get("rule") == "ssd" else 2 * CHUNK * K)
    return Cost(read, 2.0 * rows * H * products), Cost()


def _make_convolution_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    sequences, C, J = case["sequences"], case["heads"] * case["width"], case["J"]
    T = sum(number for _, number in sequences)
    planned = [(slot + 1, *one) for slot, one in enumerate(sequences)]
    weights = case.get("weights", dtype)
    return {
        "x_TC": normal(generator, T, C).to(dtype),
        "filters_C1J": normal(generator, C, 1, J).to(weights),
        "bias_C": normal(generator, C).to(weights) if case.get("bias") else None,
        "kept_PRC": normal(generator, len(sequences) + 1, J - 1 + case.get("more", 0), C).to(dtype),
        "reads": Reads.of(planned, generator.device),
        "width": case["width"],
        "normalised": case.get("normalised", True),
        "activated": case.get("activated", True),
    }


def _convolve_step(*, kept_PRC, reads, backend="triton", **given):
    """Return the heads, and the inputs that are kept in slots with an owner."""
    kept_PRC = kept_PRC.clone()
    return convolution_step(Convolution(**given), kept_PRC, reads, backend), kept_PRC[1:]


def _convolution_cost(case: Case) -> tuple[Cost, Cost]:
    tokens = sum(number for _, number in case["sequences"])
    return Cost(2 * tokens * case["heads"] * case["width"] * (2 + case["J"])), Cost()


def _packed_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    channels, lengths = case["heads"] * case["width"], case["lengths"]
    bias_C = normal(generator, channels).to(dtype) if case.get("bias") else None
    places = [torch.arange(n, device=generator.device) for n in lengths]
    return {
        "x_TC": normal(generator, sum(lengths), channels).to(dtype),
        "filters_C1J": normal(generator, channels, 1, case["J"]).to(dtype),
        "width": case["width"],
        "normalised": case.get("normalised", True),
        "bias_C": bias_C,
        "activated": case.get("activated", True),
        "place_T": torch.cat(places),
    }


def _convolve(*, place_T: torch.Tensor, fusible: bool, **given: Any) -> torch.Tensor:
    return convolved([Convolution(**given)], place_T, fusible=fusible)[0]


def _packed_cost(case: Case) -> tuple[Cost, Cost]:
    numbers = sum(case["lengths"]) * case["heads"] * case["width"]
    return Cost(4 * numbers), Cost(8 * numbers)


_SIZES = {"H": 32, "Q": 32, "K": 128}
_PLAIN = {"activated": False, "normalised": False}

_DELTA_SPECS = (
    KernelSpec(
        name="gated_delta",
        fast=_fast,
        reference=lambda **inputs: _fast(**inputs, backend="reference"),
        make_inputs=_make_inputs,
        cases=(
            {"lengths": (5, 64, 0, 70), "H": 2, "Q": 1, "K": 64},
            {"lengths": (0, 100), "H": 1, "Q": 1, "K": 128, "V": 64, "alike": True},
            {"lengths": (1,), "H": 2, "Q": 1, "K": 64, "V": 128},
            {"lengths": (0,), "H": 2, "Q": 2, "K": 64},
        ),
        benches=(
            Bench({"lengths": (16_384,), **_SIZES}, check_case={"lengths": (700,), **_SIZES}),
            Bench({"lengths": (4096,) * 4, **_SIZES}, check_case={"lengths": (90, 300), **_SIZES}),
            Bench({"lengths": (65_536,), **_SIZES}, check_case={"lengths": (65,), **_SIZES}),
            Bench(
                {"lengths": (16_384,), **_SIZES, "Q": 16},
                check_case={"lengths": (128,), **_SIZES, "Q": 16},
            ),
        ),
        # A GPU is within 4.2e-3 in bf16. Triton's interpreter truncates where a GPU rounds, which
        # doubles each error: up to 1.7e-2.
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2e-2},
        cost=_cost,
        differentiable=("q_TQK", "k_TQK", "v_THV", "g_TH", "beta_TH"),
        ops=(gated_delta_op, gated_delta_gradients_op),
        bad_inputs={
            "Q divides H": lambda i: i | {"q_TQK": i["q_TQK"][..., :32]},
            "widths of 64, 128": lambda i: (
                i | {name: i[name][..., :32].contiguous() for name in ("q_TQK", "k_TQK")}
            ),
            "one dtype": lambda i: i | {"v_THV": i["v_THV"].double()},
            "contiguous": lambda i: i | {"v_THV": i["v_THV"].mT.contiguous().mT},
        },
    ),
    KernelSpec(
        name="gated_delta_step",
        fast=_step,
        reference=lambda **inputs: _step(**inputs, backend="reference"),
        make_inputs=_make_step_inputs,
        cases=(
            {"sequences": ((70, 60), (3, 1), (0, 65)), "H": 2, "Q": 1, "K": 64},
            {"sequences": ((63, 1), (64, 1), (10, 1)), "H": 2, "Q": 1, "K": 64, "V": 128},
            {"sequences": ((127, 2),), "H": 1, "Q": 1, "K": 128, "V": 64},
            {"sequences": (), "H": 2, "Q": 2, "K": 64},
        ),
        benches=(
            Bench(
                {"sequences": ((500, 1),) * 64, **_SIZES, "Q": 16, "in_place": True},
                check_case={"sequences": ((500, 1), (63, 1), (64, 1)), **_SIZES, "Q": 16},
            ),
            Bench(
                {"sequences": ((2048, 2048),), **_SIZES, "Q": 16, "in_place": True},
                check_case={"sequences": ((128, 70), (65, 10)), **_SIZES, "Q": 16},
            ),
        ),
        # The tolerance is that of the rule, whose kernels it uses.
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2e-2},
        cost=_step_cost,
    ),
    KernelSpec(
        name="convolution",
        fast=lambda **inputs: _convolve(**inputs, fusible=False),
        reference=lambda **inputs: _convolve(**inputs, fusible=True),
        make_inputs=_packed_inputs,
        cases=(
            {"lengths": (5, 1, 9), "heads": 3, "width": 20, "J": 4, "bias": True},
            {"lengths": (1, 2), "heads": 1, "width": 8, "J": 1},
            {"lengths": (4, 1, 3), "heads": 2, "width": 12, "J": 3, "bias": True, **_PLAIN},
            {
                "lengths": (0, 7),
                "heads": 2,
                "width": 33,
                "J": 3,
                "normalised": False,
            },
            {"lengths": (0,), "heads": 2, "width": 8, "J": 4},
        ),
        benches=(Bench({"lengths": (16_384,), "heads": 32, "width": 128, "J": 4}),),
        tolerance={torch.float32: 3e-6, torch.bfloat16: 1e-2},
        cost=_packed_cost,
        differentiable=("x_TC", "filters_C1J", "bias_C"),
        ops=(convolution_op,),
        bad_inputs={"multiple of the width": lambda i: i | {"width": 7}},
    ),
    KernelSpec(
        name="convolution_step",
        fast=_convolve_step,
        reference=lambda **inputs: _convolve_step(**inputs, backend="reference"),
        make_inputs=_make_convolution_inputs,
        cases=(
            {"sequences": ((0, 5), (1, 1), (7, 1), (2, 3)), "heads": 3, "width": 20, "J": 4},
            {"sequences": ((3, 1), (0, 1)), "heads": 2, "width": 64, "J": 2, "normalised": False},
            {"sequences": ((2, 2),), "heads": 1, "width": 8, "J": 1, "weights": torch.float32},
            {"sequences": ((1, 4), (0, 2)), "heads": 2, "width": 33, "J": 3},
            {"sequences": ((1, 3),), "heads": 2, "width": 20, "J": 4, "bias": True},
            {"sequences": ((1, 8), (9, 1), (2, 2)), "heads": 2, "width": 20, "J": 4, "more": 2},
            {"sequences": ((4, 1),), "heads": 1, "width": 8, "J": 1, "more": 1},
            {"sequences": ((0, 5), (7, 1), (2, 3)), "heads": 3, "width": 20, "J": 3, **_PLAIN},
            {"sequences": (), "heads": 2, "width": 8, "J": 4},
        ),
        benches=(Bench({"sequences": ((500, 1),) * 64, "heads": 16, "width": 128, "J": 4}),),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 1e-2},
        cost=_convolution_cost,
    ),
)


def _ssd_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    T, H, Q, K, V = sum(case["lengths"]), *(case[name] for name in "HQKV")
    bounds = list(itertools.accumulate(case["lengths"], initial=0))
    bounds_N = torch.tensor(bounds, dtype=torch.int32, device=generator.device)
    q_TQK, k_TQK = (normal(generator, T, Q, K) / K**0.5 for _ in "qk")
    return {
        "q_TQK": q_TQK.to(dtype),
        "k_TQK": k_TQK.to(dtype),
        "u_THV": normal(generator, T, H, V).to(dtype),
        "g_TH": -uniform(generator, T, H) / 2,
        **Documents.of(bounds_N, T)._asdict(),
    }


def _ssd_fast(q_TQK, k_TQK, u_THV, g_TH, backend="triton", **fields):
    return ssd(q_TQK, k_TQK, u_THV, g_TH, Documents(**fields), backend)


def _ssd_cost(case: Case) -> tuple[Cost, Cost]:
    T, H, Q, K, V = sum(case["lengths"]), *(case[name] for name in "HQKV")
    read = 2 * T * (2 * Q * K + H * V) + 4 * T * H
    # Products of a chunk: Q K^T, its product with the values, and two with the state.
    products = T * H * (CHUNK * K + CHUNK * V + 2 * K * V)
    forward = Cost(read + 2 * T * H * V, 2.0 * products)
    return forward, Cost(2 * read + 2 * T * H * V, 5.0 * products)


_NANO = {"H": 64, "Q": 8, "K": 128, "V": 64}  # sizes of Nemotron-3-Nano

_SSD_SPECS = (
    KernelSpec(
        name="ssd",
        fast=_ssd_fast,
        reference=lambda **inputs: _ssd_fast(**inputs, backend="reference"),
        make_inputs=_ssd_inputs,
        cases=(
            {"lengths": (5, 64, 0, 70), "H": 2, "Q": 1, "K": 128, "V": 64},
            {"lengths": (0, 100), "H": 1, "Q": 1, "K": 64, "V": 128},
            {"lengths": (1,), "H": 4, "Q": 2, "K": 64, "V": 64},
            {"lengths": (0,), "H": 2, "Q": 2, "K": 64, "V": 64},
        ),
        benches=(
            Bench({"lengths": (16_384,), **_NANO}, check_case={"lengths": (700,), **_NANO}),
            Bench({"lengths": (4096,) * 4, **_NANO}, check_case={"lengths": (90, 300), **_NANO}),
        ),
        # Triton's interpreter truncates where a GPU rounds, which doubles each error.
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2e-2},
        cost=_ssd_cost,
        differentiable=("q_TQK", "k_TQK", "u_THV", "g_TH"),
        ops=(ssd_op, ssd_gradients_op),
        bad_inputs={
            "Q divides H": lambda i: i | {"q_TQK": i["q_TQK"][..., :32]},
            "widths of 64, 128": lambda i: (
                i | {name: i[name][..., :32].contiguous() for name in ("q_TQK", "k_TQK")}
            ),
            "one dtype": lambda i: i | {"u_THV": i["u_THV"].double()},
            "contiguous": lambda i: i | {"u_THV": i["u_THV"].mT.contiguous().mT},
        },
    ),
)

_STEP = {"rule": "ssd", "in_place": True, **_NANO}

_SSD_STEP_SPECS = (
    KernelSpec(
        name="ssd_step",
        fast=_step,
        reference=lambda **inputs: _step(**inputs, backend="reference"),
        make_inputs=_make_step_inputs,
        cases=tuple(
            {"rule": "ssd", **case}
            for case in (
                {"sequences": ((70, 60), (3, 1), (0, 65)), "H": 2, "Q": 1, "K": 128, "V": 64},
                {"sequences": ((63, 1), (64, 1), (10, 1)), "H": 4, "Q": 2, "K": 64, "V": 128},
                {"sequences": ((127, 2),), "H": 1, "Q": 1, "K": 64, "V": 64},
                {"sequences": (), "H": 2, "Q": 2, "K": 64, "V": 64},
            )
        ),
        benches=(
            Bench(
                {"sequences": ((500, 1),) * 64, **_STEP},
                check_case={"sequences": ((500, 1), (63, 1), (64, 1)), **_STEP},
            ),
            Bench(
                {"sequences": ((2048, 2048),), **_STEP},
                check_case={"sequences": ((128, 70), (65, 10)), **_STEP},
            ),
        ),
        # The tolerance is that of the recurrence, whose kernels it uses.
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2e-2},
        cost=_step_cost,
    ),
)


def _kda_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Draw inputs of as many queries as values, and gates of down to ``decay`` a token."""
    inputs = _make_inputs({**case, "Q": case["H"]}, dtype, generator)
    g_TH = inputs.pop("g_TH")
    shape = (*g_TH.shape, case["K"])
    # Most channels decay slowly and some fast, as trained ones do.
    g_THK = -case.get("decay", 0.5) * uniform(generator, *shape) ** case.get("skew", 1)
    if case.get("equal"):
        g_THK = g_TH[..., None].expand(shape).contiguous()
    names = {"q_TQK": "q_THK", "k_TQK": "k_THK"}
    inputs = {names.get(name, name): x for name, x in inputs.items()}
    order = ("q_THK", "k_THK", "v_THV", "g_THK", "beta_TH", *_FIELDS)
    return {name: (inputs | {"g_THK": g_THK})[name] for name in order}


def _kda_fast(q_THK, k_THK, v_THV, g_THK, beta_TH, backend="triton", **fields):
    scale = k_THK.shape[2] ** -0.5
    return kda(q_THK, k_THK, v_THV, g_THK, beta_TH, Documents(**fields), scale, backend)


def _kda_cost(case: Case) -> tuple[Cost, Cost]:
    T, H, K = sum(case["lengths"]), case["H"], case["K"]
    V = case.get("V", K)
    read = T * H * (2 * (2 * K + V) + 4 * K + 4)
    # The products of the gated delta rule. It takes one product for A and one for B, which take
    # one for each of six levels here. The others are not counted.
    products = T * H * (2 * CHUNK * K + CHUNK * (K + V) + 3 * K * V + CHUNK * V)
    forward = Cost(read + 2 * T * H * V, 2.0 * products)
    return forward, Cost(2 * read + 2 * T * H * V, 5.0 * products)


_KIMI = {"H": 32, "K": 128}  # sizes of Kimi-Linear-48B-A3B
_KDA_STEP = {"rule": "kda", "in_place": True, **_KIMI}

_KDA_SPECS = (
    KernelSpec(
        name="kda",
        fast=_kda_fast,
        reference=lambda **inputs: _kda_fast(**inputs, backend="reference"),
        make_inputs=_kda_inputs,
        cases=(
            {"lengths": (5, 64, 0, 70), "H": 2, "K": 64},
            {"lengths": (0, 100), "H": 1, "K": 128, "V": 64, "alike": True},
            {"lengths": (3, 130), "H": 1, "K": 64, "decay": 8.0, "skew": 4},
            {"lengths": (1,), "H": 2, "K": 64, "V": 128},
            {"lengths": (0,), "H": 2, "K": 64},
        ),
        benches=(
            Bench({"lengths": (16_384,), **_KIMI}, check_case={"lengths": (700,), **_KIMI}),
            Bench({"lengths": (4096,) * 4, **_KIMI}, check_case={"lengths": (90, 300), **_KIMI}),
        ),
        # Triton's interpreter truncates where a GPU rounds, which doubles each error.
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2e-2},
        cost=_kda_cost,
        differentiable=("q_THK", "k_THK", "v_THV", "g_THK", "beta_TH"),
        ops=(kda_op, kda_gradients_op),
        bad_inputs={
            r"\[T, H, K\] for q, k and g": lambda i: i | {"g_THK": i["g_THK"][..., :32]},
            "widths of 64, 128": lambda i: (
                i | {x: i[x][..., :32].contiguous() for x in ("q_THK", "k_THK", "g_THK")}
            ),
            "one dtype": lambda i: i | {"v_THV": i["v_THV"].double()},
            "contiguous": lambda i: i | {"g_THK": i["g_THK"].mT.contiguous().mT},
        },
    ),
    KernelSpec(
        name="kda_step",
        fast=_step,
        reference=lambda **inputs: _step(**inputs, backend="reference"),
        make_inputs=_make_step_inputs,
        cases=tuple(
            {"rule": "kda", **case}
            for case in (
                {"sequences": ((70, 60), (3, 1), (0, 65)), "H": 2, "K": 64},
                {"sequences": ((63, 1), (64, 1), (10, 1)), "H": 2, "K": 64, "V": 128},
                {"sequences": ((127, 2),), "H": 1, "K": 128, "V": 64},
                {"sequences": (), "H": 2, "K": 64},
            )
        ),
        benches=(
            Bench(
                {"sequences": ((500, 1),) * 64, **_KDA_STEP},
                check_case={"sequences": ((500, 1), (63, 1), (64, 1)), **_KDA_STEP},
            ),
            Bench(
                {"sequences": ((2048, 2048),), **_KDA_STEP},
                check_case={"sequences": ((128, 70), (65, 10)), **_KDA_STEP},
            ),
        ),
        # The tolerance is that of the rule, whose kernels it uses.
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2e-2},
        cost=_step_cost,
    ),
)

SPECS = (*_DELTA_SPECS, *_SSD_SPECS, *_SSD_STEP_SPECS, *_KDA_SPECS)


def recurrence(q_TQK, k_TQK, v_THV, g_TH, beta_TH, bounds_N, scale):
    """Compute the rule token by token, by its definition: [T, H, V] in the inputs' dtype.

    Without ``beta`` values are written unscaled. ``g`` is [T, H], or [T, H, K] for a gate of each
    channel.
    """
    g_THK = g_TH[..., None] if g_TH.dim() == 2 else g_TH
    repeats = v_THV.shape[1] // k_TQK.shape[1]
    q_THK, k_THK = (x.repeat_interleave(repeats, 1) for x in (q_TQK, k_TQK))
    out = []
    for begin, end in itertools.pairwise(bounds_N.tolist()):
        state = v_THV.new_zeros(v_THV.shape[1], k_THK.shape[2], v_THV.shape[2])
        for t in range(begin, end):
            state = state * g_THK[t].exp()[:, :, None]
            u_HV = v_THV[t]
            if beta_TH is not None:
                read = torch.einsum("hkv,hk->hv", state, k_THK[t])
                u_HV = beta_TH[t][:, None] * (u_HV - read)
            state = state + k_THK[t][:, :, None] * u_HV[:, None, :]
            out.append(scale * torch.einsum("hkv,hk->hv", state, q_THK[t]))
    return torch.stack(out)
