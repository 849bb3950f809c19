"""token_logprobs against float64, on both backends."""

from __future__ import annotations

import pytest
import torch
from fastir_kernels import TokenStats, token_logprobs
from fastir_kernels.logprobs import naive_token_logprobs
from kernel_cases import BACKENDS, relative
from torch import Tensor


def problem(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(rows, columns, generator=g)
    return z.to(dtype), torch.randint(columns, (rows,), generator=g)


def both(z: Tensor, targets: Tensor, backend: str, **options: object) -> tuple[TokenStats, Tensor, TokenStats, Tensor]:
    """Ours and the float64 truth: values, and the logits gradient of a random combination of logprob and entropy."""
    g = torch.Generator().manual_seed(9)
    up = torch.randn(2, len(z), generator=g)
    ours_in = z.clone().requires_grad_()
    ours = token_logprobs(ours_in, targets, backend=backend, **options)  # type: ignore[arg-type]
    (ours.logprob * up[0] + ours.entropy * up[1]).sum().backward()
    options.pop("inplace_backward", None)
    true_in = z.double().requires_grad_()
    truth = naive_token_logprobs(true_in, targets, **options)  # type: ignore[arg-type]
    (truth.logprob * up[0] + truth.entropy * up[1]).sum().backward()
    assert ours_in.grad is not None
    assert true_in.grad is not None
    return ours, ours_in.grad, truth, true_in.grad


def check(ours: TokenStats, truth: TokenStats, bar: float = 2e-6) -> None:
    for name, a, b in zip(TokenStats._fields, ours, truth):
        assert a.dtype == torch.float32
        assert relative(a, b) < bar, name


# 1: one column; 129, 1152: past a power of two; 2049: past the Triton block; 5003: odd, compiled on the torch backend
@pytest.mark.parametrize("columns", [1, 2, 129, 1152, 2049, 5003])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_vocabulary(columns: int, backend: str) -> None:
    z, targets = problem(5, columns)
    ours, grad, truth, true_grad = both(z, targets, backend)
    if columns == 1:
        assert not ours.logprob.any()
        assert grad.abs().max() < 1e-6
        return
    check(ours, truth)
    assert relative(grad, true_grad) < 3e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_logits_are_not_rounded_again(dtype: torch.dtype, backend: str) -> None:
    z, targets = problem(4, 4100, dtype)
    ours, grad, truth, true_grad = both(z, targets, backend)
    check(ours, truth)
    assert grad.dtype == dtype
    assert relative(grad, true_grad) < torch.finfo(dtype).eps


@pytest.mark.parametrize("backend", BACKENDS)
def test_temperature_per_row_mask_and_in_place(backend: str) -> None:
    z, targets = problem(6, 700)
    temperature = torch.tensor([0.3, 1.0, 2.0, 0.7, 5.0, 1.0])
    mask = torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    z[1] = torch.nan
    targets[4] = -100
    for inplace in (False, True):
        ours, grad, truth, true_grad = both(
            z, targets, backend, temperature=temperature, mask=mask, inplace_backward=inplace
        )
        check(ours, truth)
        assert not grad[~mask].any()
        assert relative(grad[mask], true_grad[mask]) < 3e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place_backward_writes_over_the_logits(backend: str) -> None:
    z, targets = problem(3, 4500)
    leaf = z.clone().requires_grad_()
    inner = leaf * 1
    out = token_logprobs(inner, targets, inplace_backward=True, backend=backend)
    out.logprob.sum().backward()
    assert torch.equal(inner.detach(), leaf.grad)
    assert not torch.equal(inner.detach(), z)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "row_stride"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides(layout: str, backend: str) -> None:
    z, targets = problem(4, 300)
    if layout == "transposed":
        view = z.t().contiguous().t()
    elif layout == "sliced":
        view = torch.cat([z, z], dim=1).repeat_interleave(2, dim=1)[:, : 2 * z.shape[1] : 2]
    else:
        view = torch.cat([z, z], dim=1)[:, : z.shape[1]]
    assert not view.is_contiguous()
    want = token_logprobs(z, targets, backend=backend)
    leaf = view.detach().requires_grad_()
    got = token_logprobs(leaf, targets, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    got.logprob.sum().backward()
    plain = z.clone().requires_grad_()
    token_logprobs(plain, targets, backend=backend).logprob.sum().backward()
    assert torch.equal(leaf.grad, plain.grad)


@pytest.mark.parametrize("upstream", ["sum", "expanded", "strided", "entropy_only"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_upstream_gradient(upstream: str, backend: str) -> None:
    z, targets = problem(4, 300)
    a, b = z.clone().requires_grad_(), z.double().requires_grad_()
    ours, truth = token_logprobs(a, targets, backend=backend), naive_token_logprobs(b, targets)
    if upstream == "sum":
        ours.logprob.sum().backward()
        truth.logprob.sum().backward()
    elif upstream == "expanded":
        ours.logprob.backward(torch.tensor(2.5).expand(4))
        truth.logprob.backward(torch.tensor(2.5, dtype=torch.float64).expand(4))
    elif upstream == "strided":
        up = torch.randn(8, generator=torch.Generator().manual_seed(3))
        ours.logprob.backward(up[::2])
        truth.logprob.backward(up.double()[::2])
    else:
        ours.entropy.sum().backward()
        truth.entropy.sum().backward()
    assert relative(a.grad, b.grad) < 3e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_norm_forty_nats_above_the_rest(backend: str) -> None:
    z = torch.zeros(1, 5000)
    z[0, 7] = 40.0
    got = token_logprobs(z, torch.tensor([7]), backend=backend)
    rest = 4999 * torch.exp(torch.tensor(-40.0, dtype=torch.float64))
    want = (rest**2 + 4999 * torch.exp(torch.tensor(-80.0, dtype=torch.float64))) / (1 + rest) ** 2
    assert abs(got.logit_grad_sqnorm.item() / want.item() - 1) < 1e-5
    assert abs(got.logprob.item() / -torch.log1p(rest).item() - 1) < 1e-5
    leaf = z.clone().requires_grad_()
    token_logprobs(leaf, torch.tensor([7]), backend=backend).logprob.sum().backward()
    assert abs(leaf.grad[0, 7].item() / (rest / (1 + rest)).item() - 1) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_impossible_target_is_minus_infinity_and_the_rest_finite(backend: str) -> None:
    z, targets = problem(2, 300)
    z[0, targets[0]] = -torch.inf
    out = token_logprobs(z, targets, backend=backend)
    assert out.logprob[0] == -torch.inf
    for x in (out.logprob[1], out.entropy, out.logit_grad_sqnorm, out.lse):
        assert torch.isfinite(x).all()
    assert relative(out.entropy, naive_token_logprobs(z.double(), targets).entropy) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_row(backend: str) -> None:
    z, targets = problem(3, 4500)
    clean = token_logprobs(z, targets, backend=backend)
    z[1, 17] = torch.nan
    leaf = z.requires_grad_()
    out = token_logprobs(leaf, targets, backend=backend)
    out.logprob.sum().backward()
    for a, b in zip(out, clean):
        assert a[1].isnan()
        assert torch.equal(a[[0, 2]], b[[0, 2]])
    assert leaf.grad[1].isnan().any()
    assert torch.isfinite(leaf.grad[[0, 2]]).all()


@pytest.mark.parametrize(("backend", "rows"), [("torch", 4096), ("triton", 40)])
def test_a_row_gives_the_same_bits_in_any_batch(backend: str, rows: int) -> None:
    z, targets = problem(rows, 4200, torch.bfloat16)
    whole = torch.stack(list(token_logprobs(z, targets, backend=backend)))
    for r in (0, 1, rows // 2, rows - 1):
        alone = torch.stack(list(token_logprobs(z[r : r + 1], targets[r : r + 1], backend=backend)))
        assert torch.equal(alone[:, 0], whole[:, r])
    some = torch.stack(list(token_logprobs(z[3:20], targets[3:20], backend=backend)))
    assert torch.equal(some, whole[:, 3:20])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_more_than_two_to_the_31_elements_apart(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the pages of two rows are ever touched, so do not fill the gap.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    gap = 2**31 + 16
    try:
        storage = torch.empty(gap + 300, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("no 4 GiB of address space")
    z = storage.as_strided((2, 300), (gap, 1))
    values, targets = problem(2, 300, torch.bfloat16)
    z.copy_(values)
    a, b = token_logprobs(z, targets, backend=backend), token_logprobs(values, targets, backend=backend)
    assert torch.equal(a.logprob, b.logprob)
