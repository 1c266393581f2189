"""The Triton kernels of Kimi Delta Attention, beside those that walk over chunks.

:mod:`moetrain.kernels.linear_attention.kda` has the formulas, the legend and the launches, and says
what a level is. :mod:`moetrain.kernels.linear_attention.delta_kernels` has the kernels that walk
over chunks, with CHANNELS.

A program takes one head of one chunk, and all columns or some. In all kernels H, K and V are as in
the legend, and C is the number of tokens in a chunk. ``row`` are the offsets of elements in the
tokens' rows, and ``tiles`` those in a chunk's products of tokens with tokens.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from moetrain.kernels.linear_attention.delta_kernels import inverse_of
from moetrain.runtime.backend import tl, triton


@triton.jit
def vectors_kernel(
    q_ptr, k_ptr, g_ptr, starts_ptr, sizes_ptr, sums_ptr, q_reads_ptr, k_reads_ptr, writes_ptr,
    factors_ptr, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute G and the decayed vectors of each token, and e^G_last of each chunk.

    The vectors are scale q e^G, k e^G and k e^(G_last - G).
    """
    part, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        i, dims = tl.arange(0, C), part * BK + tl.arange(0, BK)
        valid = (i < size)[:, None]
        token = (tl.load(starts_ptr + chunk) + i).to(tl.int64)
        row = (token * H + head)[:, None] * K + dims[None, :]
        q = tl.load(q_ptr + row, mask=valid, other=0.0)
        k = tl.load(k_ptr + row, mask=valid, other=0.0)
        g = tl.load(g_ptr + row, mask=valid, other=0.0)
        sums = tl.cumsum(g, axis=0)
        final = tl.sum(g, axis=0)
        tl.store(sums_ptr + row, sums, mask=valid)
        grown = tl.exp(sums)
        tl.store(q_reads_ptr + row, (q * (grown * scale)).to(q.dtype), mask=valid)
        tl.store(k_reads_ptr + row, (k * grown).to(k.dtype), mask=valid)
        # The two sums may differ by rounding; no exponent is above 0.
        left = tl.exp(tl.minimum(final[None, :] - sums, 0.0))
        tl.store(writes_ptr + row, (k * left).to(k.dtype), mask=valid)
        tl.store(factors_ptr + (tl.cast(chunk, tl.int64) * H + head) * K + dims, tl.exp(final))


