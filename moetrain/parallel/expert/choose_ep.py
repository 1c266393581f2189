"""Which ``parallel.ep`` is the fastest: experts gathered, or tokens sent to them (``auto``).

With ep 1 every rank gathers all experts of a block and sends no token: nothing waits for the rank
that most tokens want, and twice the bytes pass through memory. With as many as there are ranks
nobody gathers and every token travels. Of what depends on it, by rates measured on H200s of one
machine, for a block and a micro-batch, forward and backward:

    products   6 FLOPs a multiply-add (8 if recomputed) at 640 TFLOP/s, of the fullest rank
    exchange   dispatch and combine, each way, at 300 GB/s, of the fullest rank, and 0.3 ms in which
               the host waits for how many rows come
    memory     weights of the experts held: read for products, gradients written and added up; and
               where they are gathered, that and what peers read and write, at 4.26 TB/s
    exposed    gathers and reductions at 350 GB/s: what the block's products leave of them, and a
               tenth of the rest; over collectives, which take SMs, three tenths

Four H200s, 24 layers of Qwen3-30B-A3B, 20,480 tokens a micro-batch, routing as it came: ep 1, 2 and
4 took 642, 652 and 670 ms a step with copies between GPUs. This puts them in that order: 11.4, 11.5
and 13.1 ms a block.

Left out on purpose: several machines, and what memory allows (:mod:`moetrain.train.setup` asks
it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from moetrain.config import Config, ConfigError
from moetrain.config.hardware import EXCHANGE, GATHER, MEMORY, PRODUCTS
from moetrain.models.architecture import Architecture
from moetrain.parallel.fsdp.copy_engines import is_wanted

FULLEST = {1: 1.0, 2: 1.1, 4: 1.21, 8: 1.42}
"""Rows of the fullest rank over the mean, by ranks that share the experts, as balancing each layer
by itself leaves it after 150 steps on text."""
_HOST_WAIT = 0.3e-3
_HINDERS = {True: 0.1, False: 0.3}
"""Of a gather's time, what it costs although products hide it: by copy engines, by collectives."""


class EpCost(NamedTuple):
    """Milliseconds of one block and micro-batch that ``ep`` has a say in."""

    ep: int
    products: float
    exchange: float
    memory: float
    exposed: float

    @property
    def total(self) -> float:
        return sum(self[1:])

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {getattr(self, name):.1f}" for name in self._fields[1:])
        return f"ep {self.ep} {self.total:.1f} ({parts})"


def costs(config: Config, arch: Architecture, sharding_ranks: int) -> list[EpCost]:
    """Of every number of expert parallel ranks that there can be, the fastest first.

    ``sharding_ranks``: those that hold a replica of a stage, on one machine. Of a model without
    experts, and on CPUs, whose rates nobody measured: ep 1 alone.

    Raises:
        ConfigError: none goes with ``moe.dispatcher``.
    """
    can_be = [1]
    if arch.moe_layer_indices and config.train.device != "cpu":
        can_be = [n for n in FULLEST if sharding_ranks % n == 0 and arch.num_experts % n == 0]
    how = config.moe.dispatcher
    can_be = [n for n in can_be if how == "auto" or (how == "local") == (n == 1)]
    if not can_be:
        raise ConfigError(
            "parallel.ep",
            f"'auto', and none that {sharding_ranks} ranks and {arch.num_experts} experts allow "
            f"goes with moe.dispatcher {how!r}; set moe.dispatcher auto",
        )
    found = [_cost(config, arch, ep, sharding_ranks // ep) for ep in can_be]
    return sorted(found, key=lambda cost: cost.total)


def _cost(config: Config, arch: Architecture, ep: int, shards: int) -> EpCost:
    """``shards``: ranks that each have a part of an expert's parameters."""
    if not arch.moe_layer_indices:
        return EpCost(ep, 0.0, 0.0, 0.0, 0.0)
    train, full = config.train, config.activation.policy == "full"
    tokens = train.micro_batch_size * config.data.seq_len / config.parallel.tp
    expert = 3 * arch.hidden_size * arch.moe_intermediate_size
    held = arch.num_experts / ep * expert
    forwards, fullest = 2 if full else 1, FULLEST[ep]
    learns = not config.lora.rank
    work = 2 * (forwards + 1 + learns) * tokens
    products = work * arch.num_experts_per_token * expert / PRODUCTS
    reached = ep * (1 - (1 - 1 / ep) ** arch.num_experts_per_token)
    sent = tokens * reached * (1 - 1 / ep) * 2 * arch.hidden_size
    exchange = 2 * (forwards + 1) * sent / EXCHANGE + (ep > 1) * _HOST_WAIT
    gathers = 0 if shards == 1 else 2 if full or config.parallel.reshard_after_forward else 1
    # Each number of what is held: 2 bytes a product, gradients written in 2, read, added to 4 or
    # 2; of a gather written and, by peers, read; of a reduction read, written, and read again.
    kept = getattr(torch, config.optim.gradient_dtype).itemsize
    moved = 2 * (forwards + 1) + (4 + kept) * learns + 4 * gathers + 4 * learns * (shards > 1)
    travels = 2 * held * (1 - 1 / shards) * (gathers + learns) / GATHER
    layer = arch.layers()[arch.moe_layer_indices[0]]
    block = sum(part.products_per_token(config.data.seq_len) for part in layer)
    hidden = min(travels, work * block / PRODUCTS)
    exposed = travels - hidden + _HINDERS[is_wanted(config.parallel, "cuda")] * hidden
    seconds = (products * fullest, exchange * fullest, held * moved / MEMORY, exposed)
    return EpCost(ep, *(1000 * s for s in seconds))


def describe(chosen: int, found: Sequence[EpCost]) -> str:
    """The arithmetic in words."""
    return (
        f"parallel.ep auto: {chosen}; estimated ms of a block, forward and backward: "
        + "; ".join(map(str, found))
    )
