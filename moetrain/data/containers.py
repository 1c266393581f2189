"""Finds and reads files of records: JSON, CSV, Parquet, Arrow and data sets of ``datasets``.

Files are read in pieces. Each piece can be read alone, and in any order. ``pyarrow`` reads tables
and ``.zst``, and ``datasets`` opens saved data sets and those of a hub. The extra ``data`` installs
both. Without it, JSON and CSV can be read, and JSON in ``.gz``, ``.bz2`` and ``.xz``.

No record larger than :data:`_MOST_BYTES` is held in memory, even if its compressed file is small. A
larger line, element or row is skipped, and counts as a bad record.

Left out on purpose: remote files, except a hub's data sets. A program can give the rows of such
files to a Trainer as an iterable (docs/library.md).
"""

import bz2
import glob
import gzip
import io
import json
import lzma
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, Self

from moetrain.config import ConfigError, logger
from moetrain.config.sources import (
    FILE_KINDS,
    FileKind,
    begins_as,
    shortened,
    source_by_suffix,
)
from moetrain.data.csv_rows import CsvRow, cells, csv_rows
from moetrain.data.json_array import array_elements, begins_object, is_array
from moetrain.data.messages import MARK_BYTES, TO_UTF8, BadLineError, refuse_other_marks
from moetrain.data.parquet_pages import group_size
from moetrain.data.tools import TABLED, without_nulls

