"""The training loss: sums over tokens divided by numbers of the whole global batch.

Because every term is a sum over this micro-batch's tokens over a denominator that all
micro-batches (and ranks) share, losses and gradients add up to the global batch's however it is
split: a step's loss is the sum of every rank's. The load-balancing term also needs the global
expert counts before the first backward; see ``moe.aux_loss_scope``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from moetrain.data.loader import Batch
from moetrain.models import RoutingStats, Transformer, load_balancing_loss, router_z_loss


class GlobalBatch(NamedTuple):
    """What the denominators are made of: numbers of one optimizer step, known before it runs."""

    num_targets: torch.Tensor
    """Tokens with a target (0-d, on the device)."""
    num_tokens: torch.Tensor
    """Tokens the router sees (0-d, on the device)."""


class LossCoefficients(NamedTuple):
    """Weights of the auxiliary terms."""

    load_balancing: float
    router_z: float
    is_pooled: bool
    """Whether the load-balancing term takes all layers together: see ``load_balancing_loss``."""


class MicroLoss(NamedTuple):
    """One micro-batch's share of the step's loss; ``total`` has the gradient, the rest has none."""

    total: torch.Tensor
    cross_entropy: torch.Tensor
    routing: RoutingStats | None
    """Its sums, of which :func:`routing_losses` makes the whole batch's auxiliary losses."""


def micro_batch_loss(
    model: Transformer,
    batch: Batch,
    sizes: GlobalBatch,
    coefficients: LossCoefficients,
    global_counts: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> MicroLoss:
    """This micro-batch's share of the global batch's mean loss (0-d fp32 tensors).

    Args:
        global_counts: given this micro-batch's expert counts [MoE layers, experts], those of the
            whole global batch; None: this micro-batch's own are used, and its loss is weighted by
            its share of the tokens.
    """
    cross_entropy, routing = cross_entropy_sum(model, batch, 1 / sizes.num_targets)
    total = cross_entropy
    if routing is not None:
        if global_counts is None:
            num_tokens = routing.num_tokens.clamp(min=1)  # there may be pads alone
            counts_LE, share = routing.counts_LE, num_tokens / sizes.num_tokens
        else:
            num_tokens, share = sizes.num_tokens, 1.0
            counts_LE = global_counts(routing.counts_LE)
        balance = share * load_balancing_loss(
            counts_LE, routing.prob_sum_LE, num_tokens, pooled=coefficients.is_pooled
        )
        z = router_z_loss(routing.z_sum_L, sizes.num_tokens)
        total = total + coefficients.load_balancing * balance + coefficients.router_z * z
        routing = routing._replace(
            prob_sum_LE=routing.prob_sum_LE.detach(), z_sum_L=routing.z_sum_L.detach()
        )
    return MicroLoss(total, cross_entropy.detach(), routing)


def routing_losses(routing: RoutingStats, coefficients: LossCoefficients) -> dict[str, float]:
    """The auxiliary losses by name, from the sums over a whole global batch.

    Whatever is trained (``moe.aux_loss_scope``, a coefficient of 0), these are the global batch's,
    so that runs compare. Waits for the device.
    """
    balance = load_balancing_loss(
        routing.counts_LE, routing.prob_sum_LE, routing.num_tokens, pooled=coefficients.is_pooled
    )
    z = router_z_loss(routing.z_sum_L, routing.num_tokens)
    return {"load_balancing_loss": balance.item(), "router_z_loss": z.item()}


def cross_entropy_sum(
    model: Transformer,
    batch: Batch,
    weight: torch.Tensor | float = 1.0,
) -> tuple[torch.Tensor, RoutingStats | None]:
    """``weight`` times the sum of the cross-entropy over the batch's targets (0-d fp32).

    Returns it with the routing statistics.
    """
    hidden_BSD, routing = model.backbone(
        batch.tokens_BS, batch.positions_BS, batch.cu_seqlens, batch.is_pad_BS
    )
    targets_T = batch.targets_BS.flatten()
    loss = model.vocabulary.loss_sum(
        hidden_BSD.flatten(0, 1),
        model.head_weight,
        targets_T,
        # In here rather than on the result: the gradients are then rounded once.
        torch.ones_like(targets_T, dtype=torch.float32) * weight,
    )
    return loss.total, routing
