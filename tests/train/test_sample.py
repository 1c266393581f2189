"""The sample at the end of a run: the continuation by plain forwards, or a reason."""

import json

import pytest
import torch
import torch.distributed as dist

from moetrain import Trainer
from moetrain.config import Config
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate import weights
from moetrain.train.metrics import MetricsLog
from tests.lib.distributed import spawn
from tests.lib.one_answer import DENSE, LAYOUTS, words_of
from tests.lib.samples import sample_of, samples_on_ranks

GREEDY = ["train.steps=2", "train.sample_tokens=60", "optim.lr=1e-2", "model.init_std=0.3"]


@torch.no_grad()
def plain_continuation(model, ids, number, window):
    """Return greedy tokens of plain forwards; a full window restarts from its last half."""
    ids, start = list(ids), 0
    for _ in range(number):
        if len(ids) - start >= window:
            start = len(ids) - window // 2
        logits = model(torch.tensor([ids[start:]]))[0, -1, : ByteTokenizer.vocab_size]
        if (token := int(logits.argmax())) == ByteTokenizer.eos_id:
            break
        ids.append(token)
    return ids


@pytest.mark.tier("long")
@pytest.mark.parametrize("seq_len", [7, 32, 100])
def test_a_sample_is_what_the_model_goes_on_with(seq_len, tiny_words, monkeypatch):
    monkeypatch.setattr(weights, "_TEMPERATURE", 0.0)
    words = [*tiny_words, *GREEDY, f"data.seq_len={seq_len}", "train.sample_prompt=the cat sat"]
    trainer, text = sample_of(words)
    prompt = ByteTokenizer().encode_prompt("the cat sat")
    with trainer.engine.work():
        ids = plain_continuation(trainer.model, prompt, 60, seq_len)
    assert text == ByteTokenizer().decode(ids)
    assert len(ids) == len(prompt) + 60


@pytest.mark.tier("long")
def test_a_sample_of_chats_is_an_answer_that_ends_as_it_was_learned(
    tiny_words, tmp_path, monkeypatch
):
    monkeypatch.setattr(weights, "_TEMPERATURE", 0.0)
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
    file = tmp_path / "chats.jsonl"
    file.write_text((json.dumps({"messages": turns}) + "\n") * 20)
    words = [*tiny_words, "data.source=jsonl", f"data.path={file}", "data.seq_len=80"]
    words += ["train.sample_prompt=none", "train.sample_tokens=30"]
    words += ["train.steps=120", "optim.lr=1e-2"]
    trainer, text = sample_of(words)
    asked = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
    assert text == f"{asked}Yes.<|im_end|>"
    assert trainer.data.eval.row(0).tokens_S[: len(asked)].tolist() == list(asked.encode())


@pytest.mark.tier("wide", long=["dense"])
@pytest.mark.parametrize("family", ["moe", "dense"])
def test_every_mesh_writes_the_same(family, tiny_words, tmp_path):
    few = [*GREEDY, "train.sample_tokens=40"]
    words = words_of(tiny_words, "train.micro_batch_size=2", *few)
    layouts = {name: LAYOUTS[4][name] for name in ("hsdp", "dp+tp", "dp+tp+ep")}
    layouts["pp+ep"] = ["parallel.pp=2", "parallel.ep=2"]
    if family == "dense":
        words = [w for w in words_of(tiny_words, *few) if "expert" not in w and "moe" not in w]
        words += [*DENSE, "train.micro_batch_size=2"]
        layouts = {name: LAYOUTS[4][name] for name in ("dp", "dp+tp")}
    _, expected = sample_of([*words, f"output_dir={tmp_path / 'one'}"])
    assert len(expected) > 40  # bytes that are no text take a character each
    runs = {n: [*words, *w, f"output_dir={tmp_path / n}"] for n, w in layouts.items()}
    for texts in spawn(4, samples_on_ranks, runs, timeout=120):
        assert texts == dict.fromkeys(layouts, expected)


def run_without_memory(words):
    """Return whether there is a sample if one rank has no room for it, and the log."""
    said = []
    weights._free_bytes = lambda device: 3 * 2**30 * (2 - dist.get_rank())
    trainer = Trainer(Config.load(None, words, environ={}), callbacks=[weights.Sampled()])
    MetricsLog.say = lambda log, text: said.append(text)
    trainer.fit()
    return (trainer.folder / "sample.txt").exists(), said


def test_a_run_without_room_for_a_sample_ends_well(tiny_words):
    (exists, said), (_, nothing) = spawn(2, run_without_memory, [*tiny_words, "parallel.ep=2"])
    assert not exists
    assert "no sample: a device has less free memory than the generator's 3.0 GiB" in said[-1]
    assert nothing == []


def test_a_model_that_has_no_generation_ends_well(tiny, monkeypatch, capsys):
    def odd_replica(engine):
        model, experts = replica(engine)
        model.layers[1].attn.core = lambda q, k, v, context: q
        return model, experts

    replica = weights.replica
    monkeypatch.setattr(weights, "replica", odd_replica)
    trainer = Trainer(tiny(), callbacks=[weights.Sampled()])
    trainer.fit()
    assert (
        "no sample: model: qwen3_moe cannot generate here, because some of its"
        in capsys.readouterr().out
    )
    assert not (trainer.folder / "sample.txt").exists()


def test_an_error_of_the_program_is_no_missing_sample(tiny, monkeypatch):
    def fail(update):
        raise ValueError("parts and modules differ")

    monkeypatch.setattr(weights.WeightUpdate, "__call__", fail)
    with pytest.raises(ValueError, match="parts and modules differ"):
        Trainer(tiny(), callbacks=[weights.Sampled()]).fit()


def test_a_program_without_the_callback_is_told_that_there_is_no_sample(tiny, capsys):
    Trainer(tiny("train.steps=1")).fit()
    line = "no sample: give callbacks=[moetrain.generate.weights.Sampled()]"
    assert line in capsys.readouterr().out
    Trainer(tiny("train.steps=2"), callbacks=[weights.Sampled()]).fit()
    assert line not in capsys.readouterr().out
