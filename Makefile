# Two commands for users: `make demo` and `make test`. Everything is installed into .venv, and only there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MAKEFLAGS += --no-print-directory

# How many files of tests run side by side; each may start whole nodes. One after the other unless asked (0): many tests wait
# for deadlines of real processes, and a busy machine makes all of them late.
JOBS ?= 0
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder

COMPILED := .venv-compiled
COMPILED_BIN := $(CURDIR)/$(COMPILED)/bin

.PHONY: help demo test check format bench docs compiled test-compiled clean
help: ## show these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(BIN)/python $(COMPILED)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("meshd needs Python 3.11 or newer; set PYTHON=python3.x" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(@D)/..

$(VENV)/.runtime: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[fast]'
	@touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[fast,test,check,bench]'
	@touch $@ $(VENV)/.runtime

$(VENV)/.bench: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[fast,test,bench]'
	@touch $@ $(VENV)/.runtime

demo: $(VENV)/.runtime ## run meshd in front of two bundled upstreams
	$(BIN)/meshd launch --demo 2 --policy prefix_hash --host 127.0.0.1 --prometheus-host 127.0.0.1 $(ARGS)

test: $(VENV)/.test check ## lint, types, layers, and all tests (side by side: JOBS=3; longer stress runs: ARGS=--slow)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

check: $(VENV)/.test ## ruff, mypy --strict, import-linter, names of exceptions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_except_names.py meshd
	$(BIN)/lint-imports

format: $(VENV)/.test ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench ## measure against the baseline: 5 minutes (needs wrk; ARGS=goals, 'table --grid small', report, ...)
	$(BIN)/python -m bench $(ARGS)

docs: $(VENV)/.test ## write the generated pages of docs/ again
	$(BIN)/python -m meshd.config.document > docs/settings.md
	$(BIN)/python -m meshd.metrics.document > docs/metrics.md

# Built from a copy: extensions in the checkout would shadow its sources, and build/lib would keep deleted files.
# First as pure Python, since mypyc needs the types of the dependencies.
$(COMPILED)/.built: $(COMPILED)/bin/python setup.py pyproject.toml $(shell find meshd -name '*.py')
	rm -rf build/compiled
	mkdir -p build/compiled
	cp -r meshd setup.py pyproject.toml README.md LICENSE build/compiled
	$(COMPILED)/bin/pip install --quiet --disable-pip-version-check 'setuptools>=77' 'mypy>=1.14' './build/compiled[fast]'
	rm -rf build/wheel
	MESHD_COMPILE=1 $(COMPILED)/bin/pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps \
		--wheel-dir build/wheel ./build/compiled
	$(COMPILED)/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall build/wheel/*.whl
	@touch $@

compiled: $(COMPILED)/.built ## meshd with its hot modules compiled: into .venv-compiled, its wheel into build/wheel (needs gcc)

# From a directory without meshd: the installed, compiled one is what gets tested.
test-compiled: $(COMPILED)/.built ## all tests against the compiled build
	$(COMPILED_BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"] \
		["optional-dependencies"]["test"], sep="\n")' > build/test-requirements.txt
	$(COMPILED_BIN)/pip install --quiet --disable-pip-version-check -r build/test-requirements.txt
	rm -rf build/compiled-tests
	mkdir -p build/compiled-tests
	cp -r tests bench tools docs systemd setup.py Makefile README.md pyproject.toml build/compiled-tests
	cd build/compiled-tests && $(COMPILED_BIN)/python -c \
		'import sys, meshd.errors; sys.exit(0 if meshd.errors.__file__.endswith(".so") else "meshd is not compiled")'
	cd build/compiled-tests && $(COMPILED_BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

clean: ## remove everything that was built
	rm -rf $(VENV) $(COMPILED) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
