"""Prompts from a jsonl file, and answers scored by a function, of the user or of ours.

A line holds ``prompt`` (text) or ``messages`` (a conversation, by the chat template, with the
``tools``, ``documents`` and ``chat_template_kwargs`` of the line), and whatever the reward function
needs: ``answer``, for ours.

    def reward(line: dict, answer: str) -> float: ...        # in file.py; async def goes as well
    rl.reward = "file.py:reward"
"""

from __future__ import annotations

import copy
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import CodeType
from typing import Any

from moetrain.config import ConfigError
from moetrain.config.sources import shortened
from moetrain.data.chat import BadLineError, template_variables
from moetrain.rl.envs import Problem, Prompts, TextEnvironment

Reward = Callable[[dict[str, Any], str], "float | Awaitable[float]"]


class Jsonl(TextEnvironment):
    """The lines of ``path`` as problems, scored by the function that ``reward`` names."""

    def __init__(self, prompts: Prompts, path: str, reward: str) -> None:
        super().__init__(prompts)
        self.lines = _read_lines(Path(os.path.expanduser(path)))
        self.num_tasks = len(self.lines)
        self.reward = _find_reward(reward)
        bad = [i for i, line in enumerate(self.lines, 1) if line.get("answer") is None]
        if reward in _SHIPPED and bad:
            raise ConfigError(
                "rl.prompts", f"{path!r} line {bad[0]}: no answer, which {reward} needs"
            )

    def problem(self, task: int) -> Problem:
        line = self.lines[task]
        prompt = line.get("prompt")  # null in files made of tables, where messages has a value
        if prompt is None:
            return Problem(line["messages"], facts=line, record=line)
        return Problem(prompt, facts=line)

    def score(self, problem: Problem, answer: str) -> float | Awaitable[float]:
        return self.reward(copy.deepcopy(problem.facts), answer)  # it may change its copy


def _find_reward(name: str) -> Reward:
    """Return the function that ``rl.reward`` names: ``exact``, ``math`` or ``file.py:function``.

    Raises:
        ConfigError: there is none, it cannot be called with a line and an answer, or the package
            that ``math`` needs is not installed.
    """
    if name in _SHIPPED:
        return _SHIPPED[name]()
    reward = load_function(name, "rl.reward", ", ".join(_SHIPPED))
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # a function in C may have no signature
        return reward
    try:
        signature.bind({}, "")
    except TypeError as error:
        problem = f"{name!r} takes {signature}, and is called with a line and an answer: {error}"
        raise ConfigError("rl.reward", problem) from None
    return reward


def _exact() -> Reward:
    return lambda line, answer: float(answer.strip() == str(line["answer"]).strip())


def _math() -> Reward:
    """Score with math-verify, which understands LaTeX and different ways to write a number."""
    if importlib.util.find_spec("math_verify") is None:
        problem = "'math' needs math-verify, which is not installed; pip install 'moetrain[rl]'"
        raise ConfigError("rl.reward", problem)
    math_verify = importlib.import_module("math_verify")  # a second
    parse, verify = math_verify.parse, math_verify.verify

    def score(line: dict[str, Any], answer: str) -> float:
        # Its own time limits take signals, which only the main thread has; the call has ours.
        gold = parse(str(line["answer"]), parsing_timeout=None)
        return float(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))

    return score


_SHIPPED: dict[str, Callable[[], Reward]] = {"exact": _exact, "math": _math}


class _AsItIsNow(importlib.machinery.SourceFileLoader):
    """Compiles the file anew; Python's own loader takes its cached byte code for a file that was
    edited within the same second and kept its length."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def load_function(name: str, field: str, others: str) -> Callable[..., Any]:
    """Import the function or class ``file.py:name``, which runs the file.

    Raises:
        ConfigError: there is none; the line names ``field`` and the ``others`` that it may be.
    """
    file, _, key = name.rpartition(":")
    path = Path(os.path.expanduser(file))
    if not key or not path.is_file():
        raise ConfigError(field, f"{name!r} is neither {others} nor FILE.py:NAME of a file")
    if path.suffix != ".py":
        raise ConfigError(field, f"{file!r} is no Python file; its name must end in .py")
    module_name = f"moetrain_user_{path.stem.replace('.', '_')}"  # a dot would mean a package
    loader = _AsItIsNow(module_name, str(path))
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look it up
    try:
        loader.exec_module(module)
        found = getattr(module, key)
    except (Exception, SystemExit) as error:  # a user's file, whatever it raises
        problem = f"cannot load {name!r}: {type(error).__name__}: {shortened(str(error))}"
        raise ConfigError(field, problem) from error
    if not callable(found):
        raise ConfigError(field, f"{name!r} is a {type(found).__name__}, which cannot be called")
    return found


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        texts = path.read_text("utf-8").split("\n")  # JSON text may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("rl.prompts", f"cannot read {str(path)!r}: {error}") from None
    lines = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError("rl.prompts", f"{str(path)!r} line {number}: {error}") from None
        is_good = isinstance(line, dict) and (
            isinstance(line.get("prompt"), str)
            or (line.get("prompt") is None and isinstance(line.get("messages"), list))
        )
        if not is_good:
            problem = f"{str(path)!r} line {number} has neither a prompt nor messages"
            raise ConfigError("rl.prompts", problem)
        try:
            template_variables(line if line.get("prompt") is None else {})
        except BadLineError as error:
            problem = f"{str(path)!r} line {number}: {error}"
            raise ConfigError("rl.prompts", problem) from None
        lines.append(line)
    if not lines:
        raise ConfigError("rl.prompts", f"{str(path)!r} has no lines")
    return lines
