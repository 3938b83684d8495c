# One target per chore; pre-commit and .ci/run call these and nothing else.
# Every Python has an environment of its own: .venv, and with PYTHON=python3.12 .venv-3.12.
PYTHON ?= python3
VENV := .venv$(patsubst python3%,-3%,$(filter python3.%,$(notdir $(PYTHON))))
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
# Folders of the product beside thinwire/, where links stand for them.
CARD := ops ps worker supervisor proto data
SHELL := /bin/bash
export TF_CPP_MIN_LOG_LEVEL ?= 3
# Tests of the benchmarks, of `make mutants` and of the wheel, not of what the wheel holds.
TOOLING := tests/bench tests/mutants tests/test_package_processes.py
# More than cores, for tests that start nodes wait; a process takes up to 2 GB.
TEST_PROCESSES ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 2 ? n + 1 : 4)))

.DEFAULT_GOAL := help
.PHONY: help setup demo test tooling engines backends lint types docs proto bench peers format product mutants chaos soak fuzz clean

help: ## This list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 12

setup: $(STAMP) ## Make .venv with everything pinned, and the command thinwire

# uv installs in a third of pip's time; where it cannot be had, pip does the same work. What uv
# leaves uncompiled is compiled here, and so are Thinwire's own files: every start of a node is then
# 4 s shorter where Python may not write (PYTHONDONTWRITEBYTECODE). A few packages hold files for
# other Pythons: "-".
# pyenv's python3.12 works only where that version is selected: then it is looked up.
# $(call environment,FOLDER,REQUIREMENTS)
define environment
	@python=$(PYTHON); $$python -c '' 2>/dev/null || \
	  python=$$(pyenv prefix "$$(pyenv whence $(PYTHON) | tail -n 1)")/bin/$(PYTHON); \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($$python --version): the pinned packages need CPython 3.11 or later;" \
	    "run for example: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }; \
	test -x $(1)/bin/python || $$python -m venv $(1)
	if $(1)/bin/python -m pip install --quiet uv && \
	   $(1)/bin/python -m uv pip install --quiet --python $(1)/bin/python -r $(2); \
	then :; else $(1)/bin/python -m pip install --quiet -r $(2); fi
endef

$(STAMP): requirements.txt requirements-dev.txt
	$(call environment,$(VENV),requirements-dev.txt)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	-$(BIN)/python -m compileall -q -j 0 $(VENV)/lib thinwire $(CARD) >/dev/null
	touch $@

demo: $(STAMP) ## AdaComp, 1 PS, 4 workers, a Supervisor, on this machine
	$(BIN)/python main.py --type_node=Cluster --flagfile=examples/demo.flags

# In what order: tests/schedule.py. Compiled files are written even where Python should not: three
# processes import 600 test files.
IN_ORDER := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) \
  --dist loadfile --no-loadscope-reorder -m "not product and not engines"

test: $(STAMP) ## All tests but those of make tooling, make engines and make product
	$(IN_ORDER) $(addprefix --ignore=,$(TOOLING))

tooling: $(STAMP) ## Tests of the benchmarks, of make mutants and of the wheel
	$(IN_ORDER) $(TOOLING)

engines: $(STAMP) ## Tests on Ray, Slurm and an S3 server, started here
	$(BIN)/python -m pytest -q -m "engines and not product"

# The environment of its own has no TensorFlow. torch for processors alone is a tenth of its download,
# where pip finds it. A broken download must not take the tests on JAX along.
BACKENDS := $(VENV)-backends
TORCH := torch==2.13.0
TORCH_SECONDS := 900
backends: $(BACKENDS)/.complete ## Tests on Keras' backends JAX and PyTorch, without TensorFlow
	@test -e $(BACKENDS)/.torch || { timeout $(TORCH_SECONDS) $(SHELL) -c '\
	    pip="$(BACKENDS)/bin/python -m pip install --quiet"; \
	    $$pip $(TORCH)+cpu 2>/dev/null || $$pip $(TORCH)' && touch $(BACKENDS)/.torch; } || true
	KERAS_BACKEND=jax $(ON_BACKEND)
	@test ! -e $(BACKENDS)/.torch || KERAS_BACKEND=torch $(ON_BACKEND)
	@test -e $(BACKENDS)/.torch || echo "SKIPPED: the tests on torch, because pip did not install" \
	    "$(TORCH) within $(TORCH_SECONDS) s; the tests on JAX have passed"

