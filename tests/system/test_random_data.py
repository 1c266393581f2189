"""Random mixtures and streams that stop at random steps and resume on other numbers of ranks.

Each case is drawn by its number: sources (their containers, records, weights, repeats, limits),
packing, streaming, batches, and where the run stops. The rows read with stops must equal those
without. A plain count checks that each pass over a source has each of its records once, that the
shares are right, and that no held-out record is trained on. ``RANDOM_DATA`` selects cases; by
default there are a few:

    RANDOM_DATA=100:1000 python -m pytest tests/system/test_random_data.py  100 from 1000 on
"""

import gzip
import json
import os
import random
import shutil
from collections import Counter

import pytest

from moetrain.config import Config
from moetrain.data import cache
from moetrain.data.loader import Loader, build_data
from tests.lib.data_files import BYTE_VOCAB

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
END = 256


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(cache, "_BLOCK_BYTES", 2000)
    monkeypatch.setattr("moetrain.data.sources._PART_BYTES", 500)


def write_source(d, folder, letter, count, has_lengths):
    """Write ``count`` texts that begin with ``letter``; return the file and the texts."""
    pads = (d.randrange(9) if has_lengths else 1 for _ in range(count))
    texts = [f"{letter}{i:05d}{'x' * pad}" for i, pad in enumerate(pads)]
    records, kind = [{"text": text} for text in texts], d.choice(["jsonl", "jsonl.gz", "parquet"])
    file = folder / f"{letter}.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(records), file, row_group_size=d.choice([7, 50]))
    else:
        with (gzip.open if kind.endswith("gz") else open)(file, "wt") as opened:
            opened.writelines(json.dumps(record) + "\n" for record in records)
    return file, texts


def texts_in(tokens):
    """Return the documents of a row; pads are tokens of 0."""
    whole = bytes(token if token != END else 10 for token in tokens if token)
    return whole.decode().split("\n")[:-1]


def rows_of(steps):
    """Return each step's rows, with the ranks' micro-batches in the order of the whole batch."""
    return [row.tolist() for batch in steps for row in batch.tokens_BS]


def compare(number, folder):
    d = random.Random(number)
    has_lengths, kinds = d.random() < 0.6, d.choice([1, 1, 2, 3])
    has_weights, entries, texts = d.random() < 0.6, [], {}
    for letter in "abc"[:kinds]:
        size = d.choice([5, 40, 160, 400])
        file, texts[letter] = write_source(d, folder, letter, size, has_lengths)
        entry = {"path": str(file)}
        if has_weights:
            entry["weight"] = d.choice([0.1, 0.5, 1, 3])
        if d.random() < 0.3:
            entry["repeat"] = d.choice([2, 3])
        if d.random() < 0.25:
            entry["limit"] = d.randint(3, size + 5)
        entries.append(entry)
    is_streamed, held_out = d.random() < 0.5, d.choice([0, 0, 0.2])
    data = {
        "seq_len": 16 if has_lengths else 8,
        "eval_fraction": held_out,
        "cache_dir": str(folder / "cache"),
        "streaming": "yes" if is_streamed else "no",
        "packing": "whole" if has_lengths else "stream",
    }
    data |= {"workers": 0} if is_streamed else {}
    is_mixed = kinds > 1 or len(entries[0]) > 1
    data |= {"mix": entries} if is_mixed else {"path": entries[0]["path"]}
    seed = d.choice([0, 7, 2**31])
    if held_out and is_streamed and min(map(len, texts.values())) < 40:
        return  # too little is held out

    def build():
        base = {"model": {"preset": "debug"}, "train": {"seed": seed}}
        return build_data(Config.load({**base, "data": data}), BYTE_VOCAB)

    batch = d.choice([2, 4, 6, 12])
    given = build()
    whole = Loader(given.train, batch, 1, seed=seed)
    size = len(whole.dataset)
    steps = min(80, max(12, 3 * size // batch + 2))
    straight = [rows_of(whole.next_step()) for _ in range(steps)]
    found, state, keeps_cache = [], None, d.random() < 0.5
    while len(found) < steps:
        count = min(steps - len(found), d.choice([0, 1, 2, 5, 20, 60]))
        ranks = d.choice([n for n in (1, 2, 3, 4) if batch % n == 0])
        micro = d.choice([n for n in (1, 2, 3, 6) if batch % (n * ranks) == 0])
        if not keeps_cache:
            shutil.rmtree(folder / "cache", ignore_errors=True)
        loaders = []
        for rank in range(ranks):
            loader = Loader(build().train, batch, micro, seed=seed, rank=rank, world_size=ranks)
            if state is not None:
                loader.resume(json.loads(json.dumps(state)))
            loaders.append(loader)
        for _ in range(count):
            mine = [loader.next_step() for loader in loaders]
            parts = range(batch // micro)
            found.append(rows_of(mine[part % ranks][part // ranks] for part in parts))
        state = d.choice(loaders).state()
    assert found == straight
    rows = [row for step in straight for row in step]
    trained = check_passes(rows, entries, texts, has_all=not held_out)
    if is_mixed and has_weights:
        shares = Counter(texts_in(row)[0][0] for row in rows[:size])
        whole_weight = sum(entry["weight"] for entry in entries)
        for entry, letter in zip(entries, texts, strict=True):
            wanted = size * entry["weight"] / whole_weight
            assert abs(shares[letter] - wanted) <= 1 + kinds or len(rows) < size
    if held_out:
        sides = [rows for rows, _ in given.sources.values()] or [given.eval]
        kept = {
            text
            for side in sides
            for i in range(len(side))
            for text in texts_in(side.row(i).tokens_S.tolist())
        }
        assert kept
        assert not kept & trained


def check_passes(rows, entries, texts, has_all):
    """Check that passes over a source have the same records, each once; return all records."""
    by_source, trained = {}, set()
    for row in rows:
        found = texts_in(row)
        assert len({text[0] for text in found}) == 1
        by_source.setdefault(found[0][0], []).append(tuple(row))
    for letter, own in by_source.items():
        number = next((i for i, row in enumerate(own) if row in own[:i]), len(own))
        documents = [text for row in own[:number] for text in texts_in(row)]
        assert len(set(documents)) == len(documents)
        trained |= set(documents)
        limit = entries[list(texts).index(letter)].get("limit")
        known = set(texts[letter][:limit])
        assert set(documents) <= known
        if number == len(own):
            continue  # no pass is complete
        assert not has_all or set(documents) == known
        for start in range(0, len(own) - number + 1, number):
            assert set(own[start : start + number]) == set(own[:number])
    return trained


@pytest.mark.tier("long")
def test_rows_are_those_of_a_run_without_stops_and_each_record_comes_once_a_pass(tmp_path):
    count, first = map(int, os.environ.get("RANDOM_DATA", "8:0").split(":"))
    for number in range(first, first + count):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            compare(number, folder)
        except AssertionError:
            print(f"RANDOM_DATA=1:{number} pytest tests/system/test_random_data.py")
            raise
        shutil.rmtree(folder)
