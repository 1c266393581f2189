"""The environments that ``rl.env`` names: generated problems, prompts of a file, a user's class.

Generated problems come from a random generator that is seeded by the problem's number, so a number
always means the same problem.

``jsonl`` reads prompts from a file, and scores answers by a function of the user or one of
:data:`REWARDS`. A line holds ``prompt`` (text, or a conversation), ``messages`` or
``conversations`` (a conversation), and anything that the reward function needs (``answer``, for the
functions here). The chat template formats conversations and, with ``rl.chat``, also prompts that
are texts. It gets the line's ``tools``, ``documents`` and ``chat_template_kwargs``. If a line has a
``system``, under this or another name (``_SYSTEMS``), the text becomes the conversation's first
turn.

    def reward(line: dict, answer: str) -> float: ...        # in file.py; async def works too
    rl.reward = "file.py:reward"
"""

import copy
import importlib.util
import inspect
import json
import math
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from moetrain.config import ConfigError, logger
from moetrain.config.rl import RlSection
from moetrain.config.sources import shortened
from moetrain.config.user_files import run_file
from moetrain.data.chat import ChatTemplate
from moetrain.data.containers import Files
from moetrain.data.field_names import SYSTEMS
from moetrain.data.known_sets import with_tools_of_metadata
from moetrain.data.messages import (
    BadLineError,
    is_message,
    read_messages,
    role_of,
    text_of,
    turns_in,
)
from moetrain.data.options import Pointer, choices_of, kind_of, pointer_in
from moetrain.data.pairs import with_system
from moetrain.data.preview import on_one_line
from moetrain.data.tokenizer import Tokenizer
from moetrain.rl.envs import Environment, Problem, Prompts, SolvedEnvironment, TextEnvironment
from moetrain.rl.envs.lines import (
    ANSWERS,
    Hidden,
    advice_for_prompt,
    has_number,
    have_meaning_together,
    hidden_calls,
    hidden_parts,
    how_checked,
    is_packed,
    is_worked,
    place_of_answer,
    text_of_answer,
    wrong_options,
)
from moetrain.rl.envs.mathematics import MathReward

MAX_DIGITS, MAX_TERMS = 20, 200
"""The most digits of a number, and the most numbers of a problem. Python refuses to write products
as text that are much larger."""
_GYM_SIZE = 2**31 - 1
"""Number of problems of a task of reasoning-gym, more than any run reads. They are generated on
demand, so the number costs nothing."""

_OBJECT = """write one such as '{"most": 6}'"""

_VARIABLES = ("tools", "documents", "chat_template_kwargs")
"""Fields of a line that the chat template gets beside its messages."""
_ASKING = ("prompt", "messages", "conversations")
"""Fields of a line that may have the prompt. The first that is not null has it."""
_SYSTEMS = ("system", *SYSTEMS)
"""Fields of a line that may have the system's text."""


class Sort(SolvedEnvironment):
    """The task to sort ``least`` to ``most`` different digits.

    The reward of a wrong answer is 0.5 times the share of digits before the first wrong one.
    """

    def __init__(self, prompts: Prompts, least: int = 4, most: int = 8) -> None:
        super().__init__(prompts)
        check_whole(least=least, most=most)
        if not 1 <= least <= most <= 10:
            problem = (
                f"least {least}, most {most}: there are 10 digits; give 1 <= least <= most <= 10"
            )
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
    """The task to compute an expression of ``terms`` numbers of up to ``digits`` digits each."""

    def __init__(
        self, prompts: Prompts, digits: int = 2, terms: int = 2, operations: str = "+-*"
    ) -> None:
        super().__init__(prompts)
        check_whole(digits=digits, terms=terms)
        for name, value, most in (("digits", digits, MAX_DIGITS), ("terms", terms, MAX_TERMS)):
            if not 1 <= value <= most:
                raise ConfigError("rl.env_args", f"{name} {value}: give 1 to {most}")
        if not operations or set(operations) - set("+-*"):
            raise ConfigError("rl.env_args", f"operations {operations!r}: give some of + - *")
        self.digits, self.terms, self.operations = digits, terms, operations

    def problem(self, task: int) -> Problem:
        rng = random.Random(task)
        first, *others = [str(rng.randrange(10**self.digits)) for _ in range(self.terms)]
        text = first + "".join(rng.choice(self.operations) + number for number in others)
        products = (term.split("*") for term in text.replace("-", "+-").split("+"))
        total = sum(math.prod(map(int, factors)) for factors in products)
        return Problem(f"{text}=", str(total), facts=text)

    def score(self, problem: Problem, answer: str) -> float:
        return float(answer.strip() == problem.answer)


