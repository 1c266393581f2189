"""Nothing that a user wrote is learned otherwise than written without a line that says so.

The right texts are transformers' renderings of OpenAI's messages. TRL's ``SFTTrainer`` appends EOS
to a completion and learns it, also if the completion is empty.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moetrain.data.cache import encoded
from moetrain.data.chat import CHATML, BadLineError, ChatTemplate
from moetrain.data.loader import build_data
from moetrain.data.records import RecordReader
from moetrain.data.tokenizer import ByteTokenizer, load_tokenizer
from moetrain.data.warned import SEEN
from tests.lib.data_files import BYTE_VOCAB, config, word_tokenizer, write_lines

SYSTEM = {"role": "system", "content": "S"}
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
EMPTY = {**ANSWER, "content": ""}
CHATS = [
    {"from": "human", "value": "q"},
    {"from": "gpt", "value": "a"},
]


READERS: dict[str, dict[str, Any]] = {
    "one": {},
    "messages": {"form": "messages"},
    "pairs": {"form": "preference", "reads_pairs": True},
    "labels": {"reads_pairs": True, "reads_labels": True},
}


def documents(record: dict, kind: str = "one", template: str = CHATML) -> list:
    return RecordReader(ChatTemplate(template, {}), **READERS[kind]).documents(record)


def theirs(*messages: dict) -> str:
    rendered, _ = render_jinja_template([[*messages]], chat_template=CHATML)
    return rendered[0].rstrip()


def learned(document) -> list[str]:
    return [document.text[a:b] for a, b in document.loss_spans]


# ---- segments with labels -----------------------------------------------------------------------


@pytest.mark.parametrize("labels", [(True, False, True), (False, True, False)], ids=str)
def test_segments_are_learned_by_their_labels(labels: tuple[bool, ...]):
    """axolotl joins the tokens of each segment, and masks those whose label is false.

    EOS ends every document, and has loss if the last segment has.
    """
    texts = ("<s>Hello\n", "hi there! ", "farewell")
    segments = [{"label": x, "text": text} for x, text in zip(labels, texts, strict=True)]
    tokenizer = ByteTokenizer()
    ((_, ids, masked),) = encoded(documents({"segments": segments}), tokenizer)
    assert ids.tolist() == [*"".join(texts).encode(), tokenizer.eos_id]
    assert masked is not None
    pairs = zip(labels, texts, strict=True)
    each = [int(not label) for label, text in pairs for _ in text]
    assert masked.tolist() == [*each, int(not labels[-1])]


def test_segments_that_are_none_are_refused():
    """Whisper's segments have times. One without a label cannot be read beside others with one."""
    with pytest.raises(BadLineError, match="of no known form"):
        documents({"segments": [{"start": 0.0, "text": "a"}]})
    assert documents({"segments": [{"label": False, "text": "a"}]}) == []
    with pytest.raises(BadLineError, match=r"segments\[1\] is not a text with a label: .*; write"):
        documents({"segments": [{"label": True, "text": "a"}, {"text": "b"}]})


# ---- empty answers ------------------------------------------------------------------------------

AS_CHAT = [
    {"prompt": [USER], "completion": ""},
    {"prompt": [USER], "completion": [EMPTY]},
    {"prompt": [USER], "completion": EMPTY},
    {"instruction": "q", "output": ""},
    {"question": "q", "answer": ""},
    {"messages": [USER, EMPTY]},
    {"conversations": [CHATS[0], {"from": "gpt", "value": ""}]},
]


@pytest.mark.parametrize("record", AS_CHAT, ids=str)
def test_an_empty_answer_of_a_chat_is_learned_as_an_end(record: dict):
    (document,) = documents(record)
    assert document.text == theirs(USER, EMPTY)
    assert learned(document) == ["<|im_end|>"]


@pytest.mark.parametrize("prompt", ["q", "\n\nHuman: q\n\nAssistant:", "q\0"], ids=repr)
@pytest.mark.parametrize("answer", ["", " ", "\n"], ids=repr)
@pytest.mark.parametrize("empty", [{}, {"system": ""}, {"system": None}], ids=str)
def test_an_empty_answer_of_a_text_is_learned_as_its_end(prompt: str, answer: str, empty: dict):
    tokenizer = ByteTokenizer()
    found = documents({"prompt": prompt, "completion": answer, **empty})
    ((_, ids, masked),) = encoded(found, tokenizer)
    assert ids.tolist() == [*(prompt + answer).encode(), tokenizer.eos_id]
    assert masked is not None
    assert masked.tolist() == [1] * len(prompt) + [0] * (len(answer) + 1)


