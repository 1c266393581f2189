"""The training loop: resuming, accumulation, skipping, stopping, and a run's files."""

import functools
import gc
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.text import Text

from moetrain import Trainer
from moetrain.checkpoint.read import list_checkpoints, open_checkpoint
from moetrain.cli.train import main
from moetrain.config import Config, ConfigError, LogSection
from moetrain.config.sources import RunFailed
from moetrain.data.packing import IGNORE_INDEX
from moetrain.generate.weights import Sampled
from moetrain.parallel import apply
from moetrain.train.metrics import UNHEALTHY_LOGS, MetricsLog, read_metrics
from moetrain.train.objectives import CrossEntropy, Pretraining, routing_losses
from tests.lib.command_lines import settled


def fit(config):
    trainer = Trainer(config)
    trainer.fit()
    return trainer


def losses(trainer, key="loss"):
    return {r["step"]: r[key] for r in read_metrics(trainer.reporter.log.path) if key in r}


def weights_of(trainer):
    """Return all whole weights by name, as plain tensors that outlive the run's process group."""
    return {name: x.clone() for name, x in trainer.engine.weights()}


def assert_same_weights(a, b):
    mine, theirs = weights_of(a), weights_of(b)
    assert set(mine) == set(theirs)
    for name, x in mine.items():
        assert torch.equal(x, theirs[name]), name


def gradients(config):
    """Return every gradient of the first step, and that step's result."""
    trainer = Trainer(config)
    kept = {}

    def keep(optimizer, args, kwargs):
        kept.update({n: m.local.grad.clone() for n, m in trainer.engine.fsdp.members.items()})

    trainer.optimizer.register_step_pre_hook(keep)  # the fused update scales them when clipping
    return kept, trainer.train_step()


@pytest.mark.tier("long")
def test_20_steps_equal_10_kill_resume_10_bit_for_bit(tiny, tmp_path):
    straight = fit(tiny("train.steps=20", f"output_dir={tmp_path / 'a'}"))
    halves = ["train.steps=20", f"output_dir={tmp_path / 'b'}"]
    first = Trainer(tiny(*halves))
    step = first.train_step

    def stop_at_10():
        result = step()
        if first.step == 10:  # the next step is given up
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    first.train_step = stop_at_10
    with pytest.raises(SystemExit) as stopped:
        first.fit()
    assert stopped.value.code == 143
    second = Trainer(tiny(*halves))
    assert second.step == 10
    second.fit()
    assert losses(second) == losses(straight)
    assert len(losses(straight)) == 20
    assert_same_weights(second, straight)


