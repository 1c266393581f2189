"""Multi-head latent attention: one narrow latent holds keys and values (arXiv 2405.04434).

    q = [q_nope | rope(q_rope)] of each head = W_qb norm(W_qa x), or W_q x
    [c | r] = W_kva x        [k_nope | v] of each head = W_kvb norm(c)        k = [k_nope | rope(r)]

All heads share the rotated key ``r``. In some models nothing rotates. Values may be wider or
narrower than queries and keys. In some families queries have a factor by their position
(``Context.query_scale``). Attention is over the expanded keys and values. Generation caches them
expanded too, so that it computes the same bits as training.

If :attr:`Caches.keeps_latents <moetrain.models.generation.Caches.keeps_latents>` is True,
generation caches ``[norm(c) | rope(r)]`` of each token instead, and attends within the latents: the
two halves of ``W_kvb`` multiply a head's query and its result
(:mod:`moetrain.kernels.attention.latent`). That takes less memory, and has other bits. Training
over selected keys does so too (:mod:`moetrain.models.parts.sparse_attention`).

Legend: B batch, S sequence, T tokens of a step, L keys of a row, D model width, H heads, d width of
a query and a key, n of their part that does not rotate, v of a value, r rotating width, c width of
the latent.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.kernels.attention.latent import per_head
from moetrain.kernels.attention.paged import PagedRows, attend_to_latents
from moetrain.kernels.norm.rotary import rotary
from moetrain.models.architecture import (
    FP32,
    AttentionPart,
    Weight,
    Workload,
    linear,
)
from moetrain.models.attention import CoreAttention
from moetrain.models.generation import Caches, LayerCache, TokenCache
from moetrain.models.layers import Context, Linear, RMSNorm, linears
from moetrain.models.rope_scaling import RopeScaling
from moetrain.models.rules import COLWISE, NORM, ROWWISE, Rule

_NORM_EPS = 1e-6
"""Epsilon of the latents' norms, whatever that of the model's other norms is."""
_WHOLE = Rule("replicate")
"""The rule of the projections to latents: every tensor parallel rank computes them for all
tokens."""
_BIAS = Rule("replicate", init="zeros", decay=False)


@dataclass(frozen=True, kw_only=True)
class LatentAttention(AttentionPart):
    """Describes causal multi-head latent attention."""

    divided: ClassVar[Mapping[str, str]] = {"num_heads": "tp"}

    num_heads: int
    num_kv_heads: int
    q_lora_rank: int | None
    """Width of the queries' latent; None: queries are projected from the token directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeScaling
    rope_interleaved: bool = True
    partial_rotary_factor: float = 1.0
    """1, or 0: nothing rotates, and the shared key is like any other."""
    qkv_bias: bool = False
    """True: the projections to latents have biases."""
    out_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads != self.num_heads:
            problem = f"num_kv_heads {self.num_kv_heads} is not num_heads {self.num_heads}"
            raise ValueError(f"{problem}; in latent attention every head has keys of its own")
        if self.qk_rope_head_dim % 2:
            problem = f"qk_rope_head_dim {self.qk_rope_head_dim} is odd"
            raise ValueError(f"{problem}; rotary embeddings need pairs")
        if self.partial_rotary_factor not in (0, 1):
            problem = f"partial_rotary_factor {self.partial_rotary_factor} is neither 0 nor 1"
            raise ValueError(f"{problem}; qk_rope_head_dim says how much of a head rotates")

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "MultiHeadLatent":
        return MultiHeadLatent(self, kernels)

    @property
    def widest_head(self) -> int:
        return max(self.head_dim, self.v_head_dim)

    @property
    def head_dim(self) -> int:
        """Width of a query and a key, d."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def expanded(self) -> tuple[int, int]:
        """Widths of the queries of all heads, and of the expanded keys (without r) and values."""
        latent = self.qk_nope_head_dim + self.v_head_dim
        return self.num_heads * self.head_dim, self.num_heads * latent

    @property
    def latents(self) -> tuple[int, int]:
        """Width of the queries' latent (0: there is none), and width of the latent of keys and
        values together with the rotating key."""
        return self.q_lora_rank or 0, self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """The factor of the scores; YaRN enlarges it for longer contexts (arXiv 2309.00071)."""
        rope = self.rope
        scale = self.head_dim**-0.5
        if rope.kind != "yarn" or not rope.mscale_all_dim or rope.factor <= 1:
            return scale
        return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2

    @property
    def rotary_dim(self) -> int:
        return int(self.partial_rotary_factor) * self.qk_rope_head_dim

    @property
    def weights(self) -> Mapping[str, Weight]:
        dim, (q_dim, kv_dim), (q_latent, kv_latent) = self.hidden_size, self.expanded, self.latents
        found: dict[str, Weight] = {}
        if q_latent:
            found |= self._latent("wq_a", q_latent)
            found["q_a_norm.weight"] = Weight((q_latent,), NORM)
            found |= linear("wq_b", q_dim, q_latent, COLWISE)
        else:
            found |= linear("wq", q_dim, dim, COLWISE)
        found |= self._latent("wkv_a", kv_latent)
        found["kv_a_norm.weight"] = Weight((self.kv_lora_rank,), NORM)
        found |= linear("wkv_b", kv_dim, self.kv_lora_rank, COLWISE)
        return found | linear(
            "wo", dim, self.num_heads * self.v_head_dim, ROWWISE, bias=self.out_bias
        )

    def _latent(self, name: str, width: int) -> dict[str, Weight]:
        found = linear(name, width, self.hidden_size, _WHOLE)
        return found | ({f"{name}.bias": Weight((width,), _BIAS)} if self.qkv_bias else {})

    def products_per_token(self, seq_len: int) -> float:
        window = min(self.window or seq_len, seq_len)
        keys = window * (1 - window / (2 * seq_len))
        pair = self.num_heads * (self.head_dim + self.v_head_dim)
        return super().products_per_token(seq_len) + pair * keys

    def activations(self, share: Workload) -> float:
        """Return the bytes that one rank keeps: the latents and their norms, which every tensor
        parallel rank has, and the queries, keys, values, results and log-sum-exps of its heads."""
        w = share.width
        normed = self.latents[0] + self.kv_lora_rank
        own = sum(self.latents) * w + normed * (w if share.is_compiled else FP32 + w)
        heads = self.num_heads * (2 * w * (self.head_dim + self.v_head_dim) + FP32)
        expanded = self.num_heads * w * (self.head_dim + self.v_head_dim) / share.tp
        gathered = w * self.kv_lora_rank + expanded
        return (
            share.tokens * (own + heads / share.tp) + (share.key_tokens - share.tokens) * gathered
        )

    def exchanged(self, share: Workload) -> dict[str, float]:
        spread = 2 * self.num_heads * (self.head_dim + self.v_head_dim)
        return share.received(spread / share.tp, self.latents[1])

    def working_set(self, share: Workload) -> float:
        width = self.num_heads * (2 * self.head_dim + self.v_head_dim)
        return share.tokens * share.width * width / share.tp

    def cached_elements(self, ranks: int = 1) -> int:
        heads = self.num_heads // (1 if self.num_heads % ranks else ranks)
        return heads * (self.head_dim + self.v_head_dim)

    @property
    def cached_latents(self) -> int:
        return self.latents[1]

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        w = share.width
        products = sum(self.latents) + sum(self.expanded) / share.tp
        result = self.num_heads * (self.v_head_dim * w + FP32) / share.tp
        return {
            "attention": share.tokens * result,
            "linear": w * (share.tokens * products + share.own_tokens * self.hidden_size),
        }


class Projected(NamedTuple):
    """Queries, and the latents of keys and values. Under context parallelism latents may be those
    of all tokens, and queries are those of this device's tokens."""

    q_BSHd: torch.Tensor
    """Rotated, [q_nope | q_rope] of each head."""
    latent_BLc: torch.Tensor
    rotated_BLr: torch.Tensor
    """The rotated key that all heads share."""
    query_latent_BSc: torch.Tensor | None
    """The queries' latent after its norm; None: there is none."""


