"""Generation with a cache of latents (``--cache latent``, ``rl.generator_cache latent``)."""

import pytest
import torch
import torch.distributed as dist

from moetrain.config import Config, ConfigError, ModelSection
from moetrain.generate.engine import Generator
from moetrain.generate.ranks import HeadParallel
from moetrain.generate.request import Request, SamplingParams
from moetrain.models.families import PRESETS
from moetrain.models.hf.load import load_hf, resolve_architecture
from moetrain.models.parts.latent_attention import MultiHeadLatent
from moetrain.models.parts.lora import add_adapters
from moetrain.models.transformer import Transformer
from moetrain.parallel.mesh import ParallelDims
from moetrain.rl.loop import RlTrainer
from moetrain.runtime.backend import INTERPRETED
from moetrain.train.checks import check_model
from tests.lib.distributed import spawn
from tests.lib.drafts import make_model
from tests.lib.estimates import estimate_memory
from tests.lib.family_cases import VOCAB, architecture_of, random_reference, tokens
from tests.lib.rl_runs import EVEN, config_of, fitted, lines_of
from tests.lib.small_models import relative_error

CASES = (
    "deepseek_v3",
    "deepseek_v3 yarn",
    "deepseek_v2 no latent queries",
    "glm4_moe_lite",
    "deepseek_v32",
    "glm_moe_dsa",
    "kimi_linear",
    "bailing_hybrid",
    "mistral4",
    "axk1",
)
EVERY = SamplingParams(max_tokens=10, temperature=0, logprobs=VOCAB)


def enlarged(case):
    """Return transformers' model, whose texts do not repeat one token."""
    theirs = random_reference(case).eval()
    for parameter in theirs.parameters():
        parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return theirs


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_log_probabilities_are_those_of_transformers(case, tmp_path):
    """All tokens' log-probabilities after prompts that are read in chunks, then token by token."""
    theirs = enlarged(case)
    theirs.save_pretrained(tmp_path)
    how = {"num_pages": 20, "page_size": 4, "max_tokens": 7}
    generator = Generator(load_hf(tmp_path), **how, cache="latent")
    prompts = [tokens(1, length)[0].tolist() for length in (1, 12, 23)]
    requests = [Request(str(i), tuple(prompt), EVERY) for i, prompt in enumerate(prompts)]
    plain = Generator(load_hf(tmp_path), **how).generate(requests)
    for prompt, (found,), (same,) in zip(prompts, generator.generate(requests), plain, strict=True):
        read = torch.tensor([[*prompt, *found.tokens[:-1]]])
        logits_BSV = theirs(read, use_cache=False).logits[:, len(prompt) - 1 :]
        want_SV = logits_BSV[0].log_softmax(-1)
        got_SV = torch.tensor([[own[i] for i in range(VOCAB)] for own in found.top_logprobs])
        assert relative_error(got_SV, want_SV) < 1e-5
        assert found.tokens == want_SV.argmax(-1).tolist() == same.tokens
        assert found.logprobs != same.logprobs  # or else the cache is not of latents


@pytest.mark.parametrize("case", ["deepseek_v3", "glm_moe_dsa", "kimi_linear"])
@torch.no_grad()
def test_pages_hold_as_many_elements_as_are_counted(case):
    arch = architecture_of(case)
    generator = Generator(Transformer(arch), num_pages=6, page_size=4, cache="latent")
    generator.model.init_weights(std=0.3, seed=0)
    generator.generate([Request("a", (1, 2, 3), SamplingParams(max_tokens=4))])
    mixers = [one for one in generator.model.modules() if isinstance(one, MultiHeadLatent)]
    caches = [mixer.kept for mixer in mixers]
    caches += [mixer.indexer.cache for mixer in mixers if getattr(mixer, "indexer", None)]
    held = sum(cache.pages_PZd[0, 0].numel() for cache in caches)
    assert held == arch.cached_elements(latent=True) == arch.cached_elements(3, latent=True)
    latents = [mixer for mixer in arch.attentions() if mixer.cached_latents is not None]
    assert {mixer.latents[1] for mixer in latents} == {18}
    assert all(mixer.cache is None for mixer in mixers)
    generator.sleep()
    assert all(cache.pages_PZd is None for cache in caches)


