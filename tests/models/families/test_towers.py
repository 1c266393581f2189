"""Language models beside a vision tower equal those of transformers, and the tower is carried on.

Logits, the loss and every gradient; files there and back bit for bit, in each of their layouts;
adapters against PEFT.
``test_families.py`` has Qwen3.5 and Gemma-4, whose language models it also tests alone.
"""

import json
from copy import deepcopy

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from moetrain.config import ConfigError, LoraSection
from moetrain.models.families import FAMILIES
from moetrain.models.hf.config import architecture_from_hf, exported_config
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.peft import attach_peft
from moetrain.models.hf.save import save_hf
from tests.lib.families_beside_transformers import save_adapters
from tests.lib.family_cases import (
    GLM,
    M3,
    MISTRAL,
    SIZES,
    SPREAD,
    STEP,
    STRETCHED,
    TURNS,
    V3,
    YARN,
    centre,
    tokens,
)
from tests.lib.small_models import gradients_as_checkpoint, relative_error

CLASSES = {
    "mistral3": "Mistral3",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "glm4v_moe": "Glm4vMoe",
    "kimi_k25": "Kimi_K25",
    "step3p7": "Step3p7",
    "minimax_m3_vl": "MiniMaxM3Sparse",
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
VISION |= {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
TOWERS = {
    "qwen3_vl_moe": VISION,
    "glm4v_moe": {key: VISION[key] for key in list(VISION)[:5]},
    "kimi_k25": {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    },
    "mistral3": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 7,
    },
    "step3p7": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "mlp_ratio": 2.0,
    },
    "minimax_m3_vl": {
        "hidden_size": 24,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
    },
}
QWEN = {"head_dim": 12, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
PARTS = {"mrope_section": [3, 2, 1], "rope_type": "default", "rope_theta": 1e4}
GLM4V = {key: value for key, value in GLM.items() if key != "num_nextn_predict_layers"}
GLM4V |= {"rope_parameters": {**PARTS, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}}
ONE_PAIR = {"rope_parameters": {**GLM4V["rope_parameters"], "mrope_section": [1, 0, 0]}}
TEXT = {**MISTRAL, "model_type": "mistral4"}
# The key names the family and the oddity of this case.
CASES = {
    "qwen3_vl_moe": QWEN,
    "qwen3_vl_moe tied": {**QWEN, "tie_word_embeddings": True},
    "qwen3_vl_moe biases": {**QWEN, "attention_bias": True, "num_key_value_heads": 4},
    "qwen3_vl_moe one kv head": {**QWEN, "num_key_value_heads": 1, "head_dim": 8},
    "qwen3_vl_moe dense layers": {**QWEN, "mlp_only_layers": [0, 2]},
    "qwen3_vl_moe every other": {**QWEN, "decoder_sparse_step": 2},
    "qwen3_vl_moe interleaved parts": {
        **QWEN,
        "rope_parameters": {**PARTS, "mrope_interleaved": True},
    },
    "qwen3_vl_moe yarn": {**QWEN, "rope_parameters": {**YARN, "mrope_section": [3, 2, 1]}},
    "qwen3_vl_moe one layer": {**QWEN, "num_hidden_layers": 1},
    "qwen3_vl_moe every expert": {**QWEN, "num_experts_per_tok": 6},
    "qwen3_vl_moe many experts": {**QWEN, "num_experts": 37, "num_experts_per_tok": 8},
    "qwen3_vl_moe square gate and up": {**QWEN, "moe_intermediate_size": 16},
    "qwen3_vl_moe square down": {**QWEN, "moe_intermediate_size": 32},
    "glm4v_moe": GLM4V,
    "glm4v_moe tied": {**GLM4V, "tie_word_embeddings": True},
    "glm4v_moe no biases": {**GLM4V, "attention_bias": False},
    "glm4v_moe groups": {**GLM4V, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    "glm4v_moe one kv head": {**GLM4V, **ONE_PAIR, "num_key_value_heads": 1, "head_dim": 4},
    "glm4v_moe no dense layer": {**GLM4V, "first_k_dense_replace": 0},
    "glm4v_moe two dense layers": {**GLM4V, "first_k_dense_replace": 2},
    "glm4v_moe not normalised": {**GLM4V, "norm_topk_prob": False, "num_experts_per_tok": 5},
    "glm4v_moe whole heads": {
        **GLM4V,
        "rope_parameters": {**PARTS, "partial_rotary_factor": 1.0},
    },
    "glm4v_moe many experts": {**GLM4V, "n_routed_experts": 33, "num_experts_per_tok": 7},
    "glm4v_moe every expert": {**GLM4V, "num_experts_per_tok": 6},
    "kimi_k25": V3,
    "kimi_k25 tied": {**V3, "tie_word_embeddings": True},
    "kimi_k25 yarn": {**V3, "rope_parameters": STRETCHED},
    "kimi_k25 halves": {**V3, "rope_interleave": False, "qk_rope_head_dim": 8},
    "kimi_k25 groups": {**V3, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    "kimi_k25 biases": {**V3, "attention_bias": True},
    "kimi_k25 wide values": {**V3, "v_head_dim": 26},
    "kimi_k25 no dense layer": {**V3, "first_k_dense_replace": 0},
    "kimi_k25 two dense layers": {**V3, "first_k_dense_replace": 2},
    "kimi_k25 not normalised": {**V3, "norm_topk_prob": False, "num_experts_per_tok": 5},
    "kimi_k25 many experts": {**V3, "n_routed_experts": 33, "num_experts_per_tok": 7},
    "kimi_k25 one head": {**V3, "num_attention_heads": 1, "num_key_value_heads": 1},
    "mistral3": TEXT,
    "mistral3 tied": {**TEXT, "tie_word_embeddings": True},
    "mistral3 two dense layers": {**TEXT, "first_k_dense_replace": 2},
    "mistral3 no latent queries": {**TEXT, "q_lora_rank": None},
    "step3p7": STEP,
    "step3p7 tied": {**STEP, "tie_word_embeddings": True},
    "step3p7 no limits": {**STEP, "swiglu_limits": None, "swiglu_limits_shared": None},
    "step3p7 no window": {**STEP, "layer_types": TURNS[1:] * 3},
    "step3p7 every window": {**STEP, "layer_types": TURNS[:1] * 3},
    "step3p7 equal heads": {**STEP, "num_sliding_attention_heads": None},
    "step3p7 one kv head": {**STEP, "num_key_value_heads": 1},
    "step3p7 no dense layer": {**STEP, "mlp_layer_types": ["sparse"] * 3},
    "step3p7 biases": {**STEP, "attention_bias": True},
    "step3p7 every expert": {**STEP, "num_experts_per_tok": 6},
    "step3p7 many experts": {**STEP, "n_routed_experts": 37, "num_experts_per_tok": 8},
    "minimax_m3_vl": M3,
    "minimax_m3_vl one block": {**M3, "index_topk_blocks": 1},
    "minimax_m3_vl two own blocks": {**M3, "index_local_blocks": 2, "index_topk_blocks": 3},
    "minimax_m3_vl large blocks": {**M3, "index_block_size": 7},
    "minimax_m3_vl single keys": {**M3, "index_block_size": 1, "index_topk_blocks": 5},
    "minimax_m3_vl every block": {**M3, "index_topk_blocks": 12},
    "minimax_m3_vl every layer": {**M3, "layer_types": ["minimax_m3_sparse"] * 3},
    "minimax_m3_vl no sparse layer": {**M3, "layer_types": ["full_attention"] * 3},
    "minimax_m3_vl one kv head": {**M3, "num_key_value_heads": 1, "index_n_heads": 1},
    "minimax_m3_vl whole heads": {**M3, "partial_rotary_factor": 1.0, "index_head_dim": 12},
    "minimax_m3_vl low limit": {**M3, "swiglu_limit": 0.3, "swiglu_alpha": 0.9},
    "minimax_m3_vl tied": {**M3, "tie_word_embeddings": True},
    "minimax_m3_vl no dense layer": {**M3, "mlp_layer_types": None},
    "minimax_m3_vl many experts": {**M3, "num_local_experts": 37, "num_experts_per_tok": 8},
}


def swap(tensors):
    """Give the stacked experts of a checkpoint the layout of the hub's files, or take it away."""
    is_stack = {name: ".experts." in name for name in tensors}
    return {name: x.mT.contiguous() if is_stack[name] else x for name, x in tensors.items()}


def rename(tensors):
    """Give the blocks of the language model the name that they have in the hub's files."""
    ours, theirs = "language_model.model.blocks.", "language_model.model.layers."
    return {name.replace(ours, theirs): x for name, x in tensors.items()}


LAYOUTS = {"qwen3_vl_moe": swap, "kimi_k25": rename}
"""Make of the files that transformers writes those that the hub has, where they differ."""
FILES = [(case, False) for case in CASES] + [(c, True) for c in CASES if c.split()[0] in LAYOUTS]
FIRST = [f"{case}-{is_hub}" for case, is_hub in FILES if " " not in case or "square" in case]


def random_reference(case):
    """Return transformers' own model of ``case``, in which no routing choice is nearly tied."""
    torch.manual_seed(len(case))
    family, sizes = case.split()[0], deepcopy(CASES[case])
    tied = sizes.pop("tie_word_embeddings", False)
    text = {**SIZES, **sizes, "tie_word_embeddings": tied}
    if family == "kimi_k25":  # transformers takes it for deepseek_v3
        text["model_type"] = "kimi_k2"
    config = AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=TOWERS[family],
        tie_word_embeddings=tied,
    )
    kind = getattr(transformers, f"{CLASSES[family]}ForConditionalGeneration")
    model = kind._from_config(config, attn_implementation="eager").train()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            spread = next((s for end, s in SPREAD.items() if name.endswith(end)), 0.1)
            tensor.normal_(centre(case, name), spread)
    return model


def save_reference(case, folder, is_hub):
    """Write transformers' model of ``case`` into ``folder``; return it and a file's tensors."""
    theirs = random_reference(case)
    theirs.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    if is_hub:
        stored = LAYOUTS[case.split()[0]](stored)
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return theirs, stored


def text_of(theirs, tokens_BS, **more):
    return theirs(input_ids=tokens_BS, use_cache=False, **more)


@pytest.mark.tier("wide", quick=FIRST)
@pytest.mark.parametrize(("case", "is_hub"), FILES)
def test_gradients_of_the_text_are_those_of_transformers(case, is_hub, tmp_path):
    theirs, _ = save_reference(case, tmp_path / "weights", is_hub)
    ours, tokens_BS = load_hf(tmp_path / "weights"), tokens(2, 23)
    reference = text_of(theirs, tokens_BS, labels=tokens_BS)
    logits_BSV = ours(tokens_BS)
    loss = cross_entropy(logits_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten())
    assert relative_error(logits_BSV, reference.logits) < 1e-5
    assert relative_error(loss, reference.loss) < 1e-5
    for model, total in ((ours, loss), (theirs, reference.loss)):
        for parameter in model.parameters():  # an unused expert has none, nor has the tower
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        total.backward()
        for fixed in (p for p in model.parameters() if not p.requires_grad):
            fixed.grad = fixed.detach().clone()
    want = gradients_as_checkpoint(theirs, theirs.save_pretrained, tmp_path / "theirs")
    want = LAYOUTS[case.split()[0]](want) if is_hub else want
    got = gradients_as_checkpoint(ours, lambda folder: save_hf(ours, folder), tmp_path / "ours")
    assert got.keys() == want.keys()
    errors = {name: relative_error(got[name], want[name]) for name in ours.source.own}
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}


@torch.no_grad()
@pytest.mark.tier("wide", quick=FIRST)
@pytest.mark.parametrize(("case", "is_hub"), FILES)
def test_files_come_back_bit_for_bit_with_their_tower(case, is_hub, tmp_path):
    _, stored = save_reference(case, tmp_path / "in", is_hub)
    model = load_hf(tmp_path / "in")
    save_hf(model, tmp_path / "out")
    configs = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("in", "out")]
    assert configs[0] == configs[1]
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == stored.keys()
    assert got.keys() > model.source.own.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in stored.items())
    # A change of the architecture is written where it was read; everything else stays.
    changed = model.arch.model_copy(update={"max_positions": 99})
    written = exported_config(changed, configs[0])
    assert written["text_config"]["max_position_embeddings"] == 99
    assert written["vision_config"] == configs[0]["vision_config"]
    rope = configs[0]["text_config"]["rope_parameters"]
    own = written["text_config"].get("rope_scaling")
    assert {k: rope[k] for k in rope if "mrope" in k} == {
        k: value for k, value in (own or {}).items() if "mrope" in k
    }
    assert architecture_from_hf(written) == changed


