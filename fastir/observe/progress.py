"""What a person watches while a run trains: a live display on a terminal, one line per step anywhere else.

The trainer brackets its phases and hands over each step's metrics; this file only shows them. Plain output holds no
control codes, so it reads well in a log file or in CI.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

Mode = Literal["auto", "plain", "off"]
Phase = Literal["rollout", "tool", "train", "sync", "eval", "checkpoint"]

_PARTS = ("rollout", "tool", "train", "sync")
_DOING = {
    "rollout": "sampling rollouts",
    "tool": "running tools",
    "train": "training",
    "sync": "handing weights to the engine",
    "eval": "evaluating on held-out problems",
    "checkpoint": "writing a checkpoint",
}
_BARS = "▁▂▃▄▅▆▇█"


class Timer:
    """Seconds that a phase took; set when the phase ends."""

    seconds = 0.0


class Progress:
    """Shows a run from ``start_step`` to ``total_steps``. Use it as a context manager.

    Args:
        total_steps: steps of the whole run.
        mode: "auto" is live on a terminal and plain elsewhere; "plain" one line per step; "off" nothing.
        start_step: steps done before this process started.
        title: name shown beside the bar.
    """

    def __init__(self, total_steps: int, mode: Mode = "auto", start_step: int = 0, title: str = "") -> None:
        self.total_steps = total_steps
        self.title = title
        self._done = self._start_step = start_step
        self._off = mode == "off"
        self._metrics: dict[str, float] = {}
        self._rewards: list[float] = []
        self._phases: list[str] = []
        self._spinner = Spinner("dots")
        self._step_seconds: list[float] = []
        self._last_update = time.monotonic()
        self._live: Live | None = None
        if mode == "auto" and sys.stdout.isatty() and os.environ.get("TERM") not in (None, "dumb"):
            console = Console(highlight=False, markup=False, emoji=False)
            self._live = Live(console=console, get_renderable=self._display, refresh_per_second=6)

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._phases.clear()
            self._live.stop()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[Timer]:
        """Show that a phase is running and time it: ``with progress.phase("train") as timer: ...; timer.seconds``."""
        timer = Timer()
        self._phases.append(name)
        started = time.perf_counter()
        try:
            yield timer
        finally:
            timer.seconds = time.perf_counter() - started
            if self._phases:
                self._phases.pop()
            if name in ("eval", "checkpoint"):  # not part of a step: keep it out of the time that is left
                self._last_update += timer.seconds

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step ``step`` (counted from 0) is done and measured as ``metrics``."""
        now = time.monotonic()
        self._step_seconds = [*self._step_seconds[-19:], metrics.get("time/step", now - self._last_update)]
        self._last_update = now
        self._done = step + 1
        self._metrics.update(metrics)
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        if not self._off and self._live is None:
            print(plain_line(step, self.total_steps, metrics), flush=True)

    def message(self, text: str) -> None:
        """Print a line that stays, above the live display."""
        if self._live is not None:
            self._live.console.print(Text(text))
        elif not self._off:
            print(text, flush=True)

    def _display(self) -> Group:
        head = Table.grid(padding=(0, 2))
        eta = self._seconds_left()
        head.add_row(
            Text(self.title, style="bold"),
            Text(f"step {self._done}/{self.total_steps}"),
            ProgressBar(total=self.total_steps, completed=self._done, width=32, complete_style="green"),
            Text(f"{100 * self._done / self.total_steps:.0f} %", style="cyan"),
            Text(f"{clock(eta)} left" if eta is not None else "", style="cyan"),
        )
        return Group(head, self._now(), *_figures(self._metrics, self._rewards))

    def _now(self) -> Table | Text:
        if not self._phases:
            return Text("")
        line = Table.grid(padding=(0, 1))
        line.add_row("", self._spinner, Text(_DOING.get(self._phases[-1], self._phases[-1]), style="magenta"))
        return line

    def _seconds_left(self) -> float | None:
        if not self._step_seconds:
            return None
        return (self.total_steps - self._done) * sum(self._step_seconds) / len(self._step_seconds)


def plain_line(step: int, total_steps: int, metrics: Mapping[str, float]) -> str:
    """One compact line about a step; what was not measured is left out."""
    width = len(str(total_steps))
    parts = [f"step {step + 1:>{width}}/{total_steps}"]
    parts += [f"{label} {text}" for label, text, _ in _readings(metrics)]
    if "time/step" in metrics:
        parts.append(f"{metrics['time/step']:.2f} s")
    times = [f"{name} {metrics[f'time/{name}']:.2f}" for name in _PARTS if f"time/{name}" in metrics]
    line = "  ".join(parts)
    return f"{line} ({', '.join(times)})" if times else line


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: list[float], width: int = 40, low: float = 0.0, high: float = 1.0) -> str:
    """Values as a row of bars from ``low`` to ``high``; neighbours are averaged to fit ``width``."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    top = len(_BARS) - 1
    return "".join(
        _BARS[min(top, max(0, round(top * (m - low) / (high - low))))] if math.isfinite(m) else "?" for m in means
    )


def _readings(metrics: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """(label, value, style) of the numbers a person watches, in order, as far as they were measured."""
    readings = []
    for label, name, form, warn in (
        ("reward", "reward/mean", "{:.3f}", None),
        ("void", "rollout/void_turn_rate", "{:.1%}", None),
        ("held-out", "eval/accuracy", "{:.3f}", None),
        ("grad", "train/grad_norm", "{:.2g}", None),
        ("gap", "train/logprob_gap_mean", "{:.1e}", 0.01),
        ("tok/s", "throughput/tokens_per_second", "{:,.0f}", None),
        ("skipped", "train/skipped_updates", "{:.0f}", 0.0),
        ("tool failed", "tool/failed", "{:.0f}", 0.0),
        ("grader failed", "grader/failed", "{:.0f}", 0.0),
        ("grader timeouts", "grader/timeouts", "{:.0f}", 0.0),
    ):
        value = metrics.get(name)
        # A count of troubles is shown only when there are some.
        if value is None or (warn == 0.0 and value == 0):
            continue
        bad = not math.isfinite(value) or (warn is not None and value > warn)
        readings.append((label, form.format(value), "bold red" if bad else "bold"))
    return readings


def _figures(metrics: Mapping[str, float], rewards: list[float]) -> list[Text]:
    readings, clocks = Text("  "), Text("  ")
    for label, text, style in _readings(metrics):
        readings.append(f"{label} ").append(text, style)
        if label == "reward":
            readings.append(f" {sparkline(rewards, 24)}", "green")
        readings.append("   ")
    if "time/step" in metrics:
        clocks.append("step ").append(f"{metrics['time/step']:.2f} s   ", "bold")
    for name in _PARTS:
        if f"time/{name}" in metrics:
            clocks.append(f"{name} ").append(f"{metrics[f'time/{name}']:.2f} s   ", "cyan")
    return [line for line in (readings, clocks) if line.plain.strip()]
