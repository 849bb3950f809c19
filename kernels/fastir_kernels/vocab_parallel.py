"""Token log-probabilities over a vocabulary that is cut across the ranks of a tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def merge_shards(parts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whole-row logprob, entropy, ||pi - e_target||^2 and lse, each (T,), from the shards' own, (ranks, 5, T).

    Per shard and row: those four of the shard alone, and 1 where it holds the target, otherwise 0 (its norm then counts
    the missing target as 1 + sum pi^2). With p_r the probability of shard r, 1 - pi_target is p (1 - pi_target) of the
    owner plus the p of the others: no cancellation.
    """
    logprob, entropy, sqnorm, lse, own = parts.unbind(1)
    owned = own > 0
    whole = torch.logsumexp(lse, dim=0)
    log_p = lse - whole
    p = log_p.exp()
    missing = torch.where(owned, -torch.expm1(logprob), 1.0)  # of the shard's own mass, what is not on the target
    q = (p * missing).sum(0)
    others = torch.where(p > 0, p.square() * (sqnorm - missing.square()), 0.0).sum(0)  # sum of pi_j^2, j != target
    far = torch.where(owned, logprob + log_p, 0.0).sum(0)
    whole_logprob = torch.where(q < 0.5, torch.log1p(-q), far)
    whole_entropy = torch.where(p > 0, p * (entropy - log_p), 0.0).sum(0)
    return whole_logprob, whole_entropy, q.square() + others, whole


class VocabParallel(torch.autograd.Function):
    """Forward: one all-gather of (5, T). Backward: one all-reduce of the hidden gradient."""

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
        backend: str,
        group: dist.ProcessGroup,
        vocab_start: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from .linear_logprobs import _linear_token_logprobs

        local = targets - vocab_start
        own = (local >= 0) & (local < len(weight))
        local = torch.where(own, local, -1)
        mine = _linear_token_logprobs(hidden, weight, bias, local, temperature, mask, softcap, backend)
        packed = torch.stack([*mine, own.float()])
        parts = packed.new_empty((dist.get_world_size(group), *packed.shape))
        dist.all_gather(list(parts.unbind(0)), packed, group=group)
        whole = merge_shards(parts)
        if mask is not None:
            whole = tuple(torch.where(mask, x, 0.0) for x in whole)  # type: ignore[assignment]
        ctx.save_for_backward(hidden, weight, bias, local, temperature, mask, torch.stack(whole))
        ctx.options = softcap, backend
        ctx.group = group
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(whole[2], whole[3])
        return whole

    @staticmethod
    def backward(ctx: Any, dlogprob: Tensor | None, dentropy: Tensor | None, *_: Any) -> Any:
        from .linear_logprobs import _grad

        none = (None,) * 10
        if dlogprob is None and dentropy is None:
            return none
        need = list(ctx.needs_input_grad[:3])
        made = _grad(*ctx.saved_tensors, dlogprob, dentropy, *ctx.options, need)
        if need[0]:
            total = made[0].float()
            dist.all_reduce(total, group=ctx.group)
            made = (total.to(made[0].dtype), *made[1:])
        return *(g if n else None for g, n in zip(made, need)), *none[3:]
