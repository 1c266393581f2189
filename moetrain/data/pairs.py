"""Finds the prompt of one answer, or of the two answers of a pair.

Public data sets write a question and its answers in many forms (:data:`KNOWN_FORMS`). The prompt
may be a field of its own, or the beginning of whole dialogues. If it is both, it is written only
once. The prompt of two dialogues is their common beginning, as in TRL's ``extract_prompt``, except
that the last turn of each dialogue always belongs to the answer. A record is refused if its prompt
cannot be found, or if one of its fields would be lost.

Left out on purpose: whole texts in other forms than Anthropic's ``Human:`` and ``Assistant:``,
because nothing marks the end of their prompt.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from moetrain.config.sources import shortened
from moetrain.data.lost import is_class, liking_of, warn_of_end
from moetrain.data.messages import BadLineError, Message, parse_json, text_of
from moetrain.data.tools import without_nulls
from moetrain.data.warned import warn_once

KNOWN_FORMS = (
    "`prompt`, `question`, `messages`, or `instruction` with `input`, optionally with `system`, "
    "beside answers that are texts or lists of messages; whole dialogues in `chosen` and "
    r"`rejected`, as lists of messages or as texts like '\n\nHuman: ...\n\nAssistant: ...'"
)

KNOWN_LABELLED = (
    "`label`, true or false (also 1 and 0, or texts such as good and bad, thumbs_up and "
    "thumbs_down, positive and negative), beside `prompt` and `completion`, `messages`, "
    f"`conversations`, or `instruction` and `output`; and pairs: {KNOWN_FORMS}"
)

_SYSTEM = ("system", "developer")
_QUESTIONS = ("prompt", "question", "instruction", "input")
"""Fields that may hold the question, in the order of the search."""
_NAMES = ("human", "user", "assistant", "system", "question", "answer")
"""Words that name roles in a text that holds several turns."""
OF_DIALOGUES = {
    *("system", "history", "tools", "functions", "documents", "chat_template_kwargs"),
}
"""Fields that only a chat template can show."""
BEFORE_ANSWERS = {*_QUESTIONS, *OF_DIALOGUES, "messages", "conversations"}
"""Fields that hold what comes before the answers."""
_LABELS = {
    "desirable": ("true", "1", "1.0", "good", "desirable"),
    "undesirable": ("false", "0", "0.0", "bad", "undesirable"),
}
"""The values of a label, as texts in lower case."""
_MARK = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
"""Matches the beginning of a turn in a whole text."""
_NOTHING = ("", "[]", "{}", "null")
"""Texts that tables write in fields without a value."""


class Dialogues(NamedTuple):
    """Answers that a chat template renders."""

    dialogues: list[list[Message]]
    """For each answer, the prompt followed by the answer."""
    num_given: int
    """Number of messages at the start of each dialogue that are the prompt."""


class Texts(NamedTuple):
    """Answers that need no chat template."""

    texts: list[str]
    """For each answer, the prompt followed by the answer."""
    spans: list[list[tuple[int, int]]]
    """For each text, the spans ``(start, end)`` of the characters to learn. A text whose answer has
    no turn of the assistant has none."""


class _Asked(NamedTuple):
    """The question of a record."""

    name: str
    """The field that holds the question."""
    text: str
    """The question if it is a text, otherwise empty."""
    messages: list[Message]
    """Everything before the answers, as messages: system, history and question."""
    is_plain: bool
    """True: at most the text ``prompt`` comes before the answers, so they need no template."""


def read_answers(
    record: Mapping[str, Any], keys: Sequence[str], needs_prompt: bool = True
) -> Dialogues | Texts:
    """Return the answers in the fields ``keys`` of ``record``, with their prompt.

    Args:
        record: the record. Its lists of messages have been converted already.
        keys: ``chosen`` and ``rejected``, or the field of one answer.
        needs_prompt: True: refuse answers without a prompt, and texts that ask but are not in it.

    Raises BadLineError: the record has no known form, or a part of it would be lost.
    """
    answers = [_as_list(record[key]) for key in keys]
    _refuse_lists_of_texts(record, dict(zip(keys, answers, strict=True)))
    are_texts = all(isinstance(answer, str) for answer in answers)
    if not are_texts and not all(isinstance(answer, list) and answer for answer in answers):
        names = " and ".join(f"`{key}`" for key in (keys if len(keys) > 1 else ("prompt", *keys)))
        problem = f"{names} are neither two texts nor two dialogues: {shortened(dict(record))}"
        raise BadLineError(f"{problem}; write all as texts, or all as lists of messages")
    asked = _asked(record, needs_prompt, [] if are_texts else answers)
    if are_texts:
        prompt = asked.text if asked.is_plain and _repeat(asked.text, answers) else ""
        are_turns = all(_is_whole(x) and _begins_with_turns(x, len(prompt)) for x in answers)
        if len(keys) > 1 and are_turns:
            return _whole_texts(record, answers, asked, needs_prompt)
        if asked.is_plain and (asked.text.strip() or not needs_prompt):
            return _joined(asked.text, answers)
        answers = [[{"role": "assistant", "content": text}] for text in answers]
    found = _dialogues(record, answers, asked, needs_prompt)
    for key, dialogue in zip(keys, found.dialogues, strict=True):
        warn_of_answers_in_a_row(key, dialogue[found.num_given :])
    return found


def _refuse_lists_of_texts(record: Mapping[str, Any], answers: Mapping[str, Any]) -> None:
    """Raise BadLineError if one of the ``answers`` is a list of texts (RewardBench-2's)."""
    lists = {key: x for key, x in answers.items() if _are_texts(x)}
    if not lists:
        return
    key, texts = next(iter(lists.items()))
    if all(len(x) == 1 for x in lists.values()):
        names = " and ".join(f"`{key}`" for key in lists)
        problem = f"{names} {'is a list' if len(lists) == 1 else 'are lists'} of one text"
        remedy = "write the text itself" + " in each" * (len(lists) > 1)
    elif len(answers) == 1:
        problem = f"`{key}` has several answers, a list of texts"
        remedy = "write a record of each, or of two the better one as `chosen`, the other as "
        remedy += "`rejected`"
    else:
        key, texts = max(lists.items(), key=lambda item: len(item[1]))
        problem = f"`{key}` has several answers, a list of texts"
        first, second = (f"each text of `{x}`" if x in lists else f"`{x}`" for x in answers)
        remedy = f"write a record of {first} with {second}"
    if not any(record.get(name) for name in (*_QUESTIONS, "messages", "conversations")):
        remedy += ", or, if they are the turns of a dialogue, {'role': ..., 'content': ...} of each"
    raise BadLineError(f"{problem}: {shortened(texts)}; {remedy}", kind=problem)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, str) for x in value)


