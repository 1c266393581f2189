"""Specs of packed attention."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from moetrain.kernels.attention.attention import (
    AttentionMask,
    attention_packed,
    attention_packed_backward_op,
    attention_packed_op,
)
from moetrain.kernels.attention.index_keys import select_keys, select_keys_op
from moetrain.kernels.attention.peaks import raise_peaks, raise_peaks_op
from moetrain.kernels.attention.sinks import attention_packed_with_sinks, attention_with_sinks_op
from moetrain.kernels.attention.sparse import (
    sparse_attention,
    sparse_attention_gradients_op,
    sparse_attention_op,
)
from moetrain.runtime.backend import Backend
from tests.lib.specs.spec import Bench, Case, Cost, Inputs, KernelSpec, normal, uniform


def _make_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    lengths = case["lengths"]
    tokens, heads, kv_heads, width = sum(lengths), case["H"], case["G"], case["d"]
    v_width = case.get("v", width)
    ends = [0, *itertools.accumulate(lengths)]
    keys, of_keys = tokens, {}
    if before := case.get("before"):  # each document first has keys that have no query of their own
        first, *counts, last = (before[0], *before[1:-1], before[-1])
        both = (q + k for q, k in zip(lengths, counts, strict=True))
        starts = [*itertools.accumulate(both, initial=first)]
        keys = starts[-1] + last
        of_keys["cu_seqlens_k"] = torch.tensor(starts, dtype=torch.int32, device=generator.device)
    return {
        "q_THd": normal(generator, tokens, heads, width).to(dtype),
        "k_TGd": normal(generator, keys, kv_heads, width).to(dtype),
        "v_TGv": normal(generator, keys, kv_heads, v_width).to(dtype),
        "cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=generator.device),
        "max_seqlen": max(keys * bool(of_keys), *lengths),
        "window": case.get("window"),
        "scale": case.get("scale"),
        **of_keys,
    }


def _cost(case: Case) -> tuple[Cost, Cost]:
    tokens, heads, kv_heads, width = sum(case["lengths"]), case["H"], case["G"], case["d"]
    v_width = case.get("v", width)
    # Two products per pair of tokens, half of the pairs masked. Backward: p again, dp, dq, dk, dv.
    pairs = sum(heads * length**2 for length in case["lengths"])
    forward, backward = width + v_width, 3 * width + 2 * v_width
    row_bytes = 2.0 * tokens * (width + v_width) * (heads + kv_heads)  # in bf16
    return Cost(row_bytes, 1.0 * pairs * forward), Cost(2 * row_bytes, 1.0 * pairs * backward)


_QWEN3 = {"H": 32, "G": 4, "d": 128}
_LATENT = {"H": 16, "G": 16, "d": 192, "v": 128, "scale": 0.1147}
_MIX = (5000, 300, 2100, 700, 3300, 1500, 900, 1784, 800)

ATTENTION_PACKED = KernelSpec(
    name="attention_packed",
    fast=attention_packed,
    reference=partial(attention_packed, backend="reference"),
    make_inputs=_make_inputs,
    cases=(
        {"lengths": (100, 7, 150), "H": 4, "G": 2, "d": 16},
        {"lengths": (1,), "H": 2, "G": 2, "d": 8},
        {"lengths": (0, 7, 0, 1, 0), "H": 6, "G": 2, "d": 16},
        {"lengths": (1, 30, 64, 5), "H": 3, "G": 1, "d": 64, "window": 16},
        {"lengths": (257,), "H": 2, "G": 1, "d": 32, "window": 2},
        {"lengths": (*(1,) * 40, 20), "H": 2, "G": 1, "d": 16},
        {"lengths": (100, 7, 33), "H": 2, "G": 2, "d": 24, "v": 16, "scale": 0.3},
        {"lengths": (1, 70, 0, 9), "H": 4, "G": 2, "d": 16, "v": 40, "window": 8},
        {"lengths": (130, 5), "H": 2, "G": 2, "d": 192, "v": 128, "scale": 0.1147},
        {"lengths": (130, 5), "H": 2, "G": 2, "d": 256},
        {"lengths": (30, 7, 1), "before": (3, 100, 0, 0, 5), "H": 4, "G": 2, "d": 16},
        {"lengths": (0, 70, 0), "before": (0, 0, 65, 0, 0), "H": 2, "G": 1, "d": 64, "window": 33},
        {"lengths": (5, 64), "before": (9, 131, 0, 2), "H": 2, "G": 2, "d": 192, "v": 128},
    ),
    benches=(
        Bench({"lengths": (4096,) * 4, **_QWEN3}, targets={"total_tflops": 470}),
        Bench({"lengths": _MIX, **_QWEN3}, targets={"total_tflops": 440}),
        Bench({"lengths": (1024,) * 16, **_QWEN3}, targets={"total_tflops": 300}),
        Bench({"lengths": (4096,) * 4, **_QWEN3, "window": 512}),
        Bench({"lengths": (4096,) * 4, **_LATENT}),
        Bench({"lengths": _MIX, **_LATENT}),
        Bench({"lengths": (4096,) * 4, "H": 20, "G": 20, "d": 256}),
    ),
    tolerance={torch.float32: 2e-6, torch.bfloat16: 6e-3},
    cpu_dtypes=(torch.float32,),
    cost=_cost,
    differentiable=("q_THd", "k_TGd", "v_TGv"),
    ops=(attention_packed_op, attention_packed_backward_op),
    bad_inputs={
        r"H a multiple of G": lambda x: x | {"q_THd": x["q_THd"][:, :3]},
        r"\[T, G, v\]": lambda x: x | {"v_TGv": x["v_TGv"][:, :1]},
        "in one dtype": lambda x: x | {"k_TGd": x["k_TGd"].double()},
        r"documents \+ 1\] in int32": lambda x: x | {"cu_seqlens": x["cu_seqlens"].long()},
        "window 0": lambda x: x | {"window": 0},
        "cu_seqlens_k in the dtype and shape of cu_seqlens": lambda x: (
            x | {"cu_seqlens_k": x["cu_seqlens"][1:]}
        ),
        "at least a key for each query": lambda x: (
            x | {"cu_seqlens_k": x["cu_seqlens"].clamp(max=200), "check": True}
        ),
        r"at most max_seqlen=149": lambda x: x | {"max_seqlen": 149, "check": True},
        r"from 0 to T=257": lambda x: x | {"cu_seqlens": x["cu_seqlens"][:-1], "check": True},
    },
)


def _sink_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    inputs = _make_inputs(case, dtype, generator)
    return inputs | {"sinks_H": (3 * normal(generator, case["H"])).to(dtype)}


ATTENTION_WITH_SINKS = replace(
    ATTENTION_PACKED,
    name="attention_packed_with_sinks",
    fast=attention_packed_with_sinks,
    reference=partial(attention_packed_with_sinks, backend="reference"),
    make_inputs=_sink_inputs,
    # In the wider one the sinks' gradients nearly cancel, so rounding errors grow a hundredfold.
    cases=tuple(case for case in ATTENTION_PACKED.cases if case["d"] < 256),
    benches=(
        Bench({"lengths": (4096,) * 4, "H": 64, "G": 8, "d": 64}),
        Bench({"lengths": (4096,) * 4, "H": 64, "G": 8, "d": 64, "window": 128}),
    ),
    # A sink's gradient is a sum over all tokens, with both signs, of results rounded to bf16.
    tolerance={torch.float32: 2e-6, torch.bfloat16: 2e-2},
    differentiable=("q_THd", "k_TGd", "v_TGv", "sinks_H"),
    ops=(attention_with_sinks_op,),
    bad_inputs={
        r"takes \[T, H, d\] and \[H\]": lambda x: x | {"sinks_H": x["sinks_H"][1:]},
        "window 0": lambda x: x | {"window": 0},
        r"at most max_seqlen=149": lambda x: x | {"max_seqlen": 149, "check": True},
    },
)


def _peaks_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    inputs = _make_inputs(case, dtype, generator)
    of_mask = ("cu_seqlens", "cu_seqlens_k", "window")
    return {
        "peaks_H": case.get("begun", 0.0) + torch.zeros(case["H"], device=generator.device),
        "q_BSHd": inputs["q_THd"][None],
        "k_BSGd": inputs["k_TGd"][None],
        "mask": AttentionMask("cudnn", **{name: inputs.get(name) for name in of_mask}),
        "scale": inputs["scale"],
    }


def _peaks_of(backend: Backend, *, peaks_H: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Leave the inputs unchanged, so that it can run twice on them."""
    peaks_H = peaks_H.clone()
    raise_peaks(peaks_H, **inputs, backend=backend)
    return peaks_H


