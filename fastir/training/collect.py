"""One step's rollouts: which problems are drawn, how many groups are enough, and what happens to the others.

Under the schedule ``turns`` problems are drawn round by round. Under ``async`` each group proceeds by itself: it is
graded when its last rollout ends, a group without gradient is replaced at once, and when enough groups are in, the
rest are aborted. A rank draws every world-size-th problem, so ranks need not talk before all have what they want.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import torch.distributed as dist

from fastir.algo.filters import uninformative_groups
from fastir.config import Config
from fastir.rollout.loop import RolloutTimes, roll_group, shared_runs, timed
from fastir.training.batch import rewards, select
from fastir.training.parts import Parts, gather, together
from fastir.types import Trajectory


@dataclass
class Collected:
    """This rank's graded rollouts of a step."""

    trajectories: list[Trajectory]
    drawn: int  #: problems the step has taken from the stream, as far as this rank knows
    aborted: int = 0  #: rollouts given up because enough groups had ended
    times: RolloutTimes = field(default_factory=RolloutTimes)


async def collect(config: Config, parts: Parts, position: int, seed: tuple[int, ...]) -> Collected:
    """Rollouts of ``prompts_per_step`` groups over all ranks, from ``position`` of the problem stream on.

    With dynamic sampling, problems are drawn until that many groups carry a gradient or the replacements are used up;
    groups without gradient stay in the list, and train nothing. Collective under the schedule ``turns`` only.

    Raises:
        EngineError: the engine is lost.
    """
    if config.rollout.is_async:
        return await _collect_async(config, parts, position, seed)
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted = config.rollout.prompts_per_step
    collected = Collected([], 0)
    missing = wanted
    for _ in range(_rounds(config)):
        problems = parts.train_problems.take(position + collected.drawn, missing)
        numbers = range(collected.drawn, collected.drawn + missing)
        collected.trajectories += await together(
            parts.roll_out(
                problems[rank::world],
                config.rollout.group_size,
                config.rollout.temperature,
                seed,
                collected.times,
                groups=numbers[rank::world],
            )
        )
        collected.drawn += missing
        if config.rollout.dynamic_sampling:
            missing = wanted - collected.drawn + sum(gather(len(_idle(config, collected.trajectories))))
            if missing <= 0:
                break
    return collected


async def _collect_async(config: Config, parts: Parts, position: int, seed: tuple[int, ...]) -> Collected:
    rank, world = dist.get_rank(), dist.get_world_size()
    prompts, size = config.rollout.prompts_per_step, config.rollout.group_size
    wanted = len(range(prompts)[rank::world])
    start = len(range(prompts + math.ceil(config.rollout.over_provision * prompts))[rank::world])
    most = start + (_rounds(config) - 1) * wanted
    gate = asyncio.Semaphore(parts.max_in_flight)
    groups: dict[int, list[Trajectory]] = {}  # by number
    useful: list[int] = []
    open_groups: set[asyncio.Task[list[Trajectory]]] = set()
    drawn = 0
    collected = Collected([], 0)

    async def play(number: int) -> list[Trajectory]:
        (problem,) = parts.train_problems.take(position + number, 1)
        return await parts.grade(
            await roll_group(
                problem,
                number,
                parts.rollouts,
                group_size=size,
                temperature=config.rollout.temperature,
                seed=seed,
                run=run,
                gate=gate,
            )
        )

    async with shared_runs(parts.rollouts) as run:
        with timed(parts.engine, collected.times):
            try:
                missing = start
                while True:
                    for _ in range(min(missing, most - drawn)):
                        open_groups.add(asyncio.create_task(play(drawn * world + rank)))
                        drawn += 1
                    if len(useful) >= wanted or not open_groups:
                        break
                    ended, open_groups = await asyncio.wait(open_groups, return_when=asyncio.FIRST_COMPLETED)
                    for group in await asyncio.gather(*ended):
                        groups[group[0].group] = group
                        if not (config.rollout.dynamic_sampling and len(_idle(config, group))):
                            useful.append(group[0].group)
                    missing = max(0, wanted - len(useful) - len(open_groups))
            finally:
                for task in open_groups:
                    task.cancel()
                await asyncio.gather(*open_groups, return_exceptions=True)
    for number in sorted(useful)[wanted:]:  # groups that ended at the same moment: a step's size never varies
        del groups[number]
    collected.aborted = (drawn - len(groups)) * size
    collected.drawn = drawn * world
    collected.trajectories = [t for number in sorted(groups) for t in groups[number]]
    await parts.engine.call(lambda engine: engine.forget())
    return collected


def _rounds(config: Config) -> int:
    return 1 + (config.rollout.max_resample_rounds if config.rollout.dynamic_sampling else 0)


def _idle(config: Config, trajectories: list[Trajectory]) -> list[int]:
    """Numbers of the groups that carry no gradient."""
    if not trajectories:
        return []
    counts, trains = select(config, trajectories)
    numbered = [t.group for t in trajectories]
    return uninformative_groups(rewards(trajectories), numbered, keep=counts, trains=trains).tolist()
