"""Records in a JSON array, and folders of texts, are read as by json.load and ``datasets``."""

import gzip
import io
import json
import random
import re
import tracemalloc
from pathlib import Path

import pytest

from moetrain.config import Config, ConfigError
from moetrain.data import json_array
from moetrain.data.containers import Files, find_records, list_files
from moetrain.data.loader import build_data
from moetrain.data.messages import BadLineError
from moetrain.data.sources import Source
from moetrain.data.tokenizer import ByteTokenizer
from tests.lib.data_files import found_in

RECORDS = [
    {"text": 'a "quoted" [b], {c}\\'},
    {"text": "é\u2028\n", "more": {"deep": [[1, {"x": "]}"}], []]}},
    {"messages": [{"role": "user", "content": '\\"'}, {"role": "assistant", "content": ","}]},
]
WRITTEN = {
    "one line": lambda: json.dumps(RECORDS),
    "indented": lambda: json.dumps(RECORDS, indent=2, ensure_ascii=False),
    "an element a line": lambda: "\n[\n" + ",\n".join(map(json.dumps, RECORDS)) + "\n]\n",
    "marked": lambda: "\ufeff" + json.dumps(RECORDS),
    "lines": lambda: "\n".join(map(json.dumps, RECORDS)),
    "one element": lambda: json.dumps(RECORDS[:1]),
    "no element": lambda: "[ \n]",
}


def values_of(path: Path) -> list[object]:
    files = Files("data.path", str(path), [path])
    return [raw.value() for piece in files.pieces() for raw in files.records(piece)]


TURNS = RECORDS[2]["messages"]
DIALOGUES = [TURNS, [{"role": "user", "content": "x" * 20_000}, TURNS[1]], TURNS]


@pytest.mark.parametrize("is_first_long", [False, True])
@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".json.gz"])
@pytest.mark.parametrize("written", ["an array", "indented", "lines"])
def test_lists_of_turns_are_records(written: str, suffix: str, is_first_long: bool, tmp_path: Path):
    """Each line is a dialogue, or each element of the array."""
    dialogues = DIALOGUES[1:] if is_first_long else DIALOGUES
    content = "\n".join(map(json.dumps, dialogues)) + "\n"
    if written != "lines":
        content = json.dumps(dialogues, indent=2 if written == "indented" else None)
    path = tmp_path / f"a{suffix}"
    encoded = content.encode()
    path.write_bytes(gzip.compress(encoded) if suffix.endswith("gz") else encoded)
    assert values_of(path) == dialogues


def test_one_indented_list_of_turns_is_no_file_of_dialogues(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(TURNS, indent=2))
    assert values_of(path) == TURNS  # each is refused as one turn of a dialogue


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".json.gz"])
@pytest.mark.parametrize("case", WRITTEN)
def test_records_of_an_array_are_those_of_json(case: str, suffix: str, tmp_path: Path):
    content = WRITTEN[case]().encode()
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    wanted = RECORDS if case == "lines" else json.loads(content.decode("utf-8-sig"))
    assert values_of(path) == wanted


def drawn(d: random.Random, depth: int = 0) -> object:
    kinds = ["text", "number", "none"] + ["list", "object"] * (depth < 3)
    kind = d.choice(kinds)
    if kind == "list":
        return [drawn(d, depth + 1) for _ in range(d.randrange(3))]
    if kind == "object":
        return {d.choice('[]{},"\\'): drawn(d, depth + 1) for _ in range(d.randrange(3))}
    text = "".join(d.choice('ab[]{},:"\\é\n\t ') for _ in range(d.randrange(12)))
    return {"text": text, "number": d.uniform(-1e9, 1e9), "none": None}[kind]


