"""Seconds per training step: fastir's quickstart against TRL's ``GRPOTrainer(tools=[...])`` on the same work.

    python bench/bench_trl_step.py --json bench/results/trl_step.json

Both sides train the tiny model inside the package, from the same weights, on the same problems in the same order:
16 problems × 8 rollouts, up to 3 turns of up to 48 sampled tokens, 192 tokens after the prompt, temperature 1, one
optimizer update a step (AdamW, lr 1e-3, constant; clip 0.2/0.28; mean over tokens; advantages over the group's
standard deviation; gradient norm clipped at 1), float32 on the CPU, no vLLM, the same number of threads. Each side runs
in processes of its own, in rounds that alternate, so that a noisy machine disturbs all of them. A step's seconds are
wall-clock time from the end of one step to the end of the next, everything included.

Sides:
    trl         TRL. Trains on every sampled token.
    fastir      The quickstart recipe. Rollouts that cannot move the weights (advantage zero) or have a void turn are
                not forwarded in training; this is part of the product, and part of the difference.
    fastir-all  The same with nothing filtered (no void filter, and a negligible entropy bonus so that zero advantages
                train too): it trains on every sampled token, as TRL does. What is left is speed on equal work.

How TRL is made to do the same work with this model, which knows no chat format: a chat template spells the model's
plain text format, a response template reads a closed python fence as a call of the tool ``python``, and a stopping
criterion on token ids ends a turn at the closing fence, as fastir's stop string does. (transformers then pads with the
EOS token, which TRL would take for a sampled one; it is taken off again.) The chat template is applied at run time;
the package is not touched.

Where the work still differs, in TRL's favour:
    - TRL's tool is `exec` in the trainer's process; fastir runs each block in an isolated process of its sandbox.
    - TRL's reward compares strings; fastir grades equivalent forms, in worker processes where strings do not settle it.
    - TRL logs nothing; fastir writes metrics, TensorBoard events and every rollout, and computes its statistics.
    - TRL runs no tool after the last turn; fastir does, since code may give the answer.

And in nobody's: sampling uses other random numbers, so the sides sample different numbers of tokens, and as training
goes on the models part. Hence also the seconds per sampled token. TRL runs with its defaults for what is its own affair
(padded batches, contexts read again each turn), with gradient checkpointing off.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from trl_side import Meter, run_trl

from fastir.config import load_config
from fastir.data import ProblemStream
from fastir.tiny.problems import tiny_problems

SIDES = ("trl", "fastir", "fastir-all")
RECIPE = ("optimizer.schedule=constant", "data.heldout=none", "checkpoint.every=0")
NO_FILTER = ("algorithm.void_filter=off", "algorithm.loss.entropy_coef=1e-12")

#: Counts of a step that both sides report, and what they mean.
COUNTS = {
    "rollouts": "rollouts",
    "turns": "turns sampled",
    "sampled_tokens": "tokens sampled",
    "tool_calls": "tool calls",
    "sampling_positions": "positions forwarded to sample, padding included",
    "loss_rollouts": "rollouts in the loss",
    "loss_tokens": "tokens in the loss",
    "training_positions": "positions forwarded to train, padding included",
    "updates": "optimizer updates",
    "reward": "mean reward",
}


# --- fastir -----------------------------------------------------------------------------------------------------------


def run_fastir(steps: int, seed: int, overrides: Sequence[str]) -> list[dict[str, float]]:
    from transformers.models.llama.modeling_llama import LlamaModel

    from fastir.observe.metrics import MetricsWriter
    from fastir.training import trainer

    meter = Meter()
    meter.count_positions(LlamaModel)
    writer_class: Any = MetricsWriter
    plain_log = writer_class.log

    def log(writer: Any, step: int, metrics: Any) -> None:
        plain_log(writer, step, metrics)
        if "time/step" in metrics:
            rollouts = metrics["rollout/count"]
            meter.add(
                rollouts=rollouts,
                turns=round(metrics["rollout/turns_mean"] * rollouts),
                sampled_tokens=metrics["rollout/policy_tokens"],
                tool_calls=metrics["tool/calls"],
                loss_rollouts=round(metrics["rollout/trained_share"] * rollouts),
                loss_tokens=metrics.get("train/tokens", 0.0),
                updates=metrics["train/updates"] - metrics["train/skipped_updates"],
                reward=metrics["reward/mean"],
                generate_seconds=metrics["time/rollout"],
                tool_seconds=metrics["time/tool"],
                train_seconds=metrics["time/train"] + metrics["time/sync"],
            )
            meter.mark()

    writer_class.log = log
    with tempfile.TemporaryDirectory() as folder:
        settings = (f"run.steps={steps}", f"run.seed={seed}", f"run.dir={folder}")
        trainer.train(load_config("quickstart", [*RECIPE, *settings, *overrides]))
    return meter.steps


# --- comparison -------------------------------------------------------------------------------------------------------


def run_side(side: str, steps: int, seed: int) -> list[dict[str, float]]:
    if side == "trl":
        config = load_config("quickstart", RECIPE)
        problems = ProblemStream(tiny_problems("train", 4096, seed=0), seed)
        base = str(resources.files("fastir.tiny").joinpath("base"))
        return run_trl(config, base, problems.take(0, steps * config.rollout.prompts_per_step), steps, seed)
    return run_fastir(steps, seed, NO_FILTER if side == "fastir-all" else ())


def run_apart(script: str, side: str, arguments: argparse.Namespace, *options: str) -> list[dict[str, float]]:
    """The measured steps of a side, run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "steps.json"
        command = [sys.executable, script, "--side", side, "--json", str(rows), "--seed", str(arguments.seed)]
        command += ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup), *options]
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        return json.loads(rows.read_text())[arguments.warmup :]


