"""Time generation: decoding at given batch sizes, prefill, sleeping, and a peer.

    python scripts/bench_generate.py [--preset qwen3-30b-a3b] [--layers N] [--batches 64,256]
        [--context 1024] [--draft N] [--cache latent] [--decode_only] [--peer COMMAND]
        [--results FILE.jsonl]
    python scripts/bench_generate.py --path MODEL --batches 1 --draft 2   (a checkpoint's own text)
    torchrun --nproc-per-node 4 scripts/bench_generate.py ...      (expert parallel over all ranks)

With ``--path`` a checkpoint in bf16 continues its own text greedily, without drafts and with one to
N draft tokens, and the share of accepted drafts is printed; nothing else is timed. With random
weights no draft would be accepted.

Otherwise weights are random, in bf16; batch sizes are per rank. A decoding step is timed on the
host, as a whole: it plans, runs, waits for the tokens and keeps them. The result is the median of
30 steps. Its floor is the time of the memory traffic, at the rate of a copy within the device:
every key and value (or latent) is read once, and so is every weight except the embedding and the
experts that no token is expected to choose. Prefill is compared with the trainer's compiled forward
of as many packed tokens (one rank).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from bench_train import commit, device_name

from moetrain.config import Config, ConfigError
from moetrain.config.environment import launched_place
from moetrain.generate.engine import Generator, load_model
from moetrain.generate.paged_attention import PagedAttention, PagedTokens
from moetrain.generate.ranks import ExpertParallel
from moetrain.generate.request import Request, SamplingParams, chat_ids
from moetrain.models.architecture import Architecture
from moetrain.models.generation import SeveralCaches
from moetrain.models.parts.multi_token import with_multi_token
from moetrain.models.transformer import Inputs, Transformer, compile_blocks
from moetrain.parallel.apply import choose_dispatcher
from moetrain.parallel.world import World, join_world
from moetrain.train.session import resolve_run

CHUNK = 16_384  # tokens that a step reads
WARMUP, STEPS = 6, 30


def main() -> int:
    """Print one line per figure, on rank 0."""
    parser = argparse.ArgumentParser(description="Time generation.", allow_abbrev=False)
    parser.add_argument("--preset", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="default: the preset's")
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--draft", type=int, default=0, help="length of drafts")
    parser.add_argument("--cache", choices=["expanded", "latent"], default="expanded")
    parser.add_argument("--decode_only", action="store_true", help="time nothing but decoding")
    parser.add_argument("--path", help="a checkpoint to time with and without drafts")
    parser.add_argument("--peer", help="a shell command to run afterwards on the same device")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    if args.path:
        drafting(args.path, [int(word) for word in args.batches.split(",")], args.draft)
        return 0
    place = launched_place()
    ranks = 1 if place is None else place.world_size
    words = [f"model.preset={args.preset}", f"parallel.ep={ranks}", "kernels.attention=exact"]
    words += ["data.source=synthetic", f"data.seq_len={args.context}"]
    words += [f"train.global_batch_size={ranks}", "train.micro_batch_size=1"]
    words += [f"model.num_layers={args.layers}"] if args.layers else []
    config, arch = resolve_run(Config.load(None, words))
    arch = with_multi_token(arch, {}, "draft") if args.draft else arch
    world = join_world(config, arch)
    batches = [int(word) for word in args.batches.split(",")]
    model, experts = make_model(config, arch, world)
    generator = Generator(
        model,
        max_sequences=max(batches),
        max_tokens=CHUNK,
        experts=experts,
        draft=args.draft,
        cache=args.cache,
    )
    generator.warm_up()
    row: dict[str, Any] = {"preset": args.preset, "layers": arch.num_layers, "ranks": ranks}
    row |= {
        "context": args.context,
        "draft": args.draft,
        "cache": args.cache,
        "commit": commit(),
        "device": device_name(world.device),
    }
    bandwidth = copy_bandwidth(world.device)
    for batch in batches:
        say(world, row, f"decode_{batch}", decode(generator, world, batch, args.context, bandwidth))
    if not args.decode_only:
        say(world, row, "prompts", prompts(generator, world, args.context))
        say(world, row, "sleep", sleep(generator, world))
    if ranks == 1 and not args.decode_only:
        generator.sleep()
        say(world, row, "trainer_forward", trainer_forward(config, model, args.context))
    if args.results is not None and world.is_main:
        with args.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
    world.leave()
    if args.peer and world.is_main:
        del generator, model
        torch.cuda.empty_cache()
        return subprocess.run(args.peer, shell=True).returncode
    return 0


PROMPT = "Explain in detail, with examples, how a hash table works and where it is used."


def drafting(path: str, batches: list[int], most: int) -> None:
    """Print tokens per second and the share of accepted drafts, by batch size and drafts."""
    model, tokenizer = load_model(path, "auto", "auto", None, most)
    device, expected = model.embed.weight.device, {}
    try:
        ids = chat_ids(tokenizer, [{"role": "user", "content": PROMPT}])
    except ConfigError:  # it has no template
        ids = tuple(tokenizer.encode_prompt(PROMPT))
    for draft in range(most + 1):
        generator = Generator(
            model,
            tokenizer,
            num_pages=8 * max(batches) + 8,
            max_sequences=max(batches),
            draft=draft,
        )
        generator.warm_up()
        for batch in batches:
            params = SamplingParams(max_tokens=300, temperature=0.0)
            requests = [Request(str(i), (*ids, *ids[: i % 9]), params) for i in range(batch)]
            generator.generate(requests)  # loads what is left
            begun = now(device)
            found = [completions[0] for completions in generator.generate(requests)]
            seconds = now(device) - begun
            texts = [completion.tokens for completion in found]
            same = expected.setdefault(batch, texts) == texts
            drafted = sum(completion.num_drafted for completion in found)
            right = sum(completion.num_right for completion in found)
            rate = sum(map(len, texts)) / seconds
            print(f"draft {draft}  batch {batch}  tokens_per_second {rate:.1f}", end="  ")
            print(f"right {right}/{drafted}  same_tokens {same}", flush=True)
        generator.sleep()


def say(world: World, row: dict[str, Any], name: str, found: dict[str, Any]) -> None:
    """Keep and print a figure."""
    row[name] = found
    if world.is_main:
        print(name, *(f"{key} {value:.6g}" for key, value in found.items()), sep="  ", flush=True)


def make_model(
    config: Config, arch: Architecture, world: World
) -> tuple[Transformer, ExpertParallel | None]:
    """Return this rank's part of a model with random weights."""
    with torch.device("meta"):
        model = Transformer(arch, kernels=config.kernels).to(torch.bfloat16)
    experts = None
    if world.dims.ep > 1:
        group = world.meshes.expert_parameters.get_group("ep")
        dispatcher, _ = choose_dispatcher(config, arch, group, world.device, torch.bfloat16)
        experts = ExpertParallel(model, group, config.kernels.backend, dispatcher)
    model.to_empty(device=world.device)
    generator = torch.Generator(world.device)
    for name, weight in model.named_parameters():
        rank = world.rank if "experts" in name else 0
        generator.manual_seed(crc32(f"{name} {rank}".encode()))
        if weight.dim() == 1:
            weight.data.fill_(1)
        else:
            weight.data.normal_(0, 0.02, generator=generator)
    return model, experts


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a copy reads and writes."""
    x, y = (torch.empty(2**30, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(12):
        begun = now(device)
        y.copy_(x)
        times.append(now(device) - begun)
    return 2 * x.nbytes / statistics.median(times)


def now(device: torch.device) -> float:
    """Return the time once the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def submit(generator: Generator, world: World, batch: int, context: int, steps: int) -> list[str]:
    """Submit ``batch`` requests of random tokens."""
    draw, vocabulary = random.Random(world.rank), generator.model.arch.vocab_size
    names = [f"{batch}-{i}" for i in range(batch)]
    for i, name in enumerate(names):
        tokens = tuple(draw.randrange(vocabulary) for _ in range(context))
        generator.submit(Request(name, tokens, SamplingParams(max_tokens=steps, seed=i)))
    return names


