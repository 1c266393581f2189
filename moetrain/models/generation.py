"""The generation form of a model: caches in place of whole rows, and kernels for few rows.

:meth:`Transformer.for_generation <moetrain.models.transformer.Transformer.for_generation>` puts a
model into it. Every module that mixes tokens then keeps what later tokens need in a cache, which
the generator makes (keys and values) or the module itself (the states of linear attention).

Legend: B batch, S sequence, H query heads, G key/value heads, d width of a query and a key, v of a
value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from moetrain.models.layers import Context, RMSNorm


class LayerCache(Protocol):
    """The state that one layer keeps of the sequences between steps of generation."""

    def free(self) -> None:
        """Free its memory; the next step allocates it again."""
        ...

    def wipe(self) -> None:
        """Zero its memory."""
        ...


class AttentionCache(LayerCache, Protocol):
    """A cache of keys and values, and the attention over it.

    It takes the place of :func:`moetrain.models.attention.masked_attention`.
    """

    @property
    def rotates(self) -> bool:
        """True: :meth:`rotate` may be called."""
        ...

    def __call__(
        self,
        q_BSHd: torch.Tensor,
        k_BSGd: torch.Tensor,
        v_BSGv: torch.Tensor,
        context: Context,
        scale: float | None = None,
        *,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

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
        """Normalise and rotate queries and keys, and store keys and values, in one launch.

        Returns the queries, and the context to call the cache with.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Caches:
    """The caches that a generator wants of a model's layers."""

    make_attention: Callable[[int | None], AttentionCache]
    """Makes the cache of a layer with attention over a window of so many tokens; None: over all."""
    slots: int
    """Slots of a layer with a state; each running sequence has one. Slot 0 is unused."""
    drafts: int = 0
    """Draft tokens that a step may read behind a sequence's last token."""


@runtime_checkable
class CachingMixer(Protocol):
    """A module that mixes tokens, and that can do so in generation."""

    def for_generation(self, caches: Caches, window: int | None) -> LayerCache | None:
        """Mix tokens over a cache from now on, and return it; None: this module cannot.

        Args:
            window: tokens that a token sees, itself included; None: all before it.
        """
        ...
