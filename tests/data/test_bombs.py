"""Small files that expand to much data are read in bounded memory, or refused in one line."""

import bz2
import gzip
import lzma
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moetrain.config import ConfigError
from moetrain.data import containers, parquet_pages
from moetrain.data.containers import FilePart, Files
from moetrain.data.messages import BadLineError
from moetrain.data.parquet_pages import group_size

MIB = 1 << 20
OPEN = {
    "": lambda path: path.open("wb"),
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda path: pa.output_stream(str(path), compression="zstd"),
}


def records(path, line_bytes=None):
    found = Files("data.path", str(path), [path])
    for piece in found.pieces(line_bytes):
        yield from found.records(piece)


class Counted:
    """A file that records the largest number of bytes that it returned at once."""

    largest = 0

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.inner.close()

    def __iter__(self):
        for line in self.inner:
            self.largest = max(self.largest, len(line))
            yield line

    def readline(self, size=-1):
        line = self.inner.readline(size)
        self.largest = max(self.largest, len(line))
        return line


@pytest.mark.parametrize("suffix", OPEN)
@pytest.mark.parametrize("filling", [b"a", b" "])
def test_a_line_beyond_the_limit_is_refused_with_its_file_and_number(
    tmp_path, monkeypatch, suffix, filling
):
    monkeypatch.setattr(containers, "_MOST_BYTES", MIB, raising=False)
    path = tmp_path / f"bomb.jsonl{suffix}"
    opener = OPEN[suffix]
    with opener(path) if suffix in ("", ".zst") else opener(path, "wb") as file:
        file.write(b'{"text": "first"}\n')
        for _ in range(20):
            file.write(filling * MIB)
        file.write(b'\n{"text": "last"}\n')
    first, large, last = records(path)
    assert (first.value(), last.value()) == ({"text": "first"}, {"text": "last"})
    assert (large.where, large.content) == (f"{path}:2", b"")
    assert last.where == f"{path}:3"
    with pytest.raises(BadLineError, match="the record has more than 1 MiB; make several"):
        large.value()