def warn_of_answers_in_a_row(key: str, turns: Sequence[Message]) -> None:
    """Warn if an answer of the assistant's ``turns`` follows another: one may replace the other.

    A turn with calls, or of Harmony's channels analysis and commentary, begins an answer.
    """
    said = [turn if _is_answer(turn) else {} for turn in turns]
    for before, turn in pairwise(said):
        is_whole = before and not before.get("tool_calls")
        is_whole = is_whole and before.get("channel") in (None, "final")
        if not is_whole or not turn or turn.get("tool_calls") or turn.get("weight") == 0:
            continue
        warn_once(
            "answers in a row",
            f"`{key}` of records has turns of the assistant that follow each other, which are read "
            "as one dialogue; if they are several answers, write a record of each, and if one goes "
            "on with the other, join them",
        )


def _as_list(value: Any) -> Any:
    """Return a single message as a list. Return any other value unchanged."""
    return [value] if isinstance(value, dict) else value


def _unknown(record: Mapping[str, Any]) -> BadLineError:
    """Make the error for a record without a prompt."""
    said = f"no prompt is found in {shortened(dict(record))}"
    return BadLineError(f"{said}; known forms are {KNOWN_FORMS}")


def label_of(record: Mapping[str, Any]) -> bool | None:
    """Return the ``label`` of a single answer: True if it is desirable. None: there is no label.

    ``kto_tag`` is another name of the field. Words and numbers of :data:`_LABELS` are labels too,
    and so is what users say (:func:`~moetrain.data.lost.liking_of`), unless the answer says the
    same word: then it is a class.

    Raises BadLineError: both fields have a label, and the labels differ.
    """
    values = {key: record.get(key) for key in ("label", "kto_tag")}
    labels = {key: found for key, x in values.items() if (found := _label(x, record))}
    if len({*labels.values()}) > 1:
        said = f"`label` is {shortened(record['label'])}, `kto_tag` {shortened(record['kto_tag'])}"
        raise BadLineError(f"{said}: they contradict each other; leave one of them out")
    return None if not labels else "desirable" in labels.values()


