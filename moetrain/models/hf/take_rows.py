"""An operation of weight maps: one file tensor holds rows of several parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moetrain.models.architecture import Architecture
from moetrain.models.family import Piece, match


@dataclass(frozen=True)
class TakeRows:
    """Maps the rows of one file tensor to several parameters.

    The tensor consists of groups, and each group has rows of all of ``ours``, in their order. For
    ours = (q, k), two rows of q and one of k in a group, and two groups, the tensor ``[6, D]`` is
    ``[q_0; q_1; k_0; q_2; q_3; k_1]``.
    """

    ours: tuple[str, ...]
    """Names of the parameters, with ``{layer}``."""
    theirs: str
    """Name of the file tensor, with ``{layer}``."""
    rows: Callable[[Any], tuple[int, ...]]
    """Computes, from the family's architecture, the rows of each of ``ours`` in a group."""

    def pieces(
        self, parameter: str, shape: Sequence[int], arch: Architecture | None
    ) -> list[Piece]:
        """Return the pieces of ``parameter``, one for each group; none if it is another."""
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
                        place=(slice(g * own, (g + 1) * own),),
                        within=(slice(g * group + before, g * group + before + own),),
                    )
                    for g in range(shape[0] // own)
                ]
        return []

    @property
    def modules(self) -> tuple[str, ...]:
        """The file's modules, with ``{layer}``."""
        return (self.theirs.rpartition(".")[0],)
