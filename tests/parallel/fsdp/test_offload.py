"""State that is offloaded to host memory and reloaded: the tensors and the training are unchanged.

``gpu`` tests measure addresses, free memory and link speed, which a CPU cannot show.
"""

import gc
import time
from concurrent.futures import wait
from functools import partial

import pytest
import torch
import torch.distributed as dist

from moetrain.config import Config, ConfigError
from moetrain.optim.adamw import AdamW
from moetrain.parallel.apply import _chosen
from moetrain.parallel.fsdp.copies import TiedCopy
from moetrain.parallel.fsdp.storage.offloaded import Offloaded
from moetrain.parallel.world import plan_world
from moetrain.runtime.arena import Arena, OffloadedError
from moetrain.train.session import resolve_run
from moetrain.train.state import OFFLOADED
from tests.lib.dispatched_ops import Touches
from tests.lib.distributed import spawn
from tests.lib.engines import (
    DENSE,
    assert_near,
    make_batches,
    make_engine,
    objective_of,
    train,
    weights_of,
)
from tests.lib.estimates import estimate_memory

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
    """Return everything that lives from step to step, by name."""
    found = {}
    for name, member in engine.fsdp.members.items():
        found[name] = member.local
        found[f"{name} as DTensor"] = member.parameter.to_local()
        state = engine.optimizer.state.get(member.local, {})
        found |= {f"{name}.{key}": state[key] for key in AdamW.MOMENTS if key in state}
    for i, bucket in enumerate(engine.fsdp.buckets):
        if bucket.gradient_N is not None:
            found[f"gradient {i}"] = bucket.gradient_N
    return found


def identity_of(engine):
    """Return each tensor's and storage's identity, and on a GPU the fixed addresses.

    Shards that other ranks read where they lie have new storages after a reload.
    """
    found = {}
    read = {id(m) for b in engine.fsdp.buckets if b.is_read_in_place for m in b.members}
    moving = {name for name, member in engine.fsdp.members.items() if id(member) in read}
    for name, tensor in tensors_of(engine).items():
        if (owner := name.removesuffix(" as DTensor")) in moving:
            found[name] = id(tensor) if owner == name else 0
            continue
        is_fixed = tensor.is_cuda and not (name.startswith("gradient") and engine.fsdp.frees)
        place = tensor.data_ptr() if is_fixed else None
        which = 0 if name.endswith("as DTensor") else id(tensor)  # made anew at every call
        found[name] = (which, tensor.untyped_storage()._cdata, place)
    return found


def steps_with(engine, steps, cycle, lr=1e-2):
    """Return losses and norms of steps of two calls each, with ``cycle(engine, where)`` around."""
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
        with pytest.raises(OffloadedError, match="are offloaded"):
            engine.step(1e-2)
    engine.reload()
    assert identity_of(engine) == before


def compare(words, what, steps=3):
    """Check that steps with offloads in between equal those without; every weight changes."""
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


@pytest.mark.tier("long", quick=["all"])
@pytest.mark.parametrize("what", WHAT, ids=lambda what: "-".join(what) or "all")
def test_a_run_that_is_offloaded_goes_on_as_if_it_were_not(what):
    compare(["train.dtype=bfloat16"], what)


def test_adapters_and_their_frozen_base_leave_and_come_back():
    compare(LORA, ())


def on_ranks(words):
    compare(words, ())
    return True


@pytest.mark.tier("long")
@pytest.mark.parametrize("words", [["parallel.dp_shard=2"], ["parallel.tp=2"], ["parallel.ep=2"]])
def test_offloaded_on_ranks(words):
    assert spawn(2, on_ranks, ["train.dtype=bfloat16", *words], timeout=120) == [True, True]


def test_calls_that_need_offloaded_state_are_refused(tmp_path):
    engine = make_engine("train.dtype=bfloat16")
    train(engine, range(1))
    batches, objective = make_batches(0), objective_of(engine)
    learn = partial(engine.forward_backward, batches, objective)
    forward = partial(engine.forward, batches, objective)
    load, step = partial(engine.load_state, {}), partial(engine.step, 0.1)

    def weights():
        return next(engine.weights())

    files = (partial(engine.save_hf, tmp_path), partial(engine.save_hf, tmp_path, dtype="bfloat16"))
    reads = (engine.state, load, weights, *files, engine.work().__enter__)
    needed_by = {
        "weights": (learn, forward, step, *reads),
        "gradients": (learn, step, load),
        "moments": (step, engine.state, load),
    }
    expected = train(make_engine("train.dtype=bfloat16"), range(3))[1:]
    for what, calls in needed_by.items():
        engine.offload(what)
        engine.offload(what)  # twice is once
        for call in calls:
            with pytest.raises(OffloadedError, match=f"{what} are offloaded: call Engine.reload"):
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


