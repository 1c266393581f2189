"""Time the gated delta rule, or Kimi Delta Attention, beside that of flash-linear-attention.

    pip install --no-deps fla-core einops
    python scripts/bench_gated_delta.py [--rule kda] [--times-only] [--checked TOKENS]

Both take packed documents, 32 heads of width 128 in bf16, and queries and keys that are normalised
already. On Hopper with Triton 3.4.0 to 3.7.0 fla-core refuses the backward of the gated delta rule,
since its gradients are wrong there. Its check is switched off here. So the errors of both against
the plain rule in fp32 are printed beside the times, for up to 16,384 tokens. The plain rule takes a
minute for each line; ``--times-only`` leaves the errors out. A second run of our rule has to give
the first one's bits. Times are medians of device milliseconds. TFLOP/s count the products of a
token-by-token rule: three of K x V multiply-adds a token and head forward, twice that backward.
"""

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
from bench_kernels import device_ms

from moetrain.kernels.linear_attention.gated_delta import Documents, gated_delta
from moetrain.kernels.linear_attention.kda import kda
from moetrain.runtime.backend import Backend

HEADS, WIDTH = 32, 128
CHECKED = 16_384
"""The largest number of tokens for which results are compared."""
LENGTHS = (
    (300, 1000, 2796),
    (16_384,),
    (4096,) * 4,
    (300, 5000, 1084, 2000, 3000, 5000),
    (65_536,),
    (4096,) * 16,
)
Rule = Callable[..., torch.Tensor]


def ours(name: str, lengths: tuple[int, ...], backend: Backend = "auto") -> Rule:
    """Return our rule over documents of ``lengths``."""
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    documents = Documents.of(bounds.int(), sum(lengths))
    own = kda if name == "kda" else gated_delta
    return lambda q, k, v, g, beta: own(q, k, v, g, beta, documents, WIDTH**-0.5, backend)


def theirs(name: str, lengths: tuple[int, ...]) -> Rule:
    """Return fla's rule over the same documents, with its check of Triton's version off."""
    if name == "kda":
        from fla.ops.kda import chunk_kda as other  # pyright: ignore[reportMissingImports]
    else:
        import fla.ops.common.chunk_o as chunk_o  # pyright: ignore[reportMissingImports]
        from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
            chunk_gated_delta_rule as other,
        )

        chunk_o.IS_NVIDIA_HOPPER = False
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    on_device = bounds.cuda()

    def rule(*inputs: torch.Tensor) -> torch.Tensor:
        batch = [x[None] for x in inputs]
        bounds_of = {"cu_seqlens": on_device, "cu_seqlens_cpu": bounds}
        return other(*batch, scale=WIDTH**-0.5, **bounds_of)[0][0]

    return rule


def inputs_of(name: str, tokens: int) -> list[torch.Tensor]:
    """Return queries, keys, values, gates and betas of ``tokens`` tokens: bf16, the gates fp32.

    Kimi Delta Attention has a gate for each channel, the gated delta rule one for each head.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (tokens, HEADS, WIDTH)
    q, k, v = (torch.randn(shape, device="cuda", generator=generator) for _ in range(3))
    gates = shape if name == "kda" else shape[:2]
    g = torch.rand(gates, device="cuda", generator=generator)
    beta = torch.rand(shape[:2], device="cuda", generator=generator)
    found = [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, -0.1 * g, beta]
    kinds = [torch.bfloat16] * 3 + [torch.float32, torch.bfloat16]
    return [x.to(kind).requires_grad_() for x, kind in zip(found, kinds, strict=True)]


def results(rule: Rule, inputs: list[torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
    """Return the outputs and every input's gradient."""
    out = rule(*inputs)
    return [out, *torch.autograd.grad(out, inputs, upstream.to(out.dtype))]


def errors(name: str, rule: Rule, lengths: tuple[int, ...]) -> list[float]:
    """Return the errors of the outputs and of each gradient against the plain rule in fp32.

    An error is the norm of the difference over the norm of the plain rule's tensor.
    """
    inputs = inputs_of(name, sum(lengths))
    upstream = torch.randn_like(inputs[2])
    found = results(rule, inputs, upstream)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    exact = results(ours(name, lengths, "reference"), wide, upstream)
    pairs = zip(found, exact, strict=True)
    return [((a.float() - b).norm() / b.norm()).item() for a, b in pairs]


def repeats(name: str, lengths: tuple[int, ...]) -> bool:
    """Return True if two runs of our rule have the same bits, in outputs and gradients."""
    inputs = inputs_of(name, sum(lengths))
    upstream = torch.randn_like(inputs[2])
    first, second = (results(ours(name, lengths), inputs, upstream) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def row(who: str, name: str, rule: Rule, lengths: tuple[int, ...], checked: int) -> float:
    """Print a rule's errors, for up to ``checked`` tokens, and times; return the total in ms."""
    tokens = sum(lengths)
    off = [f"{error:.1e}" for error in errors(name, rule, lengths)] if tokens <= checked else []
    inputs = inputs_of(name, tokens)
    upstream = torch.randn_like(inputs[2])
    with torch.no_grad():
        forward = device_ms(lambda: rule(*inputs))
    out = rule(*inputs)
    backward = device_ms(lambda: torch.autograd.grad(out, inputs, upstream, retain_graph=True))
    flops = 3 * 3 * 2 * WIDTH * WIDTH * HEADS * tokens
    rate = f"{flops / (forward + backward) / 1e9:.0f} TFLOP/s"
    times = f"{forward:.2f} + {backward:.2f} ms, {rate}"
    words = f"{tokens} tokens, {len(lengths)} documents: {who} {times}"
    print(f"{words}; errors {', '.join(off) or 'not computed'}", flush=True)
    return forward + backward


def main() -> int:
    """Print a row of each implementation at each size, and the ratio of their times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rule", choices=("gated_delta", "kda"), default="gated_delta")
    parser.add_argument("--times-only", action="store_true", help="leave the errors out")
    parser.add_argument("--checked", type=int, default=CHECKED, help="errors up to these tokens")
    args = parser.parse_args()
    name, checked = args.rule, 0 if args.times_only else args.checked
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    for lengths in LENGTHS:
        own = row("ours", name, ours(name, lengths), lengths, checked)
        print(f"    ours repeats its bits: {repeats(name, lengths)}", flush=True)
        try:
            others = row("fla", name, theirs(name, lengths), lengths, checked)
            print(f"    fla takes {others / own:.2f} times as long", flush=True)
        except Exception as error:  # noqa: BLE001 - the peer's own failure is a finding
            print(f"    fla failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
