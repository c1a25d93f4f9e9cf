# Every target makes `.venv` and installs what it needs; later calls reuse it.
.PHONY: demo test lint conformance conformance-sample numerics deviceless bench clean
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= auto

# The first Python on the path that runs and is new enough; override with `make PYTHON=...`.
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/digits.py

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -n $(WORKERS)

lint: $(VENV)/.installed-test $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/pyright

conformance: $(VENV)/.installed-test
	$(BIN)/python -m tests.conformance --all --products --random 2000 --soak

conformance-sample: $(VENV)/.installed-test
	$(BIN)/python -m tests.conformance --sample 600

# Every hostile case and reduction island, in both formats.
numerics: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -n $(WORKERS) -m numerics tests/numerics

# Reports against what the vendors' compilers make of the same programs.
deviceless: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -m deviceless tests/inspect

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "jaxamp needs Python 3.11 or newer on the path" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp for each extra of pyproject.toml.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	@touch $@
.PRECIOUS: $(VENV)/.installed-%
