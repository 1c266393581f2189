"""MiniMax-M3: block-sparse attention, MiniMax-M2's router, and GPT-OSS's activation in every MLP.

Most layers attend to blocks of keys that an indexer selects
(:mod:`moetrain.models.parts.block_attention`); the others attend to all keys. All norms are
zero-centred, and a part of each head rotates. The factor of the routed experts' sum is in their
weights here, so a factor of 2 gives the same bits.

``minimax_m3_vl`` is the published model, a language model beside a vision tower, which an export
copies unchanged. ``minimax_m3_vl_text`` is the language model alone, in files as ``transformers``
writes them, with stacked matrices.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from moetrain.kernels.experts.swiglu import oai
from moetrain.models.architecture import Architecture, AttentionPart, ConfigJson, Fields, Part
from moetrain.models.attention import GroupedQueryAttention
from moetrain.models.decoders import (
    COMMON_DEFAULTS,
    DENSE,
    MoEDecoder,
    beside_vision,
    moe_block,
    renamed,
    stacked,
)
from moetrain.models.families.deepseek import check_keys
from moetrain.models.family import Family, Rename, WeightMap, register
from moetrain.models.hf.files import error
from moetrain.models.hf.take_rows import TakeRows
from moetrain.models.layers import SwiGLU
from moetrain.models.moe import RoutedExperts
from moetrain.models.parts.block_attention import BlockSparseAttention
from moetrain.models.parts.layer_types import FULL, read_mlp_types, written_share

_MAX_SIZE = 2**31 - 1
_SPARSE = "minimax_m3_sparse"
"""The name of block-sparse attention in ``layer_types``."""


class MiniMaxM3(MoEDecoder):
    """An MoE decoder with block-sparse attention in some layers."""

    kinds = (GroupedQueryAttention, RoutedExperts, SwiGLU, BlockSparseAttention)
    by_layer: ClassVar = {**MoEDecoder.by_layer, "sparse_layers": False}

    sparse_layers: tuple[bool, ...] = ()
    """True for each layer with block-sparse attention; empty: no layer has it."""
    index_num_heads: int = Field(default=4, gt=0, le=_MAX_SIZE)
    index_head_dim: int = Field(default=128, gt=0, le=_MAX_SIZE)
    index_block_size: int = Field(default=128, gt=0, le=_MAX_SIZE)
    index_topk_blocks: int = Field(default=16, gt=0, le=_MAX_SIZE)
    index_local_blocks: int = Field(default=1, ge=0, le=_MAX_SIZE)
    swiglu_limit: float = Field(default=7.0, gt=0, allow_inf_nan=False)
    swiglu_alpha: float = Field(default=1.702, gt=0, allow_inf_nan=False)

    def attention(self, layer: int) -> AttentionPart:
        if not (self.sparse_layers and self.sparse_layers[layer]):
            return super().attention(layer)
        return BlockSparseAttention.of(self, window=None)

    def feed_forward(self, layer: int) -> Part:
        activation = oai(self.swiglu_limit, self.swiglu_alpha)
        is_routed = self.moe_layers[layer] if self.moe_layers else self.num_experts > 0
        return (RoutedExperts if is_routed else SwiGLU).of(self, activation=activation)


# ---- config.json -------------------------------------------------------------------------------

_ATTENTION, _ROUTED = "sparse_attention_config", "moe_layer_freq"
_FREQUENCY, _NO_VALUES = "sparse_attention_freq", "sparse_disable_index_value"
_INDEX: Mapping[str, tuple[str, str]] = {
    "index_num_heads": ("index_n_heads", "sparse_num_index_heads"),
    "index_head_dim": ("index_head_dim", "sparse_index_dim"),
    "index_block_size": ("index_block_size", "sparse_block_size"),
    "index_topk_blocks": ("index_topk_blocks", "sparse_topk_blocks"),
    "index_local_blocks": ("index_local_blocks", "sparse_local_block"),
}
"""Fields of the indexer, their keys as ``transformers`` writes them, and within ``_ATTENTION``."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "use_gemma_norm": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_head",),
    "attention_output_gate": (False,),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "n_shared_experts": (1,),
}
_ONLY_SPARSE: Mapping[str, tuple[Any, ...]] = {
    "use_sparse_attention": (True,),
    "sparse_score_type": ("max",),
    "sparse_init_block": (0,),
}
_SHARE = "partial_rotary_factor"


