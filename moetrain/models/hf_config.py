"""A Hugging Face ``config.json`` to :class:`Architecture` and back, for every family.

What can be a table is one, and lies in the family's own file as an
:class:`~moetrain.models.family.HFFamily`: the defaults of its ``transformers`` config class (a key
that a file omits means that default), which key feeds which architecture field, what is the same in
every model of the family, its per-layer keys. Here is what all families share: the walk over those
tables, the checks, and rope.

Files are written with the keys that published checkpoints have (``rope_theta``, ``rope_scaling``,
``torch_dtype``): every version of ``transformers`` reads those.

Left out on purpose: what acts in training only (attention dropout, router jitter), and what
describes text instead of the network (token ids, generation settings).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from moetrain.models.architecture import Architecture, RopeScaling
from moetrain.models.family import HFConfig, HFFamily, config_error
from moetrain.models.registry import FAMILIES

HF_FAMILIES: dict[str, HFFamily] = {
    model_type: entry for family in FAMILIES for model_type, entry in family.hf.items()
}
"""Every family's entries, by ``model_type``."""


def architecture_from_hf(config: HFConfig) -> Architecture:
    """The architecture that the parsed ``config.json`` of a checkpoint describes.

    Raises:
        ConfigError: an unsupported model type, activation, rope type or quantization, or a value
            of the wrong type.
    """
    family = family_of(config.get("model_type"))
    given: dict[str, Any] = {**family.defaults, **_rename(config, family)}
    _check_types(given, family.defaults)
    if given["hidden_act"] != "silu":
        raise config_error(f"hidden_act {given['hidden_act']!r} is not supported, only 'silu'")
    if given.get("quantization_config") is not None:
        raise config_error(
            "the weights are quantized (quantization_config); use an unquantized one"
        )
    if given["num_key_value_heads"] is None:
        given["num_key_value_heads"] = given["num_attention_heads"]
    if given["head_dim"] is None:
        given["head_dim"] = given["hidden_size"] // max(1, given["num_attention_heads"])
    try:
        given["rope_theta"], rope = _read_rope(given)
        fields = {ours: given[theirs] for ours, theirs in family.all_fields.items()}
        fields |= {"family": config["model_type"], "rope": rope, **family.fixed}
        Architecture(**fields)  # sizes are sound before layers are counted by them
        arch = Architecture(**fields, **family.read_layers(given))
    except ValidationError as error:
        raise config_error(_first_problem(error, family)) from None
    return _canonical(arch)


def _rename(config: HFConfig, family: HFFamily) -> dict[str, Any]:
    """``config`` with each key under the one name that the family's tables use."""
    for other, key in family.aliases.items():
        if key in config and other in config and config[key] != config[other]:
            raise config_error(f"{other} {config[other]!r} contradicts {key} {config[key]!r}")
    return {family.aliases.get(key, key): value for key, value in config.items()}


def _first_problem(error: ValidationError, family: HFFamily) -> str:
    """What pydantic finds wrong, under the file's own name for it."""
    problem = error.errors()[0]
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        for ours, theirs in family.all_fields.items():
            message = re.sub(rf"\b{ours}\b", theirs, message)
        return message
    field = str(problem["loc"][0])
    return f"{family.all_fields.get(field, field)} is {problem['input']!r:.80}: {message}"


def architecture_to_hf(arch: Architecture) -> dict[str, Any]:
    """The ``config.json`` of ``arch``, the inverse of :func:`architecture_from_hf`.

    Raises:
        ValueError: the family's format cannot express ``arch``; it names the fields.
    """
    family = family_of(arch.family)
    config = {
        "architectures": [family.hf_class],
        "model_type": arch.family,
        "hidden_act": "silu",
        **{theirs: getattr(arch, ours) for ours, theirs in family.all_fields.items()},
        "rope_scaling": _write_rope(arch.rope),
        **family.write_layers(arch),
    }
    wanted, got = _canonical(arch).model_dump(), architecture_from_hf(config).model_dump()
    lost = [f"{key} {wanted[key]!r}" for key in wanted if wanted[key] != got[key]]
    if lost:
        raise ValueError(f"a {arch.family} config.json cannot express {', '.join(lost)}")
    return config


