"""Keys of config.json that have an entry for each layer, or for each kind of layers.

``mlp_layer_types`` names the kind of each layer's feed-forward part. In some families
``rope_parameters`` describes the rotary embeddings of layers with a window, and those of the others
(:class:`WindowedRopes`).
"""

from collections.abc import Mapping, Sequence

from pydantic import Field, ValidationError

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.hf.files import error
from moetrain.models.rope_scaling import RopeScaling, Rotation

DENSE_MLP, ROUTED_MLP = "dense", "sparse"
SLIDING, FULL = "sliding_attention", "full_attention"
ROPE_BY_KIND = "layer_rope"
"""Our name of the key ``rope_parameters`` where it has an entry for each kind of layers."""


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


def read_ropes(config: ConfigJson, default: Mapping[str, Fields], kinds: set[str]) -> Fields:
    """Read the rotary embeddings of a :class:`WindowedRopes` from ``rope_parameters``.

    Args:
        config: has the key under the name :data:`ROPE_BY_KIND`.
        default: the value where it is missing.
        kinds: the kinds of the model's layers; others need no entry.

    Raises ConfigError: an entry is missing, or is not supported.
    """
    ropes = config.get(ROPE_BY_KIND)
    ropes = default if ropes is None else ropes
    found: Fields = {}
    for kind, prefix in ((FULL, ""), (SLIDING, "window_")):
        rope = ropes.get(kind) if isinstance(ropes, Mapping) else None
        if rope is None and kind not in kinds:
            continue
        values = rope if isinstance(rope, Mapping) else {}
        theta, share = values.get("rope_theta"), values.get("partial_rotary_factor")
        if not isinstance(theta, int | float) or share not in (None, 1):
            problem = f"rope_parameters of {kind} are {rope!r:.80}, expected a rope_theta"
            raise error("config.json", f"{problem} for whole heads; use a model that has it")
        original = values.get(RopeScaling.ORIGINAL) or config["max_position_embeddings"]
        try:
            scaling = RopeScaling.of_hf(values, original)
        except ValidationError:
            raise
        except ValueError as problem:
            raise error("config.json", f"rope_parameters of {kind}: {problem}") from None
        found |= {f"{prefix}rope_theta": float(theta), f"{prefix}rope": scaling}
    return found


def write_ropes(arch: Architecture) -> Fields:
    """Invert :func:`read_ropes`."""
    assert isinstance(arch, WindowedRopes)
    pairs = {
        FULL: (arch.rope_theta, arch.rope),
        SLIDING: (arch.window_rope_theta, arch.window_rope),
    }
    return {
        kind: {"rope_theta": theta, **(scaling.to_hf() or {"rope_type": "default"})}
        for kind, (theta, scaling) in pairs.items()
    }
