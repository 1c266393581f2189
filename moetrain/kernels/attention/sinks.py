"""Attention with sinks: a learned logit of each head joins the softmax's denominator.

A head can so attend to nothing (arXiv 2309.17453; GPT-OSS learns one logit a head). For a head's
logit ``s``, and ``o``, ``lse`` of attention without it (:mod:`moetrain.kernels.attention.attention`
has the rest of the notation)::

    lse' = log(exp(lse) + exp(s))        o' = o * exp(lse - lse') = o * sigmoid(lse - s)
    p[i, j] = exp(q[i] . k[j] / sqrt(d) - lse'[i])        delta[i] = do[i] . o'[i]
    ds = -sum over i of exp(s - lse'[i]) * delta[i]

The other gradients are those of attention as it is, given ``o'`` and ``lse'``: its backward needs
no change. :mod:`moetrain.kernels.attention.batch_invariant` takes sinks in its own softmax.

Worked example, one token, d = 1: q 0, v 3 and s 0 give scores [0, 0] with the sink, so p = 1/2,
``o' = 3/2`` and, for do = 1, ``ds = -1/2 * 3/2 = -3/4``.

Legend: as in :mod:`moetrain.kernels.attention.attention`; Q queries and L keys of dense attention.
"""

from typing import Any, Literal

import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from moetrain.kernels.attention import batch_invariant
from moetrain.kernels.attention import cudnn as cudnn_attention
from moetrain.kernels.attention.attention import (
    AttentionMask,
    _attention_packed,
    _attention_packed_backward,
    _check,
    _compiled_flex,
    _documents,
    _forward_formula,
)
from moetrain.kernels.backend import refusal, worth_saving


def attention_with_sinks(
    q_BSHd: torch.Tensor,
    k_BSGd: torch.Tensor,
    v_BSGd: torch.Tensor,
    mask: AttentionMask,
    sinks_H: torch.Tensor,
) -> torch.Tensor:
    """Attend as :func:`~moetrain.kernels.attention.attention.attention` does, with sinks.

    ``mask`` was made with ``needs_lse``; ``sinks_H`` has any floating dtype and gets a gradient.
    """
    if mask.cu_seqlens is not None:
        q, k, v = (x.flatten(0, 1) for x in (q_BSHd, k_BSGd, v_BSGd))
        backend = "exact" if mask.backend == "exact" else "cudnn"
        how = {"window": mask.window, "backend": backend}
        ends, longest = mask.cu_seqlens, mask.max_seqlen
        return attention_packed_with_sinks(q, k, v, sinks_H, ends, longest, **how).view_as(q_BSHd)
    q, k, v = (x.transpose(1, 2) for x in (q_BSHd, k_BSGd, v_BSGd))
    if mask.backend == "flex":
        is_eager = not torch.compiler.is_compiling()  # a compiled block has it in its own graph
        run = _compiled_flex() if q.is_cuda and is_eager else flex_attention
        grouped = q.shape[1] != k.shape[1]
        aux = AuxRequest(lse=True)
        made: Any = run(q, k, v, block_mask=mask.blocks, enable_gqa=grouped, return_aux=aux)
        o, lse = made[0], made[1].lse
        share = (lse - sinks_H.to(lse.dtype)[:, None]).sigmoid()
        return (o * share[..., None]).to(o.dtype).transpose(1, 2)
    assert mask.backend == "reference"  # of masks made with needs_lse
    assert mask.dense_BSS is not None
    return dense_attention_with_sinks(q, k, v, mask.dense_BSS, sinks_H).transpose(1, 2)


def dense_attention_with_sinks(
    q_BHQd: torch.Tensor,
    k_BGLd: torch.Tensor,
    v_BGLd: torch.Tensor,
    visible: torch.Tensor,
    sinks_H: torch.Tensor,
) -> torch.Tensor:
    """Attend by plain products: ``o_BHQd``. ``visible`` [..., Q, L] is True for keys to see."""
    repeats = q_BHQd.shape[1] // k_BGLd.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k_BGLd, v_BGLd))
    wide = torch.promote_types(q_BHQd.dtype, torch.float32)
    scores = (q_BHQd @ k.transpose(-1, -2)).to(wide) * q_BHQd.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible, float("-inf"))
    sinks = sinks_H.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    return weights.to(v.dtype) @ v


