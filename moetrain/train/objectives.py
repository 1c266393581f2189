"""Objectives: losses of a model's hidden states, as named terms with global denominators.

Each *term* is a sum over this micro-batch's tokens divided by a count of the whole global batch.
Losses and gradients thus add up to those of the global batch however it is split: a step's loss is
the sum over all micro-batches of all ranks. The denominators (:meth:`Objective.sizes`) are counted
on the host before the step runs.

A new term is a line in an objective's ``terms``, or an objective of its own. The engine that runs
micro-batches (:mod:`moetrain.train.engine`) and the loops that log sums know no term by name.

Legend: B rows, S tokens of a row, T = B * S, D model width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch

from moetrain.config import Config
from moetrain.kernels.vocabulary.linear_cross_entropy import TokenLosses
from moetrain.losses.balancing import RoutingStats, load_balancing_loss, router_z_loss
from moetrain.models.architecture import Architecture
from moetrain.models.layers import Selection
from moetrain.models.parts.indexer_loss import indexer_values
from moetrain.models.parts.multi_token import multi_token_loss, multi_token_sizes
from moetrain.models.transformer import Inputs, Transformer


class MicroBatch(Protocol):
    """Rows that go through the model at once; objectives may use further fields."""

    @property
    def inputs(self) -> Inputs: ...

    @property
    def targets_BS(self) -> torch.Tensor:
        """int64: the token that each position predicts; below 0: none."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        ...

    def to(self, device: torch.device) -> Self:
        """Return a copy on ``device``, without waiting for it."""
        ...


class Outputs(NamedTuple):
    """The model's outputs for one micro-batch."""

    hidden_BSD: torch.Tensor
    """Hidden states after the final norm, for the functions of ``model.vocabulary``."""
    routing: RoutingStats | None
    """Statistics of this micro-batch on this rank; None: the model has no MoE layer."""
    load_LE: torch.Tensor | None
    """int32: (token, slot) pairs that chose each expert, in the part of a global batch that is
    balanced together; None: the model has no MoE layer, or the objective does not balance."""
    share: float = 1.0
    """Factor of terms that are made of token losses or of few tokens' logits: 1 / the number of
    context and tensor parallel ranks, since each of these ranks computes such a term of all tokens.
    ``vocabulary.loss_sum`` contains this factor already."""
    multi_token: Sequence[torch.Tensor] = ()
    """Hidden states of the MTP blocks, by depth (:mod:`moetrain.models.parts.multi_token`)."""
    batch_sums: Mapping[str, torch.Tensor] = MappingProxyType({})
    """The sums of :func:`batch_sums_of` over all micro-batches of all ranks, 0-d fp64."""
    selections: Mapping[int, Selection] = MappingProxyType({})
    """The selections of keys of blocks with an indexer, by layer."""


class Term(NamedTuple):
    """One summand of the loss, ``coefficient * value``."""

    value: torch.Tensor
    """0-d fp32, differentiable: this micro-batch's share of the global batch's mean."""
    coefficient: float = 1.0


Sizes = Mapping[str, torch.Tensor]
"""Denominators by name."""
_B_contra = TypeVar("_B_contra", bound=MicroBatch, contravariant=True)


class Objective(Protocol[_B_contra]):
    """Turns hidden states and the head's matrix into named terms."""

    @property
    def balances(self) -> bool:
        """True: a term needs ``Outputs.load_LE``, which is summed over ranks."""
        ...

    def sizes(self, batches: Sequence[_B_contra]) -> dict[str, int]:
        """Count this rank's share of every denominator, on the host; there is at least one."""
        ...

    def terms(
        self, model: Transformer, outputs: Outputs, batch: _B_contra, sizes: Sizes
    ) -> dict[str, Term]:
        """Return the terms by name: at least one, and the same names for all micro-batches.

        Args:
            batch: on the device.
            sizes: denominators over all ranks, at least 1 (0-d, on the device).
        """
        ...


BatchSums = Callable[[Transformer, Outputs, Any], Mapping[str, torch.Tensor]]
"""Returns, for the outputs of one micro-batch and the batch itself, sums over its tokens: 0-d, by
name, the same names for all micro-batches."""


def batch_sums_of(objective: Objective[Any]) -> BatchSums | None:
    """Return the objective's method ``batch_sums``, which is optional; None: it has none.

    A loss that is no sum over tokens, such as one that compares each token with a mean over the
    batch, needs that mean before the first loss. The engine then computes these sums without
    gradients, adds them up over all micro-batches and ranks, and passes them to ``terms`` as
    ``outputs.batch_sums``. If a rank has several micro-batches, this costs another forward of each.
    """
    return getattr(objective, "batch_sums", None)


class CrossEntropy:
    """The mean cross-entropy of the targets, in nats a token."""

    balances = False

    def sizes(self, batches: Sequence[MicroBatch]) -> dict[str, int]:
        return {"targets": sum(int((b.targets_BS >= 0).sum()) for b in batches)}

    def terms(
        self, model: Transformer, outputs: Outputs, batch: MicroBatch, sizes: Sizes
    ) -> dict[str, Term]:
        targets_T = batch.targets_BS.flatten()
        # Weights are applied inside the loss, not to its result, so gradients are rounded once.
        weights_T = torch.ones_like(targets_T, dtype=torch.float32) * (1 / sizes["targets"])
        hidden_TD = outputs.hidden_BSD.flatten(0, 1)
        loss = model.vocabulary.loss_sum(hidden_TD, model.head_weight, targets_T, weights_T)
        return {"cross_entropy": Term(loss.total)}


