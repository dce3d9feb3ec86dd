# Every target sets the environment up by itself; the second time that takes no time.
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/demo.yaml

.PHONY: help setup demo serve test test-slow test-gpu chaos bench bench-encoder bench-mrope bench-cache bench-captioning bench-ingress bench-autoscaling bench-e2e soak capacity lint format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup:  ## the virtual environment, from the lock
	@bash scripts/setup.sh

demo: setup  ## start everything, caption sample pictures, ask about one, show what came from the cache
	@$(BIN)/lookonce demo

serve: setup  ## serve $(CONFIG) until Ctrl-C
	@$(BIN)/lookonce serve --config $(CONFIG)

test: setup lint  ## lint, types, and every test that is not marked slow
	@$(BIN)/python -m pytest

test-slow: setup  ## the slow tests, file by file, with a table of their times
	@PYTHON=$(BIN)/python bash scripts/test-slow.sh

chaos: setup  ## mixed load while processes are killed, LOOKONCE_CHAOS_SECONDS (1200) long
	@LOOKONCE_CHAOS_SECONDS=$${LOOKONCE_CHAOS_SECONDS:-1200} $(BIN)/python -m pytest -m slow -s tests/service/failures/test_chaos.py

test-gpu: setup  ## tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu

bench: setup  ## benchmarks; results are noted in benchmarks/RESULTS.md
	@$(BIN)/python -m benchmarks.accuracy

bench-encoder: setup  ## encoder: one image at a time, packed, and replayed
	@$(BIN)/python -m benchmarks.encoder

bench-mrope: setup  ## M-RoPE positions beside vLLM's
	@$(BIN)/python -m benchmarks.mrope

bench-cache: setup  ## the cache's transport next to redis-py and a raw socket
	@$(BIN)/python -m benchmarks.cache

bench-captioning: setup  ## captioning jobs beside each pool alone and a plain vLLM script
	@$(BIN)/python -m benchmarks.captioning

bench-ingress: setup  ## text-only requests through our ingress and through vllm serve, in turns
	@$(BIN)/python -m benchmarks.ingress

bench-autoscaling: setup  ## a recorded load, 1 to 50 clients and back, with a time line of both pools
	@$(BIN)/python -m benchmarks.autoscaling

bench-e2e: setup  ## the service beside a monolithic vllm serve; BENCH_E2E=--quick for a smoke test
	@$(BIN)/python -m benchmarks.e2e $(BENCH_E2E)

soak: setup  ## an hour of mixed load; memory of every process over time, with a plot; SOAK="--minutes 8" for less
	@$(BIN)/python -m benchmarks.soak $(SOAK)

capacity: setup  ## how large a cluster must be, from 10 to 100,000 requests a second
	@$(BIN)/python -m benchmarks.capacity --table

lint: setup  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup  ## let ruff mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
