"""AdamW on fp32 master weights, and one guarded update.

Clipping and the decision to skip a non-finite step both ride inside the fused update: the norm
never comes back to the host, so the next step's kernels are queued while this one still runs. The
optimizer sees plain tensors, a rank's shards where the model is sharded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moetrain.config import OptimSection
from moetrain.parallel.bucket import Member

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's tensors beside its step, each like its parameter."""


def build_optimizer(members: Mapping[str, Member], config: OptimSection) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) of what is trained, always torch's fused one, which CPU and CUDA
    both have. It updates this rank's pieces."""
    groups: dict[bool, list[tuple[str, torch.Tensor]]] = {True: [], False: []}
    for name, member in members.items():
        if member.rule.trainable:
            groups[member.rule.decay].append((name, member.local))
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
    optimizer: torch.optim.Optimizer, loss: torch.Tensor, norm: torch.Tensor, max_grad_norm: float
) -> torch.Tensor:
    """Clip to ``max_grad_norm`` and update, unless the loss or the gradient norm is not finite.

    Args:
        loss, norm: of the whole step (0-d, on the device), the same on every rank.

    Returns:
        Whether the step was skipped (0-d bool, on the device). A skipped step leaves weights and
        moments untouched.
    """
    skipped = ~(torch.isfinite(norm) & torch.isfinite(loss))
    # torch.amp.GradScaler's own hand-over to fused optimizers: gradients are divided by
    # grad_scale, and nothing is written where found_inf is 1.
    optimizer.grad_scale = (norm / max_grad_norm).clamp(min=1.0)  # pyright: ignore
    optimizer.found_inf = skipped.float()  # pyright: ignore
    optimizer.step()
    return skipped
