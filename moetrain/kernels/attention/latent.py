"""Attention of generation within the latents of multi-head latent attention (arXiv 2405.04434).

A page of the cache has a row ``[c | r]`` for each token: the latent of its keys and values, and the
rotated key that all heads share. The matrices of a head that expand latents, W_k [n, c] and W_v
[v, c], are absorbed into its query and its result, and the attention in between has one key for all
heads, whose first elements are the value::

    q.k = (q_nope W_k) . c + q_rope . r          o = W_v sum_i p_i c_i

Rows have the same bits in any batch, in a chunk of a prompt and in a step of single tokens. A row
is a query of one head. Keys are counted from the start of their sequence. A row's result is a sum
over splits of ``_SPLIT`` keys, in ascending order, and of each split a sum over blocks of keys, in
ascending order. One launch computes all splits, and a second one adds them up. Which program
computes a split depends on the batch, its arithmetic does not: all tiles have one shape. Keys that
a row does not see change nothing of it.

Worked example with tiles of 4 rows, 3 heads and two sequences, which read 2 tokens and 1 token::

    rows of sequence 0  t0h0 t0h1 t0h2 t1h0 | t1h1 t1h2         tiles 0, 1
    rows of sequence 1  t2h0 t2h1 t2h2                          tile 2 = 2 * 3 // 4 + 1

Sequence n has its tiles from number ``ends[n] * H // rows + n`` on. A tile may stay empty. If there
is no memory for all splits at once, tokens are taken in parts, and if a part has fewer tokens than
there are sequences, the last summand is the number of the part's tokens before the sequence.

Selected keys of a token (:mod:`moetrain.models.parts.sparse_attention`) are pages of one token
each, of a sequence of its own.

Left out on purpose: a backward; expanding the keys of a prompt, which takes a third of the
multiplications, and has other bits.

Legend: T tokens, H heads, N sequences, P pages, Z tokens of a page, M pages of a sequence at most,
c width of a latent, r of the rotated key, d = c + r, n of a query without its rotating part, v of
a value, S splits, R rows, k inner and m outer width of a head's product.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false

import functools
from typing import NamedTuple

import torch

from moetrain.kernels.small_m import multiprocessors
from moetrain.runtime.backend import INTERPRETED, Backend, TensorDescriptor, tl, triton, use_fast

_SPLIT = 512
"""Keys of a split, a multiple of every tile's keys. A row's bits depend on it."""
_PARTIAL = 2**27
"""About how many elements of splits' results exist at once; in fp32 they take 512 MiB."""
_PROGRAMS = 4
"""Programs for each multiprocessor, if there are as many splits."""
_LOG2_E = 1.4426950408889634
_NEVER = tl.constexpr(float("-inf"))


