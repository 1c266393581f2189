"""The documents of a run: from the standard library, text files, or files of records.

A source lists its files when it is made, and reads them a bounded part at a time: a corpus, and
even a single file, may be larger than memory. Held-out documents are chosen by a hash of their name
(files) or content (records), so the split is the same on every machine, and a document never
changes sides when others are added.

A record's form is recognised by its fields, so one source may mix forms, unless ``data.format``
names one. Every form of a dialogue becomes ``messages``, which :mod:`moetrain.data.chat` renders;
prompts and completions of plain text are joined as they are.

Left out on purpose: synthetic data, which needs no text (packing.py), renaming other fields of
records (a line of the user's own script does that), and images and sounds in ``content``.
"""

import codecs
import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from moetrain.config import ConfigError, DataSection, logger
from moetrain.config.sources import shortened
from moetrain.data.chat import ChatTemplate
from moetrain.data.containers import OBJECTS, FilePart, Files, Raw, find_records, list_files
from moetrain.data.field_names import renamed
from moetrain.data.known_sets import remedy_for
from moetrain.data.messages import (
    BadLineError,
    check_weight,
    parse_json,
    read_messages,
    role_of,
)
from moetrain.data.pairs import (
    KNOWN_FORMS,
    KNOWN_LABELLED,
    Dialogues,
    label_of,
    read_answers,
    read_history,
)
from moetrain.data.tokenizer import Tokenizer
from moetrain.data.warned import warn_once

_T = TypeVar("_T")

_PART_BYTES = 1 << 20
"""Size of the parts in which longer text files are read, cut at line ends, and of the parts of
files of lines that a stream reads in any order."""
_ALIKE = 0.5
"""Share of a form's fields that a record has at least if the form is named as the nearest one."""
_MOST_MARGIN = 1e30
"""A margin of a pair that fp32 holds, and its sums."""
_FIRST = 64
"""Records that are looked at to say what forms a source has."""
# Parts of the library folder that are not the library: installed packages, tests, their fixtures.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Document(NamedTuple):
    """A text, or the next part of one that is too large to hold, and what of it is learned."""

    text: str
    loss_spans: list[tuple[int, int]] | None = None
    """The characters ``start:end`` to learn; None: all."""
    is_rendered: bool = False
    """Whether a chat template made the text, which then begins as the template says."""
    is_end: bool = True
    """Whether the document ends with this part."""
    num_bytes: int = 0
    """Bytes of the source that were read for it, for the progress bar."""
    label: bool | None = None
    """For KTO: True for a desirable answer, False for an undesirable one, None without a label."""
    margin: float | None = None
    """For reward models: by how much the answers' rewards are to differ; None: it is not read."""


class HashRange(NamedTuple):
    """The documents whose hash, a number in [0, 1), lies in ``low <= hash < high``."""

    low: float = 0.0
    high: float = 1.0

    def holds(self, key: bytes) -> bool:
        """Return whether the document identified by ``key`` (its name or content) is in it."""
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return self.low <= int.from_bytes(digest, "big") / 2**64 < self.high


@dataclass
class Skipped:
    """The records that ``data.bad_records skip`` leaves out: how many, and one of each kind."""

    MOST_KINDS: ClassVar = 10
    count: int = 0
    kinds: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By what is wrong: how many records, and file, line and problem of the first one."""

    def add(self, error: "_BadRecord") -> None:
        """Count a bad record."""
        self.merge(Skipped(1, {error.kind: (1, error.problem)}))

    def merge(self, other: "Skipped") -> None:
        """Count ``other``'s records too."""
        self.count += other.count
        for kind, (count, first) in other.kinds.items():
            if kind in self.kinds or len(self.kinds) < self.MOST_KINDS:
                known, said = self.kinds.get(kind, (0, first))
                self.kinds[kind] = (known + count, said)

    def warn(self, path: str) -> None:
        """Name the records of ``path`` in the log, if there are any."""
        if not self.count:
            return
        logger.warning("%s: %s bad records were left out", path, f"{self.count:,}")
        for count, first in sorted(self.kinds.values(), key=lambda kind: -kind[0]):
            logger.warning("%s such as %s", f"{count:,}", first)
        if rest := self.count - sum(count for count, _ in self.kinds.values()):
            logger.warning("%s of other kinds", f"{rest:,}")


