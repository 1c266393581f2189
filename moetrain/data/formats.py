"""Turns records, as data sets have them, into texts with the characters that a model learns.

A record's form is recognised by its fields, so one source may mix forms, unless ``data.format``
names one. Every form of a dialogue becomes ``messages``, which :mod:`moetrain.data.chat` renders;
prompts and completions of plain text are joined as they are.

Left out on purpose: renaming other fields (a line of the user's own script does that), and images
and sounds in ``content``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from moetrain.config.sources import shortened
from moetrain.data.chat import BadLineError, ChatTemplate, TrainOn, template_variables

_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Names that ShareGPT's descendants have for the roles of ``messages``."""


class Document(NamedTuple):
    """A text, and what of it is learned."""

    text: str
    loss_spans: list[tuple[int, int]] | None = None
    """The characters ``start:end`` to learn; None: all."""
    is_rendered: bool = False
    """Whether a chat template made the text, which then begins as the template says."""


@dataclass(frozen=True)
class RecordReader:
    """Reads records as ``data.format``, ``data.text_field`` and ``data.train_on`` say."""

    template: ChatTemplate
    form: str = "auto"
    text_field: str = "text"
    train_on: TrainOn = "all"
    reads_pairs: bool = False
    """Whether a preference pair's rejected answer is read too; next-token loss learns the chosen
    one alone."""

    def identity(self) -> list[Any]:
        """Return what decides the documents of a record, as JSON."""
        found = [self.form, self.text_field, self.train_on, self.template.identity()]
        return [*found, "pairs"] if self.reads_pairs else found

    def documents(self, record: object) -> list[Document]:
        """Return the documents of ``record``; none if its text is blank.

        Raises:
            BadLineError: the record has no known form, or is malformed.
            ConfigError: the chat template itself is wrong.
        """
        if not isinstance(record, dict):
            raise BadLineError(f"not a JSON object: {shortened(record)}; give one object a line")
        return [
            document._replace(text=_unicode(document.text))
            for document in _FORMS[self.form_of(record)].read(self, record)
        ]

    def form_of(self, record: Mapping[str, Any]) -> str:
        """Return the name of the form that ``record`` has, which is ``data.format`` if that is set.

        Raises:
            BadLineError: it has none; the message shows the record and the nearest form.
        """
        if self.form != "auto":
            missing = [key for key in self._needed(self.form) if key not in record]
            if missing:
                raise BadLineError(f"no {missing[0]!r}, which data.format {self.form!r} needs")
            return self.form
        fields = {key for key, value in record.items() if value is not None}
        for name in _FORMS:
            if fields.issuperset(self._needed(name)):
                return name
        raise BadLineError(self._unknown(record))

    def _needed(self, form: str) -> tuple[str, ...]:
        return (self.text_field,) if form == "text" else _FORMS[form].fields

    def _unknown(self, record: Mapping[str, Any]) -> str:
        def likeness(name: str) -> float:
            needed = self._needed(name)
            found = (max(map(_alike(key), record), default=0.0) for key in needed)
            return sum(found) / len(needed)

        def shown(name: str) -> str:
            return f"{name} ({', '.join(self._needed(name))})"

        nearest = max(_FORMS, key=likeness)
        return (
            f"no {self.text_field!r} and no 'messages': a record of no known form, "
            f"{shortened(dict(record))}; known are {', '.join(map(shown, _FORMS))}; nearest is "
            f"{nearest}: fill or rename its fields, or name the field of a text in data.text_field"
        )

    # ---- the forms -----------------------------------------------------------------------------

    def _text(self, record: dict[str, Any]) -> list[Document]:
        text = record[self.text_field]
        if not isinstance(text, str):
            said = f"{self.text_field!r} is not text: {shortened(text)}"
            raise BadLineError(f"{said}; write texts there, or name another data.text_field")
        return [Document(text)] if text.strip() else []

    def _messages(self, record: dict[str, Any]) -> list[Document]:
        return self._dialogue(record["messages"], record)

    def _dialogue(self, messages: object, record: dict[str, Any], given: int = 0) -> list[Document]:
        """Render ``messages``, of which nothing is learned in the first ``given`` turns."""
        variables = template_variables(record)
        rendered = self.template.documents(messages, variables, self.train_on, given)
        return [Document(text, spans, True) for text, spans in rendered]

    def _sharegpt(self, record: dict[str, Any]) -> list[Document]:
        turns = record["conversations"]
        if not isinstance(turns, list) or not turns:
            said = f"`conversations` is not a list of turns: {shortened(turns)}"
            raise BadLineError(f"{said}; give one turn or more")
        messages = [_turn(turn, i) for i, turn in enumerate(turns)]
        return self._dialogue(_with_system(record, messages), record)

    def _alpaca(self, record: dict[str, Any]) -> list[Document]:
        asked = [_text_in(record, key) for key in ("instruction", "input")]
        messages = [
            {"role": "user", "content": "\n\n".join(filter(None, asked))},
            {"role": "assistant", "content": _text_in(record, "output")},
        ]
        for question, answer in reversed(record.get("history") or []):
            messages.insert(0, {"role": "assistant", "content": answer})
            messages.insert(0, {"role": "user", "content": question})
        return self._dialogue(_with_system(record, messages), record)

    def _completion(self, record: dict[str, Any]) -> list[Document]:
        return self._answer(record, "prompt", "completion")

    def _preference(self, record: dict[str, Any]) -> list[Document]:
        if record.get("prompt") is None and isinstance(record["chosen"], list):
            record = {**record, **_shared_prompt(record)}
        keys = ("chosen", "rejected") if self.reads_pairs else ("chosen",)
        return [self._whole_answer(record, key) for key in keys]

    def _whole_answer(self, record: dict[str, Any], key: str) -> Document:
        found = self._answer(record, "prompt", key)
        if len(found) != 1:
            raise BadLineError(f"`{key}` becomes {len(found)} texts, where a pair has one of each")
        return found[0]

    def _answer(self, record: dict[str, Any], before: str, key: str) -> list[Document]:
        """Return a prompt with what answers it; both are texts, or both lists of messages."""
        prompt, answer = record.get(before) or "", record[key]
        if isinstance(answer, list):
            if isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}] if prompt else []
            return self._dialogue([*prompt, *answer], record, len(prompt))
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise BadLineError(f"`{before}` and `{key}` are neither two texts nor two dialogues")
        if not answer.strip():
            return []
        text = prompt + answer
        return [Document(text, [(len(prompt), len(text))])]


