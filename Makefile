# `make serve` and `make test` set up what they need in .venv and reuse it afterwards.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/llama.yaml
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

.PHONY: serve test test-fast test-matrix test-gpu chaos lint bench bench-gpu install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

serve: install
	$(BIN)/python -m deploy.launch $(CONFIG) $(ARGS)

# Pure scheduler, cache, sampler, protocol: under a minute.
test-fast: install
	$(BIN)/python -m pytest tests/unit -q

# Everything, real processes included.
test: install
	$(BIN)/python -m pytest tests -q

# The full token-exact product (architectures x tp x pp x page x chunk x cache x retraction).
test-matrix: install
	$(BIN)/python -m pytest tests/integration/test_token_exact.py -q --full-matrix

# What only a GPU can show; everything is skipped without one.
test-gpu: install
	$(BIN)/python -m pytest tests/gpu -q -rs

# Every role killed and stopped under load, scaling, updates, cut clients: some 20 minutes.
chaos: install
	$(BIN)/python -m pytest tests/chaos tests/integration/test_proxies.py -m full_chaos -q -s --full-chaos

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy engine

bench: install
	$(BIN)/python benchmarks/radix.py
	$(BIN)/python benchmarks/serving.py

# Needs a GPU of 80 GB; some five minutes, by estimate.
bench-gpu: install
	$(BIN)/python benchmarks/gpu.py --save

clean:
	rm -rf $(VENV) build *.egg-info
