"""What an installation contains, and that the repository's own folders do not get in the way of other packages."""

import configparser
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import fastir

ROOT = Path(__file__).resolve().parents[1]

TRAIN_ONE_STEP = """
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, **sizes))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
ids = torch.arange(10)[None]
before = model(input_ids=ids, labels=ids).loss
before.backward()
optimizer.step()
assert model(input_ids=ids, labels=ids).loss < before
"""


def test_transformers_trains_with_the_repository_as_working_directory():
    # The folder kernels/ has the name of a package that transformers looks for; with -c the working directory is
    # first on the path.
    subprocess.run([sys.executable, "-c", TRAIN_ONE_STEP], cwd=ROOT, check=True, timeout=120)


def test_kernels_is_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that the working tree stays as it is."""
    source = tmp_path_factory.mktemp("source")
    for name in ("fastir", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "-q", "-w"]
    subprocess.run([*command, str(source / "out")], check=True, timeout=120)
    [path] = (source / "out").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_every_module_and_data_file(wheel):
    names = set(wheel.namelist())
    for folder, top in ((ROOT, "fastir"), (ROOT / "kernels", "fastir_kernels")):
        files = [path for path in (folder / top).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert files
        missing = {str(path.relative_to(folder)) for path in files} - names
        assert not missing, f"not in the wheel (see [tool.setuptools] packages and package-data): {sorted(missing)}"
    for name in ("fastir/py.typed", "fastir_kernels/py.typed", "fastir/recipes/quickstart.toml"):
        assert name in names
    assert {"fastir/tiny/base/config.json", "fastir/tiny/base/model.safetensors"} <= names


def test_the_wheel_holds_nothing_else(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == {"fastir", "fastir_kernels", f"fastir-{fastir.__version__}.dist-info"}


def test_the_wheel_carries_its_licence_and_command(wheel):
    info = f"fastir-{fastir.__version__}.dist-info"
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()
    assert "License-Expression: Apache-2.0" in wheel.read(f"{info}/METADATA").decode()
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(f"{info}/entry_points.txt").decode())
    assert entries["console_scripts"]["fastir"] == "fastir.cli:main"


def test_the_installed_version_is_the_package_version():
    assert metadata.version("fastir") == fastir.__version__


def test_the_base_needs_are_light():
    base = [text for text in metadata.requires("fastir") or [] if "extra ==" not in text]
    assert {text.partition(">")[0] for text in base} <= {"numpy", "packaging", "pydantic", "rich"}
