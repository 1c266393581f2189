"""moetrain: a trainer for Mixture-of-Experts language models in plain PyTorch.

The library in seven names: ``load_hf`` and ``save_hf`` for Hugging Face checkpoints, ``Config`` and
``Trainer`` for runs, ``Engine`` for training loops of your own, ``Generator`` for generation,
``RewardModel`` for scores. They are imported when first used, so that ``--help`` does not wait for
torch.
"""

from functools import cache
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
    "load_hf": "moetrain.models.hf.load",
    "save_hf": "moetrain.models.hf.save",
}

__all__ = ["Config", "ConfigError", "Engine", "Generator", "RewardModel", "Trainer", "load_hf"]
__all__ += ["save_hf"]


@cache
def _trainer() -> Any:
    """Return the trainer with the callbacks that generate, which are of a layer above training."""
    from moetrain.train.loop import Trainer

    class ComposedTrainer(Trainer):
        __doc__ = Trainer.__doc__

        def __init__(self, config: Any, *, callbacks: Any = (), **given: Any) -> None:
            callbacks = [*callbacks]
            if config.train.sample_tokens and config.train.objective != "reward":
                from moetrain.generate.weights import Sampled

                callbacks.append(Sampled())
            super().__init__(config, callbacks=callbacks, **given)

    return ComposedTrainer


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        return _trainer()
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'moetrain' has no attribute {name!r}")
