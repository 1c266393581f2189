"""Kernels: the few places where an MoE trainer's time goes, each one file, usable on its own.

Every file opens with its maths and shape legend and holds a plain-torch reference.
"""

import pkgutil
from importlib import import_module

SPECS = tuple(
    spec
    for file in pkgutil.walk_packages(__path__, f"{__name__}.")
    for spec in getattr(import_module(file.name), "SPECS", ())
)
"""What every kernel promises; tests/test_kernels.py and scripts/bench_kernels.py walk it."""
