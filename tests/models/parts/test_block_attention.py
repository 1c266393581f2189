"""Block-sparse attention: which blocks are selected, in training and in generation, and refusals.

Logits and gradients are compared with transformers' in tests/models/families.
"""

import itertools
from dataclasses import fields, replace

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from moetrain.config import Config, ConfigError, KernelsSection, LoraSection, MoeSection
from moetrain.generate.engine import Generator
from moetrain.generate.request import Request, SamplingParams
from moetrain.kernels.attention import paged
from moetrain.kernels.attention.attention import AttentionMask, attend_by_groups, attention
from moetrain.kernels.attention.paged import PagedRows
from moetrain.models.architecture import Workload
from moetrain.models.families import FAMILIES, PRESETS
from moetrain.models.hf.load import load_hf
from moetrain.models.layers import Context
from moetrain.models.parts import block_attention
from moetrain.models.parts.block_attention import select_blocks, visible_in_blocks
from moetrain.models.parts.lora import adaptable, add_adapters
from moetrain.models.rope_scaling import RotaryEmbedding
from moetrain.models.transformer import Transformer, compile_blocks, plan_model
from moetrain.parallel.mesh import ParallelDims
from moetrain.train.checks import check_model
from tests.lib.family_cases import architecture_of, random_reference, tokens
from tests.lib.selected_keys import (
    assert_gathering_generates_the_same,
    drawn,
    pages_of,
    rows_of,
)
from tests.lib.small_models import relative_error

CASE = "minimax_m3_vl_text"
INDEXER = {"wq.weight", "wk.weight", "q_norm.weight", "k_norm.weight"}
PACKED = torch.cat((torch.arange(9), torch.arange(14))).expand(2, -1)
"""Positions of two documents in a row. The first one ends within a block."""


def whole_numbers(heads, batch=2, size=9):
    """Return queries and keys of whole numbers, whose products are exact and often equal."""
    draw = torch.Generator().manual_seed(3)
    shapes = (batch, size, heads, 4), (batch, size, 4)
    return [torch.randint(-1, 2, shape, generator=draw).float() for shape in shapes]


def by_formula(q_d, k_Ld, first, last, block_size, topk, num_local):
    """Return the blocks of one token and head, and whether some of their scores are equal."""
    scores = {}
    for key in range(first, last + 1):
        block = (key - first) // block_size
        product = float(q_d.double() @ k_Ld[key].double())
        scores[block] = max(scores.get(block, -torch.inf), product)
    has_ties = len({*scores.values()}) < len(scores)
    own = (last - first) // block_size
    scores |= {block: torch.inf for block in scores if block > own - num_local}
    order = sorted(scores, key=lambda block: (-scores[block], block))[:topk]
    return order + [-1] * (topk - len(order)), has_ties


