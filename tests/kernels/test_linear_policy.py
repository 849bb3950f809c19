"""linear_policy_loss against float64 autograd through materialised logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fastir_kernels import Denominators, LossSpec, chunks, linear_policy_loss
from fastir_kernels.linear_policy import naive_linear_policy_loss
from fastir_kernels.logprobs import naive_token_logprobs
from kernel_cases import BACKENDS, LENGTHS, SPECS, bounds, policy_inputs, relative

T, H, V = sum(LENGTHS), 16, 131
CUT = Denominators(tokens=40, sequences=6, max_length=16)


def problem(dtype: torch.dtype = torch.float32, bias: bool = False) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(T, H, generator=g).to(dtype), (0.5 * torch.randn(V, H, generator=g)).to(dtype)
    b = torch.randn(V, generator=g).to(dtype) if bias else None
    targets = torch.randint(V, (T,), generator=g)
    temperature = 0.5 + torch.rand(T, generator=g)
    z = hidden.double() @ weight.double().t()
    logprob = naive_token_logprobs(z, targets, temperature=temperature).logprob.float()
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": b,
        "targets": targets,
        "temperature": temperature,
        "cu_seqlens": bounds(),
        **policy_inputs(logprob),
    }


def truth(p: dict[str, Any], spec: LossSpec, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    q = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in p.items()}
    leaves = {k: q[k].requires_grad_() for k in ("hidden", "weight", "bias") if q[k] is not None}
    loss = naive_linear_policy_loss(**q, spec=spec, **more)
    loss.backward()
    return loss.detach(), {k: v.grad for k, v in leaves.items()}


def ours(p: dict[str, Any], spec: LossSpec, **more: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    q = dict(p)
    leaves = {k: q[k].clone().requires_grad_() for k in ("hidden", "weight", "bias") if q[k] is not None}
    result = linear_policy_loss(**{**q, **leaves}, spec=spec, **more)
    (2 * result.loss).backward()
    return result, {k: v.grad / 2 for k, v in leaves.items()}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_and_gradients_match_float64(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "chunk_rows", lambda *_: 5)  # several chunks, the last one short
    p = problem(bias=True)
    want, grads = truth(p, SPECS[name], denominators=CUT, softcap=4.0)
    got, made = ours(p, SPECS[name], denominators=CUT, softcap=4.0, backend=backend)
    assert got.loss.item() == pytest.approx(want.item(), rel=3e-6)
    for k in grads:
        assert relative(made[k], grads[k]) < 1e-5, k
    assert not made["hidden"][~p["mask"]].any()


@pytest.mark.parametrize("name", ["grpo", "entropy", "all"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_grad_norms_are_the_norms_of_the_logit_gradient(name: str, backend: str) -> None:
    p = problem()
    spec = SPECS[name]
    q = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in p.items()}
    logits = (q["hidden"] @ q["weight"].t()).requires_grad_()
    eye = torch.eye(V, dtype=torch.float64)
    naive_linear_policy_loss(**{**q, "hidden": logits, "weight": eye}, spec=spec, denominators=CUT).backward()
    result, _ = ours(p, spec, denominators=CUT, backend=backend)
    rows = logits.grad.square().sum(1)
    assert relative(result.per_token["grad_sqnorm"], rows) < 1e-5
    want = torch.stack([x.sum().sqrt() for x in rows.split(LENGTHS)])
    assert relative(result.per_trajectory["grad_norm"], want) < 1e-5


def test_without_denominators_the_batch_is_the_whole_batch() -> None:
    p = problem()
    for name in ("grpo", "k3"):
        want, _ = truth(p, SPECS[name])
        assert ours(p, SPECS[name])[0].loss.item() == pytest.approx(want.item(), rel=3e-6)


def test_old_logprob_none_is_ratio_one() -> None:
    p = {**problem(), "old_logprob": None}
    want, grads = truth(p, SPECS["grpo"])
    got, made = ours(p, SPECS["grpo"])
    assert got.loss.item() == pytest.approx(want.item(), rel=3e-6)
    assert relative(made["weight"], grads["weight"]) < 1e-5
    assert got.metrics["ratio_max"] == got.metrics["ratio_min"] == 1


@pytest.mark.parametrize("rows", [0, T])
def test_nothing_to_train_gives_attached_zeros(rows: int) -> None:
    p = problem()
    if rows == 0:
        p = {k: v[:0] if isinstance(v, torch.Tensor) and k not in ("weight", "cu_seqlens") else v for k, v in p.items()}
        p["cu_seqlens"] = torch.zeros(1, dtype=torch.int32)
    p["mask"] = torch.zeros(rows, dtype=torch.bool)
    for name in ("grpo", "gspo", "entropy"):
        got, made = ours(p, SPECS[name])
        assert got.loss.item() == 0
        assert all(not g.any() for g in made.values())
        assert all(torch.isfinite(x).all() for x in got.per_trajectory.values())


def test_masked_rows_are_never_read() -> None:
    p = problem()
    clean, clean_grads = ours(p, SPECS["gspo"])
    out = ~p["mask"]
    for k in ("hidden", "old_logprob", "behavior_logprob", "ref_logprob", "advantages"):
        p[k] = p[k].clone()
        p[k][out] = torch.nan
    p["targets"] = torch.where(out, -100, p["targets"])
    dirty, grads = ours(p, SPECS["gspo"])
    assert torch.equal(clean.loss, dirty.loss)
    assert torch.equal(clean_grads["weight"], grads["weight"])
    assert torch.equal(clean_grads["hidden"], grads["hidden"])


@pytest.mark.parametrize("name", ["grpo", "gspo", "k3"])
def test_two_micro_batches_add_up_to_one(name: str) -> None:
    p = problem()
    whole, grads = ours(p, SPECS[name])
    counts = [p["mask"][a:b].sum() for a, b in zip(bounds(), bounds()[1:])]
    cut = Denominators(tokens=float(sum(counts)), sequences=float(sum(c > 0 for c in counts)))
    loss, dw = 0.0, torch.zeros_like(p["weight"])
    for a, b in ((0, 10), (10, T)):
        part = {
            k: v[a:b] if isinstance(v, torch.Tensor) and k not in ("weight", "cu_seqlens") else v for k, v in p.items()
        }
        cu = p["cu_seqlens"]
        part["cu_seqlens"] = cu[(cu >= a) & (cu <= b)] - a
        got, made = ours(part, SPECS[name], denominators=cut)
        loss, dw = loss + got.loss.item(), dw + made["weight"]
    assert loss == pytest.approx(whole.loss.item(), rel=1e-5)
    assert relative(dw, grads["weight"]) < 1e-5
