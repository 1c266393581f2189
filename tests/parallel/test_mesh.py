"""ParallelDims' arithmetic and messages, and meshes of 1, 2 and 4 gloo ranks by axis."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from moetrain.config import Config, ConfigError, ParallelSection
from moetrain.config.environment import LaunchedPlace
from moetrain.config.sources import RunFailed
from moetrain.models.families import PRESETS
from moetrain.parallel import world as world_module
from moetrain.parallel.mesh import Meshes, ParallelDims, build_meshes
from moetrain.parallel.world import join_world, plan_world
from tests.lib.architectures import make_architecture
from tests.lib.distributed import spawn

MOE = make_architecture(
    family="qwen3_moe",
    vocab_size=64,
    hidden_size=16,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    intermediate_size=16,
    num_experts=12,
    num_experts_per_token=2,
    moe_intermediate_size=8,
)
DENSE = MOE.model_copy(update={"num_experts": 0, "num_experts_per_token": 0})


def resolve(world, arch=MOE, **degrees):
    return ParallelDims.resolve(ParallelSection(**degrees), world, arch)


ULYSSES = {"cp_method": "ulysses"}


@pytest.mark.parametrize(
    ("world", "degrees", "dp_shard", "efsdp"),
    [
        (1, {}, 1, 1),
        (1, {"dp_shard": 1}, 1, 1),
        (4, {}, 4, 4),
        (4, {"ep": 4}, 4, 1),
        (12, {"ep": 6}, 12, 2),
        (8, {"dp_replicate": 2, "ep": 2}, 4, 2),
        (8, {"dp_replicate": 8}, 1, 1),
        (8, {"dp_replicate": 2, "tp": 2, "ep": 4}, 2, 1),
        (16, {"pp": 2, "cp": 2, "tp": 2, "ep": 4}, 2, 2),
        (8, {"dp_shard": 2, "tp": 4, "ep": 4}, 2, 2),
        (2, {"tp": 2, "ep": 2}, 1, 1),
        (8, {"cp": 8, "ep": 4}, 1, 2),  # two ranks hold copies of every key head
        (8, {"cp": 4, "tp": 2}, 1, 8),
    ],
)
def test_degrees_that_fit(world, degrees, dp_shard, efsdp):
    dims = resolve(world, **degrees)
    assert (dims.dp_shard, dims.efsdp) == (dp_shard, efsdp)
    assert dims.pp * dims.dp_replicate * dims.efsdp * dims.ep == world
    assert dims.data_ranks == dims.dp_replicate * dp_shard


@pytest.mark.parametrize(
    ("world", "degrees", "field", "named"),
    [
        (4, {"dp_shard": 3}, "dp_shard", ["dp_shard 3", "world of 4 processes"]),
        (4, {"dp_shard": 2}, "dp_shard", ["dp_shard 2", "world of 4 processes"]),
        (4, {"tp": 3}, "tp", ["tp 3", "world of 4 processes"]),
        (1, {"tp": 2}, "tp", ["tp 2", "world of 1 process;"]),
        (4, {"pp": 8}, "pp", ["pp 8", "world of 4"]),
        (4, {"dp_replicate": 2, "tp": 4}, "dp_shard", ["dp_replicate 2", "tp 4", "world of 4"]),
        (6, {"ep": 4}, "ep", ["4 does not divide dp_shard 6 x cp 1 x tp 1 = 6", "world of 6"]),
        (8, {"dp_replicate": 4, "ep": 4}, "ep", ["dp_shard 2", "= 2 ranks", "world of 8"]),
        (1, {"ep": 2}, "ep", ["dp_shard 1", "world of 1"]),
        (8, {"ep": 8}, "ep", ["8", "num_experts 12", "world of 8"]),
        (16, {"tp": 16}, "tp", ["16", "num_heads 8", "world of 16"]),
        (8, {"tp": 8}, "tp", ["8", "num_kv_heads 4", "world of 8"]),
        (3, {"tp": 3}, "tp", ["3", "num_heads 8", "world of 3"]),
        (16, {"cp": 16, **ULYSSES}, "cp", ["16", "num_heads 8", "num_kv_heads 4", "world of 16"]),
        (16, {"cp": 8, "tp": 2, **ULYSSES}, "cp", ["cp x tp = 16 ranks", "num_heads 8"]),
    ],
)
def test_degrees_that_do_not_fit_are_named_with_the_world(world, degrees, field, named):
    with pytest.raises(ConfigError) as caught:
        resolve(world, **degrees)
    assert caught.value.field == f"parallel.{field}"
    for words in named:
        assert words in caught.value.problem


def test_ranks_share_key_heads_or_have_copies():
    arch = MOE.model_copy(update={"num_heads": 12, "num_kv_heads": 6})
    with pytest.raises(ConfigError, match=r"4 .*num_heads 12 and num_kv_heads 6"):
        resolve(4, arch, cp=4, **ULYSSES)
    assert resolve(4, arch, cp=4).cp_method == "all_gather"
    assert resolve(2, arch, cp=2).cp_method == "ulysses"
    assert resolve(2, arch, cp=2, cp_method="all_gather").cp_method == "all_gather"


def test_ranks_share_the_heads_of_layers_with_a_state():
    arch = PRESETS["qwen3.6-35b-a3b"]  # it has 16 key heads there
    assert resolve(16, arch, cp=16).cp_method == "ulysses"
    with pytest.raises(ConfigError, match=r"parallel.cp: 32 .* linear_num_key_heads 16"):
        resolve(32, arch, cp=32)


def test_expert_parallelism_needs_experts():
    with pytest.raises(ConfigError, match="has no experts"):
        resolve(4, DENSE, ep=2)


# ---- machines -----------------------------------------------------------------------------------


def test_groups_of_neighbours_lie_on_machines():
    dims = ParallelDims(16, dp_shard=16, per_machine=4)
    assert [dims.machines(n) for n in (1, 2, 4, 8, 16)] == [1, 1, 1, 2, 4]
    assert ParallelDims(12, dp_shard=12, per_machine=6).machines(4) == 2  # ranks 4 to 7
    assert ParallelDims(4, dp_shard=4, per_machine=8).machines(4) == 1
    assert ParallelDims(4, dp_shard=4).machines(4) == 1


@pytest.mark.parametrize(
    ("degrees", "replicas", "dp_shard"),
    [
        ({}, 4, 4),
        ({"tp": 2, "ep": 4}, 4, 2),
        ({"pp": 2}, 2, 4),
        ({"pp": 8}, 1, 2),  # a stage is half a machine
        ({"dp_shard": 2}, 8, 2),
        ({"dp_shard": 8, "tp": 2}, 1, 8),
    ],
)
def test_a_replica_for_each_machine(degrees, replicas, dp_shard):
    section = ParallelSection(dp_replicate=-1, **degrees)
    dims = ParallelDims.resolve(section, 16, MOE, per_machine=4)
    assert (dims.dp_replicate, dims.dp_shard) == (replicas, dp_shard)
    alone = ParallelDims.resolve(ParallelSection(dp_replicate=-1), 4, MOE)
    assert (alone.dp_replicate, alone.dp_shard) == (1, 4)


OF_TWO = "on 2 machines of 2 (launch.gpus_per_machine) would leave a machine; use"
CROSSING = [
    ("parallel.tp=4", 4, f"parallel.tp: 4 of 4 ranks {OF_TWO} a divisor of 2"),
    (
        "parallel.fsdp_transport=copy",
        4,
        f"parallel.fsdp_transport: 'copy' of 4 ranks {OF_TWO} auto, or parallel.dp_replicate -1",
    ),
    (
        "parallel.ep=4 moe.redundant_experts=1",
        4,
        f"moe.redundant_experts: 1 of 4 ranks {OF_TWO} 0",
    ),
    ("parallel.ep=3", 6, f"parallel.ep: 3 of 3 ranks {OF_TWO} a divisor or a multiple of 2"),
    (
        "parallel.ep=4 moe.dispatch_mode=static",
        4,
        f"moe.dispatch_mode: 'static' of 4 ranks {OF_TWO} exact",
    ),
]


@pytest.mark.parametrize(("words", "world", "says"), CROSSING)
def test_axes_that_must_not_cross_machines_are_refused(words, world, says, tiny):
    batch = ["train.micro_batch_size=4", f"train.global_batch_size={4 * world}"]
    config = tiny(*words.split(), *batch, "launch.gpus_per_machine=2")
    with pytest.raises(ConfigError) as caught:
        plan_world(config, MOE, world)
    assert str(caught.value).startswith(says)
    whole = config.filled({"launch.gpus_per_machine": world}, "the test")
    assert plan_world(whole, MOE, world).machines(world) == 1


@pytest.mark.parametrize(
    "words",
    ["ep=4", "ep=4 fsdp_transport=nccl", "dp_replicate=-1 fsdp_transport=copy ep=2", "tp=2 pp=2"],
)
def test_other_axes_may_cross_machines(words, tiny):
    batch = ["train.micro_batch_size=4", "train.global_batch_size=16"]
    named = [f"parallel.{word}" for word in words.split()]
    config = tiny(*named, *batch, "launch.gpus_per_machine=2", "model.num_layers=2")
    assert plan_world(config, MOE.model_copy(update={"num_layers": 2}), 4).per_machine == 2


@pytest.mark.parametrize(
    ("words", "place", "per_machine"),
    [
        ("", None, 8),
        ("launch.nproc=16", None, 16),
        ("launch.gpus_per_machine=4", None, 4),
        ("launch.gpus_per_machine=4", 2, 4),
        ("", 2, 2),
    ],
)
def test_how_many_ranks_a_machine_has(words, place, per_machine, tiny, monkeypatch):
    if place is not None:
        launched = LaunchedPlace(0, 0, 16, "localhost:1", None, on_machine=place)
        monkeypatch.setattr(world_module, "launched_place", lambda: launched)
    batch = ["train.micro_batch_size=1", "train.global_batch_size=16"]
    assert plan_world(tiny(*words.split(), *batch), MOE, 16).per_machine == per_machine


def test_ranks_that_differ_make_no_group(tiny, monkeypatch, no_group):
    """The error comes before the first collective, which could hang. Its text is tested in
    tests/config/test_remedies_of_machines.py."""
    place = LaunchedPlace(0, 0, 2, "localhost:1", None, on_machine=1)
    problem = ConfigError("launch.gpus_per_machine", "auto is 1 on rank 0, but 2 on rank 1")

    def differ(*_):
        raise problem

    monkeypatch.setattr(world_module, "launched_place", lambda: place)
    monkeypatch.setattr(world_module.processes, "find_ranks", lambda *_: dist.HashStore())
    monkeypatch.setattr(world_module, "_check_alike", differ)
    with pytest.raises(ConfigError) as caught:
        join_world(tiny("train.global_batch_size=8"), MOE)
    assert caught.value is problem
    assert not dist.is_initialized()


# ---- on ranks -----------------------------------------------------------------------------------


def describe_meshes(dims: ParallelDims, device_type: str) -> dict:
    """Return this rank's view of each mesh and group, as plain values."""
    meshes = build_meshes(dims, device_type)
    meshes.warm_up(torch.device(device_type))
    named: dict[str, DeviceMesh] = {
        name: getattr(meshes, name)
        for name in (
            "dense",
            "split_parameters",
            "shared_parameters",
            "expert_parameters",
        )
    }
    seen: dict = {
        name: {
            axis: (mesh.get_local_rank(axis), dist.get_process_group_ranks(mesh.get_group(axis)))
            for axis in mesh.mesh_dim_names or ()
        }
        for name, mesh in named.items()
    }
    seen["ranks"] = {name: mesh.mesh.tolist() for name, mesh in named.items()}
    seen["tokens"] = sorted(dist.get_process_group_ranks(meshes.tokens))
    seen["data"] = (meshes.data.rank(), dist.get_process_group_ranks(meshes.data))
    seen["communicators"] = [dist.get_process_group_ranks(g) for g in meshes.communicators]
    seen["round trips"] = [round_trip(meshes, name) for name in named if "parameters" in name]
    return seen


