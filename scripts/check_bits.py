"""Count the log-probabilities and routing choices in which generation and training differ.

    python scripts/check_bits.py [--preset qwen3-30b-a3b] [--layers 6] [--tokens 1000000]
        [--train-steps 0] [--shared]
    torchrun --nproc-per-node 4 scripts/check_bits.py ...       (expert parallel over all ranks)

The generator completes requests of random lengths, temperatures, filters and group sizes, some with
a common beginning. Its cache is too small for all of them, so some are preempted and prefilled
again. Prompts are read in chunks, shared prefixes once, and steps run in CUDA graphs. The
completed texts are shuffled and packed into rows of 4,096 tokens. They go through the engine's
``forward_backward``, compiled and with recomputation, and once more through an eager forward, which
records the routers' choices. The exit code is 1 if a bit differs.

``--train-steps`` trains first, on the text of Python's standard library. ``--shared`` is for models
whose fp32 weights do not fit beside the generator's: the trainer's blocks, compiled, then run on
the generator's own weights, without a backward.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from moetrain.config import Config
from moetrain.config.environment import launched_place
from moetrain.data.loader import Batch, Loader, build_data
from moetrain.data.packing import IGNORE_INDEX
from moetrain.generate.engine import Generator
from moetrain.generate.request import Completion, Request, SamplingParams
from moetrain.generate.weights import WeightUpdate, replica
from moetrain.models.moe import Router
from moetrain.models.transformer import Transformer, compile_blocks
from moetrain.parallel.world import join_world
from moetrain.train.engine import Engine
from moetrain.train.objectives import Outputs, Pretraining, Term
from moetrain.train.session import resolve_run

ROW, ROWS = 4096, 4  # tokens of a row, and rows of a micro-batch
REQUESTS = 400  # per round
CACHE_PAGES = 900  # pages of 64 tokens: too few for the 192 sequences that may run


class Collect:
    """Objective that keeps every token's log-probability."""

    balances = False

    def __init__(self) -> None:
        self.logprobs: list[torch.Tensor] = []

    def sizes(self, batches: Sequence[Batch]) -> dict[str, int]:
        return {"targets": 1}

    def terms(self, model: Transformer, outputs: Outputs, batch: Batch, sizes) -> dict[str, Term]:
        hidden_TD = outputs.hidden_BSD.flatten(0, 1)
        targets_T = batch.targets_BS.flatten()
        losses = model.vocabulary.token_losses(hidden_TD, model.head_weight, targets_T)
        self.logprobs.append(-losses.loss_T.detach())
        return {"loss": Term(1e-6 * losses.loss_T.sum())}


@dataclass
class Counts:
    """Counts of comparisons and differences on this rank."""

    tokens: int = 0
    differ: int = 0
    largest: float = 0.0
    routed: int = 0
    rerouted: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"generation": 0.0, "training": 0.0})


