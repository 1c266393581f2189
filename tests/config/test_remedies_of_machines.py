"""Each remedy that an error offers for a launcher, a disk, a cache or a device is applied here.

The errors are real: files are damaged, a disk is a small tmpfs (for root alone), limits are the
process's own. Only GPUs are imitated. Requests, records and settings: :mod:`test_remedies`.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from moetrain.checkpoint import save as checkpoint_save
from moetrain.cli.train import main
from moetrain.config import CheckpointSection, Config, ConfigError, environment
from moetrain.config.environment import LaunchedPlace, c_compiler, launched_place
from moetrain.config.files import disk_remedy
from moetrain.config.locks import file_lock
from moetrain.config.sources import RunFailed
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate.grammars import GrammarLimits, Grammars, TooManyGrammarsError
from moetrain.generate.scoring import _device_of
from moetrain.parallel import processes
from moetrain.parallel import world as world_module
from moetrain.parallel.processes import find_ranks, num_processes, planned_machine
from moetrain.parallel.world import claim_device, join_world
from moetrain.train import run_folder
from moetrain.train.checks import check_device
from moetrain.train.estimates.memory import RankSizes
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from moetrain.train.run_folder import RunFolder
from moetrain.train.session import resolve_run
from tests.lib.distributed import spawn
from tests.lib.tried_settings import TEXT, TINY, UNSET, made, use

# ---- variables of launchers: good ones, a change, the error, and changes that it advises ---

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[1-2]",
    "SLURM_JOB_ID": "77",
}
VARIABLES: list[tuple[dict[str, str], dict[str, str], str, list[dict[str, str]]]] = [
    (TORCHRUN, {"RANK": "x"}, "RANK: 'x' is not a whole number .*; give one", [{"RANK": "1"}]),
    (TORCHRUN, {"RANK": "-1"}, "RANK: '-1' is not a whole number .*; give one", [{"RANK": "0"}]),
    (TORCHRUN, {"RANK": "9" * 5000}, "RANK: '999.* of up to 9 digits; give one", [{"RANK": "0"}]),
    (
        TORCHRUN,
        {"RANK": "2"},
        "RANK: 2 contradicts WORLD_SIZE 2: give 0 to 1",
        [{"RANK": "0"}, {"RANK": "1"}],
    ),
    (
        TORCHRUN,
        {"LOCAL_RANK": "5"},
        "LOCAL_RANK: 5 contradicts LOCAL_WORLD_SIZE 2: give 0 to 1",
        [{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"}],
    ),
    (
        TORCHRUN,
        {"WORLD_SIZE": "0"},
        "^WORLD_SIZE: 0; give the number of processes, 1 or more",
        [{"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "2"}],
    ),
    (
        TORCHRUN,
        {"LOCAL_WORLD_SIZE": "0"},
        "^LOCAL_WORLD_SIZE: 0; give the number of processes, 1 or more",
        [{"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, {"LOCAL_WORLD_SIZE": "2"}],
    ),
    *(
        (TORCHRUN, {name: ""}, f"{name}: not set, though .*; set it", [{name: TORCHRUN[name]}])
        for name in TORCHRUN
    ),
    (
        SRUN,
        {"SLURM_LOCALID": "4"},
        "SLURM_LOCALID: 4 contradicts SLURM_STEP_TASKS_PER_NODE 4: give 0 to 3",
        [{"SLURM_LOCALID": "0"}, {"SLURM_LOCALID": "3"}],
    ),
    (
        SRUN,
        {"SLURM_PROCID": "8"},
        "SLURM_PROCID: 8 contradicts SLURM_STEP_NUM_TASKS 8: give 0 to 7",
        [{"SLURM_PROCID": "0"}, {"SLURM_PROCID": "7"}],
    ),
    (SRUN, {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID: not set, .*; set it", [{"SLURM_JOB_ID": "1"}]),
    (
        SRUN,
        {"SLURM_STEP_NODELIST": ""},
        "SLURM_LAUNCH_NODE_IPADDR: not set, .*; set it",
        [{"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}],
    ),
]


@pytest.mark.parametrize(
    ("good", "change", "says", "remedies"),
    VARIABLES,
    ids=[f"{name}-{value:.5}" for _, x, *_ in VARIABLES for name, value in x.items()],
)
def test_what_the_error_of_a_launchers_variable_advises_works(good, change, says, remedies):
    with pytest.raises(ConfigError, match=says) as raised:
        launched_place(good | change)
    assert len(str(raised.value)) < 300
    for remedy in remedies:
        assert launched_place(good | change | remedy) is not None


# ---- processes: settings, variables, GPUs, the error, and for each remedy the same ---------------


class Start(NamedTuple):
    """The settings and variables with which a run is started."""

    settings: dict[str, Any]
    variables: Mapping[str, str] = MappingProxyType({})
    gpus: int = 0


OF_TWO = TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "3"}
CORES = 2
STARTS: dict[str, tuple[Start, str, list[Start]]] = {
    "more processes than GPUs": (
        Start({"launch.nproc": 4, "train.device": "cuda"}, gpus=2),
        "launch.nproc: 4 processes, but this machine has 2 GPUs; use auto, which starts one",
        [Start({"launch.nproc": "auto", "train.device": "cuda"}, gpus=2)],
    ),
    "more processes than cores bear": (
        Start({"launch.nproc": 33}),
        "launch.nproc: 33 processes, .* no GPU to use; use 2 or fewer .up to 16 a core",
        [Start({"launch.nproc": n}) for n in (1, 2, 32)],
    ),
    "planned GPUs": (
        Start({"launch.nproc": 4, "launch.gpus": 8}),
        "launch.nproc: 4 contradicts launch.gpus 8; leave one of the two out",
        [Start({"launch.gpus": 8}), Start({"launch.nproc": 4})],
    ),
    "processes of a launcher": (
        Start({"launch.nproc": 3}, OF_TWO),
        "launch.nproc: 3, but a launcher has started 2 processes .*; leave one of the two out",
        [Start({}, OF_TWO), Start({"launch.nproc": 3})],
    ),
    "restarts of a launcher": (
        Start({"launch.max_restarts": 5}, OF_TWO),
        r"launch.max_restarts: 5, but .* 3 times; set it there \(.*\), or leave it out here",
        [
            Start({"launch.max_restarts": 5}, OF_TWO | {"TORCHELASTIC_MAX_RESTARTS": "5"}),
            Start({}, OF_TWO),
        ],
    ),
    "no GPU": (
        Start({"train.device": "cuda"}),
        "train.device: 'cuda', but torch sees no CUDA device; use auto or cpu",
        [Start({"train.device": "auto"}), Start({"train.device": "cpu"})],
    ),
    "too few GPUs for a launcher's ranks": (
        Start({"train.device": "auto"}, OF_TWO, gpus=1),
        "train.device: 'auto', but local rank 1 .* torch sees 1; start 1 processes on this machine "
        r"\(launch.nproc auto\), or use cpu",
        [
            Start({"train.device": "auto", "launch.nproc": "auto"}, gpus=1),
            Start({"train.device": "cpu"}, OF_TWO, gpus=1),
        ],
    ),
}


@pytest.mark.parametrize("case", STARTS)
def test_what_the_error_of_a_start_advises_works(case, monkeypatch):
    class Started(Exception):
        """The checks of a start are over."""

    def end(*_: Any) -> None:
        raise Started

    def start(how: Start) -> None:
        for name in (*OF_TWO, *SRUN):
            monkeypatch.delenv(name, raising=False)
        for name, value in how.variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: how.gpus)
        config = made(TINY | {"train.device": UNSET} | how.settings)
        planned_machine(config)
        place = launched_place()
        if place is not None or num_processes(config) == 1:
            with pytest.raises(Started):
                join_world(config, resolve_run(config)[1])
        claim_device(config, 0 if place is None else place.local_rank)

    monkeypatch.setattr("os.cpu_count", lambda: CORES)
    monkeypatch.setattr(world_module, "plan_world", end)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(processes, "device_capacity", lambda _: 1e9)
    monkeypatch.setattr(world_module, "allocator_is_set", lambda: True)
    refused, says, remedies = STARTS[case]
    with pytest.raises(ConfigError, match=says):
        start(refused)
    for remedy in remedies:
        start(remedy)


# ---- where ranks meet ----------------------------------------------------------------------------


def place(rank: int, size: int, host: str, port: int) -> LaunchedPlace:
    return LaunchedPlace(rank, 0, size, f"{host}:{port}", None, None)


def meet(*places: LaunchedPlace, seconds: float = 0.4) -> dict[int, Exception | None]:
    """Let the ranks at ``places`` meet, each on a thread; return what each of them raised."""
    found: dict[int, Exception | None] = {}
    stores = []

    def come(number: int, at: LaunchedPlace) -> None:
        found[number] = None
        try:
            stores.append(find_ranks(at, seconds))
        except (ConfigError, RunFailed) as error:
            found[number] = error

    threads = [threading.Thread(target=come, args=x) for x in enumerate(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def taken():
    """The port of a server that is no store, and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.tier("quick", long=["a..b"])
