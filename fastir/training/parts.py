"""The parts of a run, opened once and closed together: tokenizer, engine, sandbox, grader, problems, and the policy."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fastir.config import Config, ConfigError
from fastir.data import Problem, ProblemStream, load_problems
from fastir.rollout.engine import Engine, EngineError
from fastir.rollout.loop import FeedbackRenderer, RolloutParts, RolloutTimes, plain_feedback, rollout
from fastir.rollout.prompt import TurnFormat
from fastir.rollout.thread import EngineThread
from fastir.tiny.problems import tiny_problems
from fastir.tir.reward import Grader
from fastir.tir.sandbox import SandboxBackend, open_sandbox
from fastir.training.model import (
    DTYPES,
    Policy,
    cast_parameters,
    init_distributed,
    load_model,
    load_tokenizer,
    model_source,
    resolve_device,
    shard,
)
from fastir.types import Trajectory

T = TypeVar("T")

#: Problems drawn for ``data.train = "tiny"``; the generator makes as many as asked.
_TINY_TRAIN, _TINY_HELDOUT = 4096, 1024


@dataclass
class Parts:
    config: Config
    tokenizer: Any
    engine: EngineThread
    sandbox: SandboxBackend
    grader: Grader
    rollouts: RolloutParts
    train_problems: ProblemStream
    heldout_problems: list[Problem] | None
    dtype: torch.dtype  #: compute type
    policy: Policy | None  #: None when nothing trains

    @property
    def main(self) -> bool:
        """This rank writes the run's files."""
        return dist.get_rank() == 0

    @property
    def max_in_flight(self) -> int:
        return self.config.rollout.max_in_flight or 2 * self.config.rollout.batch_size

    async def roll_out(
        self,
        problems: Sequence[Problem],
        group_size: int,
        temperature: float,
        seed: tuple[int, ...],
        times: RolloutTimes,
        groups: Sequence[int] | None = None,
    ) -> list[Trajectory]:
        """Graded rollouts of the problems (see `fastir.rollout.loop.rollout`)."""
        trajectories = await rollout(
            problems,
            self.rollouts,
            group_size=group_size,
            temperature=temperature,
            seed=seed,
            schedule="async" if self.config.rollout.is_async else "turns",
            max_in_flight=self.max_in_flight,
            groups=groups,
            times=times,
        )
        await self.engine.call(lambda engine: engine.forget())
        return await self.grade(trajectories)

    async def grade(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The same with rewards."""
        pairs = [(t.answer, t.gold) for t in trajectories]
        grades = await asyncio.to_thread(self.grader.grade_many, pairs)
        return [
            dataclasses.replace(t, reward=float(grade.correct), grade_status=grade.status)
            for t, grade in zip(trajectories, grades, strict=True)
        ]


@asynccontextmanager
async def open_parts(
    config: Config, *, training: bool, render: FeedbackRenderer = plain_feedback
) -> AsyncIterator[Parts]:
    """Open what the configuration names. Raises ConfigError, SandboxError or DataError with the remedy."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    train_problems, heldout_problems = _problems(config)
    device = resolve_device(config.model.device)
    dtype = DTYPES[config.model.dtype]
    tokenizer = load_tokenizer(config.model)
    init_distributed(device)
    model = load_model(config.model, torch.float32)
    engine = EngineThread(
        _open_engine(config, model, tokenizer, dtype, device, copy_model=training),
        config.rollout.threads or torch.get_num_threads(),
    )
    policy = None
    if training:
        if config.model.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = shard(Policy(model), device, dtype)
    grader = Grader(workers=config.reward.workers, timeout_seconds=config.reward.timeout_seconds)
    try:
        async with open_sandbox(config.sandbox) as sandbox:
            if config.observe.progress != "off" and dist.get_rank() == 0:
                print(f"sandbox: {sandbox.isolation}", file=sys.stderr, flush=True)
            yield Parts(
                config=config,
                tokenizer=tokenizer,
                engine=engine,
                sandbox=sandbox,
                grader=grader,
                rollouts=RolloutParts(
                    engine=engine,
                    sandbox=sandbox,
                    turn_format=TurnFormat(tokenizer, config.data, config.tir),
                    tir=config.tir,
                    decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
                    render=render,
                    share_executions=config.rollout.share_executions,
                ),
                train_problems=ProblemStream(train_problems, config.run.seed),
                heldout_problems=heldout_problems,
                dtype=dtype,
                policy=policy,
            )
    finally:
        grader.close()
        engine.close()


def _open_engine(
    config: Config, model: Any, tokenizer: Any, dtype: torch.dtype, device: torch.device, *, copy_model: bool
) -> Engine:
    """What ``rollout.engine`` names. Only the chosen engine's packages are imported."""
    stop, batch_size = config.tir.stop, config.rollout.batch_size
    if config.rollout.engine == "hf":
        from fastir.rollout.hf import HFEngine

        own = cast_parameters(copy.deepcopy(model) if copy_model else model, dtype).to(device)
        return HFEngine(own, tokenizer, stop=stop, batch_size=batch_size)
    if config.rollout.engine == "vllm-server":
        from fastir.rollout.vllm_server import VLLMServerEngine

        rank, urls = dist.get_rank(), config.vllm.urls
        if len(urls) < dist.get_world_size():
            raise ConfigError(f"vllm.urls names {len(urls)} servers for {dist.get_world_size()} ranks: give one each")
        folder = (config.vllm.folder or config.run_dir / "weights").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return VLLMServerEngine(urls[rank], tokenizer, stop=stop, batch_size=batch_size, folder=folder)
    from fastir.rollout.vllm import VLLMEngine

    source, gguf = model_source(config.model)
    with tempfile.TemporaryDirectory() as converted:
        if gguf:  # vLLM reads the checkpoint as transformers would save it
            cast_parameters(copy.deepcopy(model), dtype).save_pretrained(converted)
        return VLLMEngine(
            converted if gguf else source,
            tokenizer,
            stop=stop,
            batch_size=batch_size,
            max_model_len=min(config.vllm.max_model_len, model.config.max_position_embeddings),
            dtype=config.model.dtype,
            gpu_memory_share=config.vllm.gpu_memory_share,
            eager=config.vllm.eager,
            trust_remote_code=config.model.trust_remote_code,
        )


def gather(value: T) -> list[T]:
    """``value`` of every rank, on every rank, in rank order (collective)."""
    world = dist.get_world_size()
    if world == 1:
        return [value]
    values: list[Any] = [None] * world
    dist.all_gather_object(values, value)
    return values


async def together(work: Awaitable[T]) -> T:
    """What ``work`` returns, unless an engine was lost on any rank: then every rank hears of it (collective).

    Raises:
        EngineError: of the first such rank, on all ranks.
    """
    try:
        result, error = await work, ""
    except EngineError as lost:
        error = str(lost)
    for message in gather(error):
        if message:
            raise EngineError(message)
    return result


def _problems(config: Config) -> tuple[list[Problem], list[Problem] | None]:
    def load(source: str, split: Any, count: int) -> list[Problem]:
        if source == "tiny":
            return tiny_problems(split, count, seed=0)
        problems, skipped = load_problems(source, on_bad_row=config.data.on_bad_row)
        if skipped:
            print(f"{source}: {len(skipped)} malformed rows skipped, {len(problems)} kept; the first: {skipped[0]}")
        return problems

    heldout = None if config.data.heldout is None else load(config.data.heldout, "heldout", _TINY_HELDOUT)
    return load(config.data.train, "train", _TINY_TRAIN), heldout
