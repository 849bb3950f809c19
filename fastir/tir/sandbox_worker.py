"""The zygotes, and the workers it forks: a worker applies the limits to itself, executes the code, records the outcome.

A worker holds three descriptors: /dev/null and the write ends of two pipes. Its outcome and ``final_answer`` travel in
anonymous shared memory, so nothing that is printed, or written to or closed as a descriptor, can be taken for them.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib
import io
import linecache
import math
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

from fastir.tir.sandbox_record import FINISHED, OUT_OF_MEMORY, RAISED, SETUP, Record, Settings, fork_into

if sys.platform == "linux":
    from fastir.tir import sandbox_linux as linux

_CODE_NAME = "<code>"
# Of the standard library: what scripts like to import, and the bare zygote therefore has.
_COMMON = (
    *(
        "bisect",
        "cmath",
        "collections",
        "copy",
        "dataclasses",
        "datetime",
        "decimal",
        "fractions",
        "functools",
        "heapq",
    ),
    *("itertools", "json", "math", "operator", "random", "re", "statistics", "string", "textwrap", "time", "typing"),
)
_SPARE_BYTES = 32 << 20  # above the memory limit, to write down the MemoryError
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _make_final_answer(record: Record) -> Callable[..., None]:
    to_text, store, encode = str, record.set_answer, _encode

    def final_answer(*values: object) -> None:
        """Give the final answer. With several values it is their tuple; the last call counts."""
        if not values:
            raise TypeError("final_answer() needs a value")
        store(encode(to_text(values[0] if len(values) == 1 else values)))

    final_answer.__module__ = "builtins"
    return final_answer


def _describe(error: BaseException | None) -> tuple[int, bytes, bytes]:
    """State, last traceback line and whole traceback, the latter without this module's own frame."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return FINISHED, b"", b""
    state = RAISED
    try:
        if isinstance(error, MemoryError):
            state = OUT_OF_MEMORY
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        lines = traceback.format_exception(type(error), error, trace, limit=-50)
        last = traceback.format_exception_only(type(error), error)[-1]
        return state, _encode(last.strip()), _encode("".join(lines))
    except BaseException:  # the code may have broken the traceback module, or memory is gone
        return state, _encode(type.__dict__["__name__"].__get__(type(error))), b""


def _run_code(code: bytes, record: Record) -> NoReturn:
    """Execute ``code`` as ``__main__``, write the outcome to ``record``, end the process.

    The code may have replaced anything, builtins included. So whatever is needed afterwards is at hand in local
    variables, and what looks names up runs after the builtins have been put back.
    """
    pristine = dict(builtins.__dict__)
    clear, update, exit_now, getpid, exc_info = dict.clear, dict.update, os._exit, os.getpid, sys.exc_info
    out, err, join_threads, run_exit_functions = (
        sys.stdout,
        sys.stderr,
        vars(threading)["_shutdown"],
        vars(atexit)["_run_exitfuncs"],
    )
    describe, finish, worker = _describe, record.finish, getpid()
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    builtins.__dict__["final_answer"] = _make_final_answer(record)
    builtins_dict, state, error_line, trace = builtins.__dict__, FINISHED, b"", b""
    try:
        text = code.decode("utf-8", "surrogatepass")
        linecache.cache[_CODE_NAME] = (len(text), None, text.splitlines(keepends=True), _CODE_NAME)
        exec(compile(text, _CODE_NAME, "exec", dont_inherit=True), module.__dict__)
    except:  # noqa: E722 -- naming BaseException would look it up
        error = exc_info()[1]
        clear(builtins_dict)
        update(builtins_dict, pristine)
        state, error_line, trace = describe(error)
    clear(builtins_dict)
    update(builtins_dict, pristine)
    for last_rite in (join_threads, run_exit_functions, out.flush, err.flush):
        try:
            last_rite()
        except BaseException:  # a closed stdout, a raising exit function: the outcome is known already
            continue
    if getpid() == worker:  # a forked child that runs to the end is not the script
        finish(state, error_line, trace)
    exit_now(0)


def _line_writer(fd: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)


def _open_standard_streams() -> None:
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    # Line-buffered, so that what was printed before a time-out is not lost.
    sys.stdout = _line_writer(1)
    sys.stderr = _line_writer(2)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _limit(name: str, soft: int, hard: int | None = None) -> None:
    kind = getattr(resource, name, None)
    if kind is None:
        return
    ceiling = resource.getrlimit(kind)[1]
    wanted = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:
        wanted = min(wanted, ceiling)
    resource.setrlimit(kind, (min(soft, wanted), wanted))


def _confine(settings: Settings, base_bytes: int, seccomp: bytes | None) -> None:
    """Apply every limit to this process, the one about to run the code."""
    if settings.isolate:
        linux.enter_private_user_namespace(1000, 1000)
    if sys.platform == "linux":
        if os.path.exists("/proc/self/oom_score_adj"):  # if the machine runs out of memory, this goes first
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
        address_space = base_bytes + settings.memory_bytes
        _limit("RLIMIT_AS", address_space, address_space + _SPARE_BYTES)
    cpu = math.ceil(settings.cpu_seconds)
    _limit("RLIMIT_CPU", cpu, cpu + 1)
    _limit("RLIMIT_NPROC", settings.processes)
    _limit("RLIMIT_FSIZE", settings.tmp_bytes)
    _limit("RLIMIT_NOFILE", 256)
    _limit("RLIMIT_CORE", 0)
    _limit("RLIMIT_STACK", 8 << 20)
    _limit("RLIMIT_MSGQUEUE", 0)
    _limit("RLIMIT_MEMLOCK", 0)
    _limit("RLIMIT_SIGPENDING", 1024)
    if sys.platform == "linux":
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if settings.isolate:
        linux.set_capabilities(effective=False)
        if seccomp is not None:
            linux.install_seccomp(seccomp)


