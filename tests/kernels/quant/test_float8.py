"""A frozen base in 8 or 4 bits: its stored values, and everything that uses them."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moetrain.config import Config, ConfigError
from moetrain.jobs.scheduler import Service
from moetrain.kernels.quant import groups
from moetrain.kernels.quant.e4m3 import E4M3, SCALED
from moetrain.kernels.quant.groups import QUANT_FORMATS, dequantise_groups, quantise_groups
from moetrain.models.hf.load import load_hf, resolve_architecture
from moetrain.models.hf.save import save_hf
from moetrain.models.rules import ADAPTER
from moetrain.models.transformer import Transformer
from moetrain.parallel.fsdp.storage.quantised import Quantised
from moetrain.parallel.mesh import ParallelDims
from moetrain.runtime.arena import Arena
from moetrain.train.loop import Trainer
from tests.lib.adapter_rollouts import check, follow
from tests.lib.adapters import (
    EVERYTHING,
    MICRO,
    adapted,
    compare,
    dense_reference,
    learn_all,
)
from tests.lib.dispatched_ops import Touches
from tests.lib.distributed import spawn
from tests.lib.engines import train, weights_of
from tests.lib.estimates import estimate_memory
from tests.lib.frozen_bases import ROUND, merged_of
from tests.lib.job_services import Course, adapter_of, asker, config_of, new, run_alone

FLOAT8 = "lora.base_dtype=float8"


every_form = pytest.mark.parametrize("name", QUANT_FORMATS)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def codebook(name):
    """Return all finite values of codes with power-of-two scales, by torch where it knows them."""
    if name == "float8":
        codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
        return codes[codes.isfinite()]
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return torch.cat((sizes, -sizes))


def stored(x, name="float8"):
    """Return the stored values, by search over all codes and scales; for two-level scales, by the
    kernel."""
    if name in ("nf4", "nvfp4"):
        return shard_of(x, name).read(0, x.shape)
    codes = codebook(name)
    # In 4 bits, values that would round to 7 are cut off, but 7 itself is not.
    most = {"float8": 448, "mxfp4": math.nextafter(7.0, 0.0)}[name]
    found = torch.empty_like(x)
    for i, group in enumerate(x.view(-1, SCALED)):
        power = next(p for p in range(-126, 128) if group.abs().max() <= most * 2.0**p)
        near = (group[:, None] / 2.0**power - codes).abs()
        found.view(-1, SCALED)[i] = codes[near.argmin(1)] * 2.0**power
    return found


def shard_of(x, name="float8", dtype=torch.float32):
    shard = Quantised(QUANT_FORMATS[name], len(x), dtype, Arena("weights", x.device))
    shard.write(0, x.shape, (slice(0, len(x)),), x)
    return shard


def uneven(form):
    """Return 40 units of elements: groups of all sizes, zeros, and values near a scale's limits."""
    x = torch.randn(40, form.unit, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-30, 30, 40)[:, None]
    x[3], x[4, 1:], x[5] = 0, 0, 448 * 2.0**-5
    x[6, :2] = torch.tensor([3.0, 1000.0])
    size = form.group_size
    x[7, :size], x[8, :size], x[9] = 0, x[8, :size] * 1e-3, x[9].abs()
    x[10, :size] /= x[10].abs().max()
    x[10, 0] = 6.99
    x[11, 0], x[11, 1:] = 7, 3.4
    # For nf4: scales at the limit of what is kept, whose factor is rounded up; and scales of which
    # fp32 has only a few distinct ones.
    span = 0.99296875 * (1 - 2.0**-13)
    x[12], x[12, 0] = span / (128 / 1.0001 - 1), span / (1 - 1.0001 / 128)
    x[13] = 1 + 2.0**-18 * torch.rand(form.unit, generator=torch.Generator().manual_seed(1))
    return x.flatten()


@pytest.mark.parametrize("name", ["float8", "mxfp4"])
def test_quantised_values_are_the_nearest(name):
    x = uneven(QUANT_FORMATS[name])
    found = shard_of(x, name).read(0, x.shape)
    wanted = stored(x, name)
    error = (found - x).abs()
    assert torch.equal(error, (wanted - x).abs())  # either of two equally near values
    assert error.max() > 0
    assert torch.equal(found[96:101], found[96:101].bfloat16().float())


