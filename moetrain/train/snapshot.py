"""Checkpoints of a run: weights, optimizer, random numbers and progress, saved and restored.

Ranks hold parts of tensors, and files hold pieces, each of which says where in the whole it lies. A
checkpoint can thus be resumed on any mesh, where each rank reads only its own part.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moetrain.checkpoint.read import Checkpoint, DamagedCheckpoint, open_checkpoint
from moetrain.checkpoint.save import SavePlan, Saver, Staging
from moetrain.config import ConfigError
from moetrain.config.sources import leaves, shortened
from moetrain.models.architecture import Architecture
from moetrain.parallel.mesh import TensorSlice
from moetrain.parallel.world import World
from moetrain.train.engine import Engine
from moetrain.train.run_folder import RunFolder

_logger = logging.getLogger("moetrain")


class Snapshots(Saver):
    """Saves an engine, at once or in the background (``checkpoint.asynchronous``). Collective."""

    def __init__(self, engine: Engine) -> None:
        """Reserve host memory for copies; raises RunFailed if there is too little."""
        super().__init__(engine.world.own_rendezvous())
        self.engine, self.settings = engine, engine.config.checkpoint
        self.staging: Staging | None = None
        if self.settings.asynchronous:
            self.staging = Staging(engine.world.device)
            engine.before_change = self.staging.hold_changes
            # Reserving takes time, which nothing waits for yet.
            if self.settings.interval or self.settings.minutes:
                self.staging.reserve(engine.state_bytes())

    def save(
        self,
        root: Path,
        progress: Mapping[str, Any],
        tensors: Mapping[str, Mapping[str, TensorSlice]],
        *,
        failed: bool,
        keeps: int | None = None,
    ) -> Path:
        """Begin to write a checkpoint under ``root``, once the previous one is written.

        It is complete when :meth:`wait` returns. Unless it is written from copies
        (``checkpoint.asynchronous``), nothing may change before.

        Args:
            progress: what ``state.json`` holds.
            tensors: this rank's parts of groups besides the engine's.
            keeps: a step whose checkpoint is kept besides the newest.

        Raises:
            RunFailed: this checkpoint or the previous one cannot be written.
        """
        self.wait()
        engine, keep = self.engine, self.settings.keep
        groups = {**engine.state(), "rng": _random_numbers(engine.world), **tensors}
        state = {
            **progress,
            "architecture": engine.arch.model_dump(mode="json"),
            "config": engine.config.to_dict(),
            "frozen": engine.fingerprint,
        }
        plan = SavePlan(root, progress["step"], keep, self.settings.keep_every, failed, keeps)
        if self.staging is None:
            self.start(plan, groups, state)
        else:
            copies, ready = self.staging.copy(groups)
            self.start(plan, copies, state, ready)
        return plan.path


def _random_numbers(world: World) -> dict[str, TensorSlice]:
    """Return the main rank's random state, which all ranks have after a resumption."""
    if not world.is_main:
        return {}
    rng = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(world.device)
    return {name: TensorSlice.all_of(state) for name, state in rng.items()}


def find_snapshot(
    resume: str, folder: RunFolder, arch: Architecture, world: World, before: int | None = None
) -> Checkpoint | None:
    """Open the checkpoint that ``resume`` asks for, chosen by the main rank. Collective.

    Args:
        before: with ``auto``, take only a checkpoint of an earlier step than this.

    Returns:
        None if the run starts anew.

    Raises:
        ConfigError: as :meth:`RunFolder.find`, or the checkpoint is of another model.
    """
    path = folder.find(resume, before) if world.is_main else None
    shared = world.broadcast("" if path is None else str(path))
    if not shared:
        return None
    found = open_checkpoint(Path(shared))
    _check_continues(found, arch)
    return found


def _check_continues(found: Checkpoint, arch: Architecture) -> None:
    """Raise ConfigError if ``found`` is not a checkpoint of ``arch``."""
    mine, theirs = arch.model_dump(mode="json"), found.state["architecture"]
    if mine != theirs:
        key = next(k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k))
        raise ConfigError(
            "checkpoint.resume",
            f"{str(found.folder)!r} is of another model ({key} {theirs.get(key)!r}, this run's "
            f"{mine.get(key)!r}); choose another output_dir, or checkpoint.resume never",
        )


def restore_snapshot(found: Checkpoint, engine: Engine, data: str, total_steps: int) -> str:
    """Load ``found`` into ``engine``; every byte is read by some rank, and checked. Collective.

    Returns:
        What is damaged, the same on every rank, or an empty text. The engine's state is undefined
        if anything is.

    Raises:
        ConfigError: tensors have other names, shapes or dtypes; or as :func:`check_same_run`.
    """
    check_same_run(found, engine, data, total_steps)
    _check_same_frozen(found, engine)
    world = engine.world
    try:
        for group in engine.GROUPS:  # one after the other: each may be most of the memory
            engine.load_state({group: found.group(group)})
        _set_random_numbers(found, world.device)
        for name in set(found.groups) - {*engine.GROUPS, "rng"}:
            for stored in found.group(name).values():
                stored.check(world.rank, world.size)
        damaged = ""
    except DamagedCheckpoint as error:
        damaged = error.problem
    if damaged := world.any(damaged):
        return damaged
    _logger.info("resuming from %s", found.folder)
    before = dict(leaves(found.state["config"]))
    for name, value in leaves(engine.config.to_dict()):
        if before.get(name) != value:
            _logger.info("  changed since: %s %r -> %r", name, before.get(name), value)
    return ""


def _set_random_numbers(found: Checkpoint, device: torch.device) -> None:
    rng = found.tensors("rng")
    try:
        torch.set_rng_state(rng["cpu"])
        if device.type == "cuda" and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"], device)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(
            "checkpoint.resume", f"{str(found.folder)!r} has no state of random numbers: {error}"
        ) from None


def _check_same_frozen(found: Checkpoint, engine: Engine) -> None:
    """Raise ConfigError unless frozen weights, which are not in ``found``, are as they were.

    Collective.
    """
    if found.state.get("frozen", "") == engine.fingerprint:
        return
    model, seed = engine.config.model, engine.config.train.seed
    raise ConfigError(
        "checkpoint.resume",
        f"{str(found.folder)!r} was trained beside other frozen weights than this run has, of "
        + (f"train.seed {seed}" if model.path is None else f"model.path {shortened(model.path)}")
        + "; set that, lora.rank, lora.base_dtype and train.freeze as they were, or "
        "checkpoint.resume never",
    )


def check_same_run(found: Checkpoint, engine: Engine, data: str, total_steps: int) -> None:
    """Refuse to resume a finished run with other data, or from another ``model.path``.

    A run that is not over may go on with other rows, and the checkpoint it began from may have
    moved: the main rank warns of either. A run that is over would do nothing with them.

    Raises:
        ConfigError: the run is over, and data or ``model.path`` changed.
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
        _logger.warning("%s %s; the run goes on from it", found.folder, " and ".join(changed))


def _real(path: object) -> str | None:
    return os.path.realpath(os.path.expanduser(path)) if isinstance(path, str) else None
