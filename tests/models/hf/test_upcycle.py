"""``python -m moetrain.checkpoint upcycle``: a mixture of experts that begins as a dense model."""

import json

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from moetrain.cli.checkpoint import main
from moetrain.config import Config
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.save import Export
from moetrain.train.loop import Trainer
from tests.lib.family_cases import SIZES, tokens

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
# Rows are: dense model, arguments of upcycling, family of the result.
CASES = {
    "llama": ({"bos_token_id": 3, "eos_token_id": 7}, "", "mixtral"),
    "llama tied": ({"tie_word_embeddings": True, "head_dim": 10}, "--split 2", "mixtral"),
    "llama rope": ({"rope_parameters": LLAMA3}, "--split 4 --num_experts_per_token 4", "mixtral"),
    "llama one expert": ({}, "--num_experts 1 --num_experts_per_token 1", "mixtral"),
    "llama all experts": ({}, "--num_experts 6 --num_experts_per_token 6 --split 2", "mixtral"),
    "llama three pieces": (
        {"intermediate_size": 72, "num_key_value_heads": 4},
        "--num_experts 9 --num_experts_per_token 3 --split 3",
        "mixtral",
    ),
    "llama biases": ({"attention_bias": False}, "--family glm4_moe", "glm4_moe"),
    "qwen3": ({"head_dim": 12}, "", "qwen3_moe"),
    "qwen3 split": ({"head_dim": 12}, "--split 2 --num_experts_per_token 4", "qwen3_moe"),
    "qwen3 windows": ({"head_dim": 12, **WINDOWS}, "", "qwen3_moe"),
    "qwen3 biases": ({"head_dim": 6, "attention_bias": True}, "", "qwen3_moe"),
    "qwen3 dots": ({"head_dim": 12, **WINDOWS}, "--family dots1 --split 2", "dots1"),
    "qwen2": ({}, "", "glm4_moe"),
    "qwen2 split": ({}, "--num_experts 33 --split 3 --num_experts_per_token 6", "glm4_moe"),
}


def dense_model(case, folder, dtype=torch.float32):
    """Write a random dense model with random norms and biases."""
    sizes = {**SIZES, "intermediate_size": 48, **CASES[case][0]}
    config = AutoConfig.for_model(case.split()[0], **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                parameter.mul_(3) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(folder)
    return model


def upcycle(source, out, words=""):
    assert main(["upcycle", str(source), str(out), *words.split()]) == 0


@torch.no_grad()
def logits_of(folder, tokens_BS, dtype=torch.float32):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=dtype, output_loading_info=True
    )
    # Shared experts have no width; some classes always have them.
    report["missing_keys"] = {k for k in report["missing_keys"] if model.get_parameter(k).numel()}
    assert not any(report.values()), report
    return model(tokens_BS, use_cache=False).logits


@pytest.mark.parametrize("case", CASES)
def test_the_function_is_the_dense_models(case, tmp_path):
    with torch.no_grad():
        want = dense_model(case, tmp_path / "in")(tokens(2, 23)).logits
    upcycle(tmp_path / "in", tmp_path / "out", CASES[case][1])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    before = json.loads((tmp_path / "in" / "config.json").read_text())
    assert config["model_type"] == CASES[case][2]
    for key in ("bos_token_id", "eos_token_id"):
        assert config[key] == before[key]
    assert want.std() > 0.3
    torch.testing.assert_close(logits_of(tmp_path / "out", tokens(2, 23)), want, atol=1e-5, rtol=0)
    with torch.no_grad():
        ours = load_hf(tmp_path / "out")(tokens(2, 23))
    torch.testing.assert_close(ours, want, atol=1e-5, rtol=0)


def test_experts_are_copies_of_pieces(tmp_path):
    dense_model("llama", tmp_path / "in", torch.bfloat16)
    upcycle(tmp_path / "in", tmp_path / "out", "--split 2 --num_experts 6")
    dense = load_file(tmp_path / "in" / "model.safetensors")
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in made.values()} == {torch.bfloat16}
    for layer in range(3):
        block = f"model.layers.{layer}.block_sparse_moe"
        router = made[f"{block}.gate.weight"]
        assert torch.equal(router[0::2], router[1::2])
        assert len(router.unique(dim=0)) == 3
        assert 0.01 < router.float().std() < 0.03
        old = f"model.layers.{layer}.mlp"
        for expert in range(6):
            piece, name = slice(24 * (expert % 2), 24 * (expert % 2 + 1)), f"experts.{expert}"
            for ours, theirs in {"w1": "gate_proj", "w3": "up_proj"}.items():
                weight = made[f"{block}.{name}.{ours}.weight"]
                assert torch.equal(weight, dense[f"{old}.{theirs}.weight"][piece])
            weight = made[f"{block}.{name}.w2.weight"]
            assert torch.equal(weight, 2 * dense[f"{old}.down_proj.weight"][:, piece])
    for name, tensor in dense.items():
        assert ".mlp." in name or torch.equal(made[name], tensor), name


