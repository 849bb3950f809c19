"""Shared fixtures: the package's tiny model as policy and as engine."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads fighting over busy cores make tests slow, not fast

import pytest
import torch

from fastir.config import ModelConfig

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_config() -> ModelConfig:
    return ModelConfig(path="tiny", device="cpu")


@pytest.fixture(scope="session")
def tokenizer(model_config):
    from fastir.training.model import load_tokenizer

    return load_tokenizer(model_config)


@pytest.fixture
def process_group():
    from fastir.training.model import init_distributed

    init_distributed(torch.device("cpu"))


@pytest.fixture
def policy(model_config, process_group):
    """A freshly loaded, sharded float32 policy."""
    from fastir.training.model import Policy, load_model, shard

    return shard(Policy(load_model(model_config, torch.float32)), torch.device("cpu"), torch.float32)


@pytest.fixture
def engine(model_config, tokenizer):
    from fastir.rollout.hf import HFEngine
    from fastir.training.model import load_model

    return HFEngine(load_model(model_config, torch.float32), tokenizer, stop=("\n```\n",), batch_size=8)
