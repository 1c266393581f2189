"""Answers that only point at an option.

The meanings of the answers are those of the cards: WinoGrande's ``answer`` 1 is ``option1``, PIQA's
``label`` 0 is ``sol1``, MMLU's ``answer`` and HellaSwag's ``label`` begin at 0, and ARC's
``answerKey`` is one of its labels.
"""

import json
import time

import pytest

from moetrain.data.chat import CHATML, ChatTemplate
from moetrain.data.messages import BadLineError
from moetrain.data.options import choices_of, pointer_in
from moetrain.data.records import RecordReader

ASKED = "Ian volunteered to eat Dennis's menudo because _ despised eating intestine."
WINOGRANDE = {"option1": "Ian", "option2": "Dennis"}
ARC = {"choices": {"text": ["water", "steam", "rock"], "label": ["1", "2", "3"]}}
HELLASWAG = {"endings": ["is up.", "sits.", "eats.", "runs."]}


def documents(record: dict) -> list:
    return RecordReader(ChatTemplate(CHATML, {})).documents(record)


@pytest.mark.parametrize(
    ("record", "answer", "by_begin", "text"),
    [
        (WINOGRANDE, "2", {1: "Dennis"}, ""),
        (WINOGRANDE, "1", {0: "Dennis", 1: "Ian"}, ""),
        (WINOGRANDE, "option2", {}, "Dennis"),
        ({"sol1": "cut", "sol2": "saw"}, 0, {0: "cut"}, ""),
        ({"opa": "x", "opb": "y", "opc": "z"}, "B", {}, "y"),
        ({"A": "x", "B": "y"}, "(B)", {}, "y"),
        (ARC, "2", {}, "steam"),
        ({"choices": {"A": "x", "B": "y"}}, "B", {}, "y"),
        (HELLASWAG, "3", {0: "runs.", 1: "eats."}, ""),
        (HELLASWAG, "0", {0: "is up."}, ""),
        ({"Options": "['x', 'y']"}, 1.0, {0: "y", 1: "x"}, ""),
        ({"options": '["x", "y"]'}, "2.0", {1: "y"}, ""),
    ],
    ids=str,
)
def test_pointer_in_finds_the_option(record: dict, answer: object, by_begin: dict, text: str):
    found = pointer_in(record, answer)
    assert found is not None
    assert found.by_begin == by_begin
    assert found.text == text
    assert [*found.fields] == choices_of(record)


@pytest.mark.parametrize(
    ("record", "answer"),
    [
        (WINOGRANDE, "3"),
        (WINOGRANDE, "Ian"),
        (WINOGRANDE, True),
        (WINOGRANDE, None),
        (WINOGRANDE, "C"),
        ({"option1": "Ian"}, "1"),
        ({"options": ["4", "2"]}, "2"),
        ({"options": [4, 2]}, 2),
        ({"options": {"temperature": 1}}, "1"),
        ({"options": "['x', 'y'"}, "1"),
        ({}, "1"),
    ],
    ids=str,
)
def test_pointer_in_takes_other_answers_as_they_are(record: dict, answer: object):
    assert pointer_in(record, answer) is None


LIST = {"options": ["Ian", "Dennis"]}


@pytest.mark.parametrize(
    ("form", "beside"),
    [
        *((form, WINOGRANDE) for form in ("alpaca", "completion", "question", "messages")),
        *((form, LIST) for form in ("alpaca", "completion", "messages")),
        ("alpaca", {"options": "['Ian', 'Dennis']"}),
    ],
    ids=str,
)
def test_an_answer_that_only_points_at_an_option_is_not_learned(form: str, beside: dict):
    """The names of the options stand in WinoGrande's sentence."""

    def record(answer: str, asked: str = ASKED) -> dict:
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        forms = {
            "alpaca": {"instruction": asked, "output": answer},
            "completion": {"prompt": asked, "completion": answer},
            "question": {"question": asked, "answer": answer},
            "messages": {"messages": turns},
        }
        return forms[form] | beside

    where = "`option1` and `option2`" if beside is WINOGRANDE else "`options`"
    says = rf"the answer '2' only points at an option of {where}, .*: as an index from 1 it is "
    with pytest.raises(BadLineError, match=f"{says}'Dennis'; write the text of that option"):
        documents(record("2"))
    says = "as an index from 0 it is 'Dennis', as an index from 1 it is 'Ian', and this answer alo"
    with pytest.raises(BadLineError, match=says):
        documents(record("1"))
    with pytest.raises(BadLineError, match=r"points at an option of .*: it is 'Dennis'; write"):
        documents(record("B"))
    (document,) = documents(record("Dennis"))
    assert "Dennis" in document.text[-20:]
    without = {key: value for key, value in record("2").items() if key not in beside}
    assert len(documents(without)) == 1


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        ("2", "1. Ian\n2. Dennis"),
        ("2", "(1) Ian or (2) Dennis?"),
        ("2", "option1: Ian, option2: Dennis"),
        ("2", "Ian (1) or Dennis (2)?"),
        ("B", "A) Ian\nB) Dennis"),
        ("B", "a) Ian\nb) Dennis"),
        ("B", '{"A": "Ian", "B": "Dennis"}'),
        ("1", "0: Ian, 1: Dennis"),
        ("B", "A  Ian\nB  Dennis"),
        ("B", "**A** Ian\n**B** Dennis"),
        ("B", "A\u3001Ian B\u3001Dennis"),
        ("B", "(A)\nIan\n(B)\nDennis"),
        ("B", "[A] Ian [B] Dennis"),
        ("2", "<2>Dennis</2>"),
    ],
)
def test_an_answer_that_the_question_explains_is_learned(answer: str, asked: str):
    record = {"instruction": f"{ASKED}\n{asked}", "output": answer, **WINOGRANDE}
    assert len(documents(record)) == 1


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        ("2", "A. Ian\nB. Dennis"),
        ("B", "1. Ian\n2. Dennis"),
        ("2", "12. Ian and Dennis"),
        ("2", "Ian Dennis 2"),
        ("A", "A. B. says: which is it, Ian or Dennis?"),
        ("2", "2. what?"),
    ],
)
def test_other_labels_do_not_explain_an_answer(answer: str, asked: str):
    record = {"instruction": f"{ASKED}\n{asked}", "output": answer, **WINOGRANDE}
    with pytest.raises(BadLineError, match="only points at an option"):
        documents(record)


