"""The Triton kernels of sparse attention.

:mod:`moetrain.kernels.attention.sparse` has the formulas, the legend and the launches.

In all kernels H, K, C and R are as in the legend. A latent's first C columns are multiplied apart
from its last R, since a product of tiles needs powers of two. ``row`` are the offsets of elements
in rows of tokens or latents. A key of -1 is none, whatever its place among a token's K.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from moetrain.runtime.backend import tl, triton

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _num_places(keys_ptr, token, K: tl.constexpr, PLACES: tl.constexpr):
    """Return how many of the token's K places there are up to the last that has a key."""
    places = tl.arange(0, PLACES)
    keys = tl.load(keys_ptr + token * K + places, mask=places < K, other=-1)
    return tl.max(tl.where(keys >= 0, places + 1, 0), axis=0)


@triton.jit
def _latents(kv_ptr, keys_ptr, token, places, count, K: tl.constexpr, C: tl.constexpr,
             R: tl.constexpr):  # fmt: skip
    """Return the latents at some of the token's places, in two parts, and which places have one."""
    keys = tl.load(keys_ptr + token * K + places, mask=places < count, other=-1)
    is_key = keys >= 0
    row = (keys.to(tl.int64) * (C + R))[:, None]
    kv_c = tl.load(kv_ptr + row + tl.arange(0, C)[None, :], mask=is_key[:, None], other=0.0)
    kv_r = tl.load(kv_ptr + row + C + tl.arange(0, R)[None, :], mask=is_key[:, None], other=0.0)
    return kv_c, kv_r, is_key


