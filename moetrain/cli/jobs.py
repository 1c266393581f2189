"""``python -m moetrain.jobs``: fine-tune many adapters beside one model that stays loaded.

With no arguments: the service over a small model with random weights, at port 8100. Settings and
exit codes are those of :mod:`moetrain.train`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from moetrain.cli.train import Program, main
from moetrain.config import JOB_RECIPES
from moetrain.config.rl import RlSection
from moetrain.config.sections import CheckpointSection

OF_GENERATION = ("max_sequences", "cache_tokens")
FOREIGN = tuple(f"rl.{name}" for name in RlSection.model_fields if name not in OF_GENERATION)
FOREIGN += ("data.source", "data.path", "data.eval", "data.packing", "data.num_documents")
FOREIGN += ("data.text_field", "data.chat_template", "train.steps", "train.epochs", "optim.lr")
FOREIGN += ("train.max_bad_steps", "optim.min_lr_ratio", "optim.schedule", "optim.warmup_")
FOREIGN += ("optim.decay_", "train.eval_", "train.sample_", "train.gc_interval", "log.")
FOREIGN += tuple(f"checkpoint.{x}" for x in CheckpointSection.model_fields if x != "minutes")
JOBS = Program(
    "moetrain.jobs",
    "moetrain.jobs.run:JobRun",
    JOB_RECIPES,
    FOREIGN,
    plan="moetrain.jobs.run:plan",
    inspect="moetrain.jobs.run:inspect",
)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit code."""
    return main(argv, JOBS)


if __name__ == "__main__":
    sys.exit(run())
