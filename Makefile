# One command each; every target first makes .venv and installs what it needs into it.
PYTHON ?= python3
VENV ?= .venv
CUDA ?=
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin
# The installed set depends on pyproject.toml and on the extras that a target asks for.
comma := ,
EXTRAS := examples$(if $(CUDA),$(comma)cuda$(CUDA))
TESTENV := JAX_PLATFORMS=cpu

.PHONY: pretrain finetune parallel test test-fast test-matrix soak mutants coverage lint format docs dist clean

pretrain: $(VENV)/.examples$(CUDA)
	$(BIN)/python examples/pretrain_bert.py $(ARGS)

finetune: $(VENV)/.examples$(CUDA)
	$(BIN)/python examples/finetune_bert.py $(ARGS)

parallel: $(VENV)/.examples$(CUDA)
	$(BIN)/python examples/parallel_bert.py $(ARGS)

test: $(VENV)/.test
	$(TESTENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 15 $(ARGS)

test-fast: $(VENV)/.test
	$(TESTENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The slow tier: 30 kills, 20,000 steps with faults twice over, 2,000 random programs; 27 minutes on 2 idle cores.
soak: $(VENV)/.test
	$(TESTENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 15 tests/soak $(ARGS)

# Small changes to the package, one at a time, and whether the tests notice.
mutants: $(VENV)/.test
	$(BIN)/python .ci/mutants.py $(ARGS)

coverage: $(VENV)/.test
	$(TESTENV) $(BIN)/python -m coverage run -m pytest $(ARGS)
	$(BIN)/python -m coverage report --show-missing --fail-under 98

# The oldest versions claimed, this Python with its newest, and the newest Python that is here with the newest of all.
test-matrix:
	.ci/matrix

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pages in site/; fails on any warning.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Wheel and sdist in dist/, checked: metadata, contents, an installation into an empty environment, the quickstart.
dist: $(VENV)/.dist
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/check_dist.py dist

clean:
	rm -rf $(VENV) build dist site runs .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "optax_fp16 needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.examples$(CUDA): $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet $(PIP_CONSTRAINT_ARGS) --editable '.[test]'
	@# XLA's compiler for NVIDIA GPUs, which needs none: tests read the programs that it makes. It has to be of jaxlib's version.
	$(BIN)/python -m pip install --quiet --no-deps "jax-cuda12-pjrt==$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)')"
	touch $@

$(VENV)/.docs: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

$(VENV)/.dist: $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet build twine
	touch $@