def round_trip(meshes: Meshes, name: str) -> bool:
    """Return True if a tensor cut over both sharding axes, the last cut last, is restored."""
    mesh = getattr(meshes, name)
    whole = torch.arange(48.0, device=mesh.device_type).view(12, 4)
    sharded = distribute_tensor(whole, mesh, [Replicate(), Shard(0), Shard(0)])
    rows = 12 // (mesh.size(1) * mesh.size(2))
    first = (mesh.get_local_rank(1) * mesh.size(2) + mesh.get_local_rank(2)) * rows
    local = sharded.to_local()
    assert isinstance(sharded, DTensor)
    # An axis at a time: torch 2.11 cannot undo two of a mesh whose axes are not in rank order.
    sharded = sharded.redistribute(placements=[Replicate(), Shard(0), Replicate()])
    sharded = sharded.redistribute(placements=[Replicate()] * 3)
    return bool(local[0, 0] == 4 * first) and torch.equal(sharded.to_local(), whole)


def meshes_of(layouts: list[ParallelDims], device_type: str) -> list[dict]:
    return [describe_meshes(dims, device_type) for dims in layouts]


def groups_along(seen: list[dict], mesh: str, axis: str) -> list[list[int]]:
    """Return the distinct groups of an axis, and check each rank's place by its local rank."""
    for rank, mine in enumerate(seen):
        local_rank, ranks = mine[mesh][axis]
        assert ranks[local_rank] == rank
    return sorted({tuple(mine[mesh][axis][1]) for mine in seen})  # pyright: ignore


