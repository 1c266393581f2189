"""Layers with a sliding window among layers with full attention, each kind with its own rotation.

Config files name the kind of each layer in ``layer_types``.
"""

from typing import Annotated

from pydantic import Field

from moetrain.models.architecture import Architecture, AttentionPart, ConfigJson, Fields
from moetrain.models.decoders import MoEDecoder
from moetrain.models.hf.files import error
from moetrain.models.rope_scaling import RopeScaling, Rotation

SLIDING = "sliding_attention"
FULL = "full_attention"

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class WindowedDecoder(MoEDecoder):
    """An MoE decoder whose layers with a window may rotate otherwise than the other layers.

    The fields below are those of layers with a window. None: as in the other layers.
    """

    sliding_rope_theta: _Positive | None = None
    sliding_rope: RopeScaling | None = None
    sliding_rotary_factor: float = Field(default=1.0, ge=0, le=1)

    def attention(self, layer: int) -> AttentionPart:
        window = self.sliding_windows[layer] if self.sliding_windows else None
        share = self.partial_rotary_factor if window is None else self.sliding_rotary_factor
        return self.kinds[0].of(self, window=window, partial_rotary_factor=share)

    def rotation(self, layer: int) -> Rotation:
        part = self.attention(layer)
        theta, rope = self.rope_theta, self.rope
        if part.window is not None:
            theta, rope = self.sliding_rope_theta or theta, self.sliding_rope or rope
        return Rotation(part.rotary_dim, theta, rope, self.max_positions)


def read_windows(config: ConfigJson, types: list[str]) -> Fields:
    """Read the layers' windows from their types and the key ``sliding_window``.

    Raises ConfigError: a type is unknown, or layers have windows and the key is null.
    """
    window = config["sliding_window"]
    if unknown := sorted({str(kind) for kind in types} - {SLIDING, FULL}):
        raise error("config.json", f"layer_types {', '.join(unknown)} are not supported")
    if window is None and SLIDING in types:
        problem = f"sliding_window is null, but layer_types has {SLIDING}"
        raise error("config.json", f"{problem}; give the window in tokens")
    return {"sliding_windows": tuple(window if kind == SLIDING else None for kind in types)}


def write_windows(arch: Architecture) -> Fields:
    """Invert :func:`read_windows`."""
    windows = [arch.window(i) for i in range(arch.num_layers)]
    found: Fields = {"layer_types": [FULL if window is None else SLIDING for window in windows]}
    if any(windows):  # transformers does not accept null
        found["sliding_window"] = next(filter(None, windows))
    return found
