"""How our parameters correspond to the tensors of a Hugging Face checkpoint, as short tables.

A table is a sequence of operations, and an operation answers one question: of which file tensors
is this parameter made, and where does each of them lie in it? Loading copies every tensor to its
place, saving reads every place; both walk the same answer, so they cannot drift apart, and every
operation is invertible by construction. The file side is the published format, one tensor per
expert. Architecture switches need no mention: a table names every parameter its family can have,
and only those that the model at hand has are asked for.

Left out on purpose: buffers (the router's selection bias has no counterpart in these formats),
reading and writing files (:mod:`moetrain.models.hf`), and how a parameter is spread over devices.

Legend: E experts, F expert width, D model width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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