def _become_worker(settings: Settings, has_proc: bool, fds: list[int], seccomp: bytes | None) -> NoReturn:
    """Turn a fresh fork of a zygote into a worker: namespaces, descriptors, limits, streams, seed; then run the code.

    ``fds`` are stdout, stderr, the socket to report the setup on, the pipe for the wait status (the zygote's affair),
    the record, and with isolation the pid namespace. All but the first two are closed before the code runs.
    """
    out, err, report = (fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds[:3])  # clear of those that are set below
    setup = socket.socket(fileno=report)
    try:
        record = Record(fds[4])
        if settings.isolate:
            linux.unshare(linux.PRIVATE_NAMESPACES)
            linux.mount_private_proc(has_proc=has_proc)
            linux.mount_private_tmp(settings.tmp_bytes)
        os.chdir(record.directory() or "/tmp")
        os.setsid()
        null = os.open("/dev/null", os.O_RDONLY)
        for source, target in ((out, 1), (err, 2), (null, 0)):
            os.dup2(source, target)
        os.closerange(3, report)
        os.closerange(report + 1, 1 << 20)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        virtual, resident = _own_memory()
        _confine(settings, virtual, seccomp)
        _open_standard_streams()
        random.seed(0)  # forking has reseeded it from the system
        code = record.code()
        look = [os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)] if settings.isolate and has_proc else []
        socket.send_fds(setup, [b"+" + SETUP.pack(os.getpid(), virtual, resident)], look)
    except BaseException as error:
        setup.sendall(f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    setup.close()
    for fd in look:
        os.close(fd)
    _run_code(code, record)


def _own_memory() -> tuple[int, int]:
    """Virtual and resident bytes of this process: what the code starts with. Zeros where there is no /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            virtual, resident = file.read().split()[:2]
    except OSError:
        return 0, 0
    return int(virtual) * _PAGE_BYTES, int(resident) * _PAGE_BYTES


# ------------------------------------------------------------------------------------------------------------- zygote


def _preload(names: list[str]) -> None:
    """Import what the code will want and touch what it loads lazily, so that executions inherit it."""
    os.environ.update(_ONE_THREAD)
    for name in (*_COMMON, *names):
        importlib.import_module(name)
    if "numpy" in names:
        numpy: Any = sys.modules["numpy"]
        numpy.linalg.solve(numpy.eye(2), numpy.ones(2))
        numpy.random.seed(0)
        # Where default_rng() without a seed takes its entropy from: the same numbers in every execution.
        importlib.import_module("numpy.random.bit_generator").__dict__["randbits"] = random.Random(0).getrandbits
    if "sympy" in names:
        sympy: Any = sys.modules["sympy"]
        x = sympy.Symbol("x")
        sympy.factor(x**2 - 1)
        sympy.solve(x**2 - 2, x)
        sympy.integrate(x * sympy.sin(x), x)
        sympy.factorint(600851475143)
        str(sympy.simplify(sympy.sqrt(8) + x))
        sympy.core.random.seed(0)
    os.environ.clear()
    for variable, value in _ONE_THREAD.items():
        os.putenv(variable, value)  # not in os.environ, but seen by libraries that the code loads


def serve(requests: socket.socket, settings: Settings, has_proc: bool) -> None:
    """A zygote: import, say so, then fork a worker for each supervisor that asks and tell it how that ended.

    The first message is "ready" and the names of the modules outside the standard library that are loaded.
    """
    try:
        if sys.platform == "linux":
            linux.limit_malloc_arenas()
        _preload(settings.preload)
    except BaseException as error:
        requests.sendall(f"{type(error).__name__}: {error}".encode())
        return
    sys.argv[:] = ["main.py"]
    sys.orig_argv[:] = ["python"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "fastir"]:
        del sys.modules[name]
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)
    seccomp = linux.seccomp_program() if settings.isolate else None
    own = os.pidfd_open(os.getpid()) if settings.isolate else -1
    status_pipes: dict[int, int] = {}  # pid of a worker -> where its supervisor learns the wait status
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, every inherited page
    if settings.isolate and os.path.exists("/proc/self/maps"):
        linux.collapse_to_huge_pages()
    loaded = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
    names = sorted(name for name in loaded if not name.startswith("_") or name in settings.preload)
    requests.sendall(" ".join(("ready", *names)).encode())
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if wake_read in ready:
            os.read(wake_read, 4096)
            while status_pipes:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                pipe = status_pipes.pop(pid)
                with contextlib.suppress(OSError):  # a supervisor that was killed does not listen
                    os.write(pipe, status.to_bytes(4, "little"))
                os.close(pipe)
        if requests.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(requests, 1, 6)
        if not message:
            return
        try:
            pid = fork_into(fds[5] if settings.isolate else -1, own)
        except OSError as error:
            os.write(fds[2], f"cannot fork a worker: {error}".encode())
            os.close(fds[3])
        else:
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _become_worker(settings, has_proc, fds, seccomp)
            status_pipes[pid] = fds[3]
        for fd in (*fds[:3], *fds[4:]):
            os.close(fd)
