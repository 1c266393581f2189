"""Losses of reinforcement learning, as data: ``RlSection`` names them, tables here have them.

Of each trained token, with its log-probability lp, its advantage A, and the ratio r = exp(lp - old)
where ``ratio`` says what old is (current: lp itself, as a constant; proximal: the trainer's before
the update, arXiv 2110.00641; rollout: generation's), clipped to [1 - low, 1 + high]:

    clip       -min(r A, clip(r) A)     PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300; low and high
               apart: DAPO, arXiv 2503.14476. With ``dual_clip`` c, where A < 0: at most -c A
               (arXiv 1912.09729)
    gspo       as clip, with r = exp(mean of lp - old over the sample); a token's gradient goes
               through its own lp (GSPO-token, arXiv 2507.18071 eq. 14: GSPO itself where a sample
               has one advantage)
    cispo      -clip(r) A lp, clip(r) as a constant          arXiv 2506.13585; 2510.13786
    reinforce  -A lp                                         Williams 1992

times the importance weight, a constant (:mod:`moetrain.rl.importance`). Beside it, with their
coefficients, an estimate of KL(policy || reference), of d = lp - reference (Schulman,
http://joschu.net/blog/kl-approx.html), and minus the entropy:

    k1  d           k2  d^2 / 2          k3  exp(-d) - 1 + d

In the loss k2 has the gradient of the KL, k3 nearly, and k1 none (arXiv 2506.09477); in the reward
k1 is the unbiased one. Tokens become a loss by weights that depend on nothing but the global batch:

    token      1 / trained tokens                               DAPO
    sequence   1 / (trained tokens of the sample * samples)     GRPO
    fixed      1 / (max_tokens * samples)                       Dr. GRPO, arXiv 2503.20783

where a sample counts if a token of it is trained. So no split into micro-batches, rows or ranks
changes anything.

Legend: B rows, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from moetrain.config import Config
from moetrain.config.rl import PolicyName, RlSection
from moetrain.data.packing import IGNORE_INDEX
from moetrain.models.architecture import Architecture
from moetrain.models.transformer import Transformer
from moetrain.rl.importance import log_ratio
from moetrain.rl.rows import RolloutBatch
from moetrain.rl.token_stats import TokenStats, batch_stats
from moetrain.train.objectives import Outputs, RouterLosses, Term


class PolicyInputs(NamedTuple):
    """What a policy's loss is a function of, each [B, S]."""

    logprob: torch.Tensor
    """Differentiable."""
    log_ratio: torch.Tensor
    """Over the old one; differentiable, unless the old one is this one."""
    advantage: torch.Tensor
    sample_mean: Callable[[torch.Tensor], torch.Tensor]
    """The mean of a [B, S] over the trained tokens of each position's sample."""


class TokenLoss(NamedTuple):
    """Each [B, S]."""

    loss: torch.Tensor
    ratio: torch.Tensor
    is_clipped: torch.Tensor
    """bool: clipping has changed this token's gradient."""


def clip_loss(inputs: PolicyInputs, settings: RlSection) -> TokenLoss:
    """``clip`` of the module's table."""
    (low, high), advantage = settings.clip_range, inputs.advantage
    ratio = inputs.log_ratio.exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    is_clipped = torch.where(advantage > 0, ratio > high, (ratio < low) & (advantage < 0))
    if settings.dual_clip is not None:
        is_past = (advantage < 0) & (ratio > settings.dual_clip)
        gain = torch.where(is_past, settings.dual_clip * advantage, gain)
        is_clipped = is_clipped | is_past
    return TokenLoss(-gain, ratio, is_clipped)


def gspo_loss(inputs: PolicyInputs, settings: RlSection) -> TokenLoss:
    """``gspo`` of the module's table."""
    mean = inputs.sample_mean(inputs.log_ratio.detach())
    # The second part is 0, and brings the gradient.
    log_ratio = mean + inputs.logprob - inputs.logprob.detach()
    return clip_loss(inputs._replace(log_ratio=log_ratio), settings)


def cispo_loss(inputs: PolicyInputs, settings: RlSection) -> TokenLoss:
    """``cispo`` of the module's table."""
    ratio = inputs.log_ratio.detach().exp()
    weight = ratio.clamp(*settings.clip_range)
    return TokenLoss(-weight * inputs.advantage * inputs.logprob, ratio, weight != ratio)


def reinforce_loss(inputs: PolicyInputs, settings: RlSection) -> TokenLoss:
    """``reinforce`` of the module's table."""
    ratio = inputs.log_ratio.detach().exp()
    loss = -inputs.advantage * inputs.logprob
    return TokenLoss(loss, ratio, torch.zeros_like(ratio, dtype=torch.bool))


POLICIES: dict[PolicyName, Callable[[PolicyInputs, RlSection], TokenLoss]] = {
    "clip": clip_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "reinforce": reinforce_loss,
}

KL_ESTIMATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(-d) + d,
}
"""Of KL(p || q), from d = log p / q of what was drawn from p."""


