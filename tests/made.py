"""Trajectories made from random numbers, for tests of what happens to them."""

from __future__ import annotations

import numpy as np

from fastir.types import Trajectory, Turn


def make_trajectory(
    rng: np.random.Generator,
    *,
    group: int = 0,
    sibling: int = 0,
    turns: int = 2,
    longest: int = 12,
    vocabulary: int = 300,
    finish_reason: str = "answer",
    void: bool = False,
    reward: float = 0.0,
) -> Trajectory:
    """Random ids with a prompt, ``turns`` policy spans and feedback between them."""
    prompt = int(rng.integers(1, longest))
    position, made = prompt, []
    for k in range(turns):
        end = position + int(rng.integers(1, longest))
        feedback_end = end + (int(rng.integers(0, longest)) if k + 1 < turns else 0)
        made.append(Turn(position, end, feedback_end, text="", is_void=void and k + 1 == turns))
        position = feedback_end
    mask = np.zeros(position, dtype=bool)
    turn_ids = np.full(position, -1, dtype=np.int32)
    for k, turn in enumerate(made):
        mask[turn.start : turn.end] = True
        turn_ids[turn.start : turn.feedback_end] = k
    return Trajectory(
        problem_id=f"p{group}",
        group=group,
        sibling=sibling,
        prompt_length=prompt,
        token_ids=rng.integers(0, vocabulary, position).astype(np.int32),
        policy_mask=mask,
        turn_ids=turn_ids,
        behavior_logprobs=np.where(mask, -rng.random(position) * 5, 0).astype(np.float32),
        weight_version=0,
        finish_reason=finish_reason,
        turns=tuple(made),
        reward=reward,
    )
