"""Runs of reinforcement learning: what they learn and write, and how they resume."""

import gzip
import json
import math
import re
import shutil

import pytest
import torch

from moetrain.cli.train import main
from moetrain.cli.train import run_rl as run
from moetrain.config import Config, ConfigError, Recipes
from moetrain.config.rl import RlSection
from moetrain.data.packing import IGNORE_INDEX
from moetrain.rl.learn import LoadedTeacher
from moetrain.rl.loop import PARTS, RlTrainer
from moetrain.rl.losses import PolicyObjective, advantages
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from moetrain.train.preferences import score
from moetrain.train.samples import pack
from tests.lib.checkpoints import tensors_of
from tests.lib.distributed import spawn
from tests.lib.engines import make_engine
from tests.lib.rl_runs import TINY, config_of, even, fitted, lines_of, words_of
from tests.lib.rl_samples import make_samples
from tests.lib.toy_environments import CALCULATOR

__all__ = ["even"]  # a fixture


@pytest.mark.tier("long")
def test_steps_of_generation_are_traced_as_others_are(even, tmp_path):
    fitted(tmp_path, **even, **{"log.profile": 1, "log.profile_after": 2})
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "steps-4-4-rank-0.json.gz"
    with gzip.open(file) as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert {"forward_backward", "layer 1 forward", "layer 1 backward", "update"} <= names


def test_rl_run_writes_its_files(even, tmp_path, capsys):
    assert run(words_of(tmp_path / "out", **even, **{"checkpoint.save_hf": "true"})) == 0
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    supervised, learned = (
        [r for r in rows if (k in r) == b and "eval_reward" not in r]
        for k, b in (("reward", False), ("reward", True))
    )
    assert [r["step"] for r in supervised] == [1, 2]
    assert [r["step"] for r in learned] == [3, 4]
    assert [r["step"] for r in rows if "eval_reward" in r] == [0, 2, 4]
    for row in supervised + learned:
        assert row["loss"] is not None
        assert row["grad_norm"] > 0
        assert row["tokens"] > 0
        for name in ("lr", "tokens_per_second_per_device", "step_seconds", "memory_gib"):
            assert row[name] > 0
    for row in learned:
        assert 0 <= row["reward"] <= 1
        assert row["entropy"] > 1
        assert 0 <= row["mismatch"] < 1e-9
        assert 0 <= row["mismatch_share"] <= 1
        assert abs(row["kl"]) < 1e-9  # the KL of an on-policy step from itself
        assert row["staleness_max"] == 0
        assert row["prompts"] == 4
        assert row["generated_tokens_per_second"] > 0
        for name in ("clip_share", "advantage_spread", "length", "overlong", "useful_groups"):
            assert name in row
        parts = [row[f"seconds/{part}"] for part in PARTS]
        assert all(seconds >= 0 for seconds in parts)
        assert sum(parts) == pytest.approx(row["step_seconds"])
        assert row["seconds/generate"] > row["seconds/offload"]
        assert row["seconds/train"] > 0
    folder = tmp_path / "out"
    assert (folder / "hf" / "model.safetensors").exists()
    assert json.loads((folder / "config.json").read_text())["rl"]["max_tokens"] == 6
    text = (folder / "completions" / "step-00000004.txt").read_text()
    assert text.count("--- task ") == 5
    assert text.count("[[") == 5
    assert " even [[" in text
    said = capsys.readouterr().out
    assert len(re.findall(r"(?m)^  time [0-9.]+ s: .*generate .*%\)", said)) == 2
    table = said[said.index("time of 4 steps: ") :].splitlines()
    assert [line.split()[0] for line in table[1 : len(PARTS) + 1]] == list(PARTS)
    shares = [float(line.split()[-1].rstrip("%")) for line in table[1 : len(PARTS) + 1]]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert re.match(r"tokens/s per device: generation [0-9,]+, training [0-9,]+", table[-2])
    compared, differing = re.findall(r"[0-9,]+\b", table[-1].split(":")[1])
    written = sum(row["length"] * 16 for row in learned)
    assert 0 <= int(differing) <= int(compared) <= written
    assert int(compared) > 0


