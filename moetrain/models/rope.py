"""Rotary position embedding (arXiv 2104.09864), with the scalings of :class:`RopeScaling`.

Legend: B batch, S sequence, H heads, d head width.
"""

import math
from typing import NamedTuple

import torch
from torch import nn

from moetrain.models.architecture import Architecture


class Rotation(NamedTuple):
    """Cosine and sine of each position's rotary angles, fp32 [B or 1, S, 1, d/2]."""

    cos: torch.Tensor
    sin: torch.Tensor


class RotaryEmbedding(nn.Module):
    """The angles of heads of which ``dim`` numbers turn."""

    def __init__(self, arch: Architecture, dim: int) -> None:
        super().__init__()
        # Neither a parameter nor a buffer: it follows from the architecture alone, so it must
        # outlive a meta-device init and must not be rounded by ``model.to(bfloat16)``.
        self.inv_freq, self.scale = _rope_frequencies(arch, dim)
        self._copies: dict[torch.device, torch.Tensor] = {}

    def forward(self, positions_BS: torch.Tensor) -> Rotation:
        """Angles of integer ``positions_BS``; computed once per forward, used by every layer."""
        device = positions_BS.device
        if device not in self._copies:
            # non_blocking: a copy from pageable memory would otherwise wait for the device.
            self._copies[device] = self.inv_freq.to(device, non_blocking=True)
        angles = (positions_BS[..., None].float() * self._copies[device])[:, :, None]
        return Rotation(angles.cos() * self.scale, angles.sin() * self.scale)


def _rope_frequencies(arch: Architecture, dim: int) -> tuple[torch.Tensor, float]:
    """Radians a token of each of the d/2 pairs (fp32, CPU), and the factor on cos and sin."""
    rope = arch.rope
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    inv_freq = 1.0 / arch.rope_theta**exponents
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3_frequencies(arch, inv_freq), 1.0
    if rope.kind == "yarn":
        return _yarn_frequencies(arch, dim, inv_freq), _yarn_scale(arch)
    return inv_freq, 1.0


def _llama3_frequencies(arch: Architecture, inv_freq: torch.Tensor) -> torch.Tensor:
    """Divides what turns slowly by ``factor``, keeps what turns fast, blends in between."""
    rope = arch.rope
    turns = (rope.original_max_positions or arch.max_positions) * inv_freq / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * inv_freq / rope.factor + blend * inv_freq


def _yarn_frequencies(arch: Architecture, dim: int, inv_freq: torch.Tensor) -> torch.Tensor:
    """A linear ramp over the pairs, from kept to divided by ``factor`` (arXiv 2309.00071)."""
    rope = arch.rope
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
