"""Training runs whose rollouts vLLM samples: in process, and on a server that is killed in the middle."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fastir.config import load_config
from fastir.observe.metrics import read_metrics
from fastir.training.model import model_source

if importlib.util.find_spec("vllm") is None:
    pytest.skip("scripts/setup.sh --vllm", allow_module_level=True)

from fastir.rollout.vllm_server import LocalServer, start_server

pytestmark = pytest.mark.slow


def start_run(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "fastir", "train", "quickstart", "rollout.prompts_per_step=4", "run.threads=1",
        f"run.dir={folder}", "run.name=run", "data.heldout=none", "checkpoint.every=1", "observe.tensorboard=false",
        "observe.progress=off", "training.weight_check=full", "vllm.max_model_len=512", *arguments,
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps_of(folder: Path) -> list[dict[str, float]]:
    path = folder / "run" / "metrics.jsonl"
    return [row for row in read_metrics(path) if "time/step" in row] if path.exists() else []


def serve(folder: Path, name: str) -> LocalServer:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    model = model_source(load_config("quickstart").model)[0]
    return start_server(model, batch_size=32, max_model_len=512, log=folder / f"{name}.log", environment=environment)


def test_a_run_in_process_agrees_with_its_sampler_and_resumes(tmp_path: Path) -> None:
    first = start_run(tmp_path, "rollout.engine=vllm", "run.steps=2")
    out, _ = first.communicate(timeout=240)
    assert first.returncode == 0, out
    second = start_run(tmp_path, "rollout.engine=vllm", "run.steps=3", "--resume")
    out, _ = second.communicate(timeout=240)
    assert second.returncode == 0, out
    steps = steps_of(tmp_path)
    assert len(steps) == 3
    assert all(0 < row["train/logprob_gap_mean"] < 1e-5 for row in steps)


def test_a_killed_server_stops_the_run_which_resumes_on_another(tmp_path: Path) -> None:
    server = serve(tmp_path, "first")
    address = "rollout.engine=vllm-server"
    try:
        run = start_run(tmp_path, address, f'vllm.urls=["{server.url}"]', "run.steps=1000")
        deadline = time.monotonic() + 240
        while len(steps_of(tmp_path)) < 2:
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for child in psutil.Process(server.process.pid).children(recursive=True):
            if "resource_tracker" not in " ".join(child.cmdline()):
                os.kill(child.pid, signal.SIGKILL)
        killed = time.monotonic()
        out, _ = run.communicate(timeout=120)
        assert time.monotonic() - killed < 60
        assert run.returncode == 1
        assert "Traceback" not in out
        assert "is lost" in out
        assert "--resume" in out
    finally:
        server.close()
    done = len(steps_of(tmp_path))
    server = serve(tmp_path, "second")
    try:
        resumed = start_run(tmp_path, address, f'vllm.urls=["{server.url}"]', f"run.steps={done + 1}", "--resume")
        out, _ = resumed.communicate(timeout=240)
        assert resumed.returncode == 0, out
    finally:
        server.close()
    steps = steps_of(tmp_path)
    assert len(steps) == done + 1
    assert all(row["train/logprob_gap_mean"] < 1e-5 for row in steps)