@pytest.mark.parametrize(
    ("preset", "expanded", "latent"),
    [  # elements a token: layers x heads x (192 + 128), and layers x (512 + 64)
        ("deepseek-v3", 61 * 128 * 320, 61 * 576),
        ("deepseek-v3.2", 61 * (128 * 320 + 128), 61 * (576 + 128)),
        ("moonlight-16b-a3b", 27 * 16 * 320, 27 * 576),
        ("kimi-k2", 61 * 64 * 320, 61 * 576),
        ("kimi-linear-48b-a3b", 7 * 32 * 320, 7 * 576),
        ("glm-4.7-flash", 47 * 20 * 512, 47 * 576),
    ],
)
def test_presets_keep_these_elements(preset, expanded, latent):
    arch = PRESETS[preset]
    assert (arch.cached_elements(), arch.cached_elements(latent=True)) == (expanded, latent)


@pytest.mark.tier("long")
@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("deepseek_v3", {}),
        ("deepseek_v32", {"index_head_dim": 16}),
    ],
)
def test_kernels_give_what_plain_torch_gives(case, changes):
    """Prompts are read in chunks; the second one is longer than what is selected.

    Kernels of indexers take widths that are powers of two.
    """
    found = []
    for backend in ("reference", "triton"):
        model = Transformer(architecture_of(case, **changes))
        model.init_weights(std=0.3, seed=0)
        for module in model.modules():
            if isinstance(module, MultiHeadLatent):
                module.backend = backend
        generator = Generator(model, num_pages=30, page_size=4, max_tokens=7, cache="latent")
        params = SamplingParams(max_tokens=6, temperature=0)
        prompts = [tuple(tokens(1, n)[0].tolist()) for n in (3, 19)]
        requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        found.append([completion for (completion,) in generator.generate(requests)])
    for want, got in zip(*found, strict=True):
        assert got.tokens == want.tokens
        torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(want.logprobs))


@pytest.mark.parametrize("case", ["deepseek_v3", "glm_moe_dsa"])
def test_sampled_tokens_do_not_depend_on_the_batch(case):
    """Sequences of other lengths, shared pages, drafts' chunks and preemption change no token."""
    arch, how = architecture_of(case), {"page_size": 4, "max_tokens": 16, "cache": "latent"}

    def made(num_pages):
        model = Transformer(arch)
        model.init_weights(std=0.3, seed=0)
        return Generator(model, num_pages=num_pages, **how)

    prompts = [tuple(tokens(1, n)[0].tolist()) for n in (3, 19, 12)]
    params = SamplingParams(max_tokens=11, temperature=0.9, seed=1)
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    alone = [made(30).generate([r])[0][0] for r in requests]
    together = made(11).generate(requests)
    assert [found[0].tokens for found in together] == [one.tokens for one in alone]
    assert len({token for one in alone for token in one.tokens}) > 8


def test_drafts_change_no_token():
    how = {"page_size": 4, "num_pages": 30, "cache": "latent"}
    request = Request("a", tuple(range(12)), SamplingParams(max_tokens=12, temperature=0))
    ((expected,),) = Generator(make_model("deepseek_v3"), **how).generate([request])
    generator = Generator(make_model("deepseek_v3"), **how, draft=2)
    ((found,),) = generator.generate([request])
    assert found.tokens == expected.tokens
    assert found.num_drafted > 0


@torch.no_grad()
def test_adapters_of_the_expanding_matrix_are_absorbed_too():
    config = Config.load("debug", ["lora.rank=8", "lora.targets=*.wkv_b"], environ={})

    def made():
        model = Transformer(architecture_of("deepseek_v3"))
        add_adapters(model.layers, config.lora)
        model.init_weights(std=0.3, seed=0)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
        return model

    prompt = tuple(tokens(1, 9)[0].tolist())
    request = Request("a", prompt, SamplingParams(max_tokens=8, temperature=0))
    ((found,),) = Generator(made(), cache="latent").generate([request])
    logits_BSV = made()(torch.tensor([[*prompt, *found.tokens[:-1]]]))
    want_SV = logits_BSV[0, len(prompt) - 1 :].log_softmax(-1)
    assert found.tokens == want_SV.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(found.logprobs), want_SV.max(-1).values)


