"""Data up to tokens: sources, tokenizers and the token cache."""

import errno
import gzip
import json
import logging
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from moetrain.config import Config, ConfigError, DataSection, locks
from moetrain.data import cache, sources
from moetrain.data.cache import TokenCache
from moetrain.data.containers import FilePart
from moetrain.data.documents import HashRange
from moetrain.data.loader import build_data
from moetrain.data.packing import IGNORE_INDEX, SyntheticDataset
from moetrain.data.tokenizer import ByteTokenizer, load_tokenizer
from moetrain.data.warned import SEEN
from tests.lib.data_files import BYTE_VOCAB, config, word_tokenizer, write_files, write_lines


def text_source(path: Path) -> sources.Source:
    data = config(path, source="text", path=str(path), eval_fraction=0).data
    return sources.Source.of(data, ByteTokenizer())


def both_sides(data: DataSection) -> tuple[sources.Source, sources.Source]:
    """Return the training and the held-out documents, divided by hashes only."""
    source, border = sources.Source.of(data, ByteTokenizer()), data.eval_fraction
    return source.only(HashRange(low=border)), source.only(HashRange(high=border))


# Sources


def test_stdlib_is_large_and_held_out_files_are_disjoint(tmp_path: Path):
    data = config(tmp_path).data
    train, held_out = both_sides(data)
    assert not set(train.files) & set(held_out.files)
    assert not any("site-packages" in f.parts or "test" in f.parts for f in train.files)
    assert train.total_bytes() > 1_000_000
    built = build_data(config(tmp_path), BYTE_VOCAB)
    assert built.eval is not None
    assert len(built.train) * data.seq_len > 1_000_000
    assert len(built.eval) > 16


def test_text_folder_becomes_sorted_documents(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = write_files(tmp_path / "text", b="second é", a="first", empty="")
    (folder / ".hidden").write_text("no")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "c").write_bytes("café".encode()[:-1])  # head -c cuts a character
    (folder / "image").write_bytes(b"\x89PNG\0\0")
    c = config(tmp_path, source="text", path=str(folder), eval_fraction=0.0, seq_len=20)
    data = build_data(c, BYTE_VOCAB)
    assert data.eval is None
    row = data.train.row(0)
    assert row.lengths.tolist() == [6, 10, 4]
    text = data.tokenizer.decode(row.tokens_S.tolist())
    assert text == "first" + "second é" + "caf"
    assert np.flatnonzero(row.tokens_S == data.tokenizer.eos_id).tolist() == [5, 15, 19]
    assert "deeper/c ends within a character of UTF-8, which is left out" in caplog.text


