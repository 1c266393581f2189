"""Losses of a policy from its tokens' log-probabilities, and the ratios that correct them.

A loss is a function of :class:`PolicyTokens`, and an entry of :data:`POLICY_LOSSES`. For each
token, with log-probability lp, advantage A, and the ratio r = exp(lp - old), clipped to
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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


# ---- losses of the policy ------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyTokens:
    """Tokens whose loss is computed; all tensors have one shape.

    Their dtype is fp32 in training and fp64 in tests. A constant of a loss has the dtype of
    ``logprob``: ``torch.where(condition, 1.0, 1.05)`` would be fp32 in both.
    """

    logprob: torch.Tensor
    """lp: log-probabilities, differentiable."""
    old: torch.Tensor
    """The log-probabilities that the ratio compares with; may be ``logprob`` as a constant."""
    advantage: torch.Tensor
    """A."""
    low: float
    """Lower bound of the ratio or, for dppo, of the signed divergence."""
    high: float
    """Upper bound of the same."""
    dual_clip: float | None = None
    """c: the largest ratio that counts with a negative advantage; None: no bound."""
    mean_over_sample: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Returns, at each token, the mean over the trained tokens of its sample."""

    @property
    def log_ratio(self) -> torch.Tensor:
        """The logarithm of the ratio, differentiable."""
        return clamped(self.logprob - self.old)


class PolicyLoss(NamedTuple):
    """A loss of tokens, and statistics of it."""

    loss: torch.Tensor
    """Each token's loss, differentiable."""
    ratio: torch.Tensor
    """Each token's r."""
    is_clipped: torch.Tensor
    """bool: clipping has changed the token's gradient."""


def _clipped(tokens: PolicyTokens, log_ratio: torch.Tensor) -> PolicyLoss:
    """Return the clipped loss of the ratio exp(``log_ratio``)."""
    ratio, advantage = log_ratio.exp(), tokens.advantage
    is_clipped = _is_outside(ratio, tokens)
    # The objective is maximised: the loss is its negative.
    objective = torch.minimum(ratio * advantage, ratio.clamp(tokens.low, tokens.high) * advantage)
    if tokens.dual_clip is not None:
        is_past_dual = (advantage < 0) & (ratio > tokens.dual_clip)
        objective = torch.where(is_past_dual, tokens.dual_clip * advantage, objective)
        is_clipped = is_clipped | is_past_dual
    return PolicyLoss(-objective, ratio, is_clipped)


def _is_outside(change: torch.Tensor, tokens: PolicyTokens) -> torch.Tensor:
    """Return where ``change`` is past the bound towards which the advantage moves it.

    ``change`` measures, as the bounds do, how far the policy has moved: it is the ratio, or dppo's
    signed divergence.
    """
    advantage = tokens.advantage
    is_below = (change < tokens.low) & (advantage < 0)
    return torch.where(advantage > 0, change > tokens.high, is_below)


def _clip(tokens: PolicyTokens) -> PolicyLoss:
    return _clipped(tokens, tokens.log_ratio)


def _gspo(tokens: PolicyTokens) -> PolicyLoss:
    assert tokens.mean_over_sample is not None  # for losses of whole samples
    mean = tokens.mean_over_sample(tokens.log_ratio.detach())
    # Straight-through: the value of the mean, the gradient of the token's own logprob.
    return _clipped(tokens, mean + tokens.logprob - tokens.logprob.detach())


def _cispo(tokens: PolicyTokens) -> PolicyLoss:
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(tokens.low, tokens.high)
    return PolicyLoss(-weight * tokens.advantage * tokens.logprob, ratio, weight != ratio)


def _dppo(tokens: PolicyTokens, divergence: torch.Tensor) -> PolicyLoss:
    """Return the loss that leaves out tokens whose signed ``divergence`` is out of bounds."""
    ratio = tokens.log_ratio.exp()
    is_clipped = _is_outside(divergence, tokens)
    return PolicyLoss(-torch.where(is_clipped, 0, ratio * tokens.advantage), ratio, is_clipped)


def _dppo_tv(tokens: PolicyTokens) -> PolicyLoss:
    return _dppo(tokens, tokens.logprob.detach().exp() - tokens.old.exp())


def _dppo_kl(tokens: PolicyTokens) -> PolicyLoss:
    now, old = tokens.logprob.detach(), tokens.old
    eps = torch.finfo(now.dtype).eps
    others, others_old = (-torch.expm1(x).clamp(max=-eps) for x in (now, old))
    kl = old.exp() * (old - now) + others_old * (others_old / others).log()
    return _dppo(tokens, torch.sign(now - old) * kl)


def _reinforce(tokens: PolicyTokens) -> PolicyLoss:
    ratio = tokens.log_ratio.detach().exp()
    is_clipped = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(-tokens.advantage * tokens.logprob, ratio, is_clipped)


POLICY_LOSSES: Mapping[str, Callable[[PolicyTokens], PolicyLoss]] = {
    "clip": _clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "reinforce": _reinforce,
}
"""The losses by the names of the setting ``rl.policy``."""


# ---- divergences ---------------------------------------------------------------------------------

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

    The other arguments are those of :class:`PolicyTokens`, with ``bounds`` of low and high.
    """
    low, high = bounds
    tokens = PolicyTokens(logprob, old, advantage.to(logprob.dtype), low, high)
    loss = POLICY_LOSSES[kind](tokens).loss
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
