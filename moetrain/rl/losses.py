"""Losses of reinforcement learning: settings of ``rl`` name them, tables here hold them.

For each trained token, with log-probability lp, advantage A, and the ratio r = exp(lp - old),
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

times the importance weight, a constant (:func:`corrected`). Beside it, with their coefficients,
stand an estimate of KL(policy || reference), where d = lp - reference (Schulman,
http://joschu.net/blog/kl-approx.html), and minus the entropy:

    k1  d           k2  d^2 / 2          k3  exp(-d) - 1 + d

In the loss k2 has the gradient of the KL, k3 nearly, and k1 none (arXiv 2506.09477); in the reward
k1 is the unbiased one. Tokens become a loss by weights that depend on nothing but the global batch:

    token      1 / trained tokens                               DAPO
    sequence   1 / (trained tokens of the sample * samples)     GRPO
    fixed      1 / (max_tokens * samples)                       Dr. GRPO, arXiv 2503.20783

where a sample counts if a token of it is trained. So no split into micro-batches, rows or ranks
changes the result.

The log-probability and entropy of every target come from the logits h @ w^T / temperature as
logits[target] - lse and lse - sum(p * logits), over vocabulary chunks and vocabulary shards.

Left out on purpose: log-probabilities among the tokens that a top-k or top-p filter left. They need
the logits of every kept token again; where filters are on, the whole distribution's are trained.
Legend: B rows, S tokens of a row, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moetrain.config.rl import PolicyName, RlSection
from moetrain.data.packing import IGNORE_INDEX
from moetrain.models.layers import Vocabulary
from moetrain.models.transformer import Transformer
from moetrain.rl.rows import RolloutBatch
from moetrain.train.engine import Engine
from moetrain.train.objectives import Outputs, RouterLosses, Term

_LOG_RATIO_LIMIT = 20.0
"""Nats to which the logarithm of a ratio is clamped, once, where it is made. A ratio of exp(20) =
4.9e8 has a finite square in fp32, and so has the sum of any batch of them; one step past
log(3.4e38) = 88.7 a single token makes the loss infinite. Beyond the limit the gradient is 0."""
_WHOLE = Vocabulary()


# ---- log-probabilities and entropies ------------------------------------------------------------


class _TokenStats(NamedTuple):
    """Values of each token, at least fp32 and differentiable; 0 where there is no target."""

    logprob: torch.Tensor
    """Log-probability of the target, nats."""
    entropy: torch.Tensor
    """Entropy of the predicted distribution, nats."""


def token_stats(
    hidden_TD: torch.Tensor,
    head_VD: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocabulary: Vocabulary = _WHOLE,
) -> _TokenStats:
    """Return log-probability and entropy of each target under softmax(h @ head^T / temperature).

    Where ``head_VD`` is spread over tensor parallel ranks it takes ``model.vocabulary``, is
    collective, and returns the same on all of them.
    """
    losses = vocabulary.token_losses(hidden_TD, head_VD, targets_T, temperature=temperature)
    return _TokenStats(-losses.loss_T, losses.entropy_T)


def score(
    engine: Engine, batches: Sequence[RolloutBatch], temperature: float = 1.0
) -> list[_TokenStats]:
    """Return :func:`token_stats` [B, S] of each batch under the engine's weights, on the CPU.

    ``Engine.forward_backward`` computes the same numbers, and the same bits where blocks are not
    compiled (the graph of a forward alone may round elsewhere). Collective; waits for the device.
    """

    def finish(hidden_BSD: torch.Tensor, _: Any, batch: RolloutBatch) -> torch.Tensor:
        return torch.stack(_batch_stats(engine.model, hidden_BSD, batch, temperature))

    shapes = [(2, *batch.targets_BS.shape) for batch in batches]
    with engine.work(), torch.no_grad(), engine.exact_sizes():
        found = engine.collect(batches, finish, shapes)
    return [_TokenStats(*stats_2BS.cpu()) for stats_2BS in found]


def _batch_stats(
    model: Transformer, hidden_BSD: torch.Tensor, batch: RolloutBatch, temperature: float
) -> _TokenStats:
    stats = token_stats(
        hidden_BSD.flatten(0, 1),
        model.head_weight,
        batch.targets_BS.flatten(),
        temperature=temperature,
        vocabulary=model.vocabulary,
    )
    return _TokenStats(*(x_T.view_as(batch.targets_BS) for x_T in stats))


# ---- importance weights -------------------------------------------------------------------------


def _clamped(log_ratios: torch.Tensor) -> torch.Tensor:
    return log_ratios.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)


def corrected(
    batches: Sequence[RolloutBatch], proximal: Sequence[torch.Tensor], settings: RlSection
) -> list[RolloutBatch]:
    """Add the trainer's log-probabilities and importance weights to ``batches``.

        token      w_t = exp(d_t)              d = log of trainer's / generation's probability
        sequence   w_t = exp(sum of d over the sample)

    Where generation has not the trainer's bits, samples come from another policy than the one that
    is trained, and w corrects for it: truncated at ``importance_high`` (truncated importance
    sampling, Espeholt et al., arXiv 1802.01561; for this use Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training", 2025), or w where it lies in
    [``importance_low``, ``importance_high``] and 0 elsewhere (IcePop, arXiv 2510.18855; over
    sequences: Liu et al., "When speed kills stability", 2025). Over a sequence the weight is
    unbiased, and varies far more.

    Masked tokens lose their targets, and so leave every denominator, before any micro-batch runs.
    ``proximal`` are [B, S] of each batch, as :func:`score` returns them.
    """
    return [_corrected(*pair, settings) for pair in zip(batches, proximal, strict=True)]


def _corrected(batch: RolloutBatch, proximal_BS: torch.Tensor, settings: RlSection) -> RolloutBatch:
    batch = batch._replace(proximal_BS=proximal_BS)
    if settings.importance_of == "none":
        return batch
    has_target_BS = batch.targets_BS != IGNORE_INDEX
    log_weights_BS = torch.where(has_target_BS, proximal_BS - batch.logprobs_BS, 0)
    if settings.importance_of == "sequence":
        log_weights_BS = batch.sums_over_samples(log_weights_BS)
    weights_BS = _clamped(log_weights_BS).exp()
    low, high = settings.importance_low, settings.importance_high
    if settings.importance_how == "truncate":
        return batch._replace(weights_BS=weights_BS.clamp(max=high))
    is_kept_BS = (weights_BS >= low) & (weights_BS <= high)
    return batch._replace(
        weights_BS=torch.where(is_kept_BS, weights_BS, 0),
        targets_BS=torch.where(is_kept_BS, batch.targets_BS, IGNORE_INDEX),
    )


# ---- losses -------------------------------------------------------------------------------------


class _PolicyInputs(NamedTuple):
    """The arguments of a policy's loss, each [B, S]."""

    logprob: torch.Tensor
    """Differentiable."""
    log_ratio: torch.Tensor
    """Logarithm of the ratio; differentiable, unless old is lp itself."""
    advantage: torch.Tensor
    sample_mean: Callable[[torch.Tensor], torch.Tensor]
    """Averages a [B, S] over the trained tokens of each position's sample."""


class _TokenLoss(NamedTuple):
    """The result of a policy's loss, each [B, S]."""

    loss: torch.Tensor
    ratio: torch.Tensor
    is_clipped: torch.Tensor
    """bool: whether clipping has changed this token's gradient."""


def _clip_loss(inputs: _PolicyInputs, settings: RlSection) -> _TokenLoss:
    (low, high), advantage = settings.clip_range, inputs.advantage
    ratio = inputs.log_ratio.exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    is_clipped = torch.where(advantage > 0, ratio > high, (ratio < low) & (advantage < 0))
    if settings.dual_clip is not None:
        is_past = (advantage < 0) & (ratio > settings.dual_clip)
        gain = torch.where(is_past, settings.dual_clip * advantage, gain)
        is_clipped = is_clipped | is_past
    return _TokenLoss(-gain, ratio, is_clipped)


def _gspo_loss(inputs: _PolicyInputs, settings: RlSection) -> _TokenLoss:
    mean = inputs.sample_mean(inputs.log_ratio.detach())
    # The second part is 0, and brings the gradient.
    log_ratio = mean + inputs.logprob - inputs.logprob.detach()
    return _clip_loss(inputs._replace(log_ratio=log_ratio), settings)


def _cispo_loss(inputs: _PolicyInputs, settings: RlSection) -> _TokenLoss:
    ratio = inputs.log_ratio.detach().exp()
    weight = ratio.clamp(*settings.clip_range)
    return _TokenLoss(-weight * inputs.advantage * inputs.logprob, ratio, weight != ratio)


def _reinforce_loss(inputs: _PolicyInputs, settings: RlSection) -> _TokenLoss:
    ratio = inputs.log_ratio.detach().exp()
    loss = -inputs.advantage * inputs.logprob
    return _TokenLoss(loss, ratio, torch.zeros_like(ratio, dtype=torch.bool))


_POLICIES: dict[PolicyName, Callable[[_PolicyInputs, RlSection], _TokenLoss]] = {
    "clip": _clip_loss,
    "gspo": _gspo_loss,
    "cispo": _cispo_loss,
    "reinforce": _reinforce_loss,
}

_KL_ESTIMATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(-d) + d,
}
"""Estimates of KL(p || q), from d = log p / q of a token that was drawn from p."""


