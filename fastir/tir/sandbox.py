"""Where model-written Python runs: isolated, limited, and fast.

``await Sandbox.run(code)`` executes one script in a process forked from a waiting interpreter (``sandbox_child``) and
says how it ended. Each execution has pid, mount, network, ipc, uts, cgroup and user namespaces of its own, made for it
and gone with it; executions share no files, memory, network or process ids. Nothing the code does is an exception here;
``SandboxError`` is raised when the sandbox itself fails, and only then.

Code whose text mentions a module of ``SandboxConfig.preload``, or another that came with those, starts with all of them
imported. Other code starts without, from an interpreter that is much cheaper to fork; if it imports them all the same,
by a name put together at run time, they come from the disk, and numpy's generators are not seeded.

Isolation needs Linux 5.12 with user namespaces, and neither root nor any set-uid helper. Without it ``start`` refuses,
unless ``allow_unsafe`` is set.

Limits of the isolation: the code shares the host's kernel and, while it runs, its processors and memory bandwidth; it
can read the Python installation and /usr, and see mount paths in /proc/self/mountinfo; time and /dev/urandom are real,
so a script that uses them can differ on replay.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from dataclasses import replace
from typing import Self

from fastir.tir.sandbox_types import (
    ExecResult,
    SandboxBackend,
    SandboxBusyError,
    SandboxConfig,
    SandboxError,
    SandboxStats,
    Status,
    WorkerQueue,
)
from fastir.tir.sandbox_zygote import Zygote

__all__ = [
    "ExecResult",
    "Sandbox",
    "SandboxBackend",
    "SandboxBusyError",
    "SandboxConfig",
    "SandboxError",
    "SandboxStats",
    "Status",
    "check_isolation",
    "open_sandbox",
    "run",
]

_ATTEMPTS = 3  # a run is repeated when its zygote died under it
_LOOK_EVERY = 200  # executions between two looks at the memory of the sandbox's own processes


_REMEDY = (
    "The sandbox isolates code with unprivileged user namespaces (Linux 5.12 or newer). Check that "
    "`unshare --user --map-root-user --net --pid --fork true` works: on Debian/Ubuntu set sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0 or kernel.unprivileged_userns_clone=1, and "
    "user.max_user_namespaces above 1000; in a container use --security-opt seccomp=unconfined (and "
    "--security-opt systempaths=unconfined), or --privileged. To run without isolation, on a machine that holds "
    "nothing of value, set sandbox.allow_unsafe = true."
)


class Sandbox:
    """Runs scripts, each isolated: ``async with Sandbox(config) as sandbox: await sandbox.run(code)``.

    One object serves any number of tasks of one event loop; ``workers`` executions run at once, the others wait.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self.isolation = ""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = self.config.workers or cores
        self._queue = WorkerQueue(self.workers, self.config.max_waiting)
        self._zygote: Zygote | None = None
        self._base_bytes: int | None = None  # what the processes of ``_zygote`` held when first looked at
        self._retired: set[Zygote] = set()  # replaced by a fresh one, with executions to finish
        self._recycling: asyncio.Task[None] | None = None
        self._isolate = True
        self._closed = True
        self._restart_lock = asyncio.Lock()

    @property
    def stats(self) -> SandboxStats:
        """Counters since ``start``, or since ``take_stats``."""
        return self._queue.stats

    def take_stats(self) -> SandboxStats:
        """The counters, which start again from zero."""
        return self._queue.take_stats()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the zygote and try one execution. Raises ``SandboxError`` if isolation is unavailable."""
        if self._zygote is not None:
            return
        self._closed = False
        try:
            if sys.platform != "linux":
                raise SandboxError(f"no isolation on {sys.platform}")
            await self._launch(isolate=True)
        except SandboxError as error:
            if not self.config.allow_unsafe:
                raise SandboxError(f"{error}\n{_REMEDY}") from error
            await self._launch(isolate=False)
            self.isolation = f"UNSAFE: process limits only, files and network are open to the code ({error})"

    async def _launch(self, *, isolate: bool) -> None:
        zygote = Zygote(self.config, isolate)
        try:
            await zygote.ready()
            outcome = await zygote.execute("print(6 * 7)", self.config.timeout_seconds)
            if outcome is None or outcome.stdout != "42\n":
                raise SandboxError(f"the first execution failed: {outcome}")
            if self._closed:  # while we were waiting
                raise SandboxError("the sandbox was closed")
        except BaseException:
            await asyncio.shield(asyncio.to_thread(zygote.close))
            raise
        self._zygote, self._isolate, self._base_bytes = zygote, isolate, None
        self.isolation = zygote.isolation or self.isolation

    async def close(self) -> None:
        """Kill what still runs and remove everything. Runs in progress raise ``SandboxError``."""
        self._closed = True
        recycling = self._recycling
        if recycling is not None:
            recycling.cancel()
            await asyncio.wait([recycling])
        await asyncio.shield(asyncio.to_thread(self.kill))

    def kill(self) -> None:
        """``close`` for callers without an event loop, such as an exit handler."""
        self._closed = True
        zygotes = [*self._retired, *([self._zygote] if self._zygote else [])]
        self._zygote = None
        self._retired.clear()
        for zygote in zygotes:
            zygote.close()

    async def run(self, code: str, *, timeout_seconds: float | None = None) -> ExecResult:
        """Execute ``code`` as a script and return how it ended; waits for a free worker first.

        ``timeout_seconds`` tightens the limit of the settings. Cancelling the awaiting task kills the execution.

        Raises:
            SandboxBusyError: ``max_waiting`` executions wait already.
            SandboxError: the sandbox failed, never the code.
        """
        limit = min(timeout_seconds or self.config.timeout_seconds, self.config.timeout_seconds)

        async def execute(waited: float) -> ExecResult:
            return replace(await self._execute(code, limit), wait_seconds=waited)

        return await self._queue.run(execute)

    async def _execute(self, code: str, limit: float) -> ExecResult:
        for attempt in range(_ATTEMPTS):
            if self._closed:
                raise SandboxError("the sandbox is not running: use `async with Sandbox() as sandbox`")
            self.stats.retries += attempt > 0
            zygote = self._zygote
            if zygote is None:  # being replaced, or the last replacement failed
                await self._replace_if_dead(None)
                continue
            result = await zygote.execute(code, limit)
            if result is not None:
                self._recycle_when_due(zygote)
                return result
            await self._replace_if_dead(zygote)
        if self._closed:
            raise SandboxError("the sandbox was closed during an execution")
        raise SandboxError(f"the sandbox's processes died or hung {_ATTEMPTS} times during one execution")

    async def _replace_if_dead(self, dead: Zygote | None) -> None:
        async with self._restart_lock:
            if self._zygote is not dead or self._closed:  # another task has done it, or close() wins
                return
            if dead is not None and await dead.resident() is not None:  # only the supervisor was lost
                return
            self.stats.restarts += 1
            self._zygote = None
            if dead is not None:
                await asyncio.shield(asyncio.to_thread(dead.close))
            await self._launch(isolate=self._isolate)

    def _recycle_when_due(self, zygote: Zygote) -> None:
        """Look at the zygote's age and size now and then; if either is too much, replace it in the background."""
        old = zygote.executions >= self.config.recycle_executions
        if (old or zygote.executions % _LOOK_EVERY == 0) and zygote is self._zygote and self._recycling is None:
            self._recycling = asyncio.create_task(self._recycle(zygote, old))

    async def _recycle(self, zygote: Zygote, old: bool) -> None:
        """Replace ``zygote`` if it is old or has grown; what runs on it runs to its end."""
        try:
            held = await zygote.resident()
            if self._base_bytes is None:
                self._base_bytes = held
            grown = (held or 0) - (self._base_bytes or 0) > self.config.recycle_growth_mb << 20
            if not (old or grown):
                return
            async with self._restart_lock:
                if zygote is not self._zygote:
                    return
                self._retired.add(zygote)
                try:
                    await self._launch(isolate=self._isolate)
                except SandboxError:  # the old one still works; it is tried again with the next execution
                    self._retired.discard(zygote)
                    return
                self.stats.recycled += 1
            while zygote.running:
                await asyncio.sleep(0.02)
            await asyncio.shield(asyncio.to_thread(zygote.close))
            self._retired.discard(zygote)
        finally:
            self._recycling = None


