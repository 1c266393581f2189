"""Attention of one step of generation over pages of keys and values.

On CUDA the batch-invariant kernels run. Elsewhere torch's own attention runs, over the sequences of
one length together.

A cache of latents has a kernel of its own on CUDA (:mod:`moetrain.kernels.attention.latent`).
Elsewhere a latent is the key and, without its rotating part, the value of a single key head.

Legend: T tokens of a step, N sequences, P pages, Z tokens of a page, M pages of a sequence at most,
H query heads, G key/value heads, d width of a query and a key, v of a value, c of a latent, K
selected blocks of keys, A heads with a selection of their own (G, or 1: all heads share it).
"""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch.nn import functional as F

from moetrain.kernels.attention.batch_invariant import step_attention, store_in_pages
from moetrain.kernels.attention.latent import latent_attention
from moetrain.kernels.attention.sinks import dense_attention_with_sinks
from moetrain.runtime.backend import Backend, use_fast

_GATHERED = 2**28
"""About how many elements of selected keys and values are gathered at once."""
_Cache = tuple[torch.Tensor, torch.Tensor]
"""Keys [P, Z, G, d] and values [P, Z, G, v] of all pages."""


class PagedRows(NamedTuple):
    """The tokens of a step and the pages of their sequences, in place of a mask."""

    slots_T: torch.Tensor
    """int32: the slot of each token's key and value, counted over all pages; -1: not stored."""
    ends_N: torch.Tensor
    """int32 [N + 1]: the sequences' ends among the T tokens, from 0."""
    seen_N: torch.Tensor
    """int32: tokens of each sequence that were read before."""
    pages_NM: torch.Tensor
    """int32: the pages of each sequence."""
    num_single: int
    """Number of sequences that read a single token each; they come first."""
    arrived: torch.Tensor | None = None
    """Counters for :func:`~moetrain.kernels.attention.batch_invariant.paged_attention` if keys and
    values are in their slots already; None: they are still to be stored."""
    selected_TAK: torch.Tensor | None = None
    """int32: the blocks of keys to which each token attends, counted in its sequence; -1: none. Of
    its own block it sees the keys up to itself. None: it attends to all keys of its sequence so
    far."""
    selected_size: int = 1
    """Keys of a block of :attr:`selected_TAK`."""
    longest: int | None = None
    """The most tokens that any of the sequences has, with those of the step; None: as many as their
    pages hold, since the host must not decide shapes."""

    def places(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sequence of each of ``tokens`` tokens, and the number of tokens before it
        there, int64 [T] each. The host does not wait."""
        index_T = torch.arange(tokens, device=self.ends_N.device)
        sequence_T = torch.searchsorted(self.ends_N[1:].long(), index_T, right=True)
        return sequence_T, self.seen_N[sequence_T] + index_T - self.ends_N[sequence_T]


def as_mask(keys_K: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return bool [..., L]: True for the selected of ``num_keys`` keys, or blocks of keys.

    ``keys_K`` is [..., K]. A key of -1 is none.
    """
    mask_L = keys_K.new_zeros(*keys_K.shape[:-1], num_keys + 1, dtype=torch.bool)
    places_K = keys_K.long().where(keys_K >= 0, num_keys)  # the last column is dropped
    return mask_L.scatter(-1, places_K, True)[..., :num_keys]


def attend_over_pages(
    q_THd: torch.Tensor,
    k_TGd: torch.Tensor,
    v_TGv: torch.Tensor,
    cache: _Cache,
    rows: PagedRows,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store the step's keys and values in ``cache``, and attend each token to its sequence so far.

    Returns ``o_THv``. A token sees the tokens of its sequence that were read, itself included.

    Args:
        window: the number of tokens that a token sees, itself included; None: all.
        scale: factor of the scores; None: 1 / sqrt(d).
        sinks_H: logits of attention sinks; None: there are none.
    """
    keys_PZGd, values_PZGv = cache
    if q_THd.is_cuda:
        arrived = rows.arrived
        if arrived is None:
            arrived = store_in_pages(keys_PZGd, values_PZGv, k_TGd, v_TGv, rows.slots_T)
        out_THv = step_attention(
            q_THd,
            keys_PZGd,
            values_PZGv,
            rows.ends_N,
            rows.seen_N,
            rows.pages_NM,
            rows.num_single,
            arrived,
            window=window,
            scale=scale,
            sinks_H=sinks_H,
        )
        if rows.selected_TAK is None:
            return out_THv
        assert window is None  # no family has windows or sinks beside a selection
        assert sinks_H is None
        return _with_selected(out_THv, q_THd, cache, rows, rows.selected_TAK, scale)
    is_stored_T = rows.slots_T >= 0
    slots_T = rows.slots_T[is_stored_T].long()
    for pages, x_TGd in zip(cache, (k_TGd, v_TGv), strict=True):
        pages.flatten(0, 1)[slots_T] = x_TGd[is_stored_T]
    return _attend_by_lengths(q_THd, cache, rows, window, scale, sinks_H)


def attend_to_latents(
    q_THd: torch.Tensor,
    latents_PZd: torch.Tensor,
    rows: PagedRows,
    *,
    width: int,
    scale: float,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attend each token to its sequence's latents so far, which are stored; returns ``o_THc``.

    A token that sees no more keys than are selected has the bits of one that attends to all.

    Args:
        latents_PZd: ``[c | r]`` of the tokens in all pages: the value, and the rotating part of the
            key, of which the value is the rest.
        width: c.
        scale: the factor of the scores.
    """
    if not use_fast(backend, q_THd):
        cache = latents_PZd[:, :, None], latents_PZd[:, :, None, :width]
        return _attend_by_lengths(q_THd, cache, rows, None, scale, None)
    if rows.selected_TAK is None:
        size, pages_NM = latents_PZd.shape[1], rows.pages_NM
        if rows.longest is not None:
            pages_NM = pages_NM[:, : -(-rows.longest // size)]
        return latent_attention(
            q_THd,
            latents_PZd,
            ends_N=rows.ends_N,
            seen_N=rows.seen_N,
            pages_NM=pages_NM,
            width=width,
            scale=scale,
        )
    # Every token is a sequence of its own, whose pages have one token each.
    assert rows.selected_size == rows.selected_TAK.shape[1] == 1  # no family selects blocks here
    slots_TK = _selected_slots(rows, rows.selected_TAK[:, 0], latents_PZd.shape[1])
    tokens, topk = slots_TK.shape
    ends = torch.arange(tokens + 1, dtype=torch.int32, device=slots_TK.device)
    seen_T = torch.full_like(ends[1:], topk - 1)
    return latent_attention(
        q_THd,
        latents_PZd.flatten(0, 1)[:, None],
        ends_N=ends,
        seen_N=seen_T,
        pages_NM=slots_TK,
        width=width,
        scale=scale,
    )


def _selected_slots(rows: PagedRows, selected_TK: torch.Tensor, size: int) -> torch.Tensor:
    """Return the slots of selected keys, int32 [T, K]; -1: none.

    A token that sees at most K keys has all of them, in the order of their places.
    """
    tokens, topk = selected_TK.shape
    sequence_T, place_T = rows.places(tokens)
    index_K = torch.arange(topk, device=selected_TK.device)
    all_TK = torch.where(index_K <= place_T[:, None], index_K, -1)
    has_any_T = (selected_TK >= 0).any(-1)  # a slot of a step may hold no sequence
    takes_all_T1 = ((place_T < topk) & has_any_T)[:, None]
    places_TK = torch.where(takes_all_T1, all_TK, selected_TK.long())
    seen_TK = places_TK.clamp(min=0)
    pages_TK = rows.pages_NM[sequence_T].long().gather(1, seen_TK // size)
    slots_TK = pages_TK * size + seen_TK % size
    return torch.where(places_TK >= 0, slots_TK, -1).int()


def _with_selected(
    whole_THv: torch.Tensor,
    q_THd: torch.Tensor,
    cache: _Cache,
    rows: PagedRows,
    selected_TAK: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Return ``whole_THv``, attention to all keys, for tokens that see no more keys than are
    selected, and attention to the selected keys for the others.

    So short sequences have the bits of a model without a selection. Keys are gathered for some
    tokens at a time. No shape depends on values, so a CUDA graph can contain it.
    """
    keys_PZGd, values_PZGv = cache
    page, tokens, size = keys_PZGd.shape[1], len(q_THd), rows.selected_size
    heads, most = keys_PZGd.shape[2], selected_TAK.shape[2] * size
    sequence_T, place_T = rows.places(tokens)
    head_G1 = torch.arange(heads, device=q_THd.device)[:, None]
    within = torch.arange(size, device=q_THd.device)
    width = most * (keys_PZGd[0, 0].numel() + values_PZGv[0, 0].numel())
    block, out = max(1, _GATHERED // width), []
    for start in range(0, tokens, block):
        own = slice(start, start + block)
        blocks_tAK1 = selected_TAK[own, :, :, None].long()
        places_tAL = (blocks_tAK1.clamp(min=0) * size + within).flatten(2)
        is_seen_tAL = (blocks_tAK1 >= 0).expand(-1, -1, -1, size).flatten(2)
        is_seen_tAL = is_seen_tAL & (places_tAL <= place_T[own, None, None])
        # The last block may reach beyond the sequence's pages. Such keys are not seen.
        places_tAL = places_tAL.minimum(place_T[own, None, None])
        pages_tAM = (
            rows.pages_NM[sequence_T[own]].long()[:, None].expand(-1, places_tAL.shape[1], -1)
        )
        pages_tAL = pages_tAM.gather(2, places_tAL // page)
        slots_tAL = pages_tAL.clamp(min=0) * page + places_tAL % page
        k_tGLd, v_tGLv = (x.flatten(0, 1)[slots_tAL, head_G1] for x in cache)
        # A slot of a step may hold no sequence. Then it selects no key, and its result is not read.
        mask_tA1L = (is_seen_tAL | ~is_seen_tAL.any(-1, keepdim=True))[:, :, None]
        # The query heads of a key/value head are rows of queries, which see the same keys.
        out_tGrv = F.scaled_dot_product_attention(
            q_THd[own].unflatten(1, (heads, -1)), k_tGLd, v_tGLv, attn_mask=mask_tA1L, scale=scale
        )
        out.append(out_tGrv.flatten(1, 2))
    return torch.where((place_T < most)[:, None, None], whole_THv, torch.cat(out))


def _attend_by_lengths(
    q_THd: torch.Tensor,
    cache: _Cache,
    rows: PagedRows,
    window: int | None,
    scale: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    out_THv = q_THd.new_empty(*q_THd.shape[:2], cache[1].shape[-1])
    # Sequences by (tokens of this step, tokens before).
    members_of = defaultdict[tuple[int, int], list[int]](list)
    sizes = zip(rows.ends_N.diff().tolist(), rows.seen_N.tolist(), strict=True)
    for i, size in enumerate(sizes):
        members_of[size].append(i)
    for (queries, seen), members in members_of.items():
        # Gather their queries, and keys and values from their pages.
        at_NQ = rows.ends_N[members].long()[:, None] + torch.arange(queries)
        length = seen + queries
        pages_NM = rows.pages_NM[members, : -(-length // cache[0].shape[1])].long()
        past = (x[pages_NM].flatten(1, 2)[:, :length] for x in cache)
        distance_QL = torch.arange(seen, length)[:, None] - torch.arange(length)
        visible_QL = distance_QL >= 0
        if window is not None:
            visible_QL &= distance_QL < window
        q, k, v = (x.transpose(1, 2) for x in (q_THd[at_NQ], *past))
        if rows.selected_TAK is not None:
            size = rows.selected_size
            selected_NAQK = rows.selected_TAK[at_NQ].transpose(1, 2)
            blocks_NAQL = as_mask(selected_NAQK, -(-length // size)).repeat_interleave(size, dim=-1)
            visible_QL = visible_QL & blocks_NAQL[..., :length]
            if visible_QL.shape[1] > 1:  # a selection of each key/value head
                visible_QL = visible_QL.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        if sinks_H is not None:
            out_NHQv = dense_attention_with_sinks(q, k, v, visible_QL, sinks_H, scale)
        else:
            out_NHQv = F.scaled_dot_product_attention(
                q, k, v, attn_mask=visible_QL, scale=scale, enable_gqa=True
            )
        out_THv[at_NQ] = out_NHQv.transpose(1, 2)
    return out_THv
