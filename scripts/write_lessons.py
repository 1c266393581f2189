"""Write the pages of docs/lessons/ by running the lessons: text, code, output and pictures.

    python scripts/write_lessons.py                         # all lessons
    python scripts/write_lessons.py moe_layer own_loss      # some
    python scripts/write_lessons.py --notebooks FOLDER      # as .ipynb files, which are not run

A lesson is a Python file in lessons/ whose comments ``# %%`` and ``# %% [markdown]`` begin cells of
code and of text. VS Code, PyCharm and jupytext open such a file as a notebook, and ``python`` runs
it. The cells run one after the other in an empty folder. What a cell prints goes below it, and so
do the pictures that it writes into the folder ``outputs/lessons``. Each page ends with the digest
of its lesson, by which tests/docs/test_lessons.py finds a page that is older than the lesson.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LESSONS, PAGES, PICTURES = ROOT / "lessons", ROOT / "docs" / "lessons", ROOT / "pictures/lessons"
_LONG = 20
"""Lines of an output that the page shows unfolded."""
BORDER = re.compile(r"^# %%(.*)\n", re.MULTILINE)


class Cell(NamedTuple):
    """A cell of a lesson."""

    is_text: bool
    """True: Markdown; False: Python."""
    source: str
    line: int
    """Lines of the lesson before ``source``."""


def cells_of(source: str) -> list[Cell]:
    """Return the cells of a lesson, without empty ones."""
    borders = [*BORDER.finditer(source)]
    ends = [*(border.start() for border in borders[1:]), len(source)]
    cells = []
    for border, end in zip(borders, ends, strict=True):
        is_text = border[1].strip() == "[markdown]"
        part = source[border.end() : end]
        line = source.count("\n", 0, border.end() + len(part) - len(part.lstrip()))
        part = re.sub(r"^# ?", "", part, flags=re.MULTILINE) if is_text else part
        cells.append(Cell(is_text, part.strip(), line))
    return [cell for cell in cells if cell.source]


def digest_of(source: str) -> str:
    """Return what the page of a lesson has of it, to tell whether the lesson has changed since."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def notebook_of(cells: list[Cell]) -> dict[str, Any]:
    """Return the cells as a notebook of format 4.5, without outputs."""
    made = []
    for number, cell in enumerate(cells):
        about: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}}
        about["source"] = cell.source.splitlines(keepends=True)
        if cell.is_text:
            made.append({"cell_type": "markdown", **about})
        else:
            made.append({"cell_type": "code", **about, "execution_count": None, "outputs": []})
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": made,
        "metadata": {"kernelspec": python},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def write_page(name: str) -> None:
    """Run a lesson in an empty folder, and write its page and its pictures."""
    file = LESSONS / f"{name}.py"
    source = file.read_text()
    begun, before = os.times(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            parts = _run(name, cells_of(source), file)
        finally:
            os.chdir(before)
    # CPU time of this process and of those that it started: a clock would count other programs.
    seconds = sum(os.times()[:4]) - sum(begun[:4])
    for picture in PICTURES.glob(f"{name}-*.svg"):
        if not any(f"/{picture.name})" in part for part in parts):
            picture.unlink()  # an earlier version of the lesson drew it
    title, *rest = parts
    about = (
        f"This page is [lessons/{name}.py](../../lessons/{name}.py) with its real output.\n"
        f"The lesson took {seconds:.0f} seconds of CPU time, without a GPU."
    )
    digest = f"<!-- Written by scripts/write_lessons.py; digest {digest_of(source)} -->"
    PAGES.mkdir(exist_ok=True)
    page = "\n\n".join([title, about, *rest, digest]) + "\n"
    (PAGES / f"{name}.md").write_text(page)
    print(f"{name}: {seconds:.0f} s of CPU time")


def _run(name: str, cells: list[Cell], file: Path) -> list[str]:
    """Return the parts of the page: texts, code, outputs and pictures."""
    space = {"__name__": "__main__"}
    parts, shown = [], set()
    for cell in cells:
        if cell.is_text:
            parts.append(cell.source)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Lines before it, so that errors name the lines of the lesson.
            exec(compile("\n" * cell.line + cell.source, str(file), "exec"), space)
        parts.append(f"```python\n{cell.source}\n```")
        if text := "\n".join(line.rstrip() for line in printed.getvalue().splitlines()).strip("\n"):
            parts.append(_shown(text))
        for picture in sorted(set(Path("outputs/lessons").rglob("*.svg")) - shown):
            shown.add(picture)
            PICTURES.mkdir(exist_ok=True)
            target = f"{name}-{picture.name}"
            shutil.copyfile(picture, PICTURES / target)
            alt = picture.stem.replace("-", " ")
            parts.append(f"![{alt}](../../pictures/lessons/{target})")
    return parts


def _shown(text: str) -> str:
    """Return an output for the page; a long one, such as a run's log, is folded."""
    lines = text.count("\n") + 1
    if lines <= _LONG:
        return f"```text\n{text}\n```"
    summary = f"<summary>{lines} lines of output</summary>"
    return f"<details>{summary}<pre>\n{html.escape(text, quote=False)}\n</pre></details>"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the pages of the lessons.")
    names = sorted(file.stem for file in LESSONS.glob("*.py"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--notebooks", type=Path, metavar="FOLDER", help="write .ipynb files there")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no lesson is named {', '.join(sorted(unknown))}")
    chosen = options.names or names
    if options.notebooks:
        options.notebooks.mkdir(parents=True, exist_ok=True)
        for name in chosen:
            notebook = notebook_of(cells_of((LESSONS / f"{name}.py").read_text()))
            text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
            (options.notebooks / f"{name}.ipynb").write_text(text)
        return 0
    if len(chosen) > 1:  # each in a process of its own
        for name in chosen:
            subprocess.run([sys.executable, __file__, name], check=True)
        return 0
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # pictures without a date
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "moetrain"  # equal pictures are equal files
    write_page(chosen[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
