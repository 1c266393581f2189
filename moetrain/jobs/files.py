"""Jobs that are files: settings of data, length and learning rate, run from start to end.

    # poems.toml
    [data]
    source = "jsonl"
    path = "poems.jsonl"
    [train]
    steps = 200
    [optim]
    lr = 2e-4

What a file does not say is as the service has it, and what would need another engine it cannot say.
A job leaves in ``output_dir/files/<name of the file>``: ``metrics.jsonl``, a line a step, and in
the end ``adapter``, in PEFT's format.

Left out on purpose: reinforcement learning of a file, whose environments ``python -m moetrain.rl``
runs; evaluation, since the adapter can be evaluated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moetrain.config import Config, ConfigError
from moetrain.config_sources import shortened
from moetrain.data import Loader, build_data
from moetrain.jobs.desk import Desk
from moetrain.jobs.journal import read, write_durably
from moetrain.loss import Pretraining
from moetrain.models import Architecture
from moetrain.optim import learning_rate

SETTINGS = (
    "data.source",
    "data.path",
    "data.text_field",
    "data.chat_template",
    "data.packing",
    "data.num_documents",
    "train.steps",
    "train.epochs",
    "train.seed",
    "train.global_batch_size",
    "optim.lr",
    "optim.min_lr_ratio",
    "optim.schedule",
    "optim.warmup_steps",
    "optim.warmup_fraction",
    "optim.decay_fraction",
)
"""What a file may say."""


def open_courses(config: Config, arch: Architecture, root: Path) -> Iterator[tuple[str, Course]]:
    """The jobs of ``jobs.files``, by their files' names.

    Raises:
        ConfigError: a file that is none, settings that it cannot have, data that is not there.
    """
    found: dict[str, Path] = {}
    for path in _files(config):
        if path.stem in found:
            problem = f"{str(path)!r} has the name of {str(found[path.stem])!r}; rename one"
            raise ConfigError("jobs.files", problem)
        found[path.stem] = path
    for name, path in found.items():
        yield name, Course(settings_of(path, config), arch, root / name)


def _files(config: Config) -> Iterator[Path]:
    for name in config.jobs.files:
        path = Path(name)
        if path.is_dir():
            yield from sorted(p for p in path.iterdir() if p.suffix in (".toml", ".json"))
        else:
            yield path


def settings_of(path: Path, config: Config) -> Config:
    """The service's settings with those of a job's file on top.

    Raises:
        ConfigError: it cannot be read, or says what it cannot.
    """
    if path.suffix == ".json":
        try:
            source: str | dict[str, Any] = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError("jobs.files", f"{str(path)!r} cannot be read: {error}") from None
        if not isinstance(source, dict):
            raise ConfigError("jobs.files", f"{str(path)!r} holds no object of settings")
    else:
        source = os.fspath(path)
    mine = config.under(source)
    for name, origin in mine.origins.items():
        if origin.startswith("as "):  # an alternative to what is set
            continue
        if name not in SETTINGS:
            raise ConfigError(
                name,
                f"{shortened(str(path))} sets it, but it is the service's: a job may set "
                f"{', '.join(SETTINGS)}",
            )
    return mine


class Course:
    """The :class:`moetrain.jobs.journal.Log` of a job that is a file: its steps, and its end.

    Attributes:
        is_hopeless: whether its last steps, ``train.max_bad_steps`` of them, were all skipped.
    """

    def __init__(self, config: Config, arch: Architecture, folder: Path) -> None:
        """Tokenises the data, if no earlier run did, and finds how far the job had come.

        Raises:
            ConfigError: as :func:`moetrain.data.build_data`; or it was begun as another job.
        """
        self.config, self.folder, self.seed = config, folder, config.train.seed
        folder.mkdir(parents=True, exist_ok=True)
        whole = config.data.model_copy(update={"eval_fraction": 0.0, "eval_path": None})
        data = build_data(config.model_copy(update={"data": whole}), arch.vocab_size)
        self._check_same(data.fingerprint)
        self.loader = Loader(
            data.train,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
            seed=self.seed,
        )
        self.total_steps = config.train.total_steps(len(data.train))
        self.objective = Pretraining.of(config, arch)
        self._metrics, self._adapter = folder / "metrics.jsonl", folder / "adapter"
        rows = _whole_rows(self._metrics)
        self._skipped = 0
        for row in rows:
            self._count(row)
        self.accepted, self.done = self.total_steps + 1, len(rows)
        if len(rows) == self.total_steps and (self._adapter / "adapter_config.json").exists():
            self.done += 1

    def _check_same(self, data: str) -> None:
        """Refuse to go on with another job of the same name."""
        pairs = (name.split(".") for name in SETTINGS if name != "data.path")
        values = {f"{s}.{k}": getattr(getattr(self.config, s), k) for s, k in pairs}
        values["data.path"] = data  # known by its content
        path = self.folder / "settings.json"
        if not path.exists():
            write_durably(path, values)
        before = read(path)
        for name, value in values.items():
            if before.get(name) != value:
                raise ConfigError(
                    "jobs.files",
                    f"{str(self.folder)!r} was begun with another {name}; put that back, or rename "
                    "the file to begin anew",
                )

    @property
    def is_hopeless(self) -> bool:
        return self._skipped >= self.config.train.max_bad_steps

    def _count(self, row: Mapping[str, Any]) -> None:
        self._skipped = self._skipped + 1 if row["skipped"] else 0

    def serve(self, number: int, desk: Desk, is_given_up: Callable[[], bool]) -> dict[str, Any]:
        with desk.request(number):
            if number == self.total_steps:
                desk.engine.save_peft(self._adapter)
                return {}
            self.loader.sample_index = number * self.config.train.global_batch_size
            row = desk.learn(self.loader.next_step(), self.objective)
            lr = learning_rate(number, self.total_steps, self.config.optim)
            return {"step": number + 1, **row, **desk.step(lr), "lr": lr}

    def serve_again(self, number: int, desk: Desk) -> None:
        self.serve(number, desk, lambda: False)

    def answer(self, number: int, answer: Mapping[str, Any]) -> None:
        assert number == self.done
        if "error" in answer:  # it ends the job
            return
        if number < self.total_steps:
            with self._metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(answer["result"], allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self._count(answer["result"])
        self.done += 1

    def prune(self, seen: int) -> None:
        pass  # what is asked follows from the file


def _whole_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of lines, from which half a line at its end is removed."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]
