"""What of a run's state goes into a checkpoint, and back: weights, optimizer, random numbers.

Everything is whole in the file and in parts on the ranks, so a checkpoint goes on on any mesh.
"""

from __future__ import annotations

import logging
import os

import torch
from torch import nn

from moetrain.checkpoint import Checkpoint
from moetrain.config import Config, ConfigError
from moetrain.config_sources import leaves, shortened
from moetrain.models import Architecture
from moetrain.optim import load_whole_optimizer_state, whole_optimizer_state
from moetrain.parallel.apply import load_whole_state, whole_state
from moetrain.parallel.fsdp import FSDP

logger = logging.getLogger("moetrain")


def take_snapshot(
    model: nn.Module,
    fsdp: FSDP,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    keep: bool,
) -> dict[str, dict[str, torch.Tensor]]:
    """The groups of a checkpoint, in host memory where ``keep`` is set. Collective."""
    rng = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(device)
    return {
        "model": whole_state(model, fsdp, keep=keep),
        "optim": whole_optimizer_state(optimizer, fsdp.members, keep=keep),
        "rng": rng,
    }


def check_continues(found: Checkpoint, arch: Architecture) -> None:
    """Raise :class:`ConfigError` if a run of ``arch`` is no continuation of ``found``."""
    mine, theirs = arch.model_dump(mode="json"), found.state["architecture"]
    if mine != theirs:
        key = next(k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k))
        raise ConfigError(
            "checkpoint.resume",
            f"{str(found.folder)!r} is of another model ({key} {theirs.get(key)!r}, this run's "
            f"{mine.get(key)!r}); choose another output_dir, or checkpoint.resume never",
        )


def restore_snapshot(
    found: Checkpoint,
    model: nn.Module,
    fsdp: FSDP,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    """Inverse of :func:`take_snapshot`, each rank for itself.

    Raises:
        ConfigError: files missing or damaged; tensors of other names, shapes, dtypes.
    """
    load_whole_state(model, fsdp, found.tensors("model"))
    load_whole_optimizer_state(optimizer, fsdp.members, found.tensors("optim"))
    rng = found.tensors("rng")
    try:
        torch.set_rng_state(rng["cpu"])
        if device.type == "cuda" and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"], device)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(
            "checkpoint.resume", f"{str(found.folder)!r} has no state of random numbers: {error}"
        ) from None


def check_same_run(found: Checkpoint, config: Config, data: str, total_steps: int) -> None:
    """Reject the end of a run on other rows than those of ``data``, or from other weights.

    Other rows may follow those that a checkpoint was trained on, and the checkpoint it began from
    may have moved; but a run that is over would do nothing with either.

    Raises:
        ConfigError: so it is.
    """
    changed = []
    if found.state.get("data", data) != data:  # earlier versions did not note it
        changed.append("was trained on other data")
    began = dict(leaves(found.state["config"])).get("model.path")
    if _real(began) != _real(config.model.path):
        changed.append(f"began from model.path {shortened(began)}")
    if not changed:
        return
    if found.state["step"] >= total_steps:
        raise ConfigError(
            "output_dir",
            f"the run in it is over (step {found.state['step']}, {str(found.folder)!r}) and "
            f"{' and '.join(changed)}; choose another output_dir, set checkpoint.resume never to "
            "start again, or make train.steps or train.epochs longer to go on with it",
        )
    logger.warning("%s %s; the run goes on from it", found.folder, " and ".join(changed))


def _real(path: object) -> str | None:
    return os.path.realpath(os.path.expanduser(path)) if isinstance(path, str) else None