def _peaks_cost(case: Case) -> tuple[Cost, Cost]:
    tokens, heads, kv_heads, width = sum(case["lengths"]), case["H"], case["G"], case["d"]
    pairs = sum(heads * length**2 for length in case["lengths"])  # half of the pairs are masked
    return Cost(2.0 * tokens * width * (heads + kv_heads), 1.0 * pairs * width), Cost()


SCORE_PEAKS = KernelSpec(
    name="score_peaks",
    fast=partial(_peaks_of, "triton"),
    reference=partial(_peaks_of, "reference"),
    make_inputs=_peaks_inputs,
    cases=(
        *ATTENTION_PACKED.cases,
        {"lengths": (20, 30), "H": 2, "G": 2, "d": 16, "begun": 2.0},
        {"lengths": (0, 0), "H": 2, "G": 1, "d": 16},
    ),
    benches=(
        Bench({"lengths": (4096,) * 4, **_QWEN3}),
        Bench({"lengths": _MIX, **_QWEN3}),
        Bench({"lengths": (4096,) * 4, **_LATENT}),
    ),
    tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-6},  # products of bf16 are exact in fp32
    cost=_peaks_cost,
    ops=(raise_peaks_op,),
    bad_inputs={
        r"takes \[H\], \[B, S, H, d\]": lambda x: x | {"peaks_H": x["peaks_H"][1:]},
        "queries and keys in one dtype": lambda x: x | {"k_BSGd": x["k_BSGd"].double()},
        "mask of flex": lambda x: x | {"mask": AttentionMask("flex")},
        "takes bf16, fp16 or fp32": lambda x: (
            x | {name: x[name].double() for name in ("q_BSHd", "k_BSGd")}
        ),
    },
)


