"""Grading: equivalent forms score, near misses do not, and no answer can hang or break the grader."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastir.tir.answers import python_to_latex, quick_grade
from fastir.tir.reward import Grader, GradeResult, grade, gsm8k_answer

SAME_QUICKLY = [
    ("18", "18"),
    ("18.0", "18"),
    ("$18", "18"),
    (r"\$18", "18"),
    ("$18$", "18"),
    (r"\(18\)", "18"),
    ("18.", "18"),
    ("18 dollars", "18"),
    (r"18\text{ dollars}", "18"),
    (r"18 \mathrm{cm}", "18"),
    ("18", r"18\text{ cents}"),
    ("1,000", "1000"),
    ("1{,}000", "1000"),
    (r"1\,000", "1000"),
    (r"1,\!000", "1000"),
    ("+18", "18"),
    ("-$5", "-5"),
    (r"\frac12", "0.5"),
    ("1/2", "0.5"),
    ("1/2", r"\frac{1}{2}"),
    (r"\dfrac{2}{4}", r"\frac12"),
    (r"-\frac{1}{2}", "-.5"),
    (r"50\%", "50%"),
    ("50 %", r"50\%"),
    (r"90^\circ", "90"),
    ("x=5", "5"),
    ("x = 5", "5"),
    ("1e-3", "0.001"),
    (r"\boxed{18}", "18"),
    ("0.30000000000000004", "0.3"),
    ("17.999999999999996", "18"),
    ("\u22125", "-5"),
    (r"\text{Evelyn}", r"\text{Evelyn}"),
    ("evelyn", r"\text{Evelyn}"),
    ("C", r"\text{(C)}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
    ("p - q", "p-q"),
    ("007", "7"),
]
DIFFERENT_QUICKLY = [
    ("18.5", "18"),
    ("1000", "100"),
    ("19", "18"),
    ("-18", "18"),
    ("18 or 19", "18"),
    ("18 OR 19", "18"),
    ("18\n19", "18"),
    ("18 19", "1819"),
    ("18 19", "37"),
    (r"18\text{ (or 19)}", "18"),
    ("18 million", "18"),
    (r"18\text{ million}", "18"),
    ("18.01", "18"),
    ("9" * 5000, "18"),
    ("18" + " " * 3000 + "18", "18"),
    (r"18} \boxed{18", "18"),
    ("levenly", r"\text{Evelyn}"),
    ("A", r"\text{(C)}"),
    ("1/3", "1/2"),
    ("1/1000000", "1/1000001"),
    ("0.33", "1/3"),
    ("10000000000001", "10000000000000"),
    ("18", ""),
    (".", "18"),
]
SAME_BY_ALGEBRA = [
    ("50", r"50\%"),
    (r"50\%", "0.5"),
    ("0.3333333", "1/3"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("2, 1", "1,2"),
    ("(x+1)^2", "x^2+2x+1"),
    ("sqrt(2)/2", r"\frac{1}{\sqrt2}"),
    ("2*sqrt(3)", r"\sqrt{12}"),
    ("(3, pi/2)", r"\left(3,\frac{\pi}{2}\right)"),
    ("[0,1)", "[0, 1)"),
    (r"(-\infty, 2]", r"\left(-\infty,2\right]"),
    ("3+15", "18"),
    ("3+15=18", "18"),
    ("x^2 = 4", "4"),
    (r"x \in [-2,7]", "[-2,7]"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("2**10", "1024"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    ("5", "x=5"),
    (r"1\frac{1}{2}", "1.5"),
    ("y+x", "x+y"),
]
DIFFERENT_BY_ALGEBRA = [
    ("1,00", "100"),
    ("1,00", "1000"),
    ("18, 19", "18"),
    ("$5$, $18$", "18"),
    ("x=5, x=18", "18"),
    ("17=18", "18"),
    ("5 = 18", "18"),
    ("x=5=18", "18"),
    ("(2,1)", "(1,2)"),
    ("(0,1)", "[0,1]"),
    (r"\{1,2,3\}", r"\{1,2\}"),
    ("y=5", "x=5"),
    ("the answer is 19", "18"),
    ("18x", "18"),
    ("18!", "18"),
    (r"\pi", "3.14"),
    ("[18]", "[19]"),
    (r"5 \boxed{18}", "18"),
    ("q-p", "p-q"),
    ("é", "18"),
]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=1, timeout_seconds=20) as grader:
        yield grader


@pytest.mark.parametrize(("answer", "gold"), SAME_QUICKLY)
def test_equal_by_text(answer: str, gold: str) -> None:
    assert quick_grade(answer, gold) is True


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT_QUICKLY)
def test_different_by_text(answer: str, gold: str) -> None:
    assert quick_grade(answer, gold) is False


@pytest.mark.parametrize(("answer", "gold"), SAME_BY_ALGEBRA)
def test_equal_by_algebra(grader: Grader, answer: str, gold: str) -> None:
    assert grader.grade(answer, gold) == GradeResult(True, "ok")


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT_BY_ALGEBRA)
def test_different_by_algebra(grader: Grader, answer: str, gold: str) -> None:
    assert grader.grade(answer, gold) == GradeResult(False, "ok")


@pytest.mark.parametrize("answer", [None, "", "  \n"])
def test_no_answer(grader: Grader, answer: str | None) -> None:
    assert grader.grade(answer, "18") == GradeResult(False, "no_answer")


def test_a_gold_that_cannot_be_read_is_a_failure_and_not_a_wrong_answer(grader: Grader) -> None:
    assert grader.grade("½", "½") == GradeResult(True, "ok")
    assert grader.grade("x+1", r"\unknown½") == GradeResult(False, "failed")


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_integers_in_any_spelling_compare_as_integers(a: int, b: int) -> None:
    for spelled in (f"{a}", f"{a:,}", f"${a}$", f"{a}.0", f"\\boxed{{{a}}}", f"{a} eggs"):
        assert quick_grade(spelled, str(a)) is True
        assert quick_grade(spelled, str(b)) is (a == b)


@settings(max_examples=300)
@given(
    st.text(st.sampled_from("0123456789.,-+/%$\\{}()[]= \nxfracortext"), max_size=40),
    st.sampled_from(["18", "0.5", "x"]),
)
def test_text_alone_never_calls_something_else_equal(answer: str, gold: str) -> None:
    """Whatever is called equal by text to a plain number holds exactly one number's digits."""
    if quick_grade(answer, gold) and gold == "18":
        assert "18" in answer or "/" in answer or "frac" in answer


