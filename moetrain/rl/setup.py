"""The tasks and the sizes of a run of reinforcement learning, found before its model is built.

All errors in settings, files and the environment are raised here. So a dry run, and the process
that starts the ranks, refuse what a run would refuse.

Training data is identified by its content. A folder of prompts and functions may move between a run
and its resumption, but edited prompts are refused. Edited code may repair an environment, so the
run continues with it and logs that. A user's file is compared by its bytes; the modules that it
imports are not compared.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np

from moetrain.checkpoint.read import Checkpoint
from moetrain.config import Config, ConfigError
from moetrain.config.environment import launched_place
from moetrain.config.sources import shortened
from moetrain.data.chat import ChatTemplate
from moetrain.data.tokenizer import load_tokenizer
from moetrain.generate.pages import Pages
from moetrain.models.architecture import Architecture
from moetrain.parallel.processes import planned_machine
from moetrain.rl.collect import try_reward
from moetrain.rl.envs.shipped import Jsonl, open_environment
from moetrain.rl.learn import ServedTeacher
from moetrain.train.estimates.memory import teacher_of
from moetrain.train.estimates.plan import plan_memory

_CODE = re.compile(r"^[0-9a-f]{64}:")
"""Pattern of the digest that stands for a Python file in an identity."""


class Setup:
    """The tasks and sizes of a run.

    Attributes:
        num_groups: the number of prompts of a step.
        num_pages: the number of pages of one rank's key/value cache.
        identity: for each setting that decides what the run is trained on, a text that identifies
            that content.
    """

    def __init__(
        self, config: Config, arch: Architecture, device_type: str, *, is_plan: bool = False
    ) -> None:
        """Import the user's files, make the environment and try the reward function.

        Raises:
            ConfigError: settings of different sections contradict one another, one cannot run on
                this device, or something that a setting names does not exist.
            RunFailed: ``is_plan`` is True, and the reward function fails (:func:`try_reward`).
        """
        if device_type == "cuda" and config.kernels.backend == "reference":
            problem = "'reference' has no generation on CUDA; use auto, or train.device cpu"
            raise ConfigError("kernels.backend", problem)
        if config.kernels.precision != "bf16":
            problem = f"{config.kernels.precision!r}, but trajectories are generated in bf16"
            raise ConfigError("kernels.precision", f"{problem}; unset it")
        if config.train.target_loss is not None:
            problem = f"{config.train.target_loss}, but evaluations measure rewards, not a loss"
            raise ConfigError("train.target_loss", f"{problem}; unset it")
        self.config, rl = config, config.rl
        self.total_steps, self.num_groups = _steps_and_groups(config)
        self.window = PromptWindow(rl.max_staleness * self.num_groups)
        self.num_pages = Pages.number_for(config)
        if rl.overlong_buffer > rl.max_tokens:
            problem = f"{rl.overlong_buffer} is more than rl.max_tokens {rl.max_tokens}"
            raise ConfigError("rl.overlong_buffer", f"{problem}; lower it, or raise rl.max_tokens")
        data = config.data
        self.tokenizer = tokenizer = load_tokenizer(
            data.tokenizer, arch.vocab_size, data.new_tokens
        )
        ChatTemplate.put_in(tokenizer, data.chat_template, data.chat_template_kwargs)
        least = max(tokenizer.vocab_size, rl.teacher_top_k)
        place = launched_place()
        if rl.is_teacher_served:
            if place is None or place.rank == 0:
                ServedTeacher(config).check(tokenizer)
        elif rl.teacher is not None and teacher_of(rl.teacher).vocab_size < least:
            problem = f"{rl.teacher!r} has fewer than the {least} tokens of data.tokenizer"
            raise ConfigError("rl.teacher", f"{problem}; name a teacher with the same tokenizer")
        self.environment = environment = open_environment(rl, tokenizer)
        if isinstance(environment, Jsonl):
            try_reward(environment, str(rl.reward), rl.step_timeout, is_plan=is_plan)
            environment.warn_of_room(data.seq_len, rl.max_tokens)
        if rl.supervised_steps and not hasattr(environment, "demonstrate"):
            problem = f"{rl.supervised_steps}, but rl.env {rl.env!r} has no demonstrations"
            remedy = "set 0, or give the environment a method demonstrate"
            origin = config.origins.get("rl.supervised_steps")
            if origin and config.model.path is None and not config.is_users("rl.supervised_steps"):
                problem = problem.replace(",", f" ({origin}),", 1)
                remedy = f"set model.path without naming a recipe, {remedy}"
            raise ConfigError("rl.supervised_steps", f"{problem}; {remedy}")
        self.tasks = Tasks(environment.num_tasks, rl.eval_tasks, config.train.seed)
        number, held_out = environment.num_tasks, str(rl.eval_tasks)
        self.identity = {
            "rl.env": _function(rl.env),
            "rl.env_args": str(rl.env_args),
            "rl.prompts": "None" if rl.prompts is None else _digest(rl.prompts),
            "rl.reward": _function(str(rl.reward)),
            # Held-out tasks are drawn from all tasks, so their number counts.
            "rl.eval_tasks": held_out if number is None else f"{held_out} of {number}",
            "data.tokenizer": tokenizer.fingerprint,
            "data.chat_template": str(tokenizer.given_template),
            "data.chat_template_kwargs": str(data.chat_template_kwargs),
        }

    @classmethod
    def plan(cls, config: Config, arch: Architecture) -> str:
        """Describe the memory that a run takes, and its first prompt if it is one of a file; raises
        the ConfigError that the run would raise.

        Raises RunFailed: the reward function fails for the first line of ``rl.prompts``.
        """
        environment = cls(
            config, arch, planned_machine(config).device.type, is_plan=True
        ).environment
        begins = [environment.preview()] if isinstance(environment, Jsonl) else []
        return "\n".join([*begins, plan_memory(config, arch, generates=True)])

    @property
    def digest(self) -> str:
        """SHA-256 of :attr:`identity` without the code of a user's files, in hexadecimal."""
        tasks = _without_code(self.identity)
        tasks = {x: y for x, y in tasks.items() if y != "None" or "chat_template" not in x}
        return hashlib.sha256(json.dumps(tasks).encode()).hexdigest()

    def edited_since(self, found: Checkpoint) -> list[str]:
        """Return the names of settings whose code was edited since the checkpoint ``found``.

        Raises ConfigError: the checkpoint was trained on other data.
        """
        before = self.identity | found.state.get("tasks", {})
        then, now = _without_code(before), _without_code(self.identity)
        for name, was in then.items():
            if was == now.get(name):
                continue
            value = now[name]  # "64 of 1000"
            if name != "rl.eval_tasks":
                value = shortened(attrgetter(name)(self.config))
            raise ConfigError(
                name,
                f"{value} is not what {str(found.folder)!r} was trained with, or was edited "
                "since; put that back, or begin again with checkpoint.resume never or another "
                "output_dir",
            )
        return [name for name, was in before.items() if was != self.identity[name]]


