"""Renames fields of the records of public data sets to the names that the known forms use.

A field is renamed only if it means the same in all data sets that have it. A question with its
answer is read only if each other field is known (:data:`~moetrain.data.known_sets.ABOUT`),
describes the record, or repeats text of the two. Any other field may be a part of the question.
"""

from collections.abc import Mapping
from typing import Any

from moetrain.data.chat_exports import place_in_export, read_export
from moetrain.data.known_sets import (
    ABOUT,
    QUESTION_OF,
    QUESTIONS,
    RESPONSES,
    read_known_set,
    read_reasoned_answer,
    with_tools_of_metadata,
)
from moetrain.data.lost import describes
from moetrain.data.messages import (
    MEDIA,
    BadLineError,
    is_dialogue,
    is_said,
    media_of,
    parse_json,
    role_of,
)
from moetrain.data.openai_logs import is_response, read_response, without_settings
from moetrain.data.tools import are_tools
from moetrain.data.warned import warn_once

_DIALOGUES = ("conversation", "trajectory")
"""Other names of ``messages``: LMSYS-Chat's and WildChat's, and OpenHands' for its runs."""
SYSTEMS = ("system_prompt", "system_message", "meta_instruction")
"""Other names of ``system``: OpenOrca's, distilabel's, MOSS's."""
_OF_FORMS = {
    *("messages", "conversations", "chosen", "rejected", "instruction", "output", "prompt"),
    *("question", "answer"),
}
"""Fields of the known forms. A record without any of them may have a dialogue under any name."""
_IN_CAPITALS = {
    **{"Instruction": "instruction", "Input": "input", "Output": "output"},
    **{"System": "system", "Functions": "functions", "Tools": "tools", "History": "history"},
}
"""The fields of Alpaca's form that some copies write with a capital letter."""
_FUNCTIONS = ("available_tools", "function_list", "function_description")
"""Other names of ``tools``, if the field holds a list of tools, or the text of its JSON."""


def renamed(
    record: Mapping[str, Any], *, reads_pairs: bool, text_field: str = "text"
) -> dict[str, Any]:
    """Return ``record`` with its fields renamed to the names that the known forms use.

    Args:
        record: a record of any form.
        reads_pairs: True: rejected answers beside an answer or ``messages`` are read too. False:
            ms-swift's ``rejected_response`` is ignored.
        text_field: the field that holds a whole text (``data.text_field``). It keeps its name.

    Raises BadLineError: two fields that would get the same name differ, a text that should be JSON
    is not, or the record belongs to a known data set and a part of it cannot be read.
    """
    found = {key: value for key, value in record.items() if value is not None}
    found = read_response(found) if is_response(found) else without_settings(found)
    found = read_export(found)
    if not {"instruction", "output"} & found.keys() and {"Instruction", "Output"} <= found.keys():
        found = {_IN_CAPITALS.get(key, key): value for key, value in found.items()}
    for name in SYSTEMS:
        if name != text_field:
            _rename(found, name, "system")
    for name in MEDIA:
        if name in found and media_of({name: found[name]}) is None:
            del found[name]
    for name in _FUNCTIONS:
        if name != text_field:
            _read_functions(found, name)
    if not {"messages", "conversations", text_field} & found.keys():
        read_known_set(found)
        for name in _DIALOGUES:
            turns = found.get(name)
            if isinstance(turns, str) and turns.lstrip().startswith("[{"):
                found[name] = parse_json(turns, f"`{name}`")
            if is_dialogue(found.get(name)):
                _rename(found, name, "messages")
    read_reasoned_answer(found)
    found = with_tools_of_metadata(found)
    if "chosen" not in found:
        for pattern in ("{}_response", "response_{}"):  # When2Call, MedicalGPT
            better, worse = pattern.format("chosen"), pattern.format("rejected")
            if better in found:
                _rename(found, better, "chosen")
                _rename(found, worse, "rejected")
                break
    _read_openais_pair(found)
    if "instruction" in found:  # Dolly
        _rename(found, "response", "output")
        context = found.get("context")
        # HotpotQA's is an object: it is no text of its own, and may be shown or not.
        is_shown = isinstance(context, str) and is_said(context, [found["instruction"]])
        if not is_shown and not isinstance(context, dict | list):
            _rename(found, "context", "input")
    elif text_field not in found:
        _read_question(found, reads_pairs)
    if reads_pairs and "chosen" not in found:
        _read_swifts_pair(found)
    if (name := _other_dialogue(found, text_field)) is not None:
        _rename(found, name, "messages")
        warn_once(
            f"the dialogue {name}",
            f"`{name}` of records is read as `messages`: it is their only field with a dialogue",
        )
    # Keep the fields that are null: they mean nothing, but errors show them.
    return {**{key: None for key in record if record[key] is None}, **found}


