"""The largest score of each head, for QK-clip (arXiv 2507.20534).

    peak[h] = max over tokens i and the tokens j that i sees of scale q[i, h] . k[j, h G // H]

The tokens that a token sees are those of attention's mask
(:class:`~moetrain.kernels.attention.attention.AttentionMask`), padding included. Peaks are fp32 and
raised in place, so that calls for several micro-batches, or for parts of the queries, leave the
largest of all, in any order. Peaks that begin at 0 never fall below it.

Worked example with d = 1 and scale 1: a document has queries 1 and -2 and keys 3 and 5. The first
query sees only the first key, and its score is 3. The second sees both, with the scores -6 and -10.
So the peak is 3.

The keys that a token sees are contiguous, from a first key to its own. The kernel is given both
ends for each token. A program has a tile of tokens of one head: it goes over the keys from the
first that any of them sees to the last. It computes the first of the two products of attention's
forward.

Left out on purpose: gradients, and FlexAttention's masks, which do not expose document boundaries.

Legend: B batch, S sequence, T query tokens, L key tokens, H query heads, G key heads, d head width.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

import torch

from moetrain.kernels.attention.attention import AttentionMask
from moetrain.runtime.backend import Backend, refusal, tl, triton, use_fast

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TOKENS, _KEYS, _WARPS, _STAGES = 128, 64, 8, 2  # not measured against others yet
_FP32_TOKENS = 32
"""Tokens of a tile in fp32; more would not fit in shared memory."""


def raise_peaks(
    peaks_H: torch.Tensor,
    q_BSHd: torch.Tensor,
    k_BSGd: torch.Tensor,
    mask: AttentionMask,
    scale: float | None = None,
    backend: Backend = "auto",
) -> None:
    """Raise ``peaks_H`` to the largest score of each head, without gradients.

    Args:
        peaks_H: fp32, or fp64 for queries in fp64; written in place.
        q_BSHd, k_BSGd: rotated queries and keys, as attention takes them; H is a multiple of G.
        mask: of any backend but flex.
        scale: the factor of scores, positive; None: ``d**-0.5``.
    """
    (batch, seq_len, heads, width), (*_, kv_heads, kv_width) = q_BSHd.shape, k_BSGd.shape
    fits = width == kv_width and heads % kv_heads == 0 and q_BSHd.dtype == k_BSGd.dtype
    if peaks_H.shape != (heads,) or not fits:
        takes = "[H], [B, S, H, d] and [B, S, G, d], queries and keys in one dtype"
        raise refusal("raise_peaks", takes, peaks=peaks_H, q=q_BSHd, k=k_BSGd)
    if mask.backend == "flex":
        raise refusal("raise_peaks", "a mask of another attention backend", mask="of flex")
    scale = width**-0.5 if scale is None else scale
    is_fast = use_fast(backend, q_BSHd) and mask.dense_BSS is None
    if is_fast and q_BSHd.dtype not in _DTYPES:
        raise refusal("raise_peaks", "bf16, fp16 or fp32", q=q_BSHd)
    cu_seqlens = mask.cu_seqlens
    if cu_seqlens is None and mask.dense_BSS is None:  # each row is one document
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=q_BSHd.device) * seq_len
    raise_peaks_op(
        peaks_H,
        q_BSHd.detach(),
        k_BSGd.detach(),
        mask.dense_BSS,
        cu_seqlens,
        mask.cu_seqlens_k,
        mask.window,
        scale,
        is_fast,
    )


@torch.library.custom_op("moetrain::raise_peaks", mutates_args=("peaks_H",))
def raise_peaks_op(
    peaks_H: torch.Tensor,
    q_BSHd: torch.Tensor,
    k_BSGd: torch.Tensor,
    visible_B1SS: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    window: int | None,
    scale: float,
    is_fast: bool,
) -> None:
    if visible_B1SS is not None:
        for q_SHd, k_SGd, visible_1SS in zip(q_BSHd, k_BSGd, visible_B1SS, strict=True):
            _raise(peaks_H, q_SHd, k_SGd, ~visible_1SS[0], scale)
        return
    assert cu_seqlens is not None
    q_THd, k_LGd = (x.flatten(0, 1).contiguous() for x in (q_BSHd, k_BSGd))
    tokens, heads, width = q_THd.shape
    first_T, last_T = _seen(tokens, cu_seqlens, cu_seqlens_k, window)
    if not is_fast:
        index_L = torch.arange(k_LGd.shape[0], device=q_THd.device)
        hidden_TL = (index_L < first_T[:, None]) | (index_L > last_T[:, None])
        _raise(peaks_H, q_THd, k_LGd, hidden_TL, scale)
    elif tokens:
        tile = _TOKENS if q_THd.itemsize == 2 else _FP32_TOKENS
        _peaks_kernel[(triton.cdiv(tokens, tile), heads)](
            q_THd,
            k_LGd,
            first_T,
            last_T,
            peaks_H,
            tokens,
            scale,
            H=heads,
            G=k_LGd.shape[1],
            D=width,
            DP=max(16, triton.next_power_of_2(width)),
            TOKENS=tile,
            KEYS=_KEYS,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )


@raise_peaks_op.register_fake
def _(
    peaks_H: torch.Tensor,
    q_BSHd: torch.Tensor,
    k_BSGd: torch.Tensor,
    visible_B1SS: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    window: int | None,
    scale: float,
    is_fast: bool,
) -> None:
    """Write in place; there is nothing to return."""


def _seen(
    tokens: int, cu_seqlens: torch.Tensor, cu_seqlens_k: torch.Tensor | None, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last key (int32) that each token sees."""
    starts_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    index_T = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    document_T = torch.searchsorted(cu_seqlens[1:].contiguous(), index_T, right=True)
    last_T = index_T + (starts_k - cu_seqlens)[1:][document_T]
    first_T = starts_k[document_T]
    if window is not None:
        first_T = torch.maximum(first_T, last_T - (window - 1))
    return first_T, last_T


