"""How a model family describes itself, in one file of its own: a :class:`Family`.

A family says of which parts its layers are made (its subclass of :class:`Architecture`), which
presets it has, how its parameters are cut, and how Hugging Face writes it down (:class:`HFFamily`:
tables of ``config.json`` keys and a weight map). Here is also what many families share.

A weight map is a sequence of operations, and an operation answers one question: of which file
tensors is this parameter made, and where does each of them lie in it? Loading copies every tensor
to its place and saving reads every place. Both walk the same answer, so they cannot drift apart,
and every operation is invertible by construction. The file side is the published format, with one
tensor per expert. A map names every parameter that its family can have, and only those that the
model at hand has are looked up.

Left out on purpose: which families there are (:mod:`moetrain.models.families`), the conversion that
walks these tables (:mod:`moetrain.models.hf`), buffers (the router's selection bias has no
counterpart in these formats), and how a parameter is spread over devices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from moetrain.config import ConfigError
from moetrain.models.architecture import Architecture
from moetrain.models.attention import GroupedQueryAttention
from moetrain.models.layers import SwiGLU
from moetrain.models.rules import COLWISE, EMBEDDING, NORM, PartStyle, Rule, ShardingPlan

Index = tuple[int | slice, ...]
"""An index into a parameter; empty: all of it."""


class Piece(NamedTuple):
    """A file tensor and where it lies: ``parameter[place]`` is that tensor."""

    hf_name: str
    parameter: str
    place: Index


class Operation(Protocol):
    """One invertible line of a weight map."""

    def pieces(self, parameter: str, shape: Sequence[int]) -> list[Piece]:
        """Return the file tensors of ``parameter``; none if the operation does not cover it."""
        ...

    @property
    def modules(self) -> Sequence[str]:
        """The file's modules whose tensors it covers, with ``{layer}`` and ``{expert}``."""
        ...


@dataclass(frozen=True)
class Rename:
    """Maps a module to another name. Its ``weight`` and ``bias`` keep leaf name and shape."""

    ours: str
    theirs: str

    def pieces(self, parameter: str, shape: Sequence[int]) -> list[Piece]:
        """Return one tensor, which is the whole parameter."""
        module, _, leaf = parameter.rpartition(".")
        fields = _match(self.ours, module)
        if fields is None:
            return []
        return [Piece(f"{self.theirs.format(**fields)}.{leaf}", parameter, ())]

    @property
    def modules(self) -> tuple[str, ...]:
        """The module itself."""
        return (self.theirs,)


@dataclass(frozen=True)
class StackExperts:
    """Stacks experts' matrices to ``[E, ...]``, each the concatenation of ``theirs`` by rows.

    For E = 2 and theirs = (gate, up), both [F, D], the parameter ``[2, 2F, D]`` is
    ``[[gate_0; up_0], [gate_1; up_1]]``: ``up_1`` lies at ``[1, F:2F]``.
    """

    ours: str
    theirs: tuple[str, ...]

    def pieces(self, parameter: str, shape: Sequence[int]) -> list[Piece]:
        """Return ``E * len(theirs)`` tensors in memory order."""
        fields = _match(self.ours, parameter)
        if fields is None:
            return []
        rows = shape[1] // len(self.theirs)
        return [
            Piece(
                theirs.format(expert=expert, **fields),
                parameter,
                (expert, slice(part * rows, (part + 1) * rows)),
            )
            for expert in range(shape[0])
            for part, theirs in enumerate(self.theirs)
        ]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of an expert's matrices."""
        return tuple(theirs.rpartition(".")[0] for theirs in self.theirs)


def all_pieces(table: Sequence[Operation], shapes: Mapping[str, Sequence[int]]) -> list[Piece]:
    """List every file tensor of a model whose parameters have ``shapes``, in their order.

    Raises:
        ValueError: no operation covers a parameter, or more than one does.
    """
    pieces: list[Piece] = []
    for parameter, shape in shapes.items():
        found = [own for operation in table if (own := operation.pieces(parameter, shape))]
        if len(found) != 1:
            raise ValueError(f"{len(found)} weight map operations cover parameter {parameter!r}")
        pieces += found[0]
    return pieces


def find_scope(table: Sequence[Operation], hf_name: str) -> str | None:
    """Find the layer or module of ``table`` that a file tensor lies in; None: it lies outside.

    A layer is named by its number as the file writes it, and any tensor in it counts, whatever it
    is called: a table describes whole layers. Outside the layers it is the module's name.
    """
    for module in dict.fromkeys(module for operation in table for module in operation.modules):
        layers, is_layer, _ = module.partition("{layer}.")
        if hf_name.startswith(layers if is_layer else f"{module}."):
            return hf_name[len(layers) :].partition(".")[0] if is_layer else module
    return None


def _match(template: str, name: str) -> dict[str, str] | None:
    """Return the fields of ``template`` ("layers.{layer}.mlp") in ``name``; None: no match."""
    pattern = re.escape(template).replace(r"\{layer\}", r"(?P<layer>\d+)")
    found = re.fullmatch(pattern, name)
    return None if found is None else found.groupdict()


