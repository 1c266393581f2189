"""Token statistics and policy losses equal plain formulas in fp64.

The references walk samples and tokens one by one and know nothing of rows, masks or shards.
"""

from itertools import product
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

from moetrain.config.rl import RlSection
from moetrain.data.packing import IGNORE_INDEX
from moetrain.losses.policy import (
    LOG_RATIO_LIMIT,
    POLICY_LOSSES,
    kl_estimate,
    kl_of_likeliest,
)
from moetrain.models.layers import Vocabulary
from moetrain.rl.losses import PolicyObjective, corrected
from moetrain.train.objectives import Outputs
from moetrain.train.samples import pack
from tests.lib.policy_formulas import (
    LENGTHS,
    VOCABULARY,
    WIDTH,
    close,
    in_rows,
    leaf,
    reference,
    softmax_of,
    taught,
    teachers_of,
    totals_of,
)
from tests.lib.rl_samples import make_samples

# ---- token statistics ------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_stats_are_a_softmaxs(temperature):
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, WIDTH, generator=generator).double() for n in (9, VOCABULARY))
    targets = torch.randint(VOCABULARY, (9,), generator=generator)
    targets[4] = IGNORE_INDEX
    slopes = torch.randn(2, 9, generator=generator).double()
    mine, theirs = (leaf(h), leaf(w)), (leaf(h), leaf(w))
    found = Vocabulary().token_losses(*mine, targets, temperature=temperature)
    p = torch.softmax(theirs[0] @ theirs[1].T / temperature, -1)
    logprob = p[range(9), targets.clamp(min=0)].log() * (targets >= 0)
    entropy = -(p * p.log()).sum(-1) * (targets >= 0)
    close(-found.loss_T, logprob)
    close(found.entropy_T, entropy)
    for _ in range(2):  # the first backward leaves the saved tensors unchanged
        for x in mine:
            x.grad = None
        (slopes[1] * found.entropy_T - slopes[0] * found.loss_T).sum().backward(retain_graph=True)
        if theirs[0].grad is None:
            (slopes[0] * logprob + slopes[1] * entropy).sum().backward()
        for a, b in zip(mine, theirs, strict=True):
            close(a.grad, b.grad)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_the_fast_kernel_has_the_same_token_stats():
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, 8, generator=generator) for n in (9, VOCABULARY))
    targets = torch.randint(VOCABULARY, (9,), generator=generator)
    answers = []
    for backend in ("triton", "reference"):
        inputs = leaf(h), leaf(w)
        stats = Vocabulary(backend).token_losses(*inputs, targets, temperature=0.6)
        ((-stats.loss_T).exp() - stats.entropy_T.square()).sum().backward()
        answers.append([stats.loss_T.detach(), stats.entropy_T.detach(), *(x.grad for x in inputs)])
    for mine, theirs in zip(*answers, strict=True):
        close(mine, theirs, 1e-5)


def make_case(seed=0):
    """Return samples; hidden states, the trainer's and a reference's log-probabilities of each; a
    head.

    Probabilities are so near to each other that some ratios are clipped, and some are not.
    """
    samples = make_samples(*LENGTHS, vocabulary=VOCABULARY)
    per_token = np.linspace(-1, 2, LENGTHS[3], dtype=np.float32)
    samples[3].advantage = per_token
    samples[4].advantage = np.zeros(())
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).double()

    head = noise(VOCABULARY, WIDTH)
    hiddens = [0.5 * noise(len(s.tokens) - 1, WIDTH) for s in samples]
    proximals, references = [], []
    for sample, hidden in zip(samples, hiddens, strict=True):
        logp, _ = softmax_of(hidden, head, sample, 1.0)
        proximals.append(logp + 0.3 * noise(len(logp)))
        references.append(logp + 0.5 * noise(len(logp)))
        rollout = (proximals[-1] + 0.5 * noise(len(logp))).float().numpy()
        sample.logprobs[1:] = np.where(sample.is_action[1:], rollout, 0)
    return samples, hiddens, head, proximals, references


def test_a_token_that_does_not_count_has_no_gradient_from_its_teacher():
    logits = torch.tensor([[900.0, 1.0], [0.5, 0.0]]).requires_grad_()
    counts = torch.tensor([False, True])
    lse = torch.tensor([0.0, 1.5])  # like a token without a target
    kl = kl_of_likeliest(logits, lse, torch.tensor([[-1.0, -2.0]] * 2), counts)
    kl.sum().backward()
    assert kl[0] == 0
    assert kl[1] > 0
    assert logits.grad[0].tolist() == [0, 0]
    assert logits.grad[1].isfinite().all()


