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
import codecs
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field

from fastir.tir import sandbox_supervisor as protocol
from fastir.tir.sandbox_record import Settings

Status = Literal["ok", "error", "timeout", "memory", "output", "crashed"]

_START_SECONDS = 120.0  # for the zygote's imports, on a slow disk
_FORK_SECONDS = 20.0  # from a request to the supervisor's first sign of life
_PING_SECONDS = 5.0
_PARENT_GRACE_SECONDS = 1.0  # after the time limit the trainer hangs up, whatever the supervisor does
_ATTEMPTS = 3  # a run is repeated when its zygote died under it


class SandboxError(RuntimeError):
    """The sandbox itself failed; says nothing about the code."""


class SandboxConfig(BaseModel):
    """Limits of one execution, and how many run at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    workers: int = Field(0, description="Executions at once; 0 means one per available core.", ge=0)
    preload: tuple[str, ...] = Field(
        ("numpy", "sympy"), description="Modules that are imported before the code starts, if it mentions one of them."
    )


@dataclass(frozen=True)
class ExecResult:
    """How an execution ended and what it left.

    status: "ok" ran to its end · "error" raised, or left by sys.exit with a failure · "timeout" passed the wall or CPU
        limit · "memory" passed the memory limit · "output" printed too much · "crashed" died by a signal, exited
        without reaching its end, or had too many processes.
    stdout: what it printed, at most ``output_bytes`` bytes, also when it did not end well.
    error: one line that explains any status but "ok"; for "error" the traceback's last line.
    answer: the value of the last ``final_answer`` call as text, at most 16 KiB, or None.
    seconds: wall time from the start of the code to its end.
    traceback: the whole traceback of status "error". stderr: what went there, at most ``output_bytes`` bytes.
    """

    status: Status
    stdout: str = ""
    error: str = ""
    answer: str | None = None
    seconds: float = 0.0
    traceback: str = ""
    stderr: str = ""


@dataclass
class SandboxStats:
    """Counters since ``start``: executions by status, their summed seconds, zygotes that had to be replaced."""

    executions: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    zygote_restarts: int = 0
    cancelled: int = 0
    seconds: float = 0.0


def _text(data: bytes) -> str:
    """Decode, dropping a character that a byte limit has cut in half."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def _complete(frame: bytes | bytearray) -> bool:
    """Whether a supervisor's frame has arrived in full."""
    header = protocol.RESULT_HEADER
    if len(frame) < header.size:
        return False
    return len(frame) >= header.size + sum(max(length, 0) for length in header.unpack_from(frame)[2:])


def _parse(frame: bytes) -> tuple[str, ExecResult] | None:
    """The result in a supervisor's frame, or None if the frame is incomplete: the supervisor was killed."""
    if not _complete(frame):
        return None
    header = protocol.RESULT_HEADER
    number, seconds, *lengths = header.unpack_from(frame)
    texts: list[str | None] = []
    position = header.size
    for length in lengths:
        texts.append(None if length < 0 else _text(frame[position : position + length]))
        position += max(length, 0)
    stdout, stderr, error, trace, answer = texts
    status = protocol.STATUSES[number]
    result = ExecResult(
        cast(Status, status), stdout or "", error or "", answer, seconds, traceback=trace or "", stderr=stderr or ""
    )
    return status, result