@pytest.mark.parametrize("num_local", [0, 1, 2])
@pytest.mark.parametrize(("block_size", "topk"), [(1, 3), (2, 2), (3, 3), (4, 2), (9, 2)])
@pytest.mark.parametrize("heads", [1, 3])
def test_blocks_with_the_largest_scores_are_selected(heads, block_size, topk, num_local):
    """Blocks with equal scores are taken in their order. A token's own block always is."""
    size, num_ties = 23, 0
    q_BSGd, k_BLd = whole_numbers(heads, size=size)
    seen_BS2 = rows_of([0, 2], size).expand(2, -1, -1)
    blocks_BSGK = select_blocks(q_BSGd, k_BLd, seen_BS2, block_size, topk, num_local)
    visible_BGSL = visible_in_blocks(blocks_BSGK, seen_BS2, size, block_size)
    for row, query, head in itertools.product(range(2), range(size), range(heads)):
        first, last = seen_BS2[row, query].tolist()
        want, has_ties = by_formula(
            q_BSGd[row, query, head], k_BLd[row], first, last, block_size, topk, num_local
        )
        assert blocks_BSGK[row, query, head].tolist() == want
        keys = [j for j in range(first, last + 1) if (j - first) // block_size in want]
        assert visible_BGSL[row, head, query].nonzero()[:, 0].tolist() == keys
        num_ties += has_ties
    assert num_ties > 4 * heads


def test_few_queries_at_a_time_select_the_same_blocks(monkeypatch):
    q_BSGd, k_BLd = whole_numbers(3)
    given = q_BSGd, k_BLd, rows_of([0, 4], 9).expand(2, -1, -1), 2, 2, 1
    want = select_blocks(*given)
    monkeypatch.setattr(block_attention, "_BLOCK_SCORES", 2 * 3 * 10 * 2)
    assert torch.equal(select_blocks(*given), want)


def test_the_op_has_a_fake():
    q_BSGd, k_BLd = whole_numbers(3)
    given = q_BSGd, k_BLd, rows_of([0, 4], 9).expand(2, -1, -1), 2, 2, 1
    torch.library.opcheck(torch.ops.moetrain.select_blocks.default, given)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("groups", [2, 4])
def test_a_mask_of_each_key_head_is_that_of_its_query_heads(groups, backend):
    """Results and gradients are those of a mask for each query head, in fp64."""
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 5, 4, 6), (2, 7, groups, 6), (2, 7, groups, 3)
    q, k, v = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    visible_BGSL = torch.rand(2, groups, 5, 7, generator=draw) < 0.5
    visible_BGSL[..., 0] = True
    got = attention(*inputs, AttentionMask(backend, dense_BSS=visible_BGSL), 0.7)
    repeats = 4 // groups
    heads = [x.repeat_interleave(repeats, dim=2).transpose(1, 2) for x in (k, v)]
    scores = q.transpose(1, 2) @ heads[0].mT * 0.7
    visible_BHSL = visible_BGSL.repeat_interleave(repeats, dim=1)
    weights = scores.masked_fill(~visible_BHSL, -torch.inf).softmax(-1)
    want = (weights @ heads[1]).transpose(1, 2)
    # The reference has its scores in fp32.
    close = {"rtol": 1e-6, "atol": 1e-6} if backend == "reference" else {}
    torch.testing.assert_close(got, want, **close)
    d_out = torch.randn(got.shape, generator=draw, dtype=torch.float64)
    pairs = zip(
        torch.autograd.grad(got, inputs, d_out),
        torch.autograd.grad(want, inputs, d_out),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize("is_packed", [False, True])
def test_short_rows_have_the_bits_of_dense_attention(is_packed):
    """With as many blocks as a row has, logits and gradients are those without a selection."""
    arch = architecture_of(CASE, index_block_size=4, index_topk_blocks=6)
    ours = drawn(arch)
    theirs = Transformer(arch.model_copy(update={"sparse_layers": ()}))
    theirs.load_state_dict({n: x for n, x in ours.state_dict().items() if ".indexer." not in n})
    tokens_BS, positions_BS = tokens(2, 23), PACKED if is_packed else None
    logits = [model(tokens_BS, positions_BS) for model in (ours, theirs)]
    assert torch.equal(*logits)
    for one in logits:
        one.square().sum().backward()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter.grad, ours.get_parameter(name).grad), name
    # Documents of 9 and 14 tokens have at most 4 of 5 blocks, but a row of 23 tokens has 6.
    fewer = Transformer(arch.model_copy(update={"index_topk_blocks": 5}))
    fewer.load_state_dict(ours.state_dict())
    error = relative_error(fewer(tokens_BS, positions_BS), logits[0])
    assert error < 1e-6 if is_packed else error > 1e-3


