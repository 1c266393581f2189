"""The attention and the experts of Gemma-4.

Attention's scores are not scaled. Queries and keys are normalised with a weight, and values without
one. Where keys are values, one product computes both, and each has its own norm.

An MoE layer has a dense layer beside its experts. With x the residual stream and n1 to n4 norms,

    y = n3(dense(n1(x))) + n4(sum over the K chosen experts e of  w_e * expert_e(n2(x)))

The router's input is ``x / rms(x) * scale * D^-1/2``. The chosen experts' weights are normalised to
sum to one, and then multiplied by a learned scale of each expert.

Legend: B batch, S sequence, T tokens, D model width, E experts, K experts a token, H query heads,
G key/value heads, d head width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.kernels.experts.router import Routed
from moetrain.kernels.norm.rms_norm import fusible_rms_norm, rms_norm
from moetrain.models.architecture import FP32, Weight, Workload
from moetrain.models.attention import Attention, GroupedQueryAttention
from moetrain.models.layers import Context, RMSNorm, SwiGLU, linears
from moetrain.models.moe import Experts, MoE, MoEOutput, RoutedExperts, Router
from moetrain.models.parts.between_norms import AFTER
from moetrain.models.rules import NORM
from moetrain.runtime.backend import Backend

_NORMS = ("dense_norm", "dense_out_norm", "routed_norm", "routed_out_norm")


@dataclass(frozen=True, kw_only=True)
class GemmaAttention(GroupedQueryAttention):
    """Describes attention between two norms."""

    after: ClassVar[str] = "attn_out_norm"

    keys_are_values: bool = False
    """True: values are computed by the product of keys."""

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "_GemmaAttention":
        return _GemmaAttention(self, kernels)

    @property
    def weights(self) -> Mapping[str, Weight]:
        left_out = ("wv.weight", "wv.bias") if self.keys_are_values else ()
        return {name: one for name, one in super().weights.items() if name not in left_out}

    def activations(self, share: Workload) -> float:
        """Return the bytes of :meth:`GroupedQueryAttention.activations` and of values' norm."""
        kept = share.width if share.is_compiled else FP32 + share.width
        values = 0.0 if self.keys_are_values else share.tokens * kept * self.widths[1] / share.tp
        return super().activations(share) + values

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        found = dict(super().saved(share))
        if self.keys_are_values:
            found["linear"] -= share.tokens * share.width * self.widths[1] / share.tp
        return found


class _GemmaAttention(Attention):
    """The module of :class:`GemmaAttention`."""

    def __init__(self, sizes: GemmaAttention, kernels: KernelsSection) -> None:
        super().__init__(sizes, kernels)
        self.eps = sizes.norm_eps
        if sizes.keys_are_values:
            del self.wv
            self.register_module("wv", None)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> torch.Tensor:
        """Mix tokens; returns [B, S, D] in ``x_BSD``'s dtype."""
        modules = [self.wq, self.wk] if self.wv is None else [self.wq, self.wk, self.wv]
        q, k, *others = linears(x_BSD, modules)
        v_BSGd = (others[0] if others else k).unflatten(-1, (-1, self.head_dim))
        one_d = v_BSGd.new_ones(self.head_dim)
        if self.batch_invariant:
            v_BSGd = rms_norm(v_BSGd, one_d, self.eps, self.backend, late=True)
        else:
            _, v_BSGd = fusible_rms_norm(v_BSGd, one_d, self.eps, self.backend, late=True)
        q_BSHd = self._rotated(q, self.q_norm, context)
        k_BSGd = self._rotated(k, self.k_norm, context)
        return self.wo(self.mix(q_BSHd, k_BSGd, v_BSGd, context).flatten(-2))

    def mix(
        self,
        q_BSHd: torch.Tensor,
        k_BSGd: torch.Tensor,
        v_BSGd: torch.Tensor,
        context: Context,
    ) -> torch.Tensor:
        """Call the core with a scale of 1: scores are not scaled."""
        return self.core(q_BSHd, k_BSGd, v_BSGd, context, 1.0)


