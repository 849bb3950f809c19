"""The supervisor of an execution, outside its namespaces: reads the output, enforces limits, writes the result.

See ``sandbox_child`` for its place among the processes of the sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import NoReturn

from fastir.tir.sandbox_record import ENDED, FINISHED, OUT_OF_MEMORY, RAISED, SETUP, Record, Settings

if sys.platform == "linux":
    from fastir.tir import sandbox_linux as linux

# Result frame: status, seconds, CPU seconds, peak bytes, exit code, then the lengths of stdout, stderr, error,
# traceback, answer (-1: None), then those.
RESULT_HEADER = struct.Struct("<Bddqi5i")
STATUSES = ("ok", "error", "timeout", "memory", "output", "crashed", "infrastructure")
STARTED = b"S"  # the supervisor's first byte: from here on the time limit counts
CODE_HEADER = struct.Struct("<Id")  # length of the code, time limit in seconds
PONG = struct.Struct("<q")  # the keeper's answer to a ping: bytes of memory that the standing processes hold
_POLL_SECONDS = 0.02  # how often memory and process counts are looked at
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
KEEPER_FD, BARE_FD, WARM_FD = 3, 4, 5  # a supervisor's sockets: to the keeper, and for requests to the two zygotes


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

    def __init__(self, settings: Settings, proc: int, base_bytes: int, base_resident: int) -> None:
        """``proc``: a descriptor of the execution's own /proc."""
        self._settings, self._proc = settings, proc
        self._base, self._base_resident = base_bytes, base_resident
        self.peak_bytes = 0
        self._ticks: dict[str, int] = {}  # CPU time of each process, as last seen

    @property
    def cpu_seconds(self) -> float:
        return sum(self._ticks.values()) / _TICKS_PER_SECOND

    def over_limit(self) -> str:
        """ "memory" or "processes" when a limit is passed, otherwise ""."""
        pids = [name for name in os.listdir(self._proc) if name.isdigit() and name != "1"]
        if len(pids) > self._settings.processes + 1:
            return "processes"
        virtual = resident = 0
        for pid in pids:
            fields = self._read(pid, "statm").split()
            if fields:
                virtual += max(0, int(fields[0]) * _PAGE_BYTES - self._base)
                resident += max(0, (int(fields[1]) - int(fields[2])) * _PAGE_BYTES - self._base_resident)
            times = self._read(pid, "stat").rpartition(b")")[2].split()
            if times:
                self._ticks[pid] = int(times[11]) + int(times[12])
        self.peak_bytes = max(self.peak_bytes, resident)
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
            rollup = self._read(pid, "smaps_rollup")
            if not rollup:  # it has ended, or refuses to be looked at: then shared pages count too
                fields = self._read(pid, "statm").split()
                used += max(0, int(fields[1]) * _PAGE_BYTES - self._base_resident) if fields else 0
            for line in rollup.splitlines():
                if line.startswith(b"Pss_Anon:"):
                    used += int(line.split()[1]) << 10
            for line in self._read(pid, "maps").splitlines():
                if b"/dev/zero" in line:
                    span, _, _, _, inode = line.split()[:5]
                    start, _, end = span.partition(b"-")
                    shared[inode] = max(shared.get(inode, 0), int(end, 16) - int(start, 16))
        return used + sum(shared.values())

    def _read(self, pid: str, name: str) -> bytes:
        try:
            with open(os.open(f"{pid}/{name}", os.O_RDONLY, dir_fd=self._proc), "rb") as file:
                return file.read()
        except OSError:  # it has just ended, or may not be looked at
            return b""


