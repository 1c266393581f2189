"""Records in a CSV file are those of Python's module ``csv``, and train as lines of JSON do."""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import re
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest

from moetrain.config import Config, ConfigError
from moetrain.data import csv_rows
from moetrain.data.chat import CHATML, ChatTemplate
from moetrain.data.containers import Files, Raw
from moetrain.data.loader import build_data
from moetrain.data.messages import BadLineError
from moetrain.data.records import RecordReader
from moetrain.data.sources import Source
from moetrain.data.tokenizer import ByteTokenizer
from tests.lib.data_files import found_in, write_lines


def raws_of(path: Path) -> list[Raw]:
    files = Files("data.path", str(path), [path])
    return [raw for piece in files.pieces() for raw in files.records(piece)]


READ = {
    "texts": ("text,n\na,7\nb,true\n", [{"text": "a", "n": "7"}, {"text": "b", "n": "true"}]),
    "one column": ("text\na\nb", [{"text": "a"}, {"text": "b"}]),
    "marked": ('\ufeff"text",n\n1,2\n', [{"text": "1", "n": "2"}]),
    "blank lines": ("\n\r\ntext\n\na\n\n\nb\n\n", [{"text": "a"}, {"text": "b"}]),
    "blanks": ("text\n \n a \n", [{"text": " "}, {"text": " a "}]),
    "empty cells": ('a,b,c\n1,,""\n', [{"a": "1"}]),
    "blank rows": (
        ',,\na,b,c\n,,\n\n"",,""\n1,,\n,,,,\n,\n,,2\n,"""",\n,,\n',
        [{"a": "1"}, {"c": "2"}, {"b": '"'}],
    ),
    "quotes": ('a,b\n"x ""y"", z","1\n\r\n2"\n', [{"a": 'x "y", z', "b": "1\n\r\n2"}]),
    "quotes elsewhere": ('a,b\nx"y"z,"1"2"3"\n', [{"a": 'x"y"z', "b": '12"3"'}]),
    "ends in \\r\\n": ('a,b\r\n1,"2"\r\n3,\r\n', [{"a": "1", "b": "2"}, {"a": "3"}]),
    "other ends": ("text\na\rb\u2028c\x0c\x00\n", [{"text": "a\rb\u2028c\x0c\x00"}]),
    "names with breaks": ('"a\nb"\n1\n', [{"a\nb": "1"}]),
    "names alone": ("text\n", []),
    "nothing": ("", []),
    "a mark alone": ("\ufeff", []),
}


@pytest.mark.parametrize("name", ["a.csv", "A.CSV"])
@pytest.mark.parametrize("case", READ)
def test_rows_are_records_of_texts(case: str, name: str, tmp_path: Path):
    content, wanted = READ[case]
    (tmp_path / name).write_bytes(content.encode())
    raws = raws_of(tmp_path / name)
    assert [raw.value() for raw in raws] == wanted
    assert [raw.key.decode() for raw in raws] == [*map(json.dumps, wanted)]
    if wanted:  # the lines behind the last record belong to none
        num_bytes = sum(raw.num_bytes for raw in raws)
        assert content.encode()[num_bytes:].strip(b",\r\n") == b""
        assert num_bytes >= len(content.encode().rstrip(b",\r\n"))
        # Rows in which the module finds no text are nothing.
        names, *others = filter(any, csv.reader(io.StringIO(content.lstrip("\ufeff"), newline="")))
        pairs = [zip(names, row, strict=True) for row in others]
        assert case == "other ends" or wanted == [{k: x for k, x in y if x} for y in pairs]


def first_line(row: bytes) -> bytes:
    return row.split(b"\n")[0].removesuffix(b"\r")


