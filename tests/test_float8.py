"""A frozen base in 8 bits: what is stored, and that all beside it is as with any weights."""

import pytest
import torch
from distributed import spawn
from estimates import estimate_memory
from test_engine import train, weights_of
from test_jobs import Course, adapter_of, asker, config_of, run_alone
from test_lora import (
    BASE,
    EVERYTHING,
    MICRO,
    adapted,
    compare,
    dense_reference,
    learn_all,
)
from test_lora_rollout import check, follow

from moetrain.config import Config, ConfigError
from moetrain.jobs.scheduler import Service
from moetrain.kernels.quant.e4m3 import E4M3, SCALED, quantise_groups, widen_groups
from moetrain.models.hf.load import load_hf, resolve_architecture
from moetrain.models.hf.save import save_hf
from moetrain.models.rules import ADAPTER
from moetrain.models.transformer import Transformer
from moetrain.parallel.fsdp.storage import Float8Shard
from moetrain.parallel.mesh import ParallelDims
from moetrain.parallel.offload.arena import Arena
from moetrain.train.trainer import Trainer

FLOAT8 = "lora.base_dtype=float8"
# Every rank's part of a row is whole groups.
ROUND = ["model.hidden_size=64", "model.head_dim=32", "model.moe_intermediate_size=32"]


