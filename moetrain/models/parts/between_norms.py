"""Feed-forward parts between two norms: one of their input, and one of their result."""

from dataclasses import dataclass
from typing import ClassVar

from moetrain.models.layers import SwiGLU
from moetrain.models.moe import RoutedExperts

AFTER = "mlp_out_norm"
"""The norm of a feed-forward part's result."""


@dataclass(frozen=True, kw_only=True)
class MLPBetweenNorms(SwiGLU):
    """Describes a dense layer between two norms."""

    after: ClassVar[str] = AFTER


@dataclass(frozen=True, kw_only=True)
class ExpertsBetweenNorms(RoutedExperts):
    """Describes routed experts between two norms."""

    after: ClassVar[str] = AFTER