@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "a..b"])
def test_what_the_error_of_an_unknown_host_advises_works(host):
    port = free_port()
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: .* is unknown: .*; give the name or the"):
        find_ranks(place(1, 2, host, port), 0.2)
    for known in ("localhost", "127.0.0.1"):
        port = free_port()
        assert meet(*(place(r, 2, known, port) for r in (0, 1)), seconds=9) == {0: None, 1: None}


def test_what_the_error_of_a_number_that_is_no_port_advises_works():
    for port in (0, 65536):
        with pytest.raises(ConfigError, match=r"MASTER_PORT: \d+ is not a port; give 1 to 65535"):
            find_ranks(place(1, 2, "127.0.0.1", port), 0.2)
    for port in (1, 65535):
        with pytest.raises(RunFailed, match="found nobody"):
            find_ranks(place(1, 2, "127.0.0.1", port), 0.1)


@pytest.mark.parametrize(
    ("rank", "says"),
    [
        (0, "rank 0 of 2 could not meet the others .* in use; give all ranks another MASTER_PORT"),
        (1, "what answers at .* is not rank 0 of this run .*; give all ranks another MASTER_PORT"),
    ],
)
def test_what_the_error_of_a_port_in_use_advises_works(rank, says, taken):
    with pytest.raises(RunFailed, match=says):
        find_ranks(place(rank, 2, "127.0.0.1", taken), 0.4)
    port = free_port()
    ranks = [place(r, 2, "127.0.0.1", port) for r in (0, 1)]
    assert meet(*ranks, seconds=9) == {0: None, 1: None}