def _read_layers(config: ConfigJson) -> Fields:
    """Read the kinds of layers and the indexer's sizes, from keys of either form."""
    check_keys(config, _ONLY)
    if config["shared_intermediate_size"] < 1:
        raise error("config.json", "shared_intermediate_size is 0, expected 1 or more")
    own = config[_ATTENTION] or {}
    check_keys(own, _ONLY_SPARSE)
    count = config["num_hidden_layers"]
    types = config["layer_types"]
    if types is None:
        numbers = _numbers(own, _FREQUENCY, count) if _FREQUENCY in own else [0] * count
        types = [_SPARSE if number else FULL for number in numbers]
    if unknown := sorted({str(kind) for kind in types} - {_SPARSE, FULL}):
        raise error("config.json", f"layer_types {', '.join(unknown)} are not supported")
    are_sparse = tuple(kind == _SPARSE for kind in types)
    _check_values(own, are_sparse)
    routed = config[_ROUTED]
    default = [True] * count if routed is None else map(bool, _numbers(config, _ROUTED, count))
    return {
        "moe_layers": read_mlp_types(config, tuple(default)),
        "sparse_layers": are_sparse if any(are_sparse) else (),
        **{ours: own[key] for ours, (_, key) in _INDEX.items() if key in own},
        _SHARE: _read_share(config),
    }


def _numbers(config: ConfigJson, key: str, count: int) -> Sequence[object]:
    """Return the list ``key``; ConfigError: it does not have ``count`` entries."""
    numbers = config[key]
    if isinstance(numbers, list) and len(numbers) == count:
        return numbers
    problem = f"{key} is {numbers!r:.80}, expected a list of num_hidden_layers {count}"
    raise error("config.json", f"{problem}; give an entry for each layer")


def _check_values(own: ConfigJson, are_sparse: Sequence[bool]) -> None:
    """Raise ConfigError if an index head has values, which no published model's has."""
    if _NO_VALUES in own:
        disabled = _numbers(own, _NO_VALUES, len(are_sparse))
        if any(sparse and not off for sparse, off in zip(are_sparse, disabled, strict=True)):
            problem = f"{_NO_VALUES} {disabled!r:.80} has a 0 in a sparse layer, whose index heads"
            raise error("config.json", f"{problem} have values then; use a published model")


def _read_share(config: ConfigJson) -> float:
    """Return the rotating share of a head.

    Files of published models also have it in elements, by ``rotary_dim``.
    """
    width = config["head_dim"]
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    share = rope.get(_SHARE, config[_SHARE])
    # The number of elements that rotate is rounded down.
    return (config["rotary_dim"] if share is None else int(width * share)) / width


def _write_layers(arch: Architecture) -> Fields:
    """Write the keys of published files, which ``transformers`` reads too."""
    assert isinstance(arch, MiniMaxM3)
    are_sparse = arch.sparse_layers or (False,) * arch.num_layers
    routed = arch.moe_layer_indices
    return {
        "rotary_dim": arch.attention(0).rotary_dim,
        _SHARE: written_share(arch.partial_rotary_factor, arch.head_dim),
        _ROUTED: [int(i in routed) for i in range(arch.num_layers)],
        _ATTENTION: {
            **{key: values[0] for key, values in _ONLY_SPARSE.items()},
            **{key: getattr(arch, ours) for ours, (_, key) in _INDEX.items()},
            _FREQUENCY: [int(sparse) for sparse in are_sparse],
            _NO_VALUES: [int(sparse) for sparse in are_sparse],
        },
    }


# ---- weights -----------------------------------------------------------------------------------

_OURS, _THEIRS = "layers.{layer}", "model.layers.{layer}"
_INDEXER = {"wq": "q_proj", "wk": "k_proj", "q_norm": "q_norm", "k_norm": "k_norm"}


def _indexer(module: str) -> WeightMap:
    """Map the indexers, whose names begin with ``module`` in files."""
    return tuple(
        Rename(f"{_OURS}.attn.indexer.{ours}", f"{_THEIRS}.self_attn.{module}{theirs}")
        for ours, theirs in _INDEXER.items()
    )