def _label(value: object, record: Mapping[str, Any]) -> str | None:
    """Return ``desirable`` or ``undesirable``. None: ``value`` is no label of the ``record``."""
    words = str(value).strip().lower() if isinstance(value, str | int | float) else None
    if isinstance(value, str) and (liking := liking_of(value)) is not None:
        is_said = is_class(value, record)
        return None if is_said else "desirable" if liking else "undesirable"
    return next((name for name, known in _LABELS.items() if words in known), None)


# ---- the question --------------------------------------------------------------------------------


def _asked(
    record: Mapping[str, Any], needs_prompt: bool, dialogues: Sequence[Sequence[Any]]
) -> _Asked:
    """Find the question of ``record``, and everything else that comes before the answers.

    ``dialogues`` are the answers that are lists of messages.

    Raises BadLineError: a field has a wrong type, or would be lost.
    """
    prompt, system = _as_list(record.get("prompt")), record.get("system")
    if not isinstance(prompt, str | list | None):
        problem = "`prompt` is neither a text nor a list of messages"
        raise BadLineError(f"{problem}: {shortened(prompt)}; write one of these")
    if not isinstance(system, str | None):
        raise BadLineError(f"`system` is not text: {shortened(system)}; write a text there")
    # Collect questions that are texts, and those that are lists of messages.
    texts = {"prompt": prompt} | {key: record.get(key) for key in _QUESTIONS[1:]}
    texts = {key: x for key, x in texts.items() if isinstance(x, str) and x.strip()}
    if "instruction" in texts and "input" in texts:
        texts["instruction"] += "\n\n" + texts.pop("input")
    histories = {key: record.get(key) for key in ("prompt", "messages", "conversations")}
    histories["prompt"] = prompt
    lists = {key: x for key, x in histories.items() if isinstance(x, list) and x}
    for key in ("messages", "conversations"):  # lists that end with an answer are no prompt
        if key in lists and _is_answer(lists[key][-1]):
            del lists[key]
    for turns in lists.values():
        _check(turns)
    # Choose one question. With needs_prompt, it must contain the other texts.
    name, text, messages = "prompt", "", []
    if "prompt" not in lists and texts:
        name, text = next(iter(texts.items()))
        messages = [{"role": "user", "content": text}]
    elif lists:
        name, messages = next(iter(lists.items()))
    for key, other in lists.items():
        is_same = len(other) == len(messages) and all(map(_is_same, other, messages))
        if key != name and not is_same:
            raise BadLineError(f"`{name}` and `{key}` differ; leave one of them out")
    for key, other in texts.items():
        is_asked = any(_contains(turn, other) for turn in messages)
        is_asked |= bool(dialogues) and all(_asks(turns, other) for turns in dialogues)
        if needs_prompt and not is_asked:
            problem = f"`{key}` is not in `{name}`, beside which it would be lost"
            remedy = f"write both in `{name}`, or leave `{key}` out"
            raise BadLineError(f"{problem}: {shortened(other)}; {remedy}")
    # Put the history and the system text before the question.
    messages = with_system([*read_history(record), *messages], system, name)
    # A field without a value decides nothing, whether it is null, empty, or missing.
    of_dialogues = lists or any(_has_value(record.get(key)) for key in OF_DIALOGUES)
    is_plain = name == "prompt" and not of_dialogues
    return _Asked(
        name=name,
        text=text or (prompt if isinstance(prompt, str) else ""),
        messages=messages,
        is_plain=is_plain,
    )


