"""FSDP's life cycle: any order of forwards and backwards, stages, fixed addresses, freed memory."""

import itertools
import math
from collections import Counter

import pytest
import torch
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moetrain.config import Config
from moetrain.models.hf.load import resolve_architecture
from moetrain.models.transformer import Inputs
from moetrain.parallel import apply
from moetrain.parallel.fsdp.bucket import GatherBuffer
from moetrain.parallel.fsdp.storage import registry as storages
from moetrain.parallel.fsdp.storage.protocol import Storage
from moetrain.parallel.fsdp.transport import registry as transports
from moetrain.parallel.fsdp.transport.collectives import Collectives
from moetrain.parallel.mesh import (
    STYLES,
    Layout,
    ParallelDims,
    all_gather_start,
    build_meshes,
)
from moetrain.parallel.pipeline.stages import Stages
from moetrain.parallel.world import join_world
from tests.lib.distributed import compile_by_turns, spawn

ORDERS = {
    "sequential": "f1 b1 f2 b2",
    "in flight": "f1 f2 b1 b2",
    "last first": "f1 f2 b2 b1",
}
VARIANTS = {
    "dp": [],
    "dp reshard": ["parallel.reshard_after_forward=yes"],
    "ep reshard": ["parallel.ep=2", "parallel.reshard_after_forward=yes"],
    "ep full": ["parallel.ep=2", "activation.policy=full"],
    "ep selective reshard": [
        "parallel.ep=2",
        "activation.policy=selective",
        "parallel.reshard_after_forward=yes",
    ],
    "ep last": ["parallel.ep=2", "parallel.reduce_at=last"],
    "tp reshard": ["parallel.tp=2", "parallel.reshard_after_forward=yes"],
    "compile reshard": ["compile.enabled=yes", "parallel.reshard_after_forward=yes"],
    "compile ep selective": [
        "compile.enabled=yes",
        "parallel.ep=2",
        "activation.policy=selective",
        "parallel.reshard_after_forward=yes",
    ],
}


def placed(words):
    """Return a sharded model, and the world."""
    config = Config.load(None, words, environ={})
    arch = resolve_architecture(config.model)
    world = join_world(config, arch)
    stages = Stages(config, arch, world.meshes, world.device)
    model, fsdp, _ = apply.place_model(config, arch, world, stages)
    return model, fsdp, world


def tokens_of(world, number):
    """Return a micro-batch of this rank, [2, 32], equal on tensor parallel ranks."""
    generator = torch.Generator().manual_seed(10 * number + world.data_rank)
    return torch.randint(0, 260, (2, 32), generator=generator).to(world.device)


def loss_of(model, hidden_BSD, tokens_BS):
    targets_T = tokens_BS.roll(-1, 1).flatten()
    weights_T = torch.full(targets_T.shape, 0.01, device=targets_T.device)
    h_TD = hidden_BSD.flatten(0, 1)
    return model.vocabulary.loss_sum(h_TD, model.head_weight, targets_T, weights_T).total


def gradients_of(fsdp):
    """Return this rank's gradients by name, and clear them."""
    fsdp.gradient_norm()
    found = {name: m.local.grad.to("cpu", copy=True) for name, m in fsdp.members.items()}
    fsdp.clear_gradients()
    return found


def in_order(model, fsdp, world, order):
    """Return the gradients of two micro-batches whose forwards and backwards run in ``order``."""
    losses = {}
    words = order.split()
    with fsdp.work():
        for i, (what, number) in enumerate(words):
            if what == "f":
                tokens_BS = tokens_of(world, int(number))
                hidden_BSD, _ = model.backbone(Inputs(tokens_BS))
                losses[number] = loss_of(model, hidden_BSD, tokens_BS)
            else:
                fsdp.backward(losses[number], is_last=i == len(words) - 1)
    return gradients_of(fsdp)


def all_orders(runs):
    """Return the differences from the sequential order's gradients, by run and order."""
    differ = {}
    for name, words in runs.items():
        torch.compiler.reset()
        if not torch.cuda.is_available():
            compile_by_turns(words)
        model, fsdp, world = placed(words)
        found = {key: in_order(model, fsdp, world, order) for key, order in ORDERS.items()}
        expected = found.pop("sequential")
        assert all(g.norm() > 0 for g in expected.values() if g.numel()), name
        for (order, got), parameter in itertools.product(found.items(), expected):
            if not torch.equal(got[parameter], expected[parameter]):
                differ[f"{name}: {order}, {parameter}"] = (
                    (got[parameter] - expected[parameter]).norm() / expected[parameter].norm()
                ).item()
    return differ