CASES = {
    "synchronous": {},
    "several updates": {
        "rl.ratio": "proximal",
        "rl.updates_per_rollout": 2,
        "train.global_batch_size": 8,
    },
    "ahead": {
        "rl.ratio": "proximal",
        "rl.max_staleness": 2,
        "rl.env": CALCULATOR,
        "rl.max_tokens": 24,
    },
    "offloaded": {"rl.offload": "true", "rl.sleep": "all", "rl.temperature": 0.7},
    "routes": {"rl.routing_replay": "true", "rl.max_staleness": 1},
    "kl in the loss": {"rl.kl_coef": 0.1, "rl.resample": 1},
    "kl in the reward": {"rl.kl_coef": 0.1, "rl.kl_in": "reward"},
    "from nothing": {"rl.supervised_steps": 0, "rl.ratio": "rollout"},
    "adapters": {"lora.rank": 8, "rl.kl_coef": 0.1},
}


@pytest.mark.tier("wide", long=["routes", "several updates", "synchronous"])
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_the_same_bits(case, even, tmp_path):
    values = even | CASES[case] | {"train.steps": 5, "checkpoint.interval": 3, "checkpoint.keep": 5}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    fitted(whole, **values)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000005")
    trainer = RlTrainer(config_of(resumed, **values))
    assert trainer.step == 3
    begun = {t.group for group in trainer.collector.groups.values() for t in group}
    assert len(begun) == 4 * int(values.get("rl.max_staleness", 0))
    trainer.fit()
    for one, two in zip(lines_of(whole), lines_of(resumed), strict=True):
        assert one == two
    for group in ("model", "optim", "rollouts"):
        expected, found = (
            tensors_of(folder / "checkpoints" / "step-00000005")[group]
            for folder in (whole, resumed)
        )
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.tier("long")
def test_generation_ahead_is_as_stale_as_it_may_be(even, tmp_path):
    values = even | {"rl.max_staleness": 1, "train.steps": 6, "rl.max_sequences": 4}
    trainer = fitted(tmp_path, **values)
    rows = [r for r in lines_of(tmp_path) if "reward" in r]
    assert rows[0]["staleness_max"] == 0
    assert {r["staleness_max"] for r in rows} == {0, 1}
    assert (trainer.window.taken, trainer.window.begun) == (16, 20)
    assert sorted(trainer.collector.groups) == [16, 17, 18, 19]


def test_groups_that_teach_nothing_are_replaced(tmp_path):
    # An untrained model gets no reward, so no group has anything to teach.
    values = {"rl.supervised_steps": 0, "rl.resample": 2, "train.steps": 2, "optim.lr": 0.1}
    trainer = RlTrainer(config_of(tmp_path, **values, **{"rl.env": "arithmetic"}))
    before = {name: weight.clone() for name, weight in trainer.engine.weights()}
    trainer.fit()
    after = tensors_of(tmp_path / "checkpoints" / "step-00000002")["model"]
    rows = [r for r in lines_of(tmp_path) if "reward" in r]
    assert [(r["prompts"], r["useful_groups"], r["left_out/no_variance"]) for r in rows] == [
        (12, 0, 48)
    ] * 2
    assert all(r[name] is None for r in rows for name in ("entropy", "kl", "mismatch"))
    assert all(r[name] == 0 for r in rows for name in ("loss", "grad_norm"))
    # Without a signal the weights do not change.
    assert all(torch.equal(before[name], weight) for name, weight in after.items())


