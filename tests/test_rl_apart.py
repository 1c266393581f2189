"""Ranks that generate beside those that train: bits of taking turns, deaths of generators."""

import json
import os
import socket

import pytest
import torch
from checkpoints import tensors_of
from distributed import fork_server
from test_rl_run import EVEN, config_of, lines_of, words_of
from toy_environments import YES_NO_MAYBE

from moetrain.cli.train import run_rl
from moetrain.config import ConfigError
from moetrain.parallel.world import plan_world
from moetrain.rl import apart
from moetrain.train.metrics import read_metrics
from moetrain.train.setup import resolve_run

OWN = ("generators_lost", "trajectories_restarted")

MORTAL = """
import os, signal
from pathlib import Path
from moetrain.rl.envs import Problem, SolvedEnvironment

class Mortal(SolvedEnvironment):
    scored = 0

    def __init__(self, prompts, how="SIGKILL", often=0, at=20):
        super().__init__(prompts)
        self.how, self.often, self.at = getattr(signal, how), often, at

    def problem(self, task):
        return Problem(f"{task} even ", "bdfh")

    def score(self, problem, answer):
        self.scored += 1
        marks = Path(__file__).parent
        died = len(list(marks.glob("died-*")))
        if self.scored == self.at and died < self.often:
            (marks / f"died-{died}-{os.getpid()}").touch()
            os.kill(os.getpid(), self.how)
        return sum(ord(c) % 2 == 0 for c in answer) / 6
"""


def be_rank(rank, world, port, words, silence):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    apart._SILENCE_SECONDS, apart._IN_VAIN = silence, 3
    os._exit(run_rl(words))


