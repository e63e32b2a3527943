#!/bin/sh
# Makes tests/golden/vN, the files that every later version has to read. Once for a version of the format, by the code
# that defined it: scripts/golden.sh N
set -eu
cd "$(dirname "$0")/.."
version=${1:?the version of the format}
to=tests/golden/v$version
if [ -e "$to/store.sectors" ]; then
    echo "$to is there already: golden files are not made again" >&2
    exit 1
fi
mkdir -p "$to"
cargo run -q -p kvtier-nvme --example golden -- "$to"
ls -l "$to"