BOOK = "é was a good day\n" * 3 + "A caf"
"""The valid part of a text. What follows is in another encoding, as Gutenberg's ``11-8.txt`` is."""


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "shift-jis"])
@pytest.mark.parametrize("begin", ["", "\ufeff", "é" * 4_000])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_text_that_is_not_utf_8_is_named_with_its_byte(
    encoding: str, begin: str, is_stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("moetrain.data.sources._PART_BYTES", 512)
    before = (begin + BOOK).encode()
    other = "とても" if encoding == "shift-jis" else "é in the morning"
    raw = before + (other + ", and later.\n").encode(encoding)
    with pytest.raises(UnicodeDecodeError) as theirs:
        raw.decode()
    (tmp_path / "11-8.txt").write_bytes(raw)
    data = config(tmp_path, path=str(tmp_path / "11-8.txt")).data
    source = sources.Source.of(data, ByteTokenizer())
    parts = source.file_parts(HashRange()) if is_stream else source.pieces()
    byte = rf"byte 0x{raw[theirs.value.start]:02x} at offset {theirs.value.start:,} is not UTF-8"
    says = rf"data\.path: .*11-8\.txt: {byte}: .*; write the file as UTF-8 \(from Windows-1252:"
    with pytest.raises(ConfigError, match=says):
        [each for part in parts for each in source.read(part, HashRange())]


WIDE = {
    "a.txt": "é was a good day",
    "a.jsonl": '{"text": "é was a good day"}\n',
    "a.json": '[\n{"text": "é was a good day"}\n]\n',
    "a.csv": "text\né was a good day\n",
    "a.jsonl.gz": '{"text": "é was a good day"}\n',
}


@pytest.mark.parametrize(
    ("mark", "encoding", "named"),
    [
        ("", "utf-16", "FF FE, so it is UTF-16"),  # PowerShell's > and Excel's Unicode text
        ("\ufeff", "utf-16-be", "FE FF, so it is UTF-16"),
        ("", "utf-32", "FF FE 00 00, so it is UTF-32"),
        ("\ufeff", "utf-32-be", "00 00 FE FF, so it is UTF-32"),
    ],
)
@pytest.mark.parametrize("name", WIDE)
def test_a_text_in_utf_16_is_refused_with_what_converts_it(
    mark: str, encoding: str, named: str, name: str, tmp_path: Path
):
    """The marks are those of the Unicode Standard, which Python's codecs write."""
    path, raw = tmp_path / name, (mark + WIDE[name]).encode(encoding)

    def texts(raw: bytes, is_stream: bool) -> list[str]:
        with gzip.open(path, "wb") if name.endswith(".gz") else path.open("wb") as file:
            file.write(raw)
        source = sources.Source.of(config(tmp_path, path=str(path)).data, ByteTokenizer())
        parts = source.file_parts(HashRange()) if is_stream else source.pieces()
        found = (each for part in parts for each in source.read(part, HashRange()))
        return [document.text for document in source.documents_of(found)]

    remedy = rf"\(iconv -f {encoding[:6].upper()} -t UTF-8 FILE > NEW\), or leave it out"
    for is_stream in (False, True):
        with pytest.raises(ConfigError, match=rf"data\.path: {path}.*{named}; .*{remedy}"):
            texts(raw, is_stream)
        converted = raw.decode(encoding[:6]).removeprefix("\ufeff").encode()
        assert texts(converted, is_stream) == ["é was a good day"]


def test_large_files_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = "".join(f"line {i} é\n" for i in range(50)) + "€" * 40
    (tmp_path / "one.txt").write_text(text)
    monkeypatch.setattr(sources, "_PART_BYTES", 16)
    source = text_source(tmp_path / "one.txt")
    parts = list(source.documents())
    assert len(parts) > 20
    assert "".join(part.text for part in parts) == text
    assert [part.is_end for part in parts] == [False] * (len(parts) - 1) + [True]
    assert sum(part.num_bytes for part in parts) == source.total_bytes()
    built = TokenCache.of(source, ByteTokenizer(), tmp_path / "cache")
    assert built.documents.tolist() == [0, len(text.encode()) + 1]


def test_jsonl_split_is_disjoint_and_stable(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", *({"body": f"line {i}"} for i in range(200)))
    settings = {"source": "jsonl", "path": str(path), "text_field": "body", "eval_fraction": 0.2}

    def texts(c: Config) -> list[set[str]]:
        return [{part.text for part in source.documents()} for source in both_sides(c.data)]

    train, held_out = texts(config(tmp_path, **settings))
    assert not train & held_out
    assert train | held_out == {f"line {i}" for i in range(200)}
    assert 20 < len(held_out) < 60
    (tmp_path / "b").mkdir()
    moved = write_lines(
        tmp_path / "b" / "c.jsonl", *({"body": f"line {i}"} for i in range(199, -1, -1))
    )
    assert texts(config(tmp_path, **settings | {"path": str(moved)})) == [train, held_out]


def test_eval_path_is_the_held_out_text(tmp_path: Path):
    train = write_files(tmp_path / "train", a="training text")
    held_out = write_files(tmp_path / "eval", b="held-out text")
    c = config(tmp_path, source="text", path=str(train), eval_path=str(held_out), seq_len=8)
    data = build_data(c, BYTE_VOCAB)
    assert data.eval is not None
    assert data.tokenizer.decode(data.train.row(0).tokens_S.tolist()) == "training"
    assert data.tokenizer.decode(data.eval.row(0).tokens_S.tolist()) == "held-out"


def test_lone_surrogates_in_json_become_replacement_characters(tmp_path: Path, caplog):
    """U+FFFD is what the WHATWG's encoder writes for a lone surrogate."""
    SEEN.clear()
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b \\ud83d\\ude00"}\n')
    c = config(tmp_path, source="jsonl", path=str(path), eval_fraction=0, seq_len=10)
    data = build_data(c, BYTE_VOCAB)
    said = data.tokenizer.decode(data.train.row(0).tokens_S.tolist())
    assert said.startswith("a\ufffdb \U0001f600")
    assert r"which become U+FFFD: 'a\ud800b" in caplog.text
    assert "neither learned nor shown" not in caplog.text


def warnings_of(path: Path, caplog, **data: object) -> str:
    """Return what reading the records of ``path`` warns of."""
    SEEN.clear()
    caplog.clear()
    section = config(path, source="records", path=str(path), **data).data
    found = [*sources.Source.of(section, ByteTokenizer()).documents()]
    assert found
    if section.eval_path is not None:
        [*sources.Source.of(section, ByteTokenizer(), field="eval_path").documents()]
    return caplog.text


@pytest.mark.parametrize("key", ["split", "data_split", "Split", "metadata", "partition"])
@pytest.mark.parametrize("value", ["test", "TEST", "evaluation", "validation", "dev"])
def test_records_that_other_trainers_hold_out_are_named(key, value, tmp_path: Path, caplog):
    """Predibase's are of the split evaluation, OpenPipe's of TEST, and those of Google's
    mobile-actions have ``metadata`` eval."""
    train, held = ({"text": "a", key: each} for each in ("train", value))
    path = write_lines(tmp_path / "a.jsonl", [train, held, train])
    said = warnings_of(path, caplog)
    assert f"of 3 records 1 have the `{key}` {value!r}, and are trained on too" in said
    # A whole source of such records is meant, and so are held-out records.
    only = write_lines(tmp_path / "b.jsonl", [held, held])
    whole = write_lines(tmp_path / "c.jsonl", [train])
    assert "trained on too" not in warnings_of(only, caplog)
    assert "trained on too" not in warnings_of(whole, caplog, eval_path=str(path))


HELD_FILES = {
    "mlx-lm": ("train.jsonl valid.jsonl test.jsonl", "'test.jsonl, valid.jsonl'"),
    "a hub's": (
        "data/train-00000-of-00001.jsonl data/test-00000-of-00001.jsonl",
        "'data/test-00000-of-00001.jsonl'",
    ),
    "folders": ("train/a.jsonl dev/a.jsonl", "'dev/a.jsonl'"),
    "one file": ("test.jsonl", None),
    "other words": ("contest.jsonl latest.jsonl evaluations.jsonl", None),
}


@pytest.mark.parametrize("case", HELD_FILES)
def test_files_that_other_trainers_hold_out_are_named(case: str, tmp_path: Path, caplog):
    """``datasets`` makes splits of files with these names."""
    names, held = HELD_FILES[case]
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / name, [{"text": "a"}])
    said = warnings_of(tmp_path, caplog)
    assert ("are trained on too" in said) is (held is not None)
    if held is not None:
        assert f"{tmp_path}: its files {held} are trained on too; name the others in" in said


ASKED = [f"How many clips did Natalia sell on day {i}?" for i in range(4)]
REPEATS = {
    "GSM8K's configurations": {
        "main/train.jsonl": [{"question": x, "answer": "a"} for x in ASKED],
        "socratic/train.jsonl": [{"question": x, "answer": "How? ** a"} for x in ASKED],
    },
    "UltraFeedback's splits": {
        "data/train_prefs-00000-of-00002.jsonl": [
            {"prompt": x, "chosen": "a", "rejected": "b"} for x in ASKED
        ],
        "data/train_sft-00000-of-00001.jsonl": [
            {"messages": [{"role": "user", "content": x}, {"role": "assistant", "content": "a"}]}
            for x in ASKED
        ],
    },
}
NO_REPEATS = {
    "other records": {
        "a.jsonl": [{"question": x, "answer": "a"} for x in ASKED],
        "b.jsonl": [{"question": x + "?", "answer": "a"} for x in ASKED],
    },
    "one system's text": {
        f"{name}.jsonl": [
            {"system": "Answer all the questions.", "question": f"{name}{i}", "answer": "a"}
            for i in range(4)
        ]
        for name in "ab"
    },
    "one text": {
        name: [{"question": x, "answer": "a"} for x in ASKED[:n]]
        for name, n in {"a.jsonl": 2, "b.jsonl": 4}.items()
    },
    "a later shard": {
        f"a-0000{i}-of-00002.jsonl": [{"question": x, "answer": "a"} for x in ASKED]
        for i in range(2)
    },
}


@pytest.mark.parametrize("case", [*REPEATS, *NO_REPEATS])
def test_files_that_hold_the_same_records_are_named(case: str, tmp_path: Path, caplog):
    """Both sets have the same questions in several files, and a folder names all of them."""
    files = (REPEATS | NO_REPEATS)[case]
    for name, records in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / name, records)
    given = config(tmp_path, source="records", path=str(tmp_path), eval_fraction=0, seq_len=256)
    said = sources.Source.of(given.data, ByteTokenizer()).describe_repeats()
    first, second = sorted(files)
    names = f"the first records of its files '{first}' and '{second}' have the same texts, such as"
    right = (
        f"{tmp_path}: {names} {ASKED[0]!r}; if they are one set in two forms, name the files of "
    )
    assert said == (right + "one in data.path" if case in REPEATS else "")
    if case in REPEATS:
        build_data(given, BYTE_VOCAB)
        assert said in caplog.messages
        one = config(tmp_path, source="records", path=str(tmp_path / first)).data
        assert not sources.Source.of(one, ByteTokenizer()).describe_repeats()


