"""Records of public data sets with special forms are recognised, or refused with a remedy.

Fields are those of the data sets' cards. The right texts are transformers' renderings of OpenAI's
messages.
"""

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moetrain.data.chat import CHATML, BadLineError, ChatTemplate
from moetrain.data.records import RecordReader
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.data.warned import SEEN
from moetrain.rl.envs import Prompts
from moetrain.rl.envs.lines import advice_for_prompt
from moetrain.rl.envs.shipped import Jsonl

FUNCTION = {
    "name": "rain",
    "description": "says whether it rains",
    "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
}
OTHER = {"name": "time"}
TOOLS = [{"type": "function", "function": each} for each in (FUNCTION, OTHER)]
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


_OF_RL = "moetrain rl reads .* rl.prompts"


def call(**arguments: object) -> dict:
    return {"type": "function", "function": {"name": "rain", "arguments": arguments}}


def documents(record: dict | list, pairs: bool = False, text_field: str = "text") -> list:
    form = "preference" if pairs else "auto"
    template = ChatTemplate(CHATML, {})
    reader = RecordReader(template, form=form, reads_pairs=pairs, text_field=text_field)
    return reader.documents(record)


def theirs(messages: list[dict], tools: list | None = None) -> str:
    rendered, _ = render_jinja_template([messages], tools=tools, chat_template=CHATML)
    return rendered[0].rstrip()


INTRODUCTION = "You are a helpful assistant with access to the following functions. Use them if "
INTRODUCTION += "required -"


def glaive(chat: str, *functions: dict, before: str = INTRODUCTION) -> dict:
    system = "\n".join([f"SYSTEM: {before}", *(json.dumps(x, indent=4) for x in functions), ""])
    return {"system": system, "chat": chat}


def glaive_chat(call: str) -> str:
    return (
        f"USER: Rain in Köln?\n\n\nASSISTANT: {call} <|endoftext|>\n\n\n"
        'FUNCTION RESPONSE: {"rain": false}\n\n\nASSISTANT: No.\n\nIt is dry. <|endoftext|>\n\n\n'
    )


GLAIVE = [
    {"role": "user", "content": "Rain in Köln?"},
    {"role": "assistant", "tool_calls": [call(where="Köln")]},
    {"role": "tool", "content": '{"rain": false}'},
    {"role": "assistant", "content": "No.\n\nIt is dry."},
]
GLAIVE_CALL = """<functioncall> {"name": "rain", "arguments": '{"where": "Köln"}'}"""
MEDMCQA = {
    **{"question": "q", "opa": "one", "opb": "two", "opc": "three", "opd": "4", "cop": 1},
    **{"choice_type": "single", "exp": "Because\nof r.", "id": "a-1"},
    **{"subject_name": "Anatomy", "topic_name": None},
}
_ABSTRACT = {
    **{"contexts": ["Aims\nvary.", "Köln: 7."], "labels": ["BACKGROUND", "RESULTS"]},
    **{"meshes": ["Plant Leaves of a very old tree"], "reasoning_required_pred": ["y", "e", "s"]},
    **{"reasoning_free_pred": ["n", "o"]},
}
PUBMEDQA = {
    **{"pubid": 21645374, "question": "q?", "context": _ABSTRACT, "long_answer": "We\nconclude."},
    **{"final_decision": "yes"},
}
OF_ABSTRACT = {"role": "user", "content": "BACKGROUND: Aims\nvary.\nRESULTS: Köln: 7.\n\nq?"}
ASKED = {"role": "user", "content": "q\n\nA. one\nB. two\nC. three\nD. 4"}


@pytest.mark.parametrize(
    ("record", "messages", "tools"),
    [
        (glaive(glaive_chat(GLAIVE_CALL), FUNCTION, OTHER), GLAIVE, TOOLS),
        (
            glaive(glaive_chat(GLAIVE_CALL.replace("'", "")), FUNCTION, before="Be brief."),
            [{"role": "system", "content": "Be brief."}, *GLAIVE],
            TOOLS[:1],
        ),
        (
            glaive(glaive_chat("""<functioncall> {"name": "rain"}"""), FUNCTION),
            [GLAIVE[0], {"role": "assistant", "tool_calls": [call()]}, *GLAIVE[2:]],
            TOOLS[:1],
        ),
        (
            glaive("USER: q\n\n\nASSISTANT: a <|endoftext|>\n\n\n", before="No functions."),
            [{"role": "system", "content": "No functions."}, USER, ANSWER],
            None,
        ),
        (
            {
                "id": 0,
                "query": "q",
                "tools": json.dumps([FUNCTION, OTHER]),
                "answers": json.dumps([call(where=x)["function"] for x in "ab"]),
            },
            [USER, {"role": "assistant", "tool_calls": [call(where=x) for x in "ab"]}],
            TOOLS,
        ),
        (
            {
                "instance_id": "x-1",
                "trajectory": [
                    {"role": "system", "system_prompt": "s", "text": None, "mask": False},
                    {"role": "user", "system_prompt": None, "text": "q", "mask": False},
                    {"role": "ai", "system_prompt": None, "text": "a", "mask": True},
                ],
                "exit_status": "submitted",
            },
            [{"role": "system", "content": "s"}, USER, ANSWER],
            None,
        ),
        (
            {
                "trajectory": [  # as in tables, which leave nulls out
                    {"role": "system", "system_prompt": "s", "mask": False},
                    {"role": "user", "text": "q", "mask": False},
                    {"role": "ai", "text": "a", "mask": True},
                ],
            },
            [{"role": "system", "content": "s"}, USER, ANSWER],
            None,
        ),
        (
            {
                "instance_id": "x-1",
                "messages": json.dumps(
                    [USER, {**ANSWER, "content": "t\na", "agent": "main", "thought": "t"}]
                ),
            },
            [USER, {**ANSWER, "content": "t\na"}],
            None,
        ),
        (
            {
                "source": "TheoremQA",
                "conversation": [{"input": "q", "output": "a"}, {"input": "r", "output": "b"}],
            },
            [USER, ANSWER, {"role": "user", "content": "r"}, {**ANSWER, "content": "b"}],
            None,
        ),
        (
            {
                "conversation": [
                    {"system": "s", "input": "q", "output": "a"},
                    {"input": "r", "output": "b"},
                ]
            },
            [
                {"role": "system", "content": "s"},
                *(USER, ANSWER, {"role": "user", "content": "r"}, {**ANSWER, "content": "b"}),
            ],
            None,
        ),
        (
            {
                "input": [USER],
                "output": "<think>\nt\n</think>\na",
                "category": "math",
                "reasoning": "on",
                "used_in_training": ["Ultra"],
                "system_prompt": "detailed thinking on",
            },
            [
                {"role": "system", "content": "detailed thinking on"},
                *(USER, {**ANSWER, "content": "<think>\nt\n</think>\na"}),
            ],
            None,
        ),
        (
            {
                **{"input": "q", "output": "<think>t</think> code", "source": "codeforces"},
                **{"dataset": "x", "split": "train", "difficulty": "EASY", "solution": "code"},
            },
            [USER, {**ANSWER, "content": "<think>t</think> code"}],
            None,
        ),
        (
            {"messages": [USER], "reasoning": "t", "answer": "a", "model": "deepseek-reasoner"},
            [USER, {**ANSWER, "reasoning_content": "t"}],
            None,
        ),
        (
            {
                **{"lang": "python", "raw_index": 7, "index": 8, "seed": "def f():"},
                **{"openai_fingerprint": "fp", "problem": "q", "solution": "a"},
            },
            [USER, ANSWER],
            None,
        ),
        (MEDMCQA, [ASKED, {**ANSWER, "content": "Because\nof r.\n\nAnswer: B. two"}], None),
        *(
            (MEDMCQA | {"exp": exp, "cop": cop}, [ASKED, {**ANSWER, "content": said}], None)
            for exp, cop, said in [
                (None, 0, "Answer: A. one"),
                (" ", 3, "Answer: D. 4"),
                ("", "2", "Answer: C. three"),  # as in CSV
                ("e", 1.0, "e\n\nAnswer: B. two"),
            ]
        ),
        *(
            (PUBMEDQA | changed, [OF_ABSTRACT, {**ANSWER, "content": said}], None)
            for changed, said in [
                ({}, "We\nconclude.\n\nAnswer: yes"),
                ({"final_decision": "maybe"}, "We\nconclude.\n\nAnswer: maybe"),
                ({"final_decision": None}, "We\nconclude."),  # the unlabelled part
                ({"long_answer": " "}, "Answer: yes"),
                (  # as in CSV
                    {"pubid": "21645374", "context": json.dumps(_ABSTRACT)},
                    "We\nconclude.\n\nAnswer: yes",
                ),
            ]
        ),
    ],
    ids=[
        "Glaive",
        "Glaive, other words",
        "Glaive, no arguments",
        "Glaive, no functions",
        "xLAM",
        "SWE-agent",
        "SWE-agent, without nulls",
        "SWE-smith",
        "Capybara",
        "XTuner",
        "Llama-Nemotron",
        "OpenCodeReasoning",
        "Dolphin-R1",
        "Magicoder",
        "MedMCQA",
        "MedMCQA, no explanation",
        "MedMCQA, a blank explanation",
        "MedMCQA, texts",
        "MedMCQA, a float",
        "PubMedQA",
        "PubMedQA, maybe",
        "PubMedQA, no decision",
        "PubMedQA, a blank conclusion",
        "PubMedQA, texts",
    ],
)
def test_records_of_known_sets_are_recognised(record: dict, messages: list, tools: list | None):
    (document,) = documents(record)
    assert document.text == theirs(messages, tools)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("trajectory", ("ai", "text")),
        *((name, ("assistant", "content")) for name in ("messages", "conversations", "trajectory")),
    ],
)
def test_the_mask_of_swe_agents_turns_says_which_are_learned(name: str, keys: tuple[str, str]):
    """In the published runs the mask is true in the model's turns, and false in all others.

    Others write such runs as ``role`` and ``content``.
    """
    said = ["a", "b", "c"]
    turns = [{"role": "system", keys[1]: "s", "mask": False}]
    for text, mask in zip(said, (True, False, True), strict=True):
        turns.append({"role": "user", keys[1]: "q", "mask": False})
        turns.append({"role": keys[0], keys[1]: text, "mask": mask})
    (document,) = documents({name: turns})
    assert document.loss_spans is not None
    learned = [document.text[a:b].partition("<")[0] for a, b in document.loss_spans]
    assert learned == ["a", "c"]
    assert "b<|im_end|>" in document.text
    with pytest.raises(BadLineError, match="'weight' and 'mask', which contradict each other"):
        documents({name: [*turns[:2], {**turns[2], "weight": 0}, *turns[3:]]})
    others = [{**turn, "mask": None} if turn["role"] != keys[0] else turn for turn in turns]
    with pytest.raises(BadLineError, match="`mask` that does not say which answers are learned"):
        documents({name: others})