@pytest.mark.tier("wide", long=["1"])
@pytest.mark.parametrize("world", [1, 2])
def test_micro_batches_in_flight_give_the_sequential_orders_gradients(world, tiny_words):
    """They agree bit for bit: a sum of two terms does not depend on their order."""
    base = [*tiny_words, "model.num_layers=5", "model.num_kv_heads=2"]
    kept = VARIANTS if world > 1 else ["dp", "dp reshard", "compile reshard"]
    runs = {name: [*base, *VARIANTS[name]] for name in kept}
    assert spawn(world, all_orders, runs, timeout=300) == [{}] * world


@pytest.mark.gpu("world")
@pytest.mark.parametrize("world", [1, 2])
def test_micro_batches_in_flight_on_gpus(world, tiny_words):
    base = [*tiny_words, "model.num_layers=5", "model.num_heads=4", "model.num_kv_heads=2"]
    base += ["model.hidden_size=64", "model.moe_intermediate_size=32", "model.head_dim=32"]
    base += ["train.device=cuda", "train.deterministic=yes"]
    kept = VARIANTS if world > 1 else ["dp", "dp reshard", "compile reshard"]
    runs = {name: [*base, *VARIANTS[name]] for name in kept}
    assert spawn(world, all_orders, runs, device_type="cuda", timeout=300) == [{}] * world


@pytest.mark.parametrize("reshard", ["no", "yes"])
def test_stages_by_hand_are_the_whole_model(tiny_words, reshard):
    """run(0..k) and run(k..n), with the gradient handed over, change no bit."""
    words = [*tiny_words, "model.num_layers=5", f"parallel.reshard_after_forward={reshard}"]
    model, fsdp, world = placed(words)
    tokens_BS = tokens_of(world, 1)
    with fsdp.work():
        hidden_BSD, routing = model.backbone(Inputs(tokens_BS))
        whole = loss_of(model, hidden_BSD, tokens_BS)
        fsdp.backward(whole, is_last=True)
    expected = gradients_of(fsdp)
    for k in range(6):
        with fsdp.work():
            rows = model.prepare(Inputs(tokens_BS))
            sent, first = model.run(model.embed_tokens(tokens_BS), rows, 0, k)
            received = sent.detach().requires_grad_()
            x_BSD, second = model.run(received, rows, k)
            staged = loss_of(model, model.head(x_BSD, rows), tokens_BS)
            fsdp.backward(staged, is_last=False)
            torch.autograd.backward(sent, received.grad)
        assert torch.equal(staged, whole)
        both = model.routing([*first, *second])
        assert torch.equal(both.counts_LE, routing.counts_LE)
        for name, gradient in gradients_of(fsdp).items():
            assert torch.equal(gradient, expected[name]), (k, name)


@pytest.mark.parametrize("reshard", ["no", "yes"])
def test_one_backward_of_two_forwards(tiny_words, reshard):
    """Parameters that one process unshards stay until the last graph that reads them is freed."""
    words = [*tiny_words, "train.dtype=bfloat16", f"parallel.reshard_after_forward={reshard}"]
    model, fsdp, world = placed(words)
    expected = in_order(model, fsdp, world, "f1 b1 f2 b2")
    with fsdp.work():
        both = [tokens_of(world, number) for number in (1, 2)]
        losses = [loss_of(model, model.backbone(Inputs(tokens))[0], tokens) for tokens in both]
        fsdp.backward(sum(losses), is_last=True)
    for name, gradient in gradients_of(fsdp).items():
        assert (gradient - expected[name]).norm() <= 0.01 * expected[name].norm(), name


def plain_backwards(words):
    """Return the gradients of one micro-batch, by backwards that do not announce the last one."""
    model, fsdp, world = placed(words)
    tokens_BS = tokens_of(world, 1)
    with fsdp.work():
        loss_of(model, model.backbone(Inputs(tokens_BS))[0], tokens_BS).backward()
        kept = {b.unreduced_WN.dtype for b in fsdp.buckets if b.unreduced_WN is not None}
        assert kept == ({torch.float32} if fsdp.reduce_last else set())
    return gradients_of(fsdp)


def test_gradients_that_wait_for_a_last_backward_travel_in_the_end(tiny_words):
    words = [*tiny_words, "train.dtype=bfloat16"]
    for rank in zip(
        spawn(2, plain_backwards, [*words, "parallel.reduce_at=last"]),
        spawn(2, plain_backwards, [*words, "parallel.reduce_at=each"]),
        strict=True,
    ):
        last, each = rank
        for name, gradient in each.items():
            assert torch.equal(last[name], gradient), name
        assert each["embed.weight"].any()


