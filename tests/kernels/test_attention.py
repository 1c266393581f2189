"""The model's attention: every backend sees the same documents, and none recompiles for them.

cuDNN's path runs on a CPU here through its op's plain formulas; the ``gpu`` test runs cuDNN itself.
"""

import itertools

import pytest
import torch
from torch.nn import functional as F

from moetrain.kernels.attention import cudnn as cudnn_attention
from moetrain.kernels.attention.attention import AttentionMask, attention, block_sizes
from moetrain.kernels.attention.sinks import attention_with_sinks

BATCH, SEQ_LEN, HEADS, KV_HEADS, WIDTH = 2, 48, 4, 2, 16
CPU = torch.device("cpu")


@pytest.fixture
def op_on_cpu(monkeypatch):
    monkeypatch.setattr(cudnn_attention, "require", lambda *_: None)


def packed(*cuts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and document ends of two rows cut at ``cuts``."""
    ends = sorted({0, *cuts, SEQ_LEN, BATCH * SEQ_LEN})
    positions = [torch.arange(j - i) for i, j in itertools.pairwise(ends)]
    return torch.cat(positions).view(BATCH, SEQ_LEN), torch.tensor(ends, dtype=torch.int32)


def qkv(device=CPU, dtype=torch.float32, v_width=WIDTH):
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, v_width))
    shapes = [(BATCH, SEQ_LEN, *size) for size in sizes]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [x.requires_grad_() for x in tensors]


def run(mask, device=CPU, dtype=torch.float32, v_width=WIDTH, scale=None):
    inputs = qkv(device, dtype, v_width)
    out = attention(*inputs, mask, scale)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


WIDTHS = [{}, {"v_width": 24, "scale": 0.4}, {"v_width": 8}]


@pytest.mark.parametrize("widths", WIDTHS, ids=lambda x: "-".join(map(str, x.values())))
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("rows", ["packed", "whole"])
@pytest.mark.parametrize("backend", ["sdpa", "cudnn"])
def test_backends_agree(op_on_cpu, backend, rows, window, widths):
    positions_BS, ends = packed(1, 20, 50, 90) if rows == "packed" else (None, None)
    sizes = {"batch": BATCH, "seq_len": SEQ_LEN, "device": CPU, "window": window}
    mask = AttentionMask.of(positions_BS, backend=backend, cu_seqlens=ends, **sizes)
    expected = run(AttentionMask.of(positions_BS, backend="reference", **sizes), **widths)
    for ours, theirs in zip(run(mask, **widths), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("rows", ["packed", "whole"])
@pytest.mark.parametrize("backend", ["auto", "cudnn", "exact", "flex"])
def test_sinks_are_a_part_of_every_backends_softmax(op_on_cpu, backend, rows, window):
    positions_BS, ends = packed(1, 20, 50, 90) if rows == "packed" else (None, None)
    sizes = {"batch": BATCH, "seq_len": SEQ_LEN, "device": CPU, "window": window}
    mask = AttentionMask.of(positions_BS, backend=backend, cu_seqlens=ends, needs_lse=True, **sizes)
    assert mask.backend == ("reference" if backend == "auto" else backend)
    results = []
    for run_with in (by_hand, attention_with_sinks):
        seen = AttentionMask.of(positions_BS, backend="reference", **sizes)
        inputs = [*qkv(), torch.linspace(-3, 4, HEADS).requires_grad_()]
        if backend == "flex":  # it has no backward on a CPU
            inputs = [x.detach() for x in inputs]
        out = run_with(*inputs[:3], seen if run_with is by_hand else mask, inputs[3])
        results.append([out])
        if backend != "flex":
            results[-1] += torch.autograd.grad(out.square().sum(), inputs)
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


PARTS = (0, 1, 20, 25, 57, 70, BATCH * SEQ_LEN)
"""Cuts of the tokens: within documents, between them, after one token, and across rows."""


def run_parts(mask, inputs, sinks=(), *, before=None, differentiates=True):
    """Return attention part by part and its gradients; keys are all tokens or a window's."""
    q, k, v = (x.flatten(0, 1)[None] for x in inputs)
    run_with = attention_with_sinks if sinks else attention
    found = []
    for i, j in itertools.pairwise(PARTS):
        part, (keys, values) = mask.part(i, j, (BATCH, SEQ_LEN), before), (k, v)
        if before is not None:
            keys, values = (F.pad(x, (0, 0, 0, 0, before, 0))[:, i : before + j] for x in (k, v))
        found.append(run_with(q[:, i:j], keys, values, part, *sinks))
    out = torch.cat(found, 1).view(BATCH, SEQ_LEN, HEADS, -1)
    if not differentiates:
        return [out]
    return [out, *torch.autograd.grad(out.square().sum(), [*inputs, *sinks])]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("rows", ["packed", "whole"])
@pytest.mark.parametrize("backend", ["auto", "cudnn", "exact", "flex"])
def test_parts_of_the_tokens_see_what_they_see_in_the_whole(
    op_on_cpu, backend, rows, window, has_sinks
):
    positions_BS, ends = packed(1, 20, 50, 90) if rows == "packed" else (None, None)
    sizes = {"batch": BATCH, "seq_len": SEQ_LEN, "device": CPU, "window": window}
    how = {"cu_seqlens": ends, "needs_lse": has_sinks}
    mask = AttentionMask.of(positions_BS, backend=backend, is_cut=True, **how, **sizes)
    whole = AttentionMask.of(positions_BS, backend="reference", **how, **sizes)
    inputs = qkv(v_width=24)
    sinks = (torch.linspace(-3, 4, HEADS).requires_grad_(),) * has_sinks
    out = (attention_with_sinks if has_sinks else attention)(*inputs, whole, *sinks)
    expected = [out, *torch.autograd.grad(out.square().sum(), [*inputs, *sinks])]
    if backend == "flex":  # it has no backward on a CPU
        inputs = [x.detach() for x in inputs]
        sinks = tuple(x.detach() for x in sinks)
    for before in {None, None if window is None else window - 1}:
        how = {"before": before, "differentiates": backend != "flex"}
        found = run_parts(mask, inputs, sinks, **how)
        for ours, theirs in zip(found, expected, strict=backend != "flex"):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("backend", ["auto", "exact", "flex"])
def test_parts_on_a_gpu_match_the_reference(backend, window, has_sinks):
    device, dtype = torch.device("cuda"), torch.bfloat16
    positions_BS, ends = (x.to(device) for x in packed(1, 20, 50, 90))
    sizes = {"batch": BATCH, "seq_len": SEQ_LEN, "device": device, "window": window}
    how = {"cu_seqlens": ends, "dtype": dtype, "needs_lse": has_sinks, "is_cut": True}
    results = []
    for name, wide in ((backend, dtype), ("reference", torch.float32)):
        mask = AttentionMask.of(positions_BS, backend=name, **how, **sizes)
        sinks = (torch.linspace(-3, 4, HEADS, device=device).requires_grad_(),) * has_sinks
        before = None if window is None else window - 1
        results.append(run_parts(mask, qkv(device, wide), sinks, before=before))
    for ours, theirs in zip(*results, strict=True):
        assert (ours.float() - theirs).norm() <= 2e-2 * theirs.norm()


def by_hand(q_BSHd, k_BSGd, v_BSGd, mask, sinks_H):
    """Compute attention in which the sink is an extra key with value 0."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k_BSGd, v_BSGd))
    scores = torch.einsum("bqhd,bkhd->bhqk", q_BSHd, k) * WIDTH**-0.5
    scores = scores.masked_fill(~mask.dense_BSS, float("-inf"))
    sinks = sinks_H[:, None, None].expand(BATCH, HEADS, SEQ_LEN, 1)
    weights = torch.cat((sinks, scores), -1).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    none_and_v = torch.cat((torch.zeros_like(v[:, :1]), v), 1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, none_and_v)


def test_sdpa_cannot_have_sinks():
    with pytest.raises(ValueError, match="no log-sum-exp, which sinks need; choose another"):
        AttentionMask.of(None, batch=1, seq_len=4, device=CPU, backend="sdpa", needs_lse=True)


def test_the_number_of_documents_does_not_recompile(op_on_cpu):
    compiles = []
    compiled = torch.compile(
        attention, fullgraph=True, backend=lambda graph, _: compiles.append(1) or graph
    )
    for num_cuts in (1, 20, 40):
        positions_BS, ends = packed(*range(1, 1 + num_cuts))
        mask = AttentionMask.of(
            positions_BS,
            batch=BATCH,
            seq_len=SEQ_LEN,
            device=CPU,
            backend="cudnn",
            cu_seqlens=ends,
        )
        compiled(*qkv(), mask)
    assert len(compiles) == 1


def test_cudnn_by_name_says_what_is_missing(monkeypatch):
    positions_BS, _ = packed(7)
    with pytest.raises(ValueError, match="without cu_seqlens"):
        AttentionMask.of(positions_BS, batch=2, seq_len=SEQ_LEN, device=CPU, backend="cudnn")
    with pytest.raises(ValueError, match=r"float32 on cpu; it takes bf16 or fp16 on CUDA"):
        cudnn_attention.require(CPU, torch.float32, 64)
    with pytest.raises(ValueError, match="head width 264; it takes multiples of 8 to 256"):
        cudnn_attention.require(torch.device("cuda"), torch.bfloat16, 192, 264)
    with pytest.raises(ValueError, match="head width 20; it takes multiples of 8 to 256"):
        cudnn_attention.require(torch.device("cuda"), torch.bfloat16, 20)
    monkeypatch.setattr(cudnn_attention, "_INSTALLED", None)
    with pytest.raises(ValueError, match=r"pip install .moetrain\[gpu\]"):
        cudnn_attention.require(torch.device("cuda"), torch.bfloat16, 64)


@pytest.mark.parametrize(
    ("version", "serves"), [("1.9.0", False), ("1.27.0", False), ("1.28.0", True), ("1.30", True)]
)
def test_versions_whose_gradients_are_wrong_are_not_used(version, serves, monkeypatch, caplog):
    monkeypatch.setattr(cudnn_attention, "_INSTALLED", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cudnn_attention._warn_of_age.cache_clear()
    cuda = torch.device("cuda")
    assert cudnn_attention.runs(cuda, torch.bfloat16) is serves
    assert ("gradients are wrong" in caplog.text) is not serves
    if not serves:
        with pytest.raises(ValueError, match=rf"1\.28 or later, .* {version} are wrong"):
            cudnn_attention.require(cuda, torch.bfloat16, 64)


@pytest.mark.parametrize("ends", [[0, 5, 5, 9], [0, 257], list(range(17))])
def test_document_layout_pads_with_empty_documents(ends):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    padded = torch.tensor(ends + ends[-1:] * (17 - len(ends)), device=device)
    for cu_seqlens_k, padded_k in ((None, padded), (3 * cu_seqlens + 5, 3 * padded + 5)):
        elements = cudnn_attention.TokenElements(q=2**31, k=24, v=7, o=2**33)
        layout = cudnn_attention.document_layout(cu_seqlens, cu_seqlens_k, 16, elements)
        assert torch.equal(layout["lengths"], padded.diff().int())
        assert torch.equal(layout["k_lengths"], padded_k.diff().int())
        for name, elements in {"q": 2**31, "k": 24, "v": 7, "o": 2**33, "lse": 1}.items():
            begins = padded_k if name in "kv" else padded
            assert torch.equal(layout[f"{name}_offsets"], begins * elements)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("backend", ["auto", "exact", "flex"])
def test_sinks_on_a_gpu_match_the_reference(backend, window):
    device, dtype = torch.device("cuda"), torch.bfloat16
    positions_BS, ends = (x.to(device) for x in packed(1, 20, 50, 90))
    sizes = {"batch": BATCH, "seq_len": SEQ_LEN, "device": device, "window": window}
    how = {"cu_seqlens": ends, "dtype": dtype, "needs_lse": True}
    results = []
    for name, wide in ((backend, dtype), ("reference", torch.float32)):
        mask = AttentionMask.of(positions_BS, backend=name, **how, **sizes)
        inputs = [*qkv(device, wide), torch.linspace(-3, 4, HEADS, device=device).requires_grad_()]
        out = attention_with_sinks(*inputs[:3], mask, inputs[3])
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours.float() - theirs).norm() <= 2e-2 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("widths", WIDTHS, ids=lambda x: "-".join(map(str, x.values())))
@pytest.mark.parametrize("window", [None, 5])
def test_auto_on_a_gpu_matches_the_reference(window, widths):
    device, dtype = torch.device("cuda"), torch.bfloat16
    positions_BS, ends = (x.to(device) for x in packed(1, 20, 50, 90))
    sizes = {"batch": BATCH, "seq_len": SEQ_LEN, "device": device, "window": window}
    mask = AttentionMask.of(positions_BS, cu_seqlens=ends, dtype=dtype, **sizes)
    expected = AttentionMask.of(positions_BS, backend="reference", **sizes)
    expected = run(expected, device, **widths)
    assert mask.backend == ("cudnn" if cudnn_attention.runs(device, dtype) else "flex")
    for ours, theirs in zip(run(mask, device, dtype, **widths), expected, strict=True):
        assert (ours.float() - theirs).norm() <= 1e-2 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [5, 97, 127])
def test_short_rows_by_flex_on_a_gpu_match_sdpa(tokens):
    """torch's kernel for decoding has no block size for 8 x 97 queries of a key/value head."""
    shapes = (2, 16, tokens, 64), (2, 2, tokens, 64), (2, 2, tokens, 64)
    q, k, v = (torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes)
    positions_BS = torch.arange(tokens, device="cuda").expand(2, -1)
    sizes = {"batch": 2, "seq_len": tokens, "device": torch.device("cuda"), "window": None}
    found = []
    for backend in ("flex", "sdpa"):
        mask = AttentionMask.of(positions_BS, backend=backend, **sizes)
        out = attention(*(x.transpose(1, 2) for x in (q, k, v)), mask)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 5e-3 * theirs.norm()


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 512), (torch.float32, 192)])
def test_blocks_of_wide_heads_fit_the_shared_memory_of_a_gpu(dtype, width):
    """Triton keeps one operand whole, and as many tiles of the other two as there are stages."""
    sizes, row = block_sizes(dtype, width), dtype.itemsize * 2 * width
    hopper = 227 * 1024
    forward = row // 2 * sizes["fwd_BLOCK_M"]
    forward += row * sizes["fwd_BLOCK_N"] * sizes["fwd_num_stages"]
    assert forward <= hopper
    if "bwd_num_stages" in sizes:
        stages = sizes["bwd_num_stages"]
        assert row * (sizes["bwd_BLOCK_N1"] + stages * sizes["bwd_BLOCK_M1"]) <= hopper
        assert row * (sizes["bwd_BLOCK_M2"] + stages * sizes["bwd_BLOCK_N2"]) <= hopper


@pytest.mark.parametrize("width", [64, 128, 256])
def test_torch_chooses_the_blocks_of_usual_heads(width):
    assert block_sizes(torch.bfloat16, width) == {}
    assert block_sizes(torch.float32, width) == {}
