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

.PHONY: pretrain finetune parallel test test-fast test-matrix soak coverage lint format docs dist clean

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

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

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
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@
