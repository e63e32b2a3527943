# make demo    a real model answers over a long text: cold, from DRAM, and from NVMe after a restart
# make test    every test and check, Rust and Python
# make bench   how near the store comes to this machine's own speed
# make benchmarks  the same, written to docs/BENCHMARKS.md beside the aims
# make lint    formatting, lints and types only
# make clean   remove what was built here; the demo's model in .cache stays

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CACHE  := .cache
RUST   := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)

.PHONY: demo test bench benchmarks lint build clean

demo: $(VENV)/.built
	$(BIN)/kvtier demo --cache $(CACHE)

test: $(VENV)/.built lint
	cargo test --workspace --exclude kvtier-py
	$(BIN)/pytest

bench: $(VENV)/.built
	$(BIN)/kvtier bench --quick

benchmarks: $(VENV)/.built
	$(BIN)/python scripts/benchmarks.py

lint: $(VENV)/.built
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	$(BIN)/ruff check python tests benches examples scripts
	$(BIN)/ruff format --check python tests benches examples scripts
	$(BIN)/mypy

build: $(VENV)/.built

# The machine: say what is missing before anything is downloaded.
$(VENV)/.checked:
	@PYTHON="$(PYTHON)" sh scripts/check-machine.sh
	@"$(PYTHON)" -m venv $(VENV)
	@touch $@

# Everything that pip brings. torch comes as pip is set up here: the default wheels for Linux are large (about 2.7 GB
# with CUDA); where pip's own settings name an index of CPU wheels, those are taken.
$(VENV)/.installed: $(VENV)/.checked pyproject.toml
	$(BIN)/python -m pip install --quiet --upgrade pip "maturin>=1.9,<2"
	$(BIN)/python scripts/requirements.py test > $(VENV)/requirements.txt
	$(BIN)/python -m pip install --requirement $(VENV)/requirements.txt
	@touch $@

# The package itself, editable: Python changes need no rebuild.
$(VENV)/.built: $(VENV)/.installed $(RUST)
	VIRTUAL_ENV="$(CURDIR)/$(VENV)" $(BIN)/maturin develop --release
	@touch $@

clean:
	rm -rf $(VENV) target python/kvtier/*.so
