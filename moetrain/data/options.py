"""Finds the options of a question, and answers that only point at one of them.

MMLU's ``answer`` is an index from 0 into ``choices``, WinoGrande's one from 1 into ``option1`` and
``option2``, and RACE's a letter. Such an answer says something only if the question numbers or
letters its options::

    answer   options                    what it may be
    2        option1, option2           the second one: an index from 1
    "0"      ["red", "blue"]            the first one: an index from 0
    1        ["red", "blue"]            either: it does not show where the index begins
    "B"      ["red", "blue"]            the second one
    "red"    ["red", "blue"]            the text itself, which is no pointer

Left out on purpose: reading the option in its place, since only the user knows where an index
begins. The names of fields do not tell: PIQA's ``label`` 0 is ``sol1``, and WinoGrande's 1 is
``option1``.
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

CHOICES = {"choices", "options", "endings"}
"""Names of fields with the answers that a question gives to choose from: MMLU's, RACE's and
HellaSwag's."""
_CHOICE = re.compile(r"(?:op|opt|option|choice|ending|sol|alternative)_?[a-e0-9]|[a-e]", re.I)
"""Matches the name of a field with one choice, if a record has several: MedMCQA's, PIQA's."""
_INDEX = re.compile(r"(\d{1,2})(?:\.0)?")
"""Matches an index. In a table it may be the text of a float."""
_LETTER = re.compile(r"\(?([A-Z])[).]?")
_MARKS = re.escape("].:)}=|>-*`'\"\u2013\u2014\u3001\u3002\uff0e\uff1a\uff09")
"""Marks between a label and its option, with those of Chinese and Japanese."""
_MOST_CHARACTERS = 64
"""Most characters at an end of an option that are looked for: those of passages take minutes."""
_BEGINS = (0, 1)
"""The numbers at which an index may begin."""


class Pointer(NamedTuple):
    """An answer that may only point at one of the options of a question."""

    label: str
    """The index or the letter, or the name of the field with the option."""
    fields: tuple[str, ...]
    """The fields with the options."""
    options: tuple[str, ...]
    """The texts of all options."""
    by_begin: Mapping[int, str]
    """The text that it points at if the index begins at 0 or at 1. Empty: it is no index, or the
    options have labels of their own."""
    text: str
    """The text that it points at otherwise. Empty: it is an index."""

    @property
    def where(self) -> str:
        """The fields with the options, as one text."""
        return " and ".join(f"`{field}`" for field in self.fields)

    def is_explained(self, shown: Iterable[str]) -> bool:
        """Return whether a text of ``shown`` has the label beside an option: ``B. Paris``."""
        # Any white space of an option may be another one in the question.
        texts = [" ".join(text.split()) for text in self.options if text.split()]
        first = [_pattern(text[:_MOST_CHARACTERS]) for text in texts]
        last = [_pattern(text[-_MOST_CHARACTERS:]) for text in texts]
        if not texts:
            return False
        label = re.escape(self.label)
        # Letters are no end of a word. "option2: Paris" has the number 2.
        begin = r"(?<!\d)" if self.label.isdigit() else r"(?<![^\W_])"
        ways = [
            rf"{begin}{label}\W{{0,8}}?[{_MARKS}]\W{{0,8}}(?:{'|'.join(first)})",
            rf"^[ \t]*{label}[ \t]+(?:{'|'.join(first)})",
            rf"(?:{'|'.join(last)})\s{{0,3}}[(\[]{label}[)\]]",
            *(text for text in first if re.match(rf"\W{{0,4}}{label}\W", text)),  # AQuA's "A)21"
        ]
        found = re.compile("|".join(ways), re.I | re.M)
        return any(found.search(text) for text in shown)


def listed(value: object) -> object:
    """Return the list that is written in ``value``, a text of JSON or of Python's notation, as CSV
    has it. Return any other value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                return read(value.strip())
    return value


def choices_of(record: Mapping[str, Any]) -> list[str]:
    """Return the fields with the answers that a question gives to choose from."""
    single = [key for key in record if _CHOICE.fullmatch(key) and _has_text(record[key])]
    named = [key for key in record if key.lower() in CHOICES]
    return named + single * (len(single) > 1)


def pointer_in(record: Mapping[str, Any], answer: object) -> Pointer | None:
    """Return the option of ``record`` at which ``answer`` may point.

    None: ``answer`` is no index, letter or name of an option, or it is the text of an option.
    """
    if isinstance(answer, bool) or not isinstance(answer, int | float | str):
        return None
    for fields, labels, values in _options_in(record):
        given = answer.strip() if isinstance(answer, str) else answer
        if any(type(value) is type(given) and value == given for value in values):
            return None
        label, texts = str(given), tuple(map(str, values))
        if label in labels:
            return Pointer(label, fields, texts, {}, texts[labels.index(label)])
        if (letter := _LETTER.fullmatch(label)) and ord(letter[1]) - ord("A") < len(texts):
            return Pointer(letter[1], fields, texts, {}, texts[ord(letter[1]) - ord("A")])
        if index := _INDEX.fullmatch(label):
            number = int(index[1])
            found = {x: texts[number - x] for x in _BEGINS if 0 <= number - x < len(texts)}
            if found:
                return Pointer(index[1], fields, texts, found, "")
    return None


def kind_of(pointers: Iterable[Pointer]) -> str:
    """Describe what answers are that point at options, such as "an index from 0 into"."""
    indices = [pointer for pointer in pointers if pointer.by_begin]
    if not indices:
        return "a letter or a name for"
    begins = [x for x in _BEGINS if all(x in pointer.by_begin for pointer in indices)]
    if len(begins) == 1:
        return f"an index from {begins[0]} into"
    return "an index (from 0 or from 1, its values do not show) into"


def _pattern(text: str) -> str:
    """Return a pattern of ``text`` with any white space between its words."""
    return r"\s+".join(map(re.escape, text.split()))


def _options_in(
    record: Mapping[str, Any],
) -> Iterable[tuple[tuple[str, ...], list[str], list[Any]]]:
    """Yield the fields with options, the labels that they give them, and the options."""
    keys = choices_of(record)
    for key in keys:
        labels, values = _labelled(listed(record[key]))
        if len(values) > 1 and key.lower() in CHOICES:
            yield (key,), labels, values
    single = [key for key in keys if key.lower() not in CHOICES and isinstance(record[key], str)]
    if len(single) > 1:
        yield tuple(single), single, [record[key] for key in single]


def _labelled(value: object) -> tuple[list[str], list[Any]]:
    """Return the labels and the options in a list, or in an object: ARC's ``text`` and ``label``,
    or an option for each letter."""
    labels: list[str] = []
    if isinstance(value, Mapping):
        texts, given = value.get("text"), value.get("label")
        if isinstance(texts, list) and isinstance(given, list) and len(texts) == len(given):
            labels, value = [*map(str, given)], texts
        elif all(re.fullmatch(r"[A-Za-z]|\d", str(key)) for key in value):
            labels, value = [*map(str, value)], [*value.values()]
    are_options = isinstance(value, list) and all(
        isinstance(each, str | int | float) for each in value
    )
    return (labels, [*value]) if are_options and isinstance(value, list) else ([], [])


def _has_text(value: object) -> bool:
    """Return whether a value is a text, or holds one."""
    if isinstance(value, Mapping | list):
        return any(map(_has_text, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, str) and value.strip() not in ("", "[]", "{}")
