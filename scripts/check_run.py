"""Check a finished default run: it learned, stayed small, and left its files.

Usage: python scripts/check_run.py OUTPUT_DIR
"""

import sys
from pathlib import Path

from moetrain.train.metrics import read_metrics

MAX_EVAL_LOSS = 2.4  # nats a byte, from about 5.6 at random weights
MAX_MEMORY_GIB = 4.0
FILES = ("config.json", "sample.txt", "tensorboard", "checkpoints")


def main() -> int:
    """Print each figure and its limit; exit code 1 if one is missed."""
    folder = Path(sys.argv[1])
    rows = read_metrics(folder / "metrics.jsonl")
    eval_loss = [r["eval_loss"] for r in rows if "eval_loss" in r][-1]
    memory = max(r["memory_gib"] for r in rows if "memory_gib" in r)
    checks = [
        (f"held-out loss {eval_loss:.3f} nats a byte", eval_loss < MAX_EVAL_LOSS),
        (f"peak memory {memory:.2f} GiB", memory < MAX_MEMORY_GIB),
        *((name, (folder / name).exists()) for name in FILES),
    ]
    for name, passed in checks:
        print("ok    " if passed else "MISSED", name)
    return 0 if all(passed for _, passed in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
