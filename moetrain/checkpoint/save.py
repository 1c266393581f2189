"""Saving: every rank writes its parts in a thread, and one gives the whole its name at the end.

    rank 0   makes .step-N.<pid>   writes its files   awaits all reports: manifest, rename
    others   wait for it           write theirs       report, wait for the outcome

What is said between ranks goes through their store, on the host, so no collective is in the way of
a step that runs meanwhile. A save that fails anywhere fails everywhere with one message, leaves
nothing, and what was complete stays so. The machines of a run must see one file system.

Left out on purpose: copies of what changes during the write (:mod:`moetrain.checkpoint.staging`).
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moetrain.checkpoint.folder import begin, checkpoint_name, commit, list_checkpoints, remove
from moetrain.checkpoint.folder import step_of as _step_of
from moetrain.checkpoint.format import Contents, write_manifest, write_tensors
from moetrain.checkpoint.read import is_intact
from moetrain.config import RunFailed
from moetrain.parallel.layout import TensorSlice
from moetrain.parallel.rendezvous import Rendezvous

FILE_BYTES = 2 << 30
"""Of tensors in a file, unless one alone has more: enough files for several to be written at once,
and few enough for file systems that are slow with many."""
WRITERS = 4
"""Files that a rank writes at once: a checksum takes as long as a write to the page cache."""

Groups = Mapping[str, Mapping[str, TensorSlice]]


@dataclass(frozen=True)
class SavePlan:
    """What a save is to leave behind."""

    root: Path
    step: int
    keep: int
    """Only the newest so many intact checkpoints stay, ..."""
    keep_every: int = 0
    """... and those of multiples of this (0: no others), for good."""
    failed: bool = False
    """Of a run that failed: as ``failed-step-N``, in place of earlier ones of that kind; nothing
    else is removed."""

    @property
    def path(self) -> Path:
        """Where it will be."""
        return self.root / checkpoint_name(self.step, failed=self.failed)

    def outdated(self) -> list[Path]:
        """What goes when it is there."""
        if self.failed:
            return [path for path in self.root.glob("failed-step-*") if path != self.path]
        intact = [path for path in list_checkpoints(self.root) if is_intact(path)]
        return [path for path in intact[: -self.keep] if not self._is_milestone(path)]

    def _is_milestone(self, path: Path) -> bool:
        return bool(self.keep_every) and (_step_of(path) or 0) % self.keep_every == 0


class Saved(NamedTuple):
    """A checkpoint that is complete."""

    path: Path
    seconds: float
    """From the beginning of the write to its name."""
    num_bytes: int
    """Of this rank's tensors."""


