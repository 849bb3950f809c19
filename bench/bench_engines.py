"""Seconds per training step with SmolLM2-135M on GSM8K: engines ``hf`` and ``vllm``, against TRL's GRPO trainer.

    python bench/bench_engines.py --data gsm8k_train.jsonl --json bench/results/engines.json

Every side trains the same weights in float32 on the same 8 problems x 8 rollouts a step: up to 2 turns of up to 64
sampled tokens, 160 after the prompt, temperature 1, a Python tool, one AdamW update on every sampled token (nothing is
filtered on fastir's side: no void filter, and a negligible entropy bonus so that rollouts without advantage train too).
The model's text format, and how TRL is made to speak it, are those of bench_trl_step.py, as are the remarks on what
still differs. With these prompts the model rarely or never calls the tool, so a rollout is one turn and earns nothing:
the figures are those of sampling and training, not of tool turns. Each side runs in processes of its own, in rounds
that alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_trl_step import COUNTS, NO_FILTER, RECIPE, machine, ratios, report, run_apart, run_fastir, summarize
from trl_side import run_trl

from fastir.config import load_config
from fastir.data import ProblemStream, load_problems
from fastir.training.model import load_model, load_tokenizer

SIDES = ("trl", "hf", "vllm")
WORK = (
    *RECIPE,
    *NO_FILTER,
    "optimizer.lr=1e-6",
    "rollout.prompts_per_step=8",
    "rollout.batch_size=64",
    "rollout.threads=0",
    "tir.max_turns=2",
    "tir.turn_tokens=64",
    "tir.response_tokens=160",
    "training.token_budget=4096",
    "vllm.max_model_len=1024",
)


def run_side(side: str, steps: int, seed: int, folder: str, data: str) -> list[dict[str, float]]:
    settings = (*WORK, f"model.path={folder}", f"data.train={data}")
    if side != "trl":
        return run_fastir(steps, seed, (*settings, f"rollout.engine={side}"))
    config = load_config("quickstart", settings)
    stream = ProblemStream(load_problems(data)[0], seed)
    return run_trl(config, folder, stream.take(0, steps * config.rollout.prompts_per_step), steps, seed)


def save_model(folder: str) -> None:
    """SmolLM2-135M as vLLM and TRL read it, without its chat template."""
    import torch

    config = load_config("smollm2-cpu").model
    load_model(config, torch.float32).save_pretrained(folder)
    load_tokenizer(config).save_pretrained(folder)


def compare(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    about = machine(arguments.threads)
    rounds: dict[str, list[list[dict[str, float]]]] = {side: [] for side in SIDES}
    for number in range(arguments.rounds):
        order: Sequence[str] = SIDES if number % 2 == 0 else SIDES[::-1]
        for side in order:
            options = ("--model", folder, "--data", str(arguments.data.resolve()))
            rounds[side].append(run_apart(__file__, side, arguments, *options))
            median = statistics.median(step["seconds"] for step in rounds[side][-1])
            print(f"round {number + 1}/{arguments.rounds}  {side:<6}  {median:.1f} s per step", flush=True)
    sides = {side: summarize(rounds[side]) for side in SIDES}
    for side in sides.values():
        seconds = side["parts_median"]["generate_seconds"]
        side["generated_tokens_per_second"] = side["per_step"]["sampled_tokens"] / seconds
    return {
        "machine": about | {"load_average_at_end": os.getloadavg()[0]},
        "settings": WORK,
        "warmup_steps": arguments.warmup,
        "seed": arguments.seed,
        "count_labels": COUNTS,
        "sides": sides,
        "trl_over": {side: ratios(sides["trl"], sides[side]) for side in SIDES if side != "trl"},
        "seconds": {side: [[step["seconds"] for step in one] for one in rounds[side]] for side in SIDES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's training problems: JSONL or parquet")
    parser.add_argument("--rounds", type=int, default=2, help="rounds that alternate the sides (default 2)")
    parser.add_argument("--steps", type=int, default=2, help="measured steps a round and side (default 2)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them (default 1)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of torch (default: all cores)")
    parser.add_argument("--seed", type=int, default=0, help="order of the problems, and sampling (default 0)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--side", choices=SIDES, help="run one side in this process and write its steps")
    parser.add_argument("--model", help="with --side: folder of the model")
    arguments = parser.parse_args()
    if arguments.side:
        count = arguments.warmup + arguments.steps
        steps = run_side(arguments.side, count, arguments.seed, arguments.model, str(arguments.data))
        arguments.json.write_text(json.dumps(steps))
        return
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        result = compare(arguments, folder)
    print(report(result))
    for name, side in result["sides"].items():
        print(f"{name}: {side['generated_tokens_per_second']:.0f} tokens per second while generating")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
