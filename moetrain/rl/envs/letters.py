r"""Finds the letter that an answer to a multiple-choice question names.

lighteval and lm-evaluation-harness look for a letter around the word "answer". So does this module.
The first of these rules that finds a letter decides, and within a rule the last letter of a text::

    1. in a box              \boxed{A}     \boxed{\text{(A)}}
    2. at the text's end     A     **A**     (A).     So $A$     No wait, it is A.
    3. stated                The answer is A, because ...     Answer: A     (A) is correct
    4. at a line's start     A) 12     A. The sum     unless other lines begin with other letters

Of a text behind ``</think>`` only the last 16,384 characters are read. Letters are capital. ``A``
and ``I`` before a word, as in "A good guess", are words. A letter behind "not" does not count, nor
one within a formula.
"""

import re

_OPEN = r"(?:[*_$(\[\"'`“]|\\[(\[]|\\(?:text|textbf|mathbf|mathrm|boxed)\s*\{){0,8}"
_SHUT = r"(?:[*_$)\]\"'`”}]|\\[)\]]){0,8}"
"""Match the marks of Markdown and LaTeX, the quotes and the brackets before and behind a letter."""
_LETTER = re.compile(
    rf"(?<![\w\\])(?P<open>{_OPEN})(?P<letter>[A-Z])(?![\w'\u2019])(?P<shut>{_SHUT})"
)
_ALONE = re.compile(rf"\s*{_OPEN}(?P<letter>[A-Z])[.:]?{_SHUT}[.:]?\s*")
_WORD = re.compile(
    r"\s+(?!(?:because|since|as|and|or|which|where|for|but|so|then|not|is|with|by|from|in|if|to|of)"
    r"\b)[a-z]"
)
"""Matches a word that may follow an article. The words left out never do."""
_FORMULA = re.compile(r"\s*[=+^/<>]")
_NOT = re.compile(r"(?:\bnot|n't)\s+(?:the\s+)?(?:(?:option|choice|answer)\s+)?", re.I)
_LEADS = re.compile(
    r"(?:[,;:.!?=]|[\u2013\u2014]|\b(?:is|be|it's|so|choose|pick|select|say|thus|hence|therefore|but|option"
    r"|choice|answer))\s*",
    re.I,
)
"""Matches what stands before a letter at the end of a text, unless the letter is a part of a name,
as in "vitamin C"."""
_STATES = re.compile(
    r"\b(?:(?:answer|option|choice)\b(?:[^\n.:=]{0,60}?\b(?:is|be)\b|[*_\s]*[:=])|answer|choose|pick"
    r"|select)[*_\s:=]*(?:\w+ly\s+)?(?:the\s+)?(?:(?:correct|right|best)\s+)?"
    r"(?:(?:answer|option|choice)[\s:]*)?",
    re.I,
)
_IS = r"\s+is\s+(?:\w+ly\s+)?(?:the\s+)?"
_IS_RIGHT = re.compile(rf"{_IS}(?:correct|right|best|answer)\b")
_IS_WRONG = re.compile(rf"{_IS}(?:not|wrong|incorrect|false)\b")
_NEAR = 100
"""Most characters before and behind a letter that are searched for words such as "answer"."""
_BEHIND_LAST = " \t\r\n.!*_$)]}\"'`”\\"
"""Characters that may stand behind the last letter of a text."""
_MOST = 1 << 14
"""Most characters of a text that are read: its end. A policy may repeat a letter without end."""
_STARTS_LINE = 4
"""The last rule."""


def letter_alone(text: str) -> str | None:
    """Return the letter that is all of ``text``, such as ``(A)``. None: the text is another one."""
    found = _ALONE.fullmatch(text)
    return found["letter"] if found else None


def letter_of(text: str) -> str | None:
    """Return the letter that ``text`` names as its answer. None: it names none."""
    text = text.rpartition("</think>")[2][-_MOST:]
    end = len(text.rstrip(_BEHIND_LAST))
    ranked: dict[int, list[str]] = {}
    for found in _LETTER.finditer(text):
        if rank := _rank(found, is_last=found.end("letter") >= end):
            ranked.setdefault(rank, []).append(found["letter"])
    if not ranked:
        return None
    rank = min(ranked)
    is_list = rank == _STARTS_LINE and len({*ranked[rank]}) > 1
    return None if is_list else ranked[rank][-1]


def _rank(found: re.Match[str], *, is_last: bool) -> int | None:
    """Return the number of the rule by which a letter counts. None: it does not count."""
    is_marked, text = bool(found["open"]), found.string
    before = text[max(0, found.start() - _NEAR) : found.start()]
    after = text[found.end() : found.end() + _NEAR]
    is_word = not is_marked and found["letter"] in "AI" and _WORD.match(after)
    is_denied = _IS_WRONG.match(after) or _ends_with(_NOT, before)
    if is_word or is_denied or _FORMULA.match(after):
        return None
    if "boxed" in found["open"]:
        return 1
    starts_line = not before.rpartition("\n")[2].strip(" \t-#>")
    if is_last and (is_marked or starts_line or _ends_with(_LEADS, before)):
        return 2
    if _ends_with(_STATES, before) or _IS_RIGHT.match(after):
        return 3
    is_label = after[:1] in (")", ".", ":", "\n") or ")" in found["shut"]
    return _STARTS_LINE if starts_line and is_label else None


def _ends_with(pattern: re.Pattern[str], text: str) -> bool:
    """Return whether ``text`` ends with a match of ``pattern``."""
    return any(found.end() == len(text) for found in pattern.finditer(text))
