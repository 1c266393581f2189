"""Characters of texts that no tokenizer takes, and such that a wrong encoding leaves."""

import re

from moetrain.config.sources import shortened
from moetrain.data.warned import warn_once

HALF = re.compile("[\ud800-\udfff]")
"""Matches half of a character, a surrogate without the other one."""
_CONTROLS = re.compile("[\x80-\x84\x86-\x9f]")
"""Matches a control character of Latin-1, except that which ends a line."""


def with_whole_characters(text: str) -> str:
    """Return ``text`` with U+FFFD in place of each half of a character. Warn once if there is any.

    JSON can spell lone surrogates, which a cut between two UTF-16 units leaves. No tokenizer takes
    them. Control characters of Latin-1 stay, and a warning names the first one.
    """
    warn_of_controls(text, "texts of records have")
    half = HALF.search(text)
    if half is None:
        return text
    warn_once(
        "halves of characters",
        "texts of records have halves of characters, which become U+FFFD: "
        f"{shortened(text[max(0, half.start() - 20) : half.end() + 20])}; a program that cut the "
        "text within a character, such as an emoji, left them",
    )
    return HALF.sub("\ufffd", text)


def warn_of_controls(text: str, what: str) -> None:
    """Warn once if ``text`` has characters that Windows-1252 read as Latin-1 becomes.

    ``what`` is the beginning of the warning, with the verb.
    """
    found = None if text.isascii() else _CONTROLS.search(text)
    if found is not None:
        near = text[max(0, found.start() - 20) : found.end() + 20]
        warn_once(
            "controls of Latin-1",
            f"{what} the control character U+{ord(found[0]):04X}, which is taken as it "
            f"stands: {shortened(near)}; a file in Windows-1252 that was read as Latin-1 has such "
            "characters in place of its euro signs, dashes and quotes: convert it again",
        )
