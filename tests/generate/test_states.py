"""Models with recurrent states generate the same tokens and bits, however prompts are split."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moetrain.config import Config, ModelSection, Recipes
from moetrain.config.sections import LoraSection
from moetrain.data.chat import CHATML
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate.drafting import most_drafts
from moetrain.generate.engine import Generator
from moetrain.generate.ranks import ExpertParallel
from moetrain.generate.request import Request, SamplingParams
from moetrain.kernels.linear_attention.convolution import Convolution, convolution_step, convolved
from moetrain.kernels.linear_attention.gated_delta import CHUNK, Documents, gated_delta
from moetrain.kernels.linear_attention.kda import kda
from moetrain.kernels.linear_attention.reads import Reads
from moetrain.kernels.linear_attention.ssd import ssd
from moetrain.kernels.linear_attention.step import (
    StateCache,
    gated_delta_step,
    kda_step,
    ssd_step,
)
from moetrain.models.architecture import AttentionPart
from moetrain.models.hf.load import load_hf, resolve_architecture
from moetrain.models.hf.peft import attach_peft
from moetrain.models.hf.save import save_hf
from moetrain.models.transformer import Transformer
from moetrain.rl.loop import RlTrainer
from tests.lib.architectures import put_weights
from tests.lib.distributed import spawn
from tests.lib.families_beside_transformers import save_adapters
from tests.lib.family_cases import LINEAR_CASES, architecture_of, random_reference, tokens
from tests.lib.generators import draw_request
from tests.lib.kernel_cases import devices
from tests.lib.one_answer import LAYOUTS
from tests.lib.rl_runs import even, lines_of, words_of  # noqa: F401 - the fixture
from tests.lib.samples import sample_of, samples_on_ranks
from tests.lib.small_models import relative_error

SIZES = {"vocab_size": 264, "max_positions": 512, "num_experts": 8}
FAMILIES = ("qwen3_5_moe_text", "nemotron_h", "lfm2_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def arch(request):
    return architecture_of(request.param, **SIZES)


def make_model(arch, seed=0):
    model = Transformer(arch)
    model.init_weights(std=0.3, seed=seed)
    return model


def make_generator(arch, seed=0, **settings):
    return Generator(make_model(arch, seed), ByteTokenizer(), **settings)


@pytest.fixture(scope="module")
def folder(arch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    save_hf(make_model(arch), folder, tokenizer=ByteTokenizer().export(CHATML))
    return folder


def draw_inputs(generator, T, H, Q, K, V, dtype):
    def normal(*shape):
        return torch.randn(shape, generator=generator, device=generator.device)

    q_TQK, k_TQK = (torch.nn.functional.normalize(normal(T, Q, K), dim=-1) for _ in "qk")
    g_TH, beta_TH = -normal(T, H).abs() / 9, normal(T, H).sigmoid()
    return [q_TQK.to(dtype), k_TQK.to(dtype), normal(T, H, V).to(dtype), g_TH, beta_TH.to(dtype)]


def channels_of(inputs):
    """Return inputs of Kimi Delta Attention: as many queries as values, and gates of channels."""
    q_TQK, k_TQK, v_THV, g_TH, *others = inputs
    heads = v_THV.shape[1] // q_TQK.shape[1]
    q_THK, k_THK = (x.repeat_interleave(heads, 1) for x in (q_TQK, k_TQK))
    return [q_THK, k_THK, v_THV, g_TH[..., None] * 9 * k_THK.float().square(), *others]


RULES = {
    "gated delta": (gated_delta, gated_delta_step, 5, {"scale": 0.125}),
    "kda": (kda, kda_step, 5, {"scale": 0.125}),
    "state space": (ssd, ssd_step, 4, {}),
}
"""The rule of training and its step, the number of their inputs, and further arguments."""
CUTS = {"one by one": (1, 1), "a few": (1, 40), "whole chunks": (CHUNK, CHUNK), "long": (1, 200)}


@pytest.mark.tier(
    "quick",
    long=["gated delta-fast-one by one-cpu", "kda-fast-a few-cpu", "state space-fast-a few-cpu"],
    wide=[
        "kda-fast-long-cpu",
        "kda-fast-one by one-cpu",
        "kda-fast-whole chunks-cpu",
        "state space-fast-long-cpu",
        "state space-fast-one by one-cpu",
    ],
)
@devices
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kernels", ["fast", "reference"])
@pytest.mark.parametrize("name", RULES)
def test_a_token_has_the_bits_of_training_however_it_is_read(name, kernels, cut, device):
    """Four sequences, some at the same time, use slots that held others before."""
    rng, draw = random.Random(cut), torch.Generator(device).manual_seed(0)
    is_fast = kernels == "fast"
    dtype = torch.bfloat16 if is_fast else torch.float32
    lengths = (1, CHUNK, 2 * CHUNK + 3, 300)
    if is_fast and device == "cpu":  # in Triton's interpreter
        lengths = (1, CHUNK, CHUNK + 3, 5)
    H, Q, K, V = (2, 1, 64, 64) if is_fast else (4, 2, 6, 10)
    T, backend = sum(lengths), "triton" if is_fast else "reference"
    rule, rule_step, takes, how = RULES[name]
    how = {**how, "backend": backend}
    inputs = draw_inputs(draw, T, H, Q, K, V, dtype)[:takes]
    inputs = channels_of(inputs) if name == "kda" else inputs
    bounds = list(itertools.accumulate(lengths, initial=0))
    bounds_N = torch.tensor(bounds, dtype=torch.int32, device=device)
    want_THV = rule(*inputs, Documents.of(bounds_N, T), **how)

    cache = StateCache.empty(4, inputs)
    for tensor in (cache.states_PHKV, *cache.open_PI):  # left by the slots' earlier owners
        tensor[1:] = torch.nan
    # Then the convolution, with J taps.
    x_TC = torch.randn(T, 12, generator=draw, device=device)
    filters_C1J = torch.randn(12, 1, 4, generator=draw, device=device)
    bias_C = filters_C1J[:, 0, 0] / 2 if name == "state space" else None
    place_T = torch.cat([torch.arange(n, device=device) for n in lengths])
    given = Convolution(x_TC, filters_C1J, 4, True, bias_C)
    (want_Thd,) = convolved([given], place_T, fusible=not is_fast)
    kept_PJC = x_TC.new_full((4, 3, 12), torch.nan)
    free, slot_of, seen, got_THV = [3, 1, 2], {}, [0] * 4, torch.empty_like(want_THV)
    got_Thd = torch.empty_like(want_Thd)
    while seen != list(lengths):
        planned = []
        for i in rng.sample(range(4), 4):
            left = lengths[i] - seen[i]
            if left and (i in slot_of or free):
                slot_of[i] = slot_of.get(i) or free.pop()
                planned.append((i, min(left, rng.randint(*CUTS[cut]))))
        sequences = [(slot_of[i], seen[i], number) for i, number in planned]
        rows = [r for i, n in planned for r in range(bounds[i] + seen[i], bounds[i] + seen[i] + n)]
        reads = Reads.of(sequences, device)
        # This is as in decoding, with an empty slot in the batch.
        if all(number == 1 for _, number in planned):
            slots, places, _ = torch.tensor([*sequences, (0, 0, 1)], device=device).T
            reads, rows = Reads.of_singles(slots.int(), places.int()), [*rows, 0]
        step = [x[rows].contiguous() for x in inputs]
        o_THV = rule_step(*step, cache, reads, **how)
        given = Convolution(x_TC[rows], filters_C1J, 4, True, bias_C)
        y_Thd = convolution_step(given, kept_PJC, reads, backend)
        number = sum(number for _, number in planned)
        got_Thd[rows[:number]] = y_Thd[:number]
        got_THV[rows[:number]] = o_THV[:number]
        for i, number in planned:
            seen[i] += number
            if seen[i] == lengths[i]:
                free.append(slot_of.pop(i))
    if is_fast:
        assert torch.equal(got_Thd, want_Thd)
    else:  # on a CPU silu's rounding depends on an element's place in a vector register
        torch.testing.assert_close(got_Thd, want_Thd, rtol=1e-5, atol=1e-6)
    if is_fast or device == "cpu":
        assert torch.equal(got_THV, want_THV)
    else:  # the library's products have other bits for other shapes
        torch.testing.assert_close(got_THV, want_THV, rtol=1e-5, atol=1e-6)


@pytest.mark.tier("quick", long=["fast-cpu"])
@devices
@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_rejected_drafts_leave_states_unchanged(kernels, device):
    """Two sequences have drafts after a token, in slots' lanes; some drafts are right.

    Other steps read a few tokens at once, with drafts after them.
    """
    rng, draw = random.Random(0), torch.Generator(device).manual_seed(0)
    is_fast, most, taps = kernels == "fast", 3, 4
    dtype = torch.bfloat16 if is_fast else torch.float32
    H, Q, K, V = (2, 1, 64, 64) if is_fast else (4, 2, 6, 10)
    lengths, backend = (CHUNK + 6, 20), "triton" if is_fast else "reference"
    inputs = draw_inputs(draw, sum(lengths), H, Q, K, V, dtype)
    wrong = draw_inputs(draw, sum(lengths), H, Q, K, V, dtype)
    bounds = [0, lengths[0], sum(lengths)]
    how = {"scale": 0.125, "backend": backend}
    bounds_N = torch.tensor(bounds, dtype=torch.int32, device=device)
    want_THV = gated_delta(*inputs, Documents.of(bounds_N, sum(lengths)), **how)
    x_TC, wrong_TC = torch.randn(2, sum(lengths), 12, generator=draw, device=device)
    filters_C1J = torch.randn(12, 1, taps, generator=draw, device=device)
    place_T = torch.cat([torch.arange(n, device=device) for n in lengths])
    given = Convolution(x_TC, filters_C1J, 4, True)
    (want_Thd,) = convolved([given], place_T, fusible=not is_fast)
    cache = StateCache.empty(3, inputs)
    for tensor in (cache.states_PHKV, *cache.open_PI):
        tensor[1:] = torch.nan
    kept_PRC = x_TC.new_full((3, taps - 1 + most, 12), torch.nan)
    seen = [CHUNK - 14, 0]
    for i, start in enumerate(bounds[:2]):  # read before
        part = slice(start, start + seen[i])
        if seen[i]:
            reads = Reads.of([(i + 1, 0, seen[i])], device)
            gated_delta_step(*(x[part] for x in inputs), cache, reads, **how)
            convolution_step(given._replace(x_TC=x_TC[part]), kept_PRC, reads, backend)
    accepted = 0
    while any(n < length for n, length in zip(seen, lengths, strict=True)):
        lanes, planned, new, is_wrong = [], [], [0, 0], []
        for i in range(2):
            left = lengths[i] - seen[i]
            if left:
                drafts = rng.randint(0, min(most, max(0, left - 1)))
                drafts = most_drafts(seen[i], drafts + 1, True)
                right = rng.randint(0, drafts)
                new[i] = 1 + right
                accepted += right
                planned.append((i + 1, seen[i], 1 + drafts))
                lanes += [
                    (i + 1, seen[i] + j, j, bounds[i] + seen[i] + j) for j in range(drafts + 1)
                ]
                is_wrong += [j > right for j in range(drafts + 1)]
        slots, places, before, rows = torch.tensor(lanes, device=device).T
        reads = Reads.of_singles(slots.int(), places.int(), before.int())
        if rng.random() < 0.3:
            reads = Reads.of(planned, device)
        is_wrong = torch.tensor(is_wrong, device=device)

        def read(right, other):
            mask = is_wrong.view(-1, *[1] * (right.dim() - 1))  # noqa: B023
            return torch.where(mask, other[rows], right[rows])  # noqa: B023

        o_THV = gated_delta_step(*map(read, inputs, wrong), cache, reads, **how)
        one = given._replace(x_TC=read(x_TC, wrong_TC))
        y_Thd = convolution_step(one, kept_PRC, reads, backend)
        right = rows[~is_wrong]
        if is_fast:
            assert torch.equal(o_THV[~is_wrong], want_THV[right])
            assert torch.equal(y_Thd[~is_wrong], want_Thd[right])
        else:
            torch.testing.assert_close(o_THV[~is_wrong], want_THV[right], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(y_Thd[~is_wrong], want_Thd[right], rtol=1e-5, atol=1e-6)
        seen = [n + more for n, more in zip(seen, new, strict=True)]
    assert accepted > 5


@pytest.mark.tier("wide", long=["nemotron_h"])
@pytest.mark.parametrize("case", LINEAR_CASES)
@torch.no_grad()
def test_prompts_longer_than_a_chunk_go_on_as_those_of_transformers(case, tmp_path):
    theirs = random_reference(case, max_position_embeddings=512).eval()
    for parameter in theirs.parameters():  # otherwise texts would repeat one token
        parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    theirs.save_pretrained(tmp_path)
    generator = Generator(load_hf(tmp_path), num_pages=200, page_size=4, max_tokens=50)
    requests, expected = [], []
    for i, length in enumerate((60, 64, 130, 3)):
        prompt = tokens(1, length)
        how = {"max_new_tokens": 70, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        made = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
        expected.append(made[0, length:].tolist())
        params = SamplingParams(max_tokens=70, temperature=0)
        requests.append(Request(str(i), tuple(prompt[0].tolist()), params))
    found = [completions[0].tokens for completions in generator.generate(requests)]
    assert found == expected
    assert len({token for text in found for token in text}) > 9


DISTURBED = {
    "pages of one token": {"page_size": 1, "num_pages": 512},
    "chunks": {"max_tokens": 3},
    "two at a time": {"max_sequences": 2},
    "hardly any room": {"page_size": 4, "num_pages": 50},
}


def longer(request, rng):
    """Return the request, sometimes with a prompt of several chunks."""
    more = tuple(rng.randrange(256) for _ in range(rng.choice([0, 0, 100])))
    return Request(request.id, (*more, *request.tokens), request.params)


@pytest.mark.tier(
    "wide",
    long=[
        "nemotron_h-pages of one token",
        "nemotron_h-two at a time",
        "qwen3_5_moe_text-pages of one token",
    ],
)
@pytest.mark.parametrize("name", DISTURBED)
def test_requests_do_not_notice_each_other(arch, name):
    rng = random.Random(name)
    requests = [longer(draw_request(i, rng), rng) for i in range(12)]
    generator = make_generator(arch, **DISTURBED[name])
    for request in requests[:6]:
        generator.submit(request)
    for _ in range(5):
        generator.step()
    generator.abort(requests[0].id)
    found = generator.generate(requests[6:])
    while generator.is_busy:
        generator.step()
    if "room" in name:
        assert generator.scheduler.figures["generator/read_again"] > 0
    for request, completions in zip(requests[6:], found, strict=True):
        (alone,) = make_generator(arch).generate([request])
        assert [c.tokens for c in completions] == [c.tokens for c in alone], request
    assert generator.pages.num_available == generator.pages.num_pages
    slots = generator.scheduler._free_slots
    assert sorted(slots) == list(range(1, generator.scheduler.max_sequences + 1))


def test_requests_that_begin_alike_share_no_pages(arch):
    generator = make_generator(arch, page_size=4)
    request = Request("a", tuple(range(30)), SamplingParams(max_tokens=9, n=3, seed=1))
    (completions,) = generator.generate([request])
    assert generator.pages.num_cached == 0
    assert [c.tokens for c in completions] == [
        c.tokens for c in make_generator(arch).generate([request])[0]
    ]


@torch.no_grad()
def test_log_probabilities_are_the_models_and_follow_its_weights(arch):
    generator = make_generator(arch, max_tokens=45)
    request = Request("a", tuple(range(100)), SamplingParams(max_tokens=60, prompt_logprobs=0))
    for seed in (0, 1):
        plain = make_model(arch, seed)
        put_weights(generator, plain.state_dict().items())
        ((completion,),) = generator.generate([request])
        whole = torch.tensor([[*request.tokens, *completion.tokens]])
        expected_SV = plain(whole)[0, :-1].log_softmax(-1)
        chosen_S = expected_SV.gather(1, whole[0, 1:, None])[:, 0]
        found_S = torch.tensor([*completion.prompt_logprobs, *completion.logprobs])
        assert relative_error(found_S, chosen_S) < 1e-5


@pytest.mark.tier("quick", long=["qwen3_5_moe_text", "lfm2_moe"])
def test_weights_that_change_on_the_way_are_used_for_all_tokens(arch):
    generator = make_generator(arch)
    params = SamplingParams(max_tokens=80, temperature=0)
    generator.submit(Request("a", tuple(range(50)), params))
    (completion,) = [generator.step()[0] for _ in range(30)][-1:]
    put_weights(generator, make_model(arch, 1).state_dict().items())
    begun = [*completion.tokens]
    while generator.is_busy:
        generator.step()
    others = Request("b", (*range(50), *begun), SamplingParams(max_tokens=50, temperature=0))
    ((expected,),) = make_generator(arch, 1).generate([others])
    assert completion.tokens == [*begun, *expected.tokens]


def test_a_slot_takes_what_the_plan_says(arch):
    expected = 3 if arch.family == "qwen3_5_moe_text" else 2
    generator = make_generator(arch, max_sequences=5)
    generator.generate([Request("a", (1, 2, 3), SamplingParams(max_tokens=3))])
    held = [c for c in generator.steps.caches if hasattr(c, "inputs")]
    found = sum(x.nbytes for c in held for x in c.tensors())
    parts = [part for part, *_ in arch.layers() if isinstance(part, AttentionPart)]
    assert len(held) == sum(part.carries_state for part in parts) == expected
    assert found == 6 * sum(part.state_bytes(4) for part in parts)
    generator.sleep()
    assert not any(c.tensors() for c in held)
    generator.wake()
    generator.generate([Request("a", (1, 2, 3), SamplingParams(max_tokens=3))])
    generator.wipe()
    assert not any(x.any() for c in held for x in c.tensors())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("preset", ["qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b"])
@torch.no_grad()
def test_graphs_on_a_gpu_go_on_as_the_model_does(preset):
    sizes = {"num_layers": 6, "hidden_size": 256, "num_experts": 16, "vocab_size": 3000}
    sizes |= {"moe_intermediate_size": 128, "shared_intermediate_size": 128}
    plain = resolve_architecture(ModelSection(preset=preset, num_layers=6))
    arch = plain.model_copy(update=sizes)
    models = [Transformer(arch).to("cuda", torch.bfloat16) for _ in range(2)]
    models[0].init_weights(std=0.05, seed=0)
    models[1].load_state_dict(models[0].state_dict())
    generator = Generator(models[0], num_pages=40, max_sequences=6, max_tokens=150)
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(3000) for _ in range(draw.randint(1, 200))) for _ in range(9)]
    params = SamplingParams(max_tokens=90)
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    found = [completions[0] for completions in generator.generate(requests)]
    assert generator.steps._graphs
    wide = Transformer(arch).to("cuda")
    wide.load_state_dict(models[0].state_dict())
    for prompt, completion in zip(prompts, found, strict=True):
        whole = torch.tensor([[*prompt, *completion.tokens]], device="cuda")
        own_S, exact_S = (
            model(whole)[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            .gather(1, whole[0, len(prompt) :, None])[:, 0].cpu()
            for model in (models[1], wide)
        )  # fmt: skip
        # The distance from fp32 is at most that of the model in bf16.
        error = (torch.tensor(completion.logprobs) - exact_S).abs().mean()
        assert error < 1.5 * (own_S - exact_S).abs().mean()


# ---- ranks, runs, servers, adapters --------------------------------------------------------------


@pytest.mark.tier("wide", long=["qwen3_5_moe_text"])
def test_every_mesh_writes_the_same(folder, tiny_words, tmp_path):
    words = [word for word in tiny_words if not word.startswith("model.")]
    words += [f"model.path={folder}", "data.tokenizer=byte", "data.seq_len=100", "train.steps=1"]
    words += ["train.sample_tokens=12", "train.micro_batch_size=1", "train.global_batch_size=4"]
    words += [f"train.sample_prompt={'and so on ' * 6}"]
    layouts = {name: LAYOUTS[4][name] for name in ("hsdp", "dp+tp", "dp+tp+ep")}
    layouts["pp+ep"] = ["parallel.pp=2", "parallel.ep=2"]
    _, expected = sample_of([*words, f"output_dir={tmp_path / 'one'}"])
    assert len(expected) > 64  # past the first chunk
    runs = {n: [*words, *w, f"output_dir={tmp_path / n}"] for n, w in layouts.items()}
    for texts in spawn(4, samples_on_ranks, runs, timeout=200):
        assert texts == dict.fromkeys(layouts, expected)


def requests_of(rank):
    """Return some requests on the first rank, and none on others."""
    rng = random.Random(rank)
    return [longer(draw_request(i, rng), rng) for i in range(0 if rank else 5)]


def serve_on_ranks(arch):
    model = make_model(arch)
    experts = ExpertParallel(model, dist.group.WORLD, "auto")
    generator = Generator(model, ByteTokenizer(), experts=experts, max_tokens=70)
    found = generator.generate(requests_of(dist.get_rank()))
    return [[c.tokens for c in completions] for completions in found]


@pytest.mark.tier("wide", long=["nemotron_h"])
def test_a_rank_without_requests_serves_others_with_its_experts(arch):
    expected = make_generator(arch).generate(requests_of(0))
    found, nothing = spawn(2, serve_on_ranks, arch, timeout=120)
    assert found == [[c.tokens for c in completions] for completions in expected]
    assert nothing == []


def learn(words):
    RlTrainer(Config.load(None, words, environ={}, recipes=Recipes.RL)).fit()


RUNS = {
    "alone": {},
    "adapters": {"lora.rank": 8},
    "ranks": {"parallel.tp": 2, "parallel.ep": 2},
}


@pytest.mark.tier("wide", long=["nemotron_h-adapters", "nemotron_h-alone"])
@pytest.mark.parametrize("values", RUNS.values(), ids=RUNS)
def test_reinforcement_learning(values, folder, even, tmp_path):  # noqa: F811
    given = {**even, "train.steps": 2, "model.path": folder, "data.tokenizer": "byte", **values}
    given |= {"rl.max_tokens": 40, "data.seq_len": 128, "rl.supervised_steps": 0}
    words = [
        w
        for w in words_of(tmp_path / "out", **given)
        if w.startswith("model.path") or w[:6] != "model."
    ]
    if "parallel.tp" in values:
        spawn(2, learn, words, timeout=200)
    else:
        learn(words)
    rows = [row for row in lines_of(tmp_path / "out") if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(abs(row["mismatch"]) < 1e-8 for row in rows)  # only rounding differs


@pytest.mark.tier("wide", long=["qwen3_5_moe_text"])
def test_server_serves_a_model_with_states(arch, folder):
    prompt, how = list(range(70)), {"max_tokens": 9, "temperature": 0}
    ((expected,),) = make_generator(arch).generate(
        [Request("a", tuple(prompt), SamplingParams(**how))]
    )
    serving = pytest.importorskip("tests.serve.test_server", reason="needs openai and starlette")
    with serving.process_serving(folder) as (_, client):
        found = client.completions.create(model="tiny", prompt=prompt, **how)
    assert found.choices[0].text == ByteTokenizer().decode(expected.tokens)


@pytest.mark.tier("long")
@torch.no_grad()
def test_adapters_generate_as_those_of_peft(tmp_path):
    peft = pytest.importorskip("peft")
    random_reference("qwen3_5_moe_text").save_pretrained(tmp_path / "base")
    model, prompt = load_hf(tmp_path / "base"), tokens(1, 7)
    lora = LoraSection(rank=8, alpha=64, layout="fused")
    save_adapters(model, lora, tmp_path / "adapter", prompt)
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    how = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    made = theirs.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **how)
    again = load_hf(tmp_path / "base")
    plain = Generator(load_hf(tmp_path / "base"))
    attach_peft(again, tmp_path / "adapter")
    request = Request("a", tuple(prompt[0].tolist()), SamplingParams(max_tokens=30, temperature=0))
    ((found,),), ((without,),) = (g.generate([request]) for g in (Generator(again), plain))
    assert found.tokens == made[0, 7:].tolist() != without.tokens
