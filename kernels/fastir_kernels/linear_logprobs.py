"""Language-model head and token log-probabilities in one op: the (T, V) logits are never held."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import checks
from .backend import resolve
from .chunks import dlogits, row_chunks, stats
from .gemm import Head, add_weight_gradient, gradient_dtype
from .logprobs import naive_token_logprobs
from .spec import TokenStats
from .vocab_parallel import VocabParallel


@torch.library.custom_op("fastir_kernels::linear_token_logprobs", mutates_args=())
def _linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    softcap: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> logprob, entropy, ||pi - e_target||^2, lse, each (T,) fp32."""
    out = hidden.new_zeros((4, len(hidden)), dtype=torch.float32)
    head = Head(weight, bias, softcap)
    for r in row_chunks(len(hidden), mask, len(weight), hidden.device):
        out[:, r] = stats(backend, head.logits(hidden[r]), targets[r], 1 / temperature[r])
    return out[0].clone(), out[1].clone(), out[2].clone(), out[3].clone()


@_linear_token_logprobs.register_fake
def _(hidden: Tensor, *_: Any) -> Any:
    return tuple(hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(4))


@torch.library.custom_op("fastir_kernels::linear_token_logprobs_grad", mutates_args=())
def _grad(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    statistics: Tensor,
    dlogprob: Tensor | None,
    dentropy: Tensor | None,
    softcap: float,
    backend: str,
    need: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """-> d hidden, d weight, d bias; empty where not needed."""
    dhidden = torch.zeros_like(hidden) if need[0] else hidden.new_empty(0)
    dweight = torch.zeros_like(weight, dtype=torch.float32) if need[1] else weight.new_empty(0)
    dbias = weight.new_zeros(len(weight) if need[2] else 0, dtype=torch.float32)
    head = Head(weight, bias, softcap)
    for r in row_chunks(len(hidden), mask, len(weight), hidden.device):
        h = hidden[r]
        z = head.logits(h)
        c, e = (None if x is None else x[r].float() for x in (dlogprob, dentropy))
        dtype = gradient_dtype(hidden)
        dz = dlogits(backend, z, targets[r], 1 / temperature[r], statistics[:, r], c, e, softcap, dtype)[0]
        if need[0]:
            dhidden[r] = head.hidden_gradient(dz).to(dhidden.dtype)
        if need[1]:
            add_weight_gradient(dweight, dz, h)
        if need[2]:
            dbias += dz.sum(dim=0, dtype=torch.float32)
    del head  # their memory is room for the narrowed gradient
    return dhidden, dweight.to(weight.dtype), dbias if bias is None else dbias.to(bias.dtype)


@_grad.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    return fake_gradients(hidden, weight, bias, rest[-1])


def fake_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, need: list[bool]) -> tuple[Tensor, ...]:
    """Shapes and dtypes of d hidden, d weight, d bias."""
    dhidden = torch.empty_like(hidden) if need[0] else hidden.new_empty(0)
    dweight = torch.empty_like(weight) if need[1] else weight.new_empty(0)
    dbias = weight.new_empty(0, dtype=torch.float32) if bias is None else bias.new_empty(len(bias) if need[2] else 0)
    return dhidden, dweight, dbias


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, softcap, backend = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options = softcap, backend
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dlogprob: Tensor | None, dentropy: Tensor | None, *_: Any) -> Any:
    none = (None,) * 8
    if dlogprob is None and dentropy is None:
        return none
    *tensors, logprob, entropy, sqnorm, lse = ctx.saved_tensors
    statistics = torch.stack([logprob, entropy, sqnorm, lse])
    need = list(ctx.needs_input_grad[:3])
    made = _grad(*tensors, statistics, dlogprob, dentropy, *ctx.options, need)
    return *(g if n else None for g, n in zip(made, need)), *none[3:]


_linear_token_logprobs.register_autograd(_backward, setup_context=_setup)


def check_linear_inputs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError or TypeError naming the argument."""
    checks.matrix("hidden", hidden)
    checks.matrix("weight", weight, hidden.shape[1])
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and x.dtype != hidden.dtype:
            raise TypeError(f"{name} must have the dtype of hidden, {hidden.dtype}; got {x.dtype}")
        if x is not None and x.device != hidden.device:
            raise ValueError(f"{name} must be on {hidden.device}; it is on {x.device}")
    if bias is not None:
        checks.per_row("bias", bias, weight.shape[0], hidden.device)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    tp_group: ProcessGroup | None = None,
    vocab_start: int = 0,
    backend: str | None = None,
) -> TokenStats:
    """`token_logprobs` of logits = softcap(hidden weight^T + bias); forward 2THV, backward 6THV (logits recomputed).

    hidden (T, H), weight (V, H), bias (V,): bf16, fp16 or fp32, differentiable. targets (T,) int. softcap:
    softcap * tanh(x / softcap), before the temperature. temperature: scalar or (T,). mask (T,) bool: other rows take
    part in no product, give 0 and get a zero gradient. backend: as in `token_logprobs`.

    tp_group: weight and bias are this rank's rows, vocab_start and on, of a vocabulary cut over the group in contiguous
    shards of any size; hidden, targets, temperature and mask are the same on every rank. One all-gather of row
    statistics makes the result whole everywhere. The hidden gradient is summed over the group; upstream gradients must
    agree. Runs eagerly.

    Raises ValueError or TypeError naming the argument.
    """
    check_linear_inputs(hidden, weight, bias)
    rows, device = hidden.shape[0], hidden.device
    checks.mask_rows(mask, rows, device)
    checks.labels(targets, mask, rows, weight.shape[0] if tp_group is None else None, device)
    row_t = checks.row_temperature(temperature, rows, device)
    cap = checks.softcap_value(softcap)
    args = (hidden, weight, bias, targets, row_t, mask, cap, resolve(backend, device))
    if tp_group is None:
        logprob, entropy, sqnorm, lse = _linear_token_logprobs(*args)
    else:
        logprob, entropy, sqnorm, lse = VocabParallel.apply(*args, tp_group, vocab_start)
    return TokenStats(logprob, entropy, sqnorm.detach(), lse.detach())


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
