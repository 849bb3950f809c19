"""The reward: does the policy's final answer equal the gold answer?

Most answers are settled by their text in microseconds (`fastir.tir.answers`). The rest go to math-verify in worker
processes that the grader kills when an answer exceeds its wall-clock limit, so that no answer can hang or crash the
trainer: one that overruns, and one whose worker died, count apart from wrong ones. Workers start at the first answer
that needs one, and run this file as a program, so they inherit neither threads nor memory of the trainer.

The grader sees the policy's answer and the gold answer, never tool output.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fastir.tir.answers import normalise, python_to_latex, quick_grade

START_SECONDS = 120.0  # importing sympy on a busy machine; not part of an answer's limit
WORKER_MEMORY_BYTES = 2 << 30  # address space of a worker: a monstrous power ends in a counted failure

GradeStatus = Literal["ok", "timeout", "failed", "no_answer"]


@dataclass(frozen=True)
class GradeResult:
    """A verdict.

    Attributes:
        correct: the answer equals the gold answer; only ever True with status "ok".
        status: "ok": judged. "no_answer": there was none, or a blank one. "timeout": over the limit. "failed": the
            worker died or could not judge. The last two say nothing about the answer.
    """

    correct: bool
    status: GradeStatus


@dataclass(frozen=True)
class GraderStats:
    """Counts since the grader was made; ``graded`` is the total, ``quick`` those settled without a worker."""

    graded: int = 0
    quick: int = 0
    no_answer: int = 0
    timeouts: int = 0
    failed: int = 0
    worker_starts: int = 0


class Grader:
    """Grades answers from any number of threads with at most ``workers`` processes. A context manager.

    Args:
        workers: processes, at least 1.
        timeout_seconds: wall-clock limit for judging one answer, waiting for a free worker excluded.

    Raises:
        ValueError: when an argument is out of range.
        ImportError: when math-verify is not installed.
    """

    def __init__(self, workers: int = 2, timeout_seconds: float = 5.0) -> None:
        if workers < 1:
            raise ValueError(f"reward.workers is {workers}; at least 1 is needed")
        if timeout_seconds <= 0:
            raise ValueError(f"reward.timeout_seconds is {timeout_seconds}; it must be positive")
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("grading needs math-verify: pip install 'fastir[train]'")
        self.workers = workers
        self.timeout_seconds = timeout_seconds
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()  # None: a worker yet to start
        for _ in range(workers):
            self._slots.put(None)
        self._lock = threading.Lock()
        self._alive: set[_Worker] = set()
        self._stats = GraderStats()
        self._closed = False

    def grade(self, answer: str | None, gold: str, *, by_text: bool = True) -> GradeResult:
        """Judge one answer; thread-safe.

        Args:
            answer: the policy's final answer, or None.
            gold: the gold answer.
            by_text: False skips the quick judgement by text and asks math-verify, whatever the answer: for checking it.

        Raises:
            RuntimeError: when the grader is closed, or a worker cannot start.
        """
        if self._closed:
            raise RuntimeError("the grader is closed")
        if answer is None or not answer.strip():
            self._count(graded=1, no_answer=1)
            return GradeResult(False, "no_answer")
        verdict = quick_grade(answer, gold) if by_text else None
        if verdict is not None:
            self._count(graded=1, quick=1)
            return GradeResult(verdict, "ok")
        result = self._grade_in_worker(answer, gold)
        self._count(graded=1, timeouts=result.status == "timeout", failed=result.status == "failed")
        return result

    def grade_many(self, pairs: Iterable[tuple[str | None, str]], *, by_text: bool = True) -> list[GradeResult]:
        """Judge (answer, gold) pairs on all workers; verdicts in the order of the pairs."""
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(lambda pair: self.grade(*pair, by_text=by_text), pairs))

    async def grade_async(self, answer: str | None, gold: str) -> GradeResult:
        """Judge one answer without blocking the event loop."""
        return await asyncio.to_thread(self.grade, answer, gold)

    @property
    def stats(self) -> GraderStats:
        """Counts so far."""
        with self._lock:
            return self._stats

    def close(self) -> None:
        """Kill every worker, busy ones too (their answers come back "failed"). Closing twice is harmless."""
        with self._lock:
            self._closed = True
            workers, self._alive = self._alive, set()
        for worker in workers:
            worker.kill()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grade_in_worker(self, answer: str, gold: str) -> GradeResult:
        worker = self._slots.get()
        try:
            if worker is None or not worker.is_alive():
                self._discard(worker)
                worker = None  # a start that raises leaves an empty slot
                worker = self._start_worker()
                if worker is None:
                    return GradeResult(False, "failed")
            reply = worker.ask({"answer": answer, "gold": gold}, self.timeout_seconds)
            if reply in ("timeout", "died"):
                self._discard(worker)
                worker = None
                return GradeResult(False, "timeout" if reply == "timeout" else "failed")
            return GradeResult(reply == "correct", "failed" if reply == "failed" else "ok")
        finally:
            self._slots.put(worker)

    def _start_worker(self) -> _Worker | None:
        """A worker that is ready; None if a signal killed it while it started, which says nothing of the next."""
        worker = _Worker(self.timeout_seconds)
        with self._lock:
            self._stats = replace(self._stats, worker_starts=self._stats.worker_starts + 1)
            closed = self._closed
            if not closed:
                self._alive.add(worker)
        if closed:
            worker.kill()
            raise RuntimeError("the grader is closed")
        if worker.read(START_SECONDS) != "ready":
            died = worker.process.poll() is not None or worker.read(0.0) == "died"
            self._discard(worker)
            if died and worker.process.returncode == -signal.SIGKILL:
                return None
            raise RuntimeError(
                f"a grader worker did not start within {START_SECONDS:g} s (exit code {worker.process.returncode}); "
                "its own message is on standard error"
            )
        return worker

    def _discard(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.kill()
            with self._lock:
                self._alive.discard(worker)

    def _count(self, **increments: int) -> None:
        with self._lock:
            self._stats = replace(self._stats, **{k: getattr(self._stats, k) + v for k, v in increments.items()})


class _Worker:
    """One worker process and its pipes; used by one thread at a time, except for `kill`."""

    def __init__(self, timeout_seconds: float) -> None:
        package_root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(timeout_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # an interrupt at the terminal is the trainer's business
        )
        self._buffer = b""

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, request: dict[str, str], timeout_seconds: float) -> str:
        """The worker's reply to one request, or "timeout", or "died"."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except (OSError, ValueError):  # a closed pipe
            return "died"
        return self.read(timeout_seconds)

    def read(self, timeout_seconds: float) -> str:
        """One line from the worker, or "timeout", or "died" when it ends first."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        poll = select.poll()
        try:
            poll.register(self.process.stdout, select.POLLIN)
            while b"\n" not in self._buffer:
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    return "timeout"
                chunk = os.read(self.process.stdout.fileno(), 4096)
                if not chunk:
                    return "died"
                self._buffer += chunk
        except (OSError, ValueError):  # closed under our hands by `kill`
            return "died"
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        """End the process and reap it."""
        self.process.kill()
        self.process.wait()


_default_grader: Grader | None = None
_default_lock = threading.Lock()


def grade(answer: str | None, gold: str) -> bool:
    """True when ``answer`` equals ``gold``, judged by a grader of this process with one worker and 5 s per answer.

    No answer, a timeout and a failure are False; use a `Grader` to tell them apart.
    """
    global _default_grader
    with _default_lock:
        if _default_grader is None:
            _default_grader = Grader(workers=1)
            atexit.register(_default_grader.close)
    return _default_grader.grade(answer, gold).correct


def gsm8k_answer(solution: str) -> str:
    """The gold answer of a GSM8K solution: what follows the last ``####``, without thousands separators.

    Raises:
        ValueError: when nothing follows, or there is no ``####``.
    """
    _, mark, answer = solution.rpartition("####")
    answer = answer.strip().replace(",", "")
    if not mark or not answer:
        raise ValueError("a GSM8K answer must end in '#### N'")
    return answer


# --- the worker program ---------------------------------------------------------------------------------------------


def _judge(answer: str, gold: str) -> str:
    """One word: "correct", "wrong", or "failed" when the gold answer cannot be read or comparing raises.

    Both are parsed as the content of one ``\\boxed{}``, so that the whole answer counts and not its last number;
    math-verify's own limits are off: they rest on an alarm that fails outside the main thread.
    """
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Basic, Eq, MatrixBase

    def read(text: str) -> list[Any]:
        text = python_to_latex(normalise(text)).replace("\\boxed", "")
        configs = [LatexExtractionConfig(boxed_match_priority=0)]
        return parse(f"\\boxed{{{text}}}", configs, parsing_timeout=None, raise_on_error=True)  # type: ignore[arg-type]

    try:
        wanted = read(gold)
        if not any(isinstance(e, Basic | MatrixBase) for e in wanted):
            return "failed"
    except Exception:
        return "failed"
    try:
        given = read(answer)
    except MemoryError:
        return "failed"
    except Exception:  # the answer is not mathematics
        return "wrong"
    try:
        equations = [eq for e in given if isinstance(e, Basic) for eq in e.atoms(Eq) if not eq.free_symbols]
        if any(not eq.lhs.equals(eq.rhs) for eq in equations):  # math-verify would take 17 = 18 for 18
            return "wrong"
        return "correct" if verify(wanted, given, timeout_seconds=None, raise_on_error=True) else "wrong"
    except Exception:
        return "failed"


def _worker_main(timeout_seconds: float) -> None:
    """Read one JSON request a line, write one word a line, until the pipe closes."""
    import logging
    import resource

    replies = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # nothing a library prints can look like a reply
    logging.disable(logging.CRITICAL)
    _judge("x+1", "1+x")  # import and warm up before the clock of an answer runs
    # Not every system limits address space; the time limit holds without.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, WORKER_MEMORY_BYTES))
    print("ready", file=replies)
    os.dup2(nowhere, 2)  # from here on only what answers provoke
    for line in sys.stdin:
        # The trainer enforces the limit by killing this process. The alarm's default action ends an orphan whose
        # trainer was killed while this computed.
        signal.setitimer(signal.ITIMER_REAL, 2 * timeout_seconds + 1)
        reply = _judge(**json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(reply, file=replies)


if __name__ == "__main__":
    _worker_main(float(sys.argv[1]))
