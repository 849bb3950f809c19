# ruff: noqa: E501 -- scripts in strings
"""The remote back end: against the project's own server, and against one that runs plain ``python`` as SandboxFusion does."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from fastir.config import ConfigError, load_config
from fastir.tir import sandbox_server
from fastir.tir.sandbox import ExecResult, Sandbox, SandboxBusyError, SandboxConfig, SandboxError, open_sandbox
from fastir.tir.sandbox_http import HttpError, message, read_message
from fastir.tir.sandbox_remote import RemoteSandbox

_NAMESPACES = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork", "true"]
_AVAILABLE = (
    bool(shutil.which("unshare")) and subprocess.run(_NAMESPACES, capture_output=True, check=False).returncode == 0
)
pytestmark = [
    pytest.mark.skipif(not _AVAILABLE, reason="no user namespaces here"),
    pytest.mark.asyncio(loop_scope="module"),
]

_LIMITS = SandboxConfig(timeout_seconds=2, cpu_seconds=1, memory_mb=128, output_bytes=5000, workers=2)
_SERVER = SandboxConfig(timeout_seconds=10, cpu_seconds=10, memory_mb=512, output_bytes=1 << 20, workers=2)


def _client(port: int, **changes: object) -> SandboxConfig:
    return _LIMITS.model_copy(update={"backend": "remote", "url": f"http://127.0.0.1:{port}", **changes})


async def _plain_run_code(asked: dict[str, object]) -> dict[str, object]:
    """What SandboxFusion does with language "python": write the code to a file, run it through bash, keep the output."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tmp.py"
        file.write_text(str(asked["code"]))
        process = await asyncio.create_subprocess_shell(
            f"{sys.executable} {file}", cwd=folder, executable="/bin/bash", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        output: list[bytearray] = [bytearray(), bytearray()]

        async def drain(stream: asyncio.StreamReader | None, kept: bytearray) -> None:
            assert stream
            while piece := await stream.read(65536):
                kept += piece[: (1 << 20) - len(kept)]

        jobs = asyncio.gather(drain(process.stdout, output[0]), drain(process.stderr, output[1]), process.wait())
        began, late = time.time(), False
        try:
            await asyncio.wait_for(asyncio.shield(jobs), float(str(asked["run_timeout"])))
        except TimeoutError:
            late = True
            os.killpg(process.pid, signal.SIGKILL)
            await jobs
        code = None if late else process.returncode
        return {
            "status": "Success" if code == 0 else "Failed",
            "message": "",
            "run_result": {
                "status": "TimeLimitExceeded" if late else "Finished",
                "execution_time": time.time() - began,
                "return_code": code,
                "stdout": output[0].decode("utf-8", "replace"),
                "stderr": output[1].decode("utf-8", "replace"),
            },
        }


@asynccontextmanager
async def _service(answer: Callable[[dict[str, object]], Awaitable[tuple[int, object]]]) -> AsyncIterator[int]:
    """A server whose replies to ``POST /run_code`` are ``answer``'s; gives its port."""

    open_connections: set[asyncio.StreamWriter] = set()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_connections.add(writer)
        try:
            while True:
                words, _, body = await read_message(reader)
                assert words[:2] == ["POST", "/run_code"]
                status, reply = await answer(json.loads(body))
                if status == 0:  # hangs up
                    return
                writer.write(message(f"HTTP/1.1 {status} X", json.dumps(reply).encode()))
                await writer.drain()
        except (EOFError, OSError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(converse, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in open_connections:
            writer.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local() -> AsyncIterator[Sandbox]:
    async with Sandbox(_LIMITS) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ours() -> AsyncIterator[RemoteSandbox]:
    async with sandbox_server.serve(_SERVER, "127.0.0.1", 0) as (port, _), RemoteSandbox(_client(port)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain() -> AsyncIterator[RemoteSandbox]:
    async def answer(asked: dict[str, object]) -> tuple[int, object]:
        return 200, await _plain_run_code(asked)

    async with _service(answer) as port, RemoteSandbox(_client(port)) as running:
        yield running


PROGRAMS = [
    "print(1 + 1)",
    "1 + 1",
    "",
    "import sympy; print(sympy.factorint(600851475143))",
    "if __name__ == '__main__': print('main')",
    "from __future__ import annotations\ndef f(x: nonsense): pass\nprint('ok')",
    "import sys; print('out'); sys.exit()",
    "import sys; print('out'); sys.exit('bad')",
    "import sys; sys.exit(3)",
    "print(repr(open(0).read()))",
    "print('é\\0\\ud800 🎲')",
    "print('\ud800')",
    "import os; os.write(1, b'\\xff\\xfea')",
    "final_answer(42)",
    "final_answer(1); final_answer('two'); 1/0",
    "final_answer(3, [4])",
    "final_answer('é' * 20000)",
    "final_answer('\\ud800')",
    "final_answer()",
    "print('final_answer(7)')",
    "import random; print(random.random())",
    "import sys; print('a'); print('b', file=sys.stderr); print('c', end='', file=sys.stderr)",
    "import sys; print('b' * 9000, file=sys.stderr); final_answer(9)",
    "print('before')\n1/0",
    "def f(x):\n    return 1 / x\nf(0)",
    "raise ValueError('é\\n2')",
    "a = (1\nb = 2",
    "print(1)\0",
    "print('before')\ndef f(): f()\nf()",
    "input()",
    "class E(Exception):\n  def __str__(s): raise SystemExit\nraise E",
    "print(2 ** 100000)",
    "raise KeyboardInterrupt",
    "import builtins\nfor name in list(vars(builtins)): vars(builtins)[name] = None",
    "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()",
    "import atexit; atexit.register(print, 'bye')",
    "import os\nif os.fork(): os.wait(); print('parent')\nelse: print('child')",
    "import multiprocessing as m\ndef f(x): return x * x\nprint(m.Pool(2).map(f, [2, 3]))",
    "print('partial')\nimport time\ntime.sleep(60)",
    "final_answer(5)\nimport time\ntime.sleep(60)",
    "print('partial')\nwhile True: pass",
    "x = bytearray(10 ** 10)",
    "print('a')\nx = []\nwhile True: x.append(bytearray(10 ** 6))",
    "print('é' * 5000)",
    "while True: print('x' * 1000)",
    "import ctypes; ctypes.string_at(0)",
    "import os; os.abort()",
    "import os; os._exit(0)",
    "import os; os._exit(3)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
]


def _visible(result: ExecResult) -> ExecResult:
    """All of a result that does not differ from run to run."""
    trace = "" if "in final_answer" in result.traceback else result.traceback  # it names the harness's file
    return replace(result, seconds=0.0, cpu_seconds=0.0, peak_bytes=0, wait_seconds=0.0, traceback=trace)


@pytest.mark.parametrize("code", PROGRAMS)
async def test_results_equal_the_local_ones(local: Sandbox, ours: RemoteSandbox, plain: RemoteSandbox, code: str) -> None:
    wanted = _visible(await local.run(code))
    if wanted.status == "output":  # ended at the limit here, run to its end there
        wanted = replace(wanted, exit_code=0)
    for remote in (ours, plain):
        result = _visible(await remote.run(code))
        if result.status == "output":
            result = replace(result, exit_code=0)
        assert result == wanted, remote.config.url


async def test_what_an_execution_took_is_told(ours: RemoteSandbox, plain: RemoteSandbox) -> None:
    for remote in (ours, plain):
        result = await remote.run("import time\nx = bytearray(b'1') * (50 << 20)\nwhile time.process_time() < 0.3: pass")
        assert result.status == "ok", result
        assert 0.1 < result.cpu_seconds < 1
        assert 40 << 20 < result.peak_bytes < 100 << 20
        assert 0.1 < result.seconds < 2


async def test_a_reply_that_the_code_spoiled_is_about_itself_only(plain: RemoteSandbox) -> None:
    forge = (
        "import sys, os\nf = sys._getframe()\nwhile 'mark' not in f.f_locals: f = f.f_back\nmark = f.f_locals['mark']\n"
        "os.write(2, f'\\n{mark}E nonsense\\n\\n{mark}A {{\\n\\n{mark}E [1]\\n'.encode()); os._exit(0)"
    )
    result = await plain.run(forge)
    assert (result.status, result.answer) == ("crashed", None)


async def test_sixty_at_once_through_the_server(ours: RemoteSandbox) -> None:
    results = await asyncio.gather(*(ours.run(f"print({i}); final_answer({i} * 2)") for i in range(60)))
    assert [(r.status, r.stdout, r.answer) for r in results] == [("ok", f"{i}\n", str(2 * i)) for i in range(60)]
    assert ours.stats.waiting_max > 10
    assert max(r.wait_seconds for r in results) > 0
    assert len(ours._idle) <= ours.workers  # connections are used again


# ------------------------------------------------------------------------------------------------------------- failures


async def test_passing_failures_are_retried_and_counted() -> None:
    troubles = [(500, "x"), (429, "x"), (0, ""), (200, "no object"), (200, {"status": "SandboxError", "message": "no slot"})]
    asked: list[object] = []

    async def answer(request: dict[str, object]) -> tuple[int, object]:
        asked.append(request)
        if len(asked) > 1 and troubles:
            return troubles.pop(0)
        return 200, await _plain_run_code(request)

    async with _service(answer) as port, RemoteSandbox(_client(port)) as remote:
        assert (await remote.run("print(1)")).stdout == "1\n"
        assert remote.stats.retries == 5
        assert remote.stats.by_status == {"ok": 1}
        assert remote.stats.failed == 0


async def test_a_dead_service_costs_each_execution_and_then_no_more_time() -> None:
    async def answer(request: dict[str, object]) -> tuple[int, object]:
        return 200, await _plain_run_code(request)

    async with _service(answer) as port:
        remote = RemoteSandbox(_client(port, retry_seconds=0.5))
        await remote.start()
    began = time.monotonic()
    results = await asyncio.gather(*(remote.run("print(1)") for _ in range(20)), return_exceptions=True)
    assert all(isinstance(result, SandboxError) for result in results), results
    assert f"sandbox.url = http://127.0.0.1:{port} does not run code" in str(results[0])
    assert remote.stats.failed == 20
    assert time.monotonic() - began < 3  # not 20 times half a second, two at a time
    await remote.close()


async def test_a_service_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastir.tir.sandbox_remote._CALL_SECONDS", 0.2)

    async def answer(_: dict[str, object]) -> tuple[int, object]:
        await asyncio.sleep(60)
        raise AssertionError

    async with _service(answer) as port:
        remote = RemoteSandbox(_client(port, retry_seconds=0.1, timeout_seconds=0.2))
        with pytest.raises(SandboxError, match="no answer in time"):
            await asyncio.wait_for(remote.start(), 5)


async def test_a_refused_request_is_not_repeated() -> None:
    asked: list[object] = []

    async def answer(request: dict[str, object]) -> tuple[int, object]:
        asked.append(request)
        return 422, {"detail": "no python here"}

    async with _service(answer) as port:
        with pytest.raises(SandboxError, match=r"422.*no python here"):
            await RemoteSandbox(_client(port)).start()
    assert len(asked) == 1


async def test_a_full_queue_refuses(local: Sandbox) -> None:
    config = _LIMITS.model_copy(update={"workers": 1, "max_waiting": 2, "preload": ()})
    async with sandbox_server.serve(config, "127.0.0.1", 0) as (port, sandbox):
        runs = [asyncio.create_task(sandbox.run("import time; time.sleep(0.5)")) for _ in range(4)]
        await asyncio.sleep(0.2)
        with pytest.raises(SandboxBusyError, match=r"sandbox\.max_waiting"):
            await runs[3]
        async with RemoteSandbox(_client(port, workers=1)) as remote:  # answered 429, comes again
            assert (await remote.run("print(1)")).stdout == "1\n"
        assert [(await run).status for run in runs[:3]] == ["ok"] * 3
        assert sandbox.stats.refused > 1


async def test_a_caller_that_leaves_ends_its_execution() -> None:
    config = _LIMITS.model_copy(update={"workers": 1, "timeout_seconds": 30, "cpu_seconds": 30, "preload": ()})
    async with sandbox_server.serve(config, "127.0.0.1", 0) as (port, sandbox):
        async with RemoteSandbox(_client(port, timeout_seconds=30)) as remote:
            task = asyncio.create_task(remote.run("import time; time.sleep(25)"))
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await asyncio.wait_for(remote.run("print(1)"), 5)).stdout == "1\n"
        assert sandbox.stats.cancelled == 1


@pytest.mark.parametrize(
    ("request_bytes", "reply"),
    [
        (b"nonsense\r\n\r\n", b"HTTP/1.1 400"),
        (b"POST /run_code HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"HTTP/1.1 400"),
        (b"POST /run_code HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 100000 + b"\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET /else HTTP/1.1\r\n\r\n", b"HTTP/1.1 404"),
        (b"GET /v1/ping HTTP/1.1\r\n\r\n", b"HTTP/1.1 200"),
        (message("POST /run_code HTTP/1.1", b"{}"), b"HTTP/1.1 422"),
        (message("POST /run_code HTTP/1.1", b'{"code": "1", "language": "cpp"}'), b"HTTP/1.1 422"),
        (message("POST /run_code HTTP/1.1", b'{"code": "print(6*7)", "language": "python"}'), b"HTTP/1.1 200"),
        (b"POST /run_code HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"cod\r\n1f\r\ne\": \"print(6*7)\", \"language\": \"\r\n8\r\npython\"}\r\n0\r\n\r\n", b"HTTP/1.1 200"),
    ],
)  # fmt: skip
async def test_the_server_answers_whatever_comes(ours: RemoteSandbox, request_bytes: bytes, reply: bytes) -> None:
    port = int(ours.config.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    writer.close()
    assert head.startswith(reply), head


async def test_a_response_without_length_ends_with_its_connection() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"HTTP/1.0 200 OK\r\n\r\n{}")
    reader.feed_eof()
    words, headers, body = await read_message(reader)
    assert (words[1], headers["connection"], body) == ("200", "close", b"{}")
    cut = asyncio.StreamReader()
    cut.feed_data(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{}")
    cut.feed_eof()
    with pytest.raises(EOFError):
        await read_message(cut)
    broken = asyncio.StreamReader()
    broken.feed_data(b"HTTP/1.1 200 OK\r\nContent-Length\r\n\r\n")
    with pytest.raises(HttpError):
        await read_message(broken)


async def test_the_command_serves_until_it_is_told_to_stop() -> None:
    command = [sys.executable, "-m", "fastir.tir.sandbox_server", "--port", "0", "--workers", "1", "--memory-mb", "256"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert process.stdout
    line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
    assert "1 executions at once, user+pid+mount+net" in line
    url = line.partition("/run_code")[0]
    async with open_sandbox(_LIMITS.model_copy(update={"backend": "remote", "url": url})) as remote:
        assert (await remote.run("import sympy; final_answer(sympy.factorint(12))")).answer == "{2: 2, 3: 1}"
        assert url in remote.isolation
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 20) == 0


async def test_configuration() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.url"):
        load_config("quickstart", ["sandbox.backend=remote"])
    with pytest.raises(ConfigError, match=r"sandbox\.url"):
        load_config("quickstart", ["sandbox.backend=remote", "sandbox.url=sandbox:8080"])
    config = load_config("quickstart", ["sandbox.backend=remote", "sandbox.url=https://box/api/"])
    assert isinstance(open_sandbox(config.sandbox), RemoteSandbox)
