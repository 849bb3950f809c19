"""What the rollout loop asks of an engine, and what it gets back."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from fastir.types import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """One turn to sample."""

    key: tuple[int, ...]  #: names the rollout: an engine may keep its keys and values under it
    token_ids: IntArray  #: (L,) the whole context
    max_tokens: int
    seed: tuple[int, ...]  #: address of the randomness: run seed, split, step, problem, sibling, turn


@dataclass(frozen=True, eq=False)
class Sample:
    """The sampled turn, token by token, exactly as drawn."""

    token_ids: IntArray  #: (n,) ends with EOS or with the ids that completed a stop string, if it stopped
    logprobs: FloatArray  #: (n,) log-probability in nats of each at the sampling temperature
    stop: Literal["eos", "stop", "length"]


class Engine(Protocol):
    """Samples turns. The trainer owns the weights and hands them over with `load_weights`."""

    weight_version: int
    batch_size: int

    def generate(
        self, requests: Sequence[SampleRequest], *, temperature: float, finished: Callable[[int, Sample], None]
    ) -> None:
        """Sample each request's turn; blocks, and calls ``finished(index, sample)`` as soon as each is complete.

        ``temperature`` 0 is greedy (log-probs then at temperature 1).
        """

    def load_weights(self, parameters: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take new weights (full tensors under transformers names) and forget every cached prefix."""

    def checksum(self) -> dict[str, int]:
        """`tensor_checksum` of each weight it holds, by name."""


def uniforms(seed: tuple[int, ...], count: int) -> np.ndarray:
    """``count`` float64 uniforms in [0, 1) at the address ``seed``: the same wherever and whenever they are drawn."""
    return np.random.default_rng(seed).random(count)


def tensor_checksum(tensor: torch.Tensor, dtype: torch.dtype, limit: int = 1 << 16) -> int:
    """CRC-32 of up to ``limit`` evenly spaced elements cast to ``dtype``: sees stale, swapped and rescaled weights."""
    flat: Any = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // limit)
    return zlib.crc32(flat[::step].to(dtype).contiguous().view(torch.uint8).cpu().numpy())
