"""Measure the effect of precisions and reductions on a recipe's gradients and losses.

    python scripts/compare_precision.py RECIPE [--section.key value ...]
    python scripts/compare_precision.py RECIPE --reductions PICTURE [--seeds 5] [...]
    python scripts/compare_precision.py RECIPE --losses PICTURE [--seeds 5] [...]

The first form compares gradients with fp32's. Five runs, one after the other, start from the same
weights and take the same first batch: ``train.dtype`` float32, bfloat16, and bfloat16 with
``kernels.precision`` fp8, fp8_gradients and fp8_blocks. A line of the table is a layer. In it each
kind of module has the errors ``|g - g32| / |g32|`` of bf16 and of each fp8, over all parameters of
these modules. Different rounding may make the router send a token to another expert. This is part
of all errors.

``--reductions`` compares sums of the same bf16 gradients. It computes those of one micro-batch for
each of up to 32 ranks, one after another. It adds them for several orders of the ranks in two ways:
by FSDP's kernel, which adds in fp32 in rank order, and like a ring, which rounds every partial sum
to bf16. For each number of ranks it shows how far the gradient norm spreads over the orders, and
how far gradients are from the exact sum.

``--losses`` trains for the recipe's ``train.steps``, once for each precision and seed. The runs of
a seed start from the same weights, take the same rows, and send every token to the experts that the
fp32 run chose for it. So they differ only by rounding. It shows each loss minus fp32's.

Both options draw the mean over the seeds 0, 1, ... and the range from the least to the greatest,
and print the numbers. Weights are random, or with ``--model.path`` a checkpoint's. All runs are on
one device. The first form keeps the gradients of all five runs in host memory, ``--reductions``
those of all ranks on the device.
"""

import argparse
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt

from moetrain.config import Config
from moetrain.data.loader import Batch
from moetrain.kernels.optim.reduction import sum_chunks
from moetrain.models.moe import Router
from moetrain.models.transformer import Inputs
from moetrain.optim.schedule import learning_rate
from moetrain.train.loop import Trainer

Gradients = dict[str, torch.Tensor]
PRECISIONS = {
    "fp32": ["train.dtype=float32", "kernels.precision=bf16"],
    "bf16": ["train.dtype=bfloat16", "kernels.precision=bf16"],
    "fp8": ["train.dtype=bfloat16", "kernels.precision=fp8"],
    "fp8_gradients": ["train.dtype=bfloat16", "kernels.precision=fp8_gradients"],
    "fp8_blocks": ["train.dtype=bfloat16", "kernels.precision=fp8_blocks"],
}


@contextmanager
def trainer_of(recipe: str, words: Sequence[str]) -> Iterator[Trainer]:
    """Yield a trainer. Its output folder is removed at the end of the context."""
    with tempfile.TemporaryDirectory() as folder:
        yield Trainer(Config.load(recipe, [*words, f"output_dir={folder}"]))


def gradients_of(recipe: str, words: Sequence[str]) -> tuple[float, Gradients]:
    """Return the loss and every gradient, before clipping, of a run's first step."""
    found: Gradients = {}
    with trainer_of(recipe, words) as trainer:

        def keep(optimizer: object, args: object, kwargs: object) -> None:
            for name, member in trainer.engine.fsdp.members.items():
                assert member.local.grad is not None  # it has been used in a step
                found[name] = member.layout.whole(member.local.grad).to("cpu", copy=True)

        trainer.optimizer.register_step_pre_hook(keep)
        return trainer.train_step().loss.item(), found


def errors_by_group(found: Gradients, exact: Gradients) -> dict[tuple[str, str], float]:
    """Return the joint error of all parameters by layer and part.

    For parameters outside of layers, "model" takes the place of the layer.
    """
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, want in exact.items():
        layer = re.match(r"layers\.(\d+)\.(.*)\.", name)
        group = ("layer " + layer[1], _part(layer[2])) if layer else ("model", name.split(".")[0])
        sums[group][0] += (found[name] - want).double().square().sum().item()
        sums[group][1] += want.double().square().sum().item()
    return {group: (off / norm) ** 0.5 for group, (off, norm) in sums.items()}


def _part(module: str) -> str:
    """Return the part that a module belongs to, such as attn for ``attn.wq``.

    All norms of a block are one part.
    """
    if module.endswith("_norm") and "." not in module:
        return "norms"
    return module.removeprefix("moe.").split(".")[0]


def table(errors: dict[str, dict[tuple[str, str], float]]) -> str:
    """Return a line for each layer, with ``bf16 / fp8 / fp8_gradients / fp8_blocks`` by part."""
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


# ---- reductions --------------------------------------------------------------------------------

RANKS = (2, 4, 8, 16, 32)
ORDERS = 16
"""Number of random orders of the ranks, for each seed."""
REDUCTIONS = ("fp32_accum", "bf16 ring")