_TABLES = FileKind.TABLE.suffixes
_COMPRESSED = FileKind.COMPRESSED.suffixes
_CELLS = FileKind.CELLS.suffixes
_ARCHIVES = FileKind.ARCHIVE.suffixes
_OPEN: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""Functions that open compressed files, by suffix. pyarrow opens ``.zst``."""
_WHOLE = (".arrow", *_CELLS, *_COMPRESSED)
"""Suffixes of files that can be read only from their beginning, as one piece."""
_RECORD_FILES = (
    *(*FileKind.LINES.suffixes, *_TABLES, *_CELLS),
    *(f"{kind}{c}" for kind in (".jsonl", *_CELLS) for c in _COMPRESSED),
)
"""Suffixes of the files of records in a folder."""
_JSON_FILES = (*FileKind.JSON.suffixes, *(f".json{c}" for c in _COMPRESSED))
"""Suffixes of files that are read in a folder only if it has none of :data:`_RECORD_FILES`."""
_ABOUT = {
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
}
"""Files that describe a data set. They hold no records."""
_DOCUMENTATION = re.compile(
    r"(?:readme|licen[cs]e|notice|copying|citation|changelog|contributing|authors|data_?card)(?![a-z])",
    re.I,
)
"""Matches the beginning of the name of a file for readers, which is no document to learn."""
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SAVED = (("dataset_dict.json",), ("state.json", "dataset_info.json"))
"""Files of a folder that ``save_to_disk`` wrote: of several splits, or of one. A
``dataset_info.json`` alone is that of another program, such as LLaMA-Factory."""
_DAMAGED = "it is damaged, cut short or of another format: fetch or write it again"
OBJECTS = "give each object one line, or all in one array: [{...}, {...}]"
_RATIO = 4
"""Estimated bytes of text in a byte of a compressed file."""
_MOST_BYTES = 64 << 20
"""Most bytes of a record."""
_LINE_PART = 1 << 20
"""Bytes of a line that are read at once while the line is skipped."""
_ROWS_AT_ONCE = 256
"""Most rows of a table that are Python objects at the same time."""
_ROWS = 4096
"""Rows in one piece of a table of ``datasets``."""


class Raw(NamedTuple):
    """A record that is not parsed yet."""

    where: str
    """Its file and line or row, for messages."""
    key: bytes
    """Identifies the record when held-out records are chosen.

    It is the text of a line or an element of JSON, without the blanks around it. Of a row of a
    table it is JSON with sorted keys, and of a row of a CSV file what ``json.dumps`` makes of it.
    The same record in another spelling has another key.
    """
    content: bytes | dict[str, Any]
    """The JSON text of the record, or a row of a table with its nulls."""
    num_bytes: int
    """Bytes that the record takes in its file, or bytes of ``key`` if it is a row of a table."""
    problem: str | None = None
    """The reason why the record was not read. None: it was read."""
    line: int | None = None
    """The line of the file in which ``content`` begins. None: it is one line, or a row."""
    empty: tuple[str, ...] = ()
    """Fields of which a row of cells has no text. They are not in ``content``."""

    @classmethod
    def too_large(cls, where: str, num_bytes: int = 0) -> Self:
        """Return a record that is larger than :data:`_MOST_BYTES`, without its content."""
        return cls(
            where=where,
            key=where.encode(),
            content=b"",
            num_bytes=num_bytes,
            problem=_too_large(),
        )

    def value(self) -> object:
        """Parse the record. Leave out the nulls that a table fills in.

        Raises BadLineError: the record is not JSON, or could not be read (``problem``).
        """
        value = self.whole()
        return _without_tables_nulls(value) if isinstance(self.content, dict) else value

    def with_empty(self) -> dict[str, Any] | None:
        """Return a row with null in each field that it has no value of. None: it is no row."""
        if self.problem is not None or not isinstance(self.content, dict):
            return None
        return {
            **dict.fromkeys((*self.empty, *self.content)),
            **_without_tables_nulls(self.content),
        }

    def whole(self) -> object:
        """Parse the record, and keep all nulls. Raises BadLineError as :meth:`value` does."""
        if self.problem is not None:
            raise BadLineError(self.problem)
        if isinstance(self.content, dict):
            return self.content
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError) as error:
            said, remedy = getattr(error, "msg", str(error)), OBJECTS
            if isinstance(error, UnicodeDecodeError):
                remedy = TO_UTF8
            elif isinstance(error, json.JSONDecodeError) and (found := _not_of_json(error)):
                name, at = found
                place = "the line has"
                if self.line is not None:
                    place = f"line {self.line + error.doc.count(chr(10), 0, at)} has"
                near = shortened(error.doc[max(0, at - 40) : at + 40].strip())
                said = f"not JSON: {place} {name}, which JSON does not have: {near}"
                raise BadLineError(f"{said}; leave it out") from None
            elif isinstance(error, json.JSONDecodeError) and _goes_on(error):
                said = "the file ends before its object does"
                remedy = _DAMAGED
                if b"\n" not in self.content.strip():
                    said = "the line ends before its object or list does"
                    remedy = (
                        f"{OBJECTS}; or give each file one object, and a name that ends in .json"
                    )
            said = f"not JSON: {said}: {shortened(self.content)}"
            raise BadLineError(f"{said}; {remedy}") from None


def _goes_on(error: json.JSONDecodeError) -> bool:
    """Return whether a text ends before its value does, as the first line of indented JSON."""
    text = error.doc.strip()
    return text[:1] in ("{", "[") and error.pos >= len(error.doc.rstrip())


def _not_of_json(error: json.JSONDecodeError) -> tuple[str, int] | None:
    """Return what JavaScript or Python has and JSON does not, and its index in the text.

    None: the text has another mistake.
    """
    text, at = error.doc, error.pos
    if text[at : at + 1] == ",":  # Python 3.13 names a comma itself, and a comma behind an object
        at += 1
    at += len(text[at:]) - len(text[at:].lstrip())
    before = text[:at].rstrip()
    if text.startswith(("//", "/*", "#"), at):
        return "a comment", at
    if before.endswith(",") and (rest := text[at : at + 1]) in ("", "}", "]"):
        return f"a comma before {rest}" if rest else "a comma at its end", len(before) - 1
    return None


class FilePart(NamedTuple):
    """A part of a file that can be read alone."""

    file: Path
    start: int = 0
    """First byte in a file of lines or text, first row group in a Parquet file, or first row in a
    table."""
    stop: int = sys.maxsize
    """End of the part, in the same unit."""
    size: int = 0
    """Estimated bytes of the part's records."""

    @property
    def is_whole(self) -> bool:
        """True: the part is the whole file. It must be a part of a file of lines or text."""
        return self.start == 0 and self.stop >= self.file.stat().st_size


