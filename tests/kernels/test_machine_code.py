"""Facts about the machine code of the Triton kernels for Hopper, read without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("inspect") / "facts.json"
    # A process of its own: in this one the kernels may be bound to the interpreter.
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "fastir_kernels.inspect", "--arch", "90", "--json", str(out)]
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    found = json.loads(Path(out).read_text())["kernels"]
    assert all(f["kernel"] in shown for f in found)
    return found


def test_no_spills(facts: list[dict[str, Any]]) -> None:
    assert [(f["kernel"], f["spills"], f["stack_bytes"]) for f in facts] == [(f["kernel"], 0, 0) for f in facts]


def test_row_streams_use_128_bit_accesses(facts: list[dict[str, Any]]) -> None:
    for f in facts:
        assert f["load_bits"] == [128], f["kernel"]
        assert f["store_bits"] == ([128] if f["kernel"].startswith("grad") else []), f["kernel"]


def test_one_exponential_per_element(facts: list[dict[str, Any]]) -> None:
    assert {f["kernel"]: f["exponentials_per_element"] for f in facts} == {f["kernel"]: 1 for f in facts}


def test_the_forward_is_bound_by_memory(facts: list[dict[str, Any]]) -> None:
    """Instructions issue faster than a row of bf16 arrives, on the faster chip as well: 4.98 GB at 4.8 TB/s."""
    (forward,) = [f for f in facts if f["kernel"] == "stats bf16"]
    assert forward["issue_ms"] < 1.04
    assert forward["predicted_ms_H200"] == 1.04
