"""Time the update of a generator's weights from a sharded trainer on the same devices.

    torchrun --nproc-per-node 4 scripts/bench_update.py [--preset qwen3-30b-a3b] [--layers N]
        [--ep DEGREE] [--tp DEGREE] [--results FILE.jsonl]

The script builds an engine like a run's (fp32 weights; there are no moments before the first step),
and a replica in the compute dtype with its generator. Then it gives the engine other random
weights. It prints the median time of five updates, from the common start of all ranks to the end of
the slowest, and the results of these checks:

    addresses   parameters are at the same addresses as before
    values      every rank's pieces are where they belong, in the dtype they are used in, and ranks
                that have the same parameter have the same sum of its bytes
    tokens      greedy tokens are those of a generator that is made anew from the new weights, and
                not those of before
    trainer     how many of these tokens the engine's own forward of the whole text prefers

The exit code is 1 if one of the first three does not hold. One process needs no torchrun.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_train import commit, device_name

from moetrain.config import Config
from moetrain.config.environment import launched_place
from moetrain.generate.engine import Generator
from moetrain.generate.request import Request, SamplingParams
from moetrain.generate.weights import WeightUpdate, replica
from moetrain.models.transformer import Inputs, Transformer
from moetrain.parallel.apply import draw_values
from moetrain.parallel.world import join_world
from moetrain.train.engine import Engine
from moetrain.train.metrics import peak_memory_gib
from moetrain.train.session import resolve_run

REPEATS = 5
PROMPT, NEW_TOKENS = 32, 32


def main() -> int:
    """Print the figures on rank 0."""
    parser = argparse.ArgumentParser(description="Time weight updates.", allow_abbrev=False)
    parser.add_argument("--preset", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="default: the preset's")
    parser.add_argument("--ep", type=int, help="default: all ranks")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    engine = make_engine(args)
    row = bench(engine)
    if engine.world.is_main:
        print(report(row), flush=True)
        if args.results is not None:
            with args.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    engine.world.leave()
    return 0 if row["addresses"] and row["values"] and row["tokens"] else 1


def bytes_received(update: WeightUpdate) -> int:
    """Return the bytes of one update that come from other ranks."""
    rank = update.engine.stages.rank
    gathered = sum(g.size * (g.group.size() - 1) for g in update._gathers)
    return gathered + sum(x.nbytes for x, holder in update._from_stages if holder != rank)


def make_engine(args: argparse.Namespace) -> Engine:
    """Return an engine with random weights on the ranks of the world."""
    place = launched_place()
    ranks = 1 if place is None else place.world_size
    words = [f"model.preset={args.preset}", f"parallel.tp={args.tp}"]
    words += [f"parallel.ep={ranks if args.ep is None else args.ep}", f"train.device={args.device}"]
    words += ["data.source=synthetic", "data.seq_len=256", "compile.enabled=no"]
    words += [f"train.global_batch_size={ranks}", "train.micro_batch_size=1"]
    if args.layers is not None:
        words.append(f"model.num_layers={args.layers}")
    config, arch = resolve_run(Config.load(None, words))
    engine = Engine(config, arch, join_world(config, arch))
    assert not engine.optimizer.state  # moments are made in the first step
    return engine


def bench(engine: Engine) -> dict[str, Any]:
    """Time the updates, check them, and return the row of results."""
    world = engine.world
    generator, update = make_generator(engine)
    update()  # connects the ranks, and lets the allocator grow
    before = tokens_of(engine, generator)
    parameters = list(generator.model.named_parameters())
    addresses = [p.data_ptr() for _, p in parameters]
    draw_values(engine.fsdp, engine.config.model.init_std, engine.config.train.seed + 1)
    seconds = [timed(engine, update) for _ in range(REPEATS)]
    peak = peak_memory_gib(world.device)
    tokens = tokens_of(engine, generator)
    unchanged = [p.data_ptr() for p in generator.model.parameters()] == addresses
    right = values_are_right(engine, generator.model)
    fresh, fresh_update = make_generator(engine)
    fresh_update()
    is_new = tokens == tokens_of(engine, fresh) and tokens != before
    return {
        "hardware": f"{world.size} x {device_name(world.device)}",
        "torch": torch.__version__,
        "commit": commit(),
        "preset": engine.config.model.preset,
        "layers": engine.arch.num_layers,
        "parameters": engine.arch.num_params(),
        "mesh": f"{world.dims.describe()}, ep {world.dims.ep}",
        "seconds": statistics.median(seconds),
        "slowest_seconds": max(seconds),
        "collectives": len(update._gathers) + len(update._from_stages),
        "bytes_written": sum(x.nbytes for n, x in parameters if n not in generator.borrowed),
        "bytes_received": bytes_received(update),
        "memory_gib": peak,
        "addresses": on_all(engine, unchanged),
        "values": on_all(engine, right),
        "tokens": on_all(engine, is_new),
        "trainer_agrees": agreement(engine, tokens),
    }


def make_generator(engine: Engine) -> tuple[Generator, WeightUpdate]:
    """Return a generator beside ``engine``, with room for the text of :func:`tokens_of`."""
    model, experts = replica(engine)
    generator = Generator(model, num_pages=1, page_size=64, experts=experts)
    return generator, WeightUpdate(engine, generator)


def prompt_of(engine: Engine) -> list[int]:
    """Return random ids, equal on tensor parallel ranks, which read them together."""
    generator = torch.Generator().manual_seed(engine.world.data_rank)
    return torch.randint(0, engine.arch.vocab_size, (PROMPT,), generator=generator).tolist()


def tokens_of(engine: Engine, generator: Generator) -> list[int]:
    """Return the likeliest tokens after this rank's prompt."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
    ((completion,),) = generator.generate([Request("a", tuple(prompt_of(engine)), params)])
    return completion.tokens


