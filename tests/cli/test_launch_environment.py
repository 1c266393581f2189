"""Ranks by the variables of a launcher, and the threads of started processes."""

import os
import subprocess
import sys

import pytest

from moetrain.config import Config, ConfigError
from moetrain.config.environment import LaunchedPlace, launched_place

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_JOB_ID": "1234567",
}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}  # without srun


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        (TORCHRUN, "host:1234"),
        (TORCHRUN | SLURM, "host:1234"),  # torchrun under srun
        (SLURM | {"SLURM_NODELIST": "gpu[07-10,12]-ib,x3"}, "gpu07-ib:24567"),
        (SLURM | {"SLURM_NODELIST": "a12,b[1-3]"}, "a12:24567"),
        (SLURM | {"SLURM_NODELIST": "b[3,5]"}, "b3:24567"),
        (SLURM | {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}, "10.0.0.1:24567"),
        (SLURM | {"MASTER_ADDR": "m", "MASTER_PORT": "99", "SLURM_NODELIST": "n1"}, "m:99"),
    ],
)
def test_launched_place_reads_the_variables_of_launchers(variables, address):
    assert launched_place(variables) == LaunchedPlace(5, 1, 8, address, None, None)


@pytest.mark.parametrize(
    ("variables", "on_machine"),
    [
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, 4),
        (TORCHRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, None),  # of torchrun processes
        (SLURM | {"SLURM_NODELIST": "n", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4),
        (SLURM | {"SLURM_NODELIST": "n", "SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
        (SLURM | {"SLURM_NODELIST": "n", "SLURM_STEP_TASKS_PER_NODE": "5,3"}, None),
    ],
)
def test_launched_place_counts_the_ranks_of_a_machine(variables, on_machine):
    place = launched_place(variables)
    assert place is not None
    assert place.on_machine == on_machine


@pytest.mark.parametrize(
    "variables", [{}, {"RANK": "0"}, BATCH_SCRIPT, SLURM | {"SLURM_STEP_NUM_TASKS": "1"}]
)
def test_launched_place_is_none_without_a_launcher(variables):
    assert launched_place(variables) is None


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({**TORCHRUN, "LOCAL_RANK": "one"}, "LOCAL_RANK"),
        ({**TORCHRUN, "RANK": "8"}, "RANK"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK"),
        (SLURM, "SLURM_LAUNCH_NODE_IPADDR"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODELIST": "n"}, "SLURM_JOB_ID"),
    ],
)
def test_half_a_launcher_is_an_error(variables, name):
    with pytest.raises(ConfigError) as caught:
        launched_place(variables)
    assert caught.value.field == name


def test_nproc_is_auto_or_positive():
    assert Config.load({"model": {"preset": "debug"}}, ["launch.nproc=auto"], {}).launch.nproc == (
        "auto"
    )
    for bad in ("0", "-2", "some"):
        with pytest.raises(ConfigError):
            Config.load(None, [f"launch.nproc={bad}"], {})


LOADED = """
import os, runpy, sys
load, module = float(sys.argv.pop(1)), sys.argv.pop(1)
os.getloadavg = lambda: (load, load, load)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.tier("long")
@pytest.mark.parametrize(
    ("module", "load", "chosen", "wanted"),
    [
        ("train", 99, None, "OMP_WAIT_POLICY = 'PASSIVE'"),
        ("generate", 0, None, "GOMP_SPINCOUNT = '10000'"),
        ("train", 0, "ACTIVE", "OMP_WAIT_POLICY = 'ACTIVE'"),
    ],
)
def test_idle_threads_sleep_unless_the_environment_says_otherwise(
    module, load, chosen, wanted, tmp_path
):
    own = {"OMP_DISPLAY_ENV": "verbose"} | ({"OMP_WAIT_POLICY": chosen} if chosen else {})
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in names} | own
    words = ["debug", "--dry_run"] if module == "train" else ["no-such-model", "--prompt", "x"]
    command = [sys.executable, "-c", LOADED, str(load), f"moetrain.{module}", *words]
    found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert wanted in found.stderr


@pytest.mark.tier("long")
def test_idle_threads_sleep_in_a_program_that_imports_the_library_first():
    code = "import os; os.getloadavg = lambda: (99, 99, 99); import moetrain; moetrain.Trainer; "
    code += "print(os.environ['OMP_WAIT_POLICY'])"
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.stdout == "passive\n", found.stderr
