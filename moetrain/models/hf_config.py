"""A Hugging Face ``config.json`` to :class:`Architecture` and back, for every family.

A family is one :class:`HFFamily`: the defaults of its ``transformers`` config class (a key that a
file omits means that default), which key feeds which architecture field, what is the same in every
model of the family, how its per-layer keys are read and written, and its weight map. What can be a
table is one; code is left for rope and for per-layer patterns. A new family's file adds its own
entry to :data:`HF_FAMILIES`.

Files are written with the keys that published checkpoints have (``rope_theta``, ``rope_scaling``,
``torch_dtype``): every version of ``transformers`` reads those.

Left out on purpose: what acts in training only (attention dropout, router jitter), and what
describes text instead of the network (token ids, generation settings).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from moetrain.config import ConfigError
from moetrain.models.architecture import Architecture, RopeScaling
from moetrain.models.weight_map import DENSE, MIXTRAL, QWEN3_MOE, Operation

HFConfig = Mapping[str, Any]


@dataclass(frozen=True)
class HFFamily:
    """How one ``model_type`` is written down."""

    hf_class: str
    """``transformers`` class of the model, for ``architectures``."""
    defaults: HFConfig
    """Keys that a file may omit, with the values they then have."""
    weight_map: Sequence[Operation]
    fields: Mapping[str, str] = field(default_factory=dict)
    """Architecture fields beyond :data:`_COMMON` and the keys that hold them."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Architecture fields that are the same in the whole family."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys that files use."""
    read_layers: Callable[[HFConfig], dict[str, Any]] = lambda config: {}
    """``sliding_windows`` and ``moe_layers`` from the (defaulted) keys."""
    write_layers: Callable[[Architecture], dict[str, Any]] = lambda arch: {}
    """The inverse of ``read_layers``."""


_COMMON = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
}
_EXPERTS = {
    "num_experts_per_token": "num_experts_per_tok",
    "router_aux_loss_coef": "router_aux_loss_coef",
}
_ATTENTION_BIAS = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def architecture_from_hf(config: HFConfig) -> Architecture:
    """The architecture that the parsed ``config.json`` of a checkpoint describes.

    Raises:
        ConfigError: an unsupported model type, activation, rope type or quantization, or a value
            of the wrong type.
    """
    family = family_of(config.get("model_type"))
    renamed = {family.aliases.get(key, key): value for key, value in config.items()}
    given: dict[str, Any] = {**family.defaults, **renamed}
    _check_types(given, family.defaults)
    if given["hidden_act"] != "silu":
        raise _error(f"hidden_act {given['hidden_act']!r} is not supported, only 'silu'")
    if given.get("quantization_config") is not None:
        raise _error("the weights are quantized (quantization_config); use an unquantized one")
    if given["num_key_value_heads"] is None:
        given["num_key_value_heads"] = given["num_attention_heads"]
    if given["head_dim"] is None:
        given["head_dim"] = given["hidden_size"] // given["num_attention_heads"]
    try:
        given["rope_theta"], rope = _read_rope(given)
        arch = Architecture(
            family=config["model_type"],
            rope=rope,
            **{ours: given[theirs] for ours, theirs in {**_COMMON, **family.fields}.items()},
            **family.fixed,
            **family.read_layers(given),
        )
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise _error(f"{where}: {problem['msg']}" if where else problem["msg"]) from None
    return _canonical(arch)


def architecture_to_hf(arch: Architecture) -> dict[str, Any]:
    """The ``config.json`` of ``arch``, the inverse of :func:`architecture_from_hf`.

    Raises:
        ValueError: the family's format cannot express ``arch``; it names the fields.
    """
    family = family_of(arch.family)
    config = {
        "architectures": [family.hf_class],
        "model_type": arch.family,
        "hidden_act": "silu",
        **{theirs: getattr(arch, ours) for ours, theirs in {**_COMMON, **family.fields}.items()},
        "rope_scaling": _write_rope(arch.rope),
        **family.write_layers(arch),
    }
    wanted, got = _canonical(arch).model_dump(), architecture_from_hf(config).model_dump()
    lost = [f"{key} {wanted[key]!r}" for key in wanted if wanted[key] != got[key]]
    if lost:
        raise ValueError(f"a {arch.family} config.json cannot express {', '.join(lost)}")
    return config


def family_of(model_type: object) -> HFFamily:
    """The entry of ``model_type`` in :data:`HF_FAMILIES`; ConfigError if there is none."""
    if not isinstance(model_type, str) or model_type not in HF_FAMILIES:
        supported = ", ".join(sorted(HF_FAMILIES))
        raise _error(f"model_type {model_type!r} is not supported; supported: {supported}")
    return HF_FAMILIES[model_type]


def _error(problem: str) -> ConfigError:
    return ConfigError("model.path", f"config.json: {problem}")


def _check_types(given: HFConfig, defaults: HFConfig) -> None:
    """Wrong types in the keys that have a default: arithmetic on them would end in a traceback."""
    for key, default in defaults.items():
        value = given[key]
        expected = (int, float) if isinstance(default, float) else type(default)
        is_bool_for_number = isinstance(value, bool) and not isinstance(default, bool)
        if None not in (value, default) and (is_bool_for_number or not isinstance(value, expected)):
            raise _error(f"{key} is {value!r}, expected a value like {default!r}")


def _canonical(arch: Architecture) -> Architecture:
    """``arch`` with per-layer fields empty where that says the same, so that equal means equal."""
    return arch.model_copy(
        update={
            "sliding_windows": arch.sliding_windows if any(arch.sliding_windows) else (),
            "moe_layers": () if all(arch.moe_layers) else arch.moe_layers,
        }
    )


# Rope. Our field names are Hugging Face's; original_max_positions alone differs.
_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "yarn": (
        "factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_REQUIRED = {"linear": ("factor",), "yarn": ("factor",), "llama3": _ROPE_FIELDS["llama3"]}
_ORIGINAL = "original_max_position_embeddings"


def _read_rope(config: HFConfig) -> tuple[float, RopeScaling]:
    """``rope_theta`` and the scaling, from ``rope_scaling`` or the newer ``rope_parameters``."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise _error(f"rope_scaling is {rope!r}, expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_FIELDS:
        known = ", ".join(_ROPE_FIELDS)
        raise _error(f"rope type {kind!r} is not supported; supported: {known}")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise _error("rope parameters that differ between layer types are not supported")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1):
        raise _error("partial_rotary_factor other than 1 is not supported")
    values = {key: rope[key] for key in _ROPE_FIELDS[kind] if rope.get(key) is not None}
    missing = [key for key in _ROPE_REQUIRED.get(kind, ()) if key not in values]
    if missing:
        raise _error(f"rope type {kind!r} needs {', '.join(missing)}")
    if kind in ("yarn", "llama3"):
        original = config.get(_ORIGINAL) or rope.get(_ORIGINAL)
        values["original_max_positions"] = original or config["max_position_embeddings"]
    theta = rope.get("rope_theta", config["rope_theta"])
    return theta, RopeScaling(kind=kind, **values)


