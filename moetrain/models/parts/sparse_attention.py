"""DeepSeek sparse attention (DeepSeek-V3.2, section 2.1): latent attention over selected keys.

A layer's indexer (:mod:`moetrain.models.parts.indexer`) selects ``index_topk`` keys for each token,
and latent attention is a softmax over these alone. A layer without an indexer attends to the keys
that the last layer with one has selected (arXiv 2603.12201). In rows of at most ``index_topk``
tokens attention has all keys, and its bits are those of
:class:`~moetrain.models.parts.latent_attention.LatentAttention`.

The selection has no gradient, so a language model's loss does not train the indexer. A loss of its
own does (:mod:`moetrain.models.parts.indexer_loss`), where ``train.indexer`` says so.

Training has two forms of the same attention (``kernels.sparse_attention``):

* dense: keys and values of all heads are expanded from the latents, and all scores of a row are
  computed. Those that are not selected are masked.
* sparse: the heads' queries are absorbed into the latent, which all heads share, so that only the
  selected latents have to be gathered (:mod:`moetrain.kernels.attention.sparse`). With W_k and W_v
  the parts of a head in W_kvb, and c the latents::

      q_nope . (W_k c_j) = (W_k^T q_nope) . c_j      sum_j p_j (W_v c_j) = W_v (sum_j p_j c_j)

A token and head take ``L (d + v)`` multiply-adds for the products of the dense form, which computes
all L keys of the row, and ``K (2 c + r)`` for those of the sparse one, whose products run at 0.74
of the dense form's rate (GLM-5's layer on one H200). auto takes the sparse form where it is faster,
above 9,409 keys for DeepSeek-V3.2 and 5,881 for GLM-5. Generation gathers expanded keys, or latents
(:mod:`moetrain.kernels.attention.latent`).

Legend: B batch, S sequence of this device's tokens, L keys, K selected keys, D model width, H
heads, d width of a query and a key, n of its part that does not rotate, r of the part that does, v
of a value, c of the latent.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.kernels.attention.paged import PagedRows, as_mask
from moetrain.kernels.attention.sparse import fits_kernels, scratch_bytes, sparse_attention
from moetrain.models.architecture import FP32, Weight, Workload, linear
from moetrain.models.generation import Caches, LayerCache, SeveralCaches
from moetrain.models.layers import Context, Selection, SelectsKeys
from moetrain.models.parts.indexer import (
    Indexed,
    Indexer,
    IndexerSizes,
    select_in_pages,
    select_keys,
)
from moetrain.models.parts.indexer_loss import attention_weights, divergence
from moetrain.models.parts.latent_attention import (
    Expanded,
    LatentAttention,
    MultiHeadLatent,
    Projected,
)
from moetrain.models.rules import Rule
from moetrain.runtime.backend import use_fast

_SPARSE_RATE = 0.74
"""The rate of the sparse form's products, over that of the dense form's, forward and backward of
GLM-5's layer in bf16 on one H200: both forms take as long at about 5,900 tokens."""
_INDEXER = Rule("replicate", decay=False, has_own_loss=True)
_NORM = replace(_INDEXER, init="ones")
_IN_FP32 = replace(_INDEXER, gather=torch.float32)
_BIAS = replace(_INDEXER, init="zeros")


