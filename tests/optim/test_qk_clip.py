"""QK-clip: weights equal a plain loop's, the same on every mesh, and unaffected parts."""

import functools
import itertools

import pytest
import torch

from moetrain.config import Config, ConfigError
from moetrain.kernels.attention.attention import AttentionMask
from moetrain.kernels.attention.peaks import raise_peaks
from moetrain.models.architecture import AttentionPart
from moetrain.models.families import PRESETS
from moetrain.models.parts.latent_attention import LatentAttention
from moetrain.optim.qk_clip import QKClip
from moetrain.parallel import apply
from moetrain.train.session import resolve_run
from tests.lib.clipped_queries import TAU, engine_of
from tests.lib.distributed import spawn
from tests.lib.engines import (
    ROWS,
    SEQ_LEN,
    assert_near,
    copy_of,
    make_batches,
    objective_of,
    train,
    weights_of,
)
from tests.lib.kernel_cases import devices
from tests.lib.muon_loops import check_a_skipped_step_changes_nothing

CASES = [
    "glm4_moe groups",
    "glm4_moe as many kv heads",
    "deepseek_v3 biases",
    "deepseek_v3 no latent queries",
    "gpt_oss",
    "gpt_oss as many kv heads",
    "nemotron_h",
    "glm4_moe groups, gated",
]


# ---- beside a loop by hand ----------------------------------------------------------------------


