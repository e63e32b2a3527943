#!/bin/sh
# Fuzzes every decoder for a while: scripts/fuzz.sh [seconds for each, 60 by default] [target...]
#
# Needs cargo-fuzz (cargo install cargo-fuzz). Works with a stable toolchain.
set -eu
cd "$(dirname "$0")/../fuzz"
seconds=${1:-60}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- superblock block slot_image device frame
command -v cargo-fuzz >/dev/null || {
    echo "cargo-fuzz is missing: cargo install cargo-fuzz" >&2
    exit 1
}
export RUSTC_BOOTSTRAP=1
# What is new goes to a scratch corpus; the seeds in git stay few.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for target in "$@"; do
    mkdir -p "$scratch/$target"
    echo "== $target, $seconds s"
    # --fuzz-dir and not the parent's workspace; stable toolchains know no -Zbuild-std here.
    cargo fuzz run --fuzz-dir . --sanitizer address "$target" "$scratch/$target" "corpus/$target" -- \
        -max_total_time="$seconds" -max_len=8192 -rss_limit_mb=4096 -print_final_stats=0 -verbosity=0
done
