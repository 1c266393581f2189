"""The tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym), as an extra."""

from __future__ import annotations

import importlib.util
from typing import Any

from moetrain.config import ConfigError
from moetrain.config.sources import shortened
from moetrain.rl.envs.text import Problem, Prompts, SolvedEnvironment

SIZE = 2**31 - 1
"""Problems of a task: they are made when asked for, without end as far as a run is concerned."""


class ReasoningGym(SolvedEnvironment):
    """Task ``name``, with what its own configuration takes: ``seed``, sizes, ..."""

    def __init__(self, prompts: Prompts, name: str, **settings: Any) -> None:
        super().__init__(prompts)
        if importlib.util.find_spec("reasoning_gym") is None:
            problem = f"{name!r} needs reasoning-gym, which is not installed"
            raise ConfigError("rl.env", f"{problem}; pip install 'moetrain[rl]'")
        reasoning_gym = importlib.import_module("reasoning_gym")  # a second
        try:
            settings = {"seed": 0, "size": SIZE, **settings}
            self._dataset: Any = reasoning_gym.create_dataset(name, **settings)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError("rl.env", f"reasoning-gym:{name}: {shortened(str(error))}") from None

    def problem(self, task: int) -> Problem:
        entry = self._dataset[task % len(self._dataset)]
        prompt = entry["question"] if self.prompts.chat else f"{entry['question']}\n"
        return Problem(prompt, str(entry["answer"]), entry)

    def score(self, problem: Problem, answer: str) -> float:
        return float(self._dataset.score_answer(answer.strip(), problem.facts))
