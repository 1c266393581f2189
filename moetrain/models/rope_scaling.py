"""The angles of rotary embeddings, and the variants that reach longer rows than the base.

Beside them is :class:`QueryScaling`, a factor that sharpens the attention of late positions.

    angle = position * frequency_p,    frequency_p = theta^(-2 p / d), scaled by the variant

Legend: B batch, S sequence, d elements of a head that rotate, in d / 2 pairs p.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn

_Size = Annotated[int, Field(gt=0, le=2**31 - 1)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RopeScaling(BaseModel):
    """A variant of rotary embeddings, with Hugging Face's names and meanings.

    ``linear``: positions are divided by ``factor`` (arXiv 2306.15595). ``yarn``: arXiv 2309.00071.
    ``llama3``: frequency-dependent scaling of Llama 3.1. ``dynamic``: ``alpha`` enlarges the base
    theta, by the same factor for rows of every length, as in HunYuan. ``proportional``: only the
    ``share`` of pairs with the highest frequencies rotates, and their positions are divided by
    ``factor``, as in Gemma-4.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    ORIGINAL: ClassVar = "original_max_position_embeddings"
    """The key of ``original_max_positions`` in files. Other fields have the same name in files."""
    _FIELDS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "default": (),
        "linear": ("factor",),
        "yarn": (
            "factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "dynamic": ("alpha", "factor"),
    }
    """The fields that files have for each kind."""
    _ALIASES: ClassVar[Mapping[str, str]] = {"deepseek_yarn": "yarn"}
    """Other names that files have for kinds."""
    _REQUIRED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "linear": ("factor",),
        "yarn": ("factor",),
        "llama3": _FIELDS["llama3"],
        "dynamic": ("alpha",),
    }

    kind: Literal["default", "linear", "yarn", "llama3", "dynamic", "proportional"] = "default"
    factor: _Positive = 1.0
    original_max_positions: _Size | None = None
    # yarn
    beta_fast: _Positive = 32.0
    beta_slow: _Positive = 1.0
    attention_factor: _Positive | None = None
    mscale: _NonNegative | None = None
    mscale_all_dim: _NonNegative | None = None
    truncate: bool = True
    # llama3
    low_freq_factor: _Positive = 1.0
    high_freq_factor: _Positive = 4.0
    # dynamic
    alpha: _Positive = 1.0
    # proportional
    share: float = Field(default=1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _consistent(self) -> "RopeScaling":
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} is not more than "
                f"low_freq_factor {self.low_freq_factor}"
            )
        return self

    @classmethod
    def of_hf(cls, rope: Mapping[str, Any], original: Any) -> "RopeScaling":
        """Read ``rope``, the object in which a file describes rotary embeddings.

        ``original``: the longest row, in tokens, before scaling.

        Raises ValueError: the kind is not supported, a field is missing, or a value is wrong.
        """
        kind = rope.get("rope_type", rope.get("type", "default"))
        kind = cls._ALIASES.get(kind, kind) if isinstance(kind, str) else kind
        if not isinstance(kind, str) or kind not in cls._FIELDS:
            known = ", ".join(cls._FIELDS)
            raise ValueError(f"rope type {kind!r} is not supported; supported: {known}")
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise ValueError("rope parameters that differ between layer types are not supported")
        values = {key: rope[key] for key in cls._FIELDS[kind] if rope.get(key) is not None}
        if missing := [key for key in cls._REQUIRED.get(kind, ()) if key not in values]:
            raise ValueError(f"rope type {kind!r} needs {', '.join(missing)}")
        if kind in ("yarn", "llama3"):
            values["original_max_positions"] = original
        return cls.model_validate({"kind": kind, **values})

    def to_hf(self) -> dict[str, Any] | None:
        """Invert :meth:`of_hf`; None: there is no scaling."""
        if self.kind == "default":
            return None
        values = {key: getattr(self, key) for key in self._FIELDS[self.kind]}
        values |= {self.ORIGINAL: self.original_max_positions, "rope_type": self.kind}
        return {key: value for key, value in values.items() if value is not None}

    def frequencies(
        self,
        theta: float,
        dim: int,
        max_positions: int,
    ) -> tuple[torch.Tensor, float]:
        """Compute each pair's radians per token (fp32 [dim / 2], CPU), and a factor on cos and sin.

        ``max_positions`` is used where ``original_max_positions`` is not set.
        """
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
        if self.kind == "dynamic":  # "NTK-aware": the slowest pair is slowed down by alpha
            theta *= self.alpha ** (dim / (dim - 2))
        inv_freq = 1.0 / theta**exponents
        context = self.original_max_positions or max_positions
        if self.kind == "proportional":
            inv_freq[int(self.share * dim // 2) :] = 0.0
        if self.kind in ("linear", "proportional"):
            return inv_freq / self.factor, 1.0
        if self.kind == "llama3":
            return self._llama3(context, inv_freq), 1.0
        if self.kind == "yarn":
            return self._yarn(context, theta, dim, inv_freq), self._yarn_scale()
        return inv_freq, 1.0

    def _llama3(self, context: int, inv_freq: torch.Tensor) -> torch.Tensor:
        """Divide slow frequencies by ``factor``, keep fast ones, and blend in between."""
        turns = context * inv_freq / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * inv_freq / self.factor + blend * inv_freq

    def _yarn(
        self,
        context: int,
        theta: float,
        dim: int,
        inv_freq: torch.Tensor,
    ) -> torch.Tensor:
        """Keep fast frequencies, divide slow ones by ``factor``, and blend linearly over the pairs
        in between (arXiv 2309.00071)."""

        def pair_of(turns: float) -> float:  # real-valued: the pair that makes this many turns
            return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = pair_of(self.beta_fast)
        high = pair_of(self.beta_slow)
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, dim - 1)
        width = high - low or 0.001  # a very steep ramp in place of a step
        ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / width
        keep = 1 - ramp.clamp(0, 1)
        return inv_freq / self.factor * (1 - keep) + inv_freq * keep

    def _yarn_scale(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        log_factor = 0.1 * math.log(max(self.factor, 1.0))
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * log_factor + 1) / (self.mscale_all_dim * log_factor + 1)
        return log_factor + 1


class Rotation(NamedTuple):
    """The rotary embeddings of a layer."""

    dim: int
    """The number of a head's elements that rotate."""
    theta: float
    scaling: RopeScaling
    max_positions: int


class QueryScaling(NamedTuple):
    """A factor on queries that grows with a token's position in its document (Llama 4, Mistral 4).

    factor = 1 + beta * ln(1 + floor(position / interval))
    """

    beta: float
    interval: int
    """The number of positions after which the factor grows; it is 1 before."""

    def factors(self, positions_BS: torch.Tensor) -> torch.Tensor:
        """Return the factors of integer positions, fp32 [B or 1, S, 1, 1]."""
        steps_BS = torch.div(positions_BS, self.interval, rounding_mode="floor").float()
        return (1 + self.beta * torch.log(1 + steps_BS))[..., None, None]


class RotaryEmbedding(nn.Module):
    """Computes rotary angles (arXiv 2104.09864) from positions."""

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        # The frequencies are neither a parameter nor a buffer. They follow from the architecture
        # alone, so they have values on the meta device too, and ``model.to(bfloat16)`` must not
        # round them.
        self.inv_freq, self.scale = rotation.scaling.frequencies(
            rotation.theta, rotation.dim, rotation.max_positions
        )
        self._copies: dict[torch.device, torch.Tensor] = {}

    def forward(self, positions_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine of the positions' angles, fp32 [B or 1, S, 1, d/2]."""
        device = positions_BS.device
        if device not in self._copies:
            # Without non_blocking, a copy from pageable memory waits for the device.
            self._copies[device] = self.inv_freq.to(device, non_blocking=True)
        angles = (positions_BS[..., None].float() * self._copies[device])[:, :, None]
        return angles.cos() * self.scale, angles.sin() * self.scale
