"""Helpers of tests/data/test_formats.py that other tests use too."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moetrain.config import Config
from moetrain.data.loader import build_data
from moetrain.data.packing import Dataset
from tests.lib.chats import bpe_tokenizer
from tests.lib.data_files import write_lines

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

MARKED = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def turns(*said: str) -> list[dict]:
    """Return a dialogue that begins with the user; ``>`` marks a system message."""
    roles = ["system"] * said[0].startswith(">") + ["user", "assistant"] * 4
    return [{"role": r, "content": s} for r, s in zip(roles, said, strict=False)]


# For each form: its records, the dialogue for transformers of each, and the number of leading turns
# that form the prompt, which is not learned.
DIALOGUES = [turns("Hi thére", "Héllo"), turns(">Be brief.", "Hi", "Ho", "And?", "So long")]
ALPACA = [
    {"instruction": "Add", "input": "1 2", "output": "3", "system": None},
    {"instruction": "Bye", "input": "", "output": "So", "system": ">Be"},
]
FORMS: dict[str, tuple[list[dict], list[tuple[list[dict], int]]]] = {
    "messages": (
        [{"messages": d, "id": i} for i, d in enumerate(DIALOGUES)],
        [(d, 0) for d in DIALOGUES],
    ),
    "parts": (
        [
            {"messages": [{**t, "content": [{"type": "text", "text": t["content"]}]} for t in d]}
            for d in DIALOGUES
        ],
        [(d, 0) for d in DIALOGUES],
    ),
    "sharegpt": (
        [
            {
                "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
                "system": None,
            },
            {
                "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "x"}],
                "system": ">Be",
            },
        ],
        [(turns("a", "b"), 0), (turns(">Be", "Hi", "x"), 0)],
    ),
    "alpaca": (ALPACA, [(turns("Add\n\n1 2", "3"), 0), (turns(">Be", "Bye", "So"), 0)]),
    "completion": (
        [
            {"prompt": turns("a", "b", "c"), "completion": turns("", "d")[1:]},
            {"prompt": turns("Hi"), "completion": turns("", "Ho")[1:]},
        ],
        [(turns("a", "b", "c", "d"), 3), (turns("Hi", "Ho"), 1)],
    ),
    "preference": (
        [
            {
                "prompt": turns("Hi"),
                "chosen": turns("", "Héllo")[1:],
                "rejected": turns("", "So")[1:],
            },
            {
                "prompt": None,
                "chosen": turns("a", "b", "c", "d"),
                "rejected": turns("a", "b", "c", "e"),
            },
        ],
        [
            (turns("Hi", "Héllo"), 1),
            (turns("a", "b", "c", "d"), 3),
        ],
    ),
}
TEXTS: dict[str, list[dict]] = {
    "text": [{"text": "Héllo, you."}, {"text": "So long"}],
    "prompted": [{"prompt": "Hi", "completion": " thére"}, {"prompt": "So", "completion": " long"}],
}


def _compressed(write: Callable) -> Callable:
    def written(path: Path, records: list[dict]) -> Path:
        with write(path, "wb") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records).encode())
        return path

    return written


def _saved(path: Path, records: list[dict]) -> Path:
    datasets.Dataset.from_list(records).save_to_disk(path)
    return path


def _saved_splits(path: Path, records: list[dict]) -> Path:
    of_split = datasets.Dataset.from_list(records)
    datasets.DatasetDict({"train": of_split, "test": of_split.select([0])}).save_to_disk(path)
    return path


def _arrow(path: Path, records: list[dict]) -> Path:
    table = pa.Table.from_pylist(records)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    return path


def _parquet(path: Path, records: list[dict]) -> Path:
    parquet.write_table(pa.Table.from_pylist(records), path, row_group_size=1)
    return path


def _array(path: Path, records: list[dict]) -> Path:
    path.write_text(json.dumps(records, indent=2))
    return path


def _csv(path: Path, records: list[dict]) -> Path:
    """Write what is no text as JSON, and nothing for None."""
    names = [*dict.fromkeys(name for record in records for name in record)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for record in records:
            kept = {name: value for name, value in record.items() if value is not None}
            is_text = {name: isinstance(value, str) for name, value in kept.items()}
            writer.writerow({k: v if is_text[k] else json.dumps(v) for k, v in kept.items()})
    return path


CONTAINERS: dict[str, Callable[[Path, list[dict]], Path]] = {
    "a.jsonl": lambda path, records: write_lines(path, *records),
    "a.jsonl.gz": _compressed(gzip.open),
    "a.json": _array,
    "a.csv": _csv,
    "a.jsonl.zst": _compressed(zstandard.open),
    "a.jsonl.zstd": _compressed(zstandard.open),  # Nemotron-CC's
    "a.parquet": _parquet,
    "a.arrow": _arrow,
    "saved": _saved,
    "splits": _saved_splits,
}


def rows_of(path: object, tokenizer: Path, **data: object) -> Dataset:
    settings = {"path": str(path), "tokenizer": str(tokenizer), "eval_fraction": 0, "seq_len": 64}
    settings |= {"cache_dir": str(tokenizer.parent / "cache"), "packing": "whole"}
    config = Config.load({"model": {"preset": "debug"}, "data": settings | data})
    return build_data(config, 1000).train


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    return bpe_tokenizer(folder / "bpe", chat_template=MARKED, eos_token="<|im_end|>")
