"""Fields beside an answer that no document would show are read or refused, and never dropped.

The right texts are transformers' renderings of OpenAI's messages.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moetrain.config import ConfigError
from moetrain.data.chat import CHATML, BadLineError, ChatTemplate
from moetrain.data.loader import build_data
from moetrain.data.messages import read_messages
from moetrain.data.records import RecordReader
from moetrain.data.sources import Source
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.data.warned import SEEN
from moetrain.rl.envs import Prompts
from moetrain.rl.envs.lines import hidden_parts
from moetrain.rl.envs.shipped import Jsonl
from tests.lib.data_files import BYTE_VOCAB, config, write_lines

SYSTEM = {"role": "system", "content": "S"}
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
READERS: dict[str, dict[str, Any]] = {
    "one": {},
    "pairs": {"form": "preference", "reads_pairs": True},
    "labels": {"reads_pairs": True, "reads_labels": True},
}
SINGLE = {
    "messages": {"messages": [USER, ANSWER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "alpaca": {"instruction": "q", "output": "a"},
    "completion": {"prompt": "q", "completion": "a"},
    "completion of messages": {"prompt": [USER], "completion": [ANSWER]},
}
PAIRS = {
    "pair": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "pair of messages": {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]},
}
ALL = SINGLE | PAIRS
BESIDE = pytest.mark.parametrize("form", ALL)


def documents(record: dict, kind: str = "one") -> list:
    return RecordReader(ChatTemplate(CHATML, {}), **READERS[kind]).documents(record)


def kind_of(form: str) -> str:
    return "pairs" if form in PAIRS else "one"


def theirs(*messages: dict, tools: list | None = None) -> str:
    rendered, _ = render_jinja_template([[*messages]], tools=tools, chat_template=CHATML)
    return rendered[0].rstrip()


def refuses(form: str, fields: dict, says: str) -> None:
    with pytest.raises(BadLineError, match=says):
        documents({**ALL[form], **fields}, kind_of(form))


# ---- pictures and sounds ------------------------------------------------------------------------


@BESIDE
@pytest.mark.parametrize("name", ["image", "images", "video", "videos", "audio", "audios"])
def test_pictures_and_sounds_beside_an_answer_are_refused(form: str, name: str):
    for value in ("a.png", ["a.png"], {"bytes": "x", "path": None}):
        refuses(form, {name: value}, f"`{name}` is no text, and would be lost: .*; leave such rec")
    for value in (None, [], "", [None], {"bytes": None, "path": None}):
        found = documents({**ALL[form], name: value}, kind_of(form))
        assert found == documents(ALL[form], kind_of(form))


def test_pictures_of_a_question_a_text_and_a_turn():
    assert len(documents({"question": "q", "answer": "a", "images": []})) == 1
    assert len(documents({"text": "A town.", "image": "town.png"})) == 1
    with pytest.raises(BadLineError, match="`image` is no text"):
        documents({"text": "<image> A town.", "image": "town.png"})
    turns = [{**USER, "images": ["x"]}, ANSWER]  # Ollama's
    with pytest.raises(BadLineError, match=r"messages\[0\]\.images is no text"):
        documents({"messages": turns})
    assert read_messages(turns, strict=False)  # as a server reads it


# ---- systems and tools --------------------------------------------------------------------------


@BESIDE
@pytest.mark.parametrize("name", ["system_message", "meta_instruction"])
def test_other_names_of_the_system_are_read(form: str, name: str):
    (document, *_) = documents({**ALL[form], name: "S"}, kind_of(form))
    assert document.text == theirs(SYSTEM, USER, ANSWER)
    refuses(form, {name: "S", "system": "T"}, f"`system` and `{name}` differ")


@BESIDE
@pytest.mark.parametrize("name", ["sys", "custom_system_prompt"])
def test_fields_that_may_be_the_system_are_refused(form: str, name: str):
    says = f"`{name}` seems to be the system's text, which would be lost: 'S'; write it as `system`"
    refuses(form, {name: "S"}, says)
    shown = {**ALL[form], name: "S", "system": "S"}
    assert documents(shown, kind_of(form))[0].text == theirs(SYSTEM, USER, ANSWER)


@BESIDE
@pytest.mark.parametrize("name", ["available_tools", "function_list", "function_description"])
def test_other_names_of_the_tools_are_read_or_refused(form: str, name: str):
    tools = [{"name": "rain", "description": "says whether it rains"}]
    right = theirs(USER, ANSWER, tools=[{"type": "function", "function": tools[0]}])
    for value in (tools, json.dumps(tools)):
        (document, *_) = documents({**ALL[form], name: value}, kind_of(form))
        assert document.text == right
    for value in (["rain"], '{"name": "rain"}'):
        refuses(form, {name: value}, f"`{name}` seems to hold the tools, .*; write them as `tools`")
    for value in (None, "", [], "[]"):
        found = documents({**ALL[form], name: value}, kind_of(form))
        assert found == documents(ALL[form], kind_of(form))


# ---- parts of the question ----------------------------------------------------------------------


@BESIDE
@pytest.mark.parametrize("name", ["context", "passage", "document", "Article", "schema"])
def test_a_text_that_the_question_may_be_about_is_refused(form: str, name: str):
    says = f"`{name}` may be a part of the question or of the answer: 'The sky'; write it in the q"
    if form == "alpaca" and name == "context":  # Dolly's, which is shown
        return
    for value in ("The sky", ["The sky"], {"texts": ["The sky"]}):
        refuses(form, {name: value}, says)
    for value in (None, "", [], 3):
        found = documents({**ALL[form], name: value}, kind_of(form))
        assert found == documents(ALL[form], kind_of(form))
    shown = {"messages": [{**USER, "content": "The\nsky: q"}, ANSWER], name: "The sky"}
    assert len(documents(shown)) == 1


@pytest.mark.parametrize("form", SINGLE)
@pytest.mark.parametrize("name", ["choices", "options"])
def test_choices_of_a_question_are_refused(form: str, name: str):
    says = f"`{name}` may be a part of the question or of the answer: 'red'"
    for value in (["red", "blue"], {"text": ["red"], "label": ["A"]}, {"A": "red"}):
        refuses(form, {name: value}, says)
    assert len(documents({"instruction": "red or blue?", "output": "a", name: ["red"]})) == 1
    assert len(documents({**SINGLE[form], name: {"temperature": 1}})) == 1


THOUGHTS = ("reasoning", "cot", "Complex_CoT", "thinking_trajectories", "think", "analysis")


@BESIDE
@pytest.mark.parametrize("name", THOUGHTS)
def test_a_thought_is_not_lost_beside_single_answers_and_pairs(form: str, name: str):
    where = "`chosen` or `rejected`" if form in PAIRS else "`messages`"
    says = f"`{name}` may be a part of the question or of the answer: 'so it is'; write it as "
    refuses(form, {name: "so it is"}, f"{says}`reasoning_content` of an answer in {where}, or")


@pytest.mark.parametrize("name", ["think", "analysis"])
def test_a_thought_of_a_turn_under_these_names_is_not_lost(name: str):
    template = CHATML + "{# a channel 'analysis', and 'think' #}"
    reader = RecordReader(ChatTemplate(template, {}))
    with pytest.raises(BadLineError, match=rf"messages\[1\]\.{name} is a thought"):
        reader.documents({"messages": [USER, {**ANSWER, name: "so it is"}]})


# ---- verdicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", SINGLE)
@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("is_safe", False, True),
        ("is_response_safe", "false", "True"),
        ("isCorrect", 0, 1),
        ("correct", False, 0),  # the number of a choice
        ("harmful", True, False),
        ("is_safe", False, None),
    ],
)
def test_a_verdict_that_the_answer_is_bad_is_refused(form: str, name: str, value, other):
    says = f"`{name}` is {value!r}: the answer is one to avoid, and would be learned: .*; leave su"
    refuses(form, {name: value}, says)
    assert documents({**SINGLE[form], name: other}) == documents(SINGLE[form])
    labelled = {**SINGLE[form], name: value, "label": False}  # which learns to avoid it
    if form != "completion":
        assert len(documents(labelled, "labels")) == 1


WILDCHAT: dict[str, Any] = {"hashed_ip": "22fd87", "redacted": False, "turn_identifier": 7}


def test_a_bad_source_is_left_out_as_wmts_card_asks():
    record = {"instruction": "Translate: S", "output": "T", "is_bad_source": False}
    assert documents(record)
    for value in (True, "true"):
        with pytest.raises(BadLineError, match=r"`is_bad_source` is .*; leave such records out"):
            documents({**record, "is_bad_source": value})


def test_a_list_of_references_beside_a_question_is_refused():
    """DISC-Law's statutes. One text of this name may be another answer."""
    record = {"instruction": "May I?", "output": "Yes.", "reference": ["Art. 1: You may."]}
    for value in (record["reference"], json.dumps(record["reference"])):
        with pytest.raises(
            BadLineError, match=r"`reference` may be a part of the question .*; write"
        ):
            documents({**record, "reference": value})
    assert documents({**record, "instruction": "Art. 1: You may.\nMay I?"})
    assert documents({**record, "reference": "You may."})


def test_a_sentence_in_source_is_named_if_it_is_not_shown():
    """WMT24++'s `source` is the sentence to translate. Elsewhere it is where a record is from."""
    sentence = "Siso's depictions of land, water center new gallery exhibition"
    record = {"instruction": "Translate to German.", "output": "Sisos Bilder", "source": sentence}
    assert unread(record) == ["source"]
    assert unread({**record, "instruction": f"Translate to German: {sentence}"}) == []
    assert unread({**record, "source": "Stack Exchange, 2023"}) == []
    assert unread({**record, "source": "wiki", "license": sentence}) == []


def test_the_verdict_of_a_turn_decides_over_that_of_its_record():
    """WildChat's card: ``toxic`` of a record says that any utterance is, that of a turn whether it
    is this one."""
    asked = {**USER, **WILDCHAT, "toxic": True}
    fine, bad = ({**ANSWER, **WILDCHAT, "toxic": toxic} for toxic in (False, True))
    right = documents({"messages": [USER, ANSWER]})
    assert documents({"messages": [asked, fine], "toxic": True}) == right
    assert documents({"messages": json.dumps([asked, fine]), "toxic": True}) == right
    assert documents({"conversation": [asked, fine], "toxic": True}) == right
    # Without a verdict of the answer, that of the record counts.
    with pytest.raises(BadLineError, match="`toxic` is True: the answer is one to avoid"):
        documents({"messages": [asked, ANSWER], "toxic": True})
    # Whatever the record's field is called, the turn's is obeyed.
    says = r"messages\[1\]\.toxic is True: the answer is one to avoid, .*: 'a'; leave such records "
    for beside in ({}, {"toxic": True}, {"flagged": True}, {"toxic": False}):
        with pytest.raises(BadLineError, match=f'{says}out, or write "weight": 0 in the turn'):
            documents({"messages": [asked, bad, USER, fine], **beside})
    with pytest.raises(BadLineError, match=says):
        documents({"prompt": [USER], "completion": [bad]})
    # With the weight that the error advises, the turn is shown and not learned.
    (document,) = documents({"messages": [USER, {**bad, "weight": 0}, USER, fine]})
    assert document.text == theirs(USER, ANSWER, USER, ANSWER)
    assert len(document.loss_spans) == 1
    last = RecordReader(ChatTemplate(CHATML, {}), train_on="last")
    assert last.documents({"messages": [USER, bad, USER, fine]})
    # Pairs and labels learn to avoid it.
    assert documents({"prompt": [USER], "chosen": [fine], "rejected": [bad]}, "pairs")
    assert documents({"messages": [USER, bad], "label": False}, "labels")


@pytest.mark.parametrize("form", SINGLE)
def test_a_score_that_is_not_read_is_named_once(form: str, caplog):
    SEEN.clear()
    for _ in range(2):
        assert len(documents({**SINGLE[form], "helpfulness": 1})) == 1
    assert caplog.text.count("`helpfulness` of records is not read") == 1


DISLIKED = {
    "feedback": ["thumbs_down", "negative", "bad", ["thumbs_down"], {"rating": "thumbsDown"}],
    "user_rating": ["down", "Thumbs Down", "dislike"],
    "vote": ["downvote", "down"],
    "reaction": ["\N{THUMBS DOWN SIGN}", "\N{THUMBS DOWN SIGN}\U0001f3fd", ":thumbsdown:"],
    "thumbs": ["down"],
    "thumbs_down": [True, "true"],
}


@pytest.mark.parametrize("form", SINGLE)
@pytest.mark.parametrize("name", DISLIKED)
def test_an_answer_that_a_user_calls_bad_is_not_learned(form: str, name: str):
    """Exports of feedback have thumbs, votes and words."""
    for value in DISLIKED[name]:
        says = f"`{name}` is .*: the answer is one to avoid, .*; leave such records out, write "
        says += '"label": false in its place and set train.objective kto, or rename'
        refuses(form, {name: value}, says)
        assert documents({**SINGLE[form], "about": value}) == documents(SINGLE[form])
    assert documents({**SINGLE[form], "label": False}, "labels")[0].label is False


