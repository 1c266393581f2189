"""Checkpoints in parts: each machine keeps one part, in its memory or in its own ``output_dir``.

A machine's folder holds the files of its own ranks and, with ``checkpoint.replicas``, copies of
other machines' files. The checkpoint then survives the loss of a machine::

    output_dir/checkpoints/step-00000007/                          with checkpoint.shared no
    /dev/shm/moetrain-<hash of output_dir>/<id of the run>/step-00000007/
        manifest.json  state.json     on every machine, of the whole checkpoint
        model-00000-00.safetensors    of this machine's ranks, or copied from another machine

A run that starts again looks at all machines' folders. The checkpoint of a step is complete if each
of its files is on some machine. Each machine then fetches the files that it lacks, so its folder
holds an ordinary checkpoint. Files are sent from host memory to host memory, over gloo. A folder
that all machines share is treated as the folder of a single machine that has all ranks.

Left out on purpose: fetching only the files that a machine's ranks will read. This would matter if
a whole checkpoint did not fit in a machine's memory.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from moetrain.checkpoint import read
from moetrain.config import CheckpointSection, logger
from moetrain.config.files import read_regular, write_durably
from moetrain.config.sources import RunFailed
from moetrain.parallel.processes import TIMEOUT, machine

_T = TypeVar("_T")

_RANK = re.compile(r"-(\d{5,})-\d+\.safetensors$")


class _Move(NamedTuple):
    """A file that one rank sends, and another writes to its own machine's folder."""

    name: str
    size: int
    source: int
    target: int


class _Held(NamedTuple):
    """The files of a checkpoint that one machine has."""

    seal: str = ""
    """Checksum of the manifest; empty: the machine has none, or a damaged one."""
    sizes: Mapping[str, int] = {}
    """Size in bytes of every file of the checkpoint, on any machine; the manifest is last."""
    here: Collection[str] = ()
    """Names of the files that are on this machine."""
    problem: str = ""
    """The damage found on this machine; empty: none."""


class Gather(Protocol):
    """Returns the objects of all ranks, by rank, on every rank."""

    def __call__(self, mine: _T, /) -> list[_T]: ...


def _alone(mine: _T) -> list[_T]:
    return [mine]


