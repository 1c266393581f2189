"""FP32-accumulated reduction: the local half of a reduce-scatter that sends bf16.

    out = chunk_0 + chunk_1 + ... + chunk_{R-1}        (+ out, when accumulating)

Each rank sends its bf16 contribution once (an all-to-all), and the receiver adds the R chunks in
rank order in fp32: no partial sum is ever rounded to bf16, unlike in a ring, and the result does
not depend on timing. Worked example: chunks [[1], [2]], out [10] accumulating: [13].

It leaves out the collective, which is ``parallel``'s, and gradients: it runs inside a backward.

Legend: R chunks (ranks), N elements a chunk.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# (Triton's launch settings and unrolled ranges are not typed.)

import torch

from moetrain.kernels.backend import Backend, use_fast
from moetrain.kernels.portable_triton import tl, triton
from moetrain.kernels.spec import Bench, Case, Cost, Inputs, KernelSpec, normal

# Launch settings, measured on one H200.
BLOCK, WARPS = 1024, 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sum_chunks(
    chunks_RN: torch.Tensor,
    out_N: torch.Tensor | None = None,
    accumulate: bool = False,
    backend: Backend = "auto",
) -> torch.Tensor:
    """The fp32 sum over R, in ``out_N`` (None: a new tensor), which is returned.

    Args:
        chunks_RN: bf16, fp16 or fp32, contiguous, R at least 1. Fast where N is a multiple of 16:
            the rows of others are not aligned for 16-byte loads.
        out_N: contiguous, written in place; fp32, or what the sum is rounded to (the cast of one
            chunk, at the speed of memory).
        accumulate: add to what ``out_N`` (fp32) holds instead of overwriting it.

    Raises:
        ValueError: shapes, dtypes or strides other than these, or ``accumulate`` without ``out_N``.
    """
    if chunks_RN.dim() != 2 or not chunks_RN.shape[0] or not chunks_RN.is_contiguous():
        raise ValueError(
            f"sum_chunks: chunks were given as {tuple(chunks_RN.shape)} with strides "
            f"{chunks_RN.stride()}; it takes a contiguous [R, N] with R at least 1"
        )
    if out_N is None:
        if accumulate:
            raise ValueError("sum_chunks: accumulate was given without out_N; it takes both")
        out_N = chunks_RN.new_empty(chunks_RN.shape[1], dtype=torch.float32)
    fits = out_N.shape == chunks_RN.shape[1:] and out_N.is_contiguous()
    if not fits or out_N.dtype not in (DTYPES[:1] if accumulate else DTYPES):
        raise ValueError(
            f"sum_chunks: out was given as {out_N.dtype} {tuple(out_N.shape)} with strides "
            f"{out_N.stride()}; with chunks of {tuple(chunks_RN.shape)} it takes a contiguous "
            f"[{chunks_RN.shape[1]}] of {'float32' if accumulate else 'a float dtype'}"
        )
    if not use_fast(backend, chunks_RN):
        return out_N.copy_(sum_chunks_reference(chunks_RN, out_N, accumulate))
    _sum_chunks(out_N, chunks_RN, accumulate)
    return out_N


def sum_chunks_reference(
    chunks_RN: torch.Tensor,
    out_N: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """:func:`sum_chunks` in plain torch; leaves ``out_N`` as it is."""
    wide = torch.promote_types(chunks_RN.dtype, torch.float32)
    sum_N = torch.zeros(chunks_RN.shape[1], dtype=wide, device=chunks_RN.device)
    for chunk_N in chunks_RN:
        sum_N = sum_N + chunk_N
    return sum_N + out_N if accumulate and out_N is not None else sum_N


@torch.library.custom_op("moetrain::sum_chunks", mutates_args=("out_N",))
def _sum_chunks(out_N: torch.Tensor, chunks_RN: torch.Tensor, accumulate: bool) -> None:
    chunks, size = chunks_RN.shape
    grid = (triton.cdiv(size, BLOCK),)
    _sum_kernel[grid](out_N, chunks_RN, size, chunks, accumulate, BLOCK, num_warps=WARPS)


@_sum_chunks.register_fake
def _(out_N: torch.Tensor, chunks_RN: torch.Tensor, accumulate: bool) -> None:
    return None


@triton.jit
def _sum_kernel(
    out, chunks, size, CHUNKS: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    chunk = chunks + at
    total = tl.zeros([BLOCK], tl.float32)
    # Unrolled, so that the loads of several chunks are in flight together.
    for _ in tl.static_range(CHUNKS):
        total += tl.load(chunk, mask).to(tl.float32)
        chunk += size
    if ACCUMULATE:
        total += tl.load(out + at, mask)
    tl.store(out + at, total.to(out.dtype.element_ty), mask)


def _make_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    chunks, size, accumulate = case["R"], case["N"], case.get("accumulate", False)
    return {
        "chunks_RN": normal(generator, chunks, size).to(dtype),
        "out_N": normal(generator, size) if accumulate else None,
        "accumulate": accumulate,
    }


def _fast(chunks_RN: torch.Tensor, out_N: torch.Tensor | None, accumulate: bool) -> torch.Tensor:
    """Without touching its inputs, so that it can run twice on them."""
    out_N = None if out_N is None else out_N.clone()
    return sum_chunks(chunks_RN, out_N, accumulate, backend="triton")


def _cost(case: Case) -> tuple[Cost, Cost]:
    return Cost(bytes=case["N"] * (2 * case["R"] + 4)), Cost()


_TARGET = {"forward_fraction": 0.85}
_BENCH_SIZE = 32 << 20  # elements: 64 MiB of bf16 a chunk

SPECS = (
    KernelSpec(
        name="sum_chunks",
        fast=_fast,
        reference=sum_chunks_reference,
        make_inputs=_make_inputs,
        cases=(
            {"R": 4, "N": 100},
            {"R": 1, "N": 1},
            {"R": 8, "N": 2049, "accumulate": True},
            {"R": 64, "N": 7},
            {"R": 2, "N": 0},
        ),
        benches=tuple(Bench({"R": r, "N": _BENCH_SIZE}, _TARGET) for r in (2, 4, 8)),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-6},
        cost=_cost,
        ops=(_sum_chunks,),
        bad_inputs={
            r"takes a contiguous \[R, N\]": lambda i: i | {"chunks_RN": i["chunks_RN"][:, ::2]},
            "without out_N": lambda i: i | {"accumulate": True},
            r"out was given as torch.float32 \(99,\)": lambda i: i | {"out_N": torch.zeros(99)},
        },
    ),
)
