"""DeepSeek sparse attention: which keys are selected, in training and in generation, and refusals.

Logits and gradients are compared with transformers' in tests/models/families/test_families.py.
"""

from dataclasses import fields, replace

import pytest
import torch

from moetrain.config import (
    ActivationSection,
    Config,
    ConfigError,
    KernelsSection,
    LoraSection,
    MoeSection,
)
from moetrain.generate.engine import Generator
from moetrain.generate.request import Request, SamplingParams
from moetrain.kernels.attention import index_keys, paged
from moetrain.kernels.attention import sparse as sparse_kernel
from moetrain.kernels.attention.attention import AttentionMask
from moetrain.kernels.attention.index_keys import index_scores, visible_keys
from moetrain.kernels.attention.paged import PagedRows, as_mask
from moetrain.models.architecture import Workload
from moetrain.models.families import FAMILIES, PRESETS
from moetrain.models.hf.config import architecture_from_hf, exported_config
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.save import save_hf
from moetrain.models.layers import Context, Selection
from moetrain.models.parts import sparse_attention
from moetrain.models.parts.indexer import Indexed, select_keys
from moetrain.models.parts.lora import adaptable, add_adapters
from moetrain.models.rope_scaling import RotaryEmbedding
from moetrain.models.transformer import Inputs, Transformer, compile_blocks, plan_model
from moetrain.parallel.mesh import ParallelDims
from moetrain.parallel.pipeline.stages import StagePlan
from tests.lib.dispatched_ops import Ops
from tests.lib.family_cases import architecture_of, random_reference, tokens
from tests.lib.family_ranks import check
from tests.lib.family_ranks import drawn as drawn_on_mesh
from tests.lib.selected_keys import (
    assert_gathering_generates_the_same,
    drawn,
    pages_of,
    rows_of,
)
from tests.lib.small_models import gradients_as_checkpoint, relative_error

NAMES = ("deepseek_v32", "glm_moe_dsa")
INDEXER = {"wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"}


def ties(batch=2, queries=9, keys=9, heads=1):
    """Return indexed tokens of which about half of all scores are exactly zero."""
    draw = torch.Generator().manual_seed(3)

    def whole(*shape):
        return torch.randint(-2, 3, shape, generator=draw).float()

    q_BShd, k_BLd = whole(batch, queries, heads, 4), whole(batch, keys, 4)
    return Indexed(q_BShd=q_BShd, k_BLd=k_BLd, w_BSh=whole(batch, queries, heads))


@pytest.mark.parametrize("topk", [1, 3, 8])
@pytest.mark.parametrize("heads", [1, 2, 5])
def test_equal_scores_are_taken_in_the_order_of_their_places(heads, topk):
    indexed, size = ties(heads=heads), 9
    seen_BS2 = rows_of([0, 2], size).expand(2, -1, -1)
    got_BSK = select_keys(indexed, seen_BS2, topk)
    num_ties = 0
    for row in range(2):
        for query in range(size):
            first, last = seen_BS2[row, query].tolist()
            scores = {}
            for key in range(first, last + 1):
                products = indexed.q_BShd[row, query].double() @ indexed.k_BLd[row, key].double()
                weights = indexed.w_BSh[row, query].double()
                scores[key] = float((weights * products.clamp(min=0) / 2).sum())
            order = sorted(scores, key=lambda key: (-scores[key], key))[:topk]
            want = sorted(order) + [-1] * (topk - len(order))
            assert got_BSK[row, query].tolist() == want
            num_ties += len(scores) - len(set(scores.values()))
    assert num_ties > 20 // heads


def test_scores_are_those_of_the_formula():
    draw = torch.Generator().manual_seed(0)
    q_BShd, k_BLd, w_BSh = (
        torch.randn(shape, generator=draw, dtype=torch.float64)
        for shape in ((2, 5, 3, 4), (2, 7, 4), (2, 5, 3))
    )
    want_BSL = torch.zeros(2, 5, 7, dtype=torch.float64)
    for head in range(3):
        products_BSL = torch.einsum("bsd,bld->bsl", q_BShd[:, :, head], k_BLd) / 2
        want_BSL += w_BSh[..., head, None] * products_BSL.relu()
    torch.testing.assert_close(index_scores(q_BShd, k_BLd, w_BSh), want_BSL)


def test_a_block_of_queries_at_a_time_selects_the_same_keys(monkeypatch):
    indexed, seen_BS2 = ties(heads=3), rows_of([0, 4], 9).expand(2, -1, -1)
    want_BSK = select_keys(indexed, seen_BS2, 3)
    monkeypatch.setattr(index_keys, "_SCORES", 2 * 3 * 9 * 2)
    assert torch.equal(select_keys(indexed, seen_BS2, 3), want_BSK)


