"""Attention: causal within each document, grouped-query heads, one entry point for all backends.

``sdpa`` is torch's scaled-dot-product attention, with a boolean mask for packed rows or windows.
``cudnn`` and ``exact`` lay the rows end to end for :func:`attention_packed`. ``flex`` is
FlexAttention, whose block mask skips blocks that no token sees. ``reference`` is plain matrix
products for tests. :meth:`AttentionMask.of` chooses once per forward, for all layers.

:func:`attention_packed` takes documents laid end to end. For a token ``i`` of a document, over the
tokens ``j`` of the same document with ``j <= i`` (and ``i - j < window``), and with query head
``h`` reading key/value head ``h * G // H`` (arXiv 2205.14135)::

    p[i, j] = exp(scale q[i] . k[j] - lse[i])        o[i] = sum over j of p[i, j] v[j]
    delta[i] = do[i] . o[i]        ds = scale p * (do v^T - delta)
    dq = ds k        dk = ds^T q        dv = p^T do

``scale`` is 1 / sqrt(d) unless it is given, and values may be wider or narrower than keys.

Worked example with T = 5: ``cu_seqlens = [0, 2, 5]`` holds two documents; token 2 starts the second
and sees itself alone, so ``o[2] = v[2]``; token 4 sees tokens 2, 3 and 4.

:func:`attention_packed` is one op. On CUDA it runs cuDNN's ragged attention, 1.4 to 1.7 times as
fast as FlexAttention on Hopper, or with ``exact`` the forward of
:mod:`moetrain.kernels.attention.batch_invariant`. On a CPU it computes the formulas. Queries may be
a part of the tokens (one rank's part, under context parallelism). A document's queries are then the
last tokens among its given keys: with keys ``[0, 5]`` and queries ``[0, 2]`` the two queries are
tokens 3 and 4.

Left out on purpose: dropout, biases, and queries in a document's middle with keys after them.

Legend: B batch, S sequence (of one document where tokens are packed), T tokens, H query heads,
G key/value heads, d width of a query and a key, v of a value, N documents.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from moetrain.config.compute import AttentionName
from moetrain.kernels.attention import batch_invariant
from moetrain.kernels.attention import cudnn as cudnn_attention
from moetrain.runtime.backend import gradients, refusal, worth_saving
from moetrain.runtime.typed import OpContext

# cuDNN first, the fastest on Hopper without a mask; the others serve what it does not take.
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
    torch.ops.higher_order.flex_attention,
)


class AttentionMask(NamedTuple):
    """The keys that each token sees, in the form that the chosen backend takes."""

    backend: str
    """sdpa, cudnn, exact, flex or reference."""
    dense_BSS: torch.Tensor | None = None
    """For sdpa and reference: [B, 1, S, S], True where visible, or [B, G, S, S] with a mask of each
    key/value head, for all query heads that read it; None: plain causal."""
    blocks: BlockMask | None = None
    """For flex: its block mask."""
    cu_seqlens: torch.Tensor | None = None
    """This and the next three fields are for cudnn and exact: see :func:`attention_packed`."""
    max_seqlen: int = 0
    window: int | None = None
    cu_seqlens_k: torch.Tensor | None = None
    """The documents of the keys, where they are not those of the queries."""
    before: int | None = None
    """Number of keys before the first query that attention must be given; None: all keys. Set by
    :meth:`part`."""

    @classmethod
    def of(
        cls,
        positions_BS: torch.Tensor | None,
        *,
        batch: int,
        seq_len: int,
        device: torch.device,
        window: int | None = None,
        backend: AttentionName = "auto",
        cu_seqlens: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        needs_lse: bool = False,
        width: int = 0,
        is_cut: bool = False,
    ) -> "AttentionMask":
        """Make the mask of one forward: i sees j <= i of its own document, i - j < ``window``.

        Args:
            positions_BS: position of each token in its document; None: each row is one document.
            window: sliding window in tokens; None: unlimited.
            backend: auto takes sdpa where no mask is needed and on a CPU; else cudnn where it runs
                and the documents are known, else flex.
            cu_seqlens: the documents of all B * S tokens, as :func:`attention_packed` takes them.
                The host would have to wait for the device to find them from the positions.
            dtype: the dtype of the queries; without it auto does not take cudnn.
            needs_lse: True: the backend must return the log-sum-exp, which attention sinks need.
                sdpa cannot, so auto takes reference on a CPU.
            width: width of the widest head. On CUDA auto takes flex for heads too wide for cuDNN.
            is_cut: True: :meth:`part` will be called, so even a plain causal mask is made explicit.

        Raises:
            ValueError: for cudnn or exact with packed rows and no ``cu_seqlens``, and for sdpa with
                ``needs_lse``.
        """
        # Choose the backend.
        masked = positions_BS is not None or (window is not None and window < seq_len) or is_cut
        if backend == "auto":
            known = cu_seqlens is not None or positions_BS is None
            is_wide = width > cudnn_attention.MAX_HEAD_DIM
            if not (masked or needs_lse or is_wide) or device.type != "cuda":
                backend = "reference" if needs_lse else "sdpa"
            else:
                runs = known and cudnn_attention.runs(device, dtype, width)
                backend = "cudnn" if runs else "flex"
        if backend == "sdpa" and needs_lse:
            raise ValueError(
                'attention backend "sdpa" has no log-sum-exp, which sinks need; choose another '
                "backend"
            )
        # Packed: only the documents' ends are needed.
        if backend in ("cudnn", "exact"):
            if cu_seqlens is None and positions_BS is not None:
                raise ValueError(
                    f'attention backend "{backend}" was given packed rows without cu_seqlens; pass '
                    "the batch's, or choose another backend"
                )
            if cu_seqlens is None:
                cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=device) * seq_len
            # Blocks must not be compiled again when the number of documents changes. The bound
            # max_seqlen is the row's length, which does not change.
            torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
            return cls(backend, cu_seqlens=cu_seqlens, max_seqlen=seq_len, window=window)
        # No mask: plain causal.
        if not masked and backend == "sdpa":
            return cls("sdpa")
        # A mask over all pairs, or over blocks of them.
        if positions_BS is None:
            positions_BS = torch.arange(seq_len, device=device).expand(batch, seq_len)
        documents_BS = (positions_BS == 0).cumsum(1)
        reach = seq_len if window is None else window

        def visible(b, h, q, k):  # flex's signature: batch, head, query index, key index
            return (documents_BS[b, q] == documents_BS[b, k]) & (q >= k) & (q - k < reach)

        if backend == "flex":
            blocks = create_block_mask(visible, batch, None, seq_len, seq_len, device=str(device))
            return cls("flex", blocks=blocks)
        rows = torch.arange(batch, device=device)
        index = torch.arange(seq_len, device=device)
        dense_BSS = visible(rows[:, None, None], None, index[:, None], index[None, :])
        return cls(backend, dense_BSS=dense_BSS[:, None])

    def part(
        self, start: int, stop: int, shape: tuple[int, int], before: int | None = None
    ) -> "AttentionMask":
        """Return the mask of some queries over the keys of all tokens, rows laid end to end.

        The whole mask must have been made with ``is_cut``.

        Args:
            start, stop: the queries, among all B * S tokens.
            shape: [B, S].
            before: the window less one: only the keys of tokens ``start - before`` up to ``stop``
                are given. Keys before token 0 may have any finite value. None: all keys are given.
        """
        begin = 0 if before is None else start - before
        if self.cu_seqlens is not None:
            ends = self.cu_seqlens
            # The document that ``start`` lies in, or begins.
            first = torch.where(ends <= start, ends, 0).amax().clamp(min=begin)
            keys = torch.maximum(ends.clamp(max=stop), first) - begin
            for cut in (ends := ends.clamp(start, stop) - start), keys:
                torch._dynamo.maybe_mark_dynamic(cut, 0)
            return self._replace(cu_seqlens=ends, cu_seqlens_k=keys, before=before)
        keys_end = shape[0] * shape[1] if before is None else stop
        if self.blocks is not None:
            whole, seq_len = self.blocks.mask_mod, shape[1]

            def visible(b, h, q, k):
                q, k = q + start, k + begin
                same_row = (k >= 0) & (q // seq_len == k // seq_len)
                return same_row & whole(q // seq_len, h, q % seq_len, k % seq_len)

            device = str(self.blocks.kv_num_blocks.device)
            queries, keys = stop - start, keys_end - begin
            blocks = create_block_mask(visible, None, None, queries, keys, device=device)
            return self._replace(blocks=blocks, before=before)
        assert self.dense_BSS is not None  # since it was made with is_cut
        visible_TT = torch.block_diag(*self.dense_BSS[:, 0])[start:stop, max(0, begin) : keys_end]
        visible_TT = F.pad(visible_TT, (max(0, -begin), 0))
        return self._replace(dense_BSS=visible_TT[None, None], before=before)


def attention(
    q_BSHd: torch.Tensor,
    k_BSGd: torch.Tensor,
    v_BSGv: torch.Tensor,
    mask: AttentionMask,
    scale: float | None = None,
) -> torch.Tensor:
    """Return ``softmax(scale q k^T) v`` over the tokens that ``mask`` shows: [B, S, H, v].

    ``scale`` is ``d**-0.5`` if it is None.
    """
    if mask.backend == "cudnn" or mask.backend == "exact":
        assert mask.cu_seqlens is not None  # AttentionMask.of always makes it for these
        out_THv = attention_packed(
            q_BSHd.flatten(0, 1),
            k_BSGd.flatten(0, 1),
            v_BSGv.flatten(0, 1),
            mask.cu_seqlens,
            mask.max_seqlen,
            window=mask.window,
            scale=scale,
            backend=mask.backend,
            cu_seqlens_k=mask.cu_seqlens_k,
        )
        return out_THv.unflatten(0, q_BSHd.shape[:2])
    q, k, v = (x.transpose(1, 2) for x in (q_BSHd, k_BSGd, v_BSGv))
    grouped = q.shape[1] != k.shape[1]
    if mask.backend == "flex":
        assert mask.blocks is not None  # AttentionMask.of always makes them for flex
        out, _ = attend_in_blocks(q, k, v, mask.blocks, scale)
    elif mask.backend == "reference":
        assert mask.dense_BSS is not None  # AttentionMask.of always makes one for it
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        visible = mask.dense_BSS
        if visible.shape[1] > 1:
            visible = visible.repeat_interleave(repeats, dim=1)
        scores = (q @ k.transpose(-1, -2)).float() * score_scale(q, scale)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out = weights.to(v.dtype) @ v
    elif mask.dense_BSS is not None and mask.dense_BSS.shape[1] > 1:
        out = attend_by_groups(q, k, v, mask.dense_BSS, scale)
    else:
        with sdpa_kernel(_SDPA_ORDER, set_priority=True):
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask.dense_BSS,
                is_causal=mask.dense_BSS is None,
                scale=scale,
                enable_gqa=grouped,
            )
    return out.transpose(1, 2)


def attend_by_groups(
    q_BHSd: torch.Tensor,
    k_BGLd: torch.Tensor,
    v_BGLv: torch.Tensor,
    visible_BGSL: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Return torch's attention [B, H, S, v], with a mask of each key/value head.

    Key/value heads become batch rows, so that no mask is repeated for the query heads of a group.
    """
    repeats = q_BHSd.shape[1] // k_BGLd.shape[1]
    q_RrSd = q_BHSd.unflatten(1, (-1, repeats)).flatten(0, 1)
    k_RrLd, v_RrLv = (x.flatten(0, 1)[:, None].repeat(1, repeats, 1, 1) for x in (k_BGLd, v_BGLv))
    visible_R1SL = visible_BGSL.flatten(0, 1)[:, None]
    with sdpa_kernel(_SDPA_ORDER, set_priority=True):
        out_RrSv = F.scaled_dot_product_attention(
            q_RrSd, k_RrLd, v_RrLv, attn_mask=visible_R1SL, scale=scale
        )
    return out_RrSv.unflatten(0, visible_BGSL.shape[:2]).flatten(1, 2)


