"""The local sandbox behind SandboxFusion's ``POST /run_code``, so that one machine can run code for many trainers.

    python -m fastir.tir.sandbox_server --host 0.0.0.0 --port 8080 --workers 64 --memory-mb 1024

Runs ``language: "python"`` without ``files``, ``fetch_files`` or ``stdin``. ``run_timeout`` holds up to the server's
own ``--timeout-seconds``; memory and output are bounded by the server's settings, whatever the request asks for. When
``--max-waiting`` executions wait, a request is answered with status 429. ``GET /v1/ping`` answers "pong".

There is no authentication: whoever reaches the port can run code (isolated) and load the machine. Bind it to a network
of trainers only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from fastir.tir.sandbox import ExecResult, Sandbox, SandboxBusyError, SandboxConfig, SandboxError
from fastir.tir.sandbox_http import MAX_HEADER_BYTES, HttpError, message, read_message

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 422: "Unprocessable Content", 429: "Too Many Requests"}
_DEFAULTS = {"timeout_seconds": 30.0, "cpu_seconds": 30.0, "output_bytes": 1 << 20, "max_waiting": 1024}
_LOOK_SECONDS = 0.1  # how often a waiting request's connection is looked at: whose caller has gone is cancelled


class RunCodeRequest(BaseModel):
    """What ``POST /run_code`` takes; fields that it does not know are ignored."""

    code: str
    language: str
    run_timeout: float = Field(10.0, gt=0)
    stdin: str | None = None
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []


def reply_of(result: ExecResult) -> dict[str, Any]:
    """The JSON reply for an execution: what a service that runs plain ``python`` would say.

    The traceback stands in stderr. A limit that ended the code leaves return code −9 (killed) and a last line in
    stderr, ``sandbox: <status>: <explanation>``.
    """
    code: int | None = result.exit_code
    stderr = result.stderr
    if result.status == "timeout" and code != -signal.SIGXCPU:
        code = None
    elif code == -signal.SIGKILL:
        stderr += f"\nsandbox: {result.status}: {result.error}\n"
    elif not result.error.startswith("SystemExit"):
        stderr += result.traceback
    return {
        "status": "Success" if code == 0 else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": "TimeLimitExceeded" if code is None else "Finished",
            "execution_time": result.seconds,
            "return_code": code,
            "stdout": result.stdout,
            "stderr": stderr,
        },
        "executor_pod_name": None,
        "files": {},
    }


async def _run_code(sandbox: Sandbox, reader: asyncio.StreamReader, body: bytes) -> tuple[int, object] | None:
    """Status and reply; None if the caller has gone."""
    try:
        asked = RunCodeRequest.model_validate_json(body)
    except ValidationError as error:
        return 422, {"detail": error.errors(include_url=False, include_input=False, include_context=False)}
    if asked.language != "python" or asked.files or asked.fetch_files or asked.stdin:
        return 422, {"detail": "only language 'python' without files, fetch_files and stdin is served here"}
    running = asyncio.create_task(sandbox.run(asked.code, timeout_seconds=asked.run_timeout))
    try:
        while not (await asyncio.wait({running}, timeout=_LOOK_SECONDS))[0]:
            if reader.at_eof():
                return None
        return 200, reply_of(running.result())
    except SandboxBusyError as error:
        return 429, {"detail": str(error)}
    except SandboxError as error:
        return 200, {"status": "SandboxError", "message": str(error), "compile_result": None, "run_result": None}
    finally:
        running.cancel()


async def _converse(sandbox: Sandbox, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one connection's requests until it ends."""
    try:
        while True:
            try:
                (method, path, *_), headers, body = await read_message(reader)
            except HttpError as error:
                writer.write(message("HTTP/1.1 400 Bad Request", json.dumps({"detail": str(error)}).encode()))
                return
            if (method, path) == ("POST", "/run_code"):
                answer = await _run_code(sandbox, reader, body)
            elif (method, path) == ("GET", "/v1/ping"):
                answer = 200, "pong"
            else:
                answer = 404, {"detail": f"{method} {path} is not served here, only POST /run_code"}
            if answer is None:
                return
            status, reply = answer
            writer.write(message(f"HTTP/1.1 {status} {_REASONS[status]}", json.dumps(reply).encode()))
            await writer.drain()
            if headers.get("connection", "").lower() == "close":
                return
    except (OSError, EOFError):
        return  # the caller has gone
    finally:
        writer.close()


@asynccontextmanager
async def serve(config: SandboxConfig, host: str, port: int) -> AsyncIterator[tuple[int, Sandbox]]:
    """Serve while the context is open: gives the port (a free one for 0) and the sandbox behind it.

    Raises:
        SandboxError: the sandbox cannot start.
        OSError: the address cannot be bound.
    """
    async with Sandbox(config) as sandbox:
        conversations: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(_converse(sandbox, reader, writer))
            conversations.add(task)
            task.add_done_callback(conversations.discard)

        server = await asyncio.start_server(accept, host, port, limit=MAX_HEADER_BYTES, backlog=1024)
        try:
            yield server.sockets[0].getsockname()[1], sandbox
        finally:
            server.close()
            for task in conversations:
                task.cancel()
            await asyncio.gather(*conversations, return_exceptions=True)


async def _serve_until_stopped(config: SandboxConfig, host: str, port: int) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with serve(config, host, port) as (bound, sandbox):
        print(f"http://{host}:{bound}/run_code, {sandbox.workers} executions at once, {sandbox.isolation}", flush=True)
        await stopped.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; every local setting of ``sandbox`` is an option. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fastir.tir.sandbox_server", description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on; 0 takes a free one")
    for name, field in SandboxConfig.model_fields.items():
        if isinstance(field.default, bool):
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=field.description)
        elif isinstance(field.default, int | float) and name != "retry_seconds":
            default = _DEFAULTS.get(name, field.default)
            text = f"{field.description} (default: {default})"
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(field.default), default=default, help=text)
    options = vars(parser.parse_args(arguments))
    host, port = options.pop("host"), options.pop("port")
    try:
        asyncio.run(_serve_until_stopped(SandboxConfig(**options), host, port))
    except (SandboxError, OSError, ValidationError) as error:
        print(f"cannot serve: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
