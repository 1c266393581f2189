"""A tiny model learns to find needles in short rows, then in rows of 64k tokens that ranks share.

    pip install -e .
    python scripts/demo_needle.py outputs/needle        # two processes on a CPU, half an hour

A needle is a key and a unique value of three tokens. A question is a key at the end of the row, and
the answer is its value. A model of two layers with random weights learns this in rows of 512
tokens, where each row has many needles and asks for all of them. Its rotary embeddings are then
stretched (``model.rope yarn``) and it is fine-tuned for a few steps on rows of 65,536 tokens under
context parallelism, ``parallel.cp 2``. Before and after, the generator is asked for needles at
depths of 0, 10, ... 100 % of unseen rows of that length. An answer counts if all its tokens are
right. ``figures.json`` in the folder has all numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from moetrain import Config, Trainer
from moetrain.cli.launch import start_ranks
from moetrain.generate.engine import Generator
from moetrain.generate.request import Request, SamplingParams
from moetrain.models.hf.load import load_hf
from moetrain.train.metrics import read_metrics

ASK, NOISE, SYMBOLS = 0, (1, 16), (16, 144)
"""The token before a question, and the ranges of the other tokens."""
SIZE = 4
"""Tokens of a needle: one of its key, and three of its value."""
DEPTHS = 11
"""Depths at which needles are asked for: 0, 10, ... 100 %."""
GEOMETRY = {
    "preset": "qwen3-0.6b",
    "vocab_size": SYMBOLS[1],
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
}


class Stage(NamedTuple):
    """Rows of one length, and the amount of training on them."""

    seq_len: int
    needles: int
    rows: int
    """Rows of a step."""
    steps: int
    lr: float


SHORT = (Stage(64, 6, 64, 250, 2e-3), Stage(512, 24, 8, 60, 2e-3))
"""A model learns to copy soonest where the source tokens are near, so short rows come first."""
LONG = Stage(65_536, 32, 1, 20, 1e-3)


# ---- rows ----------------------------------------------------------------------------------------


def haystack(
    rng: np.random.Generator, length: int, needles: int, *, evenly: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``length`` tokens of noise that hold ``needles`` needles, and the needles in order.

    No token occurs twice in the needles. Their places are random, or with ``evenly`` evenly spaced
    from the first token to the last.
    """
    found = rng.permutation(np.arange(*SYMBOLS))[: needles * SIZE].reshape(needles, SIZE)
    tokens = rng.integers(*NOISE, length)
    free = length - needles * SIZE
    before = (
        np.linspace(0, free, needles) if evenly else np.sort(rng.integers(0, free + 1, needles))
    )
    starts = before.astype(int) + np.arange(needles) * SIZE
    tokens[starts[:, None] + np.arange(SIZE)] = found
    return tokens, found


class Rows:
    """Rows of needles with questions for all of them; only answers are learned."""

    def __init__(self, seq_len: int, needles: int, count: int, seed: int) -> None:
        self.sizes, self.count, self.seed = (seq_len, needles), count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng, (seq_len, needles) = np.random.default_rng((self.seed, index)), self.sizes
        tokens, found = haystack(rng, seq_len - needles * (1 + SIZE), needles)
        asked = np.pad(rng.permutation(found), ((0, 0), (1, 0)), constant_values=ASK)
        labels = np.where(np.arange(1 + SIZE) < 2, -100, asked).flatten()
        tokens_S = np.concatenate([tokens, asked.flatten()])
        return {
            "input_ids": tokens_S,
            "labels": np.concatenate([np.full(len(tokens), -100), labels]),
        }


# ---- training ------------------------------------------------------------------------------------


def settings(folder: Path, **sections: dict[str, Any]) -> list[str]:
    """Return the settings of a run as command-line arguments without the dashes."""
    given = {
        "log": {"interval": 1},
        "checkpoint": {"save_hf": "yes"},
        "compile": {"enabled": "no"},
    } | sections
    given["train"] = {"eval_interval": 0, "sample_tokens": 0, "device": "cpu"} | given["train"]
    given["optim"] = {"weight_decay": 0.0} | given["optim"]
    words = [f"{name}.{key}={v}" for name, keys in given.items() for key, v in keys.items()]
    return [*words, f"output_dir={folder}"]


