"""Reinforcement learning before its first step: refusals, memory estimate, a run's identity."""

import json
import os
import re
import shutil

import pytest
import torch

from moetrain.cli.train import RL
from moetrain.cli.train import run_rl as run
from moetrain.config import Config, ConfigError
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate.weights import _replica_bytes
from moetrain.models.hf.load import resolve_architecture
from moetrain.parallel.mesh import ParallelDims
from moetrain.rl.collect import try_reward
from moetrain.rl.envs import Prompts
from moetrain.rl.envs.shipped import Jsonl
from moetrain.rl.loop import RlTrainer
from moetrain.train.estimates.memory import GIB, RankSizes
from tests.lib.estimates import estimate_memory
from tests.lib.rl_runs import EVEN, config_of, fitted, lines_of, words_of

BAD_ENVIRONMENTS = """
from pathlib import Path
from moetrain.rl.envs.shipped import Sort

class Raises(Sort):
    def __init__(self, prompts):
        Path("/nothing/at/all").read_text()

class Endless(Sort):
    num_tasks = 0

class Other:
    num_tasks = None
    def __init__(self, prompts):
        pass
"""

REWARDS = """
def one(line):
    return 1.0

def three(line, answer, tokenizer):
    return 1.0

def text(line, answer):
    return "1"

def nothing(line, answer):
    if answer == line["answer"]:
        return 1.0

async def later(line, answer):
    return nothing(line, answer)

class Scores:
    def __init__(self, line, answer):
        pass

def huge(line, answer):
    return 1e39
"""


def scored_by(name):
    file = "FOLDER/rewards.py"
    return {"rl.env": "jsonl", "rl.prompts": "FOLDER/p.jsonl", "rl.reward": f"{file}:{name}"}


