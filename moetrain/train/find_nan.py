"""Where numbers come from that are not finite (``log.find_nan``).

Such a step changes no weight. So its micro-batches can go through the same weights once more, now
without the compiler, while hooks look at what each module gives and at the gradients that come back
to it. The first tensor in time that is not finite is the source, or follows from it: the source
lies behind the tensor before it. Left out on purpose: tensors within a module, such as those of a
kernel.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from moetrain.models.transformer import Transformer
from moetrain.parallel.fsdp.fsdp import FSDP
from moetrain.parallel.world import World


def first_not_finite(
    model: Transformer, fsdp: FSDP, world: World, learn: Callable[[], None]
) -> str | None:
    """Return in words which tensor is the first that is not finite, and on which rank.

    Collective. Waits for the device. The words are the same on every rank; None: all is finite.

    Args:
        learn: computes the gradients of the step again.
    """
    notes = [(f"the weight {name}", _is_finite(m.read())) for name, m in fsdp.members.items()]
    with _watched(model, notes), torch.compiler.set_stance("force_eager"):
        learn()
    fsdp.gradient_norm()  # completes what parameters show
    for name, member in fsdp.members.items():
        if (gradient := member.local.grad) is not None:
            notes.append((f"the gradient of {name}", _is_finite(gradient)))
    bad = next((i for i, (_, is_finite) in enumerate(notes) if not is_finite.item()), None)
    mine = None if bad is None else (bad, dist.get_rank(), notes[bad][0], notes[bad - 1][0])
    found = [first for first in world.gather(mine) if first is not None]
    if not found:
        return None
    _, rank, what, before = min(found)
    what += f", behind {before}" * (" gives" in what)
    return f"{what}, on rank {rank}" if world.size > 1 else what


def _is_finite(x: torch.Tensor) -> torch.Tensor:
    return x.detach().isfinite().all()


@contextmanager
def _watched(model: Transformer, notes: list[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Note of every module's results and of their gradients whether they are finite, in time."""

    def note(what: str, x: torch.Tensor) -> None:
        notes.append((what, _is_finite(x)))

    def look(name: str, module: Any, args: Any, given: Any) -> None:
        for x in tree_leaves(given):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                note(f"what {name} gives", x)
                if x.requires_grad:
                    x.register_hook(partial(note, f"the gradient of what {name} gives"))

    hooks = [m.register_forward_hook(partial(look, n)) for n, m in model.named_modules() if n]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
