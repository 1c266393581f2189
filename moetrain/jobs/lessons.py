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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moetrain.config import Config, ConfigError
from moetrain.config.sources import shortened
from moetrain.data.build import build_data
from moetrain.data.loader import Batch, Loader
from moetrain.models.architecture import Architecture
from moetrain.optim.schedule import learning_rate
from moetrain.parallel.world import World
from moetrain.train.objectives import Pretraining

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


class Lessons:
    """What one job learns: a micro-batch or several for each of its steps.

    Attributes:
        config: the service's, with what the file says.
        total_steps, objective, data: how long, by what, and the hash of from what.
    """

    def __init__(self, config: Config, arch: Architecture, rank: int, ranks: int) -> None:
        """Tokenises the data, if no earlier run did; raises ConfigError as ``build_data``."""
        whole = config.data.model_copy(update={"eval_fraction": 0.0, "eval_path": None})
        data = build_data(config.model_copy(update={"data": whole}), arch.vocab_size)
        self.config, self.data = config, data.fingerprint
        self.loader = Loader(
            data.train,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
            seed=config.train.seed,
            rank=rank,
            world_size=ranks,
        )
        self.total_steps = config.train.total_steps(len(data.train))
        self.objective = Pretraining.of(config, arch)

    def batches(self, step: int) -> list[Batch]:
        """This rank's of a step, from 0."""
        self.loader.sample_index = step * self.config.train.global_batch_size
        return self.loader.next_step()

    def lr(self, step: int) -> float:
        """Its learning rate."""
        return learning_rate(step, self.total_steps, self.config.optim)


def open_lessons(config: Config, world: World, arch: Architecture) -> dict[str, Lessons]:
    """Those of ``jobs.files``, by the files' names. Collective.

    Raises:
        ConfigError: a file that is none, settings that it cannot have, data that is not there.
    """
    paths: dict[str, Path] = {}
    for path in _files(config):
        if path.stem in paths:
            problem = f"{str(path)!r} has the name of {str(paths[path.stem])!r}; rename one"
            raise ConfigError("jobs.files", problem)
        paths[path.stem] = path
    settings = {name: settings_of(path, config) for name, path in paths.items()}
    if not world.is_first_on_machine:
        world.barrier()  # for the first one's tokenising: its cache serves all
    place = (world.data_rank, world.dims.data_ranks)
    found = {name: Lessons(mine, arch, *place) for name, mine in settings.items()}
    if world.is_first_on_machine:
        world.barrier()
    return found


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
