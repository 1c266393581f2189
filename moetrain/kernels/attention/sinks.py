"""Attention with sinks: a learned logit of each head joins the softmax's denominator.

A head can so attend to nothing (arXiv 2309.17453; GPT-OSS learns one logit a head). For a head's
logit ``s``, and ``o``, ``lse`` of attention without it (:mod:`moetrain.kernels.attention.attention`
has the rest of the notation)::

    lse' = log(exp(lse) + exp(s))        o' = o * exp(lse - lse') = o * sigmoid(lse - s)
    p[i, j] = exp(scale q[i] . k[j] - lse'[i])        delta[i] = do[i] . o'[i]
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
    _scale,
)
from moetrain.runtime.backend import refusal, worth_saving


def attention_with_sinks(
    q_BSHd: torch.Tensor,
    k_BSGd: torch.Tensor,
    v_BSGv: torch.Tensor,
    mask: AttentionMask,
    sinks_H: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend as :func:`~moetrain.kernels.attention.attention.attention` does, with sinks.

    ``mask`` was made with ``needs_lse``; ``sinks_H`` has any floating dtype and gets a gradient.
    """
    if mask.cu_seqlens is not None:
        q, k, v = (x.flatten(0, 1) for x in (q_BSHd, k_BSGd, v_BSGv))
        backend = "exact" if mask.backend == "exact" else "cudnn"
        how = {"window": mask.window, "scale": scale, "backend": backend}
        how |= {"cu_seqlens_k": mask.cu_seqlens_k}
        ends = mask.cu_seqlens
        longest = mask.max_seqlen
        out_THv = attention_packed_with_sinks(q, k, v, sinks_H, ends, longest, **how)
        return out_THv.unflatten(0, q_BSHd.shape[:2])
    q, k, v = (x.transpose(1, 2) for x in (q_BSHd, k_BSGd, v_BSGv))
    if mask.backend == "flex":
        is_eager = not torch.compiler.is_compiling()  # a compiled block has it in its own graph
        run = _compiled_flex() if q.is_cuda and is_eager else flex_attention
        grouped = q.shape[1] != k.shape[1]
        how = {"scale": scale, "enable_gqa": grouped, "return_aux": AuxRequest(lse=True)}
        made: Any = run(q, k, v, block_mask=mask.blocks, **how)
        o, lse = made[0], made[1].lse
        share = (lse - sinks_H.to(lse.dtype)[:, None]).sigmoid()
        return (o * share[..., None]).to(o.dtype).transpose(1, 2)
    assert mask.backend == "reference"  # of masks made with needs_lse
    assert mask.dense_BSS is not None
    return dense_attention_with_sinks(q, k, v, mask.dense_BSS, sinks_H, scale).transpose(1, 2)


