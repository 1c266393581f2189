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
"""Every known family by its ``model_type``."""
PRESETS: dict[str, Architecture] = {}
"""The named architectures of all families."""


def register(family: Family) -> None:
    """Make models of ``family`` known, so that they can be built, trained, read and written.

    Raises:
        ValueError: a family or a preset of the same name is known already.
    """
    taken = {family.name} & FAMILIES.keys() | family.presets.keys() & PRESETS.keys()
    if taken:
        raise ValueError(f"family {family.name!r}: {', '.join(sorted(taken))} is there already")
    FAMILIES[family.name] = family
    PRESETS.update(family.presets)


def find_family(arch: Architecture) -> Family:
    """Return the family of ``arch``."""
    return FAMILIES[arch.family]


def make_architecture(*, family: str, **fields: Any) -> Architecture:
    """Make an architecture from ``fields``, in its family's own class.

    Raises:
        ConfigError: there is no such family.
        ValidationError: the class lacks a field, or fields contradict each other.
    """
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError("model", f"family {family!r} is not one of {known}")
    return FAMILIES[family].architecture(family=family, **fields)


for _module in pkgutil.iter_modules(__path__):
    register(import_module(f"{__name__}.{_module.name}").FAMILY)
SHIPPED = frozenset(FAMILIES)
"""The package's own families, which every process knows."""