def _python_prefixes() -> list[tuple[str, str]]:
    """Directories Python needs, as (real path, path it is known by)."""
    names = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    names |= {os.path.realpath(name) for name in names}
    names.add(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    return sorted((os.path.realpath(name), os.path.abspath(name)) for name in names if os.path.abspath(name) != "/")


class _Zygote:
    """The trainer's handle on one zygote: its launcher process and the socket that takes requests."""

    def __init__(self, config: SandboxConfig, isolate: bool) -> None:
        """Start the process; blocking, a few milliseconds. Raises ``SandboxError`` if it cannot be started at all."""
        self.isolation = ""
        self._scratch = "" if isolate else tempfile.mkdtemp(prefix="fastir-sandbox-")
        settings = Settings(
            isolate=isolate,
            timeout_seconds=config.timeout_seconds,
            cpu_seconds=config.cpu_seconds,
            memory_bytes=config.memory_mb << 20,
            processes=config.processes,
            output_bytes=config.output_bytes,
            tmp_bytes=config.tmp_mb << 20,
            preload=list(config.preload),
            prefixes=_python_prefixes(),
            scratch=self._scratch,
        )
        self._control, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        start = f"import sys; sys.path.insert(0, {root!r}); "
        start += f"from fastir.tir.sandbox_child import main; main({theirs.fileno()})"
        try:
            # Like -I, but PYTHONHASHSEED must be read: sets of strings then iterate the same in every execution.
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-B", "-X", "utf8", "-c", start],
                env={"PYTHONHASHSEED": "0"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
            self._control.sendall(json.dumps(settings._asdict()).encode() + b"\n")
        except OSError as error:
            self._control.close()
            raise SandboxError(f"cannot start the sandbox's Python process: {error}") from error
        finally:
            theirs.close()
        self._control.setblocking(False)
        self._ping_lock = asyncio.Lock()

    async def ready(self) -> None:
        """Wait for the imports; raises ``SandboxError`` with the step that failed."""
        loop = asyncio.get_running_loop()
        reply = b""
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not reply.endswith(b"\n"):
                    piece = await loop.sock_recv(self._control, 65536)
                    if not piece:
                        raise ConnectionResetError
                    reply += piece
        except TimeoutError:
            raise SandboxError(f"the sandbox was not ready after {_START_SECONDS:g} s") from None
        except OSError:
            stderr = await asyncio.to_thread(self._last_words)
            raise SandboxError(f"the sandbox's Python process died at its start: {stderr}") from None
        message = json.loads(reply)
        if "failed" in message:
            raise SandboxError(f"{message['failed']}: {message['error']}")
        self.isolation = message["isolation"]

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        return self._process.stderr.read(4096).decode("utf-8", "replace").strip() or "no message"

    async def connect(self) -> socket.socket:
        """Ask for a supervisor; returns our end of its connection. Raises ``OSError`` if the zygote is gone."""
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            while True:
                try:
                    socket.send_fds(self._control, [b"R"], [theirs.fileno()])
                    return ours
                except BlockingIOError:  # many requests at once fill the socket
                    await asyncio.sleep(0.002)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    async def alive(self) -> bool:
        """Whether the zygote answers within a few seconds."""
        loop = asyncio.get_running_loop()
        try:
            async with self._ping_lock, asyncio.timeout(_PING_SECONDS):
                await loop.sock_sendall(self._control, b"P")
                return await loop.sock_recv(self._control, 1) == b"p"
        except (OSError, TimeoutError):
            return False

    def close(self) -> None:
        """Kill the zygote and with it every execution; blocking, some milliseconds."""
        self._control.close()  # the zygote ends when it reads end-of-file
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)


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
        self.stats = SandboxStats()
        self.isolation = ""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = self.config.workers or cores
        self._zygote: _Zygote | None = None
        self._isolate = True
        self._closed = True
        self._slots = asyncio.Semaphore(self.workers)
        self._restart_lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        zygote = _Zygote(self.config, isolate)
        try:
            await zygote.ready()
            self._zygote, self._isolate = zygote, isolate
            outcome = await self._attempt(zygote, "print(6 * 7)")
            if outcome is None or outcome.stdout != "42\n":
                raise SandboxError(f"the first execution failed: {outcome}")
        except BaseException:
            self._zygote = None
            await asyncio.shield(asyncio.to_thread(zygote.close))
            raise
        self.isolation = zygote.isolation or self.isolation

    async def close(self) -> None:
        """Kill what still runs and remove everything. Runs in progress raise ``SandboxError``."""
        self._closed = True
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await asyncio.shield(asyncio.to_thread(zygote.close))

    def kill(self) -> None:
        """``close`` for callers without an event loop, such as an exit handler."""
        self._closed = True
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close()

    async def run(self, code: str) -> ExecResult:
        """Execute ``code`` as a script and return how it ended; waits for a free worker first.

        Cancelling the awaiting task kills the execution. Raises ``SandboxError`` only for failures of the sandbox.
        """
        async with self._slots:
            for _ in range(_ATTEMPTS):
                if self._closed:
                    raise SandboxError("the sandbox is not running: use `async with Sandbox() as sandbox`")
                zygote = self._zygote
                if zygote is None:  # being replaced, or the last replacement failed
                    await self._replace_if_dead(None)
                    continue
                try:
                    result = await self._attempt(zygote, code)
                except asyncio.CancelledError:
                    self.stats.cancelled += 1
                    raise
                if result is not None:
                    self.stats.executions += 1
                    self.stats.by_status[result.status] += 1
                    self.stats.seconds += result.seconds
                    return result
                await self._replace_if_dead(zygote)
            raise SandboxError(f"the sandbox's zygote died or hung {_ATTEMPTS} times during one execution")

    async def _replace_if_dead(self, dead: _Zygote | None) -> None:
        async with self._restart_lock:
            if self._zygote is not dead or self._closed:  # another task has done it, or close() wins
                return
            if dead is not None and await dead.alive():  # only the supervisor was lost
                return
            self.stats.zygote_restarts += 1
            self._zygote = None
            if dead is not None:
                await asyncio.shield(asyncio.to_thread(dead.close))
            await self._launch(isolate=self._isolate)
            if self._closed:  # close() came in between and found nothing to close
                await self.close()

    async def _attempt(self, zygote: _Zygote, code: str) -> ExecResult | None:
        """One execution; None if the zygote died or hung, or the supervisor was lost before the code started."""
        loop = asyncio.get_running_loop()
        source = code.encode("utf-8", "surrogatepass")
        limit = self.config.timeout_seconds
        try:
            connection = await zygote.connect()
        except OSError:
            return None
        started: float | None = None
        frame = bytearray()
        try:
            async with asyncio.timeout(_FORK_SECONDS) as timer:
                await loop.sock_sendall(connection, protocol.CODE_HEADER.pack(len(source)) + source)
                while not _complete(frame) and (piece := await loop.sock_recv(connection, 1 << 18)):
                    if started is None and piece[:1] == protocol.STARTED:
                        started = time.monotonic()
                        timer.reschedule(loop.time() + limit + _PARENT_GRACE_SECONDS)
                        piece = piece[1:]
                    frame += piece
        except TimeoutError:
            if started is None:
                return None
            line = f"TimeoutError: no result within {limit:g} s"
            return ExecResult("timeout", error=line, seconds=time.monotonic() - started)
        except OSError:  # connection reset: the supervisor was killed
            frame.clear()
        finally:
            connection.close()  # tells a supervisor that still runs to stop
        parsed = _parse(bytes(frame))
        if parsed is not None:
            status, result = parsed
            if status == "infrastructure":
                raise SandboxError(f"the sandbox could not set up an execution: {result.error}")
            return result
        if started is None or not await zygote.alive():
            return None
        seconds = time.monotonic() - started
        if seconds >= limit:
            return ExecResult("timeout", error=f"TimeoutError: no result within {limit:g} s", seconds=seconds)
        return ExecResult("crashed", error="the code brought down its supervisor", seconds=seconds)


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
