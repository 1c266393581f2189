"""Reads the documents of a record in any of the known forms.

The fields of a record tell its form, so one source may mix forms. ``data.format`` may name one form
for all records. Every form of a dialogue becomes messages, which :mod:`moetrain.data.chat` renders.
Prompts and completions of plain text are joined as they are.

Left out on purpose: renaming fields of an unknown name (a line of the user's own script does that),
and images and sounds in ``content``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

from moetrain.config import ConfigError, DataSection
from moetrain.config.sources import shortened
from moetrain.data.characters import with_whole_characters
from moetrain.data.chat import ChatTemplate, chosen_turns
from moetrain.data.chat_exports import place_of_no_turns
from moetrain.data.containers import OBJECTS
from moetrain.data.documents import Document
from moetrain.data.field_names import name_of_dialogue, names_renamed, renamed
from moetrain.data.known_sets import (
    read_known_set,
    remedy_for,
    remedy_for_columns,
    remedy_for_two,
)
from moetrain.data.lost import (
    example_of_text,
    is_feedback,
    is_system,
    order_of_turns,
    refuse_bad_turn,
    refuse_bad_verdict,
    refuse_lost,
    refuse_lost_answer,
    unread_fields,
    warn_of_envelopes,
    warn_of_notes,
    warn_of_parent,
    warn_of_tie,
)
from moetrain.data.marks import has_turns, warn_of_turns, warn_of_turns_in_text
from moetrain.data.messages import (
    BadLineError,
    Message,
    is_dialogue,
    is_mask,
    is_said,
    lost_media,
    media_of,
    no_turns,
    read_messages,
    refuse_masks_of_record,
    role_of,
    shows_pythons_turns,
    text_of,
    truth_of,
    turns_in,
    value_in,
    weight_of,
)
from moetrain.data.options import kind_of, pointer_in
from moetrain.data.pairs import (
    BEFORE_ANSWERS,
    KNOWN_FORMS,
    KNOWN_LABELLED,
    OF_DIALOGUES,
    Dialogues,
    dialogues_of_lists,
    label_of,
    read_answers,
    read_history,
    warn_of_answers_in_a_row,
    with_system,
)
from moetrain.data.tokenizer import Tokenizer
from moetrain.data.warned import warn_once

_NO_TEXTS = ("messages", "conversations", "segments", "chosen", "rejected")
"""Fields that are lists, or of which one is not read without the other."""
_ALIKE = 0.5
"""An error names the nearest form if a record has at least this share of its fields."""
_DIALOGUES = ("messages", "conversations", "conversation", "trajectory")
"""Fields that may hold a dialogue."""
_MOST_MARGIN = 1e30
"""The largest size of a pair's margin. fp32 holds this number, and sums of such numbers."""


class NoFormError(BadLineError):
    """A record has no known form, or not that of ``data.format``."""


RowKind = Literal["auto", "whole", "stream", "pairs", "answers", "ranked"]
"""A value of data.packing, or one of :attr:`RecordReader.PAIRED`."""