def _has_value(value: object) -> bool:
    """Return whether a field has a value: it is neither null nor empty, nor the text of either."""
    return value not in _NOTHING if isinstance(value, str) else bool(value)


def with_system(messages: Sequence[Message], system: object, name: str) -> list[Message]:
    """Put a turn with the text ``system`` before ``messages``, unless they have this text already.

    Args:
        messages: the messages of the field ``name``.
        system: the field ``system`` of the same record. It may be empty.
        name: the field that holds the messages, for errors.

    Raises BadLineError: ``system`` is no text, or the messages have another system turn.
    """
    if not system:
        return [*messages]
    if not isinstance(system, str):
        raise BadLineError(f"`system` is not text: {shortened(system)}; write a text there")
    own = _systems(messages)
    if any(_contains(turn, system) for turn in own):
        return [*messages]
    if other := next((turn for turn in own if turn.get("role") == "system"), None):
        texts = f"{shortened(system)} and {shortened(text_of(other))}"
        problem = f"`system` and the system's turn of `{name}` differ, {texts}"
        raise BadLineError(f"{problem}; leave one of them out")
    return [{"role": "system", "content": system}, *messages]


def read_history(record: Mapping[str, Any]) -> list[Message]:
    """Return Alpaca's ``history``, pairs of a question and its answer, as messages.

    Raises BadLineError: an entry is no such pair, or a text is no JSON.
    """
    messages: list[Message] = []
    history = record.get("history") or []
    if isinstance(history, str) and history.lstrip().startswith("["):
        history = parse_json(history, "`history`")
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            problem = f"`history` has {shortened(pair)}, which is no question with its answer"
            raise BadLineError(f"{problem}; write a list of two texts for each")
        roles = zip(("user", "assistant"), pair, strict=True)
        messages += [{"role": role, "content": text} for role, text in roles]
    return messages


def dialogues_of_lists(
    record: Mapping[str, Any], keys: Sequence[str]
) -> tuple[str, list[list[Message]]] | None:
    """Read a question and its answers that are lists of texts, as Chatbot Arena writes them.

    ``["q", "r"]`` and ``["a", "b"]``, or the texts of their JSON, are the dialogue q, a, r, b. If
    only the answer is such a list, it is an answer in JSON, and stays as it is.

    Args:
        record: the record.
        keys: the fields that hold the answers.

    Returns:
        The field of the question, and for each answer the dialogue. None: the question is no list
        of texts.

    Raises BadLineError: the question is a list of texts, and an answer is no list of as many texts,
    or a list has null in place of a text.
    """
    fields = [key for key in _QUESTIONS if record.get(key) not in (None, "", [])]
    asked = _texts_in(record[fields[0]]) if fields else None
    if asked is None or fields[:2] == ["instruction", "input"]:  # which are one text
        return None
    name, dialogues = fields[0], []
    for key in keys:
        said = _texts_in(record[key])
        if not asked or said is None or len(said) != len(asked):
            problem = f"`{name}` is a list of texts, {shortened(record[name])}, and `{key}` is no "
            problem += f"list of as many: {shortened(record[key])}"
            remedy = "write the turns, or such a text itself, as `messages`"
            raise BadLineError(f"{problem}; {remedy}")
        if None in (*asked, *said):
            problem = f"`{name if None in asked else key}` has null in place of a text"
            raise BadLineError(f"{problem}; leave such records out")
        turns: list[Message] = []
        for question, answer in zip(asked, said, strict=True):
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": answer})
        dialogues.append(turns)
    warn_once(
        "lists of texts",
        f"`{name}` and its answers are lists of texts, which are read as the turns of a dialogue; "
        "if they are the columns of a table, write a record for each row; write them as `messages` "
        "to learn such lists themselves",
    )
    return name, dialogues


