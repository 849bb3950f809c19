"""Language-model head and token log-probabilities in one op: the (T, V) logits are never held."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks
from .gemm import linear_logits, operand, row_chunks
from .logprobs import naive_token_logprobs
from .rows import row_grad, row_stats
from .spec import TokenStats


class _LinearTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        mask: Tensor | None,
        softcap: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows = hidden.shape[0]
        out = hidden.new_zeros((4, rows), dtype=torch.float32)
        kept = torch.arange(rows, device=hidden.device) if mask is None else mask.nonzero()[:, 0]
        w = operand(weight)
        b = None if bias is None else operand(bias)
        for r in row_chunks(kept, len(w)):
            z = linear_logits(operand(hidden[r]), w, b, softcap)
            stats = row_stats(z, targets[r].long(), 1 / temperature[r])
            for i, value in enumerate(stats):
                out[i, r] = value
        logprob, entropy, sqnorm, lse = (x.clone() for x in out)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, kept, logprob, entropy, lse)
        ctx.softcap = softcap
        ctx.mark_non_differentiable(sqnorm, lse)
        return logprob, entropy, sqnorm, lse

    @staticmethod
    def backward(ctx: Any, dlogprob: Tensor, dentropy: Tensor, *_: Any) -> Any:
        hidden, weight, bias, targets, temperature, kept, logprob, entropy, lse = ctx.saved_tensors
        w = operand(weight)
        b = None if bias is None else operand(bias)
        dhidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(w) if ctx.needs_input_grad[1] else None
        dbias = w.new_zeros(len(w)) if ctx.needs_input_grad[2] else None
        for r in row_chunks(kept, len(w)):
            h = operand(hidden[r])
            z = linear_logits(h, w, b, ctx.softcap)
            dz, _sqnorm = row_grad(
                z,
                targets[r].long(),
                1 / temperature[r],
                logprob[r],
                entropy[r],
                lse[r],
                dlogprob[r],
                dentropy[r],
                ctx.softcap,
            )
            if dhidden is not None:
                dhidden[r] = torch.mm(dz, w).to(dhidden.dtype)
            if dweight is not None:
                dweight.addmm_(dz.t(), h)
            if dbias is not None:
                dbias += dz.sum(dim=0)
        return (
            dhidden,
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> TokenStats:
    """`token_logprobs` of logits = softcap(hidden weight^T + bias); forward 2THV, backward 6THV (logits recomputed).

    hidden (T, H), weight (V, H), bias (V,): bf16, fp16 or fp32, differentiable. targets (T,) int. softcap:
    softcap * tanh(x / softcap), before the temperature. temperature: scalar or (T,). mask (T,) bool: other rows take
    part in no product, give 0 and get a zero gradient. Raises ValueError or TypeError naming the argument.
    """
    checks.matrix("hidden", hidden)
    checks.matrix("weight", weight, hidden.shape[1])
    if weight.dtype != hidden.dtype:
        raise TypeError(f"weight must have the dtype of hidden, {hidden.dtype}; got {weight.dtype}")
    rows, device = hidden.shape[0], hidden.device
    if bias is not None:
        checks.per_row("bias", bias, weight.shape[0], device)
    checks.mask_rows(mask, rows, device)
    checks.labels(targets, mask, rows, weight.shape[0], device)
    row_t = checks.row_temperature(temperature, rows, device)
    cap = checks.softcap_value(softcap)
    return TokenStats(*_LinearTokenLogprobs.apply(hidden, weight, bias, targets, row_t, mask, cap))


def naive_linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
) -> TokenStats:
    """The specification: materialised logits, log-softmax, autograd; any float dtype."""
    logits = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return naive_token_logprobs(logits, targets, temperature=temperature, mask=mask)
