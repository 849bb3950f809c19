"""Cases that break other libraries' kernels, one test each. `bench/kernel_peer_cases.py` shows who fails them today."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fastir_kernels import (
    Denominators,
    LossSpec,
    linear_policy_loss,
    linear_token_logprobs,
    policy_loss,
    token_logprobs,
)
from fastir_kernels.linear_policy import naive_linear_policy_loss
from fastir_kernels.logprobs import naive_token_logprobs
from kernel_cases import BACKENDS, SPECS, bounds, policy_inputs, relative
from torch import Tensor

both = pytest.mark.parametrize("backend", BACKENDS)


def logits(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=g), torch.randint(columns, (rows,), generator=g)


def agrees(z: Tensor, targets: Tensor, backend: str, bar: float = 2e-6, **options: Any) -> None:
    got = token_logprobs(z, targets, backend=backend, **options)
    for a, b in zip(got, naive_token_logprobs(z.double(), targets, **options)):
        assert relative(a, b) < bar


@both
@pytest.mark.parametrize("masked", [2048, 16384])
def test_leading_logits_minus_infinity(masked: int, backend: str) -> None:
    z, targets = logits(2, masked + 300)
    z[:, :masked] = -torch.inf
    targets = targets % 300 + masked
    agrees(z, targets, backend)
    leaf = z.requires_grad_()
    out = token_logprobs(leaf, targets, backend=backend)
    (out.logprob + out.entropy).sum().backward()
    assert torch.isfinite(leaf.grad).all()
    assert not leaf.grad[:, :masked].any()


@both
def test_all_logits_minus_200(backend: str) -> None:
    z = torch.full((2, 1000), -200.0)
    got = token_logprobs(z, torch.tensor([0, 999]), backend=backend)
    assert torch.allclose(got.logprob, torch.tensor(1e-3).log().expand(2), rtol=2e-6)
    z = logits(2, 1000)[0] - 200
    agrees(z, torch.tensor([0, 999]), backend, bar=5e-6)


@both
@pytest.mark.parametrize("columns", [1024 + 128, 129920])
def test_vocabulary_just_past_a_block(columns: int, backend: str) -> None:
    z, targets = logits(2, columns)
    targets[0] = columns - 1
    agrees(z, targets, backend)
    assert (token_logprobs(z, targets, backend=backend).logprob <= 0).all()


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
def test_many_rows_of_a_small_vocabulary(backend: str) -> None:
    if backend == "triton" and not torch.cuda.is_available():
        pytest.skip("65,536 programs are too slow for the interpreter; the grid is checked below")
    z, targets = logits(65536, 32)
    agrees(z, targets, backend)


def test_the_grid_is_flat() -> None:
    """Rows are grid-x alone, whose bound is 2^31 - 1 (grid-y and grid-z end at 65,535)."""
    from fastir_kernels import rows_triton

    seen = []

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            seen.append(grid)
            return lambda *args, **options: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_triton, "stats_kernel", Spy())
        patch.setattr(rows_triton, "grad_kernel", Spy())
        z, targets = logits(70000, 2)
        row = torch.zeros(70000)
        rows_triton.stats(z, targets, row, None)
        rows_triton.grad(z, targets, row, row, row, row, row, None, None, z)
    assert seen == [(70000,), (70000,)]


@both
@pytest.mark.parametrize("kind", ["strided", "expanded", "sum"])
def test_upstream_gradient_layouts_of_the_linear_ops(kind: str, backend: str) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 5, generator=g), torch.randn(40, 5, generator=g)
    targets = torch.randint(40, (6,), generator=g)
    upstream = {
        "strided": torch.arange(12.0)[::2],
        "expanded": torch.tensor(2.0).expand(6),
        "sum": torch.ones(6),
    }[kind]
    a, b = weight.clone().requires_grad_(), weight.double().requires_grad_()
    out = linear_token_logprobs(hidden, a, targets, backend=backend).logprob
    out.sum().backward() if kind == "sum" else out.backward(upstream)
    naive_token_logprobs(hidden.double() @ b.t(), targets).logprob.backward(upstream.double())
    assert relative(a.grad, b.grad) < 1e-5


@both
def test_integer_temperature_and_zero(backend: str) -> None:
    z, targets = logits(3, 50)
    whole = token_logprobs(z, targets, temperature=1, backend=backend)
    assert torch.equal(whole.logprob, token_logprobs(z, targets, backend=backend).logprob)
    agrees(z, targets, backend, temperature=2)
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(z, targets, temperature=0, backend=backend)


def test_sequence_ratio_with_lengths_1_and_9() -> None:
    g = torch.Generator().manual_seed(0)
    logprob = -torch.rand(10, generator=g)
    old = logprob + 0.01 * torch.randn(10, generator=g)
    cu = torch.tensor([0, 1, 10], dtype=torch.int32)
    got = policy_loss(logprob, old, torch.ones(10), spec=LossSpec(kind="gspo", aggregation="token_mean"), cu_seqlens=cu)
    s = [(logprob[0] - old[0]).exp().item(), (logprob[1:] - old[1:]).mean().exp().item()]
    want = torch.tensor([s[0]] + [s[1]] * 9) / 10
    assert relative(-got.per_token_coefficient, want) < 1e-6


def linear_problem() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    cu = bounds()
    rows = int(cu[-1])
    return {
        "hidden": torch.randn(rows, 6, generator=g),
        "weight": torch.randn(60, 6, generator=g),
        "targets": torch.randint(60, (rows,), generator=g),
        "cu_seqlens": cu,
        **policy_inputs(torch.full((rows,), -4.0)),
    }


@both
def test_all_rows_masked(backend: str) -> None:
    p = linear_problem()
    p["mask"][:] = False
    p["hidden"].requires_grad_()
    got = linear_policy_loss(**p, spec=LossSpec(), backend=backend)
    assert got.loss.item() == 0
    got.loss.backward()
    assert not p["hidden"].grad.any()
    stats = token_logprobs(p["hidden"], p["targets"] % 6, mask=p["mask"], backend=backend)
    assert stats.logprob.requires_grad
    stats.logprob.sum().backward()
    assert not p["hidden"].grad.any()


@both
@pytest.mark.parametrize("option", ["entropy", "softcap", "bias"])
def test_no_option_is_dropped(option: str, backend: str) -> None:
    """The entropy gradient, the softcap and the bias change the gradient, to the right one."""
    p = linear_problem()
    spec = SPECS["entropy"] if option == "entropy" else SPECS["grpo"]
    extra: dict[str, Any] = {}
    if option == "softcap":
        extra["softcap"] = 2.0
    elif option == "bias":
        extra["bias"] = torch.linspace(-1, 1, 60)
    grads = []
    for full, more in ((True, extra), (False, {})):
        weight = p["weight"].clone().requires_grad_()
        used = spec if full else SPECS["grpo"]
        linear_policy_loss(**{**p, "weight": weight}, spec=used, backend=backend, **more).loss.backward()
        grads.append(weight.grad)
    q = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in {**p, **extra}.items()}
    q["weight"].requires_grad_()
    naive_linear_policy_loss(**q, spec=spec).backward()
    assert relative(grads[0], q["weight"].grad) < 1e-5
    assert relative(grads[1], grads[0]) > 1e-4


@both
def test_two_micro_batches_against_one(backend: str) -> None:
    p = linear_problem()
    cut = Denominators(
        tokens=float(p["mask"].sum()), sequences=float(sum(x.any() for x in p["mask"].split((1, 9, 5, 7))))
    )
    spec = LossSpec(aggregation="token_mean")
    whole = linear_policy_loss(**p, spec=spec, backend=backend)
    parts = []
    for a, b in ((0, 10), (10, 22)):
        rows = {k: v[a:b] for k, v in p.items() if k not in ("weight", "cu_seqlens")}
        cu = p["cu_seqlens"]
        part = linear_policy_loss(
            **rows,
            weight=p["weight"],
            cu_seqlens=cu[(cu >= a) & (cu <= b)] - a,
            spec=spec,
            denominators=cut,
            backend=backend,
        )
        assert torch.equal(part.per_token["logprob"], whole.per_token["logprob"][a:b])
        parts.append(part.loss)
    assert relative(sum(parts), whole.loss) < 1e-6  # type: ignore[arg-type]


@both
def test_norm_at_a_peaked_bf16_row(backend: str) -> None:
    """In bf16 arithmetic 1 - 2 pi + sum pi^2 is off by more than the value."""
    z = torch.zeros(1, 4000, dtype=torch.bfloat16)
    z[0, 3] = 12.5
    targets = torch.tensor([3])
    want = naive_token_logprobs(z.double(), targets).logit_grad_sqnorm
    got = token_logprobs(z, targets, backend=backend).logit_grad_sqnorm
    assert relative(got, want) < 1e-5


@both
def test_perturbing_a_masked_entry_under_gspo(backend: str) -> None:
    p = linear_problem()
    want = linear_policy_loss(**p, spec=SPECS["gspo"], backend=backend)
    for k in ("old_logprob", "advantages", "hidden"):
        p[k] = torch.where(p["mask"].reshape(-1, *[1] * (p[k].dim() - 1)), p[k], 1e4)
    got = linear_policy_loss(**p, spec=SPECS["gspo"], backend=backend)
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(got.per_token_coefficient, want.per_token_coefficient)