def _texts_in(value: object) -> list[str | None] | None:
    """Return the texts of a list, or of a list in JSON. None: ``value`` is no list of texts."""
    if isinstance(value, str) and re.match(r"""\s*\[\s*["n\]]""", value):
        try:
            value = parse_json(value, "a text")
        except BadLineError:
            return None
    if not isinstance(value, list) or not all(isinstance(x, str | None) for x in value):
        return None
    return value


def _systems(messages: Sequence[Message]) -> list[Message]:
    """Return the turns of the system and of developers at the beginning of ``messages``."""
    others = (i for i, turn in enumerate(messages) if turn.get("role") not in _SYSTEM)
    return list(messages[: next(others, len(messages))])


def _is_answer(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "assistant"


def _words(text: str) -> str:
    """Return ``text`` with one blank for each run of white space, in which copies often differ."""
    return " ".join(text.split())


def _contains(turn: Message, text: str) -> bool:
    """Return whether the content of ``turn`` contains ``text`` as whole words."""
    part = re.escape(_words(text))
    return re.search(rf"(?<!\w){part}(?!\w)", _words(text_of(turn))) is not None


def _asks(turns: Sequence[Any], text: str) -> bool:
    """Return whether a user's turn in ``turns`` contains ``text``."""
    return any(_contains(x, text) for x in turns if isinstance(x, dict) and x.get("role") == "user")


def _is_same(turn: Message, other: Message) -> bool:
    is_same_role = turn.get("role") == other.get("role")
    return is_same_role and _words(text_of(turn)) == _words(text_of(other))


def _writes_out(text: str, turns: Sequence[Message]) -> bool:
    """Return whether ``text`` consists of the contents of ``turns`` and of marks between them.

    The system's turns may be missing. A mark is the name of a role, or text in angle or square
    brackets.
    """
    rest = _words(text)
    for turn in turns:
        part = _words(text_of(turn))
        if part not in rest and turn.get("role") not in _SYSTEM:
            return False
        rest = rest.replace(part, " ", 1)
    rest = re.sub(r"<[^<>]*>|\[[^\[\]]*\]", " ", rest)
    return all(word.lower() in _NAMES for word in re.findall(r"\w+", rest))


# ---- dialogues -----------------------------------------------------------------------------------


def _dialogues(
    record: Mapping[str, Any], answers: list[list[Message]], asked: _Asked, needs_prompt: bool
) -> Dialogues:
    """Return a dialogue of the question and each answer. An answer may repeat the question.

    Raises BadLineError: there is no prompt, or the answers begin with another question.
    """
    for turns in answers:
        _check(turns)
        if turns[-1].get("role") == "user" and any(map(_is_answer, turns)):
            warn_of_end("dialogues of pairs and of single answers", "question")
    num_shared = _num_shared(answers)
    before, num_repeated = _before(record, answers, num_shared, asked)
    prompt = [*before, *answers[0][:num_shared]]
    if len(_systems(prompt)) == len(prompt):
        _refuse_other_beginnings(record, answers, num_shared, needs_prompt)
    # A single answer may have several turns. All of them are trained on.
    num_given = len(prompt) if len(answers) > 1 else len(before) + num_repeated
    return Dialogues([[*before, *answer] for answer in answers], num_given)


def _check(turns: list[Any]) -> None:
    """Raise BadLineError unless all ``turns`` are objects."""
    for turn in turns:
        if not isinstance(turn, dict):
            problem = f"a list of messages has {shortened(turn)}, which is no object"
            raise BadLineError(f"{problem}; write {{'role': ..., 'content': ...}}")


def _num_shared(answers: Sequence[Sequence[Any]]) -> int:
    """Return the number of turns that all answers share at their beginning.

    The last turn of each answer does not count. Keys with null, which tables add, are ignored.
    """
    most = min(map(len, answers)) - 1
    known = [without_nulls(answer[:most]) for answer in answers]
    return next((i for i in range(most) if any(x[i] != known[0][i] for x in known)), most)


def _refuse_other_beginnings(
    record: Mapping[str, Any], answers: list[list[Message]], num_shared: int, needs_prompt: bool
) -> None:
    """Raise BadLineError if answers need a common prompt. Warn if they have questions that differ.

    Args:
        record: the record.
        answers: whole dialogues, or answers without a question.
        num_shared: number of turns at the beginning of all answers, which are the system's.
        needs_prompt: True: answers need a common prompt. False: whole dialogues may differ.
    """
    turns = [answer[num_shared] for answer in answers]
    has_questions = any(turn.get("role") == "user" for turn in turns)
    if not has_questions or all(turn == turns[0] for turn in turns):
        if needs_prompt or len(answers) > 1:
            raise _unknown(record)
        return
    shown = [text_of(turn) for turn in turns]
    if len({*shown}) == 1 or len({turn.get("role") for turn in turns}) > 1:
        shown = turns
    where = "their first message" if num_shared == 0 else f"message {num_shared + 1}"
    problem = f"differ from {where} on, {' and '.join(map(shortened, shown))}"
    if needs_prompt:
        remedy = "begin both with the same question, or write it as `prompt` and only what follows "
        remedy += "it in both"
        raise BadLineError(
            f"`chosen` and `rejected` {problem}: they have no common prompt; {remedy}",
            kind="`chosen` and `rejected` have no common prompt",
        )
    warn_once(
        "dialogues with other questions",
        f"`chosen` and `rejected` of records {problem}: the whole dialogues are compared",
    )


def _before(
    record: Mapping[str, Any], answers: list[list[Message]], num_shared: int, asked: _Asked
) -> tuple[list[Message], int]:
    """Find the messages to put before the answers.

    Returns:
        The messages of ``asked`` that the answers do not repeat, and the number of turns at the
        beginning of the answers within which they repeat the other messages.

    Raises BadLineError: the answers begin with another question.
    """
    shared = answers[0][:num_shared]
    systems, own = _systems(asked.messages), _systems(shared)
    turns = asked.messages[len(systems) :]
    lost = [turn for turn in systems if not any(_contains(x, text_of(turn)) for x in own)]
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
    """Return after how many turns ``shared`` has repeated ``turns``. None: it does not.

    Args:
        turns: the question and its history.
        shared: the turns that all answers share at their beginning.
        text: the question if it is a text. It may be a part of a turn, or hold several turns.
        is_answer: True: the answers begin with the assistant's turn.
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
    starts = [first] if is_answer else [first, len(shared) - size]
    for start in starts:
        said = shared[start : start + size] if start >= first else []
        if len(said) == size and all(map(_is_same, said, turns)):
            return start + size
    return None


def _other(name: str, turn: Message) -> BadLineError:
    """Make the error for answers that do not repeat ``turn`` of the field ``name``."""
    problem = f"`{name}` is not in the dialogues beside it: {shortened(text_of(turn))}"
    return BadLineError(f"{problem}; leave it out, or begin the dialogues with it")


# ---- texts ---------------------------------------------------------------------------------------


def _joined(prompt: str, answers: Sequence[str]) -> Texts:
    """Return the prompt followed by each answer, or the answers alone if all repeat the prompt."""
    are_whole = _repeat(prompt, answers)
    texts = list(answers) if are_whole else [prompt + answer for answer in answers]
    found = [_divided(text, len(prompt)) for text in texts]
    return Texts([text for text, _ in found], [spans for _, spans in found])


def _repeat(prompt: str, answers: Sequence[str]) -> bool:
    """Return whether several answers begin with the prompt.

    A prompt of one word never counts as repeated, since answers may begin with the same word.
    """
    is_told = len(answers) > 1 and len(prompt.split()) > 1
    return is_told and all(answer.startswith(prompt) for answer in answers)


def _divided(text: str, start: int) -> tuple[str, list[tuple[int, int]]]:
    """Return a text whose answer begins at ``start``, and the spans of it to train on.

    If the text before the answer has marked turns, the spans are the assistant's turns in the
    answer, and a last question is left out. Otherwise the one span is the whole answer.
    """
    if not _begins_with_turns(text, start):
        return text, [(start, len(text))]
    if not text[:start].strip():  # there is no prompt, and the whole text is learned
        text = _without_last_question(text)
        return text, [(start, len(text))]
    turns = [(max(turn.start, start), turn.end) for turn in _turns(text) if turn.is_answer]
    spans = [(a, b) for a, b in turns if text[a:b].strip()]
    return _without_last_question(text) if spans else text, spans


def _begins_with_turns(text: str, start: int) -> bool:
    """Return whether ``text`` begins with a human's turn and has marked turns up to ``start``.

    It has if the answer at ``start`` begins with a mark, or within a turn of the assistant. After
    ``Human: Hi\\nAssistant:`` it begins within the human's, since that is no mark of a turn.
    """
    first = len(text) - len(text[start:].lstrip())
    marks = [mark for mark in _MARK.finditer(text) if mark.start() <= first < len(text)]
    if not marks or not _begins_with_human(text):
        return False
    return marks[-1][1] == "Assistant" or marks[-1].end() > first


def _is_whole(text: str) -> bool:
    """Return whether ``text`` begins with a human's turn, which one of the assistant's follows."""
    return _begins_with_human(text) and any(turn.is_answer for turn in _turns(text))


def _begins_with_human(text: str) -> bool:
    mark = _MARK.match(text)
    return mark is not None and mark[1] == "Human"


def _without_last_question(text: str) -> str:
    """Return a whole text up to the end of its last answer, or unchanged if it has none.

    The end of a text is learned, which is to be that of an answer.
    """
    turns = _turns(text)
    answers = [turn for turn in turns if turn.is_answer]
    if not answers or turns[-1].is_answer or not text[turns[-1].start :].strip():
        return text
    warn_of_end("dialogues of pairs and of single answers", "question")
    return text[: answers[-1].end]


class _Turn(NamedTuple):
    """A turn in a whole text."""

    is_answer: bool
    start: int
    """Index of the first character after the mark."""
    end: int
    """Index of the first character after the turn."""


def _turns(text: str) -> list[_Turn]:
    """Return the turns of a text like ``\\n\\nHuman: ...\\n\\nAssistant: ...``."""
    marks = list(_MARK.finditer(text))
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [
        _Turn(is_answer=mark[1] == "Assistant", start=mark.end(), end=end)
        for mark, end in zip(marks, ends, strict=True)
    ]


def _whole_texts(
    record: Mapping[str, Any], texts: list[str], asked: _Asked, needs_prompt: bool
) -> Texts:
    """Return whole texts. Their assistant's turns after the common beginning are trained on.

    The mark of the human's turn behind an answer is not: generation stops at EOS, which is learned
    behind the last answer, and would write the human's turn behind such a mark.

    Raises BadLineError: the texts have no common beginning, or a field beside them would be lost.
    """
    texts = [_without_last_question(text) for text in texts]
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
        _refuse_other_beginnings(record, said, num_shared, needs_prompt)
    spans = [
        [
            (t.start, t.end)
            for t in each[num_shared:]
            if t.is_answer and text[t.start : t.end].strip()
        ]
        for text, each in zip(texts, turns, strict=True)
    ]
    return Texts(texts, spans)
