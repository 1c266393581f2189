"""GPT-OSS (arXiv 2508.10925): attention with sinks and clamped experts with biases.

Every other layer has sliding-window attention. Published files hold the experts' matrices in mxfp4,
four bits an element. Loading dequantises them to bf16, unless a run with adapters keeps them
quantised (``lora.base_dtype``). An export writes them in bf16.
"""

from pydantic import Field

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import COMMON_DEFAULTS, DENSE
from moetrain.models.family import Family, Rename, register
from moetrain.models.hf.files import error
from moetrain.models.parts.clamped_experts import ClampedExperts, InterleavedExperts
from moetrain.models.parts.sink_attention import SinkAttention
from moetrain.models.rope_scaling import RopeScaling

_SLIDING = "sliding_attention"
_FULL = "full_attention"


class _GptOss(Architecture):
    """Attention with sinks and clamped experts in every layer."""

    kinds = (SinkAttention, ClampedExperts)

    swiglu_limit: float = Field(default=7.0, gt=0, allow_inf_nan=False)
    swiglu_alpha: float = Field(default=1.702, gt=0, allow_inf_nan=False)


def _read_layers(config: ConfigJson) -> Fields:
    """Read the layers' windows; without ``layer_types`` every other layer has one."""
    count = config["num_hidden_layers"]
    window = config["sliding_window"]
    types = config["layer_types"] or [(_SLIDING, _FULL)[i % 2] for i in range(count)]
    unknown = sorted({str(kind) for kind in types} - {_SLIDING, _FULL})
    if unknown:
        raise error("config.json", f"layer_types {', '.join(unknown)} are not supported")
    return {"sliding_windows": tuple(window if kind == _SLIDING else None for kind in types)}


def _write_layers(arch: Architecture) -> Fields:
    windows = [arch.window(i) for i in range(arch.num_layers)]
    found = {
        "layer_types": [_FULL if window is None else _SLIDING for window in windows],
        # transformers does not accept null, so a number is written even without windows.
        "sliding_window": next(filter(None, windows), 128),
    }
    if arch.rope.kind == "default":  # transformers takes a missing key for yarn
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": arch.rope_theta}
    return found


_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_OURS = "layers.{layer}.moe"
_THEIRS = "model.layers.{layer}.mlp"
_WEIGHT_MAP = (
    *DENSE,
    Rename("layers.{layer}.attn.sinks", "model.layers.{layer}.self_attn.sinks"),
    Rename(f"{_OURS}.router.weight", f"{_THEIRS}.router.weight"),
    Rename(f"{_OURS}.router.logit_bias", f"{_THEIRS}.router.bias"),
    InterleavedExperts(f"{_OURS}.experts.w_gate_up", f"{_THEIRS}.experts.gate_up_proj", parts=2),
    InterleavedExperts(
        f"{_OURS}.experts.b_gate_up", f"{_THEIRS}.experts.gate_up_proj_bias", parts=2
    ),
    InterleavedExperts(f"{_OURS}.experts.w_down", f"{_THEIRS}.experts.down_proj"),
    Rename(f"{_OURS}.experts.b_down", f"{_THEIRS}.experts.down_proj_bias"),
)
_FIXED: Fields = {"norm_topk_prob": True, "late_norms": True}


def _preset(num_layers: int, num_experts: int) -> _GptOss:
    """Return one of the two published models, which differ in depth and number of experts."""
    return _GptOss(
        family="gpt_oss",
        vocab_size=201_088,
        hidden_size=2880,
        num_layers=num_layers,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=2880,
        max_positions=131_072,
        norm_eps=1e-5,
        rope_theta=150_000.0,
        rope=RopeScaling(kind="yarn", factor=32.0, original_max_positions=4096, truncate=False),
        qkv_bias=True,
        out_bias=True,
        sliding_windows=(128, None) * (num_layers // 2),
        num_experts=num_experts,
        num_experts_per_token=4,
        moe_intermediate_size=2880,
        router_aux_loss_coef=0.001,
        **_FIXED,
    )


register(
    Family(
        name="gpt_oss",
        architecture=_GptOss,
        hf_class="GptOssForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": _YARN,
            "attention_bias": True,
            "sliding_window": 128,
            "layer_types": None,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
        },
        weight_map=_WEIGHT_MAP,
        fields={
            "num_experts": "num_local_experts",
            "moe_intermediate_size": "intermediate_size",
            "swiglu_limit": "swiglu_limit",
            "swiglu_alpha": "swiglu_alpha",
        },
        fixed=_FIXED,
        aliases={"num_experts": "num_local_experts"},
        nullable={"sliding_window": int, "layer_types": list},
        lora_layout="fused",
        read_layers=_read_layers,
        write_layers=_write_layers,
        presets={"gpt-oss-20b": _preset(24, 32), "gpt-oss-120b": _preset(36, 128)},
    )
)
