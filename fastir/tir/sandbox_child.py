"""The processes behind the sandbox, started by ``sandbox.py`` with a clean exec. This file: launcher and keeper.

launcher   started with an empty environment; enters the outer namespaces, forks the keeper, waits for it.
keeper     pid 1 of the outer pid namespace. Builds the read-only root. Forks the zygotes, and a supervisor for each
           execution that runs at the same time as others. It never sees code or output: each request is one end of
           a socket pair that goes to a supervisor.
zygotes    the keeper's children, one bare, one with numpy and sympy imported: forking that costs several times as
           much, so it is only for code that mentions them. Fork one worker per execution into the pid namespace that
           a supervisor has made for it, and report how the worker ended.
supervisor takes one execution after another. For each it makes a pid namespace, has a worker forked into that, reads
           its output, enforces the limits, kills pid 1 of the namespace, writes the result.
init       pid 1 of an execution's pid namespace; sleeps. When it is killed, the kernel kills everything inside,
           however daemonised or signal-proof.
worker     enters mount, network, ipc, uts and cgroup namespaces of its own, with its own /proc and /tmp, then one
           more user namespace without capabilities; runs the code (``sandbox_worker``) under seccomp and rlimits.
           Nothing of an execution's namespaces is used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from typing import NamedTuple

from fastir.tir import sandbox_worker
from fastir.tir.sandbox_record import Settings
from fastir.tir.sandbox_supervisor import BARE_FD, KEEPER_FD, PONG, WARM_FD, infrastructure_frame, supervise

if sys.platform == "linux":
    from fastir.tir import sandbox_linux as linux

_KILL_GRACE_SECONDS = 0.6  # after the time limit the keeper kills a supervisor that has not ended by itself


class _Supervisor(NamedTuple):
    pid: int
    socket: socket.socket


class _Zygotes(NamedTuple):
    """The keeper's sockets to the zygotes, their pids, and the names of the modules that only the warm one has."""

    bare: socket.socket
    warm: socket.socket
    pids: list[int]
    warm_names: list[bytes]


def _start_zygotes(control: socket.socket, settings: Settings, has_proc: bool) -> _Zygotes:
    """Fork the zygotes and wait for their imports. Without modules to preload the bare one is both."""
    kinds = [settings._replace(preload=[]), settings] if settings.preload else [settings]
    sockets: list[socket.socket] = []
    pids: list[int] = []
    for kind in kinds:
        ours, theirs = socket.socketpair()
        sockets.append(ours)
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                for other in (control, *sockets):
                    other.close()
                sandbox_worker.serve(theirs, kind, has_proc)
            finally:
                os._exit(1)
        theirs.close()
    names: list[set[bytes]] = []
    for ours in sockets:
        reply = ours.recv(65536)
        if not reply.startswith(b"ready"):
            raise SystemError(reply.decode() or "the zygote died")
        names.append(set(reply.split()[1:]))
    return _Zygotes(sockets[0], sockets[-1], pids, sorted(names[-1] - names[0]))


