"""scripts/simulate.py compared with measurements, with formulas, and with invariants."""

import json
import os
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import simulate as script
import torch
from simulated_ranks import Group, Links, Mesh, PartWork, Step, Work
from streams import Simulation

from moetrain.config import Config
from moetrain.parallel.mesh import ParallelDims
from moetrain.parallel.pipeline.schedules import SCHEDULES, Schedule
from moetrain.parallel.pipeline.stages import StagePlan
from moetrain.parallel.world import plan_world
from moetrain.train.estimates import speed
from moetrain.train.estimates.memory import RankSizes
from moetrain.train.session import resolve_run
from tests.lib.speed_rows import BOTH, FOUR, FP8, HALF, ONE_AFTER_ANOTHER, PAGE, ROWS, SIX

ROOT = Path(__file__).resolve().parents[2]
EIGHT = f"{BOTH} model.num_layers=8"
LONG = f"parallel.cp=2 train.global_batch_size=1 activation.policy=selective {HALF} model.rope=yarn"
ROW = "data.seq_len=131072 model.max_positions=131072"
# Rows like ROWS with other settings and GPUs, which were not used to fit the rates.
OTHERS = [
    ("h100", 1, 12, f"{SIX} {HALF}", "102,460"),
    ("h100", 1, 12, f"{SIX} {HALF} {FP8}", "108,290"),
    ("h100", 2, 8, EIGHT, "82,100"),
    ("h100", 2, 8, f"{EIGHT} {FP8}_gradients", "95,780"),
    ("h200", 1, 8, f"{SIX} {HALF}", "101,600"),
    ("h200", 1, 8, f"{SIX} {HALF} model.preset=moonlight-16b-a3b", "91,540"),
    ("h200", 1, 8, f"{HALF} {FOUR} model.preset=gpt-oss-20b", "73,550"),
    ("h200", 1, 8, f"{HALF} model.preset=glm-4.5-air model.num_layers=3", "56,990"),
    ("h200", 2, 1, f"{LONG} {ROW} model.num_layers=12", "10,150"),
    ("h100", 2, 1, f"{LONG} {ROW} {SIX}", "19,490"),
    ("h100", 2, 1, f"{LONG} {ROW} {FOUR}", "28,180"),
    ("h100", 2, 5, f"{SIX} parallel.ep=2 moe.force_balanced=yes", "95,500"),
    ("h200", 4, 8, f"{SIX} parallel.ep=4 moe.force_balanced=yes", "100,100"),
]
# (gpu, GPUs, micro-batch, rows of the hottest rank divided by the mean, even rate, share of it)
UNEVEN = [
    ("h100", 2, 5, 1.2, "95,500", "95.6 %"),
    ("h100", 2, 5, 1.9, "95,500", "84.9 %"),
    ("h200", 4, 8, 2.4, "100,100", "77.2 %"),
]
OFF = [
    # Its script has no balancing loss, and its routing's imbalance is unknown.
    ("h200", 2, 1, f"{ONE_AFTER_ANOTHER} parallel.ep=2", "41,300", 0.15),
    # It was not profiled.
    (
        "h100",
        2,
        1,
        f"{LONG} {ROW} model.num_layers=4 parallel.cp_method=all_gather",
        "24,030",
        0.12,
    ),
]


def config_of(gpus, rows, words, gpu="h200"):
    batch = [f"train.micro_batch_size={rows}", f"train.global_batch_size={rows * gpus}"]
    names = {word.partition("=")[0] for word in words.split()}
    batch = [word for word in batch if word.partition("=")[0] not in names]
    planned = [f"launch.gpus={gpus}", f"launch.gpu={gpu}"]
    return Config.load("bench-qwen3-30b-a3b", [*batch, *planned, *words.split()], environ={})


