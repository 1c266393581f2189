"""Attention: one entry point, causal within each document, grouped-query heads, named backends.

``sdpa`` is torch's scaled-dot-product attention (on Hopper with cuDNN first: 1.7x torch's flash
there), with a boolean mask for packed rows or windows; ``cudnn`` and ``exact`` lay the rows end to
end for :func:`moetrain.kernels.attention_packed`; ``flex`` is FlexAttention, whose block mask skips
what no token sees; ``reference`` is plain matrix products for tests. What a token may see is
decided once per forward by :func:`attention_mask` and shared by all layers.

Legend: B batch, S sequence, H query heads, G key/value heads, d head width.
"""

from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from moetrain.kernels.attention import cudnn as cudnn_attention
from moetrain.kernels.attention.packed import attention_packed, flex
from moetrain.kernels.backend import worth_saving

AttentionBackend = Literal["auto", "sdpa", "cudnn", "exact", "flex", "reference"]

# cuDNN first; without a mask it wins on Hopper, and the others serve what it does not take.
_SDPA_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
worth_saving(
    "attention",
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


class AttentionMask(NamedTuple):
    """Who sees whom, in the form the chosen backend takes."""

    backend: str
    """sdpa, cudnn, exact, flex or reference."""
    dense_BSS: torch.Tensor | None = None
    """Boolean [B, 1, S, S], True: visible; None: plain causal (or flex)."""
    blocks: BlockMask | None = None
    """FlexAttention's block mask."""
    cu_seqlens: torch.Tensor | None = None
    """cudnn's or exact's documents, all rows laid end to end: [documents + 1] int32."""
    max_seqlen: int = 0
    """The bound on their length."""
    window: int | None = None
    """Their sliding window."""


def attention_mask(
    positions_BS: torch.Tensor | None,
    *,
    batch: int,
    seq_len: int,
    device: torch.device,
    window: int | None = None,
    backend: AttentionBackend = "auto",
    cu_seqlens: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionMask:
    """The mask of one forward pass: token i sees j <= i of its own document, i - j < ``window``.

    Args:
        positions_BS: position of each token in its document; a 0 starts one. None: one document
            a row.
        window: sliding window in tokens; None: unlimited.
        backend: auto takes sdpa where no mask is needed and on a CPU; else cudnn where it runs
            (:func:`moetrain.kernels.attention.cudnn.runs`) and the documents are known, else flex.
        cu_seqlens: the documents of ``positions_BS`` over the B * S tokens, [documents + 1] int32:
            0, each one's end, ..., B * S. They cannot be read off the positions without waiting for
            the device, so cudnn and exact take packed rows with these alone.
        dtype: of the queries; where it is not given, auto does not take cudnn.

    Raises:
        ValueError: ``backend="cudnn"`` or ``"exact"`` for packed rows without ``cu_seqlens``.
    """
    masked = positions_BS is not None or (window is not None and window < seq_len)
    if backend == "auto":
        known = cu_seqlens is not None or positions_BS is None
        if not masked or device.type != "cuda":
            backend = "sdpa"
        else:
            backend = "cudnn" if known and cudnn_attention.runs(device, dtype) else "flex"
    if backend in ("cudnn", "exact"):
        return _packed_mask(backend, positions_BS, cu_seqlens, batch, seq_len, device, window)
    if not masked and backend == "sdpa":
        return AttentionMask("sdpa")
    if positions_BS is None:
        positions_BS = torch.arange(seq_len, device=device).expand(batch, seq_len)
    documents_BS = (positions_BS == 0).cumsum(1)
    reach = seq_len if window is None else window

    def visible(b, h, q, k):  # flex's signature: batch, head, query index, key index
        return (documents_BS[b, q] == documents_BS[b, k]) & (q >= k) & (q - k < reach)

    if backend == "flex":
        blocks = create_block_mask(visible, batch, None, seq_len, seq_len, device=str(device))
        return AttentionMask("flex", blocks=blocks)
    index = torch.arange(seq_len, device=device)
    distance = index[:, None] - index[None, :]
    dense = (documents_BS[:, :, None] == documents_BS[:, None, :]) & (distance >= 0)
    return AttentionMask(backend, dense_BSS=(dense & (distance < reach))[:, None])


def _packed_mask(
    backend: str,
    positions_BS: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    batch: int,
    seq_len: int,
    device: torch.device,
    window: int | None,
) -> AttentionMask:
    if cu_seqlens is None and positions_BS is not None:
        raise ValueError(
            f'attention backend "{backend}" was given packed rows without cu_seqlens; pass the '
            "batch's, or choose another backend"
        )
    if cu_seqlens is None:
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=device) * seq_len
    # Compiled blocks must not be compiled again for another number of documents (mark_dynamic), nor
    # for another bound: no document is longer than a row, and a loose bound costs no time.
    torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
    return AttentionMask(backend, cu_seqlens=cu_seqlens, max_seqlen=seq_len, window=window)


def attention(
    q_BSHd: torch.Tensor, k_BSGd: torch.Tensor, v_BSGd: torch.Tensor, mask: AttentionMask
) -> torch.Tensor:
    """``softmax(q k^T / sqrt(d)) v`` over what ``mask`` lets each token see: [B, S, H, d]."""
    if mask.backend == "cudnn" or mask.backend == "exact":
        assert mask.cu_seqlens is not None  # attention_mask always makes it for these
        q, k, v = (x.flatten(0, 1) for x in (q_BSHd, k_BSGd, v_BSGd))
        out_THd = attention_packed(
            q, k, v, mask.cu_seqlens, mask.max_seqlen, window=mask.window, backend=mask.backend
        )
        return out_THd.view_as(q_BSHd)
    q, k, v = (x.transpose(1, 2) for x in (q_BSHd, k_BSGd, v_BSGd))
    grouped = q.shape[1] != k.shape[1]
    if mask.backend == "flex":
        assert mask.blocks is not None  # attention_mask always makes them for flex
        out = flex(q, k, v, mask.blocks)
    elif mask.backend == "reference":
        assert mask.dense_BSS is not None  # attention_mask always makes one for it
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask.dense_BSS, float("-inf")).softmax(-1)
        out = weights.to(v.dtype) @ v
    else:
        with sdpa_kernel(_SDPA_ORDER, set_priority=True):
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask.dense_BSS,
                is_causal=mask.dense_BSS is None,
                enable_gqa=grouped,
            )
    return out.transpose(1, 2)
