"""Useless environments: the run ends, says why, and keeps its checkpoint."""

import asyncio
import json
import threading
import time
from collections import deque

import pytest

from moetrain.cli.train import run_rl as run
from moetrain.config.sources import RunFailed
from moetrain.rl.collect import LARGEST_REWARD, reward_problem
from moetrain.rl.envs import Demonstration
from moetrain.rl.loop import HOPELESS_STEPS, failed_alike
from moetrain.rl.trajectories import Trajectory
from tests.lib.collectors import collector_of
from tests.lib.rl_runs import fitted, lines_of, words_of

GONE = """
from moetrain.rl.envs.shipped import Sort

class Gone(Sort):
    left = 16 * 2 + 5  # attempts of two steps, and some of the third

    def score(self, problem, answer):
        Gone.left -= 1
        if Gone.left < 0:
            raise ConnectionError("the sandbox\\nis gone")
        return super().score(problem, answer)
"""


@pytest.mark.tier("long")
def test_a_run_whose_environment_is_gone_ends(tmp_path, capsys):
    (tmp_path / "gone.py").write_text(GONE)
    values = {"rl.env": f"{tmp_path}/gone.py:Gone", "rl.supervised_steps": 0, "train.steps": 20}
    out = tmp_path / "out"
    assert run(words_of(out, **values, **{"train.eval_interval": 0})) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"failed: rl.env '{tmp_path}/gone.py:Gone': every trajectory of 3 step")
    assert "failed (raised), and nothing was learned; one of task " in error
    assert ": ConnectionError: the sandbox is gone; saved to " in error
    rows = [row for row in lines_of(out) if "reward" in row]
    faults = [row.get("left_out/raised", 0) for row in rows]
    assert len(rows) == 2 + 1 + HOPELESS_STEPS - 1  # the last of them was not logged
    assert faults[:2] == [0, 0]
    assert 0 < faults[2] < 16  # these cost only themselves
    assert faults[3:] == [16] * 2
    (saved,) = (out / "checkpoints").iterdir()
    assert json.loads((saved / "state.json").read_text())["step"] == 6
    assert run(words_of(out, **values, **{"train.eval_interval": 0})) == 1  # for a while
    assert [row["step"] for row in lines_of(out) if "reward" in row] == [
        *range(1, 6),
        *range(7, 12),
    ]


LARGE = """
from moetrain.rl.envs.shipped import Sort

class Large(Sort):
    def score(self, problem, answer):
        size = sum(map(ord, answer)) % 8
        return 1e39 if size == 0 else (-1) ** size * 1e12
"""


def test_no_reward_that_is_taken_makes_a_step_that_is_skipped(tmp_path):
    (tmp_path / "large.py").write_text(LARGE)
    values = {"rl.env": f"{tmp_path}/large.py:Large", "rl.supervised_steps": 0}
    fitted(tmp_path / "out", **values, **{"train.eval_interval": 0, "rl.eval_tasks": 0})
    rows = [row for row in lines_of(tmp_path / "out") if "reward" in row]
    assert len(rows) == 4
    assert [row["skipped_steps"] for row in rows] == [0] * 4
    assert all(0 < row["grad_norm"] < float("inf") for row in rows)
    assert sum(row.get("left_out/nonsense", 0) for row in rows) > 0  # those with a reward of 1e39


def test_rewards_of_all_turns_are_bounded_together():
    assert reward_problem(-LARGEST_REWARD) is None
    assert reward_problem(-1.0, LARGEST_REWARD) is None
    assert "at most 1e+12" in reward_problem(1.0, LARGEST_REWARD)


def ended(*faults):
    return [Trajectory(0, i, 7, 0, 1.0, fault=f, detail=f"{f}!") for i, f in enumerate(faults)]


def test_hopeless_is_what_fails_alike_step_after_step():
    failed = deque(maxlen=HOPELESS_STEPS)
    steps = [("raised", "raised"), ("raised", "raised"), ("raised", None), ("timeout",) * 2]
    steps += [("raised", "timeout"), ("raised",) * 2, ("raised",) * 2, ("timeout",) * 2]
    steps = [(None, None)] * HOPELESS_STEPS + steps + [("timeout",)] * (HOPELESS_STEPS - 2)
    for step in steps:
        failed.append(failed_alike(ended(*step)))
        assert failed_alike(failed) is None or len(failed) < HOPELESS_STEPS
    failed.append(failed_alike(ended("timeout", "timeout")))
    assert len(failed) == HOPELESS_STEPS
    assert failed_alike(failed).detail == "timeout!"


async def later():
    return Demonstration((1, 2), (False, True))


SHOWN = {
    "raises": lambda: 1 / 0,
    "hangs": lambda: time.sleep(3600),
    "hangs later": lambda: asyncio.sleep(3600),
    "nothing": lambda: None,
    "no mask": lambda: Demonstration((1, 2), None),
    "a mask of another length": lambda: Demonstration((1, 2, 3), (False, True)),
    "tokens beyond the vocabulary": lambda: Demonstration((1, 2, 300), (False, True, True)),
    "tokens that are none": lambda: Demonstration((1, 2.0), (False, True)),
    "one token": lambda: Demonstration((1,), (False,)),
    "an action that nothing predicts": lambda: Demonstration((1, 2), (True, True)),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_a_demonstration_that_is_none_is_one_line(kind):
    class Shows:
        def demonstrate(self, task):
            return SHOWN[kind]()

    with pytest.raises(
        RunFailed, match=r"^rl\.env: its demonstration of task 4 (failed \(|is not valid: )"
    ):
        collector_of(Shows(), step_timeout=0.2).demonstrations([4])


def test_a_demonstration_is_passed_on():
    class Shows:
        def demonstrate(self, task):
            return later() if task == 5 else Demonstration((1, 2, task), (False, True, 1))

    collector = collector_of(Shows(), step_timeout=5)
    found = collector.demonstrations([4, 5, 6])
    assert found[1] == Demonstration((1, 2), (False, True))
    assert [shown.tokens for shown in found[::2]] == [(1, 2, 4), (1, 2, 6)]
    assert found[0].mask == (False, True, True)
    before = threading.active_count()
    for _ in range(9):
        assert collector.demonstrations([4, 5, 6]) == found
    assert threading.active_count() - before < 9  # no step leaves a thread behind