def token_losses(
    model: Transformer, hidden_BSD: torch.Tensor, batch: MicroBatch, temperature: float = 1.0
) -> TokenLosses:
    """Return [T] loss, lse and entropy of every token, all 0 where there is no target."""
    what = hidden_BSD.flatten(0, 1), model.head_weight, batch.targets_BS.flatten()
    return model.vocabulary.token_losses(*what, temperature=temperature)


class RouterLoss(NamedTuple):
    """The weight of the routers' load-balancing loss, and its origin in words."""

    coefficient: float
    origin: str


def router_loss(config: Config, arch: Architecture, *, is_rl: bool) -> RouterLoss:
    """Decide whether routers are balanced: ``moe.aux_loss_coef``, or what the model asks for.

    A config.json asks for the loss by ``output_router_logits``, as in ``transformers``. Without the
    setting there is none in reinforcement learning (``is_rl``) and beside adapters, whose routers
    are frozen by default.
    """
    name, own = "moe.aux_loss_coef", arch.router_aux_loss_coef
    if config.moe.aux_loss_coef is not None:
        return RouterLoss(
            config.moe.aux_loss_coef, f"{name}: {config.origins.get(name, 'default')}"
        )
    if is_rl or config.lora.rank:
        kind = "in reinforcement learning" if is_rl else "with adapters (lora.rank)"
        return RouterLoss(0.0, f"{name} is unset, which means 0 {kind}")
    if config.model.path is None:
        return RouterLoss(own, f"{name} is unset: router_aux_loss_coef of model.preset")
    if arch.output_router_logits:
        return RouterLoss(own, f"{name} is unset: router_aux_loss_coef of the model's config.json")
    why = "the model's config.json does not set output_router_logits"
    return RouterLoss(0.0, f"{name} is unset, and {why}")


@dataclass(frozen=True)
class Pretraining:
    """The terms of an objective, the routers' auxiliary losses, and those of MTP and indexers."""

    load_balancing: float
    router_z: float
    is_pooled: bool
    """True: all layers are balanced together (:func:`load_balancing_loss`)."""
    own: Objective[Any]
    mtp_weight: float = 0.0
    mtp_layers: int = 0

    @classmethod
    def of(
        cls,
        config: Config,
        arch: Architecture,
        own: Objective[Any] | None = None,
        *,
        is_rl: bool = False,
    ) -> Self:
        """Add to ``own``, or cross-entropy, the losses that ``config``, or else ``arch``, wants.

        ``is_rl``: as :func:`router_loss`.
        """
        layers, aux = config.moe.aux_loss_layers, router_loss(config, arch, is_rl=is_rl)
        pooled = layers == "pooled" or (layers == "auto" and config.model.path is not None)
        return cls(
            load_balancing=aux.coefficient,
            router_z=config.moe.z_loss_coef,
            is_pooled=pooled,
            own=own or CrossEntropy(),
            mtp_weight=config.train.mtp_weight,
            mtp_layers=arch.mtp_layers,
        )

    @property
    def balances(self) -> bool:
        return self.load_balancing > 0

    @property
    def batch_sums(self) -> BatchSums | None:
        return batch_sums_of(self.own)

    def sizes(self, batches: Sequence[MicroBatch]) -> dict[str, int]:
        found = {**self.own.sizes(batches), "tokens": sum(b.num_tokens for b in batches)}
        return found | multi_token_sizes(batches, self.mtp_layers)

    def terms(
        self, model: Transformer, outputs: Outputs, batch: MicroBatch, sizes: Sizes
    ) -> dict[str, Term]:
        terms = {**self.own.terms(model, outputs, batch, sizes)}
        if outputs.multi_token:
            loss = multi_token_loss(model, outputs.multi_token, batch, sizes)
            terms["mtp_loss"] = Term(loss, self.mtp_weight)
        routing, load_LE, num_tokens = outputs.routing, outputs.load_LE, sizes["tokens"]
        if own := indexer_values(outputs.selections, num_tokens):
            # An indexer's gradient is that of the mean divergence of its layer alone.
            divergences = [value for name, value in own.items() if name.startswith("indexer_kl")]
            mean = torch.stack(divergences).mean()
            terms["indexer_kl"] = Term(mean, float(len(divergences)))
            terms |= {name: Term(value.detach(), 0.0) for name, value in own.items()}
        if routing is not None and load_LE is not None:
            # All tokens may be padding.
            some = (load_LE[0].sum() // model.arch.num_experts_per_token).clamp(min=1)
            balance = load_balancing_loss(load_LE, routing.prob_sum_LE, some, pooled=self.is_pooled)
            # This is the loss of a part of the global batch, weighted by its share of the tokens.
            terms["load_balancing"] = Term(some / num_tokens * balance, self.load_balancing)
        if routing is not None and self.router_z > 0:
            z = router_z_loss(routing.z_sum_L, num_tokens)
            terms["router_z"] = Term(z, self.router_z)
        return terms


def routing_losses(routing: RoutingStats, *, pooled: bool) -> dict[str, float]:
    """Return the auxiliary losses by name, from the sums over a whole global batch.

    They are the global batch's whatever ``moe.aux_loss_scope`` and the coefficients are, so that
    runs can be compared. Waits for the device.
    """
    balance = load_balancing_loss(
        routing.counts_LE, routing.prob_sum_LE, routing.num_tokens, pooled=pooled
    )
    z = router_z_loss(routing.z_sum_L, routing.num_tokens)
    return {"load_balancing_loss": balance.item(), "router_z_loss": z.item()}
