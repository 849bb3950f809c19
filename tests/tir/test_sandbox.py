# ruff: noqa: E501 -- scripts in strings
"""What the sandbox answers: statuses, output, answers, determinism, concurrency, restarts."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from pydantic import ValidationError

from fastir.tir import sandbox as module
from fastir.tir import sandbox_zygote
from fastir.tir.sandbox import ExecResult, Sandbox, SandboxConfig, SandboxError, check_isolation

# Asked of the kernel, not of the sandbox: a sandbox that does not start must fail here, not skip.
_NAMESPACES = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork", "true"]
_AVAILABLE = (
    bool(shutil.which("unshare")) and subprocess.run(_NAMESPACES, capture_output=True, check=False).returncode == 0
)
pytestmark = pytest.mark.skipif(not _AVAILABLE, reason="no user namespaces here")

_LIMITS = SandboxConfig(timeout_seconds=3, memory_mb=128, output_bytes=5000, tmp_mb=8, processes=16)

#: What stands in the sandbox's /tmp without anybody having written it: the way to a Python installed below /tmp.
_MOUNTED = sorted({Path(p).parts[2] for p in (sys.prefix, sys.base_prefix) if p.startswith("/tmp/")})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox(_LIMITS) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("code", "stdout", "answer"),
    [
        ("print(1 + 1)", "2\n", None),
        ("1 + 1", "", None),  # not a notebook
        ("", "", None),
        ("import sympy, numpy; print(sympy.factorint(60), numpy.arange(3))", "{2: 2, 3: 1, 5: 1} [0 1 2]\n", None),
        ("if __name__ == '__main__': print('main')", "main\n", None),
        ("from __future__ import annotations\ndef f(x: nonsense): pass\nprint('ok')", "ok\n", None),
        ("import sys; print('out'); sys.exit()", "out\n", None),
        ("print(repr(open(0).read()))", "''\n", None),
        ("print('é\\0\\ud800 🎲')", "é\0\\ud800 🎲\n", None),
        ("import os; os.write(1, b'\\xff\\xfea')", "\ufffd\ufffda", None),
        ("final_answer(42)", "", "42"),
        ("final_answer(1); final_answer('two')", "", "two"),
        ("final_answer(3, [4])", "", "(3, [4])"),
        ("final_answer('x' * 20000)", "", "x" * 16384),
        ("final_answer('\\ud800')", "", "\\ud800"),
        ("print('final_answer(7)'); print('\\\\boxed{7}')", "final_answer(7)\n\\boxed{7}\n", None),
        ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()", "late\n", None),
        ("import atexit; atexit.register(print, 'bye')", "bye\n", None),
        ("import os\nif os.fork(): os.wait(); print('parent')\nelse: print('child')", "child\nparent\n", None),
        ("import multiprocessing as m\ndef f(x): return x * x\nprint(m.Pool(2).map(f, [2, 3]))", "[4, 9]\n", None),
        ("import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True).stdout)",
         "b'5\\n'\n", None),
        ("import tempfile; f = tempfile.NamedTemporaryFile('w+'); f.write('a'); f.seek(0); print(f.read())", "a\n", None),
        ("import asyncio\nasync def f(): return 3\nprint(asyncio.run(f()))", "3\n", None),
    ],
)  # fmt: skip
async def test_well_behaved(sandbox: Sandbox, code: str, stdout: str, answer: str | None) -> None:
    result = await sandbox.run(code)
    assert (result.status, result.stdout, result.answer) == ("ok", stdout, answer), result
    assert result.error == ""
    assert 0 < result.seconds < 3


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("print('before')\n1/0", "ZeroDivisionError: division by zero"),
        ("print('before')\nraise ValueError('é\\n2')", "ValueError: é\n2"),
        ("print('before'); import sys; sys.exit('bad')", "SystemExit: bad"),
        ("print('before'); import sys; sys.exit(3)", "SystemExit: 3"),
        ("print('before')\ndef f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("print('before')\ninput()", "EOFError: EOF when reading a line"),
        (
            "print('before')\nclass E(Exception):\n  def __str__(s): raise SystemExit\nraise E",
            "E: <exception str() failed>",
        ),
        (
            "print('before')\nclass X:\n  def __str__(s): return 1/0\nfinal_answer(X())",
            "ZeroDivisionError: division by zero",
        ),
        ("print('before')\nfinal_answer()", "TypeError: final_answer() needs a value"),
        (
            "print('before')\nprint(2 ** 100000)",
            "ValueError: Exceeds the limit (4300 digits) for integer string conversion",
        ),
        ("print('before')\nraise KeyboardInterrupt", "KeyboardInterrupt"),
        ("print('before')\nimport fastir", "ModuleNotFoundError: No module named 'fastir'"),
    ],
)
async def test_errors(sandbox: Sandbox, code: str, error: str) -> None:
    result = await sandbox.run(code)
    assert result.status == "error", result
    assert result.error.startswith(error)
    assert result.stdout == "before\n"
    assert result.answer is None


@pytest.mark.asyncio(loop_scope="module")
async def test_traceback_shows_the_code_and_not_the_harness(sandbox: Sandbox) -> None:
    result = await sandbox.run("def f(x):\n    return 1 / x\nf(0)")
    assert result.traceback.startswith(
        'Traceback (most recent call last):\n  File "<code>", line 3, in <module>\n    f(0)\n'
    )
    assert "return 1 / x" in result.traceback
    assert "sandbox" not in result.traceback
    syntax = await sandbox.run("a = (1\nb = 2")
    assert syntax.status == "error"
    assert syntax.error.startswith("SyntaxError: ")
    assert "line 1" in syntax.traceback
    null = await sandbox.run("print(1)\0")
    assert null.status == "error"
    lone = await sandbox.run("print('\ud800')")
    assert lone.status == "error"


@pytest.mark.asyncio(loop_scope="module")
async def test_stderr_is_kept_apart_and_bounded(sandbox: Sandbox) -> None:
    result = await sandbox.run(
        "import sys; print('a'); print('b' * 9000, file=sys.stderr); sys.stderr.flush(); print('c')"
    )
    assert (result.status, result.stdout) == ("ok", "a\nc\n")
    assert result.stderr == "b" * 5000


@pytest.mark.asyncio(loop_scope="module")
async def test_output_before_a_timeout_and_cut_characters(sandbox: Sandbox) -> None:
    result = await sandbox.run("print('partial')\nwhile True: pass")
    assert (result.status, result.stdout) == ("timeout", "partial\n")
    assert 3 <= result.seconds < 4
    cut = await sandbox.run("print('é' * 5000)")  # 2 bytes each: the limit falls between two
    assert (cut.status, cut.stdout) == ("output", "é" * 2500)
    cut = await sandbox.run("print('a' + 'é' * 5000)")  # and here within one
    assert (cut.status, cut.stdout) == ("output", "a" + "é" * 2499)


@pytest.mark.asyncio(loop_scope="module")
async def test_executions_agree_and_do_not_share_state(sandbox: Sandbox) -> None:
    random = "import random, numpy as np; print(random.random(), np.random.rand(), np.random.default_rng().random(), hash('a'))"
    first = await sandbox.run(random)
    assert first.status == "ok"
    assert len(set(first.stdout.split())) == 4
    dirty = await sandbox.run(
        "import builtins, sys, os, numpy, random\n"
        "numpy.leak = builtins.leak = 1; builtins.print = None; random.seed(9); sys.path.clear()\n"
        "open('/tmp/leak', 'w').write('x'); os.mkdir('/tmp/d'); os.environ['LEAK'] = '1'; sys.modules['sympy'] = None\n"
        "final_answer('leak')"
    )
    assert (dirty.status, dirty.answer) == ("ok", "leak")
    clean = await sandbox.run(
        "import os, builtins, numpy, sympy\n"
        "print(sorted(os.listdir('/tmp')), dict(os.environ), hasattr(builtins, 'leak'), hasattr(numpy, 'leak'), os.getcwd())"
    )
    assert clean.stdout == f"{_MOUNTED} {{}} False False /tmp\n"
    assert clean.answer is None
    assert (await sandbox.run(random)).stdout == first.stdout
    async with Sandbox(_LIMITS) as other:
        assert (await other.run(random)).stdout == first.stdout


_LOADED = "import sys; print(sorted({'nu' + 'mpy', 'sym' + 'py', 'mpm' + 'ath'} & set(sys.modules)))"


@pytest.mark.asyncio(loop_scope="module")
async def test_preloaded_modules_are_there_for_code_that_mentions_them(sandbox: Sandbox) -> None:
    everything = "['mpmath', 'numpy', 'sympy']\n"
    assert (await sandbox.run(_LOADED)).stdout == "[]\n"
    for mention in ("import sympy", "from numpy import *", "import mpmath", "'numpy'", "# sympy"):
        assert (await sandbox.run(f"{_LOADED}\n{mention}")).stdout == everything
    fast = await sandbox.run(
        "import time; t = time.process_time(); import sympy; print(time.process_time() - t < 0.05)"
    )
    assert fast.stdout == "True\n"


@pytest.mark.asyncio(loop_scope="module")
async def test_modules_that_are_not_mentioned_can_be_imported(sandbox: Sandbox) -> None:
    result = await sandbox.run("import importlib; print(importlib.import_module('nu' + 'mpy').arange(3).sum())")
    assert (result.status, result.stdout) == ("ok", "3\n"), result
    standard = await sandbox.run(
        "import fractions, statistics, decimal, os; print(fractions.Fraction(6, 4), os.getpid())"
    )
    assert standard.stdout == "3/2 2\n"


@pytest.mark.asyncio(loop_scope="module")
async def test_both_interpreters_behave_alike(sandbox: Sandbox) -> None:
    code = (
        "import random, os, sys\nprint(random.random(), [hash(s) for s in 'abc'], os.getcwd(), sys.argv, dict(os.environ))\n"
        "print(open('/proc/self/cmdline').read(), sorted(os.listdir('/proc/self/fd')))\nfinal_answer(sys.path)"
    )
    bare, warm = await sandbox.run(code), await sandbox.run(code + "  # numpy")
    assert bare.status == "ok", bare
    assert (bare.stdout, bare.answer) == (warm.stdout, warm.answer)
    for mention in ("", "numpy"):
        for ending, status in [("bytearray(200 << 20)", "memory"), ("import os; os.abort()", "crashed")]:
            assert (await sandbox.run(f"'{mention}'\n{ending}")).status == status


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("ending", ["", "1/0"])
async def test_every_execution_has_its_own_namespaces(sandbox: Sandbox, ending: str) -> None:
    async def namespaces(mention: str) -> dict[str, str]:
        names = "('pid', 'mnt', 'net', 'ipc', 'uts', 'cgroup', 'user')"
        code = f"import os\nprint({{n: os.readlink('/proc/self/ns/' + n) for n in {names}}}, flush=True)  # {mention}\n"
        # Alive together, since the kernel gives a number that is free again to the next.
        result = await sandbox.run(code + "import time; time.sleep(0.4)\n" + ending)
        return dict(ast.literal_eval(result.stdout))

    ours = {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")}
    seen = await asyncio.gather(namespaces(""), namespaces("numpy"))
    for name in seen[0]:
        assert len({seen[0][name], seen[1][name], ours[name]}) == 3, name
    state = "import os; print(os.path.exists('/tmp/x')); open('/tmp/x', 'w'); print(os.getpid(), os.listdir('/proc').count('1'))"
    assert [(await sandbox.run(f"{state}\n{ending}")).stdout for _ in range(2)] == ["False\n2 1\n"] * 2


@pytest.mark.asyncio(loop_scope="module")
async def test_two_hundred_at_once(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(sandbox.run(f"print({i}); final_answer({i} * 2)") for i in range(200)))
    assert [(r.status, r.stdout, r.answer) for r in results] == [("ok", f"{i}\n", str(2 * i)) for i in range(200)]


async def test_concurrency_is_bounded_and_real() -> None:
    async with Sandbox(SandboxConfig(workers=3, preload=())) as sandbox:
        begin = time.monotonic()
        await asyncio.gather(*(sandbox.run("import time; time.sleep(0.4)") for _ in range(6)))
        assert 0.8 <= time.monotonic() - begin < 2.2  # two rounds of three, not six in a row


async def test_cancellation_kills_the_execution() -> None:
    async with Sandbox(SandboxConfig(workers=1, preload=(), timeout_seconds=60)) as sandbox:
        task = asyncio.create_task(sandbox.run("import time; time.sleep(50)"))
        await asyncio.sleep(0.4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await asyncio.wait_for(sandbox.run("print(1)"), 5)).stdout == "1\n"
        assert sandbox.stats.cancelled == 1
        await _until(lambda: len(_processes(sandbox)) <= 5)  # launcher, keeper, zygote, idle supervisors


async def test_a_dead_zygote_is_replaced() -> None:
    async with Sandbox(SandboxConfig(workers=2, preload=())) as sandbox:
        _kill_all(sandbox)
        results = await asyncio.gather(*(sandbox.run(f"print({i})") for i in range(4)))
        assert [r.stdout for r in results] == ["0\n", "1\n", "2\n", "3\n"]
        assert sandbox.stats.restarts == 1
        assert sandbox.stats.by_status == {"ok": 4}
        running = asyncio.create_task(sandbox.run("import time; time.sleep(0.6); print('again')"))
        await asyncio.sleep(0.3)
        _kill_all(sandbox)
        assert (await running).stdout == "again\n"
        assert sandbox.stats.restarts == 2


async def test_a_lost_supervisor_takes_its_execution_with_it() -> None:
    async with Sandbox(SandboxConfig(workers=1, preload=(), timeout_seconds=2)) as sandbox:
        busy = asyncio.create_task(sandbox.run("import time; time.sleep(60)"))
        await asyncio.sleep(0.3)
        launcher = _processes(sandbox)[0]
        keeper = _children(launcher)[0]
        for pid in _children(keeper)[1:]:  # all but the zygote
            os.kill(pid, signal.SIGKILL)
        assert (await busy).status in ("timeout", "crashed")
        await _until(lambda: len(_processes(sandbox)) <= 3)  # launcher, keeper, zygote
        assert (await sandbox.run("print(1)")).stdout == "1\n"
        assert sandbox.stats.restarts == 0


async def test_every_waiting_run_survives_a_restart() -> None:
    async with Sandbox(SandboxConfig(workers=8, preload=())) as sandbox:
        runs = [asyncio.create_task(sandbox.run(f"import time; time.sleep(0.1); print({i})")) for i in range(24)]
        await asyncio.sleep(0.15)
        _kill_all(sandbox)
        assert [(await run).stdout for run in runs] == [f"{i}\n" for i in range(24)]
        assert sandbox.stats.restarts == 1


async def test_a_failed_restart_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Sandbox(SandboxConfig(workers=1, preload=())) as sandbox:
        _kill_all(sandbox)
        with monkeypatch.context() as patch:
            patch.setattr(module.sys, "executable", "/no/such/python")
            with pytest.raises(SandboxError, match="cannot start"):
                await sandbox.run("print(1)")
        assert (await sandbox.run("print(1)")).stdout == "1\n"


_ORPHAN = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
from fastir.tir.sandbox import Sandbox, SandboxConfig
async def main():
    async with Sandbox(SandboxConfig(preload=(), timeout_seconds=60)) as sandbox:
        print(sandbox._zygote.process.pid, flush=True)
        asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), 9)
        await sandbox.run("import os; os.execv('/bin/sleep', ['sleep', '{marker}'])")
asyncio.run(main())
"""


