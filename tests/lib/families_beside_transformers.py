"""Helpers of tests/models/families/test_families.py that other tests use too."""

import torch

from moetrain.models.hf.peft import save_peft
from moetrain.models.parts.lora import adaptable, add_adapters
from moetrain.models.rules import ADAPTER


def save_adapters(model, lora, folder, tokens_BS):
    """Write random adapters of ``model`` in PEFT's form; return its logits with them."""
    plain = model(tokens_BS)
    add_adapters(model.layers, lora)
    adapters = []
    for name, parameter in model.named_parameters():
        if name.endswith(ADAPTER):
            parameter.normal_(0.0, 0.3)
    for name, module in adaptable(model.layers):
        for leaf in module.weights if module.lora_scale is not None else ():
            adapter = module.adapter(leaf, torch.float32)
            adapters.append((f"{name}.{leaf}", module.get_parameter(leaf).shape, adapter))
    save_peft(folder, model.arch, lora, adapters, None)
    want = model(tokens_BS)
    assert (want - plain).abs().max() > 0.05
    return want
