"""Muon: its orthogonal matrices, its steps beside a plain loop, and equal bits on any mesh."""

import math
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from moetrain.cli.train import main
from moetrain.config import ConfigError
from moetrain.data.packing import IGNORE_INDEX
from moetrain.kernels.optim import muon, symmetric
from moetrain.kernels.optim.adamw import Settings
from moetrain.kernels.optim.muon import newton_schulz, newton_schulz_reference, orthogonalise
from moetrain.kernels.optim.rounding import BLOCK
from moetrain.kernels.optim.symmetric import symmetric_product
from moetrain.models.families import PRESETS
from moetrain.models.transformer import Inputs, Transformer
from tests.lib.checkpoints import tensors_of
from tests.lib.dispatched_ops import Ops
from tests.lib.distributed import spawn
from tests.lib.engines import (
    DENSE,
    ROWS,
    WORDS,
    assert_near,
    copy_of,
    make_engine,
    make_rows,
    train,
    weights_of,
)
from tests.lib.kernel_cases import devices
from tests.lib.muon_loops import check_a_skipped_step_changes_nothing

MUON = "optim.name=muon"


def draw(*shape, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device)


# ---- orthogonal matrices ------------------------------------------------------------------------

SHAPES = [(1, 1), (1, 7), (7, 1), (5, 5), (8, 20), (20, 8), (37, 64), (100, 3)]


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_are_those_of_the_reference(shape, dtype, device):
    x_BRC = draw(3, *shape, device=device).to(dtype)
    found_BRC = newton_schulz(x_BRC, 5, 1e-8)
    assert found_BRC.dtype == dtype
    for x_RC, found_RC in zip(x_BRC, found_BRC, strict=True):
        expected_RC = newton_schulz_reference(x_RC, 5, 1e-8)
        error = (found_RC.double() - expected_RC).norm() / expected_RC.norm()
        assert error < (1e-5 if dtype == torch.float32 else 5e-2)


def test_singular_values_are_near_one_and_vectors_stay():
    x_RC = draw(24, 60)
    found_RC = newton_schulz(x_RC[None], 5, 1e-8)[0]
    left, _, right = torch.linalg.svd(x_RC, full_matrices=False)
    values = left.T @ found_RC @ right.T
    assert (values - values.diag().diag()).norm() < 1e-3
    assert 0.65 < values.diag().min() <= values.diag().max() < 1.25


def test_newton_schulz_worked_example():
    found = newton_schulz_reference(torch.tensor([[3.0, 0], [0, 4]]), 1, 0.0)
    assert found.diag().tolist() == pytest.approx([1.1933, 0.9764], abs=1e-3)


def test_a_matrix_without_a_direction_stays_and_epsilon_is_added_to_the_norm():
    assert torch.equal(newton_schulz(torch.zeros(2, 3, 5), 5, 1e-8), torch.zeros(2, 3, 5))
    x_RC = draw(4, 4)
    once = newton_schulz(x_RC[None] / x_RC.norm(), 1, 1.0)[0]
    torch.testing.assert_close(once, newton_schulz_reference(x_RC, 1, x_RC.norm().item()).float())


# ---- symmetric products -------------------------------------------------------------------------

SIZES = [(1, 5, 3), (2, 130, 20), (3, 257, 65), (2, 256, 128)]


@pytest.mark.tier("quick", long=["sizes2-dtype0-cpu", "sizes2-dtype1-cpu"])
@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_symmetric_product_is_exactly_so_and_the_same_in_any_batch(sizes, dtype, device):
    x_BRC = draw(*sizes, device=device).to(dtype)
    gram_BRR = symmetric_product(x_BRC, backend="triton")
    added_BRR = symmetric_product(gram_BRR, gram_BRR, 2.0, -1.5, "triton")
    for y_BRR in (gram_BRR, added_BRR):
        assert torch.equal(y_BRR, y_BRR.mT)
    for i, x_RC in enumerate(x_BRC):
        alone_1RR = symmetric_product(x_RC[None].clone(), backend="triton")
        assert torch.equal(alone_1RR[0], gram_BRR[i])
        again_1RR = symmetric_product(alone_1RR, alone_1RR, 2.0, -1.5, "triton")
        assert torch.equal(again_1RR[0], added_BRR[i])


