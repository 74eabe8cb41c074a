# make compare    run single GPU, DataParallel and DDP here, and compare them
# make test       check everything
# Options go through ARGS: make compare ARGS="--epochs 10"

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help compare test data bench lessons clean

help:
	@echo "make compare   run single GPU, DataParallel and DDP here on MNIST; table and figures from your own runs"
	@echo "make test      run all tests"
	@echo "make data      put MNIST into data/ (make compare does it too)"
	@echo "make bench     time our stages against the classic script; takes long"
	@echo "make clean     remove the environment .venv (results stay)"
	@echo 'Options: make compare ARGS="--epochs 10 --batch-size 512"'

compare: $(VENV)/ready
	@$(RUN) results/compare.py $(ARGS)

test: $(VENV)/ready
	@$(RUN) -m pytest $(ARGS)

data: $(VENV)/ready
	@$(RUN) -m trainkit.data $(ARGS)

bench: $(VENV)/ready
	@$(RUN) results/bench/bench.py $(ARGS)

# The diffs and tables that the READMEs quote.
lessons: $(VENV)/ready
	@$(RUN) tests/lessons.py

clean:
	rm -rf $(VENV)

# Made anew when the list of dependencies changes.
$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: $(PYTHON) is missing or older than 3.10: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@echo "Setting up $(VENV) (once, a few minutes; PyTorch is several GB)"
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "error: $(PYTHON) cannot make an environment: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	@$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@