def test_elements_are_found_wherever_a_read_ends(monkeypatch):
    for number in range(150):
        d = random.Random(number)
        monkeypatch.setattr(json_array, "_READ", d.choice([1, 2, 3, 7]))
        wanted = [drawn(d) for _ in range(d.randrange(5))]
        content = json.dumps(wanted, indent=d.choice([None, 1]), ensure_ascii=d.random() < 0.5)
        file = io.BufferedReader(io.BytesIO(content.encode()))
        if d.choice([True, False]) and not json_array.is_array(file):
            raise AssertionError(content)
        found = list(json_array.array_elements(file, 1 << 20))
        assert [json.loads(element.text or b"") for element in found] == wanted, content
        most = d.randrange(40)
        file = io.BufferedReader(io.BytesIO(content.encode()))
        bounded = list(json_array.array_elements(file, most))
        texts = [None if len(each.text or b"") > most else each.text for each in found]
        assert [each.text for each in bounded] == texts
        assert [each[1:] for each in bounded] == [each[1:] for each in found]
        at = [content.encode().count(b"\n", 0, content.encode().index(e.text)) for e in found[:1]]
        assert [e.line - 1 for e in found[:1]] == at


BROKEN = {
    "no end": ('[{"text": "a"}', "cannot be read: the array has no end; it is damaged"),
    "no end of a string": ('[{"text": "a', "cannot be read: the array has no end; it is damaged"),
    "more behind": ('[{"text": "a"}] x', "cannot be read: something follows the array: b'x'"),
    "two arrays": ('[{"text": "a"}]\n[{"text": "b"}]', "something follows the array"),
    "another bracket": ('[{"text": "a"}}', "something follows the array"),
    "no comma": ('[{"text": "a"}\n{"text": "b"}]', r"a.json:1, record 1: not JSON: Extra data"),
    "a comma too many": ('[{"text": "a"},\n]', r"a.json:2, record 2: not JSON: line 1 has a comma"),
    "a number": ('[{"text": "a"},\n\n3]', r"a.json:3, record 2: not a JSON object: 3; give each"),
    "large": (
        '[{"text": "a"},\n{"text": "' + "b" * 2000 + '"}]',
        r"2, record 2: the record has mo",
    ),
    "no end of a large one": ('[{"text": "' + "b" * 2000, "cannot be read: the array has no end"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_arrays_are_one_line_that_says_where(case: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("moetrain.data.containers._MOST_BYTES", 1000)
    content, problem = BROKEN[case]
    (tmp_path / "a.json").write_text(content)
    settings = {"path": str(tmp_path / "a.json"), "eval_fraction": 0}
    config = Config.load({"model": {"preset": "debug"}, "data": settings}, environ={})
    assert config.data.source == "records"
    source = Source.of(config.data, ByteTokenizer())
    with pytest.raises(ConfigError, match=problem):
        list(source.documents())


# Files, the mistake that RFC 8259 has no grammar for, and the line in which it stands.
OF_JAVASCRIPT = {
    "a comma at the end of an object": (
        '[\n  {\n    "text": "ä",\n  },\n  {"text": "b"}\n]',
        r"a.json:2, record 1: not JSON: line 3 has a comma before }, which JSON does not have: .*",
        '"ä",',
    ),
    "a comma at the end of a list": (
        '[{"text": "a",\n"l": [1,\n2,\n\n]}]',
        r"a.json:1, record 1: not JSON: line 3 has a comma before \], which",
        "2,",
    ),
    "a comma at the end of the array": (
        '[{"text": "a"},\n{"text": "b"},\n\n]',
        r"a.json:4, record 3: not JSON: line 2 has a comma without an element behind it; leave it",
        '"b"},',
    ),
    "two commas": (
        '[{"text": "a"},\n,\n{"text": "b"}]',
        r"a.json:2, record 2: not JSON: line 1 has a comma without an element behind it; leave it",
        '"a"},',
    ),
    "a comma at the beginning": (
        '[\n,{"text": "a"}]',
        r"a.json:2, record 1: not JSON: line 2 has a comma without an element before it; leave it",
        "\n,",
    ),
    "a comment before": (
        '[\n  // first try\n  {"text": "a"}\n]',
        r"a.json:2, record 1: not JSON: line 2 has a comment, which JSON does not have: .*first",
        "// first try",
    ),
    "a comment within": (
        '[\n  {"text":\n  /* a, b */ "a"}\n]',
        r"a.json:2, record 1: not JSON: line 3 has a comment, which",
        "/* a, b */",
    ),
    "a comment before the array": (
        '# tries\n[{"text": "a"}]',
        "a.json:1: not JSON: the line has a comment, which",
        "# tries",
    ),
    "an object over several lines": (
        '{\n  "text": "a",\n}\n',
        r"a.json:1: not JSON: line 2 has a comma before }, which",
        '"a",',
    ),
    "a line": (
        '{"text": "a"},\n',
        "a.json:1: not JSON: the line has a comma at its end",
        "},",
    ),
}


@pytest.mark.parametrize("case", OF_JAVASCRIPT)
def test_what_json_does_not_have_is_named_with_its_line(case: str, tmp_path: Path):
    """Once it is left out, ``json`` reads the file."""
    content, says, near = OF_JAVASCRIPT[case]
    path = tmp_path / "a.json"
    path.write_text(content)
    settings = {"path": str(path), "eval_fraction": 0}
    config = Config.load({"model": {"preset": "debug"}, "data": settings}, environ={})
    with pytest.raises(ConfigError, match=says):
        list(Source.of(config.data, ByteTokenizer()).documents())
    kept = "" if "comment" in case else near.replace(",", "")
    mended = content.replace(near, kept, 1)
    path.write_text(mended)
    right = json.loads(mended)
    assert values_of(path) == (right if isinstance(right, list) else [right])


def test_an_element_that_is_too_large_is_a_bad_record_and_the_run_goes_on(
    tmp_path: Path, monkeypatch, caplog
):
    """It is handled like an oversized line; nothing of it is held, whatever it contains."""
    monkeypatch.setattr("moetrain.data.containers._MOST_BYTES", 1 << 16)
    large = {"text": ['\\"[{,' * 9, "\\" * (1 << 17)] * 9, "more": [[]] * (1 << 17)}
    rows = [{"text": f"text number {i}"} for i in range(40)]
    rows[7] = large
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = []
    for name in ("a.json", "a.jsonl"):
        settings = {"path": str(tmp_path / name), "cache_dir": str(tmp_path / "cache")}
        settings |= {"bad_records": "skip", "seq_len": 32, "eval_fraction": 0}
        config = Config.load({"model": {"preset": "debug"}, "data": settings}, environ={})
        tracemalloc.start()
        documents = list(Source.of(config.data, ByteTokenizer()).documents())
        assert tracemalloc.get_traced_memory()[1] < (1 << 22) + (1 << 19)
        tracemalloc.stop()
        found.append([document.text for document in documents])
        build_data(config, 257)
        assert "1 bad records were left out" in caplog.text
        place = r"a\.json:23, record 8" if name == "a.json" else r"a\.jsonl:8"
        assert re.search(rf"1 such as .*{place}: the record has more than", caplog.text)
        caplog.clear()
    assert found[0] == found[1] == [row["text"] for row in rows if row is not large]


def test_an_array_is_streamed_as_lines_are(tmp_path: Path, token_cache: Path):
    rows = [{"text": f"text number {i} " * 20} for i in range(400)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = []
    for name in ("a.json", "b.jsonl"):
        settings = {"path": str(tmp_path / name), "seq_len": 512, "cache_dir": str(token_cache)}
        settings |= {"streaming": "yes", "workers": 0, "packing": "whole", "eval_fraction": 0}
        config = Config.load({"model": {"preset": "debug"}, "data": settings}, environ={})
        train = build_data(config, 257).train
        tokens = [train.row(i).tokens_S for i in range(len(train))]
        texts = [bytes(x for x in row if x not in (0, 256)).decode() for row in tokens]
        found.append({*texts})
    assert found[0] == found[1] == {row["text"] for row in rows}


FOLDERS = {
    "arrays": ({"a.json": "[]", "b.json": "[]", "c/d.json.gz": ""}, "a.json b.json c/d.json.gz"),
    "about them": ({"a.json": "[]", "dataset_infos.json": "{}", "config.json": "{}"}, "a.json"),
    "lines beside": ({"a.json": "[]", "b.jsonl": ""}, "b.jsonl"),
    "LLaMA-Factory's": ({"a.json": "[]", "dataset_info.json": "{}"}, "a.json"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_files_of_arrays_in_a_folder_that_has_no_others(case: str, tmp_path: Path, caplog):
    caplog.set_level("INFO")
    files, wanted = FOLDERS[case]
    assert found_in(tmp_path, files) == wanted
    said = "not read beside its records: 1 .json; to read those of one kind alone, name them as '"
    assert (said in caplog.text) == (case == "lines beside")


def test_what_is_read_of_a_folder_and_what_is_not_is_said(tmp_path: Path, caplog):
    """PG-19 has a book in each file, and a table about them."""
    caplog.set_level("INFO")
    for name in ("train/10.txt", "train/11.txt", "metadata.csv", "LICENSE"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("A book")
    found, _ = find_records("data.path", str(tmp_path), "train", None)
    texts = f"to read those of one kind alone, name them as '{tmp_path}/**/*.txt'"
    assert [file.name for file in found] == ["metadata.csv"]
    assert f"not read beside its records: 2 .txt, 1 LICENSE; {texts}" in caplog.text
    assert len(list_files("data.path", str(tmp_path))) == 4
    assert f"all files are read as texts: 2 .txt, 1 LICENSE, 1 .csv; {texts}" in caplog.text
    caplog.clear()
    books = list_files("data.path", f"{tmp_path}/**/*.txt")
    assert [file.name for file in books] == ["10.txt", "11.txt"]
    assert not caplog.text


@pytest.mark.parametrize("name", ["README_en.md", "LICENSE.txt", "LICENSE", "data_card.md"])
def test_documentation_beside_records_is_counted_alone(name: str, tmp_path: Path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / name).write_text("About it")
    find_records("data.path", str(tmp_path), "train", None)
    kind = "." + name.split(".")[1] if "." in name else name
    assert caplog.messages == [f"{tmp_path}: not read beside its records: 1 {kind}"]
    caplog.clear()
    (tmp_path / "b.rst").write_text("A text")
    find_records("data.path", str(tmp_path), "train", None)
    assert f"name them as '{tmp_path}/**/*.rst'" in caplog.text
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "b.rst").unlink()
    with pytest.raises(ConfigError, match=r"; name a file, or a folder with some$"):
        find_records("data.path", str(tmp_path), "train", None)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"a.jsonl": "{}", "b.md": "Of b", "c.md": "Of c", "d.txt": "Of d"}, "*.md'"),
        ({"a.jsonl": "{}", "b.md": "Of b", "d.txt": "Of d"}, "*.txt'"),
        ({"a.jsonl": "{}", "b.png": "\0", "c.png": "\0", "d.rst": "Of d"}, "*.rst'"),
        ({"a.jsonl": "{}", "b.zip": "x", "c.zip": "x", "d.rst": "Of d"}, "*.rst'"),
        ({"a.jsonl": "{}", "b.ipynb": "{", "d.ipynb": "{"}, "*.ipynb' with data.source text"),
    ],
)
def test_the_kind_with_the_most_files_is_named_as_it_is_read(
    files: dict[str, str], named: str, tmp_path: Path, caplog
):
    caplog.set_level("INFO")
    found_in(tmp_path, files)
    said = f"of one kind alone, name them as '{tmp_path}/**/{named}, or set data.source text"
    assert said in caplog.text
    if not named.endswith("data.source text"):
        data = {"path": f"{tmp_path}/**/{named[:-1]}"}
        config = Config.load({"model": {"preset": "debug"}, "data": data}, environ={})
        assert config.data.source == "text"


def test_a_pattern_leaves_out_what_describes_a_set(tmp_path: Path):
    found_in(tmp_path, {"a.json": "[]", "dataset_info.json": "{}"})
    files, _ = find_records("data.path", f"{tmp_path}/*.json", "train", None)
    assert [file.name for file in files] == ["a.json"]


OBJECT = {"problem": "1 + 1?\n", "solution": "2", "more": [{"a": "}"}]}


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".JSON"])
@pytest.mark.parametrize("indent", [0, 1, "\t"])
@pytest.mark.parametrize("before", ["", "\n \n", "\ufeff"], ids=repr)
def test_a_json_file_that_is_one_object_is_one_record(
    before: str, indent: int | str, suffix: str, tmp_path: Path
):
    """MATH has a file for each of its 12,500 problems."""
    path = tmp_path / f"a{suffix}"
    content = (before + json.dumps(OBJECT, indent=indent) + "\n").encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert values_of(path) == [OBJECT]
    files = Files("data.path", str(path), [path])
    assert [piece.start for piece in files.pieces(line_bytes=8)] == [0]
    (raw,) = (raw for piece in files.pieces(line_bytes=8) for raw in files.records(piece))
    assert raw.where == f"{path}:1"
    assert raw.num_bytes == len(content)


