"""The processes behind the sandbox, started by ``sandbox.py`` with a clean exec and never imported by the trainer.

launcher   started with an empty environment; enters the outer namespaces, forks the zygote, waits for it.
zygote     pid 1 of the outer pid namespace. Has numpy and sympy imported. Forks one supervisor per execution.
           It never sees code or output: each request is one end of a socket pair that goes to the supervisor.
supervisor pid 1 of a pid namespace of its own, with its own mount, network, ipc, uts and cgroup namespaces. Forks
           the worker, reads its output, enforces the limits, writes the result. When it ends, the kernel kills
           everything inside, however daemonised or signal-proof.
worker     runs the code (``sandbox_worker``) in one more user namespace, without capabilities, under seccomp and
           rlimits.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from typing import Any

from fastir.tir import sandbox_worker
from fastir.tir.sandbox_worker import Record, Settings

if sys.platform == "linux":
    from fastir.tir import sandbox_linux as linux

# Result frame: status, seconds, then the lengths of stdout, stderr, error, traceback, answer (-1: None), then those.
RESULT_HEADER = struct.Struct("<Bd5i")
STATUSES = ("ok", "error", "timeout", "memory", "output", "crashed", "infrastructure")
STARTED = b"S"  # the supervisor's first byte: from here on the time limit counts
CODE_HEADER = struct.Struct("<I")
KILL_GRACE_SECONDS = 0.6  # after the time limit the zygote kills a supervisor that has not ended by itself
_POLL_SECONDS = 0.02  # how often memory and process counts are looked at
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CONNECTION = 3  # the supervisor's descriptor for its socket to the trainer


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_exactly(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(fd, count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


# --------------------------------------------------------------------------------------------------------- supervisor


class _Usage:
    """Looks at what all processes of one execution use together, which rlimits, being per process, do not bound."""

    def __init__(self, settings: Settings, base_bytes: int, base_resident: int) -> None:
        self._settings, self._base, self._base_resident = settings, base_bytes, base_resident

    def over_limit(self) -> str:
        """ "memory" or "processes" when a limit is passed, otherwise ""."""
        pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        if len(pids) > self._settings.processes + 1:
            return "processes"
        virtual = 0
        for pid in pids:
            fields = self._read(pid, "statm").split()
            if fields:
                virtual += max(0, int(fields[0]) * _PAGE_BYTES - self._base)
        # Virtual size is cheap and an upper bound (shared pages count once for each process); only past it look closely.
        if virtual > self._settings.memory_bytes:
            used = self._proportional(pids)
            if used > self._settings.memory_bytes + self._base_resident:
                return "memory"
        return ""

    def _proportional(self, pids: list[str]) -> int:
        used = 0
        shared: dict[
            bytes, int
        ] = {}  # inode of anonymous shared memory -> bytes; counted even where no page is mapped in
        for pid in pids:
            for line in self._read(pid, "smaps_rollup").splitlines():
                if line.startswith(b"Pss_Anon:"):
                    used += int(line.split()[1]) << 10
            for line in self._read(pid, "maps").splitlines():
                if b"/dev/zero" in line:
                    span, _, _, _, inode = line.split()[:5]
                    start, _, end = span.partition(b"-")
                    shared[inode] = max(shared.get(inode, 0), int(end, 16) - int(start, 16))
        return used + sum(shared.values())

    @staticmethod
    def _read(pid: str, name: str) -> bytes:
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                return file.read()
        except OSError:  # it has just ended
            return b""


def _own_memory() -> tuple[int, int]:
    """Virtual and resident bytes of this process: what a worker starts with. Zeros where there is no /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            virtual, resident = file.read().split()[:2]
    except OSError:
        return 0, 0
    return int(virtual) * _PAGE_BYTES, int(resident) * _PAGE_BYTES


def _kill_everything(settings: Settings, worker: int) -> None:
    """Kill and reap all processes of this execution."""
    if settings.isolate:
        try:
            os.kill(-1, signal.SIGKILL)  # as pid 1: everything in this pid namespace but ourselves
        except ProcessLookupError:
            pass
    while True:
        if not settings.isolate:
            _kill_known(worker)
        try:
            pid, _ = os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill_known(worker: int) -> None:
    """Without a pid namespace: the worker's process group, and orphans, which Linux hands to us as their subreaper."""
    children = [worker]
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children += [int(pid) for pid in file.read().split()]
    except OSError:
        pass
    for pid in children:
        for kill in (os.killpg, os.kill):
            try:
                kill(pid, signal.SIGKILL)
            except OSError:
                continue


