"""Finds the end of an assistant's turn in a chat template, so that a model learns to stop there.

Most templates write an end behind each answer, such as ``<|im_end|>``. Other templates write no
end: a turn ends where the next turn begins, in GLM with ``<|user|>`` or ``<|observation|>``, and
elsewhere with text (``User:``). Then a model ends its turn by generating the beginning of the next
one, so this beginning is learned as the end of the turn. It is also learned behind the last turn of
a conversation, where the template writes nothing.

The end is found by rendering short conversations with marks as their contents. Left out on purpose:
templates whose ends depend on variables or on the content of turns.
"""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

from moetrain.data.template_worker import View
from moetrain.data.templates import TemplateError, render

_ANSWER, _NEXT = (f"x{secrets.token_hex(8)}" for _ in range(2))
"""Random contents of turns. No template contains them."""
_NOW = datetime(2000, 1, 1)
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}


@dataclass(frozen=True)
class TurnEnds:
    """The texts that end an assistant's turn."""

    own: str = ""
    """The text that the template writes behind an answer, without the whitespace around this text.
    It may be empty."""
    by_next_role: Mapping[str, str] = field(default_factory=dict)
    """For each role of the next turn, the end of a turn, if ``own`` is empty. It is the whitespace
    behind the answer and the first token of the next turn. If the next turn begins with no token,
    it is all text between the two contents, without the whitespace at its end."""
    stops: tuple[str, ...] = ()
    """The texts that a model generates last: the last token of ``own``, or all of it if it does not
    end with a token, and the token behind calls; or the texts of ``by_next_role``."""

    def behind(self, turn: Mapping[str, Any], next_role: str | None) -> str:
        """Return the end of ``turn`` that the template does not write.

        ``next_role`` is the role of the next turn. None: no turn follows, and ``turn`` ends as if
        the result of its call, or else a turn of the user, followed.
        """
        if next_role == "assistant":
            return ""  # the assistant goes on
        usual = "tool" if turn.get("tool_calls") else "user"
        return self.by_next_role.get(next_role or usual, self.by_next_role.get(usual, ""))


@lru_cache(maxsize=64)
def turn_ends(
    source: str, variables: tuple[tuple[str, str], ...], added_tokens: frozenset[str]
) -> TurnEnds:
    """Find the ends of an assistant's turn in the template ``source``.

    Args:
        source: the template.
        variables: the names and values of its variables, such as ``bos_token``.
        added_tokens: texts that are one token each wherever they occur.

    Returns:
        The ends. There are none if the template fails to render an answer.
    """

    def shown(*turns: dict[str, Any]) -> str | None:
        user = {"role": "user", "content": "x"}
        views = [View(1 + len(turns), add_generation_prompt=False)]
        try:
            return next(render(source, [user, *turns], dict(variables), _NOW, views))
        except TemplateError:
            return None

    for content in (_said, _said_in_parts):
        answer = {"role": "assistant", "content": content(_ANSWER)}
        alone = shown(answer)
        if alone is not None and _ANSWER in alone:
            break
    else:
        return TurnEnds()
    # If the template writes an end, return it.
    call = {**answer, "tool_calls": [_CALL]}
    calling = (shown(call) or "").rstrip()
    if own := alone.rpartition(_ANSWER)[2].strip():
        called = _last_token(calling, added_tokens)
        return TurnEnds(own, stops=_stops([_last_token(own, added_tokens) or own, called]))
    # The template writes no end. Find the beginning of each turn that may follow.
    ends = {}
    for role, turn, before in [
        ("user", answer, _ANSWER),
        ("system", answer, _ANSWER),
        ("tool", call, calling),
    ]:
        text = shown(turn, {"role": role, "name": "f", "content": content(_NEXT)})
        if before and text is not None and before in text and _NEXT in text:
            between = text.partition(_NEXT)[0].rpartition(before)[2]
            if end := _first_token(between, added_tokens):
                ends[role] = end
    return TurnEnds(by_next_role=ends, stops=_stops(ends.values()))


def _stops(texts: Iterable[str]) -> tuple[str, ...]:
    """Return each text once.

    Blank texts and single characters are left out, since any answer may contain them.
    """
    return tuple(dict.fromkeys(text for text in texts if len(text.strip()) > 1))


def _said(text: str) -> object:
    return text


def _said_in_parts(text: str) -> object:
    return [{"type": "text", "text": text}]


def _first_token(text: str, added_tokens: Iterable[str]) -> str:
    """Return the first token of ``text``, with the whitespace before it.

    If ``text`` begins with no token, return it without the whitespace at its end.
    """
    blanks, text = text[: len(text) - len(text.lstrip())], text.strip()
    tokens = [token for token in added_tokens if token and text.startswith(token)]
    return blanks + max(tokens, key=len, default=text) if text else ""


def _last_token(text: str, added_tokens: Iterable[str]) -> str:
    """Return the token at the end of ``text``, or an empty text if there is no token there."""
    return max(
        (token for token in added_tokens if token and text.endswith(token)), key=len, default=""
    )
