"""Granite with shared experts (``granitemoeshared``), and the hybrid Granite 4.

Both have four factors: on embeddings, on the result of each part, on the scores of attention, and a
divisor of logits. A token's experts are chosen by their logits and weighted by a softmax of those
of the chosen. Files stack the gate and up matrices, those of all experts in one tensor.

In the hybrid (``granitemoehybrid``) most layers have a Mamba-2 mixer in place of attention; in
published models all heads of a mixer share B and C. Queries and keys rotate if
``position_embedding_type`` is "rope". A model without routed experts has the shared one alone,
which is a dense layer then.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from moetrain.models.architecture import Architecture, AttentionPart, ConfigJson, Fields, Part
from moetrain.models.attention import GroupedQueryAttention
from moetrain.models.decoders import COMMON_DEFAULTS, DENSE, MoEDecoder
from moetrain.models.families.deepseek import check_keys
from moetrain.models.family import Family, Rename, WeightMap, register
from moetrain.models.hf.files import error
from moetrain.models.hf.take_rows import TakeRows
from moetrain.models.layers import SwiGLU
from moetrain.models.moe import RoutedExperts
from moetrain.models.parts.mamba import Mamba2, OneGroupMamba2, check_step_limit, mamba_map


class _Hybrid(MoEDecoder):
    """An MoE decoder with Mamba-2 mixers in place of attention in ``linear_layers``."""

    kinds = (GroupedQueryAttention, RoutedExperts, SwiGLU, Mamba2, OneGroupMamba2)

    mamba_num_heads: int = 0
    mamba_head_dim: int = 0
    mamba_num_groups: int = 0
    mamba_state_dim: int = 0
    mamba_conv_kernel_dim: int = 0
    mamba_conv_bias: bool = True
    mamba_min_step: ClassVar[float] = 0.0

    def attention(self, layer: int) -> AttentionPart:
        if not (self.linear_layers and self.linear_layers[layer]):
            return super().attention(layer)
        return self.mixer()

    def mixer(self) -> Mamba2:
        """Return the Mamba-2 mixer, the same in all layers that have one."""
        return (OneGroupMamba2 if self.mamba_num_groups == 1 else Mamba2).of(self, window=None)

    def feed_forward(self, layer: int) -> Part:
        if self.num_experts:
            return RoutedExperts.of(self)
        return SwiGLU.of(self, intermediate_size=self.shared_intermediate_size)


_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier")
_MULTIPLIERS += ("logits_scaling",)
_FIELDS: Mapping[str, str] = {
    **{name: name for name in _MULTIPLIERS},
    "num_experts": "num_local_experts",
    "moe_intermediate_size": "intermediate_size",
    "shared_intermediate_size": "shared_intermediate_size",
}
_DEFAULTS: Fields = {
    **COMMON_DEFAULTS,
    "vocab_size": 32_000,
    "intermediate_size": 11_008,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    **dict.fromkeys(_MULTIPLIERS, 1.0),
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}


def _read_shared(config: ConfigJson) -> Fields:
    if config["num_local_experts"] < 1:
        raise error("config.json", "num_local_experts is 0, expected 1 or more")
    return {}


_MAMBA, _ATTENTION = "mamba", "attention"
_IS_MAMBA = {_MAMBA: True, "linear_attention": True, _ATTENTION: False, "full_attention": False}
"""Kinds of layers, by the names of published files and those of transformers 5."""
_POSITIONS = "position_embedding_type"
_ROTATED = "rope"
_EXPAND, _HEAD_DIM = "mamba_expand", "mamba_d_head"


def _read_hybrid(config: ConfigJson) -> Fields:
    check_step_limit(config)
    check_keys(config, {"mamba_proj_bias": (False,), _POSITIONS: (None, "nope", _ROTATED)})
    if config["shared_intermediate_size"] < 1:
        raise error("config.json", "shared_intermediate_size is 0, expected 1 or more")
    types = config["layer_types"]
    types = [_MAMBA] * config["num_hidden_layers"] if types is None else types
    if unknown := sorted({str(kind) for kind in types} - _IS_MAMBA.keys()):
        raise error("config.json", f"layer_types {', '.join(unknown)} are not supported")
    width, heads = config[_EXPAND] * config["hidden_size"], config["mamba_n_heads"]
    head_dim = config.get(_HEAD_DIM, "auto")
    head_dim = width // max(1, heads) if head_dim == "auto" else head_dim
    if type(head_dim) is not int or head_dim * heads != width:
        problem = f"{_HEAD_DIM} is {head_dim!r:.80}, but {heads} heads have {width} elements"
        raise error("config.json", f"{problem} by {_EXPAND}; use a published model's keys")
    return {
        "linear_layers": tuple(_IS_MAMBA[kind] for kind in types),
        "mamba_head_dim": head_dim,
        "partial_rotary_factor": 1.0 if config[_POSITIONS] == _ROTATED else 0.0,
    }


def _write_hybrid(arch: Architecture) -> Fields:
    assert isinstance(arch, _Hybrid)
    are_mamba = arch.linear_layers or (False,) * arch.num_layers
    width = arch.mamba_num_heads * arch.mamba_head_dim
    return {
        "layer_types": [_MAMBA if is_mamba else _ATTENTION for is_mamba in are_mamba],
        _HEAD_DIM: arch.mamba_head_dim,
        _EXPAND: width // arch.hidden_size,
        _POSITIONS: _ROTATED if arch.partial_rotary_factor else "nope",
    }


# ---- weights -----------------------------------------------------------------------------------

_OURS, _THEIRS = "layers.{layer}", "model.layers.{layer}"


def _experts(**names: str) -> WeightMap:
    """Map routed experts, with the names in ``block_sparse_moe`` of their tensors."""
    theirs = f"{_THEIRS}.block_sparse_moe"
    return (
        Rename(f"{_OURS}.moe.router.weight", f"{theirs}.{names['router']}"),
        Rename(f"{_OURS}.moe.experts.w_gate_up", f"{theirs}.{names['gate_up']}"),
        Rename(f"{_OURS}.moe.experts.w_down", f"{theirs}.{names['down']}"),
    )


def _shared_rows(arch: Architecture) -> tuple[int, int]:
    return arch.shared_intermediate_size, arch.shared_intermediate_size


def _shared(module: str) -> WeightMap:
    """Map the shared experts, which are ``module`` of a block."""
    return (
        TakeRows(
            tuple(f"{_OURS}.{module}.w_{x}.weight" for x in ("gate", "up")),
            f"{_THEIRS}.shared_mlp.input_linear.weight",
            _shared_rows,
        ),
        Rename(f"{_OURS}.{module}.w_down", f"{_THEIRS}.shared_mlp.output_linear"),
    )


_COMMON_MAP = tuple(one for one in DENSE if ".mlp." not in one.ours)
_EXPERTS = _experts(
    router="router.layer.weight", gate_up="input_linear.weight", down="output_linear.weight"
)
_EXPERTS_IN_MEMORY = _experts(
    router="router.weight", gate_up="experts.gate_up_proj", down="experts.down_proj"
)
_SHARED_EXPERTS = _shared("moe.shared_experts")

# ---- families ----------------------------------------------------------------------------------

_FIXED: Fields = {"norm_topk_prob": True}
_EXPERTS_OF_FAMILY = "block_sparse_moe.experts"

register(
    Family(
        name="granitemoeshared",
        architecture=MoEDecoder,
        hf_class="GraniteMoeSharedForCausalLM",
        defaults={**_DEFAULTS, "shared_intermediate_size": 0},
        weight_map=(*_COMMON_MAP, *_EXPERTS, *_SHARED_EXPERTS),
        modules=(*_COMMON_MAP, *_EXPERTS_IN_MEMORY, *_SHARED_EXPERTS),
        fields=_FIELDS,
        fixed=_FIXED,
        experts=_EXPERTS_OF_FAMILY,
        lora_layout="fused",  # experts are stacked
        read_layers=_read_shared,
    )
)


def _preset(**sizes: Any) -> _Hybrid:
    """Return a published model of 40 layers. The sizes were written down from memory of the
    published config.json, and the totals are the published ones."""
    return _Hybrid(
        family="granitemoehybrid",
        vocab_size=100_352,
        num_layers=40,
        max_positions=131_072,
        norm_eps=1e-5,
        tie_embeddings=True,
        mamba_head_dim=64,
        mamba_num_groups=1,
        mamba_state_dim=128,
        mamba_conv_kernel_dim=4,
        embedding_multiplier=12.0,
        **sizes,
        **_FIXED,
    )


_MOSTLY_MAMBA = tuple(i % 10 != 5 for i in range(40))
_WITHOUT_ANGLES: Fields = {"partial_rotary_factor": 0.0, "linear_layers": _MOSTLY_MAMBA}
_HYBRID_MAP: WeightMap = (
    *_COMMON_MAP,
    *mamba_map(f"{_OURS}.mamba", f"{_THEIRS}.mamba", lambda arch: arch.mixer()),
    *_SHARED_EXPERTS,
    *_shared("mlp"),
)

register(
    Family(
        name="granitemoehybrid",
        architecture=_Hybrid,
        hf_class="GraniteMoeHybridForCausalLM",
        defaults={
            **_DEFAULTS,
            "shared_intermediate_size": 1024,
            _POSITIONS: None,
            "layer_types": None,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            _EXPAND: 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "time_step_limit": None,
        },
        weight_map=(*_HYBRID_MAP, *_EXPERTS),
        modules=(*_HYBRID_MAP, *_EXPERTS_IN_MEMORY),
        fields={
            **_FIELDS,
            "mamba_num_heads": "mamba_n_heads",
            "mamba_num_groups": "mamba_n_groups",
            "mamba_state_dim": "mamba_d_state",
            "mamba_conv_kernel_dim": "mamba_d_conv",
            "mamba_conv_bias": "mamba_conv_bias",
        },
        fixed=_FIXED,
        aliases={"layers_block_type": "layer_types"},
        nullable={"layer_types": list, "time_step_limit": list, _POSITIONS: str},
        experts=_EXPERTS_OF_FAMILY,
        lora_layout="fused",  # experts are stacked
        read_layers=_read_hybrid,
        write_layers=_write_hybrid,
        presets={
            "granite-4.0-h-small": _preset(
                hidden_size=4096,
                num_heads=32,
                num_kv_heads=8,
                head_dim=128,
                intermediate_size=768,
                mamba_num_heads=128,
                num_experts=72,
                num_experts_per_token=10,
                moe_intermediate_size=768,
                shared_intermediate_size=1536,
                residual_multiplier=0.22,
                attention_multiplier=0.0078125,
                logits_scaling=16.0,
                **_WITHOUT_ANGLES,
            ),
            "granite-4.0-h-tiny": _preset(
                hidden_size=1536,
                num_heads=12,
                num_kv_heads=4,
                head_dim=128,
                intermediate_size=512,
                mamba_num_heads=48,
                num_experts=64,
                num_experts_per_token=6,
                moe_intermediate_size=512,
                shared_intermediate_size=1024,
                residual_multiplier=0.22,
                attention_multiplier=0.0078125,
                logits_scaling=6.0,
                **_WITHOUT_ANGLES,
            ),
        },
    )
)
