r"""The reward that compares answers by the library math-verify.

math-verify finds values in texts: in ``\boxed{}``, between dollar signs, or the last number. So it
finds 3 in ``3\sqrt{2}``. Sets of problems (MATH-500) write such answers without any marks. A text
that is an expression as a whole is therefore read as if it were boxed::

    3\sqrt{2}            3 sqrt(2)        [2,5)       the interval      1,2,3      the set
    10 apples\n#### 10   10               So $x=2$.   x = 2             proof      no value

The same text as the right answer is right, whatever math-verify reads in it (``9:30 a.m.``).
Blanks, ``\text`` and the marks around a text make no difference.

Of a policy's text only the final answer counts (:mod:`moetrain.rl.envs.final_answers`). It is read
as an expression if it is LaTeX without words, or all numbers and signs, as ``(12)`` and ``(0, 1]``
are. So ``12, 13`` and ``12 or 13`` are two values, and not the last one. The same holds for what a
text states behind its last "answer is", up to the end of the clause (``The answer is (3, 4),
because ...``), or behind an "is" or a colon at its end. Other texts (``It is 7 apples.``) are
math-verify's, and a number behind "not" does not count.

math-verify finds a letter only in a box. If the right answer is a capital letter, the letter that
the policy's text names is compared (:mod:`moetrain.rl.envs.letters`). If a value follows the letter
(``\textbf{(B)}\ 12``), it is compared where a text names no letter. Words (``True``,
``\text{Evelyn}``) are compared as such, without regard to case, as math-verify compares ``\text``.
They must be all of the answer, all of a box, or the rest of the line behind "answer is" or
"answer:", as lm-evaluation-harness (BBH) and verl (DAPO) find them.
"""

import logging
import re
from functools import partial
from types import ModuleType
from typing import Any

from moetrain.rl.envs.final_answers import final_answer, readable, signs_in_latex
from moetrain.rl.envs.letters import letter_alone, letter_of

_MARKS = re.compile(r"\$|\\boxed|\\\(|\\\[|####|<<|\S\s*\n\s*\S")
"""Matches what no single expression has: marks around a value, and several lines."""
_COMMANDS = re.compile(
    r"\\(?:text|textbf|mathrm|mbox)\{[^{}]*\}|\\begin\{\w+\*?\}(?:\{[lcr|\s]*\})?|\\end\{\w+\*?\}"
    r"|\\[A-Za-z]+"
)
_ENVIRONMENT = re.compile(r"\\begin\{(\w+\*?)\}.{0,2000}?\\end\{\1\}", re.DOTALL)
_GAP = re.compile(r"\\\\\s*\[[^\[\]]*(?:pt|em|ex|mm|cm)\]")
"""Match a matrix or the like, and the end of a row with the height of the gap below it."""
_AROUND = re.compile(r"\$+([^$]*)\$+|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_NO_VALUE = re.compile(
    r"\\begin\{(?!array|[pbvVB]?matrix)|\\\{\s*\\begin\{array\}|\d:\d+\W*[A-Za-z]"
)
"""Matches systems of equations and times of the day, of which math-verify takes one number."""
_WORD = re.compile(
    r"(?!(?:sin|cos|tan|cot|sec|csc|log|exp|max|min|mod|sqrt|inf|gcd|lcm)\b)[A-Za-z]{3,}"
)
"""A word that is no name of a function."""
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_FLAT = r"\\.|[^{}\\]"
_BRACES = rf"\{{(?:{_FLAT}|\{{(?:{_FLAT}|\{{(?:{_FLAT})*\}})*\}})*\}}"
"""Matches braces with two more levels of them within."""
_BOX = re.compile(rf"\\boxed\s*\{{((?:{_FLAT}|{_BRACES})*)\}}", re.DOTALL)
_BLANKS = re.compile(r"\s+|~|(?<!\\)\\(?:[ ,;!]|q?quad\b)")
_NOT_BETWEEN_DIGITS = re.compile(r"(?<!\d) | (?!\d)")
_POWER = re.compile(r"\^\{(\w|[-+]?\d+)\}")
_LETTER_BEFORE = re.compile(
    r"\s*(\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{\s*\([A-Z]\)\s*\})"
    r"(?:[\s:~]|\\(?:[ ,;:!]|q?quad\b))*(?=\S)"
)
"""Matches the letter before a value: AMC's ``\\textbf{(B)}\\ 12``."""
_ANSWER_IS = re.compile(r"\banswer\b[*_\s]*(?:is\b\s*:?|:)(.*)", re.I)
_IS_AT_END = re.compile(r"(?:\bis\b|:(?=\s))((?:(?!\bis\b|:\s).)*)\Z")
_CLAUSE_ENDS = re.compile(
    r"[.;,]?\s*\Z|[.;,]\s+(?=[A-Za-z])|(?<=\S):\s|\s+\(?(?=(?:not|because|since|as)\b)"
)
_TEXT_ENDS = re.compile(r"[.;,]?\s*\Z")
_TWO_LETTERS = re.compile(r"[A-Za-z]{2}")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s,'\u2019-]+[^\W\d_]+)*")
_NUMBERS = re.compile(r"[\d.,]*\d(?:\^\{?-?\d+\}?)?")
_DIGIT = re.compile(r"\d")
_LISTED = re.compile(r",?\s+(?:or|and)\s+(?=[-+]?[$€£¥₹]?\.?\d)")
_NOT_TYPED = re.compile(r"[^\W\d_]|[$#!|]|\S\s*\n\s*\S|\d\s+[\d(\[]")
"""Matches what is more than numbers and signs, and digits that only a space divides from others or
from a bracket: 1 024, and 12 [1]."""
_DECIMAL = re.compile(r"\s*-?\d+,\d+\s*\.?\s*")
_MOST_TYPED = 200
"""Most characters of an expression without LaTeX."""


