"""Preference records of public forms: their prompts and their learned answers.

The right prompts are those of TRL's ``maybe_extract_prompt``, the longest common beginning of both
dialogues, written out here; texts are in ChatML.
"""

import json
from dataclasses import replace

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moetrain.config import Config, ConfigError
from moetrain.data.chat import CHATML, BadLineError, ChatTemplate
from moetrain.data.loader import build_data
from moetrain.data.records import RecordReader
from moetrain.data.tokenizer import load_tokenizer
from moetrain.data.warned import SEEN
from moetrain.losses.preference import KINDS
from tests.lib.data_files import write_lines

Q, A, B = "Is 7 prime?", "Yes.", "It is even."


def turns(*said):
    """Return a dialogue that begins with the user; ``>`` marks a system message."""
    roles = ["system"] * said[0].startswith(">") + ["user", "assistant"] * 4
    return [{"role": r, "content": s} for r, s in zip(roles, said, strict=False)]


def answer(said):
    return [{"role": "assistant", "content": said}]


def chatml(*said):
    """Return ChatML's text before the last answer, and that answer."""
    text = "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in turns(*said))
    prompt, _, learned = text.rpartition("<|im_start|>assistant\n")
    return prompt + "<|im_start|>assistant\n", learned.removesuffix("\n")


def sides(*prompt):
    """Return prompt, chosen and rejected answer of A and B."""
    (before, chosen), (_, rejected) = chatml(*prompt, A), chatml(*prompt, B)
    return before, chosen, rejected


def told(said, *names):
    roles = names or ("Human", "Assistant")
    return "".join(f"\n\n{roles[i % 2]}: {text}" for i, text in enumerate(said))


