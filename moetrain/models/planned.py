"""A run's model before it has values: its modules, with adapters, and the rule of each parameter.

Everything that must know what there is, what of it trains and what it is stored in asks here.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moetrain.config import Config
from moetrain.models.architecture import Architecture
from moetrain.models.lora import add_adapters
from moetrain.models.registry import find_family
from moetrain.models.rules import Rule, narrowed, parameter_rules, train_only
from moetrain.models.transformer import Transformer, build_model


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """What ``train.dtype`` means on ``device``."""
    if config.train.dtype != "auto":
        return getattr(torch, config.train.dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def plan_model(
    config: Config, arch: Architecture, dtype: torch.dtype
) -> tuple[Transformer, dict[str, Rule]]:
    """The model of ``arch`` on meta as ``config`` trains it, and the rules of its parameters.

    Args:
        dtype: the compute dtype.

    Raises:
        ConfigError: patterns of ``lora.targets`` or ``train.freeze`` that match nothing, and what
            else cannot be trained so.
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
