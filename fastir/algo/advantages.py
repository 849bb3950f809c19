"""Group-relative advantages. Pure functions on arrays, in float64; N is the number of rollouts."""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


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
