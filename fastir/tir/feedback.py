"""What the policy reads after its code ran: the text, and its token ids under a token budget.

Feedback is tokenised once, alone, and appended to the ids that were sampled. What code prints is untrusted: it can
spell a control token, and must not become one.
"""

from functools import lru_cache
from typing import Any, Protocol

NO_OUTPUT = "(no output)"
NOTICES = {
    "timeout": "TimeoutError: the code ran past its time limit and was stopped.",
    "memory": "MemoryError: the code went over its memory limit and was stopped.",
    "output": "OutputLimitError: the code printed more than its output limit; the rest was cut.",
    "crashed": "CrashError: the interpreter died before the code finished.",
}
TRUNCATION_MARKER = "\n...[output truncated]...\n"


class ExecutionOutcome(Protocol):
    """What `feedback_text` reads of a sandbox's result."""

    @property
    def status(self) -> str:
        """One of ok, error, timeout, memory, output, crashed."""

    @property
    def stdout(self) -> str:
        """What the code printed, up to where it ended."""

    @property
    def error(self) -> str | None:
        """Exception or notice in one or more lines; empty or None when there is none."""

    @property
    def traceback(self) -> str | None:
        """The whole traceback; empty or None when there is none."""


def feedback_text(result: ExecutionOutcome) -> str:
    """The feedback of one execution: ``"\\nCode execution result: {stdout}\\n"``.

    Line ends at the end of stdout are dropped. Blank stdout of code that ran to its end reads "(no output)". An
    exception adds the last line of its traceback after what was printed before it; a limit or a crash adds an explicit
    notice. The text depends on nothing but the outcome: no times, no paths of the host.

    Raises:
        ValueError: when the status is unknown.
    """
    printed = result.stdout.rstrip("\r\n") if result.stdout.strip() else ""
    if result.status == "ok":
        body = printed or NO_OUTPUT
    else:
        if result.status == "error":
            notice = _last_line(result.traceback or result.error or "") or "Error: the code failed without a message."
        elif result.status in NOTICES:
            notice = NOTICES[result.status]
        else:
            raise ValueError(f"status {result.status!r} of an execution is not one of ok, error, {', '.join(NOTICES)}")
        body = f"{printed}\n{notice}" if printed else notice
    return f"\nCode execution result: {body}\n"


def encode_feedback(text: str, tokenizer: Any, max_tokens: int) -> tuple[str, list[int]]:
    """Tokenise feedback alone, without special tokens, in at most ``max_tokens`` tokens.

    Text over the budget loses its middle: the longest equal head and tail found by bisection stay around
    ``TRUNCATION_MARKER`` (a budget below the marker's own length leaves only the beginning of the text). The cut falls
    between characters (code points), so no token sequence ends inside one.

    Control tokens of the tokenizer (special ones, and added ones written ``<...>`` or ``[...]``) that the text spells
    are encoded as ordinary text; where the tokenizer knows no other way, a space after their first character breaks
    them. Lone surrogates become "?".

    Args:
        text: the feedback.
        tokenizer: a Hugging Face tokenizer (``encode``, ``added_tokens_decoder``, ``all_special_ids``).
        max_tokens: budget in tokens, at least 0.

    Returns:
        The text that was encoded, and its ids; ``len(ids) <= max_tokens`` always.

    Raises:
        ValueError: when ``max_tokens`` is negative.
    """
    if max_tokens < 0:
        raise ValueError(f"max_tokens of feedback is {max_tokens}; it must be at least 0")
    text = text.encode("utf-8", "replace").decode("utf-8")
    text, ids = _encode_as_text(text, tokenizer)
    if len(ids) <= max_tokens:
        return text, ids
    return (
        _longest_fitting(text, tokenizer, max_tokens, TRUNCATION_MARKER)
        or _longest_fitting(text, tokenizer, max_tokens, None)
        or ("", [])
    )


def _longest_fitting(text: str, tokenizer: Any, max_tokens: int, marker: str | None) -> tuple[str, list[int]] | None:
    """The longest cut of ``text`` whose ids fit, by bisection on the number of characters kept; None when none fits."""
    best: tuple[str, list[int]] | None = None
    low, high = 0, len(text) - 1
    while low <= high:
        kept = (low + high) // 2
        tail = kept // 2 if marker is not None else 0
        cut, ids = _encode_as_text(text[: kept - tail] + (marker or "") + text[len(text) - tail :], tokenizer)
        if len(ids) <= max_tokens:
            best, low = (cut, ids), kept + 1
        else:
            high = kept - 1
    return best


def _encode_as_text(text: str, tokenizer: Any) -> tuple[str, list[int]]:
    """Ids of ``text`` with no control token among them, and the text they stand for."""
    control = _control_tokens(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    if control.keys().isdisjoint(ids):
        return text, ids
    for content in control.values():
        text = text.replace(content, f"{content[0]} {content[1:]}")
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return text, [i for i in ids if i not in control]


@lru_cache(maxsize=8)
def _control_tokens(tokenizer: Any) -> dict[int, str]:
    """Id → content of the tokens that feedback must never hold; the tokenizer must not change after the first call."""
    control = {
        index: token.content
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special or (token.content[:1], token.content[-1:]) in {("<", ">"), ("[", "]")}
    }
    for index in tokenizer.all_special_ids:
        control.setdefault(index, tokenizer.convert_ids_to_tokens(index))
    # Unknown characters are honest text, unless the tokenizer lets its end or padding token stand for them.
    if tokenizer.unk_token_id not in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        control.pop(tokenizer.unk_token_id, None)
    return {index: content for index, content in control.items() if content}


def _last_line(text: str) -> str:
    """The last line that is not blank, or the empty string."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
