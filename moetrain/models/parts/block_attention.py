"""MiniMax sparse attention (MiniMax-M3): grouped-query attention over blocks of keys.

A document's keys are cut into blocks of N consecutive ones, by their position in it. An indexer
scores them, with one query head for each key/value head of attention and one key head for all::

    iq = rope(norm(W_q x)) of each head      ik = rope(norm(W_k x))
    score[t, block] = max over keys s <= t of the block of  iq[t] . ik[s]

The score of a token's own block, and of the blocks just before it if ``index_local_blocks`` is more
than 1, is infinite. The query heads that read a key/value head attend to the K blocks with the
largest scores of its index head, causally. Blocks with equal scores are taken in their order. In
rows of at most K N tokens attention has all keys, and the bits of
:class:`~moetrain.models.attention.GroupedQueryAttention`.

Worked example with N = 2, K = 2, five tokens and products 0, 3, 1, 1, 2 of token 4 with the keys:
its own block 2 holds key 4 alone, and blocks 0 and 1 have scores 3 and 1. It attends to keys 0, 1
and 4.

``transformers`` cuts blocks by places in the row. Here documents that share a row are cut as if
each were alone. Training selects in rows and generation in pages; both call :func:`select_blocks`.

The selection has no gradient, and there is no other loss of the indexer, so it is never trained.

Left out on purpose: a sparse kernel. Attention computes all scores, and masks those that are not
selected: it is exact, and no faster than dense attention.

Legend: B batch, S sequence of this device's tokens, L keys, N keys of a block, K selected blocks, D
model width, G key/value heads, M blocks of a document at most, d width of an index head, T tokens
of a step, P pages, Z tokens of a page.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from moetrain.config import KernelsSection, MoeSection
from moetrain.kernels.attention.index_keys import visible_keys
from moetrain.kernels.attention.paged import PagedRows, as_mask
from moetrain.models.architecture import Part, Weight, Workload, linear
from moetrain.models.attention import Attention, GroupedQueryAttention
from moetrain.models.generation import Caches, LayerCache, SeveralCaches, TokenCache
from moetrain.models.layers import Context, KernelModule, RMSNorm
from moetrain.models.parts.indexer import Projection, keys_in_pages, rotated
from moetrain.models.rules import COLWISE, NORM, ZERO_NORM, Rule
from moetrain.runtime.backend import worth_saving

_BLOCK_SCORES = 2**27
"""About how many scores of keys exist at once."""
_QUERIES = replace(COLWISE, decay=False, has_own_loss=True)
_KEYS = Rule("replicate", decay=False, has_own_loss=True)


@dataclass(frozen=True, kw_only=True)
class BlockSparseAttention(GroupedQueryAttention):
    """Describes grouped-query attention over the blocks of keys that an indexer selects."""

    index_num_heads: int
    index_head_dim: int
    index_block_size: int
    """N"""
    index_topk_blocks: int
    """K"""
    index_local_blocks: int
    """The number of blocks, up to a token's own, that are always selected."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.index_num_heads != self.num_kv_heads:
            problem = f"index_num_heads {self.index_num_heads} is not num_kv_heads"
            raise ValueError(f"{problem} {self.num_kv_heads}, each of which has an index head")
        if self.index_head_dim < self.rotary_dim:
            problem = f"index_head_dim {self.index_head_dim} is less than the {self.rotary_dim}"
            raise ValueError(f"{problem} elements of a head that rotate")
        if self.index_local_blocks > self.index_topk_blocks:
            problem = f"index_local_blocks {self.index_local_blocks} is more than index_topk_blocks"
            raise ValueError(f"{problem} {self.index_topk_blocks}, the number that is selected")

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "BlockSparse":
        return BlockSparse(self, kernels)

    @property
    def most_keys(self) -> int:
        return self.index_topk_blocks * self.index_block_size

    @property
    def dense(self) -> GroupedQueryAttention:
        """The same attention over all keys."""
        return GroupedQueryAttention.of(self)

    @property
    def weights(self) -> Mapping[str, Weight]:
        dim, width = self.hidden_size, self.index_head_dim
        norm = replace(ZERO_NORM if self.zero_centred_norms else NORM, has_own_loss=True)
        return {
            **super().weights,
            **linear("indexer.wq", self.index_num_heads * width, dim, _QUERIES),
            **linear("indexer.wk", width, dim, _KEYS),
            "indexer.q_norm.weight": Weight((width,), norm),
            "indexer.k_norm.weight": Weight((width,), norm),
        }

    def products_per_token(self, seq_len: int) -> float:
        """Count the multiply-adds of a sparse kernel: those of the selected blocks alone.

        The indexer scores all keys that a token may see. In rows of at most :attr:`most_keys`
        tokens it does not run.
        """
        if seq_len <= self.most_keys:
            return self.dense.products_per_token(seq_len)
        # Tokens that see more keys have all of their blocks but, on average, half of their own.
        most, past = self.most_keys, 1 - self.most_keys / seq_len
        keys = most * (1 + past) / 2 - past * self.index_block_size / 2
        scored = self.index_num_heads * self.index_head_dim * seq_len / 2
        matrices = Part.products_per_token(self, seq_len)
        return matrices + (self.widths[0] + self.value_widths[0]) * keys + scored

    def activations(self, share: Workload) -> float:
        """Return the bytes of grouped-query attention.

        Rows that leave out blocks also keep the selected ones, a mask over the row's keys for each
        key/value head, and keys and values repeated for the query heads.
        """
        found = super().activations(share)
        if share.seq_len <= self.most_keys:
            return found
        keys = share.key_tokens if share.cp > 1 else share.seq_len
        masks = self.num_kv_heads * (4 * self.index_topk_blocks + share.width * keys)
        repeated = self.widths[0] - self.widths[1] + self.value_widths[0] - self.value_widths[1]
        own = share.tokens * masks + share.key_tokens * share.width * repeated
        return found + own / share.tp

    def exchanged(self, share: Workload) -> dict[str, float]:
        found = super().exchanged(share)
        keys = share.received(0, self.index_head_dim)["all_gather"]
        return {**found, "all_gather": found["all_gather"] + keys}

    def cached_elements(self, ranks: int = 1) -> int:
        return super().cached_elements(ranks) + self.index_head_dim


