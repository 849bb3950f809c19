"""The engine in a thread of its own, stepping while anything is in flight; the event loop only waits for samples."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from fastir.rollout.engine import Engine, Sample, SampleRequest

T = TypeVar("T")


class EngineThread:
    """Requests go in, awaitable samples come out. Every call of the engine is made in this thread.

    Args:
        engine: used by nobody else until `close`, which closes it too.
        threads: CPU threads of torch for the engine.
    """

    def __init__(self, engine: Engine, threads: int = 1) -> None:
        self.engine = engine
        self.busy_seconds = 0.0  #: wall time with requests in flight
        self._threads = threads
        self._commands: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._in_flight: dict[tuple[int, ...], Future[Sample]] = {}  # only the thread looks at it
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[SampleRequest]) -> list[asyncio.Future[Sample]]:
        """Hand over requests, all of them before the engine's next step; call it on an event loop.

        The futures raise what the engine raised: `fastir.rollout.engine.EngineError` when it is lost. Cancelling one
        aborts its request.
        """
        futures: list[Future[Sample]] = [Future() for _ in requests]
        self._commands.put(lambda: self._add(requests, futures))
        return [asyncio.wrap_future(future) for future in futures]

    async def call(self, function: Callable[[Engine], T]) -> T:
        """``function(engine)``, made between two steps."""
        future: Future[T] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self.engine))
                except BaseException as error:
                    future.set_exception(error)

        self._commands.put(command)
        return await asyncio.wrap_future(future)

    def close(self, timeout: float = 60.0) -> None:
        """Close the engine and end the thread; an engine that does not come back within ``timeout`` is left behind."""
        self._commands.put(None)
        self._thread.join(timeout)

    def _add(self, requests: Sequence[SampleRequest], futures: Sequence[Future[Sample]]) -> None:
        for request, future in zip(requests, futures, strict=True):
            if self._error is not None:
                _fail(future, self._error)
                continue
            earlier = self._in_flight.get(request.key)
            if earlier is not None and not earlier.cancelled():
                _fail(future, ValueError(f"SampleRequest.key {request.key} is in flight already"))
                continue
            try:
                if earlier is not None:
                    self.engine.abort([request.key])
                self.engine.add(request)
            except Exception as error:
                _fail(future, error)
            else:
                self._in_flight[request.key] = future

    def _work(self) -> None:
        enter_thread(self._threads)
        try:
            while self._obey():
                self._step()
        finally:
            self.engine.close()

    def _obey(self) -> bool:
        """Carry out the commands that have come; with nothing in flight, wait for one. False: end."""
        try:
            while True:
                command = self._commands.get(block=not self._in_flight)
                if command is None:
                    return False
                command()
        except queue.Empty:
            return True

    def _step(self) -> None:
        began = time.perf_counter()
        try:
            dropped = [key for key, future in self._in_flight.items() if future.cancelled()]
            if dropped:
                self.engine.abort(dropped)
                for key in dropped:
                    del self._in_flight[key]
            for key, sample in self.engine.step() if self._in_flight else []:
                future = self._in_flight.pop(key)
                if future.set_running_or_notify_cancel():
                    future.set_result(sample)
        except BaseException as error:  # whatever it is, those who wait must hear of it
            self._error = error
            for future in self._in_flight.values():
                _fail(future, error)
            self._in_flight.clear()
        self.busy_seconds += time.perf_counter() - began


def enter_thread(threads: int) -> None:
    """What torch keeps per thread: the number of CPU threads, and the CUDA device."""
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def _fail(future: Future[Sample], error: BaseException) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
