"""Filters against loops written from their definitions."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastir.algo.filters import overlong_filter, select_rollouts, uninformative_groups, void_filter, with_signal

FLAGS = np.array([True, False])
TABLE = {  # what the flagged rollout does: (counts, trains); the unflagged one does both
    "mask": (True, False),
    "drop": (False, False),
}


@pytest.mark.parametrize(("mode", "flagged"), [*TABLE.items(), ("off", (True, True))])
def test_void_filter(mode: str, flagged: tuple[bool, bool]) -> None:
    counts, trains = void_filter(FLAGS, mode)  # type: ignore[arg-type]
    assert (counts.tolist(), trains.tolist()) == ([flagged[0], True], [flagged[1], True])


@pytest.mark.parametrize(("mode", "flagged"), [*TABLE.items(), ("keep", (True, True))])
def test_overlong_filter(mode: str, flagged: tuple[bool, bool]) -> None:
    counts, trains = overlong_filter(FLAGS, mode)  # type: ignore[arg-type]
    assert (counts.tolist(), trains.tolist()) == ([flagged[0], True], [flagged[1], True])


def test_unknown_modes_are_errors() -> None:
    with pytest.raises(ValueError, match="void_filter 'keep'"):
        void_filter(FLAGS, "keep")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overlong 'off'"):
        overlong_filter(FLAGS, "off")  # type: ignore[arg-type]


@pytest.mark.parametrize("void_mode", ["mask", "drop", "off"])
@pytest.mark.parametrize("overlong_mode", ["keep", "mask", "drop"])
def test_select_rollouts_for_every_combination(void_mode: str, overlong_mode: str) -> None:
    rollouts = list(itertools.product([False, True], repeat=3))  # void, truncated, failed
    void, truncated, failed = np.array(rollouts).T
    counts, trains = select_rollouts(
        void,
        truncated,
        failed,
        void_mode=void_mode,  # type: ignore[arg-type]
        overlong_mode=overlong_mode,  # type: ignore[arg-type]
    )
    for i, (is_void, is_truncated, is_failed) in enumerate(rollouts):
        dropped = is_failed or (is_void and void_mode == "drop") or (is_truncated and overlong_mode == "drop")
        masked = (is_void and void_mode == "mask") or (is_truncated and overlong_mode == "mask")
        assert counts[i] == (not dropped)
        assert trains[i] == (not dropped and not masked)


def test_select_rollouts_wants_one_entry_per_rollout() -> None:
    with pytest.raises(ValueError, match="need one entry per rollout"):
        select_rollouts([True], [True, False], [False], void_mode="mask", overlong_mode="keep")


def test_with_signal_leaves_zero_advantages_out_unless_another_loss_term_needs_them() -> None:
    trains, advantages = [True, True, False], [0.0, -0.3, 1.0]
    assert with_signal(trains, advantages, other_loss_terms=False).tolist() == [False, True, False]
    assert with_signal(trains, advantages, other_loss_terms=True).tolist() == [True, True, False]


ROLLOUTS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.integers(-2, 2), st.booleans(), st.booleans()), max_size=16
)


@given(ROLLOUTS)
def test_uninformative_groups_match_the_loop(rollouts: list[tuple[float, int, bool, bool]]) -> None:
    expected = []
    for group in sorted({r[1] for r in rollouts}):
        rewards = {r[0] for r in rollouts if r[1] == group and r[2]}
        if len(rewards) < 2 or not any(r[3] for r in rollouts if r[1] == group):
            expected.append(group)
    rewards_, groups, keep, trains = ([r[i] for r in rollouts] for i in range(4))
    assert uninformative_groups(rewards_, groups, keep=keep, trains=trains).tolist() == expected


def test_uninformative_groups_count_everything_by_default() -> None:
    assert uninformative_groups([1, 1, 0, 1, 1], [4, 4, 2, 2, 9]).tolist() == [4, 9]
    with pytest.raises(ValueError, match="shape"):
        uninformative_groups([1, 1], [4])
