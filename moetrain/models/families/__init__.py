"""The model families, one file each.

Every file of this folder registers its families when it is imported. A family outside of the
package calls :func:`register` before its name is used.
"""

import pkgutil
from importlib import import_module

from moetrain.models.family import FAMILIES, PRESETS, register

__all__ = ["FAMILIES", "PRESETS", "SHIPPED", "register"]

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
SHIPPED = frozenset(FAMILIES)
"""The package's own families, which are registered in every process."""