class Folders:
    """The machines' folders of checkpoints; copies files between them.

    Construction, :meth:`newest` and :meth:`fetch` are collective.
    """

    def __init__(
        self,
        root: Path,
        *,
        rank: int = 0,
        gather: Gather = _alone,
        copies: int = 0,
    ) -> None:
        """Find out which ranks share a folder. Collective.

        Args:
            root: where the checkpoints lie on this machine.
            rank: the rank of this process in the run.
            gather: returns the objects of all ranks, by rank, on every rank.
            copies: number of machines that hold each rank's files; 0: all share ``root``.
        """
        self.root = root
        """The folder of the checkpoints on this machine."""
        self.rank, self.gather, self.num_copies = rank, gather, copies
        places = gather(f"{machine()} {os.path.realpath(root)}" if copies else "")
        # The keeper of each rank: the first rank of its machine.
        self._keepers = [places.index(place) for place in places]
        self._machines = sorted(set(self._keepers))
        self.keeper = self._keepers[rank]
        self.keeps = rank == self.keeper
        """True: this rank makes, completes and removes its machine's checkpoints."""
        self._group: dist.ProcessGroup | None = None
        if len(self._machines) > 1:
            group = dist.new_group(backend="gloo", timeout=TIMEOUT)
            assert isinstance(group, dist.ProcessGroup)  # every rank is in it
            self._group = group

    @property
    def share(self) -> float:
        """The share of each checkpoint that lies on this machine, if all ranks write equally
        much."""
        return min(1.0, max(1, self.num_copies) / len(self._machines))

    # ---- checkpoints on all machines -----------------------------------------------------------

    def newest(self, before: int | None = None, only: str = "") -> tuple[Path | None, list[str]]:
        """Return the newest checkpoint that is complete over all machines, if there is one, and the
        reasons why newer ones are skipped. Collective.

        Args:
            before: checkpoints of this step and later ones are known to be damaged.
            only: consider only the checkpoint of this name; empty: all.
        """
        mine = self.root.glob(only) if only else read.list_checkpoints(self.root)
        found = self.gather([path.name for path in mine] if self.keeps else [])
        paths, problems = {self.root / name for names in found for name in names}, []
        for path in sorted(paths, key=lambda path: read.step_of(path) or 0, reverse=True):
            if before is not None and (read.step_of(path) or 0) >= before:
                problems.append(f"{path.name}, as said before")
                continue
            problem = self._find(self.gather(self._held(path)))
            if not problem:
                return path, problems
            problems.append(problem if path.name in problem else f"{path}: {problem}")
        return None, problems

    def _held(self, path: Path) -> _Held:
        """Return the files of a checkpoint that this machine has.

        Only one rank of each machine, its keeper, returns any.
        """
        if not (self.keeps and path.exists()):
            return _Held()
        try:
            is_whole = len(self._machines) == 1
            files = read.open_checkpoint(path, is_whole=is_whole).contents.files
        except read.DamagedCheckpoint as error:
            return _Held(problem=error.problem)
        data = read_regular(path / read.MANIFEST, read.MAX_BYTES)
        sizes = {name: known.size for name, known in files.items()} | {read.MANIFEST: len(data)}
        return _Held(read.crc_of(data), sizes, {name for name in sizes if (path / name).exists()})

    def _find(self, parts: Sequence[_Held]) -> str:
        """Record the files that each machine lacks. Return why the checkpoint cannot be used, or
        an empty text."""
        known = {part.seal: part.sizes for part in parts if part.seal}
        if len(known) > 1:
            return "its manifest differs between machines"
        damaged = next((part.problem for part in parts if part.problem), "")
        self._lacking = []
        for name, size in next(iter(known.values()), {}).items():
            have = [keeper for keeper in self._machines if name in parts[keeper].here]
            if not have:
                return damaged or f"no machine has {name}"
            for target in {*self._machines} - {*have}:
                self._lacking.append(_Move(name, size, have[0], target))
        return "" if known else damaged

    def fetch(self, path: Path) -> Path:
        """Complete the checkpoint that :meth:`newest` has just returned, on every machine.

        Return its path. Collective. Raises RunFailed on every rank: a machine cannot write a file.
        """
        problem = ""
        try:
            self.carry(path, self._lacking)
        except OSError as error:
            problem = f"cannot fetch {path}: {error} (output_dir or checkpoint.memory)"
        if problem := next(filter(None, self.gather(problem)), ""):
            raise RunFailed(problem)
        return path

    # ---- files between machines ----------------------------------------------------------------

    def copies(self, contents: read.Contents) -> list[_Move]:
        """List the moves after which ``checkpoint.replicas`` machines hold each rank's files."""
        moves, count = [], len(self._machines)
        for name, known in contents.files.items():
            source = int(_RANK.search(name)[1])  # pyright: ignore
            at = self._machines.index(self._keepers[source])
            for step in range(1, min(self.num_copies, count)):
                target = self._machines[(at + step) % count]
                moves.append(_Move(name, known.size, source, target))
        return moves

    def carry(self, folder: Path, moves: Sequence[_Move]) -> None:
        """Send and write the files of ``moves``.

        Raises OSError if a file could not be written. It is raised after all files were received,
        because their senders would wait otherwise.
        """
        works, problem = [], None
        for name, size, source, target in moves:
            if source == self.rank:
                data = torch.from_file(str(folder / name), size=size, dtype=torch.uint8)
                works.append((data, dist.isend(data, target, group=self._group)))
        for name, size, source, target in moves:
            if target == self.rank:
                data = torch.empty(size, dtype=torch.uint8)
                dist.recv(data, source, group=self._group)
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    write_durably(folder / name, data.numpy().data)
                except OSError as error:
                    problem = error
        for _, work in works:
            work.wait()
        if problem is not None:
            raise problem


class Memory(Folders):
    """A run's folders in the machines' memory."""

    def __init__(
        self,
        settings: CheckpointSection,
        output_dir: Path,
        *,
        rank: int = 0,
        gather: Gather = _alone,
    ) -> None:
        """Choose the folder of the run that writes to ``output_dir``.

        ``rank`` and ``gather`` are as in :class:`Folders`.
        """
        name = hashlib.sha256(os.path.realpath(output_dir).encode()).hexdigest()[:16]
        self._base = Path(settings.memory) / f"moetrain-{name}"
        super().__init__(self._base, rank=rank, gather=gather, copies=settings.replicas)

    def open(self, run: str, since: int | None = None) -> None:
        """Use the checkpoints of ``run`` up to step ``since``; remove all others."""
        self.root = self._base / run
        if not self.keeps:
            return
        for other in self._base.iterdir() if self._base.is_dir() else ():
            if other.name != run:
                logger.warning("removing checkpoints that another run left in memory: %s", other)
                shutil.rmtree(other)
        for path in self.root.iterdir() if self.root.is_dir() else ():
            is_later = since is not None and (read.step_of(path) or 0) > since
            if is_later or path.name.startswith("."):  # a killed process left it
                shutil.rmtree(path)

    def remove(self, step: int | None = None) -> None:
        """Remove this machine's files of the run, or of one step."""
        if self.keeps:
            gone = self._base if step is None else self.root / read.checkpoint_name(step)
            shutil.rmtree(gone, ignore_errors=True)
