"""Host memory of settings: the estimate, the machine's limits, and refusals."""

import json
import logging
import math
import re

import pytest
import torch

from moetrain import Config, ConfigError, Trainer
from moetrain.cli.train import main
from moetrain.parallel.world import join_world, plan_world
from moetrain.train.estimates import plan
from moetrain.train.estimates.memory import GIB, RankSizes
from moetrain.train.estimates.plan import Room, check_host, room_here
from moetrain.train.session import resolve_run
from tests.lib.distributed import spawn
from tests.lib.estimates import estimate_memory

KIB = 1024


def takes_of(world, *words):
    words = [f"parallel.{word}" if word[:2] in ("ep", "pp") else word for word in words]
    config = Config.load(None, ["model.preset=qwen3-30b-a3b", "train.global_batch_size=64", *words])
    config, arch = resolve_run(config)
    dims = plan_world(config, arch, world)
    sizes = (config, arch, dims, torch.bfloat16)
    return [rank.on_host() for rank in RankSizes.of_ranks(*sizes)], estimate_memory(*sizes), arch


def test_host_memory_of_settings():
    assert takes_of(4, "ep=4")[0] == [{}]
    (half,), estimate, arch = takes_of(4, "ep=4", "optim.offload_fraction=0.5")
    # Masters, gradients and two moments in fp32, for a quarter of one half.
    assert half == {"optim.offload_fraction": pytest.approx(16 * arch.num_params() / 8)}
    words = ["optim.offload_fraction=0.5", "rl.offload=true"]
    (every,), estimate, _ = takes_of(4, "ep=4", *words)
    assert every == half | {"rl.offload": estimate.moments}
    first, last = takes_of(4, "pp=2", "ep=2", "optim.offload_fraction=1")[0]
    both = first["optim.offload_fraction"] + last["optim.offload_fraction"]
    assert 2 * both == pytest.approx(16 * arch.num_params())


def test_adapters_take_as_little_as_is_trained():
    (takes,), *_ = takes_of(1, "optim.offload_fraction=1", "lora.rank=16")
    (plain,), *_ = takes_of(1, "optim.offload_fraction=1")
    assert 0 < 20 * takes["optim.offload_fraction"] < plain["optim.offload_fraction"]


# ---- what a machine has -------------------------------------------------------------------------


def machine(folder, groups, mine, *, available=24 * GIB):
    """Write files like the kernel's: ``groups`` by folder and name."""
    proc, root = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    lines = f"MemTotal: 99 kB\nMemAvailable:   {available // KIB} kB\nHugePages_Total: 0\n"
    (proc / "meminfo").write_text(lines)
    (proc / "self" / "cgroup").write_text(mine)
    for name, text in groups.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return room_here(proc, root)


STAT = f"anon {5 * GIB}\ninactive_file {GIB}\nactive_file {GIB}"


def test_room_of_control_groups(tmp_path):
    inner = {
        "job/memory.max": 64 * GIB,
        "job/memory.current": 10 * GIB,
        "job/memory.stat": STAT,
        "job/step/memory.max": "max",
        "job/step/memory.current": 10 * GIB,
    }
    found = machine(tmp_path / "a", inner, "0::/job/step\n")
    assert found == Room(24 * GIB, (64 - 10 + 2) * GIB)
    # A container's own group is its root, under a name that does not exist there.
    own = {f"memory.{name}": text for name, text in (("max", 8 * GIB), ("current", 9 * GIB))}
    assert machine(tmp_path / "b", own, "0::/kubepods/pod7\n").allowed == 0


def test_no_group_has_a_limit(tmp_path):
    mine = "9:name=systemd:/\n4:cpu,memory:/run\n0::/\n"
    outside = machine(tmp_path, {"memory.max": "max", "memory.current": 3 * GIB}, mine)
    assert outside == Room(24 * GIB, math.inf)
    assert outside.most == 24 * GIB


def test_this_machine_has_room():
    here = room_here()
    assert GIB / 4 < here.available < 2**50
    assert here.allowed > 0


# ---- what is refused ----------------------------------------------------------------------------

# 29 MB of masters, gradients and moments.
DEBUG = ["train.device=cpu", "train.steps=1", "optim.offload_fraction=1", "log.tensorboard=no"]


def with_room(monkeypatch, available, allowed=math.inf):
    monkeypatch.setattr(plan, "room_here", lambda: Room(available, allowed))


@pytest.mark.parametrize(
    ("room", "says"),
    [
        ((2e6,), r"it has 0\.0 GiB free; ask for less"),
        ((9e12, 2e6), r"it has 0\.0 GiB left of its control group's limit; ask for less"),
    ],
)
def test_settings_beyond_host_memory_are_refused_in_one_line(
    room, says, monkeypatch, tmp_path, capsys
):
    with_room(monkeypatch, *room)
    words = [f"--{word}" for word in (*DEBUG, f"output_dir={tmp_path}")]
    assert main(["debug", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    start = r"error: optim\.offload_fraction: 1\.0 takes more host memory than \S+ has free: "
    taken = r"0\.\d GiB: optim\.offload_fraction 0\.\d, in 1 process; "
    assert re.fullmatch(f"{start}{taken}{says}.*", line)
    assert not (tmp_path / "config.json").exists()


def test_a_limit_that_allows_it_leaves_a_warning(monkeypatch, tmp_path, caplog):
    with_room(monkeypatch, 2e6, 9e12)
    with caplog.at_level(logging.WARNING):
        Trainer(Config.load("debug", [*DEBUG, f"output_dir={tmp_path}"]))
    (message,) = [x for x in caplog.messages if "host memory" in x]
    assert message.startswith("optim.offload_fraction: 1.0 takes more")
    assert "though its control group may use more" in message


def test_host_memory_is_not_measured_without_such_settings(monkeypatch, tmp_path):
    monkeypatch.setattr(plan, "room_here", None)
    Trainer(Config.load("debug", ["train.device=cpu", "train.steps=1", f"output_dir={tmp_path}"]))


def test_dry_run_prints_host_memory(capsys, monkeypatch):
    with_room(monkeypatch, 21.4 * GIB)  # the run may be planned for another machine
    words = (
        "bench-qwen3-30b-a3b --launch.gpus 4 --optim.offload_fraction 1 --train.global_batch_size 8"
    )
    assert main([*words.split(), "--dry_run"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["optim"]["offload_fraction"] == 1
    says = r"host memory of 4 processes, estimated: 45\d\.\d GiB: optim\.offload_fraction 45\d\.\d"
    assert re.search(f"^{says}; this machine has 21.4 GiB$", printed.err, re.M)


def problem_with_room(room):
    plan.room_here = lambda: Room(room, math.inf)
    config, arch = resolve_run(Config.load("debug", [*DEBUG, "train.global_batch_size=32"]))
    try:
        world = join_world(config, arch)
        check_host(RankSizes.of_ranks(config, arch, world.dims, torch.float32), world)
    except ConfigError as error:
        return error.field, error.problem
    return None


def test_processes_of_a_machine_take_together():
    arch = resolve_run(Config.load("debug", DEBUG))[1]
    whole = 16 * arch.num_params()
    assert spawn(2, problem_with_room, 1.01 * whole) == [None, None]
    # Each would have enough alone.
    found = spawn(2, problem_with_room, 0.6 * whole)
    assert found[0] == found[1]
    assert found[0][0] == "optim.offload_fraction"
    assert "in 2 processes" in found[0][1]
