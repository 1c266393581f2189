"""Packed attention: documents laid end to end, each causal within itself, grouped-query heads.

For a token ``i`` of a document, over the tokens ``j`` of the same document with ``j <= i`` (and
``i - j < window``), and with query head ``h`` reading key/value head ``h * G // H``::

    p[i, j] = exp(q[i] . k[j] / sqrt(d) - lse[i])        o[i] = sum over j of p[i, j] v[j]

``lse`` is the log of the softmax's denominator, the one statistic the backward pass keeps (arXiv
2205.14135). With ``delta[i] = do[i] . o[i]`` and ``ds = p * (do v^T - delta) / sqrt(d)``::

    dq = ds k        dk = ds^T q        dv = p^T do

Worked example with T = 5: ``cu_seqlens = [0, 2, 5]`` holds two documents; token 2 starts the second
and sees itself alone, so ``o[2] = v[2]``; token 4 sees tokens 2, 3 and 4.

One custom op: on CUDA cuDNN's ragged attention (:mod:`moetrain.kernels.attention.cudnn`), 1.4 to
1.7 times FlexAttention on Hopper; on a CPU the formulas above. FlexAttention serves the GPUs and
dtypes that cuDNN does not. Left out on purpose: dropout, biases, and queries whose documents are
not the keys'.

Legend: T tokens, H query heads, G key/value heads, d head width, N documents, S tokens of one.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from moetrain.kernels.attention import batch_invariant
from moetrain.kernels.attention import cudnn as cudnn_attention
from moetrain.kernels.backend import worth_saving

PackedBackend = Literal["auto", "cudnn", "exact", "flex", "reference"]


@cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    """On a GPU FlexAttention is only fast compiled. (Not before: it imports for seconds.)"""
    return torch.compile(flex_attention)


def attention_packed(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGd: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    window: int | None = None,
    backend: PackedBackend = "auto",
    check: bool = False,
) -> torch.Tensor:
    """Causal attention within each document: ``o_THd`` in ``q``'s dtype, scaled by ``d**-0.5``.

    cuDNN sums the gradient of ``q`` with atomics, so its last bits may differ between runs. Under
    ``torch.use_deterministic_algorithms(True)`` they do not, at a tenth of the speed and in scratch
    memory that grows as documents times ``max_seqlen`` squared: 18 GiB for 16 of up to 4096 tokens
    (H = 32, d = 128). ``flex`` repeats its bits without.

    Args:
        q_THd, k_TGd, v_TGd: one dtype; H is a multiple of G. On cuDNN bf16 or fp16, and d a
            multiple of 8 up to 256. Other strides than contiguous cost a copy.
        cu_seqlens: [N + 1] int32: 0, each document's end, ..., T. Empty documents may stand
            anywhere. Under ``torch.compile`` mark its size as dynamic, for it changes from batch to
            batch.
        max_seqlen: a bound on every document's length; a loose one costs no time. A constant, such
            as the row length, is best: under ``torch.compile`` a number that changes recompiles.
        window: each token sees this many tokens at most, itself included; None: all.
        backend: auto is cudnn where it runs (:func:`moetrain.kernels.attention.cudnn.runs`), flex
            on other CUDA tensors and the plain formulas on a CPU; the others run or fail. exact
            is the forward of :mod:`moetrain.kernels.attention.batch_invariant` with cuDNN's
            backward.
        check: look at what ``cu_seqlens`` holds first. For debugging: it waits for a GPU, and
            without it wrong documents there read and write memory that is not theirs.

    Raises:
        ValueError: shapes, dtypes or devices other than these; cuDNN asked for by name and absent;
            with ``check``, documents that are not 0 to T or are longer than ``max_seqlen``.
    """
    _check(q_THd, k_TGd, v_TGd, cu_seqlens, max_seqlen, window)
    if check:
        _documents(cu_seqlens, q_THd.shape[0], max_seqlen)
    is_invariant = backend == "exact"
    needs_cudnn = backend == "cudnn" or (is_invariant and q_THd.is_cuda)
    if needs_cudnn and not torch.compiler.is_compiling():  # which has looked already, uncompiled
        cudnn_attention.require(q_THd.device, q_THd.dtype, q_THd.shape[2])
    elif backend == "auto" and q_THd.is_cuda:
        runs = cudnn_attention.runs(q_THd.device, q_THd.dtype)
        backend = "cudnn" if runs else "flex"
    if backend in ("auto", "cudnn", "exact"):  # the op: the formulas on a CPU
        q, k, v = (x.contiguous() for x in (q_THd, k_TGd, v_TGd))
        return _attention_packed(q, k, v, cu_seqlens, max_seqlen, window, is_invariant)[0]
    if backend == "flex":
        return _flex_packed(q_THd, k_TGd, v_TGd, cu_seqlens, window)
    return attention_packed_reference(q_THd, k_TGd, v_TGd, cu_seqlens, max_seqlen, window=window)


def attention_packed_reference(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGd: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    window: int | None = None,
) -> torch.Tensor:
    """:func:`attention_packed` one document at a time, by matrix products; waits for a GPU."""
    documents = _documents(cu_seqlens, q_THd.shape[0], max_seqlen)
    return _forward_formula(q_THd, k_TGd, v_TGd, documents, window)[0]


def _check(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGd: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    window: int | None,
) -> None:
    shapes = [tuple(x.shape) for x in (q_THd, k_TGd, v_TGd)]
    (tokens, heads, width), kv = shapes[0], shapes[1]
    if kv != shapes[2] or (tokens, width) != (kv[0], kv[2]) or heads % kv[1]:
        raise ValueError(
            f"attention_packed: q, k and v were given as {shapes}; it takes [T, H, d], [T, G, d] "
            "and [T, G, d] with H a multiple of G"
        )
    if len({x.dtype for x in (q_THd, k_TGd, v_TGd)}) > 1:
        raise ValueError(
            f"attention_packed: q, k and v were given in {q_THd.dtype}, {k_TGd.dtype} and "
            f"{v_TGd.dtype}; it takes one dtype"
        )
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"attention_packed: cu_seqlens was given as {tuple(cu_seqlens.shape)} in "
            f"{cu_seqlens.dtype}; it takes [documents + 1] in int32"
        )
    if max_seqlen < 1 or (window is not None and window < 1):
        raise ValueError(
            f"attention_packed: max_seqlen={max_seqlen} and window={window} were given; it takes "
            "positive numbers"
        )


# The plain formulas.


def _documents(cu_seqlens: torch.Tensor, tokens: int, max_seqlen: int) -> list[slice]:
    ends = cu_seqlens.tolist()
    lengths = [j - i for i, j in itertools.pairwise(ends)]
    if ends[0] != 0 or ends[-1] != tokens or min(lengths) < 0 or max(lengths) > max_seqlen:
        raise ValueError(
            f"attention_packed: cu_seqlens of documents {min(lengths)} to {max(lengths)} long, "
            f"from {ends[0]} to {ends[-1]}, was given; it takes documents of at most max_seqlen="
            f"{max_seqlen}, from 0 to T={tokens}"
        )
    return [slice(i, j) for i, j in itertools.pairwise(ends) if i < j]


def _scores_HSS(
    q_SHd: torch.Tensor, k_SHd: torch.Tensor, window: int | None
) -> tuple[torch.Tensor, float]:
    """One document's masked scores in at least fp32, and the scale."""
    scale = q_SHd.shape[-1] ** -0.5
    index = torch.arange(q_SHd.shape[0], device=q_SHd.device)
    distance_SS = index[:, None] - index[None, :]
    hidden_SS = distance_SS < 0 if window is None else (distance_SS < 0) | (distance_SS >= window)
    scores_HSS = torch.einsum("qhd,khd->hqk", q_SHd, k_SHd) * scale
    return scores_HSS.masked_fill(hidden_SS, float("-inf")), scale


