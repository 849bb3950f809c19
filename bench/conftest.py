"""Lets the benchmarks import their shared helpers by name under importlib collection."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
