"""What a policy loss is made of (LossSpec), what it is divided by (Denominators), and what the ops return."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor

Kind = Literal["grpo", "gspo", "cispo", "reinforce"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
KL = Literal["none", "k1", "k2", "k3"]
Importance = Literal["none", "tis", "mis"]

_CHOICES = {
    "kind": ("grpo", "gspo", "cispo", "reinforce"),
    "aggregation": ("token_mean", "sequence_mean", "sequence_sum"),
    "kl": ("none", "k1", "k2", "k3"),
    "importance": ("none", "tis", "mis"),
}


@dataclass(frozen=True)
class LossSpec:
    """A policy loss, as one immutable value. With rho = exp(logprob - old_logprob) and A the advantage, a row's loss is

    - ``grpo``       -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)  (arXiv 2503.14476)
    - ``gspo``       the same with the sequence ratio s = exp(mean of log rho) in rho's place; its gradient reaches each
                     token as in GSPO-token, s A_t, which is GSPO's own when A is constant (arXiv 2507.18071)
    - ``cispo``      -sg(clip(rho, 1 - eps_low, 1 + eps_high)) A logprob  (arXiv 2506.13585)
    - ``reinforce``  -A logprob

    The bounds of ``cispo`` are relative to 1, as verl has them; TRL and Liger state the upper bound absolutely.

    dual_clip: c > 1 bounds the loss at -c A where A < 0; ``grpo`` and ``gspo`` only.
    aggregation: the weight of each row, see `Denominators`.
    kl, kl_coef: adds kl_coef times the estimate of KL(policy, reference), with d = ref_logprob - logprob:
        k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1. The gradient is that of the estimate.
    entropy_coef: subtracts entropy_coef times the entropy of the row.
    importance: multiplies the policy term (not KL, not entropy) by w = exp(old_logprob - behavior_logprob), detached:
        ``tis`` min(w, importance_cap); ``mis`` w where w <= importance_cap, otherwise 0.

    Raises ValueError on an unknown or impossible value and NotImplementedError on a combination that has no meaning
    here; both name the field.
    """

    kind: Kind = "grpo"
    eps_low: float = 0.2
    eps_high: float = 0.28
    dual_clip: float | None = None
    aggregation: Aggregation = "sequence_mean"
    kl: KL = "none"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance: Importance = "none"
    importance_cap: float = 2.0

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"LossSpec.{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        if not 0 <= self.eps_low <= 1:
            raise ValueError(f"LossSpec.eps_low must lie in [0, 1]; got {self.eps_low}")
        if not self.eps_high >= 0:
            raise ValueError(f"LossSpec.eps_high must be at least 0; got {self.eps_high}")
        if not self.importance_cap > 0:
            raise ValueError(f"LossSpec.importance_cap must be positive; got {self.importance_cap}")
        if self.kl == "none" and self.kl_coef != 0:
            raise ValueError(f"LossSpec.kl_coef is {self.kl_coef} but LossSpec.kl is 'none'")
        if self.dual_clip is not None:
            if self.kind not in ("grpo", "gspo"):
                raise NotImplementedError(f"LossSpec.dual_clip is not defined for kind {self.kind!r}")
            if not self.dual_clip > 1:
                raise ValueError(f"LossSpec.dual_clip must exceed 1; got {self.dual_clip}")


def pack(spec: LossSpec) -> tuple[str, list[float]]:
    """The fields that give a row its loss, as arguments that a custom op can take; the inverse of `unpack`."""
    choices = f"{spec.kind} {spec.kl} {spec.importance}"
    dual_clip = spec.dual_clip or 0.0
    return choices, [spec.eps_low, spec.eps_high, dual_clip, spec.kl_coef, spec.entropy_coef, spec.importance_cap]


def unpack(choices: str, numbers: list[float]) -> LossSpec:
    """The LossSpec that `pack` was given, but for its aggregation."""
    kind, kl, importance = (cast(Any, c) for c in choices.split())
    eps_low, eps_high, dual_clip, kl_coef, entropy_coef, cap = numbers
    return LossSpec(
        kind=kind,
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=dual_clip or None,
        kl=kl,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        importance=importance,
        importance_cap=cap,
    )


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole global batch (every rank and micro-batch): the loss does not depend on how it is cut.

    tokens: trained tokens. sequences: trajectories with at least one trained token. max_length: L_max of Dr.GRPO.

    The weight of a trained row of trajectory i, which has n_i trained tokens of its own, is

    - ``token_mean``     1 / tokens
    - ``sequence_mean``  1 / (sequences n_i)
    - ``sequence_sum``   1 / (sequences max_length)

    A trajectory must not be split over calls.
    """

    tokens: float
    sequences: float
    max_length: int | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and not value >= 0:
                raise ValueError(f"Denominators.{f.name} must not be negative; got {value}")


class TokenStats(NamedTuple):
    """Per-row statistics of softmax(logits / temperature), each (T,) fp32 and 0 on masked rows.

    logprob: log-probability of the target; differentiable. entropy: in nats; differentiable.
    logit_grad_sqnorm: ||pi - e_target||^2, taken without cancellation. lse: log-sum-exp of logits / temperature.
    """

    logprob: Tensor
    entropy: Tensor
    logit_grad_sqnorm: Tensor
    lse: Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """loss: () fp32, differentiable. Everything else is detached.

    per_token_coefficient: (T,), dloss/dlogprob, 0 on masked rows (the entropy term is not part of it).
    metrics: scalars () whose suffix says how to all-reduce them exactly: ``_sum`` and ``_count`` add, ``_max`` and
        ``_min`` take the extreme.
        tokens_count, sequences_count; loss_policy_sum, loss_kl_sum, loss_entropy_sum (they add up to the loss);
        ratio_sum, ratio_min, ratio_max; log_ratio_abs_max; old_kl_sum (k3 of the old policy);
        clip_low_count, clip_high_count, dual_clip_count (tokens whose policy gradient the clip removed; for
        ``cispo`` tokens whose weight it changed); logprob_sum; and, where the input allows it, entropy_sum, ref_kl_sum,
        importance_sum (after the cap), importance_capped_count, behavior_kl_sum, behavior_log_ratio_abs_max.
    per_trajectory: (N,) each: tokens, loss, and grad_norm, the exact Frobenius norm of dloss/dlogits over the rows of
        the trajectory (logits after bias and softcap, before temperature), when the op knows the logits.
    per_token: (T,) each, 0 on masked rows: logprob, weight, and where known entropy and grad_sqnorm, the squared
        norm of the row of dloss/dlogits.
    """

    loss: Tensor
    per_token_coefficient: Tensor
    metrics: dict[str, Tensor]
    per_trajectory: dict[str, Tensor]
    per_token: dict[str, Tensor] = field(default_factory=dict)