def rank_gradients(recipe: str, words: Sequence[str], ranks: int) -> torch.Tensor:
    """Return [ranks, N] bf16: each rank's gradients of one micro-batch.

    Parameters that are gathered in fp32 are left out.
    """
    rows: list[torch.Tensor] = []
    with trainer_of(recipe, [*words, "train.dtype=bfloat16"]) as trainer:
        size, engine = trainer.config.train.micro_batch_size, trainer.engine
        trainer.loader.global_batch_size = size * ranks

        def keep(optimizer: object, args: object, kwargs: object) -> None:
            pieces = [
                member.local.grad.flatten().bfloat16()  # what one rank would send
                for member in engine.fsdp.members.values()
                if member.local.grad is not None and member.rule.gather is None
            ]
            rows.append(torch.cat(pieces))

        trainer.optimizer.register_step_pre_hook(keep)
        for batch in trainer.loader.next_step():
            engine.forward_backward([batch], trainer.objective)
            engine.step(0.0)  # weights stay the same
    return torch.stack(rows)


def ring_sum(rows_WN: torch.Tensor) -> torch.Tensor:
    """Return the sum that a ring of W ranks makes.

    The sum of rank r's chunk starts at the rank behind it and ends at rank r. It is rounded to bf16
    at every hop.
    """
    chunks = []
    for rank, chunk_Wn in enumerate(rows_WN.tensor_split(len(rows_WN), dim=1)):
        first, *others = chunk_Wn.roll(-rank - 1, 0)
        for row_n in others:
            first = first + row_n
        chunks.append(first)
    return torch.cat(chunks)


@dataclass
class Spread:
    """One seed's figures for each of :data:`REDUCTIONS`."""

    norm: float
    """Standard deviation of the gradient norm over the orders, as a share of the norm."""
    error: float
    """Mean over the orders of the distance to the exact sum, as a share of its norm."""

    @classmethod
    def of(cls, sums: Sequence[torch.Tensor], exact_N: torch.Tensor) -> Self:
        size = exact_N.norm().item()
        norms = [x.double().norm().item() / size for x in sums]
        errors = [(x.double() - exact_N).norm().item() / size for x in sums]
        return cls(statistics.stdev(norms), statistics.fmean(errors))


def spreads(rows_WN: torch.Tensor, seed: int) -> dict[tuple[str, int], Spread]:
    """Return the spread by reduction and number of ranks. Each rank counts equally in the sum."""
    found = {}
    generator = torch.Generator().manual_seed(seed)
    for ranks in RANKS:
        shares_RN = rows_WN[:ranks] / ranks  # a power of two: nothing is rounded
        exact_N = shares_RN.double().sum(0)
        sums: dict[str, list[torch.Tensor]] = {name: [] for name in REDUCTIONS}
        for _ in range(ORDERS):
            ordered_RN = shares_RN[torch.randperm(ranks, generator=generator)].contiguous()
            sums["fp32_accum"].append(sum_chunks(ordered_RN))
            sums["bf16 ring"].append(ring_sum(ordered_RN))
        for name, found_sums in sums.items():
            found[name, ranks] = Spread.of(found_sums, exact_N)
    return found


def compare_reductions(recipe: str, words: Sequence[str], seeds: Sequence[int], path: str) -> None:
    """Print the norms' and the sums' errors, and draw them into the file ``path``."""
    found = [
        spreads(rank_gradients(recipe, [*words, f"train.seed={seed}"], max(RANKS)), seed)
        for seed in seeds
    ]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    titles = {
        "norm": "gradient norm: deviation over orders / norm",
        "error": "gradient: distance to the exact sum / norm",
    }
    for axis, (field, title) in zip(axes, titles.items(), strict=True):
        print(f"{title}; mean (least to greatest) of {len(seeds)} seeds")
        for name in REDUCTIONS:
            columns = [[getattr(one[name, ranks], field) for one in found] for ranks in RANKS]
            means = [statistics.fmean(column) for column in columns]
            least, most = [min(c) for c in columns], [max(c) for c in columns]
            axis.plot(RANKS, means, marker="o", label=name)
            axis.fill_between(RANKS, least, most, alpha=0.25)
            for numbers in zip(RANKS, means, least, most, strict=True):
                print("  {:10} {:3} ranks  {:.1e} ({:.1e} to {:.1e})".format(name, *numbers))
        axis.set(xlabel="ranks", title=title)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", nonpositive="mask")  # two addends have only one sum
        axis.set_xticks(RANKS, map(str, RANKS))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=130)


# ---- losses ------------------------------------------------------------------------------------


