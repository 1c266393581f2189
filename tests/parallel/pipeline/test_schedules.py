"""Pipeline schedules in simulation: order, deadlocks, bubble and activations."""

import subprocess
import sys
from itertools import chain, product
from pathlib import Path

import pytest

from moetrain.config import Config
from moetrain.parallel.pipeline.schedules import (
    SCHEDULES,
    Schedule,
)
from moetrain.parallel.pipeline.stages import StagePlan
from moetrain.train.session import resolve_run

RANKS = range(2, 9)
CASES = [
    (name, ranks, virtual)
    for name, kind in SCHEDULES.items()
    for ranks in RANKS
    for virtual in range(1, 5)
    if virtual in kind.stages_per_rank
]


def counts(name, ranks):
    """Return numbers of micro-batches: fewer than ranks, odd ones, and 64 (or nearly)."""
    if SCHEDULES[name].by_rounds:
        return [ranks, 2 * ranks, 3 * ranks, 64 // ranks * ranks]
    return sorted({1, 2, ranks - 1, ranks, 2 * ranks - 1, 2 * ranks + 3, 37, 64})


def times(forward, backward):
    """Return the time of an action."""
    return lambda action: forward if action.kind == "F" else backward


def idle_times(schedule, costs):
    timeline = schedule.simulate(times(*costs))
    spans = [[timeline.times[action] for action in actions] for actions in schedule.actions]
    return [timeline.makespan - sum(end - start for start, end in own) for own in spans]


def published_peak(name, r, p, v, m):
    """Return the published largest number of (stage, micro-batch) activations on rank r of p."""
    interleaved = (v - 1) * p + 2 * (p - r) - 1
    return min(v * m, {"gpipe": m, "1f1b": p - r, "interleaved_1f1b": interleaved}[name])


@pytest.mark.parametrize(("name", "ranks", "virtual"), CASES)
def test_bubble_and_peak_are_the_published_ones(name, ranks, virtual):
    for number in counts(name, ranks):
        schedule = Schedule.make(name, ranks, virtual, number)
        check_actions(schedule, "FB", number)
        for costs in ((1, 2), (2, 4)):
            wanted = (ranks - 1) * sum(costs)  # with stages 1/v as long: (p - 1)(f + b) / v
            assert idle_times(schedule, costs) == pytest.approx([wanted] * ranks), (number, costs)
        for rank in range(ranks):
            held = schedule.in_flight(rank)
            assert held[-1] == 0
            assert max(held) == published_peak(name, rank, ranks, virtual, number)


def test_1f1b_worked_example():
    schedule = Schedule.make("1f1b", 2, 1, 3)
    text = [" ".join(map(str, actions)) for actions in schedule.actions]
    assert text == ["F0.0 F1.0 B0.0 F2.0 B1.0 B2.0", "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1"]


def test_less_bubble_for_the_same_memory():
    """The table has each schedule's share of idle time at one size."""

    def share(name, virtual=1):
        time_of = times(1 / virtual, 2 / virtual)
        return Schedule.make(name, 4, virtual, 8).simulate(time_of).bubble

    assert share("gpipe") == pytest.approx(3 / 11) == share("1f1b")
    assert share("interleaved_1f1b", 2) == pytest.approx(1.5 / 9.5)


def test_communication_lengthens_a_schedule():
    schedule = Schedule.make("1f1b", 4, 1, 8)
    fast, slow = (schedule.simulate(communication=c).makespan for c in (0, 0.5))
    assert slow - fast >= 2 * 3 * 0.5  # at least there and back


@pytest.mark.parametrize(("name", "ranks", "virtual"), CASES)
def test_transfers_never_wait_for_each_other(name, ranks, virtual):
    """This holds even if every batch blocks its rank until all its partners have posted theirs."""
    for number in counts(name, ranks)[:-1]:
        schedule = Schedule.make(name, ranks, virtual, number)
        check_steps(schedule)
    forward = Schedule.forward_only(schedule.rank_of_stage, 5)
    check_actions(forward, "F", 5)
    check_steps(forward)


def check_actions(schedule, kinds, number):
    """Check that every stage's rank runs each action once, after the actions that it depends on."""
    wanted = product(kinds, range(schedule.num_stages), range(number))
    assert sorted(chain(*schedule.actions)) == sorted(wanted)
    for rank, actions in enumerate(schedule.actions):
        assert {schedule.rank_of_stage[action.stage] for action in actions} == {rank}
        at = {action: i for i, action in enumerate(actions)}
        for action in actions:
            assert all(at.get(other, -1) < at[action] for other in schedule.needs(action))


def check_steps(schedule):
    plans = schedule.steps()
    at, done, arrived = [0] * schedule.num_ranks, set(), [set() for _ in plans]
    moved = True
    while moved:
        moved = False
        for rank, plan in enumerate(plans):
            if at[rank] == len(plan):
                continue
            step = plan[at[rank]]
            if isinstance(step, list):
                partners = {r for t in step for r in (t.source, t.target)}
                heads = {r: plans[r][at[r]] if at[r] < len(plans[r]) else None for r in partners}
                for transfer in step:
                    other = transfer.target if transfer.source == rank else transfer.source
                    head = heads[other]
                    passed = any(
                        isinstance(s, list) and transfer in s for s in plans[other][: at[other]]
                    )
                    posted = isinstance(head, list) and transfer in head
                    if not (posted or passed):
                        break
                    assert transfer.made in done
                    if transfer.target == rank:
                        arrived[rank].add((transfer.made, transfer.receiver))
                else:
                    at[rank], moved = at[rank] + 1, True
                continue
            for needed in schedule.needs(step):
                here = schedule.rank_of_stage[needed.stage] == rank
                assert needed in done
                assert here or (needed, step.stage) in arrived[rank]
            done.add(step)
            at[rank], moved = at[rank] + 1, True
    assert at == [len(plan) for plan in plans], f"{schedule.name}: ranks wait for ever at {at}"
    # Between two ranks, both order the messages of one direction alike.
    for rank, plan in enumerate(plans):
        for other, theirs in enumerate(plans):
            mine, same = (
                [t for s in p if isinstance(s, list) for t in s
                 if (t.source, t.target) == (rank, other)]
                for p in (plan, theirs)
            )  # fmt: skip
            assert mine == same


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("1f1b", 4, 2, 8), ["2 stages a rank", "1f1b takes 1"]),
        (("interleaved_1f1b", 4, 1, 8), ["1 stages a rank", "interleaved_1f1b takes 2 to 64"]),
        (("interleaved_1f1b", 4, 2, 6), ["6 micro-batches", "multiple of its 4", "gpipe or 1f1b"]),
    ],
)
def test_bad_settings_say_what_is_possible(settings, words):
    with pytest.raises(ValueError, match=r"schedule|rank|micro") as caught:
        Schedule.make(*settings)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.tier("long")
