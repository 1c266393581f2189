"""Trajectories: exchanges between the policy and an environment, token by token.

A checkpoint keeps the tokens and the progress of each unfinished trajectory. When the run is
resumed, a new episode gets the same actions again, and the policy continues from the same tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
import torch

from moetrain.train.samples import Sample

_PER_TOKEN = {
    "tokens": torch.int64,
    "is_action": torch.bool,
    "logprobs": torch.float64,
    "versions": torch.int64,
}
"""Fields with a value for each token, and their dtypes in a checkpoint."""


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
    """Number of turns that the environment has taken. The prompt is the first of them."""
    actions: list[tuple[int, int]] = field(default_factory=list)
    """Start and stop of each of the policy's turns in ``tokens``."""
    is_over: bool = False
    is_overlong: bool = False
    """True: it was cut off at ``rl.max_tokens``, ``rl.max_turns`` or the end of a row."""
    fault: str | None = None
    """The kind of failure, one word, by which metrics count failures; None: no failure."""
    detail: str = ""
    """The reason of the failure in one line."""
    tokens: list[int] = field(default_factory=list)
    is_action: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Index in ``tokens`` at which each segment but the first begins. The policy reads a segment
    without the segments before it."""
    routes: np.ndarray | None = None
    """int32 [tokens, MoE layers, K]: the experts of each token up to the end of the policy's last
    turn. The last token of a segment has no entry, because the model did not read it. None: routes
    were not asked for."""

    def extend(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
    ) -> None:
        """Append tokens of the policy or, without ``logprobs``, of the environment."""
        self.tokens += tokens
        self.is_action += [logprobs is not None] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs
        self.versions += [-1] * len(tokens) if versions is None else versions

    @property
    def num_written(self) -> int:
        """Number of tokens that the policy has chosen."""
        return sum(self.is_action)

    @property
    def start(self) -> int:
        """Index in ``tokens`` at which the last segment begins."""
        return self.starts[-1] if self.starts else 0

    @property
    def turn_start(self) -> int:
        """Index in ``tokens`` at which the policy's last turn starts.

        The turn starts after the environment's last tokens. If the environment gave none, it starts
        after the policy's previous turn.
        """
        start = len(self.tokens) - self.is_action[::-1].index(False)
        return max([start, *(stop for _, stop in self.actions)])

    def keep_routes(self, routes: np.ndarray | None) -> None:
        """Replace the routes of the last segment by ``routes``; those of earlier segments stay."""
        if self.routes is not None and routes is not None and self.starts:
            routes = np.concatenate([self.routes[: self.start - len(self.starts)], routes])
        self.routes = routes

    def samples(self, advantage: float) -> list[Sample]:
        """Return a sample for each segment, all with this ``advantage``."""
        found, ends = [], [*self.starts, len(self.tokens)]
        for i, (start, stop) in enumerate(zip([0, *self.starts], ends, strict=True)):
            parts = (self.tokens, self.is_action, self.logprobs, self.versions)
            tokens, acts, logprobs, versions = (part[start:stop] for part in parts)
            routes = None if self.routes is None else self.routes[start - i : stop - i - 1]
            sample = Sample(
                tokens,
                acts,
                advantage,
                self.group,
                logprobs=logprobs,
                versions=versions,
                routes=routes,
            )
            found.append(sample)
        return found

    @staticmethod
    def to_state(
        trajectories: "Iterable[Trajectory]",
    ) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        """Return, for a checkpoint, the fields as JSON and the values of each token as tensors."""
        rows: list[dict[str, Any]]
        rows = [asdict(t) | {"length": len(t.tokens)} for t in trajectories]
        tensors = {
            name: torch.tensor([value for row in rows for value in row.pop(name)], dtype=dtype)
            for name, dtype in _PER_TOKEN.items()
        }
        for i, row in enumerate(rows):
            if (routes := row.pop("routes")) is not None:
                tensors[f"routes.{i}"] = torch.from_numpy(routes)
        return rows, tensors

    @classmethod
    def from_state(
        cls, rows: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]
    ) -> list[Self]:
        """Rebuild the trajectories that :meth:`to_state` was given."""
        found, start = [], 0
        for i, row in enumerate(rows):
            fields: dict[str, Any] = dict(row)
            stop = start + fields.pop("length")
            fields |= {name: tensors[name][start:stop].tolist() for name in _PER_TOKEN}
            fields["actions"] = [tuple(action) for action in fields["actions"]]
            if f"routes.{i}" in tensors:
                fields["routes"] = tensors[f"routes.{i}"].numpy()
            found.append(cls(**fields))
            start = stop
        return found
