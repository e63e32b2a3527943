#!/bin/sh
# Runs the Rust tests under a sanitizer: scripts/sanitize.sh [address|thread] [test arguments...]
#
# Works with a stable toolchain. The standard library is not instrumented, so ThreadSanitizer does not see its locks'
# insides; -Zbuild-std would need the library's sources.
set -eu
cd "$(dirname "$0")/.."
kind=${1:-address}
[ $# -gt 0 ] && shift
host=$(rustc -vV | sed -n 's/^host: //p')
export RUSTC_BOOTSTRAP=1
export RUSTFLAGS="-Zsanitizer=$kind"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/sanitize-$kind"
export ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=1"
# What the suppressions name is in the standard library, which is not instrumented.
export TSAN_OPTIONS="halt_on_error=0:second_deadlock_stack=1:suppressions=$PWD/scripts/tsan.supp"
if [ "$kind" = thread ]; then
    # Mixing an instrumented crate with the uninstrumented library has to be allowed by name.
    export RUSTFLAGS="$RUSTFLAGS -Cunsafe-allow-abi-mismatch=sanitizer"
    # The first three have one thread, and many steps; the last is a race on purpose.
    [ $# -gt 0 ] || set -- -- --skip crash:: --skip fuzz:: --skip faults:: --skip source_changes
fi
exec cargo test --target "$host" --lib --tests -p kvtier-codec -p kvtier-nvme -p kvtier-core --no-fail-fast "$@"
