"""Finds the prompt of answers: what comes before the two that a pair compares, or before one.

Public data sets write a question and its answers in many forms (:data:`KNOWN_FORMS`). The prompt
may be a field of its own, or the beginning of whole dialogues, or both. However it is written, it
is read once. The prompt of two dialogues is their common beginning, as in TRL's ``extract_prompt``;
at least the last turn of each is an answer. A record whose prompt cannot be found, or that has a
field which would be lost, is refused.

Left out on purpose: whole texts of other forms than Anthropic's ``Human:`` and ``Assistant:``,
since nothing says where their prompt ends.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moetrain.config.sources import shortened
from moetrain.data.chat import BadLineError

Message = dict[str, Any]

KNOWN_FORMS = (
    "`prompt`, `question`, `messages`, or `instruction` with `input`, optionally with `system`, "
    "beside answers that are texts or lists of messages; whole dialogues in `chosen` and "
    r"`rejected`, as lists of messages or as texts like '\n\nHuman: ...\n\nAssistant: ...'"
)

KNOWN_LABELLED = (
    "`label`, true or false, beside `prompt` and `completion`, `messages`, `conversations`, or "
    f"`instruction` and `output`; and pairs: {KNOWN_FORMS}"
)

_SYSTEM = ("system", "developer")
_QUESTIONS = ("prompt", "question", "instruction", "input")
"""Fields that hold what the user asks, in the order in which they are looked for."""
_NAMES = ("human", "user", "assistant", "system", "question", "answer")
"""Names of roles in texts that have all turns."""
_OF_DIALOGUES = ("history", "tools", "documents", "chat_template_kwargs")
"""Fields that only a chat template can show."""
_MARK = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
"""The beginning of a turn in a whole text."""


class Dialogues(NamedTuple):
    """Answers that a chat template renders, each with all that comes before it."""

    dialogues: list[list[Message]]
    num_given: int
    """First messages of each that are the prompt."""


class Texts(NamedTuple):
    """Answers that are learned as they are written."""

    texts: list[str]
    """Each answer behind its prompt."""
    spans: list[list[tuple[int, int]]]
    """Characters ``(start, end)`` of each text that are the answer; none if it is blank."""


class _Asked(NamedTuple):
    """The question of a record, with its system and history: all that its answers follow."""

    name: str
    """The field that holds the question."""
    text: str
    """The question, if it is a text; else empty."""
    messages: list[Message]
    """All that is asked as messages: system, history and question."""
    is_plain: bool
    """True: ``prompt`` is the only field and a text, which answers continue as it is."""


def read_answers(
    record: Mapping[str, Any], keys: Sequence[str], needs_prompt: bool = True
) -> Dialogues | Texts:
    """Return the answers in the fields ``keys`` of ``record`` with their prompt.

    Args:
        record: its lists of messages have ``role`` and ``content``.
        keys: ``chosen`` and ``rejected``, or the field of one answer.
        needs_prompt: whether answers to nothing, and questions in a second field, are refused.

    Raises BadLineError: the record has no known form, or a part of it would be lost.
    """
    answers = [_as_list(record[key]) for key in keys]
    are_texts = all(isinstance(answer, str) for answer in answers)
    if not are_texts and not all(isinstance(answer, list) and answer for answer in answers):
        names = " and ".join(f"`{key}`" for key in (keys if len(keys) > 1 else ("prompt", *keys)))
        problem = f"{names} are neither two texts nor two dialogues: {shortened(dict(record))}"
        raise BadLineError(f"{problem}; write all as texts, or all as lists of messages")
    asked = _asked(record, needs_prompt)
    if are_texts:
        if len(keys) > 1 and all(_is_whole(text) for text in answers):
            return _whole_texts(record, answers, asked)
        if asked.is_plain and (asked.text.strip() or not needs_prompt):
            return _joined(asked.text, answers)
        answers = [[{"role": "assistant", "content": text}] for text in answers]
    return _dialogues(record, answers, asked, needs_prompt)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


def _unknown(record: Mapping[str, Any]) -> BadLineError:
    said = f"no prompt is found in {shortened(dict(record))}"
    return BadLineError(f"{said}; known forms are {KNOWN_FORMS}")


def label_of(record: Mapping[str, Any], takes_numbers: bool = True) -> bool | None:
    """Return whether a single answer is wanted, as ``label`` says; None: nothing says it.

    ``kto_tag`` is another name for it. With ``takes_numbers`` 1 and 0 are true and false.
    """
    for key in ("label", "kto_tag"):
        label = record.get(key)
        if isinstance(label, str):
            label = {"true": True, "false": False}.get(label.strip().lower())
        if isinstance(label, bool):
            return label
        if takes_numbers and isinstance(label, int | float) and label in (0, 1):
            return bool(label)
    return None


# ---- what is asked -------------------------------------------------------------------------------


def _asked(record: Mapping[str, Any], needs_prompt: bool) -> _Asked:
    """Return what stands beside the answers of ``record``."""
    prompt, system = _as_list(record.get("prompt")), record.get("system")
    if not isinstance(prompt, str | list | None):
        problem = "`prompt` and its answers are neither two texts nor two dialogues"
        raise BadLineError(f"{problem}: {shortened(prompt)}; write texts, or lists of messages")
    if not isinstance(system, str | None):
        raise BadLineError(f"`system` is not text: {shortened(system)}; write a text there")
    texts = {"prompt": prompt} | {key: record.get(key) for key in _QUESTIONS[1:]}
    texts = {key: x for key, x in texts.items() if isinstance(x, str) and x.strip()}
    if "instruction" in texts and "input" in texts:
        texts["instruction"] += "\n\n" + texts.pop("input")
    histories = {key: record.get(key) for key in ("prompt", "messages", "conversations")}
    histories["prompt"] = prompt
    lists = {key: x for key, x in histories.items() if isinstance(x, list) and x}
    for key in ("messages", "conversations"):  # with an answer they are no prompt
        if key in lists and _is_answer(lists[key][-1]):
            del lists[key]
    for turns in lists.values():
        _check(turns)
    name, text, messages = "prompt", "", []
    if "prompt" not in lists and texts:
        name, text = next(iter(texts.items()))
        messages = [{"role": "user", "content": text}]
    elif lists:
        name, messages = next(iter(lists.items()))
    for key, other in texts.items():
        if needs_prompt and not any(_contains(turn, other) for turn in messages):
            problem = f"`{key}` is not in `{name}`, beside which it would be lost"
            raise BadLineError(f"{problem}: {shortened(other)}; leave one of them out")
    messages = [*read_history(record), *messages]
    if system and not any(_contains(turn, system) for turn in _systems(messages)):
        messages = [{"role": "system", "content": system}, *messages]
    # A data set with a column for the system is one of dialogues, also where it is empty.
    of_dialogues = lists or "system" in record or any(record.get(key) for key in _OF_DIALOGUES)
    is_plain = name == "prompt" and not of_dialogues
    return _Asked(name, text or (prompt if isinstance(prompt, str) else ""), messages, is_plain)


def read_history(record: Mapping[str, Any]) -> list[Message]:
    """Return alpaca's ``history``, a list of questions with their answers, as messages."""
    messages: list[Message] = []
    for pair in record.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            problem = f"`history` has {shortened(pair)}, which is no question with its answer"
            raise BadLineError(f"{problem}; write a list of two texts for each")
        roles = zip(("user", "assistant"), pair, strict=True)
        messages += [{"role": role, "content": text} for role, text in roles]
    return messages


