"""Arithmetic problems that need a tool: the data of the quickstart.

A model of a few hundred thousand parameters cannot multiply ``37 * 482``; copying the numbers into one line of Python
is within its reach. So a run on these problems shows one thing only: whether reinforcement learning taught the model
to use its tool.

Which split a problem belongs to is a function of its numbers (not of its wording, nor of the seed), so the training and
the held-out set share no set of operands for any pair of seeds.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fastir.data import Problem

Split = Literal["train", "heldout"]

HELDOUT_SHARE = 8  # one set of operands in eight is held out

_THINGS = ("pens", "cups", "eggs", "cards", "coins", "books")


@dataclass(frozen=True)
class Arithmetic:
    """One problem, with the Python expression that solves it (for checks, and for making pre-training text)."""

    question: str
    expression: str
    answer: int
    operands: tuple[int, ...]


def split_of(operands: tuple[int, ...]) -> Split:
    """The split a set of operands belongs to, whatever their order and the wording around them."""
    key = ",".join(str(n) for n in sorted(operands))
    return "heldout" if zlib.crc32(key.encode()) % HELDOUT_SHARE == 0 else "train"


def _draw(rng: random.Random) -> Arithmetic:
    """One problem of a random kind: product, sum, difference, or two steps told in words."""
    kind = rng.choice(("product", "product", "sum", "difference", "words", "words"))
    if kind == "product":
        a, b = rng.randint(12, 999), rng.randint(12, 999)
        sign = rng.choice(("*", "times"))
        return Arithmetic(f"What is {a} {sign} {b}?", f"{a} * {b}", a * b, (a, b))
    if kind == "sum":
        a, b = rng.randint(1_000, 99_999), rng.randint(1_000, 99_999)
        return Arithmetic(f"What is {a} + {b}?", f"{a} + {b}", a + b, (a, b))
    if kind == "difference":
        b, a = sorted((rng.randint(1_000, 99_999), rng.randint(1_000, 99_999)))
        return Arithmetic(f"What is {a} - {b}?", f"{a} - {b}", a - b, (a, b))
    a, b = rng.randint(12, 99), rng.randint(12, 99)
    c = rng.randint(12, a * b - 1 if a * b < 1000 else 999)
    thing = rng.choice(_THINGS)
    if rng.random() < 0.5:
        question = f"A shop has {a} boxes of {b} {thing}. It sells {c}. How many {thing} are left?"
        return Arithmetic(question, f"{a} * {b} - {c}", a * b - c, (a, b, c))
    question = f"A shop has {a} boxes of {b} {thing}. It buys {c} more. How many {thing} are there?"
    return Arithmetic(question, f"{a} * {b} + {c}", a * b + c, (a, b, c))


def arithmetic(split: Split, seed: int) -> Iterator[Arithmetic]:
    """An endless stream of problems of one split: the same for the same seed, no set of operands twice."""
    rng = random.Random(f"{split}/{seed}")
    seen: set[tuple[int, ...]] = set()
    while True:
        problem = _draw(rng)
        key = tuple(sorted(problem.operands))
        if split_of(problem.operands) == split and key not in seen:
            seen.add(key)
            yield problem


def tiny_problems(split: Split, n: int, seed: int = 0) -> list[Problem]:
    """`n` problems of a split, the same for the same seed on every machine."""
    source = f"tiny-{split}-{seed}"
    return [
        Problem(id=f"{source}:{row}", question=p.question, answer=str(p.answer), source=source)
        for row, p in zip(range(1, n + 1), arithmetic(split, seed))
    ]