@pytest.mark.parametrize("form", SINGLE)
def test_what_a_user_says_is_a_label_where_labels_are_learned(form: str):
    """The advice of the error without a label is followed."""
    both = {**{"thumbs_up": True, "up": True, "positive": True, "\N{THUMBS UP SIGN}": True}}
    both |= {"thumbs_down": False, "down": False, "negative": False, "\N{THUMBS DOWN SIGN}": False}
    for word, right in both.items():
        with pytest.raises(BadLineError, match=r"write `feedback` as `label`; .*, thumbs_up and"):
            documents({**SINGLE[form], "feedback": word}, "labels")
        (document,) = documents({**SINGLE[form], "label": word}, "labels")
        assert document.label is right
        if right:
            assert documents({**SINGLE[form], "label": word}) == documents(SINGLE[form])
        else:
            refuses(form, {"label": word}, "`label` is .*: the answer is one to avoid")


@pytest.mark.parametrize("name", ["label", "feedback"])
def test_what_a_user_says_in_a_word_is_not_listed_as_unread(name: str):
    reader = RecordReader(ChatTemplate(CHATML, {}))
    record = {**SINGLE["completion"], name: "thumbs_up"}
    assert reader.unread(record, reader.documents(record)) == []
    record = {**SINGLE["completion"], name: "It was a good answer."}
    assert reader.unread(record, reader.documents(record)) == [name]


@pytest.mark.parametrize(
    "beside",
    [
        {"feedback": "thumbs_up"},
        {"feedback": "You are right, and the sign is negative."},
        {"reactions": ["\N{THUMBS UP SIGN}", "\N{THUMBS DOWN SIGN}"]},
        {"prompt_rating": "negative"},
        {"sentiment": "negative"},
        {"thumbs_down": False},
    ],
    ids=str,
)
def test_what_is_no_judgement_of_a_user_changes_nothing(beside: dict):
    for form in SINGLE:
        assert documents({**SINGLE[form], **beside}) == documents(SINGLE[form])


def test_the_class_that_an_answer_says_is_no_judgement():
    for answer in ("negative", "Negative.", "The sentiment is negative."):
        record = {"instruction": "The film was dull.", "output": answer}
        for name in ("label", "rating"):
            assert documents({**record, name: "negative"}) == documents(record)
        turns = [USER, {**ANSWER, "content": answer}]
        assert documents({"messages": turns, "label": "negative"})
        assert documents({"prompt": "q", "completion": answer, "label": "negative"})
        with pytest.raises(BadLineError, match=r"or false: [^;]*; known forms are"):
            documents({**record, "label": "negative"}, "labels")
    assert documents({"text": "The film was dull.", "label": "negative"})


def test_a_turn_that_a_user_calls_bad_is_not_learned():
    bad = {**ANSWER, "feedback": "thumbs_down"}
    with pytest.raises(BadLineError, match=r"messages\[1\]\.feedback is 'thumbs_down': the answer"):
        documents({"messages": [USER, bad, USER, ANSWER]})
    (document,) = documents({"messages": [USER, {**bad, "weight": 0}, USER, ANSWER]})
    assert len(document.loss_spans) == 1


def test_advice_on_a_prompt_with_a_response_names_what_users_say():
    record = {"prompt": "q", "response": "a", "feedback": "thumbs_down"}
    says = "leave out the records whose `feedback` says that the answer is a bad one, and write"
    with pytest.raises(BadLineError, match=says):
        documents(record)


# ---- conversations of which nothing is learned --------------------------------------------------


@pytest.mark.parametrize(
    ("beside", "is_named"),
    [
        ({"toxicity": 1}, True),
        ({"average_test_score": "0.25"}, True),
        ({"prompt_quality": 3}, False),
        ({"difficulty_score": 3}, False),
        ({"quality": "good"}, False),
        ({"quality": "bad"}, True),
        ({"satisfaction_rating": {"score": "bad", "comment": "Useless!"}}, True),
        ({"num_tokens": 3}, False),
        # UltraFeedback's score of an answer that is not learned, and verl's right answers.
        ({"score_chosen": 8.5}, True),
        ({"score_rejected": 8.5}, False),
        ({"reward_model": {"ground_truth": "3", "style": "rule"}}, False),
        ({"reward_model": '{"ground_truth": "3", "style": "rule"}'}, False),
        ({"reward_model": {"ground_truth": "3", "score": 0.5}}, True),
        ({"reward": 0.5}, True),
    ],
    ids=str,
)
def test_a_score_under_another_name_is_named(beside: dict, is_named: bool, caplog):
    name = next(iter(beside))
    SEEN.discard(f"the score {name}")
    documents({**SINGLE["messages"], **beside})
    assert (f"`{name}` of records is not read" in caplog.text) == is_named


def test_records_of_which_nothing_is_learned_are_counted(tmp_path: Path, caplog):
    nothing = {"messages": [USER, {**ANSWER, "loss": False}]}
    says = "have nothing to learn, and are left out: "
    path = write_lines(tmp_path / "some.jsonl", *[SINGLE["messages"]] * 2, nothing)
    data: dict[str, Any] = {"source": "records", "eval_fraction": 0, "streaming": "no"}
    for _ in range(2):  # the second time from the cache
        SEEN.clear()
        caplog.clear()
        build_data(config(tmp_path, seq_len=64, path=str(path), **data), BYTE_VOCAB)
        assert caplog.text.count(f"of 3 records 1 {says}") == 1
    path = write_lines(tmp_path / "all.jsonl", nothing, nothing)
    with pytest.raises(ConfigError, match=f"holds no text that is to be .* 2 records 2 {says}"):
        build_data(config(tmp_path, seq_len=64, path=str(path), **data), BYTE_VOCAB)


# ---- what a line advises ------------------------------------------------------------------------

STEPS = {"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}
ULTRA = {"instruction": "q", "completions": [{"response": "a"}, {"response": "b"}]}
RANKED = {"instruction": "q", "input": "", "output": ["a", "b"]}
LINES = [
    *(
        ("pairs", record, "a question without two answers; .* as `chosen`, .*rl.prompts")
        for record in (
            {"messages": [USER]},
            {"messages": [USER], "answer": "3"},
            {"prompt": [USER], "ground_truth": "3"},
            {"prompt": "q", "answer": "3"},
            {"problem": "q", "solution": "a"},
            {"prompt": "q"},
        )
    ),
    *(
        (kind, {"prompt": "q", "pos_resp": "a", "neg_resp": "b"}, "`pos_resp` as `chosen` and `neg")
        for kind in READERS
    ),
    ("labels", {"prompt": "q", "response": "a", "label": 0}, "; write `response` as `completion`"),
    *((kind, STEPS, "stepwise supervision.*no train.objective learns; leave") for kind in READERS),
    ("one", STEPS, "write the steps of a right answer as one text in `completion`"),
    (
        "pairs",
        STEPS,
        r"steps of a right answer as one text in `chosen`, .*`prompt` in `rejected` \(joined to "
        r"`prompt` without a separator\), or rename `prompt` to `question` for a chat",
    ),
    (
        "labels",
        STEPS,
        r"write the steps as one text in `completion` \(joined .*\), or write both as "
        "`instruction` and `output` for a chat, beside a `label` that is true",
    ),
    ("one", ULTRA, "; write a good one as `output`, or of two the better one as `chosen`"),
    ("pairs", ULTRA, "; write of two answers the better one as `chosen`, the other as `rejected`;"),
    ("labels", ULTRA, "; write one as `output`, beside a `label` that is true or false, or of two"),
    ("pairs", RANKED, "several answers in `output`; write the better one as `chosen`, another as"),
    ("pairs", RANKED, "`rejected`; leave records out in which all are as good"),
]


@pytest.mark.parametrize(("kind", "record", "says"), LINES, ids=str)
def test_a_line_does_not_mislead(kind: str, record: dict, says: str):
    with pytest.raises(BadLineError, match=says) as caught:
        documents(record, kind)
    assert "next_token" not in str(caught.value)


def test_what_these_lines_advise_is_learned():
    for kind in ("pairs", "labels"):
        found = documents({"prompt": "q", "chosen": "a", "rejected": "b"}, kind)
        assert [document.text for document in found] == ["qa", "qb"]
    (document,) = documents({"prompt": "q", "completion": "a", "label": 0}, "labels")
    assert (document.text, document.label) == ("qa", False)
    for kind in ("pairs", "labels"):
        found = documents({**STEPS, "chosen": "a", "rejected": "b"}, kind)
        assert [document.text for document in found] == ["qa", "qb"]
        chats = [theirs(USER, {**ANSWER, "content": text}) for text in "ab"]
        for record in (ULTRA, RANKED):
            found = documents({**record, "chosen": "a", "rejected": "b"}, kind)
            assert [document.text for document in found] == chats
        steps = {"question": "q", "completions": ["a", "b"], "labels": [True, False]}
        found = documents({**steps, "chosen": "a", "rejected": "b"}, kind)
        assert [document.text for document in found] == chats
    (document,) = documents({**ULTRA, "output": "a", "label": 0}, "labels")
    assert (document.text, document.label) == (theirs(USER, ANSWER), False)
    (document,) = documents({**STEPS, "completion": "a", "label": False}, "labels")
    assert (document.text, document.label) == ("qa", False)
    (document,) = documents({"instruction": "q", "output": "a", "label": False}, "labels")
    assert (document.text, document.label) == (theirs(USER, ANSWER), False)


@pytest.mark.parametrize(
    ("beside", "is_named"),
    [
        ({"code": "def f(): pass", "task_id": 601, "test_list": ["assert f()"]}, True),  # MBPP
        ({"summary": "s", "title": "t"}, True),  # BillSum
        ({"output": "a"}, True),
        ({"output": ""}, False),
        ({"output": "q"}, False),  # the text shows it
        ({"code": "en"}, False),
        ({"label": 0}, False),
        ({"prompt": "write a story", "audience": "young"}, False),  # Cosmopedia
    ],
    ids=str,
)
def test_an_answer_beside_a_text_is_named(beside: dict, is_named: bool, caplog):
    SEEN.clear()
    (document,) = documents({"text": "q", **beside})
    assert document.text == "q"
    name = next(iter(beside))
    says = f"`{name}` of records is not read: `text` is learned alone, as a document"
    assert caplog.text.count(says) == is_named
    if is_named:
        followed = {**beside, "instruction": "q", "output": beside[name]}
        (document,) = documents(followed)
        assert document.text == theirs(USER, {**ANSWER, "content": beside[name]})


def test_coheres_chatbot_is_the_assistant():
    turns = [{**USER, "role": "User"}, {**ANSWER, "role": "Chatbot"}]
    (document,) = documents({"messages": turns})
    assert document.text == theirs(USER, ANSWER)
    assert len(document.loss_spans) == 1


# ---- names that no list has ---------------------------------------------------------------------

LOST = [  # form, fields beside it, the field that is named
    ("alpaca", {"question": "How many golds has Mali?"}, "question"),  # TableInstruct
    ("alpaca", {"query": "Who?"}, "query"),
    ("alpaca", {"text": "cat"}, "text"),
    ("alpaca", {"dialogue": "Bo: I am late."}, "dialogue"),
    ("alpaca", {"code": "print(1) # a comment"}, "code"),
    ("alpaca", {"retrieved_contexts": ["Mali won three."]}, "retrieved_contexts"),
    ("alpaca", {"hint": "count them"}, "hint"),
    ("completion", {"instruction": "Answer in one word."}, "instruction"),
    ("completion", {"input": "cat"}, "input"),
    ("completion", {"suffix": "return x"}, "suffix"),
    ("completion", {"query": "Solve two sum.", "response": "class S: pass"}, "query"),
    ("messages", {"question": "Who?"}, "question"),
    ("alpaca", {"model_reasoning": "Short waves scatter more"}, "model_reasoning"),
    ("alpaca", {"synthetic_reasoning": "so it is"}, "synthetic_reasoning"),  # SYNTH
    ("alpaca", {"reasoning (reasoning_content)": "so it is"}, r"reasoning \(reasoning_content\)"),
    ("alpaca", {"scratchpad": "so it is"}, "scratchpad"),
    ("sharegpt", {"r1_reasoning": "so it is"}, "r1_reasoning"),
    ("pair", {"chosen_reasoning": "3 = 2 + 1"}, "chosen_reasoning"),
    ("pair of messages", {"rejected_thinking": "a guess"}, "rejected_thinking"),
    ("alpaca", {"system_instruction": "You are Bo."}, "system_instruction"),
    ("messages", {"instructions": "You are Bo."}, "instructions"),
    ("alpaca", {"persona": "You are Bo."}, "persona"),
]
LOST += [  # the second reading's
    ("messages", {"systemInstruction": {"parts": [{"text": "Be terse."}]}}, "systemInstruction"),
    ("pair", {"systemPrompt": "Be terse."}, "systemPrompt"),
    ("messages", {"SYSTEM": "Be terse."}, "SYSTEM"),
    ("sharegpt", {"preamble": "Be terse."}, "preamble"),
    ("alpaca", {"Input": "zztop"}, "Input"),
    ("alpaca", {"sentence": "zztop"}, "sentence"),
    ("messages", {"toolConfig": {"tools": [{"toolSpec": {"name": "f"}}]}}, "toolConfig"),
    ("messages", {"tool_definitions": [{"name": "f"}]}, "tool_definitions"),
]
READ = [  # form, fields that describe the record, or repeat it
    ("alpaca", {"text": "### Instruction:\nq\n\n### Response:\na"}),  # Stanford's
    (
        "alpaca",
        {"prompt_id": "a b", "question_type": "open ended", "original_question": "Q of it?"},
    ),
    (
        "alpaca",
        {
            "reasoning_model": "one of ours",
            "reasoning_effort": "very high",
            "thinking": "on",
            "code": "en",
            "context": "",
        },
    ),
    (
        "messages",
        {"prompt": "q", "knowledge": "one needs to know it", "intent": "to learn"},
    ),  # Magpie
    ("messages", {"pre_query_template": "<|user|>\n", "is_reasoning": True, "reasoning": "off"}),
    ("messages", {"persona": "A chemist", "scenario": "at work", "image": "docker.io/x:latest"}),
    ("alpaca", {"prompt": "Below is it.\n### Instruction:\nq\n\n### Response:\na"}),
    ("pair", {"rationale": "the first is right", "rating": [9.0, 2.0]}),  # distilabel's judge
    ("pair", {"text": "a longer text of it", "code": "x = 1 + 2"}),
]


@pytest.mark.parametrize(("form", "beside", "name"), LOST, ids=str)
def test_a_part_of_the_question_or_of_the_answer_is_refused_by_its_words(form, beside, name):
    refuses(
        form,
        beside,
        f"^`{name}` (may be a part of|seems to be the system's|seems to hold the tools)",
    )


@pytest.mark.parametrize(("form", "beside"), READ, ids=str)
def test_what_describes_a_record_or_repeats_it_changes_nothing(form: str, beside: dict):
    found = documents({**ALL[form], **beside}, kind_of(form))
    assert found == documents(ALL[form], kind_of(form))


@pytest.mark.parametrize(
    "fields", [{"resolved": 0}, {"success": False}, {"verified": "False"}], ids=str
)
def test_a_run_that_failed_is_refused(fields: dict):
    """SWE-Gym's ``resolved`` is 0 or 1."""
    name = next(iter(fields))
    refuses("messages", fields, f"`{name}` is .*: the answer is one to avoid")
    good = {name: {"resolved": 1, "success": True, "verified": "True"}[name]}
    assert documents({**SINGLE["messages"], **good}) == documents(SINGLE["messages"])


@pytest.mark.parametrize("form", ["messages", "alpaca", "completion"])
@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("response_harm_label", "harmful", "unharmful"),
        ("response_label", "unsafe", "safe"),
        ("answer_correctness", "Incorrect", "correct"),
        ("if_chosen", False, True),
        ("r1_correctness", "False", "True"),
        ("correctness", False, True),
        ("r1_correct", False, True),
    ],
)
def test_a_word_that_says_that_the_answer_is_bad_is_obeyed(form: str, name: str, bad, good):
    """WildGuard's, Aegis' and PRISM's."""
    refuses(form, {name: bad}, f"`{name}` is .*: the answer is one to avoid")
    beside = {name: good, "prompt_label": "unsafe", "prompt_harm_label": "harmful"}
    assert documents({**ALL[form], **beside}, kind_of(form)) == documents(ALL[form], kind_of(form))