class _ReasoningGym(SolvedEnvironment):
    """The task ``name`` of reasoning-gym (https://github.com/open-thought/reasoning-gym)."""

    def __init__(self, prompts: Prompts, name: str, **settings: Any) -> None:
        super().__init__(prompts)
        reasoning_gym = _import_extra("reasoning_gym", "rl.env", name)
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


def _import_extra(module: str, field: str, value: str) -> Any:
    """Import a package of the extra ``rl``; ConfigError: it is not installed.

    It is imported here rather than at the top of the file, because that takes a second.
    """
    if importlib.util.find_spec(module) is None:
        problem = f"{value!r} needs {module.replace('_', '-')}, which is not installed"
        raise ConfigError(field, f"{problem}; pip install 'moetrain[rl]'")
    return importlib.import_module(module)


def check_whole(**values: object) -> None:
    """Raise ConfigError unless all ``values`` are integers; a user's JSON may hold other types."""
    for name, value in values.items():
        if type(value) is not int:
            raise ConfigError("rl.env_args", f"{name} {value!r} is not a whole number; give one")


# ---- from a file --------------------------------------------------------------------------------

_Reward = Callable[[dict[str, Any], str], "float | Awaitable[float]"]


_MARKS = ("####", r"\boxed{")
"""Marks before the final answer in a solution: GSM8K's and MATH's."""
_POINTING = {"label", "correct", "gold", "answer_index", "answer_idx", "correct_option"}
"""Fields that may point at an option: HellaSwag's, AQuA's and MMLU-Pro's."""
_CHECKED = 256
"""Number of lines whose answers are read at the start, to see that the reward can use them."""


