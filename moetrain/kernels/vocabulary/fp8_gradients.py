"""Gradients of the linear cross-entropy by products in fp8; the loss itself is unchanged.

The logits' gradient ``d = weight * (p - onehot)`` spans more than e4m3: at a vocabulary of 151,936
most p are below 1e-5, and e4m3 would lose the whole gradient of each rare token. So d is rounded to
e5m2 (two bits of mantissa, 31 binades), with one scale for all tokens, a power of two::

    q = round(d / step)        step = the smallest 2^k with weight <= 57344 step

so that the same q serves both products, along the vocabulary and along the tokens. There h and w
are in e4m3, with a scale for each of their columns::

    dh = step * q @ q(w)       dw = step * q^T @ q(h)

The target's d is the largest of most rows, and its q is off by up to an eighth. The rest is added
from the target's rows: ``dh[t] += (d - step * q)[target] * w[target]``, and the same times ``h[t]``
to dw's row. The sums over the vocabulary are in fp32: beside the target's product, tensor cores'
own registers would keep nothing of the thousands of small ones (dh off by 12 % instead of 3).

Tokens are walked in chunks as in :mod:`moetrain.kernels.vocabulary.chunk`. The transposed q of
several chunks is multiplied by h at once, since torch's products in fp8 cannot add to a result.

Worked example, one token, weight 1, V=2, p = [1/4, 3/4], target 0: d = [-3/4, 3/4] and step = 2^-15
give q = [-24576, 24576], exactly.

Legend: T tokens, D model width, V vocabulary, S its size up to a multiple of 16, C tokens of a
chunk, P tokens of several chunks.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
from torch.nn import functional as F

from moetrain.kernels.quant.e4m3 import MULTIPLE, Quantised, quantise_columns
from moetrain.kernels.quant.products import scaled_mm
from moetrain.kernels.vocabulary.chunk import CHUNK_ELEMENTS, ChunkStats, exponentials
from moetrain.runtime.backend import tl, triton

_E5M2 = torch.float8_e5m2
_LARGEST = 57344.0  # the largest value in e5m2
_CHUNKS = 4  # that one product with h takes
_TILE = {"WORDS": 16, "num_warps": 8}
_ROWS = {"TOKENS": 16, "BLOCK": 256, "num_warps": 4}
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


def gradient_step(weights_T: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the step for gradients of up to ``scale * |weights|``: fp32 [1]."""
    largest = (weights_T.abs().amax() if len(weights_T) else weights_T.new_zeros(())) * scale
    mantissa, exponent = torch.frexp(largest.float() / _LARGEST)
    exponent = torch.where(mantissa > 0.5, exponent, exponent - 1).clamp(-126, 126)
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float32), exponent).view(1)