def test_synthetic_rows(tmp_path: Path):
    c = config(tmp_path, source="synthetic", num_documents=100, seq_len=16)
    data = build_data(c, 300)
    assert data.eval is not None
    assert (len(data.train), len(data.eval)) == (100, 2)
    row = data.train.row(7)
    assert row.targets_S.tolist() == [*row.tokens_S[1:].tolist(), IGNORE_INDEX]
    assert row.positions_S is None
    assert row.lengths.tolist() == [16]
    assert row.lengths.tolist() == [16]
    again = SyntheticDataset(100, 16, 300, seed=0).row(7)
    assert again.tokens_S.tolist() == row.tokens_S.tolist()
    rows = {tuple(d.row(i).tokens_S) for d in (data.train, data.eval) for i in range(len(d))}
    assert len(rows) == 102
    tokens = np.concatenate([data.train.row(i).tokens_S for i in range(100)])
    assert 0 <= tokens.min() < 5
    assert 295 <= tokens.max() < 300
    assert not (tmp_path / "cache").exists()


# Cases in which the hash of documents holds out too little


@pytest.mark.parametrize("eval_fraction", [0.02, 1e-9, 0.5, 0.999999])
def test_one_file_is_divided_inside(
    tmp_path: Path, eval_fraction: float, caplog: pytest.LogCaptureFixture
):
    """The command is ``--data.source text --data.path one.txt``, a common first try."""
    text = "".join(chr(ord("a") + i // 16) for i in range(16 * 26))
    (tmp_path / "one.txt").write_text(text)
    settings = {"source": "text", "path": str(tmp_path / "one.txt"), "seq_len": 16}
    with caplog.at_level(logging.INFO, logger="moetrain"):
        data = build_data(config(tmp_path, eval_fraction=eval_fraction, **settings), BYTE_VOCAB)
    assert data.eval is not None
    train, held_out = (
        "".join(data.tokenizer.decode(rows.row(i).tokens_S.tolist()) for i in range(len(rows)))
        for rows in (data.train, data.eval)
    )
    assert train + held_out == text
    assert len(data.eval) == {0.02: 1, 1e-9: 1, 0.5: 13, 0.999999: 25}[eval_fraction]
    targets = {t for i in range(len(data.train)) for t in data.train.row(i).targets_S.tolist()}
    assert targets - {IGNORE_INDEX} == set(train.encode())  # none from held-out rows
    assert caplog.text.count("of all 26 rows of 16 tokens instead") == 1


def test_held_out_documents_shorter_than_a_row_are_divided_inside_too(tmp_path: Path):
    lines = [{"text": f"{i} " * 3} for i in range(60)]
    path = write_lines(tmp_path / "a.jsonl", *lines)
    c = config(tmp_path, source="jsonl", path=str(path), eval_fraction=0.1, seq_len=128)
    data = build_data(c, BYTE_VOCAB)
    assert data.eval is not None
    assert (len(data.train), len(data.eval)) == (3, 1)
    assert data.train.identity[1] == data.eval.identity[1]


def test_the_fingerprint_is_of_all_that_decides_the_rows(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", *({"text": f"line {i}", "b": "x"} for i in range(99)))
    base = {"source": "jsonl", "path": str(path), "eval_fraction": 0.2, "seq_len": 16}

    def fingerprint(seed: int = 0, **data: object) -> str:
        c = config(tmp_path, **base | data)
        train = c.train.model_copy(update={"seed": seed})
        return build_data(c.model_copy(update={"train": train}), 300).fingerprint

    words = word_tokenizer(tmp_path / "t", "<unk>", "</s>", "line")
    changes = [
        {},
        {"seq_len": 17},
        {"eval_fraction": 0.3},
        {"eval_fraction": 0},
        {"eval_fraction": 1e-9},
        {"packing": "whole"},
        {"text_field": "b"},
        {"tokenizer": str(words)},
        {"eval_path": str(path), "eval_fraction": 0.02},
        {"source": "synthetic", "path": None},
        {"source": "synthetic", "path": None, "num_documents": 7},
        {"source": "synthetic", "path": None, "seed": 1},
    ]
    fingerprints = [fingerprint(**change) for change in changes]
    assert len(set(fingerprints)) == len(changes)
    moved = tmp_path / "b.jsonl"
    moved.write_bytes(path.read_bytes())
    assert fingerprint(path=str(moved)) == fingerprint() == fingerprint(seed=1)
    write_lines(path, *({"text": f"line {i + (i == 50)}"} for i in range(99)))
    assert fingerprint() != fingerprints[0]


def test_links_to_nothing_and_files_of_other_kinds_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = write_files(tmp_path / "text", a="first")
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    (folder / "elsewhere").symlink_to(tmp_path)
    os.mkfifo(folder / "fifo")
    (folder / "image").write_bytes(b"\x89PNG\0\0")
    Path(os.fsdecode(bytes(folder) + b"/caf\xe9")).write_text("last")
    c = config(tmp_path, source="text", path=str(folder), eval_fraction=0.0, seq_len=11)
    with caplog.at_level(logging.INFO, logger="moetrain"):
        data = build_data(c, BYTE_VOCAB)
    assert data.tokenizer.decode(data.train.row(0).tokens_S.tolist()) == "firstlast"
    assert caplog.text.count("gone is not a file, or is a link to no file; skipped") == 1
    assert "elsewhere is a link to a folder; not followed" in caplog.text
    assert "fifo is not a file" in caplog.text
    assert "image is not text; skipped" in caplog.text
    assert r"1 caf\udce9" in caplog.text
    assert caplog.text.encode()  # a log may be a file in UTF-8


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_a_file_that_cannot_be_read(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch):
    path = write_lines(tmp_path / "a.jsonl", {"text": "x"})
    opened = Path.open

    def refuse(self: Path, *args: object, **settings: object) -> object:
        if self == path:
            raise PermissionError(13, "Permission denied")
        return opened(self, *args, **settings)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=rf"data\.path: '{path}' cannot be read: Permission"):
        build_data(config(tmp_path, source=source, path=str(path), eval_fraction=0), BYTE_VOCAB)


def test_texts_of_one_token_have_nothing_to_predict(tmp_path: Path):
    words = word_tokenizer(tmp_path / "t", "</s>", eos_token="</s>")
    text = write_files(tmp_path / "text", a="</s>", b="</s>")
    c = config(tmp_path, source="text", path=str(text), tokenizer=str(words), seq_len=2)
    with pytest.raises(ConfigError, match=r"data\.path: no document has two tokens"):
        build_data(c, BYTE_VOCAB)


# Cache


class CountingTokenizer(ByteTokenizer):
    """Counts the texts that it encodes."""

    def __init__(self, fingerprint: str = "byte") -> None:
        super().__init__()
        self.fingerprint = fingerprint
        self.num_texts = 0

    def encode_batch(self, texts):
        self.num_texts += len(texts)
        return super().encode_batch(texts)


def test_cache_is_built_once_and_rebuilt_when_its_inputs_change(tmp_path: Path):
    folder = write_files(tmp_path / "text", a="one", b="two")
    tokenizer = CountingTokenizer()
    first = TokenCache.of(text_source(folder), tokenizer, tmp_path / "cache")
    again = TokenCache.of(text_source(folder), tokenizer, tmp_path / "cache")
    assert tokenizer.num_texts == 2
    assert again.tokens.tolist() == first.tokens.tolist() == [*b"one", 256, *b"two", 256]
    assert first.tokens.dtype == np.uint16
    assert first.masked is None
    (folder / "b.txt").write_text("three")
    changed = TokenCache.of(text_source(folder), tokenizer, tmp_path / "cache")
    assert tokenizer.num_texts == 4
    assert changed.documents.tolist() == [0, 4, 10]
    other = CountingTokenizer(fingerprint="other")
    TokenCache.of(text_source(folder), other, tmp_path / "cache")
    assert other.num_texts == 2
    assert len(list((tmp_path / "cache").glob("*/"))) == 3  # no temporary file is left


@pytest.mark.parametrize("change", [{"text_field": "b"}, {"eval_fraction": 0.7}])
def test_cache_key_covers_how_files_are_read(tmp_path: Path, change: dict):
    path = write_lines(tmp_path / "a.jsonl", *({"a": "x" * i, "b": "y"} for i in range(1, 40)))
    settings = {"source": "jsonl", "path": str(path), "text_field": "a", "eval_fraction": 0.5}
    tokens = []
    for data in (settings, settings | change):
        source, _ = both_sides(config(tmp_path, **data).data)
        tokens.append(TokenCache.of(source, ByteTokenizer(), tmp_path / "cache").tokens.tolist())
    assert tokens[0] != tokens[1]


def test_a_vocabulary_over_65536_is_stored_in_32_bits(tmp_path: Path):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size, tokenizer.eos_id = 70_001, 70_000
    folder = write_files(tmp_path / "text", a="x")
    built = TokenCache.of(text_source(folder), tokenizer, tmp_path / "cache")
    assert built.tokens.tolist() == [ord("x"), 70_000]


def test_concurrent_builders_share_one_build(tmp_path: Path):
    folder = write_files(tmp_path / "text", a="one", b="two")
    tokenizer, results = CountingTokenizer(), []

    def build():
        cache = TokenCache.of(text_source(folder), tokenizer, tmp_path / "cache")
        results.append(cache.tokens.tolist())

    is_first, encode = threading.Event(), tokenizer.encode_batch

    def slow(texts):
        is_first.set()
        time.sleep(0.3)  # so that the others arrive meanwhile
        return encode(texts)

    tokenizer.encode_batch = slow
    threads = [threading.Thread(target=build) for _ in range(4)]
    threads[0].start()
    assert is_first.wait(timeout=10)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert results == [[*b"one", 256, *b"two", 256]] * 4
    assert tokenizer.num_texts == 2
    assert len(list((tmp_path / "cache").glob("*/"))) == 1


def test_builders_on_a_file_system_without_locks_share_what_the_first_one_made(
    tmp_path, monkeypatch
):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    folder = write_files(tmp_path / "text", a="one", b="two")
    barrier, results = threading.Barrier(4), []

    class Waiting(CountingTokenizer):
        def encode_batch(self, texts):
            barrier.wait(timeout=10)  # so that all four are building at the same time
            return super().encode_batch(texts)

    def build():
        built = TokenCache.of(text_source(folder), Waiting(), tmp_path / "cache")
        results.append(built.tokens.tolist())

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert results == [[*b"one", 256, *b"two", 256]] * 4
    assert len(list((tmp_path / "cache").glob("*/"))) == 1


def test_a_failed_build_leaves_nothing(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' * 99 + "bad\n")
    c = config(tmp_path, source="jsonl", path=str(path), eval_fraction=0)
    with pytest.raises(ConfigError, match="jsonl:100: not JSON"):
        build_data(c, BYTE_VOCAB)
    assert list((tmp_path / "cache").glob("*/")) == []


META = {"num_tokens": 4, "num_documents": 1, "dtype": "uint16", "content": "x", "checksums": {}}
DAMAGE = {
    "tokens.bin": [b"123", b"\xff" * 8, b"", None],
    "documents.bin": [b"", b"\x01" * 16, None],
    "targets.bin": [b"", b"\0" * 16, b"\xff" * 8, None],
    "masked.bin": [b"\0", None],
    "labels.bin": [b"\0", None],
    "meta.json": [b"", b"{", b"[]", b"\xff", b"{}", None]
    + [
        json.dumps(META | change).encode()
        for change in (
            {"num_tokens": 5},
            {"num_tokens": "4"},
            {"num_tokens": -4},
            {"num_documents": None},
            {"dtype": "float32"},
            {"dtype": []},
        )
    ],
}


@pytest.mark.parametrize(("name", "content"), [(n, c) for n, all in DAMAGE.items() for c in all])
def test_a_damaged_cache_is_named(tmp_path: Path, name: str, content: bytes | None):
    folder = write_files(tmp_path / "text", a="one")
    TokenCache.of(text_source(folder), ByteTokenizer(), tmp_path / "cache")
    (entry,) = (tmp_path / "cache").glob("*/")
    (entry / name).unlink()
    if content is not None:
        (entry / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"data\.cache_dir: .*{entry.name} is damaged .*delete"):
        TokenCache.of(text_source(folder), ByteTokenizer(), tmp_path / "cache")


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "encoded", full)
    with pytest.raises(ConfigError, match=r"data\.cache_dir: .*cannot be written: .*No space left"):
        TokenCache.of(
            text_source(write_files(tmp_path / "text", a="one")), ByteTokenizer(), tmp_path / "c"
        )
    assert list((tmp_path / "c").glob("*/")) == []


def test_encoding_goes_in_bounded_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "_BATCH_CHARACTERS", 6)
    sizes = []

    class Recording(ByteTokenizer):
        def encode_batch(self, texts):
            sizes.append(len(texts))
            return super().encode_batch(texts)

    folder = write_files(tmp_path / "text", a="aaa", b="bbb", c="c", d="dddddddd", e="e")
    built = TokenCache.of(text_source(folder), Recording(), tmp_path / "cache")
    assert sizes == [2, 2, 1]
    assert built.documents.tolist() == [0, 4, 8, 10, 19, 21]


# Tokenizers


def test_hf_tokenizer_from_file_and_folder(tmp_path: Path):
    folder = word_tokenizer(tmp_path / "t", "<unk>", "</s>", "cat", "dog", eos_token="</s>")
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (4, 1)
    (encoded,) = tokenizer.encode_batch(["dog  cat"])
    assert encoded.ids.tolist() == [3, 2]
    assert encoded.offsets().tolist() == [[0, 3], [5, 8]]
    assert tokenizer.decode([3, 99, 2]) == "dog cat"  # a model may have more ids
    by_file = load_tokenizer(str(folder / "tokenizer.json"))
    assert by_file.fingerprint == tokenizer.fingerprint
    other = word_tokenizer(tmp_path / "u", "<unk>", "</s>", "dog", "cat", eos_token="</s>")
    assert load_tokenizer(str(other)).fingerprint != tokenizer.fingerprint


def test_load_tokenizer_downloads_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = word_tokenizer(tmp_path / "t", "a", "</s>")
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, "tokenizer.json" in allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_tokenizer("someone/tokenizer").vocab_size == 2
    assert asked == [("someone/tokenizer", True)]


def test_eos_without_a_config_is_recognised_by_name(tmp_path: Path):
    folder = word_tokenizer(tmp_path / "t", "a", "b", "<|endoftext|>")
    assert load_tokenizer(str(folder)).eos_id == 2


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path):
    folder = word_tokenizer(tmp_path / "t", "<unk>", "</s>", "a")
    saved = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(2)
    saved.enable_padding(length=8)
    saved.save(str(folder / "tokenizer.json"))
    (encoded,) = load_tokenizer(str(folder)).encode_batch(["a a a a"])
    assert encoded.ids.tolist() == [2, 2, 2, 2]


