"""Helpers of tests/system/test_parallel.py that other tests use too."""

import functools
import itertools

import torch
import torch.distributed as dist

from moetrain.config import Config
from moetrain.data.packing import IGNORE_INDEX
from moetrain.parallel import mesh
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from moetrain.train.objectives import routing_losses
from tests.lib.distributed import compile_by_turns

STEPS = 2  # the second tests updated weights; more steps would test the optimizer
TOLERANCE = 1e-5

LAYOUTS = {
    2: {
        "dp": ["parallel.dp_shard=2"],
        "ddp": ["parallel.dp_replicate=2", "parallel.dp_shard=1"],
        "ep": ["parallel.ep=2"],
        "tp": ["parallel.tp=2"],
        "tp+ep": ["parallel.tp=2", "parallel.ep=2"],
        "cp": ["parallel.cp=2"],
        "cp+ep": ["parallel.cp=2", "parallel.ep=2"],
        "cp keys": ["parallel.cp=2", "parallel.cp_method=all_gather"],
    },
    4: {
        "dp": ["parallel.dp_shard=4"],
        "hsdp": ["parallel.dp_replicate=2"],
        "ep": ["parallel.ep=4"],
        "ep+efsdp": ["parallel.ep=2"],
        "hsdp+ep": ["parallel.dp_replicate=2", "parallel.ep=2"],
        "dp+tp": ["parallel.tp=2"],
        "dp+tp+ep": ["parallel.tp=2", "parallel.ep=4"],
        "hsdp+tp+ep": ["parallel.dp_replicate=2", "parallel.tp=2", "parallel.ep=2"],
        "dp+cp": ["parallel.cp=2"],
        "hsdp+cp+ep": ["parallel.dp_replicate=2", "parallel.cp=2", "parallel.ep=2"],
    },
}
VARIANTS = {
    "plain": [],
    "recompute": ["activation.policy=full"],
    "selective": ["activation.policy=selective"],
    "compile": ["compile.enabled=yes"],
    "compile+recompute": ["compile.enabled=yes", "activation.policy=full"],
    "compile+selective": ["compile.enabled=yes", "activation.policy=selective"],
    "compile+selective+reshard": [
        "compile.enabled=yes",
        "activation.policy=selective",
        "parallel.reshard_after_forward=yes",
    ],
    "compile+reshard": ["compile.enabled=yes", "parallel.reshard_after_forward=yes"],
    "reshard": ["parallel.reshard_after_forward=yes"],
    "accumulate": ["train.micro_batch_size=1"],
    "accumulate+last": ["train.micro_batch_size=1", "parallel.reduce_at=last"],
    "compile+accumulate": ["compile.enabled=yes", "train.micro_batch_size=1"],
}
# These layouts suffice for a variant's subject; the other variants run with every layout. Compiling
# a block takes ten times as long as a run, so each graph is compiled in one world, the smallest
# that has it: data-parallel communication lies outside the graph, and four ranks only add experts
# shared by more ranks than tokens. (Several micro-batches are counted ahead, for which every block
# is compiled once more.)
ONLY = {
    2: {
        "recompute": ["ep", "tp", "cp keys"],
        "compile": [],
        "compile+recompute": ["tp+ep"],
        "accumulate+last": ["dp", "ep"],
        "compile+accumulate": ["tp"],
        "selective": ["ep"],
        "compile+selective": [],
        "compile+selective+reshard": ["ep"],
        "compile+reshard": [],  # needs GPUs
        "reshard": ["dp", "ep"],
    },
    4: {
        "recompute": ["hsdp+ep", "dp+tp+ep"],
        "compile": ["dp+tp+ep"],
        "compile+recompute": [],
        # Each layout accumulates gradients on two ranks, or in one of these cases.
        "accumulate": ["ep", "hsdp+ep", "hsdp+tp+ep", "hsdp+cp+ep"],
        "accumulate+last": ["hsdp", "ep+efsdp", "dp+tp"],
        "compile+accumulate": [],
        "selective": ["ep+efsdp"],
        "compile+selective": [],
        "compile+selective+reshard": [],
        "compile+reshard": [],
        "reshard": ["dp", "ep+efsdp"],
    },
}
DENSE = ["model.preset=qwen3-0.6b", "model.vocab_size=264"]


def words_of(tiny_words, *extra):
    """Return settings with odd sizes, every auxiliary loss and the bias update."""
    return [
        *tiny_words,
        "model.hidden_size=40",
        "model.num_heads=4",
        "model.num_kv_heads=2",
        "model.vocab_size=263",
        "train.global_batch_size=8",
        f"train.steps={STEPS}",
        "moe.aux_loss_coef=0.1",
        "moe.aux_loss_scope=global_batch",  # the only scope that no split changes
        "moe.z_loss_coef=0.01",
        "moe.bias_update_rate=0.01",
        "checkpoint.at_end=no",
        *extra,
    ]


def pad_rows(batches):
    """Pad the ends of the batches' rows; a row's first token decides how far."""
    padded = []
    for batch in batches:
        tokens_BS = batch.tokens_BS
        real_B1 = tokens_BS.shape[1] - tokens_BS[:, :1] % 7
        column_S = torch.arange(tokens_BS.shape[1])
        targets_BS = batch.targets_BS.masked_fill(column_S >= real_B1 - 1, IGNORE_INDEX)
        padded.append(batch._replace(targets_BS=targets_BS, is_pad_BS=column_S >= real_B1))
    return padded


def auxiliary_losses(trainer, routing):
    """Return the auxiliary losses of the whole batch; none for a dense model."""
    if routing is None:
        return []
    pooled = trainer.objective.is_pooled
    return routing_losses(routing.map(trainer.world.sum), pooled=pooled).values()


def run(words, pads=False):
    """Return losses, norms, and the whole gradients of the first step (before clipping)."""
    trainer = Trainer(Config.load(None, words, environ={}))
    if pads:
        next_step = trainer.loader.next_step
        trainer.loader.next_step = lambda: pad_rows(next_step())
    gradients: dict[str, torch.Tensor] = {}

    def keep(optimizer, args, kwargs):
        if not gradients:
            for name, member in trainer.engine.fsdp.members.items():
                if member.local.grad is None:  # it is frozen
                    continue
                whole = member.layout.whole(member.local.grad)
                gradients[name] = whole.to("cpu", copy=True)

    trainer.optimizer.register_step_pre_hook(keep)
    results = [trainer.train_step() for _ in range(STEPS)]
    eager = [
        [
            r.loss,
            r.grad_norm,
            *auxiliary_losses(trainer, r.routing),
        ]
        for r in results
    ]
    biases = {n: b.cpu() for n, b in trainer.model.named_buffers()}
    return torch.tensor(eager), gradients, biases


def compiled_for(item):
    """Return the key of a run's compiled blocks: data-parallel sharding does not change them."""
    return [w for w in item[1] if not w.startswith(("parallel.dp_", "parallel.reshard"))]


def run_layouts(runs):
    """Call ``run`` for every layout on this rank; rank 0 returns the answers."""
    # All layouts share the groups of a partition of the ranks.
    mesh._Groups = functools.cache(mesh._Groups)
    answers = {}
    for _, alike in itertools.groupby(sorted(runs.items(), key=compiled_for), key=compiled_for):
        torch.compiler.reset()  # avoids counting another layout's graphs as recompilations
        for name, words in alike:
            if not torch.cuda.is_available():
                compile_by_turns(words)
            answers[name] = run(words, pads="pads" in name)
    return answers if dist.get_rank() == 0 else None


def plan_runs(world, words, layouts, variants, only=ONLY):
    """Return the settings of every run, by layout and variant."""
    runs = {}
    for variant in variants:
        for layout in layouts:
            if layout in only.get(world, {}).get(variant, layouts):
                shares = sum(axis in layout for axis in ("tp", "cp"))
                ranks = world // 2**shares  # data-parallel ranks
                whole = f"train.micro_batch_size={8 // ranks}"
                own = [*LAYOUTS[world][layout], *VARIANTS[variant]]
                runs[f"{layout} {variant}"] = [*words, whole, *own]
    return runs


def compare(answers, expected, tolerance, step_tolerance=None):
    """Compare the answers of all ``run`` calls with that of a single process."""
    for name, (numbers, gradients, biases) in answers.items():
        torch.testing.assert_close(
            numbers,
            expected[0],
            rtol=step_tolerance or tolerance,
            atol=0,
            msg=lambda m, name=name: f"{name}: {m}",
        )
        assert set(gradients) == set(expected[1])
        for parameter, gradient in gradients.items():
            wanted = expected[1][parameter]
            error = (gradient - wanted).norm() / wanted.norm().clamp(min=1e-30)
            assert error <= tolerance, f"{name}: gradient of {parameter} is off by {error:.1e}"
        for buffer, bias in biases.items():
            assert torch.equal(bias, expected[2][buffer]), f"{name}: {buffer}"


def fit(words):
    """Train, and return the logged losses by step."""
    trainer = Trainer(Config.load(None, words, environ={}))
    trainer.fit()
    rows = read_metrics(trainer.folder / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row}