@pytest.mark.parametrize(
    "fields", [{"answers": ["b"]}, {"answer": "b"}, {"output": "b"}, {"response": "b"}], ids=str
)
@pytest.mark.parametrize("before", [[], [USER, ANSWER]], ids=["one question", "two"])
def test_an_answer_beside_a_last_question_is_named(before: list, fields: dict):
    """ChatQA has the answer to the last question in ``answers``."""
    asked = [*before, {**USER, "content": "Then b?"}]
    reader = RecordReader(ChatTemplate(CHATML, {}))
    said = f"`messages` end with a question, and `{next(iter(fields))}` seems to be its answer"
    with pytest.raises(BadLineError, match=said):
        reader.documents({"messages": asked, **fields})
    answered = [*asked, {**ANSWER, "content": "b"}]
    (found,) = reader.documents({"messages": answered})
    text = render_jinja_template([answered], chat_template=CHATML)[0][0].rstrip()
    assert found.text.rstrip() == text


def test_a_last_question_without_an_answer_is_warned_of(caplog):
    SEEN.clear()
    reader = RecordReader(ChatTemplate(CHATML, {}))
    record = {"messages": [USER, ANSWER, {**USER, "content": "Then?"}]}
    assert reader.documents(record) == reader.documents({"messages": [USER, ANSWER]})
    assert "end with a question that nothing answers: it is left out" in caplog.text


@pytest.mark.parametrize("form", ["messages", "alpaca", "completion"])
def test_thoughts_under_other_names_are_refused(form: str):
    """R1-Distill-SFT has R1's answer in ``reannotated_assistant_content``."""
    thought = "<think>\nt\n</think>\n\nb"
    refuses(form, {"reannotated_assistant_content": thought}, "has a thought, which would be lost")
    nested = [{"role": "assistant", "content": thought}]
    refuses(form, {"reannotated_messages": nested}, "has a thought, which would be lost")


def test_samples_of_which_the_answer_is_one_change_nothing():
    """OpenR1-Math has the answers that a model tried in ``generations``."""
    tried = [f"<think>\n{thought}\n</think>\n\na" for thought in "tuv"]
    record = {"messages": [USER, {**ANSWER, "content": tried[1]}]}
    assert documents({**record, "generations": tried}) == documents(record)
    others = {**record, "generations": [tried[0], tried[2]]}
    with pytest.raises(BadLineError, match="`generations` has a thought, which would be lost"):
        documents(others)


@pytest.mark.parametrize("names", ["opa opb opc opd", "A B", "option1 option2", "sol1 sol2"])
def test_choices_in_fields_of_their_own_are_refused(names: str):
    """MedMCQA's, WinoGrande's and PIQA's."""
    choices = {name: f"choice {name}" for name in names.split()}
    first = names.split()[0]
    refuses("alpaca", choices, f"`{first}` may be a part of the question")
    asked = "\n".join(choices.values())
    record = {"instruction": asked, "output": "a"}
    assert documents({**record, **choices}) == documents(record)


def test_a_run_of_swe_agent_that_failed_is_refused():
    """nebius' ``target`` says whether the issue was solved."""
    run = {"trajectory": [{"role": "user", "text": "q"}, {"role": "ai", "text": "a"}]}
    reader = RecordReader(ChatTemplate(CHATML, {}))
    with pytest.raises(BadLineError, match="`target` is false: the run did not solve its issue"):
        reader.documents({**run, "target": False, "exit_status": "exit_context"})
    assert reader.documents({**run, "target": True}) == reader.documents(run)


@pytest.mark.parametrize("name", ["image_path", "video_path", "audio_file", "imagePaths"])
def test_media_by_their_place_are_refused(name: str):
    refuses("messages", {name: "1.mp4"}, f"`{name}` is no text, and would be lost")


@pytest.mark.parametrize("said", ["<image>\nWhat?", "What?\n<video>", "<audio>\nWho?"])
def test_a_mark_of_a_picture_in_a_turn_is_refused(said: str):
    turns = [{**USER, "content": said}, ANSWER]
    with pytest.raises(
        BadLineError, match=r"messages\[0\] has a mark in the place of what is no text"
    ):
        documents({"messages": turns})
    html = [{**USER, "content": "What does <video> do?"}, ANSWER]
    assert documents({"messages": html})[0].text == theirs(*html)


def test_two_answers_beside_a_text_are_no_document():
    """MultiPref's ``text`` is the prompt."""
    record = {"text": "Explain wind.", "completion_a": "Air moves.", "completion_b": "It blows."}
    with pytest.raises(
        BadLineError, match=r"`text` stands beside two answers: .*better one as `chosen`"
    ):
        documents(record)


@pytest.mark.parametrize("name", ["custom_instructions", "xml_tools", "developer_prompt"])
def test_texts_among_the_variables_of_a_template_are_refused_where_it_reads_none(name: str):
    """SmolTalk2's; a switch that the template does not know is only named."""
    says = f"the chat template does not read '{name}' of chat_template_kwargs: .*; write it as"
    refuses("messages", {"chat_template_kwargs": {name: "You are Bo."}}, says)
    found = documents({**SINGLE["messages"], "chat_template_kwargs": {"enable_thinking": True}})
    assert found == documents(SINGLE["messages"])


@pytest.mark.parametrize("as_text", [True, False], ids=["texts", "objects"])
def test_tools_among_the_variables_may_stay_where_they_are_written_as_the_error_says(as_text: bool):
    """SmolTalk2's ``xml_tools``, which are texts, beside a template that reads ``tools`` alone."""
    listed = [json.dumps(SCHEMA), json.dumps({"name": "time", "parameters": {"type": "object"}})]
    value = listed if as_text else [json.loads(each) for each in listed]
    kwargs = {"chat_template_kwargs": {"xml_tools": value, "enable_thinking": False}}
    record = {"messages": [USER, ANSWER], **kwargs}
    says = "does not read 'xml_tools' .*; write it as a system turn or as `tools`, or name"
    with pytest.raises(BadLineError, match=says):
        documents(record)
    tools = [{"type": "function", "function": json.loads(each)} for each in listed]
    for written in (value, listed, tools):
        (whole,) = documents({**record, "tools": written})
        assert whole.text == theirs(USER, ANSWER, tools=tools)
    for line in ("\n".join(listed), json.dumps(tools, indent=2)):
        told = {"role": "system", "content": f"You have tools:\n{line}"}
        (whole,) = documents({**record, "messages": [told, USER, ANSWER]})
        assert whole.text == theirs(told, USER, ANSWER)
    with pytest.raises(BadLineError, match=says):  # one of the two is written
        documents({**record, "tools": tools[:1]})
    other = {**tools[0]["function"], "description": "Another one"}
    with pytest.raises(BadLineError, match=says):
        documents({**record, "tools": [other, tools[1]]})


ABOUT = {
    **{"__index_level_0__": 7, "Unnamed: 0": 1, "idx": 3, "model": "gpt-4", "num_tokens": 12},
    **{"domain": "medicine", "title": "Tea", "date": "2024-05-01", "metadata": {"a": "b c"}},
    **{
        "question_type": "open ended",
        "qtype": "information",
        "_task_name": "a b",
        "verified": True,
    },
    **{"dataset_name": "x y", "script": "Latn", "answer_type": "a number", "subset": "wiki"},
}
"""Columns of MedQuad, FLAN, Aya, WebInstruct, OpenCodeReasoning and LongForm, and of tables."""


@pytest.mark.parametrize(
    "record", [{"question": "q", "answer": "a"}, {"input": "q", "output": "a"}]
)
@pytest.mark.parametrize("name", ABOUT)
def test_a_question_may_have_columns_that_describe_it(record: dict, name: str):
    (document,) = documents({**record, name: ABOUT[name]})
    assert document.text == theirs(USER, ANSWER)


@pytest.mark.parametrize("name", ["hint", "options", "explanation", "passage"])
def test_a_question_beside_what_may_be_a_part_of_it_is_refused(name: str):
    with pytest.raises(BadLineError, match=f"`{name}`"):
        documents({"question": "q", "answer": "a", name: "a text"})


@pytest.mark.parametrize("key", ["tool_plan", "thinking_content", "scratchpad"])
def test_a_thought_under_another_key_of_a_turn_is_refused(key: str):
    """Cohere's ``tool_plan``."""
    with pytest.raises(BadLineError, match=f"`?{key}"):
        documents({"messages": [USER, {**ANSWER, key: "I will look."}]})


