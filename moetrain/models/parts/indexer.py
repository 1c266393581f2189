"""The lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2, section 2.1): it selects keys.

    iq = rope(W_q c) of each index head      ik = rope(LayerNorm(W_k x)), one for all heads
    score[t, s] = sum over heads h of  w[t, h] relu(iq[t, h] . ik[s] / sqrt(d)) / sqrt(h)
    w = W_w x, all in fp32

Here x is the token and c the latent of attention's queries. Of an index head the first elements
rotate. A token attends to the K keys with the largest scores among those that it may see. Keys with
equal scores are taken in the order of their places, since ``relu`` makes many scores exactly zero.

Training selects among the keys of a row, and generation among those in a sequence's pages; both
call :func:`select_keys` (:mod:`moetrain.kernels.attention.index_keys`). The selection is one op
without a gradient. Selective recomputation keeps its result, so that the backward attends to the
same keys.

Legend: B batch, S queries of a row, L keys of a row, D model width, h index heads, d their width,
c width of the queries' latent, K selected keys, T tokens of a step, P pages, Z tokens of a page.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from moetrain.config import KernelsSection
from moetrain.kernels import small_m
from moetrain.kernels.attention import index_keys
from moetrain.kernels.attention.paged import PagedRows
from moetrain.kernels.norm.rotary import rotary
from moetrain.models.generation import TokenCache
from moetrain.models.layers import Context, KernelModule
from moetrain.runtime.backend import Backend

_EPS = 1e-6
"""Epsilon of the keys' norm."""
_GATHERED = 2**27
"""About how many elements of keys in pages are gathered at once."""


@dataclass(frozen=True)
class IndexerSizes:
    """The sizes of an :class:`Indexer`."""

    hidden_size: int
    latent: int
    """c"""
    num_heads: int
    head_dim: int
    topk: int
    """K"""
    interleaved: bool
    """True: neighbouring elements rotate together, instead of those half the rotating width
    apart."""


class Projection(KernelModule):
    """Computes ``x @ weight^T``. Unlike a ``Linear`` it never has adapters, nor fp8 products."""

    def __init__(self, in_dim: int, out_dim: int, kernels: KernelsSection) -> None:
        super().__init__()
        self.use_kernels(kernels)
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = small_m.invariant_linear if self.batch_invariant else F.linear
        y = product(x.flatten(0, -2), self.weight.to(x.dtype), None)
        return y.unflatten(0, x.shape[:-1])


class _KeyNorm(nn.Module):
    """Computes LayerNorm over the last dim."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (one.to(x.dtype) for one in (self.weight, self.bias))
        return F.layer_norm(x, x.shape[-1:], weight, bias, _EPS)


@dataclass(frozen=True)
class Indexed:
    """The queries, keys and weights of an indexer.

    There may be more keys than queries: under context parallelism, and in pages, keys are those of
    all tokens.
    """

    q_BShd: torch.Tensor
    k_BLd: torch.Tensor
    w_BSh: torch.Tensor
    """The heads' weights, at least fp32."""


class Indexer(KernelModule):
    """Scores keys for the queries of all heads of attention."""

    def __init__(self, sizes: IndexerSizes, kernels: KernelsSection) -> None:
        super().__init__()
        self.use_kernels(kernels)
        self.sizes = sizes
        dim, width = sizes.hidden_size, sizes.head_dim
        self.wq_b = Projection(sizes.latent, sizes.num_heads * width, kernels)
        self.wk = Projection(dim, width, kernels)
        self.k_norm = _KeyNorm(width)
        self.weights_proj = Projection(dim, sizes.num_heads, kernels)
        self.cache: TokenCache | None = None
        """The keys of generation; None: this module trains."""

    def forward(
        self, x_BSD: torch.Tensor, query_latent_BSc: torch.Tensor, context: Context
    ) -> Indexed:
        """Compute queries, keys and weights of the tokens."""
        sizes = self.sizes
        q_BShd = self.wq_b(query_latent_BSc).unflatten(-1, (-1, sizes.head_dim))
        k_BS1d = self.k_norm(self.wk(x_BSD))[:, :, None]
        q_BShd, k_BS1d = (rotated(x, context, self, sizes.interleaved) for x in (q_BShd, k_BS1d))
        wide = torch.promote_types(x_BSD.dtype, torch.float32)
        w_BSh = self.weights_proj(x_BSD.to(wide)) * sizes.num_heads**-0.5
        return Indexed(q_BShd, k_BS1d[:, :, 0], w_BSh)


