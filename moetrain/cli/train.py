"""``python -m moetrain.train``, ``.rl`` and ``.jobs``: load settings, start the ranks or be one.

Exit codes: 0 success, 2 a bad setting or input (one line on standard error), 1 a failed run,
143 after SIGTERM and 130 after Ctrl-C, each with a checkpoint written.
"""

import errno
import gc
import inspect
import json
import logging
import os
import re
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moetrain.cli import interrupt_by_exception, launch, quiet_imports
from moetrain.cli.main import (
    error_line,
    log_lines,
    reader_may_leave,
    version,
    without_imports,
)
from moetrain.config import Config, ConfigError, Recipes, logger
from moetrain.config.environment import (
    LaunchedPlace,
    launched_place,
    let_idle_threads_sleep,
    report_failure,
)
from moetrain.config.files import disk_remedy
from moetrain.config.help import as_typed, values_in_words
from moetrain.config.rl import RlSection
from moetrain.config.sections import CheckpointSection
from moetrain.config.sources import RankLost, RunFailed, Unused, recipe_names, shortened

if TYPE_CHECKING:
    from moetrain.models.architecture import Architecture
    from moetrain.train.callbacks import Callback


class Program(NamedTuple):
    """A command that takes settings. The fields hold all that differs between these commands."""

    name: str
    """The command is ``python -m moetrain.NAME``."""
    run: Callable[[Config], None]
    """Runs the command in one process or rank."""
    plan: Callable[[Config, "Architecture"], str]
    """A dry run calls this function with config and architecture. It returns in words how much
    memory the run takes and how its data begins, and raises ConfigError for settings that the run
    would refuse."""
    recipes: Recipes
    foreign: tuple[str, ...]
    """Beginnings of the names of settings that this command does not use."""

    def load(self, source: str | None, overrides: Sequence[str]) -> Config:
        """Load a run's settings. ``source`` may also be a preset's name.

        Raises ConfigError: as ``Config.load``, or ``data.path`` is missing.
        """
        if source is not None and not source.endswith(".toml"):
            source, own = recipe_of(source, self.recipes)
            overrides = [*own, *overrides]
        unused = Unused(self.name, self.foreign, self.recipes.default)
        config = Config.load(source, overrides, recipes=self.recipes, unused=unused, once=True)
        config.data.check()
        return config


