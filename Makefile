# make demo: set up and show what weft does.  make test: set up and run every check.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: env demo test

env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e ".[all,test]"
	touch $@

test: env
	$(BIN)/ruff check weft tests benchmarks experiments
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

demo: env
	$(BIN)/weft demo