@pytest.mark.parametrize("tenants", [0, 3])
def test_chunks_lays_gradients_where_members_lie_in_the_shard(tenants, tiny_words):
    sizes = ["lora.rank=8", "model.hidden_size=128", "model.head_dim=64", "model.num_heads=2"]
    sizes += ["model.num_kv_heads=2", "model.moe_intermediate_size=128"]
    _, fsdp, _ = placed([*tiny_words, *sizes])
    for bucket in fsdp.trained:
        rows = (tenants,) if tenants else ()
        gradients = [torch.randn(*rows, *member.layout.gathered_shape) for member in bucket.members]
        chunks_WN = bucket.chunks(gradients, tenants or 1)
        assert len(gradients) > 1
        assert sum(gradient.numel() for gradient in gradients) == chunks_WN.numel()
        for member, gradient in zip(bucket.members, gradients, strict=True):
            piece = member.piece_of(chunks_WN)
            assert torch.equal(piece, gradient.view(piece.shape))


class Bytes(Storage):
    """A storage outside the package: ranks exchange the bytes of values, and unpack them."""

    is_packed = True

    def __init__(self, spec):
        self.values_N = spec.weights.empty(spec.numel, spec.dtype).zero_()
        self.shard_N = self.source_N = torch.empty(1, dtype=torch.uint8).expand(spec.numel)

    @classmethod
    def takes(cls, spec):
        return not spec.rule.trainable

    @classmethod
    def make(cls, spec):
        return cls(spec)

    def read(self, start, shape):
        return self.values_N.narrow(0, start, shape.numel()).view(shape)

    def packed_bytes(self):
        return self.values_N.nbytes

    def start_gather(self, group, staging):
        sent = self.values_N.view(torch.uint8)
        return all_gather_start(sent, group, self.arrived(group.size(), staging))[1].wait

    def arrived(self, ranks, staging):
        return staging[: ranks * self.values_N.nbytes].view(ranks, -1)

    def unpack(self, out_N, bytes_W, start, numel):
        values_WN = bytes_W.view(self.values_N.dtype)[:, start : start + numel]
        out_N.copy_(values_WN.reshape(-1)[: out_N.numel()])


class Counted(Collectives):
    """A transport outside the package, which counts its traffic."""

    def __init__(self, group, counts):
        super().__init__(group)
        self.counts = counts

    def gather(self, shard_N, out_WN):
        self.counts["gathers"] += 1
        return super().gather(shard_N, out_WN)

    def reduce(self, chunks_WN, **kwargs):
        self.counts["reductions"] += 1
        return super().reduce(chunks_WN, **kwargs)


def with_registered(words):
    """Return the parameters whose gradients differ from those of the package's own storages and
    transports, and the traffic of the registered ones."""
    counts = Counter()

    def connect(buckets, setting, device, weights):
        for bucket in buckets:
            bucket.transport = Counted(bucket.group, counts)

    answers = []
    for is_registered in (False, True):
        if is_registered:
            storages.STORAGES = (Bytes, *storages.STORAGES)
            transports.TRANSPORTS = {"counted": connect}
        model, fsdp, world = placed(words)
        tokens_BS = tokens_of(world, 1)
        with fsdp.work():
            hidden_BSD, _ = model.backbone(Inputs(tokens_BS))
            fsdp.backward(loss_of(model, hidden_BSD, tokens_BS), is_last=True)
        fsdp.gradient_norm()
        members = {name: m for name, m in fsdp.members.items() if m.rule.trainable}
        answers.append({name: m.local.grad for name, m in members.items()})
        counts["bytes"] = sum(isinstance(bucket.storage, Bytes) for bucket in fsdp.buckets)
    expected, found = answers
    return [name for name in expected if not torch.equal(expected[name], found[name])], counts


def test_a_storage_and_a_transport_plug_in_by_their_registries(tiny_words):
    words = [*tiny_words, "train.dtype=bfloat16", "lora.rank=8"]
    for differ, counts in spawn(2, with_registered, words):
        assert not differ
        assert min(counts[name] for name in ("gathers", "reductions", "bytes")) > 0


def gathers(words):
    """Return how often each unit was gathered over four micro-batches, and its addresses."""
    model, fsdp, world = placed(words)
    counts = [0] * len(fsdp.units)
    places = [set() for _ in fsdp.units]
    for unit in fsdp.units:
        start = unit.start_gather

        def counted(unit=unit, start=start):
            counts[unit.index] += 1
            start()
            places[unit.index].add(unit.buckets[0].rows()[0].data_ptr())

        unit.start_gather = counted
    for _ in range(2):
        in_order(model, fsdp, world, "f1 b1 f2 b2")
    return counts, [len(found) for found in places]


