"""Finds the final answer in a text, and writes it so that math-verify and patterns can read it.

Prompts of reasoning models ask for ``<think> ... </think> <answer> ... </answer>``
(DeepSeek-R1-Zero, arXiv 2501.12948). Therefore only the text behind the last ``</think>`` counts,
and of it what the last ``<answer>`` holds. The closing tag may be missing, because it may be the
stop text of a run, and the opening tag may end the prompt. A text counts whole if nothing stands
behind its thoughts, or within its tags.

math-verify and patterns for letters look for a space before a number or a letter, and for the
punctuation of ASCII. :func:`readable` writes these::

    Answer:12    Answer: 12        答案是12。     Answer: 12.        <b>12</b>    12
    `12`         12                １２           12                 *12*         12
    ####12       #### 12           故选A。        故选 A.            “A”          A

Within LaTeX only spaces before numbers are added, which mean nothing there.
"""

import re

_TAG = re.compile(r"<(?:final[_ -]?)?answer>", re.I)
_END_TAG = re.compile(r"</(?:final[_ -]?)?answer>", re.I)
_CLOSED = re.compile(r"</([A-Za-z][\w-]*)>")
_SAYS_MORE = {"sup", "sub", "del", "s", "strike", "think"}
"""Tags that change what a number means: ``2<sup>10</sup>``."""
_FULL_WIDTH = {
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    **{0xFF0C: ", ", 0x3001: ", ", 0x3002: ". ", 0x3000: " ", 0x2212: "-"},
}
"""Maps characters of full width, their comma and full stop, and the minus sign to ASCII."""
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uff66-\uff9f"
)
"""Letters of scripts that put no space before a number: Thai, Lao, Burmese, Khmer, kana, Han,
Hangul."""
_BEGINS = r"[-+]?[$€£¥₹]?\.?\d"
"""Matches the beginning of a number."""
_NUMBER = r"[-+]?[$€£¥₹]?(?:\d[\d.,]*|\.\d+)%?"
_TYPED = rf"{_NUMBER}(?:\s*[/^]\s*{_NUMBER})?"
"""Match a number, and a number, a fraction or a power."""
_POWERS = "百千万萬亿億兆만억"
"""Powers of ten that belong to the number before them: 3万 is 30000, and is left as it is."""
_ANSWER_IS = (
    r"(?:答案|正解|答え|回答|정답|답)(?:应该|应当|应|應該|應)?(?:是|为|為|は|은|:)\s*"
    rf"(?=\*{{0,3}}(?:[(\[]?{_BEGINS}(?![\d.,]*[{_POWERS}])|\$|\\[A-Za-z(]))"
)
"""Matches a statement in Chinese, Japanese or Korean before a number or a formula."""
_LABEL = re.compile(r"^(\s*[A-Z])、(?!\s*[A-Z](?![A-Za-z]))", re.MULTILINE)
"""Matches the label of an option: C、12. But A、B is a list of letters."""
_RULES = (
    # Labels: 【答案】C.
    (r"【\s*([^\x00-\x7f]{2,8})\s*】\s*:?\s*", r"\1: "),
    (_ANSWER_IS, " Answer: "),
    # A space between letters of these scripts and a number or a letter of an option.
    (rf"(?<=[{_UNSPACED}])(?={_BEGINS}(?![\d.,]*[{_POWERS}]))", " "),
    (rf"(?<=[{_UNSPACED}])(?=[(*]{{0,3}}[A-Z](?![A-Za-z\d]))", " "),
    (rf"(?<=[A-Z)*])(?=[{_UNSPACED}])|(?<=\d)(?=[{_UNSPACED}])(?![{_POWERS}])", " "),
    # A number or a box behind "not", which the text denies.
    (
        rf"(\bnot\b|n't|不是|不为)\s*(?:\\boxed\{{[^{{}}]*\}}|\$[^$\n]+\$|[*(]{{0,3}}{_TYPED}[*)]{{0,3}}"
        r"(?!\w|\.\d|\s*[-+*/^=<>(\[]))",
        r"\1 ",
    ),
    # Quotes, and Markdown's code.
    (r"[`\"“”„«»「」『』]", " "),
    (rf"(?<![\w'])'({_TYPED})'(?!\w)", r" \1 "),
    (rf"(?<![\w'])'(?={_BEGINS})", " "),
    # A colon, but not that of 3:4 or 12:30; GSM8K's mark; arrows.
    (rf"(?<=[^\d\s]:)(?={_BEGINS})|(?<=##)(?={_BEGINS})|(?<=[→⇒≈])(?={_BEGINS})", " "),
    # So it is (12).
    (rf"((?:\bis|[:=])\s*)[(\[](?!\d+,(?!\d{{3}}\b))({_TYPED})[)\]](?!\s*[\d(*^/+-])", r"\1\2"),
    # Markdown's emphasis, but not a product, a power or an index.
    (rf"(?<![\w)\]}}*\\])(\*{{1,3}}|_{{1,3}})({_TYPED})\1(?!\s*[\d(*])(?!\w)", r" \2 "),
    (r"(?<=\d)\*{2,3}(?!\s*[\w(*])", " "),
    # math-verify reads "3/4 ." as 3.
    (r"(?<=\d)[ \t]+(?=[.,;:!?](?:\s|$))", ""),
)
_ROOT = re.compile(r"√\s*(?:(\d+|[A-Za-z])|\(([^()]*)\))")
_SIGNS = {0xB2: "^2", 0xB3: "^3", 0xB7: "*", 0x22C5: "*", 0x221E: r"\infty "}
"""Match what math-verify does not read: roots, squares, cubes, dots of products and infinity."""
_SPACED = [(re.compile(pattern), replacement) for pattern, replacement in _RULES]


def final_answer(text: str) -> str:
    """Return the part of ``text`` that is its final answer, by the tags that the module names."""
    behind = text.rpartition("</think>")[2]
    text = behind if behind.strip() else text
    before, *parts = _TAG.split(text)
    inside = [_END_TAG.split(part, maxsplit=1)[0] for part in parts or [before]]
    return next((part for part in reversed(inside) if part.strip()), text)


def readable(text: str) -> str:
    """Return ``text`` with the spaces and the ASCII that libraries look for around an answer."""
    closed = {name.lower() for name in _CLOSED.findall(text)} - _SAYS_MORE
    if closed:
        names = "|".join(map(re.escape, closed))
        text = re.sub(rf"</?(?:{names})(?:\s[^<>]*)?>", " ", text, flags=re.I)
    text = _LABEL.sub(r"\1. ", re.sub(r"<br\s*/?>", " ", text)).translate(_FULL_WIDTH)
    for pattern, replacement in _SPACED:
        text = pattern.sub(replacement, text)
    return text


def signs_in_latex(text: str) -> str:
    r"""Return ``text`` with the signs that math-verify does not read in LaTeX: ``3\sqrt{2}``."""
    roots = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2]}}}", text)
    return roots.translate(_SIGNS)
