"""Time every kernel against its reference and against the hardware's limits.

    python scripts/bench_kernels.py [--only NAME ...] [--json FILE]

For each benchmark size of the kernel specs it first checks the outputs and gradients (bf16 against
the reference in fp32), and that a rerun gives the same bits. Then it times forward and backward of
the kernel, of the reference, and of the compiled reference. Some sizes are too large for the
reference. For these a smaller size is checked, and the kernel alone is timed. Times are medians of
device time. A write before each call flushes the L2, and takes so long that the host's launch work
is hidden, as it is in a compiled training step.

Left out on purpose: tuning. A kernel's launch settings are constants in its file.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.lib.specs import SPECS
from tests.lib.specs.spec import (
    Bench,
    KernelSpec,
    as_tuple,
    relative_errors,
    rerun_differences,
    with_grad,
)

BYTES_PER_SECOND = 4.26e12  # one H200: measured device copy, read + write
FLOPS_PER_SECOND = 785e12  # one H200: measured bf16 GEMM 8192^3
FLUSH_BYTES = 1 << 30  # about 0.25 ms of writing, 16 times the L2
REPEATS = 20
AT_LEAST = ("fraction", "tflops")  # endings of metrics of which more is better

COLUMNS = (
    ("eager fwd", "eager", "forward_ms", ".3f"),
    ("bwd", "eager", "backward_ms", ".3f"),
    ("compiled fwd", "compiled", "forward_ms", ".3f"),
    ("bwd", "compiled", "backward_ms", ".3f"),
    ("ours fwd", "ours", "forward_ms", ".3f"),
    ("bwd", "ours", "backward_ms", ".3f"),
    ("floor% fwd", "ours", "forward_fraction", ".0%"),
    ("bwd", "ours", "backward_fraction", ".0%"),
    ("TFLOPS", "ours", "total_tflops", ".0f"),
    ("extra GiB", "ours", "extra_gib", ".2f"),
)


def device_ms(function: Callable[[], Any]) -> float:
    """Return the median device milliseconds of one call."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(3):
        function()
    events = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        function()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def measure(
    spec: KernelSpec, bench: Bench, implementation: Callable[..., Any], inputs: dict[str, Any]
) -> dict[str, float]:
    """Return the metrics of one implementation at one size."""
    leaves = with_grad(spec, inputs)
    forward_cost, backward_cost = spec.cost(bench.case)
    floors = [c.floor_seconds(BYTES_PER_SECOND, FLOPS_PER_SECOND) for c in spec.cost(bench.case)]
    metrics = {"forward_ms": device_ms(lambda: implementation(**leaves))}
    metrics["forward_fraction"] = floors[0] * 1e3 / metrics["forward_ms"]
    metrics["total_ms"] = metrics["forward_ms"]
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    roots = [x for x in as_tuple(implementation(**leaves)) if x.requires_grad]
    wanted = [leaves[name] for name in spec.differentiable if leaves[name] is not None]
    grad_bytes = 0
    if roots:
        upstream = [torch.randn_like(x) for x in roots]

        def backward() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(roots, wanted, upstream, retain_graph=True)

        grad_bytes = sum(g.nbytes for g in backward())
        metrics["extra_gib"] = (torch.cuda.max_memory_allocated() - held - grad_bytes) / 2**30
        metrics["backward_ms"] = device_ms(backward)
        metrics["backward_fraction"] = floors[1] * 1e3 / metrics["backward_ms"]
        metrics["total_ms"] += metrics["backward_ms"]
    flops = forward_cost.flops + (backward_cost.flops if roots else 0.0)
    if flops:
        metrics["total_tflops"] = flops / metrics["total_ms"] / 1e9
    return metrics


def bench_row(spec: KernelSpec, bench: Bench) -> dict[str, Any]:
    """Check one size, then time it; return everything that is printed about it."""
    generator = torch.Generator("cuda").manual_seed(0)
    check_case = bench.check_case or bench.case
    # The inputs are bf16, except for kernels of integers or of fp32 alone.
    dtype = torch.bfloat16 if torch.bfloat16 in spec.tolerance else torch.float32
    inputs = spec.make_inputs(check_case, dtype, generator)
    errors = relative_errors(spec, inputs, wide=torch.float32)
    row = {
        "kernel": spec.name,
        "case": dict(bench.case),
        "errors": errors,
        "correct": all(e <= spec.tolerance[dtype] for e in errors.values()),
        "rerun_differences": rerun_differences(spec, inputs),
    }
    implementations = {"ours": spec.fast}
    if bench.check_case is None:
        implementations |= {"eager": spec.reference, "compiled": torch.compile(spec.reference)}
    else:
        inputs = spec.make_inputs(bench.case, dtype, generator)
    for name, implementation in implementations.items():
        row[name] = measure(spec, bench, implementation, inputs)
        gc.collect()  # a compiled reference keeps its tensors in reference cycles
        torch.cuda.empty_cache()
    row["targets"] = {
        metric: {"wanted": wanted, "reached": reached(metric, row["ours"][metric], wanted)}
        for metric, wanted in bench.targets.items()
    }
    return row


def reached(metric: str, value: float, wanted: float) -> bool:
    """Return True if ``value`` is as good as ``wanted``."""
    return value >= wanted if metric.endswith(AT_LEAST) else value <= wanted


def table(rows: list[Mapping[str, Any]]) -> str:
    """Return the results as aligned text, one line per size."""
    lines = [["kernel", *(title for title, *_ in COLUMNS), "correct", "targets"]]
    for row in rows:
        case = ",".join(f"{k}={_short(v)}" for k, v in row["case"].items())
        cells = [
            format(row[group][metric], style) if metric in row.get(group, {}) else "-"
            for _, group, metric, style in COLUMNS
        ]
        targets = " ".join(
            f"{metric}:{t['wanted']:g}:{'reached' if t['reached'] else 'MISSED'}"
            for metric, t in row["targets"].items()
        )
        correct = "yes" if row["correct"] else f"NO {max(row['errors'].values()):.1e}"
        if row["rerun_differences"]:
            correct += ", RERUN DIFFERS"
        lines.append([f"{row['kernel']} {case}", *cells, correct, targets or "-"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _short(value: Any) -> str:
    """Return a case's value as text; a list of equal sizes as ``16x8192``."""
    if isinstance(value, tuple):
        runs = [(size, len(list(group))) for size, group in itertools.groupby(value)]
        return "+".join(f"{count}x{size}" if count > 1 else f"{size}" for size, count in runs)
    return str(value)


def main() -> int:
    """Print the table; return 1 if a result is wrong, or 2 without a GPU.

    A missed target is only reported.
    """
    parser = argparse.ArgumentParser(description="Check and time every kernel.")
    names = [spec.name for spec in SPECS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all metrics here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: bench_kernels needs a CUDA device", file=sys.stderr)
        return 2
    functorch_config.donated_buffer = False  # the backward of one compiled graph runs several times
    rows = []
    for spec in SPECS:
        for bench in spec.benches if spec.name in args.only else ():
            rows.append(bench_row(spec, bench))
            print(table(rows[-1:]).splitlines()[1], flush=True)
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds")
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))
    failed = [r for r in rows if not r["correct"] or r["rerun_differences"]]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
