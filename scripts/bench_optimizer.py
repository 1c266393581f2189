"""Time AdamW, the cast of its weights and the gradient's norm against memory speed and torch.

    python scripts/bench_optimizer.py [--parameters 600e6] [--matrices 128x768x2048]
        [--only-muon] [--sweep]

It runs on one GPU, on one flat shard like that of an FSDP bucket:

1. It checks the results: a step against torch's fused AdamW, and bf16 and float8 moments against
   the reference.
2. It prints a line for each part: median device milliseconds, the bytes per second that the part
   has to move, and their share of a copy's rate.
3. It times Muon on ``--matrices``: five Newton-Schulz iterations, by half of each symmetric product
   and by whole products. Their FLOPs per second are compared with one large product's; both count
   whole products. Then it times whole updates beside AdamW's.

``--only-muon`` leaves the first two out. ``--sweep`` also times other launch settings.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import triton

from moetrain.kernels.optim import symmetric
from moetrain.kernels.optim.adamw import (
    Settings,
    _adamw_kernel,
    adamw,
)
from moetrain.kernels.optim.adamw_float8 import (
    _GROUPS,
    Float8Moments,
    _adamw_float8_kernel,
    adamw_float8,
)
from moetrain.kernels.optim.muon import (
    muon_momentum,
    muon_update,
    newton_schulz,
    newton_schulz_flops,
    newton_schulz_reference,
    orthogonalise,
)
from moetrain.kernels.optim.reduction import num_blocks, sum_chunks
from moetrain.kernels.optim.rounding import BLOCK, WARPS
from moetrain.kernels.quant.e4m3 import SCALED

SETTINGS = Settings(0.9, 0.95, 1e-8, seed=0)
LR, DECAY = 1e-3, 0.1
WIDTH = 2048
"""Number of elements in a row of moments in float8."""
REPEATS, WARM_UP = 10, 3
SWEEP = ((512, 4), (1024, 2), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8))
SYMMETRIC_SWEEP = (
    (128, 64, 8, 3, 255),
    (128, 64, 8, 4, 255),
    (128, 64, 4, 3, 255),
    (128, 64, 4, 4, 255),
    (128, 128, 8, 2, 255),
    (128, 32, 8, 4, 128),
    (64, 64, 4, 4, 128),
)


def milliseconds(function: Callable[[], object]) -> float:
    """Return the median device milliseconds of a call."""
    times = []
    for _ in range(WARM_UP + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[WARM_UP:])


class Bench:
    """A shard, and the rate of a copy of it."""

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers
        generator = torch.Generator("cuda").manual_seed(0)
        draw = partial(torch.randn, numbers, device="cuda", generator=generator)
        self.param_N, self.grad_N = draw().mul_(0.02), draw().mul_(1e-3)
        self.out_N = torch.empty_like(self.param_N, dtype=torch.bfloat16)
        one, no = (torch.full((), x, device="cuda") for x in (1.0, 0.0))
        self.rates_S = SETTINGS.rates(one, one, no, LR, DECAY)
        self.decays_B = torch.ones(num_blocks(numbers), dtype=torch.uint8, device="cuda")
        self.origins_B = BLOCK * torch.arange(num_blocks(numbers), device="cuda")
        self.copied = 1.0
        spare_N = torch.empty_like(self.param_N)
        self.copied = self.time("copy in fp32", 8, lambda: spare_N.copy_(self.param_N))

    def moments(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both moments of AdamW, filled with zeros."""
        zeros = (torch.zeros_like(self.param_N, dtype=dtype) for _ in range(2))
        return next(zeros), next(zeros)

    def time(self, name: str, bytes_each: float, function: Callable[[], object]) -> float:
        """Time ``function`` and print a line; return its bytes per second.

        ``bytes_each``: the bytes that it has to move for each element of the shard.
        """
        ms = milliseconds(function)
        rate = bytes_each * self.numbers / ms * 1e3
        share = f", {rate / self.copied:4.0%} of a copy's" if self.copied > 1 else ""
        print(f"{name:<62}{ms:8.3f} ms  {rate / 1e12:.2f} TB/s{share}", flush=True)
        return rate

    def update(
        self,
        grad_N: torch.Tensor,
        moments: tuple[torch.Tensor, torch.Tensor],
        out_N: torch.Tensor | None,
    ) -> None:
        """Run our AdamW; ``out_N`` gets a bf16 copy of the parameters."""
        origins_B = self.origins_B if moments[0].dtype == torch.bfloat16 else None
        tensors = (self.param_N, grad_N, *moments, self.rates_S, self.decays_B)
        adamw(*tensors, SETTINGS, origins_B, out_N)


