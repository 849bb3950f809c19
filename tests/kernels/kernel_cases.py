"""Random inputs shared by the kernel tests."""

from __future__ import annotations

import torch
from fastir_kernels import LossSpec
from torch import Tensor

BACKENDS = ("torch", "triton")

# Lengths 1 and 9: a sequence mean is where 1/len mistakes show. 0: an empty trajectory.
LENGTHS = (1, 9, 0, 5, 7)

SPECS = {
    "grpo": LossSpec(),
    "grpo_dual": LossSpec(dual_clip=1.5, aggregation="token_mean"),
    "grpo_sum": LossSpec(aggregation="sequence_sum"),
    "gspo": LossSpec(kind="gspo", eps_low=0.05, eps_high=0.05),
    "gspo_dual_token": LossSpec(kind="gspo", dual_clip=1.1, aggregation="token_mean", eps_low=0.02, eps_high=0.02),
    "cispo": LossSpec(kind="cispo", aggregation="token_mean"),
    "reinforce": LossSpec(kind="reinforce"),
    "k1": LossSpec(kl="k1", kl_coef=0.1),
    "k2": LossSpec(kl="k2", kl_coef=0.1),
    "k3": LossSpec(kl="k3", kl_coef=0.1, aggregation="token_mean"),
    "entropy": LossSpec(entropy_coef=0.05),
    "tis": LossSpec(importance="tis", importance_cap=1.2),
    "mis": LossSpec(importance="mis", importance_cap=1.2, kind="cispo"),
    "all": LossSpec(
        kind="gspo", eps_low=0.1, kl="k3", kl_coef=0.1, entropy_coef=0.02, importance="tis", aggregation="sequence_sum"
    ),
}


def bounds(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def policy_inputs(logprob: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """Per-token inputs around a log-probability vector (T,), about half of them outside a clip range of 0.2."""
    g = torch.Generator().manual_seed(seed)

    def near() -> Tensor:
        return logprob.detach() + 0.4 * torch.randn(len(logprob), generator=g, dtype=logprob.dtype)

    return {
        "old_logprob": near(),
        "behavior_logprob": near(),
        "ref_logprob": near(),
        "advantages": torch.randn(len(logprob), generator=g, dtype=logprob.dtype),
        "mask": torch.rand(len(logprob), generator=g) < 0.7,
    }


def relative(ours: Tensor, truth: Tensor) -> float:
    """Largest error over the largest true value."""
    return ((ours.double() - truth.double()).abs().max() / truth.double().abs().max().clamp(min=1e-300)).item()