class Saver:
    """Writes checkpoints of one rank, one at a time, behind the caller's back.

    Every rank makes the same calls in the same order.
    """

    def __init__(self, rendezvous: Rendezvous | None) -> None:
        """``rendezvous``: with the other ranks, and nobody else's; None: there are none."""
        self._rendezvous = rendezvous
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[Saved] | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank makes, names and removes folders."""
        return self._rendezvous is None or self._rendezvous.rank == 0

    @property
    def is_busy(self) -> bool:
        """Whether a save has not been waited for, or found finished."""
        return self._under_way is not None

    @property
    def is_writing(self) -> bool:
        """Whether :meth:`wait` would take time."""
        return self._under_way is not None and not self._under_way.done()

    def start(
        self,
        plan: SavePlan,
        groups: Groups,
        state: Mapping[str, Any],
        ready: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin to save; call :meth:`wait` or :meth:`finished` before the next.

        Args:
            groups: this rank's parts by group and name, which must not change until it is done.
                Every group is named on every rank.
            state: as JSON; the main rank's counts.
            ready: called in the thread, returns when the tensors have their values.
        """
        assert not self.is_busy  # whoever starts has waited
        self._under_way = self._thread.submit(self._save, plan, groups, state, ready)

    def finished(self) -> Saved | None:
        """What was saved, if one is done since the last call; None: none is, or none was begun.

        Raises:
            RunFailed: it could not be written; nothing of it is left.
        """
        return None if self.is_writing else self.wait()

    def wait(self) -> Saved | None:
        """:meth:`finished`, however long it takes."""
        future, self._under_way = self._under_way, None
        return None if future is None else future.result()

    # ---- in the thread -------------------------------------------------------------------------

    def _save(
        self, plan: SavePlan, groups: Groups, state: Mapping[str, Any], ready: Callable[[], object]
    ) -> Saved:
        started = time.perf_counter()
        new = Path(self._tell_all(lambda: str(begin(plan.path)), plan))
        mine = {group: written_here(parts) for group, parts in groups.items()}
        report = _attempt(lambda: self._write_parts(new, mine, ready))
        reports = [report] if self._rendezvous is None else self._rendezvous.gather(report)
        try:
            self._tell_all(lambda: _complete(plan, new, reports, state), plan)
        finally:
            if self.is_main:
                shutil.rmtree(new, ignore_errors=True)
        if self.is_main:
            for path in plan.outdated():
                remove(path)
        num_bytes = sum(part.tensor.nbytes for parts in mine.values() for part in parts.values())
        return Saved(plan.path, time.perf_counter() - started, num_bytes)

    def _tell_all(self, act: Callable[[], str], plan: SavePlan) -> str:
        """What the main rank's ``act`` gives, on every rank; RunFailed if it fails there."""
        outcome = _attempt(act) if self.is_main else ""
        if self._rendezvous is not None:
            outcome = self._rendezvous.broadcast(outcome)
        answer = json.loads(outcome)
        if "error" in answer:
            left = "there is no earlier one, so the next run begins where this one did"
            if list_checkpoints(plan.root):
                left = "earlier ones are as they were, and the next run goes on from the newest"
            raise RunFailed(f"cannot write the checkpoint {plan.path}: {answer['error']}; {left}")
        return answer["value"]

    def _write_parts(self, folder: Path, mine: Groups, ready: Callable[[], object]) -> str:
        """Write this rank's files; returns what is in them, as JSON."""
        ready()
        rank = 0 if self._rendezvous is None else self._rendezvous.rank
        jobs = [
            (folder / f"{group}-{rank:05d}-{number:02d}.safetensors", group, parts)
            for group, all_parts in mine.items()
            for number, parts in enumerate(cut_to_files(all_parts))
        ]
        with ThreadPoolExecutor(WRITERS, thread_name_prefix="checkpoint-write") as writers:
            written = list(writers.map(lambda job: write_tensors(*job), jobs))
        files = {name: known for contents in written for name, known in contents.files.items()}
        groups = {group: {} for group in mine}
        for contents in written:
            for group, entries in contents.groups.items():
                groups[group] |= entries
        return json.dumps(Contents(files, groups).to_json())


def _attempt(act: Callable[[], str]) -> str:
    """What ``act`` gives, or the disk's refusal, as JSON."""
    try:
        return json.dumps({"value": act()})
    except OSError as error:
        return json.dumps({"error": str(error)})


def written_here(parts: Mapping[str, TensorSlice]) -> dict[str, TensorSlice]:
    """Of what several ranks hold, this one's share; and nothing of what is empty."""
    return {
        name: part
        for name, part in parts.items()
        if part.tensor.numel() and part.is_written_here(name)
    }


def cut_to_files(parts: Mapping[str, TensorSlice]) -> list[dict[str, TensorSlice]]:
    """``parts``, cut to files of about :data:`FILE_BYTES`, in order."""
    files: list[dict[str, TensorSlice]] = []
    size = FILE_BYTES
    for name, part in parts.items():
        if size + part.tensor.nbytes > FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = part
        size += part.tensor.nbytes
    return files


def _complete(plan: SavePlan, new: Path, reports: Sequence[str], state: Mapping[str, Any]) -> str:
    """Write the manifest of what all ranks have written, and give the folder its name."""
    answers = [json.loads(report) for report in reports]
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise OSError(f"rank {rank}: {answer['error']}" if rank else answer["error"])
    contents = Contents.together([Contents.from_json(json.loads(a["value"])) for a in answers])
    for name in contents.files:
        if not (new / name).is_file():
            raise OSError(
                f"{name} was written, and is not there: output_dir must lie on a file system that "
                "all machines of the run share"
            )
    write_manifest(new, contents, state)
    commit(new, plan.path)
    return str(plan.path)
