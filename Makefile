# Each target works from a bare clone: Python >= 3.11, make and git are enough.
PYTHON ?= python3
VENV := .venv
MEMBERS := $(wildcard core/pyproject.toml cli/pyproject.toml plugins/*/*/pyproject.toml)

# Threads that spin while they wait slow a small machine down.
export OMP_WAIT_POLICY ?= passive

$(VENV)/.done: requirements/build.txt requirements/dev.txt $(MEMBERS)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements/build.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation -r requirements/dev.txt
	touch $@

setup: $(VENV)/.done

quickstart: setup
	$(VENV)/bin/drl run recipes/quickstart.toml

test: setup
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -n auto --maxprocesses 8 -m "not slow and not gpu"

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python tools/check_types.py
	$(VENV)/bin/python tools/house.py

.PHONY: setup quickstart test lint
