"""Reads exports of chat programs as ``messages``. They keep answers that were generated again, too.

A program is recognised by the keys of its records. Only the branch that the record itself chooses
is read; a record that chooses none is refused if it has several. Other branches are not learned.

- ChatGPT, ``conversations.json`` of the data export, as of 2023 to 2026: ``mapping``, from
  ``current_node`` to the root.
- Claude.ai, ``conversations.json`` of the data export, as of 2024 to 2026: ``chat_messages``, from
  ``current_leaf_message_uuid`` to the root if there is one.
- LibreChat 0.7 and 0.8, as ``useExportConversation.ts`` writes it: ``messages``, or
  ``messagesTree`` with ``children``, if they have one branch.
- LM Studio 0.3 and 0.4, a file of its folder ``conversations``: ``messages`` of ``versions``, each
  ``currentlySelected``.
- Open WebUI, ``chat.history`` from ``currentId`` to the root: 0.3 to 0.7, whose ``middleware.py``
  writes thoughts as ``<details>``, and the versions of 2026 that store ``output`` too.

OpenAI, Anthropic and LM Studio document no form. Theirs are those that the importers of LibreChat
and of other programs read.

Left out on purpose: the tools that these programs run themselves. Their calls are refused by name,
except Open WebUI's ``output``, whose items are those of OpenAI's responses.
"""

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from moetrain.config.sources import shortened
from moetrain.data.messages import BadLineError, Message, is_dialogue, no_turns, role_of, text_of
from moetrain.data.openai_logs import turns_of_items
from moetrain.data.warned import warn_once

_OF_FORMS = ("messages", "conversations", "chosen", "instruction", "prompt", "output", "text")
"""Fields of the known forms. A record with one of them is read by it, and not as a tree."""
_NO_PARENT = (
    None,
    "",
    "00000000-0000-0000-0000-000000000000",  # LibreChat
    "00000000-0000-4000-8000-000000000000",  # Claude.ai
)
"""Values of the parent of a first message."""
_CHAT_OF_OPEN_WEBUI = {
    *("id", "title", "models", "system", "params", "options", "messages", "history", "tags"),
    *("timestamp", "files"),
}
"""Keys of Open WebUI's ``chat``."""
_REDACTED = {
    "Original custom instructions no longer available",
    "The output of this plugin was redacted.",
}
"""What ChatGPT writes in the place of texts that it does not export."""
_DETAILS = re.compile(
    r'\s*<details type="reasoning"[^>]*>\s*<summary>[^<]*</summary>\n?(.*?)\n?</details>', re.DOTALL
)
"""Matches the thought at the beginning of an answer of Open WebUI."""
_THINKING = re.compile(r"\s*:::thinking\n(.*?)\n?:::(?:\n|\Z)", re.DOTALL)
"""Matches the thought at the beginning of an answer of LibreChat before it had ``content``."""
_CUT = {
    *("userStopped", "modelUnloaded", "failed", "maxPredictedTokensReached"),
    "contextLengthReached",
}
"""LM Studio's reasons to stop that leave an answer unfinished (``LLMPredictionStopReason``)."""


class _Read(NamedTuple):
    """The turns that are read of a record, and the system's text."""

    turns: list[Message]
    """The messages of the chosen branch."""
    system: object = None
    """The text that the program sends before them, if the record has it."""


class _Program(NamedTuple):
    """A chat program."""

    field: Callable[[Mapping[str, Any]], str | None]
    """Returns the place of the messages in a record of this program. None: it is none."""
    read: Callable[[Mapping[str, Any]], _Read]
    """Returns the messages of the chosen branch."""
    fields: tuple[str, ...]
    """The fields of the record that ``read`` reads, or that describe it under a name that says
    nothing of this."""


def place_in_export(record: Mapping[str, Any]) -> str | None:
    """Return the field of an export with its messages. None: ``record`` is no export."""
    return next((field for x in _PROGRAMS if (field := x.field(record)) is not None), None)


