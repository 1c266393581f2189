"""Quantised checkpoints are read and exported as bf16."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moetrain.cli.checkpoint import main
from moetrain.config import ConfigError
from moetrain.models.hf.formats import Dequantised, formats_of
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.save import save_hf
from tests.lib.family_cases import tokens
from tests.lib.quantised_files import FP4, quantised
from tests.lib.small_models import relative_error

(MXFP4,) = formats_of({"quantization_config": {"quant_method": "mxfp4"}})


def test_numbers_are_those_of_the_format():
    blocks = torch.zeros(1, 1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0] = 0xF1  # the low half is first: 0.5, then -6
    blocks[0, 0, 1, 15] = 0x2A  # -1, then 1
    scales = torch.tensor([[[127, 130]]], dtype=torch.uint8)
    found = Dequantised(MXFP4, (blocks, scales), (1, 64, 1))[...]
    assert found.dtype == torch.bfloat16
    want = torch.zeros(1, 64, 1)
    want[0, :2, 0] = torch.tensor([0.5, -6.0])
    want[0, 62:, 0] = torch.tensor([-8.0, 8.0])
    assert torch.equal(found.float(), want)


@pytest.mark.parametrize("scale", [0, 1, 120, 127, 250])
def test_every_byte_is_that_of_transformers(scale):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 4, 4, 16)
    scales = torch.full((1, 4, 4), scale, dtype=torch.uint8)
    found = Dequantised(MXFP4, (blocks, scales), (1, 128, 4))[...]
    want = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(found, want)
    by_hand = torch.tensor([x for b in range(256) for x in (FP4[b % 16], FP4[b // 16])])
    by_hand = by_hand.double() * 2.0 ** (scale - 127)
    assert torch.equal(found.mT.flatten().double(), by_hand)


@torch.no_grad()
def test_a_quantised_model_is_read_and_exported_in_bf16(tmp_path, caplog):
    stored = quantised(tmp_path)
    with caplog.at_level(logging.INFO, "moetrain"):
        model = load_hf(tmp_path / "in")
    assert "6 quantised tensors are dequantised" in caplog.text
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "wide", attn_implementation="eager", dtype=torch.float32
    )
    tokens_BS = tokens(2, 9)
    assert relative_error(model(tokens_BS), theirs(tokens_BS, use_cache=False).logits) < 1e-5
    save_hf(model, tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == stored.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in stored.items())
    assert {tensor.dtype for tensor in got.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((tmp_path / "wide" / "config.json").read_text())
    assert main(["import-hf", str(tmp_path / "in"), str(tmp_path / "began")]) == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda x: x.pop("model.layers.0.mlp.experts.down_proj_scales"), "do not fit.*None"),
        (lambda x: x.update({k: v[..., :8] for k, v in x.items() if "_blocks" in k}), "do not fit"),
        (lambda x: x.update({k: v.float() for k, v in x.items() if "_scales" in k}), "do not fit"),
    ],
)
def test_parts_that_do_not_fit_are_named_in_one_line(change, problem, tmp_path):
    quantised(tmp_path)
    folder = tmp_path / "in"
    tensors = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=problem) as caught:
        load_hf(folder)
    assert "\n" not in str(caught.value)