def fp8_gradients(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    weights_T: torch.Tensor,
    scale: float,
    chunk_elements: int = CHUNK_ELEMENTS // 2,
    *,
    is_trained: bool = True,
    softcap: float = 0.0,
) -> tuple[ChunkStats, torch.Tensor, torch.Tensor]:
    """Return the statistics, and the gradients of ``sum(weights * loss)`` in h and w.

    ``scale`` multiplies the logits, and ``softcap`` caps them (0: not). The gradient of w is empty
    unless ``is_trained``. D is a multiple of 16. This is a fast path, not an op.
    """
    T, V = h_TD.shape[0], w_VD.shape[0]
    stats = ChunkStats.empty(h_TD)
    grad_h_TD = torch.empty_like(h_TD)
    grad_w_VD = torch.zeros_like(w_VD) if is_trained and not T else w_VD.new_empty(0)
    step = gradient_step(weights_T, scale)
    missing_T = torch.zeros_like(stats.lse_C)
    w_DS = _by_columns(w_VD)
    S, rows = w_DS.values.shape[1], 0
    q_CS = q_SP = h_TD  # allocated with the first chunk
    chunks = exponentials(
        h_TD,
        w_VD,
        targets_T,
        stats,
        scale,
        chunk_elements,
        multiple=MULTIPLE,
        softcap=softcap,
    )
    for i, chunk in enumerate(chunks):
        c = chunk.tokens
        if not i:  # all chunks but the last have the size of the first
            rows = c.stop
            room = -(-min(T, rows * _CHUNKS) // MULTIPLE) * MULTIPLE if is_trained else 0
            q_CS, q_SP = (h_TD.new_empty(x, dtype=_E5M2) for x in ((rows, S), (S, room)))
        first = i // _CHUNKS * _CHUNKS * rows
        # Quantise the chunk's gradient, as it is and transposed.
        q_CS = q_CS[: c.stop - c.start]
        grid = (triton.cdiv(S, chunk.tile), triton.cdiv(len(q_CS), _TILE["WORDS"] * 4))
        _quantise_kernel[grid](
            chunk.exps_CV,
            chunk.largest_NC,
            targets_T[c],
            chunk.stats.lse_C,
            chunk.stats.target_logit_C,
            weights_T[c],
            step,
            q_CS.view(torch.uint8),
            q_SP.view(torch.int32) if is_trained else None,
            missing_T[c],
            len(q_CS),
            V,
            S,
            (c.start - first) // 4,
            q_SP.shape[1] // 4,
            scale,
            BV=chunk.tile,
            CAP=softcap,
            **_TILE,
        )
        # dh. In fp32: beside the target's product nothing would be left of the small ones.
        quantised = Quantised(q_CS, step.expand(len(q_CS)).contiguous())
        product_CD = scaled_mm(quantised, w_DS, h_TD.dtype, fast=False)
        _add_missing(product_CD, missing_T[c], targets_T[c], w_VD, grad_h_TD[c])
        # dw, for several chunks at once.
        if is_trained and (i % _CHUNKS == _CHUNKS - 1 or c.stop == T):
            h_DP = _by_columns(h_TD[first : c.stop])
            quantised = Quantised(q_SP[:, : h_DP.values.shape[1]], step.expand(S).contiguous())
            made_VD = scaled_mm(quantised, h_DP, w_VD.dtype)[:V]
            grad_w_VD = made_VD if first == 0 else grad_w_VD.add_(made_VD)
            del made_VD  # so that the next product is the second tensor of w's size, not the third
    if is_trained:
        _add_missing_to_rows(missing_T, targets_T, h_TD, grad_w_VD)
    return stats, grad_h_TD, grad_w_VD


def fp8_products_reference(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    d_logits_TV: torch.Tensor,
    step: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of h and w from the logits' gradient, in plain torch."""
    dtype, V = d_logits_TV.dtype, w_VD.shape[0]
    if not len(h_TD):
        return torch.zeros_like(h_TD), torch.zeros_like(w_VD)
    q_TV = (d_logits_TV / step).clamp(-_LARGEST, _LARGEST).to(_E5M2).to(dtype) * step.to(dtype)
    is_here_T = (targets_T >= 0) & (targets_T < V)
    target_T = torch.where(is_here_T, targets_T, 0)
    missing_T = (d_logits_TV - q_TV).gather(1, target_T[:, None])[:, 0]
    missing_T = torch.where(is_here_T, missing_T, 0)
    w_DV, h_DT = (quantise_columns(x[None], "reference").to(dtype)[0] for x in (w_VD, h_TD))
    d_h_TD = q_TV @ w_DV.t() + missing_T[:, None] * w_VD.to(dtype)[target_T]
    d_w_VD = q_TV.t() @ h_DT.t()
    d_w_VD = d_w_VD.index_add(0, target_T, missing_T[:, None] * h_TD.to(dtype))
    return d_h_TD.to(h_TD.dtype), d_w_VD.to(w_VD.dtype)


def _by_columns(x_XD: torch.Tensor) -> Quantised:
    """Quantise columns: [D, X] and [D], with X padded to a multiple of 16."""
    rest = -len(x_XD) % MULTIPLE
    x_XD = F.pad(x_XD, (0, 0, 0, rest)) if rest else x_XD.contiguous()
    quantised = quantise_columns(x_XD[None], "triton")
    return Quantised(quantised.values[0], quantised.scales[0])


def _add_missing(
    product_CD: torch.Tensor,
    missing_C: torch.Tensor,
    targets_C: torch.Tensor,
    w_VD: torch.Tensor,
    out_CD: torch.Tensor,
) -> None:
    """Write ``product + missing * w[targets]`` to ``out``."""
    D = product_CD.shape[1]
    _missing_kernel[(product_CD.shape[0],)](
        product_CD,
        missing_C,
        targets_C,
        w_VD,
        out_CD,
        w_VD.shape[0],
        D,
        BLOCK=triton.next_power_of_2(D),
    )


def _add_missing_to_rows(
    missing_T: torch.Tensor,
    targets_T: torch.Tensor,
    h_TD: torch.Tensor,
    grad_w_VD: torch.Tensor,
) -> None:
    """Add ``missing * h`` of each token to its target's row, summed in fp32."""
    sorted_T, order_T = targets_T.sort(stable=True)
    (T, D), block = h_TD.shape, _ROWS["BLOCK"]
    if T:
        _missing_rows_kernel[(T, triton.cdiv(D, block))](
            sorted_T, order_T, missing_T, h_TD, grad_w_VD, T, len(grad_w_VD), D, **_ROWS
        )


@triton.jit
def _rounded_to_e5m2(x):
    """Return ``x`` rounded to e5m2, to nearest even, in fp32, and its byte, in int32.

    It rounds by hand: with CUDA 13's compiler the bytes of the hardware's instruction were garbage
    where they were shifted to the top of a word. A value of e5m2 is the upper half of one of fp16.
    """
    # Adding 3/2 of 2^23 steps rounds to a step: 1/4 of the power of two, or of 2^-14 below it.
    field = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 113)
    large = (((field + 21) << 23) | 0x400000).to(tl.float32, bitcast=True)
    rounded = (x + large) - large
    return rounded, (rounded.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) >> 8) & 255