ALIKE = [  # records of public sets, and the turns that they mean
    ({"input": "q", "output": "a", "id": "1"}, [USER, ANSWER]),  # OpenCodeReasoning
    ({"input": "q", "target": "a", "kind": "x"}, [USER, ANSWER]),  # Firefly
    ({"input": "q", "target": "a", "part": "a text"}, None),
    ({"Instruction": "q", "Input": "", "Output": "a"}, [USER, ANSWER]),
    ({"conversation": json.dumps([USER, ANSWER])}, [USER, ANSWER]),
    ({"trajectory": json.dumps([USER, ANSWER]), "resolved": 1}, [USER, ANSWER]),
    ({"input": "q", "target": "a", "source": "x"}, [USER, ANSWER]),  # Firefly
    ({"conversation": [{"human": "q", "assistant": "a"}]}, [USER, ANSWER]),  # ShareGPT-Chinese
    ({"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}}, [USER, ANSWER]),
    ({"messages": [{"role": "system", "content": None}, USER, ANSWER]}, [USER, ANSWER]),
]


@pytest.mark.parametrize(("record", "turns"), ALIKE, ids=str)
def test_records_of_further_sets(record: dict, turns: list | None):
    if turns is None:
        with pytest.raises(BadLineError):
            documents(record)
        return
    (document,) = documents(record)
    assert document.text == theirs(*turns)


def test_pairs_of_medicalgpt():
    record = {"system": "", "history": [["h", "r"]], "question": "q"}
    found = documents({**record, "response_chosen": "a", "response_rejected": "b"}, "pairs")
    before = [{**USER, "content": "h"}, {**ANSWER, "content": "r"}, USER]
    right = [theirs(*before, {**ANSWER, "content": text}) for text in "ab"]
    assert [document.text for document in found] == right


def test_a_role_with_a_space_is_that_with_an_underscore():
    turns = [USER, {"role": "tool call", "content": '{"name": "f", "arguments": {}}'}]
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    right = theirs(USER, {"role": "assistant", "content": "", "tool_calls": [call]})
    (document,) = documents({"messages": turns})
    assert document.text == right


def test_a_call_may_be_written_as_python_shows_it():
    """Toucan's calls; their arguments may be the text of their JSON."""
    shown = [{"name": "f", "arguments": {"a": None, "b": "it's", "c": True}}]
    turns = [USER, {"role": "tool_call", "content": str(shown)}]
    call = {"type": "function", "function": shown[0]}
    right = theirs(USER, {"role": "assistant", "content": "", "tool_calls": [call]})
    (document,) = documents({"messages": turns})
    assert document.text == right
    glaive = """{"name": "f", "arguments": '{"a": null, "b": "it\\'s", "c": true}'}"""
    (document,) = documents({"messages": [USER, {"role": "function-call", "content": glaive}]})
    assert document.text == right
    for broken in ("{'name': f}", "{'name': 'f'", "{'a': " * 500):
        with pytest.raises(BadLineError, match=r"messages\[1\], a call, is text that is not JSON"):
            documents({"messages": [USER, {"role": "tool_call", "content": broken}]})


# ---- prompts of reinforcement learning ----------------------------------------------------------


def prompt_of(tmp_path: Path, line: dict, chat: bool = True) -> str:
    path = write_lines(tmp_path / "prompts.jsonl", line)
    prompts = Prompts(ByteTokenizer(), chat)
    problem = Jsonl(prompts, str(path), "zero").problem(0)
    assert problem.facts == line
    return bytes(prompts.encode(problem.prompt, problem.record)).decode()


def test_rewards_get_the_nulls_of_a_table(tmp_path: Path):
    """A reward reads the whole line, as from JSON lines. Templates read it without these nulls."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"prompt": "q", "constraint": None, "facts": {"answer": "9", "tests": None}},
        {"prompt": "q", "constraint": "short", "facts": {"answer": "8", "tests": ["t"]}},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    environment = Jsonl(Prompts(ByteTokenizer(), True), str(tmp_path / "prompts.parquet"), "zero")
    assert [environment.problem(task).facts for task in range(2)] == rows
    assert environment.problem(0).record == {"prompt": "q", "facts": {"answer": "9"}}


@pytest.mark.parametrize("name", ["system", "system_prompt", "system_message", "meta_instruction"])
@pytest.mark.parametrize("asked", [{"prompt": "q"}, {"prompt": [USER]}, {"messages": [USER]}])
def test_the_system_of_a_prompt_is_shown_as_in_training(asked: dict, name: str, tmp_path: Path):
    right = theirs(SYSTEM, USER) + "\n<|im_start|>assistant\n"
    assert prompt_of(tmp_path, {**asked, name: "S"}) == right
    if "prompt" in asked and isinstance(asked["prompt"], str):
        problem = f"`{name}` would be lost, as no chat template formats `prompt`; set rl.chat"
        says = re.escape(problem)
        with pytest.raises(ConfigError, match=says):
            prompt_of(tmp_path, {**asked, name: "S"}, chat=False)
        assert prompt_of(tmp_path, {**asked, name: ""}, chat=False) == "q"
        return
    assert prompt_of(tmp_path, {**asked, name: "S"}, chat=False) == right
    own = {key: [SYSTEM, *turns] for key, turns in asked.items()}
    assert prompt_of(tmp_path, {**own, name: "S"}) == right
    with pytest.raises(ConfigError, match=r"and the system's turn of .* differ"):
        prompt_of(tmp_path, {**own, name: "T"})


SCHEMA = {"name": "area", "description": "Area", "parameters": {"type": "object"}}
TOOLS_BESIDE = {
    "function": [SCHEMA],
    "toolset": [{"type": "function", "function": SCHEMA}],
    "mcp": [{"name": "area", "inputSchema": {"type": "object"}}],
    "one": SCHEMA,
    "candidates": json.dumps([SCHEMA]),
    "xml_tools": [json.dumps(SCHEMA)],
    "Functions": [json.dumps({"api_name": "area", "parameters": []})],
}


@BESIDE
@pytest.mark.parametrize("name", TOOLS_BESIDE)
def test_tools_in_a_field_of_any_name_are_refused(form: str, name: str):
    """BFCL has them in ``function``, Gorilla's OpenFunctions in ``Functions``."""
    refuses(form, {name: TOOLS_BESIDE[name]}, f"`{name}` seems to hold the tools, .* as `tools`")


@BESIDE
@pytest.mark.parametrize(
    "beside",
    [
        {"characters": [{"name": "Ann", "age": "3"}]},
        {"orig_tools": json.dumps([SCHEMA])},  # When2Call's, which were taken away
        {"parameters": {"temperature": 1}},
        {"config": '{"parameters": {"x": 1}}'},
        {"code_x": '["parameters"'},
    ],
    ids=str,
)
def test_what_is_no_tool_changes_nothing(form: str, beside: dict):
    assert documents({**ALL[form], **beside}, kind_of(form)) == documents(ALL[form], kind_of(form))


def test_openfunctions_of_gorilla_are_tools():
    record = {"Instruction": "q", "Functions": [SCHEMA], "Output": "a"}
    (found,) = documents(record)
    assert found.text == theirs(USER, ANSWER, tools=[{"type": "function", "function": SCHEMA}])


@pytest.mark.parametrize("name", ["story", "support", "passage"])
def test_a_story_beside_turns_is_refused(name: str):
    """CoQA's and SciQ's texts."""
    refuses("messages", {name: "The library stands."}, f"`{name}` may be a part of the question")


CALL_PARTS = [
    {"parts": [{"text": "a"}, {"functionCall": {"name": "area", "args": {}}}]},
    {"blocks": [{"type": "tool_use", "name": "area", "input": {}}]},
    {"type": "function_call", "name": "area", "arguments": "{}"},
]


@pytest.mark.parametrize("content", ["", "a"])
@pytest.mark.parametrize("keys", CALL_PARTS, ids=str)
def test_a_call_in_another_part_of_an_answer_is_not_lost(content: str, keys: dict):
    """Gemini's, Anthropic's, and the items of OpenAI's responses."""
    with pytest.raises(BadLineError, match=r"messages\[1\].*write .*calls as `tool_calls`"):
        documents({"messages": [USER, {**ANSWER, "content": content, **keys}, ANSWER]})


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ({"role": "model", "parts": [{"functionCall": {}}]}, "and calls as `tool_calls`"),
        (
            {"role": "user", "parts": [{"functionResponse": {}}]},
            "results as turns of the role tool",
        ),
        (
            {"type": "function_call", "name": "f"},
            "calls as `tool_calls` of a turn of the assistant",
        ),
        ({"type": "function_call_output"}, "and results as turns of the role tool"),
        ({"type": "reasoning"}, "and thoughts as `reasoning_content` of a turn of the assistant"),
        ({**ANSWER, "reasoning_content": ["t"]}, "reasoning_content is not text: .* as one text"),
        ({**ANSWER, "label": "quality:4,toxicity:0"}, "label judges the answer, and would be lost"),
    ],
    ids=str,
)
def test_a_turn_of_another_protocol_says_what_to_write(turn: dict, says: str):
    with pytest.raises(BadLineError, match=says):
        documents({"messages": [USER, turn, ANSWER]})


def test_a_call_is_not_learned_twice():
    call = {"type": "function", "function": {"name": "area", "arguments": {}}}
    said = {**ANSWER, "content": '<tool_call>{"name": "area"}</tool_call>', "tool_calls": [call]}
    with pytest.raises(BadLineError, match=r"a call in its content: .*; leave one of them out"):
        documents({"messages": [USER, said]})


def test_fields_that_are_neither_learned_nor_shown_are_listed(tmp_path: Path, caplog):
    turns = [{**USER, "content": "What is it?"}, {**ANSWER, "content": "A library."}]
    records = [
        {"messages": turns, "persona": "A shy girl.", "id": "x7", "score": 3},
        {"messages": turns, "intent": "To know more.", "question": "What is it?"},
        {"instruction": "What is it?", "output": "A library.", "old_contents": "print 1"},
        {"messages": turns, "source": "wikipedia", "text_twice": "A library."},
        {"messages": turns, "completion": "Another answer."},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    source = Source.of(config(tmp_path, path=str(path), source="records").data, ByteTokenizer())
    list(source.documents())
    names = "`persona`, `intent`, `old_contents`, `completion`"
    assert f"{path}: neither learned nor shown: {names}\n" in caplog.text


# ---- found by readers of 148 sets (2026-12-01) --------------------------------------------------

EARLIER = [{"role": "user", "content": "what came before"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("name", ["prev_messages", "previous", "earlier_turns", "context_messages"])
@pytest.mark.parametrize("form", ["messages", "sharegpt", "alpaca", "completion"])
def test_turns_that_come_before_are_not_lost(form, name):
    """GeneralThought's ``prev_messages``."""
    says = f"`{name}` seems to have turns before the question, which would be lost: 'what came bef"
    refuses(form, {name: EARLIER}, f"{says}.*; write them before the question in `messages`, or")
    # The error's advice, to the letter.
    (whole,) = documents({"messages": [*EARLIER, USER, ANSWER], name: EARLIER})
    assert whole.text == theirs(*EARLIER, USER, ANSWER)


def test_a_question_that_is_a_mark_is_refused():
    """OpenCodeReasoning's questions lie in another set, and are "-" in its second part."""
    for record in ({"input": "-", "output": "a"}, {"instruction": "...", "output": "a"}):
        says = r"`instruction` is '.*', which asks nothing; .* \(data\.bad_records skip\)"
        with pytest.raises(BadLineError, match=says):
            documents(record)
    for text in ("🎬", "你好", "2+2", "-1"):  # pictures, other scripts and numbers ask something
        assert text in documents({"instruction": text, "output": "a"})[0].text


def test_a_second_pair_is_named_as_one():
    """OpenSchnabeltier's German pair beside the English one."""
    fields = {"instruction_de": "Nenne einen Vogel.", "output_de": "Rotkehlchen."}
    says = "`instruction_de` and `output_de` are a second question and answer: 'Nenne einen Vogel.'"
    refuses("alpaca", fields, f"{says}; leave them out, or write them as `instruction`")


def test_the_longest_text_of_a_passage_is_shown():
    passages = [{"url": "https://a.example/b", "text": "What the passage says, at some length."}]
    refuses("alpaca", {"passages": passages}, "'What the passage says, at some length.'")


def unread(record: dict, kind: str = "one") -> list[str]:
    reader = RecordReader(ChatTemplate(CHATML, {}), **READERS[kind])
    return reader.unread(record, reader.documents(record))


def test_what_is_shown_is_not_said_to_be_unread():
    """Exports as CSV have truth values and lists as texts."""
    turns = json.dumps(["first question", "second question"])
    messages = [{"role": "user", "content": "first question"}, ANSWER]
    messages += [{"role": "user", "content": "second question"}, ANSWER]
    assert unread({"messages": messages, "turns": turns}) == []
    labelled = {"prompt": [USER], "completion": [ANSWER], "label": "True"}
    assert unread(labelled, "labels") == []
    # A list of turns is unread although its roles are words of every text.
    assert unread({"messages": [USER, ANSWER], "drafts": EARLIER}) == ["drafts"]


@pytest.mark.parametrize("adversarial", [{}, {"adversarial": None}, {"adversarial": ""}])
def test_wildjailbreak_without_an_adversarial_prompt(adversarial):
    record = {"vanilla": "How do locks work?", **adversarial, "completion": "By pins."}
    (document,) = documents(record)
    asked = {"role": "user", "content": "How do locks work?"}
    assert document.text == theirs(asked, {"role": "assistant", "content": "By pins."})


def test_an_original_question_and_answer_describe_the_record():
    """WebInstructSub's ``orig_question`` and ``orig_answer``."""
    record = {"question": "2+2?", "answer": "It is 4.", "orig_question": "<p>2+2?</p>"}
    assert "It is 4." in documents({**record, "orig_answer": "<p>4</p>"})[0].text


def test_lists_of_answers_are_offered():
    """natural_reasoning's ``responses``, the texts that one fine-tunes on."""
    samples = [{"response_model": "m", "response": "a long one"}]
    record = {"question": "Why?", "reference_answer": "r", "responses": samples}
    with pytest.raises(BadLineError, match=r"one of .*`responses\[\].response`.* as `output`"):
        documents(record)


CALLS = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    ("said", "is_warned"),
    [
        (["b", "c", "d"], True),
        (["b"], False),
        (["b", USER, "c"], False),
        (["b", USER, "c", "d"], True),
        ([{**ANSWER, **CALLS}, "d"], False),
        ([{**ANSWER, **CALLS}, {"role": "tool", "content": "r"}, "d"], False),
    ],
    ids=str,
)
def test_answers_that_follow_each_other_are_said(said: list, is_warned: bool, caplog):
    """RewardBench-2's alternatives, written as turns, would be one dialogue."""
    turns = [{**ANSWER, "content": x} if isinstance(x, str) else x for x in said]
    for pair in (
        {"prompt": "q", "chosen": [ANSWER], "rejected": turns},
        {"chosen": [USER, ANSWER], "rejected": [USER, *turns]},
    ):
        SEEN.clear()
        caplog.clear()
        documents(pair, "pairs")
        expected = "`rejected` of records has turns of the assistant that follow each other"
        assert (expected in caplog.text) == is_warned


def test_the_row_that_pairs_need_holds_both_answers(tmp_path):
    turns = [{"prompt": "q", "chosen": "a" * 100, "rejected": "b" * 90}] * 2
    path = write_lines(tmp_path / "a.jsonl", *turns)
    settings = {"source": "records", "path": str(path), "seq_len": 128, "eval_fraction": 0.3}

    def build(**data: object) -> None:
        loaded = config(tmp_path, **{**settings, **data})
        train = loaded.train.model_copy(update={"objective": "dpo"})
        build_data(loaded.model_copy(update={"train": train}), BYTE_VOCAB)

    with pytest.raises(ConfigError, match=r"length to learn; raise it, up to (\d+)") as error:
        build()
    (size,) = map(int, re.findall(r"up to (\d+)", str(error.value)))
    assert size > 190
    build(seq_len=size)


@pytest.mark.parametrize("names", ["score_{}", "{}_rating", "{}_score"])
def test_pairs_with_equal_scores_are_said(caplog, names):
    SEEN.clear()
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    better, worse = (names.format(side) for side in ("chosen", "rejected"))
    documents({**pair, better: 7.5, worse: 7.0}, "pairs")
    assert "learned as they stand" not in caplog.text
    documents({**pair, better: 7.5, worse: 7.5}, "pairs")
    assert f"have the same `{better}` and `{worse}`: the pairs are learned as they" in caplog.text


@pytest.mark.parametrize(
    "said",
    ["tie", "Tie", "tie (bothbad)", "tie (both bad)", "draw", "both_bad", "bothbad", "Both good"],
)
def test_pairs_that_are_ties_by_a_word_are_said(caplog, said):
    """``status`` of distilabel-intel-orca-dpo-pairs, whose card filters ties, and Arena's words."""
    SEEN.clear()
    pair = {"prompt": "q", "chosen": "tie", "rejected": "a"}
    documents({**pair, "status": "unchanged"}, "pairs")
    assert "learned as they stand" not in caplog.text
    documents({**pair, "status": said}, "pairs")
    assert f"have `status` '{said}': the pairs are learned as they" in caplog.text


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (
            {"parent_id": None, "role": "prompter", "text": "q", "rank": None},
            r"it is one turn of a tree; write the turns up to a question, in the order that "
            r"`parent_id` says, as `prompt`, .* a better one, by `rank`, as `chosen`",
        ),
        (
            {"conv_A": [USER, ANSWER], "conv_A_rating": 1, "conv_B": [USER], "conv_B_rating": 2},
            r"it has two answers; .* by `conv_A_rating` and `conv_B_rating`, as `chosen`",
        ),
        (
            {"orig_response_A": "a", "orig_response_B": "b", "orig_preference": "A"},
            r"it has two answers; .* the one that `orig_preference` names, as `chosen`",
        ),
        (
            {"instruction": "Judge a, b", "output": "A", "orig_instruction": "q"}
            | {"orig_response_A": "a", "orig_response_B": "b", "orig_preference": "A"},
            r"`rejected`, and `orig_instruction` as `question` in place of `instruction`; leave ti",
        ),
        (
            {"context": [USER], "response1": "a", "response2": "b", "overall_preference": -2},
            r"`rejected`, and `context` as `prompt`; leave ties out",
        ),
        (
            {"context": "q", "response1": "a", "response2": "b"},
            r"`rejected`, and `context` as `prompt`, or as `question` for a chat; leave ties out",
        ),
    ],
)
def test_two_answers_under_rarer_names_are_named(record, says):
    """oasst's flat files, Unified-Feedback, Preference-Collection, HelpSteer3."""
    with pytest.raises(BadLineError, match=says):
        documents(record, "pairs")


