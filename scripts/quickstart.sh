#!/usr/bin/env bash
# Sets everything up, then trains a tiny language model to solve problems with a Python tool, in a few minutes on a CPU.
# Settings may follow, as for `fastir train`:  scripts/quickstart.sh run.seed=1 run.name=second
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
scripts/setup.sh

# An earlier run is never touched: take the first free name, unless the caller chose one or resumes.
runs=runs
name=quickstart
chosen=
for argument in "$@"; do
    case $argument in
        run.dir=*) runs=${argument#run.dir=} ;;
        run.name=* | --resume | --dry-run) chosen=1 ;;
    esac
done
if [[ -z $chosen ]]; then
    number=2
    while [[ -e $runs/$name ]]; do
        name=quickstart-$number
        number=$((number + 1))
    done
    [[ $name == quickstart ]] || echo "quickstart.sh: $runs/quickstart exists; this run is called $name"
    set -- "run.name=$name" "$@"
fi
exec .venv/bin/python -m fastir train quickstart "$@"
