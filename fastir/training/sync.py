"""Trainer → engine: hand the weights over; the engine proves that they arrived."""

from __future__ import annotations

import torch

from fastir.rollout.engine import Engine, EngineError, WeightCheck
from fastir.training.model import Policy, full_parameters


def sync_weights(policy: Policy, engine: Engine, version: int, dtype: torch.dtype, check: WeightCheck) -> None:
    """Give the engine the trainer's weights in ``dtype`` (collective).

    Raises:
        EngineError: the engine does not hold them; see `fastir.rollout.engine.Engine.load_weights`.
    """
    parameters = ((name, tensor.to(dtype)) for name, tensor in full_parameters(policy))
    try:
        engine.load_weights(parameters, version, check=check)
    except EngineError:
        for _ in parameters:  # the other ranks wait for this one's part of every tensor
            pass
        raise