def test_masks_of_visible_and_of_selected_keys():
    assert visible_keys(rows_of([0, 2], 4), 4)[0].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
    ]
    selected_BSK = torch.tensor([[[1, -1], [3, 0]]], dtype=torch.int32)
    assert as_mask(selected_BSK, 4)[0].int().tolist() == [[0, 1, 0, 0], [1, 0, 0, 1]]


@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("is_packed", [False, True])
def test_short_rows_have_the_bits_of_latent_attention(case, is_packed):
    """With as many keys as a row has tokens, logits and gradients are DeepSeek-V3's."""
    arch = architecture_of(case, index_topk=23)
    ours = drawn(arch)
    shared = {
        name: value
        for name, value in arch
        if name in FAMILIES["deepseek_v3"].architecture.model_fields
    }
    theirs = Transformer(
        FAMILIES["deepseek_v3"].architecture(**{**shared, "family": "deepseek_v3"})
    )
    theirs.load_state_dict({n: x for n, x in ours.state_dict().items() if ".indexer." not in n})
    tokens_BS, positions_BS = tokens(2, 23), None
    if is_packed:
        positions_BS = torch.cat((torch.arange(9), torch.arange(14))).expand(2, -1)
    logits = [model(tokens_BS, positions_BS) for model in (ours, theirs)]
    assert torch.equal(*logits)
    for one in logits:
        one.square().sum().backward()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter.grad, ours.get_parameter(name).grad), name
    # With a key fewer, the bits are others.
    fewer = Transformer(arch.model_copy(update={"index_topk": 22}))
    fewer.load_state_dict(ours.state_dict())
    assert torch.equal(fewer(tokens_BS, positions_BS), logits[0]) == is_packed


@pytest.mark.parametrize("case", NAMES)
def test_the_models_loss_has_no_gradient_for_the_indexer(case):
    model = drawn(architecture_of(case))
    model(tokens(2, 23)).square().sum().backward()
    none = {name for name, p in model.named_parameters() if p.grad is None}
    assert none == {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert {name.rpartition("indexer.")[2] for name in none} == INDEXER
    theirs = random_reference(case)
    theirs(tokens(2, 23), labels=tokens(2, 23), use_cache=False).loss.backward()
    assert len(none) == sum(
        ".indexer." in n and p.grad is None for n, p in theirs.named_parameters()
    )


def test_layers_without_an_indexer_attend_to_the_keys_of_the_layer_before():
    arch = architecture_of("glm_moe_dsa one indexer")
    model = drawn(arch)
    holders = [name for name, _ in model.named_parameters() if name.endswith("indexer.wk.weight")]
    assert holders == ["layers.0.attn.indexer.wk.weight"]
    rows = model.prepare(Inputs(tokens(1, 23)))
    x_BSD = model.embed_tokens(tokens(1, 23))
    context = rows.contexts[model.kinds[0]]
    x_BSD, _, selection = model.through(0, x_BSD, context)
    assert isinstance(selection, Selection)
    selected_BSK = selection.keys_BSK
    _, _, none = model.through(1, x_BSD, context._replace(selected_BSK=selected_BSK))
    assert none is None
    with pytest.raises(RuntimeError, match="got no keys from an earlier layer"):
        model.through(1, x_BSD, context)
    # Only the selected keys have an effect on a token.
    block = model.layers[1].attn
    with torch.no_grad():
        want_BSD = block(x_BSD, context._replace(selected_BSK=selected_BSK))[0]
        changed_BSD = x_BSD.clone()
        last = 22
        others = sorted({*range(23)} - {*selected_BSK[0, last].tolist(), last})
        changed_BSD[0, others] += 1.0
        got_BSD = block(changed_BSD, context._replace(selected_BSK=selected_BSK))[0]
    torch.testing.assert_close(got_BSD[0, last], want_BSD[0, last])
    assert len(others) == 18 or len(others) == 19


class Recorded:
    """Keeps the selections of every layer, of training and of generation."""

    def __init__(self, monkeypatch):
        self.found = []
        for name in ("select_keys", "select_in_pages"):
            monkeypatch.setattr(sparse_attention, name, self.recording(name))

    def recording(self, name):
        select = getattr(sparse_attention, name)

        def recorded(*args):
            keys = select(*args)
            self.found.append(keys)
            return keys

        return recorded

    def sets(self, layers):
        """Return, for each layer, the set of keys of each token."""
        found = [[] for _ in range(layers)]
        for i, keys_1TK in enumerate(self.found):
            found[i % layers] += [{*keys.tolist()} - {-1} for keys in keys_1TK[0]]
        self.found = []
        return found


@pytest.mark.parametrize("max_tokens", [5, 64])
@pytest.mark.parametrize("case", [*NAMES, "glm_moe_dsa one indexer"])
@torch.no_grad()
def test_generation_selects_the_keys_of_training(case, max_tokens, monkeypatch):
    """A prompt is read whole or in chunks, then token by token; scores are often equal."""
    arch = architecture_of(case, index_num_heads=2, index_topk=6)
    model = drawn(arch)
    generator = Generator(drawn(arch), num_pages=30, page_size=4, max_tokens=max_tokens)
    recorded, prompt = Recorded(monkeypatch), tuple(tokens(1, 21)[0].tolist())
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=3)
    (completion,) = generator.generate([Request("a", prompt, params)])[0]
    layers = sum(arch.has_indexer(i) for i in range(arch.num_layers))
    found = [keys for keys in recorded.found if keys is not None]
    recorded.found = found
    got = recorded.sets(layers)
    read = torch.tensor([[*prompt, *completion.tokens[:-1]]])
    logits_BSV = model(read)
    want = recorded.sets(layers)
    for own, training in zip(got, want, strict=True):
        assert own == training[len(training) - len(own) :]
        assert len(own) >= len(read[0]) - 10
    # The log-probabilities are those of training, too.
    logprobs = logits_BSV[0, len(prompt) - 1 :].log_softmax(-1)
    chosen = torch.tensor(completion.tokens)[:, None]
    want_T = logprobs.gather(1, chosen)[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), want_T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", NAMES)
