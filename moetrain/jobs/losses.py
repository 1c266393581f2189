"""The losses that clients name, and the objective of a pass that jobs share.

The names and their settings are those of the ``tinker`` SDK (0.38); the formulas are those of
:mod:`moetrain.losses.policy`.

Legend: B rows, S tokens of a row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from moetrain.config.sources import shortened
from moetrain.data.packing import IGNORE_INDEX
from moetrain.losses.policy import policy_total
from moetrain.models.transformer import Transformer
from moetrain.train.objectives import Outputs, Sizes, Term, token_losses
from moetrain.train.samples import RolloutBatch

CLIP_THRESHOLDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Bounds of the ratio by the names of loss_fn_config, with their defaults."""
_LOSSES: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "cross_entropy": ("reinforce", {}),
    "importance_sampling": ("clip", {}),
    "ppo": ("clip", CLIP_THRESHOLDS),
    "cispo": ("cispo", CLIP_THRESHOLDS),
    "dro": ("reinforce", {"beta": 0.05}),
}
"""For each loss its formula in :mod:`moetrain.losses.policy`, and its settings with defaults."""


@dataclass(frozen=True)
class ClientLoss:
    """A loss that clients name, as the ``tinker`` SDK defines it: a sum over all positions.

    The formulas are those of :mod:`moetrain.losses.policy`, where A is a target's weight (in
    cross-entropy) or its advantage (in the others).
    """

    formula: str
    low: float = 0.0
    """Lower bound of the ratio."""
    high: float = math.inf
    beta: float = 0.0
    """Coefficient of the k2 estimate of the KL from the policy that sampled the targets."""

    @classmethod
    def of(cls, name: str, config: Mapping[str, float]) -> Self:
        """Return the loss ``name``.

        Raises ValueError: the loss or a setting is unknown, or a value is out of range.
        """
        if name not in _LOSSES:
            raise ValueError(f"loss_fn {shortened(name)} is not one of {', '.join(_LOSSES)}")
        formula, known = _LOSSES[name]
        if odd := sorted(set(config) - set(known)):
            has = f"has {', '.join(known)}" if known else "has none"
            raise ValueError(f"loss_fn_config: {shortened(odd[0])} is unknown; loss {name!r} {has}")
        values = {**known, **config}
        loss = cls(
            formula,
            low=values.get("clip_low_threshold", 0.0),
            high=values.get("clip_high_threshold", math.inf),
            beta=values.get("beta", 0.0),
        )
        if not 0 <= loss.low <= loss.high or loss.beta < 0:
            raise ValueError(f"loss_fn_config: {shortened(values)} is out of range for {name!r}")
        return loss


@dataclass(frozen=True)
class JobsObjective:
    """The objective of a pass that jobs share: each has an equal part of the rows, in order.

    There are no denominators and no auxiliary losses, so the chunks of a client's batch add up to
    the whole batch's loss.
    """

    losses: Sequence[ClientLoss]
    """The loss of each job."""
    logprobs: list[torch.Tensor] = field(default_factory=list, compare=False)
    """Log-probabilities of the targets, [B, S] for each batch since the list was emptied."""
    balances = False

    def sizes(self, batches: Sequence[RolloutBatch]) -> dict[str, int]:
        return {"targets": sum(int((b.targets_BS != IGNORE_INDEX).sum()) for b in batches)}

    def terms(
        self, model: Transformer, outputs: Outputs, batch: RolloutBatch, sizes: Sizes
    ) -> dict[str, Term]:
        """Return the sum of each job's losses, ``loss.0`` and so on."""
        losses = token_losses(model, outputs.hidden_BSD, batch)
        logprob_BS = -losses.loss_T.view_as(batch.targets_BS)
        self.logprobs.append(logprob_BS.detach())
        num_jobs, terms = len(self.losses), dict[str, Term]()
        is_target_BS = batch.targets_BS != IGNORE_INDEX
        tensors = (logprob_BS, batch.logprobs_BS, batch.advantages_BS, is_target_BS)
        parts = zip(*(x_BS.chunk(num_jobs) for x_BS in tensors), strict=True)
        for i, (loss, (logprob, old, advantage, is_target)) in enumerate(
            zip(self.losses, parts, strict=True)
        ):
            total = policy_total(
                loss.formula,
                logprob=logprob,
                old=old,
                advantage=advantage,
                is_target=is_target,
                bounds=(loss.low, loss.high),
                beta=loss.beta,
            )
            terms[f"loss.{i}"] = Term(total * outputs.share)
        return terms
