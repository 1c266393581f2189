"""Checkpoints in the memory of machines, from which a run that starts again goes on.

Each machine of a run has a folder of its own under ``checkpoint.memory``, which holds what its own
ranks have written, and with ``checkpoint.replicas`` what those of other machines have, so that a
machine that is lost takes nothing with it::

    /dev/shm/moetrain-<hash of output_dir>/<id of the run>/step-00000007/
        manifest.json  state.json     on every machine, of the whole checkpoint
        model-00000-00.safetensors    of a rank of this machine, or of one that it keeps a copy for

A run that starts again looks at all machines' folders. A step of which some machine has each file
is complete, and each machine fetches the files that it lacks: what then lies in its folder is a
checkpoint like any other. Files travel between host memories, over gloo.

Left out on purpose: fetching only what a machine's ranks will read, which would matter where a
whole checkpoint does not fit in a machine's memory.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moetrain.checkpoint.read import (
    MANIFEST,
    Contents,
    DamagedCheckpoint,
    checkpoint_name,
    crc_of,
    list_checkpoints,
    open_checkpoint,
    step_of,
)
from moetrain.config import CheckpointSection, logger
from moetrain.config.sources import RunFailed
from moetrain.parallel.processes import TIMEOUT, machine

_RANK = re.compile(r"-(\d{5,})-\d+\.safetensors$")


class _Move(NamedTuple):
    """A file that one rank sends, and another writes to its own machine's folder."""

    name: str
    size: int
    source: int
    target: int


class _Held(NamedTuple):
    """What a machine has of a checkpoint."""

    seal: str
    """Checksum of the manifest; empty: the machine has none."""
    sizes: dict[str, int]
    """Of all files of the checkpoint, on whichever machine."""
    here: set[str]
    """Names of the files that are on this one."""


class Memory:
    """A run's folder in this machine's memory, and how files come from other machines'.

    All ranks make it, and call :meth:`newest` and :meth:`fetch` together.
    """

    def __init__(
        self,
        settings: CheckpointSection,
        output_dir: Path,
        rank: int,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        """``gather`` gives every rank the objects of all."""
        name = hashlib.sha256(os.path.realpath(output_dir).encode()).hexdigest()[:16]
        self.root = self._base = Path(settings.memory) / f"moetrain-{name}"
        """Where this run's checkpoints lie on this machine, once it is open."""
        self._rank, self._gather, self._copies = rank, gather, settings.replicas
        places = gather(f"{machine()} {os.path.realpath(self._base)}")
        self._keepers = [places.index(place) for place in places]  # by rank, its machine's first
        self._machines = sorted(set(self._keepers))
        self.keeps = rank in self._machines
        """Whether this rank makes, completes and removes its machine's checkpoints."""
        self._group: Any = None
        if len(self._machines) > 1:
            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def open(self, run: str, since: int | None = None) -> None:
        """Use the checkpoints of ``run``, none later than step ``since``; remove all others."""
        self.root = self._base / run
        if not self.keeps:
            return
        for other in self._base.iterdir() if self._base.is_dir() else ():
            if other.name != run:
                logger.warning("memory of another run is passed over: %s", other)
                shutil.rmtree(other)
        for path in self.root.iterdir() if self.root.is_dir() else ():
            is_later = since is not None and (step_of(path) or 0) > since
            if is_later or path.name.startswith("."):  # a killed process left it
                shutil.rmtree(path)

    def remove(self, step: int | None = None) -> None:
        """Remove what this machine has of the run, or of one step."""
        if self.keeps:
            gone = self._base if step is None else self.root / checkpoint_name(step)
            shutil.rmtree(gone, ignore_errors=True)

    # ---- what the machines have together -------------------------------------------------------

    def newest(self) -> int:
        """Return the newest step that the machines have together; -1: there is none. Collective.

        Rank 0 says why newer ones are passed over.
        """
        found = self._gather(self._parts() if self.keeps else {})
        for step in sorted({step for parts in found for step in parts}, reverse=True):
            problem = self._find([parts.get(step, _Held("", {}, set())) for parts in found])
            if not problem:
                return step
            if self._rank == 0:
                logger.warning("step %d in memory is passed over: %s", step, problem)
        return -1

    def _parts(self) -> dict[int, _Held]:
        """Return what is here, by step; what is damaged is removed."""
        found = {}
        for path in list_checkpoints(self.root):
            try:
                files = open_checkpoint(path, is_whole=False).contents.files
            except DamagedCheckpoint as error:
                logger.warning("a checkpoint in memory is passed over: %s", error.problem)
                shutil.rmtree(path)
                continue
            data = (path / MANIFEST).read_bytes()
            sizes = {MANIFEST: len(data), **{name: known.size for name, known in files.items()}}
            here = {name for name in sizes if (path / name).exists()}
            found[step_of(path) or 0] = _Held(crc_of(data), sizes, here)
        return found

    def _find(self, parts: Sequence[_Held]) -> str:
        """Note which files machines lack; return why they do not have all of them together."""
        if len({part.seal for part in parts if part.seal}) > 1:
            return "machines have different ones"
        sizes = next(part.sizes for part in parts if part.seal)
        self._lacking = []
        for name, size in sizes.items():
            have = [keeper for keeper in self._machines if name in parts[keeper].here]
            if not have:
                return f"no machine has {name}"
            for target in {*self._machines} - {*have}:
                self._lacking.append(_Move(name, size, have[0], target))
        return ""

    def fetch(self, step: int) -> Path:
        """Complete ``step``, which :meth:`newest` returned, on every machine; return its folder.

        Collective. Raises RunFailed on every rank: a machine has no room for it.
        """
        path = self.root / checkpoint_name(step)
        problem = ""
        try:
            self.carry(path, self._lacking)
        except OSError as error:
            problem = f"cannot fetch {path}: {error} (checkpoint.memory)"
        if problem := next(filter(None, self._gather(problem)), ""):
            raise RunFailed(problem)
        return path

    # ---- files between machines ----------------------------------------------------------------

    def copies(self, contents: Contents) -> list[_Move]:
        """List the moves after which ``checkpoint.replicas`` machines have each file of ranks."""
        moves, count = [], len(self._machines)
        for name, known in contents.files.items():
            source = int(_RANK.search(name)[1])  # pyright: ignore
            at = self._machines.index(self._keepers[source])
            for step in range(1, min(self._copies, count)):
                target = self._machines[(at + step) % count]
                moves.append(_Move(name, known.size, source, target))
        return moves

    def carry(self, folder: Path, moves: Sequence[_Move]) -> None:
        """Send and write files; OSError, once all have come: one could not be written."""
        works, problem = [], None
        for name, size, source, target in moves:
            if source == self._rank:
                data = torch.from_file(str(folder / name), size=size, dtype=torch.uint8)
                works.append((data, dist.isend(data, target, group=self._group)))
        for name, size, source, target in moves:
            if target == self._rank:
                data = torch.empty(size, dtype=torch.uint8)
                dist.recv(data, source, group=self._group)
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(data.numpy().data)
                except OSError as error:
                    problem = error
        for _, work in works:
            work.wait()
        if problem is not None:
            raise problem
