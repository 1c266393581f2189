"""The environment of a process: its launcher, kinds of GPUs, caches, compilers, threads.

None of this is a setting. :mod:`moetrain.config.sources` reads the settings in environment
variables (``MOETRAIN_*``). Left out on purpose: the share of a GPU's rates that our kernels reach
(:mod:`moetrain.train.estimates.speed`).
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from moetrain.config.sources import IMPORTS, ConfigError, shortened

GIB = 2**30


class Gpu(NamedTuple):
    """Memory and rates of a kind of GPU, from the vendor's datasheet unless a field says
    otherwise."""

    memory_gib: float
    """Memory that torch reports (``total_memory``), GiB; less than the advertised size."""
    peak_flops: float
    """Dense bf16 FLOP/s."""
    memory_rate: float
    """Bytes/s of its memory."""
    link_rate: float
    """Bytes/s to other GPUs of the machine, in one direction."""
    has_fp8: bool = True
    """True: matrix products in fp8 run on it."""


GpuName = Literal["a100", "l40s", "h100", "h800", "h200", "b200"]
GPUS: dict[GpuName, Gpu] = {
    "b200": Gpu(178.3, 2250e12, 8.0e12, 900e9),
    "h200": Gpu(139.8, 989e12, 4.8e12, 450e9),
    "h100": Gpu(79.1, 989e12, 3.35e12, 450e9),  # with 80 GB, like the A100 below
    "h800": Gpu(79.1, 989e12, 3.35e12, 200e9),
    "a100": Gpu(79.1, 312e12, 2.04e12, 300e9, has_fp8=False),
    "l40s": Gpu(44.3, 362e12, 0.86e12, 32e9, has_fp8=False),  # over PCIe 4.0 x16
}
GPUS_OF_MACHINE = 8
"""Number of GPUs in a machine. Fast links connect them, and the network leads to other machines."""
NETWORK_RATE = 50e9
"""Bytes/s from a GPU to other machines, in one direction: each GPU has an adapter of 400 Gbit/s."""


class LaunchedPlace(NamedTuple):
    """The place of a process among the processes of its job."""

    rank: int
    local_rank: int
    """Rank among the processes of this machine."""
    world_size: int
    address: str
    """``host:port`` of the rendezvous."""
    error_file: str | None
    """File ``FOLDER/RANK/error.json`` in which torch's launchers want a rank's error; None: another
    launcher started the process."""
    on_machine: int | None
    """Processes on this machine; None: the launcher does not say."""
    store_is_served: bool = False
    """True: the launcher serves the store at ``address``. False: rank 0 does."""
    restarts: int = 0
    """Restarts of the ranks by the launcher so far."""
    max_restarts: int = 0
    """Most restarts that the launcher will make."""


_MOST_DIGITS = 9
"""Digits of the largest number that a launcher may give."""
_SLURM_PORTS = range(20000, 30000)  # below the ports that Linux gives to outgoing connections


def launched_place(variables: Mapping[str, str] = os.environ) -> LaunchedPlace | None:
    """Return the place of this process if torchrun, srun or moetrain started it, or None.

    Raises ConfigError: one of the launcher's variables is missing, or is not a number.
    """
    if "RANK" in variables and "WORLD_SIZE" in variables:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        host, port = _text(variables, "MASTER_ADDR"), _number(variables, "MASTER_PORT")
    # A batch script's own process has a SLURM_PROCID too, but only a step of several tasks has
    # several ranks.
    elif variables.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
        host = variables.get("MASTER_ADDR") or _first_slurm_host(variables)
        if "MASTER_PORT" in variables:
            port = _number(variables, "MASTER_PORT")
        else:  # jobs that share a machine need ports of their own
            port = _SLURM_PORTS[_number(variables, "SLURM_JOB_ID") % len(_SLURM_PORTS)]
    else:
        return None
    rank, local_rank, world_size = (_number(variables, name) for name in names)
    error_file = variables.get("TORCHELASTIC_ERROR_FILE")
    on_machine = _number(variables, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in variables else None
    # ``4(x2)`` means 4 tasks on each of two machines.
    of_tasks = re.fullmatch(r"(\d+)(\(x\d+\))?", variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counted = "LOCAL_WORLD_SIZE"
    if on_machine is None and of_tasks and names[0] == "SLURM_PROCID":
        on_machine, counted = int(of_tasks[1]), "SLURM_STEP_TASKS_PER_NODE"
    for name, value, of, count in (
        (names[0], rank, names[2], world_size),
        (names[1], local_rank, counted, on_machine),
    ):
        if count == 0:
            raise ConfigError(of, "0; give the number of processes, 1 or more")
        if count is not None and value >= count:
            raise ConfigError(name, f"{value} contradicts {of} {count}: give 0 to {count - 1}")
    is_served = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    counts = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    restarts, most = (_number(variables, name) if name in variables else 0 for name in counts)
    address = f"{host}:{port}"
    told = (error_file, on_machine, is_served, restarts, most)
    return LaunchedPlace(rank, local_rank, world_size, address, *told)


def _first_slurm_host(variables: Mapping[str, str]) -> str:
    """Return the host of rank 0: ``gpu[07-10,12]-ib,x3`` begins with ``gpu07-ib``."""
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_NODELIST", "")
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        return _text(variables, "SLURM_LAUNCH_NODE_IPADDR")
    return "".join(part or "" for part in match.groups())


def _text(variables: Mapping[str, str], name: str) -> str:
    if not variables.get(name):
        raise ConfigError(name, "not set, though other variables of the launcher are; set it")
    return variables[name]


def _number(variables: Mapping[str, str], name: str) -> int:
    text = _text(variables, name)
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        problem = f"{shortened(text)} is not a whole number of up to {_MOST_DIGITS} digits"
        raise ConfigError(name, f"{problem}; give one")
    return int(text)


def failure_mark(error_file: str) -> Path:
    """Return the path of the file that exists once a rank's failure is reported on this machine.

    ``error_file`` is that of :class:`LaunchedPlace`. The ranks of a machine share the mark.
    """
    return Path(error_file).parent.parent / "failed"


def report_failure(error_file: str, reason: str, *, is_first: bool = True) -> None:
    """Write into ``error_file`` why this rank fails.

    At the end of its output torchrun shows the reason with the earliest time, in whole seconds.
    ``is_first`` False: another rank failed first, so this one's time is a second later.
    """
    at = str(int(time.time()) + (not is_first))
    reason = reason if is_first else "another rank of this machine failed before"
    said = {"message": reason, "extraInfo": {"py_callstack": reason, "timestamp": at}}
    with suppress(OSError):  # the reason is printed, too
        Path(error_file).write_text(json.dumps({"message": said}), "utf-8")


def software() -> dict[str, str]:
    """Return the versions that all ranks must share: of torch, of moetrain, and of its code, which
    may have been edited."""
    found: dict[str, str] = {}
    for name in ("torch", "moetrain"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # moetrain runs from its folder
            found[name] = "not installed"
    package, code = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        code.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    for file in imported_files():
        code.update(file.read_bytes())
    return found | {"the code of moetrain": code.hexdigest()[:12]}


def imported_files() -> list[Path]:
    """Return the files of ``--import``, in their order; :mod:`moetrain.models.families` runs them.

    Every process of a run inherits the variable that has them.
    """
    return [Path(name) for name in os.environ.get(IMPORTS, "").split(os.pathsep) if name]


def add_import(name: str) -> None:
    """Note a file for this process and for those that it starts.

    Raises ConfigError: there is no such file.
    """
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise ConfigError("--import", f"{name!r} is not an existing file; give a FILE.py")
    if path not in imported_files():
        os.environ[IMPORTS] = os.pathsep.join(map(str, [*imported_files(), path]))


def allocator_is_set() -> bool:
    """Return whether the user has told torch how to allocate device memory."""
    return bool({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ))


def c_compiler() -> str | None:
    """Return the C compiler that Triton will find, or None."""
    named = os.environ.get("CC")
    return next(filter(None, map(shutil.which, [named] if named else ["clang", "gcc"])), None)


def one_tokenizer_thread() -> None:
    """Make this process's tokenizers use one thread: other processes use the other cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def user_cache_dir() -> Path:
    """Return moetrain's cache folder: under XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moetrain"


def let_idle_threads_sleep() -> None:
    """Make idle OpenMP threads sleep: at once if the machine is busy, else after microseconds.

    Call this before importing torch, which reads these variables. Variables that are set already
    stay as they are. By default idle threads spin for a millisecond and occupy cores. Beside four
    busy processes a step of the debug recipe takes 3.0 s with spinning threads, and 1.9 s with
    sleeping ones.
    """
    if os.getloadavg()[0] > (os.cpu_count() or 1) / 2:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    elif "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
