"""Whole runs of the tiny model: files, filters, resume after kill -9, two ranks against one, and every way to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fastir.config import ConfigError, load_config
from fastir.observe.metrics import read_metrics
from fastir.rollout.engine import EngineError
from fastir.rollout.hf import HFEngine
from fastir.training import batch, trainer
from fastir.training.trainer import RunStopped, train
from fastir.types import Trajectory

SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "run.threads=1",
    "eval.problems=8",
    "observe.progress='off'",
    "observe.tensorboard=false",
)


def small(tmp_path, *overrides, steps=3, name="run"):
    return load_config(
        "quickstart", [*SMALL, f"run.dir='{tmp_path}'", f"run.name={name}", f"run.steps={steps}", *overrides]
    )


def command(tmp_path, *arguments, name="run", steps=6, launcher=(sys.executable, "-m")):
    return [
        *launcher, "fastir", "train", "quickstart", *SMALL, f"run.dir={tmp_path}", f"run.name={name}",
        f"run.steps={steps}", "data.heldout=none", "checkpoint.every=1", *arguments,
    ]  # fmt: skip


def without_times(rows):
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "throughput/", "sandbox/"))} for row in rows]


def read_trajectories(path):
    return [Trajectory.from_json(json.loads(line)) for line in path.read_text().splitlines()]


def test_a_run_leaves_what_it_promises(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = small(tmp_path)
    summary = train(config)
    on_disk = json.loads((config.run_dir / "summary.json").read_text())
    assert on_disk == summary
    names = ("accuracy_before", "accuracy_after", "void_rate_before", "void_rate_after", "train_seconds", "steps")
    assert all(isinstance(summary[n], float | int) for n in names)
    rows = [row for row in read_metrics(config.run_dir / "metrics.jsonl") if "reward/mean" in row]
    assert [(row["step"], row["rollout/count"]) for row in rows] == [(0, 16), (1, 16), (2, 16)]
    gaps = [row["train/logprob_gap_mean"] for row in rows if row["train/updates"]]
    assert gaps
    assert max(gaps) < 1e-4
    trajectories = read_trajectories(config.run_dir / "trajectories.jsonl")
    assert len(trajectories) == 3 * 16 + 2 * 8
    assert max(t.weight_version for t in trajectories) == summary["updates"]
    checkpoint = config.run_dir / "checkpoints" / "step-3" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.decode(model.generate(**tokenizer("Q: ", return_tensors="pt"), max_new_tokens=2)[0])


def test_an_earlier_run_is_never_overwritten(tmp_path):
    config = small(tmp_path, "data.heldout=none", steps=1)
    train(config)
    with pytest.raises(FileExistsError, match="--resume"):
        train(config)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        train(small(tmp_path, name="other"), resume=True)


def test_killed_run_resumes_with_the_same_numbers(tmp_path):
    """kill -9 in the middle of a step, then --resume: metrics and trajectories of a run that never stopped."""
    subprocess.run(command(tmp_path, name="whole"), check=True, capture_output=True)
    process = subprocess.Popen(command(tmp_path, name="killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) >= 3):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(metrics.read_bytes().splitlines()) < 6
    subprocess.run(command(tmp_path, "--resume", name="killed"), check=True, capture_output=True)
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        whole, resumed = (
            [json.loads(x) for x in (tmp_path / r / name).read_text().splitlines()] for r in ("whole", "killed")
        )
        if name == "trajectories.jsonl":  # wall times of the tool differ
            for row in (*whole, *resumed):
                row.pop("seconds")
                for turn in row["turns"]:
                    turn.pop("exec_seconds")
        assert without_times(whole) == without_times(resumed)


def test_two_ranks_train_like_one(tmp_path):
    """Same rollouts, same losses and gradient norms, up to rounding."""
    subprocess.run(command(tmp_path, name="one", steps=2), check=True, capture_output=True)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        command(tmp_path, name="two", steps=2, launcher=launcher), check=True, capture_output=True, env=environment
    )
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for name in ("reward/mean", "rollout/count", "rollout/void_turn_rate", "train/tokens"):
        assert [row[name] for row in one] == [row[name] for row in two]
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        np.testing.assert_allclose([r[name] for r in one], [r[name] for r in two], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("mode", ["mask", "drop", "off"])
def test_void_rollouts_reach_the_forward_pass_only_when_the_filter_is_off(tmp_path, mode, monkeypatch):
    forwarded = []
    original = batch.pack

    def spy(trajectories, advantages, members, budget):
        batches = original(trajectories, advantages, members, budget)
        forwarded.extend(trajectories[i].has_void for b in batches for i in b.trajectory_indices)
        return batches

    monkeypatch.setattr(batch, "pack", spy)
    train(small(tmp_path, f"algorithm.void_filter={mode}", "data.heldout=none", steps=3))
    assert forwarded
    assert any(forwarded) == (mode == "off")


def test_a_step_in_which_nothing_trains_is_skipped_and_counted(tmp_path):
    """A group of one has no advantage."""
    config = small(tmp_path, "rollout.group_size=1", "data.heldout=none", steps=2)
    train(config)
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    assert [row["train/updates"] for row in rows] == [0, 0]
    assert [row["rollout/trained_share"] for row in rows] == [0, 0]


def test_bfloat16_trains_with_float32_masters(tmp_path):
    config = small(tmp_path, "model.dtype=bfloat16", "data.heldout=none", "rollout.group_size=8", steps=2)
    train(config)
    gaps = [r["train/logprob_gap_mean"] for r in read_metrics(config.run_dir / "metrics.jsonl") if r["train/updates"]]
    assert gaps
    assert 1e-5 < max(gaps) < 0.02


def test_several_updates_per_batch(tmp_path):
    config = small(
        tmp_path,
        "training.mini_batches=2",
        "training.epochs=2",
        "data.heldout=none",
        "training.token_budget=300",
        steps=2,
    )
    train(config)
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    assert all(2 <= row["train/updates"] <= 4 for row in rows)
    assert rows[0]["train/updates"] in (2.0, 4.0)  # a share without signal is left out in both epochs


def test_recomputed_old_logprobs_give_the_same_first_loss(tmp_path):
    losses = []
    for mode in ("sampler", "recompute"):
        config = small(tmp_path, f"training.old_logprobs={mode}", "data.heldout=none", steps=1, name=mode)
        train(config)
        losses.append(read_metrics(config.run_dir / "metrics.jsonl")[0])
    assert losses[0]["train/grad_norm"] == pytest.approx(losses[1]["train/grad_norm"], rel=1e-3)
    assert losses[1]["train/old_kl"] == pytest.approx(0, abs=1e-7)


def test_dynamic_sampling_replaces_groups_without_gradient(tmp_path):
    overrides = ("rollout.dynamic_sampling=true", "data.heldout=none", "rollout.max_resample_rounds=3")
    config = small(tmp_path, *overrides, "rollout.group_size=2", steps=2)
    train(config)
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    assert rows[0]["rollout/count"] > 8  # most pairs agree, so more than the four first problems were needed
    trajectories = read_trajectories(config.run_dir / "trajectories.jsonl")
    groups = {}
    for t in trajectories[: int(rows[0]["rollout/count"])]:
        groups.setdefault(t.group, []).append(t)
    assert len({group[0].problem_id for group in groups.values()}) == len(groups)  # replaced, not repeated
    counters = json.loads((config.run_dir / "checkpoints" / "step-2" / "trainer.json").read_text())
    assert counters["position"] == sum(row["rollout/count"] for row in rows) / 2  # every problem drawn once


def test_stale_engine_weights_stop_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "sync_weights", lambda *_: None)
    with pytest.raises(RunStopped, match="disagree"):
        train(small(tmp_path, "data.heldout=none", "optimizer.lr=0.05", steps=20))


def test_wrong_temperature_stops_the_run(tmp_path, monkeypatch):
    original = trainer.update
    monkeypatch.setattr(trainer, "update", lambda *a, temperature, **k: original(*a, temperature=2.0, **k))
    with pytest.raises(RunStopped, match="temperature"):
        train(small(tmp_path, "data.heldout=none"))


def test_failing_grader_stops_the_run_with_a_checkpoint(tmp_path, monkeypatch):
    import fastir.tir.reward as reward

    failed = reward.GradeResult(correct=False, status="failed")
    monkeypatch.setattr(reward.Grader, "grade_many", lambda self, pairs: [failed for _ in pairs])
    config = small(tmp_path, "data.heldout=none")
    with pytest.raises(RunStopped, match=r"failed in 16 of 16 rollouts.*max_failed_share"):
        train(config)
    assert (config.run_dir / "checkpoints" / "step-0").is_dir()


def test_non_finite_updates_are_saved_and_stop_the_run(tmp_path, monkeypatch):
    original = batch.group_advantages
    monkeypatch.setattr(batch, "group_advantages", lambda *a, **k: original(*a, **k) * np.nan)
    config = small(tmp_path, "data.heldout=none", "training.max_nonfinite_steps=2")
    with pytest.raises(RunStopped, match="not finite in 2 updates"):
        train(config)
    assert read_trajectories(config.run_dir / "nonfinite" / "step-0.jsonl")


def weights(checkpoint):
    from safetensors.torch import load_file

    return load_file(checkpoint / "model" / "model.safetensors")


def base_weights():
    from importlib import resources

    from safetensors.torch import load_file

    return load_file(str(resources.files("fastir.tiny").joinpath("base/model.safetensors")))


def same(one, other):
    return all(np.array_equal(one[name].float(), other[name].float()) for name in one)


def test_a_stop_before_the_first_update_leaves_the_weights_alone(tmp_path, monkeypatch):
    original = trainer.update
    monkeypatch.setattr(trainer, "update", lambda *a, temperature, **k: original(*a, temperature=2.0, **k))
    config = small(tmp_path, "data.heldout=none")
    with pytest.raises(RunStopped, match="temperature"):
        train(config)
    assert same(weights(config.run_dir / "checkpoints" / "step-0"), base_weights())


def test_a_stop_between_two_updates_of_a_step_goes_back_to_its_start(tmp_path, monkeypatch):
    """Only the second update is not finite; the checkpoint holds nothing of the first."""
    original, calls, moved = trainer.update, [], []

    def update(policy, *a, **k):
        calls.append(1)
        stats = original(policy, *a, **k)
        moved.append(not stats.skipped)
        stats.skipped = stats.skipped or len(calls) == 2
        return stats

    monkeypatch.setattr(trainer, "update", update)
    config = small(
        tmp_path, "data.heldout=none", "training.epochs=2", "training.max_nonfinite_steps=1", "rollout.group_size=8"
    )
    with pytest.raises(RunStopped, match="not finite"):
        train(config)
    assert moved == [True, True]
    folder = config.run_dir / "checkpoints" / "step-0"
    assert same(weights(folder), base_weights())
    assert json.loads((folder / "trainer.json").read_text())["updates"] == 0
    monkeypatch.setattr(trainer, "update", original)
    resumed = train(small(tmp_path, "data.heldout=none", "training.epochs=2", "training.max_nonfinite_steps=1",
                          "rollout.group_size=8"), resume=True)  # fmt: skip
    fresh = train(small(tmp_path, "data.heldout=none", "training.epochs=2", "rollout.group_size=8", name="fresh"))
    assert resumed["updates"] == fresh["updates"]
    runs = [without_times(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("run", "fresh")]
    assert runs[0] == runs[1]


def test_shifted_masks_stop_the_run(tmp_path, monkeypatch):
    from dataclasses import replace

    from fastir.training import parts

    original = parts.rollout

    async def shifted(*a, **k):
        return [replace(t, behavior_logprobs=np.roll(t.behavior_logprobs, 1)) for t in await original(*a, **k)]

    monkeypatch.setattr(parts, "rollout", shifted)
    with pytest.raises(RunStopped, match="shifted mask"):
        train(small(tmp_path, "data.heldout=none", "rollout.group_size=8"))


def test_a_few_rollouts_that_disagree_stop_the_run(tmp_path, monkeypatch):
    """Too few for the mean, many enough for the share of tokens beyond the bound; a NaN is beyond every bound."""
    original = trainer.update

    def update(policy, optimizer, batches, *a, **k):
        for b in batches:
            b.behavior_logprobs[b.mask.nonzero()[:: 20, 0]] -= 0.6
        return original(policy, optimizer, batches, *a, **k)

    monkeypatch.setattr(trainer, "update", update)
    with pytest.raises(RunStopped, match=r"in 5\.\d% of tokens"):
        train(small(tmp_path, "data.heldout=none", "rollout.group_size=8"))


@pytest.mark.parametrize("heldout", ["none", "tiny"])
def test_a_lost_engine_stops_the_run_with_a_checkpoint_that_resumes(tmp_path, monkeypatch, heldout):
    original, version = HFEngine.step, 0 if heldout == "tiny" else 2

    def step(engine):
        if engine.weight_version >= version:
            raise EngineError("the engine's process was killed: start it again")
        return original(engine)

    monkeypatch.setattr(HFEngine, "step", step)
    config = small(tmp_path, f"data.heldout={heldout}", "rollout.group_size=8")
    began = time.monotonic()
    with pytest.raises(RunStopped, match=r"process was killed(.|\n)*--resume"):
        train(config)
    assert time.monotonic() - began < 60
    assert (config.run_dir / "checkpoints" / f"step-{version}").is_dir()
    monkeypatch.setattr(HFEngine, "step", original)
    assert train(config, resume=True)["updates"] == 3


def test_an_engine_that_refuses_the_weights_stops_the_run_after_a_whole_step(tmp_path, monkeypatch):
    def load_weights(self, parameters, version, *, check):
        raise EngineError(f"after weight update {version} the engine holds other values")

    monkeypatch.setattr(HFEngine, "load_weights", load_weights)
    config = small(tmp_path, "data.heldout=none", "rollout.group_size=8")
    with pytest.raises(RunStopped, match="holds other values"):
        train(config)
    assert (config.run_dir / "checkpoints" / "step-1").is_dir()
    assert [row["step"] for row in read_metrics(config.run_dir / "metrics.jsonl")] == [0]


def test_resume_with_other_settings_says_which(tmp_path, capsys):
    config = small(tmp_path, "data.heldout=none", steps=1)
    train(config)
    with pytest.raises(ConfigError, match=r"optimizer\.lr = 0\.1 \(was 0\.001\).*run\.name"):
        train(small(tmp_path, "data.heldout=none", "optimizer.lr=0.1", steps=2), resume=True)
    train(small(tmp_path, "data.heldout=none", "observe.progress=plain", steps=2), resume=True)
    assert "resumed with another run.steps = 2 (was 1)" in capsys.readouterr().out
    assert json.loads((config.run_dir / "config.json").read_text())["run"]["steps"] == 2


def test_async_rollouts_train_like_those_of_turns(tmp_path):
    """Same tokens, same seeds; only rounding may differ, so a step's rewards agree."""
    rows = {}
    for schedule in ("turns", "async"):
        config = small(tmp_path, "data.heldout=none", f"rollout.schedule={schedule}", steps=2, name=schedule)
        train(config)
        rows[schedule] = read_metrics(config.run_dir / "metrics.jsonl")[0]
    for name in ("reward/mean", "rollout/policy_tokens", "rollout/trained_share", "tool/calls"):
        assert rows["turns"][name] == pytest.approx(rows["async"][name], rel=0.02)
    assert rows["turns"]["train/grad_norm"] == pytest.approx(rows["async"]["train/grad_norm"], rel=0.1)


