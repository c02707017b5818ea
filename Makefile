# `make test` and `make demo` need Python 3.11 or newer and nothing else: .venv is made at the first call.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.DELETE_ON_ERROR:
.PHONY: help setup demo test test-slow test-all lint format schema clean

help:
	@echo "make demo      train something small, now"
	@echo "make test      set up .venv and run the tests (at most 15 minutes on two cores)"
	@echo "make test-all  these and the slow ones (at most an hour)"
	@echo "make lint      ruff and mypy --strict"
	@echo "make schema    write the JSON schema of recipes anew"

# The build tool is pinned too, so it is installed first and used without a network of its own.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version.split()[0] + "; try make PYTHON=python3.11")'
	@echo "Setting up $(VENV); the first time this takes some minutes, most of them for PyTorch."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

setup: $(READY)

# Interrupted, it goes on where it stopped; `rm -r runs/demo*` starts anew.
demo: $(READY)
	@echo "A small generator of pictures learns to draw what captions ask for; about three minutes on two cores."
	@echo "First, how good it is on captions it has never seen:"
	$(BIN)/tastemaker evaluate playeval --model nft-playground --prompts 198 --out runs/demo-before
	$(BIN)/tastemaker train nft-playground name=demo
	@echo "And now, judged by a detector that was never its reward:"
	$(BIN)/tastemaker evaluate playeval --model runs/demo --prompts 198 --out runs/demo/evaluations/after
	$(BIN)/tastemaker report runs/demo
	@echo "Look at runs/demo/report.html: the same captions before and after."

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m slow

test-all: test test-slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict tastemaker

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schema: $(READY)
	$(BIN)/python -c 'from tastemaker.config.schema import write_schema; write_schema()'

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
