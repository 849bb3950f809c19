"""The multi-turn loop: engine and sandbox take turns until each rollout ends. Token-in, token-out.

The engine's batch moves turn by turn in a fixed order, so the same seed gives the same rollouts whatever the tools'
timing. A rollout's code starts to run as soon as its turn is complete, while others still sample.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from fastir.config import TirConfig
from fastir.data import Problem
from fastir.rollout.engine import Engine, Sample, SampleRequest
from fastir.rollout.prompt import TurnFormat
from fastir.tir.feedback import feedback_text
from fastir.tir.grammar import parse_turn
from fastir.tir.sandbox import ExecResult, SandboxBackend, SandboxError
from fastir.types import FinishReason, IntArray, Trajectory, Turn

#: (result of the execution, the turn's seed address) → what the policy is shown
FeedbackRenderer = Callable[[ExecResult, tuple[int, ...]], str]


def plain_feedback(result: ExecResult, _: tuple[int, ...]) -> str:
    """`feedback_text`, whatever the address."""
    return feedback_text(result)


@dataclass
class RolloutTimes:
    """Wall seconds spent, added up over calls."""

    generate: float = 0.0
    tool: float = 0.0  #: waiting for tools after the last token: what generation did not hide


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
    answer: str | None = None

    def context(self) -> IntArray:
        return np.concatenate(self.pieces)

    def append(self, ids: IntArray, logprobs: np.ndarray | None) -> None:
        self.pieces.append(ids)
        self.masks.append(logprobs is not None)
        self.logprobs.append(np.zeros(len(ids), dtype=np.float32) if logprobs is None else logprobs)
        self.length += len(ids)

    def close(self, weight_version: int) -> Trajectory:
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
            weight_version=weight_version,
            finish_reason=self.finish,
            turns=tuple(self.turns),
            gold=self.problem.answer,
            answer=self.answer,
            seconds=sum(turn.exec_seconds for turn in self.turns),
        )


async def rollout(
    problems: Sequence[Problem],
    *,
    group_size: int,
    engine: Engine,
    sandbox: SandboxBackend,
    turn_format: TurnFormat,
    tir: TirConfig,
    decode: Callable[[Sequence[int]], str],
    temperature: float,
    seed: tuple[int, ...],
    groups: Sequence[int] | None = None,
    render: FeedbackRenderer = plain_feedback,
    share_executions: bool = True,
    threads: int = 1,
    times: RolloutTimes | None = None,
) -> list[Trajectory]:
    """Roll out ``group_size`` siblings of each problem.

    Args:
        decode: token ids of one policy turn → text without special tokens.
        seed: address of this batch's randomness; group, sibling and turn are appended.
        groups: (problems,) number of each problem's group; by default its position.
        render: turns an execution into the text shown to the policy.
        threads: CPU threads of the engine.
        share_executions: identical code in the same turn of the batch runs once.

    Returns:
        Ungraded trajectories, siblings together, in the order of ``problems``. A rollout whose tool failed for
        reasons of its own ends with ``finish_reason`` "failed".
    """
    times = times or RolloutTimes()
    opened: list[_Open] = []
    for group, problem in zip(range(len(problems)) if groups is None else groups, problems, strict=True):
        prompt = turn_format.prompt(problem)
        for sibling in range(group_size):
            opened.append(_Open(problem, group, sibling, (*seed, group, sibling), prompt, [prompt], length=len(prompt)))
    # How many cores torch uses is a property of the calling thread.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as thread:
        for start in range(0, len(opened), engine.batch_size):
            wave = opened[start : start + engine.batch_size]
            while active := [r for r in wave if r.finish is None]:
                run = _shared(sandbox) if share_executions else sandbox.run
                await _one_turn(active, engine, thread, run, turn_format, tir, decode, temperature, render, times)
    return [r.close(engine.weight_version) for r in opened]


async def _one_turn(
    active: Sequence[_Open],
    engine: Engine,
    thread: Executor,
    run: Callable[[str], Awaitable[ExecResult]],
    turn_format: TurnFormat,
    tir: TirConfig,
    decode: Callable[[Sequence[int]], str],
    temperature: float,
    render: FeedbackRenderer,
    times: RolloutTimes,
) -> None:
    """Sample a turn of every rollout in ``active``; the code of one runs while the others still sample."""
    loop = asyncio.get_running_loop()
    advancing: list[asyncio.Task[None]] = []

    by_key = {r.seed: r for r in active}

    def advance(key: tuple[int, ...], sample: Sample) -> None:
        step = _advance(by_key[key], sample, run, turn_format, tir, decode, render)
        advancing.append(loop.create_task(step))

    def sampling() -> None:  # in the engine's thread
        for r in active:
            seed = (*r.seed, len(r.turns))
            engine.add(SampleRequest(r.seed, r.context(), _turn_budget(r, tir), seed, temperature))
        missing = len(active)
        while missing:
            completed = engine.step()
            missing -= len(completed)
            for key, sample in completed:
                loop.call_soon_threadsafe(advance, key, sample)

    began = time.perf_counter()
    try:
        await loop.run_in_executor(thread, sampling)
        generated = time.perf_counter()
        await asyncio.gather(*advancing)
    finally:
        for task in advancing:
            task.cancel()
    if len(advancing) != len(active):
        raise RuntimeError(f"the engine finished {len(advancing)} of {len(active)} turns")
    times.generate += generated - began
    times.tool += time.perf_counter() - generated


def _shared(sandbox: SandboxBackend) -> Callable[[str], Awaitable[ExecResult]]:
    """``sandbox.run``, except that code seen before waits for the first one's result."""
    running: dict[str, asyncio.Future[ExecResult]] = {}

    def run(code: str) -> Awaitable[ExecResult]:
        if code not in running:
            running[code] = asyncio.ensure_future(sandbox.run(code))
        return running[code]

    return run


def _turn_budget(r: _Open, tir: TirConfig) -> int:
    return min(tir.turn_tokens, tir.response_tokens - (r.length - len(r.prompt)))


async def _advance(
    r: _Open,
    sample: Sample,
    run: Callable[[str], Awaitable[ExecResult]],
    turn_format: TurnFormat,
    tir: TirConfig,
    decode: Callable[[Sequence[int]], str],
    render: FeedbackRenderer,
) -> None:
    """Take one sampled turn: run its code, then end the rollout or append the feedback."""
    budget = _turn_budget(r, tir)
    start = r.length
    r.append(sample.token_ids, sample.logprobs)
    text = decode(sample.token_ids.tolist())
    parsed = parse_turn(text)
    answer, shown, result = parsed.answer, "", None
    if parsed.code is not None:
        try:
            result = await run(parsed.code)
        except SandboxError as error:
            r.finish, shown = "failed", f"(the tool failed: {error})"  # for the log; the policy never sees it
        else:
            if result.answer is not None:  # the block ends the turn, so it spoke last
                answer = result.answer
            shown = render(result, (*r.seed, len(r.turns)))
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
            shown, feedback_ids = turn_format.between(shown, sample.token_ids)
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
            is_void=parsed.is_void,
            truncated=sample.stop == "length",
            feedback=shown,
            exec_status=None if result is None else result.status,
            exec_seconds=0.0 if result is None else result.seconds,
        )
    )
