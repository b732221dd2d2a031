# `make demo` and `make test` need only Python >= 3.11, make and a C++ compiler: both make .venv.
PYTHON ?= python3
# Index for torch alone, such as PyTorch's index of CPU builds. Empty: the index that pip uses for all packages.
TORCH_INDEX ?=
BIN := .venv/bin
# Threads that spin while they wait starve each other on a few cores.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo docs test test-long test-all compat compat-lowest compat-newest lint format pages bench peers rivals gate-rivals clean

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
	$(BIN)/python examples/demo/demo.py

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: .venv/installed
	$(PYTEST) -m 'not slow and not long' --hypothesis-profile=stackwise-quick

test-long: .venv/installed
	$(PYTEST) -m 'long and not slow' --hypothesis-profile=stackwise-quick

test-all: .venv/installed
	$(PYTEST)

# The lowest and the newest allowed versions of all libraries, each in its own environment, and the tests that use
# them: docs/reference/compatibility.md. Another interpreter: make compat-newest PYTHON=python3.13
COMPAT := build/compat
COMPAT_TESTS := tests/subject/test_cached_call.py tests/subject/test_capability.py tests/subject/test_lightning_run.py \
	tests/subject/test_transformers_run.py tests/benchmark/test_llama.py tests/model/test_interop.py tests/model/test_parity.py \
	tests/plugin/test_benchmark_compatibility.py tests/plugin/test_compatibility.py tests/plugin/test_zero_code.py \
	tests/prototype/search tests/quality/test_cache_rows.py tests/quality/test_harness.py tests/stability/adapters \
	tests/stability/locate/test_module_scales.py \
	tests/training/test_cross_entropy.py tests/training/test_objective.py tests/training/test_recompute.py
COMPAT_INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
COMPAT_INSTALL = $(COMPAT)/$*/bin/python -m pip install --quiet $(COMPAT_INDEX)

compat: compat-lowest compat-newest

compat-lowest compat-newest: compat-%: $(COMPAT)/%/installed
	OMP_NUM_THREADS=1 $(COMPAT)/$*/bin/python -m pytest -n 2 --dist worksteal -m 'not slow' \
		--hypothesis-profile=stackwise-quick $(COMPAT_TESTS)

$(COMPAT)/lowest.txt: pyproject.toml
	$(PYTHON) -m venv $(COMPAT)/resolver
	$(COMPAT)/resolver/bin/python -m pip install --quiet uv
	$(COMPAT)/resolver/bin/uv pip compile --quiet --upgrade --system-certs --resolution lowest-direct --extra dev \
		--python $(PYTHON) --index-strategy unsafe-best-match $(COMPAT_INDEX) --output-file $@ pyproject.toml

$(COMPAT)/newest.txt: pyproject.toml
	mkdir -p $(COMPAT) && touch $@

$(COMPAT)/%/installed: $(COMPAT)/%.txt
	$(PYTHON) -m venv --clear $(COMPAT)/$*
	$(COMPAT_INSTALL) --requirement $(COMPAT)/$*.txt hatchling editables setuptools
	$(COMPAT_INSTALL) --no-build-isolation --editable '.[dev]'
	$(COMPAT)/$*/bin/python -m pip list > $@

# The documentation site, in build/docs. Warnings are errors, and so are links to missing pages or headings.
docs: .venv/installed
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

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

format: pages
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pages of docs/reference that are generated from the configuration keys.
pages: .venv/installed
	$(BIN)/python -c 'from stackwise.cli.keys import write_pages; write_pages("docs/reference")'

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache
