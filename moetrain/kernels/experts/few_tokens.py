"""The expert MLP of a few tokens, in one launch, without indices or rows sorted by expert.

With few tokens the time goes into reading the weights of the chosen experts. The smallest tile of a
matrix product has 16 rows, so a program takes columns of an expert for all tokens at once, and does
not store the rows of tokens that did not choose that expert. Slot ``s = t * K + k`` is the k-th
choice of token t. The programs of an expert's first slot compute it, and those of its other slots
do nothing. Results are rounded where :mod:`moetrain.kernels.small_m` rounds them::

    h[s] = round(silu(round(gate x[t])) * round(up x[t]) * w[s])    y[s] = round(down h[s])
    y[t] = round(sum over k of y[t * K + k], in fp32, in this order)

Programs take numbers as they begin. Those with the first numbers compute columns of h. The others
read their weights of the second product, wait for their expert's h, and multiply. There is no
deadlock: a program only waits for programs that have begun before it. The last program to compute
its columns of a ``y[s]`` adds them up. Sums over the inner width are in ascending order, so a
token's bits are those that it has among many tokens.

Legend: T tokens, K experts a token, S = T * K slots, D model width, E experts, F expert width.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

import torch

from moetrain.runtime.backend import (
    INTERPRETED,
    TensorDescriptor,
    tl,
    triton,
)

_MOST_TOKENS = 16
"""Rows of the smallest tile of a matrix product."""
# Measured on one H100 (docs/log/generation.md), where reading more of the weights ahead was slower.
_UP_COLUMNS, _DOWN_COLUMNS, _DEPTH, _STAGES = 32, 64, 128, 3
"""Columns of a program in either product, and the inner width at a time in the first."""
_AHEAD = 256
"""The inner width at a time in the second product; a program reads the first piece of its weights
before it waits for h."""
_TICKET, _DONE, _FLAGS = (tl.constexpr(n) for n in range(3))
"""Indices at which the counters of programs, of finished columns, and of slots begin."""


def fits_few_tokens(w_gate_up_E2FD: torch.Tensor, w_down_EDF: torch.Tensor) -> bool:
    """Return True if :func:`few_tokens_mlp` takes these weights: bf16, with a gate, whole tiles."""
    E, D, F = w_down_EDF.shape
    fits = D % _DOWN_COLUMNS == F % _UP_COLUMNS == 0 and w_gate_up_E2FD.shape == (E, 2 * F, D)
    return fits and w_gate_up_E2FD.dtype == w_down_EDF.dtype == torch.bfloat16


def few_tokens_counters(w_down_EDF: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the int32 zeros that :func:`few_tokens_mlp` takes, for one stream at a time."""
    number = _FLAGS.value + _MOST_TOKENS * top_k + w_down_EDF.shape[1] // _DOWN_COLUMNS
    return torch.zeros(number, dtype=torch.int32, device=w_down_EDF.device)