def score_scale(q: torch.Tensor, scale: float | None) -> float:
    """Return the factor of scores: ``scale``, or ``d**-0.5`` if it is None."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def attention_packed(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    backend: Literal["auto", "cudnn", "exact", "reference"] = "auto",
    check: bool = False,
    cu_seqlens_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally within each document: ``o_THv`` in ``q``'s dtype.

    cuDNN sums the gradient of ``q`` with atomics, so its last bits may differ between runs. After
    ``torch.use_deterministic_algorithms(True)`` they do not, but the backward has a tenth of the
    speed and takes scratch memory: 18 GiB for 16 documents of up to 4096 tokens (H = 32, d = 128).

    Args:
        q_THd, k_TGd, v_TGv: one dtype; H is a multiple of G. On cuDNN bf16 or fp16, and d and v
            multiples of 8 up to 256. Tensors that are not contiguous are copied.
        cu_seqlens: [N + 1] int32: 0, each document's end, ..., T. Documents may be empty.
        max_seqlen: a bound on every document's length. A loose bound costs no time, but each new
            bound causes a recompilation.
        window: each token sees this many tokens at most, itself included; None: all.
        scale: the factor of scores; None: ``d**-0.5``.
        backend: auto is cuDNN on CUDA and the plain formulas on a CPU; exact has
            :mod:`moetrain.kernels.attention.batch_invariant`'s forward instead.
        check: check the contents of ``cu_seqlens`` first; that waits for a GPU. Without it wrong
            documents read and write memory outside the tensors.
        cu_seqlens_k: [N + 1] int32, the documents' ends among the given keys. Keys before the first
            and after the last entry belong to no document. A document has at least as many keys as
            queries, and its queries are its last tokens. None: the documents of the queries.
    """
    check_packed(q_THd, k_TGd, v_TGv, cu_seqlens, cu_seqlens_k, max_seqlen, window)
    scale = score_scale(q_THd, scale)
    if check or backend == "reference":
        sizes = (q_THd.shape[0], k_TGd.shape[0], max_seqlen)
        documents = read_documents(cu_seqlens, cu_seqlens_k, *sizes)
        if backend == "reference":
            return packed_forward_reference(q_THd, k_TGd, v_TGv, documents, window, scale)[0]
    if q_THd.is_cuda or backend == "cudnn":
        require_cudnn(q_THd, v_TGv)
    return attention_packed_op(
        q_THd.contiguous(),
        k_TGd.contiguous(),
        v_TGv.contiguous(),
        cu_seqlens,
        cu_seqlens_k,
        max_seqlen,
        window,
        scale,
        backend == "exact",
    )[0]