@dataclass(frozen=True)
class RecordReader:
    """Reads records as ``data.format``, ``data.text_field`` and ``data.train_on`` say."""

    PAIRED: ClassVar = ("pairs", "answers", "ranked")
    """Further values of data.packing. train.objective sets them. pairs: rows of preference pairs.
    answers: rows of pairs and of single answers with a label, for kto. ranked: rows of pairs with
    their margins, for reward."""

    template: ChatTemplate
    """Renders dialogues."""
    form: str = "auto"
    """``data.format``: the form of all records, or auto."""
    text_field: str = "text"
    """``data.text_field``: the field that holds a text."""
    train_on: str = "all"
    """``data.train_on``: the assistant's turns that are learned."""
    reads_pairs: bool = False
    """True: both answers of a preference pair become documents. False: only the chosen answer
    becomes a document, for next-token loss."""
    reads_labels: bool = False
    """True: single answers with a label are read too. Records that are neither such answers nor
    pairs are refused."""
    reads_margins: bool = False
    """True: the ``margin`` of a pair is read."""
    skips_bad: bool = False
    """True: bad records are left out (``data.bad_records skip``)."""

    @staticmethod
    def kind_of_rows(data: DataSection) -> RowKind:
        """Return ``data.packing``. For some objectives it has become one of :attr:`PAIRED`."""
        return cast("RowKind", data.packing)

    @classmethod
    def of(cls, data: DataSection, tokenizer: Tokenizer) -> Self:
        """Make the reader that ``data`` asks for.

        Raises ConfigError: the template cannot be read, or ``data.format`` does not suit the
        objective.
        """
        template = ChatTemplate.of(tokenizer, data.chat_template, data.chat_template_kwargs)
        reader = cls(
            template=template,
            form=data.format,
            text_field=data.text_field,
            train_on=data.train_on,
            skips_bad=data.skips_bad,
        )
        kind = cls.kind_of_rows(data)
        if kind not in cls.PAIRED:
            return reader
        if kind == "answers":
            if data.format == "text":
                problem = "'text', and train.objective kto learns from answers with a label"
                raise ConfigError("data.format", f"{problem}; set auto or another")
            return replace(reader, reads_pairs=True, reads_labels=True)
        if data.format not in ("auto", "preference"):
            problem = f"{data.format!r}, and train.objective learns from pairs alone"
            raise ConfigError("data.format", f"{problem}; set preference")
        reads_margins = kind == "ranked"
        return replace(reader, form="preference", reads_pairs=True, reads_margins=reads_margins)

    def identity(self) -> list[Any]:
        """Return a JSON value that differs if the documents of records differ."""
        found = [self.form, self.text_field, self.train_on, self.template.identity()]
        reads = ["pairs"] * self.reads_pairs + ["labels"] * self.reads_labels
        reads += ["margins"] * self.reads_margins
        return [*found, *["skip"] * self.skips_bad, *reads]

    def documents(self, record: Any) -> list[Document]:
        """Return the documents of ``record``.

        A blank text, a record of weight 0 and a dialogue whose answers have weight 0 give none.

        Raises:
            BadLineError: the record has no known form, is malformed, or would lose a field. The
                error names the field of the dialogue as the record does.
            ConfigError: the chat template itself is wrong.
        """
        name = name_of_dialogue(record)
        named: dict[str, Any] = {}
        try:
            named = self._named(record)
            return self._documents(named)
        except BadLineError as error:
            names = names_renamed(record, named) if isinstance(record, dict) else {}
            names |= {} if name is None else {"messages": name}
            begin = re.match(r"[`'](\w+)['`]|(messages)\[", str(error))
            new = (begin[1] or begin[2]) if begin else None
            if new not in names:
                raise
            said = f"`{names[new]}` is read as `{new}`: {error}"
            raise BadLineError(said, error.field, kind=error.kind) from error

    def _documents(self, record: dict[str, Any]) -> list[Document]:
        """Return the documents of a record whose fields are renamed already."""
        form = self._form(record)
        weight = record.get("weight")
        if is_mask(weight) and not weight_of(weight, "`weight`"):
            return []
        refuse_masks_of_record(record, self.train_on)
        if self.reads_labels and form != "preference":
            found = self._labelled(record, form)
        else:
            _refuse_unwanted(record, form)
            found = _FORMS[form].read(self, record)
        if self.form == "auto":
            _refuse_second_dialogue(record, form)
        refuse_lost(record, found, form)
        warn_of_envelopes(found)
        if form in ("alpaca", "completion", "text"):
            warn_of_parent(record)
        return [document._replace(text=with_whole_characters(document.text)) for document in found]

    def form_of(self, record: Any) -> str:
        """Return the form of ``record``.

        Raises BadLineError: the record has no known form. The error names the nearest form.
        """
        return self._form(self._named(record))

    def unread(self, record: Any, documents: Sequence[Document]) -> list[str]:
        """Return the fields of ``record`` with texts that none of its ``documents`` shows.

        Fields that describe the record, such as ``source``, are left out.
        """
        named = self._named(record)
        return unread_fields(named, documents, self._form(named)) if documents else []

    def _form(self, record: dict[str, Any]) -> str:
        """Return the form of a record whose fields are renamed already.

        Raises BadLineError: the record has no known form, or not the form of ``data.format``.
        """
        if self.form != "auto":
            missing = [key for key in self._needed(self.form) if record.get(key) is None]
            if self.form == "preference":
                _refuse_empty_side(record)
            if missing and self.reads_pairs:
                _refuse_media(record)
                said = f"no {missing[0]!r}, so it is no pair of answers: {shortened(record)}"
                remedy = remedy_for(record, reads_pairs=True, reads_margins=self.reads_margins)
                answers = ("messages", "sharegpt", "completion", "alpaca")
                if remedy is None and self._has_form(record, *answers):
                    remedy = "it has one answer, which train.objective next_token learns"
                    if label_of(record) is not None:
                        remedy = "it has one answer with a label, which train.objective kto learns"
                said = f"{said}; {remedy}" if remedy else said
                raise BadLineError(f"{said}; known forms are {KNOWN_FORMS}", kind=remedy)
            if missing:
                self.refuse_empty(record)
                said = f"no {missing[0]!r}, which data.format {self.form!r} needs"
                raise NoFormError(f"{said}; give it, or set data.format auto")
            return self.form
        if (form := self._known_form(record)) is not None:
            return form
        _refuse_empty_side(record)
        _refuse_media(record)
        self.refuse_empty(record)
        known = ", ".join(f"{name} ({', '.join(self._needed(name))})" for name in _FORMS)
        remedy = remedy_for(record, reads_labels=self.reads_labels) or self._nearest(record)
        raise NoFormError(
            f"no {self.text_field!r} and no 'messages': a record of no known form, "
            f"{shortened(record)}; known are {known}; {remedy}, or name the field of a text in "
            "data.text_field",
            kind=remedy,
        )

    def _known_form(self, record: dict[str, Any]) -> str | None:
        """Return the form that the fields of ``record`` have, or ``data.format`` if they have it.

        The fields are renamed already. None: they have no known form.
        """
        fields = {key for key, value in record.items() if value is not None}
        if self.form != "auto":
            return self.form if fields.issuperset(self._needed(self.form)) else None
        is_pair = fields.issuperset(("chosen", "rejected"))
        if is_pair and (self.reads_pairs or not has_answer(record)):
            return "preference"
        for name in _FORMS:
            if fields.issuperset(self._needed(name)) and _FORMS[name].takes(record):
                return name
        return None

    def refuse_empty(self, record: dict[str, Any]) -> None:
        """Raise BadLineError if ``record`` has no known form only because a text in it is null, or
        because its dialogue has no turns.

        Its fields may be renamed already. Null is what a table has in an empty cell.
        """
        empty = (key for key in _DIALOGUES if record.get(key) in ([], "[]"))
        if (name := next(empty, None) or place_of_no_turns(record)) is not None:
            raise no_turns(name)
        for key in sorted(record, key=self.text_field.__eq__):  # the text of a document comes last
            if record[key] is not None or key in _NO_TEXTS:
                continue
            try:
                form = self._known_form(self._named({**record, key: "x"}))
            except BadLineError:
                continue
            if form is not None:
                others = {name: value for name, value in record.items() if value is not None}
                said = f"`{key}` is empty in this record: {shortened(others)}"
                remedy = "leave the record out (data.bad_records skip does), or write it"
                raise BadLineError(f"{said}; {remedy}", kind=f"`{key}` is empty")

    def _nearest(self, record: dict[str, Any]) -> str:
        """Describe the form that is nearest to ``record``, and the fields that are missing."""
        likeness, form = max((_likeness(self._needed(name), record), name) for name in _FORMS)
        if likeness < _ALIKE:
            remedy = remedy_for_columns(record) or "fill or rename its fields"
            return f"none is near: {remedy}, leave the file out if it holds no records"
        missing = ", ".join(f"`{key}`" for key in self._needed(form) if record.get(key) is None)
        return f"nearest is {form}, which lacks {missing}: fill or rename its fields"

    def _named(self, record: Any) -> dict[str, Any]:
        """Return ``record`` with its fields renamed to those of the forms.

        Raises BadLineError: the record is no object, or a part of it cannot be read.
        """
        record = {"messages": record} if is_dialogue(record) else record
        if not isinstance(record, dict):
            raise BadLineError(f"not a JSON object: {shortened(record)}; {OBJECTS}")
        return renamed(record, reads_pairs=self.reads_pairs, text_field=self.text_field)

    def _has_form(self, record: dict[str, Any], *forms: str) -> bool:
        return any(all(record.get(key) for key in self._needed(form)) for form in forms)

    def _needed(self, form: str) -> tuple[str, ...]:
        """Return the fields by which ``form`` is recognised."""
        return (self.text_field,) if form == "text" else _FORMS[form].fields

    def _text(self, record: dict[str, Any]) -> list[Document]:
        # In OASST a record is one turn. The first turn of a dialogue has no parent, and tables
        # leave out its `parent_id`.
        if {"role", "parent_id"} <= record.keys() or record.get("role") == "prompter":
            problem = f"a turn of a dialogue and no document: {shortened(record)}"
            order = order_of_turns(record)
            remedy = "give whole dialogues as `messages`" + f": the turns of each{order}" * bool(
                order
            )
            raise BadLineError(f"{problem}; {remedy}")
        text = record[self.text_field]
        if not isinstance(text, str):
            said = f"{self.text_field!r} is not text: {shortened(text)}"
            remedy = f"write texts there{_or_rows(record)}, or name another data.text_field"
            raise BadLineError(f"{said}; {remedy}")
        if self.form == "auto":
            _warn_of_answer(record, self.text_field)
            warn_of_turns_in_text(text, f"`{self.text_field}`")
        return [Document(text)] if text.strip() else []

    def _dialogue(
        self,
        messages: list[Message],
        record: dict[str, Any],
        num_given: int = 0,
        *,
        needs_text: bool = False,
    ) -> list[Document]:
        """Render ``messages``. The first ``num_given`` of them are a prompt, and are not learned.

        Empty answers give no document if ``needs_text`` is True, or if answers have labels.
        """
        said = [turn for turn in messages[num_given:] if turn.get("role") == "assistant"]
        said = said[-1:] if self.train_on == "last" else said
        if said and (needs_text or self.reads_labels) and not any(map(_is_filled, said)):
            return []
        warn_of_notes(messages)
        is_empty = False  # answers of pairs and with a label are not
        if not self.reads_pairs:
            chosen = chosen_turns(messages, train_on=self.train_on, num_given=num_given)
            learned = [i for i in chosen if messages[i].get("weight", 1)]
            for i in learned:
                refuse_bad_turn(messages[i], f"messages[{i}]")
            is_empty = not all(_is_filled(messages[i]) for i in learned)
        _refuse_other_functions(record)
        _warn_of_marked_turns(messages, record)
        variables = ChatTemplate.variables_of(record)
        self.template.warn_of_variables(record, variables)
        rendered = self.template.documents(
            messages, variables, train_on=self.train_on, num_given=num_given
        )
        return [
            Document(each.text, each.spans, is_rendered=True, has_empty_answer=is_empty)
            for each in rendered
        ]

    def _chat(self, record: dict[str, Any]) -> list[Document]:
        return self._messages(record, "messages")

    def _sharegpt(self, record: dict[str, Any]) -> list[Document]:
        return self._messages(record, "conversations")

    def _messages(self, record: dict[str, Any], name: str) -> list[Document]:
        if record[name] in ([], "[]"):  # ShareGPT has such records
            raise no_turns(name)
        _refuse_parts(record, name)
        messages = read_messages(record[name], name)
        refuse_lost_answer(record, messages, name)
        warn_of_answers_in_a_row(name, messages)
        return self._dialogue(with_system(messages, record.get("system"), name), record)

    def _alpaca(self, record: dict[str, Any]) -> list[Document]:
        if found := dialogues_of_lists(record, ["output"]):
            (messages,) = found[1]
        else:
            asked = [_text_in(record, key) for key in ("instruction", "input")]
            _warn_of_written_turns(record)
            messages = [
                {"role": "user", "content": "\n\n".join(filter(None, asked))},
                {"role": "assistant", "content": _text_in(record, "output")},
            ]
        messages = [*read_history(record), *messages]
        return self._dialogue(with_system(messages, record.get("system"), "history"), record)

    def _segments(self, record: dict[str, Any]) -> list[Document]:
        """Join segments of text, of which those are learned whose ``label`` is true.

        This is axolotl's form ``input_output``. Nothing is added between segments or before them,
        so a text begins with its own BOS.
        """
        text, spans = "", []
        for i, segment in enumerate(record["segments"]):
            label = truth_of(segment["label"]) if _is_segment(segment) else None
            if label is None:
                problem = f"segments[{i}] is not a text with a label: {shortened(segment)}"
                raise BadLineError(f'{problem}; write {{"label": true, "text": "..."}}')
            if label and segment["text"]:
                spans.append((len(text), len(text) + len(segment["text"])))
            text += segment["text"]
        return [Document(text, spans, is_rendered=True)] if spans else []

    def _preference(self, record: dict[str, Any]) -> list[Document]:
        keys = ("chosen", "rejected")
        _refuse_empty_side(record)
        answers = self._answers(record, keys, num_learned=2 if self.reads_pairs else 1)
        for key, documents in zip(keys, answers, strict=False):
            if len(documents) != 1:
                problem = f"becomes {len(documents)} texts, but a pair has one text for each answer"
                remedy = "leave such records out"
                if not documents:
                    problem = "has no text to learn"
                elif self.train_on != "last":
                    problem += ", since the chat template writes an earlier answer otherwise once "
                    problem += "another one follows"
                    remedy = f"set data.train_on last, which compares the last answers, or {remedy}"
                raise BadLineError(f"`{key}` {problem}; {remedy}")
        margin = _margin_of(record) if self.reads_margins else None
        return [documents[0]._replace(margin=margin) for documents in answers]

    def _completion(self, record: dict[str, Any]) -> list[Document]:
        """Return a prompt with its answer. Both may be texts or lists of messages.

        An empty answer is learned too, as an answer that ends at once.
        """
        (found,) = self._answers(record, ("completion",), num_learned=1, needs_prompt=False)
        if any(document.loss_spans == [] for document in found):
            problem = "`completion` has no turn of the assistant, which could be learned"
            raise BadLineError(f"{problem}: {shortened(record)}; leave such records out")
        if any(not document.text for document in found):
            raise BadLineError("`prompt` and `completion` are empty; leave such records out")
        return found

    def _labelled(self, record: dict[str, Any], form: str) -> list[Document]:
        """Return the document of a single answer with its label.

        In ``messages`` and other dialogues the label belongs to the assistant's last turn, also in
        a ``completion`` that is a whole dialogue, as TRL's kto-mix-14k divides it.
        """
        label = label_of(record)
        if label is None or form == "text":
            problem = f"no answer with a `label` that is true or false: {shortened(record)}"
            names = [key for key in record if key not in ("label", "kto_tag")]
            said = next((key for key in names if is_feedback(key, record[key])), None)
            remedy = f"; write `{said}` as `label`" if said else ""
            raise BadLineError(
                f"{problem}{remedy}; known forms are {KNOWN_LABELLED}", kind=remedy[2:] or None
            )
        if form == "completion":
            turns = _as_messages("completion", record["completion"])
            is_whole = is_dialogue(turns) and role_of(turns[0]) in ("system", "developer", "user")
            reader = replace(self, train_on="last") if is_whole else self
            (found,) = reader._answers(record, ("completion",), num_learned=1)
        else:
            found = _FORMS[form].read(replace(self, train_on="last"), record)
        if len(found) != 1:
            problem = f"becomes {len(found)} texts" if found else "has no text to learn"
            raise BadLineError(f"the answer {problem}: {shortened(record)}; leave such records out")
        return [found[0]._replace(label=label)]

    def _answers(
        self,
        record: dict[str, Any],
        keys: Sequence[str],
        num_learned: int,
        needs_prompt: bool = True,
    ) -> list[list[Document]]:
        """Return the documents of the first ``num_learned`` answers, each after its prompt.

        Args:
            record: the record.
            keys: the fields that hold the answers.
            num_learned: number of answers to return.
            needs_prompt: True: refuse answers without a prompt, and return no document for an empty
                answer. This holds for the answers of a pair and for answers with a label.
        """
        if lists_of_texts := dialogues_of_lists(record, keys):
            asked, dialogues = lists_of_texts
            record = {key: value for key, value in record.items() if key != asked}
            record |= dict(zip(keys, dialogues, strict=True))
        lists = {*keys, "prompt", "messages", "conversations"}
        if not record.get("prompt") and is_dialogue(_question(record)):
            record = {**record, "prompt": _question(record), "question": None}
        record = {k: _as_messages(k, x) if k in lists else x for k, x in record.items()}
        # TRL's reward trainer compares whole texts and whole dialogues.
        are_whole = self.reads_margins and _are_alone(record, keys)
        found = read_answers(record, keys, needs_prompt and not are_whole)
        documents: list[list[Document]] = []
        for i in range(num_learned):
            if isinstance(found, Dialogues):
                said, num_given = found.dialogues[i], found.num_given
                documents.append(self._dialogue(said, record, num_given, needs_text=needs_prompt))
                continue
            text, spans = found.texts[i], found.spans[i]
            is_blank = not any(text[a:b].strip() for a, b in spans)
            document = Document(text, spans, has_empty_answer=is_blank)
            documents.append([] if needs_prompt and is_blank else [document])
        return documents


