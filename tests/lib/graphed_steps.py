"""Helpers of tests/runtime/test_graphs.py that other tests use too."""

import torch

from moetrain.data.loader import Batch
from moetrain.train.metrics import read_metrics
from moetrain.train.objectives import CrossEntropy
from tests.lib.engines import ROWS, SEQ_LEN, make_rows, objective_of

ON = "compile.cuda_graphs=yes"


def packed(step, documents, micro=ROWS):
    """Return a step's micro-batches, each cut into this many documents."""
    batches = []
    for tokens_BS, targets_BS in zip(*(x.split(micro) for x in make_rows(step)), strict=True):
        inner = torch.arange(SEQ_LEN, micro * SEQ_LEN, SEQ_LEN)  # every row begins a document
        generator = torch.Generator().manual_seed(step)
        rest = [
            t for t in torch.randperm(micro * SEQ_LEN, generator=generator).tolist() if t % SEQ_LEN
        ]
        cuts = sorted([*inner.tolist(), *rest[: documents - micro]])
        ends = torch.tensor([0, *cuts, micro * SEQ_LEN], dtype=torch.int32)
        at = torch.arange(micro * SEQ_LEN)
        starts = ends[torch.searchsorted(ends, at, right=True) - 1]
        batches.append(Batch(tokens_BS, targets_BS, (at - starts).view(tokens_BS.shape), ends))
    return batches


# ---- steps --------------------------------------------------------------------------------------

DOCUMENTS = [9, 12, 16, 20, 9, 30, 16, 9]


def run_steps(engine, micro=ROWS, between=lambda engine, step: None):
    """Return losses, norms and routing of steps with varying document counts and learning rates."""
    objective, numbers = objective_of(engine), []
    rank, ranks = engine.world.data_rank, engine.world.dims.data_ranks
    for step, documents in enumerate(DOCUMENTS):
        documents = min(documents + 9 * rank, micro * SEQ_LEN // 2)
        batches = packed(step, documents, micro)[rank::ranks]
        totals = engine.forward_backward(batches, objective)
        outcome = engine.step(1e-2 / (step + 1))
        counts = totals.routing.counts_LE.cpu() if totals.routing else torch.zeros(1)
        numbers.append((totals.total, outcome.grad_norm, outcome.skipped, counts))
        between(engine, step)
    return [[x.tolist() for x in row] for row in numbers]


def look_between(engine, step):
    """Evaluate and load a state between steps, as a run does."""
    if step == 3:
        engine.forward(packed(9, 12), CrossEntropy())
        with torch.no_grad():
            state = {
                g: {n: x.tensor.clone() * 0.9 for n, x in p.items()}
                for g, p in engine.state().items()
            }
        if engine.world.size == 1:
            engine.load_state({"model": state["model"]})
        for member in engine.fsdp.members.values():
            if member.local.is_floating_point():  # quantised members are left alone
                member.local.detach().mul_(0.9)
    if step == 5:
        engine.forward(packed(9, 12), CrossEntropy())


LORA = ["lora.rank=8", "moe.bias_update_rate=0"]
CASES = {
    "plain": ([], ROWS),
    "accumulated": (["moe.aux_loss_scope=global_batch"], 2),
    "muon": (["optim.name=muon", "optim.state_dtype=bfloat16"], ROWS),
    "moments": (["optim.state_dtype=bfloat16", "optim.gradient_dtype=bfloat16"], 4),
    "float8": (["optim.state_dtype=float8", "optim.weight_dtype=bfloat16"], ROWS),
    "recomputed": (["activation.policy=selective"], ROWS),
    "adapters": (LORA, ROWS),
    "coded": ([*LORA, "lora.base_dtype=nf4", "activation.policy=full"], ROWS),
    "coded, one block": ([*LORA, "lora.base_dtype=mxfp4", "model.num_layers=1"], ROWS),
    "from the host": ([*LORA, "lora.base_dtype=nf4", "lora.offload_experts=yes"], ROWS),
}


STATIC = ["parallel.ep=2", "moe.dispatcher=deepep", "moe.dispatch_mode=static"]
COPY = "parallel.fsdp_transport=copy"
RANKS = {
    "collectives": (["parallel.fsdp_transport=nccl"], 4),
    "copies": ([COPY, "train.dtype=bfloat16"], 4),
    "accumulated": ([COPY, "moe.aux_loss_scope=global_batch"], 2),
    "muon": (["optim.name=muon", "optim.state_dtype=bfloat16"], 4),
    "recomputed": (["activation.policy=full"], 4),
}


WIDE = ["model.hidden_size=64", "model.head_dim=16", "model.moe_intermediate_size=32"]
GPU = [*WIDE, "train.device=cuda", "train.dtype=bfloat16"]


RANKS_GPU = RANKS | {
    "moments": (["optim.state_dtype=bfloat16", "optim.gradient_dtype=bfloat16"], 4),
    "float8": (["optim.state_dtype=float8", "optim.weight_dtype=bfloat16"], 4),
    "float8 by collectives": (
        ["optim.state_dtype=float8", "optim.weight_dtype=bfloat16", "parallel.fsdp_transport=nccl"],
        4,
    ),
    "late": (["parallel.reduce_at=last"], 2),
    "replicas": (["parallel.dp_replicate=2"], 4),
    "compiled": (["compile.enabled=yes"], 4),
    "static": ([*STATIC, "moe.static_capacity=2"], 4),
    "static, rows dropped": ([*STATIC, "moe.static_capacity=1"], 4),
}


def numbers_of(folder):
    """Return the last logged losses of each step."""
    rows = read_metrics(folder / "metrics.jsonl")
    keys = ("loss", "grad_norm", "eval_loss")
    return {(row["step"], key): row[key] for row in rows for key in keys if key in row}
