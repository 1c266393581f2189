"""Converts a Hugging Face ``config.json`` to an :class:`Architecture` and back, for every family.

A family's own file has its tables (:class:`~moetrain.models.family.Family`). This file has what all
families share: reading and writing by those tables, the checks, and rope.

Files are written with the keys of published checkpoints (``rope_theta``, ``rope_scaling``,
``torch_dtype``), which every version of ``transformers`` reads.

Left out on purpose: settings of training (attention dropout, router jitter), and settings of text
(token ids, generation).
"""

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial

from pydantic import ValidationError

from moetrain.config.sources import shortened
from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.families import FAMILIES
from moetrain.models.family import Family
from moetrain.models.hf.files import error
from moetrain.models.hf.formats import formats_of
from moetrain.models.rope_scaling import RopeScaling

_error = partial(error, "config.json")
_TIED = "tie_word_embeddings"
_PAD = "pad_token_id"
_CLASSIFIES = "ForSequenceClassification"
"""End of the name of the ``transformers`` class of models that score a text by its last token."""
_DERIVED: Mapping[str, Callable[[ConfigJson], int]] = {
    "num_key_value_heads": lambda config: config["num_attention_heads"],
    "head_dim": lambda config: config["hidden_size"] // max(1, config["num_attention_heads"]),
}
"""Keys of files that may be null, and the functions that then compute their values."""


def architecture_from_hf(config: ConfigJson) -> Architecture:
    """Return the architecture that the parsed ``config.json`` of a checkpoint describes.

    Raises ConfigError: an unsupported model type, activation, rope type or quantization, or a value
    of the wrong type.
    """
    family = _family_of(config.get("model_type"))
    own = _own_keys(config, family)
    for other, key in family.aliases.items():
        if key in own and other in own and own[key] != own[other]:
            raise _error(f"{other} {own[other]!r} contradicts {key} {own[key]!r}")
    own = {family.aliases.get(key, key): value for key, value in own.items()}
    values: Fields = {**family.defaults, **own}
    _check_types(values, family)
    if values["hidden_act"] not in (family.activation, family.written_activation):
        raise _error(
            f"hidden_act {values['hidden_act']!r} is not supported, only {family.activation!r}"
        )
    formats_of({**values, **config})  # raises for unsupported quantisation
    for key, value in _DERIVED.items():
        if values[key] is None:
            values[key] = value(values)
    try:
        values["rope_theta"], values["partial_rotary_factor"], rope = _read_rope(values, family)
        fields = {ours: values[theirs] for ours, theirs in family.keys.items()}
        fields |= {"family": family.name, "rope": rope, **family.fixed}
        family.architecture(**fields)  # checks the sizes before read_layers counts by them
        arch = family.architecture(**(fields | family.read_layers(values)))
        if is_reward_model(config):
            arch = arch.scoring(_read_head({**config, **own}))
    except ValidationError as error:
        raise _error(_first_problem(error, family)) from None
    return _canonical(arch)


def is_reward_model(config: ConfigJson) -> bool:
    """Return True if the parsed ``config.json`` is that of a ``*ForSequenceClassification``."""
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(_CLASSIFIES) for name in names)


def _read_head(config: ConfigJson) -> int | None:
    """Return ``pad_token_id``; ConfigError: it is not an id, or the head has several rows."""
    labels, pad = config.get("id2label"), config.get(_PAD)
    # transformers takes a config.json without labels for one with two.
    number = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
    if number != 1:
        problem = f"a {_CLASSIFIES} with {number!r:.80} labels; only one, a reward, is supported"
        raise _error(problem)
    if pad is not None and (type(pad) is not int or pad < 0):
        raise _error(f"{_PAD} is {pad!r:.80}, expected an id or null")
    return pad


def _own_keys(config: ConfigJson, family: Family) -> ConfigJson:
    """Return the keys of ``config`` that describe the model.

    If the family has a ``Family.section``, these are the section's keys, and the key for tied
    embeddings, which is outside the section.
    """
    if family.section is None:
        return config
    own = config.get(family.section[0], {})
    if not isinstance(own, Mapping):
        raise _error(f"{family.section[0]} is {own!r:.80}, expected an object")
    return {**own, **{key: config[key] for key in (_TIED,) if key in config}}


def _first_problem(error: ValidationError, family: Family) -> str:
    """Describe pydantic's first error, with the key that the file uses for the field."""
    problem = error.errors()[0]
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        for ours, theirs in family.keys.items():
            message = re.sub(rf"\b{ours}\b", theirs, message)
        return message
    field = str(problem["loc"][0])
    return f"{family.keys.get(field, field)} is {problem['input']!r:.80}: {message}"