def _is_segment(value: object) -> bool:
    """Return whether ``value`` is an object with a ``label`` and a ``text``."""
    return isinstance(value, dict) and isinstance(value.get("text"), str) and "label" in value


def _are_segments(record: dict[str, Any]) -> bool:
    """Return whether the first segment has a label. Those of a transcript have times."""
    segments = record["segments"]
    return isinstance(segments, list) and bool(segments) and _is_segment(segments[0])


class _Form(NamedTuple):
    """A form of records."""

    fields: tuple[str, ...]
    """The fields by which the form is recognised."""
    read: Callable[[RecordReader, dict[str, Any]], list[Document]]
    """Returns the documents of a record."""
    takes: Callable[[dict[str, Any]], bool] = lambda record: True
    """Tells whether a record with these fields has the form."""


_FORMS: dict[str, _Form] = {
    "messages": _Form(("messages",), RecordReader._chat),
    "sharegpt": _Form(("conversations",), RecordReader._sharegpt),
    "preference": _Form(("chosen", "rejected"), RecordReader._preference),
    "completion": _Form(("prompt", "completion"), RecordReader._completion),
    "alpaca": _Form(("instruction", "output"), RecordReader._alpaca),
    "segments": _Form(("segments",), RecordReader._segments, _are_segments),
    "text": _Form(("text",), RecordReader._text),
}
"""The forms by their names in data.format, in the order in which a record is compared with them."""


