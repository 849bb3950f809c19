"""Does filtering void turns steady training? Arms mask, drop and off, same seeds, several learning rates, two settings.

easy      the quickstart: feedback as in pre-training, 3 turns, one update per batch.
telling   where the theory should bite: a base pre-trained on single turns and clean rounds only (`make_tiny_base.py
          --variant sharp`), 8 turns, feedback it has never seen (full tracebacks; in 70 % of turns a process report
          with random numbers behind the result, on a line that is left open), four mini-batches times two epochs per
          batch (stale ratios), no gradient clipping.

    python bench/void_filter_study.py [--settings easy telling] [--seeds 0 1 2 3 4] [--workers 2] [--out bench/results]

Every run is a process of one thread. Results are kept in <out>/void_filter.json as they come, and a run that is there
already is not repeated; the table goes to void_filter.md, the plot to void_filter.png.

Columns: held-out accuracy at T = 1 after training (128 problems, standard error up to 0.04), void turns there, and
percentiles over steps of the norm of the parameters' gradient (of a step's largest update, before clipping).
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from fastir.config import load_config
from fastir.observe.metrics import read_metrics
from fastir.tir.feedback import feedback_text
from fastir.tir.sandbox import ExecResult
from fastir.training.trainer import RunStopped, train

ARMS = ("mask", "drop", "off")
STEPS = {"easy": 25, "telling": 24}
LEARNING_RATES = {"easy": (1e-3, 4e-3), "telling": (5e-4, 1e-3)}
OVERRIDES = {
    "easy": ["run.steps=25"],
    "telling": [
        "run.steps=24",
        "tir.max_turns=8",
        "tir.turn_tokens=48",
        "tir.feedback_tokens=96",
        "tir.response_tokens=1152",
        "training.mini_batches=4",
        "training.epochs=2",
        "optimizer.grad_clip=none",
    ],
}
#: Read into each run's record: name in metrics.jsonl → one value per step.
SERIES = ("reward/mean", "rollout/void_turn_rate", "rollout/void_rollout_rate", "train/grad_norm_max", "train/entropy",
          "train/logit_grad_norm_p99", "train/logit_grad_norm_max", "train/skipped_updates")  # fmt: skip


def unfamiliar_feedback(result: ExecResult, address: tuple[int, ...]) -> str:
    """Whole tracebacks; in 70 % of turns a process report of random numbers on an open line behind the result."""
    rng = np.random.default_rng((*address, 99))
    text = feedback_text(result)
    if result.status == "error" and result.traceback:
        text = f"\nCode execution result: {result.traceback.rstrip()}\n"
    if rng.random() < 0.3:
        return text
    memory, seconds = rng.integers(1 << 28), rng.random()
    return text + f"[pid {rng.integers(1000, 99999)} rss 0x{memory:07x} cpu {seconds:.3f}s {rng.bytes(6).hex()}]"


def run_one(spec: dict[str, Any], base: str) -> dict[str, Any]:
    """Train one cell of the study in this process; returns its record."""
    setting = spec["setting"]
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            *OVERRIDES[setting],
            f"run.dir={folder}",
            f"run.seed={spec['seed']}",
            f"optimizer.lr={spec['lr']}",
            "optimizer.schedule=constant",
            f"algorithm.void_filter={spec['arm']}",
            f"model.path={base}",
            "eval.problems=128",
            "checkpoint.every=0",
            "training.max_logprob_gap=1.0",
            "observe.tensorboard=false",
            "observe.trajectories=false",
            "observe.progress=off",
            "run.threads=1",
        ]
        config = load_config("quickstart", overrides)
        stopped, summary = None, {}
        try:
            summary = train(config, render=unfamiliar_feedback) if setting == "telling" else train(config)
        except RunStopped as error:
            stopped = str(error)
        rows = [row for row in read_metrics(config.run_dir / "metrics.jsonl") if "reward/mean" in row]
    keep = ("accuracy_before", "accuracy_after", "void_rate_before", "void_rate_after", "updates", "train_seconds")
    record = {**spec, "stopped": stopped, **{name: summary.get(name) for name in keep}}
    for name in SERIES:
        record[name] = [round(row[name], 6) if name in row else None for row in rows]
    return record


def cell(records: list[dict[str, Any]]) -> str:
    norms = np.array([x for r in records for x in r["train/grad_norm_max"] if x is not None])
    percentiles = " | ".join(f"{x:.2f}" for x in (*np.percentile(norms, (50, 95, 99)), norms.max()))
    after = [r["accuracy_after"] for r in records if r["accuracy_after"] is not None]
    voids = [r["void_rate_after"] for r in records if r["void_rate_after"] is not None]
    seeds = " ".join(f"{x:.2f}" for x in after)
    stops = sum(r["stopped"] is not None for r in records)
    return (
        f"{np.mean(after):.2f} ± {np.std(after, ddof=1) if len(after) > 1 else 0:.2f} ({seeds}) | "
        f"{100 * np.mean(voids):.1f} | {percentiles} | {stops}"
    )


def table(records: list[dict[str, Any]]) -> str:
    lines = []
    for setting in STEPS:
        mine = [r for r in records if r["setting"] == setting]
        if not mine:
            continue
        before = [r["accuracy_before"] for r in mine if r["accuracy_before"] is not None]
        voids = [r["void_rate_before"] for r in mine if r["void_rate_before"] is not None]
        lines += [
            f"### {setting}: {STEPS[setting]} steps; base: accuracy {np.mean(before):.2f}, "
            f"void turns {100 * np.mean(voids):.0f} %",
            "",
            "| lr | filter | accuracy after, mean ± sd (seeds) | void turns % | norm p50 | p95 | p99 | max | stopped |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for lr, arm in itertools.product(LEARNING_RATES[setting], ARMS):
            chosen = sorted((r for r in mine if r["lr"] == lr and r["arm"] == arm), key=lambda r: r["seed"])
            if chosen:
                lines.append(f"| {lr:g} | {arm} | {cell(chosen)} |")
        lines.append("")
    return "\n".join(lines)


def plot(records: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = [s for s in STEPS if any(r["setting"] == s for r in records)]
    columns = max(len(LEARNING_RATES[s]) for s in settings)
    figure, axes = plt.subplots(
        2 * len(settings),
        columns,
        figsize=(3.6 * columns, 2.4 * 2 * len(settings)),
        layout="constrained",
        squeeze=False,
    )
    colors = dict(zip(ARMS, ("#1b6ca8", "#35a27d", "#d1495b"), strict=True))
    for i, setting in enumerate(settings):
        for j, lr in enumerate(LEARNING_RATES[setting]):
            top, bottom = axes[2 * i][j], axes[2 * i + 1][j]
            for arm in ARMS:
                chosen = [r for r in records if (r["setting"], r["lr"], r["arm"]) == (setting, lr, arm)]
                for axis, name in ((top, "reward/mean"), (bottom, "train/grad_norm_max")):
                    curves = defaultdict(list)
                    for record in chosen:
                        values = [np.nan if x is None else x for x in record[name]]
                        axis.plot(range(1, len(values) + 1), values, color=colors[arm], alpha=0.25, linewidth=0.8)
                        for step, value in enumerate(values):
                            curves[step].append(value)
                    median = [
                        np.nanmedian(curves[s]) if not np.isnan(curves[s]).all() else np.nan for s in sorted(curves)
                    ]
                    axis.plot(range(1, len(median) + 1), median, color=colors[arm], linewidth=2, label=arm)
            top.set(title=f"{setting}, lr {lr:g}", ylim=(0, 1), ylabel="reward" if j == 0 else "")
            bottom.set(yscale="log", xlabel="step", ylabel="gradient norm" if j == 0 else "")
            for axis in (top, bottom):
                axis.spines[["top", "right"]].set_visible(False)
                axis.grid(alpha=0.25)
        for axis in (*axes[2 * i][len(LEARNING_RATES[setting]) :], *axes[2 * i + 1][len(LEARNING_RATES[setting]) :]):
            axis.set_visible(False)
    axes[0][0].legend(frameon=False, fontsize=8, title="void filter", title_fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--settings", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--sharp-base", type=Path, help="folder of the sharp base; made there when missing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--base", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run_one(json.loads(arguments.one), arguments.base)))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    store = arguments.out / "void_filter.json"
    records: list[dict[str, Any]] = json.loads(store.read_text()) if store.exists() else []
    bases = {"easy": "tiny"}
    scratch = tempfile.TemporaryDirectory()
    if "telling" in arguments.settings:
        folder = arguments.sharp_base or Path(scratch.name) / "sharp"
        bases["telling"] = str(folder)
        if not (folder / "config.json").exists():
            maker = Path(__file__).resolve().parents[1] / "scripts" / "make_tiny_base.py"
            subprocess.run([sys.executable, maker, "--variant", "sharp", "--out", folder], check=True)
    done = {(r["setting"], r["lr"], r["arm"], r["seed"]) for r in records}
    todo = [
        {"setting": setting, "lr": lr, "arm": arm, "seed": seed}
        for setting in arguments.settings
        for lr, seed, arm in itertools.product(LEARNING_RATES[setting], arguments.seeds, ARMS)
        if (setting, lr, arm, seed) not in done
    ]

    def work(spec: dict[str, Any]) -> dict[str, Any]:
        command = [sys.executable, __file__, "--one", json.dumps(spec), "--base", bases[spec["setting"]]]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        return json.loads(output.splitlines()[-1])

    with ThreadPoolExecutor(arguments.workers) as pool:
        for number, record in enumerate(pool.map(work, todo), 1):
            records.append(record)
            store.write_text(json.dumps(records) + "\n")
            print(
                f"{number}/{len(todo)} {record['setting']} lr {record['lr']:g} {record['arm']} seed {record['seed']}: "
                f"accuracy {record['accuracy_after']}, void turns {record['void_rate_after']}, "
                f"largest norm {max((x for x in record['train/grad_norm_max'] if x is not None), default=None)}",
                flush=True,
            )
    text = table(records)
    (arguments.out / "void_filter.md").write_text(text + "\n")
    print(text)
    plot(records, arguments.out / "void_filter.png")
    scratch.cleanup()


if __name__ == "__main__":
    main()
