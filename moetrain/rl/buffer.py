"""Which groups are under way and which are due: a window over the run's sequence of prompts.

Prompts are numbered in the order in which the run trains them. A step takes the next ones and waits
for exactly those; with ``rl.max_staleness`` s, those of s steps more are begun by then, and go on
over the updates between. So a trajectory is at most s updates old when it is trained, nothing is
thrown away for its age, and which prompts a step has depends on nobody's speed.

    s = 1, 4 prompts a step     begun before step 0 trains: 0 to 7    taken: 0 to 3
                                                    step 1: 8 to 11          4 to 7

Every rank has every :math:`W`-th prompt, whatever share of the data it trains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Window:
    """The prompts of a run: how many were taken, and how many more were begun."""

    ahead: int
    """Prompts that are begun before their step: rl.max_staleness times those of a step."""
    taken: int = 0
    begun: int = 0

    def advance(self, number: int) -> tuple[range, range]:
        """The next ``number`` prompts are due: those to be begun now, and those to be taken."""
        due = range(self.taken, self.taken + number)
        new = range(self.begun, max(self.begun, due.stop + self.ahead))
        self.taken, self.begun = due.stop, new.stop
        return new, due


def task_of(prompt: int, num_tasks: int | None, held_out: int, seed: int) -> int:
    """The task of prompt number ``prompt``: every task but the first ``held_out``, over and over.

    Finite tasks come in another order each time; those without end (None) in theirs.
    """
    if num_tasks is None:
        return held_out + prompt
    epoch, index = divmod(prompt, num_tasks - held_out)
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_tasks - held_out)
    return held_out + int(order[index])