WHOLE = {"chosen": turns(Q, A), "rejected": turns(Q, B)}
TEXTS = {"chosen": A, "rejected": B}
LONG = ["Hi", "Hello", Q]
LONG_WHOLE = {"chosen": turns(*LONG, A), "rejected": turns(*LONG, B)}
PAIRS = {
    "whole dialogues": (WHOLE, sides(Q)),
    "whole dialogues, prompt null": ({"prompt": None, **WHOLE}, sides(Q)),
    "whole dialogues, prompt as text": ({"prompt": Q, **WHOLE}, sides(Q)),
    "whole dialogues, prompt as text with blanks": ({"prompt": f" {Q}\n", **WHOLE}, sides(Q)),
    "whole dialogues, prompt as list": ({"prompt": turns(Q), **WHOLE}, sides(Q)),
    "whole dialogues, prompt and question": ({"prompt": Q, "question": Q, **WHOLE}, sides(Q)),
    "whole dialogues, all of chosen again": ({"messages": turns(Q, A), **WHOLE}, sides(Q)),
    "several turns": (LONG_WHOLE, sides(*LONG)),
    "several turns, first question as text": ({"prompt": "Hi", **LONG_WHOLE}, sides(*LONG)),
    "several turns, last question as text": ({"prompt": Q, **LONG_WHOLE}, sides(*LONG)),
    "several turns, last question as list": ({"prompt": turns(Q), **LONG_WHOLE}, sides(*LONG)),
    "several turns, prompt as list": ({"prompt": turns(*LONG), **LONG_WHOLE}, sides(*LONG)),
    "several turns, all before as text": (
        {"prompt": told([*LONG, ""]).rstrip(), **LONG_WHOLE},
        sides(*LONG),
    ),
    "several turns, all before as ChatML": (
        {"prompt": chatml(*LONG, A)[0], **LONG_WHOLE},
        sides(*LONG),
    ),
    "system in the dialogues": (
        {"prompt": Q, "chosen": turns(">S", Q, A), "rejected": turns(">S", Q, B)},
        sides(">S", Q),
    ),
    "system beside dialogues": ({"system": ">S", **WHOLE}, sides(">S", Q)),
    "system beside and in dialogues": (
        {"system": ">S", "chosen": turns(">S", Q, A), "rejected": turns(">S", Q, B)},
        sides(">S", Q),
    ),
    "system as the prompt of dialogues": ({"prompt": turns(">S"), **WHOLE}, sides(">S", Q)),
    "answers in lists, prompt as text": (
        {"prompt": Q, "chosen": answer(A), "rejected": answer(B)},
        sides(Q),
    ),
    "answers in lists, prompt as list": (
        {"prompt": turns(*LONG), "chosen": answer(A), "rejected": answer(B)},
        sides(*LONG),
    ),
    "turns behind a prompt that ends with an answer": (
        {"prompt": turns("Hi", "Hello"), **WHOLE},
        sides(*LONG),
    ),
    "answers as messages": (
        {"prompt": Q, "chosen": answer(A)[0], "rejected": answer(B)[0]},
        sides(Q),
    ),
    "answers as texts, prompt as list": ({"prompt": turns(">S", Q), **TEXTS}, sides(">S", Q)),
    "answers as texts, history as messages": ({"messages": turns(*LONG), **TEXTS}, sides(*LONG)),
    "answers as texts, question as list": ({"question": turns(">S", Q), **TEXTS}, sides(">S", Q)),
    "answers as lists, question of ShareGPT": (
        {
            "question": [{"from": "human", "value": Q}],
            "chosen": answer(A),
            "rejected": answer(B),
        },
        sides(Q),
    ),
    "system and question": ({"system": ">S", "question": Q, **TEXTS}, sides(">S", Q)),
    "system without a text, and question": ({"system": "", "question": Q, **TEXTS}, sides(Q)),
    "system and prompt": ({"system": ">S", "prompt": Q, **TEXTS}, sides(">S", Q)),
    "system and input": ({"system": ">S", "input": Q, **TEXTS}, sides(">S", Q)),
    "instruction": ({"instruction": Q, **TEXTS}, sides(Q)),
    "instruction and input": ({"instruction": "Add", "input": "1 2", **TEXTS}, sides("Add\n\n1 2")),
    "instruction, input and history": (
        {"instruction": Q, "input": "", "history": [["Hi", "Hello"]], **TEXTS},
        sides(*LONG),
    ),
    "ShareGPT's turns": (
        {
            "conversations": [{"from": "human", "value": Q}],
            "chosen": {"from": "gpt", "value": A},
            "rejected": {"from": "gpt", "value": B},
        },
        sides(Q),
    ),
    "ShareGPT's whole dialogues": (
        {
            key: [{"from": "human", "value": Q}, {"from": "gpt", "value": said}]
            for key, said in TEXTS.items()
        },
        sides(Q),
    ),
    "whole dialogues as the text of their JSON": (
        {"prompt": Q} | {key: json.dumps(dialogue) for key, dialogue in WHOLE.items()},
        sides(Q),
    ),
    "texts that are JSON of great depth": (
        {"prompt": Q, "chosen": '[{"a":' + "[" * 100_000, "rejected": B},
        (Q, '[{"a":' + "[" * 100_000, B),
    ),
    "texts that are JSON of something else": (
        {"prompt": Q, "chosen": '[{"a": 1}]', "rejected": "[{a}]"},
        (Q, '[{"a": 1}]', "[{a}]"),
    ),
    "texts": ({"prompt": Q, "chosen": f" {A}", "rejected": f" {B}"}, (Q, f" {A}", f" {B}")),
    "whole texts with their prompt": (
        {"prompt": Q, "chosen": f"{Q} {A}", "rejected": f"{Q} {B}"},
        (Q, f" {A}", f" {B}"),
    ),
    "whole texts of Human and Assistant": (
        {"chosen": told([Q, A]), "rejected": told([Q, B])},
        (f"\n\nHuman: {Q}\n\nAssistant:", f" {A}", f" {B}"),
    ),
    "whole texts of three turns": (
        {"chosen": told([*LONG, A]), "rejected": told([*LONG, B])},
        (told([*LONG, ""]).rstrip(), f" {A}", f" {B}"),
    ),
    "whole texts whose answers begin alike": (
        {"chosen": told([Q, "It is 7."]), "rejected": told([Q, "It is even."])},
        (f"\n\nHuman: {Q}\n\nAssistant:", " It is 7.", " It is even."),
    ),
    "whole texts with their question": (
        {"prompt": Q, "chosen": told([Q, A]), "rejected": told([Q, B])},
        (f"\n\nHuman: {Q}\n\nAssistant:", f" {A}", f" {B}"),
    ),
    "whole texts with all that lies before": (
        {
            "prompt": f"\n\nHuman: {Q}\n\nAssistant:",
            "chosen": told([Q, A]),
            "rejected": told([Q, B]),
        },
        (f"\n\nHuman: {Q}\n\nAssistant:", f" {A}", f" {B}"),
    ),
    "answers behind a text of Human and Assistant": (
        {"prompt": f"\n\nHuman: {Q}\n\nAssistant:", "chosen": f" {A}", "rejected": f" {B}"},
        (f"\n\nHuman: {Q}\n\nAssistant:", f" {A}", f" {B}"),
    ),
}


def learned(document):
    """Return the text before the first learned part, and the learned parts."""
    assert document.loss_spans is not None
    first = document.loss_spans[0][0]
    return document.text[:first], [document.text[a:b] for a, b in document.loss_spans]


def test_of_texts_with_several_answers_the_assistants_turns_are_learned():
    """Behind an earlier answer stands a mark at which generation does not stop, and no end."""
    record = {"chosen": told([Q, A]), "rejected": told([Q, B, "Sure?", A])}
    _, other = reader_of(form="preference", reads_pairs=True).documents(record)
    assert learned(other) == (f"\n\nHuman: {Q}\n\nAssistant:", [f" {B}", f" {A}"])
    assert other.text.endswith(A)
    assert other.is_end


