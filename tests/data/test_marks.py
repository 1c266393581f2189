"""Marks of turns and of ends within a text are named, and the advice on them is followed."""

import re
import subprocess
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moetrain.config import Config
from moetrain.data.cache import encoded
from moetrain.data.chat import CHATML, ChatTemplate
from moetrain.data.records import RecordReader
from moetrain.data.sources import Source
from moetrain.data.tokenizer import ByteTokenizer, load_tokenizer
from moetrain.data.warned import SEEN
from tests.lib.data_files import config, word_tokenizer, write_lines

STORIES = ["Once upon a time.\n\nThe end.", "Tom had a ball.", "It rained, and it was cold."]


def learned(made: Config) -> list[str]:
    """Return the texts that a run learns, one for each document."""
    SEEN.clear()
    tokenizer = load_tokenizer(made.data.tokenizer)
    found = encoded(Source.of(made.data, tokenizer).documents(), tokenizer)
    return [tokenizer.decode(ids_T.tolist()) for _, ids_T, _ in found]


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|end_of_text|>"])
def test_a_file_of_texts_between_marks_is_named_and_divided_as_the_line_says(
    end: str, tmp_path: Path, caplog
):
    """TinyStories' files have a mark behind each story."""
    file = tmp_path / "stories.txt"
    file.write_text("".join(f"{story}\n{end}\n" for story in STORIES))
    assert learned(config(tmp_path, path=str(file))) == [file.read_text()]
    says = f"a text has '{end}' 2 times before other text, read as its characters: it is one "
    assert caplog.text.count(says) == 1
    command = re.search(r"python3 -c .* > FILE\.jsonl", caplog.text)
    assert command is not None
    line = command[0].replace("FILE", str(tmp_path / "stories.txt"))
    subprocess.run(line, shell=True, check=True)
    caplog.clear()
    assert learned(config(tmp_path, path=f"{file}.jsonl")) == STORIES
    assert "before other text" not in caplog.text


def test_a_record_of_texts_between_marks_is_named_with_the_tokenizers_own(tmp_path: Path, caplog):
    folder = word_tokenizer(tmp_path / "words", "?", "a", "b", "</s>", eos_token="</s>")
    file = write_lines(tmp_path / "a.jsonl", {"text": "a </s> b </s>"}, {"text": "a b"})
    learned(config(tmp_path, path=str(file), tokenizer=str(folder)))
    assert "a text has '</s>' 1 times before other text, read as EOS: it is one" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time.\n<|endoftext|>\n",
        'EOS = "<|endoftext|>"  # behind each text',
        "The mark `<|endoftext|>` ends a text.",
        "A <s>B</s> C",
    ],
)
def test_a_mark_at_the_end_or_in_quotes_is_not_named(text: str, tmp_path: Path, caplog):
    file = write_lines(tmp_path / "a.jsonl", {"text": text})
    assert learned(config(tmp_path, path=str(file))) == [text]
    assert "before other text" not in caplog.text


def test_marks_in_all_parts_of_a_large_file_are_counted_once(tmp_path: Path, caplog):
    file = tmp_path / "stories.txt"
    file.write_text(f"{'A story. ' * 20_000}\n<|endoftext|>\n" * 13)
    parts = [*Source.of(config(tmp_path, path=str(file)).data, ByteTokenizer()).documents()]
    assert len(parts) > 2
    learned(config(tmp_path, path=str(file)))
    assert caplog.text.count("a text has '<|endoftext|>' 12 times before other text") == 1


def test_chats_and_answers_with_a_mark_change_nothing(tmp_path: Path, caplog):
    said = "a<|endoftext|>b"
    turns = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
    file = write_lines(
        tmp_path / "a.jsonl", {"messages": turns}, {"prompt": said, "completion": said}
    )
    learned(config(tmp_path, path=str(file)))
    assert "before other text" not in caplog.text


# ---- marks of turns ------------------------------------------------------------------------------

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TURNS = [USER, ANSWER, {"role": "user", "content": "r"}]
LAST = {"role": "assistant", "content": "b"}
MARKED = {
    "HelpSteer2": "q\n<extra_id_1>Assistant\na\n<extra_id_1>User\nr",
    "BELLE": "Human: q\nAssistant: a\nHuman: r\nAssistant:",
    "guanaco": "### Human: q### Assistant: a### Human: r",
    "Llama 2": "<s>[INST] q [/INST] a </s><s>[INST] r [/INST]",
    "Zephyr": "<|user|>\nq\n<|assistant|>\na\n<|user|>\nr",
    "ChatML": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>",
    "Llama 3": "<|start_header_id|>user<|end_header_id|>q<|start_header_id|>assistant<|end_header",
    "Gemma": "<start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\na",
    "Alpaca": "### Instruction:\nq\n\n### Response:\na",
}
WRITE = "write its turns, without the marks,"
RECORDS = {
    "pair": (
        lambda text: {"question": text, "chosen": "b", "rejected": "c"},
        f"`question` of records is a dialogue .*; {WRITE} as a list of messages in `prompt`, and",
        {"prompt": TURNS, "chosen": "b", "rejected": "c"},
    ),
    "pair of messages": (
        lambda text: {"prompt": text, "chosen": [LAST], "rejected": [ANSWER]},
        f"`prompt` of records is a dialogue .*; {WRITE} as a list of messages in its place",
        {"prompt": TURNS, "chosen": [LAST], "rejected": [ANSWER]},
    ),
    "alpaca": (
        lambda text: {"instruction": text, "output": "b"},
        f"`instruction` of records is a dialogue .*; {WRITE} and the output as `messages`",
        {"messages": [*TURNS, LAST]},
    ),
    "messages": (
        lambda text: {"messages": [{"role": "user", "content": text}, LAST]},
        f"a turn of records is a dialogue .*: .*; {WRITE} in its place",
        {"messages": [*TURNS, LAST]},
    ),
    "text": (
        lambda text: {"text": text},
        "`text` of records has marks of turns, and is a document of which every token is learned, "
        "also the user's: .*; write the turns, without the marks, as `messages` to learn the answ",
        {"messages": [*TURNS, LAST]},
    ),
}


def reader_of(record: dict) -> RecordReader:
    paired = {"form": "preference", "reads_pairs": True} if "chosen" in record else {}
    return RecordReader(ChatTemplate(CHATML, {}), **paired)


@pytest.mark.parametrize("marks", MARKED)
@pytest.mark.parametrize("kind", RECORDS)
def test_a_dialogue_with_marks_of_its_turns_is_named(kind: str, marks: str, caplog):
    made, says, followed = RECORDS[kind]
    SEEN.clear()
    record = made(MARKED[marks])
    documents = reader_of(record).documents(record)
    assert re.search(says, caplog.text)
    assert MARKED[marks] in documents[0].text  # it is shown as it is written
    caplog.clear()
    SEEN.clear()
    (document, *_) = reader_of(followed).documents(followed)
    right, _ = render_jinja_template([[*TURNS, LAST]], chat_template=CHATML)
    assert document.text == right[0].rstrip()
    assert "marks of" not in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "What does `[INST]` mean before `[/INST]`?",
        "### Human: rights\n### Animal: rights",
        "A user and an assistant: who speaks?",
        "<user>Bo</user>",
    ],
)
def test_a_text_without_both_marks_is_not_named(text: str, caplog):
    SEEN.clear()
    for made, _, _ in RECORDS.values():
        reader_of(made(text)).documents(made(text))
    assert "marks of" not in caplog.text
