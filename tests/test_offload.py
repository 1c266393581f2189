"""State that leaves for host memory and comes back: the same tensors, and training goes on.

``gpu`` tests measure what a CPU cannot show: addresses, memory that is free, link speed.
"""

import gc
from functools import partial

import pytest
import torch
from distributed import spawn
from test_engine import make_batches, make_engine, objective_of, train, weights_of

from moetrain.engine import OFFLOADED
from moetrain.optim import MOMENTS
from moetrain.parallel.arena import Arena, Away

MICRO = 4
LORA = ["lora.rank=8", "moe.bias_update_rate=0"]
GPU = [
    "train.device=cuda",
    "train.deterministic=yes",
    "compile.enabled=no",
    "model.hidden_size=128",
    "model.num_heads=4",
    "model.head_dim=32",
    "model.moe_intermediate_size=64",
]


def tensors_of(engine):
    """Whatever lives from step to step, by name."""
    found = {}
    for name, member in engine.fsdp.members.items():
        found[name] = member.local
        found[f"{name} as DTensor"] = member.parameter.to_local()
        state = engine.optimizer.state.get(member.local, {})
        found |= {f"{name}.{key}": state[key] for key in MOMENTS if key in state}
    for i, bucket in enumerate(engine.fsdp.buckets):
        if bucket.gradient_N is not None:
            found[f"gradient {i}"] = bucket.gradient_N
    return found


def identity_of(engine):
    """By name, which tensor and which storage; and on a GPU where, but for what comes and goes."""
    found = {}
    for name, tensor in tensors_of(engine).items():
        is_fixed = tensor.is_cuda and not (name.startswith("gradient") and engine.fsdp.is_alone)
        place = tensor.data_ptr() if is_fixed else None
        which = 0 if name.endswith("as DTensor") else id(tensor)  # made anew at every call
        found[name] = (which, tensor.untyped_storage()._cdata, place)
    return found


def steps_with(engine, steps, cycle, lr=1e-2):
    """Losses and norms of steps of two calls each; ``cycle(engine, where)`` around them."""
    numbers, objective, world = [], objective_of(engine), engine.world
    for step in steps:
        cycle(engine, "before")
        for half in (2 * step, 2 * step + 1):
            batches = make_batches(half, MICRO, world.data_rank, world.dims.data_ranks)
            numbers.append(engine.forward_backward(batches, objective).total.item())
            cycle(engine, "between")
        numbers.append(engine.step(lr).grad_norm.item())
    return numbers


def disturb(what, engine, where):
    before = identity_of(engine)
    engine.offload(*what)
    if where == "between" and "gradients" in (what or OFFLOADED):
        with pytest.raises(Away, match="are offloaded"):
            engine.step(1e-2)
    engine.reload()
    assert identity_of(engine) == before


def compare(words, what, steps=3):
    """Steps with everything away in between are those without; every weight changes."""
    undisturbed, disturbed = (make_engine(*words, micro=MICRO) for _ in range(2))
    first = weights_of(disturbed)
    expected = steps_with(undisturbed, range(steps), lambda engine, where: None)
    assert steps_with(disturbed, range(steps), partial(disturb, what)) == expected
    last, same = weights_of(disturbed), weights_of(undisturbed)
    for name, weight in same.items():
        assert torch.equal(last[name], weight), name
    trained = {n for n, m in disturbed.fsdp.members.items() if m.rule.trainable}
    here = trained & set(first)
    assert here
    assert all((last[name] != first[name]).any() for name in here)


WHAT = [(), ("weights",), ("gradients",), ("moments",), ("workspaces",)]


@pytest.mark.parametrize("what", WHAT, ids=lambda what: "-".join(what) or "all")
def test_a_run_that_is_offloaded_goes_on_as_if_it_were_not(what):
    compare(["train.dtype=bfloat16"], what)


def test_adapters_and_their_frozen_base_leave_and_come_back():
    compare(LORA, ())


def on_ranks(words):
    compare(words, ())
    return True


@pytest.mark.parametrize("words", [["parallel.dp_shard=2"], ["parallel.tp=2"], ["parallel.ep=2"]])
def test_offloaded_on_ranks(words):
    assert spawn(2, on_ranks, ["train.dtype=bfloat16", *words], timeout=120) == [True, True]


def test_what_needs_something_that_is_away_says_so():
    engine = make_engine("train.dtype=bfloat16")
    train(engine, range(1))
    batches, objective = make_batches(0), objective_of(engine)
    learn = partial(engine.forward_backward, batches, objective)
    forward = partial(engine.forward, batches, objective)
    load, step = partial(engine.load_state, {}), partial(engine.step, 0.1)

    def weights():
        return next(engine.weights())

    needed_by = {
        "weights": (learn, forward, step, engine.state, load, weights, engine.work().__enter__),
        "gradients": (learn, step, load),
        "moments": (step, engine.state, load),
    }
    expected = train(make_engine("train.dtype=bfloat16"), range(3))[1:]
    for what, calls in needed_by.items():
        engine.offload(what)
        engine.offload(what)  # twice is once
        for call in calls:
            with pytest.raises(Away, match=f"{what} are offloaded: call Engine.reload"):
                call()
        engine.reload()
    engine.reload()
    assert train(engine, range(1, 3)) == expected
    with pytest.raises(ValueError, match=r"\['optimizer'\] are none of weights, gradients"):
        engine.offload("optimizer")
    with engine.work(), pytest.raises(RuntimeError, match=r"within FSDP\.work"):
        engine.offload("moments")


