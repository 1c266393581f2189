"""Grouped products for Hopper: their Gluon code in threads, their kernels beside torch's."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from moetrain.kernels.experts import grouped, products
from moetrain.kernels.experts import grouped_frame as frame
from moetrain.kernels.experts.swiglu import swiglu
from tests.lib import gluon_threads as threads
from tests.lib.grouped_cases import ENDS, GROUPS, ROWS, SIZES, TAIL, UNWRITTEN, in_threads

__all__ = ["in_threads"]  # a fixture


def launch(mode, a, b, outs, weights, height, width, depth, *, is_gated=False, programs=5):
    """Run the kernel's partitions as :func:`grouped._grouped_kernel` does."""
    half, columns, deep, part = 64, 256, 64, 128
    a_block = (1, 1, deep, half) if mode == 2 else (half, deep)
    b_block = {0: (columns, deep), 1: (deep, columns), 2: (1, 1, deep, columns)}[mode]
    counter = threads.Pointer(np.zeros(1, np.int64))

    def parts_of():
        def empty(*shape):
            return threads.Memory(np.full(shape, np.nan, np.float32))

        def barriers(count):
            return threads.Barriers(4, count)

        numbers = (threads.Memory(np.zeros(1, np.int64)), threads.Barrier(1), threads.Barrier(3))
        bounds = (threads.Pointer(np.array(ENDS)), len(SIZES))
        ring = (empty(8, *a_block), empty(4, *b_block), barriers(1), barriers(2))
        box = (half, part)
        described = [threads.Descriptor(out, box) for out in outs]
        written = (described[0], described[-1], threads.Pointer(weights), empty(2, 1, 1, *box))
        if mode == 2:
            written = (*written[:3], empty(2, *box))
        ins = threads.Descriptor(a, a_block), threads.Descriptor(b, b_block)
        if is_gated:
            ins = ins[0], threads.Descriptor(b, (part, deep))
        sizes = (height, width, depth, mode, is_gated)
        return [
            (grouped._multiply, (bounds, written, ring, numbers, *sizes, 0)),
            (grouped._multiply, (bounds, written, ring, numbers, *sizes, 1)),
            (frame.load_pieces, (bounds, ins, ring, numbers, *sizes)),
            (frame.schedule, (bounds, counter, numbers, height, width, mode)),
        ]

    threads.run(programs, parts_of)


def drawn(*shape, tail=False):
    """Return random values, with NaN in the rows past the last group's."""
    x = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
    if tail:
        x[ROWS:] = np.nan
    return x


@pytest.mark.parametrize("mode", [frame.FORWARD, frame.TRANSPOSED])
def test_grouped_partitions_compute_products(in_threads, mode):
    depth, width = 192, 320  # the last tile is at most a quarter full
    a = drawn(ROWS + TAIL, depth, tail=True)
    b = drawn(len(SIZES), depth, width)
    flat = b.reshape(-1, width) if mode else b.transpose(0, 2, 1).reshape(-1, depth)
    out = np.full((ROWS + TAIL, width), UNWRITTEN, np.float32)
    launch(mode, a, flat, (out,), np.zeros(1), 0, width, depth)
    expected = np.concatenate([a[rows] @ w for rows, w in zip(GROUPS, b, strict=True)])
    np.testing.assert_allclose(out[:ROWS], expected, atol=1e-3)
    assert (out[ROWS:] == UNWRITTEN).all()


def test_grouped_partitions_compute_weight_gradients(in_threads):
    height, width = 256, 320
    a, g = drawn(ROWS + TAIL, height, tail=True), drawn(ROWS + TAIL, width, tail=True)
    out = np.full((len(SIZES) * height, width), UNWRITTEN, np.float32)
    launch(frame.OUTER, a, g, (out,), np.zeros(1), height, width, 0)
    expected = np.concatenate([a[rows].T @ g[rows] for rows in GROUPS])
    np.testing.assert_allclose(out, expected, atol=1e-3)