@pytest.mark.tier("long")
def test_what_the_error_of_ranks_that_are_not_there_asks_for_works():
    """Starting them, with the same variables."""
    port = free_port()
    with pytest.raises(RunFailed, match="is it running, and are MASTER_ADDR and MASTER_PORT those"):
        find_ranks(place(1, 2, "127.0.0.1", port), 0.1)
    with pytest.raises(RunFailed, match="are all started, with the same MASTER_ADDR, MASTER_PORT"):
        find_ranks(place(0, 2, "127.0.0.1", port), 0.1)
    port = free_port()
    ranks = [place(r, 2, "127.0.0.1", port) for r in (0, 1)]
    assert meet(*ranks, seconds=9) == {0: None, 1: None}


@pytest.mark.tier("long")
def test_what_the_error_of_ranks_that_contradict_one_another_advises_works():
    port = free_port()
    found = meet(place(0, 2, "127.0.0.1", port), place(1, 3, "127.0.0.1", port))
    said = [str(x) for x in found.values() if isinstance(x, ConfigError)]
    assert len(said) == 1
    assert re.match(r"WORLD_SIZE: . for rank ., and . for another; give all the same$", said[0])
    port = free_port()
    found = meet(*(place(r, 3, "127.0.0.1", port) for r in (0, 1, 1)))
    said = [str(x) for x in found.values() if isinstance(x, ConfigError)]
    assert said == ["RANK: two of 3 processes have 1; number them from 0"]
    for size in (2, 3):
        port = free_port()
        ranks = [place(r, size, "127.0.0.1", port) for r in range(size)]
        assert meet(*ranks, seconds=9) == dict.fromkeys(range(size))


# ---- machines that disagree ----------------------------------------------------------------------


class Met:
    """The rendezvous of rank 0 with a rank that has sent ``other``; without it, that rank's."""

    size = 2

    def __init__(self, other: str | None = None) -> None:
        self.other = other
        self.sent: list[str] = []

    def gather(self, text: str) -> list[str]:
        self.sent.append(text)
        return [] if self.other is None else [text, self.other]

    def broadcast(self, text: str) -> str:
        return "null" if self.other is None else text


def compare(first: dict[str, Any], other: dict[str, Any], per_machine: tuple[int, int]) -> None:
    """Compare rank 0 with the settings ``first`` and rank 1 with ``other``."""
    met: Any = Met()
    for settings, ranks in ((other, per_machine[1]), (first, per_machine[0])):
        config, arch = resolve_run(made(TINY | {"train.global_batch_size": 4} | settings))
        dims = replace(world_module.plan_world(config, arch, 2), per_machine=ranks)
        world_module._check_alike(config, arch, dims, met)
        met = Met(met.sent[0])


def test_a_setting_that_machines_do_not_share_is_named_and_giving_all_the_same_works():
    for name, one, two in (
        ("train.seed", 1, 2),
        ("train.steps", 4, 6),
        ("optim.lr", 0.1, 0.2),
        ("train.micro_batch_size", 1, 2),
        ("checkpoint.interval", 2, 3),
        ("log.interval", 1, 2),
    ):
        says = f"^{name}: {one} on rank 0, but {two} on rank 1; give all ranks the same settings$"
        with pytest.raises(ConfigError, match=says):
            compare({name: one}, {name: two}, (1, 1))
        compare({name: one}, {name: one}, (1, 1))
    many = {"train.seed": 2, "train.steps": 3, "optim.lr": 0.5}
    with pytest.raises(ConfigError, match=r"same settings \(also train.seed, train.steps\)$"):
        compare({}, many, (1, 1))


def test_settings_of_a_machine_may_differ(tmp_path):
    memory = {"checkpoint.memory_interval": 1}
    for name, value in (
        ("output_dir", tmp_path / "disk1"),
        ("checkpoint.memory", tmp_path),
        ("data.cache_dir", tmp_path),
        ("launch.hang_seconds", 9),
        ("log.progress", "no"),
    ):
        compare(memory, memory | {name: value}, (1, 1))


def test_machines_with_other_numbers_of_ranks_software_or_models_are_told(monkeypatch):
    says = "^launch.gpus_per_machine: auto is 1 on rank 0, but 2 on rank 1; start as many .* on e"
    with pytest.raises(ConfigError, match=says):
        compare({}, {}, (1, 2))
    compare({}, {}, (2, 2))  # as many on each machine, or a number
    kinds = iter([{"torch": "2", "moetrain": "1"}, {"torch": "2", "moetrain": "0"}])
    monkeypatch.setattr(world_module, "software", lambda: next(kinds))
    says = "^software: moetrain is 0 on rank 0, but 1 on rank 1; install the same on all machines$"
    with pytest.raises(ConfigError, match=says):
        compare({}, {}, (1, 1))
    monkeypatch.undo()
    config, arch = resolve_run(made(TINY | {"train.global_batch_size": 4}))
    dims = world_module.plan_world(config, arch, 2)
    met: Any = Met()
    other = arch.model_copy(update={"rope_theta": 2.0})
    world_module._check_alike(config, other, dims, met)
    with pytest.raises(ConfigError) as raised:
        world_module._check_alike(config, arch, dims, Met(met.sent[0]))
    says = r"model.path: rope_theta is \S+ on rank 0, but 2.0 on rank 1; give all machines the same"
    assert re.match(says, str(raised.value))


