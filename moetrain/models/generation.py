"""The interfaces by which a model generates: caches of what earlier tokens leave for later ones.

:meth:`Transformer.for_generation <moetrain.models.transformer.Transformer.for_generation>` prepares
a model. A step then reads only new tokens, with kernels for few rows. Every module that mixes
tokens keeps what later tokens need in a cache. The generator makes the caches of keys and values.
Modules with a state, such as linear attention, make theirs themselves.

Legend: B batch, S sequence, T tokens of a step, P pages, Z tokens of a page, H query heads,
G key/value heads, d width of a query and a key, v of a value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from moetrain.models.layers import Context, RMSNorm


class LayerCache(Protocol):
    """The memory of one layer for running sequences, kept between steps of generation."""

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


class TokenCache(LayerCache, Protocol):
    """A cache of a vector for each token, in the same pages as its keys and values."""

    def store(self, x_Td: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        """Store the vectors of a step's tokens, and return all pages, [P, Z, d].

        Args:
            slots_T: the slot of each token, counted over all pages; -1: not stored.
        """
        ...


@dataclass(frozen=True)
class SeveralCaches:
    """The caches of a layer that has more than one."""

    caches: tuple[LayerCache, ...]

    def free(self) -> None:
        """Free their memory; the next step allocates it again."""
        for cache in self.caches:
            cache.free()

    def wipe(self) -> None:
        """Zero their memory."""
        for cache in self.caches:
            cache.wipe()


@dataclass(frozen=True, kw_only=True)
class Caches:
    """The generator's requirements for the caches of a model's layers."""

    make_attention: Callable[[int | None], AttentionCache]
    """Makes the cache of an attention layer from its window in tokens; None: there is no window."""
    make_tokens: Callable[[], TokenCache]
    """Makes a cache of a vector for each token."""
    slots: int
    """Number of slots for sequences in a layer with a state. Each running sequence has one slot.
    Slot 0 belongs to no sequence: empty slots of a step write their states there."""
    drafts: int = 0
    """The most draft tokens that a step reads after a sequence's last token."""
    keeps_latents: bool = False
    """True: layers with latent attention cache latents in place of keys and values."""


@runtime_checkable
class CachingMixer(Protocol):
    """A module that mixes tokens, and that can do so in generation."""

    def for_generation(self, caches: Caches, window: int | None) -> LayerCache | None:
        """Mix tokens with a cache from now on, and return the cache; None: this module cannot.

        Args:
            window: the number of tokens that a token attends to, itself included; None: all tokens
                up to it.
        """
        ...
