"""Trajectories: many at once on one generator, with environments that may fail in any way."""

import asyncio
import copy
import math
import sys
import time
from decimal import Decimal

import numpy as np
import pytest
import torch

from moetrain.generate.request import Request, SamplingParams
from moetrain.rl.envs import Turn
from moetrain.rl.trajectories import Trajectory
from tests.lib.architectures import put_weights
from tests.lib.collectors import STOPS, collector_of
from tests.lib.generators import make_generator, make_model


class Counting:
    """Asks ``turns`` times, with different words, and rewards the length of every answer."""

    num_tasks = None

    def __init__(self, turns=1):
        self.turns = turns

    def episode(self, task):
        return CountingEpisode(self, task)


class CountingEpisode:
    def __init__(self, environment, task):
        self.environment, self.task, self.heard = environment, task, []

    def reset(self):
        return Turn((3, 4, self.task))

    def step(self, action):
        self.heard.append(list(action))
        number = len(self.heard)
        if number == self.environment.turns:
            return Turn(reward=float(sum(map(len, self.heard))), done=True)
        return Turn((90 + number, 5), reward=0.5)


class Later(CountingEpisode):
    async def reset(self):
        await asyncio.sleep(0.01 * (self.task % 3))
        return super().reset()

    async def step(self, action):
        await asyncio.sleep(0.01 * (self.task % 2))
        return super().step(action)


def said(trajectory):
    fields = (trajectory.tokens, trajectory.is_action, trajectory.logprobs, trajectory.versions)
    return [list(field) for field in fields]


def played(environment, groups=5, **values):
    # Nothing here may take too long: beside compilers the first call can wait for half a second.
    collector = collector_of(environment, **{"step_timeout": 20, **values})
    for group in range(groups):
        collector.start(group, group, 3, seed=0)
    found = collector.finish(range(groups))
    assert collector.groups == {}
    return [[said(t) for t in group] for group in found], found, collector


def test_an_answer_is_what_the_generator_says_to_the_prompt():
    _, groups, collector = played(Counting())
    for task, group in enumerate(groups):
        assert len({tuple(t.tokens) for t in group}) == 3  # each has its own seed
        for t in group:
            params = SamplingParams(max_tokens=12, seed=t.seed, stop_ids=STOPS)
            request = Request("x", (3, 4, task), params)
            ((alone,),) = make_generator().generate([request])
            assert t.tokens == [3, 4, task, *alone.tokens]
            assert t.is_action == [False] * 3 + [True] * len(alone.tokens)
            assert t.logprobs[:3] == [0, 0, 0]
            torch.testing.assert_close(
                torch.tensor(t.logprobs[3:]), torch.tensor(alone.logprobs), rtol=1e-5, atol=1e-5
            )
            assert t.versions == [-1] * 3 + [0] * len(alone.tokens)
            assert t.reward == len(alone.tokens)
            assert t.is_overlong == (alone.finish_reason == "length")
            assert t.fault is None
    lengths = {t.num_written for group in groups for t in group}
    assert len(lengths) > 2  # some stop, some are cut off
    assert collector.generated == sum(t.num_written for group in groups for t in group)
    assert collector.seconds["generate"] > 0


def test_turns_of_several_words():
    _, groups, _ = played(Counting(turns=3), max_tokens=30)
    whole = [t for group in groups for t in group if len(t.actions) == 3]
    assert whole
    for t in whole:
        first, second, third = (t.tokens[start:stop] for start, stop in t.actions)
        assert t.tokens == [3, 4, t.task, *first, 91, 5, *second, 92, 5, *third]
        assert t.reward == 1.0 + t.num_written  # rewards of the earlier turns, and of the last
        (sample,) = t.samples(0.25)
        assert sample.is_action.sum() == t.num_written == len(first + second + third)


@pytest.mark.tier("long", quick=["1"])
@pytest.mark.parametrize("turns", [1, 3])
def test_asynchronous_environments_change_nothing(turns):
    class Slow(Counting):
        def episode(self, task):
            return Later(self, task)

    expected, _, _ = played(Counting(turns), max_tokens=30)
    found, _, _ = played(Slow(turns), max_tokens=30)
    for one, other in zip(expected, found, strict=True):
        for (tokens, acts, logprobs, versions), theirs in zip(one, other, strict=True):
            assert [tokens, acts, versions] == [theirs[0], theirs[1], theirs[3]]
            torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(theirs[2]))


