"""From graded rollouts to what trains: filters, advantages, and packed shares of the batch, one per update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from fastir_kernels import Denominators

from fastir.algo.advantages import group_advantages
from fastir.algo.filters import select_rollouts, with_signal
from fastir.config import Config, RolloutConfig
from fastir.training.model import Policy
from fastir.training.packing import pack
from fastir.training.parts import gather
from fastir.training.step import recompute_logprobs
from fastir.types import BoolArray, FloatArray, PackedBatch, Trajectory


@dataclass
class Share:
    """What one optimizer update trains on (this rank's part), with the counts of all ranks."""

    batches: list[PackedBatch]
    denominators: Denominators
    old_logprobs: list[torch.Tensor] = field(default_factory=list)


def select(config: Config, trajectories: Sequence[Trajectory]) -> tuple[BoolArray, BoolArray]:
    return select_rollouts(
        np.array([t.has_void for t in trajectories], dtype=bool),
        np.array([t.truncated for t in trajectories], dtype=bool),
        np.array([failed(t) for t in trajectories], dtype=bool),
        void_mode=config.algorithm.void_filter,
        overlong_mode=config.algorithm.overlong,
    )


def credit(config: Config, trajectories: Sequence[Trajectory], version: int) -> tuple[FloatArray, BoolArray]:
    """(N,) advantages and (N,) which rollouts train, at ``version`` updates."""
    counts, trains = select(config, trajectories)
    trains = trains & ~np.array([is_stale(t, config.rollout, version) for t in trajectories], dtype=bool)
    groups = [t.group for t in trajectories]
    advantages = group_advantages(
        rewards(trajectories), groups, std_norm=config.algorithm.std_norm, keep=counts
    ).astype(np.float32)
    other_terms = config.algorithm.loss.entropy_coef > 0
    return advantages, with_signal(trains, advantages, other_loss_terms=other_terms)


def shares(
    config: Config, policy: Policy, trajectories: Sequence[Trajectory], advantages: FloatArray, trains: BoolArray
) -> list[Share]:
    """The step's rollouts that train, packed, one share per update: problems are dealt to ``mini_batches`` shares.

    A share in which no rank has anything to train is left out.
    """
    per_token = [np.where(t.policy_mask, advantages[i], 0).astype(np.float32) for i, t in enumerate(trajectories)]
    order = {group: place for place, group in enumerate(dict.fromkeys(t.group for t in trajectories))}
    count = config.training.mini_batches
    made = []
    for number in range(count):
        members = [
            i for i, t in enumerate(trajectories) if trains[i] and order[t.group] * count // len(order) == number
        ]
        tokens = sum(trajectories[i].policy_tokens for i in members)
        totals = np.sum(gather([tokens, len(members)]), axis=0)  # over ranks
        if totals[1]:
            batches = pack(trajectories, per_token, members, config.training.token_budget)
            made.append(Share(batches, Denominators(float(totals[0]), float(totals[1]), config.tir.response_tokens)))
    for share in made:
        share.old_logprobs = (
            recompute_logprobs(policy, share.batches, config.rollout.temperature)
            if config.training.old_logprobs == "recompute"
            else [batch.behavior_logprobs for batch in share.batches]
        )
    return made


def failed(trajectory: Trajectory) -> bool:
    """The tool, the engine or the grader failed for reasons that are not the model's: its reward says nothing."""
    return trajectory.finish_reason == "failed" or trajectory.grade_status in ("timeout", "failed")


def is_stale(trajectory: Trajectory, config: RolloutConfig, version: int) -> bool:
    """Its weights are more than ``max_staleness`` updates older than ``version``: it counts, but does not train."""
    return version - trajectory.weight_version > config.max_staleness


def rewards(trajectories: Sequence[Trajectory]) -> FloatArray:
    return np.array([0.0 if t.reward is None else t.reward for t in trajectories], dtype=np.float32)
