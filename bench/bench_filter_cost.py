"""Filtered rollouts cost nothing: seconds of the training part of a step with half the rollouts void.

One batch of real rollouts of the tiny model is taken; every second rollout gets a void turn. The same batch is then
trained with `algorithm.void_filter` = "off" (everything is forwarded) and "mask" (the void half is not), alternating,
through the trainer's own functions. Rewards are set so that every rollout has an advantage.

    python bench/bench_filter_cost.py [--rounds 15] [--json bench/results/filter_cost.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from fastir.config import load_config
from fastir.rollout.loop import RolloutTimes
from fastir.training.batch import credit, shares
from fastir.training.parts import open_parts
from fastir.training.step import loss_spec, make_optimizer, update


async def measure(rounds: int) -> dict[str, object]:
    configs = {mode: load_config("quickstart", [f"algorithm.void_filter={mode}"]) for mode in ("off", "mask")}
    config = configs["off"]
    seconds: dict[str, list[float]] = {mode: [] for mode in configs}
    tokens: dict[str, int] = {}
    async with open_parts(config, training=True) as parts:
        assert parts.policy is not None
        problems = parts.train_problems.take(0, config.rollout.prompts_per_step)
        sampled = await parts.roll_out(
            problems, config.rollout.group_size, config.rollout.temperature, (0, 0, 0), RolloutTimes()
        )
        batch = [
            replace(
                t,
                turns=tuple(replace(turn, is_void=i % 2 == 1 and k == 0) for k, turn in enumerate(t.turns)),
                finish_reason="void" if i % 2 else "answer",
                reward=float(i // 2 % 2),
            )
            for i, t in enumerate(sampled)
        ]
        optimizer = make_optimizer(parts.policy, config.optimizer)
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # the same weights in every round
        for round_number in range(rounds + 2):
            for mode, variant in configs.items():
                began = time.perf_counter()
                advantages, trains = credit(variant, batch, 0)
                for share in shares(variant, parts.policy, batch, advantages, trains):
                    update(
                        parts.policy, optimizer, share.batches, share.old_logprobs,
                        spec=loss_spec(variant.algorithm.loss), denominators=share.denominators,
                        temperature=config.rollout.temperature, grad_clip=config.optimizer.grad_clip,
                    )  # fmt: skip
                    tokens[mode] = sum(b.tokens for b in share.batches)
                if round_number >= 2:  # the first two warm up
                    seconds[mode].append(time.perf_counter() - began)
    medians = {mode: statistics.median(values) for mode, values in seconds.items()}
    return {
        "rollouts": len(batch),
        "void_share": sum(t.has_void for t in batch) / len(batch),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "forwarded_tokens": tokens,
        "median_seconds": medians,
        "all_seconds": seconds,
        "ratio": medians["mask"] / medians["off"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.rounds))
    medians, tokens = result["median_seconds"], result["forwarded_tokens"]
    for mode in ("off", "mask"):
        print(f"void_filter={mode:<5} {tokens[mode]:>7} tokens forwarded   {medians[mode] * 1000:8.1f} ms")  # type: ignore[index]
    print(f"training part with {result['void_share']:.0%} void rollouts: {result['ratio']:.2f} of the unfiltered one")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