FIRST = "'FOLDER/rewards.py:{}', of line 1 of rl.prompts and the answer '{}', returns a".format
REFUSED = [
    (scored_by("one"), "rl.reward: 'FOLDER/rewards.py:one' takes (line), but is called with"),
    (scored_by("three"), "rl.reward: 'FOLDER/rewards.py:three' takes (line, answer, tokenizer), b"),
    (scored_by("text"), f"rl.reward: {FIRST('text', 'b')} str that is no finite number"),
    (scored_by("nothing"), f"rl.reward: {FIRST('nothing', '')} NoneType that is no finite number"),
    (scored_by("later"), f"rl.reward: {FIRST('later', '')} NoneType that is no finite number"),
    (scored_by("Scores"), f"rl.reward: {FIRST('Scores', 'b')} Scores that is no finite number"),
    (
        scored_by("huge"),
        f"rl.reward: {FIRST('huge', 'b')[:-1]}1e+39; the sum of a trajectory's rewards is at most",
    ),
    ({"rl.env": "sorted"}, "rl.env: 'sorted' is neither sort, "),
    ({"rl.env": "FOLDER/none.py:Even"}, "rl.env: 'FOLDER/none.py:Even' is neither "),
    ({"rl.env": "FOLDER/bad.py:Nobody"}, "rl.env: cannot load 'FOLDER/bad.py:Nobody': "),
    ({"rl.env": "FOLDER/bad.py:Raises"}, "rl.env: 'FOLDER/bad.py:Raises' cannot be made: FileNot"),
    ({"rl.env": "FOLDER/bad.py:Endless"}, "rl.env: 'FOLDER/bad.py:Endless': its num_tasks is 0; "),
    ({"rl.env": "FOLDER/bad.py:Other"}, "rl.env: 'FOLDER/bad.py:Other' has no method episode"),
    ({"rl.env_args": "[6]"}, "rl.env_args: '[6]' is not a JSON object"),
    ({"rl.env_args": '{"mots": 6}'}, """rl.env_args: '{"mots": 6}': """),
    ({"rl.env": "jsonl", "rl.reward": "exact"}, "rl.prompts: not set, and rl.env 'jsonl' needs"),
    (
        {"rl.env": "jsonl", "rl.reward": "exact", "rl.prompts": "FOLDER/none.jsonl"},
        "rl.prompts: 'FOLDER/none.jsonl' cannot be read",
    ),
    (
        {"rl.env": "jsonl", "rl.reward": "good", "rl.prompts": "FOLDER/p.jsonl"},
        "rl.reward: 'good' is neither exact, math, zero nor FILE.py:NAME",
    ),
    ({"rl.group_size": 3}, "rl.group_size: 3 does not divide the 16 trajectories"),
    ({"rl.cache_tokens": 10**15}, "rl.cache_tokens: 1000000000000000 takes about "),
    ({"rl.max_sequences": 10**12}, "rl.max_sequences: 1000000000000 takes about "),
    ({"rl.clip_low": 0.1, "rl.ratio": "current"}, "rl.clip_low: 0.1 contradicts rl.ratio 'curr"),
    (
        {"rl.resample": 1, "rl.advantage": "reinforce_pp"},
        "rl.resample: 1 contradicts rl.advantage 'reinforce_pp'",
    ),
    (
        {"rl.supervised_lr": 0.1, "rl.supervised_steps": 0},
        "rl.supervised_lr: 0.1 contradicts rl.supervised_steps 0",
    ),
    (
        {"rl.eval_temperature": 0.5, "rl.eval_tasks": 0},
        "rl.eval_temperature: 0.5 contradicts rl.eval_tasks 0",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_a_dry_run_refuses_what_a_run_refuses(values, message, tmp_path, capsys):
    (tmp_path / "bad.py").write_text(BAD_ENVIRONMENTS)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 9)
    values = {k: str(v).replace("FOLDER", str(tmp_path)) for k, v in values.items()}
    if values.get("rl.env") == "jsonl":  # it has no demonstrations
        values["rl.supervised_steps"] = "0"
    for words in ([], ["--dry_run"]):
        assert run([*words_of(tmp_path / "out", **values), *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {message.replace('FOLDER', str(tmp_path))}")
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("score", "says"),
    [
        (
            "len(answer) / len(line['solution'])",
            "the answers '7' and '', failed .raised.: KeyError: ",
        ),
        ("float(int(answer) == line['answer'])", "the answer '', failed .raised.: ValueError: inv"),
        ("time.sleep(3600)", "failed .timeout.: no answer within rl.step_timeout"),
    ],
)
def test_a_reward_function_that_fails_on_trial_is_told_of(score, says, tmp_path, caplog):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "3+4", "answer": 7}\n')
    text = f"import time\n\ndef score(line, answer):\n    return {score}\n"
    (tmp_path / "rewards.py").write_text(text)
    name = f"{tmp_path}/rewards.py:score"
    prompts = Prompts(ByteTokenizer(), chat=False)
    try_reward(Jsonl(prompts, f"{tmp_path}/prompts.jsonl", name), name, 0.2)
    (line,) = caplog.messages
    assert re.search(f"^rl.reward: '{name}', .*{says}", line)


@pytest.mark.parametrize(
    ("score", "line", "says"),
    [
        ("len(answer) / len(line['solution'])", {"answer": 7}, "answers '7' and '', .*KeyError: "),
        ("answer and line['solution']", {"answer": 7}, "answer '7', .* KeyError: 'solution'"),
        ("line['solution']", {}, "answer '', failed .raised.: KeyError: 'solution'"),
        ("float(int(answer) == line['answer'])", {"answer": 7}, None),
        ("0.5", {"answer": 7}, None),
    ],
)
def test_a_dry_run_ends_with_1_if_the_reward_fails(score, line, says, tmp_path, capsys):
    """The failure is said once. A function may well refuse an empty text."""
    (tmp_path / "p.jsonl").write_text((json.dumps({"prompt": "3+4", **line}) + "\n") * 9)
    text = f"def score(line, answer):\n    return float({score} or 0)\n"
    (tmp_path / "rewards.py").write_text(text)
    values = {k: x.replace("FOLDER", str(tmp_path)) for k, x in scored_by("score").items()}
    words = words_of(tmp_path / "out", **values, **{"rl.supervised_steps": "0"})
    assert run([*words, "--dry_run"]) == (0 if says is None else 1)
    out, error = capsys.readouterr()
    if says is None:
        assert json.loads(out)["rl"]["env"] == "jsonl"
    else:
        name = f"{tmp_path}/rewards.py:score"
        says = f"failed: rl.reward: '{name}', of line 1 of rl.prompts and the {says}"
        assert re.fullmatch(f"{says}.*\n", error)


def test_prompts_without_room_for_an_answer_are_told_of(tmp_path, caplog):
    """Trajectories of such prompts are dropped, or their answers cut (test_collect.py)."""
    file = tmp_path / "lines.jsonl"
    lines = [{"prompt": "x" * size, "answer": "a"} for size in (3, 12, 9, 5)]
    file.write_text("\n".join(map(json.dumps, lines)))
    environment = Jsonl(Prompts(ByteTokenizer(), chat=False), str(file), "exact")
    said = {}
    for seq_len in (11, 12, 13, 16):
        caplog.clear()
        environment.warn_of_room(seq_len, 4)
        said[seq_len] = "".join(caplog.messages)
    of, to = "rl.prompts: of the first 4 prompts", "(line 2: 12); raise data.seq_len"
    assert said[11].startswith(f"{of} 1 have so many tokens that answers to them are dropped {to}")
    assert said[12].startswith(f"{of} 1 have so many tokens that answers to them are dropped {to}")
    assert said[12].endswith("12 to 16, or leave them out")
    cut = f"{of} 1 have so many tokens that answers to them are cut early {to} 13 to 16"
    assert said[13].startswith(cut)
    assert said[16] == ""
    task = {"rl.env": "jsonl", "rl.prompts": str(file), "rl.reward": "exact", "rl.eval_tasks": 1}
    words = words_of(tmp_path, **task, **{"data.seq_len": 12, "rl.supervised_steps": 0})
    assert run([*words, "--dry_run"]) == 0
    assert any("are dropped (line 2" in message for message in caplog.messages)


def test_a_dry_run_shows_the_first_prompt_as_the_policy_reads_it(tmp_path, capsys):
    """ChatML is the template of the byte tokenizer."""
    file = tmp_path / "lines.jsonl"
    lines = [{"prompt": "3+4?\n\x1b", "answer": "7"}, {"prompt": "x" * 500, "answer": "7"}]
    task = {"rl.env": "jsonl", "rl.prompts": str(file), "rl.reward": "exact", "rl.eval_tasks": 1}
    words = words_of(tmp_path, **task, **{"data.seq_len": 999, "rl.supervised_steps": 0})
    says = "rl.prompts: the first prompt, as the policy reads it"
    chat = "<|im_start|>user\\n3+4?\\n\\x1b<|im_end|>\\n<|im_start|>assistant\\n"
    for first, more, shown in (
        (0, [], "(6 tokens): 3+4?\\n\\x1b"),
        (
            0,
            ["--rl.chat", "yes"],
            f"({len(chat.encode().decode('unicode_escape'))} tokens): {chat}",
        ),
        (1, [], f"(500 tokens): {'x' * 200} ... {'x' * 200}"),
    ):
        file.write_text("\n".join(map(json.dumps, (lines[first], lines[1 - first]))))
        assert run([*words, *more, "--dry_run"]) == 0
        assert f"{says} {shown}\nmemory on" in capsys.readouterr().err


def test_demonstrations_that_only_a_recipe_asks_for_are_said_to_be_its(tmp_path, capsys):
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps({"prompt": "3+4", "answer": "7"}))
    task = ["--rl.env", "jsonl", "--rl.prompts", str(file), "--rl.reward", "exact"]
    assert run([*task, "--dry_run"]) == 2
    error = capsys.readouterr().err
    says = "32 (recipe rl-sort), but rl.env 'jsonl' has no demonstrations; set model.path without "
    assert error.startswith(f"error: rl.supervised_steps: {says}")
    assert RL.load(None, [*task, f"--model.path={tmp_path}"]).rl.supervised_steps == 0
    assert run([*task, "--rl.supervised_steps", "3", "--dry_run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: rl.supervised_steps: 3, but rl.env 'jsonl' has no dem")


def test_setup_refuses_by_gpu_and_model(capsys):
    words = ["--kernels.backend", "reference", "--train.device", "cuda", "--dry_run"]
    assert run(words) == 2
    assert capsys.readouterr().err.startswith("error: kernels.backend: 'reference' has no gener")
    assert run(["--rl.routing_replay", "true", "--model.preset", "qwen3-0.6b", "--dry_run"]) == 2
    assert capsys.readouterr().err.startswith("error: rl.routing_replay: True, but qwen3 has no")


def test_a_recipes_supervised_lr_is_dropped_without_supervised_steps(capsys):
    shown = []
    for words in ([], ["--rl.supervised_steps", "0"]):
        assert run([*words, "--dry_run"]) == 0
        shown.append(json.loads(capsys.readouterr().out)["rl"]["supervised_lr"])
    assert shown == [3e-3, None]
    assert run(["--rl.supervised_steps", "0", "--rl.supervised_lr", "3e-3", "--dry_run"]) == 2
    error = capsys.readouterr().err  # a user's own is an error
    assert error.startswith("error: rl.supervised_lr: 0.003 contradicts rl.supervised_steps 0")


# ---- memory ------------------------------------------------------------------------------------


def test_the_estimate_counts_what_generation_takes(tmp_path):
    trainer = RlTrainer(config_of(tmp_path, **{"rl.cache_tokens": 640, "rl.supervised_steps": 0}))
    sizes = trainer.config, trainer.engine.arch, trainer.world.dims, torch.float32
    found = estimate_memory(*sizes, trainer.session.sleep)
    # Without norms.
    assert found.generator == pytest.approx(_replica_bytes(trainer.engine), rel=0.02)
    trainer.sync_weights()
    trainer.roll_out()
    caches = trainer.generator.steps.caches
    assert found.cache == sum(c.keys_PZGd.nbytes + c.values_PZGv.nbytes for c in caches)
    plain = estimate_memory(*sizes)
    assert found.total == pytest.approx(plain.total + found.generator + found.cache)
    assert (plain.generator, plain.cache) == (0, 0)
    assert "cache" not in plain.describe()


def thirty_billion(*words):
    """Estimate the step of 24 layers on 4 GPUs with an awake generator."""
    sizes = ["parallel.ep=4", "train.global_batch_size=256", "data.seq_len=4096", "rl.env=sort"]
    sizes += ["train.micro_batch_size=2", "compile.enabled=yes"]
    config = Config.load("bench-qwen3-30b-a3b-24l", [*sizes, *words], environ={})
    arch = resolve_architecture(config.model)
    return config, arch, ParallelDims.resolve(config.parallel, 4, arch), torch.bfloat16


def test_as_much_sleeps_as_memory_asks_for():
    sizes = thirty_billion()
    never, cache, whole = (estimate_memory(*sizes, sleep) for sleep in ("never", "cache", "all"))
    # 64 rows of 4096 tokens, 2 x 4 heads of 128 numbers in each of 24 layers, bf16.
    assert never.cache == 64 * 4096 * 24 * 2 * 4 * 128 * 2
    assert whole.total < cache.total < never.total
    for capacity, expected in ((300, "never"), (cache.total * 1.11 / GIB, "cache"), (60, "all")):
        assert RankSizes.least_sleep(RankSizes.of_ranks(*sizes), capacity * GIB) == expected
    for asked in ("never", "cache", "all"):
        assert (
            RankSizes.least_sleep(RankSizes.of_ranks(*thirty_billion(f"rl.sleep={asked}")), GIB)
            == asked
        )


def test_moments_that_are_away_make_room_for_generation():
    sizes, words = thirty_billion(), ["rl.cache_tokens=1000000"]
    there, away = (
        estimate_memory(*thirty_billion(*words, f"rl.offload={offload}"), "all")
        for offload in ("false", "true")
    )
    assert there.total > away.total
    assert there.activations == 0  # generation takes most
    capacity = 80 * GIB
    with pytest.raises(ConfigError, match=r"^rl\.cache_tokens: 1000000 takes about .* Lower it"):
        there.check(thirty_billion(*words)[0], capacity)
    estimate_memory(*sizes, "all").check(sizes[0], 140 * GIB)


def test_a_dry_run_says_what_generation_takes(capsys):
    assert run(["--dry_run", "--train.device", "cpu"]) == 0
    said = capsys.readouterr().err
    assert re.fullmatch(r"memory on 1 x CPU .*, generator 0\.\d, cache 0\.\d\nfits: .*\n", said)


# ---- sleep -------------------------------------------------------------------------------------


@pytest.mark.tier("long")
def test_a_generator_that_sleeps_makes_the_same_run(tmp_path):
    (tmp_path / "even.py").write_text(EVEN)
    values = {"rl.env": f"{tmp_path}/even.py:Even", "rl.max_staleness": 1, "train.steps": 5}
    fitted(tmp_path / "never", **values, **{"rl.sleep": "never"})
    for sleep in ("cache", "all"):
        trainer = RlTrainer(config_of(tmp_path / sleep, **values, **{"rl.sleep": sleep}))
        seen, update = [], trainer.learner.update

        def look(*args, seen=seen, update=update, generator=trainer.generator):
            bytes_of = [p.untyped_storage().nbytes() for p in generator.model.parameters()]
            caches = [c for c in generator.steps.caches if c.keys_PZGd is not None]
            seen.append((generator.is_asleep, sum(bytes_of) == 0, len(caches)))
            return update(*args)

        trainer.learner.update = look
        trainer.fit()
        assert seen == [(True, sleep == "all", 0)] * 5
        assert lines_of(tmp_path / sleep) == lines_of(tmp_path / "never")


# ---- temperature -------------------------------------------------------------------------------


def test_what_is_trained_is_what_was_sampled_at_any_temperature(tmp_path):
    (tmp_path / "even.py").write_text(EVEN)
    values = {"rl.env": f"{tmp_path}/even.py:Even", "rl.ratio": "rollout", "rl.temperature": 0.7}
    fitted(tmp_path / "out", **values)
    rows = [row for row in lines_of(tmp_path / "out") if "reward" in row]
    for row in rows:
        assert row["ratio"] == pytest.approx(1, abs=1e-6)
        assert row["ratio_square"] == pytest.approx(1, abs=1e-6)
        assert row["mismatch"] < 1e-11
        assert row["clip_share"] == 0


# ---- identity ----------------------------------------------------------------------------------


def in_folder(folder):
    """Return a run's settings, with its prompts and its reward in ``folder``."""
    return {
        "rl.env": "jsonl",
        "rl.prompts": folder / "p.jsonl",
        "rl.reward": f"{folder}/reward.py:even",
        "rl.supervised_steps": 0,
        "checkpoint.interval": 1,
    }


@pytest.mark.tier("long")
def test_a_moved_folder_goes_on_edited_code_too_and_edited_prompts_do_not(tmp_path, caplog):
    first, moved = tmp_path / "first", tmp_path / "moved"
    first.mkdir()
    lines = [f'{{"prompt": "{i} even "}}\n' for i in range(20)]
    (first / "p.jsonl").write_text("".join(lines))
    (first / "reward.py").write_text(
        "def even(line, answer):\n    return sum(ord(c) % 2 == 0 for c in answer) / 6\n"
    )
    out = tmp_path / "out"
    fitted(out, **in_folder(first), **{"train.steps": 1})
    shutil.move(first, moved)
    fitted(out, **in_folder(moved), **{"train.steps": 2})
    assert [row["step"] for row in lines_of(out) if "reward" in row] == [1, 2]
    values = in_folder(moved) | {"train.steps": 3}
    before = (moved / "p.jsonl").read_text()
    (moved / "p.jsonl").write_text(before + "\n\n")
    with pytest.raises(ConfigError, match=r"^rl\.prompts: .* was edited since; .*never"):
        RlTrainer(config_of(out, **values))
    (moved / "p.jsonl").write_text(before)
    with pytest.raises(ConfigError, match=r"^rl\.eval_tasks: 4 of 20 is not what "):
        RlTrainer(config_of(out, **values, **{"rl.eval_tasks": 4}))
    fitted(out, **values)
    (moved / "reward.py").write_text("def even(line, answer):\n    return float(len(answer))\n")
    for steps in (3, 4):  # for a finished run, and for one that continues
        caplog.clear()
        fitted(out, **values | {"train.steps": steps})
        warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        newest = out / "checkpoints" / "step-00000003"
        assert warned == [
            f"rl.reward: the code was edited since {newest}; the run goes on with the code as it "
            "is now"
        ]
    assert lines_of(out)[-1]["eval_reward"] > 1
    other = values | {"rl.reward": f"{moved}/reward.py:odd", "train.steps": 5}
    (moved / "reward.py").write_text("def odd(line, answer):\n    return 0.0\n")
    with pytest.raises(ConfigError, match=r"^rl\.reward: .* is not what "):
        RlTrainer(config_of(out, **other))


COUNTED = """
from moetrain.rl.envs.shipped import Sort

class Counted(Sort):
    num_tasks = 30
"""


def test_an_edited_environment_has_as_many_tasks_as_before(tmp_path):
    """Otherwise a task that is now held out could have been trained on before."""
    file, out = tmp_path / "counted.py", tmp_path / "out"
    file.write_text(COUNTED)
    values = {"rl.env": f"{file}:Counted", "rl.supervised_steps": 0, "train.steps": 1}
    fitted(out, **values)
    before = file.stat()
    file.write_text(COUNTED.replace("30", "40"))  # the same length, in the same second
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ConfigError, match=r"^rl\.eval_tasks: 5 of 40 is not what .* edited since"):
        RlTrainer(config_of(out, **values | {"train.steps": 2}))
