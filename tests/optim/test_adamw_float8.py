"""Moments in float8 and weights in bf16: the codes, their rounding, meshes and checkpoints."""

import pytest
import torch

from moetrain.cli.plan import main
from moetrain.config import Config, ConfigError
from moetrain.kernels.optim.adamw import Settings
from moetrain.kernels.optim.adamw_float8 import Float8Moments, adamw_float8, moment_place
from moetrain.optim.adamw import AdamW
from moetrain.runtime.arena import aligned
from tests.lib.distributed import spawn
from tests.lib.engines import (
    ROWS,
    assert_near,
    make_batches,
    make_engine,
    objective_of,
    train,
    weights_of,
)
from tests.lib.float8_moments import moments_of
from tests.lib.kernel_cases import devices
from tests.lib.specs.optim import widened
from tests.lib.updates import copied

SETTINGS = Settings(0.9, 0.95, 1e-8, seed=7)
MOMENTS = "optim.state_dtype=float8"
SMALL = [MOMENTS, "optim.weight_dtype=bfloat16"]


def rates(step=5, clip=1.0, skipped=0, device="cpu", settings=SETTINGS, lr=1e-2, decay=0.1):
    scalars = (torch.tensor(float(x), device=device) for x in (step, clip, skipped))
    return settings.rates(*scalars, lr, decay)