class Expanded(NamedTuple):
    """Queries, keys and values. Under context parallelism, keys and values may be those of all
    tokens, and queries are those of this device's tokens."""

    q_BSHd: torch.Tensor
    k_BSHd: torch.Tensor
    v_BSHv: torch.Tensor
    query_latent_BSc: torch.Tensor | None
    """The queries' latent after its norm; None: there is none."""


class MultiHeadLatent(CoreAttention):
    """The module of :class:`LatentAttention`.

    ``gather_latents`` is a plain attribute, which context parallelism sets if this device has a
    part of the tokens. It returns the latents and rotated keys of all tokens, from which keys and
    values of all tokens are computed here.
    """

    def __init__(self, sizes: LatentAttention, kernels: KernelsSection) -> None:
        super().__init__(kernels)
        self.gather_latents: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.kept: TokenCache | None = None
        """The latents of generation; None: this module trains, or keeps keys and values."""
        self.scale, self.interleaved = sizes.scale, sizes.rope_interleaved
        self.rotates = sizes.rotary_dim > 0
        self.nope = sizes.qk_nope_head_dim
        self.rope = sizes.qk_rope_head_dim
        self.latent = sizes.kv_lora_rank
        self.v_width = sizes.v_head_dim
        dim, (q_dim, kv_dim), (q_latent, kv_latent) = (
            sizes.hidden_size,
            sizes.expanded,
            sizes.latents,
        )
        self.wq_b = None
        if q_latent:
            self.wq_a = Linear(dim, q_latent, kernels, bias=sizes.qkv_bias)
            self.q_a_norm = RMSNorm(q_latent, _NORM_EPS, kernels)
            self.wq_b = Linear(q_latent, q_dim, kernels)
        else:
            self.wq = Linear(dim, q_dim, kernels)
        self.wkv_a = Linear(dim, kv_latent, kernels, bias=sizes.qkv_bias)
        self.kv_a_norm = RMSNorm(self.latent, _NORM_EPS, kernels)
        self.wkv_b = Linear(self.latent, kv_dim, kernels)
        self.wo = Linear(sizes.num_heads * self.v_width, dim, kernels, bias=sizes.out_bias)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> torch.Tensor:
        """Mix tokens; returns [B, S, D] in ``x_BSD``'s dtype."""
        return self.wo(self.attend(x_BSD, context).flatten(-2))

    def for_generation(self, caches: Caches, window: int | None) -> LayerCache | None:
        """Attend over a cache from now on, of latents if the generator keeps them."""
        if not caches.keeps_latents:
            return super().for_generation(caches, window)
        assert window is None  # no family has windows beside latents
        self.kept = caches.make_tokens()
        return self.kept

    @property
    def generates(self) -> bool:
        """True: the module attends over a cache."""
        return self.cache is not None or self.kept is not None

    def attend(self, x_BSD: torch.Tensor, context: Context) -> torch.Tensor:
        """Return each head's result, [B, S, H, v]."""
        projected = self.project(x_BSD, context)
        if self.kept is not None:
            return self.attend_cached(projected, context)
        q_BSHd, k_BSHd, v_BSHv, _ = self.expanded(projected)
        return self.core(q_BSHd, k_BSHd, v_BSHv, context, self.scale)

    def expand(self, x_BSD: torch.Tensor, context: Context) -> Expanded:
        """Return rotated queries and keys, and values, of this device's heads."""
        return self.expanded(self.project(x_BSD, context))

    def project(self, x_BSD: torch.Tensor, context: Context) -> Projected:
        """Return rotated queries of this device's heads, and latents with rotated keys."""
        first = self.wq if self.wq_b is None else self.wq_a
        q, latents = linears(x_BSD, (first, self.wkv_a))
        query_latent_BSc = None
        if self.wq_b is not None:
            query_latent_BSc = self.q_a_norm(q)
            q = self.wq_b(query_latent_BSc)
        latent_BLc, rotating_BSr = latents.split((self.latent, self.rope), dim=-1)
        latent_BLc = self.kv_a_norm(latent_BLc)
        rotated_BLr = self._rotated(rotating_BSr[:, :, None], context)[:, :, 0]
        if self.gather_latents is not None:
            whole = self.gather_latents(torch.cat((latent_BLc, rotated_BLr), dim=-1))
            latent_BLc, rotated_BLr = whole.split((self.latent, self.rope), dim=-1)
        q_BSHd = q.unflatten(-1, (-1, self.nope + self.rope))
        q_nope, q_rotating = q_BSHd.split((self.nope, self.rope), dim=-1)
        q_BSHd = torch.cat((q_nope, self._rotated(q_rotating, context)), dim=-1)
        if context.query_scale is not None:
            q_BSHd = q_BSHd * context.query_scale.to(q_BSHd.dtype)
        return Projected(q_BSHd, latent_BLc, rotated_BLr, query_latent_BSc)

    def expanded(self, projected: Projected) -> Expanded:
        """Return the queries, and the keys and values of this device's heads."""
        q_BSHd, latent_BLc, rotated_BLr, query_latent_BSc = projected
        kv_BLHn = self.wkv_b(latent_BLc).unflatten(-1, (-1, self.nope + self.v_width))
        k_nope, v_BLHv = kv_BLHn.split((self.nope, self.v_width), dim=-1)
        k_rotated = rotated_BLr[:, :, None].expand(*k_nope.shape[:-1], -1)
        k_BLHd = torch.cat((k_nope, k_rotated), dim=-1)
        return Expanded(q_BSHd, k_BLHd, v_BLHv.contiguous(), query_latent_BSc)

    def attend_cached(self, projected: Projected, context: Context) -> torch.Tensor:
        """Store latents, and attend within those of each token's sequence; returns [1, T, H, v]."""
        rows: object = context.mask
        assert isinstance(rows, PagedRows)  # generation lays out its rows so
        assert self.kept is not None  # for_generation has made it
        latents_Td = torch.cat((projected.latent_BLc, projected.rotated_BLr), dim=-1)[0]
        latents_PZd = self.kept.store(latents_Td, rows.slots_T)
        # Absorb the matrix that expands keys into the queries.
        adapter = self.wkv_b.adapter("weight", latents_Td.dtype)
        weight = self.wkv_b.weight.to(latents_Td.dtype)
        weight = weight if adapter is None else adapter.merged(weight)
        w_HNc = weight.unflatten(0, (-1, self.nope + self.v_width))
        w_Hnc, w_Hvc = w_HNc.split((self.nope, self.v_width), dim=1)
        q_nope, q_rotated = projected.q_BSHd[0].split((self.nope, self.rope), dim=-1)
        q_THc = per_head(q_nope, w_Hnc.transpose(1, 2), self.backend)
        q_THd = torch.cat((q_THc, q_rotated), dim=-1)
        o_THc = attend_to_latents(
            q_THd, latents_PZd, rows, width=self.latent, scale=self.scale, backend=self.backend
        )
        return per_head(o_THc, w_Hvc, self.backend)[None]

    def _rotated(self, x_BSHr: torch.Tensor, context: Context) -> torch.Tensor:
        """Rotate heads by the tokens' positions, if they rotate."""
        if not self.rotates:
            return x_BSHr
        cos_Sp, sin_Sp = (angles.flatten(0, 2) for angles in context.rotation)
        y_THr = rotary(
            x_BSHr.flatten(0, 1),
            cos_Sp,
            sin_Sp,
            backend=self.backend,
            interleaved=self.interleaved,
            fusible=not self.batch_invariant,
        )
        return y_THr.unflatten(0, x_BSHr.shape[:2])
