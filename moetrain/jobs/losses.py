"""The losses that clients name, as the ``tinker`` SDK defines them: sums over all positions.

For a target with log-probability lp, log-probability old when it was sampled, advantage A, and
r = exp(lp - old):

    cross_entropy        -w lp                    w: the target's weight, of either sign
    importance_sampling  -r A
    ppo                  -min(r A, clip(r) A)     arXiv 1707.06347
    cispo                -clip(r) A lp, clip(r) as a constant             arXiv 2506.13585
    dro                  -(A lp - beta / 2 (lp - old)^2)                  arXiv 2405.19107

with r clipped to [clip_low_threshold, clip_high_threshold]. There are no denominators and no
auxiliary losses: a loss is the client's alone, and chunks of a batch add up to it.

Legend: B rows, S tokens of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from moetrain.config.sources import shortened
from moetrain.data.packing import IGNORE_INDEX
from moetrain.models.transformer import Transformer
from moetrain.rl.rows import RolloutBatch
from moetrain.train.objectives import Outputs, Sizes, Term, token_losses

_LOG_RATIO_LIMIT = 20.0
"""Nats to which the logarithm of a ratio is clamped: one token of exp(89) makes a loss infinite."""
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SETTINGS: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": _CLIPS,
    "cispo": _CLIPS,
    "dro": {"beta": 0.05},
}
"""Losses, and the settings of each with their defaults."""


@dataclass(frozen=True)
class ClientLoss:
    """A loss by name; log-probabilities of targets that it has seen are collected on the way."""

    name: str
    low: float = 0.0
    high: float = 0.0
    beta: float = 0.0
    seen: list[torch.Tensor] = field(default_factory=list, compare=False)
    """Log-probabilities [B, S] of the batches since it was emptied."""
    balances = False

    @classmethod
    def of(cls, name: str, config: Mapping[str, float]) -> Self:
        """Raise ValueError for a loss, or a setting of it, that there is not."""
        if name not in _SETTINGS:
            raise ValueError(f"loss_fn {shortened(name)} is not one of {', '.join(_SETTINGS)}")
        known = _SETTINGS[name]
        if odd := sorted(set(config) - set(known)):
            has = f"has {', '.join(known)}" if known else "has none"
            raise ValueError(f"loss_fn_config: {shortened(odd[0])} is unknown; loss {name!r} {has}")
        values = {**known, **config}
        low, high = (values.get(key, 0.0) for key in _CLIPS)
        if not 0 <= low <= high or values.get("beta", 0.0) < 0:
            raise ValueError(f"loss_fn_config: {shortened(values)} is out of range for {name!r}")
        return cls(name, low, high, values.get("beta", 0.0))

    def sizes(self, batches: Sequence[RolloutBatch]) -> dict[str, int]:
        return {"targets": sum(int((b.targets_BS != IGNORE_INDEX).sum()) for b in batches)}

    def terms(
        self, model: Transformer, outputs: Outputs, batch: RolloutBatch, sizes: Sizes
    ) -> dict[str, Term]:
        losses = token_losses(model, outputs.hidden_BSD, batch)
        logprob_BS = -losses.loss_T.view_as(batch.targets_BS)
        self.seen.append(logprob_BS.detach())
        factor_BS = batch.advantages_BS.to(logprob_BS.dtype)
        loss_BS = self.loss(logprob_BS, batch.logprobs_BS, factor_BS)
        is_target_BS = batch.targets_BS != IGNORE_INDEX
        return {"loss": Term(torch.where(is_target_BS, loss_BS, 0).sum() * outputs.share)}

    def loss(self, logprob: torch.Tensor, old: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Return each target's loss; ``factor`` is its weight or its advantage. Shapes agree."""
        if self.name == "cross_entropy":
            return -factor * logprob
        if self.name == "dro":
            return -(factor * logprob - self.beta / 2 * (logprob - old).square())
        ratio = (logprob - old).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
        if self.name == "importance_sampling":
            return -ratio * factor
        clipped = ratio.clamp(self.low, self.high)
        if self.name == "cispo":
            return -clipped.detach() * factor * logprob
        return -torch.minimum(ratio * factor, clipped * factor)
