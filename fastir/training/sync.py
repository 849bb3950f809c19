"""Trainer → engine: hand the weights over, then prove that they arrived."""

from __future__ import annotations

import torch

from fastir.rollout.engine import Engine, tensor_checksum
from fastir.training.model import Policy, full_parameters


class SyncError(RuntimeError):
    """The engine does not hold the trainer's weights."""


def sync_weights(policy: Policy, engine: Engine, version: int, dtype: torch.dtype) -> None:
    """Give the engine the trainer's weights in ``dtype`` and compare checksums of every tensor (collective).

    Raises:
        SyncError: a tensor in the engine differs from the trainer's.
    """
    expected: dict[str, int] = {}

    def parameters():  # type: ignore[no-untyped-def]
        for name, tensor in full_parameters(policy):
            cast = tensor.to(dtype)
            expected[name] = tensor_checksum(cast, dtype)
            yield name, cast

    engine.load_weights(parameters(), version)
    held = engine.checksum()
    wrong = [name for name, checksum in expected.items() if held.get(name) != checksum]
    if wrong:
        raise SyncError(
            f"after weight update {version} the engine holds other values of {wrong[0]} and {len(wrong) - 1} more"
        )
