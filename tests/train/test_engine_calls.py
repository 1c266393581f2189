"""Calls of an engine in any order, under settings that move its memory, change no result.

Two engines get the same random calls: a plain one, and one whose weights, moments, gradients and
activations are offloaded and reloaded. Both must give equal bits; only updates on the CPU round in
other places.
"""

import random
from functools import partial

import pytest
import torch

from moetrain.runtime.arena import OffloadedError
from moetrain.train.state import OFFLOADED
from tests.lib.distributed import spawn
from tests.lib.engines import make_batches, make_engine, objective_of, weights_of

MICRO = 2
LR = 1e-3
SHARED = [
    [],
    ["train.freeze=*embed*"],
    ["lora.rank=8"],
    ["lora.rank=8", "lora.dropout=0.3", "lora.targets=*.attn.*"],
    ["optim.state_dtype=bfloat16", "optim.gradient_dtype=bfloat16"],
    ["optim.state_dtype=float8", "optim.weight_dtype=bfloat16"],
    ["activation.policy=full"],
]
"""Settings of both engines, beside a dtype."""
MOVES = {
    "optim.offload_fraction": [0, 0.4, 1],
    "parallel.reshard_after_forward": ["no", "yes"],
}
BASE = ["model.num_layers=5", "moe.bias_update_rate=0"]


def copied(engine):
    """Return the engine's whole state, in a form that can be loaded. Collective."""
    members, found = engine.fsdp.members, {}
    for group, parts in engine.state().items():
        found[group] = {}
        for name, part in parts.items():
            owner = members.get(name) or members.get(name.rpartition(".")[0])
            is_cut = owner is not None and not name.endswith(".step")
            there = part.tensor.to(engine.world.device)
            whole = owner.layout.whole(there) if is_cut else there
            found[group][name] = whole.clone()
    return found


class Player:
    """Makes calls of one engine, by name and number."""

    def __init__(self, words):
        self.engine = make_engine(*BASE, *words, micro=MICRO)
        self.objective, self.saved, self.is_learning = objective_of(self.engine), [], False

    def batches(self, number):
        world = self.engine.world
        return make_batches(number, MICRO, world.data_rank, world.dims.data_ranks)

    def learn(self, number):
        totals = self.engine.forward_backward(self.batches(number), self.objective)
        self.is_learning = True
        return [totals.total.item()]

    def fail(self, number):
        fsdp = self.engine.fsdp
        reduce = fsdp.reduce

        def fail(*arguments):
            reduce(*arguments)
            if fsdp._is_last:  # while the first unit's reductions are in flight
                raise KeyError("backward")

        fsdp.reduce = fail
        try:
            with pytest.raises(KeyError, match="backward"):
                self.engine.forward_backward(self.batches(number), self.objective)
        finally:
            fsdp.reduce = reduce
        self.is_learning = False
        return []

    def look(self, number):
        with torch.inference_mode(number % 2 == 0):
            return [self.engine.forward(self.batches(number), self.objective).total.item()]

    def step(self, number):
        if not self.is_learning:
            return []
        if number % 4 == 0:
            self.engine.since_step[-1].total.fill_(float("nan"))
        outcome = self.engine.step(LR)
        self.is_learning = False
        return [outcome.grad_norm.item(), outcome.skipped.item()]

    def save(self, number):
        self.saved.append(copied(self.engine))
        return []

    def load(self, number):
        if not self.saved:
            return []
        self.engine.load_state(self.saved[number % len(self.saved)])
        self.is_learning = False
        return []

    def merge(self, number):
        whole = self.engine.weights(hf=number % 2 == 0, merged=number % 3 == 0)
        return [weight.double().norm().item() for _, weight in whole]

    def write(self, number):
        self.engine.fsdp.settle()
        names = [n for n in self.engine.stages.table if n in self.engine.fsdp.members]
        name = names[number % len(names)]
        shape = self.engine.stages.table[name].shape
        values = torch.randn(shape, generator=torch.Generator().manual_seed(number)) / 8
        with torch.no_grad():
            self.engine.fsdp.write(name, (), values)
        return []


CALLS = ["learn", "learn", "learn", "step", "step", "step"]
CALLS += ["look", "fail", "save", "load", "merge", "write"]


def play(words, moves, seed):
    """Return the results of the calls of ``seed``; ``moves``: also offload in between."""
    calls, leaves = random.Random(seed), random.Random(seed)
    player, found = Player(words), []
    torch.manual_seed(seed)  # dropout follows from it
    for _ in range(24):
        call = partial(getattr(player, calls.choice(CALLS)), calls.randrange(100))
        if moves and leaves.random() < 0.6:
            player.engine.offload(*leaves.sample(OFFLOADED, leaves.randrange(len(OFFLOADED) + 1)))
            if leaves.random() < 0.3:
                player.engine.reload()
        try:
            found.append(call())
        except OffloadedError:
            player.engine.reload()
            found.append(call())
    player.engine.reload()
    return found, weights_of(player.engine)


def drawn(seed):
    """Return the settings of both engines, and those of the engine whose memory moves."""
    draw = random.Random(seed)
    words = [*draw.choice(SHARED), f"train.dtype={draw.choice(['float32', 'bfloat16'])}"]
    moves = {name: draw.choice(values) for name, values in MOVES.items()}
    if any(word.startswith("optim.state_dtype") for word in words):
        moves["optim.offload_fraction"] = 0
    return words, moves


def compare(seeds, mesh):
    for seed in seeds:
        words, moves = drawn(seed)
        rounds = moves["optim.offload_fraction"] > 0
        if rounds:
            words[-1] = "train.dtype=float32"  # otherwise a rounding would be a whole bf16 step
        set_to = [f"{name}={value}" for name, value in moves.items()]
        expected = play([*words, *mesh], False, seed)
        mine = play([*words, *mesh, *set_to], True, seed)
        case = f"seed {seed}: {[*words, *set_to, *mesh]}"
        if not rounds:
            assert mine[0] == expected[0], case
        for theirs, ours in zip(expected[0], mine[0], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, nan_ok=True), case
        for name, weight in expected[1].items():
            error = (mine[1][name] - weight).norm()
            assert error <= 1e-3 * rounds * weight.norm(), f"{case}: {name}"
    return True


@pytest.mark.tier("wide")
@pytest.mark.parametrize("first", [0, 4])
def test_calls_in_any_order_while_memory_moves(first):
    compare(range(first, first + 4), [])


@pytest.mark.tier("wide")
@pytest.mark.parametrize("mesh", ["dp_shard=2", "ep=2", "fsdp_transport=copy"])
def test_calls_in_any_order_on_ranks(mesh):
    assert spawn(2, compare, [3, 9], [f"parallel.{mesh}"], timeout=120) == [True, True]


def fail_and_go_on(words):
    expected, mine = (Player(words) for _ in range(2))
    for player in (expected, mine):
        player.learn(1)
        player.step(1)
    mine.fail(5)
    for number in (2, 3, 5):
        assert mine.learn(number) == expected.learn(number)
        assert mine.step(number) == expected.step(number)
    return True


@pytest.mark.tier("wide", long=["0"])
@pytest.mark.parametrize("fraction", [0, 1])
def test_a_backward_that_fails_leaves_no_gradient_on_the_way(fraction):
    words = ["parallel.dp_shard=2", f"optim.offload_fraction={fraction}"]
    assert spawn(2, fail_and_go_on, words, timeout=60) == [True, True]