# DGT's kernels are numpy's on these backends.
ON_BACKEND = PYTHONDONTWRITEBYTECODE= $(BACKENDS)/bin/python -m pytest -q -n $(TEST_PROCESSES) \
  --dist loadfile --no-loadscope-reorder -m "not product and not engines" tests/backends \
  tests/ops/kernels tests/worker/core/test_on_device.py --ignore=tests/ops/kernels/test_contributions.py

$(BACKENDS)/.complete: requirements-backends.txt
	$(call environment,$(BACKENDS),requirements-backends.txt)
	touch $@

# PART=DIGEST, of a commit, chooses a tenth of the mixes and of what else needs no nodes.
PARTS := tests/test_product.py tests/test_compiled_optimizers.py tests/ops tests/worker \
  tests/thinwire/script/keras tests/thinwire/models tests/thinwire/simulator -k "not triples"
product: $(STAMP) ## Thousands of combinations of policies, and every mode under faults
	$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist worksteal \
	  -m "product and not engines $(if $(PART),and not processes)" \
	  $(if $(PART),--part=$(PART) $(PARTS))

fuzz: $(STAMP) ## Every decoder, coverage-guided: SECONDS of each, or of one TARGET
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60) $(addprefix --target ,$(TARGET))

# ONLY= runs one record or area; DRAWN=300 SEED=1 draws mutants from the whole product instead;
# JOBS=2 copies of the tree; FRESH=1 forgets earlier results.
mutants: $(STAMP) ## Plant the recorded mistakes, each of which must fail a test
	$(BIN)/python -m tests.mutants --jobs $(or $(JOBS),2) $(addprefix --only ,$(ONLY)) \
	  $(addprefix --drawn ,$(DRAWN)) $(addprefix --seed ,$(SEED)) $(if $(FRESH),--fresh)

# RUNS=1000 PROCESSES=100 is the whole; SEED= plays others, SECONDS= begins none after so many.
chaos: $(STAMP) ## Random faults on RUNS=500 simulated and PROCESSES=6 real runs, whose histories are checked
	$(BIN)/python -m tests.chaos.search --runs $(or $(RUNS),500) --processes $(or $(PROCESSES),6) \
	  --seed $(or $(SEED),0) $(addprefix --seconds ,$(SECONDS))

# It must run alone. SOAK=--protected: with certificates and a token; python -m tests.chaos.soak --help
soak: $(STAMP) ## MINUTES=30 of faults on real processes, a report in OUT=runs/soak
	$(BIN)/python -m tests.chaos.soak --minutes=$(or $(MINUTES),30) --out=$(or $(OUT),runs/soak) \
	  $(SOAK)

lint: $(STAMP) ## Style, import arrows, words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.words

docs: $(STAMP) ## README and docs/ as pages in build/docs; a warning is an error
	$(BIN)/python -m sphinx -q --fail-on-warning --keep-going -c docs . build/docs
	@echo "the pages: build/docs/docs/index.html"

types: $(STAMP) ## mypy on the package
	$(BIN)/mypy

format: $(STAMP) ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP) ## Generate proto/*_pb2*
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
	  thinwire/proto/thinwire.proto thinwire/proto/peers.proto

bench: $(STAMP) ## Costs of this machine as ratios to their limits and peers, to bench/results
	$(BIN)/python -m bench $(or $(BENCH),--peers)

# What cannot be installed is left out. PEERS takes options such as --only, --link or --resume.
peers: $(STAMP) ## The same work on other systems' own exchange
	-bench/peers/setup.sh
	$(BIN)/python -m bench.peers $(PEERS)

clean: ## Remove caches and runs, keep .venv
	rm -rf runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
