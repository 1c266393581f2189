"""Sparse upcycling: converts a dense model's weights to those of a mixture of experts.

Every expert starts as a copy of its layer's feed-forward (arXiv 2212.05055), the router with small
random weights, and everything else as in the dense model. With renormalised weights p_e of the K
chosen experts, equal copies give the dense layer's result, whatever the router chooses:

    sum_e p_e * f(x) = f(x)        since sum_e p_e = 1

With ``split`` G, an expert is one of G slices of the width, f = f_0 + ... + f_{G-1} (arXiv
2410.07524). Every G neighbouring experts form a group that holds all slices, and their router rows
start equal. So a token chooses K / G whole groups, and the weights in a group are equal too:

    sum_groups p_g / G * sum_i G * f_i(x) = f(x)

The factor G is in ``w_down``, and is exact in every dtype if it is a power of two. E = 4, G = 2:

    expert        0    1    2    3
    slice         f_0  f_1  f_0  f_1
    router row    r_0  r_0  r_1  r_1

With ``noise`` the copies differ from the start; the first group of experts gets no noise.

Left out on purpose: files (``python -m moetrain.checkpoint upcycle``), and experts that are partly
initialised at random again (arXiv 2502.19261).

Legend: G slices, D model width.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from operator import attrgetter

import torch

from moetrain.config import ConfigError
from moetrain.models.architecture import Architecture, Fields
from moetrain.models.family import FAMILIES
from moetrain.models.layers import SwiGLU
from moetrain.models.moe import RoutedExperts
from moetrain.models.rules import EXPERT
from moetrain.models.transformer import Transformer

_Tensors = dict[str, torch.Tensor]
_BECOMES = {"llama": "mixtral", "qwen2": "glm4_moe", "qwen3": "qwen3_moe"}
"""Dense families, and for each the MoE family with the same attention."""
_KEPT = {"hidden_size", "norm_topk_prob", "routed_scaling_factor"}
_ROUTING = {field.name for field in fields(RoutedExperts)} - _KEPT
"""Fields that a family may fix to another value without changing the function."""
_SEED = 0


@dataclass(frozen=True)
class Upcycling:
    """The conversion of a dense model to a mixture of experts."""

    num_experts: int
    num_experts_per_token: int
    split: int = 1
    """G, the number of experts among which the width of one feed-forward is divided."""
    noise: float = 0.0
    """Standard deviation of the noise of copies, as a share of the tensor's own."""
    family: str | None = None
    """The family of the result; None: the usual one for the dense model's family."""

    def architecture(self, dense: Architecture) -> Architecture:
        """Return the architecture of the result.

        Raises:
            ConfigError: ``dense`` is not dense, or the sizes or the family do not fit it.
            ValueError: the sizes do not fit each other.
        """
        mixed = [part for _, part in dense.layers() if not isinstance(part, SwiGLU)]
        if mixed or dense.num_experts or dense.mlp_bias:
            what = "has biases in its feed-forward" if dense.mlp_bias else "is not dense"
            raise ConfigError("PATH", f"the {dense.family} model {what}; give another")
        name = self.family or _BECOMES.get(dense.family)
        if name not in FAMILIES:
            none = f"not set, and {dense.family} has no usual one"
            problem = f"{repr(self.family) + ' is unknown' if self.family else none}; give one of "
            raise ConfigError("family", problem + ", ".join(sorted(FAMILIES)))
        self._check(dense)
        family = FAMILIES[name]
        width = dense.intermediate_size // self.split
        values: Fields = {
            **dense.model_dump(),
            **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), width),
            "num_experts": self.num_experts,
            "num_experts_per_token": self.num_experts_per_token,
            "norm_topk_prob": True,
            "router_aux_loss_coef": family.defaults.get("router_aux_loss_coef", 0.0),
            # New routers need balancing; some families' files can ask for it.
            "output_router_logits": "output_router_logits" in family.defaults,
        }
        own = {key: x for key, x in family.fixed.items() if key not in values or key in _ROUTING}
        lost = [key for key in family.fixed if key not in own and family.fixed[key] != values[key]]
        values |= {**own, "family": name, "num_experts_per_token": self.num_experts_per_token}
        arch = family.architecture.model_validate(values)
        if lost or any(
            ours != theirs or type(part) is not RoutedExperts or part.shared is not None
            for (ours, _), (theirs, part) in zip(dense.layers(), arch.layers(), strict=True)
        ):
            what = f"{lost[0]} {values[lost[0]]}" if lost else "the layers"
            raise ConfigError(
                "family", f"{name} cannot have {what} of this {dense.family}; give another"
            )
        return arch

    def _check(self, dense: Architecture) -> None:
        width = dense.intermediate_size
        if self.split < 1 or width % self.split:
            raise ConfigError(
                "split", f"{self.split} does not divide intermediate_size {width}; give a divisor"
            )
        for name in ("num_experts", "num_experts_per_token"):
            if (value := getattr(self, name)) < 1 or value % self.split:
                raise ConfigError(
                    name, f"{value} is not a positive multiple of split {self.split}; give one"
                )
        if not 0 <= self.noise < math.inf:
            raise ConfigError(
                "noise", f"{self.noise} is not a finite number of 0 or more; give one"
            )

    def weights(
        self,
        model: Transformer,
        dense: Transformer,
        fill: Callable[[_Tensors], _Tensors],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and value of every tensor of the files of ``model``.

        Memory holds one parameter of ``model`` at a time, and the parameters of ``dense`` that it
        is made from.

        Args:
            model: the resulting ``Transformer``, on meta.
            dense: the dense ``Transformer``, on meta, with the dtype in which it is read.
            fill: fills empty parameters of the dense model, by name.
        """
        shapes = {name: parameter.shape for name, parameter in dense.named_parameters()}
        dtype = next(dense.parameters()).dtype
        empty = {**dict(model.named_parameters()), **dict(model.named_buffers())}

        def read(name: str) -> torch.Tensor:
            return fill({name: torch.empty(shapes[name], dtype=dtype)})[name]

        for name, pieces in groupby(model.pieces(), attrgetter("parameter")):
            value = self._parameter(name, empty[name].shape, read)
            yield from ((piece.hf_name, value[piece.place]) for piece in pieces)

    def _parameter(
        self,
        name: str,
        shape: Sequence[int],
        read: Callable[[str], torch.Tensor],
    ) -> torch.Tensor:
        """Return the parameter or buffer ``name`` of the result.

        ``read`` returns a parameter of the dense model by name.
        """
        layer, found, leaf = name.partition(".moe.")
        if not found:
            return read(name)
        if leaf == "router.bias":
            return torch.zeros(shape)
        if leaf == "router.weight":
            rows_GD = torch.empty(shape[0] // self.split, shape[1])
            EXPERT.draw(rows_GD, name, rows_GD.shape, 0.02, _SEED)
            return rows_GD.repeat_interleave(self.split, dim=0)
        if leaf == "experts.w_down":
            pieces = read(f"{layer}.mlp.w_down.weight").chunk(self.split, dim=1)
            pieces = [piece * self.split for piece in pieces]
        else:
            both = (read(f"{layer}.mlp.{key}.weight").chunk(self.split) for key in _GATE_UP)
            pieces = [torch.cat(pair) for pair in zip(*both, strict=True)]
        experts = torch.empty(shape, dtype=pieces[0].dtype)
        for number, expert in enumerate(experts):
            piece = pieces[number % self.split]
            expert.copy_(piece)
            if self.noise and number >= self.split:
                noise = torch.empty(piece.shape)
                width = self.noise * piece.float().std().item()
                EXPERT.draw(noise, f"{name}.{number}", noise.shape, width, _SEED)
                expert.copy_(piece.float() + noise)
        return experts


_GATE_UP = ("w_gate", "w_up")
