"""Routing statistics of a batch, and the losses that balance routers.

Legend: E experts, K experts of a token, L MoE layers, N elements of a packed row.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

_NUM_SCALARS = 2
"""Number of a layer's sums that are scalars. They come last in a packed row."""


class RouterStats(NamedTuple):
    """Sums over one layer's tokens, from :class:`~moetrain.kernels.experts.routed.Routed`.

    :class:`RoutingStats` stacks them over layers, and describes them.
    """

    counts_E: torch.Tensor
    prob_sum_E: torch.Tensor
    z_sum: torch.Tensor
    entropy_sum: torch.Tensor
    dropped: torch.Tensor | None = None
    """int32 (0-d): rows for which a dispatcher with buffers of fixed sizes had no room; None: its
    sizes are not fixed."""

    @staticmethod
    def packed_size(num_experts: int) -> int:
        """Return N, the width of a packed row."""
        return 2 * num_experts + _NUM_SCALARS

    def packed(self) -> torch.Tensor:
        """Return all but ``dropped`` as a row [N], fp32: exact for counts of up to 2^24."""
        sums = torch.stack([self.z_sum, self.entropy_sum])
        return torch.cat([self.counts_E.to(sums.dtype), self.prob_sum_E, sums])

    @classmethod
    def of_packed(cls, row_N: torch.Tensor) -> "RouterStats":
        """Invert :meth:`packed`, in fp32; the row may be of a wider dtype."""
        num_experts = (len(row_N) - _NUM_SCALARS) // 2
        counts_E, prob_sum_E, scalars = row_N.split([num_experts, num_experts, _NUM_SCALARS])
        z_sum, entropy_sum = scalars.float()
        return cls(
            counts_E=counts_E.detach().to(torch.int32),
            prob_sum_E=prob_sum_E.float(),
            z_sum=z_sum,
            entropy_sum=entropy_sum.detach(),
        )


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
    """int64 (0-d): tokens that each layer routed, without padding."""
    dropped: torch.Tensor | None = None
    """int32 (0-d): the sum of dropped rows over all layers. If it is not 0, the other statistics
    are wrong."""

    @classmethod
    def of_layers(cls, layers: Sequence[RouterStats], top_k: int) -> "RoutingStats | None":
        """Stack the layers of one batch whose tokens have ``top_k`` experts; None: no layers."""
        if not layers:
            return None
        counts_LE = torch.stack([layer.counts_E for layer in layers])
        return cls(
            counts_LE=counts_LE,
            prob_sum_LE=torch.stack([layer.prob_sum_E for layer in layers]),
            z_sum_L=torch.stack([layer.z_sum for layer in layers]),
            entropy_sum_L=torch.stack([layer.entropy_sum for layer in layers]),
            num_tokens=counts_LE[0].sum() // top_k,
            dropped=_sum_of([layer.dropped for layer in layers]),
        )

    @classmethod
    def together(cls, several: "Sequence[RoutingStats]") -> "RoutingStats":
        """Return the sums over several micro-batches, at least one."""
        return cls(
            counts_LE=torch.stack([one.counts_LE for one in several]).sum(0),
            prob_sum_LE=torch.stack([one.prob_sum_LE for one in several]).sum(0),
            z_sum_L=torch.stack([one.z_sum_L for one in several]).sum(0),
            entropy_sum_L=torch.stack([one.entropy_sum_L for one in several]).sum(0),
            num_tokens=torch.stack([one.num_tokens for one in several]).sum(0),
            dropped=_sum_of([one.dropped for one in several]),
        )

    def packed(self) -> torch.Tensor:
        """Return the rows of all layers, fp64 [L, N], laid out as by :meth:`RouterStats.packed`."""
        scalars = torch.stack([self.z_sum_L, self.entropy_sum_L], 1)
        return torch.cat([self.counts_LE.double(), self.prob_sum_LE, scalars], 1)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "RoutingStats":
        """Apply ``function`` to every sum, for example a sum over ranks."""
        return RoutingStats(**{k: function(x) for k, x in self._asdict().items() if x is not None})


def _sum_of(values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the sum of scalars that are not None; None if all are."""
    found = [x for x in values if x is not None]
    return torch.stack(found).sum() if found else None


def load_balancing_loss(
    counts_LE: torch.Tensor,
    prob_sum_LE: torch.Tensor,
    num_tokens: torch.Tensor | int,
    *,
    pooled: bool = False,
) -> torch.Tensor:
    """Return the auxiliary loss ``E * sum_e f_e * P_e`` of L layers (arXiv 2101.03961, eq. 4-6).

    ``f_e`` is the share of the tokens that chose the expert, ``P_e`` its mean probability. The loss
    is computed in each layer, and the mean over layers is returned. (Megatron adds the layers up,
    so the coefficient here must be L times Megatron's.) With ``pooled``, as in Hugging Face,
    ``f_e`` and ``P_e`` are first averaged over all layers: one layer may then be unbalanced if
    others make up for it. A uniform router gives K either way.

    Args:
        counts_LE: choices of each expert over the *whole* batch.
        prob_sum_LE: probabilities summed over any part of the batch. The loss is linear in them, so
            the losses of the parts add up to the loss of the batch.
        num_tokens: tokens of the whole batch, in each layer.
    """
    share_LE = counts_LE / num_tokens
    mean_prob_LE = prob_sum_LE / num_tokens
    if pooled:
        share_LE, mean_prob_LE = share_LE.mean(0, keepdim=True), mean_prob_LE.mean(0, keepdim=True)
    return counts_LE.shape[1] * (share_LE * mean_prob_LE).sum(1).mean()


def router_z_loss(z_sum_L: torch.Tensor, num_tokens: torch.Tensor | int) -> torch.Tensor:
    """Return the mean of ``logsumexp(router logits)^2`` over tokens and layers.

    This is eq. 5 of arXiv 2202.08906. The losses of a batch's parts add up if ``num_tokens`` is the
    whole batch's, as for :func:`load_balancing_loss`.
    """
    return z_sum_L.mean() / num_tokens
