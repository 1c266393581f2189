"""Remote data, larger than the disk quota: none of it is stored."""

import gzip
import json
import random
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from moetrain import Config, Trainer
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.train.metrics import read_metrics

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("aiohttp")

FILES, RECORDS = 4, 100


def _text(number: int) -> str:
    return f"{number:06d}" + random.Random(number).randbytes(5000).hex()


def _write(folder: Path, kind: str) -> None:
    for i in range(FILES):
        records = [{"text": _text(i * RECORDS + j)} for j in range(RECORDS)]
        if kind == "parquet":
            table = pa.Table.from_pylist(records)
            parquet.write_table(table, folder / f"{i}.parquet", row_group_size=10)
            continue
        with gzip.open(folder / f"{i}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str, list[int]]]:
    """Serve a folder; return its address, and a list of the sizes of the pieces sent."""
    folder, sent = tmp_path / "served", []
    folder.mkdir()

    class Handler(SimpleHTTPRequestHandler):
        """Serves whole files, and the requested ranges of them."""

        def do_GET(self) -> None:
            content = Path(self.translate_path(self.path)).read_bytes()
            asked = self.headers.get("Range")
            first, last = 0, len(content) - 1
            if asked:
                start, _, stop = asked.removeprefix("bytes=").partition("-")
                first, last = int(start), min(last, int(stop or last))
            self.send_response(206 if asked else 200)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            self.send_header("Content-Length", str(last + 1 - first))
            self.end_headers()
            sent.append(last + 1 - first)
            self.wfile.write(content[first : last + 1])

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}", sent
    server.shutdown()
    server.server_close()


def _stored(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.tier("wide", long=["jsonl.gz"])
@pytest.mark.parametrize("kind", ["parquet", "jsonl.gz"])
def test_a_remote_source_is_trained_on_and_resumed_without_a_copy(
    kind: str,
    served: tuple[Path, str, list[int]],
    tiny_words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    folder, address, sent = served
    _write(folder, kind)
    caches = tmp_path / "caches"
    caches.mkdir()
    for name in ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, caches / name)
    monkeypatch.setattr("tempfile.tempdir", str(caches))
    tokenizer, read = ByteTokenizer(), []

    def tokens(record: dict[str, str]) -> dict[str, list[int]]:
        read.append(int(record["text"][:6]))
        (encoded,) = tokenizer.encode_batch([record["text"][:32]])
        return {"input_ids": encoded.ids.tolist()}

    def source() -> Any:
        files = [f"{address}/{i}.{kind}" for i in range(FILES)]
        builder = "parquet" if kind == "parquet" else "json"
        records = datasets.load_dataset(builder, data_files=files, split="train", streaming=True)
        return records.map(tokens, remove_columns=["text"])

    words = [w for w in tiny_words if not w.startswith(("data.source", "data.path", "data.eval"))]
    words = [w for w in words if "cache_dir" not in w and "steps=" not in w]
    words += [f"data.cache_dir={caches}/tokens", "checkpoint.interval=60", "checkpoint.keep=9"]

    def train(name: str, *more: str) -> dict[int, float]:
        own = [*words, "train.steps=80", f"output_dir={tmp_path}/{name}", *more]
        result = Trainer(Config.load(None, own, environ={}), data=source()).fit()
        rows = read_metrics(result.folder / "metrics.jsonl")
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    straight = train("straight")
    assert sorted(set(read)) == list(range(320))
    assert sum(sent) > 0.7 * _stored(folder)
    read.clear()
    save = tmp_path / "straight" / "checkpoints" / "step-00000060"
    resumed = train("resumed", f"checkpoint.resume={save}")
    assert resumed == {step: straight[step] for step in range(61, 81)}
    assert min(read) >= 200  # no earlier record was tokenised again
    assert _stored(folder) > 2_000_000
    assert _stored(caches) < 0.01 * _stored(folder)