_ANSWERS_OF_TEXTS = {
    *("code", "summary", "highlights", "completion", "output", "response", "answer", "solution"),
    *("target", "targets"),
}
"""Names of an answer to a ``text``, such as MBPP's and BillSum's."""


def _warn_of_answer(record: Mapping[str, Any], text_field: str) -> None:
    """Warn if a field beside the text may be the answer to it, which is not learned.

    Raises BadLineError: there are two answers to compare (MultiPref's).
    """
    if text_field == "text" and (remedy := remedy_for_two(record)) is not None:
        problem = f"`text` stands beside two answers: {shortened(record)}"
        raise BadLineError(f"{problem}; {remedy}")
    for key, value in record.items():
        # A `code` of one word is the code of a language or a country.
        is_answer = isinstance(value, str) and value.strip() and key.lower() in _ANSWERS_OF_TEXTS
        is_answer = is_answer and (key != "code" or len(value.split()) > 1)
        if is_answer and key != text_field and not is_said(value, [record[text_field]]):
            warn_once(
                f"the answer {key} to a text",
                f"`{key}` of records is not read: `{text_field}` is learned alone, as a document; "
                f"if it asks for `{key}`, write it as `instruction` and `{key}` as `output`",
            )


def _refuse_parts(record: Mapping[str, Any], name: str) -> None:
    """Raise BadLineError if the texts of turns are in ``parts``, as in Gemini's requests."""
    for i, turn in enumerate(record[name] if isinstance(record[name], list) else ()):
        if not isinstance(turn, dict) or not {"content", "value"}.isdisjoint(turn):
            continue
        parts = turn.get("parts")
        if isinstance(parts, list) and parts and all(map(_is_text_part, parts)):
            system = next((key for key in record if is_system(key)), "systemInstruction")
            where = "" if system in record else ", where a record has one,"
            raise BadLineError(
                f"{name}[{i}] has its text in `parts`: {shortened(parts)}; write the text of "
                f"`parts` of each turn as `content`, and that of `{system}`{where} as `system`",
                kind="turns have their texts in `parts`",
            )


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.keys() == {"text"} and isinstance(part["text"], str)


