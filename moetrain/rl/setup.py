"""What a run of reinforcement learning is made of before there is a model: its tasks and its sizes.

Everything that settings, files and the environment can be wrong about shows here, so that a dry run
(:func:`plan`) and the process that starts the ranks (:func:`inspect`) refuse what a run would.

What is trained on is known by content: a folder of prompts and functions may move between a run and
its resumption, and prompts that were edited are other ones, which are refused. Edited code is what
mends an environment in the middle of a run, which goes on with it and says so. Of a user's file
its own bytes are known; what it imports or reads is not looked at.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from moetrain.checkpoint.read import Checkpoint
from moetrain.config import Config, ConfigError
from moetrain.config.rl import RlSection
from moetrain.config.sources import shortened
from moetrain.data.tokenizer import Tokenizer, load_tokenizer
from moetrain.models.architecture import Architecture
from moetrain.parallel.processes import planned_machine
from moetrain.rl.buffer import Tasks
from moetrain.rl.envs import Demonstrates, Environment, open_environment
from moetrain.rollout.pages import PAGE_SIZE
from moetrain.train.plan import plan_memory

CODE = re.compile(r"^[0-9a-f]{64}:")
"""How a file of Python is known."""


class Setup(NamedTuple):
    """What :func:`set_up` has found."""

    total_steps: int
    num_groups: int
    """Prompts of a step."""
    num_pages: int
    """Of one rank's key/value cache."""
    tokenizer: Tokenizer
    environment: Environment
    tasks: Tasks
    identity: dict[str, str]
    """What is trained on, by the name of the setting that says so."""


def inspect(config: Config, arch: Architecture) -> None:
    """Raise ConfigError as :func:`set_up` would, on the device that a run would take here."""
    wanted = config.train.device
    has_gpu = torch.cuda.device_count() > 0  # which leaves the devices alone
    set_up(config, arch, "cuda" if wanted == "cuda" or (has_gpu and wanted == "auto") else "cpu")


def plan(config: Config, arch: Architecture) -> str:
    """Refuse what a run of ``config`` would refuse; returns the memory it takes, in words.

    Raises:
        ConfigError: as :func:`set_up` and :func:`moetrain.train.plan.plan_memory`.
    """
    set_up(config, arch, planned_machine(config).device.type)
    return plan_memory(config, arch, generates=True)


def set_up(config: Config, arch: Architecture, device_type: str) -> Setup:
    """Look at everything that ``config`` names. Imports the user's files and opens the environment.

    Raises:
        ConfigError: settings of several sections do not fit, one has no effect on this model or
            cannot run on this device, or something named is not there.
    """
    rl = config.rl
    if device_type == "cuda" and config.kernels.backend == "reference":
        problem = "'reference' has no generation on CUDA; use auto, or train.device cpu"
        raise ConfigError("kernels.backend", problem)
    if config.kernels.precision != "bf16":
        problem = f"{config.kernels.precision!r}, but what is learned from is generated in bf16"
        raise ConfigError("kernels.precision", f"{problem}; unset it")
    if rl.routing_replay and not arch.num_experts:
        problem = f"true, but {arch.family} has no experts; unset it"
        raise ConfigError("rl.routing_replay", problem)
    total_steps, num_groups, num_pages = _steps(config), _groups(config), pages_of(config)
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > arch.vocab_size:
        raise ConfigError(
            "data.tokenizer",
            f"{config.data.tokenizer!r} has {tokenizer.vocab_size} tokens, more than the "
            f"model's vocabulary of {arch.vocab_size}; use the model's own",
        )
    environment = open_environment(rl, tokenizer)
    if rl.supervised_steps and not isinstance(environment, Demonstrates):
        problem = f"{rl.supervised_steps}, but rl.env {rl.env!r} shows nothing"
        raise ConfigError("rl.supervised_steps", problem)
    tasks = Tasks(environment.num_tasks, rl.eval_tasks, config.train.seed)
    identity = _identity(rl, environment) | {"data.tokenizer": tokenizer.fingerprint}
    return Setup(total_steps, num_groups, num_pages, tokenizer, environment, tasks, identity)


def _steps(config: Config) -> int:
    steps, supervised = config.train.steps, config.rl.supervised_steps
    if steps is None:
        raise ConfigError("train.epochs", "reinforcement learning counts steps: train.steps")
    if supervised > steps:
        problem = f"{supervised} are more than train.steps {steps}, all of them"
        raise ConfigError("rl.supervised_steps", problem)
    return steps


def _groups(config: Config) -> int:
    rl = config.rl
    size = config.train.global_batch_size * rl.updates_per_rollout
    number, left = divmod(size, rl.group_size)
    if left or number < rl.updates_per_rollout:
        raise ConfigError(
            "rl.group_size",
            f"{rl.group_size} does not divide the {size} trajectories of a step "
            "(train.global_batch_size x rl.updates_per_rollout) into a group for each update",
        )
    return number


def pages_of(config: Config) -> int:
    """Pages of one rank's key/value cache; ConfigError: they do not hold a row."""
    rl, longest = config.rl, config.data.seq_len
    if rl.cache_tokens is None:
        return rl.max_sequences * -(-longest // PAGE_SIZE)
    if rl.cache_tokens // PAGE_SIZE * PAGE_SIZE < longest:
        raise ConfigError(
            "rl.cache_tokens",
            f"{rl.cache_tokens}, in pages of {PAGE_SIZE}, do not hold a row of data.seq_len "
            f"{longest}; raise it",
        )
    return rl.cache_tokens // PAGE_SIZE


def _identity(rl: RlSection, environment: Environment) -> dict[str, str]:
    prompts = None if rl.prompts is None else _digest(Path(os.path.expanduser(rl.prompts)))
    number = environment.num_tasks  # those held out are drawn from so many
    return {
        "rl.env": _function(rl.env),
        "rl.env_args": str(rl.env_args),
        "rl.prompts": str(prompts),
        "rl.reward": _function(str(rl.reward)),
        "rl.eval_tasks": f"{rl.eval_tasks}" if number is None else f"{rl.eval_tasks} of {number}",
    }


def _function(name: str) -> str:
    """``FILE.py:NAME`` with the file's content in place of its path; anything else as it is."""
    file, _, key = name.rpartition(":")
    path = Path(os.path.expanduser(file))
    return f"{_digest(path)}:{key}" if file and path.is_file() else name


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def without_code(identity: Mapping[str, str]) -> dict[str, str]:
    """``identity``, in which files of Python are all the same."""
    return {name: CODE.sub("FILE.py:", value) for name, value in identity.items()}


def check_same_tasks(found: Checkpoint, config: Config, identity: dict[str, str]) -> list[str]:
    """The settings whose code is another than that of the run that ``found`` is of.

    Raises:
        ConfigError: what it was trained on is, by the setting.
    """
    before = identity | found.state.get("tasks", {})
    then, now = without_code(before), without_code(identity)
    for name, was in then.items():
        if was != now.get(name):
            section, _, key = name.partition(".")
            value = now[name]  # "64 of 1000"
            if key != "eval_tasks":
                value = shortened(getattr(getattr(config, section), key))
            raise ConfigError(
                name,
                f"{value} is another than {str(found.folder)!r} was trained with, or was edited "
                "since; put that back, or begin anew: checkpoint.resume never, or another "
                "output_dir",
            )
    return [name for name, was in before.items() if was != identity[name]]
