"""What of a run's state goes into a checkpoint, and back: weights, optimizer, random numbers.

Tensors are in parts on the ranks and in pieces in the files, each of which says where in the whole
it lies; so a checkpoint goes on on any mesh, where every rank reads its own part alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moetrain.checkpoint.format import DamagedCheckpoint
from moetrain.checkpoint.read import Checkpoint, open_checkpoint
from moetrain.checkpoint.save import Saved, SavePlan, Saver, Staging, written_here
from moetrain.config import ConfigError
from moetrain.config.sources import changed_settings, leaves, shortened
from moetrain.models.architecture import Architecture
from moetrain.optim.adamw import MOMENTS
from moetrain.parallel.fsdp.bucket import aligned
from moetrain.parallel.layout import TensorSlice
from moetrain.parallel.world import World
from moetrain.train.engine import Engine
from moetrain.train.run_folder import find_checkpoint

logger = logging.getLogger("moetrain")

ENGINE_GROUPS = ("model", "optim")


class Snapshots:
    """Saves what a run has come to: at once, or behind its back (``checkpoint.asynchronous``).

    Every rank makes the same calls.
    """

    def __init__(self, engine: Engine) -> None:
        """Raises RunFailed: there is no host memory for copies that are written later."""
        self.engine, self.settings = engine, engine.config.checkpoint
        self.saver = Saver(engine.world.own_rendezvous())
        self.staging: Staging | None = None
        if self.settings.asynchronous:
            self.staging = Staging(engine.world.device)
            engine.before_change = self.staging.hold_changes
            # Before there is anything to be kept waiting.
            if self.settings.interval or self.settings.minutes:
                self.staging.reserve(state_bytes(engine))

    def save(
        self,
        root: Path,
        progress: Mapping[str, Any],
        tensors: Mapping[str, Mapping[str, TensorSlice]],
        *,
        failed: bool,
    ) -> Path:
        """Begin to write a checkpoint under ``root``, once the one before is written.

        It is complete when :meth:`wait` returns; without copies nothing may change before.

        Args:
            progress: as JSON.
            tensors: this rank's parts of groups besides the engine's.

        Raises:
            RunFailed: it, or the one before, cannot be written.
        """
        self.wait()
        engine, keep = self.engine, self.settings.keep
        groups = {**engine.state(), "rng": _random_numbers(engine.world), **tensors}
        groups = {group: written_here(parts) for group, parts in groups.items()}
        state = {
            **progress,
            "architecture": engine.arch.model_dump(mode="json"),
            "config": engine.config.to_dict(),
            "frozen": engine.fingerprint,
        }
        plan = SavePlan(root, progress["step"], keep, self.settings.keep_every, failed)
        if self.staging is None:
            self.saver.start(plan, groups, state)
        else:
            copies, ready = self.staging.copy(groups)
            self.saver.start(plan, copies, state, ready)
        return plan.path

    def finished(self) -> Saved | None:
        """What was written since the last call, if it is complete; RunFailed: it failed."""
        return self.saver.finished()

    def wait(self) -> Saved | None:
        """:meth:`finished`, when it is."""
        return self.saver.wait()


def _random_numbers(world: World) -> dict[str, TensorSlice]:
    """The main rank's state of random numbers, which is every rank's after a resumption."""
    if not world.is_main:
        return {}
    rng = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(world.device)
    return {name: TensorSlice.all_of(state) for name, state in rng.items()}


def state_bytes(engine: Engine) -> int:
    """What copies of what this rank writes take, moments that are still to come included."""
    total = sum(aligned(buffer.nbytes) for buffer in engine.model.buffers()) + (1 << 20)
    for name, member in engine.fsdp.members.items():
        if not member.rule.trainable:
            continue
        part, dtype = member.layout.part(member.local), engine.optimizer.dtype
        sizes = {f"{name}.{key}": dtype.itemsize for key in MOMENTS}
        for key, itemsize in (sizes | {name: part.tensor.itemsize}).items():
            if part.is_written_here(key):
                total += aligned(itemsize * part.tensor.numel())
        total += aligned(1)
    return total


def find_snapshot(
    resume: str, folder: Path, arch: Architecture, world: World, before: int | None = None
) -> Checkpoint | None:
    """What ``resume`` asks for, chosen by the main rank; None: start afresh.

    ``before``: of what ``auto`` finds, only a checkpoint of an earlier step.

    Collective; raises :class:`ConfigError` as ``find_checkpoint`` and :func:`check_continues` do.
    """
    path = find_checkpoint(resume, folder, before) if world.is_main else None
    shared = world.broadcast("" if path is None else str(path))
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


def restore_snapshot(found: Checkpoint, engine: Engine, data: str, total_steps: int) -> str:
    """Inverse of :meth:`Snapshots.save`; every byte is read by a rank, and checked.

    Collective. Returns what is damaged, the same on every rank; the engine's state is then neither
    this nor that. Empty: all is well.

    Raises:
        ConfigError: tensors of other names, shapes, dtypes; or as :func:`check_same_run`.
    """
    check_same_run(found, engine, data, total_steps)
    check_same_frozen(found, engine)
    world = engine.world
    try:
        for group in ENGINE_GROUPS:  # one after the other: each may be most of the memory
            engine.load_state({group: found.group(group)})
        _set_random_numbers(found, world.device)
        for name in set(found.groups) - {*ENGINE_GROUPS, "rng"}:
            for stored in found.group(name).values():
                stored.check(world.rank, world.size)
        damaged = ""
    except DamagedCheckpoint as error:
        damaged = error.problem
    if damaged := world.any(damaged):
        return damaged
    logger.info("resuming from %s", found.folder)
    for line in changed_settings(found.state["config"], engine.config.to_dict()):
        logger.info("  changed since: %s", line)
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
        + "; set that, lora.rank, lora.base_dtype and train.freeze as they were, or "
        "checkpoint.resume never",
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