@dataclass(frozen=True, kw_only=True)
class SparseLatentAttention(LatentAttention):
    """Describes latent attention over the keys that an indexer selects."""

    has_indexer_loss: ClassVar[bool] = True
    has_sparse_form: ClassVar[bool] = True

    index_topk: int
    index_num_heads: int
    index_head_dim: int
    index_rope_interleaved: bool
    has_indexer: bool
    """False: the layer uses the keys that an earlier layer has selected."""
    indexer_learns: bool
    """False: the indexer is frozen whatever ``train.indexer`` is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.q_lora_rank is None:
            raise ValueError("q_lora_rank is null, but the indexer's queries come from that latent")
        if self.index_head_dim < self.qk_rope_head_dim:
            problem = f"index_head_dim {self.index_head_dim} is less than qk_rope_head_dim"
            raise ValueError(f"{problem} {self.qk_rope_head_dim}, the part of it that rotates")

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "SparseLatent":
        return SparseLatent(self, kernels)

    @property
    def most_keys(self) -> int:
        return self.index_topk

    @property
    def follows_selection(self) -> bool:
        return not self.has_indexer

    @property
    def indexer(self) -> IndexerSizes:
        """The sizes of the indexer."""
        assert self.q_lora_rank is not None  # as checked above
        return IndexerSizes(
            hidden_size=self.hidden_size,
            latent=self.q_lora_rank,
            num_heads=self.index_num_heads,
            head_dim=self.index_head_dim,
            topk=self.index_topk,
            interleaved=self.index_rope_interleaved,
        )

    @property
    def weights(self) -> Mapping[str, Weight]:
        found = dict(super().weights)
        if not self.has_indexer:
            return found
        sizes = self.indexer
        dim, heads, width = sizes.hidden_size, sizes.num_heads, sizes.head_dim
        own = linear("indexer.wq_b", heads * width, sizes.latent, _INDEXER)
        own |= linear("indexer.wk", width, dim, _INDEXER)
        own["indexer.k_norm.weight"] = Weight((width,), _NORM)
        own["indexer.k_norm.bias"] = Weight((width,), _BIAS)
        own |= linear("indexer.weights_proj", heads, dim, _IN_FP32)
        if not self.indexer_learns:
            own = {
                name: weight._replace(rule=replace(weight.rule, trainable=False))
                for name, weight in own.items()
            }
        return found | own

    @property
    def crossing(self) -> float:
        """The keys of a row above which the dense form takes longer than the sparse one."""
        sparse = (2 * self.kv_lora_rank + self.qk_rope_head_dim) / _SPARSE_RATE
        return self.index_topk * sparse / (self.head_dim + self.v_head_dim)

    def products_per_token(self, seq_len: int) -> float:
        """Count the multiply-adds of a sparse kernel: those of the selected keys alone.

        The indexer scores all keys that a token may see. In rows of at most ``index_topk`` tokens
        it does not run.
        """
        if seq_len <= self.index_topk:
            return super(SparseLatentAttention, self.without_indexer).products_per_token(seq_len)
        sparse = replace(self, window=self.index_topk)
        found = super(SparseLatentAttention, sparse).products_per_token(seq_len)
        scores = self.index_num_heads * (self.index_head_dim + 1) * seq_len / 2
        return found + scores * self.has_indexer

    @property
    def without_indexer(self) -> "SparseLatentAttention":
        """The same layer, using the keys of an earlier one."""
        return replace(self, has_indexer=False)

    def _num_keys(self, share: Workload) -> int:
        """Return the keys of a row that leaves out some, on one rank, else 0."""
        leaves_out = share.seq_len > self.index_topk
        return leaves_out * (share.key_tokens if share.cp > 1 else share.seq_len)

    def _is_sparse(self, share: Workload) -> bool:
        keys = self._num_keys(share)
        least = {"auto": self.crossing, "dense": math.inf, "sparse": 0}
        return keys > least[share.sparse_attention]

    @property
    def _sparse_elements(self) -> tuple[int, int]:
        """Elements that a head has for each token in the sparse form: absorbed queries, results."""
        return self.kv_lora_rank + self.qk_rope_head_dim, self.kv_lora_rank

    def activations(self, share: Workload) -> float:
        """Return the bytes of latent attention and of the selected keys.

        The dense form also keeps a mask over the keys of a row. The sparse one has no expanded keys
        and values of its tokens, but absorbed queries and results, and the weights by which it
        makes them.
        """
        own = 4 * self.index_topk * share.tokens if self.has_indexer else 0
        if not self._is_sparse(share):
            mask = share.tokens * self._num_keys(share) * share.width
            return super().activations(share) + own + mask
        w, (queries, results) = share.width, self._sparse_elements
        expanded = self.num_heads * w * (self.head_dim + self.v_head_dim)
        heads = self.num_heads * w * (queries + results)
        # The weights, and the unit vectors that they are made of.
        weights = self.kv_lora_rank * w * (self.expanded[1] / share.tp + self.kv_lora_rank)
        # The latents of all tokens, beside their rotated keys, instead of those of its own tokens.
        latents = w * (share.key_tokens * queries - share.tokens * self.kv_lora_rank)
        if share.tokens > share.seq_len:  # keys of several rows are counted anew
            own += 4 * self.index_topk * share.tokens
        alone = super().activations(replace(share, gathers_keys=False))
        return alone + own + latents + weights + share.tokens * (heads - expanded) / share.tp

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        found = dict(super().saved(share))
        if self._is_sparse(share):
            w, (_, results) = share.width, self._sparse_elements
            found["attention"] = share.tokens * self.num_heads * (results * w + FP32) / share.tp
            found["linear"] -= share.tokens * w * self.expanded[1] / share.tp
        return found

    def working_set(self, share: Workload) -> float:
        found = super().working_set(share)
        if self._is_sparse(share):
            w, (queries, results) = share.width, self._sparse_elements
            heads = self.num_heads / share.tp
            found += share.tokens * w * heads * (queries + results)
            sizes = (share.tokens, share.key_tokens, heads, self.index_topk, queries)
            found += scratch_bytes(*sizes, w)
        return found

    def exchanged(self, share: Workload) -> dict[str, float]:
        found = super().exchanged(share)
        keys = self.index_head_dim if self.has_indexer else 0
        return {**found, "all_gather": found["all_gather"] + share.received(0, keys)["all_gather"]}

    def cached_elements(self, ranks: int = 1) -> int:
        return super().cached_elements(ranks) + self._cached_keys

    @property
    def cached_latents(self) -> int:
        return super().cached_latents + self._cached_keys

    @property
    def _cached_keys(self) -> int:
        """Number of elements of the indexer's key that generation caches for a token."""
        return self.index_head_dim if self.has_indexer else 0


