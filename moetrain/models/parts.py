"""What a decoder's layers are made of: a :class:`Part` describes one sub-layer, and builds it.

All that is asked about a kind of sub-layer is asked here, so that nobody else knows its sizes: its
parameters with their rules, its arithmetic, its memory, what it needs divided. Each kind lies
beside the module that it builds: grouped-query attention in :mod:`moetrain.models.attention`,
SwiGLU in :mod:`moetrain.models.layers`, routed experts in :mod:`moetrain.models.moe`. A family
chooses a part for each layer, or brings one of its own.

Bytes unless a name says otherwise.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

from torch import nn

from moetrain.config import KernelsSection, MoeSection, SavedName
from moetrain.models.rules import PartStyle, Rule

FP32 = 4
"""Bytes of a number."""


class Weight(NamedTuple):
    """One parameter of a part."""

    shape: tuple[int, ...]
    rule: Rule


@dataclass(frozen=True)
class Workload:
    """What one rank has of a micro-batch, and how it computes."""

    tokens: int
    """T: of the rows here, which tensor parallel ranks have in common."""
    tp: int
    ep: int
    width: int
    """Bytes of a number in the compute dtype."""
    is_compiled: bool

    @property
    def own_tokens(self) -> int:
        """N: the tokens that this rank has alone."""
        return self.tokens // self.tp


@dataclass(frozen=True, kw_only=True)
class Part(ABC):
    """One sub-layer: what it is made of, and what it costs.

    Equal parts build equal modules. A field has the name of the architecture's field that it is
    read from. Impossible sizes are a ValueError that names them.
    """

    name: ClassVar[str] = "mlp"
    """Of the attribute of the block that holds the module."""
    style: ClassVar[PartStyle] = "all"
    aligned: ClassVar[Mapping[str, int]] = {}
    """Fields that kernels need to be a multiple of something."""
    divided: ClassVar[Mapping[str, str]] = {}
    """Fields that the degree of an axis (``parallel.tp`` or ``ep``) must divide."""

    hidden_size: int

    @classmethod
    def of(cls, arch: object, **others: Any) -> Self:
        """The part with the fields of ``arch``, but for ``others``."""
        names = [field.name for field in fields(cls) if field.name not in others]
        return cls(**{name: getattr(arch, name) for name in names}, **others)

    @abstractmethod
    def build(self, kernels: KernelsSection, moe: MoeSection) -> nn.Module:
        """The module; see :class:`moetrain.models.transformer.Block` for how it is called."""

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Weight]:
        """Every parameter of the module, by its name there."""

    # Arithmetic.
    def num_params(self) -> int:
        """Parameters."""
        return sum(math.prod(weight.shape) for weight in self.weights.values())

    def num_active_params(self) -> int:
        """Parameters that one token uses."""
        return self.num_params()

    def products_per_token(self, seq_len: int) -> float:
        """Multiply-adds of matrix products in one token's forward, in a row of ``seq_len``."""
        return sum(math.prod(weight.shape) for weight in self._matrices())

    # Memory.
    def numbers(self, share: Workload) -> float:
        """Of its matrices on one rank: whole over FSDP ranks, cut over tensor and expert ranks."""
        ranks = {"colwise": share.tp, "rowwise": share.tp, "expert": share.ep}
        return sum(math.prod(w.shape) / ranks.get(w.rule.style, 1) for w in self._matrices())

    def activations(self, share: Workload) -> float:
        """What it keeps for its backward, beside its input, if nothing is recomputed.

        Here what every matrix product results in; a part that keeps something else says so.
        """
        numbers = sum(weight.shape[0] for weight in self._matrices())
        return share.tokens * share.width * numbers / share.tp

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        """What each name of ``activation.save`` keeps of that."""
        return {}

    def working_set(self, share: Workload) -> float:
        """Gradients of what is wider than the residual stream, while its backward runs."""
        return 0.0

    def cached_numbers(self) -> int:
        """What generation keeps of every token that was read."""
        return 0

    def _matrices(self) -> Iterator[Weight]:
        return (weight for weight in self.weights.values() if len(weight.shape) > 1)


@dataclass(frozen=True, kw_only=True)
class AttentionPart(Part):
    """A sub-layer that mixes tokens: ``module(x_BSD, context) -> y_BSD``."""

    name = "attn"

    window: int | None = None
    """How many tokens back (itself included) a token sees; None: all."""

    @property
    def rotary_dim(self) -> int:
        """How many numbers of a head turn with the position; 0: none."""
        return 0
