"""Check and time frozen bases in 8 and 4 bits on one GPU: kernels, and LoRA beside QLoRA.

    python scripts/bench_base.py [bits] [sweep] [steps] [--commands] [--results FILE.jsonl]

bits   every format dequantised by the kernel and by plain torch, in bf16 and fp32: the bits must be
       equal
sweep  a block's experts of ``qwen3-30b-a3b`` dequantised with other launch settings: ms, TB/s, and
       the share of a copy's rate
steps  whole steps of ``qwen3-30b-a3b`` with adapters, by ``scripts/bench_train.py``: bases in bf16,
       float8, mxfp4 and nf4; then transformers with PEFT and bitsandbytes (``pip install
       bitsandbytes``) on the same GPU. ``--commands`` only prints the commands

Without a name all three parts run. The exit code is 1 if bits differ or a command fails.
"""

import argparse
import itertools
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from bench_kernels import BYTES_PER_SECOND, device_ms

from moetrain.kernels.quant import groups
from moetrain.kernels.quant.groups import QUANT_FORMATS, Groups, QuantFormat, dequantise_groups
from moetrain.runtime.backend import INTERPRETED

EXPERTS = 128 * 3 * 768 * 2048
"""Elements of a block's experts."""
ATTENTION = "--lora.rank 16 --lora.targets *.attn.*"
EVERYTHING = "--lora.rank 8"
FULL = "--activation.policy full"
STEPS = [
    # The settings are those of docs/benchmarks.md.
    "--lora.rank 16 --train.micro_batch_size 2",
    "--lora.rank 16 --train.micro_batch_size 2 --lora.base_dtype float8",
    *(
        f"--lora.rank 16 --train.micro_batch_size {rows} --lora.base_dtype {form}"
        for form in ("mxfp4", "nf4")
        for rows in (2, 4)
    ),
    # These settings use about 20 GiB.
    *(
        f"{adapters} {FULL} --train.micro_batch_size {rows} --lora.base_dtype {form}"
        for form in ("nf4", "mxfp4")
        for adapters in (ATTENTION, f"{EVERYTHING} --optim.state_dtype bfloat16")
        for rows in (1, 2)
    ),
]


def main() -> int:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="bits, sweep, steps; none: all")
    parser.add_argument("--commands", action="store_true", help="print the commands of steps")
    parser.add_argument("--results", type=Path, default=Path("base.jsonl"))
    args = parser.parse_args()
    known = {"bits": check_bits, "sweep": sweep, "steps": lambda: steps(args)}
    if odd := set(args.parts) - set(known):
        parser.error(f"no such part: {', '.join(sorted(odd))}")
    passed = {part: known[part]() for part in args.parts or known}
    return int(not all(passed.values()))


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_groups(form: QuantFormat, numel: int) -> Groups:
    """Return random quantised elements of all codes, with scales like those of weights."""
    bytes_B = torch.randint(0, 256, (form.num_bytes(numel),), dtype=torch.uint8, device=device())
    given = form.split(bytes_B[None])
    if form.bits == 8:
        given.quantised[given.quantised & 127 == 127] = 0  # NaN
    if form.has_e4m3_scales:
        given.scales[given.scales & 127 == 127] = 0
    if given.shared is None:
        given.scales.copy_(given.scales % 16 + 110)
    else:
        given.shared[:, 0::2], given.shared[:, 1::2] = 0.01, 0.04
    return given


def check_bits() -> bool:
    """Compare the kernel with plain torch."""
    is_right, numel = True, 2**14 if INTERPRETED else 2**26
    for form, dtype in itertools.product(QUANT_FORMATS.values(), (torch.float32, torch.bfloat16)):
        if INTERPRETED and dtype == torch.bfloat16:  # the interpreter truncates bf16
            continue
        given, table = random_groups(form, numel), form.table(device())
        found = []
        for backend in ("triton", "reference"):
            out_N = torch.empty(numel, dtype=dtype, device=device())
            dequantise_groups(form, given, table, out_N, 0, numel, backend)
            found.append(out_N)
        same = torch.equal(*found)
        is_right &= same
        print(f"{form.name} in {dtype}: {'equal' if same else 'NOT EQUAL'}", flush=True)
    return is_right


def sweep() -> bool:
    """Time the kernel with other launch settings; a format's first line has its own settings."""
    for form in QUANT_FORMATS.values():
        given, table = random_groups(form, EXPERTS), form.table(device())
        out_N = torch.empty(EXPERTS, dtype=torch.bfloat16, device=device())
        usual = groups._LAUNCH[form.bits]
        others = ({"GROUPS": g, "num_warps": w} for g in (16, 32, 64, 128) for w in (1, 2, 4, 8))
        for launch in (usual, *others):
            groups._LAUNCH[form.bits] = launch
            how = (form, given, table, out_N, 0, EXPERTS, "triton")
            ms = device_ms(lambda how=how: dequantise_groups(*how))
            rate = EXPERTS * (form.bytes_per_element + 2) / ms * 1e3
            share = rate / BYTES_PER_SECOND
            print(f"{form.name} {launch}: {ms:.3f} ms, {rate / 1e12:.2f} TB/s, {share:.0%}")
        groups._LAUNCH[form.bits] = usual
    return True


def steps(args: argparse.Namespace) -> bool:
    """Time whole steps, each in its own process; peers last."""
    here, commands = Path(__file__).parent, []
    for words in STEPS:
        rows = words.split("--train.micro_batch_size ")[1].split()[0]
        own = f"{words} --train.global_batch_size {rows} --results {args.results}"
        commands.append(
            [sys.executable, here / "bench_train.py", "bench-qwen3-30b-a3b", *own.split()]
        )
    for rows in (1, 2):
        peer = [here / "peer_qlora.py", "qwen3-30b-a3b", "--rows", str(rows), "--lora-rank", "16"]
        commands.append([sys.executable, *peer])
    is_right = True
    for command in commands:
        words = [str(word) for word in command]
        print(f"\n$ {shlex.join(words)}", flush=True)
        is_right &= args.commands or subprocess.run(words).returncode == 0
    return is_right


if __name__ == "__main__":
    sys.exit(main())