class SparseLatent(MultiHeadLatent, SelectsKeys):
    """The module of :class:`SparseLatentAttention`."""

    def __init__(self, sizes: SparseLatentAttention, kernels: KernelsSection) -> None:
        super().__init__(sizes, kernels)
        self.num_heads = sizes.num_heads
        self.indexer_learns = sizes.indexer_learns
        self.topk = sizes.index_topk
        self.form, self.crossing = kernels.sparse_form, sizes.crossing
        self.indexer = Indexer(sizes.indexer, kernels) if sizes.has_indexer else None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - it also returns the keys
        self, x_BSD: torch.Tensor, context: Context
    ) -> tuple[torch.Tensor, Selection | None]:
        """Mix tokens; returns [B, S, D] in ``x_BSD``'s dtype, and the keys if it selects them."""
        projected = self.project(x_BSD, context)
        sees_all = self.indexer_mode == "warmup" and not self.generates
        is_sparse = not sees_all and self._is_sparse(projected, context)
        is_within = is_sparse or self.kept is not None
        expanded = None if is_within else self.expanded(projected)
        selection = None
        keys_BSK = context.selected_BSK
        if self.indexer is not None:
            selection = self._select(x_BSD, projected, expanded, context)
            keys_BSK = selection.keys_BSK
        if sees_all:
            selection = None if selection is None else selection._replace(keys_BSK=None)
        elif keys_BSK is not None:
            context = context if is_sparse else _limited(context, keys_BSK, _num_keys(projected))
        elif not self.generates and self._leaves_out(context):
            raise RuntimeError("a layer without an indexer got no keys from an earlier layer")
        if self.kept is not None:
            y_BSHv = self.attend_cached(projected, context)
        elif expanded is None:
            assert keys_BSK is not None  # as checked above
            y_BSHv = self._attend_within_latents(projected, keys_BSK)
        else:
            q_BSHd, k_BLHd, v_BLHv, _ = expanded
            y_BSHv = self.core(q_BSHd, k_BLHd, v_BLHv, context, self.scale)
        return self.wo(y_BSHv.flatten(-2)), selection

    def _is_sparse(self, projected: Projected, context: Context) -> bool:
        """Return True if these rows are attended to in the sparse form."""
        if self.form == "dense" or self.generates or not self._leaves_out(context):
            return False
        q_BSHd = projected.q_BSHd
        drops = self.wkv_b.lora_scale is not None and self.wkv_b.lora_dropout > 0
        is_fast = use_fast(self.backend, q_BSHd)
        fits = fits_kernels(q_BSHd.dtype, q_BSHd.shape[2], self.latent, self.rope)
        if self.form == "auto":
            is_possible = q_BSHd.is_cuda and is_fast and fits and not (drops or self.is_watched)
            return is_possible and _num_keys(projected) > self.crossing
        asked = 'kernels.sparse_attention: "sparse"'
        if drops or self.is_watched:
            problem = "has no dropout of an adapter on wkv_b, and no scores for QK-clip"
            raise ValueError(f"{asked} {problem}; use dense")
        if is_fast and not fits:
            given = (
                f"{q_BSHd.shape[2]} heads, kv_lora_rank {self.latent}, qk_rope_head_dim {self.rope}"
            )
            takes = "at most 256 heads, and the others must be powers of two from 16"
            raise ValueError(f"{asked} was given {given}; it takes {takes}. Use dense")
        return True

    def _attend_within_latents(self, projected: Projected, keys_BSK: torch.Tensor) -> torch.Tensor:
        """Return each head's result, [B, S, H, v], by the sparse form."""
        q_BSHd, latent_BLc, rotated_BLr, _ = projected
        # 1. The weights: the projection of the unit vectors, since it may have adapters or be fp8.
        adapter = self.wkv_b.adapter("weight", latent_BLc.dtype)
        # Jobs share no pass of a model with a selection bias, which all families here have. Their
        # stacked adapters would each take a part of the unit vectors.
        assert adapter is None or adapter.a.dim() == 2
        like = {"dtype": latent_BLc.dtype, "device": latent_BLc.device}
        kv_cHn = self.wkv_b(torch.eye(self.latent, **like))
        w_cHn, w_cHv = kv_cHn.unflatten(-1, (-1, self.nope + self.v_width)).split(
            (self.nope, self.v_width), dim=-1
        )
        # 2. The queries, absorbed into the latent.
        q_nope_THn, q_rotated_THr = q_BSHd.flatten(0, 1).split((self.nope, self.rope), dim=-1)
        q_THc = torch.einsum("thn,chn->thc", q_nope_THn, w_cHn)
        # 3. Attention over the rows laid end to end.
        keys_TK = keys_BSK.flatten(0, 1)
        if (batch := len(keys_BSK)) > 1:
            begins_B = torch.arange(batch, device=keys_BSK.device) * latent_BLc.shape[1]
            moved_BSK = keys_BSK + begins_B[:, None, None]
            keys_TK = moved_BSK.where(keys_BSK >= 0, -1).int().flatten(0, 1)
        y_THc = sparse_attention(
            torch.cat((q_THc, q_rotated_THr), dim=-1),
            torch.cat((latent_BLc, rotated_BLr), dim=-1).flatten(0, 1),
            keys_TK,
            self.scale,
            self.latent,
            self.backend,
        )
        # 4. The values.
        y_THv = torch.einsum("thc,chv->thv", y_THc, w_cHv)
        return y_THv.unflatten(0, q_BSHd.shape[:2])

    def for_generation(self, caches: Caches, window: int | None) -> LayerCache | None:
        """Keep the indexer's keys beside keys and values from now on, and return all caches."""
        attention = super().for_generation(caches, window)
        if attention is None or self.indexer is None:
            return attention
        self.indexer.cache = caches.make_tokens()
        return SeveralCaches((attention, self.indexer.cache))

    def _leaves_out(self, context: Context) -> bool:
        """Return True if the rows are long enough that some keys are left out."""
        rotation = context.rotation[0]
        seq_len = rotation.shape[1] if context.whole is None else context.whole[1]
        return seq_len > self.topk

    def _select(
        self,
        x_BSD: torch.Tensor,
        projected: Projected,
        expanded: Expanded | None,
        context: Context,
    ) -> Selection:
        """Select keys, and compute the indexer's loss if it is trained.

        ``expanded`` are those of ``projected``; None: they are computed if the loss needs them.
        """
        assert self.indexer is not None  # as the caller knows
        assert projected.query_latent_BSc is not None  # the part has checked it
        inputs = x_BSD.detach(), projected.query_latent_BSc.detach()
        rows: object = context.mask
        if isinstance(rows, PagedRows):
            assert self.indexer.cache is not None  # for_generation has made it
            indexed = self.indexer(*inputs, context)
            keys_PZd = self.indexer.cache.store(indexed.k_BLd[0], rows.slots_T)
            return Selection(select_in_pages(indexed, keys_PZd, rows, self.topk, self.backend))
        learns = self.indexer_learns and self.indexer_mode != "frozen" and torch.is_grad_enabled()
        leaves_out = self._leaves_out(context)
        if not (learns or leaves_out):
            return Selection(None)
        with torch.set_grad_enabled(learns):
            indexed = self.indexer(*inputs, context)
            if self.gather_latents is not None:
                indexed = replace(indexed, k_BLd=self.gather_latents(indexed.k_BLd))
        assert context.seen_BS2 is not None  # some part selects keys
        keys_BSK = None
        if leaves_out:
            with torch.no_grad():
                keys_BSK = select_keys(indexed, context.seen_BS2, self.topk, self.backend)
        if not learns:
            return Selection(keys_BSK)
        if expanded is None:
            with torch.no_grad():
                expanded = self.expanded(projected)
        return Selection(keys_BSK, *self._loss(indexed, expanded, keys_BSK, context))

    def _loss(
        self,
        indexed: Indexed,
        expanded: Expanded,
        keys_BSK: torch.Tensor | None,
        context: Context,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this device's share of ``Selection.kl_sum`` and ``Selection.kept_sum``."""
        assert context.seen_BS2 is not None  # some part selects keys
        is_limited = self.indexer_mode == "joint"
        weights_BSL = attention_weights(
            expanded.q_BSHd.detach(),
            expanded.k_BSHd.detach(),
            context.seen_BS2,
            keys_BSK,
            self.scale,
            is_limited,
        )
        ranks = self.num_heads // expanded.q_BSHd.shape[2]
        if self.sum_heads is not None:
            weights_BSL = self.sum_heads(weights_BSL)
        weights_BSL = weights_BSL / self.num_heads
        counts_BS = torch.ones_like(weights_BSL[..., 0])
        if context.is_pad_BS is not None:
            counts_BS = counts_BS.masked_fill(context.is_pad_BS, 0.0)
        kl_sum = divergence(
            indexed,
            weights_BSL[..., :-1],
            context.seen_BS2,
            keys_BSK if is_limited else None,
            counts_BS,
        )
        kept_sum = (weights_BSL[..., -1] * counts_BS).sum()
        # Every rank that shares the heads computes the same.
        return kl_sum / ranks, kept_sum / ranks


def _num_keys(projected: Projected) -> int:
    """Return L."""
    return projected.latent_BLc.shape[1]


def _limited(context: Context, keys_BSK: torch.Tensor, num_keys: int) -> Context:
    """Return the context whose masks show the selected keys alone."""
    rows: object = context.mask
    if isinstance(rows, PagedRows):
        limited: Any = rows._replace(selected_TAK=keys_BSK[0, :, None])
        return context._replace(mask=limited)
    return context.showing(as_mask(keys_BSK, num_keys)[:, None])
