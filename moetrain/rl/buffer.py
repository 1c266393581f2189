"""Which groups are under way and which are due: a window over the run's sequence of prompts.

Prompts are numbered in the order in which the run trains them. A step takes the next ones and waits
for exactly those; with ``rl.max_staleness`` s, those of s steps more are begun by then, and go on
over the updates between. So a trajectory is at most s updates old when it is trained, nothing is
thrown away for its age, and which prompts a step has depends on nobody's speed.

    s = 1, 4 prompts a step     begun before step 0 trains: 0 to 7    taken: 0 to 3
                                                    step 1: 8 to 11          4 to 7

Of W ranks each has every W-th prompt, whatever share of the data it trains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moetrain.config import ConfigError


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


class Tasks:
    """An environment's tasks, in two parts: those that are held out, and those that are trained.

    Finite tasks are dealt out in an order that is always the same, so that neither part is the
    start of a sorted file; those that are trained come in another order each time around.
    """

    def __init__(self, num_tasks: int | None, num_held_out: int, seed: int) -> None:
        """
        Args:
            num_tasks: None: without end.
            seed: of the order of those that are trained.

        Raises:
            ConfigError: nothing would be left to train.
        """
        if num_tasks is not None and num_held_out >= num_tasks:
            raise ConfigError(
                "rl.eval_tasks",
                f"{num_held_out} of {num_tasks} tasks leave none to train; lower it",
            )
        self.num_held_out, self.seed = num_held_out, seed
        self._dealt = None if num_tasks is None else np.random.default_rng(0).permutation(num_tasks)
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def held_out(self, index: int) -> int:
        """Task ``index`` of ``num_held_out``."""
        return index if self._dealt is None else int(self._dealt[index])

    def trained(self, prompt: int) -> int:
        """The task of prompt number ``prompt``."""
        if self._dealt is None:
            return self.num_held_out + prompt
        trained = self._dealt[self.num_held_out :]
        epoch, index = divmod(prompt, len(trained))
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._epoch, self._order = epoch, generator.permutation(trained)
        return int(self._order[index])