@triton.jit
def _level(
    sums_ptr, sums, token, dims, head, i, size, level, H: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Return a level's factors of the tokens, which tokens are late, and which pairs are its own.

    A block of the level has 2^level tokens.
    """
    is_late = (i >> (level - 1)) % 2 == 1
    # A block's anchor is the first token of its second half.
    ahead = ((i >> level) << level) + (1 << (level - 1)) - i
    has_anchor = (i + ahead < size) & (i < size)
    row = ((token + ahead) * H + head)[:, None] * K + dims[None, :]
    anchors = tl.load(sums_ptr + row, mask=has_anchor[:, None], other=0.0)
    exponents = tl.where(is_late[:, None], sums - anchors, anchors - sums)
    factors = tl.exp(tl.where(has_anchor[:, None], exponents, float("-inf")))
    is_same = (i >> level)[:, None] == (i >> level)[None, :]
    is_pair = is_same & is_late[:, None] & ((i >> (level - 1)) % 2 == 0)[None, :]
    return factors, is_late, is_pair


@triton.jit
def pairs_kernel(
    q_ptr, k_ptr, beta_ptr, sums_ptr, starts_ptr, sizes_ptr, inverse_ptr, scores_ptr, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute T, and scale B."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    size = tl.load(sizes_ptr + chunk)
    i = tl.arange(0, C)
    tiles = (tl.cast(chunk, tl.int64) * H + head) * C * C + i[:, None] * C + i[None, :]
    if size == 0:
        tl.store(inverse_ptr + tiles, tl.zeros([C, C], inverse_ptr.dtype.element_ty))
        tl.store(scores_ptr + tiles, tl.zeros([C, C], scores_ptr.dtype.element_ty))
    else:
        valid = i < size
        token = (tl.load(starts_ptr + chunk) + i).to(tl.int64)
        lower, scores = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        own = tl.zeros([C], tl.float32)
        for part in tl.static_range(K // BK):
            dims = part * BK + tl.arange(0, BK)
            row = (token * H + head)[:, None] * K + dims[None, :]
            q = tl.load(q_ptr + row, mask=valid[:, None], other=0.0)
            k = tl.load(k_ptr + row, mask=valid[:, None], other=0.0)
            sums = tl.load(sums_ptr + row, mask=valid[:, None], other=0.0)
            own += tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)
            for level in range(1, 7):
                factors, _, is_pair = _level(
                    sums_ptr, sums, token, dims, head, i, size, level, H, K
                )
                keys = (k * factors).to(k.dtype)
                queries = (q * factors).to(k.dtype)
                products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
                lower += tl.where(is_pair, products, 0.0)
                products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
                scores += tl.where(is_pair, products, 0.0)
        scores = tl.where(i[:, None] == i[None, :], own[:, None], scores) * scale
        tl.store(scores_ptr + tiles, scores.to(scores_ptr.dtype.element_ty))
        beta = tl.load(beta_ptr + token * H + head, mask=valid, other=0.0)
        wide = inverse_of(lower * beta[:, None], i, PRECISION)
        tl.store(inverse_ptr + tiles, wide.to(inverse_ptr.dtype.element_ty))


@triton.jit
def read_kernel(
    q_reads_ptr, new_ptr, scores_ptr, states_ptr, starts_ptr, sizes_ptr, out_ptr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute O for some columns of the values."""
    part, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        i, dims, values = tl.arange(0, C), tl.arange(0, K), part * BV + tl.arange(0, BV)
        valid = (i < size)[:, None]
        token = (tl.load(starts_ptr + chunk) + i).to(tl.int64)
        gates = (token * H + head)[:, None]
        q = tl.load(q_reads_ptr + gates * K + dims[None, :], mask=valid, other=0.0)
        row = gates * V + values[None, :]
        u = tl.load(new_ptr + row, mask=valid, other=0.0)
        at = tl.cast(chunk, tl.int64) * H + head
        state = tl.load(states_ptr + at * K * V + dims[:, None] * V + values[None, :])
        scores = tl.load(scores_ptr + at * C * C + i[:, None] * C + i[None, :])
        out = tl.dot(q, state, input_precision=PRECISION)
        out += tl.dot(scores, u, input_precision=PRECISION)
        tl.store(out_ptr + row, out.to(q.dtype), mask=valid)


@triton.jit
def own_gradients_kernel(
    do_ptr, scores_ptr, starts_ptr, sizes_ptr, du_ptr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of U from its own chunk's outputs: scale B^T dO."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        i = tl.arange(0, C)
        valid = (i < size)[:, None]
        token = (tl.load(starts_ptr + chunk) + i).to(tl.int64)
        row = (token * H + head)[:, None] * V + tl.arange(0, V)[None, :]
        do = tl.load(do_ptr + row, mask=valid, other=0.0)
        at = tl.cast(chunk, tl.int64) * H + head
        scores = tl.load(scores_ptr + at * C * C + i[:, None] * C + i[None, :])
        du = tl.dot(tl.trans(scores), do, input_precision=PRECISION)
        tl.store(du_ptr + row, du.to(do.dtype), mask=valid)


@triton.jit
def kda_input_gradients_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, new_ptr, dr_ptr, beta_ptr, sums_ptr, states_ptr, d_states_ptr,
    starts_ptr, sizes_ptr, dq_ptr, dk_ptr, dv_ptr, dg_ptr, d_beta_ptr, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQ, dK and dg for one part of K's columns, and the part's terms of dbeta.

    If there are P parts, each also computes dV for every P-th of V's blocks.
    """
    part, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        i, dims = tl.arange(0, C), part * BK + tl.arange(0, BK)
        valid = i < size
        token = (tl.load(starts_ptr + chunk) + i).to(tl.int64)
        gates = token * H + head
        beta = tl.load(beta_ptr + gates, mask=valid, other=0.0)
        # 1. The gradients of the vectors that read and write states, and of A and B.
        dq, dk, d_read = (
            tl.zeros([C, BK], tl.float32),
            tl.zeros([C, BK], tl.float32),
            tl.zeros([C, BK], tl.float32),
        )
        d_scores, d_lower = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        through, d_beta = tl.zeros([BK], tl.float32), tl.zeros([C], tl.float32)
        at = (tl.cast(chunk, tl.int64) * H + head) * K * V + dims[:, None] * V
        for first in range(0, V, BV):
            values = first + tl.arange(0, BV)
            row = gates[:, None] * V + values[None, :]
            state = tl.load(states_ptr + at + values[None, :])
            d_state = tl.load(d_states_ptr + at + values[None, :])
            do = tl.load(do_ptr + row, mask=valid[:, None], other=0.0)
            u = tl.load(new_ptr + row, mask=valid[:, None], other=0.0)
            dr = tl.load(dr_ptr + row, mask=valid[:, None], other=0.0)
            dq += tl.dot(do, tl.trans(state), input_precision=PRECISION)
            dk += tl.dot(u, tl.trans(d_state), input_precision=PRECISION)
            d_read += tl.dot(dr, tl.trans(state), input_precision=PRECISION)
            d_scores += tl.dot(do, tl.trans(u), input_precision=PRECISION)
            d_lower -= tl.dot(dr, tl.trans(u), input_precision=PRECISION)
            through += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), axis=1)
            if first // BV % (K // BK) == part:
                v = tl.load(v_ptr + row, mask=valid[:, None], other=0.0)
                dv = dr.to(tl.float32) * beta[:, None]
                tl.store(dv_ptr + row, dv.to(v.dtype), mask=valid[:, None])
                d_beta += tl.sum(dr.to(tl.float32) * v, axis=1)
        # 2. Those of q, k and G through reading and writing states. A read has +G, a write -G.
        row = gates[:, None] * K + dims[None, :]
        q = tl.load(q_ptr + row, mask=valid[:, None], other=0.0)
        k = tl.load(k_ptr + row, mask=valid[:, None], other=0.0)
        sums = tl.load(sums_ptr + row, mask=valid[:, None], other=0.0)
        final = tl.sum(tl.where((i == size - 1)[:, None], sums, 0.0), axis=0)
        grown = tl.exp(sums)
        dq *= grown * scale
        d_read *= grown
        dk *= tl.exp(tl.minimum(final[None, :] - sums, 0.0))
        kept = dk * k
        d_beta -= tl.sum(d_read * k, axis=1)
        d_read *= beta[:, None]
        d_sums = dq * q - d_read * k - kept
        d_final = tl.sum(kept, axis=0) + tl.exp(final) * through
        d_sums += tl.where((i == size - 1)[:, None], d_final[None, :], 0.0)
        dk -= d_read
        # 3. Those through A and B, level by level. A token's own product has no decay.
        d_scores *= scale
        own = tl.sum(tl.where(i[:, None] == i[None, :], d_scores, 0.0), axis=1)
        dq += own[:, None] * k
        dk += own[:, None] * q
        for level in range(1, 7):
            factors, is_late, is_pair = _level(
                sums_ptr, sums, token, dims, head, i, size, level, H, K
            )
            keys = (k * factors).to(k.dtype)
            queries = (q * factors).to(k.dtype)
            # Late tokens get their gradient as rows of A, without beta, and early ones as columns.
            lower = tl.where(is_pair, d_lower, 0.0)
            both = (lower + tl.trans(lower * beta[:, None])).to(k.dtype)
            moved = tl.dot(both, keys, input_precision=PRECISION) * factors
            d_beta += tl.sum(tl.where(is_late[:, None], moved * k, 0.0), axis=1)
            moved *= tl.where(is_late, beta, 1.0)[:, None]
            scores = tl.where(is_pair, d_scores, 0.0).to(k.dtype)
            rows = tl.dot(scores, keys, input_precision=PRECISION) * factors
            columns = tl.dot(tl.trans(scores), queries, input_precision=PRECISION) * factors
            d_sums += q * rows + k * (tl.where(is_late[:, None], moved, -moved) - columns)
            dq += rows
            dk += moved + columns
        # 4. g_i is part of every later sum.
        dg = tl.sum(d_sums, axis=0)[None, :] - tl.cumsum(d_sums, axis=0) + d_sums
        tl.store(dq_ptr + row, dq.to(k.dtype), mask=valid[:, None])
        tl.store(dk_ptr + row, dk.to(k.dtype), mask=valid[:, None])
        tl.store(dg_ptr + row, dg, mask=valid[:, None])
        tl.store(d_beta_ptr + tl.cast(part, tl.int64) * T * H + gates, d_beta, mask=valid)