def exported_config(arch: Architecture, source: HFConfig | None) -> dict[str, Any]:
    """The ``config.json`` of ``arch``, with all that the one it was read from says besides.

    ``source``: that one; it is kept as it is where it still describes ``arch``.

    Raises:
        ValueError: as :func:`architecture_to_hf`.
    """
    if source is None or source.get("model_type") != arch.family:
        return architecture_to_hf(arch)
    if architecture_from_hf(source) == _canonical(arch):
        return dict(source)
    own, family = architecture_to_hf(arch), family_of(arch.family)
    spelled = {*own, *family.defaults, *family.aliases, *_ROPE_KEYS}
    return {key: value for key, value in source.items() if key not in spelled} | own


_NULLABLE: dict[str, type] = {
    "num_key_value_heads": int,
    "head_dim": int,
    "sliding_window": int,
    "mlp_only_layers": list,
    "layer_types": list,
}
"""Keys that may be null, and what they hold otherwise."""


def family_of(model_type: object) -> HFFamily:
    """The entry of ``model_type`` in :data:`HF_FAMILIES`; ConfigError if there is none."""
    if not isinstance(model_type, str) or model_type not in HF_FAMILIES:
        supported = ", ".join(sorted(HF_FAMILIES))
        raise config_error(f"model_type {model_type!r} is not supported; supported: {supported}")
    return HF_FAMILIES[model_type]


def _check_types(given: HFConfig, defaults: HFConfig) -> None:
    """Wrong types in the keys that have a default: arithmetic on them would end in a traceback."""
    for key, default in defaults.items():
        value = given[key]
        kind = _NULLABLE.get(key, type(default))
        expected = (int, float) if kind is float else kind
        is_bool_for_number = isinstance(value, bool) and kind is not bool
        if value is None and key in _NULLABLE:
            continue
        if is_bool_for_number or not isinstance(value, expected):
            like = f"of type {kind.__name__}" if default is None else f"like {default!r}"
            raise config_error(f"{key} is {value!r:.80}, expected a value {like}")


def _canonical(arch: Architecture) -> Architecture:
    """``arch`` with per-layer fields empty where that says the same, so that equal means equal."""
    return arch.model_copy(
        update={
            "sliding_windows": arch.sliding_windows if any(arch.sliding_windows) else (),
            "moe_layers": () if all(arch.moe_layers) else arch.moe_layers,
        }
    )


# Rope. Our field names are Hugging Face's; original_max_positions alone differs.
_ROPE_FIELDS = {
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
}
_ROPE_REQUIRED = {"linear": ("factor",), "yarn": ("factor",), "llama3": _ROPE_FIELDS["llama3"]}
_ORIGINAL = "original_max_position_embeddings"
_ROPE_KEYS = {"rope_scaling", "rope_parameters", "partial_rotary_factor", _ORIGINAL}
"""Where files say it, but for ``rope_theta``."""


def _read_rope(config: HFConfig) -> tuple[float, RopeScaling]:
    """``rope_theta`` and the scaling, from ``rope_scaling`` or the newer ``rope_parameters``."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise config_error(f"rope_scaling is {rope!r}, expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        known = ", ".join(_ROPE_FIELDS)
        raise config_error(f"rope type {kind!r} is not supported; supported: {known}")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise config_error("rope parameters that differ between layer types are not supported")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1):
        raise config_error("partial_rotary_factor other than 1 is not supported")
    values = {key: rope[key] for key in _ROPE_FIELDS[kind] if rope.get(key) is not None}
    missing = [key for key in _ROPE_REQUIRED.get(kind, ()) if key not in values]
    if missing:
        raise config_error(f"rope type {kind!r} needs {', '.join(missing)}")
    if kind in ("yarn", "llama3"):
        original = config.get(_ORIGINAL) or rope.get(_ORIGINAL)
        values["original_max_positions"] = original or config["max_position_embeddings"]
    theta = rope.get("rope_theta", config["rope_theta"])
    return theta, RopeScaling.model_validate({"kind": kind, **values})


def _write_rope(rope: RopeScaling) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    values = {key: getattr(rope, key) for key in _ROPE_FIELDS[rope.kind]}
    values |= {_ORIGINAL: rope.original_max_positions, "rope_type": rope.kind}
    return {key: value for key, value in values.items() if value is not None}