QWEN_AGENT = [
    {"role": "user", "content": "Rain in Köln and Bonn?"},
    {"role": "assistant", "content": "", "reasoning_content": "ask both"},
    {"role": "assistant", "content": "I look."},
    *(
        {"role": "assistant", "content": "", "function_call": call(where=x)["function"]}
        for x in ("Köln", "Bonn")
    ),
    *({"role": "function", "name": "rain", "content": x} for x in ("no", "yes")),
    {"role": "assistant", "content": "", "reasoning_content": "both known"},
    {"role": "assistant", "content": "In Bonn."},
]
AS_OPENAI = [
    QWEN_AGENT[0],
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "ask both",
        "tool_calls": [call(where=x) for x in ("Köln", "Bonn")],
    },
    *({"role": "tool", "name": "rain", "content": x} for x in ("no", "yes")),
    {"role": "assistant", "content": "In Bonn.", "reasoning_content": "both known"},
]


@pytest.mark.parametrize("left_out", [(), (1,), (2,), (1, 2), (2, 4)], ids=str)
def test_a_thought_and_calls_of_qwen_agent_are_one_turn(left_out: tuple[int, ...]):
    """Its messages have one for each; the right text is that of OpenAI's messages."""
    given = [turn for i, turn in enumerate(QWEN_AGENT) if i not in left_out]
    wanted = {**AS_OPENAI[1]}
    if 1 in left_out:
        del wanted["reasoning_content"]
    if 2 in left_out:
        wanted["content"] = ""
    if 4 in left_out:
        wanted["tool_calls"] = wanted["tool_calls"][:1]
    found = documents({"messages": given, "functions": [FUNCTION]})
    right = theirs([AS_OPENAI[0], wanted, *AS_OPENAI[2:]], TOOLS[:1])
    assert [document.text for document in found] == [right]
    assert found[0].loss_spans is not None
    assert len(found[0].loss_spans) == 2
    halves = [{**QWEN_AGENT[1], "weight": 0}, QWEN_AGENT[2]]
    with pytest.raises(BadLineError, match="part of the turn before it, whose weight differs"):
        documents({"messages": [QWEN_AGENT[0], *halves]})


def test_two_answers_in_a_row_stay_two_turns():
    turns = [USER, ANSWER, {**ANSWER, "content": "b"}]
    (document,) = documents({"messages": turns})
    assert document.text == theirs(turns)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"cop": -1}, r"`cop` is -1, and 0 to 3 .*; -1 says that it is not known.*; leave such"),
        ({"cop": "-1", "exp": None}, r"`cop` is '-1', .*test part; leave such records out"),
        *(({"cop": x}, rf"`cop` is {x!r}, and 0 to 3 name .* `opd`; leave") for x in (4, 1.5, "b")),
        *(({"cop": x}, "`cop` is .* name the right") for x in (True, [1], 10**30, float("nan"))),
        ({"opc": 7}, "`opc` is not text: 7; write a text there"),
        ({"exp": ["e"]}, "`exp` is not text"),
        ({"cop": None}, "`question` has no answer of a known name beside it"),
        ({"answer": "a"}, "may be a part of the question"),
    ],
    ids=str,
)
def test_a_question_of_medmcqa_without_its_right_option_is_refused(changed: dict, says: str):
    with pytest.raises(BadLineError, match=says):
        documents(MEDMCQA | changed)


def test_a_pair_with_the_fields_of_medmcqa_stays_a_pair():
    found = documents({**MEDMCQA, "chosen": "a", "rejected": "b"}, pairs=True)
    assert found == documents({"question": "q", "chosen": "a", "rejected": "b"}, pairs=True)


def test_no_field_of_medmcqa_is_called_unread():
    reader = RecordReader(ChatTemplate(CHATML, {}))
    assert reader.unread(MEDMCQA, reader.documents(MEDMCQA)) == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        *(
            ({"final_decision": x}, "`final_decision` is .*, and is yes, no or maybe .*; write one")
            for x in ("Yes", "", "unknown", True, 0, ["yes"])
        ),
        *(
            (
                {"context": _ABSTRACT | {"labels": x}},
                rf"`context\.labels` is .* {len(x)} for the 2 t",
            )
            for x in ([], ["A"], ["A", "B", "C"])
        ),
        ({"context": {"contexts": ["a"]}}, r"`context\.labels` is no list of texts: None; give"),
        (
            {"context": {"contexts": "a", "labels": ["A"]}},
            r"`context\.contexts` is no list of texts",
        ),
        ({"long_answer": ["a"]}, "`long_answer` is not text"),
        ({"question": 7}, "`question` is not text: 7; write a text there"),
        ({"context": _ABSTRACT | {"notes": "Of another hand."}}, "`context"),
        ({"context": '{"contexts": ['}, "`context"),
        ({"context": "Aims vary."}, "`context`"),
        ({"answer": "a"}, "`context`"),
    ],
    ids=str,
)
def test_a_question_of_pubmedqa_that_is_not_as_published_is_refused(changed: dict, says: str):
    with pytest.raises(BadLineError, match=says):
        documents(PUBMEDQA | changed)


def test_a_question_of_pubmedqa_without_an_abstract_is_asked_alone():
    (document,) = documents(PUBMEDQA | {"context": {"contexts": [], "labels": []}})
    asked = {"role": "user", "content": "q?"}
    assert document.text == theirs([asked, {**ANSWER, "content": "We\nconclude.\n\nAnswer: yes"}])


def test_no_field_of_pubmedqa_is_called_unread_and_the_record_stays_as_it_is():
    reader = RecordReader(ChatTemplate(CHATML, {}))
    before = json.dumps(PUBMEDQA)
    for changed in ({}, {"final_decision": None}, {"pubid": "1", "context": json.dumps(_ABSTRACT)}):
        record = PUBMEDQA | changed
        assert reader.unread(record, reader.documents(record)) == []
    assert json.dumps(PUBMEDQA) == before


@pytest.mark.parametrize("labels", [1, 0])
def test_a_pair_of_shp_has_its_preference(labels: int):
    record = {"history": "q", "human_ref_A": "A", "human_ref_B": "B", "labels": labels}
    record |= {"score_A": 7, "domain": "askbaking_train"}
    found = [document.text for document in documents(record, pairs=True)]
    answers = "AB" if labels else "BA"
    assert found == [theirs([USER, {**ANSWER, "content": each}]) for each in answers]


def test_the_first_answer_of_stack_exchange_paired_is_preferred():
    """By the card, `response_j` got more votes than `response_k`; trl's StackLLaMA agrees."""
    record = {"qid": 1, "question": "q", "date": "2010/10/01", "metadata": ["https://a.b/1"]}
    record |= {"response_j": "A", "response_k": "B"}
    found = [document.text for document in documents(record, pairs=True)]
    assert found == [theirs([USER, {**ANSWER, "content": each}]) for each in "AB"]


def test_turns_of_a_pair_are_not_read_twice():
    """distilabel's Capybara pairs have both the answers and Capybara's conversation."""
    turns = [{"input": "q", "output": "a"}]
    record = {"conversation": turns, "chosen": [USER, ANSWER]}
    record |= {"rejected": [USER, {**ANSWER, "content": "b"}]}
    found = [document.text for document in documents(record, pairs=True)]
    assert found == [theirs([USER, {**ANSWER, "content": each}]) for each in "ab"]


METADATA = [{"tools": TOOLS}, json.dumps({"tools": TOOLS}), {"tools": json.dumps(TOOLS)}]