class Jsonl(TextEnvironment):
    """The lines of the file ``path`` as problems, scored by the function that ``reward`` names."""

    def __init__(self, prompts: Prompts, path: str, reward: str) -> None:
        super().__init__(prompts)
        read = _read_lines(path)
        self.lines = [line for line, _ in read]
        self.facts = [whole for _, whole in read]
        self.num_tasks = len(self.lines)
        self.reward = _find_reward(reward)
        for number, line in enumerate(self.lines, 1):
            variable = next((key for key in (*_VARIABLES, *_SYSTEMS) if line.get(key)), None)
            if variable and isinstance(_prompt_of(line)[1], str) and not prompts.chat:
                problem = f"`{variable}` would be lost, as no chat template formats `prompt`"
                remedy = "set rl.chat yes, or give `messages`"
                raise ConfigError("rl.prompts", f"{path!r} line {number}: {problem}; {remedy}")
            if reward in _COMPARING and (problem := self._answer_problem(line, reward)):
                raise ConfigError("rl.prompts", f"{path!r} line {number}: {problem}")
            try:
                prompts.check(self._asked(line), line)
            except BadLineError as error:
                problem = f"{path!r} line {number}: {error}"
                raise ConfigError("rl.prompts", problem) from None
        self._warn_of_hidden_parts(path, runs_tests=reward not in REWARDS)
        if reward in _COMPARING:
            self._warn_of_answers(path, reward)

    def _answer_problem(self, line: dict[str, Any], reward: str) -> str:
        """Describe why ``reward`` cannot compare the answer of ``line``. Empty: it can."""
        answer = line.get("answer")
        own = "a function of yours (FILE.py:NAME) gets the whole record"
        other = f", or another rl.reward: {own}, with its tests or rubrics"
        if answer is None:
            lacks = f"no answer, which {reward} needs"
            place = place_of_answer(line)
            if place and self._asks_with(place.field):
                return (
                    f"{lacks}, and `{place.field}` is no right answer: each prompt has its number, "
                    f"which a policy could repeat; set another rl.reward: {own}, and checks how "
                    "the number is reached"
                )
            if place and (checked := how_checked(place.value)):
                return f"{lacks}, and `{place.field}` is {checked}; set another rl.reward: {own}"
            perhaps = f" (perhaps from {place.said})" if place else ""
            if place and (wrong := wrong_options(line)):
                options = f"`{place.field}` and the wrong ones such as `{wrong[0]}`"
                perhaps = f" (perhaps the letter of {place.said}, if the prompt has all options, "
                perhaps += f"{options}, shuffled and lettered)"
            pointing = (key for key in line if key.lower() in _POINTING)
            key = next((key for key in pointing if pointer_in(line, line[key])), None)
            if place is None and key is not None:
                perhaps = f" (perhaps the text of the option at which `{key}` points)"
            return f"{lacks}; give it as `answer`{perhaps}{other}"
        if not isinstance(answer, dict | list):
            return ""
        if checked := how_checked(answer):
            return f"`answer` is {checked}; set another rl.reward: {own}"
        kind = "an object" if isinstance(answer, dict) else "a list"
        inner = [key for key in (*ANSWERS, "value") if isinstance(answer, dict) and key in answer]
        write = f"write its `{inner[0]}`" if inner else "write one value"
        if have_meaning_together(answer):
            text = text_of_answer(line)
            write = f"write all values as one text{f', perhaps {text},' if text else ''}"
        said = f"`answer` is {kind}, which {reward} cannot compare: {shortened(answer)}"
        return f"{said}; {write} there{other}"

    def _asks_with(self, field: str) -> bool:
        """Return whether each of the first prompts shows the number in the answer's ``field``:
        Countdown's ``target``. A single prompt may do so by chance."""
        checked = self.lines[:_CHECKED]
        return len(checked) > 1 and all(self._shows_number(line, field) for line in checked)

    def _shows_number(self, line: dict[str, Any], field: str) -> bool:
        place = place_of_answer(line)
        if place is None or place.field != field or choices_of(line):
            return False
        with suppress(BadLineError):  # it is raised with the number of its line later
            return has_number(self._shown(line), place.value)
        return False

    def _shown(self, line: dict[str, Any]) -> list[str]:
        """Return the texts of the prompt of ``line``."""
        asked = self._asked(line)
        turns = [{"content": asked}] if isinstance(asked, str) else asked
        return [text_of(turn) for turn in turns]

    def _warn_of_hidden_parts(self, path: str, *, runs_tests: bool) -> None:
        """Log a line for each part of the first lines that the policy is not shown and may need.

        ``runs_tests`` is True if the reward may run tests of a line.
        """
        found: dict[str, list[tuple[int, Hidden]]] = {}
        for number, line in enumerate(self.lines[:_CHECKED], 1):
            shown = self._shown(line)
            calls = hidden_calls(line, shown) if runs_tests else ()
            for part in (*hidden_parts(line, shown), *calls):
                found.setdefault(part.said, []).append((number, part))
        for said, parts in found.items():
            number, first = parts[0]
            logger.warning(
                "rl.prompts: %r: of the first %d prompts %d do not show %s (line %d: %s); %s",
                *(path, len(self.lines[:_CHECKED]), len(parts), said, number),
                *(shortened(first.text), first.remedy),
            )

    def _warn_of_answers(self, path: str, reward: str) -> None:
        """Log a line if some of the first answers cannot be compared as their writer may think."""
        checked = self.lines[:_CHECKED]
        answers = [str(line["answer"]) for line in checked]
        self._warn_of_pointers(path, reward)
        if self._asks_with("answer"):
            logger.warning(
                "rl.prompts: %r: each of the first %d prompts shows its `answer` (line 1: %s), and "
                "a policy that repeats this number earns 1 by rl.reward %s; if the prompt asks how "
                "to reach the number, set rl.reward FILE.py:NAME, a function of yours that checks "
                "it",
                *(path, len(answers), answers[0], reward),
            )
        if isinstance(self.reward, MathReward):
            values = self.reward.values
            odd = [i for i, x in enumerate(answers) if is_packed(x) or not values(x)]
            said = "no value that rl.reward math finds"
            remedy = "only the same text earns 1 for them, and words in a box, in <answer> tags or "
            remedy += "behind 'The answer is': leave prompts without a final answer out, write "
            remedy += "values in LaTeX, or set rl.reward exact to compare all answers as texts"
            if odd and is_packed(answers[odd[0]]):
                remedy = "write the value out of the JSON as `answer`, or leave such prompts out"
        else:
            odd = [
                i
                for i, answer in enumerate(answers)
                if any(mark in answer for mark in _MARKS) or is_packed(answer)
            ]
            said = "a whole solution, and rl.reward exact compares all of it"
            remedy = "write the final answer alone, or set rl.reward math"
            if odd and is_packed(answers[odd[0]]):
                said = "JSON, and rl.reward exact compares its text"
                remedy = "write the value out of the JSON, unless the policy is asked for JSON"
        if odd and (checked := how_checked(answers[odd[0]])):
            remedy = f"this is {checked}: set rl.reward FILE.py:NAME, a function that gets the line"
        worked = [i for i, answer in enumerate(answers) if is_worked(answer)]
        if worked:
            logger.warning(
                "rl.prompts: %r: of the first %d answers %d are texts of several sentences without "
                "a mark of the final answer (line %d: %s), and rl.reward %s compares %s; write the "
                "final answer alone",
                *(path, len(answers), len(worked), worked[0] + 1, shortened(answers[worked[0]])),
                *(reward, "all of it" if reward == "exact" else "one value in it"),
            )
        if odd:
            first = shortened(answers[odd[0]])
            logger.warning(
                "rl.prompts: %r: of the first %d answers %d have %s (line %d: %s); %s",
                *(path, len(answers), len(odd), said, odd[0] + 1, first, remedy),
            )

    def _warn_of_pointers(self, path: str, reward: str) -> None:
        """Log a line if some of the first answers may only point at an option that their prompts
        neither number nor letter."""
        checked = self.lines[:_CHECKED]
        found: dict[int, Pointer] = {}
        for i, line in enumerate(checked):
            pointer = pointer_in(line, line["answer"])
            if pointer is not None and not pointer.is_explained(self._shown(line)):
                found[i] = pointer
        if found:
            first, pointer = next(iter(found.items()))
            logger.warning(
                "rl.prompts: %r: of the first %d answers %d may be %s %s (line %d: %s) that the "
                "prompt does not explain, and rl.reward %s compares the answer itself; write as "
                "`answer` the text of that option, or its letter if the prompt has it, unless the "
                "prompt asks for the answer as it is",
                *(path, len(checked), len(found), kind_of(found.values()), pointer.where),
                *(first + 1, checked[first]["answer"], reward),
            )

    def warn_of_room(self, seq_len: int, max_tokens: int) -> None:
        """Log a line if some of the first prompts leave no room for an answer, or too little.

        Args:
            seq_len: tokens of a row, which holds a prompt with its answer.
            max_tokens: the largest number of tokens that an answer may have.
        """
        encoded = (self.prompts.encode(self._asked(line), line) for line in self.lines[:_CHECKED])
        sizes = [len(tokens) for tokens in encoded]
        for most, result in ((seq_len - 1, "dropped"), (seq_len - max_tokens, "cut early")):
            long = [i for i, size in enumerate(sizes) if size > most]
            if long:
                longest = max(long, key=lambda i: sizes[i])
                logger.warning(
                    "rl.prompts: of the first %d prompts %d have so many tokens that answers to "
                    "them are %s (line %d: %d); raise data.seq_len %d to %d, or leave them out",
                    *(len(sizes), len(long), result, longest + 1, sizes[longest], seq_len),
                    sizes[longest] + max_tokens,
                )
                break

    def preview(self) -> str:
        """Return a line that shows the first prompt as the policy reads it, with special tokens."""
        line = self.lines[0]
        tokens = self.prompts.encode(self._asked(line), line)
        shown = on_one_line(self.prompts.tokenizer.decode(tokens, skip_special_tokens=False))
        return (
            f"rl.prompts: the first prompt, as the policy reads it ({len(tokens)} tokens): {shown}"
        )

    def problem(self, task: int) -> Problem:
        line = self.lines[task]
        return Problem(self._asked(line), facts=self.facts[task], record=line)

    def _asked(self, line: dict[str, Any]) -> str | list[Any]:
        """Return the line's prompt: a text, or the messages of a conversation.

        Raises BadLineError: the fields with the system's text differ from one another, or from the
        conversation's own system turn; or the conversation is not valid.
        """
        systems = {key: line[key] for key in _SYSTEMS if line.get(key)}
        name, system = next(iter(systems.items()), ("", None))
        for other, text in systems.items():
            if text != system:
                raise BadLineError(f"`{name}` and `{other}` differ; leave one of them out")
        key, prompt = _prompt_of(line)
        if isinstance(prompt, str) and key == "prompt":
            if not system or not self.prompts.chat:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        last = prompt[-1] if isinstance(prompt, list) and prompt else None
        if isinstance(last, dict) and role_of(last) == "assistant":  # its content may be null
            raise _ends_with_answer(key, last)
        turns = read_messages(prompt, key)
        if turns and turns[-1]["role"] == "assistant":
            raise _ends_with_answer(key, turns[-1])
        return with_system(turns, system, key)

    def score(self, problem: Problem, answer: str) -> float | Awaitable[float]:
        return self.reward(copy.deepcopy(problem.facts), answer)  # it may change its copy