def check(gpu, gpus, rows, words, measured, tolerance=0.1):
    assert measured in PAGE, "docs/benchmarks.md has another figure now: take it over"
    found = script.simulate(config_of(gpus, rows, words, gpu), gpu)
    assert found.rate == pytest.approx(float(measured.replace(",", "")), rel=tolerance)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}-{row[3]}")
def test_simulated_rates_match_measured_ones(row):
    check("h200", *row)


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: f"{row[1]}-{row[0]}-{row[3]}-{row[4]}")
def test_simulated_rates_match_measurements_that_fitted_no_rate(row):
    check(*row)


@pytest.mark.parametrize("row", UNEVEN)
def test_the_hottest_rank_is_waited_for(row, monkeypatch):
    gpu, gpus, rows, hottest, even, share = row
    assert share in PAGE, "docs/benchmarks.md has another figure now: take it over"
    monkeypatch.setattr(speed, "_IMBALANCE", (hottest - 1) / (gpus / 2))
    measured = float(even.replace(",", "")) * float(share.removesuffix(" %")) / 100
    found = script.simulate(config_of(gpus, rows, f"{SIX} parallel.ep={gpus}", gpu), gpu)
    assert found.rate == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("row", OFF, ids=lambda row: row[4])
def test_simulated_rates_with_larger_errors(row):
    check(*row)


def works_of(config):
    config, arch = resolve_run(config)
    dims = plan_world(config, arch, config.launch.gpus)
    plan = StagePlan(config, arch)
    ranks = RankSizes.of_ranks(config, arch, dims, torch.bfloat16)
    return [script.work_of(rank, plan, p, "h200") for p, rank in enumerate(ranks)]


def test_a_block_and_the_head_take_what_was_measured():
    """The pipelines ran on two H200s (docs/log/pipeline.md, 3796cb2). A backward takes more than
    twice its forward there, since every micro-batch adds the gradients of all experts."""
    first, last = works_of(config_of(2, 1, f"{ONE_AFTER_ANOTHER} parallel.pp=2"))
    (parts, *_) = first.blocks.values()
    assert sum(part.forward for part in parts) == pytest.approx(1.4e-3, rel=0.1)
    assert sum(part.backward for part in parts) == pytest.approx(4.8e-3, rel=0.1)
    assert last.head == pytest.approx(11.5e-3, rel=0.1)
    assert first.head == 0


def test_of_two_machines_a_token_comes_to_either_once():
    """With eight experts per token on 2 machines of 8 ranks, 1.0 rows cross instead of 3.2."""
    (work,) = works_of(config_of(16, 1, f"{SIX} parallel.ep=16"))
    _, experts = work.blocks[0]
    ((axis, size, _),) = experts.exchanges
    row = 4096 * 2048 * 2
    assert (axis, size / row / 2) == ("ep", pytest.approx(3.2, abs=0.05))
    assert experts.once * size / row / 2 == pytest.approx(1.0, abs=0.01)


# ---- pipelines -----------------------------------------------------------------------------------

FREE = Links(inside=1e30, across=1e30, hop=0.0, start=0.0)


def step_of(works, schedule, links=FREE, slow=None, **degrees):
    ranks = schedule.num_ranks
    dims = ParallelDims(**{"world_size": ranks, "pp": ranks, **degrees})
    ranges = [range(i, i + 1) for i in range(schedule.num_stages)]
    return Step(works, schedule, ranges, Mesh(dims), links, slow or {})


def uniform(schedule, forward, backward, **more):
    """Return the work of ranks with equal stages of one block each."""
    owners = list(enumerate(schedule.rank_of_stage))
    parts = [PartWork(forward, backward)]
    blocks = [{s: parts for s, r in owners if r == rank} for rank in range(schedule.num_ranks)]
    return [Work(each, **more) for each in blocks]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 2, 8)])
