"""Log-probability, entropy and gradient norm of the target token, from logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks, rows
from .backend import resolve
from .chunks import row_chunks, stats
from .spec import TokenStats


@torch.library.custom_op("fastir_kernels::token_logprobs", mutates_args=())
def _token_logprobs(
    logits: Tensor, targets: Tensor, temperature: Tensor, mask: Tensor | None, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> logprob, entropy, ||pi - e_target||^2, lse, each (T,) fp32."""
    if backend == "triton":
        from . import rows_triton

        out = rows_triton.stats(logits, targets, 1 / temperature, mask)
    else:
        out = logits.new_zeros((4, len(logits)), dtype=torch.float32)
        chunks = row_chunks(len(logits), mask, logits.shape[1], logits.device)
        if chunks and isinstance(chunks[0], slice) and logits.is_contiguous():
            chunks = [slice(None)]  # nothing is copied
        for r in chunks:
            out[:, r] = stats(backend, logits[r], targets[r], 1 / temperature[r])
    return out[0].clone(), out[1].clone(), out[2].clone(), out[3].clone()


@_token_logprobs.register_fake
def _(logits: Tensor, *_: Any) -> Any:
    return tuple(logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(4))


@torch.library.custom_op("fastir_kernels::token_logprobs_grad", mutates_args=())
def _grad(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    logprob: Tensor,
    entropy: Tensor,
    lse: Tensor,
    dlogprob: Tensor | None,
    dentropy: Tensor | None,
    backend: str,
) -> Tensor:
    """-> dlogits (T, V), contiguous, in the dtype of the logits."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _write_grad(logits, out, targets, temperature, mask, logprob, entropy, lse, dlogprob, dentropy, backend)
    return out


@_grad.register_fake
def _(logits: Tensor, *_: Any) -> Any:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op("fastir_kernels::token_logprobs_grad_", mutates_args=("logits",))
def _grad_(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    logprob: Tensor,
    entropy: Tensor,
    lse: Tensor,
    dlogprob: Tensor | None,
    dentropy: Tensor | None,
    backend: str,
) -> None:
    """Writes dlogits over the logits."""
    _write_grad(logits, logits, targets, temperature, mask, logprob, entropy, lse, dlogprob, dentropy, backend)


def _write_grad(
    logits: Tensor,
    out: Tensor,
    targets: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    logprob: Tensor,
    entropy: Tensor,
    lse: Tensor,
    dlogprob: Tensor | None,
    dentropy: Tensor | None,
    backend: str,
) -> None:
    dlogprob = None if dlogprob is None else dlogprob.float().contiguous()
    dentropy = None if dentropy is None else dentropy.float().contiguous()
    if backend == "triton":
        from . import rows_triton

        rows_triton.grad(logits, targets, 1 / temperature, logprob, entropy, lse, dlogprob, dentropy, mask, out)
        return
    if mask is not None:
        out.masked_fill_(~mask[:, None], 0)
    for r in row_chunks(len(logits), mask, logits.shape[1], logits.device):
        source = logits[r]
        z = source.contiguous()
        part = z if z is source and out is logits else torch.empty_like(z)
        c, h = (None if x is None else x[r] for x in (dlogprob, dentropy))
        rows.grad(z, targets[r].long(), 1 / temperature[r], logprob[r], entropy[r], lse[r], c, h, part)
        if not (isinstance(r, slice) and part is z):
            out[r] = part


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    logits, targets, temperature, mask, backend = inputs
    logprob, entropy, _, lse = output
    ctx.save_for_backward(logits, targets, temperature, mask, logprob, entropy, lse)
    ctx.backend = backend
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dlogprob: Tensor | None, dentropy: Tensor | None, *_: Any) -> Any:
    if dlogprob is None and dentropy is None:
        return None, None, None, None, None
    return _grad(*ctx.saved_tensors, dlogprob, dentropy, ctx.backend), None, None, None, None


_token_logprobs.register_autograd(_backward, setup_context=_setup)


class _InplaceBackward(torch.autograd.Function):
    """The same op, whose backward reuses the memory of the logits."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _token_logprobs(*inputs)
        _setup(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, dlogprob: Tensor | None, dentropy: Tensor | None, *_: Any) -> Any:
        if dlogprob is None and dentropy is None:
            return None, None, None, None, None
        logits, *rest = ctx.saved_tensors
        _grad_(logits.detach(), *rest, dlogprob, dentropy, ctx.backend)
        return logits.detach(), None, None, None, None


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
    backend: ``torch``, ``triton`` or None for the variable FASTIR_KERNELS_BACKEND or the device's own.
    Raises ValueError or TypeError naming the argument.
    """
    checks.matrix("logits", logits)
    rows, device = logits.shape[0], logits.device
    checks.mask_rows(mask, rows, device)
    checks.labels(targets, mask, rows, logits.shape[1], device)
    row_t = checks.row_temperature(temperature, rows, device)
    op = _InplaceBackward.apply if inplace_backward else _token_logprobs
    logprob, entropy, sqnorm, lse = op(logits, targets, row_t, mask, resolve(backend, device))
    return TokenStats(logprob, entropy, sqnorm.detach(), lse.detach())


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
    entropy = -(pi * torch.where(pi > 0, logpi, 0.0)).sum(dim=1)
    sqnorm = (pi - torch.zeros_like(pi).scatter(1, column, 1.0)).square().sum(dim=1)
    lse = torch.logsumexp(logits / t, dim=1)
    stats = TokenStats(logprob, entropy, sqnorm, lse)
    return stats if mask is None else TokenStats(*(torch.where(mask, x, 0.0) for x in stats))
