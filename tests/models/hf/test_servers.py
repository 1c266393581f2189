"""The names that vLLM and SGLang give to models, layers and experts, beside those of our exports.

The tables hold what was read, on 2026-12-01, in the packages vLLM 0.33.0 (files of 2026-11-01: its
registry, ``load_weights`` and mappers of each model, ``RoutedExperts`` and ``lora/``) and SGLang
0.5.23 (files of 2026-10-30: ``EntryClass`` and ``load_weights`` of each model, ``lora/lora.py``).
Neither has answered a request here. For families in ``LOADED_BY`` the server's class was built on a
CPU from an export of a small new model, its parameters filled with NaN, and the export loaded.
"""

import pytest

from moetrain.models.families import FAMILIES
from moetrain.models.family import Rename
from moetrain.models.hf.config import exported_config
from tests.lib.family_cases import architecture_of

_PLAIN = ("model.layers.{layer}.", "mlp.experts.{expert}.", "gate_proj up_proj down_proj")
_MIXTRAL = ("model.layers.{layer}.", "block_sparse_moe.experts.{expert}.", "w1 w3 w2")
_DENSE = ("model.layers.{layer}.", "", "")
_INNER = "model.language_model.layers.{layer}."
_FUSED = "gate_up_proj down_proj"
FORMS = {
    "afmoe": ("AfmoeForCausalLM", *_PLAIN),
    "axk1": ("AXK1ForCausalLM", *_PLAIN),
    "bailing_hybrid": ("BailingMoeV3ForCausalLM", *_PLAIN),
    "deepseek_v32": ("DeepseekV32ForCausalLM", *_PLAIN),
    "exaone_moe": ("ExaoneMoeForCausalLM", *_PLAIN),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", *_PLAIN),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", *_DENSE),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", *_DENSE),
    "hy_v3": ("HYV3ForCausalLM", *_PLAIN),
    "kimi_linear": ("KimiLinearForCausalLM", *_MIXTRAL),
    "laguna": ("LagunaForCausalLM", *_PLAIN),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        _PLAIN[0],
        "feed_forward.experts.{expert}.",
        "w1 w3 w2",
    ),
    "mellum": ("MellumForCausalLM", *_PLAIN),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", *_PLAIN),
    "minimax_m3_vl": (
        "MiniMaxM3SparseForConditionalGeneration",
        "language_model.model.layers.{layer}.",
        *_MIXTRAL[1:],
    ),
    "mistral4": ("Mistral4ForCausalLM", _PLAIN[0], "mlp.experts.", _FUSED),
    "olmo2": ("Olmo2ForCausalLM", *_DENSE),
    "sarvam_mla": ("SarvamMLAForCausalLM", *_PLAIN),
    "sarvam_moe": ("SarvamMoEForCausalLM", *_PLAIN),
    "seed_oss": ("SeedOssForCausalLM", *_DENSE),
    "smollm3": ("SmolLM3ForCausalLM", *_DENSE),
    "solar_open": ("SolarOpenForCausalLM", *_PLAIN),
    "step3p5": ("Step3p5ForCausalLM", *_DENSE),
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


