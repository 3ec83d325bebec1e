# Everything a user or CI runs. Each target prepares .venv/ first and does nothing twice.
PY := .venv/bin/python
ARGS ?=
# Threads that spin while they wait slow everything down on a machine that others use too.
export OMP_WAIT_POLICY ?= passive
# One thread a process, and as many processes as there are cores: tests are many and small.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --maxprocesses 4 --dist worksteal

# Many draws or many requests: not for `make check`.
LONG := --ignore tests/statistical --ignore tests/engine/test_distribution.py --ignore tests/engine/test_soak.py

.PHONY: help setup serve demo bench bench-gateway bench-peers gpu-check test check test-slow clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

setup:  ## prepare .venv/ (Python 3.11 or 3.12)
	@scripts/setup.sh

serve: setup  ## serve the default model at http://127.0.0.1:8080 (ARGS="--port 9000 ...")
	@exec $(PY) -m specgate serve $(ARGS)

demo: setup  ## start a server, send it real prompts of several kinds, print what was decided and measured
	@exec $(PY) -m specgate demo $(ARGS)

bench: setup  ## compare auto with fixed policies under load (ARGS="--duration 60 --slice 6 ..."); writes out/bench/
	@exec $(PY) -m specgate bench sweep --out out/bench $(ARGS)

test: setup  ## all tests but the slow ones
	@$(PYTEST) -m "not slow" $(ARGS)

bench-gateway: setup  ## what the gateway itself costs, in front of an instant upstream; writes out/bench/
	@$(PY) -m specgate.bench.gateway $(ARGS)

bench-peers: setup  ## beside llama.cpp and vLLM where PEERS="llama.cpp=FOLDER vllm=FOLDER" names their environments
	@$(PY) scripts/bench_peers.py $(foreach peer,$(PEERS),--peer $(peer)) $(ARGS)

gpu-check:  ## kernels, equality and speed on this machine's GPU, with its own python3; writes out/gpu_check.json
	@exec python3 scripts/gpu_check $(ARGS)

check: setup  ## lint, types, import rules, fast tests
	@$(PY) -m ruff check -q .
	@$(PY) -m mypy
	@.venv/bin/lint-imports --no-logo
	@$(PYTEST) -m "not slow and not model and not e2e" $(LONG) $(ARGS)

test-slow: setup  ## soak, long fuzzing: everything marked slow
	@$(PY) -m pytest -q -m slow --timeout=1800 $(ARGS)

clean:  ## remove .venv/ and caches
	@rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