async def test_everything_ends_when_the_trainer_is_killed() -> None:
    marker = f"{50 + time.time() % 1:.9f}"
    script = _ORPHAN.format(root=str(Path(__file__).parents[2]), marker=marker)
    trainer = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
    session, _ = await trainer.communicate()
    assert trainer.returncode == -signal.SIGKILL
    await _until(
        lambda: not any(marker.encode() in _command_line(path) for path in Path("/proc").glob("[0-9]*/cmdline"))
    )
    await _until(lambda: not _living_in_session(int(session)))


def _living_in_session(session: int) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(path.parent.name)
    return found


def _command_line(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def test_a_stopped_zygote_is_no_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_zygote, "_FORK_SECONDS", 0.5)
    monkeypatch.setattr(sandbox_zygote, "_PING_SECONDS", 0.5)
    async with Sandbox(SandboxConfig(workers=1, preload=())) as sandbox:
        for pid in _processes(sandbox)[1:]:
            os.kill(pid, signal.SIGSTOP)
        assert (await sandbox.run("print(1)")).stdout == "1\n"
        assert sandbox.stats.restarts == 1


async def test_close_leaves_nothing() -> None:
    before = set(_descendants(os.getpid()))
    descriptors = len(os.listdir("/proc/self/fd"))
    sandbox = Sandbox(SandboxConfig(preload=()))
    await sandbox.start()
    running = asyncio.create_task(sandbox.run("import time; time.sleep(50)"))
    await asyncio.sleep(0.3)
    assert len(_descendants(os.getpid())) > len(before)
    await sandbox.close()
    with pytest.raises(SandboxError):
        await running
    with pytest.raises(SandboxError, match="not running"):
        await sandbox.run("print(1)")
    assert set(_descendants(os.getpid())) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