def reader_of(**settings):
    return RecordReader(ChatTemplate(CHATML, {}), **settings)


@pytest.mark.parametrize("form", PAIRS)
def test_a_pair_has_its_question_once_in_every_form(form):
    record, (prompt, chosen, rejected) = PAIRS[form]
    one, other = reader_of(form="preference", reads_pairs=True).documents(record)
    assert learned(one) == (prompt, [chosen])
    assert learned(other) == (prompt, [rejected])
    (alone,) = reader_of().documents(record)  # for next_token, whatever else the record has
    assert learned(alone)[1][-1] == chosen
    assert alone.text == one.text
    table = json.loads(json.dumps(record)) | {"score": None, "prompt_id": "1"}
    assert reader_of(form="preference", reads_pairs=True).documents(table) == [one, other]


JOINED = {
    "a line for each turn": ("Human: Hi\nAssistant:", " Hello", " Go away"),
    "a blank behind the mark": ("Human: Hi\nAssistant: ", "Hello", "Go away"),
    "DeepSpeed-Chat": ("Human: Hi? Assistant:", " Hello", " Go away"),
    "a title": ("Human: The Movie, a review:", " It is good.", " It is bad."),
    "another name": ("Human: Hi\nBot:", " Hello", " Go away"),
    "several turns": ("Human: Hi\nAssistant: Yes?\nHuman: Who?\nAssistant:", " I.", " You."),
    "turns within the answers": ("Human: Hi\nAssistant:", " A\nHuman: B\nAssistant: C", " D"),
    "marks within the answers": ("Human: Hi\nAssistant:", " A\n\nHuman: B\n\nAssistant: C", " D"),
    "an assistant's mark within": ("Human: Write a play.\nBot:", " A.\n\nAssistant: C", " D"),
    "another last mark": ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\nBot:", " d", " e"),
    "marks within both": (
        "Human: Hi\nAssistant:",
        " A\n\nHuman: B\n\nAssistant: C",
        " D\n\nHuman: B\n\nAssistant: E",
    ),
    "no mark of the assistant": ("\n\nHuman: Who is it?", " I.", " You."),
}


@pytest.mark.parametrize("name", JOINED)
def test_texts_that_only_begin_with_human_are_joined_as_they_are(name):
    """A text prompt and its answer are joined, and the answer is learned, as TRL does it."""
    prompt, chosen, rejected = JOINED[name]
    wanted = [(prompt, [chosen]), (prompt, [rejected])]
    texts = [prompt + chosen, prompt + rejected]
    single = {"prompt": prompt, "completion": chosen}
    for settings in ({"form": "preference"}, {"form": "preference", "reads_margins": True}):
        reader = reader_of(reads_pairs=True, **settings)
        for before in ("", prompt):  # answers may be whole texts, which repeat the prompt
            pair = {"chosen": before + chosen, "rejected": before + rejected}
            found = reader.documents({"prompt": prompt, **pair})
            assert [learned(document) for document in found] == wanted
            assert [document.text for document in found] == texts
    (document,) = reader_of().documents(single)
    assert (document.text, learned(document)) == (texts[0], wanted[0])
    (document,) = reader_of(reads_pairs=True, reads_labels=True).documents({**single, "label": 0})
    assert (document.text, learned(document)) == (texts[0], wanted[0])


def test_a_reward_model_compares_texts_that_only_begin_with_human():
    reader = reader_of(form="preference", reads_pairs=True, reads_margins=True)
    pair = {"chosen": "Human: Hi\nAssistant: Hello", "rejected": "Human: Hi\nAssistant: Bye"}
    assert [document.text for document in reader.documents(pair)] == [*pair.values()]


@pytest.mark.parametrize(
    ("prompt", "answer", "spans"),
    [
        ("\n\nHuman: q\n\nAssistant:", " a", [" a"]),
        ("Human: q\n\nAssistant:", " a\n\nHuman: r\n\nAssistant: b", [" a", " b"]),
        ("\n\nHuman: q", "\n\nAssistant: a", [" a"]),
        ("\n\nHuman: q\n\n", "Assistant: a", [" a"]),
        ("\n\nHuman: q\n\nAssistant: Well,", " a.", [" a."]),
        ("\n\nHuman: q", "\n\nHuman: r\n\nAssistant: a", [" a"]),
    ],
)
def test_a_text_that_has_turns_up_to_the_answer_is_read_as_turns(prompt, answer, spans):
    (document,) = reader_of().documents({"prompt": prompt, "completion": answer})
    assert document.text == prompt + answer
    assert learned(document)[1] == spans
    with pytest.raises(BadLineError, match="no turn of the assistant"):
        reader_of().documents({"prompt": f"{prompt}{answer}", "completion": "\n\nHuman: s"})


