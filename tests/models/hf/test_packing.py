"""Exports with quantised matrices: transformers reads the formulas' values, and so do we."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moetrain.config import ConfigError
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.save import save_hf
from tests.lib.family_cases import CASES as ODD
from tests.lib.family_cases import SIZES as SMALL
from tests.lib.family_cases import random_reference, save_reference
from tests.lib.quantised_files import quantised
from tests.lib.small_models import relative_error

LOAD = transformers.AutoModelForCausalLM.from_pretrained
KEPT = ("embed_tokens", "lm_head", "norm", "layernorm", "mlp.gate", "shared_expert_gate")
KEPT += ("conv1d", "in_proj_a", "in_proj_b", "in_proj_ba", "router")
BLOCK = 128
# Widths are multiples of 128 or below it: transformers derives the size of blocks from the number
# of scales, and would refuse others, or take them for another size.
SIZES = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128}
CASES = {
    "qwen3_moe": {"head_dim": 64, "num_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v3": {"q_lora_rank": 128, "kv_lora_rank": 64},
    "qwen3_next": {"shared_expert_intermediate_size": 128},
    "olmoe": {},
    "qwen3": {"head_dim": 64},
}


def write(case, folder, **sizes):
    """Write transformers' model of ``case`` and load it."""
    sizes = SIZES | CASES[case] | sizes
    if case in ODD:
        save_reference(case, folder, **sizes)
    else:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(case, **SMALL | sizes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_hf(folder)


def tensors_of(folder):
    files = folder.glob("*.safetensors")
    return {name: x for path in files for name, x in load_file(path).items()}


def settings_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def is_kept(name):
    module = name.removesuffix(".weight")
    return not name.endswith(".weight") or module.endswith(KEPT)


def by_formula(w_NM):
    """Return e4m3 values and scales of blocks by the published formula, in fp64."""
    (rows, columns), n = w_NM.shape, BLOCK
    scales = torch.zeros(-(-rows // n), -(-columns // n))
    values = torch.zeros(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * n, (i + 1) * n), slice(j * n, (j + 1) * n))
            scales[i, j] = w_NM[part].abs().max() / 448
            exact = w_NM[part].double() / scales[i, j].double()
            values[part] = exact.float().to(torch.float8_e4m3fn).float()
    return values, scales


def assert_nearest(found, w_NM):
    """Check e4m3 values against the formula's; they may differ where it is nearly tied.

    Training's kernel multiplies by the inverse of a scale, and an export has the kernel's values.
    """
    codes, scales = by_formula(w_NM)
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    exact = w_NM.double() / wide[: len(w_NM), : w_NM.shape[1]].double()
    more = (found.double() - exact).abs() - (codes.double() - exact).abs()
    assert (more <= 2.0**-22 * exact.abs()).all()
    assert (found.float() != codes).double().mean() < 1e-3


@pytest.mark.tier("long", quick=["olmoe", "qwen3"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_fp8_is_the_formulas_and_transformers_reads_it(case, tmp_path):
    model = write(case, tmp_path / "in")
    save_hf(model, tmp_path / "out", format="fp8")
    plain, made = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    settings = settings_of(tmp_path / "out")
    kept = settings.pop("modules_to_not_convert")
    assert settings == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    values = {}
    for name, tensor in plain.items():
        if is_kept(name) or name.startswith(f"model.layers.{model.arch.num_layers}."):
            assert torch.equal(made.pop(name), tensor), name
            assert not name.endswith(".weight") or name.removesuffix(".weight") in kept
            values[name] = tensor
            continue
        found, scales = made.pop(name), made.pop(f"{name}_scale_inv")
        assert (found.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert torch.equal(scales, by_formula(tensor)[1]), name
        assert_nearest(found, tensor)
        wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        values[name] = found.float() * wide[: len(found), : found.shape[1]]
        assert relative_error(values[name], tensor) < 0.04
    assert not made
    # transformers' model and ours, of the dequantised values.
    save_file(values, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    want = LOAD(tmp_path / "in", dtype=torch.float32, attn_implementation="eager")
    theirs = LOAD(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    state = want.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in theirs.state_dict().items())
    again = load_hf(tmp_path / "out")
    mine = dict(load_hf(tmp_path / "in").named_parameters())
    assert all(torch.equal(x, mine[name]) for name, x in again.named_parameters())


@torch.no_grad()
def test_fp8_of_partial_blocks_is_padded_as_published(tmp_path):
    """DeepSeek-V3's latent keys have 576 rows, and the grid of their scales 5."""
    model = write("deepseek_v3", tmp_path / "in", kv_lora_rank=200, hidden_size=320)
    save_hf(model, tmp_path / "out", format="fp8", max_shard_bytes=10**5)
    made = tensors_of(tmp_path / "out")
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    assert [*made[name].shape] == [206, 320]
    assert [*made[f"{name}_scale_inv"].shape] == [2, 3]
    stored = tensors_of(tmp_path / "in")[name]
    assert_nearest(made[name], stored)
    assert torch.equal(made[f"{name}_scale_inv"], by_formula(stored)[1])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == made.keys()
    sizes = [x.numel() * x.itemsize for x in made.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    # An export that is read and quantised again has the same values.
    save_hf(load_hf(tmp_path / "out"), tmp_path / "again", format="fp8")
    for name, tensor in tensors_of(tmp_path / "again").items():
        assert torch.equal(tensor.float(), made[name].float()), name


def test_zeros_and_huge_weights_are_held(tmp_path):
    model = write("olmoe", tmp_path / "in")
    with torch.no_grad():
        model.get_parameter("layers.0.attn.wq.weight").zero_()
        model.get_parameter("layers.0.attn.wk.weight")[3, 5] = 3e38
    save_hf(model, tmp_path / "out", format="fp8")
    again = load_hf(tmp_path / "out").requires_grad_(False)
    assert not again.get_parameter("layers.0.attn.wq.weight").any()
    assert again.get_parameter("layers.0.attn.wk.weight")[3, 5].item() == pytest.approx(
        3e38, rel=1e-6
    )
    with torch.no_grad():
        model.get_parameter("layers.0.attn.wk.weight")[3, 5] = float("inf")
    with pytest.raises(ConfigError, match=r"format: 'fp8' cannot hold .*k_proj.*not finite; use"):
        save_hf(model, tmp_path / "bad", format="fp8")
    assert not (tmp_path / "bad").exists()


def test_stacked_experts_are_refused_before_anything_is_written(tmp_path):
    model = random_reference("gpt_oss")
    model.save_pretrained(tmp_path / "in")
    model = load_hf(tmp_path / "in")
    with pytest.raises(ConfigError, match=r"format: 'fp8', but .* gpt_oss have .*; use mxfp4"):
        save_hf(model, tmp_path / "out", format="fp8")
    # 24, the width of its experts, holds no group of 32.
    with pytest.raises(ConfigError, match=r"'mxfp4' has groups of 32, .* 24 of .*down_proj; use"):
        save_hf(model, tmp_path / "out", format="mxfp4")
    assert not (tmp_path / "out").exists()
    other = write("olmoe", tmp_path / "other")
    with pytest.raises(ConfigError, match="'mxfp4' is a format of gpt_oss, and this is a olmoe"):
        save_hf(other, tmp_path / "out", format="mxfp4")
    assert not (tmp_path / "out").exists()


def mxfp4_by_formula(w_NM):
    """Return the nearest values that mxfp4 can hold, in fp64; ties go to the even mantissa.

    A group's scale is the smallest power of two with all elements below 7 times the scale.
    """
    groups = w_NM.double().unflatten(-1, (-1, 32))
    scale = 2.0 ** ((groups.abs().amax(-1, keepdim=True) / 7).log2().floor() + 1)
    exact = groups / scale
    # The first of two that are as near is the one with the even mantissa.
    values = torch.tensor([0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0]).double()
    nearest = (exact.abs()[..., None] - values).abs().argmin(-1)
    return (values[nearest] * exact.sign() * scale).flatten(-2)


@torch.no_grad()
def test_mxfp4_is_the_formats_and_transformers_reads_it(tmp_path):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    random_reference("gpt_oss in mxfp4").save_pretrained(tmp_path / "in")
    save_hf(load_hf(tmp_path / "in"), tmp_path / "out", format="mxfp4", dtype="bfloat16")
    plain, made = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    assert settings_of(tmp_path / "out")["quant_method"] == "mxfp4"
    ours = tensors_of_model(load_hf(tmp_path / "out"), tmp_path / "again")
    for name, tensor in plain.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            assert torch.equal(made.pop(name), tensor.bfloat16()), name
            continue
        blocks, scales = made.pop(f"{name}_blocks"), made.pop(f"{name}_scales")
        experts, inner, outer = tensor.shape
        assert [*blocks.shape] == [experts, outer, inner // 32, 16]
        found = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert torch.equal(found.double(), mxfp4_by_formula(tensor.mT).mT), name
        assert torch.equal(ours[name].float(), found)
    assert not made
    theirs = LOAD(tmp_path / "out", dtype=torch.float32, attn_implementation="eager").state_dict()
    again = LOAD(tmp_path / "again", dtype=torch.float32).state_dict()
    assert all(torch.equal(x, again[name]) for name, x in theirs.items())


def tensors_of_model(model, folder):
    save_hf(model, folder)
    return tensors_of(folder)


def test_published_mxfp4_comes_back_as_it_was(tmp_path):
    """Values that are exact in mxfp4 stay; a byte may have another scale and twice the value."""
    stored = quantised(tmp_path)
    save_hf(load_hf(tmp_path / "in"), tmp_path / "out", format="mxfp4")
    save_hf(load_hf(tmp_path / "out"), tmp_path / "again")
    found = tensors_of(tmp_path / "again")
    assert found.keys() == stored.keys()
    assert all(torch.equal(x, stored[name]) for name, x in found.items())
    kept = settings_of(tmp_path / "out")["modules_to_not_convert"]
    assert "model.layers.*.self_attn" in kept


def by_library(folder):
    """Dequantise the files in ``folder`` by the library compressed-tensors, in fp64.

    Its own products are in the dtype of the scales, bf16.
    """
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors.base")
    settings = settings_of(folder)
    config = quantization.QuantizationConfig.model_validate(settings)
    compressor = compressors.BaseCompressor.get_value_from_registry(config.format)
    scheme, tensors, found = config.config_groups["group_0"], tensors_of(folder), {}
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        parts = {
            key: tensors.pop(f"{module}.{key}")
            for key in compressor.compression_param_names(scheme)
        }
        parts["weight_scale"] = parts["weight_scale"].double()
        found[f"{module}.weight"] = compressor.decompress(parts, scheme)["weight"]
    return found, tensors, settings["ignore"]


def formula_of(format, w_NM):
    """Return the nearest values of a format, in fp64, and half of the distance of two of them."""
    groups = w_NM[:, None] if format == "compressed-fp8" else w_NM.unflatten(1, (-1, 128))
    largest = 448 if format == "compressed-fp8" else 7.5
    scales = (groups.abs().amax(-1, keepdim=True) / largest).bfloat16().double()
    exact = groups.double() / scales
    if format == "compressed-fp8":
        codes = exact.clamp(-448, 448).float().to(torch.float8_e4m3fn).double()
    else:
        codes = exact.round().clamp(-8, 7)
    return (codes * scales).flatten(1)


@pytest.mark.tier("long", quick=["qwen3-..."])
@pytest.mark.parametrize("format", ["compressed-fp8", "compressed-int4"])
@pytest.mark.parametrize("case", ["qwen3", "deepseek_v3", "qwen3_moe"])
@torch.no_grad()
def test_compressed_tensors_reads_what_is_written(case, format, tmp_path):
    """The library's values are the formula's, and the import's bit for bit."""
    sizes = {"kv_lora_rank": 128, "v_head_dim": 32} if case == "deepseek_v3" else {}
    model = write(case, tmp_path / "in", **sizes)
    save_hf(model, tmp_path / "out", format=format)
    plain = tensors_of(tmp_path / "in")
    values, others, ignored = by_library(tmp_path / "out")
    for name, tensor in plain.items():
        if name in values:
            want, got = formula_of(format, tensor), values[name]
            # Elements that are nearly tied are divided in fp32.
            assert ((got - want).abs() > 2.0**-20 * want.abs()).double().mean() < 1e-3, name
            assert relative_error(got, tensor) < (0.04 if format == "compressed-fp8" else 0.12)
        else:
            assert torch.equal(others.pop(name), tensor), name
            assert not name.endswith(".weight") or name.removesuffix(".weight") in ignored
    assert not others
    assert {n for n in plain if not is_kept(n) and ".layers.3." not in n} == values.keys()
    save_hf(load_hf(tmp_path / "out"), tmp_path / "again", dtype="float32")
    again = tensors_of(tmp_path / "again")
    assert all(torch.equal(again[name], x.float()) for name, x in values.items())


@torch.no_grad()
@pytest.mark.parametrize("format", ["compressed-fp8", "compressed-int4"])
def test_transformers_reads_compressed_tensors(format, tmp_path):
    pytest.importorskip("compressed_tensors")
    save_hf(write("qwen3", tmp_path / "in"), tmp_path / "out", format=format)
    theirs = LOAD(
        tmp_path / "out",
        dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    )
    ours = tensors_of_model(load_hf(tmp_path / "out"), tmp_path / "again")
    for name, tensor in theirs.state_dict().items():
        # The library multiplies in bf16, the dtype of the scales.
        torch.testing.assert_close(tensor, ours[name].float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("format", "change"),
    [
        ("compressed-fp8", {"strategy": "tensor"}),
        ("compressed-fp8", {"symmetric": False}),
        ("compressed-int4", {"num_bits": 8}),
        ("compressed-int4", {"group_size": "128"}),
        ("compressed-int4", {"actorder": "group"}),
        ("compressed-int4", {"symmetric": None}),
    ],
)
def test_other_kinds_of_compressed_tensors_are_refused(format, change, tmp_path):
    model = write("qwen3", tmp_path / "in")
    save_hf(model, tmp_path / "out", format=format)
    assert load_hf(tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= change
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="such quantized weights are not read; use a checkpoint"):
        load_hf(tmp_path / "out")


def test_parts_of_another_shape_are_refused(tmp_path):
    save_hf(write("qwen3", tmp_path / "in"), tmp_path / "out", format="compressed-int4")
    tensors = tensors_of(tmp_path / "out")
    name = next(name for name in tensors if name.endswith("weight_shape"))
    save_file(
        tensors | {name: tensors[name] + 128},
        tmp_path / "out" / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ConfigError, match=r"weight_shape and .* do not fit together"):
        load_hf(tmp_path / "out")


def test_widths_without_whole_groups_are_refused(tmp_path):
    model = write("olmoe", tmp_path / "in", hidden_size=192)
    with pytest.raises(ConfigError, match=r"'compressed-int4' has groups of 128, .* width 192 of"):
        save_hf(model, tmp_path / "out", format="compressed-int4")
    assert not (tmp_path / "out").exists()
