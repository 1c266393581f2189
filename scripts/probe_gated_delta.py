"""A first gated delta rule in Triton, forward and backward: is it right, and what does it take?

    python scripts/probe_gated_delta.py [--tokens 16384] [--heads 32] [--width 128]

Not a part of the package: no model has such a layer yet. It compares output and gradients with the
recurrence in fp64, token by token, over documents of ugly lengths, then times each kernel (CUDA
only; on a CPU Triton's interpreter runs the comparison). LOG.md has what was measured.

Token by token, with a state S [K, V] for each head and document, which begins as zeros:

    S' = exp(g) S        u = beta (v - S'^T k)        S = S' + k u^T        o = scale S^T q

In a chunk, with G the running sums of g, D_ij = exp(G_i - G_j) below or on the diagonal, S the
state before it, and L_ij = beta_i D_ij k_i.k_j strictly below the diagonal (Gated DeltaNet, arXiv
2412.06464):

    T = (1 + L)^-1      W = T diag(beta e^G) K      U = T diag(beta) V - W S
    O = scale (diag(e^G) Q S + (D * Q K^T) U)       S <- e^G_last S + (diag(e^(G_last - G)) K)^T U

Legend: T tokens, H heads of values, Q heads of queries and keys, K width of a key, V width of a
value, C chunks, N documents.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
# (Triton's launch settings and unrolled ranges are not typed.)

import argparse
import os
from collections.abc import Callable

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import itertools

import triton
import triton.language as tl

CHUNK = 64


def gated_delta_reference(q_TQK, k_TQK, v_THV, g_TH, beta_TH, bounds_N, scale):
    heads = v_THV.shape[1]
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q_TQK, k_TQK))
    out = []
    ends = bounds_N.tolist()
    for begin, end in itertools.pairwise(ends):
        s = v_THV.new_zeros(heads, k.shape[2], v_THV.shape[2])
        for t in range(begin, end):
            s = s * g_TH[t].exp()[:, None, None]
            u = beta_TH[t][:, None] * (v_THV[t] - torch.einsum("hkv,hk->hv", s, k[t]))
            s = s + k[t][:, :, None] * u[:, None, :]
            out.append(scale * torch.einsum("hkv,hk->hv", s, q[t]))
    return torch.stack(out)


def chunks_of(bounds_N, tokens):
    """Return the first token and the length of each chunk, and each document's first chunk."""
    docs = bounds_N.numel() - 1
    lengths_N = bounds_N.diff()
    ends_N = ((lengths_N + CHUNK - 1) // CHUNK).cumsum(0).int()
    at_C = torch.arange(-(-tokens // CHUNK) + docs, device=bounds_N.device, dtype=torch.int32)
    doc_C = torch.searchsorted(ends_N, at_C, right=True).clamp(max=docs - 1)
    firsts_N = torch.nn.functional.pad(ends_N, (1, 0))
    starts_C = bounds_N[doc_C] + (at_C - firsts_N[doc_C]) * CHUNK
    sizes_C = (bounds_N[doc_C + 1] - starts_C).clamp(0, CHUNK)
    return starts_C.int(), sizes_C.int(), firsts_N.int()


@triton.jit
def _decay(sums_i, rows, columns, size):
    """exp(G_i - G_j) on and below the diagonal, elsewhere 0."""
    sums_j = tl.sum(tl.where(rows[:, None] == columns[None, :], sums_i[:, None], 0.0), axis=0)
    keep = (rows[:, None] >= columns[None, :]) & (rows[:, None] < size)
    return tl.exp(tl.where(keep, sums_i[:, None] - sums_j[None, :], float("-inf")))


@triton.jit
def _prepare_kernel(
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    starts_ptr,
    sizes_ptr,
    w_ptr,
    u_ptr,
    inverse_ptr,
    sums_ptr,
    H,
    Q,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        start = tl.load(starts_ptr + chunk)
        i = tl.arange(0, C)
        valid = i < size
        token = (start + i).to(tl.int64)
        dims = tl.arange(0, K)
        k = tl.load(
            k_ptr + ((token * Q + head // (H // Q)) * K)[:, None] + dims[None, :],
            mask=valid[:, None],
            other=0.0,
        )
        g = tl.load(g_ptr + token * H + head, mask=valid, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + token * H + head, mask=valid, other=0.0).to(tl.float32)
        sums = tl.cumsum(g, axis=0)
        tl.store(sums_ptr + token * H + head, sums, mask=valid)
        lower = tl.dot(k, tl.trans(k)) * _decay(sums, i, i, size) * beta[:, None]
        lower = tl.where(i[:, None] > i[None, :], lower, 0.0)
        # Blocks of 2, 4, ... 64: the inverse of [[A, 0], [B, D]] has -D^-1 B A^-1 in B's place.
        inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        inverse -= tl.where(i[:, None] // 2 == i[None, :] // 2, lower, 0.0)
        for level in tl.static_range(2, 7):
            width = 1 << level
            between = (i[:, None] // width == i[None, :] // width) & (
                i[:, None] // (width // 2) != i[None, :] // (width // 2)
            )
            block = tl.where(between, lower, 0.0)
            inverse -= tl.dot(
                tl.dot(inverse, block, input_precision=PRECISION),
                inverse,
                input_precision=PRECISION,
            )
        inverse = inverse.to(k.dtype)
        at = (tl.cast(chunk, tl.int64) * H + head) * C * C
        tl.store(inverse_ptr + at + i[:, None] * C + i[None, :], inverse)
        row = (token * H + head)[:, None]
        w = tl.dot(inverse, (k * (beta * tl.exp(sums))[:, None]).to(k.dtype))
        tl.store(w_ptr + row * K + dims[None, :], w.to(k.dtype), mask=valid[:, None])
        values = tl.arange(0, V)
        v = tl.load(v_ptr + row * V + values[None, :], mask=valid[:, None], other=0.0)
        u = tl.dot(inverse, (v * beta[:, None]).to(k.dtype))
        tl.store(u_ptr + row * V + values[None, :], u.to(k.dtype), mask=valid[:, None])


@triton.jit
def _states_kernel(
    k_ptr,
    w_ptr,
    u_ptr,
    sums_ptr,
    bounds_ptr,
    firsts_ptr,
    new_ptr,
    states_ptr,
    H,
    Q,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
):
    part, head, doc = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(bounds_ptr + doc), tl.load(bounds_ptr + doc + 1)
    first, last = tl.load(firsts_ptr + doc), tl.load(firsts_ptr + doc + 1)
    i, dims = tl.arange(0, C), tl.arange(0, K)
    values = part * BV + tl.arange(0, BV)
    state = tl.zeros([K, BV], tl.float32)
    for chunk in range(first, last):
        token = tl.cast(begin + (chunk - first) * C + i, tl.int64)
        valid = token < end
        row = (token * H + head)[:, None]
        w = tl.load(w_ptr + row * K + dims[None, :], mask=valid[:, None], other=0.0)
        u = tl.load(u_ptr + row * V + values[None, :], mask=valid[:, None], other=0.0).to(
            tl.float32
        )
        k = tl.load(
            k_ptr + (token * Q + head // (H // Q))[:, None] * K + dims[None, :],
            mask=valid[:, None],
            other=0.0,
        )
        sums = tl.load(sums_ptr + token * H + head, mask=valid, other=0.0)
        size = tl.minimum(C, end - (begin + (chunk - first) * C))
        final = tl.load(
            sums_ptr + tl.cast(begin + (chunk - first) * C + size - 1, tl.int64) * H + head
        )
        narrow = state.to(k.dtype)
        at = (tl.cast(chunk, tl.int64) * H + head) * K * V
        tl.store(states_ptr + at + dims[:, None] * V + values[None, :], narrow)
        u -= tl.dot(w, narrow)
        tl.store(new_ptr + row * V + values[None, :], u.to(k.dtype), mask=valid[:, None])
        u = (u * tl.exp(final - sums)[:, None]).to(k.dtype)
        state = state * tl.exp(final) + tl.dot(tl.trans(k), u)


@triton.jit
def _outputs_kernel(
    q_ptr,
    k_ptr,
    new_ptr,
    sums_ptr,
    states_ptr,
    starts_ptr,
    sizes_ptr,
    out_ptr,
    scale,
    H,
    Q,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
):
    part, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        start = tl.load(starts_ptr + chunk)
        i, dims = tl.arange(0, C), tl.arange(0, K)
        values = part * BV + tl.arange(0, BV)
        valid = i < size
        token = (start + i).to(tl.int64)
        key_row = (token * Q + head // (H // Q))[:, None] * K + dims[None, :]
        q = tl.load(q_ptr + key_row, mask=valid[:, None], other=0.0)
        k = tl.load(k_ptr + key_row, mask=valid[:, None], other=0.0)
        row = (token * H + head)[:, None] * V + values[None, :]
        u = tl.load(new_ptr + row, mask=valid[:, None], other=0.0)
        sums = tl.load(sums_ptr + token * H + head, mask=valid, other=0.0)
        at = (tl.cast(chunk, tl.int64) * H + head) * K * V
        state = tl.load(states_ptr + at + dims[:, None] * V + values[None, :])
        out = tl.dot(q, state) * tl.exp(sums)[:, None]
        scores = tl.dot(q, tl.trans(k)) * _decay(sums, i, i, size)
        out += tl.dot(scores.to(k.dtype), u)
        tl.store(out_ptr + row, (out * scale).to(out_ptr.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _local_kernel(
    q_ptr,
    k_ptr,
    grad_ptr,
    sums_ptr,
    starts_ptr,
    sizes_ptr,
    local_ptr,
    scale,
    H,
    Q,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
):
    """The gradient of U from its own chunk's outputs: (D * Q K^T)^T dO."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        start = tl.load(starts_ptr + chunk)
        i, dims, values = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
        valid = i < size
        token = (start + i).to(tl.int64)
        key_row = (token * Q + head // (H // Q))[:, None] * K + dims[None, :]
        q = tl.load(q_ptr + key_row, mask=valid[:, None], other=0.0)
        k = tl.load(k_ptr + key_row, mask=valid[:, None], other=0.0)
        row = (token * H + head)[:, None] * V + values[None, :]
        grad = tl.load(grad_ptr + row, mask=valid[:, None], other=0.0)
        sums = tl.load(sums_ptr + token * H + head, mask=valid, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * _decay(sums, i, i, size) * scale
        local = tl.dot(tl.trans(scores.to(k.dtype)), grad)
        tl.store(local_ptr + row, local.to(k.dtype), mask=valid[:, None])


@triton.jit
def _state_grads_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    grad_ptr,
    sums_ptr,
    bounds_ptr,
    firsts_ptr,
    local_ptr,
    grads_ptr,
    scale,
    H,
    Q,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
):
    """Backwards through the chunks: the gradient of each chunk's last state, and of U whole."""
    part, head, doc = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(bounds_ptr + doc), tl.load(bounds_ptr + doc + 1)
    first, last = tl.load(firsts_ptr + doc), tl.load(firsts_ptr + doc + 1)
    i, dims = tl.arange(0, C), tl.arange(0, K)
    values = part * BV + tl.arange(0, BV)
    d_state = tl.zeros([K, BV], tl.float32)
    for back in range(0, last - first):
        chunk = last - 1 - back
        token = tl.cast(begin + (chunk - first) * C + i, tl.int64)
        valid = token < end
        key_row = (token * Q + head // (H // Q))[:, None] * K + dims[None, :]
        row = (token * H + head)[:, None]
        q = tl.load(q_ptr + key_row, mask=valid[:, None], other=0.0)
        k = tl.load(k_ptr + key_row, mask=valid[:, None], other=0.0)
        w = tl.load(w_ptr + row * K + dims[None, :], mask=valid[:, None], other=0.0)
        grad = tl.load(grad_ptr + row * V + values[None, :], mask=valid[:, None], other=0.0)
        d_u = tl.load(local_ptr + row * V + values[None, :], mask=valid[:, None], other=0.0).to(
            tl.float32
        )
        sums = tl.load(sums_ptr + token * H + head, mask=valid, other=0.0)
        size = tl.minimum(C, end - (begin + (chunk - first) * C))
        final = tl.load(
            sums_ptr + tl.cast(begin + (chunk - first) * C + size - 1, tl.int64) * H + head
        )
        narrow = d_state.to(k.dtype)
        at = (tl.cast(chunk, tl.int64) * H + head) * K * V
        tl.store(grads_ptr + at + dims[:, None] * V + values[None, :], narrow)
        d_u += tl.dot(k, narrow) * tl.exp(final - sums)[:, None]
        d_u = tl.where(valid[:, None], d_u, 0.0).to(k.dtype)
        tl.store(local_ptr + row * V + values[None, :], d_u, mask=valid[:, None])
        scaled = (grad * (tl.exp(sums) * scale)[:, None]).to(k.dtype)
        d_state = d_state * tl.exp(final) + tl.dot(tl.trans(q), scaled) - tl.dot(tl.trans(w), d_u)


@triton.jit
def _inputs_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    grad_ptr,
    new_ptr,
    d_u_ptr,
    sums_ptr,
    inverse_ptr,
    states_ptr,
    grads_ptr,
    starts_ptr,
    sizes_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dg_ptr,
    dbeta_ptr,
    scale,
    H,
    Q,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, chunk = tl.program_id(0), tl.program_id(1)
    size = tl.load(sizes_ptr + chunk)
    if size > 0:
        start = tl.load(starts_ptr + chunk)
        i, dims = tl.arange(0, C), tl.arange(0, K)
        valid = i < size
        token = (start + i).to(tl.int64)
        key_row = (token * Q + head // (H // Q))[:, None] * K + dims[None, :]
        row = (token * H + head)[:, None]
        beta = tl.load(beta_ptr + token * H + head, mask=valid, other=0.0).to(tl.float32)
        sums = tl.load(sums_ptr + token * H + head, mask=valid, other=0.0)
        final = tl.sum(tl.where(i == size - 1, sums, 0.0), axis=0)
        k = tl.load(k_ptr + key_row, mask=valid[:, None], other=0.0)
        inverse_at = (tl.cast(chunk, tl.int64) * H + head) * C * C
        inverse = tl.load(inverse_ptr + inverse_at + i[:, None] * C + i[None, :])
        dq = tl.zeros([C, K], tl.float32)
        dk = tl.zeros([C, K], tl.float32)
        dw = tl.zeros([C, K], tl.float32)
        d_scores = tl.zeros([C, C], tl.float32)
        d_inverse = tl.zeros([C, C], tl.float32)
        d_beta = tl.zeros([C], tl.float32)
        through = 0.0
        at = (tl.cast(chunk, tl.int64) * H + head) * K * V
        for part in tl.static_range(V // BV):
            values = part * BV + tl.arange(0, BV)
            value_row = row * V + values[None, :]
            state = tl.load(states_ptr + at + dims[:, None] * V + values[None, :])
            d_state = tl.load(grads_ptr + at + dims[:, None] * V + values[None, :])
            grad = tl.load(grad_ptr + value_row, mask=valid[:, None], other=0.0)
            u = tl.load(new_ptr + value_row, mask=valid[:, None], other=0.0)
            d_u = tl.load(d_u_ptr + value_row, mask=valid[:, None], other=0.0)
            v = tl.load(v_ptr + value_row, mask=valid[:, None], other=0.0)
            dq += tl.dot(grad, tl.trans(state))
            dk += tl.dot(u, tl.trans(d_state))
            dw -= tl.dot(d_u, tl.trans(state))
            d_scores += tl.dot(grad, tl.trans(u))
            through += tl.sum(state.to(tl.float32) * d_state.to(tl.float32))
            d_inverse += tl.dot(d_u, tl.trans((v * beta[:, None]).to(k.dtype)))
            d_value = tl.dot(tl.trans(inverse), d_u)
            d_beta += tl.sum(d_value * v, axis=1)
            tl.store(
                dv_ptr + value_row,
                (d_value * beta[:, None]).to(dv_ptr.dtype.element_ty),
                mask=valid[:, None],
            )
        growth = tl.exp(sums)
        dq *= (growth * scale)[:, None]
        dk *= tl.exp(final - sums)[:, None]
        q = tl.load(q_ptr + key_row, mask=valid[:, None], other=0.0)
        kept = tl.sum(dk * k, axis=1)
        d_sums = tl.sum(dq * q, axis=1) - kept
        d_final = tl.sum(kept, axis=0) + tl.exp(final) * through
        decay = _decay(sums, i, i, size)
        d_scores *= decay * scale
        moved = d_scores * tl.dot(q, tl.trans(k))
        narrow = d_scores.to(k.dtype)
        dq += tl.dot(narrow, k)
        dk += tl.dot(tl.trans(narrow), q)
        tl.store(
            dq_ptr + row * K + dims[None, :], dq.to(dq_ptr.dtype.element_ty), mask=valid[:, None]
        )
        # W = T diag(beta e^G) K and what T is made of.
        dw_narrow = dw.to(k.dtype)
        factor = beta * growth
        d_keys = tl.dot(tl.trans(inverse), dw_narrow)
        along = tl.sum(d_keys * k, axis=1)
        d_beta += along * growth
        d_sums += along * factor
        dk += d_keys * factor[:, None]
        d_inverse += tl.dot(dw_narrow, tl.trans((k * factor[:, None]).to(k.dtype)))
        wide = tl.trans(inverse).to(tl.float32)
        d_lower = -tl.dot(
            tl.dot(wide, d_inverse, input_precision=PRECISION), wide, input_precision=PRECISION
        )
        d_lower = tl.where(i[:, None] > i[None, :], d_lower, 0.0) * decay
        products = d_lower * tl.dot(k, tl.trans(k))
        d_beta += tl.sum(products, axis=1)
        moved += products * beta[:, None]
        narrow = (d_lower * beta[:, None]).to(k.dtype)
        dk += tl.dot(narrow, k) + tl.dot(tl.trans(narrow), k)
        tl.store(
            dk_ptr + row * K + dims[None, :], dk.to(dk_ptr.dtype.element_ty), mask=valid[:, None]
        )
        tl.store(dbeta_ptr + token * H + head, d_beta, mask=valid)
        columns = tl.sum(moved, axis=0)  # laid out by column; as rows:
        columns = tl.sum(tl.where(i[:, None] == i[None, :], columns[None, :], 0.0), axis=1)
        d_sums += tl.sum(moved, axis=1) - columns
        d_sums += tl.where(i == size - 1, d_final, 0.0)
        d_sums = tl.where(valid, d_sums, 0.0)
        # g_i is part of every later sum.
        total = tl.sum(d_sums, axis=0)
        tl.store(dg_ptr + token * H + head, total - tl.cumsum(d_sums, axis=0) + d_sums, mask=valid)


# The best on one H100. With one stage Triton 3.6 computes the sequential kernels wrongly.
WARPS = {"prepare": 4, "states": 4, "outputs": 4, "local": 4, "state_grads": 4, "inputs": 8}
STAGES = {"prepare": 1, "states": 3, "outputs": 1, "local": 1, "state_grads": 3, "inputs": 1}
BV = {"states": 32, "outputs": 128, "state_grads": 16, "inputs": 128}
"""Columns of the state that a program has."""


def launch(name):
    return {"num_warps": WARPS[name], "num_stages": STAGES[name]}


def prepared(k, v, g, beta, chunks, precision):
    (tokens, heads, width), keys = v.shape, k.shape[2]
    starts, sizes, _ = chunks
    w, u = k.new_empty(tokens, heads, keys), torch.empty_like(v)
    inverse = k.new_empty(len(starts), heads, CHUNK, CHUNK)
    sums = torch.empty(tokens, heads, dtype=torch.float32, device=k.device)
    _prepare_kernel[(len(starts), heads)](
        k,
        v,
        g,
        beta,
        starts,
        sizes,
        w,
        u,
        inverse,
        sums,
        heads,
        k.shape[1],
        keys,
        width,
        CHUNK,
        precision,
        **launch("prepare"),
    )
    return w, u, inverse, sums


def states_of(k, w, u, sums, bounds, chunks):
    (_, heads, width), keys = u.shape, k.shape[2]
    starts, _, firsts = chunks
    new, states = torch.empty_like(u), k.new_empty(len(starts), heads, keys, width)
    bv = min(BV["states"], width)
    _states_kernel[(width // bv, heads, len(bounds) - 1)](
        k,
        w,
        u,
        sums,
        bounds,
        firsts,
        new,
        states,
        heads,
        k.shape[1],
        keys,
        width,
        bv,
        CHUNK,
        **launch("states"),
    )
    return new, states


def forward(q, k, v, g, beta, bounds, scale, precision="tf32"):
    chunks = chunks_of(bounds, len(q))
    w, u, inverse, sums = prepared(k, v, g, beta, chunks, precision)
    new, states = states_of(k, w, u, sums, bounds, chunks)
    out = torch.empty_like(v)
    heads, keys, width = v.shape[1], k.shape[2], v.shape[2]
    bv = min(BV["outputs"], width)
    _outputs_kernel[(width // bv, heads, len(chunks[0]))](
        q,
        k,
        new,
        sums,
        states,
        *chunks[:2],
        out,
        scale,
        heads,
        k.shape[1],
        keys,
        width,
        bv,
        CHUNK,
        **launch("outputs"),
    )
    return out, (w, u, inverse, sums)


def backward(grad, q, k, v, g, beta, bounds, saved, scale, precision="tf32"):
    chunks = chunks_of(bounds, len(q))
    w, u, inverse, sums = saved
    new, states = states_of(k, w, u, sums, bounds, chunks)
    heads, keys, width = v.shape[1], k.shape[2], v.shape[2]
    sizes = heads, k.shape[1], keys, width
    d_u = torch.empty_like(v)
    _local_kernel[(heads, len(chunks[0]))](
        q, k, grad, sums, *chunks[:2], d_u, scale, *sizes, CHUNK, **launch("local")
    )
    grads = torch.empty_like(states)
    bv = min(BV["state_grads"], width)
    _state_grads_kernel[(width // bv, heads, len(bounds) - 1)](
        q,
        k,
        w,
        grad,
        sums,
        bounds,
        chunks[2],
        d_u,
        grads,
        scale,
        *sizes,
        bv,
        CHUNK,
        **launch("state_grads"),
    )
    dq, dk = (k.new_empty(len(q), heads, keys) for _ in range(2))
    dv, dg, dbeta = torch.empty_like(v), torch.empty_like(sums), torch.empty_like(sums)
    bv = min(BV["inputs"], width)
    _inputs_kernel[(heads, len(chunks[0]))](
        q,
        k,
        v,
        beta,
        grad,
        new,
        d_u,
        sums,
        inverse,
        states,
        grads,
        *chunks[:2],
        dq,
        dk,
        dv,
        dg,
        dbeta,
        scale,
        *sizes,
        bv,
        CHUNK,
        precision,
        **launch("inputs"),
    )
    if heads != k.shape[1]:
        dq, dk = (
            x.unflatten(1, (k.shape[1], -1)).sum(2, dtype=torch.float32).to(k.dtype)
            for x in (dq, dk)
        )
    return dq, dk, dv, dg, dbeta


def case(docs, heads, keys, width, dtype, device, alike=False):
    """Random inputs, the documents' bounds, and a gradient; ``alike``: one key, no decay."""
    torch.manual_seed(0)
    tokens = sum(docs)
    q, k = torch.nn.functional.normalize(torch.randn(2, tokens, keys, width), dim=-1)
    v, grad = torch.randn(2, tokens, heads, width)
    g, beta = -torch.rand(tokens, heads) / 2, torch.rand(tokens, heads)
    if alike:
        k[:], g, beta = k[0].clone(), torch.zeros_like(g), torch.full_like(beta, 0.9)
    bounds = torch.tensor([0, *docs], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    inputs = [x.to(device, dtype) for x in (q, k, v)] + [g.to(device), beta.to(device)]
    return inputs, bounds, grad.to(device, dtype)


def errors(docs, heads, keys, width, dtype, device, **kwargs) -> dict[str, float]:
    """Relative errors of the output and of every gradient."""
    inputs, bounds, grad = case(docs, heads, keys, width, dtype, device, **kwargs)
    scale, precision = width**-0.5, "tf32" if dtype == torch.bfloat16 else "ieee"
    exact = [x.double().cpu().requires_grad_() for x in inputs]
    expected = gated_delta_reference(*exact, bounds.cpu(), scale)
    expected.backward(grad.double().cpu())
    out, saved = forward(*inputs, bounds, scale, precision)
    found = [out, *backward(grad, *inputs, bounds, saved, scale, precision)]
    wanted = [expected, *(x.grad for x in exact)]
    names = ("out", "dq", "dk", "dv", "dg", "dbeta")
    return {
        name: ((a.double().cpu() - b).norm() / b.norm()).item()
        for name, a, b in zip(names, found, wanted, strict=True)
    }


def milliseconds(function: Callable[[], object], repeats: int = 10) -> float:
    """Device time of one call."""
    function()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def main() -> None:
    """Compare, then time."""
    parser = argparse.ArgumentParser(description="Check and time a first gated delta rule.")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    for dtype in (torch.float32, torch.bfloat16) if on_gpu else (torch.float32,):
        for docs, heads, keys, width, alike in (
            ([5, 64, 1, 130], 2, 1, 32, False),
            ([0, 100], 2, 2, 16, True),
            ([300, 1, 64, 700] if on_gpu else [70], 4, 2, 128 if on_gpu else 16, False),
        ):
            found = errors(docs, heads, keys, width, dtype, device, alike=alike)
            print(docs, heads, keys, width, dtype, *(f"{n} {e:.1e}" for n, e in found.items()))
    if not on_gpu:
        return
    for docs in ([args.tokens], [args.tokens // 4] * 4):
        inputs, bounds, grad = case(
            docs, args.heads, args.heads, args.width, torch.bfloat16, device
        )
        scale = args.width**-0.5
        _, saved = forward(*inputs, bounds, scale)
        ahead = milliseconds(lambda: forward(*inputs, bounds, scale))  # noqa: B023
        back = milliseconds(lambda: backward(grad, *inputs, bounds, saved, scale))  # noqa: B023
        print(f"{len(docs)} documents: forward {ahead:.2f} ms, backward {back:.2f} ms")


if __name__ == "__main__":
    main()
