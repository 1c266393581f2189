"""Check that this checkout of moetrain trains to the same bits as another, on a CPU.

    python scripts/same_bits.py OTHER_TREE

Both train 20 steps in each of five settings: one process, tensor, expert and pipeline parallelism
over two processes, and LoRA. The losses and gradient norms of every step must be equal as numbers.
If they are not, the first step that differs is printed, and the exit code is 1. OTHER_TREE is the
other checkout, for example made by ``git worktree add OTHER_TREE COMMIT``.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from moetrain.train.metrics import read_metrics

COMMON = {
    "train.steps": 20,
    "train.global_batch_size": 4,
    "train.micro_batch_size": 2,
    "train.eval_interval": 0,
    "train.sample_tokens": 0,
    "train.device": "cpu",
    "data.seq_len": 128,
    "log.interval": 1,
    "checkpoint.at_end": "no",
    "checkpoint.minutes": 0,
}
SETTINGS = {
    "one process": {},
    "tp 2": {"parallel.tp": 2, "launch.nproc": 2},
    "ep 2": {"parallel.ep": 2, "launch.nproc": 2},
    "pp 2": {"parallel.pp": 2, "launch.nproc": 2},
    "LoRA": {"lora.rank": 8},
}
TIMEOUT = 600
"""Time limit of one run in seconds."""


def losses(tree: Path, settings: dict[str, object], folder: Path) -> list[tuple[float, float]]:
    """Train in ``tree``; return the loss and gradient norm of every step."""
    given = COMMON | settings | {"output_dir": folder}
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "moetrain.train", "debug", *words]
    subprocess.run(
        command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT
    )
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def main() -> int:
    """Train every setting in both checkouts, and print a line for each; return 1 if one differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    other = parser.parse_args().other.resolve()
    here, differ = Path(__file__).parent.parent.resolve(), 0
    for name, settings in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            mine = losses(here, settings, Path(folder, "here"))
            theirs = losses(other, settings, Path(folder, "other"))
        steps = [
            step for step, pair in enumerate(zip(mine, theirs, strict=True), 1) if len({*pair}) > 1
        ]
        differ += bool(steps)
        said = f"differ from step {steps[0]} on" if steps else f"{len(mine)} steps are equal"
        print(f"{name}: {said} (last loss {mine[-1][0]!r})", flush=True)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