def answers_of_ranks(shares):
    heads = HeadParallel(dist.group.WORLD) if shares else None
    model = Transformer(architecture_of("deepseek_v3"))
    model.init_weights(std=0.3, seed=0)
    how = {"num_pages": 9, "page_size": 4, "max_tokens": 7, "cache": "latent"}
    generator = Generator(model, **how, heads=heads)
    params = SamplingParams(max_tokens=6, seed=1)
    requests = [Request(str(n), tuple(tokens(1, n)[0].tolist()), params) for n in (3, 12)]
    found = generator.generate(requests if heads is None or heads.leads else [])
    sizes = [cache.pages_PZd.nbytes for cache in generator.steps.caches]
    return [(c.tokens, c.logprobs) for (c,) in found], sizes


@pytest.mark.tier("long")
def test_ranks_that_share_heads_keep_all_latents_each():
    (expected,) = spawn(1, answers_of_ranks, False, timeout=100)
    first, second = spawn(2, answers_of_ranks, True, timeout=100)
    assert first == expected
    assert second == ([], expected[1])


# ---- settings ---------------------------------------------------------------------------------


def test_models_without_latents_are_refused_by_name():
    arch = architecture_of("olmoe")
    with pytest.raises(ConfigError, match=r"cache: 'latent', but olmoe has no latent attention"):
        Generator(Transformer(arch), cache="latent")
    config = Config.load("rl-sort", ["rl.generator_cache=latent"], environ={})
    problem = r"rl\.generator_cache: 'latent', but olmoe has no latent attention; unset it"
    with pytest.raises(ConfigError, match=problem):
        check_model(config, arch)


def test_exact_bits_are_refused():
    words = ["rl.generator_cache=latent", "kernels.attention=exact"]
    with pytest.raises(ConfigError, match=r"rl\.generator_cache: 'latent' contradicts kernels"):
        Config.load("rl-sort", words, environ={})


RUN = {
    "model.preset": "moonlight-16b-a3b",
    "model.num_kv_heads": 4,
    "model.head_dim": "none",
    "model.vocab_size": 300,
    "model.num_experts_per_token": 2,
    "model.intermediate_size": 32,
    "model.init_std": 0.1,
    "rl.supervised_steps": 0,
    "rl.generator_cache": "latent",
    "train.eval_interval": 0,
    "train.steps": 1,
    "rl.ratio": "proximal",
}


@pytest.mark.tier("long")
def test_a_run_says_how_far_its_generator_is(tmp_path):
    (tmp_path / "even.py").write_text(EVEN)
    how = RUN | {"rl.env": f"{tmp_path / 'even.py'}:Even", "train.steps": 2}
    trainer = fitted(tmp_path / "run", **how)
    assert all(block.attn.kept is not None for block in trainer.generator.model.layers)
    assert trainer.config.rl.importance_of == "token"
    rows = [row for row in lines_of(tmp_path / "run") if "reward" in row]
    assert all(row["mismatch_share"] > 0 and abs(row["mismatch"]) < 1e-6 for row in rows)


@pytest.mark.tier("long")
@pytest.mark.parametrize("name", ["expanded", "latent"])
def test_all_tokens_are_scored_though_the_first_agree(name, tmp_path):
    """Weights of 0 give the same bits with both caches. A run cannot know that."""
    (tmp_path / "even.py").write_text(EVEN)
    how = RUN | {"rl.env": f"{tmp_path / 'even.py'}:Even", "rl.generator_cache": name}
    trainer = RlTrainer(config_of(tmp_path / "run", **how | {"train.micro_batch_size": 1}))
    for key, member in trainer.engine.fsdp.members.items():
        trainer.engine.fsdp.write(key, (), torch.zeros(member.layout.shape))
    trainer.fit()
    (row,) = [row for row in lines_of(tmp_path / "run") if "reward" in row]
    written, learner = round(16 * row["length"]), trainer.learner
    assert learner.differing == 0
    assert 0 < learner.compared <= written
    assert (learner.compared == written) == (name == "latent")


