"""Reads the sizes of a Parquet file's pages from their headers.

A file of a few kilobytes can hold pages that decompress to gigabytes, and it can repeat one value
of a dictionary a billion times. The file's footer may not show this, and pyarrow checks no size.
The header of a page has the size that a reader allocates for it, so these headers are read first.

The format is https://parquet.apache.org/docs/file-format/ (``parquet.thrift``: PageHeader), in
Thrift's compact protocol.
"""

from pathlib import Path
from typing import IO, Any, NamedTuple

from moetrain.data.messages import BadLineError

_MIB = 1 << 20
_MOST_TOGETHER = 1 << 30
"""Most bytes that the largest pages of all columns of a row group may have together. A reader holds
one page of each column at the same time."""
_MOST_VALUES = 1 << 27
"""Most values that a column of lists may have in a row group. One row may hold all of them, and
each value takes twelve bytes."""
_DEEPEST = 8
_DAMAGED = "its page headers are damaged; write the file again"


class GroupSize(NamedTuple):
    """The memory that reading a row group takes."""

    num_rows: int
    page_bytes: int
    """Sum of the uncompressed bytes of each column's largest page. No flat value is larger."""


def group_size(file: Path, metadata: Any, group: int) -> GroupSize:
    """Return the memory that row group ``group`` of ``file`` takes, from its page headers.

    ``metadata`` is pyarrow's ``ParquetFile.metadata``.

    Raises BadLineError: the group takes more memory than is allowed, or its headers are damaged.
    """
    found, total = metadata.row_group(group), 0
    with file.open("rb") as opened:
        for i in range(found.num_columns):
            column = found.column(i)
            largest, num_values = _column_size(opened, column)
            where = f"{file}, group {group}, column {column.path_in_schema!r}"
            total += largest
            if total > _MOST_TOGETHER:
                problem = f"{where}: pages of {total // _MIB} MiB would be in memory at once"
                remedy = "write the file with smaller data and dictionary pages"
                raise BadLineError(f"{problem}, more than {_MOST_TOGETHER // _MIB} MiB; {remedy}")
            is_list = metadata.schema.column(i).max_repetition_level > 0
            if is_list and num_values > _MOST_VALUES:
                problem = f"{where}: {num_values} values in lists, more than {_MOST_VALUES}"
                raise BadLineError(f"{problem}; write the file with smaller row groups")
    return GroupSize(found.num_rows, total)


def _column_size(opened: IO[bytes], column: Any) -> tuple[int, int]:
    """Return the uncompressed bytes of a column's largest page, and the column's number of values.

    Raises BadLineError: a header is damaged.
    """
    at = column.dictionary_page_offset or column.data_page_offset
    end = at + column.total_compressed_size
    largest = num_values = 0
    while at < end:
        opened.seek(at)
        try:
            header = _struct(opened, 0)
            size, packed = header[2], header[3]
            pages = [header[key] for key in (5, 8) if key in header]  # data pages of versions 1, 2
            num_values += sum(page[1] for page in pages)
            if min(size, packed) < 0:
                raise ValueError
        except (LookupError, TypeError, ValueError):
            raise BadLineError(f"{opened.name}, byte {at}: {_DAMAGED}") from None
        largest = max(largest, size)
        at = opened.tell() + packed
    return largest, num_values


# ---- Thrift's compact protocol ------------------------------------------------------------------


def _struct(opened: IO[bytes], depth: int) -> dict[int, Any]:
    """Read a struct, and return its fields by number.

    Raises ValueError or IndexError: the bytes are no struct.
    """
    fields, number = dict[int, Any](), 0
    while head := opened.read(1)[0]:
        number = number + (head >> 4) if head >> 4 else _integer(opened)
        kind = head & 15
        fields[number] = kind == 1 if kind in (1, 2) else _value(opened, kind, depth)
    return fields


def _value(opened: IO[bytes], kind: int, depth: int) -> Any:
    """Read a value of Thrift's type ``kind``. Texts and lists are passed over.

    Raises ValueError or IndexError: the bytes are no such value.
    """
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")
    match kind:
        case 1 | 2 | 3:  # a boolean in a list, or a byte
            return opened.read(1)[0]
        case 4 | 5 | 6:
            return _integer(opened)
        case 7:
            return opened.read(8)
        case 8:  # a text
            return opened.seek(_unsigned(opened), 1)
        case 9 | 10:
            head = opened.read(1)[0]
            count = head >> 4 if head >> 4 < 15 else _unsigned(opened)
            for _ in range(count):
                _value(opened, head & 15, depth + 1)
            return None
        case 12:
            return _struct(opened, depth + 1)
        case _:
            raise ValueError(f"no type {kind}")


def _unsigned(opened: IO[bytes]) -> int:
    """Read an unsigned integer of variable length (ULEB128)."""
    number, shift = 0, 0
    while (byte := opened.read(1)[0]) & 128:
        number |= (byte & 127) << shift
        shift += 7
        if shift > 63:
            raise ValueError("no integer")
    return number | byte << shift


def _integer(opened: IO[bytes]) -> int:
    """Read a signed integer in zigzag encoding."""
    number = _unsigned(opened)
    return number >> 1 ^ -(number & 1)