def test_rows_are_found_wherever_a_read_ends(monkeypatch):
    """Rows are those of the module ``csv``, and a bound leaves out those that are larger."""
    num_open = 0
    for number in range(600):
        d = random.Random(number)
        monkeypatch.setattr(csv_rows, "_READ", d.choice([1, 2, 3, 7]))
        text = "".join(d.choice('ab,,""\n\né') for _ in range(d.randrange(25)))
        text = text.replace("\n", d.choice(["\n", "\r\n"]))
        content = (d.choice(["", "\ufeff"]) + text).encode()
        most = d.randrange(15)
        # A text ends within quotes if a line break behind it is a part of its last cell.
        *_, (*_, last) = csv.reader(io.StringIO(f"{text}x\ny", newline=""))
        if last.endswith("x\ny"):
            num_open += 1
            for bound in (1 << 20, most):
                with pytest.raises(BadLineError, match=r"^\d+: a quote in the row"):
                    list(csv_rows.csv_rows(io.BytesIO(content), bound))
            continue
        found = list(csv_rows.csv_rows(io.BytesIO(content), 1 << 20))
        wanted = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
        assert [[*csv_rows.cells(row.text or b"")] for row in found] == wanted, content
        bounded = list(csv_rows.csv_rows(io.BytesIO(content), most))
        texts = [None if len(row.text or b"") > most else row.text for row in found]
        assert [row.text for row in bounded] == texts, content
        assert [row[1:] for row in bounded] == [row[1:] for row in found]
        lines = text.encode().split(b"\n")
        for row in found:
            assert lines[row.line - 1].removesuffix(b"\r") == first_line(row.text or b""), content
    assert num_open > 100


def source_of(path: Path, **data: object) -> Source:
    settings = {"path": str(path), "eval_fraction": 0, **data}
    config = Config.load({"model": {"preset": "debug"}, "data": settings}, environ={})
    assert config.data.source == "records"
    return Source.of(config.data, ByteTokenizer())


REFUSED = {
    "a quote": ('text,n\na,"b\n\nc', r"a\.csv:2: a quote in the row that begins here has no end; "),
    "a quote in a large row": ('text\nb\n"' + "a\n" * 2000, r"a\.csv:3: a quote in the row"),
    "a quote in the names": ('\n"text', r"a\.csv:2: a quote in the row"),
    "an empty name": ("text,\na,b\n", r"a\.csv:1: name 2 of the first row is empty; give each"),
    "an empty name in quotes": ('\n"",a\n', r"a\.csv:2: name 1 of the first row is empty"),
    "a name twice": ("a,text,a\n1,2,3\n", r"a\.csv:1: the first row has the name 'a' twice; ren"),
    "semicolons": ("a;b\n1;2\n", r"a\.csv:1: the first row has one name, 'a;b'; its cells seem to"),
    "large names": ("a" * 2000 + "\n1\n", r"a\.csv:1: the first row is too large to be"),
    "bytes": (b"text\na\n\xe9t\xe9\n", r"a\.csv:3: byte 0xe9 is not UTF-8: inv.* file as UTF-8"),
    "half a character": (b"text\na\n\xc3", r"a\.csv:3: byte 0xc3 is not UTF-8"),
    "bytes in a large row": (b'text\n"' + b"a\n" * 2000 + b'\xff"\n', r"a\.csv:2002: byte 0xff"),
    "lines of the Macintosh": (
        "text,n\ra,1\rb,2\r",
        r"a\.csv:1: the lines of the file end in \\r al",
    ),
    "UTF-16": ("text\na\n".encode("utf-16"), r"a\.csv:1: .* begins with FF FE, so it is UTF-16"),
}


