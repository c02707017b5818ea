# `make test` and `make demo` need Python 3.11 or newer and nothing else: .venv is made at the first call.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.DELETE_ON_ERROR:
.PHONY: help setup demo playground test test-slow test-long lint docs format schema lock sbom dist audit clean

# A command that may be interrupted, and the last words then: the shell says them once the command has saved and ended.
kept = trap 'echo; echo "Interrupted. What was done is kept; make $(MAKECMDGOALS) goes on from there."; exit 130' INT; $(1); exit $$?

help:
	@echo "make setup       create .venv and install the package and its dependencies"
	@echo "make demo        train a small image generator with a reward and show images before and after"
	@echo "make playground  train all that ships with the playground from nothing (one GPU, at most an hour)"
	@echo "make test        set up .venv and run the tests (at most 10 minutes)"
	@echo "make test-slow   the slow tests, which CI runs too (at most 30 minutes)"
	@echo "make test-long   complete sweeps over recipes and models, and soaks (hours; run by hand)"
	@echo "make lint        ruff and mypy --strict"
	@echo "make docs        the documentation site, into build/site (a minute)"
	@echo "make schema      write the JSON schema of recipes and the tables of rewards and key layouts anew"
	@echo "make lock        write requirements.lock anew: the hashes of all packages"
	@echo "make sbom        the list of components (CycloneDX), into build"
	@echo "make dist        the wheel and the source archive, into dist"
	@echo "make audit       look up known vulnerabilities of the pinned packages (needs a network)"

$(READY): pyproject.toml constraints.txt requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version.split()[0] + "; try make PYTHON=python3.11")'
	@$(call kept,$(PYTHON) tools/setup.py $(VENV))
	@touch $@

setup: $(READY)

# Resumes if interrupted, and says so itself; `rm -r runs/demo` starts over. `make demo DEMO="--seed 1"` passes options on.
demo: $(READY)
	@$(BIN)/tastemaker demo $(DEMO)

# Interrupted, it goes on where it stopped; `rm -r runs/playground-*` starts anew.
playground: $(READY)
	@echo "Judges, codecs and generators of the playground, from nothing, into tastemaker/playground/weights."
	@echo "A recent GPU takes at most an hour; runs/logs says how far each is."
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "No CUDA GPU was found, and two CPU cores would take days; what ships with the package is ready to use.")'
	@$(call kept,PYTHON=$(BIN)/python tools/playground.sh)

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not long"

test-slow: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "slow and not long"

test-long: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "long and not alone"
	$(BIN)/python -m pytest -n 0 -m "long and alone"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict tastemaker

docs: $(READY)
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html is the first page; python -m http.server -d build/site shows it with its search."

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schema: $(READY)
	$(BIN)/python -c 'from tastemaker.config.json_schema import write_schema; write_schema()'
	$(BIN)/python -c 'from tastemaker.config.catalog import write_reward_page; write_reward_page()'
	$(BIN)/python -c 'from tastemaker.export.key_layouts import write_layout_page; write_layout_page()'

# After a change of pyproject.toml or constraints.txt; needs a network.
lock:
	$(PYTHON) tools/lock.py

sbom: $(READY)
	$(BIN)/python tools/sbom.py build/tastemaker.cdx.json

# Wheel and source archive; the wheel contains the list of components.
dist: $(READY)
	$(BIN)/python -m build --no-isolation

# Asks a database on the network for known vulnerabilities, so it is not part of the tests.
audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/pip install --quiet pip-audit
	build/audit/bin/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