@pytest.mark.tier("long")
def test_collect_cuts_off_or_drops_long_trajectories():
    _, groups, _ = played(Counting(turns=9), max_tokens=90, longest=20)
    for t in (t for group in groups for t in group):
        assert len(t.tokens) <= 20  # the environment's last words are not read
        assert t.is_overlong
    _, groups, _ = played(Counting(turns=9), max_tokens=90, max_turns=2)
    assert {len(t.actions) for group in groups for t in group} <= {1, 2}
    _, groups, _ = played(Counting(), longest=3)
    assert {t.fault for group in groups for t in group} == {"too_long"}


def hang():
    time.sleep(3600)


async def hang_later():
    await asyncio.sleep(3600)


class Odd:
    """A number as a careless environment may return it."""

    def __float__(self):
        raise KeyError("score")


FAULTS = [
    ("raised", lambda: 1 / 0),
    ("raised", sys.exit),
    ("timeout", hang),
    ("timeout", hang_later),
    ("nonsense", lambda: None),
    ("nonsense", lambda: ((1,), 0.0, False)),  # no Turn
    ("nonsense", lambda: Turn((1,), reward=float("nan"))),
    ("nonsense", lambda: Turn((1,), reward=-math.inf)),
    ("nonsense", lambda: Turn((1,), reward="1")),
    ("nonsense", lambda: Turn((1,), reward=bytearray(b"1"))),
    ("nonsense", lambda: Turn((1,), reward=Odd())),
    ("nonsense", lambda: Turn((1,), reward=10**400)),
    ("nonsense", lambda: Turn((1,), reward=1e39)),  # finite, but infinite in fp32
    ("nonsense", lambda: Turn((1,), reward=-1e20)),  # its square is infinite in fp32
    ("nonsense", lambda: Turn((1,), reward=torch.zeros(2))),
    ("nonsense", lambda: Turn((1, 264))),  # beyond the vocabulary
    ("nonsense", lambda: Turn((-1,))),
    ("nonsense", lambda: Turn("abc")),
    ("nonsense", lambda: Turn((1.0, 2.5))),
    ("nonsense", lambda: Turn((True, 1))),
    ("nonsense", lambda: Turn([1, 2])),
    ("nonsense", lambda: Turn(((1, 2), (3,)))),
    ("nonsense", lambda: Turn((1,), done=np.array([True, False]))),
]
"""Results of a faulty environment, and the word that counts each."""


@pytest.fixture(scope="module")
def sound():
    """Return two turns for each of tasks 0, 1, ... without a fault."""
    return played(Counting(2), groups=len(FAULTS) + 3, max_tokens=30)[0]


@pytest.mark.tier("long", wide=["step"])
@pytest.mark.parametrize("when", ["episode", "reset", "step"])
def test_a_fault_costs_its_own_trajectory(when, sound):
    """Every kind of fault happens at once, each in one task."""
    # The faults of episode() are found by calling it.
    faults = dict(enumerate(FAULTS[:3] if when == "episode" else FAULTS))

    class Faulty(Counting):
        def episode(self, task):
            if when == "episode" and task in faults:
                return faults[task][1]()
            return FaultyEpisode(self, task)

    class FaultyEpisode(CountingEpisode):
        def _or(self, moment, answer):
            return faults[self.task][1]() if when == moment and self.task in faults else answer

        def reset(self):
            return self._or("reset", super().reset())

        def step(self, action):
            return self._or("step", super().step(action))

    found, groups, collector = played(Faulty(2), groups=len(sound), max_tokens=30)
    for task, group in enumerate(groups):
        expected = faults[task][0] if task in faults else None
        assert [t.fault for t in group] == [expected] * 3, task
        if expected is None:
            assert [t[0] for t in found[task]] == [t[0] for t in sound[task]]
        else:
            assert all(t.detail for t in group)
    assert not collector.generator.is_busy


def test_an_episode_that_cannot_be_told_costs_its_own_trajectory():
    class Prompts:
        def reset(self):
            return Turn((3, 4))

    class Environment(Counting):
        def episode(self, task):
            return Prompts() if task == 1 else super().episode(task)

    _, groups, _ = played(Environment(), groups=3)
    assert [{t.fault for t in group} for group in groups] == [{None}, {"raised"}, {None}]