def test_sampled_tokens_do_not_depend_on_the_batch(case):
    """Sequences of other lengths, shared pages and preemption change no token."""
    arch = architecture_of(case)
    how = {"page_size": 4, "max_tokens": 16}
    prompts = [tuple(tokens(1, n)[0].tolist()) for n in (3, 19, 12)]
    params = SamplingParams(max_tokens=11, temperature=0.9, seed=1)
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    alone = [Generator(drawn(arch), num_pages=30, **how).generate([r])[0][0] for r in requests]
    together = Generator(drawn(arch), num_pages=11, **how).generate(requests)
    assert [found[0].tokens for found in together] == [one.tokens for one in alone]
    assert len({token for one in alone for token in one.tokens}) > 8


@pytest.mark.parametrize("case", NAMES)
def test_generation_keeps_the_indexers_keys_beside_keys_and_values(case):
    arch = architecture_of(case)
    model = drawn(arch)
    generator = Generator(model, num_pages=20, page_size=4, max_tokens=7)
    generator.generate([Request("a", (1, 2, 3), SamplingParams(max_tokens=2))])
    dense = arch.attention(0).without_indexer
    assert arch.attention(0).cached_elements() - dense.cached_elements() == arch.index_head_dim
    kept = [block.attn.indexer for block in model.layers if block.attn.indexer is not None]
    assert len(kept) == sum(arch.has_indexer(i) for i in range(3))
    assert all(one.cache.pages_PZd.shape == (21, 4, arch.index_head_dim) for one in kept)
    generator.steps.free()
    assert all(one.cache.pages_PZd is None for one in kept)


def test_scores_are_fp32_where_the_model_is_bf16(tmp_path):
    """In fp32 products and sums; the tokens' weights too. The projections are the model's dtype."""
    theirs = random_reference("deepseek_v32")
    theirs.save_pretrained(tmp_path)
    model = load_hf(tmp_path, dtype=torch.bfloat16)
    x_BSD = torch.randn(1, 9, 32).bfloat16()
    indexer, context = model.layers[0].attn.indexer, model.prepare(Inputs(tokens(1, 9)))
    latent_BSc = torch.randn(1, 9, 20).bfloat16()
    indexed = indexer(x_BSD, latent_BSc, context.contexts[model.kinds[0]])
    assert indexed.q_BShd.dtype == indexed.k_BLd.dtype == torch.bfloat16
    assert indexed.w_BSh.dtype == torch.float32
    weight = indexer.weights_proj.weight
    want_BSh = x_BSD.float() @ weight.float().T * 12**-0.5
    torch.testing.assert_close(indexed.w_BSh, want_BSh)
    scores_BSL = index_scores(indexed.q_BShd, indexed.k_BLd, indexed.w_BSh)
    assert scores_BSL.dtype == torch.float32


def test_indexers_have_no_adapters():
    model = Transformer(architecture_of("deepseek_v32"))
    assert not any(".indexer" in name for name, _ in adaptable(model.layers))
    add_adapters(model.layers, LoraSection(rank=8, targets=("*",)))
    adapted = {name for name, _ in model.named_parameters() if name.endswith("_lora_a")}
    assert not any(".indexer." in name for name in adapted)
    assert any(".attn.wq_b" in name for name in adapted)
    with pytest.raises(ConfigError, match="matches no module"):
        add_adapters(model.layers, LoraSection(rank=8, targets=("*.indexer.*",)))


