# The few commands of this project. VENV chooses another environment than ./.venv.
VENV ?= .venv
PYTHON := $(VENV)/bin/python
export VENV
# By file and in order: the engine tests share their runs within one worker, which mostly waits for the engines that it
# started first, while the others run the kernels.
PARALLEL ?= -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup test test-slow test-gpu lint format demo

help: ## show this list
	@grep -E "^[a-z-]+:.*##" $(MAKEFILE_LIST) | sed -E "s/:.*## /\t/" | expand -t 12

setup: ## make the environment (quick when it is up to date)
	@scripts/setup_env.sh

test: setup ## every test that needs no GPU but the slow ones, the real engine on the CPU included
	$(PYTHON) -m pytest -m "not gpu and not slow" $(PARALLEL)

test-slow: setup ## the slow ones that need no GPU
	$(PYTHON) -m pytest -m "not gpu and slow" $(PARALLEL)

test-gpu: setup ## the tests that need an NVIDIA GPU
	$(PYTHON) -m pytest -m gpu

lint: setup ## ruff, as CI runs it
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .

format: setup ## let ruff rewrite the sources
	$(VENV)/bin/ruff check --fix . ; $(VENV)/bin/ruff format .

demo: setup ## serve the tiny model with the feature off and on, and compare
	$(PYTHON) scripts/demo.py
