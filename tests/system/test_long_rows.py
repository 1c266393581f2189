"""Rows beyond a model's trained positions: ``model.max_positions`` and ``model.rope``."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from moetrain.config import Config, ConfigError
from moetrain.models.hf.config import architecture_from_hf, exported_config
from moetrain.models.hf.load import load_hf
from moetrain.train.loop import Trainer
from moetrain.train.session import resolve_run

PRESET = "model.preset=qwen3-30b-a3b"  # for 40,960 positions
SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
}


def resolved(*words):
    return resolve_run(Config.load(None, [*words], environ={}), needs_weights=False)[1]


@pytest.mark.parametrize(
    ("words", "kind", "factor", "original"),
    [
        (["model.max_positions=1048576", "model.rope=yarn"], "yarn", 25.6, 40960),
        (["model.max_positions=81920", "model.rope=linear"], "linear", 2.0, None),
        (["model.max_positions=2048"], "default", 1.0, None),
    ],
)
def test_longer_rows_scale_the_rotary_embeddings_and_exports_say_so(words, kind, factor, original):
    arch = resolved(PRESET, *words)
    assert (arch.rope.kind, arch.rope.factor) == (kind, factor)
    assert arch.rope.original_max_positions == original
    written = exported_config(arch, None)
    assert written["max_position_embeddings"] == arch.max_positions
    assert architecture_from_hf(written) == arch


@pytest.mark.parametrize(
    ("words", "setting", "says"),
    [
        (["model.max_positions=50000"], "model.max_positions", "50000 is more than the 40960"),
        (["model.rope=yarn"], "model.rope", "model.max_positions"),
        (["model.max_positions=4096", "model.rope=yarn"], "model.rope", "for 40960 positions"),
        (["data.seq_len=50000"], "data.seq_len", "model.max_positions with model.rope yarn"),
    ],
)
def test_bad_rope_settings_are_refused_in_one_line(words, setting, says):
    with pytest.raises(ConfigError, match=rf"(?s)^{setting}: [^\n]*{says}[^\n]*$"):
        resolved(PRESET, *words)


@pytest.fixture
def scaled(tmp_path):
    """Write the config.json of a model with scaled rotary embeddings; return its setting."""

    def write(kind, positions, **rope):
        config = exported_config(resolved(PRESET), None)
        rope = {"rope_type": kind, "rope_theta": config.get("rope_theta", 1e6)} | rope
        config |= {"max_position_embeddings": positions, "rope_scaling": rope}
        config.pop("rope_parameters", None)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return [f"model.path={tmp_path}", "data.source=synthetic"]

    return write


def test_a_linear_factor_of_the_models_own_is_part_of_the_new_one(scaled):
    own = scaled("linear", 4096, factor=2.0)
    arch = resolved(*own, "model.max_positions=8192", "model.rope=linear")
    assert (arch.rope.kind, arch.rope.factor, arch.reach) == ("linear", 4.0, 8192)


def test_rows_of_a_scaled_model_are_as_long_as_it_reaches_or_as_the_user_says(scaled):
    own = scaled("yarn", 4096, factor=4.0, original_max_position_embeddings=4096)
    assert resolved(*own, "data.seq_len=16384").reach == 16384
    with pytest.raises(ConfigError, match="more than the 8192 positions"):
        resolved(*own, "model.max_positions=8192", "data.seq_len=16384")
    with pytest.raises(ConfigError, match="20000 is more than the 16384 positions"):
        resolved(*own, "model.max_positions=20000")


def test_a_linear_models_reach_is_what_it_says(scaled):
    own = scaled("linear", 4096, factor=2.0)
    with pytest.raises(ConfigError, match="5000 is more than the 4096 positions"):
        resolved(*own, "model.max_positions=5000")


def test_a_checkpoint_trains_on_longer_rows_and_is_read_as_trained(tmp_path):
    """transformers computes the same from the files that the run writes."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, tie_word_embeddings=False))
    theirs.save_pretrained(tmp_path / "model")
    words = [
        f"model.path={tmp_path / 'model'}",
        "model.max_positions=128",
        "model.rope=yarn",
        "data.source=synthetic",
        "data.seq_len=96",
        "train.steps=2",
        "train.global_batch_size=2",
        "train.micro_batch_size=2",
        "train.device=cpu",
        "compile.enabled=no",
        "checkpoint.save_hf=yes",
        f"output_dir={tmp_path / 'out'}",
    ]
    Trainer(Config.load(None, words, environ={})).fit()
    written = tmp_path / "out" / "hf"
    config = json.loads((written / "config.json").read_text())
    assert config["max_position_embeddings"] == 128
    rope = config.get("rope_parameters") or config["rope_scaling"]
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 4.0)
    tokens_BS = torch.randint(0, 300, (2, 96), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = load_hf(written, dtype=torch.float32)(tokens_BS)
        again = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)(tokens_BS).logits
    torch.testing.assert_close(ours, again, rtol=1e-5, atol=1e-5)
