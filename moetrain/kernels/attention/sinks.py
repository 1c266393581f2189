"""Attention with sinks: a learned logit of each head joins the softmax's denominator.

With it a head can attend to nothing (arXiv 2309.17453; GPT-OSS learns one logit a head). For a
head's logit ``s``, and ``o``, ``lse`` of attention without it
(:mod:`moetrain.kernels.attention.attention` has the rest of the notation)::

    lse' = log(exp(lse) + exp(s))        o' = o * exp(lse - lse') = o * sigmoid(lse - s)
    p[i, j] = exp(scale q[i] . k[j] - lse'[i])        delta[i] = do[i] . o'[i]
    ds = -sum over i of exp(s - lse'[i]) * delta[i]

The other gradients are those of plain attention, given ``o'`` and ``lse'``: its backward is used as
it is. :mod:`moetrain.kernels.attention.batch_invariant` takes sinks in its own softmax.

Worked example, one token, d = 1: q 0, v 3 and s 0 give scores [0, 0] with the sink, so p = 1/2,
``o' = 3/2`` and, for do = 1, ``ds = -1/2 * 3/2 = -3/4``.

Legend: as in :mod:`moetrain.kernels.attention.attention`; Q queries and L keys of dense attention.
"""

from typing import Any, Literal

import torch

from moetrain.kernels.attention import batch_invariant
from moetrain.kernels.attention.attention import (
    AttentionMask,
    attend_in_blocks,
    attention_packed_backward_op,
    attention_packed_op,
    check_packed,
    fake_packed,
    packed_forward_reference,
    read_documents,
    require_cudnn,
    score_scale,
)
from moetrain.runtime.backend import gradients, refusal, worth_saving
from moetrain.runtime.typed import OpContext


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
        out_THv = attention_packed_with_sinks(
            q_BSHd.flatten(0, 1),
            k_BSGd.flatten(0, 1),
            v_BSGv.flatten(0, 1),
            sinks_H,
            mask.cu_seqlens,
            mask.max_seqlen,
            window=mask.window,
            scale=scale,
            backend="exact" if mask.backend == "exact" else "cudnn",
            cu_seqlens_k=mask.cu_seqlens_k,
        )
        return out_THv.unflatten(0, q_BSHd.shape[:2])
    q, k, v = (x.transpose(1, 2) for x in (q_BSHd, k_BSGd, v_BSGv))
    if mask.backend == "flex":
        assert mask.blocks is not None  # AttentionMask.of always makes them for flex
        o, lse = attend_in_blocks(q, k, v, mask.blocks, scale, needs_lse=True)
        assert lse is not None
        share = (lse - sinks_H.to(lse.dtype)[:, None]).sigmoid()
        return (o * share[..., None]).to(o.dtype).transpose(1, 2)
    assert mask.backend == "reference"  # needs_lse leaves no other backend
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
    """Return ``o_BHQv`` by plain products. ``visible`` [..., Q, L] is True for visible keys."""
    repeats = q_BHQd.shape[1] // k_BGLd.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k_BGLd, v_BGLv))
    wide = torch.promote_types(q_BHQd.dtype, torch.float32)
    scores = (q_BHQd @ k.transpose(-1, -2)).to(wide) * score_scale(q_BHQd, scale)
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
    check_packed(q_THd, k_TGd, v_TGv, cu_seqlens, cu_seqlens_k, max_seqlen, window)
    scale = score_scale(q_THd, scale)
    if sinks_H.shape != q_THd.shape[1:2]:
        takes = "[T, H, d] and [H]"
        raise refusal("attention_packed_with_sinks", takes, q=q_THd, sinks=sinks_H)
    if check or backend == "reference":
        sizes = (q_THd.shape[0], k_TGd.shape[0], max_seqlen)
        documents = read_documents(cu_seqlens, cu_seqlens_k, *sizes)
        if backend == "reference":
            o_THv, lse_HT = packed_forward_reference(q_THd, k_TGd, v_TGv, documents, window, scale)
            return (o_THv * _share(lse_HT, sinks_H)).to(o_THv.dtype)
    if q_THd.is_cuda or backend == "cudnn":
        require_cudnn(q_THd, v_TGv)
    return attention_with_sinks_op(
        q_THd.contiguous(),
        k_TGd.contiguous(),
        v_TGv.contiguous(),
        sinks_H.contiguous(),
        cu_seqlens,
        cu_seqlens_k,
        max_seqlen,
        window,
        scale,
        backend == "exact",
    )[0]


def _share(lse_HT: torch.Tensor, sinks_H: torch.Tensor) -> torch.Tensor:
    """Return the share of the softmax that the sinks leave to the keys, [T, H, 1]."""
    return (lse_HT - sinks_H.to(lse_HT.dtype)[:, None]).sigmoid().T[..., None]


@torch.library.custom_op("moetrain::attention_with_sinks", mutates_args=())
def attention_with_sinks_op(
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
    """Return ``o'_THv`` and ``lse'_HT``."""
    if is_invariant and q_THd.is_cuda:
        return batch_invariant.forward(
            q_THd,
            k_TGd,
            v_TGv,
            cu_seqlens,
            window,
            scale,
            sinks_H=sinks_H,
            cu_seqlens_k=cu_seqlens_k,
        )
    o_THv, plain_lse_HT = attention_packed_op(
        q_THd,
        k_TGd,
        v_TGv,
        cu_seqlens,
        cu_seqlens_k,
        max_seqlen,
        window,
        scale,
        is_invariant,
    )
    lse_HT = torch.logaddexp(plain_lse_HT, sinks_H.to(plain_lse_HT.dtype)[:, None])
    return o_THv.mul_(_share(plain_lse_HT, sinks_H)), lse_HT  # in fp32, rounded in place


@attention_with_sinks_op.register_fake
def _(
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
    return fake_packed(
        q_THd,
        k_TGd,
        v_TGv,
        cu_seqlens,
        cu_seqlens_k,
        max_seqlen,
        window,
        scale,
        is_invariant,
    )


def _save(
    ctx: OpContext, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    q_THd, k_TGd, v_TGv, sinks_H, cu_seqlens, cu_seqlens_k, max_seqlen, window, scale, _ = inputs
    ctx.max_seqlen, ctx.window, ctx.scale = max_seqlen, window, scale
    ctx.save_for_backward(q_THd, k_TGd, v_TGv, sinks_H, cu_seqlens, cu_seqlens_k, *output)


def _differentiate(ctx: OpContext, do_THv: torch.Tensor, _: torch.Tensor) -> tuple[object, ...]:
    q_THd, k_TGd, v_TGv, sinks_H, cu_seqlens, cu_seqlens_k, o_THv, lse_HT = ctx.saved_tensors
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
    # The sink's own gradient: it takes its share of delta from every token.
    delta_HT = (do_THv.to(lse_HT.dtype) * o_THv.to(lse_HT.dtype)).sum(-1).T
    p_HT = (sinks_H.to(lse_HT.dtype)[:, None] - lse_HT).exp()
    d_sinks_H = -(p_HT * delta_HT).sum(1).to(sinks_H.dtype)
    return gradients(
        attention_with_sinks_op, q_THd=dq_THd, k_TGd=dk_TGd, v_TGv=dv_TGv, sinks_H=d_sinks_H
    )


attention_with_sinks_op.register_autograd(_differentiate, setup_context=_save)
worth_saving("attention", torch.ops.moetrain.attention_with_sinks.default)
