"""Scores of a reward model equal transformers', through the library, the command and an RL run."""

import asyncio
import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from moetrain import ConfigError, RewardModel
from moetrain.cli.main import main
from moetrain.data.messages import BadLineError
from moetrain.train.metrics import read_metrics
from tests.lib.exports import make_tokenizer
from tests.lib.pages import load_script
from tests.lib.reward_models import make

TEXTS = [
    {"prompt": "the cat", "completion": " sat on a mat."},
    {"prompt": "a dog", "completion": ""},
    {"prompt": "a dog", "completion": " sat down, 3 times.", "label": False, "weight": 0},
]
CHAT = [{"role": "user", "content": "the cat?"}, {"role": "assistant", "content": "a mat."}]
PAD = 2
"""The tokenizer's pad id; its EOS is another id, which is scored."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    ids = {"pad_token_id": PAD, "eos_token_id": 1, "vocab_size": 300}
    make(AutoModelForSequenceClassification, folder, "qwen3_moe", num_labels=1, **ids)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    """Return transformers' score of a text."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def score(text):
        with torch.no_grad():
            return model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0].item()

    return score


@pytest.mark.parametrize("max_tokens", [1, 20, 16384])
def test_scores_are_transformers_however_texts_share_a_pass(max_tokens, folder, theirs):
    model = RewardModel(folder, device="cpu", max_tokens=max_tokens)
    wanted = [theirs(f"{x['prompt']}{x['completion']}</s>") for x in TEXTS]
    rendered = "<user>the cat?</s><assistant>a mat.</s>"
    records = [
        *TEXTS,
        {"messages": CHAT},
        {"prompt": CHAT[:1], "completion": "a mat."},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"prompt": CHAT[:1], "completion": ""},
    ]
    wanted += [theirs(rendered)] * 3 + [theirs("<user>the cat?</s><assistant></s>")]
    assert model.score(records) == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert len({round(x, 3) for x in wanted}) == 5
    assert model.score([]) == []


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "a pair, which has two rewards"),
        ({"messages": CHAT[:1]}, "last turn is no answer"),
        ({"text": " "}, "has no text"),
        ({"text": "a cat " * 100}, "more than the model's 64 positions"),
        ({"nothing": 1}, "a record of no known form"),
    ],
)
def test_a_record_that_cannot_be_scored_is_named(record, error, folder):
    with pytest.raises(BadLineError, match=error):
        RewardModel(folder, device="cpu").encode(record)


def test_a_language_model_has_no_scores(tmp_path):
    make(AutoModelForCausalLM, tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"a language model, .*; train one with train\.objective"):
        RewardModel(tmp_path)


