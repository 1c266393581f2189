"""Reads the messages that users write, and writes them in the forms that chat templates take.

:func:`read_messages` reads and checks OpenAI's messages, ShareGPT's (``from`` and ``value``),
ms-swift's (roles ``tool_call`` and ``tool_response``), Qwen-Agent's and ChatGLM3's. It returns
OpenAI's. Templates differ in what they read: arguments of calls are objects or JSON text, and an
empty ``content`` is missing, null or "". :func:`forms_of` lists the forms of a conversation in the
order in which they are tried. :func:`marked` puts unique marks in the place of the users' texts.
:class:`~moetrain.data.chat.ChatTemplate` looks for these marks to see what a template shows.

Left out on purpose: images and sounds in ``content``, and repairing JSON.
"""

import ast
import codecs
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import product
from typing import Any, Literal, NamedTuple

from moetrain.config.sources import shortened
from moetrain.data.tools import KEYWORDS, without_nulls

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a turn's reasoning in ``transformers``. The first is the usual one."""
_WEIGHTS = (
    *("weight", "train", "training", "trainable", "loss", "loss_scale", "loss_weight"),
    "output_with_loss",
)
"""Names of a turn's weight in the loss, in the order of the list: OpenAI's and Mistral's, two of
axolotl, the Tinker cookbook's, two of ms-swift, a usual name of no known program, and XTuner's."""
_OF_LOSS = {
    *("mask", "masks", "masked", "loss", "train", "trained", "training", "trainable"),
    *("learn", "learned", "learning", "weight", "weights"),
}
_BESIDE = {
    *("assistant", "completion", "compute", "detail", "details", "do", "example", "exclude", "for"),
    *("ignore", "in", "include", "is", "label", "labels", "message", "no", "on", "only", "prompt"),
    *("response", "sample", "scale", "skip", "span", "spans", "the", "this", "to", "token"),
    *("tokens", "turn", "turns", "use"),
}
"""A name of a mask or a weight consists of words of these two sets, at least one of them a word of
``_OF_LOSS``."""
_NOT_LEARNED = {"mask", "masked", "ignore", "no", "skip", "exclude"}
"""Words of names with which the value true means "not learned"."""
_OF_SWITCHES = {"last", "history", "input", "inputs", "prompt", "prompts"}
"""Words in the names of switches, which are true or false for a whole record: Qwen-Coder's
``only_last_turn_loss``, LLaMA-Factory's ``mask_history``, axolotl's ``train_on_inputs``."""
_FLAGS = {"ignore": True, "skip": True, "exclude": True, "label": False}
"""Other keys of a turn, and the value with which each says that the turn is not to be learned."""
_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Names of a call's arguments: OpenAI's, Llama 3's, LangChain's, Anthropic's."""
_CALL = "tool_call"
"""Role of a message that is only a call. The message becomes part of an assistant's turn."""
_ROLES: dict[str, str] = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "ai", "model"), "assistant"),
    "chatbot": "assistant",  # Cohere's
    **dict.fromkeys(("observation", "function", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", _CALL), _CALL),
}
"""OpenAI's role for each name of a role in other forms, in lower case."""
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.S)
_RESULTS = re.compile(r"\s*<tool_response>\n?(.*?)\n?</tool_response>\s*", re.S)
_OF_SYSTEM = ("system", "developer")
THOUGHTS = (
    "thought",
    "thoughts",
    "think",
    "analysis",
    "cot",
    "chain_of_thought",
    "reasoning_text",
    "reasoning_details",
    "tool_plan",
    "think_content",
    "thinking_content",
    "inner_thought",
    "inner_monologue",
    "scratchpad",
    "rationale",
)
"""Other names of a thought, which are not read: SWE-agent's, GitHub Copilot's, OpenRouter's,
Cohere's."""
_OF_THOUGHTS = {"reasoning", "thinking", "thought"}
"""Words in the types of parts that are thoughts."""
_TEXTS_OF_THOUGHTS = ("text", "reasoning", "thinking", "summary")
"""Keys of such a part that hold its text."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Names of fields with pictures, films or sounds, beside messages and in them."""
_PLACES = {"path", "paths", "file", "files"}
"""Words that name the place of a picture, a film or a sound, as in ``image_path``."""
_OF_FILES = [{"inline", "data"}, {"file", "data"}, {"file"}, {"input", "file"}, {"document"}]
"""The words in names of parts of ``content`` with a file, perhaps a picture: Gemini's
``inlineData``, OpenAI's ``input_file``."""
_PARTS_OF_THOUGHTS = ("thinking", "reasoningContent")
_THOUGHT_AS_TEXT = (
    "write its text in `content` where it belongs, between the marks of the model's thoughts, such "
    "as <think> and </think>"
)
"""Advice on a thought in a turn that is not the assistant's."""
_PARTS_OF_CALLS = ("tool_use", "toolUse", "functionCall")
_ELSEWHERE = {
    **dict.fromkeys(_PARTS_OF_THOUGHTS, ", and thoughts as `reasoning_content`"),
    **dict.fromkeys(_PARTS_OF_CALLS, ", and calls as `tool_calls`"),
    **dict.fromkeys(
        ("tool_result", "toolResult", "functionResponse"),
        ", and results as turns of the role tool",
    ),
}
"""Advice on parts of ``content`` that OpenAI's messages write in other fields. Anthropic's parts
are named by their type, those of Bedrock and Gemini by their key."""
_OF_ITEMS = {
    "function_call": ", and calls as `tool_calls` of a turn of the assistant",
    "function_call_output": ", and results as turns of the role tool",
    "reasoning": ", and thoughts as `reasoning_content` of a turn of the assistant",
}
"""Advice, by type, on items of OpenAI's responses that are no messages."""
_OF_CALLS = {"call", "calls", "invocation", "invocations"}
"""Words in the names of calls that are not read: ``function_calls`` in Olmo's records, the AI SDK's
``toolInvocations``. Other words of such a name are in ``_OF_TOOLS``."""
_OF_TOOLS = {"tool", "tools", "function"}
_OF_IDS = {"id", "tool", "call", "use", "function"}
"""Words in the names of the id of a call: ``tool_use_id`` (Anthropic), ``call_id`` (OpenAI's
responses), ``toolUseId`` (Bedrock), ``toolCallId`` (the AI SDK)."""
_ANSWERS = {"refusal", "text", "message", "output", "output_text", "response", "answer"}
"""Keys of an answer's text that are not read: OpenAI's ``refusal`` and others."""
ABOUT_TURNS = {
    *("metadata", "meta", "info", "extra", "extra_info", "header", "annotations", "logprobs"),
    *("usage", "usage_metadata", "response_metadata", "models_usage", "moderation"),
    "tool_call_ids",
}
"""Keys whose lists and objects describe a turn."""


Message = dict[str, Any]
"""A message of a conversation. It has OpenAI's form once it is read."""


class BadLineError(Exception):
    """The content of a line is wrong. The caller adds the file and the line number."""

    def __init__(self, problem: str, field: str | None = None, *, kind: str | None = None) -> None:
        """Make the error.

        Args:
            problem: what is wrong, and what to do.
            field: the setting at fault, if it is not the one that names the file.
            kind: the kind of problem, by which bad records are counted. None: the words of
                ``problem`` tell the kind.
        """
        super().__init__(problem)
        self.field, self.kind = field, kind


def no_turns(name: str) -> BadLineError:
    """Make the error for a dialogue without any turn in the field ``name``."""
    return BadLineError(
        f"`{name}` is empty: it is a chat without turns; leave such records out "
        "(data.bad_records skip does)",
        kind="a chat without turns",
    )


