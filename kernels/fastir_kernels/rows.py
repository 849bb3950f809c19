"""Row kernels in torch: the statistics of softmax rows, and the gradient of a loss with respect to them.

Both work on s = logits / temperature with the target column a kept out of the sums: with m = max s,
r1 = sum_{j != a} e^{s_j - m}, r2 = sum_{j != a} e^{2(s_j - m)} and e_a = e^{s_a - m},

    logprob        = -log1p(r1 / e_a)              and 1 - pi_a = r1 / (r1 + e_a) without cancellation
    ||pi - e_a||^2 = (r1^2 + r2) / (r1 + e_a)^2
    entropy        = log(r1 + e_a) - (sum_j e^{s_j - m} (s_j - m)) / (r1 + e_a)

They are written for any float dtype; the torch backend runs them in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_stats(logits: Tensor, target: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits (R, V), target (R,) int64, inverse_temperature (R,) -> logprob, entropy, ||pi - e_a||^2, lse, each (R,).

    A -inf logit is a column outside the vocabulary. NaN stays in its own row.
    """
    column = target[:, None]
    s = logits * inverse_temperature[:, None]
    m = s.amax(dim=1, keepdim=True)
    m = torch.where(m == -torch.inf, 0.0, m)
    s = s - m
    s_a = s.gather(1, column)[:, 0]
    others = torch.exp(s).scatter(1, column, 0.0)
    e_a = torch.exp(s_a)
    r1 = others.sum(dim=1)
    r2 = others.square().sum(dim=1)
    total = r1 + e_a
    first = torch.where(others > 0, others * s, 0.0).sum(dim=1) + torch.where(e_a > 0, e_a * s_a, 0.0)
    likely = e_a > r1
    log_total = torch.where(e_a == 1, torch.log1p(r1), torch.log(total))
    logprob = torch.where(likely, -torch.log1p(r1 / e_a), s_a - torch.log(total))
    entropy = log_total - first / total
    sqnorm = (r1.square() + r2) / total.square()
    return logprob, entropy, sqnorm, m[:, 0] + log_total


def row_grad(
    logits: Tensor,
    target: Tensor,
    inverse_temperature: Tensor,
    logprob: Tensor,
    entropy: Tensor,
    lse: Tensor,
    coefficient: Tensor,
    entropy_coefficient: Tensor | None,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Gradient of sum_t c_t logprob_t + h_t entropy_t: (R, V) with respect to the logits before the softcap, and
    (R,) its squared norm with respect to the logits after it.

    d/dlogits_j = [c (1[j = a] - pi_j) - h pi_j (log pi_j + entropy)] / T. `softcap` 0 means none; otherwise `logits`
    are softcap * tanh(x / softcap) and the chain rule to x is applied.
    """
    column = target[:, None]
    logpi = logits * inverse_temperature[:, None] - lse[:, None]
    pi = torch.exp(logpi)
    grad = -coefficient[:, None] * pi
    at_target = coefficient * -torch.expm1(logprob)
    if entropy_coefficient is not None:
        spread = torch.where(pi > 0, pi * (logpi + entropy[:, None]), 0.0)
        grad = grad - entropy_coefficient[:, None] * spread
        at_target = at_target - entropy_coefficient * spread.gather(1, column)[:, 0]
    grad = grad.scatter(1, column, at_target[:, None]) * inverse_temperature[:, None]
    sqnorm = grad.square().sum(dim=1)
    if softcap:
        grad = grad * (1 - (logits / softcap).square())
    return grad, sqnorm