@pytest.mark.parametrize("metadata", METADATA, ids=["object", "text", "text in an object"])
def test_tools_of_the_metadata_are_shown(metadata: object, tmp_path):
    """The records are Nemotron's, and lines of rl.prompts."""
    calling = [USER, {"role": "assistant", "tool_calls": [call()]}]
    for empty in ({}, {"tools": None}, {"tools": ""}):
        (document,) = documents({"messages": calling, "metadata": metadata, **empty})
        assert document.text == theirs(calling, TOOLS)
    line = {"messages": [USER], "metadata": metadata}
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(line) + "\n")
    prompts = Prompts(ByteTokenizer(), True)
    problem = Jsonl(prompts, str(path), "zero").problem(0)
    prompt = bytes(prompts.encode(problem.prompt, problem.record)).decode()
    assert prompt == theirs([USER], TOOLS) + "\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "metadata",
    [{"tools": ["rain"]}, {"tools": "rain"}, "the tools", {"tools": [{"type": "x"}]}, 3],
    ids=str,
)
def test_other_metadata_is_no_tools(metadata: object):
    (document,) = documents({"messages": [USER, ANSWER], "metadata": metadata})
    assert document.text == theirs([USER, ANSWER])


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (glaive(glaive_chat("<functioncall> {'name"), FUNCTION), "a call that cannot be read"),
        (glaive(glaive_chat(GLAIVE_CALL[:-4] + "'}"), FUNCTION), "a call that cannot be read"),
        (glaive("USER: q\n\n\nASSISTANT: a <|endoftext|> b"), "<|endoftext|> within a turn"),
        ({"query": "q", "tools": "[]", "answers": "[]"}, "has no call: .*; leave such records out"),
        ({"query": "q", "tools": "[]", "answers": "[1]"}, "`answers` is no list of calls"),
        ({"query": "q", "tools": "[]", "answers": "[{"}, "`answers` is text that is not JSON"),
        *(
            (
                {
                    "trajectory": [
                        {"role": "user", "text": "q", "mask": others},
                        *({"role": "ai", "text": "a", "mask": mask} for mask in masks),
                    ]
                },
                "`trajectory` is read as `messages`: `messages` has a `mask` that does not say "
                "which answers are learned, .*; leave `mask` out",
            )
            for others, masks in [
                (False, ([1], None)),
                (False, (False, False)),
                (True, (False, False)),
                (True, (True, True)),
                (None, (True, None)),
                (None, (1, 0)),
            ]
        ),
        (
            {"messages": [USER, ANSWER], "reasoning": "t", "answer": "b"},
            "`reasoning` and `answer` stand beside `messages` that have an answer",
        ),
        (
            {"trajectory": [{"action": "ls", "observation": "x"}]},
            "a run without roles; write its turns \\(SWE-agent's `history`\\) as `messages`",
        ),
        (
            {"id": "1", "content": [{"class_": "api_action", "function": "bash"}]},
            "`content` is a run without roles; write its turns as `messages`",
        ),
        (
            {"query": [USER]},
            "`query` seems to be a question; write its turns as `messages`, .* and after them the",
        ),
        (
            {"conversation": [{"input": "", "output": "a"}]},
            r"`?conversation\[0\].input is empty.*as `text`",
        ),
        (
            {"conversation": [{"input": "q", "output": "a", "need_eos_token": False}]},
            r"conversation\[0\].need_eos_token is false",
        ),
        (
            {"question": {"problem": "q"}, "label": {"steps": [{"completions": [{"rating": 1}]}]}},
            "`label` has a verdict on each step of an answer, which no train.objective learns",
        ),
        (
            {"input": "q Step 1: a \u043a\u0438", "label": "q Step 1: a +"},
            "`label` has a verdict on each step of an answer, which no train.objective learns",
        ),
        (
            {"narrative": "n", "dialogue": ["q", "a"], "head_answer": "yes", "tail_answer": "no"},
            "`dialogue` seems to be a dialogue; write its texts as `messages`",
        ),
        ({"old": "x = 1", "new": "x = 2", "message": "two"}, "none is near"),
        ({"topic;": "t", "message_1": "q", "message_2": "a"}, "none is near"),
        (
            {"Instances": [{"input": "q", "output": ["a"]}], "Definition": ["d"]},
            "`Instances` holds records with `input` and `output`; write each of them as a line, "
            "with the `Definition` of the record as `instruction`, `input` as `input` and one text "
            "of `output` as `output`, or, if each",
        ),
        (
            {"question": "q", "solution": "a", "metadata": "{}", "thinking_trajectories": ["t"]},
            "with the text in `thinking_trajectories` as `reasoning_content` of the answer",
        ),
        (
            {
                "question": {"full_text": "q"},
                "answer_0": "a",
                "answer_1": "b",
                "score_0": 0.5,
                "score_1": -0.5,
            },
            "write the better one, by `score_0` and `score_1`, as `chosen`, .* as `prompt`, or as "
            "`question` for a chat; leave ties out",
        ),
        (
            {"prompt": "q", "response_0": "a", "response_1": "b", "better_response_id": 1},
            "answers are joined to `prompt` as plain text: rename it `question` for a chat",
        ),
        (
            {"steps": [{"speaker": "x", "utterance": "q"}]},
            "if `steps` is a dialogue, write its turns as `messages`, each with `role`",
        ),
        (
            {
                "prompt": "q",
                "response_0": "a",
                "response_1": "b",
                "better_response_id": 0,
                "safer_response_id": 1,
            },
            "two answers; write the better one, the one that `better_response_id` or "
            "`safer_response_id` names, as `chosen`, the other as `rejected`",
        ),
        (
            {"prompt": "q", "response": "a", "helpfulness": 3, "verbosity": 2},
            "keep the records whose `helpfulness`, `verbosity` suffice, and write `response` as "
            "`completion`",
        ),
        (
            {"prompt": "q", "response_1": "a", "response_2": "b", "preference_strength": 2},
            "two answers; write the better one, `response_1` where `preference_strength` is "
            r"negative and `response_2` where it is positive \(0 is a tie\), as `chosen`",
        ),
        (  # the cards of HelpSteer2 and HelpSteer3: from -3, the first is much better, to 3
            {"context": [USER], "response1": "a", "response2": "b", "overall_preference": -1},
            "two answers; write the better one, `response1` where `overall_preference` is "
            r"negative and `response2` where it is positive \(0 is a tie\), as `chosen`",
        ),
        (
            {"prompt": "q", "response_a": "a", "response_b": "b", "overall_preference": 1},
            "two answers; write the better one, the one that `overall_preference` names, as",
        ),
        (
            {
                "prompt": '["q"]',
                "response_a": '["a"]',
                "response_b": '["b"]',
                "winner_model_a": 1,
                "winner_model_b": 0,
            },
            "two answers; write the better one, the one that `winner_model_a` or "
            "`winner_model_b` names, as",
        ),
        (
            {"conversation_a": [USER, ANSWER], "conversation_b": [USER, ANSWER], "winner": "tie"},
            "two answers; write the better one, the one that `winner` names, as",
        ),
        (
            {"question": {"full_text": "q"}, "answer_0": "a", "answer_1": "b", "score_0": 1.0},
            "two answers; write the better one, by `score_0`, as `chosen`",
        ),
        (
            {"prompt": "q", "answers": [{"answer": "a", "rank": 1}, {"answer": "b", "rank": 2}]},
            r"several answers in `answers\[\].answer`; write a good one as `completion` \(joined .*"
            r"\), or of two the better one as `chosen`, the other as `rejected`",
        ),
        ({"instruction": "q", "completions": ["a", "b"]}, "several answers in `completions`"),
        ({"conversation": [{"input": "q"}]}, r"conversation\[0\] has no text `output`"),
        (
            {"prompt": "q", "response": "a"},
            r"; write `response` as `completion` for plain text \(joined to `prompt` without .*\)"
            r", or write both as `instruction` and `output` for a chat",
        ),
        (
            {"history": "q", "human_ref_A": "A", "human_ref_B": "B", "labels": 2},
            "`labels` is 2, and 1 says that `human_ref_A` is preferred",
        ),
        (
            {"question": "q", "answer": "a #### 3", "cot": "t", "passage": "p"},
            "`cot`, `passage` may be a part of the question or of the answer; write what is asked "
            "as `instruction` and what is learned as `output`",
        ),
        (
            {"question": "q", "solution": "Two and one are 3.", "answer": "3"},  # LIMO
            "what is learned, one of `answer` and `solution`, as `output`",
        ),
        ({"question": "q", "answer": "a", "response": "b"}, "`answer` and `response`; leave one"),
        ({"prompt": "q"}, "`prompt` has no answer .*" + _OF_RL),
        (
            {"prompt": [USER], "reward_model": {"ground_truth": "3"}},
            _OF_RL,
        ),
        ({"question": "q", "id": 3}, "`question` has no answer .*" + _OF_RL),
        ({"messages": [USER]}, "no assistant turn .*" + _OF_RL),
        (
            {"prompt": "q", "answer": "a"},
            r"; write `answer` as `completion` for plain text \(joined to `prompt` without .*\)"
            r", or write both as `instruction` and",
        ),
        ({"prompt": [USER], "answer": "a"}, "; write `answer` as `completion`, or .*" + _OF_RL),
        ({"prompt": "q", "response": "a", "idx": 3}, "; write `response` as `completion`"),
        (
            {"messages": []},
            "`messages` is empty: it is a chat without turns; leave such records",
        ),
        ({"conversation": [USER]}, "`conversation` is read as `messages`: `messages` has no assi"),
        (
            {"trajectory": [USER, {"role": "assistant"}]},
            r"`trajectory` is read as `messages`: messages\[1\]\.content is missing",
        ),
        ({"chosen": "a"}, "nearest is preference, which lacks `rejected`"),
        ({"instuction": "a", "output": "b"}, "nearest is alpaca, which lacks `instruction`"),
        ({"body": "a"}, r"none is near: fill or rename its fields, .* data\.text_field"),
        ({"instruction": "q", "output": "a", "response": "b"}, "`output` and `response` differ"),
        ({"instruction": "q", "input": "a", "context": "b", "output": "o"}, "`context` differ"),
    ],
    ids=str,
)
def test_other_records_are_refused_with_what_to_write(record: dict, says: str):
    with pytest.raises(BadLineError, match=says.replace("<|", r"<\|").replace("|>", r"\|>")):
        documents(record)