def summarize(rounds: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Medians and spread of a side's steps, over all rounds; counts are means per step."""
    steps = [step for one in rounds for step in one]
    seconds = [step["seconds"] for step in steps]
    low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    sampled = sum(step["sampled_tokens"] for step in steps)
    parts = ("generate_seconds", "tool_seconds", "train_seconds")
    return {
        "steps": len(steps),
        "seconds_median": median,
        "seconds_quartiles": [low, high],
        "seconds_range": [min(seconds), max(seconds)],
        "seconds_median_by_round": [statistics.median(step["seconds"] for step in one) for one in rounds],
        "sampled_tokens_per_second": sampled / sum(seconds),
        "microseconds_per_sampled_token": 1e6 * sum(seconds) / sampled,
        "parts_median": {name: statistics.median(step.get(name, 0.0) for step in steps) for name in parts},
        "per_step": {name: statistics.fmean(step.get(name, 0.0) for step in steps) for name in COUNTS},
    }


def ratios(trl: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How many times as long TRL takes."""
    by_round = [a / b for a, b in zip(trl["seconds_median_by_round"], other["seconds_median_by_round"], strict=True)]
    per_token = trl["microseconds_per_sampled_token"] / other["microseconds_per_sampled_token"]
    return {
        "per_step": trl["seconds_median"] / other["seconds_median"],
        "per_step_by_round": by_round,
        "per_sampled_token": per_token,
    }


def machine(threads: int) -> dict[str, Any]:
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in ("torch", "transformers", "trl")},
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def report(result: dict[str, Any]) -> str:
    sides = result["sides"]

    def line(label: str, cells: list[str]) -> str:
        return f"{label:<52}" + "".join(f"{cell:>18}" for cell in cells)

    def row(label: str, cell: Callable[[dict[str, Any]], str]) -> str:
        return line(label, [cell(side) for side in sides.values()])

    lines = [
        "  ".join(f"{name} {value}" for name, value in result["machine"].items()),
        line("", list(sides)),
        row("seconds per step, median", lambda s: f"{s['seconds_median']:.3f}"),
        row("  quartiles", lambda s: "{:.3f}–{:.3f}".format(*s["seconds_quartiles"])),
        row("  range", lambda s: "{:.3f}–{:.3f}".format(*s["seconds_range"])),
        row("  steps measured", lambda s: str(s["steps"])),
        row("sampled tokens per second", lambda s: f"{s['sampled_tokens_per_second']:.0f}"),
        row("microseconds per sampled token", lambda s: f"{s['microseconds_per_sampled_token']:.1f}"),
        row("of a step: generation, seconds", lambda s: f"{s['parts_median']['generate_seconds']:.3f}"),
        row("of a step: tool, seconds", lambda s: f"{s['parts_median']['tool_seconds']:.3f}"),
        row("of a step: update (and sync), seconds", lambda s: f"{s['parts_median']['train_seconds']:.3f}"),
        "per step, mean:",
    ]
    for name, label in COUNTS.items():
        digits = 2 if name == "reward" else 0
        lines.append(row(f"  {label}", lambda s, n=name, d=digits: f"{s['per_step'][n]:.{d}f}"))  # type: ignore[misc]
    for side, ratio in result["trl_over"].items():
        by_round = ", ".join(f"{value:.2f}" for value in ratio["per_step_by_round"])
        lines.append(
            f"trl / {side}: {ratio['per_step']:.2f} per step (rounds: {by_round}), "
            f"{ratio['per_sampled_token']:.2f} per sampled token"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds that alternate the sides (default 3)")
    parser.add_argument("--steps", type=int, default=12, help="measured steps a round and side (default 12)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (default 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of torch (default: all cores)")
    parser.add_argument("--seed", type=int, default=0, help="order of the problems, and sampling (default 0)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--side", choices=SIDES, help="run one side in this process and write its steps")
    arguments = parser.parse_args()
    if arguments.side:
        steps = run_side(arguments.side, arguments.warmup + arguments.steps, arguments.seed)
        arguments.json.write_text(json.dumps(steps))
        return
    about = machine(arguments.threads)
    rounds: dict[str, list[list[dict[str, float]]]] = {side: [] for side in SIDES}
    for number in range(arguments.rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            rounds[side].append(run_apart(__file__, side, arguments))
            median = statistics.median(step["seconds"] for step in rounds[side][-1])
            print(f"round {number + 1}/{arguments.rounds}  {side:<10}  {median:.3f} s per step", flush=True)
    sides = {side: summarize(rounds[side]) for side in SIDES}
    result = {
        "machine": about | {"load_average_at_end": os.getloadavg()[0]},
        "warmup_steps": arguments.warmup,
        "seed": arguments.seed,
        "count_labels": COUNTS,
        "sides": sides,
        "trl_over": {side: ratios(sides["trl"], sides[side]) for side in SIDES if side != "trl"},
        "seconds": {side: [[step["seconds"] for step in one] for one in rounds[side]] for side in SIDES},
    }
    print(report(result))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
