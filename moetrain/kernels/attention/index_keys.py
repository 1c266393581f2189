"""The choice of keys by the lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2, 2.1).

    score[t, s] = sum over heads h of  w[t, h] relu(q[t, h] . k[s] / sqrt(d))

A token selects the K keys with the largest scores among those that it may see. Of keys with equal
scores the earlier are selected, since ``relu`` makes many scores exactly zero. Products and sums
are fp32.

Worked example with K = 2: of the scores ``[0, 0.5, 0, -1]`` keys 0 and 1 are selected, and key 2,
whose score equals that of key 0, is not.

Scores of a block of queries are in memory at a time, at most :data:`_SCORES`. The first kernel has
tiles of keys. It takes queries one after the other, with the heads as rows of a product, and adds
up over heads, so that a score's bits depend on its query and key alone: training and generation
compute the same. The second kernel has a program for each query. With scores as integers in the
same order, it finds the K-th largest two bits at a time, by counting the scores that are at least
as large as each of three candidates. Then it lists the keys in the order of their places.

In plain torch all scores of single heads exist, too, and a stable sort orders the keys of a row.

Left out on purpose: gradients. :mod:`moetrain.models.parts.indexer_loss` has those of the scores.

Legend: B batch, S queries of a row, L keys of a row, h index heads, d their width, K selected keys.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from typing import NamedTuple

import torch

from moetrain.runtime.backend import Backend, refusal, tl, triton, use_fast, worth_saving

_SCORES = 2**27
"""About how many scores exist at once. In plain torch these are scores of single heads."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_HEADS = 128


