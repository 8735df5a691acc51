# Two commands for users: `make demo` and `make test`. Everything is installed into .venv, and only there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MAKEFLAGS += --no-print-directory

.PHONY: help demo test check format bench docs clean
help: ## show these targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("meshd needs Python 3.11 or newer; set PYTHON=python3.x" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[fast]'
	@touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[fast,test,check]'
	@touch $@ $(VENV)/.runtime

$(VENV)/.bench: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[fast,test,bench]'
	@touch $@ $(VENV)/.runtime

demo: $(VENV)/.runtime ## run meshd in front of two bundled upstreams
	$(BIN)/meshd launch --demo 2 --policy prefix_hash --host 127.0.0.1 --prometheus-host 127.0.0.1 $(ARGS)

test: $(VENV)/.test check ## lint, types, layers, and all tests (longer stress runs: make test ARGS=--slow)
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.test ## ruff, mypy --strict, import-linter, names of exceptions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_except_names.py meshd
	$(BIN)/lint-imports

format: $(VENV)/.test ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench ## measure against the baseline (needs wrk and nginx)
	$(BIN)/python -m bench $(ARGS)

docs: $(VENV)/.test ## write the generated pages of docs/ again
	$(BIN)/python -m meshd.config.document > docs/settings.md
	$(BIN)/python -m meshd.metrics.document > docs/metrics.md

clean: ## remove everything that was built
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
