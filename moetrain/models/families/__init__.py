"""The model families, one file each.

Every file of this folder registers its families when it is imported, and so does every file that
``--import`` names. Other programs call :func:`register` before the family's name is used.
"""

import pkgutil
from importlib import import_module

from moetrain.config.environment import imported_files
from moetrain.config.user_files import run_file
from moetrain.models.family import FAMILIES, PRESETS, register

__all__ = ["FAMILIES", "IN_EVERY_PROCESS", "PRESETS", "register", "run_imported_files"]

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
IN_EVERY_PROCESS = set(FAMILIES)
"""Families that every process of a run registers: the package's own and those of ``--import``."""
_RUN = set[str]()


def run_imported_files() -> None:
    """Run the files of ``--import`` that have not been run. Raises ConfigError if one raises."""
    for path in imported_files():
        if str(path) not in _RUN:
            _RUN.add(str(path))
            before = set(FAMILIES)
            run_file(path, "--import", str(path))
            IN_EVERY_PROCESS.update(FAMILIES.keys() - before)


run_imported_files()
