# Two commands on a fresh machine: `make demo` and `make test`; both create .venv and install all.
PYTHON ?= python3
BIN := .venv/bin
# torch's CPU build: a plain "torch" would bring gigabytes of CUDA libraries along.
TORCH := torch==2.13.0

.PHONY: demo test test-fast test-trainers lint docs modules soak bench clean

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/python examples/demo.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

# The pages of docs/ as a site, without a network: open site/index.html.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# What every module is for.
modules:
	@python3 docs/list_modules.py

test: lint
	$(BIN)/python -m pytest -n 2 -m 'not slow and not trainers'

# Jobs of whole trainers that are killed, change over and go back: minutes.
test-trainers: .venv/installed
	$(BIN)/python -m pytest -n 2 -m 'trainers and not slow'

# What needs no processes, no servers and no large libraries: seconds for a wing.
# `make test-fast WING=rules` runs the tests of one.
test-fast: .venv/installed
	$(BIN)/python -m pytest -m 'not slow and not integration and not trainers' $(if $(WING),tests/$(WING),-n 2)

soak: .venv/installed
	$(BIN)/python -m pytest -m slow --timeout=3600
	$(BIN)/python -m pytest -m hypothesis --timeout=3600 --hypothesis-profile=others
	$(BIN)/python tests/soak.py --kills 1000
	$(BIN)/python tests/soak.py --kills 140 --s3

bench: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,bench]'
	$(BIN)/python benchmarks/results.py

clean:
	rm -rf .venv build dist site *.egg-info
