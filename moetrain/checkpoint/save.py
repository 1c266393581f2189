"""Saving: every rank writes its slices in a thread; at the end rank 0 gives the folder its name.

    rank 0   makes .step-N.<pid>   writes its files   awaits all reports: manifest, rename
    others   wait for it           write theirs       report, wait for the outcome

Ranks communicate through their store, on the host, so no collective delays a step that runs
meanwhile. A save that fails on one rank fails on all ranks with one message. It leaves nothing
behind, and complete checkpoints stay as they were. If machines have their own folders
(:mod:`moetrain.checkpoint.memory`), one rank of each machine makes a folder there, ranks send one
another copies, and all folders get the same manifest.

:class:`Saver` writes tensors that do not change meanwhile. :class:`Staging` copies a rank's state
to host memory while the next step already runs, so that the saver can write the copies.
"""

import ctypes
import json
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from moetrain.checkpoint import read
from moetrain.checkpoint.memory import Folders, Memory
from moetrain.checkpoint.remote import file_system
from moetrain.config import ConfigError, logger
from moetrain.config.files import disk_remedy, fsync
from moetrain.config.sources import RunFailed
from moetrain.parallel.mesh import TensorSlice
from moetrain.parallel.processes import Rendezvous
from moetrain.runtime.arena import aligned
from moetrain.runtime.memory import HostMemory
from moetrain.runtime.typed import split

FILE_BYTES = 2 << 30
"""The largest number of bytes of tensors in a file, unless a single tensor has more. This size
gives enough files to write several at once, and few enough for file systems that are slow with many
files."""
WRITERS = 4
"""Number of files that a rank writes at once. Several threads help, because a checksum takes as
long as a write to the page cache."""

_LEFTOVER = re.compile(r"\.((?:failed-)?step-\d{8,})\.(\w+)")

_ERRNO = re.compile(r"\[Errno (\d+)\]")
_Groups = Mapping[str, Mapping[str, TensorSlice]]


