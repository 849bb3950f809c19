"""The multi-turn loop: engine and sandbox take turns until each rollout ends. Token-in, token-out.

Two schedules share everything but the waiting. Under ``turns`` the rollouts of a batch move turn by turn together: the
engine always sees the same batches, so the same seed gives the same rollouts, bit for bit, whatever the tools' timing.
Under ``async`` each rollout samples on as soon as its own tool has answered; the seed of every token is the same, but
which rollouts share a batch depends on timing, and with it the last bits of the log-probs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fastir.config import TirConfig
from fastir.data import Problem
from fastir.rollout.engine import Sample, SampleRequest
from fastir.rollout.prompt import TurnFormat
from fastir.rollout.thread import EngineThread
from fastir.tir.feedback import feedback_text
from fastir.tir.grammar import parse_turn
from fastir.tir.sandbox import ExecResult, SandboxBackend, SandboxError
from fastir.types import Failure, FinishReason, IntArray, Trajectory, Turn

#: (result of the execution, the turn's seed address) → what the policy is shown
FeedbackRenderer = Callable[[ExecResult, tuple[int, ...]], str]

Schedule = Literal["turns", "async"]

#: (turn number, code) → its execution
_Run = Callable[[int, str], Awaitable[ExecResult]]


def plain_feedback(result: ExecResult, _: tuple[int, ...]) -> str:
    """`feedback_text`, whatever the address."""
    return feedback_text(result)


@dataclass
class RolloutTimes:
    """Wall seconds spent, added up over calls."""

    generate: float = 0.0  #: the engine had requests in flight
    tool: float = 0.0  #: it had none, and rollouts waited for tools: what generation did not hide


@dataclass(frozen=True)
class RolloutParts:
    """What all rollouts of a run share.

    Args:
        decode: token ids of one policy turn → text without special tokens.
        render: turns an execution into the text shown to the policy.
        share_executions: identical code in the same turn of a batch runs once.
    """

    engine: EngineThread
    sandbox: SandboxBackend
    turn_format: TurnFormat
    tir: TirConfig
    decode: Callable[[Sequence[int]], str]
    render: FeedbackRenderer = plain_feedback
    share_executions: bool = True


@dataclass
class _Open:
    """A rollout under way."""

    problem: Problem
    group: int
    sibling: int
    seed: tuple[int, ...]
    prompt: IntArray
    pieces: list[IntArray]
    masks: list[bool] = field(default_factory=list)  # one per piece after the prompt: policy or not
    logprobs: list[np.ndarray] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    length: int = 0  # tokens so far, prompt included
    finish: FinishReason | None = None
    failure: Failure = ""
    answer: str | None = None

    def context(self) -> IntArray:
        return np.concatenate(self.pieces)

    def append(self, ids: IntArray, logprobs: np.ndarray | None) -> None:
        self.pieces.append(ids)
        self.masks.append(logprobs is not None)
        self.logprobs.append(np.zeros(len(ids), dtype=np.float32) if logprobs is None else logprobs)
        self.length += len(ids)

    def fail(self, failure: Failure) -> None:
        self.finish, self.failure = "failed", failure

    def close(self) -> Trajectory:
        assert self.finish is not None
        prompt = len(self.prompt)
        lengths = [prompt] + [len(piece) for piece in self.pieces[1:]]
        turn_ids = np.full(self.length, -1, dtype=np.int32)
        for index, turn in enumerate(self.turns):
            turn_ids[turn.start : turn.feedback_end] = index
        return Trajectory(
            problem_id=self.problem.id,
            group=self.group,
            sibling=self.sibling,
            prompt_length=prompt,
            token_ids=self.context().astype(np.int32),
            policy_mask=np.repeat([False, *self.masks], lengths),
            turn_ids=turn_ids,
            behavior_logprobs=np.concatenate([np.zeros(prompt, dtype=np.float32), *self.logprobs]),
            weight_version=min(turn.weight_version for turn in self.turns),
            finish_reason=self.finish,
            failure=self.failure,
            turns=tuple(self.turns),
            gold=self.problem.answer,
            answer=self.answer,
            seconds=sum(turn.exec_seconds for turn in self.turns),
        )


async def rollout(
    problems: Sequence[Problem],
    parts: RolloutParts,
    *,
    group_size: int,
    temperature: float,
    seed: tuple[int, ...],
    schedule: Schedule = "turns",
    max_in_flight: int = 1024,
    groups: Sequence[int] | None = None,
    times: RolloutTimes | None = None,
) -> list[Trajectory]:
    """Roll out ``group_size`` siblings of each problem.

    Args:
        seed: address of this batch's randomness; group, sibling and turn are appended.
        max_in_flight: rollouts open at once under the schedule ``async``; under ``turns`` the engine's batch size.
        groups: (problems,) number of each problem's group; by default its position.
        times: adds up where the time went.

    Returns:
        Ungraded trajectories, siblings together, in the order of ``problems``. A rollout whose tool or request failed
        for reasons that are not the model's ends with ``finish_reason`` "failed".

    Raises:
        EngineError: the engine is lost.
    """
    numbers = range(len(problems)) if groups is None else groups
    opened = [
        r
        for group, problem in zip(numbers, problems, strict=True)
        for r in _open(problem, group, group_size, seed, parts)
    ]
    with timed(parts.engine, times or RolloutTimes()):
        if schedule == "async":
            gate = asyncio.Semaphore(max_in_flight)
            async with shared_runs(parts) as run:
                await _all(_play(r, parts, temperature, run, gate) for r in opened)
        else:
            size = parts.engine.engine.batch_size
            for start in range(0, len(opened), size):
                wave = opened[start : start + size]
                while active := [r for r in wave if r.finish is None]:
                    async with shared_runs(parts) as run:
                        samples = parts.engine.submit([_request(r, parts.tir, temperature) for r in active])
                        await _all(_advance(r, s, run, parts) for r, s in zip(active, samples, strict=True))
    return [r.close() for r in opened]


async def roll_group(
    problem: Problem,
    group: int,
    parts: RolloutParts,
    *,
    group_size: int,
    temperature: float,
    seed: tuple[int, ...],
    run: _Run,
    gate: asyncio.Semaphore,
) -> list[Trajectory]:
    """The siblings of one problem under the schedule ``async``, among other groups; see `rollout`.

    Args:
        run: of `shared_runs`, the same for all groups of a batch.
        gate: bounds the rollouts open at once, over all groups.
    """
    opened = _open(problem, group, group_size, seed, parts)
    await _all(_play(r, parts, temperature, run, gate) for r in opened)
    return [r.close() for r in opened]


@contextmanager
def timed(engine: EngineThread, times: RolloutTimes) -> Iterator[None]:
    """Add the wall time inside to ``times``: the engine's part, and the rest."""
    began, busy = time.perf_counter(), engine.busy_seconds
    try:
        yield
    finally:
        generate = engine.busy_seconds - busy
        times.generate += generate
        times.tool += max(0.0, time.perf_counter() - began - generate)