def _systems(messages: Sequence[Message]) -> list[Message]:
    """Return the system's turns with which ``messages`` begin."""
    others = (i for i, turn in enumerate(messages) if turn.get("role") not in _SYSTEM)
    return list(messages[: next(others, len(messages))])


def _is_answer(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "assistant"


def _text_of(turn: Message) -> str:
    content = turn.get("content") or ""
    parts = content if isinstance(content, list) else [content]
    return "".join(str(x.get("text") or "") if isinstance(x, dict) else str(x) for x in parts)


def _words(text: str) -> str:
    """Return ``text`` with one blank for all white space, which records often change."""
    return " ".join(text.split())


def _contains(turn: Message, text: str) -> bool:
    """Return whether the content of ``turn`` has ``text``, in whole words."""
    part = re.escape(_words(text))
    return re.search(rf"(?<!\w){part}(?!\w)", _words(_text_of(turn))) is not None


def _is_same(turn: Message, other: Message) -> bool:
    is_same_role = turn.get("role") == other.get("role")
    return is_same_role and _words(_text_of(turn)) == _words(_text_of(other))


def _writes_out(text: str, turns: Sequence[Message]) -> bool:
    """Return whether ``text`` has the contents of all ``turns`` and nothing else but their marks.

    The system's turns may be left out. Marks are the names of roles, and what stands in angle or
    square brackets.
    """
    rest = _words(text)
    for turn in turns:
        part = _words(_text_of(turn))
        if part not in rest and turn.get("role") not in _SYSTEM:
            return False
        rest = rest.replace(part, " ", 1)
    rest = re.sub(r"<[^<>]*>|\[[^\[\]]*\]", " ", rest)
    return all(word.lower() in _NAMES for word in re.findall(r"\w+", rest))


# ---- dialogues -----------------------------------------------------------------------------------


def _dialogues(
    record: Mapping[str, Any], answers: list[list[Message]], asked: _Asked, needs_prompt: bool
) -> Dialogues:
    """Return the answers behind what is asked, unless they begin with it."""
    for turns in answers:
        _check(turns)
    num_shared = _num_shared(answers)
    before, num_repeated = _before(record, answers, num_shared, asked)
    prompt = [*before, *answers[0][:num_shared]]
    if needs_prompt and len(_systems(prompt)) == len(prompt):
        raise _unknown(record)
    # One answer may have several turns, and all are learned.
    num_given = len(prompt) if len(answers) > 1 else len(before) + num_repeated
    return Dialogues([[*before, *answer] for answer in answers], num_given)


def _check(turns: list[Any]) -> None:
    for turn in turns:
        if not isinstance(turn, dict):
            problem = f"a list of messages has {shortened(turn)}, which is no object"
            raise BadLineError(f"{problem}; write {{'role': ..., 'content': ...}}")


def _num_shared(answers: Sequence[Sequence[Any]]) -> int:
    """Return with how many turns all answers begin, the last turn of each not counted.

    Keys without a value, which tables add, are no difference.
    """
    most = min(map(len, answers)) - 1
    known = [
        [{k: v for k, v in turn.items() if v is not None} for turn in answer[:most]]
        for answer in answers
    ]
    return next((i for i in range(most) if any(x[i] != known[0][i] for x in known)), most)


def _before(
    record: Mapping[str, Any], answers: list[list[Message]], num_shared: int, asked: _Asked
) -> tuple[list[Message], int]:
    """Return which messages to put before the answers.

    Returns:
        Of ``asked.messages``, those with which the answers do not begin; and how many turns of the
        answers' common beginning are a repetition of the others.

    Raises BadLineError: the answers begin with something else.
    """
    shared = answers[0][:num_shared]
    systems, own = _systems(asked.messages), _systems(shared)
    turns = asked.messages[len(systems) :]
    lost = [turn for turn in systems if not any(_contains(x, _text_of(turn)) for x in own)]
    if lost and own:
        raise _other("system" if record.get("system") else asked.name, lost[0])
    is_answer = all(answer[0].get("role") not in (*_SYSTEM, "user") for answer in answers)
    if (num_repeated := _num_repeated(turns, shared, asked.text, is_answer)) is not None:
        return lost, num_repeated
    if own or not (is_answer or _is_answer(turns[-1])):
        raise _other(asked.name, turns[-1])
    return asked.messages, 0


def _num_repeated(
    turns: list[Message], shared: list[Message], text: str, is_answer: bool
) -> int | None:
    """Return behind which turn of ``shared`` all of ``turns`` have been said; None: they are not.

    Args:
        text: the question, if it is a text, which may be a part of a turn, or all turns.
        is_answer: whether the answers begin with the assistant's turn.
    """
    if text and len(turns) == 1:
        found = [
            i + 1
            for i, turn in enumerate(shared)
            if _is_same(turn, turns[0])
            or (turn.get("role") == "user" and not is_answer and _contains(turn, text))
        ]
        if not found and shared and _writes_out(text, shared):
            return len(shared)
        return found[-1] if found else None
    first, size = len(_systems(shared)), len(turns)
    places = [first] if is_answer else [first, len(shared) - size]
    for place in places:
        said = shared[place : place + size] if place >= first else []
        if len(said) == size and all(map(_is_same, said, turns)):
            return place + size
    return None


def _other(name: str, turn: Message) -> BadLineError:
    problem = f"`{name}` is not in the dialogues beside it: {shortened(_text_of(turn))}"
    return BadLineError(f"{problem}; leave it out, or begin the dialogues with it")


# ---- texts ---------------------------------------------------------------------------------------


def _joined(prompt: str, answers: Sequence[str]) -> Texts:
    """Return texts behind their prompt, or as they are if all begin with it.

    A prompt of one word does not count: answers may begin with the same word.
    """
    is_whole = len(answers) > 1 and len(prompt.split()) > 1
    is_whole &= all(answer.startswith(prompt) for answer in answers)
    texts = list(answers) if is_whole else [prompt + answer for answer in answers]
    return Texts(texts, [_learned(text, len(prompt)) for text in texts])


def _learned(text: str, start: int) -> list[tuple[int, int]]:
    """Return what is learned of ``text`` from ``start`` on; of several turns the assistant's."""
    spans = [(start, len(text))]
    if _is_whole(text[:start]):
        turns = [(max(turn.start, start), turn.end) for turn in _turns(text) if turn.is_answer]
        spans = [(a, b) for a, b in turns if a < b]
    return [(a, b) for a, b in spans if text[a:b].strip()]


def _is_whole(text: str) -> bool:
    """Return whether ``text`` begins with what a human says."""
    mark = _MARK.match(text)
    return mark is not None and mark[1] == "Human"


class _Turn(NamedTuple):
    is_answer: bool
    start: int
    """The character behind the mark."""
    end: int


def _turns(text: str) -> list[_Turn]:
    """Return the turns of a text like ``\\n\\nHuman: ...\\n\\nAssistant: ...``."""
    marks = list(_MARK.finditer(text))
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [
        _Turn(mark[1] == "Assistant", mark.end(), end)
        for mark, end in zip(marks, ends, strict=True)
    ]


def _whole_texts(record: Mapping[str, Any], texts: list[str], asked: _Asked) -> Texts:
    """Return whole texts, of which the turns behind their common beginning are answers."""
    turns = [_turns(text) for text in texts]
    said = [
        [
            {"role": "assistant" if t.is_answer else "user", "content": text[t.start : t.end]}
            for t in each
        ]
        for text, each in zip(texts, turns, strict=True)
    ]
    num_shared = _num_shared(said)
    before, _ = _before(record, said, num_shared, asked)
    if before:
        raise _other("system" if record.get("system") else asked.name, before[0])
    if not num_shared:
        raise _unknown(record)
    spans = [
        [
            (t.start, t.end)
            for t in each[num_shared:]
            if t.is_answer and text[t.start : t.end].strip()
        ]
        for text, each in zip(texts, turns, strict=True)
    ]
    return Texts(texts, spans)