def test_options_that_the_question_lacks_are_asked_for_with_the_text_of_the_answer():
    record = {"instruction": "Who despised it?", "output": "2", **WINOGRANDE}
    says = "write the text of that option as the answer, and the options in the question, or leave"
    with pytest.raises(BadLineError, match=says):
        documents(record)
    asked = "Who despised it, Ian or Dennis?"
    assert len(documents({**record, "instruction": asked, "output": "Dennis"})) == 1


AQUA = ["A)21", "B)21.5", "C)22", "D)22.5", "E)23"]


def test_an_empty_option_explains_nothing():
    record = {"instruction": "1. Ian?", "output": "1", "options": ["", "Ian", "Bo"]}
    assert len(documents(record | {"instruction": "1. Ian? 2. Bo?"})) == 1
    with pytest.raises(BadLineError, match="only points at an option"):
        documents(record | {"instruction": "1. is it Ian, or Bo?"})


@pytest.mark.parametrize("word", ["a", "a "])
def test_long_options_are_looked_for_in_linear_time(word: str):
    """Comparing each place with the whole options took 30 s."""
    options = [word * 50_000 + end for end in ("b", "c")]
    found = pointer_in({"options": options}, "2")
    assert found is not None
    began = time.process_time()
    assert not found.is_explained([word * 150_000])
    assert time.process_time() - began < 2
    assert found.is_explained([f"1. {options[0]}\n2. {options[1]}"])


def test_options_without_a_text_explain_nothing():
    found = pointer_in({"options": ["", " "]}, "2")
    assert found is not None
    assert not found.is_explained(["2. "])


def test_an_option_in_other_white_space_is_explained():
    beside = {"options": ["The  blue\nsky", "$x$"]}
    assert len(documents({"instruction": "A. The blue sky B. $x$", "output": "A", **beside})) == 1
    assert len(documents({"instruction": "A. The blue sky B. $x$", "output": "B", **beside})) == 1


def test_options_as_the_text_of_a_list_are_read_if_the_question_shows_each():
    reader = RecordReader(ChatTemplate(CHATML, {}))
    record = {"instruction": "Ian or Dennis?", "output": "Ian", "options": "['Ian', 'Dennis']"}
    assert reader.unread(record, reader.documents(record)) == []
    with pytest.raises(BadLineError, match=r"`options` may be a part of the question .*: 'Dennis'"):
        reader.documents({**record, "instruction": "Ian?"})


def test_options_with_their_letters_explain_an_answer():
    record = {"instruction": "\n".join(["How far?", *AQUA]), "output": "E", "options": AQUA}
    assert len(documents(record)) == 1


@pytest.mark.parametrize(
    ("record", "says", "instruction", "output"),
    [
        (
            {"sentence": ASKED, **WINOGRANDE, "answer": "2"},
            "`answer` seems to be an index from 1 into `option1` and `option2`; write `sentence` "
            "with `option1` and `option2` as `instruction` and the text of the option that it "
            "names as `output`",
            f"{ASKED} Ian or Dennis?",
            "Dennis",
        ),
        (
            {"question": "Capital?", "choices": "['Rome', 'Paris']", "answer": "0"},
            "`answer` seems to be an index from 0 into `choices`; write `question` with `choices`",
            "Capital? Rome, Paris",
            "Rome",
        ),
        (
            {"ctx": "A man sits. He", **HELLASWAG, "label": "0"},
            "`label` seems to be an index from 0 into `endings`; write `ctx` with `endings` as",
            " ".join(["A man sits. He", *HELLASWAG["endings"]]),
            "is up.",
        ),
        (
            {"article": "Ian ate.", "question": "Who?", "options": ["Ian", "Bo"], "answer": "A"},
            "`answer` seems to be a letter or a name for `options`; write `question` and `article`",
            "Ian ate. Who? Ian, Bo",
            "Ian",
        ),
    ],
    ids=["winogrande", "csv of mmlu", "hellaswag", "race"],
)
def test_the_first_advice_names_the_options(record: dict, says: str, instruction: str, output: str):
    with pytest.raises(BadLineError, match=says):
        documents(record)
    kept = {key: value for key, value in record.items() if key not in ("answer", "label")}
    (document,) = documents({"instruction": instruction, "output": output, **kept})
    assert json.dumps(output)[1:-1] in document.text[-40:]
