"""``moetrain launch slurm|k8s|sky [RECIPE] --nodes N``: write a job for several machines.

RECIPE is a recipe, a preset or a TOML file of settings. If none is given, the run chooses a recipe
as ``train`` does. The written file is a script for Slurm's sbatch, a JobSet of Kubernetes or a task
of SkyPilot, made from ``templates/``. The job starts the ranks by srun or torchrun, and starts them
again after a failure. The run then resumes from its newest checkpoint. This command does not submit
the job.
"""

import json
import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path, PurePath

from jinja2 import StrictUndefined, Template

from moetrain.cli.main import Parser, command
from moetrain.cli.train import TRAIN
from moetrain.config import Config, ConfigError
from moetrain.config.environment import GPUS, imported_files

_WAYS = {
    "slurm": ("sbatch", "sbatch", {"image", "volume"}),
    "k8s": ("jobset.yaml", "kubectl apply -f", {"sbatch"}),
    "sky": ("sky.yaml", "sky jobs launch", {"sbatch"}),
}
"""For each kind of job: the template, whose name is also the ending of the written file; the
command that submits the file; the options that belong to other kinds."""
_FOLDER = "/shared"
"""Mount point of the shared volume in a container; a run's paths are relative to it."""
_OPTIONS = {
    "nodes": (r"[1-9]\d{,4}", None, "number of machines"),
    "gpus": (r"[1-9]\d?", "8", "number of GPUs of each machine"),
    "gpu": ("|".join(GPUS), "h100", f"kind of GPU: {', '.join(GPUS)}"),
    "restarts": (
        r"\d{1,4}",
        "3",
        "largest number of times that the job restarts all ranks after a failure",
    ),
    "save_seconds": (r"[1-9]\d{,4}", "300", "seconds that a stopped run has to save a checkpoint"),
    "name": (
        r"([a-z]([-a-z0-9]{,38}[a-z0-9])?)?",
        "",
        "name of the job, up to 40 characters of a-z, 0-9 and -",
    ),
    "file": (".*", "", "file to write; default NAME.sbatch, NAME.jobset.yaml or NAME.sky.yaml"),
    "sbatch": (
        r"(\w[^\s\"'#\\]*( |$))*",
        "",
        "slurm: additional options of sbatch, such as 'partition=gpu time=60'",
    ),
    "image": (r"\S+", None, "k8s, sky: container image that has moetrain"),
    "volume": (
        "[a-z0-9][-.a-z0-9]*",
        None,
        f"k8s, sky: volume that all machines share, mounted at {_FOLDER}",
    ),
}
"""For each option: the pattern that its value must match, its default (None: the option must be
given) and its help text."""


@command
def main(argv: Sequence[str] | None) -> None:
    options, words = _parse(sys.argv[1:] if argv is None else argv)
    template, submit, _ = _WAYS[options.way]
    print(_estimate(options, words), file=sys.stderr)
    source = (Path(__file__).parent / "templates" / template).read_text("utf-8")
    file = options.recipe if (options.recipe or "").endswith(".toml") else None
    imports = [word for path in imported_files() for word in ("--import", str(path))]
    facts = {
        "words": [*imports, *words],
        "folder": _FOLDER,
        "python": sys.executable,
        "shell": shell_word,
    }
    facts |= {"settings": Path(file).read_text("utf-8-sig") if file else None}
    written = Template(source, undefined=StrictUndefined, trim_blocks=True)
    text = written.render(vars(options) | facts, yaml=yaml_word) + "\n"
    if options.dry_run:
        print(text, end="")
        return
    path = Path(options.file or f"{options.name}.{template}")
    try:
        with path.open("w" if options.overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        problem = f"{str(path)!r}: {error.strerror}; give another by --file"
        raise ConfigError("file", problem + ", or --overwrite" * path.is_file()) from None
    print(f"wrote {path}; this starts the run: {submit} {shlex.quote(str(path))}")


def _parse(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    parser = Parser("launch", __doc__)
    parser.prog = "moetrain launch"
    parser.usage = (
        "%(prog)s {slurm,k8s,sky} [RECIPE | PRESET | FILE.toml] --nodes N [--section.key value ...]"
    )
    parser.add_argument("way", choices=list(_WAYS))
    # Only the word right behind the kind of job is a recipe; a later word is a setting's value.
    if len(argv) > 1 and not argv[1].startswith("-"):
        parser.add_argument("recipe", metavar="RECIPE")
    parser.set_defaults(recipe=None)
    parser.add_argument(
        "--dry_run", action="store_true", help="print the job instead of writing a file"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    *_, others = _WAYS.get(argv[0] if argv else "", (set(),))
    mine = {name: option for name, option in _OPTIONS.items() if name not in others}
    for name, (_, default, meaning) in mine.items():
        meaning += f" (default {default})" * bool(default)
        parser.add_argument(f"--{name}", default=default, required=default is None, help=meaning)
    options, words = parser.parse_known_args(argv)
    for name, (form, _, meaning) in mine.items():
        if re.fullmatch(form, getattr(options, name)) is None:
            raise ConfigError(
                name,
                f"{getattr(options, name)!r} is not allowed ({meaning}); give text that matches "
                f"{form}",
            )
    return options, words


def _estimate(options: Namespace, words: Sequence[str]) -> str:
    """Check the settings, name the job, and describe the memory that the run takes."""
    # Imported here: torch would delay --help.
    from moetrain.train.estimates.plan import plan_memory
    from moetrain.train.session import resolve_run

    in_container = options.way != "slurm"
    config = TRAIN.load(options.recipe, words)
    for name in ("launch.nproc", "launch.max_restarts", "checkpoint.resume"):
        if (value := attrgetter(name)(config)) not in ("auto", attrgetter(name)(Config())):
            problem = (
                "the job itself starts the ranks, restarts them (--restarts) and lets them resume"
            )
            raise ConfigError(name, f"{value!r}: {problem}; leave it out")
    for name, origin in config.origins.items():
        if in_container and origin == "environment":
            raise ConfigError(
                name, f"set in this environment, but not in the job's; give --{name} instead"
            )
    folder = PurePath(_FOLDER, config.output_dir)
    if in_container and (".." in folder.parts or not folder.is_relative_to(_FOLDER)):
        problem = f"machines share only {_FOLDER}; give a path below it, or a relative one"
        raise ConfigError("output_dir", f"{config.output_dir!r}: {problem}")
    own = re.sub(r"[^a-z0-9]+", "-", folder.name.lower())
    options.name = options.name or f"moetrain-{own}"[:40].rstrip("-")
    gpus = f"--launch.gpus={int(options.nodes) * int(options.gpus)}", f"--launch.gpu={options.gpu}"
    if not config.is_set("launch.gpus_per_machine"):
        gpus += (f"--launch.gpus_per_machine={options.gpus}",)
    # Weights may lie where only the job's containers see them.
    planned = TRAIN.load(options.recipe, [*words, *gpus])
    return plan_memory(*resolve_run(planned, needs_weights=not in_container))


def shell_word(word: str) -> str:
    """Quote ``word`` for bash, always on one line."""
    if word.isprintable():
        return shlex.quote(word)
    # The pattern matches the quote, the backslash and everything that is not printable ASCII.
    parts = re.split(r"([^ -&(-\[\]-~]+)", word)
    parts[1::2] = ["".join(f"\\x{byte:02x}" for byte in os.fsencode(x)) for x in parts[1::2]]
    return "$'" + "".join(parts) + "'"


def yaml_word(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub(r"[^ -~]", lambda match: f"\\U{ord(match[0]):08x}", quoted)
