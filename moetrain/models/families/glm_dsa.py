"""GLM-5, 5.1 and 5.2: DeepSeek-V3.2's attention and router, with selected keys that layers share.

The indexer's heads rotate neighbouring elements together, unlike those of DeepSeek-V3.2. In GLM-5.2
only some layers have an indexer, and those behind one use the keys that it has selected
(arXiv 2603.12201). Files hold MTP blocks behind the model's own layers. An export copies them
unchanged unless they are trained (:mod:`moetrain.models.parts.multi_token`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.families.deepseek import check_keys
from moetrain.models.families.deepseek_v32 import (
    V32,
    SparseDecoder,
    read_sparse_layers,
    write_sparse_layers,
)
from moetrain.models.family import Family, register
from moetrain.models.hf.files import error

_FULL, _SHARED = "full", "shared"
_LETTERS = {"F": _FULL, "S": _SHARED}
_TYPES, _PATTERN = "indexer_types", "index_topk_pattern"
_EVERY, _OFFSET = "index_topk_freq", "index_skip_topk_offset"


class _GlmDsa(SparseDecoder):
    index_rope_interleaved: ClassVar[bool] = True


def _indexers(config: ConfigJson) -> tuple[bool, ...]:
    """Return which layers have an indexer; empty: all.

    ``indexer_types`` names the kind of each layer, ``index_topk_pattern`` by letters. Else each
    ``index_topk_freq``-th layer from layer ``index_skip_topk_offset`` - 1 on has an indexer, and so
    have all layers before it.
    """
    count = config["num_hidden_layers"]
    if (types := config[_TYPES]) is not None:
        found = _kinds(_TYPES, types)
    elif (pattern := config.get(_PATTERN)) is not None:
        letters = [_LETTERS.get(x, x) for x in pattern] if isinstance(pattern, str) else pattern
        found = _kinds(_PATTERN, letters)
    else:
        every, offset = (_whole(config, key, usual) for key, usual in ((_EVERY, 1), (_OFFSET, 2)))
        every = max(every, 1)
        found = [max(i - offset + 1, 0) % every == 0 for i in range(count)]
    if len(found) != count:
        problem = f"{_TYPES} describe {len(found)} layers, but num_hidden_layers is {count}"
        raise error("config.json", f"{problem}; give one for each layer")
    if not found[0]:
        problem = f"{_TYPES} begin with {_SHARED!r}, but layer 0 has no layer before it"
        raise error("config.json", f"{problem}; give it {_FULL!r}")
    return () if all(found) else tuple(found)


def _kinds(key: str, kinds: Any) -> Sequence[bool]:
    if not isinstance(kinds, list) or not kinds or not {_FULL, _SHARED}.issuperset(map(str, kinds)):
        problem = f"{key} is {kinds!r:.80}, expected {_FULL!r} or {_SHARED!r} for each layer"
        raise error("config.json", f"{problem}; use a model that has it")
    return [kind == _FULL for kind in kinds]


def _whole(config: ConfigJson, key: str, usual: int) -> int:
    value = config.get(key, usual)
    if type(value) is not int or value < 0:
        raise error("config.json", f"{key} is {value!r:.80}, expected a whole number")
    return value


def _read_layers(config: ConfigJson) -> Fields:
    check_keys(config, {"indexer_rope_interleave": (True,)})
    return {**read_sparse_layers(config), "indexer_layers": _indexers(config)}


def _write_layers(arch: Architecture) -> Fields:
    assert isinstance(arch, _GlmDsa)
    kinds = [(_SHARED, _FULL)[arch.has_indexer(i)] for i in range(arch.num_layers)]
    pattern = "".join(letter for kind in kinds for letter, name in _LETTERS.items() if name == kind)
    # transformers and SGLang read the kinds, and vLLM the letters.
    return {**write_sparse_layers(arch), _TYPES: kinds, _PATTERN: pattern}


_SIZES: Fields = {
    "family": "glm_moe_dsa",
    "vocab_size": 154_880,
    "hidden_size": 6144,
    "num_layers": 78,
    "num_heads": 64,
    "num_kv_heads": 64,
    "intermediate_size": 12_288,
    "max_positions": 202_752,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_num_heads": 32,
    "index_head_dim": 128,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "moe_intermediate_size": 2048,
    "shared_intermediate_size": 2048,
    "moe_layers": (False,) * 3 + (True,) * 75,
    "routed_scaling_factor": 2.5,
    **V32["fixed"],
}
# The sizes are those of the class in transformers; angles and shared layers of GLM-5.2 are those
# that other programs give for it.
_PRESETS: Mapping[str, Architecture] = {
    "glm-5": _GlmDsa(**_SIZES),
    "glm-5.2": _GlmDsa(
        **{
            **_SIZES,
            "max_positions": 1_048_576,
            "rope_theta": 8e6,
            "indexer_layers": tuple(max(i - 2, 0) % 4 == 0 for i in range(78)),
        }
    ),
}
_OWN: Fields = {
    "architecture": _GlmDsa,
    "hf_class": "GlmMoeDsaForCausalLM",
    "defaults": {
        **V32["defaults"],
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
        "indexer_types": None,
    },
    "nullable": {**V32["nullable"], "indexer_types": list},
    "read_layers": _read_layers,
    "write_layers": _write_layers,
    "presets": _PRESETS,
}

register(Family(name="glm_moe_dsa", **{**V32, **_OWN}))
