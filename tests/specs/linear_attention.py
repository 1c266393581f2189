"""Specs of the gated delta rule, and of Mamba-2's recurrence."""

import itertools

import torch

from moetrain.kernels.linear_attention.gated_delta import (
    CHUNK,
    Documents,
    _gated_delta,
    _gated_delta_gradients,
    gated_delta,
)
from moetrain.kernels.linear_attention.ssd import _ssd, _ssd_gradients, ssd
from specs.spec import Bench, Case, Cost, Inputs, KernelSpec, normal, uniform

_FIELDS = Documents._fields


def _make_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    T, H, Q, K, V = sum(case["lengths"]), case["H"], case["Q"], case["K"], case.get("V", case["K"])
    bounds = list(itertools.accumulate(case["lengths"], initial=0))
    bounds_N = torch.tensor(bounds, dtype=torch.int32, device=generator.device)
    q_TQK, k_TQK = (torch.nn.functional.normalize(normal(generator, T, Q, K), dim=-1) for _ in "qk")
    if case.get("alike"):  # one key: T is far from the identity
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


_SIZES = {"H": 32, "Q": 32, "K": 128}

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
        # A GPU is within 4.2e-3 in bf16. Triton's interpreter cuts numbers off where a GPU rounds
        # them, which doubles each error: up to 1.7e-2.
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2e-2},
        cost=_cost,
        differentiable=("q_TQK", "k_TQK", "v_THV", "g_TH", "beta_TH"),
        ops=(_gated_delta, _gated_delta_gradients),
        bad_inputs={
            "Q divides H": lambda i: i | {"q_TQK": i["q_TQK"][..., :32]},
            "widths of 64, 128": lambda i: (
                i | {name: i[name][..., :32].contiguous() for name in ("q_TQK", "k_TQK")}
            ),
            "one dtype": lambda i: i | {"v_THV": i["v_THV"].double()},
            "contiguous": lambda i: i | {"v_THV": i["v_THV"].mT.contiguous().mT},
        },
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
    # Products of a chunk: Q K^T and what it weighs, and two with the state.
    products = T * H * (CHUNK * K + CHUNK * V + 2 * K * V)
    forward = Cost(read + 2 * T * H * V, 2.0 * products)
    return forward, Cost(2 * read + 2 * T * H * V, 5.0 * products)


_NANO = {"H": 64, "Q": 8, "K": 128, "V": 64}  # of Nemotron-3-Nano

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
        # Triton's interpreter cuts numbers off where a GPU rounds them, which doubles each error.
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2e-2},
        cost=_ssd_cost,
        differentiable=("q_TQK", "k_TQK", "u_THV", "g_TH"),
        ops=(_ssd, _ssd_gradients),
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

SPECS = (*_DELTA_SPECS, *_SSD_SPECS)


def recurrence(q_TQK, k_TQK, v_THV, g_TH, beta_TH, bounds_N, scale):
    """The rule token by token, as it is defined: [T, H, V] in the inputs' dtype.

    Without ``beta`` values are written as they are.
    """
    repeats = v_THV.shape[1] // k_TQK.shape[1]
    q_THK, k_THK = (x.repeat_interleave(repeats, 1) for x in (q_TQK, k_TQK))
    out = []
    for begin, end in itertools.pairwise(bounds_N.tolist()):
        state = v_THV.new_zeros(v_THV.shape[1], k_THK.shape[2], v_THV.shape[2])
        for t in range(begin, end):
            state = state * g_TH[t].exp()[:, None, None]
            u_HV = v_THV[t]
            if beta_TH is not None:
                read = torch.einsum("hkv,hk->hv", state, k_THK[t])
                u_HV = beta_TH[t][:, None] * (u_HV - read)
            state = state + k_THK[t][:, :, None] * u_HV[:, None, :]
            out.append(scale * torch.einsum("hkv,hk->hv", state, q_THK[t]))
    return torch.stack(out)