def test_grouped_partitions_compute_the_gated_product(in_threads):
    depth, width = 128, 256
    x, w = drawn(ROWS + TAIL, depth, tail=True), drawn(len(SIZES), 2 * width, depth)
    weights = drawn(ROWS + TAIL)
    a = np.full((ROWS + TAIL, 2 * width), UNWRITTEN, np.float32)
    h = np.full((ROWS + TAIL, width), UNWRITTEN, np.float32)
    flat = w.reshape(-1, depth)
    launch(0, x, flat, (a, h), weights, 0, 2 * width, depth, is_gated=True)
    expected = np.concatenate([x[rows] @ m.T for rows, m in zip(GROUPS, w, strict=True)])
    np.testing.assert_allclose(a[:ROWS], expected, atol=1e-3)
    gate, up = np.split(expected, 2, axis=1)
    active = gate / (1 + np.exp(-gate)) * up * weights[:ROWS, None]
    np.testing.assert_allclose(h[:ROWS], active, atol=1e-2, rtol=1e-3)
    assert (a[ROWS:] == UNWRITTEN).all()
    assert (h[ROWS:] == UNWRITTEN).all()


def test_a_cpu_takes_torchs_product():
    a, b = torch.zeros(16384, 512).bfloat16(), torch.zeros(2, 512, 512).bfloat16()
    with torch.no_grad():
        assert not grouped.takes(a, b)
        assert not grouped.takes_outer(a, a, 2)
        assert not grouped.takes_gated(a, b)


def test_grouped_takes_widths_and_layouts_that_it_supports(monkeypatch):
    """The choice depends on widths, rows and layout; the GPU is simulated."""
    monkeypatch.setattr(frame, "is_hopper", lambda device: True)
    with FakeTensorMode(), torch.no_grad():

        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="cuda")

        a, b, wide = empty(65536, 2048), empty(128, 2048, 1536), empty(65536, 1536)
        assert grouped.takes(a, b)
        assert grouped.takes(wide, b.transpose(1, 2))
        assert grouped.takes_gated(a, empty(128, 1536, 2048))
        assert grouped.takes_outer(a, wide, 128)
        assert not grouped.takes_outer(a, wide, 8)  # long sums of large matrices
        assert grouped.takes_outer(a, empty(65536, 768), 8)
        assert not grouped.takes(empty(8192, 2048), b)
        assert not grouped.takes(a, empty(128, 2048, 1408))  # the last tile is not full
        assert not grouped.takes(a, empty(8, 2048, 8192))
        assert not grouped.takes(a, empty(2048, 128, 1536).transpose(0, 1))
        assert not grouped.takes(a, empty(128, 2048, 1536, dtype=torch.float16))
        with torch.enable_grad():
            assert not grouped.takes(a, b)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize(("depth", "width"), [(2048, 1536), (768, 2048), (512, 648)])
@pytest.mark.parametrize("sizes", [SIZES, (9000, 3, 0, 8200), (0, 0)])
def test_grouped_products_have_the_bits_of_torchs(depth, width, sizes):
    def draw(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    generator = torch.Generator("cuda").manual_seed(0)
    rows, experts = sum(sizes), len(sizes)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    a, g = draw(rows + TAIL, depth), draw(rows + TAIL, width)
    a[rows:] = g[rows:] = float("nan")
    is_taken = rows > 16384 and width % 256 == 0
    for b in (draw(experts, width, depth).transpose(1, 2), draw(experts, depth, width)):
        assert grouped.takes(a, b) is is_taken
        expected = F.grouped_mm(a, b, offs=ends)[:rows]
        assert torch.equal(grouped.product(a, b, ends)[:rows], expected)
        assert torch.equal(products.grouped_mm(a, b, ends)[:rows], expected)
    assert grouped.takes_outer(a, g, experts) is is_taken
    assert torch.equal(grouped.outer(a, g, ends), F.grouped_mm(a.t(), g, offs=ends))
    w, weights = draw(experts, 1536, depth), torch.rand(rows + TAIL, device="cuda")
    found = grouped.gated(a, w, ends, weights)
    expected = F.grouped_mm(a, w.transpose(1, 2), offs=ends)
    assert torch.equal(found[0][:rows], expected[:rows])
    assert torch.equal(found[1][:rows], swiglu(expected, weights)[:rows])
    none = a[:0]
    assert grouped.product(none, draw(experts, depth, width), ends * 0).shape == (0, width)
    assert not grouped.outer(none, g[:0], ends * 0).any()
