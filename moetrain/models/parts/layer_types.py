"""Keys of config.json that have an entry for each layer, or for each kind of layers.

``layer_types`` names the layers that have a window, and ``mlp_layer_types`` the kind of each
layer's feed-forward part. In some families ``rope_parameters`` describes the rotary embeddings of
layers with a window, and those of the others (:class:`WindowedRopes`). In some, the two kinds of
layers also differ in their numbers of heads (:class:`WindowedDecoder`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, ValidationError

from moetrain.models.architecture import Architecture, AttentionPart, ConfigJson, Fields
from moetrain.models.decoders import MoEDecoder
from moetrain.models.hf.files import error
from moetrain.models.rope_scaling import RopeScaling, Rotation

DENSE_MLP, ROUTED_MLP = "dense", "sparse"
SLIDING, FULL = "sliding_attention", "full_attention"
ROPE_BY_KIND = "layer_rope"
"""Our name of the key ``rope_parameters`` where it has an entry for each kind of layers."""

_Heads = Annotated[int, Field(gt=0, le=2**31 - 1)]


def read_types(config: ConfigJson, types: Sequence[object]) -> Fields:
    """Read the layers' windows from their ``types`` and the key ``sliding_window``.

    Raises ConfigError: a type is unknown, or layers have windows and the key is null.
    """
    window = config["sliding_window"]
    if unknown := sorted({str(kind) for kind in types} - {SLIDING, FULL}):
        raise error("config.json", f"layer_types {', '.join(unknown)} are not supported")
    if window is None and SLIDING in types:
        problem = f"sliding_window is null, but layer_types has {SLIDING}"
        raise error("config.json", f"{problem}; give the window in tokens")
    return {"sliding_windows": tuple(window if kind == SLIDING else None for kind in types)}


def write_types(arch: Architecture) -> Fields:
    """Invert :func:`read_types`."""
    windows = [arch.window(i) for i in range(arch.num_layers)]
    found: Fields = {"layer_types": [FULL if window is None else SLIDING for window in windows]}
    if any(windows):  # transformers does not accept null
        found["sliding_window"] = next(filter(None, windows))
    return found


def read_mlp_types(config: ConfigJson, default: Sequence[bool]) -> tuple[bool, ...]:
    """Return ``Architecture.moe_layers``; ``default`` where ``mlp_layer_types`` is null."""
    kinds = config["mlp_layer_types"]
    if kinds is None:
        return tuple(default)
    unknown = sorted({str(kind) for kind in kinds} - {DENSE_MLP, ROUTED_MLP})
    if unknown:
        raise error("config.json", f"mlp_layer_types {', '.join(unknown)} are not supported")
    return tuple(kind == ROUTED_MLP for kind in kinds)


def write_mlp_types(arch: Architecture) -> list[str]:
    """Invert :func:`read_mlp_types`."""
    routed = arch.moe_layer_indices
    return [ROUTED_MLP if i in routed else DENSE_MLP for i in range(arch.num_layers)]


class WindowedRopes(Architecture):
    """An architecture whose layers with a window have rotary embeddings of their own.

    ``rope_theta`` and ``rope`` describe those of all other layers.
    """

    window_rope_theta: float = Field(default=10000.0, gt=0, allow_inf_nan=False)
    window_rope: RopeScaling = RopeScaling()

    def rotation(self, layer: int) -> Rotation:
        full = super().rotation(layer)
        if self.window(layer) is None:
            return full
        return full._replace(theta=self.window_rope_theta, scaling=self.window_rope)


class WindowedDecoder(WindowedRopes, MoEDecoder):
    """An MoE decoder whose layers with a window also have a number of heads of their own.

    ``num_heads``, ``num_kv_heads`` and ``partial_rotary_factor`` are those of all other layers.
    """

    window_partial_rotary_factor: float = Field(default=1.0, ge=0, le=1)
    window_num_heads: _Heads | None = None
    """None: ``num_heads``."""
    window_num_kv_heads: _Heads | None = None
    """None: ``num_kv_heads``."""

    def attention(self, layer: int) -> AttentionPart:
        window = self.sliding_windows[layer] if self.sliding_windows else None
        own: dict[str, Any] = {}
        if window is not None:
            own["partial_rotary_factor"] = self.window_partial_rotary_factor
            own["num_heads"] = self.window_num_heads or self.num_heads
            own["num_kv_heads"] = self.window_num_kv_heads or self.num_kv_heads
        return self.kinds[0].of(self, window=window, **own)

    def rotation(self, layer: int) -> Rotation:
        return super().rotation(layer)._replace(dim=self.attention(layer).rotary_dim)


def read_ropes(
    config: ConfigJson, default: Mapping[str, Fields], kinds: set[str], *, is_partial: bool = False
) -> Fields:
    """Read the rotary embeddings of a :class:`WindowedRopes` from ``rope_parameters``.

    Args:
        config: has the key under the name :data:`ROPE_BY_KIND`.
        default: the value where it is missing.
        kinds: the kinds of the model's layers; others need no entry.
        is_partial: True: the architecture is a :class:`WindowedDecoder`, and an entry may say which
            share of a head rotates.

    Raises ConfigError: an entry is missing, or is not supported.
    """
    ropes = config.get(ROPE_BY_KIND)
    ropes = default if ropes is None else ropes
    found: Fields = {}
    for kind, prefix in ((FULL, ""), (SLIDING, "window_")):
        rope = ropes.get(kind) if isinstance(ropes, Mapping) else None
        if rope is None and kind not in kinds:
            continue
        values: Mapping[str, Any] = rope if isinstance(rope, Mapping) else {}
        theta: Any = values.get("rope_theta")
        share: Any = values.get("partial_rotary_factor")
        share = 1.0 if share is None else share
        is_share = type(share) in (int, float) if is_partial else share == 1
        if type(theta) not in (int, float) or not is_share:
            problem = f"rope_parameters of {kind} are {rope!r:.80}, expected a rope_theta"
            whole = "" if is_partial else " for whole heads"
            raise error("config.json", f"{problem}{whole}; use a model that has it")
        original = values.get(RopeScaling.ORIGINAL) or config["max_position_embeddings"]
        try:
            scaling = RopeScaling.of_hf(values, original)
        except ValidationError:
            raise
        except ValueError as problem:
            raise error("config.json", f"rope_parameters of {kind}: {problem}") from None
        found |= {f"{prefix}rope_theta": float(theta), f"{prefix}rope": scaling}
        if is_partial:  # the number of elements that rotate is rounded down
            width = config["head_dim"]
            found[f"{prefix}partial_rotary_factor"] = int(width * share) / width
    return found


def written_share(share: float, width: int) -> float:
    """Return ``share`` for a file, whose readers round ``share * width`` down."""
    wanted = round(share * width)
    return share if int(width * share) == wanted else math.nextafter(share, 1.0)


def write_ropes(arch: Architecture) -> Fields:
    """Invert :func:`read_ropes`."""
    assert isinstance(arch, WindowedRopes)
    pairs = {
        FULL: (arch.rope_theta, arch.rope),
        SLIDING: (arch.window_rope_theta, arch.window_rope),
    }
    found: dict[str, Fields] = {
        kind: {"rope_theta": theta, **(scaling.to_hf() or {"rope_type": "default"})}
        for kind, (theta, scaling) in pairs.items()
    }
    if isinstance(arch, WindowedDecoder):
        for kind, share in (
            (FULL, arch.partial_rotary_factor),
            (SLIDING, arch.window_partial_rotary_factor),
        ):
            found[kind]["partial_rotary_factor"] = written_share(share, arch.head_dim)
    return found
