"""Separate generator and learner ranks: bits of shared ranks, and deaths of generators."""

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from moetrain.config import ConfigError
from moetrain.config.sources import RunFailed
from moetrain.generate.weights import blank
from moetrain.parallel.world import plan_world
from moetrain.rl import apart
from moetrain.rl.trajectories import Trajectory
from moetrain.train.estimates.memory import RankSizes
from moetrain.train.metrics import read_metrics
from moetrain.train.session import resolve_run
from tests.lib.apart_runs import assert_same_bits, launched
from tests.lib.rl_runs import EVEN, config_of, lines_of, words_of
from tests.lib.toy_environments import BEST_WORD

MORTAL = """
import os, signal, time
from pathlib import Path
from moetrain.rl.envs import Problem, SolvedEnvironment

class Mortal(SolvedEnvironment):
    scored = 0

    def __init__(self, prompts, how="SIGKILL", often=0, at=20):
        super().__init__(prompts)
        self.how, self.often, self.at = how, often, at

    def problem(self, task):
        return Problem(f"{task} even ", "bdfh")

    def score(self, problem, answer):
        self.scored += 1
        marks = Path(__file__).parent
        died = len(list(marks.glob("died-*")))
        if self.scored == self.at and died < self.often:
            (marks / f"died-{died}-{os.getpid()}").touch()
            if self.how == "sleep":
                time.sleep(50)
            os.kill(os.getpid(), getattr(signal, self.how))
        return sum(ord(c) % 2 == 0 for c in answer) / 6
"""


APART = {"rl.placement": "apart"}
QUIET = {"train.eval_interval": 0, "rl.eval_tasks": 0}


@pytest.fixture
def mortal(tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "mortal.py").write_text(MORTAL)
    return {"rl.env": f"{tmp_path}/env/mortal.py:Mortal"}


@pytest.mark.tier("long")
def test_apart_and_together_have_the_same_bits(mortal, tmp_path):
    """The layouts are one learner and one generator; two and one. A sequence's bits do not depend
    on its batch."""
    assert launched(1, words_of(tmp_path / "one", **mortal)) == [0]
    assert launched(2, words_of(tmp_path / "1+1", **mortal, **APART)) == [0, 0]
    assert_same_bits(tmp_path / "one", tmp_path / "1+1")
    two = mortal | {"train.micro_batch_size": 2, "rl.max_sequences": 1, "checkpoint.interval": 1}
    assert launched(2, words_of(tmp_path / "two", **two)) == [0, 0]
    assert launched(3, words_of(tmp_path / "2+1", **two, **APART)) == [0, 0, 0]
    assert_same_bits(tmp_path / "two", tmp_path / "2+1")


@pytest.mark.tier("wide")
def test_a_killed_generator_changes_no_bit(mortal, tmp_path):
    alone = mortal | APART | {"rl.max_sequences": 1, "train.steps": 6}
    assert launched(2, words_of(tmp_path / "whole", **alone)) == [0, 0]
    alone["rl.env_args"] = '{"often": 2}'
    alone["rl.generators"] = 2
    assert launched(3, words_of(tmp_path / "killed", **alone)) == [0, 0, 0]
    assert len(list((tmp_path / "env").glob("died-*"))) == 2
    assert_same_bits(tmp_path / "whole", tmp_path / "killed")
    last = [row for row in read_metrics(tmp_path / "killed" / "metrics.jsonl") if "reward" in row]
    assert last[-1]["generators_lost"] == 2
    assert last[-1]["trajectories_restarted"] >= 2


@pytest.mark.tier("long")
def test_a_stopped_generator_is_replaced(mortal, tmp_path):
    """It is the only generator, in the middle of trajectories that run ahead of the weights."""
    values = mortal | APART | {"rl.env_args": '{"often": 1, "how": "SIGSTOP"}'}
    values |= {"rl.max_staleness": 1, "train.steps": 6, "checkpoint.interval": 1}
    assert launched(2, words_of(tmp_path / "out", **values), silence=3.0) == [0, 0]
    rows = [row for row in read_metrics(tmp_path / "out" / "metrics.jsonl") if "reward" in row]
    assert [row["prompts"] for row in rows] == [4] * 4
    assert rows[-1]["generators_lost"] == 1
    assert rows[-1]["staleness_max"] <= 1
    assert {"mismatch/age_0", "mismatch/age_1"} <= set().union(*rows)
    # Tokens of the old weights are prefilled again: the difference would be larger with a stale
    # cache.
    assert all(0 <= row.get("mismatch/age_0", 0) < 1e-9 for row in rows)


