"""A rank that others wait for is named; no rank is named if all are alike."""

import statistics
import time

import pytest
import torch
import torch.distributed as dist

from moetrain.config import Config
from moetrain.parallel import waits
from moetrain.train import metrics
from moetrain.train.loop import Trainer
from moetrain.train.metrics import UNHEALTHY_LOGS, RankWatch, read_metrics
from tests.lib.command_lines import settled
from tests.lib.distributed import spawn

STEPS = UNHEALTHY_LOGS + 4
SECONDS = 0.1


def run_with(slow, where, words):
    """Train with a slow rank, or none (-1), which sleeps at ``where``; return the messages."""
    trainer = Trainer(Config.load(None, words, environ={}))
    said = []
    trainer.rank_watch._say = said.append
    if slow >= 0:  # a busy machine makes other ranks slow at times
        metrics.UNHEALTHY_LOGS = 5
    if dist.get_rank() == slow:
        if where == "step":
            step = trainer.engine.step
            trainer.engine.step = lambda lr: (time.sleep(SECONDS), step(lr))[1]
        else:
            block = list(trainer.model.layers.children())[-1]
            block.register_forward_pre_hook(lambda *_: time.sleep(SECONDS))
    trainer.fit()
    return [text for text in said if "is slow" in text]


@pytest.mark.tier("wide", long=["forward-parallel.dp_shard=2"])
@pytest.mark.parametrize(
    ("where", "mesh"),
    [
        ("step", "parallel.dp_shard=2"),
        ("forward", "parallel.dp_shard=2"),
        ("forward", "parallel.dp_replicate=2"),
        ("forward", "parallel.ep=2"),
    ],
)
def test_a_rank_that_others_wait_for_is_named(where, mesh, tiny_words, tmp_path):
    words = [*tiny_words, mesh, f"train.steps={STEPS}", "log.interval=1", "train.eval_interval=0"]
    said, _ = spawn(2, run_with, 1, where, settled(words))
    assert said
    assert all(line.startswith("rank 1 is slow") for line in said)
    rows = [row for row in read_metrics(tmp_path / "out" / "metrics.jsonl") if "loss" in row][1:]
    assert statistics.mode(row["slowest_rank"] for row in rows) == 1
    assert all(row["own_seconds"] <= row["own_seconds_max"] for row in rows)
    assert statistics.median(row["own_seconds"] for row in rows) > SECONDS / 2


@pytest.mark.tier("long")
def test_nobody_is_named_in_an_even_run(tiny_words, tmp_path):
    words = [*tiny_words, f"train.steps={STEPS}", "log.interval=1", "train.eval_interval=0"]
    assert spawn(2, run_with, -1, "", settled(words)) == [[], []]


def test_who_is_slow_only_now_and_then_is_not_named():
    said, own = [], []
    watch = RankWatch(lambda _: own, said.append)
    for seconds, times in (
        ((1.0, 2.0, 1.0), UNHEALTHY_LOGS - 1),
        ((2.0, 1.0, 1.0), 1),
        ((1.0, 2.0, 1.0), UNHEALTHY_LOGS - 1),
        ((1.0, 1.05, 1.0), 3 * UNHEALTHY_LOGS),
    ):
        own[:] = seconds
        for _ in range(times):
            watch.row(1.0)
    assert not said
    own[:] = [1.0, 3.0, 1.0]
    rows = [watch.row(1.0) for _ in range(3 * UNHEALTHY_LOGS)]
    assert rows[0] == {"own_seconds": 5 / 3, "own_seconds_max": 3.0, "slowest_rank": 1}
    (text,) = said
    assert "rank 1 is slow" in text
    assert "take 3.000 s and those of others 1.000 s" in text


def test_the_first_wait_after_an_interruption_is_not_of_the_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    waits.share_waited()
    for seconds_before, seconds_within in ((1, 50), (3, 1), (2, 4)):
        if seconds_within == 50:
            waits.noted.append(None)
        now[0] += seconds_before
        with waits.waiting(torch.device("cpu")):
            now[0] += seconds_within
    waits.noted.append(None)
    assert waits.share_waited() == pytest.approx((1 + 4) / (3 + 1 + 2 + 4))
    assert waits.share_waited() == 0.0
