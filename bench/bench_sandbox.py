"""Speed of the sandbox: isolated executions per second and their latency, beside a fresh ``python -c`` for each.

    python bench/bench_sandbox.py [--executions 500] [--workers 0] [--json PATH]

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


async def run_all(executions: int, workers: int) -> dict[str, Any]:
    """Measure every script both ways."""
    begin = time.perf_counter()
    async with Sandbox(SandboxConfig(workers=workers)) as sandbox:
        start = time.perf_counter() - begin
        for code in SCRIPTS.values():
            await sandbox.run(code)
        rows = [{"script": name, **await measure_sandbox(sandbox, code, executions)} for name, code in SCRIPTS.items()]
        report: dict[str, Any] = {
            "machine": f"{platform.machine()}, {sandbox.workers} workers, Python {platform.python_version()}",
            "isolation": sandbox.isolation,
            "start_seconds": start,
            "sandbox": rows,
        }
    report["fresh"] = {"script": "sympy", **measure_fresh(SCRIPTS["sympy"], 5)}
    sympy = next(row for row in rows if row["script"] == "sympy")
    report["speedup_latency"] = report["fresh"]["p50_ms"] / sympy["p50_ms"]
    report["speedup_throughput"] = sympy["per_second"] / report["fresh"]["per_second"]
    return report


def main() -> None:
    """Print the table; write it as JSON too with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--executions", type=int, default=500)
    parser.add_argument("--workers", type=int, default=0, help="executions at once; 0: one per core")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    report = asyncio.run(run_all(arguments.executions, arguments.workers))
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
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