def _warn_of_marked_turns(messages: Sequence[Message], record: Mapping[str, Any]) -> None:
    """Warn once if a user's turn is a dialogue with marks of its turns: BELLE's, HelpSteer2's."""
    for turn in messages:
        if turn.get("role") != "user" or not has_turns(text := text_of(turn)):
            continue
        fields = ("instruction", "input", "prompt", "question")
        texts = {key: x for key in fields if isinstance(x := record.get(key), str)}
        key = next((key for key, x in texts.items() if has_turns(x)), next(iter(texts), None))
        write = "write its turns, without the marks,"
        if key in ("instruction", "input"):
            warn_of_turns(text, f"`{key}`", f"{write} and the output as `messages`")
        elif key is not None:
            place = "in its place" if key == "prompt" else f"in `prompt`, and leave `{key}` out"
            warn_of_turns(text, f"`{key}`", f"{write} as a list of messages {place}")
        else:
            warn_of_turns(text, "a turn", f"{write} in its place")


def _warn_of_written_turns(record: Mapping[str, Any]) -> None:
    """Warn once if an instruction, or its output, is the text of messages: it is shown as it is."""
    for key in ("instruction", "output"):
        text = record.get(key)
        if not isinstance(text, str):
            continue
        if shows_pythons_turns(text) or not isinstance(turns_in(text, key), str):
            warn_once(
                f"messages as text in {key}",
                f"`{key}` of records is the text of messages, and is taken as this text: "
                f"{shortened(text)}; write the messages themselves as `messages` if they are meant",
            )


