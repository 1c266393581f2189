"""Attention of single tokens over pages: keys are split over programs, the bits stay the same.

In :mod:`moetrain.kernels.attention.batch_invariant` one program takes a row's blocks of keys one
after the other. With few sequences most of a GPU is idle then. In that recurrence only one
multiplication and one addition a block must wait for the block before. The rest needs only the
largest score of all keys up to a block, which may be found in any order. So for block n with scores
s_n, programs compute in parallel ::

    m_n = max(m_(n-1), max(s_n) * scale)    p_n = exp2(s_n * scale - m_n)    sum(p_n)

and then, in the order of the blocks, in parallel only over the columns of the values ::

    r_n = exp2(m_(n-1) - m_n)    total = total * r_n + sum(p_n)    acc = acc * r_n + round(p_n) v_n

These are the operations of the single program, in its order, so the bits are equal.

One kernel computes them in three passes: the largest scores of the blocks, the p_n, the columns.
Before the second and the third pass, the programs of one token and key head wait for each other. So
there are at most as many programs as run at the same time.

Legend: T tokens, one of each sequence, H query heads, G key/value heads, d width of a query and a
key, v of a value, P pages, Z tokens of a page, M pages of a sequence at most, N blocks of keys.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false

import functools

import torch

from moetrain.kernels.small_m import multiprocessors
from moetrain.runtime.backend import INTERPRETED, TensorDescriptor, tl, triton

BLOCK = 64
"""Keys of a block. A row's bits depend on it, so all tiles have the same."""
_LOG2_E = 1.4426950408889634
_SINK_SCALE = tl.constexpr(_LOG2_E)
_NEVER = tl.constexpr(float("-inf"))
_PROGRAMS = 2
"""Programs on each multiprocessor; all programs must run at the same time."""
_WIDEST = 512
"""Widest key; two programs then take 164 of a multiprocessor's 227 KiB of shared memory."""
_ROOM = 166 << 10
"""Bytes of shared memory that a multiprocessor needs for these programs; each takes 1 KiB for the
system, too. If a program found no room, the others would wait for it without end. An A100 has 164
KiB, an L40S 100."""
_MOST_GROUPS = 32
"""Most pairs of a token and a key head. With more of them the unsplit kernel uses most
multiprocessors, too."""
_MOST_ROWS = 16
"""Most query heads of a key head. With 33 of one key head a test of bits failed on a GPU."""
_PREFIX = tl.constexpr(64)
"""Blocks whose largest scores are read at a time."""
_COLUMNS = 16
"""Columns of the values that a program takes at a time."""
_STAGES = tl.constexpr(14)
"""Stages of the loop over blocks of values. A load of values waits for the load of its page's
number, so that 14 stages make 6 buffers of values."""


def splits_keys(q_THd: torch.Tensor, keys_PZGd: torch.Tensor) -> bool:
    """Return True if :func:`split_attention` should take these queries.

    They are few, in bf16 and not too wide, and the GPU has room for all programs at once.
    """
    tokens, heads, width = q_THd.shape
    kv_heads = keys_PZGd.shape[2]
    # Only bf16: products in fp32 have another layout, and so another order of sums.
    fits = width <= _WIDEST and (
        INTERPRETED or (q_THd.dtype == torch.bfloat16 and _has_room(q_THd.device))
    )
    return fits and 0 < tokens * kv_heads <= _MOST_GROUPS and heads // kv_heads <= _MOST_ROWS


@functools.cache
def _has_room(device: torch.device) -> bool:
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor >= _ROOM


