"""The Triton kernels of the gated delta rule, and of Mamba-2's recurrence.

:mod:`moetrain.kernels.linear_attention.gated_delta` has the formulas, the legend and the launches.
Without DELTA they are the kernels of :mod:`moetrain.kernels.linear_attention.ssd`, where U is given
and there is no T. With CHANNELS the two kernels that walk over chunks are those of
:mod:`moetrain.kernels.linear_attention.kda`, where each channel of the keys has a gate.

A program takes one head of one chunk, or walks over the chunks of one document. It computes all
columns of a state or some. In all kernels H, Q, K and V are as in the legend, and C is the number
of tokens in a chunk. ``gates`` are the offsets of the tokens' gates in [T, H], and ``row`` those of
the elements in the tokens' rows.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from moetrain.runtime.backend import tl, triton


@triton.jit
def _decay(sums_I, i, size):
    """Return D_ij = exp(G_i - G_j) for j <= i < ``size``, elsewhere 0."""
    sums_J = tl.sum(tl.where(i[:, None] == i[None, :], sums_I[:, None], 0.0), axis=0)
    keep = (i[:, None] >= i[None, :]) & (i[:, None] < size)
    return tl.exp(tl.where(keep, sums_I[:, None] - sums_J[None, :], float("-inf")))


@triton.jit
def inverse_of(lower, i, PRECISION: tl.constexpr):
    """Return (1 + L)^-1 of the strictly lower triangular L [64, 64], in fp32."""
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
    return wide


@triton.jit
def prepare_kernel(
    k_ptr, g_ptr, beta_ptr, starts_ptr, sizes_ptr, inverse_ptr, sums_ptr,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute T and the sums of g."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    size = tl.load(sizes_ptr + chunk)
    i = tl.arange(0, C)
    tiles = (tl.cast(chunk, tl.int64) * H + head) * C * C + i[:, None] * C + i[None, :]
    if size == 0:
        tl.store(inverse_ptr + tiles, tl.zeros([C, C], inverse_ptr.dtype.element_ty))
    else:
        token = (tl.load(starts_ptr + chunk) + i).to(tl.int64)
        valid = i < size
        keys = k_ptr + ((token * Q + head // (H // Q)) * K)[:, None] + tl.arange(0, K)[None, :]
        k = tl.load(keys, mask=valid[:, None], other=0.0)
        gates = token * H + head
        beta = tl.load(beta_ptr + gates, mask=valid, other=0.0)
        sums = tl.cumsum(tl.load(g_ptr + gates, mask=valid, other=0.0), axis=0)
        tl.store(sums_ptr + gates, sums, mask=valid)
        lower = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        lower = lower * _decay(sums, i, size) * beta[:, None]
        lower = tl.where(i[:, None] > i[None, :], lower, 0.0)
        wide = inverse_of(lower, i, PRECISION)
        tl.store(inverse_ptr + tiles, wide.to(inverse_ptr.dtype.element_ty))


@triton.jit
def states_kernel(
    k_ptr, v_ptr, beta_ptr, sums_ptr, inverse_ptr, begins_ptr, ends_ptr, firsts_ptr, new_ptr,
    states_ptr, carried_ptr, slots_ptr, is_new_ptr, writes_ptr,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr, CARRIED: tl.constexpr, DELTA: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Walk over a document's chunks. Write the state before each chunk and, with ``DELTA``, its U.

    With ``CARRIED`` the document begins with its slot's state, unless it is new, and leaves the
    state after its last full chunk there. With ``CHANNELS`` the pointers are to decayed vectors:
    ``k`` to k e^G, ``writes`` to k e^(G_last - G), and ``sums`` to each chunk's e^G_last.
    """
    part, head, doc = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(begins_ptr + doc), tl.load(ends_ptr + doc)
    first, last = tl.load(firsts_ptr + doc), tl.load(firsts_ptr + doc + 1)
    i, dims = tl.arange(0, C), tl.arange(0, K)
    values = part * BV + tl.arange(0, BV)
    state = tl.zeros([K, BV], tl.float32)
    if CARRIED:
        slot = tl.cast(tl.load(slots_ptr + doc), tl.int64)
        carried = carried_ptr + (slot * H + head) * K * V + dims[:, None] * V + values[None, :]
        state = tl.where(tl.load(is_new_ptr + doc) == 0, tl.load(carried), state)
    for chunk in range(first, last):
        start = begin + (chunk - first) * C
        token = tl.cast(start + i, tl.int64)
        valid = token < end
        gates = token * H + head
        row = gates[:, None] * V + values[None, :]
        v = tl.load(v_ptr + row, mask=valid[:, None], other=0.0)
        keys = ((token * Q + head // (H // Q)) * K)[:, None] + dims[None, :]
        k = tl.load(k_ptr + keys, mask=valid[:, None], other=0.0)
        at = tl.cast(chunk, tl.int64) * H + head
        if CHANNELS:
            writes = tl.load(writes_ptr + keys, mask=valid[:, None], other=0.0)
        else:
            sums = tl.load(sums_ptr + gates, mask=valid, other=0.0)
        if DELTA:
            inverse = tl.load(inverse_ptr + at * C * C + i[:, None] * C + i[None, :])
            beta = tl.load(beta_ptr + gates, mask=valid, other=0.0)
        if CHANNELS:
            factor = tl.load(sums_ptr + at * K + dims)
        else:
            ending = tl.cast(start + tl.minimum(C, end - start) - 1, tl.int64)
            final = tl.load(sums_ptr + ending * H + head)
        rounded = state.to(k.dtype)
        tl.store(states_ptr + at * K * V + dims[:, None] * V + values[None, :], rounded)
        new = v.to(tl.float32)
        if DELTA:
            read = tl.dot(k, rounded, input_precision=PRECISION)
            if not CHANNELS:
                read = read * tl.exp(sums)[:, None]
            right = ((new - read) * beta[:, None]).to(k.dtype)
            new = tl.dot(inverse, right, input_precision=PRECISION)
            tl.store(new_ptr + row, new.to(k.dtype), mask=valid[:, None])
        if CHANNELS:
            written = tl.dot(tl.trans(writes), new.to(k.dtype), input_precision=PRECISION)
            after = state * factor[:, None] + written
        else:
            new = (new * tl.exp(final - sums)[:, None]).to(k.dtype)
            after = state * tl.exp(final) + tl.dot(tl.trans(k), new, input_precision=PRECISION)
        if CARRIED:
            after = tl.where(end - start >= C, after, state)
        state = after
    if CARRIED:
        tl.store(carried, state)


@triton.jit
def outputs_kernel(
    q_ptr, k_ptr, new_ptr, sums_ptr, states_ptr, starts_ptr, sizes_ptr, out_ptr, scale,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # O = scale (diag(e^G) Q S + (D * Q K^T) U), for some columns of the values.
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
    q_ptr, k_ptr, do_ptr, beta_ptr, sums_ptr, inverse_ptr, bounds_ptr, firsts_ptr, du_ptr,
    d_states_ptr, writes_ptr, scale,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Walk back over a document's chunks. Write the gradient of the state after each chunk, and dR.

    dR (without ``DELTA``, the whole dU) overwrites the part of dU that :func:`local_kernel` wrote.
    With ``CHANNELS`` the pointers are to decayed vectors: ``q`` to scale q e^G, others as in
    :func:`states_kernel`.
    """
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
        gates = token * H + head
        key_row = (token * Q + head // (H // Q))[:, None] * K + dims[None, :]
        row = gates[:, None] * V + values[None, :]
        q = tl.load(q_ptr + key_row, mask=valid[:, None], other=0.0)
        k = tl.load(k_ptr + key_row, mask=valid[:, None], other=0.0)
        do = tl.load(do_ptr + row, mask=valid[:, None], other=0.0)
        du = tl.load(du_ptr + row, mask=valid[:, None], other=0.0)
        at = tl.cast(chunk, tl.int64) * H + head
        if CHANNELS:
            writes = tl.load(writes_ptr + key_row, mask=valid[:, None], other=0.0)
            factor = tl.load(sums_ptr + at * K + dims)
        else:
            sums = tl.load(sums_ptr + gates, mask=valid, other=0.0)
            ending = tl.cast(start + tl.minimum(C, end - start) - 1, tl.int64)
            final = tl.load(sums_ptr + ending * H + head)
        rounded = d_state.to(k.dtype)
        tl.store(d_states_ptr + at * K * V + dims[:, None] * V + values[None, :], rounded)
        if CHANNELS:
            through = tl.dot(writes, rounded, input_precision=PRECISION)
        else:
            through = tl.dot(k, rounded, input_precision=PRECISION) * tl.exp(final - sums)[:, None]
        du = tl.where(valid[:, None], du.to(tl.float32) + through, 0.0).to(k.dtype)
        if CHANNELS:
            d_state = d_state * factor[:, None]
            d_state += tl.dot(tl.trans(q), do, input_precision=PRECISION)
        else:
            growth = tl.exp(sums)
            do = (do * (growth * scale)[:, None]).to(k.dtype)
            d_state = d_state * tl.exp(final) + tl.dot(tl.trans(q), do, input_precision=PRECISION)
        if DELTA:
            inverse = tl.load(inverse_ptr + at * C * C + i[:, None] * C + i[None, :])
            beta = tl.load(beta_ptr + gates, mask=valid, other=0.0)
            dr = tl.dot(tl.trans(inverse), du, input_precision=PRECISION)
            tl.store(du_ptr + row, dr.to(k.dtype), mask=valid[:, None])
            if CHANNELS:
                dr = (dr * beta[:, None]).to(k.dtype)
            else:
                dr = (dr * (growth * beta)[:, None]).to(k.dtype)
            d_state -= tl.dot(tl.trans(k), dr, input_precision=PRECISION)
        else:
            tl.store(du_ptr + row, du, mask=valid[:, None])


@triton.jit
def input_gradients_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, new_ptr, dr_ptr, beta_ptr, sums_ptr, states_ptr, d_states_ptr,
    starts_ptr, sizes_ptr, dq_ptr, dk_ptr, dv_ptr, d_sums_ptr, d_beta_ptr, scale, T,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Compute the share of one part of K's columns in the inputs' gradients.

    These are dQ and dK for the part's columns, and its terms of dG. With ``DELTA`` they are also
    its terms of dbeta and, if there are P parts, dV for every P-th of V's blocks.
    """
    part, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        i, dims = tl.arange(0, C), part * BK + tl.arange(0, BK)
        valid = i < size
        token = (tl.load(starts_ptr + chunk) + i).to(tl.int64)
        gates = token * H + head
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
            dq += tl.dot(do, tl.trans(state), input_precision=PRECISION)
            dk += tl.dot(u, tl.trans(d_state), input_precision=PRECISION)
            d_scores += tl.dot(do, tl.trans(u), input_precision=PRECISION)
            through += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), axis=1)
            if DELTA:
                dr = tl.load(dr_ptr + row, mask=valid[:, None], other=0.0)
                d_read += tl.dot(dr, tl.trans(state), input_precision=PRECISION)
                d_lower -= tl.dot(dr, tl.trans(u), input_precision=PRECISION)
                if first // BV % (K // BK) == part:
                    v = tl.load(v_ptr + row, mask=valid[:, None], other=0.0)
                    beta = tl.load(beta_ptr + gates, mask=valid, other=0.0)
                    dv = dr.to(tl.float32) * beta[:, None]
                    tl.store(dv_ptr + row, dv.to(v.dtype), mask=valid[:, None])
                    d_beta += tl.sum(dr.to(tl.float32) * v, axis=1)
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
        decay = _decay(sums, i, size)
        d_scores *= decay * scale
        moved = d_scores * tl.dot(q, tl.trans(k), input_precision=PRECISION)
        parts = tl.cast(part, tl.int64) * T * H
        if DELTA:
            beta = tl.load(beta_ptr + gates, mask=valid, other=0.0)
            d_read *= tl.exp(sums)[:, None]
            along = tl.sum(d_read * k, axis=1)
            d_sums -= beta * along
            dk -= d_read * beta[:, None]
            d_lower = tl.where(i[:, None] > i[None, :], d_lower * decay, 0.0)
            products = d_lower * tl.dot(k, tl.trans(k), input_precision=PRECISION)
            d_beta += tl.sum(products, axis=1) - along
            tl.store(d_beta_ptr + parts + gates, d_beta, mask=valid)
            moved += products * beta[:, None]
            lower = (d_lower * beta[:, None]).to(k.dtype)
            dk += tl.dot(lower, k, input_precision=PRECISION)
            dk += tl.dot(tl.trans(lower), k, input_precision=PRECISION)
        columns = tl.sum(moved, axis=0)  # has the layout of columns; the next line gives it rows'
        columns = tl.sum(tl.where(i[:, None] == i[None, :], columns[None, :], 0.0), axis=1)
        d_sums += tl.sum(moved, axis=1) - columns + tl.where(i == size - 1, d_final, 0.0)
        tl.store(d_sums_ptr + parts + gates, d_sums, mask=valid)
        scores = d_scores.to(k.dtype)
        dq += tl.dot(scores, k, input_precision=PRECISION)
        dk += tl.dot(tl.trans(scores), q, input_precision=PRECISION)
        row = gates[:, None] * K + dims[None, :]
        tl.store(dq_ptr + row, dq.to(k.dtype), mask=valid[:, None])
        tl.store(dk_ptr + row, dk.to(k.dtype), mask=valid[:, None])


@triton.jit
def gate_gradients_kernel(
    d_sums_ptr, d_beta_ptr, starts_ptr, sizes_ptr, dg_ptr, dbeta_ptr, T,
    H: tl.constexpr, C: tl.constexpr, P: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Add up the parts' dG and dbeta, and differentiate the sums of g."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, C)
    valid = i < tl.load(sizes_ptr + chunk)
    gates = (tl.load(starts_ptr + chunk) + i).to(tl.int64) * H + head
    d_sums, d_beta = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for part in tl.static_range(P):
        parts = tl.cast(part, tl.int64) * T * H + gates
        d_sums += tl.load(d_sums_ptr + parts, mask=valid, other=0.0)
        if DELTA:
            d_beta += tl.load(d_beta_ptr + parts, mask=valid, other=0.0)
    # g_i is part of every later sum.
    dg = tl.sum(d_sums, axis=0) - tl.cumsum(d_sums, axis=0) + d_sums
    tl.store(dg_ptr + gates, dg, mask=valid)
    if DELTA:
        tl.store(dbeta_ptr + gates, d_beta, mask=valid)
