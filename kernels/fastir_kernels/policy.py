"""The policy loss on per-token log-probabilities: loss, derivatives, and metrics that add up exactly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks
from .norms import segment_index, segment_sum, trajectory_grad_norms
from .spec import Denominators, LossSpec, PolicyLoss


class RowTerms(NamedTuple):
    """Per row, before the row weight: loss terms, dloss/dlogprob, and what the metrics need."""

    policy: Tensor
    kl: Tensor
    coefficient: Tensor
    ratio: Tensor
    importance: Tensor | None
    clip_low: Tensor
    clip_high: Tensor
    dual: Tensor


def row_terms(
    spec: LossSpec,
    logprob: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    log_importance: Tensor | None,
    ref_logprob: Tensor | None,
) -> RowTerms:
    """All (R,), of any float dtype. log_ratio is the row's own, or its trajectory's mean for ``gspo``."""
    ratio = torch.exp(log_ratio)
    low, high = 1 - spec.eps_low, 1 + spec.eps_high
    above, below = ratio > high, ratio < low
    positive, negative = advantages > 0, advantages < 0
    never = torch.zeros_like(above)
    dual = never
    if spec.kind in ("grpo", "gspo"):
        clip_low, clip_high = below & negative, above & positive
        policy = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        if spec.dual_clip is not None:
            dual = negative & (ratio > spec.dual_clip)
            policy = torch.where(dual, -spec.dual_clip * advantages, policy)
        slope = torch.where(clip_low | clip_high | dual, 0.0, -ratio * advantages)
    elif spec.kind == "cispo":
        clip_low, clip_high = below, above
        slope = -ratio.clamp(low, high) * advantages
        policy = slope * logprob
    else:
        clip_low = clip_high = never
        slope = -advantages
        policy = slope * logprob
    policy = torch.where(advantages == 0, 0.0, policy)  # also where the ratio overflowed
    slope = torch.where(advantages == 0, 0.0, slope)

    importance = None
    if log_importance is not None and spec.importance != "none":
        weight = torch.exp(log_importance)
        if spec.importance == "tis":
            importance = weight.clamp(max=spec.importance_cap)
        else:
            importance = torch.where(weight > spec.importance_cap, 0.0, weight)
        policy, slope = policy * importance, slope * importance

    kl = torch.zeros_like(policy)
    if spec.kl != "none":
        assert ref_logprob is not None
        d = ref_logprob - logprob
        if spec.kl == "k1":
            kl, dkl = -d, torch.ones_like(d)
        elif spec.kl == "k2":
            kl, dkl = d.square() / 2, -d
        else:
            kl, dkl = torch.expm1(d) - d, -torch.expm1(d)
        if spec.kl_coef:
            slope = slope + spec.kl_coef * dkl
    return RowTerms(policy, kl, slope, ratio, importance, clip_low, clip_high, dual)


def row_weights(
    spec: LossSpec, mask: Tensor, cu_seqlens: Tensor, denominators: Denominators | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Row weights (T,) fp32, 0 where masked; trained tokens of each trajectory (N,); trajectory of each row (T,)."""
    own = segment_sum(mask, cu_seqlens)
    index = segment_index(cu_seqlens, mask.shape[0])
    tokens: Any = own.sum() if denominators is None else denominators.tokens
    sequences: Any = (own > 0).sum() if denominators is None else denominators.sequences
    weight = mask.double()
    if spec.aggregation == "token_mean":
        weight = weight / tokens
    elif spec.aggregation == "sequence_mean":
        weight = weight / (own.clamp(min=1)[index] * sequences)
    else:
        if denominators is None or denominators.max_length is None:
            raise ValueError("denominators.max_length is needed for LossSpec.aggregation 'sequence_sum'")
        weight = weight / (sequences * denominators.max_length)
    return torch.where(mask, weight, 0.0).float(), own, index


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, own: Tensor, index: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(T,): for each row the mean of log_ratio over the trained rows of its trajectory; masked rows are not read."""
    total = segment_sum(torch.where(mask, log_ratio, 0.0), cu_seqlens)
    return (total / own.clamp(min=1))[index].to(log_ratio.dtype)


def check_policy_inputs(
    spec: LossSpec,
    rows: int,
    device: torch.device,
    *,
    old_logprob: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor,
    behavior_logprob: Tensor | None,
    ref_logprob: Tensor | None,
) -> None:
    """Raise ValueError or TypeError naming the argument."""
    if not isinstance(spec, LossSpec):
        raise TypeError(f"spec must be a LossSpec; got {type(spec).__name__}")
    checks.per_row("old_logprob", old_logprob, rows, device)
    checks.per_row("advantages", advantages, rows, device)
    checks.per_row("behavior_logprob", behavior_logprob, rows, device)
    checks.per_row("ref_logprob", ref_logprob, rows, device)
    checks.mask_rows(mask, rows, device)
    checks.offsets(cu_seqlens, rows, device)
    if spec.kl != "none" and ref_logprob is None:
        raise ValueError(f"ref_logprob is needed for LossSpec.kl {spec.kl!r}")
    if spec.importance != "none" and behavior_logprob is None:
        raise ValueError(f"behavior_logprob is needed for LossSpec.importance {spec.importance!r}")


def assemble(
    spec: LossSpec,
    logprob: Tensor,
    entropy: Tensor | None,
    *,
    old_logprob: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    behavior_logprob: Tensor | None,
    ref_logprob: Tensor | None,
    denominators: Denominators | None,
) -> PolicyLoss:
    """The detached PolicyLoss of (T,) log-probabilities, still without grad_norm. Masked rows are not read."""
    weight, own, index = row_weights(spec, mask, cu_seqlens, denominators)

    def clean(x: Tensor) -> Tensor:
        return torch.where(mask, x.detach().float(), 0.0)

    logprob = clean(logprob)
    old = logprob if old_logprob is None else clean(old_logprob)
    behavior = None if behavior_logprob is None else clean(behavior_logprob)
    ref = None if ref_logprob is None else clean(ref_logprob)
    log_ratio = logprob - old
    used = sequence_log_ratio(log_ratio, mask, own, index, cu_seqlens) if spec.kind == "gspo" else log_ratio
    terms = row_terms(spec, logprob, used, clean(advantages), None if behavior is None else old - behavior, ref)

    def total(x: Tensor) -> Tensor:
        return torch.where(mask, x, 0.0).double().sum().float()

    def largest(x: Tensor, empty: float) -> Tensor:
        return torch.cat([torch.where(mask, x, empty), x.new_full((1,), empty)]).max()

    policy = torch.where(weight > 0, weight * terms.policy, 0.0)
    kl = torch.where(weight > 0, weight * terms.kl, 0.0) * spec.kl_coef
    row_loss = policy + kl
    loss_entropy = torch.zeros_like(weight)
    if spec.entropy_coef:
        assert entropy is not None
        loss_entropy = -spec.entropy_coef * weight * clean(entropy)
        row_loss = row_loss + loss_entropy
    metrics = {
        "tokens_count": own.sum().float(),
        "sequences_count": (own > 0).sum().float(),
        "loss_policy_sum": total(policy),
        "loss_kl_sum": total(kl),
        "loss_entropy_sum": total(loss_entropy),
        "ratio_sum": total(terms.ratio),
        "ratio_max": largest(terms.ratio, 1.0 if old_logprob is None else 0.0),
        "ratio_min": -largest(-terms.ratio, -torch.inf),
        "log_ratio_abs_max": largest(log_ratio.abs(), 0.0),
        "old_kl_sum": total(torch.expm1(log_ratio) - log_ratio),
        "clip_low_count": total(terms.clip_low.float()),
        "clip_high_count": total(terms.clip_high.float()),
        "dual_clip_count": total(terms.dual.float()),
        "logprob_sum": total(logprob),
    }
    per_token = {"logprob": logprob, "weight": weight}
    if entropy is not None:
        per_token["entropy"] = clean(entropy)
        metrics["entropy_sum"] = total(entropy.detach())
    if ref is not None:
        d = ref - logprob
        metrics["ref_kl_sum"] = total(terms.kl if spec.kl != "none" else torch.expm1(d) - d)
    if behavior is not None:
        gap = old - behavior
        metrics["behavior_kl_sum"] = total(torch.expm1(gap) - gap)
        metrics["behavior_log_ratio_abs_max"] = largest(gap.abs(), 0.0)
        if terms.importance is not None:
            metrics["importance_sum"] = total(terms.importance)
            metrics["importance_capped_count"] = total((torch.exp(gap) > spec.importance_cap).float())
    return PolicyLoss(
        loss=row_loss.double().sum().float(),
        per_token_coefficient=torch.where(weight > 0, weight * terms.coefficient, 0.0),
        metrics=metrics,
        per_trajectory={"tokens": own.float(), "loss": segment_sum(row_loss, cu_seqlens).float()},
        per_token=per_token,
    )


class _Attach(torch.autograd.Function):
    """Gives a loss its known derivatives to logprob and entropy."""

    @staticmethod
    def forward(
        ctx: Any,
        logprob: Tensor,
        entropy: Tensor | None,
        loss: Tensor,
        coefficient: Tensor,
        entropy_coefficient: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(coefficient, entropy_coefficient)
        ctx.dtypes = logprob.dtype, None if entropy is None else entropy.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        coefficient, entropy_coefficient = ctx.saved_tensors
        to_entropy = (grad * entropy_coefficient).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return (grad * coefficient).to(ctx.dtypes[0]), to_entropy, None, None, None


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor | None,
    advantages: Tensor,
    *,
    spec: LossSpec,
    mask: Tensor | None = None,
    cu_seqlens: Tensor,
    behavior_logprob: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    entropy: Tensor | None = None,
    logit_grad_sqnorm: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    denominators: Denominators | None = None,
) -> PolicyLoss:
    """Policy loss sum_t w_t (policy term + kl_coef KL - entropy_coef entropy) of `spec`, see `LossSpec`.

    logprob (T,): differentiable. old_logprob (T,): the policy whose ratio is clipped; None: this very policy, ratio 1.
    advantages (T,). mask (T,) bool: rows that train; the others are not read. cu_seqlens (N + 1,): trajectory bounds.
    behavior_logprob, ref_logprob (T,): sampler and reference. entropy (T,): needed for, and differentiable through,
    entropy_coef. logit_grad_sqnorm (T,) and temperature: when given, grad_norm per trajectory is returned.
    denominators: global counts; None: this batch is the whole batch. See `PolicyLoss` for the result.

    Raises ValueError or TypeError naming the argument; NotImplementedError for grad_norm together with an entropy term,
    whose norm needs the logits (`linear_policy_loss` gives it).
    """
    checks.per_row("logprob", logprob, logprob.shape[0], logprob.device)
    rows, device = logprob.shape[0], logprob.device
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
    checks.per_row("entropy", entropy, rows, device)
    checks.per_row("logit_grad_sqnorm", logit_grad_sqnorm, rows, device)
    if spec.entropy_coef and entropy is None:
        raise ValueError("entropy is needed for a nonzero LossSpec.entropy_coef")
    if spec.entropy_coef and logit_grad_sqnorm is not None:
        raise NotImplementedError("grad_norm with LossSpec.entropy_coef needs the logits: use linear_policy_loss")
    if mask is None:
        mask = torch.ones(rows, dtype=torch.bool, device=device)
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
    coefficient = result.per_token_coefficient
    per_trajectory, per_token = dict(result.per_trajectory), dict(result.per_token)
    if logit_grad_sqnorm is not None:
        sqnorm = torch.where(mask, logit_grad_sqnorm.detach().float(), 0.0)
        per_trajectory["grad_norm"] = trajectory_grad_norms(coefficient, sqnorm, cu_seqlens, temperature)
        scale = coefficient / checks.row_temperature(temperature, rows, device)
        per_token["grad_sqnorm"] = torch.where(scale == 0, 0.0, scale.square() * sqnorm)
    entropy_coefficient = -spec.entropy_coef * per_token["weight"]
    loss = _Attach.apply(logprob, entropy, result.loss, coefficient, entropy_coefficient)
    return PolicyLoss(loss, coefficient, result.metrics, per_trajectory, per_token)


def naive_policy_loss(
    logprob: Tensor,
    old_logprob: Tensor | None,
    advantages: Tensor,
    *,
    spec: LossSpec,
    mask: Tensor | None = None,
    cu_seqlens: Tensor,
    behavior_logprob: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    entropy: Tensor | None = None,
    denominators: Denominators | None = None,
) -> Tensor:
    """The specification: the loss alone, trajectory by trajectory in textbook form, differentiated by autograd."""
    bounds = cu_seqlens.tolist()
    keep = torch.ones_like(logprob, dtype=torch.bool) if mask is None else mask
    rows = [torch.arange(a, b, device=logprob.device)[keep[a:b]] for a, b in pairwise(bounds)]
    tokens = sum(len(r) for r in rows) if denominators is None else denominators.tokens
    sequences = sum(len(r) > 0 for r in rows) if denominators is None else denominators.sequences
    loss = logprob.new_zeros(()) + 0.0 * logprob[:0].sum()
    for r in rows:
        if len(r) == 0:
            continue
        lp, A = logprob[r], advantages[r]
        old = lp.detach() if old_logprob is None else old_logprob[r]
        ratio = torch.exp(lp - old)
        if spec.kind == "gspo":
            ratio = torch.exp((lp - old).mean()).detach() * torch.exp(lp - lp.detach())
        clipped = ratio.clamp(1 - spec.eps_low, 1 + spec.eps_high)
        if spec.kind in ("grpo", "gspo"):
            objective = torch.minimum(ratio * A, clipped * A)
            if spec.dual_clip is not None:
                objective = torch.where(A < 0, torch.maximum(objective, spec.dual_clip * A), objective)
        elif spec.kind == "cispo":
            objective = clipped.detach() * A * lp
        else:
            objective = A * lp
        if spec.importance != "none":
            assert behavior_logprob is not None
            w = torch.exp(old - behavior_logprob[r]).detach()
            objective = objective * (
                w.clamp(max=spec.importance_cap) if spec.importance == "tis" else w * (w <= spec.importance_cap)
            )
        row = -objective
        if spec.kl != "none":
            assert ref_logprob is not None
            d = ref_logprob[r] - lp
            row = row + spec.kl_coef * {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - d - 1}[spec.kl]
        if spec.entropy_coef:
            assert entropy is not None
            row = row - spec.entropy_coef * entropy[r]
        if spec.aggregation == "token_mean":
            loss = loss + row.sum() / tokens
        elif spec.aggregation == "sequence_mean":
            loss = loss + row.mean() / sequences
        else:
            assert denominators is not None
            assert denominators.max_length is not None
            loss = loss + row.sum() / (sequences * denominators.max_length)
    return loss
