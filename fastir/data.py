"""Problems: reading them from files or a hub, and the order in which a run meets them.

Four shapes of rows are read, told apart by the columns of the file:

- verl: ``prompt``, a list of messages, and ``reward_model.ground_truth``;
- GSM8K: ``question`` and ``answer``, where answers end in ``#### N``;
- plain: ``question`` and ``answer``, or ``problem`` and ``answer``.

Other columns are not needed. Order is addressed by (seed, epoch), so a run resumes from one integer.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastir.tir.reward import gsm8k_answer

_log = logging.getLogger(__name__)
_ORDER_STREAM = 0x6F72646572  # keeps the order's random numbers apart from other uses of the run's seed

OnBadRow = Literal["error", "skip"]


class DataError(ValueError):
    """Problems that cannot be loaded; the message names the source, the row and the remedy."""


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        id: ``<source>:<row>``, unique within its source; rows count from 1.
        question: the text to ask; a system message of a verl row stands before it, with a blank line between.
        answer: the gold answer as text.
        source: file name without suffix, or hub name.
    """

    id: str
    question: str
    answer: str
    source: str


@dataclass(frozen=True)
class BadRow:
    """A row that is no problem: where it is (rows and lines count from 1), and why."""

    source: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source}, row {self.row}: {self.reason}"


def load_problems(source: str | Path, *, on_bad_row: OnBadRow = "error") -> tuple[list[Problem], list[BadRow]]:
    """Load every problem of a ``.jsonl`` or ``.parquet`` file, or of a hub data set.

    Args:
        source: path, or hub name ``owner/name[:config][:split]`` (split "train" by default; needs ``datasets``).
        on_bad_row: a malformed row is an error, or is skipped, reported in the result and logged as a warning.

    Returns:
        The problems in the order of the rows, and the rows skipped.

    Raises:
        DataError: when the source cannot be read, its columns have none of the known shapes, it holds no problem, or
            a row is malformed and ``on_bad_row`` is "error".
    """
    if on_bad_row not in ("error", "skip"):
        raise DataError(f"data.on_bad_row {on_bad_row!r} is not one of error, skip")
    label, rows = _read(source)
    shape = _shape([row for _, row in rows if isinstance(row, dict)], str(source))
    problems: list[Problem] = []
    skipped: list[BadRow] = []
    for number, row in rows:
        try:
            if not isinstance(row, dict):
                raise _Malformed(row)
            question, answer = shape(row)
            problems.append(Problem(f"{label}:{number}", question, answer, label))
        except _Malformed as malformed:
            bad = BadRow(str(source), number, str(malformed))
            if on_bad_row == "error":
                raise DataError(f"{bad}; correct the row, or set data.on_bad_row = 'skip'") from None
            _log.warning("skipped %s", bad)
            skipped.append(bad)
    if not problems:
        raise DataError(f"{source} holds no problem ({len(skipped)} malformed rows)")
    return problems, skipped