def _ends_with_answer(key: str, turn: dict[str, Any]) -> BadLineError:
    """Return the error for a prompt in ``key`` that ends with the assistant's ``turn``."""
    said = turn.get("content", turn.get("value"))
    shown = "" if said is None else f", which the policy would be shown: {shortened(said)}"
    return BadLineError(
        f"`{key}` ends with the assistant's turn{shown}; leave that turn out, or write what is "
        "asked as `prompt`"
    )


def _find_reward(name: str) -> _Reward:
    """Return the reward function ``name``; ConfigError: there is none, or it takes no answer."""
    if name in REWARDS:
        return REWARDS[name]()
    reward = load_function(name, "rl.reward", ", ".join(REWARDS))
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # a function in C may have no signature
        return reward
    try:
        signature.bind({}, "")
    except TypeError as error:
        problem = f"{name!r} takes {signature}, but is called with a line and an answer: {error}"
        raise ConfigError("rl.reward", f"{problem}; let it take these two") from None
    return reward


def _exact(line: dict[str, Any], answer: str) -> float:
    return float(answer.strip() == str(line["answer"]).strip())


REWARDS: dict[str, Callable[[], _Reward]] = {
    "exact": lambda: _exact,
    "math": lambda: MathReward(_import_extra("math_verify", "rl.reward", "math")),
    "zero": lambda: lambda line, answer: 0.0,
}
_COMPARING = {"exact", "math"}
"""Rewards that compare an answer with the line's."""