def require_cudnn(q_THd: torch.Tensor, v_TGv: torch.Tensor) -> None:
    """Raise ValueError if cuDNN does not take these heads; a compiled block was checked before."""
    if not torch.compiler.is_compiling():
        cudnn_attention.require(q_THd.device, q_THd.dtype, q_THd.shape[2], v_TGv.shape[2])


class Document(NamedTuple):
    """The tokens of one document."""

    queries: slice
    """Among the T queries."""
    keys: slice
    """Among the given keys."""


def check_packed(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen: int,
    window: int | None,
) -> None:
    """Raise ValueError if shapes, dtypes or sizes do not fit :func:`attention_packed`."""
    tokens, heads, width = q_THd.shape
    keys, kv_heads, key_width = k_TGd.shape
    fits = (keys, kv_heads) == v_TGv.shape[:2] and width == key_width and heads % kv_heads == 0
    fits = fits and (tokens == keys or cu_seqlens_k is not None)
    if not fits or not q_THd.dtype == k_TGd.dtype == v_TGv.dtype:
        takes = "[T, H, d], [T, G, d] and [T, G, v] in one dtype, H a multiple of G"
        raise refusal("attention_packed", takes, q=q_THd, k=k_TGd, v=v_TGv)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise refusal("attention_packed", "[documents + 1] in int32", cu_seqlens=cu_seqlens)
    if cu_seqlens_k is not None:
        like = (cu_seqlens_k.dtype, cu_seqlens_k.shape) == (cu_seqlens.dtype, cu_seqlens.shape)
        if not like:
            raise refusal(
                "attention_packed",
                "cu_seqlens_k in the dtype and shape of cu_seqlens",
                cu_seqlens=cu_seqlens,
                cu_seqlens_k=cu_seqlens_k,
            )
    if max_seqlen < 1 or (window is not None and window < 1):
        takes = "positive numbers"
        raise refusal("attention_packed", takes, max_seqlen=max_seqlen, window=window)


