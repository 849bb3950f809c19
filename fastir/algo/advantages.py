"""Group-relative advantages and the per-token weights of the policy loss. Pure functions on arrays.

N is the number of rollouts, T the number of tokens laid end to end, as they are packed. All arithmetic is float64.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Aggregation = Literal["sequence_mean", "token_mean", "sequence_sum"]


def group_advantages(
    rewards: npt.ArrayLike,
    group_ids: npt.ArrayLike,
    *,
    std_norm: bool = True,
    eps: float = 1e-6,
    keep: npt.ArrayLike | None = None,
) -> FloatArray:
    """``A_i = (r_i − mean) / (std + eps)`` over the rollouts of the same prompt (GRPO, arXiv 2402.03300, §4.1.2).

    The standard deviation is the unbiased one (n − 1). A group whose kept rewards are all equal, a group of one
    included, gets exactly 0.

    Args:
        rewards: (N,) finite.
        group_ids: (N,) int, the prompt each rollout belongs to, in any order.
        std_norm: False divides by 1 instead (Dr.GRPO, arXiv 2503.20783).
        eps: added to the standard deviation.
        keep: (N,) bool, rollouts that enter mean and std; the others get 0. All by default.

    Returns:
        (N,) float64.

    Raises:
        ValueError: when shapes differ, or a kept reward is not finite.
    """
    rewards, group_ids = np.asarray(rewards, dtype=np.float64), np.asarray(group_ids)
    kept = np.ones(rewards.shape, dtype=bool) if keep is None else np.asarray(keep, dtype=bool)
    if rewards.ndim != 1 or group_ids.shape != rewards.shape or kept.shape != rewards.shape:
        raise ValueError(
            "rewards, group_ids and keep must all have shape (N,), but have "
            f"{rewards.shape}, {group_ids.shape}, {kept.shape}"
        )
    advantages = np.zeros(rewards.shape)
    used = rewards[kept]
    if not np.isfinite(used).all():
        raise ValueError("rewards of kept rollouts must be finite; leave a failed rollout out with keep")
    groups, index = np.unique(group_ids[kept], return_inverse=True)
    size = np.bincount(index, minlength=len(groups))
    centred = used - (np.bincount(index, used, len(groups)) / size)[index]
    if std_norm:
        variance = np.bincount(index, centred**2, len(groups)) / np.maximum(size - 1, 1)
        centred = centred / (np.sqrt(variance) + eps)[index]
    # The mean of equal numbers may differ from them in the last bit: say 0 for equal rewards, do not compute it.
    lowest, highest = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
    np.minimum.at(lowest, index, used)
    np.maximum.at(highest, index, used)
    advantages[kept] = np.where((lowest == highest)[index], 0.0, centred)
    return advantages


def overlong_penalty(lengths: npt.ArrayLike, max_length: int, buffer: int) -> FloatArray:
    """DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13), to be added to the rewards.

    0 up to ``max_length − buffer`` tokens, then falling linearly to −1 at ``max_length``, and −1 beyond.

    Args:
        lengths: (N,) response tokens.
        max_length: L_max, tokens.
        buffer: L_cache, tokens over which the punishment grows.

    Returns:
        (N,) float64 in [−1, 0].

    Raises:
        ValueError: unless ``0 < buffer <= max_length``.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong buffer is {buffer}; it must lie between 1 and max_length ({max_length})")
    return np.clip((max_length - buffer - np.asarray(lengths, dtype=np.float64)) / buffer, -1.0, 0.0)


def token_advantages(advantages: npt.ArrayLike, rollout_ids: npt.ArrayLike, mask: npt.ArrayLike) -> FloatArray:
    """Spread each rollout's advantage over its trained tokens.

    Args:
        advantages: (N,).
        rollout_ids: (T,) int in [0, N), the rollout each token belongs to.
        mask: (T,) bool, the token trains.

    Returns:
        (T,) float64, 0 where the mask is False.
    """
    return np.where(np.asarray(mask, dtype=bool), np.asarray(advantages, dtype=np.float64)[np.asarray(rollout_ids)], 0)


