"""The Triton kernels of the gated delta rule: :mod:`moetrain.kernels.linear_attention.gated_delta`
has the formulas, the legend and what launches them. Without DELTA they are those of
:mod:`moetrain.kernels.linear_attention.ssd`, where U is given and there is no W.

A program has one head of one chunk, or walks over the chunks of one document, for all columns of a
state or for some. In all: H, Q, K, V and C as in the legend, C being the tokens of a chunk; ``row``
and ``gates`` are offsets of its tokens' rows and of their gates.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from moetrain.kernels.backend import tl, triton


@triton.jit
def _decay(sums_I, i, size):
    """Return exp(G_i - G_j) on and below the diagonal of a chunk, elsewhere 0."""
    sums_J = tl.sum(tl.where(i[:, None] == i[None, :], sums_I[:, None], 0.0), axis=0)
    keep = (i[:, None] >= i[None, :]) & (i[:, None] < size)
    return tl.exp(tl.where(keep, sums_I[:, None] - sums_J[None, :], float("-inf")))


@triton.jit
def prepare_kernel(
    k_ptr, v_ptr, g_ptr, beta_ptr, starts_ptr, sizes_ptr, w_ptr, u_ptr, inverse_ptr, sums_ptr,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """Compute T and the sums of g (or read them), then W and U without its part of the state."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    size = tl.load(sizes_ptr + chunk)
    i = tl.arange(0, C)
    tiles = (tl.cast(chunk, tl.int64) * H + head) * C * C + i[:, None] * C + i[None, :]
    if size == 0:
        if not KNOWN:
            tl.store(inverse_ptr + tiles, tl.zeros([C, C], inverse_ptr.dtype.element_ty))
    else:
        token = (tl.load(starts_ptr + chunk) + i).to(tl.int64)
        valid = i < size
        dims = tl.arange(0, K)
        keys = k_ptr + ((token * Q + head // (H // Q)) * K)[:, None] + dims[None, :]
        k = tl.load(keys, mask=valid[:, None], other=0.0)
        gates = token * H + head
        beta = tl.load(beta_ptr + gates, mask=valid, other=0.0)
        if KNOWN:
            sums = tl.load(sums_ptr + gates, mask=valid, other=0.0)
            inverse = tl.load(inverse_ptr + tiles)
        else:
            sums = tl.cumsum(tl.load(g_ptr + gates, mask=valid, other=0.0), axis=0)
            tl.store(sums_ptr + gates, sums, mask=valid)
            lower = tl.dot(k, tl.trans(k), input_precision=PRECISION)
            lower = lower * _decay(sums, i, size) * beta[:, None]
            lower = tl.where(i[:, None] > i[None, :], lower, 0.0)
            # Blocks of 2, 4, ... 64: the inverse of [[A, 0], [B, D]] has -D^-1 B A^-1 for B.
            wide = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
            wide -= tl.where(i[:, None] // 2 == i[None, :] // 2, lower, 0.0)
            for level in tl.static_range(2, 7):
                width = 1 << level
                is_between = (i[:, None] // width == i[None, :] // width) & (
                    i[:, None] // (width // 2) != i[None, :] // (width // 2)
                )
                block = tl.where(is_between, lower, 0.0)
                block = tl.dot(wide, block, input_precision=PRECISION)
                wide -= tl.dot(block, wide, input_precision=PRECISION)
            inverse = wide.to(k.dtype)
            tl.store(inverse_ptr + tiles, inverse)
        row = gates[:, None]
        k = (k * (beta * tl.exp(sums))[:, None]).to(k.dtype)
        w = tl.dot(inverse, k, input_precision=PRECISION)
        tl.store(w_ptr + row * K + dims[None, :], w.to(k.dtype), mask=valid[:, None])
        values = tl.arange(0, V)
        v = tl.load(v_ptr + row * V + values[None, :], mask=valid[:, None], other=0.0)
        u = tl.dot(inverse, (v * beta[:, None]).to(k.dtype), input_precision=PRECISION)
        tl.store(u_ptr + row * V + values[None, :], u.to(k.dtype), mask=valid[:, None])


@triton.jit
def states_kernel(
    k_ptr, w_ptr, u_ptr, sums_ptr, bounds_ptr, firsts_ptr, new_ptr, states_ptr,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Walk over a document's chunks: write each one's first state, and U whole."""
    part, head, doc = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(bounds_ptr + doc), tl.load(bounds_ptr + doc + 1)
    first, last = tl.load(firsts_ptr + doc), tl.load(firsts_ptr + doc + 1)
    i, dims = tl.arange(0, C), tl.arange(0, K)
    values = part * BV + tl.arange(0, BV)
    state = tl.zeros([K, BV], tl.float32)
    for chunk in range(first, last):
        start = begin + (chunk - first) * C
        token = tl.cast(start + i, tl.int64)
        valid = token < end
        row = (token * H + head)[:, None]
        if DELTA:
            w = tl.load(w_ptr + row * K + dims[None, :], mask=valid[:, None], other=0.0)
        u = tl.load(u_ptr + row * V + values[None, :], mask=valid[:, None], other=0.0)
        keys = k_ptr + ((token * Q + head // (H // Q)) * K)[:, None] + dims[None, :]
        k = tl.load(keys, mask=valid[:, None], other=0.0)
        sums = tl.load(sums_ptr + token * H + head, mask=valid, other=0.0)
        ending = tl.cast(start + tl.minimum(C, end - start) - 1, tl.int64)
        final = tl.load(sums_ptr + ending * H + head)
        rounded = state.to(k.dtype)
        at = (tl.cast(chunk, tl.int64) * H + head) * K * V
        tl.store(states_ptr + at + dims[:, None] * V + values[None, :], rounded)
        new = u.to(tl.float32)
        if DELTA:
            new -= tl.dot(w, rounded, input_precision=PRECISION)
            tl.store(new_ptr + row * V + values[None, :], new.to(k.dtype), mask=valid[:, None])
        new = (new * tl.exp(final - sums)[:, None]).to(k.dtype)
        state = state * tl.exp(final) + tl.dot(tl.trans(k), new, input_precision=PRECISION)


@triton.jit
def outputs_kernel(
    q_ptr, k_ptr, new_ptr, sums_ptr, states_ptr, starts_ptr, sizes_ptr, out_ptr, scale,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    part, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        i, dims = tl.arange(0, C), tl.arange(0, K)
        values = part * BV + tl.arange(0, BV)
        valid = i < size
        token = (tl.load(starts_ptr + chunk) + i).to(tl.int64)
        key_row = (token * Q + head // (H // Q))[:, None] * K + dims[None, :]
        q = tl.load(q_ptr + key_row, mask=valid[:, None], other=0.0)
        k = tl.load(k_ptr + key_row, mask=valid[:, None], other=0.0)
        row = (token * H + head)[:, None] * V + values[None, :]
        u = tl.load(new_ptr + row, mask=valid[:, None], other=0.0)
        sums = tl.load(sums_ptr + token * H + head, mask=valid, other=0.0)
        at = (tl.cast(chunk, tl.int64) * H + head) * K * V
        state = tl.load(states_ptr + at + dims[:, None] * V + values[None, :])
        out = tl.dot(q, state, input_precision=PRECISION) * tl.exp(sums)[:, None]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * _decay(sums, i, size)
        out += tl.dot(scores.to(k.dtype), u, input_precision=PRECISION)
        tl.store(out_ptr + row, (out * scale).to(k.dtype), mask=valid[:, None])


@triton.jit
def local_kernel(
    q_ptr, k_ptr, do_ptr, sums_ptr, starts_ptr, sizes_ptr, du_ptr, scale,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of U from its own chunk's outputs: (D * Q K^T)^T dO."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        i, dims, values = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
        valid = i < size
        token = (tl.load(starts_ptr + chunk) + i).to(tl.int64)
        key_row = (token * Q + head // (H // Q))[:, None] * K + dims[None, :]
        q = tl.load(q_ptr + key_row, mask=valid[:, None], other=0.0)
        k = tl.load(k_ptr + key_row, mask=valid[:, None], other=0.0)
        row = (token * H + head)[:, None] * V + values[None, :]
        do = tl.load(do_ptr + row, mask=valid[:, None], other=0.0)
        sums = tl.load(sums_ptr + token * H + head, mask=valid, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = (scores * _decay(sums, i, size) * scale).to(k.dtype)
        du = tl.dot(tl.trans(scores), do, input_precision=PRECISION)
        tl.store(du_ptr + row, du.to(k.dtype), mask=valid[:, None])


@triton.jit
def state_gradients_kernel(
    q_ptr, k_ptr, w_ptr, do_ptr, sums_ptr, bounds_ptr, firsts_ptr, du_ptr, d_states_ptr, scale,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Walk back over a document's chunks: write each one's last state's gradient, and dU whole."""
    part, head, doc = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(bounds_ptr + doc), tl.load(bounds_ptr + doc + 1)
    first, last = tl.load(firsts_ptr + doc), tl.load(firsts_ptr + doc + 1)
    i, dims = tl.arange(0, C), tl.arange(0, K)
    values = part * BV + tl.arange(0, BV)
    d_state = tl.zeros([K, BV], tl.float32)
    for back in range(0, last - first):
        chunk = last - 1 - back
        start = begin + (chunk - first) * C
        token = tl.cast(start + i, tl.int64)
        valid = token < end
        key_row = (token * Q + head // (H // Q))[:, None] * K + dims[None, :]
        row = (token * H + head)[:, None]
        q = tl.load(q_ptr + key_row, mask=valid[:, None], other=0.0)
        k = tl.load(k_ptr + key_row, mask=valid[:, None], other=0.0)
        if DELTA:
            w = tl.load(w_ptr + row * K + dims[None, :], mask=valid[:, None], other=0.0)
        do = tl.load(do_ptr + row * V + values[None, :], mask=valid[:, None], other=0.0)
        du = tl.load(du_ptr + row * V + values[None, :], mask=valid[:, None], other=0.0)
        sums = tl.load(sums_ptr + token * H + head, mask=valid, other=0.0)
        ending = tl.cast(start + tl.minimum(C, end - start) - 1, tl.int64)
        final = tl.load(sums_ptr + ending * H + head)
        rounded = d_state.to(k.dtype)
        at = (tl.cast(chunk, tl.int64) * H + head) * K * V
        tl.store(d_states_ptr + at + dims[:, None] * V + values[None, :], rounded)
        through = tl.dot(k, rounded, input_precision=PRECISION) * tl.exp(final - sums)[:, None]
        du = tl.where(valid[:, None], du.to(tl.float32) + through, 0.0).to(k.dtype)
        tl.store(du_ptr + row * V + values[None, :], du, mask=valid[:, None])
        do = (do * (tl.exp(sums) * scale)[:, None]).to(k.dtype)
        d_state = d_state * tl.exp(final) + tl.dot(tl.trans(q), do, input_precision=PRECISION)
        if DELTA:
            d_state -= tl.dot(tl.trans(w), du, input_precision=PRECISION)


@triton.jit
def input_gradients_kernel(
    q_ptr, k_ptr, do_ptr, new_ptr, du_ptr, sums_ptr, states_ptr, d_states_ptr, starts_ptr,
    sizes_ptr, dq_ptr, dk_ptr, dw_ptr, d_sums_ptr, scale, T,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Compute, for some columns of K, dQ, dW, dK but for T's part, and their part of dG."""
    part, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        i, dims = tl.arange(0, C), part * BK + tl.arange(0, BK)
        valid = i < size
        token = (tl.load(starts_ptr + chunk) + i).to(tl.int64)
        gates = token * H + head
        dq, dk, dw = (
            tl.zeros([C, BK], tl.float32),
            tl.zeros([C, BK], tl.float32),
            tl.zeros([C, BK], tl.float32),
        )
        d_scores = tl.zeros([C, C], tl.float32)
        through = tl.zeros([BK], tl.float32)
        at = (tl.cast(chunk, tl.int64) * H + head) * K * V + dims[:, None] * V
        for first in range(0, V, BV):
            values = first + tl.arange(0, BV)
            row = gates[:, None] * V + values[None, :]
            state = tl.load(states_ptr + at + values[None, :])
            d_state = tl.load(d_states_ptr + at + values[None, :])
            do = tl.load(do_ptr + row, mask=valid[:, None], other=0.0)
            u = tl.load(new_ptr + row, mask=valid[:, None], other=0.0)
            if DELTA:
                du = tl.load(du_ptr + row, mask=valid[:, None], other=0.0)
            dq += tl.dot(do, tl.trans(state), input_precision=PRECISION)
            dk += tl.dot(u, tl.trans(d_state), input_precision=PRECISION)
            if DELTA:
                dw -= tl.dot(du, tl.trans(state), input_precision=PRECISION)
            d_scores += tl.dot(do, tl.trans(u), input_precision=PRECISION)
            through += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), axis=1)
        key_row = (token * Q + head // (H // Q))[:, None] * K + dims[None, :]
        q = tl.load(q_ptr + key_row, mask=valid[:, None], other=0.0)
        k = tl.load(k_ptr + key_row, mask=valid[:, None], other=0.0)
        sums = tl.load(sums_ptr + gates, mask=valid, other=0.0)
        final = tl.sum(tl.where(i == size - 1, sums, 0.0), axis=0)
        dq *= (tl.exp(sums) * scale)[:, None]
        dk *= tl.exp(final - sums)[:, None]
        kept = tl.sum(dk * k, axis=1)
        d_sums = tl.sum(dq * q, axis=1) - kept
        d_final = tl.sum(kept, axis=0) + tl.exp(final) * tl.sum(through, axis=0)
        d_scores *= _decay(sums, i, size) * scale
        moved = d_scores * tl.dot(q, tl.trans(k), input_precision=PRECISION)
        columns = tl.sum(moved, axis=0)  # laid out by column; as rows:
        columns = tl.sum(tl.where(i[:, None] == i[None, :], columns[None, :], 0.0), axis=1)
        d_sums += tl.sum(moved, axis=1) - columns + tl.where(i == size - 1, d_final, 0.0)
        parts = tl.cast(part, tl.int64) * T * H
        tl.store(d_sums_ptr + parts + gates, d_sums, mask=valid)
        rounded = d_scores.to(k.dtype)
        dq += tl.dot(rounded, k, input_precision=PRECISION)
        dk += tl.dot(tl.trans(rounded), q, input_precision=PRECISION)
        row = gates[:, None] * K + dims[None, :]
        tl.store(dq_ptr + row, dq.to(k.dtype), mask=valid[:, None])
        tl.store(dk_ptr + row, dk.to(k.dtype), mask=valid[:, None])
        if DELTA:
            tl.store(dw_ptr + row, dw.to(k.dtype), mask=valid[:, None])


@triton.jit
def inverse_gradients_kernel(
    k_ptr, v_ptr, beta_ptr, sums_ptr, inverse_ptr, du_ptr, dw_ptr, d_sums_ptr, starts_ptr,
    sizes_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, T,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Differentiate W and U by what they are made of: dV, dbeta, dg, and the rest of dK."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        i = tl.arange(0, C)
        valid = i < size
        token = (tl.load(starts_ptr + chunk) + i).to(tl.int64)
        gates = token * H + head
        beta = tl.load(beta_ptr + gates, mask=valid, other=0.0)
        sums = tl.load(sums_ptr + gates, mask=valid, other=0.0)
        tiles = (tl.cast(chunk, tl.int64) * H + head) * C * C + i[:, None] * C + i[None, :]
        inverse = tl.load(inverse_ptr + tiles)
        d_inverse = tl.zeros([C, C], tl.float32)
        overlap = tl.zeros([C, C], tl.float32)
        d_beta, along = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        for first in range(0, V, BV):
            row = gates[:, None] * V + first + tl.arange(0, BV)[None, :]
            du = tl.load(du_ptr + row, mask=valid[:, None], other=0.0)
            v = tl.load(v_ptr + row, mask=valid[:, None], other=0.0)
            scaled = (v * beta[:, None]).to(v.dtype)
            d_inverse += tl.dot(du, tl.trans(scaled), input_precision=PRECISION)
            d_value = tl.dot(tl.trans(inverse), du, input_precision=PRECISION)
            d_beta += tl.sum(d_value * v, axis=1)
            tl.store(dv_ptr + row, (d_value * beta[:, None]).to(v.dtype), mask=valid[:, None])
        growth = tl.exp(sums)
        factor = beta * growth
        key_row = (token * Q + head // (H // Q))[:, None] * K
        for first in range(0, K, BK):
            dims = first + tl.arange(0, BK)[None, :]
            k = tl.load(k_ptr + key_row + dims, mask=valid[:, None], other=0.0)
            dw = tl.load(dw_ptr + gates[:, None] * K + dims, mask=valid[:, None], other=0.0)
            scaled = (k * factor[:, None]).to(k.dtype)
            d_inverse += tl.dot(dw, tl.trans(scaled), input_precision=PRECISION)
            overlap += tl.dot(k, tl.trans(k), input_precision=PRECISION)
            d_key = tl.dot(tl.trans(inverse), dw, input_precision=PRECISION)
            along += tl.sum(d_key * k, axis=1)
        d_beta += along * growth
        wide = tl.trans(inverse).to(tl.float32)
        d_lower = tl.dot(wide, d_inverse, input_precision=PRECISION)
        d_lower = -tl.dot(d_lower, wide, input_precision=PRECISION) * _decay(sums, i, size)
        d_lower = tl.where(i[:, None] > i[None, :], d_lower, 0.0)
        products = d_lower * overlap
        d_beta += tl.sum(products, axis=1)
        tl.store(dbeta_ptr + gates, d_beta, mask=valid)
        moved = products * beta[:, None]
        columns = tl.sum(moved, axis=0)
        columns = tl.sum(tl.where(i[:, None] == i[None, :], columns[None, :], 0.0), axis=1)
        d_sums = along * factor + tl.sum(moved, axis=1) - columns
        for part in tl.static_range(P):
            parts = tl.cast(part, tl.int64) * T * H
            d_sums += tl.load(d_sums_ptr + parts + gates, mask=valid, other=0.0)
        d_sums = tl.where(valid, d_sums, 0.0)
        # g_i is part of every later sum.
        dg = tl.sum(d_sums, axis=0) - tl.cumsum(d_sums, axis=0) + d_sums
        tl.store(dg_ptr + gates, dg, mask=valid)
        rounded = (d_lower * beta[:, None]).to(inverse.dtype)
        for first in range(0, K, BK):
            dims = first + tl.arange(0, BK)[None, :]
            row = gates[:, None] * K + dims
            k = tl.load(k_ptr + key_row + dims, mask=valid[:, None], other=0.0)
            dw = tl.load(dw_ptr + row, mask=valid[:, None], other=0.0)
            dk = tl.load(dk_ptr + row, mask=valid[:, None], other=0.0).to(tl.float32)
            dk += tl.dot(tl.trans(inverse), dw, input_precision=PRECISION) * factor[:, None]
            dk += tl.dot(rounded, k, input_precision=PRECISION)
            dk += tl.dot(tl.trans(rounded), k, input_precision=PRECISION)
            tl.store(dk_ptr + row, dk.to(k.dtype), mask=valid[:, None])