def stored(x):
    """What is stored of numbers, by search over all codes and scales."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    codes = codes[codes.isfinite()]
    found = torch.empty_like(x)
    for i, group in enumerate(x.view(-1, SCALED)):
        power = next(p for p in range(-126, 128) if group.abs().max() <= 448 * 2.0**p)
        near = (group[:, None] / 2.0**power - codes).abs()
        found.view(-1, SCALED)[i] = codes[near.argmin(1)] * 2.0**power
    return found


def shard_of(x, dtype=torch.float32):
    shard = Float8Shard(len(x), dtype, Arena("weights", x.device))
    shard.write(0, x.shape, (slice(0, len(x)),), x)
    return shard


def test_numbers_are_the_nearest_that_there_are():
    x = torch.randn(50, SCALED, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-30, 30, 50)[:, None]
    x[3], x[4, 1:], x[5] = 0, 0, 448 * 2.0**-5
    x[6, :2] = torch.tensor([3.0, 1000.0])
    x = x.flatten()
    shard = shard_of(x)
    found = shard.read(0, x.shape)
    wanted = stored(x)
    error = (found - x).abs()
    assert torch.equal(error, (wanted - x).abs())  # of two that are as near, either
    assert error.max() > 0
    assert torch.equal(shard_of(found).read(0, x.shape), found)
    assert torch.equal(found[96:101], found[96:101].bfloat16().float())


def test_the_worked_example():
    x = torch.zeros(SCALED)
    x[:2] = torch.tensor([3.0, 1000.0])
    codes, scales = quantise_groups(x)
    assert codes[:2].tolist() == [0.75, 256]
    assert scales.tolist() == [2 + 127]


def test_what_is_not_finite_stays_bad():
    x = torch.ones(3 * SCALED)
    x[5], x[SCALED] = float("nan"), float("inf")
    found = shard_of(x).read(0, x.shape)
    assert found[: 2 * SCALED].isnan().all()
    assert (found[2 * SCALED :] == 1).all()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    codes, scales = (stored[None].to(device) for stored in quantise_groups(x))
    wide = torch.empty(len(x), device=device)
    widen_groups(codes, scales, wide, 0, len(x), "triton")
    torch.testing.assert_close(wide.cpu(), found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(4, 16, 7), (3, 100), (5, 64), (1, 1), (2, 3, 96)])
def test_a_tensor_that_is_written_in_parts_is_what_it_is_at_once(shape):
    generator = torch.Generator().manual_seed(0)
    # No number is below the smallest normal code of its group, whichever.
    whole = torch.rand(shape, generator=generator) + 0.5
    whole *= torch.where(torch.rand(shape, generator=generator) < 0.5, -1, 30)
    start, size = 2 * SCALED, whole.numel()
    once, parts = (shard_of(torch.ones(5 * SCALED + size)) for _ in range(2))
    everything = (slice(0, shape[0]),)
    once.write(start, whole.shape, everything, whole)
    places = [(i, slice(0, n)) for i in range(shape[0]) for n in (shape[1],)]
    if len(shape) == 3:
        cut = shape[1] // 2
        places = [(slice(0, shape[0]), slice(0, cut)), (slice(0, shape[0]), slice(cut, shape[1]))]
    for place in places:
        parts.write(start, whole.shape, place, whole[place].bfloat16().float())
    once.write(start, whole.shape, everything, whole.bfloat16())
    ends = torch.Size([5 * SCALED + size])
    assert torch.equal(once.read(0, ends), parts.read(0, ends))
    beside = once.read(0, torch.Size([start]))
    assert (beside == 1).all()
    assert (once.read(start + -(-size // SCALED) * SCALED, torch.Size([SCALED])) == 1).all()


# ---- adapters beside it -------------------------------------------------------------------------


RUNS = {
    1: {
        "eager": [],
        "recomputed": ["activation.policy=full"],
        "compiled": ["compile.enabled=yes", "activation.policy=selective"],
        "kernels": ["kernels.backend=triton"],
        "odd sizes": ["model.hidden_size=24", "model.moe_intermediate_size=40"],
    },
    2: {
        "dp": [],
        "dp compiled": ["compile.enabled=yes", "activation.policy=full"],
        "replicas": ["parallel.dp_replicate=2"],
        "ep": ["parallel.ep=2"],
        "tp": ["parallel.tp=2"],
        "pp": ["parallel.pp=2"],
    },
    4: {
        "dp+tp+ep": ["parallel.tp=2", "parallel.ep=4"],
        "pp ep": ["parallel.pp=2", "parallel.ep=2"],
    },
}


@pytest.mark.parametrize("world", RUNS)
def test_adapters_equal_a_dense_reference_of_what_is_stored(world):
    runs = {name: [EVERYTHING, FLOAT8, *ROUND, *words] for name, words in RUNS[world].items()}
    for answers in spawn(world, learn_all, runs, timeout=200):
        for name, answer in answers.items():
            sizes = [word for word in RUNS[world][name] if word.startswith("model.")]
            compare(name, answer, dense_reference([EVERYTHING, FLOAT8, *ROUND, *sizes]))


def learn_on_gpus(runs):
    answers = learn_all(runs)
    return {
        name: (*numbers, {n: x.cpu() for n, x in gradients.items()})
        for name, (*numbers, gradients) in answers.items()
    }


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_adapters_equal_a_dense_reference_on_gpus(world):
    on_gpu = ["train.device=cuda", "train.dtype=float32"]
    chosen = {**RUNS[1], **RUNS[world]}
    del chosen["odd sizes"]
    runs = {name: [EVERYTHING, FLOAT8, *ROUND, *on_gpu, *w] for name, w in chosen.items()}
    expected = dense_reference([EVERYTHING, FLOAT8, *ROUND, *on_gpu])
    for answers in spawn(world, learn_on_gpus, runs, device_type="cuda", timeout=200):
        for name, answer in answers.items():
            compare(name, answer, expected)


def test_what_is_narrow():
    engine = adapted(EVERYTHING, FLOAT8, *ROUND)
    train(engine, range(1), MICRO)
    narrow = {n for n, m in engine.fsdp.members.items() if m.float8 is not None}
    parts = ("attn.wq", "attn.wk", "attn.wv", "attn.wo")
    expected = {f"layers.{i}.{part}.weight" for i in range(2) for part in parts}
    expected |= {f"layers.{i}.moe.experts.{n}" for i in range(2) for n in ("w_gate_up", "w_down")}
    assert narrow == expected
    members = engine.fsdp.members
    numbers = sum(members[name].local.numel() for name in narrow)
    shards = {id(members[name].float8): members[name].float8 for name in narrow}
    assert sum(shard.bytes.numel() for shard in shards.values()) == numbers * (1 + 1 / SCALED)
    plain = weights_of(adapted(EVERYTHING, *ROUND))
    for name, weight in weights_of(engine).items():
        if name in narrow:
            assert torch.equal(weight.flatten(), stored(plain[name].flatten())), name
    # Two blocks' values at a time, whatever the depth.
    regions = {id(unit.region) for unit in engine.fsdp.units if unit.takes_turns}
    assert len(regions) == 2


def narrow_numbers(words):
    engine = adapted(*words)
    numbers = train(engine, range(2), MICRO)
    return numbers, engine.fingerprint, weights_of(engine)


def numbers_on(runs):
    return [narrow_numbers(words) for words in runs]


def test_the_same_is_stored_on_every_mesh():
    words = [EVERYTHING, FLOAT8, *ROUND]
    numbers, fingerprint, weights = narrow_numbers(words)
    assert fingerprint != narrow_numbers([EVERYTHING, *ROUND])[1]
    runs = [[*words, f"parallel.{w}"] for w in ("ep=2", "tp=2", "pp=2", "dp_replicate=2")]
    for answers in spawn(2, numbers_on, [words, *runs], timeout=200):
        for mine, print_of_mine, theirs in answers:
            for pair, wanted in zip(mine, numbers, strict=True):
                assert pair == pytest.approx(wanted, rel=1e-5)
            assert print_of_mine == fingerprint
            for name, weight in theirs.items():
                assert name.endswith(ADAPTER) or torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_is_loaded_and_saved(ranks, tmp_path):
    engine = adapted(EVERYTHING, *ROUND)
    with torch.device("cpu"):
        model = Transformer(engine.arch)
    model.load_state_dict(weights_of(engine, merged=True))
    save_hf(model, tmp_path / "base")
    words = ["parallel.ep=2"][: ranks - 1]
    for name, weight in spawn(ranks, merged_of, tmp_path, words)[0].items():
        base = model.get_parameter(name).detach()
        if name.startswith("layers.") and base.dim() > 1 and "router" not in name:
            base = stored(base.flatten()).view(base.shape)
        assert torch.equal(weight, base), name
    saved = load_hf(tmp_path / "saved", dtype=torch.float32).state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in saved.items())
    assert set(saved) == set(model.state_dict())


def merged_of(folder, words):
    """Of adapters that give nothing yet."""
    from test_engine import make_engine

    kept = [word for word in BASE if not word.startswith(("model.", "data.path"))]
    words = [
        f"model.path={folder / 'base'}",
        "data.source=synthetic",
        FLOAT8,
        "checkpoint.hf_dtype=float32",
        *words,
    ]
    engine = make_engine(*words, base=kept, micro=MICRO)
    engine.save_hf(folder / "saved", dtype="float32")
    return weights_of(engine, merged=True)


def test_generation_has_what_is_stored():
    check(*follow([FLOAT8, *ROUND]))


def follow_all(runs):
    return [follow([FLOAT8, *ROUND, *words]) for words in runs]


def test_generation_on_ranks():
    runs = [["parallel.ep=2"], ["parallel.tp=2"], ["parallel.pp=2"], []]
    for answers in spawn(2, follow_all, runs, timeout=200):
        for answer in answers:
            check(*answer)


def test_it_is_offloaded_and_comes_back():
    engine, other = (adapted(EVERYTHING, FLOAT8, *ROUND) for _ in range(2))
    train(engine, range(1), MICRO)
    engine.offload()
    engine.reload()
    assert train(engine, range(1, 2), MICRO) == train(other, range(2), MICRO)[1:]


def test_a_run_goes_on_beside_it_alone(tiny):
    words = ["lora.rank=8", "optim.schedule=constant", "checkpoint.interval=2", FLOAT8]
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


def test_jobs_learn_beside_it(tmp_path):
    with Service(config_of(tmp_path / "all", FLOAT8)) as service:
        names = [service.create(seed=seed)["id"] for seed in range(2)]
        courses = [Course(seed, asker(service, name)) for seed, name in enumerate(names)]
        live = courses
        while live:
            live = [course for course in live if course.go_on()]
    for seed, course in enumerate(courses):
        results, adapter = run_alone(tmp_path / f"{seed}", seed, FLOAT8)
        assert (course.results, adapter_of(tmp_path / "all", names[seed])) == (results, adapter)


def test_who_has_no_adapters_has_no_base():
    with pytest.raises(ConfigError, match=r"lora\.base_dtype: 'float8' contradicts lora\.rank 0"):
        Config.load(None, [FLOAT8], environ={})


def test_the_estimate_knows():
    words = ["train.micro_batch_size=1", "train.global_batch_size=1", "lora.rank=16"]
    words += ["compile.enabled=yes"]
    found = []
    for extra in ([], [FLOAT8]):
        config = Config.load("qwen3-30b-a3b", [*words, *extra], environ={})
        arch = resolve_architecture(config.model)
        dims = ParallelDims.resolve(config.parallel, 1, arch)
        found.append(estimate_memory(config, arch, dims, torch.bfloat16))
    plain, narrow = found
    assert narrow.weights < 0.55 * plain.weights
    assert narrow.gathered < 0.1 * plain.weights
    assert narrow.total < plain.total - 0.4 * plain.weights
