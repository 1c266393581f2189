r"""Finds the letter that an answer to a multiple-choice question names.

lighteval and lm-evaluation-harness look for a letter around the word "answer". So does this module.
The first of these rules that finds a letter decides, and within a rule the last letter of a text::

    1. in a box              \boxed{A}     \boxed{\text{(A)}}
    2. at the text's end     A     **A**     (A).     So $A$     No wait, it is A.
    3. stated                The answer is A, because ...     Answer: A     (A) is correct
                             答案是A     故选A     La respuesta es A     Die Antwort ist A
    4. at a line's start     A) 12     A. The sum     unless other lines begin with other letters

If several letters stand there, as in "A or B" and ``\boxed{A, B}``, none is named.

Of the final answer (:mod:`moetrain.rl.envs.final_answers`) the last 16,384 characters are read.
Letters are capital. ``A`` and ``I`` before a word, as in "A good guess", are words, unless a
bracket closes them, as in "A) a dog". A letter behind "not" does not count, nor one within a
formula.
"""

import re
from collections.abc import Iterable, Iterator

from moetrain.rl.envs.final_answers import final_answer, readable

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
_NOUNS = (
    "respuesta|opción|réponse|antwort|risposta|opzione|resposta|opção|antwoord|ответ|odpowiedź"
    "|odpověď|cevap|jawaban"
)
_ARE = "es|est|ist|è|é|is|jest|je|adalah"
"""Words for "answer" and "option", and for "is": Spanish, French, German, Italian, Portuguese,
Dutch, Russian, Polish, Czech, Turkish, Indonesian. Negations stand behind "is", or are in
``_STATES``."""
_STATES = re.compile(
    r"(?:\b(?:answer|option|choice)\b(?:[^\n.:=]{0,60}?\b(?:is|be)\b|[*_\s]*[:=])"
    r"|\b(?:answer|choose|pick|select)"
    rf"|\b(?:{_NOUNS})\b(?:[^\n.:=]{{0,60}}?(?<!\bno )(?<!\bnon )(?<!\bnão )(?<!\bnie )"
    rf"\b(?:{_ARE})\b|[*_\s]*[:=])"
    r"|(?:答案|选项|選項|正解|答え|回答|정답|답)(?:[^\n.:=,不非因]{0,10}?(?:是|为|為|は|은)|[*_\s]*[:=])"
    r"|答案|(?<!不)(?<!不应)(?<!不该)(?<!不应该)(?<!不能)(?<!不会)(?<!不要)(?<!不可)(?<!别)[选選][择擇]?)[*_\s:=]*"
    r"(?:\w+ly\s+)?(?:(?:the|la|l['\u2019]|die)\s*)?(?:(?:correct|right|best)\s+)?"
    r"(?:(?:answer|option|choice|opción|opzione|opção|选项|選項)[\s:]*)?",
    re.I,
)
_IS = r"\s+is\s+(?:\w+ly\s+)?(?:the\s+)?"
_IS_RIGHT = re.compile(rf"{_IS}(?:correct|right|best|answer)\b|\s*(?:选项|項)?是?(?:正确|对的)")
_IS_WRONG = re.compile(
    rf"{_IS}(?:not|wrong|incorrect|false)\b|\s*(?:选项|項)?是?(?:错|錯|不对|不正确)"
)
_OR = re.compile(
    r",?\s*(?:or|and/or|oder|ou|o|或|或者|还是)\s+(?:(?:maybe|perhaps|possibly)\s+)?(?:(?:option|choice|answer)\s+)?",
    re.I,
)
_AND = re.compile(
    r"(?:[,&]|,?\s*(?:and|und|et|y|e|和|及|与)\s)\s*(?:(?:option|choice|answer)\s+)?", re.I
)
"""Match what stands between two letters of a list, behind spaces."""
_SUBJECT = re.compile(r"\s+(?!(?:or|and|because|since|as|for|but|so|if|depending)\b)[a-z]")
"""Matches what follows the subject of a clause: "It is B, and A doubles it" lists no letters."""
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
    """Return the letter that ``text`` names as its answer. None: it names none, or several."""
    text = readable(final_answer(text))[-_MOST:]
    end = len(
        re.sub(r"\s*(?:选项|選項|选|項|项)\Z", "", text.rstrip(_BEHIND_LAST)).rstrip(_BEHIND_LAST)
    )
    ranked: dict[int, list[set[str]]] = {}
    for listed in _lists(found for found in _LETTER.finditer(text) if _counts(found)):
        ranks = [_rank(found, is_last=found.end("letter") >= end) for found in listed]
        if best := min(filter(None, ranks), default=None):
            ranked.setdefault(best, []).append({found["letter"] for found in listed})
    if not ranked:
        return None
    rank = min(ranked)
    named = set.union(*ranked[rank]) if rank == _STARTS_LINE else ranked[rank][-1]
    return named.pop() if len(named) == 1 else None


def _lists(letters: Iterable[re.Match[str]]) -> Iterator[list[re.Match[str]]]:
    """Yield the letters in lists, such as "A, B or C". A letter that stands alone is one of one."""
    current: list[re.Match[str]] = []
    for found in letters:
        if current and not _are_listed(current[-1], found):
            yield current
            current = []
        current.append(found)
    if current:
        yield current


def _are_listed(first: re.Match[str], second: re.Match[str]) -> bool:
    """Return whether only a comma, "and" or "or" stands between two letters of a text."""
    if second.start() - first.end() > _NEAR:
        return False
    between = first.string[first.end() : second.start()].lstrip()
    is_subject = _SUBJECT.match(second.string, second.end())
    return bool(_OR.fullmatch(between) or (_AND.fullmatch(between) and not is_subject))


def _around(found: re.Match[str]) -> tuple[str, str]:
    """Return the text before and behind a letter."""
    before = found.string[max(0, found.start() - _NEAR) : found.start()]
    return before, found.string[found.end() : found.end() + _NEAR]


def _counts(found: re.Match[str]) -> bool:
    """Return whether a letter may be an answer: it is no word, not denied and in no formula."""
    before, after = _around(found)
    is_word = (
        not (found["open"] or found["shut"]) and found["letter"] in "AI" and _WORD.match(after)
    )
    is_denied = _IS_WRONG.match(after) or _ends_with(_NOT, before)
    return not (is_word or is_denied or _FORMULA.match(after))


def _rank(found: re.Match[str], *, is_last: bool) -> int | None:
    """Return the number of the rule by which a letter is named. None: by none."""
    before, after = _around(found)
    if "boxed" in found["open"]:
        return 1
    starts_line = not before.rpartition("\n")[2].strip(" \t-#>")
    if is_last and (found["open"] or starts_line or _ends_with(_LEADS, before)):
        return 2
    if _ends_with(_STATES, before) or _IS_RIGHT.match(after):
        return 3
    is_label = after[:1] in (")", ".", ":", "\n") or ")" in found["shut"]
    return _STARTS_LINE if starts_line and is_label else None


def _ends_with(pattern: re.Pattern[str], text: str) -> bool:
    """Return whether ``text`` ends with a match of ``pattern``."""
    return any(found.end() == len(text) for found in pattern.finditer(text))
