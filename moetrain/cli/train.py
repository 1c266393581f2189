"""``python -m moetrain.train``: parse the config, start the ranks or be one, say how it went.

Exit codes: 0 success, 2 a bad setting or input (one line on standard error), 1 a failed run,
143 after SIGTERM and 130 after Ctrl-C, each with a checkpoint written.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from moetrain.cli.command import one_line, reader_may_leave
from moetrain.cli.rank import pass_gate
from moetrain.config import (
    TRAIN_RECIPES,
    Config,
    ConfigError,
    LaunchedPlace,
    Recipes,
    RunFailed,
    launched_place,
    let_idle_threads_sleep,
)
from moetrain.config.help import format_help


class Program(NamedTuple):
    """A command that runs a training: what differs between one and another."""

    module: str
    """``python -m`` of it."""
    run: str
    """``MODULE:CLASS`` of its :class:`moetrain.train.run.Run`, imported when a run begins."""
    recipes: Recipes
    foreign: tuple[str, ...] = ()
    """Beginnings of names of settings that it has no use for."""
    plan: str = "moetrain.train.plan:plan_memory"
    """``MODULE:FUNCTION`` of settings and model, for a dry run: raises ConfigError for what the run
    would refuse, and says how much memory it takes."""
    inspect: str | None = None
    """The same while several processes start, without a look at devices; None: no need."""

    @staticmethod
    def find(name: str) -> Any:
        """What ``MODULE:NAME`` means."""
        module, _, key = name.partition(":")
        return getattr(import_module(module), key)

    def check(self, config: Config) -> None:
        """Raise ConfigError for a setting that would change nothing."""
        for name, origin in config.origins.items():
            if name.startswith(self.foreign) and origin.startswith("recipe "):
                problem = f"{origin.split()[1]!r} is for another command: it sets {name}, which"
                use = f"python -m {self.module} has no use for; its own is {self.recipes.default}"
                raise ConfigError("recipe", f"{problem} {use}")
            if name.startswith(self.foreign):
                problem = f"set ({origin}), but python -m {self.module} has no use for it"
                raise ConfigError(name, f"{problem}; leave it out")


TRAIN = Program("moetrain.train", "moetrain.train.trainer:Trainer", TRAIN_RECIPES, ("rl.", "jobs."))


def main(argv: Sequence[str] | None = None, program: Program = TRAIN) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit code.

    A process that a launcher started as one of several does not return from an error: it exits.
    """
    let_idle_threads_sleep()
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        with reader_may_leave():
            print(format_help(program.module, program.recipes))
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
        source, overrides = (words[0], words[1:]) if is_source else (None, words)
        config = Config.load(source, overrides, recipes=program.recipes, once=True)
        program.check(config)
        if dry_run:
            from moetrain.train.plan import plan_host  # imports torch, as all below
            from moetrain.train.setup import resolve_run

            config, arch = resolve_run(config)
            estimates = [program.find(program.plan)(config, arch), plan_host(config, arch)]
            if place is None or place.rank == 0:
                with reader_may_leave():
                    print(json.dumps(config.to_dict(), indent=2))
                print(*filter(None, estimates), sep="\n", file=sys.stderr)
            return 0
        if place is not None:
            return _fit(config, program, place)
        return _launch(config, words, program)
    except ConfigError as error:
        return _end(place, 2, one_line(f"error: {error}"))
    except Exception as error:
        if place is None:
            raise
        if place.error_file:  # a launcher watches
            from moetrain.cli.launch import CAUSE_SECONDS

            time.sleep(CAUSE_SECONDS)
        return _end(place, 1, "".join(traceback.format_exception(error)).rstrip())
    except KeyboardInterrupt:  # while loading, or a second: in a run the first stops it in order
        return _end(place, 130, "interrupted")


def _launch(config: Config, words: Sequence[str], program: Program) -> int:
    # These import torch, which --help or a misspelt setting need not wait for.
    from moetrain.parallel.processes import num_processes

    nproc, max_restarts = num_processes(config), config.launch.max_restarts
    if nproc == 1 and not max_restarts:
        return _fit(config, program, None)
    from moetrain.cli.launch import start_ranks

    def check() -> None:
        from moetrain.models.families import SHIPPED
        from moetrain.parallel.world import plan_world
        from moetrain.train.setup import prepare

        resolved = prepare(config)
        family = resolved[1].family
        if family not in SHIPPED:
            raise ConfigError(
                "launch.nproc",
                f"{nproc}, but family {family!r} was registered in this process, and those that "
                "would be started know nothing of it; leave it out, and start your script by "
                f"torchrun --nproc-per-node {nproc} SCRIPT.py",
            )
        plan_world(*resolved, nproc)
        if program.inspect is not None:
            program.find(program.inspect)(*resolved)

    return start_ranks(["-m", program.module, *words], nproc, max_restarts, check)


def _fit(config: Config, program: Program, place: LaunchedPlace | None) -> int:
    from safetensors import SafetensorError

    run = program.find(program.run)
    if place is not None and place.gate is not None:
        pass_gate(place.gate)  # the launcher has worked while we imported torch and more
    try:
        with _disk_errors_of_threads_unprinted(config.output_dir):
            run(config).fit()
    except RunFailed as failure:
        return _end(place, 1, one_line(f"failed: {failure}"))
    except (OSError, SafetensorError) as error:
        reason = _why_no_disk(error, config.output_dir)
        if reason is None:
            raise
        where = _file_of(error) or f"in output_dir {config.output_dir!r}"
        return _end(place, 1, one_line(f"failed: {reason}: {where}"))
    return 0


# The disk is full, broken, gone or not to be written to; whoever read standard output has gone.
_DISK_ERRORS = {"ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS", "ESTALE", "EACCES", "EPERM", "EPIPE"}
# safetensors has an error of its own, whose text alone holds the number.
_OS_ERROR = re.compile(r"os error (\d+)|code: (\d+)")


def _why_no_disk(error: Exception, folder: str) -> str | None:
    """What went wrong with the disk rather than with us; None: it is another error.

    Of the output folder any error is: who moves or removes it under a run meets many kinds.
    """
    number = getattr(error, "errno", None)
    if number is None and (match := _OS_ERROR.search(str(error))):
        number = int(match[1] or match[2])
    if number is None:
        return None
    is_ours = Path(folder).absolute() in Path(_file_of(error)).absolute().parents
    return os.strerror(number) if is_ours or errno.errorcode.get(number) in _DISK_ERRORS else None


def _file_of(error: Exception) -> str:
    """The file that ``error`` names; empty: none, or a descriptor."""
    name = getattr(error, "filename", None)
    return os.fsdecode(name) if isinstance(name, (str, bytes)) else ""


@contextmanager
def _disk_errors_of_threads_unprinted(folder: str) -> Iterator[None]:
    """TensorBoard writes in a thread, and raises what that met again where the run next writes."""
    before = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        error = failure.exc_value
        if not isinstance(error, Exception) or _why_no_disk(error, folder) is None:
            before(failure)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before


def _end(place: LaunchedPlace | None, code: int, reason: str) -> int:
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


def _is_first_to_fail(place: LaunchedPlace) -> bool:
    """Whether no rank of this machine failed before: the others fail because it did, or alike.

    Where no launcher of torch gave the ranks a folder (srun), every one reports.
    """
    if not place.error_file:
        return True
    from moetrain.cli.launch import failure_mark

    try:
        failure_mark(place.error_file).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