def test_the_models_loss_has_no_gradient_for_the_indexer():
    model = drawn(architecture_of(CASE))
    model(tokens(2, 23)).square().sum().backward()
    none = {name for name, p in model.named_parameters() if p.grad is None}
    assert none == {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert {name.rpartition("indexer.")[2] for name in none} == INDEXER
    theirs = random_reference(CASE)
    theirs(tokens(2, 23), labels=tokens(2, 23), use_cache=False).loss.backward()
    assert len(none) == sum(
        ".indexer." in n and p.grad is None for n, p in theirs.named_parameters()
    )


@pytest.mark.parametrize("case", [CASE, f"{CASE} large blocks", f"{CASE} two own blocks"])
def test_packed_documents_have_the_gradients_of_transformers_alone(case, tmp_path):
    """transformers cuts blocks by places in the row, so it gets each document by itself."""
    theirs = random_reference(case)
    theirs.save_pretrained(tmp_path)
    ours, tokens_BS = load_hf(tmp_path), tokens(2, 23)
    logits_BSV = ours(tokens_BS, PACKED)
    parts = [theirs(x, use_cache=False).logits for x in tokens_BS.split([9, 14], dim=1)]
    want_BSV = torch.cat(parts, dim=1)
    assert relative_error(logits_BSV, want_BSV) < 1e-5
    for logits in (logits_BSV, want_BSV):
        cross_entropy(logits.flatten(0, 1), tokens_BS.flatten()).backward()
    got = ours.embed.weight.grad, ours.layers[1].attn.wk.weight.grad, ours.norm.weight.grad
    inner = theirs.model
    want = inner.embed_tokens.weight.grad, inner.layers[1].self_attn.k_proj.weight.grad
    want += (inner.norm.weight.grad,)
    for one, other in zip(got, want, strict=True):
        assert relative_error(one, other) < 1e-5
    together = theirs(tokens_BS, position_ids=PACKED, use_cache=False).logits
    assert relative_error(together, want_BSV) > 1e-2


class Recorded:
    """Keeps the selections of every layer, of training and of generation."""

    def __init__(self, monkeypatch):
        self.found = []
        for name in ("select_blocks", "select_blocks_in_pages"):
            monkeypatch.setattr(block_attention, name, self.recording(name))

    def recording(self, name):
        select = getattr(block_attention, name)
        is_outer = name == "select_blocks_in_pages"

        def recorded(*args):
            before = [*self.found]
            blocks = select(*args)
            if is_outer:  # it calls select_blocks for some tokens at a time
                self.found = before
            if blocks is not None:
                self.found.append(blocks if is_outer else blocks[0])
            return blocks

        return recorded

    def sets(self, layers):
        """Return, for each layer, the sets of blocks of each token's heads."""
        found = [[] for _ in range(layers)]
        for i, blocks_TGK in enumerate(self.found):
            found[i % layers] += [[{*x.tolist()} - {-1} for x in heads] for heads in blocks_TGK]
        self.found = []
        return found


@pytest.mark.parametrize("max_tokens", [5, 64])
@pytest.mark.parametrize("block_size", [1, 2, 3, 5])
@torch.no_grad()
def test_generation_selects_the_blocks_of_training(block_size, max_tokens, monkeypatch):
    """A prompt is read whole or in chunks, then token by token; pages are not whole blocks."""
    arch = architecture_of(CASE, index_block_size=block_size)
    model = drawn(arch)
    generator = Generator(drawn(arch), num_pages=30, page_size=4, max_tokens=max_tokens)
    recorded, prompt = Recorded(monkeypatch), tuple(tokens(1, 21)[0].tolist())
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=3)
    (completion,) = generator.generate([Request("a", prompt, params)])[0]
    got = recorded.sets(layers=2)
    read = torch.tensor([[*prompt, *completion.tokens[:-1]]])
    logits_BSV = model(read)
    want = recorded.sets(layers=2)
    for own, training in zip(got, want, strict=True):
        assert own == training[len(training) - len(own) :]
        assert len(own) >= len(read[0]) - 10
    # The log-probabilities are those of training, too.
    logprobs = logits_BSV[0, len(prompt) - 1 :].log_softmax(-1)
    want_T = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), want_T, rtol=1e-5, atol=1e-5)


def test_sampled_tokens_do_not_depend_on_the_batch():
    """Sequences of other lengths, shared pages and preemption change no token."""
    arch = architecture_of(CASE, index_block_size=3)
    how = {"page_size": 4, "max_tokens": 16}
    prompts = [tuple(tokens(1, n)[0].tolist()) for n in (3, 19, 12)]
    params = SamplingParams(max_tokens=11, temperature=0.9, seed=1)
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    alone = [Generator(drawn(arch), num_pages=30, **how).generate([r])[0][0] for r in requests]
    together = Generator(drawn(arch), num_pages=11, **how).generate(requests)
    assert [found[0].tokens for found in together] == [one.tokens for one in alone]
    assert len({token for one in alone for token in one.tokens}) > 8


