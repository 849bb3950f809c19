"""Where there is no GPU the Triton kernels run in Triton's interpreter; helpers are importable by name."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def poison_uninitialised_memory() -> Iterator[None]:
    """Fill every torch.empty with NaN, so that a result nobody wrote cannot pass."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
