"""moetrain: a trainer for Mixture-of-Experts language models in plain PyTorch.

The library in seven names: ``load_hf`` and ``save_hf`` for Hugging Face checkpoints, ``Config`` and
``Trainer`` for runs, ``Engine`` for training loops of your own, ``Generator`` for generation,
``RewardModel`` for scores. They are imported when first used, so that ``--help`` does not wait for
torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moetrain.config import Config, ConfigError
    from moetrain.generate.engine import Generator
    from moetrain.generate.scoring import RewardModel
    from moetrain.models.hf.load import load_hf
    from moetrain.models.hf.save import save_hf
    from moetrain.train.engine import Engine
    from moetrain.train.loop import Trainer

_HOMES = {
    "Config": "moetrain.config",
    "ConfigError": "moetrain.config",
    "Engine": "moetrain.train.engine",
    "Generator": "moetrain.generate.engine",
    "RewardModel": "moetrain.generate.scoring",
    "Trainer": "moetrain.train.loop",
    "load_hf": "moetrain.models.hf.load",
    "save_hf": "moetrain.models.hf.save",
}

__all__ = ["Config", "ConfigError", "Engine", "Generator", "RewardModel", "Trainer", "load_hf"]
__all__ += ["save_hf"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        if "torch" not in sys.modules:  # as the commands do; torch reads it when it is imported
            import_module("moetrain.config.environment").let_idle_threads_sleep()
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'moetrain' has no attribute {name!r}")