def _fork_supervisor(settings: Settings, has_proc: bool, zygotes: _Zygotes) -> _Supervisor:
    """Fork a supervisor, in a process group of its own, where its inits will be too."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)
        theirs.close()
        return _Supervisor(pid, ours)
    try:
        fds = [fcntl.fcntl(end, fcntl.F_DUPFD, 100) for end in (theirs, zygotes.bare, zygotes.warm)]
        for fd, target in zip(fds, (KEEPER_FD, BARE_FD, WARM_FD), strict=True):
            os.dup2(fd, target)
        os.closerange(WARM_FD + 1, 1 << 20)
        supervise(settings, has_proc, zygotes.warm_names)
    finally:
        os._exit(1)


def _private_bytes(pid: int) -> int:
    """Resident bytes of a process that are not backed by files, inherited ones included; 0 if there is no telling."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, shared = file.read().split()[:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _serve(
    control: socket.socket,
    settings: Settings,
    has_proc: bool,
    zygotes: _Zygotes,
    supervisors: dict[int, _Supervisor],
) -> None:
    """Give each connection that arrives to a supervisor, until the trainer closes its end or a zygote dies.

    ``supervisors``, by the descriptor of our socket to each, is kept up to date for the caller.
    """
    poll = select.poll()
    poll.register(control, select.POLLIN)
    for zygote in {zygotes.bare, zygotes.warm}:
        poll.register(zygote, 0)  # hang-up is always reported
    idle: list[_Supervisor] = []
    deadlines: dict[_Supervisor, float] = {}  # of those at work
    budget = settings.timeout_seconds + _KILL_GRACE_SECONDS
    while True:
        now = time.monotonic()
        for supervisor, limit in deadlines.items():
            if limit <= now:
                os.killpg(supervisor.pid, signal.SIGKILL)
        wait = min((max(limit - now, 0.05) for limit in deadlines.values()), default=60.0)
        ready = {fd for fd, _ in poll.poll(wait * 1000)}
        if ready & {zygotes.bare.fileno(), zygotes.warm.fileno()}:
            return
        for fd in ready & supervisors.keys():
            supervisor = supervisors[fd]
            deadlines.pop(supervisor, None)
            word = b""
            with contextlib.suppress(ConnectionError):
                word = supervisor.socket.recv(1)
            if word:  # it has done its work and can do more
                idle.append(supervisor)
                continue
            poll.unregister(fd)
            del supervisors[fd]
            supervisor.socket.close()
            with contextlib.suppress(PermissionError):  # macOS, when all are dead
                os.killpg(supervisor.pid, signal.SIGKILL)  # the init that it may have left
            os.waitpid(supervisor.pid, 0)
            with contextlib.suppress(ChildProcessError):  # not waited for: it ends after its worker has been reaped
                os.waitpid(-supervisor.pid, os.WNOHANG)
            if supervisor in idle:
                idle.remove(supervisor)
        if control.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if not fds:  # a ping
            own = _private_bytes(os.getpid())
            others = [max(0, _private_bytes(supervisor.pid) - own) for supervisor in supervisors.values()]
            control.sendall(PONG.pack(own + sum(map(_private_bytes, zygotes.pids)) + sum(others)))
            continue
        try:
            if idle:
                supervisor = idle.pop()
            else:
                supervisor = _fork_supervisor(settings, has_proc, zygotes)
                supervisors[supervisor.socket.fileno()] = supervisor
                poll.register(supervisor.socket, select.POLLIN)
            deadlines[supervisor] = time.monotonic() + budget
            socket.send_fds(supervisor.socket, [b"E"], fds)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.write(fds[0], infrastructure_frame(f"no supervisor: {error}"))
        finally:
            os.close(fds[0])


def _keep(control: socket.socket, settings: Settings) -> None:
    """Set up the root, start the zygote, report readiness (or what failed), serve, kill what is left."""
    has_proc = True
    parts: list[str] = []
    step = "building the read-only root"
    try:
        if settings.isolate:
            has_proc = linux.build_root(settings.prefixes)
            socket.sethostname("sandbox")
            unprivileged = linux.become_unprivileged()
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            linux.prctl(linux.PR_SET_DUMPABLE, 1)  # becoming another user has made our /proc files root's
            parts = ["user+pid+mount+net+ipc+uts+cgroup namespaces", "read-only root", "private tmpfs /tmp"]
            parts += ["no capabilities", "no-new-privs", "rlimits"]
            parts += ["seccomp filter" if linux.seccomp_program() else "no seccomp filter on this machine type"]
            parts += [] if has_proc else ["no /proc (masked by the container runtime)"]
            parts += [] if unprivileged else ["host uid 0 (no other id is mapped)"]
            inside = [target + os.sep for _, target in settings.prefixes]
            sys.path[:] = [path for path in sys.path if any((path + os.sep).startswith(prefix) for prefix in inside)]
        os.umask(0o022)
        if sys.platform == "linux" and has_proc:
            linux.wipe_arguments_and_environment()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        step = f"importing {', '.join(settings.preload)}"
        zygotes = _start_zygotes(control, settings, has_proc)
    except BaseException as error:
        text = str(error) if isinstance(error, SystemError) else f"{type(error).__name__}: {error}"
        control.sendall(json.dumps({"failed": step, "error": text}).encode() + b"\n")
        return
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, every inherited page
    control.sendall(json.dumps({"isolation": ", ".join(parts)}).encode() + b"\n")
    supervisors: dict[int, _Supervisor] = {}
    _serve(control, settings, has_proc, zygotes, supervisors)
    for pid in zygotes.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for supervisor in supervisors.values():
        os.killpg(supervisor.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def main(control_fd: int) -> None:
    """Entry point: read the settings from the control socket, isolate, become the keeper's parent."""
    control = socket.socket(fileno=control_fd)
    text = b""
    while not text.endswith(b"\n"):
        piece = control.recv(65536)
        if not piece:
            return
        text += piece
    settings = Settings(**json.loads(text))
    if not settings.isolate:
        _keep(control, settings)
        os._exit(0)
    try:
        linux.enter_user_namespace(linux.PRIVATE_NAMESPACES | linux.CLONE_NEWPID)
    except OSError as error:
        control.sendall(json.dumps({"failed": "creating namespaces", "error": str(error)}).encode() + b"\n")
        return
    child = os.fork()
    if child == 0:
        try:
            _keep(control, settings)
        finally:
            os._exit(0)
    control.close()  # the keeper's copy alone keeps the trainer's end from reading end-of-file
    os.waitpid(child, 0)
    os._exit(0)