def test_long_trajectories_are_punished_once_and_not_in_evaluations(tmp_path, monkeypatch):
    seen = []

    def watched(trajectories, *rest):
        seen.append([(t.reward, t.num_written) for t in trajectories])
        return advantages(trajectories, *rest)

    monkeypatch.setattr("moetrain.rl.loop.advantages", watched)
    values = {"rl.supervised_steps": 0, "rl.resample": 1, "train.steps": 2}
    # An untrained model gets no reward, so what there is comes from its length.
    fitted(tmp_path, **values, **{"rl.env": "arithmetic", "rl.overlong_buffer": 5})
    rows = lines_of(tmp_path)
    assert max(map(len, seen)) > 16  # with the groups that replace others
    assert all(reward == min(0, (1 - written) / 5) for found in seen for reward, written in found)
    last = [
        rewards
        for rewards, after in zip(seen, [*seen[1:], []], strict=True)
        if len(after) <= len(rewards)
    ]
    means = [sum(reward for reward, _ in found) / len(found) for found in last]
    assert [r["reward"] for r in rows if "reward" in r] == means
    assert all(mean < 0 for mean in means)
    assert {r["eval_reward"] for r in rows if "eval_reward" in r} == {0}


def test_the_trainers_own_pass_is_left_out_where_bits_are_equal(even, tmp_path):
    values = even | {"train.micro_batch_size": 1, "rl.supervised_steps": 0, "rl.ratio": "proximal"}
    trainer = RlTrainer(config_of(tmp_path, **values))
    trainer.sync_weights()
    samples = trainer.roll_out()
    batches = trainer.learner.deal(samples).batches
    assert len(batches) > 2
    scores = score(trainer.engine, batches)
    equal = [b._replace(logprobs_BS=s) for b, s in zip(batches, scores, strict=True)]
    passes = []
    trainer.engine.runner.before_forward = lambda: passes.append(1)
    scored, row = trainer.learner.scored(equal, version=0)
    assert (sum(passes), scored) == (1, equal)
    assert row == {"mismatch": 0, "mismatch_share": 0}
    at = (equal[0].targets_BS >= 0).nonzero()[0].tolist()
    other = equal[0].logprobs_BS.clone()
    other[at[0], at[1]] -= 0.5
    for changed, version in (([equal[0]._replace(logprobs_BS=other), *equal[1:]], 0), (equal, 1)):
        passes.clear()
        scored, row = trainer.learner.scored(changed, version)
        assert sum(passes) == len(batches)
        for found, logprobs in zip(scored, scores, strict=True):
            assert torch.equal(found.proximal_BS, logprobs)
        number = sum(int((b.targets_BS >= 0).sum()) for b in batches)
        if version == 0:
            assert row["mismatch_share"] == 1 / number
            assert row["mismatch"] == pytest.approx((math.exp(0.5) - 1.5) / number, rel=1e-5)
            assert scored[0].weights_BS[at[0], at[1]] == pytest.approx(math.exp(0.5), rel=1e-5)
        else:  # all are of another version, so nothing is compared
            assert row == {}


def test_experts_that_generation_chose_are_trained(tmp_path):
    values = {"rl.env": CALCULATOR, "rl.max_tokens": 24, "rl.routing_replay": "true"}
    trainer = RlTrainer(config_of(tmp_path, **values, **{"train.micro_batch_size": 16}))
    for _ in range(2):
        trainer.train_step()
    trainer.sync_weights()
    groups = trainer.next_groups(trainer.setup.num_groups)
    samples = [sample for t in groups for sample in t.samples(1.0)]
    for sample in samples:
        assert sample.routes.shape == (len(sample.tokens) - 1, 2, 2)
        chosen = sample.routes[:, 0, 0] >= 0
        assert chosen[:-20].all()
        assert (chosen | ~sample.is_action[1:]).all()
    assert any((sample.routes >= 0).all() for sample in samples)
    (batch,) = trainer.learner.deal(samples).batches
    (replayed,), (free,) = (
        score(trainer.engine, [b]) for b in (batch, batch._replace(routes_BSLK=None))
    )
    torch.testing.assert_close(replayed, free, rtol=1e-5, atol=1e-5)
    others = torch.where(batch.routes_BSLK < 0, -1, 3 - batch.routes_BSLK)
    (moved,) = score(trainer.engine, [batch._replace(routes_BSLK=others)])
    assert (moved - free).abs().max() > 1e-3


