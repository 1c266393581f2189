"""The order in which the gate runs tests that may not all have time."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def conftest(request):
    return request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))


def test_packages_of_changed_files(conftest):
    paths = ["moetrain/rl/loop.py", "moetrain/data/chat.py", "tests/rl/envs/test_envs.py"]
    paths += ["README.md", "docs/rl.md", "tests/conftest.py"]
    assert conftest.packages_of(paths) == ["rl", "data"]


def test_changed_packages_and_all_files_take_turns(conftest):
    files = [f"tests/{package}/test_{i}.py" for package in ("data", "optim", "rl") for i in "abcd"]
    for changed in (["rl"], ["rl", "data"], ["rl", "data", "optim"]):
        last = set()
        for seed in map(str, range(60)):
            order = conftest.in_turns(files, changed, seed)
            assert sorted(order) == sorted(files)
            assert order == conftest.in_turns(files[::-1], changed, seed)
            assert order[0].split("/")[1] == "rl"
            # Four new files are among the first eight, whatever chance brings.
            assert sum("/rl/" in file for file in order[:8]) == 4
            last.add(order[-1])
            # At least half of the first six files are new: chance may add new ones.
            assert sum("/rl/" not in file for file in order[:6]) <= 3
        assert len(last) > 4  # chance reaches every package, although all have changed


def test_without_changes_chance_decides(conftest):
    files = [f"tests/data/test_{i}.py" for i in "abcdef"]
    orders = {tuple(conftest.in_turns(files, [], str(seed))) for seed in range(40)}
    assert len(orders) > 30
    assert {order[0] for order in orders} == {*files}