def _to_hf(arch: Architecture) -> Fields:
    """Return the whole ``config.json`` of ``arch``, without a source's other keys."""
    family = _family_of(arch.family)
    own = family.write_layers(arch)
    if "rope_parameters" not in own:  # transformers reads either of the two keys
        own = {"rope_scaling": arch.rope.to_hf(), **own}
    keys = {theirs: getattr(arch, ours) for ours, theirs in family.keys.items()}
    config: Fields = {"hidden_act": family.activation, **family.constants, **keys, **own}
    name = family.hf_class
    if arch.num_labels:
        name = re.sub(r"For\w+$", _CLASSIFIES, name)
        config[_PAD] = arch.pad_token_id
    head: Fields = {"architectures": [name], "model_type": arch.family}
    if arch.num_labels:
        head |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if family.section is not None:
        key, model_type = family.section
        head |= {_TIED: arch.tie_embeddings, key: {"model_type": model_type, **config}}
        config = {}
    config = head | config
    wanted, got = _canonical(arch).model_dump(), architecture_from_hf(config).model_dump()
    lost = [f"{key} {wanted[key]!r}" for key in wanted if wanted[key] != got[key]]
    if lost:
        raise ValueError(f"a {arch.family} config.json cannot express {', '.join(lost)}")
    return config


def exported_config(arch: Architecture, source: ConfigJson | None) -> Fields:
    """Return the ``config.json`` of ``arch``; inverts :func:`architecture_from_hf`.

    ``source`` is the config that the architecture was read from. The result keeps its other keys.
    If ``source`` still describes ``arch``, the result is an unchanged copy of it.

    Raises ValueError: the family's format cannot express some fields of ``arch``, which the error
    names.
    """
    if source is None or source.get("model_type") != arch.family:
        return _to_hf(arch)
    if architecture_from_hf(source).model_dump() == _canonical(arch).model_dump():
        return dict(source)
    own = _to_hf(arch)
    family = _family_of(arch.family)
    spelled = {*family.defaults, *family.aliases, *_ROPE_KEYS}
    if arch.num_labels:  # a classifier's config may have this key in place of id2label
        spelled |= {"num_labels"}
    if family.section is not None:
        key = family.section[0]
        own[key] = _carried(source[key], spelled) | own[key] | _image_rope(source[key], own[key])
    return _carried(source, {*own, *spelled}) | own


def _image_rope(source: ConfigJson, own: ConfigJson) -> Fields:
    """Return the scaling of ``own`` with what ``source`` says of images' positions, if it does.

    A token of text has one position, so only a vision tower's inputs need these keys.
    """
    rope = source.get("rope_scaling") or source.get("rope_parameters") or {}
    found = {name: value for name, value in rope.items() if name.startswith("mrope_")}
    scaling = own.get("rope_scaling") or {"rope_type": "default"}
    return {"rope_scaling": {**scaling, **found}} if found else {}


def _carried(source: ConfigJson, spelled: set[str]) -> Fields:
    return {key: value for key, value in source.items() if key not in spelled}


def _family_of(model_type: object) -> Family:
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        near = get_close_matches(str(model_type), FAMILIES, 3)
        named = f"near it are {' and '.join(near)}; " * bool(near)
        raise _error(
            f"model_type {shortened(model_type)} is not supported; {named}docs/families.md lists "
            "all families, and --import FILE.py adds one"
        )
    return FAMILIES[model_type]


def _check_types(values: ConfigJson, family: Family) -> None:
    """Raise ConfigError for a value that has another type than the key's default."""
    nullable = dict.fromkeys(_DERIVED, int) | dict(family.nullable)
    for key, default in family.defaults.items():
        value = values[key]
        kind = nullable.get(key, type(default))
        expected = (int, float) if kind is float else kind
        is_bool_for_number = isinstance(value, bool) and kind is not bool
        if value is None and key in nullable:
            continue
        if is_bool_for_number or not isinstance(value, expected):
            like = f"of type {kind.__name__}" if default is None else f"like {default!r}"
            raise _error(f"{key} is {value!r:.80}, expected a value {like}")


def _canonical(arch: Architecture) -> Architecture:
    """Return ``arch`` without per-layer fields that only repeat the default.

    Equal models then compare equal.
    """
    repeated = {
        name: ()
        for name, entry in arch.by_layer.items()
        if all(value == entry for value in getattr(arch, name))
    }
    # Files hold the blocks of multi-token prediction whether or not they are trained.
    return arch.model_copy(update={"mtp_layers": 0, **repeated})


_ROPE_KEYS = {"rope_scaling", "rope_parameters", "partial_rotary_factor", RopeScaling.ORIGINAL}
"""The keys of files that describe rope, except for ``rope_theta``."""


def _read_rope(config: ConfigJson, family: Family) -> tuple[float, float, RopeScaling]:
    """Read ``rope_theta``, the rotating share of a head and the scaling.

    The scaling is in ``rope_scaling``, or in newer files in ``rope_parameters``. The other two are
    in the same object, or else are keys of ``config`` itself.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise _error(f"rope_scaling is {rope!r}, expected an object")
    original = config.get(RopeScaling.ORIGINAL) or rope.get(RopeScaling.ORIGINAL)
    try:
        scaling = RopeScaling.of_hf(rope, original or config.get("max_position_embeddings"))
    except ValidationError:
        raise
    except ValueError as error:
        raise _error(str(error)) from None
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if "partial_rotary_factor" not in family.defaults and partial not in (None, 1):
        raise _error(f"partial_rotary_factor {partial!r:.80} of a {family.name} is not supported")
    theta = rope.get("rope_theta", config["rope_theta"])
    return theta, 1.0 if partial is None else partial, scaling
