"""The dense parts of a decoder block: norm, linear, embedding, rotary positions, attention, MLP.

They exist in our own form for one reason: parameters stay in their master dtype and each module
casts its weight to the activations' dtype where it is used. ``self.weight`` is read once per
forward, so whoever stores it differently (sharded, say) has a single place to hand out the tensor.

Left out on purpose: dropout, key/value caches, and initial values (see ``transformer.init_weights``
for all of them).

Legend: B batch, S sequence, D model width, H query heads, G key/value heads, d head width,
V vocabulary, F MLP width.
"""

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from moetrain.kernels import AttentionMask, attention
from moetrain.models.architecture import Architecture
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


class Rotation(NamedTuple):
    """Cosine and sine of each position's rotary angles, fp32 [B or 1, S, 1, d/2]."""

    cos: torch.Tensor
    sin: torch.Tensor


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (arXiv 2104.09864) with the scalings of :class:`RopeScaling`."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        # Neither a parameter nor a buffer: it follows from the architecture alone, so it must
        # outlive a meta-device init and must not be rounded by ``model.to(bfloat16)``.
        self.inv_freq, self.scale = _rope_frequencies(arch)

    def forward(self, positions_BS: torch.Tensor) -> Rotation:
        """Angles of integer ``positions_BS``; computed once per forward, used by every layer."""
        # non_blocking: a copy from pageable memory would otherwise wait for the device.
        inv_freq = self.inv_freq.to(positions_BS.device, non_blocking=True)
        angles = (positions_BS[..., None].float() * inv_freq)[:, :, None]
        return Rotation(angles.cos() * self.scale, angles.sin() * self.scale)


def rotate(x_BSHd: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates the pairs ``(x[i], x[i + d/2])`` of every head, in fp32, rounded once."""
    x1, x2 = x_BSHd.float().chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x_BSHd.dtype)


def _rope_frequencies(arch: Architecture) -> tuple[torch.Tensor, float]:
    """Radians a token of each of the d/2 pairs (fp32, CPU), and the factor on cos and sin."""
    rope, dim = arch.rope, arch.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    inv_freq = 1.0 / arch.rope_theta**exponents
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3_frequencies(arch, inv_freq), 1.0
    if rope.kind == "yarn":
        return _yarn_frequencies(arch, inv_freq), _yarn_scale(arch)
    return inv_freq, 1.0


def _llama3_frequencies(arch: Architecture, inv_freq: torch.Tensor) -> torch.Tensor:
    """Divides what turns slowly by ``factor``, keeps what turns fast, blends in between."""
    rope = arch.rope
    turns = (rope.original_max_positions or arch.max_positions) * inv_freq / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * inv_freq / rope.factor + blend * inv_freq


def _yarn_frequencies(arch: Architecture, inv_freq: torch.Tensor) -> torch.Tensor:
    """A linear ramp over the pairs, from kept to divided by ``factor`` (arXiv 2309.00071)."""
    rope, dim = arch.rope, arch.head_dim
    context = rope.original_max_positions or arch.max_positions

    def pair_of(turns: float) -> float:  # the (real-valued) pair that turns so often in a context
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(arch.rope_theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # a step is a very steep ramp
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / width
    keep = 1 - ramp.clamp(0, 1)
    return inv_freq / rope.factor * (1 - keep) + inv_freq * keep


def _yarn_scale(arch: Architecture) -> float:
    rope = arch.rope
    if rope.attention_factor is not None:
        return rope.attention_factor
    log_factor = 0.1 * math.log(max(rope.factor, 1.0))
    if rope.mscale and rope.mscale_all_dim:
        return (rope.mscale * log_factor + 1) / (rope.mscale_all_dim * log_factor + 1)
    return log_factor + 1


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions, optional biases and q/k norms."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.head_dim = arch.head_dim
        dim, q_dim, kv_dim = (
            arch.hidden_size,
            arch.num_heads * arch.head_dim,
            arch.num_kv_heads * arch.head_dim,
        )
        self.wq = Linear(dim, q_dim, bias=arch.qkv_bias)
        self.wk = Linear(dim, kv_dim, bias=arch.qkv_bias)
        self.wv = Linear(dim, kv_dim, bias=arch.qkv_bias)
        self.wo = Linear(q_dim, dim, bias=arch.out_bias)
        self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None
        self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None

    def forward(self, x_BSD: torch.Tensor, rotation: Rotation, mask: AttentionMask) -> torch.Tensor:
        """Mixes tokens that ``mask`` lets see each other: [B, S, D] in ``x_BSD``'s dtype."""
        q_BSHd, k_BSGd, v_BSGd = (
            w(x_BSD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHd, k_BSGd = self.q_norm(q_BSHd), self.k_norm(k_BSGd)
        q_BSHd, k_BSGd = rotate(q_BSHd, rotation), rotate(k_BSGd, rotation)
        return self.wo(attention(q_BSHd, k_BSGd, v_BSGd, mask).flatten(-2))


class DenseMLP(nn.Module):
    """SwiGLU feed-forward: ``w_down(silu(w_gate x) * w_up x)`` (arXiv 2002.05202)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        dim, width, bias = arch.hidden_size, arch.intermediate_size, arch.mlp_bias
        self.w_gate = Linear(dim, width, bias=bias)
        self.w_up = Linear(dim, width, bias=bias)
        self.w_down = Linear(width, dim, bias=bias)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return self.w_down(F.silu(self.w_gate(x_BSD)) * self.w_up(x_BSD))
