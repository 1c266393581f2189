"""Says from the text of test files which of them may have tests with a mark.

Importing all test files takes longer than reading them, so a run of one mark skips the files
without it. Some files get the mark ``gpu`` with a parametrization from ``tests/lib``; the modules
that have these count as well. ``tests/conftest.py`` fails the collection of the whole suite if a
test has a mark that its file's text does not show.
"""

import re
from pathlib import Path

TEXTS = {
    "gpu": r"mark\.gpu\b|tests\.lib\.(kernel_cases|invariant_rows)\b",
    "long": r"mark\.tier\b",
    "wide": r"mark\.tier\b",
}
"""Marks, and the pattern in the text of a file with tests that have them."""


def may_have(mark: str, path: Path) -> bool:
    """Return True if the text of the test file ``path`` shows the mark, a key of `TEXTS`."""
    return re.search(TEXTS[mark], path.read_text(encoding="utf-8")) is not None
