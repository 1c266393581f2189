"""The settings of data: one source, or the sources of a mixture."""

from __future__ import annotations

import json
import os
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from moetrain.config.sections import Section, from_home
from moetrain.config.sources import ConfigError, source_by_suffix


class MixEntry(Section):
    """One source of a mixture, a table [[data.mix]]. What is unset is as in the section data."""

    path: str
    """File, folder, pattern or hub's name to read."""
    name: str | None = None
    """Its name in metrics (eval_loss/NAME); unset: the last part of its path."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the rows, among the weights of all; unset in all: as many as there are."""
    repeat: PositiveInt = 1
    """Times that one pass over the mixture reads its rows, or with weights may read them."""
    limit: PositiveInt | None = None
    """First records or files that are read of it; unset: all."""
    source: Literal["text", "records"] | None = None
    """Kind of data; unset: by the end of its path."""
    eval_path: str | None = None
    """What to evaluate on; unset: data.eval_fraction of it is held out."""
    split: str | None = None
    subset: str | None = None
    format: str | None = None
    text_field: str | None = None

    _paths = field_validator("path", "eval_path")(from_home)

    def label(self) -> str:
        """Return the entry's name."""
        return self.name or os.path.basename(os.path.normpath(self.path)).partition(".")[0]


class DataSection(Section):
    """Where text comes from, and how it becomes packed rows of tokens."""

    source: Literal["stdlib", "text", "records", "jsonl", "synthetic"] = "stdlib"
    """Kind of data. stdlib: the source code of Python's standard library; text: a text file, or a
    folder of them; records: files of records (.jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow), a
    data set that was saved or that a hub has; jsonl: another name for records; synthetic: random
    tokens. Unset, the end of data.path decides."""
    path: str | None = None
    """File, folder or pattern (data/*.parquet) to read, or a hub's OWNER/NAME of records."""
    mix: tuple[MixEntry, ...] | None = None
    """Sources of a mixture, instead of data.path: tables [[data.mix]] with path, name, weight,
    repeat, limit and others of this section; on a command line a list in JSON."""
    split: str = "train"
    """Split of a data set that was saved or that a hub has."""
    subset: str | None = None
    """Configuration of a hub's data set; unset: its default."""
    format: Literal[
        "auto", "messages", "sharegpt", "preference", "completion", "alpaca", "text"
    ] = "auto"
    """Form of the records. messages: chats; sharegpt: `conversations`; preference: `chosen` and
    `rejected`; completion: `prompt` and `completion`; alpaca: `instruction` and `output`; text:
    data.text_field. auto: by the fields of each record."""
    train_on: Literal["all", "completion", "last"] = "all"
    """Turns of the assistant that are learned: all; completion: those behind the user's last turn;
    last: the last one. Of a prompt and its completion only the completion is ever learned."""
    eval_path: str | None = None
    """File or folder to evaluate on; unset: data.eval_fraction of the documents is held out."""
    eval_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of the documents that is held out for evaluation, chosen by a hash of their names or
    text; of too few documents the last tokens, as large a share."""
    text_field: str = "text"
    """Field of a record that holds its text, if it is no conversation."""
    chat_template: str | None = None
    """Jinja file that formats `messages`; unset: the tokenizer's own template, else ChatML."""
    tokenizer: str = "byte"
    """The tokenizer: byte (no file), a tokenizer.json, a folder that holds one, or a hub id. Unset
    with model.path: that checkpoint's own."""
    seq_len: int = Field(default=256, gt=1)
    """Tokens in one packed row. Unset with model.path: as many as the model takes, up to 4096."""
    packing: Literal["auto", "whole", "stream"] = "auto"
    """How documents fill rows. whole: uncut, with padding; a conversation longer than a row loses
    its end, and a longer text is cut into parts. stream: documents follow one another and are cut
    at the end of each row. auto: whole for conversations, else stream."""
    streaming: Literal["auto", "yes", "no"] = "auto"
    """Whether training begins while later blocks of the data are tokenised. Passes over a stream
    have about as many rows as its first block tells. auto: for files over 64 MiB, of which no part
    is limited."""
    workers: NonNegativeInt | None = None
    """Processes of each rank that tokenise a stream ahead; unset: a core each, up to 8."""
    cache_dir: str | None = None
    """Folder of the token cache; unset: the user's cache folder (XDG_CACHE_HOME/moetrain)."""
    num_documents: int = Field(default=1024, gt=0, lt=2**31)
    """Rows of the synthetic source."""

    _paths = field_validator("path", "eval_path", "chat_template", "tokenizer", "cache_dir")(
        from_home
    )

    @field_validator("mix", mode="before")
    @classmethod
    def _read_tables(cls, value: Any) -> Any:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"give a list of tables in JSON ({error})") from None

    def sources(self) -> dict[str, DataSection]:
        """Return the settings of each source of the mixture by name; raises ConfigError."""
        entries = {entry.label(): entry for entry in self.mix or ()}
        if len(entries) < len(self.mix or ()):
            raise ConfigError("data.mix", "two entries have one name; give each a name of its own")
        if len({entry.weight is None for entry in entries.values()}) > 1:
            raise ConfigError("data.mix", "some entries have a weight; give all one, or none")
        own = ("path", "eval_path", "split", "subset", "format", "text_field")
        return {
            name: self.model_copy(
                update={
                    "source": entry.source or source_by_suffix(entry.path, "data.mix"),
                    **{key: x for key in own if (x := getattr(entry, key)) is not None},
                }
            )
            for name, entry in entries.items()
        }
