"""Reads the elements of a JSON array one by one, however large the file is: ``[{...}, {...}]``.

``json.load`` would hold the whole file and all of its objects. Here a scan for brackets, commas and
strings finds where an element ends, and the caller parses that element alone. The scan does not
check the elements, because the caller's parser finds their errors. An element that is too large is
passed over, and the scan continues after it.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_TOKEN = re.compile(rb'["\[\]{},]')
_ESCAPES = re.compile(rb'(?:[^"\\]*\\.){0,4096}', re.DOTALL)
"""Matches the inside of a string up to its last escape, or to one of many. The number is limited
because Python keeps a place for each. Possessive quantifiers, which do not, are wrong in
Python 3.11.2."""
_QUOTE = re.compile(rb'["\\]')
"""Matches the end of a string, or the beginning of an escape."""
_TURNS = re.compile(rb'\[\s*\{\s*"(?:role|from|content|value)"\s*:')
"""Matches the beginning of a list of turns."""
_BLANKS = re.compile(rb"[ \n\r\t]*")
_READ = 1 << 20
"""Least bytes that are read at once. If more bytes are held already, as many again are read."""
_BOM = b"\xef\xbb\xbf"


class Element(NamedTuple):
    """One element of the array."""

    text: bytes | None
    """The element's JSON. None: it has more bytes than the caller takes, and was passed over."""
    line: int
    """The line in which the element begins, from 1."""
    num_bytes: int
    """Bytes of the element in the file, with the comma or bracket behind it."""
    end: int
    """The line of the comma or bracket behind the element."""


def is_array(file: Any) -> bool:
    """Return whether the buffered ``file`` holds an array. The file stays at its beginning.

    A file of lines may begin like an array because its records are lists of turns. It holds none.
    """
    begins = file.peek(len(_BOM) + 1).removeprefix(_BOM).lstrip()
    if begins[:1] != b"[":
        return False
    line, is_whole, _ = begins.partition(b"\n")
    return not (_TURNS.match(line) and (line.rstrip()[-1:] == b"]" or not is_whole))


def begins_object(file: Any) -> bool:
    """Return whether the first line of the buffered ``file`` begins an object that goes on behind
    it, as indented JSON does. The file stays at its beginning.

    A line that is longer than the buffer is taken as a whole record.
    """
    begins = file.peek(len(_BOM) + 1).removeprefix(_BOM).lstrip()
    line, is_whole, _ = begins.partition(b"\n")
    if line[:1] != b"{" or not is_whole:
        return False
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(error.doc.rstrip())
    except (ValueError, RecursionError):  # bytes of another encoding, and objects in objects
        return False
    return False


def array_elements(file: Any, most_bytes: int) -> Iterator[Element]:
    """Yield the elements of the array in ``file``.

    An element of more than ``most_bytes`` is passed over, and is never held as a whole.

    Raises ValueError: the array does not end, or something follows it.
    """
    scanner, is_first, is_last = _Scanner(file, most_bytes), True, False
    while not is_last:
        element, is_last = scanner.next_element()
        if not (is_first and is_last and element.text == b""):  # [] has no element
            yield element
        is_first = False
    scanner.check_end()


class _Scanner:
    """Finds where the elements of an array end. It holds only what it still needs of the file.

    ``held[start:at]`` is the part of the current element that was scanned and may be needed.
    """

    def __init__(self, file: Any, most_bytes: int) -> None:
        self._file, self._most_bytes = file, most_bytes
        self._held: bytes = file.read(_READ).removeprefix(_BOM)
        self._at = self._start = self._held.index(b"[") + 1
        self._line = 1 + self._held.count(b"\n", 0, self._start)
        """The line of ``held[start]``."""

    def next_element(self) -> tuple[Element, bool]:
        """Return the next element, and whether the array ends after it."""
        self._pass_blanks()
        line, depth, num_dropped, is_large = self._line, 0, 0, False
        while True:
            found = _TOKEN.search(self._held, self._at)
            if found is not None and found[0] == b'"':
                end, is_whole = _end_of_string(self._held, found.end())
                if is_whole:
                    self._at = end
                    continue
            if found is None or found[0] == b'"':  # more has to be read
                is_large = is_large or len(self._held) - self._start > self._most_bytes
                if not is_large:
                    self._at = len(self._held) if found is None else found.start()
                    self._read_more()
                elif found is None:
                    self._at = len(self._held)
                    num_dropped += self._drop()
                    self._read_more()
                else:
                    self._at = found.end()
                    num_dropped += self._pass_string()
                continue
            self._at = found.end()
            depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(found[0], 0)
            if depth < 0 or (depth == 0 and found[0] == b","):
                text = self._held[self._start : found.start()].rstrip()
                is_large = is_large or len(text) > self._most_bytes
                num_bytes = num_dropped + self._drop()
                return Element(None if is_large else text, line, num_bytes, self._line), depth < 0

    def check_end(self) -> None:
        """Raise ValueError if anything follows the array."""
        # If a "}" closes the array, it is not removed here, and is refused.
        rest = self._held[self._at - 1 :].removeprefix(b"]")
        while rest:
            if rest.strip():
                raise ValueError(f"something follows the array: {rest.strip()[:40]!r}")
            rest = self._file.read(_READ)

    def _pass_blanks(self) -> None:
        while True:
            blanks = _BLANKS.match(self._held, self._at)
            assert blanks is not None  # there may be none
            self._at = blanks.end()
            self._drop()
            if self._at < len(self._held):
                return
            self._read_more()

    def _pass_string(self) -> int:
        """Pass over the rest of a string without holding it. Return the number of bytes dropped."""
        num_dropped = 0
        while True:
            self._at, is_whole = _end_of_string(self._held, self._at)
            if is_whole:
                return num_dropped
            num_dropped += self._drop()
            self._read_more()

    def _drop(self) -> int:
        """Drop the bytes that were scanned, and return their number."""
        size = self._at - self._start
        self._line += self._held.count(b"\n", self._start, self._at)
        self._start = self._at
        return size

    def _read_more(self) -> None:
        more = self._file.read(max(_READ, len(self._held) - self._start))
        if not more:
            raise ValueError("the array has no end")
        self._held = self._held[self._start :] + more
        self._at, self._start = self._at - self._start, 0


def _end_of_string(text: bytes, at: int) -> tuple[int, bool]:
    """Find the end of the string within which ``at`` is.

    Returns:
        The index behind the quote that ends it, and True; or the index from which to go on when
        more of the string is read, and False.
    """
    while True:
        escapes = _ESCAPES.match(text, at)
        assert escapes is not None  # there may be none
        found = _QUOTE.search(text, escapes.end())
        if found is None:
            return len(text), False
        if found[0] == b'"':
            return found.end(), True
        if found.end() == len(text):  # what is escaped is not read yet
            return found.start(), False
        at = found.start()
