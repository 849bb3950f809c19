"""Language-model head and policy loss in one op: gradients of hidden and weight are made in the forward pass (6THV)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks
from .backend import resolve
from .chunks import dlogits, row_chunks
from .chunks import stats as row_stats
from .gemm import Head, add_weight_gradient, gradient_dtype, keep_rows
from .linear_logprobs import check_linear_inputs, fake_gradients
from .logprobs import naive_token_logprobs
from .norms import segment_sum
from .policy import assemble, check_policy_inputs, naive_policy_loss, row_terms, row_weights, sequence_log_ratio
from .spec import Denominators, LossSpec, PolicyLoss, pack, unpack


@torch.library.custom_op("fastir_kernels::linear_policy", mutates_args=())
def _linear_policy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    mask: Tensor,
    row_weight: Tensor,
    cu_seqlens: Tensor,
    trajectory: Tensor,
    advantages: Tensor,
    old_logprob: Tensor | None,
    behavior_logprob: Tensor | None,
    ref_logprob: Tensor | None,
    softcap: float,
    choices: str,
    numbers: list[float],
    backend: str,
    need: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> logprob, entropy, squared norm of the row of dloss/dlogits, each (T,) fp32; d hidden, d weight, d bias
    (empty where not needed)."""
    spec = unpack(choices, numbers)
    stats = hidden.new_zeros((4, len(hidden)), dtype=torch.float32)
    grad_sqnorm = torch.zeros_like(stats[0])
    dhidden = torch.zeros_like(hidden) if need[0] else hidden.new_empty(0)
    dweight = torch.zeros_like(weight, dtype=torch.float32) if need[1] else weight.new_empty(0)
    dbias = weight.new_zeros(len(weight) if need[2] else 0, dtype=torch.float32)
    chunks = row_chunks(len(hidden), mask, len(weight), hidden.device)
    head = Head(weight, bias, softcap)

    sequence_ratio = None
    if spec.kind == "gspo" and old_logprob is not None:  # the ratio of a sequence needs all of its rows first
        for r in chunks:
            stats[:, r] = row_stats(backend, head.logits(hidden[r]), targets[r], 1 / temperature[r])
        own = segment_sum(mask, cu_seqlens)
        sequence_ratio = sequence_log_ratio(stats[0] - old_logprob.float(), mask, own, trajectory, cu_seqlens)

    def chunk(r: Tensor | slice, head: Head) -> None:
        h, target, inverse = hidden[r], targets[r], 1 / temperature[r]
        z = head.logits(h)
        st = row_stats(backend, z, target, inverse)
        stats[:, r] = st
        old = st[0] if old_logprob is None else old_logprob[r].float()
        log_ratio = st[0] - old if sequence_ratio is None else sequence_ratio[r]
        log_importance = None if behavior_logprob is None else old - behavior_logprob[r].float()
        ref = None if ref_logprob is None else ref_logprob[r].float()
        terms = row_terms(spec, st[0], log_ratio, advantages[r].float(), log_importance, ref)
        c = row_weight[r] * terms.coefficient
        e = -spec.entropy_coef * row_weight[r] if spec.entropy_coef else None
        if e is None and not any(need):
            scale = c * inverse
            grad_sqnorm[r] = torch.where(scale == 0, 0.0, scale.square() * st[2])
            return
        where: Tensor | slice = r
        if e is None:  # rows without a gradient leave the products, if they are worth a copy of the rest; NaN stays
            live = (c != 0).nonzero()[:, 0]
            if len(live) == 0:
                return
            if len(live) <= 0.9 * len(c):
                where = live + r.start if isinstance(r, slice) else r[live]
                z = keep_rows(z, live)
                h, target, inverse, st, c = h[live], target[live], inverse[live], st[:, live], c[live]
        dz, grad_sqnorm[where] = dlogits(backend, z, target, inverse, st, c, e, softcap, gradient_dtype(hidden))
        if need[0]:
            dhidden[where] = head.hidden_gradient(dz).to(dhidden.dtype)
        if need[1]:
            add_weight_gradient(dweight, dz, h)
        if need[2]:
            dbias.add_(dz.sum(dim=0, dtype=torch.float32))

    for r in chunks:
        chunk(r, head)  # a function, so that its logits are gone when the narrowed gradient needs room
    del head
    dbias = dbias if bias is None else dbias.to(bias.dtype)
    return stats[0].clone(), stats[1].clone(), grad_sqnorm, dhidden, dweight.to(weight.dtype), dbias


