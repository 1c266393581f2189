"""The shape of the package: which way imports run, and how long files may grow."""

import logging.config  # noqa: F401 - patched below
from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).parent.parent


def test_imports_run_one_way(tmp_path, monkeypatch):
    # Its set-up of logging disables every logger there is; tests after this one read ours.
    monkeypatch.setattr("logging.config.dictConfig", lambda config: None)
    assert lint_imports(str(ROOT / "pyproject.toml"), cache_dir=str(tmp_path)) == 0


def test_a_model_never_asks_how_it_is_spread():
    for folder in ("models", "kernels"):
        for path in (ROOT / "moetrain" / folder).rglob("*.py"):
            text = path.read_text()
            assert "torch.distributed" not in text, path
            assert "get_rank" not in text, path


def test_no_file_outgrows_a_reader():
    lengths = {p: len(p.read_text().splitlines()) for p in (ROOT / "moetrain").rglob("*.py")}
    assert lengths
    assert {str(p): n for p, n in lengths.items() if n > 500} == {}


def test_the_environment_is_read_in_config_alone():
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "moetrain").rglob("*.py")
        if any(word in path.read_text() for word in ("os.environ[", "environ.get", "getenv"))
    }
    assert readers <= {"moetrain/config.py"}