CHAT, PLAIN = theirs([USER, ANSWER]), "qa"
OTHER_CHAT = theirs([USER, {**ANSWER, "content": "b"}])
DIALOGUE_A, DIALOGUE_B = [USER, ANSWER], [USER, {**ANSWER, "content": "b"}]
BOTH = {"chosen": "a", "rejected": "b"}
WMT = {
    **{"lp": "en-de_DE", "domain": "news", "document_id": "b.2", "segment_id": 12},
    **{"is_bad_source": False, "source": "Siso's depictions of land, water center new gallery"},
    **{"target": "Sisos Bilder von Land und Wasser", "original_target": "Sisos Bilder"},
}
SPOKEN = {"speaker": [0, 1], "utterance": ["q", "a"]}
TRANSLATED = {"role": "assistant", "content": WMT["target"]}
ULTRA = {"instruction": "q", "completions": [{"response": "a"}, {"response": "b"}]}
SAFE = {"prompt": "q", "response_0": "a", "response_1": "b", "safer_response_id": 0}
ARENA = {"prompt": '["q"]', "response_a": '["a"]', "response_b": '["b"]', "winner_model_a": 1}
STEER = {"context": [USER], "response1": "a", "response2": "b", "overall_preference": -1}
WEBGPT = {"question": {"full_text": "q"}, "answer_0": "a", "answer_1": "b", "score_0": 1.0}
WEBGPT_2 = {"question": {"full_text": "q"}, "answer_0": "a"}
STEPS = {"prompt": "q", "initial_reason_steps": "r:", "chosen": "a", "rejected": "b"}
S1K = {"question": "q", "solution": "a", "metadata": "{}", "gemini_attempt": "x"}
OF_S1K = {**S1K, "instruction": "q", "output": "a"}
S1K |= {"gemini_thinking_trajectory": "g", "deepseek_thinking_trajectory": "t"}
DAPO = {"prompt": "q", "solution": "a", "source_prompt": [USER], "ability": "MATH"}
"""Fields of s1K-1.1 and of DAPO-Math-17k-Processed, after their cards."""
NEMO_GYM: dict[str, Any] = {  # a line of NVIDIA's NeMo-Gym
    "id": 0,
    "responses_create_params": {
        "input": [{"role": "system", "content": "s"}, USER],
        "tools": [{"type": "function", **FUNCTION}],
        "parallel_tool_calls": False,
    },
    "ground_truth": [{"name": "rain", "arguments": '{"where": "Rom"}'}],
}
COQA = {
    "name": "n.txt",  # which tools have too
    "source": "wikipedia",
    "story": "s",
    "questions": [{"input_text": "q", "turn_id": i} for i in (1, 2)],
    "answers": [{"input_text": "a", "span_text": "a b", "turn_id": i} for i in (1, 2)],
}
QUAC = {
    "dialogue_id": "C_1",
    "wikipedia_page_title": "Malayali",
    "background": "They are an ethnic group.",
    "section_title": "Language",
    "context": "They speak one language. CANNOTANSWER",
    "turn_ids": ["C_1_q#0", "C_1_q#1"],
    "questions": ["q", "q"],
    "followups": [2, 1],
    "yesnos": [2, 2],
    "answers": {"texts": [["a", "b"], ["a"]], "answer_starts": [[0, 0], [3]]},
    "orig_answers": {"texts": ["a", "a"], "answer_starts": [0, 3]},
}
JIRA = {
    **{"Summary": "Login fails", "Issue key": "WEB-1", "Issue id": "10001", "Issue Type": "Bug"},
    **{"Status": "Done", "Priority": "High", "Assignee": "bob", "Created": "01/Feb/24 9:12 AM"},
    **{"Description": "It says *NullPointer*", "Custom field (Story Points)": "3.0"},
}
ON_JIRA = {"role": "user", "content": "Login fails\n\nIt says *NullPointer*"}
COMMENTS = {
    "Comment": "02/Feb/24 1:00 PM;bob;Fixed in 1.2, please test",
    "Comment 2": "03/Feb/24 2:00 PM;ann;Works, thanks",
}
ON_PASSAGES = {"role": "user", "content": f"{QUAC['background']}\n{QUAC['context']}\n\nq"}
FOLLOWED = [
    (
        QUAC,
        r"; write `questions\[\]` as turns of the user and `orig_answers\.texts\[\]` as those of "
        "the assistant, one after the other, as `messages`, with `background` and `context` at the "
        "beginning of the first question, or name",
        {**QUAC, "messages": [ON_PASSAGES, ANSWER, USER, ANSWER]},
        [theirs([ON_PASSAGES, ANSWER, USER, ANSWER])],
    ),
    (
        {**JIRA, **COMMENTS},
        "; write `Summary` and `Description` as `instruction` and the text of one of `Comment` and "
        "`Comment 2`, without its date and author, as `output`, or name",
        {**JIRA, **COMMENTS, "instruction": ON_JIRA["content"], "output": "Fixed in 1.2"},
        [theirs([ON_JIRA, {"role": "assistant", "content": "Fixed in 1.2"}])],
    ),
    (
        {"Summary": "Login fails", "Issue key": "WEB-1", "Comment": COMMENTS["Comment"]},
        "; write `Summary` as `instruction` and the text of `Comment`, without its date and author",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    *(
        (  # NQ-open
            {"question": "q", "answer": answers},
            "; write `question` as `instruction` and one text of `answer` as `output`, or let",
            {"instruction": "q", "output": "a"},
            [CHAT],
        )
        for answers in (["a"], ["a", "b"])
    ),
    (  # FLORES-200
        {"id": 1, "sentence_eng_Latn": "We say it.", "sentence_deu_Latn": "Wir sagen es."},
        "`sentence_eng_Latn` and `sentence_deu_Latn` seem to be one text in several languages; "
        "write what is asked, with one of them, as `instruction` and another as `output`, leave",
        {"id": 1, "instruction": "q", "output": "a"},
        [CHAT],
    ),
    (  # OpenAI's
        {"messages": [USER, {"role": "assistant", "content": None, "refusal": "a"}]},
        r"messages\[1\]\.content is missing .*; give text in `content`, that of `refusal`$",
        {"messages": [USER, {**ANSWER, "refusal": "a"}]},
        [CHAT],
    ),
    (
        {"notice": "we close soon", "article_background": "they open at nine"},
        "; none is near: if `article_background` is what is asked and `notice` the answer, rename",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"notice": "we close soon", "context": "they open at nine", "memo": "all of it"},
        "; none is near: write what is asked as `instruction` and what is learned, one of `notice` "
        "and `memo`, as `output`, leave",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (ULTRA, "write a good one as `output`, or", {**ULTRA, "output": "a"}, [CHAT]),
    (ULTRA, "better one as `chosen`, the other as `rejected`, or name", {**ULTRA, **BOTH}, 0),
    (
        {"prompt": "q", "answers": ["a", "b"]},
        r"write a good one as `completion` \(joined to `prompt` without a separator\), or of two",
        {"prompt": "q", "answers": ["a", "b"], "completion": "a"},
        [PLAIN],
    ),
    (
        {"question": "q", "answers": ["a", "b"]},
        "write a good one as `output` and `question` as `instruction`, or",
        {"instruction": "q", "answers": ["a", "b"], "output": "a"},
        [CHAT],
    ),
    (
        {"question": "q", "answers": ["a", "b"]},
        "better one as `chosen`, the other as `rejected`, or name",
        {"question": "q", "answers": ["a", "b"], **BOTH},
        0,
    ),
    (
        {"problem": "q", "generations": ["a", "b"]},
        "better one as `chosen`, the other as `rejected`, and `problem` as `prompt`",
        {"prompt": "q", "generations": ["a", "b"], **BOTH},
        1,
    ),
    (
        {"generations": ["a", "b"]},
        "write a good one as `output` and the question as `instruction`",
        {"generations": ["a", "b"], "output": "a", "instruction": "q"},
        [CHAT],
    ),
    (
        SAFE,
        "names, as `chosen`, the other as `rejected`.*; leave ties out, or name",
        {**SAFE, **BOTH},
        1,
    ),
    (
        {"prompt": "q", "response_0": "a", "response_1": "b", "label": 1},
        "the one that `label` names, as `chosen`",
        {"prompt": "q", **BOTH, "label": 1},
        1,
    ),
    (
        ARENA,
        "that `winner_model_a` names, as `chosen`, the other as `rejected`.*; leave ties out, or",
        {**ARENA, "chosen": '["a"]', "rejected": '["b"]'},
        0,
    ),
    (
        STEER,
        "as `chosen`, the other as `rejected`, and `context` as `prompt`",
        {"prompt": [USER], **BOTH, "overall_preference": -1},
        0,
    ),
    (
        WEBGPT,
        "the other as `rejected`, and the text of `question` as `prompt`",
        {**WEBGPT_2, "prompt": "q", **BOTH},
        1,
    ),
    (
        {"query": "q", "response_a": "a", "response_b": "b"},
        "the other as `rejected`, and `query` as `prompt`",
        {"prompt": "q", **BOTH},
        1,
    ),
    (
        {"conversation_a": DIALOGUE_A, "conversation_b": DIALOGUE_B, "winner": "model_a"},
        "as `chosen`, the other as `rejected`.*; leave ties and `both_bad` out, or name",
        {"chosen": DIALOGUE_A, "rejected": DIALOGUE_B, "winner": "model_a"},
        0,
    ),
    (
        {"prompt": "q", "response": "a", "helpfulness": 3},
        "write `response` as `completion` for plain text",
        {"prompt": "q", "completion": "a", "helpfulness": 3},
        [PLAIN],
    ),
    (
        {"prompt": "q", "response": "a"},
        "or write both as `instruction` and `output` for a chat",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"prompt": [USER], "response": "a"},
        "; write `response` as `completion`, or name",
        {"prompt": [USER], "completion": "a"},
        [CHAT],
    ),
    (
        {"question": "q", "answer": "a", "cot": "t", "passage": "p"},
        "what is asked as `instruction` and what is learned as `output`, and leave the others out",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"question": "q", "answer": "a", "response": "b"},
        "leave one of them out",
        {"question": "q", "answer": "a"},
        [CHAT],
    ),
    (
        {"instruction": "q", "completion": "a"},
        "write `completion` as `output`",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"problem": "q", "solution": "a"},
        "write `problem` as `instruction` and `solution` as `output`, or let .*" + _OF_RL,
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"problem": "q", "solution": "a", "answer": "3"},
        "`problem` as `instruction` and one of `solution` and `answer` as `output`, .*" + _OF_RL,
        {"instruction": "q", "output": "a", "answer": "3"},
        [CHAT],
    ),
    (
        {"prompt": "q"},
        r"write what is to be learned as `completion` beside `prompt` for plain text \(joined to",
        {"prompt": "q", "completion": "a"},
        [PLAIN],
    ),
    (
        {"prompt": "q", "code": "def f(): pass", "test_list": ["assert f"]},  # MBPP
        r"; write `code` as `completion` for plain text \(joined to `prompt` without a separator\)",
        {"prompt": "q", "completion": "a", "test_list": ["assert f"]},
        [PLAIN],
    ),
    (
        {"prompt": "q", "code": "def f(): pass", "test_list": ["assert f"]},
        r"\), or write both as `instruction` and `output` for a chat, or .*" + _OF_RL,
        {"instruction": "q", "output": "a", "test_list": ["assert f"]},
        [CHAT],
    ),
    (
        {"prompt": "q", "completions": ["a", "b"], "labels": [True, False]},  # Math-Shepherd
        r"as one text in `completion` \(joined to `prompt` without a separator\), or write both as",
        {"prompt": "q", "completion": "a"},
        [PLAIN],
    ),
    (
        {"question": "q", "id": 3},
        "write `question` as `instruction` and what is to be learned as `output`",
        {"instruction": "q", "output": "a", "id": 3},
        [CHAT],
    ),
    (
        {"trajectory": [{"action": "ls"}]},
        "write its turns .* as `messages`",
        {"trajectory": [{"action": "ls"}], "messages": DIALOGUE_A},
        [CHAT],
    ),
    (
        {"messages": DIALOGUE_A, "reasoning": "t", "answer": "b"},
        "leave them, or that turn, out",
        {"messages": DIALOGUE_A},
        [CHAT],
    ),
    (
        {"messages": DIALOGUE_B, "reasoning": "t", "answer": "a"},
        "leave them, or that turn, out",
        {"messages": [USER], "reasoning": "t", "answer": "a"},
        [theirs([USER, {**ANSWER, "reasoning_content": "t"}])],
    ),
    (STEPS, "write it at the end of `prompt`", {**STEPS, "prompt": "qr:"}, ["qr:a", "qr:b"]),
    (
        {"question": "q", "choices": ["red", "blue"], "answer": 1},
        r"`answer` seems to be an index \(.*\) into `choices`; write `question` with `choices` as "
        "`instruction` and the text of the option that it names as `output`, or .*" + _OF_RL,
        {"instruction": "q red blue", "choices": ["red", "blue"], "output": "blue"},
        [theirs([{"role": "user", "content": "q red blue"}, {**ANSWER, "content": "blue"}])],
    ),
    (
        {"question": "q", "context": "c", "answers": {"text": ["a"], "answer_start": [0]}},
        "write `question` with `context` as `instruction` and what is to be learned as `output`",
        {"instruction": "q c", "context": "c", "output": "a"},
        [theirs([{"role": "user", "content": "q c"}, ANSWER])],
    ),
    (
        {"Question": "q", "Complex_CoT": "t", "Response": "a"},
        "or write both as `messages` with `Complex_CoT` as `reasoning_content` of the answer",
        {"messages": [USER, {**ANSWER, "reasoning_content": "t"}], "Complex_CoT": "t"},
        [theirs([USER, {**ANSWER, "reasoning_content": "t"}])],
    ),
    (
        {"input": "q", "reasoning_content": "t", "content": "a", "score": 9},
        "write the question and the answer as `messages`, and the thought as `reasoning_content`",
        {"messages": [USER, {**ANSWER, "reasoning_content": "t"}], "reasoning_content": "t"},
        [theirs([USER, {**ANSWER, "reasoning_content": "t"}])],
    ),
    (
        S1K,
        "write `question` as `instruction` and one of `gemini_attempt` and `solution` as "
        "`output`, without",
        OF_S1K,
        [CHAT],
    ),
    (
        S1K,
        "without `gemini_thinking_trajectory` and `deepseek_thinking_trajectory`, or write both as "
        "`messages` with one of .* as `reasoning_content` of the answer, and leave the others out",
        {
            **{"question": "q", "solution": "a", "deepseek_thinking_trajectory": "t"},
            "messages": [USER, {**ANSWER, "reasoning_content": "t"}],
        },
        [theirs([USER, {**ANSWER, "reasoning_content": "t"}])],
    ),
    (
        {"prompt": "q", "response": "a", "reasoning": "t"},
        "`instruction` and `output` for a chat, without `reasoning`, or write both as `messages`",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"input": "q", "output": "a", "solution": "s", "difficulty": "HARD"},  # OpenCodeReasoning
        "; write `input` as `instruction`, or name",
        {"instruction": "q", "output": "a", "solution": "s", "difficulty": "HARD"},
        [CHAT],
    ),
    (DAPO, "; write `solution` as `completion` for plain", {**DAPO, "completion": "a"}, [PLAIN]),
    (
        DAPO,
        "or write both as `instruction` and `output` for a chat, or .*" + _OF_RL,
        {**DAPO, "instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"definition": "d", "inputs": "q", "targets": "a"},
        "what is asked as `instruction` and what is learned as `output`, and leave the others out",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"inputs": [3, 1], "inputs_pretokenized": "q", "targets": [4, 1], "x": 1},
        "write `inputs_pretokenized` as `instruction` and what is to be learned as `output`, or",
        {"instruction": "q", "output": "a", "inputs": [3, 1], "targets": [4, 1]},
        [CHAT],
    ),
    (
        {"prompt": {"text": "q", "role": "prompter", "replies": [{"text": "a", "replies": []}]}},
        "`prompt` is a tree of messages; write each path from its root to a leaf as `messages`",
        {"messages": DIALOGUE_A},
        [CHAT],
    ),
    (
        {"problem": "q", "solution": "42", "reannotated_assistant_content": "<think>t</think>a"},
        "`problem` as `instruction` and one of `reannotated_assistant_content` and `solution` as",
        {"problem": "q", "solution": "42", "instruction": "q", "output": "<think>t</think>a"},
        [theirs([USER, {**ANSWER, "content": "<think>t</think>a"}])],
    ),
    (
        {"user_prompt": "q", "model_response": "a", "model_name": "m", "if_chosen": True},
        "leave out .* `if_chosen` is false, and write what is asked, perhaps `user_prompt`, as "
        "`instruction` and `model_response` as `output`",
        {"instruction": "q", "output": "a", "model_name": "m", "if_chosen": True},
        [CHAT],
    ),
    (
        {"translation": {"de": "q", "en": "a"}},
        "`translation` has a text for each language; write what is asked, with one of them, as `i",
        {"translation": {"de": "q", "en": "a"}, "instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"target": 98, "nums": [44, 19, 35]},
        "it has no question in words; write one as `prompt`, and let a policy answer it for a rew",
        {"instruction": "q", "output": "a", "target": 98, "nums": [44, 19, 35]},
        [CHAT],
    ),
    (
        {"id": "1", "dialogue": "q", "summary": "a"},
        "write what is asked, perhaps `dialogue`, as `instruction` and `summary` as `output`",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"Context": "q", "Response": "a"},
        "write what is asked, perhaps `Context`, as `instruction` and `Response` as `output`",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"prompt": "q", "response": "a", "adversarial": True, "response_harm_label": "unharmful"},
        "leave out the records whose `response_harm_label` says that the answer is a bad one, and "
        "write `response` as",
        {"prompt": "q", "completion": "a", "adversarial": True},
        [PLAIN],
    ),
    (
        {"chat": {"turn_1": {"Human": "q", "MOSS": "a"}, "turn_2": {"Human": "r", "MOSS": "b"}}},
        "`chat` seems to be a dialogue; write its texts as `messages`, each with its role",
        {"messages": DIALOGUE_A},
        [CHAT],
    ),
    (
        {"conversation": [{"message": "q", "is_human": True}, {"message": "a"}]},
        "`conversation` seems to be a dialogue; write its texts as `messages`, each with its role",
        {"messages": DIALOGUE_A},
        [CHAT],
    ),
    (
        {"chat": {"turn_1": {"Human": "q", "MOSS": "a"}}},
        "`chat` seems to be a dialogue; write its texts as `messages`, each with its role",
        {"messages": DIALOGUE_A},
        [CHAT],
    ),
    (
        {"contents": [{"role": "user", "parts": [{"text": "q"}]}]},
        "`contents` seems to be a question; write its turns as `messages`, .*, and after them the",
        {"messages": [USER, {"role": "model", "content": [{"text": "a"}]}]},
        [CHAT],
    ),
    (
        {"dialog": ["q", "a"], "emotion": [0, 0]},
        "`dialog` seems to be a dialogue; write its texts as `messages`, each with its role",
        {"messages": DIALOGUE_A, "dialog": ["q", "a"], "emotion": [0, 0]},
        [CHAT],
    ),
    (
        NEMO_GYM,
        "write `responses_create_params.input` and after it the answer, perhaps the calls in "
        "`ground_truth` as its `tool_calls`, as `messages` and `responses_create_params.tools` as "
        f"`tools`, or let a policy answer it .*{_OF_RL}",
        {
            "messages": [
                *NEMO_GYM["responses_create_params"]["input"],
                {"role": "assistant", "tool_calls": NEMO_GYM["ground_truth"]},
            ],
            "tools": NEMO_GYM["responses_create_params"]["tools"],
        },
        [
            theirs(
                [
                    {"role": "system", "content": "s"},
                    USER,
                    {"role": "assistant", "tool_calls": [call(where="Rom")]},
                ],
                TOOLS[:1],
            )
        ],
    ),
    (
        {"custom_id": "1", "body": {"model": "m", "messages": [USER]}},
        "write `body.messages` and after it the answer, as `messages` and `body.tools` as `tools` "
        "where a record has them, or let a policy answer it",
        {"custom_id": "1", "messages": DIALOGUE_A},
        [CHAT],
    ),
    (
        USER,
        "one turn of a dialogue; write the turns of each dialogue as",
        {"messages": DIALOGUE_A},
        [CHAT],
    ),
    (
        {"question": {"text": "q"}, "answer": "a"},
        "; `question` is an object; write its text, `text`, as `instruction` and `answer` as `out",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"prompt": "q", "accepted": "a", "rejected": "b"},
        "; write `accepted` as `chosen`; answers are joined to `prompt` as plain .*, or name",
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        1,
    ),
    (
        {"context": [USER], "good_edited_response": "a", "bad_edited_response": "b"},
        "`good_edited_response` as `chosen` and `bad_edited_response` as `rejected`, and `context`",
        {"prompt": [USER], **BOTH},
        0,
    ),
    (
        {"info": {"post": "q"}, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 0},
        r"several answers in `summaries\[\].text`; .* as `rejected`, and what is asked as `prompt`",
        {"prompt": "q", **BOTH, "choice": 0},
        1,
    ),
    (
        {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 2},
        "give one of these",
        {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 1},
        0,
    ),
    (
        {"conversation": [{"input": "q"}]},
        "give both, or write the turns as `messages`",
        {"conversation": [{"input": "q"}], "messages": DIALOGUE_A},
        [CHAT],
    ),
    (  # Natural Instructions
        {
            **{"Source": ["squad"], "Definition": ["q"], "Input_language": ["English"]},
            "Positive Examples": [{"input": "r", "output": "b", "explanation": "c"}],
            "Negative Examples": [{"input": "s", "output": "b", "explanation": "c"}],
            "Instances": [{"id": "1", "input": "", "output": ["a", "b"]}],
        },
        "`Instances` holds records with `input` and `output`; .*, with the `Definition` of the "
        "record as `instruction`, `input` as `input` and one text of `output` as `output`",
        {"instruction": "q", "input": "", "output": "a"},
        [CHAT],
    ),
    (  # self-instruct's seed_tasks.jsonl
        {"id": "1", "instruction": "q", "instances": [{"input": "", "output": "a"}]},
        "`instances` holds records with `input` and `output`; write each of them as a line, with "
        "the `instruction` of the record as `instruction`, `input` as `input` and `output` as",
        {"id": "1", "instruction": "q", "input": "", "output": "a"},
        [CHAT],
    ),
    (
        {"version": 2, "data": [{"question": "q", "answer": "a"}]},
        "`data` holds records .* as a line, with `question` as `instruction` and `answer` as `out",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"rounds": [{"instruction": "q", "output": "a"}]},
        "`rounds` .*; write each of them as a line, or, if each follows .* turns of `messages`",
        {"messages": DIALOGUE_A},
        [CHAT],
    ),
    (
        {"input": "q", "output": ["a", "b"]},
        "write one of them as `output` and `input` as `instruction`, or, if one is better, the",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"instruction": "q", "input": "", "output": ["a", "b"]},
        "'output' is not text: .*; write one of them there",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (  # natural_reasoning
        {"question": "q", "responses": [{"response_model": "m", "response": "a"}]},
        r"`question` as `instruction` and `responses\[\].response` as `output`",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (  # HelpSteer3
        {"context": [USER], "response1": "a", "response2": "b", "overall_preference": -2},
        "`rejected`, and `context` as `prompt`; leave ties out",
        {"prompt": [USER], **BOTH, "overall_preference": -2},
        0,
    ),
    (  # HelpSteer3's edits
        {"context": [USER], "original_response": "b", "edited_response": "a"},
        "write `context` as `prompt` and one of .* and `edited_response` as `completion`",
        {"prompt": [USER], "completion": "a"},
        [CHAT],
    ),
    (  # SQuAD's file
        {
            "version": "1.1",
            "data": [
                {
                    "title": "t",
                    "paragraphs": [
                        {
                            "context": "c",
                            "qas": [
                                {
                                    "id": "1",
                                    "question": "q",
                                    "answers": [{"text": "a", "answer_start": 0}],
                                }
                            ],
                        }
                    ],
                }
            ],
        },
        r"`data\[\]\.paragraphs\[\]\.qas` holds records with `question` and `answers\[\]\.text`; "
        r"write each of them as a line, with the `context` of `data\[\]\.paragraphs\[\]` as "
        r"`instruction`, `question` as `input` and one text of `answers\[\]\.text` as `output`, or",
        {"instruction": "c", "input": "q", "output": "a"},
        [theirs([{"role": "user", "content": "c\n\nq"}, ANSWER])],
    ),
    (  # CoQA's file
        {"version": "1.0", "data": [COQA]},
        "`data` seems to hold the records; write each of them as a line; of each, `questions` and "
        "`answers` are as many, as the turns of a dialogue; write "
        r"`questions\[\]\.input_text` as turns of the user and `answers\[\]\.input_text` as those "
        "of the assistant, one after the other, as `messages`, with `story` at the beginning of "
        "the first question",
        {"messages": [{"role": "user", "content": "s\nq"}, ANSWER, USER, ANSWER]},
        [theirs([{"role": "user", "content": "s\nq"}, ANSWER, USER, ANSWER])],
    ),
    (  # CoQA's table
        {
            "story": "s",
            "questions": ["q", "q"],
            "answers": {"input_text": ["a", "a"], "answer_start": [0, 1]},
        },
        r"write `questions\[\]` as turns of the user and `answers\.input_text\[\]` as those of",
        {"messages": [{"role": "user", "content": "s\nq"}, ANSWER, USER, ANSWER]},
        [theirs([{"role": "user", "content": "s\nq"}, ANSWER, USER, ANSWER])],
    ),
    (  # PubMedQA's ori_pqal.json
        {
            "21645374": {
                "QUESTION": "q",
                "CONTEXTS": ["c"],
                "final_decision": "yes",
                "LONG_ANSWER": "a",
            }
        },
        "its fields, such as `21645374`, seem to be the records; write the value of each as a line"
        "; of each, write `QUESTION` with `CONTEXTS` as `instruction` and `LONG_ANSWER` as `out",
        {"instruction": "c\n\nq", "output": "a"},
        [theirs([{"role": "user", "content": "c\n\nq"}, ANSWER])],
    ),
    (
        {"rows": [{"messages": [USER, ANSWER]}], "version": 2},
        "`rows` seems to hold the records; write each of them as a line, or name",
        {"messages": [USER, ANSWER]},
        [CHAT],
    ),
    (  # the_cauldron's records without a picture
        {"images": [], "texts": [{"user": "q", "assistant": "a", "source": "x"}]},
        "`texts` holds records with `user` and `assistant`; write each of them as a line, with "
        "`user` as `instruction` and `assistant` as `output`, or",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (  # MultiWOZ's turns, an object of columns
        {"services": ["hotel"], "turns": {"turn_id": ["0", "1"], **SPOKEN, "frames": [[], []]}},
        "`turns` seems to be a dialogue; write its texts as `messages`, each with its role, user "
        "or assistant in place of the numbers of `speaker`, or",
        {"services": ["hotel"], "messages": DIALOGUE_A},
        [CHAT],
    ),
    (
        {"dialogue_id": "1", "log": SPOKEN},
        "if `log` is a dialogue, write its turns as `messages`, each with `role` and `content`",
        {"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}},
        [CHAT],
    ),
    (
        {"messages": {"role": [0, 1], "content": ["q", "a"]}},
        "messages.0..role is .*: {'role': 0, .*}, with user or assistant in place of the number",
        {"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}},
        [CHAT],
    ),
    (
        {"messages": SPOKEN},
        '`messages` is not a list of turns: .*; give a list of turns such as {"role": "user", "con',
        {"messages": DIALOGUE_A},
        [CHAT],
    ),
    (  # Indic-Align's languages
        {"id": "3f", "eng_Latn": [["q", "a"]], "hin_Deva": [["प्र", "उ"], ["क", "ख"]]},
        "`eng_Latn` and `hin_Deva` seem to be dialogues of questions, each in a list with its "
        "answer; write each as a record of its own, its texts as `messages`, of user and assistant",
        {"id": "3f", "messages": DIALOGUE_A},
        [CHAT],
    ),
    (
        {"rounds": [["q", "a"]]},
        "`rounds` seems to be a dialogue of questions, .*; write its texts as `messages`, of user",
        {"messages": DIALOGUE_A},
        [CHAT],
    ),
    (  # Huatuo's questions, of which those of an inner list ask the same
        {"questions": [["q", "Q"]], "answers": ["a"]},
        "`questions` and `answers` are lists; write a record for each answer, with it as `output` "
        "and a text of `questions` that it answers as `instruction`",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"questions": ["q"], "answers": ["a"]},
        "`questions` and `answers` are lists; write a record for each answer, with it as `output`",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (  # CodeReviewer's
        {"oldf": "int x = 0;", "patch": "+int x{0};", "msg": "Why braces here?", "id": 1, "y": 1},
        "none is near: write `patch` with `oldf` as `instruction` and `msg` as `output`, leave",
        {"instruction": "int x = 0;\n+int x{0};", "output": "a", "id": 1, "y": 1},
        [theirs([{**USER, "content": "int x = 0;\n+int x{0};"}, ANSWER])],
    ),
    (  # questions and answers of a helpdesk, in German
        {"Frage": "Wie kündige ich?", "Antwort": "Per E-Mail.", "Kategorie": "Vertrag"},
        "none is near: if `Frage` is what is asked and `Antwort` the answer, rename them `instruct",
        {"instruction": "q", "output": "a", "Kategorie": "Vertrag"},
        [CHAT],
    ),
    (
        {"质问": "如何取消我的合同", "回答": "请写电子邮件。"},
        "none is near: if `质问` is what is asked and `回答` the answer, rename them",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"one": "the first text", "two": "the second text", "three": "the third text"},
        "none is near: write what is asked as `instruction` and what is learned, one of `one` and",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (  # tickets, as helpdesks export them
        {"Ticket ID": 1, "Subject": "Login", "Customer message": "q", "Agent reply": "a"},
        "; write `Subject` and what is asked, perhaps `Customer message`, as `instruction` and "
        "`Agent reply` as `output`, or",
        {"Ticket ID": 1, "instruction": "Login\n\nq", "output": "a"},
        [theirs([{**USER, "content": "Login\n\nq"}, ANSWER])],
    ),
    (
        {"Ticket ID": 1, "Subject": "Login", "Question": "q", "Reply": "a"},
        "; write `Question` with `Subject` as `instruction` and `Reply` as `output`, or",
        {"Ticket ID": 1, "instruction": "Login\n\nq", "output": "a"},
        [theirs([{**USER, "content": "Login\n\nq"}, ANSWER])],
    ),
    (  # a subject that is taught, and none of a ticket
        {"subject": "law", "problem": "q", "reply": "a"},
        "; write `problem` as `instruction` and `reply` as `output`, or",
        {"subject": "law", "instruction": "q", "output": "a"},
        [CHAT],
    ),
    (  # WMT24++'s columns. Its card asks to leave out the bad sources.
        WMT,
        "leave out the records whose `is_bad_source` is true, and write what is asked with "
        "`source` as `instruction` and `target` as `output`, or",
        {**WMT, "instruction": f"Translate: {WMT['source']}", "output": WMT["target"]},
        [theirs([{**USER, "content": f"Translate: {WMT['source']}"}, TRANSLATED])],
    ),
    (  # DISC-Law's triplets, to follow in both ways
        {"id": "jud-3", "reference": ["Art. 1: R."], "input": "q", "output": "a"},
        "write `input` as `instruction`, and leave `reference` out unless it is a part of the q",
        {"instruction": "Art. 1: R.\nq", "output": "a", "reference": ["Art. 1: R."]},
        [theirs([{**USER, "content": "Art. 1: R.\nq"}, ANSWER])],
    ),
    (
        {"context": "c", "input": "q", "output": "a"},
        "write `input` as `instruction`, and leave `context` out unless it is a part of the quest",
        {"instruction": "q", "output": "a"},
        [CHAT],
    ),
    (
        {"query": "q", "tools": "[]", "answers": "[a"},
        "write it with a JSON library",
        {"query": "q", "tools": "[]", "answers": json.dumps([call()["function"]])},
        [theirs([USER, {"role": "assistant", "tool_calls": [call()]}])],
    ),
]


@pytest.mark.parametrize(("record", "says", "followed", "right"), FOLLOWED, ids=str)
def test_what_a_line_advises_is_learned_as_it_says(
    record: dict, says: str, followed: dict, right: list | int
):
    """``right`` 0 stands for a pair of chats, 1 for a pair of plain texts."""
    with pytest.raises(BadLineError, match=says):
        documents(record)
    is_pair = isinstance(right, int) or len(right) == 2
    if isinstance(right, int):
        right = [PLAIN, "qb"] if right else [CHAT, OTHER_CHAT]
    assert [document.text for document in documents(followed, pairs=is_pair)] == right
    assert documents(followed)[0].text == right[0]


@pytest.mark.parametrize(
    "record",
    [
        DIALOGUE_A,
        {"traj": DIALOGUE_A, "task_id": 3},
        {"trajectory": [{"action": "ls"}], "history": DIALOGUE_A},  # SWE-agent's own files
        {"completion": DIALOGUE_A},
        {"query": DIALOGUE_A},
        {"query": [USER], "answer": "a"},
        {"input": [USER], "response": "a"},
        {"vanilla": "q", "adversarial": "", "completion": "a", "data_type": "vanilla_benign"},
        {"vanilla": "r", "adversarial": "q", "completion": "a", "data_type": "adversarial_harmful"},
    ],
    ids=str,
)
def test_the_only_dialogue_of_a_record_is_read_whatever_its_name(record: dict | list):
    assert [document.text for document in documents(record)] == [CHAT]


@pytest.mark.parametrize(
    "record",
    [
        {"first": DIALOGUE_A, "second": DIALOGUE_B},
        {"demonstrations": DIALOGUE_A, "problem": "What is 3 + 4?", "solution": "7"},
        {"traj": DIALOGUE_A, "resolved": False},
        {"traj": DIALOGUE_A, "cot": "a thought of its own"},
        {"traj": [*DIALOGUE_A, USER], "response": "b"},
    ],
    ids=str,
)
def test_such_a_dialogue_loses_nothing_beside_it(record: dict):
    with pytest.raises(BadLineError):
        documents(record)


def test_the_answers_within_a_prompt_are_not_learned():
    """Llama-Nemotron's ``input`` is the prompt, whatever turns it has."""
    asked = [USER, ANSWER, {"role": "user", "content": "r"}]
    (document,) = documents({"input": asked, "output": "b", "category": "chat"})
    last = {"role": "assistant", "content": "b"}
    assert document.text == theirs([*asked, last])
    assert [document.text[a:b] for a, b in document.loss_spans or ()] == ["b<|im_end|>"]


def test_an_answer_of_xlam_in_words_is_learned():
    """Synth-APIGen has such answers, where no tool suits the question."""
    record = {"query": "q", "tools": json.dumps([FUNCTION]), "answers": "There is no tool for it."}
    (document,) = documents(record)
    said = {"role": "assistant", "content": record["answers"]}
    assert document.text == theirs([USER, said], TOOLS[:1])


def test_a_tree_of_messages_becomes_pairs_where_pairs_are_learned():
    tree = {"prompt": {"text": "q", "role": "prompter", "replies": []}}
    with pytest.raises(BadLineError, match="from its root to a leaf as `messages`"):
        documents(tree)
    with pytest.raises(BadLineError, match=r"to a question as `messages`, .* as `chosen`"):
        documents(tree, pairs=True)


ALMA = {  # haoranxu/ALMA-R-Preference, with the fields of its card
    "translation": {
        **{"alma_de": "Der Ball ging.", "de": "Der Ball war da.", "gpt4_de": "Der Ball flog."},
        **{"alma_de_kiwi": 0.85, "alma_de_xcomet": 0.9, "gpt4_de_kiwi": 0.86, "ref_de_kiwi": 0.8},
        **{"en": "The ball went.", "language_pair": "en-de", "Delta": 0.0},
        "required_directions": "",
    }
}


def test_translations_become_pairs_where_pairs_are_learned():
    """The advice for next_token led to a record with one answer, which dpo refused."""
    says = (
        "; `translation` has several texts of one language, `alma_de` and `de` and `gpt4_de`; "
        "write what is asked, with `en`, as `prompt`, or as `question` for a chat, a better one of "
        "them, by `alma_de_kiwi` and `gpt4_de_kiwi` and `ref_de_kiwi`, as `chosen`, another as `rej"
    )
    texts = ALMA["translation"]
    answers = {"chosen": texts["gpt4_de"], "rejected": texts["alma_de"]}
    with pytest.raises(BadLineError, match=says):
        documents(ALMA, pairs=True)
    for name in ("prompt", "question"):
        assert len(documents({name: f"To German: {texts['en']}", **answers}, pairs=True)) == 2
    with pytest.raises(BadLineError, match=r"no second translation; .* as `chosen`, another as"):
        documents({"translation": {"en": "The ball went.", "de": "Der Ball ging."}}, pairs=True)
    reader = RecordReader(ChatTemplate(CHATML, {}), reads_pairs=True, reads_labels=True)
    says = "with `en`, as `instruction` and one of them as `output`, beside a `label` that is true"
    with pytest.raises(BadLineError, match=says):
        reader.documents(ALMA)
    assert len(reader.documents({"instruction": "q", "output": "a", "label": False})) == 1


def test_a_run_becomes_pairs_where_pairs_are_learned():
    with pytest.raises(
        BadLineError, match=r"a run without roles; .* as `prompt`, the better one of"
    ):
        documents({"trajectory": [{"action": "ls", "observation": "x"}]}, pairs=True)


def test_a_dialogue_under_another_name_is_said_once(caplog: pytest.LogCaptureFixture):
    SEEN.discard("the dialogue traj")
    for _ in range(2):
        documents({"traj": DIALOGUE_A})
    assert caplog.text.count("`traj` of records is read as `messages`") == 1


@pytest.mark.parametrize("label", [True, False])
def test_a_completion_that_is_a_whole_dialogue_has_its_label(label: bool):
    """KTO-mix has such completions, with and without the question as ``prompt``."""
    reader = RecordReader(ChatTemplate(CHATML, {}), reads_pairs=True, reads_labels=True)
    for asked in ({}, {"prompt": "q"}, {"prompt": [USER]}):
        (document,) = reader.documents({**asked, "completion": DIALOGUE_A, "label": label})
        assert (document.text, document.label) == (CHAT, label)
        assert [document.text[a:b] for a, b in document.loss_spans or ()] == ["a<|im_end|>"]


def test_a_verdict_becomes_the_label_that_kto_needs():
    """BeaverTails says ``is_safe``. To keep safe answers alone would leave kto no bad ones."""
    reader = RecordReader(ChatTemplate(CHATML, {}), reads_pairs=True, reads_labels=True)
    record = {"prompt": "q", "response": "a", "category": {"x": True}, "is_safe": False}
    says = "; write `label`, true or false by `is_safe`, and `response` as `completion` for plain"
    with pytest.raises(BadLineError, match=says):
        reader.documents(record)
    (document,) = reader.documents({**record, "completion": "a", "label": False})
    assert (document.text, document.label) == (PLAIN, False)


def test_a_single_answer_is_no_pair():
    for record in ({"question": "q", "answer": "#### 3"}, {"messages": [USER, ANSWER]}):
        with pytest.raises(BadLineError, match=r"one answer, which train\.objective next_token"):
            documents(record, pairs=True)
    labelled = ({"prompt": "q", "completion": "a"}, {"messages": [USER, ANSWER]})
    for record in labelled:
        for label in (True, False):
            with pytest.raises(
                BadLineError, match=r"one answer with a label, which train\.obj.* kto"
            ):
                documents({**record, "label": label}, pairs=True)
    pair = {"prompt": "q", "response_0": "a", "response_1": "b", "better_response_id": 0}
    with pytest.raises(
        BadLineError, match=r"that `better_response_id` names, as `chosen`.*; known"
    ):
        documents(pair, pairs=True)


def test_steps_before_the_answers_of_a_pair_are_not_lost():
    """In Math-Step-DPO the answers continue the steps. Without steps, the prompt has everything."""
    record = {"prompt": "q", "initial_reason_steps": "Step 1: r\nStep 2:", "chosen": " a"}
    record |= {"rejected": " b", "answer": "a"}
    says = r"`initial_reason_steps` stands between .*; write it at the end of `prompt`"
    with pytest.raises(BadLineError, match=says):
        documents(record, pairs=True)
    found = documents({**record, "initial_reason_steps": ""}, pairs=True)
    assert [document.text for document in found] == ["q a", "q b"]


@pytest.mark.parametrize(
    ("beside", "says"),
    [
        (
            {"answer": 4},
            "write `question` with `choices` as `instruction` and `answer` as a text, such as '4',",
        ),
        ({"answer": -1}, "and `answer` as a text, such as '-1', as `output`"),
        ({"answer": "b"}, "`choices` may be a part of the question"),
        ({"code": "en"}, "`question` has no answer of a known name beside it"),
    ],
    ids=str,
)
def test_other_values_are_no_index_and_no_program(beside: dict, says: str):
    with pytest.raises(BadLineError, match=says):
        documents({"question": "q", "choices": ["a", "b"], **beside})


def test_an_output_that_is_the_index_of_an_option_says_what_to_write():
    record = {"instruction": "q a b", "choices": ["a", "b"], "output": 1}
    says = r"if it is an index \(.*\) into `choices`, write the text of that option there"
    with pytest.raises(BadLineError, match=says):
        documents(record)
    (document,) = documents({**record, "output": "b"})
    assert document.text.endswith("b<|im_end|>")


def test_the_same_answer_twice_is_one():
    (document,) = documents({"instruction": "q", "output": "a", "response": "a"})
    assert document.text == theirs([USER, ANSWER])


def test_a_text_that_is_named_stays_one():
    (document,) = documents(glaive(glaive_chat(GLAIVE_CALL)), text_field="chat")
    assert document.text == glaive_chat(GLAIVE_CALL)


IMAGE = {"bytes": b"PNG", "path": None}


@pytest.mark.parametrize(
    ("record", "place"),
    [
        ({"images": [IMAGE], "texts": [{"user": "q", "assistant": "a"}]}, "`images`"),
        ({"images": [IMAGE], "texts": [{"user": "q", "assistant": "a"}] * 2}, "`images`"),
        ({"qa": [{"question": "q", "answer": "a", "image": IMAGE}]}, r"qa\[0\]\.image"),
        ({"image": IMAGE, "label": 3}, "`image`"),
    ],
    ids=str,
)
@pytest.mark.parametrize("pairs", [False, True])
def test_pictures_are_named_before_anything_else(record: dict, place: str, pairs: bool):
    """the_cauldron's and FineVision's questions are about the pictures of their record."""
    with pytest.raises(BadLineError, match=f"^{place} is no text, and would be lost: .*; leave su"):
        documents(record, pairs)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"questions": ["q"], "answers": ["a", "b"]}, "several answers in `answers`"),
        (  # LLaMA-Factory's dataset_info.json
            {f"set {i}": {"file_name": "a.json", "formatting": "alpaca"} for i in range(3)},
            "none is near",
        ),
        (
            {"id": "1", "log": {"title": "t", "messages": [USER, ANSWER]}},
            "; write `log.messages` as `messages`, or name the field",
        ),
        ({"input": {"question": "q"}, "output": {"answer": "a"}}, "`input` is an object; write"),
        ({"entities": [{"word": "Paris"}], "id": "3"}, "if `entities` is a dialogue, write its"),
    ],
    ids=str,
)
def test_other_objects_are_no_file_and_no_dialogue(record: dict, says: str):
    with pytest.raises(BadLineError, match=says):
        documents(record)