def test_turns_behind_the_common_beginning_are_learned_without_the_users():
    said = {"chosen": [Q, A, "Sure?", "Sure."], "rejected": [Q, B]}
    reader = reader_of(form="preference", reads_pairs=True)
    found = reader.documents({key: turns(*each) for key, each in said.items()})
    texts = [[A + "<|im_end|>", "Sure.<|im_end|>"], [B + "<|im_end|>"]]
    assert [learned(document)[1] for document in found] == texts
    found = reader.documents({key: told(each) for key, each in said.items()})
    assert [learned(document)[1] for document in found] == [[f" {A}", " Sure."], [f" {B}"]]
    # One is a prefix of the other, or both are equal: the last turn is the answer.
    found = reader.documents({"chosen": turns(Q, A, "Sure?", "Sure."), "rejected": turns(Q, A)})
    assert [learned(document)[1] for document in found] == [texts[0], [A + "<|im_end|>"]]
    found = reader.documents({"chosen": told([Q, A]), "rejected": told([Q, A])})
    assert [learned(document)[1] for document in found] == [[f" {A}"]] * 2


def test_keys_without_a_value_are_no_difference():
    spoken = turns(Q, A)
    spoken[0]["name"] = None  # as in tables
    (one, _) = reader_of(form="preference", reads_pairs=True).documents(
        {"chosen": spoken, "rejected": turns(Q, B)}
    )
    assert learned(one)[0] == sides(Q)[0]


def test_an_answer_that_speaks_the_prompt_again_is_no_repetition():
    """A list is the whole prompt; a similar later turn does not replace it."""
    said = {"chosen": answer("Hm.") + turns("Hi", A), "rejected": answer("Hm.") + turns("Hi", B)}
    reader = reader_of(form="preference", reads_pairs=True)
    found = reader.documents({"prompt": turns("Hi"), **said})
    before, chosen, rejected = sides("Hi", "Hm.", "Hi")
    assert [learned(document) for document in found] == [
        (before, [chosen]),
        (before, [rejected]),
    ]
    found = reader.documents({"prompt": "Assistant", "chosen": "Assistant: a", "rejected": "b"})
    assert found[0].text == "AssistantAssistant: a"
    found = reader.documents({"prompt": Q, "chosen": "Assistant: a", "rejected": "Assistant: b"})
    assert found[0].text == f"{Q}Assistant: a"
    # Both answers begin with the same word.
    found = reader.documents({"prompt": "7", "chosen": "70", "rejected": "7!"})
    assert [learned(document) for document in found] == [("7", ["70"]), ("7", ["7!"])]


def test_texts_with_tools_are_turns():
    template = "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    reader = RecordReader(ChatTemplate(template, {}), form="preference", reads_pairs=True)
    one, _ = reader.documents({"prompt": Q, **TEXTS, "tools": [{"name": "f"}]})
    # The template writes no end of a turn, so the beginning of the next turn is the end.
    tool = "{'type': 'function', 'function': {'name': 'f'}}"
    assert learned(one) == (f"[{tool}]<user>{Q}<assistant>", [f"{A}<user>"])


