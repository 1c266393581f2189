"""Every form in every container is trained on; anything else is refused in one line."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moetrain import Config, Trainer
from moetrain.config import ConfigError
from moetrain.train.metrics import read_metrics
from tests.lib.chat_records import TOOLS
from tests.lib.command_lines import settled
from tests.lib.record_forms import CONTAINERS, FORMS, MARKED, TEXTS, marked, rows_of, turns

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

__all__ = ["marked"]  # a fixture

RECORDS = {form: records for form, (records, _) in FORMS.items()} | TEXTS
RECORDS["tools"] = [{"messages": turns("Hi", "Ho"), "tools": TOOLS}, {"messages": turns("a", "b")}]


@pytest.mark.tier("wide", long=["alpaca", "completion", "messages"])
@pytest.mark.parametrize("form", RECORDS)
def test_a_form_is_trained_on_and_a_container_of_it(
    form: str, marked: Path, tiny_words: list[str], tmp_path: Path
):
    """Nine forms are read from lines and from one of eight other containers.

    Rows and masks of every form in every container are compared with transformers in other tests.
    """
    others = [container for container in CONTAINERS if container != "a.jsonl"]
    other = others[[*RECORDS].index(form) % len(others)]
    records = RECORDS[form] * 8
    words = [word for word in tiny_words if "eval_" not in word and "sample" not in word]
    words += ["train.steps=2", "train.sample_tokens=0", "data.eval_fraction=0"]
    words += ["data.seq_len=64", "data.source=records", f"data.tokenizer={marked}"]
    words += ["model.vocab_size=512", f"data.cache_dir={tmp_path}/cache"]
    if form == "tools":  # the template has to show them
        (tmp_path / "tools.jinja").write_text("{{ tools | tojson if tools }}" + MARKED)
        words += [f"data.chat_template={tmp_path}/tools.jinja", "data.seq_len=256"]
    found = {}
    for container in ("a.jsonl", other):
        path, folder = tmp_path / container, tmp_path / "out" / container
        CONTAINERS[container](path, records)
        own = [f"data.path={path}", f"output_dir={folder}"]
        config = Config.load(None, settled([*words, *own]), environ={})
        assert Trainer(config).fit().step == 2
        rows = read_metrics(folder / "metrics.jsonl")
        found[container] = [row["loss"] for row in rows if "loss" in row]
    first = found["a.jsonl"]
    assert len(first) == 2
    assert all(0 < loss < 8 for loss in first)
    assert all(losses == first for losses in found.values()), found


# ---- what cannot be trained on ------------------------------------------------------------------

LINE = b'{"text": "a line of text"}\n'
GOOD = {"messages": turns("a", "b")}


def _of_bytes(name: str, content: bytes) -> Callable[[Path], Path]:
    def written(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return written


def _of_lines(*records: object) -> Callable[[Path], Path]:
    return _of_bytes("a.jsonl", "".join(json.dumps(each) + "\n" for each in records).encode())


def _of_table(*records: dict, **fields: object) -> Callable[[Path], Path]:
    def written(folder: Path) -> Path:
        schema = pa.schema(list(fields.items())) if fields else None
        table = pa.Table.from_pylist(list(records), schema=schema)
        parquet.write_table(table, folder / "a.parquet")
        return folder / "a.parquet"

    return written


def _mixed_schemas(folder: Path) -> Path:
    parquet.write_table(pa.Table.from_pylist([GOOD]), folder / "a.parquet")
    parquet.write_table(pa.Table.from_pylist([{"q": "x"}]), folder / "b.parquet")
    return folder


def _half_saved(folder: Path) -> Path:
    datasets.Dataset.from_list([GOOD]).save_to_disk(folder / "saved")
    for file in (folder / "saved").glob("*.arrow"):
        file.write_bytes(b"")
    return folder / "saved"


PICTURE = [{"type": "image", "text": None}, {"type": "text", "text": "what is it?"}]
HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a column of nulls": (
        _of_table({"messages": None, "id": 1}, messages=pa.null(), id=pa.int64()),
        r"group 0, row 0: .*no known form, {'id': 1}; known are .* fill or rename its fields",
    ),
    "one null": (_of_lines(GOOD, {"messages": None}), r":2: .* {'messages': None}; .* fill or"),
    "no turns": (_of_lines(GOOD, {"messages": []}), ":2: `messages` is empty: it is a chat wi"),
    "no turns in a table": (_of_table({"messages": []}), "row 0: `messages` is empty: it is a"),
    "no turns of sharegpt": (_of_lines({"conversations": []}), "`conversations` is empty: it is"),
    "text for turns": (_of_lines({"messages": "hi"}), r"turns: 'hi'; give one turn or more"),
    "no answer": (_of_lines({"messages": turns("a")}), r"no assistant turn .*'a'.*leave such"),
    "lists in lists": (
        _of_lines({"messages": [{"role": "user", "content": [["x"]]}]}),
        r"messages\[0\]\.content has a part that is no text: \['x'\]; give texts alone",
    ),
    "a picture": (
        _of_table({"messages": [{"role": "user", "content": PICTURE}]}),
        r"has a part that is no text: {'type': 'image'}; leave such records out",
    ),
    "a turn without content": (
        _of_lines({"messages": [{"role": "user", "content": None}]}),
        r"messages\[0\]\.content is missing or not text: {'role': 'user'}; give text",
    ),
    "tools that are none": (_of_lines({**GOOD, "tools": 5}), r"`tools` is .*: 5; give such a"),
    "tools cut short": (_of_lines({**GOOD, "tools": "[{"}), r"`tools` is .*: '\[{'; write it"),
    "a number for text": (_of_table({"text": 5}), r"'text' is not text: 5; write texts"),
    "a list cut short": (_of_bytes("a.jsonl", b'[\n{"text": "x"}'), r"a\.jsonl.* array has no end"),
    "a list in a list": (_of_lines([[GOOD]]), r":1, record 1: not a JSON object: \[{"),
    "mixed schemas": (_mixed_schemas, r"b\.parquet, group 0, row 0: .*no known form, {'q': 'x'}"),
    "a saved data set cut short": (_half_saved, r"saved' cannot be read: "),
} | {
    f"{what} in {name}": (_of_bytes(name, content), r"cannot be read: .*; it is damaged, cut sh")
    for what, name, content in [
        ("half", "a.jsonl.gz", gzip.compress(LINE * 99)[:-9]),
        ("text", "a.jsonl.gz", LINE),
        ("half", "a.jsonl.zst", zstandard.compress(LINE * 99)[:-3]),
        ("text", "a.jsonl.zst", LINE),
        ("text", "a.parquet", LINE),
        ("nothing", "a.parquet", b""),
        ("text", "a.arrow", LINE),
        ("nothing", "a.arrow", b""),
    ]
}


@pytest.mark.parametrize("streaming", ["no", "yes"])
@pytest.mark.parametrize("case", HOSTILE)
def test_data_that_cannot_be_trained_on_is_refused_in_one_line(
    case: str, streaming: str, marked: Path, tmp_path: Path
):
    write, says = HOSTILE[case]
    path = write(tmp_path)
    settings: dict[str, object] = {"source": "records", "cache_dir": str(tmp_path / "cache")}
    settings |= {"workers": 0} if streaming == "yes" else {}
    with pytest.raises(ConfigError, match=r"^data\.path: .*" + says) as caught:
        rows_of(path, marked, streaming=streaming, **settings)
    said = str(caught.value)
    assert "\n" not in said
    assert str(path) in said
    assert len(said) < 800


def test_a_picture_beside_the_text_of_a_saved_data_set_is_not_decoded(marked: Path, tmp_path: Path):
    fields = {"text": datasets.Value("string"), "picture": datasets.Image()}
    pictures = [{"bytes": b"none", "path": None}] * 20
    columns = {"text": ["a long enough text"] * 20, "picture": pictures}
    table = datasets.Dataset.from_dict(columns, features=datasets.Features(fields))
    table.save_to_disk(tmp_path / "saved")
    assert len(rows_of(tmp_path / "saved", marked)) > 1
