"""FP32-accumulated reduction: the local half of a reduce-scatter that sends bf16.

    out = chunk_0 + chunk_1 + ... + chunk_{R-1}        (+ out, when accumulating)

The receiver adds the ranks' chunks in rank order: no partial sum is rounded to bf16, unlike in a
ring, and the result does not depend on timing. The kernel also adds up the squares of the stored
sums, block by block, so that the norm of a gradient takes no pass of its own.

The result may be stored in bf16 (``optim.gradient_dtype``), rounded once, to nearest. Worked
example: chunks [[1], [2^-9]], out [2^-8] in bf16, accumulating: 1 + 3 * 2^-9, stored as 1 + 2^-7.

Left out on purpose: the collective (it is in ``parallel``), and a backward of its own, since the
kernel runs inside a backward.

Legend: R chunks (ranks), N elements a chunk, B blocks of 1024 elements.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import torch.nn.functional as F

from moetrain.runtime.backend import Backend, launch, refusal, tl, triton, use_fast

# Launch settings, measured on one H200.
_BLOCK, _WARPS = 1024, 4
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SUM_DTYPES = _DTYPES[:2]
"""The dtypes of tensors that a sum may be added to."""


def sum_chunks(
    chunks_RN: torch.Tensor,
    out_N: torch.Tensor | None = None,
    accumulate: bool = False,
    backend: Backend = "auto",
    squares_B: torch.Tensor | None = None,
    own_N: torch.Tensor | None = None,
    own: int = -1,
) -> torch.Tensor:
    """Write the sum over R, made in fp32, to ``out_N`` (None: a new tensor) and return it.

    Args:
        chunks_RN: bf16, fp16 or fp32, contiguous; fast where N is a multiple of 16.
        out_N: contiguous; fp32, or the dtype that the sum is rounded to.
        accumulate: add, in fp32, to the contents of ``out_N`` (fp32 or bf16).
        squares_B: fp32: receives each block's sum of squares of the new ``out_N``.
        own_N: this rank's chunk, which was not sent; it is read in place of row ``own``.
        own: the index of this rank's chunk.
    """
    if chunks_RN.dim() != 2 or not chunks_RN.shape[0] or not chunks_RN.is_contiguous():
        takes = "a contiguous [R, N] with R at least 1"
        raise refusal("sum_chunks", takes, chunks=chunks_RN)
    if out_N is None:
        if accumulate:
            raise refusal("sum_chunks", "accumulate only with an out_N", accumulate=accumulate)
        out_N = chunks_RN.new_empty(chunks_RN.shape[1], dtype=torch.float32)
    fits = out_N.shape == chunks_RN.shape[1:] and out_N.is_contiguous()
    if not fits or out_N.dtype not in (_SUM_DTYPES if accumulate else _DTYPES):
        dtypes = "float32 or bfloat16" if accumulate else "a float dtype"
        takes = f"a contiguous [{chunks_RN.shape[1]}] of {dtypes}"
        raise refusal("sum_chunks", takes, chunks=chunks_RN, out=out_N)
    blocks = num_blocks(out_N.numel())
    if squares_B is not None and (squares_B.shape, squares_B.dtype) != ((blocks,), torch.float32):
        takes = f"float32 [{blocks}] for {out_N.numel()} elements"
        raise refusal("sum_chunks", takes, squares=squares_B)
    if own_N is not None:
        fits = own_N.shape == out_N.shape and own_N.is_contiguous()
        if not fits or own_N.dtype != chunks_RN.dtype or not 0 <= own < chunks_RN.shape[0]:
            was_given = {f"chunk {own} as": own_N, "chunks": chunks_RN}
            raise refusal(
                "sum_chunks", "own_N like a contiguous chunk, and own as its index", **was_given
            )
    if use_fast(backend, chunks_RN):
        # In torch 2.11 an argument that an op writes must be a tensor.
        none = out_N.new_empty(0, dtype=torch.float32)
        squares_B = none if squares_B is None else squares_B
        launch(
            sum_chunks_op, (out_N, squares_B), out_N, chunks_RN, accumulate, squares_B, own_N, own
        )
        return out_N
    wide = torch.promote_types(chunks_RN.dtype, torch.float32)
    sum_N = torch.zeros(chunks_RN.shape[1], dtype=wide, device=chunks_RN.device)
    for i, chunk_N in enumerate(chunks_RN):
        sum_N = sum_N + (chunk_N if own_N is None or i != own else own_N)
    out_N.copy_(sum_N + out_N if accumulate else sum_N)
    if squares_B is not None:
        wide_N = F.pad(out_N.float(), (0, blocks * _BLOCK - out_N.numel()))
        squares_B.copy_(wide_N.view(-1, _BLOCK).square().sum(1))
    return out_N


def num_blocks(size: int) -> int:
    """Return the number of blocks of ``size`` elements."""
    return -(-size // _BLOCK)


@torch.library.custom_op("moetrain::sum_chunks", mutates_args=("out_N", "squares_B"))
def sum_chunks_op(
    out_N: torch.Tensor,
    chunks_RN: torch.Tensor,
    accumulate: bool,
    squares_B: torch.Tensor,
    own_N: torch.Tensor | None,
    own: int,
) -> None:
    """Write the sum in place; an empty ``squares_B`` stands for none."""
    chunks, size = chunks_RN.shape
    _sum_kernel[(num_blocks(size),)](
        out_N,
        chunks_RN,
        squares_B if squares_B.numel() else None,
        own_N,
        size,
        CHUNKS=chunks,
        OWN=-1 if own_N is None else own,
        ACCUMULATE=accumulate,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


@sum_chunks_op.register_fake
def _(
    out_N: torch.Tensor,
    chunks_RN: torch.Tensor,
    accumulate: bool,
    squares_B: torch.Tensor,
    own_N: torch.Tensor | None,
    own: int,
) -> None:
    """Write in place; there is nothing to return."""


@triton.jit
def _sum_kernel(
    out,
    chunks,
    squares,
    own,
    size,
    CHUNKS: tl.constexpr,
    OWN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    chunk = chunks + at
    total = tl.zeros([BLOCK], tl.float32)
    # Unrolled, so that the loads of several chunks are in flight together.
    for i in tl.static_range(CHUNKS):
        if i == OWN:
            total += tl.load(own + at, mask, 0.0).to(tl.float32)
        else:
            total += tl.load(chunk, mask, 0.0).to(tl.float32)
        chunk += size
    if ACCUMULATE:
        total += tl.load(out + at, mask, 0.0).to(tl.float32)
    stored = total.to(out.dtype.element_ty)
    tl.store(out + at, stored, mask)
    if squares is not None:
        total = stored.to(tl.float32)
        tl.store(squares + tl.program_id(0), tl.sum(total * total, 0))
