"""One optimizer update: packed micro-batches → fused loss → gradients → clip → AdamW, with its statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from fastir_kernels import Denominators, LossSpec, PolicyLoss, linear_policy_loss, linear_token_logprobs
from torch.distributed.tensor import DTensor

from fastir.config import LossConfig, OptimizerConfig
from fastir.training.attention import PackedAttention
from fastir.training.model import Policy
from fastir.training.packing import anchor_batch
from fastir.types import PackedBatch


@dataclass
class UpdateStats:
    """What one update did. Arrays hold this rank's trained tokens, in packed order, one entry per token."""

    loss: float  #: global: the sum of every rank's and micro-batch's share
    grad_norm: float  #: global norm of the parameters' gradient before clipping
    skipped: bool  #: loss or gradient was not finite and the weights were left alone
    sums: dict[str, float] = field(default_factory=dict)  #: the loss's own metrics, all-reduced by their suffix
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0))
    behavior_logprobs: np.ndarray = field(default_factory=lambda: np.empty(0))
    grad_sqnorms: np.ndarray = field(default_factory=lambda: np.empty(0))  #: ‖∂L/∂logits‖² of the token's row
    turn_ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    trajectories: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


def loss_spec(config: LossConfig) -> LossSpec:
    """The kernel's description of the configured loss."""
    return LossSpec(
        kind=config.kind,
        eps_low=config.eps_low,
        eps_high=config.eps_high,
        dual_clip=config.dual_clip,
        aggregation=config.aggregation,
        entropy_coef=config.entropy_coef,
        importance=config.importance_correction,
        importance_cap=config.importance_cap,
    )


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of rollout step ``step`` of ``steps``: linear warm-up, then the schedule down to final_lr_ratio."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    match config.schedule:
        case "constant":
            shape = 1.0
        case "linear":
            shape = 1.0 - (1.0 - config.final_lr_ratio) * progress
        case "cosine":
            shape = config.final_lr_ratio + (1.0 - config.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * shape


def make_optimizer(policy: Policy, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over every parameter; weight decay spares vectors (norms, biases)."""
    matrices = [p for p in policy.parameters() if p.ndim >= 2]
    vectors = [p for p in policy.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps)


@torch.no_grad()
def recompute_logprobs(policy: Policy, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
    """The trainer's own log-probs of each batch's targets, (T,) float32 per batch, 0 where ``mask`` is False.

    Every rank forwards the same number of batches (collective).
    """
    results = []
    device = _device(policy)
    for batch in _even(batches, device):

        def head(
            hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, batch: PackedBatch = batch
        ) -> torch.Tensor:
            stats = linear_token_logprobs(
                hidden,
                weight,
                batch.targets.to(device),
                bias=bias,
                temperature=temperature,
                mask=batch.mask.to(device),
            )
            return stats.logprob

        results.append(_forward(policy, batch, head, device))
    # Without a backward pass the root's parameters would stay gathered, in the compute type.
    policy.reshard()  # type: ignore[operator]
    return results[: len(batches)]


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[PackedBatch],
    old_logprobs: Sequence[torch.Tensor],
    *,
    spec: LossSpec,
    denominators: Denominators,
    temperature: float,
    grad_clip: float | None,
    before_step: Callable[[UpdateStats], None] | None = None,
) -> UpdateStats:
    """Forward and backward every micro-batch, then step once. Collective: every rank calls it for every update.

    Args:
        old_logprobs: per batch (T,) log-probs of π_old.
        denominators: counts over all ranks' micro-batches of this update.
        before_step: sees the statistics before the weights change; if it raises, they do not.

    Returns:
        Statistics; ``skipped`` is True when the loss or the gradient was not finite, and then nothing changed.
    """
    device = _device(policy)
    world = dist.get_world_size()
    padded = _even(batches, device)
    results: list[tuple[PackedBatch, PolicyLoss]] = []
    total = torch.zeros((), device=device)
    for i, batch in enumerate(padded):
        policy.set_requires_gradient_sync(i == len(padded) - 1)  # type: ignore[operator]
        old = old_logprobs[i] if i < len(batches) else batch.behavior_logprobs

        def head(
            hidden: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            batch: PackedBatch = batch,
            old: torch.Tensor = old,
        ) -> tuple[torch.Tensor, PolicyLoss]:
            result = linear_policy_loss(
                hidden,
                weight,
                batch.targets.to(device),
                old.to(device),
                batch.advantages.to(device),
                spec=spec,
                bias=bias,
                temperature=temperature,
                mask=batch.mask.to(device),
                cu_seqlens=batch.cu_seqlens.to(device),
                behavior_logprob=batch.behavior_logprobs.to(device) if spec.importance != "none" else None,
                denominators=denominators,
            )
            return result.loss, result

        loss, result = _forward(policy, batch, head, device)
        # FSDP averages gradients over ranks; the denominators are global already, so the sum is wanted.
        (loss * world).backward()
        total += loss.detach()
        if i < len(batches):
            results.append((batch, result))
    dist.all_reduce(total)
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    loss_value, norm_value = torch.stack([total, norm.to(total)]).tolist()
    finite = math.isfinite(loss_value) and math.isfinite(norm_value)
    stats = _statistics(results, loss_value, norm_value, skipped=not finite)
    if finite:
        if before_step is not None:
            before_step(stats)
        if grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(policy.parameters(), grad_clip, norm)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return stats


def _forward(policy: Policy, batch: PackedBatch, head, device: torch.device):  # type: ignore[no-untyped-def]
    lengths = batch.cu_seqlens.diff().tolist()
    return policy(
        batch.token_ids.to(device)[None], batch.position_ids.to(device)[None], PackedAttention(lengths, device), head
    )


def _even(batches: Sequence[PackedBatch], device: torch.device) -> list[PackedBatch]:
    """Anchors appended until every rank has as many batches as the one that has most (at least one)."""
    most = torch.tensor(max(1, len(batches)), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return [*batches, *[anchor_batch() for _ in range(int(most) - len(batches))]]


def _device(policy: Policy) -> torch.device:
    return next(policy.parameters()).device


def _statistics(
    results: Sequence[tuple[PackedBatch, PolicyLoss]], loss: float, grad_norm: float, *, skipped: bool
) -> UpdateStats:
    stats = UpdateStats(loss=loss, grad_norm=grad_norm, skipped=skipped)
    local: dict[str, float] = {}
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in ("logprobs", "behavior_logprobs", "grad_sqnorms", "turn_ids", "trajectories")
    }
    for batch, result in results:
        values = torch.stack([value.double() for value in result.metrics.values()]).tolist()  # one host sync for all
        for name, value in zip(result.metrics, values, strict=True):
            local[name] = _combine(name, [local[name], value]) if name in local else value
        mask = batch.mask
        owners = np.repeat(np.asarray(batch.trajectory_indices), batch.cu_seqlens.diff().numpy())
        columns["logprobs"].append(result.per_token["logprob"].cpu()[mask].numpy())
        columns["behavior_logprobs"].append(batch.behavior_logprobs[mask].numpy())
        columns["grad_sqnorms"].append(result.per_token["grad_sqnorm"].cpu()[mask].numpy())
        columns["turn_ids"].append(batch.turn_ids[mask].numpy())
        columns["trajectories"].append(owners[mask.numpy()])
    for name, parts in columns.items():
        if parts:
            setattr(stats, name, np.concatenate(parts))
    gathered: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    if len(gathered) > 1:
        dist.all_gather_object(gathered, local)
    else:
        gathered = [local]
    names = {name for part in gathered for name in part}
    stats.sums = {name: _combine(name, [part[name] for part in gathered if name in part]) for name in sorted(names)}
    return stats


def _combine(name: str, values: Sequence[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    return sum(values)
