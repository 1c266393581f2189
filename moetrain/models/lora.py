"""Adapters: two small matrices beside a weight, which alone are trained (LoRA, arXiv 2106.09685).

    y = x @ W^T + scale * (x @ A^T) @ B^T        A [rank, in], B [out, rank]

An adapter is two more parameters of the module that has the weight, called as the weight is and
``_lora_a``, ``_lora_b``. The rest follows from that: their rules from the weight's
(:mod:`moetrain.models.rules`), and sharding, optimizer state, checkpoints and weight updates from
their being parameters. Stacked experts have stacked adapters, A [E, rank, in]; an expert's gate and
up, which are one weight, thereby share A.

Which modules can have adapters, they say themselves (:class:`Adaptable`), since they must use them:
one beside a weight that is read in another way would change nothing, and nobody would notice.

Left out on purpose: adapters of the embedding, the head and norms.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from moetrain.config import ConfigError, LoraSection
from moetrain.models.rules import ADAPTER


class Adapter(NamedTuple):
    """What is beside one weight [..., out, in]."""

    a: torch.Tensor
    """[..., rank, in]."""
    b: torch.Tensor
    """[..., out, rank]."""
    scale: float
    dropout: float = 0.0

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """``W + scale * B @ A``, in ``weight``'s dtype."""
        return weight + (self.scale * (self.b @ self.a)).to(weight.dtype)


class Adaptable(nn.Module):
    """A module that uses the adapters of its ``weights`` wherever there are some."""

    weights: ClassVar[tuple[str, ...]] = ("weight",)
    can_drop: ClassVar[bool] = False
    """Whether it drops some of what its adapters get, while gradients are made."""
    lora_scale: float | None = None
    """None: there are no adapters."""
    lora_dropout: float = 0.0

    def adapter(self, weight: str, dtype: torch.dtype) -> Adapter | None:
        """That of ``weight``, as it is used."""
        if self.lora_scale is None:
            return None
        a, b = (getattr(self, weight + half).to(dtype) for half in ADAPTER)
        return Adapter(a, b, self.lora_scale, self.lora_dropout)


def add_adapters(layers: nn.ModuleList, lora: LoraSection) -> None:
    """Give those modules of a model's ``layers`` that ``lora.targets`` names adapters (no values).

    Raises:
        ConfigError: a pattern that matches no module, or what a module of those cannot have.
    """
    modules = dict(adaptable(layers))
    for name in _targets(modules, lora):
        module = modules[name]
        if lora.dropout and not module.can_drop:
            problem = f"{lora.dropout}, but of what {name} gets nothing can be dropped"
            raise ConfigError("lora.dropout", f"{problem}; use 0, or other lora.targets")
        module.lora_scale, module.lora_dropout = lora.scale, lora.dropout
        for leaf in module.weights:
            weight = module.get_parameter(leaf)
            *stack, out_dim, in_dim = weight.shape
            if stack and lora.rank % 8:
                raise ConfigError(
                    "lora.rank", f"{lora.rank} is not a multiple of 8, which {name} needs"
                )
            shapes = (*stack, lora.rank, in_dim), (*stack, out_dim, lora.rank)
            for half, shape in zip(ADAPTER, shapes, strict=True):
                module.register_parameter(leaf + half, nn.Parameter(weight.new_empty(shape)))


@contextmanager
def own_draws(key: str, device: torch.device) -> Iterator[None]:
    """Meanwhile random numbers are others for every ``key`` and call. They follow from torch's
    state, of which a call draws one: what goes on from a state that was noted has the same ones."""
    call = int(torch.randint(2**31, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(zlib.crc32(f"{key}.{call}".encode()))
        yield


class Merged(NamedTuple):
    """An adapter that is in its weight for now."""

    module: Adaptable
    weight: str
    halves: tuple[nn.Parameter, nn.Parameter]
    scale: float


@torch.no_grad()
def merge(layers: nn.ModuleList) -> list[Merged]:
    """Let weights be what they and their adapters make together, and have no adapters.

    For a model that has its parameters whole; what it gives for :func:`unmerge` holds the adapters.
    """
    merged: list[Merged] = []
    for _, module in adaptable(layers):
        if module.lora_scale is None:
            continue
        for leaf in module.weights:
            weight = module.get_parameter(leaf)
            a, b = (module.get_parameter(leaf + half) for half in ADAPTER)
            weight.copy_(Adapter(a.float(), b.float(), module.lora_scale).merged(weight.float()))
            merged.append(Merged(module, leaf, (a, b), module.lora_scale))
            for half in ADAPTER:
                delattr(module, leaf + half)
        module.lora_scale = None
    return merged


@torch.no_grad()
def unmerge(merged: Sequence[Merged]) -> None:
    """Inverse of :func:`merge`, up to the rounding of weights in their dtype."""
    for module, leaf, (a, b), scale in merged:
        weight = module.get_parameter(leaf)
        weight.copy_(Adapter(a.float(), b.float(), -scale).merged(weight.float()))
        for half, parameter in zip(ADAPTER, (a, b), strict=True):
            module.register_parameter(leaf + half, parameter)
        module.lora_scale = scale


def adaptable(layers: nn.ModuleList) -> Iterator[tuple[str, Adaptable]]:
    """Every module that may have adapters, by name."""
    for name, module in layers.named_modules(prefix="layers"):
        if isinstance(module, Adaptable):
            yield name, module


def _targets(modules: Mapping[str, Adaptable], lora: LoraSection) -> list[str]:
    """The names of those that ``lora`` is for."""
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