def test_the_question_of_two_answers_in_place_of_a_judges_prompt_is_learned():
    record = {"question": "q", "chosen": "a", "rejected": "b", "output": "A", "orig_score_A": "5"}
    assert documents(record, "pairs")[0].text == theirs(USER, ANSWER)
    with pytest.raises(BadLineError, match="`instruction` is not in `question`, beside which it"):
        documents({**record, "instruction": "Judge a and b"}, "pairs")


# ---- found by readers of the files of tools and vendors (2026-12-01) ----------------------------

INVOCATION = {
    "type": "tool-invocation",
    "toolInvocation": {"toolCallId": "c", "toolName": "f", "args": {}, "result": {"celsius": 20}},
}
OPENAIS = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS_BESIDE = {
    "AI SDK 4": ("parts", [{"type": "text", "text": "a"}, INVOCATION]),
    "AI SDK 5": (
        "parts",
        [{"type": "tool-f", "toolCallId": "c", "input": {"x": 1}, "output": {"celsius": 20}}],
    ),
    "LangChain": ("additional_kwargs", {"tool_calls": [OPENAIS]}),
    "LangChain's older": ("additional_kwargs", {"function_call": OPENAIS["function"]}),
    "Bedrock": ("blocks", [{"toolUse": {"toolUseId": "c", "name": "f", "input": {}}}]),
    "a whole message": ("raw", {"message": {"role": "assistant", "tool_calls": [OPENAIS]}}),
}


@pytest.mark.parametrize("form", CALLS_BESIDE)
def test_calls_in_another_field_beside_content_are_refused(form: str):
    """A template that does not show them would learn the answer without its call."""
    key, value = CALLS_BESIDE[form]
    says = (
        rf"messages\[1\]\.{key} is not read by the chat template: .*; write calls as `tool_calls`"
    )
    if form.startswith("AI SDK"):
        says += ", their results as turns of the role tool"
    with pytest.raises(BadLineError, match=f"{says}, or leave it out"):
        documents({"messages": [USER, {**ANSWER, key: value}]})
    # The same calls in `tool_calls` are read.
    assert documents({"messages": [USER, {**ANSWER, key: value, "tool_calls": [OPENAIS]}]})


@pytest.mark.parametrize(
    "beside",
    [
        {"parts": [{"type": "step-start"}, {"type": "text", "text": "a"}]},
        {"parts": [{"text": "a", "functionCall": None}]},
        {"additional_kwargs": {"tool_calls": [], "function_call": None, "refusal": None}},
        {"response_metadata": {"finish_reason": "tool_calls", "usage": {"tool_calls": 1}}},
        {"parts": [{"type": "reasoning", "reasoning": "t"}], "reasoning_content": "t"},
    ],
    ids=str,
)
def test_fields_of_a_turn_without_calls_change_nothing(beside: dict):
    turn = {**ANSWER, **beside}
    thought = {key: turn[key] for key in ("reasoning_content",) if key in turn}
    assert documents({"messages": [USER, turn]}) == documents(
        {"messages": [USER, {**ANSWER, **thought}]}
    )


@pytest.mark.parametrize(
    "part",
    [
        {"type": "reasoning", "reasoning": "so it is"},
        {"type": "reasoning", "text": "so it is"},
        {"type": "thinking", "thinking": "so it is"},
        {"thought": True, "text": "so it is"},
    ],
    ids=str,
)
def test_a_thought_in_a_part_of_a_turn_is_refused(part: dict):
    """The AI SDK's, Anthropic's and Gemini's."""
    says = (
        r"messages\[1\]\.parts is a thought that the chat template does not read: .*as `reasoning"
    )
    with pytest.raises(BadLineError, match=says):
        documents({"messages": [USER, {**ANSWER, "parts": [part, {"text": "a"}]}]})


def openais(said: dict) -> dict:
    message = {"role": "assistant", **said}
    return {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


RESPONSES = {
    "OpenAI": openais({"content": "NEW"}),
    "OpenAI's calls": openais({"content": None, "tool_calls": [OPENAIS]}),
    "OpenAI's older": {"choices": [{"text": "NEW", "finish_reason": "stop"}]},
    "OpenAI's responses": {
        "output": [
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "N"}],
            }
        ]
    },
    "Anthropic": {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "NEW"}],
        "stop_reason": "end_turn",
    },
    "Gemini": {"candidates": [{"content": {"role": "model", "parts": [{"text": "NEW"}]}}]},
    "Bedrock": {"message": {"role": "assistant", "content": [{"text": "NEW"}]}},
    "a message": {**ANSWER, "content": "NEW"},
    "a list": [{**ANSWER, "content": "NEW"}],
    "a text": "NEW",
}
CALLED = [USER, {"role": "assistant", "tool_calls": [OPENAIS]}, {"role": "tool", "content": "20"}]


@pytest.mark.parametrize("response", RESPONSES)
@pytest.mark.parametrize("key", ["response", "output", "completion"])
@pytest.mark.parametrize("turns", [[USER], [USER, ANSWER, USER], CALLED], ids=["1", "2", "tool"])
def test_a_response_beside_its_question_is_not_lost(turns: list, key: str, response: str):
    """Logs of LiteLLM, of gateways and of agents have the request and its response so."""
    end = "result of a tool" if turns is CALLED else "question"
    says = f"`messages` end with a {end}, and `{key}` seems to be its answer, which would be lost"
    for write in (json.dumps, lambda value: value):  # as an export as CSV has it
        with pytest.raises(BadLineError, match=says):
            documents({"messages": turns, key: write(RESPONSES[response])})


def test_a_response_under_any_name_is_not_lost():
    for key in ("choices", "raw_response", "completionObject"):
        value = RESPONSES["OpenAI"]["choices"] if key == "choices" else RESPONSES["OpenAI"]
        with pytest.raises(BadLineError, match=f"`{key}` seems to be its answer"):
            documents({"messages": [USER, ANSWER, USER], key: value})


def test_a_class_that_is_answered_twice_is_not_lost():
    """A classifier's log may have the same word as an earlier answer."""
    asked = [USER, {**ANSWER, "content": "yes"}, USER]
    with pytest.raises(BadLineError, match="`response` seems to be its answer"):
        documents({"messages": asked, "response": "yes"})
    thanked = [USER, {**ANSWER, "content": "So yes, it is."}, USER]  # which has the answer
    assert documents({"messages": thanked, "answer": "yes"}) == documents({"messages": thanked})
    call = {"function": {"name": "submit", "arguments": {"answer": "x = 42"}}}
    submitted = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "ok"},
    ]
    right = documents({"messages": submitted})
    assert documents({"messages": submitted, "answer": "x = 42"}) == right


@pytest.mark.parametrize(
    "beside",
    [
        {"examples": [USER, ANSWER]},
        {"metadata": {"finish_reason": "stop", "usage": {"total": 3}}},
        {"response": {"id": "x", "choices": []}},
        {"rejected_message": {**ANSWER, "content": "b"}},
    ],
    ids=str,
)
def test_what_is_no_response_beside_a_question_changes_nothing(beside: dict):
    asked = [USER, ANSWER, USER]
    assert documents({"messages": asked, **beside}) == documents({"messages": asked})


PRODIGYS = {"_input_hash": 123, "_task_hash": 456, "_view_id": "blocks", "_timestamp": 17}


@pytest.mark.parametrize("form", SINGLE)
def test_what_an_annotator_says_of_the_answer_is_obeyed(form: str):
    """Prodigy has ``accept``, ``reject`` or ``ignore`` in ``answer``."""
    right = documents(ALL[form])
    assert documents({**ALL[form], **PRODIGYS, "answer": "accept"}) == right
    for word in ("reject", "ignore"):
        refuses(form, {**PRODIGYS, "answer": word}, f"`answer` is '{word}': the answer is one to")
    assert documents({"prompt": "q", "completion": "reject it", "answer": "reject"})


def test_a_remedy_names_the_verdict_and_no_number_of_anything_else():
    """Records of Prodigy, and of Label Studio (JSON-MIN)."""
    asked = {"prompt": "What?", "response": "It"}
    rated = {"rating": [{"rating": 4}], "id": 1, "annotator": 1, "lead_time": 2.1}
    says = "; leave out the records whose `answer` says that the answer is a bad one, and write"
    with pytest.raises(BadLineError, match=says):
        documents({**asked, **PRODIGYS, "answer": "accept"})
    with pytest.raises(BadLineError, match="; keep the records whose `rating` suffice, and wr"):
        documents({**asked, **rated})
    with pytest.raises(BadLineError, match="; write `response` as `completion`"):
        documents({**asked, **PRODIGYS})


@pytest.mark.parametrize(
    "beside", [{"rating": [{"rating": 1}]}, {"quality.responses": [1]}, {"score": {"value": 0.5}}]
)
def test_a_score_within_a_list_or_an_object_is_named(beside: dict, caplog):
    """Label Studio's and Argilla's."""
    SEEN.clear()
    assert documents({**ALL["alpaca"], **beside}) == documents(ALL["alpaca"])
    assert f"`{next(iter(beside))}` of records is not read: the answers are" in caplog.text


TURNS = [USER, {**ANSWER, "content": "old"}, USER]
OBJECTS = [
    (
        {"inputs": {"model": "m", "messages": TURNS}, "output": openais({"content": "NEW"})},
        "messages",
    ),
    ({"input": {"messages": TURNS}, "output": ANSWER}, "messages"),
    ({"inputs": {"question": "q"}, "outputs": {"answer": "a"}}, "`outputs` as `output`"),
    ({"input": {"question": "q"}, "expectedOutput": {"answer": "a"}}, "`expectedOutput` as `outp"),
    ({"inputs": {"question": "q"}, "feedback": {"n": 1}}, "what is to be learned as `output`"),
]


def test_the_list_that_looks_like_turns_is_named_as_the_dialogue():
    """Zendesk's tickets have other lists of objects before their comments."""
    comments = [{"author_id": 3, "body": "q"}, {"author_id": 4, "body": "a"}]
    with pytest.raises(BadLineError, match="; if `comments` is a dialogue, write its turns"):
        documents({"custom_fields": [{"id": 2, "value": "7"}], "comments": comments})


def test_the_thought_of_a_rejected_answer_is_not_to_be_written_as_the_answer():
    """With next_token the rejected answer is left out, whatever it holds."""
    record = {"query": "q", "response": "a", "rejected_response": "<think>t</think>b"}
    assert [document.text for document in documents(record)] == [theirs(USER, ANSWER)]
    assert len(documents(record, "pairs")) == 2