@devices
def test_symmetric_product_worked_example(device):
    x_1RC = torch.tensor([[[1.0, 2], [3, 4]]], device=device)
    added_1RR = torch.tensor([[[0.0, 1], [1, 0]]], device=device)
    for backend in ("reference", "triton"):
        gram_1RR = symmetric_product(x_1RC, backend=backend)
        assert gram_1RR[0].tolist() == [[5, 11], [11, 25]]
        found_1RR = symmetric_product(x_1RC, added_1RR, 2.0, 1.0, backend)
        assert found_1RR[0].tolist() == [[10, 23], [23, 50]]


@pytest.mark.tier("long", quick=["shape1-cpu", "shape2-cpu"])
@devices
@pytest.mark.parametrize("shape", [(260, 300), (300, 260), (40, 257)])
def test_matrices_by_symmetric_products_are_those_of_the_reference(shape, device, monkeypatch):
    """Only large matrices take the kernel. Its launches are ops, which a mode sees."""
    monkeypatch.setattr(symmetric, "use_fast", lambda backend, x: backend == "auto")
    x_1RC = draw(1, *shape, device=device)
    expected_RC = newton_schulz_reference(x_1RC[0], 2, 1e-8)
    for rows, expected in ((256, 4 * (min(shape) >= 256)), (1, 4), (math.inf, 0)):
        with Ops() as ops:
            found_1RC = newton_schulz(x_1RC, 2, 1e-8, rows)
        assert ops.names["moetrain.symmetric_product.default"] == expected
        error = (found_1RC[0].double() - expected_RC).norm() / expected_RC.norm()
        assert error < 1e-5


@pytest.mark.parametrize("limit", [1, 40, 8 * 20, 3 * 8 * 20, 2**20])
def test_batches_change_no_bit(limit):
    def stacks():
        sizes = [(3, 8, 20), (1, 20, 8), (5, 8, 20), (0, 8, 20), (2, 7, 13), (4, 7, 13)]
        return [draw(*size, seed=i) for i, size in enumerate(sizes)]

    found = stacks()
    orthogonalise(found, 5, 1e-8, 0.2, limit)
    for x_BRC, found_BRC in zip(stacks(), found, strict=True):
        for x_RC, found_RC in zip(x_BRC, found_BRC, strict=True):
            # It takes the place of another matrix of the batch.
            expected_RC = 0.2 * max(x_RC.shape) ** 0.5 * newton_schulz(x_RC[None], 5, 1e-8)[0]
            torch.testing.assert_close(found_RC, expected_RC, rtol=1e-6, atol=1e-6)
            alone = [x_RC[None].clone()]
            orthogonalise(alone, 5, 1e-8, 0.2)
            assert torch.equal(found_RC, alone[0][0])


@pytest.mark.parametrize(("rows", "columns"), [(32, 128), (128, 32), (64, 64)])
def test_updates_are_as_large_as_the_scale_says(rows, columns):
    """The updates have full rank; their root mean square does not depend on orientation."""
    stack = [draw(2, rows, columns)]
    orthogonalise(stack, 5, 1e-8, 0.2)
    rms = stack[0].square().mean().sqrt().item()
    assert rms == pytest.approx(0.2, rel=0.25)


def test_flops_are_those_of_the_products():
    x_BRC = draw(3, 12, 20)
    with FlopCounterMode(display=False) as counter:
        newton_schulz(x_BRC, 5, 1e-8)
    shape = torch.Size([3, 2 * 12, 20])  # two matrices, one above the other
    assert 2 * counter.get_total_flops() == muon.newton_schulz_flops(shape, 5, 2)
    tall = muon.newton_schulz_flops((20, 12), 5)
    assert 3 * tall == counter.get_total_flops()


# ---- dealing ------------------------------------------------------------------------------------


def test_deal_worked_example():
    assert muon._deal([(8, 8), (8, 8), (8, 8), (4, 4)], 2) == [[[0, 2], [1, 3]]]


