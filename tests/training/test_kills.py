"""kill -9 of the sandbox's processes and of graders in the middle of a run: it goes on, or stops with a message."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fastir.observe.metrics import read_metrics

_DEADLINE = 120.0


def _processes(root: int) -> list[tuple[int, int, str]]:
    """(pid, parent, command line) of all processes below ``root``."""
    table = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_text(errors="replace")
        except OSError:
            continue
        if fields[0] != "Z":
            table[int(path.parent.name)] = int(fields[1]), command
    found, frontier = [], [root]
    while frontier:
        frontier = [pid for pid, (parent, _) in table.items() if parent in frontier]
        found += [(pid, *table[pid]) for pid in frontier]
    return found


def launcher(root: int) -> list[int]:
    return [pid for pid, parent, command in _processes(root) if parent == root and "sandbox_child" in command]


def keeper(root: int) -> list[int]:
    launchers = launcher(root)
    return [pid for pid, parent, _ in _processes(root) if parent in launchers]


def zygotes_and_supervisors(root: int) -> list[int]:
    keepers = keeper(root)
    return [pid for pid, parent, _ in _processes(root) if parent in keepers]


def zygote(root: int) -> list[int]:
    return zygotes_and_supervisors(root)[:1]  # the keeper forks them first


def supervisors(root: int) -> list[int]:
    return zygotes_and_supervisors(root)[2:]  # a bare and a warm zygote come first


def workers(root: int) -> list[int]:
    parents = zygotes_and_supervisors(root)
    return [pid for pid, parent, _ in _processes(root) if parent in parents]


def graders(root: int) -> list[int]:
    return [pid for pid, _, command in _processes(root) if "reward.py" in command]


def start(tmp_path: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "fastir", "train", "quickstart", "rollout.prompts_per_step=8", "rollout.group_size=8",
        "run.threads=1", "run.steps=6", f"run.dir={tmp_path}", "run.name=run", "data.heldout=none",
        "observe.tensorboard=false", "observe.progress=off", "checkpoint.every=1", *overrides,
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill_while_it_runs(process: subprocess.Popen[str], find: Callable[[int], list[int]], metrics: Path) -> int:
    """Kill what ``find`` finds after the first step, and what there is after the third; returns how many."""
    killed = 0
    deadline = time.monotonic() + _DEADLINE
    for threshold in (1, 3):
        steps, found = 0, []
        while not found and steps <= threshold + 1 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
            steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            found = find(process.pid) if steps >= threshold else []
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed


def finish(process: subprocess.Popen[str]) -> str:
    """The run's output; it must end by itself in a minute."""
    try:
        return process.communicate(timeout=60)[0]
    finally:
        process.kill()


@pytest.mark.parametrize("find", [launcher, keeper, zygote, supervisors, workers])
def test_a_run_outlives_the_sandbox_s_processes(tmp_path, find):
    process = start(tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    killed = kill_while_it_runs(process, find, metrics)
    output = finish(process)
    assert process.returncode == 0, output
    rows = [row for row in read_metrics(metrics) if "reward/mean" in row]
    assert len(rows) == 6
    assert killed or find is workers  # an execution lives for milliseconds: one cannot always be caught
    if find in (launcher, keeper, zygote):
        assert sum(row["sandbox/restarts"] for row in rows) >= 1
    failed = sum(row["tool/failed"] for row in rows)
    assert failed == sum(row["sandbox/failed"] for row in rows)
    # A worker's execution is repeated a few times; one that is hit every time fails, and is counted.
    assert failed <= (killed if find is workers else 0)


def test_a_sandbox_that_cannot_come_back_stops_the_run_with_a_checkpoint(tmp_path):
    """Its processes are killed faster than they can start."""
    process = start(tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + _DEADLINE
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= 1:
            for pid in launcher(process.pid):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    output = finish(process)
    assert process.returncode not in (0, None), output
    assert "rollout.max_failed_share" in output
    assert "Traceback" not in output
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_run_outlives_its_graders(tmp_path):
    """Answers that text cannot settle keep grader processes busy; a killed one costs an answer, and is replaced."""
    data = tmp_path / "data.jsonl"
    rows = [{"question": f"{a} + {b}", "answer": f"\\sqrt{{{(a + b) ** 2}}}"} for a in range(1, 9) for b in range(1, 9)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = start(tmp_path, f"data.train={data}", "rollout.max_failed_share=0.5")
    metrics = tmp_path / "run" / "metrics.jsonl"
    killed = kill_while_it_runs(process, graders, metrics)
    output = finish(process)
    assert process.returncode == 0, output
    assert killed
    logged = [row for row in read_metrics(metrics) if "reward/mean" in row]
    assert len(logged) == 6
    assert sum(row["grader/failed"] for row in logged) <= killed