@pytest.mark.parametrize("words", [[], ["lora.rank=8", "lora.base_dtype=nf4"]])
def test_indexers_are_frozen_and_never_quantised(words):
    config = Config.load("debug", [*words], environ={})
    _, rules = plan_model(config, architecture_of("deepseek_v32"), torch.float32)
    own = {name: rule for name, rule in rules.items() if ".indexer." in name}
    assert len(own) == 3 * len(INDEXER)
    assert not any(rule.trainable or rule.quant_format or rule.decay for rule in own.values())
    in_fp32 = {name for name, rule in own.items() if rule.gather is torch.float32}
    assert in_fp32 == {name for name in own if "weights_proj" in name}


@pytest.mark.parametrize(
    ("preset", "indexers"),
    [
        ("deepseek-v3.2", [*range(61)]),
        ("glm-5", [*range(78)]),
        ("glm-5.2", [0, 1, *range(2, 78, 4)]),
    ],
)
def test_published_models_have_these_indexers(preset, indexers):
    arch = PRESETS[preset]
    found = [i for i in range(arch.num_layers) if arch.attention(i).has_indexer]
    assert found == indexers
    assert architecture_from_hf(exported_config(arch, None)) == arch


def test_products_are_those_of_the_selected_keys():
    """In a row of 8192 tokens a token sees 4096 keys on average, and attends to 2048 at most."""
    part = PRESETS["deepseek-v3.2"].attention(0)
    matrices = part.num_params() - 1536 - 512 - 2 * 128  # without norms
    kept = 2048 * (1 - 2048 / (2 * 8192))
    want = matrices + 128 * (192 + 128) * kept + 64 * 129 * 4096
    assert part.products_per_token(8192) == pytest.approx(want)
    dense = PRESETS["deepseek-v3"].attention(0)
    assert part.products_per_token(2048) == dense.products_per_token(2048)


def test_a_block_of_multi_token_prediction_has_an_indexer_of_its_own():
    arch = architecture_of("glm_moe_dsa one indexer", mtp_layers=1)
    model = drawn(arch)
    assert model.layers[3].attn.indexer is not None
    hidden: list[torch.Tensor] = []
    model.backbone(Inputs(tokens(2, 23)), multi_token=hidden)
    assert hidden[0].shape == (2, 23, 32)


def test_stages_begin_with_blocks_that_select_keys():
    arch = architecture_of("glm_moe_dsa")  # its block 1 uses the keys of block 0
    words = ["parallel.pp=2"]
    problem = "parallel.pp_split: stages of 1,2 blocks begin with block 1, which .* the blocks 0,2"
    with pytest.raises(ConfigError, match=problem):
        StagePlan(Config.load("debug", [*words, "parallel.pp_split=1,2"], environ={}), arch)
    plan = StagePlan(Config.load("debug", [*words, "parallel.pp_split=2,1"], environ={}), arch)
    assert [blocks.start for blocks in plan.ranges] == [0, 2]


def test_context_parallel_ranks_gather_keys():
    arch = architecture_of("deepseek_v32")
    for method, want in (("auto", "all_gather"), ("all_gather", "all_gather"), ("ulysses", None)):
        words = [f"parallel.cp_method={method}", "parallel.cp=2"]
        config = Config.load("debug", words, environ={})
        if want is None:
            with pytest.raises(ConfigError, match=r"keys, .*; set parallel.cp_method all_ga"):
                ParallelDims.resolve(config.parallel, 2, arch)
        else:
            assert ParallelDims.resolve(config.parallel, 2, arch).cp_method == want


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"q_lora_rank": None}, "q_lora_rank is null, but the indexer's queries"),
        ({"index_head_dim": 4}, "index_head_dim 4 is less than qk_rope_head_dim 6"),
    ],
)
def test_impossible_sizes_are_named(change, problem):
    part = architecture_of("deepseek_v32").attention(0)
    own = {field.name: getattr(part, field.name) for field in fields(part)}
    with pytest.raises(ValueError, match=problem):
        type(part)(**{**own, **change}).build(KernelsSection(), MoeSection())


def test_relative_error_of_packed_documents_is_small(tmp_path):
    """Documents in one row select among their own keys, as transformers does by positions."""
    theirs = random_reference("deepseek_v32")
    theirs.save_pretrained(tmp_path)
    ours = load_hf(tmp_path)
    positions_BS = torch.cat((torch.arange(9), torch.arange(14))).expand(2, -1)
    tokens_BS = tokens(2, 23)
    want = theirs(tokens_BS, position_ids=positions_BS, use_cache=False).logits
    assert relative_error(ours(tokens_BS, positions_BS), want) < 1e-5


