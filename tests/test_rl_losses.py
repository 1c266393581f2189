"""Token statistics and policy losses against formulas written plainly here, in fp64.

The references walk samples and tokens one by one and know nothing of rows, masks or shards.
"""

from itertools import product
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from test_rl_rows import make_samples

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

VOCABULARY, WIDTH = 50, 6
LENGTHS = [5, 13, 2, 7, 9, 3, 4, 13, 6]


def close(mine, theirs, tolerance=1e-12):
    scale = theirs.abs().max().item()
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * scale)


def leaf(x):
    return x.clone().requires_grad_()


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
    for _ in range(2):  # the first backward leaves what is saved as it was
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


# ---- losses ----------------------------------------------------------------------------------


def softmax_of(hidden, head, sample, temperature):
    """(log-probability of each next token, entropy), [n - 1] each."""
    logp = torch.log_softmax(hidden @ head.T / temperature, -1)
    next_tokens = torch.from_numpy(sample.tokens[1:])
    return logp[range(len(logp)), next_tokens], -(logp.exp() * logp).sum(-1)


def importance_of(sample, proximal, s):
    """(weight, is trained) of each action, by number."""
    actions = [t for t in range(len(sample.tokens) - 1) if sample.is_action[t + 1]]
    d = {t: proximal[t].item() - float(sample.logprobs[t + 1]) for t in actions}
    bounds = {"token": (0.5, 5), "sequence": (0, 2), "geometric": (0.999, 1.001)}
    low, high = bounds.get(s.mask, (1, 1))
    low = low if s.mask_low is None else s.mask_low
    high = high if s.mask_high is None else s.mask_high
    found = {}
    for t, x in d.items():
        ratios = {
            "none": 1.0,
            "token": np.exp(x),
            "sequence": np.exp(sum(d.values())),
            "geometric": np.exp(sum(d.values()) / len(d)),
        }
        w, ratio = float(ratios[s.importance_of]), ratios[s.mask]
        if s.importance_of != "none":
            w = min(w, s.importance_high)
        found[t] = (w, low <= ratio <= high)
    return found


def shift_of(name, p, m):
    """How far a token's probability has moved from m to p, below 0: down."""
    if name == "dppo_tv":
        return p - m
    kl = m * np.log(m / p) + (1 - m) * np.log((1 - m) / (1 - p))
    return kl if p > m else -kl