def _refuse_media(record: Mapping[str, Any]) -> None:
    """Raise BadLineError if a record of no known form, or of a list within it the first one, has
    pictures, films or sounds: the_cauldron's."""
    if (key := media_of(record)) is not None:
        raise lost_media(f"`{key}`", record[key])
    for name, value in record.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and (key := media_of(first)) is not None:
            raise lost_media(f"{name}[0].{key}", first[key])


def _refuse_empty_side(record: Mapping[str, Any]) -> None:
    """Raise BadLineError if one answer of a pair is null or an empty list or object.

    An empty text beside a dialogue is refused too. Beside a text it is an empty answer.
    """
    if not {"chosen", "rejected"} <= record.keys():
        return
    sides = {key: record[key] for key in ("chosen", "rejected")}
    are_texts = all(
        isinstance(x, str) and isinstance(_as_messages(key, x), str) for key, x in sides.items()
    )
    for key, value in sides.items():
        if value in (None, [], {}) or (not are_texts and value in ("", "[]", "{}")):
            problem = f"`{key}` is empty ({shortened(value)}), but a pair has one text for each "
            raise BadLineError(f"{problem}answer; leave such records out", kind=f"`{key}` is empty")


def _margin_of(record: Mapping[str, Any]) -> float:
    """Return the ``margin`` of a pair, or 0 if the pair has none.

    Raises BadLineError: the margin is no number, or too large.
    """
    margin = value_in(record.get("margin"))  # in CSV it is the text of a number
    if margin is None:
        return 0.0
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not is_number or not abs(margin) <= _MOST_MARGIN:
        problem = f"`margin` is {shortened(margin)}, not a number of at most {_MOST_MARGIN:g}"
        raise BadLineError(f"{problem}; write a number, or leave it out")
    return float(margin)


