"""Grouped products of e4m3 for Hopper: Gluon code in threads, and kernels beside others."""

import numpy as np
import pytest
import torch

from moetrain.kernels.experts import grouped_frame as frame
from moetrain.kernels.quant import grouped_e4m3
from moetrain.kernels.quant.blocks import QuantisedBlocks, blocks_mm, quantise_blocks
from moetrain.kernels.quant.e4m3 import Quantised, quantise_rows
from moetrain.kernels.quant.products import scaled_grouped_mm
from tests.lib import gluon_threads as threads
from tests.lib.grouped_cases import ENDS, GROUPS, ROWS, SIZES, TAIL, UNWRITTEN, in_threads  # noqa: F401

DEPTH, WIDTH = 384, 512


@pytest.fixture
def narrow_in_threads(in_threads, monkeypatch):  # noqa: F811
    """Make the partitions of this kernel plain functions, too."""
    monkeypatch.setattr(grouped_e4m3, "_multiply", grouped_e4m3._multiply.fn)
    monkeypatch.setattr(grouped_e4m3, "_PIECE", 128)
    monkeypatch.setattr(grouped_e4m3, "gl", threads.GL)
    monkeypatch.setattr(grouped_e4m3, "hopper", threads.HOPPER)


def operands(tiled, sizes=SIZES, device="cpu"):
    """Return matrices, and rows with a tail outside all groups whose codes are NaN."""
    generator = torch.Generator(device).manual_seed(0)
    rows = sum(sizes)
    a_RK = torch.randn(rows + TAIL, DEPTH, generator=generator, device=device)
    a_RK *= torch.logspace(-2, 2, rows + TAIL, device=device)[:, None]
    b_ENK = torch.randn(len(sizes), WIDTH, DEPTH, generator=generator, device=device)
    a = quantise_rows(a_RK.bfloat16(), tiled=tiled)
    a.values[rows:] = float("nan")
    b = quantise_blocks(b_ENK, "fp32") if tiled else quantise_rows(b_ENK.bfloat16())
    return a, b


def expected(a: Quantised, b: Quantised | QuantisedBlocks):
    a, b = a.to(torch.float64), b.to(torch.float64)
    return torch.cat([a[rows] @ w.t() for rows, w in zip(GROUPS, b, strict=True)])


@pytest.mark.parametrize("tiled", [False, True])
def test_grouped_e4m3_partitions_compute_products(narrow_in_threads, tiled):
    a, b = operands(tiled)
    out = np.full((ROWS + TAIL, WIDTH), UNWRITTEN, np.float32)
    counter = threads.Pointer(np.zeros(1, np.int64))

    def parts_of():
        def empty(*shape):
            return threads.Memory(np.full(shape, np.nan, np.float32))

        numbers = (threads.Memory(np.zeros(1, np.int64)), threads.Barrier(1), threads.Barrier(3))
        bounds = (threads.Pointer(np.array(ENDS)), len(SIZES))
        ring = (empty(8, 64, 64), empty(4, 256, 64), threads.Barriers(4, 1), threads.Barriers(4, 2))
        pairs = [x.values.view(torch.uint16).flatten(0, -2).numpy() for x in (a, b)]
        ins = [
            threads.Descriptor(x, box) for x, box in zip(pairs, ((64, 64), (256, 64)), strict=True)
        ]
        outs = (threads.Descriptor(out, (64, 128)), empty(2, 1, 1, 64, 128))
        flat = (threads.Pointer(x.scales.flatten().numpy()) for x in (a, b))
        how = (bounds, outs, ring, numbers, (*flat, ROWS + TAIL), WIDTH, DEPTH // 2, tiled)
        sizes = (0, WIDTH, DEPTH // 2, 0, False)
        return [
            (grouped_e4m3._multiply, (*how, 0)),
            (grouped_e4m3._multiply, (*how, 1)),
            (frame.load_pieces, (bounds, ins, ring, numbers, *sizes)),
            (frame.schedule, (bounds, counter, numbers, 0, WIDTH, 0)),
        ]

    threads.run(5, parts_of)
    want = expected(a, b).numpy()
    error = np.linalg.norm(out[:ROWS] - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 1e-5
    assert (out[ROWS:] == UNWRITTEN).all()


def test_grouped_e4m3_does_not_take_a_cpu():
    a, b = operands(True)
    assert not grouped_e4m3.takes(a.values, b.values)


@pytest.mark.gpu
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("sizes", [SIZES, (9000, 3, 0, 8200)])
def test_grouped_e4m3_products_match_other_kernels(sizes, tiled):
    """With a scale per row they have torch's bits; with blocks the order of sums differs."""
    a, b = operands(tiled, sizes, "cuda")
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    rows = sum(sizes)
    is_taken = grouped_e4m3.takes(a.values, b.values)
    assert is_taken == (rows > 16384)
    made = grouped_e4m3.product(*a, *b, ends)[:rows]
    if tiled:
        other = blocks_mm(a, b, ends, torch.bfloat16)[:rows]
        torch.testing.assert_close(made, other, rtol=2**-7, atol=1e-3 * made.abs().max())
        assert ((made != other).float().mean()) < 0.01
    else:
        other = torch._scaled_grouped_mm(
            a.values, b.values.transpose(1, 2), *(x.scales for x in (a, b)), offs=ends,
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip
        assert torch.equal(made, other[:rows])
    if is_taken:
        assert torch.equal(scaled_grouped_mm(a, b, ends, torch.bfloat16)[:rows], made)