TO_UTF8 = "write the file as UTF-8 (from Windows-1252: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW)"
"""The remedy for bytes that are not UTF-8. Windows-1252 has all letters of Latin-1, and in place of
its control characters the euro sign, dashes and typographic quotes."""
_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # begins with that of UTF-16
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order marks of encodings that are not read."""
MARK_BYTES = max(map(len, _OTHER_MARKS))
"""Bytes of the longest byte order mark."""


def refuse_other_marks(head: bytes, where: str) -> None:
    """Raise BadLineError if ``head``, the beginning of a file, is the mark of UTF-16 or UTF-32.

    ``where`` is the file, with its line if it has lines. Python would read some of their lines.
    """
    for mark, encoding in _OTHER_MARKS.items():
        if head.startswith(mark):
            said = f"{where}: the text begins with {mark.hex(' ').upper()}, so it is {encoding}"
            remedy = f"write the file as UTF-8 (iconv -f {encoding} -t UTF-8 FILE > NEW)"
            raise BadLineError(f"{said}; {remedy}, or leave it out")


_TURNS_WANTED = 'give a list of turns such as {"role": "user", "content": "..."}'
_TURNS = re.compile(r"\s*(?:\[\s*)?\{\s*[\"\[\w]")
"""Matches the beginning of a text that may be the JSON of messages."""
_PYTHONS_TURNS = re.compile(
    r"\s*(?:array\(\s*)?(?:\[\s*)?\{\s*'(?:role|from|content|value)'\s*:.*\}\s*"
    r"(?:\]\s*)?(?:,\s*dtype=object\s*\))?\s*",
    re.S,
)
"""Matches messages as Python, or numpy, shows them. pandas' ``to_csv`` writes lists so."""


def turns_in(value: object, name: str) -> Any:
    """Return the messages whose JSON ``value`` is, a list or one message, as tables have them.

    Return any other value unchanged. One message has a known role and a content or calls.

    Raises BadLineError: the text is Python's notation of messages, in the field ``name``.
    """
    if not isinstance(value, str):
        return value
    if shows_pythons_turns(value):
        return parse_json(value, f"`{name}`")
    if _TURNS.match(value) is None or not ('"role"' in value or '"from"' in value):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if isinstance(found, dict):
        return found if is_message(found) else value
    are_turns = all(isinstance(x, dict) and not {"role", "from"}.isdisjoint(x) for x in found)
    return found if are_turns and found else value


def shows_pythons_turns(text: str) -> bool:
    """Return whether ``text`` is a list of messages, or one message, as Python shows it."""
    has_role = "'role':" in text or "'from':" in text
    return has_role and _PYTHONS_TURNS.fullmatch(text) is not None


def is_message(value: object) -> bool:
    """Return whether ``value`` is an object with a known role, and a content or calls."""
    if not isinstance(value, dict) or {"content", "value", "tool_calls"}.isdisjoint(value):
        return False
    return is_role(str(role_of(value)))


def read_messages(
    messages: object, name: str = "messages", num_given: int = 0, *, strict: bool = True
) -> list[Message]:
    """Read a conversation, and return it as OpenAI's messages.

    Known roles get OpenAI's names, and calls become ``tool_calls`` of the assistant's turns. Keys
    with the value null are left out, as in ``transformers``. Reasoning gets the names
    ``reasoning_content`` and ``thinking``. A turn that is not learned gets ``weight`` 0. Reading
    the result again changes nothing.

    Args:
        messages: the messages, or their JSON as text, as in tables.
        name: the field that holds the messages, for errors.
        num_given: number of messages at the beginning that are a prompt. The message after them
            begins a turn, even if it is a call or goes on with the turn before it.
        strict: True: refuse masks that are not read, thoughts of turns of other roles than the
            assistant's, and pictures and sounds. False: ignore them.

    Raises BadLineError: ``messages`` are no conversation, or have something that is refused.
    """
    if isinstance(messages, str) and messages.lstrip().startswith("["):
        messages = parse_json(messages, f"`{name}`")
    messages = _with_results_apart(_of_columns(messages))
    if not isinstance(messages, list) or not messages:
        said = f"`{name}` is not a list of turns: {shortened(messages)}"
        if isinstance(messages, dict) and messages:
            raise BadLineError(f"{said}; {_TURNS_WANTED}")
        raise BadLineError(f"{said}; give one turn or more")
    if strict:
        _refuse_branches(messages, name)
    turns: list[Message] = []
    has_masks = strict and _has_masks(messages, name)
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            said = f"{name}[{i}] is not an object: {shortened(message)}"
            also = "; if it is a conversation of several, give each a record" * is_dialogue(message)
            raise BadLineError(f'{said}; give {{"role": ..., "content": ...}}{also}')
        if role_of(message) == "system" and message.get("content", message.get("value")) is None:
            continue  # tables have such a turn where a conversation has no system text
        if strict:
            _refuse_masks(message, f"{name}[{i}]")
            _refuse_thought(message, f"{name}[{i}]")
        turn = _read_turn(message, f"{name}[{i}]", has_masks)
        begins = not turns or turns[-1]["role"] != "assistant" or 0 < i == num_given
        if turn["role"] == _CALL:
            turn = {**turn, "role": "assistant"}
            is_part = not begins and "reasoning_content" not in turn  # a thought begins a turn
        else:
            is_part = not begins and _goes_on(turns[-1], turn, message)
        if not is_part:
            turns.append(turn)
            continue
        if turns[-1].get("weight") != turn.get("weight"):
            said = f"{name}[{i}] is part of the turn before it, whose weight differs"
            raise BadLineError(f"{said}; give both the same")
        calls = [*turns[-1].get("tool_calls", ()), *turn.get("tool_calls", ())]
        said = {key: value for key, value in turn.items() if key != "content" or value}
        turns[-1] = {**turns[-1], **said} | ({"tool_calls": calls} if calls else {})
    return _with_ids(turns)


def _refuse_branches(messages: Sequence[object], name: str) -> None:
    """Raise BadLineError if two turns follow the same one, as answers that were generated again do.

    Exports of chats that are trees (LibreChat's ``parentMessageId``) list all branches.
    """
    first: dict[tuple[str, str], int] = {}
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or role_of(message) not in ("user", "assistant"):
            continue
        for key, value in message.items():
            if not _PARENT <= words_of(key) <= _PARENT | {"message", "turn"}:
                continue
            if not isinstance(value, str | int) or value == "":
                continue
            j = first.setdefault((key, str(value)), i)
            if j != i:
                said = f"{name}[{j}] and {name}[{i}] have the same `{key}`, {shortened(value)}"
                raise BadLineError(
                    f"{said}: they are branches of a tree; write the turns of one branch alone, "
                    "those that lead to its last answer"
                )


_PARENT = {"parent", "id"}
"""The words of a key that names the turn before a turn."""


def _with_ids(turns: list[Message]) -> list[Message]:
    """Return ``turns`` with the ids of tools' results in ``tool_call_id``.

    The id of a result is under a key that names the id of a call, or it is the id of a call of the
    turn before it.
    """
    made, ids = [*turns], set[object]()
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            ids = {call.get("id") for call in turn.get("tool_calls", ())}
        if turn["role"] != "tool" or "tool_call_id" in turn:
            continue
        texts = [key for key, x in turn.items() if isinstance(x, str) and key != "content"]
        named = [key for key in texts if _names_id_of_call(key)]
        named = named or [key for key in texts if turn[key] in ids and key not in ("role", "name")]
        if named:
            made[i] = {("tool_call_id" if k == named[0] else k): x for k, x in turn.items()}
    return made