def kl_estimate(name: str, logprob: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Each token's part of KL(p || q), from its log-probabilities under p, which drew it, and q."""
    return KL_ESTIMATES[name](log_ratio(logprob, other))


NO_ROUTER_LOSSES = RouterLosses(load_balancing=0.0, router_z=0.0, is_pooled=False)


@dataclass(frozen=True)
class PolicyObjective:
    """What ``Engine.forward_backward`` minimises; a :class:`moetrain.train.objectives.Objective`.

    Terms with a coefficient: ``policy``, ``kl_penalty`` (with ``rl.kl_coef``, in the loss),
    ``entropy_bonus`` (with ``rl.entropy_coef``), and the routers' auxiliary losses. Statistics,
    terms of coefficient 0 that are means over the global batch's trained tokens: ``entropy``,
    ``ratio``, ``ratio_square``, ``clip_share``, ``moved`` (k3 of the policy from what the ratio
    divides by), ``mismatch`` (k3 of the trainer's probabilities from the rollout's), ``kl`` (k3
    from the reference) and ``weight`` (importance), where the batches have them.
    """

    settings: RlSection
    routers: RouterLosses = NO_ROUTER_LOSSES

    @classmethod
    def of(cls, config: Config, arch: Architecture) -> Self:
        """What ``config`` asks for, and ``arch`` where that leaves it open."""
        return cls(config.rl, RouterLosses.of(config, arch))

    @property
    def balances(self) -> bool:
        return self.routers.balances

    def sizes(self, batches: Sequence[RolloutBatch]) -> dict[str, int]:
        return {
            "targets": sum(int((b.targets_BS != IGNORE_INDEX).sum()) for b in batches),
            "samples": sum(b.num_trained_samples() for b in batches),
            "tokens": sum(b.num_tokens for b in batches),
        }

    def terms(
        self,
        model: Transformer,
        outputs: Outputs,
        batch: RolloutBatch,
        sizes: Mapping[str, torch.Tensor],
    ) -> dict[str, Term]:
        """See :class:`moetrain.train.objectives.Objective`.

        Raises:
            ValueError: a KL in the loss, and the batch has no ``reference_BS``.
        """
        stats = batch_stats(model, outputs.hidden_BSD, batch, self.settings.temperature)
        terms = self.token_terms(stats, batch, sizes)
        mine = {k: t._replace(value=t.value * outputs.share) for k, t in terms.items()}
        return mine | self.routers.router_terms(outputs, sizes["tokens"])

    def token_terms(
        self, stats: TokenStats, batch: RolloutBatch, sizes: Mapping[str, torch.Tensor]
    ) -> dict[str, Term]:
        """The terms but the routers', from every target's log-probability and entropy [B, S]."""
        settings, logprob = self.settings, stats.logprob
        old = {
            "current": logprob.detach(),
            "proximal": batch.logprobs_BS if batch.proximal_BS is None else batch.proximal_BS,
            "rollout": batch.logprobs_BS,
        }[settings.ratio]
        trained = (batch.targets_BS != IGNORE_INDEX).to(logprob.dtype)
        num_trained = batch.sums_over_samples(trained).clamp(min=1)
        inputs = PolicyInputs(
            logprob,
            log_ratio(logprob, old),
            batch.advantages_BS.to(logprob.dtype),
            lambda x: batch.sums_over_samples(trained * x) / num_trained,
        )
        token = POLICIES[settings.policy](inputs, settings)
        parts = {
            "token": sizes["targets"],
            "sequence": num_trained * sizes["samples"],
            "fixed": settings.max_tokens * sizes["samples"],
        }
        learned = self._learned(token.loss, stats, batch, trained / parts[settings.aggregation])
        seen = _seen(token, stats, old, batch)
        means = {k: (trained * x.detach() / sizes["targets"]).sum() for k, x in seen.items()}
        return learned | {name: Term(mean, 0.0) for name, mean in means.items()}

    def _learned(
        self, loss: torch.Tensor, stats: TokenStats, batch: RolloutBatch, shares: torch.Tensor
    ) -> dict[str, Term]:
        """The terms that have gradients; ``shares`` [B, S] are the tokens' of the whole."""
        settings = self.settings
        weighted = loss if batch.weights_BS is None else batch.weights_BS * loss
        terms = {"policy": Term((shares * weighted).sum())}
        if settings.kl_coef and settings.kl_in == "loss":
            if batch.reference_BS is None:
                raise ValueError(
                    f"PolicyObjective: rl.kl_coef is {settings.kl_coef}, and a batch has no "
                    "reference_BS to stay near to"
                )
            kl = kl_estimate(settings.kl, stats.logprob, batch.reference_BS)
            terms["kl_penalty"] = Term((shares * kl).sum(), settings.kl_coef)
        if settings.entropy_coef:
            bonus = (shares * stats.entropy).sum()
            terms["entropy_bonus"] = Term(bonus, -settings.entropy_coef)
        return terms


def _seen(
    token: TokenLoss, stats: TokenStats, old: torch.Tensor, batch: RolloutBatch
) -> dict[str, torch.Tensor]:
    """What is reported of each token [B, S], by name."""
    now, ratio = stats.logprob.detach(), token.ratio.detach()
    trainer = now if batch.proximal_BS is None else batch.proximal_BS
    seen = {
        "entropy": stats.entropy,
        "ratio": ratio,
        "ratio_square": ratio.square(),
        "clip_share": token.is_clipped,
        "moved": kl_estimate("k3", old, now),
        "mismatch": kl_estimate("k3", batch.logprobs_BS, trainer),
    }
    if batch.reference_BS is not None:
        seen["kl"] = kl_estimate("k3", now, batch.reference_BS)
    if batch.weights_BS is not None:
        seen["weight"] = batch.weights_BS
    return seen
