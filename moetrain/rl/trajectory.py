"""Trajectories: what the policy and an environment have said to each other, token by token.

A trajectory that is under way when a checkpoint is written is its tokens and how far it has come:
a new episode is told the same actions again, and the policy goes on from the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from moetrain.rl.rows import Sample


@dataclass(eq=False)
class Trajectory:
    """One attempt at one task."""

    group: int
    """Number of the prompt in the run; of one that is held out, below 0."""
    member: int
    """Which of the group's attempts."""
    task: int
    seed: int
    """Of its sampling."""
    temperature: float
    reward: float = 0.0
    answers: int = 0
    """How often the environment has answered, the prompt among them."""
    actions: list[tuple[int, int]] = field(default_factory=list)
    """From where to where in ``tokens`` the policy's turns lie."""
    is_over: bool = False
    is_overlong: bool = False
    """It was cut off: at ``rl.max_tokens``, ``rl.max_turns`` or the end of a row."""
    fault: str | None = None
    """Why it failed, in a word; None: it did not."""
    detail: str = ""
    """And in a line."""
    tokens: list[int] = field(default_factory=list)
    is_action: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    routes: np.ndarray | None = None
    """int32 [tokens read in the last turn, MoE layers, K]; None: not asked for."""

    def read(self, tokens: Sequence[int]) -> None:
        """Add what the environment says."""
        self._extend(tokens, False, [0.0] * len(tokens), [-1] * len(tokens))

    def write(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Add what the policy has chosen."""
        self._extend(tokens, True, logprobs, versions)

    def _extend(
        self,
        tokens: Sequence[int],
        acts: bool,
        logprobs: Sequence[float],
        versions: Sequence[int],
    ) -> None:
        self.tokens += tokens
        self.is_action += [acts] * len(tokens)
        self.logprobs += logprobs
        self.versions += versions

    @property
    def num_written(self) -> int:
        """Tokens that the policy has chosen."""
        return sum(self.is_action)

    @property
    def turn_start(self) -> int:
        """Where the policy's turn that is under way begins: behind what it was told last."""
        start = len(self.tokens)
        stop = self.actions[-1][1] if self.actions else 0
        while start > stop and self.is_action[start - 1]:
            start -= 1
        return start

    def sample(self, advantage: float) -> Sample:
        """What is trained of it."""
        return Sample(
            np.array(self.tokens, np.int64),
            np.array(self.is_action, bool),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int64),
            advantage,
            self.group,
            self.routes,
        )


_TENSORS = {
    "tokens": torch.int64,
    "is_action": torch.bool,
    "logprobs": torch.float64,
    "versions": torch.int64,
}


def to_state(
    trajectories: Iterable[Trajectory],
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """What a checkpoint keeps of them: fields as JSON, and everything that is per token."""
    rows = [asdict(t) for t in trajectories]
    routes = [row.pop("routes") for row in rows]
    tensors = {
        f"routes.{i}": torch.from_numpy(read) for i, read in enumerate(routes) if read is not None
    }
    tensors |= {
        name: torch.tensor([value for row in rows for value in row[name]], dtype=dtype)
        for name, dtype in _TENSORS.items()
    }
    for row in rows:
        row["length"] = len(row["tokens"])
        for name in _TENSORS:
            del row[name]
    return rows, tensors


def from_state(
    rows: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]
) -> list[Trajectory]:
    """Inverse of :func:`to_state`."""
    found, start = [], 0
    for i, row in enumerate(rows):
        fields: dict[str, Any] = dict(row)
        if f"routes.{i}" in tensors:
            fields["routes"] = tensors[f"routes.{i}"].numpy()
        stop = start + fields.pop("length")
        fields["actions"] = [tuple(action) for action in fields["actions"]]
        fields |= {name: tensors[name][start:stop].tolist() for name in _TENSORS}
        found.append(Trajectory(**fields))
        start = stop
    return found
