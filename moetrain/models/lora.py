"""LoRA adapters (arXiv 2106.09685): two small matrices beside a weight, which alone are trained.

    y = x @ W^T + scale * (x @ A^T) @ B^T        A [rank, in], B [out, rank]

An adapter is two more parameters of the module that has the weight, named like it with ``_lora_a``
and ``_lora_b`` appended; sharding, optimizer state, checkpoints and weight updates follow. Stacked
experts have stacked adapters, A [E, rank, in]; an expert's gate and up matrices, which are one
weight, share A. Left out on purpose: adapters of the embedding, the head and norms.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from moetrain.config import ConfigError, LoraSection
from moetrain.models.rules import ADAPTER


class Adapter(NamedTuple):
    """The adapter of one weight [..., out, in]."""

    a: torch.Tensor
    """[..., rank, in]."""
    b: torch.Tensor
    """[..., out, rank]."""
    scale: float
    dropout: float = 0.0

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ``W + scale * B @ A`` in ``weight``'s dtype."""
        return weight + (self.scale * (self.b @ self.a)).to(weight.dtype)


class Adaptable(nn.Module):
    """A module that applies the adapters of its ``weights`` where it has some.

    An adapter beside the weight of any other module would change nothing, and nobody would notice.
    """

    weights: ClassVar[tuple[str, ...]] = ("weight",)
    can_drop: ClassVar[bool] = False
    """Whether it supports dropout of its adapters' inputs in training."""
    lora_scale: float | None = None
    """Scale of the adapters; None: there are none."""
    lora_dropout: float = 0.0

    def adapter(self, weight: str, dtype: torch.dtype) -> Adapter | None:
        """Return the adapter of ``weight`` in ``dtype``; None: there is none."""
        if self.lora_scale is None:
            return None
        a, b = (getattr(self, weight + half).to(dtype) for half in ADAPTER)
        return Adapter(a, b, self.lora_scale, self.lora_dropout)


def add_adapters(layers: nn.ModuleList, lora: LoraSection) -> None:
    """Add adapters without values to the modules of ``layers`` that ``lora.targets`` names.

    Raises ConfigError: a pattern matches no module, or a module does not support the dropout or
    rank.
    """
    modules = dict(adaptable(layers))
    for name in _targets(modules, lora):
        module = modules[name]
        if lora.dropout and not module.can_drop:
            problem = f"{lora.dropout}, but the inputs of {name} cannot be dropped"
            raise ConfigError("lora.dropout", f"{problem}; use 0, or other lora.targets")
        module.lora_scale = lora.scale
        module.lora_dropout = lora.dropout
        for leaf in module.weights:
            weight = module.get_parameter(leaf)
            *stack, out_dim, in_dim = weight.shape
            if stack and lora.rank % 8:
                problem = f"{lora.rank} is not a multiple of 8, which {name} needs"
                raise ConfigError("lora.rank", f"{problem}; use {-(-lora.rank // 8) * 8}")
            shapes = (*stack, lora.rank, in_dim), (*stack, out_dim, lora.rank)
            for half, shape in zip(ADAPTER, shapes, strict=True):
                module.register_parameter(leaf + half, nn.Parameter(weight.new_empty(shape)))


def adaptable(layers: nn.ModuleList) -> Iterator[tuple[str, Adaptable]]:
    """Iterate over the modules that can have adapters, with their names."""
    for name, module in layers.named_modules(prefix="layers"):
        if isinstance(module, Adaptable):
            yield name, module


def _targets(modules: Mapping[str, Adaptable], lora: LoraSection) -> list[str]:
    patterns = lora.targets
    if patterns == ("auto",):
        is_routed = any(fnmatchcase(name, "*.moe.experts") for name in modules)
        patterns = ("*.attn.*", "*.moe.experts" if is_routed else "*.mlp.*")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in modules):
            # Without numbers, to name each once.
            known = dict.fromkeys(name.partition(".")[2].partition(".")[2] for name in modules)
            problem = f"{pattern!r} matches no module; of layers.0 there are {', '.join(known)}"
            raise ConfigError("lora.targets", problem)
    return [name for name in modules if any(fnmatchcase(name, p) for p in patterns)]
