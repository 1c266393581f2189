"""Advantages equal their formulas, and failed trajectories are left out."""

import math
import statistics

import numpy as np
import pytest

from moetrain.config import Config, ConfigError
from moetrain.config.rl import RlSection
from moetrain.rl.losses import advantages, length_reward
from moetrain.rl.trajectories import Trajectory

REWARDS = [[0.5, 1.5, -0.25], [2.0, 7.0], [1.0, 0.0, 0.0, 0.25]]


def ended(group, reward, **how):
    """Return a finished trajectory."""
    return Trajectory(group, 0, 0, 0, 1.0, reward=reward, **how)


OUTCOMES = [ended(g, reward) for g, rewards in enumerate(REWARDS) for reward in rewards]


def values_of(outcomes, **settings):
    return advantages(outcomes, RlSection(**settings)).values


def per_group(formula):
    return [formula(r, rewards) for rewards in REWARDS for r in rewards]


def normalised(values):
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    return [(v - mean) / spread for v in values]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dr_grpo", per_group(lambda r, all_: r - sum(all_) / len(all_))),
        ("grpo", per_group(lambda r, all_: (r - sum(all_) / len(all_)) / statistics.stdev(all_))),
        ("rloo", per_group(lambda r, all_: r - (sum(all_) - r) / (len(all_) - 1))),
        ("reinforce_pp", normalised(per_group(lambda r, _: r))),
        (
            "reinforce_pp_baseline",
            normalised(per_group(lambda r, all_: r - statistics.fmean(all_))),
        ),
    ],
)
def test_advantages_match_their_formulas(name, expected):
    found = advantages(OUTCOMES, RlSection(advantage=name))
    assert found.values == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert found.spread == pytest.approx(statistics.stdev(expected), rel=1e-12)
    assert not found.left_out
    # The order of trajectories, over ranks or within one, does not matter.
    order = np.random.default_rng(0).permutation(len(OUTCOMES))
    shuffled = values_of([OUTCOMES[i] for i in order], advantage=name)
    assert shuffled == pytest.approx([expected[i] for i in order], rel=1e-12, abs=1e-15)


def test_dr_grpo_is_the_default():
    assert values_of(OUTCOMES) == values_of(OUTCOMES, advantage="dr_grpo")


def test_failed_trajectories_change_no_advantage():
    bad = [
        ended(0, 100.0, fault="timeout"),
        ended(1, math.nan),
        ended(2, -50.0, fault="raised"),
        ended(2, -50.0, fault="raised"),
    ]
    found = advantages([*bad, *OUTCOMES], RlSection())
    assert found.values == [None] * 4 + values_of(OUTCOMES)
    assert found.left_out == {"timeout": 1, "not_finite": 1, "raised": 2}


def test_an_overlong_trajectory_counts_is_masked_or_is_gone():
    outcomes = [ended(0, 1.0), ended(0, 0.0), ended(0, 4.0, is_overlong=True)]
    kept = advantages(outcomes, RlSection())
    masked = advantages(outcomes, RlSection(overlong="mask"))
    dropped = advantages(outcomes, RlSection(overlong="drop"))
    assert kept.values == pytest.approx([1 - 5 / 3, -5 / 3, 4 - 5 / 3])
    assert masked.values == [*kept.values[:2], None]
    assert dropped.values == [0.5, -0.5, None]
    assert not kept.left_out
    assert masked.left_out == dropped.left_out == {"overlong": 1}


def test_length_is_punished_softly():
    settings = RlSection(max_tokens=10, overlong_buffer=4)
    found = [length_reward(written, settings) for written in (0, 5, 6, 7, 8, 9, 10, 11)]
    assert found == [0, 0, 0, -0.25, -0.5, -0.75, -1, -1]
    whole = RlSection(max_tokens=7, overlong_buffer=7)
    assert [length_reward(written, whole) for written in (0, 1, 7)] == [0, -1 / 7, -1]
    assert length_reward(10, RlSection(max_tokens=10)) == 0


