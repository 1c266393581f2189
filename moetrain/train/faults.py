"""Silent faults: numbers that are not finite, and ranks that compute wrong bits.

A step whose loss or gradient norm is not finite changes no weight. So with ``log.find_nan`` its
micro-batches can run through the same weights once more, without the compiler, while hooks check
each module's results and their gradients. The fault arose between the last finite tensor and the
first one that is not finite. Left out on purpose: tensors within a module, such as a kernel's.

Ranks that hold the same weights update them with the same sums of gradients. So their weights must
have the same bits, which ``train.compare_replicas`` checks. If bits differ, a machine is faulty.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from moetrain.config import logger
from moetrain.config.sources import RunFailed
from moetrain.models.transformer import Transformer
from moetrain.parallel.apply import checksum
from moetrain.parallel.fsdp.fsdp import FSDP
from moetrain.parallel.world import World
from moetrain.train.objectives import Objective

_Note = tuple[tuple[int, float], str, torch.Tensor]
"""A tensor's (order, name, 0-d bool: it is finite). ``order`` is (phase, block), and the smallest
order over all pipeline ranks is the first in time. The phases are 0 weights, 1 forward, 2 backward
and 3 gradients of weights. A backward goes from the last block to the first, so its block numbers
are negated."""


class NanFinder:
    """Looks for the source of a step that is not finite (``log.find_nan``).

    Attributes:
        passes: for each pass since the last step, its batches, its objective and the state of
            torch's random numbers when it began, so that it can be computed again.
    """

    def __init__(self, model: Transformer, fsdp: FSDP, world: World) -> None:
        self.model, self.fsdp, self.world = model, fsdp, world
        self.passes: list[tuple[Sequence[Any], Objective[Any], torch.Tensor]] = []

    def note(self, batches: Sequence[Any], objective: Objective[Any]) -> None:
        """Remember a pass that begins now."""
        self.passes.append((batches, objective, torch.get_rng_state()))

    def clear(self) -> None:
        """Forget the passes of a step that is over."""
        self.passes = []

    def report(self, learn: Callable[[Sequence[Any], Objective[Any]], object]) -> None:
        """Compute the step's gradients again, and log the first tensor that is not finite.

        Collective. Waits for the device. ``learn`` computes the gradients of a pass.
        """
        where = first_not_finite(self.model, self.fsdp, self.world, lambda: self.learn_again(learn))
        said = f"the first is {where}" if where else "when computed again, all are finite"
        logger.warning("log.find_nan: a step has tensors that are not finite: %s", said)

    def learn_again(self, learn: Callable[[Sequence[Any], Objective[Any]], object]) -> None:
        """Run all passes again, each with the random numbers that it had."""
        with torch.random.fork_rng([]):
            for batches, objective, state in self.passes:
                torch.set_rng_state(state)
                learn(batches, objective)


def first_not_finite(
    model: Transformer, fsdp: FSDP, world: World, learn: Callable[[], None]
) -> str | None:
    """Describe the first tensor that is not finite, and name its rank.

    Collective. Waits for the device. Every rank returns the same words. None: all tensors are
    finite.

    Args:
        learn: computes the gradients of the step again.
    """
    fsdp.settle()
    notes: list[_Note] = []
    for name, member in fsdp.members.items():
        notes.append(((0, 0), f"the weight {name}", _is_finite(member.read())))
    with _watched(model, notes), torch.compiler.set_stance("force_eager"):
        learn()
    fsdp.gradient_norm()  # completes the gradients: ``grad`` has them only afterwards
    for name, member in fsdp.members.items():
        if (gradient := member.local.grad) is not None:
            notes.append(((3, 0), f"the gradient of {name}", _is_finite(gradient)))
    bad = next((i for i, (*_, is_finite) in enumerate(notes) if not is_finite.item()), None)
    mine = None
    if bad is not None:
        place, what, _ = notes[bad]
        mine = place, bad, dist.get_rank(), what, notes[bad - 1][1]
    found = [first for first in world.gather(mine) if first is not None]
    if not found:
        return None
    *_, rank, what, before = min(found)
    what += f", after {before}" * ("output of" in what)
    return f"{what}, on rank {rank}" if world.size > 1 else what


def compare_replicas(fsdp: FSDP, world: World) -> None:
    """Compare the bits of weights that several ranks hold. Collective; waits for the device.

    Raises RunFailed on every rank if bits of a weight differ. The error names the ranks that differ
    from the majority. Without a majority, it names all ranks that hold the weight.
    """
    fsdp.settle()
    held = {name: m for name, m in fsdp.members.items() if m.layout.replicas is not None}
    sums = [checksum(member).item() for member in held.values()]
    mine = {
        name: (tuple(dist.get_process_group_ranks(member.layout.replicas)), total)
        for (name, member), total in zip(held.items(), sums, strict=True)
    }
    found = world.gather(mine)
    unlike: dict[int, set[str]] = {}
    for name, ranks in {(name, ranks) for own in found for name, (ranks, _) in own.items()}:
        sums = [found[rank][name][1] for rank in ranks]
        usual, count = Counter(sums).most_common(1)[0]
        if count < len(ranks):
            is_known = 2 * count > len(ranks)
            for rank, total in zip(ranks, sums, strict=True):
                if not is_known or total != usual:
                    unlike.setdefault(rank, set()).add(name)
    if unlike:
        said = (
            f"rank {rank} in {len(names)} weights, such as {min(names)}"
            for rank, names in sorted(unlike.items())
        )
        raise RunFailed(
            "train.compare_replicas: weights differ from the same weights of other ranks: "
            f"{'; '.join(said)}. Resume from a checkpoint before the fault, on other machines"
        )


def _is_finite(x: torch.Tensor) -> torch.Tensor:
    return x.detach().isfinite().all()


@contextmanager
def _watched(model: Transformer, notes: list[_Note]) -> Iterator[None]:
    """Note in ``notes``, in the order of time, if modules' outputs and gradients are finite."""

    def note(place: tuple[int, float], what: str, x: torch.Tensor) -> None:
        notes.append((place, what, _is_finite(x)))

    def look(name: str, module: Any, args: Any, results: Any) -> None:
        numbers = [float(part) for part in name.split(".") if part.isdigit()]
        block = numbers[0] if numbers else -1 if name == "embed" else torch.inf
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                note((1, block), what := f"the output of {name}", x)
                if x.requires_grad:
                    x.register_hook(partial(note, (2, -block), f"the gradient of {what}"))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.callback(module.register_forward_hook(partial(look, name)).remove)
        yield
