"""The training loop, whole and visible: rollouts → reward → advantages → filter → updates → weight sync → metrics.

`train` runs a configuration from start (or from its last checkpoint) to end and returns the summary; `evaluate` and
`sample` use the same parts without training.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from fastir.algo.filters import uninformative_groups
from fastir.config import Config
from fastir.observe.metrics import MetricsWriter, holds_run
from fastir.observe.progress import Progress
from fastir.rollout.loop import FeedbackRenderer, RolloutTimes, plain_feedback
from fastir.training import checkpoint
from fastir.training.batch import credit, failed, rewards, select, shares
from fastir.training.parts import Parts, gather, open_parts
from fastir.training.statistics import rollout_metrics, update_metrics
from fastir.training.step import UpdateStats, learning_rate, loss_spec, make_optimizer, update
from fastir.training.sync import sync_weights
from fastir.types import Trajectory

#: First number of a sampling address: training and evaluation never share randomness.
_TRAIN, _EVAL, _SHOW = 0, 1, 2


class RunStopped(RuntimeError):
    """The run cannot go on; a checkpoint of the last good state was written."""


def train(config: Config, *, resume: bool = False, render: FeedbackRenderer = plain_feedback) -> dict[str, Any]:
    """Train as configured; returns the summary that is also written to ``<run>/summary.json``.

    Args:
        resume: continue from the newest checkpoint of the run; its files go on as if it had never stopped.
        render: what the policy is shown of an execution (see `fastir.rollout.loop.FeedbackRenderer`).

    Raises:
        FileExistsError: the run's folder holds an earlier run and ``resume`` is False.
        FileNotFoundError: ``resume`` is True and there is no checkpoint.
        ConfigError, SandboxError: something the run needs is missing.
        RunStopped: too many failures, or numbers that cannot be trusted.
    """
    return asyncio.run(_train(config, resume, render))


def evaluate(config: Config) -> dict[str, float]:
    """Accuracy and void rate of ``model.path`` on the held-out problems."""

    async def run() -> dict[str, float]:
        async with open_parts(config, training=False) as parts:
            return _evaluation_metrics(await _evaluate(config, parts))

    return asyncio.run(run())


def sample(config: Config, count: int) -> list[Trajectory]:
    """``count`` graded rollouts of ``model.path`` on training problems."""

    async def run() -> list[Trajectory]:
        async with open_parts(config, training=False) as parts:
            problems = parts.train_problems.take(0, count)
            seed = (config.run.seed, _SHOW)
            return await parts.roll_out(problems, 1, config.rollout.temperature, seed, RolloutTimes())

    return asyncio.run(run())


async def _train(config: Config, resume: bool, render: FeedbackRenderer) -> dict[str, Any]:
    folder = config.run_dir / "checkpoints"
    found = checkpoint.checkpoints(folder)
    if resume and not found:
        raise FileNotFoundError(f"--resume: {folder} holds no checkpoint; start without --resume under a new run.name")
    if not resume and (found or holds_run(config.run_dir)):
        raise FileExistsError(f"{config.run_dir} holds an earlier run: continue it with --resume or set run.name")
    async with open_parts(config, training=True, render=render) as parts:
        policy = parts.policy
        assert policy is not None
        optimizer = make_optimizer(policy, config.optimizer)
        counters: dict[str, Any] = {"step": 0, "position": 0, "updates": 0, "train_seconds": 0.0, "before": {}}
        if resume:
            counters = checkpoint.load(found[-1], policy, optimizer)
            sync_weights(policy, parts.engine, counters["updates"], parts.dtype, config.training.weight_check)
        elif parts.main:
            config.run_dir.mkdir(parents=True, exist_ok=True)
            (config.run_dir / "config.json").write_text(config.model_dump_json(indent=1) + "\n")
        writer = None
        if parts.main:
            writer = MetricsWriter(
                config.run_dir,
                tensorboard=config.observe.tensorboard,
                trajectories=config.observe.trajectories,
                resume_step=counters["step"] if resume else None,
            )
        mode = config.observe.progress if parts.main else "off"
        spec = loss_spec(config.algorithm.loss)
        nonfinite_in_a_row = 0

        def save(step: int) -> None:
            with progress.phase("checkpoint"):
                if writer:
                    writer.sync()
                state = {**counters, "step": step}
                checkpoint.save(
                    folder, step, policy, optimizer, parts.tokenizer, state,
                    keep=config.checkpoint.keep, export_dtype=parts.dtype,
                )  # fmt: skip

        try:
            with Progress(config.run.steps, mode, counters["step"], config.run.name) as progress:
                if config.data.heldout and not counters["before"]:
                    with progress.phase("eval"):
                        before = await _evaluate(config, parts)
                    counters["before"] = _evaluation_metrics(before)
                    if writer:
                        writer.log(0, counters["before"])
                        writer.log_trajectories(0, before, split="heldout")
                for step in range(counters["step"], config.run.steps):
                    began = time.perf_counter()
                    for group in optimizer.param_groups:
                        group["lr"] = learning_rate(config.optimizer, step, config.run.steps)

                    # Rollouts, rewards, advantages: who counts in the group, who trains.
                    with progress.phase("rollout"):
                        times = RolloutTimes()
                        trajectories, position = await _collect(config, parts, step, counters["position"], times)
                    advantages, trains = credit(config, trajectories)
                    everyone = [t for part in gather(trajectories) for t in part]
                    metrics = rollout_metrics(everyone, np.concatenate(gather(trains)))
                    if writer:
                        writer.log_trajectories(step, everyone)
                    _stop_on_failures(trajectories, config.rollout.max_failed_share)

                    # Updates: several per batch of rollouts, each over its own share of the problems.
                    with progress.phase("train") as train_timer:
                        updates: list[UpdateStats] = []
                        for share in shares(config, policy, trajectories, advantages, trains) * config.training.epochs:
                            stats = update(
                                policy, optimizer, share.batches, share.old_logprobs,
                                spec=spec, denominators=share.denominators,
                                temperature=config.rollout.temperature, grad_clip=config.optimizer.grad_clip,
                            )  # fmt: skip
                            if not updates and not stats.skipped:
                                _stop_on_gap(stats, config.training.max_logprob_gap)
                            updates.append(stats)
                            counters["updates"] += not stats.skipped
                            nonfinite_in_a_row = nonfinite_in_a_row + 1 if stats.skipped else 0
                            if stats.skipped:
                                _save_offenders(config.run_dir, step, trajectories, stats)
                            if nonfinite_in_a_row >= config.training.max_nonfinite_steps:
                                raise RunStopped(
                                    f"loss or gradient not finite in {nonfinite_in_a_row} updates in a row "
                                    f"(training.max_nonfinite_steps); rollouts are in {config.run_dir / 'nonfinite'}"
                                )
                    with progress.phase("sync") as sync_timer:
                        sync_weights(
                            policy, parts.engine, counters["updates"], parts.dtype, config.training.weight_check
                        )

                    seconds = time.perf_counter() - began
                    counters["position"] = position
                    counters["train_seconds"] += seconds
                    metrics |= update_metrics(updates) | {
                        "train/lr": optimizer.param_groups[0]["lr"],
                        "time/rollout": times.generate,
                        "time/tool": times.tool,
                        "time/train": train_timer.seconds,
                        "time/sync": sync_timer.seconds,
                        "time/step": seconds,
                        "throughput/tokens_per_second": metrics["rollout/policy_tokens"] / seconds,
                    }
                    if config.eval.every and config.data.heldout and (step + 1) % config.eval.every == 0:
                        with progress.phase("eval"):
                            metrics |= _evaluation_metrics(await _evaluate(config, parts))
                    if writer:
                        writer.log(step, metrics)
                    progress.update(step, metrics)
                    if config.checkpoint.every and (step + 1) % config.checkpoint.every == 0:
                        save(step + 1)
                if not (folder / f"step-{config.run.steps}").exists():
                    save(config.run.steps)
                after: list[Trajectory] = []
                if config.data.heldout:
                    with progress.phase("eval"):
                        after = await _evaluate(config, parts)
            summary = _summary(config, counters, _evaluation_metrics(after) if after else {})
            if writer:
                if after:
                    writer.log(config.run.steps, _evaluation_metrics(after))
                    writer.log_trajectories(config.run.steps, after, split="heldout")
                (config.run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
            return summary
        except RunStopped:
            save(step)
            raise
        finally:
            if writer:
                writer.close()


async def _collect(
    config: Config, parts: Parts, step: int, position: int, times: RolloutTimes
) -> tuple[list[Trajectory], int]:
    """This rank's graded rollouts of the step, and the data position after it.

    With dynamic sampling, problems are drawn again, at most ``max_resample_rounds`` times, until ``prompts_per_step``
    groups carry a gradient (over all ranks); groups without gradient stay in the list, and train nothing.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted = config.rollout.prompts_per_step
    trajectories: list[Trajectory] = []
    groups = 0
    missing = wanted
    rounds = 1 + (config.rollout.max_resample_rounds if config.rollout.dynamic_sampling else 0)
    for _ in range(rounds):
        problems = parts.train_problems.take(position, missing)
        numbers = range(groups, groups + missing)
        trajectories += await parts.roll_out(
            problems[rank::world],
            config.rollout.group_size,
            config.rollout.temperature,
            (config.run.seed, _TRAIN, step),
            times,
            groups=numbers[rank::world],
        )
        position += missing
        groups += missing
        if rounds > 1:
            counts, trains = select(config, trajectories)
            numbered = [t.group for t in trajectories]
            idle = uninformative_groups(rewards(trajectories), numbered, keep=counts, trains=trains)
            missing = wanted - groups + sum(len(part) for part in gather(idle))
            if missing <= 0:
                break
    return trajectories, position