def place_of_no_turns(record: Mapping[str, Any]) -> str | None:
    """Return the place of the messages in an export of a chat without any. None: it is none.

    ``record`` has no known form. A chat in which nothing was asked has an empty list, or a tree
    without nodes. ``messages`` of LibreChat and LM Studio are found empty where messages are read.
    """
    for field in ("chat_messages", "mapping", "messagesTree"):
        if record.get(field) in ([], {}):
            return field
    chat = record.get("chat")
    place, chat = ("chat.", chat) if isinstance(chat, dict) else ("", record)
    history = chat.get("history")
    if isinstance(history, dict) and history.get("messages") == {}:
        return f"{place}history.messages"
    is_chat = place and not history and chat.get("messages") == []
    return "chat.messages" if is_chat and chat.keys() <= _CHAT_OF_OPEN_WEBUI else None


def read_export(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return an export of a chat program with ``messages``, and any other record as it is.

    Raises BadLineError: the chat has no turns, the record does not say which branch is the
    conversation, turns of it are not in the record or are not whole, or it has a call, a file or a
    text that would be lost.
    """
    program = next((x for x in _PROGRAMS if x.field(record) is not None), None)
    if program is None:
        return {**record}
    turns, system = program.read(record)
    if not turns:
        raise no_turns(str(program.field(record)))
    for i in range(1, len(turns)):
        if turns[i - 1]["role"] == turns[i]["role"] == "assistant":
            said = " and ".join(shortened(text_of(turn)) for turn in turns[i - 1 : i + 1])
            raise BadLineError(
                f"`{program.field(record)}` has two answers behind one another, {said}: one may go "
                "on with the other or replace it; write the conversation as `messages`, or leave "
                "such records out",
                kind="two answers behind one another",
            )
    rest = {key: value for key, value in record.items() if key not in program.fields}
    if isinstance(system, str) and system.strip():
        if rest.get("system") not in (None, "", system):
            problem = f"`system` and the system's text of the export differ: {shortened(system)}"
            raise BadLineError(f"{problem}; leave one of them out")
        rest["system"] = system
    return {**rest, "messages": turns}


# ---- what programs share -------------------------------------------------------------------------


def _branch(parents: Mapping[str, object], last: object, field: str, remedy: str) -> list[str]:
    """Return the ids of the messages from the first one to ``last``.

    Args:
        parents: the id of the message before each message, by its id.
        last: the id of the last message. If it is null, no message may have two behind it.
        field: the place of the messages in the record, for errors.
        remedy: how to choose a branch.
    """
    if last in (None, ""):
        inner = {each for each in parents.values() if isinstance(each, str)}
        leaves = [each for each in parents if each not in inner]
        if len(leaves) != 1:
            problem = f"`{field}` has {len(leaves)} branches, and the record does not say which "
            raise BadLineError(f"{problem}is the conversation; {remedy}", kind="several branches")
        last = leaves[0]
    path: list[str] = []
    while last not in _NO_PARENT:
        if not isinstance(last, str) or last not in parents or last in path:
            problem = f"`{field}` has no message {shortened(last)}, to which its branch leads"
            raise BadLineError(f"{problem}; leave such records out", kind="a broken branch")
        path.append(last)
        last = parents[last]
    return path[::-1]


def _refuse_unfinished(flags: Mapping[str, object], where: str) -> None:
    """Raise BadLineError if one of ``flags``, by its key, says that an answer is not whole."""
    for key, value in flags.items():
        if value:
            raise BadLineError(
                f"{where}.{key} is {shortened(value)}: the answer is not whole; leave such records "
                "out",
                kind="an unfinished answer",
            )


def _refuse_disliked(message: Mapping[str, Any], key: str, bad: object, where: str) -> None:
    """Raise BadLineError if the user's rating in ``key`` of an answer is ``bad``.

    An answer of weight 0 is not learned, and so is not refused.
    """
    judged = message.get(key)
    rating = judged.get("rating") if isinstance(judged, dict) else None
    if rating == bad and message.get("weight") != 0:
        problem = f"{where}.{key}.rating is {shortened(rating)}: the user calls the answer a bad "
        remedy = 'leave such records out, or write "weight": 0 in the message'
        raise BadLineError(f"{problem}one, and it would be learned; {remedy}", kind="a bad rating")


def _refused_tool(where: str, value: object, name: str) -> BadLineError:
    """Make the error for a call of a tool, or another part of an answer, that is not read."""
    said = f"{where} is of the kind {name}, which is not read: {shortened(value)}"
    raise BadLineError(
        f"{said}; write the conversation as `messages`, or leave such records out",
        kind=f"a message of the kind {name}",
    )


def _thought(text: str) -> dict[str, str]:
    return {"type": "thinking", "thinking": text}


def _turn(role: str, said: str | Iterable[object], rest: Mapping[str, Any], where: str) -> Message:
    """Return the message of a text, or of parts in which thoughts stand before the texts.

    Parts of other types stay, and are refused where messages are read.
    """
    turn: Message = {**rest, "role": role}
    if isinstance(said, str):
        return {**turn, "content": said}
    thoughts: list[str] = []
    content: list[Any] = []
    for part in said:
        if not isinstance(part, dict) or not isinstance(part.get("thinking"), str):
            content.append(part)
        elif content:
            raise BadLineError(
                f"{where} has a thought behind a text: {shortened(part)}; write it before the "
                "text, or leave such records out",
                kind="a thought behind a text",
            )
        elif part["thinking"].strip():
            thoughts.append(part["thinking"].strip())
    if thoughts:
        turn["reasoning_content"] = "\n\n".join(thoughts)
    is_text = len(content) == 1 and isinstance(content[0], dict)
    if is_text and content[0].keys() == {"type", "text"} and content[0]["type"] == "text":
        return {**turn, "content": content[0]["text"]}
    return {**turn, "content": content or ""}


def _divided(text: str, pattern: re.Pattern[str]) -> tuple[str | None, str]:
    """Return the thought that ``pattern`` matches at the beginning of ``text``, and the rest."""
    found = pattern.match(text)
    return (found[1], text[found.end() :].strip()) if found else (None, text)


def _without(message: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in keys}


def _are_objects(value: object, *keys: str) -> bool:
    """Return whether ``value`` is a list of objects, at least one, each with ``keys``."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(x, dict) and x.keys() >= {*keys} for x in value)
    )


