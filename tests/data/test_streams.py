"""Streams: blocks are tokenised during training, and the position in them is saved."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from moetrain.config import Config, ConfigError
from moetrain.data import cache
from moetrain.data.chat import CHATML
from moetrain.data.documents import HashRange
from moetrain.data.loader import Data, Loader, build_data
from moetrain.data.packing import Streamed
from moetrain.data.sources import Source
from moetrain.data.tokenizer import ByteTokenizer
from tests.lib.data_files import BYTE_VOCAB, write_lines
from tests.lib.record_forms import CONTAINERS


@pytest.fixture(autouse=True)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    if "large" in request.node.name:
        return
    monkeypatch.setattr(cache, "_BLOCK_BYTES", 2000)
    monkeypatch.setattr("moetrain.data.sources._PART_BYTES", 500)


def streamed(tmp_path: Path, path: object, seed: int = 0, **data: object) -> Data:
    settings = {"path": str(path), "seq_len": 8, "cache_dir": str(tmp_path / "cache")}
    settings |= {"eval_fraction": 0, "streaming": "yes", "workers": 0}
    base = {"model": {"preset": "debug"}, "train": {"seed": seed}}
    return build_data(Config.load({**base, "data": settings | data}), BYTE_VOCAB)


def test_readers_of_records_travel_to_other_processes(tmp_path: Path):
    """A process that tokenises blocks gets the readers pickled."""
    tokenizer, path = ByteTokenizer(), write_lines(tmp_path / "chats.jsonl", [{"text": "a"}])
    for words in ([], ['data.chat_template_kwargs={"thinking": true}']):
        data = Config.load(None, ["data.source=records", f"data.path={path}", *words]).data
        source = Source.of(data, tokenizer)
        again, _ = pickle.loads(pickle.dumps((source, tokenizer)))
        assert again.identity() == source.identity()


def records(count: int = 2000) -> list[dict]:
    return [{"text": f"{i:07d}"} for i in range(count)]


def texts(data: Data, start: int, stop: int) -> list[str]:
    """Return the documents of samples; each fills a row of eight, with its EOS last."""
    assert isinstance(data.train, Streamed)
    rows = [data.train.sample(i) for i in range(start, stop)]
    return [bytes(row.tokens_S[:-1].tolist()).decode() for row in rows]


@pytest.mark.tier("long", quick=["a.jsonl.zstd", "splits"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_pass_has_every_record_once_in_another_order(container: str, tmp_path: Path):
    path = CONTAINERS[container](
        tmp_path / container, records(200 if "parquet" in container else 2000)
    )
    data = streamed(tmp_path, path)
    count = 200 if "parquet" in container else 2000
    found = texts(data, 0, 2 * count)
    every = [record["text"] for record in records(count)]
    assert sorted(found[:count]) == sorted(found[count:]) == every
    assert found[:count] != found[count:]
    assert found[:count] != every
    assert texts(streamed(tmp_path, path), 0, 50) == found[:50]
    assert texts(streamed(tmp_path, path, seed=1), 0, 50) != found[:50]


@pytest.mark.parametrize("done", [0, 1, 33, 300])
@pytest.mark.parametrize("container", ["a.jsonl", "a.jsonl.gz", "saved"])
def test_a_resumed_stream_gives_the_same_samples_on_other_ranks(
    container: str, done: int, tmp_path: Path
):
    path = CONTAINERS[container](tmp_path / container, records())
    whole = Loader(streamed(tmp_path, path).train, 8, 2, seed=0)
    for _ in range(done):
        whole.next_step()
    state = json.loads(json.dumps(whole.state()))
    want = [batch.tokens_BS.tolist() for step in range(40) for batch in whole.next_step()]
    shutil.rmtree(tmp_path / "cache")
    for ranks in (1, 2):
        found = []
        for rank in range(ranks):
            loader = Loader(
                streamed(tmp_path, path).train, 8, 2, seed=0, rank=rank, world_size=ranks
            )
            loader.resume(state)
            mine = [batch.tokens_BS.tolist() for step in range(40) for batch in loader.next_step()]
            found.append(mine)
        assert [found[i % ranks][i // ranks] for i in range(160)] == want


def test_going_back_a_step_gives_the_same_samples(tmp_path: Path):
    data = streamed(tmp_path, write_lines(tmp_path / "a.jsonl", *records()))
    assert isinstance(data.train, Streamed)
    found = texts(data, 0, 900)
    assert texts(data, 880, 900) == found[880:]
    assert texts(data, 0, 10) == found[:10]
    assert len(data.train) == pytest.approx(2000, rel=0.4)


def test_a_resumed_stream_that_was_not_read_is_still_where_it_was(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", *records())
    stream = streamed(tmp_path, path).train
    stream.sample(1500)
    state = stream.state(1500)
    assert state[0] > 1000
    again = streamed(tmp_path, path).train
    again.resume(state)
    assert again.state(1500) == state
    assert again.state(7) == [0, 0, 0, 0]


@pytest.mark.tier("long")
def test_processes_make_the_same_blocks_ahead(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", *records())
    want = texts(streamed(tmp_path, path), 0, 2000)
    shutil.rmtree(tmp_path / "cache")
    data = streamed(tmp_path, path, workers=2)
    assert texts(data, 0, 300) == want[:300]
    made = len(list((tmp_path / "cache").glob("*/*-*/meta.json")))
    for _ in range(1200):
        ahead = len(list((tmp_path / "cache").glob("*/*-*/meta.json")))
        if ahead > made:
            break
        time.sleep(0.05)
    assert ahead > made
    assert texts(data, 300, 2000) == want[300:]


UNGUARDED = """\
import sys
import time
from pathlib import Path

