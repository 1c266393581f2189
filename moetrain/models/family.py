"""The description of a model family, a :class:`Family`; each has one file of its own.

A weight map is a sequence of operations. An operation lists the file tensors that a parameter
consists of, and the place of each in it. Loading copies every tensor to its place and saving reads
every place, so the two cannot drift apart. The file side is the published format. A map names every
parameter that its family can have, and only those that the model at hand has are looked up. The
router's selection bias is a buffer; a map names it if the family's files hold it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Literal, NamedTuple, Protocol

import torch

from moetrain.models.architecture import Architecture, ConfigJson, Fields


class Piece(NamedTuple):
    """A file tensor, or a part of one, and its place in a parameter."""

    hf_name: str
    """Name of the file tensor."""
    parameter: str
    """Name of the parameter."""
    place: tuple[int | slice | None, ...]
    """The index of the piece: it is ``parameter[place]``."""
    within: tuple[int | slice, ...] = ()
    """The part of the file tensor, by slices with ends; empty: all of it. Pieces of one tensor are
    neighbours in :meth:`Family.pieces`."""
    is_transposed: bool = False
    """True: the file tensor's last two dims are swapped before ``within`` applies."""
    is_copy: bool = False
    """True: the file tensor repeats another one, so it is written and not read."""

    @property
    def is_whole(self) -> bool:
        """True: the piece is a whole file tensor, not transposed."""
        return not self.within and not self.is_transposed

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the piece of the whole file ``tensor``, as a view."""
        return (tensor.mT if self.is_transposed else tensor)[self.within]

    def least_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the smallest shape of a file tensor that holds this piece of ``parameter``."""
        shape = [i + 1 if isinstance(i, int) else i.stop for i in self.within]
        known = sum(isinstance(i, slice) for i in self.within)
        shape += parameter[self.place].shape[known:]
        if self.is_transposed:
            shape[-2:] = shape[:-3:-1]
        return tuple(shape)

    @classmethod
    def shape_of(
        cls, pieces: Sequence[Piece], parameters: Mapping[str, torch.Tensor]
    ) -> tuple[int, ...]:
        """Return the shape of the file tensor that consists of ``pieces``."""
        shapes = (piece.least_shape(parameters[piece.parameter]) for piece in pieces)
        return tuple(map(max, *shapes)) if len(pieces) > 1 else next(shapes)


@dataclass(frozen=True)
class Rename:
    """Maps the tensors of a module, or a single tensor, to another name with the same shape."""

    ours: str
    """Name of the module or parameter, with ``{layer}``."""
    theirs: str
    """Name of the module or tensor in files, with ``{layer}``."""
    place: tuple[int | slice | None, ...] = ()
    """The place of the file tensor in the parameter."""
    is_transposed: bool = False
    """True: the last two dims of the file tensor are swapped."""

    def pieces(
        self, parameter: str, shape: Sequence[int], arch: Architecture | None
    ) -> list[Piece]:
        module, dot, leaf = parameter.rpartition(".")
        for name, rest in ((parameter, ""), (module, dot + leaf)):
            if (fields := match(self.ours, name)) is not None:
                hf_name = self.theirs.format(**fields) + rest
                swapped = self.is_transposed
                return [Piece(hf_name, parameter, self.place, is_transposed=swapped)]
        return []

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.theirs,)


class Operation(Protocol):
    """Lists the file tensors of some parameters."""

    def pieces(
        self, parameter: str, shape: Sequence[int], arch: Architecture | None
    ) -> list[Piece]:
        """Return the pieces of ``parameter``; none if another operation maps it.

        Args:
            shape: the parameter's shape; empty for a buffer.
            arch: the model's architecture; None: names alone are asked for.
        """
        ...

    @property
    def modules(self) -> tuple[str, ...]:
        """The file's modules, with ``{layer}`` and ``{expert}``."""
        ...


WeightMap = tuple[Operation, ...]
_escaped: Callable[[str], str] = functools.cache(lambda text: re.escape(text))  # few of them


def match(template: str, name: str) -> dict[str, str] | None:
    """Return the fields of ``template`` ("layers.{layer}.mlp") in ``name``; None: no match."""
    found = re.fullmatch(_escaped(template).replace(r"\{layer\}", r"(?P<layer>\d+)"), name)
    return None if found is None else found.groupdict()


_SAME = ("vocab_size", "hidden_size", "head_dim", "intermediate_size", "rope_theta", "mlp_bias")
_SAME += ("num_experts", "moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef")
_SAME += ("output_router_logits",)
_FIELDS = {name: name for name in (*_SAME, "partial_rotary_factor")} | {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "qkv_bias": "attention_bias",
    "out_bias": "attention_bias",
    "num_experts_per_token": "num_experts_per_tok",
}
"""Architecture fields, and the usual keys of config.json that hold them. They apply to families
whose ``defaults`` have the key."""


