"""The base of all linear attentions, which carry a state along a sequence.

In training states start at zero in each document and are not kept after the step. In generation a
sequence has a slot of :class:`LinearStates` beside its pages of keys and values. The slot holds the
state, the inputs of the open chunk (:mod:`moetrain.kernels.linear_attention.step`) and the last
inputs of the convolutions.

Legend: T tokens, H heads, h heads of a convolution, d their width, C channels, J taps of a
convolution, V width of a value, P slots.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

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
    """Draw U(-1, 1) / sqrt(taps of the convolution)."""
    bound = rows.shape[-1] ** -0.5
    return rows.uniform_(-bound, bound, generator=generator)


def _draw_rates(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw the rates at which states decay from U(0.001, 16) (arXiv 2312.00752); return logs."""
    return rows.uniform_(1e-3, 16.0, generator=generator).log_()


def _draw_steps(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw values whose softplus is log-uniform between 0.001 and 0.1 (arXiv 2312.00752)."""
    steps = rows.uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp_()
    return steps + (-torch.expm1(-steps)).log()


FILTER = Rule("colwise", init=_draw_filter, decay=False)
RATES = Rule("colwise", init=_draw_rates, decay=False, gather=torch.float32)
STEPS = replace(RATES, init=_draw_steps)


class LinearStates:
    """The slots of one layer; a running sequence has one of them, and slot 0 is unused.

    A slot need not be cleared for another sequence, because the first tokens of a sequence read
    neither the state nor the convolutions' inputs from before the sequence.
    """

    def __init__(self, slots: int, drafts: int = 0) -> None:
        self.slots, self.drafts = slots, drafts
        self.cache: StateCache | None = None
        """The states and open chunks; None: not allocated before the first use."""
        self.inputs: dict[str, torch.Tensor] = {}
        """The last R inputs of each convolution, [P, R, C]: a ring buffer, indexed by the token's
        position modulo R. R is J - 1 plus the number of drafts."""

    def free(self) -> None:
        """Free all memory; the next use allocates it again."""
        self.cache, self.inputs = None, {}

    def wipe(self) -> None:
        """Zero all memory."""
        for tensor in self.tensors():
            tensor.zero_()

    def tensors(self) -> list[torch.Tensor]:
        """Return all allocated tensors."""
        kept = () if self.cache is None else (self.cache.states_PHKV, *self.cache.open_PI)
        return [*kept, *self.inputs.values()]

    def convolved(
        self,
        convolutions: Mapping[str, Convolution],
        reads: Reads,
        backend: Backend,
    ) -> list[torch.Tensor]:
        """Run each convolution on the tokens of a step, after the inputs that the slots hold."""
        found = []
        for name, one in convolutions.items():
            if name not in self.inputs:
                kept = one.filters_C1J.shape[-1] - 1 + self.drafts
                shape = (self.slots, kept, one.x_TC.shape[1])
                self.inputs[name] = one.x_TC.new_zeros(shape)
            one = one._replace(x_TC=one.x_TC.contiguous())
            found.append(convolution_step(one, self.inputs[name], reads, backend))
        return found


class Mixed(Protocol):
    """Mixes the tokens of some heads."""

    def __call__(
        self, values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], context: Context, /
    ) -> torch.Tensor:
        """Return the heads' results, [T, heads * width].

        Args:
            values: tensors [T, heads * width] of the tokens.
            weights: tensors [heads * width, ...].
        """
        ...


class OverHeads(Protocol):
    """Calls a :class:`Mixed` for all heads. Under context parallelism its replacement exchanges
    tokens for heads first, so that each rank mixes all tokens of a part of the heads."""

    def __call__(
        self,
        mixed: Mixed,
        values: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        context: Context,
        /,
        *,
        whole_values: Sequence[torch.Tensor] = (),
        whole_weights: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Return the results of all heads.

        Args:
            whole_values, whole_weights: those that all heads share; ``mixed`` gets them behind the
                heads' own.
        """
        ...


def _over_all_heads(
    mixed: Mixed,
    values: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    context: Context,
    *,
    whole_values: Sequence[torch.Tensor] = (),
    whole_weights: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Call ``mixed`` on a device that has all tokens and heads."""
    return mixed((*values, *whole_values), (*weights, *whole_weights), context)


class LinearMixer(KernelModule):
    """The base of modules that carry a state from token to token."""

    def __init__(self, kernels: KernelsSection) -> None:
        super().__init__()
        self.use_kernels(kernels)
        self.over_heads: OverHeads = _over_all_heads
        self.states: LinearStates | None = None
        """The states for generation, where ``context.documents`` is a :class:`Reads`; None: this
        module trains."""

    def for_generation(self, caches: Caches, window: int | None) -> LinearStates:
        """Keep the states of ``caches.slots`` - 1 sequences at once from now on.

        A step may also read ``caches.drafts`` draft tokens of a sequence into its open chunk. Later
        steps overwrite rejected drafts.
        """
        self.states = LinearStates(caches.slots, caches.drafts)
        return self.states

    def convolved(
        self, convolutions: Mapping[str, Convolution], context: Context
    ) -> list[torch.Tensor]:
        """Return the result of each convolution by heads, [T, h, d]."""
        if self.states is not None:
            assert isinstance(context.documents, Reads)  # a step of generation
            return self.states.convolved(convolutions, context.documents, self.backend)
        assert context.place_T is not None  # the architecture has this part
        fusible = not self.batch_invariant
        return convolved([*convolutions.values()], context.place_T, fusible=fusible)

    def ruled(
        self,
        inputs: Sequence[torch.Tensor],
        context: Context,
        rule: Callable[..., torch.Tensor],
        step: Callable[..., torch.Tensor],
        **options: float,
    ) -> torch.Tensor:
        """Apply a state's rule to ``inputs``; return the heads' results, [T, H, V].

        Args:
            rule: the rule in training, called with the inputs and their documents.
            step: the rule in generation, called with the inputs, the layer's slots and the tokens
                that the step reads.
            options: keyword arguments of both.
        """
        if self.states is None:
            assert isinstance(context.documents, Documents)
            return rule(*inputs, context.documents, backend=self.backend, **options)
        if self.states.cache is None:
            self.states.cache = StateCache.empty(self.states.slots, inputs)
        cache = self.states.cache
        return step(*inputs, cache, context.documents, backend=self.backend, **options)
