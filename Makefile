# Needs make and Python 3.11 or newer with its venv module; everything else goes into .venv.
# `make` alone lists the targets.

PYTHON ?= python3
# Versions that `make setup` holds to: constraints/oldest.txt, constraints/newest.txt, or a file of your own.
CONSTRAINTS ?= constraints/tested.txt
VENV := .venv
PY := $(VENV)/bin/python
# One for each choice of versions, and the last alone is kept: another choice installs anew.
STAMP := $(VENV)/.installed-$(basename $(notdir $(CONSTRAINTS)))
# What an editable install was made from: a change of any of these makes `make setup` run again.
INSTALLED_FROM := $(CONSTRAINTS) constraints/oldest.txt requirements-dev.txt requirements-apart.txt pyproject.toml setup.py $(wildcard parallelformers_ng/*/*.[ch])

# Only what .venv holds may be imported, whatever the machine has installed elsewhere.
export PYTHONNOUSERSITE := 1
unexport PYTHONPATH PYTHONHOME

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Quiet in CI; elsewhere pip shows the progress of its downloads, since torch alone takes minutes.
PIP_INSTALL = $(PY) -m pip install $(if $(CI),--quiet)

# Not beside the others: see the file.
INSTALL_APART = -m pip install --quiet --no-deps -r requirements-apart.txt --upgrade --target
# Beside the Triton of $(CONSTRAINTS): tests/kernels/triton/test_compiled_kernels.py compiles with both.
INSTALL_OLDEST_TRITON = -m pip install --quiet --no-deps triton -c constraints/oldest.txt --upgrade --target
ECOSYSTEM := .venv-ecosystem
DOCS := .venv-docs
DIST := .venv-dist
TRY := .venv-try
CUDA := .venv-cuda

MODEL ?= examples/demo_model

.DEFAULT_GOAL := help
.PHONY: help setup demo train-demo test test-rest test-slow test-all page quality format bench gpu zoo ecosystem ecosystem-lock images docs dist dist-try clean cuda-build

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## create .venv and install everything into it, once (PYTHON=python3.12, CONSTRAINTS=constraints/oldest.txt)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make setup: needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) -V 2>&1); set PYTHON=python3.11" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) -V) …"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Without build isolation: the build needs nothing but setuptools, and nothing is downloaded twice.
$(STAMP): $(INSTALLED_FROM) | $(PY)
	@echo "Installing the requirements; torch is large, the first time takes minutes …"
	@$(PIP_INSTALL) 'setuptools>=77' -c $(CONSTRAINTS) -r requirements-dev.txt
	@$(PY) $(INSTALL_APART) $(VENV)/apart
	@$(PY) $(INSTALL_OLDEST_TRITON) $(VENV)/oldest-triton
	@echo "Installing parallelformers_ng, editable …"
	@$(PIP_INSTALL) --no-build-isolation --no-deps -e .
	@$(PY) -m pip check
	@rm -f $(VENV)/.installed*
	@touch $@

demo: setup ## generate whole and on two workers, compare the tokens (MODEL=path-or-id, DEMO_ARGS=…)
	@$(PY) examples/demo.py --model $(MODEL) $(DEMO_ARGS)

train-demo: setup ## train the demo's model anew, a quarter of an hour (TRAIN_ARGS=--threads 4)
	@$(PY) examples/train_demo_model.py $(TRAIN_ARGS)

# Two files at a time. Only the files of the table are collected: collecting all takes half a minute.
PYTEST := $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
QUICK = -m quick $$(sed -n 's|^\([a-z_/0-9]*[.py]*\).*|tests/\1|p' tests/quick.txt | grep -v '^tests/$$' | sort -u)

test: setup ## run tests of every room, those of tests/quick.txt; or all of one folder but the slow ones (ROOM=wire, PYTEST_ARGS='-k plan -x')
	@$(PYTEST) $(if $(ROOM),-m 'not slow' tests/$(ROOM),$(QUICK)) $(PYTEST_ARGS)

test-rest: setup ## run what `make test` leaves, but the slow tests
	@$(PYTEST) -m 'not quick and not slow' $(PYTEST_ARGS)

test-slow: setup ## run the slow tests: servers, scripts that are killed, installations
	@$(PYTEST) -m slow $(PYTEST_ARGS)

test-all: setup ## run all tests
	@$(PYTEST) $(PYTEST_ARGS)

page: setup ## the server's page in Chromium, which it installs if it may (Debian)
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || apt-get install -y --no-install-recommends chromium
	@$(PY) -m pytest tests/serving/test_page.py $(PYTEST_ARGS)

quality: setup ## lint, formatting, types, order of imports and of C headers, unique names, plain words
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-cache
	@$(PY) -m tests.repository.c_headers
	@$(PY) -m tests.repository.unique_names
	@$(PY) -m tests.repository.plain_words

format: setup ## apply the formatting and the fixes that ruff knows
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

bench: setup ## measure against the peers on this machine (BENCH_ARGS=…)
	@$(PY) -m benchmarks $(BENCH_ARGS)

# PART: core, ranks, policies, lowbit, crowd, alone; each takes at most 270 s, and core and ranks run without it. PRETEND=1: on
# the stand-in for CUDA, which shows whether a part's files and imports are there.
gpu: setup ## the checks that need a CUDA device; without one, says so and succeeds (PART=ranks, PRETEND=1, GPU_ARGS=OUT)
	@PYTHON=$(PY) PART="$(PART)" PRETEND="$(PRETEND)" WITHOUT_DEVICE=succeed bash benchmarks/gpu.sh $(GPU_ARGS)

# Of the newest torch, unless told: CUDA_BUILD=constraints/oldest.txt. Gigabytes; `make clean` removes them.
CUDA_BUILD ?= constraints/newest.txt

cuda-build: $(CUDA)/.installed-$(basename $(notdir $(CUDA_BUILD))) ## what a build of torch with CUDA shows without a GPU (PYTHON=python3.13, CUDA_BUILD=constraints/oldest.txt)
	@$(CUDA)/bin/python -m benchmarks.cuda_build $(CUDA_BUILD_ARGS)

$(CUDA)/.installed-%: $(CUDA_BUILD) requirements-dev.txt requirements-apart.txt pyproject.toml setup.py
	@$(MAKE) --no-print-directory VENV=$(CUDA) $(CUDA)/bin/python
	@$(CUDA)/bin/python -m pip install $(if $(CI),--quiet) 'setuptools>=77' -c $(CUDA_BUILD) -r requirements-dev.txt
	@$(CUDA)/bin/python $(INSTALL_APART) $(CUDA)/apart
	@$(CUDA)/bin/python -m pip install --quiet --no-build-isolation --no-deps -e .
	@rm -f $(CUDA)/.installed*
	@touch $@

zoo: setup ## parity of every model family, tiny, and plans of their real sizes (ZOO_ARGS=…)
	@$(PY) -m benchmarks.full_size .full_size.json
	@$(PY) -m benchmarks.zoo --full-size .full_size.json $(ZOO_ARGS)

ecosystem: $(ECOSYSTEM)/.installed ## pipelines, Trainer, PEFT, lm-eval, … whole against cut, in a venv of their own (PYTEST_ARGS=…)
	@HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 $(ECOSYSTEM)/bin/python -m pytest tests/ecosystem tests/hosts/test_ray.py $(PYTEST_ARGS)

$(ECOSYSTEM)/.installed: requirements-ecosystem.txt constraints/ecosystem.lock requirements-apart.txt pyproject.toml setup.py
	@$(MAKE) --no-print-directory VENV=$(ECOSYSTEM) $(ECOSYSTEM)/bin/python
	@echo "Installing the libraries around a model; the first time takes minutes …"
	@$(ECOSYSTEM)/bin/python -m pip install $(if $(CI),--quiet) 'setuptools>=77' -r requirements-ecosystem.txt -c constraints/ecosystem.lock
	@$(ECOSYSTEM)/bin/python $(INSTALL_APART) $(ECOSYSTEM)/apart
	@$(ECOSYSTEM)/bin/python -m pip install --quiet --no-build-isolation --no-deps -e .
	@touch $@

ecosystem-lock: ## pin anew what `make ecosystem` installs, in constraints/ecosystem.lock
	@$(MAKE) --no-print-directory VENV=$(ECOSYSTEM) $(ECOSYSTEM)/bin/python
	@$(ECOSYSTEM)/bin/python -m pip install --quiet --dry-run --ignore-installed --report $(ECOSYSTEM)/report.json \
	  'setuptools>=77' -r requirements-ecosystem.txt
	@$(ECOSYSTEM)/bin/python constraints/lock.py < $(ECOSYSTEM)/report.json > $(ECOSYSTEM)/lock.txt
	@mv $(ECOSYSTEM)/lock.txt constraints/ecosystem.lock

images: ## build the container images of the server and ask the one for CPU for tokens (KINDS=cpu)
	@bash docker/images.sh

docs: $(DOCS)/.installed ## build the site into site/, strictly, in a venv of its own (the package is read, not imported)
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "built site/index.html"

$(DOCS)/.installed: requirements-docs.txt
	@$(MAKE) --no-print-directory VENV=$(DOCS) $(DOCS)/bin/python
	@$(DOCS)/bin/python -m pip install $(if $(CI),--quiet) -r requirements-docs.txt
	@touch $@

dist: $(DIST)/.installed ## build the source archive and a wheel for each Python of the machine into dist/, and check them (MINORS="11 12")
	@bash release/build.sh $(DIST)/bin/python

$(DIST)/.installed: requirements-dist.txt
	@$(MAKE) --no-print-directory VENV=$(DIST) $(DIST)/bin/python
	@$(DIST)/bin/python -m pip install $(if $(CI),--quiet) -r requirements-dist.txt
	@touch $@

dist-try: ## install a wheel of dist/ in a new environment without a compiler: demo, a killed worker, the server (PYTHON=python3.12)
	@rm -rf $(TRY)
	@$(MAKE) --no-print-directory VENV=$(TRY) $(TRY)/bin/python
	@$(TRY)/bin/python -m pip install $(if $(CI),--quiet) --no-index --find-links dist --no-deps parallelformers-ng
	@grep -v '^triton' $(CONSTRAINTS) > $(TRY)/constraints.txt # of the tests; a torch with CUDA names a version of its own
	@$(TRY)/bin/python -m pip install $(if $(CI),--quiet) -c $(TRY)/constraints.txt --find-links dist 'parallelformers-ng[serve]'
	@$(TRY)/bin/python -P release/try_wheel.py

clean: ## remove .venv, caches and built files
	@rm -rf $(VENV) $(ECOSYSTEM) $(DOCS) $(DIST) $(TRY) $(CUDA) build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@find parallelformers_ng -name '*.so' -delete