def kl_of(name, d):
    return {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[name]


def divergence_of(logits, ids, logprobs):
    """KL over the teacher's tokens ``ids`` and all others as one."""
    p, q = torch.softmax(logits, -1)[ids], logprobs.exp()
    return (p * (p / q).log()).sum() + (1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log()


def reference(samples, hiddens, head, proximals, references, teachers, s):
    """(loss, statistics) of a whole global batch, token by token."""
    low, high = s.clip_range
    kept = []
    given = zip(samples, hiddens, proximals, references, teachers, strict=True)
    for sample, hidden, proximal, ref, teacher in given:
        logp, entropy = softmax_of(hidden, head, sample, s.temperature)
        advantages = np.broadcast_to(sample.advantage, len(sample.tokens))
        tokens = []
        weights = importance_of(sample, proximal, s)
        actions = [t for t, (_, is_trained) in weights.items() if is_trained]
        olds = {
            "current": logp.detach(),
            "proximal": proximal,
            "rollout": torch.from_numpy(sample.logprobs[1:]).double(),
        }
        old = olds[s.ratio]
        if s.policy == "gspo" and actions:
            mean = sum(logp[t] - old[t] for t in actions) / len(actions)
            if s.ratio == "current":
                mean = mean.detach()
        for t in actions:
            advantage = float(advantages[t + 1])
            sampled = float(sample.logprobs[t + 1]) - teacher[1][t, 0].item()
            if s.teacher and not s.teacher_top_k:
                advantage -= s.teacher_coef * sampled
            r = torch.exp(logp[t] - old[t])
            is_clipped = False
            if s.policy == "gspo":
                r = torch.exp(mean.detach() + logp[t] - logp[t].detach())
            if s.policy in ("clip", "gspo"):
                gain, bounded = r * advantage, min(max(r, low), high) * advantage
                is_clipped = bool(bounded < gain)
                gain = bounded if is_clipped else gain
                if s.dual_clip and advantage < 0 and gain < s.dual_clip * advantage:
                    gain, is_clipped = (
                        torch.tensor(s.dual_clip * advantage, dtype=torch.float64),
                        True,
                    )
            elif s.policy.startswith("dppo"):
                shift = shift_of(s.policy, logp[t].exp().item(), old[t].exp().item())
                is_clipped = (advantage > 0 and shift > high) or (advantage < 0 and shift < low)
                gain = 0 * r if is_clipped else r * advantage
            elif s.policy == "cispo":
                weight = min(max(r.item(), low), high)
                gain, is_clipped = weight * advantage * logp[t], weight != r.item()
            else:
                gain = advantage * logp[t]
            loss = -weights[t][0] * gain
            if s.kl_coef and s.kl_in == "loss":
                loss = loss + s.kl_coef * kl_of(s.kl, logp[t] - ref[t])
            loss = loss - s.entropy_coef * entropy[t]
            if s.teacher_top_k:
                logits = hidden[t] @ head.T / s.temperature
                apart = divergence_of(logits, teacher[0][t], teacher[1][t])
                loss = loss + s.teacher_coef * apart
            now, rollout = logp[t].detach(), float(sample.logprobs[t + 1])
            seen = {
                "entropy": entropy[t].item(),
                "ratio": r.item(),
                "ratio_square": r.item() ** 2,
                "clip_share": float(is_clipped),
                "moved": kl_of("k3", old[t] - now).item(),
                "mismatch": kl_of("k3", rollout - proximal[t]).item(),
                "kl": kl_of("k3", now - ref[t]).item(),
                "weight": weights[t][0],
            }
            if s.teacher and not s.teacher_top_k:
                seen["teacher_kl"] = sampled
            tokens.append((loss, seen))
        if tokens:
            kept.append(tokens)
    sums = [sum(loss for loss, _ in tokens) for tokens in kept]
    everyone = [seen for tokens in kept for _, seen in tokens]
    total = {
        "token": lambda: sum(sums) / len(everyone),
        "sequence": lambda: sum(s / len(t) for s, t in zip(sums, kept, strict=True)) / len(kept),
        "fixed": lambda: sum(sums) / (s.max_tokens * len(kept)),
    }[s.aggregation]()
    return total, {k: sum(x[k] for x in everyone) / len(everyone) for k in everyone[0]}


def in_rows(batches, per_sample, size=()):
    """[n - 1, ...] of each sample to where it lies in the batches, differentiably."""
    rows = []
    for batch in batches:
        flat = torch.zeros(batch.tokens_BS.numel(), *size, dtype=torch.float64)
        for span in batch.spans:
            index = torch.arange(span.start, span.start + span.length)
            flat = flat.index_put((index,), per_sample[span.sample])
        rows.append(flat.unflatten(0, batch.tokens_BS.shape))
    return rows


def make_case(seed=0):
    """Samples; hidden states, the trainer's and a reference's log-probabilities of each; a head.

    Probabilities are near enough to each other for some ratios to be clipped, and some not.
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


def teachers_of(hiddens, head):
    """For each token the three tokens that another model thinks likeliest, and how likely."""
    found = []
    for hidden in hiddens:
        top = torch.log_softmax((hidden + 0.3) @ head.T, -1).topk(3)
        found.append((top.indices, top.values))
    return found


def test_a_token_that_does_not_count_has_no_gradient_from_its_teacher():
    logits = torch.tensor([[900.0, 1.0], [0.5, 0.0]]).requires_grad_()
    counts = torch.tensor([False, True])
    lse = torch.tensor([0.0, 1.5])  # as of a token without a target
    kl = kl_of_likeliest(logits, lse, torch.tensor([[-1.0, -2.0]] * 2), counts)
    kl.sum().backward()
    assert kl[0] == 0
    assert kl[1] > 0
    assert logits.grad[0].tolist() == [0, 0]
    assert logits.grad[1].isfinite().all()


def taught(batches, teachers, settings):
    if settings.teacher_top_k:
        both = in_rows(batches, [torch.stack((i.double(), p), 1) for i, p in teachers], (2, 3))
        return [b._replace(teacher_BS2K=x) for b, x in zip(batches, both, strict=True)]
    sampled = in_rows(batches, [p[:, 0] for _, p in teachers])
    return [b._replace(teacher_BS=x) for b, x in zip(batches, sampled, strict=True)]


def totals_of(objective, batches, hiddens, head):
    """The sums of all micro-batches' terms."""
    model = SimpleNamespace(vocabulary=Vocabulary(), head_weight=head)
    sizes = {k: torch.tensor(max(n, 1)) for k, n in objective.sizes(batches).items()}
    found = []
    for batch, hidden_BSD in zip(batches, in_rows(batches, hiddens, (WIDTH,)), strict=True):
        found.append(objective.terms(model, Outputs(hidden_BSD, None, None), batch, sizes))
    terms = {k: sum(terms[k].value for terms in found) for k in found[0]}
    return sum(t.coefficient * terms[k] for k, t in found[0].items()), terms


CHOICES = [
    {"policy": p, "ratio": r, "aggregation": a}
    for p, r, a in product(
        ["clip", "gspo", "cispo", "dppo_tv", "dppo_kl", "reinforce"],
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
        # Masked, everything would be gone.
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
    with pytest.raises(ValueError, match=r"rl\.kl_coef is 0\.1, and a batch has no reference_BS"):
        totals_of(PolicyObjective(RlSection(kl_coef=0.1)), pack(samples, 13, 2), hiddens, head)


def test_each_choice_of_the_setting_is_a_loss():
    choices = get_args(RlSection.model_fields["policy"].annotation)
    assert choices == tuple(POLICY_LOSSES)
    assert all(RlSection(policy=name).clip_range for name in choices)
