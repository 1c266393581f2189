"""Checkpoints in NVFP4 and in FP8 of modelopt, and in NVFP4 of compressed-tensors, are read.

An element is e2m1 * scale of 16 elements * scale of the tensor, as fp64 has it with each of the two
products rounded to fp32. An export rounds that once, to bf16.
"""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moetrain.cli.checkpoint import main
from moetrain.config import ConfigError, ModelSection
from moetrain.kernels.quant.groups import QUANT_FORMATS
from moetrain.models.hf.files import HFSource, small_files
from moetrain.models.hf.formats import Dequantised, formats_of
from moetrain.models.hf.load import load_hf, load_weights, resolve_architecture
from moetrain.models.hf.save import save_hf
from moetrain.models.transformer import Transformer
from moetrain.parallel.fsdp.storage.quantised import Quantised
from moetrain.runtime.arena import Arena
from tests.lib.checkpoints import tensors_of
from tests.lib.distributed import spawn
from tests.lib.family_cases import random_reference, tokens
from tests.lib.family_ranks import run_on_two_ranks
from tests.lib.frozen_bases import merged_of
from tests.lib.nvfp4_files import (
    MIXED,
    MODELOPT,
    PACKED,
    SEVERAL,
    as_fp8,
    as_modelopt,
    as_packed,
    as_rows,
    as_stacked,
    values_of,
    write,
)
from tests.lib.quantised_files import PROJECTIONS
from tests.lib.small_models import relative_error

NVFP4, FP8 = formats_of({"quantization_config": MODELOPT})[0::2]
(OF_LIBRARY,) = formats_of({"quantization_config": PACKED})
# Widths of experts are whole groups of 16.
SIZES = {"hidden_size": 32, "moe_intermediate_size": 48}
NEMOTRON = {**SIZES, "moe_latent_size": 16, "moe_shared_expert_intermediate_size": 20}


def every_byte():
    """Return each byte under each finite scale of e4m3: codes [254, 2048] and scales."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(254, 4)
    finite = torch.tensor([x for x in range(256) if x & 127 != 127], dtype=torch.uint8)
    return codes, finite.view(torch.float8_e4m3fn)[:, None].repeat(1, 128)


def read(form, *parts):
    shape = form.shape(*([*part.shape] for part in parts))
    return Dequantised(form, parts, shape)


def test_numbers_are_those_of_the_format():
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, 0], codes[0, 15] = 0xF1, 0x2A  # the low half is first: 0.5, -6, and -1, 1
    scales = torch.tensor([[2.0, 0.75]]).to(torch.float8_e4m3fn)
    want = torch.zeros(1, 32)
    want[0, :2], want[0, 30:] = torch.tensor([0.25, -3.0]), torch.tensor([-0.1875, 0.1875])
    assert torch.equal(read(NVFP4, torch.tensor(0.25), scales, codes)[...], want)
    assert torch.equal(read(OF_LIBRARY, torch.tensor([4.0]), scales, codes)[...], want)


@pytest.mark.parametrize("factor", [0.25, 3.1e-5, 0.0137])
def test_every_byte_and_scale_is_that_of_the_table(factor):
    codes, scales = every_byte()
    factor = torch.tensor(factor)
    found = read(NVFP4, factor, scales, codes)[...]
    assert found.dtype == torch.float32
    assert torch.equal(found, values_of(codes, scales, factor))
    exact = values_of(codes, scales, factor, is_rounded=False)
    assert ((found.double() - exact).abs() <= 2.0**-23 * exact.abs()).all()
    divisor = 1 / factor
    found = read(OF_LIBRARY, divisor[None], scales, codes)[...]
    assert torch.equal(found, values_of(codes, scales, divisor, divides=True))


@pytest.mark.parametrize("divisor", [64.0, 1234.5, 31415.0])
def test_compressed_tensors_reads_the_same(divisor):
    """The library's own decompression, whose results are in bf16."""
    nvfp4 = pytest.importorskip("compressed_tensors.compressors.nvfp4")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.preset_name_to_scheme("NVFP4", ["Linear"])
    codes, scales = every_byte()
    divisor = torch.tensor([divisor])
    parts = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": divisor}
    want = nvfp4.NVFP4PackedCompressor.decompress(parts, scheme)["weight"]
    assert want.dtype == torch.bfloat16
    assert torch.equal(read(OF_LIBRARY, divisor, scales, codes)[...].bfloat16(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modelopt_reads_the_same(dtype):
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    codes, scales = every_byte()
    factor = torch.tensor(3.1e-5)
    theirs = qtensor.NVFP4QTensor(torch.Size((254, 2048)), dtype, codes)
    want = theirs.dequantize(scale=scales, double_scale=factor, block_sizes={-1: 16})
    assert torch.equal(read(NVFP4, factor, scales, codes)[...].to(dtype), want)


def test_modelopt_writes_what_is_read():
    """Its own quantisation of random weights, dense and of stacked experts."""
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    w_NM = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) / 9
    made, scales, factor = qtensor.NVFP4QTensor.quantize(w_NM, 16)
    found = read(NVFP4, factor, scales, made._quantized_data)[...]
    assert torch.equal(found, values_of(made._quantized_data, scales, factor))
    assert relative_error(found, w_NM) < 0.12
    exporting = pytest.importorskip("modelopt.torch.export.quant_utils")
    w_ENM = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1)) / 9
    factor = qtensor.NVFP4QTensor.get_weights_scaling_factor_2(w_ENM)
    scales, _ = qtensor.NVFP4QTensor.get_weights_scaling_factor(w_ENM, 16, factor)
    codes = exporting.to_quantized_weight(w_ENM, scales, "nvfp4", factor, 16)
    turned = exporting.maybe_transpose_expert_weight_dimensions(codes, scales)
    stacked = formats_of({"quantization_config": MODELOPT})[1]
    found = read(stacked, factor, *(part.contiguous() for part in reversed(turned)))
    assert found.get_shape() == [3, 32, 5]
    assert torch.equal(found[...].mT, values_of(codes, scales, factor))