@pytest.mark.parametrize("limit", [1, 300, 2**20])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_every_matrix_is_dealt_once_and_no_rank_has_much_more(ranks, limit):
    shapes = [(5 + 3 * (i % 4), 7 + i % 3) for i in range(29)]
    rounds = muon._deal(shapes, ranks, limit)
    dealt = sorted(i for one in rounds for places in one for i in places)
    assert dealt == list(range(len(shapes)))
    work = [muon.newton_schulz_flops(shape, 1) for shape in shapes]
    numbers = [shape[0] * shape[1] for shape in shapes]
    for one in rounds:
        assert len(one) == ranks
        loads = [sum(work[i] for i in places) for places in one]
        assert max(loads) - min(loads) <= max(work)
        places = [i for own in one for i in own]
        assert len(places) == 1 or sum(numbers[i] for i in places) <= limit * ranks
    assert len(rounds) == 1 or limit < 2**20


# ---- momentum -----------------------------------------------------------------------------------


def test_momentum_in_bf16_is_rounded_by_random_bits():
    """A gradient far below the last digit is therefore not lost."""
    numbers = 64 * BLOCK
    settings, (one, no) = Settings(0.9, 0.95, 1e-8, seed=0), torch.tensor([1.0, 0.0])
    momentum_N = torch.ones(numbers, dtype=torch.bfloat16)
    origins_B = BLOCK * torch.arange(64)
    value = 1 + 2**-11
    for step in range(1, 9):
        grad_N = torch.full((numbers,), (value - 0.5) * 2)  # towards the same value
        rates_S = settings.rates(one * step, one, no, 0.0, 0.0)
        muon.muon_momentum(grad_N, momentum_N, rates_S, 0.5, 0, origins_B)
        assert set(momentum_N.tolist()) <= {1.0, 1 + 2**-7, 1 + 2**-6}
    mean = momentum_N.double().mean() - 1
    expected = sum((value - 0.5) * 0.5**i for i in range(8)) + 0.5**8 - 1
    assert mean == pytest.approx(expected, rel=0.05)


# ---- steps beside a loop by hand ----------------------------------------------------------------


def is_hidden(name, weight):
    """Return True for hidden matrices, as the documentation defines them by name."""
    return name.startswith("layers.") and weight.dim() > 1 and "router" not in name


def logical(name, x):
    """Return views of a parameter's matrices, as the documentation defines them."""
    experts = [x] if x.dim() == 2 else list(x)
    if "w_gate_up" in name:
        return [half for expert in experts for half in expert.chunk(2)]
    return experts


def hand_loop(config, arch, steps, lr=1e-2):
    """Train by plain autograd, torch's AdamW, and Muon matrix by matrix."""
    model = Transformer(arch)
    model.init_weights(config.model.init_std, config.train.seed)
    optim, rules = config.optim, arch.plan().rules(model)
    weights = dict(model.named_parameters())
    rest = [
        {"params": [p], "weight_decay": optim.weight_decay * rules[name].decay}
        for name, p in weights.items()
        if not is_hidden(name, p)
    ]
    betas = (optim.beta1, optim.beta2)
    adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, eps=optim.eps, foreach=False)
    momenta = {name: torch.zeros_like(p) for name, p in weights.items() if is_hidden(name, p)}
    numbers = []
    for step in steps:
        tokens_BS, targets_BS = make_rows(step)
        hidden_BSD, _ = model.backbone(Inputs(tokens_BS))
        logits_TV = F.linear(hidden_BSD, model.head_weight).flatten(0, 1)
        loss = F.cross_entropy(logits_TV, targets_BS.flatten(), ignore_index=IGNORE_INDEX)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        with torch.no_grad():
            for name, momentum in momenta.items():
                p, mu = weights[name], optim.muon_momentum
                momentum.mul_(mu).add_((1 - mu) * p.grad)
                direction = mu * momentum + (1 - mu) * p.grad
                p.mul_(1 - lr * optim.weight_decay)
                for one, u in zip(logical(name, p), logical(name, direction), strict=True):
                    x = newton_schulz_reference(u, optim.muon_iterations, optim.eps).float()
                    one.sub_(lr * optim.muon_scale * max(u.shape) ** 0.5 * x)
                p.grad = None
        adamw.step()
        adamw.zero_grad()
        numbers.append((loss.item(), norm.item()))
    return numbers, weights


