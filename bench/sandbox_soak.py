"""What a long mix of hostile and friendly executions leaves behind on the machine: nothing, or exit status 1.

    python bench/sandbox_soak.py [--executions 10000] [--json PATH]

Compares, before and after, once the sandbox has idled for a moment: processes below this one, entries of the temporary
folder and /dev/shm (all are counted; judged are, by name, those of the sandbox and of the scripts), System V objects,
mounts, control groups, open descriptors, memory of this process and of the sandbox's standing processes. Then the
sandbox is closed, and none of its processes may remain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fastir.tir.sandbox import Sandbox, SandboxConfig

#: class → (share, script, statuses that are right for it)
CLASSES: dict[str, tuple[float, str, str]] = {
    "arithmetic": (0.3, "print(37 * 482)\nfinal_answer(1)", "ok"),
    "sympy": (0.25, "import sympy\nprint(sympy.factorint(600851475143))", "ok"),
    "exception": (0.1, "print('before')\n1 / 0", "error"),
    "file writer": (0.08, "for i in range(50): open(f'/tmp/fastir_soak{i}', 'wb').write(bytes(1 << 16))", "ok"),
    "disk filler": (0.02, "f = open('/tmp/fastir_soak', 'wb')\nwhile True: f.write(bytes(1 << 20))", "error"),
    "shared memory": (
        0.05,
        "from multiprocessing import shared_memory as m, Semaphore\ns = m.SharedMemory('fastir_soak', True, 1 << 20)\n"
        "s.buf[0] = 1; k = Semaphore(1); import os; os._exit(0)",
        "crashed",
    ),
    "huge output": (0.04, "while True: print('x' * 1000)", "output"),
    "memory hog": (0.04, "x = []\nwhile True: x.append(bytearray(10 ** 6))", "memory"),
    "killed": (0.03, "import os\nos.kill(os.getpid(), 9)", "crashed"),
    "orphan daemon": (
        0.04,
        "import os\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: os.closerange(0, 100); "
        "os.execv('/bin/sleep', ['sleep', '600'])\n  os._exit(0)\nos.wait(); print('left')",
        "ok",
    ),
    "fork bomb": (0.02, "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", "timeout crashed"),
    "busy loop": (0.015, "while True: pass", "timeout"),
    "sleeper": (0.015, "import time\ntime.sleep(600)", "timeout"),
}
_TIMEOUT_SECONDS = 0.4
_RUNNERS = 8  # callers, each with an execution under way or waiting
_GROWTH_BYTES = 32 << 20  # allowed, of this process and of the sandbox's: allocators keep some of what they once had


def _descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, frontier = [], [root]
    while frontier:
        frontier = [pid for pid, parent in parents.items() if parent in frontier]
        found += frontier
    return found


def _private_bytes(pid: int) -> int:
    try:
        _, resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def snapshot() -> dict[str, Any]:
    """What the machine holds now. Lists are of names, so that what is left can be named."""
    processes = _descendants(os.getpid())
    return {
        "processes": processes,
        "temporary files": sorted(os.listdir(tempfile.gettempdir())),
        "/dev/shm": sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else [],
        "System V objects": [line for kind in ("shm", "sem", "msg") for line in _lines(f"/proc/sysvipc/{kind}")[1:]],
        "mounts": _lines("/proc/self/mounts"),
        "control groups": [line.split()[0] + " " + line.split()[2] for line in _lines("/proc/cgroups")[1:]],
        "descriptors": os.listdir("/proc/self/fd"),
        "own memory": _private_bytes(os.getpid()),
        "sandbox memory": sum(map(_private_bytes, processes)),
    }


def left_behind(before: dict[str, Any], after: dict[str, Any], supervisors: int = 0) -> list[str]:
    """What is in ``after`` and should not be.

    ``supervisors``: how many more standing processes there may be. One is started when an execution begins before the
    supervisor of the last has reported back, so their number settles between one and two for each worker.
    """
    problems = []
    for name, value in after.items():
        if isinstance(value, int):
            if value - before[name] > _GROWTH_BYTES:
                problems.append(f"{name}: grew by {(value - before[name]) / 2**20:.0f} MB")
        elif name in ("processes", "descriptors", "control groups"):  # by number: recycling changes names
            if len(value) > len(before[name]) + (supervisors if name == "processes" else 0):
                problems.append(f"{name}: {len(value) - len(before[name])} more")
        elif extra := sorted(set(value) - set(before[name])):
            if name in ("temporary files", "/dev/shm"):  # other programs have theirs
                extra = [entry for entry in extra if "fastir" in entry]
            problems += [f"{name}: {extra[:5]}"] if extra else []
    return problems


async def soak(executions: int, workers: int = 0, seed: int = 0) -> dict[str, Any]:
    """Run the mix; returns snapshots, outcomes of each class, and ``left``: what should not be there."""
    order = [name for name, (share, *_) in CLASSES.items() for _ in range(max(1, round(share * executions)))]
    random.Random(seed).shuffle(order)
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in CLASSES}
    config = SandboxConfig(
        timeout_seconds=_TIMEOUT_SECONDS, memory_mb=96, tmp_mb=8, output_bytes=20000, processes=16, workers=workers,
        recycle_executions=max(100, executions // 4),
    )  # fmt: skip
    outside = snapshot()
    wrong: list[str] = []
    async with Sandbox(config) as sandbox:
        jobs = iter(order)

        async def caller() -> None:
            for name in jobs:
                result = await sandbox.run(CLASSES[name][1])
                outcomes[name][result.status] += 1
                if result.status not in CLASSES[name][2].split() and len(wrong) < 20:
                    wrong.append(f"{name}: {result.status} {result.error}")

        warm_up = [CLASSES[name][1] for name in CLASSES] * 2
        await asyncio.gather(*(sandbox.run(code) for code in warm_up))
        before = await _settled(sandbox)
        began = time.monotonic()
        await asyncio.gather(*(caller() for _ in range(_RUNNERS)))
        seconds = time.monotonic() - began
        after = await _settled(sandbox)
        stats, isolation = sandbox.take_stats(), sandbox.isolation
    closed = snapshot()
    left = left_behind(before, after, sandbox.workers)
    left += [f"after closing: {line}" for line in left_behind(outside, closed) if not line.startswith("own memory")]
    left += ["/proc is missing: nothing could be seen"] if not before["processes"] else []
    return {
        "executions": len(order),
        "seconds": seconds,
        "isolation": isolation,
        "before": _counted(before),
        "after": _counted(after),
        "closed": _counted(closed),
        "outcomes": {name: dict(counter) for name, counter in outcomes.items()},
        "unexpected": wrong,
        "recycled": stats.recycled,
        "restarts": stats.restarts,
        "cpu_seconds": stats.cpu_seconds,
        "left": left,
    }


async def _settled(sandbox: Sandbox) -> dict[str, Any]:
    """A snapshot when all processes of executions have had the time to be reaped, and a replacement to finish."""
    for _ in range(100):
        await asyncio.sleep(0.1)
        if sandbox._recycling is None:
            break
    await asyncio.sleep(0.5)
    return snapshot()


def _counted(state: dict[str, Any]) -> dict[str, int]:
    return {name: value if isinstance(value, int) else len(value) for name, value in state.items()}


def show(report: dict[str, Any]) -> None:
    """Print the tables."""
    print(f"{report['executions']} executions in {report['seconds']:.0f} s; ", end="")
    print(f"{report['recycled']} times recycled, {report['restarts']} restarts\n{report['isolation']}\n")
    print(f"{'':18}{'before':>12}{'after':>12}{'closed':>12}")
    for name in report["before"]:
        values = [report[when][name] for when in ("before", "after", "closed")]
        texts = [f"{value / 2**20:.1f} MB" if name.endswith("memory") else str(value) for value in values]
        print(f"{name:18}" + "".join(f"{text:>12}" for text in texts))
    print()
    for name, counts in report["outcomes"].items():
        print(f"{name:18}{'  '.join(f'{status} {count}' for status, count in sorted(counts.items()))}")
    for line in report["unexpected"]:
        print(f"unexpected: {line}")
    print("\nleft behind: " + ("; ".join(report["left"]) or "nothing"))


def main() -> int:
    """Returns 1 if anything was left behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--executions", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=0, help="executions at once; 0: one per core")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "sandbox_soak.json")
    arguments = parser.parse_args()
    report = asyncio.run(soak(arguments.executions, arguments.workers))
    show(report)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
