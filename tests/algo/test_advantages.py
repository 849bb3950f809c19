"""Advantages against a loop written from the formula."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastir.algo.advantages import group_advantages

Rollout = tuple[float, int, bool]  # reward, group, kept
ROLLOUTS = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 0.1, -0.5]) | st.floats(-3, 3), st.integers(0, 3), st.booleans()), max_size=24
)


def advantages_by_loop(rollouts: list[Rollout], std_norm: bool, eps: float) -> list[float]:
    """A_i = (r_i − mean) / (std + eps), spelled out."""
    result = []
    for reward, group, kept in rollouts:
        siblings = [r for r, g, k in rollouts if g == group and k]
        if not kept or len(set(siblings)) < 2:
            result.append(0.0)
            continue
        scale = statistics.stdev(siblings) + eps if std_norm else 1.0
        result.append((reward - math.fsum(siblings) / len(siblings)) / scale)
    return result


@given(ROLLOUTS, st.booleans(), st.sampled_from([1e-6, 0.1]))
def test_group_advantages_match_the_loop(rollouts: list[Rollout], std_norm: bool, eps: float) -> None:
    rewards, groups, kept = (np.array([r[i] for r in rollouts]) for i in range(3))
    got = group_advantages(rewards, groups, std_norm=std_norm, eps=eps, keep=kept.astype(bool))
    np.testing.assert_allclose(got, advantages_by_loop(rollouts, std_norm, eps), rtol=1e-6, atol=1e-7)


def test_known_group() -> None:
    # Rewards 1, 0, 0, 0: mean 1/4, unbiased variance (9/16 + 3/16) / 3 = 1/4.
    got = group_advantages([1, 0, 0, 0], [5, 5, 5, 5], eps=0.0)
    np.testing.assert_allclose(got, [1.5, -0.5, -0.5, -0.5])


def test_equal_rewards_and_single_rollouts_are_exactly_zero() -> None:
    # The float mean of ten 0.1 is not 0.1, so this must not come from a subtraction.
    rewards = [0.1] * 10 + [7.0]
    assert (group_advantages(rewards, [0] * 10 + [1]) == 0.0).all()


def test_a_rollout_left_out_leaves_before_the_statistics() -> None:
    got = group_advantages([1, 0, 0], [0, 0, 0], keep=[True, True, False], eps=0.0)
    np.testing.assert_allclose(got, [math.sqrt(0.5), -math.sqrt(0.5), 0.0])
    # A left-out reward may be anything, even no number.
    assert np.isfinite(group_advantages([1, 0, math.nan], [0, 0, 0], keep=[True, True, False])).all()


def test_nothing_kept_or_nothing_there_is_fine() -> None:
    assert group_advantages([1, 0], [0, 0], keep=[False, False]).tolist() == [0, 0]
    assert group_advantages([], []).shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "groups", "message"),
    [([1.0, math.nan], [0, 0], "must be finite"), ([1.0], [0, 0], "must all have shape")],
)
def test_bad_rewards_are_errors(rewards: list[float], groups: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, groups)
