# Every target makes `.venv` and installs what it needs; later calls reuse it.
.PHONY: demo test test-long test-newest lint conformance bench docs clean
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

# Programs that tests start find every module compiled, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

# Chosen so that breaking any module is noticed (tests/selection.py, tests/mutations.py).
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -n $(WORKERS)

# What `make test` leaves out, then samples of the conformance runs. `EVERY=40` runs one test in
# forty of each function, one at least, and of all that take minutes one in forty; `FIRST=7` begins
# with the eighth; `SAMPLE` is of JAX's primitive cases. Tests for chips that are not here run where
# their compilers are: `python -m jaxamp estimate --install gpu`, and `tpu`.
EVERY ?= 1
FIRST ?= 0
SAMPLE ?= 600
ONE_IN := --every $(EVERY) --first $(FIRST)
test-long: $(VENV)/.installed-test
	$(AS_USERS_DO) $(BIN)/python -m pytest -q -n $(WORKERS) $(ONE_IN) -m "long or deviceless"
	$(BIN)/python -m tests.conformance --sample $(SAMPLE) --random 200 $(if $(JAX_CHECKOUT),--jax-tests 200)

# `make test` compiles quickly (tests/conftest.py), the others as users do.
AS_USERS_DO := XLA_FLAGS="$(XLA_FLAGS) --xla_backend_optimization_level=3"

# Against the newest JAX, which needs Python 3.12: what `make test` runs, of which its contracts, the
# rewriter and whatever can fail at run time are compiled as users do; and the conformance sample. `EVERY`, `FIRST` and `SAMPLE` as above.
NEWEST ?= $(shell for python in python3.13 python3.12 $(HOME)/.pyenv/versions/3.1[23].*/bin/python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null \
	&& echo $$python && break; done)
NEWEST_TESTS := tests/core/test_jax_contracts.py tests/core/test_taxonomy.py tests/run/test_amp.py \
	tests/rewrite/test_products.py tests/core/test_keep_precision.py tests/policy \
	tests/rewrite/test_refused.py \
	tests/rewrite/test_collectives.py tests/interop/test_equinox.py tests/interop/test_flax.py \
	tests/faults tests/models tests/kernels tests/found/attention/kernels tests/quantized/lowp tests/training/test_grads.py tests/jaxprs \
	tests/found/attention/test_meshes.py tests/meshes jaxamp/kernels

test-newest:
	@if [ -z "$(NEWEST)" ]; then echo "No Python 3.12 here: the newest JAX is not tested."; \
	else $(MAKE) VENV=.venv-newest PYTHON=$(NEWEST) test-here; fi

.PHONY: test-here
test-here: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -n $(WORKERS) $(ONE_IN) $(addprefix --ignore=,$(NEWEST_TESTS))
	$(AS_USERS_DO) $(BIN)/python -m pytest -q -n $(WORKERS) $(ONE_IN) $(NEWEST_TESTS)
	$(BIN)/python -m tests.conformance --sample $(SAMPLE)

# The site, in site/; every page's code is run by `make test`.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(VENV)/.installed-test $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/pyright

# The conformance runs whole: hours.
conformance: $(VENV)/.installed-test $(VENV)/.installed-models
	$(BIN)/python -m tests.conformance --all --products --random 2000 --offsets 2000 --soak --models --placement \
	    --meshes $(if $(JAX_CHECKOUT),--jax-tests 2000)
	$(BIN)/python -m tests.fields

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "jaxamp needs Python 3.11 or newer on the path" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp for each extra of pyproject.toml.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	@touch $@
.PRECIOUS: $(VENV)/.installed-%
