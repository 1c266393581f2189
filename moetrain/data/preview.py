"""Shows the first document of each source of a run as it will be learned, for ``--dry_run``.

The code that a run uses reads and renders this document. Left out on purpose: tokens and rows,
since it takes minutes to tokenise a large source. ``moetrain data`` shows these.
"""

from moetrain.config import Config
from moetrain.data.documents import Document
from moetrain.data.loader import section_of_rows
from moetrain.data.records import RecordReader
from moetrain.data.sources import Source
from moetrain.data.tokenizer import ByteTokenizer, load_tokenizer

_LONGEST = 400
"""Most characters of a document or a prompt that are shown."""

_CONTROLS = {i: f"\\x{i:02x}" for i in (*range(0x20), *range(0x7F, 0xA0)) if chr(i) not in "\n\t"}
_CONTROLS[ord("\r")] = "\\r"
"""Control characters, on which a terminal would act, and what is shown of them."""


def visible(text: str) -> str:
    """Return ``text`` with control characters as escapes, but line breaks and tabs as they are."""
    return text.translate(_CONTROLS)


def cautions(config: Config, vocab_size: int) -> list[str]:
    """Return a line for each setting with which a run learns or keeps less than its user may think.

    Such settings are random tokens, bytes under a large vocabulary, and no checkpoint.
    """
    data, checkpoint = config.data, config.checkpoint
    found: list[str] = []
    if data.source == "synthetic" and data.mix is None:
        found.append("data.source synthetic: random tokens, from which nothing is learned")
    elif data.tokenizer == "byte" and vocab_size > 2 * ByteTokenizer.vocab_size:
        found.append(
            f"data.tokenizer byte: text becomes {ByteTokenizer.vocab_size} of the model's "
            f"{vocab_size:,} tokens, and the others are never trained; set data.tokenizer to the "
            "model's"
        )
    if not (checkpoint.interval or checkpoint.minutes or checkpoint.at_end or checkpoint.save_hf):
        found.append(
            "no checkpoint is kept, and nothing is exported (checkpoint.at_end, "
            "checkpoint.interval, checkpoint.minutes, checkpoint.save_hf)"
        )
    return found


def preview(config: Config, vocab_size: int) -> str:
    """Describe the data of ``config``, with one line for each source.

    Raises ConfigError: a source is not there, or its first record cannot be learned.
    """
    data = section_of_rows(config)
    if data.source == "synthetic":
        return "data: synthetic rows"
    tokenizer = load_tokenizer(data.tokenizer, vocab_size, data.new_tokens)
    sections = {"": data} if data.mix is None else data.sources()
    marks, lines = "what is learned stands in « »", []
    if is_ranked := RecordReader.kind_of_rows(data) == "ranked":
        marks = "a text's reward is read at its last token"
    for name, section in sections.items():
        source = Source.of(section, tokenizer)
        first = next(iter(source.documents()), None)
        if first is not None and is_ranked:
            first = first._replace(loss_spans=[])
        shown = "it has no document" if first is None else f"the first document: {_marked(first)}"
        lines.append(f"data{f' {name}' * bool(name)}: {marks}; {shown}")
    return "\n".join(lines)


def _marked(document: Document) -> str:
    """Return the text of a document on one line, with « and » around what is learned."""
    text, spans = document.text, document.loss_spans
    parts, at = [], 0
    for start, end in [(0, len(text))] if spans is None else spans:
        parts += [text[at:start], "«", text[start:end], "»"]
        at = end
    return on_one_line("".join([*parts, text[at:]]))


def on_one_line(text: str) -> str:
    """Return ``text`` with escapes for line breaks and control characters, cut in the middle if it
    is long."""
    shown, half = visible(text).replace("\n", "\\n"), _LONGEST // 2
    return shown if len(shown) <= _LONGEST else f"{shown[:half]} ... {shown[-half:]}"
