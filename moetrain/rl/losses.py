"""Losses of reinforcement learning, as data: :class:`PolicyObjective` puts together what
``RlSection`` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from moetrain.config import Config
from moetrain.config_rl import RlSection
from moetrain.loss import Outputs, Term
from moetrain.models import Architecture, Transformer
from moetrain.rl.rows import RolloutBatch


@dataclass(frozen=True)
class PolicyObjective:
    """What ``Engine.forward_backward`` minimises; a :class:`moetrain.loss.Objective`.

    Terms with a coefficient: ``policy``, ``kl_penalty`` (with ``rl.kl_coef``, in the loss),
    ``entropy_bonus`` (with ``rl.entropy_coef``), and the routers' auxiliary losses. Statistics,
    terms of coefficient 0 that are means over the global batch's trained tokens: ``entropy``,
    ``ratio``, ``ratio_square``, ``clip_share``, ``moved`` (k3 of the policy from what the ratio
    divides by), ``mismatch`` (k3 of the trainer's probabilities from the rollout's), ``kl`` (k3
    from the reference, where the batch has it).
    """

    settings: RlSection

    @classmethod
    def of(cls, config: Config, arch: Architecture) -> Self:
        """What ``config`` asks for, and ``arch`` where that leaves it open."""
        raise NotImplementedError

    @property
    def balances(self) -> bool:
        raise NotImplementedError

    def sizes(self, batches: Sequence[RolloutBatch]) -> dict[str, int]:
        raise NotImplementedError

    def terms(
        self,
        model: Transformer,
        outputs: Outputs,
        batch: RolloutBatch,
        sizes: Mapping[str, torch.Tensor],
    ) -> dict[str, Term]:
        raise NotImplementedError