def moe_block(block: str, gate: str, up: str, down: str) -> tuple[Operation, ...]:
    """Map the router and experts of layers whose file tensors lie under ``block``.

    ``gate``, ``up`` and ``down`` are the file's names for an expert's three matrices.
    """
    prefix = f"model.layers.{{layer}}.{block}"
    expert = f"{prefix}.experts.{{expert}}"
    return (
        Rename("layers.{layer}.moe.router", f"{prefix}.gate"),
        StackExperts(
            "layers.{layer}.moe.experts.w_gate_up",
            (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
        ),
        StackExperts("layers.{layer}.moe.experts.w_down", (f"{expert}.{down}.weight",)),
    )


DENSE: tuple[Operation, ...] = (
    Rename("embed", "model.embed_tokens"),
    Rename("layers.{layer}.attn_norm", "model.layers.{layer}.input_layernorm"),
    Rename("layers.{layer}.attn.wq", "model.layers.{layer}.self_attn.q_proj"),
    Rename("layers.{layer}.attn.wk", "model.layers.{layer}.self_attn.k_proj"),
    Rename("layers.{layer}.attn.wv", "model.layers.{layer}.self_attn.v_proj"),
    Rename("layers.{layer}.attn.wo", "model.layers.{layer}.self_attn.o_proj"),
    Rename("layers.{layer}.attn.q_norm", "model.layers.{layer}.self_attn.q_norm"),
    Rename("layers.{layer}.attn.k_norm", "model.layers.{layer}.self_attn.k_norm"),
    Rename("layers.{layer}.mlp_norm", "model.layers.{layer}.post_attention_layernorm"),
    Rename("layers.{layer}.mlp.w_gate", "model.layers.{layer}.mlp.gate_proj"),
    Rename("layers.{layer}.mlp.w_up", "model.layers.{layer}.mlp.up_proj"),
    Rename("layers.{layer}.mlp.w_down", "model.layers.{layer}.mlp.down_proj"),
    Rename("norm", "model.norm"),
    Rename("lm_head", "lm_head"),
)


HFConfig = Mapping[str, Any]


class DenseDecoder(Architecture):
    """Grouped-query attention, then SwiGLU, in every layer."""

    kinds = (GroupedQueryAttention, SwiGLU)


_COMMON_FIELDS = {
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
"""Architecture fields, and the keys that hold them in the files of every family."""
ATTENTION_BIAS = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
"""Entries of ``HFFamily.fields``: one key holds both biases."""
EXPERTS = {
    "num_experts_per_token": "num_experts_per_tok",
    "router_aux_loss_coef": "router_aux_loss_coef",
}
"""Entries of ``HFFamily.fields``: keys that all families with experts share."""
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
"""Entries of ``HFFamily.defaults``, which a family completes and overrides."""
_COMMON_DERIVED: Mapping[str, Callable[[HFConfig], Any]] = {
    "num_key_value_heads": lambda config: config["num_attention_heads"],
    "head_dim": lambda config: config["hidden_size"] // max(1, config["num_attention_heads"]),
}
"""The usual ``HFFamily.derived``."""


@dataclass(frozen=True)
class HFFamily:
    """Describes the files in which Hugging Face stores a family's models."""

    hf_class: str
    """Name of the ``transformers`` class, for the key ``architectures``."""
    defaults: HFConfig
    """Keys that a file may omit, with the values of the ``transformers`` config class."""
    weight_map: Sequence[Operation]
    fields: Mapping[str, str] = field(default_factory=dict)
    """Architecture fields beyond :data:`_COMMON_FIELDS`, and the keys that hold them."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Architecture fields that have one value in the whole family."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names that files use for keys."""
    derived: Mapping[str, Callable[[HFConfig], Any]] = field(
        default_factory=lambda: _COMMON_DERIVED
    )
    """Keys of ``defaults`` that may be null, and functions that compute their values then."""
    nullable: Mapping[str, type] = field(default_factory=dict)
    """Other keys of ``defaults`` that may be null, and the types of their values otherwise."""
    lora_layout: Literal["per_expert", "fused"] = "per_expert"
    """The layout in which servers load experts' adapters; see :mod:`moetrain.models.hf.peft`."""
    activation: str = "silu"
    """The one value of ``hidden_act`` that is supported."""
    read_layers: Callable[[HFConfig], dict[str, Any]] = lambda config: {}
    """Computes fields that several keys decide, or that differ between layers; it gets the config
    with ``defaults`` filled in."""
    write_layers: Callable[[Architecture], dict[str, Any]] = lambda arch: {}
    """Inverts ``read_layers``."""

    @property
    def all_fields(self) -> dict[str, str]:
        """Every architecture field that a key holds, with that key."""
        return {**_COMMON_FIELDS, **self.fields}


def decoder_plan(arch: Architecture) -> ShardingPlan:
    """Collect the rules and styles of all parts, and add those that every decoder has.

    Raises:
        ValueError: parts of one name disagree about a parameter's rule or about their style.
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
    """A model family, as its file describes it."""

    name: str
    """Hugging Face ``model_type``, and the ``Architecture.family`` of its models."""
    architecture: type[Architecture]
    """Names the parts that layers are made of."""
    hf: HFFamily
    presets: Mapping[str, Architecture] = field(default_factory=dict)
    """The named architectures, for ``model.preset``."""
    plan: Callable[[Architecture], ShardingPlan] = decoder_plan
    """Makes the rules of the parameters and the styles of the parts."""


def config_error(problem: str) -> ConfigError:
    """Make the error that reading ``config.json`` raises, in a family's functions too."""
    return ConfigError("model.path", f"config.json: {problem}")
