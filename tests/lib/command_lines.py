"""Command lines of tests, and what a bad one gets."""

import re
from pathlib import Path

from moetrain.cli.train import main


def settled(words):
    """``words`` with each setting as it is given last, for a command line may give it only once."""
    last = {word.partition("=")[0]: i for i, word in enumerate(words)}
    return [word for i, word in enumerate(words) if last[word.partition("=")[0]] == i]


def assert_refused(words: list[str], field: str, says: str, folder: Path, capsys) -> None:
    """One line on standard error that begins and reads so, exit code 2, and no file was made."""
    before = sorted(folder.rglob("*"))
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1, error
    assert error.startswith(f"error: {field}: "), error
    assert re.search(says, error), error
    assert len(error) < 700, error
    assert sorted(folder.rglob("*")) == before