def test_a_drawing_of_a_schedule(tmp_path):
    script = Path(__file__).parents[3] / "scripts" / "draw_schedule.py"
    words = ["gpipe", "interleaved_1f1b", "--ranks", "3", "--micro_batches", "6"]
    words += ["--out", str(tmp_path / "two")]
    found = subprocess.run([sys.executable, script, *words], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "bubble" in found.stdout
    assert (tmp_path / "two.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "two.svg").read_text()
    bad = subprocess.run([sys.executable, script, "2f2b"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert len(bad.stderr.splitlines()) == 1
    assert "2f2b" in bad.stderr


@pytest.mark.parametrize(
    ("costs", "head", "ranks", "sizes"),
    [
        ([1] * 8, 0, (0, 1, 2, 3), (2, 2, 2, 2)),
        ([1] * 24, 4, (0, 1, 2, 3), (7, 7, 7, 3)),  # a head of four blocks
        ([5, 1, 1, 1, 1, 1], 0, (0, 1), (1, 5)),  # a first block unlike the others
        ([1] * 4, 9, (0, 1, 2, 3), (1, 1, 1, 1)),
        # A rank with the head may have fewer blocks in any of its stages.
        ([1] * 12, 4.3, (0, 1, 0, 1), (4, 3, 4, 1)),
    ],
)
def test_ranks_are_balanced(costs, head, ranks, sizes):
    assert StagePlan.balance(tuple(costs), head, ranks) == sizes


def test_blocks_weigh_what_they_take_on_a_gpu():
    """On two H200s with 4,096 tokens, 8 blocks took 49.2 ms, and 4 blocks with the head 36.1."""
    words = ["model.num_layers=12", "train.micro_batch_size=1", "train.global_batch_size=16"]
    config, arch = resolve_run(Config.load("bench-qwen3-30b-a3b-24l", [*words, "parallel.pp=2"]))
    assert [len(blocks) for blocks in StagePlan(config, arch).ranges] == [7, 5]


def test_interleaved_stages_alternate_over_ranks():
    assert Schedule.make("interleaved_1f1b", 3, 2, 3).rank_of_stage == (0, 1, 2, 0, 1, 2)