class _LatentTile(NamedTuple):
    """Launch settings. They depend on the dtype and the device alone, since bits depend on them."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


_HALF = _LatentTile(64, 64, 8, 2)
"""For bf16. No other has been tried: it is the largest tile whose queries and two blocks of keys,
of 512 + 64 elements, have room in shared memory, and whose sums have room in registers."""
_ROOM = 217 << 10
"""Bytes of shared memory that it takes on a multiprocessor, with 1 KiB for the system."""
_SMALL = _LatentTile(16, 32, 4, 2)
"""For bf16 on GPUs with less, such as an A100 or an L40S; it takes 56 KiB."""
_WIDE = _LatentTile(16, 16, 4, 1)
"""For fp32."""


def _is_half(x: torch.Tensor) -> bool:
    """Return True for the tiles of bf16, which the interpreter takes too, because it is slow."""
    return INTERPRETED or x.dtype == torch.bfloat16


def _tile(x: torch.Tensor) -> _LatentTile:
    if not _is_half(x):
        return _WIDE
    return _HALF if INTERPRETED or _shared_memory(x.device) >= _ROOM else _SMALL


@functools.cache
def _shared_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def per_head(x_THk: torch.Tensor, w_Hmk: torch.Tensor, backend: Backend = "auto") -> torch.Tensor:
    """Return ``y[t, h] = w[h] @ x[t, h]`` [T, H, m], whose rows have the same bits in any batch.

    The last axis of ``x`` is contiguous; ``w`` may be any view, in ``x``'s dtype.
    """
    if not use_fast(backend, x_THk):
        return torch.einsum("thk,hmk->thm", x_THk, w_Hmk)
    (tokens, heads, inner), width = x_THk.shape, w_Hmk.shape[1]
    y_THm = x_THk.new_empty(tokens, heads, width)
    rows, columns, depth, stages = (64, 64, 64, 3) if _is_half(x_THk) else (16, 32, 32, 2)
    if tokens:
        _per_head_kernel[(triton.cdiv(tokens, rows), triton.cdiv(width, columns), heads)](
            x_THk,
            w_Hmk,
            y_THm,
            tokens,
            *x_THk.stride()[:2],
            *w_Hmk.stride(),
            H=heads,
            K=inner,
            M=width,
            BT=rows,
            BM=columns,
            BK=depth,
            IN_FP32=INTERPRETED,
            num_warps=4,
            num_stages=stages,
        )
    return y_THm


@triton.jit(do_not_specialize=["T"])
def _per_head_kernel(
    x_ptr, w_ptr, y_ptr, T, x_token, x_head, w_head, w_row, w_column,
    H: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2)
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    column = tl.program_id(1) * BM + tl.arange(0, BM)
    total = tl.zeros((BT, BM), tl.float32)
    x_ptr += token[:, None] * x_token + head * x_head
    w_ptr += tl.cast(head, tl.int64) * w_head + column[None, :] * w_row
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(x_ptr + k[None, :], mask=(token < T)[:, None] & (k < K)[None, :], other=0.0)
        mask = (column < M)[None, :] & (k < K)[:, None]
        w = tl.load(w_ptr + k[:, None] * w_column, mask=mask, other=0.0)
        if IN_FP32:  # Triton's interpreter would multiply bf16 as integers
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
    at = (token[:, None] * H + head) * M + column[None, :]
    mask = (token < T)[:, None] & (column < M)[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=mask)


def latent_attention(
    q_THd: torch.Tensor,
    latents_PZd: torch.Tensor,
    ends_N: torch.Tensor,
    seen_N: torch.Tensor,
    pages_NM: torch.Tensor,
    width: int,
    scale: float,
) -> torch.Tensor:
    """Attend each token to its sequence's latents so far, and return ``o_THc``.

    A token's own latent is in the pages too, and is seen. Among pages of less than a block of keys,
    such as those of selected keys, one of -1 has none. A row without any key gives zeros.

    Args:
        q_THd: the queries of the tokens that each sequence reads now, sequences end to end.
        latents_PZd: contiguous and finite.
        ends_N: [N + 1] int32, the sequences' ends among the T tokens, from 0.
        seen_N: int32, the number of tokens of each sequence that were read before.
        pages_NM: int32, the pages of each sequence; entries past its end are not read.
        width: c.
        scale: the factor of scores.
    """
    (tokens, heads, total), page_size = q_THd.shape, latents_PZd.shape[1]
    tile = _tile(q_THd)
    splits = max(1, triton.cdiv(pages_NM.shape[1] * page_size, _SPLIT))
    block = max(1, min(tokens, _PARTIAL // (heads * splits * width)))
    padded, turned = (max(16, triton.next_power_of_2(n)) for n in (width, total - width))
    # A descriptor needs rows of multiples of 16 bytes.
    is_whole = page_size % tile.keys == total * q_THd.element_size() % 16 == 0
    latents = latents_PZd, latents_PZd
    if is_whole:
        flat = latents_PZd.flatten(0, 1)
        latents = [TensorDescriptor.from_tensor(flat, [tile.keys, n]) for n in (padded, turned)]
    o_THc = q_THd.new_empty(tokens, heads, width)
    acc_SRc = q_THd.new_empty(splits, block * heads, width, dtype=torch.float32)
    stats_2SR = q_THd.new_empty(2, splits, block * heads, dtype=torch.float32)
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        tiles = (stop - start) * heads // tile.rows + min(stop - start, seen_N.shape[0])
        programs = _PROGRAMS * multiprocessors(q_THd.device) // tiles
        rows = ends_N, seen_N, seen_N.shape[0], start, stop, block * heads
        sizes = {"H": heads, "C": width, "CP": padded}
        sizes |= {"SPLIT": _SPLIT, "SEQUENCES": 1024}
        is_part = stop - start < seen_N.shape[0]  # of the sequences
        _split_kernel[(tiles, max(1, min(splits, programs)))](
            q_THd.contiguous(),
            *latents,
            acc_SRc,
            *stats_2SR,
            *rows,
            pages_NM,
            pages_NM.stride(0),
            scale * _LOG2_E,
            **sizes,
            BY_TOKENS=is_part,
            R=total - width,
            RP=turned,
            Z=page_size,
            ROWS=tile.rows,
            BN=tile.keys,
            IS_WHOLE=is_whole,
            IN_FP32=INTERPRETED,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        _sum_kernel[((stop - start) * heads,)](
            acc_SRc,
            *stats_2SR,
            o_THc,
            *rows,
            **sizes,
            num_warps=4,
        )
    return o_THc


@triton.jit
def _clamped(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit(do_not_specialize=["N", "first_token", "last_token", "all_rows", "pages_stride"])
def _split_kernel(
    q_ptr, latents, latents_r, acc_ptr, largest_ptr, total_ptr, ends_ptr, seen_ptr, N, first_token,
    last_token, all_rows, pages_ptr, pages_stride, scale,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, SPLIT: tl.constexpr,
    SEQUENCES: tl.constexpr, BY_TOKENS: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    Z: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, IS_WHOLE: tl.constexpr,
    IN_FP32: tl.constexpr,
):  # fmt: skip
    """Compute a tile's splits: every one of as many as there are programs for the tile."""
    # 1. Find the tile's sequence, the last one whose tiles begin at or before this one. Tokens
    #    outside of first_token to last_token count as absent.
    tile, n = tl.program_id(0), -1
    for i in range(0, N, SEQUENCES):
        index = i + tl.arange(0, SEQUENCES)
        starts = tl.load(ends_ptr + index, mask=index < N, other=0)
        before = _clamped(starts, first_token, last_token) - first_token
        begin = before * H // ROWS + (before if BY_TOKENS else index)
        n += tl.sum(((begin <= tile) & (index < N)).to(tl.int32), 0)
    whole = tl.load(ends_ptr + n)
    start = _clamped(whole, first_token, last_token)
    end = _clamped(tl.load(ends_ptr + n + 1), first_token, last_token)
    seen = tl.load(seen_ptr + n) + start - whole
    # 2. Load the tile's queries.
    before = start - first_token
    first = (tile - before * H // ROWS - (before if BY_TOKENS else n)) * ROWS
    number = (end - start) * H
    if first < number:
        row = first + tl.arange(0, ROWS)
        is_row = row < number
        position = seen + row // H
        num_keys = seen + tl.minimum(first + ROWS - 1, number - 1) // H + 1
        column, turned = tl.arange(0, CP), tl.arange(0, RP)
        at = (tl.cast(start, tl.int64) * H + row) * (C + R)
        is_c = is_row[:, None] & (column < C)[None, :]
        is_r = is_row[:, None] & (turned < R)[None, :]
        q = tl.load(q_ptr + at[:, None] + column[None, :], mask=is_c, other=0.0)
        q_turned = tl.load(q_ptr + at[:, None] + C + turned[None, :], mask=is_r, other=0.0)
        if IN_FP32:  # Triton's interpreter would multiply bf16 as integers
            q, q_turned = q.to(tl.float32), q_turned.to(tl.float32)
        pages = pages_ptr + tl.cast(n, tl.int64) * pages_stride
        for split in range(tl.program_id(1), tl.cdiv(num_keys, SPLIT), tl.num_programs(1)):
            # 3. Attend to the split's keys, block by block.
            largest = tl.full((ROWS,), _NEVER, tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            acc = tl.zeros((ROWS, CP), tl.float32)
            for block in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, num_keys), BN):
                key = block + tl.arange(0, BN)
                if IS_WHOLE:  # the block lies in one page
                    page = tl.load(pages + block // Z)
                    c = latents.load([page * Z + block % Z, 0])  # and columns of r, which q hides
                    r = latents_r.load([page * Z + block % Z, C])
                else:
                    page = tl.load(pages + key // Z, mask=key < num_keys, other=-1)
                    latent = latents + (page.to(tl.int64) * Z + key % Z)[:, None] * (C + R)
                    c_mask = (page >= 0)[:, None] & (column < C)[None, :]
                    r_mask = (page >= 0)[:, None] & (turned < R)[None, :]
                    c = tl.load(latent + column[None, :], mask=c_mask, other=0.0)
                    r = tl.load(latent + C + turned[None, :], mask=r_mask, other=0.0)
                if IN_FP32:
                    c, r = c.to(tl.float32), r.to(tl.float32)
                scores = tl.dot(q, c.T, input_precision="ieee")
                scores = tl.dot(q_turned, r.T, scores, input_precision="ieee")
                visible = key[None, :] <= position[:, None]
                if not IS_WHOLE:
                    visible &= (page >= 0)[None, :]
                scores = tl.where(visible, scores * scale, _NEVER)
                new_largest = tl.maximum(largest, tl.max(scores, 1))
                # A row that has seen no key yet may have any finite shift.
                shift = tl.where(new_largest == _NEVER, 0.0, new_largest)
                weights = tl.exp2(scores - shift[:, None])
                shrink = tl.exp2(largest - shift)
                total = tl.fma(total, shrink, tl.sum(weights, 1))
                weights = weights.to(q_ptr.dtype.element_ty)
                if IN_FP32:
                    weights = weights.to(tl.float32)
                acc = tl.dot(weights, c, acc * shrink[:, None], input_precision="ieee")
                largest = new_largest
            # 4. Store the split's sums.
            place = tl.cast(split, tl.int64) * all_rows + (start - first_token) * H + first
            own = tl.arange(0, ROWS)
            tl.store(largest_ptr + place + own, largest, mask=is_row)
            tl.store(total_ptr + place + own, total, mask=is_row)
            at_acc = acc_ptr + place * C + (own[:, None] * C + column[None, :])
            tl.store(at_acc, acc, mask=is_c)


@triton.jit(do_not_specialize=["N", "first_token", "last_token", "all_rows"])
def _sum_kernel(
    acc_ptr, largest_ptr, total_ptr, o_ptr, ends_ptr, seen_ptr, N, first_token, last_token,
    all_rows, H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, SPLIT: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Add up the splits of a row."""
    row = tl.program_id(0)
    token, n = first_token + row // H, 0
    for i in range(0, N, SEQUENCES):  # the number of sequences that end at or before the token
        index = i + tl.arange(0, SEQUENCES)
        ends = tl.load(ends_ptr + 1 + index, mask=index < N, other=token + 1)
        n += tl.sum((ends <= token).to(tl.int32), 0)
    position = tl.load(seen_ptr + n) + token - tl.load(ends_ptr + n)
    column = tl.arange(0, CP)
    largest, total = float("-inf"), 0.0
    acc = tl.zeros((CP,), tl.float32)
    for split in range(0, position // SPLIT + 1):
        place = tl.cast(split, tl.int64) * all_rows + row
        own = tl.load(largest_ptr + place)
        new_largest = tl.maximum(largest, own)
        shift = tl.where(new_largest == _NEVER, 0.0, new_largest)
        shrink, factor = tl.exp2(largest - shift), tl.exp2(own - shift)
        total = total * shrink + tl.load(total_ptr + place) * factor
        found = tl.load(acc_ptr + place * C + column, mask=column < C, other=0.0)
        acc = acc * shrink + found * factor
        largest = new_largest
    out = tl.where(total > 0, acc / tl.where(total > 0, total, 1.0), 0.0)
    at = (tl.cast(first_token, tl.int64) * H + row) * C + column
    tl.store(o_ptr + at, out.to(o_ptr.dtype.element_ty), mask=column < C)