@pytest.mark.tier("long")
@pytest.mark.parametrize("keeps", [True, False])
def test_a_kept_cache_is_read_again_after_deaths_alone(mortal, tmp_path, keeps):
    """All weight versions are corrected. Without ``rl.keep_cache`` updates cost reads too."""
    values = mortal | APART | {"rl.env_args": '{"often": 1}', "rl.max_sequences": 4} | QUIET
    values |= {"rl.max_staleness": 2, "train.steps": 6, "rl.keep_cache": keeps}
    values |= {"rl.supervised_steps": 0, "rl.ratio": "proximal"}
    assert launched(2, words_of(tmp_path / "out", **values)) == [0, 0]
    rows = [row for row in read_metrics(tmp_path / "out" / "metrics.jsonl") if "reward" in row]
    assert [row["prompts"] for row in rows] == [4] * 6
    assert rows[-1]["generators_lost"] == 1
    assert all(row["staleness_max"] <= 2 for row in rows)
    assert rows[-1]["trajectories_restarted"] > 0
    # Within one generator; the next one begins a dead one's trajectories without its cache.
    again = [row["generator/read_again"] for row in rows if row.get("generator/steps")]
    assert len(again) > 2
    assert (sum(again) == 0) == keeps
    assert all("weight" in row for row in rows)  # scored and corrected for all weight versions
    assert max(row["generator/places"] for row in rows) > 2


@pytest.mark.tier("wide")
def test_a_task_that_kills_every_generator_ends_the_run(mortal, tmp_path):
    values = mortal | APART | {"rl.env_args": '{"often": 99, "at": 1}', "rl.eval_tasks": 0}
    values["train.eval_interval"] = 0
    assert launched(2, words_of(tmp_path / "out", **values))[0] == 1
    assert len(list((tmp_path / "env").glob("died-*"))) == 3


@pytest.mark.tier("long")
def test_generators_end_with_the_main_learner(mortal, tmp_path):
    """Even if the environment blocks one, they end within seconds, and no process is left."""
    values = mortal | APART | {"rl.env_args": '{"often": 1, "how": "sleep", "at": 3}'}
    values |= {"rl.step_timeout": 60}
    died = tmp_path / "env"
    words = words_of(tmp_path / "out", **values)
    assert launched(2, words, kill_at=lambda: [*died.glob("died-*")]) == [-9, 0]
    (mark,) = died.glob("died-*")
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.name.split("-")[2]), 0)


@pytest.mark.tier("wide")
def test_trajectories_under_way_are_resumed(mortal, tmp_path):
    """A run with separate ranks saves them; runs of either placement resume them."""
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


def test_placement_apart_refuses_unsupported_settings(tmp_path):
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
    for lacks in ({"rl.max_staleness": 1}, APART):
        with pytest.raises(ConfigError, match=r"rl.keep_cache: True contradicts rl"):
            config_of(tmp_path / "out", **lacks, **{"rl.keep_cache": "true"})


@pytest.mark.tier("wide")
def test_stale_trajectories_teach_too(tmp_path):
    """The task is the best word of three, with trajectories that begin up to four updates early."""
    values = BEST_WORD | APART | {"rl.max_staleness": 4, "train.steps": 75}
    assert launched(2, words_of(tmp_path / "out", **values)) == [0, 0]
    rows = [row for row in read_metrics(tmp_path / "out" / "metrics.jsonl") if "reward" in row]
    assert max(row["staleness_max"] for row in rows) <= 4
    ages = {name for row in rows for name in row if name.startswith("mismatch/age_")}
    assert ages == {f"mismatch/age_{age}" for age in range(5)}
    assert sum(row["reward"] for row in rows[-5:]) / 5 > 0.9


EXAMPLES = str(Path(__file__).parents[2] / "examples")
AGENT = """
import functools, json, sys, urllib.request
sys.path.append("EXAMPLES")
from code_reward import score_code

score = functools.cache(lambda: score_code({"answer": "assert x"}, "x = 1"))

def run(task, base_url):
    turns = [{"role": "user", "content": f"{task} even"}]
    for streams in (False, True):
        asked = {"model": "m", "messages": turns, "max_tokens": 3, "stream": streams}
        body = json.dumps(asked).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(base_url + "/chat/completions", body, headers)
        with urllib.request.urlopen(request) as found:
            parts = [x.split(b"data: ")[-1] for x in found if x.strip() and b"[DONE]" not in x]
        choices = [json.loads(part)["choices"][0] for part in parts]
        assert not streams or all(len(choice["token_ids"]) == 1 for choice in choices)
        said = [choice["delta" if streams else "message"]["content"] for choice in choices]
        turns.append({"role": "assistant", "content": "".join(said)})
        turns.append({"role": "user", "content": "more"})
    said = turns[1]["content"] + turns[3]["content"]
    return score() * sum(ord(c) % 2 == 0 for c in said) / 6
"""