async def test_a_missing_preload_is_named() -> None:
    before = set(_descendants(os.getpid()))
    with pytest.raises(SandboxError, match="no_such_module"):
        await Sandbox(SandboxConfig(preload=("no_such_module",))).start()
    assert set(_descendants(os.getpid())) == before


async def test_unavailable_isolation_is_refused_or_marked_unsafe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "platform", "plan9")
    with pytest.raises(SandboxError, match="user namespaces"):
        await Sandbox(SandboxConfig(preload=())).start()
    config = SandboxConfig(preload=(), allow_unsafe=True, timeout_seconds=1, memory_mb=64)
    async with Sandbox(config) as sandbox:
        assert sandbox.isolation.startswith("UNSAFE")
        scratch = Path((await sandbox.run("import os; print(os.getcwd())")).stdout.strip()).parent
        assert (await sandbox.run("final_answer(1 + 1)")).answer == "2"
        assert (await sandbox.run("open('f', 'w'); 1/0")).error == "ZeroDivisionError: division by zero"
        assert (await sandbox.run("while True: pass")).status == "timeout"
        assert (await sandbox.run("x = bytearray(10 ** 9)")).status == "memory"
        assert (await sandbox.run("import os; os._exit(0)")).status == "crashed"
        assert os.listdir(scratch) == []
    assert not scratch.exists()