@pytest.mark.parametrize("block", [2**28, 1])
def test_gathered_keys_give_what_masked_keys_give(block, monkeypatch):
    """Sequences read 1, 1 and 3 tokens; the first step of a fourth reads two. A GPU gathers."""
    monkeypatch.setattr(paged, "_GATHERED", block)
    cache = pages_of()
    pages_NM = torch.tensor([[4, 1, -1], [2, 5, 8], [0, 3, 6], [7, -1, -1]], dtype=torch.int32)
    ends_N, seen_N = torch.tensor([0, 1, 2, 5, 7]), torch.tensor([5, 9, 6, 0])
    rows = PagedRows(torch.full((7,), -1), ends_N.int(), seen_N.int(), pages_NM, 2)
    draw = torch.Generator().manual_seed(1)
    q_THd = torch.randn(7, 3, 6, generator=draw)
    places_T = [5, 9, 6, 7, 8, 0, 1]
    selected = torch.full((7, 4), -1, dtype=torch.int32)
    for row, place in zip(selected, places_T, strict=True):
        kept = torch.randperm(place + 1, generator=draw)[:4]
        row[: len(kept)] = kept.int()
    want_THv = paged.attend_over_pages(
        q_THd,
        torch.empty(7, 3, 6),
        torch.empty(7, 3, 5),
        cache,
        rows._replace(selected_TAK=selected[:, None]),
        scale=0.7,
    )
    whole_THv = torch.full_like(want_THv, 7.0)  # what tokens that see four keys or fewer get
    got_THv = paged._with_selected(whole_THv, q_THd, cache, rows, selected[:, None], 0.7)
    want_THv[5:] = 7.0
    torch.testing.assert_close(got_THv, want_THv)
    # A slot without a sequence selects nothing, and must not spoil the others.
    selected[0] = -1
    again_THv = paged._with_selected(whole_THv, q_THd, cache, rows, selected[:, None], 0.7)
    assert torch.equal(again_THv[1:], got_THv[1:])
    assert again_THv.isfinite().all()


@pytest.mark.parametrize("case", NAMES)
def test_generation_by_gathered_keys_chooses_the_same_tokens(case, monkeypatch):
    assert_gathering_generates_the_same(architecture_of(case), monkeypatch)


# ---- the sparse form: attention within the latents ----------------------------------------------

SPARSE = KernelsSection(sparse_attention="sparse")


def in_the_sparse_form(model, kernels=SPARSE):
    """Return a copy of ``model`` whose attention takes the sparse form."""
    other = Transformer(model.arch, kernels=kernels)
    other.load_state_dict(model.state_dict())
    return other


class Calls:
    """Counts the calls of sparse attention, and keeps the shapes of its inputs."""

    def __init__(self, monkeypatch):
        self.shapes = []
        monkeypatch.setattr(sparse_attention, "sparse_attention", self)

    def __call__(self, q_THw, kv_Lw, keys_TK, *others):
        self.shapes.append((*q_THw.shape, *kv_Lw.shape, keys_TK.shape[1]))
        return kernel(q_THw, kv_Lw, keys_TK, *others)


kernel = sparse_attention.sparse_attention


def gradients_of(model, tokens_BS, positions_BS=None):
    """Return the logits, and the gradients of all parameters that have one."""
    logits_BSV = model(tokens_BS, positions_BS)
    logits_BSV.square().sum().backward()
    own = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"logits": logits_BSV.detach(), **own}


def assert_near(got, want, limit):
    assert got.keys() == want.keys()
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert {name: error for name, error in errors.items() if not error < limit} == {}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("case", [*NAMES, "glm_moe_dsa one indexer", "deepseek_v32 stretched"])
def test_the_sparse_form_is_transformers(case, is_packed, tmp_path, monkeypatch):
    """Logits, and every gradient, of rows of 23 tokens that select 4 keys."""
    theirs = random_reference(case)
    theirs.save_pretrained(tmp_path / "in")
    ours = load_hf(tmp_path / "in")
    for block in ours.layers:
        block.attn.form = "sparse"
    calls = Calls(monkeypatch)
    tokens_BS, positions_BS = tokens(2, 23), None
    if is_packed:
        positions_BS = torch.cat((torch.arange(9), torch.arange(14))).expand(2, -1)
    want_BSV = theirs(tokens_BS, position_ids=positions_BS, use_cache=False).logits
    got_BSV = ours(tokens_BS, positions_BS)
    assert relative_error(got_BSV, want_BSV) < 1e-5
    assert calls.shapes == [(46, 4, 18, 46, 18, 4)] * 3
    for model, logits_BSV in ((ours, got_BSV), (theirs, want_BSV)):
        for parameter in model.parameters():  # indexers and unused experts have none
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        logits_BSV.square().sum().backward()
        for fixed in (p for p in model.parameters() if not p.requires_grad):
            fixed.grad = fixed.detach().clone()
    want = gradients_as_checkpoint(theirs, theirs.save_pretrained, tmp_path / "theirs")
    got = gradients_as_checkpoint(ours, lambda folder: save_hf(ours, folder), tmp_path / "ours")
    assert_near(got, want, 1e-5)


