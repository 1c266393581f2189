"""Routed experts with biases and a clamped SwiGLU, and a router with a learned bias.

The formulas are in :mod:`moetrain.kernels.experts.clamped_mlp`. Files hold experts' matrices
transposed, with gate and up projection interleaved (:class:`InterleavedExperts`).

Legend: S tokens for the experts here, K experts a token, D model width, E experts, F expert width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from moetrain.config import KernelsSection, MoeSection
from moetrain.kernels.experts.clamped_mlp import clamped_expert_mlp
from moetrain.kernels.experts.permutation import ExpertIndices
from moetrain.models.architecture import Architecture, Weight
from moetrain.models.family import Piece, Rename
from moetrain.models.moe import Experts, MoE, RoutedExperts, Router
from moetrain.models.rules import EXPERT, Rule
from moetrain.runtime.backend import Backend

_BIAS = replace(EXPERT, init="zeros", decay=False)
_LOGIT_BIAS = Rule("replicate", init="zeros", decay=False, gather=torch.float32)


@dataclass(frozen=True, kw_only=True)
class ClampedExperts(RoutedExperts):
    """Describes routed experts with biases, whose pre-activations are clamped."""

    swiglu_limit: float
    swiglu_alpha: float

    def build(self, kernels: KernelsSection, moe: MoeSection) -> MoE:
        return _ClampedMoE(self, moe, kernels)

    @property
    def weights(self) -> Mapping[str, Weight]:
        experts = self.num_experts
        dim = self.hidden_size
        width = self.moe_intermediate_size
        return {
            **super().weights,
            "router.logit_bias": Weight((experts,), _LOGIT_BIAS),
            "experts.b_gate_up": Weight((experts, 2 * width), _BIAS),
            "experts.b_down": Weight((experts, dim), _BIAS),
        }

    def num_active_params(self) -> int:
        unused = self.num_experts - self.num_experts_per_token
        biases = 2 * self.moe_intermediate_size + self.hidden_size
        return super().num_active_params() - unused * biases

    def products_per_token(self, seq_len: int) -> float:
        biases = 2 * self.moe_intermediate_size + self.hidden_size
        return self.num_active_params() - self.num_experts_per_token * biases - self.num_experts


class _LearnedBiasRouter(Router):
    """A router whose logits have a learned bias.

    The selection bias is another one: it is no parameter, and only decides which experts are
    chosen.
    """

    def __init__(
        self,
        sizes: RoutedExperts,
        moe: MoeSection,
        backend: Backend,
    ) -> None:
        super().__init__(sizes, moe, backend)
        self.logit_bias = nn.Parameter(torch.empty(sizes.num_experts))

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Compute ``logits_TE`` in fp32."""
        logits_TE = super().logits(x_TD)
        return logits_TE + self.logit_bias.to(logits_TE.dtype)


class _BiasedExperts(Experts):
    """All experts' matrices and biases, stacked; the gate's F rows precede the up projection's."""

    def __init__(self, sizes: ClampedExperts, kernels: KernelsSection) -> None:
        super().__init__(sizes, kernels)
        experts = sizes.num_experts
        width = sizes.moe_intermediate_size
        self.limit = sizes.swiglu_limit
        self.alpha = sizes.swiglu_alpha
        self.b_gate_up = nn.Parameter(torch.empty(experts, 2 * width))
        self.b_down = nn.Parameter(torch.empty(experts, sizes.hidden_size))

    def forward(
        self,
        x_SD: torch.Tensor,
        weights_SK: torch.Tensor,
        indices: ExpertIndices,
        typical_rows: int | None = None,
    ) -> torch.Tensor:
        """Return ``y_SD``: for each token, the weighted sum of the results of its local experts."""
        dtype = x_SD.dtype
        gate_up, down = (self.adapter(name, dtype) for name in self.weights)
        adapters: tuple[torch.Tensor, ...] = ()
        scale = 1.0
        if gate_up is not None and down is not None:
            adapters = (gate_up.a, gate_up.b, down.a, down.b)
            scale = gate_up.scale
        return clamped_expert_mlp(
            x_SD,
            weights_SK,
            indices,
            w_gate_up_E2FD=self.matrices("w_gate_up", dtype),
            b_gate_up_E2F=self.b_gate_up.to(dtype),
            w_down_EDF=self.matrices("w_down", dtype),
            b_down_ED=self.b_down.to(dtype),
            limit=self.limit,
            alpha=self.alpha,
            adapters=adapters,
            scale=scale,
            backend=self.backend,
            precision=self.precision,
        )


class _ClampedMoE(MoE):
    """The module of :class:`ClampedExperts`."""

    kinds = (_LearnedBiasRouter, _BiasedExperts)


@dataclass(frozen=True)
class InterleavedExperts(Rename):
    """Maps experts' stacked parameter to a file tensor that interleaves ``parts`` in its last dim.

    Matrices are transposed in files. For two parts and F = 2, the parameter ``[E, 4, D]`` with rows
    g0, g1, u0, u1 is in files ``[E, D, 4]`` with columns g0, u0, g1, u1. Biases are ``[E, 4]`` in
    both, and files have them in the order of these columns. A file tensor is read and written one
    expert at a time.
    """

    parts: int = 1
    """The number of matrices that are interleaved: 2 for gate and up projection."""

    def pieces(
        self, parameter: str, shape: Sequence[int], arch: Architecture | None
    ) -> list[Piece]:
        """Return one piece for each expert and part; none if ``parameter`` is not mapped here."""
        found = super().pieces(parameter, shape, arch)
        if not found:
            return []
        theirs = found[0].hf_name
        width = shape[1] // self.parts
        parts = self.parts
        return [
            Piece(
                theirs,
                parameter,
                place=(expert, slice(part * width, (part + 1) * width)),
                within=(expert, slice(part, shape[1], parts)),
                is_transposed=len(shape) == 3,
            )
            for expert in range(shape[0])
            for part in range(parts)
        ]