@pytest.mark.tier("wide")
def test_agents_code_and_a_teacher_apart(mortal, tmp_path):
    """Agents talk to a server in the generator's process; the learners score with the teacher."""
    one = mortal | {"train.steps": 1, "rl.supervised_steps": 1, "checkpoint.save_hf": "true"}
    assert launched(1, words_of(tmp_path / "teacher", **one, **QUIET)) == [0]
    (tmp_path / "agent.py").write_text(AGENT.replace("EXAMPLES", EXAMPLES))
    values = QUIET | {"rl.env": f"agent:{tmp_path}/agent.py:run", "rl.supervised_steps": 0}
    values |= {"rl.teacher": tmp_path / "teacher" / "hf", "train.steps": 2, "data.seq_len": 256}
    values |= {
        "rl.max_sequences": 1,
        "lora.rank": 8,
        "rl.kl_coef": 0.1,
        "rl.routing_replay": "true",
    }
    assert launched(1, words_of(tmp_path / "one", **values)) == [0]
    assert launched(2, words_of(tmp_path / "1+1", **values, **APART)) == [0, 0]
    assert_same_bits(tmp_path / "one", tmp_path / "1+1")
    rows = [row for row in lines_of(tmp_path / "one") if "reward" in row]
    assert all(row["reward"] > 0 and row["teacher_kl"] for row in rows)


# ---- hostile or dying peers, without processes ---------------------------------------------------