class BlockIndexer(KernelModule):
    """Computes the queries and keys by which blocks are scored."""

    def __init__(self, sizes: BlockSparseAttention, kernels: KernelsSection) -> None:
        super().__init__()
        self.use_kernels(kernels)
        dim, width = sizes.hidden_size, sizes.index_head_dim
        self.interleaved = sizes.rope_interleaved
        self.wq = Projection(dim, sizes.index_num_heads * width, kernels)
        self.wk = Projection(dim, width, kernels)
        self.q_norm, self.k_norm = (
            RMSNorm(width, sizes.norm_eps, kernels, zero_centred=sizes.zero_centred_norms)
            for _ in range(2)
        )
        self.cache: TokenCache | None = None
        """The keys of generation; None: this module trains."""

    def forward(self, x_BSD: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [B, S, G, d] and keys [B, S, d] of the tokens."""
        width = self.k_norm.dim
        q_BSGd = self.q_norm(self.wq(x_BSD).unflatten(-1, (-1, width)))
        k_BS1d = self.k_norm(self.wk(x_BSD))[:, :, None]
        q_BSGd, k_BS1d = (rotated(x, context, self, self.interleaved) for x in (q_BSGd, k_BS1d))
        return q_BSGd, k_BS1d[:, :, 0]


class BlockSparse(Attention):
    """The module of :class:`BlockSparseAttention`."""

    gather_latents: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Gathers index keys [B, S, d] over the devices that share the tokens; context parallelism sets
    it. None: all keys are here."""

    def __init__(self, sizes: BlockSparseAttention, kernels: KernelsSection) -> None:
        super().__init__(sizes, kernels)
        self.most_keys, self.block_size = sizes.most_keys, sizes.index_block_size
        self.blocks = sizes.index_block_size, sizes.index_topk_blocks, sizes.index_local_blocks
        self.indexer = BlockIndexer(sizes, kernels)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> torch.Tensor:
        """Mix tokens; returns [B, S, D] in ``x_BSD``'s dtype."""
        with torch.no_grad():
            context = self._limited(x_BSD.detach(), context)
        return super().forward(x_BSD, context)

    def for_generation(self, caches: Caches, window: int | None) -> LayerCache | None:
        """Keep index keys beside keys and values from now on, and return all caches."""
        attention = super().for_generation(caches, window)
        if attention is None:
            return attention
        self.indexer.cache = caches.make_tokens()
        return SeveralCaches((attention, self.indexer.cache))

    def _limited(self, x_BSD: torch.Tensor, context: Context) -> Context:
        """Return the context in which tokens see the selected blocks alone."""
        rows: object = context.mask
        if isinstance(rows, PagedRows):
            assert self.indexer.cache is not None  # for_generation has made it
            q_BSGd, k_BSd = self.indexer(x_BSD, context)
            keys_PZd = self.indexer.cache.store(k_BSd[0], rows.slots_T)
            blocks_TGK = select_blocks_in_pages(q_BSGd[0], keys_PZd, rows, *self.blocks)
            if blocks_TGK is None:
                return context
            limited: Any = rows._replace(selected_TAK=blocks_TGK, selected_size=self.block_size)
            return context._replace(mask=limited)
        seq_len = context.rotation[0].shape[1] if context.whole is None else context.whole[1]
        if seq_len <= self.most_keys:
            return context
        q_BSGd, k_BLd = self.indexer(x_BSD, context)
        if self.gather_latents is not None:
            k_BLd = self.gather_latents(k_BLd)
        assert context.seen_BS2 is not None  # this part selects keys
        blocks_BSGK = select_blocks(q_BSGd, k_BLd, context.seen_BS2, *self.blocks)
        return context.showing(
            visible_in_blocks(blocks_BSGK, context.seen_BS2, k_BLd.shape[1], self.block_size)
        )


def select_blocks(
    q_BSGd: torch.Tensor,
    k_BLd: torch.Tensor,
    seen_BS2: torch.Tensor,
    block_size: int,
    topk: int,
    num_local: int,
) -> torch.Tensor:
    """Select ``topk`` blocks for each token and head: int32 [B, S, G, K], the highest score first.

    -1 is no block: a token that may see fewer blocks selects all of them. Blocks are counted from
    the first key that the token may see.

    Args:
        seen_BS2: the first and the last key that each token may see.
        num_local: the number of blocks, up to the token's own, that are always selected.
    """
    return _select(q_BSGd, k_BLd, seen_BS2, block_size, topk, num_local)


@torch.library.custom_op("moetrain::select_blocks", mutates_args=())
def _select(
    q_BSGd: torch.Tensor,
    k_BLd: torch.Tensor,
    seen_BS2: torch.Tensor,
    block_size: int,
    topk: int,
    num_local: int,
) -> torch.Tensor:
    B, S, G, _ = q_BSGd.shape
    L = k_BLd.shape[1]
    M = -(-L // block_size)
    wide = torch.promote_types(q_BSGd.dtype, torch.float32)
    index_L = torch.arange(M * block_size, device=q_BSGd.device)
    index_M = torch.arange(M, device=q_BSGd.device)
    out_BSGK = q_BSGd.new_full((B, S, G, topk), -1, dtype=torch.int32)
    step = max(1, _BLOCK_SCORES // max(1, B * G * M * block_size))
    for start in range(0, S, step):
        own = slice(start, start + step)
        first_BS1, last_BS1 = seen_BS2[:, own].split(1, dim=-1)
        # 1. Score all keys.
        q_BRd = q_BSGd[:, own].to(wide).flatten(1, 2)
        scores_BSGL = (q_BRd @ k_BLd.to(wide).mT).unflatten(1, (-1, G))
        # 2. Move each token's keys so that its document begins at 0, and hide the others.
        places_BSL = first_BS1 + index_L
        moved_BSGL = scores_BSGL.gather(
            -1, places_BSL.clamp(max=L - 1)[:, :, None].expand(-1, -1, G, -1)
        )
        moved_BSGL = moved_BSGL.masked_fill((places_BSL > last_BS1)[:, :, None], -torch.inf)
        # 3. Score the blocks, the token's own and those just before it with infinity.
        blocks_BSGM = moved_BSGL.unflatten(-1, (M, block_size)).amax(-1)
        own_BS1 = (last_BS1 - first_BS1) // block_size
        is_local_BSM = (index_M <= own_BS1) & (index_M > own_BS1 - num_local)
        blocks_BSGM = blocks_BSGM.masked_fill(is_local_BSM[:, :, None], torch.inf)
        # 4. Torch's topk may take any of equal scores. A stable sort keeps their order.
        found = blocks_BSGM.sort(dim=-1, descending=True, stable=True)
        is_hidden_BSGK = found.values[..., :topk] == -torch.inf
        chosen_BSGK = found.indices[..., :topk].masked_fill(is_hidden_BSGK, -1).int()
        out_BSGK[:, own, :, : chosen_BSGK.shape[-1]] = chosen_BSGK
    return out_BSGK


@_select.register_fake
def _(
    q_BSGd: torch.Tensor,
    k_BLd: torch.Tensor,
    seen_BS2: torch.Tensor,
    block_size: int,
    topk: int,
    num_local: int,
) -> torch.Tensor:
    return q_BSGd.new_empty(*q_BSGd.shape[:3], topk, dtype=torch.int32)


worth_saving("routing", torch.ops.moetrain.select_blocks.default)


def visible_in_blocks(
    blocks_BSGK: torch.Tensor, seen_BS2: torch.Tensor, num_keys: int, block_size: int
) -> torch.Tensor:
    """Return bool [B, G, S, L]: the keys of the selected blocks that each token may see.

    The arguments are as those of :func:`select_blocks` and its result.
    """
    kept_BSGM = as_mask(blocks_BSGK, -(-num_keys // block_size))
    index_L = torch.arange(num_keys, device=seen_BS2.device)
    block_BSL = (index_L - seen_BS2[..., :1]).clamp(min=0) // block_size
    heads = blocks_BSGK.shape[2]
    kept_BSGL = kept_BSGM.gather(-1, block_BSL[:, :, None].expand(-1, -1, heads, -1))
    return (kept_BSGL & visible_keys(seen_BS2, num_keys)[:, :, None]).transpose(1, 2)


def select_blocks_in_pages(
    q_TGd: torch.Tensor,
    keys_PZd: torch.Tensor,
    rows: PagedRows,
    block_size: int,
    topk: int,
    num_local: int,
) -> torch.Tensor | None:
    """Select ``topk`` blocks for each token of a step: int32 [T, G, K], counted in its sequence.

    The arguments are as those of :func:`select_blocks`. None: no sequence has more than ``topk``
    blocks, so all of them are selected.

    Args:
        keys_PZd: the index keys in pages, those of the step among them.
    """
    found = [
        select_blocks(q_TGd[own, None], keys_tLd, seen_t12, block_size, topk, num_local)[:, 0]
        for own, keys_tLd, seen_t12 in keys_in_pages(keys_PZd, rows, len(q_TGd), topk * block_size)
    ]
    return torch.cat(found) if found else None
