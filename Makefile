# Everything runs in .venv, which is made when it is first needed and remade when its pins change.

# The first of these that is Python 3.11 or newer; override with `make PYTHON=...`.
PYTHON ?= $(shell for python in python3.11 python3 python3.13 python3.12; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: .venv demo test test-all lint format docs dist clean completions

.venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "alpa_lite needs Python 3.11 or newer; none was found. Set PYTHON=/path/to/python." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples,viz]'
	$(BIN)/python -m alpa_lite.intra_op.solvers.compile_kernels
	$(BIN)/python -c "from alpa_lite.inter_op.stage_dp import compile_kernels; compile_kernels()"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/alpa-lite demo

PYTEST := $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal

test: lint
	$(PYTEST)

# What `make test` leaves out comes after it.
test-all: test
	$(PYTEST) -m "slow and not long"

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --project pyproject.toml
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Completion scripts of the command line, after its options have changed.
completions: $(STAMP)
	$(BIN)/python -c 'from alpa_lite.cli import entry; entry.write_completions()'

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

dist: $(STAMP)
	$(BIN)/python -m build

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .hypothesis .ruff_cache .import_linter_cache
	find alpa_lite cost_models benchmarks tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
