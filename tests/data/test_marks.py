"""Marks of turns and of ends within a text are named, and the advice on them is followed."""

import re
import subprocess
from pathlib import Path

import pytest

from moetrain.config import Config
from moetrain.data.cache import encoded
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