class _Output:
    """Reads the worker's stdout and stderr, keeping at most ``limit`` bytes of each."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.kept: dict[int, bytearray] = {}
        self.overflowed: set[int] = set()

    def add(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.kept[fd] = bytearray()

    def read(self, fd: int) -> bool:
        """Take what is there; False at the end of the stream."""
        try:
            piece = os.read(fd, 65536)
        except BlockingIOError:
            return True
        kept = self.kept[fd]
        room = self._limit - len(kept)
        kept += piece[:room]
        if len(piece) > room:
            self.overflowed.add(fd)
        return bool(piece)

    def drain(self) -> None:
        """Read what is left in the pipes; at most a pipe's capacity, since every writer is dead."""
        for fd in self.kept:
            while True:
                before = len(self.kept[fd])
                if not self.read(fd) or len(self.kept[fd]) == before:
                    break


def _watch(settings: Settings, worker: int, output: _Output, usage: _Usage | None) -> tuple[str, int | None, float]:
    """Wait until the worker ends or a limit is hit: (reason or "", wait status of the worker or None, seconds)."""
    begin = time.monotonic()
    deadline = begin + settings.timeout_seconds
    out = next(iter(output.kept))
    poll = select.poll()
    for fd in output.kept:
        poll.register(fd, select.POLLIN)
    poll.register(_CONNECTION, 0)  # hang-up is always reported
    worker_fd = os.pidfd_open(worker) if hasattr(os, "pidfd_open") else -1
    if worker_fd >= 0:
        poll.register(worker_fd, select.POLLIN)
    next_look = begin + _POLL_SECONDS
    reason = ""
    while True:
        now = time.monotonic()
        if now >= deadline:
            return "timeout", None, now - begin
        if now >= next_look:
            reason = usage.over_limit() if usage else ""
            if reason:
                return reason, None, now - begin
            next_look = time.monotonic() + _POLL_SECONDS
        wait = max(0.0, min(deadline, next_look) - time.monotonic())
        for fd, _ in poll.poll(wait * 1000 + 0.5):
            if fd == _CONNECTION:  # the trainer has hung up: nobody wants the result
                return "cancelled", None, time.monotonic() - begin
            if fd in output.kept and not output.read(fd):
                poll.unregister(fd)
        if out in output.overflowed:
            return "output", None, time.monotonic() - begin
        while True:  # orphans come to us: reap them, or they would count as processes
            pid, status = _reap()
            if pid == worker:
                return "", status, time.monotonic() - begin
            if pid == 0:
                break


def _reap() -> tuple[int, int]:
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def _judge(reason: str, wait_status: int | None, record: Record, settings: Settings) -> tuple[str, bytes]:
    """The execution's status and, unless the code raised, a line that explains it."""
    if reason == "timeout":
        return "timeout", f"TimeoutError: no result within {settings.timeout_seconds:g} s".encode()
    if reason == "memory":
        return "memory", f"MemoryError: more than {settings.memory_bytes >> 20} MB in all processes together".encode()
    if reason == "output":
        return "output", f"printed more than {settings.output_bytes} bytes".encode()
    if reason == "processes":
        return "crashed", f"more than {settings.processes} processes".encode()
    assert wait_status is not None
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        if number == signal.SIGXCPU:
            return "timeout", f"TimeoutError: more than {settings.cpu_seconds:g} s of CPU time".encode()
        return "crashed", f"killed by signal {number} ({signal.strsignal(number)})".encode()
    state = record.state()
    if state == sandbox_worker.FINISHED:
        return "ok", b""
    if state == sandbox_worker.RAISED:
        return "error", b""
    if state == sandbox_worker.OUT_OF_MEMORY:
        return "memory", b""
    return "crashed", f"exited with status {os.WEXITSTATUS(wait_status)} before the end of the script".encode()


def _frame(status: str, seconds: float, *texts: bytes | None) -> bytes:
    lengths = [-1 if text is None else len(text) for text in texts]
    return RESULT_HEADER.pack(STATUSES.index(status), seconds, *lengths) + b"".join(text or b"" for text in texts)


