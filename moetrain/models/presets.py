"""The architecture of a run: a preset with overrides, or what a checkpoint's config.json says."""

from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches

from pydantic import ValidationError

from moetrain.config import ConfigError, ModelSection
from moetrain.config.sources import shortened
from moetrain.models.architecture import Architecture
from moetrain.models.hf.config import architecture_from_hf
from moetrain.models.hf.files import CONFIG, read_json, resolve
from moetrain.models.hf.load import check_checkpoint
from moetrain.models.parts import Part
from moetrain.models.registry import FAMILIES, PRESETS


def resolve_architecture(section: ModelSection) -> Architecture:
    """The architecture that ``model.path`` or ``model.preset`` (with overrides) stands for.

    A checkpoint's headers are checked against it here, where nothing slow has been done yet.

    Raises:
        ConfigError: a bad path, ``config.json`` or weight file; an unknown preset; overrides that
            do not fit it or each other.
    """
    if section.path is not None:
        folder = resolve(section.path)
        arch = architecture_from_hf(read_json(folder / CONFIG))
        check_checkpoint(folder, arch)
        return arch
    preset = PRESETS.get(section.preset or "")
    if preset is None:
        name, known = section.preset or "", sorted(PRESETS)
        near = "".join(f"did you mean {n}? " for n in get_close_matches(name.lower(), known, 1))
        raise ConfigError(
            "model.preset",
            f"{shortened(name)} is not one of {', '.join(known)}; {near}For other models give "
            "model.path, a Hugging Face folder or hub id",
        )
    overrides = section.overrides()
    kinds = {kind for family in FAMILIES.values() for kind in family.architecture.kinds}
    foreign = _fields_of(kinds) - _fields_of(preset.kinds)
    for field in overrides:
        if field in foreign:
            problem = f"{overrides[field]}, but preset {section.preset!r} has no use for it"
            raise ConfigError(f"model.{field}", f"{problem}; unset it")
    try:
        arch = type(preset).model_validate({**preset.model_dump(), **overrides})
    except ValidationError as error:
        first = error.errors()[0]
        problem = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            raise ConfigError(
                f"model.{first['loc'][0]}", f"{first['input']!r}: {problem}"
            ) from None
        guilty = next((name for name in overrides if name in problem.split()), "preset")
        raise ConfigError(f"model.{guilty}", problem) from None
    for part in arch.parts():
        for field, multiple in part.aligned.items():
            if getattr(part, field) % multiple:
                problem = f"{getattr(part, field)} is not a multiple of {multiple}"
                raise ConfigError(f"model.{field}", f"{problem}, which {part.name} weights need")
    return arch


def _fields_of(kinds: Iterable[type[Part]]) -> set[str]:
    return {field.name for kind in kinds for field in fields(kind)}
