"""Which rollouts count in their group's statistics, and which train.

Every filter returns two masks of shape (N,): ``counts`` (the ``keep`` of other functions), the rollouts that enter the
mean and standard deviation of their group, and ``trains``, those whose tokens enter the loss. A rollout that does not
train is never packed and never forwarded. A rollout that does not count never trains.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
VoidFilter = Literal["mask", "drop", "off"]
Overlong = Literal["keep", "mask", "drop"]


def void_filter(has_void: npt.ArrayLike, mode: VoidFilter) -> tuple[BoolArray, BoolArray]:
    """SimpleTIR's void filter (arXiv 2509.02479): what happens to rollouts with a void turn.

    Args:
        has_void: (N,) bool, the rollout has a void turn.
        mode: "mask" counts it in its group but does not train it; "drop" does neither; "off" does both.

    Returns:
        ``(counts, trains)``, each (N,) bool.

    Raises:
        ValueError: when the mode is unknown.
    """
    if mode not in ("mask", "drop", "off"):
        raise ValueError(f"void_filter {mode!r} is not one of mask, drop, off")
    return _exclude(has_void, counts=mode != "drop", trains=mode == "off")


def overlong_filter(truncated: npt.ArrayLike, mode: Overlong) -> tuple[BoolArray, BoolArray]:
    """DAPO's overlong filtering (arXiv 2503.14476, §3.4): what happens to rollouts cut by a limit.

    Args:
        truncated: (N,) bool, the rollout was cut by a turn or token limit before it could answer.
        mode: "mask" counts it in its group but does not train it; "drop" does neither; "keep" does both.

    Returns:
        ``(counts, trains)``, each (N,) bool.

    Raises:
        ValueError: when the mode is unknown.
    """
    if mode not in ("keep", "mask", "drop"):
        raise ValueError(f"overlong {mode!r} is not one of keep, mask, drop")
    return _exclude(truncated, counts=mode != "drop", trains=mode == "keep")


def select_rollouts(
    has_void: npt.ArrayLike,
    truncated: npt.ArrayLike,
    failed: npt.ArrayLike,
    *,
    void_mode: VoidFilter,
    overlong_mode: Overlong,
) -> tuple[BoolArray, BoolArray]:
    """All filters that are known before advantages are: each may take a rollout out, none puts one back.

    Args:
        has_void: (N,) bool, see `void_filter`.
        truncated: (N,) bool, see `overlong_filter`.
        failed: (N,) bool, the tool or the grader failed through no fault of the policy: the reward means nothing, so
            the rollout neither counts nor trains.
        void_mode: mode of `void_filter`.
        overlong_mode: mode of `overlong_filter`.

    Returns:
        ``(counts, trains)``, each (N,) bool.

    Raises:
        ValueError: when a mode is unknown or the shapes differ.
    """
    masks = (
        void_filter(has_void, void_mode),
        overlong_filter(truncated, overlong_mode),
        _exclude(failed, counts=False, trains=False),
    )
    shapes = [counts.shape for counts, _ in masks]
    if len(set(shapes)) > 1:
        raise ValueError(f"has_void, truncated and failed need one entry per rollout, but have shapes {shapes}")
    counts = np.logical_and.reduce([counts for counts, _ in masks])
    trains = np.logical_and.reduce([trains for _, trains in masks])
    return counts, trains


def with_signal(trains: npt.ArrayLike, advantages: npt.ArrayLike, *, other_loss_terms: bool) -> BoolArray:
    """Leave out rollouts whose advantage is 0: their policy loss has no gradient, so forwarding them is waste.

    Args:
        trains: (N,) bool from `select_rollouts`.
        advantages: (N,) of `fastir.algo.advantages.group_advantages`.
        other_loss_terms: the loss has a KL or entropy term, which does train tokens of zero advantage; nothing leaves.

    Returns:
        (N,) bool.
    """
    trains = np.asarray(trains, dtype=bool)
    return trains if other_loss_terms else trains & (np.asarray(advantages) != 0)


def uninformative_groups(
    rewards: npt.ArrayLike,
    group_ids: npt.ArrayLike,
    *,
    keep: npt.ArrayLike | None = None,
    trains: npt.ArrayLike | None = None,
) -> npt.NDArray[np.int64]:
    """The groups that dynamic sampling replaces (DAPO, arXiv 2503.14476, §3.2): those without gradient.

    A group has none when the rewards of its kept rollouts are all equal (one rollout, or none, included), or when
    none of its rollouts trains.

    Args:
        rewards: (N,).
        group_ids: (N,) int, the prompt each rollout belongs to.
        keep: (N,) bool, rollouts that count, from the filters; all by default.
        trains: (N,) bool from the filters; all by default.

    Returns:
        (n,) ids of those groups, ascending.

    Raises:
        ValueError: when shapes differ.
    """
    rewards, group_ids = np.asarray(rewards, dtype=np.float64), np.asarray(group_ids, dtype=np.int64)
    kept = np.ones(rewards.shape, bool) if keep is None else np.asarray(keep, dtype=bool)
    trains = np.ones(rewards.shape, bool) if trains is None else np.asarray(trains, dtype=bool)
    shapes = {rewards.shape, group_ids.shape, kept.shape, trains.shape}
    if len(shapes) > 1 or rewards.ndim != 1:
        raise ValueError(f"rewards, group_ids, keep and trains must all have shape (N,), but have {sorted(shapes)}")
    groups, index = np.unique(group_ids, return_inverse=True)
    lowest, highest = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
    np.minimum.at(lowest, index[kept], rewards[kept])
    np.maximum.at(highest, index[kept], rewards[kept])
    trained = np.bincount(index[trains], minlength=len(groups))
    return groups[(lowest >= highest) | (trained == 0)]


def _exclude(flagged: npt.ArrayLike, *, counts: bool, trains: bool) -> tuple[BoolArray, BoolArray]:
    """Masks that are True except, where asked, on flagged rollouts."""
    flagged = np.asarray(flagged, dtype=bool)
    return ~flagged | counts, ~flagged | trains