@pytest.fixture
def fleet(monkeypatch):
    """Return a main learner's fleet, with the test's own generators, and its address."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    store = dist.HashStore()
    world: Any = SimpleNamespace(is_main=True, store=store, device=torch.device("cpu"))
    config = config_of("out", **APART, **{"rl.generators": 2, "rl.max_staleness": 1})
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    generator: Any = SimpleNamespace(model=model, borrowed={"bias"})
    fleet = apart.Fleet(
        generator, None, config.rl, stop_ids=(7,), longest=9, world=world, config=config
    )
    host, port, key = store.get("generators").decode().split()
    return fleet, (host, int(port)), bytes.fromhex(key)


def come(address, key, rank):
    link = Client(address, authkey=key)
    link.send((rank, "token"))
    return link


def report(link, groups=(), are_all=False, running=0, **figures):
    link.send(apart.Report(list(groups), are_all, running, figures))


def orders_of(link):
    """Return the next orders, and receive weights."""
    assert link.poll(10)
    answer = link.recv()
    if answer[0]:
        link.send(None)
        for _ in answer[0]:
            link.recv_bytes()
    return answer


def over(group, reward=0.0):
    return [Trajectory(group, member, 0, 0, 1.0, reward, is_over=True) for member in range(2)]


def test_unknown_connections_do_not_delay_generators(fleet):
    fleet, address, key = fleet
    silent = [socket.create_connection(address) for _ in range(3)]
    with pytest.raises(AuthenticationError):
        Client(address, authkey=b"guessed")
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(lambda: fleet.updating(0).__enter__())
        links = [come(address, key, rank) for rank in (2, 1)]
        updating.result(10)  # both have come
    assert len(fleet.peers) == len(links)
    assert all(sock.close() is None for sock in silent)


def test_what_a_dead_generator_had_begins_again_with_all_weights(fleet):
    fleet, address, key = fleet
    one, two = (come(address, key, rank) for rank in (1, 2))
    with fleet.updating(5):
        pass
    for link in (one, two):
        report(link)
        assert orders_of(link)[:2] == (["weight", "bias"], 5)
    for group in range(2):
        fleet.start(group, task=3, size=2, seed=0)
    for link in (one, two):
        report(link, running=1)
        assert orders_of(link)[3] == []  # some groups may be incomplete
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(fleet.finish, range(2))
        report(one)
        assert [(t.group, t.member) for t in orders_of(one)[3]] == [(0, 0), (0, 1)]
        report(two)
        assert [t.group for t in orders_of(two)[3]] == [1, 1]
        one.close()
        report(two, [over(1)])
        assert [t.group for t in orders_of(two)[3]] == [0, 0]
        report(two, [over(0, 1.0)])
        assert [[t.reward for t in group] for group in found.result(10)] == [[1, 1], [0, 0]]
    assert fleet.figures()["trajectories_restarted"] == 2
    assert fleet.figures()["generators_lost"] == 1
    three = come(address, key, 1)
    report(three)
    assert orders_of(three)[0] == ["weight", "bias"]


def test_places_are_filled_by_what_still_runs(fleet, monkeypatch):
    """One trajectory of a group continues for long, so further groups get the other slots."""
    fleet, address, key = fleet
    one = come(address, key, 1)
    monkeypatch.setattr(fleet, "num_expected", 1)
    monkeypatch.setattr(fleet, "settings", fleet.settings.model_copy(update={"max_sequences": 8}))
    with fleet.updating(0):
        pass
    report(one)
    orders_of(one)
    for group in range(20):
        fleet.start(group, task=3, size=4, seed=0)
    fleet.finish(())
    groups = []
    for running in (0, 16, 12, 12, 13):
        report(one, running=running)
        groups.append([t.group for t in orders_of(one)[3]][::4])
    # At most 13 run or wait: eight slots, an eighth more, and a group of four.
    assert groups == [[0, 1, 2, 3], [], [4], [5], []]


def test_nothing_begins_with_weights_from_before(fleet):
    """A group is assigned while weights are written; a generator that dies then is handled too."""
    fleet, address, key = fleet
    one, two = (come(address, key, rank) for rank in (1, 2))
    with fleet.updating(0):
        pass
    for link in (one, two):
        report(link)
        orders_of(link)
    with fleet.updating(1):
        fleet.start(0, task=3, size=2, seed=0)
        fleet.finish(())
        report(one, running=1)
        names, _, _, begun, _ = orders_of(one)
        assert names == begun == []
        report(one)
    fleet.finish(())
    names, version, _, begun, _ = orders_of(one)
    assert (names, version) == (["weight"], 1)  # bias is frozen, and already there
    report(two)
    assert two.poll(10)
    two.recv()
    two.close()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: fleet.updating(2).__enter__()).result(10)
    assert fleet.figures()["generators_lost"] == 1


def test_only_deaths_in_a_row_end_the_run(fleet, monkeypatch):
    """A generator that finishes a group before it dies shows that others can go on."""
    fleet, address, key = fleet
    monkeypatch.setattr(apart, "MAX_IN_VAIN", 2)
    monkeypatch.setattr(fleet, "num_expected", 0)
    with fleet.updating(0):
        pass

    def dies(number, finishes):
        one = come(address, key, 1)
        report(one)
        orders_of(one)
        if finishes:
            report(one, [over(number)])
            fleet.finish([number])
        one.close()
        with fleet._changed:
            fleet._changed.notify_all()
            assert fleet._changed.wait_for(lambda: fleet._counts["generators_lost"] > number, 10)

    for number in range(4):
        fleet.start(number, task=3, size=2, seed=0)
    fleet.finish(())
    for number in range(5):
        dies(number, finishes=number < 3)
    with pytest.raises(RunFailed, match="2 generators in a row died, and no group was finished"):
        fleet.finish([3])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_learners_own_loses_that_generator_alone(fleet, monkeypatch):
    fleet, address, key = fleet
    one, two = (come(address, key, rank) for rank in (1, 2))
    with fleet.updating(0):
        pass
    report(one)
    orders_of(one)
    monkeypatch.setattr(apart.Wire, "copy", Mock(side_effect=torch.OutOfMemoryError("no room")))
    report(two)
    assert two.poll(10)
    two.recv()
    two.send(None)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: fleet.updating(1).__enter__()).result(10)
    assert fleet.figures()["generators_lost"] == 1


@pytest.mark.parametrize("ep", [1, 2])
def test_what_is_sent_to_generators_is_a_whole_model(tmp_path, ep):
    config, arch = resolve_run(config_of(tmp_path, **APART, **{"parallel.ep": ep}))
    dims = plan_world(config, arch, 3)
    (rank,) = RankSizes.of_ranks(config, arch, dims, torch.bfloat16)
    whole = blank(config, arch, torch.bfloat16)
    assert rank._generator == sum(p.numel() * p.element_size() for p in whole.parameters())
