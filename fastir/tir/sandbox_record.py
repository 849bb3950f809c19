"""What the sandbox's processes share: the settings, and the record of one execution. Imports little: see the keeper."""

from __future__ import annotations

import mmap
import os
import struct
import sys
from typing import NamedTuple, Self

if sys.platform == "linux":
    from fastir.tir import sandbox_linux as linux

RUNNING, FINISHED, RAISED, OUT_OF_MEMORY = range(4)
ERROR_BYTES, TRACEBACK_BYTES, ANSWER_BYTES = 4096, 32768, 16384
SETUP = struct.Struct("<iqq")  # a worker's report before the code starts: its pid, its virtual and resident bytes
ENDED = struct.Struct("<idq")  # how a worker ended: wait status, CPU seconds, largest resident size in bytes


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
    _DIRECTORY = _ANSWERS[1] + 4 + ANSWER_BYTES
    _CODE = _DIRECTORY + 4 + 4096

    _memory: mmap.mmap

    def map(self, fd: int) -> None:
        """Map the record that lies in the file ``fd``; the descriptor may be closed afterwards."""
        self._memory = mmap.mmap(fd, 0)

    @classmethod
    def create(cls, fd: int, directory: str, code: bytes) -> Self:
        """Lay out a new record, with what the worker is to do, in the empty file ``fd``."""
        os.ftruncate(fd, cls._CODE + 4 + len(code))
        record = cls()
        record.map(fd)
        record._put(cls._DIRECTORY, directory.encode(), 4096)
        record._put(cls._CODE, code, len(code))
        return record

    def close(self) -> None:
        self._memory.close()

    def code(self) -> bytes:
        return self._get(self._CODE, len(self._memory))

    def directory(self) -> str:
        return self._get(self._DIRECTORY, 4096).decode()

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


def fork_into(pid_namespace: int, own: int) -> int:
    """Fork a child that starts in another pid namespace, the one that the descriptor ``pid_namespace`` refers to.

    ``own`` is a pidfd of this process, to come back to its own namespace for later children; -1: no isolation.
    """
    if own < 0:
        return linux.fork() if sys.platform == "linux" else os.fork()
    linux.setns(pid_namespace, linux.CLONE_NEWPID)  # for the next child, not for us
    pid = -1
    try:
        pid = linux.fork()
    finally:
        if pid:
            linux.setns(own, linux.CLONE_NEWPID)
    return pid
