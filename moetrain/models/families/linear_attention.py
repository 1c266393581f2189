"""Gated delta nets: linear attention that carries a state through a document (arXiv 2412.06464).

    q, k, v = silu(convolution of W x)      g = -exp(a) softplus(W x + b)      beta = sigmoid(W x)
    y = W (norm(o) * silu(W x)),    o by :mod:`moetrain.kernels.linear_attention.gated_delta`

Convolutions are causal and begin anew with each document, as the state does. Queries and keys have
norm 1. A query or key head serves several heads of values.

In generation a sequence has a slot of :class:`LinearStates` beside its pages of keys and values:
the state, the inputs of its open chunk (:mod:`moetrain.kernels.linear_attention.gated_delta_step`)
and the last inputs of the convolutions.

Legend: B batch, S sequence, T = B * S tokens, D model width, H value heads, Q key heads, K and V
widths of a key and a value, C channels, J taps of a convolution, P slots.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.kernels.backend import Backend
from moetrain.kernels.experts.swiglu import swiglu
from moetrain.kernels.linear_attention.convolution import Convolution, convolution_step, convolved
from moetrain.kernels.linear_attention.gated_delta import (
    CHUNK,
    Documents,
    RuleInputs,
    gated_delta,
)
from moetrain.kernels.linear_attention.gated_delta_step import DeltaCache, Reads, gated_delta_step
from moetrain.kernels.norm.elementwise import exp, sigmoid, softplus
from moetrain.models.architecture import FP32, AttentionPart, Weight, Workload
from moetrain.models.layers import Context, Linear, RMSNorm, linears
from moetrain.models.rules import COLWISE, NORM, ROWWISE, Rule

_NARROW = replace(COLWISE, gather=torch.float32)
"""Of gates, a number a head, which no product in fp8 takes."""
_FILTER = Rule("colwise", init="filter", decay=False)
_RATES = Rule("colwise", init="rates", decay=False, gather=torch.float32)
_BIAS = Rule("colwise", init="ones", decay=False, gather=torch.float32)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(AttentionPart):
    """Describes a gated delta net."""

    name: ClassVar[str] = "linear_attn"
    carries_state: ClassVar[bool] = True
    divided: ClassVar[Mapping[str, str]] = {
        "linear_num_key_heads": "tp",
        "linear_num_value_heads": "tp",
    }

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"):
            if getattr(self, f"linear_{name}") == 0:
                raise ValueError(f"linear_{name} is 0, and a layer has linear attention")
        heads, keys = self.linear_num_value_heads, self.linear_num_key_heads
        if heads == 0 or heads % keys:
            problem = f"linear_num_value_heads {heads} is not a multiple of"
            raise ValueError(f"{problem} linear_num_key_heads {keys}")

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "LinearAttention":
        return LinearAttention(self, kernels)

    @property
    def widths(self) -> tuple[int, int]:
        """Width of all key heads together, and of all value heads."""
        return (
            self.linear_num_key_heads * self.linear_key_head_dim,
            self.linear_num_value_heads * self.linear_value_head_dim,
        )

    @property
    def weights(self) -> Mapping[str, Weight]:
        dim, (k_dim, v_dim), heads = self.hidden_size, self.widths, self.linear_num_value_heads
        found = {f"w{x}.weight": Weight((n, dim), COLWISE) for x, n in self._inputs()}
        found |= {f"w{x}.weight": Weight((heads, dim), _NARROW) for x in "ba"}
        for x, channels in {"q": k_dim, "k": k_dim, "v": v_dim}.items():
            found[f"conv_{x}"] = Weight((channels, 1, self.linear_conv_kernel_dim), _FILTER)
        found |= {"a_log": Weight((heads,), _RATES), "dt_bias": Weight((heads,), _BIAS)}
        found["norm.weight"] = Weight((self.linear_value_head_dim,), NORM)
        return found | {"wo.weight": Weight((dim, v_dim), ROWWISE)}

    def _inputs(self) -> list[tuple[str, int]]:
        """Return the wide results of products with the input, and their widths."""
        k_dim, v_dim = self.widths
        return [("q", k_dim), ("k", k_dim), ("v", v_dim), ("z", v_dim)]

    def products_per_token(self, seq_len: int) -> float:
        """Count the products with weights, and three with each head's state: what it holds for the
        key, what is written, and what the query reads."""
        k_dim, v_dim = self.widths
        gates = 2 * self.linear_num_value_heads
        weights = self.hidden_size * (2 * k_dim + 3 * v_dim + gates)
        return weights + 3 * v_dim * self.linear_key_head_dim

    def activations(self, share: Workload) -> float:
        """Return the bytes of the products' results, of what the convolutions make of them, of the
        rule's result before and after its gate, and of what the rule keeps of its chunks.

        Without the compiler all but the rule keeps fp32: each tap's product its input, each silu
        and norm of a key what they take, and the gate its factors.
        """
        (k_dim, v_dim), w = self.widths, share.width
        channels = 2 * k_dim + v_dim
        values = w * (2 * channels + 3 * v_dim)
        if not share.is_compiled:
            wide = (self.linear_conv_kernel_dim + 1) * channels + 2 * k_dim + 3 * v_dim
            values = w * (channels + 2 * v_dim) + FP32 * wide
        heads = self.linear_num_value_heads * (CHUNK * w + 5 * FP32)
        return share.tokens * (values + heads) / share.tp

    def exchanged(self, share: Workload) -> dict[str, float]:
        (k_dim, v_dim), gates = self.widths, 2 * self.linear_num_value_heads
        spread = (2 * k_dim + 2 * v_dim + gates) / share.tp
        return share.received(spread, spread / share.cp)  # heads travel in both ways

    def state_bytes(self, width: int) -> float:
        (k_dim, v_dim), heads = self.widths, self.linear_num_value_heads
        channels = 2 * k_dim + v_dim
        places = CHUNK + self.linear_conv_kernel_dim - 1
        kept = places * channels * width + CHUNK * heads * (FP32 + width)
        return v_dim * self.linear_key_head_dim * FP32 + kept

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        (k_dim, v_dim), w = self.widths, share.width
        products = share.tokens * w * (2 * k_dim + 2 * v_dim) / share.tp
        rule = v_dim * w + self.linear_num_value_heads * (CHUNK * w + FP32)
        return {
            "attention": share.tokens * rule / share.tp,
            "linear": products + share.own_tokens * w * self.hidden_size,
        }


class LinearStates:
    """The slots of one layer, of which a running sequence has one; slot 0 is nobody's.

    Nothing is cleared when a slot gets another sequence: its first tokens read no state, and no
    input of a convolution that is not their own.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.cache: DeltaCache | None = None
        """None: no memory is allocated, which happens at the first use."""
        self.inputs: dict[str, torch.Tensor] = {}
        """The last J - 1 inputs of each convolution, [P, J - 1, C]: a token's place modulo J - 1 is
        its place there."""

    def free(self) -> None:
        self.cache, self.inputs = None, {}

    def wipe(self) -> None:
        for tensor in (*(self.cache or ()), *self.inputs.values()):
            tensor.zero_()

    def convolved(
        self, given: Mapping[str, Convolution], reads: Reads, backend: Backend
    ) -> list[torch.Tensor]:
        """Go on with the convolutions, as :func:`convolution_step` does with one."""
        found = []
        for name, one in given.items():
            if name not in self.inputs:
                shape = (self.slots, one.filters_C1J.shape[-1] - 1, one.x_TC.shape[1])
                self.inputs[name] = one.x_TC.new_zeros(shape)
            one = one._replace(x_TC=one.x_TC.contiguous())
            found.append(convolution_step(one, self.inputs[name], reads, backend))
        return found

    def rule(
        self, inputs: RuleInputs, reads: Reads, scale: float, backend: Backend
    ) -> torch.Tensor:
        """Go on with the rule, as :func:`gated_delta_step` does."""
        if self.cache is None:
            self.cache = DeltaCache.empty(self.slots, inputs)
        return gated_delta_step(*inputs, self.cache, reads, scale, backend)


