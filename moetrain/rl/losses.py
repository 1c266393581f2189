"""Advantages and losses of reinforcement learning, by the names that settings of ``rl`` give them.

A trajectory that failed, or was cut off where that counts as failing, is left out before anything
is averaged, and does not affect the others. Then, for a group's rewards R (n of them):

    dr_grpo                A = R - mean(R)                          arXiv 2503.20783
    grpo                   A = (R - mean(R)) / std(R)               arXiv 2402.03300
    rloo                   A = R - mean(the others')                arXiv 2402.14740
    reinforce_pp_baseline  a = R - mean(R), then over the batch     arXiv 2501.03262
    reinforce_pp           a = R, then over the batch: A = (a - mean(a)) / std(a)

with standard deviations of n - 1. All but the last learn by comparing within a group: a group
whose rewards are equal, or that has a single member left, is not trained at all, and so is in no
denominator either. Means over the batch are over what is trained.

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
    dppo       -r A, or 0 where D > bound and A moves r further from 1; D compares p = exp(lp) and
               m = exp(old) as if all other tokens were one: dppo_tv |p - m|, dppo_kl
               m log(m / p) + (1 - m) log((1 - m) / (1 - p)) (arXiv 2602.04879 eqs. 11 to 14, where
               old is generation's)
    reinforce  -A lp                                         Williams 1992

times the importance weight, a constant, without the tokens that a mask leaves out
(:func:`corrected`). Beside it, with their coefficients,
stand an estimate of KL(policy || reference), where d = lp - reference (Schulman,
http://joschu.net/blog/kl-approx.html), minus the entropy, and KL(policy || teacher) over the
teacher's k likeliest tokens and all others as one (on-policy distillation, arXiv 2306.13649). With
``teacher_top_k`` 0 that is in the advantages: A - ``teacher_coef`` (old - teacher), old being
generation's. The estimates:

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

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from moetrain.config.rl import RlSection
from moetrain.data.packing import IGNORE_INDEX
from moetrain.models.transformer import Transformer
from moetrain.rl.rows import RolloutBatch, Trajectory
from moetrain.train.objectives import Outputs, Term, token_losses

_EQUAL = 1e-9
"""Relative difference below which rewards are the same: sums of the same parts in another order
differ by 1e-16 or so, and a division by their standard deviation would make 1 of that."""
_LOG_RATIO_LIMIT = 20.0
"""Nats to which the logarithm of a ratio is clamped, once, where it is made. A ratio of exp(20) =
4.9e8 has a finite square in fp32, and so has the sum of any batch of them; one step past
log(3.4e38) = 88.7 a single token makes the loss infinite. Beyond the limit the gradient is 0."""


# ---- advantages ---------------------------------------------------------------------------------


class _Advantages(NamedTuple):
    """The advantages of trajectories, in their order."""

    values: list[float | None]
    """None: the trajectory is not trained."""
    left_out: Counter[str]
    """Trajectories that are not trained, by reason: a fault, ``overlong``, ``not_finite``
    (rewards), ``no_variance`` (all of the group's rewards are equal), ``alone`` in its group."""
    spread: float
    """Standard deviation of the advantages that are trained; 0 where there is only one."""


_BASELINES: dict[str, Callable[[np.ndarray], np.ndarray] | None] = {
    "dr_grpo": lambda r: r - r.mean(),
    "grpo": lambda r: (r - r.mean()) / r.std(ddof=1),
    "rloo": lambda r: r - (r.sum() - r) / (len(r) - 1),
    "reinforce_pp_baseline": lambda r: r - r.mean(),
    "reinforce_pp": None,
    "none": np.zeros_like,
}
"""Maps a group's rewards to advantages; None: groups have no part in it."""
_OVER_BATCH = ("reinforce_pp_baseline", "reinforce_pp")
"""Those whose advantages are then normalised over the batch."""


def advantages(
    trajectories: Sequence[Trajectory], settings: RlSection, kls: Sequence[float] | None = None
) -> _Advantages:
    """Compute the advantage of every trajectory of the *global* batch, all ranks' together.

    ``kls``: the KL estimate of each, summed over its tokens, which ``rl.kl_coef`` times is taken
    off its reward; None: nothing is.
    """
    values = np.array([t.reward for t in trajectories], dtype=np.float64)
    if kls is not None:
        values -= settings.kl_coef * np.array(kls)
    reasons: list[str | None] = [t.fault for t in trajectories]
    groups: dict[int, list[int]] = {}
    for i, t in enumerate(trajectories):
        if t.fault is None and not math.isfinite(values[i]):
            reasons[i] = "not_finite"
        elif t.fault is None and t.is_overlong and settings.overlong == "drop":
            reasons[i] = "overlong"
        elif t.fault is None:
            groups.setdefault(t.group, []).append(i)
    if (of_group := _BASELINES[settings.advantage]) is not None:
        for members in groups.values():
            if len(members) > 1 and not _is_flat(values[members]):
                values[members] = of_group(values[members])
                continue
            if settings.teacher is not None:  # which teaches where rewards do not
                values[members] = 0.0
                continue
            for i in members:
                reasons[i] = "alone" if len(members) == 1 else "no_variance"
    for i, t in enumerate(trajectories):
        if settings.overlong == "mask" and t.is_overlong and reasons[i] is None:
            reasons[i] = "overlong"
    trained = np.flatnonzero([reason is None for reason in reasons])
    if settings.advantage in _OVER_BATCH and len(trained):
        spread = 1.0 if _is_flat(values[trained]) else _spread(values[trained])
        values[trained] = (values[trained] - values[trained].mean()) / spread
    return _Advantages(
        [float(v) if r is None else None for v, r in zip(values, reasons, strict=True)],
        Counter(reason for reason in reasons if reason is not None),
        _spread(values[trained]),
    )


def _is_flat(values: np.ndarray) -> bool:
    return bool(np.ptp(values) <= _EQUAL * np.abs(values).max())


def _spread(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


# ---- importance weights -------------------------------------------------------------------------


def _clamped(log_ratios: torch.Tensor) -> torch.Tensor:
    return log_ratios.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)


def corrected(
    batches: Sequence[RolloutBatch], proximal: Sequence[torch.Tensor], settings: RlSection
) -> list[RolloutBatch]:
    """Add the trainer's log-probabilities and importance weights to ``batches``, and mask tokens.

        token      exp(d_t)              d = log of trainer's / generation's probability
        sequence   exp(sum of d over the sample)
        geometric  exp(mean of d over the sample)

    Where generation has not the trainer's bits, samples come from another policy than the one that
    is trained. A weight, the ratio ``importance``, bounded from above, corrects for it (TIS: arXiv
    1802.01561; Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training", 2025); over a sequence it is unbiased, and varies far more. A mask leaves out tokens
    whose ratio ``mask`` lies outside ``mask_range`` (IcePop, over tokens: arXiv 2510.18855; MIS and
    the geometric mask, over sequences: Liu et al., "When speed kills stability", 2025): they lose
    their targets, and so leave every denominator, before any micro-batch runs. ``proximal`` are
    each batch's of :func:`moetrain.train.preferences.score`.
    """
    low, high = settings.mask_range
    found = []
    for batch, proximal_BS in zip(batches, proximal, strict=True):
        batch = batch._replace(proximal_BS=proximal_BS)
        has_target_BS = batch.targets_BS != IGNORE_INDEX
        apart_BS = torch.where(has_target_BS, proximal_BS - batch.logprobs_BS, 0)
        of_mask_BS = _RATIOS[settings.mask](batch, apart_BS)
        is_kept_BS = (of_mask_BS >= low) & (of_mask_BS <= high)
        if settings.importance_of != "none":
            weights_BS = _RATIOS[settings.importance_of](batch, apart_BS)
            weights_BS = weights_BS.clamp(max=settings.importance_high)
            batch = batch._replace(weights_BS=torch.where(is_kept_BS, weights_BS, 0))
        targets_BS = torch.where(is_kept_BS, batch.targets_BS, IGNORE_INDEX)
        found.append(batch._replace(targets_BS=targets_BS))
    return found


def _mean_over_samples(batch: RolloutBatch, x_BS: torch.Tensor) -> torch.Tensor:
    numbers_BS = batch.sums_over_samples((batch.targets_BS != IGNORE_INDEX).to(x_BS.dtype))
    return batch.sums_over_samples(x_BS) / numbers_BS.clamp(min=1)


_RATIOS: dict[str, Callable[[RolloutBatch, torch.Tensor], torch.Tensor]] = {
    "none": lambda _, d_BS: torch.ones_like(d_BS),
    "token": lambda _, d_BS: _clamped(d_BS).exp(),
    "sequence": lambda batch, d_BS: _clamped(batch.sums_over_samples(d_BS)).exp(),
    "geometric": lambda batch, d_BS: _clamped(_mean_over_samples(batch, d_BS)).exp(),
}
"""Ratios of probabilities from the differences of targets' log-probabilities, 0 elsewhere."""


# ---- losses -------------------------------------------------------------------------------------


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


def _policy_loss(
    logprob: torch.Tensor,
    old: torch.Tensor,
    log_ratio: torch.Tensor,
    advantage: torch.Tensor,
    settings: RlSection,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each token's loss, its ratio, and whether clipping has changed its gradient.

    ``logprob`` is differentiable, and so is ``log_ratio``, unless old is lp itself; [B, S] each.
    """
    low, high = settings.clip_range
    if settings.policy == "reinforce":
        ratio = log_ratio.detach().exp()
        return -advantage * logprob, ratio, torch.zeros_like(ratio, dtype=torch.bool)
    if settings.policy == "cispo":
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(low, high)
        return -weight * advantage * logprob, ratio, weight != ratio
    ratio = log_ratio.exp()
    divergence = _DIVERGENCES.get(settings.policy)
    shift = ratio if divergence is None else divergence(logprob.detach(), old)
    is_clipped = torch.where(advantage > 0, shift > high, (shift < low) & (advantage < 0))
    if divergence is None:
        gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    else:
        gain = torch.where(is_clipped, 0, ratio * advantage)
    if settings.dual_clip is not None:
        is_past = (advantage < 0) & (ratio > settings.dual_clip)
        gain = torch.where(is_past, settings.dual_clip * advantage, gain)
        is_clipped = is_clipped | is_past
    return -gain, ratio, is_clipped


_KL_ESTIMATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(-d) + d,
}
"""Estimates of KL(p || q), from d = log p / q of a token that was drawn from p."""


def kl_estimate(name: str, logprob: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Estimate each token's KL(p || q), from log-probabilities under p, which drew it, and q."""
    return _KL_ESTIMATES[name](_clamped(logprob - other))


def _divergence(
    logits_TK: torch.Tensor, lse_T: torch.Tensor, teacher_TK: torch.Tensor
) -> torch.Tensor:
    """Return each token's KL(policy || teacher) over K tokens and all others as one, [T]."""
    logprobs_TK = logits_TK - lse_T[:, None]
    p_TK = logprobs_TK.exp()
    least = torch.finfo(p_TK.dtype).eps
    rest_T, theirs_T = ((1 - x.sum(1)).clamp(min=least) for x in (p_TK, teacher_TK.exp()))
    apart_T = (p_TK * (logprobs_TK - teacher_TK)).sum(1)
    return apart_T + rest_T * (rest_T / theirs_T).log()


@dataclass(frozen=True)
class PolicyObjective:
    """The loss that ``Engine.forward_backward`` minimises, but for the routers' auxiliary losses,
    which :class:`moetrain.train.objectives.Pretraining` adds.

    Terms with a coefficient: ``policy``, ``kl_penalty`` (with ``rl.kl_coef``, in the loss),
    ``entropy_bonus`` (with ``rl.entropy_coef``) and ``teacher_kl`` (with ``rl.teacher_top_k``).
    Statistics, terms of coefficient 0 that are means over the global batch's trained tokens:
    ``entropy``, ``ratio``, ``ratio_square``, ``clip_share``, ``moved`` (k3 of the policy from what
    the ratio divides by), ``mismatch`` (k3 of the trainer's probabilities from the rollout's),
    ``kl`` (k3 from the reference), ``teacher_kl`` (k1 of the rollout from the teacher) and
    ``weight`` (importance), where the batches have them.
    """

    settings: RlSection
    balances = False

    def sizes(self, batches: Sequence[RolloutBatch]) -> dict[str, int]:
        return {
            "targets": sum(int((b.targets_BS != IGNORE_INDEX).sum()) for b in batches),
            "samples": sum(b.num_trained_samples() for b in batches),
        }

    def terms(
        self,
        model: Transformer,
        outputs: Outputs,
        batch: RolloutBatch,
        sizes: Mapping[str, torch.Tensor],
    ) -> dict[str, Term]:
        """Compute a batch's terms; ValueError if it lacks a ``reference_BS`` that they need."""
        settings = self.settings
        losses = token_losses(model, outputs.hidden_BSD, batch, settings.temperature)
        logprob, entropy = (x.view_as(batch.targets_BS) for x in (-losses.loss_T, losses.entropy_T))
        old = {
            "current": logprob.detach(),
            "proximal": batch.logprobs_BS if batch.proximal_BS is None else batch.proximal_BS,
            "rollout": batch.logprobs_BS,
        }[settings.ratio]
        trained = (batch.targets_BS != IGNORE_INDEX).to(logprob.dtype)
        num_trained = batch.sums_over_samples(trained).clamp(min=1)
        log_ratio = _clamped(logprob - old)
        if settings.policy == "gspo":
            mean = batch.sums_over_samples(trained * log_ratio.detach()) / num_trained
            # The second part is 0, and brings the gradient.
            log_ratio = mean + logprob - logprob.detach()
        advantage = batch.advantages_BS.to(logprob.dtype)
        if batch.teacher_BS is not None:
            apart = kl_estimate("k1", batch.logprobs_BS, batch.teacher_BS)
            advantage = advantage - settings.teacher_coef * apart
        loss, ratio, is_clipped = _policy_loss(logprob, old, log_ratio, advantage, settings)
        parts = {
            "token": sizes["targets"],
            "sequence": num_trained * sizes["samples"],
            "fixed": settings.max_tokens * sizes["samples"],
        }
        shares = trained / parts[settings.aggregation]
        weighted = loss if batch.weights_BS is None else batch.weights_BS * loss
        terms = {"policy": Term((shares * weighted).sum())}
        if settings.kl_coef and settings.kl_in == "loss":
            if batch.reference_BS is None:
                problem = f"rl.kl_coef is {settings.kl_coef}, and a batch has no reference_BS"
                raise ValueError(f"PolicyObjective: {problem} to stay near to")
            kl = kl_estimate(settings.kl, logprob, batch.reference_BS)
            terms["kl_penalty"] = Term((shares * kl).sum(), settings.kl_coef)
        if settings.entropy_coef:
            terms["entropy_bonus"] = Term((shares * entropy).sum(), -settings.entropy_coef)
        if batch.teacher_BS2K is not None:
            ids_TK, teacher_TK = batch.teacher_BS2K.flatten(0, 1).unbind(1)
            how = outputs.hidden_BSD.flatten(0, 1), model.head_weight, ids_TK.long()
            logits_TK = model.vocabulary.logits_of(*how) / settings.temperature
            kl = _divergence(logits_TK, losses.lse_T, teacher_TK).view_as(logprob)
            value = torch.where(trained > 0, shares * kl, 0).sum()
            terms["teacher_kl"] = Term(value, settings.teacher_coef)
        now, trainer = logprob.detach(), batch.proximal_BS
        seen = {
            "entropy": entropy,
            "ratio": ratio,
            "ratio_square": ratio.square(),
            "clip_share": is_clipped,
            "moved": kl_estimate("k3", old, now),
            "mismatch": kl_estimate("k3", batch.logprobs_BS, now if trainer is None else trainer),
        }
        if batch.reference_BS is not None:
            seen["kl"] = kl_estimate("k3", now, batch.reference_BS)
        if batch.teacher_BS is not None:
            seen["teacher_kl"] = kl_estimate("k1", batch.logprobs_BS, batch.teacher_BS)
        if batch.weights_BS is not None:
            seen["weight"] = batch.weights_BS
        for name, x in seen.items():
            terms[name] = Term((trained * x.detach() / sizes["targets"]).sum(), 0.0)
        return {k: t._replace(value=t.value * outputs.share) for k, t in terms.items()}
