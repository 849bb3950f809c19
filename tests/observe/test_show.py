"""What a trajectory looks like, and that nothing in it can reach the terminal as a command."""

import io

import numpy as np
import pytest
from rich.console import Console

from fastir.observe.show import clean, show
from fastir.types import Trajectory, Turn


def make(turns, finish_reason="answer", **fields):
    length = turns[-1].feedback_end
    mask = np.zeros(length, dtype=bool)
    ids = np.full(length, -1, dtype=np.int32)
    for index, turn in enumerate(turns):
        mask[turn.start : turn.end] = True
        ids[turn.start : turn.feedback_end] = index
    return Trajectory(
        **{
            "problem_id": "p7",
            "group": 1,
            "sibling": 2,
            "prompt_length": 3,
            "token_ids": np.arange(length, dtype=np.int32),
            "policy_mask": mask,
            "turn_ids": ids,
            "behavior_logprobs": np.where(mask, np.float32(-0.5), np.float32(0)),
            "weight_version": 4,
            "finish_reason": finish_reason,
            "turns": tuple(turns),
            "gold": "42",
            "reward": 1.0,
            "answer": "42",
        }
        | fields
    )


TWO_TURNS = [
    Turn(
        3,
        8,
        11,
        text="```python\nprint(6*7)\n```\n",
        code="print(6*7)",
        feedback="42\n",
        exec_status="ok",
        exec_seconds=0.01,
    ),
    Turn(11, 14, 14, text="\\boxed{42}", answer="42"),
]


def rendered(*trajectories, colour=False, **options):
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=colour, color_system="standard" if colour else None)
    show(console, trajectories, **options)
    return out.getvalue()


def test_plain_output_tells_the_parts_apart():
    text = rendered(make(TWO_TURNS), decode=lambda ids: f"Q: {ids}")
    assert text.splitlines()[1:] == [
        "reward 1 · finish answer · answer '42' · gold '42'",
        "problem p7 · group 1 sibling 2 · weights v4 · 2 turns · 8 policy tokens of 14 · log-prob mean -0.50 min -0.50",
        "[prompt] 3 tokens · mask 0",
        "  Q: [0, 1, 2]",
        "[policy] turn 0 · 5 tokens · mask 1 · log-prob mean -0.50 min -0.50 · code",
        "  ```python",
        "  print(6*7)",
        "  ```",
        "[feedback] turn 0 · 3 tokens · mask 0 · ok in 0.010 s",
        "  42",
        "[policy] turn 1 · 3 tokens · mask 1 · log-prob mean -0.50 min -0.50 · answer '42'",
        "  \\boxed{42}",
        "",
    ]


@pytest.mark.parametrize(("setting", "words"), [("mask", "none of it trains"), ("off", "it trains all the same")])
def test_void_is_flagged_with_its_consequence(setting, words):
    void = make([Turn(3, 5, 5, text="hm", is_void=True)], "void", reward=0.0, answer=None)
    text = rendered(void, void_filter=setting)
    assert f"VOID: a turn has neither code nor answer; {words}" in text
    assert "turn 0 · 2 tokens · mask 1 · log-prob mean -0.50 min -0.50 · VOID" in text


def test_a_failed_tool_and_an_unsure_grade_are_named():
    failed = make([Turn(3, 5, 7, text="x", code="x")], "failed", reward=None, grade_status="timeout", answer=None)
    text = rendered(failed)
    assert "FAILED: the tool failed" in text
    assert "reward none" in text
    assert "grader timeout" in text


def test_untrusted_text_cannot_drive_the_terminal():
    evil = "\x1b[2J\x1b]0;owned\x07[red]x[/red] [link=http://e]\r\x9b31m\u202egnp\u2028\ud800\x00"
    turns = [Turn(3, 8, 11, text=evil, code=evil, feedback=evil, exec_status="ok", answer=evil)]
    hostile = make(turns, problem_id=evil, answer=evil, gold=evil, grade_status=evil)
    text = rendered(hostile, decode=lambda ids: evil)
    assert all(c == "\n" or c.isprintable() for c in text)
    assert text.count("[red]x[/red]") == 8  # markup stays literal everywhere
    coloured = rendered(hostile, colour=True, decode=lambda ids: evil)
    assert "\x1b[2J" not in coloured
    assert "\x1b]" not in coloured


def test_clean_escapes_what_it_must_and_nothing_else():
    assert clean("a\tb\nc é 数 ∑ 🙂") == "a\tb\nc é 数 ∑ 🙂"
    assert clean("\x1b[31m\r\x7f\u202e\u200b\U000e0001") == "\\x1b[31m\\r\\x7f\\u202e\\u200b\\U000e0001"