class Counted:
    """A tensor that counts the elements that are read from it."""

    def __init__(self, tensor):
        self.tensor, self.read = tensor, 0

    @property
    def shape(self):
        return self.tensor.shape

    def get_shape(self):
        return [*self.tensor.shape]

    def __getitem__(self, index):
        found = self.tensor[index]
        self.read += found.numel()
        return found


def test_only_the_indexed_rows_are_read():
    generator = torch.Generator().manual_seed(0)
    parts, values = as_modelopt((7, 48), generator)
    counted = [Counted(parts[name]) for name in ("weight_scale_2", "weight_scale", "weight")]
    matrix = read(NVFP4, *counted)
    assert matrix.get_shape() == [7, 48]
    assert torch.equal(matrix[3:5, 16:40], values[3:5, 16:40])
    assert torch.equal(matrix[slice(3, 5)], values[3:5])  # those that were read last are kept
    assert [part.read for part in counted] == [1, 6, 48]
    assert torch.equal(matrix[6], values[6])
    assert matrix[2:2].shape == (0, 48)
    parts, values = as_stacked((5, 48, 7), generator)
    counted = [Counted(parts[name]) for name in ("_weight_scale_2", "_weight_scale", "")]
    stacked = read(formats_of({"quantization_config": MODELOPT})[1], *counted)
    assert torch.equal(stacked[2], values[2])
    assert torch.equal(stacked[2:4, 1:3, 5:], values[2:4, 1:3, 5:])
    assert [part.read for part in counted] == [2, 3 * 21, 3 * 24 * 7]


def is_expert(name):
    return ".experts." in name


def is_projection(name):
    return name.endswith("_proj.weight") and "eh_proj" not in name


def of_attention(name, how):
    return how if ".self_attn." in name and name.endswith("_proj.weight") else None


def of_qwen36(name):
    """Return how Qwen3.6's published copy in NVFP4 holds a tensor."""
    if name == "lm_head.weight" or (".mlp." in name and is_projection(name)):
        return as_modelopt
    if name.endswith(("in_proj_qkv.weight", "in_proj_z.weight", "linear_attn.out_proj.weight")):
        return as_fp8
    return of_attention(name, as_fp8)


def of_nemotron(name):
    """Return how Nemotron-3's published copies in NVFP4 hold a tensor."""
    if is_expert(name):
        return as_modelopt
    ours = (".shared_experts.up_proj.", ".shared_experts.down_proj.", ".in_proj.", ".out_proj.")
    return as_fp8 if any(part in name for part in ours) else None