@pytest.mark.tier("long")
def test_reruns_are_bitwise_equal_when_deterministic(tiny, tmp_path):
    try:
        runs = [
            fit(tiny("train.deterministic=yes", f"output_dir={tmp_path / name}")) for name in "ab"
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses(runs[0]) == losses(runs[1])
    assert_same_weights(runs[0], runs[1])


@pytest.mark.parametrize("z", ["moe.z_loss_coef=0", "moe.z_loss_coef=0.1"])
def test_gradients_do_not_depend_on_the_split_into_micro_batches(tiny, z):
    common = [z, "moe.aux_loss_coef=1.0", "train.global_batch_size=8"]
    common += ["moe.aux_loss_scope=global_batch"]
    whole, one = gradients(tiny(*common, "train.micro_batch_size=8"))
    split, four = gradients(tiny(*common, "train.micro_batch_size=2"))
    assert routing_losses(four.routing, pooled=False) == pytest.approx(
        routing_losses(one.routing, pooled=False), rel=1e-5
    )
    for name, gradient in whole.items():
        assert (split[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    # The cheaper loss has another gradient, so the exact pass is not redundant.
    router = next(n for n in whole if "router" in n)
    words = [*common, "train.micro_batch_size=2", "moe.aux_loss_scope=micro_batch"]
    cheap, _ = gradients(tiny(*words))
    assert (cheap[router] - whole[router]).norm() > 1e-3 * whole[router].norm()


def test_the_default_runs_no_more_forwards_than_there_are_micro_batches(tiny):
    passes = []
    for scope in ([], ["moe.aux_loss_scope=global_batch"]):
        trainer = Trainer(tiny("train.micro_batch_size=1", "moe.aux_loss_coef=1", *scope))
        backbone, calls = trainer.model.backbone, []
        trainer.model.backbone = lambda *args, b=backbone, c=calls, **kw: (
            c.append(1) or b(*args, **kw)
        )
        trainer.train_step()
        passes.append(len(calls))
    assert passes == [4, 8]


@pytest.mark.tier("long")
@pytest.mark.parametrize("coefficient", [0, 0.01])
def test_the_logged_balance_is_the_global_batchs_whatever_is_trained(tiny, coefficient, tmp_path):
    logged = set()
    splits = ((8, "global_batch"), (2, "global_batch"), (1, "micro_batch"), (4, "micro_batch"))
    for micro_batch, scope in splits:
        words = [f"moe.aux_loss_coef={coefficient}", f"train.micro_batch_size={micro_batch}"]
        words += [f"moe.aux_loss_scope={scope}"] if coefficient else []
        words += ["train.global_batch_size=8", "train.steps=1"]
        trainer = fit(tiny(*words, f"output_dir={tmp_path / f'{micro_batch}{coefficient}'}"))
        logged.add(round(losses(trainer, "load_balancing_loss")[1], 5))
    assert len(logged) == 1
    assert 1.9 < logged.pop() < 4  # K of a uniform router is 2, the most is E


@pytest.mark.parametrize(
    ("words", "pooled"),
    [
        ([], False),
        (["moe.aux_loss_layers=pooled"], True),
        (["model.path=x", "data.source=stdlib"], True),
        (["model.path=x", "data.source=stdlib", "moe.aux_loss_layers=each"], False),
    ],
)
def test_which_form_of_the_balancing_loss_is_trained(words, pooled):
    config = Config.load(None, words, environ={})
    arch = SimpleNamespace(router_aux_loss_coef=0.0, output_router_logits=False, mtp_layers=0)
    assert Pretraining.of(config, arch).is_pooled is pooled


def test_recomputation_changes_no_gradient(tiny):
    kept, _ = gradients(tiny())
    recomputed, _ = gradients(tiny("activation.policy=full"))
    for name, gradient in kept.items():
        torch.testing.assert_close(recomputed[name], gradient)


def poison(trainer, factor):
    """Multiply every gradient by ``factor`` from now on."""
    backward = trainer.engine.fsdp.backward
    trainer.engine.fsdp.backward = lambda loss, *, is_last: backward(loss * factor, is_last=is_last)


def test_a_bad_step_changes_nothing_and_is_counted(tiny):
    trainer = Trainer(tiny("moe.bias_update_rate=0.1"))
    trainer.train_step()
    before = weights_of(trainer)
    poison(trainer, float("nan"))
    result = trainer.train_step()
    assert result.skipped
    assert not torch.isfinite(result.grad_norm)
    for name, x in weights_of(trainer).items():
        assert torch.equal(x, before[name]), name


@pytest.mark.tier("long")
def test_checkpoint_of_a_failed_run_is_marked_and_not_resumed_by_auto(tiny, capsys, tiny_words):
    every = "checkpoint.interval=2"
    trainer = Trainer(tiny("train.steps=50", "train.max_bad_steps=3", every, "checkpoint.keep=1"))
    step, good = trainer.train_step, {}

    def poison_after_5():
        if trainer.step == 5:
            good.update(weights_of(trainer))
            poison(trainer, float("inf"))
        return step()

    trainer.train_step = poison_after_5
    with pytest.raises(RunFailed, match="3 steps in a row") as caught:
        trainer.fit()
    failed = trainer.folder / "checkpoints" / f"failed-step-{trainer.step:08d}"
    assert f"{failed}; only checkpoint.resume" in str(caught.value)
    assert "auto goes on from step-00000004" in str(caught.value)
    assert trainer.step in (8, 9)  # noticed at most one step late
    assert read_metrics(trainer.reporter.log.path)[-1]["skipped_steps"] >= 3
    # Saves of the failed steps (6, 8) would have pruned the good one.
    assert list_checkpoints(failed.parent) == [failed.with_name("step-00000004")]
    assert Trainer(tiny("train.steps=50")).step == 4
    resumed = Trainer(tiny("train.steps=50", f"checkpoint.resume={failed}"))
    assert resumed.step == trainer.step
    for name, x in weights_of(resumed).items():
        assert torch.equal(x, good[name]), name
    # An infinite learning rate fails by itself: exit code 1, one line, no traceback.
    words = ["optim.lr=1e38", "train.max_bad_steps=2", "checkpoint.resume=never", "train.steps=30"]
    assert main(settled([*tiny_words, *words])) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("failed: 2 steps in a row")


def test_a_run_without_one_good_step_fails_however_short(tiny):
    trainer = Trainer(tiny("train.steps=3", "train.max_bad_steps=5"))
    torch.nn.init.constant_(trainer.model.norm.weight, float("nan"))
    with pytest.raises(RunFailed, match="all 3 steps had a non-finite"):
        trainer.fit()
    assert list_checkpoints(trainer.folder / "checkpoints") == []


def test_uneven_routing_is_said_by_the_runs_log(tiny, capsys, caplog):
    words = [f"train.steps={UNHEALTHY_LOGS + 2}", "log.interval=1", "optim.lr=1e-9"]
    trainer = Trainer(tiny(*words, "moe.bias_update_rate=1e-3"))
    for name, buffer in trainer.model.named_buffers():
        if name.endswith("router.bias"):
            buffer[0] -= 100.0  # no token chooses expert 0
    trainer.fit()
    said = " ".join(capsys.readouterr().out.split())
    says = f"experts got no token in {UNHEALTHY_LOGS} logged steps in a row"
    assert said.count(says) == said.count("routing is uneven") == 1
    assert "routing is uneven" not in caplog.text  # every rank has it


def test_a_run_that_is_over_does_nothing_more(tiny):
    trainer = fit(tiny("train.steps=2"))
    before = losses(trainer)
    trainer.fit()
    assert trainer.step == 2
    assert losses(trainer) == before


def test_run_writes_its_files(tiny):
    config = tiny("train.eval_interval=2", "log.tensorboard=yes", "checkpoint.interval=1")
    folder = Trainer(config, callbacks=[Sampled()]).fit().folder
    rows = read_metrics(folder / "metrics.jsonl")
    train_rows = [r for r in rows if "loss" in r]
    fields = ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second_per_device"]
    fields += ["tflops_per_device", "mfu", "memory_gib", "step_seconds", "load_balancing_loss"]
    assert all(set(fields) <= set(r) for r in train_rows)
    assert train_rows[-1]["tokens"] == 4 * 4 * 32
    assert any(k.startswith("expert_load_max/") for k in train_rows[0])
    assert any(k.startswith("router_entropy/") for k in train_rows[0])
    assert [r["step"] for r in rows if "eval_loss" in r] == [0, 2, 4]
    assert json.loads((folder / "config.json").read_text())["train"]["steps"] == 4
    assert (folder / "sample.txt").read_text()
    assert list((folder / "tensorboard").iterdir())
    kept = [p.name for p in list_checkpoints(folder / "checkpoints")]
    assert kept == ["step-00000003", "step-00000004"]
    assert gc.isenabled()


@pytest.mark.parametrize(("interval", "steps"), [(2, [0, 2, 4]), (3, [0, 3, 4]), (0, [4])])
def test_the_first_evaluation_may_be_left_out(tiny, tmp_path, interval, steps):
    words = [f"train.eval_interval={interval}", "checkpoint.interval=1"]
    found = {}
    for word in ("yes", "no"):
        more = [f"train.eval_first={word}", f"output_dir={tmp_path / word}"]
        found[word] = fit(tiny(*words, *more))
    assert list(losses(found["yes"], "eval_loss")) == steps
    left = losses(found["no"], "eval_loss")
    assert left == {k: v for k, v in losses(found["yes"], "eval_loss").items() if k}
    assert losses(found["no"]) == losses(found["yes"])
    assert_same_weights(found["no"], found["yes"])


@pytest.mark.parametrize(("word", "steps"), [("yes", [0, 2, 3, 4]), ("no", [2, 3, 4])])
def test_a_resumed_run_has_no_first_evaluation(tiny, word, steps):
    words = [f"train.eval_first={word}", "train.eval_interval=3", "checkpoint.interval=2"]
    fit(tiny(*words, "train.steps=2"))  # evaluates at its end, step 2
    rows = read_metrics(fit(tiny(*words, "train.steps=4")).reporter.log.path)
    assert [row["step"] for row in rows if "eval_loss" in row] == steps


@pytest.mark.parametrize("eval_rows", [3, 7, 10_000])
def test_held_out_loss_does_not_depend_on_the_micro_batch(tiny, eval_rows):
    """Five rows were once padded by file order to whole micro-batches, which changed the loss."""
    answers = []
    for micro in (1, 2, 8):
        words = [f"train.eval_rows={eval_rows}", "train.global_batch_size=8"]
        trainer = Trainer(tiny(*words, f"train.micro_batch_size={micro}"))
        trainer.reporter.open(1, 0)
        trainer.evaluate()
        answers.append(losses(trainer, "eval_loss")[0])
    rows = [trainer.data.eval.row(i) for i in range(len(trainer.data.eval))]
    assert answers == pytest.approx([answers[0]] * 3, rel=1e-6)
    if eval_rows > len(rows):  # all rows, each token once
        with trainer.engine.work(), torch.no_grad():
            tokens_BS = torch.tensor(np.stack([row.tokens_S for row in rows]))
            positions_BS = torch.tensor(np.stack([row.positions_S for row in rows]))
            logits = trainer.model(tokens_BS, positions_BS).flatten(0, 1)
            targets_T = torch.tensor(np.concatenate([row.targets_S for row in rows]))
            expected = torch.nn.functional.cross_entropy(logits, targets_T)
        assert answers[0] == pytest.approx(expected.item(), rel=1e-6)


def test_rows_without_a_target_have_no_held_out_loss(tiny):
    trainer = Trainer(tiny())
    rows = trainer.data.eval

    class Silent:
        def __len__(self):
            return len(rows)

        def row(self, index):
            row = rows.row(index)
            return row._replace(targets_S=np.full_like(row.targets_S, IGNORE_INDEX))

    assert np.isnan(trainer.held_out_terms(Silent()).terms["loss"])


def chats(path, count):
    """Write ``count`` short conversations as jsonl."""
    turns = [
        [
            {"role": "user", "content": f"Say {'go ' * (i % 5)}{i}"},
            {"role": "assistant", "content": f"{'gone ' * (i % 7)}{i}"},
        ]
        for i in range(count)
    ]
    path.write_text("".join(json.dumps({"messages": t}) + "\n" for t in turns))
    return path


@pytest.mark.tier("wide", long=["words0"])
@pytest.mark.parametrize("words", [[], ["compile.enabled=yes", "activation.policy=selective"]])
def test_conversations_train_on_whole_rows(tiny, tmp_path, words, monkeypatch):
    monkeypatch.setattr(
        apply, "compile_blocks", functools.partial(apply.compile_blocks, backend="aot_eager")
    )
    torch.compiler.reset()
    words = [*words, "data.source=jsonl", f"data.path={chats(tmp_path / 'a.jsonl', 60)}"]
    words += ["data.seq_len=160", "train.steps=30", "optim.lr=0.01", "train.eval_interval=15"]
    trainer = fit(tiny(*words, "model.vocab_size=300"))
    row = trainer.data.train.row(0)
    assert row.is_pad_S is not None
    curve = losses(trainer, "eval_loss")
    assert curve[30] < 0.9 * curve[0]
    # The router saw no pads: it counts the real tokens alone.
    batches = trainer.loader.next_step()
    assert sum(b.num_tokens for b in batches) < sum(b.tokens_BS.numel() for b in batches)
    routing = trainer.engine.forward(batches[:1], CrossEntropy()).routing
    assert routing.num_tokens == batches[0].num_tokens


def test_trainer_lowers_the_loss(tiny):
    trainer = fit(tiny("train.steps=40", "optim.lr=0.01", "log.interval=10"))
    first, last = losses(trainer)[1], losses(trainer)[40]
    assert last < 0.75 * first


@pytest.mark.tier("long")
def test_a_finished_run_says_so_and_a_fresh_start_keeps_the_old_one(tiny, tmp_path):
    first = fit(tiny())
    again = fit(tiny())
    assert again.step == 4
    assert losses(again) == losses(first)
    fresh = fit(tiny("checkpoint.resume=never", "train.steps=2"))
    assert sorted(losses(fresh)) == [1, 2]
    assert len(list_checkpoints(tmp_path / "out" / "earlier-1" / "checkpoints")) == 1


@pytest.mark.tier("long")
def test_data_that_changed_under_a_finished_run_is_an_error(tiny, tmp_path, caplog):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(9):
        (text / f"{i}.txt").write_text(f"the cat {i} sat. " * 40)
    words = [f"data.path={text}"]
    fit(tiny(*words))
    fit(tiny(*words))  # nothing changed: nothing to do
    (text / "0.txt").write_text("the dog did not. " * 50)
    with pytest.raises(ConfigError, match=r"output_dir: .*is over \(step 4.*trained on other data"):
        Trainer(tiny(*words))
    longer = fit(tiny(*words, "train.steps=5"))
    assert longer.step == 5
    assert "which was trained on other data" in caplog.text
    caplog.clear()
    found = open_checkpoint(list_checkpoints(longer.folder / "checkpoints")[-1])
    longer.checkpointer.snapshots.engine = SimpleNamespace(
        config=longer.config, world=SimpleNamespace(is_main=False)
    )
    longer.checkpointer.snapshots._check_same_run(found, "other data", 9)  # one rank reports it
    assert not caplog.records


def test_a_checkpoint_of_an_older_version_names_no_newer_fields(tiny, monkeypatch):
    made = fit(tiny("train.steps=1"))
    newer = {}

    def opened(*args, **words):
        found = open_checkpoint(*args, **words)
        fields = found.state["architecture"]
        del fields["rope_layers"], fields["num_labels"]
        fields.update(newer)
        return found

    monkeypatch.setattr("moetrain.checkpoint.read.open_checkpoint", opened)
    newer["rope_layers"] = [False]
    with pytest.raises(
        ConfigError, match=r"another model \(rope_layers \[False\], this run's \[\]"
    ):
        Trainer(tiny("train.steps=2"))
    newer.clear()
    assert fit(tiny("train.steps=2")).step == 2
    assert (made.folder / "checkpoints" / "step-00000002").exists()


@pytest.mark.tier("long")
def test_weights_that_changed_under_a_finished_run_are_an_error(tiny, tiny_words, tmp_path, caplog):
    words = ["train.steps=1", "data.tokenizer=byte", "train.epochs=none", "checkpoint.save_hf=yes"]
    fit(tiny(*words, f"output_dir={tmp_path / 'made'}"))
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        shutil.copytree(tmp_path / "made" / "hf", path)
    sizes = ("model.hidden_size", "model.num_", "model.head_dim", "model.moe_")

    def tuned(path, *more):
        mine = [word for word in tiny_words if not word.startswith(sizes)]
        return Config.load(None, [*mine, *words, f"model.path={path}", *more], environ={})

    fit(tuned(first))
    fit(tuned(first))  # nothing changed: nothing to do
    with pytest.raises(ConfigError, match=r"is over .*began from model\.path '.*first'"):
        Trainer(tuned(second))
    assert fit(tuned(second, "train.steps=2")).step == 2
    assert "the run goes on from " in caplog.text


def test_a_checkpoint_of_another_model_is_refused(tiny, tiny_words, capsys):
    fit(tiny("train.steps=1"))
    assert main(settled([*tiny_words, "model.num_layers=3"])) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: checkpoint.resume: ")
    assert "num_layers 2, this run's 3" in error
    with pytest.raises(ConfigError, match=r"checkpoint\.resume: .*not a checkpoint"):
        Trainer(tiny("checkpoint.resume=no/such/folder", "data.path=missing"))  # checked first


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["model.preset=none", "model.path=no/such/model"], "model.path"),
        (["model.preset=gpt-5"], "model.preset"),
        (["model.vocab_size=100"], "data.tokenizer"),
        (["data.path=no/such/folder"], "data.path"),
        (["data.seq_len=100000"], "data.seq_len"),
        (["parallel.tp=2"], "parallel.tp"),
        (["moe.dispatcher=deepep"], "moe.dispatcher"),
        (["moe.dispatcher=alltoall"], "moe.dispatcher"),
        (["--dry_run", "launch.nproc=8", "train.global_batch_size=6"], "train.global_batch_size"),
        (["kernels.attention=flex"], "kernels.attention"),
        (["kernels.attention=cudnn"], "kernels.attention"),
    ],
)
def test_inputs_that_only_building_reveals_exit_2(words, field, tiny_words, capsys):
    if "model.preset=none" in words:
        tiny_words = [w for w in tiny_words if not w.startswith("model.")]
    assert main(settled([*tiny_words, *words])) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {field}: ")


