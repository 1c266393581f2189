"""Learning-rate schedules (``optim.schedule``)."""

import math

from moetrain.config import OptimSection


def learning_rate(step: int, total_steps: int, config: OptimSection) -> float:
    """Return the learning rate of optimizer step ``step`` (from 0) out of ``total_steps``.

    Linear warmup to ``lr``, then one of these, down to ``lr * min_lr_ratio`` at the end:

    - ``cosine``: half a cosine (arXiv 1608.03983);
    - ``wsd``: warmup-stable-decay (arXiv 2404.06395): constant, then linear over the last
      ``decay_fraction`` of the steps;
    - ``constant``: no decay.
    """
    peak, floor = config.lr, config.lr * config.min_lr_ratio
    warmup = config.warmup(total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    match config.schedule:
        case "constant":
            return peak
        case "wsd":
            decay_steps = max(1, round(config.decay_fraction * total_steps))
            left = min(1.0, (total_steps - step) / decay_steps)
            return floor + (peak - floor) * left
        case "cosine":
            progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
            return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
