"""Helpers of tests/docs/test_docs.py that other tests use too."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page):
    """Yield language, file name (or none) and text of every fenced block."""
    found = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [tuple(block) for block in found]


def load_script(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    monkey = pytest.MonkeyPatch()
    monkey.setitem(sys.modules, spec.name, module)
    try:
        spec.loader.exec_module(module)
    finally:
        monkey.undo()
    return module
