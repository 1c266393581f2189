"""``log.profile``: the traced steps and files; it changes no result, and stops completely."""

import gzip
import json
import os
import signal
from collections import Counter

import pytest
import torch

from moetrain.config import Config, ConfigError
from moetrain.runtime.annotate import annotate, annotate_backward
from moetrain.train.callbacks import Profile
from moetrain.train.loop import Trainer
from tests.lib.compiled_blocks import MOE, batch, compile_counting, fresh_model
from tests.lib.distributed import spawn

STEPS = ["log.profile=2", "log.profile_after=1", "train.steps=5"]


def fit(config):
    trainer = Trainer(config)
    trainer.fit()
    return trainer


def files(trainer):
    return sorted(path.name for path in (trainer.folder / "profile").glob("*"))


def ranges(file):
    """Count the named ranges of ours in the trace ``file``."""
    with gzip.open(file) as opened:
        events = json.load(opened)["traceEvents"]
    names = (e["name"] for e in events if e.get("cat") == "user_annotation")
    return Counter(name.split(" unit")[0].split(",")[0] for name in names), events


def sizes(events, name):
    """Return the MiB in the labels of each range ``name``."""
    labels = (e["name"] for e in events if e.get("name", "").startswith(f"{name}, "))
    return [float(label.removeprefix(f"{name}, ").removesuffix(" MiB")) for label in labels]


@pytest.mark.tier("long")
def test_a_trace_has_every_part_of_the_steps_asked_for(tiny, tmp_path):
    plain = fit(tiny("train.steps=5", f"output_dir={tmp_path / 'plain'}"))
    trainer = fit(tiny(*STEPS))
    assert files(trainer) == ["steps-3-4-rank-0.json.gz"]
    assert not files(plain)
    found, events = ranges(trainer.folder / "profile" / "steps-3-4-rank-0.json.gz")
    passes = 2 * 2  # steps, micro-batches
    once_a_step = ("forward_backward", "update")
    per_pass = ("head and loss", "layer 0 forward", "layer 1 backward", "layer 0 backward")
    assert all(found[name] == 2 for name in once_a_step), found
    assert all(found[name] == passes for name in per_pass), found
    assert found["fsdp_reduce"] == passes * 4  # embedding, blocks, head
    (product, *_) = [e for e in events if e.get("name") == "aten::mm"]
    assert len(product["args"]["Input Dims"]) == 2
    for (name, mine), (_, its) in zip(
        trainer.engine.fsdp.members.items(), plain.engine.fsdp.members.items(), strict=True
    ):
        assert torch.equal(mine.local, its.local), name


@pytest.mark.tier("long")
def test_a_layers_backward_has_that_layers_ops(tiny):
    trainer = fit(tiny(*STEPS))
    _, events = ranges(trainer.folder / "profile" / "steps-3-4-rank-0.json.gz")
    spans = {
        name: [e for e in events if e.get("name") == name]
        for name in ("layer 1 backward", "layer 0 backward", "fsdp_reduce unit 2, 0.0 MiB")
    }
    for second, first, reduce in zip(*spans.values(), strict=True):
        assert second["ts"] + second["dur"] <= first["ts"]
        assert second["ts"] < reduce["ts"] < second["ts"] + second["dur"]


@pytest.mark.tier("wide", long=["3"])
@pytest.mark.parametrize("at", [3, 4])
def test_a_stop_writes_what_was_traced_so_far(tiny, at, capsys):
    trainer = Trainer(tiny("log.profile=3", "log.profile_after=1", "train.steps=9"))
    step = trainer.train_step

    def stop():
        result = step()
        if trainer.step == at:  # the next step is given up
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    trainer.train_step = stop
    with pytest.raises(SystemExit):
        trainer.fit()
    assert trainer.step == at
    assert files(trainer) == [f"steps-3-{at}-rank-0.json.gz"]
    assert not torch.autograd._profiler_enabled()
    assert f"steps 3 to {at} were traced" in capsys.readouterr().out


@pytest.mark.parametrize("at", [2, 3])  # the warm-up step, and a recorded one
def test_an_error_leaves_no_profiler_on(tiny, at):
    trainer = Trainer(tiny(*STEPS))
    step = trainer.train_step

    def fail():
        if trainer.step == at - 1:
            assert torch.autograd._profiler_enabled()
            raise OverflowError("of a test")
        return step()

    trainer.train_step = fail
    with pytest.raises(OverflowError, match="of a test"):
        trainer.fit()
    assert not torch.autograd._profiler_enabled()
    assert not files(trainer)