def test_the_end_of_an_empty_answer_follows_a_prompt_that_ends_with_eos(tmp_path: Path):
    """The completion's EOS is learned, as in TRL, also behind a prompt that ends with an EOS."""
    tokenizer = load_tokenizer(str(word_tokenizer(tmp_path / "words", "<unk>", "q", "</s>")))
    (found,) = encoded(documents({"prompt": "q </s>", "completion": ""}), tokenizer)
    assert [x.tolist() for x in found[1:] if x is not None] == [[1, 2, 2], [1, 1, 0]]
    (found,) = encoded(documents({"prompt": "q ", "completion": "q </s>"}), tokenizer)
    assert [x.tolist() for x in found[1:] if x is not None] == [[1, 1, 2], [1, 0, 0]]


def test_a_run_on_empty_answers_alone_learns_their_ends(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", *({"prompt": f"q{i}", "completion": ""} for i in "ab"))
    rows = build_data(config(tmp_path, path=str(path), eval_fraction=0, seq_len=8), BYTE_VOCAB)
    row = rows.train.row(0)
    targets = row.targets_S[row.targets_S >= 0].tolist()
    assert targets == [ByteTokenizer().eos_id] * 2


SILENT = "have an empty answer{}, which is learned as an answer that ends at once; leave such rec"


@pytest.mark.parametrize(
    ("record", "data", "beside"),
    [
        ({"prompt": "q", "completion": ""}, {}, ""),
        ({"prompt": [USER], "completion": [EMPTY]}, {}, ""),
        ({"question": "q", "answer": " "}, {}, ""),
        ({"messages": [USER, EMPTY, USER, ANSWER]}, {}, ""),
        # DeepScaleR's records, of which some solutions are empty
        (
            {"instruction": "q", "output": "", "answer": "26"},
            {},
            ", such as one with `answer` '26'",
        ),
        ({"messages": [USER, EMPTY, USER, ANSWER], "response": "a"}, {}, ""),
        ({"messages": [USER, EMPTY, USER, ANSWER]}, {"train_on": "last"}, None),
        ({"messages": [USER, EMPTY, USER, ANSWER]}, {"train_on": "completion"}, None),
        ({"messages": [USER, {**EMPTY, "weight": 0}, USER, ANSWER]}, {}, None),
        ({"messages": [USER, {**EMPTY, "reasoning_content": "t"}]}, {}, None),
        ({"prompt": "q", "completion": "a"}, {}, None),
    ],
    ids=str,
)
def test_empty_answers_that_are_learned_are_counted(
    record: dict, data: dict, beside: str | None, tmp_path: Path, caplog
):
    path = write_lines(tmp_path / "a.jsonl", record, record, {"text": "t"})
    SEEN.clear()
    settings: dict = {"path": str(path), "source": "records", "eval_fraction": 0, "seq_len": 8}
    build_data(config(tmp_path, **settings, **data), BYTE_VOCAB)
    says = f"{path}: of 3 records 2 {SILENT.format(beside)}"
    assert [says in line for line in caplog.messages if "empty answer" in line] == (
        [] if beside is None else [True]
    )


def test_a_record_without_prompt_and_answer_is_refused():
    with pytest.raises(BadLineError, match="`prompt` and `completion` are empty; leave such rec"):
        documents({"prompt": "", "completion": ""})
    with pytest.raises(BadLineError, match="no turn of the assistant"):
        documents({"prompt": "\n\nHuman: q", "completion": "\n\nHuman: r"})
    with pytest.raises(BadLineError, match="'output' is not text: 0; write a text there"):
        documents({"instruction": "q", "output": 0})


EMPTY_PAIRS = {
    "texts": lambda a, b: {"prompt": "q", "chosen": a, "rejected": b},
    "a list and texts": lambda a, b: {"prompt": [USER], "chosen": a, "rejected": b},
    "lists": lambda a, b: {
        "prompt": [USER],
        "chosen": [{**ANSWER, "content": a}],
        "rejected": [{**ANSWER, "content": b}],
    },
    "dialogues": lambda a, b: {
        "chosen": [USER, {**ANSWER, "content": a}],
        "rejected": [USER, {**ANSWER, "content": b}],
    },
    "JSON": lambda a, b: {
        "prompt": "q",
        "chosen": json.dumps([USER, {**ANSWER, "content": a}]),
        "rejected": json.dumps([USER, {**ANSWER, "content": b}]),
    },
}


@pytest.mark.parametrize("blank", ["", " "], ids=repr)
@pytest.mark.parametrize("form", EMPTY_PAIRS)
def test_a_pair_with_an_empty_answer_is_refused_in_every_form(form: str, blank: str):
    says = "`{}` has no text to learn; leave such records out"
    chosen, rejected = EMPTY_PAIRS[form](blank, "b"), EMPTY_PAIRS[form]("a", blank)
    for kind in ("pairs", "labels"):
        with pytest.raises(BadLineError, match=says.format("chosen")):
            documents(chosen, kind)
        with pytest.raises(BadLineError, match=says.format("rejected")):
            documents(rejected, kind)
    with pytest.raises(BadLineError, match=says.format("chosen")):
        documents(chosen)
    assert len(documents(rejected)) == 1


@pytest.mark.parametrize("side", ["chosen", "rejected"])
@pytest.mark.parametrize(
    ("empty", "other"),
    [
        *((None, other) for other in ("a", ANSWER, [USER, ANSWER])),
        *(([], other) for other in ("a", ANSWER, [USER, ANSWER], json.dumps([USER, ANSWER]))),
        *(({}, other) for other in ("a", [ANSWER])),
        *((empty, other) for empty in ("", "[]") for other in ([ANSWER], json.dumps([ANSWER]))),
    ],
    ids=str,
)
def test_a_pair_with_an_empty_side_says_so(empty: object, other: object, side: str):
    beside = {"chosen": "rejected", "rejected": "chosen"}[side]
    for kind in ("one", "pairs", "labels"):
        for asked in ({"prompt": "q"}, {"prompt": [USER]}, {"question": "q"}):
            with pytest.raises(
                BadLineError, match=rf"`{side}` is empty \(.*\), but .*; leave such"
            ):
                documents({**asked, side: empty, beside: other}, kind)


def test_an_answer_that_is_an_empty_list_in_json_is_a_text():
    (document,) = documents({"prompt": "q", "chosen": "[]", "rejected": "a"})
    assert document.text == "q[]"


def test_an_empty_side_beside_another_form_is_ignored():
    (document,) = documents({"messages": [USER, ANSWER], "chosen": None, "rejected": None})
    assert document.text == theirs(USER, ANSWER)


@pytest.mark.parametrize("record", [{"prompt": "q", "completion": ""}, *AS_CHAT], ids=str)
def test_a_labelled_answer_that_is_empty_is_refused_in_every_form(record: dict):
    with pytest.raises(BadLineError, match=r"the answer has no text to learn: .*; leave such"):
        documents({**record, "label": True}, kind="labels")


def test_an_answer_of_calls_or_thoughts_is_not_empty():
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    for said in ({"tool_calls": [call]}, {"reasoning_content": "t"}):
        record = {"chosen": [USER, {**EMPTY, **said}], "rejected": [USER, ANSWER]}
        assert len(documents(record, kind="pairs")) == 2


# ---- lists of texts -----------------------------------------------------------------------------

TURNS = [{**turn, "content": text} for turn, text in zip([USER, ANSWER] * 2, "qarb", strict=True)]
OTHERS = [TURNS[0], {**ANSWER, "content": "x"}, TURNS[2], {**ANSWER, "content": "y"}]


@pytest.mark.parametrize("write", [json.dumps, list], ids=["JSON", "lists"])
@pytest.mark.parametrize("name", ["prompt", "question", "instruction"])
def test_lists_of_texts_are_the_turns_of_chatbot_arena(name: str, write, caplog):
    """The set's card: `prompt` and both responses are lists, an entry for each turn."""
    SEEN.clear()
    asked = {name: write(["q", "r"]), "id": 3}
    pair = {**asked, "chosen": write(["a", "b"]), "rejected": write(["x", "y"])}
    chosen, rejected = documents(pair, kind="pairs")
    assert [chosen.text, rejected.text] == [theirs(*TURNS), theirs(*OTHERS)]
    assert learned(rejected) == ["x<|im_end|>", "y<|im_end|>"]
    answer = "completion" if name == "prompt" else "output"
    if name != "question":
        for system in ({}, {"system": "S"}):
            (document,) = documents({**asked, answer: pair["chosen"], **system})
            assert document.text == theirs(*([SYSTEM] if system else []), *TURNS)
            assert learned(document) == ["a<|im_end|>", "b<|im_end|>"]
    assert caplog.text.count("are lists of texts, which are read as the turns of a dialogue") == 1


LISTS = [
    ({"prompt": '["q"]', "completion": "a"}, "`completion` is no list of as many: 'a'"),
    ({"prompt": '["q","r"]', "completion": '["a"]'}, "no list of as many"),
    ({"prompt": "[]", "completion": "[]"}, "no list of as many"),
    ({"prompt": ["q"], "completion": [ANSWER]}, "no list of as many"),
    ({"prompt": '["q"]', "completion": "[null]"}, "`completion` has null in place of a text"),
    ({"prompt": "[null]", "completion": '["a"]'}, "`prompt` has null in place of a text"),
    ({"prompt": '["q"]', "chosen": '["a"]', "rejected": "b"}, "`rejected` is no list of as many"),
    ({"prompt": '["q"]', "chosen": '["a"]', "rejected": "[null]"}, "`rejected` has null"),
    ({"instruction": '["q","r"]', "output": "a"}, "`instruction` is a list of texts"),
]


@pytest.mark.parametrize(("record", "says"), LISTS, ids=str)
def test_a_question_that_is_another_list_of_texts_is_refused(record: dict, says: str):
    with pytest.raises(BadLineError, match=says):
        documents(record, kind="pairs" if "chosen" in record else "one")


@pytest.mark.parametrize("answer", ['["a", "b"]', "[]", "[null]", "[1, 2]", "[a]", '["a"] is'])
def test_an_answer_in_json_is_learned_as_it_is(answer: str):
    (document,) = documents({"prompt": "q ", "completion": answer})
    assert (document.text, learned(document)) == (f"q {answer}", [answer])
    (document,) = documents({"instruction": "Sort", "input": '["b", "a"]', "output": answer})
    asked = {**USER, "content": 'Sort\n\n["b", "a"]'}
    assert document.text == theirs(asked, {**ANSWER, "content": answer})
    found = documents({"prompt": "q ", "chosen": answer, "rejected": "b"}, kind="pairs")
    assert found[0].text == f"q {answer}"
    asked = {**USER, "content": '["b", "a"]'}  # the error's advice
    (document,) = documents({"messages": [asked, {**ANSWER, "content": answer}]})
    assert document.text == theirs(asked, {**ANSWER, "content": answer})


# ---- fields without a value ---------------------------------------------------------------------

NO_VALUES = [
    *((name, value) for name in ("system", "system_prompt") for value in (None, "")),
    *(
        (name, value)
        for name in ("tools", "functions", "documents", "history")
        for value in (None, "", [], "[]")
    ),
    *(("chat_template_kwargs", value) for value in (None, "", {}, "{}")),
]


@pytest.mark.parametrize(("field", "value"), NO_VALUES, ids=str)
@pytest.mark.parametrize("answers", [{"completion": "a"}, {"chosen": "a", "rejected": "b"}])
def test_a_field_without_a_value_decides_nothing(field: str, value: object, answers: dict):
    record, kind = {"prompt": "q", **answers}, "pairs" if "chosen" in answers else "one"
    assert documents({**record, field: value}, kind) == documents(record, kind)
    assert documents(record, kind)[0].text == "qa"


@pytest.mark.parametrize(
    "field",
    [
        {"system": "S"},
        {"system_prompt": "S"},
        {"tools": [{"name": "f"}]},
        {"functions": [{"name": "f"}]},
        {"history": [["x", "y"]]},
    ],
    ids=str,
)
def test_a_field_with_a_value_makes_a_chat(field: dict):
    (document,) = documents({"prompt": "q", "completion": "a", **field})
    assert document.is_rendered
    assert learned(document) == ["a<|im_end|>"]


def test_a_field_of_a_format_that_is_null_is_missing():
    for form, name in (("completion", "completion"), ("alpaca", "output"), ("text", "text")):
        record = {"prompt": "q", "instruction": "q", name: None}
        with pytest.raises(BadLineError, match=f"^`{name}` is empty in this record"):
            RecordReader(ChatTemplate(CHATML, {}), form=form).documents(record)
        del record[name]
        with pytest.raises(BadLineError, match=f"no '{name}', which data.format '{form}' needs"):
            RecordReader(ChatTemplate(CHATML, {}), form=form).documents(record)


@pytest.mark.parametrize("streaming", ["no", "yes"])
def test_a_set_of_chats_and_plain_texts_is_named_with_its_counts(
    streaming: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    plain = [{"prompt": f"q{i}", "completion": "a"} for i in range(3)]
    chats = [{**record, "system": "S"} for record in plain[:2]]
    says = "of 6 records 2 are chats, and in 3 a prompt and its answer are joined as plain text"
    data = {"source": "records", "eval_fraction": 0, "streaming": streaming}
    data |= {"workers": 0} if streaming == "yes" else {}
    mixed = write_lines(tmp_path / "mixed.jsonl", *plain, *chats, {"text": "t"})
    for _ in range(2):  # the second time from the cache
        SEEN.clear()
        caplog.clear()
        build_data(config(tmp_path, seq_len=128, path=str(mixed), **data), BYTE_VOCAB)
        assert caplog.text.count(says) == 1
    caplog.clear()
    for name, records in (("plain", [*plain, {"text": "t"}]), ("chats", [*chats, {"text": "t"}])):
        SEEN.clear()
        path = write_lines(tmp_path / f"{name}.jsonl", *records)
        build_data(config(tmp_path, seq_len=128, path=str(path), **data), BYTE_VOCAB)
    assert "joined as plain text" not in caplog.text


def test_an_empty_system_turn_is_shown_as_the_template_shows_it():
    """Templates such as Qwen2.5's write a text of their own where there is no such turn."""
    own = CHATML.replace(
        "{%- for message in messages %}",
        "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nQwen<|im_end|>\\n' }}"
        "{%- endif %}{%- for message in messages %}",
    )
    for template in (CHATML, own):
        for turns in ([USER, ANSWER], [{**SYSTEM, "content": ""}, USER, ANSWER]):
            (right,), _ = render_jinja_template([turns], chat_template=template)
            for system in ({}, {"system": ""}, {"system": None}):
                (document,) = documents({"messages": turns, **system}, template=template)
                assert document.text == right.rstrip()


# ---- two names of one field ---------------------------------------------------------------------

OTHER = [USER, {**ANSWER, "content": "z"}]


@pytest.mark.parametrize("name", ["conversations", "conversation", "trajectory"])
def test_two_dialogues_that_differ_are_refused(name: str):
    spellings = [OTHER, json.dumps(OTHER)]
    if name == "conversation":
        spellings.append([{"input": "q", "output": "z"}])
    for other in spellings:
        record = {"messages": [USER, ANSWER], name: other}
        with pytest.raises(BadLineError, match=f"`messages` and `{name}` differ; leave one of the"):
            documents(record)
        (document,) = documents(record, "messages")
        assert document.text == theirs(USER, ANSWER)
    with pytest.raises(BadLineError, match="`conversations` and `conversation` differ"):
        documents({"conversations": CHATS, "conversation": OTHER})


@pytest.mark.parametrize(
    "other",
    [
        {"conversations": CHATS},
        {"conversations": json.dumps(CHATS)},
        {"conversation": [{"input": "q", "output": "a"}]},
        {"conversation": [USER, {**ANSWER, "id": 3, "content": [{"type": "text", "text": "a"}]}]},
        {"conversation": "7"},
        {"trajectory": [{"action": "ls"}]},
        {"conversations": None},
        {"conversations": []},
    ],
    ids=str,
)
def test_the_same_dialogue_twice_is_one(other: dict):
    (document,) = documents({"messages": [USER, ANSWER], **other})
    assert document.text == theirs(USER, ANSWER)


def test_other_names_of_one_field_that_differ_are_refused():
    tools = [{"name": "f"}], [{"name": "g"}]
    same = {"tools": [{"type": "function", "function": tools[0][0]}], "functions": tools[0]}
    assert len(documents({"messages": [USER, ANSWER], **same})) == 1
    with pytest.raises(BadLineError, match="`tools` and `functions` differ; leave one of them"):
        documents({"messages": [USER, ANSWER], "tools": tools[0], "functions": tools[1]})
    answers = {"chosen": "a", "rejected": "b"}
    second = {"conversations": [{"role": "user", "content": "r"}]}
    with pytest.raises(BadLineError, match="`messages` and `conversations` differ"):
        documents({"messages": [USER], **second, **answers}, kind="pairs")
    assert len(documents({"messages": [USER], "prompt": [USER], **answers}, kind="pairs")) == 2


T = {**SYSTEM, "content": "T"}


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"messages": [T, USER, ANSWER]}, "messages"),
        ({"conversations": [{"from": "system", "value": "T"}, *CHATS]}, "conversations"),
        ({"prompt": [T, USER], "completion": [ANSWER]}, "prompt"),
        ({"prompt": [T, USER], "chosen": "a", "rejected": "b"}, "prompt"),
        ({"messages": [T, USER], "chosen": "a", "rejected": "b"}, "messages"),
    ],
    ids=str,
)
@pytest.mark.parametrize("field", ["system", "system_prompt"])
def test_a_system_beside_another_system_turn_is_refused(record: dict, name: str, field: str):
    says = f"`system` and the system's turn of `{name}` differ, 'S' and 'T'; leave one of them out"
    with pytest.raises(BadLineError, match=says):
        documents({**record, field: "S"}, kind="pairs" if "chosen" in record else "one")
    (document, *_) = documents(
        {**record, field: "T"}, kind="pairs" if "chosen" in record else "one"
    )
    assert document.text == theirs(T, USER, ANSWER)