@pytest.mark.parametrize("number", [np.float32, np.int64, np.bool_, torch.tensor, bool, Decimal])
def test_rewards_are_numbers_of_any_library(number):
    class Other(CountingEpisode):
        def step(self, action):
            return Turn(reward=number(1), done=number(1))

    class Environment(Counting):
        def episode(self, task):
            return Other(self, task)

    _, groups, _ = played(Environment(), groups=2)
    for t in (t for group in groups for t in group):
        assert (t.fault, t.reward, type(t.reward)) == (None, 1.0, float)


def test_trajectories_go_on_over_new_weights():
    collector = collector_of(Counting(turns=2), max_tokens=40)
    collector.start(0, 0, 2, seed=0)
    collector.start(1, 1, 8, seed=0)
    (first,) = collector.finish([0])
    put_weights(collector.generator, make_model(seed=1).named_parameters())
    (second,) = collector.finish([1])
    assert {v for t in first for v in t.versions} == {-1, 0}
    mixed = [t for t in second if {0, 1} <= set(t.versions)]
    assert mixed
    for t in mixed:
        chosen = [v for v in t.versions if v >= 0]
        assert chosen == sorted(chosen)
        assert [v >= 0 for v in t.versions] == t.is_action


@pytest.mark.parametrize("kind", [CountingEpisode, Later])
def test_what_is_under_way_goes_on_from_a_checkpoint_with_the_same_bits(kind):
    class Environment(Counting):
        def episode(self, task):
            return kind(self, task)

    collector = collector_of(Environment(2), max_tokens=40, max_sequences=3)
    for group in range(4):
        collector.start(group, group, 3, seed=5)
    collector.finish([0])
    rows, tensors = Trajectory.to_state(collector.unfinished())
    assert any(len(row["actions"]) > 0 or row["length"] > 3 for row in rows)
    assert {row["group"] for row in rows} == {1, 2, 3}
    other = collector_of(Environment(2), max_tokens=40, max_sequences=3)
    for trajectory in Trajectory.from_state(rows, tensors):
        other.resume(trajectory)
    expected, found = (c.finish([1, 2, 3]) for c in (collector, other))
    for one, two in zip(expected, found, strict=True):
        ours, theirs = ({t.member: t for t in group} for group in (one, two))
        assert sorted(ours) == sorted(theirs) == [0, 1, 2]
        for member, t in ours.items():
            assert said(t)[:2] == said(theirs[member])[:2]
            assert t.reward == theirs[member].reward
            assert t.versions == theirs[member].versions
            if kind is CountingEpisode:  # otherwise timing decides which sequences run together
                assert t.logprobs == theirs[member].logprobs


def test_a_stop_text_that_an_interrupted_turn_began_ends_the_resumed_one():
    class Once(CountingEpisode):
        def reset(self):
            return Turn((3, 4, self.task), stop=self.environment.stop)

        def step(self, action):
            return Turn(reward=1.0, done=True)

    class Environment(Counting):
        stop = ()

        def episode(self, task):
            return Once(self, task)

    def play(stop, **values):
        environment = Environment(1)
        environment.stop = stop
        return collector_of(environment, max_tokens=40, **values)

    for seed in range(20):
        collector = play(())
        collector.start(0, 0, 1, seed=seed)
        ((whole,),) = collector.finish([0])
        text = bytes(t if t < 128 else 0 for t in whole.tokens[3:])
        pairs = [text[i : i + 2] for i in range(2, len(text) - 3) if 0 not in text[i : i + 2]]
        if pairs:
            break
    end = 3 + text.index(pairs[0]) + 2
    collector = play((pairs[0].decode(),))
    collector.start(0, 0, 1, seed=seed)
    ((straight,),) = collector.finish([0])
    assert straight.tokens == whole.tokens[:end]
    for known in range(4, end):
        collector, part = play((pairs[0].decode(),)), copy.deepcopy(straight)
        part.tokens, part.is_action = part.tokens[:known], part.is_action[:known]
        part.logprobs, part.versions = part.logprobs[:known], part.versions[:known]
        part.actions, part.answers, part.is_over, part.reward = [], 1, False, 0.0
        collector.resume(part)
        ((found,),) = collector.finish([0])
        assert found.tokens == straight.tokens, known
