"""Small environments of the tests, given as ``rl.env FILE.py:NAME``."""

import random
from itertools import permutations

from moetrain.rl.envs import Demonstration, Problem, SolvedEnvironment, Turn
from moetrain.rl.envs.shipped import MAX_DIGITS, Arithmetic, check_whole

YES_NO_MAYBE, CALCULATOR = f"{__file__}:YesNoMaybe", f"{__file__}:Calculator"
_WORTH = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
_ASK = "calc "


class YesNoMaybe(SolvedEnvironment):
    """Task: say one of three words. ``maybe`` is worth most; demonstrations show all three equally
    often.

    This is the smallest task that shows whether a policy learns the reward or the demonstrations.
    """

    def problem(self, task):
        rng = random.Random(task)
        orders = [", ".join(words) for words in permutations(_WORTH)]
        return Problem(f"{rng.choice(orders)}? ", rng.choice(list(_WORTH)))

    def score(self, problem, answer):
        return _WORTH.get(answer, 0.0)


def evaluate(text: str) -> int:
    """Return the value of whole numbers with ``+``, ``-`` and ``*`` between; ValueError if none."""
    total = 0
    for term in text.replace(" ", "").replace("-", "+-").split("+"):
        product = 1
        for factor in term.split("*"):
            digits = factor.removeprefix("-")
            if not (digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS):
                raise ValueError(f"{text!r} is no sum or product of whole numbers")
            product *= int(factor)
        total += product
    return total


class Calculator(Arithmetic):
    """Task with a tool over several turns: long sums, and a calculator to ask.

        prompt          347*28+912=
        policy          calc 347*28+912<end>
        environment     -> 10628 ;
        policy          10628<end>

    A turn that begins with ``calc`` asks the tool, at most ``calls`` times; any other turn is the
    answer.
    """

    def __init__(self, prompts, digits=3, terms=3, calls=2):
        super().__init__(prompts, digits, terms)
        check_whole(calls=calls)
        self.calls = calls

    def reply(self, question):
        try:
            return f"-> {evaluate(question)} ; "
        except ValueError:
            return "-> error ; "

    def episode(self, task):
        return _Sum(self, super().episode(task))

    def demonstrate(self, task):
        problem, tokens, mask = self.problem(task), (), ()
        for part, acts in (
            (self.prompts.encode(problem.prompt), False),
            (self.prompts.ended(_ASK + problem.facts), True),
            (self.prompts.text(self.reply(problem.facts)), False),
            (self.prompts.ended(problem.answer), True),
        ):
            tokens += part
            mask += (acts,) * len(part)
        return Demonstration(tokens, mask)


class _Sum:
    def __init__(self, environment, without_tool):
        self._environment, self._without_tool = environment, without_tool
        self._left = environment.calls

    def reset(self):
        return self._without_tool.reset()

    def step(self, action):
        text = self._environment.prompts.tokenizer.decode(action)
        if text.startswith(_ASK) and self._left:
            self._left -= 1
            reply = self._environment.reply(text.removeprefix(_ASK))
            return Turn(self._environment.prompts.text(reply))
        return self._without_tool.step(action)


BEST_WORD = {
    "model.moe_intermediate_size": 32,
    "train.micro_batch_size": 8,
    "train.global_batch_size": 64,
    "train.eval_interval": 0,
    "optim.lr": 3e-3,
    "optim.schedule": "constant",
    "rl.env": YES_NO_MAYBE,
    "rl.supervised_steps": 40,
    "rl.supervised_lr": 1e-2,
    "rl.group_size": 8,
    "rl.eval_tasks": 0,
}
"""Settings with which a policy of the tests' sizes learns the best word of YES_NO_MAYBE."""
