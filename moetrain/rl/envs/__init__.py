"""Environments: the interface that reinforcement learning needs, and a base for text tasks.

    environment.episode(task)    one attempt at a task, with a state of its own
    episode.reset()              -> the prompt
    episode.step(action)         -> what the policy reads next, a reward, and whether it is over

Episodes exchange token ids with the policy. :class:`TextEnvironment` converts them for tasks that
are text.
Each method may be plain or ``async``, and each call has a time limit. Plain methods should answer
at once. Asynchronous methods run beside generation. They share one event loop and must not block it
(:mod:`moetrain.rl.calls`).

The environments that ship with moetrain are in :mod:`moetrain.rl.envs.shipped`.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from moetrain.data.chat import ChatTemplate
from moetrain.data.tokenizer import Tokenizer
from moetrain.generate.request import chat_ids


class Turn(NamedTuple):
    """An environment's answer."""

    tokens: tuple[int, ...] = ()
    """Tokens that the policy reads before it acts; ``reset`` returns at least one."""
    reward: float = 0.0
    """Reward of the previous action, a finite number. A trajectory's rewards are added up."""
    done: bool = False
    """True: the episode ends here, and ``tokens`` are ignored."""
    new_segment: bool = False
    """True: ``tokens`` are a whole prompt, and the policy no longer sees the tokens before them."""
    max_tokens: int | None = None
    """Most tokens of the policy's next turn; None: as many as the trajectory has room for."""
    stop: tuple[str, ...] = ()
    """Texts that end the policy's next turn."""
    on_tokens: Callable[[Sequence[int]], object] | None = None
    """A function that gets new tokens of the policy's next turn as they are generated. The turn's
    last tokens go to ``step`` alone. The function runs on the event loop and must not block it."""


class Demonstration(NamedTuple):
    """A whole trajectory, to be imitated."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    """One bool for each token. True: the policy learns to write it. False: it comes from the
    environment."""


class Episode(Protocol):
    """One attempt at a task.

    After a restart a new episode of the same task gets the same actions again, and must answer
    with the same tokens. If the episode has a method ``close``, it is called in a thread when the
    trajectory ends before the episode does.
    """

    def reset(self) -> Turn | Awaitable[Turn]:
        """Return the prompt. Called once, first."""
        ...

    def step(self, action: Sequence[int]) -> Turn | Awaitable[Turn]:
        """Answer ``action``, the tokens of the policy's turn up to its stop or its limit."""
        ...


class Environment(Protocol):
    """Numbered tasks. A number names the same task at every call and on every rank.

    For ``rl.supervised_steps`` it also has a method ``demonstrate(task)``, which returns a
    :class:`Demonstration`.
    """

    num_tasks: int | None
    """Tasks are 0 to ``num_tasks - 1``; None: they have no end."""

    def episode(self, task: int) -> Episode:
        """Begin a new attempt at ``task``."""
        ...


class Problem(NamedTuple):
    """A question, with all that is needed to score its answers."""

    prompt: str | list[Any]
    """Text to be continued, or a conversation (``[{"role": ..., "content": ...}, ...]``)."""
    answer: str = ""
    """A right answer, if one is known."""
    facts: Any = None
    """Anything else that ``score`` needs."""
    record: Mapping[str, Any] = MappingProxyType({})
    """Variables of the chat template: ``tools``, ``documents``, ``chat_template_kwargs``."""


class Prompts:
    """Turns prompts into tokens, and tokens into text."""

    def __init__(
        self, tokenizer: Tokenizer, chat: bool, *, skip_special_tokens: bool = True
    ) -> None:
        """Set how texts are converted.

        Args:
            chat: True: a text is encoded as a user's turn of a chat; False: as it is.
            skip_special_tokens: True: decoded texts leave out special tokens.
        """
        self.tokenizer, self.chat = tokenizer, chat
        self.skip_special_tokens = skip_special_tokens

    def encode(
        self, prompt: str | list[Any], record: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[int, ...]:
        """Return the tokens of ``prompt``, which an answer continues.

        Raises ValueError: a text has no tokens. Raises ConfigError: a conversation is malformed, or
        the chat template refuses it.
        """
        if (messages := self._messages(prompt)) is None:
            return tuple(self.tokenizer.encode_prompt(str(prompt)))
        return chat_ids(self.tokenizer, messages, record, strict=True)

    def check(self, prompt: str | list[Any], record: Mapping[str, Any]) -> None:
        """Raise BadLineError if the chat template leaves out a part of ``prompt``."""
        if (messages := self._messages(prompt)) is not None:
            template = ChatTemplate.of(self.tokenizer)
            template.check_prompt(messages, template.variables_of(record))

    def _messages(self, prompt: str | list[Any]) -> list[Any] | None:
        """Return ``prompt`` as a conversation; None: it is a text to be continued."""
        if isinstance(prompt, list):
            return prompt
        return [{"role": "user", "content": prompt}] if self.chat else None

    def decode(self, action: Sequence[int]) -> str:
        """Return the text of the policy's tokens, as ``rl.skip_special_tokens`` says."""
        return self.tokenizer.decode(action, skip_special_tokens=self.skip_special_tokens)

    def text(self, text: str) -> tuple[int, ...]:
        """Return the tokens of ``text``, without any that begin or end a prompt."""
        return tuple(self.tokenizer.encode_batch([text])[0].ids.tolist())

    def ended(self, text: str) -> tuple[int, ...]:
        """Return the tokens of ``text`` as a whole turn of the policy, with the end token."""
        return (*self.text(text), self.tokenizer.eos_id)


class TextEnvironment(Environment, ABC):
    """An :class:`Environment` of problems in text. Each gets one answer, which is scored."""

    num_tasks: int | None = None

    def __init__(self, prompts: Prompts) -> None:
        self.prompts = prompts

    @abstractmethod
    def problem(self, task: int) -> Problem:
        """Return problem number ``task``, the same at every call."""

    @abstractmethod
    def score(self, problem: Problem, answer: str) -> float | Awaitable[float]:
        """Return the reward of ``answer``. By convention a right answer gets 1."""

    def episode(self, task: int) -> Episode:
        return _OneAnswer(self, self.problem(task))


class _OneAnswer(Episode):
    """An episode of one question and one answer."""

    def __init__(self, environment: TextEnvironment, problem: Problem) -> None:
        self._environment, self._problem = environment, problem

    def reset(self) -> Turn:
        problem = self._problem
        return Turn(self._environment.prompts.encode(problem.prompt, problem.record))

    def step(self, action: Sequence[int]) -> Turn | Awaitable[Turn]:
        text = self._environment.prompts.decode(action)
        score = self._environment.score(self._problem, text)
        return _later(score) if isinstance(score, Awaitable) else Turn(reward=score, done=True)


async def _later(score: Awaitable[float]) -> Turn:
    return Turn(reward=await score, done=True)


class SolvedEnvironment(TextEnvironment):
    """A :class:`TextEnvironment` whose problems have a known answer to demonstrate."""

    def demonstrate(self, task: int) -> Demonstration:
        problem = self.problem(task)
        prompt = self.prompts.encode(problem.prompt, problem.record)
        answer = self.prompts.ended(problem.answer)
        return Demonstration(prompt + answer, (False,) * len(prompt) + (True,) * len(answer))
