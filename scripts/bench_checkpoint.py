"""Time saving and loading a checkpoint of any recipe, beside plain files on the same disk.

    torchrun --nproc-per-node N scripts/bench_checkpoint.py RECIPE [--layers L] [--folder DIR]
        [--section.key value ...] [--results FILE]

The model has weights and moments like a run, and trains on synthetic tokens. Each figure is the
slowest rank's; all ranks begin together:

    reserve    host memory for copies is made and pinned, which a run does before its first step
    blocked    begin_save of an asynchronous save: what keeps the next step from being queued
    step       a step alone, and the slowest of those that run while a checkpoint is written
    write      a save from its first byte to its name; "first" is the process's first save, into
               memory that no write has used before
    load       everything read from the disk, checked and on the device; the files' pages are
               dropped from the page cache before
    disk       plain files of the same sizes, as many at once, written and fsynced; and read again
    host       the most memory that a process has had, pinned memory included
    same       whether the step after the load has the loss that it had after the save

The disk holds one checkpoint at a time, below --folder (default: the recipe's output_dir). One JSON
line is printed, and appended to --results. One process needs no torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_train import commit, device_name

from moetrain.checkpoint.read import CHUNK, open_checkpoint
from moetrain.checkpoint.save import FILE_BYTES, WRITERS
from moetrain.config import Config
from moetrain.config.environment import launched_place
from moetrain.models.hf.load import resolve_architecture
from moetrain.train.loop import Trainer
from moetrain.train.session import garbage_collector_off

SETTINGS = ["checkpoint.asynchronous=yes", "checkpoint.interval=0", "checkpoint.at_end=no"]
SETTINGS += ["checkpoint.minutes=0"]
SETTINGS += ["checkpoint.resume=never", "data.source=synthetic", "log.tensorboard=no"]
SETTINGS += ["train.eval_interval=0", "train.sample_tokens=0", "train.steps=1000"]


def main() -> int:
    """Measure; return 1 if the loaded state differs from the saved one."""
    parser = argparse.ArgumentParser(description="Time checkpoints.", allow_abbrev=False)
    parser.add_argument("recipe")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--results", type=Path)
    args, words = parser.parse_known_args()
    words += SETTINGS
    words += [f"model.num_layers={args.layers}"] if args.layers else []
    words += [f"output_dir={args.folder}"] if args.folder else []
    with garbage_collector_off():
        row = Bench(Config.load(args.recipe, words)).run()
    if launched_place() is None or dist.get_rank() == 0:
        print(json.dumps(row), flush=True)
        if args.results is not None:
            with args.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0 if row["same"] else 1


class Bench:
    """One rank's part of the measurement."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.trainer = Trainer(config)
        self.world, self.device = self.trainer.world, self.trainer.device

    def run(self) -> dict[str, Any]:
        """Return every figure."""
        trainer = self.trainer
        staging = trainer.checkpointer.snapshots.staging
        assert staging is not None  # SETTINGS ask for it
        row = {
            "reserve_seconds": self.slowest(
                lambda: staging.memory.reserve(trainer.engine.state_bytes())
            )
        }
        for _ in range(3):
            trainer.train_step()
        row["step_seconds"] = self.slowest(trainer.train_step)
        row |= self.save("first_")
        self.remove()
        row |= self.disk()
        row |= self.save("")
        row |= self.load()
        self.remove()
        return self.header() | row

    def header(self) -> dict[str, Any]:
        """Return what was measured, and where."""
        params = resolve_architecture(self.config.model).num_params()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "settings": self.config.describe(),
            "hardware": f"{self.world.size} x {device_name(self.device)}",
            "torch": torch.__version__,
            "commit": commit(),
            "params": params,
            "state_gib": self.num_bytes / 2**30,
            "host_peak_gib": self.largest(peak) / 2**30,
        }

    def save(self, name: str) -> dict[str, float]:
        """Time an asynchronous save while steps run."""
        trainer = self.trainer
        self.begin()
        started = time.perf_counter()
        trainer.begin_save()
        blocked = time.perf_counter() - started
        seconds, steps, losses = 0.0, [], []
        while (save := trainer.checkpointer.snapshots.under_way) is not None:
            started = time.perf_counter()
            losses.append(trainer.train_step().loss.item())
            steps.append(time.perf_counter() - started)
            # All ranks make as many steps: they continue while one of them still writes.
            if not self.largest(not save.done()):
                saved = trainer.checkpointer.snapshots.wait()
                assert saved is not None
                self.path, seconds = saved.path, saved.seconds
        self.loss = losses[0]
        sizes = {path.name: path.stat().st_size for path in self.path.iterdir()}
        own = f"-{self.world.rank:05d}-"
        self.num_bytes = sum(sizes.values())
        self.mine = sum(size for name, size in sizes.items() if own in name)
        write = self.largest(seconds)
        return {
            f"{name}blocked_seconds": self.largest(blocked),
            f"{name}slowest_step_seconds": self.largest(max(steps)),
            f"{name}write_seconds": write,
            f"{name}write_gib_per_second": self.num_bytes / 2**30 / write,
        }

    def load(self) -> dict[str, Any]:
        """Load the checkpoint from the disk, and time it."""
        trainer = self.trainer
        for path in self.path.iterdir():
            forget(path)
        found = open_checkpoint(self.path)
        identity = trainer.identity

        def restore() -> None:
            damaged = trainer.checkpointer.snapshots.restore(found, identity, trainer.total_steps)
            assert not damaged, damaged

        seconds = self.slowest(restore)
        trainer.loader.resume(found.state)
        trainer.step = found.state["step"]
        loss = trainer.train_step().loss.item()
        return {
            "load_seconds": seconds,
            "load_gib_per_second": self.num_bytes / 2**30 / seconds,
            "loss_after_save": self.loss,
            "loss_after_load": loss,
            "same": abs(loss - self.loss) <= 1e-3 * abs(loss),
        }

    def disk(self) -> dict[str, float]:
        """Write and read plain files of the sizes of this rank's files, with as many threads."""
        folder = Path(self.config.output_dir) / f"plain-{self.world.rank}"
        folder.mkdir(parents=True)
        sizes = [FILE_BYTES] * (self.mine // FILE_BYTES) + [self.mine % FILE_BYTES]
        files = [(folder / str(number), size) for number, size in enumerate(sizes)]
        data = os.urandom(CHUNK)

        def write(file: tuple[Path, int]) -> None:
            with file[0].open("wb", buffering=0) as out:
                for start in range(0, file[1], CHUNK):
                    out.write(data[: file[1] - start])
                os.fsync(out.fileno())

        def read(file: tuple[Path, int]) -> None:
            with file[0].open("rb", buffering=0) as source:
                buffer = bytearray(CHUNK)
                while source.readinto(buffer):
                    pass

        def all_files(work: Callable[[tuple[Path, int]], None]) -> None:
            with ThreadPoolExecutor(WRITERS) as threads:
                list(threads.map(work, files))

        try:
            written = self.slowest(lambda: all_files(write))
            for path, _ in files:
                forget(path)
            was_read = self.slowest(lambda: all_files(read))
        finally:
            shutil.rmtree(folder)
        gib = self.num_bytes / 2**30
        return {
            "disk_write_gib_per_second": gib / written,
            "disk_read_gib_per_second": gib / was_read,
        }

    def remove(self) -> None:
        """Remove the checkpoint."""
        self.begin()
        if self.world.is_main:
            shutil.rmtree(self.path)
        self.begin()

    # ---- clocks --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Wait until no rank has work left on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.world.barrier()

    def slowest(self, work: Callable[[], object]) -> float:
        """Return the seconds of ``work`` on the slowest rank."""
        self.begin()
        started = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.largest(time.perf_counter() - started)

    def largest(self, number: float) -> float:
        """Return the largest ``number`` of all ranks."""
        x = torch.tensor(float(number), dtype=torch.float64, device=self.device)
        if self.world.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x.item()


def forget(path: Path) -> None:
    """Drop a file's pages from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
