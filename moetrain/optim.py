"""AdamW on fp32 master weights, its learning-rate schedules, and one guarded update.

Clipping and the decision to skip a non-finite step both ride inside the fused update: the norm
never comes back to the host, so the next step's kernels are queued while this one still runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from moetrain.config import ConfigError, OptimSection


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: matrices only, and neither embeddings nor routers."""
    return parameter.ndim >= 2 and not any(part in name for part in ("embed.", "router."))


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimSection
) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101), always torch's fused one, which CPU and CUDA both have."""
    groups = {True: [], False: []}
    for name, parameter in named_parameters:
        groups[decays(name, parameter)].append((name, parameter))
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": config.weight_decay if decayed else 0.0}
            for decayed, members in groups.items()
            if members
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def guarded_step(
    optimizer: torch.optim.Optimizer, loss: torch.Tensor, max_grad_norm: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip to ``max_grad_norm`` and update, unless the loss or the gradient norm is not finite.

    Returns:
        The global gradient 2-norm before clipping (fp32 scalar) and whether the step was skipped
        (bool scalar), both on the device. A skipped step leaves weights and moments untouched.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    skipped = ~(torch.isfinite(norm) & torch.isfinite(loss))
    # torch.amp.GradScaler's own hand-over to fused optimizers: gradients are divided by
    # grad_scale, and nothing is written where found_inf is 1.
    optimizer.grad_scale = (norm / max_grad_norm).clamp(min=1.0)  # pyright: ignore
    optimizer.found_inf = skipped.float()  # pyright: ignore
    optimizer.step()
    return norm, skipped


def learning_rate(step: int, total_steps: int, config: OptimSection) -> float:
    """Learning rate of optimizer step ``step`` (0-based) out of ``total_steps``.

    Linear warmup, then ``cosine`` (arXiv 1608.03983), ``wsd`` (warmup-stable-decay, arXiv
    2404.06395, with a linear decay over the last ``decay_fraction``) or ``constant``.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    floor = config.lr * config.min_lr_ratio
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        decay_steps = max(1, round(config.decay_fraction * total_steps))
        left = min(1.0, (total_steps - step) / decay_steps)
        return floor + (config.lr - floor) * left
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the rate ``lr``."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def named_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> dict[str, torch.Tensor]:
    """Flat ``{"<parameter>.<moment>": tensor}`` view of the optimizer's state."""
    return {
        f"{name}.{key}": value
        for parameter, name in names.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_named_optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Inverse of :func:`named_optimizer_state`; no tensors at all: nothing was stepped yet.

    Raises:
        ConfigError: tensors for other parameters than ``names``.
    """
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, _, key = name.rpartition(".")
        by_parameter.setdefault(parameter, {})[key] = tensor
    if by_parameter and (odd := set(by_parameter) ^ set(names.values())):
        raise ConfigError(
            "checkpoint.resume", f"its optimizer state is of another model: {sorted(odd)[:3]}"
        )
    for parameter, name in names.items():
        if by_parameter:
            optimizer.state[parameter] = {
                key: tensor.to(parameter.device) for key, tensor in by_parameter[name].items()
            }
