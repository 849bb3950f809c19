#!/usr/bin/env bash
# Sets everything up, then checks style and types and runs the tests. Arguments go to pytest:
#   scripts/test.sh                        everything that needs no GPU
#   scripts/test.sh tests/tir -x           some of it
#   scripts/test.sh -m gpu                 what needs one
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
scripts/setup.sh --dev --smollm2 --vllm

.venv/bin/ruff check .
.venv/bin/mypy
exec .venv/bin/python -m pytest -m "not gpu" "$@"
