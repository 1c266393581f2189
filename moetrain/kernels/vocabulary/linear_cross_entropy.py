"""Linear cross-entropy: losses from hidden states and the vocabulary matrix without logits [T, V].

    logits = cap(h @ w^T) / temperature    lse = logsumexp(logits)    loss = lse - logits[target]
    p = exp(logits - lse)               mean = sum(p * logits)       entropy = lse - mean

    d loss / d logits = p - onehot      d lse / d logits = p
    d entropy / d logits = -p * (logits - mean)

``cap`` is the identity, or ``z -> softcap * tanh(z / softcap)``, whose derivative is
``1 - (cap(z) / softcap)^2``.

Worked example, V=2, temperature 1: logits [0, ln 3] and target 1 give lse = ln 4, p = [1/4, 3/4],
loss = ln(4/3), and the gradient of the loss in the logits is [1/4, -1/4].

:func:`linear_cross_entropy` gets the tokens' upstream gradients only in the backward, and
multiplies h by w again there. It takes four matrix products. :func:`linear_cross_entropy_sum`
returns one weighted sum, so its forward already makes the gradients of h and w. It takes three.
Both walk the tokens in chunks; the gradient of w is rounded once a chunk. With ``fp8_grads`` the
sum's two products of gradients are in fp8 (:mod:`moetrain.kernels.vocabulary.fp8_gradients`), and
the loss is the same.

Left out on purpose: gradients of the tokens' weights, and label smoothing.

Legend: T tokens, D model width, V vocabulary, C tokens of a chunk, N vocabulary tiles.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moetrain.kernels.quant.e4m3 import MULTIPLE
from moetrain.kernels.vocabulary.chunk import (
    CHUNK_ELEMENTS,
    ChunkStats,
    LossGrads,
    loss_gradients,
    soft_capped,
    token_stats,
)
from moetrain.kernels.vocabulary.fp8_gradients import (
    fp8_gradients,
    fp8_products_reference,
    gradient_step,
)
from moetrain.runtime.backend import Backend, gradients, refusal, tl, triton, use_fast
from moetrain.runtime.typed import OpContext

_SCALE_BLOCK = 4096


class TokenLosses(NamedTuple):
    """Differentiable results of each token in fp32; zero where the target is the ignored index."""

    loss_T: torch.Tensor
    """The target's negative log-probability in nats."""
    lse_T: torch.Tensor
    """logsumexp of the logits, for a z-loss."""
    entropy_T: torch.Tensor
    """Entropy of the prediction in nats."""


class SummedLoss(NamedTuple):
    """A differentiable sum, and the results of each token without gradients."""

    total: torch.Tensor
    """The sum over tokens of weight * loss, an fp32 scalar; differentiable."""
    loss_T: torch.Tensor
    """The fields of :class:`TokenLosses`, from here on."""
    lse_T: torch.Tensor
    entropy_T: torch.Tensor


def linear_cross_entropy(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
    chunk_elements: int = CHUNK_ELEMENTS,
    backend: Backend = "auto",
) -> TokenLosses:
    """Return the losses of ``targets_T`` (int64) under ``softmax(h @ w^T / temperature)``.

    Args:
        h_TD, w_VD: both bf16 or both fp32, differentiable.
        targets_T: in ``[0, V)``, or ``ignore_index``; not checked.
        softcap: caps the products, before the temperature; 0: they are not capped.
        chunk_elements: about so many logits exist at once; plain torch makes all at once.

    Raises ValueError: shapes or dtypes do not fit, or temperature or softcap is out of range.
    """
    _check(h_TD, w_VD, targets_T, temperature, softcap)
    valid_T = targets_T != ignore_index
    if use_fast(backend, h_TD):
        loss_T, lse_T, mean_T = token_losses_op(
            h_TD, w_VD, targets_T, 1 / temperature, chunk_elements, softcap
        )
        entropy_T = lse_T - mean_T
    else:
        wide = torch.promote_types(h_TD.dtype, torch.float32)
        logits_TV = soft_capped((h_TD @ w_VD.T).to(wide), softcap)
        logits_TV = logits_TV * (1 / temperature)  # a product, as in the kernels
        lse_T = logits_TV.logsumexp(-1)
        log_probs_TV = logits_TV - lse_T[:, None]
        target_T = torch.where(valid_T, targets_T, 0)
        loss_T = -log_probs_TV.gather(1, target_T[:, None])[:, 0]
        entropy_T = -(log_probs_TV.exp() * log_probs_TV).sum(-1)
    return TokenLosses(
        loss_T=torch.where(valid_T, loss_T, 0),
        lse_T=torch.where(valid_T, lse_T, 0),
        entropy_T=torch.where(valid_T, entropy_T, 0),
    )


