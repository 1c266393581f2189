"""Objectives: what a model's hidden states are to become, as named shares of a global mean.

An objective names *terms*. Every term is a sum over this micro-batch's tokens divided by a number
of the whole global batch, so that losses and gradients add up to the global batch's however it is
split: a step's loss is the sum of every micro-batch's on every rank. What is counted for those
denominators (:meth:`Objective.sizes`) is known on the host before the step runs.

A new term is a line in an objective's ``terms``, or an objective of its own; who runs micro-batches
(:mod:`moetrain.train.engine`) and who logs sums knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeVar

import torch

from moetrain.config import Config
from moetrain.models.architecture import Architecture
from moetrain.models.moe import RoutingStats, load_balancing_loss, router_z_loss
from moetrain.models.transformer import Inputs, Transformer


class MicroBatch(Protocol):
    """What goes through the model at once; objectives find further fields on their own kind."""

    @property
    def inputs(self) -> Inputs:
        """What the model sees of it."""
        ...

    def to(self, device: torch.device) -> Self:
        """The same on ``device``, without waiting for it."""
        ...


class Targeted(MicroBatch, Protocol):
    """A micro-batch of tokens that each predict another."""

    @property
    def targets_BS(self) -> torch.Tensor:
        """int64, what each position predicts; below 0: nothing."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that are no pads."""
        ...


class ExpertLoad(NamedTuple):
    """How often each expert was chosen in the part of a global batch that is balanced together."""

    counts_LE: torch.Tensor
    """int32: (token, slot) pairs that chose each expert."""
    num_tokens: torch.Tensor
    """int64 (0-d): tokens of that part, one at least."""


class Outputs(NamedTuple):
    """What the model made of one micro-batch."""

    hidden_BSD: torch.Tensor
    """After the final norm; for the functions of ``model.vocabulary``."""
    routing: RoutingStats | None
    """Of this micro-batch on this rank; None: no MoE layer."""
    load: ExpertLoad | None
    """None: no MoE layer, or an objective that does not balance."""
    share: float = 1.0
    """What a term made of hidden states or token losses is to be multiplied by: 1 / tensor parallel
    ranks, each of which has all of them. ``vocabulary.loss_sum`` is such a share already."""


class Term(NamedTuple):
    """One summand of what is minimised, ``coefficient * value``."""

    value: torch.Tensor
    """0-d fp32, differentiable: this micro-batch's share of the global batch's mean."""
    coefficient: float = 1.0


B_contra = TypeVar("B_contra", bound=MicroBatch, contravariant=True)


class Objective(Protocol[B_contra]):
    """Turns hidden states and the head's matrix into named terms."""

    @property
    def balances(self) -> bool:
        """Whether a term needs ``Outputs.load``, which has to travel between ranks."""
        ...

    def sizes(self, batches: Sequence[B_contra]) -> dict[str, int]:
        """This rank's share of every denominator (one at least), counted on the host."""
        ...

    def terms(
        self,
        model: Transformer,
        outputs: Outputs,
        batch: B_contra,
        sizes: Mapping[str, torch.Tensor],
    ) -> dict[str, Term]:
        """The terms by name: the same names, at least one, for every micro-batch and rank.

        Args:
            batch: on the device.
            sizes: of all ranks (0-d, on the device), one at least.
        """
        ...


class CrossEntropy:
    """The mean cross-entropy of the targets, nats a token."""

    balances = False

    def sizes(self, batches: Sequence[Targeted]) -> dict[str, int]:
        return {"targets": sum(int((b.targets_BS >= 0).sum()) for b in batches)}

    def terms(
        self,
        model: Transformer,
        outputs: Outputs,
        batch: Targeted,
        sizes: Mapping[str, torch.Tensor],
    ) -> dict[str, Term]:
        targets_T = batch.targets_BS.flatten()
        # The weight is in there rather than on the result: the gradients are then rounded once.
        weights_T = torch.ones_like(targets_T, dtype=torch.float32) * (1 / sizes["targets"])
        hidden_TD = outputs.hidden_BSD.flatten(0, 1)
        loss = model.vocabulary.loss_sum(hidden_TD, model.head_weight, targets_T, weights_T)
        return {"cross_entropy": Term(loss.total)}


@dataclass(frozen=True)
class RouterLosses:
    """The routers' auxiliary losses, beside whatever else an objective is about."""

    load_balancing: float
    router_z: float
    is_pooled: bool
    """Whether all layers are balanced together: see :func:`moetrain.models.load_balancing_loss`."""

    @classmethod
    def of(cls, config: Config, arch: Architecture) -> Self:
        """What ``config`` asks for, and ``arch`` where that leaves it open."""
        moe = config.moe
        aux = arch.router_aux_loss_coef if moe.aux_loss_coef is None else moe.aux_loss_coef
        return cls(aux, moe.z_loss_coef, moe.pools_aux_loss(config.model.path))

    @property
    def balances(self) -> bool:
        return self.load_balancing > 0

    def router_terms(self, outputs: Outputs, num_tokens: torch.Tensor) -> dict[str, Term]:
        """Those that are on; ``num_tokens`` of the global batch are no pads (0-d)."""
        terms, routing, load = {}, outputs.routing, outputs.load
        if routing is None:
            return terms
        if load is not None:
            balance = load_balancing_loss(
                load.counts_LE, routing.prob_sum_LE, load.num_tokens, pooled=self.is_pooled
            )
            # Of a part of the global batch: weighted by its share of the tokens.
            share = load.num_tokens / num_tokens
            terms["load_balancing"] = Term(share * balance, self.load_balancing)
        if self.router_z > 0:
            z = router_z_loss(routing.z_sum_L, num_tokens)
            terms["router_z"] = Term(z, self.router_z)
        return terms


class Pretraining(RouterLosses, CrossEntropy):
    """:class:`CrossEntropy`, and the routers' auxiliary losses with these coefficients."""

    def sizes(self, batches: Sequence[Targeted]) -> dict[str, int]:
        return {**super().sizes(batches), "tokens": sum(b.num_tokens for b in batches)}

    def terms(
        self,
        model: Transformer,
        outputs: Outputs,
        batch: Targeted,
        sizes: Mapping[str, torch.Tensor],
    ) -> dict[str, Term]:
        terms = super().terms(model, outputs, batch, sizes)
        return terms | self.router_terms(outputs, sizes["tokens"])


def routing_losses(routing: RoutingStats, *, pooled: bool) -> dict[str, float]:
    """The auxiliary losses by name, from the sums over a whole global batch.

    Whatever is trained (``moe.aux_loss_scope``, a coefficient of 0), these are the global batch's,
    so that runs compare. Waits for the device.
    """
    balance = load_balancing_loss(
        routing.counts_LE, routing.prob_sum_LE, routing.num_tokens, pooled=pooled
    )
    z = router_z_loss(routing.z_sum_L, routing.num_tokens)
    return {"load_balancing_loss": balance.item(), "router_z_loss": z.item()}