@pytest.mark.tier("long")
def test_an_arena_that_is_not_fixed_forgets_what_nobody_holds():
    arena = Arena("gradients", torch.device("cpu"), fixed=False)
    kept, gone = arena.empty(3, torch.float32), arena.empty(5, torch.float32)
    kept.copy_(torch.arange(3))
    del gone
    gc.collect()
    arena.offload(None)
    assert len(arena._offloaded) == 1
    with pytest.raises(OffloadedError):
        arena.empty(1, torch.float32)
    arena.reload(None)
    assert kept.tolist() == [0, 1, 2]


# ---- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("what", WHAT, ids=lambda what: "-".join(what) or "all")
def test_ten_steps_on_a_gpu_have_the_same_bits(what):
    compare([*GPU, "train.dtype=bfloat16"], what, steps=10)


@pytest.mark.gpu
def test_adapters_are_offloaded_and_reloaded_on_a_gpu():
    compare([*GPU, *LORA, "train.dtype=bfloat16"], (), steps=3)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("words", [["parallel.dp_shard=2"], ["parallel.ep=2"]])
def test_offloaded_on_gpus(words):
    words = [*GPU, "train.dtype=bfloat16", *words]
    assert spawn(2, on_ranks, words, device_type="cuda", timeout=240) == [True, True]


def free_now():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.alone
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


