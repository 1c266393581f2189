"""``python -m moetrain.checkpoint export-gguf``: gguf's reader finds what transformers has."""

import json
import re
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file

from moetrain.cli.checkpoint import main
from tests.lib.exports import TEMPLATE
from tests.lib.gguf_models import CASES, LLAMA3, YARN, write

gguf = pytest.importorskip("gguf")

OWN = {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "mixtral": "llama"}
"""llama.cpp's names of architectures, where they differ from the model types."""
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "self_attn.sinks": "attn_sinks",
    "mlp.router": "ffn_gate_inp",
}
"""llama.cpp's names of tensors."""


def wanted_of(folder, case):
    """Return llama.cpp's tensors by name, made of transformers' one by one."""
    found = {}
    for name, x in load_file(folder / "model.safetensors").items():
        inner = re.fullmatch(r"model\.layers\.(\d+)\.(.+?)[._]?(weight|bias|)", name)
        if inner is None:
            found[NAMES[name]] = x
            continue
        layer, module, leaf = inner.groups()
        leaf = leaf or "weight"
        if case == "gpt_oss" and "experts" in module:  # [E, in, out], gate and up interleaved
            x = x.mT if leaf == "weight" else x
            if "gate_up" in module:
                key = f"blk.{layer}.ffn_{{}}_exps.{leaf}"
                found |= {key.format("gate"): x[:, ::2], key.format("up"): x[:, 1::2]}
                continue
        expert = re.search(r"experts\.(\d+)\.", module)
        module = re.sub(r"experts\.\d+\.", "experts.", module)
        if case in ("llama", "mixtral") and module in ("self_attn.q_proj", "self_attn.k_proj"):
            x = rotated(x, 4 if "q_proj" in module else 2)
        key = f"blk.{layer}.{NAMES[module]}.{leaf}"
        if case == "gpt_oss":
            key = key.replace("ffn_norm", "post_attention_norm")
        if expert is None:
            found[key] = x
        else:
            found.setdefault(key, {})[int(expert[1])] = x
    stacks = {n: x for n, x in found.items() if isinstance(x, dict)}
    return found | {n: torch.stack([x[i] for i in sorted(x)]) for n, x in stacks.items()}