CASES = {
    # Experts in NVFP4, shared experts and Mamba's projections in FP8, a cache in FP8.
    "nemotron_h": ({"how": of_nemotron, "settings": MIXED, "caches": "mixer"}, NEMOTRON),
    "qwen3_moe": (
        {"how": lambda name: as_modelopt if is_projection(name) else None, "settings": MODELOPT},
        {"vocab_size": 259, **SIZES},
    ),
    # With the settings of modelopt's own file alone.
    "olmoe": (
        {"how": lambda name: as_modelopt if is_expert(name) else None, "settings": None},
        {"intermediate_size": 48},
    ),
    # Stacked experts, which modelopt does not divide.
    "gpt_oss": (
        {
            "how": lambda name: as_stacked if name.endswith(PROJECTIONS) else None,
            "settings": MODELOPT,
        },
        {"intermediate_size": 48},
    ),
    # By compressed-tensors, the head too.
    "glm4_moe": (
        {
            "how": lambda name: as_packed if is_projection(name) or "lm_head" in name else None,
            "settings": PACKED,
            "caches": "self_attn",
        },
        {"head_dim": 8, "n_routed_experts": 6, "intermediate_size": 64, **SIZES},
    ),
    # Attention in fp8 by row beside it.
    "deepseek_v3": (
        {
            "how": lambda name: as_packed if is_expert(name) else of_attention(name, as_rows),
            "settings": SEVERAL,
        },
        {"n_routed_experts": 6, **SIZES},
    ),
    # As Qwen3.6's: the head and all experts in NVFP4, attention and gated delta nets in FP8.
    "qwen3_5_moe_text": (
        {"how": of_qwen36, "settings": MIXED, "caches": "self_attn"},
        {"shared_expert_intermediate_size": 32, **SIZES},
    ),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_published_copies_load_and_are_exported_in_bf16(case, tmp_path, caplog):
    how, sizes = CASES[case]
    values, narrow = write(case, tmp_path / "in", **how, **sizes)
    with caplog.at_level(logging.INFO, logger="moetrain"):
        model = load_hf(tmp_path / "in")
    assert f"{len(narrow)} quantised tensors are dequantised" in caplog.text
    save_hf(model, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == values.keys()
    for name, tensor in values.items():
        want = tensor.bfloat16() if name in narrow else tensor
        assert written[name].dtype == want.dtype, name
        assert torch.equal(written[name], want), name
    config, got = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("in", "out"))
    config.pop("quantization_config", None)
    assert got == config
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    assert "hf_quant_config.json" not in small_files(tmp_path / "in")
    # The dry run's check reads headers alone.
    assert resolve_architecture(ModelSection(path=str(tmp_path / "in"))) == model.arch
    # An fp32 model has the values themselves, unrounded, and transformers' model its logits.
    save_hf(model, tmp_path / "wide", dtype="float32")
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert all(torch.equal(wide[n], values[n]) for n in narrow)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "wide", attn_implementation="eager", dtype=torch.float32
    )
    tokens_BS = tokens(2, 9)
    limit = 1e-4 if case == "qwen3_5_moe_text" else 1e-5
    assert relative_error(model(tokens_BS), theirs(tokens_BS, use_cache=False).logits) < limit


def test_an_export_into_the_source_says_nothing_of_modelopt(tmp_path):
    how, sizes = CASES["olmoe"]
    values, narrow = write("olmoe", tmp_path, **how, **sizes)
    save_hf(load_hf(tmp_path), tmp_path)
    assert not (tmp_path / "hf_quant_config.json").exists()
    assert all(tensor.form is None for tensor in HFSource.read(tmp_path).stored.values())
    written = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(written[name], values[name].bfloat16()) for name in narrow)


@pytest.mark.tier("wide", long=["nemotron_h-tp", "qwen3_moe-ep"])
@pytest.mark.parametrize(
    "axes",
    [{"parallel.dp_shard": 2, "parallel.ep": 2}, {"parallel.tp": 2}],
    ids=["ep", "tp"],
)
@pytest.mark.parametrize("case", ["nemotron_h", "qwen3_moe", "gpt_oss"])
def test_ranks_read_their_parts(case, axes, tmp_path):
    how, sizes = CASES[case]
    values, narrow = write(case, tmp_path / "in", **how, **sizes)
    frozen = ["*attn.*", "*.experts.*"]
    frozen += ["*.shared_experts.*", "*.mamba.*"] if case == "nemotron_h" else []
    run_on_two_ranks(tmp_path, **axes, **{"train.freeze": ",".join(frozen)})
    after = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    assert after.keys() == values.keys()
    for name in narrow:
        assert torch.equal(after[name], values[name].bfloat16()), name
    assert main(["import-hf", str(tmp_path / "in"), str(tmp_path / "began")]) == 0
    began = tensors_of(tmp_path / "began" / "step-00000000")["model"]
    model = load_hf(tmp_path / "in")
    for name, parameter in model.named_parameters():
        assert torch.equal(began[name], parameter), name