@lru_cache(4096)
def _names_id_of_call(key: str) -> bool:
    words = words_of(key)
    return "id" in words and len(words) > 1 and words <= _OF_IDS


def _of_columns(messages: object) -> object:
    """Return the turns of an object of columns, as some tables write a list of objects.

    Return any other value unchanged.
    """
    if not isinstance(messages, dict) or {"role", "from"}.isdisjoint(messages):
        return messages
    return rows_of(messages) or messages


def rows_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of an object of columns, lists of the same length. Empty: it is none."""
    values = [*columns.values()]
    if not all(isinstance(column, list) and len(column) == len(values[0]) for column in values):
        return []
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _with_results_apart(messages: object) -> object:
    """Return turns in which a call and its result are two turns.

    ChatGLM3 has one turn of the role tool for both. It has the name of the tool, the ``parameters``
    of the call, and the result in ``observation``.
    """
    if not isinstance(messages, list):
        return messages
    turns: list[object] = []
    for turn in messages:
        keys = turn.keys() if isinstance(turn, dict) else set[str]()
        is_both = {"name", "parameters", "observation"} <= keys and turn.get("content") is None
        if not is_both or role_of(turn) != "tool":
            turns.append(turn)
            continue
        rest = {key: turn[key] for key in turn if key not in ("parameters", "observation", "role")}
        call = {"name": turn["name"], "arguments": turn["parameters"]}
        turns.append({**learning_of(turn), "role": _CALL, "content": call})
        turns.append({**rest, "role": "tool", "content": turn["observation"]})
    return turns


def _goes_on(
    before: Mapping[str, Any], turn: Mapping[str, Any], message: Mapping[str, Any]
) -> bool:
    """Return whether ``turn``, read from ``message``, is a part of the turn ``before`` it.

    Qwen-Agent writes a message for a thought, one for an answer and one for each call. Successive
    calls are parallel calls.
    """
    if turn["role"] != "assistant" or "reasoning_content" in turn:
        return False
    if message.get("function_call") and not turn.get("content"):
        return True
    is_thought = "reasoning_content" in before and "tool_calls" not in before
    return is_thought and not before.get("content")


def thoughts_in(value: object) -> list[str]:
    """Return the texts of a thought that has another name than those in :data:`REASONING`.

    ``value`` is a text, a list of texts (s1K), or a list of objects with ``text`` or ``summary``
    (OpenRouter's ``reasoning_details``).
    """
    parts = value if isinstance(value, list) else [value]
    found = [x.get("text") or x.get("summary") if isinstance(x, dict) else x for x in parts]
    return [text for text in found if isinstance(text, str) and text.strip()]


def is_said(text: str, shown: Iterable[object]) -> bool:
    """Return whether one of the texts in ``shown`` contains ``text``, whatever its white space."""
    words = " ".join(text.split())
    return any(words in " ".join(x.split()) for x in shown if isinstance(x, str))


def lost_thought(turn: Mapping[str, Any]) -> str | None:
    """Return the key of a thought that neither the content nor the reasoning of ``turn`` contains.

    SWE-agent's ``thought`` is a part of its ``content``. None: there is no such key.
    """
    shown = [text_of(turn), turn.get("reasoning_content")]
    for key in THOUGHTS:
        if key in turn and not all(is_said(text, shown) for text in thoughts_in(turn[key])):
            return key
    for key, value in turn.items():
        parts = value if isinstance(value, list) and key not in ("content", "tool_calls") else ()
        if not all(is_said(text, shown) for part in parts for text in _thoughts_in_part(part)):
            return key
    return None


def _thoughts_in_part(part: object) -> list[str]:
    """Return the texts of a part of a turn that is a thought: the AI SDK's, Gemini's."""
    if not isinstance(part, dict):
        return []
    is_thought = not words_of(str(part.get("type"))).isdisjoint(_OF_THOUGHTS)
    if not is_thought and part.get("thought") is not True:
        return []
    return [x for key in _TEXTS_OF_THOUGHTS if isinstance(x := part.get(key), str) and x.strip()]


def lost_keys(turn: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each key of ``turn`` whose value only a special template shows, and the advice for it.

    Such a value holds tools (``functions`` in Olmo's records), calls under another name, or what an
    answer with an empty ``content`` says.
    """
    is_answer = turn["role"] == "assistant" and "tool_calls" not in turn
    is_empty = is_answer and not text_of(turn).strip() and "reasoning_content" not in turn
    for key, value in turn.items():
        if not value or key in ("role", "content"):
            continue
        if key in ("functions", "tools"):  # GLM-4's files have tools in the system's turn
            remedy = "write the tools as `tools` of the record, or leave it out"
        elif is_empty and _names_calls(key):  # without it the answer would be empty
            remedy = "write calls as `tool_calls`, or leave such records out"
        elif is_empty and _may_be_said(key, value):
            remedy = "write what the turn says as `content`, and calls as `tool_calls`, or leave "
            remedy += "such records out"
        elif is_answer and (
            _names_calls(key)
            or (key not in ABOUT_TURNS and _has_calls(value))
            or (key == "arguments" and "name" in turn)  # OpenAI's items of responses
        ):
            results = ", their results as turns of the role tool" * _has_results(value)
            remedy = f"write calls as `tool_calls`{results}, or leave it out"
        else:
            continue
        if not isinstance(value, str) or not is_said(value, [text_of(turn)]):
            yield key, remedy


@lru_cache(4096)
def _names_calls(key: str) -> bool:
    words = words_of(key)
    return not words.isdisjoint(_OF_CALLS) and words <= _OF_CALLS | _OF_TOOLS


def _has_calls(value: object) -> bool:
    """Return whether a list or an object holds a call, at any depth.

    A call is a part of Anthropic's, Bedrock's or Gemini's, an object with the id of a call and its
    arguments (the AI SDK's), or a list or an object under a key that names calls (LangChain's
    ``additional_kwargs``).
    """
    if isinstance(value, list):
        return any(map(_has_calls, value))
    if not isinstance(value, dict):
        return False
    found = {key: inner for key, inner in value.items() if inner is not None}
    if not {*found, str(found.get("type"))}.isdisjoint(_PARTS_OF_CALLS):
        return True
    if any(_names_id_of_call(key) for key in found) and not found.keys().isdisjoint(_ARGUMENTS):
        return True
    are_calls = (_names_calls(key) and isinstance(x, list | dict) and x for key, x in found.items())
    return any(are_calls) or any(map(_has_calls, found.values()))


def _has_results(value: object) -> bool:
    """Return whether a list or an object holds a result with the id of its call, at any depth."""
    if isinstance(value, list):
        return any(map(_has_results, value))
    if not isinstance(value, dict):
        return False
    has_id = any(map(_names_id_of_call, value))
    return (has_id and not {"result", "output"}.isdisjoint(value)) or any(
        map(_has_results, value.values())
    )


def _names_of_parts(value: object) -> set[Any]:
    """Return the types and keys of the parts in a list, or none if ``value`` is no such list."""
    parts = [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []
    return {name for part in parts for name in (*part, str(part.get("type")))}


def _may_be_said(key: str, value: object) -> bool:
    """Return whether a key may hold what an answer with an empty ``content`` says."""
    if isinstance(value, str):
        return key in _ANSWERS
    is_known = key in THOUGHTS or key in ABOUT_TURNS
    return isinstance(value, list | dict) and not is_known and _is_something(value)


def is_dialogue(turns: object) -> bool:
    """Return whether ``turns`` is a list whose first entry has a role."""
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, dict) and not {"role", "from"}.isdisjoint(first)


def role_of(message: Mapping[str, Any]) -> object:
    """Return the role of a message that is not read yet. A known role gets OpenAI's name."""
    role = message.get("role")
    role = message.get("from") if role is None else role
    if not isinstance(role, str):
        return role
    return _ROLES.get(re.sub("[- ]", "_", role.strip().lower()), role)


def is_role(text: str) -> bool:
    """Return whether ``text`` is the name of a known role."""
    return role_of({"role": text}) in _ROLES.values()


def _read_turn(message: Mapping[str, Any], where: str, has_masks: bool) -> Message:
    """Read a message as :func:`read_messages` does. A lone call keeps the role ``_CALL``.

    ``has_masks`` is True if ``mask`` says whether the turn is learned.

    Raises BadLineError: the role, the content, a call or the reasoning has a wrong form, or a part
    of the turn would be lost or learned twice.
    """
    turn = {key: value for key, value in message.items() if value is not None}
    for key, other in (("role", "from"), ("content", "value")):
        if key not in turn and other in turn:
            turn[key] = turn.pop(other)
    role, content = role_of(turn), turn.get("content")
    if not isinstance(role, str):
        said = f"{where}.role is missing or not text: {shortened(turn)}"
        also = _OF_ITEMS.get(str(turn.get("type")), "")
        if type(role) is int:  # MultiWOZ's speakers
            also = ", with user or assistant in place of the number"
        raise BadLineError(f'{said}; give {{"role": ..., "content": ...}}{also}')
    turn["role"] = role
    weight = _read_weight(turn, where, has_masks)
    if role == _CALL:
        thought, content = _without_thought(_joined(content))
        if isinstance(content, str) and content.startswith("Calling tools:"):  # smolagents' memory
            said = f"{where} shows the calls of the turn before it as text: {shortened(content)}"
            raise BadLineError(f"{said}; leave such turns out")
        calls = _read_calls(content, f"{where}, a call,")
        return {"role": role, "tool_calls": calls, **thought, **weight}
    turn |= weight
    if content is None and turn.get("function_calls"):
        turn["content"] = content = ""
    calls = turn.pop("tool_calls", ())
    calls = _read_calls(calls, f"{where}.tool_calls") if calls else []
    if call := turn.pop("function_call", None):  # OpenAI's older field
        calls += _read_calls(call, f"{where}.function_call")
    if calls:
        turn["tool_calls"] = calls
    if isinstance(content, list):
        turn["content"] = content = [_read_part(part, where, role) for part in content]
    elif not isinstance(content, str) and not (content is None and calls):
        said = f"{where}.content is missing or not text: {shortened(turn)}"
        texts = [key for key in sorted(_ANSWERS) if isinstance(turn.get(key), str)]
        answer = f", that of `{texts[0]}`" if content is None and len(texts) == 1 else ""
        raise BadLineError(f"{said}; give text in `content`{answer}{_also_in_parts(turn)}")
    if calls and isinstance(content, str) and "<tool_call>" in content:
        said = f"{where} has `tool_calls`, and a call in its content: {shortened(content)}"
        raise BadLineError(f"{said}; leave one of them out, or both would be learned")
    if isinstance(turn.get("label"), str) and re.match(r"\w+:\d", turn["label"]):
        said = f"{where}.label judges the answer, and would be lost: {shortened(turn['label'])}"
        raise BadLineError(f"{said}; write it in the question, or leave it out")
    for key in REASONING:
        if key in turn and not isinstance(turn[key], str):
            said = f"{where}.{key} is not text: {shortened(turn[key])}"
            raise BadLineError(f"{said}; write the thought as one text")
    if reasoning := [turn[key] for key in REASONING if key in turn]:
        turn["content"] = _without_repeated(reasoning, content, where)
        if content is None:
            del turn["content"]
        turn = {"thinking": reasoning[0], **turn, "reasoning_content": reasoning[0]}
    return turn


def _also_in_parts(turn: Mapping[str, Any]) -> str:
    """Return the advice for calls, results and thoughts in lists of parts of a turn (Gemini's)."""
    names = set[Any]().union(*map(_names_of_parts, turn.values()))
    return "".join(dict.fromkeys(_ELSEWHERE[name] for name in _ELSEWHERE if name in names))


def _joined(content: object) -> object:
    """Return the text of a list of parts of text, and other contents, such as calls, unchanged."""
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and "name" not in part]
    are_texts = texts and len(texts) == len(parts) and all(isinstance(text, str) for text in texts)
    return text_of({"content": content}) if are_texts else content