def decode(
    generator: Generator, world: World, batch: int, context: int, bandwidth: float
) -> dict[str, Any]:
    """Return tokens per second and rank while all of ``batch`` decode, and the floor's share."""
    names = submit(generator, world, batch, context, steps=1000)
    while generator.experts is None and any_unread(generator):
        generator.step()
    for _ in range(-(-batch * context // CHUNK) + 2):  # all ranks run as many steps
        generator.step()
    for _ in range(WARMUP):
        generator.step()
    times = []
    for _ in range(STEPS):
        begun = now(world.device)
        generator.step()
        times.append(now(world.device) - begun)
    seconds = slowest(statistics.median(times), world)
    floor = bytes_of_step(generator, world, batch, context) / bandwidth
    for name in names:
        generator.abort(name)
    return {
        "tokens_per_second_per_device": batch / seconds,
        "step_ms": 1e3 * seconds,
        "of_the_floor": floor / seconds,
        "bandwidth_tb": bandwidth / 1e12,
    }


def any_unread(generator: Generator) -> bool:
    """Return True if prompts remain to be prefilled."""
    scheduler = generator.scheduler
    return bool(scheduler.waiting) or any(s.num_unread > 1 for s in scheduler.running)


def slowest(seconds: float, world: World) -> float:
    """Return the largest of all ranks."""
    found = torch.tensor(seconds, device=world.device, dtype=torch.float64)
    if world.size > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def bytes_of_step(generator: Generator, world: World, batch: int, context: int) -> float:
    """Return the bytes of weights and cache that a step must read on a rank."""
    model, arch = generator.model, generator.model.arch
    total = 0.0
    for name, weight in model.named_parameters():
        share = 1.0
        if "experts" in name:
            chosen = arch.num_experts_per_token / arch.num_experts
            share = 1 - (1 - chosen) ** (batch * world.size)
        if not name.startswith("embed"):
            total += share * weight.nbytes
    return total + batch * context * sum(pages[0, 0].nbytes for pages in paged(generator))


def paged(generator: Generator) -> list[torch.Tensor]:
    """Return the pages of all layers that are in memory: keys, values and latents."""
    found: list[torch.Tensor | None] = []
    for cache in generator.steps.caches:
        for one in cache.caches if isinstance(cache, SeveralCaches) else (cache,):
            if isinstance(one, PagedAttention):
                found += [one.keys_PZGd, one.values_PZGv]
            elif isinstance(one, PagedTokens):
                found.append(one.pages_PZd)
    return [pages for pages in found if pages is not None]


def prompts(generator: Generator, world: World, context: int) -> dict[str, Any]:
    """Return tokens per second and rank of steps that only prefill."""
    times = []
    for i in range(6):
        # All prefixes differ.
        names = submit(generator, world, CHUNK // context, context - i, steps=1)
        begun = now(world.device)
        generator.step()
        times.append(now(world.device) - begun)
        for name in names:
            generator.abort(name)
    seconds = slowest(statistics.median(times[2:]), world)
    return {"tokens_per_second_per_device": CHUNK / seconds, "step_ms": 1e3 * seconds}


def trainer_forward(config: Config, model: Transformer, context: int) -> dict[str, Any]:
    """Return tokens per second of the trainer's compiled forward with the same weights."""
    with torch.device("meta"):
        trained = Transformer(model.arch, kernels=config.kernels)
    trained.load_state_dict(model.state_dict(), assign=True)
    trained.compute_dtype = torch.bfloat16
    compile_blocks(trained)
    device = model.embed.weight.device
    shape = (CHUNK // context, context)
    tokens_BS = torch.randint(0, model.arch.vocab_size, shape, device=device)
    positions_BS = torch.arange(context, device=device).expand(shape).contiguous()
    ends = torch.arange(0, CHUNK + 1, context, dtype=torch.int32, device=device)
    times = []
    with torch.no_grad():
        for _ in range(8):
            begun = now(device)
            trained.backbone(Inputs(tokens_BS, positions_BS, cu_seqlens=ends))
            times.append(now(device) - begun)
    seconds = statistics.median(times[3:])
    return {"tokens_per_second_per_device": CHUNK / seconds, "step_ms": 1e3 * seconds}


def sleep(generator: Generator, world: World) -> dict[str, Any]:
    """Return the memory that sleeping frees, and whether the same tokens follow."""
    request = Request("sleep", tuple(range(100)), SamplingParams(max_tokens=20))
    before = generator.generate([request])[0][0].tokens
    held = sum(pages.nbytes for pages in paged(generator))
    free = torch.cuda.mem_get_info(world.device)[0]
    begun = now(world.device)
    generator.sleep()
    seconds = now(world.device) - begun
    freed = torch.cuda.mem_get_info(world.device)[0] - free
    generator.wake()
    same = generator.generate([request])[0][0].tokens == before
    return {
        "seconds": seconds,
        "freed_share": freed / held,
        "gib": freed / 2**30,
        "same": int(same),
    }


if __name__ == "__main__":
    sys.exit(main())
