"""``python -m moetrain.train``: parse the config, start the ranks or be one, say how it went.

Exit codes: 0 success, 2 a bad setting or input (one line on standard error), 1 a failed run,
143 after SIGTERM and 130 after Ctrl-C, each with a checkpoint written.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from moetrain.config import Config, ConfigError, Place, RunFailed, launched_place
from moetrain.config_help import format_help


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit code.

    A process that a launcher started as one of several does not return from an error: it exits.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        print(format_help())
        return 0
    dry_run = "--dry_run" in words
    words = [word for word in words if word != "--dry_run"]
    is_source = bool(words) and not words[0].startswith("--") and "=" not in words[0]
    place = None
    try:
        place = launched_place()
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
        if place is None or place.rank == 0:
            logging.getLogger("moetrain").setLevel(logging.INFO)
        config = Config.load(words[0], words[1:]) if is_source else Config.load(None, words)
        if dry_run:
            print(json.dumps(config.to_dict(), indent=2))
            return 0
        if place is not None:
            return _fit(config)
        return _launch(config, words)
    except ConfigError as error:
        return _end(place, 2, f"error: {error.field}: {' '.join(error.problem.split())}")
    except Exception as error:
        if place is None:
            raise
        return _end(place, 1, "".join(traceback.format_exception(error)).rstrip())
    except KeyboardInterrupt:  # while loading, or a second: in a run the first stops it in order
        return _end(place, 130, "interrupted")


def _launch(config: Config, words: Sequence[str]) -> int:
    # These import torch, which --help or a misspelt setting need not wait for.
    from moetrain.parallel.world import num_processes, plan_world

    nproc = num_processes(config)
    if nproc == 1:
        return _fit(config)
    from moetrain.launch import start_ranks
    from moetrain.models import resolve_architecture

    plan_world(config, resolve_architecture(config.model), nproc)  # before anything is started
    return start_ranks(["-m", "moetrain.train", *words], nproc)


def _fit(config: Config) -> int:
    from moetrain.trainer import Trainer

    try:
        Trainer(config).fit()
    except RunFailed as failure:
        return _end(launched_place(), 1, f"failed: {' '.join(str(failure).split())}")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return _end(launched_place(), 1, f"failed: {error}; make room, then start it again")
    return 0


def _end(place: Place | None, code: int, reason: str) -> int:
    """Print why a run did not succeed, once; returns ``code``, or exits where ranks are several."""
    if place is None:
        print(reason, file=sys.stderr)
        return code
    if _is_first_to_fail(place):
        print(reason, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Ending in the usual way closes communicators, which can wait for ranks that do not come.
    os._exit(code)


def _is_first_to_fail(place: Place) -> bool:
    """Whether no rank of this machine failed before: the others fail because it did, or alike.

    Where no launcher of torch gave the ranks a folder (srun), every one reports.
    """
    if not place.error_file:
        return True
    try:
        (Path(place.error_file).parent.parent / "failed").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
