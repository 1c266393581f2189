"""``moetrain launch slurm|k8s|sky RECIPE --nodes N``: write the job of a run on several machines.

The file is a script for Slurm's sbatch, a JobSet of Kubernetes or a task of SkyPilot, made from
``templates/``. These start the ranks, by srun or torchrun, and start them again after a failure;
the run then resumes from its newest checkpoint. Settings are checked and memory is estimated before
the file is written; nothing is submitted.
"""

import json
import os
import re
import shlex
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path, PurePath

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moetrain.cli.main import Parser, command
from moetrain.cli.train import _PROGRAMS
from moetrain.config import Config, ConfigError
from moetrain.config.environment import GPUS
from moetrain.config.sources import recipe_names

_WAYS = {
    "slurm": ("sbatch", "sbatch"),
    "k8s": ("jobset.yaml", "kubectl apply -f"),
    "sky": ("sky.yaml", "sky jobs launch"),
}
"""Each way's template, whose name is the file's ending, and the command that takes the file."""
_FOLDER = "/shared"
"""Where a container has the volume that all machines see; a run's paths are relative to it."""
_OPTION = r"[a-z][a-z-]*(=[^\s\"'#\\]+)?"
_OPTIONS = (
    ("nodes", r"[1-9]\d{,4}", None, "machines"),
    ("gpus", r"[1-9]\d?", "8", "GPUs of each machine"),
    ("gpu", "|".join(GPUS), "h100", f"kind of GPU: {', '.join(GPUS)}"),
    ("restarts", r"\d{1,4}", "3", "how often all start again after a failure"),
    ("save_seconds", r"[1-9]\d{,4}", "300", "how long a run that is stopped may save"),
    ("name", r"([a-z]([-a-z0-9]{,38}[a-z0-9])?)?", "", "of the job, up to 40 of a-z, 0-9 and -"),
    ("file", ".*", "", "to write; default NAME.sbatch, NAME.jobset.yaml or NAME.sky.yaml"),
)
_IN_CONTAINERS = (
    ("image", r"\S+", None, "k8s, sky: container image that has moetrain"),
    ("volume", "[a-z0-9][-.a-z0-9]*", None, f"k8s, sky: volume of all machines, seen as {_FOLDER}"),
)
_OF_SLURM = (("sbatch", f"({_OPTION}( {_OPTION})*)?", "", "slurm: more options, 'partition=gpu'"),)
"""Options by name: what they may be, default (None: there is none) and meaning."""


@command
def main(argv: Sequence[str] | None) -> None:
    given, words = _parse(sys.argv[1:] if argv is None else argv)
    template, submit = _WAYS[given.way]
    config = Config.load(given.recipe, words, once=True)
    _PROGRAMS["train"].check(config)
    _check(config, in_container=given.way != "slurm")
    own = re.sub(r"[^a-z0-9]+", "-", PurePath(config.output_dir).name.lower())
    given.name = given.name or f"moetrain-{own}"[:40].rstrip("-")
    print(_estimate(given, words), file=sys.stderr)
    filters = {"shell": _shell, "yaml": _yaml}
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= filters
    is_recipe = given.recipe in recipe_names()
    settings = None if is_recipe else Path(given.recipe).read_text("utf-8-sig")
    facts = {"words": words, "settings": settings, "folder": _FOLDER, "python": sys.executable}
    text = environment.get_template(template).render(vars(given) | facts) + "\n"
    path = Path(given.file or f"{given.name}.{template}")
    if given.dry_run:
        print(text, end="")
        return
    try:
        with path.open("w" if given.overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        problem = f"{str(path)!r}: {error.strerror}; give another by --file"
        raise ConfigError("file", problem + ", or --overwrite" * path.is_file()) from None
    print(f"wrote {path}; this starts the run: {submit} {shlex.quote(str(path))}")


def _parse(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    parser = Parser("launch", __doc__)
    parser.prog = "moetrain launch"
    parser.usage = "%(prog)s {slurm,k8s,sky} RECIPE --nodes N [--gpus G] [--section.key value ...]"
    parser.add_argument("way", choices=list(_WAYS))
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe, or a TOML file of settings")
    parser.add_argument("--dry_run", action="store_true", help="print the file, and write none")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    own = {"slurm": _OF_SLURM, "k8s": _IN_CONTAINERS, "sky": _IN_CONTAINERS}
    more = own.get(next(iter(argv), ""), _IN_CONTAINERS + _OF_SLURM)  # all of them for --help
    for name, form, default, meaning in _OPTIONS + more:
        form, told = _form(form, meaning), meaning + f" (default {default})" * bool(default)
        need = default is None
        parser.add_argument(f"--{name}", type=form, default=default, required=need, help=told)
    return parser.parse_known_args(argv)


def _form(pattern: str, meaning: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ArgumentTypeError(f"{text!r} cannot be: {meaning} (as {pattern})")
        return text

    return read


def _check(config: Config, *, in_container: bool) -> None:
    """Raise ConfigError for a setting that such a job cannot have."""
    for name, needed in (("launch.max_restarts", 0), ("checkpoint.resume", "auto")):
        if (value := attrgetter(name)(config)) != needed:
            problem = "the job starts again by --restarts, each time from its newest checkpoint"
            raise ConfigError(name, f"{value!r}: {problem}; leave it out")
    outside = [name for name, origin in config.origins.items() if origin == "environment"]
    if in_container and outside:
        problem = "set in this environment, which a container does not have; give it as --"
        raise ConfigError(outside[0], problem + outside[0])
    folder = PurePath(_FOLDER, config.output_dir)
    if in_container and (".." in folder.parts or not folder.is_relative_to(_FOLDER)):
        problem = f"containers share {_FOLDER} alone; give a path below it, or a relative one"
        raise ConfigError("output_dir", f"{config.output_dir!r}: {problem}")


def _estimate(given: Namespace, words: Sequence[str]) -> str:
    """Describe the memory that the run takes; raises ConfigError for a layout that cannot be."""
    from moetrain.train.plan import plan_memory  # imports torch, which --help need not wait for
    from moetrain.train.setup import resolve_run

    gpus = f"--launch.gpus={int(given.nodes) * int(given.gpus)}", f"--launch.gpu={given.gpu}"
    config = Config.load(given.recipe, [*words, *gpus], once=True)
    # A container may have other files than this machine.
    return plan_memory(*resolve_run(config, needs_weights=given.way == "slurm"))


def _shell(word: str) -> str:
    """Quote ``word`` for bash, on one line whatever is in it."""
    if word.isprintable():
        return shlex.quote(word)
    return (
        "$'" + "".join(c if c.isprintable() and c not in "'\\" else _bytes(c) for c in word) + "'"
    )


def _bytes(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(text))


def _yaml(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub(r"[^ -~]", lambda match: f"\\U{ord(match[0]):08x}", quoted)


if __name__ == "__main__":
    sys.exit(main())
