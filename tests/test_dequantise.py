"""Quantised checkpoints are read as bf16, and exported so."""

import json
import logging

import pytest
import torch
from family_cases import random_reference, tokens
from safetensors.torch import load_file, save_file
from test_models import relative_error
from transformers import AutoModelForCausalLM

from moetrain.cli.checkpoint import main
from moetrain.config import ConfigError
from moetrain.models.hf.formats import Dequantised, format_of
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.save import save_hf

PROJECTIONS = ("gate_up_proj", "down_proj")
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def test_numbers_are_those_of_the_format():
    blocks = torch.zeros(1, 1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0] = 0xF1  # the low half is first: 0.5, then -6
    blocks[0, 0, 1, 15] = 0x2A  # -1, then 1
    scales = torch.tensor([[[127, 130]]], dtype=torch.uint8)
    found = Dequantised(
        format_of({"quantization_config": {"quant_method": "mxfp4"}}), (blocks, scales), (1, 64, 1)
    )[...]
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
    found = Dequantised(
        format_of({"quantization_config": {"quant_method": "mxfp4"}}), (blocks, scales), (1, 128, 4)
    )[...]
    want = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(found, want)
    by_hand = torch.tensor([x for b in range(256) for x in (FP4[b % 16], FP4[b // 16])])
    by_hand = by_hand.double() * 2.0 ** (scale - 127)
    assert torch.equal(found.mT.flatten().double(), by_hand)


def quantised(folder, case="gpt_oss in mxfp4"):
    """Write a model in mxfp4 into ``folder / "in"``, and its numbers in bf16 beside."""
    model = random_reference(case).bfloat16()
    model.save_pretrained(folder / "wide")
    stored = load_file(folder / "wide" / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    packed = {}
    for name in [name for name in stored if name.endswith(PROJECTIONS)]:
        experts, into, out = stored[name].shape
        shape = (experts, out, into // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 125, shape[:3], dtype=torch.uint8, generator=generator)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        low, high = (torch.tensor(FP4)[x.long()] for x in (blocks % 16, blocks // 16))
        values = (
            torch.stack((low, high), dim=-1).flatten(-2) * 2.0 ** (scales.float() - 127)[..., None]
        )
        stored[name] = values.flatten(-2).mT.contiguous().bfloat16()
    save_file(stored, folder / "wide" / "model.safetensors", {"format": "pt"})
    (folder / "in").mkdir()
    kept = {name: x for name, x in stored.items() if not name.endswith(PROJECTIONS)}
    # In two files, so that some tensors' parts are apart.
    scales = {name: packed.pop(name) for name in list(packed) if name.endswith("_scales")}
    files = {"model-00001-of-00002.safetensors": packed, "model-00002-of-00002.safetensors": scales}
    files["model-00001-of-00002.safetensors"] |= kept
    for file, tensors in files.items():
        save_file(tensors, folder / "in" / file, {"format": "pt"})
    names = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {}, "weight_map": names}
    (folder / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "wide" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "in" / "config.json").write_text(json.dumps(config))
    return stored


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
