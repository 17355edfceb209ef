# The front door. Everything a target needs goes into the private .venv, with plain pip; nothing outside this folder
# is touched.
#
#   make demo     set up, then run the main job: repeated sampling over word problems with the model in the package
#   make test     set up, then run every test that this machine can
#   make test-cpus  the rooms whose sums hang on the processor's libraries, as on processors with less than this one
#   make check    ruff, mypy, the house's laws, generated docs up to date, the almanac's records, the sources' weight
#   make bench    the figures of the engine on this machine: a table, and build/bench.json
#   make reliability  load, faults and bad input tried on a server with a fake engine: docs/reliability.md (40 minutes)
#   make soak     the same server under load for an hour, then one with the demo model, their memory looked at
#   make real     published checkpoints, from packages: against transformers and lm_eval, tools, forms, streams, builds
#   make docs     write the generated pages anew (docs/cli.md, config.md, http.md, files.md, coming_from_vllm.md ...)
#   make packaging  installs what lints deploy/ and builds wheels, Modal's client and Ray; else `make test` skips those by name
#   make wheel    the wheel and source distribution of penstock, and penstock-client's wheel, into dist/
#   make setup    what the others begin with
#
# An image that has torch already, and no registry (a GPU machine): `make test PY=python3` installs nothing and runs
# the sources as they lie here.

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
PYTHON ?= python3
DEMO ?=
TESTS ?= tests

PIP := $(PY) -m pip install -qq
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# A stamp tells that a part is in; one older than pyproject.toml is looked at again. With PY=... there are none.
# Test workers of one thread each are faster than one of two: the tests' models are tiny. Three on two cores, since a
# worker waits two fifths of its time for processes that it has started: 6:22 in place of 6:58. Files are handed out in
# the order of their names, not by their number of tests: the few long tests of a file come early, short ones are last.
# Bytecode is kept, whatever the shell says: tests start hundreds of processes, and each would compile the package anew.
ifeq ($(origin PY),command line)
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
else
RUNTIME := $(VENV)/runtime.stamp
DEVELOPMENT := $(VENV)/development.stamp
RELIABILITY := $(VENV)/reliability.stamp
PACKAGING := $(VENV)/packaging.stamp
REAL := $(VENV)/real.stamp
WHEEL := $(VENV)/wheel.stamp
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder
endif

# How to go on behind the demo: what was set up is on no PATH.
ifeq ($(origin PY),command line)
GO_ON := "go on with: PYTHONPATH=src $(PY) -m penstock serve demo"
else
GO_ON := "go on with: source $(VENV)/bin/activate && penstock serve demo    (or $(VENV)/bin/penstock serve demo)"
endif

.DEFAULT_GOAL := help
.PHONY: help setup packaging wheel demo test test-cpus check lint types laws almanac weight bench reliability soak real docs

help:
	@sed -n 's/^#   make/make/p' Makefile

setup: $(DEVELOPMENT)

packaging: $(PACKAGING)

demo: $(RUNTIME)
	$(PY) -m penstock demo $(DEMO)
	@echo $(GO_ON)

test: $(DEVELOPMENT)
	PYTHONDONTWRITEBYTECODE= $(PY) -m pytest $(WORKERS) $(TESTS)

# A limit above what the processor has changes nothing. AMX can't be emulated where it isn't.
CPU_ROOMS := tests/kernels/test_rows_alone.py tests/kernels/test_linear.py tests/kernels/test_linear_int.py \
  tests/kernels/test_attention.py tests/kernels/test_layer_kv.py
CPUS := "as it is=" \
  "AVX-512 with bf16=ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" \
  "AVX-512=ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512" \
  "AVX2=ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2"

