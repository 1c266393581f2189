"""Scores and policy objectives of an engine: packed or padded, on policy, on every mesh."""

import pytest
import torch

from moetrain.rl.losses import PolicyObjective
from moetrain.train.objectives import Pretraining
from moetrain.train.preferences import score
from moetrain.train.samples import pack, unpack
from tests.lib.distributed import spawn
from tests.lib.engines import assert_near, make_engine
from tests.lib.policy_formulas import LENGTHS, close
from tests.lib.rl_engines import LAYOUTS, ONE, train_on_ranks
from tests.lib.rl_samples import make_samples


def plain_logits(engine, sample):
    """Return logits for every token after the first, without packing or padding."""
    with engine.work(), torch.no_grad():
        return engine.model(torch.from_numpy(sample.tokens)[None, :-1])[0]


def plain_logprobs(engine, sample, temperature):
    logp = torch.log_softmax(plain_logits(engine, sample) / temperature, -1)
    return logp[range(len(logp)), sample.tokens[1:]]


def plain_entropy(engine, sample):
    """Return the entropy, summed over actions."""
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


@pytest.fixture(scope="module")
def one_process():
    return train_on_ranks(ONE)


@pytest.mark.tier("long", wide=["2"])
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