class Store:
    """A folder of checkpoints at a URL: an object store, or another file system of fsspec.

    Each rank copies to the store the files that it has written on the disk. The manifest is copied
    last. A checkpoint without a manifest is ignored, and a removal deletes the manifest first. A
    run that has lost its disk fetches the newest checkpoint. Left out on purpose: fetching only the
    bytes that a rank reads, and runs without a disk.

    Methods raise OSError: the store cannot be reached, or refuses.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigError: fsspec does not know such URLs, or needs a package for them."""
        try:
            self._files, self._root = file_system(url)
        except (ValueError, ImportError) as error:
            problem = f"{url!r}: {error}; name another, or unset it"
            raise ConfigError("checkpoint.store", problem) from None

    def steps(self, before: int | None = None) -> list[int]:
        """Return the steps of the store's complete checkpoints in ascending order.

        ``before``: return only the steps before this one; None: return all.
        """
        self._files.invalidate_cache()
        found = self._files.glob(f"{self._root}/step-*/{read.MANIFEST}")
        steps = sorted(read.step_of(Path(path).parent) or 0 for path in found)
        return [step for step in steps if before is None or step < before]

    def put(self, folder: Path, pattern: str) -> None:
        """Copy the files of the checkpoint ``folder`` whose names match ``pattern``."""
        files, target = sorted(folder.glob(pattern)), f"{self._root}/{folder.name}"
        self._files.makedirs(target, exist_ok=True)
        self._files.put([str(file) for file in files], [f"{target}/{file.name}" for file in files])

    def get(self, step: int, folder: Path) -> None:
        """Copy all files of the checkpoint of ``step`` to ``folder``."""
        there = self._files.ls(f"{self._root}/{read.checkpoint_name(step)}", detail=False)
        self._files.get(there, [str(folder / PurePosixPath(path).name) for path in there])

    def remove_but(self, kept: Collection[int]) -> None:
        """Remove every checkpoint, complete or not, whose step is not in ``kept``."""
        self._files.invalidate_cache()
        for path in self._files.glob(f"{self._root}/step-*"):
            if read.step_of(Path(path)) not in kept:
                if self._files.exists(manifest := f"{path}/{read.MANIFEST}"):
                    self._files.rm_file(manifest)
                self._files.rm(path, recursive=True)


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """The target of a save, and the checkpoints that remain after it."""

    root: Path
    """The folder of the checkpoints."""
    step: int
    keep: int
    """The number of newest intact checkpoints that are kept."""
    keep_every: int = 0
    """Checkpoints of steps that are multiples of this are kept for good; 0: none are."""
    failed: bool = False
    """The run has failed: save ``failed-step-N``, which replaces earlier ones of that kind, and
    remove nothing else."""
    keeps: int | None = None
    """The step of the best checkpoint, which is kept too; None: there is none."""
    folders: Folders | None = None
    """The machines' own folders; ``root`` is this machine's. None: all machines share ``root``."""
    store: Store | None = None
    """The object store that gets a copy, unless the run has failed; None: no copy."""

    @property
    def path(self) -> Path:
        return self.root / read.checkpoint_name(self.step, failed=self.failed)

    def outdated(self) -> list[Path]:
        """List the checkpoints to remove once this one is complete."""
        if isinstance(self.folders, Memory):  # keep two: one is complete while the next is written
            return read.list_checkpoints(self.root)[:-2]
        if self.failed:
            return [path for path in self.root.glob("failed-step-*") if path != self.path]
        is_whole = self.folders is None
        paths = [p for p in read.list_checkpoints(self.root) if _is_intact(p, is_whole)]
        intact = {read.step_of(path) or 0: path for path in paths}
        return [intact[step] for step in intact.keys() - self.kept([*intact])]

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Return the ``steps`` (ascending) whose checkpoints are kept."""
        kept = {*steps[-self.keep :], self.keeps}
        return {n for n in steps if n in kept or (self.keep_every and n % self.keep_every == 0)}


def _is_intact(folder: Path, is_whole: bool) -> bool:
    try:
        read.open_checkpoint(folder, is_whole=is_whole)
    except ConfigError:
        return False
    return True


class Saved(NamedTuple):
    """A complete checkpoint."""

    path: Path
    seconds: float
    """Time of the whole save: the write, the copy to ``checkpoint.store`` and the removal of old
    checkpoints."""


class Saver:
    """Writes a rank's checkpoints in the background, one at a time. Collective."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        """Use ``rendezvous`` to meet the other ranks. Nothing else may use it."""
        self._rendezvous, self._rank = rendezvous, rendezvous.rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.under_way: Future[Saved] | None = None
        """The started save whose result has not been taken yet; None: there is none."""

    def start(
        self,
        plan: SavePlan,
        groups: _Groups,
        state: Mapping[str, object],
        ready: Callable[[], object] = lambda: None,
    ) -> None:
        """Start to save; call :meth:`wait` or :meth:`finished` before the next start.

        Args:
            groups: this rank's slices by group and name, which must not change until the save is
                done. Every rank names every group.
            state: a JSON object for ``state.json``; the main rank's is written.
            ready: a function that the thread calls first; it returns when the tensors have their
                values.
        """
        assert self.under_way is None  # the caller has waited for the last save
        self.under_way = self._thread.submit(self._save, plan, groups, state, ready)

    def finished(self) -> Saved | None:
        """Return the checkpoint that is newly complete, or None; RunFailed: the save failed."""
        is_writing = self.under_way is not None and not self.under_way.done()
        return None if is_writing else self.wait()

    def wait(self) -> Saved | None:
        """Wait until the save is complete, then return or raise as :meth:`finished` does."""
        future, self.under_way = self.under_way, None
        return None if future is None else future.result()

    # ---- in the thread -------------------------------------------------------------------------

    def _save(
        self,
        plan: SavePlan,
        groups: _Groups,
        state: Mapping[str, object],
        ready: Callable[[], object],
    ) -> Saved:
        started = time.perf_counter()
        new = Path(self._tell_all(lambda: str(begin(plan.path)), plan))
        folders = plan.folders
        is_here = self._rank == 0 if folders is None else folders.keeps
        if folders is not None:
            new = plan.root / new.name
            self._do(lambda: begin(plan.path, new), plan, is_here and self._rank > 0)
        mine = {group: _written_here(parts) for group, parts in groups.items()}
        report = _attempt(lambda: self._write_parts(new, mine, ready))
        reports = self._rendezvous.gather(report)
        try:
            if folders is None:
                self._tell_all(lambda: str(commit(new, plan.path, _joined(reports), state)), plan)
            else:
                told = self._tell_all(lambda: json.dumps([_joined(reports).to_json(), state]), plan)
                value, state = json.loads(told)
                contents = read.Contents.from_json(value)
                self._do(lambda: folders.carry(new, folders.copies(contents)), plan)
                self._do(lambda: commit(new, plan.path, contents, state), plan, is_here)
        finally:
            if is_here:
                shutil.rmtree(new, ignore_errors=True)
        if plan.store is not None and not plan.failed:
            self._copy_to(plan.store, plan)
        for path in plan.outdated() if is_here else ():
            _remove(path)
        return Saved(plan.path, time.perf_counter() - started)

    def _copy_to(self, store: Store, plan: SavePlan) -> None:
        is_main, path = self._rank == 0, plan.path
        # A checkpoint of this step may be there already. Remove it, complete or not.
        self._do(
            lambda: store.remove_but({*store.steps()} - {plan.step}), plan, is_main, is_copy=True
        )
        self._do(lambda: store.put(path, f"*-{self._rank:05d}-*"), plan, is_copy=True)
        last = read.STATE, read.MANIFEST
        self._do(lambda: [store.put(path, file) for file in last], plan, is_main, is_copy=True)
        self._do(
            lambda: store.remove_but(plan.kept(store.steps(plan.step + 1))),
            plan,
            is_main,
            is_copy=True,
        )

    def _do(
        self,
        act: Callable[[], object],
        plan: SavePlan,
        is_mine: bool = True,
        *,
        is_copy: bool = False,
    ) -> None:
        """Run ``act`` on the ranks with ``is_mine``; raise RunFailed on all ranks if one fails."""
        reports = self._rendezvous.gather(_attempt(lambda: str(act()) if is_mine else ""))
        self._tell_all(lambda: str(len(_values(reports))), plan, is_copy=is_copy)

    def _tell_all(self, act: Callable[[], str], plan: SavePlan, *, is_copy: bool = False) -> str:
        """Run ``act`` on the main rank, and return its result on all ranks; RunFailed: ``act``
        failed. ``is_copy``: the checkpoint is complete on the disk, and is copied to the store."""
        outcome = _attempt(act) if self._rank == 0 else ""
        answer = json.loads(self._rendezvous.broadcast(outcome))
        if "error" in answer:
            left = "there is no earlier checkpoint, so the next run begins where this one did"
            if read.list_checkpoints(plan.root):
                left = "earlier checkpoints are unchanged; the next run resumes from the newest"
            problem = f"cannot write the checkpoint {plan.path}: {answer['error']}"
            remedy = answer["remedy"]
            if isinstance(plan.folders, Memory):
                remedy = (
                    "name another checkpoint.memory, or unset it and checkpoint.memory_interval"
                )
                if plan.folders.num_copies > 1:
                    remedy = f"lower checkpoint.replicas, {remedy}"
            if is_copy:
                problem = f"cannot copy {plan.path} to checkpoint.store: {answer['error']}"
                remedy = "name another checkpoint.store, or unset it"
            raise RunFailed(f"{problem}; {remedy}; {left}")
        return answer["value"]

    def _write_parts(
        self, folder: Path, mine: _Groups, ready: Callable[[], object]
    ) -> dict[str, object]:
        """Write this rank's files; return their :meth:`Contents.to_json`."""
        ready()
        jobs = [
            (folder / f"{group}-{self._rank:05d}-{number:02d}.safetensors", group, parts)
            for group, all_parts in mine.items()
            for number, parts in enumerate(cut_to_files(all_parts))
        ]
        with ThreadPoolExecutor(WRITERS, thread_name_prefix="checkpoint-write") as writers:
            written = list(writers.map(_write_job, jobs))
        whole = read.Contents({}, {group: {} for group in mine})
        for contents in written:
            whole.add(contents)
        return whole.to_json()


