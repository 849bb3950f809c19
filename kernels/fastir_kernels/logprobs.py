"""Log-probability, entropy and gradient norm of the target token, from logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks
from .gemm import row_chunks
from .rows import row_grad, row_stats
from .spec import TokenStats


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor, mask: Tensor | None, inplace: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, vocabulary = logits.shape
        out = logits.new_zeros((4, rows), dtype=torch.float32)
        kept = torch.arange(rows, device=logits.device) if mask is None else mask.nonzero()[:, 0]
        for r in row_chunks(kept, vocabulary):
            stats = row_stats(logits[r].float(), targets[r].long(), 1 / temperature[r])
            for i, value in enumerate(stats):
                out[i, r] = value
        logprob, entropy, sqnorm, lse = (x.clone() for x in out)
        ctx.save_for_backward(logits, targets, temperature, kept, logprob, entropy, lse)
        ctx.inplace = inplace
        ctx.mark_non_differentiable(sqnorm, lse)
        return logprob, entropy, sqnorm, lse

    @staticmethod
    def backward(ctx: Any, dlogprob: Tensor, dentropy: Tensor, *_: Any) -> Any:
        logits, targets, temperature, kept, logprob, entropy, lse = ctx.saved_tensors
        grad = logits.detach() if ctx.inplace else torch.zeros_like(logits)
        if ctx.inplace and len(kept) < len(logits):
            masked = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
            masked[kept] = False
            grad[masked] = 0
        for r in row_chunks(kept, logits.shape[1]):
            grad[r] = row_grad(
                logits[r].float(),
                targets[r].long(),
                1 / temperature[r],
                logprob[r],
                entropy[r],
                lse[r],
                dlogprob[r],
                dentropy[r],
                0.0,
            )[0].to(grad.dtype)
        return grad, None, None, None, None


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> TokenStats:
    """`TokenStats` of softmax(logits / temperature) at targets.

    logits (T, V): bf16, fp16 or fp32, any strides, differentiable. targets (T,) int: row t predicts targets[t].
    temperature: scalar or (T,). mask (T,) bool: other rows are not read, give 0 and get a zero gradient.
    inplace_backward: the backward writes the gradient over the logits, whose values are lost.
    Raises ValueError or TypeError naming the argument.
    """
    checks.matrix("logits", logits)
    rows, device = logits.shape[0], logits.device
    checks.mask_rows(mask, rows, device)
    checks.labels(targets, mask, rows, logits.shape[1], device)
    row_t = checks.row_temperature(temperature, rows, device)
    return TokenStats(*_TokenLogprobs.apply(logits, targets, row_t, mask, inplace_backward))


def naive_token_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float | Tensor = 1.0, mask: Tensor | None = None
) -> TokenStats:
    """The specification: log-softmax, differentiated by autograd; any float dtype."""
    if mask is not None:
        logits = torch.where(mask[:, None], logits, 0.0)
        targets = torch.where(mask, targets, 0)
    t = temperature[:, None] if isinstance(temperature, Tensor) and temperature.dim() else temperature
    logpi = torch.log_softmax(logits / t, dim=1)
    pi = logpi.exp()
    column = targets.long()[:, None]
    logprob = logpi.gather(1, column)[:, 0]
    entropy = -torch.where(pi > 0, pi * logpi, 0.0).sum(dim=1)
    sqnorm = (pi - torch.zeros_like(pi).scatter(1, column, 1.0)).square().sum(dim=1)
    lse = torch.logsumexp(logits / t, dim=1)
    stats = TokenStats(logprob, entropy, sqnorm, lse)
    return stats if mask is None else TokenStats(*(torch.where(mask, x, 0.0) for x in stats))