def test_over_provisioned_groups_are_aborted_whole(tmp_path):
    overrides = ("data.heldout=none", "rollout.schedule=async", "rollout.over_provision=1.0")
    config = small(tmp_path, *overrides, steps=2)
    train(config)
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    assert [(row["rollout/count"], row["rollout/aborted"]) for row in rows] == [(16, 16), (16, 16)]
    assert all(row["tool/failed"] == row["engine/failed"] == 0 for row in rows)
    trajectories = read_trajectories(config.run_dir / "trajectories.jsonl")
    assert [(t.group, t.sibling) for t in trajectories[:16]] == sorted((t.group, t.sibling) for t in trajectories[:16])
    counters = json.loads((config.run_dir / "checkpoints" / "step-2" / "trainer.json").read_text())
    assert counters["position"] == 16


def test_async_dynamic_sampling_replaces_idle_groups_at_once(tmp_path):
    overrides = ("rollout.dynamic_sampling=true", "data.heldout=none", "rollout.schedule=async")
    config = small(tmp_path, *overrides, "rollout.group_size=2", "rollout.max_resample_rounds=3", steps=2)
    train(config)
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    assert rows[0]["rollout/count"] > 8
    assert rows[0]["rollout/aborted"] == 0
    counters = json.loads((config.run_dir / "checkpoints" / "step-2" / "trainer.json").read_text())
    assert counters["position"] == sum(row["rollout/count"] for row in rows) / 2