_VALUE = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+|(?<=\s)[\[{(].*""")
"""The parts of an error that only its own record has: texts, numbers, and all that follows the
beginning of a list or an object."""


def _kind_of(problem: str) -> str:
    """Return what ``problem`` says without the values of its record and the remedy."""
    return _VALUE.sub("...", problem.partition("; ")[0])


_EVERYTHING = HashRange()


class _BadRecord(ConfigError):
    """A record that cannot be used, with its file and line."""

    def __init__(self, field: str, where: str, error: BadLineError) -> None:
        self.problem = f"{where}: {error}"
        self.kind = error.kind or _kind_of(str(error))
        super().__init__(field, self.problem)


@dataclass(frozen=True)
class Source(Files):
    """Documents of one setting: text files, one each, or records of which a reader makes some.

    All that reads them raises ConfigError if a file cannot be read or is malformed. In texts, bytes
    that are not UTF-8 become U+FFFD.
    """

    reader: "RecordReader | None" = None
    """What reads the records; None: the files are texts."""
    limit: int | None = None
    """Records to read at most, before the share is chosen; None: all."""
    share: HashRange = _EVERYTHING
    """Which records are read."""

    @classmethod
    def of(
        cls, data: DataSection, tokenizer: Tokenizer, limit: int | None = None, field: str = "path"
    ) -> Self:
        """Open what ``field`` of ``data`` names: list the files, and read nothing yet.

        ``limit``: files or records to read at most; None: all.

        Raises ConfigError: a path or template file is missing or cannot be read, a template is
        malformed, or a folder has no files.
        """
        name, path = f"data.{field}", getattr(data, field)
        if data.source in ("records", "jsonl"):
            reader = RecordReader.of(data, tokenizer)
            files, table = find_records(name, path, data.split, data.subset)
            return cls(name, path, files, table, reader, limit)
        if data.source == "stdlib" and field == "path":
            path = sysconfig.get_path("stdlib")
            return cls("data.source", path, list_files("data.source", path, (".py",), _NOT_STDLIB))
        return cls(name, path, list_files(name, path)[:limit])

    def only(self, share: HashRange) -> Self:
        """Return the records, or the text files, that are in ``share``."""
        if self.reader is not None:
            return replace(self, share=share)
        return replace(self, files=[file for file in self.files if share.holds(self._key(file))])

    def _key(self, file: Path) -> bytes:
        """Return the name of ``file``, which does not depend on where the corpus lies."""
        root = Path(self.path)
        is_inside = file != root and file.is_relative_to(root)
        return os.fsencode(file.relative_to(root).as_posix() if is_inside else file.name)

    def identity(self) -> list[Any]:
        """Return what decides the documents, as JSON for the key of the token cache."""
        if self.reader is None:
            return ["text", self.stamps()]
        return ["records", self.stamps(), self.share, self.limit, self.reader.identity()]

    def _raws(self) -> Iterator[Raw]:
        every = (raw for piece in self.pieces() for raw in self.records(piece))
        return (raw for raw in islice(every, self.limit) if self.share.holds(raw.key))

    def documents(self, skipped: Skipped | None = None) -> Iterator[Document]:
        """Yield all documents; ``skipped`` counts bad records as :meth:`documents_of` does."""
        texts = (text for part in self.pieces() for text in self.read(part, self.share))
        yield from self.documents_of(texts if self.reader is None else self._raws(), skipped)

    def file_parts(self, share: HashRange) -> list[FilePart]:
        """List the parts of the files that a stream reads in any order.

        A text that is longer than a part is divided into documents of a part's length.
        """
        parts = self.pieces(_PART_BYTES)
        if self.reader is not None:
            return parts
        places = (b"" if part.is_whole else b"#%d" % part.start for part in parts)
        pairs = zip(parts, places, strict=True)
        return [part for part, place in pairs if share.holds(self._key(part.file) + place)]

    def read(self, part: FilePart, share: HashRange) -> Iterator[Raw | Document]:
        """Yield what is of ``share`` in ``part``, for :meth:`documents_of`."""
        if self.reader is not None:
            yield from (raw for raw in self.records(part) if share.holds(raw.key))
            return
        with self.reading(part.file):
            if part.is_whole:
                yield from _text_parts(part.file)
            else:
                text = _lines_from(part)
                yield Document(text, num_bytes=len(text))

    def documents_of(
        self, found: Iterable[Raw | Document], skipped: Skipped | None = None
    ) -> Iterator[Document]:
        """Yield the documents of what :meth:`read` yields.

        A bad record raises ConfigError, or with ``data.bad_records skip`` is added to ``skipped``.
        """
        for each in found:
            if isinstance(each, Document):
                yield each
                continue
            num_bytes = each.num_bytes
            try:
                documents = self._told(each, RecordReader.documents)
            except _BadRecord as error:
                assert self.reader is not None
                if not self.reader.skips_bad:
                    raise
                if skipped is not None:
                    skipped.add(error)
                continue
            for document in documents:
                yield document._replace(num_bytes=num_bytes)
                num_bytes = 0

    def _told(self, raw: Raw, read: "Callable[[RecordReader, Any], _T]") -> _T:
        """Return what ``read`` makes of a record; _BadRecord says where it is, if it is bad."""
        assert self.reader is not None
        try:
            return read(self.reader, raw.value())
        except BadLineError as error:
            raise _BadRecord(error.field or self.field, raw.where, error) from None

    def _form_of(self, raw: Raw) -> str:
        try:
            return self._told(raw, RecordReader.form_of)
        except _BadRecord:
            if self.reader is None or not self.reader.skips_bad:
                raise
            return "bad"

    def describe(self) -> str:
        """Say in a line which forms the first records have."""
        first = islice(self._raws(), _FIRST) if self.reader is not None else ()
        forms = Counter(self._form_of(raw) for raw in first)
        found = ", ".join(f"{name} ({count})" for name, count in forms.most_common())
        return found and f"{self.path}: the first {forms.total()} records are {found}"


@dataclass(frozen=True)
class RecordReader:
    """Reads records as ``data.format``, ``data.text_field`` and ``data.train_on`` say."""

    PAIRED: ClassVar = ("pairs", "answers", "ranked")
    """Further values of data.packing, which train.objective sets: rows of preference pairs, for
    kto of pairs and of single answers with a label, and for reward of pairs with their margins."""

    template: ChatTemplate
    form: str = "auto"
    text_field: str = "text"
    train_on: str = "all"
    reads_pairs: bool = False
    """Whether a preference pair's rejected answer is read too; next-token loss learns the chosen
    one alone."""
    reads_labels: bool = False
    """True: single answers with a label are read too, and records that are neither these nor pairs
    are refused."""
    reads_margins: bool = False
    """True: the ``margin`` of a pair is read."""
    skips_bad: bool = False
    """True: bad records are left out (``data.bad_records skip``)."""

    @classmethod
    def of(cls, data: DataSection, tokenizer: Tokenizer) -> Self:
        """Read as ``data`` says; ConfigError: see :meth:`Source.of`."""
        template = ChatTemplate.of(tokenizer, data.chat_template, data.chat_template_kwargs)
        reader = cls(
            template=template,
            form=data.format,
            text_field=data.text_field,
            train_on=data.train_on,
            skips_bad=data.skips_bad,
        )
        if data.packing not in cls.PAIRED:
            return reader
        if data.packing == "answers":
            if data.format == "text":
                problem = "'text', and train.objective kto learns from answers with a label"
                raise ConfigError("data.format", f"{problem}; set auto or another")
            return replace(reader, reads_pairs=True, reads_labels=True)
        if data.format not in ("auto", "preference"):
            problem = f"{data.format!r}, and train.objective learns from pairs alone"
            raise ConfigError("data.format", f"{problem}; set preference")
        reads_margins = data.packing == "ranked"
        return replace(reader, form="preference", reads_pairs=True, reads_margins=reads_margins)

    def identity(self) -> list[Any]:
        """Return what decides the documents of a record, as JSON."""
        found = [self.form, self.text_field, self.train_on, self.template.identity()]
        reads = ["pairs"] * self.reads_pairs + ["labels"] * self.reads_labels
        reads += ["margins"] * self.reads_margins
        return [*found, *["skip"] * self.skips_bad, *reads]

    def documents(self, record: Any) -> list[Document]:
        """Return the documents of ``record``; none if its text is blank or its weight 0.

        Raises:
            BadLineError: the record has no known form, or is malformed.
            ConfigError: the chat template itself is wrong.
        """
        record = self._named(record)
        form = self._form(record)
        if isinstance(weight := record.get("weight"), int | float):
            check_weight(weight, "`weight`")
            if not weight:
                return []
        _, read = _FORMS[form]
        if self.reads_labels and form != "preference":
            found = self._labelled(record, form)
        else:
            _refuse_unwanted(record, form)
            found = read(self, record)
        # Lone surrogates, which JSON can spell and no tokenizer accepts, become a question mark.
        return [
            document._replace(text=document.text.encode(errors="replace").decode())
            for document in found
        ]

    def form_of(self, record: Any) -> str:
        """Return the form of ``record``; BadLineError, with the nearest form: it has none."""
        return self._form(self._named(record))

    def _form(self, record: dict[str, Any]) -> str:
        """Return the form of a record whose fields have the names that are read here."""
        if self.form != "auto":
            missing = [key for key in self._needed(self.form) if key not in record]
            if missing and self.reads_pairs:
                said = f"no {missing[0]!r}: no pair of answers, {shortened(record)}"
                remedy = remedy_for(record)
                answers = ("messages", "sharegpt", "completion", "alpaca")
                if remedy is None and self._has_form(record, *answers):
                    remedy = "it has one answer, which train.objective next_token learns"
                    if label_of(record) is not None:
                        remedy = "it has one answer with a label, which train.objective kto learns"
                said = f"{said}; {remedy}" if remedy else said
                raise BadLineError(f"{said}; known forms are {KNOWN_FORMS}", kind=remedy)
            if missing:
                said = f"no {missing[0]!r}, which data.format {self.form!r} needs"
                raise BadLineError(f"{said}; give it, or set data.format auto")
            return self.form
        fields = {key for key, value in record.items() if value is not None}
        is_pair = fields.issuperset(("chosen", "rejected"))
        if is_pair and (self.reads_pairs or not has_answer(record)):
            return "preference"
        for name in _FORMS:
            if fields.issuperset(self._needed(name)):
                return name
        known = ", ".join(f"{name} ({', '.join(self._needed(name))})" for name in _FORMS)
        remedy = remedy_for(record) or self._nearest(record)
        raise BadLineError(
            f"no {self.text_field!r} and no 'messages': a record of no known form, "
            f"{shortened(record)}; known are {known}; {remedy}, or name the field of a text in "
            "data.text_field",
            kind=remedy,
        )

    def _nearest(self, record: dict[str, Any]) -> str:
        """Say which form has fields most like those of ``record``, and what it lacks."""
        likeness, form = max((_likeness(self._needed(name), record), name) for name in _FORMS)
        if likeness < _ALIKE:
            return "none is near: fill or rename its fields"
        missing = ", ".join(f"`{key}`" for key in self._needed(form) if record.get(key) is None)
        return f"nearest is {form}, which lacks {missing}: fill or rename its fields"

    def _named(self, record: Any) -> dict[str, Any]:
        """Give the fields of ``record`` the names that are read here."""
        if not isinstance(record, dict):
            raise BadLineError(f"not a JSON object: {shortened(record)}; {OBJECTS}")
        return renamed(record, reads_pairs=self.reads_pairs, text_field=self.text_field)

    def _has_form(self, record: dict[str, Any], *forms: str) -> bool:
        return any(all(record.get(key) for key in self._needed(form)) for form in forms)

    def _needed(self, form: str) -> tuple[str, ...]:
        return (self.text_field,) if form == "text" else _FORMS[form][0]

    def _text(self, record: dict[str, Any]) -> list[Document]:
        if {"role", "parent_id"} <= record.keys():  # a row of OASST
            problem = f"a turn of a dialogue and no document: {shortened(record)}"
            raise BadLineError(f"{problem}; give whole dialogues as `messages`")
        text = record[self.text_field]
        if not isinstance(text, str):
            said = f"{self.text_field!r} is not text: {shortened(text)}"
            raise BadLineError(f"{said}; write texts there, or name another data.text_field")
        return [Document(text)] if text.strip() else []

    def _dialogue(self, messages: object, record: dict[str, Any], given: int = 0) -> list[Document]:
        """Render ``messages``, of which nothing is learned in the first ``given`` turns."""
        variables = ChatTemplate.variables_of(record)
        rendered = self.template.documents(messages, variables, self.train_on, given)
        return [Document(text, spans, True) for text, spans in rendered]

    def _chat(self, record: dict[str, Any]) -> list[Document]:
        return self._dialogue(_with_system(record, read_messages(record["messages"])), record)

    def _sharegpt(self, record: dict[str, Any]) -> list[Document]:
        messages = read_messages(record["conversations"], "conversations")
        return self._dialogue(_with_system(record, messages), record)

    def _alpaca(self, record: dict[str, Any]) -> list[Document]:
        asked = [_text_in(record, key) for key in ("instruction", "input")]
        messages = [
            *read_history(record),
            {"role": "user", "content": "\n\n".join(filter(None, asked))},
            {"role": "assistant", "content": _text_in(record, "output")},
        ]
        return self._dialogue(_with_system(record, messages), record)

    def _preference(self, record: dict[str, Any]) -> list[Document]:
        keys = ("chosen", "rejected")
        answers = self._answers(record, keys, num_learned=2 if self.reads_pairs else 1)
        for key, documents in zip(keys, answers, strict=False):
            if len(documents) != 1:
                problem = f"becomes {len(documents)} texts, where a pair has one of each"
                problem = problem if documents else "has no text to learn"
                raise BadLineError(f"`{key}` {problem}; leave such records out")
        margin = _margin_of(record) if self.reads_margins else None
        return [documents[0]._replace(margin=margin) for documents in answers]

    def _completion(self, record: dict[str, Any]) -> list[Document]:
        """Return a prompt with what answers it; both are texts, or both lists of messages."""
        return self._answers(record, ("completion",), num_learned=1, needs_prompt=False)[0]

    def _labelled(self, record: dict[str, Any], form: str) -> list[Document]:
        """Return the document of a single answer with its label.

        Of ``messages`` and other dialogues the label is that of the assistant's last turn.
        """
        label = label_of(record)
        if label is None or form == "text":
            problem = "no answer with a `label` that is true or false"
            raise BadLineError(f"{problem}: {shortened(record)}; known forms are {KNOWN_LABELLED}")
        if form == "completion":
            (found,) = self._answers(record, ("completion",), num_learned=1)
        else:
            found = _FORMS[form][1](replace(self, train_on="last"), record)
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
        """Return the documents of each of the first ``num_learned`` answers behind their prompt."""
        lists = {*keys, "prompt", "messages", "conversations"}
        record = {k: _as_messages(k, x) if k in lists else x for k, x in record.items()}
        found = read_answers(record, keys, needs_prompt)
        documents: list[list[Document]] = []
        for i, key in enumerate(keys[:num_learned]):
            if isinstance(answer := record[key], str) and not answer.strip():
                documents.append([])
            elif isinstance(found, Dialogues):
                documents.append(self._dialogue(found.dialogues[i], record, found.num_given))
            else:
                spans = found.spans[i]
                documents.append([Document(found.texts[i], spans)] if spans else [])
        return documents


_FORMS: dict[
    str, tuple[tuple[str, ...], Callable[[RecordReader, dict[str, Any]], list[Document]]]
] = {
    "messages": (("messages",), RecordReader._chat),
    "sharegpt": (("conversations",), RecordReader._sharegpt),
    "preference": (("chosen", "rejected"), RecordReader._preference),
    "completion": (("prompt", "completion"), RecordReader._completion),
    "alpaca": (("instruction", "output"), RecordReader._alpaca),
    "text": (("text",), RecordReader._text),
}
"""The fields by which each form is recognised, and what reads it, in the order in which forms are
looked for; their names are those of data.format."""


def _margin_of(record: Mapping[str, Any]) -> float:
    """Return the ``margin`` of a pair, 0 if it has none; BadLineError: it is no number."""
    margin = record.get("margin")
    if margin is None:
        return 0.0
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not is_number or not abs(margin) <= _MOST_MARGIN:
        problem = f"`margin` is {shortened(margin)}, by which rewards are to differ"
        raise BadLineError(f"{problem}; write a number, or leave it out")
    return float(margin)


def _refuse_unwanted(record: Mapping[str, Any], form: str) -> None:
    """Raise BadLineError if the record says that its answer is a bad one.

    Numbers may be classes of other things, so they count beside a prompt and its completion alone,
    as in the sets that KTO is trained on.
    """
    if form not in ("text", "preference") and label_of(record, form == "completion") is False:
        problem = "`label` is false: the answer is one to avoid, and train.objective next_token "
        problem += f"would learn it: {shortened(record)}"
        raise BadLineError(f"{problem}; set train.objective kto, or leave such records out")


def has_answer(record: Mapping[str, Any]) -> bool:
    """Return whether there are ``messages``, or ``conversations``, that end with an answer.

    Beside the answers of a pair, others are their prompt.
    """
    for turns in (record.get("messages"), record.get("conversations")):
        last = turns[-1] if isinstance(turns, list) and turns else None
        if isinstance(last, dict):
            return role_of(last) == "assistant"
    return False


def _likeness(fields: tuple[str, ...], record: dict[str, Any]) -> float:
    """Return how many of ``fields`` the record has, or has misspelt, as a share of all."""
    keys = [key for key, value in record.items() if value is not None]
    return sum(bool(get_close_matches(field, keys, cutoff=0.8)) for field in fields) / len(fields)


def _as_messages(key: str, value: Any) -> Any:
    """Return the messages, or the single one, in field ``key``; anything else as it is.

    Tables may have messages as the text of their JSON.
    """
    turns = _turns_in(value) if isinstance(value, str) else value
    turns = [turns] if isinstance(turns, dict) else turns
    if isinstance(turns, str) and key in ("messages", "conversations"):
        return read_messages(turns, key)
    if not isinstance(turns, list) or not turns or not all(isinstance(x, dict) for x in turns):
        return value
    return read_messages(turns, key)


def _turns_in(text: str) -> Any:
    """Return the messages whose JSON ``text`` is; a text that is something else as it is."""
    if not re.match(r"\s*\[\s*\{", text):
        return text
    try:
        found = parse_json(text, "a text")
    except BadLineError:
        return text
    are_turns = all(
        isinstance(x, dict) and not x.keys().isdisjoint(("role", "from")) for x in found
    )
    return found if are_turns else text


def _with_system(record: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = record.get("system")
    turn = {"role": "system", "content": system}
    return [turn, *messages] if system and messages[:1] != [turn] else messages


def _text_in(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key) or ""
    if not isinstance(value, str):
        raise BadLineError(f"{key!r} is not text")
    return value


def _lines_from(part: FilePart) -> str:
    """Return the lines that begin in ``part``; a line longer than that is cut."""
    with part.file.open("rb") as file:
        skipped = 0
        if part.start:
            file.seek(part.start - 1)
            skipped = len(file.readline(_PART_BYTES)) - 1
        raw = file.read(max(0, part.stop - part.start - skipped))
        raw += file.readline(_PART_BYTES) if raw and raw[-1:] != b"\n" else b""
    return raw.decode("utf-8", errors="replace")


def _text_parts(path: Path) -> Iterator[Document]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    with path.open("rb") as file:
        raw = file.read(_PART_BYTES)
        if b"\0" in raw:
            warn_once(f"no text {path}", f"{path} is not text; skipped")
        if b"\0" in raw or not raw.strip():
            return
        while raw:
            raw += file.readline(_PART_BYTES)
            following = file.read(_PART_BYTES)
            text = decoder.decode(raw, final=not following)
            yield Document(text, is_end=not following, num_bytes=len(raw))
            raw = following