@pytest.mark.parametrize(("record", "says"), OBJECTS, ids=str)
def test_a_question_that_is_an_object_is_told_what_to_write(record: dict, says: str):
    """Logs of Weave, LangSmith and Langfuse have the arguments of a call so."""
    key = next(iter(record))
    write = f"; `{key}` is an object; write its text, `question`, as `instruction` and .*{says}"
    if says == "messages":
        write = f"; write `{key}.messages` and after it the answer, perhaps `output.*, as `mess"
    with pytest.raises(BadLineError, match=write):
        documents({"id": "x", **record})


def test_a_dialogue_of_two_names_is_told_of_the_role_to_learn():
    turns = [{"role": "alice", "content": "hi"}, {"role": "bob", "content": "hello"}]
    says = "turn to learn from: .*; its roles 'alice', 'bob' are not known: write assistant in"
    with pytest.raises(BadLineError, match=says):
        documents({"messages": turns})
    right = [{**turns[0], "role": "user"}, {**turns[1], "role": "assistant"}]
    assert documents({"messages": right})[0].text == theirs(*right)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (
            {"instruction": {"0": "q", "1": "r"}, "output": {"0": "a", "1": "b"}},
            "write a text there",
        ),
        ({"text": ["one", "two"]}, "write texts there"),
    ],
    ids=str,
)
def test_columns_of_a_table_are_told_to_be_written_as_records(record: dict, says: str, caplog):
    """pandas' ``to_json`` writes a table so, and ``json.dump`` of a data set's ``to_dict``."""
    with pytest.raises(
        BadLineError, match=f"; {says}, or, if the record is a whole table, write a re"
    ):
        documents(record)
    # An answer of several texts is no column beside a question that is one.
    with pytest.raises(BadLineError, match=r"; write one of them there$"):
        documents({"instruction": "q", "output": ["a", "b"]})
    with pytest.raises(
        BadLineError, match="if it is a conversation of several, give each a record"
    ):
        documents({"messages": [[USER, ANSWER], [USER, ANSWER]]})
    SEEN.clear()
    assert documents({"instruction": ["q", "r"], "output": ["a", "b"]})
    assert "if they are the columns of a table, write a record for each row" in caplog.text


# ---- what a reading of public sets found --------------------------------------------------------


def test_a_system_text_that_the_question_repeats_is_said(caplog):
    """Sujet-Finance's `inputs` begin with its `system_prompt`."""
    SEEN.clear()
    documents({"system": "Be brief.", "instruction": "Who is brief?", "output": "a"})
    assert "shown twice" not in caplog.text
    documents({"system": "Be brief.", "instruction": "Be brief. Who?", "output": "a"})
    assert "questions begin with the text of the system's turn, which is shown twice" in caplog.text


def test_a_speakers_name_that_the_template_does_not_show_is_said(caplog):
    SEEN.clear()
    named = {**USER, "name": "Alice"}
    documents({"messages": [{**named, "content": "I am Alice"}, ANSWER]})
    assert "`name`" not in caplog.text
    (found,) = documents({"messages": [named, ANSWER]})
    assert found.text.rstrip() == theirs(USER, ANSWER)
    assert "the chat template does not show the `name` of a turn, such as 'Alice'" in caplog.text


def test_an_unknown_from_is_read_as_an_unknown_role_is(caplog):
    SEEN.clear()
    teller = {"role": "narrator", "content": "It rains."}
    said = [("human", "q"), ("narrator", "It rains."), ("gpt", "a")]
    record = {"conversations": [{"from": who, "value": text} for who, text in said]}
    (found,) = documents(record)
    assert found.text.rstrip() == theirs(USER, teller, ANSWER)
    assert [found.text[a:b] for a, b in found.loss_spans] == ["a<|im_end|>"]
    assert "the role 'narrator' is none of" in caplog.text


@pytest.mark.parametrize("value", ["Be kind.", ""])
def test_instructions_that_the_system_turn_has_may_stand_beside_it(value):
    """SmolTalk2 has them in ``chat_template_kwargs``; other instructions are refused."""
    system = {"role": "system", "content": "Be kind."}
    beside = {"chat_template_kwargs": {"custom_instructions": value}}
    (found,) = documents({"messages": [system, USER, ANSWER], **beside})
    assert found.text.rstrip() == theirs(system, USER, ANSWER)
    with pytest.raises(BadLineError, match="does not read 'custom_instructions'"):
        documents(
            {
                "messages": [system, USER, ANSWER],
                "chat_template_kwargs": {"custom_instructions": "Be rude."},
            }
        )


def test_a_call_in_parts_of_text_is_that_of_the_text():
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    contents = call, [{"type": "text", "text": call[:9]}, {"type": "text", "text": call[9:]}]
    in_text, in_parts = (
        documents(
            {
                "messages": [USER, {"role": "tool-call", "content": content}],
                "tools": [{"name": "add", "parameters": {"type": "object", "properties": {}}}],
            }
        )
        for content in contents
    )
    assert in_text == in_parts


def test_a_role_that_the_template_does_not_show_is_to_be_that_of_a_result():
    """Qwen3's template shows no ``environment``, Olmo's role of a tool's result."""
    source = (
        "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }};{% endfor %}"
    )
    reader = RecordReader(ChatTemplate(source, {}))
    result = {"role": "environment", "content": "20 degrees"}
    with pytest.raises(BadLineError, match=r"of role 'environment'; write `tool` as the role of"):
        reader.documents({"messages": [USER, ANSWER, result, ANSWER]})


def test_a_last_result_without_an_answer_is_warned_of(caplog):
    SEEN.clear()
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "end", "arguments": {}}]}
    turns = [USER, call, {"role": "tool", "content": "bye"}]
    tools = {"tools": [{"name": "end", "parameters": {"type": "object", "properties": {}}}]}
    assert documents({"messages": turns, **tools}) == documents({"messages": turns[:2], **tools})
    assert "end with a result of a tool that nothing answers: it is left out" in caplog.text


def test_a_score_in_json_text_is_said(caplog):
    """Toucan's assessments are JSON as text."""
    SEEN.clear()
    said = json.dumps({"reasoning": "good", "overall_score": 5})
    documents({"messages": [USER, ANSWER], "response_quality_assessment": said})
    assert "`response_quality_assessment` of records is not read" in caplog.text


def test_pairs_of_texts_that_end_with_a_question_end_with_their_answers(caplog):
    """The end of a text is learned, and is to be that of an answer."""
    SEEN.clear()
    talk = "\n\nHuman: hi\n\nAssistant: {}"
    whole = [talk.format(answer) for answer in ("yes", "no")]
    names = "chosen", "rejected"
    expected = documents(dict(zip(names, whole, strict=True)), "pairs")
    asking = dict(zip(names, (text + "\n\nHuman: bye" for text in whole), strict=True))
    assert documents(asking, "pairs") == expected
    assert "end with a question that nothing answers" in caplog.text


def test_pairs_of_messages_that_end_with_a_question_are_said(caplog):
    SEEN.clear()
    other = {**ANSWER, "content": "b"}
    documents({"chosen": [USER, ANSWER, USER], "rejected": [USER, other]}, "pairs")
    assert "end with a question that nothing answers" in caplog.text


def test_a_question_that_both_dialogues_have_is_not_lost():
    pair = {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "b"}]}
    system = {"prompt": "Be bad.", "question": "q"}
    with pytest.raises(BadLineError, match="`prompt` is not in the dialogues beside it"):
        documents({**pair, **system}, "pairs")
    assert documents({**pair, "question": "q"}, "pairs") == documents(pair, "pairs")


def test_pairs_whose_scores_contradict_them_are_said(caplog):
    SEEN.clear()
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    documents({**pair, "score_chosen": 1, "score_rejected": 5}, "pairs")
    assert "some pairs have a larger `score_rejected` than `score_chosen`" in caplog.text
    documents({**pair, "rejected": "a"}, "pairs")
    assert "the answers of some pairs have the same text" in caplog.text


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (
            {"context": "c", "response": "a", "episode_done": False},
            r"; write what is asked, perhaps `context`, as `instruction` and `response` as",
        ),
        ({"prompt": "q", "response": "a", "is_correct": True}, "whose `is_correct` is false"),
        (
            {"prompt": "q", "response": "a", "failed": "false", "score": 3},
            "; leave out the records whose `failed` is true, and keep the records whose `score` su",
        ),
        (
            {
                "example_dialogue": [USER, {"role": "char", "content": "b"}],
                "dialogues": [{"chat": [USER, {"role": "char", "content": "b"}]}],
            },
            "if `dialogues` is a dialogue, write its turns as `messages`",
        ),
        (
            {"talk": [USER, {"role": "char", "content": "b"}]},
            "`talk` seems to be a dialogue; .* `assistant` as the role of .* of 'char'",
        ),
        (
            {"log": [{"user utterance": "q", "system response": "a"}], "prompt": ["Find a room"]},
            "if `log` is a dialogue, write its turns as `messages`",
        ),
    ],
)
def test_advice_names_the_field_that_holds_the_turns(record, says):
    """prosocial-dialog, gpt_roleplay_realm and DialogStudio."""
    with pytest.raises(BadLineError, match=says):
        documents(record)


def test_records_that_are_turns_of_a_conversation_are_said(caplog):
    """ProsocialDialog has a row for each answer of a dialogue."""
    SEEN.clear()
    numbers = {"dialogue_id": 0, "response_id": 1}
    documents({"messages": [USER, ANSWER], **numbers})
    documents({"instruction": "q", "output": "a", "dialogue_id": 0})
    assert "learned alone" not in caplog.text
    documents({"instruction": "q", "output": "a", **numbers})
    assert "`dialogue_id` and `response_id` of records number the turns" in caplog.text


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (
            {"source": "q?", "target": "a", "rationale": "b c"},
            "and `target` as `output`, without `rationale`, or write both as `messages` with `rat",
        ),
        (
            {"instruction": "q", "output": "a", "scenario": "about the weather"},
            "`scenario` may be a part of the question: .*; write it in the question or as `system`",
        ),
    ],
)
def test_advice_names_what_is_beside_the_answer(record, says):
    """CoT-Collection and tiny-codes."""
    with pytest.raises(BadLineError, match=says):
        documents(record)


# ---- what a turn comes with ---------------------------------------------------------------------

FILE = "Revenue rose by 5 %."
ATTACHED: dict[str, dict[str, Any]] = {
    "Claude.ai's": {
        "attachments": [{"file_name": "n.txt", "file_type": "txt", "extracted_content": FILE}]
    },
    "Open WebUI's": {"files": [{"type": "file", "name": "n", "file": {"data": {"content": FILE}}}]},
    "a text": {"quoted_message": FILE},
    "documents": {"documents": [{"title": "n", "text": FILE}]},
    "a passage": {"passage": FILE},
    "results": {"search_results": [{"url": "https://a.example/b", "snippet": FILE}]},
    "a part's file": {"content": [{"type": "text", "text": "q", "file": {"data": FILE}}]},
    "a part's": {"content": [{"type": "text", "text": "q", "file_content": FILE}]},
}


@pytest.mark.parametrize("beside", ATTACHED.values(), ids=[*ATTACHED])
def test_a_text_that_a_turn_comes_with_is_not_lost(beside: dict):
    """Claude.ai's exports have the texts of files in ``attachments`` of a turn."""
    says = r"messages\[0\]\..* may be a part of what is asked: 'Revenue rose by 5 %\.'; write it in"
    with pytest.raises(BadLineError, match=says):
        documents({"messages": [{**USER, **beside}, ANSWER]})
    with pytest.raises(BadLineError, match=says):
        ChatTemplate(CHATML, {}).check_prompt([{**USER, **beside}], {})  # one of `rl`
    # The error's advice: the text is written into `content`; the field may stay.
    asked = f"q\n{FILE}"
    if "content" in beside:
        beside = {"content": [{**beside["content"][0], "text": asked}]}
    followed = {"messages": [{**USER, "content": asked, **beside}, ANSWER]}
    assert documents(followed)[0].text == theirs({"role": "user", "content": asked}, ANSWER)
    # A turn behind the last answer is not shown, whatever it comes with.
    assert documents({"messages": [USER, ANSWER, {**USER, "attachments": [FILE]}]})


def test_what_an_answer_rests_on_is_not_lost():
    """Open WebUI writes the passages that it found in ``sources`` of the answer."""
    sources = [{"source": {"name": "n.txt"}, "document": [FILE], "metadata": [{"page": 1}]}]
    says = r"messages\[1\]\.sources may be what the answer rests on: 'Revenue rose by 5 %\.'; write"
    with pytest.raises(BadLineError, match=says):
        documents({"messages": [USER, {**ANSWER, "sources": sources}]})
    cited = [{"type": "char_location", "cited_text": FILE, "document_index": 0}]  # Anthropic's
    said = {**ANSWER, "content": [{"type": "text", "text": "a", "citations": cited}]}
    with pytest.raises(BadLineError, match=r"messages\[1\]\.content\[0\]\.citations may be what"):
        documents({"messages": [USER, said]})
    asked = {**USER, "content": f"q\n{FILE}"}
    assert documents({"messages": [asked, said]})[0].text == theirs(asked, ANSWER)


