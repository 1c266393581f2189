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
    paths = ["moetrain/rl/loop.py", "moetrain/data/chat.py", "tests/rl/envs/test_envs.py"]
    paths += ["README.md", "docs/rl.md", "tests/conftest.py"]
    assert conftest.packages_of(paths) == ["rl", "data"]


def test_changed_packages_come_first_and_files_stay_together(conftest):
    names = ["tests/optim/test_a.py::x", "tests/data/test_b.py::x", "tests/system/test_c.py::x"]
    names += ["tests/rl/test_d.py::x", "tests/data/test_e.py::x", "tests/data/test_b.py::y"]
    names += ["tests/optim/test_a.py::y"]
    orders = set()
    for seed in map(str, range(60)):
        found = sorted(
            map(item, names), key=lambda each: conftest.order_of(each, ["rl", "data"], seed)
        )
        files = [each.path.name for each in found]
        assert files[0] == "test_d.py"
        assert {*files[1:4]} == {"test_b.py", "test_e.py"}
        assert {*files[4:]} == {"test_a.py", "test_c.py"}
        assert [*dict.fromkeys(files)] == [x for i, x in enumerate(files) if x != files[i - 1]]
        orders.add(tuple(files))
    assert len(orders) == 4  # two files of data, two of other packages