async def _evaluate(config: Config, parts: Parts) -> list[Trajectory]:
    """Graded rollouts of the held-out problems, over all ranks. The same randomness every time: before and after
    differ by the weights alone."""
    assert parts.heldout_problems is not None
    problems = parts.heldout_problems[: config.eval.problems]
    rank, world = dist.get_rank(), dist.get_world_size()
    own = await parts.roll_out(
        problems[rank::world],
        config.eval.samples,
        config.eval.temperature,
        (config.run.seed, _EVAL),
        RolloutTimes(),
        groups=range(len(problems))[rank::world],
    )
    return [t for part in gather(own) for t in part]


def _evaluation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Failed rollouts (of the tool or grader) are counted, not scored."""
    scored = [t for t in trajectories if not failed(t)]
    turns = [turn for t in scored for turn in t.turns]
    return {
        "eval/accuracy": float(np.mean([t.reward for t in scored])) if scored else float("nan"),
        "eval/void_turn_rate": float(np.mean([turn.is_void for turn in turns])) if turns else float("nan"),
        "eval/rollouts": float(len(trajectories)),
        "eval/failed": float(len(trajectories) - len(scored)),
        "eval/turns_mean": len(turns) / len(scored) if scored else float("nan"),
    }


def _stop_on_failures(trajectories: Sequence[Trajectory], most: float) -> None:
    count_failed, count = np.sum(gather([sum(map(failed, trajectories)), len(trajectories)]), axis=0)
    if count_failed > most * count:
        raise RunStopped(
            f"the tool or the grader failed in {count_failed} of {count} rollouts, more than "
            f"rollout.max_failed_share = {most}: see tool/failed, grader/failed and grader/timeouts in metrics.jsonl, "
            "and run `fastir doctor`"
        )


def _stop_on_gap(stats: UpdateStats, most: float) -> None:
    """On a step's first update trainer and sampler hold the same weights, so their log-probs must agree."""
    gaps = np.abs(stats.logprobs.astype(np.float64) - stats.behavior_logprobs)
    total, count = np.sum(gather([float(gaps.sum()), len(gaps)]), axis=0)
    if total > most * count:
        raise RunStopped(
            f"trainer and sampler disagree by {total / count:.3g} nats per token (training.max_logprob_gap = {most}): "
            "stale weights, a wrong temperature or a shifted mask"
        )


def _save_offenders(run_dir: Path, step: int, trajectories: Sequence[Trajectory], stats: UpdateStats) -> None:
    """The rollouts of an update that was skipped, for replay: ``nonfinite/step-N.jsonl``."""
    folder = run_dir / "nonfinite"
    folder.mkdir(exist_ok=True)
    with (folder / f"step-{step}.jsonl").open("a") as file:
        for i in np.unique(stats.trajectories):
            file.write(json.dumps(trajectories[int(i)].to_json()) + "\n")


def _summary(config: Config, counters: dict[str, Any], after: dict[str, float]) -> dict[str, Any]:
    before = counters["before"]
    return {
        "run": config.run.name,
        "seed": config.run.seed,
        "steps": config.run.steps,
        "updates": counters["updates"],
        "accuracy_before": before.get("eval/accuracy"),
        "accuracy_after": after.get("eval/accuracy"),
        "void_rate_before": before.get("eval/void_turn_rate"),
        "void_rate_after": after.get("eval/void_turn_rate"),
        "train_seconds": counters["train_seconds"],
        "run_dir": str(config.run_dir),
    }
