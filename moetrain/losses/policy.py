"""Losses of a policy from its tokens' log-probabilities, and the ratios that correct them.

For each token, with log-probability lp, advantage A, and the ratio r = exp(lp - old), clipped to
[low, high]:

    clip       -min(r A, clip(r) A)     PPO and GRPO, arXiv 1707.06347, 2402.03300; separate low and
               high: DAPO, arXiv 2503.14476. With ``dual_clip`` c, where A < 0: at most -c A
               (arXiv 1912.09729)
    gspo       as clip, with r = exp(mean of lp - old over the sample); a token's gradient goes
               through its own lp (GSPO-token, arXiv 2507.18071 eq. 14; it is GSPO itself where a
               sample has one advantage)
    cispo      -clip(r) A lp, clip(r) as a constant          arXiv 2506.13585; 2510.13786
    dppo       -r A, or 0 where D > bound and A moves r further from 1. D compares p = exp(lp) and
               m = exp(old) as if all other tokens were one: dppo_tv |p - m|, dppo_kl
               m log(m / p) + (1 - m) log((1 - m) / (1 - p)) (arXiv 2602.04879 eqs. 11 to 14, where
               old is generation's)
    reinforce  -A lp                                         Williams 1992

Without bounds, clip is importance sampling, -r A. With a target's weight for A, reinforce is
cross-entropy; with beta times the k2 below it is DRO, -A lp + beta / 2 (lp - old)^2 (arXiv
2405.19107).

Estimates of KL(p || q), where d = log p / q of a token that was drawn from p (Schulman,
http://joschu.net/blog/kl-approx.html):

    k1  d           k2  d^2 / 2          k3  exp(-d) - 1 + d

In a loss k2 has the gradient of the KL, k3 nearly, and k1 none (arXiv 2506.09477); in a reward k1
is the unbiased one. Ratios of probabilities from differences d of a sample's log-probabilities:

    token  exp(d)       sequence  exp(sum of d)       geometric  exp(mean of d)

They are weights in TIS (arXiv 1802.01561; Yao et al., "Your efficient RL framework secretly brings
you off-policy RL training", 2025); over a sequence a weight is unbiased, and varies far more. They
are masks in IcePop, over tokens (arXiv 2510.18855), and in MIS and the geometric mask, over
sequences (Liu et al., "When speed kills stability", 2025).

Legend: tensors without a suffix have any shape; T tokens, K of the likeliest tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

LOG_RATIO_LIMIT = 20.0
"""Limit of the logarithm of a ratio, in nats, applied once, where it is made. A ratio of exp(20) =
4.9e8 has a finite square in fp32, and so has the sum of any batch of them; past log(3.4e38) = 88.7
a single token would make the loss infinite. Beyond the limit the gradient is 0."""


def clamped(log_ratios: torch.Tensor) -> torch.Tensor:
    """Clamp logarithms of ratios to +-:data:`LOG_RATIO_LIMIT`."""
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratios(
    kind: str,
    log_ratios: torch.Tensor,
    num_tokens: torch.Tensor,
    sums_over_samples: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return each token's ratio.

    Args:
        kind: token, sequence, geometric, or none for ratios of 1.
        log_ratios: differences of log-probabilities, 0 where a token does not count.
        num_tokens: at each token, the number of tokens of its sample that count.
        sums_over_samples: returns, at each token, the sum over its sample.
    """
    if kind == "none":
        return torch.ones_like(log_ratios)
    if kind != "token":
        log_ratios = sums_over_samples(log_ratios)
    if kind == "geometric":
        log_ratios = log_ratios / num_tokens.clamp(min=1)
    return clamped(log_ratios).exp()