def test_json_files_of_one_object_are_learned_like_lines(tmp_path: Path):
    chats = [{"instruction": f"q{i}", "output": f"a{i}"} for i in range(3)]
    for i, chat in enumerate(chats):
        (tmp_path / f"{i}.json").write_text(json.dumps(chat, indent=2))
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(map(json.dumps, chats)))
    found = learned_of(f"{tmp_path}/*.json")
    assert len(found) == 3
    assert found == learned_of(str(lines))


def learned_of(path: str) -> list[tuple[str, object]]:
    given = {"model": {"preset": "debug"}, "data": {"path": path}}
    source = Source.of(Config.load(given).data, ByteTokenizer())
    return [(document.text, document.loss_spans) for document in source.documents()]


def test_an_object_over_lines_is_refused_with_what_it_is(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(OBJECT, indent=1))
    says = (
        r"not JSON: the line ends before its object or list does: b'\{\\n'; give each object one "
    )
    says += r"line, or all in one array: .*; or give each file one object, and a name that ends in"
    with pytest.raises(BadLineError, match=says):
        values_of(path)
    path.rename(path := tmp_path / "a.json")
    assert values_of(path) == [OBJECT]
    path.write_text(json.dumps(OBJECT, indent=1)[:-1])
    with pytest.raises(
        BadLineError, match=r"not JSON: the file ends before its object does: .*; it"
    ):
        values_of(path)
    path.write_text(json.dumps(OBJECT, indent=1) * 2)
    with pytest.raises(
        BadLineError, match=r"not JSON: Extra data: .*; give each object one line, or"
    ):
        values_of(path)