def _without_thought(content: object) -> tuple[dict[str, str], object]:
    """Divide the text of a call into its thought, as keys of a turn, and the call itself.

    Calls of LLaMA-Factory may have a thought, ``<think>...</think>``, before the JSON.
    """
    found = _THOUGHT.match(content) if isinstance(content, str) else None
    if found is None:
        return {}, content
    thought = found[1].strip()
    return dict.fromkeys(("thinking", "reasoning_content"), thought) if thought else {}, found[2]


def _without_repeated(reasoning: Sequence[object], content: object, where: str) -> object:
    """Return ``content`` without the thought at its beginning if ``reasoning`` repeats it.

    Raises BadLineError: there are two different thoughts.
    """
    found = _THOUGHT.match(content) if isinstance(content, str) else None
    written = [each for each in (*reasoning, found and found[1]) if isinstance(each, str)]
    thoughts = [*dict.fromkeys(each.strip() for each in written if each.strip())]
    if len(thoughts) > 1:
        said = f"{where} has two thoughts: {shortened(thoughts[0])} and {shortened(thoughts[1])}"
        raise BadLineError(f"{said}; leave one of them out")
    is_repeated = found is not None and found[1].strip() and reasoning[0]
    return found[2].lstrip("\n") if found is not None and is_repeated else content


# ---- what is learned ----------------------------------------------------------------------------


def _read_weight(turn: dict[str, Any], where: str, has_masks: bool) -> dict[str, int]:
    """Remove the weight from ``turn``. Return ``{"weight": 0}`` if it is 0, otherwise no key.

    Raises BadLineError: a weight is neither 0 nor 1, two weights contradict each other, or a turn
    that is not the assistant's is to be learned.
    """
    mask = turn.pop("mask", None)
    is_answer = turn["role"] in ("assistant", _CALL)
    weights = {key: turn.pop(key) for key in _WEIGHTS if key in turn}
    weights |= {"mask": mask} if has_masks and is_answer else {}
    weights = {key: weight_of(value, f"{where}.{key}") for key, value in weights.items()}
    if len({bool(value) for value in weights.values()}) > 1:
        said = f"{where} has {' and '.join(map(repr, weights))}, which contradict each other"
        raise BadLineError(f"{said}; leave one of them out")
    is_learned = all(weights.values())
    if weights and is_learned and not is_answer:
        keys = " and ".join(f"`{key}`" for key in weights)
        said = f"{where} has {keys} and asks to learn a turn of role {shortened(turn['role'])}"
        remedy = f"leave {keys} out of that turn"
        raise BadLineError(f"{said}, and only the assistant's are learned; {remedy}")
    return {} if is_learned else {"weight": 0}


def weight_of(value: object, where: str) -> bool:
    """Return the weight of a turn or a record, 0 or 1, or its text, as CSV has it.

    Raises BadLineError: ``value`` is no such weight.
    """
    number = value_in(value)
    if number not in (0, 1):
        said = f"{where} is {shortened(value)}, and a weight is 0 (not learned) or 1 (learned)"
        raise BadLineError(f"{said}; give one of these, and repeat records that count more")
    return bool(number)


def value_in(value: object) -> Any:
    """Return the number or the truth value that a text spells. Return any other value unchanged."""
    if not isinstance(value, str):
        return value
    if (truth := truth_of(value)) is not None:
        return truth
    text = value.strip()
    return float(text) if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text, re.I) else value