@pytest.mark.parametrize("key", ["reference_answer", "referenceSolution", "expected_output"])
def test_the_right_answer_of_a_turn_is_no_part_of_what_is_asked(key: str, tmp_path: Path, caplog):
    """AM-DeepSeek-R1-Distilled's ``info.reference_answer`` of the user's turn."""
    told = "The answer is four, as the book says."
    for i, beside in ((0, {"info": {key: told}}), (0, {key: told}), (1, {key: told})):
        turns: list[dict] = [USER, ANSWER]
        turns[i] = {**turns[i], **beside}
        (document,) = documents({"messages": turns})
        assert document.text == theirs(USER, ANSWER)
    with pytest.raises(
        BadLineError, match=r"messages\[0\]\.reference may be a part of what is ask"
    ):
        documents({"messages": [{**USER, "reference": told}, ANSWER]})
    file = write_lines(tmp_path / "a.jsonl", {"messages": [{**USER, key: told}, ANSWER]})
    source = Source.of(config(tmp_path, path=str(file)).data, ByteTokenizer())
    assert [*source.documents()]
    assert f"neither learned nor shown: `messages[].{key}`" in caplog.text


def test_a_file_without_its_text_is_refused():
    """Claude.ai's ``files`` have names alone."""
    files = [{"file_name": "plan.pdf", "file_uuid": "x7"}]
    says = r"messages\[0\]\.files names a file whose text is not in the record: .*; leave such"
    with pytest.raises(BadLineError, match=says):
        documents({"messages": [{**USER, "files": files}, ANSWER]})
    assert documents({"messages": [USER, {**ANSWER, "files": files}]})  # the answer's own
    # ChatGPT's exports have them in `metadata`, which names other files for another reason.
    metadata = {"attachments": [{"name": "plan.pdf", "mime_type": "application/pdf"}]}
    with pytest.raises(BadLineError, match=r"metadata\.attachments names a file whose text"):
        documents({"messages": [{**USER, "metadata": metadata}, ANSWER]})
    assert documents({"messages": [{**USER, "metadata": {"file": "part-0.jsonl"}}, ANSWER]})


def test_what_describes_a_turn_is_no_attachment(tmp_path: Path, caplog):
    about = {"uuid": "m-1", "created_at": "2025-01-01T00:00:00Z", "model": "m", "feedback": "good"}
    about |= {"attachments": [], "files": [], "citations": None, "num_references": "two of them"}
    spans = [{"start": 0, "end": 1, "text": "a", "sources": [{"id": "doc_1"}]}]  # Cohere's
    links = ["https://a.example/b"]  # Perplexity's
    turns = [{**USER, **about}, {**ANSWER, **about, "citations": spans, "search_results": links}]
    assert documents({"messages": turns}) == documents({"messages": [USER, ANSWER]})
    assert unread({"messages": turns}) == []
    # A text of another name is named.
    said = [USER, {**ANSWER, "comment": "This answer is far too short."}]
    assert unread({"messages": said}) == ["messages[].comment"]
    # A template that reads the key shows its text.
    shows = CHATML.replace("message.content or", "message.quote or message.content or")
    (document,) = RecordReader(ChatTemplate(shows, {})).documents(
        {"messages": [{"role": "user", "content": "", "quote": FILE}, ANSWER]}
    )
    assert FILE in document.text


def test_the_other_branch_of_a_chat_is_named_and_a_copy_is_not():
    """An export of Open WebUI with its dialogue in ``messages``, and one of Claude.ai."""
    turns = [{"role": "user", "content": "Name a bird."}, {"role": "assistant", "content": "Crow."}]
    copied = [{"uuid": "m-1", "text": x["content"], "created_at": "2025-01-01T00"} for x in turns]
    assert unread({"messages": turns, "chat_messages": copied}) == []
    other = {"id": "a1", "role": "assistant", "content": "A bat."}
    chat = {"history": {"messages": {"u1": turns[0], "a1": other, "a2": turns[1]}}}
    assert unread({"messages": turns, "chat": chat}) == ["chat"]


# ---- requests beside their answers, and branches ------------------------------------------------

TOLD = [
    {"model": "m", "system": "S", "messages": [USER]},  # Anthropic's Messages API
    {"model": "m", "system": [{"type": "text", "text": "S"}], "messages": [USER]},
    {"model": "m", "messages": [SYSTEM, USER]},  # OpenAI's chat completions
    {"systemInstruction": {"parts": [{"text": "S"}]}, "contents": [USER]},  # Gemini's
    {"url": "/v1/chat/completions", "body": {"messages": [SYSTEM, USER]}},
    json.dumps({"model": "m", "messages": [SYSTEM, USER]}),
]


@pytest.mark.parametrize("request_", TOLD, ids=str)
def test_the_systems_text_of_a_request_beside_its_answer_is_not_lost(request_: Any):
    with pytest.raises(BadLineError, match=r"`request\..* is the system's text .*: 'S'; write it"):
        documents({"request": request_, "messages": [USER, ANSWER]})
    (whole,) = documents({"request": request_, "system": "S", "messages": [USER, ANSWER]})
    assert whole.text == theirs(SYSTEM, USER, ANSWER)
    (whole,) = documents({"request": request_, "messages": [SYSTEM, USER, ANSWER]})
    assert whole.text == theirs(SYSTEM, USER, ANSWER)


def test_what_describes_a_machine_is_no_request():
    (whole,) = documents({"info": {"system": "Linux 6"}, "messages": [USER, ANSWER]})
    assert whole.text == theirs(USER, ANSWER)


@pytest.mark.parametrize("key", ["parentMessageId", "parent_id", "parentId"])
def test_branches_of_a_chat_are_not_turns_behind_one_another(key: str):
    """LibreChat and Open WebUI keep an answer beside the one that was generated in its place."""
    first, other = {**ANSWER, key: "1"}, {**ANSWER, "content": "b", key: "1"}
    turns = [{**USER, key: "0"}, first, other]
    with pytest.raises(BadLineError, match=rf"messages\[1\] and messages\[2\] have .*`{key}`, '1'"):
        documents({"messages": turns})
    (whole,) = documents({"messages": [turns[0], other]})
    assert whole.text == theirs(USER, {**ANSWER, "content": "b"})
    results = [{"role": "tool", "content": x, key: "1"} for x in "xy"]  # of calls at once
    assert documents({"messages": [turns[0], {**first, key: "2"}, *results, other]})


# The tool of OpenAI's guide to function calling. `parameters` may be left out.
WEATHER = {"name": "get_weather", "description": "Get current temperature for a location."}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER_TOOL = {"type": "function", "function": {**WEATHER, "parameters": PARAMETERS}}
BRIEF = {"model": "m", "messages": [USER]}
TOLD_TOOLS: dict[str, tuple[dict[str, Any], str]] = {
    "OpenAI": ({"request": {**BRIEF, "tools": [WEATHER_TOOL]}}, "request.tools"),
    "OpenAI's older": ({"request": {**BRIEF, "functions": [WEATHER]}}, "request.functions"),
    "Anthropic": (
        {"request": {**BRIEF, "tools": [{**WEATHER, "input_schema": PARAMETERS}]}},
        "request.tools",
    ),
    "Gemini": (
        {"request": {"contents": [USER], "tools": [{"functionDeclarations": [WEATHER]}]}},
        "request.tools",
    ),
    "Bedrock": (
        {"request": {**BRIEF, "toolConfig": {"tools": [{"toolSpec": WEATHER}]}}},
        "request.toolConfig.tools",
    ),
    "a batch": ({"request": {"body": {**BRIEF, "tools": [WEATHER_TOOL]}}}, "request.body.tools"),
    "LiteLLM": ({"optional_params": {"tools": [WEATHER_TOOL], "n": 1}}, "optional_params.tools"),
    "LiteLLM's payload": (
        {"model_parameters": {"tools": [WEATHER_TOOL]}},
        "model_parameters.tools",
    ),
    "Langfuse": ({"modelParameters": {"tools": [WEATHER_TOOL]}}, "modelParameters.tools"),
}


@pytest.mark.parametrize("as_text", [False, True], ids=["object", "text"])
@pytest.mark.parametrize("log", TOLD_TOOLS)
def test_the_tools_of_a_request_beside_its_answer_are_not_lost(log: str, as_text: bool):
    """Right are the tools of LiteLLM's logging payload, of Langfuse's generations, and of APIs."""
    ((key, value),), place = TOLD_TOOLS[log][0].items(), TOLD_TOOLS[log][1]
    inner: Any = value
    for name in place.split(".")[1:]:
        inner = inner[name]
    value = json.dumps(value) if as_text else value
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather"}}]}
    called["tool_calls"][0]["function"]["arguments"] = {"city": "Bern"}
    says = f"`{place}` are the tools of the request and would be lost: 'get_weather'; write them "
    says += f"as `tools`, or leave `{key}` out"
    for answer in (ANSWER, called):
        turns = [USER, answer]
        with pytest.raises(BadLineError, match=says):
            documents({"messages": turns, key: value})
        # The error's advice, to the letter.
        (whole,) = documents({"messages": turns, key: value, "tools": inner})
        functions = [WEATHER_TOOL["function"]] if "properties" in str(inner) else [WEATHER]
        tools = [{"type": "function", "function": each} for each in functions]
        assert whole.text == theirs(USER, answer, tools=tools)
        (whole,) = documents({"messages": turns})
        assert whole.text == theirs(*turns)
    asked = {"role": "user", "content": "Does get_weather work?"}  # which does not declare it
    with pytest.raises(BadLineError, match=says):
        documents({"messages": [asked, ANSWER], key: value})
    told = {"role": "system", "content": f"Tools: {json.dumps(WEATHER)}"}  # which does
    assert documents({"messages": [told, asked, ANSWER], key: value})


@pytest.mark.parametrize("form", ["pair", "alpaca", "completion"])
def test_the_tools_of_a_request_beside_other_answers_are_not_lost(form: str):
    refuses(
        form, TOLD_TOOLS["LiteLLM"][0], r"`optional_params\.tools` are the tools of the request"
    )


@pytest.mark.parametrize(
    "beside",
    [
        {"request": {**BRIEF, "tools": []}},
        {"request": {**BRIEF, "tools": [{"type": "web_search"}]}},  # OpenAI's own, without a name
        {"metadata": {"tools": ["search"]}},
        {"original_request": {**BRIEF, "tools": [WEATHER_TOOL]}},
    ],
    ids=str,
)
def test_a_request_without_functions_changes_nothing(beside: dict):
    record = {"messages": [USER, ANSWER]}
    assert documents({**record, **beside}) == documents(record)


def test_a_call_in_an_answer_does_not_declare_its_tool():
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "area", "arguments": {}}}]}
    with pytest.raises(BadLineError, match=r"`toolset` seems to hold the tools, .* as `tools`"):
        documents({"messages": [USER, called], "toolset": TOOLS_BESIDE["toolset"]})


def test_only_what_is_not_shown_of_a_log_is_named():
    """The parts of OpenAI's chat completions: what `messages` have is learned."""
    calls = [{"id": "call_1", "type": "function", "function": {"name": "get_weather"}}]
    calls[0]["function"]["arguments"] = '{"city":"Bern"}'
    for said in ({"content": "It is warm there."}, {"content": "Ok."}, {"tool_calls": calls}):
        turns = [{**USER, "content": "Is it warm there?"}, {"role": "assistant", **said}]
        choice = {"index": 0, "message": turns[1], "finish_reason": "tool_calls"}
        record = {
            "messages": turns,
            "tools": [WEATHER_TOOL],
            "request": {"model": "m", "messages": turns[:1], "tools": [WEATHER_TOOL]},
            "response": {"object": "chat.completion", "choices": [choice]},
        }
        assert unread(record) == []
        asked = {**record["request"], "note": "from the second customer"}
        assert unread({**record, "request": asked}) == ["request.note"]
        other = {**choice, "message": {**ANSWER, "content": "Quite another one."}}
        assert unread({**record, "response": {"choices": [choice, other]}}) == ["response"]


# Lines of a session of Claude Code, whose first one may be a summary.
SESSION: list[dict[str, Any]] = [
    {"type": "summary", "summary": "Fix a failing test", "leafUuid": "b2"},
    {"parentUuid": None, "sessionId": "2f8e", "type": "user", "message": USER, "uuid": "a1"},
    {"parentUuid": "a1", "sessionId": "2f8e", "type": "assistant", "uuid": "b2"}
    | {"message": {"id": "msg_01", "type": "message", "content": [{"type": "text", "text": "a"}]}},
    {"type": "file-history-snapshot", "messageId": "a1", "snapshot": {"files": "x y"}},
    {
        "parentUuid": "b2",
        "sessionId": "2f8e",
        "type": "system",
        "content": "Conversation compacted",
    },
]
SESSION[2]["message"] |= {"role": "assistant", "model": "m", "stop_reason": "end_turn"}


def test_each_line_of_a_session_says_how_its_turns_become_a_record():
    of_turns = "it is one turn of a session; write the `message` of all its lines, those with the "
    of_turns += "same `sessionId`, in the order that `parentUuid` says, as the `messages` of one "
    others = "in the log of a session, and no turn; leave such lines out, and write the `message` "
    for line in SESSION:
        says = of_turns if "message" in line else f"of the type '{line['type']}' {others}"
        with pytest.raises(BadLineError, match=says):
            documents(line)
    # The advice, to the letter.
    turns = [line["message"] for line in SESSION if "message" in line]
    (whole,) = documents({"messages": turns})
    assert whole.text == theirs(USER, ANSWER)