UNKNOWN = {
    "no prompt": TEXTS,
    "a prompt without a text": {"prompt": " ", **TEXTS},
    "a system alone": {"system": ">S", **TEXTS},
    "answers alone": {"chosen": answer(A), "rejected": answer(B)},
    "whole texts of other names": {
        "chosen": told([Q, A], "Q", "A"),
        "rejected": told([Q, B], "Q", "A"),
    },
}
OTHERS = {
    "a prompt that the dialogues lack": (
        {"prompt": "Is 8 prime?", **WHOLE},
        "`prompt` is not in the dialogues",
    ),
    "a prompt that whole texts lack": (
        {"prompt": "Is 8 prime?", "chosen": told([Q, A]), "rejected": told([Q, B])},
        "`prompt` is not in the dialogues",
    ),
    "a prompt of which the dialogues have a part": (
        {"prompt": f"Answer in French: {Q}", **WHOLE},
        "`prompt` is not in the dialogues",
    ),
    "a system of which the dialogues have a part": (
        {"system": ">S. Be brief.", "chosen": turns(">S", Q, A), "rejected": turns(">S", Q, B)},
        "`system` is not in the dialogues",
    ),
    "a question of which the prompt is a part": (
        {"prompt": Q, "instruction": f"Answer in French: {Q}", **TEXTS},
        "`instruction` is not in `prompt`",
    ),
    "another system": (
        {"system": ">T", "chosen": turns(">S", Q, A), "rejected": turns(">S", Q, B)},
        "`system` is not in the dialogues",
    ),
    "two questions": (
        {"prompt": Q, "instruction": "Answer in French.", **TEXTS},
        "`instruction` is not in `prompt`",
    ),
    "a text and a dialogue": ({"prompt": Q, "chosen": A, "rejected": answer(B)}, "neither"),
    "numbers": ({"prompt": Q, "chosen": 5, "rejected": 6}, "neither two texts nor two dialogues"),
    "an answer without a text": ({"prompt": Q, "chosen": " ", "rejected": A}, "`chosen` has no"),
    "an answer of a list without a text": (
        {"prompt": turns(Q), "chosen": "", "rejected": A},
        "`chosen` has no",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_pair_without_a_prompt_is_refused_with_the_known_forms(name):
    for reader in (reader_of(form="preference", reads_pairs=True), reader_of()):
        with pytest.raises(BadLineError) as raised:
            reader.documents(UNKNOWN[name])
        said = str(raised.value)
        assert "\n" not in said
        for known in ("`prompt`", "`question`", "`instruction`", "`system`", "Human: "):
            assert known in said


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_that_is_beside_a_pair_is_lost(name):
    record, problem = OTHERS[name]
    for reader in (reader_of(form="preference", reads_pairs=True), reader_of()):
        with pytest.raises(BadLineError, match=problem):
            reader.documents(record)


@pytest.mark.parametrize("beside", [{}, {"prompt": ""}, {"prompt": None, "system": ""}], ids=str)
def test_a_reward_model_compares_whole_texts(beside, tmp_path):
    """TRL's ``RewardTrainer`` takes pairs of texts without a prompt, and appends EOS to each."""
    pair = {"chosen": "The sky is blue.", "rejected": "The sky is green.", **beside}
    path = write_lines(tmp_path / "a.jsonl", [pair])
    settings = {"path": str(path), "seq_len": 64, "eval_fraction": 0, "cache_dir": str(tmp_path)}
    given = {"model": {"preset": "debug"}, "data": settings}
    data = build_data(Config.load(given | {"train": {"objective": "reward"}}, environ={}), 257)
    row = data.train.row(0)
    first, _ = row.lengths
    assert row.tokens_S[:first].tolist() == [*b"The sky is blue.", 256]
    assert row.tokens_S[first : first + 18].tolist() == [*b"The sky is green.", 256]
    with pytest.raises(ConfigError, match="no prompt is found"):
        build_data(Config.load(given | {"train": {"objective": "dpo"}}, environ={}), 257)
    reader = reader_of(form="preference", reads_pairs=True, reads_margins=True)
    (asked, _) = reader.documents({**pair, "question": "Why?"})
    assert "Why?" in asked.text
    for other, says in (({"system": "S"}, "no prompt is found"), ({"chosen": " "}, "has no text")):
        with pytest.raises(BadLineError, match=says):
            reader.documents({**pair, **other})


BEGUN = {
    "dialogues": (turns("Name a colour.", A), turns("Name a color.", B), "their first message"),
    "behind a system's turn": (turns(">S", "r", A), turns(">S", "s", B), "message 2"),
    "texts": (told(["Name a colour.", A]), told(["Name a color.", B]), "their first message"),
    "JSON": (json.dumps(turns(Q, A)), json.dumps(turns("Hm?", B)), "their first message"),
    "a dialogue and an answer": (turns(Q, A), answer(B), "their first message"),
    "keys": ([{**turns(Q)[0], "id": 1}, *answer(A)], turns(Q, B), "their first message"),
}


@pytest.mark.parametrize("name", BEGUN)
def test_dialogues_without_a_common_prompt_are_compared_by_a_reward_model_alone(name, caplog):
    """TRL's ``RewardTrainer`` renders each dialogue; its ``extract_prompt`` finds no prompt."""
    SEEN.clear()
    chosen, rejected, where = BEGUN[name]
    pair = {"chosen": chosen, "rejected": rejected, "source": "x"}
    for reader in (reader_of(form="preference", reads_pairs=True), reader_of()):
        with pytest.raises(BadLineError) as raised:
            reader.documents(pair)
        said = str(raised.value)
        assert f"`chosen` and `rejected` differ from {where} on, " in said
        assert "; begin both with the same question, or write it as `prompt` and only" in said
        assert "known forms" not in said
    reader = reader_of(form="preference", reads_pairs=True, reads_margins=True)
    found = reader.documents(pair)
    assert [document.text for document in found] == [shown(chosen), shown(rejected)]
    assert caplog.text.count(f"of records differ from {where} on, ") == 1


def shown(dialogue):
    """Return a whole text, or what ``transformers`` renders of messages or of their JSON."""
    if isinstance(dialogue, str) and not dialogue.startswith("["):
        return dialogue
    messages = json.loads(dialogue) if isinstance(dialogue, str) else dialogue
    (text,), _ = render_jinja_template([messages], chat_template=CHATML)
    return text.rstrip()


def test_what_differs_between_two_questions_is_shown():
    reader = reader_of(form="preference", reads_pairs=True)
    with pytest.raises(BadLineError, match=r"on, 'Name a colour\.' and 'Name a color\.': the"):
        reader.documents(dict(zip(("chosen", "rejected"), BEGUN["dialogues"][:2], strict=True)))
    with pytest.raises(BadLineError, match=r"on, \{.*'id': 1\} and \{"):
        reader.documents(dict(zip(("chosen", "rejected"), BEGUN["keys"][:2], strict=True)))


def test_answers_alone_are_no_whole_dialogues():
    reader = reader_of(form="preference", reads_pairs=True, reads_margins=True)
    for pair in (UNKNOWN["answers alone"], {"chosen": turns(Q), "rejected": turns(Q)}):
        with pytest.raises(BadLineError, match="no prompt is found"):
            reader.documents(pair)


def test_records_that_are_no_pairs_are_refused():
    reader = reader_of(form="preference", reads_pairs=True)
    for record in ({"prompt": Q, "completion": A}, {"prompt": Q, "chosen": A}, {"text": Q}):
        with pytest.raises(
            BadLineError, match=r"no '(chosen|rejected)', so it is no pair .*`instruction`"
        ):
            reader.documents(record)
    with pytest.raises(BadLineError, match="`rejected` has no text"):
        reader.documents({"prompt": Q, "chosen": A, "rejected": " "})
    (document,) = reader_of().documents({"prompt": Q, "chosen": A, "rejected": " "})
    assert learned(document) == (Q, [A])


@pytest.mark.parametrize("objective", ["next_token", *KINDS])
def test_a_run_has_the_same_prompt_for_every_objective(objective, tmp_path):
    """The records have the form of the best-known sets, read as in a run."""
    record = {"prompt": Q, "prompt_id": "1", **LONG_WHOLE, "score_chosen": 8.0}
    path = write_lines(tmp_path / "pairs.jsonl", record)
    words = [f"data.path={path}", f"data.cache_dir={tmp_path}", "data.eval_fraction=0"]
    words += ["model.preset=debug", "data.seq_len=512", f"train.objective={objective}"]
    rows = build_data(Config.load(None, words, environ={}), 300).train
    row = rows.row(0)
    tokenizer = load_tokenizer("byte", 300)
    ends = row.lengths.cumsum()
    texts = [row.tokens_S[end - n : end].tolist() for end, n in zip(ends, row.lengths, strict=True)]
    learns = [
        tokenizer.decode(row.targets_S[end - n : end][row.targets_S[end - n : end] >= 0].tolist())
        for end, n in zip(ends, row.lengths, strict=True)
    ]
    before, *answers = sides(*LONG)
    wanted = answers[: 1 if objective == "next_token" else 2]
    wanted += answers[:1] * (objective == "kto")
    assert [said.split("<|im_end|>")[0] for said in learns] == [
        said.split("<|im_end|>")[0] for said in wanted
    ]
    assert all(tokenizer.decode(text).startswith(before) for text in texts)
    assert all(tokenizer.decode(text).count(Q) == 1 for text in texts)


def test_a_file_and_a_line_are_named(tmp_path):
    path = write_lines(tmp_path / "pairs.jsonl", {"prompt": Q, **TEXTS}, TEXTS)
    words = [f"data.path={path}", f"data.cache_dir={tmp_path}", "data.eval_fraction=0"]
    words += ["model.preset=debug", "train.objective=dpo"]
    with pytest.raises(ConfigError, match=r"data\.path: .*pairs\.jsonl:2: .*no prompt") as raised:
        build_data(Config.load(None, words, environ={}), 300)
    assert "\n" not in str(raised.value)


UNWANTED = {
    "completion": {"prompt": Q, "completion": f" {B}", "label": False},
    "completion, a number": {"prompt": Q, "completion": f" {B}", "label": 0},
    "completion, a text": {"prompt": Q, "completion": f" {B}", "label": "False"},
    "completion of messages": {"prompt": turns(Q), "completion": answer(B), "label": False},
    "messages": {"messages": turns(Q, B), "label": False},
    "messages, LLaMA-Factory's name": {"messages": turns(Q, B), "kto_tag": False},
    "conversations": {
        "conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": B}],
        "label": False,
    },
    "alpaca": {"instruction": Q, "output": B, "kto_tag": False},
    "messages, a number": {"messages": turns(Q, B), "label": 0},
    "messages, a float": {"messages": turns(Q, B), "label": 0.0},
    "alpaca, a number": {"instruction": Q, "output": B, "label": 0},
    "question, a number": {"question": Q, "answer": B, "kto_tag": 0},
    "question, a text": {"question": Q, "answer": B, "label": "0"},
    "messages, a word": {"messages": turns(Q, B), "label": "bad"},
    "messages, KTO's word": {"messages": turns(Q, B), "label": "Undesirable"},
}


