"""Records refuse lengths and masks that disagree, and survive a line of JSON."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from fastir.types import PackedBatch, Trajectory, Turn


def fields(**changes):
    """A trajectory of 2 prompt tokens, turn 0 (2 policy, 1 feedback), turn 1 (1 policy)."""
    return {
        "problem_id": "p",
        "group": 0,
        "sibling": 1,
        "prompt_length": 2,
        "token_ids": np.array([5, 6, 7, 8, 9, 10], dtype=np.int32),
        "policy_mask": np.array([0, 0, 1, 1, 0, 1], dtype=bool),
        "turn_ids": np.array([-1, -1, 0, 0, 0, 1], dtype=np.int32),
        "behavior_logprobs": np.array([0, 0, -0.1, -1 / 3, 0, -7e-9], dtype=np.float32),
        "weight_version": 3,
        "finish_reason": "answer",
        "turns": (Turn(2, 4, 5, text="é\n", code="x", feedback="1"), Turn(5, 6, 6, text="\\boxed{1}", answer="1")),
        "gold": "1",
        "answer": "1",
        "reward": 1.0,
    } | changes


def test_a_trajectory_survives_a_line_of_json_exactly():
    before = Trajectory(**fields())
    after = Trajectory.from_json(json.loads(json.dumps(before.to_json())))
    for field in dataclasses.fields(Trajectory):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if isinstance(old, np.ndarray):
            assert old.dtype == new.dtype
            np.testing.assert_array_equal(old, new)
        else:
            assert old == new
    assert after.policy_tokens == 3


def test_every_float32_logprob_survives():
    values = -np.random.default_rng(0).exponential(size=20_000).astype(np.float32)
    turn = Turn(0, len(values), len(values), text="")
    long = Trajectory(
        **fields(
            prompt_length=0,
            turns=(turn,),
            token_ids=np.zeros(len(values), dtype=np.int32),
            turn_ids=np.zeros(len(values), dtype=np.int32),
            policy_mask=np.ones(len(values), dtype=bool),
            behavior_logprobs=values,
        )
    )
    after = Trajectory.from_json(json.loads(json.dumps(long.to_json())))
    np.testing.assert_array_equal(after.behavior_logprobs, values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_mask": np.ones(5, dtype=bool)}, "policy_mask has 5 entries for 6"),
        ({"turn_ids": np.zeros(7, dtype=np.int32)}, "turn_ids has 7 entries"),
        ({"behavior_logprobs": np.zeros(0, dtype=np.float32)}, "behavior_logprobs has 0 entries"),
        ({"policy_mask": np.array([0, 0, 1, 1, 1, 1], dtype=bool)}, "policy_mask does not mark exactly"),
        ({"policy_mask": np.array([0, 0, 1, 0, 0, 1], dtype=bool)}, "policy_mask does not mark exactly"),
        ({"prompt_length": 1}, "a turn starts at 2, expected 1"),
        ({"turns": (Turn(2, 4, 5, text=""),)}, "policy_mask does not mark exactly"),  # a token that no turn claims
        ({"turns": (Turn(2, 4, 5, text=""), Turn(5, 6, 9, text=""))}, "length 6"),
        ({"finish_reason": "tired"}, "finish_reason 'tired'"),
    ],
)
def test_a_trajectory_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Trajectory(**fields(**changes))


@pytest.mark.parametrize("positions", [(3, 2, 4), (0, 2, 1), (-1, 0, 0)])
def test_a_turn_out_of_order_is_refused(positions):
    with pytest.raises(ValueError, match="out of order"):
        Turn(*positions, text="")


@pytest.mark.parametrize(
    ("reason", "cut", "truncated"),
    [
        ("max_turns", False, True),
        ("token_budget", False, True),
        ("answer", True, False),
        ("void", True, True),
        ("void", False, False),
        ("failed", False, False),
    ],
)
def test_truncated_means_cut_by_a_limit(reason, cut, truncated):
    turns = (Turn(2, 4, 5, text=""), Turn(5, 6, 6, text="", truncated=cut))
    assert Trajectory(**fields(finish_reason=reason, turns=turns)).truncated is truncated


def batch(**changes):
    """Two sequences, of 3 and 2 rows."""
    return {
        "token_ids": torch.arange(5),
        "position_ids": torch.tensor([0, 1, 2, 0, 1]),
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
        "targets": torch.arange(5),
        "mask": torch.tensor([False, True, False, True, False]),
        "advantages": torch.zeros(5),
        "behavior_logprobs": torch.zeros(5),
        "turn_ids": torch.tensor([-1, 0, -1, 0, -1], dtype=torch.int32),
        "trajectory_indices": [0, 4],
    } | changes


def test_a_packed_batch_counts_its_tokens_and_sequences():
    made = PackedBatch(**batch())
    assert (made.tokens, made.sequences) == (5, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": torch.zeros(4)}, "advantages has 4 rows for 5"),
        ({"turn_ids": torch.zeros(6)}, "turn_ids has 6 rows"),
        ({"cu_seqlens": torch.tensor([0, 3, 4])}, "run from 0 to 5"),
        ({"cu_seqlens": torch.tensor([1, 3, 5])}, "run from 0 to 5"),
        ({"trajectory_indices": [0]}, "one entry per sequence"),
        ({"mask": torch.tensor([False, True, True, True, False])}, "last row of a sequence predicts nothing"),
    ],
)
def test_a_packed_batch_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PackedBatch(**batch(**changes))
