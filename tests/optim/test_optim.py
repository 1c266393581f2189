"""AdamW: its numbers, rounded moments, and the copy that gathers send."""

import pytest
import torch

from moetrain.config import ConfigError
from moetrain.kernels.optim.adamw import Settings, adamw
from moetrain.kernels.optim.rounding import BLOCK
from moetrain.optim.adamw import AdamW
from moetrain.parallel.apply import draw_values
from moetrain.runtime.arena import aligned
from tests.lib.dispatched_ops import Touches
from tests.lib.distributed import spawn
from tests.lib.engines import ROWS, make_batches, make_engine, objective_of, train, weights_of
from tests.lib.kernel_cases import devices
from tests.lib.updates import BF16, NARROW, copied

SETTINGS = Settings(0.9, 0.95, 1e-8, seed=7)


def shard(numbers, device="cpu", dtype=torch.float32):
    """Return parameters, gradients and moments; two of three blocks decay."""
    generator = torch.Generator().manual_seed(0)
    blocks = -(-numbers // BLOCK)
    draws = [torch.randn(numbers, generator=generator) for _ in range(4)]
    tensors = [*draws[:2], draws[2].to(dtype), draws[3].square().to(dtype)]
    decays_B = (torch.arange(blocks) % 3 > 0).to(torch.uint8)
    return [x.to(device) for x in tensors], decays_B.to(device)


def rates(device, step=5, clip=0.5, skipped=0):
    scalars = (torch.tensor(float(x), device=device) for x in (step, clip, skipped))
    return SETTINGS.rates(*scalars, 1e-2, 0.1)


def places(numbers, device="cpu", first=0):
    return first + BLOCK * torch.arange(-(-numbers // BLOCK), device=device)


@devices
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_adamw_matches_torch(backend, device):
    (param_N, grad_N, avg_N, avg_sq_N), decays_B = shard(5 * BLOCK + 3, device)
    expected = [x.clone() for x in (param_N, avg_N, avg_sq_N)]
    for block, decays in enumerate(decays_B.tolist()):
        p, m, v = (x[block * BLOCK :][:BLOCK] for x in expected)
        torch._fused_adamw_(
            [p],
            [grad_N[block * BLOCK :][:BLOCK].clone()],
            [m],
            [v],
            [],
            [torch.tensor(5.0, device=device)],
            amsgrad=False,
            lr=1e-2,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1 * decays,
            eps=1e-8,
            maximize=False,
            grad_scale=torch.tensor(2.0, device=device),
        )
    out_N = torch.empty_like(param_N)
    tensors = (param_N, grad_N, avg_N, avg_sq_N, rates(device), decays_B, SETTINGS)
    adamw(*tensors, out_N=out_N, backend=backend)
    for ours, theirs in zip((param_N, avg_N, avg_sq_N), expected, strict=True):
        # The error is absolute, because sums of values up to 4 may cancel.
        torch.testing.assert_close(ours, theirs, rtol=3e-7, atol=5e-7)
    assert torch.equal(out_N, param_N)


@devices
@pytest.mark.parametrize("first", [0, 4 * 31, 2**35 + 8])
def test_adamw_kernel_rounds_moments_as_the_reference(first, device):
    numbers = 2 * BLOCK + 100
    found = []
    for backend in ("reference", "triton"):
        tensors, decays_B = shard(numbers, device, torch.bfloat16)
        origins_B = places(numbers, device, first)
        adamw(*tensors, rates(device), decays_B, SETTINGS, origins_B, backend=backend)
        found.append(tensors)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(found[0][2:], found[1][2:], strict=True):
        # Few elements may differ, at the very edge where fp32 results differ by a rounding.
        assert (ours != theirs).sum() <= 2
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0)


def test_stochastic_rounding_is_unbiased_and_repeatable():
    numbers = 64 * BLOCK
    value = 1 + 3 * 2**-10  # three eighths of the way from 1 to the next value of bf16

    def moments(step, first=0, seed=7):
        """Return moments after a step whose gradients leave them unchanged on average."""
        settings = SETTINGS._replace(seed=seed, beta1=0.0, beta2=0.0)
        steps, one, no = (torch.tensor(float(x)) for x in (step, 1, 0))
        rates_S = settings.rates(steps, one, no, 0.0, 0.0)
        zeros = [torch.zeros(numbers, dtype=torch.bfloat16) for _ in AdamW.MOMENTS]
        grad_N, decays_B = torch.full((numbers,), value), torch.zeros(64, dtype=torch.uint8)
        tensors = (torch.zeros(numbers), grad_N, *zeros, rates_S, decays_B, settings)
        adamw(*tensors, places(numbers, first=first))
        return zeros

    for step in (1, 2):
        avg_N, avg_sq_N = moments(step)
        for x_N, exact in ((avg_N, value), (avg_sq_N, value**2)):
            assert set(x_N.tolist()) <= {1.0, 1 + 2**-7}
            # The bound is five deviations of the mean of so many coins.
            assert abs(x_N.double().mean() - exact) < 5 * 2**-8 / numbers**0.5
        up = [(x_N > 1).double() for x_N in (avg_N, avg_sq_N)]
        pairs = [up, (up[0][1:], up[0][:-1]), (up[0], (moments(step + 1)[0] > 1).double())]
        pairs.append((up[0], (moments(step, seed=8)[0] > 1).double()))
        for a, b in pairs:
            assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / numbers**0.5
        assert torch.equal(avg_N, moments(step)[0])
        assert torch.equal(avg_N[8 * BLOCK :], moments(step, first=8 * BLOCK)[0][: -8 * BLOCK])


@devices
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_skipped_step_writes_the_copy_alone(backend, device):
    tensors, decays_B = shard(BLOCK + 5, device, torch.bfloat16)
    before = [x.clone() for x in tensors]
    tensors[1].fill_(float("nan"))
    settings = (SETTINGS, places(BLOCK + 5, device), torch.empty_like(tensors[0]))
    rates_S = rates(device, clip=float("nan"), skipped=1)
    adamw(*tensors, rates_S, decays_B, *settings, backend=backend)
    for i in (0, 2, 3):
        assert torch.equal(tensors[i], before[i])
    assert torch.equal(settings[-1], before[0])


@pytest.mark.gpu
def test_adamw_copy_is_torchs_cast():
    """On a GPU only: Triton's interpreter truncates where a GPU rounds to bf16."""
    tensors, decays_B = shard(BLOCK + 5, "cuda")
    out_N = torch.empty_like(tensors[0], dtype=torch.bfloat16)
    adamw(*tensors, rates("cuda"), decays_B, SETTINGS, out_N=out_N, backend="triton")
    assert torch.equal(out_N, tensors[0].bfloat16())


FLOAT8 = ["optim.state_dtype=float8", "optim.weight_dtype=bfloat16"]
COPIES = {
    1: {
        "alone": [BF16],
        "alone turns": [BF16, "parallel.reshard_after_forward=yes"],
        "alone muon": [BF16, "optim.name=muon"],
        "alone float8": [BF16, *FLOAT8],
        "alone float8 fp32": ["train.dtype=float32", *FLOAT8],
        "alone float8 moments": [BF16, FLOAT8[0]],
    },
    2: {
        "dp": [BF16],
        "dp turns": [BF16, "parallel.reshard_after_forward=yes"],
        "ep": [BF16, "parallel.ep=2"],
        "tp+ep": [BF16, "parallel.tp=2", "parallel.ep=2"],
        "replicas": [BF16, "parallel.dp_replicate=2"],
        "fp32": ["train.dtype=float32"],
        "muon": [BF16, "optim.name=muon", "optim.state_dtype=bfloat16"],
        "float8": [BF16, *FLOAT8],
        "float8 copied": [BF16, *FLOAT8, "parallel.fsdp_transport=copy"],
        "float8 turns": [BF16, *FLOAT8, "parallel.reshard_after_forward=yes"],
        "float8 fp32": ["train.dtype=float32", *FLOAT8, "parallel.ep=2"],
        "muon turns": [BF16, "optim.name=muon", "parallel.reshard_after_forward=yes"],
    },
}


def cast_buckets(engine):
    return [b for unit in engine.fsdp.units for b in unit.buckets if b.is_cast and b.is_trained]


def train_twice(runs):
    """Return losses and weights of every run with copies, and with casts before every gather."""
    answers = {}
    for name, words in runs.items():
        found = []
        for keeps in (True, False):
            engine = make_engine(*words, "model.num_layers=3", micro=4)
            numbers = []
            for step in range(3):
                numbers += train(engine, [step], micro=4)
                buckets = cast_buckets(engine)
                if keeps and "turns" not in name:
                    assert all(bucket.is_fresh for bucket in buckets)
                    assert bool(buckets) == (name != "fp32")
                    for bucket in buckets:
                        for member in bucket.members:  # nothing reads the padding between them
                            copy = member.piece_of(bucket.cast_N)
                            assert torch.equal(copy, member.local.to(bucket.dtype)), name
                for bucket in buckets:
                    if not keeps:
                        bucket._version = None
            found.append((numbers, weights_of(engine)))
        answers[name] = found
    return answers


@pytest.mark.tier("wide", long=["1"])
@pytest.mark.parametrize("world", COPIES)
def test_copies_that_updates_write_are_what_gathers_would_cast(world):
    for answers in spawn(world, train_twice, COPIES[world], timeout=300):
        for name, (kept, cast) in answers.items():
            assert kept[0] == cast[0], name
            for weight, value in kept[1].items():
                assert torch.equal(value, cast[1][weight]), (name, weight)


GPU = ["train.device=cuda", "train.deterministic=yes", "model.hidden_size=64"]
GPU += ["model.head_dim=32", "model.moe_intermediate_size=32"]


@pytest.mark.gpu("world")
@pytest.mark.parametrize("world", COPIES)
def test_copies_that_updates_write_on_gpus(world):
    runs = {name: [*words, *GPU] for name, words in COPIES[world].items()}
    runs.pop("tp+ep", None)  # this model has too few heads
    for answers in spawn(world, train_twice, runs, device_type="cuda", timeout=300):
        for name, (kept, cast) in answers.items():
            assert kept[0] == cast[0], name
            for weight, value in kept[1].items():
                assert torch.equal(value, cast[1][weight]), (name, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("turns", ["no", "yes"])
def test_an_update_on_one_gpu_takes_no_more_memory_than_the_backward(turns):
    """The memory of gradients suffices for the copies."""
    words = [*GPU, BF16, "model.num_layers=8", "model.num_experts=32", "model.hidden_size=512"]
    words += ["model.moe_intermediate_size=512", f"parallel.reshard_after_forward={turns}"]
    engine = make_engine(*words)
    train(engine, range(2))
    peaks = []
    for part in (
        lambda: engine.forward_backward(make_batches(2), objective_of(engine)),
        lambda: engine.step(1e-2),
    ):
        torch.cuda.reset_peak_memory_stats()
        part()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= peaks[0]


def loss_of(engine):
    return engine.forward(make_batches(0), objective_of(engine)).total.item()


CHANGES = {
    "write": lambda engine: engine.fsdp.write("norm.weight", (), torch.full((16,), 3.0)),
    "draw": lambda engine: draw_values(engine.fsdp, 0.1, 5),
    "a shard in place": lambda engine: cast_buckets(engine)[0].shard_N.mul_(2),
    "a view, in inference mode": torch.inference_mode()(
        lambda engine: engine.fsdp.members["norm.weight"].local.fill_(2)
    ),
    "a DTensor": torch.no_grad()(lambda engine: engine.model.norm.weight.fill_(2)),
    "released": lambda engine: engine.fsdp.release(),
}


@pytest.mark.tier("long", quick=["True-a shard in place", "False-a DTensor"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("frees", [True, False])
def test_forward_uses_weights_after_any_change(change, frees):
    """This also holds if memory stays allocated between steps, as on several ranks."""
    engine, other = make_engine(BF16), make_engine(BF16)
    for one in (engine, other):
        one.fsdp.frees = frees
        train(one, range(2))
        CHANGES[change](one)
    for unit in other.fsdp.units:
        for bucket in unit.buckets:
            bucket._version = None
    before = loss_of(make_engine(BF16))
    assert loss_of(engine) == loss_of(other) != before


def test_a_state_that_is_loaded_is_computed_with():
    engine = make_engine(BF16)
    state = {
        group: {name: part.tensor.clone() for name, part in parts.items()}
        for group, parts in engine.state().items()
    }
    first = train(engine, range(2))
    engine.load_state(state)
    assert train(engine, range(2)) == first


@pytest.mark.parametrize("words", [[], ["parallel.reshard_after_forward=yes"]])
def test_passes_after_an_update_read_no_master(words):
    """They read the copies that the update wrote. A cast, however it is made, reads a master."""
    engine = make_engine(BF16, "model.num_layers=3", *words)
    buckets = cast_buckets(engine)

    def masters_read(step):
        with Touches(bucket.shard_N for bucket in buckets) as touches:
            engine.forward_backward(make_batches(step), objective_of(engine))
        engine.step(1e-2)
        return touches.touched

    everything = set(range(len(buckets)))
    assert masters_read(0) == everything != set()  # no update has written copies yet
    # Memory that blocks take in turns keeps no copy.
    kept = everything if not words else {i for i, b in enumerate(buckets) if b.is_fresh}
    assert masters_read(1) == everything - kept
    assert kept
    buckets[0].shard_N.mul_(2)
    assert 0 in masters_read(2)


NORMS = {
    1: {"one": [], "one bf16": [BF16], "one kept in bf16": [NARROW]},
    2: {
        "dp": [],
        "dp bf16": [BF16],
        "dp kept in bf16": [NARROW],
        "dp last": [BF16, "parallel.reduce_at=last"],
        "tp+ep": ["parallel.tp=2", "parallel.ep=2"],
        "replicas": ["parallel.dp_replicate=2"],
        "replicas kept in bf16": ["parallel.dp_replicate=2", NARROW],
        "frozen": ["train.freeze=embed.weight"],
    },
}


def norms(runs):
    """Return our norm after several accumulated micro-batches, and that of the whole gradient."""
    answers = {}
    for name, words in runs.items():
        engine, found = make_engine(*words, micro=2), []
        for step in range(2):
            batches = make_batches(step, 2, engine.world.data_rank, engine.world.dims.data_ranks)
            engine.forward_backward(batches, objective_of(engine))
            norm = engine.fsdp.gradient_norm()
            wholes = [
                m.layout.whole(m.local.grad)
                for m in engine.fsdp.members.values()
                if m.rule.trainable
            ]
            exact = torch.stack([w.double().square().sum() for w in wholes]).sum().sqrt()
            found.append((norm.item(), exact.item()))
            engine.step(1e-2)
        answers[name] = found
    return answers


@pytest.mark.tier("long")
@pytest.mark.parametrize("world", NORMS)
def test_the_norm_that_reductions_leave_is_the_gradients(world):
    for answers in spawn(world, norms, NORMS[world], timeout=300):
        for name, found in answers.items():
            assert len({norm for norm, _ in found}) == 2
            for norm, exact in found:
                assert norm == pytest.approx(exact, rel=1e-6), name


def test_the_norm_reads_no_gradient():
    engine = make_engine()
    engine.forward_backward(make_batches(0), objective_of(engine))
    memory = [bucket.gradient_N for bucket in engine.fsdp.buckets]
    with Touches(memory) as touches:
        norm = engine.fsdp.gradient_norm()
    assert touches.ops == []
    gradients = [member.local.grad for member in engine.fsdp.members.values()]
    with Touches(memory) as touches:
        expected = torch.nn.utils.get_total_norm(gradients).item()
    assert len(touches.touched) == len(memory)
    assert norm == pytest.approx(expected, rel=1e-6)


# ---- moments in bf16 ---------------------------------------------------------------------------

SMALL = "optim.state_dtype=bfloat16"


def test_moments_in_bf16_take_half_and_go_on_bit_for_bit():
    straight = make_engine(SMALL)
    numbers = train(straight, range(5))
    first, second = make_engine(SMALL), make_engine(SMALL)
    train(first, range(2))
    states = first.optimizer.state.values()
    assert {state[key].dtype for state in states for key in AdamW.MOMENTS} == {torch.bfloat16}
    second.load_state(copied(first))
    assert train(second, range(2, 5)) == numbers[2:]
    for name, weight in weights_of(straight).items():
        assert torch.equal(weight, weights_of(second)[name]), name
    other = make_engine(SMALL, "train.seed=1")
    other.load_state(copied(first))
    assert train(other, range(2, 5)) != numbers[2:]


def test_copies_for_checkpoints_get_as_much_memory_as_they_take():
    for dtype in ("float32", "bfloat16"):
        engine = make_engine(f"optim.state_dtype={dtype}")
        expected = engine.state_bytes()
        train(engine, range(1))
        assert engine.state_bytes() == expected
        parts = [part for group in engine.state().values() for part in group.values()]
        taken = sum(aligned(part.tensor.nbytes) for part in parts)
        assert expected == taken + 2**20


@pytest.mark.parametrize(("ours", "theirs"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_moments_of_another_dtype_are_refused_and_name_their_setting(ours, theirs):
    engine, other = (make_engine(f"optim.state_dtype={dtype}") for dtype in (ours, theirs))
    train(other, range(1))
    says = rf"is {theirs} .* run has {ours} .*; set optim\.state_dtype to that"
    with pytest.raises(ConfigError, match=says):
        engine.load_state(copied(other))
    assert not engine.optimizer.state


MESHES = {"dp": [], "ep": ["parallel.ep=2"], "replicas": ["parallel.dp_replicate=2"]}


def train_small(runs, micro):
    """Return losses and whole moments of runs with bf16 moments, and whether replicas agree."""
    answers = {}
    for name, words in runs.items():
        engine = make_engine(SMALL, *words, micro=micro)
        numbers = train(engine, range(4), micro, lr=1e-3)
        state = engine.optimizer.state
        members = engine.fsdp.members.items()
        moments = {
            n: [m.layout.whole(state[m.local][k]) for k in AdamW.MOMENTS] for n, m in members
        }
        answers[name] = numbers, moments
    return answers


@pytest.mark.tier("long")
def test_every_mesh_rounds_moments_alike():
    """Elements agree one by one, except for a few at the edge between two roundings."""
    (numbers, moments) = train_small({"one": []}, ROWS)["one"]
    answers = spawn(2, train_small, MESHES, ROWS // 2, timeout=300)
    for name in MESHES:
        found = {}
        for rank in answers:
            assert rank[name][0] == answers[0][name][0]
            for parameter, mine in rank[name][1].items():
                first = found.setdefault(parameter, mine)
                assert all(map(torch.equal, first, mine)), (name, parameter)
        assert found.keys() == moments.keys()
        torch.testing.assert_close(answers[0][name][0], numbers, rtol=1e-5, atol=1e-5)
        ours = torch.cat([m.flatten() for pair in found.values() for m in pair])
        theirs = torch.cat([m.flatten() for n in found for m in moments[n]])
        assert (ours != theirs).float().mean() < 0.001, name


def test_adamw_refuses_a_host_master_that_it_would_not_update():
    engine = make_engine()
    next(iter(engine.fsdp.buckets)).storage.has_host_master = True
    with pytest.raises(TypeError, match="Plain: a master in host memory derives from Offloaded"):
        AdamW(engine.fsdp, engine.config.optim, seed=0)
