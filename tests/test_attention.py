"""The model's attention: every backend sees the same documents, and none recompiles for them.

cuDNN's path runs on a CPU here through its op's plain formulas; the ``gpu`` test runs cuDNN itself.
"""

import itertools

import pytest
import torch

from moetrain.kernels.attention import cudnn as cudnn_attention
from moetrain.kernels.attention.attention import AttentionMask, attention

BATCH, SEQ_LEN, HEADS, KV_HEADS, WIDTH = 2, 48, 4, 2, 16
CPU = torch.device("cpu")


@pytest.fixture
def op_on_cpu(monkeypatch):
    monkeypatch.setattr(cudnn_attention, "require", lambda *_: None)


def packed(*cuts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and document ends of two rows cut at ``cuts``."""
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
    with pytest.raises(ValueError, match=r"pip install moetrain\[gpu\]"):
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
        with pytest.raises(ValueError, match=rf"{version}.*1\.28 or later"):
            cudnn_attention.require(cuda, torch.bfloat16, 64)


@pytest.mark.parametrize("ends", [[0, 5, 5, 9], [0, 257], list(range(17))])
def test_document_layout_pads_with_empty_documents(ends):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    layout = cudnn_attention._document_layout(cu_seqlens, 16, 2**31, 24, 7, 2**33)
    padded = torch.tensor(ends + ends[-1:] * (17 - len(ends)), device=device)
    assert torch.equal(layout["lengths"], padded.diff().int())
    for name, elements in {"q": 2**31, "k": 24, "v": 7, "o": 2**33, "lse": 1}.items():
        assert torch.equal(layout[f"{name}_offsets"], padded * elements)


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