def read_documents(
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    tokens: int,
    keys: int,
    max_seqlen: int,
) -> list[Document]:
    """Return the documents that are not empty. Waits for the device.

    Raises:
        ValueError: the documents do not fit ``tokens`` queries and ``keys`` keys.
    """
    ends = cu_seqlens.tolist()
    key_ends = ends if cu_seqlens_k is None else cu_seqlens_k.tolist()
    lengths = [j - i for i, j in itertools.pairwise(ends)]
    if ends[0] != 0 or ends[-1] != tokens or min(lengths) < 0 or max(lengths) > max_seqlen:
        takes = f"documents of at most max_seqlen={max_seqlen} tokens, from 0 to T={tokens}"
        given = f"of {min(lengths)} to {max(lengths)} tokens, from {ends[0]} to {ends[-1]}"
        raise refusal("attention_packed", takes, documents=given)
    key_lengths = [j - i for i, j in itertools.pairwise(key_ends)]
    least = min((k - q for q, k in zip(lengths, key_lengths, strict=True)), default=0)
    most = max(key_lengths)
    if least < 0 or most > max_seqlen or key_ends[0] < 0 or key_ends[-1] > keys:
        takes = f"at least a key for each query, at most {max_seqlen} keys, among the {keys} given"
        given = (
            f"with at most {most} keys and at least {least} more keys than queries, "
            f"from {key_ends[0]} to {key_ends[-1]}"
        )
        raise refusal("attention_packed", takes, documents=given)
    pairs = zip(itertools.pairwise(ends), itertools.pairwise(key_ends), strict=True)
    documents = [Document(slice(*queries), slice(*keys)) for queries, keys in pairs]
    return [document for document in documents if document.queries.start < document.queries.stop]


