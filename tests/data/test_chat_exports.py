"""Exports of chat programs become the conversation of the branch that they choose.

The records have the keys that the programs' exporters write, or that importers of LibreChat and
others read. The right texts are transformers' renderings of OpenAI's messages.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moetrain.data.chat import CHATML, BadLineError, ChatTemplate
from moetrain.data.loader import build_data
from moetrain.data.records import RecordReader
from moetrain.data.warned import SEEN
from tests.lib.data_files import BYTE_VOCAB, config, write_lines

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
AGAIN, LAST = {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "S"}
THOUGHT = {**LAST, "reasoning_content": "so"}
ZERO = "00000000-0000-0000-0000-000000000000"


def theirs(*messages: dict) -> str:
    rendered, _ = render_jinja_template([[*messages]], chat_template=CHATML)
    return rendered[0].rstrip()


def reader() -> RecordReader:
    return RecordReader(ChatTemplate(CHATML, {}))


# ---- one chat of two questions, with an answer that was generated again --------------------------


def chatgpt_node(parent: str | None, role: str, parts: list, **beside: Any) -> dict:
    message: dict[str, Any] = {"author": {"role": role, "name": None, "metadata": {}}}
    message |= {"create_time": 1.7e9, "content": {"content_type": "text", "parts": parts}}
    message |= {"status": "finished_successfully", "weight": 1.0, "recipient": "all"}
    message |= {"metadata": {"request_id": "abc", "is_complete": True}, "channel": None}
    return {"parent": parent, "children": [], "message": {**message, **beside}}


CHATGPT: dict[str, Any] = {
    "title": "Birds",
    "create_time": 1756000000.1,
    "mapping": {
        "root": {"id": "root", "parent": None, "children": ["s"], "message": None},
        "s": chatgpt_node("root", "system", [""]),
        "u1": chatgpt_node("s", "user", ["q"]),
        "old": chatgpt_node("u1", "assistant", ["OLD"]),
        "a1": chatgpt_node("u1", "assistant", ["a"], end_turn=True, channel="final"),
        "u2": chatgpt_node("a1", "user", ["r"]),
        "a2": chatgpt_node("u2", "assistant", ["b"]),
    },
    "moderation_results": [],
    "current_node": "a2",
    "plugin_ids": None,
    "conversation_id": "c-1",
    "safe_urls": [],
    "default_model_slug": "gpt-5",
    "is_archived": False,
    "id": "c-1",
}


def webui_node(key: str, parent: str | None, role: str, content: str, **beside: Any) -> dict:
    node: dict[str, Any] = {"id": key, "parentId": parent, "childrenIds": [], "role": role}
    node |= {"content": content, "timestamp": 1700000000}
    if role == "assistant":
        node |= {"model": "m", "modelName": "m", "modelIdx": 0, "done": True, "statusHistory": []}
        node |= {"usage": {"total_tokens": 7, "prompt_tokens": 3}, "sources": []}
    else:
        node |= {"models": ["m"], "files": []}
    return {key: {**node, **beside}}


OPEN_WEBUI: dict[str, Any] = {
    "id": "c-1",
    "user_id": "u",
    "title": "Birds",
    "chat": {
        "title": "Birds",
        "models": ["m"],
        "params": {},
        "history": {
            "currentId": "a2",
            "messages": {
                **webui_node("u1", None, "user", "q"),
                **webui_node("a1", "u1", "assistant", "a"),
                **webui_node("old", "u1", "assistant", "OLD"),
                **webui_node("u2", "a1", "user", "r"),
                **webui_node("a2", "u2", "assistant", "b"),
            },
        },
        "messages": [],
        "tags": [],
        "timestamp": 1700000000000,
        "files": [],
    },
    "updated_at": 1700000010,
    "created_at": 1700000000,
    "share_id": None,
    "archived": False,
    "pinned": False,
    "meta": {"tags": ["birds"]},
    "folder_id": None,
}


def claude_message(key: str, parent: str, sender: str, *content: dict, **beside: Any) -> dict:
    texts = [part["text"] for part in content if part["type"] == "text"]
    message: dict[str, Any] = {"uuid": key, "text": "".join(texts), "content": [*content]}
    message |= {"sender": sender, "created_at": "2026-01-02T10:05:00Z", "attachments": []}
    return {**message, "files": [], "parent_message_uuid": parent, **beside}


def claude_text(text: str) -> dict:
    part: dict[str, Any] = {"start_timestamp": "2026-01-02T10:05:00Z", "stop_timestamp": None}
    return {**part, "flags": None, "type": "text", "text": text, "citations": []}


CLAUDE: dict[str, Any] = {
    "uuid": "c-1",
    "name": "Birds",
    "summary": "",
    "created_at": "2026-01-02T10:05:00Z",
    "updated_at": "2026-01-02T10:05:00Z",
    "account": {"uuid": "x"},
    "current_leaf_message_uuid": "a2",
    "chat_messages": [
        claude_message("u1", "00000000-0000-4000-8000-000000000000", "human", claude_text("q")),
        claude_message("old", "u1", "assistant", claude_text("OLD")),
        claude_message("a1", "u1", "assistant", claude_text("a")),
        claude_message("u2", "a1", "human", claude_text("r")),
        claude_message("a2", "u2", "assistant", claude_text("b")),
    ],
}


def libre_message(key: str, parent: str, text: str, **beside: Any) -> dict:
    is_users = key.startswith("u")
    message: dict[str, Any] = {"_id": key, "messageId": key, "parentMessageId": parent, "__v": 0}
    message |= {"conversationId": "c-1", "createdAt": "2024-05-01T16:35:11.530Z", "user": "64d4"}
    message |= {"endpoint": "openAI", "error": False, "isCreatedByUser": is_users, "model": None}
    message |= {"sender": "User" if is_users else "GPT-4", "text": text, "tokenCount": 59}
    return {**message, "unfinished": False, "finish_reason": "stop", **beside}


LIBRE_MESSAGES = [
    libre_message("u1", ZERO, "q"),
    libre_message("a1", "u1", "a"),
    libre_message("u2", "a1", "r"),
    libre_message("a2", "u2", "b"),
]
LIBRECHAT: dict[str, Any] = {
    "conversationId": "c-1",
    "endpoint": "openAI",
    "title": "Birds",
    "exportAt": "13:18:04 GMT-0400 (Eastern Daylight Time)",
    "branches": False,
    "recursive": False,
    "options": {"presetId": None, "model": "gpt-4", "promptPrefix": "", "temperature": 0.8},
    "messages": LIBRE_MESSAGES,
}


def libre_tree(messages: list[dict], *others: dict) -> list[dict]:
    """Return ``messages`` within one another, as a recursive export has them."""
    tree: list[dict] = []
    for message in messages[::-1]:
        tree = [{**message, "children": tree}]
    tree[0]["children"] = [*others, *tree[0]["children"]]
    return tree


def lm_text(text: str, **beside: Any) -> dict:
    return {"type": "text", "text": text, **beside}


def lm_asked(*texts: str, chosen: int = 0) -> dict:
    versions = [{"type": "singleStep", "role": "user", "content": [lm_text(x)]} for x in texts]
    return {"versions": versions, "currentlySelected": chosen}


def lm_step(*content: dict, **beside: Any) -> dict:
    step: dict[str, Any] = {
        "type": "contentBlock",
        "stepIdentifier": "1-0.1",
        "content": [*content],
    }
    step |= {"defaultShouldIncludeInContext": True, "shouldIncludeInContext": True}
    info = {"identifier": "m", "stats": {"stopReason": "eosFound", "promptTokensCount": 11}}
    return {**step, "genInfo": info, **beside}


DEBUG = {"type": "debugInfoBlock", "debugInfo": "Conversation naming technique: 'prompt'"}


def lm_said(*versions: list[dict], chosen: int = 0) -> dict:
    made = [
        {
            "type": "multiStep",
            "role": "assistant",
            "senderInfo": {"senderName": "m"},
            "steps": steps,
        }
        for steps in versions
    ]
    return {"versions": made, "currentlySelected": chosen}


LM_STUDIO: dict[str, Any] = {
    "name": "Birds",
    "pinned": False,
    "createdAt": 1784921389195,
    "tokenCount": 2146,
    "systemPrompt": "",
    "lastUsedModel": {"identifier": "m", "indexedModelIdentifier": "o/m-GGUF/q8.gguf"},
    "messages": [
        lm_asked("DRAFT", "q", chosen=1),
        lm_said([lm_step(lm_text("OLD"))], [lm_step(lm_text("a")), DEBUG], chosen=1),
        lm_asked("r"),
        lm_said([lm_step(lm_text("b"))]),
    ],
}
EXPORTS = {
    "ChatGPT": CHATGPT,
    "Claude.ai": CLAUDE,
    "LibreChat": LIBRECHAT,
    "LM Studio": LM_STUDIO,
    "Open WebUI": OPEN_WEBUI,
}


def changed(name: str, **last: Any) -> dict:
    """Return the export of ``name`` with other keys in the message of its last answer."""
    record = copy.deepcopy(EXPORTS[name])
    if name == "ChatGPT":
        record["mapping"]["a2"]["message"] |= last
    elif name == "Open WebUI":
        record["chat"]["history"]["messages"]["a2"] |= last
    elif name == "LM Studio":
        record["messages"][-1]["versions"][0] |= last
    else:
        record["chat_messages" if name == "Claude.ai" else "messages"][-1] |= last
    return record


@pytest.mark.parametrize("name", EXPORTS)
def test_the_chosen_branch_is_learned(name: str, caplog):
    SEEN.clear()
    record = copy.deepcopy(EXPORTS[name])
    (document,) = reader().documents(record)
    assert document.text == theirs(USER, ANSWER, AGAIN, LAST)
    # All answers of the branch are learned.
    starts = [
        theirs(*said) + "\n<|im_start|>assistant\n" for said in ([USER], [USER, ANSWER, AGAIN])
    ]
    assert [start for start, _ in document.loss_spans or ()] == [*map(len, starts)]
    assert reader().unread(record, [document]) == []
    assert record == EXPORTS[name]
    assert not caplog.text


def without(record: dict, *keys: str) -> dict:
    return {key: value for key, value in record.items() if key not in keys}


EMPTY: dict[str, tuple[dict, str]] = {
    "ChatGPT": ({**CHATGPT, "mapping": {}, "current_node": None}, "mapping"),
    "ChatGPT's root": (
        {**CHATGPT, "mapping": {"root": CHATGPT["mapping"]["root"]}, "current_node": "root"},
        "mapping",
    ),
    "Claude.ai": ({**CLAUDE, "chat_messages": [], "current_leaf_message_uuid": None}, "chat_mess"),
    "LibreChat": ({**LIBRECHAT, "messages": []}, "messages"),
    "LibreChat's tree": ({"conversationId": "c-1", "messagesTree": []}, "messagesTree"),
    "LM Studio": ({**LM_STUDIO, "messages": []}, "messages"),
    "Open WebUI": (
        {"chat": {"title": "x", "history": {"messages": {}, "currentId": None}, "messages": []}},
        r"chat\.history\.messages",
    ),
    "Open WebUI's messages": ({"chat": {"title": "x", "messages": []}}, r"chat\.messages"),
    "LMSYS-Chat": ({"conversation_id": "c-1", "conversation": []}, "conversation"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_chat_in_which_nothing_was_asked_is_named_as_that(name: str, tmp_path: Path, caplog):
    record, place = EMPTY[name]
    with pytest.raises(
        BadLineError, match=rf"^`{place}\w*` is empty: it is a chat without turns; leave such"
    ):
        reader().documents(record)
    # The advice of the error is followed: data.bad_records skip leaves the chat out.
    whole = EXPORTS.get(name.partition("'")[0], {"messages": [USER, ANSWER, AGAIN, LAST]})
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([record, whole, whole]))
    how: dict[str, Any] = {"eval_fraction": 0, "streaming": "no", "seq_len": 256}
    data = build_data(config(tmp_path, path=str(path), bad_records="skip", **how), BYTE_VOCAB)
    assert "a chat without turns" in caplog.text
    only = write_lines(tmp_path / "whole.jsonl", *[whole] * 2)
    expected = build_data(config(tmp_path, path=str(only), **how), BYTE_VOCAB)
    rows = [x.train.row(i).tokens_S for x in (data, expected) for i in range(len(x.train))]
    assert len(rows) == 2 * len(expected.train)
    assert all(map(np.array_equal, rows, rows[len(expected.train) :]))


def test_an_empty_list_beside_another_form_is_no_chat():
    empty = {"mapping": {}, "chat_messages": [], "conversation": []}
    for record in ({"text": "x"}, {"question": "q", "answer": "a"}):
        assert reader().documents({**record, **empty}) == reader().documents(record)


def test_the_only_branch_needs_no_choice():
    """Open WebUI's older exports have the messages of the branch alone, LibreChat's a tree."""
    mapping = without(CHATGPT["mapping"], "old")
    nodes = without(OPEN_WEBUI["chat"]["history"]["messages"], "old")
    shown = [without(x, "parentId", "childrenIds") for x in nodes.values()]
    claude = [x for x in CLAUDE["chat_messages"] if x["uuid"] != "old"]
    tree = libre_tree(LIBRE_MESSAGES)
    records: list[dict] = [
        {**without(CHATGPT, "current_node"), "mapping": mapping},
        {**OPEN_WEBUI, "chat": {"history": {"currentId": None, "messages": nodes}}},
        {"title": "Birds", "history": {"currentId": "a2", "messages": nodes}},
        {"id": "c-1", "chat": {"title": "Birds", "models": ["m"], "messages": shown}},
        {**without(CLAUDE, "current_leaf_message_uuid"), "chat_messages": claude},
        {**without(LIBRECHAT, "messages"), "recursive": True, "messagesTree": tree},
        {**LIBRECHAT, "recursive": True, "messages": tree},
        {**LIBRECHAT, "branches": True, "messages": LIBRE_MESSAGES[::-1]},
    ]
    for record in records:
        (document,) = reader().documents(record)
        assert document.text == theirs(USER, ANSWER, AGAIN, LAST)


OTHER = libre_message("a3", "u1", "OLD")
UNCHOSEN: dict[str, tuple[dict, str, dict]] = {
    "ChatGPT": (
        without(CHATGPT, "current_node"),
        r"`mapping` has 2 branches, and the record does not say .*; write the id of its last "
        "message as `current_node`",
        CHATGPT,
    ),
    "Claude.ai": (
        without(CLAUDE, "current_leaf_message_uuid"),
        "`chat_messages` has 2 branches, .*; write the `uuid` of its last message as "
        "`current_leaf_message_uuid`",
        CLAUDE,
    ),
    "LibreChat": (
        {**LIBRECHAT, "branches": True, "messages": [*LIBRE_MESSAGES, OTHER]},
        "`messages` has 2 branches, .*; leave the messages of other branches out, or export",
        LIBRECHAT,
    ),
    "LibreChat's tree": (
        {
            **without(LIBRECHAT, "messages"),
            "messagesTree": libre_tree(LIBRE_MESSAGES, {**OTHER, "children": []}),
        },
        "`messagesTree` has 2 branches, .*; leave the messages of other branches out",
        {**without(LIBRECHAT, "messages"), "messagesTree": libre_tree(LIBRE_MESSAGES)},
    ),
    "Open WebUI": (
        {
            **OPEN_WEBUI,
            "chat": {"history": {"messages": OPEN_WEBUI["chat"]["history"]["messages"]}},
        },
        "`chat.history.messages` has 2 branches, .*; write the id of its last message as "
        "`chat.history.currentId`",
        OPEN_WEBUI,
    ),
}


@pytest.mark.parametrize("name", UNCHOSEN)
def test_a_record_that_chooses_no_branch_is_refused(name: str):
    record, says, followed = UNCHOSEN[name]
    with pytest.raises(BadLineError, match=f"^{says}"):
        reader().documents(record)
    assert reader().documents(followed)[0].text == theirs(USER, ANSWER, AGAIN, LAST)


def libre_parts(*parts: dict) -> dict:
    return {"text": "", "content": [*parts]}


DETAILS = '<details type="reasoning" done="true" duration="3">\n<summary>Thought for 3 seconds'
DETAILS += "</summary>\n{}\n</details>\n{}"
REASONING = {"type": "reasoning", "id": "r-1", "status": "completed", "summary": None}
REASONING |= {"content": [{"type": "output_text", "text": "so"}], "duration": 3}
SAID = {"type": "message", "id": "m-1", "role": "assistant", "status": "completed"}
SAID |= {"content": [{"type": "output_text", "text": "b"}]}
THINKING = {"type": "thinking", "ended": True, "title": "Thought for 19.35 seconds"}
THOUGHTS: dict[str, dict] = {
    "Claude.ai": changed(
        "Claude.ai",
        content=[{"type": "thinking", "thinking": "so", "summaries": []}, claude_text("b")],
    ),
    "LibreChat": changed(
        "LibreChat",
        **libre_parts({"type": "think", "think": "so"}, {"type": "text", "text": "b"}),
    ),
    "LibreChat's assistants": changed(
        "LibreChat",
        **libre_parts(
            {"type": "think", "think": {"value": "so"}},
            {"type": "text", "text": {"value": "b", "annotations": []}},
        ),
    ),
    "LibreChat's text": changed("LibreChat", text=":::thinking\nso\n:::\nb"),
    "LM Studio": changed(
        "LM Studio",
        steps=[
            lm_step(
                lm_text("<think>", isStructural=True),
                lm_text("s", isStructural=False),
                lm_text("o\n"),
                lm_text("</think>", isStructural=True),
                style=THINKING,
                shouldIncludeInContext=False,
            ),
            lm_step(lm_text("b")),
            DEBUG,
        ],
    ),
    "Open WebUI": changed("Open WebUI", content=DETAILS.format("&gt; so", "b")),
    "Open WebUI before it escaped": changed("Open WebUI", content=DETAILS.format("> so", "b")),
    "Open WebUI's output": changed(
        "Open WebUI", content=DETAILS.format("&gt; so", "b"), output=[REASONING, SAID]
    ),
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_a_thought_is_learned_before_its_answer(name: str):
    (document,) = reader().documents(THOUGHTS[name])
    assert document.text == theirs(USER, ANSWER, AGAIN, THOUGHT)


def test_thoughts_of_several_lines_are_those_that_were_escaped():
    """The middleware of Open WebUI marks each line as a quotation, and escapes them."""
    shown = "&gt; x &lt; y &amp; z\n&gt; \n&gt; &quot;so&quot;"
    (document,) = reader().documents(changed("Open WebUI", content=DETAILS.format(shown, "b")))
    thought = 'x < y & z\n\n"so"'
    assert document.text == theirs(USER, ANSWER, AGAIN, {**LAST, "reasoning_content": thought})


def test_chatgpts_thoughts_are_summaries_and_a_warning_says_so(caplog):
    SEEN.clear()
    record = copy.deepcopy(CHATGPT)
    thoughts = {"content_type": "thoughts", "thoughts": [{"summary": "Sums", "content": "so"}]}
    recap = {"content_type": "reasoning_recap", "content": "Thought for 8s"}
    record["mapping"] |= {
        "t": chatgpt_node("u2", "assistant", [], content=thoughts),
        "c": chatgpt_node("t", "assistant", [], content=recap),
    }
    record["mapping"]["a2"]["parent"] = "c"
    (document,) = reader().documents(record)
    assert document.text == theirs(USER, ANSWER, AGAIN, THOUGHT)
    assert "`mapping` of records has thoughts, which ChatGPT exports as summaries" in caplog.text


GONE = "Original custom instructions no longer available"
OWN: dict[str, Any] = {"content_type": "user_editable_context"}
OWN |= {"user_profile": "An SRE.", "user_instructions": "Be brief."}
DATA = {"about_user_message": "An SRE.", "about_model_message": "Be brief."}
DATA = {"is_user_system_message": True, "user_context_message_data": DATA}


@pytest.mark.parametrize(
    "node",
    [
        chatgpt_node("s", "user", [], content=OWN, weight=0, metadata=DATA),
        chatgpt_node("s", "system", [""], metadata=DATA),
        chatgpt_node("s", "system", [GONE], metadata=DATA),
    ],
    ids=["2025", "2023", "2024"],
)
def test_chatgpts_custom_instructions_are_shown(node: dict, caplog):
    SEEN.clear()
    record = copy.deepcopy(CHATGPT)
    empty = {"content_type": "model_editable_context", "model_set_context": ""}
    record["mapping"] |= {"i": node, "m": chatgpt_node("i", "assistant", [], content=empty)}
    record["mapping"]["u1"]["parent"] = "m"
    (document,) = reader().documents(record)
    system = {"role": "system", "content": "An SRE.\n\nBe brief."}
    assert document.text == theirs(system, USER, ANSWER, AGAIN, LAST)
    assert "`mapping` of records has the user's custom instructions" in caplog.text


def with_chat(**beside: Any) -> dict:
    return {**OPEN_WEBUI, "chat": {**OPEN_WEBUI["chat"], **beside}}


FIELDS = [{"key": "llm.prediction.systemPrompt", "value": "S"}]


@pytest.mark.parametrize(
    "record",
    [
        {**LIBRECHAT, "options": {"promptPrefix": "S", "modelLabel": "Birds"}},
        {**LM_STUDIO, "systemPrompt": "S"},
        {**LM_STUDIO, "perChatPredictionConfig": {"fields": FIELDS}},
        with_chat(params={"system": "S", "temperature": 0.8}),
        with_chat(system="S"),
    ],
)
def test_the_systems_text_of_a_chat_is_shown(record: dict):
    (document,) = reader().documents(record)
    assert document.text == theirs(SYSTEM, USER, ANSWER, AGAIN, LAST)
    assert document == reader().documents({**record, "system": "S"})[0]
    with pytest.raises(BadLineError, match="`system` and the system's text of the export differ"):
        reader().documents({**record, "system": "T"})


def test_calls_of_open_webui_are_learned():
    call = {"type": "function_call", "id": "c", "call_id": "c", "name": "rain"}
    call |= {"arguments": '{"where": "Paris"}', "status": "completed"}
    result = {"type": "function_call_output", "id": "o", "call_id": "c", "status": "completed"}
    result |= {"output": [{"type": "input_text", "text": "no"}]}
    content = '<details type="tool_calls">\n<summary>Tool Executed</summary>\n"no"\n</details>\nb'
    record = changed("Open WebUI", content=content, output=[call, result, SAID])
    (document,) = reader().documents(record)
    function = {"name": "rain", "arguments": {"where": "Paris"}}
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    whole = [USER, ANSWER, AGAIN, called, {"role": "tool", "content": "no"}, LAST]
    assert document.text == theirs(*whole)
    assert len(document.loss_spans or ()) == 3
    # Without the items the text of the answer has the result alone.
    says = r"chat\.history\.messages\['a2'\]\.content is of the kind details of tool_calls"
    with pytest.raises(BadLineError, match=f"^{says}.*; write the conversation as `messages`"):
        reader().documents(changed("Open WebUI", content=content))
    with pytest.raises(
        BadLineError, match=r"\.content does not have the text of its `output`, 'b'"
    ):
        reader().documents(changed("Open WebUI", content="c", output=[SAID]))
    assert reader().documents(changed("Open WebUI", content="c"))


# ---- what would be lost or is not whole ----------------------------------------------------------


def asked(name: str, **beside: Any) -> dict:
    """Return the export of ``name`` with other keys in the message of its last question."""
    record = copy.deepcopy(EXPORTS[name])
    if name == "ChatGPT":
        record["mapping"]["u2"]["message"] |= beside
    elif name == "Open WebUI":
        record["chat"]["history"]["messages"]["u2"] |= beside
    elif name == "LM Studio":
        record["messages"][2]["versions"][0] |= beside
    else:
        record["chat_messages" if name == "Claude.ai" else "messages"][-2] |= beside
    return record


FILE = "Revenue rose by 5 %."
IMAGE = {"content_type": "image_asset_pointer", "asset_pointer": "sediment://file_1", "width": 9}
PICTURE = {"type": "file", "fileIdentifier": "1 - 2.png", "fileType": "image", "sizeBytes": 1}
CODE = {"content_type": "code", "language": "python", "text": "1 + 1"}
SEARCH = {"id": "t", "name": "web_search", "input": {"query": "r"}}
ASKED_LM = {"type": "toolCallRequest", "callId": 1, "name": "rain", "parameters": {}}
LOST: dict[str, tuple[dict, str]] = {
    "ChatGPT's file": (
        asked("ChatGPT", metadata={"attachments": [{"name": "n.pdf", "mime_type": "x"}]}),
        r"`mapping` is read as `messages`: messages\[2\]\.metadata\.attachments names a file",
    ),
    "ChatGPT's picture": (
        asked("ChatGPT", content={"content_type": "multimodal_text", "parts": [IMAGE, "r"]}),
        r"mapping\['u2'\]\.message\.content has a part that is no text: .*; leave such records out",
    ),
    "ChatGPT's code": (
        changed("ChatGPT", content=CODE, recipient="python"),
        r"mapping\['a2'\]\.message is of the kind code, which is not read: .*1 \+ 1",
    ),
    "ChatGPT's call": (
        changed("ChatGPT", recipient="bio"),
        r"mapping\['a2'\]\.message is of the kind recipient bio",
    ),
    "ChatGPT's result": (
        changed("ChatGPT", author={"role": "tool", "name": "python"}),
        r"mapping\['a2'\]\.message is of the kind tool, text",
    ),
    "ChatGPT's memory": (
        changed(
            "ChatGPT",
            content={"content_type": "model_editable_context", "model_set_context": "Likes rain."},
        ),
        r"mapping\['a2'\]\.message is of the kind model_editable_context.*Likes rain",
    ),
    "ChatGPT's marks": (
        changed("ChatGPT", content={"content_type": "text", "parts": ["b \ue200cite\ue201"]}),
        r"mapping\['a2'\]\.message\.content has marks that ChatGPT replaces",
    ),
    "ChatGPT's redacted": (
        {
            **CHATGPT,
            "mapping": {
                **CHATGPT["mapping"],
                "s": chatgpt_node("root", "system", [GONE]),
            },
        },
        r"mapping\['s'\]\.message\.content stands for a text that is not in the record: .*; leave",
    ),
    "ChatGPT's unfinished": (
        changed("ChatGPT", status="in_progress"),
        r"mapping\['a2'\]\.message\.status is 'in_progress': the answer is not whole",
    ),
    "ChatGPT's commentary": (
        changed("ChatGPT", channel="commentary"),
        r"`mapping` is read as `messages`: messages\[3\]\.channel",
    ),
    "ChatGPT's cut": (
        changed("ChatGPT", metadata={"finish_details": {"type": "max_tokens"}}),
        r"mapping\['a2'\]\.message\.metadata\.finish_details is 'max_tokens': the answer is not w",
    ),
    "ChatGPT's broken branch": (
        {**CHATGPT, "mapping": without(CHATGPT["mapping"], "u1")},
        r"`mapping` has no message 'u1', to which its branch leads; leave such records out",
    ),
    "ChatGPT's two answers": (
        {
            **CHATGPT,
            "mapping": {
                **CHATGPT["mapping"],
                "a3": chatgpt_node("a2", "assistant", ["c"]),
            },
            "current_node": "a3",
        },
        "`mapping` has two answers behind one another, 'b' and 'c': .*; write the conversation a",
    ),
    "Claude.ai's attachment": (
        asked("Claude.ai", attachments=[{"file_name": "n.txt", "extracted_content": FILE}]),
        r"`chat_messages` is read as `messages`: messages\[2\]\.attachments may be a part of what",
    ),
    "Claude.ai's file": (
        asked("Claude.ai", files=[{"file_name": "plan.pdf"}]),
        r".*messages\[2\]\.files names a file whose text is not in the record",
    ),
    "Claude.ai's call": (
        changed("Claude.ai", content=[{"type": "tool_use", **SEARCH}, claude_text("b")]),
        r".*messages\[3\]\.content has a part that is no text: .*web_search",
    ),
    "Claude.ai's thought": (
        changed("Claude.ai", content=[claude_text("b"), {"type": "thinking", "thinking": "so"}]),
        r"chat_messages\[4\] has a thought behind a text",
    ),
    "Claude.ai's uuid": (
        changed("Claude.ai", uuid="u1"),
        "`chat_messages` are 5 with 4 different `uuid`; leave such records out",
    ),
    "LibreChat's id": (
        changed("LibreChat", messageId="u1"),
        r"messages\[3\]\.messageId is that of another message, 'u1'; leave such records out",
    ),
    "Claude.ai's sender": (
        changed("Claude.ai", sender=None),
        r"chat_messages\[4\]\.sender is None, neither human nor assistant; leave such records out",
    ),
    "Claude.ai's unfinished": (
        changed("Claude.ai", truncated=True),
        r"chat_messages\[4\]\.truncated is True: the answer is not whole; leave such records out",
    ),
    "LibreChat's file": (
        asked("LibreChat", files=[{"filename": "n.pdf", "type": "application/pdf"}]),
        r"messages\[2\]\.files names a file whose text is not in the record",
    ),
    "LibreChat's call": (
        changed(
            "LibreChat",
            **libre_parts(
                {"type": "tool_call", "tool_call": {"name": "rain", "args": "{}", "output": "no"}},
                {"type": "text", "text": "b"},
            ),
        ),
        r"messages\[3\]\.content has a part that is no text: .*rain",
    ),
    "LibreChat's number": (
        changed("LibreChat", text=5),
        r"messages\[3\]\.content is missing or not text: .*; give text in `content`",
    ),
    "LibreChat's error": (
        changed("LibreChat", error=True, text="Something went wrong."),
        r"messages\[3\]\.error is True: the answer is not whole",
    ),
    "LibreChat's error in parts": (
        changed("LibreChat", **libre_parts({"type": "error", "error": "no key"})),
        r"messages\[3\]\.content is .*no key.*: the answer is not whole",
    ),
    "LibreChat's unfinished": (
        changed("LibreChat", unfinished=True),
        r"messages\[3\]\.unfinished is True: the answer is not whole",
    ),
    "LibreChat's instructions": (
        {**LIBRECHAT, "options": {"instructions": "S"}},
        "`options.instructions` may be shown before the messages: 'S'; write it, with a `prompt",
    ),
    "LM Studio's picture": (
        asked("LM Studio", content=[lm_text("r"), PICTURE]),
        r"messages\[2\]\.content has a part that is no text: .*; leave such records out",
    ),
    "LM Studio's retrieval": (
        asked("LM Studio", preprocessed={"role": "user", "content": [lm_text(f"{FILE}\nr")]}),
        r"messages\[2\]\.versions\[0\]\.preprocessed is the text that the model was shown, .*5 %",
    ),
    "LM Studio's call": (
        changed("LM Studio", steps=[lm_step(lm_text("b"), ASKED_LM)]),
        r"messages\[3\]\.content has a part that is no text: .*toolCallRequest",
    ),
    "LM Studio's result": (
        changed("LM Studio", steps=[lm_step(lm_text("b"), roleOverride="tool")]),
        r"messages\[3\]\.versions\[0\]\.steps\[0\] is of the kind roleOverride tool",
    ),
    "LM Studio's step": (
        changed("LM Studio", steps=[{"type": "toolStatus"}, lm_step(lm_text("b"))]),
        r"messages\[3\]\.versions\[0\]\.steps\[0\] is of the kind toolStatus",
    ),
    "LM Studio's blocks": (
        changed("LM Studio", steps=[lm_step(lm_text("b")), lm_step(lm_text("c"))]),
        r"messages\[3\]\.versions\[0\] has several blocks of text: .*; join them into one",
    ),
    "LM Studio's hidden block": (
        changed("LM Studio", steps=[lm_step(lm_text("b"), shouldIncludeInContext=False)]),
        r"messages\[3\]\.versions\[0\]\.steps\[0\] was not shown to the model",
    ),
    "LM Studio's cut": (
        changed(
            "LM Studio",
            steps=[
                lm_step(
                    lm_text("b"), genInfo={"stats": {"stopReason": "maxPredictedTokensReached"}}
                )
            ],
        ),
        r"messages\[3\]\.versions\[0\]\.steps\[0\]\.genInfo\.stats\.stopReason is 'maxPredicted",
    ),
    "LM Studio's versions": (
        {"messages": [{"versions": [USER]}, lm_said([lm_step(lm_text("a"))])]},
        r"messages\[0\]\.currentlySelected is None, which is none of its `versions`; leave such",
    ),
    "LM Studio's version": (
        {**LM_STUDIO, "messages": [*LM_STUDIO["messages"][:3], lm_said([], chosen=4)]},
        r"messages\[3\]\.currentlySelected is 4, which is none of its `versions`; leave such",
    ),
    "Open WebUI's file": (
        asked("Open WebUI", files=[{"type": "file", "file": {"data": {"content": FILE}}}]),
        r"`chat\.history\.messages` is read as `messages`: messages\[2\]\.files may be a part of",
    ),
    "Open WebUI's sources": (
        changed("Open WebUI", sources=[{"source": {"name": "n"}, "document": [FILE]}]),
        r".*messages\[3\]\.sources may be what the answer rests on",
    ),
    "Open WebUI's error": (
        changed("Open WebUI", error={"content": "no key"}),
        r"chat\.history\.messages\['a2'\]\.error is .*: the answer is not whole",
    ),
    "Open WebUI's unfinished": (
        changed("Open WebUI", done=False),
        r"chat\.history\.messages\['a2'\]\.done is 'false': the answer is not whole",
    ),
    "LibreChat's rating": (
        changed("LibreChat", feedback={"rating": "thumbsDown", "tag": {"key": "inaccurate"}}),
        r"messages\[3\]\.feedback\.rating is 'thumbsDown': the user calls the answer a bad one",
    ),
    "Open WebUI's rating": (
        changed("Open WebUI", annotation={"rating": -1}),
        r"chat\.history\.messages\['a2'\]\.annotation\.rating is -1: the user calls the answer",
    ),
    "Open WebUI's code": (
        changed("Open WebUI", output=[{"type": "open_webui:code_interpreter", "code": "1"}, SAID]),
        r"chat\.history\.messages\['a2'\]\.output\[0\] is neither a message nor a reasoning",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_would_be_lost_is_refused_by_its_place(name: str):
    record, says = LOST[name]
    with pytest.raises(BadLineError, match=f"^{says}"):
        reader().documents(record)


def test_a_file_of_another_branch_or_whose_text_is_shown_is_no_loss():
    record = copy.deepcopy(CLAUDE)
    attached = [{"file_name": "n.txt", "extracted_content": FILE}]
    record["chat_messages"][1]["attachments"] = attached
    assert reader().documents(record)[0].text == theirs(USER, ANSWER, AGAIN, LAST)
    content = [claude_text(f"r\n{FILE}")]
    (document,) = reader().documents(asked("Claude.ai", attachments=attached, content=content))
    assert document.text == theirs(USER, ANSWER, {**AGAIN, "content": f"r\n{FILE}"}, LAST)


def test_an_export_of_claude_without_parents_is_read_in_its_order(caplog):
    """Older exports have neither parents nor ``content``, and no other branches are marked."""
    messages = [without(x, "parent_message_uuid") for x in CLAUDE["chat_messages"]]
    record = {**without(CLAUDE, "current_leaf_message_uuid"), "chat_messages": messages}
    says = r"chat_messages\[2\] is of the sender 'assistant', and no message names its parent"
    with pytest.raises(BadLineError, match=f"^{says}.*; leave such records out, or the messages"):
        reader().documents(record)
    SEEN.clear()
    record["chat_messages"] = [without(x, "content") for x in messages if x["uuid"] != "old"]
    assert reader().documents(record)[0].text == theirs(USER, ANSWER, AGAIN, LAST)
    assert "`chat_messages` of records do not name their parents" in caplog.text


@pytest.mark.parametrize(
    "record",
    [
        changed("LibreChat", feedback={"rating": "thumbsDown"}, weight=0),
        changed("Open WebUI", annotation={"rating": -1}, weight=0),
        changed("Open WebUI", annotation={"rating": -1}, weight=0, output=[SAID]),
    ],
)
def test_an_answer_that_the_user_calls_bad_is_shown_with_weight_0(record: dict):
    (document,) = reader().documents(record)
    spans = [document.text[start:end] for start, end in document.loss_spans or ()]
    assert [text[0] for text in spans] == ["a"]


@pytest.mark.parametrize("name", ["Claude.ai", "LibreChat", "LM Studio"])
def test_contents_that_are_texts_are_read(name: str):
    (document,) = reader().documents(asked(name, content="other"))
    assert document.text == theirs(USER, ANSWER, {**AGAIN, "content": "other"}, LAST)


@pytest.mark.parametrize("name", EXPORTS)
def test_turns_beside_an_export_are_read_instead(name: str):
    """The advice for what is refused is to write the conversation as ``messages``."""
    record = {**without(EXPORTS[name], "options"), "messages": [USER, ANSWER]}
    assert reader().documents(record)[0].text == theirs(USER, ANSWER)


def test_a_question_at_the_end_of_the_branch_is_not_answered(caplog):
    SEEN.clear()
    (document,) = reader().documents({**CHATGPT, "current_node": "u2"})
    assert document.text == theirs(USER, ANSWER)
    assert "end with a question that nothing answers: it is left out" in caplog.text


def test_keys_of_other_types_end_in_no_traceback():
    info = {"stats": {"stopReason": {"a": 1}}}
    tree = libre_tree(LIBRE_MESSAGES[:1])
    tree[0]["children"] = True
    records: list[dict] = [
        changed("LM Studio", steps=[lm_step(lm_text("b"), genInfo=info)]),
        changed("Open WebUI", output=[{**REASONING, "content": 7}, SAID]),
    ]
    for record in records:
        (document,) = reader().documents(record)
        assert reader().unread(record, [document]) == []
        assert document.text == theirs(USER, ANSWER, AGAIN, LAST)
    with pytest.raises(BadLineError, match="has no assistant turn to learn from"):
        reader().documents({**without(LIBRECHAT, "messages"), "messagesTree": tree})
