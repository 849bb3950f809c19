"""The script that is sent to a remote service around the policy's code, so that results read like the local sandbox's.

A service runs whole Python scripts and returns stdout, stderr and an exit code. This file's text, followed by a call of
`run_as_script`, is such a script: it gives the code ``final_answer`` and the limits of the local sandbox, runs it as
``__main__``, and writes what happened to stderr, in lines that carry a mark which only the client knows. It depends on
nothing but the standard library and this file.
"""

import json
import os
import sys


def run_as_script(code: str, mark: str, cpu_seconds: int, memory_bytes: int, spare_bytes: int) -> None:
    """Run ``code``; ends the process with status 1 if it failed.

    Lines to stderr: ``<mark>A <json text>`` for each answer, ``<mark>E <json object>`` at the end (``status``:
    "ok", "error" or "memory"; ``error``, ``trace``, ``seconds``, ``cpu``, ``peak``).
    """
    import builtins
    import contextlib
    import linecache
    import random
    import resource
    import time
    import traceback
    import types

    descriptor, worker = os.dup(2), os.getpid()
    dumps, write, getpid, to_text = json.dumps, os.write, os.getpid, str
    usage, clock, getrusage = resource.RUSAGE_SELF, time.monotonic, resource.getrusage
    children, set_limit, space = resource.RUSAGE_CHILDREN, resource.setrlimit, resource.RLIMIT_AS
    clear, update, exc_info, leave = dict.clear, dict.update, sys.exc_info, sys.exit
    format_all, format_last = traceback.format_exception, traceback.format_exception_only
    name_of = type.__dict__["__name__"].__get__

    def tell(kind: str, value: object) -> None:
        data = f"\n{mark}{kind} {dumps(value)}\n".encode()
        while data:
            data = data[write(descriptor, data) :]

    def final_answer(*values: object) -> None:
        """Give the final answer. With several values it is their tuple; the last call counts."""
        if not values:
            raise TypeError("final_answer() needs a value")
        text = to_text(values[0] if len(values) == 1 else values)
        tell("A", text.encode("utf-8", "backslashreplace").decode("utf-8"))

    final_answer.__module__ = "builtins"

    def describe(error):  # type: ignore[no-untyped-def]
        """State, last traceback line and whole traceback, the latter without this file's own frame."""
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return "ok", "", ""
        status = "error"
        try:
            if isinstance(error, MemoryError):
                status = "memory"
                set_limit(space, (hard_space, hard_space))
            trace = error.__traceback__.tb_next if error.__traceback__ else None
            lines = format_all(type(error), error, trace, limit=-50)
            return status, format_last(type(error), error)[-1].strip(), "".join(lines)
        except BaseException:
            return status, name_of(type(error)), ""

    def resident(name: bytes) -> int:
        """Bytes of memory: ``VmRSS`` now, ``VmHWM`` at most; 0 if unknown. Not ru_maxrss, which exec does not reset."""
        try:
            with open("/proc/self/status", "rb") as file:
                return int(file.read().partition(name)[2].split()[0]) * 1024
        except (OSError, MemoryError, IndexError):
            return 0

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    limits = [(resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1)]
    try:
        with open("/proc/self/statm") as file:
            base = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limits += [(space, base + memory_bytes, base + memory_bytes + spare_bytes)]
    except OSError:  # no /proc: the service's own limit has to do
        pass
    for kind, soft, hard in limits:
        with contextlib.suppress(OSError, ValueError):  # the service's own limit is tighter
            set_limit(kind, (soft, hard))
    hard_space = resource.getrlimit(space)[1]
    random.seed(0)
    builtins.final_answer = final_answer  # type: ignore[attr-defined]
    names = builtins.__dict__
    pristine = dict(names)
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv[:] = ["main.py"]
    linecache.cache["<code>"] = (len(code), None, code.splitlines(keepends=True), "<code>")
    status, last, trace = "ok", "", ""
    base, before, began = resident(b"VmRSS:"), getrusage(usage), clock()
    try:
        exec(compile(code, "<code>", "exec", dont_inherit=True), module.__dict__)
    except:  # noqa: E722 -- the code may have taken the name BaseException away
        error = exc_info()[1]
        clear(names)
        update(names, pristine)
        status, last, trace = describe(error)  # type: ignore[no-untyped-call]
    clear(names)
    update(names, pristine)
    if getpid() == worker:  # a forked child that runs to the end is not the script
        own, others = getrusage(usage), getrusage(children)
        cpu = own.ru_utime + own.ru_stime - before.ru_utime - before.ru_stime + others.ru_utime + others.ru_stime
        peak = max(resident(b"VmHWM:"), others.ru_maxrss * 1024) - base if base else 0
        clean = [text.encode("utf-8", "backslashreplace").decode("utf-8") for text in (last, trace)]
        result = {"status": status, "error": clean[0], "trace": clean[1], "seconds": clock() - began}
        tell("E", {**result, "cpu": cpu, "peak": max(peak, 0)})
    if status != "ok":
        leave(1)