@triton.jit
def forward_kernel(
    q_ptr, kv_ptr, keys_ptr, out_ptr, lse_ptr, scale,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
    PLACES: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute the results and the log-sum-exps of BH heads of one token."""
    BLOCKS: tl.constexpr = (H + BH - 1) // BH
    heads = tl.program_id(0) % BLOCKS * BH + tl.arange(0, BH)
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    is_head = (heads < H)[:, None]
    row = ((token * H + heads) * (C + R))[:, None]
    q_c = tl.load(q_ptr + row + tl.arange(0, C)[None, :], mask=is_head, other=0.0)
    q_r = tl.load(q_ptr + row + C + tl.arange(0, R)[None, :], mask=is_head, other=0.0)
    largest = tl.full([BH], float("-inf"), tl.float32)
    total, out = tl.zeros([BH], tl.float32), tl.zeros([BH, C], tl.float32)
    count = _num_places(keys_ptr, token, K, PLACES)
    for first in range(0, count, BK):
        places = first + tl.arange(0, BK)
        kv_c, kv_r, is_key = _latents(kv_ptr, keys_ptr, token, places, count, K, C, R)
        scores = tl.dot(q_c, tl.trans(kv_c), input_precision=PRECISION)
        scores = tl.dot(q_r, tl.trans(kv_r), scores, input_precision=PRECISION)
        # To base 2. Where no key was seen yet, the largest score is -inf, and is not subtracted.
        scores = tl.where(is_key[None, :], scores * (scale * _LOG2_E), float("-inf"))
        raised = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(raised == float("-inf"), 0.0, raised)
        faded = tl.exp2(largest - base)
        p = tl.exp2(scores - base[:, None])
        total = total * faded + tl.sum(p, axis=1)
        out = tl.dot(p.to(kv_c.dtype), kv_c, out * faded[:, None], input_precision=PRECISION)
        largest = raised
    total = tl.where(total == 0.0, 1.0, total)  # of a token without keys; its lse is -inf
    out = out / total[:, None]
    row = ((token * H + heads) * C)[:, None] + tl.arange(0, C)[None, :]
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=is_head)
    lse = (largest + tl.log2(total)) / _LOG2_E
    tl.store(lse_ptr + token * H + heads, lse, mask=heads < H)


@triton.jit
def query_gradients_kernel(
    do_ptr, q_ptr, kv_ptr, keys_ptr, out_ptr, lse_ptr, dq_ptr, p_ptr, ds_ptr, scale,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
    PLACES: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute dq of BH heads of one token, and keep p and ds of its keys."""
    BLOCKS: tl.constexpr = (H + BH - 1) // BH
    heads = tl.program_id(0) % BLOCKS * BH + tl.arange(0, BH)
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    is_head = (heads < H)[:, None]
    dims, rotating = tl.arange(0, C)[None, :], C + tl.arange(0, R)[None, :]
    row = ((token * H + heads) * (C + R))[:, None]
    q_c = tl.load(q_ptr + row + dims, mask=is_head, other=0.0)
    q_r = tl.load(q_ptr + row + rotating, mask=is_head, other=0.0)
    results = ((token * H + heads) * C)[:, None]
    delta = tl.zeros([BH], tl.float32)
    for column in range(0, C, BC):  # some columns at a time take fewer registers
        some = results + column + tl.arange(0, BC)[None, :]
        do = tl.load(do_ptr + some, mask=is_head, other=0.0).to(tl.float32)
        delta += tl.sum(do * tl.load(out_ptr + some, mask=is_head, other=0.0), axis=1)
    do = tl.load(do_ptr + results + dims, mask=is_head, other=0.0)
    lse = tl.load(lse_ptr + token * H + heads, mask=heads < H, other=0.0) * _LOG2_E
    dq_c, dq_r = tl.zeros([BH, C], tl.float32), tl.zeros([BH, R], tl.float32)
    count = _num_places(keys_ptr, token, K, PLACES)
    for first in range(0, count, BK):
        places = first + tl.arange(0, BK)
        kv_c, kv_r, is_key = _latents(kv_ptr, keys_ptr, token, places, count, K, C, R)
        scores = tl.dot(q_c, tl.trans(kv_c), input_precision=PRECISION)
        scores = tl.dot(q_r, tl.trans(kv_r), scores, input_precision=PRECISION)
        p = tl.exp2(scores * (scale * _LOG2_E) - lse[:, None])
        p = tl.where(is_key[None, :], p, 0.0)
        dp = tl.dot(do, tl.trans(kv_c), input_precision=PRECISION)
        ds = (p * (dp - delta[:, None]) * scale).to(kv_c.dtype)
        dq_c = tl.dot(ds, kv_c, dq_c, input_precision=PRECISION)
        dq_r = tl.dot(ds, kv_r, dq_r, input_precision=PRECISION)
        at = ((token * H + heads) * K)[:, None] + places[None, :]
        is_kept = is_head & (places < count)[None, :]
        tl.store(p_ptr + at, p.to(kv_c.dtype), mask=is_kept)
        tl.store(ds_ptr + at, ds, mask=is_kept)
    tl.store(dq_ptr + row + dims, dq_c.to(dq_ptr.dtype.element_ty), mask=is_head)
    tl.store(dq_ptr + row + rotating, dq_r.to(dq_ptr.dtype.element_ty), mask=is_head)


@triton.jit
def terms_kernel(
    do_ptr, q_ptr, keys_ptr, p_ptr, ds_ptr, terms_ptr, place_ptr,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
    PLACES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, BK: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Compute a token's terms of dkv for BK of its keys, and note the places of these keys.

    HEADS are H, rounded up to a power of two.
    """
    PARTS: tl.constexpr = (K + BK - 1) // BK
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    first, count = tl.program_id(0) % PARTS * BK, _num_places(keys_ptr, token, K, PLACES)
    if first < count:
        places = first + tl.arange(0, BK)
        keys = tl.load(keys_ptr + token * K + places, mask=places < count, other=-1)
        is_key = keys >= 0
        table = keys.to(tl.int64) * TOKENS + token
        tl.store(place_ptr + table, places + 1, mask=is_key)
        heads = tl.arange(0, HEADS)
        is_head = (heads < H)[:, None]
        at = ((token * H + heads) * K)[:, None] + places[None, :]
        is_kept = is_head & (places < count)[None, :]
        p = tl.trans(tl.load(p_ptr + at, mask=is_kept, other=0.0))
        ds = tl.trans(tl.load(ds_ptr + at, mask=is_kept, other=0.0))
        row = ((token * H + heads) * (C + R))[:, None]
        results = ((token * H + heads) * C)[:, None]
        terms = ((token * K + places) * (C + R))[:, None]
        for column in range(0, C, BC):
            dims = column + tl.arange(0, BC)[None, :]
            do = tl.load(do_ptr + results + dims, mask=is_head, other=0.0)
            q = tl.load(q_ptr + row + dims, mask=is_head, other=0.0)
            d_kv = tl.dot(p, do, input_precision=PRECISION)
            d_kv = tl.dot(ds, q, d_kv, input_precision=PRECISION)
            tl.store(terms_ptr + terms + dims, d_kv.to(q.dtype), mask=is_key[:, None])
        dims = C + tl.arange(0, R)[None, :]
        q = tl.load(q_ptr + row + dims, mask=is_head, other=0.0)
        d_kv = tl.dot(ds, q, input_precision=PRECISION)
        tl.store(terms_ptr + terms + dims, d_kv.to(q.dtype), mask=is_key[:, None])


@triton.jit
def lists_kernel(
    place_ptr, terms_ptr, counts_ptr, K: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """List the terms of one key in the order of their tokens, and clear the key's places.

    ``terms_ptr`` gets, for each key, the index of each term among all tokens' K.
    """
    key, tokens = tl.program_id(0).to(tl.int64), tl.arange(0, TOKENS)
    at = key * TOKENS
    places = tl.load(place_ptr + at + tokens)
    is_term = places > 0
    index = tl.cumsum(is_term.to(tl.int32), axis=0)
    tl.store(terms_ptr + at + index - 1, tokens * K + places - 1, mask=is_term)
    tl.store(counts_ptr + key, tl.sum(is_term.to(tl.int32), axis=0))
    tl.store(place_ptr + at + tokens, tl.zeros([TOKENS], tl.int32))


@triton.jit
def sums_kernel(
    terms_ptr, list_ptr, counts_ptr, dkv_ptr,
    C: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Add the listed terms of one key to its dkv, BT at a time."""
    key = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + key)
    if count > 0:
        dims, rotating = tl.arange(0, C), C + tl.arange(0, R)
        sum_c, sum_r = tl.zeros([BT, C], tl.float32), tl.zeros([BT, R], tl.float32)
        for first in range(0, count, BT):
            own = first + tl.arange(0, BT)
            term = tl.load(list_ptr + key * TOKENS + own, mask=own < count, other=0)
            row = (term.to(tl.int64) * (C + R))[:, None]
            is_term = (own < count)[:, None]
            sum_c += tl.load(terms_ptr + row + dims[None, :], mask=is_term, other=0.0)
            sum_r += tl.load(terms_ptr + row + rotating[None, :], mask=is_term, other=0.0)
        row = dkv_ptr + key * (C + R)
        tl.store(row + dims, tl.load(row + dims) + tl.sum(sum_c, axis=0))
        tl.store(row + rotating, tl.load(row + rotating) + tl.sum(sum_r, axis=0))