def _sparse_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Draw inputs of packed documents, whose tokens select among the keys up to their own.

    ``before``: the number of further keys of each document, before its first token. ``sink``: every
    token selects its document's first key. ``gaps``: places without a key are among others, and
    the second token has no key. ``more``: the number of keys behind the last document.
    """
    H, K, width, before = case["H"], case["K"], case["c"] + case["r"], case.get("before", 0)
    rows: list[torch.Tensor] = []
    start = 0
    for length in case["lengths"]:
        keys = before + length
        scores_SL = normal(generator, length, keys)
        if case.get("sink"):
            scores_SL[:, :1] = torch.inf
        last_S1 = torch.arange(before, keys, device=generator.device)[:, None]
        is_hidden_SL = torch.arange(keys, device=generator.device) > last_S1
        found = scores_SL.masked_fill(is_hidden_SL, -torch.inf).topk(min(K, keys))
        keys_SK = (found.indices + start).masked_fill(found.values == -torch.inf, -1)
        none_SK = keys_SK.new_full((length, K - keys_SK.shape[1]), -1)
        rows.append(torch.cat((keys_SK, none_SK), dim=1))
        start += keys
    keys_TK = torch.cat(rows).int()
    if case.get("gaps"):
        keys_TK[uniform(generator, *keys_TK.shape) < 0.3] = -1
        keys_TK[1] = -1
    return {
        "q_THw": normal(generator, len(keys_TK), H, width).to(dtype),
        "kv_Lw": normal(generator, start + case.get("more", 0), width).to(dtype),
        "keys_TK": keys_TK,
        "scale": width**-0.5,
        "value_dim": case["c"],
    }


def _sparse_cost(case: Case) -> tuple[Cost, Cost]:
    T, H, K, c, w = sum(case["lengths"]), case["H"], case["K"], case["c"], case["c"] + case["r"]
    pairs = sum(min(K, i + 1) for length in case["lengths"] for i in range(length))
    # Backward: the scores again, and the products for dp, dq and dkv, whose values have two.
    read = 2.0 * T * (H * w + w) + 4 * T * K
    forward = Cost(read + 2 * T * H * c, 2.0 * pairs * H * (w + c))
    return forward, Cost(2 * read + 4 * T * H * c, 2.0 * pairs * H * (3 * w + 2 * c))


_GLM_5 = {"H": 64, "K": 2048, "c": 512, "r": 64}
_CHECKED = {**_GLM_5, "K": 200}

SPARSE_ATTENTION = KernelSpec(
    name="sparse_attention",
    fast=partial(sparse_attention, backend="triton"),
    reference=partial(sparse_attention, backend="reference"),
    make_inputs=_sparse_inputs,
    cases=(
        {"lengths": (5, 1, 3), "H": 3, "K": 4, "c": 32, "r": 16},
        {"lengths": (1,), "H": 1, "K": 1, "c": 16, "r": 16},
        {"lengths": (12, 0, 7), "H": 20, "K": 9, "c": 16, "r": 32, "gaps": True, "more": 3},
        {"lengths": (1, 2), "before": 66, "H": 2, "K": 66, "c": 512, "r": 64, "sink": True},
        {"lengths": (0,), "H": 2, "K": 4, "c": 16, "r": 16},
    ),
    benches=(
        Bench({"lengths": (8192,), **_GLM_5}, check_case={"lengths": (700,), **_CHECKED}),
        Bench({"lengths": (3000, 5192), **_GLM_5}, check_case={"lengths": (90, 300), **_CHECKED}),
        Bench(
            {"lengths": (8192,), **_GLM_5, "H": 128},
            check_case={"lengths": (400,), **_CHECKED, "H": 128},
        ),
    ),
    # Triton's interpreter truncates where a GPU rounds, which doubles each error.
    tolerance={torch.float32: 5e-6, torch.bfloat16: 1.5e-2},
    cost=_sparse_cost,
    differentiable=("q_THw", "kv_Lw"),
    ops=(sparse_attention_op, sparse_attention_gradients_op),
    bad_inputs={
        r"\[T, H, w\], \[L, w\] and \[T, K\]": lambda x: x | {"kv_Lw": x["kv_Lw"][:, 1:]},
        "values of at most w": lambda x: x | {"value_dim": 49},
        "in one dtype": lambda x: x | {"kv_Lw": x["kv_Lw"].double()},
        "keys in int32": lambda x: x | {"keys_TK": x["keys_TK"].long()},
        "powers of two from 16": lambda x: x | {"value_dim": 40},
        "bf16, fp16 or fp32": lambda x: x | {n: x[n].double() for n in ("q_THw", "kv_Lw")},
        "at most 256 heads": lambda x: x | {"q_THw": x["q_THw"].repeat(1, 100, 1)},
        "contiguous": lambda x: x | {"kv_Lw": x["kv_Lw"].mT.contiguous().mT},
    },
)


def _index_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Draw small whole numbers, of which every dtype computes the same scores; many are equal.

    That needs widths whose root is a power of two. The queries of a row are its last tokens.
    ``first``: the first key that they may see. ``more``: so many more keys than there are.
    """
    B, S, L, h, d = (case[name] for name in "BSLhd")

    def whole(*shape: int) -> torch.Tensor:
        return (4 * uniform(generator, *shape) - 2).round()

    more = case.get("more", 0)
    last_BS = torch.arange(L - S + more, L + more, device=generator.device).expand(B, S)
    first_BS = last_BS.clamp(max=case.get("first", 0))
    return {
        "q_BShd": whole(B, S, h, d).to(dtype),
        "k_BLd": whole(B, L, d).to(dtype),
        "w_BSh": whole(B, S, h),
        "seen_BS2": torch.stack((first_BS, last_BS), dim=-1),
        "topk": case["K"],
    }