def _gate_and_up(module: str, theirs: str, width: str) -> WeightMap:
    """Map the gate and up matrices of ``module``, which files stack."""
    return (
        TakeRows(
            tuple(f"{_OURS}.{module}.{name}.weight" for name in ("w_gate", "w_up")),
            f"{_THEIRS}.{theirs}.gate_up_proj.weight",
            lambda arch: (getattr(arch, width),) * 2,
        ),
        Rename(f"{_OURS}.{module}.w_down", f"{_THEIRS}.{theirs}.down_proj"),
    )


_SHARED, _BLOCK = "moe.shared_experts", "block_sparse_moe"
_PUBLISHED: WeightMap = renamed(
    (
        *DENSE,
        *_indexer("index_"),
        *moe_block(_BLOCK, gate="w1", up="w3", down="w2", bias="e_score_correction_bias"),
        *(
            Rename(f"{_OURS}.{_SHARED}.w_{x}", f"{_THEIRS}.{_BLOCK}.shared_experts.{x}_proj")
            for x in ("gate", "up", "down")
        ),
    ),
    lambda name: f"language_model.{name}",
)
_STACKED: WeightMap = (
    *(one for one in DENSE if ".mlp." not in one.ours),
    *_indexer("indexer."),
    *_gate_and_up("mlp", "mlp", "intermediate_size"),
    *stacked(moe_block(bias="gate.e_score_correction_bias")),
    *_gate_and_up(_SHARED, "mlp.shared_experts", "shared_intermediate_size"),
)

# ---- families ----------------------------------------------------------------------------------

_FIXED: Fields = {
    "qk_norm": True,
    "zero_centred_norms": True,
    "norm_topk_prob": True,
    "router_score": "sigmoid",
    "selection_bias": True,
}
# The sizes are those of the published config.json. With the tower of transformers' class they make
# the 427,040,140,160 elements of the published files.
_PRESET = MiniMaxM3(
    family="minimax_m3_vl",
    vocab_size=200_064,
    hidden_size=6144,
    num_layers=60,
    num_heads=64,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=12_288,
    max_positions=1_048_576,
    rope_theta=5e6,
    partial_rotary_factor=0.5,
    sparse_layers=(False,) * 3 + (True,) * 57,
    moe_layers=(False,) * 3 + (True,) * 57,
    num_experts=128,
    num_experts_per_token=4,
    moe_intermediate_size=3072,
    shared_intermediate_size=3072,
    routed_scaling_factor=2.0,
    router_aux_loss_coef=0.001,
    **_FIXED,
)
_COMMON: Fields = {
    "architecture": MiniMaxM3,
    "defaults": {
        **COMMON_DEFAULTS,
        "vocab_size": 200064,
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072,
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "rope_theta": 5000000.0,
        "rotary_dim": 64,
        _SHARE: None,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "layer_types": None,
        "mlp_layer_types": None,
        _ROUTED: None,
        _ATTENTION: None,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_block_size": 128,
        "index_topk_blocks": 16,
        "index_local_blocks": 1,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    },
    "fields": {
        "num_experts": "num_local_experts",
        "intermediate_size": "dense_intermediate_size",
        "moe_intermediate_size": "intermediate_size",
        "shared_intermediate_size": "shared_intermediate_size",
        "routed_scaling_factor": "routed_scaling_factor",
        "swiglu_alpha": "swiglu_alpha",
        "swiglu_limit": "swiglu_limit",
        **{ours: key for ours, (key, _) in _INDEX.items()},
    },
    "fixed": _FIXED,
    "aliases": {"num_experts": "num_local_experts"},
    "nullable": {
        _SHARE: float,
        "layer_types": list,
        "mlp_layer_types": list,
        _ROUTED: list,
        _ATTENTION: dict,
    },
    "activation": "swigluoai",
    "written_activation": "silu",
    "lora_layout": "fused",  # experts are stacked
    "unadapted": r".*\.indexer\..*",
    "constants": {key: values[0] for key, values in _ONLY.items()},
    "read_layers": _read_layers,
    "write_layers": _write_layers,
}

register(
    Family(
        name="minimax_m3_vl_text",
        hf_class="MiniMaxM3VLForCausalLM",
        weight_map=_STACKED,
        **_COMMON,
    )
)
register(
    Family(
        name="minimax_m3_vl",
        hf_class="MiniMaxM3SparseForConditionalGeneration",
        weight_map=_PUBLISHED,
        modules=beside_vision(_STACKED),
        section=("text_config", "minimax_m3_vl_text"),
        presets={"minimax-m3": _PRESET},
        **_COMMON,
    )
)
