"""The three records that flow through a step: ``Turn`` ⊂ ``Trajectory`` → ``PackedBatch``.

All are frozen and check their own lengths when they are made, so a mask that drifted from its ids can never reach
the loss. A ``Trajectory`` round-trips through one line of JSON (`to_json` / `from_json`): a step can be replayed
without an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

#: Why a rollout ended: it gave an answer; a turn held neither code nor answer; the turn limit; the token budget;
#: or something failed for reasons that are not the model's (such a rollout never trains).
FinishReason = Literal["answer", "void", "max_turns", "token_budget", "failed"]

#: What failed: nothing, the tool, or the engine (it gave the request up, or its log-probs were not finite).
Failure = Literal["", "tool", "engine"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of policy tokens and the tool's feedback. Positions index the trajectory's ``token_ids``."""

    start: int  #: first policy token
    end: int  #: one past the last policy token
    feedback_end: int  #: one past the last feedback token; equals ``end`` when there is none
    text: str  #: the policy's text, for reading only: nothing is ever re-encoded from it
    code: str | None = None
    answer: str | None = None  #: from the policy's text or from ``final_answer`` executed in its code
    is_void: bool = False
    truncated: bool = False  #: the turn ran into its token limit
    feedback: str = ""
    exec_status: str | None = None  #: status of the execution, None when nothing ran
    exec_seconds: float = 0.0
    weight_version: int = 0  #: trainer updates that the weights it was sampled with had seen

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end <= self.feedback_end:
            raise ValueError(f"Turn: positions out of order: {self.start}, {self.end}, {self.feedback_end}")


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One rollout: a prompt, then turns of policy and feedback tokens.

    Arrays have length L, the number of tokens. ``policy_mask`` is True on tokens that the policy sampled;
    ``turn_ids`` is −1 on the prompt and k on turn k's policy and feedback tokens; ``behavior_logprobs`` (nats, at the
    sampling temperature) is 0 where ``policy_mask`` is False.

    Raises:
        ValueError: when lengths differ, or the turns' positions contradict the mask.
    """

    problem_id: str
    group: int  #: index of the problem within its step; siblings share it
    sibling: int
    prompt_length: int
    token_ids: IntArray
    policy_mask: BoolArray
    turn_ids: IntArray
    behavior_logprobs: FloatArray
    weight_version: int  #: of its stalest turn
    finish_reason: FinishReason
    turns: tuple[Turn, ...]
    gold: str = ""
    answer: str | None = None
    reward: float | None = None
    grade_status: str = ""  #: ok, no_answer, timeout or failed; the last two are not the model's fault
    failure: Failure = ""  #: what failed, with finish_reason "failed"
    seconds: float = field(default=0.0, compare=False)  #: wall time in the tool

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("policy_mask", "turn_ids", "behavior_logprobs"):
            if len(getattr(self, name)) != length:
                raise ValueError(f"Trajectory.{name} has {len(getattr(self, name))} entries for {length} token_ids")
        if self.finish_reason not in get_args(FinishReason):
            raise ValueError(f"Trajectory.finish_reason {self.finish_reason!r} is not one of {get_args(FinishReason)}")
        expected = np.zeros(length, dtype=bool)
        position = self.prompt_length
        for turn in self.turns:
            if turn.start != position or turn.feedback_end > length:
                raise ValueError(
                    f"Trajectory.turns: a turn starts at {turn.start}, expected {position} (length {length})"
                )
            expected[turn.start : turn.end] = True
            position = turn.feedback_end
        if position != length or not np.array_equal(expected, self.policy_mask):
            raise ValueError("Trajectory.policy_mask does not mark exactly the turns' policy tokens")

    @property
    def has_void(self) -> bool:
        return any(turn.is_void for turn in self.turns)

    @property
    def truncated(self) -> bool:
        """Cut by a limit (turns, tokens of a turn, token budget) before it could answer."""
        return self.finish_reason in ("max_turns", "token_budget") or (
            self.finish_reason == "void" and self.turns[-1].truncated
        )

    @property
    def policy_tokens(self) -> int:
        return int(self.policy_mask.sum())

    def to_json(self) -> dict[str, Any]:
        record = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("token_ids", "turn_ids"):
            record[name] = record[name].tolist()
        record["policy_mask"] = self.policy_mask.astype(int).tolist()
        record["behavior_logprobs"] = self.behavior_logprobs.tolist()
        record["turns"] = [{name: getattr(turn, name) for name in Turn.__dataclass_fields__} for turn in self.turns]
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Trajectory:
        known = {name: record[name] for name in cls.__dataclass_fields__ if name in record}
        known["token_ids"] = np.asarray(record["token_ids"], dtype=np.int32)
        known["turn_ids"] = np.asarray(record["turn_ids"], dtype=np.int32)
        known["policy_mask"] = np.asarray(record["policy_mask"], dtype=bool)
        known["behavior_logprobs"] = np.asarray(record["behavior_logprobs"], dtype=np.float32)
        known["turns"] = tuple(Turn(**turn) for turn in record["turns"])
        return cls(**known)


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Trajectories laid end to end without padding, as the model and the loss read them.

    Row t sees tokens up to t of its own sequence and predicts ``targets[t]``, the sequence's next token; the last
    row of a sequence predicts nothing (``mask`` False). Per-row tensors have shape (T,); S is the number of
    sequences.

    Raises:
        ValueError: when a length is off or ``cu_seqlens`` does not cover exactly T rows.
    """

    token_ids: torch.Tensor  #: (T,) int64
    position_ids: torch.Tensor  #: (T,) int64, restarting at 0 in each sequence
    cu_seqlens: torch.Tensor  #: (S + 1,) int32
    targets: torch.Tensor  #: (T,) int64
    mask: torch.Tensor  #: (T,) bool: the predicted token is a policy token that trains
    advantages: torch.Tensor  #: (T,) float32, of the predicted token
    behavior_logprobs: torch.Tensor  #: (T,) float32, of the predicted token
    turn_ids: torch.Tensor  #: (T,) int32, of the predicted token; −1 where it is not a policy token
    trajectory_indices: Sequence[int]  #: (S,) which trajectory of the step each sequence is

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("position_ids", "targets", "mask", "advantages", "behavior_logprobs", "turn_ids"):
            if len(getattr(self, name)) != length:
                raise ValueError(f"PackedBatch.{name} has {len(getattr(self, name))} rows for {length} token_ids")
        if int(self.cu_seqlens[0]) != 0 or int(self.cu_seqlens[-1]) != length:
            raise ValueError(f"PackedBatch.cu_seqlens must run from 0 to {length}")
        if len(self.trajectory_indices) != len(self.cu_seqlens) - 1:
            raise ValueError("PackedBatch.trajectory_indices needs one entry per sequence")
        if bool(self.mask[self.cu_seqlens[1:].long() - 1].any()):
            raise ValueError("PackedBatch.mask: the last row of a sequence predicts nothing and cannot train")

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def sequences(self) -> int:
        return len(self.trajectory_indices)