FAULTY = """
import time
from moetrain.rl.envs.shipped import Sort

class Faulty(Sort):
    def score(self, problem, answer):
        kind = int(problem.prompt[0]) % 5
        if kind == 0:
            raise RuntimeError("no")
        if kind == 1:
            time.sleep(100)
        if kind == 2:
            return "good"
        return super().score(problem, answer)
"""


@pytest.mark.tier("long")
def test_a_run_survives_its_environment(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    env = {"rl.env": f"{tmp_path}/faulty.py:Faulty", "rl.step_timeout": 0.2}
    fitted(tmp_path / "out", **env, **{"train.global_batch_size": 48, "rl.group_size": 2})
    rows = [r for r in lines_of(tmp_path / "out") if "reward" in r]
    for row in rows:
        faults = [row[f"left_out/{reason}"] for reason in ("raised", "timeout", "nonsense")]
        assert all(number % 2 == 0 and number > 0 for number in faults)  # whole groups
        assert sum(faults) < 48
        assert row["prompts"] == 24


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rl.group_size": 3}, "rl.group_size: 3 does not divide the 16 trajectories"),
        ({"rl.step_timeout": 1e12}, "rl.step_timeout: "),
        ({"rl.supervised_steps": 9}, "rl.supervised_steps: 9 is more than train.steps 4"),
        ({"rl.cache_tokens": 32}, "rl.cache_tokens: 32, in pages of 64, do not hold a row"),
        ({"rl.group_size": 1}, "rl.group_size: 1 contradicts rl.advantage 'dr_grpo'"),
        ({"rl.prompts": "x"}, "rl.prompts: 'x' contradicts rl.env 'sort'"),
        ({"data.seq_len": 12}, "data.seq_len: 12 is less than a demonstration of "),
        ({"model.vocab_size": 200}, "data.tokenizer: 'byte' has 257 tokens"),
    ],
)
def test_wrong_settings_are_one_line(values, message, tmp_path, capsys):
    assert run(words_of(tmp_path / "out", **values)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
    if "data.seq_len" not in values:  # only demonstrations determine it
        assert not (tmp_path / "out").exists()


def test_an_environment_that_shows_nothing(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 9)
    env = {"rl.env": "jsonl", "rl.prompts": tmp_path / "p.jsonl", "rl.reward": "exact"}
    with pytest.raises(ConfigError, match=r"rl.supervised_steps: 2, but rl.env 'jsonl' has no d"):
        RlTrainer(config_of(tmp_path / "out", **env))


def test_a_checkpoint_of_another_kind(tiny, tmp_path):
    Trainer(tiny("train.steps=1")).fit()
    found = tmp_path / "out" / "checkpoints" / "step-00000001"
    config = tiny("checkpoint.resume=" + str(found), f"output_dir={tmp_path}/rl", "rl.group_size=4")
    with pytest.raises(ConfigError, match=r"of a run that generated nothing; to begin from"):
        RlTrainer(config)


def test_a_checkpoint_of_reinforcement_learning_is_none_to_pretrain_on(even, tmp_path):
    fitted(tmp_path / "rl", **even, **{"train.steps": 3})
    found = tmp_path / "rl" / "checkpoints" / "step-00000003"
    own = {k: v for k, v in TINY.items() if not k.startswith("rl.")}
    words = [f"{k}={v}" for k, v in own.items()]
    config = Config.load(None, [*words, f"checkpoint.resume={found}", f"output_dir={tmp_path}/out"])
    with pytest.raises(ConfigError, match=r"is of reinforcement learning; to begin from its"):
        Trainer(config)


def test_kl_asked_for_when_resuming_is_from_the_initial_policy(even, tmp_path):
    """The initial policy is the one before the first trajectory, here that of step 2."""
    fitted(tmp_path, **even, **{"train.steps": 2})
    values = {"train.steps": 5, "rl.kl_coef": 0.1, "optim.lr": 0.01, "optim.warmup_steps": 0}
    # Fewer supervised steps than there were to be.
    fitted(tmp_path, **even, **values, **{"rl.supervised_steps": 1})
    initial, last = (tensors_of(tmp_path / "checkpoints" / f"step-{step:08d}") for step in (2, 5))
    assert last["reference"].keys() == initial["model"].keys()
    for name, weight in last["reference"].items():
        assert torch.equal(weight, initial["model"][name]), name
    assert any(not torch.equal(last["model"][name], x) for name, x in initial["model"].items())
    kl = [row["kl"] for row in lines_of(tmp_path) if "reward" in row]
    assert len(kl) == 3
    assert abs(kl[0]) < 1e-9  # the first trajectories are the initial policy's
    assert min(kl[1:]) > 1e-6


def test_kl_cannot_be_asked_for_after_the_first_trajectory(even, tmp_path):
    """The initial policy is lost then."""
    fitted(tmp_path, **even, **{"train.steps": 3})
    with pytest.raises(ConfigError, match=r"rl.kl_coef: 0.1, but .* is of a run without"):
        RlTrainer(config_of(tmp_path, **even, **{"train.steps": 5, "rl.kl_coef": 0.1}))


def test_the_mismatch_is_of_generation_whatever_the_updates_move(even, tmp_path):
    values = {"rl.updates_per_rollout": 2, "train.global_batch_size": 8, "rl.ratio": "rollout"}
    values |= {"optim.lr": 0.01, "optim.warmup_steps": 0, "rl.max_staleness": 1}
    fitted(tmp_path, **even, **values)
    rows = [row for row in lines_of(tmp_path) if "reward" in row]
    assert max(row["kl"] for row in rows) > 1e-6
    assert [row["mismatch"] is None for row in rows] == [False, True]  # all are of older weights
    assert 0 <= rows[0]["mismatch"] < 1e-9
    assert rows[0]["mismatch/age_0"] == rows[0]["mismatch"]
    # Two updates of each step's rollouts have changed the weights since.
    assert "mismatch/age_0" not in rows[1]
    assert rows[1]["mismatch/age_1"] > 1e-9


def test_help_and_dry_run(capsys):
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert "python -m moetrain.rl" in text
    assert "default recipe: rl-sort; with model.path, rl" in text
    assert "--rl.max_staleness (a whole number; default: 0)" in text
    assert run(["--dry_run", "--rl.env", "arithmetic"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rl"]["env"] == "arithmetic"
    assert shown["output_dir"] == "outputs/rl-sort"


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (
            main,
            ["--rl.env", "sort"],
            "rl.env: set (command line), but python -m moetrain.train does not use",
        ),
        (
            main,
            ["rl-sort"],
            "recipe: 'rl-sort' sets rl.env, which python -m moetrain.train does not use; give a "
            "recipe for this command, such as debug",
        ),
        (
            run,
            ["--data.source=synthetic"],
            "data.source: set (command line), but python -m moetrain.rl does not use",
        ),
    ],
)
def test_settings_of_the_other_command_are_one_line(command, words, message, capsys):
    assert command([*words, "--dry_run"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


FIRST = {
    "demonstrations": ({}, [0, 2, 4]),  # that at step 2 is also the one before the first trajectory
    "odd": ({"train.eval_interval": 3}, [0, 2, 3, 4]),
    "none": ({"rl.supervised_steps": 0}, [0, 2, 4]),
    "ahead": ({"rl.supervised_steps": 0, "rl.ratio": "proximal", "rl.max_staleness": 1}, [0, 2, 4]),
    "at the end": ({"rl.supervised_steps": 0, "train.eval_interval": 0}, [4]),
}


@pytest.mark.tier("long", quick=["none"])
@pytest.mark.parametrize("case", FIRST)
def test_the_first_evaluation_may_be_left_out(case, even, tmp_path):
    values, steps = FIRST[case]
    for word in ("yes", "no"):
        fitted(tmp_path / word, **even, **values, **{"train.eval_first": word})
    yes, no = lines_of(tmp_path / "yes"), lines_of(tmp_path / "no")
    assert [row["step"] for row in yes if "eval_reward" in row] == steps
    assert no == [row for row in yes if row["step"]]
    assert not (tmp_path / "no" / "completions" / "step-00000000.txt").exists()


@pytest.mark.tier("wide")
@pytest.mark.parametrize("dtype", ["auto", "mxfp4"])
def test_the_toy_learns_from_its_reward(tmp_path, dtype):
    words = ["--output_dir", str(tmp_path), "--train.steps", "30", "--train.eval_interval", "0"]
    words += ["--optim.lr", "2e-3", "--rl.supervised_steps", "18"]  # faster than in the recipe
    words += ["--rl.eval_tasks", "0", "--optim.schedule", "constant"]
    words += ["--rl.generator_dtype", dtype]
    assert run([*words, "--train.device", "cpu", "--log.tensorboard", "false"]) == 0
    rows = [row for row in lines_of(tmp_path) if "reward" in row]
    assert [row["step"] for row in rows] == list(range(19, 31))
    start, end = (sum(row["reward"] for row in part) / 4 for part in (rows[:4], rows[-4:]))
    assert end > start + 0.1
    assert all((row["mismatch"] > 1e-6) == (dtype != "auto") for row in rows)


def judged_by_itself(folder, layouts):
    """Return the distance of a policy from a teacher with equal weights, by its scores."""
    found = {}
    for name, words in layouts.items():
        values = {"model.path": folder, "rl.teacher": folder, "rl.teacher_top_k": 5, **words}
        values |= {"data.seq_len": 16, "train.global_batch_size": 4, "train.device": "cpu"}
        engine = make_engine(*(f"{k}={v}" for k, v in values.items()), base=(), micro=2)
        config, batches = engine.config, pack(make_samples(5, 13, 9), 16, 2, min_batches=2)
        likely = LoadedTeacher(config, str(folder), engine)
        likeliest, likely.settings = likely.judged(batches), RlSection()
        layers, experts = len(engine.arch.moe_layer_indices), engine.arch.num_experts_per_token
        shape = (*batches[0].tokens_BS.shape, layers, experts)
        routes = torch.arange(experts, dtype=torch.int32).expand(shape).contiguous()
        # The teacher ignores the policy's choices of experts.
        sampled = likely.judged([b._replace(routes_BSLK=routes) for b in batches])
        assert sampled[0].routes_BSLK is routes
        scores = score(engine, batches)
        terms = engine.forward(likeliest, PolicyObjective(config.rl)).terms
        same = [torch.equal(b.teacher_BS, x) for b, x in zip(sampled, scores, strict=True)]
        found[name] = terms["teacher_kl"].item(), all(same), [b.teacher_BS2K for b in likeliest]
    return found


@pytest.mark.tier("long")
def test_a_teacher_lies_on_every_mesh_as_the_policy_does(teacher):
    one = judged_by_itself(teacher, {"one": {}})["one"]
    layouts = {f"{k}": {f"parallel.{k}": 2} for k in ("dp_shard", "ep", "tp", "cp", "pp")}
    (found, _) = spawn(2, judged_by_itself, teacher, layouts)
    for kl, same, likeliest in [one, *found.values()]:
        assert abs(kl) < 1e-6
        assert same
        for mine, theirs in zip(likeliest, one[2], strict=True):
            assert torch.equal(mine[:, :, 0], theirs[:, :, 0])


@pytest.fixture(scope="module")
def teacher(even, tmp_path_factory):
    """Return a checkpoint that has learned the demonstrations."""
    folder = tmp_path_factory.mktemp("teacher")
    words = {"rl.supervised_steps": 6, "train.steps": 6, "rl.supervised_lr": 0.02}
    fitted(folder, **even, **words, **{"checkpoint.save_hf": "true"})
    return folder / "hf"


@pytest.mark.tier("wide", long=["8"])
@pytest.mark.parametrize("top_k", [0, 8])
def test_a_student_learns_a_teachers_distribution(even, tmp_path, teacher, top_k):
    words = {"rl.teacher": teacher, "rl.teacher_top_k": top_k, "rl.advantage": "none"}
    words |= {"rl.group_size": 1, "rl.supervised_steps": 0, "train.steps": 20, "optim.lr": 0.01}
    fitted(tmp_path, **even, **words, **{"train.eval_interval": 0, "rl.eval_tasks": 0})
    kl = [row["teacher_kl"] for row in lines_of(tmp_path) if "teacher_kl" in row]
    assert len(kl) == 20
    assert sum(kl[-4:]) < sum(kl[:4]) / 3


def test_rewards_and_a_teacher_together(even, tmp_path, teacher):
    """Groups of equal rewards learn from the teacher."""
    words = {"rl.teacher": teacher, "rl.supervised_steps": 0, "rl.prompts": tmp_path / "p.jsonl"}
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' * 8)
    words |= {"rl.env": "jsonl", "rl.reward": "zero", "train.steps": 1, "rl.eval_tasks": 0}
    fitted(tmp_path / "out", **words, **{"train.eval_interval": 0})
    (row,) = (row for row in lines_of(tmp_path / "out") if "teacher_kl" in row)
    assert row["useful_groups"] == 4
    assert row["reward"] == 0
    assert row["grad_norm"] > 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"rl.advantage": "none"}, "rl.advantage: 'none' contradicts rl.teacher none"),
        ({"rl.teacher_top_k": 3}, "rl.teacher_top_k: 3 contradicts rl.teacher none"),
        ({"rl.teacher": "/nowhere"}, "rl.teacher: "),
    ],
)
def test_teachers_that_cannot_be_are_one_line(words, problem, tmp_path, capsys):
    assert run(words_of(tmp_path, **words)) == 2
    assert f"error: {problem}" in capsys.readouterr().err


