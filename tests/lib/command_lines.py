"""Command lines of tests, and checks of refused ones."""

import re
from pathlib import Path

from moetrain.cli.train import main


def settled(words):
    """Keep the last value of each setting: a command line may give a setting only once."""
    last = {word.partition("=")[0]: i for i, word in enumerate(words)}
    return [word for i, word in enumerate(words) if last[word.partition("=")[0]] == i]


def assert_refused(words: list[str], field: str, says: str, folder: Path, capsys) -> None:
    """Assert that a command prints one such line on stderr, exits with 2 and writes no file."""
    before = sorted(folder.rglob("*"))
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1, error
    assert error.startswith(f"error: {field}: "), error
    assert re.search(says, error), error
    assert len(error) < 700, error
    assert sorted(folder.rglob("*")) == before
