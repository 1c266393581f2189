"""Reads the rows of a CSV file one by one, however large the file is.

The format is that of Python's module ``csv`` by default (the dialect ``excel``, which is not
strict). The module leaves the encoding and the ends of lines to its caller. Here the file is
UTF-8, perhaps with a byte order mark, and a line ends in ``\\n`` or ``\\r\\n``. A quote that does
not begin its cell is an ordinary character, and what follows a closing quote belongs to the cell.
Unlike in the module, a ``\\r`` without ``\\n`` does not end a line, and a quote without an end is
an error.

The module itself would hold a row of any size, and refuses cells of more than 128 Ki characters
unless a limit of the whole process is raised. Here a scan for commas, quotes and line ends finds
where a row ends, and the caller asks for the cells of that row alone. A row that is too large is
passed over.

Left out on purpose: other separators and quotes, and names for the cells from the first row.
"""

import codecs
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from moetrain.data.messages import TO_UTF8, BadLineError

_DOUBLED = re.compile(rb'(?:[^"]*""){0,4096}')
"""Matches the inside of a quoted cell up to its last quote, or to one of many. Their number is
limited because Python keeps a place for each. Possessive quantifiers, which do not, are wrong in
Python 3.11.2."""
_END = re.compile(rb'\n|,(?="|\Z)')
"""Matches the end of a line, a comma before a quoted cell, or a comma whose next byte is not read
yet."""
_READ = 1 << 20
"""Bytes that are read at once."""


class CsvRow(NamedTuple):
    """One row that is not empty."""

    text: bytes | None
    """The row in UTF-8, without the end of its line. None: the row has more bytes than the caller
    takes, and was passed over."""
    line: int
    """The line in which the row begins, from 1."""
    num_bytes: int
    """Bytes of the file from the end of the row before to the end of this one. Blank lines between
    them count."""


def csv_rows(file: Any, most_bytes: int) -> Iterator[CsvRow]:
    """Yield the rows of ``file``, which is open for bytes. Blank lines are no rows.

    A row of more than ``most_bytes`` is passed over, and is never held as a whole.

    Raises BadLineError: a quote has no end, or bytes are not UTF-8. Its text begins with the number
    of the line.
    """
    scanner, end = _Scanner(file, most_bytes), 0
    while (row := scanner.next_row()) is not None:
        if row.text != b"":
            yield row._replace(num_bytes=scanner.offset - end)
            end = scanner.offset


def cells(text: bytes) -> Iterator[str]:
    """Yield the cells of the row ``text``."""
    at = 0
    while True:
        quoted = b""
        if text.startswith(b'"', at):
            begin = at + 1
            at, _ = _end_of_quoted(text, begin, is_all=True)
            quoted = text[begin : at - 1].replace(b'""', b'"')
        comma = text.find(b",", at)
        stop = len(text) if comma < 0 else comma
        yield (quoted + text[at:stop]).decode()
        if comma < 0:
            return
        at = comma + 1


class _Scanner:
    """Finds where rows end. It holds only the current row and the part that it read last.

    ``held[start:at]`` is the part of the current row that was scanned and may be needed.
    """

    def __init__(self, file: Any, most_bytes: int) -> None:
        self._file, self._most_bytes = file, most_bytes
        self._held = bytearray()
        self._at = self._start = 0
        self._line = 1
        """The line of ``held[start]``."""
        self.offset = 0
        """Bytes of the file before ``held[start]``."""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._is_large = False
        """True: the current row is too large, and is passed over."""
        self._is_end = False
        """True: the whole file is read."""
        head = file.read(len(codecs.BOM_UTF8))
        if head == codecs.BOM_UTF8:
            self.offset = len(head)
        else:
            self._hold(head)

    def next_row(self) -> CsvRow | None:
        """Return the next row, which may be a blank line, or None at the end of the file."""
        line, offset, self._is_large = self._line, self.offset, False
        if not self._next_byte():
            return None
        is_last = False
        while not is_last:
            if self._next_byte() == b'"':
                self._pass_quoted(line)
            is_last = self._pass_plain()
        text = bytes(self._held[self._start : self._at])
        if self._at < len(self._held):  # the row ends with its line, not with the file
            text = text.removesuffix(b"\r")
            self._at += 1
        is_large = self._is_large or len(text) > self._most_bytes
        self._drop()
        return CsvRow(None if is_large else text, line, self.offset - offset)

    def _pass_quoted(self, line: int) -> None:
        """Pass over a quoted text and its closing quote, in a row that begins in ``line``.

        Raises BadLineError: the quote has no end.
        """
        self._at += 1
        while True:
            self._at, is_whole = _end_of_quoted(self._held, self._at, is_all=self._is_end)
            if is_whole:
                return
            if self._is_end:
                problem = f"{line}: a quote in the row that begins here has no end"
                remedy = 'end the cell with one, and write each quote within it as ""'
                raise BadLineError(f"{problem}; {remedy}")
            self._read_more()

    def _pass_plain(self) -> bool:
        """Pass over cells without quotes. Return whether the row ends behind them."""
        while True:
            end = _END.search(self._held, self._at)
            self._at = len(self._held) if end is None else end.start()
            num_left = len(self._held) - self._at
            if num_left and self._held[self._at] == ord("\n"):
                return True
            if num_left > 1:  # at a comma before a quote
                self._at += 1
                return False
            if self._is_end:
                self._at += num_left  # a last comma
                return True
            self._read_more()

    def _next_byte(self) -> bytes:
        """Return the byte at ``at``, or no byte at the end of the file."""
        if self._at == len(self._held) and not self._is_end:
            self._read_more()
        return bytes(self._held[self._at : self._at + 1])

    def _drop(self) -> None:
        """Drop the bytes that were scanned."""
        self._line += self._held.count(b"\n", self._start, self._at)
        self.offset += self._at - self._start
        self._start = self._at

    def _read_more(self) -> None:
        # One more byte may be held, since a "\r" may belong to the end of the line.
        self._is_large = self._is_large or len(self._held) - self._start > self._most_bytes + 1
        if self._is_large:
            self._drop()
        del self._held[: self._start]
        self._at, self._start = self._at - self._start, 0
        more = self._file.read(_READ)
        self._is_end = not more
        self._hold(more)

    def _hold(self, more: bytes) -> None:
        """Add ``more`` to the bytes that are held. Raises BadLineError: they are not UTF-8."""
        num_pending = len(self._decoder.getstate()[0])
        try:
            self._decoder.decode(more, not more)
        except UnicodeDecodeError as error:
            num_good = max(0, error.start - num_pending)
            line = self._line + self._held.count(b"\n", self._start)
            line += more.count(b"\n", 0, num_good)
            byte = f"byte 0x{error.object[error.start]:02x} is not UTF-8: {error.reason}"
            raise BadLineError(f"{line}: {byte}; {TO_UTF8}") from None
        self._held += more


def _end_of_quoted(text: bytes | bytearray, at: int, *, is_all: bool) -> tuple[int, bool]:
    """Find the end of the quoted text within which ``at`` is.

    ``is_all`` is True if nothing follows ``text``.

    Returns:
        The index behind the quote that ends it, and True; or the index from which to go on when
        more is read, and False.
    """
    while True:
        doubled = _DOUBLED.match(text, at)
        assert doubled is not None  # there may be none
        quote = text.find(b'"', doubled.end())
        if quote < 0:
            return len(text), False
        at = quote + 1
        if at == len(text) and not is_all:  # another quote may follow
            return quote, False
        if text[at : at + 1] != b'"':
            return at, True
        at = quote
