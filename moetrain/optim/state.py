"""What a rank holds of the optimizer's state, and the loading of it on any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import torch

from moetrain.config import ConfigError
from moetrain.config.sections import StateDtype
from moetrain.optim.adamw import MOMENTS, AdamW
from moetrain.parallel.apply import check_like
from moetrain.parallel.fsdp.bucket import Member
from moetrain.parallel.layout import Sliceable, TensorSlice
from moetrain.parallel.pipeline.stages import Stages


def optimizer_parts(
    optimizer: torch.optim.Optimizer, members: Mapping[str, Member], stages: Stages
) -> dict[str, TensorSlice]:
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
    optimizer: AdamW,
    members: Mapping[str, Member],
    stages: Stages,
    state: Mapping[str, Sliceable],
) -> None:
    """Take what :func:`optimizer_parts` gave on any layout: every rank its part of the whole.

    An empty ``state`` is that of before the first step. All parameters have made as many steps.

    Raises:
        ConfigError: state of other parameters or another optimizer; another shape or dtype.
    """
    trained = {name: member for name, member in members.items() if member.rule.trainable}
    wanted = {f"{name}.{key}" for name in stages.trained for key in ("step", *MOMENTS)}
    if state and (odd := set(state) ^ wanted):
        raise ConfigError(
            "checkpoint.resume", f"its optimizer state is of another model: {sorted(odd)[:3]}"
        )
    for name, member in trained.items() if state else ():
        for key in MOMENTS:
            _check_moment(f"{name}.{key}", state[f"{name}.{key}"], member, optimizer.dtype)
        check_like(f"{name}.step", state[f"{name}.step"], ())
    optimizer.forget()
    if not state:
        return
    optimizer.begin()
    for name, member in trained.items():
        for key, value in optimizer.state[member.local].items():
            value.copy_(state[f"{name}.{key}"][member.layout.box if key in MOMENTS else ()])


def _check_moment(name: str, saved: Sliceable, member: Member, dtype: torch.dtype) -> None:
    theirs, ours = (str(d).removeprefix("torch.") for d in (saved.dtype, dtype))
    if theirs != ours and theirs in get_args(StateDtype):
        raise ConfigError(
            "optim.state_dtype",
            f"{ours!r} was asked for, and the checkpoint's {name!r} is {theirs}; set it to that, "
            "or start again with checkpoint.resume never",
        )
    check_like(name, saved, member.layout.shape, dtype)