@dataclass
class Routed:
    """A micro-batch whose tokens go to given experts."""

    batch: Batch
    routes_BSLK: torch.Tensor

    @property
    def inputs(self) -> Inputs:
        return replace(self.batch.inputs, routes_BSLK=self.routes_BSLK)

    @property
    def targets_BS(self) -> torch.Tensor:
        return self.batch.targets_BS

    @property
    def num_tokens(self) -> int:
        return self.batch.num_tokens

    def to(self, device: torch.device) -> Self:
        return type(self)(self.batch.to(device), self.routes_BSLK.to(device))


def train(
    recipe: str, words: Sequence[str], routes: Sequence[torch.Tensor] | None = None
) -> tuple[list[float], list[torch.Tensor]]:
    """Return each step's loss, and the experts that each micro-batch's tokens went to.

    The experts are [B, S, L, K], on the CPU. ``routes``: the experts of another run, to which
    tokens are sent instead. With these the list of experts is empty.
    """
    losses, went = [], []
    with trainer_of(recipe, words) as trainer:
        engine, config = trainer.engine, trainer.config
        layers: list[torch.Tensor] = []
        for router in trainer.model.modules():
            if isinstance(router, Router):
                router.register_forward_hook(lambda _, args, out: layers.append(out.ids_TK))
        for step in range(trainer.total_steps):
            batches = trainer.loader.next_step()
            for batch in batches if routes is None else ():
                layers.clear()
                engine.forward([batch], trainer.objective)
                ids_TLK = torch.stack(layers, 1).cpu()
                went.append(ids_TLK.unflatten(0, batch.tokens_BS.shape))
            given = went if routes is None else routes
            first = step * len(batches)
            sent = [Routed(batch, given[first + i]) for i, batch in enumerate(batches)]
            totals = engine.forward_backward(sent, trainer.objective)
            engine.step(learning_rate(step, trainer.total_steps, config.optim))
            losses.append(totals.terms["cross_entropy"].item())
    return losses, went


def compare_losses(recipe: str, words: Sequence[str], seeds: Sequence[int], path: str) -> None:
    """Print the differences after each tenth of the steps, and draw those of all steps."""
    apart: dict[str, list[list[float]]] = {name: [] for name in PRECISIONS if name != "fp32"}
    for seed in seeds:
        # The runs are not compiled: recording and replacing routes would each need a compilation.
        mine = [*words, f"train.seed={seed}", "compile.enabled=no"]
        exact, routes = train(recipe, [*mine, *PRECISIONS["fp32"]])
        print(f"seed {seed}: fp32's loss goes from {exact[0]:.4f} to {exact[-1]:.4f}", flush=True)
        for name, differences in apart.items():
            losses, _ = train(recipe, [*mine, *PRECISIONS[name]], routes)
            differences.append([a - b for a, b in zip(losses, exact, strict=True)])
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    print(f"loss minus fp32's, nats; mean (least to greatest) of {len(seeds)} seeds")
    for name, differences in apart.items():
        columns = list(zip(*differences, strict=True))
        steps = range(1, len(columns) + 1)
        axis.plot(steps, [statistics.fmean(column) for column in columns], label=name)
        axis.fill_between(steps, list(map(min, columns)), list(map(max, columns)), alpha=0.25)
        for last in sorted({-(-len(columns) * tenth // 10) for tenth in range(1, 11)}):
            c = columns[last - 1]
            mean, spread = statistics.fmean(c), f"({min(c):+.1e} to {max(c):+.1e})"
            print(f"  {name} step {last}: {mean:+.1e} {spread}")
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set(xlabel="step", ylabel="loss minus fp32's (nats a token)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=130)


def compare_gradients(recipe: str, words: Sequence[str]) -> None:
    """Print the losses of all precisions, and the table of their gradients' errors."""
    losses, gradients = {}, {}
    for name, precision in PRECISIONS.items():
        losses[name], gradients[name] = gradients_of(recipe, [*words, *precision])
    print("loss: " + ", ".join(f"{name} {loss:.5f}" for name, loss in losses.items()))
    exact = gradients.pop("fp32")
    print("gradients' error: " + " / ".join(gradients))
    print(table({name: errors_by_group(found, exact) for name, found in gradients.items()}))


def main() -> int:
    """Run the comparisons that the command line asks for."""
    parser = argparse.ArgumentParser(
        description="Compare precisions and reductions.", allow_abbrev=False
    )
    parser.add_argument("recipe")
    parser.add_argument("--reductions", metavar="PICTURE")
    parser.add_argument("--losses", metavar="PICTURE")
    parser.add_argument("--seeds", type=int, default=5)
    args, words = parser.parse_known_args()
    seeds = range(args.seeds)
    if args.reductions:
        compare_reductions(args.recipe, words, seeds, args.reductions)
    if args.losses:
        compare_losses(args.recipe, words, seeds, args.losses)
    if not (args.reductions or args.losses):
        compare_gradients(args.recipe, words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
