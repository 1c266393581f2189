"""The plan: which parameter is laid out how, as data beside the model.

A family exports patterns (shell-style, over dotted parameter names) and styles:

    replicate  one value on every tensor-parallel rank
    fp32       the same, and gathered in fp32: for what is computed in fp32 whatever the dtype
    colwise    rows (output features) split over tensor-parallel ranks
    rowwise    columns (input features) split over tensor-parallel ranks
    expert     experts split over expert-parallel ranks

On top of that FSDP splits every parameter's first dim; what is one value on tensor-parallel ranks,
over these ranks too. Matching is strict both ways: a pattern that matches nothing and a parameter
that no pattern covers are errors, since either is a plan that does not describe the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch.distributed.tensor import Placement, Replicate, Shard

STYLES: dict[str, Placement] = {
    "replicate": Replicate(),
    "fp32": Replicate(),
    "colwise": Shard(0),
    "rowwise": Shard(1),
    "expert": Shard(0),
}
"""Placement over the tensor-parallel (for ``expert``: expert-parallel) axis."""


def match_plan(plan: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The style of every parameter; the first pattern that matches decides.

    Raises:
        ValueError: an unused pattern, an uncovered parameter, or an unknown style.
    """
    unused, styles, uncovered = set(plan), {}, []
    for name in names:
        pattern = next((p for p in plan if fnmatchcase(name, p)), None)
        if pattern is None:
            uncovered.append(name)
        else:
            styles[name] = plan[pattern]
            unused.discard(pattern)
    if uncovered:
        raise ValueError(f"plan: no pattern covers {', '.join(uncovered[:5])}")
    if unused:
        raise ValueError(f"plan: nothing matches {', '.join(sorted(unused))}")
    if unknown := set(styles.values()) - set(STYLES):
        raise ValueError(f"plan: {sorted(unknown)[0]!r} is not one of {', '.join(STYLES)}")
    return styles
