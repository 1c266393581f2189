"""Checkpoints in four bits beneath adapters: the stored base loses nothing of the file."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetrain.config import ConfigError
from moetrain.kernels.quant.groups import QUANT_FORMATS
from moetrain.models.hf.formats import Dequantised, formats_of
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.save import save_hf
from moetrain.models.transformer import Transformer
from moetrain.parallel.fsdp.storage.quantised import Quantised
from moetrain.runtime.arena import Arena
from tests.lib.adapters import BASE, EVERYTHING, MICRO, adapted
from tests.lib.distributed import spawn
from tests.lib.engines import make_engine, weights_of
from tests.lib.frozen_bases import ROUND, merged_of
from tests.lib.quantised_files import FP4, quantised

STATE = "quant_state.bitsandbytes__nf4"
HOW = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
ARENA = Arena("weights", torch.device("cpu"))


def table_of_bytes():
    """Return bitsandbytes' ``create_dynamic_map``, by the formula of arXiv 1511.04561."""
    found = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        found += (10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        found += (-(10.0 ** (i - 6)) * ((edges[:-1] + edges[1:]) / 2)).tolist()
    return torch.tensor(sorted(found))


def as_bitsandbytes(name, shape, generator, nested):
    """Return a tensor's parts with random contents, and its elements; ``nested``: scales per
    factor, or 0."""
    numbers = math.prod(shape)
    quantiles = torch.tensor(QUANT_FORMATS["nf4"].codebook)
    codes = torch.randint(0, 16, (numbers,), generator=generator)
    scales = -(-numbers // 64)
    said = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [*shape]}
    parts = {"": ((codes[::2] << 4) | codes[1::2]).to(torch.uint8)[:, None], "quant_map": quantiles}
    if nested:
        bytes_G = torch.randint(0, 256, (scales,), dtype=torch.uint8, generator=generator)
        factors = 0.001 + 0.01 * torch.rand(-(-scales // nested), generator=generator)
        said |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": 0.0318}
        parts |= {"absmax": bytes_G, "nested_absmax": factors, "nested_quant_map": table_of_bytes()}
        wide_G = table_of_bytes()[bytes_G.int()] * factors.repeat_interleave(nested)[:scales]
        wide_G = wide_G + torch.tensor(0.0318)
    else:
        wide_G = parts["absmax"] = 0.01 + 0.02 * torch.rand(scales, generator=generator)
    parts[STATE] = torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)
    values = quantiles[codes] * wide_G.repeat_interleave(64)[:numbers]
    stored = {f"{name}.{key}" if key else name: part for key, part in parts.items()}
    return stored, values.view(*shape)


def write_nf4(folder, nested, sizes=ROUND):
    """Write a Qwen3-MoE like bitsandbytes; return the elements of its 4-bit tensors."""
    engine = adapted(EVERYTHING, *sizes)
    with torch.device("cpu"):
        model = Transformer(engine.arch)
    model.load_state_dict({n: w.clone() for n, w in engine.weights(merged=True)})
    save_hf(model, folder)
    generator, values = torch.Generator().manual_seed(0), {}
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "proj" in name]:
        parts, values[name] = as_bitsandbytes(name, tensors.pop(name).shape, generator, nested)
        tensors |= parts
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = HOW | {"bnb_4bit_use_double_quant": nested > 0}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def ours(values):
    """Return the stacked experts and the other matrices, under the model's names."""
    found = {}
    for i in range(2):
        for part in "qkvo":
            key = f"model.layers.{i}.self_attn.{part}_proj.weight"
            found[f"layers.{i}.attn.w{part}.weight"] = values[key]
        experts = f"model.layers.{i}.mlp.experts"
        of = [
            [values[f"{experts}.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")]
            for e in range(sum(key.startswith(f"{experts}.") for key in values) // 3)
        ]
        wide = torch.stack([torch.cat((gate, up)) for gate, up, _ in of])
        found[f"layers.{i}.moe.experts.w_gate_up"] = wide
        found[f"layers.{i}.moe.experts.w_down"] = torch.stack([down for _, _, down in of])
    return found


@pytest.mark.parametrize("nested", [64, 0])
def test_nf4_is_read_as_numbers_and_exported_in_bf16(nested, tmp_path):
    values = write_nf4(tmp_path / "base", nested)
    model = load_hf(tmp_path / "base")
    for name, wanted in ours(values).items():
        assert torch.equal(model.get_parameter(name), wanted), name
    save_hf(model, tmp_path / "out")
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(out[name], wanted.bfloat16()) for name, wanted in values.items())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def merged_on(folder, meshes):
    return [merged_of(folder, ["lora.base_dtype=nf4", *words]) for words in meshes]


@pytest.mark.tier("quick", wide=["meshes1"])
@pytest.mark.parametrize("meshes", [[[]], [["parallel.ep=2"], ["parallel.dp_shard=2"]]])
def test_nf4_is_stored_as_it_is_in_the_file(meshes, tmp_path):
    wanted = ours(write_nf4(tmp_path / "base", 32))
    if len(meshes) == 1:
        found = merged_on(tmp_path, meshes)
    else:
        found = spawn(2, merged_on, tmp_path, meshes)[0]
    for weights in found:
        for name, weight in wanted.items():
            assert torch.equal(weights[name], weight), name


def test_nf4_of_other_sizes_has_its_codes_and_scales_that_are_near(tmp_path):
    sizes = [*ROUND[:2], "model.moe_intermediate_size=40"]  # 2,560 elements per matrix
    wanted = ours(write_nf4(tmp_path / "base", 64, sizes))
    (found,) = merged_on(tmp_path, [[]])
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight) == (".attn." in name), name
        # The scales here are random and differ by half; a set spans up to all of that.
        torch.testing.assert_close(found[name], weight, rtol=0.05, atol=2e-3)


