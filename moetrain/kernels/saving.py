"""Which results are worth their memory until the backward, said where each op is defined.

``activation.save`` names groups of ops. An op joins one where it is made, so that recomputation
(:mod:`moetrain.models.transformer`) knows the ops of kernels and of ``parallel`` without naming
them. A group may have none: ``dispatch`` in a process that has imported nothing to exchange tokens
by, where no such op can run.
"""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch

from moetrain.config import SavedName

_OPS: dict[str, set[str]] = {name: set() for name in (*get_args(SavedName), "routing")}


def worth_saving(name: SavedName | Literal["routing"], *ops: Any) -> None:
    """Selective recomputation keeps what ``ops`` give if asked for ``name``; ``routing`` always.

    Each is ``torch.ops.namespace.name.overload``, or a higher-order one. Of an op with several
    results, all are meant.
    """
    _OPS[name].update(op.name() for op in ops)


def saved_ops(names: Iterable[SavedName]) -> frozenset[str]:
    """Names of the ops, as ``op.name()`` has them, that ``names`` and routing stand for."""
    return frozenset(_OPS["routing"]).union(*(_OPS[name] for name in names))


# Torch's own dense products, which no file here wraps.
worth_saving("linear", torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
