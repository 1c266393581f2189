"""The names that vLLM and SGLang give to models, layers and experts, beside those of our exports.

The tables hold what was read, on 2026-12-01, in the packages vLLM 0.33.0 (files of 2026-11-01: its
registry, ``load_weights`` and mappers of each model, ``RoutedExperts`` and ``lora/``) and SGLang
0.5.23 (files of 2026-10-30: ``EntryClass`` and ``load_weights`` of each model, ``lora/lora.py``).
Neither has been run here.
"""

import pytest

from moetrain.models.families import FAMILIES

_PLAIN = ("model.layers.{layer}.", "mlp.experts.{expert}.", "gate_proj up_proj down_proj")
_MIXTRAL = ("model.layers.{layer}.", "block_sparse_moe.experts.{expert}.", "w1 w3 w2")
_DENSE = ("model.layers.{layer}.", "", "")
_INNER = "model.language_model.layers.{layer}."
_FUSED = "gate_up_proj down_proj"
FORMS = {
    "deepseek_v2": ("DeepseekV2ForCausalLM", *_PLAIN),
    "deepseek_v3": ("DeepseekV3ForCausalLM", *_PLAIN),
    "dots1": ("Dots1ForCausalLM", *_PLAIN),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", *_PLAIN),
    "flex_olmo": ("FlexOlmoForCausalLM", *_PLAIN),
    "gemma4": ("Gemma4ForConditionalGeneration", _INNER, "experts.", _FUSED),
    "gemma4_text": ("Gemma4ForCausalLM", _PLAIN[0], "experts.", _FUSED),
    "glm4_moe": ("Glm4MoeForCausalLM", *_PLAIN),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", *_PLAIN),
    "glm4v_moe": ("Glm4vMoeForConditionalGeneration", _INNER, *_PLAIN[1:]),
    "gpt_oss": (
        "GptOssForCausalLM",
        _PLAIN[0],
        "mlp.experts.",
        f"{_FUSED} gate_up_proj_bias down_proj_bias",
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", *_PLAIN),
    "kimi_k2": ("DeepseekV3ForCausalLM", *_PLAIN),
    "kimi_k25": (
        "KimiK25ForConditionalGeneration",
        "language_model.model.layers.{layer}.",
        *_PLAIN[1:],
    ),
    "llama": ("LlamaForCausalLM", *_DENSE),
    "minimax_m2": ("MiniMaxM2ForCausalLM", *_MIXTRAL),
    "mixtral": ("MixtralForCausalLM", *_MIXTRAL),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "backbone.layers.{layer}.",
        "mixer.experts.{expert}.",
        "up_proj down_proj",
    ),
    "olmoe": ("OlmoeForCausalLM", *_PLAIN),
    "qwen2": ("Qwen2ForCausalLM", *_DENSE),
    "qwen2_moe": ("Qwen2MoeForCausalLM", *_PLAIN),
    "qwen3": ("Qwen3ForCausalLM", *_DENSE),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", _INNER, "", ""),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", _INNER, *_PLAIN[1:]),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", *_PLAIN),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", *_DENSE),
    "qwen3_moe": ("Qwen3MoeForCausalLM", *_PLAIN),
    "qwen3_next": ("Qwen3NextForCausalLM", *_PLAIN),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", _INNER, "mlp.experts.", _FUSED),
}
"""For each family: the architecture that both servers register (see docs/checkpoints.md for the
exceptions), the prefix of layers, the prefix of experts in a layer, and the experts' tensors."""
STACKED_ADAPTERS = {"gpt_oss", "qwen3_5_moe", "qwen3_vl_moe"}
"""Families whose experts' adapters vLLM takes in the layout ``fused``; else ``per_expert``."""
WRITTEN_FUSED = {"gemma4", "gemma4_text", "kimi_k25", "nemotron_h", "qwen2_moe", "qwen3_5_moe_text"}
"""Families whose adapters ``lora.layout auto`` writes for PEFT, in a layout that vLLM refuses; it
takes none of ``kimi_k25``."""


NOT_READ = {
    *("afmoe", "axk1", "exaone_moe", "hy_v3", "laguna", "mellum", "mimo_v2_flash"),
    *("sarvam_mla", "sarvam_moe", "solar_open", "step3p5", "step3p7", "lfm2_moe"),
    *("mistral3", "mistral4", "granitemoeshared", "granitemoehybrid", "kimi_linear"),
    *("bailing_hybrid", "deepseek_v32", "glm_moe_dsa", "minimax_m3_vl", "minimax_m3_vl_text"),
    *("seed_oss", "smollm3", "olmo2"),
}
"""Families whose tensors' names have not been followed through the servers' loaders."""


def test_every_family_was_read_or_is_named():
    shipped = {  # tests.lib.toy_family registers one, too
        name
        for name, family in FAMILIES.items()
        if family.architecture.__module__.startswith("moetrain.")
    }
    assert {*FORMS} | NOT_READ == shipped


@pytest.mark.parametrize("name", FORMS)
def test_architectures_and_experts_have_the_names_that_servers_map(name):
    family = FAMILIES[name]
    architecture, layers, experts, tensors = FORMS[name]
    assert family.hf_class == architecture
    modules = {module for one in family.weight_map for module in one.modules}
    inner = {module for module in modules if "{layer}" in module}
    assert all(module.startswith(layers) for module in inner)
    found = {m for m in inner if "experts." in m and "shared_experts." not in m}
    assert found == {f"{layers}{experts}{tensor}" for tensor in tensors.split()}


def test_families_have_the_layouts_of_adapters_that_the_page_lists():
    fused = {name for name in FORMS if FAMILIES[name].lora_layout == "fused"}
    assert fused == STACKED_ADAPTERS | WRITTEN_FUSED
