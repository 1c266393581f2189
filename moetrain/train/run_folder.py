"""A run's output folder: it is checked, claimed by one run, and searched for a checkpoint.

The checkpoints of a folder belong to one branch of training, so a higher step is newer.
``checkpoint.resume auto`` resumes the newest intact one. Checkpoints of another branch (those of
later steps than the resumed one, or of another run) are moved to ``earlier-1``, ``earlier-2``, ...
and never deleted.

With ``checkpoint.shared no`` each machine has its own output folder, with a part of each checkpoint
or all of it. Only the main rank's folder has metrics and exports. On each machine one rank does the
main rank's work with checkpoints.
"""

import json
import math
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from moetrain.checkpoint import read
from moetrain.checkpoint.memory import Folders, Memory
from moetrain.checkpoint.save import Store, begin, remove_leftovers
from moetrain.config import CheckpointSection, Config, ConfigError, logger
from moetrain.config.environment import launched_place
from moetrain.config.files import disk_remedy
from moetrain.config.locks import LockHeldError, file_lock
from moetrain.config.sources import RunFailed, shortened
from moetrain.config.versions import with_defaults
from moetrain.models.architecture import Architecture
from moetrain.parallel.world import World

RUN_FILE, _LOCK, _MARK = ".run", ".lock", ".rank-{}"
"""Files in an output folder: one holds the name of the run that has begun there, a run holds the
lock of one, and a rank writes one to show that its machine sees the folder."""
_RUN_NAME = re.compile(rb"[0-9a-f]*\n?")
"""The content of the file with the run's name. It is empty if a run was killed while writing it."""
_VISIBLE_SECONDS = 60.0
"""Seconds within which a rank must see another rank's file. NFS caches a folder no longer than that
(acdirmax in nfs(5))."""
_EXPORT_BYTES = 4
"""Bytes of an exported parameter, in fp32."""
_FILES = ("metrics.jsonl", "config.json", "sample.txt")
_WRITING: dict[str, Callable[[CheckpointSection], object]] = {
    "checkpoint.keep": lambda x: x.keep > 1 and (x.interval or x.minutes),
    "checkpoint.keep_every": lambda x: x.keep_every,
    "checkpoint.interval": lambda x: x.interval,
    "checkpoint.minutes": lambda x: x.minutes,
    "checkpoint.at_end": lambda x: x.at_end,
    "checkpoint.best": lambda x: x.best,
    "checkpoint.save_hf": lambda x: x.save_hf,
}
"""Settings that make a run write more, each with a function that is true if it does so."""
_FOLDERS = ("checkpoints", "tensorboard", "wandb", "hf", "adapter", "completions", "profile")
"""Folders that a run may write."""