def test_parts_of_a_file_pass_over_a_line_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "_MOST_BYTES", MIB)
    path = tmp_path / "long.jsonl"
    lines = [b'{"text": "%s"}\n' % (b"a" * size * MIB) for size in (0, 5, 0, 2, 0)]
    path.write_bytes(b"".join(lines).rstrip())
    found = list(records(path, MIB // 2))
    assert [record.problem is None for record in found] == [True, False, True, False, True]
    places = np.cumsum([0, *map(len, lines)])
    assert [int(x.where.rpartition(" ")[2]) for x in found[2:]] == places[2:5].tolist()


def test_parts_of_a_file_read_no_more_of_a_long_line_than_their_length(tmp_path, monkeypatch):
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"text": "%s"}\n{"text": "next"}\n' % (b"a" * 8 * MIB))
    opened, open_file = [], containers._OPEN.get(".jsonl", type(path).open)

    def counted(file, mode):
        opened.append(Counted(open_file(file, mode)))
        return opened[-1]

    monkeypatch.setitem(containers._OPEN, ".jsonl", counted)
    found = [record.value()["text"] for record in records(path, MIB)]
    assert [len(text) for text in found] == [8 * MIB, 4]
    assert max(file.largest for file in opened[1:]) <= MIB + 2


def write_dictionary(path, size, rows):
    indices = pa.array(np.zeros(rows, np.int32))
    text = pa.DictionaryArray.from_arrays(indices, pa.array(["a" * size]))
    pq.write_table(pa.table({"text": text}), path, compression="zstd")


def test_rows_that_repeat_a_large_value_are_read_a_few_at_a_time(tmp_path):
    path = tmp_path / "dictionary.parquet"
    write_dictionary(path, 4 * MIB, 2000)
    assert path.stat().st_size < 10_000  # for 8 GB of text
    before = pa.total_allocated_bytes()
    read = records(path)
    assert len(next(read).content["text"]) == 4 * MIB
    assert pa.total_allocated_bytes() - before < 3 * containers._MOST_BYTES


def test_a_group_of_sixty_million_rows_is_read_in_batches(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = 6 * 10**7
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(10**6, np.int32)), pa.array(["ab"]))
    table = pa.table({"text": pa.chunked_array([text] * (rows // 10**6))})
    pq.write_table(table, path, compression="zstd", row_group_size=rows)
    assert pq.ParquetFile(path).metadata.num_row_groups == 1
    before = pa.total_allocated_bytes()
    read = records(path)
    assert [next(read).content for _ in range(600)] == [{"text": "ab"}] * 600
    assert pa.total_allocated_bytes() - before < 64 * MIB


def test_pages_that_are_too_large_together_are_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_pages, "_MOST_TOGETHER", 12 * MIB)
    path = tmp_path / "page.parquet"
    table = pa.table({name: ["a" * (8 * MIB)] for name in ("text", "more")})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    before = pa.total_allocated_bytes()
    says = r"page\.parquet, group 0, column 'more': pages of 16 MiB would be in memory at once"
    with pytest.raises(ConfigError, match=says):
        list(records(path))
    assert pa.total_allocated_bytes() - before < MIB


def test_a_row_with_too_long_a_list_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_pages, "_MOST_VALUES", 10**6)
    path = tmp_path / "list.parquet"
    count = 10**7
    values = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), np.zeros(count, np.int8))
    pq.write_table(pa.table({"text": ["hi"], "values": values}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    with pytest.raises(ConfigError, match=r"values\.list\.element': 10000000 values in lists"):
        list(records(path))


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_row_beyond_the_limit_is_refused_with_its_file_and_number(tmp_path, monkeypatch, form):
    monkeypatch.setattr(containers, "_MOST_BYTES", MIB, raising=False)
    path, table = tmp_path / f"row.{form}", pa.table({"text": ["a", "b", "c" * (2 * MIB), "d"]})
    if form == "parquet":
        pq.write_table(table, path, compression="zstd")
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    *others, large, last = records(path)
    assert [record.value()["text"] for record in [*others, last]] == ["a", "b", "d"]
    assert large.where.endswith(", row 2")
    assert last.where.endswith(", row 3")
    with pytest.raises(BadLineError, match="the record has more than 1 MiB; make several"):
        large.value()


@pytest.mark.parametrize("kind", ["dictionary", "view"])
def test_rows_of_arrow_that_share_their_bytes_become_objects_one_by_one(tmp_path, kind):
    path, size, rows = tmp_path / "shared.arrow", MIB, 300
    if kind == "dictionary":
        text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), ["a" * size])
    else:
        _, views, *data = pa.array(["a" * size], pa.string_view()).buffers()
        buffers = [None, pa.py_buffer(views.to_pybytes() * rows), *data]
        text = pa.Array.from_buffers(pa.string_view(), rows, buffers)
    table = pa.table({"text": text})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    tracemalloc.start()
    try:
        read = records(path)
        assert [len(next(read).content["text"]) for _ in range(3)] == [size] * 3
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * size


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dictionary": False},
        {"data_page_version": "2.0", "dictionary_pagesize_limit": 1 << 12},
        {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"},
        {"write_page_checksum": True, "write_page_index": True, "compression": "gzip"},
    ],
    ids=str,
)
def test_group_size_is_that_of_the_pages_pyarrow_wrote(tmp_path, options):
    path = tmp_path / "pages.parquet"
    texts = [f"{i}" * (i % 50) for i in range(20_000)]
    messages = [[{"role": "user", "content": text}] for text in texts]
    table = pa.table({"text": texts}) if "column_encoding" in options else None
    table = pa.table({"text": texts, "messages": messages}) if table is None else table
    pq.write_table(table, path, data_page_size=1 << 16, row_group_size=7000, **options)
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        found, known = group_size(path, file.metadata, group), file.metadata.row_group(group)
        whole = sum(known.column(i).total_uncompressed_size for i in range(known.num_columns))
        assert found.num_rows == known.num_rows
        # A page holds at least its limit, and is no larger than its column.
        assert 1 << 12 < found.page_bytes < whole
    assert [row.content for row in records(path)] == table.to_pylist()


@pytest.mark.parametrize("byte", [0x00, 0x1C, 0x9C, 0xFF])
def test_damaged_page_headers_are_refused(tmp_path, byte):
    path = tmp_path / "damaged.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), path)
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(0).column(0).dictionary_page_offset
    data[start : start + 12] = bytes([byte]) * 12
    path.write_bytes(data)
    file = Files("data.path", str(path), [path])
    with pytest.raises(ConfigError, match=rf"damaged\.parquet, byte {start}: its page headers are"):
        list(file.records(FilePart(path, 0, 1)))


def test_page_headers_of_lists_within_lists_are_refused(tmp_path):
    """5,000 lists, each of which holds the next: Python would end by a RecursionError."""
    path = tmp_path / "nested.parquet"
    pq.write_table(pa.table({"text": [f"text {i}" for i in range(5000)]}), path)
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(0).column(0).dictionary_page_offset
    data[start : start + 5000] = bytes([0x19]) * 5000
    path.write_bytes(data)
    file = Files("data.path", str(path), [path])
    with pytest.raises(ConfigError, match=rf"nested\.parquet, byte {start}: its page headers are"):
        list(file.records(FilePart(path, 0, 1)))
