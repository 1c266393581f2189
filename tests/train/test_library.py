"""Training from a user's program: data, objectives, callbacks, and the result."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import moetrain
import moetrain.train
from moetrain.checkpoint.read import list_checkpoints, open_checkpoint
from moetrain.config import Config, ConfigError
from moetrain.config.sources import RunFailed
from moetrain.data.packing import IGNORE_INDEX
from moetrain.train.callbacks import Best, Callback
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from moetrain.train.objectives import CrossEntropy, Term
from tests.lib.distributed import spawn

SIZE = 32


def rows_of(number, seed=0, length=SIZE):
    return np.random.default_rng(seed).integers(0, 256, (number, length)).tolist()


class Counting(IterableDataset):
    """A stream whose state is a number; it records what it yields."""

    def __init__(self, number=1000):
        self.number, self.at, self.given = number, 0, []

    def __iter__(self):
        while self.at < self.number:
            self.at += 1
            self.given.append(self.at)
            yield np.full(SIZE, self.at % 256)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Plain:
    """An iterable without state, which can be restarted."""

    def __init__(self, number):
        self.number = number

    def __iter__(self):
        return iter(rows_of(self.number))


@pytest.fixture
def own(tiny_words):
    """Return ``own("train.steps=2", ...)``: settings without data."""

    def make(*overrides):
        words = [w for w in tiny_words if not w.startswith(("data.source", "data.path"))]
        words = [w for w in words if not w.startswith("data.eval_fraction")]
        return Config.load(None, [*words, *overrides], environ={})

    return make


def losses(folder):
    return {r["step"]: r["loss"] for r in read_metrics(folder / "metrics.jsonl") if "loss" in r}


def test_trainer_is_one_class_under_both_names():
    assert moetrain.Trainer is moetrain.train.Trainer is Trainer


# ---- data --------------------------------------------------------------------------------------


def test_a_row_may_be_short_or_have_labels(own):
    rows = [[1, 2, 3], {"input_ids": torch.tensor([4, 5, 6]), "labels": [-100, -100, 6]}]
    trainer = Trainer(own(), data=rows)
    short, labelled = (trainer.data.train.row(i) for i in (0, 1))
    assert short.tokens_S[:4].tolist() == [1, 2, 3, 0]
    assert short.targets_S[:3].tolist() == [2, 3, IGNORE_INDEX]
    assert labelled.targets_S[:3].tolist() == [IGNORE_INDEX, 6, IGNORE_INDEX]
    assert short.is_pad_S.tolist() == [False] * 3 + [True] * (SIZE - 3)
    assert Trainer(own("output_dir=" + str(trainer.folder) + "2"), data=rows).fit().step == 4


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (list(range(SIZE + 1)), "1 to 32 token ids"),
        ([[1, 2]], "of shape"),
        ([0.5], "float64"),
        ([1, 100_000], "token 100000; the model's are 0 to"),
    ],
)
def test_a_row_that_is_none_is_named(row, says, own):
    with pytest.raises(ConfigError, match=says):
        Trainer(own(), data=[row]).fit()


def test_settings_of_data_beside_rows_are_refused(tiny, own):
    with pytest.raises(ConfigError, match=r"data\.source: set, but the program gives rows"):
        Trainer(tiny(), data=rows_of(3))
    with pytest.raises(ConfigError, match=r"train\.epochs: .*no length; give train\.steps"):
        Trainer(own("train.epochs=1", "train.steps=none"), data=Counting())
    with pytest.raises(ConfigError, match=r"train\.patience: .*eval_data="):
        Trainer(own("train.patience=1", "train.eval_interval=1"), data=rows_of(3))
    with pytest.raises(ConfigError, match=r"train\.target_loss: .*eval_data="):
        Trainer(own("train.target_loss=1", "train.eval_interval=1"), data=rows_of(3))
    with pytest.raises(ConfigError, match=r"checkpoint\.best: .*eval_data="):
        Trainer(own("checkpoint.best=yes", "train.eval_interval=1"), data=rows_of(3))


@pytest.mark.tier("long")
def test_a_checkpoint_is_trained_on_rows_without_a_path_of_data(own, tmp_path):
    folder = Trainer(own("train.steps=1", "checkpoint.save_hf=yes"), data=rows_of(4)).fit().folder
    words = [f"model.path={folder / 'hf'}", f"output_dir={tmp_path / 'more'}", "train.steps=1"]
    words += ["train.global_batch_size=2", "train.micro_batch_size=2", f"data.seq_len={SIZE}"]
    words += ["data.tokenizer=byte"]
    config = Config.load(None, words, environ={})
    assert Trainer(config, data=rows_of(2)).fit().step == 1
    with pytest.raises(ConfigError, match=r"data\.path: not set, and data\.source 'text' needs it"):
        Trainer(config)


def test_rows_need_no_tokenizer(own, tmp_path):
    folder = Trainer(own("train.steps=1", "checkpoint.save_hf=yes"), data=rows_of(4)).fit().folder
    assert not list((folder / "hf").glob("*token*"))
    words = [f"model.path={folder / 'hf'}", f"output_dir={tmp_path / 'more'}", "train.steps=1"]
    words += ["train.global_batch_size=2", "train.micro_batch_size=2", f"data.seq_len={SIZE}"]
    words += ["checkpoint.save_hf=yes"]
    config = Config.load(None, words, environ={})
    assert Trainer(config, data=rows_of(2)).fit().step == 1
    assert not list((tmp_path / "more" / "hf").glob("*token*"))
    prompted = config.filled({"train.sample_prompt": "a"}, "a program")
    with pytest.raises(ConfigError, match=r"^train\.sample_prompt: .*data\.tokenizer"):
        Trainer(prompted, data=rows_of(2))
    with pytest.raises(ConfigError, match=r"^data\.packing: set, but the program gives rows"):
        Trainer(config.filled({"data.packing": "whole"}, "a program"), data=rows_of(2))


@pytest.mark.parametrize("word", ["train.sample_tokens=0", "train.sample_prompt=none"])
def test_what_a_recipe_proposes_or_a_user_unsets_does_not_contradict_rows(word, tmp_path):
    words = [word, "train.steps=1", f"output_dir={tmp_path}", f"data.seq_len={SIZE}"]
    config = Config.load(None, [*words, "model.num_layers=1"], environ={})
    Trainer(config, data=rows_of(2))


def test_held_out_rows_without_a_target_are_left_out_of_the_mean(own, tmp_path, capsys):
    silent = [{"input_ids": row, "labels": [-100] * SIZE} for row in rows_of(3, seed=1)]
    found = {}
    for name, sets in {
        "good": {"good": rows_of(3, seed=2)},
        "both": {"silent": silent, "good": rows_of(3, seed=2)},
        "none": silent,
    }.items():
        config = own("train.steps=1", f"output_dir={tmp_path / name}")
        folder = Trainer(config, data=rows_of(4), eval_data=sets).fit().folder
        (found[name],) = [r for r in read_metrics(folder / "metrics.jsonl") if "eval_loss" in r]
    assert found["both"]["eval_loss"] == found["both"]["eval_loss/good"] > 0
    assert found["both"]["eval_loss"] == found["good"]["eval_loss"]
    assert found["both"]["eval_loss/silent"] is found["none"]["eval_loss"] is None
    said = capsys.readouterr()
    assert "held-out rows of silent have no target token" in said.out + said.err
    assert "the held-out rows have no target token" in said.out + said.err


@pytest.mark.tier("long")
@pytest.mark.parametrize("kind", ["stateful", "plain", "sequence"])
def test_a_resumed_run_reads_on_where_it_was(kind, own, tmp_path):
    """There are eleven rows and four per step: the iterables restart within a step."""
    make = {"stateful": lambda: Counting(11), "plain": lambda: Plain(11), "sequence": rows_of}[kind]
    make = (lambda: rows_of(11)) if kind == "sequence" else make
    words = ["train.steps=6", "checkpoint.interval=4", "checkpoint.keep=9", "optim.lr=1e-2"]
    straight = Trainer(own(*words), data=make()).fit()
    expected = losses(straight.folder)
    source = straight.folder / "checkpoints" / "step-00000004"
    again = own(*words, f"checkpoint.resume={source}", f"output_dir={tmp_path / 'again'}")
    resumed = Trainer(again, data=make()).fit()
    found = losses(resumed.folder)
    assert found == {step: expected[step] for step in (5, 6)}


def test_a_generator_that_ends_says_what_to_give(own):
    with pytest.raises(RunFailed, match="ended after 6 rows and cannot be read again"):
        Trainer(own(), data=(row for row in rows_of(6))).fit()


def stream_on_ranks(words):
    stream = Counting()
    result = Trainer(Config.load(None, words, environ={}), data=stream).fit()
    return result.step, stream.given[-1], losses(result.folder)


@pytest.mark.tier("long")
def test_ranks_share_a_stream(own, tiny_words, tmp_path):
    words = [w for w in tiny_words if not w.startswith(("data.source", "data.path", "data.eval"))]
    alone = stream_on_ranks([*words, f"output_dir={tmp_path / 'alone'}"])
    for found in spawn(2, stream_on_ranks, [*words, "parallel.dp_shard=2"]):
        assert found[:2] == alone[:2] == (4, 16)
        assert found[2] == pytest.approx(alone[2], rel=1e-4)


# ---- objectives --------------------------------------------------------------------------------


class Confident(CrossEntropy):
    """The cross-entropy, with a penalty for log-partition functions far from 0."""

    def terms(self, model, outputs, batch, sizes):
        hidden_TD, targets_T = outputs.hidden_BSD.flatten(0, 1), batch.targets_BS.flatten()
        lse_T = model.vocabulary.token_losses(hidden_TD, model.head_weight, targets_T).lse_T
        price = (lse_T.square() * (targets_T >= 0)).sum() / sizes["targets"] * outputs.share
        return super().terms(model, outputs, batch, sizes) | {"price": Term(price, 0.1)}


def test_an_objective_of_ones_own_is_minimised_logged_and_evaluated(own):
    sets = {"near": rows_of(3), "far": rows_of(5, seed=1)}
    config = own("optim.lr=1e-2", "train.eval_interval=2", "train.steps=6")
    result = Trainer(config, data=rows_of(8), eval_data=sets, objective=Confident()).fit()
    rows = read_metrics(result.folder / "metrics.jsonl")
    trained = [row for row in rows if "loss" in row]
    assert trained[-1]["price"] < trained[0]["price"]
    (first, *_, last) = [row for row in rows if "eval_loss" in row]
    keys = {f"eval_{term}{of}" for term in ("loss", "price") for of in ("", "/near", "/far")}
    assert set(first) == {"step", "eval_seconds"} | keys
    assert last["eval_loss"] == pytest.approx((last["eval_loss/near"] + last["eval_loss/far"]) / 2)
    assert result.best_value == min(row["eval_loss"] for row in rows if row.get("eval_loss"))


# ---- callbacks ---------------------------------------------------------------------------------


class Diary(Callback):
    """Records the hooks; it ends the run at ``last``, and its state is the steps that it saw."""

    def __init__(self, last=99):
        self.said, self.rows, self.last, self.seen = [], [], last, 0

    def on_start(self, run):
        self.said.append(f"start {run.step}")

    def on_step(self, run):
        self.seen += 1
        self.said.append(f"step {run.step}")
        if run.step == self.last:
            run.end("the diary is full")

    def on_update(self, run):
        self.said.append(f"update {run.step}")

    def on_last_step(self, run):
        self.said.append("last")

    def on_log(self, run, row):
        self.said.append("log")
        self.rows.append(dict(row))

    def on_evaluate(self, run, row):
        self.said.append("evaluate")

    def on_checkpoint(self, run, path):
        self.said.append(path.name)

    def on_end(self, run, error):
        self.said.append(f"end {error!r}")

    def state(self):
        return {"seen": self.seen}

    def load_state(self, state):
        self.seen = state["seen"]


@pytest.mark.tier("long")
def test_a_callback_sees_the_run_and_ends_it(own, capsys):
    diary, words = Diary(last=3), ("train.eval_interval=2", "train.steps=9")
    result = Trainer(own(*words), data=rows_of(4), eval_data=rows_of(2), callbacks=[diary]).fit()
    said = "start 0;log;evaluate;update 1;log;step 1;update 2;log;log;evaluate;step 2;"
    said += "update 3;log;step 3;step-00000003;last;log;evaluate;end None"
    assert ";".join(diary.said) == said
    assert diary.rows == list(read_metrics(result.folder / "metrics.jsonl"))
    assert [row["step"] for row in diary.rows] == [0, 1, 2, 2, 3, 3]
    assert (result.step, result.reason) == (3, "the diary is full")
    assert result.checkpoint.name == "step-00000003"
    assert result.loss == losses(result.folder)[3]
    assert capsys.readouterr().out.count("ended at step 3: the diary is full") == 1
    again = Diary()
    result = Trainer(own(*words, "train.steps=4"), data=rows_of(4), callbacks=[again]).fit()
    assert (again.seen, result.step, result.reason) == (4, 4, "train.steps")
    state = json.loads((result.checkpoint / "state.json").read_text())
    assert state["callbacks"]["Diary.1"] == {"seen": 4}


def test_a_callback_that_raises_ends_the_run_and_the_others(own):
    class Raises(Callback):
        def on_step(self, run):
            raise KeyError("mine")

    diary = Diary()
    with pytest.raises(KeyError, match="mine"):
        Trainer(own(), data=rows_of(4), callbacks=[diary, Raises()]).fit()
    assert diary.said[-1] == "end KeyError('mine')"


class OnOneRank(Callback):
    """Ends the run on the last rank alone."""

    def on_step(self, run):
        if run.step == 2 and run.world.rank == run.world.size - 1:
            run.end("enough here")


def ended_on_ranks(words):
    config = Config.load(None, [*words, "train.steps=9"], environ={})
    return Trainer(config, callbacks=[OnOneRank()]).fit().step


@pytest.mark.tier("long")
def test_ranks_end_together_whoever_asks(tiny_words):
    assert spawn(2, ended_on_ranks, [*tiny_words, "parallel.dp_shard=2"]) == [4, 4]


# ---- the best checkpoint -----------------------------------------------------------------------


class Scripted(Trainer):
    """Evaluates to given numbers."""

    values: tuple[float, ...] = (9.0, 3.0, 2.0, 5.0, 4.0, 6.0, 1.0)

    def evaluate(self):
        if self.evaluated_at != self.step:
            self.evaluated_at = self.step
            self.report({"eval_loss": self.values[self.step]})


@pytest.mark.tier("long")
def test_the_best_checkpoint_is_kept_and_a_run_without_progress_ends(tiny, tmp_path):
    words = ["train.steps=6", "train.eval_interval=1", "train.patience=3", "checkpoint.best=yes"]
    words += ["checkpoint.interval=1", "checkpoint.keep=1"]
    result = Scripted(tiny(*words)).fit()
    assert (result.step, result.best_step, result.best_value) == (5, 2, 2.0)
    root = result.folder / "checkpoints"
    assert [path.name for path in list_checkpoints(root)] == ["step-00000002", "step-00000005"]
    assert (root / "best").resolve() == result.best.resolve() == (root / "step-00000002").resolve()
    assert "no better in 3 evaluations (train.patience)" in result.reason
    # Its patience is still exhausted, and longer patience continues with the earlier best.
    assert Scripted(tiny(*words)).fit().step == 5
    result = Scripted(tiny(*words, "train.patience=4")).fit()
    assert (result.step, result.best_step) == (6, 6)
    assert (root / "best").resolve().name == "step-00000006"


def test_a_run_ends_at_its_target_of_the_held_out_loss(tiny, capsys):
    words = ["train.steps=6", "train.eval_interval=1", "checkpoint.save_hf=yes"]
    result = Scripted(tiny(*words, "train.target_loss=3")).fit()
    reason = "the held-out loss at step 1 is 3.0000, at or below 3.0 (train.target_loss)"
    assert (result.step, result.reason) == (1, reason)  # as low as the target is low enough
    said = capsys.readouterr().out
    assert [reason in line for line in said.splitlines()].count(True) == 1
    assert result.checkpoint.name == "step-00000001"
    assert (result.folder / "hf").exists()
    # It still has its reason. With a lower target it goes on.
    result = Scripted(tiny(*words, "train.target_loss=3")).fit()
    assert (result.step, result.reason) == (1, reason)
    result = Scripted(tiny(*words, "train.target_loss=1.5", "train.steps=5")).fit()
    assert (result.step, result.reason) == (5, "train.steps")
    # The last evaluation, 6.0, counts. The best one, 2.0, had other weights.
    result = Scripted(tiny(*words, "train.target_loss=2.5")).fit()
    assert (result.step, "step 6 is 1.0000" in result.reason) == (6, True)


def test_neither_the_untrained_model_nor_a_loss_that_is_not_finite_reaches_the_target(tiny):
    class Low(Scripted):
        values = (0.5, float("nan"), 2.0, 0.7, 0.1)

    words = ["train.eval_interval=1", "train.target_loss=1"]
    result = Low(tiny(*words)).fit()
    assert (result.step, "step 3 is 0.7000" in result.reason) == (3, True)


def test_a_target_is_reached_at_evaluations_alone(tiny):
    class Falling(Scripted):
        values = (9.0, 1.0, 5.0, 1.0, 1.0)

    result = Falling(tiny("train.eval_interval=2", "train.target_loss=2")).fit()
    assert (result.step, "step 4 is" in result.reason) == (4, True)


def test_exports_have_the_weights_of_the_best_evaluation(tiny, capsys):
    """A run whose evaluations are best at step 2 of 4, and one that keeps no checkpoint of it."""
    words = ["train.steps=4", "train.eval_interval=1", "checkpoint.save_hf=yes"]
    trainer = Scripted(tiny(*words, "train.patience=9", "checkpoint.best=yes"))
    result = trainer.fit()
    assert (result.step, result.best_step) == (4, 2)
    exported = dict(moetrain.load_hf(str(result.folder / "hf")).named_parameters())
    kept = {step: weights_at(result.folder, step) for step in (2, 4)}
    assert all(torch.equal(exported[name], weight) for name, weight in kept[2].items())
    assert not all(torch.equal(exported[name], weight) for name, weight in kept[4].items())
    for name, held in trainer.model.named_parameters():
        assert torch.equal(held.to_local(), kept[2][name])
    assert "hf: the weights of step 2, the best evaluation" in capsys.readouterr().out
    # Without a checkpoint of it there is only the last step, which is said.
    result = Scripted(tiny(*words, "train.patience=9", "checkpoint.resume=never")).fit()
    exported = dict(moetrain.load_hf(str(result.folder / "hf")).named_parameters())
    kept = weights_at(result.folder, 4)
    assert all(torch.equal(exported[name], weight) for name, weight in kept.items())
    said = capsys.readouterr().out
    assert (
        "those of the best evaluation, step 2, are kept and exported with checkpoint.best" in said
    )


def weights_at(folder, step):
    """Return the weights in a checkpoint of a run, in fp32, by name."""
    found = open_checkpoint(folder / "checkpoints" / f"step-{step:08}")
    return found.tensors("model")


def test_an_export_says_that_the_best_checkpoint_is_gone(tiny):
    class Losing(Scripted):
        def finish(self):
            shutil.rmtree(self.folder / "checkpoints" / "step-00000002")
            super().finish()

    words = ["train.steps=4", "train.eval_interval=1", "checkpoint.save_hf=yes"]
    with pytest.raises(RunFailed, match=r"hf: the best evaluation was at step 2, and .*step-0+2"):
        Losing(tiny(*words, "checkpoint.best=yes")).fit()


def test_of_rewards_the_highest_is_the_best(tiny):
    trainer = Trainer(tiny())
    best = Best()
    for trainer.step, reward in enumerate((9.0, 0.5, None, 0.7, 0.6)):
        best.on_evaluate(trainer, {"eval_reward": reward})
    assert (best.step, best.value, best.since) == (3, 0.7, 1)
