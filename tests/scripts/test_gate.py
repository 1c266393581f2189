"""The order in which the gate runs tests that may not all have time."""

from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def conftest(request):
    return request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))


def item(name):
    return SimpleNamespace(nodeid=name, path=Path(name.partition("::")[0]))


def test_packages_of_changed_files(conftest):
    paths = ["moetrain/data/chat.py", "tests/rl/envs/test_envs.py", "README.md", "docs/rl.md"]
    assert conftest.packages_of([*paths, "tests/conftest.py"]) == {"data", "rl"}


def test_changed_packages_and_whole_runs_come_first_and_files_stay_together(conftest):
    names = ["tests/optim/test_a.py::x", "tests/data/test_b.py::x", "tests/system/test_c.py::x"]
    names += ["tests/data/test_d.py::x", "tests/data/test_b.py::y", "tests/optim/test_a.py::y"]
    orders = set()
    for seed in map(str, range(60)):
        found = sorted(map(item, names), key=lambda each: conftest.order_of(each, {"data"}, seed))
        files = [each.path.name for each in found]
        assert files[-2:] == ["test_a.py", "test_a.py"]
        assert (
            abs(files.index("test_b.py") - (len(files) - 1 - files[::-1].index("test_b.py"))) == 1
        )
        orders.add(tuple(files))
    assert len(orders) == 6  # of the three files that come first