def _has_masks(messages: Sequence[Any], name: str) -> bool:
    """Return whether the ``mask`` of turns says which answers are learned.

    In the published runs of SWE-agent ``mask`` is true in the answers that are learned, and false
    in all other turns. Other programs mean the opposite. So masks are read only if each answer has
    one, at least one of them is true, and the other turns have false ones or none, at least one of
    them false.

    Raises BadLineError: the masks do not tell which answers are learned.
    """
    masks = [
        (role_of(turn) in ("assistant", _CALL), turn.get("mask"))
        for turn in messages
        if isinstance(turn, dict)
    ]
    if all(mask is None for _, mask in masks):
        return False
    of_answers = [mask for is_answer, mask in masks if is_answer]
    of_others = [mask for is_answer, mask in masks if not is_answer]
    tells = all(mask in (False, None) for mask in of_others)
    if of_answers:
        tells &= all(isinstance(mask, bool) for mask in of_answers) and True in of_answers
        tells &= False in of_others
    if not tells:
        problem = f"`{name}` has a `mask` that does not say which answers are learned"
        remedy = 'leave `mask` out, and write "weight": 0 in turns that are not learned'
        raise BadLineError(f"{problem}, as true in an answer and false elsewhere would; {remedy}")
    return bool(of_answers)


# Most records of a source have the same keys, so the result for each key is cached.
@lru_cache(4096)
def says_what_is_learned(key: str) -> bool:
    """Return whether ``key`` is a name of a mask or a weight, such as ``loss_mask``."""
    words = words_of(key)
    return not words.isdisjoint(_OF_LOSS) and words <= _OF_LOSS | _BESIDE