def _refuse_unwanted(record: Mapping[str, Any], form: str) -> None:
    """Raise BadLineError if a record says that its answer is a bad one."""
    if form not in ("text", "preference") and label_of(record) is False:
        key = "label" if "label" in record else "kto_tag"
        problem = f"`{key}` is {shortened(record[key])}: the answer is one to avoid, and "
        problem += f"train.objective next_token would learn it: {shortened(record)}"
        remedy = "set train.objective kto, leave such records out, or rename the field if it "
        raise BadLineError(f"{problem}; {remedy}means something else")
    if form not in ("text", "preference"):
        refuse_bad_verdict(record)
    if form == "preference":
        warn_of_tie(record)


def _refuse_second_dialogue(record: Mapping[str, Any], form: str) -> None:
    """Raise BadLineError if a field beside the one that is read holds another dialogue."""
    name = {"messages": "messages", "sharegpt": "conversations"}.get(form)
    if name is None:
        return
    for other in _DIALOGUES:
        if other == name or (said := _said(record.get(other), other)) is None:
            continue
        if said != _said(record[name], name):
            problem = f"`{name}` and `{other}` differ; leave one of them out"
            raise BadLineError(f"{problem}, or set data.format {form}, which reads `{name}`")


def _said(turns: object, name: str) -> list[Any] | None:
    """Return what the turns of the field ``name`` say. None: no turns can be read there."""
    try:
        turns = turns_in(turns, name)
        found = {name: turns}
        if name not in ("messages", "conversations"):
            read_known_set(found)
        turns = found.get("messages", turns)
        read = read_messages(turns, name) if is_dialogue(turns) else None
    except BadLineError:
        return None
    keys = ("tool_calls", "reasoning_content")
    return read and [[x["role"], text_of(x), *(x.get(key) for key in keys)] for x in read]