ONLY = ["moe.aux_loss_coef=0", "moe.z_loss_coef=0", "moe.bias_update_rate=0"]
CHANGED = ["optim.muon_momentum=0.7", "optim.muon_iterations=3", "optim.muon_scale=0.5"]
CHANGED += ["optim.max_grad_norm=0.1"]  # clipping could hide differences between steps


@pytest.mark.parametrize(
    "words", [ONLY, [*ONLY, *CHANGED], [*ONLY, "train.global_batch_size=8"], None]
)
def test_three_steps_equal_a_loop_by_hand(words):
    dense = words is None
    base = {"base": [*DENSE, "model.intermediate_size=24"]} if dense else {}
    engine = make_engine(MUON, *(words or []), **base)
    numbers = train(engine, range(3))
    expected, weights = hand_loop(engine.config, engine.arch, range(3))
    for mine, theirs in zip(numbers, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert numbers[2][0] < numbers[0][0]
    assert_near(weights_of(engine), weights, 1e-5)


def test_which_parameters_have_which_state():
    engine = make_engine(MUON)
    train(engine, range(1))
    names = {id(m.local): name for name, m in engine.fsdp.members.items()}
    for local, state in engine.optimizer.state.items():
        name = names[id(local)]
        keys = {"momentum"} if is_hidden(name, local) else {"exp_avg", "exp_avg_sq"}
        assert set(state) == {"step", *keys}, name
    saved = engine.state()["optim"]
    assert saved["layers.0.moe.experts.w_gate_up.momentum"].tensor.shape == (4, 16, 16)


def test_matrices_of_every_family_are_no_stacks_but_of_experts():
    for preset, arch in PRESETS.items():
        found = {}
        for layer in arch.layers():
            for part in layer:
                found |= {n: w for n, w in part.weights.items() if w.rule.is_matrix}
        for name, (shape, rule) in found.items():
            assert "router" not in name, preset
            assert len(shape) == (3 if rule.style == "expert" else 2), (preset, name)
            assert min(shape[-2:]) > 1, (preset, name)
            assert rule.stacked == (2 if name.endswith("w_gate_up") else 1), (preset, name)


@pytest.mark.gpu(2)
def test_gpus_follow_one_another_and_a_cpu():
    """They agree up to the rounding of matrices in bf16."""
    sizes = ["model.hidden_size=64", "model.head_dim=32", "model.moe_intermediate_size=32"]
    words = [*sizes, "train.device=cuda", "train.dtype=float32"]
    # All get the same weights: a GPU draws other initial values than a CPU.
    begun = {"model": weights_of(make_engine(MUON, *SMALL, *ALIKE, *sizes, micro=ROWS))}
    ((numbers, _, _),) = train_on_ranks({"one": ([*ALIKE, *words], ROWS)}, begun).values()
    ((exact, _, _),) = train_on_ranks({"one": ([*ALIKE, *sizes], ROWS)}, begun).values()
    runs = {"dp": ([*ALIKE, *words], ROWS // 2), "ep": ([*ALIKE, *words, "parallel.ep=2"], 4)}
    answers = spawn(2, train_on_ranks, runs, begun, device_type="cuda", timeout=300)
    found = [numbers, *(mesh[0] for rank in answers for mesh in rank.values())]
    for mine in found:
        for ours, wanted in zip(mine, exact, strict=True):
            assert ours == pytest.approx(wanted, rel=1e-2)


def test_a_step_without_a_finite_loss_changes_nothing():
    check_a_skipped_step_changes_nothing(make_engine(MUON))


# ---- checkpoints --------------------------------------------------------------------------------


@pytest.mark.tier("long")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_goes_on_bit_for_bit(dtype):
    words = [MUON, f"optim.state_dtype={dtype}", f"optim.gradient_dtype={dtype}"]
    first = make_engine(*words)
    train(first, range(2))
    state = copy_of(first.state())
    assert {x.dtype for n, x in state["optim"].items() if ".step" not in n} == {
        getattr(torch, dtype)
    }
    straight = train(first, range(2, 4))
    second = make_engine(*words)
    second.load_state(state)
    assert train(second, range(2, 4)) == straight
    for (name, mine), (_, theirs) in zip(second.weights(), first.weights(), strict=True):
        assert torch.equal(mine, theirs), name
    forgetful = make_engine(*words)
    forgetful.load_state({"model": state["model"]})
    assert train(forgetful, range(2, 4)) != straight


@pytest.mark.parametrize(("ours", "theirs"), [("adamw", "muon"), ("muon", "adamw")])
def test_the_state_of_another_optimizer_is_refused(ours, theirs):
    engine, other = (make_engine(f"optim.name={name}") for name in (ours, theirs))
    train(other, range(1))
    says = rf"and optim\.name '{ours}' \(.* differ\); set these"
    with pytest.raises(ConfigError, match=says) as refused:
        engine.load_state(copy_of(other.state()))
    assert refused.value.field == "checkpoint.resume"
    assert not engine.optimizer.state


def test_copies_for_checkpoints_get_as_much_memory_as_they_take():
    engine = make_engine(MUON)
    expected = engine.state_bytes()
    train(engine, range(1))
    parts = [part for group in engine.state().values() for part in group.values()]
    assert expected == sum(-(-x.tensor.nbytes // 256) * 256 for x in parts) + 2**20


@pytest.mark.tier("long")
def test_a_run_resumes_from_its_files(tiny_words, tmp_path):
    def run(out, *words):
        own = [w for w in tiny_words if not w.startswith("output_dir")]
        assert main([*own, MUON, f"output_dir={tmp_path / out}", *words]) == 0
        return tmp_path / out / "checkpoints" / "step-00000004"

    last = run("straight")
    straight = tensors_of(last)
    assert "layers.0.attn.wq.weight.momentum" in straight["optim"]
    last = run("parts", "checkpoint.interval=2")
    last.rename(tmp_path / "as_if_it_had_not_come_so_far")
    assert run("parts", "checkpoint.interval=2") == last
    for group, tensors in straight.items():
        again = tensors_of(last)[group]
        assert again.keys() == tensors.keys()
        for name, x in tensors.items():
            assert torch.equal(x, again[name]), name


# ---- meshes -------------------------------------------------------------------------------------

SMALL = ["model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=6"]
MESHES = {
    2: {
        "dp": ["parallel.dp_shard=2"],
        "replicas": ["parallel.dp_replicate=2", "parallel.dp_shard=1"],
        "tp+ep": ["parallel.tp=2", "parallel.ep=2"],
        "tp": ["parallel.tp=2"],
        "ep": ["parallel.ep=2"],
        "cp": ["parallel.cp=2", "parallel.cp_method=all_gather"],
        "pp": ["parallel.pp=2"],
    },
    4: {
        "dp4": [],
        "hsdp": ["parallel.dp_replicate=2"],
        "tp2": ["parallel.tp=2"],
        "ep4": ["parallel.ep=4"],
        "tp2+ep2": ["parallel.tp=2", "parallel.ep=2"],
        "pp2+tp2": ["parallel.pp=2", "parallel.tp=2"],
    },
}


def give(engine, step):
    """Set the same gradients on every mesh, on this rank its parts of them."""
    names = {id(member): name for name, member in engine.fsdp.members.items()}
    for bucket in engine.fsdp.buckets:
        bucket.gradient_N = torch.zeros(bucket.shard_N.numel(), dtype=bucket.gradient_dtype)
        for member in bucket.members:
            shape, name = member.layout.shape, names[id(member)]
            whole = draw(*shape, seed=1000 * step + list(engine.stages.table).index(name))
            member.piece_of(bucket.gradient_N).copy_(whole[member.layout.box])
        bucket.has_gradient = True
        bucket.show_gradient()


UNEVEN = [*DENSE, "model.intermediate_size=10"]  # rows 3, 3, 3 and 1 on four ranks
GIVEN = {
    "experts": ([], WORDS),
    "bf16 gradients": (["optim.gradient_dtype=bfloat16"], WORDS),
    "dense": ([], UNEVEN),
}


def step_on_given_gradients(runs, words, base):
    """Return the whole weights and momenta after three steps."""
    answers = {}
    for name, mesh in runs.items():
        micro = 2 if "pp" in name else 1
        # There are several rounds, and other batches.
        few = muon.Matrices if name == "one" else partial(muon.Matrices, limit=300)
        with patch("moetrain.optim.muon.Matrices", few):
            engine = make_engine(MUON, *SMALL, *words, *mesh, micro=micro, base=base)
        engine.optimizer.begin()
        for step in range(3):
            give(engine, step)
            clip, skipped = torch.tensor(0.5), torch.tensor(False)
            engine.optimizer.param_groups[0]["lr"] = 1e-2
            engine.optimizer.step(clip, skipped)
            engine.fsdp.clear_gradients()
        weights = weights_of(engine)
        members, state = engine.fsdp.members.items(), engine.optimizer.state
        momenta = {
            n: m.layout.whole(state[m.local]["momentum"])
            for n, m in members
            if m.rule.is_orthogonal
        }
        assert momenta
        answers[name] = weights, momenta
    return answers


@pytest.mark.tier("long", wide=["4-bf16 gradients", "4-dense", "4-experts"])
@pytest.mark.parametrize("case", GIVEN)
@pytest.mark.parametrize("world", MESHES)
def test_every_mesh_gives_the_same_bits(world, case):
    ((weights, momenta),) = step_on_given_gradients({"one": []}, *GIVEN[case]).values()
    meshes = {k: v for k, v in MESHES[world].items() if case != "dense" or "ep" not in k}
    for answers in spawn(world, step_on_given_gradients, meshes, *GIVEN[case], timeout=300):
        assert answers.keys() == meshes.keys()
        for mesh, (mine, mine_too) in answers.items():
            for name, x in mine.items():
                assert torch.equal(x, weights[name]), (mesh, name)
            for name, x in mine_too.items():
                assert torch.equal(x, momenta[name]), (mesh, name)


def train_on_ranks(runs, state=None):
    """Return losses, weights and the whole state of every mesh."""
    answers = {}
    for name, (words, micro) in runs.items():
        engine = make_engine(MUON, *SMALL, *words, micro=micro)
        if state is not None:
            engine.load_state(state)
        numbers = train(engine, range(3), micro, lr=1e-3)
        whole = {}
        for parameter, member in engine.fsdp.members.items():
            for key, x in engine.optimizer.state[member.local].items():
                whole[f"{parameter}.{key}"] = x if key == "step" else member.layout.whole(x)
        answers[name] = numbers, weights_of(engine), whole
    return answers


def runs_of(world):
    """Return the runs, in which a rank's micro-batch makes all ranks have as many rows."""
    found = {}
    for name, mesh in MESHES[world].items():
        shared = [w for w in mesh if w.startswith(("parallel.tp=", "parallel.cp=", "parallel.pp="))]
        data = world // 2 ** len(shared)
        found[name] = (mesh, 2 if "pp" in name else ROWS // data)
    return found


ALIKE = ["moe.aux_loss_scope=global_batch"]


@pytest.mark.tier("wide")
@pytest.mark.parametrize("world", MESHES)
def test_training_on_meshes_gives_one_processs_numbers_and_moves_between_them(world):
    runs = {name: ([*ALIKE, *words], micro) for name, (words, micro) in runs_of(world).items()}
    one = {"one": (ALIKE, ROWS)}
    ((numbers, weights, state),) = train_on_ranks(one).values()
    begun = {"model": weights, "optim": state}
    ((later, moved, _),) = train_on_ranks(one, begun).values()
    for expected, given in (((numbers, weights), None), ((later, moved), begun)):
        for answers in spawn(world, train_on_ranks, runs, given, timeout=300):
            for mesh, (mine, theirs, parts) in answers.items():
                for ours, wanted in zip(mine, expected[0], strict=True):
                    assert ours == pytest.approx(wanted, rel=1e-5), mesh
                assert_near(theirs, expected[1], 1e-5)
                if given is None:
                    for name, x in parts.items():
                        error = (x - state[name]).norm()
                        assert error <= 2e-5 * state[name].norm(), (mesh, name)
