"""Losses of a policy from its tokens' log-probabilities, and what bounds and corrects them.

For each token, with log-probability lp, advantage A, and the ratio r = exp(lp - old), clipped to
[low, high]:

    clip       -min(r A, clip(r) A)     PPO's and GRPO's, arXiv 1707.06347, 2402.03300; low and high
               apart: DAPO, arXiv 2503.14476. With ``dual_clip`` c, where A < 0: at most -c A
               (arXiv 1912.09729)
    gspo       as clip, with r = exp(mean of lp - old over the sample); a token's gradient goes
               through its own lp (GSPO-token, arXiv 2507.18071 eq. 14: GSPO itself where a sample
               has one advantage)
    cispo      -clip(r) A lp, clip(r) as a constant          arXiv 2506.13585; 2510.13786
    dppo       -r A, or 0 where D > bound and A moves r further from 1; D compares p = exp(lp) and
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

As a weight: TIS, arXiv 1802.01561; Yao et al., "Your efficient RL framework secretly brings you
off-policy RL training", 2025; over a sequence it is unbiased, and varies far more. As a mask:
IcePop, over tokens, arXiv 2510.18855; MIS and the geometric mask, over sequences, Liu et al., "When
speed kills stability", 2025.

Legend: any shape where none is named; T tokens, K of the likeliest tokens.
"""

from collections.abc import Callable

import torch

LOG_RATIO_LIMIT = 20.0
"""Nats to which the logarithm of a ratio is clamped, once, where it is made. A ratio of exp(20) =
4.9e8 has a finite square in fp32, and so has the sum of any batch of them; one step past
log(3.4e38) = 88.7 a single token makes the loss infinite. Beyond the limit the gradient is 0."""


def clamped(log_ratios: torch.Tensor) -> torch.Tensor:
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratios(
    kind: str,
    apart: torch.Tensor,
    numbers: torch.Tensor,
    sums_over_samples: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return each token's ratio of ``kind``; none: 1.

    Args:
        apart: differences of log-probabilities, 0 where a token does not count.
        numbers: how many tokens of its sample count, at each token.
        sums_over_samples: gives, at each token, the sum over its sample.
    """
    if kind == "none":
        return torch.ones_like(apart)
    if kind != "token":
        apart = sums_over_samples(apart)
    if kind == "geometric":
        apart = apart / numbers.clamp(min=1)
    return clamped(apart).exp()


def _binary_kl(now: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    eps = torch.finfo(now.dtype).eps
    others, others_old = (-torch.expm1(x).clamp(max=-eps) for x in (now, old))
    kl = old.exp() * (old - now) + others_old * (others_old / others).log()
    return torch.sign(now - old) * kl


_DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "dppo_tv": lambda now, old: now.exp() - old.exp(),
    "dppo_kl": _binary_kl,
}
"""Divergences of a token against all others, from its log-probabilities; above 0: it rose."""


def policy_loss(
    kind: str,
    logprob: torch.Tensor,
    old: torch.Tensor,
    log_ratio: torch.Tensor,
    advantage: torch.Tensor,
    bounds: tuple[float, float],
    dual_clip: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each token's loss, its ratio, and whether clipping has changed its gradient.

    ``logprob`` is differentiable, and so is ``log_ratio``, unless old is lp itself. ``bounds`` are
    of the ratio, for dppo of the signed divergence.
    """
    low, high = bounds
    if kind == "reinforce":
        ratio = log_ratio.detach().exp()
        return -advantage * logprob, ratio, torch.zeros_like(ratio, dtype=torch.bool)
    if kind == "cispo":
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(low, high)
        return -weight * advantage * logprob, ratio, weight != ratio
    ratio = log_ratio.exp()
    divergence = _DIVERGENCES.get(kind)
    shift = ratio if divergence is None else divergence(logprob.detach(), old)
    is_clipped = torch.where(advantage > 0, shift > high, (shift < low) & (advantage < 0))
    if divergence is None:
        gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    else:
        gain = torch.where(is_clipped, 0, ratio * advantage)
    if dual_clip is not None:
        is_past = (advantage < 0) & (ratio > dual_clip)
        gain = torch.where(is_past, dual_clip * advantage, gain)
        is_clipped = is_clipped | is_past
    return -gain, ratio, is_clipped


_KL_ESTIMATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(-d) + d,
}


def kl_estimate(
    name: str,
    logprob: torch.Tensor,
    other: torch.Tensor,
) -> torch.Tensor:
    """Estimate each token's KL(p || q), from log-probabilities under p, which drew it, and q."""
    return _KL_ESTIMATES[name](clamped(logprob - other))


def policy_total(
    kind: str,
    bounds: tuple[float, float],
    beta: float,
    *given: torch.Tensor,
) -> torch.Tensor:
    """Return the sum of the targets' losses; ``beta``: of the k2 estimate of the KL from old.

    ``given``: log-probabilities, old ones, advantages, and which are of targets.
    """
    logprob, old, advantage, is_target = given
    how = logprob, old, clamped(logprob - old), advantage.to(logprob.dtype)
    loss, *_ = policy_loss(kind, *how, bounds, None)
    if beta:
        loss = loss + beta * kl_estimate("k2", logprob, old)
    return torch.where(is_target, loss, 0).sum()


def kl_of_likeliest(
    logits_TK: torch.Tensor,
    lse_T: torch.Tensor,
    other_TK: torch.Tensor,
    counts_T: torch.Tensor,
) -> torch.Tensor:
    """Return each token's KL(p || q) over K tokens and all others as one, [T].

    Args:
        logits_TK, lse_T: p's logits of the tokens, and the logarithm of the sum of all logits' exp.
        other_TK: q's log-probabilities of them.
        counts_T: bool; other tokens, whose ``lse_T`` may be anything, have 0 and no gradient.
    """
    # Before exp: a gradient of 0 times its infinity would be NaN.
    logits_TK = torch.where(counts_T[:, None], logits_TK, lse_T[:, None])
    logprobs_TK = logits_TK - lse_T[:, None]
    p_TK = logprobs_TK.exp()
    least = torch.finfo(p_TK.dtype).eps
    rest_T, theirs_T = ((1 - x.sum(1)).clamp(min=least) for x in (p_TK, other_TK.exp()))
    apart_T = (p_TK * (logprobs_TK - other_TK)).sum(1)
    return torch.where(counts_T, apart_T + rest_T * (rest_T / theirs_T).log(), 0)
