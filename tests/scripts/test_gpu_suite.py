"""The GPU suite on a CPU: its files import without optional libraries, its counts are right."""

import ast
import json
import threading
from functools import cache
from pathlib import Path

import gpu_suite
import pytest

from tests.lib.marks import may_have

ROOT = Path(__file__).parents[2]
OPTIONAL = {
    "datasets",
    "deep_ep",
    "grimp",
    "httpx2",
    "importlinter",
    "llguidance",
    "openai",
    "starlette",
    "tinker",
    "uvicorn",
    "zstandard",
}
"""Libraries that a machine with GPUs may lack."""
GPU_FILES = [
    path
    for path in sorted(ROOT.glob("tests/**/test_*.py"))
    if path != Path(__file__) and may_have("gpu", path)
]


def file_of(module):
    """Return the file of a module of this repository; None for a library's."""
    place = Path(*module.split("."))
    for folder in (ROOT, ROOT / "scripts"):
        for path in (folder / place.with_suffix(".py"), folder / place / "__init__.py"):
            if path.exists():
                return path
    return None


def imported_at_once(statements):
    """Return modules imported at the top level, outside functions and handled failures."""
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from imported_at_once(node.body + node.orelse)


@cache
def imports_of(file):
    """Return the modules that a file imports at once, with the files of this repository's."""
    names = imported_at_once(ast.parse(file.read_text()).body)
    return {name: file_of(name) for name in names}


def libraries_of(path):
    """Return the libraries that importing a file imports, each with the chain of files."""
    found, waiting, seen = {}, [(path, ())], {path}
    while waiting:
        file, way = waiting.pop()
        way = (*way, file.relative_to(ROOT).as_posix())
        for module, inner in imports_of(file).items():
            if inner is None:
                found.setdefault(module.partition(".")[0], way)
            elif inner not in seen:
                seen.add(inner)
                waiting.append((inner, way))
    return found


@pytest.mark.parametrize("path", GPU_FILES, ids=lambda path: path.stem)
def test_gpu_file_imports_without_optional_libraries(path):
    found = libraries_of(path)
    assert "torch" in found
    assert not {name: way for name, way in found.items() if name in OPTIONAL}


def test_import_walk_finds_an_optional_library():
    assert "openai" in libraries_of(ROOT / "tests" / "serve" / "test_server.py")


def test_every_world_of_gpus_is_counted(request):
    """A test with ranks has a mark ``gpu`` for as many devices as ranks."""
    path = str(ROOT / "tests" / "conftest.py")
    conftest = request.config.pluginmanager.get_plugin(path)
    for item in request.session.items:
        if item.get_closest_marker("gpu") and hasattr(item, "callspec"):
            world = item.callspec.params.get("world", 1)
            assert conftest.gpus_needed(item) >= world, item.nodeid


@pytest.mark.parametrize("num_gpus", [1, 2, 8])
def test_phases_cover_every_gpu_test_once(num_gpus):
    kinds = [
        {"gpu": True, "several_gpus": several, "alone": alone}
        for several in (False, True)
        for alone in (False, True)
    ]
    for kind in kinds:
        times = sum(eval(phase.marks, dict(kind)) for phase in gpu_suite.phases(num_gpus))
        assert times == (num_gpus > 1 or not kind["several_gpus"] or kind["alone"]), kind


def test_phases_with_workers_run_at_once_and_then_those_that_need_the_devices_alone(
    tmp_path, monkeypatch
):
    both, ended = threading.Barrier(2, timeout=30), []

    def run_phase(phase, num_gpus, out, keyword, deadline):
        if phase.workers:
            both.wait()  # it would break if one waited for the other's end
        ended.append(phase.name)
        return {"name": phase.name, "seconds": 1, "exit_code": 0, "rows": [], "unfinished": []}

    monkeypatch.setattr(gpu_suite, "run_phase", run_phase)
    monkeypatch.setattr(gpu_suite, "number_of_gpus", lambda: 2)
    monkeypatch.setattr(gpu_suite, "describe_machine", dict)
    assert gpu_suite.run(tmp_path, 8, "", "", 12, False) == 0
    assert sorted(ended[:2]) == ["one GPU", "several GPUs"]
    assert ended[2:] == ["alone"]


def test_report_has_failures_whole_and_reasons_of_skips():
    rows = [
        {"test": "a", "outcome": "passed", "when": "call", "text": "", "seconds": 3.0},
        {"test": "b", "outcome": "failed", "when": "call", "text": "line\n" * 90, "seconds": 9.5},
        {"test": "c", "outcome": "skipped", "when": "setup", "text": "Skipped: no", "seconds": 0.0},
    ]
    done = [
        {"name": "one GPU", "seconds": 12, "exit_code": None, "rows": rows, "unfinished": ["d"]}
    ]
    text = gpu_suite.report_text({"commit": "abc"}, done)
    assert "| one GPU | 1 | 1 | 1 | 12 | time ran out |" in text
    assert "line\n" * 90 in text
    assert "- no: 1 (first: c)" in text
    assert "## Not finished (1)\n\n- d\n" in text
    assert text.index("9.5 s b") < text.index("3.0 s a")
    assert not gpu_suite.is_good(done[0])


def test_due_lists_what_gpu_tests_cover(tmp_path, monkeypatch, capsys):
    last = tmp_path / "last.json"
    phases = {"one GPU": {"passed": 5, "failed": 0}}
    last.write_text(
        json.dumps({"commit": "1" * 40, "cards": ["X"], "seconds": 9, "phases": phases})
    )
    monkeypatch.setattr(gpu_suite, "LAST_RUN", last)
    changed = [
        "README.md",
        "moetrain/cli/data.py",
        "moetrain/optim/adamw.py",
        "tests/system/test_gpu.py",
    ]
    monkeypatch.setattr(gpu_suite, "output_of", lambda *words: "\n".join(changed))
    assert gpu_suite.due() == 1
    printed = capsys.readouterr().out.split()
    assert "moetrain/optim/adamw.py" in printed
    assert "tests/system/test_gpu.py" in printed
    assert "moetrain/cli/data.py" not in printed
    changed[:] = ["README.md"]
    assert gpu_suite.due() == 0


@pytest.mark.parametrize(("exit_code", "is_recorded"), [(0, True), (1, False), (124, False)])
def test_only_a_whole_run_without_a_failure_is_recorded(
    monkeypatch, tmp_path, exit_code, is_recorded
):
    """A run that failed or ran out of time must not make its commit count as tested."""
    machine = {"commit": "0" * 40, "cards": ["a card"], "torch": "2"}
    monkeypatch.setattr(gpu_suite, "LAST_RUN", tmp_path / "last.json")
    monkeypatch.setattr(gpu_suite, "number_of_gpus", lambda: 1)
    monkeypatch.setattr(gpu_suite, "describe_machine", lambda: machine)
    monkeypatch.setattr(gpu_suite, "report_text", lambda *_: "")

    def run_phase(phase, *_):
        return {"name": phase.name, "rows": [], "seconds": 1, "exit_code": exit_code}

    monkeypatch.setattr(gpu_suite, "run_phase", run_phase)
    code = gpu_suite.run(tmp_path, 8.0, "", "", 12, record=True)
    assert code == (0 if is_recorded else 1)
    assert (tmp_path / "last.json").exists() == is_recorded