def launched(world, words, *, silence=8.0, timeout=60):
    """Exit codes of the ranks of a run as a launcher would start them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [
        fork_server().Process(target=be_rank, args=(rank, world, port, words, silence))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(timeout if process is ranks[0] else 30)
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def rows_of(folder):
    return [{k: v for k, v in row.items() if k not in OWN} for row in lines_of(folder)]


def weights_of(folder):
    return tensors_of(sorted((folder / "checkpoints").iterdir())[-1])["model"]


def assert_same_bits(one, other):
    assert rows_of(one) == rows_of(other)
    mine, theirs = weights_of(one), weights_of(other)
    assert all(torch.equal(theirs[name], weight) for name, weight in mine.items())


APART = {"rl.placement": "apart"}
WORDS = {
    "model.moe_intermediate_size": 32,
    "train.micro_batch_size": 8,
    "train.global_batch_size": 64,
    "train.eval_interval": 0,
    "optim.lr": 3e-3,
    "optim.schedule": "constant",
    "rl.env": YES_NO_MAYBE,
    "rl.supervised_steps": 40,
    "rl.supervised_lr": 1e-2,
    "rl.group_size": 8,
    "rl.eval_tasks": 0,
}


@pytest.fixture
def mortal(tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "mortal.py").write_text(MORTAL)
    return {"rl.env": f"{tmp_path}/env/mortal.py:Mortal"}


def test_apart_and_together_have_the_same_bits(mortal, tmp_path):
    """One learner and a generator; two and one. A sequence alone has the bits of any batch."""
    assert launched(1, words_of(tmp_path / "one", **mortal)) == [0]
    assert launched(2, words_of(tmp_path / "1+1", **mortal, **APART)) == [0, 0]
    assert_same_bits(tmp_path / "one", tmp_path / "1+1")
    two = mortal | {"train.micro_batch_size": 2, "rl.max_sequences": 1, "checkpoint.interval": 1}
    assert launched(2, words_of(tmp_path / "two", **two)) == [0, 0]
    assert launched(3, words_of(tmp_path / "2+1", **two, **APART)) == [0, 0, 0]
    assert_same_bits(tmp_path / "two", tmp_path / "2+1")


def test_a_killed_generator_changes_no_bit(mortal, tmp_path):
    alone = mortal | APART | {"rl.max_sequences": 1, "train.steps": 8}
    assert launched(2, words_of(tmp_path / "whole", **alone)) == [0, 0]
    alone["rl.env_args"] = '{"often": 3}'
    alone["rl.generators"] = 2
    assert launched(3, words_of(tmp_path / "killed", **alone)) == [0, 0, 0]
    assert len(list((tmp_path / "env").glob("died-*"))) == 3
    assert_same_bits(tmp_path / "whole", tmp_path / "killed")
    last = [row for row in read_metrics(tmp_path / "killed" / "metrics.jsonl") if "reward" in row]
    assert last[-1]["generators_lost"] == 3
    assert last[-1]["trajectories_restarted"] >= 3


def test_a_stopped_generator_is_replaced(mortal, tmp_path):
    """It is the only one, in the middle of trajectories that run ahead of the weights."""
    values = mortal | APART | {"rl.env_args": '{"often": 1, "how": "SIGSTOP"}'}
    values |= {"rl.max_staleness": 1, "train.steps": 6, "checkpoint.interval": 1}
    assert launched(2, words_of(tmp_path / "out", **values), silence=3.0) == [0, 0]
    rows = [row for row in read_metrics(tmp_path / "out" / "metrics.jsonl") if "reward" in row]
    assert [row["prompts"] for row in rows] == [4] * 4
    assert rows[-1]["generators_lost"] == 1
    assert rows[-1]["staleness_max"] <= 1
    assert {"mismatch/age_0", "mismatch/age_1"} <= set().union(*rows)
    # What was read with the weights before is read again: a cache of theirs would be far more off.
    assert all(0 <= row.get("mismatch/age_0", 0) < 1e-9 for row in rows)


def test_a_task_that_kills_every_generator_ends_the_run(mortal, tmp_path):
    values = mortal | APART | {"rl.env_args": '{"often": 99, "at": 1}', "rl.eval_tasks": 0}
    values["train.eval_interval"] = 0
    assert launched(2, words_of(tmp_path / "out", **values))[0] == 1
    assert len(list((tmp_path / "env").glob("died-*"))) == 3


def test_trajectories_under_way_are_resumed(mortal, tmp_path):
    """Saved by a run apart, they go on in one that takes turns, and in another apart."""
    values = mortal | {"rl.max_staleness": 2, "train.steps": 4, "checkpoint.interval": 1}
    values |= {"rl.supervised_steps": 1, "rl.max_sequences": 1, "train.eval_interval": 0}
    values |= {"rl.eval_tasks": 0}
    assert launched(2, words_of(tmp_path / "out", **values, **APART)) == [0, 0]
    state = sorted((tmp_path / "out" / "checkpoints").iterdir())[-1] / "state.json"
    under_way = json.loads(state.read_text())["under_way"]
    assert len(under_way) == 2 * 16
    assert any(one["answers"] and not one["is_over"] for one in under_way)
    values["train.steps"] = 5
    assert launched(1, words_of(tmp_path / "out", **values)) == [0]
    values["train.steps"] = 6
    assert launched(2, words_of(tmp_path / "out", **values, **APART)) == [0, 0]
    rows = [row for row in lines_of(tmp_path / "out") if "reward" in row]
    assert [row["step"] for row in rows] == [2, 3, 4, 5, 6]
    assert all(row["prompts"] == 4 and row["staleness_max"] <= 2 for row in rows)


def test_what_cannot_be_apart_is_refused(tmp_path):
    (tmp_path / "even.py").write_text(EVEN)
    values = {"rl.env": f"{tmp_path}/even.py:Even", **APART}
    config, arch = resolve_run(config_of(tmp_path / "out", **values))
    assert plan_world(config, arch, 3).world_size == 2
    with pytest.raises(ConfigError, match=r"rl.generators: 1 of 1 processes"):
        plan_world(config, arch, 1)
    for name, value in {"rl.sleep": "all", "rl.offload": "true"}.items():
        with pytest.raises(ConfigError, match=name):
            config_of(tmp_path / "out", **values, **{name: value})
    with pytest.raises(ConfigError, match=r"rl.generators"):
        config_of(tmp_path / "out", **{"rl.generators": 2})


def test_stale_trajectories_teach_as_much(tmp_path):
    """The best word of three, with trajectories that begin up to four updates early."""
    ends = {}
    for staleness in (0, 1, 4):
        folder = tmp_path / str(staleness)
        values = WORDS | APART | {"rl.max_staleness": staleness, "train.steps": 80}
        assert launched(2, words_of(folder, **values)) == [0, 0]
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if "reward" in row]
        assert max(row["staleness_max"] for row in rows) <= staleness
        ages = {name for row in rows for name in row if name.startswith("mismatch/age_")}
        assert ages == {f"mismatch/age_{age}" for age in range(staleness + 1)} or not staleness
        ends[staleness] = sum(row["reward"] for row in rows[-5:]) / 5
    assert min(ends.values()) > 0.9, ends
