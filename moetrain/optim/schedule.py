"""Learning-rate schedules."""

from __future__ import annotations

import math

from moetrain.config import OptimSection


def learning_rate(step: int, total_steps: int, config: OptimSection) -> float:
    """Return the learning rate of optimizer step ``step`` (from 0) out of ``total_steps``.

    Linear warmup, then ``cosine`` (arXiv 1608.03983), ``wsd`` (warmup-stable-decay, arXiv
    2404.06395, with a linear decay over the last ``decay_fraction``) or ``constant``.
    """
    warmup = config.warmup(total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    floor = config.lr * config.min_lr_ratio
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        decay_steps = max(1, round(config.decay_fraction * total_steps))
        left = min(1.0, (total_steps - step) / decay_steps)
        return floor + (config.lr - floor) * left
    progress = (step - warmup) / max(1, total_steps - warmup)
    return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