from moetrain.config import Config
from moetrain.data import cache, loader, sources

print("begun", flush=True)
cache._BLOCK_BYTES, sources._PART_BYTES = 2000, 500
config = Config.load(None, sys.argv[1:])
data = loader.build_data(config, 512)
start = time.monotonic()
loader.Loader(data.train, 2, 2, seed=0).next_step()
print(time.monotonic() - start < 2, flush=True)
while not (ahead := list(Path(config.data.cache_dir).glob("*/[1-9]*-*/meta.json"))):
    time.sleep(0.05)
"""


@pytest.mark.tier("long")
def test_a_program_without_a_guard_has_its_blocks_made_and_waits_for_no_process(tmp_path: Path):
    """The processes take three seconds to start, and get more data than a pipe holds."""
    write_lines(tmp_path / "a.jsonl", *records())
    (tmp_path / "slow").mkdir()
    slow = "import sys, time\ntime.sleep(3 * ('--multiprocessing-fork' in sys.orig_argv))"
    (tmp_path / "slow" / "sitecustomize.py").write_text(slow)
    (tmp_path / "long.jinja").write_text("{#" + " " * 300_000 + "#}" + CHATML)
    (tmp_path / "program.py").write_text(UNGUARDED)
    words = ["model.preset=debug", "data.seq_len=8", "data.eval_fraction=0", "data.streaming=yes"]
    words += [f"data.path={tmp_path}/a.jsonl", f"data.cache_dir={tmp_path}/cache"]
    words += ["data.workers=2", f"data.chat_template={tmp_path}/long.jinja"]
    paths = os.pathsep.join([str(tmp_path / "slow"), *sys.path])
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), *words],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["begun", "True"]
    assert "RuntimeError" not in ended.stderr


def test_held_out_records_are_in_no_block(tmp_path: Path):
    data = streamed(tmp_path, write_lines(tmp_path / "a.jsonl", *records()), eval_fraction=0.2)
    assert data.eval is not None
    rows = map(data.eval.row, range(len(data.eval)))
    held_out = {bytes(row.tokens_S[:-1].tolist()).decode() for row in rows}
    trained = set(texts(data, 0, 1800))
    assert 100 < len(held_out) < 500
    assert not held_out & trained
    with pytest.raises(ConfigError, match=r"data\.eval_fraction: 1e-05: the first blocks .* hold"):
        streamed(tmp_path, tmp_path / "a.jsonl", eval_fraction=1e-5)


def test_blocks_without_answers_are_packed_as_the_first_one_that_has_some(tmp_path: Path):
    """A row has room for one document. Documents laid end to end would be cut."""
    answers = [{"prompt": f"{i:05d}", "completion": f"{i:06d}"} for i in range(300)]
    lines = [*answers, *({"text": f"{i:011d}"} for i in range(1000))]
    data = streamed(tmp_path, write_lines(tmp_path / "a.jsonl", *lines), seq_len=16)
    assert isinstance(data.train, Streamed)
    rows = [data.train.sample(i) for i in range(len(lines))]
    found = [bytes(row.tokens_S[:11].tolist()).decode() for row in rows]
    assert sorted(found) == sorted("".join(line.values()) for line in lines)


@pytest.mark.parametrize("names", [["one.txt"], ["a.txt", "b.txt", "c.txt"]])
def test_texts_are_divided_between_the_lines(names: list[str], tmp_path: Path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("".join(f"{name[0]}{i:05d}\n" for i in range(900)))
    config = Config.load(overrides=[f"data.path={folder}", "data.source=text"])
    source = Source.of(config.data, ByteTokenizer())
    both = [HashRange(0, 0.3), HashRange(0.3, 1)]
    parts = [sorted(source.file_parts(share)) for share in both]
    assert all(parts)
    found = [found for part in sorted(parts[0] + parts[1]) for found in source.read(part, both[0])]
    want = "".join((folder / name).read_text() for name in names)
    assert "".join(each.text for each in found) == want
    assert all(each.text.endswith("\n") for each in found)
    assert len(streamed(tmp_path, folder, source="text", eval_fraction=0.3).eval or ()) > 50


def test_used_blocks_go_when_the_disk_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_lines(tmp_path / "a.jsonl", *records())
    full = SimpleNamespace(total=100, free=9)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda folder: full)
    data = streamed(tmp_path, path)
    found = texts(data, 0, 2500)
    assert len(list((tmp_path / "cache").glob("*/*-*/meta.json"))) <= 8
    full.free = 11
    assert texts(streamed(tmp_path, path), 0, 2500) == found
    assert len(list((tmp_path / "cache").glob("*/*-*/meta.json"))) > 8


def test_auto_streams_what_is_big_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_lines(tmp_path / "a.jsonl", *records())
    assert not isinstance(streamed(tmp_path, path, streaming="auto").train, Streamed)
    monkeypatch.setattr("moetrain.data.loader._STREAMED_BYTES", 1000)
    assert isinstance(streamed(tmp_path, path, streaming="auto").train, Streamed)
    assert not isinstance(streamed(tmp_path, path, streaming="no", workers=None).train, Streamed)


def test_a_bad_record_of_a_later_block_is_named(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", *records(), {"text": 5})
    data = streamed(tmp_path, path)
    with pytest.raises(ConfigError, match=r"data\.path: .*a\.jsonl:byte \d+: 'text' is not text"):
        texts(data, 0, 2001)


@pytest.mark.tier("long")
def test_the_first_batch_of_a_large_source_comes_in_seconds(tmp_path: Path):
    line = json.dumps({"text": "all work and no play makes jack a dull boy " * 46}) + "\n"
    with (tmp_path / "a.jsonl").open("w") as file:
        for i in range(1000):
            file.write(line.replace("jack", f"jack {i}") * 100)
    assert (tmp_path / "a.jsonl").stat().st_size > 190_000_000
    start = time.monotonic()
    settings = {"streaming": "auto", "workers": 1, "seq_len": 256, "eval_fraction": 0.02}
    data = streamed(tmp_path, tmp_path / "a.jsonl", **settings)
    Loader(data.train, 16, 16, seed=0).next_step()
    assert time.monotonic() - start < 15
    assert data.eval is not None
    assert 600_000 < len(data.train) < 900_000
