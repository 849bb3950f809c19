"""The training loop, whole and visible: rollouts → reward → advantages → filter → updates → weight sync → metrics.

`train` runs a configuration from start (or from its last checkpoint) to end and returns the summary; `evaluate` and
`sample` use the same parts without training.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fastir.config import Config, ConfigError, RolloutConfig, TrainingConfig, flat
from fastir.observe.metrics import MetricsWriter, holds_run
from fastir.observe.progress import Progress
from fastir.rollout.engine import Engine, EngineError
from fastir.rollout.loop import FeedbackRenderer, RolloutTimes, plain_feedback
from fastir.rollout.thread import enter_thread
from fastir.training import checkpoint
from fastir.training.batch import credit, failed, is_stale, shares
from fastir.training.collect import Collected, collect
from fastir.training.parts import Parts, gather, open_parts, together
from fastir.training.statistics import rollout_metrics, sandbox_metrics, token_staleness, update_metrics
from fastir.training.step import UpdateStats, learning_rate, loss_spec, make_optimizer, update
from fastir.training.sync import sync_weights
from fastir.types import BoolArray, FloatArray, Trajectory

#: First number of a sampling address: training and evaluation never share randomness.
_TRAIN, _EVAL, _SHOW = 0, 1, 2

#: Settings (or their first letters) with which a run may be resumed changed: they say how long, how closely watched
#: and on how much of the machine it runs, not what is trained.
_FREE_TO_CHANGE = (
    "run.name", "run.dir", "run.steps", "run.threads", "observe.", "checkpoint.", "eval.", "data.heldout",
    "reward.workers", "sandbox.workers", "sandbox.max_waiting", "rollout.threads", "rollout.max_in_flight",
    "rollout.max_failed_share", "vllm.", "sandbox.url", "training.weight_check",
    "training.max_", "training.token_logprob_gap",
)  # fmt: skip


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
        ConfigError, SandboxError: something the run needs is missing, or ``resume`` with settings that train otherwise.
        RunStopped: too many failures, a lost engine, or numbers that cannot be trusted.
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
    changed = changed_settings(config) if resume else []
    async with open_parts(config, training=True, render=render) as parts:
        policy = parts.policy
        assert policy is not None
        optimizer = make_optimizer(policy, config.optimizer)
        counters: dict[str, Any] = {"step": 0, "position": 0, "updates": 0, "train_seconds": 0.0, "before": {}}
        if resume:
            counters = checkpoint.load(found[-1], policy, optimizer)
        if parts.main:
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
        train_thread = ThreadPoolExecutor(1, initializer=enter_thread, initargs=(torch.get_num_threads(),))
        whole = counters["step"]  # steps that the weights and the optimizer hold from their first update to their last

        def save() -> None:
            with progress.phase("checkpoint"):
                if writer:
                    writer.sync()
                state = {**counters, "step": whole}
                checkpoint.save(
                    folder, whole, policy, optimizer, parts.tokenizer, state,
                    keep=config.checkpoint.keep, export_dtype=parts.dtype,
                )  # fmt: skip

        async def sync(version: int) -> None:
            """Give the engine the trainer's weights; nothing may be in flight."""

            def work(engine: Engine) -> None:
                engine.wake()
                sync_weights(policy, engine, version, parts.dtype, config.training.weight_check)

            await together(parts.engine.call(work))

        def train_on(
            step: int, trajectories: list[Trajectory], advantages: FloatArray, trains: BoolArray, version: int
        ) -> list[UpdateStats]:
            """Several updates per batch of rollouts, each over its own share of the problems."""
            nonlocal nonfinite_in_a_row
            updates: list[UpdateStats] = []
            todo = shares(config, policy, trajectories, advantages, trains) * config.training.epochs
            restore = checkpoint.snapshot(policy, optimizer) if len(todo) > 1 else None
            for share in todo:
                stats = update(
                    policy, optimizer, share.batches, share.old_logprobs,
                    spec=spec, denominators=share.denominators,
                    temperature=config.rollout.temperature, grad_clip=config.optimizer.grad_clip,
                    before_step=None if updates else partial(_stop_on_gap, config.training, trajectories, version),
                )  # fmt: skip
                updates.append(stats)
                nonfinite_in_a_row = nonfinite_in_a_row + 1 if stats.skipped else 0
                if stats.skipped:
                    _save_offenders(config.run_dir, step, trajectories, stats)
                if nonfinite_in_a_row >= config.training.max_nonfinite_steps:
                    if restore:
                        restore()  # what is resumed is the end of a whole step
                    raise RunStopped(
                        f"loss or gradient not finite in {nonfinite_in_a_row} updates in a row "
                        f"(training.max_nonfinite_steps); rollouts are in {config.run_dir / 'nonfinite'}"
                    )
            return updates

        pending: asyncio.Task[Collected] | None = None  # with steps_ahead, the rollouts of the step to come
        try:
            with Progress(config.run.steps, mode, counters["step"], config.run.name) as progress:
                for line in changed:
                    progress.message(f"resumed with another {line}")
                if resume:
                    await sync(counters["updates"])
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
                        seed = (config.run.seed, _TRAIN, step)
                        batch = await together(pending or collect(config, parts, counters["position"], seed))
                        pending = None
                    trajectories, version = batch.trajectories, counters["updates"]
                    position = counters["position"] + max(gather(batch.drawn))
                    advantages, trains = credit(config, trajectories, version)
                    everyone = [t for part in gather(trajectories) for t in part]
                    metrics = rollout_metrics(everyone, np.concatenate(gather(trains)), version)
                    metrics |= sandbox_metrics(gather(parts.sandbox.take_stats()))
                    metrics["rollout/aborted"] = float(sum(gather(batch.aborted)))
                    metrics["rollout/stale"] = float(sum(is_stale(t, config.rollout, version) for t in everyone))
                    if writer:
                        writer.log_trajectories(step, everyone)
                    _stop_on_failures(everyone, config.rollout, version)

                    # Updates, while the next step's rollouts are sampled (steps_ahead) or the engine sleeps.
                    with progress.phase("train") as train_timer:
                        if config.rollout.steps_ahead:
                            if step + 1 < config.run.steps:
                                seed = (config.run.seed, _TRAIN, step + 1)
                                pending = asyncio.create_task(collect(config, parts, position, seed))
                            working = partial(train_on, step, trajectories, advantages, trains, version)
                            updates = await asyncio.get_running_loop().run_in_executor(train_thread, working)
                        else:
                            await together(parts.engine.call(lambda engine: engine.sleep()))
                            updates = train_on(step, trajectories, advantages, trains, version)
                    counters["updates"] += sum(not stats.skipped for stats in updates)
                    counters["position"] = position
                    whole = step + 1
                    lost: EngineError | None = None  # the step is whole all the same: it is logged before the run stops
                    with progress.phase("sync") as sync_timer:
                        try:
                            if pending:
                                with progress.phase("rollout"):
                                    await together(asyncio.shield(pending))
                            await sync(counters["updates"])
                        except EngineError as error:
                            lost = error

                    seconds = time.perf_counter() - began
                    counters["train_seconds"] += seconds
                    metrics |= update_metrics(updates, config.training.token_logprob_gap) | {
                        "train/lr": optimizer.param_groups[0]["lr"],
                        "time/rollout": batch.times.generate,
                        "time/tool": batch.times.tool,
                        "time/train": train_timer.seconds,
                        "time/sync": sync_timer.seconds,
                        "time/step": seconds,
                        "throughput/tokens_per_second": metrics["rollout/policy_tokens"] / seconds,
                    }
                    if not lost and config.eval.every and config.data.heldout and (step + 1) % config.eval.every == 0:
                        with progress.phase("eval"):
                            metrics |= _evaluation_metrics(await _evaluate(config, parts))
                    if writer:
                        writer.log(step, metrics)
                    progress.update(step, metrics)
                    if lost:
                        raise lost
                    if config.checkpoint.every and (step + 1) % config.checkpoint.every == 0:
                        save()
                if not (folder / f"step-{config.run.steps}").exists():
                    save()
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
        except (RunStopped, EngineError) as error:
            if not (folder / f"step-{whole}").exists():
                save()
            if isinstance(error, EngineError):
                raise RunStopped(
                    f"the engine failed: {error}\nThe run's last whole step is saved: go on with --resume"
                ) from error
            raise
        finally:
            if pending:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
            train_thread.shutdown()
            if writer:
                writer.close()


