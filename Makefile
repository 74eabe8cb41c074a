# make learn      first steps: what this machine has, the core exercises, and which comes next
# make compare    run single GPU, DataParallel and DDP here, and compare them
# make test       check a change; make test-all: everything
# Options go through ARGS: make compare ARGS="--epochs 10"

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) tools/install.py
ARGS ?=
NODES ?= 2
GPUS ?= 2
# The release of Slurm that the practice cluster has, also for the tests: own, 22.05, 24.11 or newest.
SLURM := own
# A job has variables of this kind from Slurm only.
unexport SLURM
# pip installs into .venv, also for a user who otherwise has it install elsewhere (asv#522, pypa/virtualenv#802).
export PIP_USER := 0
unexport PIP_TARGET PIP_PREFIX

# An upgrade may take away the Python that it was made with; so does a module that is not loaded.
ifneq ($(filter-out help clean cluster-%,$(MAKECMDGOALS)),)
ifneq ($(shell test ! -e $(VENV)/ready || test -x $(RUN) || echo gone),)
$(error the Python that $(VENV) was made with is gone: load its module again, or make clean, and then this again)
endif
endif

.DEFAULT_GOAL := help
.PHONY: help learn compare sweep test test-all test-lowest test-middle constraints data bench lessons site cluster-up \
  cluster-down clean

help:
	@echo "make learn     first steps: checks this machine, lists the core exercises, names the next one"
	@echo "make compare   run single GPU, DataParallel and DDP here on MNIST; table and figures from your own runs"
	@echo "make sweep     many runs as jobs on a cluster: stages x GPUs x batch sizes, and their comparison"
	@echo "make test      what a change has to pass; test-all: all tests; test-lowest, test-middle: with older packages"
	@echo "make data      put MNIST into data/ (make compare does it too)"
	@echo "make bench     time our stages against the classic script; takes long"
	@echo "make site      all pages as a web site with a search, and the slides: site/index.html"
	@echo "make cluster-up    start a Slurm cluster on this machine to practise on: slurm/practice_cluster"
	@echo "make cluster-down  stop it and remove it"
	@echo "make clean     remove the environments .venv* (results stay)"
	@echo 'Options: make compare ARGS="--epochs 10 --batch-size 512", make cluster-up NODES=2 GPUS=2 SLURM=24.11'

learn: $(VENV)/ready
	@$(RUN) -m manygpus.workshop.learn

compare: $(VENV)/ready
	@$(RUN) results/compare.py $(ARGS)

# Many jobs on a cluster: slurm/sweep.py --help.
sweep: $(VENV)/ready
	@$(RUN) slurm/sweep.py $(ARGS)

test test-all test-lowest test-middle: export PRACTICE_SLURM = $(SLURM)

test: $(VENV)/ready-test
	@$(RUN) -m pytest -m "not full" $(ARGS)

test-all: $(VENV)/ready-test
	@$(RUN) -m pytest --durations=25 $(ARGS)

# ruff and py-spy are exempt from the day of test-middle: pyproject.toml asks for versions that are newer than that day.
TOOLS_OF_ANY_DAY := --exclude-newer-package ruff=2100-01-01 --exclude-newer-package py-spy=2100-01-01
# The lowest versions that pyproject.toml allows, and those of a day in between; each in an environment of its own.
test-lowest: VERSIONS := --resolution lowest-direct
test-middle: VERSIONS := --exclude-newer 2026-01-01 $(TOOLS_OF_ANY_DAY)
test-lowest test-middle:
	@"$(PYTHON)" -m venv $(VENV)-$@
	@$(VENV)-$@/bin/python -m pip install --quiet uv
	@$(VENV)-$@/bin/uv pip install --python $(VENV)-$@/bin/python $(VERSIONS) --editable '.[test]'
	@$(VENV)-$@/bin/python -m pytest $(ARGS)

# The newest version of every package, for all releases of Python: what CI installs (.ci/run).
constraints: $(VENV)/ready
	@$(RUN) -m pip install --quiet uv
	@UV_CUSTOM_COMPILE_COMMAND="make constraints" $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.10 \
	  --all-extras --upgrade --no-annotate pyproject.toml --output-file constraints.txt $(ARGS)

data: $(VENV)/ready
	@$(RUN) -m manygpus.data.datasets $(ARGS)

bench: $(VENV)/ready
	@$(RUN) tools/bench/bench.py $(ARGS)

# What the lessons are made of: diffs and tables that the READMEs quote, the pictures.
lessons: $(VENV)/ready-test
	@$(RUN) tools/lessons.py

# A link between the pages that leads nowhere is an error here.
site: $(VENV)/ready-docs
	@rm -rf site
	@$(RUN) -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs . site $(ARGS)
	@echo "the site: site/index.html; the slides: site/slides.html"

# Needs no packages of Python: it works before the environment is set up.
cluster-up:
	@"$(PYTHON)" slurm/practice_cluster/cluster.py up --slurm $(SLURM) --nodes $(NODES) --gpus $(GPUS) $(ARGS)

cluster-down:
	@"$(PYTHON)" slurm/practice_cluster/cluster.py down $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-test-*

# Made again when the list of dependencies changes.
$(VENV)/ready: pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: $(PYTHON) is missing or older than 3.10: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@echo "Setting up $(VENV) (once, a few minutes; PyTorch is several GB)"
	@test -w . || { echo "error: you may not write here: make your own copy, or activate the environment of whoever owns it" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) || \
	  { echo "error: $(PYTHON) cannot make an environment: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	@$(INSTALL) '.[course]'
	@touch $@

# What only the tests and `make lessons` need, in the same environment.
$(VENV)/ready-test: pyproject.toml | $(VENV)/ready
	@echo "Adding the packages of the tests to $(VENV) (once)"
	@$(INSTALL) '.[test]'
	@touch $@

# What only `make site` needs.
$(VENV)/ready-docs: pyproject.toml | $(VENV)/ready
	@echo "Adding the packages of the site to $(VENV) (once)"
	@$(INSTALL) '.[docs]'
	@touch $@