@dataclass(frozen=True)
class Files:
    """The files, or the table of ``datasets``, that a setting names."""

    field: str
    """The setting, for messages."""
    path: str
    """Value of the setting."""
    files: list[Path]
    table: Any = None
    """A ``datasets.Dataset``, whose rows are read. None: the files are read."""

    def stamps(self) -> list[Any]:
        """Return a JSON value that differs once the files change, for the token cache's key."""
        stats = [(file, file.stat()) for file in self.files]
        found: list[Any] = [[str(file.absolute()), s.st_size, s.st_mtime_ns] for file, s in stats]
        return found if self.table is None else [*found, len(self.table), self.table._fingerprint]

    def total_bytes(self) -> int:
        """Return the estimated bytes of all records."""
        return sum(piece.size for piece in self.pieces())

    def pieces(self, line_bytes: int | None = None) -> list[FilePart]:
        """List the parts that can be read alone.

        ``line_bytes`` is the size of the parts of a file of lines. None: such a file is one part.

        Raises ConfigError: a file cannot be read.
        """
        if self.table is not None:
            starts = range(0, len(self.table), _ROWS)
            size = sum(file.stat().st_size for file in self.files) // max(1, len(starts))
            return [FilePart(Path(self.path), i, i + _ROWS, size) for i in starts]
        pieces = []
        for file in self.files:
            suffix, size = file.suffix.lower(), file.stat().st_size
            if suffix == ".parquet":
                with self.reading(file):
                    found = _pyarrow("parquet").ParquetFile(file).metadata
                    for i in range(found.num_row_groups):
                        group_size = found.row_group(i).total_byte_size
                        pieces.append(FilePart(file, i, i + 1, group_size))
            elif suffix in _WHOLE or line_bytes is None or self._is_one_value(file):
                ratio = _RATIO if suffix in _COMPRESSED else 1
                pieces.append(FilePart(file, size=ratio * size))
            else:
                for start in range(0, size, line_bytes):
                    stop = min(start + line_bytes, size)
                    pieces.append(FilePart(file, start, stop, stop - start))
        return pieces

    def _is_one_value(self, file: Path) -> bool:
        with self.reading(file), file.open("rb") as opened:
            return is_array(opened) or (_is_json(file) and begins_object(opened))

    def records(self, piece: FilePart) -> Iterator[Raw]:
        """Yield the records of ``piece``. Raises ConfigError: they cannot be read."""
        suffix = piece.file.suffix.lower()
        with self.reading(piece.file):
            if self.table is not None:
                # In Arrow's format, pictures beside the text are not decoded.
                table = self.table.with_format("arrow")
                rows = table.select(range(piece.start, min(piece.stop, len(table))))
                yield from _rows(piece, rows.iter(batch_size=_ROWS_AT_ONCE))
            else:
                if suffix in _COMPRESSED and Path(piece.file.stem).suffix.lower() in _CELLS:
                    suffix = Path(piece.file.stem).suffix.lower()
                yield from _READERS.get(suffix, _json)(piece)

    @contextmanager
    def reading(self, file: Path) -> Iterator[None]:
        """Turn the errors of reading ``file`` into ConfigError."""
        try:
            yield
        except BadLineError as error:  # it names the file and the record
            raise ConfigError(self.field, str(error)) from None
        except ImportError as error:
            raise ConfigError(self.field, _needs(str(file), error)) from None
        except OSError as error:
            problem = error.strerror or f"{error}; {_DAMAGED}"
        except (ValueError, EOFError, zlib.error, lzma.LZMAError) as error:  # ArrowInvalid too
            problem = str(error).partition("\n")[0] + f"; {_DAMAGED}"
        else:
            return
        raise ConfigError(self.field, f"{str(file)!r} cannot be read: {problem}")