class _Form(NamedTuple):
    fields: tuple[str, ...]
    """The fields by which a record is recognised."""
    read: Callable[[RecordReader, dict[str, Any]], list[Document]]


_FORMS: dict[str, _Form] = {
    "messages": _Form(("messages",), RecordReader._messages),
    "sharegpt": _Form(("conversations",), RecordReader._sharegpt),
    "preference": _Form(("chosen", "rejected"), RecordReader._preference),
    "completion": _Form(("prompt", "completion"), RecordReader._completion),
    "alpaca": _Form(("instruction", "output"), RecordReader._alpaca),
    "text": _Form(("text",), RecordReader._text),
}
"""The forms, in the order in which they are looked for; their names are those of data.format."""


def _alike(key: str) -> Callable[[str], float]:
    return lambda other: difflib.SequenceMatcher(None, key, other.lower()).ratio()


def _turn(turn: object, i: int) -> dict[str, Any]:
    """Return a turn of ShareGPT's as one of ``messages``."""
    if not isinstance(turn, dict):
        raise BadLineError(f"conversations[{i}] is not an object")
    role, said = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if role == "function_call":
        try:
            call = json.loads(said or "")
        except (TypeError, ValueError, RecursionError):
            raise BadLineError(f"conversations[{i}].value is a call that is not JSON") from None
        calls = call if isinstance(call, list) else [call]
        calls = [{"type": "function", "function": each} for each in calls]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    rest = {k: v for k, v in turn.items() if k not in ("from", "value", "role", "content")}
    return {**rest, "role": _ROLES.get(str(role), role), "content": said}


def _with_system(record: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = record.get("system")
    return [{"role": "system", "content": system}, *messages] if system else messages


def _text_in(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key) or ""
    if not isinstance(value, str):
        raise BadLineError(f"{key!r} is not text")
    return value


def _shared_prompt(record: Mapping[str, Any]) -> dict[str, Any]:
    """Divide two whole dialogues into the turns that they share and the answers that differ."""
    chosen, rejected = record["chosen"], record["rejected"]
    if not isinstance(rejected, list):
        raise BadLineError("`chosen` and `rejected` are neither two texts nor two dialogues")
    pairs = zip(chosen, rejected, strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
    return {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def _unicode(text: str) -> str:
    """Replace lone surrogates, which JSON can spell and no tokenizer accepts, by ``?``."""
    return text.encode(errors="replace").decode()
