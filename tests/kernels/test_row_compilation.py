"""The compiled row operations of the torch backend, and what happens where they cannot be compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fastir_kernels import rows, token_logprobs
from kernel_cases import relative


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(3, 4500, generator=g), torch.randint(4500, (3,), generator=g)


def test_without_a_compiler_the_plain_path_runs_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        def compiled(*_: Any) -> Any:
            raise RuntimeError("no working C++ compiler")

        return compiled

    z, targets = problem()
    want = token_logprobs(z, targets)
    monkeypatch.setattr(rows, "_compiled", {})
    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.warns(UserWarning, match="plain torch path: no working C\\+\\+ compiler"):
        got = token_logprobs(z, targets)
    assert all(relative(a, b) < 2e-6 for a, b in zip(got, want))


def test_the_plain_path_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    z, targets = problem()
    monkeypatch.setattr(rows, "_compiled", {})
    monkeypatch.setenv("FASTIR_KERNELS_COMPILE", "0")
    token_logprobs(z, targets)
    assert list(rows._compiled.values()) == [rows.block_sums]


def test_other_shapes_are_not_compiled_again() -> None:
    z, targets = problem()
    token_logprobs(z, targets)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n, columns in ((1, 4500), (2, 4097), (3, 4499)):
            token_logprobs(z[:n, :columns], targets[:n] % columns)