@asynccontextmanager
async def shared_runs(parts: RolloutParts) -> AsyncIterator[_Run]:
    """The sandbox's ``run``; with ``share_executions``, code seen before in the same turn waits for the first one's
    result. A failure of the sandbox is not shared: it costs one rollout."""
    running: dict[tuple[int, str], asyncio.Task[ExecResult]] = {}

    async def run(turn: int, code: str) -> ExecResult:
        first = (turn, code) not in running
        if first:
            running[turn, code] = asyncio.ensure_future(parts.sandbox.run(code))
        try:
            return await asyncio.shield(running[turn, code])  # who is cancelled leaves it to the others
        except SandboxError:
            if first:
                raise
            return await parts.sandbox.run(code)

    try:
        yield run if parts.share_executions else lambda _, code: parts.sandbox.run(code)
    finally:
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


def _open(problem: Problem, group: int, group_size: int, seed: tuple[int, ...], parts: RolloutParts) -> list[_Open]:
    prompt = parts.turn_format.prompt(problem)
    return [
        _Open(problem, group, sibling, (*seed, group, sibling), prompt, [prompt], length=len(prompt))
        for sibling in range(group_size)
    ]


async def _all(steps: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them together; the first error ends all of them."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _play(r: _Open, parts: RolloutParts, temperature: float, run: _Run, gate: asyncio.Semaphore) -> None:
    """One rollout from its first turn to its end."""
    async with gate:
        while r.finish is None:
            (sample,) = parts.engine.submit([_request(r, parts.tir, temperature)])
            await _advance(r, sample, run, parts)


def _request(r: _Open, tir: TirConfig, temperature: float) -> SampleRequest:
    return SampleRequest(r.seed, r.context(), _turn_budget(r, tir), (*r.seed, len(r.turns)), temperature)


def _turn_budget(r: _Open, tir: TirConfig) -> int:
    return min(tir.turn_tokens, tir.response_tokens - (r.length - len(r.prompt)))


async def _advance(r: _Open, sampling: Awaitable[Sample], run: _Run, parts: RolloutParts) -> None:
    """Take one turn as soon as it is sampled: run its code, then end the rollout or append the feedback."""
    sample = await sampling
    tir = parts.tir
    budget = _turn_budget(r, tir)
    start = r.length
    r.append(sample.token_ids, sample.logprobs)
    text = parts.decode(sample.token_ids.tolist())
    parsed = parse_turn(text)
    answer, shown, result = parsed.answer, "", None
    if sample.stop == "aborted" or not np.isfinite(sample.logprobs).all():
        r.fail("engine")
    elif parsed.code is not None:
        try:
            result = await run(len(r.turns), parsed.code)
        except SandboxError as error:
            r.fail("tool")
            shown = f"(the tool failed: {error})"  # for the log; the policy never sees it
        else:
            if result.answer is not None:  # the block ends the turn, so it spoke last
                answer = result.answer
            shown = parts.render(result, (*r.seed, len(r.turns)))
    out_of_tokens = sample.stop == "length" and budget < tir.turn_tokens
    feedback_ids: IntArray = np.empty(0, dtype=np.int32)
    if r.finish is None:
        if answer is not None:
            r.finish, r.answer = "answer", answer
        elif out_of_tokens and parsed.is_void:
            r.finish = "token_budget"
        elif parsed.is_void:
            r.finish = "void"
        elif len(r.turns) + 1 >= tir.max_turns:
            r.finish = "max_turns"
        else:
            shown, feedback_ids = parts.turn_format.between(shown, sample.token_ids)
            used = r.length - len(r.prompt) + len(feedback_ids)
            if used >= tir.response_tokens:
                r.finish, feedback_ids = "token_budget", feedback_ids[:0]
    end = r.length
    if len(feedback_ids):
        r.append(feedback_ids, None)
    r.turns.append(
        Turn(
            start=start,
            end=end,
            feedback_end=r.length,
            text=text,
            code=parsed.code,
            answer=answer,
            is_void=parsed.is_void and r.failure != "engine",
            truncated=sample.stop == "length",
            feedback=shown,
            exec_status=None if result is None else result.status,
            exec_seconds=0.0 if result is None else result.seconds,
            weight_version=sample.weight_version,
        )
    )