def test_triton_on_a_cpu_exits_2(tiny_words, capsys, monkeypatch):
    monkeypatch.setattr("moetrain.train.checks.INTERPRETED", False)
    assert main(settled([*tiny_words, "kernels.backend=triton"])) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: kernels.backend: ")


def test_bad_data_exits_2(tiny_words, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(settled([*tiny_words, f"data.path={empty}"])) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: data.path: ")
    lines = tmp_path / "bad.jsonl"
    lines.write_text('{"text": "fine"}\n{"text": oops\n')
    assert main(settled([*tiny_words, "data.source=jsonl", f"data.path={lines}"])) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: data.path: ")
    assert "bad.jsonl:2" in error


def test_the_command_itself_stops_on_sigterm_with_a_checkpoint(tiny_words, tmp_path):
    command = [
        sys.executable,
        "-m",
        "moetrain.train",
        *settled([*tiny_words, "train.steps=100000"]),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.time() + 60
        while not read_metrics(tmp_path / "out" / "metrics.jsonl"):
            assert process.poll() is None
            assert time.time() < deadline
            time.sleep(0.1)
        process.terminate()
        assert process.wait(timeout=180) == 143
    saved = list_checkpoints(tmp_path / "out" / "checkpoints")
    assert len(saved) == 1
    assert json.loads((saved[0] / "state.json").read_text())["step"] > 0


@pytest.mark.parametrize("at_end", ["yes", "no"])
def test_a_stop_after_the_last_step_still_stops_with_a_checkpoint(tiny, at_end, monkeypatch):
    trainer = Trainer(tiny(f"checkpoint.at_end={at_end}"))
    log_step = trainer.log_step

    def stop_at_the_last(result):
        log_step(result)
        if trainer.step == trainer.total_steps:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(trainer, "log_step", stop_at_the_last)
    with pytest.raises(SystemExit) as stopped:
        trainer.fit()
    assert stopped.value.code == 143
    assert list_checkpoints(trainer.folder / "checkpoints")[-1].name == "step-00000004"


def test_sigterm_again_waits_for_the_checkpoint_too(tiny, monkeypatch):
    trainer = Trainer(tiny())
    save, wait = trainer.save, trainer.checkpointer.snapshots.wait

    def stop(then):
        os.kill(os.getpid(), signal.SIGTERM)
        result = then()
        os.kill(os.getpid(), signal.SIGTERM)
        return result

    runner = trainer.engine.runner
    runner.before_forward = lambda: trainer.step == 1 and stop(trainer.give_up_if_stopped)
    monkeypatch.setattr(trainer, "save", lambda: stop(save))
    monkeypatch.setattr(trainer.checkpointer.snapshots, "wait", lambda: stop(wait))
    with pytest.raises(SystemExit) as stopped:
        trainer.fit()
    assert stopped.value.code == 143
    checkpoints = trainer.folder / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000001"]
    assert Trainer(tiny()).fit().step == 4


def test_the_last_checkpoint_comes_before_all_else_that_a_run_leaves(tiny, monkeypatch):
    """The last evaluation may take long; an impatient user who kills it loses no step."""
    trainer = Trainer(tiny())

    def give_up():
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "evaluate", give_up)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert list_checkpoints(trainer.folder / "checkpoints")[-1].name == "step-00000004"


@pytest.mark.parametrize("what", ["nan", "empty"])
def test_a_sample_that_cannot_be_made_takes_nothing_from_the_run(tiny, capsys, what, monkeypatch):
    trainer = Trainer(tiny("checkpoint.save_hf=yes"), callbacks=[Sampled()])
    if what == "nan":
        save = trainer.save

        def poison():
            save()
            torch.nn.init.constant_(trainer.model.norm.weight, float("nan"))

        trainer.save = poison
    else:  # a prompt without tokens in this tokenizer
        monkeypatch.setattr("moetrain.generate.weights._prompt", lambda data, text: [])
    trainer.fit()
    assert "no sample: " in capsys.readouterr().out
    assert (trainer.folder / "hf" / "model.safetensors").exists()
    assert not (trainer.folder / "sample.txt").exists()


@pytest.mark.parametrize("prompt", ["", "\udcff\udcfe"])
def test_a_prompt_that_is_no_text_is_refused_before_the_run(tiny, prompt):
    with pytest.raises(ConfigError, match=r"train\.sample_prompt: "):
        tiny(f"train.sample_prompt={prompt}")


def test_what_comes_after_the_run_is_printed_below_the_progress_bar(tmp_path, monkeypatch):
    shown = io.StringIO()
    console = functools.partial(Console, file=shown, force_terminal=True, width=100)
    monkeypatch.setattr("moetrain.train.metrics.Console", console)
    log = MetricsLog(tmp_path, LogSection(tensorboard=False), total_steps=2)
    for step in (1, 2):
        log.log(step, {"loss": 1.0})
    log.end_progress()
    log.say("sample: text")
    log.close()
    printed = [line for line in shown.getvalue().splitlines() if "step" in line or "text" in line]
    assert "text" in printed[-1]
    assert sum("text" in line for line in printed) == 1
    assert "2/2" in printed[-2]


NUMBERS = {
    **{"loss": 1.2345, "grad_norm": 123.456, "lr": 3e-4, "tokens_per_second_per_device": 12345.6},
    **{"mfu": 0.35, "memory_gib": 131.5, "step_seconds": 1.234, "skipped_steps": 12},
}


def test_progress_fits_eighty_columns(tmp_path, monkeypatch):
    shown = io.StringIO()
    console = functools.partial(Console, file=shown, force_terminal=True, width=80)
    monkeypatch.setattr("moetrain.train.metrics.Console", console)
    log = MetricsLog(tmp_path, LogSection(tensorboard=False), total_steps=12000)
    log.log(8765, NUMBERS)
    log.close()
    plain = Text.from_ansi(shown.getvalue()).plain
    bar, numbers, *_ = [line for line in plain.splitlines() if line.strip()][-2:]
    assert max(map(len, plain.splitlines())) <= 80
    assert re.match(r"step +8765/12000 ━+.* -:--:--", bar), bar
    assert numbers.startswith("loss 1.2345  norm 123.456  lr 3.00e-04  tok/s 12,346")


def test_lines_of_a_file_have_the_time_that_is_left(tmp_path, monkeypatch):
    shown, seconds = io.StringIO(), iter([100.0, 130.0])
    monkeypatch.setattr("moetrain.train.metrics.Console", functools.partial(Console, file=shown))
    log = MetricsLog(tmp_path, LogSection(tensorboard=False), total_steps=1000)
    monkeypatch.setattr("moetrain.train.metrics.time.monotonic", lambda: next(seconds))
    for step in (10, 20):  # three seconds a step
        log.log(step, {"loss": 1.0})
    log.close()
    assert shown.getvalue() == (
        "step 10/1000  loss 1.0000\nstep 20/1000  loss 1.0000  left 0:49:00\n"
    )


def test_the_last_step_is_logged_whatever_the_interval(tiny):
    assert sorted(losses(fit(tiny("log.interval=3")))) == [1, 3, 4]


@pytest.mark.parametrize(("before", "now"), [(0, 0.1), (0.1, 0)])
def test_a_selection_bias_that_comes_or_goes_is_named(tiny, before, now):
    fit(tiny("train.steps=1", f"moe.bias_update_rate={before}"))
    with pytest.raises(ConfigError, match=r"moe\.bias_update_rate: .*set it as it was"):
        Trainer(tiny("train.steps=2", f"moe.bias_update_rate={now}"))


@pytest.mark.tier("long")
def test_ctrl_c_abandons_the_current_step(tiny_words, tmp_path):
    """A step of a million rows is not awaited; the steps before it are kept."""

    def run(name, *words):
        words = [*tiny_words, "train.micro_batch_size=1", f"output_dir={tmp_path / name}", *words]
        return Trainer(Config.load(None, words, environ={}))

    run("straight").fit()
    trainer, calls = run("out"), []

    def stop_in_second_step():
        calls.append(trainer.step)
        Trainer.give_up_if_stopped(trainer)
        if calls.count(1) == 2:  # one of its four micro-batches is done
            os.kill(os.getpid(), signal.SIGINT)

    trainer.engine.runner.before_forward = stop_in_second_step
    with pytest.raises(SystemExit) as stopped:
        trainer.fit()
    assert stopped.value.code == 130
    assert calls == [0] * 4 + [1] * 3
    assert [path.name for path in (tmp_path / "out/checkpoints").iterdir()] == ["step-00000001"]
    run("out").fit()
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row]
        for name in ("straight", "out")
    ]
    assert losses[0] == losses[1]


