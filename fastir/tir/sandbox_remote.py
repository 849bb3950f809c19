"""Code runs on a service that speaks SandboxFusion's ``POST /run_code``, with the results of the local sandbox.

What a service cannot do is left out: it does not hash strings or seed numpy as the local sandbox does, and
``sandbox.processes`` and ``tmp_mb`` are its own affair. Code that closes every descriptor, or writes more to stderr
than the service keeps (1 MiB), loses what it would have reported, and reads as crashed. How well executions are
isolated is the service's affair too; ``fastir.tir.sandbox_server`` puts the local sandbox behind this API.

A service that cannot be reached, answers 429 or 5xx, or reports a failure of its own is asked again, with growing
pauses, until that has lasted ``sandbox.retry_seconds``; then executions fail with ``SandboxError``, at the first
failed attempt, until the service has answered again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
import secrets
import signal
import ssl
import time
from dataclasses import replace
from importlib import resources
from typing import Any, Literal, Self, cast
from urllib.parse import urlsplit

from pydantic import BaseModel

from fastir.tir.feedback import NOTICES
from fastir.tir.sandbox_http import MAX_HEADER_BYTES, HttpError, message, read_message
from fastir.tir.sandbox_record import ANSWER_BYTES
from fastir.tir.sandbox_supervisor import timeout_line
from fastir.tir.sandbox_types import ExecResult, SandboxConfig, SandboxError, SandboxStats, Status, WorkerQueue

_WORKERS = 32
_CALL_SECONDS = 10.0  # of a call, on top of the execution's time limit: connecting, the service's queue, the way back
_INTERPRETER_MB = 1024  # of address space that an interpreter takes, on top of what the code may
_SPARE_BYTES = 32 << 20  # above the memory limit, to write down the MemoryError
_PAUSES = (0.05, 2.0)  # the first and the longest pause between attempts, in seconds
_HINT = re.compile(r"\nsandbox: (\w+): (.*)\n\Z")

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _ServiceError(Exception):
    """The service failed in a way that may pass."""


class RemoteSandbox:
    """The client: ``async with RemoteSandbox(config) as sandbox: await sandbox.run(code)``.

    One object serves any number of tasks of one event loop; ``workers`` calls are under way at once.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.workers = config.workers or _WORKERS
        self.isolation = f"remote service {config.url}, isolated as that service does"
        self._address = urlsplit(config.url)
        self._queue = WorkerQueue(self.workers, config.max_waiting)
        self._script = resources.files("fastir.tir").joinpath("sandbox_script.py").read_text()
        self._idle: list[Connection] = []
        self._failing_since: float | None = None
        self._closed = True

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
        """Try one execution. Raises ``SandboxError`` if the service does not run it."""
        self._closed = False
        outcome = await self._execute("final_answer(6 * 7)")
        if (outcome.status, outcome.answer) != ("ok", "42"):
            raise SandboxError(f"sandbox.url = {self.config.url}: the first execution failed: {outcome}")

    async def close(self) -> None:
        """Close the connections."""
        self._closed = True
        while self._idle:
            await _close(self._idle.pop())

    async def run(self, code: str) -> ExecResult:
        """Execute ``code`` as a script and return how it ended; waits for a free worker first.

        Raises:
            SandboxBusyError: ``max_waiting`` executions wait already.
            SandboxError: the service failed, never the code.
        """

        async def execute(waited: float) -> ExecResult:
            return replace(await self._execute(code), wait_seconds=waited)

        return await self._queue.run(execute)

    async def _execute(self, code: str) -> ExecResult:
        mark = secrets.token_hex(8)
        body = json.dumps(request(self._script, code, mark, self.config)).encode()
        began, pause = time.monotonic(), _PAUSES[0]
        while True:
            if self._closed:
                raise SandboxError("the sandbox is not running: use `async with`")
            try:
                reply = await self._call(body)
                result = parse_reply(reply, mark, self.config)
                self._failing_since = None
                return result
            except (OSError, EOFError, HttpError, TimeoutError, _ServiceError) as error:
                now = time.monotonic()
                self._failing_since = now if self._failing_since is None else self._failing_since
                if now + pause - min(began, self._failing_since) > self.config.retry_seconds:
                    raise SandboxError(
                        f"sandbox.url = {self.config.url} does not run code: {type(error).__name__}: {error}. Check "
                        "that the service is up and not overloaded; sandbox.retry_seconds is how long it is asked again"
                    ) from error
            self.stats.retries += 1
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # so that callers do not all come back at once
            pause = min(2 * pause, _PAUSES[1])

    async def _call(self, body: bytes) -> dict[str, Any]:
        """One POST, all in all at most ``timeout_seconds`` and ``_CALL_SECONDS``; the reply's JSON object."""
        connection: Connection | None = None
        keep = False
        try:
            async with asyncio.timeout(self.config.timeout_seconds + _CALL_SECONDS):
                connection = await self._connect()
                reader, writer = connection
                path = self._address.path.rstrip("/") + "/run_code"
                host = self._address.netloc.rpartition("@")[2]
                writer.write(message(f"POST {path} HTTP/1.1", body, f"Host: {host}"))
                await writer.drain()
                words, headers, content = await read_message(reader)
            keep = headers.get("connection", "keep-alive").lower() == "keep-alive" and words[0] == "HTTP/1.1"
        except TimeoutError:
            raise TimeoutError("no answer in time") from None
        finally:
            if connection and keep and not self._closed:
                self._idle.append(connection)
            elif connection:
                connection[1].close()
        code, text = words[1], content[:300].decode("utf-8", "replace")
        if code == "429" or code.startswith("5"):
            raise _ServiceError(f"HTTP status {code}: {text}")
        if code != "200":
            raise SandboxError(f"sandbox.url = {self.config.url} refused a request with HTTP status {code}: {text}")
        try:
            reply = json.loads(content)
        except ValueError:
            raise _ServiceError(f"the reply is not JSON: {text}") from None
        if not isinstance(reply, dict):
            raise _ServiceError(f"the reply is not a JSON object: {text}")
        return reply

    async def _connect(self) -> Connection:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        secure = self._address.scheme == "https"
        port = self._address.port or (443 if secure else 80)
        context = ssl.create_default_context() if secure else None
        return await asyncio.open_connection(self._address.hostname, port, ssl=context, limit=MAX_HEADER_BYTES)