def _needs(what: str, error: ImportError) -> str:
    return f"{what!r} needs {error.name or error}: pip install 'moetrain[data]'"


def _pyarrow(module: str) -> Any:
    return import_module(f"pyarrow.{module}")


def _rows(piece: FilePart, batches: Iterable[Any]) -> Iterator[Raw]:
    """Yield the rows of Arrow's ``batches``, from the first row of ``piece`` on."""
    place, number = str(piece.file), piece.start
    if piece.file.suffix.lower() == ".parquet":
        place, number = f"{place}, group {piece.start}", 0
    for batch in batches:
        for few in _bounded(batch):
            if few is None:
                yield Raw.too_large(f"{place}, row {number}")
                number += 1
                continue
            for row in few.to_pylist():
                known = _without_tables_nulls(row)
                key = json.dumps(known, sort_keys=True, default=str, ensure_ascii=False)
                encoded = key.encode(errors="replace")
                where = f"{place}, row {number}"
                if len(encoded) <= _MOST_BYTES:
                    yield Raw(where, key=encoded, content=row, num_bytes=len(encoded))
                else:
                    yield Raw.too_large(where)
                number += 1


def _without_tables_nulls(row: object) -> Any:
    """Return a row without the nulls that a table fills in because other rows have a value."""
    return without_nulls(row, kept=TABLED)


def _bounded(batch: Any) -> Iterator[Any]:
    """Yield slices of ``batch`` that are small enough to become Python objects.

    Rows whose values may share their bytes, and the rows of a large slice, are yielded one by one.
    None stands for a row that is too large.
    """
    shares = any(map(_shares_bytes, batch.schema.types))
    for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
        few = batch.slice(start, _ROWS_AT_ONCE)
        if not shares and few.nbytes <= _MOST_BYTES:
            yield few
            continue
        for i in range(few.num_rows):
            row = few.slice(i, 1)
            yield row if shares or row.nbytes <= _MOST_BYTES else None


def _shares_bytes(kind: Any) -> bool:
    """Return whether several values of an Arrow type can share their bytes in memory."""
    types = _pyarrow("types")
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind) or "view" in str(kind):
        return True
    return any(_shares_bytes(kind.field(i).type) for i in range(kind.num_fields))


def _too_large() -> str:
    size = f"more than {_MOST_BYTES >> 20} MiB"
    return f"the record has {size}; make several records of it, or leave it out"


