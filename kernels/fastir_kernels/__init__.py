"""Fused, exact reinforcement-learning loss kernels for language models."""

from .linear_logprobs import linear_token_logprobs
from .linear_policy import linear_policy_loss
from .logprobs import token_logprobs
from .norms import trajectory_grad_norms
from .policy import policy_loss
from .spec import Denominators, LossSpec, PolicyLoss, TokenStats

__all__ = [
    "Denominators",
    "LossSpec",
    "PolicyLoss",
    "TokenStats",
    "linear_policy_loss",
    "linear_token_logprobs",
    "policy_loss",
    "token_logprobs",
    "trajectory_grad_norms",
]
