"""Environments of one question and one answer, both text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from moetrain.data.tokenizer import Tokenizer
from moetrain.rl.envs.protocol import Demonstration, Environment, Episode, Turn
from moetrain.rollout.text import chat_ids


class Problem(NamedTuple):
    """A question; what else the one who scores answers has to know."""

    prompt: str | list[Any]
    """Text to be continued; or a conversation (``[{"role": ..., "content": ...}, ...]``)."""
    answer: str = ""
    """A right one, where it is known."""
    facts: Any = None
    """Whatever ``score`` needs besides."""
    record: Mapping[str, Any] = MappingProxyType({})
    """``tools``, ``documents`` and ``chat_template_kwargs`` for the chat template, if any."""


class Prompts:
    """Prompts as tokens: as they are, or as a user's turn by the tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer, chat: bool) -> None:
        self.tokenizer, self.chat = tokenizer, chat

    def encode(
        self, prompt: str | list[Any], record: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[int, ...]:
        """The tokens that an answer to ``prompt`` continues; ConfigError where there are none."""
        if isinstance(prompt, str) and not self.chat:
            return tuple(self.tokenizer.encode_prompt(prompt))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return chat_ids(self.tokenizer, messages, record)

    def text(self, text: str) -> tuple[int, ...]:
        """Tokens of ``text`` alone."""
        return tuple(self.tokenizer.encode_batch([text])[0].ids.tolist())

    def ended(self, text: str) -> tuple[int, ...]:
        """Tokens of ``text`` as a whole turn of the policy's."""
        return (*self.text(text), self.tokenizer.eos_id)


class TextEnvironment(Environment, ABC):
    """An :class:`Environment` of problems: one answer each, scored once."""

    num_tasks: int | None = None

    def __init__(self, prompts: Prompts) -> None:
        self.prompts = prompts

    @abstractmethod
    def problem(self, task: int) -> Problem:
        """Problem number ``task``, the same at every call."""

    @abstractmethod
    def score(self, problem: Problem, answer: str) -> float | Awaitable[float]:
        """The reward of ``answer``: 1 for one that is quite right, by custom."""

    def episode(self, task: int) -> Episode:
        problem = self.problem(task)
        return _OneAnswer(self, problem)


class _OneAnswer(Episode):
    def __init__(self, environment: TextEnvironment, problem: Problem) -> None:
        self._environment, self._problem = environment, problem

    def reset(self) -> Turn:
        problem = self._problem
        return Turn(self._environment.prompts.encode(problem.prompt, problem.record))

    def step(self, action: Sequence[int]) -> Turn | Awaitable[Turn]:
        text = self._environment.prompts.tokenizer.decode(action)
        score = self._environment.score(self._problem, text)
        return _later(score) if isinstance(score, Awaitable) else Turn(reward=score, done=True)


async def _later(score: Awaitable[float]) -> Turn:
    return Turn(reward=await score, done=True)


class SolvedEnvironment(TextEnvironment):
    """Whose problems have a known answer, which can be shown."""

    def demonstrate(self, task: int) -> Demonstration:
        """See :class:`~moetrain.rl.envs.protocol.Demonstrates`."""
        problem = self.problem(task)
        prompt = self.prompts.encode(problem.prompt, problem.record)
        answer = self.prompts.ended(problem.answer)
        return Demonstration(prompt + answer, (False,) * len(prompt) + (True,) * len(answer))