ALONE_4 = [(0,), (1,), (2,), (3,)]
ALL_4 = [(0, 1, 2, 3)]
NEAR = [(0, 1), (2, 3)]
FAR = [(0, 2), (1, 3)]
LAYOUTS = {
    # dims: groups of replicas, tp, fsdp, ep, efsdp, data; number of communicators
    ParallelDims(4, dp_shard=4): (ALONE_4, ALONE_4, ALL_4, ALONE_4, ALL_4, ALL_4, 2),
    ParallelDims(4, dp_shard=4, ep=4): (ALONE_4, ALONE_4, ALL_4, ALL_4, ALONE_4, ALL_4, 2),
    ParallelDims(4, dp_shard=4, ep=2): (ALONE_4, ALONE_4, ALL_4, NEAR, FAR, ALL_4, 4),
    ParallelDims(4, dp_replicate=2, dp_shard=2, ep=2): (
        FAR,
        ALONE_4,
        NEAR,
        NEAR,
        ALONE_4,
        ALL_4,
        4,
    ),
    ParallelDims(4, dp_replicate=4): (ALL_4, ALONE_4, ALONE_4, ALONE_4, ALONE_4, ALL_4, 2),
    ParallelDims(4, dp_shard=2, tp=2): (ALONE_4, NEAR, FAR, ALONE_4, ALL_4, FAR, 4),
    ParallelDims(4, dp_shard=2, tp=2, ep=2): (ALONE_4, NEAR, FAR, NEAR, FAR, FAR, 4),
    ParallelDims(4, dp_shard=2, tp=2, ep=4): (ALONE_4, NEAR, FAR, ALL_4, ALONE_4, FAR, 4),
    ParallelDims(4, dp_shard=2, cp=2): (ALONE_4, ALONE_4, ALL_4, ALONE_4, ALL_4, FAR, 4),
    ParallelDims(4, pp=2, dp_shard=2, ep=2): (ALONE_4, ALONE_4, NEAR, NEAR, ALONE_4, NEAR, 4),
}


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(4))])
def test_meshes_of_four_ranks(device_type):
    seen_by_rank = spawn(4, meshes_of, list(LAYOUTS), device_type, device_type=device_type)
    for number, (dims, expected) in enumerate(LAYOUTS.items()):
        seen = [rank[number] for rank in seen_by_rank]
        *groups, communicators = expected
        found = [
            groups_along(seen, "split_parameters", "dp_replicate"),
            groups_along(seen, "split_parameters", "tp"),
            groups_along(seen, "split_parameters", "fsdp"),
            groups_along(seen, "expert_parameters", "ep"),
            groups_along(seen, "expert_parameters", "efsdp"),
            sorted({tuple(mine["data"][1]) for mine in seen}),
        ]
        assert found == groups, dims
        assert groups_along(seen, "expert_parameters", "dp_replicate") == groups[0], dims
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
            assert all(len(g) == getattr(dims, axis) for g in groups_along(seen, "dense", axis))
        for axis in ("dp_replicate", "efsdp", "ep"):
            found = groups_along(seen, "expert_parameters", axis)
            assert all(len(g) == getattr(dims, axis) for g in found)
        for rank, mine in enumerate(seen):
            data_rank, data_ranks = mine["data"]
            assert data_ranks[data_rank] == rank
            assert len(data_ranks) == dims.data_ranks
            assert mine["round trips"] == [True, True, True], dims
            stage = range(4 // dims.pp)
            assert mine["tokens"] == [rank // len(stage) * len(stage) + r for r in stage], dims
            replicas, _, shards = (
                len(mine["shared_parameters"][axis][1]) for axis in ("dp_replicate", "one", "fsdp")
            )
            assert (replicas, shards) == (dims.dp_replicate, dims.sharding_ranks), dims
            # Each is made once, by every rank in the same order.
            mine_made = [len(ranks) for ranks in mine["communicators"]]
            assert mine_made == [len(ranks) for ranks in seen[0]["communicators"]]
            assert len(mine_made) == communicators, dims


def test_the_views_hold_the_same_ranks_in_the_same_order():
    dims = ParallelDims(2, tp=2, ep=2)
    (ranks, _) = (seen[0]["ranks"] for seen in spawn(2, meshes_of, [dims], "cpu"))
    assert ranks["dense"] == [[[[[0, 1]]]]]
    assert ranks["split_parameters"] == [[[0], [1]]]
    assert ranks["expert_parameters"] == [[[0], [1]]]


def join(words: list[str]) -> tuple:
    config = Config.load(None, words, environ={})
    world = join_world(config, MOE)
    total = torch.ones(())
    dist.all_reduce(total)
    world.leave()  # the caller owns the group: it stays
    return world.rank, world.size, world.data_rank, str(world.device), float(total)


def test_joining_a_group_that_exists():
    words = ["train.device=cpu", "parallel.ep=2", "train.micro_batch_size=4"]
    assert spawn(2, join, words) == [(r, 2, r, "cpu", 2.0) for r in (0, 1)]


@pytest.fixture
def no_group():
    """Leave the group of earlier tests, which would hide who makes and destroys one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def test_one_process_is_a_mesh_of_one(tiny, no_group):
    for _ in range(2):  # one run after the other
        world = join_world(tiny(), MOE)
        assert (world.rank, world.size, world.data_rank) == (0, 1, 0)
        assert world.meshes.expert_parameters.mesh.shape == (1, 1, 1)
        assert dist.is_initialized()
        assert world.sum(torch.ones(2)).tolist() == [1, 1]
        again = join_world(tiny(), MOE)  # a concurrent run, or one after a failed run
        again.leave()
        assert dist.is_initialized()  # the first one's group
        world.leave()
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("words", "field"),
    [(["launch.nproc=4"], "launch.nproc"), (["parallel.ep=2"], "parallel.ep")],
)
@pytest.mark.parametrize("is_left", [False, True])
def test_one_process_is_no_world_of_several(words, field, is_left, tiny, no_group):
    if is_left:  # a group of one from an earlier run changes nothing
        join_world(tiny(), MOE)
    with pytest.raises(ConfigError) as caught:
        join_world(tiny(*words), MOE)
    assert caught.value.field == field
    assert dist.is_initialized() == is_left


def test_a_launcher_that_contradicts_the_settings(tiny, monkeypatch, no_group):
    place = LaunchedPlace(0, 0, 2, "localhost:1", None, on_machine=2)
    monkeypatch.setattr(world_module, "launched_place", lambda: place)
    with pytest.raises(ConfigError, match="3, but a launcher has started 2 processes") as caught:
        join_world(tiny("launch.nproc=3"), MOE)
    assert caught.value.field == "launch.nproc"
    assert not dist.is_initialized()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_compiler_starts_while_ranks_connect(compiled, tiny, monkeypatch, no_group):
    seen = []

    @contextmanager
    def started(device):
        seen.append(device)
        yield

    def nobody_comes(place, seconds):
        seen.append("connects")
        raise RunFailed("nobody")

    place = LaunchedPlace(0, 0, 2, "localhost:1", None, on_machine=2)
    monkeypatch.setattr(world_module, "launched_place", lambda: place)
    monkeypatch.setattr(world_module, "compiler_started", started)
    monkeypatch.setattr(world_module.processes, "find_ranks", nobody_comes)
    words = ["train.global_batch_size=8", f"compile.enabled={compiled}"]
    with pytest.raises(RunFailed, match="nobody"):
        join_world(tiny(*words), MOE)
    assert seen == [torch.device("cpu")] * compiled + ["connects"]
