# `make tune` and `make test` do everything on a fresh machine; see `make help`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
# Four minutes on two cores at most; a finished search is only read again.
TUNE_ARGS ?= --time-budget 200
PYTEST_ARGS ?= -n auto
REPORT ?= build/report

.PHONY: help setup tune test lint types report-example clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16
	@echo "variables: PYTHON, TORCH_INDEX_URL (tools/setup.sh), VENV, TUNE_ARGS, PYTEST_ARGS, REPORT"

setup: ## create .venv and install the package; quick when nothing changed
	@tools/setup.sh $(VENV)

tune: setup ## tune the quickstart workload and write build/report/index.html
	$(BIN)/tilescout tune $(TUNE_ARGS)
	$(BIN)/tilescout report --out $(REPORT)

test: lint types ## run every check: format, lint, types, tests
	TRITON_INTERPRET=1 $(BIN)/pytest $(PYTEST_ARGS) -m interpreter tests/kernels tests/ops tests/benchmarks tests/tuner/adoption
	$(BIN)/pytest $(PYTEST_ARGS)

lint: setup ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## check types
	MYPYPATH=.typing $(BIN)/mypy -p tilescout

report-example: setup ## write docs/reports, the report of the shipped results.db
	$(BIN)/python tools/report_example.py

clean: ## remove what make created, .venv included
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
