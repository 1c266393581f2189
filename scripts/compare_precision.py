"""How far the gradients of one batch are from fp32's, by layer: in bf16, and with products in fp8.

    python scripts/compare_precision.py RECIPE [--section.key value ...]

Three runs from the same weights take the same first batch, one after the other: ``train.dtype``
float32, bfloat16, and bfloat16 with ``kernels.precision`` fp8. A line of the table is a layer, a
column what its parameters belong to; the numbers are ``|g - g32| / |g32|`` in bf16 and in fp8, over
all of these parameters. Weights are random, or with ``--model.path`` a checkpoint's.

Where precisions differ the router may send a token elsewhere, which is part of both errors. On one
device; weights and three gradients have to fit.
"""

import argparse
import re
import sys
import tempfile
from collections import defaultdict

import torch

from moetrain.config import Config
from moetrain.trainer import Trainer

Gradients = dict[str, torch.Tensor]
PRECISIONS = {
    "fp32": ["train.dtype=float32", "kernels.precision=bf16"],
    "bf16": ["train.dtype=bfloat16", "kernels.precision=bf16"],
    "fp8": ["train.dtype=bfloat16", "kernels.precision=fp8"],
}


def gradients_of(recipe: str, words: list[str]) -> tuple[float, Gradients]:
    """The loss and every gradient, before clipping, of a run's first step."""
    found: Gradients = {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Config.load(recipe, [*words, f"output_dir={folder}"]))

        def keep(optimizer: object, args: object, kwargs: object) -> None:
            for name, member in trainer.engine.fsdp.members.items():
                assert member.local.grad is not None  # a step has been made of it
                found[name] = member.layout.whole(member.local.grad).to("cpu", copy=True)

        trainer.optimizer.register_step_pre_hook(keep)
        return trainer.train_step().loss.item(), found


def errors_by_group(found: Gradients, exact: Gradients) -> dict[tuple[str, str], float]:
    """By layer (or the whole model) and part: the error of all its parameters together."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, want in exact.items():
        layer = re.match(r"layers\.(\d+)\.(.*)\.", name)
        group = ("layer " + layer[1], _part(layer[2])) if layer else ("model", name.split(".")[0])
        sums[group][0] += (found[name] - want).double().square().sum().item()
        sums[group][1] += want.double().square().sum().item()
    return {group: (off / norm) ** 0.5 for group, (off, norm) in sums.items()}


def _part(module: str) -> str:
    """``attn.wq`` and ``attn.q_norm`` are both attn; norms of the block are one."""
    if module.endswith("_norm") and "." not in module:
        return "norms"
    return module.removeprefix("moe.").split(".")[0]


def table(errors: dict[str, dict[tuple[str, str], float]]) -> str:
    """A line a layer; ``bf16 / fp8`` for each part."""
    groups = list(next(iter(errors.values())))
    lines = []
    for layer in dict.fromkeys(layer for layer, _ in groups):
        cells = [
            f"{part} " + " / ".join(f"{of[layer, part]:.1e}" for of in errors.values())
            for name, part in groups
            if name == layer
        ]
        lines.append(f"{layer:9} " + "   ".join(f"{cell:28}" for cell in cells).rstrip())
    return "\n".join(lines)


def main() -> int:
    """Print the losses and the table."""
    parser = argparse.ArgumentParser(
        description="Compare gradients of precisions with fp32's.", allow_abbrev=False
    )
    parser.add_argument("recipe")
    args, words = parser.parse_known_args()
    losses, gradients = {}, {}
    for name, precision in PRECISIONS.items():
        losses[name], gradients[name] = gradients_of(args.recipe, [*words, *precision])
    print("loss: " + ", ".join(f"{name} {loss:.5f}" for name, loss in losses.items()))
    exact = gradients.pop("fp32")
    print("gradients' error: " + " / ".join(gradients))
    print(table({name: errors_by_group(found, exact) for name, found in gradients.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