def _write_job(job: tuple[Path, str, Mapping[str, TensorSlice]]) -> read.Contents:
    return write_tensors(*job)


class _RankFailed(OSError):
    """An OSError of another rank, with that rank's remedy: its process may have other limits."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


def _attempt(act: Callable[[], object]) -> str:
    """Return the result of ``act``, or the OSError that it raises and its remedy, as JSON."""
    try:
        return json.dumps({"value": act()})
    except _RankFailed as error:
        return json.dumps({"error": str(error), "remedy": error.remedy})
    except OSError as error:
        number = _ERRNO.search(str(error))
        remedy = disk_remedy(number and int(number[1]), "output_dir")
        return json.dumps({"error": str(error), "remedy": remedy})


def _written_here(parts: Mapping[str, TensorSlice]) -> dict[str, TensorSlice]:
    """Select the slices that this rank writes: its share of replicated ones, and no empty ones."""
    return {n: part for n, part in parts.items() if part.tensor.numel() and part.is_written_here(n)}


def cut_to_files(parts: Mapping[str, TensorSlice]) -> list[dict[str, TensorSlice]]:
    """Divide ``parts``, in order, into files of at most :data:`FILE_BYTES`."""
    files: list[dict[str, TensorSlice]] = []
    size = FILE_BYTES
    for name, part in parts.items():
        size += part.tensor.nbytes
        if size > FILE_BYTES:
            files.append({})
            size = part.tensor.nbytes
        files[-1][name] = part
    return files


def _joined(reports: Sequence[str]) -> read.Contents:
    return read.Contents.together([read.Contents.from_json(value) for value in _values(reports)])


def _values(reports: Sequence[str]) -> list[Any]:
    """Return the results of all ranks' :func:`_attempt`. Raise the OSError of the first rank that
    failed."""
    answers = [json.loads(report) for report in reports]
    for rank, answer in enumerate(answers):
        if "error" in answer:
            problem = f"rank {rank}: {answer['error']}" if rank else answer["error"]
            raise _RankFailed(problem, answer["remedy"])
    return [answer["value"] for answer in answers]


class Staging:
    """Host memory with a copy of a rank's state, for one save at a time.

    On CUDA the copies run on their own stream, into pinned memory of the size of the rank's slices.
    This memory is kept for the next save, since pinning takes far longer than copying. Call
    :meth:`hold_changes` before anything changes the state.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = HostMemory(device, "checkpoint.asynchronous", "set it to no")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: Any = None

    def copy(self, groups: _Groups) -> tuple[_Groups, Callable[[], object]]:
        """Copy the slices of ``groups`` that this rank writes.

        The copies have the values that the slices have at this point of the device's work.

        Returns:
            The copies, valid until the next call, and a function that waits until they are made.
        """
        groups = {group: _written_here(parts) for group, parts in groups.items()}
        parts = [part for named in groups.values() for part in named.values()]
        self.memory.reserve(sum(aligned(part.tensor.nbytes) for part in parts))
        start = 0
        staged: dict[str, dict[str, TensorSlice]] = {group: {} for group in groups}
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for group, named in groups.items():
                for name, part in named.items():
                    tensor = part.tensor.detach()
                    flat = self.memory.bytes[start : start + tensor.nbytes].view(tensor.dtype)
                    host = flat.view(tensor.shape).copy_(tensor, non_blocking=True)
                    staged[group][name] = part._replace(tensor=host)
                    start += aligned(tensor.nbytes)
        if self._stream is None:
            return staged, lambda: None
        self._copied = self._stream.record_event()
        return staged, self._copied.synchronize

    def hold_changes(self) -> None:
        """Make device work that is queued from here on wait for the copies."""
        copied, self._copied = self._copied, None
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)