def _write_rope(rope: RopeScaling) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    values = {key: getattr(rope, key) for key in _ROPE_FIELDS[rope.kind]}
    values |= {_ORIGINAL: rope.original_max_positions, "rope_type": rope.kind}
    return {key: value for key, value in values.items() if value is not None}


# Per-layer patterns. ``config`` has the family's defaults filled in.
def _read_layer_windows(config: HFConfig) -> dict[str, Any]:
    """Qwen2 and Qwen3: ``layer_types``, else full attention below ``max_window_layers``."""
    window = config["sliding_window"] if config["use_sliding_window"] else None
    types = config["layer_types"]
    if types is None:
        first = config["max_window_layers"]
        layers = range(config["num_hidden_layers"])
        return {"sliding_windows": tuple(window if i >= first else None for i in layers)}
    unknown = sorted({str(kind) for kind in types} - {_SLIDING, _FULL})
    if unknown:
        raise _error(f"layer_types {', '.join(unknown)} are not supported")
    if _SLIDING in types and window is None:
        raise _error(f"layer_types name {_SLIDING}, but no sliding_window is in use")
    return {"sliding_windows": tuple(window if kind == _SLIDING else None for kind in types)}


def _write_layer_windows(arch: Architecture) -> dict[str, Any]:
    windows = [arch.window(i) for i in range(arch.num_layers)]
    window = next((w for w in windows if w is not None), None)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [_FULL if w is None else _SLIDING for w in windows],
    }