def recipe_of(name: str, recipes: Recipes) -> tuple[str, list[str]]:
    """Return the recipe that ``name`` stands for, and the settings beside it.

    ``name`` is a recipe, or a preset, which stands for ``recipes.of_preset`` with that preset.

    Raises ConfigError: it is neither.
    """
    if name in recipe_names():
        return name, []
    from moetrain.models.families import PRESETS  # imported here: torch would delay --help

    if name in PRESETS:
        return recipes.of_preset, [f"--model.preset={name}"]
    near = get_close_matches(name, [*recipe_names(), *PRESETS], 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    known = f"{', '.join(recipe_names())}, nor a preset, such as deepseek-v3, nor a .toml file"
    raise ConfigError("recipe", f"{shortened(name)} is not one of {known}{meant}")


# Each function below imports torch late, so that --help or a misspelt setting does not wait for it.


def _train(config: Config) -> None:
    """Train, and write a sample after it unless the settings ask for none."""
    samples = config.train.sample_tokens and config.train.objective != "reward"
    callbacks: list[Callback] = []
    with quiet_imports():
        from moetrain.data.preview import cautions
        from moetrain.train.loop import Trainer

        if samples:
            from moetrain.generate.weights import Sampled

            callbacks.append(Sampled())
    trainer = Trainer(config, callbacks=callbacks)
    for line in cautions(trainer.config, trainer.model.arch.vocab_size):
        logger.info(line)
    trainer.fit()


def _plan_train(config: Config, arch: "Architecture") -> str:
    from moetrain.data.preview import cautions, preview
    from moetrain.train.estimates.plan import plan_memory

    estimate = plan_memory(config, arch)
    try:
        begins = preview(config, arch.vocab_size)
    except ConfigError as error:
        if (config.launch.gpus or config.launch.gpu) is None:
            raise
        begins = f"data is not checked, since the plan is for other machines: {error}"
    return "\n".join([*cautions(config, arch.vocab_size), begins, estimate])


def _rl(config: Config) -> None:
    with quiet_imports():
        from moetrain.rl.loop import RlTrainer

    RlTrainer(config).fit()


def _plan_rl(config: Config, arch: "Architecture") -> str:
    from moetrain.rl.setup import Setup

    return Setup.plan(config, arch)


def _serve_jobs(config: Config) -> None:
    with quiet_imports():
        from moetrain.jobs.run import JobRun

    JobRun(config).fit()


def _plan_jobs(config: Config, arch: "Architecture") -> str:
    from moetrain.jobs.run import JobRun

    return JobRun.plan(config, arch)


_NO_DATA = (
    *("data.source", "data.path", "data.mix", "data.eval", "data.split", "data.subset"),
    *("data.format", "data.text_field", "data.train_on", "data.bad_records", "data.overlong"),
    *("data.packing", "data.streaming", "data.workers", "data.num_documents"),
    *("train.objective", "train.beta", "train.mtp_weight", "train.indexer"),
    *("train.desirable_weight", "train.undesirable_weight", "train.simpo_gamma"),
    "train.reward_centering",
)
"""Settings without use in commands whose data comes from environments or clients."""
_JOBS_OF_RL = ("max_sequences", "cache_tokens")
"""Settings of ``rl`` that jobs use too, for generation."""

TRAIN = Program("train", _train, _plan_train, Recipes.TRAIN, foreign=("rl.", "jobs."))
RL = Program(
    "rl",
    _rl,
    _plan_rl,
    Recipes.RL,
    foreign=(*_NO_DATA, "train.eval_rows", "train.target_loss", "train.sample", "jobs."),
)
JOBS = Program(
    "jobs",
    _serve_jobs,
    _plan_jobs,
    Recipes.JOBS,
    foreign=(
        # Each job brings its own data, steps and learning rates.
        *(
            *_NO_DATA,
            "data.chat_template",
            "data.chat_template_kwargs",
            "train.steps",
            "train.epochs",
            "optim.lr",
        ),
        *("optim.beta", "optim.eps", "optim.weight_decay", "optim.max_grad_norm"),
        *("moe.aux_loss_coef", "moe.z_loss_coef"),  # the client alone chooses the loss
        *("train.max_bad_steps", "optim.min_lr_ratio", "optim.schedule", "optim.warmup_"),
        *("optim.decay_", "train.eval_", "train.sample_", "train.gc_interval", "log."),
        *("train.patience", "train.target_loss", "launch.hang_seconds"),
        *(f"checkpoint.{x}" for x in CheckpointSection.model_fields if x != "minutes"),
        *(f"rl.{x}" for x in RlSection.model_fields if x not in _JOBS_OF_RL),
    ),
)


def main(argv: Sequence[str] | None = None, program: Program = TRAIN) -> int:
    """Run ``program`` with the words ``argv`` (default: the process's own). Return the exit code.

    A process that a launcher started as one of several exits at an error and does not return.
    """
    let_idle_threads_sleep()
    words = list(sys.argv[1:] if argv is None else argv)
    if asked := {"--help", "-h", "--version"} & {*words}:
        with reader_may_leave():
            after = words[max(words.index(word) for word in asked) + 1 :]
            print(version() if asked == {"--version"} else _help(program, after))
        return 0
    is_dry_run = "--dry_run" in words
    words = [word for word in words if word != "--dry_run"]
    place = None
    # Garbage collection during imports would take a sixth of the start-up time. The loop over steps
    # collects by itself.
    gc.disable()
    try:
        place = launched_place()
        if place is None:
            # A rank does not do this: Python may lose an exception that is raised during an import,
            # and the launcher would wait for this rank forever.
            interrupt_by_exception()
        log_lines()
        if place is None or place.rank == 0:
            logger.setLevel(logging.INFO)
        words = without_imports(words)
        is_source = bool(words) and not words[0].startswith("--") and "=" not in words[0]
        source, overrides = (words[0], words[1:]) if is_source else (None, words)
        config = program.load(source, overrides)
        if is_dry_run:
            try:
                _plan(config, program, shows=place is None or place.rank == 0)
            except RunFailed as error:
                return _end(place, 1, error_line(f"failed: {error}"))
            return 0
        if place is not None:
            return _fit(config, program, place)
        return _launch(config, words, program)
    except ConfigError as error:
        return _end(place, 2, error_line(f"error: {error}"))
    except Exception as error:
        if place is None:
            raise
        if (reason := _why_lost(error)) is not None:
            return _end(place, 1, error_line(f"failed: {reason}"), is_lost=True)
        error.add_note(f"(rank {place.rank} of {place.world_size})")
        text = "".join(traceback.format_exception(error)).rstrip()
        return _end(place, 1, text, may_follow=True)
    except KeyboardInterrupt:  # while loading, or the second Ctrl-C of a run
        return _end(place, 130, "interrupted")
    finally:
        gc.enable()


run_rl = partial(main, program=RL)
run_jobs = partial(main, program=JOBS)


def _help(program: Program, words: Sequence[str] = ()) -> str:
    """Describe usage, recipes, and every setting with its type, default and docstring.

    If ``words`` name sections, only their settings are described.
    """
    sections = [k for k, x in Config.model_fields.items() if isinstance(x.default, BaseModel)]
    if asked := [name for name in sections if name in words]:
        return "\n".join(line for name in asked for line in _help_section(name))[1:]
    recipes = program.recipes
    with_path = recipes.of_path
    if recipes.of_chats != with_path:
        with_path = f"{recipes.of_chats} for records, else {with_path}"
    lines = [
        f"usage: python -m moetrain.{program.name} [RECIPE | PRESET | FILE.toml] "
        "[--section.key value ...]",
        "",
        f"recipes: {', '.join(recipe_names())}",
        f"default recipe: {recipes.default}; with model.path, {with_path}",
        f"the name of a preset stands for the recipe {recipes.of_preset} with that model.preset",
        "environment variables: MOETRAIN_SECTION__KEY=value; the command line overrides them",
        "--dry_run prints the resolved config as JSON, and whether it fits; "
        "train also shows how the data begins",
        "--help prints this text, --help SECTION one section of it, and --version the version",
        "--import FILE.py runs a Python file first, for example one that registers a model family",
        f"sections: {', '.join(sections)}",
        "a recipe may set other values than the defaults below",
    ]
    for key, field in Config.model_fields.items():
        lines += _help_section(key) if key in sections else ["", *_help_entry(key, field)]
    return "\n".join(lines)


def _help_section(name: str) -> list[str]:
    section = Config.model_fields[name].default
    assert isinstance(section, BaseModel)
    lines = ["", f"[{name}] {inspect.cleandoc(type(section).__doc__ or '')}"]
    for key, setting in type(section).model_fields.items():
        lines += _help_entry(f"{name}.{key}", setting)
    return lines


def _help_entry(name: str, field: FieldInfo) -> list[str]:
    kind = values_in_words(field.annotation)
    meaning = " ".join((field.description or "").split())
    head = f"  --{name} ({kind}; default: {as_typed(field.default)})"
    return [head, textwrap.fill(meaning, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)]


def _plan(config: Config, program: Program, *, shows: bool) -> None:
    """Print the resolved config as JSON, and the estimate of memory on standard error."""
    from moetrain.train.session import resolve_run  # imported here: torch would delay --help

    config, arch = resolve_run(config)
    estimate = program.plan(config, arch)
    if shows:
        with reader_may_leave():
            print(json.dumps(config.to_dict(), indent=2))
        print(estimate, file=sys.stderr)


def _launch(config: Config, words: Sequence[str], program: Program) -> int:
    """Run as the only rank, or start ``launch.nproc`` ranks. Return the exit code."""
    # Imported here: torch would delay --help and errors in settings.
    with quiet_imports():
        from moetrain.parallel.processes import num_processes

    nproc = num_processes(config)
    max_restarts = config.launch.max_restarts
    if nproc == 1 and not max_restarts:
        return _fit(config, program, None)
    families: Any = sys.modules.get("moetrain.models.families")  # loaded if any were registered
    if families is not None and families.FAMILIES.keys() - families.IN_EVERY_PROCESS:
        from moetrain.train.session import resolve_run

        if (family := resolve_run(config)[1].family) not in families.IN_EVERY_PROCESS:
            raise ConfigError(
                "launch.nproc",
                f"{nproc}, but family {family!r} was registered in this process, and the "
                "processes that it would start do not know the family; unset it, and start "
                f"your script by torchrun --nproc-per-node {nproc} SCRIPT.py",
            )
    command = ["-m", f"moetrain.{program.name}", *words]
    return launch.start_ranks(command, nproc, max_restarts)


def _fit(config: Config, program: Program, place: LaunchedPlace | None) -> int:
    """Run the command as one rank. Return the exit code; failures are printed."""
    import torch  # imported here: it would delay --help
    from safetensors import SafetensorError

    try:
        with _disk_errors_of_threads_unprinted(config.output_dir):
            program.run(config)
    except RunFailed as failure:
        is_lost = isinstance(failure, RankLost)
        return _end(place, 1, error_line(f"failed: {failure}"), is_lost=is_lost)
    except torch.OutOfMemoryError as error:
        return _end(place, 1, error_line(f"failed: {_why_no_memory(error, config, program)}"))
    except (OSError, SafetensorError) as error:
        if (reason := _why_no_disk(error, config.output_dir)) is None:
            raise
        return _end(place, 1, error_line(f"failed: {reason}"))
    return 0


_ALLOCATION = re.compile(
    r"Tried to allocate ([\d.]+ \w+)\. (GPU \d+) has a total capacity of ([\d.]+ \w+) of which "
    r"([\d.]+ \w+) is free.*?this process has ([\d.]+ \w+) memory in use",
    re.DOTALL,
)
"""The part of torch's message that has figures."""


def _in_gib(size: str) -> float:
    number, unit = size.split()
    return float(number) / {"bytes": 2**30, "KiB": 2**20, "MiB": 2**10, "GiB": 1}[unit]


def _why_no_memory(error: Exception, config: Config, program: Program) -> str:
    """Say where the device's memory ran out, who has how much of it, and which settings take
    less."""
    from moetrain.train.estimates.plan import propose_less
    from moetrain.train.session import resolve_run

    said = str(error).partition("\n")[0]
    if match := _ALLOCATION.search(str(error)):
        asked, device, whole, free, mine = match.groups()
        said = f"{asked} were asked for, {free} of {device}'s {whole} were free, and this process "
        said += f"had {mine}"
        sizes = [_in_gib(size) for size in (whole, free, mine)]
        if (others := sizes[0] - sizes[1] - sizes[2]) > 2:
            said += f"; other processes had {others:.1f} GiB of it"
    package, own = Path(__file__).parents[1], Path(__file__).parent
    files = [(Path(x.filename), x.name) for x in traceback.extract_tb(error.__traceback__)]
    ours = [(file, name) for file, name in files if {package, own} & {*file.parents} == {package}]
    where = f" in {ours[-1][0].relative_to(package)}, {ours[-1][1]}" if ours else ""
    problem = f"out of the device's memory{where}: {said}"
    try:
        advice = propose_less(*resolve_run(config), generates=program is RL)
    except ConfigError:  # the run is not one that is planned
        advice = "lower train.micro_batch_size, or recompute more (activation.policy full)"
    return f"{problem}; {advice}"


# Errors of a disk that is full, broken, gone or read-only, and of a closed standard output.
_DISK_ERRORS = {"ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS", "ESTALE", "EACCES", "EPERM", "EPIPE"}
# safetensors raises an exception of its own, and only its text has the error's number.
_OS_ERROR = re.compile(r"os error (\d+)|code: (\d+)")


def _why_no_disk(error: Exception, folder: str) -> str | None:
    """Describe a disk's error and name the file; None: the error is of another kind.

    Every error of a file in the output folder counts, since moving the folder during a run causes
    errors of many kinds.
    """
    name = getattr(error, "filename", None)  # a number if a descriptor was used
    file = os.fsdecode(name) if isinstance(name, (str, bytes)) else ""
    number = getattr(error, "errno", None)
    if number is None and (match := _OS_ERROR.search(str(error))):
        number = int(match[1] or match[2])
    is_ours = Path(folder).absolute() in Path(file).absolute().parents
    if number is None or not (is_ours or errno.errorcode.get(number) in _DISK_ERRORS):
        return None
    said = f"{os.strerror(number)}: {file or f'in output_dir {folder!r}'}"
    remedy = disk_remedy(number, "output_dir") if is_ours or not file else ""
    return f"{said}; {remedy}" if remedy else said


@contextmanager
def _disk_errors_of_threads_unprinted(folder: str) -> Generator[None]:
    """Do not print disk errors of threads.

    TensorBoard's thread passes its error on to the run, which then reports it.
    """
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


def _why_lost(error: Exception) -> str | None:
    """Return the message for an error that says that another rank has ended; None: the error is
    of another kind."""
    processes: Any = sys.modules.get("moetrain.parallel.processes")  # loaded if ranks have met
    if processes is None or not processes.is_of_lost_rank(error):
        return None
    return processes.lost(error)


def _end(
    place: LaunchedPlace | None,
    code: int,
    reason: str,
    *,
    may_follow: bool = False,
    is_lost: bool = False,
) -> int:
    """Print the failure once per job, then exit with ``code``. Without a launcher return ``code``.

    ``may_follow`` says that another rank's failure may be the cause, and ``is_lost`` that it is.
    Then only the cause is printed, if it lies on this machine and is known.
    """
    # Without one of torch's launchers (under srun) ranks share no folder, so every rank reports.
    error_file = None if place is None else place.error_file
    is_first = not error_file or launch.is_first_to_fail(
        error_file, waits=may_follow or is_lost, is_lost=is_lost
    )
    if is_first:
        print(reason, file=sys.stderr)
    if place is None:
        return code
    if error_file:
        report_failure(error_file, reason, is_first=is_first)
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit closes communicators, which can wait forever for ranks that have ended.
    os._exit(code)