def test_noise_is_on_all_copies_but_the_first(tmp_path):
    dense_model("qwen3", tmp_path / "in")
    upcycle(tmp_path / "in", tmp_path / "plain", "--split 2")
    upcycle(tmp_path / "in", tmp_path / "noisy", "--split 2 --noise 0.05")
    plain, noisy = (load_file(tmp_path / f / "model.safetensors") for f in ("plain", "noisy"))
    errors = []
    for name, tensor in plain.items():
        _, found, rest = name.partition(".experts.")
        if found and int(rest.split(".")[0]) > 1:
            errors.append(((noisy[name] - tensor).std() / tensor.std()).item())
        else:
            assert torch.equal(noisy[name], tensor), name
    assert len(errors) == 3 * 6 * 3
    assert 0.04 < min(errors) <= max(errors) < 0.06
    upcycle(tmp_path / "in", tmp_path / "again", "--split 2 --noise 0.05")
    again = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert again == (tmp_path / "noisy" / "model.safetensors").read_bytes()


def test_files_are_cut_and_what_lies_beside_them_is_kept(tmp_path, monkeypatch):
    model = dense_model("llama", tmp_path / "in")
    model.save_pretrained(tmp_path / "in", max_shard_size="20kB")
    (tmp_path / "in" / "model.safetensors").unlink()
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    (tmp_path / "in" / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    monkeypatch.setattr(
        Export.__init__,
        "__kwdefaults__",
        {**(Export.__init__.__kwdefaults__ or {}), "max_shard_bytes": 20_000},
    )
    upcycle(tmp_path / "in", tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 5
    held = []
    for file in files:
        with safe_open(file, "pt") as shard:
            held.append(len(shard.keys()))
    assert max(held) < 20
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    text = (tmp_path / "out" / "generation_config.json").read_text()
    assert json.loads(text)["eos_token_id"] == [7, 9]
    with torch.no_grad():
        want = model(tokens(1, 9)).logits
    torch.testing.assert_close(logits_of(tmp_path / "out", tokens(1, 9)), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("case", "words", "says"),
    [
        ("llama", "--split 5", "split: 5 does not divide intermediate_size 48"),
        ("llama", "--split 0", "split: 0 does not divide"),
        ("llama", "--split 4", "num_experts_per_token: 2 is not a positive multiple of split 4"),
        (
            "llama",
            "--split 2 --num_experts 7",
            "num_experts: 7 is not a positive multiple of split 2",
        ),
        ("llama", "--num_experts 0", "num_experts: 0 is not"),
        ("llama", "--num_experts 2 --num_experts_per_token 4", "per_token 4 is more than num_exp"),
        ("llama", "--noise -1", "noise: -1.0 is not a finite number of 0 or more"),
        ("llama", "--noise nan", "noise: nan is not"),
        (
            "llama",
            "--family qwen3_moe",
            "qwen3_moe cannot have qk_norm False of this llama",
        ),
        ("llama", "--family llama", "family: llama cannot have the layers of this llama; give"),
        ("llama", "--family bert", "family: 'bert' is unknown; give one of "),
        ("llama biases", "--family mixtral", "a mixtral config.json cannot express qkv_bias True"),
        ("qwen3 some windows", "", "a qwen3_moe config.json cannot express sliding_windows"),
        ("llama mlp biases", "", "PATH: the llama model has biases in its feed-forward"),
        ("mixtral", "", "PATH: the mixtral model is not dense; give another"),
    ],
)
def test_what_cannot_be_upcycled_is_one_line(case, words, says, tmp_path, monkeypatch, capsys):
    given = {
        "llama biases": {"attention_bias": True},
        "llama mlp biases": {"mlp_bias": True},
        "qwen3 some windows": {"head_dim": 12, **WINDOWS, "max_window_layers": 2},
        "mixtral": {"num_local_experts": 2},
    }
    monkeypatch.setitem(CASES, case, (given.get(case, {}), "", ""))
    dense_model(case, tmp_path / "in")
    assert main(["upcycle", str(tmp_path / "in"), str(tmp_path / "out"), *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_model_is_written_over_its_source(tmp_path, capsys):
    dense_model("llama", tmp_path / "in")
    before = (tmp_path / "in" / "config.json").read_bytes()
    assert main(["upcycle", str(tmp_path / "in"), str(tmp_path / "in")]) == 2
    assert "is in the checkpoint itself" in capsys.readouterr().err
    assert (tmp_path / "in" / "config.json").read_bytes() == before


def test_training_goes_on_where_the_dense_model_was(tmp_path, tiny_words):
    """The first loss is the dense model's; routers and experts learn, and the loss falls."""
    sizes = {"intermediate_size": 48, "vocab_size": 264}
    config = AutoConfig.for_model("llama", **{**SIZES, **sizes})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "in")
    upcycle(tmp_path / "in", tmp_path / "made", "--split 2 --num_experts_per_token 4")
    words = [w for w in tiny_words if not w.startswith(("model.", "train.steps"))]
    words += ["data.tokenizer=byte", "train.sample_tokens=0", "optim.lr=0.01", "train.steps=30"]
    losses = {}
    for name, steps in (("in", 1), ("made", 30)):
        more = [f"model.path={tmp_path / name}", f"output_dir={tmp_path / 'run' / name}"]
        trainer = Trainer(Config.load(None, [*words, *more], environ={}))
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        losses[name] = [trainer.train_step().loss.item() for _ in range(steps)]
    assert losses["made"][0] == pytest.approx(losses["in"][0], abs=1e-5)
    assert losses["made"][-1] < losses["in"][0] - 1
    moved = {n: not torch.equal(before[n], p) for n, p in trainer.model.named_parameters()}
    assert all(moved.values()), moved
    router = trainer.model.get_parameter("layers.0.moe.router.weight")
    assert not torch.equal(router[0], router[1])  # pieces of one group diverge
