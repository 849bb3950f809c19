"""One update against a brute-force loss: sequence by sequence, token by token, from the formulas."""

import math

import numpy as np
import pytest
import torch
from made import make_trajectory
from fastir_kernels import Denominators

from fastir.config import LossConfig, OptimizerConfig
from fastir.training.packing import pack
from fastir.training.step import learning_rate, loss_spec, make_optimizer, recompute_logprobs, update

TEMPERATURE = 1.3


def batch_of(seed: int, count: int):
    rng = np.random.default_rng(seed)
    trajectories = [make_trajectory(rng, turns=int(rng.integers(1, 4))) for _ in range(count)]
    advantages = rng.normal(size=count).astype(np.float32)
    per_token = [np.where(t.policy_mask, a, 0).astype(np.float32) for t, a in zip(trajectories, advantages, strict=True)]
    return trajectories, advantages, per_token


def sequence_logits(policy, trajectory):
    """(L − 1, V) float64 logits / temperature, one sequence at a time through transformers' own eager attention."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_config(policy.model.config, attn_implementation="eager").double().eval()
    weights = {n: p.full_tensor().double() for n, p in policy.model.named_parameters()}
    tied = {n: weights[n] for n, _ in reference.named_parameters()}
    logits = torch.func.functional_call(
        reference, tied, (torch.from_numpy(trajectory.token_ids).long()[None],), {"use_cache": False}
    ).logits[0]
    return logits[:-1] / TEMPERATURE, tied


def brute_force_loss(policy, trajectories, advantages, aggregation, old):
    """Loss and the gradient of each parameter, from algorithms: min(ρA, clip(ρ)A), weights over the whole batch."""
    tokens = sum(t.policy_tokens for t in trajectories)
    total, leaves = torch.zeros((), dtype=torch.float64), {}
    grads: dict[str, torch.Tensor] = {}
    for t, a, o in zip(trajectories, advantages, old, strict=True):
        logits, leaves = sequence_logits(policy, t)
        for p in leaves.values():
            p.requires_grad_(True)
        logits, leaves = _again(policy, t, leaves)
        logprobs = logits.log_softmax(-1)
        loss = torch.zeros((), dtype=torch.float64)
        for position in np.flatnonzero(t.policy_mask):
            new = logprobs[position - 1, int(t.token_ids[position])]
            ratio = torch.exp(new - float(o[position]))
            clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.28)
            weight = {
                "sequence_mean": 1 / (len(trajectories) * t.policy_tokens),
                "token_mean": 1 / tokens,
                "sequence_sum": 1 / (len(trajectories) * 50),
            }[aggregation]
            loss = loss - weight * torch.minimum(ratio * float(a), clipped * float(a))
        for name, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            grads[name] = grads.get(name, 0) + g
        total = total + loss.detach()
    return float(total), grads


def _again(policy, trajectory, leaves):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_config(policy.model.config, attn_implementation="eager").double().eval()
    logits = torch.func.functional_call(
        reference, leaves, (torch.from_numpy(trajectory.token_ids).long()[None],), {"use_cache": False}
    ).logits[0]
    return logits[:-1] / TEMPERATURE, leaves


def near_policy(trajectories, logprobs_of):
    """π_old close to the policy so that some ratios are clipped and some are not."""
    rng = np.random.default_rng(9)
    return [np.where(t.policy_mask, lp + rng.normal(size=len(lp)) * 0.3, 0).astype(np.float32) for t, lp in zip(trajectories, logprobs_of, strict=True)]


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "sequence_sum"])
@pytest.mark.parametrize("budget", [40, 100_000])
def test_loss_and_gradient_equal_brute_force(policy, aggregation, budget):
    trajectories, advantages, per_token = batch_of(3, 5)
    own = []
    for t in trajectories:
        logits, _ = sequence_logits(policy, t)
        lp = np.zeros(len(t.token_ids))
        lp[1:] = logits.log_softmax(-1).gather(1, torch.from_numpy(t.token_ids[1:]).long()[:, None])[:, 0].detach().numpy()
        own.append(lp)
    old = near_policy(trajectories, own)
    trajectories = [type(t)(**{**t.__dict__, "behavior_logprobs": o}) for t, o in zip(trajectories, old, strict=True)]
    batches = pack(trajectories, per_token, range(5), budget)
    assert len(batches) > 1 or budget > 1000
    for ours, batch in zip(recompute_logprobs(policy, batches, TEMPERATURE), batches, strict=True):
        expected = np.concatenate([np.append(own[i][1:][: hi - lo - 1], 0) for i, lo, hi in zip(batch.trajectory_indices, batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)])
        np.testing.assert_allclose(ours[batch.mask], expected[batch.mask.numpy()], atol=3e-5)
    expected_loss, expected_grads = brute_force_loss(policy, trajectories, advantages, aggregation, old)
    grads = {}
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)  # its step is the gradient itself
    before = {n: p.full_tensor().clone() for n, p in policy.model.named_parameters()}
    stats = update(
        policy, optimizer, batches, [b.behavior_logprobs for b in batches],
        spec=loss_spec(LossConfig(aggregation=aggregation)),
        denominators=Denominators(sum(t.policy_tokens for t in trajectories), 5, 50),
        temperature=TEMPERATURE, grad_clip=None,
    )  # fmt: skip
    grads = {n: before[n] - p.full_tensor() for n, p in policy.model.named_parameters()}
    assert stats.loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    scale = max(float(g.abs().max()) for g in expected_grads.values())
    for name, gradient in grads.items():
        np.testing.assert_allclose(gradient, expected_grads[name], atol=2e-4 * scale)
    norm = math.sqrt(sum(float((g**2).sum()) for g in expected_grads.values()))
    assert stats.grad_norm == pytest.approx(norm, rel=1e-4)


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
    before = [p.full_tensor().clone() for p in policy.parameters()]
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
    before = [p.full_tensor().clone() for p in policy.parameters()]
    update(
        policy, torch.optim.SGD(policy.parameters(), lr=1.0), batches, [b.behavior_logprobs for b in batches],
        spec=loss_spec(LossConfig()), denominators=Denominators(30, 3), temperature=1.0, grad_clip=1e-3,
    )  # fmt: skip
    moved = math.sqrt(sum(float((a - p.full_tensor()).square().sum()) for a, p in zip(before, policy.parameters(), strict=True)))
    assert moved == pytest.approx(1e-3, rel=1e-2)


def test_learning_rate_schedules():
    linear = OptimizerConfig(lr=1.0, schedule="linear", final_lr_ratio=0.3)
    assert [learning_rate(linear, s, 11) for s in (0, 5, 10)] == pytest.approx([1.0, 0.65, 0.3])
    cosine = OptimizerConfig(lr=2.0, schedule="cosine", final_lr_ratio=0.0, warmup_steps=2)
    assert [learning_rate(cosine, s, 13) for s in (0, 1, 2, 7, 12)] == pytest.approx([1.0, 2.0, 2.0, 1.0, 0.0])
    assert learning_rate(OptimizerConfig(lr=3.0), 99, 100) == 3.0
