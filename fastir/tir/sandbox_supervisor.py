"""The supervisor: pid 1 of an execution's namespaces. Reads the output, enforces the limits, writes the result.

See ``sandbox_child`` for its place among the processes of the sandbox.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from typing import NoReturn

from fastir.tir.sandbox_record import FINISHED, OUT_OF_MEMORY, RAISED, SETUP, Record, Settings

if sys.platform == "linux":
    from fastir.tir import sandbox_linux as linux

    PRIVATE_NAMESPACES = (
        linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWCGROUP
    )

# Result frame: status, seconds, then the lengths of stdout, stderr, error, traceback, answer (-1: None), then those.
RESULT_HEADER = struct.Struct("<Bd5i")
STATUSES = ("ok", "error", "timeout", "memory", "output", "crashed", "infrastructure")
STARTED = b"S"  # the supervisor's first byte: from here on the time limit counts
CODE_HEADER = struct.Struct("<I")
_POLL_SECONDS = 0.02  # how often memory and process counts are looked at
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KEEPER_FD, ZYGOTE_FD = 3, 4  # a supervisor's sockets: to the keeper, and for requests to the zygote
_EXECUTIONS_PER_SUPERVISOR = 256


def write_all(fd: int, data: bytes) -> None:
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
        # Virtual size is cheap and an upper bound (shared pages count once per process); only past it look closely.
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


def _kill_everything(settings: Settings, worker: int, status_fd: int, known: int | None) -> None:
    """Kill and reap all processes of this execution; returns when the last is gone.

    ``worker`` is the zygote's child, not ours: that it is gone is told through ``status_fd``, unless its wait status is
    ``known`` already.
    """
    kill, target = (os.kill, -1) if settings.isolate else (os.killpg, worker)
    with contextlib.suppress(OSError):
        kill(target, signal.SIGKILL)  # -1 as pid 1: everything in this pid namespace but ourselves
    if known is None:
        os.read(status_fd, 4)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


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


def _watch(
    connection: int, settings: Settings, status_fd: int, output: _Output, usage: _Usage | None
) -> tuple[str, int | None, float]:
    """Wait until the worker ends or a limit is hit: (reason or "", wait status of the worker or None, seconds)."""
    begin = time.monotonic()
    deadline = begin + settings.timeout_seconds
    out = next(iter(output.kept))
    poll = select.poll()
    for fd in (*output.kept, status_fd):
        poll.register(fd, select.POLLIN)
    poll.register(connection, 0)  # hang-up is always reported
    next_look = begin + _POLL_SECONDS
    while True:
        now = time.monotonic()
        if now >= deadline:
            return "timeout", None, now - begin
        if now >= next_look:
            reason = usage.over_limit() if usage else ""
            if reason:
                return reason, None, now - begin
            if settings.isolate:
                while _reap()[0]:  # orphans come to us: unreaped, they would count as processes
                    pass
            next_look = time.monotonic() + _POLL_SECONDS
        wait = max(0.0, min(deadline, next_look) - time.monotonic())
        ready = {fd for fd, _ in poll.poll(wait * 1000 + 0.5)}
        if connection in ready:  # the trainer has hung up: nobody wants the result
            return "cancelled", None, time.monotonic() - begin
        for fd in output.kept:
            if fd in ready and not output.read(fd):
                poll.unregister(fd)
        if out in output.overflowed:
            return "output", None, time.monotonic() - begin
        if status_fd in ready:
            seconds = time.monotonic() - begin
            status = os.read(status_fd, 4)
            return ("", int.from_bytes(status, "little"), seconds) if status else ("cancelled", 0, seconds)


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
    if state == FINISHED:
        return "ok", b""
    if state == RAISED:
        return "error", b""
    if state == OUT_OF_MEMORY:
        return "memory", b""
    return "crashed", f"exited with status {os.WEXITSTATUS(wait_status)} before the end of the script".encode()


def frame(status: str, seconds: float, *texts: bytes | None) -> bytes:
    lengths = [-1 if text is None else len(text) for text in texts]
    return RESULT_HEADER.pack(STATUSES.index(status), seconds, *lengths) + b"".join(text or b"" for text in texts)


def supervise(settings: Settings, has_proc: bool) -> NoReturn:
    """Body of a supervisor: executions one after another, as long as the namespaces are as good as new.

    Making namespaces costs more than most scripts, so a supervisor whose execution ended well takes the next one: with
    a new /tmp, after every process has been reaped, and with a worker in a new user namespace. The system calls that
    could leave something else behind (System V and POSIX queues, semaphores, shared memory) are denied by seccomp.
    After a time-out, a crash or any limit the supervisor ends and takes its namespaces with it.
    """
    if settings.isolate:
        linux.unshare(PRIVATE_NAMESPACES)
        linux.mount_private_proc(has_proc=has_proc)
    with socket.socket(fileno=KEEPER_FD) as keeper:
        for number in range(_EXECUTIONS_PER_SUPERVISOR):
            _, fds, _, _ = socket.recv_fds(keeper, 1, 1)
            if not fds:
                os._exit(0)
            connection = fds[0]
            try:
                reusable = _execute(connection, settings, has_proc)
            except (BrokenPipeError, ConnectionResetError, EOFError):
                os._exit(0)  # the trainer has hung up
            except BaseException as error:
                text = f"{type(error).__name__}: {error}".encode()
                with contextlib.suppress(OSError):
                    write_all(connection, frame("infrastructure", 0.0, b"", b"", text, b"", None))
                os._exit(1)
            os.close(connection)
            if not reusable or number == _EXECUTIONS_PER_SUPERVISOR - 1:
                os._exit(0)
            keeper.send(b"i")
    os._exit(0)


def _execute(connection: int, settings: Settings, has_proc: bool) -> bool:
    """One execution, from reading the code to writing the result; whether the supervisor may be used again."""
    directory = ""
    if settings.isolate:
        linux.mount_private_tmp(settings.tmp_bytes)
    else:
        directory = tempfile.mkdtemp(dir=settings.scratch)
    (length,) = CODE_HEADER.unpack(_read_exactly(connection, CODE_HEADER.size))
    code = _read_exactly(connection, length)
    record_fd = os.memfd_create("record") if hasattr(os, "memfd_create") else _unlinked_file(settings.scratch)
    record = Record.create(record_fd, directory, code)
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    setup_read, setup_write = os.pipe()
    status_read, status_write = os.pipe()
    handed_over = [out_write, err_write, setup_write, status_write, record_fd]
    if settings.isolate:
        handed_over.append(os.pidfd_open(1))
    zygote = socket.socket(fileno=ZYGOTE_FD)
    socket.send_fds(zygote, [b"W"], handed_over)
    zygote.detach()
    for fd in handed_over:
        os.close(fd)
    setup = os.read(setup_read, 4096)
    if sys.platform == "linux":  # not before: the worker joins our namespaces with the rights of a debugger
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
    os.close(setup_read)
    if setup[:1] != b"+":
        raise RuntimeError(f"the worker could not be set up: {setup.decode() or 'the zygote failed'}")
    worker, virtual, resident = SETUP.unpack(setup[1:])
    write_all(connection, STARTED)
    output = _Output(settings.output_bytes)
    output.add(out_read)
    output.add(err_read)
    usage = _Usage(settings, virtual, resident) if settings.isolate and has_proc else None
    reason, wait_status, seconds = _watch(connection, settings, status_read, output, usage)
    _kill_everything(settings, worker, status_read, wait_status)
    if directory:
        shutil.rmtree(directory, ignore_errors=True)
    if reason == "cancelled":
        return False
    output.drain()
    if not reason and out_read in output.overflowed:
        reason = "output"
    status, explanation = _judge(reason, wait_status, record, settings)
    stdout, stderr = bytes(output.kept[out_read]), bytes(output.kept[err_read])
    error, trace = (explanation, b"") if explanation else (record.error(), record.trace())
    write_all(connection, frame(status, seconds, stdout, stderr, error, trace, record.answer()))
    for fd in (out_read, err_read, status_read):
        os.close(fd)
    record.close()
    if settings.isolate:
        linux.prctl(linux.PR_SET_DUMPABLE, 1)
    alone = not has_proc or [name for name in os.listdir("/proc") if name.isdigit()] == ["1"]
    return status in ("ok", "error") and alone


def _unlinked_file(directory: str) -> int:
    fd, path = tempfile.mkstemp(dir=directory)
    os.unlink(path)
    return fd
