"""Row operations in torch: the statistics of softmax rows, and the gradient of a loss with respect to their logits.

Both work on s = logits / temperature with the target column a kept out of the sums: with m = max s,
r1 = sum_{j != a} e^{s_j - m}, r2 = sum_{j != a} e^{2(s_j - m)} and e_a = e^{s_a - m},

    logprob        = -log1p(r1 / e_a)              and 1 - pi_a = r1 / (r1 + e_a) without cancellation
    ||pi - e_a||^2 = (r1^2 + r2) / (r1 + e_a)^2
    entropy        = log(r1 + e_a) - (sum_j e^{s_j - m} (s_j - m)) / (r1 + e_a)

The sums are made block by block, each relative to its block's maximum. What touches every logit (`block_sums`,
`softmax_grad`, `entropy_grad`) runs compiled on a CPU with a C++ compiler; the target's column, and the sums of its
block, are done apart.
"""

from __future__ import annotations

import os
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Narrower rows gain nothing from compilation. A function of V alone, so that a row gives the same bits in any batch.
COMPILE_COLUMNS = 4096
# Columns summed in fp32 before the partial sums are added in float64: 64 terms for each of a register's 16 lanes.
BLOCK = 1024
PLAIN_BYTES = 64 << 20  # of fp32 logits that the plain path works on at a time