def dense_attention_with_sinks(
    q_BHQd: torch.Tensor,
    k_BGLd: torch.Tensor,
    v_BGLv: torch.Tensor,
    visible: torch.Tensor,
    sinks_H: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend by plain products: ``o_BHQv``. ``visible`` [..., Q, L] is True for keys to see."""
    repeats = q_BHQd.shape[1] // k_BGLd.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k_BGLd, v_BGLv))
    wide = torch.promote_types(q_BHQd.dtype, torch.float32)
    scores = (q_BHQd @ k.transpose(-1, -2)).to(wide) * _scale(q_BHQd, scale)
    scores = scores.masked_fill(~visible, float("-inf"))
    sinks = sinks_H.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    return weights.to(v.dtype) @ v


def attention_packed_with_sinks(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    sinks_H: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    backend: Literal["auto", "cudnn", "exact", "reference"] = "auto",
    check: bool = False,
    cu_seqlens_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend as :func:`~moetrain.kernels.attention.attention.attention_packed`, with sinks.

    ``sinks_H`` has any floating dtype; the other arguments are those of that function.
    """
    both = (cu_seqlens, cu_seqlens_k)
    _check(q_THd, k_TGd, v_TGv, both, max_seqlen, window)
    scale = _scale(q_THd, scale)
    if sinks_H.shape != q_THd.shape[1:2]:
        takes = "[T, H, d] and [H]"
        raise refusal("attention_packed_with_sinks", takes, q=q_THd, sinks=sinks_H)
    if check or backend == "reference":
        documents = _documents(both, q_THd.shape[0], k_TGd.shape[0], max_seqlen)
        if backend == "reference":
            o_THv, lse_HT = _forward_formula(q_THd, k_TGd, v_TGv, documents, window, scale)
            return (o_THv * _share(lse_HT, sinks_H)).to(o_THv.dtype)
    needs_cudnn = q_THd.is_cuda or backend == "cudnn"
    if needs_cudnn and not torch.compiler.is_compiling():  # a compiled block was checked before
        cudnn_attention.require(q_THd.device, q_THd.dtype, q_THd.shape[2], v_TGv.shape[2])
    tensors = (x.contiguous() for x in (q_THd, k_TGd, v_TGv, sinks_H))
    how = (max_seqlen, window, scale, backend == "exact")
    return _attention_with_sinks(*tensors, *both, *how)[0]


def _share(lse_HT: torch.Tensor, sinks_H: torch.Tensor) -> torch.Tensor:
    """What is left of the softmax beside the sinks, [T, H, 1]."""
    return (lse_HT - sinks_H.to(lse_HT.dtype)[:, None]).sigmoid().T[..., None]


@torch.library.custom_op("moetrain::attention_with_sinks", mutates_args=())
def _attention_with_sinks(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    sinks_H: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen: int,
    window: int | None,
    scale: float,
    is_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``o'_THv`` and ``lse'_HT``."""
    if is_invariant and q_THd.is_cuda:
        how = {"window": window, "scale": scale, "sinks_H": sinks_H, "cu_seqlens_k": cu_seqlens_k}
        return batch_invariant.forward(q_THd, k_TGd, v_TGv, cu_seqlens, **how)
    how = (max_seqlen, window, scale, is_invariant)
    o_THv, lse_HT = _attention_packed(q_THd, k_TGd, v_TGv, cu_seqlens, cu_seqlens_k, *how)
    lse_HT, before_HT = torch.logaddexp(lse_HT, sinks_H.to(lse_HT.dtype)[:, None]), lse_HT
    return o_THv.mul_(_share(before_HT, sinks_H)), lse_HT  # in fp32, rounded in place


@_attention_with_sinks.register_fake
def _(q_THd, k_TGd, v_TGv, *_):
    wide = torch.promote_types(q_THd.dtype, torch.float32)
    tokens, heads, _ = q_THd.shape
    width = v_TGv.shape[2]
    o_THv = q_THd.new_empty(tokens, heads, width)
    return o_THv, q_THd.new_empty(heads, tokens, dtype=wide)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.max_seqlen, ctx.window, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, do_THv: torch.Tensor, _):
    q_THd, k_TGd, v_TGv, sinks_H, *ends, o_THv, lse_HT = ctx.saved_tensors
    saved = (do_THv.contiguous(), q_THd, k_TGd, v_TGv, o_THv, lse_HT, *ends)
    how = ctx.max_seqlen, ctx.window, ctx.scale, torch.are_deterministic_algorithms_enabled()
    grads = _attention_packed_backward(*saved, *how)
    delta_HT = (do_THv.to(lse_HT.dtype) * o_THv.to(lse_HT.dtype)).sum(-1).T
    p_HT = (sinks_H.to(lse_HT.dtype)[:, None] - lse_HT).exp()
    d_sinks_H = -(p_HT * delta_HT).sum(1).to(sinks_H.dtype)
    return *grads, d_sinks_H, *[None] * 6


_attention_with_sinks.register_autograd(_differentiate, setup_context=_save)
worth_saving("attention", torch.ops.moetrain.attention_with_sinks.default)
