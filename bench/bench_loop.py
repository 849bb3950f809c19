"""Rollouts with and without a barrier at every turn: the schedules ``turns`` and ``async`` with the same engine.

64 rollouts of the quickstart's model, up to 5 turns each. The engine is real; tools are simulated by a wait of 50 ms
(90 %) or 2 s (10 %) that depends on the sampled ids alone, so both schedules meet the same tools. Every turn counts as
code, and each ends the rollout with 10 % chance. The lower bound is the longest single rollout: those of a round that
wait longest are rolled out again, one at a time with the engine to themselves, and the longest wall time counts (where
rounding made one sample other tokens than in the batch, the time its tools took in the batch).

    python bench/bench_loop.py [--rounds 5] [--output bench/results/loop.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
import zlib
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from fastir.config import load_config
from fastir.rollout.hf import HFEngine
from fastir.rollout.loop import RolloutParts, Schedule, rollout
from fastir.rollout.prompt import TurnFormat
from fastir.rollout.thread import EngineThread
from fastir.tiny.problems import tiny_problems
from fastir.tir.sandbox import ExecResult
from fastir.training.model import load_model, load_tokenizer
from fastir.types import Trajectory

ROLLOUTS, TURNS = 64, 5
FAST, SLOW, SLOW_SHARE, END_SHARE = 0.05, 2.0, 0.1, 0.1
ALONE = 3  # how many of the longest rollouts are measured alone


class SimulatedTools:
    """Waits instead of running code."""

    async def run(self, code: str) -> ExecResult:
        slow, end = np.random.default_rng(zlib.crc32(code.encode())).random(2)
        seconds = SLOW if slow < SLOW_SHARE else FAST
        await asyncio.sleep(seconds)
        return ExecResult("ok", "17\n", answer="17" if end < END_SHARE else None, seconds=seconds)


async def measure(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = load_config("quickstart", [f"tir.max_turns={TURNS}", "tir.response_tokens=400"])
    tokenizer = load_tokenizer(config.model)
    engine = HFEngine(
        load_model(config.model, torch.float32), tokenizer, stop=config.tir.stop, batch_size=config.rollout.batch_size
    )
    thread = EngineThread(engine)
    parts = RolloutParts(
        thread,
        SimulatedTools(),  # type: ignore[arg-type]
        TurnFormat(tokenizer, config.data, config.tir),
        config.tir,
        decode=lambda ids: f"```python\n{list(ids)}\n```\n",
        share_executions=False,  # each rollout waits for its own tools, as the one alone does
    )
    problems = tiny_problems("train", ROLLOUTS, seed=0)

    async def timed(schedule: Schedule, seed: int, members: range) -> tuple[float, list[Trajectory]]:
        began = time.perf_counter()
        trajectories = await rollout(
            [problems[i] for i in members],
            parts,
            group_size=1,
            temperature=1.0,
            seed=(seed,),
            schedule=schedule,
            groups=members,
        )
        seconds = time.perf_counter() - began
        await thread.call(lambda engine: engine.forget())
        return seconds, trajectories

    rows = []
    try:
        for seed in range(-1, rounds):
            order: list[Schedule] = ["turns", "async"] if seed % 2 else ["async", "turns"]
            seconds = {}
            for schedule in order:
                seconds[schedule], rolled = await timed(schedule, seed + 1, range(ROLLOUTS))
                if schedule == "async":
                    trajectories = rolled
            longest = sorted(trajectories, key=lambda t: (t.seconds, t.policy_tokens))[-ALONE:]
            alone = []
            for t in longest:
                wall, (same,) = await timed("async", seed + 1, range(t.group, t.group + 1))
                # A batch of one rounds otherwise; a rollout that samples other tokens meets other tools.
                alone.append(wall if np.array_equal(same.token_ids, t.token_ids) else t.seconds)
            row = {
                "turns_seconds": seconds["turns"],
                "async_seconds": seconds["async"],
                "lower_bound_seconds": max(alone),
                "turns_mean": statistics.mean(len(t.turns) for t in trajectories),
                "policy_tokens": sum(t.policy_tokens for t in trajectories),
            }
            if seed >= 0:  # the first round warms up
                rows.append(row)
                print("  ".join(f"{name} {value:.2f}" for name, value in row.items()), flush=True)
    finally:
        thread.close()

    def median(value: Any) -> float:
        return round(statistics.median(value(row) for row in rows), 3)

    return {
        "rollouts": ROLLOUTS,
        "rounds": rounds,
        "turns_seconds": median(lambda r: r["turns_seconds"]),
        "async_seconds": median(lambda r: r["async_seconds"]),
        "lower_bound_seconds": median(lambda r: r["lower_bound_seconds"]),
        "async_over_turns": median(lambda r: r["async_seconds"] / r["turns_seconds"]),
        "async_over_lower_bound": median(lambda r: r["async_seconds"] / r["lower_bound_seconds"]),
        "bars": {"async_over_turns": 0.65, "async_over_lower_bound": 1.2},
        "each_round": [{name: round(value, 3) for name, value in row.items()} for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "loop.json")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    result = asyncio.run(measure(options.rounds))
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "each_round"}, indent=1))


if __name__ == "__main__":
    main()