@torch.no_grad()
@pytest.mark.tier("wide", quick=list(CLASSES))
@pytest.mark.parametrize("case", [case for case in CASES if "square" not in case])
def test_transformers_reads_a_text_that_is_written_anew(case, tmp_path):
    """Without the source the language model has the hub's names, and the tower is not there.

    transformers decides by one tensor's shape, and takes a square one for its own layout.
    """
    theirs, stored = save_reference(case, tmp_path / "in", is_hub=False)
    model, tokens_BS = load_hf(tmp_path / "in"), tokens(1, 9)
    extra = {name: stored[name] for name in model.source.extra}
    model.source = None
    save_hf(model, tmp_path / "bare")
    written = load_file(tmp_path / "bare" / "model.safetensors")
    save_file({**written, **extra}, tmp_path / "bare" / "model.safetensors", {"format": "pt"})
    path = tmp_path / "bare" / "config.json"
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    written = json.loads(path.read_text()) | {"vision_config": config["vision_config"]}
    rope = config["text_config"][
        "rope_parameters"
    ]  # the parts of images' positions are the tower's
    written["text_config"] |= {"rope_scaling": None, "rope_parameters": rope}
    path.write_text(json.dumps(written))
    again, told = type(theirs).from_pretrained(
        tmp_path / "bare", attn_implementation="eager", output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert relative_error(model(tokens_BS), text_of(again, tokens_BS).logits) < 1e-5


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
@pytest.mark.parametrize("family", CLASSES)
@torch.no_grad()
def test_adapters_of_the_text_are_those_of_peft(family, layout, tmp_path):
    peft = pytest.importorskip("peft")
    if layout == "per_expert" and FAMILIES[family].lora_layout == "fused":
        pytest.skip("PEFT gives such adapters no effect, or has no place for them")
    theirs, _ = save_reference(family, tmp_path / "base", is_hub=False)
    model, tokens_BS = load_hf(tmp_path / "base"), tokens(2, 13)
    lora = LoraSection(rank=8, alpha=4, layout=layout)
    want = save_adapters(model, lora, tmp_path / "adapter", tokens_BS)
    base = type(theirs).from_pretrained(tmp_path / "base", attn_implementation="eager")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert relative_error(text_of(adapted, tokens_BS).logits, want) < 1e-5
    folders = ["adapter"]
    if layout == "fused":  # with stacked experts, PEFT would write another rank
        adapted.save_pretrained(tmp_path / "theirs")
        folders.append("theirs")
    for folder in folders:
        again = load_hf(tmp_path / "base")
        attach_peft(again, tmp_path / folder)
        assert relative_error(again(tokens_BS), want) < 1e-5


def test_layers_behind_the_text_are_carried_on(tmp_path):
    """Published lists have an entry for each of them, too."""
    _, stored = save_reference("step3p7", tmp_path / "in", is_hub=False)
    stored |= {f"model.layers.{i}.eh_proj.weight": torch.randn(4, 8) for i in (3, 4)}
    save_file(stored, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    path = tmp_path / "in" / "config.json"
    config = json.loads(path.read_text())
    want, text = architecture_from_hf(config), config["text_config"]
    text["num_nextn_predict_layers"] = 2
    for key in ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"):
        text[key] = text[key] + text[key][-1:] * 2
    path.write_text(json.dumps(config))
    model = load_hf(tmp_path / "in")
    assert model.arch == want
    save_hf(model, tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == stored.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in stored.items())
    text["num_nextn_predict_layers"] = 0
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"layer_types is .*, expected a list of num_hidden"):
        load_hf(tmp_path / "in")


def test_experts_of_neither_layout_are_refused(tmp_path):
    _, stored = save_reference("qwen3_vl_moe", tmp_path, is_hub=True)
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    save_file({**stored, name: stored[name].mT.contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"of another shape: .*layers\.") as caught:
        load_hf(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "change", "problem"),
    [
        ("kimi_k25", {"quantization_config": {"quant_method": "compressed-tensors"}}, "quantiz"),
        ("kimi_k25", {"scoring_func": "softmax"}, "scoring_func 'softmax' .* only 'sigmoid'"),
        ("qwen3_vl_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected 1"),
        ("qwen3_vl_moe", {"num_local_experts": 5}, "num_local_experts 5 contradicts"),
        ("glm4v_moe", {"n_group": 4}, "n_group 4 .* n_routed_experts 6"),
        ("mistral3", {"model_type": "mistral"}, "model_type 'mistral' .* only 'mistral4'"),
        ("mistral3", {"model_type": None}, "model_type None is not supported, only 'mistral4'"),
        ("step3p7", {"zero_centered": False}, "zero_centered False is not supported, only True"),
        ("minimax_m3_vl", {"use_gemma_norm": False}, "use_gemma_norm False is not supported, onl"),
    ],
)
def test_unsupported_texts_are_refused_in_one_line(family, change, problem):
    config = {"model_type": family, "text_config": {**SIZES, **CASES[family], **change}}
    with pytest.raises(ConfigError, match=problem) as caught:
        architecture_from_hf(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", CLASSES)
def test_a_head_beside_tied_embeddings_must_repeat_them(family, tmp_path):
    _, stored = save_reference(f"{family} tied", tmp_path, is_hub=False)
    model = load_hf(tmp_path)
    embed = next(p.hf_name for p in model.pieces() if p.parameter == "embed.weight")
    pieces = FAMILIES[family].pieces({"lm_head.weight": ()}, model.arch)
    head = pieces[0].hf_name
    assert {embed} == {name for name in stored if "embed_tokens" in name}
    save_file({**stored, head: stored[embed].clone()}, tmp_path / "model.safetensors")
    load_hf(tmp_path)
    save_file({**stored, head: stored[embed] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"ties the embeddings, but {head} differs from {embed}"):
        load_hf(tmp_path)


def packed(w_NM):
    """Return a matrix in 4 bits with scales of 32 elements, as Kimi publishes it, and its values.

    An int32 has eight elements, the first in its lowest bits, each with 8 added.
    """
    groups = w_NM.double().unflatten(1, (-1, 32))
    scales = (groups.abs().amax(-1, keepdim=True) / 7.5).bfloat16()
    codes = (groups / scales.double()).round().clamp(-8, 7)
    nibbles = (codes.flatten(1).long() + 8).unflatten(1, (-1, 8))
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    parts = {"packed": words, "scale": scales[..., 0], "shape": torch.tensor(w_NM.shape)}
    return parts, (codes * scales.double()).flatten(1)


@torch.no_grad()
@pytest.mark.parametrize("is_within", [True, False])
def test_kimis_experts_in_four_bits_are_read(is_within, tmp_path):
    """Routed experts alone are quantised; the settings may lie in ``text_config``."""
    settings = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    settings = {"config_groups": {"group_0": {"weights": {**settings, "symmetric": True}}}}
    settings |= {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    settings |= {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]}
    CASES["kimi_k25 int4"] = {**V3, "moe_intermediate_size": 32}
    try:
        _, stored = save_reference("kimi_k25 int4", tmp_path / "in", is_hub=True)
    finally:
        del CASES["kimi_k25 int4"]
    files, values = {}, {}
    for name, tensor in stored.items():
        if ".mlp.experts." not in name:
            files[name] = tensor
            continue
        parts, values[name] = packed(tensor)
        files |= {f"{name}_{ending}": part for ending, part in parts.items()}
    assert values
    save_file(files, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    path = tmp_path / "in" / "config.json"
    config = json.loads(path.read_text())
    (config["text_config"] if is_within else config)["quantization_config"] = settings
    path.write_text(json.dumps(config))
    save_hf(load_hf(tmp_path / "in"), tmp_path / "out", dtype="float32")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == stored.keys()
    for name, tensor in stored.items():
        want = values[name].float() if name in values else tensor
        assert torch.equal(got[name], want), name
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written | written["text_config"]
