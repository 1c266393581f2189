"""Qwen2 and Qwen2-MoE (arXiv 2407.10671), Qwen3 and Qwen3-MoE (arXiv 2505.09388).

Qwen2 is dense, and its queries, keys and values have biases. Qwen3 has q/k norms instead. Both may
have sliding windows in some layers, and their config.json describes these by the same keys.
Qwen2-MoE has the attention of Qwen2, and Qwen3-MoE that of Qwen3. Both have routed experts, and may
have dense layers too. Qwen2-MoE also has a gated shared expert. A config.json without
``layer_types`` means other layers with windows in Qwen2-MoE than in Qwen2.

Qwen3-VL-MoE (arXiv 2511.21631) is a Qwen3-MoE beside a vision tower, whose tensors an export copies
unchanged. Files stack the experts' matrices. Published files hold them transposed, and those that
transformers 5 writes do not. The shapes of both projections together say which, also where one is
square: a width of D cannot be F and 2F at once.
"""

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import (
    COMMON_DEFAULTS,
    DENSE,
    DenseDecoder,
    MoEDecoder,
    beside_vision,
    moe_block,
    stacked,
)
from moetrain.models.family import Family, register
from moetrain.models.hf.files import error

_SLIDING = "sliding_attention"
_FULL = "full_attention"
_DEFAULTS = {
    **COMMON_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_NULLABLE = {"sliding_window": int, "layer_types": list}


def read_windows(config: ConfigJson) -> Fields:
    """Read the layers' windows from ``layer_types``, or without it from ``max_window_layers``."""
    window = config["sliding_window"] if config.get("use_sliding_window", True) else None
    types = config["layer_types"]
    if types is None:
        first = config["max_window_layers"]
        layers = range(config["num_hidden_layers"])
        return {"sliding_windows": tuple(window if i >= first else None for i in layers)}
    unknown = sorted({str(kind) for kind in types} - {_SLIDING, _FULL})
    if unknown:
        raise error("config.json", f"layer_types {', '.join(unknown)} are not supported")
    if _SLIDING in types and window is None:
        problem = f"layer_types name {_SLIDING}, but no sliding_window is in use"
        raise error("config.json", problem)
    return {"sliding_windows": tuple(window if kind == _SLIDING else None for kind in types)}


def write_windows(arch: Architecture) -> Fields:
    """Invert :func:`read_windows`."""
    windows = [arch.window(i) for i in range(arch.num_layers)]
    window = next((w for w in windows if w is not None), None)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [_FULL if w is None else _SLIDING for w in windows],
    }


register(
    Family(
        name="qwen2",
        architecture=DenseDecoder,
        hf_class="Qwen2ForCausalLM",
        defaults=_DEFAULTS,
        weight_map=DENSE,
        fixed={"qkv_bias": True},
        nullable=_NULLABLE,
        read_layers=read_windows,
        write_layers=write_windows,
    )
)
register(
    Family(
        name="qwen3",
        architecture=DenseDecoder,
        hf_class="Qwen3ForCausalLM",
        defaults={**_DEFAULTS, "head_dim": 128, "attention_bias": False},
        weight_map=DENSE,
        fixed={"qk_norm": True},
        nullable=_NULLABLE,
        read_layers=read_windows,
        write_layers=write_windows,
        presets={
            "qwen3-0.6b": DenseDecoder(
                family="qwen3",
                vocab_size=151_936,
                hidden_size=1024,
                num_layers=28,
                num_heads=16,
                num_kv_heads=8,
                head_dim=128,
                intermediate_size=3072,
                max_positions=40_960,
                tie_embeddings=True,
                rope_theta=1e6,
                qk_norm=True,
            )
        },
    )
)


def read_moe_layers(config: ConfigJson) -> Fields:
    """Read which layers have routed experts; none has if ``num_experts`` is 0."""
    step = config["decoder_sparse_step"]
    dense = config["mlp_only_layers"] or []
    if step < 1:
        raise error("config.json", f"decoder_sparse_step is {step}, expected 1 or more")
    layers, has_experts = range(config["num_hidden_layers"]), config["num_experts"] > 0
    routed = tuple(has_experts and (i + 1) % step == 0 and i not in dense for i in layers)
    return {"moe_layers": routed}


def write_moe_layers(arch: Architecture) -> Fields:
    """Invert :func:`read_moe_layers`."""
    dense = [i for i in range(arch.num_layers) if i not in arch.moe_layer_indices]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _read_qwen2_moe(config: ConfigJson) -> Fields:
    """Read the MoE layers and the windows.

    Without ``layer_types``, layers 0, 2, 4, ... below ``max_window_layers`` have a window.
    """
    layers = read_moe_layers(config)
    if any(layers["moe_layers"]) and config["shared_expert_intermediate_size"] == 0:
        raise error("config.json", "shared_expert_intermediate_size is 0, expected 1 or more")
    types = config["layer_types"]
    if types is None:
        last = config["max_window_layers"] if config["use_sliding_window"] else 0
        numbers = range(config["num_hidden_layers"])
        types = [_SLIDING if i % 2 == 0 and i < last else _FULL for i in numbers]
    return {**layers, **read_windows({**config, "layer_types": types})}