def test_arithmetic_takes_microseconds() -> None:
    started = time.process_time()
    for i in range(1000):
        quick_grade(f"{i}.0", "18")
    assert time.process_time() - started < 1.0  # measured 0.1


@pytest.mark.parametrize("unit", ["{", "}", "\\frac{", "1,", "1/", "$", "\\text{", "1 ", " ", "or ", "\\", "9"])
def test_text_is_judged_in_linear_time(unit: str) -> None:
    started = time.process_time()
    quick_grade(unit * (100_000 // len(unit)), "18")
    quick_grade(unit * (1_999 // len(unit)), "18")
    assert time.process_time() - started < 1.0


def test_python_values_are_written_as_latex_without_evaluating_them() -> None:
    assert python_to_latex("Fraction(1, 2)") == r"\frac{1}{2}"
    assert python_to_latex("x**10 + pi") == r"(x)^{10} + \pi"
    for text in ("__import__('os').getpid()", "a or b", "[1, 2]", "18", r"\frac12", "(" * 500 + "x"):
        assert python_to_latex(text) == text


ADVERSARIAL = {
    "tower_of_powers": "10**10**10",
    "latex_tower": "9^{9^{9^{9}}}",
    "nested_fractions": "\\frac{1}{" * 150 + "2" + "}" * 150,
    "nested_parentheses": "(" * 900 + "1" + ")" * 900,
    "integrals": "\\int" * 300,
    "huge_factorial": "(10^9)!",
    "long": "x+" * 50_000 + "1",
    "long_digits": "1" * 100_000,
    "nulls": "\x00" * 50 + "x",
    "surrogate": "\ud800x",
}


@pytest.mark.parametrize("answer", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_no_answer_hangs_the_grader_and_the_next_one_is_judged(answer: str) -> None:
    with Grader(workers=1, timeout_seconds=1.5) as grader:
        grader.timeout_seconds = 30.0  # a busy machine may be slow to judge what it can
        assert grader.grade("x+1", "1+x").correct
        grader.timeout_seconds = 1.5
        started = time.monotonic()
        result = grader.grade(answer, "18")
        assert time.monotonic() - started < 4
        assert not result.correct
        grader.timeout_seconds = 30.0
        assert grader.grade("x+2", "2+x") == GradeResult(True, "ok")


def test_a_timeout_is_counted_apart_and_its_worker_is_gone() -> None:
    with Grader(workers=1, timeout_seconds=1.0) as grader:
        assert grader.grade("9^{9^{9^{9}}}", "18") == GradeResult(False, "timeout")
        assert not grader._alive
        assert grader.grade("18", "18").correct
        stats = grader.stats
    assert (stats.graded, stats.timeouts, stats.failed, stats.quick, stats.worker_starts) == (2, 1, 0, 1, 1)


def _only_worker(grader: Grader) -> subprocess.Popen[bytes]:
    (worker,) = grader._alive
    return worker.process


def test_a_worker_killed_while_judging_is_a_failure_and_is_replaced() -> None:
    with Grader(workers=1, timeout_seconds=60) as grader:
        assert grader.grade("x+1", "1+x").correct
        victim = _only_worker(grader)
        killer = threading.Timer(0.5, victim.kill)
        killer.start()
        assert grader.grade("9^{9^{9^{9}}}", "18") == GradeResult(False, "failed")
        killer.join()
        assert grader.grade("x+1", "1+x") == GradeResult(True, "ok")
        assert _only_worker(grader).pid != victim.pid
        assert grader.stats.failed == 1


def test_a_worker_killed_while_idle_costs_no_answer() -> None:
    with Grader(workers=1, timeout_seconds=60) as grader:
        assert grader.grade("x+1", "1+x").correct
        os.kill(_only_worker(grader).pid, signal.SIGKILL)
        _only_worker(grader).wait()
        assert grader.grade("x+1", "1+x") == GradeResult(True, "ok")
        assert grader.stats.failed == 0
        assert grader.stats.worker_starts == 2


def test_threads_and_tasks_share_the_workers() -> None:
    pairs = [(f"x+{i % 7}", f"{i % 5}+x") for i in range(40)]
    expected = [i % 7 == i % 5 for i in range(40)]
    with Grader(workers=2, timeout_seconds=60) as grader:
        assert [r.correct for r in grader.grade_many(pairs)] == expected
        with ThreadPoolExecutor(8) as pool:
            assert [r.correct for r in pool.map(lambda p: grader.grade(*p), pairs)] == expected

        async def all_of_them() -> list[GradeResult]:
            return await asyncio.gather(*(grader.grade_async(*pair) for pair in pairs))

        assert [r.correct for r in asyncio.run(all_of_them())] == expected
        assert grader.stats.graded == 120
        assert len(grader._alive) <= 2


def test_close_leaves_no_process_and_ends_grading() -> None:
    grader = Grader(workers=1, timeout_seconds=60)
    assert grader.grade("x+1", "1+x").correct
    process = _only_worker(grader)
    grader.close()
    grader.close()
    assert process.returncode is not None
    with pytest.raises(RuntimeError, match="closed"):
        grader.grade("18", "18")


def test_a_killed_trainer_leaves_no_worker_behind() -> None:
    script = textwrap.dedent("""
        from fastir.tir.reward import Grader
        grader = Grader(workers=1, timeout_seconds=3)
        grader.grade("x+1", "1+x")
        print(next(iter(grader._alive)).process.pid, flush=True)
        grader.grade("9^{9^{9^{9}}}", "18")
    """)
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    worker_pid = int(trainer.stdout.readline())
    time.sleep(0.2)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 30  # the worker ends itself 7 s after it began to judge
    while time.monotonic() < deadline:
        if not _runs(worker_pid):
            return
        time.sleep(0.1)
    os.kill(worker_pid, signal.SIGKILL)
    pytest.fail("the worker outlived its trainer")


def _runs(pid: int) -> bool:
    """True when the process exists and is not a zombie that some init has yet to reap."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_bad_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match=r"reward\.workers is 0"):
        Grader(workers=0)
    with pytest.raises(ValueError, match=r"reward\.timeout_seconds is 0"):
        Grader(timeout_seconds=0)


def test_default_grader() -> None:
    assert grade("18.0", "18")
    assert not grade(None, "18")
    assert not grade("19", "18")


def test_gsm8k_answer() -> None:
    assert gsm8k_answer("He pays 2*9 = $<<2*9=18>>18\n#### 18") == "18"
    assert gsm8k_answer("#### 1 then\n#### 1,234 ") == "1234"
    for bad in ("no mark", "#### ", ""):
        with pytest.raises(ValueError, match="#### N"):
            gsm8k_answer(bad)