def _read_mixtral_layers(config: HFConfig) -> dict[str, Any]:
    return {"sliding_windows": (config["sliding_window"],) * config["num_hidden_layers"]}


def _write_mixtral_layers(arch: Architecture) -> dict[str, Any]:
    return {"sliding_window": arch.window(0)}


def _read_qwen3_moe_layers(config: HFConfig) -> dict[str, Any]:
    """One window for all layers; MoE every ``decoder_sparse_step`` layers, some excepted."""
    layers, step = range(config["num_hidden_layers"]), config["decoder_sparse_step"]
    dense = config["mlp_only_layers"] or []
    window = config["sliding_window"] if config["use_sliding_window"] else None
    return {
        "sliding_windows": (window,) * len(layers),
        "moe_layers": tuple((i + 1) % step == 0 and i not in dense for i in layers),
    }


def _write_qwen3_moe_layers(arch: Architecture) -> dict[str, Any]:
    return {
        "use_sliding_window": arch.window(0) is not None,
        "sliding_window": arch.window(0),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(arch.num_layers) if not arch.is_moe_layer(i)],
    }


_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_QWEN2_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

HF_FAMILIES: dict[str, HFFamily] = {
    "qwen2": HFFamily(
        hf_class="Qwen2ForCausalLM",
        defaults=_QWEN2_DEFAULTS,
        weight_map=DENSE,
        fixed={"qkv_bias": True},
        read_layers=_read_layer_windows,
        write_layers=_write_layer_windows,
    ),
    "qwen3": HFFamily(
        hf_class="Qwen3ForCausalLM",
        defaults={**_QWEN2_DEFAULTS, "head_dim": 128, "attention_bias": False},
        weight_map=DENSE,
        fields=_ATTENTION_BIAS,
        fixed={"qk_norm": True},
        read_layers=_read_layer_windows,
        write_layers=_write_layer_windows,
    ),
    "llama": HFFamily(
        hf_class="LlamaForCausalLM",
        defaults={
            **_DEFAULTS,
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
        },
        weight_map=DENSE,
        fields={**_ATTENTION_BIAS, "mlp_bias": "mlp_bias"},
    ),
    "qwen3_moe": HFFamily(
        hf_class="Qwen3MoeForCausalLM",
        defaults={
            **_DEFAULTS,
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
            "mlp_only_layers": None,
        },
        weight_map=QWEN3_MOE,
        fields={
            **_ATTENTION_BIAS,
            **_EXPERTS,
            "num_experts": "num_experts",
            "moe_intermediate_size": "moe_intermediate_size",
            "norm_topk_prob": "norm_topk_prob",
        },
        fixed={"qk_norm": True},
        aliases={"num_local_experts": "num_experts"},
        read_layers=_read_qwen3_moe_layers,
        write_layers=_write_qwen3_moe_layers,
    ),
    "mixtral": HFFamily(
        hf_class="MixtralForCausalLM",
        defaults={
            **_DEFAULTS,
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "router_aux_loss_coef": 0.001,
            "rope_theta": 1000000.0,
        },
        weight_map=MIXTRAL,
        fields={
            **_EXPERTS,
            "num_experts": "num_local_experts",
            "moe_intermediate_size": "intermediate_size",
        },
        fixed={"norm_topk_prob": True},
        aliases={"num_experts": "num_local_experts"},
        read_layers=_read_mixtral_layers,
        write_layers=_write_mixtral_layers,
    ),
}
