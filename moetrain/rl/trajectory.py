"""Trajectories: the exchange between the policy and an environment, token by token.

A checkpoint keeps the tokens of a trajectory that is under way and how far it has come: when it is
resumed, a new episode is told the same actions, and the policy goes on from the same tokens.
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
    """Number of the prompt in the run; below 0 for held-out prompts."""
    member: int
    """Number of the attempt within the group."""
    task: int
    seed: int
    """Seed of its sampling."""
    temperature: float
    reward: float = 0.0
    answers: int = 0
    """How often the environment has answered, the prompt included."""
    actions: list[tuple[int, int]] = field(default_factory=list)
    """Start and stop of each of the policy's turns in ``tokens``."""
    is_over: bool = False
    is_overlong: bool = False
    """Whether it was cut off: at ``rl.max_tokens``, ``rl.max_turns`` or the end of a row."""
    fault: str | None = None
    """Why it failed, in a word; None: it did not fail."""
    detail: str = ""
    """Why it failed, in a line."""
    tokens: list[int] = field(default_factory=list)
    is_action: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    routes: np.ndarray | None = None
    """int32 [tokens read in the last turn, MoE layers, K]; None: not asked for."""

    def read(self, tokens: Sequence[int]) -> None:
        """Append the environment's tokens."""
        self._extend(tokens, False, [0.0] * len(tokens), [-1] * len(tokens))

    def write(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Append tokens that the policy has chosen."""
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
        """The number of tokens that the policy has chosen."""
        return sum(self.is_action)

    @property
    def turn_start(self) -> int:
        """The start of the policy's turn under way, behind the environment's last tokens."""
        start = len(self.tokens)
        stop = self.actions[-1][1] if self.actions else 0
        while start > stop and self.is_action[start - 1]:
            start -= 1
        return start

    def sample(self, advantage: float) -> Sample:
        """Return the sample to train on, with one advantage for all actions."""
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
    """Return what a checkpoint keeps: fields as JSON, and per-token values as tensors."""
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
    """Rebuild the trajectories that :func:`to_state` was given."""
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
