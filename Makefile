# What people do with a clone. `make` alone lists the targets; README.md and CONTRIBUTING.md say when to use which.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
MODEL := .cache/models/SmolLM2-135M-Instruct
PYTEST := $(BIN)/python -m pytest

# Empty folders are not kept by git, and pytest refuses a folder that is not there.
LIGHT := $(wildcard tests/unit tests/property tests/architecture tests/golden)
MODEL_CHECK := $(wildcard tests/model)
PROCESSES := $(wildcard tests/integration)
STACK := $(wildcard tests/stack)
# Two halves of what starts engines and jobs, about as long; the first takes other ports than the second.
ENGINES := $(wildcard tests/engines tests/faults)
JOBS := $(wildcard tests/e2e tests/stale tests/fleet)

.PHONY: help setup stack ruff types imports spelling lint light check test-light test-processes test-stack test-parts test-engines test-jobs test test-full check-model check-stale demo bench-router bench-weights bench-updates bench-state faults clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## .venv with Headrace and its tools; no torch, no vLLM
	@$(PYTHON) deploy/local/bootstrap.py --dev

stack: ## all of it: setup, the CPU engine stack, system libraries, the demo's model
	@$(PYTHON) deploy/local/bootstrap.py --stack --dev --model $(MODEL)

ruff: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

spelling: setup
	$(BIN)/codespell

lint: ruff types imports spelling ## linters, types, import contracts, spelling

light: setup
	$(PYTEST) $(LIGHT)

check: setup ## lint, and the tests that need no engine stack, side by side; under a minute
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint light

# sed names whose line it is, and writes whole lines: these run two at a time.
test-light: lint
	$(PYTEST) -m "not full" $(LIGHT) $(MODEL_CHECK) | sed --unbuffered 's/^/[light] /'

test-processes: setup
	$(PYTEST) -m "not full" $(PROCESSES) | sed --unbuffered 's/^/[processes] /'

test-stack: stack
	$(PYTEST) -m "not full" $(STACK) | sed --unbuffered 's/^/[stack] /'

# What no engine runs in, one after the other: beside it go tests that mostly wait.
test-parts:
	@$(MAKE) --no-print-directory test-light
	@$(MAKE) --no-print-directory test-stack

test-engines: stack
	HEADRACE_TEST_PORTS=13000 $(PYTEST) -m "not full" $(ENGINES) | sed --unbuffered 's/^/[engines] /'

test-jobs: stack
	$(PYTEST) -m "not full" $(JOBS) | sed --unbuffered 's/^/[jobs] /'

# Engines after all else: as they start they leave no core to tests that wait on the clock.
test: stack ## everything a change can break, on the real parts too; about 15 minutes
	@$(MAKE) --no-print-directory --jobs=2 test-parts test-processes
	@$(MAKE) --no-print-directory --jobs=2 test-engines test-jobs

test-full: stack lint ## every matrix and long case, with a summary of the slowest
	$(PYTEST) --durations=25 $(LIGHT) $(MODEL_CHECK) $(PROCESSES) $(STACK) $(ENGINES) $(JOBS)

check-model: setup ## weight updates explored in every order of events, about 15 minutes; ARGS="--help" shows what can be chosen
	@$(BIN)/python -m tests.model $(ARGS)

demo: stack ## a prefill/decode job on this machine and a chat with it; KEEP=1 leaves it up
	@$(BIN)/python deploy/local/demo.py

check-stale: stack ## random updates and faults on a real fleet: is any reply from stale KV? ARGS="--help" shows what can be chosen
	@$(BIN)/python -m tests.stale.check $(ARGS)

faults: stack ## kill -9 of each kind of process of a real fleet under traffic, as a table; ARGS="--help" shows what can be chosen
	@$(BIN)/python -m tests.faults.kills $(ARGS)

bench-router: setup ## the router beside vllm-router, in about 8 minutes; ARGS="--help" shows what can be chosen
	@$(BIN)/python -m tests.benchmarks.bench_router $(ARGS)

bench-weights: stack ## weight loads beside plain transfers of the same bytes; ARGS="--help" shows what can be chosen
	@$(BIN)/python -m tests.benchmarks.bench_weights $(ARGS)

bench-updates: stack ## what new weights cost the users of a real fleet; ARGS="--help" shows what can be chosen
	@$(BIN)/python -m tests.benchmarks.bench_updates $(ARGS)

bench-state: setup ## headrace serve with 200 jobs and 1,000,000 events on record; ARGS="--help" shows what can be chosen
	@$(BIN)/python -m tests.benchmarks.bench_state $(ARGS)

clean: ## remove .venv, the model and all caches
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