def test_a_large_object_is_skipped(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("moetrain.data.containers._MOST_BYTES", 40)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(OBJECT, indent=1))
    with pytest.raises(BadLineError, match="the record has more than"):
        values_of(path)


@pytest.mark.parametrize(
    ("encoding", "says"),
    [
        ("utf-16", "begins with FF FE, so it is UTF-16; write the file as UTF-8"),  # PowerShell's
        ("latin-1", "not JSON: 'utf-8' codec .*; write the file as UTF-8"),
    ],
)
def test_lines_in_another_encoding_are_told_of_utf_8(encoding: str, says: str, tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "é"}\n{"text": "b"}\n', encoding=encoding)
    with pytest.raises((BadLineError, ConfigError), match=says):
        values_of(path)


def source_of(path: Path) -> str:
    return Config.load({"model": {"preset": "debug"}, "data": {"path": str(path)}}).data.source


def test_a_folder_of_txt_files_is_text(tmp_path: Path):
    (tmp_path / "texts" / "more").mkdir(parents=True)
    (tmp_path / "texts" / "more" / "a.txt").write_text("a")
    (tmp_path / "texts" / ".hidden").write_text("a")
    assert source_of(tmp_path / "texts") == "text"
    (tmp_path / "texts" / "b.jsonl").write_text('{"text": "b"}')
    assert source_of(tmp_path / "texts") == "records"
    assert source_of(tmp_path / "nothing") == "records"  # a name on the hub has no suffix
