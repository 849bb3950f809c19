"""The ops inside torch.compile, activation checkpointing, FSDP2; DTensor weights are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fastir_kernels import LossSpec, linear_policy_loss, linear_token_logprobs, logprobs, token_logprobs
from kernel_cases import SPECS, bounds, policy_inputs, relative
from torch.utils.checkpoint import checkpoint

T, H, V = 22, 8, 50
CU = bounds()


def problem() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(T, H, generator=g).requires_grad_(),
        "weight": torch.randn(V, H, generator=g).requires_grad_(),
        "targets": torch.randint(V, (T,), generator=g),
        **policy_inputs(torch.full((T,), -3.0)),
    }


def loss_of(hidden: torch.Tensor, weight: torch.Tensor, spec: LossSpec, p: dict[str, Any]) -> torch.Tensor:
    rest = {k: v for k, v in p.items() if k not in ("hidden", "weight")}
    return linear_policy_loss(hidden * 1.5, weight, spec=spec, cu_seqlens=CU, **rest).loss


def eager(spec: LossSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p = problem()
    loss = loss_of(p["hidden"], p["weight"], spec, p)
    loss.backward()
    return loss.detach(), p["hidden"].grad, p["weight"].grad


@pytest.mark.parametrize("name", ["entropy", "gspo"])
def test_linear_policy_loss_compiles_as_one_graph(name: str) -> None:
    p = problem()
    loss = torch.compile(loss_of, fullgraph=True, backend="aot_eager")(p["hidden"], p["weight"], SPECS[name], p)
    loss.backward()
    want = eager(SPECS[name])
    for a, b in zip((loss, p["hidden"].grad, p["weight"].grad), want):
        assert relative(a, b) < 1e-6


def test_log_probabilities_compile_as_one_graph() -> None:
    def both(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        a = linear_token_logprobs(hidden, weight, targets)
        b = token_logprobs(hidden @ weight.t(), targets, temperature=0.5)
        return (a.logprob + b.logprob * b.entropy).sum()

    p, q = problem(), problem()
    torch.compile(both, fullgraph=True, backend="aot_eager")(p["hidden"], p["weight"], p["targets"]).backward()
    both(q["hidden"], q["weight"], q["targets"]).backward()
    assert relative(p["hidden"].grad, q["hidden"].grad) < 1e-6
    assert relative(p["weight"].grad, q["weight"].grad) < 1e-6


def test_a_new_completion_length_does_not_recompile() -> None:
    compiled = torch.compile(
        lambda z, t: token_logprobs(z, t).logprob.sum(), fullgraph=True, backend="aot_eager", dynamic=True
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (5, 6, 17):
            compiled(torch.randn(rows, V), torch.zeros(rows, dtype=torch.long))


def test_custom_op_registration_is_sound() -> None:
    z = torch.randn(4, V, requires_grad=True)
    args = (z, torch.zeros(4, dtype=torch.long), torch.ones(4), None, "torch")
    torch.library.opcheck(logprobs._token_logprobs, args)


def test_activation_checkpointing() -> None:
    p = problem()
    loss = checkpoint(loss_of, p["hidden"], p["weight"], SPECS["grpo"], p, use_reentrant=False)
    loss.backward()
    for a, b in zip((loss, p["hidden"].grad, p["weight"].grad), eager(SPECS["grpo"])):
        assert torch.equal(a, b)


def test_an_autocast_region_does_not_round_the_products() -> None:
    p = problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rest = {k: v for k, v in p.items() if k != "hidden"}
        loss = linear_policy_loss(p["hidden"] * 1.5, spec=SPECS["grpo"], cu_seqlens=CU, **rest).loss
    loss.backward()
    for a, b in zip((loss, p["hidden"].grad, p["weight"].grad), eager(SPECS["grpo"])):
        assert torch.equal(a, b)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Head(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, hidden: torch.Tensor, p: dict[str, Any]) -> torch.Tensor:
        return loss_of(hidden, self.weight, SPECS["grpo"], p)


@pytest.mark.usefixtures("one_process")
def test_inside_an_fsdp2_forward_and_not_outside() -> None:
    from torch.distributed.fsdp import fully_shard

    p = problem()
    head = Head(p["weight"].detach().clone())
    fully_shard(head, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    loss = head(p["hidden"], p)
    loss.backward()
    want = eager(SPECS["grpo"])
    assert torch.equal(loss.detach(), want[0])
    assert torch.equal(head.weight.grad.full_tensor(), want[2])
    head.reshard()
    with pytest.raises(TypeError, match="weight is a DTensor"):
        linear_token_logprobs(p["hidden"], head.weight, p["targets"])
