"""Bad records and chats longer than a row are left out, and reported."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from moetrain.config import Config, ConfigError
from moetrain.data.documents import BadRecordError, Skipped
from moetrain.data.loader import build_data
from moetrain.data.messages import BadLineError

STRICT = (  # templates of Mistral and Gemma refuse turns like this
    "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{{- '<' + m.role + '>' + m.content + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"
)


def chat(*said: str) -> str:
    roles = ["user", "assistant"] * len(said)
    turns = [{"role": r, "content": s} for r, s in zip(roles, said, strict=False)]
    return json.dumps({"messages": turns})


GOOD = [chat(f"{i}?", f"{i}!" * (1 + i % 3)) for i in range(12)]
TWICE = json.dumps({"messages": [{"role": "user", "content": "a"}] * 2})
BAD = {
    "cut short": GOOD[0][:20],
    "a list": "[1, 2]",
    "no known form": '{"question": "a?", "reply": "b"}',
    "refused by the template": TWICE,
    "a role alone": '{"messages": [{"role": "assistant"}]}',
    "no turns": '{"messages": []}',
}


def built(path: Path, cache: Path, **values: object):
    """Return the rows of ``path``, sorted."""
    template = path.with_name("t.jinja")
    template.write_text(STRICT)
    settings = {"path": str(path), "seq_len": 64, "cache_dir": str(cache), "eval_fraction": 0}
    settings |= {"chat_template": str(template), **values}
    train = {"objective": settings.pop("objective", "next_token")}
    given = {"model": {"preset": "debug"}, "data": settings, "train": train}
    return build_data(Config.load(given, environ={}), 257)


def tokens_of(data) -> set[bytes]:
    rows = [data.train.row(i) for i in range(len(data.train))]
    ends = [np.cumsum(row.lengths) for row in rows]
    parts = [np.split(r.tokens_S, e[:-1]) for r, e in zip(rows, ends, strict=True)]
    return {bytes(x for x in part if x not in (0, 256)) for row in parts for part in row}


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("streaming", ["no", "yes"])
@pytest.mark.parametrize("case", BAD)
def test_bad_records_are_left_out_and_named(case: str, streaming: str, tmp_path: Path, caplog):
    lines = [*GOOD[:5], BAD[case], *GOOD[5:], BAD[case]]
    path, good = write(tmp_path / "a.jsonl", *lines), write(tmp_path / "b.jsonl", *GOOD)
    how = {"streaming": streaming, **({"workers": 0} if streaming == "yes" else {})}
    with pytest.raises(ConfigError, match=r"a\.jsonl:6: "):
        built(path, tmp_path / "cache", **how)
    wanted = tokens_of(built(good, tmp_path / "cache", **how))
    assert len(wanted) == len(GOOD)
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        assert tokens_of(built(path, tmp_path / "cache", **how, bad_records="skip")) == wanted
        said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert len(said) == 2
        assert said[0].endswith("a.jsonl: 2 bad records were left out")
        assert re.match(r"2 such as .*a\.jsonl:6: ", said[1])


def test_each_kind_of_bad_records_has_an_example(tmp_path: Path, caplog):
    shown = {"cut short": 5, "refused by the template": 1, "no turns": 2}
    lines = [line for name, count in shown.items() for line in [BAD[name]] * count]
    lines += [json.dumps({"messages": [{"role": "assistant", "content": i}]}) for i in range(3)]
    lines += [json.dumps({"prompt": "{; ['"}), json.dumps({"body": 1}), json.dumps({"prompt": "b"})]
    path = write(tmp_path / "a.jsonl", *GOOD, *lines)
    for fraction in (0, 0.3):
        caplog.clear()
        built(path, tmp_path / "cache", bad_records="skip", eval_fraction=fraction)
        said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert said[0].endswith("a.jsonl: 14 bad records were left out")
        found = [re.fullmatch(r"(\d+) such as .*?a\.jsonl:(\d+): (.*)", each) for each in said[1:]]
        places = [(int(each[1]), int(each[2])) for each in found if each]
        assert [count for count, _ in places] == [5, 3, 2, 2, 1, 1]
        if not fraction:
            assert [line for _, line in places] == [13, 21, 19, 24, 18, 25]


def test_ten_kinds_are_shown_and_the_others_counted(caplog):
    first, second = Skipped(), Skipped()
    for skipped, letters in ((first, "aabcdefgh"), (second, "ghijjklaa")):
        for i, letter in enumerate(letters):
            reason = f"{letter}[{i}] is missing: {{'a': {i}}}; give it"
            skipped.add(BadRecordError("data.path", f"f:{i}", BadLineError(reason)))
    first.merge(second)
    first.warn("f")
    said = [r.getMessage() for r in caplog.records]
    assert said[:2] == [
        "f: 18 bad records were left out",
        "4 such as f:0: a[0] is missing: {'a': 0}; give it",
    ]
    counts = {each.split()[4][0]: int(each.split()[0]) for each in said[1:-1]}
    assert counts == dict.fromkeys("bcdefi", 1) | {"a": 4, "g": 2, "h": 2, "j": 2}
    assert said[-1] == "2 of other kinds"


@pytest.mark.parametrize("kind", ["lines", "gz", "parquet", "arrow"])
def test_a_record_that_is_too_large_is_left_out(kind: str, tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr("moetrain.data.containers._MOST_BYTES", 3000)
    monkeypatch.setattr("moetrain.data.containers._LINE_PART", 700)
    records = [json.loads(line) for line in GOOD]
    large = json.loads(chat("a", "b" * 9000))
    records[4:4] = [large]
    records.append(large)
    path = write_records(tmp_path, kind, records)
    with pytest.raises(ConfigError, match=r"data\.path: .*: the record has more than 0 MiB; make"):
        built(path, tmp_path / "cache")
    found = tokens_of(built(path, tmp_path / "cache", bad_records="skip"))
    assert found == tokens_of(built(write(tmp_path / "b.jsonl", *GOOD), tmp_path / "cache"))
    assert "2 bad records were left out" in caplog.text
    assert re.search(r"2 such as .*: the record has more than 0 MiB", caplog.text)


def write_records(folder: Path, kind: str, records: list[dict]) -> Path:
    """Write a file of ``kind``: lines without a final newline, or a table."""
    text = "\n".join(map(json.dumps, records))
    if kind == "lines":
        return write(folder / "a.jsonl", text)
    if kind == "gz":
        path = folder / "a.jsonl.gz"
        path.write_bytes(gzip.compress(text.encode()))
        return path
    pa = pytest.importorskip("pyarrow")
    table, path = pa.Table.from_pylist(records), folder / f"a.{kind}"
    if kind == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    return path


def test_a_source_of_bad_records_alone_is_refused(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", TWICE, TWICE)
    for fraction in (0, 0.5):
        with pytest.raises(ConfigError, match=r"data.path: .* holds no text; the first bad .*:1: "):
            built(path, tmp_path / "cache", bad_records="skip", eval_fraction=fraction)


def test_a_pair_of_which_one_answer_is_bad_is_left_out_whole(tmp_path: Path):
    pairs = [{"prompt": f"{i}", "chosen": "good", "rejected": "bad"} for i in range(6)]
    lines = [*map(json.dumps, pairs), json.dumps(pairs[0] | {"rejected": 3})]
    settings = {"objective": "dpo", "bad_records": "skip"}
    data = built(write(tmp_path / "a.jsonl", *lines), tmp_path / "cache", **settings)
    assert len(data.train) == len(pairs)


LONG = [chat("a", "b" * 80), chat("c", "d" * 90)]


def test_chats_longer_than_a_row_are_cut_left_out_or_refused(tmp_path: Path, caplog):
    caplog.set_level("INFO")
    path, cache = write(tmp_path / "a.jsonl", *GOOD[:3], *LONG), tmp_path / "cache"
    short = write(tmp_path / "b.jsonl", *GOOD[:3])
    assert len(tokens_of(built(path, cache))) == 5
    assert "; 2 longer than a row were cut, " in caplog.text
    caplog.clear()
    assert tokens_of(built(path, cache, overlong="drop")) == tokens_of(built(short, cache))
    assert "packed 5 conversations into 2 rows of 64" in caplog.text
    assert "; 2 longer than a row were left out" in caplog.text
    assert "nothing to learn" not in caplog.text
    identities = [built(path, cache, overlong=x).train.identity for x in ("cut", "drop")]
    assert identities[0] != identities[1]
    with pytest.raises(ConfigError) as raised:
        built(path, cache, overlong="error")
    problem = (
        r"data\.overlong: 'error', and 2 are longer than data\.seq_len 64, the longest has (\d+)"
    )
    found = re.fullmatch(
        problem + r" tokens; raise data\.seq_len to \1, or set data\.overlong drop",
        str(raised.value),
    )
    longest = int(found[1])
    assert len(tokens_of(built(path, cache, overlong="error", seq_len=longest))) == 5
    with pytest.raises(ConfigError, match="1 are longer"):  # a last token needs no room
        built(path, cache, overlong="error", seq_len=longest - 2)


def test_a_text_longer_than_a_row_is_no_chat(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "a" * 300}), *GOOD)
    rows = [built(path, tmp_path / "cache", overlong=x) for x in ("cut", "drop", "error")]
    assert tokens_of(rows[0]) == tokens_of(rows[1]) == tokens_of(rows[2])


def test_pairs_longer_than_a_row_end_the_run_if_asked_to(tmp_path: Path):
    pairs = [{"prompt": "a", "chosen": "b" * n, "rejected": "c" * n} for n in (5, 9, 70)]
    path = write(tmp_path / "a.jsonl", *map(json.dumps, pairs))
    data = built(path, tmp_path / "cache", objective="dpo")
    assert len(data.train) == 2
    with pytest.raises(ConfigError, match=r"data\.overlong: 'error', and 1 are .* has 144 tokens"):
        built(path, tmp_path / "cache", objective="dpo", overlong="error")