def _has_no_form(record: Mapping[str, Any]) -> bool:
    return all(record.get(key) is None for key in _OF_FORMS)


# ---- ChatGPT -------------------------------------------------------------------------------------


def _field_of_chatgpt(record: Mapping[str, Any]) -> str | None:
    nodes = record.get("mapping")
    is_tree = isinstance(nodes, dict) and _are_objects([*nodes.values()], "parent", "message")
    return "mapping" if is_tree and _has_no_form(record) else None


def _read_chatgpt(record: Mapping[str, Any]) -> _Read:
    nodes = record["mapping"]
    remedy = "write the id of its last message as `current_node`"
    parents = {key: node["parent"] for key, node in nodes.items()}
    turns: list[Message] = []
    for key in _branch(parents, record.get("current_node"), "mapping", remedy):
        message = nodes[key]["message"]
        if message is None:
            continue
        turn = _turn_of_chatgpt(message, f"mapping[{key!r}].message")
        if turn is None:
            continue
        last = turns[-1] if turns else {}
        is_assistant = last.get("role") == turn["role"] == "assistant"
        if is_assistant and not last.get("content"):  # a thought, or nothing yet
            thoughts = [x["reasoning_content"] for x in (last, turn) if "reasoning_content" in x]
            joined = {"reasoning_content": "\n\n".join(thoughts)} if thoughts else {}
            turns[-1] = {**turn, **joined}
        else:
            turns.append(turn)
    return _Read(turns)