def test_generation_keeps_index_keys_beside_keys_and_values():
    arch = architecture_of(CASE)
    model = drawn(arch)
    generator = Generator(model, num_pages=20, page_size=4, max_tokens=7)
    generator.generate([Request("a", (1, 2, 3), SamplingParams(max_tokens=2))])
    part = arch.attention(1)
    assert part.cached_elements() - part.dense.cached_elements() == arch.index_head_dim
    kept = [block.attn.indexer for block in model.layers if hasattr(block.attn, "indexer")]
    assert len(kept) == 2
    assert all(one.cache.pages_PZd.shape == (21, 4, arch.index_head_dim) for one in kept)
    generator.steps.free()
    assert all(one.cache.pages_PZd is None for one in kept)


@pytest.mark.parametrize("block", [2**28, 1])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_gathered_blocks_give_what_masked_blocks_give(block_size, block, monkeypatch):
    """Sequences read 1, 1 and 3 tokens; the first step of a fourth reads two. A GPU gathers."""
    monkeypatch.setattr(paged, "_GATHERED", block)
    cache = pages_of()
    pages_NM = torch.tensor([[4, 1, -1], [2, 5, 8], [0, 3, 6], [7, -1, -1]], dtype=torch.int32)
    ends_N, seen_N = torch.tensor([0, 1, 2, 5, 7]), torch.tensor([5, 9, 6, 0])
    rows = PagedRows(torch.full((7,), -1), ends_N.int(), seen_N.int(), pages_NM, 2)
    draw = torch.Generator().manual_seed(1)
    q_THd = torch.randn(7, 6, 6, generator=draw)  # two heads for each of three key/value heads
    places_T = [5, 9, 6, 7, 8, 0, 1]
    selected = torch.full((7, 3, 2), -1, dtype=torch.int32)
    for token, place in zip(selected, places_T, strict=True):
        own = place // block_size
        for head in token:  # its own block and, if there is one, an earlier one
            kept = [own, *torch.randperm(own, generator=draw)[:1].tolist()]
            head[: len(kept)] = torch.tensor(kept)
    rows = rows._replace(selected_TAK=selected, selected_size=block_size)
    given = q_THd, torch.empty(7, 3, 6), torch.empty(7, 3, 5), cache, rows
    want_THv = paged.attend_over_pages(*given, scale=0.7)
    is_short_T = torch.tensor(places_T) < 2 * block_size
    whole_THv = torch.full_like(want_THv, 7.0)  # what tokens that see all blocks get
    got_THv = paged._with_selected(whole_THv, q_THd, cache, rows, selected, 0.7)
    want_THv[is_short_T] = 7.0
    torch.testing.assert_close(got_THv, want_THv)
    assert is_short_T.sum() == {1: 2, 2: 2, 3: 3}[block_size]
    # The masked form itself is a softmax over the keys of the selected blocks, for one token.
    token, head = 4, 5
    keys, values = (x[pages_NM[2, :3].long()].flatten(0, 1)[:9, head // 2] for x in cache)
    kept = [j for j in range(9) if j // block_size in selected[token, head // 2].tolist()]
    weights = (keys[kept] @ q_THd[token, head] * 0.7).softmax(0)
    if not is_short_T[token]:
        torch.testing.assert_close(want_THv[token, head], weights @ values[kept])
    # A slot without a sequence selects nothing, and must not spoil the others.
    selected[0] = -1
    again_THv = paged._with_selected(whole_THv, q_THd, cache, rows, selected, 0.7)
    assert torch.equal(again_THv[1:], got_THv[1:])
    assert again_THv.isfinite().all()


def test_generation_by_gathered_keys_chooses_the_same_tokens(monkeypatch):
    assert_gathering_generates_the_same(architecture_of(CASE, index_block_size=3), monkeypatch)


def test_queries_and_keys_of_a_bf16_model_are_rounded_as_those_of_transformers():
    """Norms multiply in fp32, and round once; the rotation follows in the model's dtype there."""
    theirs = random_reference(CASE).bfloat16().model.layers[1].self_attn.indexer
    model = Transformer(architecture_of(CASE)).bfloat16()
    ours = model.layers[1].attn.indexer
    names = {"wq": "q_proj", "wk": "k_proj", "q_norm": "q_norm", "k_norm": "k_norm"}
    with torch.no_grad():
        for name, other in names.items():
            getattr(ours, name).weight.copy_(getattr(theirs, other).weight)
        x_BSD = torch.randn(1, 9, 32).bfloat16()
        ones, zeros = torch.ones(1, 9, 1, 3), torch.zeros(1, 9, 1, 3)  # nothing rotates
        q_BSGd, k_BSd = ours(x_BSD, Context((ones, zeros), AttentionMask("sdpa")))
        want_q = theirs.q_norm(theirs.q_proj(x_BSD).unflatten(-1, (-1, 10)))
        want_k = theirs.k_norm(theirs.k_proj(x_BSD))
    assert q_BSGd.dtype == k_BSd.dtype == torch.bfloat16
    assert torch.equal(q_BSGd, want_q)
    assert torch.equal(k_BSd, want_k)


def test_indexers_have_no_adapters():
    model = Transformer(architecture_of(CASE))
    assert not any(".indexer" in name for name, _ in adaptable(model.layers))
    add_adapters(model.layers, LoraSection(rank=8, targets=("*",)))
    adapted = {name for name, _ in model.named_parameters() if name.endswith("_lora_a")}
    assert not any(".indexer." in name for name in adapted)
    assert any(".attn.wq" in name for name in adapted)
    with pytest.raises(ConfigError, match="matches no module"):
        add_adapters(model.layers, LoraSection(rank=8, targets=("*.indexer.*",)))


@pytest.mark.parametrize("words", [[], ["lora.rank=8", "lora.base_dtype=nf4"]])
def test_indexers_are_frozen_and_never_quantised(words):
    config = Config.load("debug", [*words], environ={})
    _, rules = plan_model(config, architecture_of(CASE), torch.float32)
    own = {name: rule for name, rule in rules.items() if ".indexer." in name}
    assert len(own) == 2 * len(INDEXER)
    assert not any(rule.trainable or rule.quant_format or rule.decay for rule in own.values())
    divided = {name for name, rule in own.items() if rule.style == "colwise"}
    assert divided == {f"layers.{i}.attn.indexer.wq.weight" for i in (1, 2)}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["train.indexer=joint"],
            "train.indexer: 'joint', but .* has no loss for its indexers, .*",
        ),
        (
            ["train.indexer=warmup"],
            "train.indexer: 'warmup', but .* has no loss for .*; use frozen",
        ),
        (
            ["kernels.sparse_attention=sparse"],
            "kernels.sparse_attention: 'sparse', but there is no kernel for .*; use auto",
        ),
        (
            ["kernels.attention=flex"],
            "kernels.attention: 'flex' takes no mask, .* 2048 keys .* auto",
        ),
    ],
)
def test_settings_that_do_not_suit_are_refused_in_one_line(words, problem):
    given = ["model.preset=minimax-m3", "data.source=synthetic", "train.device=cpu", *words]
    config = Config.load(None, [*given, "data.seq_len=2049"], environ={})
    with pytest.raises(ConfigError, match=problem) as caught:
        check_model(config, PRESETS["minimax-m3"])
    assert "\n" not in str(caught.value)


