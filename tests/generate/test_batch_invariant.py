"""A row's bits do not depend on the batch: attention, products of few rows, sampling."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from moetrain.config import KernelsSection
from moetrain.generate.engine import Generator
from moetrain.generate.request import Request, SamplingParams
from moetrain.kernels import small_m
from moetrain.kernels.attention.attention import AttentionMask, attention_packed
from moetrain.kernels.attention.batch_invariant import (
    BLOCK,
    forward,
    paged_attention,
    step_attention,
    store_in_pages,
)
from moetrain.kernels.attention.sinks import attention_packed_with_sinks
from moetrain.kernels.experts.few_tokens import few_tokens_counters, few_tokens_mlp
from moetrain.kernels.experts.mlp import expert_mlp
from moetrain.kernels.experts.permutation import expert_indices
from moetrain.kernels.experts.products import grouped_mm, router_logits
from moetrain.kernels.experts.router import router_topk
from moetrain.kernels.experts.swiglu import swiglu
from moetrain.kernels.norm import elementwise
from moetrain.kernels.norm.rotary import rotary, rotate_into_pages
from moetrain.kernels.small_m import low_rank_products
from moetrain.kernels.vocabulary.chunk import sample_tokens
from moetrain.kernels.vocabulary.linear_cross_entropy import linear_cross_entropy
from moetrain.models.layers import RMSNorm
from moetrain.models.transformer import Inputs, Transformer
from tests.lib.architectures import put_weights
from tests.lib.invariant_rows import PLACES


def packed(lengths, heads, kv_heads, width, v_width, device, dtype):
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((heads, width), (kv_heads, width), (kv_heads, v_width))
    shapes = [(sum(lengths), *size) for size in sizes]
    q, k, v = (torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes)
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    return q, k, v, ends


def in_pages(lengths, k, v, ends, page_size=BLOCK):
    """Put keys and values into shuffled pages; return the pages' indices too."""
    needed = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).tolist()
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    slots, at = [], 0
    for i, (length, number) in enumerate(zip(lengths, needed, strict=True)):
        table[i, :number] = torch.tensor(order[at : at + number])
        at += number
        position = torch.arange(length)
        slots.append(table[i, position // page_size] * page_size + position % page_size)
    cache = [x.new_zeros(sum(needed), page_size, *x.shape[1:]) for x in (k, v)]
    slots = torch.cat(slots).int().to(k.device)
    slots[3] = -1  # without a slot, so written by hand
    store_in_pages(*cache, k, v, slots)
    page, place = divmod(int(table[0, 3 // page_size]) * page_size + 3 % page_size, page_size)
    assert not cache[0][page, place].any()
    cache[0][page, place], cache[1][page, place] = k[3], v[3]
    return *cache, table.to(k.device)


SHAPES = [
    ((100, 7, 150), 4, 2, 16, 16, None),
    ((90, 1, 64, 65), 6, 2, 24, 24, None),
    ((40, 130, 64, 5), 3, 1, 32, 32, 16),
    ((70,), 8, 1, 16, 16, None),
    ((5, 70, 4), 33, 1, 16, 16, None),  # a tile holds one token's heads
    ((70, 3, 40), 3, 3, 24, 16, None),
    ((40, 30), 4, 2, 16, 40, 16),
    ((66, 5), 2, 2, 192, 128, None),
    ((66, 5), 2, 2, 256, 256, None),
    ((66, 5), 24, 24, 192, 128, None),  # two programs store its keys
    ((66, 5), 8, 1, 512, 512, None),
]


@pytest.mark.tier(
    "quick",
    long=[
        "lengths0-4-2-16-16-None-True-cpu",
        "lengths1-6-2-24-24-None-True-cpu",
        "lengths4-33-1-16-16-None-True-cpu",
        "lengths8-2-2-256-256-None-True-cpu",
        "lengths9-24-24-192-128-None-True-cpu",
        "lengths10-8-1-512-512-None-True-cpu",
    ],
    wide=["lengths9-24-24-192-128-None-False-cpu"],
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "width", "v_width", "window"), SHAPES)
def test_packed_chunked_and_single_tokens_have_one_answer(
    place, has_sinks, lengths, heads, kv_heads, width, v_width, window
):
    dtype = torch.bfloat16 if place == "cuda" else torch.float32
    scale = None if width == v_width else 1.2 * width**-0.5
    q, k, v, ends = packed(lengths, heads, kv_heads, width, v_width, place, dtype)
    sinks = torch.linspace(-4, 6, heads, device=place).to(dtype) if has_sinks else None
    out, lse = forward(q, k, v, ends, window, scale, sinks_H=sinks)
    wide, how = [x.double() for x in (q, k, v)], {"window": window, "scale": scale}
    longest = max(lengths)
    if has_sinks:
        given = (*wide, sinks.double(), ends, longest)
        expected = attention_packed_with_sinks(*given, **how, backend="reference")
    else:
        expected = attention_packed(*wide, ends, longest, **how, backend="reference")
    error = (out.double() - expected).norm() / expected.norm()
    assert error < (6e-3 if place == "cuda" else 2e-6)
    assert lse.isfinite().all()
    # For example, these are one rank's tokens.
    for start, stop in itertools.pairwise((0, 1, len(q) // 3, len(q))):
        mask = AttentionMask("exact", cu_seqlens=ends).part(start, stop, (1, len(q)))
        both = {"cu_seqlens": mask.cu_seqlens, "cu_seqlens_k": mask.cu_seqlens_k}
        given = (q[start:stop].contiguous(), k, v)
        found, _ = forward(*given, window=window, scale=scale, sinks_H=sinks, **both)
        if place == "cuda":
            assert torch.equal(found, out[start:stop])
        else:
            torch.testing.assert_close(found, out[start:stop], rtol=0, atol=2e-6)
    keys, values, table = in_pages(lengths, k, v, ends)
    for most in (1, 37, 10**6):  # tokens of each sequence that are read now
        now = [min(n, most) for n in lengths]
        read = torch.cat(
            [torch.arange(e - n, e) for n, e in zip(now, ends[1:].tolist(), strict=True)]
        ).to(place)
        starts = torch.tensor([0, *itertools.accumulate(now)], dtype=torch.int32, device=place)
        seen = torch.tensor(lengths, dtype=torch.int32, device=place) - starts.diff()
        # This is a view, like the products of few rows.
        beside = torch.cat((q[read], q[read]), 1)[:, : q.shape[1]]
        for one_token in {False, most == 1}:
            found = paged_attention(
                beside, keys, values, starts, seen, table, **how, one_token=one_token,
                sinks_H=sinks,
            )  # fmt: skip
            if place == "cuda":
                assert torch.equal(found, out[read]), (most, one_token)
            else:  # numpy's products have other bits for other shapes
                torch.testing.assert_close(found, out[read], rtol=0, atol=2e-6)
    last = (ends[1:] - 1).long()
    seen = torch.tensor(lengths, dtype=torch.int32, device=place) - 1
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=place)
    beside = torch.cat((q[last], q[last]), 1)[:, : q.shape[1]]
    given = beside, keys, values, starts, seen, table
    zeros = torch.zeros(len(lengths) * kv_heads, dtype=torch.int32, device=place)
    alone = {"one_token": True, "sinks_H": sinks, "arrived": zeros}  # few tokens, so keys are split
    found = paged_attention(*given, **how, **alone)
    assert zeros.any() == (place == "cuda" and len(zeros) <= 32 and heads <= 16 * kv_heads)
    if place == "cuda":
        assert torch.equal(found, out[last])
    else:
        torch.testing.assert_close(found, out[last], rtol=0, atol=2e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("sizes", [(5, 10, 3, 32, 24), (2, 32, 4, 128, 128), (1, 16, 1, 256, 256)])
def test_rotating_into_pages_is_rotating_and_storing(place, interleaved, has_norms, sizes):
    dtype, (T, H, G, d, v_width) = torch.bfloat16, sizes
    generator = torch.Generator(place).manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=place).to(dtype)

    parts = draw(T, (H + G) * d + G * v_width).split([H * d, G * d, G * v_width], 1)
    q, k, v = (x.unflatten(1, (-1, n)) for x, n in zip(parts, (d, d, v_width), strict=True))
    cos, sin = torch.rand(2, T, d // 2 - 2, generator=generator, device=place)
    slots = torch.tensor([5, -1, 70, 1, 99][:T], dtype=torch.int32, device=place)
    caches = [
        [torch.zeros(2, BLOCK, G, n, device=place, dtype=dtype) for n in (d, v_width)]
        for _ in range(2)
    ]
    norms = [RMSNorm(d, 1e-6).to(place, dtype) if has_norms else None for _ in range(2)]
    weights = [None] * 2
    for i, norm in enumerate(norms):
        if norm is not None:
            weights[i] = norm.weight.data = draw(d)
    how = {"interleaved": interleaved}
    turned = [
        rotary(x, cos, sin, w, 1e-6, "triton", **how) for x, w in zip((q, k), weights, strict=True)
    ]
    zeros = store_in_pages(*caches[0], turned[1], v, slots)
    found, arrived = rotate_into_pages(q, k, v, caches[1], slots, cos, sin, *norms, interleaved)
    assert torch.equal(found, turned[0])
    assert torch.equal(torch.stack((zeros, arrived)), zeros.new_zeros(2, T * G))
    for one, other in zip(*caches, strict=True):
        assert one.any()
        assert torch.equal(one, other)


@pytest.mark.tier("quick", long=["2-1120-cpu"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("tokens", "inner"), [(1, 768), (2, 1120), (5, 96), (16, 96)])
def test_experts_of_few_tokens_are_those_of_many(place, tokens, inner):
    dtype = torch.bfloat16 if place == "cuda" else torch.float32
    generator = torch.Generator(place).manual_seed(tokens)
    E, K, D, F = (64, 8, 256, inner) if place == "cuda" else (6, 3, 64, inner)

    def draw(*shape):
        x = torch.randn(shape, generator=generator, device=place) * shape[-1] ** -0.5
        return x.to(dtype)

    many = 500 if place == "cuda" else tokens
    x, scores = draw(many, D), torch.rand(many, E, generator=generator, device=place)
    gate_up, down = draw(E, 2 * F, D), draw(E, D, F)
    weights, ids = scores.topk(K)
    ids = ids.int()
    if tokens > 2:
        ids[1], ids[2] = -1, ids[0]  # a pad, and a token with the same experts
    expected = expert_mlp(x, weights, expert_indices(ids, E), gate_up, down)
    counters = few_tokens_counters(down, K)
    for _ in range(2):  # counters are zero again
        found = few_tokens_mlp(x[:tokens], ids[:tokens], weights[:tokens], gate_up, down, counters)
        assert not counters.any()
    if place == "cuda":
        with torch.no_grad():
            some = expert_indices(ids[:tokens], E)
            few = expert_mlp(x[:tokens], weights[:tokens], some, gate_up, down)
        assert torch.equal(found, few)
        assert torch.equal(found, expected[:tokens])
    else:
        torch.testing.assert_close(found, expected[:tokens])


@pytest.mark.parametrize("place", PLACES)
def test_a_step_of_nothing_gives_nothing(place):  # of a rank that only serves the experts of others
    none = torch.zeros(0, dtype=torch.int32, device=place)
    ends = torch.zeros(1, dtype=torch.int32, device=place)
    q, k = (torch.zeros(0, n, 16, device=place) for n in (4, 2))
    cache = (torch.zeros(2, BLOCK, 2, 16, device=place),) * 2
    rows = ends, none, none[:, None], 0, none
    assert step_attention(q, *cache, *rows, window=None).shape == q.shape
    store_in_pages(*cache, k, k, none)


@pytest.mark.parametrize("place", PLACES)
def test_few_rows_are_those_of_many(place):
    dtype = torch.bfloat16 if place == "cuda" else torch.float32
    generator = torch.Generator(place).manual_seed(0)

    def draw(*shape):
        x = torch.randn(shape, generator=generator, device=place) * shape[-1] ** -0.5
        return x.to(dtype)

    many, sizes = (4096, [2048, 512]) if place == "cuda" else (40, [64, 32])
    x, weights = draw(many, 160), [draw(n, 160) for n in sizes]
    expected = [x @ w.T for w in weights]
    for rows in (0, 1, 5, 16, 17, 33, 128):
        for found, want in zip(small_m.linears(x[:rows], weights), expected, strict=True):
            if place == "cuda":
                assert torch.equal(found, want[:rows])
            else:
                torch.testing.assert_close(found, want[:rows])
    biases = [draw(n) * n**0.5 for n in sizes]
    wanted = [torch.nn.functional.linear(x, *pair) for pair in zip(weights, biases, strict=True)]
    for given in ((biases[0], None), (None, biases[1]), biases):
        every = [w if b is not None else y for w, b, y in zip(wanted, given, expected, strict=True)]
        for rows in (1, 33, 128):
            found = small_m.linears(x[:rows], weights, given)
            for one, want in zip(found, every, strict=True):
                if place == "cuda":
                    assert torch.equal(one, want[:rows])
                else:
                    torch.testing.assert_close(one, want[:rows])
    narrow, rows = [draw(n, 160) for n in (16, 32, 16)], (many, many - 1, 1000, 129, 7)
    wanted = low_rank_products(x, narrow)
    for n in rows if place == "cuda" else rows[-1:]:  # cuBLAS would have other bits
        for found, want in zip(low_rank_products(x[:n], narrow), wanted, strict=True):
            assert torch.equal(found, want[:n])
    for rows in (1, 5):  # a router of 8 experts, whose product is padded to 16
        logits = small_m.wide_product(x[:rows], draw(8, 160))
        assert logits.stride() == (8, 1)
    counts = [3, 0, 70, 1]
    ends = torch.tensor(counts, device=place).cumsum(0).int()
    x, w = draw(sum(counts) + 2, 64), torch.rand(sum(counts) + 2, device=place)
    gate_up, down = draw(4, 2 * 96, 64), draw(4, 64, 96)
    h = swiglu(grouped_mm(x, gate_up.transpose(1, 2), ends), w, "triton")
    expected = grouped_mm(h, down.transpose(1, 2), ends)
    for typical in (1, 60, 1000):  # decides the tile sizes
        found = small_m.expert_mlp(x, ends, gate_up, down, w, typical)[:-2]
        if place == "cuda":
            assert torch.equal(found, expected[:-2])
        else:
            torch.testing.assert_close(found, expected[:-2])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (32, 3), (60, 4), (128, 8), (512, 10)])
def test_routes_of_few_tokens_are_those_of_many(place, score, experts, k):
    generator = torch.Generator(place).manual_seed(0)
    rows, padded = 4096 if place == "cuda" else 40, -experts % 16 + experts
    logits = torch.randn(rows, padded, generator=generator, device=place)[:, :experts].contiguous()
    groups = (1, 1) if score == "softmax" else (4, 2) if experts == 60 else (8, 4)
    how = {"score": score, "num_groups": groups[0], "topk_groups": groups[1], "backend": "triton"}
    expected = router_topk(logits, k, **how)
    for tokens in (1, 2, 5, 16):
        found = router_topk(logits[:tokens], k, **how)  # one program, whose sums are the final sums
        assert torch.equal(found.ids_TK, expected.ids_TK[:tokens])
        assert torch.equal(found.weights_TK, expected.weights_TK[:tokens])
        plain = router_topk(logits[:tokens], k, **how | {"backend": "reference"})
        for one, other in zip(found[2:], plain[2:], strict=True):
            torch.testing.assert_close(one, other)
    # A row of padded logits counts as contiguous, whatever its stride.
    wide = torch.nn.functional.pad(logits, (0, padded - experts))
    for row in range(100 if place == "cuda" else 5):
        found = router_topk(wide[row : row + 1, :experts], k, **how)
        assert torch.equal(found.ids_TK[0], expected.ids_TK[row])
        assert torch.equal(found.weights_TK[0], expected.weights_TK[row])


@pytest.mark.tier("quick", long=["0.0-cpu", "2.0-cpu"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_choice_is_the_plain_one_with_the_loss_of_training(place, softcap):
    dtype = torch.bfloat16 if place == "cuda" else torch.float32
    generator = torch.Generator(place).manual_seed(0)
    h = torch.randn(70, 32, generator=generator, device=place).to(dtype)
    w = torch.randn(300, 32, generator=generator, device=place).to(dtype) / 2
    keys = torch.arange(70, device=place, dtype=torch.int32) * 7919 - 2**20
    inverse = torch.tensor([0.0, 1.0, 0.5, 3.0, 0.0, 1.0, 1.0], device=place).repeat(10)
    temperatures = (0.7, 1.0, 1.9)  # of the log-probabilities, one per row
    turn = torch.arange(70, device=place) % 3
    scales = torch.tensor([1 / t for t in temperatures], device=place)[turn]
    for known in (300, 250):
        tokens, logprobs = sample_tokens(h, w, keys, inverse, scales, known, "triton", softcap)
        plain = (h.float(), w.float(), keys, inverse, scales, known)
        wanted, plain_logprobs = sample_tokens(*plain, "reference", softcap)
        assert torch.equal(tokens, wanted)
        assert (tokens < known).all()
        for i, temperature in enumerate(temperatures):
            rows = turn == i
            how = {"temperature": temperature, "softcap": softcap}
            losses = linear_cross_entropy(h, w, tokens, **how, backend="triton").loss_T
            assert torch.equal(logprobs[rows], -losses[rows])
            losses = linear_cross_entropy(*plain[:2], tokens, **how, backend="reference").loss_T
            assert torch.equal(plain_logprobs[rows], -losses[rows])
        for backend in ("triton", "reference"):
            tokens, logprobs = sample_tokens(
                h * torch.nan, w, keys, inverse, scales, known, backend, softcap
            )
            assert not tokens.any()  # an existing token
            assert logprobs.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "dim"),
    [(256, 4096), (640, 4096), (2048, 11264), (32, 2880), (256, 7168), (1, 2048), (24, 2048)],
)
def test_no_sum_is_split_however_few_rows_there_are(width, dim):
    """At these inner widths the library splits the sums of few rows."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda") * shape[-1] ** -0.5

    x_TD, w_ND = draw(16_896, dim).bfloat16(), draw(width, dim)
    w, bias_N = w_ND.bfloat16(), draw(width).bfloat16()
    wanted = [small_m.invariant_linear(x_TD, w, b) for b in (None, bias_N)]
    if width > 64:  # then the library computes many rows
        assert torch.equal(wanted[0], torch.nn.functional.linear(x_TD, w))
    logits = [router_logits(x_TD, w_ND, wide=wide) for wide in (False, True)]
    for rows in (1, 3, 64, 129, 200, 320, 513, 1000, 2048, 4000):
        x = x_TD[:rows].clone()
        for bias, want in zip((None, bias_N), wanted, strict=True):
            assert torch.equal(small_m.invariant_linear(x, w, bias), want[:rows]), rows
        for wide, want in zip((False, True), logits, strict=True) if width > 1 else ():
            assert torch.equal(router_logits(x, w_ND, wide=wide), want[:rows]), rows


@pytest.mark.parametrize("name", ["sigmoid", "softplus", "exp"])
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_elementwise_op_has_the_bits_of_torch_in_every_graph(place, name):
    op = partial(getattr(elementwise, name), fusible=False)
    apart = getattr(elementwise, f"{name}_op")
    plain = getattr(torch.nn.functional, name, None) or getattr(torch, name)
    x = torch.linspace(-30, 30, 999, device=place)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(op(x.to(dtype)), plain(x.to(dtype)))
    wide = torch.linspace(-3, 25, 9, dtype=torch.float64, device=place).requires_grad_()
    torch.library.opcheck(apart, (wide,))
    found, want = (torch.autograd.grad(f(wide).sum(), wide)[0] for f in (op, plain))
    torch.testing.assert_close(found, want)
    if place == "cuda":
        compiled = torch.compile(lambda x: op(x * 2) + 1, fullgraph=True)
        assert torch.equal(compiled(x), plain(x * 2) + 1)


GENERATING = (
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "moonlight-16b-a3b",
    "glm-4.7-flash",
    "qwen3.6-35b-a3b",
)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("preset", "experts"), [*((preset, 16) for preset in GENERATING), ("qwen3-30b-a3b", 12)]
)
def test_generation_has_the_bits_of_the_compiled_forward(preset, experts):
    from moetrain.models.families import PRESETS
    from moetrain.models.transformer import compile_blocks

    sizes = {"num_layers": 3, "hidden_size": 256, "head_dim": 64, "num_experts": experts}
    sizes |= {"moe_intermediate_size": 128, "vocab_size": 3000}
    if preset == "gpt-oss-20b":
        sizes["sliding_windows"] = (40, None, 40)
    elif preset in ("moonlight-16b-a3b", "glm-4.7-flash"):
        del sizes["head_dim"]
    elif preset == "qwen3.6-35b-a3b":
        sizes["num_layers"] = 4  # its last layer has attention
    arch = PRESETS[preset].model_copy(update=sizes)
    kernels = KernelsSection(attention="exact")
    with torch.device("meta"):
        models = [Transformer(arch, kernels=kernels) for _ in range(2)]
    models[0].to(torch.bfloat16).to_empty(device="cuda")
    models[0].init_weights(std=0.05, seed=0)
    with torch.no_grad():
        for name, parameter in models[0].named_parameters():
            if name.endswith(("bias", "b_gate_up", "b_down", "sinks")):
                parameter.normal_()
    models[1].load_state_dict(models[0].state_dict(), assign=True)
    models[1].compute_dtype = torch.bfloat16
    compile_blocks(models[1])
    generator = Generator(models[0], num_pages=30, max_sequences=20, max_tokens=150)
    draw = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, 3000, (int(n),), generator=draw).tolist()
        for n in torch.randint(1, 200, (40,), generator=draw)
    ]
    params = [SamplingParams(max_tokens=60, seed=i, temperature=i % 3 / 2) for i in range(40)]
    params[-1] = replace(params[-1], max_tokens=200)  # it is alone in the end
    requests = [Request(str(i), tuple(prompts[i]), params[i]) for i in range(40)]
    found = [completions[0] for completions in generator.generate(requests)]
    assert generator.scheduler.figures["generator/read_again"]  # some sequences were preempted
    texts = [[*prompt, *c.tokens] for prompt, c in zip(prompts, found, strict=True)]
    tokens = torch.tensor(list(itertools.chain(*texts)), device="cuda")
    lengths = [len(text) for text in texts]
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    few = int(ends[3])  # tokens of the first texts, which are then trained on alone
    with torch.no_grad():
        hidden, _ = models[1].backbone(Inputs(tokens[None], positions[None], cu_seqlens=ends))
        alone, _ = models[1].backbone(
            Inputs(tokens[None, :few], positions[None, :few], cu_seqlens=ends[:4])
        )
        assert torch.equal(alone, hidden[:, :few])
        losses = linear_cross_entropy(hidden[0], models[1].head_weight, tokens.roll(-1)).loss_T
    for prompt, completion, start in zip(prompts, found, ends.tolist(), strict=False):
        first = start + len(prompt) - 1
        expected = -losses[first : first + len(completion.tokens)].cpu()
        assert torch.equal(torch.tensor(completion.logprobs), expected)


@pytest.mark.alone
@pytest.mark.gpu
def test_sleeping_gives_the_cache_back_and_waking_goes_on():
    from moetrain.models.families import PRESETS

    arch = PRESETS["debug"]
    with torch.device("meta"):
        model = Transformer(arch).to(torch.bfloat16)
    model.to_empty(device="cuda")
    model.init_weights(std=0.05, seed=0)
    pages = 2**30 // (64 * 2 * 2 * model.layers[0].attn.wk.weight.shape[0])
    generator = Generator(model, num_pages=pages)
    request = Request("a", (1, 2, 3), SamplingParams(max_tokens=20))
    before = generator.generate([request])[0][0]
    cache = sum(2 * c.keys_PZGd.nbytes for c in generator.steps.caches)
    free = torch.cuda.mem_get_info()[0]
    generator.sleep()
    assert torch.cuda.mem_get_info()[0] - free > 0.95 * cache
    generator.wake()
    after = generator.generate([request])[0][0]
    assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    weights = [(name, tensor.detach().clone()) for name, tensor in tensors]
    generator.sleep()
    there = torch.cuda.memory_allocated()
    generator.sleep(weights=True)
    own = sum(parameter.numel() for parameter in model.parameters()) * 2
    assert there - torch.cuda.memory_allocated() >= own
    generator.wake()
    put_weights(generator, weights)
    after = generator.generate([request])[0][0]
    assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)
