"""Row operations in torch: the statistics of softmax rows, and the gradient of a loss with respect to their logits.

Both work on s = logits / temperature with the target column a kept out of the sums: with m = max s,
r1 = sum_{j != a} e^{s_j - m}, r2 = sum_{j != a} e^{2(s_j - m)} and e_a = e^{s_a - m},

    logprob        = -log1p(r1 / e_a)              and 1 - pi_a = r1 / (r1 + e_a) without cancellation
    ||pi - e_a||^2 = (r1^2 + r2) / (r1 + e_a)^2
    entropy        = log(r1 + e_a) - (sum_j e^{s_j - m} (s_j - m)) / (r1 + e_a)

`row_stats` and `row_grad` are one formula each; on a CPU with a C++ compiler they run compiled, else as is.
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


def row_stats(logits: Tensor, target: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits (R, V), target (R,) int64, inverse_temperature (R,) -> logprob, entropy, ||pi - e_a||^2, lse, each (R,).

    A -inf logit is a column outside the vocabulary. NaN stays in its own row. A negative target is a column in another
    shard: its logprob is -inf, and the norm 1 + sum pi^2.
    """
    s_a = logits.gather(1, target.clamp(min=0)[:, None])[:, 0].float() * inverse_temperature
    s_a = torch.where(target < 0, -torch.inf, s_a)
    is_target = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device) == target.int()[:, None]
    s = logits.float() * inverse_temperature[:, None]
    m = s.amax(dim=1)
    m = torch.where(m == -torch.inf, 0.0, m)
    s, s_a = s - m[:, None], s_a - m
    others = torch.where(is_target, 0.0, torch.exp(s))
    e_a = torch.exp(s_a)
    # Eager torch sums pairwise; compiled code adds thousands of terms to each lane, too many for fp32.
    wide = torch.float64 if torch.compiler.is_compiling() else torch.float32
    r1 = others.sum(dim=1, dtype=wide).float()
    r2 = (others * others).sum(dim=1, dtype=wide).float()
    first = torch.where(others > 0, others * s, 0.0).sum(dim=1, dtype=wide).float()
    first = first + torch.where(e_a > 0, e_a * s_a, 0.0)
    total = r1 + e_a
    log_total = torch.where(e_a == 1, torch.log1p(r1), torch.log(total))
    logprob = torch.where(e_a > r1, -torch.log1p(r1 / e_a), s_a - torch.log(total))
    return logprob, log_total - first / total, (r1 * r1 + r2) / (total * total), m + log_total


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
    is_target = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device) == target.int()[:, None]
    logpi = logits.float() * inverse_temperature[:, None] - lse[:, None]
    pi = torch.exp(logpi)
    grad = torch.zeros_like(pi)
    if coefficient is not None:
        to_target = coefficient * -torch.expm1(logprob)
        grad = torch.where(is_target, to_target[:, None], -coefficient[:, None] * pi)
    if entropy_coefficient is not None:
        grad = grad - torch.where(pi > 0, entropy_coefficient[:, None] * pi * (logpi + entropy[:, None]), 0.0)
    grad = grad * inverse_temperature[:, None]
    sqnorm = None if entropy_coefficient is None else (grad * grad).sum(dim=1)
    out.copy_(grad)
    return sqnorm


def stats(logits: Tensor, target: Tensor, inverse_temperature: Tensor) -> Tensor:
    """`row_stats` as one (4, R) fp32 tensor."""
    return torch.stack(_run(row_stats, logits, target, inverse_temperature))


def grad(
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
    """`row_grad`."""
    rows = (logits, target, inverse_temperature, logprob, entropy, lse, coefficient, entropy_coefficient, out)
    return _run(row_grad, *rows)


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def _run(function: Any, *args: Tensor | None) -> Any:
    """function(*args), compiled where that pays. Every tensor has rows in dimension 0; the first one holds logits."""
    logits, out = args[0], args[-1]
    assert logits is not None
    if logits.device.type != "cpu" or logits.shape[1] < COMPILE_COLUMNS or len(logits) == 0:
        return function(*args)
    in_place = out is logits
    key = (function, logits.dtype, tuple(a is None for a in args), in_place)
    plain = [None if a is None else a.detach() for a in args]
    # A single row would be compiled apart, and might round otherwise.
    plain = plain if len(logits) > 1 else [None if a is None else torch.cat([a, a]) for a in plain]
    if in_place:
        plain[-1] = plain[0]
    if key not in _compiled:
        _compiled[key] = _compile(function, plain)
    result = _compiled[key](*plain)
    if len(logits) > 1:
        return result
    if function is row_grad:
        assert plain[-1] is not None
        out.copy_(plain[-1][:1])  # type: ignore[union-attr]
        return None if result is None else result[:1]
    return tuple(x[:1] for x in result)


_compiled: dict[Any, Callable[..., Any]] = {}


def _compile(function: types.FunctionType, args: list[Tensor | None]) -> Callable[..., Any]:
    """function compiled for any number of rows >= 2 and of columns, or itself, with a warning that says why."""
    if os.environ.get("FASTIR_KERNELS_COMPILE", "1") == "0":
        return function
    # torch counts compilations per code object, and gives up after a few: each variant gets its own.
    own = types.FunctionType(function.__code__.replace(), function.__globals__)
    compiled = torch.compile(own, dynamic=True, fullgraph=True)
    # The loop structure follows the first shapes seen: many rows, so that threads share rows, never a row.
    like = [None if a is None else a.new_zeros((256, *[COMPILE_COLUMNS] * (a.dim() - 1))) for a in args]
    if args[-1] is args[0]:
        like[-1] = like[0]
    try:
        compiled(*like)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        warnings.warn(f"fastir_kernels falls back to its slower plain torch path: {reason}", stacklevel=2)
        return function
    return compiled
