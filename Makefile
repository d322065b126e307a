# Two commands on a fresh machine: `make demo` and `make test`; both create .venv and install all.
PYTHON ?= python3
BIN := .venv/bin
# torch's CPU build: a plain "torch" would bring gigabytes of CUDA libraries along.
TORCH := torch==2.13.0
# Most modules of torch and others are never imported; those that are get compiled at that time.
# Two `--quiet`: new versions of pip warn of each folder of a mirror that lacks a package.
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile
# A path in site-packages, which type checkers follow; setuptools' import hook they cannot follow.
EDITABLE := --config-settings editable_mode=compat --editable

# Tests start hundreds of interpreters, which would each compile all of unickpt.
unexport PYTHONDONTWRITEBYTECODE
# Three processes per core of a machine with two, as many tests wait for others. Each gets
# files as a whole, whose set-up is done once, and takes from others at the end.
WORKERS ?= 6
SPREAD := -n $(WORKERS) --dist worksteal

.PHONY: demo test core test-fast test-trainers test-trainers-all test-oldest test-python test-gpu lint \
	docs doors durations modules dist soak bench clean

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	-$(PIP) --upgrade pip  # that of Python 3.11 takes twice as long
	$(PIP) $(TORCH)
	$(PIP) $(EDITABLE) '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/python examples/demo.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python tests/list_doors.py --check

# The pages of docs/ as a site, without a network: open site/index.html.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# unickpt/_doors.py from the entry points in pyproject.toml.
doors:
	@python3 tests/list_doors.py

# What every module is for.
modules:
	@python3 docs/list_modules.py

# The sdist and the wheel in dist/, checked, and the wheel installed into a clean environment.
dist: .venv/installed
	$(BIN)/python tests/dist.py dist

# Lint runs beside the tests: it says at once what is wrong, and again at the end. Before the tests
# run, one process compiles them, which else each does by itself.
TESTED := -m 'not slow and not trainers and not environment'
test: .venv/installed
	@$(MAKE) --no-print-directory lint >.venv/lint.log 2>&1 || { cat .venv/lint.log; false; } & \
		lint=$$!; $(BIN)/python -m pytest $(TESTED) --collect-only -qqq -p no:cacheprovider >/dev/null 2>&1; \
		$(BIN)/python -m pytest $(SPREAD) $(TESTED); tests=$$?; \
		wait $$lint || { echo "make lint fails"; exit 1; }; exit $$tests

# The core alone, installed without plug-ins, trainers and formats of others: 3 minutes.
core: .venv/installed
	$(BIN)/python tests/core.py

# Which tests have become slower than tests/durations.json says, by what the last runs took.
durations:
	@$(BIN)/python tests/durations.py

# Jobs of whole trainers that are killed, change over and go back, and tests whose packages .venv
# does not have: tests/environments.toml lists them, and which of them run here. Minutes.
test-trainers: .venv/installed
	$(BIN)/python -m pytest $(SPREAD) -m 'trainers and not slow and not environment'
	$(BIN)/python tests/environments.py --ci

test-trainers-all: .venv/installed
	$(BIN)/python -m pytest $(SPREAD) -m 'trainers and not slow and not environment'
	$(BIN)/python tests/environments.py --all

# What needs no processes, no servers and no large libraries: seconds for a wing.
# `make test-fast WING=rules` runs the tests of one.
test-fast: .venv/installed
	$(BIN)/python -m pytest -m 'not slow and not integration and not trainers and not environment' \
		$(if $(WING),tests/$(WING),-n 2)

# The same with the oldest versions that pyproject.toml allows, and with other versions of Python:
# `make test-python VERSIONS=3.13`.
VERSIONS ?= 3.12 3.13
test-oldest:
	$(PYTHON) tests/environments.py oldest oldest-torch
test-python:
	$(PYTHON) tests/environments.py $(VERSIONS:%=python%)

# On a machine with a GPU, in the environment of PYTHON, whose torch and JAX must be built for it.
test-gpu:
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false \
		$(PYTHON) -m pytest -m gpu tests/adapters tests/saving

soak: .venv/installed
	$(BIN)/python -m pytest -m slow --timeout=3600
	$(BIN)/python -m pytest -m hypothesis --timeout=3600 --hypothesis-profile=others
	$(BIN)/python tests/soak.py --kills 1000
	$(BIN)/python tests/soak.py --kills 140 --s3
	$(BIN)/python tests/weights_soak.py --versions 10000
	$(BIN)/python tests/environments.py chaos

bench: .venv/installed
	$(PIP) $(EDITABLE) '.[dev,bench]'
	$(BIN)/python benchmarks/results.py

clean:
	rm -rf .venv .venvs build dist site *.egg-info
