"""``moetrain COMMAND`` runs each command. The code that commands share is here, too.

``moetrain train`` is the same as ``python -m moetrain.train``, and so on for the other commands.

``train``, ``rl`` and ``jobs`` take settings (:mod:`moetrain.cli.train`). The other commands take
options of their own (:class:`Parser`). A wrong setting or option raises :class:`ConfigError`:
the command prints one line to standard error, and its exit code is 2.
"""

import argparse
import atexit
import logging
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import metadata
from pkgutil import resolve_name
from typing import Any, NoReturn, TextIO

from moetrain.cli import interrupt_by_exception, interrupt_quietly
from moetrain.config import ConfigError
from moetrain.config.environment import add_import, let_idle_threads_sleep

COMMANDS = {
    "train": ("moetrain.cli.train:main", "pretrain or fine-tune a model"),
    "rl": ("moetrain.cli.train:run_rl", "train a model by reinforcement learning"),
    "jobs": ("moetrain.cli.train:run_jobs", "serve training jobs over HTTP"),
    "generate": ("moetrain.cli.generate:main", "continue a text with a model"),
    "score": ("moetrain.cli.score:main", "score answers with a reward model"),
    "serve": ("moetrain.cli.serve:main", "serve a model over HTTP in OpenAI's protocol"),
    "checkpoint": (
        "moetrain.cli.checkpoint:main",
        "inspect, verify, convert and compare checkpoints",
    ),
    "data": ("moetrain.cli.data:main", "show the rows that a run would train on"),
    "report": ("moetrain.cli.report:main", "write an HTML page with the curves of runs"),
    "translate": (
        "moetrain.cli.translate:main",
        "turn the settings of an axolotl or TRL run into a recipe",
    ),
    "launch": (
        "moetrain.cli.machines:main",
        "write a job for several machines: Slurm, Kubernetes or SkyPilot",
    ),
    "plan": (
        "moetrain.cli.plan:main",
        "list parallel layouts that fit in memory, fastest first",
    ),
}
"""For each command, its ``MODULE:FUNCTION``, imported when it is called, and its purpose."""


# ---- shared by all commands ----------------------------------------------------------------------


def version() -> str:
    """Return name and version; the name alone if the package is not installed."""
    try:
        return f"moetrain {metadata.version('moetrain')}"
    except metadata.PackageNotFoundError:
        return "moetrain"


class _ToStandardError(logging.StreamHandler[TextIO]):
    """Writes each record to what ``sys.stderr`` is at that moment: a progress bar replaces it, and
    prints the line above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


def log_lines() -> None:
    """Print what is logged, warnings and errors of all libraries, as plain lines to stderr."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[_ToStandardError()])