def load_function(name: str, field: str, others: str) -> Callable[..., Any]:
    """Return the function or class ``name``, which is FILE.py:NAME. This runs the file.

    Raises ConfigError: there is none, or the file fails. The error is for the setting ``field``,
    and lists ``others``, the setting's other values.
    """
    file, _, key = name.rpartition(":")
    path = Path(os.path.expanduser(file))
    if not key or not path.is_file():
        raise ConfigError(
            field, f"{name!r} is neither {others} nor FILE.py:NAME of an existing file"
        )
    module = run_file(path, field, name)
    try:
        found = getattr(module, key)
    except Exception as error:  # a user's file may define __getattr__
        problem = f"cannot load {name!r}: {type(error).__name__}: {shortened(str(error))}"
        raise ConfigError(field, problem) from error
    if not callable(found):
        problem = f"{name!r} is a {type(found).__name__}, which cannot be called"
        raise ConfigError(field, f"{problem}; name a function or a class")
    return found


def _prompt_of(line: dict[str, Any]) -> tuple[str, Any]:
    """Return the field with the prompt of ``line``, and its value, which is null if there is none.

    Files that are made of tables have null in the fields that only other lines have, and the JSON
    of messages as a text.

    Raises BadLineError: the text is Python's notation of messages.
    """
    key = next((key for key in _ASKING if line.get(key) is not None), _ASKING[0])
    prompt = turns_in(line.get(key), key)
    return key, [prompt] if is_message(prompt) else prompt