@lru_cache(4096)
def words_of(key: str) -> frozenset[str]:
    """Return the words of a key in snake or camel case, in lower case."""
    return frozenset(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+", key))


def truth_of(value: object) -> bool | None:
    """Return the truth value that ``value`` is or spells. None: it is no truth value."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _is_switch(key: str, value: object) -> bool:
    """Return whether a field of a record says, by true or false, which turns are learned."""
    return _names_switch(key) and truth_of(value) is not None


@lru_cache(4096)
def _names_switch(key: str) -> bool:
    words = words_of(key)
    is_named = not words.isdisjoint(_OF_LOSS) and words <= _OF_LOSS | _BESIDE | _OF_SWITCHES
    return is_named and not words.isdisjoint(_OF_SWITCHES)


def learning_of(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ``turn``, with their values, that say whether it is learned."""
    return {
        key: value
        for key, value in turn.items()
        if key in _WEIGHTS or says_what_is_learned(key) or _is_flag(key, value)
    }


def _is_flag(key: str, value: object) -> bool:
    """Return whether ``key`` of a turn says, by ``value``, that the turn is not to be learned."""
    return key in _FLAGS and truth_of(value) is _FLAGS[key]


def _refuse_masks(message: Mapping[str, Any], where: str) -> None:
    """Raise BadLineError if ``message`` has a mask that is not read, or pictures or sounds."""
    read = (*_WEIGHTS, "mask")
    for key, value in message.items():
        is_unread = key not in read and says_what_is_learned(key) and is_mask(value)
        if is_unread or _is_switch(key, value) or _is_flag(key, value):
            raise _unread_mask(f"{where}.{key}", value, "turns")
    if (key := media_of(message)) is not None:
        raise lost_media(f"{where}.{key}", message[key])
    parts = message.get("content")
    for part in parts if isinstance(parts, list) else ():
        for key, value in part.items() if isinstance(part, dict) else ():
            if says_what_is_learned(key) and is_mask(value) and value not in (1, True):
                raise _unread_mask(f"`{key}` of a part of {where}.content", value, "turns")


def _refuse_thought(message: Mapping[str, Any], where: str) -> None:
    """Raise BadLineError if a turn that is not the assistant's has a thought beside its content.

    Templates write it before the content, or nowhere.
    """
    thoughts = [key for key in REASONING if message.get(key)]
    role = role_of(message) if thoughts else "assistant"
    if role not in _ROLES.values() or role in ("assistant", _CALL):
        return
    for key in thoughts:
        value = message[key]
        if not isinstance(value, str) or value.strip():
            said = f"{where}.{key} is a thought in a turn of role {role}: {shortened(value)}"
            raise BadLineError(f"{said}; {_THOUGHT_AS_TEXT}, or leave it out")


def refuse_masks_of_record(record: Mapping[str, Any], train_on: str = "all") -> None:
    """Raise BadLineError if a mask of ``record`` is not read, or says not to learn the record.

    ``weight`` is read elsewhere. A number in ``loss`` is a loss that was measured. NeMo's ``mask``
    names the role that is not learned, which has to be the user. ``train_on`` is ``data.train_on``:
    if it is ``last``, a record may say that only its last answer is learned.
    """
    for key, value in record.items():
        if _is_switch(key, value):
            _refuse_switch(key, value, train_on)
            continue
        if key == "mask" and isinstance(value, str) and not is_mask(value):
            is_read = _masks_users_or_no_role(value, record)
        elif key == "weight" or not says_what_is_learned(key) or not is_mask(value):
            is_read = True
        elif isinstance(meant := value_in(value), bool):
            is_read = meant and _NOT_LEARNED.isdisjoint(key.lower().split("_"))
        else:
            is_read = isinstance(meant, int | float) and (key == "loss" or meant == 1)
        if not is_read:
            raise _unread_mask(f"`{key}`", value, "records or turns")


def _masks_users_or_no_role(mask: str, record: Mapping[str, Any]) -> bool:
    """Return whether NeMo's ``mask`` names the user alone, or is no list of roles.

    The roles that it may name are the known ones, and those of the turns of ``record``.
    """
    names = {*_ROLES.values()}
    for field in ("messages", "conversations"):
        if is_dialogue(turns := turns_in(record.get(field), field)):
            names |= {str(role_of(turn)) for turn in turns if isinstance(turn, dict)}
    roles = {role_of({"role": each}) for each in re.split(r"[,;|/+&]", mask) if each.strip()}
    return roles <= {"user"} or not roles <= names


def _refuse_switch(key: str, value: object, train_on: str) -> None:
    """Raise BadLineError if the switch ``key`` of a record asks for something that is not done.

    With ``data.train_on last`` only the last answer is learned. Questions are never learned.
    """
    words, is_set = words_of(key), bool(truth_of(value))
    is_negated = not words.isdisjoint(_NOT_LEARNED)
    if "last" in words:
        is_read, is_of_last = not is_set, is_set and not is_negated
    elif "history" in words:
        is_of_last = is_set is is_negated
        is_read = not is_of_last
    else:
        is_read, is_of_last = is_set is is_negated, False
    if not is_read and not (is_of_last and train_on == "last"):
        raise _unread_mask(f"`{key}`", value, "records or turns", is_of_last=is_of_last)


def is_mask(value: object) -> bool:
    """Return whether ``value`` can be a mask or a weight."""
    if isinstance(value, str):
        return re.fullmatch(r"\s*(true|false|yes|no|[\d.]+)\s*", value, re.I) is not None
    return isinstance(value, int | float) or (isinstance(value, list) and value != [])


def _are_spans(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(each, dict) for each in value)


def _unread_mask(where: str, value: object, what: str, *, is_of_last: bool = False) -> BadLineError:
    said = f"{where} is {shortened(value)}, which seems to say what is learned, and is not read"
    remedy = f'write "weight": 0 in {what} that are not learned'
    remedy = f"set data.train_on last, or {remedy}" if is_of_last else remedy
    remedy += ", and leave this out"
    if what == "turns" and (" part of " in where or _are_spans(value)):  # axolotl's
        remedy += (
            ", or, to learn some parts of a turn alone, write the whole text as `segments`, a "
        )
        remedy += 'list of {"label": true or false, "text": ...}'
    if isinstance(value, str) and role_of({"role": value}) == "assistant":  # NeMo's
        remedy += "; if the user's turns are to be learned, exchange the two roles"
    return BadLineError(f"{said}; {remedy}")


# ---- pictures and sounds ------------------------------------------------------------------------


def media_of(fields: Mapping[str, Any]) -> str | None:
    """Return the key of pictures, films or sounds in a record or a turn. None: there are none."""
    found = (key for key in fields if _is_of_media(key) and _is_something(fields[key]))
    return next((key for key in found if not _is_container(fields[key])), None)


def _is_container(value: object) -> bool:
    """Return whether ``value`` names an image of a container, such as ``docker.io/x:latest``."""
    return isinstance(value, str) and re.fullmatch(r"[\w.\-/]+:[\w.\-]+", value) is not None


def _is_of_media(key: str) -> bool:
    """Return whether ``key`` names pictures, films or sounds, or their place (``image_path``)."""
    words = words_of(key)
    return key in MEDIA or not (words.isdisjoint(MEDIA) or words.isdisjoint(_PLACES))


def lost_media(where: str, value: object) -> BadLineError:
    """Make the error for the pictures or sounds ``value`` of the field ``where``."""
    said = f"{where} is no text, and would be lost: {shortened(value)}"
    return BadLineError(f"{said}; leave such records out, or write them as texts without it")


def _is_something(value: object) -> bool:
    """Return whether ``value`` has content.

    Null, false and empty texts have none, nor have lists and objects that hold nothing else.
    """
    if isinstance(value, dict):
        return any(map(_is_something, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_something, value))
    return value not in (None, "", b"", "[]", False)


def _read_part(part: object, where: str, role: str) -> dict[str, Any]:
    """Read a part of ``content`` of a turn of ``role``, and keep its other keys, such as
    ``citations``.

    Raises BadLineError: the part is no text.
    """
    part = {"text": part} if isinstance(part, str) else part
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        said = f"{where}.content has a part that is no text: {shortened(part)}"
        names = [str(part.get("type")), *part] if isinstance(part, dict) else []
        is_file = any(words_of(name) in _OF_FILES for name in names)
        if is_file or not frozenset().union(*map(words_of, names)).isdisjoint(MEDIA):
            raise BadLineError(f"{said}; leave such records out: the answer is about it")
        named = next((name for name in names if name in _ELSEWHERE), None)
        if (
            named in _PARTS_OF_THOUGHTS and role != "assistant"
        ):  # Magistral's prompt shows their form
            raise BadLineError(f"{said}; {_THOUGHT_AS_TEXT}")
        also = _ELSEWHERE[named] if named else ""
        if isinstance(part, dict) and isinstance(part.get("thinking"), list):  # Mistral's
            also = ", and the texts of thoughts, joined to one text, as `reasoning_content`"
        raise BadLineError(f"{said}; give texts alone{also}")
    others = {key: value for key, value in part.items() if value is not None}
    return {**others, "type": "text", "text": part["text"]}


def _read_calls(value: object, where: str) -> list[dict[str, Any]]:
    """Read one call or a list of calls. ``value`` may also be their JSON as text.

    Raises BadLineError: a call has no function with a name, or its arguments are no object.
    """
    is_text = isinstance(value, str)
    value = _parse_calls(value, where) if isinstance(value, str) else value
    calls: list[dict[str, Any]] = []
    for call in value if isinstance(value, list) else [value]:
        call = {k: v for k, v in call.items() if v is not None} if isinstance(call, dict) else {}
        function = call.get("function")
        if not isinstance(function, dict) and "name" in call:  # the function alone
            keys = {"name", *_ARGUMENTS}
            if keys.isdisjoint(call.keys() - {"name"}):
                keys |= {key for key, inner in call.items() if isinstance(inner, dict)}
            function = {key: call.pop(key) for key in [*call] if key in keys}
            call = {**call, "type": "function"}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            said = f"{where} has no function with a name: {shortened(value)}"
            raise BadLineError(f'{said}; give {{"name": ..., "arguments": {{...}}}}')
        function = {key: inner for key, inner in function.items() if inner is not None}
        named = next((key for key in _ARGUMENTS if key in function), None)
        others = [key for key, inner in function.items() if isinstance(inner, dict)]
        if named is None and others:
            said = f"{where} has `{others[0]}`, which is no name of its arguments"
            raise BadLineError(f"{said}: {shortened(value)}; name them `arguments`")
        arguments = function.pop(named) if named else {}
        # OpenAI's items of responses have an id of their own beside that of the call.
        of_call = [key for key, x in call.items() if _names_id_of_call(key) and isinstance(x, str)]
        if of_call:
            call["id"] = call.pop(of_call[0])
        if isinstance(arguments, str):
            found = parse_json(arguments, f"{where}: `arguments`") if arguments.strip() else {}
            arguments = arguments if isinstance(found, dict) and found else found
        if not isinstance(arguments, dict | str):
            said = f"{where}: `arguments` is not an object: {shortened(arguments)}"
            raise BadLineError(f"{said}; give an object, or its JSON as text")
        if is_text and isinstance(arguments, dict) and arguments != without_nulls(arguments):
            arguments = json.dumps(arguments, ensure_ascii=False)  # nulls in a text are meant
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


_QUOTED_CALL = re.compile(r"""\s*\{\s*"name":\s*"([^"]+)",\s*"arguments":\s*'(.*)'\s*\}\s*""", re.S)
"""Matches a call in Glaive's records: JSON, except for the single quotes around its arguments."""


def _parse_calls(text: str, where: str) -> Any:
    """Parse calls written in JSON, in Python's notation (Toucan's), or as in Glaive's records."""
    if found := _QUOTED_CALL.fullmatch(text):
        return {"name": found[1], "arguments": found[2].replace("\\'", "'")}
    if text.lstrip().startswith(("{'", "[{'")):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return ast.literal_eval(text.strip())
    return parse_json(text, where)


def parse_json(text: str, what: str) -> Any:
    """Parse ``text`` as JSON. Raises BadLineError, which names ``what``: ``text`` is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        said = f"{what} is text that is not JSON: {shortened(text)}"
        raise BadLineError(f"{said}; write it with a JSON library") from None


# ---- calls, their results, and tools ------------------------------------------------------------


def in_order_of_calls(turns: list[Message]) -> list[Message]:
    """Return ``turns`` with the results of parallel calls in the order of the calls.

    Most templates write results without ``tool_call_id``, so a model takes the first result for
    that of the first call. Results without ids, and results of calls without ids, keep their order.

    Raises BadLineError: an id names none of the calls, two results have the same id, or a call has
    no result although a later call has one.
    """
    made = [*turns]
    for i, turn in enumerate(turns):
        ids = [call.get("id") for call in turn.get("tool_calls", ())]
        stop = i + 1
        while stop < len(turns) and turns[stop]["role"] == "tool":
            stop += 1
        results = turns[i + 1 : stop]
        answered = [result.get("tool_call_id") for result in results]
        is_one = len(ids) == len(answered) == 1
        if is_one or not ids or None in ids or None in answered or len({*ids}) < len(ids):
            continue
        for k, each in enumerate(answered, i + 1):
            if each not in ids:
                said = f"messages[{k}].tool_call_id is {shortened(each)}, which names no call of"
                said = f"{said} messages[{i}]: {shortened(ids)}"
                raise BadLineError(f"{said}; give the id of the call that it answers")
        if len(ids) == 1:
            continue
        places = [ids.index(each) for each in answered]
        if sorted(places) != [*range(len(places))]:
            said = f"the results of the calls of messages[{i}] are {shortened(answered)}"
            said = f"{said}, and the calls are {shortened(ids)}"
            raise BadLineError(f"{said}; give one result for each call, or leave such records out")
        made[i + 1 : stop] = sorted(results, key=lambda x: ids.index(x["tool_call_id"]))
    return made


_WRITTEN_CALL = re.compile(r"[\[<{`]|\w\(|\bAction\b")
"""Matches what a call in a text has: JSON, tags, code, or ReAct's word."""


def result_without_call(turns: Sequence[Mapping[str, Any]]) -> str | None:
    """Name the first result of a tool behind a turn without calls: by its id, or by its text.

    None: there is no such result, or that turn has a call in its content.
    """
    before: Mapping[str, Any] = {}
    for turn in turns:
        if turn["role"] != "tool":
            before = turn
            continue
        is_written = before.get("role") == "assistant" and _WRITTEN_CALL.search(text_of(before))
        if not before.get("tool_calls") and not is_written:
            given = turn.get("tool_call_id")
            return (
                f"the id {given!r}" if given is not None else f"the text {shortened(text_of(turn))}"
            )
    return None


def are_listed(tools: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the system's turns have the signatures of all ``tools``.

    Hermes' records have them there.

    Raises BadLineError: the system's turns have the signatures of only some tools.
    """
    if not tools:
        return False
    said = "\n".join(text_of(turn) for turn in turns if turn["role"] in _OF_SYSTEM)
    # Each part begins with the value of a key `name`. A signature has a description or parameters;
    # an example of a call has neither.
    parts = re.split(r"""["']name["']\s*:\s*""", said)[1:]
    listed = {
        name[2]
        for part in parts
        if (name := re.match(r"""(["'])(.*?)\1""", part))
        and re.search(r"""["'](description|parameters)["']\s*:""", part)
    }
    names = [_name_of(tool) for tool in tools]
    others = [name for name in names if name not in listed]
    if others and len(others) < len(names):
        said = f"the system's turn lists other tools than `tools`, which has {shortened(others[0])}"
        raise BadLineError(f"{said}; leave one of the two lists out")
    return not others


def without_tags(turn: Message) -> Message:
    """Return a tool's turn without ``<tool_response>`` around its content.

    Other turns are returned unchanged. If a content has several results, the inner tags stay.
    """
    content = turn.get("content")
    if turn["role"] != "tool" or not isinstance(content, str):
        return turn
    found = _RESULTS.fullmatch(content)
    return turn if found is None else {**turn, "content": found[1]}


def unknown_roles(turns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the roles in ``turns`` that are not OpenAI's, in the order in which they come."""
    roles = dict.fromkeys(turn["role"] for turn in turns)
    return [role for role in roles if role not in _ROLES.values()]


def begins_with_system(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the first question begins with the whole text of the system's turn."""
    if len(turns) < 2 or turns[0]["role"] not in _OF_SYSTEM or turns[1]["role"] != "user":
        return False
    system, question = (text_of(turn).strip() for turn in turns[:2])
    return bool(system) and question.startswith(system)


def undeclared_call(
    turns: Sequence[Mapping[str, Any]], learned: Iterable[int], tools: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return the name of a called function that the model was not shown.

    Only calls of the turns ``learned`` count. A function is shown if it is in ``tools``, or if a
    turn before the call has its name. None: all functions were shown.
    """
    declared = {_name_of(tool) for tool in tools}
    for i in learned:
        for call in turns[i].get("tool_calls", ()):
            name = call["function"]["name"]
            if name not in declared and not any(name in text_of(turn) for turn in turns[:i]):
                return name
    return None


def _name_of(tool: Mapping[str, Any]) -> str | None:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else None


def text_of(turn: Mapping[str, Any]) -> str:
    """Return the text of a turn's ``content``. Its parts are joined."""
    content = turn.get("content") or ""
    parts = content if isinstance(content, list) else [content]
    return "".join(str(x.get("text") or "") if isinstance(x, dict) else str(x) for x in parts)


class Form(NamedTuple):
    """A way to write a conversation. Each field is a point in which templates differ."""

    arguments: Literal["object", "text"] = "object"
    """Arguments of calls: objects, or the text of their JSON."""
    empty: Literal["absent", "null", "text"] = "absent"
    """``content`` of turns that only call tools: absent, null, or an empty text."""
    content: Literal["as it is", "text", "parts"] = "as it is"
    """``content`` of other turns: unchanged, always a text, or always a list of parts."""
    developer: Literal["developer", "system"] = "developer"
    """Role of a developer's turns."""

    def is_alike_without_calls(self, other: "Form") -> bool:
        """Return whether this form and ``other`` write everything but calls in the same way."""
        return (self.content, self.developer) == (other.content, other.developer)

    def of(self, turns: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return ``turns`` in this form."""
        return [self._turn(turn) for turn in turns]

    def _turn(self, turn: Mapping[str, Any]) -> Message:
        made, content = {**turn}, turn.get("content")
        made.pop("weight", None)
        if turn["role"] == "developer":
            made["role"] = self.developer
        if "tool_calls" in turn:
            made["tool_calls"] = [self._call(call) for call in turn["tool_calls"]]
            if not content:
                made.pop("content", None)
                made |= {"absent": {}, "null": {"content": None}, "text": {"content": ""}}[
                    self.empty
                ]
                return made
        if isinstance(content, list) and self.content == "text":
            made["content"] = "".join(part["text"] for part in content)
        if isinstance(content, str) and self.content == "parts":
            made["content"] = [{"type": "text", "text": content}]
        return made

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if self.arguments == "object":
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            return {**call, "function": {**call["function"], "arguments": arguments}}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {**call["function"], "arguments": arguments}
        return {"type": "function", **call, "function": function}


def forms_of(
    turns: Sequence[Mapping[str, Any]], *, reads_parts: bool, knows_developers: bool
) -> list[Form]:
    """List the forms that ``turns`` may have, the usual ones first.

    Args:
        turns: the conversation.
        reads_parts: True: the template seems to take lists of parts.
        knows_developers: True: the template knows the role ``developer``. False: a developer's
            turns become the system's.
    """
    has_calls = any("tool_calls" in turn for turn in turns)
    is_empty = any("tool_calls" in turn and not turn.get("content") for turn in turns)
    has_parts = any(isinstance(turn.get("content"), list) for turn in turns)
    arguments: list[Any] = ["object", "text"] if has_calls else ["object"]
    empties: list[Any] = ["absent", "null", "text"] if is_empty else ["absent"]
    contents: list[Any] = ["as it is", "text", "parts"] if has_parts else ["as it is", "parts"]
    if has_parts and not reads_parts:
        contents = ["text", "parts"]
    has_developer = any(turn["role"] == "developer" for turn in turns)
    developers: list[Any] = ["developer", "system"] if knows_developers else ["system"]
    developers = developers if has_developer else ["developer"]
    return [
        Form(arguments=a, empty=e, content=c, developer=d)
        for c, d, a, e in product(contents, developers, arguments, empties)
    ]


# ---- what a template shows ----------------------------------------------------------------------

_SECRET = secrets.token_hex(6)
"""A part of each mark. It is random, so that no conversation or template contains a mark."""


_KIND = "the parameters of `tools`"
"""Kind of the pieces that are names of parameters."""


class Piece(NamedTuple):
    """A text that a user wrote, and the marks in its place. A template should show them."""

    place: str
    """The field that holds the text, such as ``messages[3].content``."""
    kind: str
    """The kind of text, such as ``content of role 'critic'``. Servers warn once for each kind."""
    turn: int | None
    """The turn that the text is part of. None: the text is in a tool or a document."""
    marks: tuple[str, ...]
    """The marks: one, or the key and the value of a call's arguments."""

    def is_in(self, text: str, form: Form) -> bool:
        """Return whether ``text``, a rendering of ``form``, shows the piece."""
        if not self.place.endswith(".arguments"):
            # If a template writes a list of parts as Python or JSON would, it shows no part.
            keys = ("'text': '", '"text": "') if self.place.endswith(".content") else ()
            if any(key + mark in text for key in keys for mark in self.marks):
                return False
            return all(mark in text for mark in self.marks)
        key, value = self.marks
        if form.arguments == "text":
            return json.dumps({key: value}) in text
        # Single quotes around the key mean that the template wrote a Python object, and not JSON.
        return key in text and value in text and f"'{key}'" not in text


class Marked(NamedTuple):
    """A conversation with marks in place of its texts."""

    turns: list[Message]
    variables: dict[str, Any]
    """The variables of the template, with marks in tools and documents."""
    pieces: list[Piece]
    """The texts that the marks stand for."""


class _Marker:
    """Makes marks, and lists the pieces that they stand for."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._num_marks = 0
        self._ids: dict[str, str] = {}

    def new(self) -> str:
        """Return a mark that no text contains. Filters such as ``tojson`` do not change it."""
        self._num_marks += 1
        return f"m{_SECRET}{self._num_marks:06d}"

    def add(self, place: str, kind: str, turn: int | None, count: int = 1) -> tuple[str, ...]:
        """List a piece with ``count`` new marks, and return the marks."""
        marks = tuple(self.new() for _ in range(count))
        self.pieces.append(Piece(place, kind, turn, marks))
        return marks

    def id(self, given: object) -> object:
        """Replace the id of a call by one of nine digits: some templates require this length."""
        if not isinstance(given, str):
            return given
        return self._ids.setdefault(given, f"{len(self._ids):09d}")

    def text(self, text: str, turn: int, role: str, place: str, with_thoughts: bool) -> str:
        """Return a mark in place of ``text``. Thoughts in an assistant's text get their own marks.

        Blank text stays. Thoughts are pieces only if ``with_thoughts`` is True.
        """
        if not text.strip():
            return text
        named = f"role {role!r}" if role in _ROLES.values() else "a role that it does not know"
        kind = f"`content` of {named}"
        if role != "assistant" or "</think>" not in text:
            return self.add(place, kind, turn)[0]
        thoughts, answer = text.rsplit("</think>", 1)
        made = []
        for piece in re.split("(</?think>)", thoughts):
            if piece.strip() and piece not in ("<think>", "</think>"):
                piece = f"\n{self._thought(turn, f'{place} before </think>', with_thoughts)}\n"
            made.append(piece)
        return "".join([*made, "</think>", self.text(answer, turn, role, place, with_thoughts)])

    def _thought(self, turn: int, place: str, is_needed: bool) -> str:
        return self.add(place, "reasoning", turn)[0] if is_needed else self.new()

    def turn(self, turn: Mapping[str, Any], i: int, with_thoughts: bool) -> Message:
        """Return turn ``i`` with marks. Thoughts are pieces only if ``with_thoughts`` is True."""
        made, place, role = {**turn}, f"messages[{i}]", turn["role"]
        if "tool_call_id" in turn:
            made["tool_call_id"] = self.id(turn["tool_call_id"])
        content = turn.get("content")
        where = f"{place}.content"
        if isinstance(content, str):
            made["content"] = self.text(content, i, role, where, with_thoughts)
        elif isinstance(content, list):
            parts = [self.text(p["text"], i, role, where, with_thoughts) for p in content]
            made["content"] = [{"type": "text", "text": text} for text in parts]
        thoughts = turn.get("reasoning_content")
        if isinstance(thoughts, str) and thoughts.strip():
            mark = self._thought(i, f"{place}.reasoning_content", with_thoughts)
            made |= {key: mark for key in REASONING if key in turn}
        if "tool_calls" in turn:
            calls = turn["tool_calls"]
            made["tool_calls"] = [
                self._call(call, i, f"{place}.tool_calls[{j}]") for j, call in enumerate(calls)
            ]
        return made

    def _call(self, call: Mapping[str, Any], turn: int, place: str) -> dict[str, Any]:
        function = {**call["function"], "name": self.add(f"{place}.name", "`tool_calls`", turn)[0]}
        if function["arguments"]:
            key, value = self.add(f"{place}.arguments", "`tool_calls`", turn, 2)
            function["arguments"] = {key: value}
        made = {**call, "function": function}
        return made | {"id": self.id(call["id"])} if "id" in call else made

    def variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        made = {**variables}
        if variables.get("tools"):
            tools = variables["tools"]
            made["tools"] = [self._tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
        if variables.get("documents"):
            found = variables["documents"]
            made["documents"] = [self._document(x, f"documents[{i}]") for i, x in enumerate(found)]
        return made

    def _tool(self, tool: Mapping[str, Any], place: str) -> dict[str, Any]:
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return {**tool, "function": self._named(function, place)}
        return self._named(tool, place) if isinstance(tool.get("name"), str) else {**tool}

    def _named(self, function: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return a function with marks in place of its name and of those of its parameters."""
        made = {**function, "name": self.add(place, "`tools`", None)[0]}
        if function.get("parameters"):
            made["parameters"] = self._parameters(function["parameters"], place)
        return made

    def _parameters(self, given: Any, place: str) -> Any:
        """Return parameters with marks in place of their names, or in place of a text."""
        if isinstance(given, str):
            return self.add(f"{place}.parameters", _KIND, None)[0]
        if isinstance(given, list):  # a JSON schema would have an object here
            return [
                {**each, "name": self._parameter(each["name"], place)}
                if isinstance(each, dict) and isinstance(each.get("name"), str)
                else self.add(f"{place}.parameters", _KIND, None)[0]
                for each in given
            ]
        if not isinstance(given, dict):
            return given
        made = {**given}
        for key in ("allOf", "anyOf", "oneOf"):
            if isinstance(given.get(key), list):
                made[key] = [self._parameters(each, place) for each in given[key]]
        if not isinstance(given.get("properties"), dict):
            return {
                key
                if key in KEYWORDS or key.startswith(("$", "x-"))
                else self._parameter(key, place): value
                for key, value in made.items()
            }
        names = {name: self._parameter(name, place) for name in given["properties"]}
        made["properties"] = {names[name]: each for name, each in given["properties"].items()}
        if isinstance(required := given.get("required"), list):
            made["required"] = [
                names.get(each, each) if isinstance(each, str) else each for each in required
            ]
        return made

    def _parameter(self, name: str, place: str) -> str:
        return self.add(f"the parameter {shortened(name)} of {place}", _KIND, None)[0]

    def _document(self, document: Mapping[str, Any], place: str) -> dict[str, Any]:
        text = document.get("text")
        if not isinstance(text, str) or not text.strip():
            return {**document}
        return {**document, "text": self.add(place, "`documents`", None)[0]}


def marked(
    turns: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], learned: set[int]
) -> Marked:
    """Put marks in place of each text, reasoning, call, tool and document.

    ``learned`` has the indices of the turns whose reasoning has to be shown.
    """
    marker = _Marker()
    made = [marker.turn(turn, i, i in learned) for i, turn in enumerate(turns)]
    return Marked(made, marker.variables(variables), marker.pieces)