@triton.jit(do_not_specialize=["C", "first_word"])  # they change with every call
def _quantise_kernel(
    exps_ptr,
    largest_ptr,
    targets_ptr,
    lse_ptr,
    target_logit_ptr,
    weights_ptr,
    step_ptr,
    q_ptr,
    transposed_ptr,
    missing_ptr,
    C,
    V,
    S,
    first_word,
    transposed_words,
    scale,
    BV: tl.constexpr,
    WORDS: tl.constexpr,
    CAP: tl.constexpr,
):
    """Compute q from 2^x, as it is and transposed, for one tile of the vocabulary.

    A word holds four tokens. q is 0 past the last token and past the vocabulary.
    """
    tile = tl.program_id(0)
    col = tile * BV + tl.arange(0, BV)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    step = tl.load(step_ptr)
    inverse = (0x7F000000 - step.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    words = tl.zeros([WORDS, BV], tl.int32)
    for i in tl.static_range(4):
        row = word * 4 + i
        in_chunk = row < C
        at = row.to(tl.int64)[:, None] * S + col[None, :]
        mask = in_chunk[:, None] & (col < V)[None, :]
        exps = tl.load(exps_ptr + at, mask, other=0.0).to(tl.float32)
        largest = tl.load(largest_ptr + tile.to(tl.int64) * C + row, in_chunk, other=0.0)
        lse = tl.load(lse_ptr + row, in_chunk, other=0.0)
        weight = tl.load(weights_ptr + row, in_chunk, other=0.0)
        target = tl.load(targets_ptr + row, in_chunk, other=-1).to(tl.int32)
        is_target = col[None, :] == target[:, None]
        p = exps * tl.exp2(largest - lse * _LOG2_E)[:, None]
        grad = p * weight[:, None] - tl.where(is_target, weight[:, None], 0.0)
        if CAP > 0:
            own = tl.load(target_logit_ptr + row, in_chunk, other=0.0)[:, None]
            logits = tl.where(exps > 0, (tl.log2(exps) + largest[:, None]) * _LN_2, 0.0)
            tanh = tl.where(is_target, own, logits) / (scale * CAP)
            grad *= 1.0 - tanh * tanh
        exact = grad * scale * inverse
        rounded, byte = _rounded_to_e5m2(exact)
        tl.store(q_ptr + at, byte.to(tl.uint8), in_chunk[:, None] & (col < S)[None, :])
        has_target = (target >= tile * BV) & (target < tl.minimum(tile * BV + BV, V)) & in_chunk
        off = tl.where(is_target, exact - rounded, 0.0)
        tl.store(missing_ptr + row, tl.sum(off, axis=1) * step, has_target)
        words |= byte << (8 * i)
    if transposed_ptr is not None:
        mask = (col < S)[:, None] & (word * 4 < (C + 15) // 16 * 16)[None, :]
        at = col.to(tl.int64)[:, None] * transposed_words + (first_word + word)[None, :]
        tl.store(transposed_ptr + at, tl.trans(words), mask)


@triton.jit
def _missing_kernel(
    product_ptr,
    missing_ptr,
    targets_ptr,
    w_ptr,
    out_ptr,
    V,
    D,
    BLOCK: tl.constexpr,
):
    """Add missing * w[target] to one row; nothing for a target outside [0, V)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    is_there = (target >= 0) & (target < V)
    missing = tl.load(missing_ptr + row, is_there, other=0.0)
    w = tl.load(w_ptr + target * D + d, d < tl.where(is_there, D, 0), other=0.0).to(tl.float32)
    total = tl.load(product_ptr + row * D + d, d < D, other=0.0).to(tl.float32) + missing * w
    tl.store(out_ptr + row * D + d, total, d < D)


@triton.jit(do_not_specialize=["T"])  # it changes with every call
def _missing_rows_kernel(
    targets_ptr,
    order_ptr,
    missing_ptr,
    h_ptr,
    grad_ptr,
    T,
    V,
    D,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add missing * h to a target's row; of equal targets the first program adds all.

    Targets are sorted, and each has a program.
    """
    at = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + at)
    before = tl.load(targets_ptr + at - 1, at > 0, other=-1)
    if (target != before) & (target >= 0) & (target < V):
        total = tl.zeros([BLOCK], tl.float32)
        while at < T:
            t = at + tl.arange(0, TOKENS)
            is_own = tl.load(targets_ptr + t, t < T, other=-1) == target
            token = tl.load(order_ptr + t, is_own, other=0)
            missing = tl.load(missing_ptr + token, is_own, other=0.0)
            h_at = h_ptr + token[:, None] * D + d[None, :]
            h = tl.load(h_at, is_own[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
            total += tl.sum(missing[:, None] * h, axis=0)
            is_last = tl.sum(is_own.to(tl.int32), axis=0) < TOKENS
            at = tl.where(is_last, T, at + TOKENS)
        place = grad_ptr + target * D + d
        total += tl.load(place, d < D, other=0.0).to(tl.float32)
        tl.store(place, total, d < D)
