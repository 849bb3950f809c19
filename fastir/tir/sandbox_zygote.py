"""The trainer's handle on the local sandbox's processes (``sandbox_child``): start, execute, look after, end."""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

from fastir.tir import sandbox_supervisor as protocol
from fastir.tir.sandbox_record import Settings
from fastir.tir.sandbox_types import ExecResult, SandboxConfig, SandboxError, Status

_START_SECONDS = 120.0  # for the zygote's imports, on a slow disk
_FORK_SECONDS = 20.0  # from a request to the supervisor's first sign of life
_PING_SECONDS = 5.0
_PARENT_GRACE_SECONDS = 1.0  # after the time limit the trainer hangs up, whatever the supervisor does


def _text(data: bytes) -> str:
    """Decode, dropping a character that a byte limit has cut in half."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def _complete(frame: bytes | bytearray) -> bool:
    """Whether a supervisor's frame has arrived in full."""
    header = protocol.RESULT_HEADER
    if len(frame) < header.size:
        return False
    return len(frame) >= header.size + sum(max(length, 0) for length in header.unpack_from(frame)[5:])


def _parse(frame: bytes) -> tuple[str, ExecResult] | None:
    """The result in a supervisor's frame, or None if the frame is incomplete: the supervisor was killed."""
    if not _complete(frame):
        return None
    header = protocol.RESULT_HEADER
    number, seconds, cpu_seconds, peak_bytes, exit_code, *lengths = header.unpack_from(frame)
    texts: list[str | None] = []
    position = header.size
    for length in lengths:
        texts.append(None if length < 0 else _text(frame[position : position + length]))
        position += max(length, 0)
    stdout, stderr, error, trace, answer = texts
    status = protocol.STATUSES[number]
    result = ExecResult(
        cast(Status, status),
        stdout or "",
        error or "",
        answer,
        seconds,
        traceback=trace or "",
        stderr=stderr or "",
        cpu_seconds=cpu_seconds,
        peak_bytes=peak_bytes,
        exit_code=exit_code,
    )
    return status, result


def _python_prefixes() -> list[tuple[str, str]]:
    """Directories Python needs, as (real path, path it is known by)."""
    names = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    names |= {os.path.realpath(name) for name in names}
    names.add(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    return sorted((os.path.realpath(name), os.path.abspath(name)) for name in names if os.path.abspath(name) != "/")


class Zygote:
    """A launcher process with all that it has started, and the socket that takes requests.

    ``running`` executions are under way, ``executions`` have been asked for.
    """

    def __init__(self, config: SandboxConfig, isolate: bool) -> None:
        """Start the process; blocking, a few milliseconds. Raises ``SandboxError`` if it cannot be started at all."""
        self.isolation = ""
        self.running = self.executions = 0
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
            self.process = subprocess.Popen(
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
        assert self.process.stderr is not None
        return self.process.stderr.read(4096).decode("utf-8", "replace").strip() or "no message"

    async def execute(self, code: str, limit: float) -> ExecResult | None:
        """One execution of at most ``limit`` seconds, at most those of the settings.

        None if its processes died or hung without the code having passed the limit: it can be tried again.
        Raises ``SandboxError`` when an execution could not be set up.
        """
        self.running += 1
        self.executions += 1
        try:
            return await self._execute(code, limit)
        finally:
            self.running -= 1

    async def _execute(self, code: str, limit: float) -> ExecResult | None:
        loop = asyncio.get_running_loop()
        source = code.encode("utf-8", "surrogatepass")
        try:
            connection = await self._connect()
        except OSError:
            return None
        started: float | None = None
        frame = bytearray()
        try:
            async with asyncio.timeout(_FORK_SECONDS) as timer:
                await loop.sock_sendall(connection, protocol.CODE_HEADER.pack(len(source), limit) + source)
                while not _complete(frame) and (piece := await loop.sock_recv(connection, 1 << 18)):
                    if started is None and piece[:1] == protocol.STARTED:
                        started = time.monotonic()
                        timer.reschedule(loop.time() + limit + _PARENT_GRACE_SECONDS)
                        piece = piece[1:]
                    frame += piece
        except TimeoutError:
            if started is None:
                return None
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
        seconds = 0.0 if started is None else time.monotonic() - started
        if seconds >= limit:  # a supervisor that has hung is killed by the keeper, or hung up on
            return ExecResult("timeout", error=protocol.timeout_line(limit), seconds=seconds, exit_code=-9)
        return None  # the code cannot reach its supervisor: whatever killed that, the code is not to blame

    async def _connect(self) -> socket.socket:
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

    async def resident(self) -> int | None:
        """Bytes of memory that the standing processes hold, 0 without /proc; None if there is no answer in seconds."""
        loop = asyncio.get_running_loop()
        reply = b""
        try:
            async with self._ping_lock, asyncio.timeout(_PING_SECONDS):
                await loop.sock_sendall(self._control, b"P")
                while len(reply) < protocol.PONG.size:
                    piece = await loop.sock_recv(self._control, protocol.PONG.size - len(reply))
                    if not piece:
                        return None
                    reply += piece
        except (OSError, TimeoutError):
            return None
        return int(protocol.PONG.unpack(reply)[0])

    def close(self) -> None:
        """Kill the zygote and with it every execution; blocking, some milliseconds."""
        self._control.close()  # the zygote ends when it reads end-of-file
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
