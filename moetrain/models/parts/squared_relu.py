"""Feed-forward layers without a gate, ``W_down relu(W_up x)^2`` (arXiv 2109.08668), and experts.

    y_t = P sum over the K chosen experts e of  w_te * expert_e(Q x_t)  +  shared expert(x_t)

With ``moe_latent_size`` the routed experts take tokens that are narrower than the model. Q projects
tokens to the latent width before they are sent to the experts' ranks, and P projects the experts'
sum back. The router and the shared expert take the tokens at the model's width.

Left out on purpose: biases, which no published model has.

Legend: B batch, S sequence, T tokens, D model width, F width of the layer or expert, E experts,
L latent width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.kernels.experts.routed import Routed
from moetrain.models.architecture import Part, Weight, Workload, linear
from moetrain.models.layers import Context, Linear
from moetrain.models.moe import Experts, MoE, MoEOutput, RoutedExperts, Router
from moetrain.models.rules import COLWISE, EXPERT, ROWWISE, Rule

_LATENT = Rule("replicate")
"""The rule of Q and P: replicated over tensor parallel ranks, applied to a rank's own tokens."""


@dataclass(frozen=True, kw_only=True)
class SquaredReLU(Part):
    """Describes a dense layer."""

    divided: ClassVar[Mapping[str, str]] = {"intermediate_size": "tp"}

    intermediate_size: int

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "_SquaredReLUMLP":
        return _SquaredReLUMLP(self, kernels)

    @property
    def weights(self) -> Mapping[str, Weight]:
        dim = self.hidden_size
        width = self.intermediate_size
        return linear("w_up", width, dim, COLWISE) | linear("w_down", dim, width, ROWWISE)

    def activations(self, share: Workload) -> float:
        return 2 * self._wide(share)

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        return {"linear": self._wide(share)}

    def working_set(self, share: Workload) -> float:
        return 2 * self._wide(share)

    def _wide(self, share: Workload) -> float:
        """Return the bytes of one tensor of the layer's own width."""
        return share.tokens * self.intermediate_size * share.width / share.tp


class _SquaredReLUMLP(nn.Module):
    """The module of :class:`SquaredReLU`."""

    def __init__(self, sizes: SquaredReLU, kernels: KernelsSection) -> None:
        super().__init__()
        self.w_up = Linear(sizes.hidden_size, sizes.intermediate_size, kernels)
        self.w_down = Linear(sizes.intermediate_size, sizes.hidden_size, kernels)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> tuple[torch.Tensor, None]:
        """Return [B, S, D], and None, because nothing is routed."""
        return self.w_down(self.w_up(x_BSD).relu().square()), None


@dataclass(frozen=True, kw_only=True)
class SquaredReLUExperts(RoutedExperts):
    """Describes routed experts without a gate, and a shared expert."""

    aligned: ClassVar[tuple[str, ...]] = (*RoutedExperts.aligned, "moe_latent_size")

    moe_latent_size: int = 0
    """Width L of the tokens that experts take; 0: the model's width."""

    @property
    def row_size(self) -> int:
        """Width of the tokens that experts take."""
        return self.moe_latent_size or self.hidden_size

    @property
    def shared(self) -> Part | None:
        width = self.shared_intermediate_size
        return SquaredReLU(hidden_size=self.hidden_size, intermediate_size=width) if width else None

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "_SquaredReLUMoE":
        return _SquaredReLUMoE(self, moe, kernels)

    @property
    def weights(self) -> Mapping[str, Weight]:
        found = dict(super().weights)
        del found["experts.w_gate_up"]
        shapes = {"w_up": (self.moe_intermediate_size, self.row_size)}
        shapes["w_down"] = (self.row_size, self.moe_intermediate_size)
        for name, shape in shapes.items():
            found[f"experts.{name}"] = Weight((self.num_experts, *shape), EXPERT)
        if self.moe_latent_size:
            latent = (self.moe_latent_size, self.hidden_size)
            found["to_latent.weight"] = Weight(latent, _LATENT)
            found["from_latent.weight"] = Weight(latent[::-1], _LATENT)
        return found

    def num_active_params(self) -> int:
        expert = 2 * self.row_size * self.moe_intermediate_size
        return self.num_params() - (self.num_experts - self.num_experts_per_token) * expert

    def activations(self, share: Workload) -> float:
        latent = 2 * share.own_tokens * self.moe_latent_size * share.width
        return super().activations(share) + latent

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        found: dict[SavedName, float] = {**super().saved(share)}
        # Without a gate there are half as many pre-activations as in SwiGLU. The latent tokens are
        # the result of one more linear layer.
        row = self.num_experts_per_token * self.moe_intermediate_size
        found["experts"] -= share.own_tokens * share.width * row
        latent = share.own_tokens * share.width * self.moe_latent_size
        found["linear"] = found.get("linear", 0.0) + latent
        return found

    def working_set(self, share: Workload) -> float:
        row = share.width * 2 * (self.row_size + self.moe_intermediate_size)
        rows = share.own_tokens * self.num_experts_per_token * row
        own = replace(share, tokens=share.own_tokens, tp=1)
        shared = 0.0 if self.shared is None else self.shared.working_set(own)
        return max(rows + 2 * self._received(share), shared)

    def _received(self, share: Workload) -> float:
        return super()._received(share) * self.row_size / self.hidden_size


class _UngatedExperts(Experts):
    """All experts' two matrices, stacked."""

    weights = ("w_up", "w_down")
    activation = "relu2"

    def __init__(self, sizes: SquaredReLUExperts, kernels: KernelsSection) -> None:
        nn.Module.__init__(self)
        self.use_kernels(kernels)
        experts = sizes.num_experts
        width = sizes.moe_intermediate_size
        self.check_width(width)
        row = sizes.row_size
        self.w_up = nn.Parameter(torch.empty(experts, width, row))
        self.w_down = nn.Parameter(torch.empty(experts, row, width))


class _SquaredReLUMoE(MoE):
    """The module of :class:`SquaredReLUExperts`."""

    kinds = (Router, _UngatedExperts)

    def __init__(
        self,
        sizes: SquaredReLUExperts,
        moe: MoeSection,
        kernels: KernelsSection,
    ) -> None:
        super().__init__(sizes, moe, kernels)
        latent = sizes.moe_latent_size
        dim = sizes.hidden_size
        self.to_latent = Linear(dim, latent, kernels) if latent else None
        self.from_latent = Linear(latent, dim, kernels) if latent else None

    def through_experts(self, x_TD: torch.Tensor, routed: Routed) -> MoEOutput:
        if self.to_latent is None or self.from_latent is None:
            return super().through_experts(x_TD, routed)
        y_TL, dropped = super().through_experts(self.to_latent(x_TD), routed)
        return MoEOutput(self.from_latent(y_TL), dropped)