@pytest.mark.alone
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
    arena.offload(stream)
    assert before - free_now() < 16 << 20
    # Otherwise torch's free memory would be released while it makes room for the hog.
    torch.cuda.empty_cache()
    hog = torch.empty(free_now() - (128 << 20), dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        arena.reload(stream)
    assert arena.is_offloaded
    del hog  # torch's allocator keeps it; the arena makes torch release it
    arena.reload(stream)
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


# ---- updates on the host -----------------------------------------------------------------------


def hosted(engine):
    """Return the buckets whose master weights are in host memory."""
    return [bucket for bucket in engine.fsdp.buckets if bucket.storage.has_host_master]


def check_share(engine, fraction):
    """Check the offloaded share, up to whole buckets and parameters shared by stages."""
    sizes = {id(b): b.shard_N.numel() for b in engine.fsdp.buckets if b.is_trained}
    tied = sum(
        b.shard_N.numel()
        for b in engine.fsdp.buckets
        if any(isinstance(c, TiedCopy) for c in b.copies)
    )
    taken = sum(sizes[id(bucket)] for bucket in hosted(engine))
    assert 0 < taken <= sum(sizes.values()) - tied
    assert abs(taken - fraction * sum(sizes.values())) <= max(sizes.values()) / 2 + tied


def train_with(fraction, words, micro=MICRO, steps=4, **kwargs):
    """Return an engine, and the losses and norms of its steps, each of two calls."""
    engine = make_engine(f"optim.offload_fraction={fraction}", *words, micro=micro, **kwargs)
    return engine, train(engine, range(steps), micro, lr=1e-3)


def assert_same_run(mine, theirs, tolerance):
    """Assert that losses and weights of two engines' runs agree up to rounding."""
    (engine, numbers), (other, expected) = mine, theirs
    torch.testing.assert_close(
        torch.tensor(numbers), torch.tensor(expected), rtol=tolerance, atol=0
    )
    expected = weights_of(other)
    for name, weight in weights_of(engine).items():
        assert (weight - expected[name]).norm() <= tolerance * expected[name].norm(), name


def each_fraction(words, tolerance, fractions=(0.3, 0.5, 1.0), **kwargs):
    expected = train_with(0.0, words, **kwargs)
    assert not hosted(expected[0])
    for fraction in fractions:
        mine = train_with(fraction, words, **kwargs)
        check_share(mine[0], fraction)
        assert_same_run(mine, expected, tolerance)
    return True


@pytest.mark.tier("long", quick=["lora.rank=8 moe.bias_update_rate=0 train.dtype=float32"])
@pytest.mark.parametrize(
    "words",
    [
        ["train.dtype=float32"],
        ["train.dtype=bfloat16"],
        ["train.dtype=bfloat16", "parallel.reshard_after_forward=yes"],
        ["train.dtype=bfloat16", "parallel.reshard_after_forward=yes", "model.num_layers=5"],
        ["train.dtype=float32", "activation.policy=full", "optim.max_grad_norm=0.01"],
        [*LORA, "train.dtype=float32"],
    ],
    ids=" ".join,
)
def test_updates_on_the_host_are_the_devices(words):
    # In bf16 a weight that is rounded the other way changes a loss by more than fp32's roundings.
    each_fraction(words, 1e-5 if "train.dtype=float32" in words else 2e-3)


TIED = [w for w in DENSE if not w.startswith("moe.")]
MESHES = {
    "dp": (["parallel.dp_shard=2"], {}),
    "dp turns": (["parallel.dp_shard=2", "parallel.reshard_after_forward=yes"], {}),
    "replicas": (["parallel.dp_replicate=2"], {"micro": 2}),
    "tp": (["parallel.tp=2"], {}),
    "ep": (["parallel.ep=2"], {}),
    "each": (["parallel.dp_shard=2", "parallel.reduce_at=each"], {"micro": 2}),
    "last": (["parallel.dp_shard=2", "parallel.reduce_at=last"], {"micro": 2}),
    "pp": (["parallel.pp=2"], {"micro": 2}),
    "pp tied": (["parallel.pp=2"], {"micro": 2, "base": TIED}),
    "pp adapters": (["parallel.pp=2", *LORA], {"micro": 2}),
}


def on_meshes(names):
    for name in names:
        words, kwargs = MESHES[name]
        each_fraction(["train.dtype=float32", *words], 2e-5, [0.5, 1.0], **kwargs)
    return True


@pytest.mark.tier("wide", long=["dp, dp turns, replicas, tp, ep"])
@pytest.mark.parametrize("names", [list(MESHES)[:5], list(MESHES)[5:]], ids=", ".join)
def test_updates_on_the_host_on_any_mesh(names):
    assert spawn(2, on_meshes, names, timeout=240) == [True, True]


def with_one_late_rank(layouts):
    """Return each layout's losses and weights, with a slow CPU on rank 1 only."""
    update, start = AdamW._update_on_host, AdamW._start_on_host

    def slowly(self, *task):
        time.sleep(0.02)
        update(self, *task)

    def at_once(self, *task):
        start(self, *task)
        wait([storage.update for _, storage in self._offloaded])

    if dist.get_rank() == 1:
        AdamW._update_on_host = slowly
    else:
        AdamW._start_on_host = at_once
    answers = {}
    for name, (words, micro) in layouts.items():
        engine, numbers = train_with(1.0, ["train.dtype=float32", *words], micro, steps=3)
        answers[name] = numbers, weights_of(engine)
    return answers


@pytest.mark.tier("long")
def test_ranks_whose_hosts_are_not_equally_fast_gather_in_one_order():
    turns, exchange = "parallel.reshard_after_forward=yes", "moe.dispatcher=alltoall"
    layouts = {
        "dp": (["parallel.dp_shard=2"], 2),
        "tp": (["parallel.tp=2"], 4),
        "ep": (["parallel.ep=2", exchange], 2),
        "tp+ep, turns": (["parallel.tp=2", "parallel.ep=2", exchange, turns], 4),
        "pp": (["parallel.pp=2"], 4),
    }
    engine, expected = train_with(1.0, ["train.dtype=float32"], micro=4, steps=3)
    weights = weights_of(engine)
    for answers in spawn(2, with_one_late_rank, layouts, timeout=60):
        for name in layouts:
            numbers, found = answers[name]
            torch.testing.assert_close(
                torch.tensor(numbers), torch.tensor(expected), rtol=1e-5, atol=0, msg=name
            )
            assert_near(found, weights, 1e-5)


@pytest.mark.tier("long")
@pytest.mark.parametrize("turns", ["no", "yes"])
def test_weights_updated_on_the_host_are_not_copied_again(turns):
    """The thread that updates them copies them. A pass that copies them reads a master."""
    words = ["model.num_layers=5", f"parallel.reshard_after_forward={turns}"]
    engine = make_engine("optim.offload_fraction=1", "train.dtype=bfloat16", *words)
    masters = [bucket.shard_N for bucket in hosted(engine)]

    def read_in(steps):
        found = set()
        for step in steps:
            with Touches(masters) as touches:
                engine.forward_backward(make_batches(step), objective_of(engine))
            found |= touches.touched
            engine.step(1e-2)
        return found

    assert read_in([0]) == set(range(len(masters)))  # nothing was copied yet
    assert read_in([1, 2]) == set()
    engine.offload("workspaces")
    assert read_in([3]) == set()


def test_a_slow_host_is_waited_for(monkeypatch):
    update = AdamW._update_on_host

    def slowly(self, *task):
        time.sleep(0.02)
        update(self, *task)

    words = ["train.dtype=bfloat16"]
    expected = train_with(1.0, words)
    wait, waits = Offloaded.wait, []

    def timed(self):
        start = time.perf_counter()
        wait(self)
        waits.append(time.perf_counter() - start)

    monkeypatch.setattr(AdamW, "_update_on_host", slowly)
    monkeypatch.setattr(Offloaded, "wait", timed)
    engine, numbers = train_with(1.0, words)
    assert numbers == expected[1]
    assert max(waits) > 0.01
    engine.forward_backward(make_batches(9), objective_of(engine))
    engine.step(1e-3)
    assert not all(bucket.storage.update.done() for bucket in hosted(engine))
    other = expected[0]
    other.forward_backward(make_batches(9), objective_of(other))
    other.step(1e-3)
    theirs = other.state()
    for group, parts in engine.state().items():
        for name, part in parts.items():
            assert torch.equal(part.tensor, theirs[group][name].tensor), name


def test_write_during_a_host_update_is_kept(monkeypatch):
    update = AdamW._update_on_host

    def slowly(self, *task):
        time.sleep(0.02)
        update(self, *task)

    engine, _ = train_with(1.0, ["train.dtype=bfloat16"])
    monkeypatch.setattr(AdamW, "_update_on_host", slowly)
    engine.forward_backward(make_batches(9), objective_of(engine))
    engine.step(1e-1)
    assert not any(bucket.storage.update.done() for bucket in hosted(engine)[-2:])
    written = {}
    for name, member in engine.fsdp.members.items():
        if member.rule.trainable:
            written[name] = torch.randn(member.layout.shape)
            engine.fsdp.write(name, (), written[name])
    with engine.work():
        for unit in engine.fsdp.units:
            engine.fsdp.unshard(unit)
            names = {id(m): name for name, m in engine.fsdp.members.items()}
            rows = [row for bucket in unit.buckets for row in bucket.rows()]
            for member, full in zip(unit.members, rows, strict=True):
                assert torch.equal(full, written[names[id(member)]].to(full.dtype))
    for name, weight in engine.weights():
        if name in written:
            assert torch.equal(weight, written[name]), name


def test_an_update_that_fails_ends_the_step_that_needs_it(monkeypatch):
    def fail(self, *task):
        raise OSError("no more")

    engine, _ = train_with(1.0, [])
    monkeypatch.setattr(AdamW, "_update_on_host", fail)
    engine.forward_backward(make_batches(9), objective_of(engine))
    engine.step(1e-3)
    with pytest.raises(OSError, match="no more"):
        engine.forward_backward(make_batches(9), objective_of(engine))


def test_gradients_of_several_calls_add_up_on_the_host():
    found = []
    for fraction in (0.0, 1.0):
        engine = make_engine(f"optim.offload_fraction={fraction}", micro=MICRO)
        found.append((engine, steps_with(engine, range(3), lambda engine, where: None, lr=1e-3)))
    assert_same_run(*found, 1e-5)
    disturbed = make_engine("optim.offload_fraction=1", micro=MICRO)
    numbers = steps_with(disturbed, range(3), partial(disturb, ()), lr=1e-3)
    assert numbers == found[1][1]


def test_a_bad_step_changes_nothing_on_the_host():
    engine, _ = train_with(1.0, ["train.dtype=bfloat16"])
    before = {n: p.tensor.clone() for group in engine.state().values() for n, p in group.items()}
    copies = [bucket.storage.source_N.clone() for bucket in hosted(engine)]
    engine.forward_backward(make_batches(5), objective_of(engine))
    engine.since_step[-1].total.fill_(float("nan"))
    assert engine.step(1e-3).skipped
    for group in engine.state().values():
        for name, part in group.items():
            assert torch.equal(part.tensor, before[name]), name
    same = [torch.equal(b.storage.source_N, c) for b, c in zip(hosted(engine), copies, strict=True)]
    assert all(same)
    engine.forward_backward(make_batches(6), objective_of(engine))
    assert not engine.step(1e-3).skipped


@pytest.mark.tier("long", quick=["1.0-1.0"])
@pytest.mark.parametrize(("before", "after"), [(0.5, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_a_state_goes_on_with_another_share_on_the_host(before, after):
    words = ["train.dtype=float32"]
    engine, _ = train_with(before, words, steps=2)
    saved = engine.state()
    assert {part.tensor.dtype for part in saved["model"].values()} == {torch.float32}
    state = {g: {n: p.tensor.clone() for n, p in parts.items()} for g, parts in saved.items()}
    other, _ = train_with(after, words, steps=3)
    other.load_state(state)
    numbers = [train(x, range(2, 5), MICRO, lr=1e-3) for x in (engine, other)]
    assert_same_run((other, numbers[1]), (engine, numbers[0]), 1e-5 * (before != after))


def test_shares_are_chosen_from_the_end_by_bytes():
    assert _chosen([5, 1, 4], 4.4) == {2}
    assert _chosen([5, 1, 4], 10) == {0, 1, 2}
    assert _chosen([5, 1, 4], 0) == _chosen([], 1) == set()
    assert _chosen([100, 1, 1], 2) == {1, 2}
    engine, _ = train_with(0.5, ["train.dtype=bfloat16"], steps=1)
    for bucket in hosted(engine):
        assert bucket.storage.source_N.dtype == bucket.dtype
        assert bucket.gradient_N is None
        assert not bucket.is_cast


@pytest.mark.parametrize("name", ["state_dtype", "gradient_dtype"])
def test_settings_that_contradict_each_other(name):
    says = f"optim.offload_fraction: 0.5 contradicts optim.{name} 'bfloat16' .*; unset it, or set"
    with pytest.raises(ConfigError, match=says):
        Config.load(None, ["optim.offload_fraction=0.5", f"optim.{name}=bfloat16"], environ={})


def test_memory_estimate_excludes_offloaded_state():
    found = []
    for fraction in (0, 0.5, 1):
        words = ["model.preset=qwen3-30b-a3b", "parallel.ep=4", "launch.nproc=4"]
        words += [f"optim.offload_fraction={fraction}", "train.global_batch_size=64"]
        config, arch = resolve_run(Config.load(None, words, environ={}))
        dims = plan_world(config, arch, 4)
        found.append(estimate_memory(config, arch, dims, torch.bfloat16))
    numbers = found[0].moments / 8
    assert [x.moments for x in found] == pytest.approx([8 * numbers, 4 * numbers, 0])
    assert found[0].gradients - found[2].gradients == pytest.approx(4 * numbers)
    assert found[0].weights - found[2].weights == pytest.approx(2 * numbers, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [[], ["parallel.reshard_after_forward=yes"], LORA], ids=" ".join)
def test_updates_on_the_host_on_a_gpu(words):
    each_fraction([*GPU, "train.dtype=float32", *words], 1e-4)
    # The selection bias is off: any token that rounding reroutes would change it by a whole step.
    each_fraction([*GPU, "train.dtype=bfloat16", "moe.bias_update_rate=0", *words], 1e-2)


def on_gpu_meshes(names):
    for name in names:
        words, kwargs = MESHES[name]
        each_fraction([*GPU, "train.dtype=float32", *words], 1e-4, [0.5, 1.0], **kwargs)
    return True


@pytest.mark.gpu(2)
def test_updates_on_the_host_on_gpus():
    names = ["dp", "replicas", "ep", "last", "pp"]
    assert spawn(2, on_gpu_meshes, names, device_type="cuda", timeout=400) == [True, True]


@pytest.mark.gpu
def test_losses_of_two_hundred_steps_are_those_of_the_device():
    found = []
    for fraction in (0.0, 0.5, 1.0):
        words = [*GPU, "train.dtype=bfloat16"]
        found.append(torch.tensor(train_with(fraction, words, steps=200)[1])[:, 0])
    for losses in found[1:]:
        assert (losses - found[0]).abs().max() < 0.02
        assert losses[-1] < 0.5 * losses[0]
