# Each target works alone on a fresh machine with Python 3.11 or newer and make; `make` lists them.
# PYTHON names the interpreter: make test PYTHON=python3.13.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON := $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
DEV := .venv/dev.stamp
BENCH := .venv/bench.stamp
DOCS := .venv/docs.stamp

# Where the repository is, for links of the site: pyproject.toml says it in one place.
export FOREBAY_REPOSITORY ?= $(shell sed -nE 's/^repository = "(.*)"$$/\1/p' pyproject.toml)

.PHONY: help demo demo-ray quick test test-rest test-full test-all lives life planted check wheel docs bench bench-ray bench-gpu clean

help: ## Say what there is.
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 18

# The constraints hold every version, torch's above all: left alone, pip takes the newest torch
# with gigabytes of CUDA. pip compiles all 13,000 modules, one by one, for 50 seconds: instead those
# that are used are imported, in two processes, also where Python is told (PYTHONDONTWRITEBYTECODE)
# to keep nothing that it compiles. The pip that comes with Python may know no dependency groups.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-dev.txt
IMPORT := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -W ignore -c
$(DEV): pyproject.toml packages/resume-check/pyproject.toml constraints-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) pip
	$(PIP) --no-compile --group dev --editable . --editable packages/resume-check
	$(IMPORT) 'import torch.distributed, torch._dynamo' & torch=$$!; \
	$(IMPORT) 'import ray.cluster_utils, moto.server, s3fs, boto3, pandas, polars, pytest, \
		hypothesis.stateful, pyarrow.dataset, soundfile, PIL.Image, click.testing, tqdm.auto'; \
	wait $$torch
	touch $@

$(BENCH): $(DEV)
	$(PIP) --group bench
	# Its pins exclude the other peers: without them; `bench` has what its import needs.
	$(PIP) --no-deps mosaicml-streaming
	touch $@

$(DOCS): $(DEV)
	$(PIP) --group docs
	touch $@

demo: $(DEV) ## Split real recordings into pieces, in build/demo/.
	rm -rf build/demo
	$(BIN)/forebay preprocess examples/split_audio.py:split_audio \
		examples/recordings.csv build/demo/
	@echo
	@$(BIN)/python examples/show_table.py build/demo/

demo-ray: $(DEV) ## The same on a Ray cluster of two nodes, in build/demo-ray/; the table is the same.
	rm -rf build/demo-ray
	$(BIN)/python examples/demo_ray.py build/demo-ray/

# Four parts run at the same time, and the last line is the processor time of all, user and system.
# Ray's tests have a process of their own: it leaves threads, handlers and a connection there. The
# package is compiled once, for all the programs that tests start: Python may be told
# (PYTHONDONTWRITEBYTECODE) not to do that by itself.
LOADING := tests/loading tests/predict tests/shards
FILES := tests/preprocess tests/cache tests/hostile
OTHERS := $(addprefix --ignore ,tests/ray $(LOADING) $(FILES)) tests packages
define tier
	$(BIN)/python -m compileall -q src tests; failed=0; parts=(); \
	for part in "$(LOADING)" "$(FILES)" tests/ray "$(OTHERS)"; do \
		$(BIN)/python -m pytest -q --tier $(1) $$part & parts+=($$!); \
	done; \
	for part in $${parts[@]}; do wait $$part || failed=1; done; times; exit $$failed
endef

quick: $(DEV) ## Run the first case of each test that is not slow: less than a minute.
	$(call tier,quick)

test: $(DEV) ## Run every test; of the slow ones, only the first case. CI runs test-rest, too.
	$(call tier,test)

test-rest: $(DEV) ## Run what test leaves out of test-full.
	$(call tier,rest)

test-full: $(DEV) ## Run all cases but the thorough ones.
	$(call tier,full)

test-all: $(DEV) ## Run all tests: also long ones on Ray clusters, torch's own DataLoader, more kills.
	$(BIN)/python -m pytest -q --tier all --hypothesis-profile thorough --ignore tests/ray tests packages
	$(BIN)/python -m pytest -q --tier all --hypothesis-profile thorough tests/ray

# Histories from seeds, each in a process of its own; tests/lives/__init__.py says more.
SECONDS := 600
SEED := 1
LIVES := cd tests && ../$(BIN)/python -m lives
lives: $(DEV) ## Live random lives and judge them: make lives SECONDS=600 SEED=1. A failing one is shrunk.
	$(LIVES) --seconds $(SECONDS) --seed $(SEED) --shrink

life: $(DEV) ## Repeat one life and print its history: make life SEED=p17 DOMAIN=loader, or DOMAIN=run.
	$(LIVES) --life $(SEED) --domain $(or $(DOMAIN),loader)

planted: $(DEV) ## Plant faults in copies of the source; do lives find them? FAULT=name for one, SECONDS for each.
	$(LIVES).planted --seconds $(SECONDS) --seed $(SEED) $(addprefix --fault ,$(FAULT))

check: $(DEV) docs wheel ## Lint, formatting, types, the architecture's rules, the wheel, and the documents: the site, links and code.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_{architecture,docs,notebooks,site,three_jobs}.py

wheel: $(DEV) ## Build the package, install it into an empty environment elsewhere, and use it there.
	.ci/wheel $(BIN)/python

# The pages are the repository's files, laid out as they are here, so that links work in both places.
# They are copied: with links to folders, an sdist built afterwards would leave those folders out.
docs: $(DOCS) ## Build the documentation's site, in build/site/; a broken link is an error.
	rm -rf build/pages build/site
	mkdir -p build/pages
	cp -r docs examples packages LICENSE *.md build/pages/
	$(BIN)/mkdocs build --strict

bench: $(BENCH) ## Measure forebay beside its peers.
	$(BIN)/python -m compileall -q src
	$(BIN)/python -m benchmarks

bench-ray: $(BENCH) ## Measure forebay on a Ray cluster of two nodes beside Ray's own ways.
	$(BIN)/python -m benchmarks ray

bench-gpu: $(BENCH) ## Measure batches on a GPU; without one, what device="cpu" costs.
	$(BIN)/python -m benchmarks gpu

clean: ## Remove what make made.
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