def test_nf4_has_the_nearest_quantiles_of_scales_that_are_near():
    form = QUANT_FORMATS["nf4"]
    x = torch.randn(64 * 320, generator=torch.Generator().manual_seed(0)).view(-1, 64)
    found = shard_of(x.flatten(), "nf4").read(0, x.view(-1).shape).view_as(x)
    scales = x.abs().amax(1)
    theirs = found.abs().amax(1)
    ranges = scales.view(-1, 32).amax(1) - scales.view(-1, 32).amin(1)
    assert ((theirs - scales).view(-1, 32).abs() <= 0.008 * ranges[:, None]).all()
    quantiles = torch.tensor(form.codebook)
    nearest = (x[..., None] / scales[:, None, None] - quantiles).abs().argmin(-1)
    torch.testing.assert_close(found, quantiles[nearest] * theirs[:, None], rtol=1e-6, atol=0)
    # The values are a normal distribution's, by the paper's definition, to the published digits.
    q = torch.distributions.Normal(0, 1).icdf
    high, low = q(torch.linspace(0.9677083, 0.5, 9)[:8]), q(torch.linspace(0.9677083, 0.5, 8)[:7])
    wanted = torch.cat((-low / low[0], torch.zeros(1), high.flip(0) / high[0]))
    torch.testing.assert_close(quantiles, wanted, rtol=0, atol=1e-4)


def test_nvfp4_has_the_nearest_elements_of_the_nearest_scales():
    """By the formula of NVIDIA's modelopt, in fp64, with a factor for each 2,048 elements."""
    x = uneven(QUANT_FORMATS["nvfp4"]).double().view(-1, 128, 16)
    found = shard_of(x.flatten().float(), "nvfp4").read(0, torch.Size([x.numel()])).view_as(x)
    factor = x.abs().amax((1, 2)) / 2688
    scale = x.abs().amax(2) / 6 / factor[:, None].clamp(min=1e-300)
    scale = scale.where(scale >= 2.0**-6, 0.0).float().to(E4M3).double()
    wide = (scale * factor[:, None])[..., None]
    nearest = (x[..., None] - codebook("nvfp4").double() * wide[..., None]).abs().amin(-1)
    # The factor is rounded up by at most 2^-17 of it.
    assert ((found - x).abs() <= nearest + 2.0**-16 * x.abs()).all()
    assert ((found == 0) | (wide > 0)).all()


@every_form
def test_quantise_groups_is_idempotent(name):
    form = QUANT_FORMATS[name]
    x = uneven(form)
    shard = shard_of(x, name)
    found = shard.read(0, x.shape)
    again = shard_of(found, name)
    assert torch.equal(again.read(0, x.shape), found)
    if name != "float8":  # 224 may stand for a larger value, which has its own scale
        assert torch.equal(again.bytes, shard.bytes)
        bf16 = shard_of(found.bfloat16(), name)
        ours, theirs = (form.split(one.bytes[None]).quantised for one in (bf16, shard))
        assert torch.equal(ours, theirs)


@every_form
def test_the_kernel_has_the_references_bits(name):
    form = QUANT_FORMATS[name]
    x = uneven(form)
    given = form.split(shard_of(x, name).bytes[None].to(DEVICE))
    for dtype in (torch.float32, torch.bfloat16)[: 1 + (DEVICE == "cuda")]:
        found = {}
        for backend in ("triton", "reference"):
            found[backend] = torch.empty(len(x), dtype=dtype, device=DEVICE)
            how = (form, given, form.table(torch.device(DEVICE)), found[backend])
            dequantise_groups(*how, 0, len(x), backend)
        assert torch.equal(found["triton"], found["reference"])