def main() -> int:
    """Print a line per round on rank 0."""
    parser = argparse.ArgumentParser(description="Compare bits.", allow_abbrev=False)
    parser.add_argument("--preset", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of all ranks")
    parser.add_argument("--train-steps", type=int, default=0)
    parser.add_argument("--shared", action="store_true")
    args, settings = parser.parse_known_args()
    place = launched_place()
    ranks = 1 if place is None else place.world_size
    words = [f"model.preset={args.preset}", f"parallel.ep={ranks}", "kernels.attention=exact"]
    words += ["compile.enabled=yes", "activation.policy=full", f"data.seq_len={ROW}"]
    words += [f"train.micro_batch_size={ROWS}", f"train.global_batch_size={ROWS * ranks}"]
    words += ["data.source=stdlib"] if args.train_steps else ["data.source=synthetic"]
    words += [f"model.num_layers={args.layers}"] if args.layers else []
    config, arch = resolve_run(Config.load(None, words + settings))
    world = join_world(config, arch)
    check = Shared(config, arch, world) if args.shared else Trained(config, arch, world)
    if args.train_steps:
        check.train(args.train_steps)
    counts, total, differ, rerouted, number = Counts(), 0, 0, 0, 0
    while total < args.tokens:
        check.round(number * ranks + world.rank, counts)
        number += 1
        numbers = [counts.tokens, counts.differ, counts.routed, counts.rerouted]
        sums = torch.tensor(numbers, device=world.device)
        if ranks > 1:
            dist.all_reduce(sums)
        total, differ, routed, rerouted = (int(number) for number in sums)
        if world.is_main:
            rate = counts.tokens / counts.seconds["generation"]
            again = check.generator.scheduler.figures["generator/read_again"]
            print(
                f"{differ} of {total} log-probabilities and {rerouted} of {routed} (token, layer) "
                f"routings differ, {again} tokens read again, "
                f"{rate:.0f} tokens/s a rank, prompts and first compilation included",
                flush=True,
            )
    world.leave()
    return int(differ + rerouted > 0)


def requests_of(seed: int, vocabulary: int) -> list[Request]:
    """Return a mixture of requests with all kinds of parameters."""
    draw = random.Random(seed)
    common = [[draw.randrange(vocabulary) for _ in range(draw.randint(64, 400))] for _ in range(20)]
    made = []
    for i in range(REQUESTS):
        tokens = [draw.randrange(vocabulary) for _ in range(draw.randint(8, 700))]
        if draw.random() < 0.4:
            tokens = draw.choice(common) + tokens[: draw.randint(1, 60)]
        params = SamplingParams(
            max_tokens=draw.randint(1, 400),
            temperature=draw.choice((0, 0.7, 1.0, 1.0, 1.3)),
            top_k=draw.choice((0, 0, 0, 50)),
            top_p=draw.choice((1.0, 1.0, 0.9)),
            seed=draw.randrange(10**9),
            n=draw.choice((1, 1, 2, 4)),
            routes=draw.random() < 0.5,
        )
        made.append(Request(f"{seed}-{i}", tuple(tokens), params))
    return made


@dataclass
class Text:
    """One completion, and the place of its tokens in the micro-batches of a round."""

    tokens: list[int]
    start: int
    """First token of the completion."""
    completion: Completion
    batch: int = -1
    first: int = -1


def pack(texts: Sequence[Text], least: int) -> list[Batch]:
    """Pack, best fit and longest first, into at least ``least`` micro-batches of full size."""
    rows: list[list[Text]] = []
    used: list[int] = []
    for text in sorted(texts, key=lambda text: -len(text.tokens)):
        fitting = [i for i, n in enumerate(used) if n + len(text.tokens) <= ROW]
        best = max(fitting, key=lambda i: used[i], default=len(rows))
        if best == len(rows):
            rows.append([])
            used.append(0)
        rows[best].append(text)
        used[best] += len(text.tokens)
    rows += [[]] * (max(least * ROWS, -(-len(rows) // ROWS) * ROWS) - len(rows))
    return [_batch(rows[i : i + ROWS], i // ROWS) for i in range(0, len(rows), ROWS)]


def _batch(rows: Sequence[Sequence[Text]], number: int) -> Batch:
    tokens = torch.zeros(ROWS, ROW, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORE_INDEX)
    positions, is_pad, ends = torch.zeros_like(tokens), torch.zeros_like(tokens).bool(), [0]
    for b, row in enumerate(rows):
        at = 0
        for text in row:
            n = len(text.tokens)
            text.batch, text.first = number, b * ROW + at
            tokens[b, at : at + n] = torch.tensor(text.tokens)
            targets[b, at : at + n - 1] = tokens[b, at + 1 : at + n]
            positions[b, at : at + n] = torch.arange(n)
            at += n
            ends.append(b * ROW + at)
        if at < ROW:
            positions[b, at:] = torch.arange(ROW - at)
            is_pad[b, at:] = True
            ends.append((b + 1) * ROW)
    return Batch(tokens, targets, positions, torch.tensor(ends, dtype=torch.int32), is_pad)


class Trained:
    """An engine, and a generator that receives its weights."""

    def __init__(self, config: Config, arch, world) -> None:
        self.config, self.arch, self.world = config, arch, world
        self.build()
        self.generator = Generator(
            self.model,
            experts=self.experts,
            num_pages=CACHE_PAGES,
            max_sequences=192,
            max_tokens=3000,
        )
        self.update()

    def build(self) -> None:
        self.engine = Engine(self.config, self.arch, self.world)
        self.model, self.experts = replica(self.engine)

    def update(self) -> None:
        WeightUpdate(self.engine, self.generator)()

    def train(self, steps: int) -> None:
        train, world = self.config.train, self.world
        loader = Loader(
            build_data(self.config, self.arch.vocab_size).train,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            seed=0,
            rank=world.data_rank,
            world_size=world.dims.data_ranks,
        )
        objective = Pretraining.of(self.config, self.arch)
        losses = []
        for _ in range(steps):
            totals = self.engine.forward_backward(loader.next_step(), objective)
            losses.append(totals.terms["cross_entropy"])
            self.engine.step(3e-4)
        if world.is_main:
            print(f"trained {steps} steps, loss {losses[0].item():.2f} to {losses[-1].item():.2f}")
        self.update()

    def round(self, seed: int, counts: Counts) -> None:
        """Generate, train on it, compare."""
        requests = requests_of(seed, self.arch.vocab_size)
        begun = time.perf_counter()
        found = self.generator.generate(requests)
        torch.cuda.synchronize()
        counts.seconds["generation"] += time.perf_counter() - begun
        texts = [
            Text([*request.tokens, *completion.tokens], len(request.tokens), completion)
            for request, completions in zip(requests, found, strict=True)
            for completion in completions
        ]
        random.Random(seed).shuffle(texts)
        least = torch.tensor(len(pack(texts, 0)), device=self.world.device)
        if self.world.size > 1:
            dist.all_reduce(least, dist.ReduceOp.MAX)
        batches = pack(texts, int(least))
        for find, counted in ((self.logprobs, counts), (self.eager, None)):
            logprobs = find(batches)
            for text in texts:
                self.compare(text, logprobs[text.batch], counted)
        for text in texts:
            self.compare_routes(text, counts)

    def logprobs(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return training's log-probability of every token of each batch."""
        collect = Collect()
        for batch in batches:
            self.engine.forward_backward([batch], collect)
            self.engine.forget()
        return [x.cpu() for x in collect.logprobs]

    def eager(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return the same without the compiler; record the routers' choices."""
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), self.engine.work():
            return self.noting(self.engine.model, batches)

    def noting(self, model: Transformer, batches: Sequence[Batch]) -> list[torch.Tensor]:
        chosen: list[torch.Tensor] = []
        self.routes: list[torch.Tensor] = []
        routers = [module for module in model.modules() if isinstance(module, Router)]
        hooks = [
            router.register_forward_hook(lambda module, args, routed: chosen.append(routed.ids_TK))
            for router in routers
        ]
        found = []
        for batch in batches:
            chosen.clear()
            found.append(self.forward(model, batch))
            self.routes.append(torch.stack(chosen, 1).cpu())
        for hook in hooks:
            hook.remove()
        return found

    def forward(self, model: Transformer, batch: Batch) -> torch.Tensor:
        batch = batch.to(self.world.device)
        hidden_TD = model.backbone(batch.inputs)[0].flatten(0, 1)
        targets_T = batch.targets_BS.flatten()
        losses = model.vocabulary.token_losses(hidden_TD, model.head_weight, targets_T)
        return -losses.loss_T.cpu()

    def compare(self, text: Text, logprobs_T: torch.Tensor, counts: Counts | None) -> None:
        first = text.first + text.start - 1
        mine = torch.tensor(text.completion.logprobs)
        differs = mine != logprobs_T[first : first + len(mine)]
        if counts is None:
            assert not differs.any(), "the eager forward differs"
            return
        counts.tokens += len(mine)
        counts.differ += int(differs.sum())

    def compare_routes(self, text: Text, counts: Counts) -> None:
        mine = text.completion.routes
        if mine is not None:
            theirs = self.routes[text.batch][text.first : text.first + len(mine)]
            differs = (mine != theirs).any(-1)
            counts.routed += differs.numel()
            counts.rerouted += int(differs.sum())


class Shared(Trained):
    """The trainer's blocks on the generator's weights."""

    def build(self) -> None:
        assert self.world.size == 1, "--shared is for one process"
        with torch.device("meta"):
            self.model = Transformer(self.arch, kernels=self.config.kernels).to(torch.bfloat16)
        self.model.to_empty(device=self.world.device)
        generator = torch.Generator(self.world.device).manual_seed(0)
        for weight in self.model.parameters():
            weight.data.fill_(1) if weight.dim() == 1 else weight.data.normal_(
                0, 0.02, generator=generator
            )
        self.experts, self.models = None, []
        for _ in range(2):  # once compiled, once not
            with torch.device("meta"):
                model = Transformer(self.arch, kernels=self.config.kernels)
            model.load_state_dict(self.model.state_dict(), assign=True)
            model.compute_dtype = torch.bfloat16
            self.models.append(model)
        compile_blocks(self.models[0])

    def update(self) -> None:
        pass

    def logprobs(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self.forward(self.models[0], batch) for batch in batches]

    def eager(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        with torch.no_grad():
            return self.noting(self.models[1], batches)


if __name__ == "__main__":
    sys.exit(main())
