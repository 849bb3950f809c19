"""Plain output is clean text; the live display shows the same numbers."""

import contextlib
import io
import math
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console

from fastir.observe.progress import Progress, clock, plain_line, sparkline

METRICS = {
    "reward/mean": 0.4375,
    "rollout/void_turn_rate": 0.0625,
    "train/grad_norm": 0.8312,
    "train/logprob_gap_mean": 2.1e-7,
    "throughput/tokens_per_second": 12345.6,
    "train/skipped_updates": 0.0,
    "time/step": 0.55,
    "time/rollout": 0.31,
    "time/tool": 0.12,
    "time/train": 0.2,
    "time/sync": 0.01,
}


def test_plain_line():
    assert plain_line(22, 60, METRICS) == (
        "step 23/60  reward 0.438  void 6.2%  grad 0.83  gap 2.1e-07  tok/s 12,346  0.55 s"
        " (rollout 0.31, tool 0.12, train 0.20, sync 0.01)"
    )


def test_plain_line_leaves_out_what_was_not_measured_and_shows_trouble():
    line = plain_line(0, 5, {"train/grad_norm": math.nan, "train/skipped_updates": 1, "tool/failed": 3})
    assert line == "step 1/5  grad nan  skipped 1  tool failed 3"


def test_output_that_is_not_a_terminal_has_one_clean_line_per_step(capsys):
    with Progress(3) as progress:
        for step in range(3):
            with progress.phase("rollout"):
                pass
            progress.update(step, METRICS)
        progress.message("held-out accuracy 0.9 [bold]literal[/bold]")
    out = capsys.readouterr().out
    assert out.count("\n") == 4
    assert not re.search(r"[^\x20-\x7e\n]", out)
    assert "[bold]literal[/bold]" in out


def test_off_prints_nothing(capsys):
    with Progress(1, "off") as progress:
        progress.update(0, METRICS)
        progress.message("hello")
    assert capsys.readouterr().out == ""


def test_phase_measures_seconds_and_survives_errors():
    progress = Progress(1, "off")
    with pytest.raises(KeyError), progress.phase("train") as timer:
        raise KeyError
    assert timer.seconds > 0
    assert progress._phases == []


def test_live_display_shows_step_phase_and_numbers():
    progress = Progress(60, "off", title="quickstart")
    progress.update(22, METRICS)
    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system=None)
    with progress.phase("train"):
        console.print(progress._display())
    shown = console.file.getvalue()
    for text in ("quickstart", "step 23/60", "38 %", "0:20 left", "training", "0.438", "6.2%", "train 0.20 s"):
        assert text in shown


SCRIPT = """
from fastir.observe.progress import Progress
with Progress(2, title="quickstart") as progress:
    for step in range(2):
        with progress.phase("rollout"):
            progress.message("[red]kept[/red]")
        progress.update(step, {"reward/mean": 0.25})
"""


def test_a_terminal_gets_the_live_display():
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    subprocess.run([sys.executable, "-c", SCRIPT], stdout=theirs, check=True, env=environment, timeout=60)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux reports the closed end as an error
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    text = shown.decode()
    assert "\x1b[" in text
    assert text.count("[red]kept[/red]") == 2
    assert "step 2/2" in text
    assert "100 %" in text


def test_a_resumed_run_counts_from_its_start_step():
    progress = Progress(60, "off", start_step=40)
    assert progress._done == 40
    progress.update(40, METRICS)
    assert progress._seconds_left() == pytest.approx(19 * 0.55)


def test_sparkline():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.0, 0.0, 1.0, 1.0], width=2) == "▁█"
    assert sparkline([math.nan, 7.0]) == "?█"
    assert len(sparkline([0.5] * 1000)) == 40


def test_clock():
    assert [clock(s) for s in (0, 59.6, 61, 3661)] == ["0:00", "1:00", "1:01", "1:01:01"]