def test_memory_is_given_back_and_what_is_not_worth_copying_is_not_copied():
    engine = make_engine("train.dtype=bfloat16")
    train(engine, range(1))
    storages = {tensor.untyped_storage() for tensor in tensors_of(engine).values()}
    regions = [unit.region for unit in engine.fsdp.units]
    assert all(storage.nbytes() > 0 for storage in storages)
    engine.offload()
    assert all(storage.nbytes() == 0 for storage in storages)
    assert not any(region.memory_in_use() for region in regions)
    held = {name: arena._host.bytes.numel() for name, arena in engine._arenas.items()}
    assert held["gradients"] == 0 < held["weights"] < held["moments"]
    hosts = [arena._host.bytes.data_ptr() for arena in engine._arenas.values()]
    engine.reload()
    engine.offload()
    assert hosts == [arena._host.bytes.data_ptr() for arena in engine._arenas.values()]
    engine.reload()


def test_a_state_is_loaded_into_the_same_moments():
    engine, other = make_engine(), make_engine()
    numbers = train(other, range(3))
    train(engine, range(2))
    state = {
        group: {name: part.tensor.clone() for name, part in parts.items()}
        for group, parts in engine.state().items()
    }
    train(engine, range(2, 4))
    before = identity_of(engine)
    engine.load_state(state)
    assert identity_of(engine) == before
    assert train(engine, range(2, 3)) == numbers[2:]
    engine.load_state({"optim": {}})
    assert not engine.state()["optim"]
    train(engine, range(1))
    assert {k: v for k, v in identity_of(engine).items() if k in before} == before


def test_an_arena_that_is_not_fixed_forgets_what_nobody_holds():
    arena = Arena("gradients", torch.device("cpu"), fixed=False)
    kept, gone = arena.empty(3, torch.float32), arena.empty(5, torch.float32)
    kept.copy_(torch.arange(3))
    del gone
    gc.collect()
    arena.leave(None)
    assert len(arena._gone) == 1
    with pytest.raises(Away):
        arena.empty(1, torch.float32)
    arena.come_back(None)
    assert kept.tolist() == [0, 1, 2]


# ---- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("what", WHAT, ids=lambda what: "-".join(what) or "all")
def test_ten_steps_on_a_gpu_have_the_same_bits(what):
    compare([*GPU, "train.dtype=bfloat16"], what, steps=10)


@pytest.mark.gpu
def test_adapters_on_a_gpu():
    compare([*GPU, *LORA, "train.dtype=bfloat16"], (), steps=3)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [["parallel.dp_shard=2"], ["parallel.ep=2"]])
def test_offloaded_on_gpus(words):
    words = [*GPU, "train.dtype=bfloat16", *words]
    assert spawn(2, on_ranks, words, device_type="cuda", timeout=240) == [True, True]


def free_now():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.gpu
def test_freed_memory_is_the_drivers_and_fifty_cycles_leave_it_flat():
    wide = ["model.hidden_size=1024", "model.moe_intermediate_size=1024", "model.num_layers=4"]
    engine = make_engine(*GPU, *wide, "model.num_experts=32", "train.dtype=bfloat16")
    train(engine, range(2))
    torch.cuda.empty_cache()
    held = {s.data_ptr(): s.nbytes() for t in tensors_of(engine).values() for s in storages_of(t)}
    before, identity = free_now(), identity_of(engine)
    engine.offload()
    assert free_now() - before >= 0.95 * sum(held.values())
    engine.reload()
    assert identity_of(engine) == identity
    expected, found = weights_of(engine), []
    for _ in range(50):
        engine.offload()
        found.append(free_now())
        engine.reload()
        found.append(free_now())
    assert max(found[::2]) == min(found[::2])
    assert max(found[1::2]) == min(found[1::2]) == found[1]
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(engine).items())


def storages_of(tensor):
    return [tensor.untyped_storage()]


@pytest.mark.gpu
def test_addresses_go_with_their_last_tensor_and_a_lack_of_memory_is_survived():
    device = torch.device("cuda", torch.cuda.current_device())
    before = free_now()
    arena = Arena("weights", device)
    numel = 256 << 20
    tensor = arena.empty(numel, torch.uint8).fill_(7)
    other = arena.empty(1000, torch.float32).fill_(1.5)
    address = tensor.data_ptr()
    assert before - free_now() >= numel
    stream = torch.cuda.Stream()
    arena.leave(stream)
    assert before - free_now() < 16 << 20
    hog = torch.empty(int(free_now() * 0.999) - (200 << 20), dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        arena.come_back(stream)
    assert arena.is_away
    del hog  # torch's allocator keeps it; the arena has it given back
    arena.come_back(stream)
    arena.need()
    assert tensor.data_ptr() == address
    assert bool((tensor == 7).all())
    assert bool((other == 1.5).all())
    del arena
    assert bool((tensor == 7).all())  # it keeps its memory
    del tensor, other
    gc.collect()
    torch.cuda.empty_cache()
    assert before - free_now() < 16 << 20