class _PidNamespace:
    """A new pid namespace, whose pid 1 does nothing. ``fd`` refers to it, for ``setns``."""

    _stack = ctypes.create_string_buffer(1 << 14)

    def __init__(self, *, has_proc: bool) -> None:
        self._init = linux.start_init(self._stack)
        try:
            if has_proc:  # this takes the rights of a debugger, which nobody may have once code runs in there
                linux.prctl(linux.PR_SET_DUMPABLE, 1)
                self.fd = os.open(f"/proc/{self._init}/ns/pid", os.O_RDONLY)
                linux.prctl(linux.PR_SET_DUMPABLE, 0)
            else:  # we stay open to debuggers, who would need /proc (or system calls that seccomp denies)
                self.fd = os.pidfd_open(self._init)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill all that is inside, however daemonised or signal-proof; returns when the last process is gone."""
        if self._init:
            os.kill(self._init, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # we ignore SIGCHLD, so this always fails, but at its end
                os.waitpid(self._init, 0)
            self._init = 0


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
    connection: int, limit: float, status_fd: int, output: _Output, usage: _Usage | None
) -> tuple[str, bytes, float]:
    """Wait until the worker ends or a limit is hit: (reason or "", ``ENDED`` of the worker if it has, seconds)."""
    begin = time.monotonic()
    deadline = begin + limit
    out = next(iter(output.kept))
    poll = select.poll()
    for fd in (*output.kept, status_fd):
        poll.register(fd, select.POLLIN)
    poll.register(connection, 0)  # hang-up is always reported
    next_look = begin + _POLL_SECONDS
    while True:
        now = time.monotonic()
        if now >= deadline:
            return "timeout", b"", now - begin
        if now >= next_look:
            reason = usage.over_limit() if usage else ""
            if reason:
                return reason, b"", now - begin
            next_look = time.monotonic() + _POLL_SECONDS
        wait = max(0.0, min(deadline, next_look) - time.monotonic())
        ready = {fd for fd, _ in poll.poll(wait * 1000 + 0.5)}
        if connection in ready:  # the trainer has hung up: nobody wants the result
            return "cancelled", b"", time.monotonic() - begin
        for fd in output.kept:
            if fd in ready and not output.read(fd):
                poll.unregister(fd)
        if out in output.overflowed:
            return "output", b"", time.monotonic() - begin
        if status_fd in ready:
            seconds = time.monotonic() - begin
            ended = os.read(status_fd, ENDED.size)
            return "" if ended else "cancelled", ended, seconds  # without a word: the zygote is gone


def timeout_line(limit: float) -> str:
    """What explains an execution that passed its wall-clock limit."""
    return f"TimeoutError: no result within {limit:g} s"


def _judge(reason: str, wait_status: int, record: Record, settings: Settings, limit: float) -> tuple[str, bytes]:
    """The execution's status and, unless the code raised, a line that explains it."""
    if reason == "timeout":
        return "timeout", timeout_line(limit).encode()
    if reason == "memory":
        return "memory", f"MemoryError: more than {settings.memory_bytes >> 20} MB in all processes together".encode()
    if reason == "output":
        return "output", f"printed more than {settings.output_bytes} bytes".encode()
    if reason == "processes":
        return "crashed", f"more than {settings.processes} processes".encode()
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


def frame(
    status: str, *texts: bytes | None, seconds: float = 0.0, cpu: float = 0.0, peak: int = 0, exit_code: int = 0
) -> bytes:
    """A result frame; ``texts`` are stdout, stderr, error, traceback, answer."""
    lengths = [-1 if text is None else len(text) for text in texts]
    header = RESULT_HEADER.pack(STATUSES.index(status), seconds, cpu, peak, exit_code, *lengths)
    return header + b"".join(text or b"" for text in texts)


def infrastructure_frame(text: str) -> bytes:
    """The frame that tells of a failure of the sandbox itself."""
    return frame("infrastructure", b"", b"", text.encode(), b"", None)


