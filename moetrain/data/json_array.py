"""Reads the elements of a JSON array one by one, however large the file is: ``[{...}, {...}]``.

``json.load`` would hold the whole file and all of its objects. Here a scan for brackets, commas and
strings finds where an element ends, and the caller parses that element alone. A scan does not check
the elements: what is wrong within one is found by its parser.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{},]', re.DOTALL)
"""A whole string, the quote that begins one which is not read to its end, or what divides values.
Nothing is tried again (``*+``), so a string of any length is scanned once."""
_READ = 1 << 20
"""Bytes that are read at once, at least; as many again as are held already."""
_BOM = b"\xef\xbb\xbf"


class Element(NamedTuple):
    """One element of the array."""

    text: bytes
    line: int
    """The line, from 1, in which it begins."""


class TooLargeError(ValueError):
    """An element has more bytes than the caller takes; ``number`` counts elements from 1."""

    def __init__(self, number: int, line: int) -> None:
        super().__init__()
        self.number, self.line = number, line


def is_array(file: Any) -> bool:
    """Return whether the buffered ``file``, at its beginning, holds an array. Reads nothing."""
    return file.peek(len(_BOM) + 1).removeprefix(_BOM).lstrip()[:1] == b"["


def array_elements(file: Any, most_bytes: int) -> Iterator[Element]:
    """Yield the elements of the array in ``file``.

    Raises:
        TooLargeError: an element has more than ``most_bytes``.
        ValueError: the array does not end, or something follows it.
    """
    held = file.read(_READ).removeprefix(_BOM)
    at = start = held.index(b"[") + 1
    line, depth, number = 1 + held.count(b"\n", 0, start), 0, 1
    while True:
        found = _TOKEN.search(held, at)
        if found is None or found[0] == b'"':
            if len(held) - start > most_bytes and (text := held[start:].lstrip()):
                raise TooLargeError(number, line + held.count(b"\n", start, len(held) - len(text)))
            at = len(held) if found is None else found.start()
            more = file.read(max(_READ, len(held) - start))
            if not more:
                raise ValueError("the array has no end")
            held, at, start = held[start:] + more, at - start, 0
            continue
        token, at = found[0], found.end()
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(token, 0)
        is_end = depth < 0
        if not is_end and (depth or token != b","):
            continue
        text = held[start : found.start()]
        begins = line + _newlines_before(text)
        if len(text.strip()) > most_bytes:
            raise TooLargeError(number, begins)
        if not is_end or number > 1 or text.strip():  # [] has no element
            yield Element(text.strip(), begins)
        line, number, start = line + text.count(b"\n"), number + 1, at
        if is_end:
            break
    rest = held[at - 1 :].removeprefix(b"]")  # unless another bracket ends it
    while rest:
        if rest.strip():
            raise ValueError(f"something follows the array: {rest.strip()[:40]!r}")
        rest = file.read(_READ)


def _newlines_before(text: bytes) -> int:
    return text.count(b"\n", 0, len(text) - len(text.lstrip()))