NOT_READ = {"minimax_m3_vl_text", "mistral3", "step3p7"}
"""Families whose tensors' names have not been followed through the servers' loaders."""
ADAPTERS_NOT_READ = {
    *("afmoe", "axk1", "bailing_hybrid", "deepseek_v32", "exaone_moe", "glm_moe_dsa", "hy_v3"),
    *("granitemoehybrid", "granitemoeshared", "kimi_linear", "laguna", "lfm2_moe", "mellum"),
    *("mimo_v2_flash", "minimax_m3_vl", "mistral4", "olmo2", "sarvam_mla", "sarvam_moe"),
    *("seed_oss", "smollm3", "solar_open", "step3p5"),
}
"""Families whose tensors were followed, but not the names of their adapters."""
ABSENT_IN_VLLM = {"dots1", "mistral4", "solar_open"}
"""Families whose architecture vLLM does not register. It then takes its backend of
``transformers``, in which the names of ``dots1``, ``mistral4`` and ``solar_open`` load."""
ABSENT_IN_SGLANG = {
    *("axk1", "dots1", "flex_olmo", "mistral4", "seed_oss", "smollm3", "solar_open"),
}
"""Families whose architecture no ``EntryClass`` of SGLang has."""
VLLM_AND_SGLANG = "vllm sglang"
LOADED_BY = {
    **dict.fromkeys(
        (
            *("afmoe", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
            *("exaone_moe", "glm4_moe_lite", "granitemoehybrid", "granitemoeshared", "hy_v3"),
            *("kimi_linear", "lfm2_moe", "mellum", "mimo_v2_flash", "minimax_m2", "olmo2"),
            *("sarvam_mla", "step3p5"),
        ),
        VLLM_AND_SGLANG,
    ),
    **dict.fromkeys(("mistral4", "sarvam_moe", "seed_oss", "smollm3", "solar_open"), "vllm"),
    **dict.fromkeys(("glm_moe_dsa", "laguna", "minimax_m3_vl"), "sglang"),
}
"""Servers whose class took every tensor of an export of a new model, and in which no element of a
parameter stayed NaN. For ``mimo_v2_flash`` and ``step3p5`` in SGLang another config class stood in
for that of transformers, which it refuses, and for ``minimax_m3_vl`` and Sarvam's models keys were
added to the config. The page has these exceptions and those of other families."""
SERVED_KEYS = {
    "afmoe": "score_func route_norm n_group topk_group",
    "bailing_hybrid": "use_bias num_experts_per_tok n_group moe_shared_expert_intermediate_size",
    "deepseek_v2": "topk_method scoring_func moe_layer_freq",
    "deepseek_v3": "topk_method scoring_func moe_layer_freq",
    "deepseek_v32": "topk_method scoring_func moe_layer_freq",
    "exaone_moe": "is_moe_layer",
    "glm4_moe_lite": "first_k_dense_replace",
    "glm_moe_dsa": "topk_method scoring_func moe_layer_freq index_topk_pattern",
    "hy_v3": "expert_hidden_dim first_k_dense_replace route_norm qk_norm",
    "mimo_v2_flash": "hybrid_layer_pattern topk_method scoring_func",
    "minimax_m2": "scoring_func use_routing_bias rotary_dim",
    "minimax_m3_vl_text": "scoring_func use_routing_bias n_shared_experts sparse_attention_config",
    "sarvam_moe": "use_bias use_rmsnorm score_function embedding_dropout "
    "moe_router_enable_expert_bias",
    "step3p5": "moe_num_experts moe_top_k num_attention_groups use_moe_router_bias need_fp32_gate "
    "norm_expert_weight moe_router_activation",
}
"""Keys of config.json that a server's class reads without a default, and that the class of
``transformers`` does not have."""


@pytest.mark.parametrize("name", SERVED_KEYS)
def test_configs_of_new_models_have_the_keys_that_servers_read(name):
    config = exported_config(architecture_of(name), None)
    assert not {*SERVED_KEYS[name].split()} - config.keys()


def test_ling_says_the_groups_by_which_servers_find_kinds_of_layers():
    arch = FAMILIES["bailing_hybrid"].presets["ling-3.0-flash"]
    config = exported_config(arch, None)
    assert config["layer_group_size"] == 6
    changed = arch.model_copy(update={"linear_layers": (False, *arch.linear_layers[1:])})
    assert "layer_group_size" not in exported_config(changed, None)


def test_ling_names_the_outputs_of_its_two_attentions_as_published_files_do():
    renames = [one for one in FAMILIES["bailing_hybrid"].weight_map if isinstance(one, Rename)]
    theirs = {one.ours: one.modules for one in renames}
    assert theirs["layers.{layer}.linear_attn.wo"] == (f"{_PLAIN[0]}attention.o_proj",)
    assert theirs["layers.{layer}.attn.wo"] == (f"{_PLAIN[0]}attention.dense",)


def test_every_family_was_read_or_is_named():
    shipped = {  # tests.lib.toy_family registers one, too
        name
        for name, family in FAMILIES.items()
        if family.architecture.__module__.startswith("moetrain.")
    }
    assert {*FORMS} | NOT_READ == shipped
    assert ABSENT_IN_VLLM | ABSENT_IN_SGLANG | {*LOADED_BY} <= {*FORMS}
    for absent, server in ((ABSENT_IN_SGLANG, "sglang"),):
        assert not any(server in LOADED_BY.get(name, "") for name in absent)


@pytest.mark.parametrize("name", FORMS)
def test_architectures_and_experts_have_the_names_that_servers_map(name):
    family = FAMILIES[name]
    architecture, layers, experts, tensors = FORMS[name]
    assert family.hf_class == architecture
    modules = {module for one in family.weight_map for module in one.modules}
    inner = {module for module in modules if "{layer}" in module}
    assert all(module.startswith(layers) for module in inner)
    found = {
        m
        for m in inner
        if "experts." in m and "shared_experts." not in m and not m.endswith("correction_bias")
    }
    assert found == {f"{layers}{experts}{tensor}" for tensor in tensors.split()}


def test_families_have_the_layouts_of_adapters_that_the_page_lists():
    read = {*FORMS} - ADAPTERS_NOT_READ
    fused = {name for name in read if FAMILIES[name].lora_layout == "fused"}
    assert fused == STACKED_ADAPTERS | WRITTEN_FUSED
