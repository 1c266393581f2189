"""The wheel holds everything that a run needs, and runs without the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder with the installed wheel, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    package = (path for path in (ROOT / "moetrain").rglob("*") if path.is_file())
    kinds = (".py", ".toml", ".jinja", ".typed")
    kept = [path for path in package if path.suffix in kinds or path.parent.name == "templates"]
    kept += [ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE")]
    files = [path.relative_to(ROOT).as_posix() for path in kept]
    for name in files:
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('../wheel'))"
    (folder / "wheel").mkdir()
    subprocess.run([sys.executable, "-c", build], cwd=folder / "source", check=True)
    (wheel,) = (folder / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("moetrain/")}
        assert names == {name for name in files if name.startswith("moetrain/")}
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed, *words):
    """Run Python in which only the wheel's moetrain can be imported."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=installed, env=environment, capture_output=True, text=True
    )


@pytest.mark.tier("long")
def test_the_wheel_trains_without_the_checkout(installed):
    where = run(installed, "-c", "import moetrain; print(moetrain.__file__)").stdout
    assert Path(where.strip()).is_relative_to(installed)
    steps = ["--train.steps", "1", "--train.eval_interval", "0", "--train.sample_tokens", "0"]
    done = run(installed, "-m", "moetrain.train", "debug", *steps, "--data.seq_len", "32")
    assert done.returncode == 0, done.stderr
    assert (installed / "outputs" / "debug" / "metrics.jsonl").stat().st_size


@pytest.mark.tier("long")
def test_the_wheel_has_the_command_and_its_licence(installed):
    (metadata,) = installed.glob("moetrain-*.dist-info")
    assert "moetrain = moetrain.cli.main:run_script" in (metadata / "entry_points.txt").read_text()
    assert list(metadata.rglob("LICENSE"))
    assert (installed / "moetrain" / "py.typed").exists()
    version = run(installed, "-m", "moetrain.cli.main", "version")
    assert version.stdout.startswith("moetrain "), version.stderr
