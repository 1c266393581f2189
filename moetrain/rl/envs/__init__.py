"""Environments: what may be asked of them, those that are shipped, and which one a run means."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from moetrain.config import ConfigError
from moetrain.config.rl import RlSection
from moetrain.config.sources import shortened
from moetrain.data.tokenizer import Tokenizer
from moetrain.rl.envs.calculator import Calculator
from moetrain.rl.envs.generated import Arithmetic, Sort, YesNoMaybe
from moetrain.rl.envs.jsonl import Jsonl, load_function
from moetrain.rl.envs.protocol import Demonstrates, Demonstration, Environment, Episode, Turn
from moetrain.rl.envs.reasoning import ReasoningGym
from moetrain.rl.envs.text import Problem, Prompts, SolvedEnvironment, TextEnvironment

__all__ = [
    "Demonstrates",
    "Demonstration",
    "Environment",
    "Episode",
    "Problem",
    "Prompts",
    "SolvedEnvironment",
    "TextEnvironment",
    "Turn",
    "open_environment",
]

GENERATED: dict[str, Callable[..., Environment]] = {
    "yes_no_maybe": YesNoMaybe,
    "sort": Sort,
    "arithmetic": Arithmetic,
    "calculator": Calculator,
}


def open_environment(settings: RlSection, tokenizer: Tokenizer) -> Environment:
    """What ``rl.env`` names, made with ``rl.env_args``.

    Raises:
        ConfigError: there is no such environment, it does not take these arguments, or what it
            needs is not there.
    """
    name, prompts = settings.env, Prompts(tokenizer, settings.chat)
    args = _arguments(settings.env_args)
    gym, _, task = name.partition(":")
    try:
        if name in GENERATED:
            return GENERATED[name](prompts, **args)
        if name == "jsonl":
            return _open_jsonl(settings, prompts, **args)
        if gym == "reasoning-gym" and task:
            return ReasoningGym(prompts, task, **args)
        others = f"{', '.join(GENERATED)}, jsonl, reasoning-gym:TASK"
        return _checked(name, load_function(name, "rl.env", others)(prompts, **args))
    except TypeError as error:  # an argument that it does not have, or of another type
        raise ConfigError("rl.env_args", f"{settings.env_args!r}: {error}") from error
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's environment, whatever it raises
        problem = f"{name!r} cannot be made: {type(error).__name__}: {shortened(str(error))}"
        raise ConfigError("rl.env", problem) from error


def _checked(name: str, environment: Any) -> Environment:
    """``environment``, if it is one as far as can be seen."""
    number = getattr(environment, "num_tasks", "missing")
    if number is not None and not (type(number) is int and number > 0):
        problem = f"its num_tasks is {shortened(number)}; None (without end), or 1 or more"
        raise ConfigError("rl.env", f"{name!r}: {problem}")
    if not callable(getattr(environment, "episode", None)):
        raise ConfigError("rl.env", f"{name!r} has no method episode(task)")
    return environment


def _open_jsonl(settings: RlSection, prompts: Prompts) -> Jsonl:
    for name in ("prompts", "reward"):
        if getattr(settings, name) is None:
            raise ConfigError(f"rl.{name}", "not set, and rl.env 'jsonl' needs it")
    assert settings.prompts is not None
    assert settings.reward is not None
    return Jsonl(prompts, settings.prompts, settings.reward)


def _arguments(text: str | None) -> dict[str, Any]:
    try:
        found = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError("rl.env_args", f"{shortened(text)} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError("rl.env_args", f"{shortened(text)} is no JSON object")
    return found
