"""Helpers of tests/losses/test_policy.py that other tests use too."""

from types import SimpleNamespace

import numpy as np
import torch

from moetrain.models.layers import Vocabulary
from moetrain.train.objectives import Outputs

VOCABULARY, WIDTH = 50, 6
LENGTHS = [5, 13, 2, 7, 9, 3, 4, 13, 6]


def close(mine, theirs, tolerance=1e-12):
    scale = theirs.abs().max().item()
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * scale)


def leaf(x):
    return x.clone().requires_grad_()


# ---- losses ----------------------------------------------------------------------------------


def softmax_of(hidden, head, sample, temperature):
    """Return (log-probability of each next token, entropy), [n - 1] each."""
    logp = torch.log_softmax(hidden @ head.T / temperature, -1)
    next_tokens = torch.from_numpy(sample.tokens[1:])
    return logp[range(len(logp)), next_tokens], -(logp.exp() * logp).sum(-1)


def importance_of(sample, proximal, s):
    """Return (weight, is trained) of each action, by token index."""
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
    """Return how far a token's probability has moved from m to p; negative if it fell."""
    if name == "dppo_tv":
        return p - m
    kl = m * np.log(m / p) + (1 - m) * np.log((1 - m) / (1 - p))
    return kl if p > m else -kl


def kl_of(name, d):
    return {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[name]


def divergence_of(logits, ids, logprobs):
    """Return the KL divergence over the teacher's tokens ``ids`` and the rest as one class."""
    p, q = torch.softmax(logits, -1)[ids], logprobs.exp()
    return (p * (p / q).log()).sum() + (1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log()


def reference(samples, hiddens, head, proximals, references, teachers, s):
    """Return (loss, statistics) of a whole global batch, token by token."""
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
    """Scatter [n - 1, ...] of each sample to its span in the batches, differentiably."""
    rows = []
    for batch in batches:
        flat = torch.zeros(batch.tokens_BS.numel(), *size, dtype=torch.float64)
        for span in batch.spans:
            index = torch.arange(span.start, span.start + span.length)
            flat = flat.index_put((index,), per_sample[span.sample])
        rows.append(flat.unflatten(0, batch.tokens_BS.shape))
    return rows


def teachers_of(hiddens, head):
    """Return another model's three likeliest tokens at each position, with log-probabilities."""
    found = []
    for hidden in hiddens:
        top = torch.log_softmax((hidden + 0.3) @ head.T, -1).topk(3)
        found.append((top.indices, top.values))
    return found


def taught(batches, teachers, settings):
    if settings.teacher_top_k:
        both = in_rows(batches, [torch.stack((i.double(), p), 1) for i, p in teachers], (2, 3))
        return [b._replace(teacher_BS2K=x) for b, x in zip(batches, both, strict=True)]
    sampled = in_rows(batches, [p[:, 0] for _, p in teachers])
    return [b._replace(teacher_BS=x) for b, x in zip(batches, sampled, strict=True)]


def totals_of(objective, batches, hiddens, head):
    """Return the sums of all micro-batches' terms."""
    model = SimpleNamespace(vocabulary=Vocabulary(), head_weight=head)
    sizes = {k: torch.tensor(max(n, 1)) for k, n in objective.sizes(batches).items()}
    found = []
    for batch, hidden_BSD in zip(batches, in_rows(batches, hiddens, (WIDTH,)), strict=True):
        found.append(objective.terms(model, Outputs(hidden_BSD, None, None), batch, sizes))
    terms = {k: sum(terms[k].value for terms in found) for k in found[0]}
    return sum(t.coefficient * terms[k] for k, t in found[0].items()), terms
