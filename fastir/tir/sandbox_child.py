"""The processes behind the sandbox, started by ``sandbox.py`` with a clean exec. This file: launcher and keeper.

launcher   started with an empty environment; enters the outer namespaces, forks the keeper, waits for it.
keeper     pid 1 of the outer pid namespace. Builds the read-only root. Forks one supervisor per execution; stays
           small, so that this is cheap. It never sees code or output: each request is one end of a socket pair
           that goes to the supervisor.
zygote     the keeper's child with numpy and sympy imported. Forks one worker per execution into the namespaces of
           the supervisor that asks, and reports how the worker ended.
supervisor pid 1 of a pid namespace of its own, with its own mount, network, ipc, uts and cgroup namespaces. Has a
           worker forked, reads its output, enforces the limits, writes the result. When it ends, the kernel kills
           everything inside, however daemonised or signal-proof.
worker     runs the code (``sandbox_worker``) in one more user namespace, without capabilities, under seccomp and
           rlimits.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from typing import NamedTuple, NoReturn

from fastir.tir import sandbox_worker
from fastir.tir.sandbox_record import Settings, fork_into
from fastir.tir.sandbox_supervisor import KEEPER_FD, PRIVATE_NAMESPACES, ZYGOTE_FD, frame, supervise

if sys.platform == "linux":
    from fastir.tir import sandbox_linux as linux

_KILL_GRACE_SECONDS = 0.6  # after the time limit the keeper kills a supervisor that has not ended by itself


class _Supervisor(NamedTuple):
    pid: int
    socket: socket.socket


def _fork_supervisor(settings: Settings, has_proc: bool, zygote: int, own: int) -> _Supervisor:
    """Fork a supervisor, as pid 1 of a new pid namespace."""
    ours, theirs = socket.socketpair()
    pid = fork_into(-1, own)
    if pid:
        theirs.close()
        return _Supervisor(pid, ours)
    try:
        zygote = os.dup(zygote)
        os.dup2(theirs.fileno(), KEEPER_FD)
        os.dup2(zygote, ZYGOTE_FD)
        os.closerange(ZYGOTE_FD + 1, 1 << 20)
        supervise(settings, has_proc)
    finally:
        os._exit(1)


def _serve(
    control: socket.socket,
    settings: Settings,
    has_proc: bool,
    zygote: socket.socket,
    supervisors: dict[int, _Supervisor],
) -> None:
    """Give each connection that arrives to a supervisor, until the trainer closes its end or the zygote dies.

    ``supervisors``, by the descriptor of our socket to each, is kept up to date for the caller.
    """
    own = os.pidfd_open(os.getpid()) if settings.isolate else -1
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(zygote, 0)  # hang-up is always reported
    idle: list[_Supervisor] = []
    deadlines: dict[_Supervisor, float] = {}  # of those at work
    budget = settings.timeout_seconds + _KILL_GRACE_SECONDS
    while True:
        now = time.monotonic()
        for supervisor, limit in deadlines.items():
            if limit <= now:
                os.kill(supervisor.pid, signal.SIGKILL)
        wait = min((max(limit - now, 0.05) for limit in deadlines.values()), default=60.0)
        ready = {fd for fd, _ in poll.poll(wait * 1000)}
        if zygote.fileno() in ready:
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
            os.waitpid(supervisor.pid, 0)
            if supervisor in idle:
                idle.remove(supervisor)
        if control.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if not fds:  # a ping
            control.sendall(b"p")
            continue
        try:
            if idle:
                supervisor = idle.pop()
            else:
                supervisor = _fork_supervisor(settings, has_proc, zygote.fileno(), own)
                supervisors[supervisor.socket.fileno()] = supervisor
                poll.register(supervisor.socket, select.POLLIN)
            deadlines[supervisor] = time.monotonic() + budget
            socket.send_fds(supervisor.socket, [b"E"], fds)
        except OSError as error:
            text = f"no supervisor: {error}".encode()
            with contextlib.suppress(OSError):
                os.write(fds[0], frame("infrastructure", 0.0, b"", b"", text, b"", None))
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
            linux.prctl(linux.PR_SET_DUMPABLE, 1)  # the zygote's workers join our supervisors' namespaces
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
        ours, theirs = socket.socketpair()
        zygote_pid = os.fork()
        if zygote_pid == 0:
            control.close()
            ours.close()
            _become_zygote(theirs, settings)
        theirs.close()
        reply = ours.recv(65536)
        if reply != b"ready":
            raise SystemError(reply.decode() or "the zygote died")
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
    _serve(control, settings, has_proc, ours, supervisors)
    for pid in (zygote_pid, *(supervisor.pid for supervisor in supervisors.values())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _become_zygote(requests: socket.socket, settings: Settings) -> NoReturn:
    """Become the zygote."""
    try:
        sandbox_worker.serve(requests, settings)
    finally:
        os._exit(1)


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
        linux.enter_user_namespace(PRIVATE_NAMESPACES | linux.CLONE_NEWPID)
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
