"""What a block's forward keeps for its backward: everything, its inputs alone, or a choice by name.

    none       every tensor that a gradient needs
    full       the block's inputs; the backward runs the whole block again
    selective  the inputs, the routing, and the results of the ops that joined the groups asked for
               (:mod:`moetrain.kernels.saving`); the backward runs the rest of the block again

Selective recomputation lies inside the block's forward, where ``full`` lies around it. So it is
part of what is compiled, and the compiler cuts the joint graph by it: of
an op with several results it keeps those that the backward needs. In eager mode the results of an
op are kept as a whole. The recomputed forward reads the very parameters that the forward read,
which therefore live until the block's backward, as they do without recomputation.

Routing is kept whatever the names. A choice made twice may come out differently, because compiled
code that is fused otherwise rounds otherwise, and rows that were sent must fit their indices.

Two things cannot be named: FlexAttention in eager mode on a GPU, which is compiled by itself and so
hides its op, and the ``reference`` attention, whose products are ordinary ones. Both run again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from moetrain.config import ActivationSection, SavedName
from moetrain.kernels.saving import saved_ops
from moetrain.models.layers import Context
from moetrain.models.transformer import Transformer, call


def set_recomputation(model: Transformer, activation: ActivationSection) -> None:
    """Let ``model`` keep what ``activation`` says. Comes before :func:`compile_blocks`."""
    # Then the same numbers are to be drawn again.
    draws = any(getattr(module, "lora_dropout", 0) for module in model.modules())
    is_full = activation.policy == "full"
    model.call_block = partial(_recomputed, draws=draws) if is_full else call
    if activation.policy == "selective":
        forward = _forward_keeping(activation.save, draws)
        for block in model.layers:
            block.forward = MethodType(forward, block)


def _recomputed(block: nn.Module, x_BSD: torch.Tensor, context: Context, *, draws: bool) -> Any:
    """The block's results; the backward runs it again, with the parameters it holds now."""
    run = partial(_run_holding, _held(block), block)
    return checkpoint(run, x_BSD, context, use_reentrant=False, preserve_rng_state=draws)


def _policy(ops: frozenset[str], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() in ops else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(names: Sequence[SavedName]) -> Any:
    return create_selective_checkpoint_contexts(partial(_policy, saved_ops(names)))


def _forward_keeping(names: Sequence[SavedName], draws: bool) -> Callable[..., Any]:
    """A block's forward, recomputed but for the ops of ``names``; one for all blocks."""
    contexts = partial(_contexts, names)
    # The compiler's cache must tell this from other choices of names.
    contexts.cache_hash = repr(sorted(saved_ops(names)))  # pyright: ignore[reportAttributeAccessIssue]

    def forward(block: nn.Module, *inputs: Any) -> Any:
        run = partial(type(block).forward, block)
        if not torch.compiler.is_compiling():  # there parameters are inputs of the graph
            run = partial(_run_holding, _held(block), run)
        return checkpoint(
            run, *inputs, use_reentrant=False, preserve_rng_state=draws, context_fn=contexts
        )

    return forward


_Held = list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None]]


def _held(block: nn.Module) -> _Held:
    """What every module holds as a parameter now: sharding takes it away after the forward."""
    holders = [module._parameters for module in block.modules()]
    return [(holder, name, value) for holder in holders for name, value in holder.items()]


def _run_holding(held: _Held, run: Callable[..., Any], *inputs: Any) -> Any:
    """``run(*inputs)`` while the modules hold ``held``."""
    before = [(holder, name, holder[name]) for holder, name, _ in held]
    try:
        _put(held)
        return run(*inputs)
    finally:
        _put(before)


def _put(held: _Held) -> None:
    for holder, name, value in held:
        holder[name] = value