Heads = Callable[..., torch.Tensor]
"""Calls ``mixed(given, weights, context)``, whose tensors are of heads: [T, heads * width] what
tokens have, [heads * width, ...] weights. The seam of context parallelism, which calls it with all
tokens of a part of the heads."""


def all_heads(mixed: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
    """Call ``mixed`` where all tokens and heads are here."""
    return mixed(*given)


class LinearAttention(nn.Module):
    """The module of :class:`GatedDeltaNet`."""

    def __init__(self, sizes: GatedDeltaNet, kernels: KernelsSection) -> None:
        super().__init__()
        self.backend: Backend = kernels.backend
        self.batch_invariant = kernels.batch_invariant
        self.over_heads: Heads = all_heads
        self.states: LinearStates | None = None
        """Of generation, whose contexts then have :class:`Reads` for documents."""
        self.key_dim, self.value_dim = sizes.linear_key_head_dim, sizes.linear_value_head_dim
        dim, v_dim, heads = sizes.hidden_size, sizes.widths[1], sizes.linear_num_value_heads
        self.wq, self.wk, self.wv, self.wz = (
            Linear(dim, width, kernels) for _, width in sizes._inputs()
        )
        narrow = kernels.model_copy(update={"precision": "bf16"})
        self.wb, self.wa = Linear(dim, heads, narrow), Linear(dim, heads, narrow)
        filters = (sizes.weights[f"conv_{x}"].shape for x in "qkv")
        self.conv_q, self.conv_k, self.conv_v = (nn.Parameter(torch.empty(x)) for x in filters)
        self.a_log, self.dt_bias = (nn.Parameter(torch.empty(heads)) for _ in "ab")
        self.norm = RMSNorm(self.value_dim, sizes.norm_eps, kernels)
        self.wo = Linear(v_dim, dim, kernels)

    def keep_states(self, slots: int) -> LinearStates:
        """Serve generation from now on, of ``slots`` - 1 sequences at once; returns the slots."""
        self.states = LinearStates(slots)
        return self.states

    def forward(self, x_BSD: torch.Tensor, context: Context) -> torch.Tensor:
        """Mix tokens; returns [B, S, D] in ``x_BSD``'s dtype."""
        x_TD, dtype = x_BSD.flatten(0, 1), x_BSD.dtype
        wide = torch.promote_types(dtype, torch.float32)
        q, k, v, z = linears(x_TD, (self.wq, self.wk, self.wv, self.wz))
        given = (q, k, v, self.wa(x_TD), self.wb(x_TD))
        weights = (self.conv_q, self.conv_k, self.conv_v, self.a_log, self.dt_bias)
        o_THV = self.over_heads(self._mixed, given, weights, context)
        normed = self.norm(o_THV.unflatten(1, (-1, self.value_dim))).flatten(1)
        if self.batch_invariant:
            y = swiglu(torch.cat((z, normed), dim=-1), backend=self.backend)
        else:
            y = (normed.to(wide) * F.silu(z.to(wide))).to(dtype)
        return self.wo(y).view_as(x_BSD)

    def _mixed(
        self, given: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], context: Context
    ) -> torch.Tensor:
        """Return what heads read of their states, [T, H * V]."""
        q, k, v, a_TH, b_TH = given
        *filters, a_log, dt_bias = weights
        wide = torch.promote_types(q.dtype, torch.float32)
        convolving = {
            "q": Convolution(q, filters[0], self.key_dim, True),
            "k": Convolution(k, filters[1], self.key_dim, True),
            "v": Convolution(v, filters[2], self.value_dim, False),
        }
        reads, scale = context.documents, self.key_dim**-0.5
        fusible = not self.batch_invariant
        if self.states is not None:
            assert isinstance(reads, Reads)  # a step of generation
            heads = self.states.convolved(convolving, reads, self.backend)
        else:
            assert context.place_T is not None  # the architecture has this part
            heads = convolved([*convolving.values()], context.place_T, fusible=fusible)
        rates_H = exp(a_log.to(wide), fusible=fusible)
        g_TH = -rates_H * softplus(a_TH.to(wide) + dt_bias, fusible=fusible)
        beta_TH = sigmoid(b_TH, fusible=fusible)
        q_TQK, k_TQK, v_THV = heads
        inputs = (q_TQK, k_TQK, v_THV, g_TH, beta_TH)
        if self.states is not None and isinstance(reads, Reads):
            return self.states.rule(inputs, reads, scale, self.backend).flatten(1)
        assert isinstance(reads, Documents)
        return gated_delta(*inputs, reads, scale, self.backend).flatten(1)
