"""The process that runs model-written code: applies the limits to itself, executes, records the outcome.

It holds three descriptors: /dev/null and the write ends of two pipes. Its outcome and ``final_answer`` travel in
anonymous shared memory, so nothing that is printed, or written to or closed as a descriptor, can be taken for them.
"""

from __future__ import annotations

import atexit
import builtins
import linecache
import math
import mmap
import os
import random
import resource
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import NamedTuple

if sys.platform == "linux":
    from fastir.tir import sandbox_linux as linux

RUNNING, FINISHED, RAISED, OUT_OF_MEMORY = range(4)
ERROR_BYTES, TRACEBACK_BYTES, ANSWER_BYTES = 4096, 32768, 16384
_CODE_NAME = "<code>"
_SPARE_BYTES = 32 << 20  # above the memory limit, to write down the MemoryError


class Settings(NamedTuple):
    """What the zygote is told: ``SandboxConfig`` in plain numbers, and where the read-only tree comes from."""

    isolate: bool
    timeout_seconds: float
    cpu_seconds: float
    memory_bytes: int
    processes: int
    output_bytes: int
    tmp_bytes: int
    preload: list[str]
    prefixes: list[tuple[str, str]]  # (real path on the host, path inside)
    scratch: str  # without isolation: a directory for working directories


class Record:
    """Outcome and answer of one execution, in memory shared by the worker (writes) and its supervisor (reads)."""

    _ERROR = 2
    _TRACEBACK = _ERROR + 4 + ERROR_BYTES
    _ANSWERS = (_TRACEBACK + 4 + TRACEBACK_BYTES, _TRACEBACK + 4 + TRACEBACK_BYTES + 4 + ANSWER_BYTES)
    _SIZE = _ANSWERS[1] + 4 + ANSWER_BYTES

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._SIZE)

    def _put(self, offset: int, data: bytes, limit: int) -> None:
        data = data[:limit]
        self._memory[offset : offset + 4 + len(data)] = len(data).to_bytes(4, "little") + data

    def _get(self, offset: int, limit: int) -> bytes:
        length = min(int.from_bytes(self._memory[offset : offset + 4], "little"), limit)
        return self._memory[offset + 4 : offset + 4 + length]

    def set_answer(self, data: bytes) -> None:
        """Replace the answer. The old one stays valid until the new one is complete."""
        slot = 1 if self._memory[1] != 1 else 2
        self._put(self._ANSWERS[slot - 1], data, ANSWER_BYTES)
        self._memory[1] = slot

    def finish(self, state: int, error: bytes = b"", trace: bytes = b"") -> None:
        """Write the outcome; ``state`` last, so a half-written record still reads as running."""
        self._put(self._ERROR, error, ERROR_BYTES)
        self._put(self._TRACEBACK, trace, TRACEBACK_BYTES)
        self._memory[0] = state

    def state(self) -> int:
        return self._memory[0]

    def error(self) -> bytes:
        return self._get(self._ERROR, ERROR_BYTES)

    def trace(self) -> bytes:
        return self._get(self._TRACEBACK, TRACEBACK_BYTES)

    def answer(self) -> bytes | None:
        slot = self._memory[1]
        return self._get(self._ANSWERS[slot - 1], ANSWER_BYTES) if slot in (1, 2) else None


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


def _describe(error: BaseException) -> tuple[bytes, bytes]:
    """The last traceback line and the whole traceback, without this module's own frame."""
    try:
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        lines = traceback.format_exception(type(error), error, trace, limit=-50)
        last = traceback.format_exception_only(type(error), error)[-1]
        return _encode(last.strip()), _encode("".join(lines))
    except BaseException:  # the code may have broken the traceback module, or memory is gone
        name = type.__dict__["__name__"].__get__(type(error))
        return _encode(name), b""


def run_code(code: bytes, record: Record) -> None:
    """Execute ``code`` as ``__main__`` and write the outcome to ``record``."""
    pristine = dict(builtins.__dict__)
    restore_clear, restore_update, exit_now, getpid = dict.clear, dict.update, os._exit, os.getpid
    out, err, join_threads, run_exit_functions = sys.stdout, sys.stderr, threading._shutdown, atexit._run_exitfuncs
    worker = getpid()
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    builtins.__dict__["final_answer"] = _make_final_answer(record)
    state, error_line, trace = FINISHED, b"", b""
    try:
        text = code.decode("utf-8", "surrogatepass")
        linecache.cache[_CODE_NAME] = (len(text), None, text.splitlines(keepends=True), _CODE_NAME)
        exec(compile(text, _CODE_NAME, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        restore_clear(builtins.__dict__)
        restore_update(builtins.__dict__, pristine)
        if isinstance(error, MemoryError):
            state = OUT_OF_MEMORY
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        elif not isinstance(error, SystemExit) or error.code not in (None, 0):
            state = RAISED
        if state != FINISHED:
            error_line, trace = _describe(error)
    finally:
        restore_clear(builtins.__dict__)
        restore_update(builtins.__dict__, pristine)
    for last_rite in (
        join_threads,
        run_exit_functions,
        sys.stdout.flush if sys.stdout else getpid,
        out.flush,
        err.flush,
    ):
        try:
            last_rite()
        except BaseException:  # a closed stdout, a raising exit function: the outcome is known already
            continue
    if getpid() == worker:  # a forked child that runs to the end is not the script
        record.finish(state, error_line, trace)
    exit_now(0)


def _open_standard_streams() -> None:
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    # Line-buffered, so that what was printed before a time-out is not lost.
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
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


def _seed() -> None:
    """The same random numbers in every execution, unless the code asks otherwise."""
    random.seed(0)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(0)  # type: ignore[attr-defined]
        entropy = random.Random(0)
        # Where default_rng() without a seed takes its entropy from.
        sys.modules["numpy.random.bit_generator"].randbits = entropy.getrandbits  # type: ignore[attr-defined]


def prepare(settings: Settings, pipes: tuple[int, int, int], base_bytes: int, seccomp: bytes | None) -> None:
    """Turn a fresh fork of the supervisor into a worker: descriptors, limits, standard streams, seeds.

    ``pipes`` become descriptors 1 (stdout), 2 (stderr) and 3 (on which the caller reports that all went well, and which
    it closes before the code runs). ``base_bytes`` of address space are in use already.
    """
    os.setsid()
    null = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((pipes[2], 3), (pipes[0], 1), (pipes[1], 2), (null, 0)):
        os.dup2(source, target)
    os.closerange(4, 1 << 20)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _confine(settings, base_bytes, seccomp)
    _open_standard_streams()
    _seed()