@pytest.mark.tier("long")
def test_a_resumed_run_with_too_few_steps_left_says_so(tiny, capsys):
    fit(tiny("train.steps=4"))
    trainer = fit(tiny(*STEPS, "train.steps=6"))
    assert trainer.step == 6
    assert "nothing was traced" in capsys.readouterr().out
    assert not files(trainer)
    trainer = fit(tiny(*STEPS, "train.steps=10"))
    assert files(trainer) == ["steps-9-10-rank-0.json.gz"]
    capsys.readouterr()
    fit(tiny(*STEPS, "train.steps=10"))  # completes the run
    assert "traced" not in capsys.readouterr().out


def test_steps_that_there_are_not(tiny):
    with pytest.raises(
        ConfigError, match=r"log\.profile: 2, but the run has 4 steps and needs 7: "
    ):
        tiny("log.profile=2")
    with pytest.raises(ConfigError, match=r"log\.profile_after: 2 contradicts log\.profile 0"):
        tiny("log.profile_after=2")
    with pytest.raises(ConfigError, match=r"log\.profile: 2, but the run has 1 steps"):
        Trainer(tiny(*STEPS, "train.steps=none", "train.epochs=0.001"))


def train_on_ranks(words):
    trainer = fit(Config.load(None, words, environ={}))
    name = f"steps-3-4-rank-{trainer.world.rank}.json.gz"
    found, events = ranges(trainer.folder / "profile" / name)
    return files(trainer), found, sizes(events, "exchange_rows"), sizes(events, "pp_transfer")


@pytest.mark.tier("wide")
def test_every_rank_writes_its_own(tiny_words):
    words = [*tiny_words, *STEPS, "data.seq_len=256", "model.hidden_size=512"]
    answers = spawn(2, train_on_ranks, [*words, "parallel.ep=2"])
    (mine, found, sent, _), (theirs, others, *_) = answers
    assert mine == theirs == [f"steps-3-4-rank-{rank}.json.gz" for rank in range(2)]
    for name in ("layer 1 forward", "layer 1 backward", "fsdp_gather", "fsdp_reduce"):
        assert found[name] == others[name] > 0
    # Two steps of one micro-batch and two layers have dispatch and combine, forward and backward.
    # Their 512 tokens of 2 KiB go to one rank or to both.
    assert len(sent) == 2 * 2 * 4
    assert max(sent) < 2.1
    assert sum(sent) / len(sent) > 0.9
    for *_, moved in spawn(2, train_on_ranks, [*words, "parallel.pp=2", "checkpoint.resume=never"]):
        assert set(moved) == {1.0}


def test_nothing_has_a_name_while_nothing_is_traced():
    x = torch.ones(3, requires_grad=True)
    assert annotate_backward(x, "x") is x
    with annotate("x"):
        assert not torch.autograd._profiler_enabled()


@pytest.mark.tier("long")
def test_tracing_compiles_nothing_again():
    torch.compiler.reset()
    model = fresh_model(MOE)
    counter = compile_counting(model)

    def steps():
        for number in range(3):
            hidden_BSD, _ = model.backbone(batch(number))
            hidden_BSD.sum().backward()

    steps()
    with Profile.profiler(torch.device("cpu")) as profiler:
        steps()
    assert "layer 3 backward" in {event.key for event in profiler.key_averages()}
    steps()
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_on_a_gpu_memory_and_kernels_are_in_it(tiny):
    words = ["train.device=cuda", "compile.enabled=yes"]
    sizes = ["model.hidden_size=64", "model.moe_intermediate_size=64", "model.head_dim=32"]
    trainer = fit(tiny(*STEPS, *words, *sizes))
    name = "steps-3-4-rank-0"
    assert files(trainer) == [f"{name}.json.gz", f"{name}.pickle"]
    assert (trainer.folder / "profile" / f"{name}.pickle").stat().st_size > 10_000
    assert not torch.autograd._profiler_enabled()
    found, events = ranges(trainer.folder / "profile" / f"{name}.json.gz")
    assert found["layer 1 backward"] == found["layer 1 forward"] == 4
    assert any(e.get("name") == "moetrain::expert_mlp" for e in events)
    assert sum(e.get("cat") == "kernel" for e in events) > 100
