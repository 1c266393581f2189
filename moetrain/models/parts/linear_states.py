"""The part that all linear attentions share: a state a sequence, in training and in generation.

In training states begin anew with each document and are gone after the step. In generation a
sequence has a slot of :class:`LinearStates` beside its pages of keys and values: the state, the
inputs of its open chunk (:mod:`moetrain.kernels.linear_attention.step`) and the last inputs of the
convolutions.

Legend: T tokens, C channels, J taps of a convolution, P slots.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from moetrain.config import KernelsSection
from moetrain.kernels.linear_attention.convolution import (
    Convolution,
    convolution_step,
    convolved,
)
from moetrain.kernels.linear_attention.gated_delta import Documents
from moetrain.kernels.linear_attention.reads import Reads
from moetrain.kernels.linear_attention.step import StateCache
from moetrain.models.generation import Caches
from moetrain.models.layers import Context, KernelModule
from moetrain.models.rules import Rule
from moetrain.runtime.backend import Backend


def _draw_filter(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw U(-1, 1) over the root of a convolution's taps."""
    bound = rows.shape[-1] ** -0.5
    return rows.uniform_(-bound, bound, generator=generator)


def _draw_rates(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw the log of U(0, 16), of the rates at which states decay (arXiv 2312.00752)."""
    return rows.uniform_(1e-3, 16.0, generator=generator).log_()


FILTER = Rule("colwise", init=_draw_filter, decay=False)
RATES = Rule("colwise", init=_draw_rates, decay=False, gather=torch.float32)


class LinearStates:
    """The slots of one layer, of which a running sequence has one; slot 0 is nobody's.

    Nothing is cleared when a slot gets another sequence: its first tokens read no state, and no
    input of a convolution that is not their own.
    """

    def __init__(self, slots: int, drafts: int = 0) -> None:
        self.slots, self.drafts = slots, drafts
        self.cache: StateCache | None = None
        """None: no memory is allocated, which happens at the first use."""
        self.inputs: dict[str, torch.Tensor] = {}
        """The last R = J - 1 inputs of each convolution, and as many as there may be drafts behind
        them, [P, R, C]: a token's place modulo R is its place there."""

    def free(self) -> None:
        self.cache, self.inputs = None, {}

    def wipe(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()

    def tensors(self) -> list[torch.Tensor]:
        """Return all that is allocated."""
        kept = () if self.cache is None else (self.cache.states_PHKV, *self.cache.open_PI)
        return [*kept, *self.inputs.values()]

    def convolved(
        self,
        given: Mapping[str, Convolution],
        reads: Reads,
        backend: Backend,
    ) -> list[torch.Tensor]:
        """Go on with the convolutions, as :func:`convolution_step` does with one."""
        found = []
        for name, one in given.items():
            if name not in self.inputs:
                kept = one.filters_C1J.shape[-1] - 1 + self.drafts
                shape = (self.slots, kept, one.x_TC.shape[1])
                self.inputs[name] = one.x_TC.new_zeros(shape)
            one = one._replace(x_TC=one.x_TC.contiguous())
            found.append(convolution_step(one, self.inputs[name], reads, backend))
        return found


Heads = Callable[..., torch.Tensor]
"""Calls ``mixed(given, weights, context)``, whose tensors are of heads: [T, heads * width] what
tokens have, [heads * width, ...] weights. The seam of context parallelism, which calls it with all
tokens of a part of the heads."""


def _all_heads(mixed: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
    """Call ``mixed`` where all tokens and heads are here."""
    return mixed(*given)


class LinearMixer(KernelModule):
    """The base of modules that carry a state from token to token."""

    def __init__(self, kernels: KernelsSection) -> None:
        super().__init__()
        self.use_kernels(kernels)
        self.over_heads: Heads = _all_heads
        self.states: LinearStates | None = None
        """The states of generation, whose contexts have :class:`Reads` for documents; None: this
        module trains."""

    def for_generation(self, caches: Caches, window: int | None) -> LinearStates:
        """Keep the states of ``caches.slots`` - 1 sequences at once from now on.

        Steps may read ``caches.drafts`` tokens more of a sequence that do not stay, in its open
        chunk.
        """
        self.states = LinearStates(caches.slots, caches.drafts)
        return self.states

    def convolved(self, given: Mapping[str, Convolution], context: Context) -> list[torch.Tensor]:
        """Return the heads [T, h, d] of each convolution."""
        if self.states is not None:
            assert isinstance(context.documents, Reads)  # a step of generation
            return self.states.convolved(given, context.documents, self.backend)
        assert context.place_T is not None  # the architecture has this part
        fusible = not self.batch_invariant
        return convolved([*given.values()], context.place_T, fusible=fusible)

    def ruled(
        self,
        inputs: Sequence[torch.Tensor],
        context: Context,
        rule: Callable[..., torch.Tensor],
        step: Callable[..., torch.Tensor],
        **how: float,
    ) -> torch.Tensor:
        """Return o [T, H, V] of a rule's ``inputs``.

        Args:
            rule: takes them, and documents.
            step: takes them, a layer's slots, and what is read.
            how: given to both.
        """
        if self.states is None:
            assert isinstance(context.documents, Documents)
            return rule(*inputs, context.documents, backend=self.backend, **how)
        if self.states.cache is None:
            self.states.cache = StateCache.empty(self.states.slots, inputs)
        cache = self.states.cache
        return step(*inputs, cache, context.documents, backend=self.backend, **how)