def supervise(settings: Settings, has_proc: bool, warm_names: list[bytes]) -> NoReturn:
    """Body of a supervisor: one execution after another, each in namespaces of its own.

    The supervisor itself stays outside them, where the code cannot see it. Code that mentions one of ``warm_names`` is
    for the warm zygote, other code for the bare one.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what ``start_init`` starts inherits this
    zygotes = socket.socket(fileno=BARE_FD), socket.socket(fileno=WARM_FD)
    with socket.socket(fileno=KEEPER_FD) as keeper:
        while True:
            _, fds, _, _ = socket.recv_fds(keeper, 1, 1)
            if not fds:
                os._exit(0)
            connection = fds[0]
            namespace = None
            try:
                namespace = _PidNamespace(has_proc=has_proc) if settings.isolate else None
                _execute(connection, settings, namespace, zygotes, warm_names)
            except (BrokenPipeError, ConnectionResetError, EOFError):
                pass  # the trainer has hung up
            except BaseException as error:
                with contextlib.suppress(OSError):
                    write_all(connection, infrastructure_frame(f"{type(error).__name__}: {error}"))
                os._exit(1)
            finally:
                if namespace:
                    namespace.kill()
            os.closerange(WARM_FD + 1, 256)
            keeper.send(b"i")


def _execute(
    connection: int,
    settings: Settings,
    namespace: _PidNamespace | None,
    zygotes: tuple[socket.socket, socket.socket],
    warm_names: list[bytes],
) -> None:
    """One execution, from reading the code to writing the result; the caller closes the descriptors it leaves.

    ``zygotes`` are the sockets to the bare and to the warm one.
    """
    directory = "" if namespace else _new_directory(settings.scratch)
    length, limit = CODE_HEADER.unpack(_read_exactly(connection, CODE_HEADER.size))
    code = _read_exactly(connection, length)
    record_fd = os.memfd_create("record") if hasattr(os, "memfd_create") else _unlinked_file(settings.scratch)
    record = Record.create(record_fd, directory, code)
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    setup, setup_theirs = socket.socketpair()
    status_read, status_write = os.pipe()
    handed_over = [out_write, err_write, setup_theirs.detach(), status_write, record_fd]
    zygote = zygotes[any(name in code for name in warm_names)]
    socket.send_fds(zygote, [b"W"], handed_over + ([namespace.fd] if namespace else []))
    for fd in handed_over:
        os.close(fd)
    report, proc, _, _ = socket.recv_fds(setup, 4096, 1)
    setup.close()
    if report[:1] != b"+":
        raise RuntimeError(f"the worker could not be set up: {report.decode() or 'the zygote failed'}")
    worker, virtual, resident = SETUP.unpack(report[1:])
    write_all(connection, STARTED)
    output = _Output(settings.output_bytes)
    output.add(out_read)
    output.add(err_read)
    usage = _Usage(settings, proc[0], virtual, resident) if proc else None
    reason, ended, seconds = _watch(connection, limit, status_read, output, usage)
    if usage and reason:
        usage.over_limit()  # a last look at what is about to be killed
    if namespace:
        namespace.kill()
    else:
        with contextlib.suppress(OSError):
            os.killpg(worker, signal.SIGKILL)
    ended = ended or os.read(status_read, ENDED.size)  # the worker is the zygote's child, not ours
    if directory:
        _remove(directory)
    if reason != "cancelled" and ended:
        output.drain()
        if not reason and out_read in output.overflowed:
            reason = "output"
        wait_status, cpu, largest = ENDED.unpack(ended)
        status, explanation = _judge(reason, wait_status, record, settings, limit)
        stdout, stderr = bytes(output.kept[out_read]), bytes(output.kept[err_read])
        error, trace = (explanation, b"") if explanation else (record.error(), record.trace())
        result = frame(
            status, stdout, stderr, error, trace, record.answer(),
            seconds=seconds,
            cpu=max(cpu, usage.cpu_seconds if usage else 0.0),
            peak=max(0, largest - resident, usage.peak_bytes if usage else 0),
            exit_code=os.waitstatus_to_exitcode(wait_status),
        )  # fmt: skip
        write_all(connection, result)
    record.close()


# Imported by use: every library that is loaded makes the zygotes' forks dearer, and isolated executions need none.


def _new_directory(parent: str) -> str:
    import tempfile

    return tempfile.mkdtemp(dir=parent)


def _remove(directory: str) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)


def _unlinked_file(directory: str) -> int:
    import tempfile

    fd, path = tempfile.mkstemp(dir=directory)
    os.unlink(path)
    return fd
