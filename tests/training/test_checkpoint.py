"""Checkpoints: complete or absent, exact, and refused when damaged."""

import json

import numpy as np
import pytest
import torch
from made import make_trajectory

from fastir.config import LossConfig, OptimizerConfig
from fastir.training import checkpoint
from fastir.training.model import full_parameters
from fastir.training.packing import pack
from fastir.training.step import loss_spec, make_optimizer, update


def one_update(policy, optimizer, seed):
    from fastir_kernels import Denominators

    rng = np.random.default_rng(seed)
    trajectories = [make_trajectory(rng) for _ in range(3)]
    per_token = [np.where(t.policy_mask, 1.0 - i, 0).astype(np.float32) for i, t in enumerate(trajectories)]
    batches = pack(trajectories, per_token, range(3), 1000)
    return update(
        policy, optimizer, batches, [b.behavior_logprobs for b in batches], spec=loss_spec(LossConfig()),
        denominators=Denominators(50, 3), temperature=1.0, grad_clip=1.0,
    )  # fmt: skip


def save(folder, step, policy, optimizer, tokenizer, keep=2):
    return checkpoint.save(
        folder, step, policy, optimizer, tokenizer, {"position": 7}, keep=keep, export_dtype=torch.float32
    )


def weights(policy):
    return {name: p.clone() for name, p in full_parameters(policy)}


def test_restores_weights_and_optimizer_exactly(policy, tokenizer, tmp_path):
    optimizer = make_optimizer(policy, OptimizerConfig(lr=1e-2))
    one_update(policy, optimizer, 0)
    path = save(tmp_path, 1, policy, optimizer, tokenizer)
    one_update(policy, optimizer, 1)
    expected = weights(policy)
    counters = checkpoint.load(path, policy, optimizer)
    assert counters == {"step": 1, "position": 7}
    one_update(policy, optimizer, 1)
    for name, p in full_parameters(policy):
        assert torch.equal(p, expected[name]), name


def test_keeps_the_newest_and_leaves_nothing_half_written(policy, tokenizer, tmp_path):
    optimizer = make_optimizer(policy, OptimizerConfig(lr=1e-2))
    for step in (2, 9, 10, 11):
        save(tmp_path, step, policy, optimizer, tokenizer)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step-10", "step-11"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-11"]


def test_a_partial_checkpoint_is_not_a_checkpoint(policy, tokenizer, tmp_path, monkeypatch):
    optimizer = make_optimizer(policy, OptimizerConfig(lr=1e-2))
    save(tmp_path, 1, policy, optimizer, tokenizer)
    monkeypatch.setattr(checkpoint.dcp, "save", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 2, policy, optimizer, tokenizer)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step-1"]


def test_damage_is_reported_with_the_remedy(policy, tokenizer, tmp_path):
    optimizer = make_optimizer(policy, OptimizerConfig(lr=1e-2))
    path = save(tmp_path, 1, policy, optimizer, tokenizer)
    for file in (path / "state").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(checkpoint.CheckpointError, match="remove it to resume from an older one"):
        checkpoint.load(path, policy, optimizer)
    (path / "trainer.json").write_text("{")
    with pytest.raises(checkpoint.CheckpointError, match="step-1"):
        checkpoint.load(path, policy, optimizer)


def test_exported_model_holds_the_trained_weights(policy, tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM

    optimizer = make_optimizer(policy, OptimizerConfig(lr=1e-2))
    one_update(policy, optimizer, 0)
    checkpoint.export_model(tmp_path / "model", policy, tokenizer, torch.bfloat16)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").named_parameters())
    for name, p in full_parameters(policy):
        assert torch.equal(loaded[name], p.bfloat16())
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