def _refuse_other_functions(record: Mapping[str, Any]) -> None:
    """Raise BadLineError if ``tools`` and their older name ``functions`` differ."""
    if record.get("tools") and record.get("functions"):
        both = [ChatTemplate.variables_of({"tools": record[key]}) for key in ("tools", "functions")]
        if both[0] != both[1]:
            raise BadLineError("`tools` and `functions` differ; leave one of them out")


def has_answer(record: Mapping[str, Any]) -> bool:
    """Return whether ``messages`` or ``conversations`` end with an answer.

    If they end otherwise, they are the prompt of a pair in the same record.
    """
    for turns in (record.get("messages"), record.get("conversations")):
        last = turns[-1] if isinstance(turns, list) and turns else None
        if isinstance(last, dict):
            return role_of(last) == "assistant"
    return False


def _likeness(fields: tuple[str, ...], record: dict[str, Any]) -> float:
    """Return the share of ``fields`` that the record has. Their names may be misspelt."""
    is_dialogue_form = fields[0] in ("messages", "conversations")
    keys = [
        key
        for key, value in record.items()
        if value is not None and (isinstance(value, list) or not is_dialogue_form)
    ]
    return sum(bool(get_close_matches(field, keys, cutoff=0.8)) for field in fields) / len(fields)


def _as_messages(key: str, value: Any) -> Any:
    """Return the messages in field ``key`` as a list. Return any other value unchanged.

    The field may also hold a single message, or messages as JSON text, as in tables.
    """
    turns = turns_in(value, key)
    if isinstance(value, str) and isinstance(turns, dict) and key != "prompt":
        turns = turns if role_of(turns) == "assistant" else value  # an answer in JSON
    turns = [turns] if isinstance(turns, dict) else turns
    if isinstance(turns, str) and key in ("messages", "conversations"):
        return read_messages(turns, key)
    if not isinstance(turns, list) or not turns or not all(isinstance(x, dict) for x in turns):
        return value
    return read_messages(turns, key)


def _are_alone(record: Mapping[str, Any], keys: Sequence[str]) -> bool:
    """Return whether the answers of a pair are texts with nothing before them, or dialogues without
    a question beside them."""
    given = {key for key, value in record.items() if value not in (None, "", [], {})}
    are_texts = all(isinstance(record[key], str) for key in keys)
    before = BEFORE_ANSWERS if are_texts else BEFORE_ANSWERS - OF_DIALOGUES
    return given.isdisjoint(before)


def _question(record: Mapping[str, Any]) -> Any:
    """Return the field ``question``, as messages if it is the text of their JSON."""
    return turns_in(record.get("question"), "question")


def other_answer(record: object, documents: Sequence[Document]) -> str | None:
    """Return a field of ``record`` that may hold its answer, with the text.

    None: it has none, or ``documents`` show it.
    """
    named = record.items() if isinstance(record, dict) else ()
    for key, value in named:
        is_answer = key.lower() in _ANSWERS_OF_TEXTS and isinstance(value, str) and value.strip()
        if is_answer and not is_said(value, [document.text for document in documents]):
            return f"`{key}` {shortened(value)}"
    return None


def _is_filled(turn: Message) -> bool:
    """Return whether an assistant's turn has a text, a thought or a call."""
    return bool(text_of(turn).strip() or turn.get("reasoning_content") or turn.get("tool_calls"))


def _or_rows(record: Mapping[str, Any]) -> str:
    """Return the advice for a record that may be a whole table: its fields are lists, or pandas'
    objects. Empty: it is none."""
    values = [value for value in record.values() if value is not None]
    are_columns = all(
        isinstance(x, list) or (isinstance(x, dict) and all(map(_is_row, x))) for x in values
    )
    is_table = are_columns and all(values)
    also = ", or, if the record is a whole table, write a record for each of its rows"
    return also if is_table else ""


def _is_row(key: str) -> bool:
    return key.isdigit()


def _text_in(record: Mapping[str, Any], key: str) -> str:
    """Return the text in field ``key``, or an empty text if the field is missing.

    Raises BadLineError: the field holds no text.
    """
    value = record.get(key)
    value = "" if value is None else value
    if not isinstance(value, str):
        are_texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
        write = "write one of them there" if are_texts and value else "write a text there"
        if isinstance(value, bool | int | float):
            write += f", such as {example_of_text(value)}"
        if found := pointer_in(record, value):
            kind = kind_of([found])
            write = f"if it is {kind} {found.where}, write the text of that option there"
        raise BadLineError(f"{key!r} is not text: {shortened(value)}; {write}{_or_rows(record)}")
    return value
