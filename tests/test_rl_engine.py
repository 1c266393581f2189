"""Scores and policy objectives through an engine: packed or padded, on policy, on every mesh."""

import pytest
import torch
from distributed import spawn
from test_engine import assert_near, make_engine
from test_rl_losses import LENGTHS, close
from test_rl_rows import make_samples

from moetrain.config.rl import RlSection
from moetrain.rl.losses import PolicyObjective, corrected
from moetrain.train.objectives import Pretraining
from moetrain.train.preferences import score
from moetrain.train.samples import pack, unpack


def plain_logits(engine, sample):
    """For every token but the first, without packing or padding."""
    with engine.work(), torch.no_grad():
        return engine.model(torch.from_numpy(sample.tokens)[None, :-1])[0]


def plain_logprobs(engine, sample, temperature):
    logp = torch.log_softmax(plain_logits(engine, sample) / temperature, -1)
    return logp[range(len(logp)), sample.tokens[1:]]


def plain_entropy(engine, sample):
    """Summed over actions."""
    entropies = torch.distributions.Categorical(logits=plain_logits(engine, sample)).entropy()
    return entropies[torch.from_numpy(sample.is_action[1:])].sum().item()


def test_packed_scores_are_those_of_each_sample_alone():
    engine, samples = make_engine(), make_samples(*LENGTHS)
    batches = pack(samples, 14, 2)
    found = unpack(batches, score(engine, batches, 0.8))
    for sample, logprobs in zip(samples, found, strict=True):
        acts = torch.from_numpy(sample.is_action[1:])
        close(logprobs[1:][acts], plain_logprobs(engine, sample, 0.8)[acts], 1e-5)
        assert logprobs[0] == 0
        assert (logprobs[1:][~acts] == 0).all()


def test_on_policy_nothing_differs_from_what_was_scored():
    engine = make_engine("moe.aux_loss_coef=0")
    own = PolicyObjective(engine.config.rl)
    objective = Pretraining.of(engine.config, engine.arch, own=own)
    samples = make_samples(*LENGTHS)
    batches = pack(samples, 13, 2)
    scores = score(engine, batches)
    batches = [b._replace(logprobs_BS=x) for b, x in zip(batches, scores, strict=True)]
    totals = engine.forward_backward(batches, objective)
    numbers = {name: value.item() for name, value in totals.terms.items()}
    assert numbers["ratio"] == numbers["ratio_square"] == pytest.approx(1, rel=1e-6)
    assert numbers["moved"] == numbers["mismatch"] == numbers["clip_share"] == 0
    actions = sum(int((b.targets_BS >= 0).sum()) for b in batches)
    entropy = sum(plain_entropy(engine, sample) for sample in samples) / actions
    assert numbers["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert "router_z" in numbers
    assert not engine.step(1e-2).skipped
    moved = engine.forward(batches, objective).terms
    assert moved["moved"] > 0
    assert moved["policy"] < numbers["policy"]


ENGINE_CHOICES = [
    {},
    {"policy": "gspo", "aggregation": "sequence", "entropy_coef": 0.1},
    {"policy": "cispo", "aggregation": "fixed", "ratio": "rollout"},
    {"policy": "reinforce", "importance": "sequence", "kl_coef": 0.1, "temperature": 0.7},
    {"mask": "token", "mask_low": 0.8, "mask_high": 1.25, "dual_clip": 1.1},
    {"teacher": "t", "teacher_top_k": 3, "temperature": 0.7},
]


def train_on_ranks(layouts):
    """The terms, gradient norm and gradients of every choice on every layout."""
    answers = {}
    for name, (words, rows) in layouts.items():
        # Balancing over the global batch is the one that no split changes.
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
    """As if generation, the trainer and the reference had other weights, a little."""
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


@pytest.fixture(scope="module")
def one_process():
    return train_on_ranks(ONE)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_mesh_gives_one_processs_numbers_and_gradients(ranks, one_process):
    layouts = LAYOUTS[ranks]
    found = [train_on_ranks(layouts)] if ranks == 1 else spawn(ranks, train_on_ranks, layouts)
    for answers in found:
        assert {layout for layout, _ in answers} == set(layouts)
        for (_, number), (terms, gradients) in answers.items():
            expected, expected_gradients = one_process["one", number]
            assert set(terms) == set(expected)
            for name, value in expected.items():
                assert terms[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
            mine = {name: expected_gradients[name] for name in gradients}  # of its stages
            assert_near(gradients, mine, 1e-5)
    for key in found[0]:
        everything = {name for answers in found for name in answers[key][1]}
        assert everything == set(one_process["one", key[1]][1])