CHOICES = [
    {"policy": p, "ratio": r, "aggregation": a}
    for p, r, a in product(
        tuple(POLICY_LOSSES),
        ["current", "proximal", "rollout"],
        ["token", "sequence", "fixed"],
    )
] + [
    {"dual_clip": 1.1},
    {"clip_low": 0.05, "clip_high": 0.01},
    {"policy": "gspo", "clip_low": 0.05, "clip_high": 0.1},
    {"policy": "cispo", "clip_low": 0.1, "clip_high": 0.1},
    {"importance": "none"},
    {"importance": "sequence", "importance_high": 1.5},
    {"mask": "token", "mask_low": 0.7, "mask_high": 1.4},
    {"mask": "token", "importance_high": 5},
    {"importance": "sequence", "mask": "sequence", "aggregation": "sequence"},
    {"mask": "token", "mask_high": 1.1, "policy": "gspo", "aggregation": "fixed"},
    {"mask": "geometric", "mask_low": 0.9, "mask_high": 1.2, "aggregation": "sequence"},
    {"mask": "geometric", "mask_low": 0.9, "mask_high": 1.2, "importance": "none"},
    {"mask": "geometric", "mask_low": 0.8, "ratio": "rollout", "policy": "dppo_tv"},
    {"policy": "dppo_kl", "ratio": "rollout", "clip_low": 1e-3, "clip_high": 0.003},
    {"policy": "dppo_tv", "ratio": "rollout", "clip_low": 0.01, "clip_high": 0.02},
    {"kl_coef": 0.3},
    {"kl_coef": 0.3, "kl": "k2", "aggregation": "sequence"},
    {"kl_coef": 0.3, "kl": "k1"},
    {"kl_coef": 0.3, "kl_in": "reward"},
    {"entropy_coef": 0.2, "aggregation": "fixed", "max_tokens": 7},
    {"temperature": 0.7, "entropy_coef": 0.2, "kl_coef": 0.1},
    {"teacher": "t", "teacher_coef": 0.7},
    {"teacher": "t", "policy": "reinforce", "aggregation": "sequence"},
    {"teacher": "t", "teacher_coef": 0.7, "teacher_top_k": 3, "temperature": 0.8},
    {"teacher": "t", "teacher_top_k": 3, "aggregation": "sequence", "mask": "token"},
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: "-".join(map(str, c.values())))
def test_losses_and_gradients_are_their_formulas(choice):
    settings = RlSection(**choice)
    samples, hiddens, head, proximals, references = make_case()
    mine, my_head = [leaf(h) for h in hiddens], leaf(head)
    theirs, their_head = [leaf(h) for h in hiddens], leaf(head)
    teachers = teachers_of(hiddens, head)
    want, seen = reference(samples, theirs, their_head, proximals, references, teachers, settings)
    want.backward()
    batches = pack(samples, 13, 2)
    assert len(batches) > 1
    batches = corrected(batches, in_rows(batches, proximals), settings)
    near = in_rows(batches, references)
    batches = [b._replace(reference_BS=r) for b, r in zip(batches, near, strict=True)]
    if settings.teacher:
        batches = taught(batches, teachers, settings)
    got, terms = totals_of(PolicyObjective(settings), batches, mine, my_head)
    got.backward()
    close(got, want)
    close(my_head.grad, their_head.grad)
    for a, b in zip(mine, theirs, strict=True):
        close(a.grad, torch.zeros_like(b) if b.grad is None else b.grad)
    if settings.importance_of == "none":
        assert seen.pop("weight") == 1
    for name, value in seen.items():
        assert terms[name].item() == pytest.approx(value, rel=1e-12, abs=1e-14), name
    is_narrow = settings.policy in ("clip", "gspo") or settings.clip_low is not None
    if is_narrow and settings.ratio != "current":
        assert 0 < seen["clip_share"] < 1


@pytest.mark.parametrize(("seq_len", "rows"), [(12, 1), (13, 4), (30, 1), (60, 2)])
def test_rows_and_micro_batches_change_nothing(seq_len, rows):
    choices = [{}, {"policy": "gspo", "aggregation": "sequence"}, {"aggregation": "fixed"}]
    masked = {"mask": "token", "mask_low": 0.7, "mask_high": 1.4}
    for choice in choices:
        settings = RlSection(**choice, **masked)
        samples, hiddens, head, proximals, _ = make_case()
        answers = []
        for shape in [(13, 9), (seq_len, rows)]:
            mine, my_head = [leaf(h) for h in hiddens], leaf(head)
            batches = pack(samples, *shape, min_batches=2)
            batches = corrected(batches, in_rows(batches, proximals), settings)
            got, _ = totals_of(PolicyObjective(settings), batches, mine, my_head)
            got.backward()
            answers.append([got, my_head.grad, *(h.grad for h in mine)])
        for a, b in zip(*answers, strict=True):
            close(a, b)