# ---- files and folders ---------------------------------------------------------------------------


def write_tensors(path: Path, group: str, parts: Mapping[str, TensorSlice]) -> read.Contents:
    """Write parts of a group to a new safetensors file, and force it to the disk.

    Tensors on a GPU are copied to the host one :data:`CHUNK` at a time, which bounds host memory.

    Raises OSError: the file cannot be written.
    """
    # Wide dtypes first, so that every tensor is aligned.
    names = sorted(parts, key=lambda name: -parts[name].tensor.element_size())
    header, offsets, end = _header({name: parts[name].tensor for name in names})
    entries: dict[str, read.ManifestEntry] = {}
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), header)
        for name in names:
            tensor, shape, box, *_ = parts[name]
            crcs: list[str] = []
            for chunk in _host_chunks(tensor.detach()):
                crcs.append(read.crc_of(chunk))
                _write_all(file.fileno(), chunk)
            starts, stops = tuple(s.start for s in box), tuple(s.stop for s in box)
            piece = read.FilePiece(path.name, offsets[name], starts, stops, "".join(crcs))
            entries[name] = read.ManifestEntry(tensor.dtype, tuple(shape), (piece,))
        os.fsync(file.fileno())
    known = read.FileSum(end, len(header), read.crc_of(header))
    return read.Contents({path.name: known}, {group: entries})


