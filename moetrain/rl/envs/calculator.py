"""A tool over several turns: sums too long to do in one's head, and a calculator to ask.

    prompt          347*28+912=
    policy          calc 347*28+912<end>
    environment     -> 10628 ;
    policy          10628<end>

A turn that begins with ``calc`` asks; any other is the answer, and ends the episode.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from moetrain.rl.envs.generated import check_sum, check_whole, evaluate
from moetrain.rl.envs.protocol import Demonstration, Environment, Episode, Turn
from moetrain.rl.envs.text import Prompts

ASK = "calc "


class Calculator(Environment):
    """Sums of products of ``terms`` numbers of up to ``digits`` digits; ``calls`` of the tool."""

    num_tasks = None

    def __init__(self, prompts: Prompts, digits: int = 3, terms: int = 3, calls: int = 2) -> None:
        check_sum(digits, terms)
        check_whole(calls=calls)
        self.prompts, self.digits, self.terms, self.calls = prompts, digits, terms, calls

    def sum_of(self, task: int) -> str:
        """What is to be calculated, as text."""
        rng = random.Random(task)
        numbers = [str(rng.randrange(10**self.digits)) for _ in range(self.terms)]
        return numbers[0] + "".join(rng.choice("+-*") + number for number in numbers[1:])

    def reply(self, question: str) -> str:
        """What the tool says."""
        try:
            value = str(evaluate(question))
        except ValueError:
            value = "error"
        return f"-> {value} ; "

    def episode(self, task: int) -> Episode:
        return _Sum(self, self.sum_of(task))

    def demonstrate(self, task: int) -> Demonstration:
        """See :class:`~moetrain.rl.envs.protocol.Demonstrates`."""
        text = self.sum_of(task)
        parts = [
            (self.prompts.encode(f"{text}="), False),
            (self.prompts.ended(ASK + text), True),
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
        if text.startswith(ASK) and self._left:
            self._left -= 1
            reply = self._environment.reply(text.removeprefix(ASK))
            return Turn(self._environment.prompts.text(reply))
        return Turn(reward=float(text.strip() == str(evaluate(self._text))), done=True)
