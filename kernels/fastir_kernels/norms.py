"""Deterministic sums over the rows of each trajectory, and the gradient norms made of them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from . import checks


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(T,) -> (N,): the sum over each trajectory's rows, in row order, in float64; 0 for an empty trajectory."""
    return torch.segment_reduce(values.double(), "sum", offsets=cu_seqlens.long(), unsafe=True, initial=0)


def segment_index(cu_seqlens: Tensor, rows: int) -> Tensor:
    """(T,) int64: the trajectory that each row belongs to."""
    row = torch.arange(rows, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous().long(), row, right=True)


def trajectory_grad_norms(
    coefficient: Tensor, logit_grad_sqnorm: Tensor, cu_seqlens: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """Exact Frobenius norm of dL/dlogits over each trajectory, for a loss that sees the logits through logprob only.

    sqrt(sum_t c_t^2 ||pi_t - e_t||^2 / T_t^2), since each row of logits belongs to one token.

    coefficient (T,): dL/dlogprob. logit_grad_sqnorm (T,): from `token_logprobs` or `linear_token_logprobs`.
    cu_seqlens (N + 1,). temperature: scalar or (T,). Returns (N,) fp32.
    Raises ValueError or TypeError naming the argument. An entropy term changes the row gradient: not covered here, but
    `linear_policy_loss` covers it.
    """
    rows, device = coefficient.shape[0], coefficient.device
    checks.per_row("coefficient", coefficient, rows, device)
    checks.per_row("logit_grad_sqnorm", logit_grad_sqnorm, rows, device)
    checks.offsets(cu_seqlens, rows, device)
    scale = coefficient.double() / checks.row_temperature(temperature, rows, device).double()
    square = torch.where(scale == 0, 0.0, scale.square() * logit_grad_sqnorm.double())
    return segment_sum(square, cu_seqlens).sqrt().float()


def naive_trajectory_grad_norms(dlogits: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The specification: dL/dlogits (T, V) -> (N,)."""
    bounds = cu_seqlens.tolist()
    return torch.stack([dlogits[a:b].norm() for a, b in pairwise(bounds)])