@pytest.mark.parametrize("form", UNWANTED)
def test_an_unwanted_answer_is_learned_by_kto_alone(form):
    record = UNWANTED[form]
    with pytest.raises(BadLineError) as raised:
        reader_of().documents(record)
    key = "kto_tag" if "kto_tag" in record else "label"
    assert f"`{key}` is {record[key]!r}: the answer is one to avoid" in str(raised.value)
    assert "set train.objective kto, leave such records out, or rename" in str(raised.value)
    (document,) = reader_of(reads_pairs=True, reads_labels=True).documents(record)
    wanted = (Q, f" {B}") if "prompt" in record and record["prompt"] == Q else chatml(Q, B)
    assert (learned(document)[0], *learned(document)[1]) == wanted
    assert document.label is False
    liked = {**record, key: True}
    (same,) = reader_of(reads_pairs=True, reads_labels=True).documents(liked)
    assert same == document._replace(label=True)
    assert reader_of().documents(liked)[0].text == document.text


def test_longer_rows_are_advised_only_where_they_help(tmp_path):
    """Two single answers cannot be divided for kto, however long rows are."""
    answers = [
        {"prompt": turns(Q)[:1], "completion": turns(Q, A)[1:], "label": True},
        {"prompt": turns("Is 8 prime?", A, "Sure?"), "completion": turns(Q, B)[1:], "label": False},
    ]
    path = write_lines(tmp_path / "a.jsonl", answers)
    data = {"path": str(path), "seq_len": 256, "cache_dir": str(tmp_path), "eval_fraction": 0.02}
    given = {"model": {"preset": "debug"}, "data": data, "train": {"objective": "kto"}}
    config = Config.load(given, environ={})
    with pytest.raises(ConfigError, match="cannot be divided") as caught:
        build_data(config, 257)
    assert "raise data.seq_len" not in str(caught.value)


