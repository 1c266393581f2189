"""Records in files that the libraries themselves wrote, compared with transformers' tokens."""

import json
import lzma
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

from moetrain.config import ConfigError
from moetrain.data.chat import CHATML, BadLineError, ChatTemplate
from moetrain.data.containers import Files
from moetrain.data.packing import IGNORE_INDEX, Dataset
from moetrain.data.records import RecordReader
from tests.lib.chat_records import CALLING, TOOL_TEMPLATE, TOOLS
from tests.lib.chats import bpe_tokenizer
from tests.lib.data_files import write_lines
from tests.lib.record_forms import (
    CONTAINERS,
    DIALOGUES,
    FORMS,
    MARKED,
    TEXTS,
    _compressed,
    _saved_splits,
    marked,
    rows_of,
    turns,
)

__all__ = ["marked"]  # a fixture

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")


def documents(rows: Dataset) -> list[tuple[list[int], list[bool]]]:
    """Return each document's tokens and their mask, sorted."""
    found = []
    for row in map(rows.row, range(len(rows))):
        learned_S = np.append(False, row.targets_S[:-1] != IGNORE_INDEX)
        starts = np.cumsum(row.lengths) - row.lengths
        num_pads = 0 if row.is_pad_S is None else int(row.is_pad_S.sum())
        ends = np.minimum(starts + row.lengths, len(row.tokens_S) - num_pads)
        for a, b in zip(starts, ends, strict=True):
            found.append((row.tokens_S[a:b].tolist(), learned_S[a:b].tolist()))
    return sorted(found)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("form", FORMS)
def test_dialogues_have_transformers_tokens_and_mask(
    form: str, container: str, marked: Path, tmp_path: Path
):
    records, dialogues = FORMS[form]
    theirs = transformers.AutoTokenizer.from_pretrained(marked)
    want = []
    for messages, given in dialogues:
        found = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        prompt = theirs.apply_chat_template(messages[:given], return_dict=True) if given else None
        num_given = 0 if prompt is None else len(prompt["input_ids"])
        mask = [bool(m) and i >= num_given for i, m in enumerate(found["assistant_masks"])]
        want.append((found["input_ids"][:-1], mask[:-1]))  # a newline follows the last turn
    path = CONTAINERS[container](tmp_path / container, records)
    assert documents(rows_of(path, marked)) == sorted(want)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("form", TEXTS)
def test_texts_are_learned_behind_their_prompts(
    form: str, container: str, marked: Path, tmp_path: Path
):
    theirs = transformers.AutoTokenizer.from_pretrained(marked)
    want = []
    for record in TEXTS[form]:
        prompt = record.get("prompt", "")
        ids = [*theirs(prompt + record.get("completion", record.get("text", "")))["input_ids"]]
        num_given = max(1, len(theirs(prompt)["input_ids"]))
        ids.append(theirs.eos_token_id)
        want.append((ids, [i >= num_given for i in range(len(ids))]))
    path = CONTAINERS[container](tmp_path / container, TEXTS[form])
    assert documents(rows_of(path, marked)) == sorted(want)


@pytest.mark.parametrize("container", ["a.parquet", "saved"])
def test_tools_in_tables_are_those_of_lines(container: str, marked: Path, tmp_path: Path):
    """A table has keys with null where other rows have a value; a line omits them."""
    folder = bpe_tokenizer(tmp_path / "bpe", chat_template=TOOL_TEMPLATE, bos_token="<|im_start|>")
    records = [{"messages": CALLING, "tools": TOOLS[:1]}, {"messages": DIALOGUES[0], "tools": None}]
    lines = write_lines(tmp_path / "a.jsonl", *records)
    path = CONTAINERS[container](tmp_path / container, records)
    assert documents(rows_of(path, folder)) == documents(rows_of(lines, folder))


@pytest.mark.parametrize("template", [MARKED, CHATML], ids=["marked", "unmarked"])
@pytest.mark.parametrize(
    ("train_on", "learned"),
    [("all", ["b", "d", "e"]), ("completion", ["d", "e"]), ("last", ["e"])],
)
def test_which_turns_are_learned(template: str, train_on, learned: list[str]):
    spoken = [*turns("a", "b", "c", "d"), {"role": "assistant", "content": "e"}, *turns("f")]
    reader = RecordReader(ChatTemplate(template, {}), train_on=train_on)
    (document,) = reader.documents({"messages": spoken})
    assert document.loss_spans is not None
    found = [document.text[a:b] for a, b in document.loss_spans]
    assert [text.removesuffix("<|im_end|>") for text in found] == learned
    assert document.text.endswith("e<|im_end|>")


