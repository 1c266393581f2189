"""The model families, one file each, and those that other packages have registered.

Every file of this folder has a :class:`~moetrain.models.family.Family` called ``FAMILY``: a new
family is one new file. A family that lives outside of the package calls :func:`register` before its
name is used.
"""

import pkgutil
from importlib import import_module
from typing import Any

from moetrain.config import ConfigError
from moetrain.models.architecture import Architecture
from moetrain.models.family import Family

FAMILIES: dict[str, Family] = {}
"""By ``model_type``."""
PRESETS: dict[str, Architecture] = {}
"""Every family's named architectures."""


def register(family: Family) -> None:
    """From here on models of ``family`` are built, trained, read and written.

    Raises:
        ValueError: there is another of its name, or a preset is.
    """
    taken = {family.name} & FAMILIES.keys() | family.presets.keys() & PRESETS.keys()
    if taken:
        raise ValueError(f"family {family.name!r}: {', '.join(sorted(taken))} is there already")
    FAMILIES[family.name] = family
    PRESETS.update(family.presets)


def find_family(arch: Architecture) -> Family:
    """The family of ``arch``."""
    return FAMILIES[arch.family]


def make_architecture(*, family: str, **fields: Any) -> Architecture:
    """The architecture of these fields, in its family's own class.

    Raises:
        ConfigError: no such family.
        ValidationError: fields that it does not have, or that do not fit each other.
    """
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError("model", f"family {family!r} is not one of {known}")
    return FAMILIES[family].architecture(family=family, **fields)


for _module in pkgutil.iter_modules(__path__):
    register(import_module(f"{__name__}.{_module.name}").FAMILY)
SHIPPED = frozenset(FAMILIES)
"""The families of the package, which every process knows."""
