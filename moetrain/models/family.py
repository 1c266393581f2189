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

Place = tuple[int | slice, ...]


class Piece(NamedTuple):
    """One file tensor and where it lies: ``parameter[place]`` is that tensor."""

    hf_name: str
    parameter: str
    place: Place


class Operation(Protocol):
    """One invertible line of a table."""

    def pieces(self, parameter: str, shape: Sequence[int]) -> list[Piece]:
        """The file tensors of ``parameter``; empty if this operation is not about it."""
        ...

    @property
    def modules(self) -> Sequence[str]:
        """The file's modules whose tensors it takes, with ``{layer}`` and ``{expert}``."""
        ...


@dataclass(frozen=True)
class Rename:
    """A module under another name. Its ``weight`` and ``bias`` keep their leaf name and shape."""

    ours: str
    theirs: str

    def pieces(self, parameter: str, shape: Sequence[int]) -> list[Piece]:
        """One tensor, the whole parameter."""
        module, _, leaf = parameter.rpartition(".")
        fields = _match(self.ours, module)
        if fields is None:
            return []
        return [Piece(f"{self.theirs.format(**fields)}.{leaf}", parameter, ())]

    @property
    def modules(self) -> tuple[str, ...]:
        """The one module."""
        return (self.theirs,)


@dataclass(frozen=True)
class StackExperts:
    """``[E, ...]``: the experts' matrices stacked, each the concatenation of ``theirs`` by rows.

    For E = 2 and theirs = (gate, up), both [F, D], the parameter ``[2, 2F, D]`` is
    ``[[gate_0; up_0], [gate_1; up_1]]``: ``up_1`` lies at ``[1, F:2F]``.
    """

    ours: str
    theirs: tuple[str, ...]

    def pieces(self, parameter: str, shape: Sequence[int]) -> list[Piece]:
        """``E * len(theirs)`` tensors, in the order of memory."""
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
        """Each expert's matrices."""
        return tuple(theirs.rpartition(".")[0] for theirs in self.theirs)


def all_pieces(table: Sequence[Operation], shapes: Mapping[str, Sequence[int]]) -> list[Piece]:
    """Every file tensor of a model, in the order of its parameters.

    Args:
        shapes: the model's parameters, by name.

    Raises:
        ValueError: a parameter that no operation covers, or more than one does.
    """
    pieces: list[Piece] = []
    for parameter, shape in shapes.items():
        found = [own for operation in table if (own := operation.pieces(parameter, shape))]
        if len(found) != 1:
            raise ValueError(f"{len(found)} weight map operations cover parameter {parameter!r}")
        pieces += found[0]
    return pieces


def find_scope(table: Sequence[Operation], hf_name: str) -> str | None:
    """Where a file tensor lies in what a table describes; None: outside all of it.

    That is the layer, as the file writes its number, whatever the tensor is called within it: a
    table describes layers whole. Of a module outside the layers it is the module's name.
    """
    for module in dict.fromkeys(module for operation in table for module in operation.modules):
        layers, is_layer, _ = module.partition("{layer}.")
        if hf_name.startswith(layers if is_layer else f"{module}."):
            return hf_name[len(layers) :].partition(".")[0] if is_layer else module
    return None


def _match(template: str, name: str) -> dict[str, str] | None:
    """The fields of ``template`` ("layers.{layer}.mlp") as found in ``name``, None: no match."""
    pattern = re.escape(template).replace(r"\{layer\}", r"(?P<layer>\d+)")
    found = re.fullmatch(pattern, name)
    return None if found is None else found.groupdict()


def moe_block(block: str, gate: str, up: str, down: str) -> tuple[Operation, ...]:
    """The router and experts of layers whose file tensors lie under ``block``.

    ``gate``, ``up`` and ``down`` are the file's names of an expert's three matrices.
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
