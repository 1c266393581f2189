"""Fine-tuning as in the README: a checkpoint and a tokenizer of transformers, and chats."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

import moetrain
from moetrain.cli.generate import main as generate
from moetrain.cli.train import main
from moetrain.config import Config, ConfigError
from moetrain.data.tokenizer import load_tokenizer
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from moetrain.train.session import resolve_run
from tests.lib.turn_ends import DROPS, EMPTY, NO_END, OPENS, THOUGHTS, THREE, WORDS

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
POSITIONS = 512  # a quarter of the README's, with as many rows
CHATS = 280


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen"
    write_checkpoint(folder, CHATML, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return folder


def write_checkpoint(
    folder: Path, template: str, special: list[str], eos_token: str = "<|im_end|>"
) -> None:
    """Write a Qwen3-MoE of 40 k parameters with a byte-level tokenizer, by transformers."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos_token, pad_token="<|endoftext|>"
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(fast),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        intermediate_size=32,
        max_position_embeddings=POSITIONS,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """Write conversations of 30 to 200 tokens, most of them short, with something to learn."""
    file = tmp_path_factory.mktemp("data") / "chats.jsonl"
    with file.open("w") as lines:
        for i in range(CHATS):
            messages = [
                {"role": "user", "content": f"{i} + {i + 1}?"},
                {"role": "assistant", "content": f"{2 * i + 1}."},
            ] * (6 if i % 50 == 0 else 1)
            lines.write(json.dumps({"messages": messages}) + "\n")
    return file


@pytest.fixture
def words(checkpoint, chats, tmp_path, monkeypatch):
    """Return the README's command line, run in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    typed = (
        f"--model.path {checkpoint} --data.tokenizer {checkpoint} --data.source jsonl "
        f"--data.path {chats} --data.seq_len {POSITIONS} --checkpoint.save_hf yes"
    )
    return [*typed.split(), "--train.device", "cpu", "--log.tensorboard", "no"]


@pytest.mark.tier("long")
def test_the_readmes_command(words, tmp_path, capsys, caplog):
    assert main([*words, "--data.eval_fraction", "0.1", "--train.sample_tokens", "4"]) == 0
    folder = tmp_path / "outputs" / "tiny-qwen-chats"
    resolved = json.loads((folder / "config.json").read_text())
    assert resolved["optim"]["lr"] == 1e-5
    assert resolved["output_dir"] == "outputs/tiny-qwen-chats"
    assert (resolved["train"]["epochs"], resolved["train"]["steps"]) == (3.0, None)
    rows = read_metrics(folder / "metrics.jsonl")
    said = capsys.readouterr().out
    num_rows = int(said.split(f" rows of {POSITIONS} tokens")[0].split()[-1])
    batch = resolved["train"]["global_batch_size"]
    assert num_rows > batch  # so that three epochs are several steps
    steps = -(-3 * num_rows // batch)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, steps + 1))
    held_out = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert held_out[-1] < held_out[0]
    assert "recipe sft, as model.path is set, the data is jsonl and no recipe is named" in said
    assert f"{steps} steps, by train.epochs" in said
    # Full rows hold whole conversations: none that fits is cut, and none is missing.
    packed = re.findall(
        r"packed ([\d,]+) conversations into ([\d,]+) rows .*\((.*)% full\)", caplog.text
    )
    assert sum(int(count.replace(",", "")) for count, _, _ in packed) == CHATS
    assert float(packed[0][2]) >= 95
    assert "longer than a row" not in caplog.text
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
    before = transformers.AutoModelForCausalLM.from_pretrained(words[1])
    changed = [
        not torch.equal(a, b)
        for a, b in zip(exported.parameters(), before.parameters(), strict=True)
    ]
    assert all(changed)
    assert_greedy_tokens_agree(folder / "hf", exported)
    # The same command again has nothing to do, and says so.
    assert main([*words, "--data.eval_fraction", "0.1", "--train.sample_tokens", "4"]) == 0
    assert "nothing is left to do: raise train.epochs to go on" in capsys.readouterr().out


@pytest.mark.tier("wide", long=["chatml", "no_end"])
@pytest.mark.parametrize(
    ("template", "turns", "answer"),
    [
        pytest.param(NO_END, THREE, "<think></think>a1", id="no_end"),
        pytest.param(WORDS, THREE, " a1", id="words"),
        pytest.param(DROPS, THOUGHTS, "t1\n</think>\n\na1", id="drops"),
        pytest.param(OPENS, THOUGHTS, "t1\n</think>\na1", id="opens"),
        pytest.param(EMPTY, THREE, "\n</think>\n\na1", id="empty"),
        pytest.param(CHATML, THREE, "a1", id="chatml"),
    ],
)
def test_a_model_that_learned_chats_of_several_turns_stops_by_itself(
    template: str,
    turns: list[dict[str, str]],
    answer: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """It is asked the first question; in the training data no EOS follows the answer."""
    special = ["<|endoftext|>", *sorted(set(re.findall(r"<\|\w+\|>", template)))]
    write_checkpoint(tmp_path / "model", template, special, "<|endoftext|>")
    chats = tmp_path / "chats.jsonl"
    chats.write_text((json.dumps({"messages": turns}) + "\n") * 8)
    typed = f"--model.path {tmp_path}/model --data.path {chats} --data.seq_len 128 --train.steps 60"
    typed += f" --data.cache_dir {tmp_path}/cache --output_dir {tmp_path}/run --optim.lr 1e-2"
    typed += " --data.eval_fraction 0 --train.global_batch_size 4 --train.device cpu"
    typed += " --optim.schedule constant --log.tensorboard no --train.sample_tokens 0"
    assert main(typed.split()) == 0
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["loss"] < 0.02
    capsys.readouterr()
    words = [f"{tmp_path}/run/hf", "--prompt", "q1", "--chat", "--temperature", "0"]
    assert generate([*words, "--device", "cpu", "--max_tokens", "60"]) == 0
    assert capsys.readouterr().out == f"{answer}\n"


def assert_greedy_tokens_agree(folder: Path, theirs: transformers.PreTrainedModel) -> None:
    """Assert that ``transformers`` continues a prompt from the export with our tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "3 + 4?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    prompt = tokenizer(text, return_tensors="pt")["input_ids"]
    want = theirs.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=None)[
        0
    ].tolist()
    model, ids = moetrain.load_hf(folder), prompt[0].tolist()
    assert ids == load_tokenizer(str(folder)).encode_batch([text])[0].ids.tolist()
    with torch.no_grad():
        while len(ids) < len(want):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert ids == want