def test_bubbles_are_those_of_the_formulas(name, p, v, m):
    """Each of p ranks idles for (p - 1)(f + b) / v."""
    v = v if v in SCHEDULES[name].stages_per_rank else 1
    schedule = Schedule.make(name, p, v, m)
    seconds = step_of(uniform(schedule, 3.0 / v, 6.0 / v), schedule).run()
    assert seconds == pytest.approx(m * 9.0 + (p - 1) * 9.0 / v)
    assert seconds == pytest.approx(schedule.simulate(lambda x: 3.0 * x.unit_time / v).makespan)


def test_messages_between_stages_take_the_link_that_there_is():
    schedule = Schedule.make("gpipe", 2, 1, 1)
    works = uniform(schedule, 1.0, 2.0, border=10.0)
    near = Links(inside=5.0, across=2.0, hop=0.25, start=0.5)
    assert step_of(works, schedule, near).run() == pytest.approx(6 + 2 * (2 + 0.5) + 0.5)
    # There is one GPU per machine; the sum of norms crosses machines too.
    assert step_of(works, schedule, near, per_machine=1).run() == pytest.approx(
        6 + 2 * (5 + 0.75) + 0.75
    )


def test_the_head_is_in_the_last_stages_forward():
    """Its loss makes gradients at once, so gpipe's first rank waits for every head."""
    schedule = Schedule.make("gpipe", 2, 1, 8)
    works = uniform(schedule, 1.0, 2.0, head=3.0)
    last = works[1]
    works = [Work(works[0].blocks), last]
    assert step_of(works, schedule).run() == pytest.approx(1 + 8 * 4.0 + 2.0 + 8 * 2.0)


# ---- links ---------------------------------------------------------------------------------------


def sharded(forward=1e-9, backward=1e-9, **more):
    """Return the work of six blocks, gathered and reduced."""
    blocks = {i: [PartWork(forward, backward)] for i in range(6)}
    sizes = {i: {"fsdp": 100.0} for i in blocks}
    return Work(blocks, sizes, {"fsdp": 50.0}, **{"turns": 6, **more})


def run_sharded(links, work=None, number=1, slow=None, world=16, **degrees):
    work = work or sharded()
    schedule = Schedule.make("1f1b", 1, 1, number)
    dims = ParallelDims(world, **{"dp_shard": world, "per_machine": 8, **degrees})
    step = Step([work], schedule, [range(len(work.blocks))], Mesh(dims), links, slow or {})
    return step.run(), step.simulation


@pytest.mark.parametrize("slower", ["inside", "across"])
def test_a_link_twice_as_slow_doubles_a_step_that_it_bounds(slower):
    links = Links(inside=1e3, across=1e9, hop=0.0, start=0.0)
    if slower == "across":
        links = Links(inside=1e9, across=1e3, hop=0.0, start=0.0)
    whole = run_sharded(links)[0]
    half = run_sharded(links._replace(**{slower: 500.0}))[0]
    assert half == pytest.approx(2 * whole, rel=1e-6)
    config = config_of(16, 1, "")
    given = Links(2.7e11, 1e9)
    slow, slower = (
        script.simulate(config, "h200", given._replace(across=rate)).seconds for rate in (2e9, 1e9)
    )
    assert slower == pytest.approx(2 * slow, rel=0.05)


def test_a_ring_brings_a_machine_everything_once_and_an_all_to_all_each_gpu_its_own():
    """Gathers of 16 ranks on two machines send an eighth of a reduction's bytes between them."""
    _, simulation = run_sharded(Links(inside=1e9, across=1e3, hop=0.0, start=0.0))
    times = {}
    for one in simulation.operations:
        if one.label in ("gather block 0", "reduce block 0"):
            times.setdefault(one.kind, one.end - one.start)
    assert times["gather"] == pytest.approx(100 / 2 / 8 / 1e3)
    assert times["reduce"] == pytest.approx(100 / 2 / 1e3)


