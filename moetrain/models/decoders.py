"""The usual decoders and their weight maps; most families are variants of them.

The maps use the tensor names of Llama's and Mixtral's files, where each expert has tensors of its
own. A family adds entries to these maps and defaults, or replaces some.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moetrain.models.architecture import Architecture, Fields, Part
from moetrain.models.attention import GroupedQueryAttention
from moetrain.models.family import Piece, Rename, WeightMap, match
from moetrain.models.layers import SwiGLU
from moetrain.models.moe import RoutedExperts

COMMON_DEFAULTS: Fields = {
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
"""Entries of ``Family.defaults``; a family completes and overrides them."""


@dataclass(frozen=True)
class StackExperts:
    """Stacks the experts' matrices to one parameter ``[E, ...]``.

    The matrix of an expert is the concatenation, by rows, of its tensors ``theirs``. A tensor in
    files is one expert's, or that of all experts, [E, ...].

    For E = 2 and theirs = (gate, up), both [F, D], the parameter ``[2, 2F, D]`` is
    ``[[gate_0; up_0], [gate_1; up_1]]``: ``up_1`` is at ``[1, F:2F]``.
    """

    ours: str
    """Name of the stacked parameter, with ``{layer}``."""
    theirs: tuple[str, ...]
    """Names of the tensors in files, with ``{layer}``, and with ``{expert}`` if each expert has
    tensors of its own."""

    def pieces(
        self, parameter: str, shape: Sequence[int], arch: Architecture | None
    ) -> list[Piece]:
        """Return a piece for each tensor in files; none unless ``parameter`` is ``ours``."""
        fields = match(self.ours, parameter)
        if fields is None:
            return []
        rows = shape[1] // len(self.theirs)
        has_own = "{expert}" in self.theirs[0]
        experts = range(shape[0]) if has_own else [slice(0, shape[0])]
        return [
            Piece(
                theirs.format(expert=expert, **fields),
                parameter,
                (expert, slice(part * rows, (part + 1) * rows)),
            )
            for expert in experts
            for part, theirs in enumerate(self.theirs)
        ]

    @property
    def modules(self) -> tuple[str, ...]:
        """The file's modules, with ``{layer}``, and with ``{expert}`` where ``theirs`` have it."""
        return tuple(theirs.rpartition(".")[0] for theirs in self.theirs)


def moe_block(
    block: str = "mlp",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    *,
    router: str = "gate.weight",
    bias: str | None = None,
    bias_place: tuple[None, ...] = (),
    shared: str | None = None,
    shared_gate: str | None = None,
) -> WeightMap:
    """Map the router and experts of layers whose file tensors lie under ``block``.

    Args:
        gate, up, down: the file's names of an expert's three matrices.
        router: the file's name of the router's weight.
        bias: the file's name of the selection bias; None: the files have none.
        bias_place: the index at which our bias has the shape of the file's; (None,): the file's
            bias has one more dim, of size 1, in front.
        shared: the file's name of the shared experts' module; None: the files have none.
        shared_gate: the file's name of their gate; None: the files have none.
    """
    prefix = f"model.layers.{{layer}}.{block}"
    expert = f"{prefix}.experts.{{expert}}"
    others: WeightMap = ()
    if bias is not None:
        others += (Rename("layers.{layer}.moe.router.bias", f"{prefix}.{bias}", bias_place),)
    if shared is not None:
        for ours, theirs in {"w_gate": gate, "w_up": up, "w_down": down}.items():
            name = f"layers.{{layer}}.moe.shared_experts.{ours}"
            others += (Rename(name, f"{prefix}.{shared}.{theirs}"),)
    if shared_gate is not None:
        others += (Rename("layers.{layer}.moe.shared_expert_gate", f"{prefix}.{shared_gate}"),)
    return (
        Rename("layers.{layer}.moe.router.weight", f"{prefix}.{router}"),
        *others,
        StackExperts(
            "layers.{layer}.moe.experts.w_gate_up",
            (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
        ),
        StackExperts("layers.{layer}.moe.experts.w_down", (f"{expert}.{down}.weight",)),
    )


DENSE: tuple[Rename, ...] = (
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


def stacked(block: WeightMap, *, is_transposed: bool = False) -> WeightMap:
    """Return the map ``block`` of a :func:`moe_block` for files that stack the experts' matrices.

    A layer's files then have ``gate_up_proj`` ``[E, 2F, D]`` and ``down_proj`` ``[E, D, F]``, or
    ``[E, D, 2F]`` and ``[E, F, D]`` if ``is_transposed``.
    """
    ours, theirs = "layers.{layer}.moe.experts", "model.layers.{layer}.mlp.experts"
    return (
        *(one for one in block if isinstance(one, Rename)),
        Rename(f"{ours}.w_gate_up", f"{theirs}.gate_up_proj", is_transposed=is_transposed),
        Rename(f"{ours}.w_down", f"{theirs}.down_proj", is_transposed=is_transposed),
    )


def renamed(weight_map: WeightMap, change: Callable[[str], str]) -> WeightMap:
    """Return ``weight_map`` for files with other names, ``change(name)`` in place of ``name``."""

    def changed(theirs: Any) -> Any:
        return tuple(map(changed, theirs)) if isinstance(theirs, tuple) else change(theirs)

    operations: Any = weight_map  # all of them have the field ``theirs``
    return tuple(replace(one, theirs=changed(one.theirs)) for one in operations)


def beside_vision(weight_map: WeightMap) -> WeightMap:
    """Return ``weight_map`` for files that also hold a vision tower.

    The language model's modules are then under ``model.language_model``.
    """
    return renamed(weight_map, lambda name: name.replace("model.", "model.language_model.", 1))


class DenseDecoder(Architecture):
    """The dense decoder: grouped-query attention, then SwiGLU, in every layer."""

    kinds = (GroupedQueryAttention, SwiGLU)


class MoEDecoder(Architecture):
    """The MoE decoder: grouped-query attention, then routed experts, or SwiGLU in layers that
    ``moe_layers`` leaves dense."""

    kinds = (GroupedQueryAttention, RoutedExperts, SwiGLU)

    def feed_forward(self, layer: int) -> Part:
        is_routed = self.moe_layers[layer] if self.moe_layers else self.num_experts > 0
        return (RoutedExperts if is_routed else SwiGLU).of(self)