def _read_lines(path: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the records of ``rl.prompts``, each twice: without nulls of tables, and with them.

    Chat templates get the first, reward functions the second. Raises ConfigError: a record has no
    prompt, or the file none.
    """
    lines: list[tuple[dict[str, Any], dict[str, Any]]] = []
    file = Path(os.path.expanduser(path))
    files = Files("rl.prompts", path, [file])
    with files.reading(file):
        pieces = files.pieces()
    for raw in (raw for piece in pieces for raw in files.records(piece)):
        try:
            line: Any = raw.value()
            whole: Any = raw.whole()
            asked = _prompt_of(line)[1] if isinstance(line, dict) else None
            if not isinstance(asked, str | list):
                problem = "has no `prompt` (a text or a list of messages) and no `messages`"
                raise BadLineError(problem + advice_for_prompt(line))
            line, whole = with_tools_of_metadata(line), with_tools_of_metadata(whole)
            ChatTemplate.variables_of(line)
        except BadLineError as error:
            raise ConfigError("rl.prompts", f"{raw.where}: {error}") from None
        lines.append((line, whole))
    if not lines:
        raise ConfigError("rl.prompts", f"{path!r} has no lines; write one prompt a line")
    return lines


# ---- by name ------------------------------------------------------------------------------------

GENERATED: dict[str, Callable[..., Environment]] = {"sort": Sort, "arithmetic": Arithmetic}
"""Environments that need no files, by their names in ``rl.env``."""
_NOT_OWN = {*GENERATED, "reasoning-gym", "agent"}
"""Values of ``rl.env``, up to a colon, whose rewards never read the special tokens of an answer."""


def open_environment(settings: RlSection, tokenizer: Tokenizer) -> Environment:
    """Make the environment that ``rl.env`` names with ``rl.env_args``; raises ConfigError."""
    name, args_text = settings.env, settings.env_args
    skips = settings.skip_special_tokens
    prompts = Prompts(tokenizer, settings.chat, skip_special_tokens=skips)
    try:
        args = {} if args_text is None else json.loads(args_text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "rl.env_args", f"{shortened(args_text)} is not JSON: {error}; {_OBJECT}"
        ) from None
    if not isinstance(args, dict):
        raise ConfigError("rl.env_args", f"{shortened(args_text)} is not a JSON object; {_OBJECT}")
    gym, _, task = name.partition(":")
    is_own = ":" in str(settings.reward) if name == "jsonl" else gym not in _NOT_OWN
    if not (skips or is_own):
        problem = "no, but only a reward or an environment of your own can read special tokens"
        raise ConfigError("rl.skip_special_tokens", f"{problem}; set yes, or give one")
    try:
        if name in GENERATED:
            environment = GENERATED[name](prompts, **args)
        elif name == "jsonl":
            for key in ("prompts", "reward"):
                if getattr(settings, key) is None:
                    raise ConfigError(f"rl.{key}", "not set, and rl.env 'jsonl' needs it; set it")
            environment = Jsonl(prompts, str(settings.prompts), str(settings.reward), **args)
        elif gym == "reasoning-gym" and task:
            environment = _ReasoningGym(prompts, task, **args)
        elif gym == "agent" and task:
            run = load_function(task, "rl.env", "an agent")
            lines = None if settings.prompts is None else _read_lines(settings.prompts)
            _import_extra("uvicorn", "rl.env", name)
            _import_extra("starlette", "rl.env", name)
            from moetrain.rl.agents import AgentEnvironment

            environment = AgentEnvironment(prompts, run, lines, **args)
        else:
            others = f"{', '.join(GENERATED)}, jsonl, reasoning-gym:TASK, agent:FILE.py:NAME"
            environment = load_function(name, "rl.env", others)(prompts, **args)
    except TypeError as error:  # an argument that it does not have, or of another type
        raise ConfigError("rl.env_args", f"{args_text!r}: {error}") from error
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's environment, whatever it raises
        problem = f"{name!r} cannot be made: {type(error).__name__}: {shortened(str(error))}"
        raise ConfigError("rl.env", problem) from error
    number = getattr(environment, "num_tasks", "missing")
    if number is not None and not (type(number) is int and number > 0):
        problem = f"its num_tasks is {shortened(number)}; make it None (without end), or 1 or more"
        raise ConfigError("rl.env", f"{name!r}: {problem}")
    if not callable(getattr(environment, "episode", None)):
        raise ConfigError("rl.env", f"{name!r} has no method episode(task); give it one")
    return environment
