#!/bin/sh
# Says what kvtier needs to be built and is not here. Exits with 1 if anything is missing.
python="${PYTHON:-python3}"
missing=0

need() {
    missing=1
    printf 'missing: %s\n' "$1" >&2
}

[ "$(uname -s)" = Linux ] || need "Linux (this is $(uname -s)); kvtier reads and writes with O_DIRECT and io_uring"

if ! command -v "$python" >/dev/null 2>&1; then
    need "Python 3.11 or newer (no '$python' found; name another with PYTHON=...)"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    need "Python 3.11 or newer ('$python' is $("$python" --version 2>&1); name another with PYTHON=...)"
elif ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    need "Python's venv module (on Debian and Ubuntu: apt install python3-venv)"
fi

command -v cc >/dev/null 2>&1 || need "a C compiler named cc (on Debian and Ubuntu: apt install build-essential)"

if ! command -v cargo >/dev/null 2>&1; then
    need "Rust 1.89 or newer (no 'cargo' found; see the Rust project's own site for rustup)"
else
    version=$(cargo --version | cut -d ' ' -f 2)
    major=${version%%.*}
    rest=${version#*.}
    minor=${rest%%.*}
    if [ "$major" -lt 1 ] || { [ "$major" -eq 1 ] && [ "$minor" -lt 89 ]; }; then
        need "Rust 1.89 or newer (cargo is $version; with rustup: rustup update stable)"
    fi
fi

exit "$missing"