def names_renamed(record: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of ``record`` of fields that :func:`renamed` gave other names, by these.

    Args:
        record: the record as it was.
        found: what :func:`renamed` has returned for it.
    """
    gone = {key: value for key, value in record.items() if key not in found}
    return {
        new: old
        for new, value in found.items()
        if new not in record
        for old in [next((key for key in gone if gone[key] is value), None)]
        if old is not None
    }


def name_of_dialogue(record: object) -> str | None:
    """Return the field of ``record`` that :func:`renamed` renames to ``messages``, if any."""
    if not isinstance(record, dict) or record.get("messages") is not None:
        return None
    if (place := place_in_export(record)) is not None:
        return place
    known = (name for name in _DIALOGUES if isinstance(record.get(name), list))
    return next(known, None) or _other_dialogue(record, "text")


def _other_dialogue(record: Mapping[str, Any], text_field: str) -> str | None:
    """Return the only field with a dialogue, in a record of no known form.

    None: there is no such field or more than one, the dialogue has no question or does not end with
    an answer, or the record has a field of a known form.
    """
    if not _OF_FORMS.isdisjoint(key for key, value in record.items() if value is not None):
        return None
    if record.get(text_field) is not None:
        return None
    names = [key for key, value in record.items() if is_dialogue(value)]
    if len(names) != 1:
        return None
    roles = [role_of(turn) for turn in record[names[0]] if isinstance(turn, dict)]
    is_whole = {"user", "assistant"} <= {*map(str, roles)} and roles[-1] == "assistant"
    return names[0] if is_whole else None


def _rename(found: dict[str, Any], name: str, new: str) -> None:
    """Rename a field unless it is empty. Raises BadLineError: ``new`` has another value."""
    if name not in found or found[name] in ("", [], {}):
        return
    if found.get(new) and found[new] != found[name]:
        raise BadLineError(f"`{new}` and `{name}` differ; leave one of them out")
    found[new] = found.pop(name)


def _read_functions(found: dict[str, Any], name: str) -> None:
    """Rename the field ``name`` to ``tools`` if it holds a list of tools, perhaps as JSON."""
    tools = found.get(name)
    if isinstance(tools, str) and tools.lstrip().startswith("[") and '"name"' in tools:
        tools = parse_json(tools, f"`{name}`")
    if isinstance(tools, list) and tools and are_tools(tools):
        _rename(found, name, "tools")


def _read_question(found: dict[str, Any], reads_pairs: bool) -> None:
    """Read a question with its answer as an instruction, or as the prompt of a pair."""
    texts = {name: name.lower() for name in found if isinstance(found[name], str)}
    asked = [name for name, lower in texts.items() if lower in QUESTIONS]
    said = [name for name, lower in texts.items() if lower in RESPONSES]
    if not asked and not said:
        said = [name for name, lower in texts.items() if lower in QUESTION_OF]
        asked = [name for name, lower in texts.items() if lower in map(_question_of, said)]
    beside = found.keys() - {*asked, *said}
    whole = [found[name] for name in (*asked, *said)]  # it contains OpenCodeReasoning's `solution`
    others = {
        name.lower()
        for name in beside
        if not describes(name, found[name])
        and not (isinstance(found[name], str) and is_said(found[name], whole))
    }
    others -= {name.lower().removesuffix("_pretokenized") for name in (*asked, *said)}
    if len(asked) != 1 or len(said) != 1 or others - ABOUT:
        return
    is_pair = reads_pairs and isinstance(found.get("rejected_response"), str)
    found["question" if is_pair else "instruction"] = found.pop(asked[0])
    found["chosen" if is_pair else "output"] = found.pop(said[0])
    if is_pair:
        found["rejected"] = found.pop("rejected_response")


def _question_of(answer: str) -> str:
    return QUESTION_OF[answer.lower()]


def _read_openais_pair(found: dict[str, Any]) -> None:
    """Read a record of OpenAI's preference fine-tuning."""
    asked = found.get("input")
    if not isinstance(asked, dict) or not {"preferred_output", "non_preferred_output"} <= {*found}:
        return
    del found["input"]
    found["prompt"] = asked.get("messages")
    if asked.get("tools"):
        found.setdefault("tools", asked["tools"])
    found["chosen"] = found.pop("preferred_output")
    found["rejected"] = found.pop("non_preferred_output")


def _read_swifts_pair(found: dict[str, Any]) -> None:
    """Read ``messages`` beside a rejected answer or a rejected dialogue, as ms-swift has them."""
    messages = found.get("messages")
    if not isinstance(messages, list) or len(messages) < 2:
        return
    if not isinstance(messages[-1], dict) or role_of(messages[-1]) != "assistant":
        return
    if isinstance(other := found.get("rejected_messages"), list):
        found["chosen"], found["rejected"] = found.pop("messages"), other
        del found["rejected_messages"]
        return
    text, turn = found.get("rejected_response"), found.get("rejected_message")  # OpenPipe's
    if isinstance(text, str):
        turn = {"role": "assistant", "content": text}
    if isinstance(turn, dict):
        *found["prompt"], last = found.pop("messages")
        found["chosen"], found["rejected"] = [last], [turn]
        del found["rejected_response" if isinstance(text, str) else "rejected_message"]