def test_the_estimate_counts_latents(tmp_path):
    sizes = {}
    for name in ("expanded", "latent"):
        how = {"rl.generator_cache": name, "rl.sleep": "never", "compile.enabled": "no"}
        config = config_of(tmp_path, **RUN | how | {"activation.policy": "none"})
        arch = resolve_architecture(config.model)
        dims = ParallelDims.resolve(config.parallel, 1, arch)
        sizes[name] = estimate_memory(config, arch, dims, torch.float32, "never").cache
    number = 4 * 2 * config.rl.max_sequences * config.data.seq_len  # bytes and layers
    assert sizes == {"expanded": number * 4 * 320, "latent": number * 576}


# ---- on GPUs ------------------------------------------------------------------------------------

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def of_real_widths(device):
    """Return a model of three layers with 16 heads of 128 + 64, and its copy in fp32."""
    section = ModelSection(
        preset="moonlight-16b-a3b",
        num_layers=3,
        hidden_size=256,
        vocab_size=512,
        num_experts=8,
        num_experts_per_token=2,
        intermediate_size=256,
        moe_intermediate_size=128,
    )
    arch = resolve_architecture(section)
    with torch.device(device):
        model, wide = Transformer(arch).bfloat16(), Transformer(arch)
    model.init_weights(std=0.06, seed=0)
    wide.load_state_dict(model.state_dict())
    return model, wide


def asked(lengths, **params):
    """Return requests with prompts of these lengths."""
    how = SamplingParams(temperature=1.0, seed=3, **params)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(512, (n,), generator=draw).tolist() for n in lengths]
    return [Request(str(i), tuple(prompt), how) for i, prompt in enumerate(prompts)]


@pytest.mark.tier("long")
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_bf16_is_as_near_to_fp32_as_with_keys_and_values(device):
    """Log-probabilities of prompts that are read in chunks, and of tokens after them.

    The median of the differences from the trainer's model in fp32 is at most 1.5 times that of a
    cache of keys and values, whose bits are those of training, and 0.02.
    """
    lengths = (5, 700, 130) if device == "cuda" else (5, 90)
    requests, medians = asked(lengths, max_tokens=24, prompt_logprobs=0), {}
    for cache in ("expanded", "latent"):
        model, wide = of_real_widths(device)
        generator = Generator(model, num_pages=20, max_tokens=256, cache=cache)
        apart = []
        for request, (found,) in zip(requests, generator.generate(requests), strict=True):
            read = torch.tensor([[*request.tokens, *found.tokens]], device=device)
            want_SV = wide(read)[0, :-1].log_softmax(-1)
            want_S = want_SV.gather(1, read[0, 1:, None])[:, 0].cpu()
            got_S = torch.tensor([*found.prompt_logprobs, *found.logprobs])
            assert len(got_S) == len(want_S)
            apart.append((got_S - want_S).abs())
            assert apart[-1][-24:].median() < 0.02
        medians[cache] = torch.cat(apart).median().item()
    assert 0 < medians["latent"] < min(0.02, 1.5 * medians["expanded"])


@pytest.mark.tier("long")
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_bits_do_not_depend_on_the_batch(device):
    """On a GPU log-probabilities have the same bits alone, and with chunks and preemption."""
    is_gpu = device == "cuda"
    # The first sequence needs a second page while the last one writes, and there is none.
    requests = asked((50, 600, 120, 1000) if is_gpu else (50, 20, 70), max_tokens=16)
    alone = []
    for request in requests:
        generator = Generator(of_real_widths(device)[0], num_pages=40, cache="latent")
        alone.append(generator.generate([request])[0][0])
    generator = Generator(
        of_real_widths(device)[0], num_pages=29 if is_gpu else 4, max_tokens=200, cache="latent"
    )
    together = [found[0] for found in generator.generate(requests)]
    assert generator.scheduler.figures["generator/read_again"] > 64
    if is_gpu:
        assert [found.tokens for found in together] == [one.tokens for one in alone]
        assert [found.logprobs for found in together] == [one.logprobs for one in alone]
        again = [found[0].logprobs for found in generator.generate(requests)]  # shared pages
        assert again == [one.logprobs for one in alone]
