# Two commands do all the set-up: `make quickstart` trains the shipped model, `make test` runs the tests.
# Each creates .venv and installs what it needs; a second call finds it there.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
FRAMEWORK := $(if $(filter Darwin-arm64,$(shell uname -sm | tr ' ' -)),mlx,torch)

.PHONY: quickstart test quick fuzz lint format clean

quickstart: .venv/quickstart
	$(BIN)/delta train

test: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

quick: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

# Random recipes, data, folders, answers and programs, with fresh seeds: make fuzz MINUTES=30
MINUTES ?= 10
fuzz: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(MINUTES)

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/quickstart: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[$(FRAMEWORK)]'
	touch $@

.venv/test: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[torch,mlx,trl,dev]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build *.egg-info
