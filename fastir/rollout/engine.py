"""What the rollout loop asks of an engine, and what it gets back."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from fastir.types import FloatArray, IntArray

#: How closely an engine looks at what it holds after new weights: a sample of each, everything, or not at all.
WeightCheck = Literal["sampled", "full", "off"]


class EngineError(RuntimeError):
    """The engine is lost or holds wrong weights: nothing it samples can be used. Says what happened and the remedy."""


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """One turn to sample."""

    #: names the rollout: unique among the requests in flight; an engine may keep keys and values under it between turns
    key: tuple[int, ...]
    token_ids: IntArray  #: (L,) the whole context
    max_tokens: int
    seed: tuple[int, ...]  #: address of the randomness: run seed, split, step, problem, sibling, turn
    temperature: float  #: 0 is greedy (log-probs then at temperature 1)


@dataclass(frozen=True, eq=False)
class Sample:
    """The sampled turn, token by token, exactly as drawn."""

    token_ids: IntArray  #: (n,) ends with EOS or with the ids that completed a stop string, if it stopped
    logprobs: FloatArray  #: (n,) float32 log-probability in nats of each at the sampling temperature
    #: why it ended; aborted: the engine gave this request up by itself, which costs that rollout only
    stop: Literal["eos", "stop", "length", "aborted"]
    weight_version: int  #: of the weights it was sampled with


class Engine(Protocol):
    """Samples turns, many at once. The trainer owns the weights and hands them over with `load_weights`.

    An engine is used from one thread at a time, except where an implementation says otherwise.
    """

    weight_version: int
    batch_size: int  #: rows decoded at once; more requests may be added, they wait

    def add(self, request: SampleRequest) -> None:
        """Take a request; returns at once."""

    def step(self) -> list[tuple[tuple[int, ...], Sample]]:
        """One scheduling step (one decoding step of the batch, or the wait for the next arrival, at most about a
        second); returns the turns completed, by key.

        Raises:
            EngineError: the engine is lost.
        """

    def abort(self, keys: Iterable[tuple[int, ...]]) -> None:
        """Drop these requests; they return nothing. Keys that are not in flight are ignored."""

    def forget(self) -> None:
        """Drop every cached prefix."""

    def load_weights(
        self, parameters: Iterable[tuple[str, torch.Tensor]], version: int, *, check: WeightCheck
    ) -> None:
        """Take new weights, reset the prefix cache and check that it was reset.

        Args:
            parameters: full tensors under transformers names, streamed once; each may be gathered from shards just
                in time, so they are not all held.
            check: proves that the engine now holds them. "sampled" looks at up to 2**16 elements of each tensor, or
                at a few layers' products with a fixed probe (always embeddings and head); "full" at everything.

        Raises:
            EngineError: requests are in flight, or the weights differ (named).
        """

    def sleep(self) -> None:
        """Free device memory while the trainer works (nothing, where nothing is to free)."""

    def wake(self) -> None:
        """Undo `sleep`."""

    def close(self) -> None:
        """Free everything and end what was started."""


def generate(engine: Engine, requests: Sequence[SampleRequest]) -> list[Sample]:
    """Sample each request's turn; blocks until all are complete."""
    for request in requests:
        engine.add(request)
    samples: dict[tuple[int, ...], Sample] = {}
    while len(samples) < len(requests):
        samples.update(engine.step())
    return [samples[request.key] for request in requests]


def uniforms(seed: tuple[int, ...], count: int) -> np.ndarray:
    """``count`` float64 uniforms in [0, 1) at the address ``seed``: the same wherever and whenever they are drawn."""
    return np.random.default_rng(seed).random(count)


def tensor_checksum(tensor: torch.Tensor, dtype: torch.dtype, limit: int | None = 1 << 16) -> int:
    """CRC-32 of up to ``limit`` evenly spaced elements (None: all) cast to ``dtype``: sees stale, swapped and rescaled
    weights."""
    flat: Any = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // limit) if limit else 1
    return zlib.crc32(flat[::step].to(dtype).contiguous().view(torch.uint8).cpu().numpy())