def _raise(
    peaks_H: torch.Tensor,
    q_SHd: torch.Tensor,
    k_SGd: torch.Tensor,
    hidden_SS: torch.Tensor,
    scale: float,
) -> None:
    """Raise peaks by the formula, head by head."""
    repeats = q_SHd.shape[1] // k_SGd.shape[1]
    for head in range(q_SHd.shape[1] if hidden_SS.numel() else 0):
        q_Sd, k_Sd = (x.to(peaks_H.dtype) for x in (q_SHd[:, head], k_SGd[:, head // repeats]))
        scores_SS = (q_Sd @ k_Sd.T) * scale
        peak = scores_SS.masked_fill(hidden_SS, float("-inf")).amax()
        peaks_H[head].copy_(torch.maximum(peaks_H[head], peak))


@triton.jit(do_not_specialize=["T"])
def _peaks_kernel(
    q_ptr,
    k_ptr,
    first_ptr,
    last_ptr,
    peaks_ptr,
    T,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
):
    # Begin with the last tokens of documents: they see the most keys.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    token, column = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DP)
    is_token, is_column = token < T, (column < D)[None, :]
    at = (token.to(tl.int64) * H + head) * D
    q = tl.load(q_ptr + at[:, None] + column[None, :], is_token[:, None] & is_column, 0.0)
    # A token beyond the last sees nothing.
    first = tl.load(first_ptr + token, is_token, 2147483647)
    last = tl.load(last_ptr + token, is_token, -1)
    largest = tl.full((TOKENS,), float("-inf"), tl.float32)
    end = tl.max(last, 0) + 1
    for start in range(tl.min(first, 0), end, KEYS):
        key = start + tl.arange(0, KEYS)
        key_at = (key.to(tl.int64) * G + head // (H // G)) * D
        k = tl.load(
            k_ptr + key_at[:, None] + column[None, :], (key < end)[:, None] & is_column, 0.0
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        visible = (key[None, :] >= first[:, None]) & (key[None, :] <= last[:, None])
        largest = tl.maximum(largest, tl.max(tl.where(visible, scores, float("-inf")), 1))
    tl.atomic_max(peaks_ptr + head, tl.max(largest, 0) * scale)