async def _close(connection: Connection) -> None:
    connection[1].close()
    with contextlib.suppress(OSError):
        await connection[1].wait_closed()


def request(script: str, code: str, mark: str, config: SandboxConfig) -> dict[str, Any]:
    """The JSON of ``POST /run_code``: the policy's code inside the text of ``sandbox_script``."""
    limits = math.ceil(config.cpu_seconds), config.memory_mb << 20, _SPARE_BYTES
    return {
        "code": f"{script}\n\nrun_as_script({code!a}, {mark!r}, *{limits})\n",
        "language": "python",
        "run_timeout": config.timeout_seconds,
        "compile_timeout": config.timeout_seconds,
        "memory_limit_MB": config.memory_mb + _INTERPRETER_MB,
        "stdin": "",
        "files": {},
        "fetch_files": [],
    }


def parse_reply(reply: dict[str, Any], mark: str, config: SandboxConfig) -> ExecResult:
    """What a service's reply says of an execution.

    Raises:
        _ServiceError: it says that the service failed, or says nothing that can be understood.
    """
    run = reply.get("run_result")
    if reply.get("status") not in ("Success", "Failed") or not isinstance(run, dict) or run.get("status") == "Error":
        raise _ServiceError(f"status {reply.get('status')!r}: {reply.get('message') or run}"[:500])
    answers, end, stderr = _told(str(run.get("stderr") or ""), mark)
    hint = _HINT.search(stderr)
    code, limit = run.get("return_code"), config.timeout_seconds
    killed = 0 if code is None else -code if code < 0 else code - 128 if 128 < code < 193 else 0
    stdout, overflowed = _cut(str(run.get("stdout") or ""), config.output_bytes)
    result = ExecResult(
        "ok",
        stdout,
        answer=_cut(answers[-1], ANSWER_BYTES)[0] if answers else None,
        seconds=run.get("execution_time") or 0.0,
        stderr=_cut(_HINT.sub("", stderr) if killed else stderr, config.output_bytes)[0],
        exit_code=-killed or code or 0,
    )
    if end is not None:
        result = replace(result, seconds=end.seconds, cpu_seconds=end.cpu, peak_bytes=end.peak)
    if overflowed:
        return replace(result, status="output", error=f"printed more than {config.output_bytes} bytes")
    if run.get("status") == "TimeLimitExceeded":
        return replace(result, status="timeout", error=timeout_line(limit), exit_code=-9)
    if end is not None:
        return replace(result, status=end.status, error=end.error, traceback=end.trace)
    if killed == signal.SIGXCPU:
        return replace(result, status="timeout", error=f"TimeoutError: more than {config.cpu_seconds:g} s of CPU time")
    if killed and hint and hint[1] in NOTICES:  # a limit of this project's server
        return replace(result, status=cast(Status, hint[1]), error=hint[2])
    if killed:
        return replace(result, status="crashed", error=f"killed by signal {killed} ({signal.strsignal(killed)})")
    return replace(result, status="crashed", error=f"exited with status {code} before the end of the script")


class _End(BaseModel):
    """What the script says of its end (see `sandbox_script.run_as_script`)."""

    status: Literal["ok", "error", "memory"]
    error: str
    trace: str
    seconds: float
    cpu: float
    peak: int


def _told(stderr: str, mark: str) -> tuple[list[str], _End | None, str]:
    """The answers and the end that the script told of, and what else was written to stderr.

    Code that found out the mark can spoil its own report, which then counts as missing.
    """
    lines = re.compile(f"\n{mark}([AE]) (.*)\n")
    answers: list[str] = []
    end: _End | None = None
    for kind, text in lines.findall(stderr):
        with contextlib.suppress(ValueError):  # which ValidationError is too
            if kind == "A":
                answers.append(str(json.loads(text)))
            else:
                end = _End.model_validate_json(text)
    return answers, end, lines.sub("", stderr)


def _cut(text: str, limit: int) -> tuple[str, bool]:
    """At most ``limit`` bytes of UTF-8, dropping a character cut in half; whether there was more."""
    data = text.encode("utf-8", "replace")
    return data[:limit].decode("utf-8", "ignore"), len(data) > limit