class MathReward:
    """Scores 1 if an answer has the value of the line's ``answer``, else 0.

    math-verify understands LaTeX, and different ways to write a number. The same text as the
    ``answer`` scores 1 too, and so does a text that names its letter or its words.
    """

    def __init__(self, library: ModuleType) -> None:
        """Compare by ``library``, which is math_verify."""
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no limit
        # math-verify's own time limits use signals, which only the main thread gets. The call of
        # the reward function has a limit anyway.
        self._parse = partial(library.parse, parsing_timeout=None)
        self._verify = partial(library.verify, timeout_seconds=None)

    def __call__(self, line: dict[str, Any], answer: str) -> float:
        right, final = str(line["answer"]), final_answer(answer)
        if right.strip() in (answer.strip(), final.strip()):
            return 1.0
        right = signs_in_latex(right)
        before = _LETTER_BEFORE.match(right)
        letter = letter_alone(before[1] if before else right)
        if letter and (named := letter_of(answer)):
            return float(named == letter)
        right = right[before.end() :] if before else right
        final = signs_in_latex(readable(final))
        if (same := _same(right)) and same in (_same(_said(final)), _same(final)):
            return 1.0
        if (words := _words(right)) and words == _words(_said(final)):
            return 1.0
        return float(self._verify(self.values(right), self._given(final)))

    def _given(self, text: str) -> list[Any]:
        """Return what a final answer may stand for, as :meth:`values` does."""
        if (boxes := _BOX.findall(text)) and _NO_VALUE.search(boxes[-1]):
            return self.values(boxes[-1])
        if not boxes and not _is_whole(_bare(text)) and (stated := _stated(text)):
            return self._typed(stated) if "\\" not in stated else self.values(stated)
        return self.values(_bare(text)) if "\\" in text else self._typed(_bare(text))

    def _typed(self, text: str) -> list[Any]:
        """Return what a final answer without LaTeX may stand for, as :meth:`values` does."""
        listed = _LISTED.sub(", ", text)
        if len(text) > _MOST_TYPED or not _DIGIT.search(text):
            return self._parse(text)
        if _NOT_TYPED.search(listed):
            return self._parse(text) or self.values(text)
        # 12,5 may be a number, and a list.
        return self.values(listed) + (self._parse(text) if _DECIMAL.fullmatch(text) else [])

    def values(self, text: str) -> list[Any]:
        """Return what ``text`` may stand for: values of sympy, and texts. Empty: no value."""
        text = _ENVIRONMENT.sub(_on_one_line, text)
        alone = _AROUND.fullmatch(text.strip())
        inner = next(filter(None, alone.groups()), "") if alone else text.strip()
        if _NO_VALUE.search(inner) and _is_expression(inner):
            return [inner]
        if not _is_expression(text):
            return self._parse(text)
        found = self._parse(rf"\boxed{{{text.strip()}}}")
        if len(_NUMBERS.findall(text)) != 1 or any(not isinstance(x, str) for x in found):
            return found
        return self._parse(text) or found  # 90° and 10^-4 eV: one number, and its unit


def _bare(text: str) -> str:
    """Return ``text`` without Markdown's emphasis around it."""
    return text.strip(" \t\r\n*_")


def _is_whole(text: str) -> bool:
    """Return whether ``text`` is numbers and signs alone, or LaTeX without words and marks."""
    if len(text) > _MOST_TYPED or not _DIGIT.search(text):
        return False
    if "\\" in text:
        return _is_expression(text) and _TWO_LETTERS.search(_COMMANDS.sub(" ", text)) is None
    return _NOT_TYPED.search(_LISTED.sub(", ", text)) is None


def _stated(text: str) -> str | None:
    """Return what ``text`` states as a whole expression: behind its last "answer is", else behind
    the "is" or the colon at its end. None: it states none."""
    for pattern, ends in ((_ANSWER_IS, _CLAUSE_ENDS), (_IS_AT_END, _TEXT_ENDS)):
        if found := pattern.findall(text.rstrip()):
            stated = _bare(ends.split(found[-1][: 2 * _MOST_TYPED], maxsplit=1)[0])
            return stated if _is_whole(stated) else None
    return None


def _on_one_line(found: re.Match[str]) -> str:
    return " ".join(_GAP.sub(r"\\\\", found[0]).split())


def _is_expression(text: str) -> bool:
    """Return whether the whole ``text`` seems to be one expression, in LaTeX or as one types it."""
    has_words = _WORD.search(_COMMANDS.sub(" ", text)) is not None
    return not has_words and _MARKS.search(text.strip()) is None


def _said(text: str) -> str:
    """Return what ``text`` has in its last box, else behind its last "answer is", else all."""
    for pattern in (_BOX, _ANSWER_IS):
        if found := pattern.findall(text):
            return found[-1]
    return text


def _same(text: str) -> str:
    r"""Return ``text`` without ``\text``, the marks around it, and blanks that divide no digits.

    ``5\text{ cm}^{2}`` and ``5 cm^2`` are the same then.
    """
    plain = _BLANKS.sub(" ", _TEXT.sub(r"\1", text)).strip(" *_$").rstrip(" .*_$")
    return _NOT_BETWEEN_DIGITS.sub("", _POWER.sub(r"^\1", " ".join(plain.split())))


def _words(text: str) -> str | None:
    """Return the words that ``text`` is, in lower case, without marks. None: it is no words."""
    plain = " ".join(_TEXT.sub(r" \1 ", text).strip(" \t\r\n*_$.!").split())
    return plain.casefold() if _WORDS.fullmatch(plain) else None