def test_a_device_that_is_not_there_is_one_line(folder, tmp_path, capsys):
    (tmp_path / "answers.jsonl").write_text(json.dumps(TEXTS[0]))
    words = ["score", str(folder), str(tmp_path / "answers.jsonl"), "--device"]
    for device in ("gpu", "cuda:99", "cuda:x"):
        assert main([*words, device]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: device: '{device}'")


def test_the_command_adds_scores_to_records(folder, theirs, tmp_path, capsys):
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, TEXTS)))
    assert main(["score", str(folder), str(tmp_path / "answers.jsonl"), "--device", "cpu"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [{**line, "score": None} for line in lines] == [{**x, "score": None} for x in TEXTS]
    wanted = [theirs(f"{x['prompt']}{x['completion']}</s>") for x in TEXTS]
    assert [line["score"] for line in lines] == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    (tmp_path / "answers.jsonl").write_text(json.dumps({"nothing": 1}))
    assert main(["score", str(folder), str(tmp_path / "answers.jsonl")]) == 2
    assert "answers.jsonl:1: " in capsys.readouterr().err


def test_adapters_alone_are_named_as_they_were_given_and_what_is_advised_works(
    folder, tmp_path, capsys
):
    """The run is resumed with checkpoint.save_hf yes, and its export scores like its adapters."""
    pairs = [{"prompt": "the cat", "chosen": f" sat {i}.", "rejected": " no."} for i in range(12)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (tmp_path / "answers.jsonl").write_text(json.dumps(TEXTS[0]))
    out = tmp_path / "out"
    words = f"""train --model.path {folder} --data.path {tmp_path}/pairs.jsonl --lora.rank 8
    --train.objective reward --train.steps 1 --train.global_batch_size 2 --train.micro_batch_size 2
    --data.seq_len 32 --data.cache_dir {tmp_path}/cache --train.device cpu --compile.enabled no
    --lora.targets *.attn.* --optim.lr 0.1 --optim.warmup_steps 0 --output_dir {out}""".split()
    assert main([*words, "--checkpoint.save_hf", "no"]) == 0
    capsys.readouterr()
    for given in (out / "adapter", out):
        assert main(["score", str(given), str(tmp_path / "answers.jsonl")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: path: {given}: ")
        assert "adapters" in line
        advised = "give the folder that their run writes with checkpoint.save_hf yes, OUTPUT_DIR/hf"
        assert advised in line
    assert main([*words, "--checkpoint.save_hf", "yes"]) == 0
    capsys.readouterr()
    scores = []
    for given in (folder, out / "hf", out):
        words = ["score", str(given), str(tmp_path / "answers.jsonl"), "--device", "cpu"]
        assert main(words) == 0
        scores.append(json.loads(capsys.readouterr().out)["score"])
    assert scores[1] == scores[2]
    assert scores[1] != scores[0]


def test_model_reward_example_scores_waiting_answers_in_one_batch(folder, theirs, monkeypatch):
    monkeypatch.setenv("REWARD_MODEL", str(folder))
    monkeypatch.setenv("REWARD_DEVICE", "cpu")
    example, passes = load_script("examples/model_reward.py"), []
    score = example.model.score_tokens
    monkeypatch.setattr(example.model, "score_tokens", lambda x: passes.append(len(x)) or score(x))
    lines = [{"prompt": x["prompt"], "answer": "none"} for x in TEXTS]
    long = "a cat " * 100

    async def all_of_them():
        answers = [*(x["completion"] for x in TEXTS), long]
        pairs = zip([*lines, lines[0]], answers, strict=True)
        calls = [example.score(line, answer) for line, answer in pairs]
        return await asyncio.gather(*calls, return_exceptions=True)

    *found, failed = asyncio.run(all_of_them())
    wanted = [theirs(f"{x['prompt']}{x['completion']}</s>") for x in TEXTS]
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert "more than the model's 64 positions" in str(failed)
    assert sum(passes) == len(TEXTS)


@pytest.mark.tier("long")
def test_a_run_is_rewarded_by_a_reward_model(folder, tmp_path, monkeypatch):
    """The command of the example runs on toy models."""
    monkeypatch.setenv("REWARD_MODEL", str(folder))
    monkeypatch.setenv("REWARD_DEVICE", "cpu")
    policy = tmp_path / "policy"
    make(AutoModelForCausalLM, policy, vocab_size=300, eos_token_id=1, pad_token_id=PAD)
    make_tokenizer(policy)
    lines = [json.dumps({"prompt": f"the cat sat {i}"}) for i in range(16)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    words = f"""--model.path {policy} --rl.env jsonl --rl.prompts {tmp_path}/prompts.jsonl
    --rl.reward examples/model_reward.py:score --rl.max_tokens 4 --data.seq_len 32
    --rl.eval_tasks 4 --train.eval_interval 0 --train.steps 2 --train.global_batch_size 8
    --train.micro_batch_size 2 --rl.group_size 4 --rl.max_sequences 8 --train.device cpu
    --compile.enabled no --log.interval 1 --log.tensorboard no --checkpoint.at_end no
    --checkpoint.save_hf no --output_dir {tmp_path}/out"""
    assert main(["rl", *words.split()]) == 0
    rows = [x for x in read_metrics(tmp_path / "out" / "metrics.jsonl") if "reward" in x]
    assert len(rows) == 2
    assert all(row["reward"] != 0 for row in rows)
    assert not any(name.startswith("left_out/") and row[name] for row in rows for name in row)
    assert "moetrain_user_model_reward" in sys.modules