@dataclass(frozen=True, kw_only=True)
class GemmaExperts(RoutedExperts):
    """Describes experts beside a dense layer, with all norms but that of the sum."""

    norm: ClassVar[str] = ""
    after: ClassVar[str] = AFTER

    intermediate_size: int
    """Width of the dense layer."""
    norm_eps: float

    @property
    def shared(self) -> SwiGLU:
        """The dense layer."""
        return SwiGLU(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            activation=self.activation,
        )

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "_GemmaMoE":
        return _GemmaMoE(self, moe, kernels)

    @property
    def weights(self) -> Mapping[str, Weight]:
        norms = {f"{name}.weight": Weight((self.hidden_size,), NORM) for name in _NORMS}
        scales = {
            "router.scale": Weight((self.hidden_size,), NORM),
            "router.expert_scale": Weight((self.num_experts,), NORM),
        }
        return {**super().weights, **scales, **norms}

    def products_per_token(self, seq_len: int) -> float:
        scales = (len(_NORMS) + 1) * self.hidden_size + self.num_experts
        return self.num_active_params() - scales

    def activations(self, share: Workload) -> float:
        """Return :meth:`RoutedExperts.activations`, and a tensor for each norm and the router."""
        norms = (len(_NORMS) + 1) * share.own_tokens * self.hidden_size
        return super().activations(share) + norms * share.width


class _GemmaRouter(Router):
    """A router that normalises tokens first and scales the experts' weights."""

    def __init__(
        self,
        sizes: GemmaExperts,
        moe: MoeSection,
        backend: Backend,
    ) -> None:
        super().__init__(sizes, moe, backend)
        self.eps = sizes.norm_eps
        self.scale = nn.Parameter(torch.empty(sizes.hidden_size))
        self.expert_scale = nn.Parameter(torch.empty(sizes.num_experts))

    def forward(
        self,
        x_TD: torch.Tensor,
        is_pad_T: torch.Tensor | None = None,
        ids_TK: torch.Tensor | None = None,
    ) -> Routed:
        """Route ``x_TD`` as :class:`Router` does, and scale the weights."""
        routed = super().forward(x_TD, is_pad_T, ids_TK)
        # Select and sum instead of indexing: an index's gradient adds all tokens to a few elements
        # with atomics, which is slow, and in an order that changes the bits from run to run.
        experts_E = torch.arange(len(self.expert_scale), device=x_TD.device)
        is_chosen_TKE = routed.ids_TK.clamp(min=0)[..., None] == experts_E
        scales_TK = torch.where(is_chosen_TKE, self.expert_scale, 0).sum(-1)
        weights_TK = routed.weights_TK * scales_TK.to(routed.weights_TK.dtype)
        return routed._replace(weights_TK=weights_TK)

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Compute ``logits_TE`` in fp32."""
        normed_TD = rms_norm(x_TD, self.scale, self.eps, self.backend)
        return super().logits(normed_TD * x_TD.shape[1] ** -0.5)


class _GemmaMoE(MoE):
    """The module of :class:`GemmaExperts`."""

    kinds = (_GemmaRouter, Experts)

    def __init__(
        self,
        sizes: GemmaExperts,
        moe: MoeSection,
        kernels: KernelsSection,
    ) -> None:
        super().__init__(sizes, moe, kernels)
        for name in _NORMS:
            norm = RMSNorm(sizes.hidden_size, sizes.norm_eps, kernels, late=True)
            self.add_module(name, norm)

    def results(self, x_TD: torch.Tensor, routed: Routed, context: Context) -> MoEOutput:
        """Return the sum of both layers' normalised results."""
        dense_norm, dense_out_norm, norm, out_norm = (getattr(self, name) for name in _NORMS)
        assert self.shared_experts is not None  # GemmaExperts has them
        dense_TD, _ = self.shared_experts(dense_norm(x_TD), context)
        y_TD, dropped = self.through_experts(norm(x_TD), routed)
        return MoEOutput(dense_out_norm(dense_TD) + out_norm(y_TD), dropped)
