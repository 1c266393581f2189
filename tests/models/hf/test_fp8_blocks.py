"""Checkpoints with matrices quantised in fp8 blocks, for every kind of weight map."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moetrain.cli.checkpoint import main
from moetrain.config import ConfigError
from moetrain.kernels.quant.blocks import BlockScaled, quantise_blocks
from moetrain.kernels.quant.recipes import RECIPES
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.save import save_hf
from tests.lib.checkpoints import tensors_of
from tests.lib.family_cases import save_reference, tokens
from tests.lib.family_ranks import run_on_two_ranks
from tests.lib.small_models import relative_error

BLOCK = (16, 12)
"""Block size; it divides few of the models' widths."""
QUANTISED = ("_proj.weight", "w1.weight", "w2.weight", "w3.weight", "in_proj_qkvz.weight")
QUANTISED += ("indexer.wq_b.weight", "indexer.wk.weight")
SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [*BLOCK]}


def quantise(w_NM, block=BLOCK, *, in_powers=False):
    """Return codes, scales (``in_powers`` of two), and the dequantised values."""
    (rows, columns), (n, m) = w_NM.shape, block
    scales = torch.empty(-(-rows // n), -(-columns // m))
    codes = torch.empty_like(w_NM, dtype=torch.float8_e4m3fn)
    values = torch.empty_like(w_NM, dtype=torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * n, (i + 1) * n), slice(j * m, (j + 1) * m))
            scales[i, j] = w_NM[part].abs().max() / 448
            if in_powers:
                scales[i, j] = scales[i, j].log2().ceil().exp2()
            codes[part] = (w_NM[part] / scales[i, j]).to(torch.float8_e4m3fn)
            values[part] = codes[part].float() * scales[i, j]
    return codes, scales, values


def save_quantised(case, folder, change=lambda tensors: None, how=quantise, block=BLOCK, **sizes):
    """Write a model in fp8 with its scales in another file; return all values in fp32, and the
    names of fp8 matrices."""
    save_reference(case, folder, **sizes)
    stored = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    mtp_weight = f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"
    stored[mtp_weight] = torch.randn(19, 30)
    values, first, second = {}, {}, {}
    for name, tensor in stored.items():
        if name.endswith(QUANTISED) and tensor.ndim == 2:
            codes, scales, values[name] = how(tensor, block)
            first[name], second[f"{name}_scale_inv"] = codes, scales
        else:
            values[name] = first[name] = tensor
    change(first)
    change(second)
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name, tensors in zip(names, (first, second), strict=True):
        save_file(tensors, folder / name, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    places = dict.fromkeys(first, names[0]) | dict.fromkeys(second, names[1])
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = SETTINGS | {"weight_block_size": [*block]}
    config |= {"quantization_config": settings, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return values, {name.removesuffix("_scale_inv") for name in second}


@pytest.mark.parametrize(
    ("shape", "block"), [((300, 130), (128, 128)), ((128, 256), (128, 128)), ((5, 3), (2, 7))]
)
def test_any_part_of_a_matrix_is_its_codes_times_their_scales(shape, block):
    w_NM = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales, values = quantise(w_NM, block)
    matrix = BlockScaled(codes, scales, shape, block)
    rows, columns = shape
    assert matrix.get_shape() == [rows, columns]
    assert relative_error(values, w_NM) < 0.04
    whole = slice(None)
    parts = [..., (), whole, slice(1, rows - 1), (slice(rows // 2, rows), slice(1, 2))]
    parts += [(whole, slice(columns // 2, columns)), (slice(3, 4), whole), (slice(0, 2), whole)]
    for part in parts:
        assert torch.equal(matrix[part], values[part])


@pytest.mark.parametrize(
    "case", ["deepseek_v3", "deepseek_v2", "deepseek_v32", "minimax_m2", "qwen3_next"]
)
@torch.no_grad()
def test_matrices_in_blocks_of_fp8_are_read_and_written_in_bf16(case, tmp_path, caplog):
    values, narrow = save_quantised(case, tmp_path / "in")
    with caplog.at_level(logging.INFO, logger="moetrain"):
        model = load_hf(tmp_path / "in")
    said = [message for message in caplog.messages if "quantised tensors" in message]
    assert len(said) == 1
    assert f"{len(narrow)} quantised tensors" in said[0]
    assert "bfloat16" in said[0]
    save_hf(model, tmp_path / "out")
    config, got = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("in", "out"))
    assert config.pop("quantization_config") == SETTINGS
    assert got == config
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == values.keys()
    for name, tensor in values.items():
        want = tensor.bfloat16() if name in narrow else tensor
        assert written[name].dtype == want.dtype, name
        assert torch.equal(written[name], want), name
    # An fp32 model has the values themselves, unrounded.
    save_hf(model, tmp_path / "wide", dtype="float32")
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    own = [name for name in narrow if not name.endswith("eh_proj.weight")]
    assert len(own) == len(narrow) - 1
    assert all(torch.equal(wide[name], values[name]) for name in own)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "wide", attn_implementation="eager", dtype=torch.float32
    )
    tokens_BS = tokens(2, 9)
    limit = 1e-4 if case == "qwen3_next" else 1e-5
    assert relative_error(model(tokens_BS), theirs(tokens_BS, use_cache=False).logits) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["fp8_blocks", "fp8_blocks_ue8m0"])
@torch.no_grad()
def test_weights_train_as_a_checkpoint_has_them(precision, dtype, tmp_path):
    """Products multiply the file's codes and scales, from fp32 weights and from bf16 copies."""
    recipe, block = RECIPES[precision], (128, 128)
    in_powers = recipe.blocks == "ue8m0"

    def of_bf16(w_NM, block):
        return quantise(w_NM.bfloat16().float(), block, in_powers=in_powers)

    sizes = {"hidden_size": 160, "moe_intermediate_size": 128, "intermediate_size": 272}
    _, narrow = save_quantised("deepseek_v3", tmp_path, how=of_bf16, block=block, **sizes)
    files = {
        name: x for path in tmp_path.glob("*.safetensors") for name, x in load_file(path).items()
    }
    model = load_hf(tmp_path)
    parameters, seen, twice = dict(model.named_parameters()), set(), 0
    for piece in model.pieces():
        if piece.hf_name not in narrow:
            continue
        w = parameters[piece.parameter].to(dtype)
        made = recipe.weights(w if w.dim() == 3 else w[None], "reference")
        at = piece.place if w.dim() == 3 else (0, *piece.place)
        blocks = [
            slice(x.start // 128, -(-x.stop // 128)) if isinstance(x, slice) else x for x in at
        ]
        codes, scales = made.values[at].float(), made.scales[tuple(blocks)]
        want, want_scales = (files[piece.hf_name + x] for x in ("", "_scale_inv"))
        # Equal values may have a power of two half as large, if the largest code is 224.
        ratio = want_scales / scales
        assert ((ratio == 1) | (ratio == 2) & in_powers).all(), piece.hf_name
        twice += (ratio == 2).sum().item()
        wide = ratio.repeat_interleave(128, 0).repeat_interleave(128, 1)[
            : len(want), : want.shape[1]
        ]
        assert torch.equal(codes, want.float() * wide), piece.hf_name
        seen.add(piece.hf_name)
    assert len(narrow) - 1 == len(seen) > 20
    assert twice < len(seen) / 4


def test_scales_of_other_origin_come_back_nearly_and_codes_as_they_were():
    """The values are not exact in bf16."""
    w_NM = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    codes, scales, values = quantise(w_NM, (128, 128))
    for dtype, limit in ((torch.float32, 2.0**-23), (torch.bfloat16, 2.0**-8)):
        made = quantise_blocks(values[None].to(dtype), "fp32")
        assert torch.equal(made.values[0].float(), codes.float())
        assert ((made.scales[0] - scales).abs() <= limit * scales).all()


@pytest.mark.tier("wide", long=["deepseek_v3-dp_shard"])
@pytest.mark.parametrize("axis", ["dp_shard", "tp"])
@pytest.mark.parametrize("case", ["deepseek_v3", "qwen3_next"])
def test_ranks_read_their_parts_of_blocks(case, axis, tmp_path):
    values, narrow = save_quantised(case, tmp_path / "in")
    more = {f"parallel.{axis}": 2, "train.freeze": "*attn.*,*.experts.*"}
    run_on_two_ranks(tmp_path, **more)
    after = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    assert after.keys() == values.keys()
    kept = [n for n in narrow if "attn." in n or ".experts." in n or "eh_proj" in n]
    assert len(kept) > 20
    for name in kept:
        assert torch.equal(after[name], values[name].bfloat16()), name
    assert main(["import-hf", str(tmp_path / "in"), str(tmp_path / "began")]) == 0
    began = tensors_of(tmp_path / "began" / "step-00000000")["model"]
    model = load_hf(tmp_path / "in")
    for name, parameter in model.named_parameters():
        assert torch.equal(began[name], parameter), name


NAME = "model.layers.0.self_attn.o_proj.weight"


def a_row_more(tensors):
    if f"{NAME}_scale_inv" in tensors:
        tensors[f"{NAME}_scale_inv"] = torch.ones(9, 2)


def without(tensors):
    tensors.pop(f"{NAME}_scale_inv", None)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (a_row_more, rf"{NAME}_scale_inv and {NAME} do not fit together: .*\(9, 2\)"),
        (without, rf"of a dtype that cannot be trained: {NAME} float8_e4m3fn"),
    ],
)
def test_scales_that_do_not_fit_are_refused_in_one_line(change, problem, tmp_path):
    save_quantised("deepseek_v3", tmp_path, change)
    with pytest.raises(ConfigError, match=problem) as caught:
        load_hf(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "how",
    [
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "gptq", "weight_block_size": [128, 128]},
        "fp8",
    ],
)
def test_other_quantised_weights_are_refused_in_one_line(how, tmp_path):
    save_quantised("deepseek_v3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    problem = "quantization_config .* use a checkpoint in bf16, .*in fp8 with weight_block_size"
    with pytest.raises(ConfigError, match=problem) as caught:
        load_hf(tmp_path)
    assert "\n" not in str(caught.value)