@pytest.mark.parametrize("case", NAMES)
def test_the_sparse_form_by_the_kernels_is_the_dense_one(case, monkeypatch):
    """In fp32; only attention runs in Triton's interpreter."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off")
    arch = architecture_of(case, **WIDE, num_layers=1, moe_layers=(False,), indexer_layers=())
    dense = drawn(arch, std=0.1)
    sparse = in_the_sparse_form(dense)
    calls = []
    monkeypatch.setattr(sparse_kernel, "use_fast", lambda *given: bool(calls.append(given)) or True)
    positions_BS = torch.cat((torch.arange(20), torch.arange(3))).expand(2, -1)
    want = gradients_of(dense, tokens(2, 23), positions_BS)
    assert not calls
    assert_near(gradients_of(sparse, tokens(2, 23), positions_BS), want, 1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("is_dora", [False, True])
def test_adapters_on_the_expansion_have_their_gradients_in_the_sparse_form(is_dora):
    found = []
    for section in (KernelsSection(), SPARSE):
        model = Transformer(architecture_of("deepseek_v32"), kernels=section)
        model.init_weights(std=0.3, seed=0)
        add_adapters(model.layers, LoraSection(rank=8, targets=("*.wkv_b",), use_dora=is_dora))
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "wkv_b.weight_" in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
        found.append(gradients_of(model, tokens(2, 23)))
    assert sum("wkv_b.weight_" in name for name in found[0]) == 3 * (3 if is_dora else 2)
    assert_near(found[1], found[0], 1e-5)


@pytest.mark.parametrize("case", NAMES)
def test_recomputation_keeps_the_results_of_the_sparse_form(case, monkeypatch):
    """selective runs the op and the choice of keys once; full runs all of a block again."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off")
    monkeypatch.setattr(sparse_kernel, "use_fast", lambda *_: True)
    arch = architecture_of(case, **WIDE, num_layers=1, moe_layers=(False,), indexer_layers=())
    found, counts = [], []
    for policy in ("none", "selective", "full"):
        model = Transformer(arch, kernels=SPARSE)
        model.init_weights(std=0.1, seed=0)
        model.set_recomputation(ActivationSection(policy=policy))
        with Ops() as ops:
            found.append(gradients_of(model, tokens(1, 19)))
        names = ("sparse_attention", "select_keys", "sparse_attention_gradients")
        counts.append([ops.names[f"moetrain.{name}.default"] for name in names])
    assert counts == [[1, 1, 1], [1, 1, 1], [2, 2, 1]]
    for one in found[1:]:
        assert all(torch.equal(one[name], x) for name, x in found[0].items())


@pytest.mark.parametrize("mode", ["joint", "warmup"])
def test_indexers_learn_the_same_beside_the_sparse_form(mode, monkeypatch):
    calls = Calls(monkeypatch)
    found = []
    for section in (KernelsSection(), SPARSE):
        model = Transformer(architecture_of("glm_moe_dsa"), kernels=section)
        model.init_weights(std=0.3, seed=0)
        model.train_indexers(mode)
        selections: dict[int, Selection] = {}
        hidden_BSD, _ = model.backbone(Inputs(tokens(2, 23)), selections=selections)
        total = sum(one.kl_sum for one in selections.values())
        total.backward()
        own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append({"hidden": hidden_BSD.detach(), "kl": total.detach(), **own})
    assert_near(found[1], found[0], 1e-5)
    assert len(calls.shapes) == (3 if mode == "joint" else 0)