class LargestNew(TorchDispatchMode):
    """Records the bytes of the largest tensor that ops make."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            made = [x.nbytes for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.nbytes = max([self.nbytes, *made])
        return out


@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_quantise_groups_works_in_pieces(name, monkeypatch):
    """A large tensor thus needs little extra memory; the pieces equal those of the whole."""
    form = QUANT_FORMATS[name]
    x = torch.randn(9 * form.unit) * torch.logspace(-3, 3, 9 * form.unit)
    assert groups._AT_ONCE % form.unit == 0
    with LargestNew() as at_once:
        whole = quantise_groups(form, x)
    monkeypatch.setattr(groups, "_AT_ONCE", 2 * form.unit)
    with LargestNew() as in_pieces:
        found = quantise_groups(form, x)
    for one, other in zip(found, whole, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    stored = max(part.nbytes for part in whole if part is not None)
    assert at_once.nbytes >= x.nbytes
    assert in_pieces.nbytes == max(stored, at_once.nbytes * 2 // 9)


def test_quantise_groups_worked_examples():
    x = torch.zeros(SCALED)
    x[:2] = torch.tensor([3.0, 1000.0])
    codes, scales, _ = quantise_groups(QUANT_FORMATS["float8"], x)
    assert codes.view(E4M3)[0, :2].tolist() == [0.75, 256]
    assert scales.tolist() == [[2 + 127]]
    for largest, scale, wanted in ((6.9, 127, [6, -1, 0.5]), (7, 128, [8, -1, 0])):
        x[:3] = torch.tensor([largest, -1.2, 0.3])
        codes, scales, _ = quantise_groups(QUANT_FORMATS["mxfp4"], x)
        assert scales.tolist() == [[scale]]
        assert codes[0, 0] & 15 == {6: 7, 8: 6}[wanted[0]]  # the first element is the lower half
        assert shard_of(x, "mxfp4").read(0, torch.Size([3])).tolist() == wanted
    x = torch.zeros(2048)
    x[:3] = torch.tensor([2, -1, 0.1])
    wanted = [2, -2 * 0.5250730514526367, 2 * 0.07958029955625534]
    assert shard_of(x, "nf4").read(0, torch.Size([3])).tolist() == pytest.approx(wanted)
    x[:3], x[2000] = torch.tensor([12, 5.2, -0.4]), 2688
    codes, scales, shared = quantise_groups(QUANT_FORMATS["nvfp4"], x)
    assert codes[0, :2].tolist() == [5 << 4 | 7, 8]
    assert scales.view(E4M3)[0, [0, 1, 125]].tolist() == [2, 0, 448]
    assert shared.tolist() == [[1, 0]]
    assert shard_of(x, "nvfp4").read(0, torch.Size([3])).tolist() == [12, 6, 0]


@every_form
def test_quantised_groups_keep_values_that_are_not_finite(name):
    unit = QUANT_FORMATS[name].unit
    x = torch.full((3 * unit,), FILL[name])
    x[5], x[unit] = float("nan"), float("inf")
    shard = shard_of(x, name)
    found = shard.read(0, x.shape)
    assert found[: 2 * unit].isnan().all()
    assert (found[2 * unit :] == FILL[name]).all()
    given = shard.format.split(shard.bytes[None].to(DEVICE))
    wide = torch.empty(len(x), device=DEVICE)
    table = shard.format.table(torch.device(DEVICE))
    dequantise_groups(shard.format, given, table, wide, 0, len(x), "triton")
    torch.testing.assert_close(wide.cpu(), found, rtol=0, atol=0, equal_nan=True)


FILL = dict.fromkeys(QUANT_FORMATS, 1.0) | {"nvfp4": 2688 / 2048}
"""A value that each form holds exactly where all elements have it."""
PARTS = [(4, 16, 7), (3, 100), (5, 64), (1, 1), (2, 3, 96)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("float8", shape) for shape in PARTS),
        ("mxfp4", (2, 4, 32)),
        ("nf4", (2, 4, 2048)),
        ("nvfp4", (2, 4, 2048)),
    ],
)
def test_shard_written_in_parts_equals_one_written_at_once(name, shape):
    generator = torch.Generator().manual_seed(0)
    unit = QUANT_FORMATS[name].unit
    # No element is below the smallest normal code of its group.
    whole = torch.rand(shape, generator=generator) + 0.5
    whole *= torch.where(torch.rand(shape, generator=generator) < 0.5, -1, 30)
    start, size = 2 * unit, whole.numel()
    fill = torch.full((5 * unit + size,), FILL[name])
    once, parts = (shard_of(fill, name) for _ in range(2))
    everything = (slice(0, shape[0]),)
    once.write(start, whole.shape, everything, whole)
    places = [(i, slice(0, n)) for i in range(shape[0]) for n in (shape[1],)]
    if len(shape) == 3:
        cut = shape[1] // 2
        places = [(slice(0, shape[0]), slice(0, cut)), (slice(0, shape[0]), slice(cut, shape[1]))]
    for place in places:
        parts.write(start, whole.shape, place, whole[place].bfloat16().float())
    once.write(start, whole.shape, everything, whole.bfloat16())
    ends = torch.Size([5 * unit + size])
    assert torch.equal(once.read(0, ends), parts.read(0, ends))
    beside = once.read(0, torch.Size([start]))
    assert (beside == FILL[name]).all()
    assert (once.read(start + -(-size // unit) * unit, torch.Size([unit])) == FILL[name]).all()


# ---- adapters beside it -------------------------------------------------------------------------


RUNS = {
    1: {
        "eager": [],
        "recomputed": ["activation.policy=full"],
        "compiled": ["compile.enabled=yes", "activation.policy=selective"],
        "kernels": ["kernels.backend=triton"],
        "odd sizes": ["model.hidden_size=24", "model.moe_intermediate_size=40"],
        "mxfp4": ["lora.base_dtype=mxfp4"],
        "nf4": ["lora.base_dtype=nf4"],
        "nvfp4": ["lora.base_dtype=nvfp4"],
        "nf4 compiled": ["lora.base_dtype=nf4", "compile.enabled=yes"],
        "nf4 odd": [
            "lora.base_dtype=nf4",
            "model.hidden_size=24",
            "model.moe_intermediate_size=40",
        ],
    },
    2: {
        "dp": [],
        "dp compiled": ["compile.enabled=yes", "activation.policy=full"],
        "replicas": ["parallel.dp_replicate=2"],
        "ep": ["parallel.ep=2"],
        "tp": ["parallel.tp=2"],
        "pp": ["parallel.pp=2"],
        "mxfp4": ["lora.base_dtype=mxfp4", "parallel.tp=2"],
        "nf4": ["lora.base_dtype=nf4"],
        "nvfp4": ["lora.base_dtype=nvfp4", "parallel.ep=2"],
        "nf4 ep": ["lora.base_dtype=nf4", "parallel.ep=2"],
        "nf4 pp": ["lora.base_dtype=nf4", "parallel.pp=2"],
    },
    4: {
        "dp+tp+ep": ["parallel.tp=2", "parallel.ep=4"],
        "pp ep": ["parallel.pp=2", "parallel.ep=2"],
    },
}


@pytest.mark.tier("wide", long=["4"])
@pytest.mark.parametrize("world", RUNS)
def test_adapters_equal_a_dense_reference_of_what_is_stored(world):
    runs = {name: based(*words) for name, words in RUNS[world].items()}
    for answers in spawn(world, learn_all, runs, timeout=200):
        for name, answer in answers.items():
            compare(name, answer, dense_reference(kept_of(runs[name])))


def based(*words):
    is_named = any(word.startswith("lora.base_dtype") for word in words)
    return [EVERYTHING, *ROUND, *[FLOAT8][is_named:], *words]


def kept_of(words):
    """Return the settings of a run that decide its results."""
    return [word for word in words if not word.startswith(("parallel.", "compile.", "activation."))]


def learn_on_gpus(runs):
    answers = learn_all(runs)
    return {
        name: (*numbers, {n: x.cpu() for n, x in gradients.items()})
        for name, (*numbers, gradients) in answers.items()
    }


@pytest.mark.gpu("world")
@pytest.mark.parametrize("world", [1, 2])
def test_adapters_equal_a_dense_reference_on_gpus(world):
    on_gpu = ["train.device=cuda", "train.dtype=float32"]
    chosen = {n: words for n, words in {**RUNS[1], **RUNS[world]}.items() if "odd" not in n}
    runs = {name: based(*on_gpu, *words) for name, words in chosen.items()}
    for answers in spawn(world, learn_on_gpus, runs, device_type="cuda", timeout=200):
        for name, answer in answers.items():
            compare(name, answer, dense_reference(kept_of(runs[name])))


def learned_and_wanted(words):
    """Return losses and weights after two steps, and those of a run with dequantised weights."""
    engine, plain = adapted(*words), adapted(*words, "lora.base_dtype=auto")
    for name, weight in weights_of(engine).items():
        plain.fsdp.write(name, (), weight)
    return [(train(one, range(2), MICRO), weights_of(one)) for one in (engine, plain)]


def check_learned(found, wanted):
    assert found[0] == wanted[0]
    assert all(torch.equal(x, wanted[1][name]) for name, x in found[1].items())


@pytest.mark.tier("long", quick=["mxfp4"])
@every_form
def test_a_run_has_the_bits_of_one_with_the_values(name):
    words = [EVERYTHING, f"lora.base_dtype={name}", *ROUND]
    check_learned(*learned_and_wanted([*words, "train.dtype=bfloat16"]))


def learned_on(runs):
    return [learned_and_wanted(words) for words in runs]


@pytest.mark.tier("long")
def test_runs_on_ranks_have_the_bits_of_those_with_the_values():
    words = [EVERYTHING, *ROUND, "parallel.fsdp_transport=nccl"]
    meshes = {"nf4": ["dp_shard=2", "ep=2", "tp=2"], "mxfp4": ["ep=2"]}
    runs = [
        [*words, f"lora.base_dtype={form}", f"parallel.{w}"]
        for form in meshes
        for w in meshes[form]
    ]
    for answers in spawn(2, learned_on, runs, timeout=200):
        for answer in answers:
            check_learned(*answer)


@pytest.mark.tier("long")
@every_form
def test_base_dtype_quantises_the_matrices_of_blocks(name):
    engine = adapted(EVERYTHING, f"lora.base_dtype={name}", *ROUND)
    train(engine, range(1), MICRO)
    narrow = {n for n, m in engine.fsdp.members.items() if m.storage.is_packed}
    parts = ("attn.wq", "attn.wk", "attn.wv", "attn.wo")
    expected = {f"layers.{i}.{part}.weight" for i in range(2) for part in parts}
    expected |= {f"layers.{i}.moe.experts.{n}" for i in range(2) for n in ("w_gate_up", "w_down")}
    assert narrow == expected
    members = [engine.fsdp.members[parameter] for parameter in narrow]
    numbers = sum(member.local.numel() for member in members)
    shards = {id(member.storage): member.storage for member in members}
    # The bits per element of each form are known: 4 + 8 / 64 + 64 / 2048 for nf4, and for nvfp4
    # 4 + 8 / 16 + 64 / 2048.
    bits = {"float8": 8.25, "mxfp4": 4.25, "nf4": 4.15625, "nvfp4": 4.53125}[name]
    assert sum(shard.bytes.numel() for shard in shards.values()) == numbers * bits / 8
    plain = weights_of(adapted(EVERYTHING, *ROUND))
    for parameter, weight in weights_of(engine).items():
        if parameter in narrow:
            wanted = stored(plain[parameter].flatten(), name)
            assert torch.equal(weight.flatten(), wanted), parameter
    # One block's values exist at a time, whatever the depth.
    regions = {id(unit.region) for unit in engine.fsdp.units if unit.shares_region}
    assert len(regions) == 1


def test_blocks_are_dequantised_once_a_pass():
    engine = adapted(EVERYTHING, FLOAT8, *ROUND)
    packed = [b for b in engine.fsdp.buckets if b.storage.is_packed]
    codes = [bucket.storage.bytes for bucket in packed]
    with Touches(codes) as once:
        for bucket in packed:
            for member in bucket.members:
                numel = member.layout.padded_numel
                values_N = torch.empty(numel, dtype=bucket.dtype)
                bucket.storage.unpack(values_N, bucket.storage.bytes[None], member.start, numel)
    assert once.touched == set(range(len(packed)))
    with Touches(codes) as touches:
        train(engine, range(1), MICRO)
    # The second of two blocks is kept for the backward, which begins with it, and the first for the
    # next of 8 micro-batches.
    assert len(touches.ops) / len(once.ops) == (2 * 8 + 1) / 2


def narrow_numbers(words):
    engine = adapted(*words)
    numbers = train(engine, range(2), MICRO)
    return numbers, engine.fingerprint, weights_of(engine)


def numbers_on(runs):
    return [narrow_numbers(words) for words in runs]


@pytest.mark.tier("wide", long=["nf4"])
@pytest.mark.parametrize("name", ["float8", "nf4"])
def test_the_same_is_stored_on_every_mesh(name):
    words = [EVERYTHING, f"lora.base_dtype={name}", *ROUND]
    numbers, fingerprint, weights = narrow_numbers(words)
    assert fingerprint != narrow_numbers([EVERYTHING, *ROUND])[1]
    meshes = ["ep=2", "pp=2", "dp_replicate=2", *["tp=2"][name == "nf4" :]]  # tp cuts its rows
    runs = [[*words, f"parallel.{w}"] for w in meshes]
    for answers in spawn(2, numbers_on, [words, *runs], timeout=200):
        for mine, print_of_mine, theirs in answers:
            for pair, wanted in zip(mine, numbers, strict=True):
                assert pair == pytest.approx(wanted, rel=1e-5)
            assert print_of_mine == fingerprint
            for name, weight in theirs.items():
                assert name.endswith(ADAPTER) or torch.equal(weight, weights[name]), name


@pytest.mark.tier("wide", long=["1"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_is_loaded_and_saved(ranks, tmp_path):
    engine = adapted(EVERYTHING, *ROUND)
    with torch.device("cpu"):
        model = Transformer(engine.arch)
    model.load_state_dict(weights_of(engine, merged=True))
    save_hf(model, tmp_path / "base")
    words = [FLOAT8, *["parallel.ep=2"][: ranks - 1]]
    for name, weight in spawn(ranks, merged_of, tmp_path, words)[0].items():
        base = model.get_parameter(name).detach()
        if name.startswith("layers.") and base.dim() > 1 and "router" not in name:
            base = stored(base.flatten()).view(base.shape)
        assert torch.equal(weight, base), name
    saved = load_hf(tmp_path / "saved", dtype=torch.float32).state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in saved.items())
    assert set(saved) == set(model.state_dict())


@pytest.mark.tier("long", quick=["float8"])
@every_form
def test_generation_uses_the_quantised_base(name):
    check(*follow([f"lora.base_dtype={name}", *ROUND]))


def follow_all(runs):
    return [follow([FLOAT8, *ROUND, *words]) for words in runs]


@pytest.mark.tier("long")
def test_generation_on_ranks_uses_the_quantised_base():
    runs = [["parallel.ep=2"], ["parallel.tp=2"], ["parallel.pp=2"], ["lora.base_dtype=nf4"], []]
    for answers in spawn(2, follow_all, runs, timeout=200):
        for answer in answers:
            check(*answer)


@pytest.mark.tier("long", quick=["float8"])
@every_form
def test_quantised_base_is_offloaded_and_reloaded(name):
    words = [EVERYTHING, f"lora.base_dtype={name}", *ROUND]
    engine, other = (adapted(*words) for _ in range(2))
    train(engine, range(1), MICRO)
    engine.offload()
    engine.reload()
    assert train(engine, range(1, 2), MICRO) == train(other, range(2), MICRO)[1:]


@pytest.mark.tier("long")
@pytest.mark.parametrize("form", ["float8", "nf4"])
def test_run_resumes_only_with_the_same_quantised_base(tiny, form):
    words = ["lora.rank=8", "optim.schedule=constant", "checkpoint.interval=2"]
    words.append(f"lora.base_dtype={form}")
    straight = Trainer(tiny(*words))
    straight.fit()
    saved = straight.folder / "checkpoints" / "step-00000002"
    resume = [f"checkpoint.resume={saved}", f"output_dir={straight.folder}-again"]
    again = Trainer(tiny(*words, *resume))
    again.fit()
    found = weights_of(again.engine)
    assert all(torch.equal(x, found[name]) for name, x in straight.engine.weights())
    with pytest.raises(ConfigError, match=r"other frozen weights.*lora\.base_dtype"):
        Trainer(tiny(*words[:-1], *resume))


@pytest.mark.tier("long")
@pytest.mark.parametrize("form", ["float8", "nf4"])
def test_jobs_learn_beside_a_quantised_base(tmp_path, form):
    words = f"lora.base_dtype={form}"
    with Service(config_of(tmp_path / "all", words)) as service:
        names = [new(service, seed) for seed in range(2)]
        courses = [Course(seed, asker(service, name)) for seed, name in enumerate(names)]
        live = courses
        while live:
            live = [course for course in live if course.go_on()]
    for seed, course in enumerate(courses):
        results, adapter = run_alone(tmp_path / f"{seed}", seed, words)
        assert (course.results, adapter_of(tmp_path / "all", names[seed])) == (results, adapter)


def test_base_dtype_without_adapters_is_refused():
    with pytest.raises(ConfigError, match=r"lora\.base_dtype: 'float8' contradicts lora\.rank 0"):
        Config.load(None, [FLOAT8], environ={})


def test_memory_estimate_counts_a_quantised_base():
    words = ["train.micro_batch_size=1", "train.global_batch_size=1", "lora.rank=16"]
    words += ["compile.enabled=yes"]
    found = []
    for extra in ([], [FLOAT8], ["lora.base_dtype=nf4"]):
        config = Config.load("bench-qwen3-30b-a3b", [*words, *extra], environ={})
        arch = resolve_architecture(config.model)
        dims = ParallelDims.resolve(config.parallel, 1, arch)
        found.append(estimate_memory(config, arch, dims, torch.bfloat16))
    plain, narrow, four = found
    assert narrow.weights < 0.55 * plain.weights
    assert narrow.gathered < 0.1 * plain.weights
    assert narrow.total < plain.total - 0.4 * plain.weights
    # 29.9e9 elements of blocks' matrices.
    assert narrow.weights - four.weights == pytest.approx(29.9e9 * (8.25 - 4.15625) / 8, rel=0.01)
    assert four.total == pytest.approx(narrow.total - narrow.weights + four.weights)