def test_one_step_ahead(tmp_path):
    """From the second step on rollouts are one step's updates old, which is recorded per turn and corrected."""
    overrides = (
        "data.heldout=none", "rollout.schedule=async", "rollout.steps_ahead=1", "rollout.group_size=8",
        "training.old_logprobs=recompute", "algorithm.loss.importance_correction=tis", "training.epochs=2",
    )  # fmt: skip
    config = small(tmp_path, *overrides, steps=3)
    summary = train(config)
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    assert summary["updates"] == 6
    assert [row["rollout/staleness_max"] for row in rows] == [0, 2, 2]
    assert rows[0]["train/logprob_gap_mean"] < 1e-4 < rows[1]["train/logprob_gap_mean"]
    trajectories = read_trajectories(config.run_dir / "trajectories.jsonl")
    assert [t.weight_version for t in trajectories[:: 32]] == [0, 0, 2]
    assert all(turn.weight_version == t.weight_version for t in trajectories for turn in t.turns)
    counters = json.loads((config.run_dir / "checkpoints" / "step-3" / "trainer.json").read_text())
    assert counters["position"] == 12


def test_rollouts_that_are_too_stale_do_not_train(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "sync_weights", lambda *_: None)
    config = small(
        tmp_path, "data.heldout=none", "rollout.max_staleness=1", "rollout.group_size=8", "optimizer.lr=1e-9", steps=9
    )
    with pytest.raises(RunStopped, match="too stale 32"):
        train(config)
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1]


def test_one_step_ahead_survives_a_lost_engine(tmp_path, monkeypatch):
    """The engine dies while the first step trains: that step is whole, logged and saved."""
    original, seen = HFEngine.step, []

    def step(engine):
        if any(request.seed[2] == 1 for request in engine._waiting):
            seen.append(1)
            raise EngineError("killed")
        return original(engine)

    monkeypatch.setattr(HFEngine, "step", step)
    overrides = ("data.heldout=none", "rollout.schedule=async", "rollout.steps_ahead=1", "rollout.group_size=8")
    config = small(tmp_path, *overrides)
    with pytest.raises(RunStopped, match="killed"):
        train(config)
    assert seen
    assert (config.run_dir / "checkpoints" / "step-1").is_dir()
    assert len(read_metrics(config.run_dir / "metrics.jsonl")) == 1
