"""linear_token_logprobs against float64 through materialised logits."""

from __future__ import annotations

import pytest
import torch
from fastir_kernels import TokenStats, chunks, gemm, linear_token_logprobs
from fastir_kernels.linear_logprobs import naive_linear_token_logprobs
from kernel_cases import BACKENDS, relative

T, H, V = 11, 24, 500


def problem(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    return {
        "hidden": torch.randn(T, H, generator=g).to(dtype),
        "weight": (0.5 * torch.randn(V, H, generator=g)).to(dtype),
        "bias": torch.randn(V, generator=g).to(dtype),
        "targets": torch.randint(V, (T,), generator=g),
        "temperature": 0.5 + torch.rand(T, generator=g),
        "mask": torch.rand(T, generator=g) < 0.6,
    }


def step(function: object, p: dict[str, torch.Tensor], **options: object) -> tuple[TokenStats, dict[str, torch.Tensor]]:
    leaves = {k: p[k].clone().requires_grad_() for k in ("hidden", "weight", "bias")}
    out = function(**{**p, **leaves}, **options)  # type: ignore[operator]
    (out.logprob * torch.arange(T) - out.entropy).sum().backward()
    return out, {k: v.grad for k, v in leaves.items()}


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_float64(backend: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "chunk_rows", lambda *_: 4)
    p = problem()
    ours, grads = step(linear_token_logprobs, p, softcap=softcap, backend=backend)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in p.items()}
    truth, true_grads = step(naive_linear_token_logprobs, wide, softcap=softcap)
    for name, a, b in zip(TokenStats._fields, ours, truth):
        assert relative(a, b) < 2e-6, name
    for k in grads:
        assert relative(grads[k], true_grads[k]) < 1e-5, k
    assert not grads["hidden"][~p["mask"]].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_is_no_worse_than_fp32_on_the_same_values(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "BLOCK_COLUMNS", 64)  # several blocks of the vocabulary, the last one short
    p = problem(torch.bfloat16)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in p.items()}
    truth, true_grads = step(naive_linear_token_logprobs, wide)
    ours, grads = step(linear_token_logprobs, p, backend=backend)
    for name, a, b in zip(TokenStats._fields, ours, truth):
        assert relative(a, b) < 2e-6, name
    for k in grads:
        assert grads[k].dtype == torch.bfloat16
        assert relative(grads[k], true_grads[k].bfloat16()) < 2**-8, k  # one rounding, at the end


def test_bf16_gradient_products_of_a_cpu_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(torch.bfloat16)
    _, want = step(linear_token_logprobs, p)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert gemm.gradient_dtype(p["hidden"]) == torch.bfloat16
    _, got = step(linear_token_logprobs, p)
    for k in got:
        assert relative(got[k], want[k]) < 2**-6, k


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_no_gradient_for_what_needs_none(frozen: str) -> None:
    p = problem()
    leaves = {k: p[k].clone().requires_grad_(k != frozen) for k in ("hidden", "weight", "bias")}
    linear_token_logprobs(**{**p, **leaves}).logprob.sum().backward()
    assert leaves[frozen].grad is None
    assert all(v.grad is not None for k, v in leaves.items() if k != frozen)


def test_a_row_gives_the_same_bits_alone_and_in_a_batch_of_4096() -> None:
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(4096, 64, generator=g).bfloat16()
    weight = torch.randn(1000, 64, generator=g).bfloat16()
    targets = torch.randint(1000, (4096,), generator=g)
    whole = torch.stack(list(linear_token_logprobs(hidden, weight, targets)))
    for r in (0, 1, 1999, 4095):
        alone = torch.stack(list(linear_token_logprobs(hidden[r : r + 1], weight, targets[r : r + 1])))
        assert torch.equal(alone[:, 0], whole[:, r]), r
