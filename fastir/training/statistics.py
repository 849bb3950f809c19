"""The numbers of a step: what was rolled out, and what the updates did. Pure functions; gathering is the caller's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastir.tir.sandbox import SandboxStats
from fastir.training.step import UpdateStats
from fastir.types import BoolArray, IntArray, Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory], trains: BoolArray, version: int) -> dict[str, float]:
    """Rewards, void and truncation rates, tool and grader counts of one step's rollouts.

    Args:
        trains: (N,) which of them train. Rates are over rollouts, except ``void_turn_rate`` (over turns).
        version: updates the trainer had made when it got them; ``staleness_*`` is how many of them the sampling
            weights lacked, per turn.
    """
    if not trajectories:
        return {}
    turns = [turn for t in trajectories for turn in t.turns]
    statuses = [turn.exec_status for turn in turns if turn.exec_status is not None]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    finish = [t.finish_reason for t in trajectories]
    metrics = {
        "reward/mean": float(np.mean(rewards)) if rewards else float("nan"),
        "rollout/count": float(len(trajectories)),
        "rollout/void_turn_rate": float(np.mean([turn.is_void for turn in turns])),
        "rollout/void_rollout_rate": float(np.mean([t.has_void for t in trajectories])),
        "rollout/truncated_rate": float(np.mean([t.truncated for t in trajectories])),
        "rollout/turns_mean": len(turns) / len(trajectories),
        "rollout/response_tokens_mean": float(np.mean([len(t.token_ids) - t.prompt_length for t in trajectories])),
        "rollout/policy_tokens": float(sum(t.policy_tokens for t in trajectories)),
        "rollout/trained_share": float(np.mean(trains)),
        "tool/calls": float(len(statuses)),
        "tool/errors": float(sum(s in ("error", "memory", "output", "crashed") for s in statuses)),
        "tool/timeouts": float(statuses.count("timeout")),
        "tool/failed": float(sum(t.failure == "tool" for t in trajectories)),
        "engine/failed": float(sum(t.failure == "engine" for t in trajectories)),
        "rollout/staleness_mean": float(np.mean([version - turn.weight_version for turn in turns])),
        "rollout/staleness_max": float(max(version - turn.weight_version for turn in turns)),
        "grader/timeouts": float(sum(t.grade_status == "timeout" for t in trajectories)),
        "grader/failed": float(sum(t.grade_status == "failed" for t in trajectories)),
    }
    for reason in ("answer", "void", "max_turns", "token_budget", "failed"):
        metrics[f"rollout/finish_{reason}"] = finish.count(reason) / len(finish)
    return metrics


def sandbox_metrics(stats: Sequence[SandboxStats]) -> dict[str, float]:
    """What one step's executions took, over all ranks' sandboxes: CPU and queue seconds, memory, failures, repairs."""
    executions = sum(s.executions for s in stats)
    metrics = {
        "sandbox/executions": float(executions),
        "sandbox/cpu_seconds": sum(s.cpu_seconds for s in stats),
        "sandbox/seconds_mean": sum(s.seconds for s in stats) / max(executions, 1),
        "sandbox/wait_seconds_mean": sum(s.wait_seconds for s in stats) / max(executions, 1),
        "sandbox/wait_seconds_max": max(s.wait_max for s in stats),
        "sandbox/waiting_max": float(max(s.waiting_max for s in stats)),
        "sandbox/peak_mb": max(s.peak_bytes for s in stats) / 2**20,
    }
    for name in ("failed", "refused", "cancelled", "retries", "restarts", "recycled"):
        metrics[f"sandbox/{name}"] = float(sum(getattr(s, name) for s in stats))
    return metrics


def token_staleness(stats: UpdateStats, trajectories: Sequence[Trajectory], version: int) -> IntArray:
    """(n,) for each trained token of an update: how many updates older than ``version`` its sampling weights are."""
    versions = np.zeros((len(trajectories), 1 + max((len(t.turns) for t in trajectories), default=0)), dtype=np.int32)
    for i, t in enumerate(trajectories):
        versions[i, : len(t.turns)] = [turn.weight_version for turn in t.turns]
    return version - versions[stats.trajectories, stats.turn_ids]


def update_metrics(updates: Sequence[UpdateStats], token_gap: float) -> dict[str, float]:
    """Loss, norms and log-prob statistics of one step's updates (this step's updates are averaged, extremes kept).

    ``train/logit_grad_norm_*`` are norms of ∂L/∂logits per rollout: root of the sum of squares over its tokens
    (SimpleTIR §3.3). ``..._turn_k`` restricts the sum to turn k and averages over rollouts. The log-prob gap compares
    trainer and sampler on the step's first update, where both hold the same weights (under ``rollout.steps_ahead`` the
    sampler's are older); ``logprob_gap_share`` is the share of tokens whose gap is beyond ``token_gap`` nats.
    """
    if not updates:
        return {"train/updates": 0.0, "train/skipped_updates": 0.0}
    first = updates[0]
    metrics = {
        "train/updates": float(len(updates)),
        "train/skipped_updates": float(sum(u.skipped for u in updates)),
        "train/loss": float(np.mean([u.loss for u in updates])),
        "train/grad_norm": float(np.mean([u.grad_norm for u in updates])),
        "train/grad_norm_max": float(np.max([u.grad_norm for u in updates])),
    }
    tokens = sum(u.sums.get("tokens_count", 0.0) for u in updates)
    metrics["train/tokens"] = tokens
    if tokens:
        total = {name: sum(u.sums.get(name, 0.0) for u in updates) for u in updates for name in u.sums}
        metrics["train/entropy"] = total.get("entropy_sum", float("nan")) / tokens
        metrics["train/clip_fraction"] = (total.get("clip_low_count", 0.0) + total.get("clip_high_count", 0.0)) / tokens
        metrics["train/ratio_max"] = max(u.sums.get("ratio_max", 0.0) for u in updates)
        metrics["train/old_kl"] = total.get("old_kl_sum", 0.0) / tokens
    if len(first.logprobs):
        gap = np.abs(first.logprobs.astype(np.float64) - first.behavior_logprobs)
        metrics["train/logprob_gap_mean"] = float(gap.mean())
        metrics["train/logprob_gap_max"] = float(gap.max())
        metrics["train/logprob_gap_share"] = float(np.mean(~(gap <= token_gap)))
    metrics |= _norm_metrics(updates)
    return metrics


def _norm_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Norms per rollout and per turn index over the updates' tokens."""
    metrics: dict[str, float] = {}
    rollout_norms, keys, norms, low, mean = [], [], [], [], []
    for update in updates:
        if not len(update.grad_sqnorms):
            continue
        _, owner = np.unique(update.trajectories, return_inverse=True)
        rollout_norms.append(np.sqrt(np.bincount(owner, update.grad_sqnorms)))
        pairs, pair = np.unique(np.stack([update.trajectories, update.turn_ids]), axis=1, return_inverse=True)
        pair = pair.reshape(-1)
        keys.append(pairs[1])
        norms.append(np.sqrt(np.bincount(pair, update.grad_sqnorms)))
        mean.append(np.bincount(pair, update.logprobs) / np.bincount(pair))
        lowest = np.full(pairs.shape[1], np.inf)
        np.minimum.at(lowest, pair, update.logprobs)
        low.append(lowest)
    if not keys:
        return metrics
    all_norms = np.concatenate(rollout_norms)
    for name, value in zip(("p50", "p95", "p99"), np.percentile(all_norms, (50, 95, 99)), strict=True):
        metrics[f"train/logit_grad_norm_{name}"] = float(value)
    metrics["train/logit_grad_norm_max"] = float(all_norms.max())
    turn = np.concatenate(keys)
    columns = {
        "logit_grad_norm": np.concatenate(norms),
        "logprob_mean": np.concatenate(mean),
        "logprob_min": np.concatenate(low),
    }
    for k in np.unique(turn):
        for name, values in columns.items():
            metrics[f"train/{name}_turn_{k}"] = float(values[turn == k].mean())
    return metrics
