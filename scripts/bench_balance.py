"""Benchmark redundant experts (``moe.redundant_experts``): forced skew, and a simulation.

    torchrun --nproc-per-node 2 scripts/bench_balance.py steps RECIPE [--section.key value ...]
        [--skews 1.2 1.5 1.9] [--places 0 2 4] [--bench-steps 8]
    python scripts/bench_balance.py simulate [--ranks 4 8] [--skew 2.4] [--tokens 40960]

``steps`` trains with forced routing: in layer i, rank i modulo W gets ``skew`` times the mean load,
and within a rank popularity is log-normal. Rank 0 prints tokens/s/GPU (the median step) beside
those of even routing without copies. ``simulate`` makes such routing for many ranks, plans the
copies, and estimates the time of a layer's forward and backward from the busiest rank's rows and
the bytes of copies, with the rate and the fixed times measured on two H100s (docs/log/experts.md).
"""

import argparse
import gc
import itertools
import os
from typing import Any

import torch
import torch.distributed as dist
from bench_train import mark, seconds_between, wait

from moetrain.config import Config
from moetrain.kernels.experts.replicas import plan_replicas
from moetrain.models.moe import Router
from moetrain.parallel.expert.redundant import RedundantExperts
from moetrain.train.loop import Trainer

EXPERTS, TOP_K, EXPERT_BYTES = 128, 8, 3 * 2048 * 768 * 2
LAYER_MS, EXPERTS_MS, MEASURED_TOKENS = 41.0, 18.75, 40960
"""Milliseconds of a layer's forward and backward, the experts' share of them, and tokens per rank
(2 H200, 12 layers, micro-batch 10)."""
FIXED_MS, BYTES_PER_MS, BARRIERS_MS = 0.2, 330e6, 0.11
"""Milliseconds for counts, plan, sort and saved tensors of a forward and a backward; bytes that a
rank sends or reads per millisecond; milliseconds of all barriers (two H100s)."""