def _read_qwen3_moe(config: ConfigJson) -> Fields:
    """Read the window of all layers, and the MoE layers."""
    window = config["sliding_window"] if config["use_sliding_window"] else None
    windows = (window,) * config["num_hidden_layers"]
    return {"sliding_windows": windows, **read_moe_layers(config)}


def _write_qwen3_moe(arch: Architecture) -> Fields:
    window = arch.window(0)
    windows = {"use_sliding_window": window is not None, "sliding_window": window}
    return {**windows, **write_moe_layers(arch)}


register(
    Family(
        name="qwen2_moe",
        architecture=MoEDecoder,
        hf_class="Qwen2MoeForCausalLM",
        defaults={
            **_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
            "mlp_only_layers": None,
        },
        weight_map=DENSE + moe_block(shared="shared_expert", shared_gate="shared_expert_gate"),
        fields={
            "qkv_bias": "qkv_bias",
            "shared_intermediate_size": "shared_expert_intermediate_size",
        },
        fixed={"shared_gate": True},
        nullable={**_NULLABLE, "mlp_only_layers": list},
        # PEFT converts names of experts' modules for the types that transformers maps to qwen2_moe,
        # but not for qwen2_moe itself: in the other layout the adapters would have no effect.
        lora_layout="fused",
        read_layers=_read_qwen2_moe,
        write_layers=lambda arch: {**write_windows(arch), **write_moe_layers(arch)},
    )
)


_QWEN3_EXPERTS = {
    **COMMON_DEFAULTS,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    "mlp_only_layers": None,
}
register(
    Family(
        name="qwen3_moe",
        architecture=MoEDecoder,
        hf_class="Qwen3MoeForCausalLM",
        defaults={
            **_QWEN3_EXPERTS,
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
        },
        weight_map=DENSE + moe_block(),
        fixed={"qk_norm": True},
        nullable={"sliding_window": int, "mlp_only_layers": list},
        aliases={"num_local_experts": "num_experts"},
        read_layers=_read_qwen3_moe,
        write_layers=_write_qwen3_moe,
        presets={
            "debug": MoEDecoder(
                family="qwen3_moe",
                vocab_size=264,  # 256 bytes and a few special tokens, a multiple of 8
                hidden_size=128,
                num_layers=4,
                num_heads=4,
                num_kv_heads=2,
                head_dim=32,
                intermediate_size=384,
                qk_norm=True,
                num_experts=8,
                num_experts_per_token=2,
                moe_intermediate_size=128,
                router_aux_loss_coef=0.001,
            ),
            "qwen3-30b-a3b": MoEDecoder(
                family="qwen3_moe",
                vocab_size=151_936,
                hidden_size=2048,
                num_layers=48,
                num_heads=32,
                num_kv_heads=4,
                head_dim=128,
                intermediate_size=6144,
                max_positions=40_960,
                rope_theta=1e6,
                qk_norm=True,
                num_experts=128,
                num_experts_per_token=8,
                moe_intermediate_size=768,
                router_aux_loss_coef=0.001,
            ),
            "qwen3-235b-a22b": MoEDecoder(
                family="qwen3_moe",
                vocab_size=151_936,
                hidden_size=4096,
                num_layers=94,
                num_heads=64,
                num_kv_heads=4,
                head_dim=128,
                intermediate_size=12_288,
                max_positions=40_960,
                rope_theta=1e6,
                qk_norm=True,
                num_experts=128,
                num_experts_per_token=8,
                moe_intermediate_size=1536,
                router_aux_loss_coef=0.001,
            ),
        },
    )
)
register(
    Family(
        name="qwen3_vl_moe",
        architecture=MoEDecoder,
        hf_class="Qwen3VLMoeForConditionalGeneration",
        defaults={
            **_QWEN3_EXPERTS,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 128000,
            "rope_theta": 500000.0,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_experts": 60,
        },
        weight_map=beside_vision(DENSE + stacked(moe_block(), is_transposed=True)),
        other_maps=(beside_vision(DENSE + stacked(moe_block())),),
        section=("text_config", "qwen3_vl_moe_text"),
        fixed={"qk_norm": True, "norm_topk_prob": True},
        nullable={"mlp_only_layers": list},
        aliases={"num_local_experts": "num_experts"},
        lora_layout="fused",
        read_layers=read_moe_layers,
        write_layers=write_moe_layers,
    )
)
