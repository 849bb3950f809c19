"""Grades every gold answer of the evaluation sets against itself, as a policy would write it: in ``\\boxed{}``.

A gold answer that does not score 1 is a problem nobody can solve. The answer goes the whole way: through the turn
grammar, then twice through the grader, by text first and then by math-verify alone, because a policy may spell the
same answer differently and then depends on the latter. At most 1 % of a file may fail, and none by hanging.

    python bench/grade_gold.py --data <folder> [--json <path>]
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from fastir.data import load_problems
from fastir.tir.grammar import parse_turn
from fastir.tir.reward import Grader

FILES = ("aime24.parquet", "aime25.parquet", "math500.parquet", "gsm8k_test.jsonl")
MAX_FAILED_SHARE = 0.01


@dataclass(frozen=True)
class Miss:
    """A gold answer that does not score 1 against itself, and why."""

    id: str
    gold: str
    way: str
    reason: str


@dataclass(frozen=True)
class FileResult:
    """One file's counts; seconds are wall time of grading all rows in one way."""

    file: str
    rows: int
    passed: int
    passed_by_algebra: int
    timeouts: int
    failures: int
    seconds: float
    seconds_by_algebra: float
    misses: list[Miss]


def grade_file(path: Path, workers: int, timeout_seconds: float) -> FileResult:
    """Grade a file's gold answers against themselves, by text first and by algebra alone."""
    problems, _ = load_problems(path)
    pairs = [(parse_turn(f"The answer is \\boxed{{{p.answer}}}.").answer, p.answer) for p in problems]
    misses: list[Miss] = []
    passed: dict[bool, int] = {}
    seconds: dict[bool, float] = {}
    with Grader(workers, timeout_seconds) as grader:
        grader.grade("x+1", "1+x")  # start a worker before the clock
        for by_text, way in ((True, "text first"), (False, "algebra alone")):
            started = time.perf_counter()
            results = grader.grade_many(pairs, by_text=by_text)
            seconds[by_text] = round(time.perf_counter() - started, 3)
            passed[by_text] = sum(result.correct for result in results)
            for problem, result in zip(problems, results):
                if not result.correct:
                    reason = "judged different" if result.status == "ok" else result.status
                    misses.append(Miss(problem.id, problem.answer, way, reason))
        stats = grader.stats
    return FileResult(
        file=path.name,
        rows=len(problems),
        passed=passed[True],
        passed_by_algebra=passed[False],
        timeouts=stats.timeouts,
        failures=stats.failed,
        seconds=seconds[True],
        seconds_by_algebra=seconds[False],
        misses=misses,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with the evaluation sets")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--workers", type=int, default=2, help="grader processes")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds per answer")
    arguments = parser.parse_args()
    results = [grade_file(arguments.data / name, arguments.workers, arguments.timeout) for name in FILES]
    print(f"{'file':20}{'rows':>6}{'score 1':>9}{'algebra':>9}{'timeouts':>10}{'s':>8}{'s algebra':>11}")
    for r in results:
        print(
            f"{r.file:20}{r.rows:6}{r.passed:9}{r.passed_by_algebra:9}{r.timeouts:10}"
            f"{r.seconds:8.2f}{r.seconds_by_algebra:11.2f}"
        )
    for r in results:
        for miss in r.misses:
            print(f"  {miss.id} ({miss.way}): {miss.reason}: {miss.gold}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(r) for r in results], indent=1, ensure_ascii=False) + "\n")
    within = all(
        r.rows - min(r.passed, r.passed_by_algebra) <= MAX_FAILED_SHARE * r.rows and r.timeouts == 0 for r in results
    )
    print(f"at most {MAX_FAILED_SHARE:.0%} fail per file, none by hanging: {'yes' if within else 'NO'}")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