def timed(engine: Engine, update: WeightUpdate) -> float:
    """Return the seconds of one update, from the common start to the slowest rank's end."""
    wait(engine)
    start = time.perf_counter()
    update()
    if engine.world.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = torch.tensor(time.perf_counter() - start, device=engine.world.device)
    if engine.world.size > 1:
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def wait(engine: Engine) -> None:
    """Wait until every rank's device is idle."""
    if engine.world.device.type == "cuda":
        torch.cuda.synchronize()
    if engine.world.size > 1:
        dist.barrier()


@torch.no_grad()
def values_are_right(engine: Engine, model: Transformer) -> bool:
    """Return True if this rank's pieces are in place in ``model``, and ranks agree."""
    parameters, meshes, right = dict(model.named_parameters()), engine.world.meshes, True
    for name, member in engine.fsdp.members.items():
        layout, mine = member.layout, parameters[name]
        rows, *rest = layout.box
        is_part = mine.shape != layout.shape  # this rank's experts
        first = layout.gathered_box[0].start if is_part else 0
        piece = mine[(slice(rows.start - first, rows.stop - first), *rest)]
        right &= torch.equal(piece, member.local.to(mine.dtype))
        sharers = meshes.expert_parameters.get_group("efsdp") if is_part else meshes.tokens
        total = mine.view(torch.uint8).sum(dtype=torch.int64)
        extremes = torch.stack((total, -total))
        if sharers.size() > 1:
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=sharers)
        right &= bool(extremes[0] == -extremes[1])
    return right


def on_all(engine: Engine, flag: bool) -> bool:
    """Return True if ``flag`` holds on every rank."""
    wrong = torch.tensor(float(not flag), device=engine.world.device)
    return engine.world.sum(wrong).item() == 0


@torch.no_grad()
def agreement(engine: Engine, tokens: list[int]) -> float:
    """Return the share of all ranks' ``tokens`` that the engine's own forward finds likeliest."""
    model, world = engine.model, engine.world
    text = torch.tensor([[*prompt_of(engine), *tokens]], device=world.device)
    with engine.work(), engine.runner.exact_sizes():
        hidden_BSD, _ = model.backbone(Inputs(text))
        logits_BSV = model.vocabulary.logits(hidden_BSD, model.head_weight)
    same = (logits_BSV[0, PROMPT - 1 : -1].argmax(-1) == text[0, PROMPT:]).float().mean()
    return world.sum(same).item() / world.size


def report(row: dict[str, Any]) -> str:
    """Describe the row."""
    ms, slowest = row["seconds"] * 1e3, row["slowest_seconds"] * 1e3
    written, received = row["bytes_written"] / 2**30, row["bytes_received"] / 2**30
    return "\n".join(
        [
            f"{row['hardware']}, torch {row['torch']}, commit {row['commit']}: {row['preset']}, "
            f"{row['layers']} layers, {row['parameters'] / 1e9:.2f} B parameters, {row['mesh']}",
            f"update {ms:.1f} ms (slowest {slowest:.1f}), {row['collectives']} collectives; a rank "
            f"writes {written:.2f} GiB, receives {received:.2f}, and held {row['memory_gib']:.1f}",
            f"addresses unchanged: {row['addresses']}, values right: {row['values']}, "
            f"tokens of the new weights: {row['tokens']}, "
            f"preferred by the trainer: {row['trainer_agrees']:.1%}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