def few_tokens_mlp(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    counters: torch.Tensor,
) -> torch.Tensor:
    """Return ``y_TD``, the sum of each token's experts by ``ids_TK`` (int32; -1: none).

    Arguments are contiguous and not checked, and there is no autograd.

    Args:
        x_TD: 1 to :data:`_MOST_TOKENS` tokens, in bf16.
        w_gate_up_E2FD, w_down_EDF: weights that :func:`fits_few_tokens` accepts.
        counters: from :func:`few_tokens_counters`; zeros again afterwards.
    """
    (T, D), K = x_TD.shape, ids_TK.shape[1]
    F = w_down_EDF.shape[2]
    h_SF, y_SD = x_TD.new_empty(T * K, F), x_TD.new_empty(T * K, D)
    y_TD = torch.empty_like(x_TD)
    ahead = min(_AHEAD, triton.next_power_of_2(F))
    _experts_kernel[(T * K * (F // _UP_COLUMNS + D // _DOWN_COLUMNS),)](
        TensorDescriptor.from_tensor(x_TD, [_MOST_TOKENS, _DEPTH]),
        TensorDescriptor.from_tensor(w_gate_up_E2FD.flatten(0, 1), [_UP_COLUMNS, _DEPTH]),
        TensorDescriptor.from_tensor(w_down_EDF.flatten(0, 1), [_DOWN_COLUMNS, ahead]),
        ids_TK, weights_TK, h_SF, y_SD, y_TD, counters,
        D=D, F=F, T=T, K=K, KP=triton.next_power_of_2(K), SP=triton.next_power_of_2(T * K),
        BR=_MOST_TOKENS, BF=_UP_COLUMNS, BN=_DOWN_COLUMNS, BD=_DEPTH, AHEAD=ahead,
        COUNTERS=counters.shape[0], COUNTED=triton.next_power_of_2(counters.shape[0]),
        WIDEN=INTERPRETED, num_warps=4, num_stages=_STAGES,
    )  # fmt: skip
    return y_TD


@triton.jit
def _slots_of(
    slot,
    ids_ptr,
    T: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    SP: tl.constexpr,
    BR: tl.constexpr,
):
    """Return a slot's expert, True if the slot is that expert's first, and each token's slot with
    that expert, or -1."""
    e = tl.load(ids_ptr + slot)
    if T == 1:
        return e, e >= 0, tl.where(tl.arange(0, BR) == 0, slot, -1)
    earlier = tl.arange(0, SP)
    taken = tl.sum((tl.load(ids_ptr + earlier, mask=earlier < slot, other=-1) == e).to(tl.int32))
    row, k = tl.arange(0, BR), tl.arange(0, KP)
    at = row[:, None] * K + k[None, :]
    is_in = (row < T)[:, None] & (k < K)[None, :]
    hit = (tl.load(ids_ptr + at, mask=is_in, other=-1) == e) & is_in
    slots = tl.max(tl.where(hit, at, -1), 1)
    return e, (e >= 0) & (taken == 0), slots


@triton.jit
def _dot(x, w, total, WIDEN: tl.constexpr):
    if WIDEN:  # Triton's interpreter would multiply bf16 as integers
        x, w = x.to(tl.float32), w.to(tl.float32)
    return tl.dot(x, w.T, total, input_precision="ieee")


@triton.jit
def _gate_up(
    x_desc,
    w_desc,
    weights_ptr,
    h_ptr,
    e,
    slots,
    f,
    D: tl.constexpr,
    F: tl.constexpr,
    BR: tl.constexpr,
    BF: tl.constexpr,
    BD: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Store BF columns of an expert's h, from column ``f`` on."""
    at = e * (2 * F) + f
    dtype = h_ptr.dtype.element_ty
    gate, up = tl.zeros((BR, BF), tl.float32), tl.zeros((BR, BF), tl.float32)
    for d in range(0, D, BD):
        x = x_desc.load([0, d])
        gate = _dot(x, w_desc.load([at, d]), gate, WIDEN)
        up = _dot(x, w_desc.load([at + F, d]), up, WIDEN)
    w = tl.load(weights_ptr + slots, mask=slots >= 0, other=0.0).to(tl.float32)[:, None]
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    h = gate * tl.sigmoid(gate) * up * w
    column = f + tl.arange(0, BF)
    tl.store(h_ptr + slots[:, None] * F + column[None, :], h.to(dtype), mask=slots[:, None] >= 0)


@triton.jit
def _h_of(h_ptr, slots, f, F: tl.constexpr, BF: tl.constexpr):
    inner = f + tl.arange(0, BF)
    mask = (slots >= 0)[:, None] & (inner < F)[None, :]
    return tl.load(h_ptr + slots[:, None] * F + inner[None, :], mask=mask, other=0.0)


@triton.jit
def _experts_kernel(
    x_desc,
    up_desc,
    down_desc,
    ids_ptr,
    weights_ptr,
    h_ptr,
    y_ptr,
    out_ptr,
    counters_ptr,
    D: tl.constexpr,
    F: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    SP: tl.constexpr,
    BR: tl.constexpr,
    BF: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    AHEAD: tl.constexpr,
    COUNTERS: tl.constexpr,
    COUNTED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    GATES: tl.constexpr = F // BF
    TILES: tl.constexpr = D // BN
    SLOTS: tl.constexpr = T * K
    flags_ptr = counters_ptr + _FLAGS
    number = tl.atomic_add(counters_ptr + _TICKET, 1, sem="relaxed")
    # 1. The first programs compute columns of h.
    if number < SLOTS * GATES:
        slot = number // GATES
        e, is_first, slots = _slots_of(slot, ids_ptr, T, K, KP, SP, BR)
        if is_first:
            f = number % GATES * BF
            _gate_up(x_desc, up_desc, weights_ptr, h_ptr, e, slots, f, D, F, BR, BF, BD, WIDEN)
            # The barrier makes the stores of all threads visible before the program arrives.
            tl.debug_barrier()
            tl.atomic_add(flags_ptr + slot, 1, sem="release")
    # 2. The others wait for their expert's h and compute columns of y.
    else:
        slot = (number - SLOTS * GATES) // TILES
        tile = (number - SLOTS * GATES) % TILES
        e, is_first, slots = _slots_of(slot, ids_ptr, T, K, KP, SP, BR)
        n = tile * BN
        column = n + tl.arange(0, BN)
        dtype = out_ptr.dtype.element_ty
        if is_first:
            w = down_desc.load([e * D + n, 0])
            while tl.atomic_add(flags_ptr + slot, 0, sem="acquire") < GATES:
                pass
            tl.debug_barrier()
            total = _dot(_h_of(h_ptr, slots, 0, F, AHEAD), w, tl.zeros((BR, BN), tl.float32), WIDEN)
            for f in range(AHEAD, F, AHEAD):
                w = down_desc.load([e * D + n, f])
                total = _dot(_h_of(h_ptr, slots, f, F, AHEAD), w, total, WIDEN)
            at = y_ptr + slots[:, None] * D + column[None, :]
            tl.store(at, total.to(dtype), mask=slots[:, None] >= 0)
        tl.debug_barrier()
        tiles_ptr = flags_ptr + BR * K
        # 3. The last program of these columns adds up each token's slots.
        before = tl.atomic_add(tiles_ptr + tile, 1, sem="acq_rel")
        if before == SLOTS - 1:
            row = tl.arange(0, BR)
            result = tl.zeros((BR, BN), tl.float32)
            for k in tl.static_range(K):
                own = row * K + k
                chosen = tl.load(ids_ptr + own, mask=row < T, other=-1) >= 0
                at = y_ptr + own[:, None] * D + column[None, :]
                result += tl.load(at, mask=chosen[:, None], other=0.0).to(tl.float32)
            at = out_ptr + row[:, None] * D + column[None, :]
            tl.store(at, result.to(dtype), mask=(row < T)[:, None])
            # 4. The last program of all clears the counters.
            if tl.atomic_add(counters_ptr + _DONE, 1, sem="acq_rel") == TILES - 1:
                counter = tl.arange(0, COUNTED)
                zeros = tl.zeros((COUNTED,), tl.int32)
                tl.store(counters_ptr + counter, zeros, mask=counter < COUNTERS)