def exponential_sums(s: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """s (..., B) fp32 -> m = max s, and the sums over B of e^{s - m}, e^{2(s - m)} and e^{s - m} (s - m). -inf adds
    nothing."""
    m = s.amax(-1)
    s = s - torch.where(m == -torch.inf, 0.0, m).unsqueeze(-1)
    s = s.clamp(min=-1000.0)  # e^s is 0 there, and never 0 times infinity
    e = torch.exp(s)
    return m, e.sum(-1), (e * e).sum(-1), (e * s).sum(-1)


def block_sums(logits: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`exponential_sums` of each whole block of each row, (R, V // BLOCK)."""
    blocks = logits.shape[1] // BLOCK
    body = logits[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK))
    return exponential_sums(body.float() * inverse_temperature[:, None, None])


def row_stats(logits: Tensor, target: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits (R, V), target (R,) int64, inverse_temperature (R,) -> logprob, entropy, ||pi - e_a||^2, lse, each (R,).

    A -inf logit is a column outside the vocabulary. NaN stays in its own row. A negative target is a column in another
    shard: its logprob is -inf, and the norm 1 + sum pi^2.
    """
    rows, columns = logits.shape
    blocks = columns // BLOCK
    tail = blocks * BLOCK  # where the last, incomplete block begins
    compiled = columns >= COMPILE_COLUMNS
    # The target's block and the tail once more, without the target.
    again = logits.new_full((rows, 2 * BLOCK), -torch.inf)
    each = torch.arange(rows, device=logits.device)
    own = torch.where(target < tail, target, 0).clamp(min=0) // BLOCK
    if blocks:
        again[:, :BLOCK] = logits[:, :tail].unflatten(1, (blocks, BLOCK))[each, own]
    again[:, BLOCK : BLOCK + columns - tail] = logits[:, tail:]
    at_target = (each, torch.where(target < tail, target - own * BLOCK, target - tail + BLOCK).clamp(min=0))
    again[at_target] = torch.where(target < 0, again[at_target], -torch.inf)
    sums = _run(block_sums, compiled, logits, inverse_temperature)
    sums_again = _run(block_sums, compiled, again, inverse_temperature)
    if blocks:
        sums = (x.scatter(1, own[:, None], y[:, :1]) for x, y in zip(sums, sums_again))
    parts = tuple(torch.cat([x, y[:, 1:]], 1) for x, y in zip(sums, sums_again))

    s_a = logits.gather(1, target.clamp(min=0)[:, None])[:, 0].float() * inverse_temperature
    s_a = torch.where(target < 0, -torch.inf, s_a)
    block_m, r1, r2, first = parts
    m = torch.maximum(block_m.amax(1), s_a)
    m = torch.where(m == -torch.inf, 0.0, m)
    below = (block_m - m[:, None]).clamp(min=-1000.0)
    weight = torch.exp(below)
    first = (weight * (first + below * r1)).sum(1, dtype=torch.float64).float()
    r1 = (weight * r1).sum(1, dtype=torch.float64).float()
    r2 = (weight * weight * r2).sum(1, dtype=torch.float64).float()
    s_a = s_a - m
    e_a = torch.exp(s_a)
    first = first + torch.where(e_a > 0, e_a * s_a, 0.0)
    total = r1 + e_a
    log_total = torch.where(e_a == 1, torch.log1p(r1), torch.log(total))
    logprob = torch.where(e_a > r1, -torch.log1p(r1 / e_a), s_a - torch.log(total))
    return logprob, log_total - first / total, (r1 * r1 + r2) / (total * total), m + log_total


def softmax_grad(logits: Tensor, inverse_temperature: Tensor, lse: Tensor, scale: Tensor, out: Tensor) -> None:
    """out (R, V) = -scale pi."""
    out.copy_(torch.exp(logits.float() * inverse_temperature[:, None] - lse[:, None]) * -scale[:, None])


def entropy_grad(
    logits: Tensor,
    target: Tensor,
    inverse_temperature: Tensor,
    lse: Tensor,
    entropy: Tensor,
    scale: Tensor,
    to_target: Tensor,
    entropy_scale: Tensor,
    out: Tensor,
) -> Tensor:
    """out (R, V) = -scale pi - entropy_scale pi (log pi + entropy), to_target in place of the first term at the target;
    returns the squared norms of its rows."""
    is_target = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device) == target.int()[:, None]
    logpi = logits.float() * inverse_temperature[:, None] - lse[:, None]
    pi = torch.exp(logpi)
    grad = torch.where(is_target, to_target[:, None], -scale[:, None] * pi)
    grad = grad - torch.where(pi > 0, entropy_scale[:, None] * pi * (logpi + entropy[:, None]), 0.0)
    out.copy_(grad)
    return (grad * grad).sum(dim=1)


def row_grad(
    logits: Tensor,
    target: Tensor,
    inverse_temperature: Tensor,
    logprob: Tensor,
    entropy: Tensor,
    lse: Tensor,
    coefficient: Tensor | None,
    entropy_coefficient: Tensor | None,
    out: Tensor,
) -> Tensor | None:
    """Writes into out (R, V) the gradient of sum_t c_t logprob_t + h_t entropy_t with respect to the logits,

        [c (1[j = a] - pi_j) - h pi_j (log pi_j + entropy)] / T,

    and returns its squared norm per row (R,) when there is an entropy term, whose norm has no shorter form.
    out may be the logits themselves.
    """
    compiled = logits.shape[1] >= COMPILE_COLUMNS
    scale = inverse_temperature * (0.0 if coefficient is None else coefficient)
    to_target = scale * -torch.expm1(logprob) if coefficient is not None else scale
    if entropy_coefficient is None:
        _run(softmax_grad, compiled, logits, inverse_temperature, lse, scale, out)
        at_target = (torch.arange(len(out), device=out.device), target.clamp(min=0))  # torch scatters bf16 slowly
        out[at_target] = torch.where(target < 0, out[at_target], to_target.to(out.dtype))
        return None
    entropy_scale = inverse_temperature * entropy_coefficient
    rows = (logits, target, inverse_temperature, lse, entropy, scale, to_target, entropy_scale, out)
    return _run(entropy_grad, compiled, *rows)


@torch.no_grad()
def stats(logits: Tensor, target: Tensor, inverse_temperature: Tensor) -> Tensor:
    """`row_stats` as one (4, R) fp32 tensor."""
    with torch.autocast(logits.device.type, enabled=False):
        return torch.stack(row_stats(logits, target, inverse_temperature))


@torch.no_grad()
def grad(logits: Tensor, *rest: Any) -> Tensor | None:
    """`row_grad`."""
    with torch.autocast(logits.device.type, enabled=False):
        return row_grad(logits, *rest)


def _run(function: Any, compiled: bool, *args: Tensor) -> Any:
    """function(*args), compiled if asked, on a CPU. Every tensor has rows in dimension 0; the first one holds logits,
    and the last one, unless the function is `block_sums`, takes the result."""
    logits, out = args[0], args[-1]
    if not compiled or logits.device.type != "cpu" or len(logits) == 0:
        return _in_pieces(function, *args)
    in_place = out is logits
    key = (function, in_place, *(a.dtype for a in args))
    # A single row would be compiled apart, and might round otherwise.
    several = [a.detach() if len(a) > 1 else torch.cat([a.detach(), a.detach()]) for a in args]
    if in_place:
        several[-1] = several[0]
    if key not in _compiled:
        _compiled[key] = _compile(function, several)
    if _compiled[key] is function:
        return _in_pieces(function, *args)
    result = _compiled[key](*several)
    if len(logits) > 1:
        return result
    if function is block_sums:
        return tuple(x[:1] for x in result)
    out.copy_(several[-1][:1])
    return None if result is None else result[:1]


def _in_pieces(function: Any, *args: Tensor) -> Any:
    """function(*args) for a few rows at a time: uncompiled, it holds several fp32 copies of its logits."""
    rows, columns = args[0].shape
    step = max(1, PLAIN_BYTES // (4 * columns))
    if rows <= step:
        return function(*args)
    results = [function(*(x[a : a + step] for x in args)) for a in range(0, rows, step)]
    if results[0] is None:
        return None
    return tuple(map(torch.cat, zip(*results))) if function is block_sums else torch.cat(results)


_compiled: dict[Any, Callable[..., Any]] = {}


def _compile(function: types.FunctionType, args: list[Tensor]) -> Callable[..., Any]:
    """function compiled for any number of rows >= 2 and of columns, or itself, with a warning that says why."""
    if os.environ.get("FASTIR_KERNELS_COMPILE", "1") == "0":
        return function
    # torch counts compilations per code object, and gives up after a few: each variant gets its own.
    own = types.FunctionType(function.__code__.replace(), function.__globals__)
    compiled = torch.compile(own, dynamic=True, fullgraph=True)
    # The loop structure follows the first shapes seen: many rows, so that threads share rows, never a row.
    like = [a.new_zeros((256, *[COMPILE_COLUMNS] * (a.dim() - 1))) for a in args]
    if args[-1] is args[0]:
        like[-1] = like[0]
    try:
        compiled(*like)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        warnings.warn(f"fastir_kernels falls back to its slower plain torch path: {reason}", stacklevel=2)
        return function
    return compiled
