# radixpd: every target makes the environment it needs. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve test test-full check transports bench-core bench-serving bench-offline bench-one-batch bench-masks bench-programs clean

PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 python3 2>/dev/null))
VENV ?= .venv
BIN := $(VENV)/bin
PINS := 3rdparty/requirements
PIP := $(BIN)/python -m pip install --quiet
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_DEFAULT_TIMEOUT := 30
export PIP_RETRIES := 5
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore
export TOKENIZERS_PARALLELISM := false

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

serve: $(VENV)/.serve  ## serve the demo model on http://127.0.0.1:30000; ARGS="--port 30001 ..." adds flags
	@exec $(BIN)/python -m radixpd.launch_server --model-path demo --host 127.0.0.1 --port 30000 $(ARGS)

test: $(VENV)/.test  ## unit tests and every pair of settings once; ARGS="-k radix" adds pytest arguments
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not full" $(ARGS)

test-full: $(VENV)/.test  ## everything: full products, the demo model, storms
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.test  ## ruff, ruff format, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

transports: $(VENV)/.transports  ## install what --disaggregation-transfer-backend mooncake and nixl need; `make test` then tests them

bench-core: $(VENV)/.serve  ## time the brain alone
	$(BIN)/python benchmark/bench_core.py $(ARGS)

bench-serving: $(VENV)/.serve  ## measure a running server (docs/benchmarks.md); ARGS="--port 30000 --dataset-name random ..."
	$(BIN)/python -m benchmark.bench_serving $(ARGS)

bench-offline: $(VENV)/.serve  ## measure the engine without HTTP (docs/offline.md), on the demo model unless ARGS="--model-path ..." says otherwise
	$(BIN)/python -m benchmark.bench_offline --model-path demo $(ARGS)

bench-one-batch: $(VENV)/.serve  ## measure the model runner alone; ARGS="--batch-size 1 8 --input-len 256 --output-len 32"
	$(BIN)/python -m benchmark.bench_one_batch --model-path demo $(ARGS)

bench-masks: $(VENV)/.serve  ## measure what a grammar costs a decode step of 16 rows (docs/benchmarks.md)
	$(BIN)/python -m benchmark.bench_masks --model-path demo $(ARGS)

bench-programs: $(VENV)/.serve  ## programs in the frontend language, with and without its hints and the cache (docs/frontend.md)
	$(BIN)/python -m benchmark.bench_programs --model-path demo $(ARGS)

clean:  ## remove the environment and every cache in this tree
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find radixpd python_frontend test benchmark -name __pycache__ -prune -exec rm -rf {} +

# An empty file marks a finished installation, so an interrupted one starts again and a finished one costs nothing.
$(VENV)/.python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "radixpd needs Python 3.11 or newer; say which: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "cannot create $(VENV): on Debian and Ubuntu install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.serve: $(VENV)/.python $(PINS)-torch.txt $(PINS).txt $(PINS)-demo.txt $(PINS)-grammar.txt pyproject.toml
	@echo "installing pinned packages into $(VENV) (once)"
	$(PIP) -r $(PINS)-torch.txt
	$(PIP) -r $(PINS).txt
	$(PIP) --no-deps -r $(PINS)-demo.txt
	$(PIP) --no-deps -r $(PINS)-grammar.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.test: $(VENV)/.serve $(PINS)-dev.txt $(PINS)-fixtures.txt
	$(PIP) -r $(PINS)-dev.txt
	$(PIP) --no-deps -r $(PINS)-fixtures.txt
	@touch $@

$(VENV)/.transports: $(VENV)/.test $(PINS)-transports.txt
	$(PIP) --no-deps -r $(PINS)-transports.txt
	@touch $@