class RunFolder:
    """The output folder of a run."""

    def __init__(
        self, path: Path, world: World | None = None, settings: CheckpointSection | None = None
    ) -> None:
        """Collective over the ranks of ``world``. None: only this process uses the folder."""
        self.settings = settings = settings or CheckpointSection()
        self.path, self.checkpoints = path, path / "checkpoints"
        self.store = Store(settings.store) if settings.store else None
        self._stored = math.inf
        """The step that was last fetched from the store. Only older ones are fetched after it."""
        copies = 0 if settings.shared else settings.replicas
        if world is None:
            self.disk = Folders(self.checkpoints, copies=copies)
        else:
            self.disk = Folders(
                self.checkpoints, rank=world.rank, gather=world.gather, copies=copies
            )
        """The folders of checkpoints: one that the main rank keeps, or one for each machine."""
        self.own = self.disk if copies else None
        """The machines' own folders of checkpoints; None: all machines share one."""
        self.memory: Memory | None = None
        """The run's folders in the machines' memory; None: it uses none."""
        if world is not None and settings.memory_interval:
            self.memory = Memory(settings, path, rank=world.rank, gather=world.gather)
            world.endings.append(self.memory.remove)

    def check_usable(self) -> None:
        """Check that a run can write here, and leave nothing behind.

        Raises ConfigError: the folder cannot be made or written to, its name is too long, or it
        holds something else under a name that a run uses.
        """
        folder, absolute = self.path, Path(os.path.abspath(self.path))

        def error(problem: str) -> ConfigError:
            return ConfigError("output_dir", f"{shortened(str(folder))} {problem}; choose another")

        try:
            there = absolute
            while not os.path.lexists(there):
                there = there.parent
            if not there.exists():
                raise error(f"cannot be made: {shortened(str(there))} is a link to nothing")
            if not there.is_dir():
                raise error(f"cannot be made: {shortened(str(there))} is not a folder")
            longest = os.pathconf(there, "PC_NAME_MAX")
            if any(len(os.fsencode(x)) > longest for x in absolute.relative_to(there).parts):
                raise error(f"has a name of more than {longest} bytes")
            with tempfile.TemporaryFile(dir=there):
                pass
            for name in _FILES:
                if (folder / name).is_dir():
                    raise error(f"cannot be used: its {name} is a folder")
            if not _is_of_a_run(folder / "config.json"):
                raise error("cannot be used: its config.json is not a run's, and would be replaced")
            for name in _FOLDERS:
                if os.path.lexists(folder / name) and not (folder / name).is_dir():
                    raise error(f"cannot be used: its {name} is not a folder")
        except OSError as failure:
            raise error(f"cannot be written to: {failure.strerror}") from None

    def check_room(self, config: Config, arch: Architecture, saved: float) -> None:
        """Raise ConfigError unless there is room for the run's checkpoints and its export.

        The message says how much each of them needs. ``saved``: bytes of one checkpoint.
        """
        checkpoint, steps = config.checkpoint, config.train.steps
        keep, best = checkpoint.keep, checkpoint.best
        saves, milestones = checkpoint.at_end + (1 + keep) * best, int(best)
        if checkpoint.interval:
            saves += keep if steps is None else (steps - 1) // checkpoint.interval
        if checkpoint.minutes:  # the number of these is not known in advance
            saves += keep if steps is None else min(keep, steps - 1)
        if checkpoint.keep_every and steps is not None:
            milestones += steps // checkpoint.keep_every
        if self.disk.keeps:
            # The oldest is removed only when the newest is complete, so one more is counted. New
            # checkpoints replace those of the run that is resumed.
            there = _bytes_of_checkpoints(self.checkpoints) * (checkpoint.resume != "never")
            exports = checkpoint.save_hf and self.disk.rank == 0  # into the main rank's folder
            fewer = [name for name, writes in _WRITING.items() if writes(checkpoint)]
            less = f", or write less ({', '.join(fewer)})" if fewer else ""
            _check_free(
                "output_dir",
                self.path,
                there=there,
                copies=min(saves, keep + 1 + milestones),
                one=saved * self.disk.share,
                export=arch.num_params() * _EXPORT_BYTES * exports,
                remedy=f"choose another{less}",
            )
        if self.memory is not None and self.memory.keeps:
            _check_free(
                "checkpoint.memory",
                Path(checkpoint.memory),
                there=_bytes_of_checkpoints(self.memory.root),
                copies=3 if steps is None else min(3, steps // checkpoint.memory_interval),
                one=saved * self.memory.share,
                export=0.0,
                remedy="enlarge it (mount -o remount,size=), name another, or unset it and "
                "checkpoint.memory_interval",
            )

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep every other run out in this context; create the folder if it is missing.

        Leftovers of killed saves are removed first. The rank that looks after the folder holds a
        lock, which ends with its process (:mod:`moetrain.config.locks`). If settings or data turn
        out to be wrong, a folder that was created here is removed again.

        Raises ConfigError: another run writes to it, or it cannot be written to.
        """
        if not self.disk.keeps:
            yield
            return
        folder = self.path
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                is_locked = stack.enter_context(file_lock(folder / _LOCK))
            except LockHeldError as error:
                raise ConfigError(
                    "output_dir",
                    f"{str(folder)!r} is being written by another run ({error}); "
                    "wait for it, stop it, or choose another folder",
                ) from None
            except (OSError, ValueError) as error:  # ValueError: the name has a NUL
                problem = f"{str(folder)!r} cannot be written: {error}"
                remedy = disk_remedy(getattr(error, "errno", None), "output_dir")
                raise ConfigError("output_dir", f"{problem}; {remedy}") from None
            if is_locked:
                remove_leftovers(self.checkpoints)
            else:
                problem = "is on a file system without locks: nothing keeps a second run out of it"
                logger.warning("%s %s", folder, problem)
            try:
                yield
            except ConfigError:
                with suppress(OSError):  # a folder that holds more than the lock stays
                    if made and [path.name for path in folder.iterdir()] == [_LOCK]:
                        (folder / _LOCK).unlink()
                    for path in made:
                        path.rmdir()
                raise

    def check_shared(self, world: World, remedy: str = "") -> None:
        """Check that all ranks see the same folder, and can write to it.

        The rank that looks after the folder (the main rank, or one of each machine) writes a small
        file. Every other rank must be able to read it, and to write a file of its own. All files
        are removed again. Collective: all ranks return, or all raise the same error.

        Raises ConfigError: a rank does not see that file, as on machines that each have their own
        disk, or cannot write there.
        """
        if world.size == 1:
            return
        keeper = self.disk.keeper
        shared, mine = (self.path / _MARK.format(rank) for rank in (keeper, world.rank))
        token, keeps = secrets.token_hex(8), world.rank == keeper
        problem = _failure_to_write(shared, token) if keeps else ""
        # The gather waits for the write. If a rank looked earlier, NFS would cache that there is no
        # file.
        token = world.gather(token)[keeper]
        if not keeps:
            if _is_seen(shared, token):
                problem = _failure_to_write(mine, token)
            else:
                there = f"a file that rank {keeper} writes there is not seen"
                problem = there if os.path.exists(self.path) else "there is no such folder"
            with suppress(OSError):
                mine.unlink()
        reports = world.gather((socket.gethostname(), world.rank, problem))
        problems = [report for report in reports if report[2]]
        if keeps:  # the folder may be removed again, and must be empty then
            with suppress(OSError):
                shared.unlink()
        if problems:
            host, rank, problem = problems[0]
            others = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise ConfigError(
                "output_dir",
                f"{shortened(str(self.path))} is not one folder for all ranks: on {host} (rank "
                f"{rank}{others}) {problem}; choose one on a file system that all machines of the "
                f"run share{remedy}",
            )

    def open_memory(self, world: World, since: int | None = None) -> None:
        """Open the run's checkpoints in memory, up to step ``since``; others are removed."""
        if self.memory is not None:
            self.memory.open(world.any(self._run()), since)

    def _run(self) -> str:
        """Return the name of the run that has begun here, or an empty text.

        The text is empty if no run has begun, or if another rank looks after the folder.

        Raises ConfigError: the file with the name is damaged.
        """
        name, problem = self._read_run()
        if problem:
            raise ConfigError("output_dir", problem)
        return name

    def _read_run(self) -> tuple[str, str]:
        """Return the name as :meth:`_run` does, and what is wrong with its file, or empty texts."""
        mark = self.path / RUN_FILE
        if not self.disk.keeps or not mark.exists():
            return "", ""
        remedy = "remove it, and the run goes on from the newest checkpoint on the disk"
        try:
            data = mark.read_bytes()
        except OSError as error:
            return "", f"{str(mark)!r} cannot be read: {error.strerror}; {remedy}"
        if not _RUN_NAME.fullmatch(data):
            problem = f"{str(mark)!r} holds {shortened(data)}, which is not the name of a run"
            return "", f"{problem}: it is damaged; {remedy}"
        return data.decode().strip(), ""

    def is_in_memory(self, checkpoint: Path) -> bool:
        return self.memory is not None and checkpoint.parent == self.memory.root

    def find(self, resume: str, before: int | None = None, least: int = 0) -> Path | None:
        """Return the checkpoint that ``checkpoint.resume`` asks for, or None to start anew.

        ``auto`` skips damaged checkpoints, with a warning, and takes the newest intact one.
        Collective.

        Args:
            before: checkpoints of this step and later ones are known to be damaged.
            least: checkpoints before this step are not wanted; None is returned instead.

        Raises ConfigError: a named folder is not an intact checkpoint; there are checkpoints here,
        but none is intact; or the newest intact one has another version of the format.
        """
        if resume == "never":
            return None
        only = ""
        if resume != "auto":
            chosen = read.newest_in(Path(resume))
            is_own = self.own is not None and chosen.resolve().parent == self.checkpoints.resolve()
            chosen, only = self.disk.gather((chosen, chosen.name * is_own))[0]
            if not only:
                try:
                    return read.open_checkpoint(chosen).folder
                except read.DamagedCheckpoint as error:
                    problem = f"{error.problem}; name another one, or set never"
                    raise ConfigError("checkpoint.resume", problem) from None
        newest, problems = self.disk.newest(before, only)
        if newest and (read.step_of(newest) or 0) >= least:
            for problem in problems if before is None and self.disk.rank == 0 else ():
                logger.warning("a damaged checkpoint is passed over: %s", problem)
            return self.disk.fetch(newest)
        if (problems or only) and not least:
            more = "" if self.own is None else " (checkpoint.replicas 2 lets one machine be lost)"
            what, why = only or "every checkpoint", "; ".join(problems) or "no machine has it"
            raise ConfigError(
                "checkpoint.resume",
                f"{what} in {str(self.checkpoints)!r} is damaged or incomplete ({why}){more}; name "
                "another one, or start afresh with never",
            )
        return None

    def _fetch(self, store: Store, resume: str, newest: int) -> str:
        """Fetch the newest checkpoint of ``store`` if it is newer than ``newest``; return its step.

        The step is returned as text, which is empty if nothing was fetched.

        Raises:
            ConfigError: the store has a checkpoint, and ``resume`` is not auto.
            RunFailed: the store cannot be read.
        """
        try:
            there = [step for step in store.steps() if step < self._stored]
            if there and resume != "auto":
                problem = f"it holds step {there[-1]}, but checkpoint.resume is {resume}"
                raise ConfigError("checkpoint.store", f"{problem}; empty it, or choose another")
            if not there or there[-1] <= newest:
                return ""
            final = self.checkpoints / read.checkpoint_name(there[-1])
            new = begin(final)
            store.get(there[-1], new)
            shutil.rmtree(final, ignore_errors=True)  # if it exists, it is damaged
            new.rename(final)
            self._stored = there[-1]
        except OSError as error:
            problem = f"cannot fetch from checkpoint.store: {error}"
            raise RunFailed(f"{problem}; name one that can be read, or unset it") from error
        return str(there[-1])

    def open(
        self, resume: str, arch: Architecture, world: World, before: int | None = None
    ) -> read.Checkpoint | None:
        """Open the checkpoint that :meth:`find` finds, or with auto a newer one in memory or store.

        Collective. Raises as :meth:`find`, and ConfigError if it is a checkpoint of another model.
        """
        kept, least = None, 0
        if self.memory is not None and resume == "auto":
            kept, problems = self.memory.newest()
            least = 0 if kept is None else (read.step_of(kept) or 0) + 1
            for problem in problems if world.is_main else ():
                logger.warning("a checkpoint in memory is passed over: %s", problem)
        if self.store is not None:
            here, _ = self.disk.newest(before)
            newest = max(least - 1, -1 if here is None else read.step_of(here) or 0)
            fetched = self._fetch(self.store, resume, newest) if world.is_main else ""
            fetched = world.broadcast(fetched)  # the broadcast waits for the fetch
            if fetched and before is not None:
                before = max(before, int(fetched) + 1)
        path = self.find(resume, before, least)
        if path is None and self.memory is not None and kept is not None:
            path = self.memory.fetch(kept)
        if path is None:
            return None
        found = read.open_checkpoint(path)
        mine = arch.model_dump(mode="json")
        theirs = with_defaults(type(arch), found.state["architecture"])
        for key in {**mine, **theirs}:
            if mine.get(key) != theirs.get(key):
                raise ConfigError(
                    "checkpoint.resume",
                    f"{str(found.folder)!r} is of another model ({key} {theirs.get(key)!r}, this "
                    f"run's {mine.get(key)!r}); choose another output_dir, or checkpoint.resume "
                    "never",
                )
        return found

    def find_resumed(
        self, arch: Architecture, world: World, before: int | None = None
    ) -> read.Checkpoint | None:
        """Open the checkpoint that the run resumes, or return None.

        ``before``: only earlier steps are considered. Collective. Raises as :meth:`resume_now` and
        :meth:`open`.
        """
        return self.open(self.resume_now(self.settings.resume, world), arch, world, before)

    def resume_now(self, resume: str, world: World) -> str:
        """Return ``checkpoint.resume`` as it applies to ranks that a launcher may have restarted.

        Under a launcher it is ``auto`` once the run has passed :meth:`set_aside` and there is a
        checkpoint. Before that, a restarted run begins where the first one began. Collective.

        Raises ConfigError: machines with folders of their own have different runs there, or the
        file with a run's name is damaged.
        """
        place = launched_place()
        restarts = world.gather(place.restarts if place else 0)[0]
        if place and not restarts and resume != "auto" and self.disk.keeps:
            (self.path / RUN_FILE).unlink(missing_ok=True)
        saved = any(read.list_checkpoints(x.root) for x in (self.disk, self.memory) if x)
        found = world.gather((*self._read_run(), saved, socket.gethostname()))
        if problems := [problem for _, problem, *_ in found if problem]:
            raise ConfigError("output_dir", problems[0])
        runs = {run: host for run, _, _, host in found if run}
        if len(runs) > 1 and resume == "auto":
            raise ConfigError(
                "output_dir",
                f"{str(self.path)!r} is of one run on {' and of another on '.join(runs.values())}; "
                "move one of them away, or choose another",
            )
        return "auto" if place and runs and any(saved for _, _, saved, _ in found) else resume

    def set_aside(self, resumed: Path | None, step: int, world: World) -> None:
        """Move aside the files that the run does not continue. Collective.

        A run that starts anew (``resumed`` is None), or from a checkpoint elsewhere, moves an
        earlier run's checkpoints and metrics. A run from a checkpoint here, of step ``step``, moves
        the checkpoints of later steps. With these it puts a copy of the metrics, since it will drop
        the later lines.
        """
        folder, root = self.path, self.checkpoints
        is_continued = resumed is not None and (
            self.is_in_memory(resumed) or resumed.resolve().parent == root.resolve()
        )
        if self.disk.keeps and not is_continued:
            (folder / RUN_FILE).unlink(missing_ok=True)
        # All machines remove the old name before any of them gets a new one.
        run = world.any(self._run()) or world.broadcast(secrets.token_hex(8))
        if not self.disk.keeps:
            return
        if self._run() != run:
            (folder / RUN_FILE).write_text(run)
        since = step if is_continued else -1
        if going := [x for x in read.list_checkpoints(root) if (read.step_of(x) or 0) > since]:
            names = (folder / f"earlier-{number}" for number in count(1))
            old = next(name for name in names if not name.exists())
            old.mkdir()
            if is_continued:
                (old / root.name).mkdir()
                if (folder / "metrics.jsonl").exists():
                    shutil.copy2(folder / "metrics.jsonl", old)
                for path in going:
                    path.rename(old / root.name / path.name)
                logger.info("checkpoints after step %d were moved to %s", step, old)
            else:
                for name in (root.name, "metrics.jsonl", "tensorboard", "profile"):
                    if (folder / name).exists():
                        (folder / name).rename(old / name)
                logger.info("an earlier run's checkpoints and metrics were moved to %s", old)


def _is_of_a_run(file: Path) -> bool:
    """Return True if ``file`` is missing, or is the ``config.json`` of a run and not of a model."""
    if not file.exists():
        return True
    try:
        settings = json.loads(file.read_bytes())
    except (ValueError, RecursionError):  # it is not JSON: a run was killed while it wrote this
        return True
    return isinstance(settings, dict) and "output_dir" in settings


def _bytes_of_checkpoints(root: Path) -> int:
    """Return the bytes of all checkpoints' files. Another run may be removing some meanwhile."""
    total = 0
    for path, _, names in os.walk(root):  # os.walk skips a folder that is gone
        for name in names if os.path.basename(path).startswith("step-") else ():
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total


def _check_free(
    setting: str,
    folder: Path,
    *,
    there: int,
    copies: int,
    one: float,
    export: float,
    remedy: str,
) -> None:
    """Raise ConfigError unless ``folder`` has room for checkpoints and an export.

    Args:
        setting: the setting that names the folder.
        there: bytes of checkpoints in the folder that the new ones will replace.
        copies: the number of checkpoints that there will be at once.
        one: bytes of each checkpoint.
        export: bytes of the export.
        remedy: the end of the message.
    """
    folders = (folder, *Path(os.path.abspath(folder)).parents)
    total, _, free = shutil.disk_usage(next(path for path in folders if path.exists()))
    need = copies * one + export
    if total and free + there < need:  # remote file systems may report no size
        what = [f"{copies} checkpoint{'s' * (copies > 1)} of {_gib(one)}"] * (copies > 0)
        what += [f"checkpoint.save_hf's {_gib(export)}"] * (export > 0)
        problem = f"has room for {_gib(free)}, and the run will write {_gib(need)}"
        raise ConfigError(setting, f"{str(folder)!r} {problem}: {' and '.join(what)}; {remedy}")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"


def _failure_to_write(file: Path, text: str) -> str:
    """Write ``text`` to ``file``; return why it cannot be written, or an empty text."""
    try:
        file.write_text(text)
    except OSError as error:
        return f"it cannot be written to ({error.strerror})"
    return ""


def _is_seen(file: Path, token: str) -> bool:
    """Wait until ``file``, which another rank writes, holds ``token``; False: it was too late."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while True:
        with suppress(OSError, ValueError):  # it is not there yet, or only half
            if file.read_text() == token:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