@pytest.mark.parametrize(
    "turn",
    [
        SYSTEM,
        {**SYSTEM, "content": [{"type": "text", "text": "S"}]},
        {**SYSTEM, "content": " S\n"},
        {**SYSTEM, "role": "developer"},
    ],
    ids=str,
)
def test_the_same_system_twice_is_shown_once(turn: dict):
    (document,) = documents({"system": "S", "messages": [turn, USER, ANSWER]})
    assert document.text.count("<|im_start|>system") == 1


# ---- thoughts -----------------------------------------------------------------------------------

BESIDE = {
    "alpaca": {"instruction": "q", "output": "a"},
    "completion": {"prompt": "q", "completion": "a"},
    "completion of messages": {"prompt": [USER], "completion": [ANSWER]},
    "messages": {"messages": [USER, ANSWER]},
    "sharegpt": {"conversations": CHATS},
}
NAMES = ("reasoning", "reasoning_content", "thinking", "cot", "Complex_CoT", "thought")
NAMES = (*NAMES, "thinking_trajectories", "deepseek_thinking_trajectory")


@pytest.mark.parametrize("form", BESIDE)
@pytest.mark.parametrize("name", NAMES)
def test_a_thought_beside_an_answer_is_not_lost(form: str, name: str):
    thought = ["so it is"] if name == "thinking_trajectories" else "so it is"
    says = f"`{name}` may be a part of the question or of the answer: 'so it is'; write it as "
    says += "`reasoning_content` of an answer in `messages`, or leave it out"
    with pytest.raises(BadLineError, match=says):
        documents({**BESIDE[form], name: thought})
    with pytest.raises(BadLineError, match=says):
        documents({**BESIDE[form], name: thought, "label": True}, kind="labels")
    for other in ("on", "off", True, None, 3, "", ["x"] * 0):
        assert documents({**BESIDE[form], name: other}) == documents(BESIDE[form])
    said = [USER, {**ANSWER, "reasoning_content": "so it is"}]
    (document,) = documents({"messages": said, name: thought})  # what is advised
    assert document.text == theirs(*said)
    (document,) = documents({"messages": said})
    assert document.text == theirs(*said)


