"""Random settings of reinforcement learning's losses and advantages, against formulas in fp64.

Each case is drawn by its number: the settings, the samples with their actions and advantages, the
distance of the policies, rows and micro-batches. ``RANDOM_RL`` selects cases; by default there are
a few:

    RANDOM_RL=1000:5000 python -m pytest tests/system/test_random_rl.py  1,000 from number 5,000 on
"""

import math
import os
import random
from statistics import mean, stdev
from unittest.mock import patch

import numpy as np
import pytest
import torch

from moetrain.config.rl import RlSection
from moetrain.losses.policy import POLICY_LOSSES
from moetrain.rl.losses import PolicyObjective, advantages, corrected
from moetrain.rl.trajectories import Trajectory
from moetrain.train.samples import Sample, pack
from tests.lib import rl_engines
from tests.lib.distributed import spawn
from tests.lib.policy_formulas import (
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

TOKENS = 17
"""Tokens of the vocabulary."""


def numbers(few):
    count, first = map(int, os.environ.get("RANDOM_RL", few).split(":"))
    return range(first, first + count)


def draw_settings(d):
    policy = d.choice(tuple(POLICY_LOSSES))
    words = {
        "policy": policy,
        "ratio": d.choice(["current", "proximal", "rollout"]),
        "aggregation": d.choice(["token", "sequence", "fixed"]),
        "importance": d.choice(["auto", "none", "token", "sequence"]),
        "importance_high": d.choice([0.5, 1, 2, 5]),
        "mask": d.choice(["none", "token", "sequence", "geometric"]),
        "temperature": d.choice([1.0, 0.7, 1.5]),
        "max_tokens": d.choice([3, 64]),
        "entropy_coef": d.choice([0, 0, 0.2]),
        "kl_coef": d.choice([0, 0, 0.3]),
        "kl": d.choice(["k1", "k2", "k3"]),
        "kl_in": d.choice(["loss", "loss", "reward"]),
    }
    if d.random() < 0.5:
        # A divergence in fp32 cannot distinguish 0 from a rise of 1e-8, so its bound is not 0 here.
        low = 0.001 if policy == "dppo_kl" else 0.0
        words |= {"clip_low": d.choice([low, 0.01, 0.1, 0.5, 1])}
        words |= {"clip_high": d.choice([low, 0.01, 0.1, 0.5, 2])}
    if words["mask"] != "none" and d.random() < 0.7:
        words |= {"mask_low": d.choice([0, 0.5, 0.8, 0.95]), "mask_high": d.choice([1.05, 1.3, 2])}
    if policy == "clip" and d.random() < 0.4:
        words["dual_clip"] = d.choice([1.05, 1.3, 3])
    if d.random() < 0.3:
        words |= {"teacher": "t", "teacher_coef": d.choice([0.5, 1, 2])}
        words |= {"teacher_top_k": d.choice([0, 0, 3])}
    if words["ratio"] == "rollout" and words["importance"] != "none":
        words["importance"] = "auto"
    return words


def draw_samples(d, rng):
    samples = []
    for group in range(d.randint(1, 9)):
        length = d.randint(2, 14)
        is_action = rng.random(length) < d.choice([0.2, 0.7, 1.0])
        is_action[0] = False
        if d.random() < 0.1:
            is_action[:] = False
        one = d.random() < 0.6
        advantage = rng.normal() if one else rng.normal(size=length)
        if d.random() < 0.1:
            advantage = 0.0
        samples.append(Sample(rng.integers(TOKENS, size=length), is_action, advantage, group))
    return samples


def compare(number):
    """Compare one case; return False if nothing is trained."""
    d, rng = random.Random(number), np.random.default_rng(number)
    words = draw_settings(d)
    settings, samples = RlSection(**words), draw_samples(d, rng)
    generator = torch.Generator().manual_seed(number)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).double()

    head, spread = noise(TOKENS, WIDTH), d.choice([0.02, 0.3, 1.0])
    hiddens = [0.4 * noise(len(s.tokens) - 1, WIDTH) for s in samples]
    proximals, references = [], []
    for sample, hidden in zip(samples, hiddens, strict=True):
        logp, _ = softmax_of(hidden, head, sample, settings.temperature)
        proximals.append((logp + spread * noise(len(logp))).clamp(max=-1e-3))
        references.append(logp + 0.5 * noise(len(logp)))
        rollout = (proximals[-1] + spread * noise(len(logp))).clamp(max=-1e-3).float().numpy()
        sample.logprobs[1:] = np.where(sample.is_action[1:], rollout, 0)
    teachers = teachers_of(hiddens, head)
    mine, my_head = [leaf(h) for h in hiddens], leaf(head)
    theirs, their_head = [leaf(h) for h in hiddens], leaf(head)
    batches = pack(
        samples, d.choice([13, 20, 40]), d.choice([1, 2, 3]), min_batches=d.choice([1, 4])
    )
    batches = corrected(batches, in_rows(batches, proximals), settings)
    if not PolicyObjective(settings).sizes(batches)["targets"]:
        return False
    near = in_rows(batches, references)
    batches = [b._replace(reference_BS=r) for b, r in zip(batches, near, strict=True)]
    if settings.teacher:
        batches = taught(batches, teachers, settings)
    want, seen = reference(samples, theirs, their_head, proximals, references, teachers, settings)
    got, terms = totals_of(PolicyObjective(settings), batches, mine, my_head)
    want.backward()
    got.backward()
    close(got, want, 1e-10)
    close(my_head.grad, zeros_or(their_head), 1e-9)
    for a, b in zip(mine, theirs, strict=True):
        close(a.grad, zeros_or(b), 1e-9)
    if "weight" not in terms:
        assert seen.pop("weight") == 1
    for name, value in seen.items():
        assert terms[name].item() == pytest.approx(value, rel=1e-9, abs=1e-12), name
    return True