def _binary_kl(now: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return KL(m || p) of the token against all others, with the sign of p - m."""
    eps = torch.finfo(now.dtype).eps
    others, others_old = (-torch.expm1(x).clamp(max=-eps) for x in (now, old))
    kl = old.exp() * (old - now) + others_old * (others_old / others).log()
    return torch.sign(now - old) * kl


_DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "dppo_tv": lambda now, old: now.exp() - old.exp(),
    "dppo_kl": _binary_kl,
}
"""Signed divergences of a token against all others, from its log-probabilities; above 0 where the
token became more likely."""


class PolicyLoss(NamedTuple):
    """Each token's loss."""

    loss: torch.Tensor
    """Differentiable."""
    ratio: torch.Tensor
    """r."""
    is_clipped: torch.Tensor
    """bool: clipping has changed the gradient."""


def policy_loss(
    kind: str,
    logprob: torch.Tensor,
    old: torch.Tensor,
    log_ratio: torch.Tensor,
    advantage: torch.Tensor,
    bounds: tuple[float, float],
    dual_clip: float | None,
) -> PolicyLoss:
    """Return each token's loss.

    Args:
        kind: clip, gspo, cispo, dppo_tv, dppo_kl or reinforce.
        logprob: lp, differentiable.
        old: the log-probabilities to compare with.
        log_ratio: the logarithm of r; differentiable, unless old is lp itself.
        advantage: A.
        bounds: low and high, of the ratio; for dppo of the signed divergence.
        dual_clip: c; None: there is none.
    """
    low, high = bounds
    if kind == "reinforce":
        ratio = log_ratio.detach().exp()
        is_clipped = torch.zeros_like(ratio, dtype=torch.bool)
        return PolicyLoss(-advantage * logprob, ratio, is_clipped)
    if kind == "cispo":
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(low, high)
        return PolicyLoss(-weight * advantage * logprob, ratio, is_clipped=weight != ratio)
    ratio = log_ratio.exp()
    signed_divergence = _DIVERGENCES.get(kind)
    # The change of the policy that the bounds apply to. Clipped is a token whose advantage would
    # move it further past a bound.
    change = ratio if signed_divergence is None else signed_divergence(logprob.detach(), old)
    is_clipped = torch.where(advantage > 0, change > high, (change < low) & (advantage < 0))
    # The objective is what the policy maximises: the loss is its negative.
    if signed_divergence is None:
        objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    else:
        objective = torch.where(is_clipped, 0, ratio * advantage)
    if dual_clip is not None:
        is_past_dual = (advantage < 0) & (ratio > dual_clip)
        objective = torch.where(is_past_dual, dual_clip * advantage, objective)
        is_clipped = is_clipped | is_past_dual
    return PolicyLoss(-objective, ratio, is_clipped)


_KL_ESTIMATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(-d) + d,
}


def kl_estimate(name: str, logprob: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Estimate each token's KL(p || q) from its log-probabilities.

    Args:
        name: k1, k2 or k3.
        logprob: under p, from which the token was drawn.
        other: under q.
    """
    return _KL_ESTIMATES[name](clamped(logprob - other))


def policy_total(
    kind: str,
    bounds: tuple[float, float],
    beta: float,
    logprob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    is_target: torch.Tensor,
) -> torch.Tensor:
    """Return the sum of the targets' losses.

    Args:
        beta: coefficient of the k2 estimate of the KL from old.
        is_target: bool: the tokens that are summed.

    The other arguments are those of :func:`policy_loss`.
    """
    loss = policy_loss(
        kind,
        logprob,
        old,
        log_ratio=clamped(logprob - old),
        advantage=advantage.to(logprob.dtype),
        bounds=bounds,
        dual_clip=None,
    ).loss
    if beta:
        loss = loss + beta * kl_estimate("k2", logprob, old)
    return torch.where(is_target, loss, 0).sum()


def kl_of_likeliest(
    logits_TK: torch.Tensor, lse_T: torch.Tensor, other_TK: torch.Tensor, counts_T: torch.Tensor
) -> torch.Tensor:
    """Return each token's KL(p || q) over K words and all other words as one, [T].

    Args:
        logits_TK: p's logits of the K words.
        lse_T: the logsumexp of all of p's logits.
        other_TK: q's log-probabilities of the K words.
        counts_T: bool: tokens that count. Others, whose ``lse_T`` may have any value, have 0 and no
            gradient.
    """
    # Masked before exp: a gradient of 0 times its infinity would be NaN.
    logits_TK = torch.where(counts_T[:, None], logits_TK, lse_T[:, None])
    logprobs_TK = logits_TK - lse_T[:, None]
    p_TK = logprobs_TK.exp()
    eps = torch.finfo(p_TK.dtype).eps
    p_rest_T, q_rest_T = ((1 - x.sum(1)).clamp(min=eps) for x in (p_TK, other_TK.exp()))
    kl_T = (p_TK * (logprobs_TK - other_TK)).sum(1) + p_rest_T * (p_rest_T / q_rest_T).log()
    return torch.where(counts_T, kl_T, 0)