def test_byte_offsets_count_characters():
    (encoded,) = ByteTokenizer().encode_batch(["aé€😀"])
    assert encoded.offsets()[:, 0].tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert ByteTokenizer().decode([256, *encoded.ids.tolist(), 0xFF, 300]) == "aé€😀\ufffd"


@pytest.mark.parametrize("pad", ["</s>", {"content": "</s>"}])
def test_pad_equal_to_eos_is_told_once_and_eos_keeps_its_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pad: object
):
    folder = word_tokenizer(tmp_path / "t", "<unk>", "</s>", "a", eos_token="</s>", pad_token=pad)
    text = write_files(tmp_path / "text", one="a a", two="a a")
    settings = {"source": "text", "path": str(text), "eval_fraction": 0, "seq_len": 6}
    with caplog.at_level(logging.INFO, logger="moetrain"):
        data = build_data(config(tmp_path, tokenizer=str(folder), **settings), BYTE_VOCAB)
    assert sum("PAD is EOS" in record.getMessage() for record in caplog.records) == 1
    assert data.train.row(0).targets_S.tolist() == [2, 1, IGNORE_INDEX, 2, 1, IGNORE_INDEX]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bos_token": "<s>", "pad_token": "<s>"}, "PAD is BOS ('<s>', id 1)"),
        ({"unk_token": "<unk>", "pad_token": "<unk>"}, "PAD is UNK ('<unk>', id 0)"),
        ({"sep_token": "<s>", "pad_token": "<s>"}, "PAD is SEP ('<s>', id 1)"),
        ({"bos_token": "</s>", "pad_token": "</s>"}, "PAD is EOS and BOS ('</s>', id 2)"),
        (
            {"chat_template": "{{ '<s>' + messages[0].content }}", "pad_token": "<s>"},
            "PAD is a token of the chat template ('<s>', id 1)",
        ),
    ],
)
def test_pad_equal_to_another_special_token_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, str], said: str
):
    words = ("<unk>", "<s>", "</s>", "a")
    folder = word_tokenizer(tmp_path / "t", *words, eos_token="</s>", **settings)
    load_tokenizer(str(folder))
    assert [r.getMessage().split(". Loss")[0] for r in caplog.records] == [
        f"data.tokenizer: {said}"
    ]


