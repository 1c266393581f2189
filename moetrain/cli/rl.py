"""``python -m moetrain.rl``: as ``python -m moetrain.train``, for reinforcement learning.

With no arguments: a toy that learns to sort digits on two CPU cores within minutes. Exit codes are
those of :mod:`moetrain.train`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from moetrain.cli.train import Program, main
from moetrain.config import RL_RECIPES

FOREIGN = ("data.source", "data.path", "data.eval", "data.packing", "data.num_documents")
FOREIGN += ("data.text_field", "train.eval_rows", "train.sample", "jobs.")
RL = Program(
    "moetrain.rl",
    "moetrain.rl.trainer:RlTrainer",
    RL_RECIPES,
    FOREIGN,
    plan="moetrain.rl.setup:plan",
    inspect="moetrain.rl.setup:inspect",
)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit code."""
    return main(argv, RL)


if __name__ == "__main__":
    sys.exit(run())