def test_the_type_of_a_record_makes_it_no_line_of_a_session():
    record = {"type": "summary", "instruction": "Summarise: t", "output": "s"}
    assert documents(record)
    with pytest.raises(BadLineError, match=r"write what is asked.* and `summary` as `output`"):
        documents({"type": "summary", "dialogue": "A: hi. B: bye.", "summary": "They met."})


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (  # OASST's rows
            {"message_id": "2", "parent_id": "1", "text": "a b", "role": "assistant"},
            "give whole dialogues as `messages`: the turns of each, in the order that `parent_id` ",
        ),
        (
            {**USER, "conversation_id": 7, "parent_id": None},
            "write the turns of each dialogue, those with the same `conversation_id`, in the order "
            "that `parent_id` says, as `messages`",
        ),
        (USER, "write the turns of each dialogue as `messages`, or"),
    ],
)
def test_a_turn_alone_names_the_fields_that_join_it_to_others(record: dict, says: str):
    with pytest.raises(BadLineError, match=says):
        documents(record)


@pytest.mark.parametrize(
    ("key", "value", "is_named"),
    [
        ("in_response_to_tweet_id", "3", True),  # customers' tweets
        ("in_reply_to_status_id", 17, True),
        ("parent_comment_id", "t1_a", True),
        ("in_response_to_tweet_id", None, False),
        ("in_reply_to_screen_name", "ann", False),
        ("response_to_prompt", "a whole text", False),
        ("parent_category", "shoes", False),
    ],
)
def test_a_text_that_answers_another_is_named(key: str, value: Any, is_named: bool, caplog):
    SEEN.clear()
    assert documents({"text": "We are sorry.", key: value})
    assert (f"`{key}` of records names the turn before them" in caplog.text) is is_named


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    "parts",
    [
        [{"text": "Done, the lights "}, {"text": "are at 25 %."}],  # Gemini's
        [{"type": "text", "text": "Done,\nthe lights"}, {"type": "text", "text": "are at 25 %."}],
        ["Done, the lights", "are at 25 %."],
    ],
    ids=str,
)
def test_a_part_of_a_turn_that_its_content_lacks_is_not_lost(parts: list, at: int):
    turns = [USER, ANSWER]
    cut = {**turns[at], "content": "Done, the lights ", "parts": parts}
    says = rf"messages\[{at}\]\.parts\[1\] has a text that `content` lacks.*'are at 25 %\.'; write"
    with pytest.raises(BadLineError, match=says):
        documents({"messages": [*turns[:at], cut, *turns[at + 1 :]]})
    # The advice of the error is followed.
    whole = {**turns[at], "content": "Done, the lights are at 25 %."}
    right = theirs(*turns[:at], whole, *turns[at + 1 :])
    for beside in ({"parts": parts}, {}):
        turn = {**whole, **beside}
        (document,) = documents({"messages": [*turns[:at], turn, *turns[at + 1 :]]})
        assert document.text == right


def test_parts_of_a_turn_that_are_no_text_or_a_thought_change_nothing():
    parts = [
        {"type": "step-start"},
        {"type": "reasoning", "text": "so", "details": [{"type": "text", "text": "so"}]},
        {"type": "text", "text": "a"},
    ]
    turn = {**ANSWER, "reasoning_content": "so"}
    (document,) = documents({"messages": [USER, {**turn, "parts": parts}]})
    assert document.text == theirs(USER, turn)


@pytest.mark.parametrize(
    ("said", "is_warned"),
    [
        (["a", "b"], True),
        (["a", USER, "b"], False),
        ([{**ANSWER, **CALLS}, "b"], False),
        (["a", {**ANSWER, "weight": 0}], False),
        ([{**ANSWER, "weight": 0}, "b"], True),
        ([{"role": "assistant", "content": "", "reasoning_content": "so"}, "b"], False),
    ],
    ids=str,
)
def test_answers_of_a_dialogue_that_follow_each_other_are_said(said: list, is_warned: bool, caplog):
    """The comments of a ticket, written as turns, may have two of the agent's in a row."""
    turns = [{**ANSWER, "content": x} if isinstance(x, str) else x for x in said]
    SEEN.clear()
    assert documents({"messages": [USER, *turns]})
    says = "`messages` of records has turns of the assistant that follow each other, which are read"
    assert (says in caplog.text) is is_warned


@pytest.mark.parametrize(
    ("key", "value", "is_named"),
    [
        ("public", False, True),  # Zendesk
        ("jsdPublic", "false", True),  # Jira Service Management
        ("private", True, True),  # Freshdesk
        ("is_private", True, True),
        ("internal", True, True),
        ("isInternalNote", True, True),
        ("public", True, False),
        ("is_private", False, False),
        ("internal", "a word", False),
        ("public_key", False, False),
        ("hidden", 0, False),
    ],
)
def test_a_note_that_only_one_side_sees_is_named(key: str, value: Any, is_named: bool, caplog):
    note = {"role": "assistant", "content": "The customer is a VIP."}
    for turns in ([USER, {**note, key: value}], [USER, {**note, key: value}, USER, ANSWER]):
        SEEN.clear()
        caplog.clear()
        assert documents({"messages": turns})
        says = f"`{key}` of turns is {value!r}, as of a note that only one side of a dialogue sees"
        assert (says in caplog.text) is is_named
    SEEN.clear()
    caplog.clear()
    assert documents({"messages": [USER, ANSWER]})  # as the warning says
    assert "of a note" not in caplog.text


def test_a_message_of_a_thread_of_slacks_is_named(caplog):
    """``thread_ts`` is the ``ts`` of the first message of the thread, as Slack's API has it."""
    message = {"type": "message", "user": "U1", "text": "We look.", "ts": "1709280060.000200"}
    thread = {"thread_ts": "1709280000.000100", "parent_user_id": "U2"}
    SEEN.clear()
    assert documents(message)
    assert "learned alone" not in caplog.text
    assert documents({**message, **thread})
    says = "`thread_ts` and `ts` of records number the turns of conversations: each is learned "
    assert f"{says}alone; write whole conversations as `messages`" in caplog.text
    SEEN.clear()
    caplog.clear()
    turns = [{"role": "user", "content": "VPN?"}, {"role": "assistant", "content": "We look."}]
    assert documents({"messages": turns, **thread, "ts": message["ts"]})  # as the warning says
    assert "learned alone" not in caplog.text


def test_advice_on_a_log_names_the_parts_that_other_requests_may_have():
    """The first record of a log may have no tools and no system's text, and the second has."""
    answer = {"choices": [{"index": 0, "message": ANSWER}]}
    for turns, first in (([USER], "`request.system` as `system` and "), ([SYSTEM, USER], "")):
        said = f"write {first}`request.tools` as `tools` where a request has them, and the turns of"
        with pytest.raises(BadLineError, match=re.escape(said)):
            documents({"request": {"model": "m", "messages": turns}, "response": answer})
    said = "write `request.systemInstruction` as `system` and `request.tools` as `tools` where a"
    with pytest.raises(BadLineError, match=re.escape(said)):
        documents({"request": {"contents": [USER]}, "response": answer})
    said = "as `messages` and `input.tools` as `tools` where a record has them"
    with pytest.raises(BadLineError, match=re.escape(said)):
        documents({"input": {"model": "m", "messages": [USER]}, "output": ANSWER, "x": "y z"})


def test_advice_on_a_log_names_the_parts_of_its_request():
    request_ = {"model": "m", "system": "S", "messages": [USER], "tools": [{"name": "f"}]}
    answer = {"id": "1", "type": "message", "role": "assistant", "content": [{"type": "text"}]}
    answer["content"][0]["text"] = "a"
    said = (
        "write `request.system` as `system` and `request.tools` as `tools` where a request has "
        "them, and the turns of "
        "`request.messages` and `response`, which is a message of the assistant, as `messages`"
    )
    with pytest.raises(BadLineError, match=re.escape(said)):
        documents({"request": request_, "response": answer})
    told = {"system": "S", "tools": request_["tools"]}
    (whole,) = documents({"request": request_, **told, "messages": [USER, answer]})
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert theirs(SYSTEM, USER, ANSWER, tools=tools) == whole.text


# ---- parts of a question that are objects -------------------------------------------------------

# WikiTableQuestions' card: a table of a header, rows of texts, and the name of its file.
TABLE = {
    "header": ["Year", "League"],
    "rows": [["2001", "USL A-League"], ["2005", "USL First Division"]],
    "name": "csv/204-csv/590.csv",
}
ROWS = "Year\tLeague\n2001\tUSL A-League\n2005\tUSL First Division"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("table", TABLE),
        ("passage", {"id": "d-17", "url": "https://a.example/b", "text": ROWS}),
        ("paragraphs", [{"file_name": "the leagues.csv", "content": ROWS}]),
        ("passages", [{"path": "a/b", "text": ROWS}, {"docId": "7", "text": "2001"}]),
    ],
)
def test_the_address_of_a_shown_part_is_no_part(name: str, value: Any):
    asked = f"{ROWS}\n\nWhich league was it in 2005?"
    record = {"instruction": asked, name: value, "output": "USL First Division"}
    (document,) = documents(record)
    assert document.text == theirs(
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "USL First Division"},
    )
    assert not [*hidden_parts({"prompt": asked, name: value, "answer": "a"}, [asked])]
    short = {**record, "instruction": "Which league was it in 2005?"}
    part = "USL A-League" if name == "table" else "Year.*League"
    refuses_line(short, f"`{name}` may be a part of the question or of the answer: '{part}")


@pytest.mark.parametrize(
    "value",
    [
        {"name": "csv/204-csv/590.csv"},  # without the rows it is all that the record has
        {"name": "leagues", "columns": [{"name": "year"}]},  # a table of a schema
        {"id": "leagues of the world", "rows": [["x"]]},
    ],
)
def test_a_name_that_may_be_asked_about_is_a_part(value: dict):
    record = {"instruction": "Which x?", "table": value, "output": "a"}
    refuses_line(record, "`table` may be a part of the question or of the answer")
    (part,) = hidden_parts({"prompt": "Which x?", "table": value, "answer": "a"}, ["Which x?"])
    assert part.place == "table"


def refuses_line(record: dict, says: str) -> None:
    with pytest.raises(BadLineError, match=says):
        documents(record)


def test_the_first_advice_names_the_table_unless_the_question_shows_it():
    asked = {"question": "Which league was it in 2005?", "answers": ["USL First Division"]}
    refuses_line({**asked, "table": TABLE}, "write `question` with `table` as `instruction`")
    line = {"prompt": asked["question"], "table": TABLE, "answer": "USL First Division"}
    refuses_line(line, "write `table` in `prompt` and `answer` as `completion`")
    refuses_line({**line, "prompt": f"{ROWS} Which?"}, "; write `answer` as `completion`")
    turns = [{"role": "user", "content": f"{ROWS} Which?"}]
    refuses_line({**line, "prompt": turns}, "; write `answer` as `completion`")


# HotpotQA's card: `context` has the titles of paragraphs, and the sentences of each.
HOTPOT = {
    "title": ["Arthur's Magazine", "First for Women"],
    "sentences": [["Arthur's Magazine (1844-1846) was American."], ["It is a magazine.", " 1989."]],
}
WHOLE = "Arthur's Magazine (1844-1846) was American.\nFirst for Women: It is a magazine. 1989."


def test_a_context_that_is_no_text_keeps_its_name():
    record = {"instruction": "Which was first?", "context": HOTPOT, "output": "Arthur's Magazine"}
    says = "`context` may be a part of the question or of the answer: .*; write it in the question"
    refuses_line(record, says)
    refuses_line({**record, "context": HOTPOT["sentences"][1]}, says)  # as PubMedQA's, a list
    # The error's advice: the text is written into the question; its field may go.
    asked = f"{WHOLE}\nWhich was first?"
    answer = {"role": "assistant", "content": "Arthur's Magazine"}
    right = theirs({"role": "user", "content": asked}, answer)
    without = {key: record[key] for key in ("instruction", "output")}
    for shown in ({**record, "instruction": asked}, {**without, "instruction": asked}):
        assert [document.text for document in documents(shown)] == [right]
    beside = {**record, "input": WHOLE}
    right = theirs({"role": "user", "content": f"Which was first?\n\n{WHOLE}"}, answer)
    assert [document.text for document in documents(beside)] == [right]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (
            {"instruction": "q", "context": 5, "output": "a"},
            "`context` is read as `input`: 'input' is not text: 5",
        ),
        (
            {"instruction": "q", "response": 5},
            "`response` is read as `output`: 'output' is not text: 5",
        ),
        ({"instruction": "q", "output": 5, "response": None}, "^'output' is not text: 5"),
        (
            {"Instruction": 5, "Output": "a"},
            "`Instruction` is read as `instruction`: ",
        ),
        ({"question": "-", "answer": "a"}, "`question` is read as `instruction`: `instruction` is"),
        ({"instruction": "-", "output": "a"}, "^`instruction` is '-', which asks nothing"),
    ],
)
def test_an_error_names_the_field_of_the_record(record: dict, says: str):
    refuses_line(record, says)


def test_calls_that_smolagents_shows_again_are_left_out():
    """Its memory has them behind the answer with their code, as Python shows them."""
    shown = {
        "role": "tool-call",
        "content": "Calling tools:\n[{'id': 'call_1', 'type': 'function'}]",
    }
    with pytest.raises(
        BadLineError, match=r"messages\[2\] shows the calls .* leave such turns out"
    ):
        documents({"messages": [USER, ANSWER, shown]})
    (whole,) = documents({"messages": [USER, ANSWER]})
    assert whole.text == theirs(USER, ANSWER)
