"""What a model family says about itself, in its one file: a :class:`Family`.

That is how its blocks are built, its presets, and how each Hugging Face ``model_type`` of it is
written down (:class:`HFFamily`), with the tables that ``config.json`` files of all families share.

Left out on purpose: which families there are (:mod:`moetrain.models.registry`) and the conversion
that walks these tables (:mod:`moetrain.models.hf_config`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from moetrain.config import ConfigError, KernelsSection, MoeSection
from moetrain.models.architecture import Architecture
from moetrain.models.rules import Plan
from moetrain.models.weight_map import Operation

HFConfig = Mapping[str, Any]

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


@dataclass(frozen=True)
class HFFamily:
    """How one ``model_type`` is written down."""

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
    read_layers: Callable[[HFConfig], dict[str, Any]] = lambda config: {}
    """``sliding_windows`` and ``moe_layers`` from the keys, ``defaults`` filled in."""
    write_layers: Callable[[Architecture], dict[str, Any]] = lambda arch: {}
    """The inverse of ``read_layers``."""

    @property
    def all_fields(self) -> dict[str, str]:
        """Every architecture field that a key holds, and that key."""
        return {**COMMON_FIELDS, **self.fields}


class Family(NamedTuple):
    """What a family's file says about its models."""

    hf: Mapping[str, HFFamily]
    """By ``model_type``, which is also the ``Architecture.family`` of what it builds."""
    presets: Mapping[str, Architecture]
    """Named architectures."""
    plan: Callable[[Architecture], Plan]
    """Rules of its parameters and styles of its parts."""
    make_block: Callable[[Architecture, int, KernelsSection, MoeSection], nn.Module]
    """Block number ``i``: ``block(x_BSD, context) -> (x_BSD, RouterStats | None)``."""


def config_error(problem: str) -> ConfigError:
    """What reading a checkpoint's ``config.json`` raises, in a family's own functions too."""
    return ConfigError("model.path", f"config.json: {problem}")