@dataclass(frozen=True)
class DenominatorCounts:
    """What the loss is divided by. Counts add: sum them over micro-batches and all-reduce them over ranks.

    Attributes:
        trained_tokens: tokens that train.
        trained_sequences: rollouts with at least one token that trains.
    """

    trained_tokens: int
    trained_sequences: int

    def __add__(self, other: "DenominatorCounts") -> "DenominatorCounts":
        return DenominatorCounts(
            self.trained_tokens + other.trained_tokens, self.trained_sequences + other.trained_sequences
        )


def loss_denominators(mask: npt.ArrayLike, rollout_ids: npt.ArrayLike) -> DenominatorCounts:
    """Counts of one share of the batch; a rollout must lie in one share as a whole.

    Args:
        mask: (T,) bool, the token trains.
        rollout_ids: (T,) int, the rollout each token belongs to.
    """
    mask = np.asarray(mask, dtype=bool)
    return DenominatorCounts(int(mask.sum()), len(np.unique(np.asarray(rollout_ids)[mask])))


def token_weights(
    mask: npt.ArrayLike,
    rollout_ids: npt.ArrayLike,
    counts: DenominatorCounts,
    aggregation: Aggregation,
    *,
    max_length: int | None = None,
) -> FloatArray:
    """The weight w_t of each token in ``L = −Σ_t w_t · objective_t``, for one share of the batch.

    With m_t the mask and N, Σm the counts of the *whole* batch: ``sequence_mean`` is 1 / (N · Σ of the rollout's m)
    (SimpleTIR, Eq. 1), ``token_mean`` is 1 / Σm (DAPO), ``sequence_sum`` is 1 / (N · max_length) (Dr.GRPO). Because
    the counts are global, cutting the batch into other shares changes no weight.

    Args:
        mask: (T,) bool, the token trains.
        rollout_ids: (T,) int, the rollout each token belongs to; a rollout lies in one share as a whole.
        counts: `loss_denominators` summed over every share, on every rank.
        aggregation: one of the three above.
        max_length: L_max in tokens, for ``sequence_sum``.

    Returns:
        (T,) float64, 0 where the mask is False.

    Raises:
        ValueError: when the aggregation is unknown, ``sequence_sum`` has no positive max_length, shapes differ, or
            the share holds more than the counts, which therefore are not those of the whole batch.
    """
    mask, rollout_ids = np.asarray(mask, dtype=bool), np.asarray(rollout_ids)
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"loss.aggregation {aggregation!r} is not one of {', '.join(get_args(Aggregation))}")
    if aggregation == "sequence_sum" and (max_length is None or max_length <= 0):
        raise ValueError(f"loss.aggregation 'sequence_sum' needs max_length > 0, not {max_length}")
    if mask.shape != rollout_ids.shape:
        raise ValueError(f"mask and rollout_ids must both have shape (T,), but have {mask.shape}, {rollout_ids.shape}")
    weights = np.zeros(mask.shape)
    rollouts, index, lengths = np.unique(rollout_ids[mask], return_inverse=True, return_counts=True)
    if counts.trained_tokens < mask.sum() or counts.trained_sequences < len(rollouts):
        raise ValueError(
            f"counts {counts} are below this share's {mask.sum()} tokens of {len(rollouts)} rollouts: "
            "sum loss_denominators over all micro-batches and ranks"
        )
    if len(rollouts) == 0:
        return weights
    if aggregation == "sequence_mean":
        weights[mask] = 1.0 / (counts.trained_sequences * lengths[index])
    elif aggregation == "token_mean":
        weights[mask] = 1.0 / counts.trained_tokens
    else:
        assert max_length is not None  # checked above
        weights[mask] = 1.0 / (counts.trained_sequences * max_length)
    return weights
