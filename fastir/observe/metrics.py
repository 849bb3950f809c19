"""What a run writes down: metrics.jsonl, trajectories.jsonl and TensorBoard events.

Both JSONL files have one row per line with ``"step"`` as its first key, in the order of the steps. That makes resuming
exact and cheap: the rows of steps that will be done again are the end of the file, found by reading only the head of
each line, and one truncation removes them together with a line torn by a kill.

JSON has no numbers for NaN and infinities. They are written as the strings "NaN", "Infinity" and "-Infinity", so a
diverged run stays visible in the file; ``float()`` in Python and ``Number()`` in JavaScript read them back.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from fastir.types import Trajectory

METRICS_FILE = "metrics.jsonl"
TRAJECTORIES_FILE = "trajectories.jsonl"
TENSORBOARD_DIR = "tensorboard"

_ROW_HEAD = re.compile(rb'\{"step": (\d+), ')


class MetricsWriter:
    """Appends the rows of a run to its files; every row is flushed to the operating system when it is logged.

    Args:
        run_dir: folder of the run; made if missing.
        tensorboard: also write TensorBoard events.
        trajectories: write trajectories.jsonl; without it `log_trajectories` does nothing.
        resume_step: None for a new run. S for a run that goes on with step S: rows of step S and later are removed
            first, so the files end up as those of a run that never stopped.

    Raises:
        FileExistsError: a new run would write into the files of an earlier one.
        ModuleNotFoundError: TensorBoard is asked for and not installed.
    """

    def __init__(self, run_dir: Path, *, tensorboard: bool, trajectories: bool, resume_step: int | None) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        names = [METRICS_FILE, TRAJECTORIES_FILE] if trajectories else [METRICS_FILE]
        self._last_step = 0
        self._files: dict[str, IO[str]] = {}
        self._events: Any = None
        if resume_step is None:
            if holds_run(run_dir):
                raise FileExistsError(f"{run_dir} holds an earlier run: resume it or change run.name")
        else:
            self._last_step = resume_step
            for name in (METRICS_FILE, TRAJECTORIES_FILE):
                drop_rows_from(run_dir / name, resume_step)
        if tensorboard:
            self._events = _summary_writer(run_dir / TENSORBOARD_DIR, resume_step)
        for name in names:
            self._files[name] = (run_dir / name).open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row of scalars. Several rows may share a step; steps never go back."""
        row = {name: float(value) for name, value in metrics.items()}
        self._append(METRICS_FILE, step, [row])
        if self._events is not None:
            for name, value in row.items():
                self._events.add_scalar(name, value, step)

    def log_trajectories(self, step: int, trajectories: Iterable[Trajectory], *, split: str = "train") -> None:
        """Append one row per trajectory: step, split and the fields of `Trajectory.to_json`."""
        if TRAJECTORIES_FILE in self._files:
            self._append(TRAJECTORIES_FILE, step, ({"split": split, **t.to_json()} for t in trajectories))

    def sync(self) -> None:
        """Force the rows to disk. Call it before a checkpoint, so that a checkpoint never outlives its rows."""
        for file in self._files.values():
            os.fsync(file.fileno())
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._events is not None:
            self._events.close()

    def _append(self, name: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        if step < self._last_step:
            raise ValueError(f"{name}: step {step} logged after step {self._last_step}")
        self._last_step = step
        file = self._files[name]
        for row in rows:
            file.write(_dump({"step": step, **row}) + "\n")
        file.flush()


def holds_run(run_dir: Path) -> bool:
    """Whether a folder has rows of a run. One that failed before its first row may be started again."""
    # Both files count: a run without trajectories must not leave an earlier run's beside its own metrics.
    files = (run_dir / name for name in (METRICS_FILE, TRAJECTORIES_FILE))
    return any(file.exists() and file.stat().st_size > 0 for file in files)


def drop_rows_from(path: Path, step: int) -> None:
    """Cut a JSONL file of steps at its first row of ``step`` or later, or at a torn line, whichever comes first."""
    if not path.exists():
        return
    keep = 0
    with path.open("rb+") as file:
        for line in file:
            head = _ROW_HEAD.match(line)
            if head is None or int(head[1]) >= step or not line.endswith(b"\n"):
                break
            keep += len(line)
        file.truncate(keep)
        os.fsync(file.fileno())


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file that may still be growing: a torn last line is left out.

    Raises:
        ValueError: a complete line is not a JSON object; the message names file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not valid JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: not a JSON object")
            yield row


def read_step(path: Path, step: int | None = None, split: str | None = None) -> tuple[int | None, list[dict[str, Any]]]:
    """(step, its rows) of a trajectories.jsonl; the last step by default. Only the rows of one step are parsed."""
    lines: list[bytes] = []
    found: int | None = None
    with path.open("rb") as file:
        for line in file:
            head = _ROW_HEAD.match(line)
            if head is None or not line.endswith(b"\n") or (step is not None and int(head[1]) != step):
                continue
            if split is not None and f'"split": {json.dumps(split)}, '.encode() not in line[:64]:
                continue
            if found != int(head[1]):
                found, lines = int(head[1]), []
            lines.append(line)
    return found, [json.loads(line) for line in lines]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """All rows of a metrics.jsonl as numbers, NaN and infinities restored."""
    return [{name: float(value) for name, value in row.items()} for row in read_rows(path)]


def _dump(row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row, allow_nan=False)
    except ValueError:  # rare, so the walk through every number is made only then
        return json.dumps(_finite(row), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _summary_writer(directory: Path, purge_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ModuleNotFoundError(
            "TensorBoard is not installed: pip install tensorboard, or set observe.tensorboard=false"
        ) from None
    return SummaryWriter(str(directory), purge_step=purge_step, flush_secs=10)
