"""The architecture of a run: a preset with overrides, or what a checkpoint's config.json says."""

from pydantic import ValidationError

from moetrain.config import ConfigError, ModelSection
from moetrain.models.architecture import Architecture
from moetrain.models.hf import check_checkpoint, read_checkpoint_config, resolve
from moetrain.models.hf_config import architecture_from_hf
from moetrain.models.registry import FAMILIES

PRESETS: dict[str, Architecture] = {
    name: arch for family in FAMILIES for name, arch in family.presets.items()
}

_EXPERT_FIELDS = ("num_experts", "num_experts_per_token", "moe_intermediate_size")
# Grouped matrix products read rows in pieces of 16 bytes: 8 numbers of bfloat16.
_EXPERT_WIDTH_MULTIPLE = 8


def resolve_architecture(section: ModelSection) -> Architecture:
    """The architecture that ``model.path`` or ``model.preset`` (with overrides) stands for.

    A checkpoint's headers are checked against it here, where nothing slow has been done yet.

    Raises:
        ConfigError: a bad path, ``config.json`` or weight file; an unknown preset; overrides that
            do not fit it or each other.
    """
    if section.path is not None:
        folder = resolve(section.path)
        arch = architecture_from_hf(read_checkpoint_config(folder))
        check_checkpoint(folder, arch)
        return arch
    preset = PRESETS.get(section.preset or "")
    if preset is None:
        known = ", ".join(sorted(PRESETS))
        raise ConfigError("model.preset", f"{section.preset!r} is not one of {known}")
    overrides = section.overrides()
    for field in _EXPERT_FIELDS:
        if field in overrides and not preset.num_experts:
            problem = f"{overrides[field]}, but preset {section.preset!r} has no experts; unset it"
            raise ConfigError(f"model.{field}", problem)
    try:
        arch = Architecture.model_validate({**preset.model_dump(), **overrides})
    except ValidationError as error:
        first = error.errors()[0]
        problem = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            raise ConfigError(
                f"model.{first['loc'][0]}", f"{first['input']!r}: {problem}"
            ) from None
        guilty = next((name for name in overrides if name in problem.split()), "preset")
        raise ConfigError(f"model.{guilty}", problem) from None
    for field in ("hidden_size", "moe_intermediate_size") if arch.num_experts else ():
        if getattr(arch, field) % _EXPERT_WIDTH_MULTIPLE:
            problem = f"{getattr(arch, field)} is not a multiple of {_EXPERT_WIDTH_MULTIPLE}"
            raise ConfigError(f"model.{field}", f"{problem}, which expert weights need")
    return arch