@pytest.mark.parametrize("bad_records", ["error", "skip"])
@pytest.mark.parametrize("read", [1, 1 << 20])
@pytest.mark.parametrize("case", REFUSED)
def test_what_no_row_can_mean_is_refused(
    case: str, read: int, bad_records: str, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("moetrain.data.containers._MOST_BYTES", 1000)
    monkeypatch.setattr(csv_rows, "_READ", read)
    content, problem = REFUSED[case]
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    source = source_of(path, bad_records=bad_records)
    if "in a large row" in case and bad_records == "error":
        problem = rf"a\.csv:\d: the record has more than|{tmp_path}/{problem}"
    with pytest.raises(ConfigError, match=rf"^data\.path: {tmp_path}/{problem}") as caught:
        list(source.documents())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("record", "key", "data"),
    [
        ({"question": "q", "answer": "a", "source": "s"}, "answer", {}),  # MedQuAD
        ({"prompt": "q", "completion": "a"}, "completion", {}),
        ({"instruction": "q", "input": "", "output": "a"}, "output", {}),
        ({"instruction": "q", "output": "a"}, "output", {"format": "alpaca"}),
        ({"instruction": "q", "response": "a"}, "response", {}),
        ({"question": "q", "answer": "a"}, "question", {}),
        ({"id": "7", "text": "a"}, "text", {}),
    ],
    ids=str,
)
def test_an_empty_cell_where_a_text_should_be_is_named(
    record: dict[str, str], key: str, data: dict[str, str], suffix: str, tmp_path: Path
):
    path = tmp_path / f"a{suffix}"
    rows = [record, {**record, key: None}]
    if suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.DictWriter(file, record).writerows([dict(zip(record, record, strict=True)), *rows])
    elif suffix == ".jsonl":
        write_lines(path, *rows)
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    says = rf"data\.path: {path}.*: `{key}` is empty in this record: .*; leave the record out "
    with pytest.raises(ConfigError, match=says + r"\(data.bad_records skip does\), or write it$"):
        list(source_of(path, source="records", **data).documents())
    (document,) = source_of(path, source="records", bad_records="skip", **data).documents()
    assert "a" in document.text


@pytest.mark.parametrize("beside", [{"answer": "a"}, {"choices": '["a"]'}, {"notes": ""}])
def test_an_empty_cell_beside_others_that_are_not_read_is_not_to_blame(beside, tmp_path: Path):
    with (tmp_path / "a.csv").open("w", newline="") as file:
        row = {"title": "q", "completion": "", **beside}
        csv.DictWriter(file, row).writerows([dict(zip(row, row, strict=True)), row])
    with pytest.raises(ConfigError, match="a record of no known form"):
        list(source_of(tmp_path / "a.csv").documents())


def test_rows_with_other_numbers_of_cells_are_bad_records(tmp_path: Path, caplog):
    path = tmp_path / "a.csv"
    path.write_text('text,n\n"a\n1",\n"b\n2"\nc,3\n,4,5\nd,\n')
    problem = r"a\.csv:4: cells in the row: 1, names in the first row: 2; give a cell for each name"
    with pytest.raises(ConfigError, match=problem):
        list(source_of(path).documents())
    settings = {"path": str(path), "cache_dir": str(tmp_path / "cache"), "bad_records": "skip"}
    settings |= {"seq_len": 4, "eval_fraction": 0}
    build_data(Config.load({"model": {"preset": "debug"}, "data": settings}, environ={}), 257)
    assert "2 bad records were left out" in caplog.text
    assert re.search(problem, caplog.text)
    documents = source_of(path, bad_records="skip").documents()
    assert [document.text for document in documents] == ["a\n1", "c", "d"]


def test_a_row_that_is_too_large_is_a_bad_record_and_is_not_held(
    tmp_path: Path, monkeypatch, caplog
):
    monkeypatch.setattr("moetrain.data.containers._MOST_BYTES", 1 << 16)
    texts = [f"text number {i}\n" for i in range(40)]
    texts[7] = '"\n, ' * (1 << 21) + "é" * (1 << 17)
    path = tmp_path / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["n", "text"], *enumerate(texts)])
    tracemalloc.start()
    found = [document.text for document in source_of(path, bad_records="skip").documents()]
    assert tracemalloc.get_traced_memory()[1] < (1 << 23)
    tracemalloc.stop()
    assert found == texts[:7] + texts[8:]
    with pytest.raises(ConfigError, match=r"a\.csv:16: the record has more than"):
        list(source_of(path).documents())


def test_cells_may_be_long(tmp_path: Path):
    """The module ``csv`` has a limit of 128 KiB, which is one of the process."""
    text = 'a "quoted", long\r\n' * 100_000
    limit = csv.field_size_limit()
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], [text], ["b"]])
    assert [raw.value() for raw in raws_of(tmp_path / "a.csv")] == [{"text": text}, {"text": "b"}]
    assert csv.field_size_limit() == limit


CHATS = [
    {
        "messages": json.dumps(
            [
                {"role": "user", "content": f"{i}, thére?\n"},
                {"role": "assistant", "content": f'"{i * i}"'},
            ]
        )
    }
    for i in range(300)
]
TRAINED = {
    "text": [{"text": f'number "{i}",\n' * (1 + i % 3)} for i in range(300)],
    "prompt": [{"prompt": f"é{i}", "completion": f", {i * i}"} for i in range(300)],
    "messages": CHATS,
}