class Recorder:
    """Attention ``core`` that keeps each head's largest score, by the formula, in fp64.

    In each row documents begin at ``starts``.
    """

    def __init__(self, core, window, starts=(0,)):
        self.core, self.window, self.starts, self.peaks = core, window, starts, {}

    def __call__(self, q_BSHd, k_BSGd, v_BSGv, context, scale=None, **how):
        _, seq_len, heads, width = q_BSHd.shape
        shared = heads // k_BSGd.shape[2]
        factor = width**-0.5 if scale is None else scale
        for head in range(heads):
            q_BSd = q_BSHd[:, :, head].double().detach()
            k_BSd = k_BSGd[:, :, head // shared].double().detach()
            for i in range(seq_len):
                first = max(start for start in self.starts if start <= i)
                first = first if self.window is None else max(first, i - self.window + 1)
                scores = torch.einsum("bd,bjd->bj", q_BSd[:, i], k_BSd[:, first : i + 1]) * factor
                self.peaks[head] = max(self.peaks.get(head, 0.0), scores.max().item())
        return self.core(q_BSHd, k_BSGd, v_BSGv, context, scale, **how)


def record(engine, starts=(0,)):
    """Return a recorder and the part of each attention layer, by path."""
    found = {}
    for i, parts in enumerate(engine.arch.layers()):
        for part in parts:
            if isinstance(part, AttentionPart) and not part.carries_state:
                path = f"layers.{i}.{part.name}"
                module = engine.model.get_submodule(path)
                module.core = Recorder(module.core, part.window, starts)
                found[path] = module.core, part
    return found


def scale_by_hand(weights, path, part, head, gamma):
    """Scale row by row, by the paper for latent attention, and by the documentation for others."""
    root = gamma**0.5

    def scale(name, start, rows, factor):
        for kind in ("weight", "bias"):
            if (x := weights.get(f"{path}.{name}.{kind}")) is not None:
                x[start : start + rows] *= factor

    if isinstance(part, LatentAttention):
        nope, rope = part.qk_nope_head_dim, part.qk_rope_head_dim
        query = "wq_b" if part.q_lora_rank else "wq"
        scale(query, head * (nope + rope), nope, root)
        scale(query, head * (nope + rope) + nope, rope, gamma)
        scale("wkv_b", head * (nope + part.v_head_dim), nope, root)
    else:  # a head's gates follow its queries
        rows, is_alone = part.head_dim, part.num_heads == part.num_kv_heads
        scale("wq", head * rows * (1 + part.output_gate), rows, root if is_alone else gamma)
        scale("wk", head * rows, rows * is_alone, root)


@pytest.mark.tier("long", quick=["glm4_moe groups, gated"])
@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_steps_that_are_clipped_by_hand(case):
    tau = 0.0023 if case == "nemotron_h" else TAU
    case, is_gated = case.removesuffix(", gated"), case.endswith(", gated")
    clipped, plain = (engine_of(case, tau=x, output_gate=is_gated) for x in (tau, 0.0))
    layers = record(plain)
    weights = {name: member.local for name, member in plain.fsdp.members.items()}
    counts = [0, 0]
    for step in range(3):
        ours, theirs = (train(engine, [step])[0] for engine in (clipped, plain))
        assert ours == pytest.approx(theirs, rel=1e-5)
        for path, (recorder, part) in layers.items():
            for head, peak in recorder.peaks.items():
                counts[peak > tau] += 1
                if peak > tau:
                    scale_by_hand(weights, path, part, head, tau / peak)
            recorder.peaks.clear()
    assert min(counts) > 0, counts  # some heads were scaled, and some were not
    assert_near(weights_of(clipped), weights_of(plain), 1e-5)


def test_a_clipped_head_has_scores_at_the_threshold_and_others_the_bits_they_had():
    """The learning rate is nearly zero, so that no update interferes."""
    engine = engine_of("deepseek_v3 biases")
    layers = record(engine)
    train(engine, [0], lr=1e-30)
    before = {path: recorder.peaks.copy() for path, (recorder, _) in layers.items()}
    for recorder, _ in layers.values():
        recorder.peaks.clear()
    train(engine, [0], lr=1e-30)
    first = next(iter(layers))  # inputs of later layers have changed
    pairs = [(layers[first][0].peaks[head], peak) for head, peak in before[first].items()]
    assert any(peak > TAU for _, peak in pairs)
    for after, peak in pairs:
        assert after == pytest.approx(min(TAU, peak), rel=1e-4)


@pytest.mark.tier("long", quick=["gpt_oss as many kv heads"])
@pytest.mark.parametrize("case", ["gpt_oss as many kv heads", "deepseek_v3"])
def test_a_threshold_that_no_score_reaches_changes_no_bit(case):
    off, high = engine_of(case, tau=0.0), engine_of(case, tau=1e6)
    assert off.clip is None
    assert train(off, range(3)) == train(high, range(3))
    for (name, x), (_, y) in zip(off.weights(), high.weights(), strict=True):
        assert torch.equal(x, y), name


WAYS = {
    "micro-batches": ([], 2),
    "recomputed": (["activation.policy=full"], ROWS),
    "recomputed in part": (["activation.policy=selective"], ROWS),
    "compiled": (["compile.enabled=yes"], ROWS),
    "compiled, recomputed in part": (["compile.enabled=yes", "activation.policy=selective"], 4),
}
CASES_OF_WAYS = [
    *itertools.product(["glm4_moe as many kv heads", "deepseek_v3"], list(WAYS)[:3]),
    ("glm4_moe as many kv heads", "compiled"),  # it takes most of the time
    ("deepseek_v3", "compiled, recomputed in part"),
]


@pytest.mark.tier(
    "long",
    quick=["glm4_moe as many kv heads-recomputed in part"],
    wide=["deepseek_v3-compiled, recomputed in part", "glm4_moe as many kv heads-compiled"],
)
@pytest.mark.parametrize(("case", "way"), CASES_OF_WAYS)
def test_other_ways_to_compute_a_step_clip_alike(case, way, monkeypatch):
    words, micro = WAYS[way]
    monkeypatch.setattr(
        apply, "compile_blocks", functools.partial(apply.compile_blocks, backend="aot_eager")
    )
    expected, engine = engine_of(case), engine_of(case, *words, micro=micro)
    numbers = train(expected, range(2))
    for ours, theirs in zip(train(engine, range(2), micro), numbers, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert_near(weights_of(engine), weights_of(expected), 1e-5)
    off = engine_of(case, tau=0.0)
    train(off, range(2))
    name = next(iter(engine.clip.scaled))
    assert not torch.allclose(weights_of(off)[name], weights_of(engine)[name], rtol=1e-3)


# ---- what counts, and what does not -------------------------------------------------------------


def test_scores_of_evaluations_and_of_forgotten_steps_do_not_count():
    engine = engine_of("glm4_moe groups")
    engine.forward(make_batches(0), objective_of(engine))
    assert not engine.clip.peaks_LH.any()
    engine.forward_backward(make_batches(0), objective_of(engine))
    assert engine.clip.peaks_LH.all()
    engine.forget()
    assert not engine.clip.peaks_LH.any()


def test_a_skipped_step_scales_nothing_and_forgets_its_scores():
    engine = engine_of("glm4_moe groups")
    check_a_skipped_step_changes_nothing(engine)
    assert not engine.clip.peaks_LH.any()


@pytest.mark.tier("long")
@pytest.mark.parametrize("words", [[], ["train.dtype=bfloat16", "moe.z_loss_coef=0"]])
def test_a_state_goes_on_bit_for_bit(words):
    """In bf16 too: an update leaves the scaled weights for the next forward."""
    first = engine_of("deepseek_v3", *words)
    train(first, range(2))
    state = copy_of(first.state())
    off = engine_of("deepseek_v3", *words, tau=0.0)
    assert state["model"].keys() == copy_of(off.state())["model"].keys()
    straight = train(first, range(2, 4))
    second = engine_of("deepseek_v3", *words)
    second.load_state(state)
    assert train(second, range(2, 4)) == straight
    for (name, mine), (_, theirs) in zip(second.weights(), first.weights(), strict=True):
        assert torch.equal(mine, theirs), name


def test_models_whose_scores_no_weight_scales_are_refused():
    words = ["model.preset=qwen3-0.6b", "optim.name=muon", "optim.muon_qk_clip=100"]
    with pytest.raises(ConfigError, match="100, but qwen3 normalises queries and keys, so"):
        resolve_run(Config.load(None, words, environ={}))
    for preset in ("deepseek-v3", "kimi-k2", "glm-4.7-flash", "glm-4.5-air", "gpt-oss-120b"):
        QKClip(PRESETS[preset], 100.0)
    for preset in ("qwen3-next-80b-a3b", "glm-4.5", "gemma-4-31b", "minimax-m2", "olmoe-1b-7b"):
        with pytest.raises(ConfigError, match="normalises queries and keys") as refused:
            QKClip(PRESETS[preset], 100.0)
        assert refused.value.field == "optim.muon_qk_clip"


# ---- meshes -------------------------------------------------------------------------------------

MESHES = {
    2: {
        "dp": ["parallel.dp_shard=2"],
        "replicas": ["parallel.dp_replicate=2", "parallel.dp_shard=1"],
        "tp+ep": ["parallel.tp=2", "parallel.ep=2"],
        "tp": ["parallel.tp=2"],
        "heads": ["parallel.cp=2", "parallel.cp_method=ulysses"],
        "keys": ["parallel.cp=2", "parallel.cp_method=all_gather"],
        "pp": ["parallel.pp=2"],
    },
    4: {
        "tp+heads": ["parallel.tp=2", "parallel.cp=2"],
        "pp+tp": ["parallel.pp=2", "parallel.tp=2"],
        "hsdp": ["parallel.dp_replicate=2"],
    },
}
MESH_CASES = ["glm4_moe as many kv heads", "gpt_oss", "deepseek_v3"]


def train_on_ranks(runs):
    """Return losses and weights of every run, and the largest scores of its last step."""
    answers = {}
    for (case, name), (words, micro) in runs.items():
        engine = engine_of(case, *words, micro=micro, num_experts=8)
        seen, take = [], engine.clip.take

        def keep(biggest, seen=seen, take=take, clip=engine.clip):
            found = take(lambda x: [biggest(x), seen.append(x.clone())])
            assert not clip.peaks_LH.any()
            return found

        engine.clip.take = keep
        numbers = train(engine, range(2), micro)
        answers[case, name] = numbers, weights_of(engine), seen
    return answers


@pytest.mark.tier("wide", long=["2"])
@pytest.mark.parametrize("world", MESHES)
def test_every_mesh_gives_the_single_process_answer(world):
    alone = train_on_ranks({(case, ""): ([], ROWS) for case in MESH_CASES})
    runs = {}
    for case in MESH_CASES:
        for name, words in MESHES[world].items():
            shared = [w for w in words if w.startswith(("parallel.tp=", "parallel.cp="))]
            shared += [w for w in words if w.startswith("parallel.pp=")]
            micro = 2 if "pp" in name else ROWS * 2 ** len(shared) // world
            runs[case, name] = words, micro
    for answers in spawn(world, train_on_ranks, runs, timeout=300):
        for (case, name), (numbers, weights, peaks) in answers.items():
            expected, theirs, seen = alone[case, ""]
            for mine, wanted in zip(numbers, expected, strict=True):
                assert mine == pytest.approx(wanted, rel=1e-5), (case, name)
            assert_near(weights, theirs, 1e-5)
            for ours, wanted in zip(peaks, seen, strict=True):
                assert wanted.max() > TAU
                torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=0)


# ---- what a token sees ---------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_peaks_are_those_of_the_keys_that_tokens_see(backend, window, device):
    """Some of a document's queries are on this rank, after the keys of other documents."""
    sizes, heads = [(5, 7), (0, 0), (7, 10)], 32  # queries and keys of each document
    ends, ends_k = (torch.tensor([0, *n]).cumsum(0) for n in zip(*sizes, strict=True))
    generator = torch.Generator().manual_seed(0)
    q_THd = torch.randn(int(ends[-1]), heads, 16, generator=generator)
    k_LGd = torch.randn(int(ends_k[-1]), heads // 2, 16, generator=generator)
    expected_H = torch.zeros(heads)
    for (queries, keys), start, start_k in zip(sizes, ends, ends_k, strict=False):
        for i in range(queries):
            last = keys - queries + i
            first = 0 if window is None else max(0, last - window + 1)
            seen_LHd = k_LGd[start_k + first : start_k + last + 1].repeat_interleave(2, 1)
            scores_LH = 0.5 * (q_THd[start + i] * seen_LHd).sum(-1)
            expected_H = torch.maximum(expected_H, scores_LH.amax(0))
    peaks_H = torch.zeros(heads, device=device)
    both = [x.int().to(device) for x in (ends, ends_k)]
    mask = AttentionMask("cudnn", window=window, cu_seqlens=both[0], cu_seqlens_k=both[1])
    raise_peaks(peaks_H, q_THd[None].to(device), k_LGd[None].to(device), mask, 0.5, backend)
    torch.testing.assert_close(peaks_H.cpu(), expected_H, rtol=1e-5, atol=1e-5)


# ---- packed rows, and a GPU ---------------------------------------------------------------------


def packed_batches(step):
    """Return rows of a document of five tokens and one of the rest."""
    (batch,) = make_batches(step)
    place_S = torch.cat((torch.arange(5), torch.arange(SEQ_LEN - 5)))
    ends = [row * SEQ_LEN + n for row in range(ROWS) for n in (5, SEQ_LEN)]
    ends = torch.tensor([0, *ends], dtype=torch.int32)
    return [batch._replace(positions_BS=place_S.expand(ROWS, -1).clone(), cu_seqlens=ends)]


BATCHES = {"whole rows": (make_batches, (0,)), "packed": (packed_batches, (0, 5))}
WIDE = {
    "glm4_moe groups": {"head_dim": 32},
    "deepseek_v3": {
        "head_dim": 32,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
}


@devices
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("case", WIDE)
def test_scores_are_those_of_what_attention_is_given(case, rows, device):
    """The run is in bf16 on a GPU, where a kernel finds them among documents that cuDNN sees."""
    make, starts = BATCHES[rows]
    sizes = WIDE[case] | {"moe_intermediate_size": 32}
    engine = engine_of(case, f"train.device={device}", **sizes)
    layers = record(engine, starts)
    engine.forward_backward(make(0), objective_of(engine))
    for found_H, (recorder, _) in zip(engine.clip.peaks_LH, layers.values(), strict=True):
        expected = [recorder.peaks[head] for head in range(len(found_H))]
        assert found_H.tolist() == pytest.approx(expected, rel=1e-5)
        assert min(expected) > 0
    before = weights_of(engine)
    assert not engine.step(1e-30).skipped
    names = [name for name in engine.clip.scaled if name.endswith("weight")]
    assert any(not torch.equal(before[name], weights_of(engine)[name]) for name in names)


@pytest.mark.gpu
@pytest.mark.parametrize("case", WIDE)
def test_compiled_blocks_on_a_gpu_see_the_scores_that_others_see(case):
    """They agree up to rounding to bf16, in the first layer, before any choice of experts."""
    found = []
    for words in ([], ["compile.enabled=yes", "activation.policy=selective"]):
        sizes = WIDE[case] | {"moe_intermediate_size": 32}
        engine = engine_of(case, "train.device=cuda", *words, **sizes)
        engine.forward_backward(packed_batches(0), objective_of(engine))
        found.append(engine.clip.peaks_LH.clone())
    torch.testing.assert_close(found[1][0], found[0][0], rtol=2e-2, atol=0)
    assert found[1].all()
