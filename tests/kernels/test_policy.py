"""policy_loss and trajectory_grad_norms against float64 autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fastir_kernels import Denominators, LossSpec, policy_loss, token_logprobs, trajectory_grad_norms
from fastir_kernels.logprobs import naive_token_logprobs
from fastir_kernels.norms import naive_trajectory_grad_norms, segment_index, segment_sum
from fastir_kernels.policy import naive_policy_loss
from kernel_cases import LENGTHS, SPECS, bounds, policy_inputs, relative

T = sum(LENGTHS)
CUT = Denominators(tokens=40, sequences=6, max_length=16)


def problem() -> dict[str, Any]:
    g = torch.Generator().manual_seed(7)
    logprob = -3 * torch.rand(T, generator=g)
    return {"logprob": logprob, "entropy": torch.rand(T, generator=g), "cu_seqlens": bounds(), **policy_inputs(logprob)}


def double(p: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in p.items()}


@pytest.mark.parametrize("name", SPECS)
def test_loss_and_gradients_match_float64(name: str) -> None:
    p, spec = problem(), SPECS[name]
    q = double(p)
    for x in (p, q):
        x["logprob"], x["entropy"] = (x[k].clone().requires_grad_() for k in ("logprob", "entropy"))
    got = policy_loss(**p, spec=spec, denominators=CUT)
    (3 * got.loss).backward()
    want = naive_policy_loss(**q, spec=spec, denominators=CUT)
    want.backward()
    assert got.loss.item() == pytest.approx(want.item(), rel=2e-6)
    assert relative(p["logprob"].grad / 3, q["logprob"].grad) < 2e-6
    assert torch.equal(got.per_token_coefficient * 3, p["logprob"].grad)
    if spec.entropy_coef:
        assert relative(p["entropy"].grad / 3, q["entropy"].grad) < 2e-6
    else:
        assert not p["entropy"].grad.any()
    parts = sum(got.metrics[k].item() for k in ("loss_policy_sum", "loss_kl_sum", "loss_entropy_sum"))
    assert parts == pytest.approx(want.item(), rel=1e-5)
    assert got.per_trajectory["loss"].sum().item() == pytest.approx(want.item(), rel=1e-5)


def test_metrics_count_what_they_say() -> None:
    p = problem()
    got = policy_loss(**p, spec=LossSpec(dual_clip=1.3, importance="mis", importance_cap=1.1)).metrics
    m = p["mask"]
    lp, old, a = (p[k][m].double() for k in ("logprob", "old_logprob", "advantages"))
    ratio, w = (lp - old).exp(), (old - p["behavior_logprob"][m].double()).exp()
    want = {
        "tokens_count": m.sum(),
        "sequences_count": sum(bool(x.any()) for x in m.split(LENGTHS)),
        "ratio_sum": ratio.sum(),
        "ratio_max": ratio.max(),
        "ratio_min": ratio.min(),
        "log_ratio_abs_max": (lp - old).abs().max(),
        "old_kl_sum": (ratio - 1 - (lp - old)).sum(),
        "clip_low_count": ((ratio < 0.8) & (a < 0)).sum(),
        "clip_high_count": ((ratio > 1.28) & (a > 0)).sum(),
        "dual_clip_count": ((ratio > 1.3) & (a < 0)).sum(),
        "logprob_sum": lp.sum(),
        "entropy_sum": p["entropy"][m].sum(),
        "ref_kl_sum": ((p["ref_logprob"][m] - lp).exp() - 1 - (p["ref_logprob"][m] - lp)).sum(),
        "behavior_kl_sum": (w - 1 - w.log()).sum(),
        "behavior_log_ratio_abs_max": w.log().abs().max(),
        "importance_sum": w[w <= 1.1].sum(),
        "importance_capped_count": (w > 1.1).sum(),
    }
    for name, value in want.items():
        assert got[name].item() == pytest.approx(float(value), rel=1e-5), name
    assert min(want[k] for k in want if k.endswith("_count")) > 0  # the inputs exercise each of them


def test_gspo_gradient_is_not_scaled_by_length() -> None:
    """Lengths 1 and 9, ratio 1, one advantage: each token's coefficient is -A times its weight, whatever the length."""
    logprob = torch.full((10,), -1.0)
    cu = torch.tensor([0, 1, 10], dtype=torch.int32)
    got = policy_loss(logprob, logprob, torch.ones(10), spec=LossSpec(kind="gspo"), cu_seqlens=cu)
    want = torch.tensor([0.5] + [0.5 / 9] * 9)
    assert torch.allclose(-got.per_token_coefficient, want)


def test_overflowing_ratio_with_no_advantage_is_nothing() -> None:
    logprob = torch.tensor([0.0, -1.0], requires_grad=True)
    old = torch.tensor([-200.0, -1.0])
    got = policy_loss(logprob, old, torch.tensor([0.0, 1.0]), spec=LossSpec(), cu_seqlens=torch.tensor([0, 2]))
    got.loss.backward()
    assert got.loss.item() == -0.5
    assert logprob.grad.tolist() == [0.0, -0.5]


def test_nan_reaches_its_own_coefficient_only() -> None:
    p = problem()
    p["mask"][:] = True
    p["logprob"][4] = torch.nan
    got = policy_loss(**p, spec=SPECS["grpo"])
    assert got.per_token_coefficient.isnan().tolist() == [i == 4 for i in range(T)]


def test_grad_norms_are_exact() -> None:
    g = torch.Generator().manual_seed(1)
    z = (2 * torch.randn(T, 300, generator=g)).double()
    targets = torch.randint(300, (T,), generator=g)
    temperature = 0.5 + torch.rand(T, generator=g)
    leaf = z.clone().requires_grad_()
    p = problem()
    q = double(p)
    stats = naive_token_logprobs(leaf, targets, temperature=temperature.double())
    naive_policy_loss(**{**q, "logprob": stats.logprob}, spec=SPECS["grpo"]).backward()
    ours = token_logprobs(z.float(), targets, temperature=temperature)
    got = policy_loss(
        **{**p, "logprob": ours.logprob},
        spec=SPECS["grpo"],
        logit_grad_sqnorm=ours.logit_grad_sqnorm,
        temperature=temperature,
    )
    want = naive_trajectory_grad_norms(leaf.grad, bounds())
    assert relative(got.per_trajectory["grad_norm"], want) < 2e-6
    norms = trajectory_grad_norms(got.per_token_coefficient, ours.logit_grad_sqnorm, bounds(), temperature)
    assert torch.equal(norms, got.per_trajectory["grad_norm"])
    assert relative(got.per_token["grad_sqnorm"], leaf.grad.square().sum(1)) < 4e-6


def test_segments() -> None:
    values = torch.arange(1.0, T + 1)
    assert segment_sum(values, bounds()).tolist() == [x.sum().item() for x in values.split(LENGTHS)]
    want = [i for i, n in enumerate(LENGTHS) for _ in range(n)]
    assert segment_index(bounds(), T).tolist() == want
    assert trajectory_grad_norms(values[:0], values[:0], torch.zeros(1, dtype=torch.int32)).shape == (0,)
