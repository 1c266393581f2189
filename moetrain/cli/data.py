"""``moetrain data PATH``: show the rows of a training run before it starts.

The data is read, rendered, tokenised and packed by a run's own code. Text that the run learns to
write is green, text that it learns to avoid is red. Left out on purpose: statistics over all rows
of a large source. They cover only its first rows (``_MOST_ROWS``).
"""

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moetrain.cli.main import Parser, command, log_lines
from moetrain.config import Config, ConfigError, logger
from moetrain.data.loader import Data, build_data
from moetrain.data.packing import IGNORE_INDEX, Row
from moetrain.data.preview import visible
from moetrain.train.session import resolve_run

_MOST_ROWS = 1000
"""Number of first rows that the statistics cover."""
_BAR = 40
"""Number of characters in the longest bar of the histogram."""
_KINDS = ("desirable", "undesirable")
_COMPARED = "another record's answer, to compare with, not learned"
_COLOURS = {"rejected": "red", "undesirable": "red", _COMPARED: "yellow"}
"""Colours of answers that the run learns to avoid, and of the names of answers to compare with."""


@command
def main(argv: Sequence[str] | None) -> None:
    parser = Parser(
        "data",
        "Show the rows that a run would train on, the lengths of their documents, and which text "
        "is learned.",
    )
    parser.prog = "moetrain data"
    parser.usage = "moetrain data [PATH] [--show N] [--section.key value ...]"
    parser.epilog = "PATH is the value of the setting data.path, or a recipe FILE.toml."
    parser.add_argument("--show", type=int, default=2, help="number of rows to print; default 2")
    words = list(argv or [])
    # A word behind the name of a setting is its value, so PATH is the first word alone.
    path = words.pop(0) if words and not words[0].startswith("--") else None
    options, settings = parser.parse_known_args(words)
    if path is None and not any(word.startswith("--data.") for word in settings):
        raise ConfigError("data", "no PATH is given; give one, a recipe FILE.toml, or --data.mix")
    is_recipe = path is not None and path.endswith(".toml")
    if path is not None and not is_recipe:
        settings = ["--data.path", path, *settings]
    log_lines()
    logger.setLevel("INFO")
    config = Config.load(path if is_recipe else None, settings, once=True)
    config, arch = resolve_run(config)
    data = build_data(config, arch.vocab_size)
    console = Console()
    size = len(data.train)
    rows = [data.train.row(i) for i in range(min(size, _MOST_ROWS))]
    _describe(console, config, data, rows)
    for number, row in enumerate(rows[: options.show]):
        console.rule(f"row {number}", align="left")
        has_colours = console.color_system is not None and not console.no_color
        console.print(_coloured(data, row, _sides(row), has_colours), soft_wrap=True)


def _describe(console: Console, config: Config, data: Data, rows: Sequence[Row]) -> None:
    documents = [_documents(row) for row in rows]
    lengths = np.concatenate([ends - starts for starts, ends in documents])
    tokens = int(lengths.sum())
    cut = sum(  # documents that do not end with EOS
        int((row.tokens_S[ends - 1] != data.tokenizer.eos_id).sum())
        for row, (_, ends) in zip(rows, documents, strict=True)
    )
    held_out = "none" if data.eval is None else f"{len(data.eval):,}"
    table = Table(show_header=False, box=None)
    table.add_row("rows to train on", f"{len(data.train):,} of {config.data.seq_len} tokens")
    table.add_row("rows held out", held_out)
    of_first = "" if len(rows) == len(data.train) else f" (first {len(rows):,} rows)"
    table.add_row("documents or parts" + of_first, f"{len(lengths):,}")
    table.add_row("tokens", f"{tokens:,} ({tokens / (len(rows) * config.data.seq_len):.1%} full)")
    if any(map(_is_ranked, rows)):
        table.add_row("learned", "each text's reward, read at its last token")
    else:
        learned = sum(int((_targets(row) != IGNORE_INDEX).sum()) for row in rows)
        table.add_row("learned", f"{learned:,} ({learned / max(1, tokens):.1%})")
    table.add_row("cut at a row's end", f"{cut:,}")
    console.print(table)
    console.print("documents by their number of tokens")
    counts, edges = np.histogram(lengths, bins=min(12, 1 + int(np.ptp(lengths))))
    for count, low, high in zip(counts, edges, edges[1:], strict=False):
        bar = "█" * round(_BAR * count / counts.max())
        console.print(f"{int(low):>7} to {int(high):<7} {bar} {count}", highlight=False)


def _documents(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and ends of the documents in ``row``, without padding."""
    ends = np.cumsum(row.lengths)
    starts = ends - row.lengths
    if row.is_pad_S is not None:
        ends[-1] -= int(row.is_pad_S.sum())
    return starts, ends


def _is_ranked(row: Row) -> bool:
    """Return whether ``row`` is a pair whose rewards are compared. No token of it is learned."""
    return "margin" in row.extra


def _targets(row: Row) -> np.ndarray:
    """Return the targets of ``row`` through which the loss has a gradient.

    KTO computes another record's answer without a gradient, and a reward has no target.
    """
    targets_S = row.targets_S
    if "label" in row.extra:
        targets_S = np.where(row.extra["label"] == 0, IGNORE_INDEX, targets_S)
    return np.full_like(targets_S, IGNORE_INDEX) if _is_ranked(row) else targets_S


def _sides(row: Row) -> list[str]:
    """Return a name for the answer in each document of ``row``.

    The names are empty if the row holds no preference (:class:`PairDataset`). A margin stands in
    the name of the chosen answer.
    """
    if _is_ranked(row) and (margin := float(row.extra["margin"][0])):
        return [f"chosen, by a margin of {margin:g}", "rejected"]
    if "label" in row.extra:
        labels = row.extra["label"][np.cumsum(row.lengths) - 1].tolist()
        wanted, other = ("chosen", "rejected") if -1 in labels and 1 in labels else _KINDS
        names = {1: wanted, -1: other, 0: _COMPARED}
        return [names[label] for label in labels]
    return ["chosen", "rejected"] if "reference" in row.extra else [""] * len(row.lengths)


def _coloured(data: Data, row: Row, sides: Sequence[str], has_colours: bool) -> Text:
    """Return the text of ``row`` with its special tokens, and a bar between documents.

    Control characters of the text are shown as escapes. Learned text is green, text to avoid is
    red, and the rest is dim. Where there are no colours, learned text and text to avoid stand in
    « ». A document that goes on in the next row ends with that row's first token, which is learned
    here. In a preference, the name of each answer stands before its document.
    """
    targets_S = _targets(row)
    learned_S = np.append(False, targets_S[:-1] != IGNORE_INDEX)
    text = Text()
    for side, start, end in zip(sides, *_documents(row), strict=True):
        colour = _COLOURS.get(side, "green")
        text.append(f"{side}:\n" if side else "", f"bold {colour}")
        borders = np.flatnonzero(np.diff(learned_S[start:end])) + 1 + start
        for a, b in zip([start, *borders], [*borders, end], strict=True):
            ids = row.tokens_S[a:b].tolist()
            said = visible(data.tokenizer.decode(ids, skip_special_tokens=False))
            if learned_S[a] and not has_colours:
                said = f"«{said}»"
            text.append(said, colour if learned_S[a] else "dim")
        if end == len(row.tokens_S) and targets_S[-1] != IGNORE_INDEX:
            # The first token of the next row, which this row learns.
            last = [int(targets_S[-1])]
            said = visible(data.tokenizer.decode(last, skip_special_tokens=False))
            text.append(said if has_colours else f"«{said}»", colour)
        text.append("\n│\n", "cyan")
    return text
