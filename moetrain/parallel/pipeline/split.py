"""A stage's backward in two halves: what the stage before waits for, then what nobody does.

In autograd's graph some nodes lie on a path from a stage's outputs to what it got. The first half
runs these for the gradients that they pass along the path alone, and notes what came to each that
also uses a parameter. The second half gives it to those nodes once more, now for the parameters,
and hands each unit's gradients to :meth:`FSDP.reduce` (arXiv 2401.10241, section 2; torch's own
ops then make the half that is asked for, while an op of ours makes both and one is dropped).

Left out on purpose: graphs that are compiled or recomputed, whose halves would each be a whole
backward; and parameters used twice within a stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from moetrain.parallel.fsdp.fsdp import FSDP, UnshardFunction

Use = tuple[Any, int, Node]
"""A node that handed out a unit's parameters, which of them, and that one's own node behind it.

Autograd runs whatever leads to a node that is asked for: all of a block leads to the first, and
nothing but the parameter's use to the last.
"""


class SplitBackward:
    """The backward of ``outputs``, tensors of a graph whose leaves but parameters are ``inputs``.

    Both halves are called once, :meth:`inputs` first.
    """

    def __init__(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self._outputs, self._inputs = outputs, inputs
        self._arrived: dict[Node, tuple[torch.Tensor | None, ...]] = {}
        leaves = dict.fromkeys(get_gradient_edge(x).node for x in inputs)
        path = _between([get_gradient_edge(y).node for y in outputs], leaves)
        self._uses = {node: _parameters(node, path.keys() | leaves.keys()) for node in path}
        self._uses = {node: uses for node, uses in self._uses.items() if uses}
        users = [use for uses in self._uses.values() for use in uses]
        if len(users) != len(set(users)):
            raise RuntimeError(
                "a parameter is used twice in a pipeline stage; use another schedule"
            )

    def inputs(self, gradients: Sequence[torch.Tensor] | None) -> list[torch.Tensor | None]:
        """The gradients of the inputs, from those of the outputs; None: there is none."""

        def note(node: Node, arrived: tuple[torch.Tensor | None, ...]) -> None:
            self._arrived[node] = arrived

        hooks = [
            node.register_prehook(lambda arrived, node=node: note(node, arrived))
            for node in self._uses
        ]
        found = torch.autograd.grad(
            self._outputs, self._inputs, gradients, retain_graph=True, allow_unused=True
        )
        for hook in hooks:
            hook.remove()
        return list(found)

    def weights(self, fsdp: FSDP, *, is_last: bool) -> None:
        """Reduce the parameters' gradients; ``is_last`` as for :meth:`FSDP.backward`."""
        by_unit: dict[Any, list[Node]] = defaultdict(list)
        for node, uses in self._uses.items():
            (handed_out,) = {owner for owner, *_ in uses}
            by_unit[handed_out].append(node)
        for handed_out in sorted(by_unit, key=lambda owner: -owner.unit.index):
            fsdp.unshard(handed_out.unit)
            gradients: list[torch.Tensor | None] = [None] * len(list(handed_out.unit.members))
            for node in by_unit[handed_out]:
                for place, gradient in self._of_node(node):
                    gradients[place] = gradient
            fsdp.give(handed_out.unit, gradients, is_last=is_last)
        self._uses = {}

    def _of_node(self, node: Node) -> list[tuple[int, torch.Tensor | None]]:
        arrived = self._arrived.get(node, ())
        roots = [GradientEdge(node, i) for i, g in enumerate(arrived) if g is not None]
        if not roots:
            return []
        uses = sorted(self._uses[node], key=lambda use: use[1])
        found = torch.autograd.grad(
            roots,
            [GradientEdge(own, 0) for *_, own in uses],
            [g for g in arrived if g is not None],
            retain_graph=True,
            allow_unused=True,
        )
        return [(place, gradient) for (_, place, _), gradient in zip(uses, found, strict=True)]


def _between(roots: Sequence[Node], leaves: Iterable[Node]) -> dict[Node, None]:
    """The nodes from which one of ``leaves`` is reached, but for these, in the same order on ranks
    with the same graph."""
    parents: dict[Node, list[Node]] = defaultdict(list)
    seen, stack = set(), list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            for child, _ in node.next_functions:
                if child is not None:
                    parents[child].append(node)
                    stack.append(child)
    found: dict[Node, None] = {}
    stack = list(leaves)
    while stack:
        for parent in parents.get(stack.pop(), ()):
            if parent not in found:
                found[parent] = None
                stack.append(parent)
    return found


def _parameters(node: Node, path: set[Node]) -> set[Use]:
    """What ``node`` uses of parameters by ways that leave ``path`` at once."""
    found: set[Use] = set()
    stack = [edge for edge in node.next_functions if edge[0] is not None and edge[0] not in path]
    while stack:
        child, _ = stack.pop()
        if child is None:
            continue
        for owner, place in child.next_functions:
            if isinstance(owner, UnshardFunction._backward_cls):  # pyright: ignore[reportAttributeAccessIssue]
                found.add((owner, place, child))
            else:
                stack.append((owner, place))
    return found
