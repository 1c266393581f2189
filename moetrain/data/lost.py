"""Refuses a record if a field beside its answer would be lost, or says that the answer is bad.

A field is lost if none of the record's documents shows its text. It may be a thought, a passage
that the question is about, the choices of a question, a system text, the tools, or a picture. The
names are those of public data sets. Names are compared in lower case.

Left out on purpose: fields of records that are one text. Such a text is whole by itself.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moetrain.config.sources import shortened
from moetrain.data.documents import Document
from moetrain.data.messages import (
    REASONING,
    THOUGHTS,
    BadLineError,
    is_said,
    lost_media,
    media_of,
    thoughts_in,
    truth_of,
    words_of,
)
from moetrain.data.warned import warn_once

_THOUGHTS = {
    *(*REASONING, *THOUGHTS, "reasoning_trace", "complex_cot", "rationale", "deepseek_reasoning"),
    *("thinking_trajectory", "thinking_trajectories"),
    *("deepseek_thinking_trajectory", "gemini_thinking_trajectory"),
}
"""Names of a thought beside an answer: medical-o1's, s1K's, OpenThoughts' and others."""
_MODES = {"on", "off", "true", "false", "yes", "no", "none", "minimal", "low", "medium", "high"}
"""Values of such fields that are no thoughts. Nemotron's ``reasoning`` is on or off."""
PASSAGES = {
    *("context", "contexts", "ctx", "passage", "passages", "paragraph", "paragraphs"),
    *("document", "article", "background", "evidence"),
    *("schema", "db_schema", "database_schema", "table_schema"),  # a question for SQL
}
"""Names of texts that a question may be about."""
CHOICES = {"choices", "options"}
"""Names of fields with the answers that a question gives to choose from."""
_SYSTEMS = {"sys", "custom_system_prompt"}
"""Names that may be those of a system text."""
_FUNCTIONS = {"available_tools", "function_list", "function_description"}
"""Names that may be those of the tools."""
_TEXTS = PASSAGES | _SYSTEMS | _FUNCTIONS
"""Names of fields whose texts must be in a document, thoughts and choices aside."""
_MARK = re.compile(r"<(?:image|img|video|audio)>", re.I)
"""Matches the mark in a text that stands for a picture, a film or a sound."""

_OF_VERDICTS = {"is", "the", "response", "answer", "completion", "output"}
"""Words that may stand beside a word of the next two sets in the name of a verdict."""
_GOOD = {"safe", "correct", "helpful", "harmless", "acceptable", "approved", "valid", "passed"}
_BAD = {"unsafe", "incorrect", "harmful", "wrong"}
_SCORES = {"helpfulness", "harmlessness", "correctness", "coherence", "quality", "overall_score"}
"""Names of scores of an answer: HelpSteer's and UltraFeedback's."""


def refuse_lost(record: Mapping[str, Any], documents: Sequence[Document], form: str) -> None:
    """Raise BadLineError if a field beside the answer would be lost.

    Args:
        record: the record, whose fields are renamed to those of the forms.
        documents: the documents of the record. There are none if nothing of it is learned.
        form: the form of the record.
    """
    if not documents:
        return
    key = media_of(record)
    # A text is whole by itself, unless it has a mark in the place of the picture.
    is_needed = form != "text" or any(_MARK.search(document.text) for document in documents)
    if key is not None and is_needed:
        raise lost_media(f"`{key}`", record[key])
    if form == "text":
        return
    has_choices = form != "preference"  # the choices of a pair are its answers
    for key, value in record.items():
        name = key.lower()
        if name in _THOUGHTS:
            texts = thoughts_of_field(key, value)
        elif name in _TEXTS or (has_choices and name in CHOICES):
            texts = [*_texts_in(value)]
        else:
            continue
        for text in texts:
            if not is_said(text, (document.text for document in documents)):
                raise BadLineError(_problem(key, text, form))


def thoughts_of_field(key: str, value: object) -> list[str]:
    """Return the texts of a field beside an answer that may be a thought. It may have none."""
    if key.lower() not in _THOUGHTS:
        return []
    return [text for text in thoughts_in(value) if text.strip().lower() not in _MODES]


def _problem(key: str, text: str, form: str) -> str:
    """Describe the text of a field that would be lost, and say what to write."""
    name = key.lower()
    if name in _SYSTEMS:
        said, remedy = "seems to be the system's text, which would be lost", "write it as `system`"
    elif name in _FUNCTIONS:
        said, remedy = "seems to hold the tools, which would be lost", "write them as `tools`"
    else:
        said, remedy = "may be a part of the question or of the answer", "write it in the question"
    if name in _THOUGHTS:
        where = "`chosen` or `rejected`" if form == "preference" else "`messages`"
        remedy = f"write it as `reasoning_content` of an answer in {where}"
    return f"`{key}` {said}: {shortened(text)}; {remedy}, or leave it out"


def _texts_in(value: object) -> Iterator[str]:
    """Yield the texts in a value of any form, and not the keys of objects."""
    if isinstance(value, str):
        if value.strip() and value.strip() not in ("[]", "{}"):
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(each)


# ---- verdicts -----------------------------------------------------------------------------------


def refuse_bad_verdict(record: Mapping[str, Any]) -> None:
    """Raise BadLineError if a field such as ``is_safe`` says that the answer is a bad one.

    A warning, once for each name, says that a field with a score of the answer is not read.
    """
    for key, value in record.items():
        words = words_of(key)
        verdict = words - _OF_VERDICTS
        if len(verdict) == 1 and verdict <= _GOOD | _BAD:
            if _verdict(value, "is" in words) is verdict.issubset(_BAD):
                problem = f"`{key}` is {shortened(value)}: the answer is one to avoid, and would "
                problem += f"be learned: {shortened(dict(record))}"
                remedy = "leave such records out, or rename the field if it means something else"
                raise BadLineError(f"{problem}; {remedy}", kind=f"`{key}` is {shortened(value)}")
        elif key.lower() in _SCORES and type(value) in (int, float):
            warn_once(
                f"the score {key}",
                f"`{key}` of records is not read: the answers are learned whatever it is; keep the "
                "records whose answers are good enough",
            )


def _verdict(value: object, is_named: bool) -> bool | None:
    """Return the truth value of a verdict. None: it has none.

    ``is_named``: True: the name of the field has the word "is", so 0 and 1 are truth values too.
    """
    return bool(value) if is_named and value in (0, 1) else truth_of(value)