def _turn_of_chatgpt(message: object, where: str) -> Message | None:
    """Return the message of a node. None: it shows nothing."""
    message = message if isinstance(message, dict) else {}
    author, content = message.get("author"), message.get("content")
    if not isinstance(author, dict) or not isinstance(content, dict):
        said = f"{where} has no `author` with a `role` or no `content`: {shortened(message)}"
        raise BadLineError(f"{said}; leave such records out")
    role, kind = str(author.get("role")), str(content.get("content_type"))
    metadata = message.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    rest: dict[str, Any] = {"metadata": metadata} if metadata else {}
    if own := _instructions_of_chatgpt(role, content, metadata):
        return {"role": "system", "content": own}
    texts = [x for key, x in content.items() if key != "content_type" and isinstance(x, str)]
    is_empty = kind.endswith("_editable_context") and not any(map(str.strip, texts))
    if is_empty or kind == "reasoning_recap":  # "Thought for 8 seconds"
        return None
    is_said = kind in ("text", "multimodal_text", "thoughts")
    if not is_said or role not in ("system", "user", "assistant"):
        raise _refused_tool(where, content, kind if role != "tool" else f"tool, {kind}")
    if message.get("recipient") not in (None, "all"):
        raise _refused_tool(where, content, f"recipient {message['recipient']}")
    if role == "assistant":
        details = metadata.get("finish_details") or {}
        ends = details.get("type") if isinstance(details, dict) else None
        status = message.get("status")
        flags = {
            "status": status not in (None, "finished_successfully") and status,
            "metadata.finish_details": ends in ("max_tokens", "interrupted") and ends,
        }
        _refuse_unfinished(flags, where)
        rest |= {"weight": 0} if message.get("weight") == 0 else {}
        rest |= {} if message.get("channel") in (None, "final") else {"channel": message["channel"]}
    if kind == "thoughts":
        thought = _thought_of_chatgpt(content, where)
        return {**rest, "role": role, "reasoning_content": thought} if thought else None
    parts = _texts_of_chatgpt(content, where)
    if role == "system" and not any(part.strip() for part in parts):
        return None
    return _turn(role, [{"type": "text", "text": part} for part in parts], rest, where)


def _instructions_of_chatgpt(
    role: str, content: Mapping[str, Any], metadata: Mapping[str, Any]
) -> str:
    """Return the user's custom instructions in a node, or an empty text.

    They are in the content of a hidden message, and before 2024 in the metadata of the system's.
    """
    own = [content.get(key) for key in ("user_profile", "user_instructions")]
    if content.get("content_type") != "user_editable_context":
        data, parts = metadata.get("user_context_message_data"), content.get("parts")
        if role != "system" or not isinstance(data, dict) or not any(data.values()):
            return ""
        own = [*(parts if isinstance(parts, list) else ()), *data.values()]
    own = [text for text in own if isinstance(text, str) and text.strip() not in ("", *_REDACTED)]
    if own:
        warn_once(
            "custom instructions of ChatGPT",
            "`mapping` of records has the user's custom instructions, which are shown as the "
            "system's turn; leave their messages out if that is not meant",
        )
    return "\n\n".join(own)


def _texts_of_chatgpt(content: Mapping[str, Any], where: str) -> list[str]:
    """Return the texts of a node. Raises BadLineError: there is something else beside them."""
    parts = content.get("parts") or []
    if not isinstance(parts, list) or any(not isinstance(part, str) for part in parts):
        said = f"{where}.content has a part that is no text: {shortened(parts)}"
        raise BadLineError(f"{said}; leave such records out: the answer is about it")
    if any(part.strip() in _REDACTED for part in parts):
        said = f"{where}.content stands for a text that is not in the record: {shortened(parts)}"
        raise BadLineError(f"{said}; leave such records out", kind="a text that was redacted")
    if any("\ue200" in part for part in parts):
        raise BadLineError(
            f"{where}.content has marks that ChatGPT replaces by links and names (U+E200 to "
            f"U+E201): {shortened(parts)}; replace them by their texts, or leave such records out",
            kind="marks of ChatGPT",
        )
    return parts


