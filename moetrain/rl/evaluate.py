"""What a policy can do: its reward on tasks that are held out, and what it says, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from moetrain.data.tokenizer import Tokenizer
from moetrain.rl.trajectory import Trajectory

SHOWN = 8
"""Trajectories written out at each evaluation."""


def figures(trajectories: Sequence[Trajectory], prefix: str = "") -> dict[str, float]:
    """Means over ``trajectories``, of which there is one at least; a failed one has no reward.

    ``solved`` is the share that has the full reward of 1.
    """
    number = len(trajectories)
    rewards = [0.0 if t.fault else t.reward for t in trajectories]
    return {
        f"{prefix}reward": sum(rewards) / number,
        f"{prefix}solved": sum(reward >= 1 for reward in rewards) / number,
        f"{prefix}length": sum(t.num_written for t in trajectories) / number,
        f"{prefix}overlong": sum(t.is_overlong for t in trajectories) / number,
    }


def write_completions(trajectories: Iterable[Trajectory], tokenizer: Tokenizer, file: Path) -> None:
    """The first few as readable text; what the policy has written is in double brackets."""
    parts = []
    for t in list(trajectories)[:SHOWN]:
        said = []
        for acts, run in groupby(zip(t.is_action, t.tokens, strict=True), lambda pair: pair[0]):
            text = tokenizer.decode([token for _, token in run])
            said.append(f"[[{text}]]" if acts else text)
        ending = t.fault or ("cut off" if t.is_overlong else "ended")
        parts.append(f"--- task {t.task}, reward {t.reward:g}, {ending}\n{''.join(said)}\n")
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(parts), "utf-8")
