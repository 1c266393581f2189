"""Warns of marks within a text: those of turns, and those of the ends of documents.

A corpus may be one file with a mark between its texts, and a chat one text with a mark before each
turn. Both are read as they are written, and the warnings say what that means.

Left out on purpose: dividing texts at their marks, since a mark may be meant as text.
"""

import re

from moetrain.config.sources import shortened
from moetrain.data.tokenizer import Tokenizer
from moetrain.data.warned import warn_once

_TURNS = tuple(
    (re.compile(rf"(?<![`\"'])(?:{asked})", re.I), re.compile(rf"(?<![`\"'])(?:{said})", re.I))
    for asked, said in (
        (r"<extra_id_1>\s*user", r"<extra_id_1>\s*assistant"),  # NeMo's
        (r"#{2,3} ?(?:human|user)\s*:", r"#{2,3} ?(?:assistant|ai|bot|gpt)\s*:"),
        (r"#{2,3} ?(?:instruction|input)\s*:", r"#{2,3} ?(?:response|output)\s*:"),
        (r"\[INST\]", r"\[/INST\]"),
        (r"<\|(?:user|prompter|human)\|>", r"<\|(?:assistant|bot|model)\|>"),
        (r"<\|im_start\|>\s*user", r"<\|im_start\|>\s*assistant"),
        (r"<\|start_header_id\|>\s*user", r"<\|start_header_id\|>\s*assistant"),
        (r"<start_of_turn>\s*user", r"<start_of_turn>\s*model"),
    )
)
"""Matches of the marks of a user's turn and of an assistant's, of each kind."""
_NAMED_TURNS = re.compile(
    r"\s*(?:Human|HUMAN|User|USER)\s*[:\uff1a].*?^\s*(?:Assistant|ASSISTANT|AI|Bot|BOT|GPT)\s*[:\uff1a]",
    re.S | re.M,
)
"""Matches a text that begins with a marked turn of the user, and has one of the assistant's."""
_ENDS = ("<|endoftext|>", "<|end_of_text|>")
"""Marks behind the texts of a corpus, whatever the tokenizer."""
_DIVIDE = (
    """python3 -c 'import json, sys; [print(json.dumps({{"text": text.strip()}})) for text in """
    """sys.stdin.read().split("{mark}") if text.strip()]' < FILE > FILE.jsonl"""
)
"""A command that writes a record of each text of a file."""


def has_turns(text: str) -> bool:
    """Return whether a text has marks of the user's and of the assistant's turns."""
    if _NAMED_TURNS.match(text):
        return True
    may_have = any(mark in text for mark in ("<", "##", "[/INST]"))  # which is quick
    return may_have and any(a.search(text) and b.search(text) for a, b in _TURNS)


def warn_of_turns(text: str, name: str, remedy: str) -> None:
    """Warn once if a text is a dialogue with marks of its turns, and is taken as one turn.

    Args:
        text: what the user says.
        name: its place in the record.
        remedy: what to write in its place.
    """
    if has_turns(text):
        warn_once(
            "marked turns in a turn",
            f"{name} of records is a dialogue with marks of its turns, and is taken as one turn "
            f"of the user: {shortened(text)}; {remedy}",
        )


def warn_of_turns_in_text(text: str, name: str) -> None:
    """Warn once if a document has marks of turns, since all of it is learned."""
    if has_turns(text):
        warn_once(
            f"marked turns in {name}",
            f"{name} of records has marks of turns, and is a document of which every token is "
            f"learned, also the user's: {shortened(text)}; write the turns, without the marks, as "
            "`messages` to learn the answers alone",
        )


def count_ends(text: str, tokenizer: Tokenizer, *, is_end: bool) -> dict[str, int]:
    """Return how often each mark of an end stands before other text, for marks that do.

    The marks are those of corpora and the tokenizer's EOS. That of a turn in a text with marks of
    turns is none, and neither is a mark in quotes. ``is_end`` is True if nothing follows the text.
    """
    eos = tokenizer.special_tokens.get("eos_token", _ENDS[0])
    marks = [mark for mark in dict.fromkeys((*_ENDS, eos)) if mark in text]
    if marks and not {*marks} <= {*_ENDS} and has_turns(text):
        marks = [mark for mark in marks if mark in _ENDS]
    text = text.rstrip() if is_end else f"{text}."  # other text follows
    found = {x: len(re.findall(rf"(?<![`\"']){re.escape(x)}(?!\Z|[`\"'])", text)) for x in marks}
    return {mark: count for mark, count in found.items() if count}


def warn_of_ends(counts: dict[str, int], tokenizer: Tokenizer) -> None:
    """Warn once if a document has marks of the ends of others, as :func:`count_ends` finds them."""
    for mark, count in counts.items():
        is_eos = [*tokenizer.encode_batch([mark])[0].ids] == [tokenizer.eos_id]
        read_as = "EOS" if is_eos else "its characters"
        warn_once(
            f"ends within a text {mark}",
            f"a text has {mark!r} {count:,} times before other text, read as {read_as}: it is one "
            "document, in which each text sees those before it; to make documents of them, write "
            f"a record of each, for a file with {_DIVIDE.format(mark=mark)}",
        )
