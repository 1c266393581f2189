"""What of a run's state goes into a checkpoint, and back: weights, optimizer, random numbers.

Everything is whole in the file and in parts on the ranks, so a checkpoint goes on on any mesh.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moetrain.checkpoint import Checkpoint, open_checkpoint, save_checkpoint
from moetrain.config import Config, ConfigError
from moetrain.config_sources import changed_settings, leaves, shortened
from moetrain.engine import Engine
from moetrain.models import Architecture
from moetrain.parallel.world import World
from moetrain.run_folder import find_checkpoint

logger = logging.getLogger("moetrain")


def save_snapshot(
    engine: Engine,
    root: Path,
    progress: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    *,
    failed: bool,
) -> None:
    """Write a checkpoint of ``engine`` and of the run's progress under ``root``. Collective.

    Args:
        progress: as JSON.
        tensors: groups besides the engine's.

    Raises:
        RunFailed: it cannot be written.
    """
    device, writes = engine.world.device, engine.world.is_main
    rng = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(device)
    groups = {**engine.state(keep=writes), "rng": rng, **tensors}
    state = {
        **progress,
        "architecture": engine.arch.model_dump(mode="json"),
        "config": engine.config.to_dict(),
        "frozen": engine.fingerprint,
    }
    if writes:
        keep = engine.config.checkpoint.keep
        save_checkpoint(root, progress["step"], groups, state, keep, failed=failed)
    engine.world.wait()


def find_snapshot(
    config: Config, folder: Path, arch: Architecture, world: World
) -> Checkpoint | None:
    """What ``checkpoint.resume`` asks for, chosen by the main rank; None: start afresh.

    Collective; raises :class:`ConfigError` as ``find_checkpoint`` and :func:`check_continues` do.
    """
    path = find_checkpoint(config.checkpoint.resume, folder) if world.is_main else None
    shared = world.share("" if path is None else str(path))
    if not shared:
        return None
    found = open_checkpoint(Path(shared))
    check_continues(found, arch)
    return found


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


def restore_snapshot(found: Checkpoint, engine: Engine, data: str, total_steps: int) -> None:
    """Inverse of :func:`save_snapshot`, each rank for itself.

    Raises:
        ConfigError: files missing or damaged; tensors of other names, shapes, dtypes; or as
            :func:`check_same_run`.
    """
    check_same_run(found, engine, data, total_steps)
    check_same_frozen(found, engine)
    for group in ("model", "optim"):  # one after the other: each may be most of the memory
        engine.load_state({group: found.tensors(group)})
    device, rng = engine.world.device, found.tensors("rng")
    try:
        torch.set_rng_state(rng["cpu"])
        if device.type == "cuda" and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"], device)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(
            "checkpoint.resume", f"{str(found.folder)!r} has no state of random numbers: {error}"
        ) from None
    logger.info("resuming from %s", found.folder)
    for line in changed_settings(found.state["config"], engine.config.to_dict()):
        logger.info("  changed since: %s", line)


def check_same_frozen(found: Checkpoint, engine: Engine) -> None:
    """Raise :class:`ConfigError` unless what is not trained, and so is not in the checkpoint, has
    the values that it had. Collective."""
    if found.state.get("frozen", "") == engine.fingerprint:
        return
    model, seed = engine.config.model, engine.config.train.seed
    raise ConfigError(
        "checkpoint.resume",
        f"{str(found.folder)!r} was trained beside other frozen weights than this run has, of "
        + (f"train.seed {seed}" if model.path is None else f"model.path {shortened(model.path)}")
        + "; set that, lora.rank and train.freeze as they were, or checkpoint.resume never",
    )


def check_same_run(found: Checkpoint, engine: Engine, data: str, total_steps: int) -> None:
    """Reject the end of a run on other rows than those of ``data``, or from other weights.

    Other rows may follow those that a checkpoint was trained on, and the checkpoint it began from
    may have moved, which the main rank says; but a run that is over would do nothing with either.

    Raises:
        ConfigError: so it is.
    """
    changed = []
    if found.state.get("data", data) != data:  # earlier versions did not note it
        changed.append("was trained on other data")
    began = dict(leaves(found.state["config"])).get("model.path")
    if _real(began) != _real(engine.config.model.path):
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
    if engine.world.is_main:
        logger.warning("%s %s; the run goes on from it", found.folder, " and ".join(changed))


def _real(path: object) -> str | None:
    return os.path.realpath(os.path.expanduser(path)) if isinstance(path, str) else None