def test_a_pair_with_two_answers_may_be_compared_by_the_last():
    """A template that writes the last answer otherwise, as Qwen3's does, gives two texts."""
    source = (
        "{% for m in messages %}{{ '<' + m.role + '>' }}"
        "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
        "{{ m.content + '</>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    said = [{"role": r, "content": c} for r, c in (("assistant", "a"), ("user", "r"))]
    record = {
        "prompt": [{"role": "user", "content": "q"}],
        "chosen": [*said, {"role": "assistant", "content": "b"}],
        "rejected": [{**said[0], "content": "x"}, said[1], {"role": "assistant", "content": "y"}],
    }
    reader = RecordReader(ChatTemplate(source, {}), form="preference", reads_pairs=True)
    with pytest.raises(BadLineError, match=r"2 texts, .*; set data.train_on last, which compares"):
        reader.documents(record)
    found = replace(reader, train_on="last").documents(record)
    assert [learned(document)[1] for document in found] == [
        ["<think></think>b</>"],
        ["<think></think>y</>"],
    ]


def test_labels_that_are_classes_of_something_else_are_no_preference():
    for record in (
        {"text": Q, "label": 0},
        {"messages": turns(Q, A), "label": 3},
        {"messages": turns(Q, A), "label": "sums"},
        {"messages": turns(Q, A), "label": "A question about primes, and its answer."},
        {"messages": turns(Q, A), "label": [0, 1]},
        {"instruction": Q, "output": A, "label": 0.3},
        {"prompt": Q, "completion": A, "label": 3},
        {"prompt": Q, "completion": A, "label": None},
    ):
        assert len(reader_of().documents(record)) == 1


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"prompt": Q, "completion": A}, "no answer with a `label` that is true or false"),
        ({"prompt": Q, "completion": A, "label": "sums"}, "no answer with a `label`"),
        (
            {"prompt": Q, "completion": A, "label": 1, "kto_tag": False},
            "`label` is 1, `kto_tag` False: they contradict each other; leave one",
        ),
        ({"prompt": Q, "completion": A, "label": 2}, "no answer with a `label`"),
        ({"text": Q, "label": True}, "no answer with a `label`.*`completion`.*`chosen`"),
        ({"prompt": "", "completion": A, "label": True}, "no prompt is found"),
        ({"prompt": Q, "completion": " ", "label": True}, "the answer has no text"),
    ],
)
def test_kto_refuses_what_has_no_label_or_no_prompt(record, problem):
    with pytest.raises(BadLineError, match=problem):
        reader_of(reads_pairs=True, reads_labels=True).documents(record)


def test_a_whole_dialogue_behind_its_prompt_is_not_written_twice():
    """The record has the form of a pair without its other answer."""
    for prompt in (Q, turns(Q)):
        record = {"prompt": prompt, "completion": turns(Q, A)}
        (document,) = reader_of().documents(record)
        assert (learned(document)[0], *learned(document)[1]) == chatml(Q, A)
    (document,) = reader_of().documents({"system": ">S", "prompt": Q, "completion": A})
    assert (learned(document)[0], *learned(document)[1]) == chatml(">S", Q, A)


