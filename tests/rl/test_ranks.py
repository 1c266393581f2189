"""Reinforcement learning on several ranks equals one process, however the model is spread."""

import subprocess
import sys

import pytest
import torch

from moetrain.rl.loop import RlTrainer
from tests.lib.architectures import own_part
from tests.lib.checkpoints import tensors_of
from tests.lib.distributed import spawn
from tests.lib.rl_runs import EVEN, config_of, fitted, lines_of, words_of
from tests.lib.toy_environments import BEST_WORD


def first_steps(folder, runs):
    """Return by run its metrics, and its weights on this rank."""
    found = {}
    for name, values in runs.items():
        trainer = fitted(folder / name, **values)
        found[name] = lines_of(trainer.folder), {k: v.cpu() for k, v in trainer.engine.weights()}
    return found


LAYOUTS = {
    "ep": {"parallel.ep": 2},
    "tp": {"parallel.tp": 2},
    "pp": {"parallel.pp": 2, "rl.offload": "true"},
    "cp": {"parallel.cp": 2},
    "dp": {"rl.routing_replay": "false"},
}


@pytest.mark.tier("long")
def test_ranks_learn_what_one_process_does(tmp_path):
    (tmp_path / "even.py").write_text(EVEN)
    # With its own epsilon AdamW would turn a rounding error near 0 into a full step.
    values = {"rl.env": f"{tmp_path}/even.py:Even", "train.micro_batch_size": 2}
    values |= {"optim.eps": 1e-3, "rl.max_staleness": 1, "rl.routing_replay": "true"}
    values["moe.aux_loss_scope"] = "global_batch"  # the rows' micro-batch does not matter
    one = {"replayed": values, "free": values | LAYOUTS["dp"]}
    expected = first_steps(tmp_path / "one", one)
    two = {name: values | layout for name, layout in LAYOUTS.items()}
    answers = spawn(2, first_steps, tmp_path / "two", two, timeout=360)
    for layout in LAYOUTS:
        rows, weights = expected["free" if layout == "dp" else "replayed"]
        found, _ = answers[0][layout]
        assert [row.keys() for row in found] == [row.keys() for row in rows]
        for mine, theirs in zip(rows, found, strict=True):
            for name in ("reward", "eval_reward", "length", "prompts", "staleness_mean", "step"):
                assert mine.get(name) == theirs.get(name), (layout, name)
            for name in {"loss", "grad_norm", "entropy"} & mine.keys():
                near = pytest.approx(mine[name], rel=1e-4, abs=1e-6)
                assert theirs[name] == near, (layout, name)
        for answer in answers:
            for name, weight in weights.items():
                torch.testing.assert_close(answer[layout][1][name], weight, rtol=1e-4, atol=1e-6)


WORDS = {
    **BEST_WORD,
    "parallel.ep": 2,
    "checkpoint.interval": 40,
    "checkpoint.keep": 9,
    "rl.offload": "true",
    "rl.sleep": "all",
}


ON_GPUS = {
    "train.device": "cuda",
    "model.hidden_size": 128,
    "model.head_dim": 64,
    "model.moe_intermediate_size": 64,
}


def learn_words(folder, more):
    """Train from scratch to the best word, resuming in another process; return the largest
    difference of the generator's weights from the trainer's."""
    words = WORDS | more
    fitted(folder, **words, **{"train.steps": 54})
    trainer = RlTrainer(config_of(folder, **words, **{"train.steps": 70}))
    assert trainer.step == 54
    assert trainer.generator.experts is not None
    apart = []
    finish = trainer.finish

    def look():
        trainer.sync_weights()
        for name, weight in trainer.engine.weights():
            theirs = trainer.generator.model.get_parameter(name)
            mine = own_part(trainer.generator.experts, weight, theirs)
            apart.append((theirs - mine.to(theirs)).abs().max().item())
        finish()

    trainer.finish = look
    trainer.fit()
    return max(apart)


@pytest.mark.tier("wide", long=["auto"])
@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_two_ranks_that_share_experts_learn_the_best_word(tmp_path, transport):
    more = {"parallel.fsdp_transport": transport}
    assert spawn(2, learn_words, tmp_path, more, timeout=240) == [0, 0]
    rows = [row for row in lines_of(tmp_path) if "reward" in row]
    assert [row["step"] for row in rows] == list(range(41, 71))
    start, end = (sum(row["reward"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert 0.6 < start < 0.8  # the three words equally often are worth 0.75
    assert end > 0.9
    first, last = (
        tensors_of(tmp_path / "checkpoints" / f"step-000000{step}")["model"] for step in (40, 70)
    )
    for name, weight in first.items():  # all layers
        assert not torch.equal(weight, last[name]), name


@pytest.mark.gpu(2)
def test_two_gpus_that_share_experts_learn_the_best_word(tmp_path):
    """The run is in bf16, with the generator's graphs and kernels."""
    assert spawn(2, learn_words, tmp_path, ON_GPUS, device_type="cuda", timeout=500) == [0, 0]
    rows = [row for row in lines_of(tmp_path) if "reward" in row]
    start, end = (sum(row["reward"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert end > max(start, 0.85)


DEADLY = """
import os, signal
from pathlib import Path
from moetrain.rl.envs.shipped import Sort

class Deadly(Sort):
    scored = 0

    def score(self, problem, answer):
        self.scored += 1
        mark = Path(__file__).with_name("killed")
        if os.environ.get("RANK") == "1" and self.scored == 20 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().score(problem, answer)
"""


def go_on_and_begin_anew(folder, values):
    """Resume the run in ``out``, and make a whole one beside it."""
    for name in ("out", "whole"):
        fitted(folder / name, **values)


@pytest.mark.tier("long")
def test_a_rank_killed_while_it_generates_loses_nothing(tmp_path):
    (tmp_path / "deadly.py").write_text(DEADLY)
    values = {"rl.env": f"{tmp_path}/deadly.py:Deadly", "launch.nproc": 2, "train.steps": 4}
    values |= {"checkpoint.interval": 1, "parallel.ep": 2, "rl.supervised_steps": 1}
    values["train.micro_batch_size"] = 2
    command = [sys.executable, "-m", "moetrain.rl", *words_of(tmp_path / "out", **values)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=360)
    assert killed.returncode == 1, killed.stderr
    assert "rank 1 was killed by signal 9" in killed.stderr
    assert 1 <= sum("loss" in row for row in lines_of(tmp_path / "out")) < 4
    spawn(2, go_on_and_begin_anew, tmp_path, values, timeout=240)
    rows, expected = (lines_of(tmp_path / name) for name in ("out", "whole"))
    assert rows == expected
    assert [row["step"] for row in rows if "reward" in row] == [2, 3, 4]
    assert {row["prompts"] for row in rows if "reward" in row} == {4}
    found, whole = (
        tensors_of(tmp_path / name / "checkpoints" / "step-00000004")["model"]
        for name in ("out", "whole")
    )
    assert all(torch.equal(whole[name], weight) for name, weight in found.items())