def _supervise(settings: Settings, has_proc: bool, seccomp: bytes | None) -> None:
    """Body of the supervisor: one execution, from reading the code to writing the result to ``_CONNECTION``."""
    directory = ""
    if settings.isolate:
        linux.unshare(
            linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWCGROUP
        )
        linux.mount_private(tmp_bytes=settings.tmp_bytes, has_proc=has_proc)
        linux.set_capabilities(effective=False)
        os.chdir("/tmp")
    else:
        if sys.platform == "linux":
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        directory = tempfile.mkdtemp(dir=settings.scratch)
        os.chdir(directory)
    if sys.platform == "linux":
        linux.prctl(linux.PR_SET_DUMPABLE, 0)  # its memory and descriptors are closed to the code
    (length,) = CODE_HEADER.unpack(_read_exactly(_CONNECTION, CODE_HEADER.size))
    code = _read_exactly(_CONNECTION, length)
    virtual, resident = _own_memory()
    record = Record()
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    setup_read, setup_write = os.pipe()
    worker = os.fork()
    if worker == 0:
        try:
            sandbox_worker.prepare(settings, (out_write, err_write, setup_write), virtual, seccomp)
            os.write(3, b"+")
        except BaseException as error:
            os.write(3, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        os.close(3)
        sandbox_worker.run_code(code, record)
    for fd in (out_write, err_write, setup_write):
        os.close(fd)
    setup = os.read(setup_read, 4096)
    os.close(setup_read)
    if setup != b"+":
        raise RuntimeError(f"the worker could not confine itself: {setup.decode()}")
    _write_all(_CONNECTION, STARTED)
    output = _Output(settings.output_bytes)
    output.add(out_read)
    output.add(err_read)
    usage = _Usage(settings, virtual, resident) if settings.isolate and has_proc else None
    reason, wait_status, seconds = _watch(settings, worker, output, usage)
    _kill_everything(settings, worker)
    if directory:
        shutil.rmtree(directory, ignore_errors=True)
    if reason == "cancelled":
        return
    output.drain()
    if not reason and out_read in output.overflowed:
        reason = "output"
    status, explanation = _judge(reason, wait_status, record, settings)
    stdout, stderr = bytes(output.kept[out_read]), bytes(output.kept[err_read])
    error, trace = (explanation, b"") if explanation else (record.error(), record.trace())
    _write_all(_CONNECTION, _frame(status, seconds, stdout, stderr, error, trace, record.answer()))


# ------------------------------------------------------------------------------------------------------------- zygote


def _fork_supervisor(connection: int, settings: Settings, has_proc: bool, seccomp: bytes | None, own_fd: int) -> int:
    """Fork a supervisor, as pid 1 of a new pid namespace; returns its pid."""
    if settings.isolate:
        linux.unshare(linux.CLONE_NEWPID)  # for the next child, not for us
    try:
        pid = os.fork()
    except OSError:
        if settings.isolate:
            linux.setns(own_fd, linux.CLONE_NEWPID)
        raise
    if pid:
        if settings.isolate:
            linux.setns(own_fd, linux.CLONE_NEWPID)
        return pid
    try:
        os.dup2(connection, _CONNECTION)
        os.closerange(_CONNECTION + 1, 1 << 20)
        _supervise(settings, has_proc, seccomp)
    except (BrokenPipeError, ConnectionResetError, EOFError):
        os._exit(0)  # the trainer has hung up
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".encode()
        try:
            _write_all(_CONNECTION, _frame("infrastructure", 0.0, b"", b"", text, b"", None))
        except OSError:
            os._exit(1)
    os._exit(0)


def _serve(control: socket.socket, settings: Settings, has_proc: bool, seccomp: bytes | None) -> None:
    """Fork a supervisor for each descriptor that arrives, until the trainer closes its end."""
    own_fd = os.pidfd_open(os.getpid()) if settings.isolate else -1
    poll = select.poll()
    poll.register(control, select.POLLIN)
    running: dict[int, tuple[int, float]] = {}  # pid -> (pidfd or -1, time to kill it)
    by_fd: dict[int, int] = {}
    budget = settings.timeout_seconds + KILL_GRACE_SECONDS
    while True:
        now = time.monotonic()
        for pid, (_, limit) in running.items():
            if limit <= now:
                os.kill(pid, signal.SIGKILL)
        wait = min((max(limit - now, 0.05) for _, limit in running.values()), default=60.0)
        ready = {fd for fd, _ in poll.poll(wait * 1000)}
        while running and (ready & by_fd.keys() or not by_fd):
            pid, _ = _reap()
            if pid == 0:
                break
            fd, _ = running.pop(pid, (-1, 0.0))
            if fd >= 0:
                poll.unregister(fd)
                ready.discard(fd)
                del by_fd[fd]
                os.close(fd)
        if control.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return
        if not fds:  # a ping
            control.sendall(b"p")
            continue
        try:
            pid = _fork_supervisor(fds[0], settings, has_proc, seccomp, own_fd)
            pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
            running[pid] = (pidfd, time.monotonic() + budget)
            if pidfd >= 0:
                by_fd[pidfd] = pid
                poll.register(pidfd, select.POLLIN)
        except OSError as error:
            text = f"cannot fork a supervisor: {error}".encode()
            os.write(fds[0], _frame("infrastructure", 0.0, b"", b"", text, b"", None))
        finally:
            os.close(fds[0])


def _preload(names: list[str]) -> None:
    """Import what the code will want and touch what it loads lazily, so that executions inherit it."""
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    for name in names:
        importlib.import_module(name)
    if "numpy" in names:
        numpy: Any = sys.modules["numpy"]
        importlib.import_module("numpy.random")
        numpy.linalg.solve(numpy.eye(2), numpy.ones(2))
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


def _zygote(control: socket.socket, settings: Settings) -> None:
    """Set up the root, import, report readiness (or what failed), serve."""
    has_proc, seccomp, parts = True, None, []
    step = "isolating"
    try:
        if settings.isolate:
            step = "building the read-only root"
            has_proc = linux.build_root(settings.prefixes)
            socket.sethostname("sandbox")
            os.umask(0o022)
            bound = linux.become_unprivileged()
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            seccomp = linux.seccomp_program()
            parts = ["user+pid+mount+net+ipc+uts+cgroup namespaces", "read-only root", "private tmpfs /tmp"]
            parts += ["no capabilities", "no-new-privs", "rlimits"]
            parts += ["seccomp filter"] if seccomp else ["no seccomp filter on this machine type"]
            parts += [] if has_proc else ["no /proc (masked by the container runtime)"]
            parts += [] if bound else ["host uid 0 (no other id is mapped)"]
            inside = [target + os.sep for _, target in settings.prefixes]
            sys.path[:] = [path for path in sys.path if any((path + os.sep).startswith(prefix) for prefix in inside)]
        if sys.platform == "linux":
            linux.limit_malloc_arenas()
            if has_proc:
                linux.wipe_arguments_and_environment()
        step = f"importing {', '.join(settings.preload)}"
        _preload(settings.preload)
        sys.argv[:] = ["main.py"]
        sys.orig_argv[:] = ["python"]
        for name in [name for name in sys.modules if name.partition(".")[0] == "fastir"]:
            del sys.modules[name]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 2)
        os.close(null)
    except BaseException as error:
        control.sendall(json.dumps({"failed": step, "error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        return
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, every inherited page
    control.sendall(json.dumps({"isolation": ", ".join(parts)}).encode() + b"\n")
    _serve(control, settings, has_proc, seccomp)


def main(control_fd: int) -> None:
    """Entry point: read the settings from the control socket, isolate, become the zygote's parent."""
    control = socket.socket(fileno=control_fd)
    text = b""
    while not text.endswith(b"\n"):
        piece = control.recv(65536)
        if not piece:
            return
        text += piece
    settings = Settings(**json.loads(text))
    if not settings.isolate:
        _zygote(control, settings)
        os._exit(0)
    try:
        linux.enter_user_namespace(
            linux.CLONE_NEWNS
            | linux.CLONE_NEWPID
            | linux.CLONE_NEWNET
            | linux.CLONE_NEWIPC
            | linux.CLONE_NEWUTS
            | linux.CLONE_NEWCGROUP
        )
    except OSError as error:
        control.sendall(json.dumps({"failed": "creating namespaces", "error": str(error)}).encode() + b"\n")
        return
    child = os.fork()
    if child == 0:
        try:
            _zygote(control, settings)
        finally:
            os._exit(0)
    control.close()  # the zygote's copy alone keeps the trainer's end from reading end-of-file
    os.waitpid(child, 0)
    os._exit(0)