@pytest.mark.parametrize("prompt", [{}, {"prompt": "Hi"}, {"prompt": turns(*LONG)}], ids=str)
@pytest.mark.parametrize("label", [True, False])
def test_the_label_of_a_whole_dialogue_is_that_of_its_last_turn(prompt, label):
    """trl-lib/kto-mix-14k has all turns before the last one as `prompt`, and that one as
    `completion`; argilla/kto-mix-15k has the same dialogues whole, as `completion`."""
    reader = reader_of(reads_pairs=True, reads_labels=True)
    divided = {"prompt": turns(*LONG), "completion": answer(B), "label": label}
    whole = {**prompt, "completion": turns(*LONG, B), "label": label}
    assert reader.documents(whole) == reader.documents(divided)
    if prompt:
        text = {**whole, "completion": json.dumps(whole["completion"])}
        assert reader.documents(text) == reader.documents(divided)
    assert learned(*reader.documents(divided))[1] == [f"{B}<|im_end|>"]


def test_the_label_of_an_answer_of_several_turns_is_that_of_all():
    """As in TRL, where the whole completion behind a prompt is the answer."""
    reader = reader_of(reads_pairs=True, reads_labels=True)
    call, result = answer("Let me see."), [{"role": "tool", "content": "7"}]
    record = {"prompt": turns(Q), "completion": [*call, *result, *answer(A)], "label": False}
    found = learned(*reader.documents(record))[1]
    assert found == ["Let me see.<|im_end|>", f"{A}<|im_end|>"]


MIXED = [
    {"prompt": "ab", "completion": "cd", "label": True},
    {"prompt": "e", "chosen": "fg", "rejected": "h"},
    {"prompt": "i", "completion": "jkl", "label": False},
]


def kto_rows(path, tmp_path, *words):
    words = [f"data.path={path}", f"data.cache_dir={tmp_path}", *words]
    words += ["model.preset=debug", "data.seq_len=24", "train.objective=kto"]
    return build_data(Config.load(None, words, environ={}), 300)


def segments_of(row):
    """Return text, learned text and label of each segment."""
    tokenizer, found = load_tokenizer("byte", 300), []
    ends = row.lengths.cumsum()
    for end, n in zip(ends, row.lengths, strict=True):
        is_pad = row.is_pad_S[end - n : end]
        targets = row.targets_S[end - n : end]
        text = tokenizer.decode(row.tokens_S[end - n : end][~is_pad].tolist())
        (label,) = {*row.extra["label"][end - n : end].tolist()}
        found.append((text, tokenizer.decode(targets[targets >= 0].tolist()), label))
    return found


def test_kto_has_rows_of_single_answers_and_of_pairs_together(tmp_path, caplog):
    path = write_lines(tmp_path / "answers.jsonl", *MIXED)
    with caplog.at_level("INFO", "moetrain"):
        rows = kto_rows(path, tmp_path, "data.eval_fraction=0").train
    found = [segments_of(rows.row(i)) for i in range(len(rows))]
    end = load_tokenizer("byte", 300).decode([load_tokenizer("byte", 300).eos_id])
    wanted = [
        [("abcd", "cd", 1), ("abfg", "fg", 0)],
        [("efg", "fg", 1), ("eh", "h", -1), ("ejkl", "jkl", 0)],
        [("ijkl", "jkl", -1), ("icd", "cd", 0)],
    ]
    assert found == [
        [(text + end, said + end, label) for text, said, label in row] for row in wanted
    ]
    said = "1 preference pairs, 1 desirable answers, 1 undesirable answers, one in a row of 24"
    assert said in caplog.text
    assert "completion (2), preference (1)" in caplog.text


def test_single_answers_are_held_out_by_their_own(tmp_path):
    lines = [{**MIXED[0], "label": bool(i % 3), "prompt": f"{i} "} for i in range(30)]
    path = write_lines(tmp_path / "answers.jsonl", *lines)
    data = kto_rows(path, tmp_path, "data.eval_fraction=0.2")
    numbers = [
        {int(segments_of(rows.row(i))[0][0].split()[0]) for i in range(len(rows))}
        for rows in (data.train, data.eval)
    ]
    assert sorted([*numbers[0], *numbers[1]]) == list(range(30))
    assert 0 < len(numbers[1]) < 15
    few = write_lines(tmp_path / "few.jsonl", *lines[:3])
    data = kto_rows(few, tmp_path, "data.eval_fraction=0.01")
    assert (len(data.train), len(data.eval)) == (2, 1)


def test_unpaired_answers_are_refused_by_dpo(tmp_path):
    path = write_lines(tmp_path / "answers.jsonl", MIXED[0])
    words = [f"data.path={path}", f"data.cache_dir={tmp_path}", "model.preset=debug"]
    words += ["data.eval_fraction=0"]
    build_data(Config.load(None, [*words, "train.objective=kto"], environ={}), 300)
    for objective in ("dpo", "ipo"):
        config = Config.load(None, [*words, f"train.objective={objective}"], environ={})
        # The error also comes if the cache of kto is there.
        with pytest.raises(ConfigError, match="no 'chosen', so it is no pair"):
            build_data(config, 300)