def open_sandbox(config: SandboxConfig) -> SandboxBackend:
    """The back end that the configuration names, yet to be entered (``async with``)."""
    if config.backend == "remote":
        from fastir.tir.sandbox_remote import RemoteSandbox

        return RemoteSandbox(config)
    return Sandbox(config)


# ----------------------------------------------------------------------------------------------- module-level shortcuts

_defaults: dict[tuple[SandboxConfig, asyncio.AbstractEventLoop], Sandbox] = {}


def _kill_defaults() -> None:
    while _defaults:
        _defaults.popitem()[1].kill()


atexit.register(_kill_defaults)


async def run(code: str, config: SandboxConfig | None = None) -> ExecResult:
    """``Sandbox.run`` on a sandbox that is started at the first call and ends with the program.

    There is one per config and event loop. Raises ``SandboxError`` as ``Sandbox.start`` and ``Sandbox.run`` do.
    """
    config = config or SandboxConfig()
    loop = asyncio.get_running_loop()
    for key in [key for key in _defaults if key[1].is_closed()]:
        _defaults.pop(key).kill()
    sandbox = _defaults.setdefault((config, loop), Sandbox(config))
    async with sandbox._restart_lock:
        await sandbox.start()
    return await sandbox.run(code)


_PROBE = """
import os, socket
problems = []
try:
    socket.create_connection(("127.0.0.1", 1), 1)
except ConnectionRefusedError:
    problems.append("network reachable")
except OSError:
    pass
if len([name for name in (os.listdir("/proc") if os.path.isdir("/proc") else []) if name.isdigit()]) > 2:
    problems.append("other processes visible")
try:
    open(os.path.join(os.path.dirname(os.__file__), "fastir_probe"), "w")
    problems.append("Python installation writable")
except OSError:
    pass
if os.environ or os.getcwd() != "/tmp" or os.uname().nodename != "sandbox":
    problems.append("environment, directory or host name inherited")
final_answer("; ".join(problems) or "isolated")
"""


def check_isolation() -> tuple[bool, str]:
    """Really start a sandbox and look around inside it: (whether it isolates, what it got or what is missing).

    Takes about a tenth of a second; never raises. Works inside and outside an event loop.
    """
    outcome: list[tuple[bool, str]] = []

    async def probe() -> tuple[bool, str]:
        try:
            async with Sandbox(SandboxConfig(preload=(), workers=1)) as sandbox:
                result = await sandbox.run(_PROBE)
                if result.answer == "isolated":
                    return True, sandbox.isolation
                return False, result.answer or f"{result.status}: {result.error}"
        except SandboxError as error:
            return False, str(error)

    thread = threading.Thread(target=lambda: outcome.append(asyncio.run(probe())))
    thread.start()
    thread.join()
    return outcome[0] if outcome else (False, "the probe itself failed")