def draw(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- codes and rounding ------------------------------------------------------------------------


def stored(first, second, settings=SETTINGS, step=5):
    """Return the moments, in fp64, that a step from zero stores for these values.

    Each is ``[R, C]``: with betas of 0 a step's gradient becomes its moment.
    """
    one = settings._replace(beta1=0.0, beta2=0.0)
    found = []
    for grad in (first, second.sqrt()):
        moments = moments_of(grad.shape)
        moments.update(
            torch.zeros_like(grad),
            grad,
            out=None,
            rates_S=rates(step, settings=one),
            settings=one,
            decays=False,
        )
        found.append(widened(*moments)[len(found)])
    return found


def test_float8_first_moments_are_scaled_e4m3():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes % 128 != 127]  # these codes are NaN
    scale = torch.full((1, 8), 127 + 8, dtype=torch.uint8)
    zeros = torch.zeros(1, 254, dtype=torch.uint8), torch.zeros(1, 8, dtype=torch.uint8)
    ours = widened(codes[None], scale, *zeros)[0]
    assert torch.equal(ours[0].float(), codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("scale", [1.0, 3e-7, 2.0**40])
def test_float8_moments_keep_representable_values(scale):
    """The values are powers of two times four bits of mantissa, over the whole range of a group."""
    power = 2.0 ** torch.tensor(scale).log2().round()
    mantissas = 1 + torch.arange(8) / 8
    fields = 2.0 ** torch.arange(-3, 1)
    first = (fields[:, None] * mantissas).flatten()[None] * power
    small = torch.arange(1, 9) * 2.0**-17  # these are evenly spaced
    first[0, :8] = -small * power
    second = (2.0 ** torch.arange(-31, 1)[:, None] * mantissas).float() * power
    second = second.T.contiguous()  # each row has all powers of two
    assert torch.equal(stored(first, first.square())[0].float(), first)
    # The squares of some roots differ by a rounding, at the border of the next code.
    found = stored(first, second)[1]
    torch.testing.assert_close(found.float(), second, rtol=1 / 8, atol=0)
    assert (found.float() == second).float().mean() > 0.9


def test_rounding_is_right_on_average():
    numbers = 2**16
    top = torch.full((numbers // 31, 1), 1.75)  # the largest of each group, which has an exact code
    for value in (1.05, 0.3, 2.0**-10 * 1.3, 2.0**-16 * 1.3, 2.0**-18):
        first = torch.cat([torch.full((len(top), 31), value), top], 1)
        found = stored(first, first)
        for x_RC, exact in zip(found, (first, first.sqrt().square()), strict=True):
            rest = x_RC[:, :31]
            assert len(rest.unique()) <= 2
            spread = rest.max() - rest.min() if len(rest.unique()) == 2 else 1e-7
            error = rest.mean() - exact[0, 0].double()
            # The bound is five deviations of the mean of so many coins, and half of the resolution
            # of 8 bits.
            assert abs(error) < spread * (2.5 / rest.numel() ** 0.5 + 1 / 512), value
        assert (found[0][:, 31:] == 1.75).all()
        signs = stored(-first, first)[0]
        assert abs(signs[:, :31].mean() + found[0][:, :31].mean()) < 1e-6


def test_a_second_moment_is_never_lost_beside_others():
    second = torch.full((4, 32), 1e-30)
    second[:, 0] = 1.0
    found = stored(second, second)
    assert (found[0][:, 1:] == 0).all()
    assert (found[1] > 0).all()
    assert (stored(torch.zeros(2, 40), torch.zeros(2, 40))[1] == 0).all()


def test_a_second_moment_decays_by_less_than_its_spacing():
    settings = Settings(0.9, 0.9995, 1e-8, seed=3)
    moments, param = moments_of((64, 256)), torch.zeros(64, 256)
    moments.update(param, draw((64, 256), 0), None, rates(1, settings=settings), settings, True)
    before = widened(*moments)[1].mean()
    nothing = torch.zeros(64, 256)
    for step in range(2, 202):
        rates_S = rates(step, settings=settings)
        moments.update(param, nothing, None, rates_S, settings, True)
    assert widened(*moments)[1].mean() / before == pytest.approx(0.9995**200, rel=0.02)


def test_bf16_weights_move_by_less_than_their_spacing_on_average():
    value, lr = 1.0, 2.0**-12  # a thirty-second of the way to the next value
    param = torch.full((256, 256), value, dtype=torch.bfloat16)
    moments = moments_of(param.shape)
    grad = -torch.ones(param.shape)
    for step in range(1, 9):
        rates_S = rates(step, lr=lr, decay=0.0)
        moments.update(param, grad, None, rates_S, SETTINGS, True)
    moved = param.double().mean() - value
    assert moved == pytest.approx(8 * lr, rel=0.03)
    assert set(param.unique().tolist()) > {1.0, 1 + 2**-7}


def test_a_weight_and_its_moments_are_rounded_by_bits_of_their_own():
    """Values lie between two codes, and their roundings are uncorrelated."""
    one, shape = SETTINGS._replace(beta1=0.0, beta2=0.0), (512, 512)
    param, moments = torch.ones(shape, dtype=torch.bfloat16), moments_of(shape)
    grad, rates_S = torch.full(shape, 1.05), rates(1, settings=one, lr=1.5e-3, decay=0.0)
    moments.update(param, grad, None, rates_S, one, False)
    rounded = (param, moments.tensors["exp_avg"], moments.tensors["exp_avg_sq"])
    is_up = torch.stack([(x == x.max()).flatten().double() for x in rounded])
    assert ((is_up.mean(1) > 0.1) & (is_up.mean(1) < 0.9)).all()
    related = torch.corrcoef(is_up) - torch.eye(3)
    assert related.abs().max() < 5 / param.numel() ** 0.5  # five deviations


# ---- a step ------------------------------------------------------------------------------------

SHAPES = [(5, 64), (3, 100), (70,), (2, 3, 40), (0, 32), (4, 1, 4), (33, 1056)]


@pytest.mark.tier("quick", long=["cpu-shape6-dtype0", "cpu-shape6-dtype1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@devices
def test_the_kernel_rounds_by_the_references_bits(shape, dtype, device):
    found = []
    for backend in ("reference", "triton"):
        param = draw(shape, 0, dtype).to(device)
        moments, out = moments_of(shape, key=2**35 + 64, device=device), torch.empty_like(param)
        for step in range(1, 4):
            grad = (draw(shape, step) * draw(shape, 9).abs() ** 8).to(device)
            tensors = (*moments, rates(step, 0.5, device=device), moments.places_2)
            adamw_float8(param, grad, *tensors, SETTINGS, True, out, backend)
        assert torch.equal(out, param)
        found.append((param, *moments))
    (ours, *codes), (theirs, *others) = found
    few = max(2, ours.numel() // 2000)  # at the very edge where fp32 results differ by a rounding
    for a, b in zip(codes, others, strict=True):
        assert (a != b).sum() <= few
    if dtype == torch.bfloat16:
        assert (ours != theirs).sum() <= few
    else:
        assert ((ours - theirs).abs() > 2e-6).sum() <= few


@devices
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_adamw_float8_first_step_matches_torch(backend, device):
    """Nothing is dequantised yet, and fp32 weights are not rounded."""
    param, grad = (draw((6, 70), seed).to(device) for seed in (0, 1))
    expected = param.clone()
    torch_adamw = torch.optim.AdamW([expected], 1e-2, (0.9, 0.95), 1e-8, 0.1)
    expected.grad = grad * 0.5
    torch_adamw.step()
    moments, out = moments_of((6, 70), device=device), torch.empty_like(param)
    tensors = (*moments, rates(1, 0.5, device=device), moments.places_2, SETTINGS, True, out)
    adamw_float8(param, grad, *tensors, backend)
    torch.testing.assert_close(param, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(out, param)


@devices
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_skipped_step_writes_the_copy_alone(backend, device):
    param, grad = draw((3, 64), 0, torch.bfloat16).to(device), draw((3, 64), 1).to(device)
    moments = moments_of((3, 64), device=device)
    moments.update(param, grad, None, rates(1, device=device), SETTINGS, True)
    before = [x.clone() for x in (param, *moments)]
    out, nothing = torch.empty_like(param), torch.full_like(grad, float("nan"))
    skipped = rates(2, float("nan"), 1, device)
    tensors = (*moments, skipped, moments.places_2, SETTINGS, True, out)
    adamw_float8(param, nothing, *tensors, backend)
    assert all(map(torch.equal, (param, *moments, out), (*before, before[0])))


@pytest.mark.parametrize("cut", ["rows", "columns"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_parts_of_a_weight_are_updated_as_the_whole(cut, backend):
    """They agree bit for bit: groups and random bits do not depend on a rank's part."""
    shape = (7, 96)
    boxes = {
        "rows": [(slice(0, 3), slice(0, 96)), (slice(3, 7), slice(0, 96))],
        "columns": [(slice(0, 7), slice(0, 32)), (slice(0, 7), slice(32, 96))],
    }[cut]
    whole = tuple(slice(0, n) for n in shape)
    params, states = {}, {}
    for name, box in {"whole": whole, 0: boxes[0], 1: boxes[1]}.items():
        param = draw(shape, 0, torch.bfloat16)[box].contiguous()
        moments = moments_of(shape, box, key=5 << 30)
        for step in range(1, 5):
            tensors = (*moments, rates(step), moments.places_2, SETTINGS, True, None, backend)
            adamw_float8(param, draw(shape, step)[box].contiguous(), *tensors)
        params[name], states[name] = param, moments.tensors
    for i, box in enumerate(boxes):
        assert torch.equal(params[i], params["whole"][box])
        for key, part in states[i].items():
            place = moment_place(key, shape, box)
            assert torch.equal(part, states["whole"][key][place.box])
            assert states["whole"][key].shape == tuple(place.shape)


def test_moment_place_refuses_to_cut_a_group():
    with pytest.raises(
        ConfigError, match=r"parallel\.tp cuts a row of 96 elements at 48; use bfloat16"
    ) as no:
        moment_place("exp_avg_scales", (4, 96), (slice(0, 4), slice(0, 48)))
    assert no.value.field == "optim.state_dtype"
    with pytest.raises(ConfigError, match="at 48"):
        moment_place("exp_avg_scales", (4, 96), (slice(0, 4), slice(48, 96)))
    place = moment_place("exp_avg_scales", (4, 100), (slice(0, 4), slice(64, 100)))
    assert place == ((4, 4), (slice(0, 4), slice(2, 4)))


# ---- runs --------------------------------------------------------------------------------------


RUNS = {
    "moments": [MOMENTS],
    "and weights": SMALL,
    "adapters": [MOMENTS, "lora.rank=8", "moe.bias_update_rate=0"],
}


def test_a_first_step_is_that_of_moments_in_fp32():
    """Nothing is dequantised yet, and stored values are a rounding away; gradients are clipped."""
    clipped = "optim.max_grad_norm=0.1"
    found, expected = make_engine(MOMENTS, clipped), make_engine(clipped)
    assert train(found, range(1)) == train(expected, range(1))
    assert_near(weights_of(found), weights_of(expected), 1e-6)
    for (name, ours), theirs in zip(
        found.fsdp.members.items(), expected.fsdp.members.values(), strict=True
    ):
        state, wide = (x.optimizer.state[m.local] for x, m in ((found, ours), (expected, theirs)))
        stored = widened(*(state[key].view(len(ours.local), -1) for key in Float8Moments.NAMES))
        for x, key in zip(stored, AdamW.MOMENTS, strict=True):
            difference = x.flatten() - wide[key].flatten()
            assert difference.norm() < 0.1 * wide[key].norm(), (name, key)


def test_parameters_with_equal_values_and_gradients_are_rounded_differently():
    engine = make_engine(*SMALL)
    engine.forward_backward(make_batches(0), objective_of(engine))
    engine.fsdp.gradient_norm()
    first, second = (engine.fsdp.members[f"layers.{i}.attn.wq.weight"].local for i in range(2))
    second.data.copy_(first)
    second.grad.copy_(first.grad)
    engine.step(1e-2)
    assert not torch.equal(first, second)
    codes, others = (engine.optimizer.state[x] for x in (first, second))
    for key in ("exp_avg", "exp_avg_sq"):
        assert (codes[key] != others[key]).double().mean() > 0.2


@pytest.mark.tier("long")
@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_a_loaded_state_goes_on_bit_for_bit(words):
    straight = make_engine(*words)
    numbers = train(straight, range(5))
    first, second = make_engine(*words), make_engine(*words)
    train(first, range(2))
    second.load_state(copied(first))
    assert train(second, range(2, 5)) == numbers[2:]
    for name, weight in weights_of(straight).items():
        assert torch.equal(weight, weights_of(second)[name]), name
    other = make_engine(*words, "train.seed=1")
    other.load_state(copied(first))
    assert train(other, range(2, 5)) != numbers[2:]


def test_float8_states_take_four_bytes_a_parameter():
    engine = make_engine(*SMALL, "model.hidden_size=64", "model.moe_intermediate_size=64")
    expected = engine.state_bytes()
    train(engine, range(1))
    assert engine.state_bytes() == expected
    parts = [part for group in engine.state().values() for part in group.values()]
    assert expected - 2**20 == sum(aligned(part.tensor.nbytes) for part in parts)
    rules = engine.stages.rules
    for name, member in engine.fsdp.members.items():
        is_matrix = rules[name].gather is None and "norm" not in name
        assert member.local.dtype == (torch.bfloat16 if is_matrix else torch.float32), name
        state = engine.optimizer.state[member.local]
        sizes = {key: x.nbytes for key, x in state.items() if key != "step"}
        if member.local.dim() > 1:
            width = member.local[0].numel()
            assert sum(sizes.values()) == 2 * len(member.local) * (width + -(-width // 32)), name


def test_offloaded_states_come_back():
    engine, other = make_engine(*SMALL), make_engine(*SMALL)
    numbers = train(other, range(4))
    found = train(engine, range(2))
    engine.offload()
    engine.reload()
    assert found + train(engine, range(2, 4)) == numbers


def test_a_gradient_that_is_not_finite_changes_nothing():
    engine = make_engine(*SMALL)
    train(engine, range(2))
    before = copied(engine)
    engine.forward_backward(make_batches(2), objective_of(engine))
    for bucket in engine.fsdp.buckets:
        bucket.gradient_N.fill_(float("nan"))
        bucket.squares_B.fill_(float("nan"))
    assert engine.step(1e-2).skipped
    after = copied(engine)
    for group, tensors in before.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, after[group][name]), name


WIDE = ["model.hidden_size=64", "model.head_dim=32", "model.moe_intermediate_size=32"]
"""Ranks cut columns of these within a scale's group."""
MESHES = {
    "dp": [],
    "ep": ["parallel.ep=2"],
    "tp": ["parallel.tp=2"],
    "pp": ["parallel.pp=2"],
    "replicas": ["parallel.dp_replicate=2"],
    "kept in bf16": ["optim.gradient_dtype=bfloat16"],
}


def words_of(name):
    # Neither depends on how a batch is cut.
    same = ["moe.bias_update_rate=0", "moe.aux_loss_coef=0"]
    return [*SMALL, *WIDE, *MESHES.get(name, []), *same]


def micro_of(name):
    return ROWS if name in ("one", "other bits", "tp") else ROWS // 2


def go_on(states):
    """Return losses and weights of two steps after a state, or none, and its parts, by mesh."""
    answers = {}
    for name, state in states.items():
        engine = make_engine(*words_of(name), micro=micro_of(name))
        if state is not None:
            engine.load_state(state)
        if name == "other bits":
            engine.optimizer.settings = engine.optimizer.settings._replace(seed=1)
        steps = range(2) if state is None else range(2, 4)
        numbers = train(engine, steps, micro_of(name), lr=1e-3)
        parts = {
            group: {key: part._replace(tensor=part.tensor.clone()) for key, part in named.items()}
            for group, named in engine.state().items()
        }
        answers[name] = numbers, weights_of(engine), parts
    return answers


def together(ranks, name):
    """Assemble the whole state from all ranks' parts; copies must be equal."""
    state = {"model": {}, "optim": {}}
    for answers in ranks:
        for group, parts in answers[name][2].items():
            for key, part in parts.items():
                empty = torch.zeros(tuple(part.shape), dtype=part.tensor.dtype)
                whole, seen = state[group].setdefault(key, (empty, empty.bool()))
                there = seen[part.box]
                assert torch.equal(whole[part.box][there], part.tensor[there]), (name, key)
                whole[part.box], seen[part.box] = part.tensor, True
    for named in state.values():
        for key, (_, seen) in named.items():
            assert seen.all(), (name, key)
    return {group: {key: x for key, (x, _) in named.items()} for group, named in state.items()}


def unlike(ours, theirs):
    """Return the share of elements that differ."""
    pairs = [(ours[name].flatten(), theirs[name].flatten()) for name in theirs]
    return torch.cat([a != b for a, b in pairs]).double().mean().item()


@pytest.mark.tier("wide")
def test_every_mesh_rounds_alike_and_goes_on_from_every_other():
    """Only a few elements near a rounding's edge differ: gradients are sums in another order."""
    one = go_on({"one": None, "other bits": None})
    state, others = (together([one], name) for name in one)
    weights = {key: x for key, x in state["model"].items() if x.dtype == torch.bfloat16}
    codes = {key: x for key, x in state["optim"].items() if x.dtype == torch.uint8}
    assert unlike(others["model"], weights) > 0.2
    assert unlike(others["optim"], codes) > 0.2
    straight = go_on({"one": state})["one"]
    ranks = spawn(2, go_on, dict.fromkeys(MESHES), timeout=300)
    moved = spawn(2, go_on, dict.fromkeys(MESHES, state), timeout=300)
    for name in MESHES:
        found, narrow = together(ranks, name), name == "kept in bf16"
        numbers = pytest.approx(one["one"][0][1], rel=1e-3 if narrow else 1e-5)
        assert ranks[0][name][0][1] == numbers, name
        assert {key: x.shape for key, x in found["optim"].items()} == {
            key: x.shape for key, x in state["optim"].items()
        }
        if not narrow:
            assert unlike(found["model"], weights) < 5e-3, name
            assert unlike(found["optim"], codes) < 5e-3, name
        for answers in moved:
            assert answers[name][0] == moved[0][name][0]
        loss = pytest.approx(straight[0][1], rel=1e-3)
        assert moved[0][name][0][1] == loss, name
        # The state returns to one process, too.
        back = go_on({"one": found})["one"]
        assert back[0][1] == loss, name


@pytest.mark.tier("wide")
def test_a_mesh_resumes_itself_bit_for_bit():
    first = spawn(2, go_on, {"tp": None, "ep": None}, timeout=300)
    states = {name: together(first, name) for name in ("tp", "ep")}
    again = [spawn(2, go_on, {name: states[name]}, timeout=300)[0][name] for name in states]
    straight = spawn(2, four_steps, list(states), timeout=300)[0]
    for (numbers, weights, _), name in zip(again, states, strict=True):
        assert numbers == straight[name][0][2:], name
        for key, weight in weights.items():
            assert torch.equal(weight, straight[name][1][key]), (name, key)


def four_steps(names):
    answers = {}
    for name in names:
        engine = make_engine(*words_of(name), micro=micro_of(name))
        answers[name] = train(engine, range(4), micro_of(name), lr=1e-3), weights_of(engine)
    return answers


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["optim.weight_dtype=bfloat16"], "weight_dtype: 'bfloat16' contradicts optim.state_dtype"),
        ([*SMALL, "lora.rank=8"], "weight_dtype: 'bfloat16' contradicts lora.rank 8"),
        ([MOMENTS, "optim.name=muon"], "state_dtype: 'float8' contradicts optim.name 'muon'; use"),
        ([MOMENTS, "optim.offload_fraction=1"], "contradicts optim.state_dtype 'float8'"),
    ],
)
def test_settings_that_contradict_each_other(words, says):
    with pytest.raises(ConfigError, match=says):
        Config.load(None, words, environ={})


@pytest.mark.parametrize("ours", ["float32", "bfloat16", "float8"])
def test_moments_of_another_dtype_are_refused(ours):
    theirs = "float32" if ours == "float8" else "float8"
    engine, other = (make_engine(f"optim.state_dtype={dtype}") for dtype in (ours, theirs))
    train(other, range(1))
    with pytest.raises(ConfigError, match=f"optim.state_dtype '{ours}' and optim.name 'adamw'"):
        engine.load_state(copied(other))
    assert not engine.optimizer.state


@pytest.mark.parametrize("is_narrow", [True, False])
def test_weights_of_another_dtype_are_refused(is_narrow):
    engine, other = (make_engine(*words) for words in (SMALL, [MOMENTS])[:: 1 if is_narrow else -1])
    train(other, range(1))
    with pytest.raises(ConfigError, match=r"; set optim\.weight_dtype as it was"):
        engine.load_state(copied(other))


def fail_to_cut(words):
    with pytest.raises(
        ConfigError, match=r"parallel\.tp cuts a row of 16 elements at 8; use bfloat16"
    ):
        make_engine(*words)


@pytest.mark.tier("long")
def test_tensor_parallel_ranks_that_would_share_a_scale_are_refused():
    spawn(2, fail_to_cut, [MOMENTS, "parallel.tp=2"], timeout=200)


def test_the_plan_takes_float8_if_it_is_asked_for(capsys):
    words = ["bench-qwen3-30b-a3b", "--gpus", "2", "--gpu", "h200", "--parallel.pp", "1"]
    small = ["--optim.state_dtype", "float8", "--optim.weight_dtype", "bfloat16"]
    assert not fits(words, capsys)
    assert fits([*words, *small], capsys)


def fits(words, capsys):
    """Return True if the plan finds a layout."""
    code = main(words)
    said = capsys.readouterr()
    return code in (0, None) and "best: moetrain train" in said.out