def test_all_to_alls_across_may_have_a_rate_of_their_own():
    busy = {}
    for direct in (None, 500.0):
        links = Links(inside=1e9, across=1e3, hop=0.0, start=0.0, direct=direct)
        _, simulation = run_sharded(links)
        for kind in ("gather", "reduce"):
            own = [x for x in simulation.operations if x.kind == kind]
            busy[direct, kind] = sum(x.uses[x.streams[0][0], "adapter", "in"] for x in own)
    assert busy[500.0, "gather"] == busy[None, "gather"]
    assert busy[500.0, "reduce"] == pytest.approx(2 * busy[None, "reduce"])


def test_all_reduces_and_a_tokens_way_across_may_have_rates_of_their_own_too():
    links = Links(1e9, 1e3, 0.0, 0.0, direct=500.0, sums=250.0)
    _, simulation = run_sharded(links, sharded(copies=80.0), dp_shard=8, dp_replicate=2)
    (made,) = (one for one in simulation.operations if one.kind == "replicas")
    assert made.end - made.start == pytest.approx(80 / 2 / 250)
    part = PartWork(1.0, 2.0, [("ep", 160.0, (2, 2))], once=0.25)
    _, simulation = run_sharded(links, Work({0: [part]}), ep=16)
    times = {one.label: one.end - one.start for one in simulation.operations}
    assert times["dispatch F0.0, block 0, across"] == pytest.approx(0.25 * 80 / 500)


def test_collectives_of_the_same_ranks_share_a_communicator_and_go_in_order():
    """On two machines of one rank, the expert parallel ranks are also those that shard the rest."""
    part = PartWork(1.0, 1.0, [("ep", 20.0, (2, 2))])
    work = sharded()
    work = Work({i: [part] for i in work.blocks}, work.gathered, work.vocabulary)
    links = Links(1e9, 1.0, 0.0, 0.0)
    _, simulation = run_sharded(links, work, world=2, per_machine=1, ep=2)
    first = {one.label: one for one in reversed(simulation.operations)}
    ahead = first["gather block 2"]
    assert first["dispatch F0.0, block 1, across"].start == pytest.approx(ahead.end)
    # A pair of four ranks exchanges tokens, beside the gather of all.
    _, simulation = run_sharded(links, work, world=4, per_machine=1, ep=2)
    first = {one.label: one for one in reversed(simulation.operations)}
    assert first["dispatch F0.0, block 1, across"].start < first["gather block 2"].end
    names = {name for _, name in simulation.busy()}
    assert names == {"compute", "collectives over fsdp", "collectives over ep"}


def test_hops_have_communicators_of_their_own():
    part = PartWork(1.0, 2.0, [("ep", 160.0, (2, 2))])
    _, simulation = run_sharded(Links(1e9, 1e3), Work({0: [part]}), ep=16)
    names = {name for _, name in simulation.busy()} - {"compute"}
    hops = {f"collectives over a hop of {n} ranks" for n in (2, 8)}
    assert names == {*hops, "collectives over fsdp, ep"}
    assert Group(tuple(range(4, 8)), 2).hop(6, "across") == (4, 6)
    assert Group(tuple(range(4, 8)), 2).hop(6, "inside") == (6, 7)


def test_an_adapter_may_carry_less_while_several_send_and_while_the_gpu_computes():
    links = Links(1e9, 10.0, 0.0, 0.0)
    part = PartWork(1e-9, 1e-9, [("ep", 20.0, (2, 0))])
    work = Work({0: [part], 1: [part]}, {1: {"fsdp": 100.0}}, share_trained=0.0)
    shared = {"world": 4, "per_machine": 1, "ep": 2}
    whole, simulation = run_sharded(links, work, **shared)
    sent = [x for x in simulation.operations if x.label == "dispatch F0.0, block 0, across"]
    assert sent[0].end - sent[0].start == pytest.approx(2.0)  # half each, beside the gather
    less, simulation = run_sharded(links._replace(together=0.5), work, **shared)
    sent = [x for x in simulation.operations if x.label == "dispatch F0.0, block 0, across"]
    assert sent[0].end - sent[0].start == pytest.approx(4.0)
    assert less - whole == pytest.approx(4.0)
    slow, _ = run_sharded(links._replace(beside=0.5), sharded(10.0, 20.0), number=1, **shared)
    fast, _ = run_sharded(links, sharded(10.0, 20.0), number=1, **shared)
    assert slow > fast + 5.0