def _header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int], int]:
    """Return a safetensors file's header, the offset of each tensor, and the file's size."""
    ends = list(accumulate((tensor.nbytes for tensor in tensors.values()), initial=0))
    described = {
        name: {
            "dtype": read.DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": place,
        }
        for (name, tensor), place in zip(tensors.items(), pairwise(ends), strict=True)
    }
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    *starts, size = (len(header) + end for end in ends)
    return header, dict(zip(tensors, starts, strict=True)), size


def _host_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of ``tensor`` in row-major order, one :data:`CHUNK` at a time.

    A chunk is valid until the next one.
    """
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    bounce = torch.empty(0)
    if flat.is_cuda:
        bounce = torch.empty(min(read.CHUNK, flat.numel()), dtype=torch.uint8, pin_memory=True)
    for chunk in split(flat, read.CHUNK) if flat.numel() else ():
        if chunk.is_cuda:
            chunk = bounce[: chunk.numel()].copy_(chunk)
        # chunk.numpy() would keep torch from resizing the storage, and offloading resizes it.
        yield memoryview((ctypes.c_char * chunk.numel()).from_address(chunk.data_ptr())).cast("B")


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of ``data``; one ``os.write`` may write less."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def remove_leftovers(root: Path) -> None:
    """Remove checkpoints that killed processes left half written or half removed.

    A replaced checkpoint gets its name back if the one that replaces it is not complete.

    Only a process that has ``root`` to itself may call this. Otherwise the call would remove a
    checkpoint that another live process is writing.
    """
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if match := _LEFTOVER.fullmatch(path.name):
            final = root / match[1]
            if match[2] == "replaced" and not final.exists():
                path.rename(final)
            else:
                shutil.rmtree(path, ignore_errors=True)


def begin(final: Path, new: Path | None = None) -> Path:
    """Make an empty folder beside ``final`` for :func:`commit`; OSError: it cannot be made."""
    new = new or _hidden(final, str(os.getpid()))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    return new


def commit(new: Path, final: Path, contents: read.Contents, state: Mapping[str, object]) -> None:
    """Complete ``new``, whose ``contents`` are on the disk, and rename it to ``final``.

    The function writes ``state.json``, and a manifest of it and of all files of ``contents``. If
    the step already had a complete checkpoint, a complete one exists at every instant, even if this
    process dies.

    Raises OSError: ``new`` cannot be written or renamed; ``final`` is unchanged.
    """
    text = json.dumps({**state, "format": read.FORMAT}, indent=1).encode()
    files = {**contents.files, read.STATE: read.FileSum(len(text), len(text), read.crc_of(text))}
    body = {"format": read.FORMAT, **read.Contents(files, contents.groups).to_json()}
    for name, data in ((read.STATE, text), (read.MANIFEST, read.sealed(json.dumps(body)))):
        with (new / name).open("xb", buffering=0) as file:
            _write_all(file.fileno(), data)
            os.fsync(file.fileno())
    replaced = _hidden(final, "replaced")
    fsync(new)
    try:
        if final.exists():  # this step was saved before
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)  # remove_leftovers renames it back if this process dies here
        new.rename(final)
        fsync(final.parent)
    finally:
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. While it is being removed, it never looks like a damaged one."""
    removed = _hidden(checkpoint, "removed")
    try:
        shutil.rmtree(removed, ignore_errors=True)
        checkpoint.rename(removed)
        shutil.rmtree(removed)
    except OSError as error:
        logger.warning("the old checkpoint %s could not be removed: %s", checkpoint, error)


def _hidden(checkpoint: Path, kind: str) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.{kind}")