def _steps_and_groups(config: Config) -> tuple[int, int]:
    """Return the number of steps of the run, and of groups in a step.

    Raises ConfigError: ``train.steps`` is not set or is less than ``rl.supervised_steps``, or
    ``rl.group_size`` does not divide a step's trajectories.
    """
    train, rl = config.train, config.rl
    if train.steps is None:
        problem = f"{train.epochs}, but reinforcement learning counts steps"
        raise ConfigError("train.epochs", f"{problem}; set train.steps instead")
    if rl.supervised_steps > train.steps:
        problem = f"{rl.supervised_steps} is more than train.steps {train.steps}, the whole run"
        raise ConfigError("rl.supervised_steps", f"{problem}; lower it, or raise train.steps")
    size = train.global_batch_size * rl.updates_per_rollout
    number, left = divmod(size, rl.group_size)
    if left or number < rl.updates_per_rollout:
        raise ConfigError(
            "rl.group_size",
            f"{rl.group_size} does not divide the {size} trajectories of a step "
            "(train.global_batch_size x rl.updates_per_rollout) into a group for each update; "
            "make train.global_batch_size a multiple of it",
        )
    return train.steps, number


def _function(name: str) -> str:
    """Return ``name`` with the digest of the file in place of its path, if it names a file."""
    file, _, key = name.removeprefix("agent:").rpartition(":")
    return f"{_digest(file)}:{key}" if os.path.isfile(os.path.expanduser(file)) else name


def _digest(file: str) -> str:
    return hashlib.sha256(Path(os.path.expanduser(file)).read_bytes()).hexdigest()


def _without_code(identity: Mapping[str, str]) -> dict[str, str]:
    return {name: _CODE.sub("FILE.py:", value) for name, value in identity.items()}


# ---- which prompts when ---------------------------------------------------------------------


@dataclass
class PromptWindow:
    """A sliding window over the run's sequence of prompts: those that have begun, and those due.

    A step takes the next prompts and waits for exactly those. With ``rl.max_staleness`` s, the
    prompts of the next s steps have begun by then, and their generation continues across the
    updates. So a trajectory begins at most s steps before the step that trains it, and the prompts
    of a step do not depend on the speed of any rank.

        s = 1, 4 prompts a step     begun before step 0 trains: 0 to 7    taken: 0 to 3
                                                        step 1: 8 to 11          4 to 7

    Each of W ranks generates every W-th prompt, whatever share of the data it trains.
    """

    ahead: int
    """The number of prompts beyond a step's own that have begun when it trains."""
    taken: int = 0
    """The number of prompts that were due so far."""
    begun: int = 0

    def advance(self, number: int) -> tuple[range, range]:
        """Make the next ``number`` prompts due; return those to begin now, and those to take."""
        due = range(self.taken, self.taken + number)
        new = range(self.begun, max(self.begun, due.stop + self.ahead))
        self.taken, self.begun = due.stop, new.stop
        return new, due


class Tasks:
    """An environment's tasks, split into held-out tasks and trained ones.

    If their number is finite, tasks are shuffled once, always in the same way, so that neither part
    is just the start of a sorted file. The trained ones come in another order in each epoch.
    """

    def __init__(self, num_tasks: int | None, num_held_out: int, seed: int) -> None:
        """``num_tasks`` None: there is no end. Raises ConfigError: none would be left to train."""
        if num_tasks is not None and num_held_out >= num_tasks:
            problem = f"{num_held_out} of {num_tasks} tasks leave none to train; lower it"
            raise ConfigError("rl.eval_tasks", problem)
        self.num_held_out, self.seed = num_held_out, seed
        self._shuffled = None
        if num_tasks is not None:
            self._shuffled = np.random.default_rng(0).permutation(num_tasks)
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def held_out(self, index: int) -> int:
        """Return the number of a held-out task."""
        return index if self._shuffled is None else int(self._shuffled[index])

    def trained(self, prompt: int) -> int:
        """Return the number of the task that is the run's prompt number ``prompt``."""
        if self._shuffled is None:
            return self.num_held_out + prompt
        trained = self._shuffled[self.num_held_out :]
        epoch, index = divmod(prompt, len(trained))
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._epoch, self._order = epoch, generator.permutation(trained)
        return int(self._order[index])
