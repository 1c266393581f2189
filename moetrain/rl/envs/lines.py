"""Finds what the lines of ``rl.prompts`` lack: a prompt, an answer, or a part of the question.

Public sets have these under many names. The advice says what to write for such a line. A reward
function gets the whole line, so a field that the policy is not shown may be meant for it alone.
Therefore such fields are warned of, and never refused.

Left out on purpose: reading these fields, since a prompt in words has to say what they are.
"""

import ast
import builtins
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from moetrain.data.containers import OBJECTS
from moetrain.data.lost import PARTS, describes, is_address, is_check
from moetrain.data.messages import is_dialogue, is_said, words_of
from moetrain.data.options import choices_of, listed
from moetrain.data.tools import names_of_tools

ANSWERS = (
    *("ground_truth", "reward_model", "final_answer", "expected_answer", "answerkey", "target"),
    *("correct_answer", "verification_info", "solution", "gold_standard_solution"),
)
"""Fields, in any case, in which other formats have the right answer; last those that may hold its
working. In an object it is one of these again, as verl's ``reward_model.ground_truth``."""
_PROMPTS = ("question", "problem", "query", "instruction", "input", "text", "problem_statement")
"""Fields in which other formats have the prompt, the likeliest first."""
_ASKING = {"prompt", "question", "query", "instruction", "problem", "user", "input", "task"}
"""Words in the names of such fields: LiveCodeBench's ``question_content``."""
_NOT_ASKING = {
    *("answer", "answers", "solution", "solutions", "response", "output", "code", "test", "tests"),
    *("target", "truth", "reference", "explanation", "rationale", "reasoning", "cot"),
    *("completion", "verification", "chosen", "rejected"),
}
"""Words in the names of texts that are not what is asked."""
_OF_ANSWERS = {"answer", "solution", "truth"}
"""Words in the names of right answers."""
_OF_WORDING = {"text", "string", "ground", "final", "expected", "correct", "gold", "right"}
"""Words beside them in the names of answers in words."""
_OF_WRONG = {"incorrect", "wrong", "distractor", "distractors"}
_OF_OPTIONS = {"answer", "answers", "option", "options", "choice", "choices"}
"""Words in the names of wrong options: GPQA's ``Incorrect Answer 1`` and SciQ's ``distractor1``."""
_SENTENCE = re.compile(r"[.!?]\s+(?=[A-Z\\$])")
_FINAL = re.compile(r"####|\\boxed|<answer>|\banswer\b[*_\s]*(?:is\b|:)", re.I)
"""Match the end of a sentence, and marks of a final answer."""
_SHOWN = {
    *("prompt", "messages", "conversations", "tools", "documents", "chat_template_kwargs"),
    "answer",
}
"""Fields that a policy is shown, or that only the reward needs."""
_OF_PARTS = {"context", "contexts", "passage", "passages"}
"""Words in such names."""
_OF_CODE = {
    *("starter", "stub", "skeleton", "signature", "declaration", "header", "prototype"),
    *("boilerplate", "scaffold"),
}
"""Words in the names of the beginnings of programs: ``starter_code`` of APPS and LiveCodeBench,
``function_declaration`` of KodCode, whose card advises to write it in the prompt."""
_DECLARED = re.compile(
    r"\b(?:def|fn|func|function)\s+(\w+)\s*\(|\b(?:class|struct)\s+(\w+)\s*[:({]"
)
"""Matches what the beginning of a program declares."""
_OF_NAMES = {"fn", "func", "function", "method", "entry"}
"""Words beside "name" or "point" in the names of fields that name what tests call: ``fn_name`` of
APPS, ``func_name`` of LiveCodeBench, ``entry_point`` of HumanEval."""
_OF_TESTS = {"test", "tests"}
"""Words in the names of fields with tests, or with what these need: MBPP's ``test_list`` and
``test_setup_code``."""
_MOST_JSON = 1 << 18
"""Most characters of a text whose JSON is read. Tests of a program may have many more."""


class Hidden(NamedTuple):
    """A part of a line that the policy is not shown."""

    place: str
    """The field, with a dot before a field within it."""
    text: str
    """The first text of it that is not shown."""
    said: str
    """The field that is not shown, and a guess of what it holds, for a sentence."""
    remedy: str
    """What to write."""


_WRITE = "write it in the prompt, or leave it out"