def select_keys(
    q_BShd: torch.Tensor,
    k_BLd: torch.Tensor,
    w_BSh: torch.Tensor,
    seen_BS2: torch.Tensor,
    topk: int,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Select ``topk`` keys for each token: int32 [B, S, K], in the order of their places; -1: none.

    A token that may see fewer keys than ``topk`` selects all of them. Places without a key follow
    those with one.

    Args:
        q_BShd, k_BLd: rotated index queries and keys.
        w_BSh: the heads' weights, at least fp32.
        seen_BS2: int64, the first key, from 0, and the last that each token may see. Keys from L on
            do not exist. A token whose last key comes before its first sees none.
        backend: auto takes the kernels on CUDA if they fit: queries and keys of bf16, fp16 or fp32,
            weights of fp32, widths d that are powers of two from 16, and at most 128 heads.

    Raises ValueError: shapes do not fit, or ``backend`` is triton and the kernels do not.
    """
    (B, S, h, d), L = q_BShd.shape, k_BLd.shape[1]
    fits = k_BLd.shape == (B, L, d) and w_BSh.shape == (B, S, h) and seen_BS2.shape == (B, S, 2)
    if not fits or topk < 1:
        takes = "[B, S, h, d], [B, L, d], [B, S, h] and [B, S, 2], and at least one key"
        raise refusal("select_keys", takes, q=q_BShd, k=k_BLd, w=w_BSh, seen=seen_BS2, topk=topk)
    is_fast = use_fast(backend, q_BShd)
    dtypes = q_BShd.dtype == k_BLd.dtype in _DTYPES and w_BSh.dtype == torch.float32
    if is_fast and not (dtypes and d >= 16 and d & (d - 1) == 0 and h <= _MOST_HEADS):
        if backend == "triton":
            takes = (
                "queries and keys of bf16, fp16 or fp32, weights of fp32, widths d that are powers "
                f"of two from 16, and at most {_MOST_HEADS} heads"
            )
            raise refusal("select_keys", takes, q=q_BShd, k=k_BLd, w=w_BSh)
        is_fast = False
    return select_keys_op(q_BShd, k_BLd, w_BSh, seen_BS2, topk, is_fast)


def index_scores(q_BShd: torch.Tensor, k_BLd: torch.Tensor, w_BSh: torch.Tensor) -> torch.Tensor:
    """Return the scores of all keys in plain torch, [B, S, L], in the dtype of the weights."""
    wide = w_BSh.dtype
    q_BRd = q_BShd.to(wide).flatten(1, 2)
    products_BRL = (q_BRd @ k_BLd.to(wide).mT) * q_BShd.shape[-1] ** -0.5
    products_BShL = products_BRL.relu().unflatten(1, q_BShd.shape[1:3])
    return (w_BSh[..., None, :] @ products_BShL)[..., 0, :]


def visible_keys(seen_BS2: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return bool [B, S, L]: the keys that each token may see."""
    index_L = torch.arange(num_keys, device=seen_BS2.device)
    first_BS1, last_BS1 = seen_BS2.split(1, dim=-1)
    return (index_L >= first_BS1) & (index_L <= last_BS1)


@torch.library.custom_op("moetrain::select_keys", mutates_args=())
def select_keys_op(
    q_BShd: torch.Tensor,
    k_BLd: torch.Tensor,
    w_BSh: torch.Tensor,
    seen_BS2: torch.Tensor,
    topk: int,
    is_fast: bool,
) -> torch.Tensor:
    """Return the keys of :func:`select_keys`; ``is_fast``: by the kernels."""
    (B, S, h, _), L = q_BShd.shape, k_BLd.shape[1]
    out_BSK = q_BShd.new_empty(B, S, topk, dtype=torch.int32)
    block = max(1, _SCORES // max(1, B * L * (1 if is_fast else h)))
    if is_fast and out_BSK.numel():
        _launch(
            q_BShd=q_BShd.contiguous(),
            k_BLd=k_BLd.contiguous(),
            w_BSh=w_BSh.contiguous(),
            seen_BS2=seen_BS2.contiguous(),
            out_BSK=out_BSK,
            block=min(block, S),
        )
        return out_BSK
    for start in range(0, S, block):
        own = slice(start, start + block)
        scores_BSL = index_scores(q_BShd[:, own], k_BLd, w_BSh[:, own])
        scores_BSL = scores_BSL.masked_fill(~visible_keys(seen_BS2[:, own], L), -torch.inf)
        # Torch's topk may take any of equal scores. A stable sort keeps their order.
        found = scores_BSL.sort(dim=-1, descending=True, stable=True)
        is_hidden_BSK = found.values[..., :topk] == -torch.inf
        # Hidden keys go to the end.
        keys_BSK = found.indices[..., :topk].masked_fill(is_hidden_BSK, L).sort(dim=-1).values
        out_BSK[:, own, : keys_BSK.shape[2]] = keys_BSK.where(keys_BSK < L, -1).int()
        out_BSK[:, own, keys_BSK.shape[2] :] = -1
    return out_BSK


@select_keys_op.register_fake
def _(
    q_BShd: torch.Tensor,
    k_BLd: torch.Tensor,
    w_BSh: torch.Tensor,
    seen_BS2: torch.Tensor,
    topk: int,
    is_fast: bool,
) -> torch.Tensor:
    return q_BShd.new_empty(*q_BShd.shape[:2], topk, dtype=torch.int32)


worth_saving("routing", torch.ops.moetrain.select_keys.default)


class _Launch(NamedTuple):
    """Launch settings of a kernel."""

    warps: int
    stages: int
    keys: int
    """Keys at a time."""
    rows: int = 0
    """Pairs of a query and a head at a time, at least."""
    queries: int = 0
    """Queries of a program."""


# No others have been tried. A query's row is read 18 times, mostly from the L2 cache.
_OF_SCORES = _Launch(8, 2, keys=128, rows=64, queries=32)
_OF_FP32_SCORES = _Launch(8, 1, keys=32, rows=64, queries=32)
_OF_KEYS = _Launch(8, 1, keys=4096)


def _launch(
    q_BShd: torch.Tensor,
    k_BLd: torch.Tensor,
    w_BSh: torch.Tensor,
    seen_BS2: torch.Tensor,
    out_BSK: torch.Tensor,
    block: int,
) -> None:
    """Write ``out_BSK``, ``block`` queries of each row at a time."""
    (B, S, h, d), L = q_BShd.shape, k_BLd.shape[1]
    is_wide = q_BShd.dtype == torch.float32
    scores, keys = _OF_FP32_SCORES if is_wide else _OF_SCORES, _OF_KEYS
    heads = triton.next_power_of_2(h)
    rows = max(scores.rows, heads)
    # A program takes at least the queries whose heads are rows of one product.
    taken = max(scores.queries, rows // heads)
    scores_BsL = w_BSh.new_empty(B, block, L)
    for start in range(0, S, block):
        queries = min(block, S - start)
        _scores_kernel[(triton.cdiv(L, scores.keys), triton.cdiv(queries, taken), B)](
            q_BShd,
            k_BLd,
            w_BSh,
            seen_BS2,
            scores_BsL,
            d**-0.5,
            start,
            start + queries,
            S,
            L,
            block,
            H=h,
            D=d,
            HEADS=heads,
            ROWS=rows,
            QUERIES=taken,
            BL=scores.keys,
            PRECISION="ieee" if is_wide else "tf32",
            num_warps=scores.warps,
            num_stages=scores.stages,
        )
        _keys_kernel[(queries, B)](
            scores_BsL,
            seen_BS2,
            out_BSK,
            start,
            S,
            L,
            block,
            K=out_BSK.shape[2],
            N=min(keys.keys, max(32, triton.next_power_of_2(L))),
            num_warps=keys.warps,
            num_stages=keys.stages,
        )


@triton.jit
def _scores_kernel(
    q_ptr, k_ptr, w_ptr, seen_ptr, scores_ptr, scale, start, stop, S, L, block,
    H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    QUERIES: tl.constexpr, BL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the scores of BL keys for QUERIES queries; ROWS rows are queries with all heads.

    Scores of keys that none of the rows' queries may see are not written.
    """
    BQ: tl.constexpr = ROWS // HEADS
    batch, first_key = tl.program_id(2).to(tl.int64), tl.program_id(0) * BL
    keys, dims, rows = first_key + tl.arange(0, BL), tl.arange(0, D), tl.arange(0, ROWS)
    is_key = keys < L
    k = tl.load(
        k_ptr + (batch * L + keys)[:, None] * D + dims[None, :], mask=is_key[:, None], other=0.0
    )
    begin = start + tl.program_id(1) * QUERIES
    for first in range(0, QUERIES, BQ):
        own = begin + first + tl.arange(0, BQ)
        is_own = own < stop
        seen = seen_ptr + (batch * S + own) * 2
        first_seen = tl.load(seen, mask=is_own, other=L)
        last_seen = tl.load(seen + 1, mask=is_own, other=-1)
        is_seen = tl.min(first_seen, axis=0) < first_key + BL
        if is_seen & (tl.max(last_seen, axis=0) >= first_key):
            query, head = begin + first + rows // HEADS, rows % HEADS
            is_row = (query < stop) & (head < H)
            at = (batch * S + query) * H + head
            q = tl.load(q_ptr + at[:, None] * D + dims[None, :], mask=is_row[:, None], other=0.0)
            w = tl.load(w_ptr + at, mask=is_row, other=0.0)
            products = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            terms = tl.where(products < 0.0, 0.0, products) * w[:, None]
            scores = tl.sum(tl.reshape(terms, [BQ, HEADS, BL]), axis=1)
            to = (batch * block + own - start)[:, None] * L + keys[None, :]
            tl.store(scores_ptr + to, scores, mask=is_own[:, None] & is_key[None, :])


@triton.jit
def _ordered(scores_ptr, keys, is_key):
    """Return scores as unsigned integers in their order; 0 where there is no key."""
    x = tl.load(scores_ptr + keys, mask=is_key, other=0.0)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is 0
    flipped = bits ^ ((bits >> 31) | -2147483648)
    return tl.where(is_key, flipped, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _keys_kernel(
    scores_ptr, seen_ptr, out_ptr, start, S, L, block, K: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Select the K keys of one query, from N scores at a time."""
    row, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    query = batch * S + start + row
    first = tl.load(seen_ptr + query * 2).to(tl.int32)
    last = tl.minimum(tl.load(seen_ptr + query * 2 + 1), L - 1).to(tl.int32)
    scores_ptr += (batch * block + row) * L
    out_ptr += query * K
    places = tl.arange(0, N)
    if last - first < K:
        for begin in range(0, K, N):
            keys = tl.where(begin + places <= last - first, first + begin + places, -1)
            tl.store(out_ptr + begin + places, keys, mask=begin + places < K)
    else:
        # 1. The K-th largest score, from its highest bits on.
        least, unit = tl.full((), 0, tl.uint32), tl.full((), 1 << 30, tl.uint32)
        for _ in range(16):
            a, b, c = least + unit, least + unit + unit, least + unit + unit + unit
            counts_a, counts_b, counts_c = (
                tl.zeros([N], tl.int32),
                tl.zeros([N], tl.int32),
                tl.zeros([N], tl.int32),
            )
            for begin in range(first, last + 1, N):
                scores = _ordered(scores_ptr, begin + places, begin + places <= last)
                counts_a += (scores >= a).to(tl.int32)
                counts_b += (scores >= b).to(tl.int32)
                counts_c += (scores >= c).to(tl.int32)
            # More scores are at least as large as a smaller candidate.
            least = tl.where(tl.sum(counts_a, axis=0) >= K, a, least)
            least = tl.where(tl.sum(counts_b, axis=0) >= K, b, least)
            least = tl.where(tl.sum(counts_c, axis=0) >= K, c, least)
            unit = unit >> 2
        counts = tl.zeros([N], tl.int32)
        for begin in range(first, last + 1, N):
            scores = _ordered(scores_ptr, begin + places, begin + places <= last)
            counts += (scores > least).to(tl.int32)
        # 2. All larger ones, and as many of its equals as are left.
        left, taken = K - tl.sum(counts, axis=0), 0
        for begin in range(first, last + 1, N):
            is_key = begin + places <= last
            scores = _ordered(scores_ptr, begin + places, is_key)
            is_equal = (is_key & (scores == least)).to(tl.int32)
            is_taken = (scores > least) | ((is_equal > 0) & (tl.cumsum(is_equal, axis=0) <= left))
            number = is_taken.to(tl.int32)
            at = taken + tl.cumsum(number, axis=0) - 1
            tl.store(out_ptr + at, begin + places, mask=is_taken)
            left -= tl.sum(is_equal, axis=0)
            taken += tl.sum(number, axis=0)
