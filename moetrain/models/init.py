"""A run's model as it begins: its modules with adapters, each parameter's rule, initial values.

Every parameter has random numbers of its own, seeded by the model's seed and its name, so no value
depends on other parameters, on their order, or on how a parameter is cut. A long parameter is drawn
in blocks of rows, each seeded by its number too: a rank draws the blocks that it holds some rows
of, and never the whole.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from moetrain.config import Config
from moetrain.models.architecture import Architecture
from moetrain.models.families import find_family
from moetrain.models.lora import add_adapters
from moetrain.models.rules import Rule, narrowed, parameter_rules, train_only
from moetrain.models.transformer import Transformer, build_model


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype that ``train.dtype`` means on ``device``."""
    if config.train.dtype != "auto":
        return getattr(torch, config.train.dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def plan_model(
    config: Config, arch: Architecture, dtype: torch.dtype
) -> tuple[Transformer, dict[str, Rule]]:
    """Build the model of ``arch`` on meta as ``config`` trains it, and its parameters' rules.

    ``dtype`` is the compute dtype.

    Raises:
        ConfigError: patterns of ``lora.targets`` or ``train.freeze`` match nothing, or the model
            cannot be trained with these settings.
    """
    with torch.device("meta"):
        model = build_model(arch, kernels=config.kernels, moe=config.moe)
    if config.lora.rank:
        add_adapters(model.layers, config.lora)
    rules = parameter_rules(find_family(arch).plan(arch), model)
    drawn = {"kaiming": config.lora.init}
    rules = {n: replace(rule, init=drawn.get(rule.init, rule.init)) for n, rule in rules.items()}
    rules = train_only(rules, config.train.freeze, dtype)
    return model, narrowed(rules) if config.lora.base_dtype == "float8" else rules


_BLOCK_NUMBERS = 2**24


@torch.no_grad()
def init_weights(model: Transformer, std: float, seed: int) -> None:
    """Draw initial values in place; parameters must have storage (``to_empty``)."""
    parameters = dict(model.named_parameters())
    for name, rule in parameter_rules(find_family(model.arch).plan(model.arch), model).items():
        draw(parameters[name], name, rule, parameters[name].shape, 0, std, seed)
    for buffer in model.buffers():  # only router biases: see Router
        buffer.zero_()


def draw(
    out: torch.Tensor,
    name: str,
    rule: Rule,
    shape: Sequence[int],
    first: int,
    std: float,
    seed: int,
    columns: tuple[slice, ...] = (),
) -> None:
    """Fill ``out`` with the initial rows from ``first`` on of the parameter ``name`` of ``shape``.

    ``columns`` is the slice of the further dims that ``out`` has; empty: all of them.
    """
    if rule.init in ("ones", "zeros"):
        out.fill_(1.0 if rule.init == "ones" else 0.0)
        return
    per_block = max(1, _BLOCK_NUMBERS // max(1, math.prod(shape[1:])))
    stop = first + out.shape[0] if out.numel() else first
    for start in range(first - first % per_block, stop, per_block):
        size = min(per_block, shape[0] - start)
        generator = torch.Generator(out.device)
        # One hash of all: the CPU's generator keeps 32 bits of a seed.
        block = f".{start // per_block}" if start else ""
        generator.manual_seed(zlib.crc32(f"{seed}.{name}{block}".encode()))
        values = torch.empty(size, *shape[1:], device=out.device)
        if rule.init == "kaiming":
            values.uniform_(-(shape[-1] ** -0.5), shape[-1] ** -0.5, generator=generator)
        else:
            width = 1 / shape[-2] if rule.init == "gaussian" else std
            values.normal_(0.0, width, generator=generator)
        low, high = max(first, start), min(stop, start + size)
        out[low - first : high - first] = values[(slice(low - start, high - start), *columns)]
