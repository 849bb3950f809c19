"""Speed of the sandbox: isolated executions per second and their latency, beside a fresh ``python -c`` for each.

    python bench/bench_sandbox.py [--executions 200] [--rounds 5] [--workers 0] [--json PATH]

Figures are medians of the rounds; in each round the sandbox and ``python -c`` take turns.

Latency is what a caller sees, from asking for an execution to its result, with one caller at a time; throughput is with
all workers busy. Times in milliseconds. CPU time per execution, also with all workers busy, is that of this process
("parent") and of the sandbox's processes ("children"); what the kernel does afterwards to dismantle namespaces belongs
to neither.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fastir.tir.sandbox import Sandbox, SandboxConfig

SCRIPTS = {
    "arithmetic": "print(37 * 482)",
    "sympy": "import sympy; print(sympy.factorint(600851475143))",
    "numpy": "import numpy as np; print(np.linalg.det(np.arange(16.0).reshape(4, 4) + np.eye(4)))",
    "error": "print('before'); 1 / 0",
}


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"p{p}_ms": 1e3 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 99)}


def _cpu_of_descendants() -> float:
    """CPU seconds of all processes below this one, and of the children that those have waited for."""
    processes: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        processes[int(path.parent.name)] = int(fields[1]), sum(int(field) for field in fields[11:15])
    ticks, frontier = 0, [os.getpid()]
    while frontier:
        frontier = [pid for pid, (parent, _) in processes.items() if parent in frontier]
        ticks += sum(processes[pid][1] for pid in frontier)
    return ticks / os.sysconf("SC_CLK_TCK")


async def measure_sandbox(sandbox: Sandbox, code: str, executions: int) -> dict[str, float]:
    """Latency percentiles one at a time; executions per second and their CPU time with all workers busy."""
    latencies = []
    for _ in range(max(20, executions // 4)):
        begin = time.perf_counter()
        await sandbox.run(code)
        latencies.append(time.perf_counter() - begin)
    begin, parent, children = time.perf_counter(), time.process_time(), _cpu_of_descendants()
    results = await asyncio.gather(*(sandbox.run(code) for _ in range(executions)))
    elapsed = time.perf_counter() - begin
    parent, children = time.process_time() - parent, _cpu_of_descendants() - children
    assert len({(result.status, result.stdout) for result in results}) == 1
    cpu = {"parent_cpu_ms": 1e3 * parent / executions, "children_cpu_ms": 1e3 * children / executions}
    return {"per_second": executions / elapsed, **_percentiles(latencies), **cpu}


def measure_fresh(code: str, executions: int) -> dict[str, float]:
    """The same for a new interpreter each time: no isolation, no limits, nothing imported beforehand."""
    latencies = []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(executions):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        latencies.append(time.perf_counter() - begin)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "per_second": executions / sum(latencies),
        **_percentiles(latencies),
        "children_cpu_ms": 1e3 * cpu / executions,
    }


def _median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


async def run_all(executions: int, rounds: int, workers: int) -> dict[str, Any]:
    """Measure every script both ways."""
    begin = time.perf_counter()
    async with Sandbox(SandboxConfig(workers=workers)) as sandbox:
        start = time.perf_counter() - begin
        for code in SCRIPTS.values():
            await sandbox.run(code)
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in SCRIPTS}
        fresh = []
        for _ in range(rounds):
            for name, code in SCRIPTS.items():
                measured[name].append(await measure_sandbox(sandbox, code, executions))
            fresh.append(measure_fresh(SCRIPTS["sympy"], 5))
        rows: list[dict[str, Any]] = [{"script": name, **_median(figures)} for name, figures in measured.items()]
        pairs = list(zip(measured["sympy"], fresh, strict=True))
        return {
            "machine": f"{platform.machine()}, {sandbox.workers} workers, Python {platform.python_version()}",
            "isolation": sandbox.isolation,
            "rounds": rounds,
            "start_seconds": start,
            "sandbox": rows,
            "sympy_per_second_by_round": [figures["per_second"] for figures in measured["sympy"]],
            "fresh": {"script": "sympy", **_median(fresh)},
            "speedup_latency": statistics.median(new["p50_ms"] / ours["p50_ms"] for ours, new in pairs),
            "speedup_throughput": statistics.median(ours["per_second"] / new["per_second"] for ours, new in pairs),
        }


def main() -> None:
    """Print the table; write it as JSON too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--executions", type=int, default=200, help="in each round, of each script")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="executions at once; 0: one per core")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "sandbox.json")
    arguments = parser.parse_args()
    report = asyncio.run(run_all(arguments.executions, arguments.rounds, arguments.workers))
    print(f"{report['machine']}\n{report['isolation']}\nstart {report['start_seconds']:.2f} s\n")
    print(f"{'':24}{'per second':>12}{'p50 ms':>10}{'p99 ms':>10}{'CPU ms: children':>18}{'parent':>8}")
    rows = [("sandbox: ", row) for row in report["sandbox"]] + [("python -c: ", report["fresh"])]
    for kind, row in rows:
        print(f"{kind + row['script']:24}{row['per_second']:12.1f}{row['p50_ms']:10.2f}{row['p99_ms']:10.2f}", end="")
        print(f"{row['children_cpu_ms']:18.2f}" + (f"{row['parent_cpu_ms']:8.2f}" if "parent_cpu_ms" in row else ""))
    print(
        f"\nsandbox over python -c: {report['speedup_latency']:.0f}x in latency, "
        f"{report['speedup_throughput']:.0f}x in throughput on all workers"
    )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