@pytest.mark.tier("long", quick=["text-no"])
@pytest.mark.parametrize("streaming", ["yes", "no"])
@pytest.mark.parametrize("form", TRAINED)
def test_rows_train_as_lines_do(form: str, streaming: str, tmp_path: Path):
    """The same rows in the same order are trained on, and the same records are held out."""
    records = TRAINED[form]
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*records[0]])
        writer.writeheader()
        writer.writerows(records)
    write_lines(tmp_path / "a.jsonl", *records)
    found = []
    for name in ("a.csv", "a.jsonl"):
        settings = {"path": str(tmp_path / name), "seq_len": 96, "workers": 0, "packing": "whole"}
        settings |= {"streaming": streaming, "cache_dir": str(tmp_path / "cache")}
        settings |= {"eval_fraction": 0.1}
        if streaming == "no":
            del settings["workers"]
        config = Config.load({"model": {"preset": "debug"}, "data": settings}, environ={})
        data = build_data(config, 257)
        rows = [data.train.row(i) for i in range(len(data.train))]
        assert data.eval is not None
        held = [data.eval.row(i) for i in range(len(data.eval))]
        found.append([(r.tokens_S.tolist(), r.targets_S.tolist()) for r in [*rows, *held]])
        assert held
    assert found[0] == found[1]


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_rows_are_those_of_the_file(suffix: str, tmp_path: Path):
    content = b'question,answer\nq,"a\nb"\n"x, y",z\n'
    (tmp_path / "a.csv").write_bytes(content)
    (tmp_path / f"b.csv{suffix}").write_bytes(COMPRESS[suffix](content))
    found = [[*source_of(tmp_path / name).documents()] for name in ("a.csv", f"b.csv{suffix}")]
    assert found[0] == found[1]
    assert [raw.value() for raw in raws_of(tmp_path / f"b.csv{suffix}")] == [
        *csv.DictReader(io.StringIO(content.decode()))
    ]
    assert found_in(tmp_path / "c", {f"a.csv{suffix}": ""}) == f"a.csv{suffix}"


@pytest.mark.parametrize(("cell", "is_learned"), [("1", True), ("1.0", True), ("0", False)])
def test_weights_in_cells_are_numbers(cell: str, is_learned: bool, tmp_path: Path, caplog):
    """OpenAI's and Mistral's weights are 0 and 1. In JSON they are numbers."""
    path = tmp_path / "a.csv"
    for name, value in (("weight", cell), ("train", "True"), ("loss_mask", "1")):
        path.write_text(f"instruction,output,{name}\nq,a,{value}\n")
        assert len([*source_of(path).documents()]) == (is_learned or name != "weight")
    assert "neither learned nor shown" not in caplog.text
    path.write_text("question,answer,weight\nq,a,0.5\n")
    with pytest.raises(ConfigError, match=r"`weight` is '0.5', and a weight is 0 .* or 1"):
        [*source_of(path).documents()]


def test_margins_in_cells_are_numbers(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,chosen,rejected,margin\nq,a,b,1.5\nq,a,b,\nq,a,b,-2e1\n")
    found = []
    for raw in raws_of(path):
        reader = RecordReader(
            ChatTemplate(CHATML, {}), form="preference", reads_pairs=True, reads_margins=True
        )
        found.append(reader.documents(raw.value())[0].margin)
    assert found == [1.5, 0.0, -20.0]


FOLDERS = {
    "beside lines": ({"a.csv": "", "b.jsonl": "", "c/d.csv": ""}, "a.csv b.jsonl c/d.csv"),
    "beside arrays": ({"a.csv": "", "b.json": "[]"}, "a.csv"),
    "beside others": ({"a.csv": "", "b.tsv": "", "c.txt": "", ".d.csv": ""}, "a.csv"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_files_in_a_folder_are_read_as_those_of_lines(case: str, tmp_path: Path):
    files, wanted = FOLDERS[case]
    assert found_in(tmp_path, files) == wanted