def test_context_parallel_ranks_gather_index_keys():
    arch = architecture_of(CASE)
    for method, want in (("auto", "all_gather"), ("all_gather", "all_gather"), ("ulysses", None)):
        words = [f"parallel.cp_method={method}", "parallel.cp=2"]
        config = Config.load("debug", words, environ={})
        if want is None:
            with pytest.raises(ConfigError, match=r"keys, .*; set parallel.cp_method all_ga"):
                ParallelDims.resolve(config.parallel, 2, arch)
        else:
            assert ParallelDims.resolve(config.parallel, 2, arch).cp_method == want


def test_more_tensor_parallel_ranks_than_key_heads_are_refused():
    config = Config.load("debug", ["parallel.tp=4"], environ={})
    dims = ParallelDims.resolve(config.parallel, 4, PRESETS["minimax-m3"])
    dims.check_model(PRESETS["minimax-m3"])
    with pytest.raises(ConfigError, match=r"parallel.tp: 4 .* num_kv_heads 2; use 2"):
        dims.check_model(architecture_of(CASE, vocab_size=256))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"index_num_heads": 3}, "index_num_heads 3 is not num_kv_heads 2"),
        ({"index_head_dim": 4}, "index_head_dim 4 is less than the 6 elements"),
        ({"index_local_blocks": 3}, "index_local_blocks 3 is more than index_topk_blocks 2"),
    ],
)
def test_impossible_sizes_are_named(change, problem):
    part = architecture_of(CASE).attention(1)
    own = {field.name: getattr(part, field.name) for field in fields(part)}
    with pytest.raises(ValueError, match=problem):
        type(part)(**{**own, **change}).build(KernelsSection(), MoeSection())