def attention_packed_with_sinks(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGd: torch.Tensor,
    sinks_H: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    window: int | None = None,
    backend: Literal["auto", "cudnn", "exact", "reference"] = "auto",
    check: bool = False,
) -> torch.Tensor:
    """Attend as :func:`~moetrain.kernels.attention.attention.attention_packed`, with sinks.

    ``sinks_H`` has any floating dtype; the other arguments are those of that function.
    """
    _check(q_THd, k_TGd, v_TGd, cu_seqlens, max_seqlen, window)
    if sinks_H.shape != q_THd.shape[1:2]:
        takes = "[T, H, d] and [H]"
        raise refusal("attention_packed_with_sinks", takes, q=q_THd, sinks=sinks_H)
    if check or backend == "reference":
        documents = _documents(cu_seqlens, q_THd.shape[0], max_seqlen)
        if backend == "reference":
            scale = q_THd.shape[2] ** -0.5
            o_THd, lse_HT = _forward_formula(q_THd, k_TGd, v_TGd, documents, window, scale)
            return (o_THd * _share(lse_HT, sinks_H)).to(o_THd.dtype)
    needs_cudnn = q_THd.is_cuda or backend == "cudnn"
    if needs_cudnn and not torch.compiler.is_compiling():  # a compiled block was checked before
        cudnn_attention.require(q_THd.device, q_THd.dtype, q_THd.shape[2])
    tensors = (x.contiguous() for x in (q_THd, k_TGd, v_TGd, sinks_H))
    how = (max_seqlen, window, backend == "exact")
    return _attention_with_sinks(*tensors, cu_seqlens, *how)[0]


def _share(lse_HT: torch.Tensor, sinks_H: torch.Tensor) -> torch.Tensor:
    """What is left of the softmax beside the sinks, [T, H, 1]."""
    return (lse_HT - sinks_H.to(lse_HT.dtype)[:, None]).sigmoid().T[..., None]


@torch.library.custom_op("moetrain::attention_with_sinks", mutates_args=())
def _attention_with_sinks(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGd: torch.Tensor,
    sinks_H: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    window: int | None,
    is_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``o'_THd`` and ``lse'_HT``."""
    if is_invariant and q_THd.is_cuda:
        return batch_invariant.forward(q_THd, k_TGd, v_TGd, cu_seqlens, window, sinks_H=sinks_H)
    how = (max_seqlen, window, q_THd.shape[2] ** -0.5, is_invariant)
    o_THd, lse_HT = _attention_packed(q_THd, k_TGd, v_TGd, cu_seqlens, *how)
    lse_HT, before_HT = torch.logaddexp(lse_HT, sinks_H.to(lse_HT.dtype)[:, None]), lse_HT
    return o_THd.mul_(_share(before_HT, sinks_H)), lse_HT  # in fp32, rounded in place


@_attention_with_sinks.register_fake
def _(q_THd, k_TGd, v_TGd, sinks_H, cu_seqlens, max_seqlen, window, is_invariant):
    wide = torch.promote_types(q_THd.dtype, torch.float32)
    return torch.empty_like(q_THd), q_THd.new_empty(q_THd.shape[1], q_THd.shape[0], dtype=wide)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.max_seqlen, ctx.window, _ = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, do_THd: torch.Tensor, _):
    q_THd, k_TGd, v_TGd, sinks_H, cu_seqlens, o_THd, lse_HT = ctx.saved_tensors
    saved = (do_THd.contiguous(), q_THd, k_TGd, v_TGd, o_THd, lse_HT, cu_seqlens)
    scale, is_deterministic = q_THd.shape[2] ** -0.5, torch.are_deterministic_algorithms_enabled()
    how = ctx.max_seqlen, ctx.window, scale, is_deterministic
    grads = _attention_packed_backward(*saved, *how)
    delta_HT = (do_THd.to(lse_HT.dtype) * o_THd.to(lse_HT.dtype)).sum(-1).T
    p_HT = (sinks_H.to(lse_HT.dtype)[:, None] - lse_HT).exp()
    d_sinks_H = -(p_HT * delta_HT).sum(1).to(sinks_H.dtype)
    return *grads, d_sinks_H, None, None, None, None


_attention_with_sinks.register_autograd(_differentiate, setup_context=_save)
worth_saving("attention", torch.ops.moetrain.attention_with_sinks.default)