def test_an_unknown_field_that_is_a_thought_is_refused_beside_a_question():
    for name in ("reasoning", "thinking_trajectories", "Complex_CoT"):
        says = f"`{name}` may be a part of the question or of the answer"
        with pytest.raises(BadLineError, match=says):
            documents({"question": "q", "answer": "a", name: "t"})


OPENROUTER = [{"type": "reasoning.text", "text": "so it is", "signature": None}]
SUMMARY = [{"type": "reasoning.summary", "summary": "so it is"}]
KEYS = {
    "thought": "so it is",
    "thoughts": "so it is",
    "cot": "so it is",
    "chain_of_thought": "so it is",
    "reasoning_text": "so it is",
}


@pytest.mark.parametrize(
    ("key", "value"),
    [*KEYS.items(), ("reasoning_details", OPENROUTER), ("reasoning_details", SUMMARY)],
    ids=str,
)
def test_a_thought_of_a_turn_under_another_name_is_not_lost(key: str, value: object):
    says = rf"messages\[1\]\.{key} is a thought that the chat template does not read: .*; write it "
    says += "as `reasoning_content`, or leave it out"
    with pytest.raises(BadLineError, match=says):
        documents({"messages": [USER, {**ANSWER, key: value}]})
    # OpenRouter sends `reasoning` beside `reasoning_details`, SWE-agent's content has the thought.
    for said in ({"reasoning": "so it is"}, {"content": "so it\nis\na"}):
        turn = {**ANSWER, **said}
        right = [USER, {**turn, "reasoning_content": turn.get("reasoning", "")}]
        (document,) = documents({"messages": [USER, {**turn, key: value}]})
        assert document.text == theirs(*right)
    if isinstance(value, str):  # a template may read the key
        own = CHATML.replace("message.reasoning_content", f"message.{key}")
        (document,) = documents({"messages": [USER, {**ANSWER, key: value}]}, template=own)
        assert "<think>\nso it is\n</think>" in document.text
    # A question is not learned, and an earlier turn's thought may be dropped.
    assert len(documents({"messages": [{**USER, key: value}, ANSWER]})) == 1


