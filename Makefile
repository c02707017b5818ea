# `make test` and `make demo` need Python 3.11 or newer and nothing else: .venv is made at the first call.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2
# Of the demo's evaluations.
PROMPTS := 252

.DELETE_ON_ERROR:
.PHONY: help setup demo playground test test-slow test-all lint format schema clean

# A command that may be interrupted, and the last words then: the shell says them once the command has saved and ended.
kept = trap 'echo; echo "Interrupted. What was done is kept; make $(MAKECMDGOALS) goes on from there."; exit 130' INT; $(1); exit $$?
PIP = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

help:
	@echo "make demo        teach a small generator of pictures, now"
	@echo "make playground  train all that ships with the playground from nothing (one GPU, at most an hour)"
	@echo "make test        set up .venv and run the tests (at most 15 minutes on two cores)"
	@echo "make test-all    these and the slow ones (at most an hour)"
	@echo "make lint        ruff and mypy --strict"
	@echo "make schema      write the JSON schema of recipes and the table of rewards anew"

# The build tool is pinned too, so it is installed first and used without a network of its own.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version.split()[0] + "; try make PYTHON=python3.11")'
	@echo "Setting up $(VENV); the first time this takes some minutes, most of them for PyTorch."
	@echo "1 of 3: an environment of its own"
	@$(call kept,$(PYTHON) -m venv $(VENV))
	@echo "2 of 3: what builds the package"
	@$(call kept,$(PIP) hatchling editables)
	@echo "3 of 3: the package and what it needs"
	@$(call kept,$(PIP) --no-build-isolation --editable '.[dev]')
	@touch $@

setup: $(READY)

# Interrupted, it goes on where it stopped; `rm -r runs/demo` starts anew.
demo: $(READY)
	@echo "A small generator of pictures learns to draw what captions ask for; about four minutes on two cores."
	@echo "1 of 4: how good it is on $(PROMPTS) captions it has never seen"
	@$(call kept,$(BIN)/tastemaker evaluate playeval --model reward-gradient-playground --prompts $(PROMPTS) --out runs/demo/evaluations/before)
	@echo "2 of 4: it learns"
	@$(call kept,$(BIN)/tastemaker train reward-gradient-playground name=demo)
	@echo "3 of 4: how good it is now, judged by a detector that was never its reward"
	@$(call kept,$(BIN)/tastemaker evaluate playeval --model runs/demo --prompts $(PROMPTS) --out runs/demo/evaluations/after)
	@echo "4 of 4: a page that shows it"
	@$(call kept,$(BIN)/tastemaker report runs/demo)
	@echo "Open $(CURDIR)/runs/demo/report.html: the same captions before and after."

# Interrupted, it goes on where it stopped; `rm -r runs/playground-*` starts anew.
playground: $(READY)
	@echo "Judges, codecs and generators of the playground, from nothing, into tastemaker/playground/weights."
	@echo "A recent GPU takes at most an hour; runs/logs says how far each is."
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "No CUDA GPU was found, and two CPU cores would take days; what ships with the package is ready to use.")'
	@$(call kept,PYTHON=$(BIN)/python tools/playground.sh)

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
	$(BIN)/python -c 'from tastemaker.commands.describing import write_page; write_page()'

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