def test_nothing_is_said_of_a_pad_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = word_tokenizer(tmp_path / "t", "p", "</s>", "a", eos_token="</s>", pad_token="p")
    load_tokenizer(str(folder))
    assert "PAD" not in caplog.text


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_a_text_are_the_text(monkeypatch, tmp_path, seed):
    """No byte is read twice, none is lost, and no character is cut, however long a line is."""
    rng = random.Random(seed)
    monkeypatch.setattr(sources, "_PART_BYTES", 16)
    lines = ["".join(rng.choices("aß€😀", k=rng.choice((0, 3, 9, 40, 200)))) for _ in range(30)]
    text = "\n".join(lines) + "\n" * rng.randrange(2)
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    size = path.stat().st_size
    parts = [FilePart(path, at, min(at + 16, size)) for at in range(0, size, 16)]
    read = [sources._lines_from(part) for part in parts]
    assert "".join(read) == text
    # Lines that are no longer than a part are whole.
    assert {line for line in lines if 0 < len(line.encode()) <= 16} <= {
        line for each in read for line in each.split("\n")
    }


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_controls_that_a_wrong_encoding_leaves_are_named(suffix: str, tmp_path: Path, caplog):
    """The byte 0x80 is the euro sign in Windows-1252, and a control character in Latin-1.

    U+0085 ends a line, and no file has it by mistake.
    """
    misread = "Preise: 5 \u20ac".encode("cp1252").decode("latin-1")
    for text, is_named in ((misread, True), ("a\x85b \u20ac", False)):
        path = tmp_path / f"{is_named}.{suffix}"
        path.write_text(text if suffix == "txt" else json.dumps({"text": text}))
        data = config(tmp_path, path=str(path), eval_fraction=0, seq_len=8).data
        SEEN.clear()
        caplog.clear()
        read = [*sources.Source.of(data, ByteTokenizer()).documents()]
        assert read[0].text == text
        assert ("the control character U+0080" in caplog.text) == is_named
