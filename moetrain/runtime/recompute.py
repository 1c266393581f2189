"""Blocks that run again in the backward, except for the ops whose results are kept.

Legend: B batch, S sequence, D model width.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from moetrain.config.compute import SavedName
from moetrain.runtime.backend import saved_ops

_R = TypeVar("_R")


def recomputed(
    block: nn.Module,
    x_BSD: torch.Tensor,
    context: object,
    *,
    whole: Collection[nn.Module],
    draws: bool,
) -> Any:
    """Run the block; the backward runs it again, with the parameters that it has now.

    Args:
        whole: the blocks that the backward runs again; any other block runs once.
        draws: True: the block draws random numbers, and must draw the same ones in the backward.
    """
    if block not in whole:
        return block(x_BSD, context)
    run = _with_current_parameters(block, block)
    return checkpoint(run, x_BSD, context, use_reentrant=False, preserve_rng_state=draws)


# The results of routing are always kept. If experts were chosen again, the choice could differ,
# since code that is fused differently rounds differently. Rows that were sent to experts would then
# not match their indices.
def _policy(
    ops: frozenset[str], ctx: object, op: OpOverload, *args: object, **kwargs: object
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() in ops else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(names: Sequence[SavedName]) -> Any:
    return create_selective_checkpoint_contexts(partial(_policy, saved_ops(names)))


def forward_keeping(names: Sequence[SavedName], draws: bool) -> Callable[..., Any]:
    """Return a forward for all blocks that recomputes everything but the ops of ``names``.

    ``draws`` is as in :func:`recomputed`.
    """
    contexts = partial(_contexts, names)
    # The compiler's cache distinguishes choices of names by this text.
    contexts.cache_hash = repr(sorted(saved_ops(names)))  # pyright: ignore[reportAttributeAccessIssue]

    def forward(block: nn.Module, *inputs: object) -> Any:
        run = partial(type(block).forward, block)
        if not torch.compiler.is_compiling():  # in a graph parameters are inputs
            run = _with_current_parameters(block, run)
        return checkpoint(
            run, *inputs, use_reentrant=False, preserve_rng_state=draws, context_fn=contexts
        )

    return forward


def _with_current_parameters(block: nn.Module, run: Callable[..., _R]) -> Callable[..., _R]:
    """Return ``run`` with the parameters that ``block`` has now.

    The backward calls it when the block holds its shards again.
    """
    now = dict(block.named_parameters())

    def run_with_them(*inputs: object) -> _R:
        with _reparametrize_module(block, {**now}):  # a copy, since it is written to
            return run(*inputs)

    return run_with_them