def test_a_masked_sample_is_as_if_it_were_not_there():
    samples, hiddens, head, *_ = make_case()
    settings = RlSection(aggregation="sequence", importance="sequence", mask="sequence")
    batches = pack(samples, 13, 2)
    far = [torch.from_numpy(sample.logprobs[1:]).double() for sample in samples]
    far[1] = far[1] + 9
    masked = corrected(batches, in_rows(batches, far), settings)
    rest = [i for i in range(len(samples)) if i != 1]
    fewer = pack([samples[i] for i in rest], 13, 2)
    fewer = corrected(fewer, in_rows(fewer, [far[i] for i in rest]), settings)
    objective = PolicyObjective(settings)
    assert sum(int((b.weights_BS == 0).sum()) for b in masked) > 0
    got, terms = totals_of(objective, masked, hiddens, head)
    want, expected = totals_of(objective, fewer, [hiddens[i] for i in rest], head)
    close(got, want)
    for name in expected:
        close(terms[name], expected[name])


def test_no_sample_at_all_is_a_loss_of_zero():
    (batch,) = pack([], 6, 2)
    h, w = torch.zeros(2, 6, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH)
    objective = PolicyObjective(RlSection(aggregation="sequence", entropy_coef=0.1))
    model = SimpleNamespace(vocabulary=Vocabulary(), head_weight=w)
    sizes = {k: torch.tensor(max(n, 1)) for k, n in objective.sizes([batch]).items()}
    terms = objective.terms(model, Outputs(h, None, None), batch, sizes)
    sum(t.coefficient * t.value for t in terms.values()).backward()
    assert all(t.value == 0 for t in terms.values())
    assert (h.grad == 0).all()


def test_probabilities_worlds_apart_stay_finite():
    samples, _, head, proximals, _ = make_case()
    hiddens = [200 * torch.ones(len(s.tokens) - 1, WIDTH, dtype=torch.float64) for s in samples]
    for choice in CHOICES:
        settings = RlSection(**choice)
        mine = [leaf(h) for h in hiddens]
        batches = pack(samples, 13, 2)
        # With a mask, everything would be dropped.
        batches = [
            b._replace(proximal_BS=p.float(), reference_BS=p.float(), weights_BS=p.exp().float())
            for b, p in zip(batches, in_rows(batches, proximals), strict=True)
        ]
        got, terms = totals_of(PolicyObjective(settings), batches, mine, head)
        got.backward()
        assert all(torch.isfinite(x).all() for x in [*terms.values(), *(h.grad for h in mine)])
    limit = LOG_RATIO_LIMIT
    far = torch.tensor([-900.0, 1, 900])
    assert kl_estimate("k1", far, torch.zeros(3)).tolist() == [-limit, 1, limit]
    assert torch.full((), limit).exp().square().mul(2**30).isfinite()


def test_estimates_of_kl_have_its_mean():
    p, q = (torch.randn(2, 7, generator=torch.Generator().manual_seed(0)).double()).softmax(-1)
    d = (p / q).log()
    kl, zero = (p * d).sum(), torch.zeros_like(d)
    close((p * kl_estimate("k1", d, zero)).sum(), kl)
    close((p * kl_estimate("k3", d, zero)).sum(), kl)
    near = (p / (p + 1e-4 * (q - p))).log()  # k2 is right to second order
    close((p * kl_estimate("k2", near, zero)).sum(), (p * near).sum(), 1e-3)
    assert (kl_estimate("k3", d, zero) >= 0).all()


def test_a_kl_needs_something_to_be_near_to():
    samples, hiddens, head, *_ = make_case()
    with pytest.raises(ValueError, match=r"rl\.kl_coef is 0\.1, but a batch has no reference_BS"):
        totals_of(PolicyObjective(RlSection(kl_coef=0.1)), pack(samples, 13, 2), hiddens, head)


def test_each_choice_of_the_setting_is_a_loss():
    choices = get_args(RlSection.model_fields["policy"].annotation)
    assert choices == tuple(POLICY_LOSSES)
    assert all(RlSection(policy=name).clip_range for name in choices)
