"""Training: the engine, its objectives, and the loop of pretraining and fine-tuning.

:class:`Trainer` is imported when it is first used, so that ``--help`` does not wait for torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moetrain.train.loop import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from moetrain.train.loop import Trainer

        return Trainer
    raise AttributeError(f"module 'moetrain.train' has no attribute {name!r}")