def hidden_parts(line: Mapping[str, Any], shown: Sequence[str]) -> Iterator[Hidden]:
    """Yield the parts of ``line`` that a policy may need and that no text of ``shown`` has."""
    choices = choices_of(line)
    whole = " ".join([*shown, json.dumps(line.get("tools"), default=str)])
    for key, value in line.items():
        if key in _SHOWN:
            continue
        texts = [*_texts_in(key, listed(value) if key in choices else value)]
        is_part = key in choices or key.lower() in PARTS
        if is_part or (not words_of(key).isdisjoint(_OF_PARTS) and not describes(key, value)):
            own = [  # as texts_of_part has them
                text
                for place, text in texts
                if place == key or not is_address(place.rpartition(".")[2], text)
            ]
            own = own or [text for _, text in texts]
            lost = [text for text in own if not is_said(text, shown)]
            # AceCode's `context_messages` are the prompt in other words around it.
            is_around = any(is_said(each, [text]) for text in lost for each in shown)
            if lost and not is_around:
                said = f"`{key}`, which may be a part of the question"
                yield Hidden(key, max(lost, key=len), said, _WRITE)
            continue
        if key in ANSWERS:  # in RLVR-IFeval `func_name` is that of the verifier
            continue
        for place, text in texts:
            names = _names_to_call(place.rpartition(".")[2], text)
            if any(re.search(rf"\b{name}\b", whole) is None for name in names):
                said = f"`{place}`, with a name that tests of the answer may call"
                yield Hidden(place, text, said, _WRITE)
                break
    wrong = wrong_options(line)
    lost = [
        key for key in wrong if not all(is_said(x, shown) for _, x in _texts_in(key, line[key]))
    ]
    if lost:
        said = f"{_in_words(lost)}, which may be wrong options of the question"
        remedy = "write all options in the prompt, shuffled and lettered, and the letter of the "
        remedy += "right one as `answer`, or leave them out"
        yield Hidden(lost[0], next(_texts_in(lost[0], line[lost[0]]))[1], said, remedy)
    if not line.get("tools"):
        for place, names in _tools_in(line):
            if not all(is_said(name, shown) for name in names):
                said = f"`{place}`, which holds tools"
                yield Hidden(place, names[0], said, "write them as `tools`")


def wrong_options(line: Mapping[str, Any]) -> list[str]:
    """Return the fields with wrong options of the question."""

    def is_wrong(key: str) -> bool:
        words = {re.sub(r"\d+$", "", word) for word in words_of(key)} - {""}
        return bool(words & _OF_WRONG) and words <= _OF_WRONG | _OF_OPTIONS

    return [key for key, value in line.items() if is_wrong(key) and any(_texts_in(key, value))]


def _in_words(fields: Sequence[str]) -> str:
    """Return the fields in backticks, as a list in words."""
    *first, last = (f"`{field}`" for field in fields)
    return f"{', '.join(first)} and {last}" if first else last


def hidden_calls(line: Mapping[str, Any], shown: Sequence[str]) -> Iterator[Hidden]:
    """Yield the fields whose tests, in Python, call a function that no text of ``shown`` names.

    These are the fields of :func:`tests_in`. MBPP's prompts say what a function does, and its
    asserts what it is called.
    """
    whole = " ".join(shown)
    tests = {key: _parsed(line[key]) for key in tests_in(line)}
    known = {*dir(builtins), "candidate"}
    known.update(name for trees in tests.values() for tree in trees for name in _defined_in(tree))
    for key, trees in tests.items():
        called = [name for tree in trees for name in _called_in(tree) if name not in known]
        if name := next((x for x in called if not re.search(rf"\b{x}\b", whole)), None):
            known.add(name)  # another field with further tests needs no line of its own
            remedy = "write the name in the prompt"
            yield Hidden(key, name, f"the function that the tests in `{key}` call", remedy)


def tests_in(line: Mapping[str, Any]) -> list[str]:
    """Return the fields that may have tests: ``answer``, and those with "test" in their name."""
    named = [key for key in line if not _OF_TESTS.isdisjoint(words_of(key))]
    return ["answer"] * ("answer" in line) + named


def _parsed(value: object) -> list[ast.Module]:
    """Return the texts in ``value`` that are Python."""
    trees = []
    for _, text in _texts_in("", value):
        if len(text) <= _MOST_JSON:
            ignored = suppress(SyntaxError, ValueError, RecursionError, MemoryError)
            with ignored, warnings.catch_warnings(action="ignore"):
                trees.append(ast.parse(text))
    return trees


