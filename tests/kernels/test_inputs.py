"""Bad input gives an error that names the argument."""

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
    trajectory_grad_norms,
)

T, H, V = 4, 3, 7
ROW = torch.zeros(T)
TARGETS = torch.zeros(T, dtype=torch.long)
CU = torch.tensor([0, T], dtype=torch.int32)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("kind", "ppo", ValueError),
        ("aggregation", "mean", ValueError),
        ("kl", "k4", ValueError),
        ("importance", "clip", ValueError),
        ("eps_low", 1.5, ValueError),
        ("eps_high", -0.1, ValueError),
        ("eps_high", float("nan"), ValueError),
        ("dual_clip", 0.9, ValueError),
        ("importance_cap", 0.0, ValueError),
        ("kl_coef", 0.1, ValueError),  # kl is 'none'
    ],
)
def test_spec_values(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=field):
        LossSpec(**{field: value})


@pytest.mark.parametrize("kind", ["cispo", "reinforce"])
def test_dual_clip_is_refused_where_it_means_nothing(kind: Any) -> None:
    with pytest.raises(NotImplementedError, match="dual_clip"):
        LossSpec(kind=kind, dual_clip=3.0)


def test_denominators() -> None:
    with pytest.raises(ValueError, match="tokens"):
        Denominators(tokens=-1, sequences=1)
    with pytest.raises(ValueError, match="max_length"):
        policy_loss(ROW, ROW, ROW, spec=LossSpec(aggregation="sequence_sum"), cu_seqlens=CU)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits", torch.zeros(T)),
        ("logits", torch.zeros(T, V, dtype=torch.long)),
        ("logits", torch.zeros(T, V, dtype=torch.float64)),
        ("logits", [[0.0]]),
        ("targets", torch.zeros(T + 1, dtype=torch.long)),
        ("targets", torch.zeros(T)),
        ("targets", torch.tensor([0, 0, 0, V])),
        ("targets", torch.tensor([0, -1, 0, 0])),
        ("temperature", 0),
        ("temperature", -1.0),
        ("temperature", torch.tensor([1.0, 0.0, 1.0, 1.0])),
        ("temperature", torch.ones(T - 1)),
        ("mask", torch.ones(T)),
        ("mask", torch.ones(T - 1, dtype=torch.bool)),
        ("backend", "cuda"),
    ],
)
def test_token_logprobs(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        token_logprobs(**{"logits": torch.zeros(T, V), "targets": TARGETS, name: value})


def test_masked_labels_may_be_anything() -> None:
    targets, mask = torch.tensor([0, -100, 0, V]), torch.tensor([True, False, True, False])
    assert token_logprobs(torch.zeros(T, V), targets, mask=mask).logprob[1] == 0


LINEAR = {"hidden": torch.zeros(T, H), "weight": torch.zeros(V, H), "targets": TARGETS}
LINEAR_BAD = [
    ("hidden", torch.zeros(T)),
    ("weight", torch.zeros(V, H + 1)),
    ("weight", torch.zeros(V, H, dtype=torch.bfloat16)),
    ("bias", torch.zeros(V + 1)),
    ("bias", torch.zeros(V, dtype=torch.bfloat16)),
    ("softcap", 0.0),
    ("temperature", 0.0),
    ("targets", TARGETS + V),
    ("mask", TARGETS),
]


@pytest.mark.parametrize(("name", "value"), LINEAR_BAD)
def test_linear_token_logprobs(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        linear_token_logprobs(**{**LINEAR, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *LINEAR_BAD,
        ("old_logprob", torch.zeros(T + 1)),
        ("old_logprob", TARGETS),
        ("advantages", torch.zeros(T, 1)),
        ("ref_logprob", None),
        ("behavior_logprob", None),
        ("cu_seqlens", torch.tensor([0, T + 1])),
        ("cu_seqlens", torch.tensor([0, 3, 2, T])),
        ("cu_seqlens", torch.tensor([0.0, T])),
        ("spec", "grpo"),
        ("backend", "cuda"),
    ],
)
def test_linear_policy_loss(name: str, value: Any) -> None:
    good = {
        **LINEAR,
        "old_logprob": ROW,
        "advantages": ROW,
        "ref_logprob": ROW,
        "behavior_logprob": ROW,
        "cu_seqlens": CU,
        "spec": LossSpec(kl="k3", kl_coef=0.1, importance="tis"),
    }
    linear_policy_loss(**good)
    with pytest.raises((ValueError, TypeError), match=name):
        linear_policy_loss(**{**good, name: value})


def test_policy_loss_entropy_needs() -> None:
    spec = LossSpec(entropy_coef=0.1)
    with pytest.raises(ValueError, match="entropy"):
        policy_loss(ROW, ROW, ROW, spec=spec, cu_seqlens=CU)
    with pytest.raises(NotImplementedError, match="entropy_coef"):
        policy_loss(ROW, ROW, ROW, spec=spec, cu_seqlens=CU, entropy=ROW, logit_grad_sqnorm=ROW)


def test_trajectory_grad_norms() -> None:
    with pytest.raises(ValueError, match="logit_grad_sqnorm"):
        trajectory_grad_norms(ROW, ROW[:2], CU)
    with pytest.raises(ValueError, match="cu_seqlens"):
        trajectory_grad_norms(ROW, ROW, CU + 1)


def test_backend_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTIR_KERNELS_BACKEND", "cutlass")
    with pytest.raises(ValueError, match="FASTIR_KERNELS_BACKEND"):
        token_logprobs(torch.zeros(T, V), TARGETS)
    monkeypatch.setenv("FASTIR_KERNELS_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="CUDA"):
        token_logprobs(torch.zeros(T, V), TARGETS)