def train(stage: Stage, folder: Path, model: dict[str, Any], **mesh: Any) -> None:
    """Train ``model`` in this process, or in one of the processes that share the rows."""
    rows, schedule = stage.rows, "cosine" if mesh else "constant"
    words = settings(
        folder,
        model=model,
        data={"seq_len": stage.seq_len, "tokenizer": "byte"},
        train={"steps": stage.steps, "micro_batch_size": rows, "global_batch_size": rows},
        optim={"lr": stage.lr, "schedule": schedule, "warmup_steps": min(30, stage.steps // 4)},
        parallel=mesh,
    )
    data = Rows(stage.seq_len, stage.needles, stage.steps * rows, stage.seq_len)
    Trainer(Config.load("debug", words), data=cast(Sequence[Any], data)).fit()


def train_short(out: Path) -> Path:
    """Train a model with random weights on each length of :data:`SHORT`; return its folder."""
    model: dict[str, Any] = GEOMETRY | {"max_positions": SHORT[-1].seq_len}
    for stage in SHORT:
        folder = out / f"short-{stage.seq_len}"
        train(stage, folder, model)
        model = {"path": folder / "hf"}
    return model["path"]


def share(*given: Any) -> None:
    """Train in two processes, like ``torchrun --nproc-per-node 2``."""
    words = ["--train", json.dumps(given, default=str)]
    if code := start_ranks([str(Path(__file__).resolve()), *words], 2):
        sys.exit(code)


# ---- generation ----------------------------------------------------------------------------------


def reaching(model: Path, folder: Path, seq_len: int, **rope: Any) -> Path:
    """Copy ``model`` with a config.json that allows ``seq_len`` positions; return the copy."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = seq_len
    (folder / "config.json").write_text(json.dumps(config | rope))
    return folder


def accuracy(model: Path, seq_len: int, haystacks: int, needles: int = 31) -> list[float]:
    """Return the share of ``haystacks`` in which the needle at each depth is found.

    The prompt is a haystack and a question. A haystack has as many questions as depths. The
    generator prefills it once, and keeps it in its cache.
    """
    pages = -(-seq_len // 64) + 16
    generator = Generator(load_hf(model), num_pages=pages, max_tokens=2048)
    found = np.zeros(DEPTHS)
    for i in range(haystacks):
        rng = np.random.default_rng((2**31, i))  # no training row has this seed
        tokens, every = haystack(rng, seq_len - 1 - SIZE, needles, evenly=True)
        for depth, at in enumerate(np.linspace(0, needles - 1, DEPTHS).astype(int)):
            key, *value = every[at].tolist()
            params = SamplingParams(max_tokens=SIZE - 1, temperature=0.0)
            request = Request(f"{i} {depth}", (*tokens.tolist(), ASK, key), params)
            ((completion,),) = generator.generate([request])
            found[depth] += completion.tokens == value
    return (found / haystacks).round(4).tolist()


def main() -> None:
    """Run everything, and write figures.json after each part."""
    parser = argparse.ArgumentParser(description="Needles in rows that ranks share.")
    parser.add_argument("out", type=Path, nargs="?", help="folder for all that is made")
    parser.add_argument("--long", type=int, default=LONG.seq_len, help="tokens of a long row")
    parser.add_argument("--steps", type=int, default=LONG.steps, help="fine-tuning steps")
    parser.add_argument("--lr", type=float, default=LONG.lr, help="fine-tuning learning rate")
    parser.add_argument("--haystacks", type=int, default=2, help="number, each with 11 questions")
    parser.add_argument("--method", default="auto", help="parallel.cp_method")
    parser.add_argument("--train", type=json.loads, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.train:
        stage, folder, model, mesh = words.train
        return train(Stage(*stage), folder, model, **mesh)
    out = words.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {"torch": torch.__version__, "cores": os.cpu_count(), "seconds": {}}
    began = time.perf_counter()

    def note(part: str, **values: Any) -> None:
        nonlocal began
        now = time.perf_counter()
        figures["seconds"][part], began = round(now - began, 1), now
        figures.update(values)
        print(part, figures["seconds"][part], "s", values, flush=True)
        (out / "figures.json").write_text(json.dumps(figures, indent=1))

    def measure(name: str, model: Path, seq_len: int) -> None:
        note(f"ask {name}", **{name: accuracy(model, seq_len, words.haystacks)})

    short = train_short(out)
    note("train short")
    measure("short rows", short, SHORT[-1].seq_len)
    measure("before", reaching(short, out / "before", words.long), words.long)
    scaling = {"rope_type": "yarn", "factor": words.long / SHORT[-1].seq_len}
    scaling["original_max_position_embeddings"] = SHORT[-1].seq_len
    stretched = reaching(short, out / "stretched", words.long, rope_scaling=scaling)
    measure("stretched", stretched, words.long)
    yarn = {"path": short, "max_positions": words.long, "rope": "yarn"}
    stage = LONG._replace(seq_len=words.long, steps=words.steps, lr=words.lr)
    share(stage, out / "long", yarn, {"cp": 2, "cp_method": words.method})
    losses = [row["loss"] for row in read_metrics(out / "long" / "metrics.jsonl") if "loss" in row]
    note("train long", losses=losses)
    measure("after", out / "long" / "hf", words.long)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