def split_attention(
    q_THd: torch.Tensor,
    keys_PZGd: torch.Tensor,
    values_PZGv: torch.Tensor,
    seen_T: torch.Tensor,
    pages_TM: torch.Tensor,
    arrived: torch.Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``o_THv``, the result of ``batch_invariant.paged_attention`` with ``one_token``.

    Args:
        seen_T: int32, the number of tokens that each sequence has read before.
        pages_TM: int32, the pages of each sequence.
        arrived: T * G zeros, int32, which count the programs that have finished a pass. They are
            not zero afterwards.

    The other arguments are those of ``paged_attention``.
    """
    (tokens, heads, width), (_, page_size, kv_heads, v_width) = q_THd.shape, values_PZGv.shape
    padded, v_padded = (max(16, triton.next_power_of_2(n)) for n in (width, v_width))
    shared = heads // kv_heads
    rows = max(16, triton.next_power_of_2(shared))
    num_blocks = pages_TM.shape[1] * (page_size // BLOCK)
    groups = tokens * kv_heads
    splits = max(1, min(num_blocks, _PROGRAMS * multiprocessors(q_THd.device) // groups))
    p = q_THd.new_empty(groups, num_blocks, shared, BLOCK)
    largest, shifts, sums = q_THd.new_empty(3, groups, num_blocks, shared, dtype=torch.float32)
    o_THv = q_THd.new_empty(tokens, heads, v_width)
    factor = (width**-0.5 if scale is None else scale) * _LOG2_E
    # Triton's interpreter runs one program after the other, so that none may wait for another.
    # There each pass is a launch of its own.
    for first, last in ((1, 3),) if not INTERPRETED else ((1, 1), (2, 2), (3, 3)):
        _split_kernel[(splits, groups)](
            q_THd.contiguous(),
            TensorDescriptor.from_tensor(keys_PZGd.flatten(0, 1).flatten(1), [BLOCK, padded]),
            TensorDescriptor.from_tensor(values_PZGv.flatten(0, 1).flatten(1), [BLOCK, _COLUMNS]),
            o_THv,
            p,
            largest,
            shifts,
            sums,
            arrived,
            sinks_H,
            seen_T,
            pages_TM,
            pages_TM.stride(0),
            num_blocks,
            0 if window is None else window,
            factor,
            H=heads,
            G=kv_heads,
            D=width,
            DP=padded,
            V=v_width,
            VP=v_padded,
            VC=_COLUMNS,
            Z=page_size,
            ROWS=rows,
            BN=BLOCK,
            HAS_WINDOW=window is not None,
            FIRST=first,
            LAST=last,
            IN_FP32=INTERPRETED,
            num_warps=1,
            num_stages=2,
        )
    return o_THv


@triton.jit
def _scores(
    q,
    k_desc,
    pages,
    block,
    position,
    g,
    window,
    D: tl.constexpr,
    Z: tl.constexpr,
    BN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    n = block * BN
    at = tl.load(pages + n // Z) * Z + n % Z
    k = k_desc.load([at, g * D])
    if IN_FP32:  # Triton's interpreter would multiply bf16 as integers
        k = k.to(tl.float32)
    scores = tl.dot(q, k.T, input_precision="ieee")
    key = n + tl.arange(0, BN)
    visible = key <= position
    if HAS_WINDOW:
        visible &= position - key < window
    return tl.where(visible[None, :], scores, _NEVER)


@triton.jit
def _weigh_block(
    scores,
    scale,
    p_ptr,
    largest_ptr,
    shifts_ptr,
    sums_ptr,
    base,
    low,
    block,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
):
    """Store a block's weights p_n, their sum, and the shift m_n."""
    row, key = tl.arange(0, ROWS), tl.arange(0, BN)
    is_row = row < SHARED
    shift = tl.full((ROWS,), _NEVER, tl.float32)
    for start in range(low, block + 1, _PREFIX):
        other = start + tl.arange(0, _PREFIX)
        at = (base + other)[None, :] * SHARED + row[:, None]
        mask = is_row[:, None] & (other <= block)[None, :]
        found = tl.load(largest_ptr + at, mask=mask, other=_NEVER)
        shift = tl.maximum(shift, tl.max(found, 1))
    at = (base + block) * SHARED + row
    tl.store(shifts_ptr + at, shift, mask=is_row)
    # The shift is read again, so that the compiler computes the weights and their sum in the layout
    # of the product, as in the unsplit kernel, and not in that of the maximum. The layout decides a
    # sum's order.
    tl.debug_barrier()
    shift = tl.load(shifts_ptr + at, mask=is_row, other=0.0)
    weights = tl.exp2(tl.fma(scores, scale, -shift[:, None]))
    tl.store(sums_ptr + at, tl.sum(weights, 1), mask=is_row)
    p = weights.to(p_ptr.dtype.element_ty)
    tl.store(p_ptr + at[:, None] * BN + key[None, :], p, mask=is_row[:, None])


@triton.jit
def _wait_for_all(arrived_ptr, number):
    """Wait until ``number`` programs have arrived, and what they stored is visible."""
    while tl.atomic_add(arrived_ptr, 0, sem="acquire") < number:
        pass
    tl.debug_barrier()


@triton.jit
def _arrive(arrived_ptr):
    tl.debug_barrier()  # all threads have stored before the program arrives
    tl.atomic_add(arrived_ptr, 1, sem="release")


@triton.jit
def _mix_columns(
    v_desc,
    p_ptr,
    shifts_ptr,
    sums_ptr,
    sinks_ptr,
    pages,
    base,
    low,
    high,
    g,
    first_column,
    SHARED: tl.constexpr,
    V: tl.constexpr,
    VC: tl.constexpr,
    Z: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    """Return some columns of a token's result for one key head, block by block."""
    row, key = tl.arange(0, ROWS), tl.arange(0, BN)
    is_row = row < SHARED
    largest = tl.full((ROWS,), _NEVER, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VC), tl.float32)
    for block in tl.range(low, high, num_stages=_STAGES):
        at = (base + block) * SHARED + row
        shift = tl.load(shifts_ptr + at, mask=is_row, other=0.0)
        shrink = tl.exp2(largest - shift)
        total = tl.fma(total, shrink, tl.load(sums_ptr + at, mask=is_row, other=1.0))
        p = tl.load(p_ptr + at[:, None] * BN + key[None, :], mask=is_row[:, None], other=0.0)
        n = block * BN
        where = tl.load(pages + n // Z) * Z + n % Z
        v = v_desc.load([where, g * V + first_column])
        if IN_FP32:
            p, v = p.to(tl.float32), v.to(tl.float32)
        acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
        largest = shift
    if sinks_ptr is not None:  # one more step of the online softmax, for a key without a value
        sink = tl.load(sinks_ptr + g * SHARED + row, mask=is_row, other=0.0)
        sink = sink.to(tl.float32) * _SINK_SCALE
        shift = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - shift)
        total = tl.fma(total, shrink, tl.exp2(sink - shift))
        acc = acc * shrink[:, None]
    return acc / total[:, None]


@triton.jit(do_not_specialize=["window"])
def _split_kernel(
    q_ptr,
    k_desc,
    v_desc,
    o_ptr,
    p_ptr,
    largest_ptr,
    shifts_ptr,
    sums_ptr,
    arrived_ptr,
    sinks_ptr,
    seen_ptr,
    pages_ptr,
    pages_stride,
    num_blocks,
    window,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    VC: tl.constexpr,
    Z: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    """Do the passes FIRST to LAST for one token and key head.

    Each of S programs takes every S-th block that the token sees, then every S-th tile of columns.
    """
    SHARED: tl.constexpr = H // G
    token, g = tl.program_id(1) // G, tl.program_id(1) % G
    position = tl.load(seen_ptr + token)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(position - window + 1, 0) // BN
    high = position // BN + 1
    pages = pages_ptr + tl.cast(token, tl.int64) * pages_stride
    base = tl.cast(tl.program_id(1), tl.int64) * num_blocks
    row = tl.arange(0, ROWS)
    is_row = row < SHARED
    at_row = tl.cast(token, tl.int64) * H + g * SHARED + row
    arrived_ptr += tl.program_id(1)
    programs = tl.num_programs(0)
    first = low + tl.program_id(0)
    others = tl.minimum(high - low, programs)
    if FIRST <= 2 and first < high:
        column = tl.arange(0, DP)
        mask = is_row[:, None] & (column < D)[None, :]
        q = tl.load(q_ptr + at_row[:, None] * D + column[None, :], mask=mask, other=0.0)
        if IN_FP32:
            q = q.to(tl.float32)
        # Pass 1: the largest score of each block. The first block's scores are kept.
        kept = _scores(q, k_desc, pages, first, position, g, window, D, Z, BN, HAS_WINDOW, IN_FP32)
        if FIRST == 1:
            at = (base + first) * SHARED + row
            tl.store(largest_ptr + at, tl.max(kept, 1) * scale, mask=is_row)
            for block in range(first + programs, high, programs):
                scores = _scores(
                    q, k_desc, pages, block, position, g, window, D, Z, BN, HAS_WINDOW, IN_FP32
                )
                at = (base + block) * SHARED + row
                tl.store(largest_ptr + at, tl.max(scores, 1) * scale, mask=is_row)
        if FIRST < LAST:
            _arrive(arrived_ptr)
            _wait_for_all(arrived_ptr, others)
        # Pass 2: the weights of each block.
        if LAST >= 2:
            _weigh_block(
                kept, scale, p_ptr, largest_ptr, shifts_ptr, sums_ptr, base, low, first,
                SHARED, ROWS, BN,
            )  # fmt: skip
            for block in range(first + programs, high, programs):
                scores = _scores(
                    q, k_desc, pages, block, position, g, window, D, Z, BN, HAS_WINDOW, IN_FP32
                )
                _weigh_block(
                    scores, scale, p_ptr, largest_ptr, shifts_ptr, sums_ptr, base, low, block,
                    SHARED, ROWS, BN,
                )  # fmt: skip
        if FIRST < LAST:
            _arrive(arrived_ptr)
    # Pass 3: the weighted sums of the values' columns.
    if LAST == 3 and tl.program_id(0) * VC < VP:
        if FIRST < LAST:
            _wait_for_all(arrived_ptr, 2 * others)
        for first_column in range(tl.program_id(0) * VC, VP, programs * VC):
            out = _mix_columns(
                v_desc, p_ptr, shifts_ptr, sums_ptr, sinks_ptr, pages, base, low, high, g,
                first_column, SHARED, V, VC, Z, ROWS, BN, IN_FP32,
            )  # fmt: skip
            column = first_column + tl.arange(0, VC)
            mask = is_row[:, None] & (column < V)[None, :]
            out = out.to(o_ptr.dtype.element_ty)
            tl.store(o_ptr + at_row[:, None] * V + column[None, :], out, mask=mask)