def linear_cross_entropy_sum(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    weights_T: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
    chunk_elements: int = CHUNK_ELEMENTS,
    backend: Backend = "auto",
    fp8_grads: bool = False,
) -> SummedLoss:
    """Return ``sum(weights * loss)`` over tokens, cheaper than :func:`linear_cross_entropy`.

    Args:
        weights_T: fp32, no gradient; None: ones. A factor known beforehand (1 / number of tokens)
            belongs here: applied to the result it would round the gradients a second time.
        fp8_grads: multiply gradients in fp8; D is then a multiple of 16.

    The other arguments are those of :func:`linear_cross_entropy`.
    """
    if weights_T is not None and weights_T.shape != targets_T.shape:
        takes = "one weight a token"
        raise refusal("linear_cross_entropy_sum", takes, targets=targets_T, weights=weights_T)
    if fp8_grads and h_TD.shape[1] % MULTIPLE:
        takes = f"a multiple of {MULTIPLE} as the width, for gradients in 8 bits"
        raise refusal("linear_cross_entropy_sum", takes, h=h_TD)
    has_grad = torch.is_grad_enabled() and (h_TD.requires_grad or w_VD.requires_grad)
    is_fast = use_fast(backend, h_TD)
    if not has_grad or not (is_fast or fp8_grads):
        losses = linear_cross_entropy(
            h_TD,
            w_VD,
            targets_T,
            ignore_index=ignore_index,
            temperature=temperature,
            softcap=softcap,
            chunk_elements=chunk_elements,
            backend=backend,
        )
        weighted_T = losses.loss_T if weights_T is None else weights_T.detach() * losses.loss_T
        return SummedLoss(weighted_T.sum(), *(x.detach() for x in losses))
    _check(h_TD, w_VD, targets_T, temperature, softcap)
    if weights_T is None:
        weights_T = torch.ones_like(targets_T, dtype=torch.float32)
    valid_T = targets_T != ignore_index
    weights_T = torch.where(valid_T, weights_T.detach().float(), 0)
    scale = 1 / temperature
    if is_fast:
        total, loss_T, lse_T, mean_T, _, _ = summed_loss_op(
            h_TD,
            w_VD,
            targets_T,
            weights_T,
            scale,
            chunk_elements,
            softcap,
            fp8_grads,
            w_VD.requires_grad,
        )
    else:
        total, loss_T, lse_T, mean_T = _Fp8Sum.apply(
            h_TD, w_VD, targets_T, weights_T, scale, softcap
        )
    return SummedLoss(
        total,
        loss_T=torch.where(valid_T, loss_T, 0),
        lse_T=torch.where(valid_T, lse_T, 0),
        entropy_T=torch.where(valid_T, lse_T - mean_T, 0),
    )


