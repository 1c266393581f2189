"""Tasks that are made up as they are asked for: they need no files and come without end.

Each problem comes from a random generator that its number seeds, so a number always means the same
problem.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from itertools import permutations, takewhile
from typing import Any

from moetrain.config import ConfigError
from moetrain.config.sources import shortened
from moetrain.rl.envs import (
    Demonstration,
    Environment,
    Episode,
    Problem,
    Prompts,
    SolvedEnvironment,
    Turn,
)

_MOST_DIGITS = 20
"""Digits of a number in a sum: a policy may ask for any, and products grow."""
_MOST_TERMS = 200
"""Terms of a sum: Python writes no product of more such numbers."""
_GYM_SIZE = 2**31 - 1
"""Problems of a task of reasoning-gym, which are made when asked for: more than a run reads."""
_WORTH = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
_ASK = "calc "


class YesNoMaybe(SolvedEnvironment):
    """Say one of three words, of which ``maybe`` is worth most; all three are shown equally often.

    This is the smallest task that shows whether a policy learns the reward or the demonstrations.
    """

    def problem(self, task: int) -> Problem:
        rng = random.Random(task)
        orders = [", ".join(words) for words in permutations(_WORTH)]
        return Problem(f"{rng.choice(orders)}? ", rng.choice(list(_WORTH)))

    def score(self, problem: Problem, answer: str) -> float:
        return _WORTH.get(answer, 0.0)


class Sort(SolvedEnvironment):
    """Put ``least`` to ``most`` different digits in order.

    The right answer scores 1; any other scores half the share of digits that are right before the
    first wrong one.
    """

    def __init__(self, prompts: Prompts, least: int = 4, most: int = 8) -> None:
        super().__init__(prompts)
        _check_whole(least=least, most=most)
        if not 1 <= least <= most <= 10:
            problem = f"least {least}, most {most}: there are 10 digits; 1 <= least <= most <= 10"
            raise ConfigError("rl.env_args", problem)
        self.least, self.most = least, most

    def problem(self, task: int) -> Problem:
        rng = random.Random(task)
        digits = rng.sample("0123456789", rng.randint(self.least, self.most))
        return Problem(f"{''.join(digits)}>", "".join(sorted(digits)))

    def score(self, problem: Problem, answer: str) -> float:
        right = problem.answer
        if answer == right:
            return 1.0
        same = takewhile(lambda pair: pair[0] == pair[1], zip(answer, right, strict=False))
        return 0.5 * len(list(same)) / len(right)


class Arithmetic(SolvedEnvironment):
    """``terms`` numbers of up to ``digits`` digits, added, subtracted or multiplied."""

    def __init__(
        self, prompts: Prompts, digits: int = 2, terms: int = 2, operations: str = "+-*"
    ) -> None:
        super().__init__(prompts)
        _check_sum(digits, terms)
        if not operations or set(operations) - set("+-*"):
            raise ConfigError("rl.env_args", f"operations {operations!r}: some of + - *")
        self.digits, self.terms, self.operations = digits, terms, operations

    def problem(self, task: int) -> Problem:
        rng = random.Random(task)
        numbers = [str(rng.randrange(10**self.digits)) for _ in range(self.terms)]
        signs = [rng.choice(self.operations) for _ in numbers[1:]]
        text = numbers[0] + "".join(a + b for a, b in zip(signs, numbers[1:], strict=True))
        return Problem(f"{text}=", str(evaluate(text)))

    def score(self, problem: Problem, answer: str) -> float:
        return float(answer.strip() == problem.answer)


class Calculator(Environment):
    """A tool over several turns: sums too long to do in one's head, and a calculator to ask.

        prompt          347*28+912=
        policy          calc 347*28+912<end>
        environment     -> 10628 ;
        policy          10628<end>

    Sums of products of ``terms`` numbers of up to ``digits`` digits. A turn that begins with
    ``calc`` asks the tool, ``calls`` times at most; any other is the answer, and ends the episode.
    """

    num_tasks = None

    def __init__(self, prompts: Prompts, digits: int = 3, terms: int = 3, calls: int = 2) -> None:
        _check_sum(digits, terms)
        _check_whole(calls=calls)
        self.prompts, self.digits, self.terms, self.calls = prompts, digits, terms, calls

    def sum_of(self, task: int) -> str:
        """Return what is to be calculated, as text."""
        rng = random.Random(task)
        numbers = [str(rng.randrange(10**self.digits)) for _ in range(self.terms)]
        return numbers[0] + "".join(rng.choice("+-*") + number for number in numbers[1:])

    def reply(self, question: str) -> str:
        """Return what the tool says to ``question``."""
        try:
            value = str(evaluate(question))
        except ValueError:
            value = "error"
        return f"-> {value} ; "

    def episode(self, task: int) -> Episode:
        return _Sum(self, self.sum_of(task))

    def demonstrate(self, task: int) -> Demonstration:
        """Ask the tool for the whole sum, then give its answer."""
        text = self.sum_of(task)
        parts = [
            (self.prompts.encode(f"{text}="), False),
            (self.prompts.ended(_ASK + text), True),
            (self.prompts.text(self.reply(text)), False),
            (self.prompts.ended(str(evaluate(text))), True),
        ]
        tokens = tuple(token for part, _ in parts for token in part)
        return Demonstration(tokens, tuple(acts for part, acts in parts for _ in part))


class _Sum(Episode):
    def __init__(self, environment: Calculator, text: str) -> None:
        self._environment, self._text, self._left = environment, text, environment.calls

    def reset(self) -> Turn:
        return Turn(self._environment.prompts.encode(f"{self._text}="))

    def step(self, action: Sequence[int]) -> Turn:
        text = self._environment.prompts.tokenizer.decode(action)
        if text.startswith(_ASK) and self._left:
            self._left -= 1
            reply = self._environment.reply(text.removeprefix(_ASK))
            return Turn(self._environment.prompts.text(reply))
        return Turn(reward=float(text.strip() == str(evaluate(self._text))), done=True)


class ReasoningGym(SolvedEnvironment):
    """A task of reasoning-gym (https://github.com/open-thought/reasoning-gym), which is an extra.

    Its own configuration (``seed``, sizes, ...) comes as keyword arguments.
    """

    def __init__(self, prompts: Prompts, name: str, **settings: Any) -> None:
        super().__init__(prompts)
        if importlib.util.find_spec("reasoning_gym") is None:
            problem = f"{name!r} needs reasoning-gym, which is not installed"
            raise ConfigError("rl.env", f"{problem}; pip install 'moetrain[rl]'")
        reasoning_gym = importlib.import_module("reasoning_gym")  # a second
        try:
            settings = {"seed": 0, "size": _GYM_SIZE, **settings}
            self._dataset: Any = reasoning_gym.create_dataset(name, **settings)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError("rl.env", f"reasoning-gym:{name}: {shortened(str(error))}") from None

    def problem(self, task: int) -> Problem:
        entry = self._dataset[task % len(self._dataset)]
        prompt = entry["question"] if self.prompts.chat else f"{entry['question']}\n"
        return Problem(prompt, str(entry["answer"]), entry)

    def score(self, problem: Problem, answer: str) -> float:
        return float(self._dataset.score_answer(answer.strip(), problem.facts))


def _check_whole(**values: object) -> None:
    """Raise ConfigError unless all ``values`` are integers: JSON has other numbers too."""
    for name, value in values.items():
        if type(value) is not int:
            raise ConfigError("rl.env_args", f"{name} {value!r} is no whole number")


def _check_sum(digits: int, terms: int) -> None:
    """Raise ConfigError for sizes that no sum has, or that :func:`evaluate` refuses."""
    _check_whole(digits=digits, terms=terms)
    if not 1 <= digits <= _MOST_DIGITS:
        raise ConfigError("rl.env_args", f"digits {digits}: 1 to {_MOST_DIGITS}")
    if not 1 <= terms <= _MOST_TERMS:
        raise ConfigError("rl.env_args", f"terms {terms}: 1 to {_MOST_TERMS}")


def evaluate(text: str) -> int:
    """Return the value of whole numbers with ``+``, ``-`` and ``*`` between them.

    Raises:
        ValueError: ``text`` is anything else.
    """
    total = 0
    for term in text.replace(" ", "").replace("-", "+-").split("+"):
        product = 1
        for factor in term.split("*"):
            digits = factor.removeprefix("-")
            if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS):
                raise ValueError(f"{text!r} is no sum or product of whole numbers")
            product *= int(factor)
        total += product
    return total