@dataclass(frozen=True)
class Family:
    """A model family, and the files in which Hugging Face stores its models."""

    name: str
    """Hugging Face ``model_type``, and the ``Architecture.family`` of its models."""
    architecture: type[Architecture]
    """The architecture class, which names the parts of layers."""
    hf_class: str
    """Name of the ``transformers`` class, for the key ``architectures``."""
    defaults: ConfigJson
    """All keys of config.json that describe a model, with the defaults of the ``transformers``
    config class; a file may omit them."""
    weight_map: WeightMap
    """The map of the published files."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Architecture fields, and the keys that hold them, where these are not the usual ones."""
    fixed: Fields = field(default_factory=dict)
    """Architecture fields that have one value in the whole family."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names that files use for keys."""
    nullable: Mapping[str, type] = field(default_factory=dict)
    """Keys of ``defaults`` that may be null, and the types of their other values."""
    lora_layout: Literal["per_expert", "fused"] = "per_expert"
    """The layout in which PEFT loads experts' adapters; see :mod:`moetrain.models.hf.peft`."""
    modules: WeightMap | None = None
    """The map of the modules of ``transformers``, after which adapters are named; None: the files
    have the same names."""
    experts: str = "mlp.experts"
    """The module of a layer that holds all routed experts in ``transformers``."""
    unused: str = ""
    """The pattern of tensors that files may hold in a layer and that no model of the family uses;
    empty: there are none. An export copies them unchanged."""
    unadaptable: str = ""
    """The pattern of weights for which PEFT takes no adapters in this family."""
    unadapted: str = ""
    """The pattern, a regular expression, of modules of ``transformers`` that have no adapters, but
    the names of modules that do; empty: there are none."""
    other_maps: tuple[WeightMap, ...] = ()
    """Maps of other layouts in which files hold the same tensors; an export keeps its source's."""
    section: tuple[str, str] | None = None
    """The key of ``config.json`` that holds the model's own keys, and the ``model_type`` in there;
    None: the model's keys are at the top."""
    activation: str = "silu"
    """The one value of ``hidden_act`` that is supported, by the name that published files have."""
    written_activation: str | None = None
    """The name that ``transformers`` writes; None: the same."""
    constants: ConfigJson = field(default_factory=dict)
    """Keys that published files hold with one value in the whole family. transformers reads none of
    them, but vLLM or SGLang needs them, so the config of a new model has them."""
    read_layers: Callable[[ConfigJson], Fields] = lambda config: {}
    """Computes the fields that depend on several keys, or that differ between layers, from the
    config with ``defaults`` filled in."""
    write_layers: Callable[[Architecture], Fields] = lambda arch: {}
    """Inverts ``read_layers``."""
    presets: Mapping[str, Architecture] = field(default_factory=dict)
    """The named architectures, for ``model.preset``."""

    @property
    def language_model(self) -> str:
        """The module of ``transformers`` that holds the embedding and the blocks."""
        return "model" if self.section is None else "model.language_model"

    @property
    def keys(self) -> dict[str, str]:
        """Every architecture field that is held by a key of ``config.json``, with that key."""
        usual = {ours: key for ours, key in _FIELDS.items() if key in self.defaults}
        return {k: v for k, v in {**usual, **self.fields}.items() if k not in self.fixed}

    def pieces(
        self,
        shapes: Mapping[str, Sequence[int]],
        arch: Architecture,
        weight_map: WeightMap | None = None,
    ) -> list[Piece]:
        """List the pieces of all parameters, in the order of ``shapes``.

        Args:
            shapes: the shape of each parameter, by name.
            weight_map: one of the family's; None: :attr:`weight_map`.

        Raises ValueError: no operation covers a parameter, or more than one does.
        """
        pieces: list[Piece] = []
        operations = (*(self.weight_map if weight_map is None else weight_map), _SCORE)
        for name, shape in shapes.items():
            found = [own for one in operations if (own := one.pieces(name, shape, arch))]
            if len(found) != 1:
                raise ValueError(f"{len(found)} weight map operations cover parameter {name!r}")
            pieces += found[0]
        return pieces

    def holds(self, name: str, weight_map: WeightMap | None = None) -> bool:
        """Return True if files hold the buffer ``name``; ``weight_map`` as in :meth:`pieces`."""
        operations = self.weight_map if weight_map is None else weight_map
        return any(one.pieces(name, (), None) for one in operations)

    def scope(self, hf_name: str) -> str | None:
        """Return the layer or module of the weight map that a file tensor belongs to.

        A layer is named by its number as the file writes it. Every tensor of a layer belongs to it,
        whatever its name is, since a map describes whole layers. Outside of layers the name is that
        of the module. None: the tensor belongs to neither.
        """
        for module in dict.fromkeys(module for one in self.weight_map for module in one.modules):
            layers, is_layer, _ = module.partition("{layer}.")
            if hf_name.startswith(layers if is_layer else f"{module}."):
                return hf_name[len(layers) :].partition(".")[0] if is_layer else module
        return None


_SCORE = Rename("score", "score")
"""The map of a reward model's head, the same in every family."""

FAMILIES: dict[str, Family] = {}
"""Every known family by its ``model_type``."""
PRESETS: dict[str, Architecture] = {}
"""The named architectures of all families."""


def presets_near(name: str) -> list[str]:
    """Return the names of all presets, the most similar to ``name`` first."""
    likeness = {preset: SequenceMatcher(None, name, preset).ratio() for preset in PRESETS}
    return sorted(PRESETS, key=lambda preset: (-likeness[preset], preset))


def register(family: Family) -> None:
    """Add ``family`` and its presets to the known ones; ValueError: a name is taken."""
    taken = {family.name} & FAMILIES.keys() | family.presets.keys() & PRESETS.keys()
    if taken:
        raise ValueError(f"family {family.name!r}: {', '.join(sorted(taken))} is there already")
    FAMILIES[family.name] = family
    PRESETS.update(family.presets)
