"""Advantages and losses of reinforcement learning, as the settings of ``rl`` choose them.

A trajectory that failed is left out before anything is averaged, so it does not affect the others.
With ``rl.overlong drop`` the same holds for a trajectory that was cut off. With
``rl.overlong_buffer`` rewards are lowered for length (:func:`length_reward`). Rewards become
advantages within groups (:mod:`moetrain.losses.advantages`). A group without information,
such as one with equal rewards, is not trained unless there is a teacher, and no denominator counts
it. Means over the batch are means over the trained trajectories.

The loss of a trained token (:mod:`moetrain.losses.policy`) is multiplied by its importance weight,
a constant. Tokens that a mask leaves out are not trained (:func:`corrected`). The policy's ratio
compares the log-probability of a token with an old one, which the setting ``ratio`` chooses:

    current    the same log-probability, as a constant
    proximal   the trainer's before the update (arXiv 2110.00641)
    rollout    generation's

The loss may have more terms, each with its coefficient: an estimate of the KL from the reference,
minus the entropy, and the KL from the teacher over the teacher's k likeliest tokens (on-policy
distillation, arXiv 2306.13649). With ``teacher_top_k`` 0 the teacher changes the advantages
instead: A - ``teacher_coef`` (old - teacher), where old is generation's log-probability. The loss
is a weighted sum over tokens. A token's weight depends only on the global batch:

    token      1 / trained tokens                               DAPO
    sequence   1 / (trained tokens of the sample * samples)     GRPO
    fixed      1 / (max_tokens * samples)                       Dr. GRPO, arXiv 2503.20783

Here "samples" counts those with at least one trained token. So the split into micro-batches, rows
and ranks does not change the result.

The log-probability and entropy of every target come from the logits h @ w^T / temperature as
logits[target] - lse and lse - sum(p * logits), over vocabulary chunks and vocabulary shards.

Left out on purpose: log-probabilities renormalised over the tokens that a top-k or top-p filter
kept. Training would need the logits of every kept token again. With filters the loss uses
log-probabilities of the whole distribution.

Legend: B rows, S tokens of a row, T tokens, D model width, V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from moetrain.config.rl import RlSection
from moetrain.data.packing import IGNORE_INDEX
from moetrain.losses.advantages import batch_advantages, group_advantages, spread
from moetrain.losses.policy import POLICY_LOSSES, PolicyTokens, kl_estimate, kl_of_likeliest, ratios
from moetrain.models.transformer import Transformer
from moetrain.rl.trajectories import Trajectory
from moetrain.train.objectives import Outputs, Sizes, Term, token_losses
from moetrain.train.samples import RolloutBatch

# ---- advantages ---------------------------------------------------------------------------------


def length_reward(num_written: int, settings: RlSection) -> float:
    """Return what a trajectory of ``num_written`` tokens of the policy has added to its reward.

    This is the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), with
    N = ``rl.overlong_buffer``: 0 up to ``rl.max_tokens`` - N tokens, and from there down to -1 at
    ``rl.max_tokens``. A resumed run may have lowered ``rl.max_tokens``; longer trajectories have
    -1 too.
    """
    if not settings.overlong_buffer:
        return 0.0
    free = settings.max_tokens - settings.overlong_buffer
    return min(0.0, max(-1.0, (free - num_written) / settings.overlong_buffer))


class _Advantages(NamedTuple):
    """The advantages of trajectories, in their order."""

    values: list[float | None]
    """None: the trajectory is not trained."""
    left_out: Counter[str]
    """Number of trajectories that are not trained, by reason: a fault, ``overlong``,
    ``not_finite`` (the reward), ``no_variance`` (all rewards of the group are equal), or ``alone``
    (in its group)."""
    spread: float
    """Standard deviation of the trained advantages; 0 if there is only one."""


def advantages(
    trajectories: Sequence[Trajectory], settings: RlSection, kls: Sequence[float] | None = None
) -> _Advantages:
    """Compute the advantage of every trajectory of the *global* batch, those of all ranks.

    ``kls``: the KL estimate of each trajectory, summed over its tokens. ``rl.kl_coef`` times this
    is subtracted from its reward. None: nothing is subtracted.
    """
    # 1. Rewards, and the trajectories that have none.
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
    # 2. Advantages within groups.
    for members in groups.values():
        found = group_advantages(settings.advantage, values[members])
        if found is None and settings.teacher is None:  # a teacher teaches without rewards too
            for i in members:
                reasons[i] = "alone" if len(members) == 1 else "no_variance"
        values[members] = 0.0 if found is None else found
    for i, t in enumerate(trajectories):
        if settings.overlong == "mask" and t.is_overlong and reasons[i] is None:
            reasons[i] = "overlong"
    # 3. Advantages over the batch.
    trained = np.flatnonzero([reason is None for reason in reasons])
    values[trained] = batch_advantages(settings.advantage, values[trained])
    return _Advantages(
        [float(v) if r is None else None for v, r in zip(values, reasons, strict=True)],
        Counter(reason for reason in reasons if reason is not None),
        spread(values[trained]),
    )


# ---- importance weights -------------------------------------------------------------------------


def corrected(
    batches: Sequence[RolloutBatch], proximal: Sequence[torch.Tensor], settings: RlSection
) -> list[RolloutBatch]:
    """Add the trainer's log-probabilities and importance weights to ``batches``, and mask tokens.

    If generation's probabilities differ from the trainer's, the samples come from another policy
    than the one that is trained. The importance weight corrects for that. It is a ratio of the
    trainer's to generation's probabilities, bounded from above. ``rl.importance_of`` chooses the
    ratio: that of the token, or one of its whole sample (:func:`moetrain.losses.policy.ratios`).
    The mask leaves out tokens whose ratio, of the kind ``rl.mask``, is outside ``mask_range``. Such
    tokens lose their targets, so no denominator counts them.

    ``proximal``: each batch's log-probabilities [B, S] under the trainer's weights
    (:func:`moetrain.train.preferences.score`).
    """
    low, high = settings.mask_range
    found = []
    for batch, proximal_BS in zip(batches, proximal, strict=True):
        batch = batch._replace(proximal_BS=proximal_BS)
        has_target_BS = batch.targets_BS != IGNORE_INDEX
        apart_BS = torch.where(has_target_BS, proximal_BS - batch.logprobs_BS, 0)
        numbers_BS = batch.sums_over_samples(has_target_BS.to(apart_BS.dtype))
        sums = batch.sums_over_samples
        mask_ratios_BS = ratios(settings.mask, apart_BS, numbers_BS, sums)
        is_kept_BS = (mask_ratios_BS >= low) & (mask_ratios_BS <= high)
        if settings.importance_of != "none":
            weights_BS = ratios(settings.importance_of, apart_BS, numbers_BS, sums)
            weights_BS = weights_BS.clamp(max=settings.importance_high)
            batch = batch._replace(weights_BS=torch.where(is_kept_BS, weights_BS, 0))
        targets_BS = torch.where(is_kept_BS, batch.targets_BS, IGNORE_INDEX)
        found.append(batch._replace(targets_BS=targets_BS))
    return found


# ---- losses -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyObjective:
    """The policy's loss for ``Engine.forward_backward``.

    :class:`moetrain.train.objectives.Pretraining` adds the routers' auxiliary losses.

    Terms of the loss: ``policy``, ``kl_penalty`` (with ``rl.kl_coef``, in the loss),
    ``entropy_bonus`` (with ``rl.entropy_coef``) and ``teacher_kl`` (with ``rl.teacher_top_k``).
    Statistics are terms of coefficient 0, means over the global batch's trained tokens:
    ``entropy``, ``ratio``, ``ratio_square``, ``clip_share``, ``moved`` (k3 of the policy from the
    old log-probabilities), ``mismatch`` (k3 of the trainer's probabilities from the rollout's),
    and, if the batches have them, ``kl`` (k3 from the reference), ``teacher_kl`` (k1 of the rollout
    from the teacher) and ``weight`` (importance).
    """

    settings: RlSection
    balances = False

    def sizes(self, batches: Sequence[RolloutBatch]) -> dict[str, int]:
        return {
            "targets": sum(int((b.targets_BS != IGNORE_INDEX).sum()) for b in batches),
            "samples": sum(b.num_trained_samples() for b in batches),
        }

    def terms(
        self, model: Transformer, outputs: Outputs, batch: RolloutBatch, sizes: Sizes
    ) -> dict[str, Term]:
        """Return a batch's terms; ValueError: it lacks a ``reference_BS`` that they need."""
        settings = self.settings
        losses = token_losses(model, outputs.hidden_BSD, batch, settings.temperature)
        logprob, entropy = (x.view_as(batch.targets_BS) for x in (-losses.loss_T, losses.entropy_T))
        trained = (batch.targets_BS != IGNORE_INDEX).to(logprob.dtype)
        num_trained = batch.sums_over_samples(trained).clamp(min=1)
        old = {
            "current": logprob.detach(),
            "proximal": batch.logprobs_BS if batch.proximal_BS is None else batch.proximal_BS,
            "rollout": batch.logprobs_BS,
        }[settings.ratio]

        # 1. Each token's loss of the policy.
        advantage = batch.advantages_BS.to(logprob.dtype)
        if batch.teacher_BS is not None:
            apart = kl_estimate("k1", batch.logprobs_BS, batch.teacher_BS)
            advantage = advantage - settings.teacher_coef * apart
        low, high = settings.clip_range
        tokens = PolicyTokens(
            logprob,
            old,
            advantage,
            low,
            high,
            dual_clip=settings.dual_clip,
            mean_over_sample=lambda x: batch.sums_over_samples(trained * x) / num_trained,
        )
        policy = POLICY_LOSSES[settings.policy](tokens)

        # 2. The loss: sums over tokens by their shares.
        denominators = {
            "token": sizes["targets"],
            "sequence": num_trained * sizes["samples"],
            "fixed": settings.max_tokens * sizes["samples"],
        }
        shares = trained / denominators[settings.aggregation]
        weighted = policy.loss if batch.weights_BS is None else batch.weights_BS * policy.loss
        terms = {"policy": Term((shares * weighted).sum())}
        if settings.kl_coef and settings.kl_in == "loss":
            if batch.reference_BS is None:
                problem = f"rl.kl_coef is {settings.kl_coef}, but a batch has no reference_BS"
                raise ValueError(f"PolicyObjective: {problem}")
            kl = kl_estimate(settings.kl, logprob, batch.reference_BS)
            terms["kl_penalty"] = Term((shares * kl).sum(), settings.kl_coef)
        if settings.entropy_coef:
            terms["entropy_bonus"] = Term((shares * entropy).sum(), -settings.entropy_coef)
        if batch.teacher_BS2K is not None:
            ids_TK, teacher_TK = batch.teacher_BS2K.flatten(0, 1).unbind(1)
            hidden_TD = outputs.hidden_BSD.flatten(0, 1)
            logits_TK = model.vocabulary.logits_of(hidden_TD, model.head_weight, ids_TK.long())
            kl = kl_of_likeliest(
                logits_TK / settings.temperature, losses.lse_T, teacher_TK, trained.flatten() > 0
            )
            value = (shares * kl.view_as(logprob)).sum()
            terms["teacher_kl"] = Term(value, settings.teacher_coef)

        # 3. Statistics.
        now, trainer = logprob.detach(), batch.proximal_BS
        seen = {
            "entropy": entropy,
            "ratio": policy.ratio,
            "ratio_square": policy.ratio.square(),
            "clip_share": policy.is_clipped,
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
