"""Ours beside each peer on the same tensors, on a CPU: ``pytest bench/bench_kernels.py --benchmark-json=FILE``.

Each entry's extra_info holds the peak extra memory of one call in MiB, and its error against float64 relative to the
largest true value: of log-probabilities, entropies, or weight gradients. ``python bench/kernels_table.py FILE``
makes a table of it.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_peers import Problem, logits_peers, loss_peers, make_problem
from torch import Tensor

ROUNDS = 5


def peak_extra_mib(call: Callable[[], object]) -> float:
    """Growth of the process's resident peak over one call, after a first call has warmed everything up."""
    gc.collect()

    def status(field: str) -> int:
        return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again here
    before = status("VmRSS")
    call()
    return (status("VmHWM") - before) / 1024


def relative(ours: Tensor, truth: Tensor) -> float:
    return ((ours.double() - truth).abs().max() / truth.abs().max()).item()


@pytest.fixture(scope="module", params=[1.0, 0.5], ids=["all_rows", "half_the_rows"])
def problem(request: pytest.FixtureRequest) -> tuple[Problem, Tensor]:
    """The batch of the linear loss, and the true weight gradient."""
    p = make_problem(4, 256, 576, 49152, torch.bfloat16, request.param)
    keep = p.mask.flatten()
    h = p.hidden.flatten(0, 1)[keep].double()
    w = p.weight.double()
    truth = torch.zeros_like(w)
    a = p.advantages[:, None].expand_as(p.targets).flatten()[keep].double()
    weight = (p.mask / p.mask.sum(1, keepdim=True) / len(p.mask)).flatten()[keep].double()
    old, targets = p.old_logprob.flatten()[keep].double(), p.targets.flatten()[keep]
    for r in torch.arange(len(h)).split(128):
        pi = torch.softmax(h[r] @ w.t(), 1)
        ratio = torch.exp(pi.gather(1, targets[r, None])[:, 0].log() - old[r])
        passes = ~((a[r] > 0) & (ratio > 1.28) | (a[r] < 0) & (ratio < 0.8))
        c = -weight[r] * ratio * a[r] * passes
        dz = -c[:, None] * pi
        dz[torch.arange(len(r)), targets[r]] += c
        truth += dz.t() @ h[r]
    return p, truth


@pytest.mark.parametrize("name", loss_peers())
def test_policy_loss(name: str, problem: tuple[Problem, Tensor], benchmark: Any) -> None:
    """Forward and backward of head and GRPO loss: 1024 tokens, H 576, V 49152, bf16, entropy and norms included."""
    p, truth = problem
    function = loss_peers()[name]
    hidden, weight = p.hidden.clone().requires_grad_(), p.weight.clone().requires_grad_()
    q = Problem(hidden, weight, p.targets, p.old_logprob, p.advantages, p.mask)

    def step() -> None:
        hidden.grad = weight.grad = None
        function(q).backward()

    benchmark.group = f"policy loss, {int(p.mask.float().mean() * 100 + 0.5)} % of the rows"
    benchmark.name = name
    benchmark.pedantic(step, rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["error"] = relative(weight.grad, truth)
    hidden.grad = weight.grad = None
    benchmark.extra_info["peak_extra_mib"] = peak_extra_mib(step)


@pytest.fixture(scope="module")
def logits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """2048 x 49152 bf16 logits, targets, true logprob and entropy."""
    g = torch.Generator().manual_seed(0)
    z = (3 * torch.randn(2048, 49152, generator=g)).bfloat16()
    targets = torch.randint(49152, (2048,), generator=g)
    logprob, entropy = torch.zeros(2, 2048, dtype=torch.float64)
    for r in torch.arange(2048).split(128):
        logpi = torch.log_softmax(z[r].double(), 1)
        logprob[r], entropy[r] = logpi.gather(1, targets[r, None])[:, 0], -(logpi.exp() * logpi).sum(1)
    return z, targets, logprob, entropy


@pytest.mark.parametrize("name", logits_peers())
def test_token_logprobs(name: str, logits: tuple[Tensor, Tensor, Tensor, Tensor], benchmark: Any) -> None:
    """Log-probability and entropy (ours: the gradient norm too) of 2048 bf16 rows, V 49152."""
    z, targets, logprob, entropy = logits
    function = logits_peers()[name]
    out: list[Tensor] = []

    def step() -> None:
        with torch.no_grad():
            out[:] = function(z, targets)

    benchmark.group = "token log-probabilities"
    benchmark.name = name
    benchmark.pedantic(step, rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["error"] = relative(out[0], logprob)
    benchmark.extra_info["entropy_error"] = relative(out[1], entropy)
    out.clear()
    benchmark.extra_info["peak_extra_mib"] = peak_extra_mib(step)
