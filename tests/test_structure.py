"""The shape of the package: which way imports run, and how long files may grow."""

import subprocess
import sys
import traceback
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
from command_lines import settled
from house import measure

from moetrain.cli.train import main
from moetrain.kernels.experts import mlp

ROOT = Path(__file__).parent.parent


def test_imports_run_one_way(tmp_path):
    # In a process of its own: the library takes over the process's logging.
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
    assert imports["moetrain.train.trainer"]
    TopologicalSorter(imports).prepare()  # CycleError names the modules


def test_a_model_never_asks_how_it_is_spread():
    for folder in ("models", "kernels"):
        for path in (ROOT / "moetrain" / folder).rglob("*.py"):
            text = path.read_text()
            assert "torch.distributed" not in text, path
            assert "get_rank" not in text, path


def test_the_package_stays_small():
    """The figures of ``scripts/house.py``: kernels and families may grow, the rest may not."""
    figures = measure(ROOT / "moetrain")
    assert figures.lines_beside <= 31_000
    assert figures.modules_beside <= 150
    assert figures.names_per_thousand_lines <= 15
    assert figures.longest_file[0] <= 500
    assert len(figures.entries) <= 14
    assert len(figures.chain) <= 25
    assert figures.shared_class_names == {}
    assert figures.median_line <= 47  # no packing of lines


def test_the_environment_is_read_in_config_alone():
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "moetrain").rglob("*.py")
        if any(word in path.read_text() for word in ("os.environ[", "environ.get", "getenv"))
    }
    assert readers <= {"moetrain/config/environment.py"}


def test_six_files_from_the_command_to_the_experts_product(tiny_words, monkeypatch, capsys):
    """The command, the product and four files between them; this prints them."""
    product, files = mlp.grouped_mm, []

    def seen(*tensors):
        for frame in traceback.extract_stack():
            path = Path(frame.filename)
            if path.is_relative_to(ROOT / "moetrain") and path not in files:
                files.append(path)
        return product(*tensors)

    monkeypatch.setattr(mlp, "grouped_mm", seen)
    words = ["train.steps=1", "train.eval_interval=0", "train.sample_tokens=0"]
    assert main(settled([*tiny_words, "compile.enabled=no", *words])) == 0
    names = [path.relative_to(ROOT / "moetrain").with_suffix("").as_posix() for path in files]
    with capsys.disabled():
        print("", *names, sep="\n  ")
    assert (names[0], names[-1]) == ("cli/train", "kernels/experts/mlp")
    assert len(names) <= 6, names