def parts_of(shape):
    """Return a tensor as it is read, its elements and its parts."""
    (form,) = formats_of({"quantization_config": HOW | {"bnb_4bit_use_double_quant": True}})
    parts, values = as_bitsandbytes("", shape, torch.Generator().manual_seed(0), 32)
    parts = [parts[ending] for ending in form.endings]
    return Dequantised(form, parts, shape), values, parts


def test_codes_are_taken_where_units_are_the_same_alone():
    given, values, _ = parts_of((32, 64))
    shard, shape = (
        Quantised(QUANT_FORMATS["nf4"], 4096, torch.float32, ARENA),
        torch.Size([64, 64]),
    )
    for first, is_same in ((0, True), (16, False), (32, True)):
        place = (slice(first, first + 32), slice(0, 64))
        shard.write(0, shape, place, given, (slice(0, 32), slice(0, 64)))
        found = shard.read(0, shape)[place]
        assert torch.equal(found, values) == is_same
        torch.testing.assert_close(found, values, rtol=0.05, atol=2e-3)


def test_files_with_tables_of_their_own_are_read_by_these():
    given, values, parts = parts_of((64, 64))
    parts[3] = parts[3] * 0.5
    shard = Quantised(QUANT_FORMATS["nf4"], 4096, torch.float32, ARENA)
    shard.write(0, torch.Size([64, 64]), (slice(0, 64), slice(0, 64)), given, (slice(0, 64),))
    found = shard.read(0, torch.Size([64, 64]))
    # Most groups have a 1, and the codes of the file.
    torch.testing.assert_close(found, values / 2, rtol=0.05, atol=2e-3)


def test_gpt_oss_has_the_codes_of_its_file(tmp_path):
    stored = quantised(tmp_path)
    (tmp_path / "in").rename(tmp_path / "base")
    kept = [word for word in BASE if not word.startswith(("model.", "data.path"))]
    words = [f"model.path={tmp_path / 'base'}", "data.source=synthetic", "lora.base_dtype=mxfp4"]
    engine = make_engine(*words, base=kept, micro=MICRO)
    weights = weights_of(engine)
    files = {
        k: v for f in (tmp_path / "base").glob("*.safetensors") for k, v in load_file(f).items()
    }
    is_large = torch.tensor([abs(x) >= 4 for x in FP4])
    for name, member in engine.fsdp.members.items():
        if not member.storage.is_packed or ".experts." not in name:
            continue
        layer, leaf = name.split(".")[1], name.rsplit(".", 1)[1]
        theirs = f"model.layers.{layer}.mlp.experts.{leaf[2:]}_proj"
        blocks, scales = files[f"{theirs}_blocks"], files[f"{theirs}_scales"]
        wide = stored[theirs].mT
        if leaf == "w_gate_up":  # rows of the two alternate
            blocks, scales, wide = (
                torch.cat((x[:, 0::2], x[:, 1::2]), 1) for x in (blocks, scales, wide)
            )
        assert torch.equal(weights[name].bfloat16(), wide)
        # Groups with a 4 or a 6 have the file's codes; others have equal values by other codes.
        both = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
        usual = is_large[both.int()].any(-1).flatten()
        assert usual.float().mean() > 0.99
        given = member.storage.format.split(member.storage.bytes[None])
        first = member.start // 32
        own = given.quantised.view(-1, 16)[first : first + usual.numel()]
        assert torch.equal(own[usual], blocks.view(-1, 16)[usual])
        own = given.scales[0, first : first + usual.numel()]
        assert torch.equal(own[usual], scales.flatten()[usual])


KEY = "model.layers.0.self_attn.q_proj.weight"


def said_with(**changes):
    def change(tensors):
        said = json.loads(bytes(tensors[f"{KEY}.{STATE}"].tolist())) | changes
        tensors[f"{KEY}.{STATE}"] = torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    "change",
    [
        said_with(quant_type="fp4"),
        said_with(shape=[7, 64]),
        said_with(shape=[]),
        said_with(shape=[-1, -8192]),
        said_with(shape=["1", True]),
        said_with(blocksize=0),
        said_with(nested_blocksize=1e9),
        said_with(nested_offset="0"),
        said_with(nested_offset=float("inf")),
        lambda x: x.update({f"{KEY}.{STATE}": torch.zeros(5, dtype=torch.uint8)}),
        lambda x: x.update({f"{KEY}.{STATE}": torch.zeros(1 << 17, dtype=torch.uint8)}),
        lambda x: x.update({f"{KEY}.absmax": x[f"{KEY}.absmax"][1:].clone()}),
        lambda x: x.pop(f"{KEY}.nested_absmax"),
    ],
)
def test_parts_of_nf4_that_do_not_fit_are_refused_in_one_line(change, tmp_path, nf4_folder):
    tensors = load_file(nf4_folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((nf4_folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="do not fit together") as caught:
        load_hf(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def nf4_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nf4")
    write_nf4(folder, 64)
    return folder