def _scores_HSS(
    q_SHd: torch.Tensor, k_SHd: torch.Tensor, window: int | None, scale: float
) -> torch.Tensor:
    """Return one document's masked scores; its queries are its last tokens."""
    index = torch.arange(k_SHd.shape[0], device=q_SHd.device)
    distance_SS = index[-q_SHd.shape[0] :, None] - index[None, :]
    hidden_SS = distance_SS < 0 if window is None else (distance_SS < 0) | (distance_SS >= window)
    scores_HSS = torch.einsum("qhd,khd->hqk", q_SHd, k_SHd) * scale
    return scores_HSS.masked_fill(hidden_SS, float("-inf"))


def packed_forward_reference(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    documents: Sequence[Document],
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``o_THv`` and ``lse_HT`` by the formulas, differentiable."""
    wide = torch.promote_types(q_THd.dtype, torch.float32)
    repeats = q_THd.shape[1] // k_TGd.shape[1]
    outputs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    for document in documents:
        q_SHd = q_THd[document.queries].to(wide)
        k, v = k_TGd[document.keys].to(wide), v_TGv[document.keys].to(wide)
        k_SHd, v_SHv = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        scores_HSS = _scores_HSS(q_SHd, k_SHd, window, scale)
        lse_HS = scores_HSS.logsumexp(-1)
        o_SHv = torch.einsum("hqk,khd->qhd", (scores_HSS - lse_HS[..., None]).exp(), v_SHv)
        outputs.append(o_SHv.to(q_THd.dtype))
        lses.append(lse_HS)
    return torch.cat(outputs), torch.cat(lses, dim=1)


def _packed_backward_reference(
    do_THv: torch.Tensor,
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    o_THv: torch.Tensor,
    lse_HT: torch.Tensor,
    documents: Sequence[Document],
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v by the formulas."""
    dq_THd, dk_TGd, dv_TGv = (torch.zeros_like(x) for x in (q_THd, k_TGd, v_TGv))
    repeats = q_THd.shape[1] // k_TGd.shape[1]
    for queries, keys in documents:
        do, q, o = (x[queries].to(lse_HT.dtype) for x in (do_THv, q_THd, o_THv))
        k, v = (x[keys].to(lse_HT.dtype) for x in (k_TGd, v_TGv))
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        # Recompute the probabilities.
        scores_HSS = _scores_HSS(q, k, window, scale)
        p_HSS = (scores_HSS - lse_HT[:, queries, None]).exp()
        # The gradient of the scores.
        dp_HSS = torch.einsum("qhd,khd->hqk", do, v)
        delta_HS = (do * o).sum(-1).T
        ds_HSS = p_HSS * (dp_HSS - delta_HS[..., None]) * scale
        # Keys and values get the sum over the query heads that share them.
        dk_SHd = torch.einsum("hqk,qhd->khd", ds_HSS, q)
        dv_SHv = torch.einsum("hqk,qhd->khd", p_HSS, do)
        dq_THd[queries] = torch.einsum("hqk,khd->qhd", ds_HSS, k).to(q_THd.dtype)
        dk_TGd[keys] = dk_SHd.unflatten(1, (-1, repeats)).sum(2).to(k_TGd.dtype)
        dv_TGv[keys] = dv_SHv.unflatten(1, (-1, repeats)).sum(2).to(v_TGv.dtype)
    return dq_THd, dk_TGd, dv_TGv


def attend_in_blocks(
    q_BHSd: torch.Tensor,
    k_BGSd: torch.Tensor,
    v_BGSv: torch.Tensor,
    blocks: BlockMask,
    scale: float | None,
    needs_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return FlexAttention's output [B, H, S, v], and the log-sum-exp [B, H, S] if it is needed."""
    is_eager = not torch.compiler.is_compiling()  # a compiled block inlines it
    width = max(q_BHSd.shape[-1], v_BGSv.shape[-1])
    options = _BY_BLOCKS | block_sizes(q_BHSd.dtype, width) if q_BHSd.is_cuda else None
    plain: Callable[..., Any] = flex_attention
    run = _compiled_flex() if q_BHSd.is_cuda and is_eager else plain
    found: Any = run(
        q_BHSd,
        k_BGSd,
        v_BGSv,
        block_mask=blocks,
        scale=scale,
        enable_gqa=q_BHSd.shape[1] != k_BGSd.shape[1],
        kernel_options=options,
        return_aux=AuxRequest(lse=True) if needs_lse else None,
    )
    return (found[0], found[1].lse) if needs_lse else (found, None)


def block_sizes(dtype: torch.dtype, width: int) -> dict[str, Any]:
    """Return FlexAttention's block sizes for wide heads; empty: torch chooses.

    With torch 2.11, torch's own need 257 KiB of shared memory for heads of width 512 in bf16 and
    272 KiB for width 192 in fp32, and a Hopper GPU has 227 KiB.
    """
    if dtype.itemsize == 2 and width > 256:
        return _WIDE_16_BIT
    if dtype.itemsize == 4 and 128 < width < 256:
        return _WIDE_FP32
    return {}


_BY_BLOCKS = {"BACKEND": "TRITON"}
"""For rows of fewer than 128 queries torch would take a kernel for decoding, which has no block
size if the row's queries of one key/value head are more than 128."""
# FlexAttention's kernel_options. Forward: M queries and N keys. Backward: gradients of keys (1) and
# of queries (2).
_WIDE_16_BIT = {
    **{"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_stages": 2, "fwd_num_warps": 8},
    **{"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 32},
    **{"bwd_num_stages": 2, "bwd_num_warps": 8},
}
_WIDE_FP32 = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 64, "fwd_num_stages": 1, "fwd_num_warps": 8}


@cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    """Return FlexAttention compiled, as a GPU needs it; made lazily, since it takes seconds."""
    return torch.compile(flex_attention)


@torch.library.custom_op("moetrain::attention_packed", mutates_args=())
def attention_packed_op(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen: int,
    window: int | None,
    scale: float,
    is_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``o_THv`` and ``lse_HT`` for contiguous inputs, unchecked."""
    if not q_THd.is_cuda:
        sizes = (q_THd.shape[0], k_TGd.shape[0], max_seqlen)
        documents = read_documents(cu_seqlens, cu_seqlens_k, *sizes)
        return packed_forward_reference(q_THd, k_TGd, v_TGv, documents, window, scale)
    if is_invariant:
        return batch_invariant.forward(
            q_THd, k_TGd, v_TGv, cu_seqlens, window, scale, cu_seqlens_k=cu_seqlens_k
        )
    return cudnn_attention.forward(
        q_THd,
        k_TGd,
        v_TGv,
        cu_seqlens,
        cu_seqlens_k,
        max_seqlen=max_seqlen,
        window=window,
        scale=scale,
    )


@attention_packed_op.register_fake
def fake_packed(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen: int,
    window: int | None,
    scale: float,
    is_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``o_THv`` and ``lse_HT`` without values."""
    wide = torch.promote_types(q_THd.dtype, torch.float32)
    tokens, heads, _ = q_THd.shape
    o_THv = q_THd.new_empty(tokens, heads, v_TGv.shape[2])
    return o_THv, q_THd.new_empty(heads, tokens, dtype=wide)


@torch.library.custom_op("moetrain::attention_packed_backward", mutates_args=())
def attention_packed_backward_op(
    do_THv: torch.Tensor,
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    o_THv: torch.Tensor,
    lse_HT: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen: int,
    window: int | None,
    scale: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v for contiguous inputs, unchecked."""
    if not q_THd.is_cuda:
        sizes = (q_THd.shape[0], k_TGd.shape[0], max_seqlen)
        documents = read_documents(cu_seqlens, cu_seqlens_k, *sizes)
        return _packed_backward_reference(
            do_THv, q_THd, k_TGd, v_TGv, o_THv, lse_HT, documents, window, scale
        )
    return cudnn_attention.backward(
        do_THv,
        q_THd,
        k_TGd,
        v_TGv,
        o_THv,
        lse_HT,
        cu_seqlens,
        cu_seqlens_k,
        max_seqlen=max_seqlen,
        window=window,
        scale=scale,
        deterministic=deterministic,
    )


@attention_packed_backward_op.register_fake
def _(
    do_THv: torch.Tensor,
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    o_THv: torch.Tensor,
    lse_HT: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen: int,
    window: int | None,
    scale: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q_THd), torch.empty_like(k_TGd), torch.empty_like(v_TGv)


def _save(
    ctx: OpContext, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    q_THd, k_TGd, v_TGv, cu_seqlens, cu_seqlens_k, max_seqlen, window, scale, _ = inputs
    ctx.max_seqlen, ctx.window, ctx.scale = max_seqlen, window, scale
    ctx.save_for_backward(q_THd, k_TGd, v_TGv, *output, cu_seqlens, cu_seqlens_k)


def _differentiate(ctx: OpContext, do_THv: torch.Tensor, _: torch.Tensor) -> tuple[object, ...]:
    q_THd, k_TGd, v_TGv, o_THv, lse_HT, cu_seqlens, cu_seqlens_k = ctx.saved_tensors
    dq_THd, dk_TGd, dv_TGv = attention_packed_backward_op(
        do_THv.contiguous(),
        q_THd,
        k_TGd,
        v_TGv,
        o_THv,
        lse_HT,
        cu_seqlens,
        cu_seqlens_k,
        ctx.max_seqlen,
        ctx.window,
        ctx.scale,
        torch.are_deterministic_algorithms_enabled(),
    )
    return gradients(attention_packed_op, q_THd=dq_THd, k_TGd=dk_TGd, v_TGv=dv_TGv)


attention_packed_op.register_autograd(_differentiate, setup_context=_save)
worth_saving("attention", torch.ops.moetrain.attention_packed.default)
