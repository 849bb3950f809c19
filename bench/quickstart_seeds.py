"""The quickstart over several seeds: held-out accuracy before and after, void turns, wall time, and the learning curve.

Each seed runs `fastir train quickstart run.seed=S` in its own process, one after another, exactly as a user would.

    python bench/quickstart_seeds.py [--seeds 0 1 2 3 4] [--out bench/results] [-- section.field=value ...]

Writes quickstart_seeds.json and quickstart_seeds.png to the folder given by --out, and prints one line per seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fastir.observe.metrics import read_metrics

BARS = {"accuracy_before": 0.30, "accuracy_after": 0.85, "void_rate_after": 0.05, "train_seconds": 180.0}


def run(seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One quickstart; its summary with the curve of each step."""
    name = f"seed-{seed}"
    command = [sys.executable, "-m", "fastir", "train", "quickstart", f"run.dir={folder}", f"run.name={name}"]
    subprocess.run([*command, f"run.seed={seed}", *overrides], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((folder / name / "summary.json").read_text())
    summary.pop("run_dir")
    rows = [row for row in read_metrics(folder / name / "metrics.jsonl") if "reward/mean" in row]
    for key in ("reward/mean", "rollout/void_turn_rate", "train/grad_norm", "time/step", "train/logprob_gap_mean"):
        summary[key] = [round(row[key], 8) for row in rows]
    return summary


def meets_bars(summary: dict[str, Any]) -> bool:
    """From at most 0.30 to at least 0.85, void turns under 5 %, within 60 steps and 3 minutes of training."""
    return (
        summary["accuracy_before"] <= BARS["accuracy_before"]
        and summary["accuracy_after"] >= BARS["accuracy_after"]
        and summary["void_rate_after"] < BARS["void_rate_after"]
        and summary["train_seconds"] <= BARS["train_seconds"]
        and summary["steps"] <= 60
    )


def plot(summaries: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    colors = plt.get_cmap("viridis")([i / max(1, len(summaries) - 1) * 0.85 for i in range(len(summaries))])
    for summary, color in zip(summaries, colors, strict=True):
        steps = range(1, len(summary["reward/mean"]) + 1)
        left.plot(steps, summary["reward/mean"], color=color, linewidth=1.2, label=f"seed {summary['seed']}")
        left.scatter(
            [0, len(steps)], [summary["accuracy_before"], summary["accuracy_after"]], color=color, s=30, zorder=3
        )
        right.plot(steps, [100 * v for v in summary["rollout/void_turn_rate"]], color=color, linewidth=1.2)
    left.set(
        xlabel="step",
        ylabel="reward (line), held-out accuracy (dots)",
        ylim=(0, 1),
        title="The model learns to use Python",
    )
    right.set(xlabel="step", ylabel="void turns, %", ylim=(0, None), title="and stops rambling")
    left.legend(frameon=False, fontsize=8, loc="lower right")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    summaries = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            summary = run(seed, Path(folder), arguments.overrides)
            summaries.append(summary)
            print(
                f"seed {seed}: accuracy {summary['accuracy_before']:.3f} → {summary['accuracy_after']:.3f}, void turns "
                f"{summary['void_rate_before']:.1%} → {summary['void_rate_after']:.1%}, {summary['steps']} steps, "
                f"{summary['train_seconds']:.0f} s  {'meets the bars' if meets_bars(summary) else 'MISSES a bar'}",
                flush=True,
            )
    good = sum(map(meets_bars, summaries))
    print(f"{good} of {len(summaries)} seeds meet every bar: {BARS}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = {"bars": BARS, "meeting": good, "overrides": arguments.overrides, "seeds": summaries}
    (arguments.out / "quickstart_seeds.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(summaries, arguments.out / "quickstart_seeds.png")


if __name__ == "__main__":
    main()
