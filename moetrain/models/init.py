"""Initial values: each parameter's by its rule, the same however it is cut.

Every parameter has random numbers of its own, seeded by ``model``'s seed and its name: no value
depends on other parameters or their order. A long parameter is drawn in blocks of rows, each seeded
by its number too, so that a rank draws those that it holds some of and never the whole.
"""

import math
import zlib
from collections.abc import Sequence

import torch

from moetrain.models.registry import find_family
from moetrain.models.rules import Rule, parameter_rules
from moetrain.models.transformer import Transformer

BLOCK_NUMBERS = 2**24


@torch.no_grad()
def init_weights(model: Transformer, std: float, seed: int) -> None:
    """Random initial values in place; parameters must have storage (``to_empty``)."""
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
    """Fill ``out`` with rows from ``first`` on of the parameter ``name`` of ``shape``.

    ``columns``: which part of the dims behind the first ``out`` has; empty: all.
    """
    if rule.init in ("ones", "zeros"):
        out.fill_(1.0 if rule.init == "ones" else 0.0)
        return
    per_block = max(1, BLOCK_NUMBERS // max(1, math.prod(shape[1:])))
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
