"""Language-model head and policy loss in one op: gradients of hidden and weight are made in the forward pass (6THV)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks
from .gemm import linear_logits, operand, row_chunks
from .logprobs import naive_token_logprobs
from .norms import segment_sum
from .policy import assemble, check_policy_inputs, naive_policy_loss, row_terms, row_weights, sequence_log_ratio
from .rows import row_grad, row_stats
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
    grad_hidden: bool,
    grad_weight: bool,
    grad_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> logprob, entropy, squared norm of the row of dloss/dlogits, each (T,) fp32; d hidden, d weight, d bias
    (empty where not asked for)."""
    spec = unpack(choices, numbers)
    rows, vocabulary = hidden.shape[0], weight.shape[0]
    kept = mask.nonzero()[:, 0]
    w = operand(weight)
    b = None if bias is None else operand(bias)
    stats = hidden.new_zeros((3, rows), dtype=torch.float32)  # logprob, entropy, grad_sqnorm
    dhidden = torch.zeros_like(hidden) if grad_hidden else hidden.new_empty(0)
    dweight = w.new_zeros(weight.shape) if grad_weight else w.new_empty(0)
    dbias = w.new_zeros(vocabulary) if grad_bias else w.new_empty(0)
    chunks = row_chunks(kept, vocabulary)

    def logits_of(r: Tensor) -> tuple[Tensor, Tensor]:
        h = operand(hidden.index_select(0, r))
        return h, linear_logits(h, w, b, softcap)

    sequence_ratio = None
    if spec.kind == "gspo" and old_logprob is not None:  # the sequence ratio needs every row first
        for r in chunks:
            stats[0, r] = row_stats(logits_of(r)[1], targets[r].long(), 1 / temperature[r])[0]
        own = segment_sum(mask, cu_seqlens)
        sequence_ratio = sequence_log_ratio(stats[0] - old_logprob.float(), mask, own, trajectory, cu_seqlens)

    for r in chunks:
        h, z = logits_of(r)
        target, inverse, weights = targets[r].long(), 1 / temperature[r], row_weight[r]
        logprob, entropy, sqnorm, lse = row_stats(z, target, inverse)
        stats[0, r], stats[1, r] = logprob, entropy
        old = logprob if old_logprob is None else old_logprob[r].float()
        log_ratio = logprob - old if sequence_ratio is None else sequence_ratio[r]
        log_importance = None if behavior_logprob is None else old - behavior_logprob[r].float()
        ref = None if ref_logprob is None else ref_logprob[r].float()
        terms = row_terms(spec, logprob, log_ratio, advantages[r].float(), log_importance, ref)
        coefficient = weights * terms.coefficient
        if not (grad_hidden or grad_weight or grad_bias) and not spec.entropy_coef:
            scale = coefficient * inverse
            stats[2, r] = torch.where(scale == 0, 0.0, scale.square() * sqnorm)
            continue
        live = (coefficient != 0).nonzero()[:, 0] if not spec.entropy_coef else torch.arange(len(r), device=r.device)
        if len(live) == 0:
            continue
        if len(live) < len(r):
            h, z, r = h[live], z[live], r[live]
        entropy_coefficient = -spec.entropy_coef * weights[live] if spec.entropy_coef else None
        dz, grad_sqnorm = row_grad(
            z,
            target[live],
            inverse[live],
            logprob[live],
            entropy[live],
            lse[live],
            coefficient[live],
            entropy_coefficient,
            softcap,
        )
        stats[2, r] = grad_sqnorm
        if grad_hidden:
            dhidden[r] = torch.mm(dz, w).to(dhidden.dtype)
        if grad_weight:
            dweight.addmm_(dz.t(), h)
        if grad_bias:
            dbias += dz.sum(dim=0)
    dweight = dweight.to(weight.dtype)
    if bias is not None:
        dbias = dbias.to(bias.dtype)
    return stats[0].clone(), stats[1].clone(), stats[2].clone(), dhidden, dweight, dbias


@_linear_policy.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Any:
    grad_hidden, grad_weight, grad_bias = args[-3:]
    per_row = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    dhidden = torch.empty_like(hidden) if grad_hidden else hidden.new_empty(0)
    dweight = weight.new_empty(weight.shape) if grad_weight else weight.new_empty(0)
    dbias = weight.new_empty(0, dtype=torch.float32) if bias is None else bias.new_empty(len(bias) if grad_bias else 0)
    return per_row, torch.empty_like(per_row), torch.empty_like(per_row), dhidden, dweight, dbias


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
    Rows outside the mask take part in no product; rows whose coefficient is 0 leave the backward ones.

    Raises ValueError or TypeError naming the argument.
    """
    checks.matrix("hidden", hidden)
    checks.matrix("weight", weight, hidden.shape[1])
    rows, device = hidden.shape[0], hidden.device
    if weight.dtype != hidden.dtype:
        raise TypeError(f"weight must have the dtype of hidden, {hidden.dtype}; got {weight.dtype}")
    if bias is not None:
        checks.per_row("bias", bias, weight.shape[0], device)
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
        graph and hidden.requires_grad,
        graph and weight.requires_grad,
        graph and bias is not None and bias.requires_grad,
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
