#!/bin/sh
# Runs what is shipped in orders of steps that the test chooses: the pin word, the flight of a load and the queue of copies to
# a device in every order (loom), the whole store in thousands (shuttle; KVTIER_ROUNDS multiplies them). Takes a few minutes to build and
# seconds to run. Arguments go to both, as to cargo test.
set -eu
cd "$(dirname "$0")/.."
(cd races && cargo test --release "$@")
export RUSTFLAGS="--cfg shuttle"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}/shuttle"
exec cargo test --release -p kvtier-core --test shuttle "$@"
