"""What every sandbox back end shares: settings, results, counters, and the queue before its workers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Status = Literal["ok", "error", "timeout", "memory", "output", "crashed"]


class SandboxError(RuntimeError):
    """The sandbox itself failed; says nothing about the code."""


class SandboxBusyError(SandboxError):
    """More executions wait for a worker than ``sandbox.max_waiting`` allows."""


class SandboxConfig(BaseModel):
    """Where code runs, the limits of one execution, and how many run at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["local", "remote"] = Field(
        "local", description="Run code on this machine, or on a service that speaks SandboxFusion's POST /run_code."
    )
    url: str = Field(
        "",
        description="Address of the remote service, such as http://sandbox.example:8080; /run_code is appended.",
        pattern=r"^(https?://[^/\s]+.*)?$",
    )
    retry_seconds: float = Field(
        30.0, description="How long a remote service may be unreachable or overloaded before executions fail.", ge=0
    )
    allow_unsafe: bool = Field(
        False,
        description="Run with process limits only where isolation is unavailable. The code sees files and network.",
    )
    timeout_seconds: float = Field(5.0, description="Wall-clock limit of an execution, in seconds.", gt=0)
    cpu_seconds: float = Field(10.0, description="CPU limit of each process of an execution, in seconds.", gt=0)
    memory_mb: int = Field(512, description="Memory of all processes of an execution together, in MiB.", gt=0)
    processes: int = Field(32, description="Processes and threads of an execution.", gt=0)
    output_bytes: int = Field(
        65536, description="Bytes of stdout before an execution is ended; stderr is cut there.", gt=0
    )
    tmp_mb: int = Field(64, description="Size of an execution's private /tmp, in MiB, on top of memory_mb.", gt=0)
    workers: int = Field(0, description="Executions at once; 0 means one per available core, or 32 if remote.", ge=0)
    max_waiting: int = Field(
        65536, description="Executions that may wait for a worker; one more is refused, and counts as failed.", ge=0
    )
    recycle_executions: int = Field(
        20000, description="Executions after which the local sandbox's processes are replaced by fresh ones.", gt=0
    )
    recycle_growth_mb: int = Field(
        256, description="Growth of the local sandbox's own processes, in MiB, that replaces them earlier.", gt=0
    )
    preload: tuple[str, ...] = Field(
        ("numpy", "sympy"), description="Modules that are imported before the code starts, if it mentions one of them."
    )

    @model_validator(mode="after")
    def _has_url(self) -> Self:
        if self.backend == "remote" and not self.url:
            raise ValueError("sandbox.backend = 'remote' needs sandbox.url, such as http://sandbox.example:8080")
        return self


@dataclass(frozen=True)
class ExecResult:
    """How an execution ended, what it left, and what it took.

    status: "ok" ran to its end · "error" raised, or left by sys.exit with a failure · "timeout" passed the wall or CPU
        limit · "memory" passed the memory limit · "output" printed too much · "crashed" died by a signal, exited
        without reaching its end, or had too many processes.
    stdout: what it printed, at most ``output_bytes`` bytes, also when it did not end well.
    error: one line that explains any status but "ok"; for "error" the traceback's last line.
    answer: the value of the last ``final_answer`` call as text, at most 16 KiB, or None.
    seconds: wall time from the start of the code to its end.
    traceback: the whole traceback of status "error". stderr: what went there, at most ``output_bytes`` bytes.
    cpu_seconds: CPU time of its processes. Exact for the script and the children that it waited for; of processes that
        were killed or left behind, what a look every 20 ms has seen.
    peak_bytes: most memory that its processes had together on top of what the interpreter started with, as far as the
        kernel's high-water mark of the largest and a look every 20 ms tell.
    wait_seconds: from asking for the execution to a worker being free for it.
    exit_code: of the script's process; −n when signal n killed it.
    """

    status: Status
    stdout: str = ""
    error: str = ""
    answer: str | None = None
    seconds: float = 0.0
    traceback: str = ""
    stderr: str = ""
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    wait_seconds: float = 0.0
    exit_code: int = 0


@dataclass
class SandboxStats:
    """Counters since ``start``, or since they were last taken.

    executions, by_status: those that gave a result. cancelled: given up by their caller. refused: turned away because
    too many waited. failed: ended in ``SandboxError``, those refused included. retries: attempts beyond the first.
    restarts: local processes replaced because they had died. recycled: replaced because of age or growth.
    seconds, cpu_seconds, wait_seconds: sums over executions. peak_bytes, wait_max, waiting_max: the most seen.
    """

    executions: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    cancelled: int = 0
    refused: int = 0
    failed: int = 0
    retries: int = 0
    restarts: int = 0
    recycled: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    wait_seconds: float = 0.0
    wait_max: float = 0.0
    waiting_max: int = 0
    peak_bytes: int = 0

    def count(self, result: ExecResult) -> None:
        """Add an execution's result."""
        self.executions += 1
        self.by_status[result.status] += 1
        self.seconds += result.seconds
        self.cpu_seconds += result.cpu_seconds
        self.wait_seconds += result.wait_seconds
        self.wait_max = max(self.wait_max, result.wait_seconds)
        self.peak_bytes = max(self.peak_bytes, result.peak_bytes)


class SandboxBackend(Protocol):
    """Where code runs: ``Sandbox`` on this machine, or ``RemoteSandbox``. An async context manager."""

    isolation: str  #: one line: what separates the code from the rest of the machine it runs on
    workers: int  #: executions at once

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def run(self, code: str) -> ExecResult:
        """Execute a script and say how it ended. Raises ``SandboxError`` only for failures of the sandbox."""

    def take_stats(self) -> SandboxStats:
        """The counters, which start again from zero."""


class WorkerQueue:
    """At most ``workers`` executions at once; up to ``max_waiting`` others wait their turn, first come, first served.

    ``stats`` counts what went through. Belongs to one event loop.
    """

    def __init__(self, workers: int, max_waiting: int) -> None:
        self.stats = SandboxStats()
        self._slots = asyncio.Semaphore(workers)
        self._max_waiting = max_waiting
        self._waiting = 0

    async def run(self, execute: Callable[[float], Awaitable[ExecResult]]) -> ExecResult:
        """``execute(seconds waited)`` when its turn has come. Raises ``SandboxBusyError`` at once if too many wait."""
        try:
            async with self._turn() as waited:
                result = await execute(waited)
        except asyncio.CancelledError:
            self.stats.cancelled += 1
            raise
        except SandboxError:
            self.stats.failed += 1
            raise
        self.stats.count(result)
        return result

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[float]:
        if not self._slots.locked():
            async with self._slots:
                yield 0.0
            return
        if self._waiting >= self._max_waiting:
            self.stats.refused += 1
            raise SandboxBusyError(
                f"{self._waiting} executions wait for a worker already: raise sandbox.max_waiting or sandbox.workers, "
                "or keep fewer rollouts in flight"
            )
        began = time.monotonic()
        self._waiting += 1
        self.stats.waiting_max = max(self.stats.waiting_max, self._waiting)
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            yield time.monotonic() - began
        finally:
            self._slots.release()

    def take_stats(self) -> SandboxStats:
        """The counters, which start again from zero."""
        stats, self.stats = self.stats, SandboxStats()
        return stats
