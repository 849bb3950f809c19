"""Advantages and token weights against loops written from the formulas."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastir.algo.advantages import (
    Aggregation,
    DenominatorCounts,
    group_advantages,
    loss_denominators,
    overlong_penalty,
    token_advantages,
    token_weights,
)

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


def test_overlong_penalty() -> None:
    got = overlong_penalty([0, 80, 90, 100, 101, 500], max_length=100, buffer=20)
    np.testing.assert_allclose(got, [0, 0, -0.5, -1, -1, -1])
    for buffer in (0, 101):
        with pytest.raises(ValueError, match="overlong buffer"):
            overlong_penalty([1], max_length=100, buffer=buffer)


# A batch is rollouts of tokens; each token is (trains). Shares are a cut of the rollouts.
BATCHES = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=8)
AGGREGATIONS: list[Aggregation] = ["sequence_mean", "token_mean", "sequence_sum"]


def weights_by_loop(batch: list[list[bool]], aggregation: str, max_length: int) -> list[list[float]]:
    n = sum(1 for rollout in batch if any(rollout))
    tokens = sum(sum(rollout) for rollout in batch)
    weights = []
    for rollout in batch:
        row = []
        for trains in rollout:
            if not trains:
                row.append(0.0)
            elif aggregation == "sequence_mean":
                row.append(1 / n * (1 / sum(rollout)))
            elif aggregation == "token_mean":
                row.append(1 / tokens)
            else:
                row.append(1 / (n * max_length))
        weights.append(row)
    return weights


def flat(batch: list[list[bool]], first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    mask = np.array([trains for rollout in batch for trains in rollout], dtype=bool)
    ids = np.array([first + i for i, rollout in enumerate(batch) for _ in rollout], dtype=int)
    return mask, ids


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(batch=BATCHES, cuts=st.sets(st.integers(0, 8)))
def test_token_weights_match_the_loop_however_the_batch_is_cut(
    aggregation: Aggregation, batch: list[list[bool]], cuts: set[int]
) -> None:
    bounds = sorted({0, len(batch), *(c for c in cuts if c < len(batch))})
    shares = [flat(batch[a:b], first=a) for a, b in itertools.pairwise(bounds)]
    counts = sum((loss_denominators(mask, ids) for mask, ids in shares), DenominatorCounts(0, 0))
    got = np.concatenate([token_weights(m, i, counts, aggregation, max_length=7) for m, i in shares])
    np.testing.assert_allclose(got, np.concatenate([np.array(w) for w in weights_by_loop(batch, aggregation, 7)]))


def test_weights_of_the_means_sum_to_one() -> None:
    mask, ids = flat([[True, True, False], [False], [True]])
    counts = loss_denominators(mask, ids)
    assert counts == DenominatorCounts(trained_tokens=3, trained_sequences=2)
    np.testing.assert_allclose(token_weights(mask, ids, counts, "sequence_mean"), [0.25, 0.25, 0, 0, 0.5])
    np.testing.assert_allclose(token_weights(mask, ids, counts, "token_mean"), [1 / 3, 1 / 3, 0, 0, 1 / 3])
    np.testing.assert_allclose(
        token_weights(mask, ids, counts, "sequence_sum", max_length=10), [0.05, 0.05, 0, 0, 0.05]
    )


def test_a_batch_without_trained_tokens_weighs_nothing() -> None:
    mask, ids = flat([[False, False]])
    assert token_weights(mask, ids, loss_denominators(mask, ids), "sequence_mean").tolist() == [0, 0]


def test_bad_arguments_of_token_weights() -> None:
    mask, ids = flat([[True], [True]])
    counts = loss_denominators(mask, ids)
    with pytest.raises(ValueError, match=r"loss\.aggregation 'mean'"):
        token_weights(mask, ids, counts, "mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs max_length > 0"):
        token_weights(mask, ids, counts, "sequence_sum")
    with pytest.raises(ValueError, match=r"shape \(T,\)"):
        token_weights(mask, ids[:1], counts, "token_mean")
    # Counts of another share would silently scale the loss.
    with pytest.raises(ValueError, match="sum loss_denominators over all micro-batches"):
        token_weights(mask, ids, DenominatorCounts(1, 1), "token_mean")


@given(BATCHES, st.data())
def test_token_advantages_match_the_loop(batch: list[list[bool]], data: st.DataObject) -> None:
    advantages = data.draw(st.lists(st.floats(-2, 2), min_size=len(batch), max_size=len(batch)))
    mask, ids = flat(batch)
    expected = [a if trains else 0.0 for a, rollout in zip(advantages, batch) for trains in rollout]
    assert token_advantages(advantages, ids, mask).tolist() == expected