@_linear_policy.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    per_row = [hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(3)]
    return *per_row, *fake_gradients(hidden, weight, bias, rest[-1])


class _Attach(torch.autograd.Function):
    """Gives a loss the gradients that were made with it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: Tensor, dh: Tensor, dw: Tensor, db: Tensor
    ) -> Tensor:
        ctx.save_for_backward(dh, dw, db)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        made = (g * grad.to(g.dtype) if need else None for g, need in zip(ctx.saved_tensors, ctx.needs_input_grad))
        return *made, None, None, None, None


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprob: Tensor | None,
    advantages: Tensor,
    *,
    spec: LossSpec,
    mask: Tensor | None = None,
    cu_seqlens: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    behavior_logprob: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    denominators: Denominators | None = None,
    backend: str | None = None,
) -> PolicyLoss:
    """`policy_loss` of logits = softcap(hidden weight^T + bias), which are never held as a whole (T, V).

    hidden (T, H) and weight (V, H): bf16, fp16 or fp32, differentiable; bias (V,) likewise. targets (T,) int: row t
    predicts targets[t] (the caller shifts). old_logprob (T,), or None: this very policy, ratio 1. mask (T,) bool: rows
    that train; the others are not read and their gradient is 0. cu_seqlens (N + 1,): trajectory bounds. temperature:
    scalar or (T,). The other arguments and the result are those of `policy_loss`; per_token also holds entropy and
    grad_sqnorm, per_trajectory grad_norm, all exact with an entropy term too.

    The gradients of hidden, weight and bias are made in the forward pass and scaled by the upstream gradient in the
    backward: three matrix products, none recomputed (but ``gspo`` needs every ratio first and makes the logits twice).
    Rows outside the mask take part in no product; rows whose coefficient is 0 leave the backward ones (of a chunk in
    which they are a tenth or more). The upstream gradient is rounded to the dtype of what it scales.

    Raises ValueError or TypeError naming the argument.
    """
    check_linear_inputs(hidden, weight, bias)
    rows, device = hidden.shape[0], hidden.device
    check_policy_inputs(
        spec,
        rows,
        device,
        old_logprob=old_logprob,
        advantages=advantages,
        mask=mask,
        cu_seqlens=cu_seqlens,
        behavior_logprob=behavior_logprob,
        ref_logprob=ref_logprob,
    )
    checks.labels(targets, mask, rows, weight.shape[0], device)
    row_t = checks.row_temperature(temperature, rows, device)
    if mask is None:
        mask = torch.ones(rows, dtype=torch.bool, device=device)
    row_weight, _, trajectory = row_weights(spec, mask, cu_seqlens, denominators)
    graph = torch.is_grad_enabled()
    logprob, entropy, grad_sqnorm, dh, dw, db = _linear_policy(
        hidden.detach(),
        weight.detach(),
        None if bias is None else bias.detach(),
        targets,
        row_t,
        mask,
        row_weight,
        cu_seqlens,
        trajectory,
        advantages.detach(),
        None if old_logprob is None else old_logprob.detach(),
        None if behavior_logprob is None else behavior_logprob.detach(),
        None if ref_logprob is None else ref_logprob.detach(),
        checks.softcap_value(softcap),
        *pack(spec),
        resolve(backend, device),
        [graph and x is not None and x.requires_grad for x in (hidden, weight, bias)],
    )
    result = assemble(
        spec,
        logprob,
        entropy,
        old_logprob=old_logprob,
        advantages=advantages,
        mask=mask,
        cu_seqlens=cu_seqlens,
        behavior_logprob=behavior_logprob,
        ref_logprob=ref_logprob,
        denominators=denominators,
    )
    loss = _Attach.apply(hidden, weight, bias, result.loss, dh, dw, db)
    norms = segment_sum(grad_sqnorm, cu_seqlens).sqrt().float()
    return PolicyLoss(
        loss,
        result.per_token_coefficient,
        result.metrics,
        {**result.per_trajectory, "grad_norm": norms},
        {**result.per_token, "grad_sqnorm": grad_sqnorm},
    )


def naive_linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprob: Tensor | None,
    advantages: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    **policy: Any,
) -> Tensor:
    """The specification: materialised logits, log-softmax, textbook loss; any float dtype."""
    logits = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    stats = naive_token_logprobs(logits, targets, temperature=temperature, mask=mask)
    return naive_policy_loss(stats.logprob, old_logprob, advantages, mask=mask, entropy=stats.entropy, **policy)
