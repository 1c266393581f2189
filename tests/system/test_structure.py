"""Rules of the package's structure: imports run one way, models know no ranks.

Nothing here counts lines, files, names or widths: a file is as long as its content.
"""

import ast
import importlib
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]


def test_imports_run_one_way(tmp_path):
    # It runs in its own process, because the library takes over the logging.
    call = (
        "import sys; from importlinter.cli import lint_imports; "
        "sys.exit(lint_imports(cache_dir=sys.argv[1]))"
    )
    words = [sys.executable, "-c", call, str(tmp_path)]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_no_module_needs_itself():
    # Imports for typing alone and inside functions count.
    graph = grimp.build_graph("moetrain", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert imports["moetrain.train.loop"]
    TopologicalSorter(imports).prepare()  # CycleError names the modules


def test_fsdp_and_its_buckets_import_no_storage_and_no_transport():
    graph = grimp.build_graph("moetrain", cache_dir=None)
    for name in ("fsdp", "bucket"):
        found = graph.find_modules_directly_imported_by(f"moetrain.parallel.fsdp.{name}")
        features = {module for module in found if ".storage." in module or ".transport." in module}
        assert {module.rpartition(".")[2] for module in features} == {"protocol"}


def test_examples_and_scripts_import_what_there_is():
    # Some need libraries that few machines have, so that no test starts them.
    for path in (*(ROOT / "examples").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moetrain"):
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    is_there = hasattr(module, name) or hasattr(module, "__path__")
                    assert is_there, f"{path} imports {name} from {node.module}"
                    if not hasattr(module, name):
                        importlib.import_module(f"{node.module}.{name}")


def test_no_test_imports_a_test():
    pattern = re.compile(r"^\s*(?:from|import) (?:tests\.)?(?:\w+\.)*test_\w+", re.M)
    files = [*(ROOT / "tests").rglob("*.py")]
    assert len(files) > 200
    found = {str(file.relative_to(ROOT)): pattern.findall(file.read_text()) for file in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_model_never_asks_how_it_is_spread():
    for folder in ("models", "kernels", "losses", "runtime"):
        for path in (ROOT / "moetrain" / folder).rglob("*.py"):
            text = path.read_text()
            assert "torch.distributed" not in text, path
            assert "get_rank" not in text, path


def test_the_environment_is_read_in_config_alone():
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "moetrain").rglob("*.py")
        if any(word in path.read_text() for word in ("os.environ[", "environ.get", "getenv"))
    }
    assert readers <= {"moetrain/config/environment.py"}


def test_no_backward_reads_saved_tensors_twice():
    """Under recomputation a saved tensor can be unpacked only once; a second time is an error."""
    for path in (ROOT / "moetrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                reads = [x for x in ast.walk(node) if getattr(x, "attr", "") == "saved_tensors"]
                assert len(reads) <= 1, f"{path.name}: {node.name} reads saved_tensors twice"


def test_no_pattern_needs_a_later_python():
    """Possessive quantifiers and atomic groups match wrongly in Python 3.11.0 to 3.11.4.

    Debian 12 has 3.11.2, where cells of CSV with a doubled quote were read as without an end.
    """
    found = []
    for path in sorted(Path("moetrain").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            if is_call and ast.unparse(call.func.value) == "re" and call.args:
                texts = [x for x in ast.walk(call.args[0]) if isinstance(x, ast.Constant)]
                late = any(isinstance(x.value, str | bytes) and _is_late(x.value) for x in texts)
                found += [f"{path}:{call.lineno}"] * late
    assert not found


def _is_late(pattern: str | bytes) -> bool:
    """Return whether a text is a pattern with a quantifier or a group that came with 3.11."""
    try:
        parsed = re._parser.parse(pattern)  # pyright: ignore[reportAttributeAccessIssue]
    except (re.error, OverflowError):
        return False
    return re.search("POSSESSIVE_REPEAT|ATOMIC_GROUP", repr(parsed)) is not None