def test_the_code_of_the_package_counts_as_its_version(monkeypatch, tmp_path):
    """An edited file, a renamed one, and one more."""
    package = tmp_path / "moetrain" / "config"
    package.mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    (package / "a.py").write_text("1")
    seen = [environment.software()]
    assert environment.software() == seen[0]
    for change in (
        lambda: (package / "a.py").write_text("2"),
        lambda: (package / "a.py").rename(package / "b.py"),
        lambda: (package / "c.py").write_text(""),
    ):
        change()
        seen.append(environment.software())
    assert len({x["the code of moetrain"] for x in seen}) == 4
    assert len({x["torch"] for x in seen}) == 1


def train_on_machine(settings: list[dict[str, Any]]) -> tuple[str, list[float]]:
    """Train with the settings of this rank's machine; return the error, or the losses."""
    mine = TINY | {"train.global_batch_size": 4, "train.steps": 3} | settings[dist.get_rank()]
    try:
        Trainer(made(mine)).fit()
    except ConfigError as error:
        return str(error), []
    rows = read_metrics(Path(mine["output_dir"], "metrics.jsonl"))
    return "", [row["loss"] for row in rows if "loss" in row]


@pytest.mark.tier("long")
def test_machines_that_read_other_data_are_told_and_the_same_files_train_alike(tmp_path):
    """They may lie elsewhere. The losses are those of two ranks that read one folder."""
    for name, text in (("one", TEXT), ("copy", TEXT), ("other", TEXT.upper())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(text * 9)
    of_text = {
        "data.source": "text",
        "data.cache_dir": tmp_path / "cache",
        "data.tokenizer": "byte",
    }

    def start(first: str, other: str, out: str) -> list[tuple[str, list[float]]]:
        own = {"output_dir": tmp_path / out, "log.interval": 1} | of_text
        folders = [own | {"data.path": tmp_path / name} for name in (first, other)]
        return spawn(2, train_on_machine, folders)

    says = (
        "data.path: the files, or those of the tokenizer, differ on rank 1 from those on rank 0; "
        "give all machines the same"
    )
    assert start("one", "other", "refused") == [(says, [])] * 2
    ((error, losses), _) = start("one", "copy", "copies")
    assert error == ""
    assert len(losses) == 3
    assert start("one", "one", "undisturbed")[0] == ("", losses)


# ---- a folder that ranks do not share ------------------------------------------------------------


class Ranks:
    """Two ranks on threads that exchange objects."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._all_here = threading.Barrier(2, timeout=30)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._all_here.wait()
        found = [self._values[x] for x in (0, 1)]
        self._all_here.wait()
        return found


class Rank(NamedTuple):
    """What :class:`RunFolder` asks of a world."""

    ranks: Ranks
    rank: int
    size: int = 2

    def gather(self, value: Any) -> list[Any]:
        return self.ranks.gather(self.rank, value)


def test_what_the_error_of_folders_that_are_not_shared_advises_works(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_VISIBLE_SECONDS", 0.1)

    def check(*folders: str) -> list[str]:
        said, ranks = ["", ""], Ranks()

        def of(rank: int) -> None:
            world: Any = Rank(ranks, rank)
            try:
                RunFolder(tmp_path / folders[rank], world).check_shared(world)
            except ConfigError as error:
                said[rank] = str(error)

        threads = [threading.Thread(target=of, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said

    for name in "ab":
        (tmp_path / name).mkdir()
    says = "; choose one on a file system that all machines of the run share"
    for other in ("b", "gone"):
        assert all("is not one folder for all ranks" in x and says in x for x in check("a", other))
    assert check("a", "a") == ["", ""]
    # The other remedy is in the message of a run alone.
    assert not CheckpointSection(shared=False).shared


# ---- output folders, disks and checkpoints -------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """A function that mounts a disk of a size, or enlarges or protects the one that it has mounted,
    and returns its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with ExitStack() as ends:

        def mounted(options: str) -> Path:
            command = ["mount", "-t", "tmpfs", "-o", options, "moetrain", str(folder)]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("mounting takes root")
            if not options.startswith("remount"):
                ends.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
            return folder

        yield mounted


NO_CHECKPOINTS = {"checkpoint.minutes": 0, "checkpoint.at_end": "no"}


def begins(settings: dict[str, Any]) -> Trainer:
    return Trainer(made(TINY | settings))


def refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        begins(settings)
    assert re.search(says, str(raised.value)), str(raised.value)


@pytest.mark.tier("long")
def test_what_the_error_of_a_disk_without_room_advises_works(disk, tmp_path):
    small = {"output_dir": disk("size=32k") / "out", "train.steps": 4}
    says = (
        "output_dir: .* has room for .*; choose another, or write less "
        r"\(checkpoint.keep, checkpoint.minutes, checkpoint.at_end\)$"
    )
    refused(small, says)
    begins(small | {"output_dir": tmp_path / "another"})
    begins(small | NO_CHECKPOINTS)
    every = small | {"checkpoint.interval": 1, "checkpoint.keep_every": 2, "checkpoint.save_hf": 1}
    refused(
        every,
        r"write less \(checkpoint.keep, checkpoint.keep_every, checkpoint.interval, "
        r"checkpoint.minutes, checkpoint.at_end, checkpoint.save_hf\)$",
    )
    less = {"checkpoint.interval": 0, "checkpoint.keep_every": 0, "checkpoint.save_hf": "no"}
    begins(every | NO_CHECKPOINTS | less)
    export = small | NO_CHECKPOINTS | {"checkpoint.save_hf": "yes"}
    refused(export, r"choose another, or write less \(checkpoint.save_hf\)$")
    begins(export | {"checkpoint.save_hf": "no"})
    disk("remount,size=64m")
    begins(every)


def test_what_the_error_of_memory_without_room_advises_works(disk, tmp_path):
    folder = disk("size=32k")
    settings = {"output_dir": tmp_path / "out", "train.steps": 4}
    in_memory = {"checkpoint.memory": folder, "checkpoint.memory_interval": 1}
    says = "checkpoint.memory: .*; enlarge it .*, name another, or unset it and checkpoint.memory_i"
    refused(settings | in_memory, says)
    begins(settings | in_memory | {"checkpoint.memory": tmp_path / "another"})
    begins(settings)
    disk("remount,size=64m")
    begins(settings | in_memory)


def test_what_the_error_of_a_disk_that_may_not_be_written_advises_works(disk, tmp_path):
    settings = {"output_dir": disk("size=64m") / "out"}
    disk("remount,ro")
    refused(settings, "output_dir: .* cannot be written to: Read-only file system; choose another")
    begins({"output_dir": tmp_path / "another"})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the run of two steps in ``out``, which saved both."""
    folder = tmp_path_factory.mktemp("trained")
    Trainer(
        made(TINY | {"output_dir": folder / "out", "train.steps": 2, "checkpoint.interval": 1})
    ).fit()
    return folder


def damage(file: str) -> Callable[[], object]:
    return lambda: Path(file).write_bytes(Path(file).read_bytes()[:-9])


def write(file: str, text: str) -> Callable[[], object]:
    return lambda: Path(file).write_text(text)


def make_folder(name: str) -> Callable[[], None]:
    def make() -> None:
        Path(name).unlink(missing_ok=True)
        Path(name).mkdir()

    return make


def remove(name: str) -> Callable[[], object]:
    return lambda: shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink()


STEP_1, STEP_2 = (f"out/checkpoints/step-0000000{step}" for step in (1, 2))
Remedy = tuple[dict[str, Any], Callable[[], object], int]
"""Settings, what is done, and the step at which the run then begins."""


def nothing() -> None:
    """Do nothing."""


FOLDERS: dict[str, tuple[Callable[[], object], dict[str, Any], str, list[Remedy]]] = {
    "a name of the run that is damaged": (
        write("out/.run", "zz"),
        {},
        "output_dir: 'out/.run' holds b'zz', .*; remove it, and the run goes on from the newest",
        [({}, remove("out/.run"), 2)],
    ),
    "a name of the run that cannot be read": (
        make_folder("out/.run"),
        {},
        "output_dir: 'out/.run' cannot be read: Is a directory; remove it, and the run goes on",
        [({}, remove("out/.run"), 2)],
    ),
    "a lock that cannot be written": (
        make_folder("out/.lock"),
        {},
        "output_dir: 'out' cannot be written: .*; choose another output_dir",
        [({"output_dir": "another"}, nothing, 0)],
    ),
    "a model's config": (
        write("out/config.json", "{}"),
        {},
        "output_dir: 'out' cannot be used: its config.json is not a run's, .*; choose another",
        [({"output_dir": "another"}, nothing, 0)],
    ),
    "a file in place of a folder": (
        nothing,
        {"output_dir": "out/config.json"},
        "output_dir: .* cannot be made: .* is not a folder; choose another",
        [({"output_dir": "another"}, nothing, 0)],
    ),
    "a file above it": (
        write("other", ""),
        {"output_dir": "other/out"},
        "output_dir: .* cannot be made: .*; choose another",
        [({"output_dir": "another"}, nothing, 0)],
    ),
    "a named checkpoint that is damaged": (
        damage(f"{STEP_2}/manifest.json"),
        {"checkpoint.resume": STEP_2},
        "checkpoint.resume: cannot read .*; name another one, or set never",
        [
            ({"checkpoint.resume": STEP_1}, nothing, 1),
            ({"checkpoint.resume": "never"}, nothing, 0),
        ],
    ),
    "a named checkpoint whose weights are damaged": (
        lambda: spoil(f"{STEP_2}/model-00000-00.safetensors"),
        {"checkpoint.resume": STEP_2},
        "checkpoint.resume: cannot read .*; name another one, or set never",
        [
            ({"checkpoint.resume": STEP_1}, nothing, 1),
            ({"checkpoint.resume": "never"}, nothing, 0),
        ],
    ),
    "checkpoints that are all damaged": (
        lambda: [damage(f"{step}/manifest.json")() for step in (STEP_1, STEP_2)],
        {},
        "checkpoint.resume: every checkpoint in .* is damaged .*; name another one, or start",
        [
            ({"checkpoint.resume": "intact"}, nothing, 2),
            ({"checkpoint.resume": "never"}, nothing, 0),
        ],
    ),
    "weights of all checkpoints": (
        lambda: [spoil(f"{step}/model-00000-00.safetensors") for step in (STEP_1, STEP_2)],
        {},
        "checkpoint.resume: every checkpoint in .* is damaged .*; name another one, or start",
        [
            ({"checkpoint.resume": "intact"}, nothing, 2),
            ({"checkpoint.resume": "never"}, nothing, 0),
        ],
    ),
    "a store of no known kind": (
        nothing,
        {"checkpoint.store": "nosuch://bucket"},
        "checkpoint.store: 'nosuch://bucket': Protocol not known.*; name another, or unset it",
        [
            ({"checkpoint.store": "file:store"}, nothing, 2),
            ({"checkpoint.store": UNSET}, nothing, 2),
        ],
    ),
    "a store that holds what a new run passes over": (
        lambda: shutil.copytree("out/checkpoints", "store"),
        {"checkpoint.store": "file:store", "checkpoint.resume": "never", "output_dir": "new"},
        "checkpoint.store: it holds step 2, but .* is never; empty it, or choose another",
        [
            ({}, remove("store"), 0),
            ({"checkpoint.store": "file:another"}, nothing, 0),
        ],
    ),
}


def spoil(file: str) -> None:
    """Change the last bytes of a file."""
    data = bytearray(Path(file).read_bytes())
    data[-3] ^= 255
    Path(file).write_bytes(data)


@pytest.mark.parametrize("case", FOLDERS)
def test_what_the_error_of_an_output_folder_advises_works(case, trained, tmp_path, monkeypatch):
    spoilt, change, says, remedies = FOLDERS[case]
    settings = {"output_dir": "out", "train.steps": 4} | change
    for number, (remedy, act, step) in enumerate(remedies):
        monkeypatch.chdir(shutil.copytree(trained, tmp_path / str(number)))
        shutil.copytree(STEP_2, "intact")
        spoilt()
        refused(settings, says)
        act()
        assert begins(settings | remedy).step == step


def test_what_the_error_of_a_folder_in_use_advises_works(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(trained, tmp_path / "0"))
    settings = {"output_dir": "out", "train.steps": 4}
    with file_lock(Path("out/.lock")):
        refused(settings, "is being written by another run .*; wait for it, stop it, or choose ano")
        begins(settings | {"output_dir": "another"})
    assert begins(settings).step == 2


def run(settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command; return the line with which it failed, or an empty text."""
    given = (TINY | settings).items()
    code = main(["debug", *(f"--{name}={value}" for name, value in given if value is not UNSET)])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said.splitlines()[-1] if code else ""


def test_what_the_error_of_a_full_disk_advises_works(disk, tmp_path, capsys):
    """It is full once the run has begun, so that it has checked its room."""
    folder = disk("size=2m")
    settings = NO_CHECKPOINTS | {"output_dir": folder / "out"}
    (folder / "big").write_bytes(bytes(2 * 2**20 - 4096))
    says = r"(error|failed): .*No space left on device.*; make room, or choose another output_dir$"
    assert re.match(says, run(settings, capsys))
    assert run(settings | {"output_dir": tmp_path / "another"}, capsys) == ""
    (folder / "big").unlink()
    assert run(settings, capsys) == ""


@pytest.mark.parametrize("longest", [3_000, pytest.param(20_000, marks=pytest.mark.tier("long"))])
def test_what_the_error_of_a_limit_of_files_advises_works(longest, tmp_path, capsys):
    settings = {"output_dir": tmp_path / "out"}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (longest, before[1]))
    try:
        line = run(settings, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.match(r"failed: .*File too large.*; raise the limit .*\(ulimit -f\)", line), line
    assert run(settings, capsys) == ""


def test_the_remedy_of_a_checkpoint_is_that_of_the_rank_that_cannot_write_it():
    """Ranks have limits of their own: the rank that tells has none here, or alone has one."""

    def write() -> None:
        raise OSError(27, "File too large")

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    whole = checkpoint_save._attempt(lambda: "written")
    says = {True: "raise the limit .* \\(ulimit -f\\)$", False: "choose another output_dir$"}
    for has_limit, limit in ((True, 1 << 20), (False, before[0])):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            reports = [whole, checkpoint_save._attempt(write)]
            other = before[0] if has_limit else 1 << 20
            resource.setrlimit(resource.RLIMIT_FSIZE, (other, before[1]))
            told = checkpoint_save._attempt(lambda: checkpoint_save._values(reports))  # noqa: B023
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        answer = json.loads(told)
        assert answer["error"] == "rank 1: [Errno 27] File too large"
        assert re.match(says[has_limit], answer["remedy"])


def test_an_error_of_a_disk_advises_what_its_number_calls_for():
    assert disk_remedy(28, "output_dir") == "make room, or choose another output_dir"
    assert disk_remedy(30, "output_dir") == "make it writable, or choose another output_dir"
    assert disk_remedy(27, "output_dir") == "choose another output_dir"  # the file system's limit
    assert disk_remedy(32, "output_dir") == ""


@pytest.mark.tier("long")
def test_what_the_error_of_a_store_that_may_not_be_written_advises_works(tmp_path, capsys):
    settings = {"output_dir": tmp_path / "out", "checkpoint.store": "file:///proc/none"}
    line = run(settings, capsys)
    assert re.match(
        "failed: cannot copy .*step-00000001 to checkpoint.store: .*; name another "
        "checkpoint.store, or unset it; earlier checkpoints are unchanged; the next run",
        line,
    ), line
    other = settings | {"checkpoint.store": f"file:{tmp_path / 'store'}", "train.steps": 2}
    assert run(other, capsys) == ""
    assert run(other | {"checkpoint.store": UNSET, "train.steps": 3}, capsys) == ""


@pytest.mark.tier("long")
def test_what_the_error_of_memory_that_may_not_be_written_advises_works(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    in_memory = {"checkpoint.memory": tmp_path / "file", "checkpoint.memory_interval": 1}
    settings = {"output_dir": tmp_path / "out", "train.steps": 2}
    says = "failed: .*; name another checkpoint.memory, or unset it and checkpoint.memory_interval;"
    line = run(settings | in_memory, capsys)
    assert re.match(says, line), line
    shared = {"checkpoint.memory": tmp_path / "memory"}
    assert run(settings | in_memory | shared, capsys) == ""
    assert run(settings | {"train.steps": 3}, capsys) == ""


# ---- caches of tokens ----------------------------------------------------------------------------


CACHED = {
    "data.path": "a.txt",
    "data.cache_dir": "cache",
    "data.eval_fraction": 0,
    "train.sample_tokens": 0,
    "data.seq_len": 16,
    "train.steps": 1,
}


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "meta.json"])
@pytest.mark.parametrize("harm", [damage, remove])
def test_what_the_error_of_a_damaged_cache_advises_works(name, harm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("a.txt", TEXT)()
    use(CACHED)
    (folder,) = (path for path in Path("cache").iterdir() if path.is_dir())
    harm(str(folder / name))()
    says = r"data.cache_dir: (\S+) is damaged \(.*\); delete it to tokenise again"
    with pytest.raises(ConfigError) as raised:
        use(CACHED)
    found = re.match(says, str(raised.value))
    assert found is not None, str(raised.value)
    shutil.rmtree(found[1])
    use(CACHED)


def test_what_the_error_of_a_cache_that_is_a_file_advises_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("a.txt", TEXT)()
    with pytest.raises(ConfigError, match=r"cannot be written: .*; choose another data.cache_dir"):
        use(CACHED | {"data.cache_dir": "a.txt"})
    use(CACHED | {"data.cache_dir": "another"})


def test_what_the_error_of_a_cache_on_a_full_or_protected_disk_advises_works(
    disk, tmp_path, monkeypatch
):
    folder = disk("size=16k")
    monkeypatch.chdir(tmp_path)
    write("a.txt", TEXT * 20)()
    on_disk = CACHED | {"data.cache_dir": folder}
    says = "data.cache_dir: .* No space left .*; make room, or choose another data.cache_dir"
    with pytest.raises(ConfigError, match=says):
        use(on_disk)
    use(on_disk | {"data.cache_dir": "another"})
    disk("remount,size=16m,ro")
    says = "data.cache_dir: .* Read-only .*; make it writable, or choose another data.cache_dir"
    with pytest.raises(ConfigError, match=says):
        use(on_disk)
    disk("remount,rw")
    use(on_disk)


# ---- devices: settings, the device, the error, and settings that it advises ----------------------

CLIPPED: dict[str, Any] = {name: UNSET for name in TINY if name.startswith("model.")}
CLIPPED |= {"optim.name": "muon", "optim.muon_qk_clip": 100, "model.preset": "glm-4.5-air"}
CPU, HOPPER, AMPERE = "a CPU", (9, 0), (8, 0)
DEVICES: dict[str, tuple[dict[str, Any], Any, str, list[dict[str, Any]]]] = {
    "Triton on a CPU": (
        {"kernels.backend": "triton"},
        CPU,
        "kernels.backend: 'triton' takes a CUDA device; use auto or reference",
        [{"kernels.backend": "auto"}, {"kernels.backend": "reference"}],
    ),
    "flex on a CPU": (
        {"kernels.attention": "flex"},
        CPU,
        "kernels.attention: 'flex' has no backward on a CPU; use auto or sdpa",
        [{"kernels.attention": "auto"}, {"kernels.attention": "sdpa"}],
    ),
    "cuDNN on a CPU": (
        {"kernels.attention": "cudnn"},
        CPU,
        "kernels.attention: .* it takes bf16 or fp16 on CUDA, or use auto",
        [{"kernels.attention": "auto"}],
    ),
    "cuDNN in fp32": (
        {"kernels.attention": "cudnn", "train.dtype": "float32"},
        HOPPER,
        "kernels.attention: .* it takes bf16 or fp16 on CUDA, or use auto",
        [{"kernels.attention": "auto"}],
    ),
    "exact attention in fp32": (
        {"kernels.attention": "exact", "train.dtype": "float32"},
        HOPPER,
        "kernels.attention: 'exact': .* it takes bf16 or fp16 on CUDA, or use auto",
        [{"kernels.attention": "auto"}],
    ),
    "QK-clip in fp32": (
        {**CLIPPED, "train.dtype": "float32"},
        HOPPER,
        "optim.muon_qk_clip: 100: .* it takes bf16 or fp16 on CUDA, or set 0",
        [{**CLIPPED, "optim.muon_qk_clip": 0}],
    ),
    "exact attention on a CPU": (
        {"kernels.attention": "exact"},
        CPU,
        "kernels.attention: 'exact', but this run is on a CPU; unset it",
        [{"kernels.attention": UNSET}],
    ),
    "graphs on a CPU": (
        {"compile.cuda_graphs": "yes"},
        CPU,
        "compile.cuda_graphs: True, but this run is on a CPU; unset it",
        [{"compile.cuda_graphs": UNSET}],
    ),
    "fp8 of an older GPU": (
        {"kernels.precision": "fp8"},
        AMPERE,
        "kernels.precision: 'fp8' needs a Hopper GPU or later, but this is a .*; use bf16",
        [{"kernels.precision": "bf16"}],
    ),
    "fp8 of fp32": (
        {"kernels.precision": "fp8", "train.dtype": "float32"},
        HOPPER,
        "kernels.precision: 'fp8' needs train.dtype bfloat16, .*; use bf16",
        [{"kernels.precision": "bf16"}, {"train.dtype": "bfloat16"}],
    ),
    "odd widths": (
        {"model.hidden_size": 20},
        HOPPER,
        "model.hidden_size: 20 .*; use 16 or 24, or set train.device cpu",
        [{"model.hidden_size": 16}, {"model.hidden_size": 24}, {"train.device": "cpu"}],
    ),
    "a planned GPU": (
        {"launch.gpus": 4},
        CPU,
        "launch.gpus: 4, but only --dry_run uses it; unset it",
        [{"launch.gpus": UNSET}],
    ),
}


@pytest.mark.parametrize("case", DEVICES)
def test_what_the_error_of_a_device_advises_works(case, monkeypatch):
    settings, device, says, remedies = DEVICES[case]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU of this test")
    monkeypatch.setattr("moetrain.train.checks.c_compiler", lambda: "cc")
    monkeypatch.setattr("moetrain.train.checks.INTERPRETED", False)
    sizes = {"train.device": UNSET, "model.head_dim": 16, "model.moe_intermediate_size": 16}

    def check(changed: dict[str, Any]) -> None:
        config, arch = resolve_run(made(TINY | sizes | changed))
        on_cpu = device == CPU or config.train.device == "cpu"
        check_device(config, arch, torch.device("cpu" if on_cpu else "cuda"))

    with pytest.raises(ConfigError) as raised:
        check(settings)
    assert re.search(says, str(raised.value)), str(raised.value)
    for remedy in remedies:
        check(settings | remedy)


@pytest.mark.parametrize("setting", ["compile.enabled", "kernels.backend"])
def test_what_the_error_of_a_machine_without_compilers_advises_works(
    setting, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    is_on = setting == "compile.enabled"
    config = made(TINY | {"train.device": UNSET, "compile.enabled": "yes" if is_on else "no"})

    def check() -> None:
        check_device(*resolve_run(config), torch.device("cuda"))

    with pytest.raises(ConfigError, match=f"{setting}: .*; install gcc, or name one in CC"):
        check()
    for name, variables in (("gcc", {}), ("my-cc", {"CC": "my-cc"})):
        compiler = tmp_path / name
        compiler.write_text("#!/bin/sh\n")
        compiler.chmod(0o755)
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        assert c_compiler() == str(compiler)
        check()
        compiler.unlink()


def test_what_the_error_of_a_model_beyond_a_devices_memory_advises_works():
    def peak(changed: dict[str, Any]) -> tuple[Config, Any]:
        settings = TINY | {"model.num_layers": 4, "data.seq_len": 512} | changed
        config, arch = resolve_run(made(settings))
        dims = world_module.plan_world(config, arch, 1)
        (rank,) = RankSizes.of_ranks(config, arch, dims, torch.float32)
        return config, rank.peak(None)

    large = {"train.micro_batch_size": 8, "train.global_batch_size": 8}
    config, estimate = peak(large | {"activation.policy": "none"})
    capacity = estimate.total * (1 - estimate.MARGIN) * 0.99
    says = r"train.micro_batch_size: 8 .*\. Lower it, or recompute activations \(activation.policy"
    with pytest.raises(ConfigError, match=says):
        estimate.check(config, capacity)
    for remedy in ({"train.micro_batch_size": 1}, {"activation.policy": "full"}):
        config, estimate = peak(large | {"activation.policy": "none"} | remedy)
        estimate.check(config, capacity)
    config, estimate = peak(large | {"activation.policy": "full"})
    with pytest.raises(ConfigError, match=r"train.micro_batch_size: 8 .*\. Lower it$"):
        estimate.check(config, estimate.total * (1 - estimate.MARGIN) * 0.99)


def test_what_the_error_of_a_device_for_scores_advises_works(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="'gpu' is no device; use cpu, cuda or cuda:N"):
        _device_of("gpu")
    with pytest.raises(
        ConfigError, match=r"'cuda:2', but torch sees 2 .*; use cpu or a number bel"
    ):
        _device_of("cuda:2")
    for device in ("cpu", "cuda", "cuda:0", "cuda:1"):
        assert str(_device_of(device)) == device
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"'cuda', but torch sees 0 CUDA devices; use cpu$"):
        _device_of("cuda")


@pytest.mark.parametrize(
    "taken",
    [
        {"parallel.fsdp_transport": "nccl"},
        {"moe.deepep_num_sms": "auto", "parallel.ep": 2},
        {"checkpoint.asynchronous": "no"},
        {"compile.cuda_graphs": "no"},
        {"rl.max_sequences": 1},
    ],
    ids=str,
)
def test_a_value_that_an_error_on_a_gpu_advises_is_one(taken):
    assert made(TINY | taken)


# ---- grammars ------------------------------------------------------------------------------------


def test_what_the_errors_of_grammars_advise_works():
    pytest.importorskip("llguidance")
    tokenizer, limits = ByteTokenizer(), GrammarLimits(number=1)
    with pytest.raises(ConfigError, match=r"grammar: .*; build it with one \(tokenizer=\)"):
        Grammars(None, [], 257, limits).acquire("regex", "a")
    grammars = Grammars(tokenizer, [256], 257, limits)
    first = grammars.acquire("regex", "[ab]")
    try:
        with pytest.raises(TooManyGrammarsError, match=r"1 other grammars .*; ask again later"):
            grammars.acquire("regex", "c")
        first.ready.result()
    finally:
        grammars.release(first)
    second = grammars.acquire("regex", "c")
    try:
        second.ready.result()
    finally:
        grammars.release(second)
