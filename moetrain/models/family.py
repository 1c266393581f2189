"""What a model family says about itself, in its one file: a :class:`Family`.

That is of which parts its layers are made (its class of :class:`Architecture`), its presets, its
plan, and how Hugging Face writes it down (:class:`HFFamily`). Here is also what many families
share: the plan that follows from parts, tables of ``config.json`` keys.

Left out on purpose: which families there are (:mod:`moetrain.models.registry`) and the conversion
that walks these tables (:mod:`moetrain.models.hf.config`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from moetrain.config import ConfigError
from moetrain.models.architecture import Architecture
from moetrain.models.attention import GroupedQueryAttention
from moetrain.models.layers import SwiGLU
from moetrain.models.rules import COLWISE, EMBEDDING, NORM, PartStyle, Rule, ShardingPlan
from moetrain.models.weight_map import Operation

HFConfig = Mapping[str, Any]


class DenseDecoder(Architecture):
    """Grouped-query attention, then SwiGLU, in every layer."""

    kinds = (GroupedQueryAttention, SwiGLU)


COMMON_FIELDS = {
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
"""Architecture fields and the keys that hold them in every family's files."""
ATTENTION_BIAS = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
"""For ``HFFamily.fields``: one key for both biases."""
EXPERTS = {
    "num_experts_per_token": "num_experts_per_tok",
    "router_aux_loss_coef": "router_aux_loss_coef",
}
"""For ``HFFamily.fields``: what all families with experts call the same."""
COMMON_DEFAULTS: HFConfig = {
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
"""For ``HFFamily.defaults``, to be completed and overridden."""
COMMON_DERIVED: Mapping[str, Callable[[HFConfig], Any]] = {
    "num_key_value_heads": lambda config: config["num_attention_heads"],
    "head_dim": lambda config: config["hidden_size"] // max(1, config["num_attention_heads"]),
}
"""For ``HFFamily.derived``."""


@dataclass(frozen=True)
class HFFamily:
    """How Hugging Face writes a family's models down."""

    hf_class: str
    """``transformers`` class of the model, for ``architectures``."""
    defaults: HFConfig
    """Keys that a file may omit, with the values they then have: those of the config class."""
    weight_map: Sequence[Operation]
    fields: Mapping[str, str] = field(default_factory=dict)
    """Architecture fields beyond :data:`COMMON_FIELDS` and the keys that hold them."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Architecture fields that are the same in the whole family."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys that files use."""
    derived: Mapping[str, Callable[[HFConfig], Any]] = field(default_factory=lambda: COMMON_DERIVED)
    """Sizes (keys of ``defaults``) that may be null, and what they then are."""
    nullable: Mapping[str, type] = field(default_factory=dict)
    """Other keys of ``defaults`` that may be null, and what they hold otherwise."""
    lora_layout: Literal["per_expert", "fused"] = "per_expert"
    """How its servers want experts' adapters: :mod:`moetrain.models.hf.peft`."""
    activation: str = "silu"
    """What ``hidden_act`` has to be."""
    read_layers: Callable[[HFConfig], dict[str, Any]] = lambda config: {}
    """Fields that several keys decide, or that differ between layers; ``defaults`` filled in."""
    write_layers: Callable[[Architecture], dict[str, Any]] = lambda arch: {}
    """The inverse of ``read_layers``."""

    @property
    def all_fields(self) -> dict[str, str]:
        """Every architecture field that a key holds, and that key."""
        return {**COMMON_FIELDS, **self.fields}


def decoder_plan(arch: Architecture) -> ShardingPlan:
    """What the parts say of themselves, and what holds of every decoder beside them.

    Raises:
        ValueError: parts of one name disagree about a parameter or their style.
    """
    rules: dict[str, Rule] = {"embed.weight": EMBEDDING, "norm.weight": NORM}
    rules |= {"layers.*.attn_norm.weight": NORM, "layers.*.mlp_norm.weight": NORM}
    styles: dict[str, PartStyle] = {"embed": "vocabulary", "norm": "gather", "layers.*norm": "own"}
    if not arch.tie_embeddings:
        rules["lm_head.weight"], styles["lm_head"] = COLWISE, "vocabulary"
    for part in arch.parts():
        name = f"layers.*.{part.name}"
        own = {f"{name}.{leaf}": weight.rule for leaf, weight in part.weights.items()}
        differ = any(rules.get(key, rule) != rule for key, rule in own.items())
        if differ or styles.get(name, part.style) != part.style:
            raise ValueError(f"plan: parts called {part.name} disagree")
        rules |= own
        styles[name] = part.style
    return ShardingPlan(rules, styles)


@dataclass(frozen=True)
class Family:
    """What a family's file says about its models."""

    name: str
    """Hugging Face ``model_type``, and the ``Architecture.family`` of its models."""
    architecture: type[Architecture]
    """Says of which parts the layers are made."""
    hf: HFFamily
    presets: Mapping[str, Architecture] = field(default_factory=dict)
    """Named architectures."""
    plan: Callable[[Architecture], ShardingPlan] = decoder_plan
    """Rules of its parameters and styles of its parts."""


def config_error(problem: str) -> ConfigError:
    """What reading a checkpoint's ``config.json`` raises, in a family's own functions too."""
    return ConfigError("model.path", f"config.json: {problem}")
