"""AdamW on fp32 master weights, its learning-rate schedules, and one guarded update.

Clipping and the decision to skip a non-finite step both ride inside the fused update: the norm
never comes back to the host, so the next step's kernels are queued while this one still runs. The
optimizer sees plain tensors, a rank's shards where the model is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from moetrain.config import ConfigError, OptimSection
from moetrain.parallel.apply import check_like
from moetrain.parallel.bucket import Member
from moetrain.parallel.layout import Part, Region
from moetrain.parallel.pipeline.stages import Stages

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


class HostMoments:
    """Moments in host memory for a while, so that their device memory serves something else.

    A moment stays the tensor that the optimizer knows, and its storage the same object: what comes
    and goes is the storage's memory, which may lie elsewhere afterwards. Host buffers (pinned for a
    GPU) are kept, for pinning takes longer than a copy.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.away: list[torch.Tensor] = []
        """Moments whose values are in host memory alone."""
        self._hosts: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def leave(self) -> None:
        """Copy every moment to host memory and free its own."""
        known = {state[key] for state in self.optimizer.state.values() for key in MOMENTS}
        self._hosts = {moment: host for moment, host in self._hosts.items() if moment in known}
        for moment in known:
            if moment not in self._hosts:
                self._hosts[moment] = torch.empty_like(
                    moment, device="cpu", pin_memory=moment.is_cuda
                )
            self._hosts[moment].copy_(moment, non_blocking=True)
        self.away = list(known)
        _wait(self.away)
        for moment in self.away:
            moment.untyped_storage().resize_(0)

    @torch.no_grad()
    def come_back(self) -> None:
        """Inverse of :meth:`leave`."""
        for moment in self.away:
            moment.untyped_storage().resize_(moment.nbytes)
            moment.copy_(self._hosts[moment], non_blocking=True)
        _wait(self.away)  # before anybody changes the host's copies
        self.away = []


def _wait(tensors: Sequence[torch.Tensor]) -> None:
    """For copies to and from them."""
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)


def learning_rate(step: int, total_steps: int, config: OptimSection) -> float:
    """Learning rate of optimizer step ``step`` (0-based) out of ``total_steps``.

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


def optimizer_parts(
    optimizer: torch.optim.Optimizer, members: Mapping[str, Member], stages: Stages
) -> dict[str, Part]:
    """What this rank holds of each ``"<parameter>.<moment>"``; nothing before the first step."""
    return {
        # The step is a scalar, the same on every rank.
        f"{name}.{key}": stages.among(
            name, member.layout.part(value) if key in MOMENTS else member.layout.common(value)
        )
        for name, member in members.items()
        for key, value in optimizer.state.get(member.local, {}).items()
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    members: Mapping[str, Member],
    stages: Stages,
    state: Mapping[str, Region],
) -> None:
    """Take what :func:`optimizer_parts` gave on any layout: every rank its part of the whole.

    Moments get the very layout of their parameters: fused updates walk the two side by side. An
    empty ``state`` is that of before the first step.

    Raises:
        ConfigError: state of other parameters or another optimizer; another shape or dtype.
    """
    trained = {name: member for name, member in members.items() if member.rule.trainable}
    wanted = {f"{name}.{key}" for name in stages.trained for key in ("step", *MOMENTS)}
    if state and (odd := set(state) ^ wanted):
        raise ConfigError(
            "checkpoint.resume", f"its optimizer state is of another model: {sorted(odd)[:3]}"
        )
    if not state:
        optimizer.state.clear()
    for name, member in trained.items() if state else ():
        local = member.local
        loaded = {"step": torch.empty((), device=local.device)}
        loaded |= {key: torch.empty_like(local, requires_grad=False) for key in MOMENTS}
        for key, value in loaded.items():
            whole = state[f"{name}.{key}"]
            check_like(f"{name}.{key}", whole, member.layout.shape if key in MOMENTS else ())
            value.copy_(whole[member.layout.box if key in MOMENTS else ()])
        optimizer.state[local] = loaded
