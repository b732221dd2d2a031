# `make demo` and `make test` need only Python >= 3.11, make and a C++ compiler: both make .venv.
PYTHON ?= python3
# Index for torch alone, such as PyTorch's index of CPU builds. Empty: the index that pip uses for all packages.
TORCH_INDEX ?=
BIN := .venv/bin
# Threads that spin while they wait starve each other on a few cores.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test test-all lint format bench peers rivals gate-rivals clean

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stackwise needs Python >= 3.11; say which: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt hatchling editables setuptools
# The next line installs what torch depends on, from the index that pip uses for all packages.
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --index-url $(TORCH_INDEX) torch)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

.venv: .venv/installed

demo: .venv/installed
	$(BIN)/python docs/demo/demo.py

test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow' --hypothesis-profile=stackwise-quick

test-all: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

bench: .venv/installed
	$(BIN)/python -m pytest bench

# What bench.peers compares with.
peers: .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps -r bench/peers.txt

# What bench.detection shows the same bugs to.
rivals: .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps -r bench/rivals.txt

# What bench.gate compares with.
gate-rivals: .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps -r bench/gate/rivals.txt

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache
