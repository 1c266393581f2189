"""Helpers of tests/rl/test_engine.py that other tests use too."""

import torch

from moetrain.config.rl import RlSection
from moetrain.rl.losses import PolicyObjective, corrected
from moetrain.train.objectives import Pretraining
from moetrain.train.preferences import score
from moetrain.train.samples import pack
from tests.lib.engines import make_engine
from tests.lib.policy_formulas import LENGTHS
from tests.lib.rl_samples import make_samples

ENGINE_CHOICES = [
    {},
    {"policy": "gspo", "aggregation": "sequence", "entropy_coef": 0.1},
    {"policy": "cispo", "aggregation": "fixed", "ratio": "rollout"},
    {"policy": "reinforce", "importance": "sequence", "kl_coef": 0.1, "temperature": 0.7},
    {"mask": "token", "mask_low": 0.8, "mask_high": 1.25, "dual_clip": 1.1},
    {"teacher": "t", "teacher_top_k": 3, "temperature": 0.7},
]


def train_on_ranks(layouts):
    """Return the terms, gradient norm and gradients of every combination on every layout."""
    answers = {}
    for name, (words, rows) in layouts.items():
        # Balancing over the global batch is the only scope that no split changes.
        engine = make_engine(*words, "moe.aux_loss_scope=global_batch", micro=rows)
        rank, ranks = engine.world.data_rank, engine.world.dims.data_ranks
        samples = make_samples(*LENGTHS)
        all_batches = pack(samples, 12, rows)
        even = -(-len(all_batches) // ranks) * ranks
        batches = pack(samples, 12, rows, min_batches=even)[rank::ranks]
        for number, choice in enumerate(ENGINE_CHOICES):
            settings = RlSection(**choice)
            mine = wobbled(batches, score(engine, batches, settings.temperature), settings)
            own = PolicyObjective(settings)
            objective = Pretraining.of(engine.config, engine.arch, own=own)
            totals = engine.forward_backward(mine, objective)
            terms = {k: v.item() for k, v in totals.terms.items()}
            terms["grad_norm"] = engine.fsdp.gradient_norm().item()
            members = engine.fsdp.members.items()
            gradients = {k: m.layout.whole(m.local.grad).clone() for k, m in members}
            engine.fsdp.clear_gradients()
            answers[name, number] = terms, gradients
    return answers


def wobbled(batches, scores, settings):
    """Perturb log-probabilities, as if generation, trainer and reference differed slightly."""
    found, proximal = [], []
    for batch, logprob in zip(batches, scores, strict=True):
        wobble = torch.sin(3.0 * batch.tokens_BS + batch.positions_BS)
        proximal.append(logprob + 0.3 * wobble)
        batch = batch._replace(logprobs_BS=logprob - 0.2 * wobble, reference_BS=logprob + wobble)
        if settings.teacher_top_k:
            ids = torch.stack([(batch.tokens_BS + k) % 40 for k in (1, 5, 9)], -1)
            logprobs = torch.log_softmax(torch.sin(ids + 0.5), -1) - 0.3
            batch = batch._replace(teacher_BS2K=torch.stack((ids.float(), logprobs), 2))
        found.append(batch)
    return corrected(found, proximal, settings)


ONE = {"one": ([], 8)}
LAYOUTS = {
    1: {"many micro-batches": ([], 1)},
    2: {
        "dp": (["parallel.dp_shard=2"], 1),
        "ep": (["parallel.ep=2"], 2),
        "tp": (["parallel.tp=2"], 2),
        "cp": (["parallel.cp=2", "parallel.cp_method=all_gather"], 2),
        "pp": (["parallel.pp=2"], 1),
    },
    4: {
        "dp+ep": (["parallel.ep=4"], 1),
        "dp+tp+ep": (["parallel.tp=2", "parallel.ep=4"], 1),
        "pp+tp": (["parallel.pp=2", "parallel.tp=2"], 1),
    },
}
