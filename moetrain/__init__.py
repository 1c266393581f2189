"""moetrain: a trainer for Mixture-of-Experts language models in plain PyTorch.

The library in six names: ``load_hf`` and ``save_hf`` for Hugging Face checkpoints, ``Config`` and
``Trainer`` for runs, ``Engine`` for training loops of your own, ``Generator`` for generation. They
are imported when first used, so that ``--help`` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moetrain.config import Config, ConfigError
    from moetrain.models.hf.load import load_hf
    from moetrain.models.hf.save import save_hf
    from moetrain.rollout.engine import Generator
    from moetrain.train.engine import Engine
    from moetrain.train.trainer import Trainer

# ``python -m moetrain.generate`` and ``python -m moetrain.serve`` find their modules in ``cli``.
__path__ += [f"{folder}/cli" for folder in __path__]

_HOMES = {
    "Config": "moetrain.config",
    "ConfigError": "moetrain.config",
    "Engine": "moetrain.train.engine",
    "Generator": "moetrain.rollout.engine",
    "Trainer": "moetrain.train.trainer",
    "load_hf": "moetrain.models.hf.load",
    "save_hf": "moetrain.models.hf.save",
}

__all__ = ["Config", "ConfigError", "Engine", "Generator", "Trainer", "load_hf", "save_hf"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'moetrain' has no attribute {name!r}")
