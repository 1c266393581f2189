"""Helpers of tests/models/hf/test_dequantise.py that other tests use too."""

import json

import torch
from safetensors.torch import load_file, save_file

from tests.lib.family_cases import random_reference

PROJECTIONS = ("gate_up_proj", "down_proj")
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def quantised(folder, case="gpt_oss in mxfp4"):
    """Write a model in mxfp4 into ``folder / "in"``, and its values in bf16 beside it."""
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
    # The weights are in two files, so that some tensors' parts are separate.
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
