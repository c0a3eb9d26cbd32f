# `make setup` builds .venv from the lock; every other target calls it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PROJECT ?= demo
STAMP := $(VENV)/.installed
# At most four workers: each may need 4 GB.
PARALLEL := --numprocesses auto --maxprocesses 4 --dist loadscope

.PHONY: setup setup-test-tools demo test test-slow lint bench docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Portolan needs Python 3.11 or newer; call make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# uv installs in a fifth of the time; where it cannot, pip does.
	$(PIP) $$(grep '^uv==' requirements.lock) && $(BIN)/uv pip install --quiet \
	  --python $(BIN)/python -r requirements.lock || $(PIP) -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $(STAMP)

setup-test-tools: setup
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null \
	  || (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null) \
	  || echo "No Chromium: install it with your package manager to run the page tests"
	@command -v openssl >/dev/null \
	  || (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq openssl >/dev/null) \
	  || echo "No openssl: install it with your package manager to run the time-stamp tests"

demo: setup
	$(BIN)/portolan init $(PROJECT) --recipe pocket --exist-ok
	@# Huge pages save a fifth of a small training step on Linux; elsewhere this has no effect.
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/portolan -C $(PROJECT) run

test: setup
	$(BIN)/python -m pytest -q -m "not slow" $(PARALLEL)

# What takes more than a minute on two cores; `.ci/run` calls most of it.
test-slow: setup
	$(BIN)/python -m pytest -q -m slow $(PARALLEL)

lint: setup
	$(BIN)/ruff format --check src tests benchmarks docs
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/lint-imports
	$(BIN)/pyright

bench: setup
	for file in benchmarks/*.py; do $(BIN)/python $$file --quick || exit 1; done

docs: setup
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) $(PROJECT)