def _forward_formula(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGd: torch.Tensor,
    documents: Sequence[slice],
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``o_THd`` and ``lse_HT``, differentiable."""
    wide = torch.promote_types(q_THd.dtype, torch.float32)
    repeats = q_THd.shape[1] // k_TGd.shape[1]
    outputs = []
    for rows in documents:
        q, k, v = (x[rows].to(wide) for x in (q_THd, k_TGd, v_TGd))
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        scores_HSS, _ = _scores_HSS(q, k, window)
        lse_HS = scores_HSS.logsumexp(-1)
        o_SHd = torch.einsum("hqk,khd->qhd", (scores_HSS - lse_HS[..., None]).exp(), v)
        outputs.append((o_SHd.to(q_THd.dtype), lse_HS))
    o, lse = zip(*outputs, strict=True)
    return torch.cat(o), torch.cat(lse, dim=1)


def _backward_formula(
    do_THd: torch.Tensor,
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGd: torch.Tensor,
    o_THd: torch.Tensor,
    lse_HT: torch.Tensor,
    documents: Sequence[slice],
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = (torch.zeros_like(q_THd), torch.zeros_like(k_TGd), torch.zeros_like(v_TGd))
    repeats = q_THd.shape[1] // k_TGd.shape[1]
    for rows in documents:
        do, q, k, v, o = (x[rows].to(lse_HT.dtype) for x in (do_THd, q_THd, k_TGd, v_TGd, o_THd))
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        scores_HSS, scale = _scores_HSS(q, k, window)
        p_HSS = (scores_HSS - lse_HT[:, rows, None]).exp()
        dp_HSS = torch.einsum("qhd,khd->hqk", do, v)
        delta_HS = (do * o).sum(-1).T
        ds_HSS = p_HSS * (dp_HSS - delta_HS[..., None]) * scale
        dk_SHd = torch.einsum("hqk,qhd->khd", ds_HSS, q)
        dv_SHd = torch.einsum("hqk,qhd->khd", p_HSS, do)
        grads[0][rows] = torch.einsum("hqk,khd->qhd", ds_HSS, k).to(q_THd.dtype)
        for grad_TGd, wide_SHd in zip(grads[1:], (dk_SHd, dv_SHd), strict=True):
            grad_TGd[rows] = wide_SHd.unflatten(1, (-1, repeats)).sum(2).to(grad_TGd.dtype)
    return grads


def _flex_packed(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGd: torch.Tensor,
    cu_seqlens: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    tokens = q_THd.shape[0]
    index_T = torch.arange(tokens, device=q_THd.device, dtype=torch.int32)
    document_T = torch.searchsorted(cu_seqlens, index_T, right=True)
    reach = tokens if window is None else window

    def visible(b, h, q, k):  # flex's signature: batch, head, query index, key index
        return (document_T[q] == document_T[k]) & (q >= k) & (q - k < reach)

    blocks = create_block_mask(visible, None, None, tokens, tokens, device=str(q_THd.device))
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THd, k_TGd, v_TGd))
    return flex(q, k, v, blocks)[0].transpose(0, 1)


def flex(
    q_BHSd: torch.Tensor, k_BGSd: torch.Tensor, v_BGSd: torch.Tensor, blocks: BlockMask
) -> torch.Tensor:
    """FlexAttention over ``blocks``: [B, H, S, d]."""
    is_eager = not torch.compiler.is_compiling()  # a compiled block has it in its own graph
    run = _compiled_flex() if q_BHSd.is_cuda and is_eager else flex_attention
    grouped = q_BHSd.shape[1] != k_BGSd.shape[1]
    out = run(q_BHSd, k_BGSd, v_BGSd, block_mask=blocks, enable_gqa=grouped)
    assert isinstance(out, torch.Tensor)  # no log-sum-exp was asked for
    return out


# The custom op.


@torch.library.custom_op("moetrain::attention_packed", mutates_args=())
def _attention_packed(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGd: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    window: int | None,
    is_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``o_THd`` and ``lse_HT``."""
    if not q_THd.is_cuda:
        documents = _documents(cu_seqlens, q_THd.shape[0], max_seqlen)
        return _forward_formula(q_THd, k_TGd, v_TGd, documents, window)
    if is_invariant:
        return batch_invariant.forward(q_THd, k_TGd, v_TGd, cu_seqlens, window)
    return cudnn_attention.forward(q_THd, k_TGd, v_TGd, cu_seqlens, max_seqlen, window)


@_attention_packed.register_fake
def _(q_THd, k_TGd, v_TGd, cu_seqlens, max_seqlen, window, is_invariant):
    wide = torch.promote_types(q_THd.dtype, torch.float32)
    return torch.empty_like(q_THd), q_THd.new_empty(q_THd.shape[1], q_THd.shape[0], dtype=wide)


@torch.library.custom_op("moetrain::attention_packed_backward", mutates_args=())
def _attention_packed_backward(
    do_THd: torch.Tensor,
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGd: torch.Tensor,
    o_THd: torch.Tensor,
    lse_HT: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    window: int | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v."""
    if not q_THd.is_cuda:
        documents = _documents(cu_seqlens, q_THd.shape[0], max_seqlen)
        return _backward_formula(do_THd, q_THd, k_TGd, v_TGd, o_THd, lse_HT, documents, window)
    saved = (q_THd, k_TGd, v_TGd, o_THd, lse_HT, cu_seqlens)
    return cudnn_attention.backward(do_THd, *saved, max_seqlen, window, deterministic)


@_attention_packed_backward.register_fake
def _(do_THd, q_THd, k_TGd, v_TGd, *_):
    return tuple(torch.empty_like(x) for x in (q_THd, k_TGd, v_TGd))


def _save(ctx, inputs, output) -> None:
    *qkv, cu_seqlens, ctx.max_seqlen, ctx.window, _ = inputs
    ctx.save_for_backward(*qkv, *output, cu_seqlens)


def _differentiate(ctx, do_THd: torch.Tensor, _):
    how = ctx.max_seqlen, ctx.window, torch.are_deterministic_algorithms_enabled()
    grads = _attention_packed_backward(do_THd.contiguous(), *ctx.saved_tensors, *how)
    return *grads, None, None, None, None


_attention_packed.register_autograd(_differentiate, setup_context=_save)
worth_saving(
    "attention", torch.ops.moetrain.attention_packed.default, torch.ops.higher_order.flex_attention
)