def test_one_unit_is_gathered_ahead_and_reductions_are_waited_for_one_later():
    work = sharded(1.0, 2.0)
    seconds, simulation = run_sharded(Links(1e3, 1e3, 0.0, 0.0), work, world=8)
    first = {one.label: one for one in reversed(simulation.operations)}
    computed = [first[f"F0.0, block {i}"] for i in range(6)]
    for i in range(1, 5):  # while block i computes, block i + 1 is gathered
        assert first[f"gather block {i + 1}"].start == pytest.approx(computed[i].start)
    backward = [first[f"B0.0, block {i}"] for i in range(6)]
    for i in range(6):
        assert first[f"reduce block {i}"].start == pytest.approx(backward[i].end)
    # There are two buffers: the last two blocks are still unsharded when the backward begins.
    gathers = [one.label for one in simulation.operations if one.kind == "gather"]
    assert gathers.count("gather block 5") == gathers.count("gather block 4") == 1
    assert gathers.count("gather block 3") == 2
    # The embedding comes before everything, its gradient after it; only one other exchange is
    # exposed.
    assert seconds < 6 * 3 + 0.3


def test_a_slow_reduction_holds_the_backward_after_the_next():
    work = sharded(1.0, 2.0, turns=0)
    _, simulation = run_sharded(Links(20.0, 1.0, 0.0, 0.0), work, world=8)
    first = {one.label: one for one in simulation.operations}
    for i in range(3):
        reduced = first[f"reduce block {i + 2}"].end
        assert first[f"B0.0, block {i}"].start == pytest.approx(reduced)


@pytest.mark.parametrize(("last", "count"), [(False, 24), (True, 8)])
def test_gathered_once_a_step_and_reduced_each_time_or_last(last, count):
    work = sharded(turns=0, reduces_last=last)
    _, simulation = run_sharded(Links(1e3, 1e3), work, number=3)
    kinds = [one.kind for one in simulation.operations]
    assert kinds.count("gather") == 8
    assert kinds.count("reduce") == count


def test_copies_within_a_machine_leave_products_alone_and_collectives_do_not():
    links = Links(100.0, 100.0, 0.0, 0.0)
    works = [sharded(1.0, 2.0, by_copies=by_copies) for by_copies in (True, False)]
    copies, collectives = (run_sharded(links, work, world=8)[0] for work in works)
    assert 1.02 * copies < collectives < 1.13 * copies + 0.5


def test_tokens_cross_once_a_machine_and_sums_one_by_one():
    part = PartWork(1.0, 2.0, [("ep", 160.0, (2, 2))], once=0.25)
    links = Links(inside=140.0, across=10.0, hop=0.0, start=0.0)
    _, simulation = run_sharded(links, Work({i: [part] for i in range(6)}), ep=16)
    times = {one.label: one.end - one.start for one in simulation.operations}
    for action in ("F0.0", "B0.0"):
        found = [times[f"{way} {action}, block 2{hop}"] for way, hop in HOPS]
        assert found == pytest.approx([0.25 * 80 / 10, 160 * 7 / 8 / 140, 80 / 10])
    _, simulation = run_sharded(links, Work({0: [part]}), world=8, ep=8)
    times = [one.end - one.start for one in simulation.operations if one.kind == "dispatch"]
    assert times == pytest.approx([1.0] * 4)


HOPS = ("dispatch", ", across"), ("dispatch", ", inside"), ("combine", "")