def test_a_quantised_head_gets_new_rows(tmp_path):
    """Rows of new tokens are the mean of the dequantised ones, and the old ones stay."""
    how, sizes = CASES["glm4_moe"]
    values, _ = write("glm4_moe", tmp_path / "in", **how, **sizes)
    source = HFSource.read(tmp_path / "in").with_rows(262, 259)
    assert source.stored["lm_head.weight"].shape == (262, 32)
    arch = load_hf(tmp_path / "in").arch.model_copy(update={"vocab_size": 262})
    with torch.device("meta"):
        model = Transformer(arch)
    model.to_empty(device="cpu")
    load_weights(model, tmp_path / "in")
    head = model.get_parameter("lm_head.weight")
    assert torch.equal(head[:259], values["lm_head.weight"])
    mean_D = values["lm_head.weight"].double().mean(0)
    torch.testing.assert_close(head[259:].double(), mean_D.expand(3, -1), rtol=1e-6, atol=1e-7)


def without(ending):
    def change(tensors):
        del tensors[next(name for name in tensors if name.endswith(ending))]

    return change


def replaced(ending, make):
    def change(tensors):
        name = next(name for name in tensors if name.endswith(ending))
        tensors[name] = make(tensors[name])

    return change


MODULE = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("case", "change", "problem"),
    [
        ("qwen3_moe", without(".weight_scale"), "do not fit together: .*None"),
        ("qwen3_moe", without("q_proj.weight"), "do not fit together: .*None"),
        # Without the scale of the tensor it would be in FP8.
        ("qwen3_moe", without(".weight_scale_2"), r"weight_scale and \S+weight do not fit .*uint8"),
        ("glm4_moe", without(".weight_scale"), "do not fit together: .*None"),
        ("glm4_moe", without(".weight_packed"), "do not fit together: .*None"),
        ("glm4_moe", without(".weight_global_scale"), "missing: .*unexpected: .*weight_packed"),
        ("gpt_oss", without("_weight_scale"), "do not fit together: .*None"),
        # Groups of 32, of 8, scales in another dtype, a scale for each row, elements in bytes.
        ("qwen3_moe", replaced(".weight_scale", lambda x: x[:, ::2].clone()), "do not fit"),
        ("qwen3_moe", replaced(".weight_scale", lambda x: torch.cat((x, x), 1)), "do not fit"),
        ("qwen3_moe", replaced(".weight_scale", lambda x: x.float()), "do not fit"),
        ("qwen3_moe", replaced(".weight_scale_2", lambda x: x.expand(64).clone()), "do not fit"),
        ("qwen3_moe", replaced(".weight_scale_2", lambda x: x.half()), "do not fit"),
        ("qwen3_moe", replaced(".q_proj.weight", lambda x: torch.cat((x, x), 1)), "do not fit"),
        ("gpt_oss", replaced("_weight_scale", lambda x: x.mT.contiguous()), "do not fit"),
        ("nemotron_h", replaced("in_proj.weight_scale", lambda x: torch.ones(3)), "do not fit"),
        ("nemotron_h", without("in_proj.weight_scale"), "cannot be trained: .*float8_e4m3fn"),
        # Smoothed activations, which would need other weights.
        ("qwen3_moe", lambda x: x.update({f"{MODULE}.pre_quant_scale": torch.ones(32)}), "unexpec"),
    ],
)
def test_parts_that_do_not_fit_are_refused_in_one_line(case, change, problem, tmp_path):
    how, sizes = CASES[case]
    write(case, tmp_path, change=change, **how, **sizes)
    with pytest.raises(ConfigError, match=problem) as caught:
        resolve_architecture(ModelSection(path=str(tmp_path)))
    assert "\n" not in str(caught.value)


def algorithm(name, **more):
    return {"quant_method": "modelopt", "quant_algo": name, **more}