def rotated(
    x_BSHd: torch.Tensor, context: Context, module: KernelModule, interleaved: bool
) -> torch.Tensor:
    """Return an indexer's queries or keys, the first elements of each head rotated.

    Args:
        module: the indexer; its kernels are used.
        interleaved: as :attr:`IndexerSizes.interleaved`.
    """
    cos_Sp, sin_Sp = (angles.flatten(0, 2) for angles in context.rotation)
    y_THd = rotary(
        x_BSHd.flatten(0, 1),
        cos_Sp,
        sin_Sp,
        backend=module.backend,
        interleaved=interleaved,
        fusible=not module.batch_invariant,
    )
    return y_THd.unflatten(0, x_BSHd.shape[:2])


def select_keys(
    indexed: Indexed, seen_BS2: torch.Tensor, topk: int, backend: Backend = "auto"
) -> torch.Tensor:
    """Select ``topk`` keys for each token: int32 [B, S, K], in the order of their places; -1: none.

    A token that may see fewer keys than ``topk`` selects all of them. ``backend`` is that of
    :func:`moetrain.kernels.attention.index_keys.select_keys`.

    Args:
        seen_BS2: the first and the last key that each token may see.
    """
    q_BShd, k_BLd, w_BSh = indexed.q_BShd, indexed.k_BLd, indexed.w_BSh
    return index_keys.select_keys(q_BShd, k_BLd, w_BSh, seen_BS2, topk, backend)


class PagedKeys(NamedTuple):
    """Some tokens of a step, and the index keys of their sequences."""

    own: slice
    """The tokens, among those of the step."""
    keys_tLd: torch.Tensor
    """The keys of each token's sequence."""
    seen_t12: torch.Tensor
    """The first and the last key that each token may see, as ``Context.seen_BS2``."""


def keys_in_pages(
    keys_PZd: torch.Tensor, rows: PagedRows, tokens: int, most_keys: int
) -> Iterator[PagedKeys]:
    """Yield the keys of the sequences of a step's tokens, for some tokens at a time.

    It yields nothing if no sequence has more than ``most_keys`` tokens, which are all selected.

    Args:
        keys_PZd: the keys in pages, those of the step among them.
        tokens: the number of tokens of the step.
    """
    device = keys_PZd.device
    longest = rows.pages_NM.shape[1] * keys_PZd.shape[1]
    if device.type == "cpu":  # on a GPU the host would wait for the lengths
        longest = int((rows.seen_N + rows.ends_N.diff()).max())
    if longest <= most_keys:
        return
    # 1. Find each token's sequence and its place in it.
    sequence_T, place_T = rows.places(tokens)
    seen_T2 = torch.stack((torch.zeros_like(place_T), place_T), dim=-1)
    # 2. Gather the keys of some tokens' sequences.
    num_pages = -(-longest // keys_PZd.shape[1])
    width = num_pages * keys_PZd[0].numel()
    block = max(1, _GATHERED // width)
    for start in range(0, len(place_T), block):
        own = slice(start, start + block)
        pages_tM = rows.pages_NM[sequence_T[own], :num_pages].long().clamp(min=0)
        yield PagedKeys(own, keys_PZd[pages_tM].flatten(1, 2), seen_T2[own, None])


def select_in_pages(
    indexed: Indexed,
    keys_PZd: torch.Tensor,
    rows: PagedRows,
    topk: int,
    backend: Backend = "auto",
) -> torch.Tensor | None:
    """Select ``topk`` keys for each token of a step: int32 [1, T, K], counted in its sequence.

    The arguments are as those of :func:`select_keys`. None: no sequence has more than ``topk``
    tokens, so all keys are selected.

    Args:
        indexed: the tokens of the step, as one row.
        keys_PZd: the keys in pages, those of the step among them.
    """
    found: list[torch.Tensor] = []
    for own, keys_tLd, seen_t12 in keys_in_pages(keys_PZd, rows, indexed.q_BShd.shape[1], topk):
        some = Indexed(
            q_BShd=indexed.q_BShd[0, own, None],
            k_BLd=keys_tLd,
            w_BSh=indexed.w_BSh[0, own, None],
        )
        found.append(select_keys(some, seen_t12, topk, backend)[:, 0])
    return torch.cat(found)[None] if found else None