def kl_estimate(name: str, logprob: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Estimate each token's KL(p || q), from log-probabilities under p, which drew it, and q."""
    return _KL_ESTIMATES[name](_clamped(logprob - other))


_NO_ROUTER_LOSSES = RouterLosses(load_balancing=0.0, router_z=0.0, is_pooled=False)


@dataclass(frozen=True)
class PolicyObjective:
    """The :class:`moetrain.train.objectives.Objective` that ``Engine.forward_backward`` minimises.

    Terms with a coefficient: ``policy``, ``kl_penalty`` (with ``rl.kl_coef``, in the loss),
    ``entropy_bonus`` (with ``rl.entropy_coef``), and the routers' auxiliary losses. Statistics,
    terms of coefficient 0 that are means over the global batch's trained tokens: ``entropy``,
    ``ratio``, ``ratio_square``, ``clip_share``, ``moved`` (k3 of the policy from what the ratio
    divides by), ``mismatch`` (k3 of the trainer's probabilities from the rollout's), ``kl`` (k3
    from the reference) and ``weight`` (importance), where the batches have them.
    """

    settings: RlSection
    routers: RouterLosses = _NO_ROUTER_LOSSES

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
        """Compute a batch's terms; ValueError if it lacks a ``reference_BS`` that they need."""
        stats = _batch_stats(model, outputs.hidden_BSD, batch, self.settings.temperature)
        terms = self.token_terms(stats, batch, sizes)
        mine = {k: t._replace(value=t.value * outputs.share) for k, t in terms.items()}
        return mine | self.routers.router_terms(outputs, sizes["tokens"])

    def token_terms(
        self, stats: _TokenStats, batch: RolloutBatch, sizes: Mapping[str, torch.Tensor]
    ) -> dict[str, Term]:
        """Compute all terms but the routers', from log-probabilities and entropies [B, S]."""
        settings, logprob = self.settings, stats.logprob
        old = {
            "current": logprob.detach(),
            "proximal": batch.logprobs_BS if batch.proximal_BS is None else batch.proximal_BS,
            "rollout": batch.logprobs_BS,
        }[settings.ratio]
        trained = (batch.targets_BS != IGNORE_INDEX).to(logprob.dtype)
        num_trained = batch.sums_over_samples(trained).clamp(min=1)
        inputs = _PolicyInputs(
            logprob,
            _clamped(logprob - old),
            batch.advantages_BS.to(logprob.dtype),
            lambda x: batch.sums_over_samples(trained * x) / num_trained,
        )
        token = _POLICIES[settings.policy](inputs, settings)
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
        self, loss: torch.Tensor, stats: _TokenStats, batch: RolloutBatch, shares: torch.Tensor
    ) -> dict[str, Term]:
        """Compute the terms that have gradients, by each token's share of the whole [B, S]."""
        settings = self.settings
        weighted = loss if batch.weights_BS is None else batch.weights_BS * loss
        terms = {"policy": Term((shares * weighted).sum())}
        if settings.kl_coef and settings.kl_in == "loss":
            if batch.reference_BS is None:
                problem = f"rl.kl_coef is {settings.kl_coef}, and a batch has no reference_BS"
                raise ValueError(f"PolicyObjective: {problem} to stay near to")
            kl = kl_estimate(settings.kl, stats.logprob, batch.reference_BS)
            terms["kl_penalty"] = Term((shares * kl).sum(), settings.kl_coef)
        if settings.entropy_coef:
            bonus = (shares * stats.entropy).sum()
            terms["entropy_bonus"] = Term(bonus, -settings.entropy_coef)
        return terms


def _seen(
    token: _TokenLoss, stats: _TokenStats, old: torch.Tensor, batch: RolloutBatch
) -> dict[str, torch.Tensor]:
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
