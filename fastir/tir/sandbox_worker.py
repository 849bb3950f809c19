"""The zygotes, and the workers it forks: a worker applies the limits to itself, executes the code, records the outcome.

A worker holds three descriptors: /dev/null and the write ends of two pipes. Its outcome and ``final_answer`` travel in
anonymous shared memory, so nothing that is printed, or written to or closed as a descriptor, can be taken for them.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
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
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

from fastir.tir.sandbox_record import ENDED, FINISHED, OUT_OF_MEMORY, RAISED, SETUP, Record, Settings, fork_into

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
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
_UNIX, _RIGHTS = (int(socket.AF_UNIX), int(socket.SOCK_STREAM), 0), (int(socket.SOL_SOCKET), int(socket.SCM_RIGHTS))
_run_exit_functions = vars(atexit)["_run_exitfuncs"]


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


def _join_threads() -> None:
    """What the interpreter does at its end; nothing if there have been no threads."""
    state = vars(threading)
    if state.get("_shutdown_locks", True) or state.get("_threading_atexits", True):  # an unknown version: always
        state["_shutdown"]()


class _Stage:
    """A worker as far as the zygote can prepare it, before it forks one.

    A fork shares its memory with the zygote until either writes to it, and Python writes to every object that it looks
    at: most of what an execution costs is the copying of pages. So a worker should look at little.
    """

    def __init__(self, settings: Settings, has_proc: bool) -> None:
        self.settings, self.has_proc = settings, has_proc
        self.record = Record()
        self.signal: Any = sys.modules["_signal"].signal  # ``signal.signal`` without the enums around it
        self.socket: Any = sys.modules["_socket"].socket
        default = int(signal.SIG_DFL)
        self.handlers: list[tuple[int, Any]] = [(int(signal.SIGINT), signal.default_int_handler)]
        self.handlers += [(int(number), default) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
        self.calls: Any = linux.WorkerCalls(settings.tmp_bytes, has_proc=has_proc) if settings.isolate else None
        self.writes: list[tuple[str, bytes]] = linux.identity_files(1000, 1000) if settings.isolate and has_proc else []
        if os.path.exists("/proc/self/oom_score_adj"):  # if the machine runs out of memory, an execution goes first
            self.writes.append(("/proc/self/oom_score_adj", b"1000"))
        try:
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:
            self._statm = -1
        self._open_standard_streams()
        self.pristine = dict(builtins.__dict__)
        self.module = types.ModuleType("__main__")
        self.module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self.module
        builtins.__dict__["final_answer"] = _make_final_answer(self.record)
        self.version = _version_of(builtins.__dict__)
        random.seed(0)
        self.limits: list[tuple[int, tuple[int, int]]] = []
        self._set_limits()

    def own_memory(self) -> tuple[int, int]:
        """Virtual and resident bytes of this process: what the code starts with. Zeros where there is no /proc."""
        if self._statm < 0:
            return 0, 0
        virtual, resident, shared = os.pread(self._statm, 100, 0).split()[:3]  # what is shared is mapped when needed
        return int(virtual) * _PAGE_BYTES, (int(resident) - int(shared)) * _PAGE_BYTES

    def _open_standard_streams(self) -> None:
        """The streams of the code: those of the zygote lead nowhere. An output stream learns here that it is a pipe."""
        ends = os.pipe()
        for fd in (1, 2):
            os.dup2(ends[1], fd)
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
        # Line-buffered, so that what was printed before a time-out is not lost.
        sys.stdout = _line_writer(1)
        sys.stderr = _line_writer(2)
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (1, 2):
            os.dup2(null, fd)
        for fd in (null, *ends):
            os.close(fd)

    def _set_limits(self) -> None:
        """Set those limits that do not disturb the zygote; keep the others in ``limits``."""
        settings = self.settings
        if sys.platform == "linux":
            address_space = self.own_memory()[0] + settings.memory_bytes
            self._limit("RLIMIT_AS", address_space, address_space + _SPARE_BYTES)
            linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        cpu = math.ceil(settings.cpu_seconds)
        self._limit("RLIMIT_CPU", cpu, cpu + 1)
        self._limit("RLIMIT_NPROC", settings.processes)
        self._limit("RLIMIT_NOFILE", 256)
        self._limit("RLIMIT_SIGPENDING", 1024)
        self._limit("RLIMIT_FSIZE", settings.tmp_bytes, harmless=True)
        self._limit("RLIMIT_CORE", 0, harmless=True)
        self._limit("RLIMIT_STACK", 8 << 20, harmless=True)
        self._limit("RLIMIT_MSGQUEUE", 0, harmless=True)
        self._limit("RLIMIT_MEMLOCK", 0, harmless=True)

    def _limit(self, name: str, soft: int, hard: int | None = None, *, harmless: bool = False) -> None:
        kind = getattr(resource, name, None)
        if kind is None:
            return
        ceiling = resource.getrlimit(kind)[1]
        wanted = soft if hard is None else hard
        if ceiling != resource.RLIM_INFINITY:
            wanted = min(wanted, ceiling)
        limit = kind, (min(soft, wanted), wanted)
        if harmless:
            resource.setrlimit(*limit)
        else:
            self.limits.append(limit)


def _run_code(stage: _Stage) -> NoReturn:
    """Execute the code in the record as ``__main__``, write the outcome to the record, end the process.

    The code may have replaced anything, builtins included. So whatever is needed afterwards is at hand in local
    variables, and what looks names up runs after the builtins have been put back.
    """
    clear, update, exit_now, getpid, exc_info = dict.clear, dict.update, os._exit, os.getpid, sys.exc_info
    out, err, join_threads, run_exit_functions = sys.stdout, sys.stderr, _join_threads, _run_exit_functions
    describe, finish, worker, pristine = _describe, stage.record.finish, getpid(), stage.pristine
    version, unchanged = stage.version, stage.version.value if stage.version else 0
    builtins_dict, state, error_line, trace = builtins.__dict__, FINISHED, b"", b""
    try:
        text = stage.record.code().decode("utf-8", "surrogatepass")
        linecache.cache[_CODE_NAME] = (len(text), None, text.splitlines(keepends=True), _CODE_NAME)
        exec(compile(text, _CODE_NAME, "exec", dont_inherit=True), stage.module.__dict__)
    except:  # noqa: E722 -- naming BaseException would look it up
        error = exc_info()[1]
        clear(builtins_dict)
        update(builtins_dict, pristine)
        state, error_line, trace = describe(error)
    if version is None or version.value != unchanged:
        clear(builtins_dict)
        update(builtins_dict, pristine)
    for last_rite in (join_threads, run_exit_functions, out.flush, err.flush):
        try:
            last_rite()
        except BaseException:  # a closed stdout, a raising exit function: the outcome is known already
            continue
    if getpid() == worker:  # a forked child that runs to the end is not the script
        finish(state, error_line, trace)
    exit_now(0 if state == FINISHED else 1)


def _version_of(dictionary: dict[str, Any]) -> ctypes.c_uint64 | None:
    """A view of the number that CPython changes with every change to a dictionary; None if there is no such number.

    Comparing that takes no look at what the dictionary holds.
    """
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 13) or dict.__basicsize__ != 48:
        return None
    return ctypes.c_uint64.from_address(id(dictionary) + 3 * 8)  # after reference count, type, length


def _line_writer(fd: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)


def _become_worker(stage: _Stage, memory: tuple[int, int], fds: list[int]) -> NoReturn:
    """Turn a fresh fork of a zygote into a worker: namespaces, descriptors, limits; then run the code.

    ``fds`` are stdout, stderr, the socket to report the setup on, the pipe for the wait status (the zygote's affair),
    the record, and with isolation the pid namespace. All but the first two are closed before the code runs.
    """
    report, calls = fds[2], stage.calls
    try:
        stage.record.map(fds[4])
        if calls:
            calls.enter_namespaces()
        os.chdir("/tmp" if calls else stage.record.directory())
        os.setsid()
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.closerange(3, report)
        os.closerange(report + 1, 1 << 20)
        for number, handler in stage.handlers:
            stage.signal(number, handler)
        if calls:
            calls.enter_user_namespace()
        for path, text in stage.writes:
            fd = os.open(path, os.O_WRONLY)
            os.write(fd, text)
            os.close(fd)
        for kind, limit in stage.limits:
            resource.setrlimit(kind, limit)
        if calls:
            calls.give_up_rights()
        if sys.platform != "linux":
            random.seed(0)  # ``os.fork`` has reseeded it from the system
        setup = stage.socket(*_UNIX, report)
        message, look = [b"+" + SETUP.pack(os.getpid(), *memory)], -1
        if calls and stage.has_proc:
            look = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
            rights = look.to_bytes(4, sys.byteorder)
            setup.sendmsg(message, [(*_RIGHTS, rights)])
            os.close(look)
        else:
            setup.sendmsg(message)
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    setup.close()
    _run_code(stage)


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
    stage = _Stage(settings, has_proc)
    own = os.pidfd_open(os.getpid()) if settings.isolate else -1
    status_pipes: dict[int, int] = {}  # pid of a worker -> where its supervisor learns the wait status
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    descriptors = struct.Struct("6i" if settings.isolate else "5i")
    room = socket.CMSG_SPACE(descriptors.size)
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
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    break
                pipe = status_pipes.pop(pid)
                with contextlib.suppress(OSError):  # a supervisor that was killed does not listen
                    os.write(pipe, ENDED.pack(status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * _MAXRSS_UNIT))
                os.close(pipe)
        if requests.fileno() not in ready:
            continue
        message, ancillary, _, _ = requests.recvmsg(1, room)
        if not message:
            return
        fds = list(descriptors.unpack(ancillary[0][2]))
        memory = stage.own_memory()
        try:
            pid = fork_into(fds[5] if settings.isolate else -1, own)
        except OSError as error:
            os.write(fds[2], f"cannot fork a worker: {error}".encode())
            os.close(fds[3])
        else:
            if pid == 0:
                signal.set_wakeup_fd(-1)
                _become_worker(stage, memory, fds)
            status_pipes[pid] = fds[3]
        for fd in (*fds[:3], *fds[4:]):
            os.close(fd)
