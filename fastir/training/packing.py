"""Trajectories → packed micro-batches: no padding, a token budget, only what trains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fastir.types import FloatArray, PackedBatch, Trajectory


def pack(
    trajectories: Sequence[Trajectory],
    token_advantages: Sequence[FloatArray],
    indices: Sequence[int],
    token_budget: int,
) -> list[PackedBatch]:
    """Pack the trajectories named by ``indices`` into micro-batches of at most ``token_budget`` tokens.

    Args:
        token_advantages: per trajectory (L,) advantages; only those on policy tokens are used.
        indices: which trajectories train; the others are never touched, so what is filtered costs nothing.
        token_budget: a single longer trajectory makes a micro-batch of its own.

    A sequence ends at its last policy token: later tokens are neither trained nor seen by any that is. First-fit
    decreasing, which wastes little and depends only on the lengths.
    """
    lengths = {i: _trained_length(trajectories[i]) for i in indices}
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(indices, key=lambda i: (-lengths[i], i)):
        for b, free in enumerate(room):
            if lengths[i] <= free:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(token_budget - lengths[i])
    return [_pack_one(trajectories, token_advantages, sorted(members), lengths) for members in bins]


def anchor_batch() -> PackedBatch:
    """One token that trains nothing: a rank that has run out of micro-batches forwards it, because every rank must
    take part in every collective of a backward pass."""
    zeros = torch.zeros(1)
    return PackedBatch(
        token_ids=zeros.long(),
        position_ids=zeros.long(),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        targets=zeros.long(),
        mask=zeros.bool(),
        advantages=zeros.clone(),
        behavior_logprobs=zeros.clone(),
        turn_ids=torch.full((1,), -1, dtype=torch.int32),
        trajectory_indices=[-1],
    )


def _trained_length(trajectory: Trajectory) -> int:
    policy = np.flatnonzero(trajectory.policy_mask)
    if not len(policy):
        raise ValueError(f"trajectory of {trajectory.problem_id} has no policy token to train on")
    return int(policy[-1]) + 1


def _pack_one(
    trajectories: Sequence[Trajectory],
    token_advantages: Sequence[FloatArray],
    members: Sequence[int],
    lengths: dict[int, int],
) -> PackedBatch:
    def shifted(name: str, last: float) -> np.ndarray:
        """Row t carries the value of token t + 1; the last row of a sequence carries ``last``."""
        parts = []
        for i in members:
            values = token_advantages[i] if name == "advantages" else getattr(trajectories[i], name)
            parts += [values[1 : lengths[i]], np.array([last], dtype=values.dtype)]
        return np.concatenate(parts)

    sizes = [lengths[i] for i in members]
    mask = shifted("policy_mask", False)
    return PackedBatch(
        token_ids=torch.from_numpy(np.concatenate([trajectories[i].token_ids[: lengths[i]] for i in members])).long(),
        position_ids=torch.from_numpy(np.concatenate([np.arange(n) for n in sizes])),
        cu_seqlens=torch.tensor(np.cumsum([0, *sizes]), dtype=torch.int32),
        targets=torch.from_numpy(shifted("token_ids", 0)).long(),
        mask=torch.from_numpy(mask),
        advantages=torch.from_numpy(np.where(mask, shifted("advantages", 0.0), 0.0).astype(np.float32)),
        behavior_logprobs=torch.from_numpy(shifted("behavior_logprobs", 0.0)),
        turn_ids=torch.from_numpy(np.where(mask, shifted("turn_ids", -1), -1).astype(np.int32)),
        trajectory_indices=list(members),
    )
