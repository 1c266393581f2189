"""The losses that clients name, as the ``tinker`` SDK defines them: sums over all positions.

Their formulas are :mod:`moetrain.kernels.loss.policy`'s, where a target's weight (cross-entropy) or
advantage (the others) is A. There are no denominators and no auxiliary losses: a loss is the
client's alone, and chunks of a batch add up to it.

Legend: B rows, S tokens of a row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from moetrain.config.sources import shortened
from moetrain.data.packing import IGNORE_INDEX
from moetrain.kernels.loss.policy import clamped, kl_estimate, policy_loss
from moetrain.models.transformer import Transformer
from moetrain.rl.rows import RolloutBatch
from moetrain.train.objectives import Outputs, Sizes, Term, token_losses

_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_LOSSES: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "cross_entropy": ("reinforce", {}),
    "importance_sampling": ("clip", {}),
    "ppo": ("clip", _CLIPS),
    "cispo": ("cispo", _CLIPS),
    "dro": ("reinforce", {"beta": 0.05}),
}
"""The formula of each loss, and its settings with their defaults."""


@dataclass(frozen=True)
class ClientLoss:
    """A loss; log-probabilities of targets that it has seen are collected on the way."""

    formula: str
    low: float = 0.0
    high: float = math.inf
    beta: float = 0.0
    """Coefficient of the k2 estimate of the KL from what sampled the targets."""
    others: tuple[Self, ...] = ()
    """Losses of further jobs; the rows are in equal parts, of which each has one, in order."""
    seen: list[torch.Tensor] = field(default_factory=list, compare=False)
    """Log-probabilities [B, S] of the batches since it was emptied."""
    balances = False

    @classmethod
    def of(cls, name: str, config: Mapping[str, float]) -> Self:
        """Raise ValueError for a loss, or a setting of it, that there is not."""
        if name not in _LOSSES:
            raise ValueError(f"loss_fn {shortened(name)} is not one of {', '.join(_LOSSES)}")
        formula, known = _LOSSES[name]
        if odd := sorted(set(config) - set(known)):
            has = f"has {', '.join(known)}" if known else "has none"
            raise ValueError(f"loss_fn_config: {shortened(odd[0])} is unknown; loss {name!r} {has}")
        values = {**known, **config}
        low, high, beta = map(values.get, (*_CLIPS, "beta"), (0.0, math.inf, 0.0))
        if not 0 <= low <= high or beta < 0:
            raise ValueError(f"loss_fn_config: {shortened(values)} is out of range for {name!r}")
        return cls(formula, low, high, beta)

    def sizes(self, batches: Sequence[RolloutBatch]) -> dict[str, int]:
        return {"targets": sum(int((b.targets_BS != IGNORE_INDEX).sum()) for b in batches)}

    def terms(
        self, model: Transformer, outputs: Outputs, batch: RolloutBatch, sizes: Sizes
    ) -> dict[str, Term]:
        losses = token_losses(model, outputs.hidden_BSD, batch)
        logprob_BS = -losses.loss_T.view_as(batch.targets_BS)
        self.seen.append(logprob_BS.detach())
        losses = (self, *self.others)
        given = logprob_BS, batch.logprobs_BS, batch.advantages_BS, batch.targets_BS
        parts = zip(losses, *(x_BS.chunk(len(losses)) for x_BS in given), strict=True)
        totals = [loss._total(*part) for loss, *part in parts]
        return {f"loss.{i}": Term(total * outputs.share) for i, total in enumerate(totals)}

    def _total(self, *given: torch.Tensor) -> torch.Tensor:
        logprob_BS, old_BS, factor_BS, targets_BS = given
        how = logprob_BS, old_BS, clamped(logprob_BS - old_BS), factor_BS.to(logprob_BS.dtype)
        loss_BS, *_ = policy_loss(self.formula, *how, (self.low, self.high), None)
        if self.beta:
            loss_BS = loss_BS + self.beta * kl_estimate("k2", logprob_BS, old_BS)
        return torch.where(targets_BS != IGNORE_INDEX, loss_BS, 0).sum()
