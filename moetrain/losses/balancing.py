"""What routers count of a batch, and the losses that balance them.

Legend: E experts, L MoE layers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class RouterStats(NamedTuple):
    """Sums over one layer's tokens, which :class:`~moetrain.kernels.experts.routed.Routed` has."""

    counts_E: torch.Tensor
    prob_sum_E: torch.Tensor
    z_sum: torch.Tensor
    entropy_sum: torch.Tensor
    dropped: torch.Tensor | None = None
    """int32: rows for which a dispatcher of fixed sizes had no room; None: sizes are not fixed."""

    def packed(self) -> torch.Tensor:
        """Return all but ``dropped`` as a row [2E + 2], fp32: exact for counts of up to 2^24."""
        sums = torch.stack([self.z_sum, self.entropy_sum])
        return torch.cat([self.counts_E.to(sums.dtype), self.prob_sum_E, sums])

    @classmethod
    def of_packed(cls, row_N: torch.Tensor) -> "RouterStats":
        """Invert :meth:`packed`, in fp32, of a row that may be wider."""
        num_experts = len(row_N) // 2 - 1
        counts_E, prob_sum_E, z_sum, entropy_sum = row_N.split([num_experts, num_experts, 1, 1])
        counts_E = counts_E.detach().to(torch.int32)
        return cls(counts_E, prob_sum_E.float(), z_sum[0].float(), entropy_sum[0].detach().float())


class RoutingStats(NamedTuple):
    """:class:`RouterStats` of every MoE layer, stacked in layer order."""

    counts_LE: torch.Tensor
    """int32: (token, slot) pairs that chose each expert."""
    prob_sum_LE: torch.Tensor
    """fp32, differentiable: sum over tokens of the routing probabilities."""
    z_sum_L: torch.Tensor
    """fp32, differentiable: sum over tokens of logsumexp(logits)^2."""
    entropy_sum_L: torch.Tensor
    """fp32, no gradient: sum over tokens of the routing entropy in nats."""
    num_tokens: torch.Tensor
    """int64 (0-d): tokens that each layer routed, without pads."""
    dropped: torch.Tensor | None = None
    """int32: rows dropped in all layers; if there are any, no statistic can be trusted."""

    @classmethod
    def of_layers(cls, layers: Sequence[RouterStats], top_k: int) -> "RoutingStats | None":
        """Stack the layers of one batch whose tokens have ``top_k`` experts; None: no layers."""
        if not layers:
            return None
        *sums, dropped = zip(*layers, strict=True)
        counts_LE, prob_sum_LE, z_sum_L, entropy_sum_L = (torch.stack(one) for one in sums)
        lost = [x for x in dropped if x is not None]
        all_lost = torch.stack(lost).sum() if lost else None
        num_tokens = counts_LE[0].sum() // top_k
        return cls(counts_LE, prob_sum_LE, z_sum_L, entropy_sum_L, num_tokens, all_lost)

    @classmethod
    def together(cls, several: "Sequence[RoutingStats]") -> "RoutingStats":
        """Add up several micro-batches, at least one; some may have no ``dropped``."""
        parts = zip(cls._fields, zip(*several, strict=True), strict=True)
        given = {name: [x for x in part if x is not None] for name, part in parts}
        return cls(**{name: torch.stack(part).sum(0) for name, part in given.items() if part})

    def packed(self) -> torch.Tensor:
        """Return each layer's row [L, 2E + 2] of :meth:`RouterStats.packed`, fp64."""
        sums_L2 = torch.stack([self.z_sum_L, self.entropy_sum_L], 1)
        return torch.cat([self.counts_LE.double(), self.prob_sum_LE, sums_L2], 1)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "RoutingStats":
        """Apply ``function`` to every sum: a sum over ranks, say."""
        return RoutingStats(**{k: function(x) for k, x in self._asdict().items() if x is not None})


def load_balancing_loss(
    counts_LE: torch.Tensor,
    prob_sum_LE: torch.Tensor,
    num_tokens: torch.Tensor | int,
    *,
    pooled: bool = False,
) -> torch.Tensor:
    """Compute the auxiliary loss ``E * sum_e f_e * P_e`` of L layers (arXiv 2101.03961, eq. 4-6).

    ``f_e`` is the share of the tokens that chose the expert, ``P_e`` its mean probability. Each
    layer has its own, and the loss is the layers' mean (Megatron adds them up: its coefficient
    times L is ours). With ``pooled``, as Hugging Face has it, both are those of all layers taken
    together: one layer may be unbalanced as long as others make up for it. A uniform router gives
    K either way.

    Args:
        counts_LE: choices of each expert over the *whole* batch.
        prob_sum_LE: probabilities summed over any part of it. The loss is linear in them, so the
            losses of the parts add up to the loss of the batch.
        num_tokens: tokens a layer of the whole batch.
    """
    share_LE = counts_LE / num_tokens
    mean_prob_LE = prob_sum_LE / num_tokens
    if pooled:
        share_LE, mean_prob_LE = share_LE.mean(0, keepdim=True), mean_prob_LE.mean(0, keepdim=True)
    return counts_LE.shape[1] * (share_LE * mean_prob_LE).sum(1).mean()


def router_z_loss(z_sum_L: torch.Tensor, num_tokens: torch.Tensor | int) -> torch.Tensor:
    """Average ``logsumexp(router logits)^2`` over tokens and layers (arXiv 2202.08906, eq. 5).

    Like :func:`load_balancing_loss`, parts of a batch add up when ``num_tokens`` is the whole's.
    """
    return z_sum_L.mean() / num_tokens