def _thought_of_chatgpt(content: Mapping[str, Any], where: str) -> str:
    """Return the thoughts of a node. ChatGPT's export has their summaries."""
    thoughts = content.get("thoughts")
    if not isinstance(thoughts, list) or not all(isinstance(x, dict) for x in thoughts):
        raise _refused_tool(where, content, "thoughts")
    texts = [x.get("content") or x.get("summary") for x in thoughts]
    texts = [text for text in texts if isinstance(text, str) and text.strip()]
    if texts:
        warn_once(
            "summaries of thoughts of ChatGPT",
            "`mapping` of records has thoughts, which ChatGPT exports as summaries, and which are "
            "learned as the thoughts; leave the messages of the type thoughts out if that is not "
            "meant",
        )
    return "\n\n".join(texts)


# ---- Claude.ai -----------------------------------------------------------------------------------


def _field_of_claude(record: Mapping[str, Any]) -> str | None:
    is_one = _are_objects(record.get("chat_messages"), "sender", "uuid")
    return "chat_messages" if is_one and _has_no_form(record) else None


def _read_claude(record: Mapping[str, Any]) -> _Read:
    messages: Sequence[dict[str, Any]] = record["chat_messages"]
    places = {str(message["uuid"]): i for i, message in enumerate(messages)}
    if len(places) != len(messages):
        problem = f"`chat_messages` are {len(messages)} with {len(places)} different `uuid`"
        raise BadLineError(f"{problem}; leave such records out")
    path = [*places]
    last = record.get("current_leaf_message_uuid")
    if all("parent_message_uuid" in message for message in messages):
        parents = {str(x["uuid"]): x.get("parent_message_uuid") for x in messages}
        remedy = "write the `uuid` of its last message as `current_leaf_message_uuid`"
        path = _branch(parents, last, "chat_messages", remedy)
    else:
        _refuse_unordered(messages)
    turns: list[Message] = []
    for key in path:
        message, where = messages[places[key]], f"chat_messages[{places[key]}]"
        role = role_of({"role": message["sender"]})
        if role not in ("user", "assistant"):
            said = f"{where}.sender is {shortened(message['sender'])}, neither human nor assistant"
            raise BadLineError(f"{said}; leave such records out")
        if role == "assistant":
            _refuse_unfinished({"truncated": message.get("truncated")}, where)
        text, content = message.get("text"), message.get("content")
        parts = content if isinstance(content, list) else [content or {"text": ""}]
        parts = [x for x in parts if not (isinstance(x, dict) and x.get("type") == "token_budget")]
        are_blank = all(isinstance(x, dict) and x.get("text") == "" for x in parts)
        said = text if are_blank and isinstance(text, str) else parts
        rest = _without(message, "sender", "text", "content", "uuid", "parent_message_uuid")
        turns.append(_turn(str(role), said, rest, where))
    return _Read(turns)