def epoch_order(n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of ``n`` problems in one epoch: a permutation that depends on (n, seed, epoch) and nothing else.

    It is the sorting order of raw PCG64 output, a stream that numpy promises to keep, unlike ``Generator.permutation``.

    Returns:
        (n,) int64.

    Raises:
        ValueError: when an argument is negative.
    """
    if min(n, seed, epoch) < 0:
        raise ValueError(f"n, seed and epoch must not be negative: {n}, {seed}, {epoch}")
    bits = np.random.PCG64(np.random.SeedSequence([_ORDER_STREAM, seed, epoch]))
    return np.argsort(bits.random_raw(n), kind="stable")


@dataclass(frozen=True)
class ProblemStream:
    """Problems without end: epoch after epoch, each in its own order. Stateless: the position is the only state.

    Args:
        problems: at least one.
        seed: of the order, not negative.

    Raises:
        ValueError: when there is no problem.
    """

    problems: Sequence[Problem]
    seed: int

    def __post_init__(self) -> None:
        if not self.problems:
            raise ValueError("ProblemStream needs at least one problem")

    def take(self, position: int, count: int) -> list[Problem]:
        """The problems at positions ``position … position + count − 1``.

        Every epoch holds each problem once, wherever the cuts between calls fall. A count above the number of problems
        runs into the next epochs, so a problem may then come twice in one call.

        Raises:
            ValueError: when position or count is negative.
        """
        if position < 0 or count < 0:
            raise ValueError(f"position and count must not be negative: {position}, {count}")
        taken: list[Problem] = []
        n = len(self.problems)
        while len(taken) < count:
            epoch, offset = divmod(position + len(taken), n)
            order = epoch_order(n, self.seed, epoch)[offset : offset + count - len(taken)]
            taken += [self.problems[i] for i in order]
        return taken


class _Malformed(Exception):
    """Why a row is no problem."""


#: A numbered row: its fields, or why it has none.
_Row = tuple[int, dict[str, Any] | str]


def _read(source: str | Path) -> tuple[str, list[_Row]]:
    """Label and rows of a source."""
    path = Path(source)
    if path.suffix not in (".jsonl", ".parquet") and not path.exists():
        return str(source).partition(":")[0], _read_hub(str(source))
    if not path.is_file():
        raise DataError(f"{source}: no such file")
    if path.suffix == ".jsonl":
        return path.stem, list(_read_jsonl(path))
    if path.suffix == ".parquet":
        return path.stem, _read_parquet(path)
    raise DataError(f"{source}: files end in .jsonl or .parquet")


def _read_jsonl(path: Path) -> Iterator[_Row]:
    # Split by bytes: only "\n" ends a line of JSON, and one undecodable line must not take the others with it.
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            yield number, f"not UTF-8 ({error.reason} at byte {error.start})"
        except (json.JSONDecodeError, RecursionError) as error:
            yield number, f"not JSON ({error})"
        else:
            yield number, row if isinstance(row, dict) else f"not a JSON object but {type(row).__name__}"


def _read_parquet(path: Path) -> list[_Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: reading parquet needs pyarrow: pip install 'fastir[train]'") from None
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error
    return list(enumerate(rows, start=1))


def _read_hub(name: str) -> list[_Row]:
    try:
        import datasets
    except ImportError:
        raise DataError(f"{name} is no file (.jsonl, .parquet); to load it from a hub: pip install datasets") from None
    path, *rest = name.split(":")
    split = rest.pop() if rest else "train"
    try:
        rows = datasets.load_dataset(path, *rest, split=split)
    except Exception as error:  # a hub fails in many ways; all of them mean the same here
        raise DataError(f"{name}: neither a file nor a data set of the hub: {error}") from error
    return [(number, dict(row)) for number, row in enumerate(rows, start=1)]


def _shape(rows: list[dict[str, Any]], source: str) -> Callable[[dict[str, Any]], tuple[str, str]]:
    """How to read (question, answer) from a row, from the columns that the rows have."""
    columns = {column for row in rows for column in row}
    if {"prompt", "reward_model"} <= columns:
        return _verl
    if {"question", "answer"} <= columns:
        marked = any("####" in row["answer"] for row in rows if isinstance(row.get("answer"), str))
        return _gsm8k if marked else lambda row: (_text(row, "question"), _answer(row, "answer"))
    if {"problem", "answer"} <= columns:
        return lambda row: (_text(row, "problem"), _answer(row, "answer"))
    raise DataError(
        f"{source}: columns {sorted(columns)} have none of the known shapes: prompt + reward_model, "
        "question + answer, problem + answer"
    )


def _verl(row: dict[str, Any]) -> tuple[str, str]:
    messages = row.get("prompt")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _Malformed("prompt is not a list of messages")
    roles = [message.get("role") for message in messages]
    if roles not in (["user"], ["system", "user"]):
        raise _Malformed(f"prompt has messages of {roles}; expected one of user, optionally after one of system")
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, dict):
        raise _Malformed("reward_model is not an object")
    question = "\n\n".join(_text(message, "content") for message in messages)
    return question, _answer(reward_model, "ground_truth")


def _gsm8k(row: dict[str, Any]) -> tuple[str, str]:
    try:
        return _text(row, "question"), gsm8k_answer(_text(row, "answer"))
    except ValueError as error:
        raise _Malformed(str(error)) from error


def _text(row: dict[str, Any], field: str) -> str:
    value = row.get(field)
    if value is None:
        raise _Malformed(f"{field} is missing")
    if not isinstance(value, str):
        raise _Malformed(f"{field} is {type(value).__name__}, not text")
    if not value.strip():
        raise _Malformed(f"{field} is empty")
    return value


def _answer(row: dict[str, Any], field: str) -> str:
    """A gold answer: text or a number."""
    value = row.get(field)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return _text(row, field).strip()