def test_the_places_of_a_request_are_those_that_rl_names():
    """The same file leads to the same fields in ``moetrain data`` and ``moetrain rl``."""
    with pytest.raises(BadLineError) as error:
        documents(NEMO_GYM)
    advice = advice_for_prompt(NEMO_GYM)
    places = [f"`responses_create_params.{name}`" for name in ("input", "tools")]
    assert advice == f"; write {places[0]} as `messages` and {places[1]} as `tools`"
    assert all(place in str(error.value) for place in places)


# The columns of GPQA's CSV, of which its card says what each holds.
GPQA = {
    "Pre-Revision Question": "Two states?",
    "Question": "Two quantum states have lifetimes. Which difference can be resolved?",
    "Correct Answer": "10^-4 eV",
    "Incorrect Answer 1": "10^-11 eV",
    "Incorrect Answer 2": "10^-8 eV",
    "Incorrect Answer 3": "10^-9 eV",
    "Explanation": "By the uncertainty principle.",
    "Record ID": "rec06",
    "Subdomain": "Physics (general)",
}


def test_the_advice_for_gpqa_offers_the_right_answer_alone():
    says = (
        "write `Question` as `instruction` and `Correct Answer` as `output`, and leave "
        "`Pre-Revision Question` out unless it is a part of the question, or let a policy"
    )
    with pytest.raises(BadLineError, match=says) as refused:
        documents(GPQA)
    assert "Incorrect" not in str(refused.value).partition("write `Question`")[2]
    # The advice of the error is followed.
    names = {"Question": "instruction", "Correct Answer": "output"}
    line = {names.get(key, key): text for key, text in GPQA.items()}
    with pytest.raises(BadLineError, match="`Pre-Revision Question` may be a part"):
        documents(line)  # so the advice has to name it
    del line["Pre-Revision Question"]
    (document,) = documents(line)
    turns = [{**USER, "content": GPQA["Question"]}, {**ANSWER, "content": GPQA["Correct Answer"]}]
    assert document.text == theirs(turns)


