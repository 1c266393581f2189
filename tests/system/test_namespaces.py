"""Two and four machines, each with its own network, host name, mounts and processes.

They are namespaces of this machine (scripts/namespaces.py). On each of them torchrun starts ranks
on the CPU, as in docs/machines.md.
"""

import json
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from namespaces import Machines, do, why_not

from moetrain.config import Config
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from tests.lib.checkpointed_runs import names
from tests.lib.command_lines import settled
from tests.lib.recoveries import rank_of
from tests.lib.typed_commands import losses

ROOT = Path(__file__).parents[2]
ONE_AFTER_ANOTHER, IMPATIENT = (
    str(ROOT / "tests" / "lib" / name) for name in ("one_after_another.py", "impatient_train.py")
)
STEPS = 3
TOLERANCE = 1e-5
ACROSS = {
    "fsdp": ["parallel.dp_shard=4"],
    "hsdp": ["parallel.dp_replicate=2", "parallel.dp_shard=2"],
    "pp": ["parallel.pp=2"],
    "ep": ["parallel.ep=4", "moe.dispatcher=alltoall"],
    "cp": ["parallel.cp=4", "parallel.cp_method=all_gather"],
}
LAYOUTS = {
    # machines, ranks of each: layouts
    (2, 2): ACROSS | {"tp inside": ["parallel.tp=2"]},
    (4, 1): ACROSS | {"pp of four": ["parallel.pp=4"]},
}
RESUMES = {"hsdp": "fsdp", "cp": "ep"}
"""Layouts that also resume from another layout's checkpoint of the middle: all are the same run."""
MICRO_BATCH = {"cp": 8, "pp of four": 2}
"""Rows that a rank takes at once, of eight; 2 for other layouts."""


@pytest.fixture(scope="module", autouse=True)
def _can_be():
    reason = why_not() if sys.platform == "linux" else "namespaces are Linux's"
    if reason:
        pytest.skip(reason)


@pytest.fixture
def words(corpus, token_cache):
    """Return the settings of a run of the preset ``debug`` over ``corpus``."""
    settings = {
        "data.source": "text",
        "data.path": corpus,
        "data.cache_dir": token_cache,
        "data.seq_len": 32,
        "train.global_batch_size": 8,
        "train.micro_batch_size": 2,
        "train.eval_interval": 0,
        "train.eval_rows": 4,
        "train.sample_tokens": 0,
        "train.device": "cpu",
        "moe.aux_loss_scope": "global_batch",  # the only scope that no split changes
        "compile.enabled": "no",
        "log.interval": 1,
        "log.tensorboard": "no",
    }
    return [f"{key}={value}" for key, value in settings.items()]


def said(folder):
    return "\n".join(path.read_text() for path in sorted(folder.glob("said*")))


def outputs(machines, folder):
    return [folder / f"said{number}" for number in range(machines.count)]


@pytest.mark.tier("long")
@pytest.mark.parametrize(("count", "ranks"), LAYOUTS)
def test_every_mesh_over_machines_gives_one_processs_losses(count, ranks, words, tmp_path):
    words = [*words, f"train.steps={STEPS}", "checkpoint.interval=2"]
    one = Config.load("debug", settled([*words, f"output_dir={tmp_path}/one"]), environ={})
    Trainer(one).fit()
    expected = losses(tmp_path / "one")
    assert len(expected) == STEPS
    runs = []
    for name, own in LAYOUTS[count, ranks].items():
        own = [*words, *own, "checkpoint.at_end=no"]
        own.append(f"train.micro_batch_size={MICRO_BATCH.get(name, 2)}")
        runs.append(settled([*own, f"output_dir={tmp_path}/{name}"]))
        if name in RESUMES:
            saved = tmp_path / RESUMES[name] / "checkpoints" / "step-00000002"
            own.append(f"checkpoint.resume={saved}")
            runs.append(settled([*own, f"output_dir={tmp_path}/{name} resumed"]))
    own = [*words, *LAYOUTS[count, ranks]["fsdp"], "checkpoint.at_end=no", "checkpoint.interval=1"]
    own += ["checkpoint.shared=no", "checkpoint.replicas=2", f"output_dir={tmp_path}/own"]
    own = settled(own)
    last = f"machine{count - 1}"
    runs += [{"until": 1, "words": own}, {"lose": f"{tmp_path}/own", "of": "machine0"}]
    runs += [{"until": 2, "words": own}, {"lose": f"{tmp_path}/own", "of": last}, own]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    with Machines(count) as machines:
        folders = own_folders(machines, tmp_path / "own")
        command = [ONE_AFTER_ANOTHER, str(tmp_path / "runs.json")]
        env = {"PYTHONPATH": str(ROOT)}  # the script imports tests.lib
        codes = machines.torchrun(command, ranks, said=outputs(machines, tmp_path), env=env)
    assert codes == [0] * count, said(tmp_path)
    for name in LAYOUTS[count, ranks]:
        assert losses(tmp_path / name) == pytest.approx(expected, rel=TOLERANCE), name
    for name in RESUMES:
        resumed = losses(tmp_path / f"{name} resumed")
        assert resumed == pytest.approx(expected[2:], rel=TOLERANCE), name
    # The run has begun before: only the first machine has lost the metrics of step 1.
    assert losses(folders[0]) == pytest.approx(expected[1:], rel=TOLERANCE)
    files = [names(folder / "checkpoints" / "step-00000003") for folder in folders]
    at = [{rank_of(file) for file in found} - {None} for found in files]
    ring = [*range(count), 0]
    of = [{*range(n * ranks, (n + 1) * ranks)} for n in range(count)]
    assert at == [of[n] | of[n - 1] for n in ring[:-1]]
    assert not list((tmp_path / "own").iterdir())  # no machine sees it