class _Fp8Sum(torch.autograd.Function):
    """The reference of the sum with gradients in fp8; like the op, its forward makes them."""

    @staticmethod
    def forward(
        ctx: OpContext,
        h_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        weights_T: torch.Tensor,
        scale: float,
        softcap: float,
    ) -> tuple[torch.Tensor, ...]:
        stats, logits_TV = token_stats_reference(h_TD, w_VD, targets_T, scale, softcap)
        d_logits_TV = _logit_gradients_reference(
            stats, logits_TV, targets_T, LossGrads(weights_T), scale, softcap
        )
        step = gradient_step(weights_T, scale)
        ctx.save_for_backward(*fp8_products_reference(h_TD, w_VD, targets_T, d_logits_TV, step))
        loss_T = stats.lse_C - stats.target_logit_C
        ctx.mark_non_differentiable(loss_T, stats.lse_C, stats.mean_C)
        return (weights_T * loss_T).sum(), loss_T, stats.lse_C, stats.mean_C

    @staticmethod
    def backward(ctx: OpContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_total, *_ = grads
        d_h_TD, d_w_VD = ((x * grad_total).to(x.dtype) for x in ctx.saved_tensors)
        return d_h_TD, d_w_VD, None, None, None, None


def token_stats_reference(
    h_TD: torch.Tensor, w_VD: torch.Tensor, targets_T: torch.Tensor, scale: float, softcap: float
) -> tuple[ChunkStats, torch.Tensor]:
    """Return ``chunk.token_stats`` in plain torch, and the logits, in fp32."""
    wide = torch.promote_types(h_TD.dtype, torch.float32)
    logits_TV = soft_capped((h_TD @ w_VD.T).to(wide), softcap) * scale
    lse_T = logits_TV.logsumexp(-1)
    mean_T = ((logits_TV - lse_T[:, None]).exp() * logits_TV).sum(-1)
    is_here_T = (targets_T >= 0) & (targets_T < w_VD.shape[0])
    target_T = logits_TV.gather(1, torch.where(is_here_T, targets_T, 0)[:, None])[:, 0]
    return ChunkStats(lse_T, torch.where(is_here_T, target_T, 0), mean_T), logits_TV


def loss_gradients_reference(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    grads: LossGrads,
    scale: float,
    join: Callable[[ChunkStats], None] = lambda stats: None,
    *,
    is_trained: bool = True,
    softcap: float = 0.0,
) -> tuple[ChunkStats, torch.Tensor, torch.Tensor | None]:
    """Return ``chunk.loss_gradients`` in plain torch; the gradient of an untrained w is None."""
    stats, logits_TV = token_stats_reference(h_TD, w_VD, targets_T, scale, softcap)
    join(stats)
    d_logits_TV = _logit_gradients_reference(stats, logits_TV, targets_T, grads, scale, softcap)
    d_logits_TV = d_logits_TV.to(h_TD.dtype)
    return stats, d_logits_TV @ w_VD, d_logits_TV.T @ h_TD if is_trained else None


def _logit_gradients_reference(
    stats: ChunkStats,
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    grads: LossGrads,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Return the unrounded gradient in ``h @ w^T`` for the upstream gradients ``grads``."""
    loss_T1, lse_T1, mean_T1 = (0 if g is None else g[:, None] for g in grads)
    p_TV = (logits_TV - stats.lse_C[:, None]).exp()
    slope_TV = 1 + logits_TV - stats.mean_C[:, None]
    is_target_TV = torch.arange(logits_TV.shape[1], device=p_TV.device) == targets_T[:, None]
    d_logits_TV = p_TV * (loss_T1 + lse_T1 + slope_TV * mean_T1)
    d_logits_TV = d_logits_TV - torch.where(is_target_TV, loss_T1, 0)
    if softcap:
        d_logits_TV = d_logits_TV * (1 - (logits_TV / (scale * softcap)).square())
    return scale * d_logits_TV


def _check(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float,
    softcap: float,
) -> None:
    fits = h_TD.dim() == w_VD.dim() == 2 and h_TD.shape[1] == w_VD.shape[1]
    if not fits or targets_T.shape != h_TD.shape[:1] or targets_T.dtype != torch.int64:
        takes = "[T, D], [V, D] and int64 [T]"
        raise refusal("linear_cross_entropy", takes, h=h_TD, w=w_VD, targets=targets_T)
    if temperature <= 0:
        raise refusal("linear_cross_entropy", "more than 0", temperature=temperature)
    if softcap < 0:
        raise refusal("linear_cross_entropy", "0 or more", softcap=softcap)


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, out_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size).to(tl.float32)
    tl.store(out_ptr + i, x * tl.load(factor_ptr), mask=i < size)


@torch.library.custom_op("moetrain::linear_cross_entropy", mutates_args=())
def token_losses_op(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    scale: float,
    chunk_elements: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss, lse, mean) of each token."""
    stats = token_stats(h_TD, w_VD, targets_T, scale, chunk_elements, softcap)
    return stats.lse_C - stats.target_logit_C, stats.lse_C, stats.mean_C


@torch.library.custom_op("moetrain::linear_cross_entropy_backward", mutates_args=())
def token_losses_backward_op(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    grad_loss_T: torch.Tensor,
    grad_lse_T: torch.Tensor,
    grad_mean_T: torch.Tensor,
    scale: float,
    chunk_elements: int,
    softcap: float,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of h and w."""
    grads = LossGrads(grad_loss_T.contiguous(), grad_lse_T.contiguous(), grad_mean_T.contiguous())
    _, grad_h_TD, grad_w_VD = loss_gradients(
        h_TD,
        w_VD,
        targets_T,
        grads,
        scale,
        chunk_elements,
        is_trained=is_trained,
        softcap=softcap,
    )
    return grad_h_TD, grad_w_VD


@torch.library.custom_op("moetrain::linear_cross_entropy_sum", mutates_args=())
def summed_loss_op(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    weights_T: torch.Tensor,
    scale: float,
    chunk_elements: int,
    softcap: float,
    narrow_grads: bool,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (total, loss, lse, mean) and the gradients of total in h and w."""
    weights_T = weights_T.contiguous()
    if narrow_grads:
        stats, grad_h_TD, grad_w_VD = fp8_gradients(
            h_TD,
            w_VD,
            targets_T,
            weights_T,
            scale,
            chunk_elements // 2,
            is_trained=is_trained,
            softcap=softcap,
        )
    else:
        stats, grad_h_TD, grad_w_VD = loss_gradients(
            h_TD,
            w_VD,
            targets_T,
            LossGrads(weights_T),
            scale,
            chunk_elements,
            is_trained=is_trained,
            softcap=softcap,
        )
    loss_T = stats.lse_C - stats.target_logit_C
    total = (weights_T * loss_T).sum()
    return total, loss_T, stats.lse_C, stats.mean_C, grad_h_TD, grad_w_VD


@torch.library.custom_op("moetrain::scale", mutates_args=())
def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return ``x * factor`` for an fp32 scalar, which torch would first round to x's dtype."""
    out = torch.empty_like(x)
    if size := x.numel():
        _scale_kernel[(triton.cdiv(size, _SCALE_BLOCK),)](x, factor, out, size, BLOCK=_SCALE_BLOCK)
    return out


@scaled.register_fake
def _(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@token_losses_op.register_fake
def _(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    scale: float,
    chunk_elements: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    loss_T = h_TD.new_empty(h_TD.shape[0], dtype=torch.float32)
    return loss_T, torch.empty_like(loss_T), torch.empty_like(loss_T)


@token_losses_backward_op.register_fake
def _(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    grad_loss_T: torch.Tensor,
    grad_lse_T: torch.Tensor,
    grad_mean_T: torch.Tensor,
    scale: float,
    chunk_elements: int,
    softcap: float,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(h_TD), torch.empty_like(w_VD) if is_trained else w_VD.new_empty(0)


@summed_loss_op.register_fake
def _(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    weights_T: torch.Tensor,
    scale: float,
    chunk_elements: int,
    softcap: float,
    narrow_grads: bool,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    loss_T, lse_T, mean_T = (torch.empty_like(weights_T) for _ in range(3))
    grad_w_VD = torch.empty_like(w_VD) if is_trained else w_VD.new_empty(0)
    return weights_T.new_empty(()), loss_T, lse_T, mean_T, torch.empty_like(h_TD), grad_w_VD


def _save_tokens(ctx: OpContext, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    h_TD, w_VD, targets_T, ctx.scale, ctx.chunk_elements, ctx.softcap = inputs
    ctx.save_for_backward(h_TD, w_VD, targets_T)


def _tokens_backward(ctx: OpContext, *grads: torch.Tensor) -> tuple[object, ...]:
    h_TD, w_VD, targets_T = ctx.saved_tensors
    grad_loss_T, grad_lse_T, grad_mean_T = grads
    is_trained = ctx.needs_input_grad[1]
    grad_h_TD, grad_w_VD = token_losses_backward_op(
        h_TD,
        w_VD,
        targets_T,
        grad_loss_T,
        grad_lse_T,
        grad_mean_T,
        ctx.scale,
        ctx.chunk_elements,
        ctx.softcap,
        is_trained,
    )
    return gradients(token_losses_op, h_TD=grad_h_TD, w_VD=grad_w_VD if is_trained else None)


def _save_sum(ctx: OpContext, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, loss_T, lse_T, mean_T, grad_h_TD, grad_w_VD = output
    ctx.mark_non_differentiable(loss_T, lse_T, mean_T, grad_h_TD, grad_w_VD)
    ctx.set_materialize_grads(False)  # no zeros of w's size for outputs that have no gradient
    ctx.save_for_backward(grad_h_TD, grad_w_VD)


def _sum_backward(
    ctx: OpContext, grad_total: torch.Tensor | None, *_: object
) -> tuple[object, ...]:
    if grad_total is None:
        return gradients(summed_loss_op)
    grad_h_TD, grad_w_VD = ctx.saved_tensors
    d_w_VD = scaled(grad_w_VD, grad_total) if ctx.needs_input_grad[1] else None
    return gradients(summed_loss_op, h_TD=scaled(grad_h_TD, grad_total), w_VD=d_w_VD)


token_losses_op.register_autograd(_tokens_backward, setup_context=_save_tokens)
summed_loss_op.register_autograd(_sum_backward, setup_context=_save_sum)
