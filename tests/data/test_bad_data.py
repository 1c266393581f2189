"""User errors in data: files, lines, templates and tokenizers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moetrain.config import ConfigError
from moetrain.data.loader import build_data
from moetrain.data.tokenizer import load_tokenizer
from tests.lib.command_lines import assert_refused
from tests.lib.data_files import BYTE_VOCAB, config, word_tokenizer, write_files, write_lines


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"source": "text", "path": "{}/missing"},
            r"data\.path: .*missing' cannot be read: No such file",
        ),
        ({"source": "text", "path": "{}/empty"}, r"data\.path: .*empty' holds no text files"),
        ({"source": "jsonl", "path": "{}/text"}, r"data\.path: .*text' holds no \.jsonl files"),
        (
            {"source": "text", "path": "{}/blank", "eval_fraction": 0},
            r"data\.path: .*blank' holds no text",
        ),
        (
            {"source": "text", "path": "{}/text", "eval_fraction": 1e-9, "seq_len": 7},
            r"data\.eval_fraction: 1e-09: the 1 rows of 7 tokens of data\.path cannot be "
            r"divided so that training and evaluation both have something to learn; lower "
            r"data\.seq_len to \d, add",
        ),
        (
            {"source": "text", "path": "{}/text", "eval_fraction": 0.999999},
            r"data\.seq_len: 256: the 12 tokens of data\.path make no row of this length to learn",
        ),
        ({"source": "text", "path": "{}/blank"}, r"data\.path: .*blank' holds no text"),
        (
            {"source": "text", "path": "{}/text", "eval_path": "{}/blank", "seq_len": 4},
            r"data\.eval_path: .*blank' holds no text",
        ),
        (
            {"source": "text", "path": "{}/text", "eval_path": "{}/text", "seq_len": 13},
            r"data\.seq_len: 13: the 12 tokens of data\.path make no row of this length",
        ),
        ({"source": "text", "path": "{}/nul\0"}, r"data\.path: .*has characters that are not text"),
        ({"source": "text", "path": "{}/" + "x" * 300}, r"data\.path: .* cannot be read: .*long"),
        ({"source": "text", "path": "{}/fifo"}, r"data\.path: .* neither a file nor a folder"),
        ({"source": "jsonl", "path": "{}/links"}, r"data\.path: .*links' holds no \.jsonl files"),
        ({"cache_dir": "{}/nul\0"}, r"data\.cache_dir: .*has characters that are not text"),
        ({"cache_dir": "{}/" + "x" * 300}, r"data\.cache_dir: .* cannot be written: .*long"),
        (
            {"source": "text", "path": "{}/text", "eval_path": "{}/missing"},
            r"data\.eval_path: .*missing' cannot be read: No such",
        ),
        (
            {"source": "text", "path": "{}/text", "eval_fraction": 0, "seq_len": 99},
            r"data\.seq_len: 99: the 12 tokens of data\.path make no row .*; lower it or add text",
        ),
        ({"tokenizer": "{}/text"}, r"data\.tokenizer: .*text' holds no tokenizer\.json"),
        ({"tokenizer": "{}/text/one.txt"}, r"data\.tokenizer: .*one\.txt is not a tokenizer"),
        ({"tokenizer": "{}/no/such/folder"}, r"data\.tokenizer: .* is neither a file, a folder"),
        ({"cache_dir": "{}/text/one.txt/x"}, r"data\.cache_dir: .* cannot be written"),
        (
            {"source": "jsonl", "path": "{}/a.jsonl", "chat_template": "{}/missing"},
            r"data\.chat_template: .*missing' does not exist",
        ),
    ],
)
def test_bad_data_is_refused_by_the_name_of_its_setting(
    tmp_path: Path, settings: dict, message: str
):
    (tmp_path / "empty").mkdir()
    write_files(tmp_path / "text", one="first", two="other")
    write_files(tmp_path / "blank", one="", two=" \n")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a.jsonl").symlink_to(tmp_path / "gone")
    write_lines(tmp_path / "a.jsonl", {"text": "x"})
    settings = {
        k: v.replace("{}", str(tmp_path)) if isinstance(v, str) else v for k, v in settings.items()
    }
    with pytest.raises(ConfigError, match=message):
        build_data(config(tmp_path, **settings), BYTE_VOCAB)


@pytest.mark.parametrize("source", ["stdlib", "synthetic"])
def test_tokenizer_larger_than_the_model(tmp_path: Path, source: str):
    with pytest.raises(ConfigError, match=r"data\.tokenizer: 'byte' has 257 tokens.* of 100"):
        build_data(config(tmp_path, source=source), 100)


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (["a", "b"], {}, "no known end-of-text token; name one as eos_token"),
        (["a", "</s>"], {"eos_token": "<stop>"}, "has no token '<stop>'"),
    ],
)
def test_tokenizer_without_eos(tmp_path: Path, words: list[str], settings: dict, message: str):
    folder = word_tokenizer(tmp_path / "t", *words, **settings)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "x"', "not JSON: "),
        (b"\xff\xfe", "not JSON: "),
        (b'{"text": "\xff"}', "not JSON: .*utf-8.* in position 10: invalid start byte"),
        (b"[1]", "not a JSON object"),
        (b'{"body": "x"}', "no 'text' and no 'messages': .* in data.text_field"),
        (b'{"text": 3}', "'text' is not text"),
        (b'{"text": ' + b"9" * 5000 + b"}", "not JSON: .*4300 digits"),
        (b"[" * 100_000, "not JSON: maximum recursion depth"),
        (
            b'{"text": "x", "y": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "not JSON: maximum recursion depth",
        ),
        (b'{"text": NaN}', "'text' is not text"),
        (b"\x1f\x8b\x08\x00", "not JSON: "),
        (b'{"messages": "hi"}', "`messages` is not a list of turns"),
        (b'{"messages": []}', "`messages` is empty: it is a chat without turns; leave such"),
        (b'{"messages": ["hi"]}', r"messages\[0\] is not an object"),
        (b'{"messages": [{"role": "user"}]}', r"messages\[0\]\.content is missing or not text"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "`messages` has no assistant turn"),
    ],
)
def test_bad_jsonl_lines_are_named_by_file_and_line(tmp_path: Path, line: bytes, problem: str):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    c = config(tmp_path, source="jsonl", path=str(tmp_path), eval_fraction=0)
    with pytest.raises(ConfigError, match=rf"data\.path: {path}:3: ({problem})"):
        build_data(c, BYTE_VOCAB)


# ---- mistakes found by trying
# ---------------------------------------------------------------------

# These were found by trying, as a user who reads nothing would. A row has the given words, the
# files (by name, {} for a folder), the setting that the line names, and words of the line.
JSONL = "--data.source jsonl --data.path a.jsonl"
TEXT = "--data.source text --data.path a.txt"
CHAT = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n'
SOME_TEXT = {"a.txt": "some text. " * 100}
SAVED_DATASET = {"x/state.json": "{}", "x/dataset_info.json": "{}", "x/data-0.arrow": "ARROW1\0"}
BPE = '{"model": {"type": "BPE", "vocab": {"a": 0, "</s>": 1}, "merges": []}, "added_tokens": []}'


def _template(text: str) -> dict[str, str]:
    return {"a.jsonl": CHAT, "t.jinja": text}


def _tokenizer(config: str, tokenizer: str = BPE) -> dict[str, str]:
    return {**SOME_TEXT, "t/tokenizer.json": tokenizer, "t/tokenizer_config.json": config}


UNLISTED: list[tuple[str, dict[str, str | bytes], str, str]] = [
    # Nested folders, and data of two kinds at once.
    (
        "--output_dir x",
        {"x/config.json": '{"model_type": "qwen3"}'},
        "output_dir",
        "is not a run's",
    ),
    ("--output_dir .", {"config.json": "[]"}, "output_dir", "config.json is not a run's"),
    ("--data.source text --data.path .", SOME_TEXT, "output_dir", "lies in data.path '.': the nex"),
    (
        "--data.source text --data.path x",
        {"x/a.txt": "x"},
        "data.seq_len",
        "256: the 2 tokens of data.path make no row",
    ),
    (
        TEXT + " --data.eval_path . --output_dir outputs",
        SOME_TEXT,
        "output_dir",
        "lies in data.eval_path '.'",
    ),
    (TEXT + " --data.eval_path ./a.txt", SOME_TEXT, "data.eval_path", "is data.path itself"),
    (
        TEXT + " --data.eval_path b.txt --data.eval_fraction 0.5",
        SOME_TEXT,
        "data.eval_fraction",
        "0.5 contradicts data.eval_path 'b.txt'",
    ),
    ("--data.source synthetic --data.packing whole", {}, "data.packing", "contradicts data.source"),
    # Lists, patterns and addresses instead of a path.
    ("--data.source jsonl --data.path *.jsonl", {"a.json": CHAT}, "data.path", "matches no file"),
    ("--data.source text --data.path a.txt,b.txt", SOME_TEXT, "data.path", "No such file"),
    ("--data.source jsonl --data.path https://a.b/c.jsonl", {}, "data.path", "No such file"),
    ("--data.source jsonl --data.path /dev/zero", {}, "data.path", "neither a file nor a folder"),
    ("--data.source jsonl --data.path x", {"x/a.json": "{}"}, "data.path", "x/a.json:1: no 'text'"),
    ("--data.source text --data.path x", {"x/.a": "text"}, "data.path", "holds no text files"),
    # Data sets without text, and folders of them.
    (
        "--data.source text --data.path x",
        SAVED_DATASET,
        "data.path",
        "data-0.arrow.*set data.source records",
    ),
    ("--data.source jsonl --data.path x", SAVED_DATASET, "data.path", "'x' cannot be read: KeyErr"),
    ("--data.source text --data.path a.parquet", {"a.parquet": "PAR1"}, "data.path", "ce records"),
    ("--data.path a.parquet", {"a.parquet": "PAR1"}, "data.path", "'a.parquet' cannot be read: "),
    ("--data.path x.arrow", {"x.arrow": "ARROW1\0"}, "data.path", "'x.arrow' cannot be read: "),
    ("--data.path a.jsonl.gz", {"a.jsonl.gz": "x"}, "data.path", "read: Not a gzipped file"),
    ("--data.path a.jsonl.zst", {"a.jsonl.zst": "x"}, "data.path", "'a.jsonl.zst' cannot be read"),
    ("--data.path a.jsonl.xz", {"a.jsonl.xz": "x"}, "data.path", "'a.jsonl.xz' cannot be read"),
    ("--data.source text --data.path a.gz", {"a.gz": "x"}, "data.path", "no text but .gz; unpack"),
    ("--data.source jsonl --data.path a.zip", {"a.zip": "x"}, "data.path", "but .zip; unpack it"),
    ("--data.path a.csv", {"a.csv": "text,\na,b"}, "data.path", "a.csv:1: name 2 .* is empty"),
    ("--data.path a.csv", {"a.csv": "a,b,a\n1,2,3"}, "data.path", "a.csv:1: .* name 'a' twice"),
    ("--data.path a.csv", {"a.csv": 'text\na\n"b\n'}, "data.path", "a.csv:3: a quote in the row"),
    ("--data.path a.csv", {"a.csv": b"text\n\xe9"}, "data.path", "a.csv:2: byte 0xe9 is not UTF-8"),
    ("--data.path a.csv", {"a.csv": "text\na\nb,c"}, "data.path", "a.csv:3: cells in the row: 2"),
    ("--data.path a.csv", {"a.csv": "text\n"}, "data.path", "holds no text"),
    ("--data.path x", {"x/a.md": "text"}, "data.path", "'x' holds no .jsonl files, nor .parquet"),
    # Text that cannot be decoded.
    (
        TEXT,
        {"a.txt": "some text".encode("utf-16")},
        "data.path",
        "begins with FF FE, so it is UTF-16",
    ),
    (TEXT, {"a.txt": b"\xef\xbb\xbf"}, "data.path", "nothing to predict"),
    (
        TEXT,
        {"a.txt": "tiny"},
        "data.seq_len",
        "256: the 5 tokens of data.path make no row .* lower it",
    ),
    # Lines of other trainers.
    (JSONL, {"a.jsonl": f"[[{CHAT.strip()}]]"}, "data.path", "a.jsonl:1, record 1: not a JSON ob"),
    (JSONL, {"a.jsonl": "{\n" + CHAT[1:]}, "data.path", "a.jsonl:1: not JSON"),
    (JSONL, {"a.jsonl": CHAT.replace("\n", "\r") * 2}, "data.path", "a.jsonl:1: not JSON: Extra"),
    (JSONL, {"a.jsonl": CHAT + CHAT[:30]}, "data.path", "a.jsonl:2: not JSON"),
    (JSONL, {"a.jsonl": b"\x1f\x8b\x08\x00\xff"}, "data.path", "a.jsonl:1: not (JSON|UTF-8)"),
    (JSONL, {"a.jsonl": '{"conversations": []}'}, "data.path", "is a chat without turns"),
    (JSONL, {"a.jsonl": '{"quest": "a", "reply": "b"}'}, "data.path", "data.text_field"),
    (JSONL, {"a.jsonl": '{"conversation": []}'}, "data.path", "`conversation` is empty: it is"),
    (JSONL, {"a.jsonl": '{"prompt": "a", "answer": "b"}'}, "data.path", "`answer` as `completion`"),
    (JSONL, {"a.jsonl": '{"prompt": 5, "completion": 6}'}, "data.path", "are neither two texts"),
    (JSONL + " --data.format alpaca", {"a.jsonl": CHAT}, "data.path", "no 'instruction', which da"),
    (
        JSONL + " --data.format text --data.train_on last",
        {},
        "data.train_on",
        "data.format",
    ),
    (JSONL, {"a.jsonl": '{"messages": "hi"}'}, "data.path", "not a list of turns"),
    (JSONL, {"a.jsonl": '{"messages": ["hi"]}'}, "data.path", r"messages\[0\] is not an object"),
    (JSONL, {"a.jsonl": CHAT.replace('"ho"', "null")}, "data.path", "content is missing or not te"),
    (JSONL, {"a.jsonl": CHAT.replace("assistant", "helper")}, "data.path", "no assistant turn"),
    (JSONL, {"a.jsonl": '{"text": NaN}'}, "data.path", "'text' is not text"),
    (JSONL, {"a.jsonl": '{"text": "a", "text": 5}'}, "data.path", "'text' is not text"),
    (JSONL, {"a.jsonl": CHAT}, "data.eval_fraction", "the 1 documents .* add data"),
    (
        JSONL + " --data.seq_len 4",
        {"a.jsonl": CHAT * 9},
        "data.seq_len",
        "make no row of this length to learn; raise it, up to [0-9]+",
    ),
    # Templates that are programs.
    (JSONL, _template("{% include 'x' %}"), "data.path", "template t.jinja fails: .* no loader"),
    (
        JSONL,
        _template("{{ ''.__class__.__mro__ }}"),
        "data.path",
        "template t.jinja fails: .* unsafe",
    ),
    (
        JSONL,
        _template("{{ 'a' * 10**15 }}"),
        "data.path",
        "template t.jinja fails: it needs too much memory",
    ),
    (JSONL, _template("{{ range(10**12) }}"), "data.path", "template t.jinja fails: .* too big"),
    (JSONL, _template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "data.path", "Recursion"),
    (JSONL, _template("{{ raise_exception('two\nlines') }}"), "data.path", "fails: two lines"),
    (JSONL, _template("{{ messages | tojson }}"), "data.path", "does not begin its rendering"),
    (JSONL, _template("{% generation %}"), "data.chat_template", "'endgeneration'"),
    (JSONL, _template("{{ " + "(" * 5000), "data.chat_template", "line 1|cannot be compiled"),
    # Tokenizers.
    (TEXT, _tokenizer('{"eos_token": 5}'), "data.tokenizer", "eos_token 5 is no token"),
    (TEXT, _tokenizer('{"eos_token": "<zz>"}'), "data.tokenizer", "no token '<zz>', its eos_token"),
    (TEXT, _tokenizer("[" * 100_000), "data.tokenizer", "not JSON .maximum recursion"),
    (TEXT, _tokenizer("{}", BPE.replace("BPE", "No")), "data.tokenizer", "is not a tokenizer"),
    (TEXT, _tokenizer("{}", BPE.replace("0", "-1")), "data.tokenizer", "is not a tokenizer"),
    (TEXT, _tokenizer("{}", BPE.replace("0", "9999")), "data.tokenizer", "has 10000 tokens, more"),
    (TEXT, _tokenizer("{}", BPE.replace("</s>", "b")), "data.tokenizer", "no known end-of-text"),
]


@pytest.mark.parametrize(
    ("words", "files", "field", "says"),
    UNLISTED,
    ids=[f"{i}-{row[3][:30]}" for i, row in enumerate(UNLISTED)],
)
def test_mistakes_found_by_trying_are_refused(
    words, files, field, says, tmp_path, tmp_path_factory, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    cache = tmp_path_factory.getbasetemp() / "unlisted-cache"
    words = [*words.split(), "--train.device", "cpu", "--data.cache_dir", str(cache)]
    words += ["--data.chat_template", "t.jinja"] * ("t.jinja" in files)
    words += ["--data.tokenizer", "t"] * ("t/tokenizer.json" in files)
    assert_refused(words, field, says, tmp_path, capsys)
    for name, content in files.items():
        assert Path(name).read_bytes() in (content, str(content).encode())
