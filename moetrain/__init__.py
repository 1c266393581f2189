"""moetrain: a trainer for Mixture-of-Experts language models in plain PyTorch.

The library in four names: ``load_hf``, ``save_hf``, ``Config`` and ``Trainer``. They are imported
when first used, so that ``--help`` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moetrain.config import Config, ConfigError
    from moetrain.models.hf import load_hf, save_hf
    from moetrain.sample import Trainer

_HOMES = {
    "Config": "moetrain.config",
    "ConfigError": "moetrain.config",
    "Trainer": "moetrain.sample",
    "load_hf": "moetrain.models.hf",
    "save_hf": "moetrain.models.hf",
}

__all__ = ["Config", "ConfigError", "Trainer", "load_hf", "save_hf"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'moetrain' has no attribute {name!r}")