def mixed(*layers):
    return algorithm("MIXED_PRECISION", quantized_layers={str(i): x for i, x in enumerate(layers)})


def grouped(**weights):
    return {"config_groups": {"group_0": {"weights": {"type": "float", **weights}}}}


FINE = {"quant_algo": "NVFP4", "group_size": 16}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (algorithm("NVFP4_AWQ"), "quant_algo 'NVFP4_AWQ' of modelopt"),
        (algorithm("W4A8_AWQ", group_size=128), "quant_algo 'W4A8_AWQ' of modelopt"),
        (algorithm("MXFP8"), "quant_algo 'MXFP8' of modelopt"),
        (algorithm(["NVFP4"]), r"quant_algo \['NVFP4'\] of modelopt"),
        (algorithm("NVFP4", group_size=32), "'NVFP4' of modelopt with group_size 32"),
        (
            algorithm("NVFP4", **grouped(num_bits=4, group_size=32)),
            "'NVFP4' of modelopt with group_size 32",
        ),
        (algorithm("FP8", **grouped(num_bits=8, group_size=32)), "'FP8' .* with group_size 32"),
        (algorithm("NVFP4", quantization={"quant_algo": "W8A16"}), "quant_algo 'W8A16'"),
        (algorithm("MIXED_PRECISION"), "'MIXED_PRECISION' of modelopt without quantized_layers"),
        (mixed(FINE, {"quant_algo": "W4A16_AWQ"}), "quant_algo 'W4A16_AWQ' of modelopt"),
        (mixed(FINE, {**FINE, "group_size": 32}), "'NVFP4' of modelopt with group_size 32"),
        (mixed(FINE, 7), "quant_algo 7 of modelopt"),
        (algorithm("MIXED_PRECISION", **grouped(num_bits=6)), "quant_algo '6-bit float'"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_other_algorithms_are_refused_by_name(settings, problem, file, tmp_path):
    random_reference("olmoe").save_pretrained(tmp_path)
    if file == "config.json":
        config = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps({**config, "quantization_config": settings}))
    else:
        own = {k: v for k, v in settings.items() if k != "quant_method"}
        own = {"producer": {"name": "modelopt"}, "quantization": own.pop("quantization", own)}
        (tmp_path / file).write_text(json.dumps(own))
    wanted = f"{file}: .*{problem}.*are not read; use .*or FP8"
    with pytest.raises(ConfigError, match=wanted) as caught:
        load_hf(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"group_size": 32},
        {"strategy": "group"},
        {"num_bits": 8},
        {"symmetric": False},
        {"actorder": "group"},
        {"type": "int"},
        {"group_size": "16"},
    ],
)
def test_other_groups_of_compressed_tensors_are_refused(change):
    group = PACKED["config_groups"]["group_0"]
    settings = {**PACKED, "config_groups": {"group_0": {"weights": group["weights"] | change}}}
    problem = r"such quantized weights are not read; use .* in nvfp4"
    with pytest.raises(ConfigError, match=problem):
        formats_of({"quantization_config": settings})
    # Nor is a group beside others that are read.
    bad = {**SEVERAL["config_groups"]["group_1"], "weights": group["weights"] | change}
    groups = {**SEVERAL["config_groups"], "group_2": bad}
    with pytest.raises(ConfigError, match=problem):
        formats_of({"quantization_config": {**SEVERAL, "config_groups": groups}})


@pytest.mark.parametrize("groups", [{}, [], {"group_0": 7}, {"group_0": {"weights": []}}])
def test_groups_of_another_form_are_refused(groups):
    with pytest.raises(ConfigError, match="such quantized weights are not read"):
        formats_of({"quantization_config": {**PACKED, "config_groups": groups}})


def test_two_sizes_of_groups_are_refused_where_names_are_the_same():
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    for sizes, is_read in (((32, 32), True), ((32, 128), False)):
        groups = {
            f"group_{i}": {"weights": {**weights, "group_size": n}} for i, n in enumerate(sizes)
        }
        settings = {**PACKED, "format": "pack-quantized", "config_groups": groups}
        if is_read:
            assert len(formats_of({"quantization_config": settings})) == 1
        else:
            with pytest.raises(ConfigError, match="such quantized weights are not read"):
                formats_of({"quantization_config": settings})


