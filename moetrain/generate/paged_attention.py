"""The attention of generation: it keeps keys and values in pages of memory, and reads them there.

Each layer has the memory of its own pages. Which page holds which tokens is the same for all layers
and is decided in :mod:`moetrain.generate.pages`.

Legend: T tokens of a step, P pages, Z tokens of a page, H query heads, G key/value heads, d width
of a query and a key, v of a value.
"""

from dataclasses import dataclass

import torch

from moetrain.kernels.attention.paged import PagedRows, attend_over_pages
from moetrain.kernels.norm.rotary import rotate_into_pages
from moetrain.models.layers import Context, RMSNorm


@dataclass(eq=False)
class PagedTokens:
    """A vector for each token of one layer, in pages."""

    num_pages: int
    page_size: int
    pages_PZd: torch.Tensor | None = None
    """None until the first use, which allocates it."""

    def free(self) -> None:
        """Free the memory of the pages."""
        self.pages_PZd = None

    def wipe(self) -> None:
        """Fill the pages with zeros."""
        if self.pages_PZd is not None:
            self.pages_PZd.zero_()

    def store(self, x_Td: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        """Store the vectors of a step's tokens, and return all pages.

        Args:
            slots_T: the slot of each token, counted over all pages; -1: not stored.
        """
        if self.pages_PZd is None:
            # One page more than there are, in which tokens without a slot are written. So no shape
            # depends on the slots, and a CUDA graph can contain the write.
            self.pages_PZd = x_Td.new_zeros(self.num_pages + 1, self.page_size, x_Td.shape[-1])
        places_T = slots_T.long().where(slots_T >= 0, self.num_pages * self.page_size)
        self.pages_PZd.flatten(0, 1).index_copy_(0, places_T, x_Td)
        return self.pages_PZd


@dataclass(eq=False)
class PagedAttention:
    """The attention core of one layer, over pages. A step is one row of tokens, [1, T]."""

    rotates = True

    num_pages: int
    page_size: int
    window: int | None
    """Number of tokens that a token attends to, itself included. None: it attends to all."""
    keys_PZGd: torch.Tensor | None = None
    """None until the first use, which allocates the memory of both keys and values."""
    values_PZGv: torch.Tensor | None = None

    def free(self) -> None:
        """Free the memory of the pages."""
        self.keys_PZGd = self.values_PZGv = None

    def wipe(self) -> None:
        """Fill the pages with zeros."""
        for pages in (self.keys_PZGd, self.values_PZGv):
            if pages is not None:
                pages.zero_()

    def __call__(
        self,
        q_BSHd: torch.Tensor,
        k_BSGd: torch.Tensor,
        v_BSGv: torch.Tensor,
        context: Context,
        scale: float | None = None,
        *,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, after storing keys and values unless :meth:`rotate` has stored them.

        The parameters are those of every attention core.
        """
        rows = context.mask
        assert isinstance(rows, PagedRows)
        k_TGd, v_TGv = k_BSGd[0], v_BSGv[0]
        o_THv = attend_over_pages(
            q_BSHd[0],
            k_TGd,
            v_TGv,
            self._cache(k_TGd, v_TGv),
            rows,
            window=self.window,
            scale=scale,
            sinks_H=sinks_H,
        )
        return o_THv[None]

    def _cache(self, k_TGd: torch.Tensor, v_TGv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.keys_PZGd is None or self.values_PZGv is None:
            # Pages begin as zeros: tokens past a sequence's end have weight 0, and 0 * inf is NaN.
            size = self.num_pages, self.page_size
            self.keys_PZGd, self.values_PZGv = (
                x.new_zeros(*size, *x.shape[1:]) for x in (k_TGd, v_TGv)
            )
        return self.keys_PZGd, self.values_PZGv

    def rotate(
        self,
        q_BSHd: torch.Tensor,
        k_BSGd: torch.Tensor,
        v_BSGv: torch.Tensor,
        context: Context,
        *,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        interleaved: bool,
    ) -> tuple[torch.Tensor, Context]:
        """Normalise (if there are norms) and rotate queries and keys, and store keys and values.

        Returns the queries [1, T, H, d], and the context for :meth:`__call__`.
        """
        rows = context.mask
        assert isinstance(rows, PagedRows)  # generation lays out its rows so
        k_TGd, v_TGv = k_BSGd[0], v_BSGv[0]
        cos_Tp, sin_Tp = (x.flatten(0, 2) for x in context.rotation)
        q_THd, arrived = rotate_into_pages(
            q_BSHd[0],
            k_TGd,
            v_TGv,
            self._cache(k_TGd, v_TGv),
            rows.slots_T,
            cos_Tp,
            sin_Tp,
            q_norm,
            k_norm,
            interleaved,
        )
        return q_THd[None], context._replace(mask=rows._replace(arrived=arrived))
