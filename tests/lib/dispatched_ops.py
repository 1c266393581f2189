"""The ops that torch dispatches: their number, and those that touch given tensors' memory.

A test that counts them sees work however the package comes to do it.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ops(TorchDispatchMode):
    """Counts the ops in this thread by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Touches(TorchDispatchMode):
    """Records the ops in this thread that read or write the memory of ``tensors``.

    Views, and new tensors like others, read nothing. Launches of our kernels are ops too while a
    mode watches (:func:`moetrain.runtime.backend.launch`).
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._places = {x.untyped_storage().data_ptr(): i for i, x in enumerate(tensors)}
        self.ops: list[tuple[int, str]] = []
        """The number of a tensor, and an op that touched its memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func.is_view and not _MAKES_NEW.match(func.__name__):
            given = [x for x in tree_leaves((args, kwargs)) if type(x) in _PLAIN]
            found = {self._places.get(x.untyped_storage().data_ptr(), -1) for x in given}
            self.ops += [(i, str(func)) for i in sorted(found - {-1})]
        return func(*args, **kwargs)

    @property
    def touched(self) -> set[int]:
        """The numbers of the tensors whose memory was touched."""
        return {i for i, _ in self.ops}


_MAKES_NEW = re.compile(r"new_\w+|\w+_like\.")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
