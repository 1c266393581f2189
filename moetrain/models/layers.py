"""The dense parts of a decoder: norm, linear, embedding, MLP; and what a block is told.

They exist in our own form for one reason: parameters stay in their master dtype and each module
casts its weight to the activations' dtype where it is used. ``self.weight`` is read once per
forward, so whoever stores it differently (sharded, say) has a single place to hand out the tensor.

Left out on purpose: dropout, and initial values (:mod:`moetrain.models.init` has all of them).

Legend: B batch, S sequence, D model width, V vocabulary, F MLP width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from moetrain.config import KernelsSection, MoeSection, SavedName
from moetrain.kernels import AttentionMask
from moetrain.models.parts import Part, Share, Weight
from moetrain.models.rope import Rotation
from moetrain.models.rules import BIAS, COLWISE, ROWWISE, SHARED_BIAS
from moetrain.models.vocabulary import Vocabulary


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dim (arXiv 1910.07467), normalised in fp32.

    The result is rounded to ``x``'s dtype before the weight is applied, as Hugging Face does.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


class Linear(nn.Module):
    """``x @ weight^T + bias``; ``weight`` is [out, in]."""

    def __init__(self, in_dim: int, out_dim: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        self.bias = nn.Parameter(torch.empty(out_dim)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Embedding(nn.Module):
    """Rows of ``weight`` [V, D], in the parameter's dtype, looked up by a ``Vocabulary``."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(self, tokens_BS: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
        return vocabulary.embed(tokens_BS, self.weight)


class Context(NamedTuple):
    """What a block sees beside the residual stream; the same for all that look as far back."""

    rotation: Rotation
    mask: AttentionMask
    cu_seqlens: torch.Tensor | None = None
    """int32 [documents + 1]: their ends over the B * S tokens, from 0; None: not known, or rows."""
    is_pad_BS: torch.Tensor | None = None
    """bool, tokens that only fill up a row; None: there are none."""


@dataclass(frozen=True, kw_only=True)
class SwiGLU(Part):
    """A gated feed-forward layer (arXiv 2002.05202)."""

    divided: ClassVar[Mapping[str, str]] = {"intermediate_size": "tp"}

    intermediate_size: int
    mlp_bias: bool = False

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "DenseMLP":
        return DenseMLP(self)

    @property
    def weights(self) -> Mapping[str, Weight]:
        dim, width = self.hidden_size, self.intermediate_size
        wide = ("w_gate", "w_up")
        found = {f"{name}.weight": Weight((width, dim), COLWISE) for name in wide}
        found["w_down.weight"] = Weight((dim, width), ROWWISE)
        if self.mlp_bias:
            found |= {f"{name}.bias": Weight((width,), BIAS) for name in wide}
            found["w_down.bias"] = Weight((dim,), SHARED_BIAS)
        return found

    def activations(self, share: Share) -> float:
        return (3 if share.is_compiled else 4) * self._wide(share)

    def saved(self, share: Share) -> Mapping[SavedName, float]:
        return {"linear": 2 * self._wide(share)}

    def working_set(self, share: Share) -> float:
        return 3 * self._wide(share)

    def _wide(self, share: Share) -> float:
        """One tensor of the layer's own width."""
        return share.tokens * self.intermediate_size * share.width / share.tp


class DenseMLP(nn.Module):
    """The module of :class:`SwiGLU`: ``w_down(silu(w_gate x) * w_up x)``."""

    def __init__(self, sizes: SwiGLU) -> None:
        super().__init__()
        dim, width, bias = sizes.hidden_size, sizes.intermediate_size, sizes.mlp_bias
        self.w_gate = Linear(dim, width, bias=bias)
        self.w_up = Linear(dim, width, bias=bias)
        self.w_down = Linear(width, dim, bias=bias)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> tuple[torch.Tensor, None]:
        """[B, S, D]; None stands for "no routing"."""
        return self.w_down(F.silu(self.w_gate(x_BSD)) * self.w_up(x_BSD)), None
