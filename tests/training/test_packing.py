"""Packing against a token-by-token reading of the trajectories."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import make_trajectory

from fastir.training.packing import anchor_batch, pack


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 200))
def test_every_trained_token_appears_once_with_its_own_values(seed, count, budget):
    rng = np.random.default_rng(seed)
    trajectories = [make_trajectory(rng, turns=int(rng.integers(1, 4))) for _ in range(count)]
    advantages = [rng.normal(size=len(t.token_ids)).astype(np.float32) for t in trajectories]
    indices = [i for i in range(count) if rng.random() < 0.7]
    seen = {}
    for batch in pack(trajectories, advantages, indices, budget):
        bounds = batch.cu_seqlens.tolist()
        assert batch.tokens <= budget or batch.sequences == 1
        for place, i in enumerate(batch.trajectory_indices):
            low, high = bounds[place], bounds[place + 1]
            trajectory = trajectories[i]
            assert batch.position_ids[low:high].tolist() == list(range(high - low))
            assert batch.token_ids[low:high].tolist() == trajectory.token_ids[: high - low].tolist()
            for row in range(low, high):
                token = row - low + 1  # the row predicts this token
                trained = row + 1 < high and bool(trajectory.policy_mask[token])
                assert bool(batch.mask[row]) == trained
                if trained:
                    seen[i, token] = (
                        int(batch.targets[row]),
                        float(batch.advantages[row]),
                        float(batch.behavior_logprobs[row]),
                        int(batch.turn_ids[row]),
                    )
                else:
                    assert float(batch.advantages[row]) == 0.0
                    assert int(batch.turn_ids[row]) == -1
    expected = {
        (i, token): (
            int(trajectories[i].token_ids[token]),
            float(advantages[i][token]),
            float(trajectories[i].behavior_logprobs[token]),
            int(trajectories[i].turn_ids[token]),
        )
        for i in indices
        for token in np.flatnonzero(trajectories[i].policy_mask)
    }
    assert seen == expected


def test_feedback_behind_the_last_policy_token_is_not_forwarded():
    rng = np.random.default_rng(0)
    trajectory = make_trajectory(rng, turns=2)
    cut = trajectory.turns[-1].end
    batch = pack([trajectory], [np.ones(len(trajectory.token_ids), np.float32)], [0], 1000)[0]
    assert batch.tokens == cut


def test_filtered_trajectories_are_never_packed():
    rng = np.random.default_rng(0)
    trajectories = [make_trajectory(rng) for _ in range(4)]
    advantages = [np.ones(len(t.token_ids), np.float32) for t in trajectories]
    batches = pack(trajectories, advantages, [1, 3], 1000)
    assert sorted(i for b in batches for i in b.trajectory_indices) == [1, 3]
    assert pack(trajectories, advantages, [], 1000) == []


def test_anchor_trains_nothing():
    assert not anchor_batch().mask.any()


def test_packed_batch_refuses_lengths_that_differ():
    batch = anchor_batch()
    with pytest.raises(ValueError, match="advantages"):
        type(batch)(**{**batch.__dict__, "advantages": batch.advantages.repeat(2)})