def error_line(text: str) -> str:
    """Join ``text`` into one line, and escape all characters that a terminal would act on."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in " ".join(text.split()))


def command(work: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Return a command that runs ``work(argv)`` and returns the exit code.

    A ConfigError prints one line and gives exit code 2. ``argv`` is a command line; None, or not
    given: the process's own. The files of its options ``--import FILE.py`` are run before ``work``,
    which gets the other words.
    """

    @wraps(work)
    def run(argv: Sequence[str] | None = None) -> int:
        let_idle_threads_sleep()
        try:
            interrupt_by_exception()
            with reader_may_leave():
                return work(without_imports(sys.argv[1:] if argv is None else argv)) or 0
            return 0  # standard output was closed early
        except ConfigError as error:
            print(error_line(f"error: {error}"), file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130

    return run


def without_imports(words: Sequence[str]) -> list[str]:
    """Run the files of ``--import``, and return the other words of a command line.

    Raises ConfigError: a file is missing, or raises.
    """
    rest, others, has_imports = list(words), list[str](), False
    while rest:
        word = rest.pop(0)
        option, has_value, name = word.partition("=")
        if option != "--import":
            others.append(word)
            continue
        if not has_value:
            if not rest:
                raise ConfigError("--import", "it has no file; give a FILE.py")
            name = rest.pop(0)
        add_import(name)
        has_imports = True
    families = sys.modules.get("moetrain.models.families")
    if has_imports and families is not None:  # else the package runs them at its import
        families.run_imported_files()
    return others


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Exit quietly when standard output is closed early (``--help | head``)."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the rest of the buffer would fail again at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(code: int) -> NoReturn:
    """Run the registered exit functions, then end the process with ``code`` at once.

    Python would go on to free a million objects, which takes most of a second. Ctrl-C here ends the
    process at once with 130, because otherwise each exit function would print a traceback.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # nohup and `&` ignore SIGINT
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]; it waits for threads
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # standard output was closed early; Python reports that
        sys.exit(code)
    os._exit(code)


class Parser(argparse.ArgumentParser):
    """The options of ``python -m moetrain.NAME``; a wrong option raises ConfigError."""

    def __init__(self, name: str, description: str | None) -> None:
        super().__init__(
            prog=f"python -m moetrain.{name}",
            description=description and description.replace("``", ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.name = name
        self.add_argument("--version", action="version", version=version())
        meaning = "Python file to run first, for example one that registers your own model family"
        self.add_argument("--import", metavar="FILE.py", help=meaning)  # done before parsing

    def add_model(self) -> None:
        """Add the options that name a model and the device it runs on."""
        self.add_argument("path", metavar="PATH", help="Hugging Face folder or hub id")
        meaning = "folder of a LoRA adapter in PEFT's format to use with the model"
        self.add_argument("--adapter", help=meaning)
        meaning = "device to run on; auto (default): cuda if there is a GPU"
        self.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help=meaning)
        meaning = (
            "dtype of weights and computation; auto (default): bfloat16 on CUDA, float32 on a CPU"
        )
        dtypes = ["auto", "bfloat16", "float32"]
        self.add_argument("--dtype", choices=dtypes, default="auto", help=meaning)
        meaning = (
            "number of tokens that speculative decoding drafts in each step, which does not change "
            "the text; 0 (default): no drafts"
        )
        self.add_argument("--draft", type=int, choices=range(9), default=0, help=meaning)
        meaning = (
            "source of drafts; block (default): the model's multi-token prediction block; ngram: "
            "n-grams of the text so far"
        )
        self.add_argument("--draft_by", choices=["block", "ngram"], default="block", help=meaning)
        meaning = (
            "content of the cache for layers with latent attention; expanded (default): keys and "
            "values, which have the bits of training; latent: latents, which take less memory"
        )
        self.add_argument(
            "--cache", choices=["expanded", "latent"], default="expanded", help=meaning
        )

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse as argparse does. Raises ConfigError: an option is given twice, of whose values
        argparse would drop the first."""
        words = list(sys.argv[1:] if args is None else args)
        own = {
            name
            for action in self._actions
            if action.nargs != 0 and not isinstance(action, argparse._AppendAction)
            for name in action.option_strings
        }
        given = Counter(word.partition("=")[0] for word in words)
        if twice := sorted(name for name in own if given[name] > 1 and name != "--import"):
            raise ConfigError(twice[0], "given twice; leave one out")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(self.name, f"{message}; see --help")


# ---- moetrain COMMAND ----------------------------------------------------------------------------


@command
def main(argv: Sequence[str] | None) -> int | None:
    name, *words = (sys.argv[1:] if argv is None else argv) or [""]
    match name:
        case "version" | "--version":
            print(version())
        case "" | "help" | "--help" | "-h":
            print("usage: moetrain COMMAND ...\n")
            print("moetrain COMMAND --help lists the options of a command.\n")
            for name, (_, meaning) in COMMANDS.items():
                print(f"  {name:12}{meaning}")
            print("  version     print the version")
        case _ if name in COMMANDS:
            interrupt_quietly()
            run = resolve_name(COMMANDS[name][0])
            interrupt_by_exception()
            return run(words)
        case _:
            problem = f"unknown command {name!r}; choose from {', '.join(COMMANDS)}, version"
            print(error_line(f"error: {problem}"), file=sys.stderr)
            return 2
    return None


def run_script() -> NoReturn:
    """Run the script ``moetrain`` and end the process."""
    leave(main())


if __name__ == "__main__":
    run_script()
