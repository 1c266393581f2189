"""DeepSeek-V3.2 (arXiv 2512.02556): DeepSeek-V3 whose attention selects the keys of each token.

Every layer has an indexer (:mod:`moetrain.models.parts.sparse_attention`), an MTP block too. Files
hold MTP blocks behind the model's own layers. An export copies them unchanged unless they are
trained (:mod:`moetrain.models.parts.multi_token`).

Other families with this attention use :class:`SparseDecoder` and the tables of V3.2.
"""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from moetrain.models.architecture import Architecture, AttentionPart, ConfigJson, Fields, Part
from moetrain.models.decoders import moe_block
from moetrain.models.families.deepseek import (
    LATENT_MAP,
    V3,
    V3Decoder,
    check_keys,
    read_v3_layers,
)
from moetrain.models.family import Family, Rename, WeightMap, register
from moetrain.models.hf.files import error
from moetrain.models.layers import SwiGLU
from moetrain.models.moe import RoutedExperts
from moetrain.models.parts.deepseek_router import write_deepseek_layers
from moetrain.models.parts.layer_types import read_mlp_types, write_mlp_types
from moetrain.models.parts.multi_token import behind_layers
from moetrain.models.parts.sparse_attention import SparseLatentAttention
from moetrain.models.rope_scaling import RopeScaling

_MAX_SIZE = 2**31 - 1
_ATTENTION = ("indexed_attention", "deepseek_sparse_attention")
"""The names of this attention in ``layer_types``."""


class SparseDecoder(V3Decoder):
    """A latent decoder whose layers attend to selected keys."""

    kinds = (SparseLatentAttention, RoutedExperts, SwiGLU)
    index_rope_interleaved: ClassVar[bool] = False
    """True: neighbouring elements of the indexer's heads rotate together."""

    index_topk: int = Field(gt=0, le=_MAX_SIZE)
    index_num_heads: int = Field(gt=0, le=_MAX_SIZE)
    index_head_dim: int = Field(gt=0, le=_MAX_SIZE)
    indexer_layers: tuple[bool, ...] = ()
    """True for each layer that selects keys; the others use those of the layer before them. Empty:
    every layer selects keys."""

    def has_indexer(self, layer: int) -> bool:
        """Return True if ``layer`` selects keys."""
        return self.indexer_layers[layer] if self.indexer_layers else True

    def attention(self, layer: int) -> AttentionPart:
        return SparseLatentAttention.of(
            self, window=None, has_indexer=self.has_indexer(layer), indexer_learns=True
        )

    def multi_token_layers(self) -> tuple[tuple[Part, ...], ...]:
        attention = SparseLatentAttention.of(
            self, window=None, has_indexer=True, indexer_learns=False
        )
        return tuple((attention, *others) for _, *others in super().multi_token_layers())


def read_sparse_layers(config: ConfigJson) -> Fields:
    """Read the MoE layers, and refuse values that no model with this attention has."""
    check_keys(config, {"rope_interleave": (True,)})
    types = config["layer_types"] or ()
    if unknown := sorted({str(kind) for kind in types} - {*_ATTENTION}):
        problem = f"layer_types {', '.join(unknown)} are not supported, only {_ATTENTION[0]}"
        raise error("config.json", f"{problem}; use a model that has it")
    read = read_v3_layers(config)
    return {**read, "moe_layers": read_mlp_types(config, read["moe_layers"])}


def _read_layers(config: ConfigJson) -> Fields:
    check_keys(config, {"indexer_rope_interleave": (False,)})
    return read_sparse_layers(config)


def write_sparse_layers(arch: Architecture) -> Fields:
    """Invert :func:`read_sparse_layers`."""
    return {**write_deepseek_layers(arch), "mlp_layer_types": write_mlp_types(arch)}


def _renamed(*names: str) -> WeightMap:
    ours, theirs = "layers.{layer}.attn.indexer", "model.layers.{layer}.self_attn.indexer"
    return tuple(Rename(f"{ours}.{name}", f"{theirs}.{name}") for name in names)


_MODEL = (
    *LATENT_MAP,
    *_renamed("wq_b", "wk", "k_norm", "weights_proj"),
    *moe_block(bias="gate.e_score_correction_bias", shared="shared_experts"),
)
_MAP, _MAP_WITHOUT_COPIES = behind_layers(_MODEL)
_DEFAULTS = {key: value for key, value in V3["defaults"].items() if key != "rope_interleave"}
_V3_FIELDS = {name: key for name, key in V3["fields"].items() if name != "rope_interleaved"}
V32: Fields = {
    **V3,
    "architecture": SparseDecoder,
    "hf_class": "DeepseekV32ForCausalLM",
    "defaults": {
        **_DEFAULTS,
        "max_position_embeddings": 163840,
        "mlp_layer_types": None,
        "layer_types": None,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
    },
    "weight_map": _MAP,
    "other_maps": (_MAP_WITHOUT_COPIES,),
    "fields": {
        **_V3_FIELDS,
        "index_topk": "index_topk",
        "index_head_dim": "index_head_dim",
        "index_num_heads": "index_n_heads",
    },
    "fixed": {**V3["fixed"], "rope_interleaved": True},
    "nullable": {"mlp_layer_types": list, "layer_types": list},
    "read_layers": _read_layers,
    "write_layers": write_sparse_layers,
}
"""The arguments of :class:`~moetrain.models.family.Family` for DeepSeek-V3.2."""

# The sizes are those of the class in transformers. The rotary embeddings are DeepSeek-V3's.
_PRESETS: Mapping[str, Architecture] = {
    "deepseek-v3.2": SparseDecoder(
        family="deepseek_v32",
        vocab_size=129_280,
        hidden_size=7168,
        num_layers=61,
        num_heads=128,
        num_kv_heads=128,
        intermediate_size=18_432,
        max_positions=163_840,
        rope=RopeScaling(
            kind="yarn",
            factor=40.0,
            original_max_positions=4096,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        index_topk=2048,
        index_num_heads=64,
        index_head_dim=128,
        num_experts=256,
        num_experts_per_token=8,
        num_expert_groups=8,
        topk_expert_groups=4,
        moe_intermediate_size=2048,
        shared_intermediate_size=2048,
        moe_layers=(False,) * 3 + (True,) * 58,
        routed_scaling_factor=2.5,
        **V32["fixed"],
    )
}

register(Family(name="deepseek_v32", **V32, presets=_PRESETS))
