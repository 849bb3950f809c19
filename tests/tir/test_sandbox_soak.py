"""Hostile and friendly executions leave nothing behind; what they take is accounted; old processes are replaced."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fastir.tir.sandbox import Sandbox, SandboxBusyError, SandboxConfig

_BENCH = Path(__file__).parents[2] / "bench" / "sandbox_soak.py"
_SPEC = importlib.util.spec_from_file_location("sandbox_soak", _BENCH)
assert _SPEC
assert _SPEC.loader
bench = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bench)

_NAMESPACES = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork", "true"]
_AVAILABLE = (
    bool(shutil.which("unshare")) and subprocess.run(_NAMESPACES, capture_output=True, check=False).returncode == 0
)
pytestmark = pytest.mark.skipif(not _AVAILABLE, reason="no user namespaces here")


async def test_a_mix_of_everything_leaves_nothing() -> None:
    report = await bench.soak(300)
    assert report["left"] == []
    assert report["recycled"] >= 1
    assert report["restarts"] == 0
    assert sum(sum(counts.values()) for counts in report["outcomes"].values()) == report["executions"] >= 295
    for name in ("arithmetic", "exception", "orphan daemon", "busy loop", "huge output", "memory hog"):
        assert report["outcomes"][name].keys() <= {*bench.CLASSES[name][2].split(), "timeout"}, report["outcomes"]


async def test_what_is_left_is_seen() -> None:
    before = bench.snapshot()
    process = await asyncio.create_subprocess_exec("sleep", "60")
    ballast = bytearray(b"1") * (64 << 20)
    try:
        problems = bench.left_behind(before, bench.snapshot())
    finally:
        process.kill()
        await process.wait()
    assert len(ballast) == 64 << 20
    assert "processes: 1 more" in problems
    assert any(problem.startswith("own memory: grew by") for problem in problems)


_SPIN = "t = time.process_time()\nwhile time.process_time() - t < 0.3: pass\n"


@pytest.mark.parametrize(
    ("code", "status", "cpu", "megabytes"),
    [
        ("pass", "ok", (0, 0.1), (0, 20)),
        (f"import time\n{_SPIN}", "ok", (0.29, 0.5), (0, 20)),
        ("import numpy\nx = bytearray(b'1') * (60 << 20)", "ok", (0, 0.3), (55, 85)),
        # a child that is waited for, and children that are killed with the execution
        (f"import os, time\nif os.fork(): os.wait()\nelse:\n  exec({_SPIN!r})", "ok", (0.29, 0.6), (0, 20)),
        (
            "import os, time\nfor _ in range(3):\n  if os.fork() == 0:\n    x = bytearray(b'1') * (20 << 20)\n"
            f"    exec({_SPIN!r})\n    time.sleep(60)\ntime.sleep(60)",
            "timeout",
            (0.7, 2.0),
            (55, 85),
        ),
        ("x = bytearray(b'1') * (60 << 20)\nwhile True: pass", "timeout", (0.3, 3.1), (55, 85)),
    ],
)
async def test_accounting(code: str, status: str, cpu: tuple[float, float], megabytes: tuple[int, int]) -> None:
    async with Sandbox(SandboxConfig(timeout_seconds=3, memory_mb=128, workers=1)) as sandbox:
        result = await sandbox.run(code)
        assert result.status == status
        assert cpu[0] <= result.cpu_seconds <= cpu[1]
        assert megabytes[0] <= result.peak_bytes / 2**20 <= megabytes[1]
        stats = sandbox.take_stats()
        assert (stats.executions, stats.cpu_seconds, stats.peak_bytes) == (1, result.cpu_seconds, result.peak_bytes)
        assert sandbox.stats.executions == 0


async def test_waiting_is_bounded_and_counted() -> None:
    async with Sandbox(SandboxConfig(workers=1, max_waiting=2, preload=())) as sandbox:
        runs = [asyncio.create_task(sandbox.run("import time; time.sleep(0.2)")) for _ in range(4)]
        with pytest.raises(SandboxBusyError, match=r"sandbox\.max_waiting"):
            await runs[3]
        results = [await run for run in runs[:3]]
        waits = [result.wait_seconds for result in results]
        assert waits[0] == 0
        assert 0.15 < waits[1] < waits[2]
        stats = sandbox.stats
        assert (stats.refused, stats.failed, stats.waiting_max, stats.wait_max) == (1, 1, 2, waits[2])


async def test_old_processes_are_replaced_without_an_execution_noticing() -> None:
    async with Sandbox(SandboxConfig(workers=2, preload=(), recycle_executions=20)) as sandbox:
        assert sandbox._zygote
        first = sandbox._zygote.process
        long = asyncio.create_task(sandbox.run("import time; time.sleep(1.5); print('done')"))
        await asyncio.gather(*(sandbox.run("print(1)") for _ in range(20)))
        await _until(lambda: sandbox.stats.recycled == 1)
        assert sandbox._zygote.process.pid != first.pid
        assert first.poll() is None  # it has something to finish
        assert (await sandbox.run("print(2)")).stdout == "2\n"
        result = await long
        assert (result.status, result.stdout) == ("ok", "done\n")
        await _until(lambda: first.poll() is not None)
        assert sandbox.stats.restarts == 0
        assert sandbox.stats.by_status == {"ok": 22}


async def test_grown_processes_are_replaced() -> None:
    async with Sandbox(SandboxConfig(workers=1, preload=(), recycle_growth_mb=64)) as sandbox:
        assert sandbox._zygote
        held = await sandbox._zygote.resident()
        assert held is not None
        assert 1 << 20 < held < 1 << 30
        sandbox._base_bytes = held - (60 << 20)  # as if it had grown by 60 MB
        await asyncio.gather(*(sandbox.run("") for _ in range(199)))
        await _until(lambda: sandbox._recycling is None)
        assert sandbox.stats.recycled == 0
        sandbox._base_bytes = held - (80 << 20)
        await asyncio.gather(*(sandbox.run("") for _ in range(200)))
        await _until(lambda: sandbox.stats.recycled == 1)


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("not within ten seconds")
