"""Multi-head latent attention: scales, kept tensors, aliases of its families, refusals."""

import pytest
import torch

from moetrain.config import ConfigError, KernelsSection, ModelSection, MoeSection
from moetrain.generate.engine import Generator
from moetrain.generate.request import Request, SamplingParams
from moetrain.kernels.attention.attention import AttentionMask
from moetrain.models.architecture import Workload
from moetrain.models.families import FAMILIES, PRESETS
from moetrain.models.hf.config import architecture_from_hf
from moetrain.models.hf.load import load_hf, resolve_architecture
from moetrain.models.layers import Context
from moetrain.models.rope_scaling import RotaryEmbedding
from moetrain.models.transformer import Transformer
from tests.lib.family_cases import (
    CASES,
    SIZES,
    architecture_of,
    random_reference,
)

FAMILY_NAMES = ("deepseek_v3", "deepseek_v2", "glm4_moe_lite")


@pytest.mark.parametrize(
    ("preset", "scale"),
    [
        ("deepseek-v3", 0.13523),
        ("deepseek-v2-lite", 0.11472),
        ("moonlight-16b-a3b", 192**-0.5),
        ("glm-4.7-flash", 1 / 16),
    ],
)
def test_stretched_contexts_have_larger_scales(preset, scale):
    part = PRESETS[preset].attention(0)
    assert part.scale == pytest.approx(scale, rel=1e-4)
    assert part.build(KernelsSection(), MoeSection()).scale == part.scale


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_norms_of_latents_have_an_epsilon_of_their_own(family):
    arch = architecture_of(family).model_copy(update={"norm_eps": 0.25})
    block = Transformer(arch).layers[0]
    assert block.attn.q_a_norm.eps == block.attn.kv_a_norm.eps == 1e-6
    assert block.attn_norm.eps == 0.25


@pytest.mark.parametrize("preset", ["moonlight-16b-a3b", "deepseek-v3", "glm-4.7-flash"])
def test_the_estimate_is_what_the_backward_keeps(preset):
    """The bytes are those of distinct storages that autograd saves, for bf16 in eager mode."""
    arch, size = PRESETS[preset], 64
    part = arch.attention(0)
    module = part.build(KernelsSection(attention="exact"), MoeSection()).bfloat16()
    x_BSD = torch.randn(1, size, arch.hidden_size).bfloat16().requires_grad_()
    mask = AttentionMask.of(None, batch=1, seq_len=size, device=x_BSD.device, backend="exact")
    rotation = RotaryEmbedding(arch.rotation(0))(torch.arange(size)[None])
    given = {t.untyped_storage().data_ptr() for t in (x_BSD, *rotation, *module.parameters())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x_BSD, Context(rotation, mask))
    share = Workload(tokens=size, tp=1, ep=1, width=2, is_compiled=False)
    found = sum(storage.nbytes() for storage in kept.values())
    assert part.activations(share) == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_pages_hold_keys_and_values_of_their_own_widths(family, tmp_path):
    random_reference(family).save_pretrained(tmp_path)
    model = load_hf(tmp_path)
    generator = Generator(model, num_pages=6, page_size=4)
    generator.generate([Request("a", (1, 2, 3), SamplingParams(max_tokens=4))])
    held = 0
    for cache, (part, _) in zip(generator.steps.caches, model.arch.layers(), strict=True):
        assert cache.keys_PZGd.shape == (6, 4, 4, 16)
        assert cache.values_PZGv.shape == (6, 4, 4, 14)
        held += 6 * 4 * part.cached_elements()
    caches = generator.steps.caches
    assert held == sum(c.keys_PZGd.numel() + c.values_PZGv.numel() for c in caches)


@torch.no_grad()
def test_groups_are_as_good_as_their_best_expert_in_v2_alone():
    """One expert's score is the largest, but the best two of another group have a larger sum."""
    found = {}
    for family in ("deepseek_v2 one group", "deepseek_v3 groups"):
        sizes = {"num_expert_groups": 3, "topk_expert_groups": 1, "num_experts_per_token": 2}
        (_, part), *_ = architecture_of(family, **sizes).layers()[1:]
        router = part.build(KernelsSection(), MoeSection()).router
        router.weight.zero_()
        router.weight[:, 0] = torch.tensor([3.0, -9.0, 0.0, 0.0, 2.0, 2.0])
        x_TD = torch.eye(1, part.hidden_size)
        found[family.split()[0]] = sorted(router(x_TD).ids_TK[0].tolist())
    assert found == {"deepseek_v2": [0, 1], "deepseek_v3": [4, 5]}


# Published counts of active parameters in billions, without the embedding, or without the head too.
ACTIVE = {
    "deepseek-v3": (37, 1),
    "kimi-k2": (32, 1),
    "deepseek-v2-lite": (2.4, 1),
    "moonlight-16b-a3b": (2.24, 2),
}


@pytest.mark.parametrize("preset", ACTIVE)
def test_presets_have_the_published_active_sizes(preset):
    arch, (published, left_out) = PRESETS[preset], ACTIVE[preset]
    active = arch.num_active_params() - left_out * arch.vocab_size * arch.hidden_size
    assert active / 1e9 == pytest.approx(published, rel=0.025)


@pytest.mark.parametrize(
    ("family", "change", "problem"),
    [
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads 2 is not num_attention"),
        ("deepseek_v3", {"qk_rope_head_dim": 5}, "qk_rope_head_dim 5 is odd"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank is 0"),
        ("deepseek_v3", {"kv_lora_rank": "wide"}, "kv_lora_rank is 'wide'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' .* only 'sigmoid'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported, only 1"),
        ("deepseek_v3", {"n_group": 4}, "n_group 4 .* n_routed_experts 6"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' .* 'greedy' or"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias True is not supported, only False; use"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "n_group is None, expected"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "x", "y"]}, "mlp_layer_types x, y are"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "has 1 entries"),
    ],
)
def test_unsupported_latent_attention_is_refused_in_one_line(family, change, problem):
    config = {**FAMILIES[family].defaults, "model_type": family, **SIZES, **CASES[family], **change}
    with pytest.raises(ConfigError, match=problem) as caught:
        architecture_from_hf(config)
    assert "\n" not in str(caught.value)


def test_a_heads_width_follows_from_its_parts():
    with pytest.raises(ConfigError, match=r"model\.head_dim: 64, but preset 'deepseek-v3' has no"):
        resolve_architecture(ModelSection(preset="deepseek-v3", head_dim=64))
    arch = resolve_architecture(ModelSection(preset="deepseek-v3", num_layers=4))
    assert (arch.head_dim, arch.moe_layers) == (192, (False, False, False, True))
