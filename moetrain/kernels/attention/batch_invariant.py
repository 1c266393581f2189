"""Batch-invariant attention: a Triton forward whose rows have the same bits in any batch.

A row is a query of one head. One program takes the keys in ascending order, in blocks of ``BLOCK``
that are counted from the start of their document. Blocks and keys that are hidden from a row do not
change its values. So a token has the same result in a packed batch of training, in a chunk of a
prompt and in a step of generation, whether the keys lie end to end or in pages. A tile holds the
queries of a few tokens for all heads that share keys. The softmax is in base 2.

For few sequences of one token each, :mod:`moetrain.kernels.attention.split_keys` computes the same
bits faster. Left out on purpose: sums split over programs, which would add up in another order; the
backward (:mod:`moetrain.kernels.attention.attention` has one that takes this forward's results).

Legend: T tokens, H query heads, G key/value heads, d width of a query and a key, v of a value,
N documents or sequences, P pages, Z tokens of a page, M pages of a sequence at most.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false

from typing import NamedTuple

import torch

from moetrain.kernels.attention.split_keys import BLOCK, split_attention, splits_keys
from moetrain.runtime.backend import INTERPRETED, TensorDescriptor, tl, triton

_NEVER = tl.constexpr(float("-inf"))
_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = 1.4426950408889634
_SINK_SCALE = tl.constexpr(_LOG2_E)
_STAGED_BYTES = 160 * 2**10
"""Most bytes of the blocks of keys and values that are being loaded. They lie in a multiprocessor's
shared memory, beside the queries."""
_STORED = 4096
"""Most elements of one token's keys, and of its values, that one program stores."""


class _AttentionTile(NamedTuple):
    """Launch settings."""

    rows: int
    """Pairs of a token and a head."""
    tokens: int
    """Most tokens of a tile."""
    num_warps: int
    num_stages: int


