"""Other libraries' functions behind two signatures, for the kernel benchmarks; a library that is missing is left out.

`logits_peers()`: name -> f(logits, targets) -> (logprob, entropy).
`loss_peers()`: name -> f(Problem) -> loss, a GRPO loss with token-level ratio, sequence mean, clip (0.2, 0.28), no KL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LogitsFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Problem:
    """A batch of rollouts of equal length, so that padded and packed libraries see the same tokens."""

    hidden: Tensor  # (B, L, H)
    weight: Tensor  # (V, H)
    targets: Tensor  # (B, L)
    old_logprob: Tensor  # (B, L) fp32
    advantages: Tensor  # (B,)
    mask: Tensor  # (B, L) bool

    @property
    def cu_seqlens(self) -> Tensor:
        batch, length = self.targets.shape
        return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=self.targets.device)


def make_problem(
    batch: int, length: int, hidden: int, vocabulary: int, dtype: torch.dtype, kept: float, device: str = "cpu"
) -> Problem:
    """Hidden states and weights of the size a language model has; logits of about unit variance times 3."""
    g = torch.Generator().manual_seed(0)
    h = torch.randn(batch, length, hidden, generator=g).to(dtype)
    w = (3 * torch.randn(vocabulary, hidden, generator=g) / hidden**0.5).to(dtype)
    targets = torch.randint(vocabulary, (batch, length), generator=g)
    z = h.reshape(-1, hidden).float() @ w.float().t()
    logprob = (z.gather(1, targets.reshape(-1, 1))[:, 0] - z.logsumexp(1)).view(batch, length)
    old = logprob + 0.1 * torch.randn(batch, length, generator=g)
    mask = torch.rand(batch, length, generator=g) < kept
    mask[:, 0] = True
    advantages = torch.linspace(-1, 1, batch)
    return Problem(*(x.to(device) for x in (h, w, targets, old, advantages, mask)))


def grpo_loss(logprob: Tensor, p: Problem) -> Tensor:
    """The loss as trainers write it on (B, L) log-probabilities."""
    ratio = torch.exp(logprob - p.old_logprob)
    a = p.advantages[:, None]
    row = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
    return ((row * p.mask).sum(1) / p.mask.sum(1)).mean()


def ours(p: Problem) -> Tensor:
    from fastir_kernels import LossSpec, linear_policy_loss

    return linear_policy_loss(
        p.hidden.flatten(0, 1),
        p.weight,
        p.targets.flatten(),
        p.old_logprob.flatten(),
        p.advantages[:, None].expand_as(p.targets).flatten(),
        spec=LossSpec(),
        mask=p.mask.flatten(),
        cu_seqlens=p.cu_seqlens,
    ).loss


def plain(p: Problem) -> Tensor:
    """torch alone: fp32 logits, log-softmax, entropy."""
    z = p.hidden.float() @ p.weight.float().t()
    logpi = torch.log_softmax(z, dim=-1)
    with torch.no_grad():
        (logpi.exp() * logpi).sum(-1)
    return grpo_loss(logpi.gather(2, p.targets[..., None])[..., 0], p)


def trl_fused_head(p: Problem) -> Tensor:
    """What `add_fused_lm_head` runs: on a CPU it scores masked positions too."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    outputs = ("entropy", "log_sum_sq_probs")
    keep = p.mask if p.hidden.is_cuda else torch.ones_like(p.mask)
    logprob = ChunkedLogProbFunction.apply(
        p.hidden[keep], p.weight, None, p.targets[keep], 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs
    )[0]
    return grpo_loss(logprob.new_zeros(keep.shape).masked_scatter(keep, logprob), p)


@functools.cache
def _liger(compiled: bool) -> torch.nn.Module:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    return LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=compiled, use_ref_model=False, epsilon_low=0.2, epsilon_high=0.28, loss_type="grpo"
    )


def liger(p: Problem, compiled: bool) -> Tensor:
    out = _liger(compiled)(
        p.hidden, p.weight, p.targets, p.mask.to(p.hidden.dtype), p.advantages, old_per_token_logps=p.old_logprob
    )
    return out[0]


def _installed(*modules: str) -> bool:
    import importlib

    try:
        for name in modules:
            importlib.import_module(name)
    except Exception:
        return False
    return True


def loss_peers() -> dict[str, Callable[[Problem], Tensor]]:
    found: dict[str, Callable[[Problem], Tensor]] = {"fastir_kernels": ours, "torch fp32": plain}
    if _installed("trl.kernels"):
        found["TRL fused head"] = trl_fused_head
    if _installed("liger_kernel.chunked_loss"):
        found["Liger GRPO"] = functools.partial(liger, compiled=False)
        found["Liger GRPO compiled"] = functools.partial(liger, compiled=True)
    return found


def ours_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    from fastir_kernels import token_logprobs

    out = token_logprobs(logits, targets)
    return out.logprob, out.entropy


def torch_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logpi = torch.log_softmax(logits.float(), dim=-1)
    return logpi.gather(1, targets[:, None])[:, 0], -(logpi.exp() * logpi).sum(1)


def trl_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    return selective_log_softmax(logits, targets), entropy_from_logits(logits)


def trl_logits_fp32(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return trl_logits(logits.float(), targets)


def verl_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    return logprobs_from_logits(logits, targets, inplace_backward=False), entropy_from_logits(logits)


def logits_peers() -> dict[str, LogitsFunction]:
    found: dict[str, LogitsFunction] = {"fastir_kernels": ours_logits, "torch fp32": torch_logits}
    if _installed("trl.trainer.utils"):
        found["TRL"] = trl_logits
        found["TRL fp32"] = trl_logits_fp32
    if _installed("verl.utils.torch_functional"):
        found["verl"] = verl_logits
    return found
