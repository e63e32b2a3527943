#!/bin/sh
# Runs the pin word and the flight of a load, the shipped files, in every order of their steps (loom). Takes a minute
# to build and seconds to run.
set -eu
cd "$(dirname "$0")/../races"
exec cargo test --release "$@"