async def _evaluate(config: Config, parts: Parts) -> list[Trajectory]:
    """Graded rollouts of the held-out problems, over all ranks. The same randomness every time: before and after
    differ by the weights alone."""
    assert parts.heldout_problems is not None
    problems = parts.heldout_problems[: config.eval.problems]
    rank, world = dist.get_rank(), dist.get_world_size()
    own = await together(
        parts.roll_out(
            problems[rank::world],
            config.eval.samples,
            config.eval.temperature,
            (config.run.seed, _EVAL),
            RolloutTimes(),
            groups=range(len(problems))[rank::world],
        )
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


def _stop_on_failures(everyone: Sequence[Trajectory], config: RolloutConfig, version: int) -> None:
    """``everyone``: the rollouts of all ranks."""
    count = sum(failed(t) or is_stale(t, config, version) for t in everyone)
    if count > config.max_failed_share * len(everyone):
        raise RunStopped(
            f"something that is not the model failed in {count} of {len(everyone)} rollouts, more than "
            f"rollout.max_failed_share = {config.max_failed_share}: the tool {_failures(everyone, 'tool')}, "
            f"the engine {_failures(everyone, 'engine')}, "
            f"the grader {sum(t.grade_status in ('timeout', 'failed') for t in everyone)}, "
            f"too stale {sum(is_stale(t, config, version) for t in everyone)}; see `fastir doctor`"
        )


def _failures(trajectories: Sequence[Trajectory], what: str) -> int:
    return sum(t.failure == what for t in trajectories)


def _stop_on_gap(
    config: TrainingConfig, trajectories: Sequence[Trajectory], version: int, stats: UpdateStats
) -> None:
    """On a step's first update the trainer holds weights ``version``: tokens sampled with the same weights must get
    the same log-probs, and those of older weights similar ones (collective)."""
    gaps = np.abs(stats.logprobs.astype(np.float64) - stats.behavior_logprobs)
    fresh = token_staleness(stats, trajectories, version) == 0
    beyond = ~(gaps <= config.token_logprob_gap)  # NaN is beyond every bound
    own = [gaps[fresh].sum(), fresh.sum(), beyond[fresh].sum(), gaps[~fresh].sum(), (~fresh).sum()]
    total, count, far, stale_total, stale_count = (float(x) for x in np.sum(gather(own), axis=0))
    causes = "stale weights, a wrong temperature or a shifted mask"
    if not total <= config.max_logprob_gap * count:
        raise RunStopped(
            f"trainer and sampler disagree by {total / count:.3g} nats per token "
            f"(training.max_logprob_gap = {config.max_logprob_gap}): {causes}"
        )
    if not far <= config.max_logprob_gap_share * count:
        raise RunStopped(
            f"trainer and sampler disagree by more than training.token_logprob_gap = {config.token_logprob_gap} nats "
            f"in {far / count:.1%} of tokens (training.max_logprob_gap_share = {config.max_logprob_gap_share}): "
            f"{causes}"
        )
    if not stale_total <= config.max_stale_logprob_gap * stale_count:
        raise RunStopped(
            f"trainer and sampler disagree by {stale_total / stale_count:.3g} nats per token on rollouts of older "
            f"weights (training.max_stale_logprob_gap = {config.max_stale_logprob_gap}): {causes}, or updates too large"
        )


def changed_settings(config: Config) -> list[str]:
    """The settings of a run to be resumed that differ from its config.json, as ``name = new (was old)``.

    Raises:
        ConfigError: one of them changes what is trained.
    """
    path = config.run_dir / "config.json"
    if not path.exists():
        return []
    before = flat(json.loads(path.read_text()))
    now = flat(json.loads(config.model_dump_json()))
    changed = {name: before[name] for name, value in now.items() if name in before and before[name] != value}
    lines = {name: f"{name} = {now[name]!r} (was {old!r})" for name, old in changed.items()}
    refused = [line for name, line in lines.items() if not name.startswith(_FREE_TO_CHANGE)]
    if refused:
        raise ConfigError(
            f"--resume: settings differ from {path} that change what is trained: {'; '.join(refused)}. "
            "Resume with the old values, or start a new run (run.name=NAME) from the checkpoint's model/ (model.path)"
        )
    return list(lines.values())


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