def _parquet(piece: FilePart) -> Iterator[Raw]:
    """Yield the rows of a Parquet file's row groups."""
    file = _pyarrow("parquet").ParquetFile(piece.file)
    for group in range(piece.start, min(piece.stop, file.num_row_groups)):
        page_bytes = group_size(piece.file, file.metadata, group).page_bytes
        most = max(1, min(_ROWS_AT_ONCE, _MOST_BYTES // max(1, page_bytes)))
        batches = file.iter_batches(batch_size=most, row_groups=[group])
        yield from _rows(piece._replace(start=group), batches)


def _arrow(piece: FilePart) -> Iterator[Raw]:
    """Yield the rows of a file in Arrow's file format, or in the stream format of ``datasets``."""
    pa, ipc = _pyarrow("lib"), _pyarrow("ipc")
    with pa.memory_map(str(piece.file)) as source:
        if source.read(6) == b"ARROW1":
            source.seek(0)
            file = ipc.open_file(source)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
            yield from _rows(piece, batches)
        else:
            source.seek(0)
            yield from _rows(piece, ipc.open_stream(source))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file, perhaps a compressed one, for its bytes. It is to be UTF-8.

    Raises BadLineError: it begins as another encoding does.
    """
    suffix = path.suffix.lower()
    if suffix in (".zst", ".zstd"):
        # Unlike the library zstandard, pyarrow refuses a file that is cut short.
        opened = io.BufferedReader(_pyarrow("lib").input_stream(str(path), "zstd"), 1 << 20)
    else:
        opened = _OPEN.get(suffix, Path.open)(path, "rb")
    with opened as file:
        refuse_other_marks(file.peek(MARK_BYTES), f"{path}:1")
        yield file


def _is_json(file: Path) -> bool:
    """Return whether a name ends in ``.json``, before the suffix of a compression if it has one."""
    stem = file.stem if file.suffix.lower() in _COMPRESSED else file.name
    return Path(stem).suffix.lower() in FileKind.JSON.suffixes


def _json(piece: FilePart) -> Iterator[Raw]:
    """Yield the lines that begin in ``piece``. If the file is one array, yield its elements.

    A ``.json`` file whose first line begins an object that does not end there is one record. The
    piece of a compressed file is the whole file.
    """
    with _opened(piece.file) as file:
        at = piece.start
        if not piece.start and is_array(file):
            yield from _array(piece.file, file)
            return
        if not piece.start and _is_json(piece.file) and begins_object(file):
            yield _object(piece.file, file)
            return
        if piece.start:
            file.seek(piece.start - 1)
            # Skip a line that begins in the previous piece.
            at += len(file.readline(piece.stop - at + 2)) - 1
        for number in count(1):
            if at >= piece.stop or not (line := file.readline(_MOST_BYTES + 1)):
                return
            where = f"{piece.file}:byte {at}" if piece.start else f"{piece.file}:{number}"
            at += len(line)
            if len(line) > _MOST_BYTES:
                yield Raw.too_large(where, len(line))
                while at < piece.stop and line and line[-1:] != b"\n":  # the rest of the line
                    at += len(line := file.readline(_LINE_PART))
            elif line.strip():
                yield Raw(where, key=line.strip(), content=line, num_bytes=len(line))


def _object(path: Path, file: Any) -> Raw:
    """Return the object that is all of ``file``."""
    text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        return Raw.too_large(f"{path}:1")
    return Raw(f"{path}:1", key=text.strip(), content=text, num_bytes=len(text), line=1)


def _array(path: Path, file: Any) -> Iterator[Raw]:
    """Yield the elements of an array that ``file`` holds."""
    comma = None  # the line of the comma before an element
    for number, element in enumerate(array_elements(file, _MOST_BYTES), 1):
        where, text, size = (
            f"{path}:{element.line}, record {number}",
            element.text,
            element.num_bytes,
        )
        if text is None:
            yield Raw.too_large(where, size)
        elif text:
            yield Raw(where, key=text, content=text, num_bytes=size, line=element.line)
        else:
            problem = f"not JSON: line {comma or element.end} has a comma without an element "
            problem += f"{'behind' if comma else 'before'} it; leave it out"
            yield Raw(where, key=where.encode(), content=text, num_bytes=size, problem=problem)
        comma = element.end


def _csv(piece: FilePart) -> Iterator[Raw]:
    """Yield the rows of a CSV file as records. The first row names their fields."""
    with _opened(piece.file) as file:
        try:
            yield from _named_rows(piece.file, csv_rows(file, _MOST_BYTES))
        except BadLineError as error:  # it begins with the line
            raise BadLineError(f"{piece.file}:{error}") from None


def _named_rows(path: Path, rows: Iterator[CsvRow]) -> Iterator[Raw]:
    rows = _without_blank(rows)
    first = next(rows, None)
    if first is None:
        return
    names, num_before = _names_of(first), first.num_bytes
    for row in rows:
        where, num_bytes = f"{path}:{row.line}", num_before + row.num_bytes
        num_before = 0
        if row.text is None:
            yield Raw.too_large(where, num_bytes)
            continue
        every = cells(row.text)
        found = list(islice(every, len(names)))
        number = len(found) + sum(1 for _ in every)
        if number == len(names):
            # The record does not have the fields whose cells are empty.
            record = {name: cell for name, cell in zip(names, found, strict=True) if cell}
            empty = tuple(name for name in names if name not in record)
            key = json.dumps(record).encode()
            yield Raw(where, key=key, content=record, num_bytes=num_bytes, empty=empty)
        else:
            problem = f"cells in the row: {number}, names in the first row: {len(names)}"
            remedy = "give a cell for each name, and quotes around one with commas or line breaks"
            yield Raw(where, row.text, b"", num_bytes, problem=f"{problem}; {remedy}")


def _without_blank(rows: Iterable[CsvRow]) -> Iterator[CsvRow]:
    """Yield the rows that have a cell with a text. Others count in the bytes of the next one.

    Excel and Google Sheets write a blank row between others as the commas between empty cells.
    """
    num_blank = 0
    for row in rows:
        if row.text is not None and row.text[:1] in b',"' and not any(cells(row.text)):
            num_blank += row.num_bytes
        else:
            yield row._replace(num_bytes=num_blank + row.num_bytes)
            num_blank = 0


def _names_of(row: CsvRow) -> list[str]:
    """Return the names of the fields in ``row``, the first row of a CSV file.

    Raises BadLineError: the row is too large, a name is empty or occurs twice, or the cells are
    separated by another character than a comma.
    """
    if row.text is None:
        raise BadLineError(f"{row.line}: the first row is too large to be names of fields")
    if b"\r" in re.sub(rb'"[^"]*"', b"", row.text):  # Excel's "CSV (Macintosh)"
        problem = "the lines of the file end in \\r alone"
        raise BadLineError(f"{row.line}: {problem}; save it as CSV (UTF-8), whose lines end in \\n")
    names: dict[str, None] = {}
    for name in cells(row.text):
        if not name:
            problem = f"name {len(names) + 1} of the first row is empty"
            raise BadLineError(f"{row.line}: {problem}; give each column a name, or leave it out")
        if name in names:
            problem = f"the first row has the name {shortened(name)} twice"
            raise BadLineError(f"{row.line}: {problem}; rename or leave out one of the columns")
        names[name] = None
    (first, *others) = names
    if not others and (other := next((x for x in ";\t|" if x in first), None)):
        problem = f"the first row has one name, {shortened(first)}"
        remedy = "save the file as CSV with commas (UTF-8)"
        raise BadLineError(f"{row.line}: {problem}; its cells seem to end with {other!r}: {remedy}")
    return list(names)


_READERS: dict[str, Callable[[FilePart], Iterator[Raw]]] = {
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".csv": _csv,
}
"""Functions that yield the records of a piece, by suffix. :func:`_json` reads all other files."""


# ---- finding files ------------------------------------------------------------------------------


def find_records(field: str, path: str, split: str, subset: str | None) -> tuple[list[Path], Any]:
    """Find the files of records that ``path`` names.

    Args:
        field: the setting with the value ``path``, for messages.
        path: a file, a folder, a pattern, a saved data set or a hub's id.
        split: the split of a data set.
        subset: the configuration of a hub's data set; None: its default.

    Returns:
        The files, and the table of ``datasets`` if ``path`` is a data set, otherwise None.

    Raises ConfigError: ``path`` names nothing or cannot be read, the data set has no such split, or
    the library that reads it is missing.
    """
    is_saved = any(
        all(os.path.isfile(os.path.join(path, name)) for name in names) for names in _SAVED
    )
    is_file = os.path.splitext(path)[1] in FILE_KINDS
    is_of_hub = _HUB_ID.fullmatch(path) and not is_file and not os.path.lexists(path)
    if not is_saved and not is_of_hub:
        return list_files(field, path, _RECORD_FILES), None
    try:
        import datasets

        if is_saved:
            table = datasets.load_from_disk(path)
        else:
            table = datasets.load_dataset(path, subset, split=split)
    except ImportError as error:
        raise ConfigError(field, _needs(path, error)) from None
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        said = str(error) if not isinstance(error, LookupError) else ""
        problem = f"{path!r} cannot be read" if is_saved else f"the hub has no {path!r} in reach"
        raise ConfigError(field, f"{problem}: {(said or repr(error)).splitlines()[0]}") from None
    if isinstance(table, dict):
        if split not in table:
            known = ", ".join(map(str, table))
            problem = f"{split!r} is not a split of {path!r}; choose from {known}"
            raise ConfigError("data.split", problem)
        table = table[split]
    return sorted({Path(entry["filename"]) for entry in table.cache_files}), table


def list_files(
    field: str, path: str, suffixes: tuple[str, ...] = ("",), skipped: Set[str] = frozenset()
) -> list[Path]:
    """List the visible files that ``path`` names, matches or holds.

    Args:
        field: the setting with the value ``path``, for messages.
        path: a file, a folder or a pattern.
        suffixes: endings of the names of the files that are listed in a folder.
        skipped: names of subfolders that are skipped.

    Raises ConfigError: there is no file that can be read.
    """
    if glob.has_magic(path) and not os.path.lexists(path):
        found = [Path(name) for name in sorted(glob.glob(path, recursive=True))]
        if suffixes != ("",):
            found = [file for file in found if file.name not in _ABOUT]
        files = [f for one in found for f in list_files(field, str(one), suffixes, skipped)]
        if not files:
            raise ConfigError(field, f"{path!r} matches no file")
        return files
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        problem = f"cannot be read: {error.strerror}; name a file or folder of this machine"
        raise ConfigError(field, f"{path!r} {problem}") from None
    root = Path(path)
    takes_all, takes_records = suffixes == ("",), suffixes == _RECORD_FILES
    if stat.S_ISREG(mode):
        _check_format(field, path, root, takes_all)
        return [root]
    if not stat.S_ISDIR(mode):
        raise ConfigError(field, f"{path!r} is neither a file nor a folder")
    visible = [file for file in _walk(field, root, skipped) if not file.name.startswith(".")]
    found = [file for file in visible if file.name.endswith(suffixes)]
    if takes_all:
        for file in visible:
            if file.suffix.lower() in _TABLES:
                _check_format(field, path, file, takes_all)
    others = [file for file in visible if takes_records and file.name not in _ABOUT]
    if not found:
        found = [file for file in others if file.name.endswith(_JSON_FILES)]
    for file in (file for file in found if not os.path.isfile(file)):
        logger.info("%s is not a file, or is a link to no file; skipped", file)
    found = [file for file in found if os.path.isfile(file)]
    if not found:
        ends = "text" if takes_all else f"{suffixes[0]} files, nor {' or '.join(suffixes[1:3])}"
        raise ConfigError(field, f"{path!r} holds no {ends} files; {_remedy_for(path, others)}")
    read = {*found}
    kinds = _by_kind(found if takes_all else [file for file in others if file not in read])
    if len(kinds) > takes_all:
        what = "all files are read as texts:" if takes_all else "not read beside its records:"
        most = sorted(kinds, key=lambda kind: -len(kinds[kind]))[:5]
        few = ", ".join(f"{len(kinds[kind]):,} {kind}" for kind in most)
        few = few.encode("utf-8", "backslashreplace").decode()  # names need not be UTF-8
        number = sum(map(len, kinds.values()))
        also = ", or set data.source text to learn all files" * (number > len(found))
        said = f"{path}: {what} {few}"
        if others := _without_documentation(kinds):
            pattern = _pattern(path, others)
            needs = "" if takes_all else _source_for(pattern)
            said += f"; to read those of one kind alone, name them as {pattern!r}{needs}{also}"
        logger.info("%s", said)
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _by_kind(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Divide files by the ends of their names, and names without one by their first letters."""
    found: dict[str, list[Path]] = {}
    for file in files:
        end = "".join(file.suffixes[-2:] if file.suffix in _COMPRESSED else file.suffixes[-1:])
        found.setdefault(end or re.sub(r"\d+.*", "*", file.name), []).append(file)
    return found


def _without_documentation(kinds: Mapping[str, list[Path]]) -> dict[str, list[Path]]:
    """Return the kinds of files that are not only README, LICENSE and the like."""
    return {
        kind: files
        for kind, files in kinds.items()
        if not all(_DOCUMENTATION.match(file.name) for file in files)
    }


def _pattern(path: str, kinds: Mapping[str, Sequence[Path]]) -> str:
    """Return the pattern of the files of one kind in the folder ``path``.

    It is the most frequent one that is read; of several, .txt, or one that is no JSON.
    """

    def rank(kind: str) -> tuple[bool, int, bool, bool]:
        first = kinds[kind][0]
        begins = begins_as(str(first))
        is_read = begins is not None or first.suffix in FILE_KINDS
        is_read &= first.suffix not in _ARCHIVES
        return is_read, len(kinds[kind]), kind == ".txt", begins == "text"

    kind = max(kinds, key=rank)
    return os.path.join(glob.escape(path), "**", kind if kind[:1] != "." else f"*{kind}")


def _source_for(pattern: str) -> str:
    """Return the advice to set ``data.source`` if ``pattern`` would be refused without, else ""."""
    try:
        source_by_suffix(pattern)
    except ConfigError:
        return " with data.source text"
    return ""


def _remedy_for(path: str, files: Iterable[Path]) -> str:
    """Return the advice for a folder whose ``files`` are not read as records."""
    kinds = _by_kind(file for file in files if file.suffix.lower() not in _ARCHIVES)
    kinds = _without_documentation(kinds)
    begins = {kind: begins_as(str(files[0])) for kind, files in kinds.items()}
    kinds = {kind: files for kind, files in kinds.items() if begins[kind] is not None}
    if not kinds:
        return "name a file, or a folder with some"
    most = max(kinds, key=lambda kind: (len(kinds[kind]), kind == ".txt"))
    pattern = _pattern(path, {most: kinds[most]})
    if most == ".txt":
        return f"it holds .txt files: name them as {pattern!r}"
    if begins[most] == "json":
        return f"name its files with records, such as {pattern!r}, with data.source records"
    return (
        "set data.source text to learn each of its files as it is, or some of them alone, such as "
        f"{pattern!r}{_source_for(pattern)}"
    )


def _walk(field: str, root: Path, skipped: Set[str]) -> Iterator[Path]:
    """Yield the files in the visible folders below ``root``."""

    def refuse(error: OSError) -> None:
        raise ConfigError(field, f"{error.filename!r} cannot be read: {error.strerror}")

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s not in skipped]
        for link in filter(os.path.islink, (Path(folder, s) for s in subfolders)):
            logger.info("%s is a link to a folder; not followed", link)
        yield from (Path(folder, name) for name in sorted(names))


def _check_format(field: str, path: str, file: Path, as_text: bool) -> None:
    """Raise ConfigError if ``file``, which ``path`` names or holds, has an unsupported format."""
    suffix = file.suffix.lower()
    if suffix in _ARCHIVES or (suffix in (*_TABLES, *_COMPRESSED) and as_text):
        what = "it is" if str(file) == path else f"it holds {file.name!r},"
        remedy = "set data.source records" if suffix in _TABLES else "unpack it"
        raise ConfigError(field, f"{path!r} cannot be read: {what} no text but {suffix}; {remedy}")
