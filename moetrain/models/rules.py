"""The plan of a model: what holds for each parameter and each part, as tables beside the code.

A family has a :class:`Plan`: shell-style patterns over dotted names, to a :class:`Rule` for
parameters and to a word for parts (what of a block, or of the model, sees activations). It is put
together of what each part says of itself (:mod:`moetrain.models.parts`). All that differs from
parameter to parameter is said there and nowhere else: how it is cut, drawn, decayed, stored,
gathered, and whether it is trained.

Styles of parameters, over tensor parallel (``expert``: expert parallel) ranks:

    replicate  one value on every rank
    partial    the same, for a bias whose results are added up over ranks: each uses its share
    colwise    rows (output features) are split
    rowwise    columns (input features) are split
    expert     experts are split

On top of that FSDP splits every parameter's first dim. Styles of parts, where ranks share tokens:

    own        computes on this rank's tokens
    all        computes on all tokens with its part of the weights; results are added up
    routed     computes on this rank's tokens, and sends them to their experts
    gather     computes on this rank's tokens; all ranks' results are gathered
    vocabulary goes through ``Transformer.vocabulary``

Matching is strict both ways: a pattern that matches nothing and a name that no pattern covers are
errors, since either is a plan that does not describe the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import nn

ParameterStyle = Literal["replicate", "partial", "colwise", "rowwise", "expert"]
PartStyle = Literal["own", "all", "routed", "gather", "vocabulary"]


@dataclass(frozen=True)
class Rule:
    """All that one parameter needs said."""

    style: ParameterStyle
    init: Literal["normal", "ones", "zeros"] = "normal"
    """normal: N(0, ``model.init_std``^2)."""
    decay: bool = True
    """Whether weight decay applies."""
    gather: torch.dtype | None = None
    """What it is gathered and used in; None: the compute dtype."""
    storage: torch.dtype = torch.float32
    """What a rank's shard is stored in; other than fp32 only if it is not trained."""
    trainable: bool = True

    def __post_init__(self) -> None:
        if self.trainable and self.storage != torch.float32:
            raise ValueError(f"a parameter stored in {self.storage} cannot be trained")


class Plan(NamedTuple):
    """Patterns for every parameter and every part of one model; the first that matches decides."""

    parameters: Mapping[str, Rule]
    parts: Mapping[str, PartStyle]


COLWISE, ROWWISE, EXPERT = Rule("colwise"), Rule("rowwise"), Rule("expert")
NORM = Rule("replicate", init="ones", decay=False)
BIAS = Rule("colwise", init="zeros", decay=False)
SHARED_BIAS = replace(BIAS, style="partial")
EMBEDDING = Rule("colwise", decay=False)
ROUTER = Rule("replicate", decay=False, gather=torch.float32)  # computed in fp32 whatever the dtype


T = TypeVar("T")


def match(patterns: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    """What ``patterns`` say of each name.

    Raises:
        ValueError: an unused pattern or an uncovered name.
    """
    unused, found, uncovered = set(patterns), {}, []
    for name in names:
        pattern = next((p for p in patterns if fnmatchcase(name, p)), None)
        if pattern is None:
            uncovered.append(name)
        else:
            found[name] = patterns[pattern]
            unused.discard(pattern)
    if uncovered:
        raise ValueError(f"plan: no pattern covers {', '.join(uncovered[:5])}")
    if unused:
        raise ValueError(f"plan: nothing matches {', '.join(sorted(unused))}")
    return found


def parameter_rules(plan: Plan, model: nn.Module) -> dict[str, Rule]:
    """The rule of every parameter of ``model``, by name; ValueError as :func:`match`."""
    return match(plan.parameters, [name for name, _ in model.named_parameters()])


def part_styles(plan: Plan, model: nn.Module) -> dict[str, PartStyle]:
    """The style of every part of ``model``, by name: what holds parameters, in blocks and beside.

    Raises:
        ValueError: as :func:`match`.
    """
    parts = []
    for name, child in model.named_children():
        found = {name: child}
        if isinstance(child, nn.ModuleList):
            blocks = child.named_children()
            found = {f"{name}.{i}.{k}": part for i, b in blocks for k, part in b.named_children()}
        parts += [name for name, part in found.items() if any(True for _ in part.parameters())]
    return match(plan.parts, parts)
