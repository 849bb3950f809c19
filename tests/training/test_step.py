"""One update against a brute-force loss: sequence by sequence, token by token, from the formulas."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fastir_kernels import Denominators
from made import make_trajectory
from transformers import AutoModelForCausalLM

from fastir.config import LossConfig, OptimizerConfig
from fastir.training.model import full_parameters
from fastir.training.packing import pack
from fastir.training.step import learning_rate, loss_spec, make_optimizer, recompute_logprobs, update

TEMPERATURE = 1.3


def batch_of(seed: int, count: int):
    rng = np.random.default_rng(seed)
    trajectories = [make_trajectory(rng, turns=int(rng.integers(1, 4))) for _ in range(count)]
    advantages = rng.normal(size=count).astype(np.float32)
    per_token = [
        np.where(t.policy_mask, a, 0).astype(np.float32) for t, a in zip(trajectories, advantages, strict=True)
    ]
    return trajectories, advantages, per_token


class Reference:
    """The policy's weights in float64 under transformers' own eager attention, one sequence at a time."""

    def __init__(self, policy):
        self.model = AutoModelForCausalLM.from_config(policy.model.config, attn_implementation="eager").double().eval()
        weights = dict(full_parameters(policy))
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(weights[name])

    def logprobs(self, trajectory):
        """(L,) log-prob of each token given those before it; 0 for the first."""
        ids = torch.from_numpy(trajectory.token_ids).long()
        logits = self.model(ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE
        return torch.cat([torch.zeros(1), logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]])

    def loss_and_gradient(self, trajectories, advantages, aggregation, old):
        """min(ρA, clip(ρ)A) token by token, weights over the whole batch."""
        tokens = sum(t.policy_tokens for t in trajectories)
        loss = torch.zeros((), dtype=torch.float64)
        for t, a, o in zip(trajectories, advantages.tolist(), old, strict=True):
            weight = {
                "sequence_mean": 1 / (len(trajectories) * t.policy_tokens),
                "token_mean": 1 / tokens,
                "sequence_sum": 1 / (len(trajectories) * 50),
            }[aggregation]
            logprobs = self.logprobs(t)
            for position in np.flatnonzero(t.policy_mask):
                ratio = torch.exp(logprobs[position] - float(o[position]))
                loss = loss - weight * torch.minimum(ratio * a, torch.clamp(ratio, 0.8, 1.28) * a)
        names = [name for name, _ in self.model.named_parameters()]
        gradient = torch.autograd.grad(loss, [p for _, p in self.model.named_parameters()])
        return float(loss), dict(zip(names, gradient, strict=True))


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "sequence_sum"])
@pytest.mark.parametrize("budget", [40, 100_000])
def test_loss_and_gradient_equal_brute_force(policy, aggregation, budget):
    trajectories, advantages, per_token = batch_of(3, 5)
    reference = Reference(policy)
    own = [reference.logprobs(t).detach().numpy() for t in trajectories]
    rng = np.random.default_rng(9)  # π_old near the policy: some ratios are clipped, some are not
    old = [
        np.where(t.policy_mask, lp + 0.3 * rng.normal(size=len(lp)), 0).astype(np.float32)
        for t, lp in zip(trajectories, own, strict=True)
    ]
    trajectories = [replace(t, behavior_logprobs=o) for t, o in zip(trajectories, old, strict=True)]
    batches = pack(trajectories, per_token, range(5), budget)
    assert len(batches) > 1 or budget > 1000
    for ours, batch in zip(recompute_logprobs(policy, batches, TEMPERATURE), batches, strict=True):
        bounds = batch.cu_seqlens.tolist()
        for place, i in enumerate(batch.trajectory_indices):
            rows = slice(bounds[place], bounds[place + 1] - 1)
            expected = np.where(batch.mask[rows], own[i][1 : rows.stop - rows.start + 1], 0)
            np.testing.assert_allclose(ours[rows], expected, atol=3e-5)
    expected_loss, expected_gradient = reference.loss_and_gradient(trajectories, advantages, aggregation, old)
    before = {name: p.clone() for name, p in full_parameters(policy)}
    stats = update(
        policy, torch.optim.SGD(policy.parameters(), lr=1.0), batches, [b.behavior_logprobs for b in batches],
        spec=loss_spec(LossConfig(aggregation=aggregation)),
        denominators=Denominators(sum(t.policy_tokens for t in trajectories), 5, 50),
        temperature=TEMPERATURE, grad_clip=None,
    )  # fmt: skip
    assert stats.loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected_gradient.values()))
    assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
    for name, p in full_parameters(policy):  # SGD at lr 1 moves by the gradient itself
        np.testing.assert_allclose(before[name] - p, expected_gradient[name], atol=1e-4 * norm)


def test_cutting_the_batch_differently_changes_only_rounding(policy, model_config):
    trajectories, _, per_token = batch_of(5, 7)
    results = []
    for budget in (10, 60, 100_000):
        batches = pack(trajectories, per_token, range(7), budget)
        stats = update(
            policy, torch.optim.SGD(policy.parameters(), lr=0.0), batches, [b.behavior_logprobs for b in batches],
            spec=loss_spec(LossConfig()), denominators=Denominators(sum(t.policy_tokens for t in trajectories), 7),
            temperature=1.0, grad_clip=None,
        )  # fmt: skip
        results.append((len(batches), stats.loss, stats.grad_norm))
    assert len({count for count, _, _ in results}) == 3
    for _, loss, norm in results[1:]:
        assert loss == pytest.approx(results[0][1], rel=1e-5)
        assert norm == pytest.approx(results[0][2], rel=1e-5)


def test_non_finite_update_is_skipped_and_changes_nothing(policy):
    trajectories, _, per_token = batch_of(1, 3)
    per_token[1][:] = np.inf
    batches = pack(trajectories, per_token, range(3), 1000)
    optimizer = make_optimizer(policy, OptimizerConfig(lr=1e-2))
    before = [p.full_tensor().detach().clone() for p in policy.parameters()]
    stats = update(
        policy, optimizer, batches, [b.behavior_logprobs for b in batches], spec=loss_spec(LossConfig()),
        denominators=Denominators(10, 3), temperature=1.0, grad_clip=1.0,
    )  # fmt: skip
    assert stats.skipped
    assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, policy.parameters(), strict=True))
    assert not optimizer.state


def test_gradient_is_clipped_to_the_global_norm(policy):
    trajectories, _, per_token = batch_of(1, 3)
    batches = pack(trajectories, per_token, range(3), 1000)
    before = [p.full_tensor().detach().clone() for p in policy.parameters()]
    update(
        policy, torch.optim.SGD(policy.parameters(), lr=1.0), batches, [b.behavior_logprobs for b in batches],
        spec=loss_spec(LossConfig()), denominators=Denominators(30, 3), temperature=1.0, grad_clip=1e-3,
    )  # fmt: skip
    moved = math.sqrt(
        sum(
            float((a - p.full_tensor().detach()).square().sum())
            for a, p in zip(before, policy.parameters(), strict=True)
        )
    )
    assert moved == pytest.approx(1e-3, rel=1e-2)


def test_learning_rate_schedules():
    linear = OptimizerConfig(lr=1.0, schedule="linear", final_lr_ratio=0.3)
    assert [learning_rate(linear, s, 11) for s in (0, 5, 10)] == pytest.approx([1.0, 0.65, 0.3])
    cosine = OptimizerConfig(lr=2.0, schedule="cosine", final_lr_ratio=0.0, warmup_steps=2)
    assert [learning_rate(cosine, s, 13) for s in (0, 1, 2, 7, 12)] == pytest.approx([1.0, 2.0, 2.0, 1.0, 0.0])
    assert learning_rate(OptimizerConfig(lr=3.0), 99, 100) == 3.0
