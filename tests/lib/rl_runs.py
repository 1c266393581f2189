"""Helpers of tests/rl/test_run.py that other tests use too."""

import pytest

from moetrain.config import Config, Recipes
from moetrain.rl.loop import RlTrainer
from moetrain.train.metrics import read_metrics

EVEN = """
from moetrain.rl.envs import Problem, SolvedEnvironment

class Even(SolvedEnvironment):
    def problem(self, task):
        return Problem(f"{task} even ", "bdfh")

    def score(self, problem, answer):
        return sum(ord(c) % 2 == 0 for c in answer) / 6
"""


@pytest.fixture(scope="module")
def even(tmp_path_factory):
    """Return an environment in which an untrained model gets varying rewards."""
    file = tmp_path_factory.mktemp("even") / "even.py"
    file.write_text(EVEN)
    return {"rl.env": f"{file}:Even"}


TINY = {
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.num_experts": 4,
    "model.moe_intermediate_size": 16,
    "data.seq_len": 64,
    "train.steps": 4,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 16,
    "train.eval_interval": 2,
    "train.device": "cpu",
    "rl.supervised_steps": 2,
    "rl.group_size": 4,
    "rl.eval_tasks": 5,
    "rl.max_tokens": 6,
    "log.interval": 1,
    "log.tensorboard": "false",
}


def words_of(output, **values):
    settings = TINY | {"output_dir": output} | values
    return [f"{key}={value}" for key, value in settings.items()]


def config_of(output, **values):
    return Config.load(None, words_of(output, **values), environ={}, recipes=Recipes.RL)


def fitted(output, **values):
    trainer = RlTrainer(config_of(output, **values))
    trainer.fit()
    return trainer


TIMES = ("seconds", "per_second", "memory", "tflops", "mfu")


def lines_of(folder):
    """Return the metrics without those that a clock measures."""
    return [
        {k: v for k, v in row.items() if not any(time in k for time in TIMES)}
        for row in read_metrics(folder / "metrics.jsonl")
    ]