def test_the_checkpoint_decides_what_is_not_set(checkpoint, chats):
    words = [f"model.path={checkpoint}", f"data.path={chats}", "compile.enabled=no"]
    config = Config.load(None, words, environ={})
    resolved, arch = resolve_run(config)
    assert resolved.data.tokenizer == str(checkpoint)
    assert resolved.data.seq_len == arch.max_positions == POSITIONS
    assert resolved.origins["data.seq_len"] == "model.path"
    assert f"data.seq_len = {POSITIONS}  (model.path)" in resolved.describe()
    assert resolve_run(resolved)[0] == resolved
    chosen = config.filled({"data.seq_len": 64, "data.tokenizer": "byte"}, "the test")
    assert resolve_run(chosen)[0] == chosen
    longer = {"data.seq_len": POSITIONS + 1}
    problem = rf"data\.seq_len: {POSITIONS + 1} is more than the {POSITIONS} positions"
    with pytest.raises(ConfigError, match=problem):
        resolve_run(config.filled(longer, "the test"))


def test_scaled_rotary_embeddings_reach_further(checkpoint, chats, tmp_path):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("rope_parameters", None)
    config["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": POSITIONS,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(checkpoint / "model.safetensors", tmp_path)
    words = [f"model.path={tmp_path}", f"data.path={chats}", "data.tokenizer=byte"]
    resolve_run(Config.load(None, [*words, f"data.seq_len={4 * POSITIONS}"], environ={}))
    with pytest.raises(ConfigError, match=f"{4 * POSITIONS + 1} is more than the {4 * POSITIONS} "):
        resolve_run(Config.load(None, [*words, f"data.seq_len={4 * POSITIONS + 1}"], environ={}))


def test_dry_run_shows_what_the_checkpoint_decides_and_writes_nothing(
    checkpoint, chats, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = ["--model.path", str(checkpoint), "--data.path", str(chats), "--dry_run"]
    assert main(words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["data"]["seq_len"], shown["data"]["tokenizer"]) == (POSITIONS, str(checkpoint))
    assert Config.load(shown, environ={}).to_dict() == shown
    assert list(tmp_path.iterdir()) == []


def test_steps_replace_the_recipes_epochs(words):
    overrides = [*words, "--train.steps", "2", "--train.sample_tokens", "0"]
    trainer = Trainer(Config.load(None, overrides, environ={}))
    assert trainer.total_steps == 2
    half = [*words, "--train.epochs", "0.5", "--train.global_batch_size", "1"]
    trainer = Trainer(Config.load(None, half, environ={}))
    assert trainer.total_steps == -(-len(trainer.data.train) // 2)