@pytest.mark.tier("long")
def test_compiled_blocks_have_the_sparse_form_without_a_break(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off")
    monkeypatch.setattr(sparse_kernel, "use_fast", lambda *_: True)
    arch = architecture_of("deepseek_v32", **WIDE, num_layers=1, moe_layers=(False,))
    found = []
    for is_compiled in (False, True):
        torch.compiler.reset()
        model = Transformer(arch, kernels=SPARSE)
        model.init_weights(std=0.1, seed=0)
        if is_compiled:
            compile_blocks(model, "aot_eager")
        found.append(gradients_of(model, tokens(1, 19)))
    assert_near(found[1], found[0], 1e-5)


@pytest.mark.parametrize(
    ("preset", "keys"), [("deepseek-v3.2", 6963), ("glm-5", 4352), ("glm-5.2", 4352)]
)
def test_auto_takes_the_form_that_is_faster(preset, keys):
    """K (2 c + r) against L (d + v) multiply-adds of a token and head, the first at 0.74."""
    assert PRESETS[preset].attention(0).crossing == pytest.approx(keys / 0.74, rel=2e-4)


def test_auto_is_dense_on_a_cpu_and_beside_a_chosen_attention(monkeypatch):
    calls = Calls(monkeypatch)
    arch = architecture_of("deepseek_v32")
    for section in (KernelsSection(), KernelsSection(attention="sdpa")):
        model = Transformer(arch, kernels=section)
        model.init_weights(std=0.3, seed=0)
        model(tokens(1, 23))
        for block in model.layers:
            block.attn.crossing = 0
        model(tokens(1, 23))
    assert model.layers[0].attn.form == "dense"
    assert not calls.shapes
    # Rows that select all keys are dense whatever is asked for.
    in_the_sparse_form(model)(tokens(1, 4))
    assert not calls.shapes


@pytest.mark.parametrize("rows", [1, 2])
def test_the_estimate_knows_what_the_sparse_form_keeps(rows):
    """In bf16, of a layer that is given its keys; kernels of norms keep what compiled norms do."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off")
    arch, size = architecture_of("glm_moe_dsa", **WIDE), 40
    part = arch.attention(1)
    assert not part.has_indexer
    kernels = KernelsSection(backend="triton", sparse_attention="sparse")
    module = part.build(kernels, MoeSection()).bfloat16()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x_BSD = torch.randn(rows, size, 64).bfloat16().requires_grad_()
    index_BSK = torch.arange(16).int().expand(rows, size, -1)
    keys_BSK = index_BSK.where(index_BSK <= torch.arange(size)[:, None], -1)
    rotation = RotaryEmbedding(arch.rotation(0))(torch.arange(size)[None])
    given = (x_BSD, keys_BSK, *rotation, *module.parameters())
    own = {t.untyped_storage().data_ptr() for t in given}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    context = Context(rotation, AttentionMask("sdpa"), selected_BSK=keys_BSK)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x_BSD, context)
    how = {"seq_len": size, "sparse_attention": "sparse", "is_compiled": True}
    share = Workload(tokens=rows * size, tp=1, ep=1, width=2, **how)
    found = sum(storage.nbytes() for storage in kept.values())
    assert part.activations(share) == pytest.approx(found, rel=0.01)
    assert part.activations(replace(share, seq_len=0)) < 0.8 * found


def test_the_estimate_knows_the_form_and_the_scratch_of_long_rows():
    """GLM-5's layer with eight tensor parallel ranks: a mask, or 256 tokens' terms and an index."""
    part = PRESETS["glm-5"].attention(0).without_indexer
    sizes = {"tokens": 16_384, "tp": 8, "ep": 8, "width": 2, "is_compiled": True}
    share = Workload(**sizes, seq_len=16_384, sparse_attention="auto")
    dense, sparse = (
        (part.activations(one), part.saved(one)["attention"], part.working_set(one))
        for one in (replace(share, sparse_attention="dense"), share)
    )
    heads = 8 * 16_384
    weights = 512 * 2 * (8 * (192 + 256) + 512)
    mask = 2 * 16_384**2
    added = 2 * heads * (576 + 512 - 512) + 2 * 16_384 * 64 + weights
    assert sparse[0] - dense[0] == pytest.approx(added - mask)
    assert sparse[1] == heads * (2 * 512 + 4)
    scratch = 2 * 256 * 2048 * (576 + 2 * 8) + 16_384 * (2 * 4 * 256 + 4 * 576)
    assert sparse[2] - dense[2] == pytest.approx(2 * heads * (576 + 512) + scratch)
    # Short rows, rows of unknown length, and those below the crossing have the dense form.
    for seq_len in (0, 2048, 4096):
        one = replace(share, seq_len=seq_len)
        masked = 2 * 16_384 * (seq_len if seq_len > 2048 else 0)
        assert part.activations(one) == pytest.approx(dense[0] - mask + masked)


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_a_dry_run_takes_the_form_of_the_settings(attention):
    form = KernelsSection(attention=attention).sparse_form
    assert form == ("auto" if attention == "auto" else "dense")
    assert KernelsSection(attention=attention, sparse_attention="sparse").sparse_form == "sparse"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["optim.name=muon", "optim.muon_qk_clip=100"], "QK-clip watches the scores"),
        (["lora.rank=8", "lora.dropout=0.1"], "cannot drop their elements"),
    ],
)
def test_settings_that_the_sparse_form_cannot_have_are_refused(words, problem):
    words = ["kernels.sparse_attention=sparse", *words]
    with pytest.raises(ConfigError, match=problem):
        Config.load("debug", words, environ={})


def test_what_the_sparse_form_cannot_take_is_named(monkeypatch):
    model = in_the_sparse_form(drawn(architecture_of("deepseek_v32")))
    attn = model.layers[0].attn
    attn.is_watched = True
    with pytest.raises(ValueError, match="no scores for QK-clip; use dense"):
        model(tokens(1, 23))
    attn.is_watched, attn.wkv_b.lora_scale, attn.wkv_b.lora_dropout = False, 1.0, 0.1
    with pytest.raises(ValueError, match="no dropout of an adapter on wkv_b"):
        model(tokens(1, 23))
    attn.wkv_b.lora_scale = None
    monkeypatch.setattr(sparse_attention, "use_fast", lambda *_: True)
    with pytest.raises(ValueError, match="4 heads, kv_lora_rank 12, qk_rope_head_dim 6; it takes"):
        model(tokens(1, 23))


@pytest.mark.tier("long")
def test_the_sparse_form_gives_the_single_process_answer_on_meshes(tmp_path):
    meshes = [{"tp": 2}, {"cp": 2}, {"dp_shard": 2, "ep": 2}, {"pp": 2}]
    runs = []
    for i, degrees in enumerate(meshes):
        one = drawn_on_mesh(i, 2, NAMES[i == 2], degrees, ("none", "selective", "full")[i % 3])
        runs.append(one._replace(words=[*one.words, "kernels.sparse_attention=sparse"]))
    check(2, runs, tmp_path)


WIDE = {
    "hidden_size": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "head_dim": 64,
    "v_head_dim": 64,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "index_head_dim": 64,
    "index_topk": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_intermediate_size": 64,
}
"""Sizes that kernels of a GPU take."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("case", NAMES)
def test_sparse_attention_on_a_gpu_is_that_of_a_cpu(case, form, is_compiled):
    """Logits and every gradient agree in fp32, over documents of more tokens than are selected."""
    arch = architecture_of(case, **WIDE)
    positions_BS = torch.cat((torch.arange(30), torch.arange(41))).expand(2, -1)
    found = []
    for device in ("cpu", "cuda"):
        section = KernelsSection(sparse_attention=form if device == "cuda" else "dense")
        with torch.device(device):
            model = Transformer(arch, kernels=section)
        model.to("cpu").init_weights(std=0.1, seed=0)
        model.to(device)
        if is_compiled and device == "cuda":
            torch.compiler.reset()
            compile_blocks(model)
        logits_BSV = model(tokens(2, 71).to(device), positions_BS.to(device))
        logits_BSV.square().sum().backward()
        own = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        found.append({"logits": logits_BSV.detach().cpu(), **own})
    assert_near(found[1], found[0], 1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_auto_takes_the_sparse_form_on_a_gpu_above_the_crossing(policy, monkeypatch):
    """In bf16, of two rows; attention's gradients have the same bits in a second run."""
    calls = Calls(monkeypatch)
    arch = architecture_of("glm_moe_dsa", **WIDE, num_layers=2, moe_layers=(False,) * 2)
    assert arch.attention(0).crossing == pytest.approx(16 * (2 * 64 + 32) / (64 + 64) / 0.74)
    runs = []
    for size in (27, 28, 28):
        with torch.device("cuda"):
            model = Transformer(arch).bfloat16()
        model.init_weights(std=0.1, seed=0)
        model.set_recomputation(ActivationSection(policy=policy))
        runs.append(gradients_of(model, tokens(2, size).cuda()))
        if size == 27:
            assert not calls.shapes
    # Recomputation calls the function again, though selective takes the op's saved results.
    assert len(calls.shapes) == 2 * 2 * (1 if policy == "none" else 2)
    own = {name: x for name, x in runs[1].items() if ".attn." in name}
    assert len(own) == 2 * 7
    for name, x in own.items():
        assert torch.equal(runs[2][name], x), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cache", ["expanded", "latent"])
@pytest.mark.parametrize("case", NAMES)
@torch.no_grad()
def test_generation_on_a_gpu_has_the_log_probabilities_of_training(case, cache):
    """In bf16, of prompts that are shorter and longer than what is selected.

    A cache of latents rounds elsewhere than training. Its distance from the model in fp32 is about
    that of training in bf16.
    """
    arch = architecture_of(case, **WIDE, max_positions=128)
    with torch.device("cuda"):
        model, trained = (Transformer(arch).bfloat16() for _ in range(2))
        exact = Transformer(arch)
    model.init_weights(std=0.1, seed=0)
    trained.load_state_dict(model.state_dict())
    exact.load_state_dict(model.state_dict())
    generator = Generator(model, num_pages=20, max_sequences=4, cache=cache)
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3)
    prompts = [tuple(tokens(1, n)[0].tolist()) for n in (5, 60)]
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    for prompt, (completion,) in zip(prompts, generator.generate(requests), strict=True):
        read = torch.tensor([[*prompt, *completion.tokens[:-1]]], device="cuda")
        chosen = torch.tensor(completion.tokens, device="cuda")[:, None]
        want, wide = (
            reader(read)[0, len(prompt) - 1 :].float().log_softmax(-1).gather(1, chosen)[:, 0].cpu()
            for reader in (trained, exact)
        )
        got = torch.tensor(completion.logprobs)
        if cache == "latent":
            assert (got - wide).abs().median() < 1.5 * (want - wide).abs().median() + 0.01
        else:  # a key more or less is selected where two scores nearly tie
            assert (got - want).abs().median() < 0.02