def _refuse_unordered(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise BadLineError unless human and assistant alternate, where no message names its parent.

    Warn that an export without parents may have turns of other branches.
    """
    roles = [role_of({"role": message["sender"]}) for message in messages]
    for i, role in enumerate(roles):
        if role != ("user", "assistant")[i % 2]:
            raise BadLineError(
                f"chat_messages[{i}] is of the sender {shortened(messages[i]['sender'])}, and no "
                "message names its parent: it may be of another branch; leave such records out, or "
                "the messages of other branches",
                kind="an export without parents",
            )
    if len(messages) > 2:
        warn_once(
            "an export of Claude.ai without parents",
            "`chat_messages` of records do not name their parents (parent_message_uuid): they are "
            "read as one conversation in their order. A question that was edited would stand "
            "before its later form",
        )


# ---- LibreChat -----------------------------------------------------------------------------------


def _field_of_librechat(record: Mapping[str, Any]) -> str | None:
    for field in ("messagesTree", "messages"):
        messages = record.get(field)
        if isinstance(messages, list) and _are_objects(messages, "messageId", "isCreatedByUser"):
            return None if any("role" in message for message in messages) else field
    return None


def _read_librechat(record: Mapping[str, Any]) -> _Read:
    field = str(_field_of_librechat(record))
    parents: dict[str, object] = {}
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    stack = [(f"{field}[{i}]", message, None) for i, message in enumerate(record[field])][::-1]
    while stack:
        where, message, before = stack.pop()
        if not isinstance(message, dict) or not {"messageId", "isCreatedByUser"} <= message.keys():
            raise BadLineError(f"{where} is no message: {shortened(message)}; leave it out")
        key = str(message["messageId"])
        if key in found:
            problem = f"{where}.messageId is that of another message, {shortened(key)}"
            raise BadLineError(f"{problem}; leave such records out")
        parents[key] = before or message.get("parentMessageId")
        found[key] = where, message
        inner = message.get("children")
        inner = inner if isinstance(inner, list) else []
        stack += [(f"{where}.children[{i}]", x, key) for i, x in enumerate(inner)][::-1]
    remedy = "leave the messages of other branches out, or export the chat without its branches"
    turns = [_turn_of_librechat(*found[key]) for key in _branch(parents, None, field, remedy)]
    options = record.get("options")
    options = options if isinstance(options, dict) else {}
    for key in ("instructions", "additional_instructions", "examples"):
        if options.get(key):
            said = f"`options.{key}` may be shown before the messages: {shortened(options[key])}"
            remedy = "write it, with a `promptPrefix`, as `system`, and leave `options` out"
            raise BadLineError(f"{said}; {remedy}")
    return _Read(turns, options.get("promptPrefix"))


def _turn_of_librechat(where: str, message: Mapping[str, Any]) -> Message:
    role = "user" if message["isCreatedByUser"] else "assistant"
    if role == "assistant":
        _refuse_unfinished({key: message.get(key) for key in ("error", "unfinished")}, where)
        _refuse_disliked(message, "feedback", "thumbsDown", where)
    used = ("messageId", "parentMessageId", "conversationId", "children", "isCreatedByUser")
    rest = _without(message, *used, "sender", "text", "content", "error", "unfinished")
    content = message.get("content") or []
    if not isinstance(content, list):
        return {**rest, "role": role, "content": content}
    parts = [part for part in content if part is not None]
    text = message.get("text")
    if not parts and isinstance(text, str) and role == "assistant":
        thought, text = _divided(text, _THINKING)
        if thought is not None:
            return _turn(role, [_thought(thought), {"type": "text", "text": text}], rest, where)
    if not parts:
        return {**rest, "role": role, "content": text}
    said: list[object] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if isinstance(part, dict) and kind in ("text", "think") else None
        text = text.get("value") if isinstance(text, dict) else text  # of the assistants' API
        if kind == "error":
            _refuse_unfinished({"content": part}, where)
        if kind == "think" and isinstance(text, str):
            said.append(_thought(text))
        else:
            said.append({**part, "text": text} if isinstance(text, str) else part)
    return _turn(role, said, rest, where)


# ---- LM Studio -----------------------------------------------------------------------------------


def _field_of_lm_studio(record: Mapping[str, Any]) -> str | None:
    is_one = _are_objects(record.get("messages"), "versions")
    return "messages" if is_one else None


def _read_lm_studio(record: Mapping[str, Any]) -> _Read:
    turns: list[Message] = []
    for i, message in enumerate(record["messages"]):
        chosen, versions = message.get("currentlySelected"), message["versions"]
        is_there = isinstance(chosen, int) and isinstance(versions, list)
        if not is_there or not 0 <= chosen < len(versions):
            problem = f"messages[{i}].currentlySelected is {shortened(chosen)}, which is none of "
            raise BadLineError(f"{problem}its `versions`; leave such records out")
        turns.append(_turn_of_lm_studio(versions[chosen], f"messages[{i}].versions[{chosen}]"))
    system = record.get("systemPrompt")
    if not system and record.get("usePerChatPredictionConfig") is not False:
        config = record.get("perChatPredictionConfig")
        fields = config.get("fields") if isinstance(config, dict) else None
        for field in fields if isinstance(fields, list) else ():
            if isinstance(field, dict) and field.get("key") == "llm.prediction.systemPrompt":
                system = field.get("value")
    return _Read(turns, system)


def _turn_of_lm_studio(version: object, where: str) -> Message:
    if not isinstance(version, dict) or not isinstance(version.get("role"), str):
        raise BadLineError(f"{where} has no role: {shortened(version)}; leave such records out")
    used = ("type", "role", "content", "steps", "senderInfo", "preprocessed")
    rest, role = _without(version, *used), version["role"]
    steps = version.get("steps")
    if isinstance(steps, list) and steps:
        blocks = [x for x in steps if isinstance(x, dict) and x.get("type") != "debugInfoBlock"]
        said = [
            part for j, x in enumerate(blocks) for part in _parts_of_step(x, f"{where}.steps[{j}]")
        ]
        if len([x for x in blocks if not _is_thinking(x)]) > 1:
            raise BadLineError(
                f"{where} has several blocks of text: {shortened(said)}; join them into one, or "
                "leave such records out",
                kind="several blocks of text",
            )
        return _turn(role, said, rest, where)
    parts = version.get("content")
    if not isinstance(parts, list):
        return {**rest, "role": role, "content": parts}
    parts = _texts_joined(parts)
    before = version.get("preprocessed")
    shown = before.get("content") if isinstance(before, dict) else None
    if shown and text_of({"content": shown}) != text_of({"content": parts}):
        raise BadLineError(
            f"{where}.preprocessed is the text that the model was shown, and it is not that of "
            f"`content`: {shortened(shown)}; write it as `content`, or leave such records out",
            kind="a text that was preprocessed",
        )
    return _turn(role, parts, rest, where)


def _parts_of_step(step: Mapping[str, Any], where: str) -> list[Any]:
    """Return the parts of a step of an answer: a thought, or texts."""
    parts, kind = step.get("content"), step.get("type")
    if kind != "contentBlock" or not isinstance(parts, list):
        raise _refused_tool(where, step, str(kind))
    if step.get("roleOverride") not in (None, "assistant"):
        raise _refused_tool(where, parts, f"roleOverride {step['roleOverride']}")
    info = step.get("genInfo")
    stats = info.get("stats") if isinstance(info, dict) else None
    stop = stats.get("stopReason") if isinstance(stats, dict) else None
    _refuse_unfinished({"genInfo.stats.stopReason": str(stop) in _CUT and stop}, where)
    if not _is_thinking(step):
        if step.get("shouldIncludeInContext") is False:
            problem = f"{where} was not shown to the model (shouldIncludeInContext): "
            raise BadLineError(f"{problem}{shortened(parts)}; leave it out")
        return _texts_joined(parts)
    texts = [x for x in parts if not (isinstance(x, dict) and x.get("isStructural"))]
    if any(not isinstance(x, dict) or not isinstance(x.get("text"), str) for x in texts):
        raise _refused_tool(where, parts, "thinking")
    thought = "".join(x["text"] for x in texts).strip()
    return [_thought(thought.removeprefix("<think>").removesuffix("</think>"))]


def _is_thinking(step: Mapping[str, Any]) -> bool:
    style = step.get("style")
    return isinstance(style, dict) and style.get("type") == "thinking"


def _texts_joined(parts: Sequence[Any]) -> list[Any]:
    """Return ``parts`` with successive texts, which are tokens of a stream, joined."""
    made: list[Any] = []
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            made.append(part)
        elif made and isinstance(made[-1], dict) and made[-1].keys() == {"type", "text"}:
            made[-1] = {"type": "text", "text": made[-1]["text"] + part["text"]}
        else:
            made.append({"type": "text", "text": part["text"]})
    return made


# ---- Open WebUI ----------------------------------------------------------------------------------


def _field_of_open_webui(record: Mapping[str, Any]) -> str | None:
    if not _has_no_form(record):
        return None
    place, chat = (
        ("chat.", record["chat"]) if isinstance(record.get("chat"), dict) else ("", record)
    )
    history = chat.get("history")
    nodes = history.get("messages") if isinstance(history, dict) else None
    if isinstance(nodes, dict) and _are_objects([*nodes.values()], "role", "parentId"):
        return f"{place}history.messages"
    is_chat = place and not history and is_dialogue(chat.get("messages"))
    return "chat.messages" if is_chat and chat.keys() <= _CHAT_OF_OPEN_WEBUI else None


def _read_open_webui(record: Mapping[str, Any]) -> _Read:
    field = str(_field_of_open_webui(record))
    chat = record["chat"] if field.startswith("chat.") else record
    params = chat.get("params")
    system = chat.get("system") or (params.get("system") if isinstance(params, dict) else None)
    turns: list[Message] = []
    if field == "chat.messages":  # the branch that is shown
        found = [(f"{field}[{i}]", message) for i, message in enumerate(chat["messages"])]
    else:
        nodes = chat["history"]["messages"]
        remedy = f"write the id of its last message as `{field.rpartition('.')[0]}.currentId`"
        parents = {key: node["parentId"] for key, node in nodes.items()}
        path = _branch(parents, chat["history"].get("currentId"), field, remedy)
        found = [(f"{field}[{key!r}]", nodes[key]) for key in path]
    for where, message in found:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            said = f"{where} has no role: {shortened(message)}"
            raise BadLineError(f"{said}; leave such records out")
        turns += _turns_of_open_webui(message, where)
    return _Read(turns, system)


def _turns_of_open_webui(message: Mapping[str, Any], where: str) -> list[Message]:
    role, content = message["role"], message.get("content")
    used = ("id", "parentId", "childrenIds", "role", "content", "output", "done", "error")
    rest = _without(message, *used)
    if role != "assistant" or not isinstance(content, str):
        return [{**rest, "role": role, "content": content}]
    flags = {"error": message.get("error"), "done": message.get("done") is False and "false"}
    _refuse_unfinished(flags, where)
    _refuse_disliked(message, "annotation", -1, where)
    if output := message.get("output"):
        turns = turns_of_items(output, f"{where}.output")
        for turn in turns:
            text = "".join(text_of(turn).split()) if turn.get("role") == "assistant" else ""
            if text not in "".join(content.split()):
                problem = f"{where}.content does not have the text of its `output`"
                raise BadLineError(
                    f"{problem}, {shortened(text_of(turn))}: it may have been edited; leave "
                    "`output` out if `content` is right",
                    kind="an answer that was edited",
                )
        weight = {"weight": rest.pop("weight")} if "weight" in rest else {}
        turns = [{**turn, **weight} if turn["role"] == "assistant" else turn for turn in turns]
        return [*turns[:-1], {**rest, **turns[-1]}] if turns else []
    thought, text = _divided(content, _DETAILS)
    if found := re.search(r'<details type="(\w+)"', text):
        raise _refused_tool(f"{where}.content", content, f"details of {found[1]}")
    if thought is None:
        return [_turn(role, content, rest, where)]
    # Newer versions escape the thought as HTML. Each line has a mark of a quotation.
    thought = html.unescape(thought) if thought.lstrip().startswith("&gt;") else thought
    lines = [line.removeprefix("> ") for line in thought.splitlines()]
    lines = ["" if line == ">" else line for line in lines]
    parts = [_thought("\n".join(lines)), {"type": "text", "text": text}]
    return [_turn(role, parts, rest, where)]


_PROGRAMS = (
    _Program(_field_of_chatgpt, _read_chatgpt, ("mapping", "current_node", "default_model_slug")),
    _Program(_field_of_claude, _read_claude, ("chat_messages", "current_leaf_message_uuid")),
    _Program(_field_of_lm_studio, _read_lm_studio, ("messages", "systemPrompt")),
    _Program(
        _field_of_librechat,
        _read_librechat,
        ("messages", "messagesTree", "options", "endpoint", "exportAt"),
    ),
    _Program(_field_of_open_webui, _read_open_webui, ("chat", "history", "params")),
)
"""The programs whose exports are read."""
