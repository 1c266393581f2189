"""Lessons run, and their pages have the output of the lesson as it is now."""

import json
import re
import subprocess
import sys

import pytest

from tests.lib.pages import ROOT, load_script

LESSONS = sorted((ROOT / "lessons").glob("*.py"))
LARGEST = 60_000
"""Most bytes of a picture."""

every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)


@pytest.fixture(scope="module")
def script():
    return load_script("scripts/write_lessons.py")


def page_of(lesson):
    return (ROOT / "docs" / "lessons" / f"{lesson.stem}.md").read_text()


@every_lesson
def test_a_page_is_that_of_its_lesson(lesson, script):
    digest = script.digest_of(lesson.read_text())
    assert f"digest {digest} -->" in page_of(lesson), (
        f"{lesson.name} has changed: run python scripts/write_lessons.py {lesson.stem}"
    )


@every_lesson
def test_a_page_has_its_pictures_and_they_are_small(lesson):
    shown = set(re.findall(r"\]\(\.\./\.\./(pictures/lessons/[^)]+)\)", page_of(lesson)))
    kept = (ROOT / "pictures" / "lessons").glob(f"{lesson.stem}-*")
    assert shown == {path.relative_to(ROOT).as_posix() for path in kept}
    assert shown
    assert [path for path in shown if (ROOT / path).stat().st_size > LARGEST] == []


@every_lesson
def test_a_lesson_ends_with_what_to_try_and_is_listed(lesson):
    headings = re.findall(r"^# ## (.+)$", lesson.read_text(), re.M)
    assert headings[-1] == "What to try next"
    for listed in (ROOT / "docs" / "lessons" / "README.md", ROOT / "mkdocs.yml"):
        assert f"{lesson.stem}.md" in listed.read_text(), listed


@every_lesson
def test_a_lesson_becomes_a_notebook_with_the_same_code(lesson, script):
    notebook = script.notebook_of(script.cells_of(lesson.read_text()))
    cells = json.loads(json.dumps(notebook))["cells"]
    text = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code = re.sub(r"^#( .*)?$", "", lesson.read_text(), flags=re.M)
    assert "\n".join(text).split() == code.split()
    assert cells[0]["cell_type"] == "markdown"
    assert cells[0]["source"][0].startswith("# ")


@pytest.mark.tier("long")
@every_lesson
def test_a_lesson_runs(lesson, tmp_path):
    """A lesson asserts what its text claims."""
    done = subprocess.run(
        [sys.executable, lesson], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob(f"outputs/lessons/{lesson.stem}/*.svg"))