def _tile(heads: int, one_token: bool, key_bytes: int) -> _AttentionTile:
    """Return the tile, measured on one H200.

    Args:
        heads: query heads of a key head.
        one_token: every sequence has one token.
        key_bytes: bytes of a key and its value.
    """
    padded = triton.next_power_of_2(heads)
    fitting = max(1, _STAGED_BYTES // (BLOCK * key_bytes))
    if one_token:  # one warp: several would share a row's sum and add up in another order
        return _AttentionTile(max(16, padded), 1, 1, min(5, fitting))
    rows = max(64, padded)
    return _AttentionTile(rows, rows // padded, rows // 16, min(3, fitting))


def forward(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    window: int | None,
    scale: float | None = None,
    *,
    sinks_H: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``o_THv`` and ``lse_HT`` (fp32), unchecked; not an op.

    Args:
        k_TGd, v_TGv: contiguous.
        sinks_H: logits that join the heads' denominators
            (:mod:`moetrain.kernels.attention.sinks`).
        cu_seqlens_k: the keys' documents, as in
            :func:`~moetrain.kernels.attention.attention.attention_packed`.
    """
    return _launch(
        q_THd,
        k_TGd,
        v_TGv,
        cu_seqlens,
        window,
        scale,
        sinks_H=sinks_H,
        cu_seqlens_k=cu_seqlens_k,
    )


def paged_attention(
    q_THd: torch.Tensor,
    keys_PZGd: torch.Tensor,
    values_PZGv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seen_N: torch.Tensor,
    pages_NM: torch.Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    one_token: bool = False,
    sinks_H: torch.Tensor | None = None,
    arrived: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each token to its sequence's keys so far, and return ``o_THv``.

    A token's own key is in the pages too, and is seen.

    Args:
        q_THd: the tokens that each sequence reads now, sequences end to end.
        keys_PZGd, values_PZGv: contiguous and finite; ``Z`` is a multiple of :data:`BLOCK`.
        cu_seqlens: [N + 1] int32, the sequences' ends among the T tokens, from 0.
        seen_N: int32, the number of tokens of each sequence that were read before.
        pages_NM: int32, the pages of each sequence; entries past its end are not read.
        scale: the factor of scores; None: ``d**-0.5``.
        one_token: every sequence reads one token, so that T is N.
        sinks_H: as in :func:`forward`.
        arrived: T * G zeros, int32, counters for :func:`split_attention`; None: it is not used.
    """
    if one_token and arrived is not None and splits_keys(q_THd, keys_PZGd):
        return split_attention(
            q_THd,
            keys_PZGd,
            values_PZGv,
            seen_N,
            pages_NM,
            arrived,
            window=window,
            scale=scale,
            sinks_H=sinks_H,
        )
    return _launch(
        q_THd,
        keys_PZGd.flatten(0, 1),
        values_PZGv.flatten(0, 1),
        cu_seqlens,
        window,
        scale,
        sinks_H=sinks_H,
        pages=_Pages(seen_N, pages_NM, keys_PZGd.shape[1]),
        one_token=one_token,
    )[0]


def step_attention(
    q_THd: torch.Tensor,
    keys_PZGd: torch.Tensor,
    values_PZGv: torch.Tensor,
    ends_N: torch.Tensor,
    seen_N: torch.Tensor,
    pages_NM: torch.Tensor,
    single: int,
    arrived: torch.Tensor,
    *,
    window: int | None,
    scale: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do :func:`paged_attention` for a step whose first ``single`` sequences read one token each.

    ``arrived`` is what :func:`store_in_pages` returned.
    """
    parts: list[torch.Tensor] = []
    if single:
        parts.append(
            paged_attention(
                q_THd[:single],
                keys_PZGd,
                values_PZGv,
                ends_N[: single + 1],
                seen_N[:single],
                pages_NM,
                window=window,
                scale=scale,
                one_token=True,
                sinks_H=sinks_H,
                arrived=arrived,
            )
        )
    if single < seen_N.shape[0]:
        parts.append(
            paged_attention(
                q_THd[single:],
                keys_PZGd,
                values_PZGv,
                ends_N[single:] - single,
                seen_N[single:],
                pages_NM[single:],
                window=window,
                scale=scale,
                sinks_H=sinks_H,
            )
        )
    if not parts:
        return q_THd.new_empty(*q_THd.shape[:2], values_PZGv.shape[-1])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def store_in_pages(
    keys_PZGd: torch.Tensor,
    values_PZGv: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """Store token t's key and value in slot ``slots_T[t]`` (int32, over all pages; -1: nowhere).

    Returns:
        T * G zeros, int32: counters for :mod:`moetrain.kernels.attention.split_keys`.
    """
    tokens, kv_heads, width = k_TGd.shape
    for x in (k_TGd, v_TGv):
        assert x.stride()[1:] == (x.shape[2], 1)  # a token's elements must be contiguous
    zeros = slots_T.new_empty(tokens * kv_heads)
    if tokens:
        k_elements, v_elements = kv_heads * width, kv_heads * v_TGv.shape[2]
        most = max(k_elements, v_elements)
        _store_kernel[(tokens, triton.cdiv(most, _STORED))](
            keys_PZGd,
            values_PZGv,
            k_TGd,
            v_TGv,
            slots_T,
            zeros,
            k_TGd.stride(0),
            v_TGv.stride(0),
            K_ELEMENTS=k_elements,
            V_ELEMENTS=v_elements,
            G=kv_heads,
            GP=triton.next_power_of_2(kv_heads),
            BLOCK=min(_STORED, triton.next_power_of_2(most)),
            num_warps=2,
        )
    return zeros


@triton.jit
def _store_kernel(
    keys_ptr, values_ptr, k_ptr, v_ptr, slots_ptr, zeros_ptr, k_stride, v_stride,
    K_ELEMENTS: tl.constexpr, V_ELEMENTS: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_key = i < tl.where(slot >= 0, K_ELEMENTS, 0)
    is_value = i < tl.where(slot >= 0, V_ELEMENTS, 0)
    k = tl.load(k_ptr + token * k_stride + i, mask=is_key)
    v = tl.load(v_ptr + token * v_stride + i, mask=is_value)
    tl.store(keys_ptr + slot * K_ELEMENTS + i, k, mask=is_key)
    tl.store(values_ptr + slot * V_ELEMENTS + i, v, mask=is_value)
    group = tl.arange(0, GP)
    tl.store(zeros_ptr + token * G + group, tl.zeros((GP,), tl.int32), mask=group < G)


class _Pages(NamedTuple):
    """Keys in pages; the arguments of :func:`paged_attention`."""

    seen_N: torch.Tensor
    pages_NM: torch.Tensor
    page_size: int


def _launch(
    q_THd: torch.Tensor,
    k_LGd: torch.Tensor,
    v_LGv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    window: int | None,
    scale: float | None,
    *,
    sinks_H: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None = None,
    pages: _Pages | None = None,
    one_token: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, width = q_THd.shape
    _, kv_heads, v_width = v_LGv.shape
    padded, v_padded = (max(16, triton.next_power_of_2(n)) for n in (width, v_width))
    key_bytes = (padded + v_padded) * q_THd.element_size()
    tile = _tile(heads // kv_heads, one_token, key_bytes)
    o_THv = q_THd.new_empty(tokens, heads, v_width)
    lse_HT = q_THd.new_empty(heads, tokens, dtype=torch.float32)
    factor = width**-0.5 if scale is None else scale
    _attend_kernel[(triton.cdiv(tokens, tile.tokens), kv_heads)](
        q_THd.contiguous(),  # a view of a product's result if no position rotates it
        TensorDescriptor.from_tensor(k_LGd.flatten(1), [BLOCK, padded]),
        TensorDescriptor.from_tensor(v_LGv.flatten(1), [BLOCK, v_padded]),
        o_THv,
        lse_HT,
        cu_seqlens,
        cu_seqlens_k,
        None if pages is None else pages.seen_N,
        None if pages is None else pages.pages_NM,
        sinks_H,
        tokens,
        cu_seqlens.shape[0] - 1,
        0 if pages is None else pages.pages_NM.stride(0),
        factor * _LOG2_E,
        0 if window is None else window,
        H=heads,
        G=kv_heads,
        D=width,
        DP=padded,
        V=v_width,
        VP=v_padded,
        Z=None if pages is None else pages.page_size,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        BN=BLOCK,
        SEQUENCES=1024,
        ONE_TOKEN=one_token,
        HAS_WINDOW=window is not None,
        IN_FP32=INTERPRETED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return o_THv, lse_HT


@triton.jit
def _see_block(
    q, k_desc, v_desc, pages, start, n, position, g, largest, total, acc, scale, window,
    D: tl.constexpr, V: tl.constexpr, Z: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    """Do one step of the online softmax: the block of keys that begins at ``n``."""
    at = start + n if Z is None else tl.load(pages + n // Z) * Z + n % Z
    k = k_desc.load([at, g * D])
    if IN_FP32:  # Triton's interpreter would multiply bf16 as integers
        k = k.to(tl.float32)
    scores = tl.dot(q, k.T, input_precision="ieee")
    if MASK:
        key = n + tl.arange(0, BN)
        visible = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible &= position[:, None] - key[None, :] < window
        scores = tl.where(visible, scores, _NEVER)
    new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
    shift = new_largest
    if MASK:  # a row that has seen no key yet may have any finite shift
        shift = tl.where(new_largest == _NEVER, 0.0, new_largest)
    weights = tl.exp2(tl.fma(scores, scale, -shift[:, None]))
    shrink = tl.exp2(largest - shift)
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    v = v_desc.load([at, g * V])
    weights = weights.to(v.dtype)
    if IN_FP32:
        weights, v = weights.to(tl.float32), v.to(tl.float32)
    acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
    return new_largest, total, acc


@triton.jit(do_not_specialize=["T", "N", "pages_stride", "window"])
def _attend_kernel(
    q_ptr, k_desc, v_desc, o_ptr, lse_ptr, ends_ptr, key_ends_ptr, seen_ptr, pages_ptr, sinks_ptr,
    T, N, pages_stride, scale, window,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, Z: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    BN: tl.constexpr, SEQUENCES: tl.constexpr,
    ONE_TOKEN: tl.constexpr, HAS_WINDOW: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    """Attend a tile's tokens for one key head, document by document."""
    HEADS: tl.constexpr = H // G
    PADDED: tl.constexpr = ROWS // TOKENS
    # Begin with the last tokens of documents: they see the most keys.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    g = tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.arange(0, DP)
    token, head = first + row // PADDED, row % PADDED
    is_row = (token < T) & (head < HEADS)
    at = token.to(tl.int64) * H + g * HEADS + head
    mask = is_row[:, None] & (column < D)[None, :]
    q = tl.load(q_ptr + at[:, None] * D + column[None, :], mask=mask, other=0.0)
    if IN_FP32:
        q = q.to(tl.float32)
    largest = tl.full((ROWS,), _NEVER, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VP), tl.float32)
    document = first
    if not ONE_TOKEN:  # the number of documents that end at or before the first token
        document = 0
        for i in range(0, N, SEQUENCES):
            index = i + tl.arange(0, SEQUENCES)
            end = tl.load(ends_ptr + 1 + index, mask=index < N, other=T + 1)
            document += tl.sum((end <= first).to(tl.int32), 0)
    stop = tl.minimum(first + TOKENS, T)
    begin = first
    while begin < stop:
        start = tl.load(ends_ptr + document)
        end = tl.load(ends_ptr + document + 1)
        keys, seen = start, 0
        if key_ends_ptr is not None:  # keys before the first query count as seen
            keys = tl.load(key_ends_ptr + document)
            seen = tl.load(key_ends_ptr + document + 1) - keys - (end - start)
        end = tl.minimum(end, stop)
        pages = pages_ptr
        if Z is not None:
            seen = tl.load(seen_ptr + document)
            pages = pages_ptr + tl.cast(document, tl.int64) * pages_stride
        # A query's index in its document; -1 for another document's query: it sees nothing.
        inside = is_row & (token >= begin) & (token < end)
        position = tl.where(inside, token - start + seen, -1)
        nearest = begin - start + seen
        farthest = end - 1 - start + seen
        low = 0
        whole = tl.where(end - begin == TOKENS, (nearest + 1) // BN * BN, 0)
        if HAS_WINDOW:
            low = tl.maximum(nearest - window + 1, 0) // BN * BN
            whole = 0
        for n in range(low, whole, BN):
            largest, total, acc = _see_block(
                q, k_desc, v_desc, pages, keys, n, position, g, largest, total, acc,
                scale, window, D, V, Z, BN, False, HAS_WINDOW, IN_FP32,
            )  # fmt: skip
        for n in range(tl.maximum(low, whole), farthest + 1, BN):
            largest, total, acc = _see_block(
                q, k_desc, v_desc, pages, keys, n, position, g, largest, total, acc,
                scale, window, D, V, Z, BN, True, HAS_WINDOW, IN_FP32,
            )  # fmt: skip
        begin = tl.maximum(end, begin)
        document += 1
    if sinks_ptr is not None:  # one more step of the online softmax, for a key without a value
        sink = tl.load(sinks_ptr + g * HEADS + head, mask=head < HEADS, other=0.0)
        sink = sink.to(tl.float32) * _SINK_SCALE
        shift = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - shift)
        total = tl.fma(total, shrink, tl.exp2(sink - shift))
        acc = acc * shrink[:, None]
        largest = shift
    out = (acc / total[:, None]).to(o_ptr.dtype.element_ty)
    column = tl.arange(0, VP)
    mask = is_row[:, None] & (column < V)[None, :]
    tl.store(o_ptr + at[:, None] * V + column[None, :], out, mask=mask)
    lse_at = lse_ptr + (g * HEADS + head).to(tl.int64) * T + token
    tl.store(lse_at, (largest + tl.log2(total)) * _LN_2, mask=is_row)