def torch_adamw(param_N: torch.Tensor, grad_N: torch.Tensor) -> torch.optim.AdamW:
    """Return torch's fused AdamW."""
    param_N = param_N.requires_grad_()
    param_N.grad = grad_N
    betas = (SETTINGS.beta1, SETTINGS.beta2)
    return torch.optim.AdamW([param_N], LR, betas, SETTINGS.eps, DECAY, fused=True)


def check(bench: Bench) -> bool:
    """Return True if a step is torch's up to rounding, and rounded moments are the reference's.

    The bf16 copy must be the exact cast. One rounded moment in a thousand may differ.
    """
    before_N, moments = bench.param_N.clone(), bench.moments(torch.float32)
    bench.update(bench.grad_N, moments, bench.out_N)
    theirs_N = before_N.clone()
    torch_adamw(theirs_N, bench.grad_N).step()
    difference = (bench.param_N - theirs_N.detach()).abs().max().item()
    step = (theirs_N.detach() - before_N).abs().max().item()
    same_cast = torch.equal(bench.out_N, bench.param_N.bfloat16())
    print(f"after a step: {difference:.1e} from torch's, of updates of {step:.1e}; the copy "
          f"{'is' if same_cast else 'IS NOT'} its cast")  # fmt: skip
    few = slice(0, 1 << 20)
    blocks = slice(0, (1 << 20) // BLOCK)
    param_N, grad_N = before_N[few], bench.grad_N[few]
    ours = tuple(moment[few].bfloat16() for moment in moments)
    tables = (bench.rates_S, bench.decays_B[blocks], SETTINGS, bench.origins_B[blocks])
    expected = tuple(x.clone() for x in ours)
    adamw(param_N.clone(), grad_N, expected[0], expected[1], *tables, backend="reference")
    adamw(param_N, grad_N, ours[0], ours[1], *tables)
    wrong = [(a != b).float().mean().item() for a, b in zip(ours, expected, strict=True)]
    print(f"rounded moments that are not the reference's: {wrong[0]:.1e}, {wrong[1]:.1e}")
    return difference < 1e-3 * step and same_cast and max(wrong) < 1e-3


def float8_moments(rows: int) -> Float8Moments:
    """Return float8 moments of zeros, in rows of :data:`WIDTH` elements."""
    moments = Float8Moments.of_whole((rows, WIDTH), partial(torch.zeros, device="cuda"))
    for moment in moments:
        moment.zero_()
    return moments


def check_float8(bench: Bench) -> bool:
    """Return True if float8 moments, scales and bf16 weights equal the reference's.

    One element in a thousand may differ, because it is close to where rounding changes.
    """
    rows, found = (1 << 20) // WIDTH, []
    grads = [x.view(rows, WIDTH) for x in bench.grad_N[: 3 << 20].split(1 << 20)]
    for backend in ("triton", "reference"):
        param = bench.param_N[: 1 << 20].bfloat16().view(rows, WIDTH)
        moments = float8_moments(rows)
        for grad in grads:
            tensors = (*moments.tensors.values(), bench.rates_S, moments.places_2)
            how: Any = (*tensors, SETTINGS, True, None, backend)
            adamw_float8(param, grad, *how)
        found.append((param, *moments))
    wrong = [(a != b).float().mean().item() for a, b in zip(*found, strict=True)]
    print(f"float8: weights, codes and scales that are not the reference's: {max(wrong):.1e}")
    return max(wrong) < 1e-3


def compare_float8(bench: Bench) -> None:
    """Print the lines for float8 moments, with weights in fp32 and in bf16."""
    rows = bench.numbers // WIDTH
    few = rows * WIDTH
    narrow_N, moments = bench.grad_N[:few].bfloat16(), float8_moments(rows)
    weights = {4: bench.param_N.detach()[:few], 2: bench.param_N.detach()[:few].bfloat16()}
    for (width, param_N), grad_N in product(weights.items(), (bench.grad_N[:few], narrow_N)):
        for out_N in (None, bench.out_N[:few]) if width == 4 else (None,):
            spent = 2 * width + grad_N.itemsize + 4 * (1 + 1 / SCALED) + 2 * (out_N is not None)
            name = f"ours, {_word(param_N.dtype)} weights, float8 moments, {_word(grad_N.dtype)}"
            also = "" if out_N is None else ", and the copy"
            tensors = (param_N, grad_N, out_N, bench.rates_S, SETTINGS, True)
            bench.time(name + also, spent * few / bench.numbers, partial(moments.update, *tensors))


def sweep_float8(bench: Bench) -> None:
    """Time other launch settings with weights in bf16; ``*`` marks those in use."""
    rows = bench.numbers // WIDTH
    few = rows * WIDTH
    param_N, moments = bench.param_N.detach()[:few].bfloat16(), float8_moments(rows)
    tensors = (param_N, bench.grad_N[:few].bfloat16(), *moments, None, bench.rates_S)
    groups = few // SCALED
    numbers = (groups, WIDTH, 1.0, 0.9, 0.1, 0.95, 0.05, 1e-8, 0)
    for each, warps in ((16, 2), (16, 4), (32, 2), (32, 4), (32, 8), (64, 4), (64, 8), (128, 8)):
        kernel = _adamw_float8_kernel[(triton.cdiv(groups, each),)]
        sizes = (each, SCALED)
        launch = partial(kernel, *tensors, moments.places_2, *numbers, *sizes, num_warps=warps)
        used = "*" if (each, warps) == (_GROUPS, WARPS) else ""
        spent = (2 * 2 + 2 + 4 * (1 + 1 / SCALED)) * few / bench.numbers
        bench.time(f"float8, bf16 weights, {each} groups, warps {warps}{used}", spent, launch)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compare(bench: Bench) -> None:
    """Print a line for each part of the optimizer, and for torch's."""
    narrow_N = bench.grad_N.bfloat16()
    for dtype, bytes_each in ((torch.float32, 24), (torch.bfloat16, 16)):
        moments = bench.moments(dtype)
        for grad_N in (bench.grad_N, narrow_N):
            each = bytes_each + grad_N.itemsize
            name = f"ours, moments {_word(dtype)}, gradients {_word(grad_N.dtype)}"
            for out_N in (None, bench.out_N):
                spent = each + (0 if out_N is None else out_N.itemsize)
                also = "" if out_N is None else ", and the bf16 copy"
                bench.time(name + also, spent, partial(bench.update, grad_N, moments, out_N))
        del moments
    chunk_N, squares_B = narrow_N[None], torch.empty(num_blocks(bench.numbers), device="cuda")
    for out_N, accumulate in product((bench.grad_N, bench.out_N), (False, True)):
        bytes_each = 2 + out_N.itemsize * (1 + accumulate)
        how = {"out_N": out_N, "accumulate": accumulate}
        verb = "added" if accumulate else "copied"
        name = f"ours, a bf16 gradient {verb} to {_word(out_N.dtype)}"
        bench.time(name, bytes_each, partial(sum_chunks, chunk_N, **how))
        with_norm = partial(sum_chunks, chunk_N, **how, squares_B=squares_B)
        bench.time(f"{name}, and its squares", bytes_each, with_norm)
    bench.time("ours, the sum of squares", 4 / BLOCK, lambda: squares_B.sum(dtype=torch.float64))
    del chunk_N
    theirs = torch_adamw(bench.param_N, bench.grad_N)
    bench.time("torch, fused AdamW in fp32", 28, theirs.step)
    values_N = bench.param_N.detach()
    bench.time("torch, cast to bf16", 6, lambda: bench.out_N.copy_(values_N))
    bench.time("ours, cast to bf16", 6, lambda: sum_chunks(values_N[None], bench.out_N))
    bench.time("torch, the gradient's norm", 4, lambda: torch.linalg.vector_norm(bench.grad_N))


def muon(sizes: tuple[int, int, int]) -> bool:
    """Print the times of Muon's parts and of whole updates.

    Returns True if the orthogonalised matrices are right.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    wide_BRC = torch.randn(*sizes, device="cuda", generator=generator)
    x_BRC = wide_BRC.bfloat16()
    how = (5, 1e-8)
    exact_RC = newton_schulz_reference(x_BRC[0], *how)
    flops, errors = newton_schulz_flops(sizes, 5), []
    big = torch.randn(8192, 8192, device="cuda").bfloat16()
    peak = 2 * 8192**3 / milliseconds(lambda: big @ big)
    print(f"{'x'.join(map(str, sizes))}: Newton-Schulz, five iterations; one large product has "
          f"{peak / 1e9:.0f} TFLOP/s")  # fmt: skip
    for name, rows in (("half of symmetric products", 1), ("whole products", math.inf)):
        run = partial(newton_schulz, x_BRC, *how, rows)
        errors.append(((run()[0] - exact_RC).norm() / exact_RC.norm()).item())
        ms = milliseconds(run)
        print(f"{name:<30}{ms:8.3f} ms, {flops / ms / 1e9:.0f} TFLOP/s by the full work, "
              f"{flops / ms / peak:.0%} of one product's; {errors[-1]:.1e} off")  # fmt: skip

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    in_place = milliseconds(lambda: orthogonalise([wide_BRC], *how, 0.2))
    taken = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"in place, in bounded batches {in_place:.3f} ms, {taken:.2f} GiB beside")

    bench = Bench(wide_BRC.numel())
    grad_N = wide_BRC.view(-1)
    for dtype in (torch.float32, torch.bfloat16):
        origins_B = bench.origins_B if dtype == torch.bfloat16 else None
        first_N, second_N = bench.moments(dtype)
        adam = milliseconds(partial(bench.update, bench.grad_N, (first_N, second_N), bench.out_N))

        def update(momentum_N=first_N, origins_B=origins_B) -> None:
            muon_momentum(grad_N, momentum_N, bench.rates_S, 0.95, 0, origins_B)
            orthogonalise([wide_BRC], *how, 0.2)
            muon_update(bench.param_N, grad_N, bench.rates_S, bench.decays_B, bench.out_N)

        ours = milliseconds(update)
        print(f"whole update, state in {_word(dtype)}: Muon {ours:.3f} ms, AdamW {adam:.3f} ms")
    return max(errors) < 5e-2


def sweep_symmetric(sizes: tuple[int, int, int]) -> None:
    """Print the times of both symmetric products by launch settings, and of whole products."""
    batch, short, long = sizes[0], *sorted(sizes[1:])
    x_BRC = torch.randn(batch, short, long, device="cuda").bfloat16()
    gram_BRR = torch.bmm(x_BRC, x_BRC.mT)
    used = symmetric._LAUNCH, symmetric._LAUNCH_ALONE
    for launch in (None, *used, *map(symmetric._Launch._make, SYMMETRIC_SWEEP)):
        backend = "reference" if launch is None else "triton"
        symmetric._LAUNCH = symmetric._LAUNCH_ALONE = launch or used[0]
        times = []
        for given in ((x_BRC,), (gram_BRR, gram_BRR, 2.0, -1.5)):
            run = partial(symmetric.symmetric_product, *given, backend=backend)
            ms = milliseconds(run)
            times.append(f"{ms:.3f} ms {2 * batch * short**2 * given[0].shape[2] / ms / 1e9:.0f}")
        name = "whole, by a library" if launch is None else f"half, {tuple(launch)}"
        print(f"{name:<34} X X^T {times[0]}, b A + c A A {times[1]} TFLOP/s by the full work")
    symmetric._LAUNCH, symmetric._LAUNCH_ALONE = used


def sweep(bench: Bench) -> None:
    """Time other launch settings; ``*`` marks those in use."""
    for dtype, bytes_each in ((torch.float32, 30), (torch.bfloat16, 22)):
        moments = bench.moments(dtype)
        for block, warps in SWEEP:
            blocks = triton.cdiv(bench.numbers, block)
            decays_B = torch.ones(blocks, dtype=torch.uint8, device="cuda")
            origins_B = block * torch.arange(blocks, device="cuda")
            tensors = (bench.param_N, bench.grad_N, *moments, bench.out_N, bench.rates_S, decays_B)
            numbers = (bench.numbers, 0.9, 0.1, 0.95, 0.05, 1e-8, 0)
            launch = partial(
                _adamw_kernel[(blocks,)],
                *tensors,
                origins_B if dtype == torch.bfloat16 else None,
                *numbers,
                block,
                num_warps=warps,
            )
            used = "*" if (block, warps) == (BLOCK, WARPS) else ""
            name = f"{_word(dtype)} moments, block {block}, warps {warps}"
            bench.time(f"{name}{used}", bytes_each, launch)
        del moments


def main() -> int:
    """Run everything that was asked for; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=600e6)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only-muon", action="store_true")
    parser.add_argument("--matrices", default="128x768x2048")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    is_right = True
    if not args.only_muon:
        bench = Bench(int(args.parameters))
        is_right = check(bench) & check_float8(bench)
        compare(bench)
        compare_float8(bench)
        if args.sweep:
            sweep(bench)
            sweep_float8(bench)
        del bench
    count, rows, columns = map(int, args.matrices.split("x"))
    is_right &= muon((count, rows, columns))
    if args.sweep:
        sweep_symmetric((count, rows, columns))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
