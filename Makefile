# Every target makes what it needs first: `make demo` or `make test` on a fresh clone is enough.
# Needs Python 3.10 or newer, a C compiler and make.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

BIN := $(VENV)/bin
SOURCES_OF_BUILD := pyproject.toml setup.py $(shell find planner sbp ops comm cuda -name '*.pyx')
DEMO := .venv/demo

.DEFAULT_GOAL := help
.PHONY: help demo test lint fuzz wheel clean

help:
	@echo "make demo    plan GPT-2 124M for 8 A100s, then train a small GPT on 4 ranks in this process and compare"
	@echo "make test    all tests (those that need an extra that is not installed skip, with the reason)"
	@echo "make lint    ruff, and mypy on the installed package"
	@echo "make fuzz    the property tests with many more examples, 2,000 random programs under random layouts, and every rule"
	@echo "make wheel   build dist/*.whl"
	@echo "make clean   remove the environment and everything that was built"

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "sbp needs Python 3.10 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# The package is editable: only changed Cython or build files need a new install.
$(VENV)/core.stamp: $(VENV)/python.stamp $(SOURCES_OF_BUILD)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# An extra is only packages; asking pip for '.[test]' would compile everything again.
WANTED_BY_EXTRA = from importlib.metadata import requires; \
  print(*(line.split(";")[0] for line in requires("sbp") if "extra ==" in line and "$*" in line.split(";")[-1]), sep="\n")

$(VENV)/extra-%.stamp: $(VENV)/core.stamp
	$(BIN)/python -c '$(WANTED_BY_EXTRA)' > $(VENV)/extra-$*.txt
	$(BIN)/python -m pip install --quiet --requirement $(VENV)/extra-$*.txt
	touch $@

demo: $(VENV)/core.stamp
	mkdir -p $(DEMO)
	$(BIN)/sbp plan gpt2 --cluster a100-80g --nodes 1 --batch 64 --seq 1024 --out $(DEMO)/gpt2.json > /dev/null
	$(BIN)/sbp report $(DEMO)/gpt2.json
	$(BIN)/sbp plan gpt2 --size layers=2,heads=4,hidden=64,vocabulary=256,positions=64 \
	  --cluster cpu --nodes 1 --devices-per-node 4 --mesh dp=2,tp=2 --batch 8 --seq 32 --out $(DEMO)/small.json > /dev/null
	$(BIN)/sbp run $(DEMO)/small.json --steps 20 --float64 --compare

test: $(VENV)/extra-test.stamp
	$(BIN)/python -m pytest -n $(JOBS) -r fEs tests

lint: $(VENV)/extra-lint.stamp
	$(BIN)/ruff check .
	rm -rf build/lib* build/bdist.* $(VENV)/installed && mkdir -p $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/installed .
	cd $(VENV)/installed && MYPYPATH=. $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
	  --cache-dir $(CURDIR)/.mypy_cache -p sbp

fuzz: $(VENV)/extra-test.stamp
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=fuzz -n $(JOBS) tests
	SBP_FUZZ=2000 $(BIN)/python -m pytest -q -n $(JOBS) tests/test_fuzz.py
	$(BIN)/sbp check-rules

wheel: $(VENV)/core.stamp
	rm -rf build/lib* build/bdist.*
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info
	find planner sbp ops comm cuda \( -name '*.so' -o -name '*.c' -o -name '*.cpp' -o -name __pycache__ \) -prune -exec rm -rf {} +