def own_folders(machines, folder):
    """Mount another folder over ``folder`` on each machine; return these folders."""
    folder.mkdir(exist_ok=True)
    found = [folder.with_name(f"{folder.name}.{machine.name}") for machine in machines]
    for machine, mine in zip(machines, found, strict=True):
        mine.mkdir(exist_ok=True)
        machine.bind(mine, folder)
    return found


@pytest.mark.tier("long")
def test_a_machine_with_another_folder_ends_the_run(words, tmp_path):
    for folder in ("out", "another"):
        (tmp_path / folder).mkdir()
    with Machines(2) as machines:
        machines[1].bind(tmp_path / "another", tmp_path / "out")
        command = [IMPATIENT, "2", "debug", *words, f"output_dir={tmp_path}/out"]
        codes = machines.torchrun(command, said=outputs(machines, tmp_path))
    assert 0 not in codes
    problem = (
        r"' is not one folder for all ranks: on machine1 \(rank 1\) a file that rank 0 writes there"
    )
    for path in outputs(machines, tmp_path):
        assert re.search(rf"^error: output_dir: .*/out{problem} is not", path.read_text(), re.M)
        assert "choose one on a file system that all machines" in path.read_text()
        assert "or set checkpoint.shared no" in path.read_text()
    assert not list((tmp_path / "another").iterdir())


@pytest.mark.tier("long")
def test_machines_that_lose_power_and_one_its_disk_go_on(words, tmp_path):
    words = [*words, "model.num_layers=2", "train.steps=12", "optim.lr=1e-4"]
    Trainer(Config.load("debug", settled([*words, f"output_dir={tmp_path}/one"]), environ={})).fit()
    words += ["parallel.dp_shard=2", "checkpoint.shared=no", "checkpoint.replicas=2"]
    words += ["checkpoint.interval=1", f"output_dir={tmp_path}/out"]
    command = ["-m", "moetrain.train", "debug", *settled(words)]
    with Machines(2) as machines:
        folders = own_folders(machines, tmp_path / "out")
        agents = machines.agents(command, said=outputs(machines, tmp_path))
        wait_for_steps(folders[0], 4, agents)
    shutil.rmtree(folders[1])
    again = tmp_path / "again"
    again.mkdir()
    with Machines(2) as machines:
        own_folders(machines, tmp_path / "out")
        assert machines.torchrun(command, said=outputs(machines, again)) == [0, 0], said(again)
    assert int(re.search(r"resuming from \S*step-(\d+)", said(again))[1]) >= 3
    assert losses(folders[0]) == pytest.approx(losses(tmp_path / "one"), rel=TOLERANCE)


# ---- cables ------------------------------------------------------------------------------------


def wait_for_steps(folder, steps, agents):
    """Wait until this many steps are logged; return the seconds of each."""
    end = time.monotonic() + 300
    while True:
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
        if len(rows) >= steps:
            return [row["step_seconds"] for row in rows]
        assert all(agent.poll() is None for agent in agents)
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.tier("long")
def test_a_cable_that_is_slow_and_then_cut(words, tmp_path):
    """Steps become slow; no machine keeps waiting after the cut, and the run resumes."""
    words = [*words, "model.num_layers=2", "train.steps=12", "optim.lr=1e-4"]
    words += ["checkpoint.interval=2", f"output_dir={tmp_path}/out"]
    Trainer(Config.load("debug", settled([*words, f"output_dir={tmp_path}/one"]), environ={})).fit()
    # TCP gives up where data is under way. A rank that only waits is ended by this setting.
    command = ["-m", "moetrain.train", "debug", *words, "launch.hang_seconds=50"]
    with Machines(2) as machines:
        for machine in machines:  # TCP would wait for a quarter of an hour
            do(*machine.inside("sysctl", "-w", "net.ipv4.tcp_retries2=4"))
        agents = machines.agents(command, said=outputs(machines, tmp_path))
        fast = min(wait_for_steps(tmp_path / "out", 5, agents))
        machines.limit(rate="10mbit")
        *_, slow = wait_for_steps(tmp_path / "out", 7, agents)
        assert slow > 4 * fast
        machines.cut(machines[1])
        cut = time.monotonic()
        codes = [agent.wait(timeout=120) for agent in agents]
        print(f"ended {time.monotonic() - cut:.0f} s after the cut: {codes}")
        assert 0 not in codes
        machines.mend(machines[1])
        machines.limit()
        again = tmp_path / "again"
        again.mkdir()
        assert machines.torchrun(command, said=outputs(machines, again)) == [0, 0], said(again)
    assert "resuming from" in said(again)
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "one"), rel=TOLERANCE)
