#!/usr/bin/env bash
# Prints the path of a working Python 3.12 or newer: $PYTHON, then the usual names, then pyenv's versions, then uv's.
set -u

works() {
    [ -n "$1" ] && "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 13))' >/dev/null 2>&1
}

found() {
    "$1" -c 'import sys; print(sys.executable)'
    exit 0
}

if [ -n "${PYTHON:-}" ]; then
    works "$PYTHON" && found "$PYTHON"
    echo "PYTHON=$PYTHON is not a working Python 3.12 with venv and pip." >&2
    exit 1
fi
for name in python3.12 python3 python; do
    path=$(command -v "$name" 2>/dev/null) && works "$path" && found "$path"
done
roots=("${PYENV_ROOT:-}" "$HOME/.pyenv")
command -v pyenv >/dev/null 2>&1 && roots+=("$(pyenv root 2>/dev/null)" "$(dirname "$(dirname "$(readlink -f "$(command -v pyenv)")")")")
for root in "${roots[@]}"; do
    [ -n "$root" ] || continue
    for path in "$root"/versions/3.12*/bin/python; do
        works "$path" && found "$path"
    done
done
if command -v uv >/dev/null 2>&1; then
    path=$(uv python find 3.12 2>/dev/null) && works "$path" && found "$path"
fi
cat >&2 <<'TXT'
No working Python 3.12 was found. Install one, for example with
    apt-get install python3.12 python3.12-venv    or    pyenv install 3.12    or    uv python install 3.12
or name one: make PYTHON=/path/to/python3.12 quickstart
TXT
exit 1