def test_a_mask_acts_without_weights(even, tmp_path):
    """With rl.ratio rollout only the mask uses the trainer's own probabilities."""
    words = {"rl.mask": "token", "rl.mask_low": 0.9, "rl.mask_high": 1.1, "rl.supervised_steps": 0}
    trainer = RlTrainer(config_of(tmp_path, **even, **words))
    trainer.sync_weights()
    batches = trainer.learner.deal(trainer.roll_out()).batches
    row, place = (batches[-1].targets_BS >= 0).nonzero()[0].tolist()
    batches[-1].logprobs_BS[row, place] -= 0.5  # generation's own, and one token is far from it
    masked = [batch.targets_BS.clone() for batch in batches]
    masked[-1][row, place] = IGNORE_INDEX
    found, _ = trainer.learner.scored(batches, version=0)
    assert all(torch.equal(b.targets_BS, wanted) for b, wanted in zip(found, masked, strict=True))
    assert not any(b.weights_BS is not None and (b.weights_BS > 1).any() for b in found)


@pytest.mark.tier("long")
def test_from_a_checkpoint(even, tmp_path):
    fitted(tmp_path / "first", **{"checkpoint.save_hf": "true", "train.steps": 2})
    words = [f"model.path={tmp_path}/first/hf", f"output_dir={tmp_path}/out", "train.device=cpu"]
    words += [f"rl.env={even['rl.env']}", "train.steps=2", "train.global_batch_size=8"]
    words += ["rl.max_tokens=5", "data.seq_len=128", "rl.eval_tasks=3", "log.tensorboard=false"]
    config = Config.load(None, words, environ={}, recipes=Recipes.RL)
    assert "recipe rl, as model.path is set" in config.describe()
    assert config.rl.chat
    RlTrainer(config).fit()
    rows = [row for row in lines_of(tmp_path / "out") if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert (tmp_path / "out" / "hf" / "model.safetensors").exists()
    said = (tmp_path / "out" / "completions" / "step-00000002.txt").read_text()
    assert "user\n" in said