def main() -> None:
    """Print a line for each skew and number of slots."""
    parser = argparse.ArgumentParser(description="Time copies of experts.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    steps = commands.add_parser("steps")
    steps.add_argument("recipe")
    steps.add_argument("--skews", type=float, nargs="+", default=(1.2, 1.5, 1.9))
    steps.add_argument("--places", type=int, nargs="+", default=(0, 2, 4))
    steps.add_argument("--bench-steps", type=int, default=8)
    simulated = commands.add_parser("simulate")
    simulated.add_argument("--ranks", type=int, nargs="+", default=(4, 8))
    simulated.add_argument("--skew", type=float, default=2.4)
    simulated.add_argument("--tokens", type=int, default=MEASURED_TOKENS)
    args, settings = parser.parse_known_args()
    if args.command == "simulate":
        for ranks, spare in itertools.product(args.ranks, (1, 2, 4, 8)):
            print(simulate(ranks, spare, args.skew, args.tokens), flush=True)
    else:
        run_steps(args, settings)


def skewed_ids(
    tokens: int, experts: int, top_k: int, ranks: int, skew: float, hot: int, seed: int, device: Any
) -> torch.Tensor:
    """Return int32 [T, K] of distinct experts; rank ``hot`` gets ``skew`` times the mean."""
    popular_E = torch.randn(experts, generator=torch.Generator().manual_seed(seed)) * 0.7
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator(device).manual_seed(1000 * seed + rank)
    uniform_TE = torch.rand(tokens, experts, device=device, generator=generator)
    gumbel_TE = -torch.log(-torch.log(uniform_TE.clamp(1e-9, 1 - 1e-7)))
    home_E = torch.arange(experts, device=device) // (experts // ranks)
    low, high = -5.0, 10.0
    ids_TK = torch.empty(0)
    for _ in range(24):
        raised = (low + high) / 2
        logits_E = popular_E.to(device) + raised * (home_E == hot)
        ids_TK = (gumbel_TE + logits_E).topk(top_k).indices
        share = (home_E[ids_TK] == hot).float().mean().item() * ranks
        low, high = (raised, high) if share < skew else (low, raised)
    return ids_TK.int()


def simulate(ranks: int, spare: int, skew: float, tokens: int, layers: int = 24) -> str:
    """Plan ``layers`` layers of ``tokens`` tokens per rank; return imbalance and cost."""
    sampled, totals = 2048, torch.zeros(7)
    for seed in range(layers):
        many = [
            skewed_ids(sampled, EXPERTS, TOP_K, ranks, skew, seed % ranks, seed, "cpu")
            for _ in range(ranks)
        ]
        counts_WE = torch.stack([ids.flatten().bincount(minlength=EXPERTS) for ids in many])
        counts_WE = (counts_WE * (tokens / sampled)).int()
        plan = plan_replicas(counts_WE, spare, 0, RedundantExperts.least_rows)
        before = counts_WE.sum(0).view(ranks, -1).sum(1)
        after, mean = plan.rows_WE.sum(1), counts_WE.sum() / ranks
        copies = plan.experts_WN[plan.experts_WN >= 0]
        sent = (copies // (EXPERTS // ranks)).bincount(minlength=ranks).max()
        scale = tokens / MEASURED_TOKENS
        layer_ms, experts_ms = LAYER_MS * scale, EXPERTS_MS * scale
        travel_ms = BARRIERS_MS + 2 * sent * EXPERT_BYTES / BYTES_PER_MS
        copied_ms = layer_ms + experts_ms * (after.max() / mean - 1) + FIXED_MS
        plain_ms = layer_ms + experts_ms * (before.max() / mean - 1)
        figures = (before.max() / mean, after.max() / mean, len(copies), sent)
        shares = (layer_ms / ms for ms in (plain_ms, copied_ms + travel_ms, copied_ms))
        totals += torch.tensor([*figures, *shares])
    before, after, copies, sent, plain, shown, hidden = (totals / layers).tolist()
    return (
        f"{ranks} ranks, {spare} places: busiest rank {before:.2f} -> {after:.4f} of the mean, "
        f"{copies:.1f} copies a layer, {sent:.1f} of one rank ({sent * EXPERT_BYTES / 1e6:.0f} MB, "
        f"{sent * EXPERT_BYTES / BYTES_PER_MS:.2f} ms); {plain:.1%} -> "
        f"{shown:.1%} of even speed if nothing hides the copying, {hidden:.1%} if all of it is"
    )


def run_steps(args: argparse.Namespace, settings: list[str]) -> None:
    """Train with every number of slots under every skew."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    forward = Router.forward

    def forced(self: Any, x_TD: torch.Tensor, is_pad_T: Any = None, ids_TK: Any = None) -> Any:
        return forward(self, x_TD, is_pad_T, getattr(self, "given_TK", None))

    Router.forward = forced
    even = None
    for spare in args.places:
        own = [f"--moe.redundant_experts={spare}"] * (spare > 0)
        trainer = Trainer(Config.load(args.recipe, [*settings, *own]))
        routers = [m for m in trainer.model.modules() if isinstance(m, Router)]
        tokens = trainer.config.train.micro_batch_size * trainer.config.data.seq_len
        for skew in (None, *args.skews):
            for i, router in enumerate(routers):
                sizes = (router.sizes.num_experts, router.top_k)
                how = (dist.get_world_size(), skew or 1, i % dist.get_world_size(), i, device)
                ids_R = torch.arange(tokens * sizes[1], device=device) * 11 % sizes[0]
                ids_TK = ids_R.view(tokens, -1).int()
                router.given_TK = ids_TK if skew is None else skewed_ids(tokens, *sizes, *how)
            loss = trainer.train_step().loss
            for _ in range(2):
                trainer.train_step()
            moments = [mark(device)]
            for _ in range(args.bench_steps):
                trainer.train_step()
                moments.append(mark(device))
            wait(trainer)
            each = sorted(seconds_between(*pair) for pair in itertools.pairwise(moments))
            rate = tokens / each[len(each) // 2]
            even = even or rate
            if dist.get_rank() == 0:
                print(
                    f"{spare} places, skew {skew}: {rate:,.0f} tokens/s/GPU, {rate / even:.1%} of "
                    f"even without copies, loss {loss.item():.4f}",
                    flush=True,
                )
        del trainer, routers
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