@pytest.mark.parametrize(
    "name", ["wrong_answer", "false_answer", "negative response", "rejected_output", "distractor"]
)
def test_a_wrong_answer_is_not_offered(name: str):
    for text in ("b", "<think>c</think>b"):
        record = {"question": "Which?", "best_answer": "a", name: text}
        with pytest.raises(BadLineError, match="and `best_answer` as `output`"):
            documents(record)


# BoolQ's card: `answer` is a bool.
BOOLQ = {"question": "is it rain", "answer": True, "passage": "Water falls."}


@pytest.mark.parametrize(
    ("record", "says", "text"),
    [
        (
            BOOLQ,
            "write `question` with `passage` as `instruction` and `answer` as a text, such as "
            "'yes' or 'no', as `output`, or let a policy",
            "yes",
        ),
        ({"problem": "2 + 3?", "solution": 5}, "`solution` as a text, such as '5', as `outp", "5"),
        ({"prompt": "2 + 3?", "target": 0.5}, "`target` as a text, such as '0.5', as `comp", "0.5"),
        ({"instruction": "q", "answer": False}, "`answer` as a text, such as 'yes' or 'no'", "no"),
    ],
)
def test_an_answer_that_is_no_text_is_to_be_written_as_one(record: dict, says: str, text: str):
    with pytest.raises(BadLineError, match=says):
        documents(record)
    (document,) = documents({"instruction": "q", "output": text})  # as the line says
    assert document.text == theirs([USER, {**ANSWER, "content": text}])
    with pytest.raises(BadLineError, match=r"is not text: True; write a text .*'yes' or 'no'"):
        documents({"instruction": "q", "output": True})