def test_ctrl_c_while_the_rows_of_a_step_are_read(tiny_words):
    trainer = Trainer(Config.load(None, tiny_words, environ={}))
    row, read = trainer.loader.dataset.row, []

    def stop_at_first(index):
        if not read:
            os.kill(os.getpid(), signal.SIGINT)
        read.append(index)
        return row(index)

    trainer.loader.dataset.row = stop_at_first
    with pytest.raises(SystemExit) as stopped:
        trainer.fit()
    assert (stopped.value.code, trainer.step, trainer.loader.sample_index) == (130, 0, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens_S": np.zeros(31, int)}, r"tokens_S of shape \(31,\), where \(32,\) is wanted"),
        ({"tokens_S": np.zeros((1, 32), int)}, r"tokens_S of shape \(1, 32\), where \(32,\)"),
        ({"targets_S": np.zeros(33, int)}, r"targets_S of shape \(33,\), where \(32,\)"),
        ({"positions_S": np.zeros(3, int)}, r"positions_S of shape \(3,\), where \(32,\)"),
        (
            {"lengths": np.array([30])},
            r"lengths of shape \(1,\) that sum to 30, where .* 32 in",
        ),
    ],
)
def test_rows_of_a_users_own_dataset(change, says, trainer_of_rows):
    rows = trainer_of_rows.data.train

    class Mine:
        identity = ()

        def __len__(self):
            return 5

        def row(self, index):
            return rows.row(index)._replace(**change)

    trainer_of_rows.loader = replace(trainer_of_rows.loader, dataset=Mine())
    with pytest.raises(ValueError, match=rf"^Mine\.row\(\d\): {says}"):
        trainer_of_rows.train_step()


@pytest.fixture(scope="module")
def trainer_of_rows(corpus, token_cache, tmp_path_factory):
    words = ["data.source=synthetic", "data.seq_len=32", "model.hidden_size=16", "train.device=cpu"]
    words += ["train.micro_batch_size=2", "train.global_batch_size=2", "train.sample_tokens=0"]
    words += [f"output_dir={tmp_path_factory.mktemp('rows')}"]
    return Trainer(Config.load(None, words, environ={}))