@pytest.mark.parametrize(
    "settings",
    [
        algorithm("NVFP4"),
        algorithm("W4A16_NVFP4", group_size=16),
        {"quant_method": "modelopt", "quantization": {**FINE, "kv_cache_quant_algo": "FP8"}},
        mixed(FINE, {"quant_algo": "FP8"}, {"quant_algo": None}),
        algorithm("MIXED_PRECISION", **grouped(num_bits=4, group_size=16)),
        algorithm("FP8_PER_CHANNEL_PER_TOKEN"),
        algorithm(None, kv_cache_scheme={"num_bits": 8, "type": "float"}),
    ],
)
def test_the_ways_in_which_modelopt_names_nvfp4_and_fp8(settings):
    assert formats_of({"quantization_config": settings}) == formats_of(
        {"quantization_config": MODELOPT}
    )


def test_fp8_has_a_scale_for_the_tensor_or_for_each_row():
    generator = torch.Generator().manual_seed(0)
    parts, values = as_fp8((5, 7), generator)
    scale, codes = parts["weight_scale"], parts["weight"]
    assert torch.equal(read(FP8, scale, codes)[...], values)
    assert torch.equal(read(FP8, scale[None], codes)[2:4], values[2:4])
    scales_N = torch.rand(5, generator=generator)
    want = (codes.double() * scales_N.double()[:, None]).float()
    assert torch.equal(read(FP8, scales_N, codes)[1:, :3], want[1:, :3])


# ---- beneath adapters ---------------------------------------------------------------------------

ROUNDED = {  # a projection has a multiple of 2,048 elements
    "qwen3_moe": {"vocab_size": 50, "hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 32},
    "glm4_moe": {"vocab_size": 50, "hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 32},
}


def merged_on(folder, meshes):
    return [merged_of(folder, ["lora.base_dtype=nvfp4", *words]) for words in meshes]


@pytest.mark.tier("quick", long=["meshes1-qwen3_moe"], wide=["meshes1-glm4_moe"])
@pytest.mark.parametrize("case", ROUNDED)
@pytest.mark.parametrize("meshes", [[[]], [["parallel.ep=2"], ["parallel.dp_shard=2"]]])
def test_a_base_in_nvfp4_is_stored_as_it_is_in_the_file(meshes, case, tmp_path):
    """Each rank has whole rows of the file, in units of 2,048 elements."""
    how, sizes = CASES[case]
    write(case, tmp_path / "base", **how, **{**sizes, **ROUNDED[case]})
    wanted = dict(load_hf(tmp_path / "base").named_parameters())
    wanted = {n: w.detach() for n, w in wanted.items() if ".attn.w" in n or ".experts." in n}
    assert len(wanted) > 15
    if len(meshes) == 1:
        found = merged_on(tmp_path, meshes)
    else:
        found = spawn(2, merged_on, tmp_path, meshes)[0]
    for weights in found:
        for name, weight in wanted.items():
            if case == "qwen3_moe":
                assert torch.equal(weights[name], weight), name
            else:  # the factor is 1 / divisor, rounded
                torch.testing.assert_close(weights[name], weight, rtol=2.0**-22, atol=0)


def test_codes_are_taken_where_units_are_whole():
    parts, values = as_modelopt((64, 64), torch.Generator().manual_seed(0))
    given = read(NVFP4, *(parts[name] for name in ("weight_scale_2", "weight_scale", "weight")))
    form = QUANT_FORMATS["nvfp4"]
    shard = Quantised(form, 4096, torch.float32, Arena("weights", torch.device("cpu")))
    whole = torch.Size([64, 64])
    for first, rows, is_same in ((0, 32, True), (32, 32, True), (16, 32, False), (0, 64, True)):
        place = (slice(first, first + rows), slice(0, 64))
        # Rows of the file need not begin with a unit: its sets have one factor.
        shard.write(0, whole, place, given, (slice(64 - rows, 64),))
        found = shard.read(0, whole)[place]
        assert torch.equal(found, values[64 - rows :]) == is_same
        # Elements are rounded to steps of a sixth of a scale at least.
        assert relative_error(found, values[64 - rows :]) < (1e-7 if is_same else 0.12)
    codes, scales, shared = form.split(shard.bytes[None])
    assert torch.equal(codes[0], parts["weight"].flatten())
    assert torch.equal(scales[0], parts["weight_scale"].view(torch.uint8).flatten())
    assert shared is not None
    assert shared.tolist() == [[parts["weight_scale_2"].item(), 0.0] * 2]