def _index_cost(case: Case) -> tuple[Cost, Cost]:
    B, S, L, h, d = (case[name] for name in "BSLhd")
    pairs = B * S * (L - S / 2)
    bytes_needed = B * (2 * d * (S * h + L) + 4 * S * (h + case["K"]))
    return Cost(bytes_needed, 2.0 * pairs * h * d), Cost()


_INDEXER = {"h": 32, "d": 128, "K": 2048}
_EXACT = {**_INDEXER, "d": 64}

SELECT_KEYS = KernelSpec(
    name="select_keys",
    fast=partial(select_keys, backend="triton"),
    reference=partial(select_keys, backend="reference"),
    make_inputs=_index_inputs,
    cases=(
        {"B": 2, "S": 9, "L": 9, "h": 3, "d": 16, "K": 4, "first": 2},
        {"B": 1, "S": 1, "L": 1, "h": 1, "d": 16, "K": 3},
        {"B": 2, "S": 3, "L": 150, "h": 5, "d": 64, "K": 40},
        {"B": 3, "S": 1, "L": 40, "h": 64, "d": 64, "K": 39, "more": 2},
        {"B": 1, "S": 37, "L": 37, "h": 12, "d": 16, "K": 1},
        {"B": 1, "S": 0, "L": 0, "h": 2, "d": 16, "K": 4},
    ),
    benches=(
        Bench(
            {"B": 1, "S": 8192, "L": 8192, **_INDEXER},
            check_case={"B": 1, "S": 99, "L": 3000, **_EXACT},
        ),
        Bench(
            {"B": 1, "S": 32_768, "L": 32_768, **_INDEXER},
            check_case={"B": 2, "S": 9, "L": 5000, **_EXACT},
        ),
        Bench(
            {"B": 64, "S": 1, "L": 8192, **_INDEXER},
            check_case={"B": 9, "S": 1, "L": 5000, **_EXACT},
        ),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    cost=_index_cost,
    ops=(select_keys_op,),
    bad_inputs={
        r"\[B, S, h, d\], \[B, L, d\]": lambda x: x | {"k_BLd": x["k_BLd"][..., 1:]},
        "at least one key": lambda x: x | {"topk": 0},
        "weights of fp32": lambda x: x | {"w_BSh": x["w_BSh"].bfloat16()},
        "powers of two from 16": lambda x: x | {n: x[n][..., :12] for n in ("q_BShd", "k_BLd")},
        "at most 128 heads": lambda x: (
            x | {"q_BShd": x["q_BShd"].repeat(1, 1, 50, 1), "w_BSh": x["w_BSh"].repeat(1, 1, 50)}
        ),
    },
)

SPECS = (
    SCORE_PEAKS,
    SPARSE_ATTENTION,
    SELECT_KEYS,
    ATTENTION_PACKED,
    replace(
        ATTENTION_PACKED,
        name="attention_batch_invariant",
        fast=partial(attention_packed, backend="exact"),
        bad_inputs={"window 0": lambda x: x | {"window": 0}},
    ),
    ATTENTION_WITH_SINKS,
    replace(
        ATTENTION_WITH_SINKS,
        name="attention_with_sinks_batch_invariant",
        fast=partial(attention_packed_with_sinks, backend="exact"),
        bad_inputs={"window 0": lambda x: x | {"window": 0}},
    ),
)
