"""Loading problems in every shape, malformed rows, and the order of problems."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastir.data import DataError, Problem, ProblemStream, epoch_order, load_problems

VERL = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2", "style": "rule"}}
GSM8K = {"question": "1+1?", "answer": "It is <<1+1=2>>2.\n#### 2"}
PLAIN = {"question": "1+1?", "answer": "2"}
PROBLEM = {"problem": "1+1?", "answer": "2", "solution": "count"}
SHAPES = {"verl": VERL, "gsm8k": GSM8K, "plain": PLAIN, "problem": PROBLEM}


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("row", SHAPES.values(), ids=SHAPES)
def test_every_shape_from_every_format(tmp_path: Path, row: dict[str, Any], suffix: str) -> None:
    path = write(tmp_path / f"sums{suffix}", [{**row, "extra_info": {"index": 0}}, row])
    problems, skipped = load_problems(path)
    assert problems == [Problem("sums:1", "1+1?", "2", "sums"), Problem("sums:2", "1+1?", "2", "sums")]
    assert skipped == []


def test_a_system_message_stands_before_the_question(tmp_path: Path) -> None:
    row = {**VERL, "prompt": [{"role": "system", "content": "Be brief."}, *VERL["prompt"]]}  # type: ignore[misc]
    assert load_problems(write(tmp_path / "a.jsonl", [row]))[0][0].question == "Be brief.\n\n1+1?"


def test_numbers_are_answers(tmp_path: Path) -> None:
    rows = [{"problem": "a", "answer": 18}, {"problem": "b", "answer": 0.5}]
    assert [p.answer for p in load_problems(write(tmp_path / "a.jsonl", rows))[0]] == ["18", "0.5"]


BAD_LINES = {
    "bad_json": (b'{"question": "a"', "not JSON"),
    "not_an_object": (b"[1, 2]", "not a JSON object but list"),
    "not_utf8": (b'{"question": "\xff", "answer": "1"}', "not UTF-8"),
    "missing_field": (b'{"question": "a"}', "answer is missing"),
    "null_field": (b'{"question": null, "answer": "1"}', "question is missing"),
    "empty_question": (b'{"question": "  ", "answer": "1"}', "question is empty"),
    "empty_answer": (b'{"question": "a", "answer": ""}', "answer is empty"),
    "wrong_type": (b'{"question": ["a"], "answer": "1"}', "question is list, not text"),
    "boolean_answer": (b'{"question": "a", "answer": true}', "answer is bool, not text"),
    "deeply_nested": (b"[" * 200_000, "not JSON"),
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_malformed_row_is_fatal_or_skipped_and_reported(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "sums.jsonl"
    good = json.dumps(PLAIN).encode()
    path.write_bytes(b"\n".join([good, b"", line, good]))
    with pytest.raises(DataError, match=rf"sums\.jsonl, row 3: {reason}.*on_bad_row = 'skip'"):
        load_problems(path)
    problems, skipped = load_problems(path, on_bad_row="skip")
    assert [p.id for p in problems] == ["sums:1", "sums:4"]
    assert [(bad.source, bad.row) for bad in skipped] == [(str(path), 3)]
    assert reason in skipped[0].reason


BAD_VERL = {
    "no_messages": ({**VERL, "prompt": []}, r"messages of \[\]"),
    "text_prompt": ({**VERL, "prompt": "1+1?"}, "prompt is not a list of messages"),
    "assistant_turn": (
        {**VERL, "prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        "expected one of user",
    ),
    "empty_content": ({**VERL, "prompt": [{"role": "user", "content": ""}]}, "content is empty"),
    "no_reward_model": ({**VERL, "reward_model": None}, "reward_model is not an object"),
    "no_ground_truth": ({**VERL, "reward_model": {"style": "rule"}}, "ground_truth is missing"),
    "list_ground_truth": ({**VERL, "reward_model": {"ground_truth": ["2"]}}, "ground_truth is list, not text"),
}


@pytest.mark.parametrize(("row", "reason"), BAD_VERL.values(), ids=BAD_VERL)
def test_malformed_verl_rows(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    path = write(tmp_path / "a.jsonl", [VERL, row])
    with pytest.raises(DataError, match=rf"row 2: .*{reason}"):
        load_problems(path)


def test_a_gsm8k_row_without_its_mark_is_malformed_even_in_front(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [PLAIN, GSM8K])
    with pytest.raises(DataError, match=r"row 1: .*#### N"):
        load_problems(path)


def test_a_null_in_parquet_is_malformed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [PLAIN, {"question": None, "answer": "2"}])
    with pytest.raises(DataError, match="row 2: question is missing"):
        load_problems(path)


def test_a_byte_order_mark_and_unicode_line_separators_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = {"question": "a\u2028b", "answer": "é"}
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row, ensure_ascii=False).encode() + b"\r\n")
    assert load_problems(path)[0] == [Problem("a:1", "a\u2028b", "é", "a")]


def test_unusable_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_problems(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"files end in \.jsonl or \.parquet"):
        load_problems(write(tmp_path / "a.txt", [PLAIN]))
    with pytest.raises(DataError, match=r"columns \['text'\] have none of the known shapes"):
        load_problems(write(tmp_path / "b.jsonl", [{"text": "x"}]))
    with pytest.raises(DataError, match="none of the known shapes"):
        load_problems(write(tmp_path / "empty.jsonl", []))
    with pytest.raises(DataError, match=r"holds no problem \(1 malformed"):
        load_problems(write(tmp_path / "c.jsonl", [{"question": "", "answer": ""}]), on_bad_row="skip")
    (tmp_path / "d.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match="not a readable parquet file"):
        load_problems(tmp_path / "d.parquet")
    with pytest.raises(DataError, match="on_bad_row 'ignore'"):
        load_problems(tmp_path / "b.jsonl", on_bad_row="ignore")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"owner/name is no file .*pip install datasets"):
        load_problems("owner/name")


def test_hub_names(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Hub:
        @staticmethod
        def load_dataset(*names: str, split: str) -> list[dict[str, str]]:
            calls.append((*names, split))
            if names[0] == "owner/missing":
                raise FileNotFoundError("not there")
            return [GSM8K]

    monkeypatch.setitem(sys.modules, "datasets", Hub)  # type: ignore[arg-type]
    assert load_problems("owner/name")[0] == [Problem("owner/name:1", "1+1?", "2", "owner/name")]
    load_problems("owner/name:test")
    load_problems("owner/name:main:test")
    assert calls == [("owner/name", "train"), ("owner/name", "test"), ("owner/name", "main", "test")]
    with pytest.raises(DataError, match="neither a file nor a data set of the hub: not there"):
        load_problems("owner/missing")


@given(st.integers(0, 200), st.integers(0, 2**40), st.integers(0, 50))
def test_epoch_order_is_a_permutation_addressed_by_seed_and_epoch(n: int, seed: int, epoch: int) -> None:
    order = epoch_order(n, seed, epoch)
    assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(order, epoch_order(n, seed, epoch))


def test_epoch_order_is_the_same_everywhere_and_differs_between_seeds_and_epochs() -> None:
    assert epoch_order(10, 0, 0).tolist() == [1, 2, 3, 7, 0, 9, 4, 5, 6, 8]
    orders = {tuple(epoch_order(20, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    with pytest.raises(ValueError, match="must not be negative"):
        epoch_order(3, -1, 0)


def problems(n: int) -> list[Problem]:
    return [Problem(f"p:{i}", "q", "a", "p") for i in range(n)]


@given(st.integers(1, 12), st.integers(0, 3), st.lists(st.integers(0, 15), max_size=8))
def test_a_stream_gives_each_problem_once_per_epoch_however_it_is_cut(n: int, seed: int, counts: list[int]) -> None:
    stream = ProblemStream(problems(n), seed)
    taken: list[Problem] = []
    for count in counts:
        taken += ProblemStream(problems(n), seed).take(len(taken), count)  # a new stream: as after a resume
    assert taken == stream.take(0, sum(counts))
    for start in range(0, len(taken) - n + 1, n):
        assert Counter(p.id for p in taken[start : start + n]) == Counter(p.id for p in stream.problems)


def test_a_stream_needs_problems_and_a_position() -> None:
    with pytest.raises(ValueError, match="at least one problem"):
        ProblemStream([], 0)
    with pytest.raises(ValueError, match="must not be negative"):
        ProblemStream(problems(2), 0).take(-1, 2)
