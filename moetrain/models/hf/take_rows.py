"""An operation of weight maps: one file tensor holds rows of several parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moetrain.models.family import Piece, match


@dataclass(frozen=True)
class TakeRows:
    """Divides the rows of one file tensor among several parameters.

    The tensor consists of groups, and each of them has some rows of every one of ``ours``, in
    their order. For ours = (q, k), two rows of q and one of k in a group, and two groups, the
    tensor ``[6, D]`` is ``[q_0; q_1; k_0; q_2; q_3; k_1]``.
    """

    ours: tuple[str, ...]
    theirs: str
    rows: Callable[[Any], tuple[int, ...]]
    """Computes, from the architecture, the rows that each of ``ours`` has in a group."""

    def pieces(self, parameter: str, shape: Sequence[int], arch: Any) -> list[Piece]:
        """Return the rows that are those of ``parameter``, or none, as ``Rename``."""
        for i, ours in enumerate(self.ours):
            if (fields := match(ours, parameter)) is not None:
                each = self.rows(arch)
                own = each[i]
                before = sum(each[:i])
                group = sum(each)
                return [
                    Piece(
                        self.theirs.format(**fields),
                        parameter,
                        (slice(g * own, (g + 1) * own),),
                        (slice(g * group + before, g * group + before + own),),
                    )
                    for g in range(shape[0] // own)
                ]
        return []

    @property
    def modules(self) -> tuple[str, ...]:
        """The file's modules, with ``{layer}``."""
        return (self.theirs.rpartition(".")[0],)