test-cpus: $(DEVELOPMENT)
	@for cpu in $(CPUS); do \
	  echo "== $${cpu%%=*}"; env $${cpu#*=} $(PY) -m pytest -q $(WORKERS) $(CPU_ROOMS) || exit $$?; \
	done

check: lint types laws almanac weight

lint: $(DEVELOPMENT)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(DEVELOPMENT)
	$(PY) -m mypy

laws: $(DEVELOPMENT)
	$(PY) scripts/make_docs.py --check
	$(PY) -m pytest -q tests/house

almanac: $(DEVELOPMENT)
	@if [ -d almanac/records ]; then $(PY) -m penstock almanac validate; else echo "almanac: no records yet"; fi

weight: $(DEVELOPMENT)
	$(PY) scripts/weight.py fragments=120 pronouns=90 fmt_skip=45 long=150 docs_words=50000

bench: $(DEVELOPMENT)
	$(PY) benchmarks/run_all.py

reliability: $(RELIABILITY)
	OMP_NUM_THREADS=1 $(PY) tests/reliability/run.py

soak: $(DEVELOPMENT)
	OMP_NUM_THREADS=1 $(PY) tests/harness/soak.py
	OMP_NUM_THREADS=1 $(PY) tests/reliability/soak_model.py

real: $(REAL)
	$(PY) tests/real/run.py

# The wheel is built of the source distribution, so that this is known to be whole.
wheel: $(WHEEL)
	rm -f dist/penstock*
	$(PY) -m build --outdir dist .
	$(PY) -m build --wheel --outdir dist packages/client

docs: $(DEVELOPMENT)
	$(PY) scripts/make_docs.py

# --- set-up

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "penstock needs Python 3.11 or later; $(PYTHON) is older: make PYTHON=python3.12"; exit 2; }
	@test -x $(PY) || { echo "setup: a virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@touch $@

# On Linux without an NVIDIA driver the pinned PyTorch is asked for by itself first: a registry that offers a CPU build
# of it gives that one, where a range would take gigabytes of CUDA. A torch that is in already stays.
$(VENV)/torch.stamp: $(VENV)/python.stamp
	@if $(PY) -c 'import torch; v = torch.__version__.split("."); exit((int(v[0]), int(v[1])) < (2, 11))' 2>/dev/null; then \
	  :; \
	elif [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null && [ ! -e /proc/driver/nvidia/version ]; then \
	  echo "setup: PyTorch, for the CPU"; $(PIP) "torch==2.13.0"; \
	else \
	  echo "setup: PyTorch"; $(PIP) "torch>=2.11"; \
	fi
	@touch $@

$(VENV)/runtime.stamp: pyproject.toml $(VENV)/torch.stamp
	@echo "setup: penstock and what it runs on"
	@$(PIP) -e ".[plot]"
	@touch $@

$(VENV)/development.stamp: $(VENV)/runtime.stamp
	@echo "setup: what tests and checks need"
	@$(PIP) -e ".[dev]"
	@if [ "$$(uname -sm)" = "Linux x86_64" ] && ! $(PY) -c 'import triton' 2>/dev/null; then \
	  echo "setup: Triton, whose interpreter runs the CUDA kernels' tests here"; $(PIP) "triton==3.6.0"; \
	fi
	@if command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null; then \
	  echo "setup: Playwright, for the almanac's page in the Chromium that is here"; $(PIP) -e ".[browser]"; \
	fi
	@touch $@

$(VENV)/reliability.stamp: $(VENV)/development.stamp
	@echo "setup: clients (lm_eval, schemathesis, langchain, pydantic-ai) that are tried on a server"
	@$(PIP) -e ".[reliability]"
	@touch $@

$(VENV)/real.stamp: $(VENV)/development.stamp
	@echo "setup: what reads GGUF files, and lm_eval with its backend of transformers"
	@$(PIP) -e ".[real]"
	@touch $@

$(VENV)/packaging.stamp: $(VENV)/development.stamp
	@echo "setup: Modal's client, Ray, and what lints deploy/"
	@$(PIP) -e ".[packaging]"
	@touch $@

$(VENV)/wheel.stamp: $(VENV)/python.stamp
	@echo "setup: what builds wheels"
	@$(PIP) "build>=1.2"
	@touch $@