@pytest.mark.parametrize(
    "check",
    [
        {"func_name": "validate_lowercase", "N": None, "quantifier": None},  # RLVR-IFeval's card
        [{"instruction_id": ["keywords:existence"], "kwargs": [{"keywords": ["nile"]}]}],
        {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]},
    ],
)
def test_what_a_program_checks_an_answer_by_is_no_answer(check: dict | list):
    for value in (check, json.dumps(check)):
        with pytest.raises(BadLineError, match="`ground_truth` says how a program") as refused:
            documents({"messages": [USER], "ground_truth": value})
        assert "last turn" not in str(refused.value)
        assert "moetrain rl" in str(refused.value)
        assert len(documents({"messages": [USER, ANSWER], "ground_truth": value})) == 1
    with pytest.raises(BadLineError, match="`ground_truth` seems to be its answer"):
        documents({"messages": [USER], "ground_truth": '{"name": "Ann"}'})


def test_a_passage_is_never_offered_as_the_answer():
    passages = {"background": "they are a people", "story": "they speak a language"}
    with pytest.raises(BadLineError, match="none is near: fill or rename its fields, leave the"):
        documents({**passages, "section_title": "of the language"})


def test_an_issue_without_a_comment_is_to_be_left_out():
    for record in (JIRA, {**JIRA, "Comment": None}):
        with pytest.raises(BadLineError, match=r"it is an issue without a comment, .*; leave such"):
            documents(record)
    # A summary that is no title of an issue is an answer.
    with pytest.raises(BadLineError, match="and `summary` as `output`"):
        documents({"description": "a long text of it all", "summary": "a text", "title": "t"})