def test_products_are_those_of_the_selected_blocks():
    """Counted token by token, up to the half of a key that a causal average leaves out."""
    part = PRESETS["minimax-m3"].attention(3)
    seen = sum(min(15, t // 128) * 128 + t % 128 + 1 for t in range(8192)) / 8192
    matrices = part.num_params() - 4 * 128  # without norms
    want = matrices + 64 * 2 * 128 * (seen - 0.5) + 4 * 128 * 4096
    assert part.products_per_token(8192) == pytest.approx(want)
    assert part.products_per_token(2048) == part.dense.products_per_token(2048)
    assert part.products_per_token(2049) == pytest.approx(
        part.dense.products_per_token(2049) + 5 * 128 * 6144 + 4 * 128 * 2049 / 2, rel=1e-4
    )


def test_the_preset_has_all_elements_and_tensors_of_the_published_files():
    """427,040,140,160 elements in 23,416 tensors, with transformers' tower."""
    arch = PRESETS["minimax-m3"]
    with torch.device("meta"):
        model = Transformer(arch)
        config = transformers.AutoConfig.for_model(
            "minimax_m3_vl", text_config={"num_hidden_layers": 1}, vision_config={}
        )
        theirs = transformers.MiniMaxM3SparseForConditionalGeneration(config)
    tower = {
        name: x.numel()
        for name, x in theirs.state_dict().items()
        if "language_model" not in name and "lm_head" not in name
    }
    biases = sum(buffer.numel() for buffer in model.buffers())
    assert arch.num_params() + biases + sum(tower.values()) == 427_040_140_160
    names = {piece.hf_name for piece in model.pieces()}
    assert len(names) + len(tower) == 23_416
    layer = {n.removeprefix("language_model.model.layers.59.") for n in names if ".59." in n}
    layer -= {n for n in layer if ".experts." in n and ".experts.127." not in n}
    norms = ("input_layernorm", "post_attention_layernorm")
    attention = [f"self_attn.{x}_proj" for x in ("q", "k", "v", "o", "index_q", "index_k")]
    attention += [f"self_attn.{x}_norm" for x in ("q", "k", "index_q", "index_k")]
    moe = ["gate", *(f"experts.127.w{i}" for i in (1, 2, 3))]
    moe += [f"shared_experts.{x}_proj" for x in ("gate", "up", "down")]
    want = {f"{x}.weight" for x in (*norms, *attention, *(f"block_sparse_moe.{x}" for x in moe))}
    assert layer == want | {"block_sparse_moe.e_score_correction_bias"}
    assert FAMILIES["minimax_m3_vl"].hf_class == type(theirs).__name__


WIDE = {
    "hidden_size": 64,
    "head_dim": 64,
    "index_head_dim": 64,
    "index_block_size": 16,
    "max_positions": 256,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_intermediate_size": 64,
}
"""Sizes that kernels of a GPU take."""


@pytest.mark.parametrize("size", [32, 40, 121])
def test_the_estimate_knows_what_a_layer_keeps(size):
    """In bf16, of rows with all of their blocks and of longer ones; compiled norms keep less."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off")
    arch = architecture_of(CASE, **WIDE, num_heads=8)
    part = arch.attention(1)
    module = part.build(KernelsSection(backend="triton"), MoeSection()).bfloat16()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x_BSD = torch.randn(1, size, 64).bfloat16().requires_grad_()
    place_BS = torch.arange(size)[None]
    rotation = RotaryEmbedding(arch.rotation(1))(place_BS)
    seen_BS2 = torch.stack((torch.zeros_like(place_BS), place_BS), dim=-1)
    given = {x.untyped_storage().data_ptr() for x in (x_BSD, *rotation, *module.parameters())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage
        return tensor

    context = Context(rotation, AttentionMask("sdpa"), seen_BS2=seen_BS2)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x_BSD, context)
    share = Workload(size, tp=1, ep=1, width=2, is_compiled=True, seq_len=size)
    found = sum(storage.nbytes() for storage in kept.values())
    assert part.activations(share) == pytest.approx(found, rel=0.01)
    is_longer = size > part.most_keys
    assert (part.activations(replace(share, seq_len=0)) < 0.7 * found) == is_longer


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_block_sparse_attention_on_a_gpu_is_that_of_a_cpu(is_compiled):
    """Logits and every gradient agree in fp32, over documents of more blocks than are selected."""
    arch = architecture_of(CASE, **WIDE)
    positions_BS = torch.cat((torch.arange(50), torch.arange(71))).expand(2, -1)
    found = []
    for device in ("cpu", "cuda"):
        with torch.device(device):
            model = Transformer(arch)
        model.to("cpu").init_weights(std=0.1, seed=0)
        model.to(device)
        if is_compiled and device == "cuda":
            compile_blocks(model)
        logits_BSV = model(tokens(2, 121).to(device), positions_BS.to(device))
        logits_BSV.square().sum().backward()
        own = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        found.append({"logits": logits_BSV.detach().cpu(), **own})
    want, got = found
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert {name: error for name, error in errors.items() if not error < 1e-3} == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_mask_of_each_key_head_on_a_gpu_is_that_of_a_cpu():
    """In bf16, with as many query heads for a key/value head as MiniMax-M3 has."""
    draw = torch.Generator().manual_seed(0)
    shapes = (1, 32, 333, 128), (1, 2, 333, 128), (1, 2, 333, 128)
    inputs = [torch.randn(shape, generator=draw) for shape in shapes]
    visible = (torch.rand(1, 2, 333, 333, generator=draw) < 0.3).tril() | torch.eye(333).bool()
    d_out = torch.randn(shapes[0], generator=draw)
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        own = [x.to(device, dtype).requires_grad_() for x in inputs]
        out = attend_by_groups(*own, visible.to(device), None)
        grads = torch.autograd.grad(out, own, d_out.to(device, dtype))
        found.append([x.detach().cpu().double() for x in (out, *grads)])
    for want, got in zip(*found, strict=True):
        assert relative_error(got, want) < 2e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_generation_on_a_gpu_has_the_log_probabilities_of_training():
    """In bf16, of prompts with fewer and with more blocks than are selected."""
    arch = architecture_of(CASE, **WIDE)
    with torch.device("cuda"):
        model, trained = (Transformer(arch).bfloat16() for _ in range(2))
    model.init_weights(std=0.1, seed=0)
    trained.load_state_dict(model.state_dict())
    generator = Generator(model, num_pages=20, max_sequences=4)
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3)
    prompts = [tuple(tokens(1, n)[0].tolist()) for n in (5, 100)]
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    for prompt, (completion,) in zip(prompts, generator.generate(requests), strict=True):
        read = torch.tensor([[*prompt, *completion.tokens[:-1]]], device="cuda")
        logprobs = trained(read)[0, len(prompt) - 1 :].float().log_softmax(-1)
        chosen = torch.tensor(completion.tokens, device="cuda")[:, None]
        got, want = torch.tensor(completion.logprobs), logprobs.gather(1, chosen)[:, 0].cpu()
        # Another block is selected where two scores nearly tie.
        assert (got - want).abs().median() < 0.02
