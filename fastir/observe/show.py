"""Trajectories as a person reads them: prompt, policy turns and tool feedback told apart, with what trains and why.

Everything a model or a tool wrote is untrusted: control characters (a terminal would obey them) are shown as escapes,
and text never passes through rich's markup.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from fastir.types import Trajectory, Turn

#: Token ids → text; used for the prompt, whose text a trajectory does not hold.
Decode = Callable[[Sequence[int]], str]


def clean(text: str) -> str:
    """Text that is safe to print: control, format and surrogate characters become escapes; newline and tab stay."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _UNSAFE else _escape(c) for c in text)


#: Unicode categories: control, format (bidi overrides, zero width), surrogate, line and paragraph separators.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def _escape(character: str) -> str:
    code = ord(character)
    if code <= 0xFF:
        return {"\r": "\\r"}.get(character, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def show(
    console: Console,
    trajectories: Sequence[Trajectory],
    *,
    decode: Decode | None = None,
    void_filter: str | None = None,
) -> None:
    """Print trajectories; markers such as ``[policy]`` stand in plain output too, colours only on a terminal.

    ``void_filter`` is the run's setting, if known: with it, what becomes of a rollout with a void turn is said too.
    """
    for number, trajectory in enumerate(trajectories, 1):
        title = Text(f"── rollout {number} of {len(trajectories)} " + "─" * 50, style="bold")
        for block in (title, *_blocks(trajectory, decode, void_filter)):
            console.print(block, soft_wrap=not console.is_terminal)
        console.print()


def _blocks(trajectory: Trajectory, decode: Decode | None, void_filter: str | None) -> list[Text]:
    blocks = [_summary(trajectory, void_filter)]
    prompt = trajectory.token_ids[: trajectory.prompt_length].tolist()
    blocks.append(_header("prompt", "blue", f"{len(prompt)} tokens · mask 0"))
    if decode is not None:
        blocks.append(_body(decode(prompt), "blue"))
    for index, turn in enumerate(trajectory.turns):
        blocks.append(_policy_header(trajectory, index, turn))
        blocks.append(_body(turn.text, "green"))
        if turn.feedback_end > turn.end or turn.feedback:
            status = f" · {turn.exec_status} in {turn.exec_seconds:.3f} s" if turn.exec_status else ""
            facts = f"turn {index} · {turn.feedback_end - turn.end} tokens · mask 0{status}"
            blocks.append(_header("feedback", "yellow", clean(facts)))
            blocks.append(_body(turn.feedback, "yellow"))
    return blocks


def _summary(trajectory: Trajectory, void_filter: str | None) -> Text:
    text = Text()
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    text.append("reward ").append(reward, "bold green" if trajectory.reward else "bold red")
    text.append(f" · finish {trajectory.finish_reason} · answer {_quote(trajectory.answer)}")
    text.append(f" · gold {_quote(trajectory.gold)}")
    if trajectory.grade_status not in ("", "ok", "no_answer"):
        text.append(" · grader ").append(clean(trajectory.grade_status), "bold red")
    text.append(f"\nproblem {clean(trajectory.problem_id)} · group {trajectory.group} sibling {trajectory.sibling}")
    turns = len(trajectory.turns)
    text.append(f" · weights v{trajectory.weight_version} · {turns} turn{'' if turns == 1 else 's'}")
    text.append(f" · {trajectory.policy_tokens} policy tokens of {len(trajectory.token_ids)}")
    if trajectory.policy_tokens:
        text.append(f" · log-prob {_logprobs(trajectory.behavior_logprobs[trajectory.policy_mask])}")
    if trajectory.has_void:
        text.append("\nVOID", "bold red").append(": a turn has neither code nor answer")
        if void_filter is not None:
            fate = "it trains all the same" if void_filter == "off" else "none of it trains"
            text.append(f"; {fate} (void_filter {void_filter})")
    elif trajectory.finish_reason == "failed":
        text.append("\nFAILED", "bold red").append(": the tool failed, not the model; none of it trains")
    return text


def _policy_header(trajectory: Trajectory, index: int, turn: Turn) -> Text:
    facts = [f"turn {index}", f"{turn.end - turn.start} tokens", "mask 1"]
    if turn.end > turn.start:
        facts.append(f"log-prob {_logprobs(trajectory.behavior_logprobs[turn.start : turn.end])}")
    if turn.code is not None:
        facts.append("code")
    if turn.answer is not None:
        facts.append(f"answer {_quote(turn.answer)}")
    if turn.truncated:
        facts.append("cut at its token limit")
    header = _header("policy", "green", " · ".join(facts))
    if turn.is_void:
        header.append(" · ").append("VOID", "bold red")
    return header


def _header(marker: str, colour: str, facts: str) -> Text:
    return Text.assemble((f"[{marker}]", f"bold {colour}"), (f" {facts}", "dim"))


def _body(text: str, style: str) -> Text:
    if not text:
        return Text("  (empty)", "dim")
    lines = clean(text).split("\n")
    if lines[-1] == "":
        lines.pop()
    return Text("\n".join(f"  {line}" for line in lines), style)


def _logprobs(values: np.ndarray) -> str:
    return f"mean {values.mean():.2f} min {values.min():.2f}"


def _quote(text: str | None) -> str:
    return "none" if text is None else f"'{clean(text)}'"
