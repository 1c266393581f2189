"""Linear cross-entropy: losses from hidden states and the vocabulary matrix without logits [T, V].

    logits = cap(h @ w^T) / temperature    lse = logsumexp(logits)    loss = lse - logits[target]
    p = exp(logits - lse)               mean = sum(p * logits)       entropy = lse - mean

    d loss / d logits = p - onehot      d lse / d logits = p
    d entropy / d logits = -p * (logits - mean)

``cap`` leaves numbers as they are, or is ``z -> softcap * tanh(z / softcap)``, whose derivative is
``1 - (cap(z) / softcap)^2``.

Worked example, V=2, temperature 1: logits [0, ln 3] and target 1 give lse = ln 4, p = [1/4, 3/4],
loss = ln(4/3), and the gradient of the loss in the logits is [1/4, -1/4].

:func:`linear_cross_entropy` learns a token's upstream gradients in the backward, which therefore
multiplies h by w again: four matrix products. :func:`linear_cross_entropy_sum` gives one weighted
sum, so the forward makes the gradients of h and w: three. Both walk the tokens in chunks; the
gradient of w is rounded once a chunk. Left out: a gradient of the weights, and label smoothing.
With ``narrow_grads`` the sum's two products of gradients are in 8 bits
(:mod:`moetrain.kernels.vocabulary.narrow_gradients`), and the loss is what it is without.

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
from moetrain.kernels.vocabulary.narrow_gradients import (
    narrow_gradients,
    narrow_products,
    step_of,
)
from moetrain.runtime.backend import (
    Backend,
    refusal,
    tl,
    triton,
    use_fast,
)

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
    """A differentiable sum, and the results of each token, which have no gradient."""

    total: torch.Tensor
    """The sum over tokens of weight * loss, an fp32 scalar; differentiable."""
    loss_T: torch.Tensor
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
    """Compute the losses of ``targets_T`` (int64) under ``softmax(h @ w^T / temperature)``.

    Targets are in ``[0, V)`` or the ignored index; others are not noticed.

    Args:
        h_TD: bf16 or fp32, as ``w_VD``; both differentiable.
        softcap: caps the products, before the temperature; 0: they are not capped.
        chunk_elements: the logits held at once.
    """
    _check(h_TD, w_VD, targets_T, temperature, softcap)
    valid_T = targets_T != ignore_index
    if use_fast(backend, h_TD):
        how = (1 / temperature, chunk_elements, softcap)
        loss_T, lse_T, mean_T = _token_losses(h_TD, w_VD, targets_T, *how)
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
    return TokenLosses(*(torch.where(valid_T, x, 0) for x in (loss_T, lse_T, entropy_T)))


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
    narrow_grads: bool = False,
) -> SummedLoss:
    """Compute ``sum(weights * loss)`` over tokens, cheaper than :func:`linear_cross_entropy`.

    Args:
        weights_T: fp32, no gradient; None: ones. A factor known beforehand (1 / number of tokens)
            belongs here: one applied to the result rounds the gradients a second time.
        narrow_grads: multiply gradients in 8 bits; D is a multiple of 16 then.

    The other arguments are those of :func:`linear_cross_entropy`.
    """
    if weights_T is not None and weights_T.shape != targets_T.shape:
        given = {"targets": targets_T, "weights": weights_T}
        raise refusal("linear_cross_entropy_sum", "one weight a token", **given)
    if narrow_grads and h_TD.shape[1] % MULTIPLE:
        takes = f"a multiple of {MULTIPLE} as the width, for gradients in 8 bits"
        raise refusal("linear_cross_entropy_sum", takes, h=h_TD)
    has_grad = torch.is_grad_enabled() and (h_TD.requires_grad or w_VD.requires_grad)
    is_fast = use_fast(backend, h_TD)
    if not has_grad or not (is_fast or narrow_grads):
        how = {"ignore_index": ignore_index, "temperature": temperature, "softcap": softcap}
        how["backend"] = backend
        losses = linear_cross_entropy(h_TD, w_VD, targets_T, chunk_elements=chunk_elements, **how)
        weighted_T = losses.loss_T if weights_T is None else weights_T.detach() * losses.loss_T
        return SummedLoss(weighted_T.sum(), *(x.detach() for x in losses))
    _check(h_TD, w_VD, targets_T, temperature, softcap)
    if weights_T is None:
        weights_T = torch.ones_like(targets_T, dtype=torch.float32)
    valid_T = targets_T != ignore_index
    weights_T = torch.where(valid_T, weights_T.detach().float(), 0)
    given = (h_TD, w_VD, targets_T, weights_T, 1 / temperature)
    if is_fast:
        how = (chunk_elements, softcap, narrow_grads, w_VD.requires_grad)
        total, loss_T, lse_T, mean_T, _, _ = _summed_loss(*given, *how)
    else:
        total, loss_T, lse_T, mean_T = _NarrowSum.apply(*given, softcap)
    tokens = (torch.where(valid_T, x, 0) for x in (loss_T, lse_T, lse_T - mean_T))
    return SummedLoss(total, *tokens)


class _NarrowSum(torch.autograd.Function):
    """The reference of the sum with gradients in 8 bits, which, as the op, it makes beforehand."""

    @staticmethod
    def forward(
        ctx: Any,
        h_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        weights_T: torch.Tensor,
        scale: float,
        softcap: float,
    ) -> tuple[torch.Tensor, ...]:
        stats, logits_TV = token_stats_reference(h_TD, w_VD, targets_T, scale, softcap)
        grads = LossGrads(weights_T)
        given = (stats, logits_TV, targets_T, grads, scale, softcap)
        d_logits_TV = _logit_gradients_reference(*given)
        step = step_of(weights_T, scale)
        ctx.save_for_backward(*narrow_products(h_TD, w_VD, targets_T, d_logits_TV, step))
        loss_T = stats.lse_C - stats.target_logit_C
        tokens = (loss_T, stats.lse_C, stats.mean_C)
        ctx.mark_non_differentiable(*tokens)
        return (weights_T * loss_T).sum(), *tokens

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_h_TD, d_w_VD = ((x * grads[0]).to(x.dtype) for x in ctx.saved_tensors)
        return d_h_TD, d_w_VD, None, None, None, None


def token_stats_reference(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    scale: float,
    softcap: float,
) -> tuple[ChunkStats, torch.Tensor]:
    """Compute ``chunk.token_stats`` in plain torch, and give the logits, in fp32."""
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
    """Compute ``chunk.loss_gradients`` in plain torch; None: w is not trained."""
    stats, logits_TV = token_stats_reference(h_TD, w_VD, targets_T, scale, softcap)
    join(stats)
    given = (stats, logits_TV, targets_T, grads, scale, softcap)
    d_logits_TV = _logit_gradients_reference(*given).to(h_TD.dtype)
    return stats, d_logits_TV @ w_VD, d_logits_TV.T @ h_TD if is_trained else None


def _logit_gradients_reference(
    stats: ChunkStats,
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    grads: LossGrads,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Return the gradient in ``h @ w^T`` of the sum over ``grads``, unrounded."""
    loss_T, lse_T, mean_T = (0 if g is None else g[:, None] for g in grads)
    p_TV = (logits_TV - stats.lse_C[:, None]).exp()
    slope_TV = 1 + logits_TV - stats.mean_C[:, None]
    is_target_TV = torch.arange(logits_TV.shape[1], device=p_TV.device) == targets_T[:, None]
    d_logits_TV = p_TV * (loss_T + lse_T + slope_TV * mean_T)
    d_logits_TV = d_logits_TV - torch.where(is_target_TV, loss_T, 0)
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
    are_rows = h_TD.dim() == w_VD.dim() == 2 and h_TD.shape[1] == w_VD.shape[1]
    if not are_rows or targets_T.shape != h_TD.shape[:1] or targets_T.dtype != torch.int64:
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
def _token_losses(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    scale: float,
    chunk_elements: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    stats = token_stats(h_TD, w_VD, targets_T, scale, chunk_elements, softcap)
    return stats.lse_C - stats.target_logit_C, stats.lse_C, stats.mean_C


@torch.library.custom_op("moetrain::linear_cross_entropy_backward", mutates_args=())
def _token_losses_backward(
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
    grads = LossGrads(*(g.contiguous() for g in (grad_loss_T, grad_lse_T, grad_mean_T)))
    how = {"is_trained": is_trained, "softcap": softcap}
    return loss_gradients(h_TD, w_VD, targets_T, grads, scale, chunk_elements, **how)[1:]


@torch.library.custom_op("moetrain::linear_cross_entropy_sum", mutates_args=())
def _summed_loss(
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
    """(total, loss, lse, mean) and the gradients of total in h and w."""
    weights_T = weights_T.contiguous()
    how = {"is_trained": is_trained, "softcap": softcap}
    given = (h_TD, w_VD, targets_T)
    if narrow_grads:
        found = narrow_gradients(*given, weights_T, scale, chunk_elements // 2, **how)
    else:
        found = loss_gradients(*given, LossGrads(weights_T), scale, chunk_elements, **how)
    stats, grad_h_TD, grad_w_VD = found
    loss_T = stats.lse_C - stats.target_logit_C
    total = (weights_T * loss_T).sum()
    return total, loss_T, stats.lse_C, stats.mean_C, grad_h_TD, grad_w_VD


@torch.library.custom_op("moetrain::scale", mutates_args=())
def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return ``x * factor`` for an fp32 scalar, which torch would first round to x's dtype."""
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), _SCALE_BLOCK),)
        _scale_kernel[grid](x, factor, out, x.numel(), BLOCK=_SCALE_BLOCK)
    return out


@scaled.register_fake
def _(x, factor):
    return torch.empty_like(x)


@_token_losses.register_fake
def _(h_TD, w_VD, targets_T, scale, chunk_elements, softcap):
    loss_T = h_TD.new_empty(h_TD.shape[0], dtype=torch.float32)
    return loss_T, torch.empty_like(loss_T), torch.empty_like(loss_T)


@_token_losses_backward.register_fake
def _(h_TD, w_VD, *rest):
    return torch.empty_like(h_TD), torch.empty_like(w_VD) if rest[-1] else w_VD.new_empty(0)


@_summed_loss.register_fake
def _(h_TD, w_VD, targets_T, weights_T, scale, chunk_elements, softcap, narrow_grads, is_trained):
    tokens = (torch.empty_like(weights_T) for _ in range(3))
    grad_w_VD = torch.empty_like(w_VD) if is_trained else w_VD.new_empty(0)
    return weights_T.new_empty(()), *tokens, torch.empty_like(h_TD), grad_w_VD


def _save_tokens(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[torch.Tensor, ...],
) -> None:
    h_TD, w_VD, targets_T, *ctx.how = inputs
    ctx.save_for_backward(h_TD, w_VD, targets_T)


def _tokens_backward(ctx: Any, *grads: torch.Tensor):
    is_trained = ctx.needs_input_grad[1]
    how = (*ctx.how, is_trained)
    grad_h_TD, grad_w_VD = _token_losses_backward(*ctx.saved_tensors, *grads, *how)
    return grad_h_TD, grad_w_VD if is_trained else None, None, None, None, None


def _save_sum(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[torch.Tensor, ...],
) -> None:
    _, *rest = output
    ctx.mark_non_differentiable(*rest)
    ctx.set_materialize_grads(False)  # no zeros of w's size for outputs that have no gradient
    ctx.save_for_backward(*output[-2:])


def _sum_backward(ctx: Any, grad_total: torch.Tensor | None, *_):
    if grad_total is None:
        return (None,) * 9
    grad_h_TD, grad_w_VD = ctx.saved_tensors
    d_w_VD = scaled(grad_w_VD, grad_total) if ctx.needs_input_grad[1] else None
    return scaled(grad_h_TD, grad_total), d_w_VD, *[None] * 7


_token_losses.register_autograd(_tokens_backward, setup_context=_save_tokens)
_summed_loss.register_autograd(_sum_backward, setup_context=_save_sum)