def zeros_or(x):
    return torch.zeros_like(x) if x.grad is None else x.grad


@pytest.mark.tier("long")
def test_losses_of_random_settings_and_samples_are_their_formulas():
    wrong, trained = [], 0
    for number in numbers("60:0"):
        try:
            trained += compare(number)
        except AssertionError as error:
            again = f"RANDOM_RL=1:{number} pytest tests/system/test_random_rl.py"
            settings = draw_settings(random.Random(number))
            wrong.append(f"{again}\n    {settings}\n    {error}")
    assert not wrong, "\n".join(wrong)
    assert trained >= len(numbers("60:0")) / 2


# ---- meshes ----------------------------------------------------------------------------------


def train_on_ranks(layouts, choices):
    with patch.object(rl_engines, "ENGINE_CHOICES", choices):
        return rl_engines.train_on_ranks(layouts)


@pytest.mark.tier("long")
def test_random_settings_have_one_processs_gradients_on_every_mesh():
    drawn = [draw_settings(random.Random(f"mesh {number}")) for number in numbers("4:0")]
    choices = [{**words, "teacher_top_k": 3} if "teacher" in words else words for words in drawn]
    alone = train_on_ranks(rl_engines.ONE, choices)
    timeout = 100 + 10 * len(choices)
    ranks = spawn(2, train_on_ranks, rl_engines.LAYOUTS[2], choices, timeout=timeout)
    for answers in ranks:
        for (layout, number), (terms, gradients) in answers.items():
            expected, expected_gradients = alone["one", number]
            what = (layout, choices[number])
            assert terms == pytest.approx(expected, rel=2e-5, abs=2e-6), what
            for name, gradient in gradients.items():
                error = (gradient - expected_gradients[name]).norm()
                size = expected_gradients[name].norm()
                assert error <= 2e-5 * size + 1e-7 * expected["grad_norm"], (name, *what)


# ---- advantages ------------------------------------------------------------------------------


def plain_advantages(trajectories, settings, kls):
    """Return the advantage of each trained trajectory by its number."""
    rewards, groups = {}, {}
    for i, t in enumerate(trajectories):
        reward = t.reward - (settings.kl_coef * kls[i] if kls else 0.0)
        is_dropped = t.is_overlong and settings.overlong == "drop"
        if t.fault is None and math.isfinite(reward) and not is_dropped:
            rewards[i] = reward
            groups.setdefault(t.group, []).append(i)
    found = {}
    for members in groups.values():
        of_group = [rewards[i] for i in members]
        alone = len(members) == 1 or len({round(r, 9) for r in of_group}) == 1
        for i in members:
            others = [rewards[j] for j in members if j != i]
            if settings.advantage == "reinforce_pp":
                found[i] = rewards[i]
            elif settings.advantage == "none" or alone:
                if settings.teacher is not None:
                    found[i] = 0.0
            elif settings.advantage == "rloo":
                found[i] = rewards[i] - mean(others)
            else:
                found[i] = rewards[i] - mean(of_group)
                found[i] /= stdev(of_group) if settings.advantage == "grpo" else 1
    if settings.overlong == "mask":
        found = {i: a for i, a in found.items() if not trajectories[i].is_overlong}
    if settings.advantage.startswith("reinforce_pp") and found:
        values = list(found.values())
        centre, is_flat = mean(values), max(values) - min(values) < 1e-9
        by = 1.0 if is_flat else stdev(values)
        found = {i: (a - centre) / by for i, a in found.items()}
    return found


@pytest.mark.parametrize(
    "name", ["dr_grpo", "grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "none"]
)
def test_advantages_of_random_groups_are_their_formulas(name):
    for number in numbers("100:0"):
        d = random.Random(f"{name} {number}")
        teacher = "t" if name == "none" or d.random() < 0.3 else None
        overlong, coefficient = d.choice(["keep", "mask", "drop"]), d.choice([0.0, 0.5])
        settings = RlSection(
            advantage=name, teacher=teacher, overlong=overlong, kl_coef=coefficient, kl_in="reward"
        )
        trajectories = []
        for i in range(d.randint(1, 20)):
            reward = d.choice([0.0, 1.0, 1.0, d.gauss(0, 1), d.gauss(1000, 1)])
            if d.random() < 0.05:
                reward = float("nan")
            one = Trajectory(d.randrange(5), i, 0, 0, 1.0, reward=reward)
            one.fault = "env" if d.random() < 0.1 else None
            one.is_overlong = d.random() < 0.2
            trajectories.append(one)
        kls = [d.choice([0.0, d.gauss(0, 1)]) for _ in trajectories] if coefficient else None
        found = advantages(trajectories, settings, kls)
        wanted = plain_advantages(trajectories, settings, kls)
        what = (settings.overlong, teacher, [(t.group, t.reward) for t in trajectories], kls)
        values = {i: a for i, a in enumerate(found.values) if a is not None}
        assert values.keys() == wanted.keys(), (number, what)
        assert values == pytest.approx(wanted, rel=1e-9, abs=1e-9), (number, what)
        assert found.left_out.total() == len(trajectories) - len(values), (number, what)
