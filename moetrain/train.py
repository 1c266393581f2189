"""``python -m moetrain.train``: parse the config, build the trainer, fit, say how it went.

Exit codes: 0 success, 2 a bad setting or input (one line on standard error), 1 a failed run,
143 after SIGTERM and 130 after Ctrl-C, each with a checkpoint written.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence

from moetrain.config import Config, ConfigError, format_help


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        print(format_help())
        return 0
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("moetrain").setLevel(logging.INFO)
    dry_run = "--dry_run" in words
    words = [word for word in words if word != "--dry_run"]
    is_source = bool(words) and not words[0].startswith("--") and "=" not in words[0]
    source = words.pop(0) if is_source else None
    try:
        config = Config.load(source, words)
        if dry_run:
            print(json.dumps(config.to_dict(), indent=2))
            return 0
        return _fit(config)
    except ConfigError as error:
        print(f"error: {error.field}: {' '.join(error.problem.split())}", file=sys.stderr)
        return 2


def _fit(config: Config) -> int:
    # These import torch, which --help or a misspelt setting need not wait for.
    from moetrain.run_control import RunFailed
    from moetrain.trainer import Trainer

    try:
        Trainer(config).fit()
    except RunFailed as failure:
        print(f"failed: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