SQL, SELECT = "CREATE TABLE t (id INT, name TEXT);", "SELECT COUNT(*) FROM t;"
MMLU_PRO = {"question_id": 0, "question": "q", "options": ["x", "a"], "answer": "B"}
OF_GEMINI = [
    {"role": "user", "parts": [{"text": "q"}]},
    {"role": "model", "parts": [{"text": "a"}]},
]


@pytest.mark.parametrize(
    ("record", "says", "followed", "right"),
    [
        (  # gretel's text-to-SQL
            {
                "sql_prompt": "How many?",
                "sql_context": SQL,
                "sql": SELECT,
                "sql_explanation": "It.",
            },
            "write what is asked, perhaps `sql_prompt` with `sql_context`, as `instruction` and "
            "`sql` as `output`",
            {"sql_context": SQL, "sql_explanation": "It.", "output": SELECT}
            | {"instruction": f"How many?\n\n{SQL}"},
            [{**USER, "content": f"How many?\n\n{SQL}"}, {**ANSWER, "content": SELECT}],
        ),
        (
            {**MMLU_PRO, "cot_content": "Let's think step by step."},
            "with `options` as `instruction` and the text of the option that it names as `output`, "
            "without `cot_content`, or write both as `messages` with `cot_content` as "
            "`reasoning_content` of the answer, or let",
            {"question_id": 0, "instruction": "q\nx\na", "output": "a", "options": ["x", "a"]},
            [{**USER, "content": "q\nx\na"}, ANSWER],
        ),
        (  # a ticket's Status says nothing of the answer
            {"Status": "solved", "Subject": "s", "Description": "d", "Agent Reply": "a"},
            r"text\); write `Subject` and what is asked, perhaps `Description`, as `instruction` "
            "and `Agent Reply` as `output`",
            {"Status": "solved", "instruction": "s\nd", "output": "a"},
            [{**USER, "content": "s\nd"}, ANSWER],
        ),
        (
            {"contents": OF_GEMINI, "systemInstruction": {"parts": [{"text": "S"}]}},
            r"messages\[0\] has its text in `parts`: .*; write the text of `parts` of each turn as "
            "`content`, and that of `systemInstruction` as `system`",
            {"contents": [USER, {"role": "model", "content": "a"}], "system": "S"},
            [{"role": "system", "content": "S"}, USER, ANSWER],
        ),
        (
            {"contents": OF_GEMINI},
            "as `content`, and that of `systemInstruction`, where a record has one, as `system`",
            {"contents": [USER, {"role": "model", "content": "a"}]},
            [USER, ANSWER],
        ),
    ],
    ids=["gretel", "MMLU-Pro", "Zendesk", "Gemini", "Gemini without a system"],
)
def test_the_first_advice_names_all_that_the_next_line_would(
    record: dict, says: str, followed: dict, right: list
):
    with pytest.raises(BadLineError, match=says):
        documents(record)
    assert [document.text for document in documents(followed)] == [theirs(right)]


def test_steps_behind_a_line_break_are_the_end_of_the_prompt():
    """Math-Step-DPO's."""
    steps = "Let's think step by step.\nStep 1:"
    record = {"prompt": "q", "initial_reason_steps": steps, "chosen": " a", "rejected": " b"}
    with pytest.raises(BadLineError, match="write it at the end of `prompt`, behind a line break"):
        documents(record, pairs=True)
    found = documents({**record, "prompt": f"q\n{steps}"}, pairs=True)
    assert [document.text for document in found] == [f"q\n{steps} a", f"q\n{steps} b"]


@pytest.mark.parametrize(
    ("beside", "says", "margin"),
    [
        ({"preference_strength": -2}, "the size of `preference_strength` without its sign as", 2),
        (
            {"score_1": 0.5, "score_2": -0.5},
            "the difference of `score_1` and `score_2` as `margin`, the better one's minus the oth",
            1.0,
        ),
    ],
)
def test_a_reward_model_is_told_of_the_margin(beside: dict, says: str, margin: float):
    """HelpSteer2's strength of a preference, and WebGPT's scores."""
    record = {"prompt": "q", "response_1": "a", "response_2": "b", **beside}
    ranked = RecordReader(
        ChatTemplate(CHATML, {}), form="preference", reads_pairs=True, reads_margins=True
    )
    with pytest.raises(BadLineError, match=says):
        ranked.documents(record)
    with pytest.raises(BadLineError, match="as `rejected`") as error:
        documents(record, pairs=True)
    assert "margin" not in str(error.value)
    followed = {"prompt": "q", "chosen": "a", "rejected": "b", **beside, "margin": margin}
    assert [document.margin for document in ranked.documents(followed)] == [margin, margin]


def test_how_a_record_was_used_describes_it():
    """OpenMathReasoning's."""
    about = {"used_in_training": "not in any", "pass_rate_72b_tir": "n/a for it"}
    record = {"instruction": "q", "output": "a", **about, "note": "A note."}
    reader = RecordReader(ChatTemplate(CHATML, {}))
    assert reader.unread(record, reader.documents(record)) == ["note"]


def test_a_score_whose_name_has_no_letter_of_latin_is_named():
    with pytest.raises(BadLineError, match="keep the records whose `\u8bc4\u5206` suffice"):
        documents({"prompt": "q", "response": "a", "\u8bc4\u5206": 3})