@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "rloo", "reinforce_pp_baseline"])
def test_groups_without_variance_are_counted_and_left_out(name):
    flat = [ended(7, 0.1 + 0.2), ended(7, 0.3), ended(8, 0.0), ended(8, 0.0)]
    alone = [ended(9, 5.0), ended(9, 6.0, fault="timeout")]
    found = advantages([*flat, *alone, *OUTCOMES], RlSection(advantage=name))
    assert found.values[:6] == [None] * 6
    assert found.values[6:] == values_of(OUTCOMES, advantage=name)
    assert found.left_out == {"no_variance": 4, "alone": 1, "timeout": 1}


def test_advantages_without_any_spread_are_0():
    found = advantages([ended(0, 1.0), ended(0, 1.0)], RlSection(advantage="reinforce_pp"))
    assert found.values == [0.0, 0.0]
    # The last bit of their mean differs.
    found = advantages([ended(i, 0.1) for i in range(7)], RlSection(advantage="reinforce_pp"))
    assert found.values == pytest.approx([0.0] * 7, abs=1e-15)
    assert advantages([], RlSection()).values == []
    assert advantages([ended(0, 1.0, fault="raised")], RlSection()).spread == 0


def test_a_kl_in_the_reward_is_taken_off_before():
    outcomes, settings = [ended(0, 1.0), ended(0, 1.0)], RlSection(kl_coef=0.5, kl_in="reward")
    assert advantages(outcomes, settings).values == [None, None]
    assert advantages(outcomes, settings, [2.0, 4.0]).values == [0.5, -0.5]
    found = advantages(outcomes, settings, [math.nan, 4.0])
    assert found.left_out == {"not_finite": 1, "alone": 1}


@pytest.mark.parametrize(
    ("words", "field", "problem"),
    [
        (["rl.policy=reinforce", "rl.clip_high=0.3"], "rl.clip_high", "0.3 contradicts rl.policy"),
        (["rl.policy=reinforce", "rl.clip_low=0.3"], "rl.clip_low", r"\(this loss clips no"),
        (["rl.policy=gspo", "rl.dual_clip=3"], "rl.dual_clip", "3.0 contradicts rl.policy 'gspo'"),
        (["rl.ratio=rollout", "rl.importance=token"], "rl.importance", "'token' contradicts"),
        (["rl.mask_low=0.5"], "rl.mask_low", "contradicts rl.mask 'none'"),
        (["rl.mask=token", "rl.mask_low=2.5"], "rl.mask_low", "less than or equal to 1"),
        (["rl.importance=none", "rl.importance_high=3"], "rl.importance_high", "'none'"),
        (["rl.ratio=rollout", "rl.importance_high=3"], "rl.importance_high", "'rollout'"),
        (["rl.kl=k2"], "rl.kl", "'k2' contradicts rl.kl_coef 0"),
        (["rl.kl_in=reward"], "rl.kl_in", "'reward' contradicts rl.kl_coef 0"),
        (["rl.kl=k1", "rl.kl_coef=0.1"], "rl.kl", "use k2 or k3, or set rl.kl_in reward"),
        (["rl.temperature=0"], "rl.temperature", "greater than 0"),
        (["rl.dual_clip=1"], "rl.dual_clip", "greater than 1"),
        (["rl.clip_low=1.5"], "rl.clip_low", "less than or equal to 1"),
        (["rl.policy=ppo"], "rl.policy", "give 'clip', 'gspo'"),
    ],
)
def test_settings_that_cannot_be_are_one_line(words, field, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        Config.load(None, words, environ={})
    assert caught.value.field == field


def test_unset_clipping_is_the_policys_own():
    assert RlSection().clip_range == (0.8, 1.28)
    assert RlSection(policy="gspo", clip_high=0.01).clip_range == (1 - 3e-4, 1.01)
    assert RlSection(policy="cispo").clip_range == (0.0, 5.0)
    assert RlSection(policy="dppo_tv").clip_range == (-0.15, 0.15)
    assert RlSection(policy="dppo_kl", clip_low=0.1).clip_range == (-0.1, 0.05)
    assert RlSection().importance_of == "token"
    assert RlSection(ratio="rollout").importance_of == "none"
