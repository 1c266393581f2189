"""Checkpoints as modelopt and compressed-tensors write them in NVFP4 and FP8, with random contents.

The values of a tensor are computed in fp64, from the table of e2m1.
"""

import json

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.lib import family_cases, small_models
from tests.lib.quantised_files import FP4

E4M3 = torch.float8_e4m3fn
_FP8_WEIGHTS = {"dynamic": False, "num_bits": 8, "type": "float"}
_FP4_WEIGHTS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_PRODUCER = {"name": "modelopt", "version": "0.44.0"}
MODELOPT = {
    "config_groups": {
        "group_0": {
            "input_activations": _FP4_WEIGHTS,
            "weights": _FP4_WEIGHTS,
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", "*gate"],
    "quant_algo": "NVFP4",
    "kv_cache_scheme": _FP8_WEIGHTS,
    "producer": _PRODUCER,
    "quant_method": "modelopt",
}
"""``quantization_config`` of modelopt for one algorithm."""
MIXED = {
    "config_groups": {
        "group_0": {
            "input_activations": _FP8_WEIGHTS,
            "weights": _FP8_WEIGHTS,
            "targets": ["backbone.layers.0.mixer.in_proj"],
        },
        "group_1": {
            "input_activations": _FP4_WEIGHTS,
            "weights": _FP4_WEIGHTS,
            "targets": ["backbone.layers.1.mixer.experts.0.up_proj"],
        },
    },
    "quantized_layers": {
        "backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
        "backbone.layers.1.mixer.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "backbone.layers.5.mixer.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    },
    "ignore": [],
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_scheme": _FP8_WEIGHTS,
    "producer": _PRODUCER,
    "quant_method": "modelopt",
}
"""The same for several algorithms."""
OWN_FILE = {
    "producer": _PRODUCER,
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}
"""``hf_quant_config.json``."""
_GROUP = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
    "actorder": None,
}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_GROUP, "dynamic": False},
            "input_activations": {**_GROUP, "dynamic": "local"},
        }
    },
}
"""``quantization_config`` of compressed-tensors."""
SEVERAL = {
    **PACKED,
    "format": "mixed-precision",
    "config_groups": {
        "group_0": {
            "targets": ["re:.*self_attn.*"],
            "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        },
        "group_1": {**PACKED["config_groups"]["group_0"], "format": "nvfp4-pack-quantized"},
    },
}
"""The same for groups of modules with formats of their own."""


def values_of(codes, scales, factor, divides=False, is_rounded=True):
    """Return elements: e2m1 * (scale * factor), or scale / factor, each product rounded to fp32.

    Two elements are in a byte of ``codes`` [..., M/2], the first in its low half. A product of two
    numbers in fp32 is exact in fp64. ``is_rounded`` False: return the products in fp64.
    """

    def to_fp32(x):
        return x.float().double() if is_rounded else x

    table = torch.tensor(FP4).double()
    elements = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(-2)
    wide = scales.float().double()
    wide = to_fp32(wide / factor.double() if divides else wide * factor.double())
    found = to_fp32(elements.unflatten(-1, (-1, 16)) * wide[..., None]).flatten(-2)
    return found.float() if is_rounded else found


def _random(shape, generator):
    """Return codes and scales of a tensor; with a factor of 1.7e-4 its elements are about 0.1."""
    *rows, width = shape
    codes = torch.randint(0, 256, (*rows, width // 2), dtype=torch.uint8, generator=generator)
    scales = 32 + 400 * torch.rand((*rows, width // 16), generator=generator)
    return codes, scales.to(E4M3)


def as_modelopt(shape, generator):
    """Return a matrix's parts by name, and its elements."""
    codes, scales = _random(shape, generator)
    factor = 1e-4 + 1e-4 * torch.rand((), generator=generator)
    parts = {"weight": codes, "weight_scale": scales, "weight_scale_2": factor}
    parts["input_scale"] = torch.tensor(0.0123)
    return parts, values_of(codes, scales, factor)


def as_packed(shape, generator):
    """Return the parts in compressed-tensors, and the elements."""
    codes, scales = _random(shape, generator)
    divisor = 5e3 + 5e3 * torch.rand(1, generator=generator)
    parts = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": divisor}
    parts["input_global_scale"] = torch.tensor([321.0])
    return parts, values_of(codes, scales, divisor, divides=True)


def as_fp8(shape, generator):
    """Return the parts of a matrix in FP8 with one scale, and its elements."""
    codes = (100 * torch.randn(shape, generator=generator)).to(E4M3)
    scale = 1e-3 + 1e-3 * torch.rand((), generator=generator)
    parts = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return parts, (codes.double() * scale.double()).float()


def as_rows(shape, generator):
    """Return the parts of a matrix in e4m3 with a scale a row by compressed-tensors."""
    codes = (100 * torch.randn(shape, generator=generator)).to(E4M3)
    scales = (1e-3 + 1e-3 * torch.rand((shape[0], 1), generator=generator)).bfloat16()
    return {"weight": codes, "weight_scale": scales}, (codes.double() * scales.double()).float()


def as_stacked(shape, generator):
    """Return the parts of stacked experts [E, M, N], each expert transposed, and the elements."""
    experts, width, rows = shape
    codes, scales = _random((experts, rows, width), generator)
    factor = 1e-4 + 1e-4 * torch.rand((), generator=generator)
    parts = {"": codes.mT, "_weight_scale": scales.mT, "_weight_scale_2": factor}
    parts["_input_scale"] = torch.tensor(0.0123)
    return parts, values_of(codes, scales, factor).mT


def save_plain(case, folder, sizes):
    """Write transformers' model of ``case``, with one tensor of an MTP head where there is one."""
    if case in family_cases.CASES:
        family_cases.save_reference(case, folder, **sizes)
        return
    torch.manual_seed(0)
    sizes = {**small_models.SIZES, **small_models.CASES[case], **sizes}
    config = transformers.AutoConfig.for_model(case, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write(case, folder, how, settings, caches=None, change=lambda tensors: None, **sizes):
    """Write a model, quantised; its scales are in another file.

    Args:
        how: returns the function that makes the parts of a tensor, by its name; None: none does.
        settings: ``quantization_config``; None: ``hf_quant_config.json`` alone says it.
        caches: the module of attention, which then has scales of the key/value cache.
        change: changes all tensors of the files.

    Returns all values, those of quantised tensors in fp32, and the names of quantised tensors.
    """
    save_plain(case, folder, sizes)
    generator = torch.Generator().manual_seed(0)
    values = load_file(folder / "model.safetensors")
    narrow, tensors = set(), {}
    for name, tensor in list(values.items()):
        if (make := how(name)) is None:
            tensors[name] = tensor
            continue
        parts, values[name] = make(tuple(tensor.shape), generator)
        narrow.add(name)
        stem = name.removesuffix("weight")
        tensors |= {stem + key: part.contiguous() for key, part in parts.items()}
        assert values[name].shape == tensor.shape
    for name in [name for name in values if caches and f"{caches}.k_proj.weight" in name]:
        stem = name.removesuffix("k_proj.weight")
        is_modelopt = (settings or {}).get("quant_method") != "compressed-tensors"
        for x in "kv":
            tensors[stem + (f"{x}_proj.{x}_scale" if is_modelopt else f"{x}_scale")] = (
                torch.tensor(0.75) if is_modelopt else torch.tensor([0.75])
            )
    change(tensors)
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: names["scale" in name] for name in tensors}
    for file in names:
        own = {name: x for name, x in tensors.items() if places[name] == file}
        save_file(own, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if settings is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    if settings is None or settings["quant_method"] == "modelopt":
        (folder / "hf_quant_config.json").write_text(json.dumps(OWN_FILE))
    return values, narrow