def _defined_in(tree: ast.Module) -> Iterator[str]:
    """Yield the names that tests or their setup define or import, but not from ``solution``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Import) or (
            isinstance(node, ast.ImportFrom) and node.module != "solution"
        ):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)


def _called_in(tree: ast.Module) -> Iterator[str]:
    """Yield the names that tests call, if they assert something."""
    nodes = [*ast.walk(tree)]
    if any(isinstance(node, ast.Assert) or _is_unittest(node) for node in nodes):
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                yield node.func.id


def _is_unittest(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr.startswith("assert")


def _names_to_call(key: str, text: str) -> list[str]:
    """Return the names in the text of a field that tests may call."""
    kind = _kind_of(key)
    if kind == "name":
        return [text] if text.isidentifier() else []
    declared = _DECLARED.findall(text) if kind == "code" else []
    return [function or name for function, name in declared]


@lru_cache(4096)
def _kind_of(key: str) -> str | None:
    """Return whether a field has the ``name`` of a function, or the ``code`` that declares one."""
    words = words_of(key)
    if not words.isdisjoint({"name", "point"}) and not words.isdisjoint(_OF_NAMES):
        return "name"
    return None if words.isdisjoint(_OF_CODE) else "code"


def _texts_in(place: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the texts in ``value`` with their places. JSON in a text is read."""
    value = _unpacked(value)
    if isinstance(value, str) and value.strip():
        yield place, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts_in(f"{place}.{key}", each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts_in(place, each)


def _unpacked(value: object) -> object:
    """Return the object or list whose JSON is the text ``value``. Return other values unchanged."""
    is_json = isinstance(value, str) and value.lstrip()[:1] in ("{", "[")
    if isinstance(value, str) and is_json and len(value) <= _MOST_JSON:
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _tools_in(line: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield the places of tools outside of ``tools``, and their names."""
    for place, value in _places(line):
        is_answer = not words_of(place).isdisjoint(_NOT_ASKING)  # calls may look like tools
        if place != "tools" and not is_answer and (names := names_of_tools(value)):
            yield place, names


def _places(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of ``line``, and those of objects in them."""
    for key, value in line.items():
        yield key, value
        if isinstance(inner := _unpacked(value), Mapping):
            yield from ((f"{key}.{name}", each) for name, each in inner.items())


# ---- advice -------------------------------------------------------------------------------------


def advice_for_prompt(line: object) -> str:
    """Return what to write as the prompt of a ``line`` without one, for the end of an error."""
    if is_dialogue(line):
        return (
            "; it is a list of turns: write those up to the question as `messages` of an object, "
            "and the right answer as `answer`"
        )
    if not isinstance(line, Mapping):
        return f"; {OBJECTS}"
    also = "".join(f" and `{place}` as `tools`" for place, _ in [*_tools_in(line)][:1])
    for place, value in _places(line):  # Llama-Nemotron's `input`, NeMo-Gym's
        if is_dialogue(value) and place.rpartition(".")[2] in (*_PROMPTS, "messages", "prompt"):
            return f"; write `{place}` as `messages`{also}"
    found = [key for key in _PROMPTS if isinstance(line.get(key), str)]
    likely = found or _likely(line)
    if not likely:
        return "; write what the policy is asked as `prompt`"
    wrong = wrong_options(line)
    parts = dict.fromkeys(part.place for part in hidden_parts(line, [line[likely[0]]]))
    parts = [place for place in parts if place not in wrong]
    parts = [f"`{place}`" for place in parts if f" and `{place}` as `tools`" != also]
    whole = ", with all that the question needs" * (len(found) > 1)
    whole = f", with {' and '.join(parts)} in it" if parts else whole
    if wrong:
        right = place_of_answer(line)
        options = _in_words([right.field, *wrong] if right else wrong)
        whole += f", with the options {options} behind it, shuffled and lettered,"
        whole += " and the right one's letter as `answer`"
    perhaps = "rename" if found else "perhaps rename"
    return f"; {perhaps} `{likely[0]}` to `prompt`{whole}{also}"


def _likely(line: Mapping[str, Any]) -> list[str]:
    """Return the texts that are likely a prompt, the likeliest first."""
    texts = [
        key
        for key, value in line.items()
        if isinstance(value, str)
        and len(value.split()) > 1
        and isinstance(_unpacked(value), str)
        and words_of(key).isdisjoint(_NOT_ASKING)
        and not describes(key, value)
    ]
    return sorted(texts, key=lambda key: (words_of(key).isdisjoint(_ASKING), -len(line[key])))


class PlaceOfAnswer(NamedTuple):
    """A field in which the right answer of a line may be."""

    field: str
    """The field, with a dot before a field within it."""
    value: object
    """The value of the field."""
    said: str
    """The place in words."""


def place_of_answer(line: Mapping[str, Any]) -> PlaceOfAnswer | None:
    """Return where the right answer of a line may be. None: nowhere."""
    named = {"_".join(key.lower().split()): key for key, value in line.items() if value is not None}
    places = [named[name] for name in ("answer", *ANSWERS) if name in named]
    if not places:
        return None
    place = next((key for key in places if not is_worked(line[key])), places[0])
    value, packed = line[place], ""
    while True:
        inner = _unpacked(value)
        packed = ", out of its JSON" if inner is not value else packed
        given = inner if isinstance(inner, Mapping) else {}
        names = (*ANSWERS, "answer", "value")
        key = next((key for key in names if given.get(key) is not None), None)
        if key is None:
            if have_meaning_together(inner):
                said = f"all values of `{place}`{packed} as one text, of the form that the prompt "
                return PlaceOfAnswer(place, inner, text_of_answer(line) or f"{said}asks for")
            said = "one value of " * isinstance(inner, list) + f"`{place}`{packed}"
            return PlaceOfAnswer(place, inner, said)
        place, value = f"{place}.{key}", given[key]


def have_meaning_together(values: object) -> bool:
    """Return whether ``values`` are several truth values or numbers, of which one is no answer.

    Several texts may be ways to write the same answer.
    """
    if not isinstance(values, list) or len(values) < 2:
        return False
    return all(isinstance(x, bool | int | float) for x in values)


def text_of_answer(line: Mapping[str, Any]) -> str:
    """Return the field that has the answer in words, in backticks: ``solution_text`` beside the
    truth values ``solution`` of Knights-and-Knaves. Empty: there is none."""
    found = [
        key
        for key, value in line.items()
        if isinstance(value, str)
        and value.strip()
        and isinstance(_unpacked(value), str)
        and not words_of(key).isdisjoint(_OF_ANSWERS)
        and not words_of(key).isdisjoint(_OF_WORDING)
        and words_of(key) <= _OF_ANSWERS | _OF_WORDING
    ]
    return f"`{found[0]}`" if found else ""


def has_number(shown: Sequence[str], value: object) -> bool:
    """Return whether ``value`` is a number, or the text of one, that a text of ``shown`` has."""
    number = str(value).strip()
    if isinstance(value, bool) or re.fullmatch(r"[-+]?\d+(?:\.\d+)?", number) is None:
        return False
    pattern = re.compile(rf"(?<![\w.]){re.escape(number)}(?!\.?\w)")
    return any(pattern.search(text) for text in shown)


def is_worked(value: object) -> bool:
    """Return whether ``value`` is a text of several sentences that marks no final answer."""
    if not isinstance(value, str) or not isinstance(_unpacked(value), str):
        return False
    return len(_SENTENCE.findall(value)) > 1 and _FINAL.search(value) is None


def how_checked(value: object) -> str:
    """Describe a ``value`` that says how an answer is checked. Empty: it is something else."""
    inner = _unpacked(value)
    cases = inner if isinstance(inner, list) else []
    are_cases = bool(cases) and all(
        isinstance(x, Mapping) and {"input", "output"} <= set(x) for x in cases
    )
    if are_cases or (isinstance(inner, Mapping) and not {"inputs", "fn_name"}.isdisjoint(inner)):
        return "tests of a program, which examples/code_reward.py:score_code runs"
    return "what a function that checks the answer is given" if is_check(inner) else ""


def is_packed(answer: object) -> bool:
    """Return whether an answer is the JSON text of an object, of one value in a list, or of texts.

    Several numbers in brackets may be an interval or a vector.
    """
    inner = _unpacked(answer)
    if isinstance(answer, str) and isinstance(inner, list):
        return len(inner) == 1 or (bool(inner) and all(isinstance(x, str) for x in inner))
    return isinstance(answer, str) and isinstance(inner, Mapping)