async def test_module_level_run() -> None:
    assert await module.run("print(3)") != ExecResult("ok")
    results = await asyncio.gather(*(module.run("final_answer(5)", SandboxConfig(preload=())) for _ in range(5)))
    assert {result.answer for result in results} == {"5"}
    module._kill_defaults()


def test_check_isolation() -> None:
    isolated, what = check_isolation()
    assert isolated
    assert "user+pid+mount+net" in what


def test_config_rejects_nonsense() -> None:
    with pytest.raises(ValidationError):
        SandboxConfig(timeout_seconds=0)
    with pytest.raises(ValidationError):
        SandboxConfig(timeout=3)  # type: ignore[call-arg]


def _descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(name)] = int(fields[1])
    found, frontier = [], [root]
    while frontier:
        frontier = [pid for pid, parent in parents.items() if parent in frontier]
        found += frontier
    return found


def _children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def _processes(sandbox: Sandbox) -> list[int]:
    assert sandbox._zygote is not None
    launcher = sandbox._zygote.process.pid
    return [launcher, *_descendants(launcher)]


def _kill_all(sandbox: Sandbox) -> None:
    for pid in _processes(sandbox):
        with contextlib.suppress(ProcessLookupError):  # the first take the others with them
            os.kill(pid, signal.SIGKILL)


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(60):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("not within three seconds")