@pytest.mark.tier("long")
def test_fsdp_gathers_parameters_once_a_step_at_fixed_addresses(tiny_words):
    base = [*tiny_words, "model.num_layers=4"]
    for counts, places in spawn(2, gathers, base):
        assert counts == [2] * 6  # two steps of two micro-batches
        assert places == [1] * 6
    resharded = [*base, "parallel.reshard_after_forward=yes"]
    for counts, places in spawn(2, gathers, resharded):
        # Two of four blocks are unsharded when the backward begins, and two when the next forward
        # does.
        assert counts == [2, 6, 6, 4, 4, 2]
        assert places == [1] * 6
    for counts, places in spawn(2, gathers, [*base, "parallel.reshard_after_forward=3"]):
        # Among the first three, the second has one of both buffers to itself.
        assert counts == [2, 6, 2, 4, 2, 2]
        assert places == [1] * 6


def test_unsharded_memory_of_one_process_goes_with_its_last_use(tiny_words):
    model, fsdp, world = placed([*tiny_words, "train.dtype=bfloat16", "model.num_layers=3"])
    tokens_BS = tokens_of(world, 1)

    def held():
        return [unit.region.memory_in_use() for unit in fsdp.units]

    with fsdp.work():
        hidden_BSD, _ = model.backbone(Inputs(tokens_BS))
        loss = loss_of(model, hidden_BSD, tokens_BS)
        assert all(held())
        fsdp.backward(loss, is_last=True)
        assert not any(held())
        model.backbone(Inputs(tokens_BS))
        assert all(held())


def test_a_region_keeps_its_address_and_its_tensors():
    region = GatherBuffer(torch.device("cpu"))
    region.size = 512
    tensor = region.memory[:4].view(torch.float32)
    tensor.fill_(3)
    assert region.memory.numel() == 512
    assert region.memory[:4].view(torch.float32) == 3
    region.free()
    assert region.memory_in_use() == 0
    assert region.memory.numel() == 512
    tensor.fill_(2)  # it has memory again
    assert region.memory[:4].view(torch.float32) == 2


def whole_again(shapes):
    """Return the parameters that are not restored from pieces, or not cut as by DTensor."""
    tp = build_meshes(ParallelDims(4, tp=4), "cpu")
    both = build_meshes(ParallelDims(4, dp_shard=2, tp=2, ep=2), "cpu")
    wrong = []
    for shape, style, meshes in itertools.product(shapes, STYLES, (tp, both)):
        whole = torch.arange(math.prod(shape)).view(shape)
        layout = Layout.of(whole.shape, style, meshes)
        if not torch.equal(layout.whole(whole[layout.box]), whole):
            wrong.append((shape, style))
        local, offset = compute_local_shape_and_global_offset(
            whole.shape, layout.mesh, layout.placements
        )
        box = tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))
        if layout.local_shape != tuple(local) or (math.prod(local) and layout.box != box):
            wrong.append((shape, style, layout.box, box))
    return wrong


def test_pieces_that_are_uneven_or_empty_make_the_whole():
    assert spawn(4, whole_again, [(1, 5), (5, 1), (5, 3), (7, 5, 2), (4, 4)]) == [[]] * 4


def test_parameters_outside_of_work_are_refused(tiny_words):
    model, _, world = placed(tiny_words)
    with pytest.raises(RuntimeError, match=r"outside of FSDP\.work"):
        model(tokens_of(world, 1))


def test_a_backward_after_its_work_is_refused(tiny_words):
    model, fsdp, world = placed(tiny_words)
    tokens_BS = tokens_of(world, 1)
    with fsdp.work():
        loss = loss_of(model, model.backbone(Inputs(tokens_BS))[0], tokens_BS)
    with fsdp.work(), pytest.raises(RuntimeError, match=r"after the FSDP\.work"):
        loss.backward()


def reduce_what_the_last_lacks(words):
    """Return gradients of two micro-batches by ``reduce_at``; the last has none for the head."""
    found = []
    for reduce_at in ("each", "last"):
        model, fsdp, world = placed([*words, f"parallel.reduce_at={reduce_at}"])
        tokens_BS = tokens_of(world, 1)
        with fsdp.work():
            hidden_BSD, _ = model.backbone(Inputs(tokens_BS))
            fsdp.backward(loss_of(model, hidden_BSD, tokens_BS), is_last=False)
            x_BSD, _ = model.run(model.embed_tokens(tokens_BS), model.prepare(Inputs(tokens_BS)))
            fsdp.backward(x_BSD.square().sum(), is_last=True)
        found.append(gradients_of(fsdp))
    return found


def test_gradients_that_the_last_micro_batch_lacks_travel_too(tiny_words):
    for each, last in spawn(2, reduce_what_the_last_lacks, tiny_words):
        assert each["norm.weight"].norm() > 0
        for name, gradient in each.items():
            torch.testing.assert_close(last[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