def test_a_pair_has_both_answers_where_they_are_asked_for():
    reader = RecordReader(ChatTemplate(CHATML, {}), reads_pairs=True)
    for record in [*FORMS["preference"][0], {"prompt": "a", "chosen": "b", "rejected": "c"}]:
        chosen, rejected = reader.documents(record)
        for document, key in ((chosen, "chosen"), (rejected, "rejected")):
            answer = record[key] if isinstance(record[key], str) else record[key][-1]["content"]
            assert answer in document.text
        assert chosen.loss_spans is not None
        start = chosen.loss_spans[0][0]
        assert chosen.text[:start] == rejected.text[:start]
        assert chosen.text[start:] != rejected.text[start:]


def test_a_template_that_reads_parts_gets_them():
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    spoken = [{"role": "user", "content": parts}, {"role": "assistant", "content": "z"}]
    reads = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(reads, {}).documents(spoken) == [("[x][y]z", [(6, 7)])]
    assert "user\nxy<" in ChatTemplate(CHATML, {}).documents(spoken)[0][0]
    with pytest.raises(BadLineError, match=r"messages\[0\]\.content has a part that is no text"):
        ChatTemplate(CHATML, {}).documents([{"role": "user", "content": [{"type": "image"}]}])


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"from": "function_call", "value": '{"name": "f", "arguments": {}}'}, "f"),
        ({"from": "observation", "value": "rain"}, "tool"),
        ({"from": "function_call", "value": "{"}, None),
        ({"from": "gpt"}, None),
        ("hi", None),
    ],
)
def test_turns_of_sharegpt(turn: object, said: str | None):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    record = {
        "conversations": [{"from": "human", "value": "x"}, turn, {"from": "gpt", "value": "y"}]
    }
    reader = RecordReader(ChatTemplate(template, {}))
    if said is None:
        with pytest.raises(BadLineError, match=r"(conversations|messages)\[1\]"):
            reader.documents(record)
    else:
        assert said in reader.documents(record)[0].text


def test_folders_patterns_and_forms_said_in_the_log(
    marked: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for i, (name, write) in enumerate(CONTAINERS.items()):
        if name.startswith("a."):
            write(tmp_path / name, [{"text": f"{i} x"}])
    write_lines(tmp_path / "b.jsonl", FORMS["messages"][0][0])
    with caplog.at_level("INFO", logger="moetrain"):
        assert len(documents(rows_of(tmp_path, marked, source="records"))) == 8
    assert "records are text (7), messages (1)" in caplog.text
    assert len(documents(rows_of(tmp_path / "a.jsonl*", marked))) == 4
    with pytest.raises(ConfigError, match=r"data\.path: .*b\.jsonl:1: no 'text', which data"):
        rows_of(tmp_path, marked, source="records", format="text")


def test_splits_and_a_hubs_data_set(marked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = _saved_splits(tmp_path / "splits", TEXTS["text"])
    assert len(documents(rows_of(path, marked, split="test"))) == 1
    with pytest.raises(
        ConfigError, match=r"data\.split: 'no' is not a split .*choose from train, t"
    ):
        rows_of(path, marked, split="no")
    asked = []

    def load_dataset(name: str, subset: str | None, split: str) -> object:
        asked.append((name, subset, split))
        return datasets.load_from_disk(path)[split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(documents(rows_of("someone/texts-1.5", marked, subset="en", split="test"))) == 1
    assert asked == [("someone/texts-1.5", "en", "test")]
    monkeypatch.undo()
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"data\.path: the hub has no 'someone/texts' in reach: "):
        rows_of("someone/texts", marked)


@pytest.mark.parametrize(
    ("container", "module"),
    [("a.parquet", "pyarrow.parquet"), ("saved", "datasets"), ("a.jsonl.zst", "pyarrow.lib")],
)
def test_without_the_extra_a_line_says_what_to_install(
    container: str, module: str, marked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = CONTAINERS[container](tmp_path / container, TEXTS["text"])
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"needs {module}: pip install 'moetrain\[data\]'"):
        rows_of(path, marked)


@pytest.mark.parametrize("container", ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl.xz", "a.parquet"])
def test_a_file_that_is_cut_short_is_named(container: str, marked: Path, tmp_path: Path):
    write = CONTAINERS.get(container) or _compressed(lzma.open)
    path = write(tmp_path / container, [{"text": f"{i} {i * i}"} for i in range(300)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=rf"data\.path: '.*{container}' cannot be read: "):
        rows_of(path, marked)


def test_an_array_has_the_records_of_datasets(tmp_path: Path):
    path = tmp_path / "a.json"
    rows = [{"text": f"{i} [é]", "n": i} for i in range(20)]
    path.write_text(json.dumps(rows, indent=1))
    theirs = datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    files = Files("data.path", str(path), [path])
    [piece] = files.pieces()
    assert [raw.value() for raw in files.records(piece)] == theirs.to_list() == rows
