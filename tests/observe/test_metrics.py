"""The files of a run survive a kill at any byte and read back exactly."""

import json
import math

import numpy as np
import pytest

from fastir.observe.metrics import (
    METRICS_FILE,
    TRAJECTORIES_FILE,
    MetricsWriter,
    drop_rows_from,
    read_metrics,
    read_rows,
)
from fastir.types import Trajectory, Turn


def trajectory(reward: float = 1.0, text: str = "x\n") -> Trajectory:
    mask = np.array([0, 0, 1, 1, 0], dtype=bool)
    return Trajectory(
        problem_id="p0",
        group=0,
        sibling=0,
        prompt_length=2,
        token_ids=np.arange(5, dtype=np.int32),
        policy_mask=mask,
        turn_ids=np.array([-1, -1, 0, 0, 0], dtype=np.int32),
        behavior_logprobs=np.where(mask, np.float32(-0.1), np.float32(0)),
        weight_version=0,
        finish_reason="answer",
        turns=(Turn(2, 4, 5, text=text, feedback="1\n"),),
        reward=reward,
    )


def writer(path, resume_step=None, **options):
    return MetricsWriter(path, **{"tensorboard": False, "trajectories": True, "resume_step": resume_step} | options)


def write_steps(out, steps):
    for step in steps:
        out.log(step, {"reward/mean": step / 7, "train/loss": -step})
        out.log_trajectories(step, [trajectory(step), trajectory(text="\x1b[31m\u2028é")])
    out.close()


def test_rows_are_json_lines_with_the_step(tmp_path):
    out = writer(tmp_path)
    out.log(0, {"a": 1, "b": 0.1})
    rows = (tmp_path / METRICS_FILE).read_text().splitlines()  # already on disk: rows are flushed one by one
    assert [json.loads(row) for row in rows] == [{"step": 0, "a": 1.0, "b": 0.1}]
    out.close()


def test_nonfinite_values_are_valid_json_and_read_back(tmp_path):
    out = writer(tmp_path)
    out.log(3, {"nan": math.nan, "up": math.inf, "down": np.float32(-math.inf)})
    out.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    raw = json.loads((tmp_path / METRICS_FILE).read_text(), parse_constant=refuse)
    assert raw == {"step": 3, "nan": "NaN", "up": "Infinity", "down": "-Infinity"}
    [row] = read_metrics(tmp_path / METRICS_FILE)
    assert math.isnan(row["nan"])
    assert (row["up"], row["down"]) == (math.inf, -math.inf)


def test_nonfinite_logprobs_of_a_trajectory_are_valid_json(tmp_path):
    bad = trajectory()
    bad.behavior_logprobs[2] = np.nan
    out = writer(tmp_path)
    out.log_trajectories(0, [bad])
    out.close()
    [row] = read_rows(tmp_path / TRAJECTORIES_FILE)
    assert row["behavior_logprobs"][2] == "NaN"
    assert np.isnan(Trajectory.from_json(row).behavior_logprobs[2])


def test_trajectories_read_back(tmp_path):
    write_steps(writer(tmp_path), [0, 1])
    rows = list(read_rows(tmp_path / TRAJECTORIES_FILE))
    assert [(row["step"], row["split"]) for row in rows] == [(0, "train")] * 2 + [(1, "train")] * 2
    assert Trajectory.from_json(rows[2]).to_json() == trajectory(1).to_json()
    assert rows[1]["turns"][0]["text"] == "\x1b[31m\u2028é"


@pytest.mark.parametrize("name", [METRICS_FILE, TRAJECTORIES_FILE])
def test_killed_at_any_byte_then_resumed_equals_uninterrupted(tmp_path, name):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    write_steps(writer(whole), range(4))
    content = (whole / name).read_bytes()
    first_of_step_2 = content.index(b'{"step": 2, ')
    # The checkpoint says "go on with step 2": whatever came after it, complete or torn, is written again.
    for cut in [first_of_step_2, first_of_step_2 + 1, first_of_step_2 + 40, len(content) - 1, len(content)]:
        killed.mkdir(exist_ok=True)
        (killed / name).write_bytes(content[:cut])
        write_steps(writer(killed, resume_step=2), range(2, 4))
        assert (killed / name).read_bytes() == content, cut
        for file in killed.iterdir():
            file.unlink()


def test_a_torn_line_of_a_kept_step_is_removed(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 0, "a": 1.0}\n{"step": 1, "a"')
    drop_rows_from(path, 5)
    assert path.read_bytes() == b'{"step": 0, "a": 1.0}\n'
    path.write_bytes(b'{"step": 0, "a": 1.0}\n\0\0\0\0\0\n')  # a block that never reached the disk
    drop_rows_from(path, 5)
    assert path.read_bytes() == b'{"step": 0, "a": 1.0}\n'


def test_step_numbers_compare_as_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"step": {step}, "a": 0.0}}\n' for step in (8, 9, 10, 11)))
    drop_rows_from(path, 10)
    assert [row["step"] for row in read_rows(path)] == [8, 9]


def test_a_new_run_never_writes_into_an_old_one(tmp_path):
    write_steps(writer(tmp_path), [0])
    before = (tmp_path / METRICS_FILE).read_bytes()
    for trajectories in (True, False):
        with pytest.raises(FileExistsError, match=r"run\.name"):
            writer(tmp_path, trajectories=trajectories)
    assert (tmp_path / METRICS_FILE).read_bytes() == before


def test_a_run_that_failed_before_its_first_row_may_start_again(tmp_path):
    writer(tmp_path).close()
    write_steps(writer(tmp_path), [0])
    assert len(read_metrics(tmp_path / METRICS_FILE)) == 1


def test_steps_never_go_back(tmp_path):
    out = writer(tmp_path, resume_step=3)
    out.log(3, {"a": 1})
    out.log(3, {"b": 1})
    with pytest.raises(ValueError, match="step 2 logged after step 3"):
        out.log(2, {"a": 1})
    out.close()


def test_trajectories_can_be_switched_off(tmp_path):
    write_steps(writer(tmp_path, trajectories=False), [0])
    assert not (tmp_path / TRAJECTORIES_FILE).exists()


def test_readers_name_the_bad_line_and_skip_a_torn_one(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0, "a": 1.0}\n{"step": 1, "a"')
    assert [row["step"] for row in read_rows(path)] == [0]
    path.write_text('{"step": 0, "a": 1.0}\n{"step": 1, "a"\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:2"):
        list(read_rows(path))


def test_tensorboard_holds_the_same_numbers_and_purges_on_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume, value in [(None, 1.0), (2, 5.0)]:
        out = writer(tmp_path, resume_step=resume, tensorboard=True)
        for step in range(resume or 0, 4):
            out.log(step, {"reward/mean": value})
        out.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(0, 1), (1, 1), (2, 5), (3, 5)]