def rotated(x, heads):
    """Put the rows of each head in llama.cpp's order, one by one."""
    width, made = len(x) // heads, torch.empty_like(x)
    for head in range(heads):
        for i in range(width // 2):
            for k in range(2):
                made[head * width + 2 * i + k] = x[head * width + k * width // 2 + i]
    return made


def read(file):
    """Return the fields and the dequantised tensors of ``file`` by gguf's reader."""
    reader = gguf.GGUFReader(file)
    tensors = {
        x.name: (x.tensor_type, torch.tensor(gguf.quants.dequantize(x.data, x.tensor_type)))
        for x in reader.tensors
    }
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, tensors


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32", "q8_0"])
@pytest.mark.parametrize("case", CASES)
def test_tensors_are_those_of_transformers(case, kind, tmp_path):
    write(case, tmp_path)
    out = tmp_path / "made.gguf"
    assert main(["export-gguf", str(tmp_path), str(out), "--gguf_type", kind]) == 0
    fields, tensors = read(out)
    wanted = wanted_of(tmp_path, case)
    assert tensors.keys() == wanted.keys()
    for name, (type, got) in tensors.items():
        want = wanted[name].float()
        is_exact = want.ndim == 1 or name.endswith(".bias") or "ffn_gate_inp" in name
        own = "f32" if is_exact else kind
        assert type == gguf.GGMLQuantizationType[own.upper()], name
        assert got.shape == want.shape
        if own == "q8_0":
            rounded = gguf.quants.quantize(want.numpy(), type)
            assert torch.equal(got, torch.tensor(gguf.quants.dequantize(rounded, type))), name
            assert (got - want).abs().max() <= want.abs().max() / 127
        else:
            dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[own]
            assert torch.equal(got, want.to(dtype).float()), name
    model = fields["general.architecture"]
    assert model == OWN.get(case, case)
    assert fields[f"{model}.block_count"] == 2
    assert fields[f"{model}.attention.head_count_kv"] == 2
    config = json.loads((tmp_path / "config.json").read_text())
    assert fields[f"{model}.rope.freq_base"] == config["rope_parameters"]["rope_theta"]
    used = fields.get(f"{model}.expert_used_count")
    assert used == (2 if case in ("qwen3_moe", "mixtral", "gpt_oss") else None)
    rope = {
        "type": "yarn",
        "factor": 8.0,
        "original_context_length": 32,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
    }
    found = {key: fields.get(f"{model}.rope.scaling.{key}") for key in rope}
    assert found == (rope if case == "gpt_oss" else dict.fromkeys(rope))
    window = fields.get(f"{model}.attention.sliding_window")
    assert window == (8 if case == "gpt_oss" else None)


def test_the_tokenizer_is_that_of_the_folder(tmp_path):
    write("qwen3", tmp_path)
    assert main(["export-gguf", str(tmp_path), str(tmp_path / "a.gguf")]) == 0
    fields, _ = read(tmp_path / "a.gguf")
    said = json.loads((tmp_path / "tokenizer.json").read_text())
    tokens = fields["tokenizer.ggml.tokens"]
    for token, i in said["model"]["vocab"].items():
        assert tokens[i] == token
    assert len(tokens) == 290
    assert tokens[289] == "[PAD289]"
    types = fields["tokenizer.ggml.token_type"]
    assert [types[i] for i in (0, 3, 10, 289)] == [3, 3, 1, 5]  # control, normal, unused
    assert fields["tokenizer.ggml.merges"] == [" ".join(x) for x in said["model"]["merges"]]
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    names = ("bos_token_id", "eos_token_id", "padding_token_id", "add_bos_token")
    assert [fields[f"tokenizer.ggml.{name}"] for name in names] == [0, 1, 2, False]
    assert fields["tokenizer.chat_template"] == TEMPLATE


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "qwen3", "qwen3_moe"])
def test_transformers_loads_the_file_with_the_same_logits(case, tmp_path):
    """Its reader undoes llama.cpp's order of rows, and takes its defaults for some widths."""
    defaults = {"qwen3": {"head_dim": 128}, "qwen3_moe": {"head_dim": 128}}
    sizes = {"moe_intermediate_size": 768} if case == "qwen3_moe" else {}
    model = write(case, tmp_path, **defaults.get(case, {}), **sizes)
    assert main(["export-gguf", str(tmp_path), str(tmp_path / "a.gguf"), "--gguf_type", "f16"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", dtype=torch.float32
    )
    tokens_BS = torch.arange(40).view(2, 20) * 7
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "mlp.gate.weight" not in name:  # routers are in fp32
            parameter.copy_(parameter.half())
    want = model(tokens_BS).logits
    torch.testing.assert_close(theirs(tokens_BS).logits, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "sizes", "says"),
    [
        ("llama", {"attention_bias": True}, "does not write: biases; convert the folder by"),
        (
            "qwen3",
            {"rope_parameters": YARN | {"rope_type": "llama3", **LLAMA3}},
            "rotary embeddings stretched by llama3",
        ),
        (
            "qwen3",
            {"rope_parameters": YARN | {"attention_factor": 1.0}},
            "yarn with a factor of its own on attention",
        ),
        ("mixtral", {"sliding_window": 8}, "sliding windows"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "windows in other layers than every"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit 6.0 instead of 7.0"),
        ("qwen3_moe", {"norm_topk_prob": False}, "not normalised"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "layers without experts"),
    ],
)
def test_what_cannot_be_expressed_is_refused_in_one_line(case, sizes, says, tmp_path, capsys):
    write(case, tmp_path, **sizes)
    refuse(tmp_path, says, capsys)


def refuse(folder, says, capsys):
    assert main(["export-gguf", str(folder), str(folder / "a.gguf")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: PATH: ")
    assert says in error
    assert error.count("\n") == 1
    assert not list(folder.glob("*.gguf*"))


def test_other_tokenizers_are_refused_in_one_line(tmp_path, capsys):
    write("qwen3", tmp_path)
    file = tmp_path / "tokenizer.json"
    said = json.loads(file.read_text())
    for change in ({"add_prefix_space": True}, {"use_regex": False}, {"type": "Whitespace"}):
        file.write_text(json.dumps(said | {"pre_tokenizer": said["pre_tokenizer"] | change}))
        refuse(tmp_path, "a tokenizer of a kind that this export does not write", capsys)


def test_a_missing_library_is_named(tmp_path, monkeypatch, capsys):
    write("qwen3", tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["export-gguf", str(tmp_path), str(tmp_path / "a.gguf")]) == 2
    assert "export-gguf: needs the library gguf; install it by pip" in capsys.readouterr().err


def test_llama3_rope_factors_are_those_of_transformers(tmp_path):
    sizes = {"rope_parameters": YARN | LLAMA3 | {"rope_type": "llama3"}, "head_dim": 32}
    model = write("llama", tmp_path, **sizes)
    assert main(["export-gguf", str(tmp_path), str(tmp_path / "a.gguf")]) == 0
    _, tensors = read(tmp_path / "a.gguf")
    type, factors = tensors["rope_freqs.weight"]
    assert type == gguf.GGMLQuantizationType.F32
    plain = 15e4 ** -(torch.arange(0, 32, 2) / 32)  # llama.cpp divides angles by the factors
    torch.testing.assert_close(plain / factors, model.model.rotary_emb.inv_freq)
    assert factors.max() == pytest.approx(8.0)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_that_llama_cpp_rounds_is_told(truncate, tmp_path, caplog):
    write("gpt_oss", tmp_path, rope_parameters=YARN | {"truncate": truncate})
    assert main(["export-gguf", str(tmp_path), str(tmp_path / "a.gguf")]) == 0
    said = "llama.cpp rounds yarn's range to whole pairs (truncate true), and the model does not"
    assert (said in caplog.text) == (not truncate)


def test_a_tokenizer_that_merges_otherwise_is_refused(tmp_path, capsys):
    write("qwen3", tmp_path)
    file = tmp_path / "tokenizer.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"model": said["model"] | {"ignore_merges": True}}))
    refuse(tmp_path, "a tokenizer of a kind that this export does not write", capsys)
