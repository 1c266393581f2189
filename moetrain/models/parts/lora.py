"""LoRA adapters (arXiv 2106.09685): two small trained matrices beside a frozen weight.

    y = x @ W^T + scale * (x @ A^T) @ B^T        A [rank, in], B [out, rank]

The module that has the weight gets two more parameters, named like it with ``_lora_a`` and
``_lora_b`` appended. Sharding, optimizer state, checkpoints and weight updates follow from that.
Stacked experts have stacked adapters, A [E, rank, in]. An expert's gate and up matrices are one
weight, so they share A. With DoRA (arXiv 2402.09353), a linear layer also has a trained parameter
m [out], named ``_lora_magnitude``: the lengths of the rows of its merged matrix. The row lengths n
before scaling get no gradient (section 4.3 of that paper):

    y = m / n * (x @ W^T + scale * (x @ A^T) @ B^T) + bias        n = |W + scale * B @ A|

Left out on purpose: adapters of the embedding, the head and norms.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from moetrain.config import ConfigError, LoraSection
from moetrain.models.rules import ADAPTER, MAGNITUDE


class Adapter(NamedTuple):
    """The adapter of one weight [..., out, in]."""

    a: torch.Tensor
    """[..., rank, in]."""
    b: torch.Tensor
    """[..., out, rank]."""
    scale: float
    dropout: float = 0.0
    magnitude: torch.Tensor | None = None
    """[out], fp32: the lengths of the merged weight's rows (DoRA); None: no DoRA."""

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ``W + scale * B @ A``, its rows scaled to length ``magnitude``, in ``weight``'s
        dtype."""
        whole = weight + (self.scale * (self.b @ self.a)).to(weight.dtype)
        if self.magnitude is None:
            return whole
        lengths = torch.linalg.vector_norm(whole.float(), dim=1)
        return whole * (self.magnitude / lengths)[:, None].to(whole.dtype)

    def factors(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ``magnitude / |W + scale * B @ A|`` [out] in fp32; the lengths have no gradient.

        A row's squared length is |w|^2 + 2 s b.(A w) + s^2 b.(A A^T) b, which needs no matrix as
        large as W.
        """
        assert self.magnitude is not None
        with torch.no_grad():
            w, a, b = weight.float(), self.a.float(), self.scale * self.b.float()
            squares = w.square().sum(1) + ((2 * (w @ a.T) + b @ (a @ a.T)) * b).sum(1)
            lengths = squares.clamp(min=0).sqrt()
        return self.magnitude / lengths


class Adaptable(nn.Module):
    """A module that applies the adapters of its ``weights``, if they have any.

    Only modules of this class get adapters, because any other module would silently ignore them.
    """

    weights: ClassVar[tuple[str, ...]] = ("weight",)
    """The names of the weights that can have adapters."""
    can_drop: ClassVar[bool] = False
    """True: the module supports dropout of its adapters' inputs in training."""
    can_scale: ClassVar[bool] = False
    """True: the module supports DoRA's magnitude vector."""
    lora_scale: float | None = None
    """Scale of the adapters; None: there are none."""
    lora_dropout: float = 0.0
    """Probability of dropout of the adapters' inputs."""

    def adapter(self, weight: str, dtype: torch.dtype) -> Adapter | None:
        """Return the adapter of ``weight`` in ``dtype``; None: there is none."""
        if self.lora_scale is None:
            return None
        a, b = (getattr(self, weight + half).to(dtype) for half in ADAPTER)
        magnitude = getattr(self, weight + MAGNITUDE, None)
        if magnitude is not None:
            magnitude = magnitude.float()
        return Adapter(a, b, self.lora_scale, self.lora_dropout, magnitude)


def add_adapters(layers: nn.ModuleList, lora: LoraSection) -> None:
    """Add uninitialised adapters to the modules of ``layers`` that ``lora.targets`` names.

    Raises ConfigError: a pattern matches no module, or a module does not support the dropout, the
    rank or DoRA.
    """
    modules = dict(adaptable(layers))
    for name in _targets(modules, lora):
        module = modules[name]
        if lora.dropout and not module.can_drop:
            problem = f"{lora.dropout}, but {name} does not support dropout of its inputs"
            raise ConfigError("lora.dropout", f"{problem}; use 0, or other lora.targets")
        if lora.use_dora and not module.can_scale:
            problem = f"yes, but {name} does not support DoRA"
            raise ConfigError("lora.use_dora", f"{problem}; set no, or other lora.targets")
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
            if lora.use_dora:
                lengths = nn.Parameter(weight.new_empty(out_dim))
                module.register_parameter(leaf + MAGNITUDE, lengths)


def adaptable(layers: nn.ModuleList) -> Iterator[tuple[str, Adaptable]]:
    """Iterate over the names and modules that can have adapters."""
    for name, module in layers.named_modules(prefix="layers"):
        if isinstance(module, Adaptable):
            yield name, module


def _targets(modules: Mapping[str, Adaptable], lora: LoraSection) -> list[str]:
    """Return the names of the modules that ``lora.targets`` matches."""
    patterns = lora.targets
    if patterns == ("auto",):
        is_routed = any(fnmatchcase(name, "*.moe.experts") for name in modules)
        # Not the gates of attention: PEFT has no place for those of some families.
        patterns = ("*.attn.w[qkvo]*", "*.moe.experts" if is_routed else "*.mlp.*")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in modules):
            # Without layers' numbers, so that each name is listed once.
            known = dict.fromkeys(name.partition(".")[2].partition(".")[2] for name in modules)
            problem = (
                f"{pattern!r} matches no module; the modules of a layer are {', '.join(known)}"
            )
            raise ConfigError("lora.targets", problem)
    return [name for name in modules if any(fnmatchcase(name, p) for p in patterns)]
