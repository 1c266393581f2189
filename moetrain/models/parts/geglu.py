"""GeGLU layers and experts: SwiGLU with GELU in SiLU's place (arXiv 2002.05202)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch.nn import functional as F

from moetrain.config import KernelsSection, MoeSection
from moetrain.kernels.experts.swiglu import swiglu
from moetrain.models.layers import DenseMLP, SwiGLU
from moetrain.models.moe import Experts


@dataclass(frozen=True, kw_only=True)
class GeGLU(SwiGLU):
    """Describes a dense layer."""

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "_GeGLUMLP":
        return _GeGLUMLP(self, kernels)


class _GeGLUMLP(DenseMLP):
    """The module of :class:`GeGLU`: ``w_down(gelu(w_gate x) * w_up x)``."""

    activation: ClassVar[Callable[..., torch.Tensor]] = partial(F.gelu, approximate="tanh")
    gated: ClassVar[Callable[..., torch.Tensor]] = partial(swiglu, activation="gelu")


class GeGLUExperts(Experts):
    """All experts' GeGLU weights, stacked as those of SwiGLU."""

    activation: ClassVar[str] = "gelu"