def test_an_encrypted_thought_has_no_text():
    turn = {**ANSWER, "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}
    (document,) = documents({"messages": [USER, turn]})
    assert document.text == theirs(USER, ANSWER)


def test_a_server_answers_thoughts_under_other_names(caplog):
    with caplog.at_level(logging.WARNING):
        turns = [USER, {**ANSWER, "reasoning_details": OPENROUTER}, USER]
        (found,) = [ChatTemplate(CHATML, {}).prompt(turns, strict=False)]
    assert "a<|im_end|>" in str(found)


# ---- messages that are texts --------------------------------------------------------------------

LONG = [USER, {**ANSWER, "content": "old"}, {**USER, "content": "then?"}]


def asked(question: object, answer: object) -> list[dict]:
    """Return the records with a question and its answer under each pair of names."""
    names = [("input", "output"), ("question", "answer"), ("Query", "Response")]
    return [{a: question, b: answer, "id": "x7"} for a, b in names]


@pytest.mark.parametrize("answer", [ANSWER, [ANSWER], "a"], ids=str)
@pytest.mark.parametrize("write", [json.dumps, lambda value: value], ids=["JSON", "values"])
def test_a_question_that_is_messages_is_read_as_them(answer: object, write):
    """Langfuse exports ``input`` and ``output`` so, in CSV as the texts of their JSON."""
    said = answer if isinstance(answer, str) else write(answer)
    for record in asked(write(LONG), said):
        (document,) = documents(record)
        assert document.text == theirs(*LONG, ANSWER)
        assert learned(document) == ["a<|im_end|>"]


def test_a_text_about_messages_stays_a_text():
    """A dialogue that ends with an answer is what the instruction is about, as is any ``input``."""
    for turns in ([USER, ANSWER], LONG):
        record = {"instruction": "Sum up.", "input": json.dumps(turns), "output": "s"}
        right = {**USER, "content": f"Sum up.\n\n{json.dumps(turns)}"}
        assert documents(record)[0].text == theirs(right, {**ANSWER, "content": "s"})
    for text in (json.dumps([USER, ANSWER]), str([USER, ANSWER])):
        for record in asked(text, "s"):
            right = {**USER, "content": text}
            assert documents(record)[0].text == theirs(right, {**ANSWER, "content": "s"})
    record = {"prompt": "q", "completion": json.dumps(USER)}
    assert documents(record)[0].text == f"q{json.dumps(USER)}"
    record = {"prompt": "q", "completion": json.dumps(ANSWER)}
    assert documents(record)[0].text == theirs(USER, ANSWER)


BELLE = "Human:\u4f60\u597d\nAssistant:\u5f53\u7136\nHuman:\u8bf7\u95ee\nAssistant:"
MARKED = [
    ({"instruction": BELLE, "input": ""}, "`instruction`"),
    ({"instruction": "Human:\u4f60\u597d\nAssistant:"}, "`instruction`"),
    ({"instruction": "User: Hi\n\nAI: Hello\n\nUser: Who?"}, "`instruction`"),
    ({"instruction": "", "input": "Human: Hi\nAssistant: "}, "`input`"),
    ({"question": BELLE}, "`instruction`"),
    ({"instruction": "Human: The Movie, a review"}, None),
    ({"instruction": "Summarise.", "input": "Human: Hi\nAssistant: Hello"}, None),
    ({"instruction": "User: what is an Assistant: a person?"}, None),
]


@pytest.mark.parametrize(("record", "key"), MARKED, ids=str)
def test_an_instruction_with_marks_of_turns_is_said(record: dict, key: str | None, caplog):
    """BelleGroup/multiturn_chat_0.8M has the dialogue up to its last answer in `instruction`."""
    SEEN.clear()
    (document,) = documents({**record, "answer" if "question" in record else "output": "a"})
    asked = record.get("instruction") or record.get("input") or record.get("question")
    if key is not None:
        assert document.text == theirs({"role": "user", "content": asked}, ANSWER)
    says = (
        f"{key} of records is a dialogue with marks of its turns, and is taken as one turn of the"
    )
    assert caplog.text.count(says) == (key is not None)
    assert ("marks of its turns" in caplog.text) == (key is not None)


@pytest.mark.parametrize("value", [ANSWER, [ANSWER], [USER, ANSWER]], ids=str)
@pytest.mark.parametrize("write", [json.dumps, str], ids=["JSON", "Python"])
@pytest.mark.parametrize("name", ["instruction", "output"])
def test_messages_that_are_learned_as_a_text_are_named(name: str, write, value, caplog):
    SEEN.clear()
    record = {"instruction": "q", "output": "a"} | {name: write(value)}
    (document,) = documents(record)
    assert write(value) in document.text
    assert f"`{name}` of records is the text of messages, and is taken as this text" in caplog.text


def numpys(turns: list[dict]) -> str:
    """Return what numpy shows of an array of ``turns``."""
    return "[" + "\n ".join(map(str, turns)) + "]"


@pytest.mark.parametrize("write", [str, numpys, lambda x: f"array({x}, dtype=object)"])
@pytest.mark.parametrize("name", ["prompt", "completion", "chosen", "rejected", "question"])
def test_messages_as_python_shows_them_are_refused(name: str, write):
    """pandas' ``to_csv`` writes lists so. The JSON of the same lists is read."""
    turns = [USER] if name in ("prompt", "question") else [ANSWER]
    pair = {"chosen": [ANSWER], "rejected": [{**ANSWER, "content": "b"}]}
    record: dict[str, Any] = {"prompt": [USER], "completion": [ANSWER]}
    kind = "one"
    if name in pair:
        record, kind = {"prompt": [USER], **pair}, "pairs"
    if name == "question":
        record = {"question": [USER], "answer": "a"}
    with pytest.raises(BadLineError, match=rf"`{name}` is text that is not JSON: .*JSON library"):
        documents({**record, name: write(turns)}, kind)
    right = documents({**record, name: turns}, kind)
    assert documents({**record, name: json.dumps(turns)}, kind) == right


def test_the_question_of_a_pair_may_be_the_json_of_messages():
    pair = {"chosen": "a", "rejected": "b"}
    right = documents({"prompt": LONG, **pair}, "pairs")
    assert documents({"question": json.dumps(LONG), **pair}, "pairs") == right