def test_replicas_of_a_machine_each_add_their_gradients_up():
    links = Links(1e9, 1e3, 0.0, 0.0)
    works = [sharded(copies=80.0) for _ in range(2)]
    alone = run_sharded(links, works[0], world=8)[0]
    two = run_sharded(links, works[1], world=16, dp_shard=8, dp_replicate=2)[0]
    assert two - alone == pytest.approx(80 / 2 / 1e3, rel=1e-3)


# ---- machines ------------------------------------------------------------------------------------

MESHES = [
    "",
    "parallel.dp_replicate=2 parallel.dp_shard=8",
    "parallel.ep=8",
    "parallel.ep=16",
    "parallel.pp=2 train.global_batch_size=32 parallel.pp_schedule=gpipe",
    "parallel.pp=4 train.global_batch_size=32 parallel.tp=2",
]


@pytest.mark.parametrize("words", MESHES)
def test_machines_that_are_alike_may_be_one(words):
    config = config_of(16, 1, f"{words} model.num_layers=8")
    one, both = (script.simulate(config, "h200", slow=slow) for slow in ({}, {0: 1.0}))
    assert both.seconds == pytest.approx(one.seconds, rel=1e-9)
    machines = {rank // 8 for rank, _ in both.simulation.busy()}
    assert machines == {0, 1}


def test_a_slow_machine_holds_all_of_them():
    config = config_of(32, 4, "model.num_layers=6")
    plain, slow = (script.simulate(config, "h200", slow={3: x}) for x in (1.0, 1.5))
    assert 1.2 * plain.seconds < slow.seconds < 1.5 * plain.seconds
    waits = slow.simulation.waits()
    assert sum(waits[24, "compute"].values()) < 0.8 * sum(waits[0, "compute"].values())


@pytest.mark.parametrize("words", MESHES)
def test_no_stream_runs_two_things_at_once_and_no_link_more_than_it_can(words):
    links = Links(2.7e11, 5e10)
    config = config_of(16, 1, f"{words} model.num_layers=8 {BOTH}")
    simulation = script.simulate(config, "h200", links, {1: 1.1}).simulation
    by_stream, used = {}, {}
    for one in simulation.operations:
        assert 0 <= one.start <= one.end
        assert all(needed.end <= one.start + 1e-12 for needed in one.needs)
        for stream in one.streams:
            by_stream.setdefault(stream, []).append((one.start, one.end))
        for resource, amount in one.uses.items():
            used[resource] = used.get(resource, 0.0) + amount
    for times in by_stream.values():
        assert all(b[0] >= a[1] - 1e-12 for a, b in pairwise(times))
    whole = max(one.end for one in simulation.operations)
    for resource, amount in used.items():
        assert amount <= whole * simulation.capacity.get(resource, 1.0) * (1 + 1e-9)
    busy = simulation.busy()
    assert all(seconds <= whole * (1 + 1e-9) for seconds in busy.values())


# Rows of docs/machines.md: settings, milliseconds, and the tolerance of the simulation.
MACHINES = [
    ("--rows 4 --parallel.dp_shard 2", "3.15, 2.07, 3.09", "1,586", "1,596"),
    (
        "--rows 4 --parallel.dp_replicate 2 --parallel.dp_shard 1",
        *("3.11, 2.00, 3.16", "2,518", "2,534"),
    ),
    ("--rows 1 --parallel.pp 2 --micro-batches 8", "3.60, 2.36, 3.22", "215", "208"),
    (
        "--rows 4 --parallel.ep 2 --moe.dispatcher alltoall",
        *("3.46, 2.40, 4.02", "778", "796"),
    ),
]


@pytest.mark.parametrize(("words", "rates", "measured", "said"), MACHINES)
def test_two_gpus_as_two_machines_take_what_was_measured(words, rates, measured, said, capsys):
    page = (ROOT / "docs" / "machines.md").read_text()
    command = page[page.index("python scripts/simulate.py qwen3-30b-a3b --gpus 2") :]
    command = command[: command.index("```")].replace("\\\n", "").split()[2:]
    row = next(line for line in page.splitlines() if f"`{words}` |" in line)
    problem = "docs/machines.md has other figures now: take them over"
    assert row.split(" | ")[1] == rates, problem
    assert row.split(" | ")[2].startswith(f"{measured} ms ("), problem
    assert row.split(" | ")[3] == f"{said} ms", problem
    names = ("--across", "--across-direct", "--across-sums")
    links = [x for pair in zip(names, rates.split(", "), strict=True) for x in pair]
    assert script.main([*command, *links, *words.split()]) == 0
    heads, row = capsys.readouterr().out.replace("step ms", "step").splitlines()[1:3]
    found = row.split()[heads.split().index("step")]
    assert found == said
    milliseconds = [float(x.replace(",", "")) for x in (found, measured)]
    assert milliseconds[0] == pytest.approx(milliseconds[1], rel=0.1)


# ---- streams -------------------------------------------------------------------------------------


def test_operations_that_share_a_link_take_as_long_as_in_sequence():
    simulation = Simulation({"link": 10.0})
    short, long = (
        simulation.queue("x", name, [(0, name)], uses={"link": size})
        for name, size in (("short", 20.0), ("long", 60.0))
    )
    assert simulation.run() == pytest.approx(8.0)
    assert short.end == pytest.approx(4.0)  # half of the link until then
    assert long.end == pytest.approx(8.0)


def test_operation_bound_elsewhere_leaves_the_rest_of_a_link():
    simulation = Simulation({"near": 10.0, "far": 1.0})
    far = simulation.queue("x", "far", [(0, "a")], uses={"near": 1.0, "far": 1.0})
    near = simulation.queue("x", "near", [(0, "b")], uses={"near": 10.0})
    simulation.run()
    assert far.end == pytest.approx(1.1)  # both grow alike: to 10 / 11 of each one's rate alone
    assert near.end == pytest.approx(1.1)


def test_rates_grow_until_everything_is_bound():
    simulation = Simulation({"one": 1.0, "two": 1.0})
    used = {"both": ("one", "two"), "first": ("one",), "second": ("two",), "third": ("two",)}
    both, first, *others = (
        simulation.queue("x", name, [(0, name)], uses=dict.fromkeys(links, 1.0))
        for name, links in used.items()
    )
    simulation.run()
    assert [one.end for one in (both, *others)] == pytest.approx([3.0] * 3)
    assert first.end == pytest.approx(1.5)  # two thirds; the others leave a third


def test_a_stream_goes_in_order_and_a_collective_waits_for_all_of_its_own():
    simulation = Simulation()
    first = simulation.queue("x", "first", [(0, "a")], latency=2.0)
    other = simulation.queue("x", "other", [(1, "a")], latency=5.0)
    both = simulation.queue("y", "both", [(0, "a"), (1, "a")], latency=1.0)
    late = simulation.queue("x", "late", [(2, "a")], [both], latency=1.0)
    assert simulation.run() == 7.0
    assert [one.start for one in (first, other, both, late)] == [0.0, 0.0, 5.0, 6.0]
    assert simulation.waits()[0, "a"] == {"y": 3.0}
    assert simulation.waits()[2, "a"] == {"y": 6.0}
    assert simulation.busy()[0, "a"] == 3.0


def test_simulation_raises_at_a_deadlock():
    simulation = Simulation()
    first = simulation.queue("x", "first", [(0, "a")])
    second = simulation.queue("x", "second", [(0, "a")])
    first.needs.append(second)
    with pytest.raises(RuntimeError, match="deadlock: 2 operations wait, the first is first"):
        simulation.run()


def test_an_operation_slows_what_it_takes_from():
    simulation = Simulation()
    simulation.queue("x", "products", [(0, "a")], uses={"products": 3.0})
    simulation.queue("x", "taker", [(0, "b")], latency=2.0, slows={"products": 0.5})
    assert simulation.run() == pytest.approx(2.0 + 2.0)


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_prints_a_line_for_each_number_and_writes_a_trace(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    words = ["--parallel.dp_shard", "8", "--model.num_layers", "4", "--trace", str(trace)]
    assert script.main(["qwen3-30b-a3b", "--gpus", "8", "16", *words]) == 0
    title, heads, *rows, path = capsys.readouterr().out.splitlines()
    assert "assumed between them: 50 GB/s a GPU, 10 us a machine" in title
    assert heads.split()[:3] == ["gpus", "dp_replicate", "dp_shard"]
    assert [row.split()[:3] for row in rows] == [["8", "1", "8"], ["16", "2", "8"]]
    assert path == str(trace)
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"compute", "gather", "reduce", "collectives over dp_replicate"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert any(event["name"] == "F0.0, block 3" for event in events)


def test_the_command_says_what_each_stream_waits_for(capsys):
    words = ["--gpus", "16", "--machine", "4", "--across", "5", "--model.num_layers", "4"]
    assert script.main(["qwen3-30b-a3b", *words, "--slow", "2=1.5"]) == 0
    lines = capsys.readouterr().out.splitlines()[3:]
    assert any(line.startswith("rank 0,4,12 compute: waits ") for line in lines)
    assert any(line.startswith("rank 8 compute: waits ") for line in lines)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "12"], "error: gpus: 12 are not whole machines of 8"),
        (["--gpus", "8", "--slow", "2"], "error: slow: 2: give MACHINE=FACTOR, as 3=1.2"),
        (["--gpus", "8", "--parallel.ep", "3"], "error: parallel.ep: 3"),
    ],
)
def test_simulate_refuses_bad_settings_in_one_line(words, says, capsys):
    assert script.main(["qwen3-30b-a3b", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(says)
    assert error.count("\n") == 1


@pytest.mark.tier("long")
def test_what_links_were_measured_to_carry_is_given_by_options(monkeypatch, capsys):
    """Each of two machines has one process, on this machine's CPU."""
    sent = [sys.executable, str(ROOT / "scripts" / "bench_links.py"), "--seconds", "1"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port, machines = str(free.getsockname()[1]), []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environment = os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [*sent, "--mib", "0.5", "1"]
        machine = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        machines.append(machine)
    said, nothing = (machine.communicate(timeout=120)[0] for machine in machines)
    assert [machine.returncode for machine in machines] == [0, 0]
    assert nothing == ""
    *lines, options = said.splitlines()
    assert lines[0].startswith("2 machines of 1, ")
    rates = {line.split()[2]: line.split()[3] for line in lines if line.startswith("     1 MiB")}
    names = ("all_gather", "all_to_all", "all_reduce")
    given = dict(pairwise(options.split()))
    words = ("--across", "--across-direct", "--across-sums")
    for word, name in zip(words, names, strict=True):
        assert float(given[word]) == pytest.approx(float(rates[name]), rel=0.05, abs=0.01)
    taken = []
    monkeypatch.setattr(script, "simulate", lambda *how: taken.append(how[2]) or sys.exit(7))
    with pytest.raises(SystemExit, match="7"):
        script.main(["qwen3-30b-a3b", "--gpus", "2", "--machine", "1", *options.split()])
    (links,) = taken
    assert links.across == 1e9 * float(given["--across"])
    assert links.direct == 1e9 * float(given["--across-direct"])
    assert links.sums == 1e9 * float(given["--across-sums"])
    assert links.hop == pytest.approx(1e-6 * float(given["--hop"]))
    shares = [float(given[f"--{word}"]) for word in ("together", "beside", "products")]
    assert [links.together, links.beside, links.products] == shares
    assert all(0 < share <= 1 for share in shares)
