"""Small tasks that are made up as they are asked for: they need no files, and come without end.

Each problem comes of a generator that its number seeds, so a number means the same problem always.
"""

from __future__ import annotations

import random
from itertools import permutations, takewhile

from moetrain.config import ConfigError
from moetrain.rl.envs.text import Problem, Prompts, SolvedEnvironment

MOST_DIGITS = 20
"""Of a number in a sum: a policy may ask for any, and products grow."""
MOST_TERMS = 200
"""Of a sum: Python writes no product of more such numbers."""
_WORTH = {"yes": 0.5, "no": 0.75, "maybe": 1.0}


class YesNoMaybe(SolvedEnvironment):
    """Say one of three words, of which ``maybe`` is worth most; all three are shown equally often.

    The smallest task on which a policy can be seen to learn what is rewarded, not what is shown.
    """

    def problem(self, task: int) -> Problem:
        rng = random.Random(task)
        orders = [", ".join(words) for words in permutations(_WORTH)]
        return Problem(f"{rng.choice(orders)}? ", rng.choice(list(_WORTH)))

    def score(self, problem: Problem, answer: str) -> float:
        return _WORTH.get(answer, 0.0)


class Sort(SolvedEnvironment):
    """Put ``least`` to ``most`` different digits in order. 1 for the right answer; for others half
    the share of the digits that are right before the first wrong one."""

    def __init__(self, prompts: Prompts, least: int = 4, most: int = 8) -> None:
        super().__init__(prompts)
        check_whole(least=least, most=most)
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
        check_sum(digits, terms)
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


def check_whole(**values: object) -> None:
    """Raise ConfigError for what is no whole number: JSON has others too."""
    for name, value in values.items():
        if type(value) is not int:
            raise ConfigError("rl.env_args", f"{name} {value!r} is no whole number")


def check_sum(digits: int, terms: int) -> None:
    """Raise ConfigError for sizes that no sum has, or none that :func:`evaluate` takes."""
    check_whole(digits=digits, terms=terms)
    if not 1 <= digits <= MOST_DIGITS:
        raise ConfigError("rl.env_args", f"digits {digits}: 1 to {MOST_DIGITS}")
    if not 1 <= terms <= MOST_TERMS:
        raise ConfigError("rl.env_args", f"terms {terms}: 1 to {MOST_TERMS}")


def evaluate(text: str) -> int:
    """The value of whole numbers with ``+``, ``-`` and ``*`` between them, as school has it.

    Raises:
        ValueError: it is anything else.
    """
    total = 0
    for term in text.replace(" ", "").replace("-", "+-").split("+"):
        product = 1
        for factor in term.split("*"):
            digits = factor.removeprefix("-")
            if not (digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS):
                raise ValueError(f"{text!r} is no sum or product of whole numbers")
            product *= int(factor)
        total += product
    return total
