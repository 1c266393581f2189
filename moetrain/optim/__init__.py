"""The optimizer: AdamW, its learning-rate schedules, its state, and where its moments lie."""

from moetrain.optim.adamw import MOMENTS, AdamW, build_optimizer, guarded_step
from moetrain.optim.schedule import learning_rate
from moetrain.optim.state import load_optimizer_state, optimizer_parts

__all__ = [
    "MOMENTS",
    "AdamW",
    "build_optimizer",
    "guarded_step",
    "learning_rate",
    "load_optimizer_state",
    "optimizer_parts",
]
